"""Reward models as a service: N vLLM servers of one model, watched, behind one router address.

    python genrm_server.py --model PATH --num-servers 2 --port 30000
    python genrm_server.py --model PATH --task classify             # a discriminative reward model, POST /classify
    python genrm_server.py --model PATH -- --max-num-seqs 64        # after --: any argument of vLLM's own

Each server has GPUs of its own (--tensor-parallel-size each, from --gpus) or a share of the CPU cores, and a log of its
own. A server that dies leaves the router, is restarted with back-off and comes back when it is healthy; after MAX_DEATHS
deaths in a row it is given up, loudly. A router that dies or hangs is restarted at its address. When this process ends, by
Ctrl-C, SIGTERM, a crash or SIGKILL, no process and no port of its servers stays behind (see GUARD in vllm_server.py).

The servers always ask for a key, on every path but /health (KeyGuard); the router sends it along with what it passes on.
It is the router's own key, where one is set (ROUTER_API_KEY), else a random one that only router and manager know.

Inside a Ray program `RewardModelManager({"genrm": Config(...), "rm": Config(...)})` does the same with each server in an
actor, placed over the nodes of the cluster, and each model's router beside the driver.

Sleep and wake, for servers that share their GPU with a trainer: --sleep-mode, then sleep() and wake_up() of the manager. vLLM
has this on GPU only. How much of the GPU a judge takes is vLLM's --gpu-memory-utilization. Environment variables reach the
servers, such as VLLM_CPU_KVCACHE_SPACE (GiB per server on CPU, 1 if unset).

Left out: Windows and macOS, one server over several nodes, scaling the number of servers up and down, other engines.
"""

import atexit
import contextlib
import os
import re
import secrets
import signal
import sys
import threading
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Annotated, Literal

import requests
import tyro

import router
from vllm_server import Process, VllmServer, reserve


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
    gpu_share: float = 1.0
    """Share of a GPU that each server reserves in Ray; below 1 also its --gpu-memory-utilization."""
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
    """Make sleep and wake possible (GPU only)."""
    control: bool = False
    """Have vLLM's control endpoints (/collective_rpc, /reset_prefix_cache ...), which sleep mode has as well. Only who knows
    the servers' key can call them, and not through the router."""
    seed: int = 0
    """Server number i samples with seed + i: with one seed two servers would give the same answers to the same prompts."""
    policy: Literal["round_robin", "least_loaded"] = "round_robin"
    """The router's policy."""
    queue_timeout: float = 180.0
    """Seconds that the router holds a request while no server is healthy; a restart takes a minute or more."""
    api_key: str = field(default="", repr=False)
    """Key that router and servers ask for. Empty: the environment variable ROUTER_API_KEY, which is the better place; without
    either the router asks for none and the servers for a random one."""
    log_dir: Path = Path("outputs/genrm_logs")
    """Folder of the logs: server_0.log, ..., router.log."""
    startup_timeout: float = 1800.0
    """Seconds until a server must be ready."""
    ray_cpus: float = 0.5
    """CPUs that a server's actor reserves in Ray. Small, so that a laptop fits trainer, workers and judges."""
    vllm_args: Annotated[tuple[str, ...], tyro.conf.Suppress] = ()
    """Arguments for vLLM's server; on the command line whatever follows a lone --."""
    server_key: Annotated[str, tyro.conf.Suppress] = field(default="", repr=False)  # filled in by complete()

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
        for name, ids in (("gpus", self.gpus), ("cpus", self.cpus)):
            if ids and not re.fullmatch(r"\d+(,\d+)*", ids):
                raise ValueError(f"--{name} {ids}: write numbers separated by commas, such as 0,1")
        router.Config(allow_empty=True, port=self.port, queue_timeout=self.queue_timeout).check()


def http(method: str, url: str, body: dict | None = None, api_key: str = "", timeout: float = 5.0) -> tuple[int, str]:
    """One small request. Returns (status, text), and (0, what went wrong) when there was no answer."""
    with requests.Session() as session:
        session.trust_env = False  # no proxy, and no key from ~/.netrc
        try:
            headers = {"Authorization": f"Bearer {api_key}"} if api_key else {}
            answer = session.request(method, url, json=body, headers=headers, timeout=timeout)
            return answer.status_code, answer.content.decode("utf-8", "replace")
        except requests.RequestException as error:
            return 0, str(error)


WATCH_EVERY = 0.5  # seconds between two looks at a server
HEALTH_TIMEOUT = 2.0  # seconds; one that is late is only counted out after
HANG_SECONDS = 180.0  # without an answer of /health: then it is killed and restarted
ROUTER_HANG_SECONDS = 30.0  # the same for the router, which has nothing to do that takes long
MAX_DEATHS = 5  # in a row, after which a server is given up; GOOD_SECONDS without one set the count back
GOOD_SECONDS = 300.0
RESTART_DELAY = 1.0  # seconds before the first restart; doubled with each one in a row, 60 at most
CALL_SECONDS = 600.0  # for a control call: reading weights takes a while, and so do the requests that end before sleep
SLEEP = "/sleep?level=1&mode=wait"  # weights to the CPU's memory; by default vLLM aborts what still runs
SLEEP_WITHOUT_WEIGHTS = "/sleep?level=2&mode=wait"  # for servers that get new ones when they wake


@dataclass(eq=False)
class Slot:
    """One server and what its thread knows about it."""

    server: object  # VllmServer, or the handle of an actor of it
    number: int
    log: Path
    url: str = ""
    joined: int = 0  # the start of the router that it has joined; 0: not in the router
    since: float = 0.0  # when it joined
    restarts: int = 0
    given_up: bool = False


class ModelServers:
    """One model: its servers and their router, started by the constructor, which returns when all are ready.

    Raises ValueError for settings that cannot work here, OSError when the router's port cannot be had, RuntimeError with
    the name of the log and its last lines when a server fails to start. `router_address` is "host:port", the servers are in
    `slots`, `restarts` is the number of restarts so far (after one, a server has the weights of --model).
    `before_starting(slot)` is called, if given, before a server is started, and `before_joining(slot)` when it is healthy and
    not yet asked anything; it stays out while that is false.

    The router and each server have a thread of their own and do not wait for one another. A server that joins holds the
    `lock`, and so does who calls all of them (ask_all): none joins in the middle of that.
    """

    def __init__(self, config: Config, name: str = "", servers: list | None = None, wait: bool = True,
                 before_starting=lambda slot: None, before_joining=lambda slot: True, sleep_call: str = SLEEP):
        self.before_starting, self.before_joining, self.sleep_call = before_starting, before_joining, sleep_call
        self.config = config = complete(config)
        self.label = f"[{name}] " if name else ""
        self.slots = [Slot(server, number, config.log_dir / f"server_{number}.log")
                      for number, server in enumerate(servers or local_servers(config))]
        self.router_process, self.router_starts = Process(config.log_dir / "router.log"), 0
        self.failure = ""  # why the start failed
        self.asleep = self.said_no_sleep = False
        self.all_ready, self.stopping, self.lock = threading.Event(), threading.Event(), threading.Lock()
        try:
            self.reserved = reserve(config.host, config.port)  # should the router die, it comes back there
        except OSError as error:
            raise OSError(f"--host {config.host} --port {config.port}: cannot listen there ({error.strerror or error}); "
                          "choose another one") from None
        config.port = self.reserved.getsockname()[1]
        self.router_address = f"[{config.host}]:{config.port}" if ":" in config.host else f"{config.host}:{config.port}"
        if warning := router.warn_if_open(config.host, config.api_key):
            self.say(warning)
        self.threads = [threading.Thread(target=self.keep_router, daemon=True)]
        self.threads += [threading.Thread(target=self.keep_server, args=(slot,), daemon=True) for slot in self.slots]
        try:
            for thread in self.threads:
                thread.start()
            if wait:
                self.wait_ready()
        except BaseException:
            self.shutdown()
            raise

    def wait_ready(self) -> None:
        """Blocks until all servers are ready. RuntimeError when one fails to start."""
        while not self.all_ready.wait(0.1):
            if self.failure:
                raise RuntimeError(self.label + self.failure)
        self.say(f"router ready at http://{self.router_address} ({len(self.slots)} servers)")

    @property
    def restarts(self) -> int:
        return sum(slot.restarts for slot in self.slots)

    def given_up(self) -> bool:
        """True when no server is left that could come back."""
        return all(slot.given_up for slot in self.slots)

    def say(self, text: str) -> None:
        with contextlib.suppress(OSError):  # nobody reads it any more, or the disk is full: servers are looked after all the same
            print(self.label + text, flush=True)

    def call_router(self, method: str, path: str, body: dict | None = None, timeout: float = 5.0) -> tuple[int, str]:
        return http(method, f"http://{self.router_address}{path}", body, self.config.server_key, timeout)

    def keep_router(self) -> None:
        """The router's thread: starts it, and again when it dies or hangs. Servers join the new one by themselves."""
        config, process = self.config, self.router_process
        command = [sys.executable, router.__file__, "--host", config.host, "--port", str(config.port), "--allow-empty",
                   "--policy", config.policy, "--queue-timeout", str(config.queue_timeout)]
        env = dict(os.environ, ROUTER_API_KEY=config.api_key, ROUTER_SERVER_KEY=config.server_key)
        answered, tries = 0.0, 0  # when it last did, or was started; how often in a row
        while not self.stopping.is_set():
            alive, now = process.alive(), time.monotonic()
            if alive and '"servers"' in self.call_router("GET", "/health", timeout=HEALTH_TIMEOUT)[1]:
                answered, tries = now, 0
            elif not alive or now - answered > ROUTER_HANG_SECONDS:
                if self.router_starts:
                    what = "hangs" if alive else f"died ({process.last_lines().splitlines()[-1].removeprefix('error: ')})"
                    if not self.all_ready.is_set():
                        self.failure = f"the router {what} while starting (log: {process.log})"
                    self.say(f"the router {what}; restarting it (log: {process.log})")
                    self.stopping.wait(min(10.0, RESTART_DELAY * tries))  # a foreign program may have taken its port
                try:
                    process.launch(command, env)
                except OSError as error:  # such as a full disk, which may have room again in an hour
                    self.say(f"the router cannot be started: {error}")
                self.router_starts, answered, tries = self.router_starts + 1, time.monotonic(), tries + 1
            self.stopping.wait(WATCH_EVERY)

    def keep_server(self, slot: Slot) -> None:
        """A server's thread: runs it, and again when it has died. After MAX_DEATHS in a row it is given up."""
        tries = deaths = 0
        while True:
            try:
                what = self.run_server(slot)
                if self.stopping.is_set():
                    return
                end = f"the end of {slot.log}:\n{self.call(slot, 'last_lines')}"
                self.call(slot, "stop", 0)
                died = not self.asleep  # while the others sleep the trainer may have the memory that this one needs to start
            except Exception as error:  # not its own doing: a full disk, a node that is gone. That is waited for, not counted
                what, end, died = f"cannot be run ({type(error).__name__}: {str(error):.200})", f"log: {slot.log}", False
            if self.stopping.is_set():
                return
            if not self.all_ready.is_set():
                self.failure = f"server {slot.number} {what} while starting; {end}"
                return
            if slot.since and time.monotonic() - slot.since > GOOD_SECONDS:
                tries = deaths = 0
            tries, deaths, slot.since = tries + 1, deaths + died, 0.0
            if deaths >= MAX_DEATHS:
                slot.given_up = True
                self.say(f"GIVING UP on server {slot.number}: it {what}, the {deaths}th time in a row; {end}")
                return
            delay = min(60.0, RESTART_DELAY * 2 ** (tries - 1))
            self.say(f"server {slot.number} {what}; restarting in {delay:g} s (log: {slot.log})")
            if self.stopping.wait(delay):
                return
            slot.restarts += 1

    def run_server(self, slot: Slot) -> str:
        """Starts a server, has it join the router when it is healthy, and returns when it is dead or hangs: in which way."""
        self.before_starting(slot)
        slot.url = self.call(slot, "start")
        started = seen = time.monotonic()
        try:
            while not self.stopping.wait(WATCH_EVERY):
                if http("GET", slot.url + "/health", timeout=HEALTH_TIMEOUT)[0] == 200:
                    seen = time.monotonic()
                    if slot.joined != self.router_starts and self.join(slot) and not slot.since:
                        slot.since = seen
                        self.say(f"server {slot.number} ready at {slot.url} after {seen - started:.0f} s (log: {slot.log})")
                elif not self.call(slot, "alive"):
                    return "died"
                elif not slot.since and time.monotonic() - started > self.config.startup_timeout:
                    return f"was not ready after {self.config.startup_timeout:g} s (--startup-timeout)"
                elif slot.since and time.monotonic() - seen > HANG_SECONDS:
                    return f"did not answer /health for {HANG_SECONDS:g} s"
                if all(other.joined for other in self.slots):
                    self.all_ready.set()
            return "was stopped"
        finally:
            self.leave(slot)

    def join(self, slot: Slot) -> bool:
        """Lets a healthy server into the router, and into a new router again."""
        with self.lock if not slot.joined else contextlib.nullcontext():
            if not slot.joined and self.asleep:  # it must not take the memory that the others left to the trainer
                self.ask(slot, self.sleep_call)
            if not slot.joined and not self.before_joining(slot):
                return False
            start = self.router_starts
            if self.call_router("POST", "/workers", {"url": slot.url})[0] == 200:  # else at the next look
                slot.joined = start
            return slot.joined == start

    def leave(self, slot: Slot) -> None:
        if slot.joined:
            slot.joined = 0
            self.call_router("DELETE", f"/workers?url={slot.url}")

    def call(self, slot: Slot, method: str, *args):
        """A method of the server, here or in its actor. An actor may take minutes: no node has room, or it is set up."""
        if isinstance(slot.server, VllmServer):
            return getattr(slot.server, method)(*args)
        import ray
        if not ray.is_initialized():  # ray.get would start a new Ray; the old one took its actors along
            raise RuntimeError("Ray was shut down")
        answer = getattr(slot.server, method).remote(*args)
        while not ray.wait([answer], timeout=20)[0]:
            if self.stopping.is_set():
                raise RuntimeError("stopped while Ray set up its actor")
            self.say(f"server {slot.number} waits for Ray to place its actor or set it up")
        return ray.get(answer)

    def ask(self, slot: Slot, path: str, body: dict | None = None) -> None:
        """A control call to one server. RuntimeError where it does not say 200."""
        status, text = http("POST", slot.url + path, body, self.config.server_key, CALL_SECONDS)
        if status != 200:
            raise RuntimeError(f"{self.label}server {slot.number}: POST {path} failed ({status}): {text[:300]}")

    def ask_all(self, path: str, body: dict | None = None) -> None:
        """One control call to all servers in the router, at the same time; the caller holds the lock.

        One that dies of it, or fails where others do not, is restarted and joins as they are then. RuntimeError where all
        refuse, or none is left that could come back.
        """
        with ThreadPoolExecutor(64) as pool:
            asked = {slot: pool.submit(self.ask, slot, path, body) for slot in self.slots if slot.joined}
        failed = {slot: answer.exception() for slot, answer in asked.items() if answer.exception()}
        for slot, error in failed.items():
            if len(failed) == len(asked) and http("GET", slot.url + "/health")[0] == 200:
                raise error
        if self.given_up():
            raise RuntimeError(f"{self.label}every server was given up")
        for slot, error in failed.items():
            if slot.joined:  # else its thread knows
                self.say(f"{error}; it is restarted")
                with contextlib.suppress(Exception):  # an actor that is gone, and its server with it
                    self.call(slot, "stop", 0)
                self.leave(slot)

    def sleep(self, asleep: bool = True) -> bool:
        """Frees the servers' GPU memory, when what they are at has ended. False where that is not possible, said once."""
        if self.config.device == "cpu" or not self.config.sleep_mode:
            if not self.said_no_sleep:
                why = "vLLM cannot on CPU" if self.config.device == "cpu" else "started without sleep_mode"
                self.say(f"sleep and wake do nothing here: {why}")
            self.said_no_sleep = True
            return False
        with self.lock:
            self.asleep = asleep
            self.ask_all(self.sleep_call if asleep else "/wake_up")
        return True

    def wake_up(self) -> bool:
        """The opposite of sleep()."""
        return self.sleep(False)

    def shutdown(self) -> None:
        """Ends router and servers. May be called twice."""
        self.stopping.set()

        def stop(slot):
            with contextlib.suppress(Exception):  # an actor that is gone
                self.call(slot, "stop")

        for _ in range(2):  # a thread may just have been starting something
            self.router_process.stop(patience=10)
            stops = [threading.Thread(target=stop, args=(slot,)) for slot in self.slots]  # a pool has no more threads at the exit
            for thread in stops:
                thread.start()
            for thread in stops + [thread for thread in self.threads if thread.ident]:
                thread.join(15)
        self.reserved.close()


def complete(config: Config) -> Config:
    """The settings, checked, with what depends on this machine filled in."""
    config.check()
    device = config.device
    if device == "auto":
        import torch  # only here: it takes seconds to import
        device = "cuda" if torch.cuda.is_available() else "cpu"
    path = Path(config.model).expanduser().absolute()  # not resolved: a link may lead elsewhere on each node
    api_key = router.read_key(config.api_key, "ROUTER_API_KEY")
    return replace(config, device=device, api_key=api_key, server_key=api_key or config.server_key or secrets.token_urlsafe(32),
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


def reserved(configs: list[Config]) -> tuple[list[dict], str]:
    """What the servers of these models reserve in Ray, and how it deals them out: where GPUs are taken, node after node, or
    servers of several GPUs would find a single one left on each."""
    bundles = [{"CPU": config.ray_cpus} | ({"GPU": config.tensor_parallel_size} if config.device == "cuda" else {})
               for config in configs for _ in range(config.num_servers)]
    return bundles, "PACK" if any("GPU" in bundle for bundle in bundles) else "SPREAD"


def place_servers(configs: list[Config]) -> tuple[list, object]:
    """An actor for each server of these models, dealt out to the nodes by a placement group with one bundle for each.

    configs: complete(). RuntimeError when the cluster has no room.
    """
    import ray
    wanted = [(config, index) for config in configs for index in range(config.num_servers)]
    bundles, strategy = reserved(configs)
    (group, nodes), actors = hold(bundles, strategy, "vLLM servers"), []
    for number, ((config, index), bundle, node) in enumerate(zip(wanted, bundles, nodes)):
        strategy = ray.util.scheduling_strategies.PlacementGroupSchedulingStrategy(group, number)
        part, parts = nodes[:number].count(node), nodes.count(node)
        actors.append(server_actor(config, index, strategy, bundle.get("GPU", 0), part=part, parts=parts))
    return actors, group


def hold(bundles: list[dict], strategy: str, what: str, patience: float = 60.0) -> tuple[object, list[str]]:
    """Reserves these bundles in Ray: the placement group, and the node of each. RuntimeError naming `what` without room."""
    import ray
    group = ray.util.placement_group(bundles, strategy=strategy)
    if not group.wait(patience):
        ray.util.remove_placement_group(group)
        free, wanted = ray.available_resources(), Counter(map(str, bundles))
        raise RuntimeError(f"{what}: the Ray cluster has no room for {' + '.join(f'{n} x {one}' for one, n in wanted.items())}; "
                           f"free are {free.get('CPU', 0):g} CPUs and {free.get('GPU', 0):g} GPUs; ask for less or add nodes")
    nodes = ray.util.placement_group_table(group)["bundles_to_node_id"]
    return group, [nodes[number] for number in range(len(bundles))]


def server_actor(config: Config, index: int, strategy, num_gpus: int, **place):
    """One server as an actor, where `strategy` says; it may be restarted on another node. place: of VllmServer's arguments."""
    import ray
    options = dict(num_cpus=config.ray_cpus, num_gpus=num_gpus, max_restarts=-1, scheduling_strategy=strategy)
    driver = ray.get_runtime_context().get_node_id()
    return ray.remote(VllmServer).options(**options).remote(config, index, driver_node=driver, **place)


def end_servers(actors: list, group) -> None:
    """Ends what place_servers started; a server ends with its actor."""
    import ray
    if ray.is_initialized():
        for actor in actors:
            ray.kill(actor)
        if group is not None:
            ray.util.remove_placement_group(group)


class RewardModelManager:
    """Named reward models inside a Ray program, each with its servers in actors and its router beside the driver.

    Blocks until all are ready; initialises Ray if that has not been done. A placement group deals the servers out to the
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
                cluster = ray.init(include_dashboard=False, logging_level="warning").address_info["gcs_address"]
                print(f"Ray: the cluster at {cluster}; RAY_ADDRESS=local starts one of your own", flush=True)
            device = "cuda" if ray.cluster_resources().get("GPU") else "cpu"
            unreachable = ("127.0.0.1", "0.0.0.0") if sum(node["Alive"] for node in ray.nodes()) > 1 else ()
            configs = [complete(replace(config, device=device if config.device == "auto" else config.device,
                                        host=ray.util.get_node_ip_address() if config.host in unreachable else config.host,
                                        log_dir=Path(config.log_dir) / name)) for name, config in models.items()]
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

    def sleep(self) -> bool:
        """Frees the GPU memory of all models. False where some cannot."""
        return all([servers.sleep() for servers in self.models.values()])

    def wake_up(self) -> bool:
        """The opposite of sleep()."""
        return all([servers.wake_up() for servers in self.models.values()])

    def shutdown(self) -> None:
        """Ends everything. Idempotent; also runs at the end of the program."""
        for servers in self.models.values():
            servers.stopping.set()
        end_servers(self.actors, self.group)  # no thread waits any more for one that is on no node
        for servers in self.models.values():
            servers.shutdown()
        self.actors, self.group = [], None
        atexit.unregister(self.shutdown)


def main() -> None:
    argv = sys.argv[1:]
    at = argv.index("--") if "--" in argv else len(argv)
    signals, servers = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP), None
    try:
        config = replace(tyro.cli(Config, args=argv[:at]), vllm_args=tuple(argv[at + 1:]))
        for number in signals:
            if number != signal.SIGHUP or signal.getsignal(number) != signal.SIG_IGN:  # nohup: it outlives its terminal
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
