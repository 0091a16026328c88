"""Reward Loop: every sample is scored on its own, the moment it is ready, on many workers of a Ray cluster.

You write one function (`FILE:NAME`, sync or async; see "Writing your own reward function" in the README); the loop calls it:

    python reward_loop.py --data responses.parquet --out scored.parquet \\
        --reward-fn compute_score.py:compute_score_fapo --router-address 127.0.0.1:30000 --num-workers 2

    manager = RewardLoopManager(reward_fn="compute_score.py:compute_score")
    future = manager.submit(sample)                 # standalone: as each rollout ends, from any thread; never waits
    result = await manager.score_one(sample)        # the same for an event loop
    results = manager.score_batch(samples)          # colocate: the reward models wake up, everything is scored, they sleep again

A result is {"reward_score": float | None, "reward_extra_info": dict, "status": "ok" | "no_verdict" | "timeout" | "error"}.
A failure is a status, never a number: whatever the function does (raise, hang, return NaN, kill its process), its sample
has `reward_score: None`, and no other sample is touched.

  RewardLoopManager   in the driver. A thread with an event loop deals samples out to the least busy worker and holds every
                      limit (each one for the whole cluster). A worker's answer to a standing `collect` call brings what has
                      been scored since the last. A dead worker is replaced and its samples are dealt out again.
  RewardLoopWorker    a Ray actor. Runs async functions in its event loop, and gives sync ones to grading processes.
  grading process     forked from a small process that has loaded the function; one sample at a time, killed when overdue.

Left out: several drivers sharing one limit; cancelling a sample that was handed to a worker; grading in a container (a
grading process has the rights of the user who started it). The function's file must be readable under the same path on
every node (a shared file system, or Ray's `runtime_env` working directory).
"""

import asyncio
import atexit
import collections
import concurrent.futures
import contextlib
import dataclasses
import functools
import importlib.util
import inspect
import itertools
import json
import logging
import math
import os
import pickle
import random
import re
import shlex
import signal
import socket
import struct
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Annotated, Any, Literal, NamedTuple

import tyro

# ray, transformers, aiohttp and pyarrow are imported where they are used: the grading processes load this file too, and
# must stay small and quick to start.

HERE = Path(__file__).resolve().parent
STATUSES = ("ok", "no_verdict", "timeout", "error")
RETRIED_HTTP_STATUS = {408, 429, 500, 502, 503, 504}
RATE_WINDOW_S = 60.0  # --max-rpm and --max-tpm hold over any window of this length
GATHER_S = 0.01  # a worker gathers results for this long before it hands them over: fewer messages
HEARTBEAT_S = 5.0  # a worker with nothing to say answers `collect` at least this often
WEDGED_S = 20.0  # a worker silent for timeout + this is taken for dead: its event loop is blocked
MAX_WORKER_DEATHS = 4  # a sample that was in the hands of this many workers when they died is given up: status "error"
ISOLATE_AFTER_DEATHS = 2  # from this many deaths on it runs alone in a grading process, which shows who the killer is
SLOW_S = 1.0  # a grading process busy for so long with one sample gets a helper

log = logging.getLogger("reward_loop")


class Overlong(NamedTuple):
    """Overlong shaping: from `max_length - buffer` tokens on, a response loses up to `factor`, in a straight line."""

    max_length: int
    buffer: int
    factor: float = 1.0


def overlong_penalty(length: int, max_length: int, buffer: int, factor: float) -> float:
    """The penalty (<= 0) of a response of `length` tokens: 0 up to max_length - buffer, then linear, -factor at max_length.

    Source: DAPO (arXiv:2503.14476), equation 13, without its cut at max_length: a response cannot be longer than that.
    """
    if not 0 < buffer <= max_length:
        raise ValueError(f"overlong buffer is {buffer}: it must be between 1 and max_length ({max_length})")
    exceed = length - (max_length - buffer)
    return min(-exceed / buffer * factor, 0.0)


# ---- What the user sets


@dataclasses.dataclass(kw_only=True)
class RewardOptions:
    """How samples are scored. Every command line that scores has these flags: its configuration inherits from this one."""

    reward_fn: str | None = None
    """Reward function as FILE:NAME; default: the score of a discriminative reward model, without a reward model the rule."""
    reward_kwargs: str = "{}"
    """JSON object of further keyword arguments for every call, such as '{"penalty": 0.5}'."""
    router_address: tuple[str, ...] = ()
    """Reward model that runs already, as host:port; for several NAME=host:port each, the first being the main one."""
    genrm: tuple[str, ...] = ()
    """Reward model to start and stop with this run, as PATH (or hub name); for several NAME=PATH each, the first the main one."""
    genrm_servers: int = 1
    """vLLM servers for each model of --genrm."""
    genrm_cpus: str = ""
    """On CPU: cores for the servers of --genrm, such as 0,1; default: all, shared out evenly."""
    genrm_gpus: str = ""
    """GPUs for the servers of --genrm, such as 2,3; default: all that Ray sees."""
    genrm_vllm_args: str = ""
    """Arguments for the servers of --genrm, in quotes, such as "--gpu-memory-utilization 0.4"."""
    reward_model_task: tuple[Literal["generate", "classify"], ...] = ("generate",)
    """Kind of the reward model: generative (a judge that writes) or discriminative (one number); for several one each, or one."""
    reward_model_tokenizer: str | None = None
    """Path of the tokenizer for discriminative models and for functions that take one; default for the former: --genrm's own."""
    num_workers: Annotated[int, tyro.conf.arg(aliases=["--num-reward-workers"])] = 2
    """Ray workers that call the function, spread over the nodes of the cluster."""
    sync_processes: int = 0
    """Grading processes per worker for a sync function; 0 shares each node's cores out over its workers."""
    timeout: Annotated[float, tyro.conf.arg(aliases=["--reward-timeout"])] = 600.0
    """Seconds for one call of the function; then its status is "timeout"."""
    max_in_flight: int | None = None
    """Samples in the workers' hands at once, others wait without a clock; default: 128 per server of the main reward model."""
    max_concurrency: int | None = None
    """Calls of the function at once in the whole cluster."""
    max_rpm: float | None = None
    """Calls of the function per minute in the whole cluster, evenly paced."""
    max_tpm: float | None = None
    """Judge tokens per minute in the whole cluster, a call being reckoned as --tokens-per-call."""
    tokens_per_call: int = 2000
    """What one call costs in judge tokens, for --max-tpm."""
    http_retries: int = 6
    """How often a call that raised a broken connection, HTTP 429 or 5xx is made again, after 1, 2, 4 ... 10 s."""
    max_no_verdict_rate: float = 0.2
    """Stop with an error when more than this share of the samples that needed a verdict has none."""

    def check_rewards(self, started: dict[str, str] | None = None) -> "Job":
        """Refuses what cannot work before anything starts: ValueError naming the field, the value and the remedy.

        started: {name: "host:port"} of the models of `genrm` that are up. Returns what the workers need to know.
        """
        for name in ("num_workers", "timeout", "max_in_flight", "max_concurrency", "max_rpm", "max_tpm", "tokens_per_call",
                     "genrm_servers"):  # fmt: skip
            value = getattr(self, name)
            if value is not None and not value > 0:
                raise ValueError(f"{name} is {value}: it must be greater than 0")
        for name in ("sync_processes", "http_retries", "max_no_verdict_rate"):
            if not getattr(self, name) >= 0:
                raise ValueError(f"{name} is {getattr(self, name)}: it must be at least 0")
        models, addresses = named("genrm", self.genrm), named("router_address", self.router_address)
        if models and addresses:
            raise ValueError("genrm starts a reward model, router_address names a running one: give one of them")
        for name, address in addresses.items():
            if not re.fullmatch(r"[^/]+:\d+", address):
                raise ValueError(f"router_address is {address!r} for {name}: it must be host:port or NAME=host:port")
        if not models and (self.genrm_servers, self.genrm_cpus, self.genrm_gpus, self.genrm_vllm_args) != (1, "", "", ""):
            raise ValueError("genrm_servers, genrm_cpus, genrm_gpus, genrm_vllm_args: they are about servers of genrm; give genrm")
        if len(self.reward_model_task) not in (1, len(models or addresses)):
            raise ValueError(f"reward_model_task is {self.reward_model_task}: give one for all models, or one for each of them")
        for name, model in self.server_configs().items():
            model.check()
        return plan_call(self, started or addresses or dict.fromkeys(models, "host:0"))

    def server_configs(self, sleep_mode: bool = False) -> dict:
        """{name: genrm_server.Config} of the reward models to start."""
        import genrm_server

        models = named("genrm", self.genrm)
        tasks = self.reward_model_task * (len(models) if len(self.reward_model_task) == 1 else 1)
        rest = dict(num_servers=self.genrm_servers, port=0, cpus=self.genrm_cpus, gpus=self.genrm_gpus, sleep_mode=sleep_mode,
                    vllm_args=tuple(shlex.split(self.genrm_vllm_args)))  # fmt: skip
        return {name: genrm_server.Config(path, task=task, **rest) for (name, path), task in zip(models.items(), tasks)}


def named(field: str, values: tuple[str, ...]) -> dict[str, str]:
    """("a:1", "rm=b:2") -> {"genrm": "a:1", "rm": "b:2"}; what has no name is "genrm", and "genrm1" ... behind others."""
    found = {}
    for number, value in enumerate(values):
        name, text = re.fullmatch(r"(?:([A-Za-z_][\w-]*)=)?(.*)", value, re.DOTALL).groups()
        name = name or f"genrm{number or ''}"
        if name in found:
            raise ValueError(f"{field}: there are two models with the name {name!r}; write NAME=... with different names")
        found[name] = text
    return found


@dataclasses.dataclass
class Job:
    """What workers and grading processes need to know; plain values only."""

    function: str | None  # FILE:NAME with the full path; None: the score of the discriminative reward model
    kwargs: dict  # the same for every sample
    tokenizer: str | None  # path, where the function takes it
    takes_step: bool
    is_async: bool
    timeout: float
    sync_processes: int = 1


def plan_call(options: RewardOptions, addresses: dict[str, str]) -> Job:
    """How samples will be scored, with these reward models. Loads the function to see that it fits. Raises ValueError."""
    try:
        kwargs = dict(json.loads(options.reward_kwargs).items())
    except (ValueError, AttributeError):
        raise ValueError(f"reward_kwargs is {options.reward_kwargs!r}: it is not JSON, or not a JSON object") from None
    discriminative = bool(addresses) and options.reward_fn is None and options.reward_model_task[0] == "classify"
    tokenizer = options.reward_model_tokenizer
    if options.reward_model_task[0] == "classify" and options.genrm:
        tokenizer = tokenizer or next(iter(named("genrm", options.genrm).values()))
    if addresses and options.reward_fn is None and not discriminative:
        raise ValueError("a generative reward model needs a function that asks it: give reward_fn as FILE:NAME")
    if discriminative and not tokenizer:
        raise ValueError("a discriminative reward model needs reward_model_tokenizer (a path) for its chat template")
    file, _, name = (options.reward_fn or f"{HERE}/compute_score.py:compute_score").rpartition(":")
    path = Path(file).expanduser().resolve()
    if not file or not name:
        raise ValueError(f"reward_fn is {options.reward_fn!r}: it must be FILE:NAME, such as compute_score.py:compute_score")
    if not discriminative and not path.is_file():
        raise ValueError(f"reward_fn is {options.reward_fn!r}: there is no file {path}")
    spec = None if discriminative else f"{path}:{name}"
    import_path = sys.path.copy()
    try:
        function = load_function(spec)
    finally:
        sys.path[:] = import_path  # the driver has modules of its own to import
    parameters = inspect.signature(function).parameters
    takes_any = any(p.kind is p.VAR_KEYWORD for p in parameters.values())
    common = {}
    if addresses:
        common = {"reward_router_address": next(iter(addresses.values())), "reward_router_addresses": addresses}
        common["reward_model_tokenizer"] = None
    if not takes_any:  # a plain rule runs unchanged while a reward model is up
        common = {key: value for key, value in common.items() if key in parameters}
        for key in kwargs:
            if key not in parameters:
                raise ValueError(f"reward_kwargs: {key!r} is not a parameter of {spec}")
    common |= kwargs
    given = {"data_source", "solution_str", "ground_truth", "extra_info", "step", *common, *["prompt"] * discriminative}
    for name, p in parameters.items():
        if p.default is p.empty and p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY) and name not in given:
            raise ValueError(f"{spec} needs {name!r}: give it in reward_kwargs, or a reward model if it is that one's")
    is_async = any(map(inspect.iscoroutinefunction, (function, function.__call__)))
    tokenizer = tokenizer if "reward_model_tokenizer" in common else None
    return Job(spec, common, tokenizer, "step" in parameters, is_async, options.timeout, options.sync_processes)


# ---- Calling the function. This part runs in the workers and in the grading processes.


def load_function(spec: str | None):
    """The function named by "FILE:NAME"; its file may import others beside it. Raises ValueError with one clear line."""
    if spec is None:
        return score_with_classifier
    file, _, name = spec.rpartition(":")
    path = Path(file)
    sys.path.insert(0, str(path.parent))
    module_name = path.stem if path.stem not in sys.modules else f"{path.stem}_of_user"  # a user's random.py hides nothing
    try:
        module_spec = importlib.util.spec_from_file_location(module_name, path)
        module = sys.modules[module_name] = importlib.util.module_from_spec(module_spec)  # its dataclasses need the entry
        module_spec.loader.exec_module(module)
    except (Exception, SystemExit) as error:
        raise ValueError(f"reward function {spec!r}: loading the file failed: {describe(error)}") from error
    function = getattr(module, name, None)
    if not callable(function):
        raise ValueError(f"reward function {spec!r}: {path.name} has no function {name!r}")
    return function


def load_call(job: Job):
    """The function of a run with all that is the same for every sample. Raises ValueError."""
    function = load_function(job.function)
    common = dict(job.kwargs)
    if job.tokenizer:
        from transformers import AutoTokenizer

        common["reward_model_tokenizer"] = tokenizer = AutoTokenizer.from_pretrained(job.tokenizer)
        # Transformers 5 returns a dict where 4 returned token ids; functions written for either get the ids.
        tokenizer.apply_chat_template = functools.partial(tokenizer.apply_chat_template, return_dict=False)
    if job.takes_step:
        return functools.partial(function, **common)
    return lambda step=None, **sample: function(**sample, **common)


async def evaluate(function, payload: bytes) -> bytes:
    """Scores one pickled sample -> JSON of [score or None, extra info, status, retry delay or None]. Never raises.

    JSON, as an object of the user's could break the message that also carries other samples' results.
    """
    try:
        arguments = pickle.loads(payload)  # made by our own manager: each sample its own bytes, so its own extra_info
        value = function(**arguments)
        if inspect.isawaitable(value):
            value = await value
        outcome = [*read_outcome(value), None]  # arrays become lists below, what JSON does not know its repr
        return json.dumps(outcome, default=lambda x: x.tolist() if hasattr(x, "tolist") else repr(x)).encode()
    except BaseException as error:  # SystemExit too: a function that calls sys.exit() must not end the worker
        return failure("error", describe(error), retry_delay(error))


def failure(status: str, message: str, retry: float | None = None) -> bytes:
    """A result as `evaluate` writes it, for a sample that has no outcome of its own."""
    return json.dumps([None, {"error": message}, status, retry]).encode()


def read_outcome(value) -> tuple[float | None, dict, str]:
    """What the function returned -> (score, extra info, status)."""
    extra = dict(value) if isinstance(value, dict) else {"score": value}
    if "score" not in extra:
        return None, extra | {"error": f"the function's dict has no 'score', only {sorted(map(str, extra))}"}, "error"
    score = extra["score"]
    if score is None:
        return None, extra, "no_verdict"
    if not hasattr(type(score), "__float__"):  # float() would take "1"; a string is a mistake, not a score
        return None, extra | {"score": None, "error": f"the score is {score!r:.80}, not a number"}, "error"
    score = float(score)
    if not math.isfinite(score):
        return None, extra | {"score": None, "error": f"the score is {score}"}, "error"
    return score, extra | {"score": score}, "ok"


def describe(error: BaseException) -> str:
    """One line: the kind of error, its message, and the last place in the user's code."""
    frame = error.__traceback__
    while frame and frame.tb_next:
        frame = frame.tb_next
    place = f" ({os.path.basename(frame.tb_frame.f_code.co_filename)}:{frame.tb_lineno})" if frame else ""
    return f"{type(error).__name__}: {error}"[:500] + place


def retry_delay(error: BaseException) -> float | None:
    """0 or the server's Retry-After in seconds where a second try makes sense (broken connection, HTTP 429, 5xx), else None.

    Knows the errors of aiohttp (`status`), openai (`status_code`), requests and httpx (`response.status_code`) by their shape.
    """
    response = getattr(error, "response", None)
    status = getattr(error, "status", None) or getattr(error, "status_code", None) or getattr(response, "status_code", None)
    if not isinstance(status, int):
        connection_errors = {"ClientConnectionError", "APIConnectionError", "TransportError", "ConnectionError"}
        return 0.0 if any(kind.__name__ in connection_errors for kind in type(error).__mro__) else None
    if status not in RETRIED_HTTP_STATUS:
        return None
    headers = getattr(error, "headers", None) or getattr(response, "headers", None) or {}
    with contextlib.suppress(KeyError, ValueError):  # no such header, or a date instead of seconds
        return min(float(headers["Retry-After"]), 60.0)
    return 0.0


_classify_session = None


async def score_with_classifier(prompt, solution_str, reward_router_address, reward_model_tokenizer, **_) -> float:
    """The score of a discriminative reward model: the logit that vLLM's /classify gives for the whole conversation.

    The text is the chat template of the reward model's own tokenizer, which writes the BOS token itself where the model has
    one; `add_special_tokens: false` keeps the server from adding a second.
    """
    global _classify_session
    import aiohttp

    _classify_session = _classify_session or aiohttp.ClientSession(
        connector=aiohttp.TCPConnector(limit=0), timeout=aiohttp.ClientTimeout(total=None), raise_for_status=True
    )
    text = reward_model_tokenizer.apply_chat_template([*prompt, {"role": "assistant", "content": solution_str}], tokenize=False)
    body = {"input": text, "add_special_tokens": False, "use_activation": False}
    async with _classify_session.post(f"http://{reward_router_address}/classify", json=body) as response:
        scores = (await response.json())["data"][0]["probs"]
    if len(scores) != 1:
        raise ValueError(f"the discriminative model gives {len(scores)} labels: write a reward function that chooses one")
    return scores[0]


# ---- Grading processes: where sync functions run, and any sample that is suspected of killing workers.


def fork_server(control_fd: int) -> None:
    """Main of the process that grading processes are forked from: it has one thread and has loaded the function.

    For each socket that comes over `control_fd` it forks a process that serves that socket. When the worker goes away, however
    it died, the control socket ends, and everything that was forked is killed.
    """
    if os.fork():  # a grandchild of the worker: Ray kills a worker's children with it, and then nobody could clear up
        os._exit(0)
    control = socket.socket(fileno=control_fd)
    with control.makefile("rb") as stream:
        setup = pickle.load(stream)
    function = load_call(Job(**setup))
    control.send(b"\0")  # ready
    children = set()
    while descriptors := socket.recv_fds(control, 1, 1)[1]:
        children = {pid for pid in children if os.waitpid(pid, os.WNOHANG) == (0, 0)}
        pid = os.fork()
        if pid == 0:
            os.setpgid(0, 0)  # a group of its own: what the function starts dies with it
            control.close()
            asyncio.run(serve_samples(socket.socket(fileno=descriptors[0]), function))
            os._exit(0)
        os.close(descriptors[0])
        children.add(pid)
    for pid in children:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(pid, signal.SIGKILL)


async def serve_samples(connection: socket.socket, function) -> None:
    """Main of a grading process: reads a sample, writes its result, one at a time (it may block), until the socket ends."""
    connection.sendall(b"%d\n" % os.getpid())
    stream = connection.makefile("rb")
    while header := stream.read(4):
        result = await evaluate(function, stream.read(*struct.unpack("<I", header)))
        connection.sendall(result + b"\n")  # JSON: there is no other line end in it


# ---- The worker


class RewardLoopWorker:
    """Ray actor (asyncio): scores the samples it is given and hands each result over with the next `collect`.

    Async functions run in its event loop. Others, and samples that are suspected of killing workers, are queued for tasks that
    have a grading process each and restart it when it dies or is overdue. For each process that has been busy with one sample
    for SLOW_S there is one more (up to 4 x sync_processes in all), so that no sample waits for the end of a hanging neighbour.
    """

    def __init__(self, job: Job):
        self.job = job
        self.done = []  # (ticket, result, seconds) since the last collect
        self.news = asyncio.Event()
        self.running = {}  # ticket -> (task, the timer that cuts it off), of an async function
        self.queue = asyncio.Queue()  # of (ticket, payload, processes that died on it), for grading processes
        self.graders = []  # the tasks that have one
        self.slow = set()  # those whose process has been busy for more than SLOW_S
        self.control = None  # the socket to the fork server

    async def prepare(self) -> str | None:
        """Loads the function -> one line about what is wrong with it, or None."""
        try:
            self.function = load_call(self.job)
            if not self.job.is_async:
                self._start_fork_server()
        except (ValueError, OSError) as error:
            return " ".join(str(error).split())

    async def submit(self, batch: list[tuple[int, bool, bytes]]) -> None:
        """Takes samples (ticket, isolated, payload); returns at once."""
        loop = asyncio.get_running_loop()
        for ticket, isolated, payload in batch:
            if self.job.is_async and not isolated:
                timer = loop.call_later(self.job.timeout, self._cut_off, ticket)
                self.running[ticket] = loop.create_task(self._run(ticket, payload)), timer
            else:
                self.queue.put_nowait((ticket, payload, 0))
                self._add_graders()

    async def collect(self) -> list[tuple[int, bytes, float]]:
        """Everything scored since the last call; waits for the first result, at most HEARTBEAT_S."""
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self.news.wait(), HEARTBEAT_S)
            await asyncio.sleep(GATHER_S)
        self.news.clear()
        done, self.done = self.done, []
        return done

    def _report(self, ticket: int, result: bytes, started: float) -> None:
        self.done.append((ticket, result, time.monotonic() - started))
        self.news.set()

    async def _run(self, ticket: int, payload: bytes) -> None:
        started = time.monotonic()
        result = await evaluate(self.function, payload)
        if entry := self.running.pop(ticket, None):  # else it came too late: the timeout has been reported
            entry[1].cancel()
            self._report(ticket, result, started)

    def _cut_off(self, ticket: int) -> None:
        self.running.pop(ticket)[0].cancel()  # it may refuse: nobody waits for it
        message = f"no result within {self.job.timeout:g} s"
        self._report(ticket, failure("timeout", message), time.monotonic() - self.job.timeout)

    def _add_graders(self, *slow: asyncio.Task) -> None:
        self.slow.update(slow)
        size = self.job.sync_processes
        while len(self.graders) < min(size + len(self.slow), 4 * size):
            self.graders.append(asyncio.create_task(self._grade()))

    async def _grade(self) -> None:
        """Has samples graded by one grading process and its successors."""
        process, task = None, asyncio.current_task()
        while True:
            ticket, payload, deaths = await self.queue.get()
            timer = asyncio.get_running_loop().call_later(SLOW_S, self._add_graders, task)
            started = time.monotonic()
            try:
                process = process or await self._fork()
                reader, writer, pid = process
                writer.write(struct.pack("<I", len(payload)) + payload)
                async with asyncio.timeout(self.job.timeout):
                    result = await reader.readuntil(b"\n")
                self._report(ticket, result, started)
                continue
            except TimeoutError:
                self._report(ticket, failure("timeout", f"no result within {self.job.timeout:g} s: process killed"), started)
            except (OSError, EOFError, subprocess.SubprocessError) as error:
                if deaths == 0:  # once may have been the system (out of memory, somebody's kill)
                    self.queue.put_nowait((ticket, payload, 1))
                else:
                    message = f"the grading process died on this sample, twice ({describe(error)})"
                    self._report(ticket, failure("error", message), started)
            finally:
                timer.cancel()
                self.slow.discard(task)
            if process:
                writer.close()
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(pid, signal.SIGKILL)
            process = None

    async def _fork(self):
        """A new grading process -> (reader, writer, pid)."""
        ours, theirs = socket.socketpair()
        with theirs:
            try:
                if self.control is None:
                    self._start_fork_server()
                socket.send_fds(self.control, [b"\0"], [theirs.fileno()])
            except OSError:
                self.control = None
                raise
        reader, writer = await asyncio.open_connection(sock=ours, limit=2**30)
        return reader, writer, int(await reader.readuntil(b"\n"))

    def _start_fork_server(self) -> None:
        """Returns when it has loaded the function; raises OSError."""
        control, theirs = socket.socketpair()
        code = f"import sys; sys.path.insert(0, {str(HERE)!r}); import reward_loop; reward_loop.fork_server({theirs.fileno()})"
        with theirs:
            subprocess.run([sys.executable, "-c", code], pass_fds=[theirs.fileno()], start_new_session=True, check=True)
        control.sendall(pickle.dumps(dataclasses.asdict(self.job)))
        if not control.recv(1):
            raise OSError("the process that loads the function for grading ended at once; the worker's log says why")
        self.control = control


# ---- The manager


@dataclasses.dataclass(eq=False)
class Ticket:
    """One sample on its way."""

    number: int
    payload: bytes
    penalty: float  # overlong
    future: concurrent.futures.Future
    deaths: int = 0  # workers that died with it in their hands
    tries: int = 0  # failed HTTP tries


@dataclasses.dataclass(eq=False)
class Slot:
    """One worker's place: its actor may be replaced."""

    index: int
    worker: Any = None  # None while there is none that can take samples
    pending: dict[int, Ticket] = dataclasses.field(default_factory=dict)


class RewardLoopManager:
    """Scores samples on `options.num_workers` Ray workers. Safe to use from any thread and any event loop.

    Raises ValueError (a missing function, an option that makes no sense) before anything is scored. `start_rewards` makes one
    from options alone, with the models of options.genrm; here they are handed over:
    reward_models: a genrm_server.RewardModelManager; gives the addresses, and is woken and put to sleep by score_batch.
    overlong: Overlong(max_length, buffer, factor) or None; samples then need `response_length` in tokens.
    """

    def __init__(self, options: RewardOptions, *, reward_models=None, overlong: Overlong | None = None):
        self.job = options.check_rewards(reward_models and reward_models.router_addresses)
        if overlong:
            overlong_penalty(0, *overlong)  # raises on bad settings

        import ray

        self._ray = ray
        self._started_ray = connect_ray()
        # By value: a worker's Python then needs no import path to this file.
        ray.cloudpickle.register_pickle_by_value(sys.modules[__name__])
        num_workers = options.num_workers
        self.job.sync_processes = options.sync_processes or max(1, int(ray.cluster_resources().get("CPU", 1)) // num_workers)
        self.reward_models, self.overlong, self.http_retries = reward_models, overlong, options.http_retries
        self.max_in_flight = min(options.max_in_flight or 2048, options.max_concurrency or math.inf)

        self._queue = collections.deque()  # filled from any thread
        self._open = set()  # the futures without a result; from any thread
        self._numbers = itertools.count()
        self._dispatch_is_due = False
        self._closed = None  # the reason, once closed
        self._loop = asyncio.new_event_loop()  # everything below belongs to its thread
        self._rate = RateLimit(min(options.max_rpm or math.inf, (options.max_tpm or math.inf) / options.tokens_per_call))
        self._timer = None  # dispatches when the rate limit allows
        self._slots = [Slot(index) for index in range(num_workers)]
        self._tasks = []  # one per worker, taking its results
        self._warnings_left = 3
        self._thread = threading.Thread(target=self._loop.run_forever, name="reward-loop", daemon=True)
        self._thread.start()
        atexit.register(self.shutdown)
        try:
            asyncio.run_coroutine_threadsafe(self._start(), self._loop).result()
        except BaseException as error:
            self.shutdown()
            if isinstance(error, ray.exceptions.RayError):
                raise RuntimeError(f"a reward worker died while it was starting: {' '.join(str(error).split())}") from error
            raise

    # ---- for callers, in their own threads

    def submit(self, sample: dict) -> concurrent.futures.Future:
        """Hands over one row of the schema plus `response` (str) [and `response_length`, tokens] -> the future of its result."""
        try:
            arguments = dict(data_source=sample["data_source"], solution_str=sample["response"])
            arguments |= dict(ground_truth=sample["reward_model"]["ground_truth"], extra_info=sample.get("extra_info") or {})
            if self.job.function is None:
                arguments["prompt"] = sample["prompt"]
            if "step" in sample:
                arguments |= {"step": sample["step"], "extra_info": arguments["extra_info"] | {"step": sample["step"]}}
            penalty = overlong_penalty(sample["response_length"], *self.overlong) if self.overlong else 0.0
        except KeyError as error:
            raise ValueError(f"the sample has no {error}: a sample is a row of the schema plus `response`") from None
        future = concurrent.futures.Future()
        ticket = Ticket(next(self._numbers), pickle.dumps(arguments, protocol=5), penalty, future)
        self._open.add(future)
        future.add_done_callback(self._open.discard)
        if self._closed:  # asked only now: whoever closes either sees this future or is seen here
            raise RuntimeError(self._closed)
        self._put(ticket)
        return future

    async def score_one(self, sample: dict) -> dict:
        """`submit` for coroutines, of any event loop."""
        return await asyncio.wrap_future(self.submit(sample))

    def score_batch(self, samples: list[dict], on_result=None) -> list[dict]:
        """Scores any number of samples -> results in their order, all with the same keys of extra info (missing ones: None).

        Wakes the reward models first and puts them to sleep afterwards. A batch that takes long shows a progress bar.
        on_result(index, result) is called as each result arrives; what it raises ends the batch.
        """
        from tqdm import tqdm

        if self._closed:
            raise RuntimeError(self._closed)
        if self.reward_models:
            self.reward_models.wake_up()
        futures = {}
        try:
            for index, sample in enumerate(samples):
                futures[self.submit(sample)] = index
            arriving = concurrent.futures.as_completed(futures)
            for future in tqdm(arriving, "scoring", len(futures), unit="sample", delay=3, leave=False, disable=None):
                result = future.result()
                if on_result:
                    on_result(futures[future], result)
        finally:
            for future in futures:
                future.cancel()  # in a batch that ended early: those not yet handed out never will be
            if self.reward_models:
                self.reward_models.sleep()
        return with_equal_keys([future.result() for future in futures])

    def shutdown(self) -> None:
        """Ends the workers (and Ray, if this manager started it); samples on their way raise RuntimeError. Twice is allowed."""
        atexit.unregister(self.shutdown)
        if self._thread.is_alive():
            asyncio.run_coroutine_threadsafe(self._stop("the reward loop was shut down"), self._loop).result()
            self._loop.call_soon_threadsafe(self._loop.stop)
            self._thread.join()
            self._loop.close()
            if self._started_ray:
                self._ray.shutdown()

    def _put(self, ticket: Ticket) -> None:
        self._queue.append(ticket)
        if not self._dispatch_is_due:  # one wake-up of the loop's thread for many samples
            self._dispatch_is_due = True
            self._loop.call_soon_threadsafe(self._dispatch)

    # ---- in the loop's thread

    def _dispatch(self) -> None:
        """Deals waiting samples out to the least busy workers, as far as the limits allow."""
        self._dispatch_is_due = False  # first: a sample from now on asks for another dispatch
        ready = [slot for slot in self._slots if slot.worker]
        free = self.max_in_flight - sum(len(slot.pending) for slot in self._slots)
        outgoing = collections.defaultdict(list)
        while self._queue and ready and free > 0:
            if (wait := self._rate.wait()) > 0:
                if self._timer:
                    self._timer.cancel()
                self._timer = self._loop.call_later(wait, self._dispatch)
                break
            ticket = self._queue.popleft()
            if ticket.future.done():  # its caller has gone
                continue
            self._rate.take()
            slot = min(ready, key=lambda slot: len(slot.pending))
            slot.pending[ticket.number] = ticket
            outgoing[slot.worker].append((ticket.number, ticket.deaths >= ISOLATE_AFTER_DEATHS, ticket.payload))
            free -= 1
        for worker, batch in outgoing.items():
            worker.submit.remote(batch)

    async def _start(self) -> None:
        await asyncio.gather(*map(self._start_worker, self._slots))
        self._tasks = [asyncio.create_task(self._serve(slot)) for slot in self._slots]

    async def _start_worker(self, slot: Slot) -> None:
        """A new actor in this slot, on the next living node in turn (another one, should that be gone meanwhile)."""
        ray = self._ray
        nodes = sorted(node["NodeID"] for node in ray.nodes() if node["Alive"] and node["Resources"].get("CPU", 0) > 0)
        strategy = ray.util.scheduling_strategies.NodeAffinitySchedulingStrategy(nodes[slot.index % len(nodes)], soft=True)
        actor = ray.remote(num_cpus=0.01, max_restarts=0, scheduling_strategy=strategy)(RewardLoopWorker)
        worker = actor.remote(self.job)
        if complaint := await asyncio.wait_for(worker.prepare.remote(), 300):
            raise ValueError(complaint)
        slot.worker = worker

    async def _serve(self, slot: Slot) -> None:
        """Takes the results of one worker for as long as the manager lives, and replaces the worker when it dies."""
        while not self._closed:
            try:
                results = await asyncio.wait_for(slot.worker.collect.remote(), self.job.timeout + WEDGED_S)
            except (self._ray.exceptions.RayError, TimeoutError) as error:
                await self._replace(slot, wedged=isinstance(error, TimeoutError))
                continue
            for number, result, seconds in results:
                self._finish(slot.pending.pop(number), result, seconds)
            self._dispatch()

    def _finish(self, ticket: Ticket, result: bytes, seconds: float) -> None:
        score, extra, status, retry_after = json.loads(result, parse_constant=lambda _: None)  # a NaN in extra info: null
        if retry_after is not None and ticket.tries < self.http_retries:
            pause = max(retry_after, min(2.0**ticket.tries, 10.0) * random.uniform(0.75, 1.25))
            ticket.tries += 1
            self._loop.call_later(pause, self._put, ticket)
            return
        if status in ("error", "timeout") and self._warnings_left:
            self._warnings_left -= 1
            log.warning("a sample got no score (%s): %s", status, extra.get("error"))
        if self.overlong:
            extra |= {"overlong_penalty": ticket.penalty, "overlong": ticket.penalty < 0}
        reward = None if score is None else score + ticket.penalty
        with contextlib.suppress(concurrent.futures.InvalidStateError):  # cancelled: its caller has gone
            outcome = {"reward_score": reward, "reward_extra_info": extra, "status": status, "seconds": seconds}
            ticket.future.set_result(outcome)

    async def _replace(self, slot: Slot, wedged: bool) -> None:
        """The slot's worker is dead, or wedged and now killed: its samples go to the queue's front, a new one starts."""
        log.warning("reward worker %d %s; a new one takes over", slot.index, "is wedged" if wedged else "died")
        self._ray.kill(slot.worker)
        slot.worker = None
        for ticket in reversed(slot.pending.values()):
            ticket.deaths += ISOLATE_AFTER_DEATHS if wedged else 1
            if ticket.deaths < MAX_WORKER_DEATHS:
                self._queue.appendleft(ticket)
            else:
                self._finish(ticket, failure("error", f"{ticket.deaths} reward workers died with this sample"), 0.0)
        slot.pending.clear()
        self._dispatch()
        for attempt in range(5):
            try:
                await self._start_worker(slot)
                return self._dispatch()
            except (ValueError, self._ray.exceptions.RayError, TimeoutError) as error:
                reason = f"reward worker {slot.index} cannot be started again: {describe(error)}"
            await asyncio.sleep(2**attempt)
        await self._stop(reason)

    async def _stop(self, reason: str) -> None:
        self._closed = self._closed or reason
        for slot in self._slots:
            if slot.worker:
                self._ray.kill(slot.worker)
            slot.worker = None
        for future in list(self._open):
            with contextlib.suppress(concurrent.futures.InvalidStateError):
                future.set_exception(RuntimeError(self._closed))
        others = [task for task in self._tasks if task is not asyncio.current_task()]
        for task in others:
            task.cancel()
        await asyncio.gather(*others, return_exceptions=True)


def connect_ray(gpus: str = "") -> bool:
    """Joins the Ray cluster that RAY_ADDRESS names or that runs on this machine, else starts one; True: it was started now.

    Says which in one line. gpus: what a cluster that is started may deal out, such as "2,3". RuntimeError if it cannot be joined.
    """
    import ray

    if ray.is_initialized():
        return False
    quiet = dict(include_dashboard=False, log_to_driver=False, logging_level=logging.ERROR)
    address, started = os.environ.get("RAY_ADDRESS") or "auto", False
    before = os.environ.get("CUDA_VISIBLE_DEVICES")
    try:
        if address != "local":
            with contextlib.suppress(*[ConnectionError] * (address == "auto")):  # there is none
                ray.init(address, **quiet)
        if started := not ray.is_initialized():
            if gpus:
                os.environ["CUDA_VISIBLE_DEVICES"] = gpus  # Ray, and all that it starts, reads it now
            ray.init("local", **quiet)
    except Exception as error:  # another version of Ray or Python, another key: of many types, some with a page of text
        text = f"Ray: the cluster {address} cannot be joined ({describe(error):.300}); RAY_ADDRESS=local starts one of your own"
        raise RuntimeError(" ".join(text.split())) from error
    finally:
        if before is None:
            os.environ.pop("CUDA_VISIBLE_DEVICES", None)
        else:
            os.environ["CUDA_VISIBLE_DEVICES"] = before
    if gpus and not started:
        ray.shutdown()
        raise ValueError(f"genrm_gpus is {gpus}: the Ray cluster deals out its own GPUs; RAY_ADDRESS=local starts another")
    have = ray.cluster_resources()
    text = f"{have.get('CPU', 0):g} CPUs, {have.get('GPU', 0):g} GPUs"
    where = f"joined the cluster at {ray.get_runtime_context().gcs_address}" if not started else "started a cluster for this run"
    print(f"Ray: {where} ({text})" + "; RAY_ADDRESS=local starts one of your own" * (not started), flush=True)
    return started


def start_rewards(options: RewardOptions, stack: contextlib.ExitStack, *, sleep_mode: bool = False,
                  overlong: Overlong | None = None) -> RewardLoopManager:  # fmt: skip
    """Starts the reward models that the options name, and the loop -> RewardLoopManager. All of it ends with `stack`.

    sleep_mode: the models' servers can be put to sleep, for a GPU that they share with a trainer (score_batch does it).
    """
    options.check_rewards()
    if overlong:
        overlong_penalty(0, *overlong)  # raises on bad settings
    models = None
    if options.genrm:
        import genrm_server

        if connect_ray(options.genrm_gpus):
            stack.callback(sys.modules["ray"].shutdown)
        models = genrm_server.RewardModelManager(options.server_configs(sleep_mode))
        stack.callback(models.shutdown)
    manager = RewardLoopManager(options, reward_models=models, overlong=overlong)
    stack.callback(manager.shutdown)
    return manager


def no_verdict_rate(results: list[dict]) -> float:
    """Share without a score among the samples that needed a verdict: all but those whose function says that its judge was not
    needed (`genrm_status` "skipped") and that have a score. 0.0 where none needed one."""
    needed = [r for r in results if r["reward_score"] is None or r["reward_extra_info"].get("genrm_status") != "skipped"]
    return sum(result["reward_score"] is None for result in needed) / max(len(needed), 1)


class RateLimit:
    """At most `per_minute` calls, counted for any window of RATE_WINDOW_S; where that is below one: one in a longer window."""

    def __init__(self, per_minute: float):
        self.window = max(RATE_WINDOW_S, 60 / per_minute)
        self.allowed = per_minute * self.window / 60 + 1e-9
        self.taken = collections.deque()

    def wait(self) -> float:
        """Seconds until the next call may be made; 0 = now."""
        now = time.monotonic()
        while self.taken and self.taken[0] <= now - self.window:
            self.taken.popleft()
        return 0.0 if len(self.taken) + 1 <= self.allowed else self.taken[0] + self.window - now

    def take(self) -> None:
        """Counts a call made now."""
        if self.allowed < math.inf:
            self.taken.append(time.monotonic())


def with_equal_keys(results: list[dict]) -> list[dict]:
    """The same results with the union of all extra-info keys in each; what a sample lacks is None."""
    empty = {key: None for result in results for key in result["reward_extra_info"]}
    return [result | {"reward_extra_info": empty | result["reward_extra_info"]} for result in results]


# ---- The command line: a file of responses in, the same file with rewards out


@dataclasses.dataclass
class Config(RewardOptions):
    """Scores a file of responses (rows of the schema plus `response`) with a reward function."""

    data: Path
    """Parquet or JSONL file to score; its rows have data_source, reward_model, extra_info and response."""
    out: Path
    """Parquet or JSONL file to write: the input's columns plus reward_score, status and reward_extra_info (JSON text)."""
    max_response_length: int | None = None
    """Longest response in tokens; given, overlong shaping is on and rows need a column response_length."""
    overlong_buffer: int = 4096
    """Tokens before --max-response-length over which the overlong penalty grows."""
    overlong_factor: float = 1.0
    """The overlong penalty at --max-response-length."""
    resume: bool = False
    """Go on with an interrupted run: what has a score is kept, the rest is scored."""


def read_rows(path: Path, needed: list[str]) -> list[dict]:
    """The rows of a parquet or JSONL file of the row schema, each with the columns `needed` (a null will do for extra_info).

    Raises ValueError naming the file, the row and what is wrong with it.
    """
    if path.suffix not in (".parquet", ".jsonl"):
        raise ValueError(f"{path}: the name must end with .parquet or .jsonl")
    if not path.is_file():
        raise ValueError(f"{path}: no such file")
    rows = []
    try:
        if path.suffix == ".parquet":
            import pyarrow.parquet

            rows = pyarrow.parquet.read_table(path).to_pylist()
        else:
            for line in path.read_text(encoding="utf-8").rstrip("\n").split("\n"):
                rows.append(dict(json.loads(line)))
    except (ValueError, TypeError) as error:  # pyarrow's are ValueErrors, too
        place = f", line {len(rows) + 1}: not a JSON object" if path.suffix == ".jsonl" else ": cannot be read as parquet"
        raise ValueError(f"{path}{place} ({error})") from None
    if not rows:
        raise ValueError(f"{path}: no rows")
    for number, row in enumerate(rows):
        for column in needed:
            if row.get(column) is None and (column not in row or column != "extra_info"):
                raise ValueError(f"{path} row {number}: no {column!r} (there are {', '.join(row)}); see prepare_data.py")
        if not isinstance(row["reward_model"], dict) or row["reward_model"].get("ground_truth") is None:
            text = f"{path} row {number}: reward_model is {row['reward_model']!r}; it must be a dict with ground_truth"
            raise ValueError(f'{text} ("" where the reward function needs none)')
        if not isinstance(row.get("response", ""), str):
            raise ValueError(f"{path} row {number}: response is {row['response']!r}; it must be a string")
    return rows


def write_rows(rows: list[dict], results: list[dict], data: Path, out: Path) -> None:
    """Writes the input's columns plus the results, to a temporary file that then takes the name `out`."""
    scored = []
    for row, result in zip(rows, results):
        info = json.dumps(result["reward_extra_info"])
        scored.append(row | {"reward_score": result["reward_score"], "status": result["status"], "reward_extra_info": info})
    temporary = out.with_name(out.name + ".tmp")
    if out.suffix == ".jsonl":
        with temporary.open("w", encoding="utf-8") as file:
            file.writelines(json.dumps(row, default=str) + "\n" for row in scored)
    else:
        import pyarrow.parquet

        # Types that Python values do not show: the input's, and those of columns that may hold nothing but None.
        types = {field.name: field.type for field in pyarrow.parquet.read_schema(data)} if data.suffix == ".parquet" else {}
        types |= {"reward_score": pyarrow.float64(), "status": pyarrow.string(), "reward_extra_info": pyarrow.string()}
        names = dict.fromkeys(name for row in scored for name in row)
        columns = {name: pyarrow.array([row.get(name) for row in scored], types.get(name)) for name in names}
        pyarrow.parquet.write_table(pyarrow.table(columns), temporary)
    temporary.replace(out)


def scored_before(partial: Path, header: str, resume: bool) -> dict[int, dict]:
    """{row: result} of an interrupted run, from the file `partial`, whose first line says what was being scored."""
    if not partial.exists():
        return {}
    if not resume:
        raise ValueError(f"{partial} is left from an interrupted run: add --resume to go on with it, or delete it")
    first, *lines = partial.read_text().split("\n")
    if first != header:
        raise ValueError(f"{partial} belongs to another run ({first:.300}): delete it or use the same arguments")
    done = {}
    for line in lines:
        with contextlib.suppress(ValueError):  # one may have been cut off
            row, result = json.loads(line)
            if result["reward_score"] is not None:
                done[row] = result
    return done


def summary(results: list[dict], seconds: float, scored_now: int) -> str:
    """What the run prints at its end."""

    def share(values: list) -> str:
        return f"{sum(map(bool, values)) / len(values):.4f} of {len(values):,}"

    extras = [result["reward_extra_info"] for result in results]
    scores = [result["reward_score"] for result in results if result["reward_score"] is not None]
    accurate = [extra["acc"] for extra in extras if extra.get("acc") is not None]
    flawed = [extra["flawed_positive"] for extra in extras if extra.get("acc") and extra.get("flawed_positive") is not None]
    statuses = collections.Counter(result["status"] for result in results)
    judge = collections.Counter(extra["genrm_status"] for extra in extras if extra.get("genrm_status"))
    lines = [
        f"scored {scored_now:,} samples in {seconds:.1f} s ({scored_now / max(seconds, 1e-9):,.0f} samples/s)",
        "statuses: " + ", ".join(f"{status} {statuses[status]:,}" for status in STATUSES),
        f"mean reward: {sum(scores) / len(scores):.4f}" if scores else "mean reward: none, no sample has a score",
        f"accuracy: {share(accurate)}" if accurate else "",
        f"flawed positives: {share(flawed)} right answers with a verdict" if flawed else "",
        "judge: " + ", ".join(f"{status} {count:,}" for status, count in judge.most_common()) if judge else "",
    ]
    return "\n".join(filter(None, lines))


def run(config: Config) -> None:
    """The command line's work. Raises ValueError and OSError for what the user gave, RuntimeError when the run has to stop."""
    needed = ["data_source", "reward_model", "response"] + ["response_length"] * (config.max_response_length is not None)
    if config.reward_model_task[0] == "classify" and config.reward_fn is None:
        needed.append("prompt")
    rows = read_rows(config.data, needed)
    if config.out.suffix not in (".parquet", ".jsonl"):
        raise ValueError(f"--out is {config.out}: the name must end with .parquet or .jsonl")
    overlong = None
    if config.max_response_length is not None:
        overlong = Overlong(config.max_response_length, config.overlong_buffer, config.overlong_factor)
    config.check_rewards()
    partial = config.out.with_name(config.out.name + ".partial.jsonl")  # the results while the run goes on
    header = json.dumps([str(config.data.resolve()), len(rows), config.reward_fn, config.reward_kwargs])
    done = scored_before(partial, header, config.resume)
    left = [index for index in range(len(rows)) if index not in done]
    counts = collections.Counter()

    with contextlib.ExitStack() as stack:
        manager = start_rewards(config, stack, overlong=overlong)
        config.out.parent.mkdir(parents=True, exist_ok=True)
        file = stack.enter_context(partial.open("a"))
        file.write("\n" if file.tell() else header + "\n")  # the last line may have been cut off
        if done:
            print(f"resuming: {len(done):,} of {len(rows):,} samples have a score already")

        def on_result(position: int, result: dict) -> None:
            file.write(json.dumps([left[position], result]) + "\n")
            file.flush()
            counts[result["status"]] += 1
            failed = counts.total() - counts["ok"]
            # Failures tend to come first (a refused connection is quicker than a critique): wait for a fair share.
            if failed > config.max_no_verdict_rate * max(counts.total(), min(len(left), 1000)):
                why = result["reward_extra_info"].get("error") or result["reward_extra_info"].get("genrm_status")
                raise RuntimeError(
                    f"{failed:,} of the first {counts.total():,} samples have no score ({dict(counts)}; the last: {why}), more "
                    f"than --max-no-verdict-rate {config.max_no_verdict_rate} allows; mend it and go on with --resume"
                )

        started = time.monotonic()
        done |= zip(left, manager.score_batch([rows[index] for index in left], on_result))
        results = with_equal_keys([done[index] for index in range(len(rows))])
        write_rows(rows, results, config.data, config.out)
        partial.unlink()
        print(summary(results, time.monotonic() - started, len(left)))
        print(f"written to {config.out}")


def main() -> int:
    """Parses the command line and runs -> exit code: 0, 2 for a wrong argument or file, 1 for a run that had to stop."""
    config = tyro.cli(Config)
    try:
        run(config)
    except (ValueError, OSError, RuntimeError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1 if isinstance(error, RuntimeError) else 2
    except KeyboardInterrupt:
        print(f"interrupted; go on with --resume (results so far: {config.out}.partial.jsonl)", file=sys.stderr)
        return 130
    return 0


if __name__ == "__main__":
    sys.exit(main())
