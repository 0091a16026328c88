"""Reward models as a service: N vLLM servers of one model, watched, behind one router address.

    python genrm_server.py --model PATH --num-servers 2 --port 30000
    python genrm_server.py --model PATH --task classify             # a discriminative reward model, POST /classify
    python genrm_server.py --model PATH -- --max-num-seqs 64        # after --: any argument of vLLM's own

Each server has GPUs of its own (--tensor-parallel-size each, from --gpus) or a share of the CPU cores, and a log of its
own. A server that dies leaves the router, is restarted with back-off and comes back when it is healthy; after MAX_DEATHS
deaths in a row it is given up, loudly. The router is watched too. When this process ends, by Ctrl-C, SIGTERM, a crash or
SIGKILL, no process and no port of its servers stays behind (see GUARD).

Inside a Ray program `RewardModelManager({"genrm": Config(...), "rm": Config(...)})` does the same with each server in an
actor, placed over the nodes of the cluster, and each model's router beside the driver.

Sleep and wake, for servers that share their GPU with a trainer: --sleep-mode, then POST /sleep and POST /wake_up to the
router, or sleep() and wake_up() of the manager. vLLM has this on GPU only. Environment variables reach the servers, such
as VLLM_CPU_KVCACHE_SPACE (GiB per server on CPU, 1 if unset).

Left out: Windows and macOS, one server over several nodes, scaling the number of servers up and down, other engines.
"""

import atexit
import contextlib
import json
import os
import re
import signal
import socket
import subprocess
import sys
import threading
import time
import traceback
import urllib.error
import urllib.request
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Literal

import tyro

import router


@dataclass
class Config:
    """N vLLM servers of one model behind one router."""

    model: str
    """Folder of the model, or its name on the Hugging Face Hub (only a Hub name makes anything reach for the network)."""
    num_servers: int = 1
    """How many servers."""
    port: int = 30000
    """Port of the router; 0 lets the system choose (it is printed)."""
    host: str = "127.0.0.1"
    """Address of the router. 0.0.0.0 opens it to other machines: set an API key then. The servers stay on 127.0.0.1."""
    task: Literal["generate", "classify"] = "generate"
    """generate: /v1/chat/completions and /v1/completions. classify: a sequence-classification model, /classify."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """auto takes CUDA where there is one."""
    tensor_parallel_size: int = 1
    """GPUs per server (on CPU: processes per server)."""
    gpus: str = ""
    """GPUs to use, such as 0,1,2,3; dealt out in order. Empty: all visible ones. In Ray the cluster decides."""
    cpus: str = ""
    """Cores for the servers' computing threads, such as 0,1 (CPU only). Empty: all cores of this process, shared evenly."""
    served_model_name: str = ""
    """Name that clients use as "model". Empty: the value of --model."""
    dtype: str = ""
    """Empty: float32 on CPU (bf16 is emulated there without AVX-512), vLLM's choice on GPU."""
    max_model_len: int = 0
    """Tokens of prompt plus answer; 0: the model's own limit."""
    sleep_mode: bool = False
    """Make sleep and wake possible (GPU only). Opens vLLM's control endpoints: trusted clients only."""
    control: bool = False
    """Open the control endpoints without sleep mode (/collective_rpc, /reset_prefix_cache ...): trusted clients only."""
    seed: int = 0
    """Server number i samples with seed + i: with one seed two servers would give the same answers to the same prompts."""
    policy: Literal["round_robin", "least_loaded"] = "round_robin"
    """The router's policy."""
    queue_timeout: float = 180.0
    """Seconds that the router holds a request while no server is healthy; a restart takes a minute or more."""
    api_key: str = ""
    """Key asked by router and servers. Empty: the environment variable ROUTER_API_KEY, which is the better place."""
    log_dir: Path = Path("outputs/genrm_logs")
    """Folder of the logs: server_0.log, ..., router.log."""
    startup_timeout: float = 1800.0
    """Seconds until a server must be ready."""
    ray_cpus: float = 0.5
    """CPUs that a server's actor reserves in Ray. Small, so that a laptop fits trainer, workers and judges."""
    vllm_args: Annotated[tuple[str, ...], tyro.conf.Suppress] = ()
    """Arguments for vLLM's server; on the command line whatever follows a lone --."""

    def check(self) -> None:
        """ValueError naming the field, the value and the remedy."""
        path = Path(self.model).expanduser()
        if path.exists():
            if not (path / "config.json").is_file():
                raise ValueError(f"--model {self.model}: no config.json in it; give a Hugging Face model folder")
        elif self.model.startswith((".", "/", "~")) or self.model.count("/") != 1:
            raise ValueError(f"--model {self.model}: no such folder (a name on the Hub is written OWNER/NAME)")
        least = dict(num_servers=1, tensor_parallel_size=1, max_model_len=0, startup_timeout=0.01, ray_cpus=0)
        for name, lowest in least.items():
            if not getattr(self, name) >= lowest:
                raise ValueError(f"--{name.replace('_', '-')} {getattr(self, name)}: must be at least {lowest}")
        parse_ids(self.gpus, "--gpus")
        parse_ids(self.cpus, "--cpus")
        router.Config(allow_empty=True, port=self.port, queue_timeout=self.queue_timeout).check()


def parse_ids(text: str, name: str) -> list[int]:
    """"0,2" -> [0, 2]. ValueError naming the field."""
    if text and not re.fullmatch(r"\d+(,\d+)*", text):
        raise ValueError(f"{name} {text}: write numbers separated by commas, such as 0,1")
    return [int(part) for part in text.split(",")] if text else []


def share(things: list, count: int) -> list[list]:
    """Deals `things` (cores) evenly to `count` servers; when there are fewer things than servers, some share one."""
    n = len(things)
    return [things[i * n // count:(i + 1) * n // count] or [things[i % n]] for i in range(count)]


def http(method: str, url: str, body: dict | None = None, api_key: str = "", timeout: float = 5.0) -> tuple[int, str]:
    """One small request. Returns (status, text), and (0, what went wrong) when there was no answer."""
    headers = {"Content-Type": "application/json"} | ({"Authorization": f"Bearer {api_key}"} if api_key else {})
    request = urllib.request.Request(url, json.dumps(body).encode() if body is not None else None, headers, method=method)
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))  # never through a proxy of the environment
    try:
        with opener.open(request, timeout=timeout) as answer:
            return answer.status, answer.read().decode("utf-8", "replace")
    except urllib.error.HTTPError as error:
        return error.code, error.read().decode("utf-8", "replace")
    except OSError as error:
        return 0, str(error)


# What Process really starts: it leaves a watch behind in its process group and becomes the command. The watch reads a pipe
# that only this program holds open; when that ends, this program is gone, however it went, and the watch kills the group.
# It is forked twice, so that it is nobody's child: neither Ray, which kills its workers' children, nor vLLM meets it.
GUARD = """
import os, signal, sys
if os.fork() == 0:
    if os.fork() == 0:
        os.read(0, 1)
        os.kill(0, signal.SIGKILL)
    os._exit(0)
os.wait()
os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
os.execv(sys.argv[1], sys.argv[1:])
"""


class Process:
    """A child in a process group of its own, with a log file; the whole group ends with it, and with this program."""

    def __init__(self, log: Path):
        self.log, self.child = log, None

    def launch(self, command: list[str], env: dict[str, str]) -> None:
        self.stop(patience=0)  # an engine can outlive its API server
        self.log.parent.mkdir(parents=True, exist_ok=True)
        with open(self.log, "ab") as file:
            self.log_start = file.tell()
            self.child = subprocess.Popen([sys.executable, "-S", "-c", GUARD, *command], env=env, stdin=subprocess.PIPE,
                                          stdout=file, stderr=subprocess.STDOUT, start_new_session=True)

    def alive(self) -> bool:
        return self.child is not None and self.child.poll() is None

    def stop(self, patience: float = 5.0) -> None:
        """SIGTERM, `patience` seconds later SIGKILL, to the whole group (vLLM's engine is a process of its own)."""
        if self.child is None:
            return
        self.child.terminate()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.child.wait(patience)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.child.pid, signal.SIGKILL)
        self.child.wait()
        self.child.stdin.close()
        self.child = None

    def last_lines(self) -> str:
        """The end of what the child has written."""
        output = self.log.read_bytes()[self.log_start:] if self.child else b""  # none in an actor that Ray has restarted
        return "\n".join(output.decode("utf-8", "replace").splitlines()[-25:]) or "(nothing)"


class VllmServer(Process):
    """One vLLM server on this machine. Used directly, and as a Ray actor by RewardModelManager.

    On CPU it gets the `part`-th of `parts` shares of the cores, else `gpus` (None: CUDA_VISIBLE_DEVICES is right already).
    One that is not `local` listens on its machine's own address, where a router elsewhere can reach it.
    """

    def __init__(self, config: Config, index: int, part: int, parts: int, gpus: list[str] | None = None, local: bool = True):
        super().__init__(config.log_dir / f"server_{index}.log")
        self.config, self.index, self.part, self.parts, self.gpus, self.host = config, index, part, parts, gpus, "127.0.0.1"
        if not local:
            import ray
            self.host = ray.util.get_node_ip_address()
        # Bound, never listening, kept for good: with SO_REUSEADDR the server can bind the same port, and nobody else
        # gets it, neither while the server starts (20 s before it binds) nor while it restarts.
        self.reserved = socket.socket()
        self.reserved.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        self.reserved.bind((self.host, 0))

    def start(self) -> str:
        """Starts the process (again) and returns its URL."""
        config, port = self.config, self.reserved.getsockname()[1]
        command = [sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--model", config.model,
                   "--host", self.host, "--port", str(port), "--served-model-name", config.served_model_name,
                   "--tensor-parallel-size", str(config.tensor_parallel_size), "--disable-uvicorn-access-log",
                   "--seed", str(config.seed + self.index),
                   "--dtype", config.dtype or ("float32" if config.device == "cpu" else "auto")]
        env = dict(os.environ, VLLM_NO_USAGE_STATS="1")
        if config.api_key:
            env["VLLM_API_KEY"] = config.api_key
        if os.path.exists(config.model):
            env["HF_HUB_OFFLINE"] = "1"
        if config.device == "cpu":
            command += ["--enforce-eager"]
            cores = parse_ids(config.cpus, "--cpus") or sorted(os.sched_getaffinity(0))
            ranks = share(share(cores, self.parts)[self.part], config.tensor_parallel_size)
            env.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")
            env["VLLM_CPU_OMP_THREADS_BIND"] = "|".join(",".join(map(str, rank)) for rank in ranks)
            env["OMP_NUM_THREADS"] = str(len(ranks[0]))
        elif config.sleep_mode:
            command += ["--enable-sleep-mode"]
        if config.control or config.sleep_mode:
            env["VLLM_SERVER_DEV_MODE"] = "1"  # else there is no /sleep and no /collective_rpc
        if self.gpus is not None:
            env["CUDA_VISIBLE_DEVICES"] = ",".join(self.gpus)
        if config.task == "classify":
            command += ["--runner", "pooling"]
        if config.max_model_len:
            command += ["--max-model-len", str(config.max_model_len)]
        self.launch([*command, *config.vllm_args], env)
        return f"http://{self.host}:{port}"


WATCH_EVERY = 0.5  # seconds between two looks at a server
HEALTH_TIMEOUT = 2.0  # seconds; one that is late is only counted out after
HANG_SECONDS = 180.0  # without an answer of /health: then it is killed and restarted
MAX_DEATHS = 5  # in a row, after which a server is given up; GOOD_SECONDS without one set the count back
GOOD_SECONDS = 300.0
RESTART_DELAY = 1.0  # seconds before the first restart; doubled with each death in a row, 60 at most


@dataclass
class Slot:
    """One server and what the watcher knows about it."""

    server: object  # VllmServer, or the handle of an actor of it
    number: int
    log: Path
    state: str = "down"  # down -> starting -> ready -> down ...; at the end "given up"
    url: str = ""
    since: float = 0.0  # when it entered the state
    restart_at: float = 0.0
    seen: float = 0.0  # last answer of /health
    deaths: int = 0  # in a row


class ModelServers:
    """One model: its servers and their router, started by the constructor, which returns when all are ready.

    Raises ValueError for settings that cannot work here, OSError when the router's port cannot be had, RuntimeError with
    the name of the log and its last lines when a server fails to start. `router_address` is "host:port", `server_urls`
    the servers' own addresses, `restarts` the number of restarts so far (after one, a server has the weights of --model).
    `before_joining(slot)` is called, if set, when a server that was restarted is healthy and not yet asked anything; it
    stays out while that is false.
    """

    before_joining = None

    def __init__(self, config: Config, name: str = "", servers: list | None = None, wait: bool = True):
        self.config = complete(config)
        self.label = f"[{name}] " if name else ""
        self.slots = [Slot(server, number, self.config.log_dir / f"server_{number}.log")
                      for number, server in enumerate(servers or local_servers(self.config))]
        self.router_process = Process(self.config.log_dir / "router.log")
        self.failure = ""  # why the start failed
        self.restarts = 0
        self.asleep = self.said_no_sleep = False
        self.all_ready, self.stopping = threading.Event(), threading.Event()
        self.lock = threading.RLock()  # the watcher against sleep, wake_up and shutdown
        try:
            self.start_router()
            for slot in self.slots:
                self.start_server(slot)
            threading.Thread(target=self.watch, daemon=True).start()
            if wait:
                self.wait_ready()
        except BaseException:
            self.shutdown()
            raise

    def wait_ready(self) -> None:
        """Blocks until all servers are ready. RuntimeError when one fails to start."""
        while not self.all_ready.wait(0.1):
            if self.failure:
                raise RuntimeError(self.failure)
        self.say(f"router ready at http://{self.router_address} ({len(self.slots)} servers)")

    @property
    def server_urls(self) -> list[str]:
        return [slot.url for slot in self.slots]

    def say(self, text: str) -> None:
        print(self.label + text, flush=True)

    def call_router(self, method: str, path: str, body: dict | None = None, timeout: float = 15.0) -> tuple[int, str]:
        return http(method, f"http://{self.router_address}{path}", body, self.config.api_key, timeout)

    def start_router(self) -> None:
        config, process = self.config, self.router_process
        command = [sys.executable, router.__file__, "--host", config.host, "--port", str(config.port), "--allow-empty",
                   "--policy", config.policy, "--queue-timeout", str(config.queue_timeout)]
        process.launch(command, dict(os.environ, ROUTER_API_KEY=config.api_key))
        while not (found := re.search(r"router listening at http://(\S+:(\d+)) ", process.last_lines())):
            if not process.alive():
                reason = process.last_lines().splitlines()[-1].removeprefix("error: ")
                raise OSError(f"the router did not start: {reason} (log: {process.log})")
            time.sleep(0.05)
        self.router_address, config.port = found[1], int(found[2])  # should it die, it comes back there

    def watch(self) -> None:
        """The thread that looks at the router and every server, again and again."""
        while not self.stopping.wait(WATCH_EVERY):
            with self.lock:
                if self.stopping.is_set():
                    return
                try:
                    if not self.router_process.alive():
                        self.say(f"the router died; restarting it (log: {self.router_process.log})")
                        self.start_router()
                        for slot in self.slots:
                            if slot.state == "ready":
                                self.call_router("POST", "/workers", {"url": slot.url})
                    for slot in self.slots:
                        self.look_at(slot)
                except Exception:  # say a full disk, which may have room again in an hour: the watch goes on
                    self.failure = f"the watcher failed: {traceback.format_exc()}"
                    self.say(self.failure)
                if all(slot.state == "ready" for slot in self.slots):
                    self.all_ready.set()

    def look_at(self, slot: Slot) -> None:
        now = time.monotonic()
        if slot.state == "down" and now >= slot.restart_at:
            self.restarts += 1
            self.start_server(slot)
        if slot.state not in ("starting", "ready"):
            return
        if not self.call(slot, "alive"):
            self.mourn(slot, "died")
        elif http("GET", slot.url + "/health", timeout=HEALTH_TIMEOUT)[0] == 200:
            slot.seen = now
            if slot.state == "starting":
                if self.asleep:  # it must not take the memory that the others left to the trainer
                    http("POST", slot.url + "/sleep?level=1", api_key=self.config.api_key, timeout=120)
                if self.before_joining and not self.before_joining(slot):
                    return
                if self.call_router("POST", "/workers", {"url": slot.url})[0] == 200:  # else at the next look
                    self.say(f"server {slot.number} ready at {slot.url} after {now - slot.since:.0f} s (log: {slot.log})")
                    slot.state, slot.since = "ready", now
            elif now - slot.since > GOOD_SECONDS:
                slot.deaths = 0
        elif slot.state == "starting" and now - slot.since > self.config.startup_timeout:
            self.mourn(slot, f"was not ready after {self.config.startup_timeout:g} s (--startup-timeout)")
        elif slot.state == "ready" and now - slot.seen > HANG_SECONDS:
            self.mourn(slot, f"did not answer /health for {HANG_SECONDS:g} s")

    def call(self, slot: Slot, method: str, *args):
        """A method of the server, here or in its actor. An actor that cannot be reached counts as a dead server (None)."""
        if isinstance(slot.server, VllmServer):
            return getattr(slot.server, method)(*args)
        import ray
        if not ray.is_initialized():  # ray.get would start a new Ray; the old one took its actors along
            return None
        try:
            return ray.get(getattr(slot.server, method).remote(*args), timeout=60)
        except (ray.exceptions.RayActorError, ray.exceptions.GetTimeoutError):
            return None

    def start_server(self, slot: Slot) -> None:
        slot.url = self.call(slot, "start") or slot.url
        slot.state, slot.since = "starting", time.monotonic()

    def mourn(self, slot: Slot, what: str) -> None:
        """A server is dead or as good as dead: out of the router, and plan its restart."""
        self.call_router("DELETE", f"/workers?url={slot.url}")
        end = f"the end of {slot.log}:\n{self.call(slot, 'last_lines')}"
        self.call(slot, "stop", 0)
        slot.deaths += 1
        slot.state = "given up"
        if not self.all_ready.is_set():
            self.failure = f"{self.label}server {slot.number} {what} while starting; {end}"
        elif slot.deaths >= MAX_DEATHS:
            self.say(f"GIVING UP on server {slot.number}: it {what}, the {slot.deaths}th time in a row; {end}")
        else:
            delay = min(60.0, RESTART_DELAY * 2 ** (slot.deaths - 1))
            slot.state, slot.restart_at = "down", time.monotonic() + delay
            self.say(f"server {slot.number} {what}; restarting in {delay:g} s (log: {slot.log})")

    def given_up(self) -> bool:
        """True when no server is left that could come back."""
        return all(slot.state == "given up" for slot in self.slots)

    def sleep(self, path: str = "/sleep?level=1") -> bool:
        """Frees the servers' GPU memory. False where that is not possible, which is said once."""
        if self.config.device == "cpu" or not self.config.sleep_mode:
            if not self.said_no_sleep:
                why = "vLLM cannot on CPU" if self.config.device == "cpu" else "started without sleep_mode"
                self.say(f"sleep and wake do nothing here: {why}")
            self.said_no_sleep = True
            return False
        with self.lock:
            status, text = self.call_router("POST", path, timeout=300)
            if status != 200:
                raise RuntimeError(f"{self.label}POST {path} to the servers failed ({status}): {text[:500]}")
            self.asleep = path != "/wake_up"
        return True

    def wake_up(self) -> bool:
        """The opposite of sleep()."""
        return self.sleep("/wake_up")

    def shutdown(self) -> None:
        """Ends router and servers. May be called twice."""
        self.stopping.set()
        with self.lock:
            self.router_process.stop(patience=10)
            threads = [threading.Thread(target=self.call, args=(slot, "stop")) for slot in self.slots]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()


def complete(config: Config) -> Config:
    """The settings, checked, with what depends on this machine filled in."""
    config.check()
    device = config.device
    if device == "auto":
        import torch  # only here: it takes seconds to import
        device = "cuda" if torch.cuda.is_available() else "cpu"
    path = Path(config.model).expanduser().resolve()
    return replace(config, device=device, api_key=config.api_key or os.environ.get("ROUTER_API_KEY", ""),
                   model=str(path) if path.exists() else config.model, served_model_name=config.served_model_name or config.model,
                   log_dir=Path(config.log_dir).expanduser().absolute())


def local_servers(config: Config) -> list[VllmServer]:
    """The servers of one model on this machine, each with its share of the cores or its GPUs."""
    count, size = config.num_servers, config.tensor_parallel_size
    if config.device == "cpu":
        return [VllmServer(config, i, i, count) for i in range(count)]
    named = config.gpus or os.environ.get("CUDA_VISIBLE_DEVICES", "")  # the variable may hold long names (GPU-6f...)
    if not named:
        import torch
        named = ",".join(map(str, range(torch.cuda.device_count())))
    gpus = [gpu for gpu in named.split(",") if gpu]
    if len(gpus) < size * count:
        raise ValueError(f"--num-servers {count} --tensor-parallel-size {size}: needs {size * count} GPUs, there are {len(gpus)}"
                         "; lower one of them or name more in --gpus")
    return [VllmServer(config, i, i, count, gpus[i * size:(i + 1) * size]) for i in range(count)]


class RewardModelManager:
    """Named reward models inside a Ray program, each with its servers in actors and its router beside the driver.

    Blocks until all are ready; initialises Ray if that has not been done. A placement group spreads the servers over the
    nodes; each reserves its GPUs, or `ray_cpus` CPUs. In a cluster of several nodes the routers, and the servers on other
    nodes, listen on their node's address instead of 127.0.0.1: they have to reach each other.

    `router_addresses` maps each name to "host:port"; `router_address` is that of the first. Raises what ModelServers raises,
    and RuntimeError when the cluster has no room for the servers.
    """

    def __init__(self, models: dict[str, Config]):
        import ray
        if not models:
            raise ValueError("models: name at least one reward model")
        self.models: dict[str, ModelServers] = {}
        self.actors, self.group = [], None
        atexit.register(self.shutdown)
        try:
            if not ray.is_initialized():
                ray.init(include_dashboard=False, logging_level="warning")
            device = "cuda" if ray.cluster_resources().get("GPU") else "cpu"
            unreachable = ("127.0.0.1", "0.0.0.0") if sum(node["Alive"] for node in ray.nodes()) > 1 else ()
            configs = [complete(replace(config, device=device if config.device == "auto" else config.device,
                                        host=ray.util.get_node_ip_address() if config.host in unreachable else config.host,
                                        log_dir=Path(config.log_dir) / name)) for name, config in models.items()]
            self.place(configs)
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

    def place(self, configs: list[Config]) -> None:
        """One bundle of the placement group and one actor per server."""
        import ray
        wanted = [(config, index) for config in configs for index in range(config.num_servers)]
        bundles = [{"CPU": config.ray_cpus} | ({"GPU": config.tensor_parallel_size} if config.device == "cuda" else {})
                   for config, _ in wanted]
        self.group = ray.util.placement_group(bundles, strategy="SPREAD")
        if not self.group.wait(60):
            raise RuntimeError(f"no room in the Ray cluster for {bundles}; free are {ray.available_resources()}")
        nodes = [node for _, node in sorted(ray.util.placement_group_table(self.group)["bundles_to_node_id"].items())]
        driver = ray.get_runtime_context().get_node_id()
        for number, ((config, index), bundle, node) in enumerate(zip(wanted, bundles, nodes)):
            strategy = ray.util.scheduling_strategies.PlacementGroupSchedulingStrategy(self.group, number)
            options = dict(num_cpus=bundle["CPU"], num_gpus=bundle.get("GPU", 0), max_restarts=-1, scheduling_strategy=strategy)
            self.actors.append(ray.remote(VllmServer).options(**options).remote(
                config, index, part=nodes[:number].count(node), parts=nodes.count(node), local=node == driver))

    def sleep(self) -> bool:
        """Frees the GPU memory of all models. False where some cannot."""
        return all([servers.sleep() for servers in self.models.values()])

    def wake_up(self) -> bool:
        """The opposite of sleep()."""
        return all([servers.wake_up() for servers in self.models.values()])

    def shutdown(self) -> None:
        """Ends everything. Idempotent; also runs at the end of the program."""
        import ray
        for servers in self.models.values():
            servers.shutdown()
        if ray.is_initialized():
            for actor in self.actors:
                ray.kill(actor)
            if self.group is not None:
                ray.util.remove_placement_group(self.group)
        self.actors, self.group = [], None
        atexit.unregister(self.shutdown)


def main() -> None:
    argv = sys.argv[1:]
    at = argv.index("--") if "--" in argv else len(argv)
    signals, servers = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP), None
    try:
        config = replace(tyro.cli(Config, args=argv[:at]), vllm_args=tuple(argv[at + 1:]))
        for number in signals:
            signal.signal(number, lambda *_: sys.exit(0))
        servers = ModelServers(config)
        while not servers.given_up():
            time.sleep(1)
        raise RuntimeError("every server was given up")
    except (ValueError, OSError, RuntimeError) as error:
        print(f"error: {error}", file=sys.stderr)
        raise SystemExit(1 if isinstance(error, RuntimeError) else 2) from None
    finally:
        for number in signals:  # a second Ctrl-C must not leave half of it running
            signal.signal(number, signal.SIG_IGN)
        if servers is not None:
            servers.shutdown()


if __name__ == "__main__":
    main()
