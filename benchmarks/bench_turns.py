"""Measure the benefit of session affinity: multi-turn trajectories on two CPU vLLM servers behind the router.

    python benchmarks/bench_turns.py --model PATH

Each turn of a trajectory sends all tokens so far, gets --written new ones, and adds --observed tokens of a
tool. With affinity, every request has its trajectory's X-Session-Id, so all turns go to the same server,
which still has the keys and values of earlier turns. Without affinity, each request goes to the least loaded
server. Both variants are measured alternately, --rounds times, with new prompts each time. Nothing else
should run.
"""

import asyncio
import random
import re
import statistics
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

import aiohttp
import tyro

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

import genrm_server  # noqa: E402
from bench_router import machine  # noqa: E402


@dataclass
class Config:
    """The model and the shape of the trajectories."""

    model: str = str(ROOT / "toy/models/policy")  # Folder of the model.
    servers: int = 2  # Number of vLLM servers.
    trajectories: int = 16  # Number of concurrent trajectories per round.
    turns: int = 8  # Number of turns per trajectory.
    prompt: int = 256  # Number of tokens of the first prompt.
    written: int = 16  # Number of tokens that the model writes per turn.
    observed: int = 48  # Number of tokens that the tool adds per turn.
    tool_seconds: float = 0.0  # Mean duration of a tool call in seconds (exponentially distributed).
    rounds: int = 3  # Number of rounds per variant. The table shows the median.


async def trajectory(session, config: Config, name: str, headers: dict) -> int:
    """Run one trajectory. Return the number of tokens that the model wrote."""
    tokens = random.Random(name)
    ids = [tokens.randrange(5, 250) for _ in range(config.prompt)]
    written = 0
    for _ in range(config.turns):
        body = dict(model="m", prompt=ids, max_tokens=config.written, ignore_eos=True, return_token_ids=True)
        async with session.post("/v1/completions", json=body, headers=headers) as answer:
            answer.raise_for_status()
            (choice,) = (await answer.json())["choices"]
        written += len(choice["token_ids"])
        ids = ids + choice["token_ids"] + [tokens.randrange(5, 250) for _ in range(config.observed)]
        if config.tool_seconds:
            await asyncio.sleep(tokens.expovariate(1 / config.tool_seconds))
    return written


async def play(address: str, config: Config, round_: str, has_affinity: bool) -> float:
    """Run all trajectories of a round. Return the number of tokens written per second."""
    calls = []
    limits = dict(connector=aiohttp.TCPConnector(limit=0), timeout=aiohttp.ClientTimeout())
    async with aiohttp.ClientSession(f"http://{address}", **limits) as session:
        start = time.perf_counter()
        for number in range(config.trajectories):
            name = f"{round_} {number}"
            headers = {"X-Session-Id": name} if has_affinity else {}
            calls.append(trajectory(session, config, name, headers))
        written = await asyncio.gather(*calls)
        return sum(written) / (time.perf_counter() - start)


def prefix_cache(servers) -> tuple[float, float]:
    """Return how many prompt tokens the servers have received, and how many were in a prefix cache."""
    found = {"queries": 0.0, "hits": 0.0}
    for slot in servers.slots:
        _, text = genrm_server.request("GET", slot.url + "/metrics", api_key=servers.config.server_key)
        for kind in found:
            lines = re.findall(rf"^vllm:prefix_cache_{kind}_total\S* (\S+)$", text, re.M)
            found[kind] += sum(map(float, lines))
    return found["queries"], found["hits"]


def main() -> None:
    config = tyro.cli(Config, description=__doc__)
    longest = config.prompt + config.turns * (config.written + config.observed)
    settings = genrm_server.Config(config.model, config.servers, port=0, served_model_name="m",
                                   max_model_len=longest, log_dir=Path(tempfile.mkdtemp()))  # fmt: skip
    servers = genrm_server.ModelServers(settings)
    speeds = {True: [], False: []}
    shares = {True: [], False: []}
    try:
        asyncio.run(play(servers.router_address, config, "warm-up", True))
        for number in range(config.rounds):
            for has_affinity in (True, False):
                queries, hits = prefix_cache(servers)
                name = f"{number} {has_affinity}"
                speed = asyncio.run(play(servers.router_address, config, name, has_affinity))
                speeds[has_affinity].append(speed)
                new_queries, new_hits = prefix_cache(servers)
                shares[has_affinity].append((new_hits - hits) / max(new_queries - queries, 1))
    finally:
        servers.shutdown()
    shape = f"{config.trajectories} trajectories of {config.turns} turns, {longest} tokens at the end"
    print(f"{machine()}; {shape}\n")
    print("| | tokens written per second | prompt tokens found in a prefix cache |\n| --- | --- | --- |")
    for has_affinity, label in ((True, "X-Session-Id"), (False, "least loaded")):
        speed = statistics.median(speeds[has_affinity])
        print(f"| {label} | {speed:.1f} | {statistics.median(shares[has_affinity]):.0%} |")


if __name__ == "__main__":
    main()
