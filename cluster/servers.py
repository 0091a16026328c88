"""The policy on vLLM servers, which get its new weights at every `sync`.

    servers = PolicyServers(policy, tokenizer, config)     # a Policy in this process: servers of this machine
    servers = ClusterServers(group, tokenizer, config)     # a PolicyGroup: servers where Ray places them

rollout.rollout_vllm samples from either. Weights travel as files (weights.py), from the policy or from its
rank 0, to a folder on each node that has servers; in the latter case not through this process.
"""

import contextlib
import copy
import hashlib
import os
import shutil
import tempfile
import threading
from dataclasses import replace
from pathlib import Path

import ray
import torch
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from cluster.placement import Places, end_servers, part_of, start_servers
from cluster.weights import NO_HEAD, WeightFolder, packs, served_weights
from genrm_server import Config, ModelServers, ServerSlot, resolve_config
from policy import RanksLost

# The new weights, and no keys of the old ones; with reset_running_requests a failed reset is an error in
# every vLLM.
RELOAD = (("/collective_rpc", {"method": "reload_weights"}),
          ("/reset_prefix_cache?reset_running_requests=true", None))  # fmt: skip


class PolicyServers:
    """A policy in training on vLLM servers of this machine, which get its new weights at every `sync`.

    They read them in a WeightFolder, when they start and at every sync. One that dies is restarted and comes
    back with the newest weights; meanwhile the others do its work. On GPU they serve bf16, else float32.
    config: everything but the model's folder. Raises what ModelServers raises, and RuntimeError naming the
    server when one refuses the weights.
    """

    def __init__(self, policy, tokenizer, config: Config):
        self.policy = policy
        self.service = None  # a ModelServers
        self.is_checked = False
        self.dtype = torch.bfloat16 if policy.device.type == "cuda" else torch.float32
        about = policy.about()
        check_servable(about, policy.device.type)
        path = folder_for(config.log_dir, self.dtype.itemsize * about["numel"])
        self.contents = path, model_files(about, tokenizer)  # of a WeightFolder
        # Log-probabilities after temperature; no top_k or penalty that the model's folder may suggest.
        fixed = ("--logprobs-mode", "processed_logprobs", "--generation-config", "vllm")
        config = replace(
            config,
            model=path,
            device=policy.device.type,
            port=0,
            control=True,
            dtype=str(self.dtype).removeprefix("torch."),
            vllm_args=fixed + config.vllm_args,
        )
        self.folder = WeightFolder(*self.contents)  # resolve_config looks for it
        try:
            self.start(resolve_config(config))
        except BaseException:
            self.shutdown()
            raise

    def start(self, config: Config):
        self.write_weights()
        self.service = ModelServers(config, "policy", before_joining=self.make_current)

    def write_weights(self):
        for number, pack in enumerate(packs(served_weights(self.policy, self.dtype))):
            self.folder.write(number, pack)

    def make_current(self, slot: ServerSlot):
        """Before a server joins: one that was restarted may have read the weights of before a sync."""
        if self.service:
            for call in RELOAD:
                self.service.post_control(slot, *call)

    def sync(self):
        """The policy's weights to all servers, of which none may be generating."""
        with self.service.lock:  # no server joins between the new files and the reload
            self.write_weights()
            for call in RELOAD:
                self.service.post_control_all(*call)
        if not self.is_checked:
            self.is_checked = True
            for slot in self.service.slots:
                if slot.joined:
                    line = self.service.call_server(slot, "last_lines", "weights were not loaded", 1)
                    if line:
                        print(f"policy servers: WARNING: {line}", flush=True)

    def check(self):
        """Raises where no request can be answered any more; called while rollouts wait."""
        self.service.check()

    def shutdown(self):
        """Ends the servers and removes the folder."""
        if self.service:
            self.service.shutdown()
        self.folder.close()


class ClusterServers(PolicyServers):
    """As PolicyServers; `check` and `sync` raise RanksLost where the ranks with the weights died. They are
    where the group's places have room for each "policy server"; if it has none, at places of their own."""

    actors = ()
    own = None
    lost = None
    folders = {}  # node -> the WeightFolder's actor there, which has the weights

    def start(self, config: Config):
        self.folders = {}
        self.provision = threading.Lock()
        places = self.policy.places
        if not places:
            places = self.own = Places({"policy server": part_of(config)})
        self.actors = start_servers({"policy server": config}, places)["policy server"]
        self.provide(set(places.nodes("policy server")))
        hooks = dict(before_starting=self.before_starting, before_joining=self.make_current)
        self.service = ModelServers(config, "policy", self.actors, **hooks)

    def before_starting(self, slot: ServerSlot):
        """Sees to it that the server's node has the weights: its actor may have moved to another one."""
        starts = self.policy.starts
        try:
            self.provide({ray.get(slot.server.node.remote())})
        except RanksLost as error:
            self.lost = starts, error
            raise

    def check(self):
        """RanksLost where a server needs weights and the ranks are gone: without new ones it never comes."""
        super().check()
        lost, self.lost = self.lost, None
        if lost and lost[0] == self.policy.starts:  # not of ranks before these
            raise lost[1]

    def provide(self, nodes: set[str]):
        """Makes a folder with the policy's weights of now on each of these nodes that has none."""
        with self.provision:
            new = {}
            for node in nodes - set(self.folders):
                there = NodeAffinitySchedulingStrategy(node, soft=False)
                again = dict(max_restarts=-1, max_task_retries=-1)  # as long as the node is there
                actor = ray.remote(WeightFolder).options(num_cpus=0, scheduling_strategy=there, **again)
                new[node] = actor.remote(*self.contents)
            if new:
                self.fill(new)

    def write_weights(self):
        with self.provision:
            self.fill(self.folders)

    def fill(self, folders: dict):
        """The policy's weights of now to these folders, {node: folder}; nodes that are gone are forgotten."""
        gone = self.policy.send_weights(folders, self.dtype)
        for node, folder in list(folders.items()):
            if node in gone:
                self.folders.pop(node, None)
            else:
                self.folders[node] = folder

    def shutdown(self):
        if self.service:
            self.service.stopping.set()
        end_servers(self.actors, self.own)
        super().shutdown()
        if not ray.is_initialized():
            return
        for folder in self.folders.values():
            with contextlib.suppress(ray.exceptions.RayError):  # its node is gone
                ray.get(folder.close.remote(), timeout=10)
            ray.kill(folder)


def check_servable(about: dict, device: str):
    """ValueError if vLLM cannot load new weights of this policy, or computes garbage with them."""
    config = about["config"]
    name = about["architecture"]
    counts = [n for key, n in config.to_dict().items() if key.endswith("experts") and isinstance(n, int)]
    if device == "cpu" and max(counts, default=0) > 1:
        raise ValueError(
            f"--rollout vllm: after new weights vLLM's servers on CPU compute garbage with a {name}, "
            "which is a mixture of experts; take --rollout hf, or a GPU"
        )
    if name in NO_HEAD and not config.tie_word_embeddings:
        raise ValueError(f"--rollout vllm: vLLM's {name} has no head of its own; take --rollout hf")


def folder_for(log_dir: Path | None, size: int) -> str:
    """For weights of so many bytes, the same on all nodes: in shared memory where that has room on this one.

    A run that was killed and goes on has the same one again.
    """
    whose = f"{os.getuid()} {Path(log_dir or str(os.getpid())).absolute()} {size}"
    name = f"fapo_policy_{hashlib.sha256(whose.encode()).hexdigest()[:12]}"
    base = "/dev/shm"
    shutil.rmtree(f"{base}/{name}", ignore_errors=True)
    free = shutil.disk_usage(base).free
    if free < 1.1 * size:
        base = tempfile.gettempdir()
        why = f"they have {size / 1e9:.1f} GB, /dev/shm has {free / 1e9:.1f} GB free; enlarge it"
        print(f"policy servers: weights go through {base}, which may be a slow disk: {why}", flush=True)
    return f"{base}/{name}"


def model_files(about: dict, tokenizer) -> dict[str, bytes]:
    """What goes with the weights: {name: content}."""
    served = copy.deepcopy(about["config"])
    # False: vLLM's reload leaves a tied head with its old weights, silently
    served.tie_word_embeddings = about["architecture"] in NO_HEAD
    served.architectures = [about["architecture"]]
    served.head_dtype = "float32"  # as in training, where vLLM's release can do it; 0.24 says that it cannot
    with tempfile.TemporaryDirectory() as folder:
        served.save_pretrained(folder)
        tokenizer.save_pretrained(folder)
        paths = [path for path in Path(folder).rglob("*") if path.is_file()]
        return {str(path.relative_to(folder)): path.read_bytes() for path in paths}
