"""vLLM servers where Ray places them: reward models, and the policy's own servers, as actors on any node.

    manager = RewardModelManager({"genrm": Config(...), "rm": Config(...)})     # genrm_server.Config
    manager.router_addresses                                                    # {"genrm": "host:port", ...}

ModelServers in genrm_server.py looks after them as after those of one machine. Each router is beside the
the driver.
"""

from collections import Counter
from dataclasses import replace

import ray
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from genrm_server import Config, ModelServers, complete, deal_gpus
from vllm_server import VllmServer


def reserved(configs: list[Config]) -> tuple[list[dict], str]:
    """What the servers of these models reserve in Ray, and how it deals them out: on GPUs node after node, or
    servers of several GPUs would find a single one left on each."""
    bundles = []
    for config in configs:
        gpus = config.gpu_share * config.tensor_parallel_size if config.device == "cuda" else 0
        bundles += [{"CPU": config.ray_cpus} | ({"GPU": gpus} if gpus else {})] * config.num_servers
    return bundles, "PACK" if any(config.device == "cuda" for config in configs) else "SPREAD"


def place_servers(configs: list[Config]) -> tuple[list, object]:
    """An actor for each server of these models (complete()), each in a bundle of one placement group.

    It may be restarted on another node. RuntimeError when the cluster has no room.
    """
    wanted = [(config, index) for config in configs for index in range(config.num_servers)]
    bundles, strategy = reserved(configs)
    (group, nodes), actors = hold(bundles, strategy, "vLLM servers"), []
    driver = ray.get_runtime_context().get_node_id()
    for number, ((config, index), bundle, node) in enumerate(zip(wanted, bundles, nodes)):
        part, parts = nodes[:number].count(node), nodes.count(node)
        hidden = config.device == "cuda" and "GPU" not in bundle  # from Ray, which else deals out the GPUs
        there = PlacementGroupSchedulingStrategy(group, number)
        actor = ray.remote(VllmServer).options(num_cpus=config.ray_cpus, num_gpus=bundle.get("GPU", 0),
                                               max_restarts=-1, scheduling_strategy=there)
        gpus = deal_gpus(config, part) if hidden else ""
        actors.append(actor.remote(config, index, part, parts, gpus, driver))
    return actors, group


def hold(bundles: list[dict], strategy: str, what: str, patience: float = 60.0) -> tuple[object, list[str]]:
    """Reserves these bundles in Ray: the placement group, each one's node. RuntimeError without room."""
    group = ray.util.placement_group(bundles, strategy=strategy)
    if not group.wait(patience):
        ray.util.remove_placement_group(group)
        free = ray.available_resources()
        wanted = " + ".join(f"{number} x {one}" for one, number in Counter(map(str, bundles)).items())
        raise RuntimeError(f"{what}: the Ray cluster has no room for {wanted}; free: {free.get('CPU', 0):g} "
                           f"CPUs and {free.get('GPU', 0):g} GPUs; ask for less or add nodes")
    nodes = ray.util.placement_group_table(group)["bundles_to_node_id"]
    return group, [nodes[number] for number in range(len(bundles))]


def end_servers(actors: list, group) -> None:
    """Ends what place_servers started; a server ends with its actor."""
    if ray.is_initialized():
        for actor in actors:
            ray.kill(actor)
        if group is not None:
            ray.util.remove_placement_group(group)


class RewardModelManager:
    """Named reward models in a Ray program, each with its servers in actors, its router beside the driver.

    Blocks until all are ready. In a cluster of several nodes the routers, and the servers on other nodes,
    listen on their node's address instead of 127.0.0.1: they must reach each other. `router_addresses` maps
    each name to "host:port"; `router_address` is the first. Raises what ModelServers and place_servers raise.
    """

    def __init__(self, models: dict[str, Config]):
        self.models: dict[str, ModelServers] = {}
        self.actors, self.group, configs = [], None, []
        several = sum(node["Alive"] for node in ray.nodes()) > 1
        for name, config in models.items():
            if config.device == "auto" and ray.cluster_resources().get("GPU"):
                config = replace(config, device="cuda")
            if several and config.host in ("127.0.0.1", "0.0.0.0"):
                config = replace(config, host=ray.util.get_node_ip_address())
            config = complete(config)
            configs.append(replace(config, log_dir=config.log_dir / name))
        try:
            self.actors, self.group = place_servers(configs)
            actors = iter(self.actors)
            for name, config in zip(models, configs):  # all start at the same time
                servers = [next(actors) for _ in range(config.num_servers)]
                self.models[name] = ModelServers(config, name, servers, wait=False)
            for servers in self.models.values():
                servers.wait_ready()
        except BaseException:
            self.shutdown()
            raise
        self.router_addresses = {name: servers.router_address for name, servers in self.models.items()}
        self.router_address = next(iter(self.router_addresses.values()))

    def sleep(self, asleep: bool = True) -> bool:
        """Frees the GPU memory of all models. False where some cannot."""
        return all([servers.sleep(asleep) for servers in self.models.values()])

    def wake_up(self) -> bool:
        """The opposite of sleep()."""
        return self.sleep(False)

    def shutdown(self) -> None:
        """Ends everything. May be called twice."""
        for servers in self.models.values():
            servers.stopping.set()
        end_servers(self.actors, self.group)
        for servers in self.models.values():
            servers.shutdown()
        self.actors, self.group = [], None
