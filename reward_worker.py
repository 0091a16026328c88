"""What runs on the workers of the Reward Loop: the user's function, in an event loop or in grading processes.

An async function runs in the event loop of its worker. A sync one runs in grading processes: children that
have loaded it, with one sample at a time, killed when overdue. Its samples pass three processes:

    driver                       worker (Ray actor)                    grading process
    RewardLoopManager -submit->  its queue         --- pipe: sample -->  your function
                      <-collect- results gather    <-- pipe: JSON -----

Needs none of our other files. It is sent to workers by value: its imports are Python's own.
"""

import asyncio
import concurrent.futures
import contextlib
import dataclasses
import importlib.util
import inspect
import json
import math
import os
import pickle
import queue
import resource
import select
import signal
import subprocess
import sys
import threading
import time
import traceback
from functools import partial
from multiprocessing.connection import Connection, Pipe
from pathlib import Path

HERE = Path(__file__).resolve().parent
GATHER_S = 0.01  # a worker gathers results for this long before it hands them over: fewer messages
HEARTBEAT_S = 1.0  # a worker with nothing to say answers `collect` this often
SLOW_S = 1.0  # between two looks at the event loop, and at grading processes that may only be waiting
BLOCKED_S = 5.0  # an event loop that stood still for so long is worth a warning
START_S = 300.0  # for a worker or a grading process to load the function (a busy node, a heavy import)
ALONE_AFTER = 2  # a sample that was lost so often in company is tried alone: in a grading process


@dataclasses.dataclass
class Job:
    """What workers and grading processes need to know; plain values only."""
    function: str  # FILE:NAME with the full path
    kwargs: dict  # the same for every sample
    columns: dict[str, bool]  # further columns of a row that the function names: whether it needs them
    tokenizer: str | None  # path, where the function takes it
    is_async: bool
    sees_group: bool  # it takes solution_strs: a call has all responses to a prompt
    timeout: float
    sync_processes: int = 1


def load_function(spec: str):
    """The function named by "FILE:NAME", whose file may import others beside it. ValueError in one line."""
    file, _, name = spec.rpartition(":")
    path, wrong = Path(file), f"reward function {spec!r}: "
    sys.path[:] = [str(path.parent), *sys.path, str(HERE)]  # a file of toy/ imports compute_score.py
    module_name = f"{path.stem}_of_user" if path.stem in sys.modules else path.stem  # hides no module
    try:
        module_spec = importlib.util.spec_from_file_location(module_name, path)
        sys.modules[module_name] = module = importlib.util.module_from_spec(module_spec)  # for dataclasses
        module_spec.loader.exec_module(module)
    except (Exception, SystemExit) as error:
        raise ValueError(f"{wrong}loading the file failed: {describe(error, file)}") from error
    function = getattr(module, name, None)
    if not callable(function):
        raise ValueError(f"{wrong}{path.name} has no function {name!r}")
    return function


class Scorer:
    """The function of a run, with all that is the same for every sample. ValueError if it cannot be loaded.

    In come pickled arguments, out go results: JSON of [[[score or None, extra info, status], one for each
    response], retry delay or None]; an object of the user's could break the message with others' results."""

    def __init__(self, job: Job):
        function, common = load_function(job.function), dict(job.kwargs)
        self.file = job.function.rpartition(":")[0]
        if job.tokenizer:
            from transformers import AutoTokenizer
            common["reward_model_tokenizer"] = tokenizer = AutoTokenizer.from_pretrained(job.tokenizer)
            # Transformers 5 returns a dict where 4 returned token ids, as functions written for verl expect.
            tokenizer.apply_chat_template = partial(tokenizer.apply_chat_template, return_dict=False)
        self.function = partial(function, **common)

    async def score(self, payload: bytes) -> bytes:
        """One call of an async function. Never raises; SystemExit neither: it must not end the worker."""
        try:
            arguments = pickle.loads(payload)  # pickled by our own manager
            return as_result(await self.function(**arguments), arguments.get("solution_strs"))
        except BaseException as error:
            return failure("error", describe(error, self.file), retry_delay(error))

    def score_sync(self, payload: bytes, runner: asyncio.Runner) -> bytes:
        """The same by any function, outside of an event loop: it may have one of its own (asyncio.run)."""
        pid = os.getpid()
        try:
            value = self.function(**(arguments := pickle.loads(payload)))
            value = runner.run(asyncio.wait_for(value, None)) if inspect.isawaitable(value) else value
            return as_result(value, arguments.get("solution_strs"))
        except BaseException as error:
            return failure("error", describe(error, self.file), retry_delay(error))
        finally:
            if os.getpid() != pid:  # a child of the function's came back, too: it would answer for us
                os._exit(0)
            signal.setitimer(signal.ITIMER_REAL, 0)  # an alarm that it left would end the next sample


def failure(status: str, message: str, retry: float | None = None) -> bytes:
    """The result of a call that has no outcome; of a group's it is everyone's."""
    return json.dumps([[[None, {"error": message}, status]], retry]).encode()


def as_result(value, group: list[str] | None) -> bytes:
    """What the function returned, as a result; group: the responses, where it got all of a prompt."""
    scores = value if hasattr(value, "__getitem__") and not isinstance(value, dict) else []
    values = [value] if group is None else list(scores)
    if group is not None and len(values) != len(group):
        return failure("error", f"returned {value!r:.80}: {len(values)} scores for {len(group)} responses")
    default = lambda x: x.tolist() if hasattr(x, "tolist") else repr(x)  # noqa: E731  (arrays become lists)
    return json.dumps([list(map(outcome, values)), None], default=default).encode()


def outcome(value) -> tuple[float | None, dict, str]:
    """Score, extra info and status of one response."""
    extra = dict(value) if isinstance(value, dict) else {"score": value}
    score, wrong = extra.get("score"), None
    if "score" not in extra:
        wrong = f"the function's dict has no 'score', only {sorted(map(str, extra))}"
    elif score is not None and not (hasattr(type(score), "__float__") and math.isfinite(score)):
        wrong = f"the score is {score!r:.80}, not a finite number"  # float() would take "1"
    status = "error" if wrong else "no_verdict" if score is None else "ok"
    score = float(score) if status == "ok" else None
    return score, extra | {"score": score} | ({"error": wrong} if wrong else {}), status


def describe(error: BaseException, file: str = "") -> str:
    """One line: the kind of error, its message, and its place: the last one in `file`, or else of all."""
    told = traceback.TracebackException.from_exception(error, lookup_lines=False)  # knows a message even
    frames = [frame for frame in told.stack if frame.filename == file] or told.stack  # where str(error) fails
    place = "".join(f" ({os.path.basename(frame.filename)}:{frame.lineno})" for frame in frames[-1:])
    return f"{type(error).__name__}: {told}"[:500] + place


def retry_delay(error: BaseException) -> float | None:
    """Seconds to wait after a lost connection, HTTP 429, 5xx (aiohttp, openai, requests, httpx), or None."""
    answer = response if (response := getattr(error, "response", None)) is not None else error
    status = getattr(error, "status", None) or getattr(answer, "status_code", None)
    if not isinstance(status, int):
        broken = {"ClientConnectionError", "APIConnectionError", "TransportError", "ConnectionError"}
        return 0.0 if any(kind.__name__ in broken for kind in type(error).__mro__) else None
    if status not in (408, 429) and not 500 <= status < 600:
        return None
    with contextlib.suppress(AttributeError, LookupError, TypeError, ValueError):  # none, or one with a date
        return min(float(answer.headers["Retry-After"]), 60.0)
    return 0.0


def bearer() -> dict[str, str]:
    """The header that a judge behind a key asks for; never in a setting, a log or a result."""
    key = os.environ.get("ROUTER_API_KEY", "").strip()  # a secret's file may end with a newline
    return {"Authorization": f"Bearer {key}"} if key else {}


def grade(fd: int) -> None:
    """Main of a grading process. Pipe `fd` brings a job, then samples; back go its error or null, results."""
    watched = [os.pidfd_open(pid) for pid in (os.getppid(), os.getpid())]
    if os.fork() == 0:  # with the worker or us, however we end, ends all that the function has started
        os.close(fd)
        select.select(watched, [], [])
        os.killpg(0, signal.SIGKILL)
    os.set_inheritable(fd, False)
    pipe, complaint = Connection(fd), None
    try:
        scorer = Scorer(Job(**json.loads(pipe.recv_bytes()[1:])))
    except Exception as error:
        complaint = " ".join(str(error).split())
    pipe.send_bytes(b":" + json.dumps(complaint).encode())
    with asyncio.Runner() as runner, contextlib.suppress(EOFError):
        while True:
            ticket, _, payload = pipe.recv_bytes().partition(b":")
            pipe.send_bytes(ticket + b":" + scorer.score_sync(payload, runner))


class Grader(threading.Thread):
    """A thread of the worker that has samples graded by a process, replaced when it dies or is overdue."""

    def __init__(self, worker):
        super().__init__(daemon=True)
        self.worker, self.process, self.since = worker, None, math.inf  # when it got its sample
        worker.graders.add(self)

    def run(self) -> None:
        worker, timeout = self.worker, self.worker.job.timeout
        while len(worker.graders) <= worker.allowed:
            number, payload = worker.samples.get()
            self.since, result = time.monotonic(), None
            try:
                if not self.process:
                    self.open()
                    self.since = time.monotonic()
                result = self.ask(b"%d:" % number, payload, timeout)
            except TimeoutError:
                complaint = failure("timeout", f"no result within {timeout:g} s: process killed")
            except (OSError, EOFError) as error:
                complaint = failure("lost", f"grading process died on this sample ({str(error) or 'killed'})")
            except Exception as error:  # such as a function that does not load any more
                complaint = failure("error", " ".join(str(error).split()))
            started, self.since = self.since, math.inf
            worker.report(number, result or complaint, started)
            if not result:
                self.close()
        worker.graders.discard(self)
        self.close()

    def open(self) -> None:
        """Starts the process, which has loaded the function then. ValueError, EOFError if it gets nowhere."""
        self.pipe, its = Pipe()
        code = f"import sys; sys.path.insert(0, {str(HERE)!r}); "
        code += f"import reward_worker; reward_worker.grade({its.fileno()})"
        rest = dict(stdin=subprocess.DEVNULL, stdout=2, start_new_session=True)  # prints: to our log
        self.process = subprocess.Popen([sys.executable, "-c", code], pass_fds=[its.fileno()], **rest)
        its.close()
        self.answer = select.poll()
        self.answer.register(self.pipe, select.POLLIN)
        try:
            complaint = json.loads(self.ask(b":", json.dumps(vars(self.worker.job)).encode(), START_S))
        except (OSError, EOFError) as error:
            why = f"was not ready within {START_S:g} s" if isinstance(error, TimeoutError) else "died"
            raise EOFError(f"it {why} while it loaded the function; see the worker's log") from None
        if complaint:
            raise ValueError(complaint)

    def ask(self, ticket: bytes, message: bytes, timeout: float) -> bytes:
        """The answer to a message. OSError or EOFError when the process dies, TimeoutError when overdue."""
        self.pipe.send_bytes(ticket + message)
        if not self.answer.poll(min(timeout * 1000, 2**31 - 1)):  # the most that poll takes: 24 days
            raise TimeoutError
        answer = self.pipe.recv_bytes()
        if not answer.startswith(ticket):
            raise EOFError("it answered something else")
        return answer.removeprefix(ticket)

    def close(self) -> None:
        """Ends the process and whatever the function has started in it."""
        if self.process:
            self.pipe.close()
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self.process.pid, signal.SIGKILL)
            self.process.wait()
            self.process = None

    def only_waits(self) -> bool:
        """Whether the process has been on a sample for SLOW_S without using its core: it hangs, or waits."""
        with contextlib.suppress(OSError, AttributeError):  # it has just ended
            stat = Path(f"/proc/{self.process.pid}/stat").read_text()
            return stat.rpartition(")")[2].split()[0] == "S" and time.monotonic() - self.since > SLOW_S
        return False


def contained_task(loop, coroutine, **options) -> asyncio.Task:
    """Task factory: sys.exit() in a task of the function's own fails that task, not the event loop."""
    async def contained():
        try:
            return await coroutine
        except SystemExit as error:
            raise RuntimeError(describe(error)) from error

    return asyncio.Task(contained(), loop=loop, **options)


class RewardLoopWorker:
    """Ray actor: scores the samples it is given and hands each result over with the next `collect`.

    It has `sync_processes` grading processes, plus one for each that waits (up to 4 x)."""

    def __init__(self, job: Job, api_key: str):
        _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))  # 1,024 connections are few
        os.environ |= {"ROUTER_API_KEY": api_key} if api_key else {}
        sys.setswitchinterval(0.0005)  # `collect` shall not wait long for its turn
        self.job, self.life = job, os.urandom(8).hex()
        self.done, self.news = {}, threading.Event()  # number -> (result, seconds) till the manager has them
        self.running = {}  # number -> (task, the timer that cuts it off), of an async function
        self.loop, self.tick = None, math.inf  # when the event loop was last seen moving
        self.samples = queue.SimpleQueue()  # (number, payload) for grading processes
        self.graders, self.allowed = set(), job.sync_processes
        if job.is_async:
            self.scorer = Scorer(job)
        else:
            first = Grader(self)
            first.open()  # shows whether the function can be loaded here
            first.start()

    async def begin(self) -> str:
        """The life of this worker, which has loaded the function: another one after each restart by Ray."""
        return self.life

    async def submit(self, batch: list[tuple[int, bool, bytes]]) -> None:
        """Takes samples (number, alone, payload); returns at once."""
        if self.job.is_async and not self.loop:
            self.loop, self.thread = asyncio.get_running_loop(), threading.get_ident()
            self.loop.set_default_executor(concurrent.futures.ThreadPoolExecutor(256))  # some may hang
            self.loop.set_task_factory(contained_task)
            self._tick()
        for number, alone, payload in batch:
            if alone or not self.job.is_async:
                self.samples.put((number, payload))
            else:
                due = self.loop.time() + self.job.timeout
                timer = self.loop.call_at(due, self._cut_off, number, due)
                self.running[number] = self.loop.create_task(self._run(number, payload)), timer
        self._add_graders()

    def collect(self, arrived: list[int]) -> tuple[str, dict[int, tuple[bytes, float]], str, bool]:
        """(life, {number: (result, seconds)}, where the event loop is blocked or "", whether too long).

        Waits for the first result, at most HEARTBEAT_S; keeps each until a later call says that it `arrived`.
        Runs in a thread of its own (a concurrency group), and so sees what blocks the loop."""
        for number in arrived:
            self.done.pop(number, None)
        if self.done or self.news.wait(HEARTBEAT_S):
            time.sleep(GATHER_S)
        self.news.clear()
        self._add_graders()
        stood_still = time.monotonic() - self.tick - SLOW_S
        place = self._where() if stood_still > BLOCKED_S else ""
        return self.life, self.done.copy(), place, stood_still > self.job.timeout

    def _add_graders(self) -> None:
        graders, cores = self.graders.copy(), self.job.sync_processes
        self.allowed = cores + min(sum(grader.only_waits() for grader in graders), 3 * cores)
        idle = sum(grader.since == math.inf for grader in graders)
        for _ in range(min(self.samples.qsize() - idle, self.allowed - len(graders))):
            Grader(self).start()

    def _where(self) -> str:
        """The place in the function's file where the event loop is."""
        stack = traceback.extract_stack(sys._current_frames()[self.thread])
        *_, frame = [frame for frame in stack if frame.filename == self.scorer.file] or stack
        return f"{os.path.basename(frame.filename)}:{frame.lineno} ({frame.name})"

    def _tick(self) -> None:
        self.tick = time.monotonic()
        self.loop.call_later(SLOW_S, self._tick)

    def report(self, number: int, result: bytes, started: float) -> None:
        self.done[number] = result, time.monotonic() - started
        if not self.news.is_set():  # to set it takes a lock
            self.news.set()

    async def _run(self, number: int, payload: bytes) -> None:
        started = time.monotonic()
        result = await self.scorer.score(payload)
        if entry := self.running.pop(number, None):  # else it came too late: the timeout has been reported
            entry[1].cancel()
            self.report(number, result, started)

    def _cut_off(self, number: int, due: float) -> None:
        task, _ = self.running.pop(number)
        task.cancel()  # it may refuse: nobody waits for it
        # Where a neighbour has blocked the event loop, the time was not its own: it is tried again.
        status, timeout = "lost" if self.loop.time() - due > 0.1 else "timeout", self.job.timeout
        self.report(number, failure(status, f"no result within {timeout:g} s"), time.monotonic() - timeout)
