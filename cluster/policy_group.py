"""A policy on the GPUs of one or several machines: RankedPolicy actors behind the methods of a Policy.

    group = PolicyGroup(config, "PATH")            # the trainer's config with --policy-ranks 8
    metrics = group.update(groups, lr=1e-6)        # each rank takes a share of the samples

The trainer's process handles everything else: data, servers, rewards, logs and Ctrl-C. It can therefore run
on a machine without a GPU, and it survives the death of a rank. RanksLost is then raised immediately or, if
a node is unreachable, when Ray declares the node dead. `restart` starts all ranks again.

Not covered: ranks that join or leave while others continue, groups of different devices.
"""

import contextlib
import dataclasses
import math
import re
import socket
import threading
from collections import Counter
from pathlib import Path
from types import SimpleNamespace

import ray
import torch
import torch.distributed as dist

from cluster.placement import RESERVE_TIMEOUT, Reservation, end_actors, rank_spec
from cluster.ranks import RankedPolicy, Ranks
from policy import MiniBatch, RanksLost, Sample, entropy_of, mini_batches
from reward_worker import file_and_name, fingerprints

# Seconds to wait for free resources after a rank has died, because a new node may join the cluster.
RESTART_TIMEOUT = 900.0
# If a rank fails in a collective operation, Ray reports within this many seconds whether another rank died.
AFTERMATH_S = 10.0


class PolicyGroup:
    """A policy on `config.policy_ranks` devices, with the methods of a Policy.

    Every method that calls the ranks raises RanksLost if a rank died.

    Args:
        config: The trainer's configuration.
        source: A folder or Hub name.
        reservation: The reservation for the processes named "rank". By default, the group makes one.

    Raises:
        ValueError: As in Policy and Reservation.
        RuntimeError: As in Reservation, or a rank does not start or cannot access the output directory.
    """

    def __init__(self, config, source: str, reservation: Reservation | None = None):
        self.config = config
        # Ranks need not import the class of the configuration. They have another working directory.
        self.rank_config = SimpleNamespace(**dataclasses.asdict(config))
        self.rank_config.model = absolute(config.model)
        self.device = torch.device(config.device)
        self.reservation = reservation
        self.own_reservation = None
        self.actors = []
        self.starts = 0
        # Ranks load a loss of the user's own from its file, which must not change until the run ends.
        self.loss_files = {}
        if ":" in config.loss:
            path, name = file_and_name("loss", config.loss)
            self.rank_config.loss = f"{path}:{name}"
            self.loss_files = fingerprints(str(path))
        # The number of weight updates, or None if it is unknown after a failure.
        self.num_updates = 0
        self.lock = threading.RLock()
        try:
            self.start(source, RESERVE_TIMEOUT)
        except BaseException:
            self.shutdown()
            raise

    def start(self, source: str, timeout_s: float) -> None:
        """Start all ranks with the weights in the folder `source`."""
        self.starts += 1
        self.num_updates = 0
        reservation = self.reservation
        if not reservation:
            reservation = self.own_reservation = Reservation({"rank": rank_spec(self.config)}, timeout_s)
        reservation.wait(timeout_s)
        nodes = reservation.nodes("rank")
        per_node = Counter(nodes)
        addresses = {node["NodeID"]: node["NodeManagerAddress"] for node in ray.nodes()}
        host = ray.util.get_node_ip_address()
        # The ranks meet at a store in this process, which listens on this address only.
        listener = socket.create_server((host, 0))
        port = listener.getsockname()[1]
        self.store = dist.TCPStore(
            host, port, is_master=True, wait_for_workers=False, master_listen_fd=listener.detach()
        )
        for rank, node in enumerate(nodes):
            ranks = Ranks(
                rank=rank,
                count=len(nodes),
                store=f"{host}:{port}",
                address=addresses[node],
                per_node=max(per_node.values()),
                files=self.loss_files,
            )
            # Ray shows each actor only its own GPU.
            device = torch.device("cuda:0") if self.device.type == "cuda" else self.device
            actor = ray.remote(RankedPolicy).options(max_restarts=0, **reservation.options("rank", rank))
            self.actors.append(actor.remote(self.rank_config, absolute(source), device, ranks))
        where = ", ".join(f"{count} on {addresses[node]}" for node, count in per_node.items())
        print(f"policy: {len(nodes)} ranks, {where}")
        self.info = self.call("model_info")[0]
        if {addresses[node] for node in nodes} != {host}:
            self.check_shared_folder()

    def restart(self, source: str) -> None:
        """Replace all ranks with new ranks that load the weights in the folder `source`."""
        with self.lock:
            self.shutdown()
            self.start(source, RESTART_TIMEOUT)

    def shutdown(self) -> None:
        """End all ranks, even if they are waiting in a collective operation."""
        with contextlib.suppress(ray.exceptions.RayError):
            end_actors(self.actors, self.own_reservation)
        self.actors = []
        self.own_reservation = None

    def call(self, method: str, *arguments, shares: list = ()) -> list:
        """Call a method of all ranks at the same time, and return their results.

        An error or death of a rank is detected immediately. The first argument of rank i is shares[i], if
        `shares` is not empty.
        """
        with self.lock:
            if not self.actors:
                raise RanksLost("the ranks of the policy have been shut down")
            calls = []
            for rank, actor in enumerate(self.actors):
                calls.append(getattr(actor, method).remote(*shares[rank : rank + 1], *arguments))
            waiting = calls
            while waiting:
                (done,), waiting = ray.wait(waiting)
                error = exception_of(done)
                if error:
                    raise self.cause_of(error, waiting) from None
            return ray.get(calls)

    def cause_of(self, error, waiting: list) -> BaseException:
        """Return what to raise: a rank's own error, or RanksLost if another rank's death caused it."""
        found = [error]
        if waiting:
            late, hanging = ray.wait(waiting, num_returns=len(waiting), timeout=AFTERMATH_S)
            # Hanging ranks wait in a collective operation for the failed rank. They cannot be reused because
            # they would mistake tensors of the next call for tensors of this one.
            if hanging:
                self.shutdown()
            found += map(exception_of, late)
        for failed in found:
            if isinstance(failed, ray.exceptions.RayActorError) and not failed.actor_init_failed:
                text = " ".join(str(failed).split())
                return RanksLost(f"a rank of the policy died ({text[:200]})")
        if isinstance(error, ray.exceptions.RayTaskError):
            return error.cause
        if not isinstance(error, ray.exceptions.RayActorError):
            return error
        # The constructor failed. Ray keeps only the error's text; its last line with a name has the cause.
        named = re.findall(r"^(?:\w+\.)*([A-Z]\w*): (.*)", str(error), re.MULTILINE)
        kind, text = named[-1] if named else ("", str(error))
        if kind == "ValueError":
            return ValueError(text)
        return RuntimeError(text)

    def check_shared_folder(self) -> None:
        """Raise RuntimeError if a rank cannot access the output directory, to which all ranks write."""
        path = Path(self.config.out_dir, "config.json").absolute()  # The trainer has just written it.
        text = path.read_bytes()
        seen = self.call("__ray_call__", lambda rank: path.is_file() and path.read_bytes() == text)
        if not all(seen):
            raise RuntimeError(
                f"--out-dir {path.parent}: not all nodes can access the directory; put it and "
                "the model on a shared file system"
            )

    # ---- methods of a Policy

    def model_info(self) -> dict:
        return self.info

    def update(self, groups: list[list[Sample]], lr: float, max_logprob_diff: float = math.inf) -> dict:
        shares = split(mini_batches(groups, self.config), len(self.actors))
        before = self.num_updates
        self.num_updates = None
        try:
            metrics = self.call("update_mini_batches", lr, max_logprob_diff, shares=shares)[0]
        except Exception:  # After a second Ctrl-C, nobody waits for the ranks.
            with contextlib.suppress(RanksLost):
                self.num_updates = self.call("__ray_call__", lambda rank: rank.num_updates)[0]
            raise
        self.num_updates = before + metrics["actor/updates"]
        return metrics | {"actor/entropy": entropy_of(groups)}

    def send_weights(self, folders: dict, path: str, dtype: torch.dtype) -> tuple[set, dict]:
        return self.call("send_weights", folders, path, dtype)[0]

    def release_memory(self) -> None:
        self.call("release_memory")

    def save(self, folder: Path) -> None:
        self.call("save", folder.absolute())

    def load_optimizer(self, folder: Path) -> None:
        self.call("load_optimizer", folder.absolute())


def split(batches: list[MiniBatch], count: int) -> list[list[MiniBatch]]:
    """Split each mini-batch into `count` shares of similar length, one per rank.

    The samples of a share are copies without what an update does not need, such as rows and texts.
    """
    shares = [[] for _ in range(count)]
    for batch in batches:
        bare = []
        for sample in sorted(batch.samples, key=lambda sample: sample.length, reverse=True):
            bare.append(dataclasses.replace(sample, row={}, text="", result={}, turns=[], info={}))
        for rank, share in enumerate(shares):
            share.append(dataclasses.replace(batch, samples=bare[rank::count]))
    return shares


def absolute(source: str) -> str:
    """Return the absolute path of a folder, or a Hub name unchanged."""
    if Path(source).exists():
        return str(Path(source).absolute())
    return source


def exception_of(call) -> Exception | None:
    """Return the error of a finished call, or None."""
    try:
        ray.get(call)
    except ray.exceptions.RayError as error:
        return error
    return None
