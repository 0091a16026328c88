"""Place the ranks, the policy servers and the judges in Ray, on whole GPUs or on fractions of a GPU.

    specs = {"rank": ProcessSpec(8, cpus=0.25, gpus=0.5, apart=True), "judge": ProcessSpec(8, 0.5, gpus=0.4)}
    reservation = Reservation(specs)
    ray.remote(Something).options(**reservation.options("judge", 0)).remote()

    manager = RewardModelManager({"genrm": Config(...), "rm": Config(...)})     # genrm_server.Config
    manager.router_addresses                                                    # {"genrm": "host:port", ...}

genrm_server.ModelServers supervises these servers in the same way as servers on one machine. All routers run
on the driver's node.
"""

import atexit
import math
from collections import Counter, defaultdict
from dataclasses import dataclass, field, replace

import ray
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from genrm_server import Config, ModelServers, VllmServer, count_gpus, resolve_config

# Each process reserves less than one CPU in Ray, so that a laptop has room for all of them.
RANK_CPUS = 0.25
SERVER_CPUS = 0.5
RESERVE_TIMEOUT = 60.0  # seconds to wait for free resources in the cluster
# The flag that lets the processes of this name share a GPU. All other names belong to judges.
SHARES = {"rank": "--policy-gpu-share 0.5", "policy server": "--rollout-gpu-share 0.2"}
SLEEPER_GPUS = 1e-4  # Ray's smallest fraction of a GPU, for servers that sleep during other work


@dataclass(frozen=True)
class ProcessSpec:
    """A number of identical processes, and the resources of each process."""

    count: int
    cpus: float
    gpus: float = 0.0  # a fraction of one GPU, or a number of whole GPUs
    apart: bool = False  # whether these processes (such as ranks) must not share a GPU
    awake: float = 0.0  # the fraction of a GPU that a server with sleep_mode uses while it is awake

    @property
    def share(self) -> float:
        """The GPUs that a process uses at most."""
        return max(self.gpus, self.awake)


def server_spec(config: Config) -> ProcessSpec:
    """Return the spec of a model's servers. Servers with sleep_mode on shared GPUs reserve almost nothing."""
    gpus = awake = 0.0
    if config.device == "cuda":
        gpus = config.gpu_share * config.tensor_parallel_size
        if config.sleep_mode and config.gpu_share < 1:
            gpus, awake = SLEEPER_GPUS, config.gpu_share
    return ProcessSpec(config.num_servers, SERVER_CPUS, gpus, awake=awake)


def rank_spec(config) -> ProcessSpec:
    """Return the spec of the ranks of a trainer's resolved configuration."""
    share = config.policy_gpu_share if config.device == "cuda" else 0.0
    return ProcessSpec(config.policy_ranks, RANK_CPUS, share, apart=True)


def process_specs(config) -> dict[str, ProcessSpec]:
    """Return {name: spec} of all processes that the trainer places in Ray."""
    on_gpu = config.device == "cuda"
    specs = {"rank": rank_spec(config)}
    if config.rollout == "vllm":
        specs["policy server"] = server_spec(replace(config.policy_server_config(), device=config.device))
    judges = config.server_configs(sleep_mode=on_gpu and config.reward_mode == "colocate")
    for name, judge in judges.items():
        specs[name] = server_spec(with_device(judge))
    return specs


def with_device(config: Config) -> Config:
    """Replace the device auto with cuda if the cluster has a GPU, even if this machine has none."""
    if config.device == "auto" and count_gpus():
        return replace(config, device="cuda")
    return config


@dataclass
class GpuSlot:
    """A slot for processes: one GPU, all GPUs of one server, or no GPU (for one process)."""

    gpus: int
    processes: dict[tuple[str, int], ProcessSpec] = field(default_factory=dict)  # by (name, number)

    @property
    def taken(self) -> float:
        return sum(spec.gpus for spec in self.processes.values())

    def count(self, name: str) -> int:
        """Return the number of processes with this name."""
        return sum(other == name for other, _ in self.processes)

    def has_room(self, name: str, spec: ProcessSpec) -> bool:
        if self.gpus != 1 or not spec.gpus or (spec.apart and self.count(name)):
            return False
        # Ranks free memory for servers that are awake. The servers are awake at the same time.
        servers = sum(other.share for other in self.processes.values() if not other.apart)
        if not spec.apart and servers + spec.share > 1.001:
            return False
        return self.taken + spec.gpus < 1.001


def pack_gpus(specs: dict[str, ProcessSpec], gpus: float) -> list[GpuSlot]:
    """Pack all processes onto this many GPUs: ranks and whole-GPU processes first, then from large to small.

    Among the GPUs with room, a process goes to the one with the fewest processes of its name; in a tie, to
    the least used one. A free GPU is used before two processes of one name share a GPU. Raises ValueError if
    a process does not fit.
    """

    def need(name):
        spec = specs[name]
        return spec.apart or spec.gpus >= 1, spec.gpus, spec.awake

    slots = []
    free = gpus
    for name in sorted(specs, key=need, reverse=True):
        spec = specs[name]
        size = math.ceil(spec.gpus)
        for number in range(spec.count):
            fits = [slot for slot in slots if slot.has_room(name, spec)]
            best = min(fits, key=lambda slot: (slot.count(name), slot.taken), default=None)
            if best is None or best.count(name):
                if size <= free:
                    free -= size
                    best = GpuSlot(size)
                    slots.append(best)
            if best is None:
                placed = [f"{name} {number}" for slot in slots for name, number in slot.processes]
                placed = f" in addition to {', '.join(placed)}" if placed else ""
                raise ValueError(
                    f"not enough GPUs: {name} {number} needs {spec.share:g} of {gpus:g} GPUs"
                    f"{placed}; {remedy_for(spec, specs, gpus)}"
                )
            best.processes[name, number] = spec
    return slots


def remedy_for(spec: ProcessSpec, specs: dict[str, ProcessSpec], gpus: float) -> str:
    """Return what to do if a process with this spec does not fit onto the GPUs."""
    if math.ceil(spec.gpus) > gpus:
        return "make more GPUs visible, lower the number of GPUs per server, or pass --device cpu"
    if spec.apart and spec.count > gpus:
        return "ranks cannot share a GPU; lower --policy-ranks"
    remedies = ["start fewer processes"]
    small = [name for name, other in specs.items() if other.share <= 1]  # Larger ones cannot share GPUs.
    if small:
        shares = dict.fromkeys(SHARES.get(name, "--genrm-gpu-share 0.25") for name in small)
        remedies.insert(0, f"lower their shares of a GPU ({' '.join(shares)})")
    if "rank" in specs:  # Judges of score_file.py have no --device.
        remedies.append("pass --device cpu for a tiny policy")
    return ", or ".join(remedies)


def layout(specs: dict[str, ProcessSpec], gpus: float) -> tuple[list[dict], dict]:
    """Return the bundles to reserve on this many GPUs, and {(name, number): (index of the bundle, GPUs)}.

    A bundle has one GPU or all GPUs of one server. Raises ValueError if the processes do not fit.
    """
    bundles = []
    placed = {}
    for index, slot in enumerate(pack_gpus(specs, gpus)):
        bundle = {"CPU": sum(spec.cpus for spec in slot.processes.values())}
        if slot.gpus:
            bundle["GPU"] = slot.gpus
        bundles.append(bundle)
        is_overfull = slot.gpus == 1 and slot.taken > 1
        for process, spec in slot.processes.items():
            share = spec.gpus
            if is_overfull:  # Leave room for sleeping servers, which reserve a tiny part of a GPU.
                share = max(share - 0.001, SLEEPER_GPUS)
            placed[process] = index, share
    return bundles, placed


class Reservation:
    """Reserves resources for these processes until close(). If a node dies, Ray renews the placement group.

    The bundles have whole GPUs because Ray could otherwise place two ranks on one GPU. Raises ValueError if
    the processes do not fit on the GPUs, and RuntimeError if the resources are not free within timeout_s.
    """

    def __init__(self, specs: dict[str, ProcessSpec], timeout_s: float = RESERVE_TIMEOUT):
        self.specs = specs
        self.bundles, self.placed = layout(specs, ray.cluster_resources().get("GPU", 0))
        # PACK fills one node after another. With SPREAD, no node might have enough GPUs for a large server.
        strategy = "PACK" if any("GPU" in bundle for bundle in self.bundles) else "SPREAD"
        self.group = ray.util.placement_group(self.bundles, strategy=strategy)
        try:
            self.wait(timeout_s)
        except BaseException:
            self.close()
            raise

    def wait(self, timeout_s: float) -> None:
        """Wait until every process has a node. Raise RuntimeError after timeout_s seconds."""
        if not self.group.wait(timeout_s):
            names = ", ".join(self.specs)
            free = ray.available_resources()
            free = f"only {free.get('CPU', 0):g} CPUs and {free.get('GPU', 0):g} GPUs are free"
            wanted = f"{len(self.bundles)} bundles such as {self.bundles[-1]}"
            raise RuntimeError(
                f"{names}: the Ray cluster lacks resources for {wanted}: {free}; "
                "start fewer processes, end other programs, or add nodes"
            )

    def nodes(self, name: str) -> list[str]:
        """Return the node of each process with this name."""
        node_of = ray.util.placement_group_table(self.group)["bundles_to_node_id"]
        nodes = []
        for number in range(self.specs[name].count):
            bundle, _ = self.placed[name, number]
            nodes.append(node_of[bundle])
        return nodes

    def options(self, name: str, number: int) -> dict:
        """Return the arguments of ray.remote(...).options() for a process."""
        bundle, gpus = self.placed[name, number]
        return dict(
            num_cpus=self.specs[name].cpus,
            num_gpus=gpus,
            scheduling_strategy=PlacementGroupSchedulingStrategy(self.group, bundle),
        )

    def close(self) -> None:
        """Release the resources and end the processes that use them. A second call does nothing."""
        if ray.is_initialized():
            ray.util.remove_placement_group(self.group)


def start_servers(models: dict[str, Config], reservation: Reservation) -> dict[str, list]:
    """Start an actor for each server of these models. Ray may restart an actor on another node.

    The configurations must come from resolve_config. The servers on a node divide its CPU cores.
    """
    driver = ray.get_runtime_context().get_node_id()
    servers_on = Counter()  # by node
    for name in models:
        servers_on.update(reservation.nodes(name))
    started_on = Counter()
    actors = defaultdict(list)
    for name, config in models.items():
        for index, node in enumerate(reservation.nodes(name)):
            actor = ray.remote(VllmServer).options(max_restarts=-1, **reservation.options(name, index))
            actor = actor.remote(config, index, started_on[node], servers_on[node], "", driver)
            actors[name].append(actor)
            started_on[node] += 1
    return actors


def end_actors(actors: list, own_reservation: Reservation | None) -> None:
    """End these actors, and close the reservation if it is only for them."""
    if ray.is_initialized():  # Otherwise the actors have ended.
        for actor in actors:
            ray.kill(actor)
    if own_reservation:
        own_reservation.close()


class RewardModelManager:
    """Runs named reward models in a Ray program, with servers in actors and routers on this node.

    The constructor waits until all servers are ready. In a cluster of several nodes, routers and servers on
    other nodes listen on their node's address instead of 127.0.0.1. `router_addresses` maps each name to
    "host:port". `reservation` has resources for each name; by default, the manager makes one. Raises the
    errors of ModelServers and Reservation.
    """

    def __init__(self, models: dict[str, Config], reservation: Reservation | None = None):
        self.models: dict[str, ModelServers] = {}
        self.router_addresses = {}
        self.actors = []
        self.own_reservation = None
        configs = {}
        specs = {}
        has_several_nodes = sum(node["Alive"] for node in ray.nodes()) > 1
        for name, config in models.items():
            config = with_device(config)
            if has_several_nodes and config.host in ("127.0.0.1", "0.0.0.0"):
                config = replace(config, host=ray.util.get_node_ip_address())
            config = resolve_config(config, follow_links=not has_several_nodes)
            config.log_dir /= name
            configs[name] = config
            specs[name] = server_spec(config)
        try:
            if reservation is None:
                reservation = self.own_reservation = Reservation(specs)
            actors = start_servers(configs, reservation)
            self.actors = sum(actors.values(), [])
            for name, config in configs.items():  # The models start concurrently.
                self.models[name] = ModelServers(config, name, actors[name], wait=False)
            for name, servers in self.models.items():
                servers.wait_ready()
                self.router_addresses[name] = servers.router_address
            atexit.register(self.shutdown)
        except BaseException:
            self.shutdown()
            raise

    def check(self) -> None:
        """Raise RuntimeError if a model has no server left, or if Ray was shut down."""
        for servers in self.models.values():
            servers.check()

    def sleep(self) -> None:
        """Release the GPU memory of all models once running requests end."""
        for servers in self.models.values():
            servers.sleep()

    def wake_up(self) -> None:
        """Allocate the GPU memory of all models again."""
        for servers in self.models.values():
            servers.sleep(False)

    def shutdown(self) -> None:
        """End all servers, routers and actors. A second call does nothing."""
        atexit.unregister(self.shutdown)
        for servers in self.models.values():
            servers.stopping.set()
        end_actors(self.actors, self.own_reservation)
        for servers in self.models.values():
            servers.shutdown()
        self.actors = []
        self.own_reservation = None
