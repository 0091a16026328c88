"""Scripts in processes that are forked from one that has imported torch and transformers.

These imports take most of a script's start. No file of this repository is among them, so each script
imports its own files, from the folder in which it runs. Ray is not among them either, because it reads
environment variables when it is imported. A forked script is a process of its own with its own environment,
working directory, output, session and network, and it ends as Python does: with exit code, traceback and
exit handlers.

    done = forked.run(["score_file.py", "--data", ...])     # like subprocess.run(..., capture_output=True)
    process = forked.Script(["grpo_trainer.py", ...], log)  # like subprocess.Popen
    env = os.environ | {"PATH": forked.on_path(tmp_path)}   # for shell scripts that call `python`
    ray.init("local", runtime_env=forked.ray_workers(tmp_path))   # for actors that need torch
    forked.small_ray()                                      # before ray.init
    env = os.environ | {"PYTHONPATH": forked.ENGINES}       # for vLLM's servers, see vllm_forks

Not covered: options of Python itself, and environment variables that Python or torch read when they are
imported, such as OMP_NUM_THREADS. Tests of the start itself, of Ctrl-C in a run, or of what other processes
see start a Python of their own.
"""

import atexit
import contextlib
import ctypes
import functools
import gc
import importlib
import json
import os
import runpy
import select
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import traceback
import types
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
NAMESPACES = ["/proc/self/ns/net", "/proc/self/ns/mnt"]
ENGINES = str(ROOT / "tests/vllm_forks")
IMPORTED = """torch torch.distributed.checkpoint.state_dict transformers transformers.core_model_loading
    transformers.integrations.sdpa_attention transformers.models.llama.modeling_llama tyro aiohttp.web
    uvloop accelerate pyarrow.parquet safetensors.torch psutil requests msgspec msgpack jsonschema
    google.protobuf.message tqdm matplotlib.pyplot pytest""".split()


def serve(listener: socket.socket) -> tuple[list[str], dict[str, str]]:
    """Fork a process for each script, and return in this process what the script is."""
    del sys.path[0]  # this folder
    for name in IMPORTED:
        importlib.import_module(name)
    assert "ray" not in sys.modules
    gc.freeze()  # Otherwise each process would copy all these objects when it collects garbage.
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # Nobody waits for the processes that wait for scripts.
    while True:
        if 0 in select.select([listener, 0], [], [])[0]:
            os._exit(0)  # The tests have ended.
        connection, _ = listener.accept()
        if os.fork() == 0:
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            listener.close()
            _, files, _, _ = socket.recv_fds(connection, 1, 3 + len(NAMESPACES))
            arguments, folder, environment = json.loads(connection.makefile().readline())
            script = os.fork()
            if script == 0:
                connection.close()
                os.setsid()
                for number, file in enumerate(files[:3]):
                    os.dup2(file, number)
                for file, own in zip(files[3:], NAMESPACES):
                    if not os.path.samestat(os.fstat(file), os.stat(own)):  # on a host of hosts.py
                        assert ctypes.CDLL(None).setns(file, 0) == 0
                for file in files:
                    os.close(file)
                os.chdir(folder)
                return arguments, environment
            connection.sendall(script.to_bytes(8, "little"))
            for file in files:
                os.close(file)
            code = os.waitstatus_to_exitcode(os.waitpid(script, 0)[1])
            with contextlib.suppress(BrokenPipeError):  # Nobody may be waiting any more.
                connection.sendall(code.to_bytes(8, "little", signed=True))
            os._exit(0)
        connection.close()


def become(arguments: list[str], environment: dict[str, str]) -> None:
    """Run `python ARGUMENTS` in this process."""
    os.environ.clear()
    os.environ.update(environment)
    what, *rest = arguments
    first = os.getcwd() if what == "-m" else "" if what == "-c" else os.path.dirname(os.path.abspath(what))
    sys.path[:0] = [first, *filter(None, environment.get("PYTHONPATH", "").split(os.pathsep))]
    sys.orig_argv = [sys.executable, *arguments]
    if what == "-m":
        sys.argv = rest
        runpy.run_module(rest[0], run_name="__main__", alter_sys=True)
    elif what in ("-", "-c"):
        code = sys.stdin.read() if what == "-" else rest.pop(0)
        sys.argv, sys.modules["__main__"] = [what, *rest], types.ModuleType("__main__")
        exec(compile(code, "<string>", "exec"), vars(sys.modules["__main__"]))
    else:
        sys.argv = arguments
        runpy.run_path(what, run_name="__main__")


@functools.cache
def address() -> str:
    """Return the address of the process from which scripts are forked. The first script starts it.

    The workers of xdist share one, whose address they get from their main process (see conftest.py).
    """
    if "FORKED_FROM" in os.environ:
        return os.environ["FORKED_FROM"]
    folder = tempfile.TemporaryDirectory(prefix="forked", dir="/tmp")  # a short path for the socket
    listener = socket.socket(socket.AF_UNIX)
    listener.bind(f"{folder.name}/socket")
    listener.listen()
    address.kept = [folder]

    def start():
        select.select([listener], [], [])
        environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
        command = [sys.executable, __file__, "serve", str(listener.fileno())]
        options = dict(cwd=folder.name, env=environment, pass_fds=[listener.fileno()], start_new_session=True)
        address.kept.append(subprocess.Popen(command, stdin=subprocess.PIPE, **options))
        listener.close()

    threading.Thread(target=start, daemon=True).start()  # The process ends when this one closes its input.
    return f"{folder.name}/socket"


class Script:
    """A running script, with the methods and attributes of subprocess.Popen that the tests use."""

    def __init__(self, arguments, output, errors=None, cwd=ROOT, env=None, where=None, stdin=None):
        self.connection = socket.socket(socket.AF_UNIX)
        self.connection.connect(where or address())
        request = [*map(str, arguments)], str(cwd), dict(os.environ if env is None else env)
        with open(os.devnull) as nothing:
            files = [nothing if file is None else file for file in (stdin, output, errors or output)]
            numbers = [file if isinstance(file, int) else file.fileno() for file in files]
            spaces = [os.open(name, os.O_RDONLY) for name in NAMESPACES]
            socket.send_fds(self.connection, [b" "], numbers + spaces)
            for number in spaces:
                os.close(number)
        self.connection.sendall(json.dumps(request).encode() + b"\n")
        self.pid = int.from_bytes(self.connection.recv(8, socket.MSG_WAITALL), "little")
        assert self.pid, "the process from which scripts are forked has ended"
        self.returncode = None

    def poll(self) -> int | None:
        if select.select([self.connection], [], [], 0)[0]:
            self.wait()
        return self.returncode

    def wait(self, timeout=None) -> int:
        if self.returncode is None:
            self.connection.settimeout(timeout)
            code = self.connection.recv(8, socket.MSG_WAITALL)
            self.returncode = int.from_bytes(code, "little", signed=True)
        return self.returncode

    def send_signal(self, number) -> None:
        os.kill(self.pid, number)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)


def run(arguments, cwd=ROOT, env=None, timeout=None) -> subprocess.CompletedProcess:
    """Run a script and return its exit code and output."""
    with tempfile.TemporaryFile("w+") as output, tempfile.TemporaryFile("w+") as errors:
        script = Script(arguments, output, errors, cwd, env)
        try:
            code = script.wait(timeout)
        except TimeoutError:
            script.kill()
            script.wait()
            code = f"still running after {timeout} s"
        output.seek(0)
        errors.seek(0)
        return subprocess.CompletedProcess(arguments, code, output.read(), errors.read())


def on_path(folder: Path) -> str:
    """Write a `python` that forks, and return a PATH in which shell scripts find it."""
    folder.mkdir(exist_ok=True)
    command = f'exec {sys.executable} -I -S {__file__} run {address()} "$@"'
    (folder / "python").write_text(f"#!/bin/sh\n{command}\n")
    (folder / "python").chmod(0o755)
    return f"{folder}:{Path(sys.executable).parent}:{os.environ['PATH']}"


def ray_workers(folder: Path) -> dict:
    """Return a `runtime_env` for ray.init, with which Ray forks its workers as well."""
    on_path(folder)
    return {"py_executable": f"{folder}/python"}


def small_ray(setattr=setattr) -> None:
    """Let Ray start in this process with fewer processes of its own, as far as no test needs them.

    There is no autoscaler, log monitor or dashboard, each of which imports Ray. The agent of a node is the
    small one of a Ray without the extra "default", because Ray does not start if its agent takes 15 s, as it
    may on a busy machine. The Ray of test_cluster.py that takes jobs starts as for users, and so do those of
    scripts in a Python of their own.
    """
    from ray._private import utils
    from ray._private.node import Node

    setattr(utils, "get_dashboard_dependency_error", lambda: ImportError("left out by the tests"))
    for part in ("start_monitor", "start_log_monitor", "start_api_server"):
        setattr(Node, part, lambda self, **settings: None)


def end(script) -> None:
    """Call `script` and end this process as Python would, but without freeing all objects one by one."""
    code = 0
    try:
        script()
    except SystemExit as exit:
        code = exit.code or 0
    except Exception:
        traceback.print_exc()
        code = 1
    if not isinstance(code, int):
        print(code, file=sys.stderr)
        code = 1
    threading._shutdown()  # Wait for threads.
    atexit._run_exitfuncs()
    sys.stdout.flush()
    os._exit(code)


if __name__ == "__main__":
    if sys.argv[1] == "serve":
        script = serve(socket.socket(fileno=int(sys.argv[2])))
        end(lambda: become(*script))
    else:
        where, *given = sys.argv[2:]
        code = Script(given, sys.stdout, sys.stderr, os.getcwd(), where=where, stdin=sys.stdin).wait()
        sys.exit(code if code >= 0 else 128 - code)
