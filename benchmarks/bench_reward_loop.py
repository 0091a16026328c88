"""Measure how fast the reward loop is, and how much of the judge's time it hides behind rollouts.

    python benchmarks/bench_reward_loop.py                  both parts, about 6 minutes
    python benchmarks/bench_reward_loop.py --part speed     samples/s, CPU time and memory
    python benchmarks/bench_reward_loop.py --part overlap   a step with rewards streamed or in a batch

Part "speed" scores 1,024 and 4,096 samples with a sync rule, and with one that queries a fake judge through
router.py (one pooled HTTP session per worker). It does so with 1, 2 and 4 workers in a local Ray.
  batch      score_batch of all samples, best of three
  streamed   one score_one per sample from one event loop, in 512 lanes: each lane sends a sample as soon as
             the result of its previous one arrives
  CPU        milliseconds of CPU time per sample in the batch: the sum over driver, Ray, workers and grading
             processes, plus the router and the fake judge in the second case
  memory     resident memory (RSS) of workers and grading processes (two processes each, because one watches
             the other); shared pages count more than once

Part "overlap" simulates the rollouts and the judge by waiting. Lengths are log-normal with the paper's means
of 1.1k tokens for a rollout and 3.0k for a critique. Half of the answers are correct, and only these are
judged. The judge is two HTTP servers behind router.py, each with a limited number of concurrent critiques.
Not covered: a GPU that rollouts and judge share.
"""

import asyncio
import contextlib
import random
import re
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

BENCHMARKS = Path(__file__).resolve().parent
sys.path[:0] = [str(BENCHMARKS.parent), str(BENCHMARKS)]
REPEATS = 3  # number of batches per table row; the best one counts
ROLLOUTS = 1024  # per step
ROLLOUT_SLOTS = 128

# ---- the reward functions (the workers load this file, so its imports are light)


def sync_rule(data_source, solution_str, ground_truth, extra_info):
    """Score by a rule that is as simple as GSM8K's."""
    found = re.findall(r"#### (-?[0-9.,]+)", solution_str)
    return {
        "score": 1.0 if found and found[-1].replace(",", "") == ground_truth else -1.0,
        "acc": bool(found),
    }


session = None


async def asks_judge(data_source, solution_str, ground_truth, extra_info, reward_router_address):
    """Request one chat completion for a correct answer and none for a wrong one."""
    global session
    if not extra_info.get("right", True):
        return -1.0
    if session is None:
        import aiohttp

        session = aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(limit=0), timeout=aiohttp.ClientTimeout(total=None)
        )
    body = {
        "model": "judge",
        "messages": [{"role": "user", "content": solution_str}],
        "seconds": extra_info.get("seconds", 0.0),
    }
    async with session.post(f"http://{reward_router_address}/v1/chat/completions", json=body) as response:
        response.raise_for_status()
        text = (await response.json())["choices"][0]["message"]["content"]
    return {"score": 1.0 if "-1" in text else 0.0, "acc": True}


# ---- the fake judge, in separate processes


async def serve_judge(port: str, slots: str, slowness: str) -> None:
    from measuring import FakeServer, serve

    await serve(FakeServer(int(slots), float(slowness)).handle, int(port))
    await asyncio.Event().wait()


@contextlib.contextmanager
def judges(count: int, slots: int, slowness: float):
    """Start `count` fake judges behind router.py, and yield the router's address.

    Each works on at most `slots` critiques at the same time, each for its seconds, multiplied by `slowness`.
    """
    from measuring import ROOT, free_port, servers

    ports = [free_port() for _ in range(1 + count)]
    commands = {}
    for port in ports[1:]:
        about = [port, slots, slowness]
        commands[port] = [sys.executable, __file__, "--judge", *map(str, about)]
    urls = [f"http://127.0.0.1:{port}" for port in commands]
    router = [sys.executable, str(ROOT / "router.py"), "--port", str(ports[0]), "--policy", "least_loaded"]
    with servers(commands), servers({ports[0]: [*router, "--workers", *urls]}):
        yield f"127.0.0.1:{ports[0]}"


# ---- part "speed"


def make_samples(count: int) -> list[dict]:
    """Return rows like GSM8K's, with responses of about 1,000 characters."""
    text = "She sells 16 - 3 - 4 = 9 eggs a day, and so she makes 9 * 2 = 18 dollars every day. " * 12
    return [
        {
            "data_source": "openai/gsm8k",
            "prompt": [{"role": "user", "content": "How much does she make every day?"}],
            "response": f"{text}#### {index % 5}",
            "reward_model": {"style": "rule", "ground_truth": str(index % 3)},
            "extra_info": {"split": "train", "index": index, "question": "How much does she make every day?"},
        }
        for index in range(count)
    ]


def our_processes():
    """Return the workers with their grading processes, and these with the driver and Ray's processes."""
    import psutil

    everything = [psutil.Process(), *psutil.Process().children(recursive=True)]
    workers = [process for process in everything if "RewardLoopWorker" in " ".join(process.cmdline())]
    raylet = workers[0].environ()[
        "RAY_RAYLET_PID"
    ]  # Grading processes are not descendants of this process, but share its environment.
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error, KeyError):
            if (
                "reward_worker.py" in " ".join(process.cmdline())
                and process.environ()["RAY_RAYLET_PID"] == raylet
            ):
                workers.append(process)
                everything.append(process)
    return workers, everything


async def stream(manager, samples, lanes: int = 512) -> None:
    """Call score_one for every sample, with `lanes` calls at the same time."""
    left = iter(samples)

    async def lane():
        for sample in left:
            await manager.score_one(sample)

    await asyncio.gather(*(lane() for _ in range(lanes)))


def measure_speed(reward_fn: str, options: dict, workers: int, counts) -> None:
    """Print a row for each number of samples."""
    from measuring import cpu_seconds

    from reward_loop import RewardLoopManager, RewardOptions

    begun = time.monotonic()
    options |= dict(reward_fn=f"{__file__}:{reward_fn}", num_workers=workers, max_in_flight=2048)
    manager = RewardLoopManager(RewardOptions(**options))
    manager.score_batch(make_samples(1))
    first = time.monotonic() - begun
    for count in counts:
        samples = make_samples(count)
        statuses = {result["status"] for result in manager.score_batch(samples)}  # warms up as well
        assert statuses == {"ok"}, statuses
        members, everything = our_processes()
        cpu, times = cpu_seconds(everything), []
        for _ in range(REPEATS):
            begun = time.monotonic()
            manager.score_batch(samples)
            times.append(time.monotonic() - begun)
        cpu = (cpu_seconds(everything) - cpu) / REPEATS / count * 1000
        memory = sum(process.memory_info().rss for process in members) / 1e6
        begun = time.monotonic()
        asyncio.run(stream(manager, samples))
        streamed = count / (time.monotonic() - begun)
        print(f"| {reward_fn} | {workers} | {count:,} | {count / min(times):,.0f} | ", end="")
        print(f"{streamed:,.0f} | {cpu:.2f} | {memory:.0f} | {first:.1f} |", flush=True)
    manager.shutdown()


def speed(config) -> None:
    """Print the table of samples per second."""
    print("| function | workers | samples | batch samples/s | streamed samples/s | ", end="")
    print("CPU ms/sample | memory MB | start to first score s |")
    print("| --- | --- | --- | --- | --- | --- | --- | --- |", flush=True)
    with judges(1, 10**6, 0.0) as address:
        for reward_fn, options in ("sync_rule", {}), ("asks_judge", {"router_address": (address,)}):
            for workers in config.workers:
                measure_speed(reward_fn, options, workers, config.samples)


# ---- part "overlap"


def lognormal(rng: random.Random, mean: float, sigma: float, longest: float) -> float:
    """Return a log-normal number with this mean, cut off at `longest`. The cut lowers the mean."""
    return min(mean * rng.lognormvariate(-sigma * sigma / 2, sigma), longest)


def overlap() -> None:
    """Print how long a step takes with judges of several speeds: without rewards, streamed, or in a batch."""
    import ray

    from reward_loop import RewardLoopManager, RewardOptions

    rng = random.Random(0)
    samples = make_samples(ROLLOUTS)
    critiques = 0.0
    for sample in samples:  # The policy generates 1,000 tokens per second.
        sample["rollout_seconds"] = lognormal(rng, 1.1, 0.7, 8.192)
        sample["extra_info"]["right"] = rng.random() < 0.5
        sample["extra_info"]["seconds"] = lognormal(rng, 3.0, 0.7, 16.384)
        critiques += sample["extra_info"]["right"] * sample["extra_info"]["seconds"]
    mean = sum(sample["rollout_seconds"] for sample in samples) / ROLLOUTS
    print(f"{ROLLOUTS} rollouts of {1000 * mean:,.0f} tokens on average in {ROLLOUT_SLOTS} slots, ", end="")
    print(f"1 s per 1,000 tokens; {1000 * critiques:,.0f} tokens of critiques")

    async def roll_out(after) -> float:
        places = asyncio.Semaphore(ROLLOUT_SLOTS)

        async def one(sample):
            async with places:
                await asyncio.sleep(sample["rollout_seconds"])
            if after:  # The slot is free again before the reward is requested.
                result = await after(sample)
                assert result["status"] == "ok", result

        begun = time.monotonic()
        await asyncio.gather(*(one(sample) for sample in samples))
        return time.monotonic() - begun

    ray.init(include_dashboard=False, log_to_driver=False, logging_level="ERROR")
    alone = asyncio.run(roll_out(None))
    print(f"rollouts alone: {alone:.2f} s\n")
    print("| critique speed (x rollout speed) | judge slots | load | streamed s | x alone | ", end="")
    print("rollouts, then batch s | x alone |")
    print("| --- | --- | --- | --- | --- | --- | --- |", flush=True)
    for speedup, places in ((1, 512), (2, 256), (4, 128), (4, 32), (8, 64)):
        load = critiques / speedup / places / alone
        with judges(2, places // 2, 1 / speedup) as address:
            options = dict(router_address=(address,), num_workers=2, max_in_flight=2048)
            manager = RewardLoopManager(RewardOptions(reward_fn=f"{__file__}:asks_judge", **options))
            manager.score_batch(samples[:1])
            streamed = asyncio.run(roll_out(manager.score_one))
            begun = time.monotonic()
            asyncio.run(roll_out(None))
            manager.score_batch(samples)
            batch = time.monotonic() - begun
            manager.shutdown()
        print(f"| {speedup} | {places} | {load:.0%} | {streamed:.2f} | {streamed / alone:.2f} | ", end="")
        print(f"{batch:.2f} | {batch / alone:.2f} |", flush=True)


@dataclass
class Config:
    """Measure the speed of the reward loop."""

    part: Literal["both", "speed", "overlap"] = "both"
    """What to measure."""
    samples: tuple[int, ...] = (1024, 4096)
    """Numbers of samples per batch in part "speed"."""
    workers: tuple[int, ...] = (1, 2, 4)
    """Numbers of reward workers to try in part "speed"."""


def main() -> None:
    """Parse the command line and print the tables."""
    if sys.argv[1:2] == ["--judge"]:  # this script as a fake judge
        import uvloop

        with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            runner.run(serve_judge(*sys.argv[2:]))
    import tyro
    from measuring import machine

    config = tyro.cli(Config)
    print(machine() + "\n")
    if config.part != "overlap":
        speed(config)
        print()
    if config.part != "speed":
        overlap()


if __name__ == "__main__":
    main()
