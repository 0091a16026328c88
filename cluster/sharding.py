"""A policy over many devices: who this process is among its ranks, and how a model is split over them (PyTorch's FSDP2).

    ranks = Ranks(rank=0, count=2, store="10.0.0.1:4711")    # one such process per device; Ranks() is a process of its own
    ranks.join(torch.device("cuda:0"))
    shard(model, ranks)                                      # each rank holds 1/count of every weight, gradient and moment

Used by policy.py in every rank; policy_group.py starts the ranks. All ranks get the same samples and make the same plan, so that
each decision is the same everywhere, and only tensors travel: weights are gathered layer by layer, gradients are summed.

Left out: tensor, pipeline, sequence and expert parallelism, replicas of groups (HSDP), compilation.
"""

import fcntl
import os
import socket
import struct
from collections import Counter
from contextlib import suppress
from dataclasses import dataclass
from datetime import timedelta

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, MixedPrecisionPolicy, OffloadPolicy, fully_shard
from transformers import GradientCheckpointingLayer

PATIENCE = timedelta(hours=4)  # of a collective; whoever started the ranks sees a dead one at once, and ends the others


@dataclass
class Ranks:
    """This process among the ranks that hold the policy together. Alone, which is the default, it sends nothing."""

    rank: int = 0
    count: int = 1
    store: str = ""
    """host:port of the TCPStore where they meet."""
    address: str = "127.0.0.1"
    """This node's, where the others reach it."""
    turn: int = 0
    turns: int = 1
    """This rank's number among those of its node, and the largest number of ranks on a node."""

    def join(self, device: torch.device) -> None:
        """Returns when all ranks have joined."""
        # Groups that device meshes make know no other time limit.
        dist.distributed_c10d.default_pg_timeout = PATIENCE
        if "GLOO_SOCKET_IFNAME" not in os.environ:
            os.environ["GLOO_SOCKET_IFNAME"] = interface_of(self.address)
        host, port = self.store.rsplit(":", 1)
        store = dist.TCPStore(host, int(port), is_master=False, timeout=timedelta(minutes=5))
        backend = "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo"
        dist.init_process_group(backend, store=store, rank=self.rank, world_size=self.count, timeout=PATIENCE)
        self.mesh = init_device_mesh(device.type, (self.count,))

    def by_turns(self, make):
        """What `make()` gives, one rank of a node after the other: a host holds one whole model at a time, not one for each."""
        for turn in range(self.turns):
            if turn == self.turn:
                made = make()
            if self.count > 1:
                dist.all_reduce(torch.zeros(1))  # a barrier: here all wait for the one whose turn it is
        return made

    def agree(self, value):
        """Rank 0's value, for all."""
        values = [value]
        if self.count > 1:
            dist.broadcast_object_list(values, src=0)
        return values[0]

    def sum(self, sums: Counter, keys: tuple[str, ...]) -> Counter:
        """These sums over all ranks."""
        if self.count == 1:
            return sums
        values = torch.tensor([sums[key] for key in keys], dtype=torch.float64)
        dist.all_reduce(values)
        return Counter(dict(zip(keys, values.tolist())))


def interface_of(address: str) -> str:
    """The network interface with this IPv4 address: gloo would take the one of the host's name, often the loopback."""
    for _, name in socket.if_nameindex():
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe, suppress(OSError):  # one without an address
            answer = fcntl.ioctl(probe, 0x8915, struct.pack("256s", name.encode()))  # SIOCGIFADDR
            if socket.inet_ntoa(answer[20:24]) == address:
                return name
    raise RuntimeError(f"no network interface has the address {address}; name one in GLOO_SOCKET_IFNAME")


def shard(model, ranks: Ranks, offload: bool = False) -> None:
    """Splits the model's weights over the ranks, layer by layer; embedding, final norm and head (tied or not) are one part.

    What stays between two passes is 1/count of everything, in float32. On a GPU the layers are gathered in bf16, embedding and
    head in float32, as one device alone computes them. The gradients of the ranks are summed, not averaged: the loss divides
    by the tokens of all of them already. offload: the shards live in the host's memory.
    """
    layers = layers_of(model, "policy_ranks")
    on_gpu = ranks.mesh.device_type == "cuda"
    options = dict(mesh=ranks.mesh, offload_policy=CPUOffloadPolicy() if offload and on_gpu else OffloadPolicy())
    in_bf16 = MixedPrecisionPolicy(torch.bfloat16, torch.float32, cast_forward_inputs=False) if on_gpu else MixedPrecisionPolicy()
    for layer in reversed(layers):  # the inner ones first
        fully_shard(layer, mp_policy=in_bf16, **options)
    fully_shard(model, **options)
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.set_gradient_divide_factor(1.0)
            module.set_force_sum_reduction_for_comms(True)  # a plain sum with every backend; gloo has no other


def layers_of(model, field: str) -> list:
    """The model's repeated layers, which transformers marks. ValueError where there are none."""
    layers = [module for module in model.modules() if isinstance(module, GradientCheckpointingLayer)]
    if not layers:
        raise ValueError(f"{field}: {type(model).__name__} has no layers marked for it; leave it off")
    return layers
