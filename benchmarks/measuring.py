"""What several benchmarks share: child processes, servers, CPU time, groups, and the line about the machine.

Files of this folder import this one before the repository's files, because it puts them on the path.

Not covered: measurements on a GPU (gpu_models.py).
"""

import asyncio
import contextlib
import json
import os
import platform
import re
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))
from genrm_server import request

CHAT = "/v1/chat/completions"


def machine() -> str:
    """Return the first line of a benchmark: cores, processor, vector units, Python and load."""
    text = Path("/proc/cpuinfo").read_text()
    name = re.search(r"model name\s*: (.*)|$", text)[1] or platform.machine()
    units = sorted({*text.split()} & {"avx2", "avx512f", "avx512_bf16", "amx_bf16"})
    line = f"{os.cpu_count()} cores, {name}, {' '.join(units)}, Python {platform.python_version()}"
    return f"{line}, load {os.getloadavg()[0]:.1f}"


@contextlib.contextmanager
def started(commands: dict[str, list[str]], folder: Path, **environment):
    """Start commands, each with the log FOLDER/NAME.log, and end them with their children afterwards."""
    runs, environment = {}, {"RAY_ADDRESS": "local", "HF_HUB_OFFLINE": "1"} | os.environ | environment
    try:
        for name, command in commands.items():
            with open(folder / f"{name}.log", "w") as log:
                runs[name] = subprocess.Popen(
                    command, cwd=ROOT, env=environment, stdout=log, stderr=log, start_new_session=True
                )
        yield runs
    finally:
        for run in runs.values():
            with contextlib.suppress(ProcessLookupError):
                os.killpg(run.pid, signal.SIGKILL)
            run.wait()


def run_worker(script: str, name: str, job: dict, folder: Path, **environment) -> None:
    """Run `SCRIPT --worker JOB` with the log FOLDER/NAME.log, until the machine is nearly out of memory.

    JOB is the job as JSON. Raises ChildProcessError if the worker fails or is stopped.
    """
    import psutil

    command = [sys.executable, script, "--worker", json.dumps(job, default=str)]
    with started({name: command}, folder, **environment) as runs:
        while runs[name].poll() is None:
            if psutil.virtual_memory().available < 1e9:
                raise ChildProcessError(f"{name}: stopped, because less than 1 GB of RAM was left")
            time.sleep(0.1)
    code = runs[name].returncode
    if code:
        log = (folder / f"{name}.log").read_text()
        raise ChildProcessError(f"{name}: exit code {code}\n{log[-3000:]}")


def error_text(error: Exception) -> str:
    """Return an exception's type and message in one line, which is shortened in the middle."""
    text = " ".join(f"{type(error).__name__}: {error}".split())
    return text if len(text) < 400 else f"{text[:200]} ... {text[-200:]}"


def groups_of(samples: list, size: int = 8) -> list[list]:
    """Return successive groups of `size` samples."""
    return [samples[start : start + size] for start in range(0, len(samples), size)]


@contextlib.contextmanager
def server(port: int, command: list[str]):
    """Start an HTTP server, wait until it answers, and end it afterwards. Yields its process.

    Raises OSError if the server has ended, or has not answered a chat request within 60 s.
    """
    url = f"http://127.0.0.1:{port}{CHAT}"
    body = {"model": "m", "messages": [{"role": "user", "content": "x"}]}
    with tempfile.TemporaryDirectory() as folder, started({"server": command}, Path(folder)) as runs:
        run, end = runs["server"], time.monotonic() + 60
        while request("POST", url, body)[0] != 200:
            if run.poll() is not None or time.monotonic() > end:
                raise OSError(
                    f"{' '.join(command)}: no response on port {port}; run the command by hand to see why"
                )
            time.sleep(0.2)
        yield run


async def serve(handle, port: int) -> None:
    """Serve HTTP requests with this handler until the process ends."""
    from aiohttp import web

    app = web.Application()
    app.router.add_route("*", "/{path:.*}", handle)
    runner = web.AppRunner(app, access_log=None)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", port).start()
    await asyncio.Event().wait()


def cpu_seconds(processes) -> float:
    """Return the CPU time that these processes have used so far."""
    import psutil

    total = 0.0
    for process in processes:
        with contextlib.suppress(psutil.Error):
            total += sum(process.cpu_times()[:2])
    return total
