"""vLLM servers for a policy that is sharded over ranks, on the nodes where Ray places them.

    servers = ClusterServers(group, tokenizer, config)     # a PolicyGroup

rollout.rollout_vllm samples from these servers as from PolicyServers. Rank 0 sends the weights as files
(weights.py) directly to a folder on each other node with servers. On its own node, rank 0 writes the files.
"""

import contextlib
import threading

import ray
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from cluster.placement import Reservation, end_actors, server_spec, start_servers
from genrm_server import Config, ModelServers, ServerSlot
from policy import RanksLost
from rollout import PolicyServers
from weight_sync import WeightFolder

NAME = "policy server"  # the name of these servers in a Reservation


class ClusterServers(PolicyServers):
    """PolicyServers as Ray actors. `check` and `sync` raise RanksLost if the ranks with the weights died.

    The servers run where the group's reservation places each "policy server". If the group has no
    reservation, the servers make one.
    """

    actors = ()
    own_reservation = None
    lost = None
    folders = {}  # node -> actor of the WeightFolder there

    def start(self, config: Config):
        self.folders = {}
        self.nodes = {}  # the node on which each server started last
        self.folders_lock = threading.Lock()
        reservation = self.policy.reservation
        if not reservation:
            reservation = self.own_reservation = Reservation({NAME: server_spec(config)})
        self.actors = start_servers({NAME: config}, reservation)[NAME]
        self.provide_folders(set(reservation.nodes(NAME)))
        self.service = ModelServers(
            config,
            "policy",
            self.actors,
            before_starting=self.before_starting,
            before_joining=self.reload,
        )

    def before_starting(self, slot: ServerSlot):
        """Provide the weights on the server's node. A restart may have moved the actor to another node."""
        starts = self.policy.starts
        node = ray.get(slot.server.node.remote())
        try:
            self.provide_folders({node})
        except RanksLost as error:
            self.lost = starts, error
            raise
        self.nodes[slot] = node  # last, because a sync may be looking up the checksums of the old node

    def check(self):
        """Raise RanksLost if a server needs weights from ranks that have died."""
        super().check()
        lost, self.lost = self.lost, None
        if lost and lost[0] == self.policy.starts:  # The same ranks are still in use.
            raise lost[1]

    def provide_folders(self, nodes: set[str]):
        """Make a folder with the current weights on each of these nodes that does not have one."""
        with self.folders_lock:
            new = {}
            for node in nodes - set(self.folders):
                actor = ray.remote(WeightFolder).options(
                    num_cpus=0,
                    scheduling_strategy=NodeAffinitySchedulingStrategy(node, soft=False),
                    max_restarts=-1,  # retry as long as the node exists
                    max_task_retries=-1,
                )
                new[node] = actor.remote(*self.contents)
            if new:
                self.fill(new)

    def write_weights(self):
        with self.folders_lock:
            self.fill(self.folders)

    def sums_of(self, slot: ServerSlot) -> dict:
        return self.sums[self.nodes[slot]]

    def fill(self, folders: dict):
        """Send the current weights to these folders, {node: folder}. Forget nodes that no longer exist."""
        gone, sums = self.policy.send_weights(folders, str(self.folder.path), self.dtype)
        self.sums |= dict.fromkeys(folders, sums)  # Another node may still have older weights.
        for node in gone:
            folders.pop(node, None)
        self.folders |= folders

    def shutdown(self):
        if self.service:
            self.service.stopping.set()
        end_actors(self.actors, self.own_reservation)
        super().shutdown()
        if not ray.is_initialized():
            return
        for folder in self.folders.values():
            with contextlib.suppress(ray.exceptions.RayError):  # The node no longer exists.
                ray.get(folder.close.remote(), timeout=10)
            ray.kill(folder)
