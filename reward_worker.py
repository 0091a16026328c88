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
    path = Path(file)
    sys.path[:] = [str(path.parent), *sys.path, str(HERE)]  # a file of toy/ imports compute_score.py
    module_name = path.stem
    if module_name in sys.modules:  # hides no module
        module_name += "_of_user"
    try:
        module_spec = importlib.util.spec_from_file_location(module_name, path)
        module = importlib.util.module_from_spec(module_spec)
        sys.modules[module_name] = module  # dataclasses look there
        module_spec.loader.exec_module(module)
    except (Exception, SystemExit) as error:
        reason = f"loading the file failed: {describe(error, file)}"
        if "relative import" in reason:  # it is a part of a package
            reason += "; import it in a file of yours"
        raise ValueError(f"reward function {spec!r}: {reason}") from error
    function = getattr(module, name, None)
    if not callable(function):
        raise ValueError(f"reward function {spec!r}: {path.name} has no function {name!r}")
    return function


class Scorer:
    """The function of a run, with all that is the same for every sample. ValueError if it cannot be loaded.

    In come pickled arguments, out go results: JSON of [[[score or None, extra info, status], one for each
    response], retry delay or None]; an object of the user's could break the message with others' results."""

    def __init__(self, job: Job):
        self.file = job.function.rpartition(":")[0]
        self.function = partial(load_function(job.function), **job.kwargs)
        if job.tokenizer:
            from transformers import AutoTokenizer
            tokenizer = AutoTokenizer.from_pretrained(job.tokenizer)
            # Transformers 5 returns a dict where 4 returned token ids, as functions written for verl expect.
            tokenizer.apply_chat_template = partial(tokenizer.apply_chat_template, return_dict=False)
            self.function = partial(self.function, reward_model_tokenizer=tokenizer)

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
            arguments = pickle.loads(payload)
            value = self.function(**arguments)
            if inspect.isawaitable(value):
                value = runner.run(asyncio.wait_for(value, None))
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
    values = [value]
    if group is not None:
        values = []
        if hasattr(value, "__getitem__") and not isinstance(value, dict):  # it has an order
            values = list(value)
        if len(values) != len(group):
            complaint = f"returned {value!r:.80}: {len(values)} scores for {len(group)} responses"
            return failure("error", complaint)
    return json.dumps([list(map(outcome, values)), None], default=as_json).encode()


def as_json(value):
    """What JSON does not know: arrays become lists, all else its text."""
    return value.tolist() if hasattr(value, "tolist") else repr(value)


def outcome(value) -> tuple[float | None, dict, str]:
    """Score, extra info and status of one response."""
    extra = dict(value) if isinstance(value, dict) else {"score": value}
    score = extra.get("score")
    if "score" not in extra:
        complaint = f"the function's dict has no 'score', only {sorted(map(str, extra))}"
    elif score is None:
        return None, extra, "no_verdict"
    elif hasattr(type(score), "__float__") and math.isfinite(score):  # float() would take "1"
        extra["score"] = float(score)
        return extra["score"], extra, "ok"
    else:
        complaint = f"the score is {score!r:.80}, not a finite number"
    return None, extra | {"score": None, "error": complaint}, "error"


def describe(error: BaseException, file: str = "") -> str:
    """One line: the kind of error, its message, and its place: the last one in `file`, or else of all."""
    # It knows a message even where str(error) fails.
    told = traceback.TracebackException.from_exception(error, lookup_lines=False)
    line = f"{type(error).__name__}: {told}"[:500]
    frames = [frame for frame in told.stack if frame.filename == file] or told.stack
    if frames:
        line += f" ({os.path.basename(frames[-1].filename)}:{frames[-1].lineno})"
    return line


def retry_delay(error: BaseException) -> float | None:
    """Seconds to wait after a lost connection, HTTP 429, 5xx (aiohttp, openai, requests, httpx), or None."""
    answer = getattr(error, "response", None)
    if answer is None:  # a response with an error counts as False
        answer = error
    status = getattr(error, "status", None) or getattr(answer, "status_code", None)
    if not isinstance(status, int):
        broken = {"ClientConnectionError", "APIConnectionError", "TransportError", "ConnectionError"}
        kinds = {kind.__name__ for kind in type(error).__mro__}
        return 0.0 if broken & kinds else None
    if status not in (408, 429) and not 500 <= status < 600:
        return None
    with contextlib.suppress(AttributeError, LookupError, TypeError, ValueError):  # none, or one with a date
        return min(float(answer.headers["Retry-After"]), 60.0)
    return 0.0


def grade(fd: int):
    """Main of a grading process. Pipe `fd` brings a job, then samples; back go its error or null, results."""
    watched = [os.pidfd_open(pid) for pid in (os.getppid(), os.getpid())]
    if os.fork() == 0:  # with the worker or us, however we end, ends all that the function has started
        os.close(fd)
        select.select(watched, [], [])
        os.killpg(0, signal.SIGKILL)
    os.set_inheritable(fd, False)
    pipe = Connection(fd)
    complaint = None
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
        self.worker = worker
        self.process = None
        self.since = math.inf  # when it got its sample
        worker.graders.add(self)

    def run(self):
        worker = self.worker
        while len(worker.graders) <= worker.allowed:
            number, payload = worker.samples.get()
            self.since = time.monotonic()
            result = self.score(number, payload)
            started = self.since
            self.since = math.inf
            worker.report(number, result, started)
        worker.graders.discard(self)
        self.close()

    def score(self, number, payload) -> bytes:
        """The result of a sample. The process is closed where it gave none."""
        timeout = self.worker.job.timeout
        try:
            if not self.process:
                self.open()
                self.since = time.monotonic()
            return self.ask(b"%d:" % number, payload, timeout)
        except TimeoutError:
            complaint = failure("timeout", f"no result within {timeout:g} s: process killed")
        except (OSError, EOFError) as error:
            complaint = failure("lost", f"grading process died on this sample ({str(error) or 'killed'})")
        except Exception as error:  # such as a function that does not load any more
            complaint = failure("error", " ".join(str(error).split()))
        self.close()
        return complaint

    def open(self):
        """Starts the process, which has loaded the function then. ValueError, EOFError if it gets nowhere."""
        self.pipe, its = Pipe()
        code = f"import sys; sys.path.insert(0, {str(HERE)!r}); "
        code += f"import reward_worker; reward_worker.grade({its.fileno()})"
        self.process = subprocess.Popen(
            [sys.executable, "-c", code],
            pass_fds=[its.fileno()],
            stdin=subprocess.DEVNULL,
            stdout=2,  # prints: to our log
            start_new_session=True,
        )
        its.close()
        self.answer = select.poll()
        self.answer.register(self.pipe, select.POLLIN)
        try:
            job = json.dumps(vars(self.worker.job)).encode()
            complaint = json.loads(self.ask(b":", job, START_S))
        except (OSError, EOFError) as error:
            fate = f"was not ready within {START_S:g} s" if isinstance(error, TimeoutError) else "died"
            raise EOFError(f"it {fate} while it loaded the function; see the worker's log") from None
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

    def close(self):
        """Ends the process and whatever the function has started in it."""
        if self.process:
            self.pipe.close()
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self.process.pid, signal.SIGKILL)
            self.process.wait()
            self.process = None

    def only_waits(self) -> bool:
        """Whether the process has been on a sample for SLOW_S without using its core: it hangs, or waits."""
        if time.monotonic() - self.since <= SLOW_S:
            return False
        with contextlib.suppress(OSError, AttributeError):  # it has just ended
            stat = Path(f"/proc/{self.process.pid}/stat").read_text()
            return stat.rpartition(")")[2].split()[0] == "S"
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
        if api_key:
            os.environ["ROUTER_API_KEY"] = api_key
        sys.setswitchinterval(0.0005)  # `collect` shall not wait long for its turn
        self.job = job
        self.life = os.urandom(8).hex()
        self.done = {}  # number -> (result, seconds) till the manager has them
        self.news = threading.Event()
        self.running = {}  # number -> (task, the timer that cuts it off), of an async function
        self.loop = None
        self.tick = math.inf  # when the event loop was last seen moving
        self.samples = queue.SimpleQueue()  # (number, payload) for grading processes
        self.graders = set()
        self.allowed = job.sync_processes  # so many of them
        if job.is_async:
            self.scorer = Scorer(job)
        else:
            first = Grader(self)
            first.open()  # shows whether the function can be loaded here
            first.start()

    async def begin(self) -> str:
        """The life of this worker, which has loaded the function: another one after each restart by Ray."""
        return self.life

    async def submit(self, batch: dict[int, tuple[bool, bytes]]):
        """Takes samples, {number: (alone, payload)}; returns at once."""
        if self.job.is_async and not self.loop:
            self.loop = asyncio.get_running_loop()
            self.thread = threading.get_ident()
            self.loop.set_default_executor(concurrent.futures.ThreadPoolExecutor(256))  # some may hang
            self.loop.set_task_factory(contained_task)
            self._tick()
        for number, (alone, payload) in batch.items():
            if alone or not self.job.is_async:
                self.samples.put((number, payload))
            else:
                due = self.loop.time() + self.job.timeout
                timer = self.loop.call_at(due, self._cut_off, number, due)
                task = self.loop.create_task(self._run(number, payload))
                self.running[number] = task, timer
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

    def _add_graders(self):
        """Starts what is missing: one for each sample, up to one a core and one for each that only waits."""
        graders = self.graders.copy()
        cores = self.job.sync_processes
        waiting = sum(grader.only_waits() for grader in graders)
        idle = sum(grader.since == math.inf for grader in graders)
        self.allowed = cores + min(waiting, 3 * cores)
        for _ in range(min(self.samples.qsize() - idle, self.allowed - len(graders))):
            Grader(self).start()

    def _where(self):
        """The place in the function's file where the event loop is."""
        stack = traceback.extract_stack(sys._current_frames()[self.thread])
        *_, frame = [frame for frame in stack if frame.filename == self.scorer.file] or stack
        return f"{os.path.basename(frame.filename)}:{frame.lineno} ({frame.name})"

    def _tick(self):
        self.tick = time.monotonic()
        self.loop.call_later(SLOW_S, self._tick)

    def report(self, number, result, started):
        self.done[number] = result, time.monotonic() - started
        if not self.news.is_set():  # to set it takes a lock
            self.news.set()

    async def _run(self, number, payload):
        started = time.monotonic()
        result = await self.scorer.score(payload)
        if number in self.running:  # else it came too late: the timeout has been reported
            _, timer = self.running.pop(number)
            timer.cancel()
            self.report(number, result, started)

    def _cut_off(self, number, due):
        task, _ = self.running.pop(number)
        task.cancel()  # it may refuse: nobody waits for it
        timeout = self.job.timeout
        # Where a neighbour has blocked the event loop, the time was not its own: it is tried again.
        status = "lost" if self.loop.time() - due > 0.1 else "timeout"
        self.report(number, failure(status, f"no result within {timeout:g} s"), time.monotonic() - timeout)
