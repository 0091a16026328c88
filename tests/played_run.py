"""Stand-ins for the policy, servers and rewards of a run, with which the trainer's loop runs unchanged.

The loop draws prompts, requests rollouts over HTTP, waits for verdicts and writes its log. A server whose
responses end when a test decides replaces vLLM, verdicts arrive at once, and an update does nothing.
"""

import concurrent.futures
import random
import shutil
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import patch

import pyarrow as pa
import pyarrow.parquet as pq
from aiohttp import web

import grpo_trainer
import run_folder
from played import lines_of
from run import Interrupts, Run
from test_reward_loop import FakeServer
from toy import toy_world, warm_start


class PlayedServers(FakeServer):
    """A stand-in for PolicyServers and vLLM with a real HTTP server, which notices when a client disconnects.

    The first token of a response is the version of the weights.

    Args:
        version: The version of the first weights.
        generate: An async function of the request's body, which takes as long as the response should take.
    """

    def __init__(self, version: int, generate):
        self.version, self.generate, self.generating = version, generate, 0
        self.has_token_endpoint = False
        self.service, self.config = self, SimpleNamespace(api_key="", num_servers=1)
        super().__init__(self.answer)
        self.router_address = self.address

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
        self.version += 1

    def check(self) -> None:
        pass

    def shutdown(self) -> None:
        self.stop()


class PlayedRewards:
    """A stand-in for RewardLoopManager: each sample gets a verdict at once."""

    job = SimpleNamespace(sees_group=False)

    def score(self, sample: dict) -> float | None:
        return float(random.random() < 0.5)

    def submit(self, sample: dict) -> concurrent.futures.Future:
        future, score = concurrent.futures.Future(), self.score(sample)
        info, status = {"score": score, "acc": bool(score)}, "no_verdict" if score is None else "ok"
        result = {"reward_score": score, "reward_extra_info": info, "status": status}
        future.set_result(result)
        return future

    def submit_group(self, samples: list[dict]) -> list[concurrent.futures.Future]:
        return list(map(self.submit, samples))


class PlayedPolicy:
    """A stand-in for Policy, whose update changes nothing."""

    def __init__(self, config):
        self.config, self.num_updates = config, 0

    def model_info(self) -> dict:
        return {"eos_token_id": 1}

    def release_memory(self) -> None:
        pass

    def update(self, groups, lr: float, max_logprob_diff: float) -> dict:
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
        return lines_of(self.config.out_dir)

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
