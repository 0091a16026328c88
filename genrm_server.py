"""Reward models as a service: N vLLM servers of one model, watched, behind one router address.

    python genrm_server.py --model PATH --num-servers 2 --port 30000
    python genrm_server.py --model PATH --task classify             # a discriminative reward model, POST /classify
    python genrm_server.py --model PATH -- --max-num-seqs 64        # after --: any argument of vLLM's own

Each server has GPUs of its own (--tensor-parallel-size each, from --gpus) or a share of the CPU cores, and a log of its
own. A server that dies leaves the router, is restarted with back-off and comes back when it is healthy; after
--max-deaths deaths in a row it is given up, loudly. The router is watched in the same way. When this process ends, by
Ctrl-C, SIGTERM, a crash or SIGKILL, no process and no port of its servers stays behind (see GUARD).

Inside a Ray program `RewardModelManager({"genrm": Config(...), "rm": Config(...)})` does the same with each server in an
actor, placed over the nodes of the cluster, and each model's router beside the driver.

Sleep and wake, for servers that share their GPU with a trainer: --sleep-mode, then POST /sleep and POST /wake_up to the
router, or sleep() and wake_up() of the manager. vLLM has this on GPU only.

Left out: Windows and macOS, one server over several nodes, scaling the number of servers up and down, other engines.
"""

import atexit
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
    cpu_kv_cache_gib: int = 1
    """GiB of KV cache per server (CPU only; on GPU pass -- --gpu-memory-utilization)."""
    sleep_mode: bool = False
    """Make sleep and wake possible (GPU only)."""
    control_endpoints: bool = False
    """Serve vLLM's control endpoints (/collective_rpc, /pause, ...), which let a trainer replace the weights. Implied by
    --sleep-mode on GPU. Trusted clients only."""
    policy: Literal["round_robin", "least_loaded"] = "round_robin"
    """The router's policy."""
    queue_timeout: float = 180.0
    """Seconds that the router holds a request while no server is healthy; a restart takes a minute or more."""
    request_timeout: float = 3600.0
    """Seconds one request may take in all."""
    api_key: str = ""
    """Key asked by router and servers. Empty: the environment variable ROUTER_API_KEY, which is the better place."""
    log_dir: Path = Path("outputs/genrm_logs")
    """Folder of the logs: server_0.log, ..., router.log."""
    startup_timeout: float = 1800.0
    """Seconds until a server must be ready."""
    max_deaths: int = 5
    """Deaths in a row after which a server is given up. Five good minutes set the count back."""
    restart_delay: float = 1.0
    """Seconds before the first restart; doubled with each death in a row, 60 at most."""
    hang_timeout: float = 180.0
    """Seconds for which a running server may leave /health unanswered before it is killed and restarted."""
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
        least = dict(num_servers=1, tensor_parallel_size=1, max_model_len=0, cpu_kv_cache_gib=1, startup_timeout=0.01,
                     max_deaths=1, restart_delay=0.01, hang_timeout=0.01, ray_cpus=0)
        for name, lowest in least.items():
            if not getattr(self, name) >= lowest:
                raise ValueError(f"--{name.replace('_', '-')} {getattr(self, name)}: must be at least {lowest}")
        parse_ids(self.gpus, "--gpus")
        parse_ids(self.cpus, "--cpus")
        router.Config(allow_empty=True, host=self.host, port=self.port, queue_timeout=self.queue_timeout,
                      request_timeout=self.request_timeout).check()


def parse_ids(text: str, name: str) -> list[int]:
    """"0,2" -> [0, 2]. ValueError naming the field."""
    if text and not re.fullmatch(r"\d+(,\d+)*", text):
        raise ValueError(f"{name} {text}: write numbers separated by commas, such as 0,1")
    return [int(part) for part in text.split(",")] if text else []


def share(things: list, count: int) -> list[list]:
    """Deals `things` (cores) evenly to `count` servers; when there are fewer things than servers, some share one."""
    n = len(things)
    return [things[i * n // count:(i + 1) * n // count] or [things[i % n]] for i in range(count)]


def log_path(config: Config, name: str) -> Path:
    return Path(config.log_dir).expanduser().absolute() / f"{name}.log"


def say(text: str) -> None:
    print(text, flush=True)


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


# ---- processes that do not outlive this one ----------------------------------------------------------------------------

# A process of its own that learns the process groups started here through its standard input and kills them when that
# input ends, that is, when this process is gone, however it went. It forks once more, so that it is nobody's child (Ray
# kills the children of its workers), and is no member of the terminal's group (Ctrl-C).
GUARD = """
import os, signal, sys
if os.fork():
    os._exit(0)
groups = set()
for line in sys.stdin:
    (groups.add if line[0] == "+" else groups.discard)(int(line[1:]))
for group in groups:
    try:
        os.killpg(group, signal.SIGKILL)
    except OSError:
        pass
"""
_guard: subprocess.Popen | None = None
_groups: set[int] = set()
_guard_lock = threading.Lock()


def tell_guard(sign: str, group: int) -> None:
    """Adds ("+") or removes ("-") a process group."""
    global _guard
    with _guard_lock:
        (_groups.add if sign == "+" else _groups.discard)(group)
        try:
            if _guard is None:
                raise BrokenPipeError
            _guard.stdin.write(f"{sign}{group}\n")
        except BrokenPipeError:  # none yet, or somebody has killed it
            _guard = subprocess.Popen([sys.executable, "-S", "-c", GUARD], stdin=subprocess.PIPE, text=True, bufsize=1,
                                      stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, start_new_session=True)
            _guard.wait()  # the part that forked; the fork keeps reading
            _guard.stdin.write("".join(f"+{group}\n" for group in _groups))


class Process:
    """A child in a process group of its own, with a log file; the whole group ends with it."""

    def __init__(self, command: list[str], env: dict[str, str], log: Path):
        log.parent.mkdir(parents=True, exist_ok=True)
        with open(log, "ab") as file:
            self.log_start = file.tell()
            self.child = subprocess.Popen(command, env=env, stdin=subprocess.DEVNULL, stdout=file,
                                          stderr=subprocess.STDOUT, start_new_session=True)
        self.log = log
        tell_guard("+", self.child.pid)

    def alive(self) -> bool:
        return self.child.poll() is None

    def stop(self, patience: float) -> None:
        """SIGTERM, `patience` seconds later SIGKILL, to the whole group (vLLM's engine is a process of its own)."""
        if patience and self.alive():
            self.child.terminate()
            try:
                self.child.wait(patience)
            except subprocess.TimeoutExpired:
                pass
        try:
            os.killpg(self.child.pid, signal.SIGKILL)
        except ProcessLookupError:
            pass
        self.child.wait()
        tell_guard("-", self.child.pid)

    def output(self) -> str:
        """What this process has written, the last 64 KiB of it."""
        with open(self.log, "rb") as file:
            file.seek(max(self.log_start, file.seek(0, os.SEEK_END) - (1 << 16)))
            return file.read().decode("utf-8", "replace")


class VllmServer:
    """One vLLM server on this machine. Used directly, and as a Ray actor by RewardModelManager."""

    def __init__(self, config: Config, index: int, driver_node: str = ""):
        self.config, self.index, self.host = config, index, "127.0.0.1"
        self.process: Process | None = None
        if driver_node and self.node() != driver_node:
            import ray
            self.host = ray.util.get_node_ip_address()  # the router has to reach it over the network
        # Bound, never listening, kept for good: with SO_REUSEADDR the server can bind the same port, and nobody else
        # gets it, neither while the server starts (20 s before it binds) nor while it restarts.
        self.reserved = socket.socket()
        self.reserved.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        self.reserved.bind((self.host, 0))
        self.url = f"http://{self.host}:{self.reserved.getsockname()[1]}"

    def start(self, device: str, part: int, parts: int, gpus: list[str] | None) -> str:
        """Starts the process (again) and returns its URL. It gets the `part`-th of `parts` shares of the cores on CPU, else
        `gpus`; None means that CUDA_VISIBLE_DEVICES is right already."""
        config = self.config
        self.stop(patience=0)  # an engine can outlive its API server
        path = Path(config.model).expanduser()
        model = str(path.resolve()) if path.exists() else config.model
        command = [sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--model", model,
                   "--host", self.host, "--port", self.url.rpartition(":")[2],
                   "--served-model-name", config.served_model_name or config.model,
                   "--tensor-parallel-size", str(config.tensor_parallel_size), "--disable-uvicorn-access-log"]
        env = dict(os.environ, VLLM_NO_USAGE_STATS="1")
        if config.api_key:
            env["VLLM_API_KEY"] = config.api_key
        if path.exists():
            env["HF_HUB_OFFLINE"] = "1"
        if device == "cpu":
            command += ["--dtype", config.dtype or "float32", "--enforce-eager"]
            env["VLLM_CPU_KVCACHE_SPACE"] = str(config.cpu_kv_cache_gib)
            cores = parse_ids(config.cpus, "--cpus") or sorted(os.sched_getaffinity(0))
            ranks = share(share(cores, parts)[part], config.tensor_parallel_size)
            env["VLLM_CPU_OMP_THREADS_BIND"] = "|".join(",".join(map(str, rank)) for rank in ranks)
            env["OMP_NUM_THREADS"] = str(len(ranks[0]))
        else:
            command += ["--dtype", config.dtype or "auto"]
            if gpus is not None:
                env["CUDA_VISIBLE_DEVICES"] = ",".join(gpus)
            if config.sleep_mode:
                command += ["--enable-sleep-mode"]
        if config.control_endpoints or (config.sleep_mode and device == "cuda"):
            env["VLLM_SERVER_DEV_MODE"] = "1"
        if config.task == "classify":
            command += ["--runner", "pooling"]
        if config.max_model_len:
            command += ["--max-model-len", str(config.max_model_len)]
        self.process = Process(command + list(config.vllm_args), env, log_path(config, f"server_{self.index}"))
        return self.url

    def alive(self) -> bool:
        return self.process is not None and self.process.alive()

    def stop(self, patience: float = 5.0) -> None:
        if self.process is not None:
            self.process.stop(patience)
            self.process = None

    def last_lines(self, count: int = 25) -> str:
        return "\n".join(self.process.output().splitlines()[-count:]) if self.process else ""

    def node(self) -> str:
        """Ray's id of the machine that this actor runs on."""
        import ray
        return ray.get_runtime_context().get_node_id()


# ---- one model: servers, watched, behind a router ----------------------------------------------------------------------

WATCH_EVERY = 0.5  # seconds between two looks at a server
HEALTH_TIMEOUT = 2.0  # seconds; one that is late is only counted out after hang_timeout


@dataclass
class Slot:
    """One server's place and what the watcher knows about it."""

    server: object  # VllmServer, or the handle of an actor of it
    part: int  # on CPU: which of the
    parts: int  # shares of the machine's cores
    gpus: list[str] | None = None  # None in Ray, which sets CUDA_VISIBLE_DEVICES
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
    """

    def __init__(self, config: Config, name: str = "", slots: list[Slot] | None = None, device: str = "", wait: bool = True):
        config.check()
        self.config, self.label = with_key(config), f"[{name}] " if name else ""
        self.device = device or find_device(config)
        self.slots = slots or local_slots(self.config, self.device)
        self.router_process: Process | None = None
        self.router_port = config.port
        self.failure = ""  # why the start failed
        self.restarts = 0
        self.asleep = self.said_no_sleep = False
        self.all_ready, self.stopping = threading.Event(), threading.Event()
        self.lock = threading.RLock()  # the watcher against sleep, wake_up and shutdown
        self.thread = threading.Thread(target=self.watch, daemon=True)
        try:
            self.start_router()
            for slot in self.slots:
                self.start_server(slot)
            self.thread.start()
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
        say(f"{self.label}router ready at http://{self.router_address} ({len(self.slots)} servers)")

    @property
    def router_address(self) -> str:
        return f"{self.config.host}:{self.router_port}"

    @property
    def server_urls(self) -> list[str]:
        return [slot.url for slot in self.slots]

    def call_router(self, method: str, path: str, body: dict | None = None, timeout: float = 15.0) -> tuple[int, str]:
        return http(method, f"http://{self.router_address}{path}", body, self.config.api_key, timeout)

    def start_router(self) -> None:
        config = self.config
        command = [sys.executable, router.__file__, "--host", config.host, "--port", str(self.router_port), "--allow-empty",
                   "--policy", config.policy, "--queue-timeout", str(config.queue_timeout),
                   "--request-timeout", str(config.request_timeout)]
        process = Process(command, dict(os.environ, ROUTER_API_KEY=config.api_key), log_path(config, "router"))
        self.router_process = process
        while True:
            found = re.search(r"router listening at http://\S+:(\d+) ", process.output())
            if found:
                self.router_port = int(found[1])
                return
            if not process.alive():
                lines = process.output().strip().splitlines() or ["no output"]
                raise OSError(f"the router did not start: {lines[-1].removeprefix('error: ')} (log: {process.log})")
            time.sleep(0.05)

    # ---- the watcher ---------------------------------------------------------------------------------------------------

    def watch(self) -> None:
        """The thread that looks at the router and every server, again and again."""
        while not self.stopping.wait(WATCH_EVERY):
            with self.lock:
                if self.stopping.is_set():
                    return
                try:
                    if not self.router_process.alive():
                        self.revive_router()
                    for slot in self.slots:
                        self.look_at(slot)
                except Exception:  # say a full disk: loud, but in an hour it may have room again
                    self.failure = f"{self.label}the watcher failed: {traceback.format_exc()}"
                    say(self.failure)
                if not self.all_ready.is_set() and all(slot.state == "ready" for slot in self.slots):
                    self.all_ready.set()

    def look_at(self, slot: Slot) -> None:
        now = time.monotonic()
        if slot.state == "given up":
            return
        if slot.state == "down":
            if now >= slot.restart_at:
                self.restarts += 1
                self.start_server(slot)
            return
        if not self.call(slot, "alive"):
            return self.mourn(slot, "died")
        healthy = http("GET", slot.url + "/health", timeout=HEALTH_TIMEOUT)[0] == 200
        if healthy:
            slot.seen = now
        if slot.state == "starting":
            if healthy:
                self.welcome(slot)
            elif now - slot.since > self.config.startup_timeout:
                self.mourn(slot, f"was not ready after {self.config.startup_timeout:g} s (--startup-timeout)")
        elif now - slot.seen > self.config.hang_timeout:
            self.mourn(slot, f"did not answer /health for {self.config.hang_timeout:g} s (--hang-timeout)")
        elif slot.deaths and now - slot.since > 300:
            slot.deaths = 0

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
        slot.url = self.call(slot, "start", self.device, slot.part, slot.parts, slot.gpus) or slot.url
        slot.state, slot.since = "starting", time.monotonic()

    def welcome(self, slot: Slot) -> None:
        """A server has become healthy: into the router with it."""
        number = self.slots.index(slot)
        if self.asleep:
            http("POST", slot.url + "/sleep?level=1", api_key=self.config.api_key, timeout=120)
        status, text = self.call_router("POST", "/workers", {"url": slot.url})
        if status != 200:
            say(f"{self.label}server {number}: the router did not take it ({status} {text}); trying again")
            return
        say(f"{self.label}server {number} ready at {slot.url} after {time.monotonic() - slot.since:.0f} s "
            f"(log: {log_path(self.config, f'server_{number}')})")
        slot.state, slot.since = "ready", time.monotonic()

    def mourn(self, slot: Slot, what: str) -> None:
        """A server is dead or as good as dead: out of the router, and plan its restart."""
        number = self.slots.index(slot)
        log = log_path(self.config, f"server_{number}")
        self.call_router("DELETE", f"/workers?url={slot.url}")
        last_lines = self.call(slot, "last_lines") or "(nothing)"
        self.call(slot, "stop", 0)
        slot.deaths += 1
        slot.state, slot.since = "down", time.monotonic()
        if not self.all_ready.is_set():
            self.failure = f"{self.label}server {number} {what} while starting; the end of {log}:\n{last_lines}"
            slot.state = "given up"
        elif slot.deaths >= self.config.max_deaths:
            slot.state = "given up"
            say(f"{self.label}GIVING UP on server {number}: it {what}, the {slot.deaths}th time in a row; the end of {log}:\n"
                f"{last_lines}")
        else:
            delay = min(60.0, self.config.restart_delay * 2 ** (slot.deaths - 1))
            slot.restart_at = time.monotonic() + delay
            say(f"{self.label}server {number} {what}; restarting in {delay:g} s (log: {log})")

    def revive_router(self) -> None:
        say(f"{self.label}the router died; restarting it (log: {self.router_process.log})")
        self.router_process.stop(0)
        try:
            self.start_router()
        except OSError as error:
            say(f"{self.label}{error}; trying again")
            return
        for slot in self.slots:
            if slot.state == "ready":
                self.call_router("POST", "/workers", {"url": slot.url})

    # ---- for the owner -------------------------------------------------------------------------------------------------

    def given_up(self) -> bool:
        """True when no server is left that could come back."""
        return all(slot.state == "given up" for slot in self.slots)

    def sleep(self) -> bool:
        """Frees the servers' GPU memory. False where that is not possible, which is said once."""
        return self.control("/sleep?level=1", asleep=True)

    def wake_up(self) -> bool:
        """The opposite of sleep()."""
        return self.control("/wake_up", asleep=False)

    def control(self, path: str, asleep: bool) -> bool:
        if self.device == "cpu" or not self.config.sleep_mode:
            if not self.said_no_sleep:
                why = "vLLM cannot on CPU" if self.device == "cpu" else "started without sleep_mode"
                say(f"{self.label}sleep and wake do nothing here: {why}")
            self.said_no_sleep = True
            return False
        with self.lock:
            status, text = self.call_router("POST", path, timeout=300)
            if status != 200:
                raise RuntimeError(f"{self.label}POST {path} to the servers failed ({status}): {text[:500]}")
            self.asleep = asleep
        return True

    def shutdown(self) -> None:
        """Ends router and servers. May be called twice."""
        self.stopping.set()
        with self.lock:
            if self.router_process is not None:
                self.router_process.stop(patience=10)
                self.router_process = None
            threads = [threading.Thread(target=self.call, args=(slot, "stop")) for slot in self.slots]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()


def with_key(config: Config) -> Config:
    return replace(config, api_key=config.api_key or os.environ.get("ROUTER_API_KEY", ""))


def find_device(config: Config) -> str:
    """"cuda" or "cpu"."""
    if config.device != "auto":
        return config.device
    import torch  # only here: it takes seconds to import
    return "cuda" if torch.cuda.is_available() else "cpu"


def local_slots(config: Config, device: str) -> list[Slot]:
    """The servers of one model on this machine, each with its share of the cores or its GPUs."""
    count, size = config.num_servers, config.tensor_parallel_size
    if device == "cpu":
        return [Slot(VllmServer(config, i), part=i, parts=count) for i in range(count)]
    named = config.gpus or os.environ.get("CUDA_VISIBLE_DEVICES", "")  # the variable may hold long names (GPU-6f...)
    gpus = named.split(",") if named else []
    if not gpus:
        import torch
        gpus = [str(i) for i in range(torch.cuda.device_count())]
    if len(gpus) < size * count:
        raise ValueError(f"--num-servers {count} --tensor-parallel-size {size}: needs {size * count} GPUs, there are {len(gpus)}"
                         "; lower one of them or name more in --gpus")
    return [Slot(VllmServer(config, i), i, count, gpus[i * size:(i + 1) * size]) for i in range(count)]


# ---- inside a Ray program ----------------------------------------------------------------------------------------------

class RewardModelManager:
    """Named reward models inside a Ray program, each with its servers in actors and its router beside the driver.

    `RewardModelManager({"genrm": Config(model=..., port=0), "rm": Config(model=..., task="classify", port=0)})` blocks
    until all are ready, and initialises Ray if that has not been done. The placement group spreads the servers over the
    nodes; each reserves its GPUs, or `ray_cpus` CPUs. On a cluster of several nodes the routers listen on the address of
    the driver's node instead of 127.0.0.1, and so do servers on other nodes: they have to reach each other.

    `router_addresses` maps each name to "host:port"; `router_address` is that of the first. Raises what ModelServers raises,
    and RuntimeError when the cluster has no room for the servers.
    """

    def __init__(self, models: dict[str, Config], placement_timeout: float = 60.0):
        import ray
        if not models:
            raise ValueError("models: name at least one reward model")
        for config in models.values():
            config.check()
        self.models: dict[str, ModelServers] = {}
        self.actors, self.group = [], None
        atexit.register(self.shutdown)
        try:
            if not ray.is_initialized():
                ray.init(include_dashboard=False, logging_level="warning")
            devices = {name: config.device if config.device != "auto" else
                       "cuda" if ray.cluster_resources().get("GPU") else "cpu" for name, config in models.items()}
            if sum(node["Alive"] for node in ray.nodes()) > 1:
                address = ray.util.get_node_ip_address()
                models = {name: replace(config, host=address) if config.host in ("127.0.0.1", "0.0.0.0") else config
                          for name, config in models.items()}
            models = {name: replace(with_key(config), log_dir=Path(config.log_dir).absolute() / name)
                      for name, config in models.items()}
            slots = self.place(models, devices, placement_timeout)
            for name, config in models.items():  # all start at the same time
                self.models[name] = ModelServers(config, name, slots[name], devices[name], wait=False)
            for servers in self.models.values():
                servers.wait_ready()
        except BaseException:
            self.shutdown()
            raise

    def place(self, models: dict[str, Config], devices: dict[str, str], timeout: float) -> dict[str, list[Slot]]:
        """One bundle of the placement group and one actor per server."""
        import ray
        wanted = [(name, index) for name, config in models.items() for index in range(config.num_servers)]
        bundles = [{"CPU": models[name].ray_cpus} |
                   ({"GPU": models[name].tensor_parallel_size} if devices[name] == "cuda" else {}) for name, _ in wanted]
        self.group = ray.util.placement_group(bundles, strategy="SPREAD")
        if not self.group.wait(timeout):
            raise RuntimeError(f"no room in the Ray cluster for {bundles} within {timeout:g} s; free are "
                               f"{ray.available_resources()}")
        driver = ray.get_runtime_context().get_node_id()
        for number, ((name, index), bundle) in enumerate(zip(wanted, bundles)):
            strategy = ray.util.scheduling_strategies.PlacementGroupSchedulingStrategy(self.group, number)
            actor = ray.remote(VllmServer).options(num_cpus=bundle["CPU"], num_gpus=bundle.get("GPU", 0), max_restarts=-1,
                                                   scheduling_strategy=strategy)
            self.actors.append(actor.remote(models[name], index, driver))
        nodes = ray.get([actor.node.remote() for actor in self.actors])
        slots: dict[str, list[Slot]] = {name: [] for name in models}
        for number, (name, _) in enumerate(wanted):
            slots[name].append(Slot(self.actors[number], nodes[:number].count(nodes[number]), nodes.count(nodes[number])))
        return slots

    @property
    def router_addresses(self) -> dict[str, str]:
        return {name: servers.router_address for name, servers in self.models.items()}

    @property
    def router_address(self) -> str:
        return next(iter(self.router_addresses.values()))

    def sleep(self) -> bool:
        """Puts all models to sleep. False if some cannot."""
        return all([servers.sleep() for servers in self.models.values()])

    def wake_up(self) -> bool:
        """Wakes all models. False if some cannot."""
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
    servers = None

    def end(number, frame):
        raise SystemExit(0)

    def on_signals(action):
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            signal.signal(number, action)

    try:
        config = tyro.cli(Config, args=argv[:at])
        config.vllm_args = tuple(argv[at + 1:])
        on_signals(end)
        servers = ModelServers(config)
        while not servers.given_up():
            time.sleep(1)
        print("error: every server was given up", file=sys.stderr)
        raise SystemExit(1)
    except (ValueError, OSError, RuntimeError) as error:
        print(f"error: {error}", file=sys.stderr)
        raise SystemExit(1 if isinstance(error, RuntimeError) else 2) from None
    finally:
        on_signals(signal.SIG_IGN)  # a second Ctrl-C must not leave half of it running
        if servers is not None:
            servers.shutdown()


if __name__ == "__main__":
    main()
