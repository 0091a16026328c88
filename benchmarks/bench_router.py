"""Measure how fast router.py is and which routing policy wins when. Prints two Markdown tables.

    python benchmarks/bench_router.py            # needs nginx for the upstreams: apt-get install nginx-light
    python benchmarks/bench_router.py --sglang-router /tmp/v/bin/python --vllm-router /tmp/v/bin/vllm-router

Table 1 measures proxying. Through each router, --connections connections send POSTs of --body-bytes, one
after the other, to two nginx servers that respond immediately. The routers take turns for --rounds rounds,
and the table shows medians: requests/s, p50 and p99 latency, responses other than 200, and the router's CPU
time per request, which varies least. For comparison, the table includes the same load without a router, a
bare aiohttp proxy (the cost of the HTTP library alone), and the Rust routers of sglang and vllm if they are
found.

Table 2 compares policies. --skew-requests requests go through round_robin and least_loaded to four fake
servers, each of which works on eight requests at a time. Response times range from constant to heavily
skewed (log-normal), and in one case one server is slow. Both policies get the same response times. The table
shows the wall time until the last response. The best of --rounds counts, because noise only adds time.

Not covered: TLS, streams, real models, and routers on several cores.
"""

import asyncio
import math
import os
import platform
import random
import re
import shutil
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

import aiohttp
import tyro
import uvloop
from aiohttp import web

ROOT = Path(__file__).parent.parent
sys.path.insert(0, str(ROOT))


@dataclass
class Config:
    """Measure the speed of router.py and of its policies."""

    connections: int = 64  # Number of concurrent connections.
    body_bytes: int = 4096  # Size of a request body in bytes.
    seconds: float = 8.0  # Duration of each measurement in seconds.
    rounds: int = 3  # Number of rounds. Table 1 shows medians, table 2 the best.
    skew_requests: int = 2000  # Number of requests per policy and kind of response times; 0: no table 2.
    sglang_router: str = ""  # Python that can import sglang_router. Empty: this Python, if it can.
    vllm_router: str = ""  # Path of the vllm-router program. Empty: search PATH for it.


# ---- load ----------------------------------------------------------------------------------------


class Client(asyncio.Protocol):
    """A connection that sends the same request again as soon as the response is complete.

    The client is minimal, because the load should need little CPU: responses must have a Content-Length.
    """

    def __init__(self, data, latencies, bad):
        self.data = data
        self.latencies = latencies
        self.bad = bad
        self.buffer = b""
        self.stopped = False
        self.ended = asyncio.get_running_loop().create_future()

    def connection_made(self, transport):
        self.transport = transport
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


def chat_request(size: int) -> bytes:
    """Return a chat completion request of `size` bytes, which the Rust routers parse."""
    start, end = b'{"model": "m", "messages": [{"role": "user", "content": "', b'"}]}'
    return start + b"x" * max(1, size - len(start) - len(end)) + end


async def load(port: int, config: Config, seconds: float) -> tuple[list[float], int, float]:
    """Return the latencies in seconds, the number of failures, and the duration in seconds."""
    body = chat_request(config.body_bytes)
    data = (
        b"POST /v1/chat/completions HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Type: application/json\r\n"
        b"Content-Length: %d\r\n\r\n%s" % (len(body), body)
    )
    latencies, bad = [], []
    loop = asyncio.get_running_loop()
    begun = time.perf_counter()
    clients = []
    for _ in range(config.connections):
        client = Client(data, latencies, bad)
        await loop.create_connection(lambda: client, "127.0.0.1", port)
        clients.append(client)
    await asyncio.sleep(seconds)
    for client in clients:
        client.stopped = True
    await asyncio.wait([client.ended for client in clients], timeout=10)
    return latencies, len(bad), time.perf_counter() - begun


# ---- what is measured ----------------------------------------------------------------------------


async def bare_proxy(port: int, upstreams: list[str]) -> None:
    """Run a minimal aiohttp proxy without retries, health checks, time limits or streaming."""
    turn = 0
    async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0)) as session:

        async def handle(request):
            nonlocal turn
            turn += 1
            body = await request.read()
            headers = {
                name: value
                for name, value in request.headers.items()
                if name not in ("Host", "Content-Length")
            }
            async with session.request(
                request.method, upstreams[turn % len(upstreams)] + request.path_qs, data=body, headers=headers
            ) as answer:
                return web.Response(
                    body=await answer.read(),
                    status=answer.status,
                    headers={"Content-Type": answer.headers["Content-Type"]},
                )

        app = web.Application(client_max_size=64 << 20)
        app.router.add_route("*", "/{path:.*}", handle)
        runner = web.AppRunner(app, access_log=None)
        await runner.setup()
        await web.TCPSite(runner, "127.0.0.1", port).start()
        await asyncio.Event().wait()


def free_port() -> int:
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        return sock.getsockname()[1]


def start_nginx(folder: Path, port: int) -> subprocess.Popen:
    settings = folder / f"{port}.conf"
    settings.write_text(f"""daemon off; worker_processes 1; pid {folder}/{port}.pid;
error_log {folder}/{port}.log;
events {{ worker_connections 4096; }}
http {{ access_log off; client_max_body_size 64m; client_body_buffer_size 128k; keepalive_requests 100000000;
server {{ listen 127.0.0.1:{port};
location / {{ default_type application/json; return 200 '{{"ok": true}}'; }} }} }}""")
    return subprocess.Popen(["nginx", "-c", str(settings)])


def find_routers(config: Config, upstreams: list[str]) -> dict[str, list[str]]:
    """Return {router: command}. The caller appends the port to the command."""
    commands = {
        "router.py": [sys.executable, str(ROOT / "router.py"), "--workers", *upstreams, "--port"],
        "bare aiohttp proxy": [sys.executable, __file__, "--bare-proxy", *upstreams],
    }
    python = config.sglang_router or sys.executable
    if subprocess.run([python, "-c", "import sglang_router"], capture_output=True).returncode == 0:
        commands["sglang-router (Rust)"] = [
            python,
            "-m",
            "sglang_router.launch_router",
            "--policy",
            "round_robin",
            "--host",
            "127.0.0.1",
            "--disable-circuit-breaker",
            "--log-level",
            "warn",
            "--worker-urls",
            *upstreams,
            "--port",
        ]
    program = config.vllm_router or shutil.which("vllm-router")
    if program:
        commands["vllm-router (Rust)"] = [
            program,
            "--policy",
            "round_robin",
            "--host",
            "127.0.0.1",
            "--log-level",
            "warning",
            "--worker-urls",
            *upstreams,
            "--port",
        ]
    return commands


def cpu_seconds(pid: int) -> float:
    """Return the CPU time of a process and all its threads."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


async def wait_for(port: int, process: subprocess.Popen, limit: float = 60) -> None:
    """Wait until POSTs return 200."""
    end = time.monotonic() + limit
    async with aiohttp.ClientSession() as session:
        while process.poll() is None and time.monotonic() < end:
            try:
                async with session.post(
                    f"http://127.0.0.1:{port}/v1/chat/completions",
                    data=chat_request(0),
                    headers={"Content-Type": "application/json"},
                ) as answer:
                    if answer.status == 200:
                        return
            except aiohttp.ClientError:
                pass
            await asyncio.sleep(0.2)
    command = " ".join(map(str, process.args))
    raise OSError(f"{command}: no response on port {port}; run the command by hand to see why")


async def compare_routers(config: Config) -> None:
    if not shutil.which("nginx"):
        raise OSError("nginx was not found; run apt-get install nginx-light")
    with tempfile.TemporaryDirectory() as folder:
        ports = [free_port(), free_port()]
        servers = [start_nginx(Path(folder), port) for port in ports]
        rows: dict[str, list] = {}
        try:
            for port, server in zip(ports, servers):
                await wait_for(port, server)
            commands = find_routers(config, [f"http://127.0.0.1:{port}" for port in ports])
            for _ in range(config.rounds):
                latencies, failures, seconds = await load(ports[0], config, config.seconds)
                rows.setdefault("no router (nginx itself)", []).append((latencies, failures, seconds, 0.0))
                for name, command in commands.items():
                    port = free_port()
                    process = subprocess.Popen(
                        [*command, str(port)], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
                    )
                    try:
                        await wait_for(port, process)
                        await load(port, config, 1.0)  # warm up
                        before = cpu_seconds(process.pid)
                        latencies, failures, seconds = await load(port, config, config.seconds)
                        rows.setdefault(name, []).append(
                            (latencies, failures, seconds, cpu_seconds(process.pid) - before)
                        )
                    finally:
                        process.terminate()
                        process.wait()
        finally:
            for server in servers:
                server.terminate()
                server.wait()
    print(
        f"{config.connections} connections, {config.body_bytes} bytes, {config.rounds} rounds of "
        f"{config.seconds:g} s, uvloop\n"
    )
    print(
        "| router | requests/s | p50 ms | p99 ms | failures | CPU ms per request |\n"
        "| --- | ---: | ---: | ---: | ---: | ---: |"
    )
    for name, rounds in rows.items():
        figures = []
        for latencies, _, seconds, cpu in rounds:
            ordered = sorted(latencies)
            figures.append(
                (
                    len(ordered) / seconds,
                    1000 * ordered[len(ordered) // 2],
                    1000 * ordered[int(len(ordered) * 0.99)],
                    1000 * cpu / len(ordered),
                )
            )
        rate, p50, p99, cpu = (statistics.median(column) for column in zip(*figures))
        failures = sum(one[1] for one in rounds)
        print(
            f"| {name} | {rate:,.0f} | {p50:.1f} | {p99:.1f} | {failures} | {f'{cpu:.3f}' if cpu else '-'} |"
        )


# ---- policies ------------------------------------------------------------------------------------


class FakeServer:
    """A server with eight slots. A request takes the seconds in its path, multiplied by `slowness`."""

    def __init__(self, slowness: float):
        self.slowness, self.slots = slowness, asyncio.Semaphore(8)

    async def handle(self, request):
        if request.raw_path == "/health":
            return web.Response()
        async with self.slots:
            await asyncio.sleep(float(request.raw_path[1:]) * self.slowness)
        return web.Response(text="done")


async def time_policy(policy: str, slownesses: list[float], times: list[float]) -> float:
    """Return the seconds until all requests are answered, with 64 concurrent requests."""
    import router as ours

    ours.say = lambda text: None  # Otherwise the router would print a line per server and round.
    runners, urls = [], []
    for slowness in slownesses:
        runner = web.ServerRunner(web.Server(FakeServer(slowness).handle, access_log=None))
        await runner.setup()
        port = free_port()
        await web.TCPSite(runner, "127.0.0.1", port).start()
        runners.append(runner)
        urls.append(f"http://127.0.0.1:{port}")
    router = ours.Router(ours.Config(workers=tuple(urls), port=0, policy=policy, forward=("/",)))
    port = await router.start()
    waiting = iter(times)

    async def client(session):
        for seconds in waiting:
            async with session.get(f"http://127.0.0.1:{port}/{seconds:.6f}") as answer:
                if answer.status != 200:
                    raise RuntimeError(f"{policy}: {answer.status} {await answer.text()}")

    async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0)) as session:
        begun = time.perf_counter()
        await asyncio.gather(*(client(session) for _ in range(64)))
        spent = time.perf_counter() - begun
    await router.stop()
    for runner in runners:
        await runner.cleanup()
    return spent


async def compare_policies(config: Config) -> None:
    rng = random.Random(0)
    mean = 0.1
    cases = {
        "constant": (0.0, [1, 1, 1, 1]),
        "log-normal, sigma 0.5": (0.5, [1, 1, 1, 1]),
        "log-normal, sigma 1": (1.0, [1, 1, 1, 1]),
        "log-normal, sigma 1.5": (1.5, [1, 1, 1, 1]),
        "constant, one server 3 times slower": (0.0, [1, 1, 1, 3]),
        "log-normal, sigma 1, one server 3 times slower": (1.0, [1, 1, 1, 3]),
    }
    print(
        f"\n{config.skew_requests} requests, 64 at a time, four servers with eight slots, mean response "
        f"time {1000 * mean:.0f} ms, {config.rounds} rounds\n"
    )
    print("| response times | lower bound s | round_robin s | least_loaded s | round_robin / least_loaded |")
    print("| --- | ---: | ---: | ---: | ---: |")
    for name, (sigma, slownesses) in cases.items():
        times = [rng.lognormvariate(-(sigma**2) / 2, sigma) * mean for _ in range(config.skew_requests)]
        slots = sum(8 / slowness for slowness in slownesses)
        best = max(sum(times) / slots, max(times))  # all slots busy, or one long request
        spent = {"round_robin": math.inf, "least_loaded": math.inf}
        for _ in range(config.rounds):
            for policy in spent:
                seconds = await time_policy(policy, slownesses, times)
                spent[policy] = min(spent[policy], seconds)
        print(
            f"| {name} | {best:.2f} | {spent['round_robin']:.2f} | {spent['least_loaded']:.2f} | "
            f"{spent['round_robin'] / spent['least_loaded']:.2f} |",
            flush=True,
        )


def machine() -> str:
    """Return the first line of every benchmark: cores, processor, vector units, Python and load."""
    text = Path("/proc/cpuinfo").read_text()
    name = re.search(r"model name\s*: (.*)", text)
    units = [
        unit for unit in ("avx2", "avx512f", "avx512_bf16", "amx_bf16") if re.search(rf"\b{unit}\b", text)
    ]
    return (
        f"{os.cpu_count()} cores, {name[1] if name else platform.machine()}, {' '.join(units) or 'no AVX2'}, "
        f"Python {platform.python_version()}, load {os.getloadavg()[0]:.1f}"
    )


async def measure(config: Config) -> None:
    print(machine())
    await compare_routers(config)
    if config.skew_requests:
        await compare_policies(config)


def main() -> None:
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        if sys.argv[1:2] == ["--bare-proxy"]:  # the script's own bare proxy
            runner.run(bare_proxy(int(sys.argv[-1]), sys.argv[2:-1]))
            return
        try:
            runner.run(measure(tyro.cli(Config)))
        except (ValueError, OSError) as error:
            print(f"error: {error}", file=sys.stderr)
            raise SystemExit(2) from None


if __name__ == "__main__":
    main()
