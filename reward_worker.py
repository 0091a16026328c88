"""What runs on the workers of the Reward Loop: a worker, its grading processes, and the call of the user's function.

  RewardLoopWorker    a Ray actor. Runs async functions in its event loop, and gives sync ones to grading processes. `collect`
                      has a thread of its own, which also sees who blocks the event loop.
  grading process     a child of the worker that has loaded the function; one sample at a time, killed when overdue.

The processes that a sample of a sync function passes (one of an async function turns round in the worker):

    driver                       worker (Ray actor)                       grading process
    RewardLoopManager -submit->  its queue  -------- pipe: sample ----->  your function
                      <-collect- results gather  <--- pipe: JSON line --

Used by reward_loop.py alone, which deals the samples out. Whatever the function does (raise, hang, return NaN, kill its
process), its sample has a status, and no other sample is touched. The file is sent to the workers by value, and loaded by the
grading processes, which must stay small: its imports are Python's own, the others stand where they are used.
"""

import asyncio
import concurrent.futures
import contextlib
import dataclasses
import functools
import importlib.util
import inspect
import json
import math
import os
import pickle
import resource
import select
import signal
import struct
import sys
import threading
import time
import traceback
from pathlib import Path

HERE = Path(__file__).resolve().parent
RETRIED_HTTP_STATUS = {408, 429, 500, 502, 503, 504}
GATHER_S = 0.01  # a worker gathers results for this long before it hands them over: fewer messages
HEARTBEAT_S = 5.0  # a worker with nothing to say answers `collect` at least this often
SLOW_S = 1.0  # between two looks of a worker at itself: is the event loop late, does a grading process only wait
BLOCKED_S = 5.0  # an event loop that stood still for so long is worth a warning
ISOLATE_AFTER = 2  # a sample that so many hand-overs have lost runs in a grading process, which shows whether it is a killer
START_S = 300.0  # for a worker, and for a grading process, to load the function (a busy node, a heavy import)


@dataclasses.dataclass
class Job:
    """What workers and grading processes need to know; plain values only."""

    function: str | None  # FILE:NAME with the full path; None: the score of the discriminative reward model
    kwargs: dict  # the same for every sample
    tokenizer: str | None  # path, where the function takes it
    is_async: bool
    timeout: float
    sync_processes: int = 1


# ---- Calling the function


def load_function(spec: str | None):
    """The function named by "FILE:NAME"; its file may import others beside it. Raises ValueError with one clear line."""
    if spec is None:
        return score_with_classifier
    file, _, name = spec.rpartition(":")
    path = Path(file)
    sys.path.insert(0, str(path.parent))
    if str(HERE) not in sys.path:  # a file of toy/ imports compute_score.py
        sys.path.append(str(HERE))
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
    function, common = load_function(job.function), dict(job.kwargs)
    if job.tokenizer:
        from transformers import AutoTokenizer

        common["reward_model_tokenizer"] = tokenizer = AutoTokenizer.from_pretrained(job.tokenizer)
        # Transformers 5 returns a dict where 4 returned token ids; functions written for verl expect the ids.
        tokenizer.apply_chat_template = functools.partial(tokenizer.apply_chat_template, return_dict=False)
    if "step" in inspect.signature(function).parameters:
        return functools.partial(function, **common)
    return lambda step=None, **sample: function(**sample, **common)


async def evaluate(function, payload: bytes) -> bytes:
    """Scores one pickled sample by an async function -> JSON of [score or None, extra info, status, retry delay or None].

    Never raises; SystemExit neither, as a function that calls sys.exit() must not end the worker.
    """
    try:
        return outcome(await function(**pickle.loads(payload)))  # made by our own manager: each sample has its own extra_info
    except BaseException as error:
        return failure("error", describe(error), retry_delay(error))


def evaluate_sync(function, payload: bytes, runner: asyncio.Runner) -> bytes:
    """The same by any function, called outside of an event loop: it may have one of its own (asyncio.run)."""
    try:
        value = function(**pickle.loads(payload))
        return outcome(runner.run(asyncio.wait_for(value, None)) if inspect.isawaitable(value) else value)
    except BaseException as error:
        return failure("error", describe(error), retry_delay(error))


def failure(status: str, message: str, retry: float | None = None) -> bytes:
    """A result as `evaluate` writes it, for a sample that has no outcome of its own."""
    return json.dumps([None, {"error": message}, status, retry]).encode()


def outcome(value) -> bytes:
    """What the function returned, as JSON: an object of the user's could break the message that carries others' results, too."""
    extra = dict(value) if isinstance(value, dict) else {"score": value}
    score, status = extra.get("score"), "ok"
    if "score" not in extra:
        status, extra["error"] = "error", f"the function's dict has no 'score', only {sorted(map(str, extra))}"
    elif score is None:
        status = "no_verdict"
    elif not hasattr(type(score), "__float__"):  # float() would take "1"; a string is a mistake, not a score
        status, extra["error"] = "error", f"the score is {score!r:.80}, not a number"
    elif not math.isfinite(score):
        status, extra["error"] = "error", f"the score is {score}"
    score = float(score) if status == "ok" else None
    if "score" in extra:
        extra["score"] = score
    default = lambda x: x.tolist() if hasattr(x, "tolist") else repr(x)  # noqa: E731  (arrays become lists)
    return json.dumps([score, extra, status, None], default=default).encode()


def describe(error: BaseException) -> str:
    """One line: the kind of error, its message, and the last place in the user's code."""
    last = traceback.TracebackException.from_exception(error, limit=-1)  # its text is the message, even where str(error) fails
    place = "".join(f" ({os.path.basename(frame.filename)}:{frame.lineno})" for frame in last.stack)
    return f"{type(error).__name__}: {last}"[:500] + place


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


def bearer() -> dict[str, str]:
    """The header that a judge behind a key asks for; never in a setting, a log or a result."""
    key = os.environ.get("ROUTER_API_KEY", "").strip()  # a secret's file may end with a newline
    return {"Authorization": f"Bearer {key}"} if key else {}


_classify_session = None


async def score_with_classifier(prompt, solution_str, reward_router_address, reward_model_tokenizer, **_) -> float:
    """The score of a discriminative reward model: the logit that vLLM's /classify gives for the whole conversation.

    The text is the chat template of the reward model's own tokenizer, which writes the BOS token itself where the model has
    one; `add_special_tokens: false` keeps the server from adding a second.
    """
    global _classify_session
    import aiohttp

    if _classify_session is None:
        rest = dict(timeout=aiohttp.ClientTimeout(total=None), raise_for_status=True)
        _classify_session = aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0), headers=bearer(), **rest)
    text = reward_model_tokenizer.apply_chat_template([*prompt, {"role": "assistant", "content": solution_str}], tokenize=False)
    body = {"input": text, "add_special_tokens": False, "use_activation": False}
    async with _classify_session.post(f"http://{reward_router_address}/classify", json=body) as response:
        scores = (await response.json())["data"][0]["probs"]
    if len(scores) != 1:
        raise ValueError(f"the discriminative model gives {len(scores)} labels: write a reward function that chooses one")
    return scores[0]


# ---- Grading processes and the worker


def grade() -> None:
    """Main of a grading process, whose stdin and stdout are pipes to the worker.

    In come the job, then samples; out go what is wrong with the job (or null), then results.
    """
    os.closerange(3, 1 + max(map(int, os.listdir("/proc/self/fd"))))  # what Ray and uvloop leave open
    samples, results = os.fdopen(os.dup(0), "rb"), os.fdopen(os.dup(1), "wb")
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)  # what the function reads or prints must not get among them
    os.dup2(2, 1)
    ends_with_us, us = os.pipe()
    if os.fork() == 0:  # when we or the worker end, however it happens, kills this process group: what the function has started
        os.close(us)
        poll = select.poll()
        poll.register(samples, 0)  # reports the end only
        poll.register(ends_with_us, 0)
        poll.poll()
        os.killpg(0, signal.SIGKILL)
    complaint = None
    try:
        function = load_call(Job(**json.loads(samples.readline())))
    except Exception as error:
        complaint = " ".join(str(error).split())
    results.write(json.dumps(complaint).encode() + b"\n")
    results.flush()
    with asyncio.Runner() as runner:
        while header := samples.read(4):
            result = evaluate_sync(function, samples.read(*struct.unpack("<I", header)), runner)
            results.write(result + b"\n")  # JSON: there is no other line end in it
            results.flush()


class RewardLoopWorker:
    """Ray actor (asyncio): scores the samples it is given and hands each result over with the next `collect`.

    Async functions run in its event loop. Others, and samples that are suspected of killing workers, are queued for tasks that
    have a grading process each and restart it when it dies or is overdue. There are `sync_processes` of them, and one more for
    each that has been on one sample for SLOW_S without using its core (up to 4 x): it hangs, or waits for somebody else.
    """

    def __init__(self, job: Job):
        self.job = job
        self.done, self.taken = [], 0  # (ticket, result, seconds); how many the manager had before these
        self.news = threading.Event()
        self.culprit = None, 0.0  # the sample that blocks the event loop, and since when that is known
        self.running = {}  # ticket -> (task, the timer that cuts it off), of an async function
        self.queue = asyncio.Queue()  # of (ticket, payload, processes that died on it), for grading processes
        self.graders, self.allowed = set(), job.sync_processes  # the tasks that have one, and how many there may be
        self.busy = {}  # task -> (pid, since when), while it waits for a result

    async def prepare(self, api_key: str) -> str | None:
        """Loads the function -> one line about what is wrong with it, or None."""
        _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))  # 1,024 connections are few
        if api_key:
            os.environ["ROUTER_API_KEY"] = api_key
        self.loop, self.thread = asyncio.get_running_loop(), threading.get_ident()
        sys.setswitchinterval(0.0005)  # `collect` shall not wait long for its turn
        # So that a few calls of asyncio.to_thread that hang are not the end of it.
        self.loop.set_default_executor(concurrent.futures.ThreadPoolExecutor(256))
        self.tick, self.stood_still = time.monotonic(), 0.0
        self._tick()
        try:
            if self.job.is_async:
                self.function = load_call(self.job)
            else:
                self.graders.add(self.loop.create_task(self._grade(await self._start_process())))
        except Exception as error:
            return " ".join(str(error).split())

    async def submit(self, batch: list[tuple[int, bool, bytes]]) -> None:
        """Takes samples (ticket, isolated, payload); returns at once."""
        for ticket, isolated, payload in batch:
            if self.job.is_async and not isolated:
                timer = self.loop.call_later(self.job.timeout, self._cut_off, ticket, self.stood_still)
                self.running[ticket] = self.loop.create_task(self._run(ticket, payload)), timer
            else:
                self._enqueue(ticket, payload)

    def collect(self, taken: int) -> tuple[list[tuple[int, bytes, float]], str, int | None]:
        """(results from number `taken` on, a complaint or "", None).

        Instead of None, where this worker is of no use any more: how many hand-overs its samples have lost by that.

        Waits for the first result, at most HEARTBEAT_S. Results are kept until the next call says that they have arrived. Ray
        runs this in a thread of its own (a concurrency group), so that a function that blocks the event loop is found out.
        """
        if self.news.wait(HEARTBEAT_S):
            time.sleep(GATHER_S)
        self.news.clear()
        del self.done[: taken - self.taken]
        self.taken = taken
        now = time.monotonic()
        if now - self.tick - SLOW_S < BLOCKED_S:
            self.culprit = None, now
            return self.done.copy(), "", None
        ticket, place = self._who_blocks()
        if ticket != self.culprit[0]:  # one after the other, perhaps
            self.culprit = ticket, now
        complaint = f"an async function blocks the event loop of its worker at {place}, where nothing else is scored meanwhile: "
        complaint += "`await` what waits, or write `def` instead of `async def`"
        if now - self.culprit[1] <= self.job.timeout:
            return self.done.copy(), complaint, None
        if ticket is None:
            return self.done.copy(), complaint, ISOLATE_AFTER
        message = f"no result within {self.job.timeout:g} s, blocked at {place}"
        self._report(ticket, failure("timeout", message), self.culprit[1])
        return self.done.copy(), complaint, 0

    def _who_blocks(self) -> tuple[int | None, str]:
        """The sample that holds the event loop up (None: in a task of its own making), and the place in the function's file."""
        frame, ticket, place = sys._current_frames().get(self.thread), None, ""
        while frame:
            if not place and frame.f_code.co_filename == (self.job.function or "").rpartition(":")[0]:
                place = f"{os.path.basename(frame.f_code.co_filename)}:{frame.f_lineno} ({frame.f_code.co_name})"
            if frame.f_code is RewardLoopWorker._run.__code__:
                ticket = frame.f_locals["ticket"]
            frame = frame.f_back
        return ticket, place or "an unknown place"

    def _tick(self) -> None:
        """Every SLOW_S: how late is the event loop, and how many grading processes only wait?"""
        now = time.monotonic()
        self.stood_still += max(0.0, now - self.tick - SLOW_S)
        self.tick = now
        waiting = sum(now - since > SLOW_S and process_sleeps(pid) for pid, since in self.busy.values())
        self.allowed = min(self.job.sync_processes + waiting, 4 * self.job.sync_processes)
        self._add_graders()
        self.loop.call_later(SLOW_S, self._tick)

    def _report(self, ticket: int, result: bytes, started: float) -> None:
        self.done.append((ticket, result, time.monotonic() - started))
        if not self.news.is_set():  # to set it takes a lock
            self.news.set()

    async def _run(self, ticket: int, payload: bytes) -> None:
        started = time.monotonic()
        result = await evaluate(self.function, payload)
        if entry := self.running.pop(ticket, None):  # else it came too late: the timeout has been reported
            entry[1].cancel()
            self._report(ticket, result, started)

    def _cut_off(self, ticket: int, stood_still: float) -> None:
        task, _ = self.running.pop(ticket)
        if (lost := self.stood_still - stood_still) > 0.1:  # a neighbour blocked the event loop: that time is given back
            timer = self.loop.call_later(lost, self._cut_off, ticket, self.stood_still)
            self.running[ticket] = task, timer
            return
        task.cancel()  # it may refuse: nobody waits for it
        message = f"no result within {self.job.timeout:g} s"
        self._report(ticket, failure("timeout", message), time.monotonic() - self.job.timeout)

    def _enqueue(self, ticket: int, payload: bytes, deaths: int = 0) -> None:
        self.queue.put_nowait((ticket, payload, deaths))
        self._add_graders()

    def _add_graders(self) -> None:
        while len(self.graders) < self.allowed and len(self.graders) - len(self.busy) < self.queue.qsize():
            self.graders.add(self.loop.create_task(self._grade()))

    async def _grade(self, process=None) -> None:
        """Has samples graded by one grading process and its successors."""
        task = asyncio.current_task()
        while len(self.graders) <= self.allowed:
            ticket, payload, deaths = await self.queue.get()
            started = time.monotonic()
            try:
                self.busy[task] = 0, started
                process = process or await self._start_process()
                started = time.monotonic()
                self.busy[task] = process.pid, started
                process.stdin.write(struct.pack("<I", len(payload)) + payload)
                async with asyncio.timeout(self.job.timeout):
                    result = await process.stdout.readuntil(b"\n")
                self._report(ticket, result, started)
                continue
            except TimeoutError:
                self._report(ticket, failure("timeout", f"no result within {self.job.timeout:g} s: process killed"), started)
            except (OSError, EOFError, RuntimeError) as error:  # the last is uvloop's, for a pipe that is closed
                if deaths == 0:  # once may have been the system (out of memory, somebody's kill)
                    self._enqueue(ticket, payload, 1)
                else:
                    message = f"the grading process died on this sample, twice ({describe(error)})"
                    self._report(ticket, failure("error", message), started)
            except Exception as error:
                self._report(ticket, failure("error", describe(error)), started)
            finally:
                del self.busy[task]
            if process:
                kill_group(process)
            process = None
        self.graders.discard(task)
        if process:
            kill_group(process)

    async def _start_process(self) -> asyncio.subprocess.Process:
        """A grading process that has loaded the function. OSError if it does not get that far, ValueError if that fails."""
        code = f"import sys; sys.path.insert(0, {str(HERE)!r}); import reward_worker; reward_worker.grade()"
        pipes = dict(stdin=asyncio.subprocess.PIPE, stdout=asyncio.subprocess.PIPE, limit=2**30)
        process = await asyncio.create_subprocess_exec(sys.executable, "-c", code, start_new_session=True, **pipes)
        try:
            process.stdin.write(json.dumps(dataclasses.asdict(self.job)).encode() + b"\n")
            async with asyncio.timeout(START_S):
                complaint = json.loads(await process.stdout.readuntil(b"\n"))
        except (TimeoutError, EOFError) as error:
            kill_group(process)
            why = f"was not ready within {START_S:g} s" if isinstance(error, TimeoutError) else "died"
            raise OSError(f"the grading process {why} while it loaded the function (see the worker's log)") from None
        if complaint:
            kill_group(process)
            raise ValueError(complaint)
        return process


def kill_group(process: asyncio.subprocess.Process) -> None:
    """Ends a grading process and whatever the function has started in it."""
    process.stdin.close()
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)


def process_sleeps(pid: int) -> bool:
    """Whether a process waits for something and so leaves its core to others."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "S"
    except OSError:
        return False
