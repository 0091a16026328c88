"""Scripts in processes that are forked from one that has imported torch and transformers.

These imports take most of a script's start. No file of this repository is among them, so each script
imports its own files, from the folder in which it runs. Ray is not among them either, because it reads
environment variables when it is imported. A forked script is a process of its own with its own environment,
working directory, CPU cores, output, session and network, and it ends as Python does: with exit code,
traceback and exit handlers. vLLM's servers are forked from another process, which has imported vLLM.

    done = forked.run(["score_file.py", "--data", ...])     # like subprocess.run(..., capture_output=True)
    process = forked.Script(["grpo_trainer.py", ...], log)  # like subprocess.Popen
    env = os.environ | {"PATH": forked.on_path(tmp_path)}   # for shell scripts that call `python`
    forked.small_ray()                                      # before ray.init; forks Ray's workers as well
    env = forked.servers(os.environ)                        # for vLLM's servers on a CPU

Not covered: options of Python itself, environment variables that Python or torch read when they are imported,
such as OMP_NUM_THREADS, and finalizers that the imported packages have registered. Tests of the start itself,
of Ctrl-C in a run, or of what other processes see start a Python of their own.
"""

import atexit
import contextlib
import copy
import ctypes
import gc
import importlib
import json
import multiprocessing
import os
import runpy
import select
import shlex
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import traceback
import types
import weakref
from pathlib import Path

import fork_client
from fork_client import NAMESPACES

ROOT = Path(__file__).resolve().parent.parent
PYTHON = sys.executable  # which tests and small_ray() replace for a while
KEPT = []  # objects that must live until this process ends
IMPORTED = {
    "scripts": """torch torch._dynamo.backends.common torch.distributed.checkpoint.state_dict transformers
        transformers.core_model_loading transformers.integrations.sdpa_attention
        transformers.models.llama.modeling_llama tyro aiohttp.web uvloop accelerate
        pyarrow.parquet safetensors.torch psutil requests msgspec msgpack jsonschema
        google.protobuf.message tqdm matplotlib.pyplot pytest reasoning_gym""",
    "servers": "vllm.entrypoints.openai.api_server vllm.v1.engine.core",
}


def serve(listener: socket.socket, kind: str) -> tuple[list[str], dict[str, str]]:
    """Fork a process for each script, and return in this process what the script is."""
    import_packages(kind)
    attended = {}  # {file: (script, pidfd, connection)}, where the file is the pidfd or the connection
    waiting = [0, listener]  # the input closes when the tests end
    while waiting or attended:
        ready = select.select([*waiting, *attended], [], [])[0]
        for file in ready:
            if file in attended:
                attend(attended, file)
        if 0 in ready:
            listener.close()
            waiting = []
        elif listener in ready and (script := fork_script(listener.accept()[0], attended)):
            listener.close()
            return begin(*script)
    os._exit(0)


def attend(attended: dict, file) -> None:
    """Forward a signal to a script, kill it if its client has disconnected, or send its exit code."""
    script, pidfd, connection = attended.pop(file)
    if file == pidfd:
        attended.pop(connection, None)
        code = os.waitstatus_to_exitcode(os.waitpid(script, 0)[1])
        with contextlib.suppress(OSError):  # Nobody may be waiting any more.
            connection.sendall(code.to_bytes(8, "little", signed=True))
        close([pidfd, connection])
        return
    number = b""
    with contextlib.suppress(ConnectionError):
        number = connection.recv(1)
    if number:
        attended[connection] = script, pidfd, connection
        os.kill(script, number[0])
    else:
        os.kill(script, signal.SIGKILL)
        with contextlib.suppress(ProcessLookupError):  # It may not lead a group yet.
            os.killpg(script, signal.SIGKILL)


def fork_script(connection: socket.socket, attended: dict) -> tuple | None:
    """Read a request and fork: return the arguments of `begin` in the forked process, and None here."""
    files, script = [], -1
    with contextlib.suppress(OSError, ValueError):  # The client has ended, or there is too little memory.
        files = socket.recv_fds(connection, 1, 3 + len(NAMESPACES))[1]
        request = json.loads(connection.makefile().readline())
        script = os.fork()
    if script == 0:
        close([connection, *attended])
        return files, *request
    close(files)
    if script == -1:  # Only this script fails.
        connection.close()
        return None
    pidfd = os.pidfd_open(script)
    attended |= {file: (script, pidfd, connection) for file in (pidfd, connection)}
    with contextlib.suppress(OSError):  # The loop sees that the client has gone.
        connection.sendall(script.to_bytes(8, "little"))
    return None


def import_packages(kind: str) -> None:
    if kind == "servers":
        os.environ["TORCH_COMPILE_DISABLE"] = "1"  # as genrm_server.py does; torch reads it when imported
    for name in IMPORTED[kind].split():
        importlib.import_module(name)
    assert kind != "scripts" or "ray" not in sys.modules
    if kind == "servers":  # Otherwise, vLLM starts a new Python for the engine of a server on a CPU.
        fork = multiprocessing.get_context("fork")
        multiprocessing.get_context = lambda method=None: fork
    weakref.finalize._registry.clear()  # Otherwise each process would free what the packages allocated.
    gc.freeze()  # Otherwise each process would copy all these objects when it collects garbage.


def begin(files: list[int], arguments, folder, environment, cores) -> tuple[list[str], dict[str, str]]:
    """Make this process that of a script: its session, output, namespaces, cores and folder."""
    os.setsid()
    for number, file in enumerate(files[:3]):
        os.dup2(file, number)
    sys.stdout = open(
        1, "w", closefd=False
    )  # The old one would treat a pipe as a file if the old output is one.
    for file, own in zip(files[3:], NAMESPACES):
        if not os.path.samestat(os.fstat(file), os.stat(own)):  # on a host of hosts.py
            assert ctypes.CDLL(None).setns(file, 0) == 0
    close(files)
    os.sched_setaffinity(0, cores)
    os.chdir(folder)
    return arguments, environment


def close(files) -> None:
    for file in files:
        if isinstance(file, int):
            os.close(file)
        else:
            file.close()


def become(arguments: list[str], environment: dict[str, str]) -> None:
    """Run `python ARGUMENTS` in this process."""
    os.environ.clear()
    os.environ.update(environment)
    if arguments[0] == "-u":  # as the workers of xdist start, which flush what they write
        del arguments[0]
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


def address(kind: str = "scripts") -> str:
    """Return the address of the process that forks scripts of this kind. The first script starts it.

    All processes of these tests share one, because its address is in their environment.
    """
    if f"FORKED_{kind}" in os.environ:
        return os.environ[f"FORKED_{kind}"]
    folder = tempfile.TemporaryDirectory(prefix="forked", dir="/tmp")  # a short path for the socket
    listener = socket.socket(socket.AF_UNIX)
    listener.bind(f"{folder.name}/socket")
    listener.listen()
    KEPT.append(folder)

    def start():
        select.select([listener], [], [])
        environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
        command = [PYTHON, __file__, str(listener.fileno()), kind]
        options = dict(cwd=folder.name, env=environment, pass_fds=[listener.fileno()], start_new_session=True)
        KEPT.append(subprocess.Popen(command, stdin=subprocess.PIPE, **options))
        listener.close()

    threading.Thread(target=start, daemon=True).start()  # The process ends when this one closes its input.
    os.environ[f"FORKED_{kind}"] = f"{folder.name}/socket"
    return os.environ[f"FORKED_{kind}"]


class Script(fork_client.Script):
    """A running script of this repository."""

    def __init__(self, arguments, output, errors=None, cwd=ROOT, env=None, where=None, stdin=None):
        super().__init__(arguments, output, errors, cwd, env, where or address(), stdin)


def run(arguments, cwd=ROOT, env=None, timeout=None, where=None) -> subprocess.CompletedProcess:
    """Run a script and return its exit code and output."""
    with tempfile.TemporaryFile("w+") as output, tempfile.TemporaryFile("w+") as errors:
        script = Script(arguments, output, errors, cwd, env, where)
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
    if not (folder / "python").exists():
        words = shlex.join([PYTHON, "-I", "-S", fork_client.__file__, address()])
        (folder / "new").write_text(f'#!/bin/sh\nexec {words} "$@"\n')
        (folder / "new").chmod(0o755)
        (folder / "new").rename(folder / "python")
    return f"{folder}:{Path(sys.executable).parent}:{os.environ['PATH']}"


def servers(environment) -> dict[str, str]:
    """Return this environment plus the variables with which vLLM's servers and engines are forked.

    A server of a judge and one of a policy also start as users start them, in test_genrm_server.py and
    test_rollout.py. If the environment has FORKED_after_first, the first server starts as for users as well.
    """
    paths = [str(ROOT / "tests/vllm_forks"), *filter(None, [environment.get("PYTHONPATH")])]
    return {**environment, "PYTHONPATH": os.pathsep.join(paths), "FORKED_servers": address("servers")}


def small_ray(setattr=setattr) -> None:
    """Let Ray start in this process with fewer processes of its own, and with forked workers.

    There is no autoscaler, log monitor or dashboard, each of which imports Ray. The agent of a node is the
    small one of a Ray without the extra "default", and is forked as well. Ray gives it 15 s to start. A busy
    machine may nevertheless be too slow, so the start is tried five times. The Ray of test_cluster.py that
    takes jobs starts as for users, and so do those of scripts in a Python of their own.
    """
    import pytest
    from ray._private import services, utils
    from ray._private.node import Node

    setattr(utils, "get_dashboard_dependency_error", lambda: ImportError("left out by the tests"))
    for part in ("start_monitor", "start_log_monitor", "start_api_server"):
        setattr(Node, part, lambda self, **settings: None)
    start_once = Node.__init__

    def start_node(self, *arguments, **settings):
        given = copy.deepcopy((arguments, settings))  # Ray changes the parameters.
        for is_last in (False, False, False, False, True):
            try:
                return start_once(self, *arguments, **settings)
            except Exception as error:
                if is_last or "timed out during startup" not in str(error):
                    raise
                self.kill_all_processes(check_alive=False)
                arguments, settings = copy.deepcopy(given)

    setattr(Node, "__init__", start_node)
    start = services.start_raylet

    def start_raylet(*arguments, **settings):
        python = on_path(Path(address()).parent).partition(os.pathsep)[0] + "/python"
        # Without a health check by pipe, agents would end, because they are no children of the raylet.
        by_pipe = "RAY_enable_pipe_based_agent_to_parent_health_check"
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(sys, "executable", python)
            patch.setenv(by_pipe, "1")
            return start(*arguments, **settings)

    setattr(services, "start_raylet", start_raylet)


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
    del sys.path[0]  # this folder
    signal.pthread_sigmask(signal.SIG_UNBLOCK, [signal.SIGHUP])  # Ray may be starting, see connect_ray().
    script = serve(socket.socket(fileno=int(sys.argv[1])), sys.argv[2])
    end(lambda: become(*script))
