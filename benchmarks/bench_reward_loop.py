"""Measure how many samples the reward loop scores per second, and the CPU time and memory that it needs.

    python benchmarks/bench_reward_loop.py     # about 2 minutes

The script scores 1,024 and 4,096 samples with a sync rule, and with one that queries a fake judge through
router.py by compute_score.chat. It does so with 1, 2 and 4 workers in a local Ray.
  batch      score_batch of all samples, best of three
  streamed   one score_one per sample from one event loop, in 512 lanes: each lane sends a sample as soon as
             the result of its previous one arrives
  CPU        milliseconds of CPU time per sample in the batch: the sum over driver, Ray, workers and grading
             processes, plus the router and the fake judge in the second case
  memory     resident memory (RSS) of workers and grading processes (two processes each, because one watches
             the other); shared pages count more than once

Not covered: the time that critiques take, because the fake judge responds at once.
"""

import asyncio
import contextlib
import re
import sys
import time
import timeit
from dataclasses import dataclass

REPEATS = 3  # number of batches per table row; the best one counts
HEADS = """| function | workers | samples | batch samples/s | streamed samples/s | \
CPU ms/sample | memory MB | start to first score s |
| --- | --- | --- | --- | --- | --- | --- | --- |"""

# ---- the reward functions (the workers load this file, so its imports are light)


def sync_rule(data_source, solution_str, ground_truth, extra_info):
    """Score by a rule that is as simple as GSM8K's."""
    found = re.findall(r"#### (-?[0-9.,]+)", solution_str)
    return {
        "score": 1.0 if found and found[-1].replace(",", "") == ground_truth else -1.0,
        "acc": bool(found),
    }


async def asks_judge(data_source, solution_str, ground_truth, extra_info, reward_router_address):
    """Request one chat completion, and read its verdict."""
    from compute_score import chat

    status, text, _ = await chat(solution_str, reward_router_address, model="judge")
    assert status == "ok", text
    return {"score": 1.0 if "-1" in text else 0.0, "acc": True}


# ---- the fake judge, in a separate process


async def serve_judge(port: str) -> None:
    from aiohttp import web
    from measuring import serve

    async def answer(request):
        await request.read()
        return web.json_response({"choices": [{"message": {"content": "\\boxed{-1}"}}]})

    await serve(answer, int(port))


@contextlib.contextmanager
def judge():
    """Start a fake judge behind router.py, and yield the router's address."""
    from aiohttp.test_utils import unused_port
    from measuring import ROOT, server

    port, router_port = unused_port(), unused_port()
    router = [sys.executable, str(ROOT / "router.py"), "--port", str(router_port)]
    router += ["--workers", f"http://127.0.0.1:{port}"]
    command = [sys.executable, __file__, "--judge", str(port)]
    with server(port, command), server(router_port, router):
        yield f"127.0.0.1:{router_port}"


# ---- measurements


def make_samples(count: int):
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
    raylet = workers[0].environ()["RAY_RAYLET_PID"]
    for process in psutil.process_iter():  # Grading processes are not descendants, but share the environment.
        with contextlib.suppress(psutil.Error, KeyError):
            is_grading = "reward_worker.py" in " ".join(process.cmdline())
            if is_grading and process.environ()["RAY_RAYLET_PID"] == raylet:
                workers.append(process)
                everything.append(process)
    return workers, everything


async def stream(manager, samples) -> None:
    """Call score_one for every sample, with 512 calls at the same time."""
    left = iter(samples)

    async def lane():
        for sample in left:
            await manager.score_one(sample)

    await asyncio.gather(*(lane() for _ in range(512)))


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
        cpu = cpu_seconds(everything)
        # By default, timeit turns off garbage collection.
        times = timeit.repeat(lambda: manager.score_batch(samples), "gc.enable()", repeat=REPEATS, number=1)
        cpu = (cpu_seconds(everything) - cpu) / REPEATS / count * 1000
        memory = sum(process.memory_info().rss for process in members) / 1e6
        begun = time.monotonic()
        asyncio.run(stream(manager, samples))
        streamed = count / (time.monotonic() - begun)
        print(
            f"| {reward_fn} | {workers} | {count:,} | {count / min(times):,.0f} | "
            f"{streamed:,.0f} | {cpu:.2f} | {memory:.0f} | {first:.1f} |",
            flush=True,
        )
    manager.shutdown()


@dataclass
class Config:
    """Measure the speed of the reward loop."""

    samples: tuple[int, ...] = (1024, 4096)  # Numbers of samples per batch.
    workers: tuple[int, ...] = (1, 2, 4)  # Numbers of reward workers.


def main() -> None:
    """Parse the command line and print the tables."""
    if sys.argv[1:2] == ["--judge"]:  # this script as a fake judge
        import uvloop

        return uvloop.run(serve_judge(sys.argv[2]))
    import tyro
    from measuring import machine

    config = tyro.cli(Config)
    print(f"{machine()}\n\n{HEADS}", flush=True)
    with judge() as address:
        for reward_fn, options in ("sync_rule", {}), ("asks_judge", {"router_address": (address,)}):
            for workers in config.workers:
                measure_speed(reward_fn, options, workers, config.samples)


if __name__ == "__main__":
    main()
