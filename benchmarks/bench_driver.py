"""Measure the CPU time of each part of a large step in the trainer's main process.

    python benchmarks/bench_driver.py                           # a few minutes on one core

The samples have 1,161 tokens. The parts are: reading a policy server's response with rollout_vllm, compared
with json.loads of the whole response (another process simulates vLLM); decoding its text; computing the
step's advantages, metrics and mini-batches; and splitting the mini-batches for the ranks. Each part is
measured with many samples and with eight times as many, because its cost per sample must not grow with the
step.
bench_reward_loop.py measures the reward loop, and bench_hand_over.py measures sending samples to the ranks.
"""

import json
import random
import subprocess
import sys
import threading
import time
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace

import tyro
from tokenizers import ByteLevelBPETokenizer

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))
import algorithm
import policy
from bench_hand_over import cpu_of
from bench_router import machine
from cluster.policy_group import split
from run_folder import reward_metrics
from rollout import rollout_vllm
from settings import PolicyOptions

PLAYED = """
import sys
from aiohttp import web
answer = open(sys.argv[1], "rb").read()
async def complete(request):
    await request.read()
    return web.Response(body=answer, content_type="application/json")
app = web.Application()
app.router.add_post("/v1/completions", complete)
web.run_app(app, host="127.0.0.1", port=int(sys.argv[2]), print=None, access_log=None)
"""


@dataclass
class Config:
    samples: int = 4096  # Samples of a step. A second step has eight times as many.
    answers: int = 1000  # Number of responses to read.
    length: int = 1161  # Tokens per sample.
    group_size: int = 8
    ranks: int = 64
    port: int = 38113  # Port of the simulated server.
    rounds: int = 3  # Number of measurements. The best one is printed.


def tokenizer_of():
    """Return a byte-level BPE tokenizer that is trained on this repository's pages."""
    pages = [str(path) for path in [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]]
    tokenizer = ByteLevelBPETokenizer()
    tokenizer.train(pages, vocab_size=8000, show_progress=False)
    return tokenizer


def vllm_answer(tokenizer, ids: list[int], rng) -> dict:
    """Return a response as vLLM writes it with `logprobs` 0 and `return_token_ids`."""
    logprobs = [-rng.random() for _ in ids]
    texts = [tokenizer.decode([number]) for number in ids]
    choice = {
        "index": 0,
        "text": tokenizer.decode(ids),
        "finish_reason": "stop",
        "token_ids": ids,
        "prompt_token_ids": ids[:100],
        "logprobs": {
            "text_offset": list(range(0, 4 * len(ids), 4)),
            "token_logprobs": logprobs,
            "tokens": texts,
            "top_logprobs": [{text: logprob} for text, logprob in zip(texts, logprobs)],
        },
    }
    return {"id": "cmpl-1", "object": "text_completion", "model": "policy", "choices": [choice]}


def measure_answers(config: Config, tokenizer, ids: list[int], folder: Path) -> None:
    text = json.dumps(vllm_answer(tokenizer, ids, random.Random(0)))
    (folder / "answer.json").write_text(text)
    played = subprocess.Popen([sys.executable, "-c", PLAYED, folder / "answer.json", str(config.port)])
    time.sleep(5)
    service = SimpleNamespace(
        router_address=f"127.0.0.1:{config.port}", config=SimpleNamespace(api_key="", num_servers=1)
    )
    servers = SimpleNamespace(service=service, check=lambda: None)

    def read():
        samples = [policy.Sample({}, ids[:100]) for _ in range(config.answers)]
        options = dict(max_response_length=8192, temperature=1.0, eos_ids={1}, rollout_batch_size=64)
        rollout_vllm(servers, samples, **options, stop=threading.Event())
        assert samples[-1].response_ids == ids

    try:
        seconds = cpu_of(config.rounds, read)
    finally:
        played.kill()
        played.wait()
    row(f"read a response of {len(text) // 1000} kB with rollout_vllm", config, config.answers, seconds)
    seconds = cpu_of(config.rounds, lambda: [json.loads(text) for _ in range(config.answers)])
    row("(for comparison: read it with json.loads)", config, config.answers, seconds)


def row(name: str, config: Config, samples: int, seconds: float) -> None:
    a_sample = seconds / samples
    tokens = samples * config.length / seconds
    print(f"| {name} | {samples:,} | {1e3 * a_sample:.4f} | {1e-6 * tokens:,.1f} |", flush=True)


def step_of(config: Config, samples: int, ids: list[int]) -> list[list]:
    """Return judged groups. Their samples share lists of tokens to save memory."""
    logprobs = [-0.5] * len(ids)
    rng = random.Random(0)
    groups = []
    for _ in range(samples // config.group_size):
        group = []
        for _ in range(config.group_size):
            score = rng.choice([1.0, 0.0, -1.0])
            info = {"score": score, "acc": score > -1, "pred": "7", "flawed_positive": score == 0}
            info |= {"first_wrong": -1, "genrm_status": "ok", "overlong_penalty": 0.0, "overlong": False}
            result = {"reward_score": score, "reward_extra_info": info, "status": "ok", "seconds": 1.0}
            group.append(policy.Sample({}, ids[:100], ids, logprobs, "a text", result))
        groups.append(group)
    return groups


def measure_step(config: Config, samples: int, ids: list[int], decode) -> None:
    mini_batch_size = max(1, samples // config.group_size // 16)
    options = PolicyOptions(model="", mini_batch_size=mini_batch_size)
    groups = step_of(config, samples, ids)
    flat = sum(groups, [])

    def timed(name, function):
        row(name, config, samples, cpu_of(config.rounds, function))

    timed("reward metrics", lambda: reward_metrics(flat))
    timed("advantages", lambda: algorithm.set_advantages(groups, options, decode, False, False))
    timed("mini-batches", lambda: policy.mini_batches(groups, options))
    timed("entropy", lambda: policy.entropy_of(groups))
    batches = policy.mini_batches(groups, options)
    timed("split for the ranks", lambda: split(batches, config.ranks))


def main() -> None:
    config = tyro.cli(Config, description=__doc__)
    print(machine())
    print("\n| | samples | ms per sample | M tokens/s |\n| --- | ---: | ---: | ---: |")
    tokenizer = tokenizer_of()
    rng = random.Random(0)
    ids = [rng.randrange(300, tokenizer.get_vocab_size()) for _ in range(config.length)]
    folder = ROOT / "outputs" / "bench_driver"
    folder.mkdir(parents=True, exist_ok=True)
    measure_answers(config, tokenizer, ids, folder)
    seconds = cpu_of(config.rounds, lambda: [tokenizer.decode(ids) for _ in range(config.answers)])
    row("decode its text", config, config.answers, seconds)
    for samples in (config.samples, 8 * config.samples):
        measure_step(config, samples, ids, tokenizer.decode)


if __name__ == "__main__":
    main()
