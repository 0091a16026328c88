"""Where the parts of a run go: room in Ray for ranks, the policy's servers and judges, on GPUs or shares.

    places = Places({"rank": Part(8, cpus=0.25, gpus=0.5, apart=True), "judge": Part(8, cpus=0.5, gpus=0.4)})
    ray.remote(Something).options(**places.options("judge", 0)).remote()

    manager = RewardModelManager({"genrm": Config(...), "rm": Config(...)})     # genrm_server.Config
    manager.router_addresses                                                    # {"genrm": "host:port", ...}

ModelServers in genrm_server.py looks after servers in actors as after those of one machine. Each router is
beside the driver.
"""

import math
from collections import Counter, defaultdict
from dataclasses import dataclass, field, replace

import ray
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from genrm_server import Config, ModelServers, VllmServer, resolve_config

RANK_CPUS = 0.25  # of a rank, beside its GPU: a laptop is to have room for ranks, judges and workers
SERVER_CPUS = 0.5  # of a server's actor, for the same reason
PLACE_S = 60.0  # seconds in which the cluster must have room
ASLEEP = 1e-4  # of a GPU, the least that Ray knows: for who sleeps while the others work


@dataclass(frozen=True)
class Part:
    """So many equal processes, and what each of them takes."""

    count: int
    cpus: float
    gpus: float = 0.0  # a share of one GPU, or whole ones
    apart: bool = False  # no two of them on one GPU: ranks


def part_of(config: Config) -> Part:
    """The servers of a model. With a share below 1 those that sleep while others work reserve nothing."""
    gpus = 0.0
    if config.device == "cuda":
        gpus = config.gpu_share * config.tensor_parallel_size
        if config.sleep_mode and config.gpu_share < 1:
            gpus = ASLEEP
    return Part(config.num_servers, SERVER_CPUS, gpus)


def ranks_of(config) -> Part:
    """The ranks of a trainer's configuration, `resolved`."""
    share = config.policy_gpu_share if config.device == "cuda" else 0.0
    return Part(config.policy_ranks, RANK_CPUS, share, apart=True)


def parts_of(config) -> dict[str, Part]:
    """All that a run of the trainer places in Ray."""
    on_gpu = config.device == "cuda"
    parts = {"rank": ranks_of(config)}
    parts["policy server"] = part_of(replace(config.policy_servers(), device=config.device))
    judges = config.server_configs(sleep_mode=on_gpu and config.reward_mode == "colocate")
    for name, judge in judges.items():
        parts[name] = part_of(with_device(judge))
    return parts


def with_device(config: Config) -> Config:
    """auto is cuda where the cluster has a GPU, whatever this machine has."""
    if config.device == "auto" and ray.cluster_resources().get("GPU"):
        return replace(config, device="cuda")
    return config


@dataclass
class Cell:
    """One GPU, or those of one server (none where it works on a CPU), and who is there."""

    gpus: int
    held: dict[tuple[str, int], Part] = field(default_factory=dict)  # (name, number) -> what it takes

    @property
    def taken(self) -> float:
        return sum(part.gpus for part in self.held.values())

    def alike(self, name: str) -> int:
        """How many of this part are here."""
        return sum(who == name for who, _ in self.held)

    def has_room(self, name: str, part: Part) -> bool:
        if self.gpus != 1 or not part.gpus or (part.apart and self.alike(name)):
            return False
        return self.taken + part.gpus < 1.001


def deal(parts: dict[str, Part], gpus: float) -> list[Cell]:
    """Deals all processes to so many GPUs: first what needs GPUs to itself or apart, then by size.

    Each goes to the GPU with room where fewest of its own kind are, then least is taken; a new one is opened
    rather than two of a kind put together. ValueError with what was tried where one has no room.
    """

    def need(name):
        part = parts[name]
        return part.apart or part.gpus >= 1, part.gpus

    cells = []
    for name in sorted(parts, key=need, reverse=True):
        part = parts[name]
        size = math.ceil(part.gpus)
        for number in range(part.count):
            fits = [cell for cell in cells if cell.has_room(name, part)]
            cell = min(fits, key=lambda cell: (cell.alike(name), cell.taken), default=None)
            if cell is None or cell.alike(name):
                if size <= gpus - sum(cell.gpus for cell in cells):
                    cell = Cell(size)
                    cells.append(cell)
            if cell is None:
                takes = f"{name} {number}, which takes {part.gpus:g} of {gpus:g} GPUs"
                beside = [", ".join(f"{name} {number}" for name, number in cell.held) for cell in cells]
                raise ValueError(f"no room for {takes}, beside {beside}; lower a share or a number")
            cell.held[name, number] = part
    return cells


def layout(parts: dict[str, Part], gpus: float) -> tuple[list[dict], dict]:
    """The bundles to reserve on so many GPUs, and {(name, number): (bundle, GPUs)} for each process.

    A bundle has one GPU, or those of one server. ValueError where they do not fit.
    """
    bundles = []
    where = {}
    for index, cell in enumerate(deal(parts, gpus)):
        bundle = {"CPU": sum(part.cpus for part in cell.held.values())}
        if cell.gpus:
            bundle["GPU"] = cell.gpus
        bundles.append(bundle)
        is_full = cell.gpus == 1 < cell.taken
        for who, part in cell.held.items():
            share = part.gpus
            if is_full:  # Ray shows a process only GPUs that it has a part of: a little is for who sleeps
                share = max(share - 0.001, ASLEEP)
            where[who] = index, share
    return bundles, where


class Places:
    """Room in Ray for these parts until close(): one placement group, which Ray renews when a node dies.

    Its bundles are whole GPUs, or Ray could put two ranks on one. ValueError where the parts do not fit on
    the GPUs, RuntimeError where the cluster has no room.
    """

    def __init__(self, parts: dict[str, Part], patience: float = PLACE_S):
        self.parts = parts
        self.bundles, self.where = layout(parts, ray.cluster_resources().get("GPU", 0))
        # GPUs are dealt out node after node, or a server of several could find a single one left on each
        strategy = "PACK" if any("GPU" in bundle for bundle in self.bundles) else "SPREAD"
        self.group = ray.util.placement_group(self.bundles, strategy=strategy)
        try:
            self.wait(patience)
        except BaseException:
            self.close()
            raise

    def wait(self, patience: float) -> None:
        """Until every process has a node. RuntimeError when that takes more seconds."""
        if not self.group.wait(patience):
            names = ", ".join(self.parts)
            free = ray.available_resources()
            free = f"free are {free.get('CPU', 0):g} CPUs and {free.get('GPU', 0):g} GPUs"
            wanted = f"{len(self.bundles)} bundles such as {self.bundles[-1]}"
            raise RuntimeError(f"{names}: the Ray cluster has no room for {wanted}; {free}; add nodes")

    def nodes(self, name: str) -> list[str]:
        """The node of each process of this part."""
        node_of = ray.util.placement_group_table(self.group)["bundles_to_node_id"]
        nodes = []
        for number in range(self.parts[name].count):
            bundle, _ = self.where[name, number]
            nodes.append(node_of[bundle])
        return nodes

    def options(self, name: str, number: int) -> dict:
        """For ray.remote(...).options() of this process."""
        bundle, gpus = self.where[name, number]
        return dict(
            num_cpus=self.parts[name].cpus,
            num_gpus=gpus,
            scheduling_strategy=PlacementGroupSchedulingStrategy(self.group, bundle),
        )

    def close(self) -> None:
        """Gives the room back, and ends what is left there. May be called twice."""
        if ray.is_initialized():
            ray.util.remove_placement_group(self.group)


def start_servers(models: dict[str, Config], places: Places) -> dict[str, list]:
    """Start an actor for each server of these models. Ray may restart it on another node.

    The configurations come from resolve_config.
    """
    driver = ray.get_runtime_context().get_node_id()
    parts = Counter()  # of each node's cores
    for name in models:
        parts.update(places.nodes(name))
    dealt = Counter()
    actors = defaultdict(list)
    for name, config in models.items():
        for index, node in enumerate(places.nodes(name)):
            actor = ray.remote(VllmServer).options(max_restarts=-1, **places.options(name, index))
            actors[name].append(actor.remote(config, index, dealt[node], parts[node], "", driver))
            dealt[node] += 1
    return actors


def end_servers(actors: list, own: Places | None) -> None:
    """A server ends with its actor. own: the room that was taken for these alone."""
    if ray.is_initialized():
        for actor in actors:
            ray.kill(actor)
    if own:
        own.close()


class RewardModelManager:
    """Named reward models in a Ray program, each with its servers in actors, its router beside the driver.

    Blocks until all are ready. In a cluster of several nodes the routers, and the servers on other nodes,
    listen on their node's address instead of 127.0.0.1: they must reach each other. `router_addresses` maps
    each name to "host:port". places: with room for each name; default: its own. Raises what ModelServers and
    Places raise.
    """

    def __init__(self, models: dict[str, Config], places: Places | None = None):
        self.models: dict[str, ModelServers] = {}
        self.router_addresses = {}
        self.actors = []
        self.own = None
        configs = {}
        parts = {}
        several = sum(node["Alive"] for node in ray.nodes()) > 1
        for name, config in models.items():
            config = with_device(config)
            if several and config.host in ("127.0.0.1", "0.0.0.0"):
                config = replace(config, host=ray.util.get_node_ip_address())
            config = resolve_config(config)
            configs[name] = replace(config, log_dir=config.log_dir / name)
            parts[name] = part_of(config)
        try:
            if places is None:
                places = self.own = Places(parts)
            actors = start_servers(configs, places)
            self.actors = sum(actors.values(), [])
            for name, config in configs.items():  # all start at the same time
                self.models[name] = ModelServers(config, name, actors[name], wait=False)
            for name, servers in self.models.items():
                servers.wait_ready()
                self.router_addresses[name] = servers.router_address
        except BaseException:
            self.shutdown()
            raise

    def sleep(self, asleep: bool = True) -> None:
        """Frees the GPU memory of all models, or takes it again."""
        for servers in self.models.values():
            servers.sleep(asleep)

    def wake_up(self) -> None:
        self.sleep(False)

    def shutdown(self) -> None:
        """Ends everything. May be called twice."""
        for servers in self.models.values():
            servers.stopping.set()
        end_servers(self.actors, self.own)
        for servers in self.models.values():
            servers.shutdown()
        self.actors = []
        self.own = None
