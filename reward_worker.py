"""Run the user's reward function for the Reward Loop, in a worker or in the worker's grading processes.

An async function runs in the event loop of a worker. A sync function runs in grading processes: child
processes of the worker that load the function, score one sample at a time, and are killed if they exceed the
timeout. The samples of a sync function pass through three processes:

    driver                       worker (Ray actor)                    grading process
    RewardLoopManager -submit->  its queue         --- pipe: sample -->  your function
                      <-collect- results gather    <-- pipe: JSON -----

Standalone: imports nothing from this repository. Ray sends this module to the workers by value, so it must
import only the standard library.
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
import socket
import struct
import subprocess
import sys
import sysconfig
import threading
import time
import traceback
from functools import partial
from importlib.machinery import ModuleSpec, SourceFileLoader
from multiprocessing.connection import Connection
from pathlib import Path

HERE = Path(__file__).resolve().parent
STDLIB = sysconfig.get_paths()["stdlib"]
GATHER_S = 0.01  # A worker gathers results for this many seconds to send fewer messages.
HEARTBEAT = 100  # After this many periods of GATHER_S, a worker returns from `collect` even without results.
START_S = 300.0  # Time limit in seconds for loading the function, which is slow on a busy node.
ISOLATE_AFTER = 2  # A call that was lost this often runs alone in a grading process.


@dataclasses.dataclass
class Job:
    """What workers and grading processes need to know about a run. All values can be written as JSON."""

    function: str  # FILE:NAME with the full path
    kwargs: dict  # keyword arguments that are the same for every sample
    columns: dict[str, bool]  # further row columns that the function takes -> whether it requires them
    tokenizer: str | None  # path or name of the reward model's tokenizer if the function takes one
    is_async: bool
    sees_group: bool  # whether one call gets all responses to a prompt (`solution_strs`)
    timeout: float
    files: dict[str, str] = dataclasses.field(default_factory=dict)  # path -> SHA-256, see `fingerprints`
    takes_genrm_model: bool = False  # whether --reward-kwargs can name the judge's model
    # address -> entry of the model there that compute_score.py asks in the whole run
    models: dict[str, dict] = dataclasses.field(default_factory=dict)
    sync_processes: int = 1


# --- 1. Loading the user's function -------------------------------------------------------------------------
# The modules of this repository have plain names, such as policy and run, which the user's files may have as
# well. So our modules are hidden while the user's are loaded.


class FileChanged(ValueError):
    """A file of the reward function has changed since the run began."""


def sha256(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


def fingerprints(function_file: str) -> dict[str, str]:
    """Return {path: SHA-256} of the function's file and all local files that it imports, even indirectly.

    Local files are files in the function's folder or in this repository. Imports in functions count as well.
    """
    folders = [Path(function_file).parent, HERE]
    found = {}
    waiting = [Path(function_file)]
    while waiting:
        path = waiting.pop()
        if str(path) in found or not path.is_file():
            continue
        text = path.read_bytes()
        found[str(path)] = sha256(text)
        try:
            tree = ast.parse(text)
        except (SyntaxError, ValueError):
            continue  # The error is reported when the file is loaded.
        for node in ast.walk(tree):
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
    """Return the files that `import a.b.c` may execute. Some of them may not exist."""
    files = []
    for folder in folders:
        here = []
        for count in range(1, len(parts) + 1):
            path = folder.joinpath(*parts[:count])
            here += [path / "__init__.py", path.with_name(path.name + ".py")]
        if here[0].is_file() or here[1].is_file():
            return here  # Folders without __init__.py matter only if no folder has a real `a`.
        files += here
    return files


def check_files(files: dict[str, str]):
    """Raise FileChanged if one of these files, {path: SHA-256}, has changed since the run began."""
    for file, digest in files.items():
        path = Path(file)
        if not path.is_file() or sha256(path.read_bytes()) != digest:
            raise FileChanged(f"{file} has changed since the run began; restore the file or start a new run")


def file_id(path: str) -> str | tuple[int, int]:
    """Return what a file and all links to it have in common. This is faster than resolving the links."""
    try:
        found = os.stat(path)
    except OSError:
        return os.path.realpath(path)
    return found.st_dev, found.st_ino


class UncachedLoader(SourceFileLoader):
    """A loader without Python's cache, which misses an edit of the same size within the same second."""

    def path_stats(self, path):
        raise OSError("the cache is not used")


def load_function(spec: str, field: str = "reward_fn"):
    """Load the function FILE:NAME. The file may import files in its folder. Raise ValueError on failure."""
    file, _, name = spec.rpartition(":")
    path = Path(file)
    sys.path[:] = [str(path.parent), *sys.path, str(HERE)]  # Files in toy/ import compute_score.py.
    module_name = path.stem
    if module_name in sys.modules:  # The user's module must not replace another one.
        module_name += "_of_user"
    try:
        loader = UncachedLoader(module_name, str(path))
        module_spec = importlib.util.spec_from_loader(module_name, loader)
        module = importlib.util.module_from_spec(module_spec)
        sys.modules[module_name] = module  # Dataclasses look up their module here.
        loader.exec_module(module)
    except (Exception, SystemExit) as error:
        reason = f"loading the file failed: {error_line(error, file)}"
        if "relative import" in reason:  # The file belongs to a package.
            reason += "; pass a file outside the package that imports the function"
        raise ValueError(f"{flag(field)} {spec}: {reason}") from error
    function = getattr(module, name, None)
    if not callable(function):
        here = [
            key
            for key, value in vars(module).items()
            if inspect.isfunction(value) and key[0] != "_" and value.__module__ == module_name
        ]
        raise ValueError(
            f"{flag(field)} {spec}: {path.name} has no function {name}; it defines "
            f"{', '.join(here[:10]) or 'no function'}"
        )
    return function


def file_and_name(field: str, spec: str) -> tuple[Path, str]:
    """Split FILE:NAME. Raise ValueError if the form is wrong or the file does not exist."""
    file, _, name = spec.rpartition(":")
    path = Path(file).resolve()
    if not name or path.suffix != ".py":
        raise ValueError(f"{flag(field)} {spec}: must be FILE.py:NAME, such as score.py:compute_score")
    if not path.is_file():
        raise ValueError(f"{flag(field)} {spec}: the file {path} does not exist; check the path")
    return path, name


def flag(field: str) -> str:
    """Return the command-line flag of this field."""
    return "--" + field.replace("_", "-")


def load_in_this_process(field: str, spec: str):
    """Load a user's function for this process. The function may import modules from its folder later."""
    path, name = file_and_name(field, spec)
    with modules_of_the_user(path.parent):
        function = load_function(f"{path}:{name}", field)
        theirs = {module: sys.modules[module] for module in local_modules(path.parent)}
    for module, loaded in theirs.items():
        sys.modules.setdefault(module, loaded)  # If the name is taken, our module stays.
    if str(path.parent) not in sys.path:
        sys.path.append(str(path.parent))
    return function


@contextlib.contextmanager
def modules_of_the_user(folder: Path):
    """Hide this repository's modules inside the block, and unload the user's modules after it."""
    import_path = sys.path.copy()
    before = sys.modules.copy()
    for name in local_modules(HERE):
        del sys.modules[name]
    try:
        yield
    finally:
        for name in local_modules(HERE, folder):
            del sys.modules[name]
        for name in before.keys() - sys.modules.keys():
            sys.modules[name] = before[name]
        sys.path[:] = import_path


def local_modules(*folders: Path) -> list[str]:
    """Return the names of loaded modules in these folders, without the standard library and packages."""
    names = []
    for name, module in sys.modules.copy().items():
        spec = getattr(module, "__spec__", None)
        if name == "__main__" or not isinstance(spec, ModuleSpec):
            continue
        places = [spec.origin, *(spec.submodule_search_locations or [])]
        file = next((place for place in places if place), "/")
        if "/site-packages/" in file or file.startswith(STDLIB + os.sep):
            continue  # Making Path objects of these thousands of files would take long.
        file = Path(file)
        if any(file.is_relative_to(folder) for folder in folders):
            names.append(name)
    return names


# --- 2. Calling it ------------------------------------------------------------------------------------------
def unpickled(payload: bytes) -> dict:
    """Return the arguments of a call. This is safe because our own manager pickled the data."""
    try:
        return pickle.loads(payload)
    except Exception as error:  # A class of the rollout function's file may not exist here.
        raise ValueError(
            f"the sample's data cannot be loaded for the reward function ({error_line(error)}); "
            "use only numbers, strings, lists and dicts in trajectory.info"
        ) from error


class Scorer:
    """The reward function of a run with its constant arguments. Raises ValueError if it cannot be loaded.

    Arguments are pickled. A result is JSON: [[[score or None, extra info, status] for each response], whether
    to retry]. With JSON, no user object can break a message that also carries other results.
    """

    def __init__(self, job: Job):
        self.file = job.function.rpartition(":")[0]
        self.is_spent = False  # True if this process must not score any more samples
        check_files(job.files)
        if job.models:
            os.environ["GENRM_MODELS"] = json.dumps(job.models)  # compute_score.py reads it.
        self.function = partial(load_function(job.function), **job.kwargs)
        check_files(job.files)  # Files may have changed during a long import.
        self.unchecked = job.files.copy()  # Calls may import these files later.
        self.num_modules = 0
        self.changed = ""  # which of these files had changed before its import
        self.check_imports()
        if job.tokenizer:
            from transformers import AutoTokenizer, PreTrainedTokenizerFast

            tokenizer = AutoTokenizer.from_pretrained(job.tokenizer)
            # As in causal_lm.load_tokenizer: the class for tekken.json ignores the folder's chat template.
            if type(tokenizer).__name__ == "MistralCommonBackend":
                tokenizer = PreTrainedTokenizerFast.from_pretrained(job.tokenizer, fix_mistral_regex=True)
            # Transformers 5 returns a dict, but functions written for verl expect token ids, as in version 4.
            tokenizer.apply_chat_template = partial(tokenizer.apply_chat_template, return_dict=False)
            self.function = partial(self.function, reward_model_tokenizer=tokenizer)

    def check_imports(self):
        """Raise FileChanged if this process has imported a file that had changed since the run began."""
        if len(sys.modules) != self.num_modules:
            self.num_modules = len(sys.modules)
            modules = sys.modules.copy().values()  # A lazy module may raise any error for an attribute.
            paths = {str(getattr(module, "__dict__", {}).get("__file__")) for module in modules}
            loaded = set(map(file_id, paths))
            new = {}
            for file in list(self.unchecked):
                if file in paths or file_id(file) in loaded:  # A file may be replaced between two look-ups.
                    new[file] = self.unchecked.pop(file)
            try:
                check_files(new)
            except FileChanged as error:
                self.changed = str(error)
        if self.changed:
            self.is_spent = True
            raise FileChanged(self.changed)

    async def score(self, payload: bytes) -> bytes | None:
        """Call an async function once. Return None if another call has cancelled this task.

        This catches even SystemExit, which would otherwise end the worker.
        """
        try:
            arguments = unpickled(payload)
            value = await self.function(**arguments)
            self.check_imports()
            return as_result(value, arguments.get("solution_strs"))
        except BaseException as error:
            if isinstance(error, asyncio.CancelledError) and asyncio.current_task().cancelling():
                return None
            return failure("error", error_line(error, self.file), is_retryable(error))

    def score_sync(self, payload: bytes, runner: asyncio.Runner) -> bytes:
        """Call any function once, outside of an event loop because it may call asyncio.run itself."""
        try:
            arguments = unpickled(payload)
            value = self.function(**arguments)
            if inspect.isawaitable(value):
                try:
                    value = runner.run(asyncio.wait_for(value, None))
                except (SystemExit, KeyboardInterrupt):
                    self.is_spent = True  # The event loop would raise the error again.
                    raise
            self.check_imports()
            return as_result(value, arguments.get("solution_strs"))
        except BaseException as error:
            return failure("error", error_line(error, self.file), is_retryable(error))


def failure(status: str, message: str, try_again: bool = False) -> bytes:
    """Return the result of a failed call, which applies to all its samples."""
    return json.dumps([[[None, {"error": message}, status]], try_again]).encode()


def as_result(value, group: list[str] | None) -> bytes:
    """Convert the function's return value to a result.

    If the function scores groups, `group` is the list of responses, else None.
    """
    values = [value]
    if group is not None:
        values = value
        if hasattr(value, "tolist"):
            values = value.tolist()  # an array
        if not isinstance(values, (list, tuple)):  # Other collections may be unordered.
            raise ValueError(f"the function returned {value!r:.80}, which is not a list of scores")
        if len(values) != len(group):
            raise ValueError(f"the function returned {len(values)} scores for {len(group)} responses")
    return json.dumps([list(map(outcome, values)), False], default=as_json).encode()


def as_json(value):
    """Convert a value that JSON cannot represent: an array to a list, anything else to text."""
    if isinstance(value, BaseException):
        return error_line(value)  # The repr of an HTTP error may contain headers, and therefore a key.
    return value.tolist() if hasattr(value, "tolist") else repr(value)


def outcome(value) -> tuple[float | None, dict, str]:
    """Return the score, the extra info and the status of one response."""
    extra = dict(value) if isinstance(value, dict) else {"score": value}
    score = extra.get("score", "missing from the result")
    if extra.pop("overlong_penalty", None) is not None:
        complaint = "the key overlong_penalty belongs to the trainer's length penalty; use another name"
    elif score is None:
        return None, extra, "no_verdict"
    elif hasattr(type(score), "__float__") and math.isfinite(score):  # float() would accept the text "1".
        extra["score"] = float(score)
        return extra["score"], extra, "ok"
    else:
        complaint = f"the score is {score!r:.80}, but it must be a finite number or None"
    return None, extra | {"score": None, "error": complaint}, "error"


def error_line(error: BaseException, file: str = "") -> str:
    """Describe an error in one line: type, message, and the last line of `file` in its traceback."""
    # TracebackException provides a message even if str(error) fails.
    details = traceback.TracebackException.from_exception(error, lookup_lines=False)
    line = printable(f"{type(error).__name__}: {details}"[:500])
    frames = [frame for frame in details.stack if frame.filename == file] or details.stack
    if frames:
        line += f" ({os.path.basename(frames[-1].filename)}:{frames[-1].lineno})"
    return line


def printable(text: str) -> str:
    """Escape line breaks and control characters, with which a response could write to the terminal."""
    return "".join(char if char.isprintable() else ascii(char)[1:-1] for char in text)


def is_retryable(error: BaseException) -> bool:
    """Return whether to retry after this error: a broken connection or response, or HTTP 408, 429 or 5xx.

    This recognises the errors of aiohttp, openai, requests and httpx.
    """
    # aiohttp reports a malformed response as status 400.
    if any(kind.__name__ == "HttpProcessingError" for kind in type(error.__cause__).__mro__):
        return True
    status = None
    for place in (error, getattr(error, "response", None)):
        status = status or getattr(place, "status", None) or getattr(place, "status_code", None)
    if isinstance(status, int):
        return status in (408, 429) or 500 <= status < 600
    broken = {
        "ClientConnectionError",
        "ClientPayloadError",
        "ChunkedEncodingError",
        "APIConnectionError",
        "TransportError",
        "ConnectionError",
    }
    return not broken.isdisjoint(kind.__name__ for kind in type(error).__mro__)


# --- 3. Grading processes -----------------------------------------------------------------------------------
def grading_main(fd: int):
    """Run a grading process, which receives a job and then numbered samples through the pipe `fd`.

    Each response is one line with the number and JSON: an error or null for the job, a result for a sample.
    """
    watched = [os.pidfd_open(pid) for pid in (os.getppid(), os.getpid())]
    # When the worker or this process ends, the child process kills everything that the function started.
    if os.fork() == 0:
        os.close(fd)
        select.select(watched, [], [])
        os.killpg(0, signal.SIGKILL)
    os.set_inheritable(fd, False)
    pipe = Connection(fd)
    os.register_at_fork(after_in_child=pipe.close)  # Processes that the function forks do not get the pipe.
    answers = open(fd, "wb", closefd=False)
    pid = os.getpid()

    def answer(number: bytes, result: bytes):
        if os.getpid() != pid:  # A process that the function forked has returned. It must not answer.
            os._exit(0)
        answers.write(number + b" " + result + b"\n")
        answers.flush()

    number, _, job = pipe.recv_bytes().partition(b" ")
    try:
        scorer = Scorer(Job(**json.loads(job)))
    except Exception as error:
        complaint = " ".join(str(error).split())
        return answer(number, json.dumps(complaint).encode())
    answer(number, b"null")
    with asyncio.Runner() as runner, contextlib.suppress(EOFError):
        while not scorer.is_spent:
            number, _, payload = pipe.recv_bytes().partition(b" ")
            answer(number, scorer.score_sync(payload, runner))


class Grader(threading.Thread):
    """A thread of the worker that owns one grading process, and replaces it if it dies or is overdue."""

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
                result = None  # The process died. The call is lost and will be repeated.
                if isinstance(error, TimeoutError):
                    result = failure("timeout", f"{error}, so the grading process was killed")
                elif isinstance(error, ValueError):  # The function could not be loaded.
                    result = failure("error", str(error))
            self.worker.report(number, result, started)

    def open(self):
        """Start the process and wait until it has loaded the function. Raise ValueError if loading fails."""
        self.pipe, its = socket.socketpair()  # Unlike a Connection, a socket can send with a time limit.
        its.setblocking(True)  # The function's module may have called socket.setdefaulttimeout.
        self.process = subprocess.Popen(
            [sys.executable, "-u", str(HERE / "reward_worker.py"), str(its.fileno())],
            pass_fds=[its.fileno()],
            stdin=subprocess.DEVNULL,
            stdout=2,  # The function's output goes to the worker's log.
            start_new_session=True,
        )
        its.close()
        try:
            complaint = json.loads(self.ask(-1, json.dumps(vars(self.worker.job)).encode(), START_S))
        except (EOFError, ConnectionError):
            raise OSError(
                "the grading process ended while it loaded --reward-fn; see its output in Ray's logs, and "
                "note that it needs Linux 5.3 or newer"
            ) from None
        if complaint:
            check_files(self.worker.job.files)
            raise ValueError(complaint)

    def ask(self, number: int, message: bytes, timeout: float) -> bytes:
        """Send a message to the process and return its response.

        Raises:
            OSError, EOFError: The process died or sent an invalid response.
            TimeoutError: The process did not respond within `timeout` seconds.
        """
        message = b"%d " % number + message
        limit = min(timeout, 1e6)  # `settimeout` does not accept infinity.
        due = time.monotonic() + limit
        chunks = []
        chunk = b""
        try:
            self.pipe.settimeout(limit)
            # `Connection.recv_bytes` expects this header before a long message.
            self.pipe.sendall(struct.pack("!iQ", -1, len(message)) + message)
            while b"\n" not in chunk:
                self.pipe.settimeout(max(0.001, due - time.monotonic()))  # 0 would mean not to wait at all.
                chunk = self.pipe.recv(1 << 20)
                if not chunk:
                    raise EOFError
                chunks.append(chunk)
        except TimeoutError:
            raise TimeoutError(f"no result within {timeout:g} s") from None
        line, _, rest = b"".join(chunks).partition(b"\n")
        answered, _, result = line.partition(b" ")
        if answered != b"%d" % number or rest:  # The function itself wrote to the pipe.
            raise OSError("the grading process sent an invalid response")
        return result

    def close(self):
        """Kill the process and all processes that the function has started."""
        if self.process:
            self.pipe.close()
            os.killpg(self.process.pid, signal.SIGKILL)
            self.process.wait()
            self.process = None


# --- 4. The worker ------------------------------------------------------------------------------------------
class RewardLoopWorker:
    """A Ray actor that scores the samples of `submit` and returns the results through `collect`."""

    def __init__(self, job: Job, api_key: str):
        _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))  # The usual limit of 1,024 is too low.
        if api_key:
            os.environ["ROUTER_API_KEY"] = api_key
        self.job = job
        self.incarnation = os.urandom(8).hex()  # changes when Ray restarts the worker
        # number -> (result or None if lost, seconds); an entry stays until the manager has received it
        self.done = {}
        self.running = {}  # number -> (task, timer of its timeout), for async functions
        self.samples = queue.SimpleQueue()  # (number, payload) for grading processes
        graders = [Grader(self) for _ in range(job.sync_processes)]  # Processes start when they are needed.
        self.pid = os.getpid()
        self.thread = None  # the thread of the event loop
        threading.excepthook = self._end_with_loop
        self.changed = None  # the result of every call after a file of an async function has changed
        try:
            if job.is_async:
                self.scorer = Scorer(job)
            else:
                graders[0].open()  # Fail early if the function cannot be loaded.
        except FileChanged as error:  # Ray may have restarted this worker during the run.
            graders[0].close()
            self.changed = failure("error", str(error))
        for grader in graders:
            grader.start()

    async def begin(self) -> str:
        """Return the incarnation of this worker, after it has loaded the function."""
        return self.incarnation

    async def submit(self, batch: dict[int, tuple[bool, bytes]]):
        """Accept calls, {number: (whether to isolate the call, payload)}, without waiting for results."""
        loop = asyncio.get_running_loop()
        self.thread = threading.current_thread()
        for number, (isolated, payload) in batch.items():
            if isolated or not self.job.is_async:
                self.samples.put((number, payload))
            else:
                due = loop.time() + self.job.timeout
                timer = loop.call_at(due, self._cut_off, number, due)
                task = loop.create_task(self._run(number, payload))
                task.add_done_callback(partial(self._ended, number))
                self.running[number] = task, timer

    async def collect(self, arrived: list[int]) -> tuple[str, dict[int, tuple[bytes | None, float]]]:
        """Return (incarnation, {number: (result, seconds)}) as soon as there are results.

        If there are no results, `collect` returns after HEARTBEAT periods to show that the worker is alive. A
        result is kept until a later call lists its number in `arrived`.
        """
        for number in arrived:
            self.done.pop(number, None)
        for _ in range(HEARTBEAT):
            await asyncio.sleep(GATHER_S)
            if self.done:
                break
        return self.incarnation, self.done.copy()

    def report(self, number, result, started):
        self.done[number] = result, time.monotonic() - started

    def _end_with_loop(self, failed):
        """End this process if its event loop has ended, as after sys.exit in a task of the function."""
        threading.__excepthook__(failed)  # prints the traceback, except of a SystemExit
        if failed.thread is self.thread:
            os._exit(1)  # Ray restarts the worker.

    async def _run(self, number, payload):
        started = time.monotonic()
        result = self.changed or await self.scorer.score(payload)
        if os.getpid() != self.pid:  # A forked process must not use the event loop of its parent.
            os._exit(0)
        if number in self.running:  # Otherwise the timeout has already been reported.
            _, timer = self.running.pop(number)
            timer.cancel()
            self.report(number, result, started)

    def _ended(self, number, task):
        if task.cancelled() and number in self.running:  # Another call cancelled this one before it began.
            _, timer = self.running.pop(number)
            timer.cancel()
            self.report(number, None, time.monotonic())

    def _cut_off(self, number, due):
        task, _ = self.running.pop(number)
        task.cancel()  # The task may ignore this, but nothing waits for the task.
        timeout = self.job.timeout
        result = failure("timeout", f"no result within {timeout:g} s")
        if asyncio.get_running_loop().time() - due > 0.1:
            result = None  # Another call blocked the event loop and used up the time.
        self.report(number, result, time.monotonic() - timeout)


if __name__ == "__main__":
    grading_main(int(sys.argv[1]))
