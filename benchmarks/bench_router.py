"""Measure how fast router.py is, and print a Markdown table.

    python benchmarks/bench_router.py            # needs two programs: apt-get install nginx-light wrk
    python benchmarks/bench_router.py --sglang-router /tmp/v/bin/python --vllm-router /tmp/v/bin/vllm-router

Through each router, wrk sends POSTs of 4 KiB on 64 connections to two nginx servers, which respond
immediately. The routers take turns for --rounds rounds, and the table shows medians: requests/s, p50 and p99
latency, failed requests, and the router's CPU time per request, which varies least. For comparison, the table
includes the same load without a router, a bare aiohttp proxy (the cost of the HTTP library alone), and the
Rust routers of sglang and vllm if they are found.

Not covered: TLS, streams, real models, routers on several cores, and routing policies.
"""

import contextlib
import shutil
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from statistics import median

import aiohttp
import psutil
import tyro
import uvloop
from aiohttp import web
from aiohttp.test_utils import unused_port
from measuring import CHAT, ROOT, cpu_seconds, machine, serve, server

from command_line import one_line_errors
from toy.report import table

CONNECTIONS = 64
# wrk sends a chat completion request of 4,096 bytes, which all routers parse.
WRK = """wrk.method = "POST"
wrk.headers["Content-Type"] = "application/json"
wrk.body = '{"model": "m", "messages": [{"role": "user", "content": "' .. string.rep("x", 4035) .. '"}]}'
function done(summary, latency)
  local failures = summary.errors
  print(summary.requests, summary.duration, latency:percentile(50), latency:percentile(99),
        failures.connect, failures.read, failures.write, failures.status, failures.timeout)
end"""
NGINX = """daemon off; worker_processes 1; pid {folder}/{port}.pid;
error_log {folder}/{port}.log;
events {{ worker_connections 4096; }}
http {{ access_log off; client_max_body_size 64m; client_body_buffer_size 128k; keepalive_requests 100000000;
server {{ listen 127.0.0.1:{port};
location / {{ default_type application/json; return 200 '{{"ok": true}}'; }} }} }}"""


@dataclass
class Config:
    """Measure the speed of router.py."""

    seconds: int = 8  # Duration of each measurement in seconds.
    rounds: int = 3  # Number of rounds. The table shows medians.
    sglang_router: str = ""  # Python that can import sglang_router. Empty: this Python, if it can.
    vllm_router: str = ""  # Path of the vllm-router program. Empty: search PATH for it.


def load(port: int, seconds: int) -> tuple[int, list[float]]:
    """Return the number of requests, and the figures: requests/s, p50 and p99 in ms, and failures."""
    with tempfile.NamedTemporaryFile("w", suffix=".lua") as script:
        script.write(WRK)
        script.flush()
        command = ["wrk", "--threads=1", f"--connections={CONNECTIONS}", f"--duration={seconds}s"]
        command += [f"--script={script.name}", f"http://127.0.0.1:{port}{CHAT}"]
        shown = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    count, microseconds, p50, p99, *failures = map(int, shown.splitlines()[-1].split())
    return count, [1e6 * count / microseconds, p50 / 1000, p99 / 1000, sum(failures)]


async def bare_proxy(port: int, upstreams: list[str]) -> None:
    """Run a minimal aiohttp proxy without retries, health checks, time limits or streaming."""
    turn = 0
    async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0)) as session:

        async def handle(request):
            nonlocal turn
            turn += 1
            url, body = upstreams[turn % len(upstreams)] + request.path_qs, await request.read()
            headers = {"Content-Type": request.headers["Content-Type"]}
            async with session.request(request.method, url, data=body, headers=headers) as answer:
                return web.Response(
                    body=await answer.read(),
                    status=answer.status,
                    headers={"Content-Type": answer.headers["Content-Type"]},
                )

        await serve(handle, port)


def find_routers(config: Config, upstreams: list[str]) -> dict[str, list[str]]:
    """Return {router: command}. The caller appends the port to the command."""
    commands = {
        "router.py": [sys.executable, str(ROOT / "router.py"), "--workers", *upstreams, "--port"],
        "bare aiohttp proxy": [sys.executable, __file__, "--bare-proxy", *upstreams],
    }
    flags = ["--policy=round_robin", "--host=127.0.0.1", "--worker-urls", *upstreams, "--port"]
    python = config.sglang_router or sys.executable
    if subprocess.run([python, "-c", "import sglang_router"], capture_output=True).returncode == 0:
        module = [python, "-m", "sglang_router.launch_router", "--disable-circuit-breaker"]
        commands["sglang-router (Rust)"] = [*module, "--log-level=warn", *flags]
    program = config.vllm_router or shutil.which("vllm-router")
    if program:
        commands["vllm-router (Rust)"] = [program, "--log-level=warning", *flags]
    return commands


def measure_router(command: list[str], seconds: int) -> list[float]:
    """Return the figures of a router, with its CPU time per request in ms."""
    port = unused_port()
    with server(port, [*command, str(port)]) as run:
        load(port, 1)  # warm up
        process = [psutil.Process(run.pid)]
        before = cpu_seconds(process)
        count, figures = load(port, seconds)
        return [*figures, 1000 * (cpu_seconds(process) - before) / count]


def compare_routers(config: Config) -> None:
    if not (shutil.which("nginx") and shutil.which("wrk")):
        raise OSError("nginx or wrk was not found; run apt-get install nginx-light wrk")
    print(machine())
    with tempfile.TemporaryDirectory() as folder, contextlib.ExitStack() as stack:
        ports = [unused_port(), unused_port()]
        for port in ports:
            settings = Path(folder, f"{port}.conf")
            settings.write_text(NGINX.format(folder=folder, port=port))
            stack.enter_context(server(port, ["nginx", "-c", str(settings)]))
        commands = find_routers(config, [f"http://127.0.0.1:{port}" for port in ports])
        rounds = {name: [] for name in ("no router (nginx itself)", *commands)}
        for _ in range(config.rounds):
            _, figures = load(ports[0], config.seconds)
            rounds["no router (nginx itself)"].append([*figures, 0.0])
            for name, command in commands.items():
                rounds[name].append(measure_router(command, config.seconds))
    print(f"{CONNECTIONS} connections, {config.rounds} rounds of {config.seconds} s\n")
    rows = []
    for name, measured in rounds.items():
        rate, p50, p99, failures, cpu = zip(*measured)
        cells = [f"{median(rate):,.0f}", f"{median(p50):.1f}", f"{median(p99):.1f}"]
        rows.append([name, *cells, str(sum(failures)), f"{median(cpu):.3f}"])
    heads = ["router", "requests/s", "p50 ms", "p99 ms", "failures", "CPU ms per request"]
    print(table(heads, *rows), flush=True)


def main() -> None:
    if sys.argv[1:2] == ["--bare-proxy"]:  # the script's own bare proxy
        return uvloop.run(bare_proxy(int(sys.argv[-1]), sys.argv[2:-1]))
    with one_line_errors():
        compare_routers(tyro.cli(Config))


if __name__ == "__main__":
    main()
