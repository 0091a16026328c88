"""Reward models as a service: N vLLM servers of one model, watched, behind one router address.

    python genrm_server.py --model PATH --num-servers 2 --port 30000
    python genrm_server.py --model PATH --task classify        # a discriminative reward model, POST /classify
    python genrm_server.py --model PATH -- --max-num-seqs 64   # after --: any argument of vLLM's own

A server has its GPUs (of CUDA_VISIBLE_DEVICES, in order) or its share of the cores. One that dies leaves the
router and is restarted with back-off; one that dies MAX_DEATHS times in a row before it is ready is given up.
When this process ends, however it ends, nothing of it stays behind. Servers ask for a key on every path but
/health; the router sends it along: ROUTER_API_KEY, or a random one. cluster/placement.py is the same in Ray.
Left out: systems but Linux, servers over several nodes, other engines. Needs router.py and vllm_server.py.
"""

import contextlib
import json
import os
import secrets
import signal
import subprocess
import sys
import threading
import time
from collections import defaultdict
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from http.client import HTTPConnection, HTTPException
from pathlib import Path
from typing import Annotated, Literal

import tyro

import router
from vllm_server import Process, VllmServer, reserve


@dataclass
class Config:
    """N vLLM servers of one model behind one router."""

    model: str  # Folder of the model, or its name on the Hugging Face Hub (only that needs the network).
    num_servers: int = 1  # How many servers.
    port: int = 30000  # Port of the router; 0 lets the system choose (it is printed).
    host: str = "127.0.0.1"  # Address of the router. 0.0.0.0 opens it to the network: set an API key then.
    task: Literal["generate", "classify"] = "generate"  # classify: a discriminative model, /classify.
    device: Literal["auto", "cpu", "cuda"] = "auto"  # auto takes CUDA where there is a GPU.
    tensor_parallel_size: int = 1  # GPUs per server (on CPU: processes per server).
    gpu_share: float = 1.0  # Of a GPU and its memory, for each server.
    cpus: str = ""  # Cores for the servers' threads, such as 0,1 (CPU only). Empty: all, shared evenly.
    served_model_name: str = ""  # Name that clients use as "model". Empty: the value of --model.
    dtype: str = ""  # Empty: float32 on CPU (bf16 is emulated there without AVX-512), vLLM's choice on GPU.
    max_model_len: int = 0  # Tokens of prompt plus answer; 0: the model's own limit.
    sleep_mode: bool = False  # Make sleep and wake possible (GPU only).
    control: bool = False  # vLLM's control endpoints (/collective_rpc ...), for who knows the servers' key.
    seed: int = 0  # Server i samples with seed + i: with one seed two would answer the same prompts alike.
    policy: Literal["round_robin", "least_loaded"] = "least_loaded"  # The router's policy.
    queue_timeout: float = 180.0  # Seconds that a request waits while no server is healthy, as in a restart.
    api_key: str = field(default="", repr=False)  # Clients' key. Empty: ROUTER_API_KEY, else none is needed.
    log_dir: Path | None = None  # Folder of the logs. Empty: outputs/genrm_logs/PORT, or process number.
    startup_timeout: float = 1800.0  # Seconds until a server must be ready.
    vllm_args: tyro.conf.Positional[tuple[str, ...]] = ()  # Arguments for vLLM's server, after a lone --.
    server_key: Annotated[str, tyro.conf.Suppress] = field(default="", repr=False)  # filled in by complete()

    def check(self) -> None:
        """ValueError naming the field, the value and the remedy."""
        for name in ("num_servers", "tensor_parallel_size"):
            if getattr(self, name) < 1:
                self.refuse(name, "must be at least 1")
        path = Path(self.model).expanduser()
        is_on_hub = self.model.count("/") == 1 and not self.model.startswith((".", "/", "~"))
        if not (path / "config.json").exists() and (path.exists() or not is_on_hub):
            self.refuse("model", "no folder with a config.json, nor OWNER/NAME on the Hub")
        if not 0 < self.gpu_share <= 1:
            self.refuse("gpu_share", "must be above 0 and at most 1")
        if self.gpu_share < 1 < self.tensor_parallel_size:
            self.refuse("gpu_share", "a server of several GPUs takes them whole; leave it at 1")
        router.Config(port=self.port).check()

    refuse = router.Config.refuse


def http(method: str, url: str, body: dict | None = None, api_key: str = "", timeout=5.0) -> tuple[int, str]:
    """One small request: (status, text), and (0, what went wrong) when there was no answer.

    No library for sessions, which takes four times as long: hundreds of servers are asked twice a second.
    """
    host, _, path = url.removeprefix("http://").partition("/")
    headers = {"Authorization": f"Bearer {api_key}", "Content-Type": "application/json"}
    sent = None
    if body:
        sent = json.dumps(body)
    connection = HTTPConnection(host, timeout=timeout)
    try:
        connection.request(method, f"/{path}", sent, headers)
        answer = connection.getresponse()
        return answer.status, answer.read().decode("utf-8", "replace")
    except (OSError, HTTPException) as error:
        return 0, f"{type(error).__name__}: {error}"
    finally:
        connection.close()


WATCH_EVERY = 0.5  # seconds between two looks at a server
HEALTH_TIMEOUT = 2.0  # seconds; one that is late is only counted out after
HANG_SECONDS = 180.0  # without an answer of /health: then it is killed and restarted
MAX_DEATHS = 5  # in a row before it was ready, after which a server is given up
RESTART_DELAY = 1.0  # seconds before a restart; doubled with each one in a row, 60 at most
CALL_SECONDS = 600.0  # for a control call: weights are read, or requests end before sleep
SLEEP = "/sleep?level=1&mode=wait"  # weights to the CPU's memory; by default vLLM aborts what still runs
# Of each GPU of each machine: held by the server that starts on it, of whichever model. vLLM measures what
# it takes of the memory, and would count in a neighbour that starts meanwhile.
STARTING = defaultdict(threading.Lock)


@dataclass(eq=False)
class Watched:
    """One server, or the router, and what its thread knows about it."""
    name: str
    server: object  # VllmServer or RouterProcess, or the handle of an actor
    log: Path
    url: str = ""
    joined: int = 0  # the start of the router that it has joined; 0: not in the router
    ready: bool = False  # it has been, since it was started
    restarts: int = 0
    given_up: str = ""  # why


class RouterProcess(Process):
    """router.py as a process of its own, at an address of its own."""

    def __init__(self, config: Config):
        try:
            self.reserved = reserve(config.host, config.port)  # if it dies, it comes back there
        except OSError as error:
            raise OSError(f"--host {config.host} --port {config.port}: cannot listen ({error})") from None
        port = str(self.reserved.getsockname()[1])
        self.address = router.address_of(config.host, port)
        command = [sys.executable, router.__file__, "--host", config.host, "--port", port]
        command += ["--policy", config.policy, "--queue-timeout", str(config.queue_timeout)]
        env = dict(os.environ, ROUTER_API_KEY=config.api_key, ROUTER_SERVER_KEY=config.server_key)
        super().__init__(config.log_dir / "router.log", command, env, f"http://{self.address}")


class ModelServers:
    """One model: its servers and their router, started by the constructor, which returns when all are ready.

    Raises ValueError for settings that cannot work here, OSError when the router's port cannot be had,
    RuntimeError with a log's name and end when a server fails to start. `router_address` is "host:port", the
    servers are in `slots`. `before_starting(slot)` is called before a server starts (with --model's weights),
    `before_joining(slot)` when it is healthy and not yet asked anything.
    Router and servers have a thread each. Who joins, or calls all (ask_all), holds the `lock`: never both."""

    def __init__(self, config: Config, name: str = "", servers: list | None = None, wait: bool = True,
                 before_starting=lambda slot: None, before_joining=lambda slot: None):
        self.config = config = complete(config)
        self.before_starting = before_starting
        self.before_joining = before_joining
        label = f"[{name}] " if name else ""
        self.asleep = False
        self.all_ready = threading.Event()
        self.stopping = threading.Event()
        self.lock = threading.Lock()
        if not servers:
            n = config.num_servers
            servers = [VllmServer(config, i, i, n, deal_gpus(config, i)) for i in range(n)]
        self.slots = []
        for i, server in enumerate(servers):
            log = config.log_dir / f"server_{i}.log"
            self.slots.append(Watched(f"{label}server {i}", server, log))
        process = RouterProcess(config)
        self.router = Watched(f"{label}router", process, process.log)
        self.router_address = process.address
        router.warn_if_open(config.host, config.api_key, self.say)
        self.watched = [self.router, *self.slots]
        self.threads = []
        for slot in self.watched:
            thread = threading.Thread(target=self.keep, args=[slot], daemon=True)
            thread.start()
            self.threads.append(thread)
        if wait:
            self.wait_ready()

    def wait_ready(self) -> None:
        """Blocks until all servers are ready. RuntimeError when one fails to start."""
        try:
            while not self.all_ready.wait(0.1):
                for slot in self.watched:
                    if slot.given_up:
                        raise RuntimeError(slot.given_up)
        except BaseException:
            self.shutdown()
            raise
        self.say(f"{self.router.name} ready at http://{self.router_address} ({len(self.slots)} servers)")

    def check(self) -> None:
        """RuntimeError when no server is left that could come back."""
        if all(slot.given_up for slot in self.slots):
            raise RuntimeError("every server was given up")

    def say(self, text: str) -> None:
        with contextlib.suppress(OSError):  # nobody reads it any more, or the disk is full: no reason to stop
            print(text, flush=True)

    def keep(self, slot: Watched) -> None:
        """A thread: runs a server or the router, and again when it has died, unless it never gets ready."""
        tries = 0  # in a row
        deaths = 0  # of these: by its own doing
        while not self.stopping.is_set():
            said = ""
            try:
                what = self.run(slot)
                said = self.call(slot, "last_lines")
                if slot is not self.router and not self.asleep:  # or the trainer has the memory
                    deaths += 1
            except Exception as error:  # a full disk, a node that is gone: that is waited for
                last = str(error).strip().rpartition("\n")[2]  # an actor's error comes after a traceback
                what = f"cannot be run ({type(error).__name__}: {last:.200})"
            if self.stopping.is_set():
                break
            if slot.ready:
                tries = deaths = 0
            else:
                tries += 1
            if not self.all_ready.is_set() or deaths >= MAX_DEATHS:
                slot.given_up = f"{slot.name} {what}; the end of {slot.log}:\n{said}"
                if self.all_ready.is_set():
                    self.say(f"GIVING UP: {slot.given_up}")
                break
            delay = RESTART_DELAY * min(60, 2**tries)
            self.say(f"{slot.name} {what}; restarting in {delay:g} s (log: {slot.log})")
            self.stopping.wait(delay)
            slot.restarts += 1
        with contextlib.suppress(Exception):  # an actor that is gone
            self.call(slot, "stop")

    def run(self, slot: Watched) -> str:
        """Starts a server, or the router, and watches it; returns when it is dead or hangs: in which way."""
        slot.ready = False
        with contextlib.ExitStack() as turn:  # until it is ready, and the next one may start on its GPU
            if slot is not self.router:
                if self.config.device == "cuda":
                    turn.enter_context(STARTING[self.call(slot, "gpu")])
                self.before_starting(slot)
            slot.url = self.call(slot, "start")
            started = answered = time.monotonic()
            try:
                while not self.stopping.wait(WATCH_EVERY):
                    status, _ = http("GET", slot.url + "/health", timeout=HEALTH_TIMEOUT)
                    silent = time.monotonic() - answered
                    if status == 200 or slot is self.router and status:  # 503 while it has no server
                        answered = time.monotonic()
                        self.join(slot, answered - started)
                    elif not self.call(slot, "alive"):
                        return "died"
                    elif not slot.ready and silent > self.config.startup_timeout:
                        return f"was not ready after {silent:.1f} s (--startup-timeout)"
                    elif slot.ready and silent > HANG_SECONDS:
                        return f"hangs: no answer of /health for {silent:.0f} s"
                    if slot.ready:
                        turn.close()
                    if self.router.ready and all(other.joined for other in self.slots):
                        self.all_ready.set()
            finally:
                self.leave(slot)
        return "was stopped"

    def join(self, slot: Watched, seconds: float) -> None:
        """Lets a healthy server into the router, and into a new router again; else at the next look."""
        start = self.router.restarts + 1
        if slot is self.router:
            slot.ready = True
            return
        if slot.joined == start:
            return
        with self.lock:
            if not slot.joined:
                if self.asleep:  # it must not take the memory left to the trainer
                    self.ask(slot, SLEEP)
                self.before_joining(slot)
            url = f"{self.router.url}/workers"
            if http("POST", url, {"url": slot.url}, self.config.server_key)[0] == 200:
                if not slot.ready:
                    self.say(f"{slot.name} ready at {slot.url} after {seconds:.0f} s (log: {slot.log})")
                slot.ready = True
                slot.joined = start

    def leave(self, slot: Watched) -> None:
        if slot.joined:
            slot.joined = 0
            url = f"{self.router.url}/workers?url={slot.url}"
            http("DELETE", url, None, self.config.server_key)

    def call(self, slot: Watched, method: str, *args):
        """A method of the server, here or in its actor; it waits until Ray has found a place for that."""
        call = getattr(slot.server, method)
        if isinstance(slot.server, Process):
            return call(*args)
        import ray
        if not ray.is_initialized():  # or a new Ray would start; the old one took its actors along
            raise RuntimeError("Ray was shut down")
        return ray.get(call.remote(*args))

    def ask(self, slot: Watched, path: str, body: dict | None = None) -> None:
        """A control call to one server. RuntimeError where it does not say 200."""
        status, text = http("POST", slot.url + path, body, self.config.server_key, CALL_SECONDS)
        if status != 200:
            raise RuntimeError(f"{slot.name}: POST {path} failed ({status}): {text[:300]}")

    def ask_all(self, path: str, body: dict | None = None) -> None:
        """One control call to all servers in the router, at the same time; the caller holds the lock.
        One that dies of it is restarted and joins as they are then. RuntimeError where one refuses, or none
        is left that could come back."""
        with ThreadPoolExecutor(len(self.slots)) as pool:
            asked = {slot: pool.submit(self.ask, slot, path, body) for slot in self.slots if slot.joined}
        for slot, answer in asked.items():
            error = answer.exception()
            if not error:
                continue
            healthy = http("GET", slot.url + "/health")[0] == 200
            if healthy and slot.joined:
                raise error
            self.say(f"{error}; it is restarted")
            if not slot.joined:  # its thread has seen it die: it may be back already
                continue
            with contextlib.suppress(Exception):  # an actor that is gone, and its server with it
                self.call(slot, "stop")
            self.leave(slot)
        self.check()

    def sleep(self, asleep: bool = True) -> None:
        """Frees GPU memory when what they are at has ended, or takes it again, if they can."""
        if self.config.device == "cpu" or not self.config.sleep_mode:
            return
        with self.lock:
            self.asleep = asleep
            self.ask_all(SLEEP if asleep else "/wake_up")

    def shutdown(self) -> None:
        """Ends router and servers, each by its own thread. May be called twice."""
        self.stopping.set()
        for thread in self.threads:
            thread.join(20)
        self.router.server.reserved.close()


def complete(config: Config) -> Config:
    """The settings, checked, with what depends on this machine filled in."""
    config.check()
    key = router.read_key(config.api_key, "ROUTER_API_KEY")
    log_dir = Path(config.log_dir or f"outputs/genrm_logs/{config.port or os.getpid()}")
    config = replace(
        config,
        api_key=key,
        server_key=key.rpartition(",")[2] or config.server_key or secrets.token_urlsafe(32),
        log_dir=log_dir.expanduser().absolute(),
        served_model_name=config.served_model_name or config.model,
    )
    path = Path(config.model).expanduser()
    if path.exists():
        config.model = str(path.absolute())  # not resolved: a link may lead elsewhere on each node
    if config.device == "auto":
        config.device = choose_device()
    return config


def choose_device() -> str:
    """cuda if PyTorch can use a GPU, else cpu. ValueError if there is a GPU that PyTorch cannot use."""
    import torch  # only here: it takes seconds to import
    if torch.cuda.is_available():
        return "cuda"
    with contextlib.suppress(OSError):  # there is no such program
        if b"GPU 0" in subprocess.run(["nvidia-smi", "-L"], capture_output=True).stdout:
            raise ValueError(
                f"--device auto: nvidia-smi shows a GPU that torch {torch.__version__} cannot use; install "
                "the vllm that fits the driver (see requirements.txt), or pass --device cpu")
    return "cpu"


def deal_gpus(config: Config, part: int) -> str:
    """CUDA_VISIBLE_DEVICES of the `part`-th server on a machine: of this process's GPUs, in order."""
    if config.device == "cpu":
        return ""
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if visible:
        gpus = visible.split(",")  # may be long names (GPU-6f...)
    else:
        import torch
        gpus = list(map(str, range(torch.cuda.device_count())))
    size = config.tensor_parallel_size
    sharing = int(1 / config.gpu_share)  # so many servers are on one GPU
    first = part // sharing * size
    if len(gpus) < first + size:
        raise ValueError(f"--num-servers {config.num_servers}: the GPUs are {','.join(gpus)}; lower it")
    return ",".join(gpus[first:first + size])


def main() -> None:
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda *_: sys.exit(0))
    try:
        servers = ModelServers(tyro.cli(Config))
        try:
            while True:
                servers.check()
                time.sleep(1)
        finally:
            servers.shutdown()
    except (ValueError, OSError, RuntimeError) as error:
        print(f"error: {error}", file=sys.stderr)
        raise SystemExit(1 if isinstance(error, RuntimeError) else 2) from None


if __name__ == "__main__":
    main()
