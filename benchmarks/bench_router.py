"""Measure how fast router.py is, and print a Markdown table.

    python benchmarks/bench_router.py            # needs nginx for the upstreams: apt-get install nginx-light
    python benchmarks/bench_router.py --sglang-router /tmp/v/bin/python --vllm-router /tmp/v/bin/vllm-router

Through each router, 64 connections send POSTs of 4 KiB, one after the other, to two nginx servers that
respond immediately. The routers take turns for --rounds rounds, and the table shows medians: requests/s, p50
and p99 latency, responses other than 200, and the router's CPU time per request, which varies least. For
comparison, the table includes the same load without a router, a bare aiohttp proxy (the cost of the HTTP
library alone), and the Rust routers of sglang and vllm if they are found.

Not covered: TLS, streams, real models, routers on several cores, and routing policies.
"""

import asyncio
import contextlib
import shutil
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from functools import partial
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
# A chat completion request of 4,096 bytes, which all routers parse.
BODY = b'{"model": "m", "messages": [{"role": "user", "content": "%s"}]}' % (b"x" * 4035)
NGINX = """daemon off; worker_processes 1; pid {folder}/{port}.pid;
error_log {folder}/{port}.log;
events {{ worker_connections 4096; }}
http {{ access_log off; client_max_body_size 64m; client_body_buffer_size 128k; keepalive_requests 100000000;
server {{ listen 127.0.0.1:{port};
location / {{ default_type application/json; return 200 '{{"ok": true}}'; }} }} }}"""


@dataclass
class Config:
    """Measure the speed of router.py."""

    seconds: float = 8.0  # Duration of each measurement in seconds.
    rounds: int = 3  # Number of rounds. The table shows medians.
    sglang_router: str = ""  # Python that can import sglang_router. Empty: this Python, if it can.
    vllm_router: str = ""  # Path of the vllm-router program. Empty: search PATH for it.


# ---- load ----------------------------------------------------------------------------------------


@dataclass
class Client(asyncio.Protocol):
    """A connection that sends the same request again as soon as the response is complete.

    The client is minimal, because the load should need little CPU: responses must have a Content-Length.
    """

    data: bytes
    latencies: list[float]
    bad: list[bytes]
    buffer: bytes = b""
    stopped: bool = False

    def connection_made(self, transport):
        self.transport = transport
        self.ended = asyncio.get_running_loop().create_future()
        self.send()

    def send(self):
        self.begun = time.perf_counter()
        self.transport.write(self.data)

    def data_received(self, data):
        self.buffer += data
        head, found, body = self.buffer.partition(b"\r\n\r\n")
        if not found or len(body) < int(head.lower().partition(b"content-length:")[2].split(b"\r\n", 1)[0]):
            return
        self.latencies.append(time.perf_counter() - self.begun)
        if head[9:12] != b"200":
            self.bad.append(head[:30])
        self.buffer = b""
        if self.stopped:
            self.transport.close()
        else:
            self.send()

    def connection_lost(self, error):
        if not self.stopped:
            self.bad.append(b"connection lost")
        self.ended.set_result(None)


async def load(port: int, seconds: float) -> tuple[int, list[float]]:
    """Return the number of requests, and the figures: requests/s, p50 and p99 in ms, and failures."""
    data = (
        b"POST %s HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Type: application/json\r\n"
        b"Content-Length: %d\r\n\r\n%s" % (CHAT.encode(), len(BODY), BODY)
    )
    latencies, bad, clients = [], [], []
    loop = asyncio.get_running_loop()
    begun = time.perf_counter()
    for _ in range(CONNECTIONS):
        _, client = await loop.create_connection(partial(Client, data, latencies, bad), "127.0.0.1", port)
        clients.append(client)
    await asyncio.sleep(seconds)
    for client in clients:
        client.stopped = True
    await asyncio.wait([client.ended for client in clients], timeout=10)
    count = len(latencies)
    rate = count / (time.perf_counter() - begun)
    latencies.sort()
    p50, p99 = (1000 * latencies[int(count * part)] for part in (0.5, 0.99))
    return count, [rate, p50, p99, len(bad)]


# ---- what is measured ----------------------------------------------------------------------------


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


async def measure_router(command: list[str], seconds: float) -> list[float]:
    """Return the figures of a router, with its CPU time per request in ms."""
    port = unused_port()
    with server(port, [*command, str(port)]) as run:
        await load(port, 1.0)  # warm up
        process = [psutil.Process(run.pid)]
        before = cpu_seconds(process)
        count, figures = await load(port, seconds)
        return [*figures, 1000 * (cpu_seconds(process) - before) / count]


async def compare_routers(config: Config) -> None:
    if not shutil.which("nginx"):
        raise OSError("nginx was not found; run apt-get install nginx-light")
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
            _, figures = await load(ports[0], config.seconds)
            rounds["no router (nginx itself)"].append([*figures, 0.0])
            for name, command in commands.items():
                rounds[name].append(await measure_router(command, config.seconds))
    print(f"{CONNECTIONS} connections, {len(BODY)} bytes, {config.rounds} rounds of {config.seconds:g} s\n")
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
        uvloop.run(compare_routers(tyro.cli(Config)))


if __name__ == "__main__":
    main()
