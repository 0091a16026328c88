"""One rank of a policy on many devices: a policy.Policy whose weights and samples are sharded (FSDP2).

    ranks = Ranks(rank=0, count=2, store="10.0.0.1:4711")
    policy = RankedPolicy(config, "PATH", torch.device("cuda:0"), ranks)

policy_group.py starts one such process per device. All ranks make the same calls, each with its share of the
same mini-batches, so that all ranks make the same decisions. They exchange only tensors: weights are gathered
layer by layer, and gradients are summed. Everything else is in policy.py.

Not covered: tensor, pipeline, sequence and expert parallelism, replicas of sharded groups (HSDP), shared
prompts (causal_lm.shared_states), for which all ranks would have to agree in every pass.
"""

import os
from collections import Counter
from dataclasses import dataclass, field
from datetime import timedelta
from types import MethodType

import psutil
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, MixedPrecisionPolicy
from torch.distributed.fsdp import fully_shard, register_fsdp_forward_method

from causal_lm import layers_of, logprobs_and_entropy, set_dtypes
from cluster.weights import send
from policy import Policy, Sample, micro_batches
from genrm_server import check_own_gpus
from reward_worker import check_files
from rollout import served_weights
from weight_sync import summed

# Time limit of a collective operation. It can be long, because PolicyGroup detects a dead rank immediately
# and ends the others.
COLLECTIVE_TIMEOUT = timedelta(hours=4)


class RankedPolicy(Policy):
    """One rank of a policy, as a Ray actor. All ranks return the same metrics.

    Args:
        config: The trainer's configuration.
        source: A folder or a Hub name.
        device: The device of this rank.
        ranks: The position of this rank among all ranks.
    """

    def __init__(self, config, source: str, device: torch.device, ranks: "Ranks"):
        self.ranks = ranks
        self.is_main_rank = ranks.rank == 0
        if device.type == "cuda":
            check_own_gpus()
            if config.policy_gpu_share < 1:
                torch.cuda.set_per_process_memory_fraction(config.policy_gpu_share, device)
        self.is_sharded = ranks.count > 1 or config.policy_offload
        if self.is_sharded or config.num_threads:
            threads = config.num_threads
            if not threads and config.policy_offload:  # The optimizer runs on the CPU.
                threads = len(os.sched_getaffinity(0)) // ranks.per_node
            torch.set_num_threads(threads or 1)
        check_files(ranks.files)  # Ranks may have been restarted since the run began.
        ranks.join(device)
        if self.is_sharded:
            # Weights in their stored type are mapped into memory, and ranks on a node share the mapping.
            self.load_dtype = "auto"
        super().__init__(config, source, device)

    def load(self, source: str):
        model = super().load(source)
        if self.is_sharded:
            model.reshard()  # The check of log-probabilities gathered the weights.
        return model

    def setup_model(self, model) -> None:
        """Shard the model before it is copied, so that each rank reads only its rows of the files."""
        if self.is_sharded:
            shard(model, self.ranks, self.config.policy_offload)
            set_dtypes(model, self.config.lora_rank, self.device.type)
        else:
            super().setup_model(model)
        # FSDP gathers the weights of a model only in registered methods of the model.
        model.logprobs_and_entropy = MethodType(logprobs_and_entropy, model)
        register_fsdp_forward_method(model, "logprobs_and_entropy")

    def model_logprobs(self, model, *arguments):
        return model.logprobs_and_entropy(*arguments)

    def all_reduce(self, sums: Counter) -> Counter:
        """Return the totals of these sums over all ranks."""
        total = Counter()
        for found in self.ranks.gather(sums):
            total.update(found)
        return total

    def forward(self, samples: list[Sample], model=None):
        """Compute log-probabilities like Policy, with the same number of passes on all ranks.

        All ranks must take part when a pass gathers layers. A rank with fewer micro-batches than other ranks
        therefore makes extra passes on two tokens, whose gradient is 0.
        """
        num_passes = len(micro_batches([sample.length for sample in samples], self.max_tokens))
        most_passes = max(self.ranks.gather(num_passes))
        yield from super().forward(samples, model)
        for _ in range(most_passes - num_passes):
            temperature = self.config.temperature
            logprobs, _ = self.model_logprobs(model or self.model, [[0, 0]], [1], temperature, False)
            if torch.is_grad_enabled():
                (logprobs.sum() * 0.0).backward()

    def logprobs_of(self, samples: list[Sample], model=None):
        yield from super().logprobs_of(samples, model)
        if self.is_sharded:  # Without a backward pass, FSDP does not reshard embedding and head.
            (model or self.model).reshard()

    def send_weights(self, folders: dict, path: str, dtype: torch.dtype) -> tuple[set, dict]:
        """Send the weights from rank 0 to the WeightFolder actors in `folders` ({node: actor}) at `path`.

        Returns:
            On rank 0, the nodes that no longer exist and the checksums of the weights (see weight_sync.py).
            Other ranks return an empty set and an empty dict.
        """
        gone = set()
        sums = {}
        weights = served_weights(self, dtype)
        try:
            if self.is_main_rank:
                gone = send(summed(weights, sums), folders, path)
        finally:
            for _ in weights:  # Every rank must take part, even after an error on the main rank.
                pass
        return gone, sums


@dataclass
class Ranks:
    """The position of this process among the ranks. A single rank needs only a `store`."""

    rank: int = 0
    count: int = 1
    store: str = ""  # host:port of the TCPStore through which the ranks connect
    address: str = "127.0.0.1"  # of this node, for the other ranks
    per_node: int = 1  # maximum number of ranks on a node
    # SHA-256 of each file of the loss, if the loss is a function of the user's own.
    files: dict[str, str] = field(default_factory=dict)

    def join(self, device: torch.device) -> None:
        """Connect this rank to the others, and return when all ranks have joined."""
        # A device mesh creates groups with this default; no argument sets their time limit.
        dist.distributed_c10d.default_pg_timeout = COLLECTIVE_TIMEOUT
        if "GLOO_SOCKET_IFNAME" not in os.environ:
            os.environ["GLOO_SOCKET_IFNAME"] = interface_of(self.address)
        host, port = self.store.rsplit(":", 1)
        store = dist.TCPStore(host, int(port), is_master=False, timeout=timedelta(minutes=5))
        dist.init_process_group(
            "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo",
            store=store,
            rank=self.rank,
            world_size=self.count,
            timeout=COLLECTIVE_TIMEOUT,
        )
        self.mesh = init_device_mesh(device.type, (self.count,))

    def gather(self, value) -> list:
        """Return the values that all ranks pass."""
        values = [None] * self.count
        dist.all_gather_object(values, value)
        return values


def interface_of(address: str) -> str:
    """Return the network interface with this address. By default, gloo often takes the loopback interface."""
    for name, addresses in psutil.net_if_addrs().items():
        if address in [one.address for one in addresses]:
            return name
    raise RuntimeError(
        f"no network interface has the address {address}; set GLOO_SOCKET_IFNAME to the name of an interface"
    )


def shard(model, ranks: Ranks, offload: bool) -> None:
    """Shard each layer over the ranks, and shard embedding, final norm and head as one group.

    Between two passes, each rank keeps 1/count of all weights, in the types of causal_lm.set_dtypes. On a
    GPU, layers are gathered in bf16, and embedding and head in float32, which are the types of a single
    device's matrix products. Other parameters of the layers, such as norms, A_log, and the routing biases of
    Ernie-4.5, are gathered in bf16 as well, whereas a single device and vLLM use A_log and routing biases in
    float32. Gradients are summed over ranks, not averaged, because the loss already divides by the tokens of
    all ranks.

    Args:
        model: The model. Its weights may still be mapped files.
        offload: Whether to keep the shards in the host's memory.
    """
    options = dict(mesh=ranks.mesh)
    precision = MixedPrecisionPolicy()
    if ranks.mesh.device_type == "cuda":
        precision = MixedPrecisionPolicy(torch.bfloat16, torch.float32, cast_forward_inputs=False)
        if offload:
            options["offload_policy"] = CPUOffloadPolicy()
    for layer in reversed(layers_of(model, "--policy-ranks")):  # inner layers before outer ones
        fully_shard(layer, mp_policy=precision, **options)
    kind = type(model)
    fully_shard(model, **options)
    # fully_shard makes a subclass. transformers saves the code of the class with this name and module.
    type(model).__name__, type(model).__module__ = kind.__name__, kind.__module__
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.set_gradient_divide_factor(1.0)
            module.set_force_sum_reduction_for_comms(True)  # gloo can only sum.
