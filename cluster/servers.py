"""The policy on vLLM servers, which get its new weights at every `sync`.

    servers = PolicyServers(policy, tokenizer, config)     # a Policy in this process: servers of this machine
    servers = ClusterServers(group, tokenizer, config)     # a PolicyGroup: servers where Ray places them

rollout.rollout_vllm samples from either. Weights travel as files, from the policy or from its rank 0, to a
WeightFolder on each node that has servers; in the latter case not through this process.

Left out: transfer from GPU to GPU (NCCL, CUDA IPC), new weights in the middle of a response.
"""

import contextlib
import copy
import fcntl
import secrets
import shutil
import tempfile
import threading
from dataclasses import replace
from pathlib import Path

import ray
import safetensors.torch
import torch
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from cluster.placement import Places, end_servers, part_of, start_servers
from genrm_server import Config, ModelServers, Watched, complete
from policy import RanksLost

# The new weights, and no keys of the old ones; with reset_running_requests a failed reset is an error in
# every vLLM.
RELOAD = (("/collective_rpc", {"method": "reload_weights"}),
          ("/reset_prefix_cache?reset_running_requests=true", None))  # fmt: skip
PACK = 2**29  # bytes of weights that travel together


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
        self.folder = None
        self.is_checked = False
        self.dtype = torch.bfloat16 if policy.device.type == "cuda" else torch.float32
        about = policy.about()
        path = f"/dev/shm/{LINK}{secrets.token_hex(4)}"  # each node's own
        size = 2 * self.dtype.itemsize * about["numel"]
        self.contents = path, model_files(about, tokenizer), size  # of a WeightFolder
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
        try:
            self.folder = WeightFolder(*self.contents)
            self.folder.publish()  # complete() looks for the model's folder
            self.start(complete(config))
        except BaseException:
            self.shutdown()
            raise

    def start(self, config: Config) -> None:
        self.write_weights()
        self.service = ModelServers(config, "policy", before_joining=self.is_current)

    def write_weights(self) -> None:
        for number, pack in enumerate(packs(self.policy.weights(self.dtype))):
            self.folder.add(number, pack)
        self.warn(self.folder.publish())

    def is_current(self, slot: Watched) -> bool:
        """Before a server joins: one that was restarted may have read the weights of before a sync."""
        if self.service:
            for call in RELOAD:
                self.service.ask(slot, *call)
        return True

    def sync(self) -> None:
        """The policy's weights to all servers, of which none may be generating."""
        with self.service.lock:  # no server joins between the new files and the reload
            self.write_weights()
            for call in RELOAD:
                self.service.ask_all(*call)
        if not self.is_checked:
            self.is_checked = True
            for slot in self.service.slots:
                if slot.joined:
                    self.warn(self.service.call(slot, "last_lines", "weights were not loaded", 1))

    def warn(self, text: str) -> None:
        if text:
            print(f"policy servers: WARNING: {text}", flush=True)

    def check(self) -> None:
        """Raises where no request can be answered any more; called while rollouts wait."""

    def shutdown(self) -> None:
        """Ends the servers and removes the folder."""
        if self.service:
            self.service.shutdown()
        if self.folder:
            self.folder.close()


class ClusterServers(PolicyServers):
    """As PolicyServers; `check` and `sync` raise RanksLost where the ranks with the weights died. They are
    where the group's places have room for each "policy server"; if it has none, at places of their own."""

    actors = ()
    own = None
    lost = None
    folders = {}  # node -> the WeightFolder's actor there

    def start(self, config: Config) -> None:
        self.folders = {}
        self.provision = threading.Lock()
        places = self.policy.places
        if not places:
            places = self.own = Places({"policy server": part_of(config)})
        self.actors = start_servers({"policy server": config}, places)["policy server"]
        self.provide({ray.get(actor.node.remote()) for actor in self.actors})
        hooks = dict(before_starting=self.before_starting, before_joining=self.is_current)
        self.service = ModelServers(config, "policy", self.actors, **hooks)

    def before_starting(self, slot: Watched) -> None:
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
            self.fill(new)

    def fill(self, folders: dict) -> None:
        """The policy's weights of now to these folders, {node: folder}; those that died are forgotten."""
        if not folders:
            return
        gone = self.policy.send_weights(list(folders.values()), self.dtype)
        for index, (node, folder) in enumerate(folders.items()):
            self.folders.pop(node, None)
            if index not in gone:
                with contextlib.suppress(ray.exceptions.RayActorError):
                    self.warn(ray.get(folder.publish.remote()))
                    self.folders[node] = folder

    def write_weights(self) -> None:
        with self.provision:
            nodes = set(self.folders)
            self.fill(dict(self.folders))
            lost = nodes - set(self.folders)
        if lost:  # where only the folder died its servers go on
            self.provide(lost & {node["NodeID"] for node in ray.nodes() if node["Alive"]})

    def shutdown(self) -> None:
        if self.service:
            self.service.stopping.set()
        end_servers(self.actors, self.own)
        super().shutdown()
        if not ray.is_initialized():
            return
        for folder in self.folders.values():
            with contextlib.suppress(ray.exceptions.RayError):  # its node is gone, or the next run removes it
                ray.get(folder.close.remote(), timeout=10)
            ray.kill(folder)


def model_files(about: dict, tokenizer) -> dict[str, bytes]:
    """What goes with the weights: {name: content}."""
    served = copy.deepcopy(about["config"])
    served.tie_word_embeddings = False  # vLLM's reload leaves a tied head with its old weights, silently
    served.architectures = [about["architecture"]]
    served.head_dtype = "float32"  # as in training, where vLLM's release can do it; 0.24 says that it cannot
    with tempfile.TemporaryDirectory() as folder:
        served.save_pretrained(folder)
        tokenizer.save_pretrained(folder)
        paths = [path for path in Path(folder).rglob("*") if path.is_file()]
        return {str(path.relative_to(folder)): path.read_bytes() for path in paths}


def packs(weights):
    """Named tensors -> the contents of safetensors files of about half a GiB each."""
    pack = {}
    size = 0
    for name, tensor in weights:
        if pack and size + tensor.nbytes > PACK:
            yield safetensors.torch.save(pack, metadata={"format": "pt"})
            pack = {}
            size = 0
        pack[name] = tensor.to("cpu", copy=True).contiguous()
        size += tensor.nbytes
    yield safetensors.torch.save(pack, metadata={"format": "pt"})


FOLDER, LINK = "fapo_policy_weights_", "fapo_policy_"


class WeightFolder:
    """The policy's model folder for the servers of one node: used directly, or as a Ray actor there.

    It lies in the node's shared memory where that has room for old and new weights of `size` bytes together,
    else on disk; `path`, the same on all nodes, links to the one published last. files: what goes with the
    weights, {name: content}. Removed by `close`; if this process is killed once they are there, by the next
    one on this node (a lock tells that its owner is gone).
    """

    def __init__(self, path: str, files: dict[str, bytes], size: int):
        remove_abandoned()
        base = "/dev/shm"
        self.warning = ""
        free = shutil.disk_usage(base).free
        if free < 1.1 * size:
            base = tempfile.gettempdir()
            self.warning = (
                f"weights go through {base}, which may be a slow disk: old and new ones are "
                f"{size / 1e9:.1f} GB, /dev/shm has {free / 1e9:.1f} GB free; enlarge it"
            )
        self.path = Path(path)
        self.folder = Path(tempfile.mkdtemp(prefix=FOLDER, dir=base))
        self.lock = lock(self.folder)
        for name, content in files.items():
            (self.folder / name).parent.mkdir(exist_ok=True)
            (self.folder / name).write_bytes(content)

    def add(self, number: int, pack) -> None:
        """Takes one part of new weights, the contents of a safetensors file. Servers do not see it yet."""
        name = f"model_{number}.new" if number else "model.new"
        (self.folder / name).write_bytes(memoryview(pack))

    def publish(self) -> str:
        """The parts that came since the last time take the place of the old ones. Returns a warning, once."""
        new = {path: path.with_suffix(".safetensors") for path in self.folder.glob("model*.new")}
        if new:
            for path in set(self.folder.glob("*.safetensors")) - set(new.values()):
                path.unlink()
        for path, target in new.items():
            path.replace(target)
        if self.path.resolve() != self.folder.resolve():  # not before: this may be a late one, given up
            self.path.unlink(missing_ok=True)
            self.path.symlink_to(self.folder)
        if not new:
            return ""
        warning, self.warning = self.warning, ""
        return warning

    def close(self) -> None:
        shutil.rmtree(self.folder, ignore_errors=True)
        if not self.path.exists():
            self.path.unlink(missing_ok=True)


def lock(folder: Path):
    """An open file that holds the folder's lock until it is closed; None where another process holds it."""
    try:
        file = open(folder / ".lock", "w")
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        return file
    except OSError:  # taken, or another user's
        return None


def remove_abandoned() -> None:
    """What killed runs have left on this node."""
    for base in ("/dev/shm", tempfile.gettempdir()):
        for file in Path(base).glob(f"{FOLDER}*/config.json"):  # which its owner writes once it has the lock
            if lock(file.parent):
                shutil.rmtree(file.parent, ignore_errors=True)
        for link in Path(base).glob(f"{LINK}*"):
            if not link.exists():
                link.unlink(missing_ok=True)
