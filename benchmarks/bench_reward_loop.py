"""Measure how fast the reward loop is, and how much of the judge's time it hides behind rollouts.

    python benchmarks/bench_reward_loop.py                  both parts, about 6 minutes
    python benchmarks/bench_reward_loop.py --part speed     samples/s, CPU time and memory
    python benchmarks/bench_reward_loop.py --part overlap   a step with rewards streamed or in a batch

Part "speed" scores 1,024 and 4,096 samples with a sync rule, an async function that waits 50 ms, and one that
queries a fake judge through router.py (one pooled HTTP session per worker). It does so with 1, 2 and 4
workers in a local Ray.
  batch      score_batch of all samples, best of --repeats
  streamed   one score_one per sample from one event loop, in 512 lanes: each lane sends a sample as soon as
             the result of its previous one arrives
  CPU        milliseconds of CPU time per sample in the batch: the sum over driver, Ray, workers and grading
             processes, plus the router and the fake judge in the third case
  memory     resident memory (RSS) of workers and grading processes (two processes each, because one watches
             the other); shared pages count more than once

Part "overlap" simulates the rollouts and the judge by waiting. Lengths are log-normal with the paper's means
of 1.1k tokens for a rollout and 3.0k for a critique. Half of the answers are correct, and only these are
judged. The judge is two HTTP servers behind router.py, each with a limited number of concurrent critiques.
Not covered: a GPU that rollouts and judge share.
"""

import asyncio
import contextlib
import json
import random
import re
import socket
import subprocess
import sys
import time
import urllib.request
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

# ---- the reward functions (the workers load this file, so its imports are light)


def sync_rule(data_source, solution_str, ground_truth, extra_info):
    """Score by a rule that is as simple as GSM8K's."""
    found = re.findall(r"#### (-?[0-9.,]+)", solution_str)
    return {
        "score": 1.0 if found and found[-1].replace(",", "") == ground_truth else -1.0,
        "acc": bool(found),
    }


async def waits_50_ms(data_source, solution_str, ground_truth, extra_info):
    """Stand in for a remote judge that responds after 50 ms."""
    await asyncio.sleep(0.05)
    return 1.0


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
        "critique_tokens": extra_info.get("critique_tokens", 0),
    }
    async with session.post(f"http://{reward_router_address}/v1/chat/completions", json=body) as response:
        response.raise_for_status()
        text = (await response.json())["choices"][0]["message"]["content"]
    return {"score": 1.0 if "-1" in text else 0.0, "acc": True}


# ---- the fake judge, in a separate process


def judge_main(port: int, slots: int, seconds_per_1k: float) -> None:
    """Serve at most `slots` chat completions at the same time, each for as long as its critique takes."""
    from aiohttp import web

    free = asyncio.Semaphore(slots)
    answer = json.dumps({"choices": [{"message": {"role": "assistant", "content": "\\boxed{-1}"}}]})

    async def complete(request):
        body = await request.json()
        if tokens := body.get("critique_tokens"):
            async with free:
                await asyncio.sleep(tokens / 1000 * seconds_per_1k)
        return web.Response(text=answer, content_type="application/json")

    async def health(request):
        return web.Response()

    app = web.Application(client_max_size=64 * 2**20)
    app.router.add_post("/v1/chat/completions", complete)
    app.router.add_get("/health", health)
    with contextlib.suppress(ImportError):
        import uvloop

        uvloop.install()
    web.run_app(app, host="127.0.0.1", port=port, print=None, access_log=None)


def free_port() -> int:
    """Return a port that is free now."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def wait_for_health(port: int) -> None:
    """Wait until GET /health returns 200. Raises TimeoutError after 30 s."""
    deadline = time.monotonic() + 30
    while time.monotonic() < deadline:
        with contextlib.suppress(OSError):
            with urllib.request.urlopen(f"http://127.0.0.1:{port}/health", timeout=1):
                return
        time.sleep(0.05)
    raise TimeoutError(f"port {port}: no healthy server within 30 s")


@contextlib.contextmanager
def judges(count: int, slots: int, seconds_per_1k: float):
    """Start `count` fake judges with `slots` slots each behind router.py, and yield the router's address."""
    ports = [free_port() for _ in range(count)]
    code = "import sys; sys.path.insert(0, {!r}); import bench_reward_loop as b; b.judge_main({}, {}, {})"
    processes = [
        subprocess.Popen(
            [sys.executable, "-c", code.format(str(Path(__file__).parent), port, slots, seconds_per_1k)]
        )
        for port in ports
    ]
    try:
        for port in ports:
            wait_for_health(port)
        router_port = free_port()
        urls = [f"http://127.0.0.1:{port}" for port in ports]
        command = [
            sys.executable,
            str(ROOT / "router.py"),
            "--port",
            str(router_port),
            "--policy",
            "least_loaded",
            "--workers",
            *urls,
        ]
        processes.append(subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL))
        wait_for_health(router_port)
        yield f"127.0.0.1:{router_port}"
    finally:
        for process in processes:
            process.terminate()
        for process in processes:
            process.wait(20)


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


def cpu_seconds(processes) -> float:
    """Return the CPU time that these processes have used so far."""
    import psutil

    total = 0.0
    for process in processes:
        with contextlib.suppress(psutil.Error):
            total += sum(process.cpu_times()[:2])
    return total


async def stream(manager, samples, lanes: int = 512) -> None:
    """Call score_one for every sample, with `lanes` calls at the same time."""
    left = iter(samples)

    async def lane():
        for sample in left:
            await manager.score_one(sample)

    await asyncio.gather(*(lane() for _ in range(lanes)))


def speed(config) -> None:
    """Print the table of samples per second."""
    from reward_loop import RewardLoopManager, RewardOptions

    print("| function | workers | samples | batch samples/s | streamed samples/s | ", end="")
    print("CPU ms/sample | memory MB | start to first score s |")
    print("| --- | --- | --- | --- | --- | --- | --- | --- |", flush=True)
    with judges(1, 10**6, 0.0) as address:
        for function in config.functions:
            for workers in config.workers:
                begun = time.monotonic()
                options = RewardOptions(
                    reward_fn=f"{__file__}:{function}", num_workers=workers, max_in_flight=2048
                )
                if function == "asks_judge":
                    options.router_address = (address,)
                manager = RewardLoopManager(options)
                manager.score_batch(make_samples(1))
                first = time.monotonic() - begun
                for count in config.samples:
                    samples = make_samples(count)
                    assert {result["status"] for result in manager.score_batch(samples)} == {
                        "ok"
                    }  # warms up as well
                    members, everything = our_processes()
                    cpu, times = cpu_seconds(everything), []
                    for _ in range(config.repeats):
                        begun = time.monotonic()
                        manager.score_batch(samples)
                        times.append(time.monotonic() - begun)
                    cpu = (cpu_seconds(everything) - cpu) / config.repeats / count * 1000
                    memory = sum(process.memory_info().rss for process in members) / 1e6
                    begun = time.monotonic()
                    asyncio.run(stream(manager, samples))
                    streamed = time.monotonic() - begun
                    print(
                        f"| {function} | {workers} | {count:,} | {count / min(times):,.0f} | "
                        f"{count / streamed:,.0f} | {cpu:.2f} "
                        f"| {memory:.0f} | {first:.1f} |",
                        flush=True,
                    )
                manager.shutdown()


# ---- part "overlap"


def lognormal(rng: random.Random, mean: float, sigma: float, longest: float) -> float:
    """Return a log-normal number with this mean, cut off at `longest`. The cut lowers the mean."""
    return min(mean * rng.lognormvariate(-sigma * sigma / 2, sigma), longest)


def overlap(config) -> None:
    """Print how long a step takes with judges of several speeds: without rewards, streamed, or in a batch."""
    import ray

    from reward_loop import RewardLoopManager, RewardOptions

    rng = random.Random(0)
    samples = make_samples(config.rollouts)
    for sample in samples:
        sample["rollout_tokens"] = lognormal(rng, 1100, 0.7, 8192)
        sample["extra_info"] |= {
            "right": rng.random() < 0.5,
            "critique_tokens": lognormal(rng, 3000, 0.7, 16384),
        }
    rollout_tokens = sum(sample["rollout_tokens"] for sample in samples)
    critique_tokens = sum(
        sample["extra_info"]["critique_tokens"] for sample in samples if sample["extra_info"]["right"]
    )
    print(f"{config.rollouts} rollouts of {rollout_tokens / len(samples):,.0f} tokens on average ", end="")
    print(f"in {config.rollout_slots} slots, ", end="")
    print(f"{config.rollout_s_per_1k} s per 1,000 tokens; {critique_tokens:,.0f} tokens of critiques")

    async def roll_out(after) -> float:
        places = asyncio.Semaphore(config.rollout_slots)

        async def one(sample):
            async with places:
                await asyncio.sleep(sample["rollout_tokens"] / 1000 * config.rollout_s_per_1k)
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
        seconds_per_1k = config.rollout_s_per_1k / speedup
        load = critique_tokens / 1000 * seconds_per_1k / places / alone
        with judges(2, places // 2, seconds_per_1k) as address:
            options = dict(router_address=(address,), num_workers=2, max_in_flight=2048)
            manager = RewardLoopManager(RewardOptions(reward_fn=f"{__file__}:asks_judge", **options))
            manager.score_batch(samples[:1])
            streamed = asyncio.run(roll_out(manager.score_one))
            begun = time.monotonic()
            asyncio.run(roll_out(None))
            manager.score_batch(samples)
            batch = time.monotonic() - begun
            manager.shutdown()
        print(
            f"| {speedup} | {places} | {load:.0%} | {streamed:.2f} | {streamed / alone:.2f} | {batch:.2f} "
            f"| {batch / alone:.2f} |",
            flush=True,
        )


@dataclass
class Config:
    """Measure the speed of the reward loop."""

    part: Literal["both", "speed", "overlap"] = "both"
    """What to measure."""
    functions: tuple[str, ...] = ("sync_rule", "waits_50_ms", "asks_judge")
    """Reward functions in this file to measure in part "speed"."""
    samples: tuple[int, ...] = (1024, 4096)
    """Numbers of samples per batch."""
    workers: tuple[int, ...] = (1, 2, 4)
    """Numbers of reward workers to try."""
    repeats: int = 3
    """Number of batches per table row. The best one counts."""
    rollouts: int = 1024
    """Number of rollouts per step in part "overlap"."""
    rollout_slots: int = 128
    """Maximum number of concurrent rollouts."""
    rollout_s_per_1k: float = 1.0
    """Seconds per 1,000 tokens of a rollout."""


def main() -> None:
    """Parse the command line and print the tables."""
    import tyro
    from bench_router import machine

    config = tyro.cli(Config)
    print(machine() + "\n")
    if config.part in ("both", "speed"):
        speed(config)
        print()
    if config.part in ("both", "overlap"):
        overlap(config)


if __name__ == "__main__":
    main()
