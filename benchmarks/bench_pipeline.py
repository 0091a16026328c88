"""Measure whether a step waits for its judge or its rollouts: the trainer's loop with simulated durations.

    # about two minutes; needs no model, no Ray and hardly any CPU
    python benchmarks/bench_pipeline.py
    python benchmarks/bench_pipeline.py --rollout 8 --judge 3 --update 6 --hand-over 0.2

grpo_trainer.train runs unchanged: it draws prompts, requests rollouts over HTTP, waits for verdicts and
writes its log. Everything behind the trainer is simulated: a server whose responses take a set time, rewards
that arrive a set time after their response, and an update and a weight sync that sleep. The longest rollout
of each step takes --rollout seconds and the others 30 to 100 % of that; each verdict arrives --judge seconds
after its response.

The judge's share is the additional time of a step compared with a step without a judge, as in the FAPO paper
(18 % for 7B, 14 % for 32B). The exit code is 1 if a step with --overlap takes on average more than 1.1 times
the longer of (rollout + judge) and (update + weight sync); this check needs an idle machine.
tests/test_pipeline.py uses the same stand-ins.

Not covered: the cost of overlapping work that shares cores or GPUs, and policies that get better or worse.
"""

import asyncio
import concurrent.futures
import contextlib
import gc
import json
import random
import shutil
import statistics
import sys
import tempfile
import threading
import time
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import patch

import pyarrow as pa
import pyarrow.parquet as pq
import tyro
from aiohttp import web

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
import grpo_trainer
import run_folder
from run import Interrupts, Run
from toy import toy_world, warm_start

PROMPTS, GROUP, MINI_BATCHES = 16, 8, 4


@dataclass
class Config:
    """Durations in seconds."""

    rollout: float = 0.8
    """Duration of a step's longest rollout."""
    judge: float = 0.3
    """Time from a response to its verdict."""
    update: float = 0.6
    """Duration of the policy update."""
    hand_over: float = 0.02
    """Duration of the weight sync."""
    steps: int = 20
    """Number of steps of each run, including the first, which overlaps with nothing."""


# ---- the stand-ins


class PlayedServers:
    """A stand-in for PolicyServers and vLLM with a real HTTP server.

    The first token of a response is the version of the weights.

    Args:
        version: The version of the first weights.
        generate: An async function of the request's body, which takes as long as the response should take.
    """

    def __init__(self, version: int, generate, hand_over: float = 0.0):
        self.version, self.generate, self.hand_over, self.generating = version, generate, hand_over, 0
        self.service, self.config = self, SimpleNamespace(api_key="", num_servers=1)
        self.loop = asyncio.new_event_loop()
        threading.Thread(target=self.loop.run_forever, daemon=True).start()
        self.router_address = (
            f"127.0.0.1:{asyncio.run_coroutine_threadsafe(self.serve(), self.loop).result()}"
        )

    async def serve(self) -> int:
        app = web.Application()
        app.router.add_post("/v1/completions", self.answer)
        self.runner = web.AppRunner(app, handler_cancellation=True)  # like vLLM: stop on disconnect
        await self.runner.setup()
        site = web.TCPSite(self.runner, "127.0.0.1", 0)
        await site.start()
        return site._server.sockets[0].getsockname()[1]

    async def answer(self, request):
        body, version = await request.json(), self.version
        self.generating += 1
        try:
            await self.generate(body)
        finally:
            self.generating -= 1
        choice = {
            "finish_reason": "stop",
            "token_ids": [version, 1],
            "logprobs": {"token_logprobs": [0.0, 0.0]},
        }
        return web.json_response({"choices": [choice]})

    def sync(self) -> None:
        if self.generating:
            raise AssertionError(f"new weights in the middle of {self.generating} responses")
        time.sleep(self.hand_over)
        self.version += 1

    def check(self) -> None:
        pass

    def shutdown(self) -> None:
        asyncio.run_coroutine_threadsafe(self.runner.cleanup(), self.loop).result()
        self.loop.call_soon_threadsafe(self.loop.stop)


class PlayedRewards:
    """A stand-in for RewardLoopManager: each sample gets a verdict after a set time."""

    job = SimpleNamespace(sees_group=False)

    def __init__(self, seconds: float = 0.0):
        self.seconds, self.loop = seconds, asyncio.new_event_loop()
        threading.Thread(target=self.loop.run_forever, daemon=True).start()

    def score(self, sample: dict) -> float | None:
        return float(random.random() < 0.5)

    def submit(self, sample: dict) -> concurrent.futures.Future:
        future, score = concurrent.futures.Future(), self.score(sample)
        info, status = {"score": score, "acc": bool(score)}, "no_verdict" if score is None else "ok"
        result = {"reward_score": score, "reward_extra_info": info, "status": status}
        if self.seconds:
            self.loop.call_soon_threadsafe(self.loop.call_later, self.seconds, future.set_result, result)
        else:
            future.set_result(result)
        return future

    def submit_group(self, samples: list[dict]) -> list[concurrent.futures.Future]:
        return list(map(self.submit, samples))


class PlayedPolicy:
    """A stand-in for Policy, whose update sleeps."""

    def __init__(self, config, seconds: float = 0.0):
        self.config, self.seconds, self.num_updates = config, seconds, 0

    def model_info(self) -> dict:
        return {"eos_token_id": 1}

    def release_memory(self) -> None:
        pass

    def update(self, groups, lr: float, max_logprob_diff: float) -> dict:
        time.sleep(self.seconds)
        self.num_updates += 1
        return {"actor/updates": 1, "rollout/logprob_diff": 0.0}

    def save(self, folder: Path) -> None:
        shutil.copytree(self.config.model, folder)


class PlayedRun(Run):
    """A run with stand-ins for the model, the servers and the rewards."""

    def play(self, servers, rewards, policy) -> list[dict]:
        """Train for the whole run and return its metrics."""
        self.config = self.config.resolved(gpus=0)
        self.servers, self.rewards, self.policy, self.eos_ids = servers, rewards, policy, {1}
        with patch.object(grpo_trainer, "Run", lambda config: self):
            grpo_trainer.train(self.config)
        return [
            json.loads(line) for line in Path(self.config.out_dir, "metrics.jsonl").read_text().splitlines()
        ]

    def start(self, stack) -> None:
        self.log = run_folder.Log(self.config, self.step)
        stack.callback(self.log.close)
        stack.callback(self.servers.shutdown)
        stack.callback(self.cancelled.set)
        self.interrupts = Interrupts()


def write_input(folder: Path) -> dict:
    """Write a model's configuration, a tokenizer and 64 rows. Returns the settings that name these files."""
    tokenizer = warm_start.build_tokenizer(warm_start.tokenizer_corpus(random.Random(0)))
    warm_start.new_model(len(tokenizer), seed=0).save_pretrained(folder / "model")
    tokenizer.save_pretrained(folder / "model")
    rng = random.Random(0)
    rows = [
        toy_world.policy_row(toy_world.random_problem(rng, toy_world.REMAINDER), "toy", "train", i)
        for i in range(64)
    ]
    pq.write_table(pa.Table.from_pylist(rows), folder / "train.parquet")
    return dict(
        model=str(folder / "model"),
        train_file=str(folder / "train.parquet"),
        rollout="vllm",
        tis_cap=2.0,
        device="cpu",
        max_response_length=8,
        overlong_buffer=0,
        save_every=0,
    )


# ---- the benchmark


def durations(config: Config, step: int) -> list[float]:
    """Return the seconds of each rollout of a step, which are the same in every run."""
    rng = random.Random(step)
    fractions = [rng.uniform(0.3, 1.0) for _ in range(PROMPTS * GROUP)]
    return [config.rollout * fraction / max(fractions) for fraction in fractions]


def seconds_per_step(
    config: Config, settings: dict, folder: Path, overlap: bool, judge: float
) -> tuple[float, float, float]:
    """Return the mean and the median seconds per step of a run, and the median wait for verdicts."""
    run = PlayedRun(
        grpo_trainer.Config(
            **settings,
            out_dir=str(folder / f"{overlap}_{judge}"),
            total_steps=config.steps,
            train_batch_size=PROMPTS,
            mini_batch_size=PROMPTS // MINI_BATCHES,
            group_size=GROUP,
            overlap=overlap,
            val_every=0,
        )
    )
    left = iter([seconds for step in range(config.steps) for seconds in durations(config, step)])
    servers = PlayedServers(0, lambda body: asyncio.sleep(next(left)), config.hand_over)
    gc.collect()
    gc.freeze()  # Otherwise a collection of the imported objects sometimes takes a tenth of a second.
    with contextlib.redirect_stdout(None):
        metrics = run.play(servers, PlayedRewards(judge), PlayedPolicy(run.config, config.update))
    steps, waits = ([line[key] for line in metrics[1:]] for key in ("time/step", "time/reward_wait"))
    return statistics.mean(steps), statistics.median(steps), statistics.median(waits)


def gain_by_mini_batch(config: Config) -> float:
    """Return the seconds that a step without --overlap would save if updates waited for fewer verdicts.

    The update on a mini-batch would begin as soon as the verdicts of this mini-batch have arrived.
    """
    gains = []
    for step in range(config.steps):
        seconds, size, end = durations(config, step), PROMPTS * GROUP // MINI_BATCHES, 0.0
        for first in range(0, len(seconds), size):
            end = max(end, max(seconds[first : first + size]) + config.judge) + config.update / MINI_BATCHES
        gains.append(max(seconds) + config.judge + config.update - end)
    return sum(gains) / len(gains)


def main() -> None:
    from bench_router import machine

    config = tyro.cli(Config, description=__doc__)
    limit = 1.1 * max(config.rollout + config.judge, config.update + config.hand_over)
    print(machine())
    print(
        f"rollout {config.rollout} s, judge {config.judge} s, update {config.update} s, weight sync "
        f"{config.hand_over} s\n"
    )
    print(
        "| --overlap | mean step s | median step s | wait for verdicts s | median step s without a judge | "
        "judge's share |"
    )
    print("| ---: | ---: | ---: | ---: | ---: | ---: |")
    steps = {}
    with tempfile.TemporaryDirectory() as name:
        settings = write_input(Path(name))
        for overlap in (False, True):
            steps[overlap], median, waited = seconds_per_step(
                config, settings, Path(name), overlap, config.judge
            )
            _, without, _ = seconds_per_step(config, settings, Path(name), overlap, 0.0)
            figures = (
                f"{steps[overlap]:.3f} | {median:.3f} | {waited:.3f} | {without:.3f} | "
                f"{1 - without / median:.1%}"
            )
            print(f"| {'yes' if overlap else 'no'} | {figures} |", flush=True)
    print(f"\n1.1 x the longer of (rollout + judge) and (update + weight sync): {limit:.3f} s")
    gain = gain_by_mini_batch(config)
    print(
        f"without --overlap, a step would save {gain:.3f} s ({gain / steps[False]:.1%}) if the update on "
        f"each of the {MINI_BATCHES} mini-batches began as soon as its own verdicts arrive (it does not)"
    )
    sys.exit(steps[True] > limit)


if __name__ == "__main__":
    main()
