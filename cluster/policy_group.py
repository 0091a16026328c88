"""The policy on many GPUs and machines: one policy.Policy per device, each a Ray actor, behind the methods of a single one.

    group = PolicyGroup(config, "PATH")            # config: the trainer's; --policy-ranks 8
    metrics = group.update(samples, lr=1e-6)       # all ranks at once, each with its share of the samples

The trainer keeps everything else in its own process: data, servers, rewards, logs, Ctrl-C. So it may run on a machine without a
GPU, and a rank that dies takes nothing along: RanksLost is raised at once (for a node that is cut off: when Ray has declared it
dead, after RAY_health_check_failure_threshold x RAY_health_check_period_ms), and `restart` starts all ranks anew.

Left out: ranks that join or leave while others go on, groups of different devices.
"""

import contextlib
import dataclasses
import re
import socket
import threading
from collections import Counter
from pathlib import Path
from types import SimpleNamespace

import ray
import torch
import torch.distributed as dist
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from genrm_server import hold
from policy import Policy, Sample
from cluster.sharding import Ranks

RANK_CPUS = 0.25  # what a rank reserves in Ray, beside its GPU: a laptop is to have room for ranks, judges and workers
PLACE_S = 60.0  # seconds in which the cluster must have room for all ranks; after one has died the room may be a node to come
RESTART_PLACE_S = 900.0
AFTERMATH_S = 10.0  # when a rank fails in a collective, Ray says within this time whether another one has died


class RanksLost(RuntimeError):
    """A rank of the policy has died, and what the others hold is of no use without it."""


class PolicyGroup:
    """A policy on `config.policy_ranks` devices. The methods are those of Policy; `score` gives the scores of all ranks.

    Raises what Policy raises, RuntimeError where the cluster has no room, and from every method RanksLost where a rank died.
    """

    def __init__(self, config, source: str):
        self.config, self.device, self.num_updates = config, torch.device(config.device), 0
        self.actors, self.placement, self.starts, self.lock = [], None, 0, threading.RLock()
        try:
            self.start(source, PLACE_S)
        except BaseException:
            self.shutdown()
            raise

    def start(self, source: str, patience: float) -> None:
        """All ranks, from the weights in the folder `source`."""
        config = SimpleNamespace(**dataclasses.asdict(self.config))  # whose class the ranks need not be able to import
        config.model, source = map(absolute, (config.model, source))  # they work in another folder
        on_gpu, self.starts = self.device.type == "cuda", self.starts + 1
        bundles, strategy = rank_bundles(config)
        self.placement, nodes = hold(bundles, strategy, "policy_ranks", patience)
        addresses = {node["NodeID"]: node["NodeManagerAddress"] for node in ray.nodes()}
        per_node, here = Counter(nodes), ray.util.get_node_ip_address()
        alone = {addresses[node] for node in nodes} == {here}  # all on this machine: nothing needs to leave it
        # The ranks meet at a store in this process. It listens on one address only, unlike a store that is left to itself.
        listener = socket.create_server(("127.0.0.1" if alone else here, 0))
        host, port = listener.getsockname()
        self.store = dist.TCPStore(host, port, is_master=True, wait_for_workers=False, master_listen_fd=listener.detach())
        for rank, node in enumerate(nodes):
            ranks = Ranks(rank, len(nodes), f"{host}:{port}", "127.0.0.1" if alone else addresses[node],
                          turn=nodes[:rank].count(node), turns=max(per_node.values()))  # fmt: skip
            options = dict(num_cpus=RANK_CPUS, num_gpus=int(on_gpu), max_restarts=0,
                           scheduling_strategy=PlacementGroupSchedulingStrategy(self.placement, rank))  # fmt: skip
            device = torch.device("cuda:0" if on_gpu else "cpu")  # Ray shows an actor its own GPU only
            self.actors.append(ray.remote(Policy).options(**options).remote(config, source, device, ranks))
        where = ", ".join(f"{count} on {addresses[node]}" for node, count in per_node.items())
        print(f"policy: {len(nodes)} ranks, {where}", flush=True)
        self.about_model = self.call("about")[0]
        if not alone:
            self.check_shared_folder()

    def restart(self, source: str) -> None:
        """New ranks in place of all, with the weights and, where there is one, the optimizer in the folder `source`."""
        with self.lock:
            self.shutdown()
            self.start(source, RESTART_PLACE_S)

    def shutdown(self) -> None:
        """Ends all ranks; those that wait in a collective, too."""
        with contextlib.suppress(ray.exceptions.RayError):  # all of it went with its Ray
            for actor in self.actors:
                ray.kill(actor)
            if self.placement is not None:
                ray.util.remove_placement_group(self.placement)
        self.actors, self.placement = [], None

    def call(self, method: str, *arguments) -> list:
        """A method of all ranks at the same time -> their answers. One that dies or fails is noticed while others wait for it."""
        with self.lock:
            if not self.actors:
                raise RanksLost("the policy has no ranks: they were ended")
            calls = {getattr(actor, method).remote(*arguments): rank for rank, actor in enumerate(self.actors)}
            answers, waiting = {}, list(calls)
            while waiting:
                (done,), waiting = ray.wait(waiting)
                try:
                    answers[calls[done]] = ray.get(done)
                except ray.exceptions.RayError as error:
                    raise self.verdict(error, waiting) from None
            return [answers[rank] for rank in range(len(answers))]

    def verdict(self, error, waiting: list) -> Exception:
        """What has happened: a rank's own error, or a death that the error is a consequence of."""
        late, hanging = ray.wait(waiting, num_returns=len(waiting), timeout=AFTERMATH_S) if waiting else ([], [])
        if hanging:  # in a collective with the one that failed: they would take the next call's tensors for its
            self.shutdown()
        found = [error, *filter(None, map(exception_of, late))]
        for failed in found:
            if isinstance(failed, ray.exceptions.RayActorError) and not failed.actor_init_failed:
                return RanksLost(f"a rank of the policy died ({' '.join(str(failed).split())[:200]})")
        if isinstance(error, ray.exceptions.RayActorError):  # in its constructor; Ray keeps the text only
            kind, text = [("", str(error)), *re.findall(r"^(?:\w+\.)*(\w+): (.*)", str(error), re.MULTILINE)][-1]
            return (ValueError if kind == "ValueError" else RuntimeError)(text)
        return error.cause if isinstance(error, ray.exceptions.RayTaskError) else error

    def check_shared_folder(self) -> None:
        """RuntimeError where a rank's node does not see the run's folder, to which all of them write."""
        path = Path(self.config.out_dir, "config.json").absolute()  # the trainer has just written it
        text = path.read_text()
        for actor in self.actors:
            if not ray.get(actor.__ray_call__.remote(lambda self: path.is_file() and path.read_text() == text)):
                raise RuntimeError(f"out_dir: another node does not see {path.parent}; put it, and the model, "
                                   "on a shared file system")  # fmt: skip

    # ---- the methods of a Policy

    def about(self) -> dict:
        return self.about_model

    def update(self, samples: list[Sample], lr: float) -> dict:
        done, self.num_updates = self.num_updates, self.num_updates + 1  # should it fail: the weights may be no step's
        needed = ray.put([dataclasses.replace(sample, row={}, text="", result={}) for sample in samples])
        metrics = self.call("update", needed, lr)[0]
        self.num_updates = done + metrics["actor/updates"]
        return metrics

    def score(self, samples: list[Sample]) -> list:
        return [next(filter(None, parts)) for parts in zip(*self.call("score", samples))]

    def send_weights(self, folders: list, dtype: torch.dtype) -> set[int]:
        return self.call("send_weights", folders, dtype)[0]

    def offer_transfer(self) -> tuple[str, int]:
        return self.call("offer_transfer")[0]

    def open_transfer(self, address: str, port: int, size: int) -> None:
        self.call("open_transfer", address, port, size)

    def transfer_weights(self, dtype: torch.dtype) -> None:
        self.call("transfer_weights", dtype)

    def abandon_transfer(self) -> None:
        """Ends rank 0, which hangs; whoever waits for it is told."""
        ray.kill(self.actors[0])

    def release_memory(self, optimizer: bool = False) -> None:
        self.call("release_memory", optimizer)

    def save(self, folder: Path) -> None:
        self.call("save", folder.absolute())

    def load_optimizer(self, folder: Path) -> None:
        self.call("load_optimizer", folder.absolute())


def rank_bundles(config) -> tuple[list[dict], str]:
    """What the ranks reserve in Ray, and how it spreads them: GPUs on as few nodes as possible, as they talk all the time."""
    on_gpu = config.device == "cuda"
    return [{"CPU": RANK_CPUS, "GPU": 1} if on_gpu else {"CPU": RANK_CPUS}] * config.policy_ranks, "PACK" if on_gpu else "SPREAD"


def absolute(source: str) -> str:
    """A folder's full path; a hub name stays as it is."""
    return str(Path(source).absolute()) if Path(source).exists() else source


def exception_of(call) -> Exception | None:
    """What a call that has ended raised."""
    try:
        ray.get(call)
    except ray.exceptions.RayError as error:
        return error
    return None
