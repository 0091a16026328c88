"""Measure start-up and speed of a vLLM server on CPU, with the model in the engine's process or another.

    python benchmarks/bench_vllm.py                                   the toy policy, on one and two servers
    python benchmarks/bench_vllm.py --model PATH --servers 1 --requests 32 --max-tokens 32 --concurrency 16

genrm_server.py sets VLLM_ENABLE_V1_MULTIPROCESSING=0, so that vLLM's engine runs the model itself. With 1,
vLLM's default, the model runs in a separate process. Both variants are started alternately, --rounds times.
Each variant then gets --requests requests for --max-tokens tokens through the router, --concurrency at a
time, three times. CPU time is measured for the whole machine, so nothing else should run.
"""

import asyncio
import os
import statistics
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

import aiohttp
import psutil
import tyro

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from genrm_server import Config as ServerConfig  # noqa: E402
from genrm_server import ModelServers  # noqa: E402


@dataclass
class Config:
    """The model, its servers and the requests."""

    model: str = str(ROOT / "toy/models/policy")
    """Folder of the model to serve."""
    servers: tuple[int, ...] = (1, 2)
    """Numbers of servers to try. The servers get equal shares of the cores."""
    concurrency: int = 64
    """Maximum number of concurrent requests."""
    requests: int = 512
    """Number of requests per measurement."""
    max_tokens: int = 64
    """Number of tokens per response."""
    rounds: int = 2
    """Number of times that each variant is started."""


def cpu_seconds() -> float:
    times = psutil.cpu_times()
    return times.user + times.system


async def tokens_per_second(config: Config, address: str, requests: int) -> float:
    room = asyncio.Semaphore(config.concurrency)

    async def ask(session, number):
        prompt = [5, 6, 7 + number % 50] * 20
        body = dict(model="m", prompt=prompt, max_tokens=config.max_tokens, ignore_eos=True)
        async with room, session.post(f"http://{address}/v1/completions", json=body) as answer:
            answer.raise_for_status()
            await answer.read()

    async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0)) as session:
        begun = time.monotonic()
        await asyncio.gather(*(ask(session, number) for number in range(requests)))
        return requests * config.max_tokens / (time.monotonic() - begun)


def measure(config: Config, number: int) -> tuple[float, float, float, float]:
    """Return the seconds and the CPU seconds of the start, the memory in GB, and tokens/s."""
    cpu, begun = cpu_seconds(), time.monotonic()
    with tempfile.TemporaryDirectory() as logs:
        settings = dict(port=0, device="cpu", served_model_name="m", max_model_len=512, log_dir=Path(logs))
        servers = ModelServers(ServerConfig(config.model, num_servers=number, **settings))
        try:
            started = time.monotonic() - begun, cpu_seconds() - cpu
            children = psutil.Process().children(recursive=True)
            memory = sum(child.memory_info().rss for child in children) / 1e9
            address = servers.router_address
            asyncio.run(tokens_per_second(config, address, config.concurrency))  # compiles kernels
            speeds = [asyncio.run(tokens_per_second(config, address, config.requests)) for _ in range(3)]
        finally:
            servers.shutdown()
    return *started, memory, statistics.median(speeds)


def main() -> None:
    config = tyro.cli(Config)
    found = {}
    for _ in range(config.rounds):
        for number in config.servers:
            for way in "10":
                os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = way
                found.setdefault((number, way), []).append(measure(config, number))
    print("| servers | model runs in | start s | CPU s | RSS GB | tokens/s (minimum and maximum) |")
    print("| --- | --- | ---: | ---: | ---: | ---: |")
    for (number, way), rows in found.items():
        seconds, cpu, memory, speeds = zip(*rows)
        median, process = statistics.median, "a separate process" if way == "1" else "the engine"
        start = f"{median(seconds):.0f} | {median(cpu):.0f} | {median(memory):.1f}"
        speed = f"{median(speeds):,.0f} ({min(speeds):,.0f}, {max(speeds):,.0f})"
        print(f"| {number} | {process} | {start} | {speed} |")


if __name__ == "__main__":
    main()
