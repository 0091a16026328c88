"""A policy of Ray actors on vLLM servers of any node: PolicyServers whose servers and weights are in actors,
too.

    servers = ClusterServers(group, tokenizer, config)     # group: a PolicyGroup; Ray places the servers

Weights travel from the ranks to a WeightFolder on each node that has servers, without passing this process.
"""

import threading

import ray
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from genrm_server import Config, ModelServers, Slot, end_servers, place_servers
from policy import RanksLost
from rollout import RELOAD, PolicyServers, WeightFolder


class ClusterServers(PolicyServers):
    """As PolicyServers. Raises RanksLost from `check` and `sync` where the ranks have died that had the
    weights."""

    actors, placement, lost = (), None, None

    def start(self, config: Config) -> None:
        self.folders, self.provision = {}, threading.Lock()  # node -> the WeightFolder's actor there
        self.actors, self.placement = place_servers([config])
        self.provide({ray.get(actor.node.remote()) for actor in self.actors})
        hooks = dict(before_starting=self.before_starting, before_joining=self.is_current)
        self.servers = ModelServers(config, "policy", self.actors, **hooks)

    def before_starting(self, slot: Slot) -> None:
        """Sees to it that the server's node has the weights: its actor may have moved to another one."""
        starts = self.policy.starts
        try:
            self.provide({ray.get(slot.server.node.remote())})
        except RanksLost as error:
            self.lost = starts, error
            raise

    def check(self) -> None:
        """RanksLost where a server needs weights and the ranks are gone: without new ones it never comes."""
        lost, self.lost = self.lost, None
        if lost and lost[0] == self.policy.starts:  # not of ranks before these
            raise lost[1]

    def provide(self, nodes: set[str]) -> None:
        """Makes a folder with the policy's weights of now on each of these nodes that has none."""
        with self.provision:
            for node in nodes & set(self.folders):
                try:
                    ray.get(self.folders[node].__ray_ready__.remote())
                except ray.exceptions.RayActorError:
                    del self.folders[node]
            new = {}
            for node in nodes - set(self.folders):
                there = NodeAffinitySchedulingStrategy(node, soft=False)
                actor = ray.remote(WeightFolder).options(num_cpus=0, scheduling_strategy=there)
                new[node] = actor.remote(*self.contents)
            gone = self.policy.send_weights(list(new.values()), self.dtype) if new else ()
            for index, (node, folder) in enumerate(new.items()):
                if index not in gone:
                    ray.get(folder.publish.remote())
                    self.folders[node] = folder

    def sync(self) -> None:
        with self.provision:
            nodes, folders = list(self.folders), list(self.folders.values())
            gone = {nodes[index] for index in self.policy.send_weights(folders, self.dtype)}
        with self.servers.lock:  # no server joins between the new files and the reload
            for node, folder in zip(nodes, folders):
                try:
                    if node not in gone:
                        ray.get(folder.publish.remote())
                except ray.exceptions.RayActorError:
                    gone.add(node)
            with self.provision:
                for node, folder in zip(nodes, folders):
                    # else a server's thread has renewed it
                    if node in gone and self.folders.get(node) is folder:
                        del self.folders[node]
            if gone:  # where only the folder died its servers go on
                self.provide(gone & {node["NodeID"] for node in ray.nodes() if node["Alive"]})
            for call in RELOAD:
                self.servers.ask_all(*call)
        self.warn_once()

    def shutdown(self) -> None:
        if self.servers:
            self.servers.stopping.set()
        end_servers(self.actors, self.placement)
        super().shutdown()
        for folder in getattr(self, "folders", {}).values() if ray.is_initialized() else ():
            try:
                ray.get(folder.close.remote(), timeout=10)
            except (ray.exceptions.RayError, TimeoutError):  # its node is gone; else the next run removes it
                pass
            ray.kill(folder)
