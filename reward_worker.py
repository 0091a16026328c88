"""What runs on the workers of the Reward Loop: the user's function, in an event loop or in grading processes.

An async function runs in the event loop of its worker. A sync one runs in grading processes: children that
have loaded it, with one sample at a time, killed when overdue. Its samples pass three processes:

    driver                       worker (Ray actor)                    grading process
    RewardLoopManager -submit->  its queue         --- pipe: sample -->  your function
                      <-collect- results gather    <-- pipe: JSON -----

Needs none of our other files. It is sent to workers by value: its imports are Python's own.
"""

import ast
import asyncio
import contextlib
import dataclasses
import hashlib
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
HEARTBEAT = 100  # after so many of these times a worker answers `collect` although it has none
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
    files: dict[str, str] = dataclasses.field(default_factory=dict)  # {path: SHA-256}, from `fingerprints`
    sync_processes: int = 1


class FileChanged(ValueError):
    """A file of the reward function is no longer what it was when the run began."""


def fingerprints(function_file: str) -> dict[str, str]:
    """{path: SHA-256} of the function's file and of every local file that it imports, directly or not.

    Local files are those in its folder and those of this repository. Imports inside functions count as well.
    """
    folders = [Path(function_file).parent, HERE]
    found = {}
    waiting = [Path(function_file)]
    while waiting:
        path = waiting.pop()
        if str(path) in found or not path.is_file():
            continue
        text = path.read_bytes()
        found[str(path)] = hashlib.sha256(text).hexdigest()
        try:
            nodes = list(ast.walk(ast.parse(text)))
        except (SyntaxError, ValueError):
            continue  # loading the file says what is wrong with it
        for node in nodes:
            names, places = [], folders
            if isinstance(node, ast.Import):
                names = [alias.name for alias in node.names]
            elif isinstance(node, ast.ImportFrom):
                module = node.module or ""
                names = [f"{module}.{alias.name}".strip(".") for alias in node.names]
                if node.level:
                    places = [path.parents[node.level - 1]]
            for name in names:
                waiting += module_files(name.split("."), places)
    return found


def module_files(parts: list[str], folders: list[Path]) -> list[Path]:
    """The files that `import a.b.c` may execute, from the first of the folders that has `a`."""
    for folder in folders:
        if folder.joinpath(parts[0]).is_dir() or folder.joinpath(parts[0] + ".py").is_file():
            files = []
            for count in range(1, len(parts) + 1):
                path = folder.joinpath(*parts[:count])
                files += [path / "__init__.py", path.with_name(path.name + ".py")]
            return files
    return []


def check_files(job: Job):
    """FileChanged if a file of the function differs from what the run began with."""
    for file, digest in job.files.items():
        path = Path(file)
        if not path.is_file() or hashlib.sha256(path.read_bytes()).hexdigest() != digest:
            raise FileChanged(f"{file} has changed since the run began, which scores with one version of its "
                              "reward function only: restore the file, or start the run again")  # fmt: skip


def load_function(spec: str, kind: str = "reward function"):
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
        raise ValueError(f"{kind} {spec!r}: {reason}") from error
    function = getattr(module, name, None)
    if not callable(function):
        raise ValueError(f"{kind} {spec!r}: {path.name} has no function {name!r}")
    return function


class Scorer:
    """The function of a run, with all that is the same for every sample. ValueError if it cannot be loaded.

    In come pickled arguments, out go results: JSON of [[[score or None, extra info, status], one for each
    response], whether to try again]; an object of the user's could break the message with others' results."""

    def __init__(self, job: Job):
        self.file = job.function.rpartition(":")[0]
        self.is_spent = False  # a SystemExit has left the event loop unusable
        check_files(job)
        self.function = partial(load_function(job.function), **job.kwargs)
        check_files(job)  # loading may have taken long
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
            return failure("error", describe(error, self.file), may_pass(error))

    def score_sync(self, payload: bytes, runner: asyncio.Runner) -> bytes:
        """The same by any function, outside of an event loop: it may have one of its own (asyncio.run)."""
        try:
            arguments = pickle.loads(payload)
            value = self.function(**arguments)
            if inspect.isawaitable(value):
                try:
                    value = runner.run(asyncio.wait_for(value, None))
                except (SystemExit, KeyboardInterrupt):
                    self.is_spent = True  # the loop would raise the error again for the next sample
                    raise
            return as_result(value, arguments.get("solution_strs"))
        except BaseException as error:
            return failure("error", describe(error, self.file), may_pass(error))


def failure(status: str, message: str, try_again: bool = False) -> bytes:
    """The result of a call that has no outcome; of a group's it is everyone's."""
    return json.dumps([[[None, {"error": message}, status]], try_again]).encode()


def as_result(value, group: list[str] | None) -> bytes:
    """What the function returned, as a result; group: the responses, where it got all of a prompt."""
    values = [value]
    if group is not None:
        values = value
        if hasattr(value, "tolist"):
            values = value.tolist()  # an array
        if not isinstance(values, (list, tuple)):  # anything else has no order
            raise ValueError(f"{value!r:.80} is no list of scores")
        if len(values) != len(group):
            raise ValueError(f"{len(values)} scores for {len(group)} responses")
    return json.dumps([list(map(outcome, values)), False], default=as_json).encode()


def as_json(value):
    """What JSON does not know: arrays become lists, all else its text."""
    return value.tolist() if hasattr(value, "tolist") else repr(value)


def outcome(value) -> tuple[float | None, dict, str]:
    """Score, extra info and status of one response."""
    extra = dict(value) if isinstance(value, dict) else {"score": value}
    score = extra.get("score", "missing")
    if score is None:
        return None, extra, "no_verdict"
    if hasattr(type(score), "__float__") and math.isfinite(score):  # float() would take "1"
        extra["score"] = float(score)
        return extra["score"], extra, "ok"
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


def may_pass(error: BaseException) -> bool:
    """Whether to try again: a broken connection, HTTP 408, 429, 5xx (of aiohttp, openai, requests, httpx)."""
    status = None
    for place in (error, getattr(error, "response", None)):
        status = status or getattr(place, "status", None) or getattr(place, "status_code", None)
    if isinstance(status, int):
        return status in (408, 429) or 500 <= status < 600
    broken = {"ClientConnectionError", "ClientPayloadError", "APIConnectionError", "TransportError",
              "ConnectionError"}  # fmt: skip
    return not broken.isdisjoint(kind.__name__ for kind in type(error).__mro__)


def grade(fd: int):
    """The main function of a grading process, which reads a job and then numbered samples from pipe `fd`.

    Each answer is a line with the number and JSON: for the job its error or null, for a sample its result.
    """
    watched = [os.pidfd_open(pid) for pid in (os.getppid(), os.getpid())]
    if os.fork() == 0:  # with the worker or us, however we end, ends all that the function has started
        os.close(fd)
        select.select(watched, [], [])
        os.killpg(0, signal.SIGKILL)
    os.set_inheritable(fd, False)
    pipe = Connection(fd)
    os.register_at_fork(after_in_child=pipe.close)  # a child that the function forks has no pipe
    answers = open(fd, "wb", closefd=False)
    pid = os.getpid()

    def answer(number: bytes, result: bytes):
        if os.getpid() != pid:  # a forked child has returned from the function and must not answer
            os._exit(0)
        answers.write(number + b" " + result + b"\n")
        answers.flush()

    complaint = None
    number, _, job = pipe.recv_bytes().partition(b" ")
    try:
        scorer = Scorer(Job(**json.loads(job)))
    except Exception as error:
        complaint = " ".join(str(error).split())
    answer(number, json.dumps(complaint).encode())
    with asyncio.Runner() as runner, contextlib.suppress(EOFError):
        while not scorer.is_spent:
            number, _, payload = pipe.recv_bytes().partition(b" ")
            answer(number, scorer.score_sync(payload, runner))


class Grader(threading.Thread):
    """A thread of the worker that has samples graded by a process, replaced when it dies or is overdue."""

    def __init__(self, worker):
        super().__init__(daemon=True)
        self.worker = worker
        self.process = None

    def run(self):
        while True:
            number, payload = self.worker.samples.get()
            started = time.monotonic()
            try:
                if not self.process:
                    self.open()
                    started = time.monotonic()
                result = self.ask(number, payload, self.worker.job.timeout)
            except Exception as error:
                self.close()
                result = None  # it died: lost
                if isinstance(error, TimeoutError):
                    result = failure("timeout", f"{error}: process killed")
                elif isinstance(error, ValueError):  # the function does not load any more
                    result = failure("error", str(error))
            self.worker.report(number, result, started)

    def open(self):
        """Starts the process, which has loaded the function then. ValueError where it cannot; see `ask`."""
        self.pipe, its = Pipe()
        code = f"import sys; sys.path[0] = {str(HERE)!r}; from reward_worker import grade; "
        code += f"del sys.modules['reward_worker']; grade({its.fileno()})"  # the user may have another one
        self.process = subprocess.Popen(
            [sys.executable, "-u", "-c", code],
            pass_fds=[its.fileno()],
            stdin=subprocess.DEVNULL,
            stdout=2,  # prints: to our log
            start_new_session=True,
        )
        its.close()
        complaint = json.loads(self.ask(-1, json.dumps(vars(self.worker.job)).encode(), START_S))
        if complaint:
            check_files(self.worker.job)
            raise ValueError(complaint)

    def ask(self, number: int, message: bytes, timeout: float) -> bytes:
        """The answer to a message.

        Raises OSError or EOFError if the process dies or answers with another number, TimeoutError if it is
        overdue.
        """
        due = time.monotonic() + min(timeout, 1e6)  # `poll` takes no infinity
        self.pipe.send_bytes(b"%d " % number + message)
        chunks = []
        while not chunks or b"\n" not in chunks[-1]:
            if not self.pipe.poll(max(0.0, due - time.monotonic())):
                raise TimeoutError(f"no result within {timeout:g} s")
            chunks.append(os.read(self.pipe.fileno(), 1 << 20))
            if not chunks[-1]:
                raise EOFError
        line, _, rest = b"".join(chunks).partition(b"\n")
        answered, _, result = line.partition(b" ")
        if answered != b"%d" % number or rest:  # whatever has written here, it is not this sample's result
            raise OSError("the grading process did not answer with the number of its sample")
        return result

    def close(self):
        """Ends the process and whatever the function has started in it."""
        if self.process:
            self.pipe.close()
            os.killpg(self.process.pid, signal.SIGKILL)
            self.process.wait()
            self.process = None


class RewardLoopWorker:
    """Ray actor: scores the samples it is given and hands each result over with the next `collect`."""

    def __init__(self, job: Job, api_key: str):
        _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))  # 1,024 connections are few
        if api_key:
            os.environ["ROUTER_API_KEY"] = api_key
        self.job = job
        self.life = os.urandom(8).hex()
        self.done = {}  # number -> (result, seconds) till the manager has them; no result: lost
        self.running = {}  # number -> (task, the timer that cuts it off), of an async function
        self.samples = queue.SimpleQueue()  # (number, payload) for grading processes
        graders = [Grader(self) for _ in range(job.sync_processes)]  # their processes start when needed
        self.pid = os.getpid()
        self.changed = None  # why an async function does not run here
        try:
            if job.is_async:
                self.scorer = Scorer(job)
            else:
                graders[0].open()  # shows whether the function can be loaded here
        except FileChanged as error:  # Ray has started this worker again during the run
            graders[0].close()
            self.changed = failure("error", str(error))
        for grader in graders:
            grader.start()

    async def begin(self) -> str:
        """The life of this worker, which has loaded the function: another one after each restart by Ray."""
        return self.life

    async def submit(self, batch: dict[int, tuple[bool, bytes]]):
        """Takes samples, {number: (alone, payload)}; returns at once."""
        loop = asyncio.get_running_loop()
        for number, (alone, payload) in batch.items():
            if alone or not self.job.is_async:
                self.samples.put((number, payload))
            else:
                due = loop.time() + self.job.timeout
                timer = loop.call_at(due, self._cut_off, number, due)
                self.running[number] = loop.create_task(self._run(number, payload)), timer

    async def collect(self, arrived: list[int]) -> tuple[str, dict[int, tuple[bytes | None, float]]]:
        """(life, {number: (result, seconds)}), soon after there are some, or with none as a sign of life.

        Each result is kept until a later call says that it `arrived`."""
        for number in arrived:
            self.done.pop(number, None)
        for _ in range(HEARTBEAT):
            await asyncio.sleep(GATHER_S)
            if self.done:
                break
        return self.life, self.done.copy()

    def report(self, number, result, started):
        self.done[number] = result, time.monotonic() - started

    async def _run(self, number, payload):
        started = time.monotonic()
        result = self.changed or await self.scorer.score(payload)
        if os.getpid() != self.pid:  # a forked child has returned, whose event loop is its parent's
            os._exit(0)
        if number in self.running:  # else it came too late: the timeout has been reported
            _, timer = self.running.pop(number)
            timer.cancel()
            self.report(number, result, started)

    def _cut_off(self, number, due):
        task, _ = self.running.pop(number)
        task.cancel()  # it may refuse: nobody waits for it
        timeout = self.job.timeout
        result = failure("timeout", f"no result within {timeout:g} s")
        if asyncio.get_running_loop().time() - due > 0.1:
            result = None  # a neighbour has blocked the event loop: this time was not its own
        self.report(number, result, time.monotonic() - timeout)
