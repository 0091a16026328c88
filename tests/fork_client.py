"""The client of forked.py, which starts for each process of Ray, so it imports little.

process = Script(["grpo_trainer.py", ...], log, where=ADDRESS)      # like subprocess.Popen
python -I -S fork_client.py ADDRESS ARGUMENT ...                    # like python ARGUMENT ...
"""

import contextlib
import json
import os
import select
import signal
import socket
import sys

NAMESPACES = ["/proc/self/ns/net", "/proc/self/ns/mnt"]


class Script:
    """A running script, with the methods and attributes of subprocess.Popen that the tests use."""

    def __init__(self, arguments, output, errors=None, cwd=None, env=None, where=None, stdin=None):
        self.connection = socket.socket(socket.AF_UNIX)
        self.connection.connect(where)
        environment = dict(os.environ if env is None else env)
        folder = str(cwd or os.getcwd())
        request = [*map(str, arguments)], folder, environment, list(os.sched_getaffinity(0))
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
            assert code, "the process from which scripts are forked has ended"
            self.returncode = int.from_bytes(code, "little", signed=True)
        return self.returncode

    def send_signal(self, number) -> None:
        with contextlib.suppress(ConnectionError):  # The script may have ended.
            self.connection.sendall(bytes([number]))

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)


if __name__ == "__main__":
    where, *given = sys.argv[1:]
    script = Script(given, sys.stdout, sys.stderr, where=where, stdin=sys.stdin)
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda number, _: script.send_signal(number))
    code = script.wait()
    sys.exit(code if code >= 0 else 128 - code)
