"""The policy on the GPUs of one or many machines: RankedPolicy actors behind one Policy's methods.

    group = PolicyGroup(config, "PATH")            # config: the trainer's; --policy-ranks 8
    metrics = group.update(groups, lr=1e-6)        # all ranks at once, each with its share of the samples

The trainer keeps everything else in its own process: data, servers, rewards, logs, Ctrl-C. So it may run on a
machine without a GPU, and a rank that dies takes nothing along: RanksLost is raised at once (for a node that
is cut off: when Ray has declared it dead), and `restart` starts all ranks anew.

Left out: ranks that join or leave while others go on, groups of different devices.
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

from cluster.placement import RESERVE_TIMEOUT, Reservation, rank_spec
from cluster.ranks import RankedPolicy, Ranks
from cluster.samples import split
from policy import RanksLost, Sample, entropy_of, mini_batches

# seconds in which the cluster must have room after a rank has died: it may be a node to come
RESTART_TIMEOUT = 900.0
# when a rank fails in a collective, Ray says within this time whether another one has died
AFTERMATH_S = 10.0


class PolicyGroup:
    """A policy on `config.policy_ranks` devices. The methods are those of Policy.

    `reservation` has room for each "rank"; by default the group reserves its own. Raises what Policy and
    Reservation raise, and RanksLost from every method if a rank died.
    """

    def __init__(self, config, source: str, reservation: Reservation | None = None):
        self.config = config
        self.device = torch.device(config.device)
        self.reservation = reservation
        self.own_reservation = None
        self.actors = []
        self.starts = 0
        self.lock = threading.RLock()
        try:
            self.start(source, RESERVE_TIMEOUT)
        except BaseException:
            self.shutdown()
            raise

    def start(self, source: str, timeout_s: float) -> None:
        """All ranks, from the weights in the folder `source`."""
        self.starts += 1
        self.num_updates = 0
        config = SimpleNamespace(**dataclasses.asdict(self.config))  # the ranks need not import its class
        config.model = absolute(config.model)  # they work in another folder
        reservation = self.reservation
        if not reservation:
            reservation = self.own_reservation = Reservation({"rank": rank_spec(config)}, timeout_s)
        reservation.wait(timeout_s)
        nodes = reservation.nodes("rank")
        per_node = Counter(nodes)
        addresses = {node["NodeID"]: node["NodeManagerAddress"] for node in ray.nodes()}
        host = ray.util.get_node_ip_address()
        # The ranks meet at a store in this process, which listens on this one address.
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
            )
            # Ray shows an actor its own GPU only
            device = torch.device("cuda:0") if self.device.type == "cuda" else self.device
            actor = ray.remote(RankedPolicy).options(max_restarts=0, **reservation.options("rank", rank))
            self.actors.append(actor.remote(config, absolute(source), device, ranks))
        where = ", ".join(f"{count} on {addresses[node]}" for node, count in per_node.items())
        print(f"policy: {len(nodes)} ranks, {where}", flush=True)
        self.info = self.call("model_info")[0]
        if {addresses[node] for node in nodes} != {host}:
            self.check_shared_folder()

    def restart(self, source: str) -> None:
        """New ranks in place of all, from the weights in the folder `source`."""
        with self.lock:
            self.shutdown()
            self.start(source, RESTART_TIMEOUT)

    def shutdown(self) -> None:
        """Ends all ranks; those that wait in a collective, too."""
        if ray.is_initialized():  # else they went with it, and ray.kill would start another Ray
            with contextlib.suppress(ray.exceptions.RayError):
                for actor in self.actors:
                    ray.kill(actor)
                if self.own_reservation:
                    self.own_reservation.close()
        self.actors = []
        self.own_reservation = None

    def call(self, method: str, *arguments, own: list = ()) -> list:
        """A method of all ranks at once -> their answers. A death or a failure is noticed at once.

        own: what each rank has as its first argument, if that is another one for each.
        """
        with self.lock:
            if not self.actors:
                raise RanksLost("the policy has no ranks: they were ended")
            calls = []
            for rank, actor in enumerate(self.actors):
                calls.append(getattr(actor, method).remote(*own[rank : rank + 1], *arguments))
            waiting = calls
            while waiting:
                (done,), waiting = ray.wait(waiting)
                try:
                    ray.get(done)
                except ray.exceptions.RayError as error:
                    raise self.verdict(error, waiting) from None
            return ray.get(calls)

    def verdict(self, error, waiting: list) -> BaseException:
        """What has happened: a rank's own error, or a death that the error is a consequence of."""
        found = [error]
        if waiting:
            late, hanging = ray.wait(waiting, num_returns=len(waiting), timeout=AFTERMATH_S)
            # in a collective with the one that failed: they would take the next call's tensors for its
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
        # In its constructor, of which Ray keeps the text only: the last line that names an error.
        named = re.findall(r"^(?:\w+\.)*(\w+): (.*)", str(error), re.MULTILINE)
        kind, text = named[-1] if named else ("", str(error))
        if kind == "ValueError":
            return ValueError(text)
        return RuntimeError(text)

    def check_shared_folder(self) -> None:
        """RuntimeError where a rank's node does not see the run's folder, to which all of them write."""
        path = Path(self.config.out_dir, "config.json").absolute()  # the trainer has just written it
        text = path.read_text()
        seen = self.call("__ray_call__", lambda rank: path.is_file() and path.read_text() == text)
        if not all(seen):
            what = "put it, and the model, on a shared file system"
            raise RuntimeError(f"out_dir: another node does not see {path.parent}; {what}")

    # ---- the methods of a Policy

    def model_info(self) -> dict:
        return self.info

    def update(self, groups: list[list[Sample]], lr: float, max_logprob_diff: float = math.inf) -> dict:
        parts = split(mini_batches(groups, self.config), len(self.actors) or 1)
        self.num_updates = math.nan  # until the ranks have said how many: the weights may be no step's
        try:
            metrics = self.call("learn", lr, max_logprob_diff, own=parts)[0]
        finally:
            with contextlib.suppress(RanksLost):
                self.num_updates = self.call("__ray_call__", lambda rank: rank.num_updates)[0]
        return metrics | {"actor/entropy": entropy_of(groups)}

    def send_weights(self, folders: dict, dtype: torch.dtype) -> set:
        return self.call("send_weights", folders, dtype)[0]

    def release_memory(self) -> None:
        self.call("release_memory")

    def save(self, folder: Path) -> None:
        self.call("save", folder.absolute())

    def load_optimizer(self, folder: Path) -> None:
        self.call("load_optimizer", folder.absolute())


def absolute(source: str) -> str:
    """A folder's full path; a hub name stays as it is."""
    if Path(source).exists():
        return str(Path(source).absolute())
    return source


def exception_of(call) -> Exception | None:
    """What a call that has ended raised; None: nothing."""
    try:
        ray.get(call)
    except ray.exceptions.RayError as error:
        return error
    return None
