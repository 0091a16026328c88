"""Reward Loop: every sample is scored on its own, the moment it is ready, on many workers of a Ray cluster.

You write one function (`FILE:NAME`, sync or async; see "Writing your own reward function" in the README); the loop calls it:

    python reward_loop.py --data responses.parquet --out scored.parquet \\
        --reward-fn compute_score.py:compute_score_fapo --router-address 127.0.0.1:30000 --num-workers 2

    manager = RewardLoopManager(reward_fn="compute_score.py:compute_score")
    result = await manager.score_one(sample)        # standalone: as each rollout ends, from any event loop and thread
    results = manager.score_batch(samples)          # colocate: the reward models wake up, everything is scored, they sleep again

A result is {"reward_score": float | None, "reward_extra_info": dict, "status": "ok" | "no_verdict" | "timeout" | "error"}.
A failure is a status, never a number: whatever the function does (raise, hang, return NaN, kill its process), its sample
has `reward_score: None`, and no other sample is touched.

How it works, from the outside in:
  RewardLoopManager   in the driver. One thread with an event loop keeps the queue, deals samples out to the least busy worker,
                      and holds every limit (in flight, requests and tokens per minute), so that a limit is one for the whole
                      cluster. All samples that wait go out in one message; the worker's answer to a standing `collect` call
                      brings whatever has been scored since. A dead worker is replaced and its samples are dealt out again.
  RewardLoopWorker    a Ray actor. Runs async functions in its event loop, and gives sync ones to grading processes.
  grading process     forked from a small process that has loaded the function; one sample at a time, killed when overdue.

Left out: several drivers sharing one limit; cancelling a sample that was handed to a worker; grading in a container (a
grading process has the rights of the user who started it). The function's file must be readable under the same path on
every node (a shared file system, or Ray's `runtime_env` working directory).
"""

import asyncio
import atexit
import collections
import contextlib
import dataclasses
import functools
import importlib.util
import inspect
import json
import logging
import math
import os
import pickle
import random
import signal
import socket
import struct
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any, Literal, NamedTuple

# ray, transformers, aiohttp, pyarrow and tyro are imported where they are used: the grading processes load this file too, and
# must stay small and quick to start.

HERE = Path(__file__).resolve().parent
DEFAULT_FUNCTION = "compute_score.py:compute_score"
STATUSES = ("ok", "no_verdict", "timeout", "error")
RETRIED_HTTP_STATUS = {408, 429, 500, 502, 503, 504}
RATE_WINDOW_S = 60.0  # --max-rpm and --max-tpm hold over any window of this length
HEARTBEAT_S = 5.0  # a worker with nothing to say answers `collect` at least this often
WEDGED_S = 20.0  # a worker silent for timeout + this is taken for dead: its event loop is blocked
MAX_WORKER_DEATHS = 4  # a sample that was in the hands of this many workers when they died is given up: status "error"
ISOLATE_AFTER_DEATHS = 2  # from this many deaths on it runs alone in a grading process, which shows who the killer is
MESSAGE_SAMPLES = 256  # samples per message to a worker
BUSY, COALESCE_S = 32, 0.005  # a worker that holds more than BUSY samples gathers results for COALESCE_S before it answers
QUICK_BATCH_S = 0.005  # a grading process is handed as many samples at a time as take about this long
SLOW_S = 1.0  # from here on a call counts as slow: nothing waits behind it

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


# --------------------------------------------------------------------------------------------------------------------------
# Calling the function. This part runs in the workers and in the grading processes.


def load_function(spec: str):
    """The function named by "FILE:NAME"; its file may import others beside it. Raises ValueError with one clear line."""
    file, _, name = spec.rpartition(":")
    path = Path(file).expanduser().resolve()
    if not path.is_file():
        raise ValueError(f"reward function {spec!r}: there is no file {path}")
    sys.path.insert(0, str(path.parent))
    module_name = path.stem if path.stem not in sys.modules else f"{path.stem}_of_user"  # a user's random.py hides nothing
    module_spec = importlib.util.spec_from_file_location(module_name, path)
    module = importlib.util.module_from_spec(module_spec)
    sys.modules[module_name] = module  # its dataclasses need this
    try:
        module_spec.loader.exec_module(module)
    except (Exception, SystemExit) as error:
        raise ValueError(f"reward function {spec!r}: loading the file failed: {describe(error)}") from error
    function = getattr(module, name, None)
    if not callable(function):
        raise ValueError(f"reward function {spec!r}: {path.name} has no function {name!r}")
    return function


def build_call(setup: dict) -> tuple[Any, dict]:
    """The function of a run and the keyword arguments that are the same for every sample. Raises ValueError."""
    if setup["discriminative"]:
        function = score_with_classifier
    else:
        function = load_function(setup["reward_fn"])
    parameters = inspect.signature(function).parameters
    takes_any = any(p.kind is p.VAR_KEYWORD for p in parameters.values())
    common = {}
    if setup["router_addresses"]:
        common["reward_router_address"] = next(iter(setup["router_addresses"].values()))
        common["reward_router_addresses"] = setup["router_addresses"]
        common["reward_model_tokenizer"] = None
    if not takes_any:  # a plain rule runs unchanged while a reward model is up
        common = {key: value for key, value in common.items() if key in parameters}
    for key in setup["reward_kwargs"]:
        if key not in parameters and not takes_any:
            raise ValueError(f"reward_kwargs: {key!r} is not a parameter of {setup['reward_fn']}")
    common |= setup["reward_kwargs"]
    given = {"data_source", "solution_str", "ground_truth", "extra_info", "prompt", *common}
    for name, p in parameters.items():
        if p.default is p.empty and p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY) and name not in given:
            raise ValueError(f"{setup['reward_fn']} needs {name!r}: give it in reward_kwargs, or a reward model if it is that one's")
    if "reward_model_tokenizer" in common and setup["reward_model_tokenizer"]:
        from transformers import AutoTokenizer

        common["reward_model_tokenizer"] = AutoTokenizer.from_pretrained(setup["reward_model_tokenizer"])
    return function, common


async def evaluate(function, common: dict, payload: bytes) -> bytes:
    """Scores one pickled sample -> JSON of [score or None, extra info, status, retry delay or None]. Never raises.

    The JSON is what travels back: it has plain values only, so no object of the user's can break a message that also carries
    other samples' results.
    """
    try:
        arguments = pickle.loads(payload)  # made by our own manager: each sample its own bytes, so its own extra_info
        value = function(**arguments, **common)
        if inspect.isawaitable(value):
            value = await value
        return json.dumps([*read_outcome(value), None], default=plain).encode()
    except BaseException as error:  # SystemExit too: a function that calls sys.exit() must not end the worker
        retry = retry_delay(error)
        return json.dumps([None, {"error": describe(error)}, "error", retry]).encode()


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


def plain(value):
    """json.dumps's fallback: arrays and array scalars become lists and numbers, anything else its repr."""
    return value.tolist() if hasattr(value, "tolist") else repr(value)


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
    if isinstance(status, int):
        if status not in RETRIED_HTTP_STATUS:
            return None
        headers = getattr(error, "headers", None) or getattr(response, "headers", None) or {}
        with contextlib.suppress(KeyError, ValueError):  # no such header, or a date instead of seconds
            return min(float(headers["Retry-After"]), 60.0)
        return 0.0
    connection_errors = {"ClientConnectionError", "APIConnectionError", "TransportError", "ConnectionError"}
    return 0.0 if any(kind.__name__ in connection_errors for kind in type(error).__mro__) else None


_classify_session = None


async def score_with_classifier(prompt, solution_str, reward_router_address, reward_model_tokenizer, **_) -> float:
    """The score of a discriminative reward model: the logit that vLLM's /classify gives for the whole conversation.

    The text is the chat template of the reward model's own tokenizer, which writes the BOS token itself where the model has
    one; `add_special_tokens: false` keeps the server from adding a second.
    """
    global _classify_session
    import aiohttp

    if _classify_session is None:
        _classify_session = aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(limit=0), timeout=aiohttp.ClientTimeout(total=None), raise_for_status=True
        )
    conversation = [*prompt, {"role": "assistant", "content": solution_str}]
    text = reward_model_tokenizer.apply_chat_template(conversation, tokenize=False)
    body = {"input": text, "add_special_tokens": False, "use_activation": False}
    async with _classify_session.post(f"http://{reward_router_address}/classify", json=body) as response:
        scores = (await response.json())["data"][0]["probs"]
    if len(scores) != 1:
        raise ValueError(f"the discriminative model gives {len(scores)} labels: write a reward function that chooses one")
    return scores[0]


# --------------------------------------------------------------------------------------------------------------------------
# Grading processes: where sync functions run, and any sample that is suspected of killing workers.


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
    function, common = build_call(setup)
    control.send(b"\0")  # ready
    children = set()
    while True:
        _, descriptors, _, _ = socket.recv_fds(control, 1, 1)
        children = {pid for pid in children if os.waitpid(pid, os.WNOHANG) == (0, 0)}
        if not descriptors:
            break
        pid = os.fork()
        if pid == 0:
            os.setpgid(0, 0)  # a group of its own: what the function starts dies with it
            control.close()
            serve_samples(socket.socket(fileno=descriptors[0]), function, common)
            os._exit(0)
        os.close(descriptors[0])
        children.add(pid)
    for pid in children:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(pid, signal.SIGKILL)


def serve_samples(connection: socket.socket, function, common: dict) -> None:
    """Main of a grading process: reads a sample, writes its result, one at a time, until the socket ends."""
    loop = asyncio.new_event_loop()
    asyncio.set_event_loop(loop)
    connection.sendall(struct.pack("<I", os.getpid()))
    stream = connection.makefile("rb")
    while header := stream.read(4):
        result = loop.run_until_complete(evaluate(function, common, stream.read(*struct.unpack("<I", header))))
        connection.sendall(struct.pack("<I", len(result)) + result)


class GradingPool:
    """The worker's side: `size` tasks, each with a grading process of its own that it restarts when it dies or is overdue.

    A process is given one sample at a time or, when the function is quick, as many as take about QUICK_BATCH_S. Should one of
    those keep it for SLOW_S, the others are taken back. For each process that is busy for so long one more is started while
    samples wait (up to 4 x size in all), so that no sample waits for the end of a hanging neighbour.
    """

    def __init__(self, setup: dict, report):
        self.setup, self.report = setup, report  # report(ticket, result)
        self.size = setup["sync_processes"]
        self.queue = asyncio.Queue()  # of (ticket, payload, processes that died on it)
        self.mean_s = 1.0  # moving average of one call
        self.tasks = set()
        self.slow = set()  # the tasks whose process has been busy with one sample for more than SLOW_S
        self.control = None  # the socket to the fork server
        self.starting = asyncio.Lock()

    def put(self, ticket: int, payload: bytes) -> None:
        """Queues a sample; its result goes to `report`."""
        self.queue.put_nowait((ticket, payload, 0))
        self._add_tasks()

    def _add_tasks(self) -> None:
        while len(self.tasks) < min(self.size + len(self.slow), 4 * self.size):
            task = asyncio.create_task(self._grade())
            self.tasks.add(task)
            task.add_done_callback(self.tasks.discard)

    async def _grade(self) -> None:
        """One grading process and its successors; ends when there are more than are needed."""
        process = None
        while len(self.tasks) <= self.size + len(self.slow):
            batch = collections.deque([await self.queue.get()])
            more = min(int(QUICK_BATCH_S / self.mean_s), self.queue.qsize() // len(self.tasks))
            batch.extend(self.queue.get_nowait() for _ in range(more))
            process = await self._grade_batch(process, batch)
        self.tasks.discard(asyncio.current_task())  # now, not when the task is done: two must not leave on the same count
        self._kill(process)

    async def _grade_batch(self, process, batch):
        """Has the samples graded in order and reports each result as it comes -> the process, or None if it is gone."""
        sent, begun, results = len(batch), time.monotonic(), 0
        try:
            process = process or await self._fork()
            reader, writer, _ = process
            writer.write(b"".join(struct.pack("<I", len(payload)) + payload for _, payload, _ in batch))
            while batch:
                task = asyncio.current_task()
                timer = asyncio.get_running_loop().call_later(SLOW_S, self._is_slow, task, batch)
                try:
                    async with asyncio.timeout(self.setup["timeout"]):
                        result = await reader.readexactly(*struct.unpack("<I", await reader.readexactly(4)))
                finally:
                    timer.cancel()
                    self.slow.discard(task)
                self.report(batch.popleft()[0], result)
                results += 1
        except TimeoutError:
            self.report(batch.popleft()[0], failure("timeout", f"no result within {self.setup['timeout']:g} s: process killed"))
        except (OSError, asyncio.IncompleteReadError, subprocess.SubprocessError) as error:
            ticket, payload, deaths = batch.popleft()  # graded in order, so the first without a result was under way
            if deaths == 0:  # once may have been the system (out of memory, somebody's kill)
                self.queue.put_nowait((ticket, payload, 1))
            else:
                self.report(ticket, failure("error", f"the grading process died on this sample, twice ({describe(error)})"))
        self.mean_s += 0.3 * ((time.monotonic() - begun) / max(results, 1) - self.mean_s)
        if results == sent:
            return process
        for sample in batch:  # never begun
            self.queue.put_nowait(sample)
        return self._kill(process)  # also where samples were taken back from it: it still holds them

    def _is_slow(self, task, batch) -> None:
        while len(batch) > 1:
            self.queue.put_nowait(batch.pop())
        self.slow.add(task)
        if not self.queue.empty():
            self._add_tasks()

    async def _fork(self):
        """A new grading process -> (reader, writer, pid). Starts the fork server first if there is none (any longer)."""
        loop = asyncio.get_running_loop()
        async with self.starting:
            if self.control is None:
                control, theirs = socket.socketpair()
                code = f"import sys; sys.path.insert(0, {str(HERE)!r}); import reward_loop; reward_loop.fork_server({theirs.fileno()})"
                subprocess.run([sys.executable, "-c", code], pass_fds=[theirs.fileno()], start_new_session=True, check=True)
                theirs.close()
                control.setblocking(False)
                await loop.sock_sendall(control, pickle.dumps(self.setup))
                if not await loop.sock_recv(control, 1):
                    raise OSError("the process that loads the function for grading ended at once; the worker's log says why")
                self.control = control
            ours, theirs = socket.socketpair()
            with theirs:
                try:
                    socket.send_fds(self.control, [b"\0"], [theirs.fileno()])
                except OSError:
                    self.control.close()
                    self.control = None
                    raise
        reader, writer = await asyncio.open_connection(sock=ours)
        return reader, writer, *struct.unpack("<I", await reader.readexactly(4))

    def _kill(self, process) -> None:
        if process is not None:
            _, writer, pid = process
            writer.close()
            with contextlib.suppress(ProcessLookupError):
                os.killpg(pid, signal.SIGKILL)


def failure(status: str, message: str) -> bytes:
    """A result as `evaluate` writes it, for a sample that has no outcome of its own."""
    return json.dumps([None, {"error": message}, status, None]).encode()


# --------------------------------------------------------------------------------------------------------------------------
# The worker


class RewardLoopWorker:
    """Ray actor (asyncio): scores the samples it is given and hands each result over with the next `collect`."""

    def __init__(self, setup: dict):
        self.setup = setup
        self.held = 0  # samples given to this worker whose results have not been collected
        self.done = []  # (ticket, result) since the last collect
        self.news = asyncio.Event()
        self.running = {}  # ticket -> (task, the timer that cuts it off)
        self.pool = None

    async def prepare(self) -> tuple[str | None, bool]:
        """Loads the function -> (one line about what is wrong or None, whether samples go to grading processes)."""
        try:
            self.function, self.common = build_call(self.setup)
        except (ValueError, OSError) as error:
            return " ".join(str(error).split()), False
        target = self.function if inspect.isroutine(self.function) else getattr(self.function, "__call__", self.function)
        self.is_async = inspect.iscoroutinefunction(target) or inspect.iscoroutinefunction(self.function)
        return None, not self.is_async

    async def submit(self, batch: list[tuple[int, bool, bytes]]) -> None:
        """Takes samples (ticket, isolated, payload); returns at once."""
        loop = asyncio.get_running_loop()
        self.held += len(batch)
        for ticket, isolated, payload in batch:
            if self.is_async and not isolated:
                timer = loop.call_later(self.setup["timeout"], self._cut_off, ticket)
                self.running[ticket] = loop.create_task(self._run(ticket, payload)), timer
            else:
                self.pool = self.pool or GradingPool(self.setup, self._report)
                self.pool.put(ticket, payload)

    async def collect(self) -> list[tuple[int, bytes]]:
        """Everything scored since the last call; waits for the first result, at most HEARTBEAT_S."""
        if not self.done:
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self.news.wait(), HEARTBEAT_S)
        if self.held - len(self.done) > BUSY:  # much more to come: fewer messages, a few milliseconds later
            await asyncio.sleep(COALESCE_S)
        self.news.clear()
        done, self.done = self.done, []
        self.held -= len(done)
        return done

    async def _run(self, ticket: int, payload: bytes) -> None:
        result = await evaluate(self.function, self.common, payload)
        if entry := self.running.pop(ticket, None):  # else it came too late: the timeout has been reported
            entry[1].cancel()
            self._report(ticket, result)

    def _cut_off(self, ticket: int) -> None:
        task, _ = self.running.pop(ticket)
        task.cancel()
        self._report(ticket, failure("timeout", f"no result within {self.setup['timeout']:g} s"))

    def _report(self, ticket: int, result: bytes) -> None:
        self.done.append((ticket, result))
        self.news.set()


# --------------------------------------------------------------------------------------------------------------------------
# The manager


@dataclasses.dataclass(eq=False)
class Ticket:
    """One sample on its way."""

    payload: bytes
    future: asyncio.Future
    loop: asyncio.AbstractEventLoop
    penalty: float  # overlong
    deaths: int = 0  # workers that died with it in their hands
    tries: int = 0  # failed HTTP tries


@dataclasses.dataclass(eq=False)
class Slot:
    """One worker's place: its actor may be replaced."""

    index: int
    handle: Any = None
    pending: dict[int, Ticket] = dataclasses.field(default_factory=dict)
    ready: bool = False
    window: float = math.inf  # most samples to hand to it at once


class RewardLoopManager:
    """Scores samples on `num_workers` Ray workers. Safe to use from any thread and any event loop.

    Raises ValueError (a missing function, an option that makes no sense) before anything is scored.

    reward_fn: "FILE:NAME"; None = with a discriminative reward model its score, without a reward model the default rule.
    reward_kwargs: passed on to every call.
    router_addresses: {name: "host:port"} of reward models that run elsewhere; the first is `reward_router_address`.
    reward_models: a genrm_server.RewardModelManager; gives the addresses, and is woken and put to sleep by score_batch.
    reward_model_task: "generate" or "classify" (a discriminative model; without a function its score is the reward).
    reward_model_tokenizer: path; loaded once in each worker, for functions that take it and for discriminative models.
    sync_processes: grading processes per worker for sync functions; 0 = the cluster's cores shared out over the workers.
    timeout: seconds for one call of the function.
    max_in_flight: samples in the workers' hands at once; the others wait in the driver.
    max_concurrency, max_rpm, max_tpm: calls at once, calls and tokens per minute in the whole cluster; a call is reckoned as
        `tokens_per_call` tokens. None = no limit.
    http_retries: how often a call that failed with a broken connection, HTTP 429 or 5xx is made again (waits 1, 2, 4 ... 10 s).
    overlong: Overlong(max_length, buffer, factor) or None; samples then need `response_length` in tokens.
    """

    def __init__(
        self,
        *,
        reward_fn: str | None = None,
        reward_kwargs: dict | None = None,
        router_addresses: dict[str, str] | None = None,
        reward_models=None,
        reward_model_task: str = "generate",
        reward_model_tokenizer: str | None = None,
        num_workers: int = 2,
        sync_processes: int = 0,
        timeout: float = 600.0,
        max_in_flight: int = 2048,
        max_concurrency: int | None = None,
        max_rpm: float | None = None,
        max_tpm: float | None = None,
        tokens_per_call: int = 2000,
        http_retries: int = 6,
        overlong: Overlong | None = None,
    ):
        for name, value in dict(num_workers=num_workers, timeout=timeout, max_in_flight=max_in_flight).items():
            if not value > 0:
                raise ValueError(f"{name} is {value}: it must be greater than 0")
        for name, value in dict(max_concurrency=max_concurrency, max_rpm=max_rpm, max_tpm=max_tpm).items():
            if value is not None and not value > 0:
                raise ValueError(f"{name} is {value}: it must be greater than 0, or None for no limit")
        if overlong:
            overlong_penalty(0, *overlong)  # raises on bad settings
        addresses = dict(reward_models.router_addresses) if reward_models else dict(router_addresses or {})
        discriminative = bool(addresses) and reward_fn is None and reward_model_task == "classify"
        if addresses and reward_fn is None and not discriminative:
            raise ValueError("a generative reward model needs a function that asks it: give reward_fn as FILE:NAME")
        if discriminative and not reward_model_tokenizer:
            raise ValueError("a discriminative reward model needs reward_model_tokenizer (a path) for its chat template")
        file, _, name = (reward_fn or f"{HERE}/{DEFAULT_FUNCTION}").rpartition(":")
        if not file or not name:
            raise ValueError(f"reward_fn is {reward_fn!r}: it must be FILE:NAME, such as compute_score.py:compute_score")
        if not discriminative and not Path(file).expanduser().is_file():
            raise ValueError(f"reward_fn is {reward_fn!r}: there is no file {Path(file).expanduser().absolute()}")
        self.reward_models = reward_models
        self.overlong = overlong
        self.num_workers = num_workers
        self.http_retries = http_retries
        self.max_in_flight = min(max_in_flight, max_concurrency or max_in_flight)
        self._needs_prompt = discriminative
        self._rate = RateLimit(min(max_rpm or math.inf, (max_tpm or math.inf) / tokens_per_call))
        self.setup = dict(
            reward_fn=f"{Path(file).expanduser().resolve()}:{name}",
            reward_kwargs=reward_kwargs or {},
            router_addresses=addresses,
            discriminative=discriminative,
            reward_model_tokenizer=reward_model_tokenizer,
            timeout=timeout,
        )

        import ray

        self._ray = ray
        self._started_ray = not ray.is_initialized()
        if self._started_ray:  # RAY_ADDRESS, where set, names the cluster to join
            ray.init(include_dashboard=False, log_to_driver=False, logging_level=logging.ERROR)
        cores = int(ray.cluster_resources().get("CPU", 1))
        self.setup["sync_processes"] = sync_processes or max(1, cores // num_workers)
        # By value: a worker's Python then needs no import path to this file.
        ray.cloudpickle.register_pickle_by_value(sys.modules[__name__])

        self._loop = asyncio.new_event_loop()
        self._inbox = collections.deque()  # filled from any thread
        self._drain_is_due = False
        self._queue = collections.deque()  # this and everything below belongs to the loop's thread
        self._paused = set()  # tickets that wait for another HTTP try
        self._next_ticket = 0
        self._timer = None
        self._slots = [Slot(index) for index in range(num_workers)]
        self._batches = set()  # a future for each score_batch under way
        self._tasks = []  # one per worker, taking its results
        self._closed = None  # the reason, once closed
        self._warnings_left = 3
        self._thread = threading.Thread(target=self._loop.run_forever, name="reward-loop", daemon=True)
        self._thread.start()
        atexit.register(self.shutdown)
        try:
            sync = asyncio.run_coroutine_threadsafe(self._start(), self._loop).result()
        except BaseException as error:
            self.shutdown()
            if isinstance(error, ray.exceptions.RayError):
                raise RuntimeError(f"a reward worker died while it was starting: {' '.join(str(error).split())}") from error
            raise
        if sync:  # a worker queues these for its processes: few at first, so that no idle worker looks on at the end
            for slot in self._slots:
                slot.window = 4 * self.setup["sync_processes"]

    # ---- for callers, in their own threads

    async def score_one(self, sample: dict) -> dict:
        """Scores one row of the schema plus `response` (str) [and `response_length`, tokens]; any event loop, any thread."""
        loop = asyncio.get_running_loop()
        ticket = self._ticket(sample, loop)
        self._inbox.append(ticket)
        if not self._drain_is_due:  # one wake-up of the loop's thread, however many calls this tick makes
            self._drain_is_due = True
            self._loop.call_soon_threadsafe(self._drain)
        return await ticket.future

    def score_batch(self, samples: list[dict], on_result=None) -> list[dict]:
        """Scores any number of samples -> results in their order, all with the same keys of extra info (missing ones: None).

        Wakes the reward models first and puts them to sleep afterwards. A batch that takes long shows a progress bar.
        on_result(index, result) is called as each result arrives (in the loop's thread); what it raises ends the batch.
        """
        if self._closed:
            raise RuntimeError(self._closed)
        if self.reward_models:
            self.reward_models.wake_up()
        try:
            work = asyncio.run_coroutine_threadsafe(self._score_all(samples, on_result), self._loop)
            try:
                results = work.result()
            finally:
                work.cancel()  # no effect on a finished one
        finally:
            if self.reward_models:
                self.reward_models.sleep()
        return with_equal_keys(results)

    def shutdown(self) -> None:
        """Ends the workers (and Ray, if this manager started it). Samples on their way raise RuntimeError. May be called twice."""
        atexit.unregister(self.shutdown)
        if self._thread.is_alive():
            asyncio.run_coroutine_threadsafe(self._stop("the reward loop was shut down"), self._loop).result()
            self._loop.call_soon_threadsafe(self._loop.stop)
            self._thread.join()
            self._fail_all(self._closed)  # what came in between
            self._loop.close()
            if self._started_ray:
                self._ray.shutdown()

    def _ticket(self, sample: dict, loop) -> Ticket:
        if self._closed:
            raise RuntimeError(self._closed)
        try:
            arguments = {
                "data_source": sample["data_source"],
                "solution_str": sample["response"],
                "ground_truth": sample["reward_model"]["ground_truth"],
                "extra_info": sample.get("extra_info") or {},
            }
            if self._needs_prompt:
                arguments["prompt"] = sample["prompt"]
            penalty = overlong_penalty(sample["response_length"], *self.overlong) if self.overlong else 0.0
        except KeyError as error:
            raise ValueError(f"the sample has no {error}: a sample is a row of the schema plus `response`") from None
        return Ticket(pickle.dumps(arguments, protocol=5), loop.create_future(), loop, penalty)

    # ---- in the loop's thread

    async def _score_all(self, samples, on_result):
        from tqdm import tqdm

        tickets = [self._ticket(sample, self._loop) for sample in samples]
        results = [None] * len(tickets)
        left = set(range(len(tickets)))
        complete = self._loop.create_future()
        self._batches.add(complete)
        with tqdm(total=len(tickets), desc="scoring", unit="sample", delay=3, leave=False, disable=None) as bar:

            def arrived(index, future):
                if complete.done():  # the batch has ended early
                    return
                try:
                    results[index] = future.result()
                    if on_result:
                        on_result(index, results[index])
                except BaseException as error:  # goes to the caller of score_batch
                    complete.set_exception(error)
                bar.update()
                left.discard(index)
                if not left and not complete.done():
                    complete.set_result(results)

            for index, ticket in enumerate(tickets):
                ticket.future.add_done_callback(functools.partial(arrived, index))
            self._queue.extend(tickets)
            self._dispatch()
            try:
                return await complete if tickets else []
            finally:
                self._batches.discard(complete)
                for ticket in tickets:
                    ticket.future.cancel()  # in a batch that ended early: those not yet handed out never will be

    async def _start(self) -> bool:
        """Starts the workers side by side -> whether the function is sync. Raises ValueError with a worker's complaint."""
        answers = await asyncio.gather(*(self._start_worker(slot) for slot in self._slots))
        for complaint, _ in answers:
            if complaint:
                raise ValueError(complaint)
        self._tasks = [asyncio.create_task(self._serve(slot)) for slot in self._slots]
        return answers[0][1]

    async def _start_worker(self, slot: Slot):
        """A new actor in this slot, on the next living node in turn (another one, should that be gone meanwhile)."""
        ray = self._ray
        nodes = sorted(node["NodeID"] for node in ray.nodes() if node["Alive"] and node["Resources"].get("CPU", 0) > 0)
        strategy = ray.util.scheduling_strategies.NodeAffinitySchedulingStrategy(nodes[slot.index % len(nodes)], soft=True)
        actor = ray.remote(num_cpus=0.01, max_restarts=0, scheduling_strategy=strategy)(RewardLoopWorker)
        slot.handle = actor.remote(self.setup)
        answer = await asyncio.wait_for(slot.handle.prepare.remote(), 300)
        slot.ready = answer[0] is None
        return answer

    def _drain(self) -> None:
        self._drain_is_due = False  # first: a call from now on asks for another drain
        while self._inbox:
            self._queue.append(self._inbox.popleft())
        self._dispatch()

    def _dispatch(self) -> None:
        """Deals waiting samples out to the least busy workers, as far as the limits allow."""
        if self._closed:
            return self._fail_all(self._closed)
        in_flight = sum(len(slot.pending) for slot in self._slots)
        outgoing = collections.defaultdict(list)
        while self._queue and in_flight < self.max_in_flight:
            free = [slot for slot in self._slots if slot.ready and len(slot.pending) < slot.window]
            if not free:
                break
            slot = min(free, key=lambda slot: len(slot.pending))
            if (wait := self._rate.wait()) > 0:
                if self._timer:
                    self._timer.cancel()
                self._timer = self._loop.call_later(wait, self._dispatch)
                break
            ticket = self._queue.popleft()
            if ticket.future.cancelled():  # the caller has gone
                continue
            self._rate.take()
            self._next_ticket += 1
            slot.pending[self._next_ticket] = ticket
            outgoing[slot.index].append((self._next_ticket, ticket.deaths >= ISOLATE_AFTER_DEATHS, ticket.payload))
            in_flight += 1
        for index, batch in outgoing.items():
            for start in range(0, len(batch), MESSAGE_SAMPLES):
                self._slots[index].handle.submit.remote(batch[start : start + MESSAGE_SAMPLES])

    async def _serve(self, slot: Slot) -> None:
        """Takes the results of one worker for as long as the manager lives, and replaces the worker when it dies."""
        while not self._closed:
            try:
                results = await asyncio.wait_for(slot.handle.collect.remote(), self.setup["timeout"] + WEDGED_S)
            except (self._ray.exceptions.RayError, TimeoutError) as error:
                await self._replace(slot, error)
                continue
            if len(results) >= slot.window / 2:  # it nearly ran dry
                slot.window *= 2
            finished = collections.defaultdict(list)
            for number, result in results:
                if ticket := slot.pending.pop(number, None):
                    self._finish(ticket, result, finished)
            for loop, pairs in finished.items():
                deliver(loop, pairs)
            self._dispatch()

    def _finish(self, ticket: Ticket, result: bytes, finished: dict) -> None:
        score, extra, status, retry_after = json.loads(result, parse_constant=lambda _: None)  # a NaN in extra info: null
        if retry_after is not None and ticket.tries < self.http_retries:
            pause = max(retry_after, min(2.0**ticket.tries, 10.0) * random.uniform(0.75, 1.25))
            ticket.tries += 1
            self._paused.add(ticket)
            self._loop.call_later(pause, self._again, ticket)
            return
        if status in ("error", "timeout") and self._warnings_left:
            self._warnings_left -= 1
            log.warning("a sample got no score (%s): %s", status, extra.get("error"))
        if self.overlong:
            extra |= {"overlong_penalty": ticket.penalty, "overlong": ticket.penalty < 0}
        reward = None if score is None else score + ticket.penalty
        finished[ticket.loop].append((ticket.future, {"reward_score": reward, "reward_extra_info": extra, "status": status}))

    def _again(self, ticket: Ticket) -> None:
        self._paused.discard(ticket)
        self._queue.append(ticket)
        self._dispatch()

    async def _replace(self, slot: Slot, error: Exception) -> None:
        """The slot's worker is dead (or wedged: then it is killed): its samples go back to the queue's front, a new one starts."""
        wedged = isinstance(error, TimeoutError)
        log.warning("reward worker %d %s; a new one takes over", slot.index, "is wedged" if wedged else "died")
        slot.ready = False
        finished = collections.defaultdict(list)
        for ticket in reversed(slot.pending.values()):
            ticket.deaths += ISOLATE_AFTER_DEATHS if wedged else 1
            if ticket.deaths < MAX_WORKER_DEATHS:
                self._queue.appendleft(ticket)
            else:
                self._finish(ticket, failure("error", f"{ticket.deaths} reward workers died with this sample"), finished)
        slot.pending.clear()
        for loop, pairs in finished.items():
            deliver(loop, pairs)
        self._ray.kill(slot.handle)
        self._dispatch()
        for attempt in range(5):
            try:
                complaint, _ = await self._start_worker(slot)
                if complaint is None:
                    return self._dispatch()
            except (self._ray.exceptions.RayError, TimeoutError) as failed:
                complaint = describe(failed)
            await asyncio.sleep(2**attempt)
        await self._stop(f"reward worker {slot.index} cannot be started again: {complaint}")

    def _fail_all(self, reason: str) -> None:
        pending = [ticket for slot in self._slots for ticket in slot.pending.values()]
        for ticket in [*self._inbox, *self._queue, *self._paused, *pending]:
            deliver(ticket.loop, [(ticket.future, RuntimeError(reason))])
        self._inbox.clear()
        self._queue.clear()
        self._paused.clear()
        for slot in self._slots:
            slot.pending.clear()

    async def _stop(self, reason: str) -> None:
        self._closed = self._closed or reason
        self._fail_all(self._closed)
        for slot in self._slots:
            if slot.handle is not None:
                self._ray.kill(slot.handle)
            slot.handle, slot.ready = None, False
        others = [task for task in self._tasks if task is not asyncio.current_task()]
        for task in others:
            task.cancel()
        await asyncio.gather(*others, *self._batches, return_exceptions=True)
        await asyncio.sleep(0.01)  # lets the failed batches return before the loop stops


class RateLimit:
    """At most `per_minute` calls in any window of RATE_WINDOW_S seconds, counted for that window; below one: one in a longer one."""

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
        if self.allowed < math.inf:
            self.taken.append(time.monotonic())


def deliver(loop, pairs: list) -> None:
    """Sets futures of another thread's event loop, all in one wake-up."""

    def set_results():
        for future, result in pairs:
            if not future.done():  # else the caller has gone
                future.set_exception(result) if isinstance(result, Exception) else future.set_result(result)

    with contextlib.suppress(RuntimeError):  # the caller's loop is closed: nobody waits any longer
        loop.call_soon_threadsafe(set_results)


def with_equal_keys(results: list[dict]) -> list[dict]:
    """The same results with the union of all extra-info keys in each; what a sample lacks is None."""
    keys = dict.fromkeys(key for result in results for key in result["reward_extra_info"])
    empty = dict.fromkeys(keys)
    return [result | {"reward_extra_info": empty | result["reward_extra_info"]} for result in results]


# --------------------------------------------------------------------------------------------------------------------------
# The command line: a file of responses in, the same file with rewards out


@dataclasses.dataclass
class Config:
    """Scores a file of responses (rows of the schema plus `response`) with a reward function."""

    data: Path
    """Parquet or JSONL file to score; its rows have data_source, reward_model, extra_info and response."""
    out: Path
    """Parquet or JSONL file to write: the input's columns plus reward_score, status and reward_extra_info (JSON text)."""
    reward_fn: str | None = None
    """Reward function as FILE:NAME; default: the reward model's score with a discriminative model, without a model the rule."""
    reward_kwargs: str = "{}"
    """JSON object of further keyword arguments for every call, such as '{"penalty": 0.5}'."""
    router_address: tuple[str, ...] = ()
    """Address of a running reward model as host:port; for several models NAME=host:port each, the first being the main one."""
    genrm: str | None = None
    """Start this model (a path) as the reward model for this run, instead of using a running one."""
    genrm_servers: int = 1
    """Servers to start for --genrm."""
    reward_model_task: Literal["generate", "classify"] = "generate"
    """Kind of the reward model: generative (a judge that writes) or discriminative (a model that gives a number)."""
    reward_model_tokenizer: str | None = None
    """Path of the reward model's tokenizer, for functions that take one and for discriminative models."""
    num_workers: int = 2
    """Ray workers, spread over the nodes of the cluster."""
    sync_processes: int = 0
    """Grading processes per worker for a sync function; 0 shares the cluster's cores out over the workers."""
    timeout: float = 600.0
    """Seconds for one call of the function; then its status is "timeout"."""
    max_in_flight: int = 2048
    """Samples in the workers' hands at once."""
    max_concurrency: int | None = None
    """Calls of the function at once in the whole cluster."""
    max_rpm: float | None = None
    """Calls of the function per minute in the whole cluster."""
    max_tpm: float | None = None
    """Judge tokens per minute in the whole cluster, a call being reckoned as --tokens-per-call."""
    tokens_per_call: int = 2000
    """What one call costs in judge tokens, for --max-tpm."""
    http_retries: int = 6
    """How often a call that raised a broken connection, HTTP 429 or 5xx is made again, after 1, 2, 4 ... 10 s."""
    max_response_length: int | None = None
    """Longest response in tokens; given, overlong shaping is on and rows need a column response_length."""
    overlong_buffer: int = 4096
    """Tokens before --max-response-length over which the overlong penalty grows."""
    overlong_factor: float = 1.0
    """The overlong penalty at --max-response-length."""
    max_no_verdict_rate: float = 0.2
    """Stop with an error when more than this share of the samples has no score."""
    resume: bool = False
    """Go on with an interrupted run: what has a score is kept, the rest is scored."""


def read_rows(path: Path) -> list[dict]:
    """The rows of a parquet or JSONL file. Raises ValueError or OSError with one clear line."""
    if path.suffix not in (".parquet", ".jsonl"):
        raise ValueError(f"--data is {path}: the name must end with .parquet or .jsonl")
    if not path.is_file():
        raise ValueError(f"--data is {path}: there is no such file")
    if path.suffix == ".parquet":
        import pyarrow
        import pyarrow.parquet

        try:
            rows = pyarrow.parquet.read_table(path).to_pylist()
        except pyarrow.ArrowInvalid as error:
            raise ValueError(f"{path} cannot be read as parquet: {error}") from None
    else:
        rows = []
        for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1):
            try:
                rows.append(json.loads(line))
            except ValueError as error:
                raise ValueError(f"{path}, line {number}: not a JSON object ({error})") from None
    if not rows:
        raise ValueError(f"{path} has no rows")
    return rows


def check_rows(rows: list[dict], path: Path, needed: list[str]) -> None:
    """Raises ValueError naming the first column that is missing and the row."""
    for number, row in enumerate(rows):
        for column in needed:
            if row.get(column) is None:
                has = ", ".join(row)
                raise ValueError(f"{path}: row {number} has no {column!r} (it has {has}); rows are of the schema plus `response`")
        if not isinstance(row["reward_model"], dict) or "ground_truth" not in row["reward_model"]:
            raise ValueError(f"{path}: row {number} has no reward_model.ground_truth")
        if not isinstance(row["response"], str):
            raise ValueError(f"{path}: row {number} has a response of type {type(row['response']).__name__}, not a string")


def write_rows(rows: list[dict], results: list[dict], data: Path, out: Path) -> None:
    """Writes the input's columns plus the results, to a temporary file that then takes the name `out`."""
    columns = {
        "reward_score": [result["reward_score"] for result in results],
        "status": [result["status"] for result in results],
        "reward_extra_info": [json.dumps(result["reward_extra_info"]) for result in results],
    }
    temporary = out.with_name(out.name + ".tmp")
    if out.suffix == ".jsonl":
        with temporary.open("w", encoding="utf-8") as file:
            for index, row in enumerate(rows):
                added = {name: values[index] for name, values in columns.items()}
                file.write(json.dumps(row | added, default=str) + "\n")
    else:
        import pyarrow
        import pyarrow.parquet

        if data.suffix == ".parquet":
            table = pyarrow.parquet.read_table(data)  # its own types, which rows of Python values have lost
        else:
            names = dict.fromkeys(name for row in rows for name in row)
            table = pyarrow.table({name: [row.get(name) for row in rows] for name in names})
        types = {"reward_score": pyarrow.float64(), "status": pyarrow.string(), "reward_extra_info": pyarrow.string()}
        for name, values in columns.items():
            if name in table.column_names:  # scored before
                table = table.drop_columns(name)
            table = table.append_column(name, pyarrow.array(values, types[name]))
        pyarrow.parquet.write_table(table, temporary)
    temporary.replace(out)


def open_partial(config: Config, rows: list[dict]) -> tuple[Path, dict[int, dict]]:
    """The file that holds results while the run goes on -> (its path, {row: result} of the earlier run with --resume).

    Its first line says what is being scored, so that results of another file or function are not taken for this one's.
    """
    path = config.out.with_name(config.out.name + ".partial.jsonl")
    run = {"data": str(config.data.resolve()), "rows": len(rows), "reward_fn": config.reward_fn, "kwargs": config.reward_kwargs}
    if path.exists() and not config.resume:
        raise ValueError(f"{path} is left from an interrupted run: add --resume to go on with it, or delete it")
    done = {}
    if path.exists():
        header, *lines = path.read_text().splitlines() or [""]
        if header != json.dumps(run):
            raise ValueError(f"{path} belongs to another run ({header:.300}): delete it or use the same arguments")
        for line in lines:
            with contextlib.suppress(ValueError):  # the last line may have been cut off
                row, result = json.loads(line)
                if result["reward_score"] is not None:
                    done[row] = result
    with path.open("w") as file:
        file.writelines(json.dumps(entry) + "\n" for entry in [run, *done.items()])
    return path, done


def summary(results: list[dict], seconds: float, scored_now: int) -> str:
    """What the run prints at its end."""
    extras = [result["reward_extra_info"] for result in results]
    scores = [result["reward_score"] for result in results if result["reward_score"] is not None]
    counts = collections.Counter(result["status"] for result in results)
    lines = [f"scored {scored_now:,} samples in {seconds:.1f} s ({scored_now / max(seconds, 1e-9):,.0f} samples/s)"]
    lines.append("statuses: " + ", ".join(f"{status} {counts[status]:,}" for status in STATUSES))
    lines.append(f"mean reward: {sum(scores) / len(scores):.4f}" if scores else "mean reward: none, no sample has a score")
    accurate = [bool(extra["acc"]) for extra in extras if extra.get("acc") is not None]
    if accurate:
        lines.append(f"accuracy: {sum(accurate) / len(accurate):.4f} of {len(accurate):,}")
    flawed = [extra["flawed_positive"] for extra in extras if extra.get("acc") and extra.get("flawed_positive") is not None]
    if flawed:
        lines.append(f"flawed positives: {sum(flawed) / len(flawed):.4f} of {len(flawed):,} right answers with a verdict")
    judge = collections.Counter(extra["genrm_status"] for extra in extras if extra.get("genrm_status"))
    if judge:
        lines.append("judge: " + ", ".join(f"{status} {count:,}" for status, count in judge.most_common()))
    return "\n".join(lines)


class TooManyFailures(Exception):
    """More samples without a score than --max-no-verdict-rate allows."""


def run(config: Config) -> None:
    """The command line's work. Raises ValueError, OSError, TooManyFailures."""
    rows = read_rows(config.data)
    needed = ["data_source", "reward_model", "response"] + ["response_length"] * (config.max_response_length is not None)
    if config.reward_model_task == "classify" and config.reward_fn is None:
        needed.append("prompt")
    check_rows(rows, config.data, needed)
    if config.out.suffix not in (".parquet", ".jsonl"):
        raise ValueError(f"--out is {config.out}: the name must end with .parquet or .jsonl")
    try:
        reward_kwargs = json.loads(config.reward_kwargs)
    except ValueError as error:
        raise ValueError(f"--reward-kwargs is {config.reward_kwargs!r}: not JSON ({error})") from None
    if not isinstance(reward_kwargs, dict):
        raise ValueError(f"--reward-kwargs is {config.reward_kwargs!r}: it must be a JSON object")
    if config.genrm and config.router_address:
        raise ValueError("--genrm starts a reward model, --router-address names a running one: give one of them")
    addresses = {}
    for number, text in enumerate(config.router_address):
        name, _, address = text.rpartition("=")
        host, _, port = address.rpartition(":")
        if not host or not port.isdigit() or "/" in address:
            raise ValueError(f"--router-address is {text!r}: it must be host:port or NAME=host:port")
        addresses[name or ("default" if number == 0 else f"model{number}")] = address
    overlong = None
    if config.max_response_length is not None:
        overlong = Overlong(config.max_response_length, config.overlong_buffer, config.overlong_factor)
    config.out.parent.mkdir(parents=True, exist_ok=True)

    reward_models = None
    manager = None
    try:
        if config.genrm:
            import genrm_server

            server = genrm_server.Config(
                model=config.genrm, num_servers=config.genrm_servers, port=0, task=config.reward_model_task
            )
            reward_models = genrm_server.RewardModelManager({"genrm": server})
        same = "reward_fn reward_model_task reward_model_tokenizer num_workers sync_processes timeout max_in_flight max_concurrency"
        same += " max_rpm max_tpm tokens_per_call http_retries"
        manager = RewardLoopManager(
            reward_kwargs=reward_kwargs,
            router_addresses=addresses,
            reward_models=reward_models,
            overlong=overlong,
            **{name: getattr(config, name) for name in same.split()},
        )
        path, done = open_partial(config, rows)
        left = [index for index in range(len(rows)) if index not in done]
        if done:
            print(f"resuming: {len(done):,} of {len(rows):,} samples have a score already")
        counts = collections.Counter()
        started = time.monotonic()
        with path.open("a") as partial:

            def on_result(position: int, result: dict) -> None:
                partial.write(json.dumps([left[position], result]) + "\n")
                partial.flush()
                counts[result["status"]] += 1
                failed = counts.total() - counts["ok"]
                # Failures tend to come first (a refused connection is quicker than a critique): wait for a fair share.
                if failed > config.max_no_verdict_rate * max(counts.total(), min(len(left), 1000)):
                    why = result["reward_extra_info"].get("error") or result["reward_extra_info"].get("genrm_status")
                    raise TooManyFailures(
                        f"{failed:,} of the first {counts.total():,} samples have no score ({dict(counts)}; the last: {why}), more "
                        f"than --max-no-verdict-rate {config.max_no_verdict_rate} allows; mend it and go on with --resume"
                    )

            fresh = manager.score_batch([rows[index] for index in left], on_result) if left else []
        done |= dict(zip(left, fresh))
        results = with_equal_keys([done[index] for index in range(len(rows))])
        write_rows(rows, results, config.data, config.out)
        path.unlink()
        print(summary(results, time.monotonic() - started, len(left)))
        print(f"written to {config.out}")
    finally:
        if manager is not None:
            manager.shutdown()
        if reward_models is not None:
            reward_models.shutdown()


def main() -> int:
    """Parses the command line and runs -> exit code: 0, 2 for a wrong argument or file, 1 for a run that had to stop."""
    import tyro

    config = tyro.cli(Config)
    try:
        run(config)
    except (ValueError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    except (TooManyFailures, RuntimeError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print(f"interrupted; go on with --resume (results so far: {config.out}.partial.jsonl)", file=sys.stderr)
        return 130
    return 0


if __name__ == "__main__":
    sys.exit(main())
