"""Helpers that several test files and docs/changes share: samples, a scripted server, lines of a run, and a
run in the toy world.
"""

import asyncio
import contextlib
import json
import pickle
import random
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

import ray
from aiohttp import web

import algorithm
import grpo_trainer
import reward_loop
import reward_worker
import run_folder
import score_file
from policy import Sample
from settings import PolicyOptions
from test_reward_loop import FakeServer
from toy import toy_world

MODELS = Path(__file__).resolve().parent.parent / "toy/models"


def sample_of(score, text="x", **info):
    """Return a sample with this score (None: no verdict) whose tokens are its characters."""
    result = {"reward_score": score, "reward_extra_info": {"score": score} | info, "status": "ok"}
    ids = [*map(ord, text)]
    return Sample({}, [1], ids, [-1.0] * len(ids), text, result)


def advantages_of(*groups, **options):
    """Return what the trainer would set: for each sample one advantage, or a list with one per token."""
    algorithm.set_advantages(groups, PolicyOptions(model="m", **options), lambda ids: "".join(map(chr, ids)))
    return [sample.token_advantages or sample.advantage for group in groups for sample in group]


@contextlib.contextmanager
def server(answer, get=lambda path: {"data": [{"id": "a-model"}]}):
    """Serve HTTP on this machine and yield host:port. POST gets `answer(path, body)` as JSON, GET `get`."""
    threads = ThreadPoolExecutor(32)  # By default, there are few on a machine with one core.

    async def reply(request):
        if request.method == "GET":
            return web.json_response(get(request.path))
        body = await request.json()
        loop = asyncio.get_running_loop()
        return web.json_response(await loop.run_in_executor(threads, answer, request.path, body))

    http = FakeServer(reply)
    try:
        yield http.address
    finally:
        http.stop()
        threads.shutdown(wait=False)


def says(text):
    """Return a judge's response with this text."""
    return {"choices": [{"message": {"content": text}, "finish_reason": "stop"}]}


# PYTHONPATH makes Python find this stand-in before the real vLLM. The request determines the verdict and the
# score.
VLLM = """
import json, sys, zlib
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
def argument(name): return sys.argv[sys.argv.index(name) + 1]
json.load(open(argument("--model") + "/config.json"))  # or it dies
other = "/v1/chat/completions" if "pooling" in sys.argv else "/classify"
class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    def do_GET(self):
        asked = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        number = zlib.crc32(asked)
        if self.path == other:
            return self.send_error(404)
        if self.path == "/classify":
            answer = {"data": [{"probs": [number / 2**31 - 1]}]}
        elif self.path == "/v1/models":
            answer = {"data": [{"id": argument("--served-model-name")}]}
        elif self.path == "/v1/completions":
            n = json.loads(asked)["max_tokens"]
            logprobs = {"token_logprobs": [-1.0] * n}
            answer = {"choices": [{"token_ids": [5] * n, "logprobs": logprobs, "finish_reason": "length"}]}
        else:
            text = "\\\\boxed{1}" if number % 2 else "\\\\boxed{-1}"
            answer = {"choices": [{"message": {"content": text}, "finish_reason": "stop"}]}
        body = json.dumps(answer).encode()
        self.send_response(200)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)
    do_POST = do_GET
    def log_message(self, *arguments): pass
ThreadingHTTPServer((argument("--host"), int(argument("--port"))), Handler).serve_forever()
"""


def stand_in_for_vllm(folder, program=VLLM):
    """Write a stand-in for vLLM's package whose server is `program`. Returns the PYTHONPATH that finds it."""
    package = folder / "vllm/entrypoints/openai"
    package.mkdir(parents=True)
    for path in (package, package.parent, package.parent.parent):
        (path / "__init__.py").touch()
    (package / "api_server.py").write_text(program)
    build = folder / "vllm-0+cpu.dist-info"  # It serves on a CPU, even if vLLM's build for GPUs is installed.
    build.mkdir()
    (build / "METADATA").write_text("Name: vllm\nVersion: 0+cpu\n")
    return f"{folder}:{MODELS.parent.parent}"


def rows(path, count, split="train", seed=0):
    """Write problems of the toy world to a file, and return its path."""
    rng = random.Random(seed)
    problems = [toy_world.random_problem(rng, toy_world.REMAINDER) for _ in range(count)]
    lines = [json.dumps(toy_world.policy_row(p, "toy", split, i)) for i, p in enumerate(problems)]
    path.write_text("\n".join(lines))
    return str(path)


def toy_config(folder, **changes):
    """Return the settings of a short run in the toy world, with the oracle as judge."""
    settings = dict(
        model=str(MODELS / "policy"),
        train_file=rows(folder / "train.jsonl", 32),
        out_dir=str(folder / "run"),
        reward_fn="toy/toy_world.py:compute_score_fapo_oracle",
        total_steps=2,
        train_batch_size=8,
        mini_batch_size=4,
        group_size=4,
        max_response_length=48,
        overlong_buffer=0,
        lr=2e-4,
        num_threads=1,
        num_workers=1,
        sync_processes=1,
        samples_per_step=32,
    )
    return grpo_trainer.Config(**settings | changes)


def lines_of(path, name="metrics.jsonl"):
    """Return the lines of a JSONL file, or of the file with this name in a folder."""
    path = Path(path)
    if path.is_dir():
        path /= name
    return [json.loads(line) for line in path.read_text().rstrip("\n").split("\n")]


class RewardsHere:
    """Scores samples in this process, as the Reward Loop does on its workers.

    Functions of groups are not supported.
    """

    def __init__(self, options):
        self.job = options.make_job()
        self.scorer = reward_worker.Scorer(self.job)

    def submit_group(self, samples):
        return [self.submit(sample) for sample in samples]

    def score_batch(self, samples, on_result):
        for position, sample in enumerate(samples):
            on_result(position, self.submit(sample).result())

    def submit(self, sample):
        arguments = reward_loop.arguments_of(self.job, [sample])
        with asyncio.Runner() as runner:
            scored = json.loads(self.scorer.score_sync(pickle.dumps(arguments), runner))
        (((score, info, status),), _) = scored
        future = Future()
        result = {"reward_score": score, "reward_extra_info": info, "status": status, "seconds": 0.0}
        future.set_result(result)
        return future


def score_files_here(monkeypatch):
    """Score files in the test's own process from now on."""
    monkeypatch.setattr(score_file, "start_rewards", lambda options, stack: RewardsHere(options))


def without_ray(monkeypatch):
    """Compute rewards in the run's own process from now on, and draw no curves.

    This is faster, and everything else is the same.
    """
    monkeypatch.setattr(run_folder.Log, "plot", lambda self: None)
    monkeypatch.setattr(reward_loop, "connect_ray", lambda: False)
    monkeypatch.setattr(reward_loop, "start_rewards", lambda config, *more, **options: RewardsHere(config))
    monkeypatch.setattr(ray, "cluster_resources", dict)
