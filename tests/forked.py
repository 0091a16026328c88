"""Start Python processes that have already imported PyTorch and transformers, which takes five seconds.

They are forks of a process that has done nothing but this import. `forked.Popen` and `forked.run` replace
subprocess.Popen and subprocess.run for commands that start with sys.executable.
"""

import array
import atexit
import ctypes
import inspect
import json
import os
import socket
import subprocess
import sys

PARENT = """
import json, os, socket, sys, types
import torch.distributed.checkpoint
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaForCausalLM
asked = socket.socket(fileno=int(sys.argv[1]))
while True:
    text, fds, *_ = socket.recv_fds(asked, 1 << 20, 3)
    if not text:
        os._exit(0)
    pids, pid = os.pipe()
    if (between := os.fork()) == 0:
        if (child := os.fork()) == 0:
            break
        os.write(pid, b"%d" % child)
        os._exit(0)  # Now the child is a child of the tests' process.
    os.waitpid(between, 0)
    asked.send(os.read(pids, 20))
    for fd in (*fds, pids, pid):
        os.close(fd)
for fd in (asked.detach(), pids, pid):
    os.close(fd)
for number, fd in enumerate(fds):
    os.dup2(fd, number)
    os.close(fd)
given = json.loads(text)
if given["session"]:
    os.setsid()
os.chdir(given["cwd"])
os.environ.clear()
os.environ.update(given["env"])
unbuffered = "-u" in given["arguments"][:1]
sys.argv = given["arguments"][unbuffered:]
sys.stdin = sys.__stdin__ = open(0, closefd=False)
sys.stdout = sys.__stdout__ = open(1, "w", closefd=False)
sys.stderr = sys.__stderr__ = open(2, "w", buffering=1, closefd=False, errors="backslashreplace")
sys.stdout.reconfigure(write_through=unbuffered)
sys.path[0:1] = ["", *filter(None, os.environ.get("PYTHONPATH", "").split(":"))]
__main__ = sys.modules["__main__"] = types.ModuleType("__main__")
__main__.__builtins__ = __builtins__
if sys.argv[0] == "-c":
    program, name = sys.argv.pop(1), "<string>"
elif sys.argv[0] == "-m":
    import importlib.util
    sys.path[0] = os.getcwd()
    spec = importlib.util.find_spec(sys.argv.pop(1))
    if spec.submodule_search_locations:
        spec = importlib.util.find_spec(spec.name + ".__main__")
    __main__.__spec__, __main__.__package__ = spec, spec.parent
    name = __main__.__file__ = sys.argv[0] = spec.origin
    program = open(name).read()
else:
    name = __main__.__file__ = sys.argv[0]
    sys.path[0] = os.path.dirname(os.path.realpath(name))
    program = open(name).read()
exec(compile(program, name, "exec"), vars(__main__))
"""
SUBREAPER = 36  # prctl option: orphaned descendants become children of this process
ASKED = {}  # process id -> connection to the process that forks


def ask_parent(request, fds):
    """Let the process that forks start a child, and return the child's process id."""
    if os.getpid() not in ASKED:
        here, there = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with there:
            command = [sys.executable, "-c", PARENT, str(there.fileno())]
            environment = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"}
            parent = subprocess.Popen(command, pass_fds=[there.fileno()], env=environment, cwd="/",
                                      stdin=subprocess.DEVNULL)  # fmt: skip
        atexit.register(lambda: (here.close(), parent.wait()))
        ASKED[os.getpid()] = here
    prctl, connection = ctypes.CDLL(None).prctl, ASKED[os.getpid()]
    prctl(SUBREAPER, 1, 0, 0, 0)
    try:
        rights = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", fds))]
        connection.sendmsg([json.dumps(request).encode()], rights)
        return int(connection.recv(20))
    finally:
        prctl(SUBREAPER, 0, 0, 0, 0)


class Popen(subprocess.Popen):
    def _execute_child(self, *arguments):
        given = inspect.signature(subprocess.Popen._execute_child).bind(self, *arguments).arguments
        executable, *rest = map(str, given["args"])
        assert executable == sys.executable and not given["preexec_fn"] and not given["shell"]
        request = {"arguments": rest, "cwd": str(given["cwd"] or os.getcwd()),
                   "env": dict(given["env"] or os.environ), "session": given["start_new_session"]}
        fds = [given["p2cread"], given["c2pwrite"], given["errwrite"]]
        try:
            self.pid = ask_parent(request, [number if fd == -1 else fd for number, fd in enumerate(fds)])
            self._child_created = True
        finally:
            names = ("p2cread", "p2cwrite", "c2pread", "c2pwrite", "errread", "errwrite")
            self._close_pipe_fds(*(given[name] for name in names))


def run(command, *, capture_output=False, timeout=None, **options):
    """Run a command as subprocess.run does."""
    if capture_output:
        options |= dict(stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    with Popen(command, **options) as process:
        try:
            out, err = process.communicate(timeout=timeout)
        except BaseException:
            process.kill()
            raise
    return subprocess.CompletedProcess(command, process.returncode, out, err)
