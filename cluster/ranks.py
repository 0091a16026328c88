"""One rank of a policy over many devices: policy.Policy, its weights split (FSDP2), its samples dealt out.

    ranks = Ranks(rank=0, count=2, store="10.0.0.1:4711")
    policy = RankedPolicy(config, "PATH", torch.device("cuda:0"), ranks)

policy_group.py starts one such process per device. All ranks do the same calls, each with its own samples of
the same mini-batches, so that each decision is the same everywhere. Only tensors travel between them: weights
are gathered layer by layer, gradients are summed. Everything else is policy.py's.

Left out: tensor, pipeline, sequence and expert parallelism, replicas of groups (HSDP), compilation. Prompts
are not shared (speedups.py), as ranks would have to agree on it for each pass.
"""

import os
from collections import Counter
from dataclasses import dataclass
from datetime import timedelta
from types import MethodType

import psutil
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, MixedPrecisionPolicy, OffloadPolicy
from torch.distributed.fsdp import fully_shard, register_fsdp_forward_method

from policy import Policy, Sample, layers_of, logprobs_and_entropy, micro_batches, set_dtypes
from cluster.weights import send
from rollout import served_weights

# of a collective; whoever started the ranks sees a dead one at once, and ends the others
PATIENCE = timedelta(hours=4)


class RankedPolicy(Policy):
    """A rank of many, or the only one; a Ray actor. All ranks have the same results."""

    def __init__(self, config, source: str, device: torch.device, ranks: "Ranks"):
        self.ranks = ranks
        self.is_first = ranks.rank == 0
        if device.type == "cuda" and config.policy_gpu_share < 1:
            torch.cuda.set_per_process_memory_fraction(config.policy_gpu_share, device)
        if ranks.count > 1:
            threads = config.num_threads
            if not threads and config.policy_offload:  # Adam is on the CPU
                threads = len(os.sched_getaffinity(0)) // ranks.per_node
            torch.set_num_threads(threads or 1)
        ranks.join(device)
        self.is_split = ranks.count > 1 or config.policy_offload
        if self.is_split:
            # As they are stored: on a CPU that only maps the files into memory, which ranks of a node share.
            self.read_as = "auto"
        super().__init__(config, source, device)

    def load(self, source: str):
        model = super().load(source)
        if self.is_split:
            model.reshard()  # after the check
        return model

    def place(self, model) -> None:
        """Split, each rank holds its rows alone, as the files lie in memory that nobody has copied yet."""
        if self.is_split:
            model.shares_prompts = False
            shard(model, self.ranks, self.config.policy_offload)
            set_dtypes(model, self.config, self.device.type)
        else:
            super().place(model)
        # As a method of the model: its weights are whole only within a method that FSDP knows of.
        model.logprobs_and_entropy = MethodType(logprobs_and_entropy, model)
        register_fsdp_forward_method(model, "logprobs_and_entropy")

    def compute(self, model, *arguments):
        return model.logprobs_and_entropy(*arguments)

    def total(self, sums: Counter) -> Counter:
        return self.ranks.sum(sums)

    def forward(self, samples: list[Sample], model=None):
        """All ranks make equally many passes, or one would wait for ever for the others to gather a layer."""
        limit = self.max_tokens
        own = len(micro_batches([sample.length for sample in samples], limit))
        most = self.ranks.most(own)  # agreed on before the first pass
        yield from super().forward(samples, model)
        for _ in range(most - own):
            logprobs, _ = self.compute(model or self.model, [[0, 0]], [1], self.config.temperature, False)
            if torch.is_grad_enabled():
                (logprobs.sum() * 0.0).backward()

    def score(self, samples: list[Sample], model=None):
        yield from super().score(samples, model)
        if self.is_split:  # without a backward pass it would go on holding its embedding and head
            (model or self.model).reshard()

    def send_weights(self, folders: dict, dtype: torch.dtype) -> set:
        """From rank 0 to WeightFolders, {node: its actor}. Returns the nodes that are gone."""
        if self.is_first:
            return send(served_weights(self, dtype), folders)
        for _ in self.weights(dtype):  # gathered by all ranks together
            pass
        return set()


@dataclass
class Ranks:
    """This process among the ranks that hold the policy together; by default it is alone."""

    rank: int = 0
    count: int = 1
    store: str = ""
    """host:port of the TCPStore where they meet."""
    address: str = "127.0.0.1"
    """This node's, where the others reach it."""
    per_node: int = 1
    """The largest number of ranks on a node."""

    def join(self, device: torch.device) -> None:
        """Returns when all ranks have joined."""
        # Groups that device meshes make know no other time limit.
        dist.distributed_c10d.default_pg_timeout = PATIENCE
        if "GLOO_SOCKET_IFNAME" not in os.environ:
            os.environ["GLOO_SOCKET_IFNAME"] = interface_of(self.address)
        host, port = self.store.rsplit(":", 1)
        store = dist.TCPStore(host, int(port), is_master=False, timeout=timedelta(minutes=5))
        dist.init_process_group(
            "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo",
            store=store,
            rank=self.rank,
            world_size=self.count,
            timeout=PATIENCE,
        )
        self.mesh = init_device_mesh(device.type, (self.count,))

    def most(self, number: int) -> int:
        """The largest of all ranks' numbers."""
        value = torch.tensor(number)
        dist.all_reduce(value, dist.ReduceOp.MAX)
        return int(value)

    def sum(self, sums: Counter) -> Counter:
        """These sums over all ranks."""
        of_ranks = [None] * self.count
        dist.all_gather_object(of_ranks, sums)
        total = Counter()
        for found in of_ranks:
            total.update(found)
        return total


def interface_of(address: str) -> str:
    """The interface with this address: gloo would take that of the host's name, often the loopback."""
    for name, addresses in psutil.net_if_addrs().items():
        if address in [one.address for one in addresses]:
            return name
    raise RuntimeError(f"no network interface has the address {address}; name one in GLOO_SOCKET_IFNAME")


def shard(model, ranks: Ranks, offload: bool = False) -> None:
    """Splits the weights over the ranks, layer by layer; embedding, final norm and head are one part.

    What stays between two passes is 1/count of everything, in float32. On a GPU the layers are gathered in
    bf16, embedding and head in float32, as one device alone computes them. The gradients of the ranks are
    summed, not averaged: the loss divides by the tokens of all of them already. offload: the shards live in
    the host's memory.
    """
    options = dict(mesh=ranks.mesh, offload_policy=OffloadPolicy())
    precision = MixedPrecisionPolicy()
    if ranks.mesh.device_type == "cuda":
        precision = MixedPrecisionPolicy(torch.bfloat16, torch.float32, cast_forward_inputs=False)
        if offload:
            options["offload_policy"] = CPUOffloadPolicy()
    for layer in reversed(layers_of(model, "policy_ranks")):  # the inner ones first
        fully_shard(layer, mp_policy=precision, **options)
    fully_shard(model, **options)
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.set_gradient_divide_factor(1.0)
            module.set_force_sum_reduction_for_comms(True)  # a plain sum; gloo has nothing else
