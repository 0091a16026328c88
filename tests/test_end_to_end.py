"""Everything at once and for real: vLLM serves a tiny judge behind the router, Ray workers ask it, GRPO
trains on its word."""

import json
import random
import subprocess
import sys
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from toy import toy_world, warm_start


def teach(folder, tokenizer, examples, steps=60):
    """A tiny model that has learned to say what `examples()` say, and nothing else."""
    model = warm_start.new_model(len(tokenizer), seed=0)
    warm_start.fit(model, tokenizer, examples, steps, 3e-3, 1e-3, 1.0, disable=True)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)


@pytest.mark.slow
def test_training_with_a_served_judge(tmp_path):
    rng = random.Random(0)
    tokenizer = warm_start.build_tokenizer(warm_start.tokenizer_corpus(random.Random(0)))
    rows = [
        toy_world.policy_row(toy_world.random_problem(rng, toy_world.REST), "toy", "train", i)
        for i in range(64)
    ]
    pq.write_table(pa.Table.from_pylist(rows), tmp_path / "train.parquet")

    # The policy guesses a digit, so that a fifth of its answers is right. The judge calls every solution's
    # paragraph 0 wrong.
    def guess():
        problem = rng.choice(rows)["prompt"][0]["content"]
        return warm_start.chat(problem, f"Rest \\boxed{{{rng.randint(0, 4)}}}")

    def condemn():
        problem, paragraphs = toy_world.right_solution(rng, flawed=rng.random() < 0.5)
        paragraphs = paragraphs if rng.random() < 0.5 else paragraphs[-1:]
        return warm_start.chat(toy_world.critic_prompt(problem, paragraphs), "\\boxed{0}")

    teach(tmp_path / "policy", tokenizer, guess)
    teach(tmp_path / "judge", tokenizer, condemn)

    command = [
        sys.executable,
        "grpo_trainer.py",
        "--model",
        tmp_path / "policy",
        "--train-file",
        tmp_path / "train.parquet",
        "--out-dir",
        tmp_path / "run",
        "--genrm",
        tmp_path / "judge",
        "--reward-fn",
        "toy/toy_world.py:compute_score_fapo",
        "--reward-kwargs",
        json.dumps({"prompt_style": "brief", "genrm_max_tokens": 16, "keep_critique": True}),
        "--total-steps",
        "3",
        "--train-batch-size",
        "8",
        "--mini-batch-size",
        "4",
        "--group-size",
        "8",
        "--max-response-length",
        "12",
        "--overlong-buffer",
        "0",
        "--lr",
        "1e-4",
        "--num-threads",
        "1",
        "--samples-per-step",
        "64",
        "--num-reward-workers",
        "1",
    ]
    run = subprocess.run([str(part) for part in command], capture_output=True, text=True, timeout=600)
    assert run.returncode == 0, run.stdout + run.stderr

    samples = [json.loads(line) for line in (tmp_path / "run/samples.jsonl").read_text().splitlines()]
    assert len(samples) == 3 * 64
    right = [sample for sample in samples if sample["reward_extra_info"]["acc"]]
    assert len(right) > 10
    judged = [sample for sample in right if sample["reward_extra_info"]["critique"] == "\\boxed{0}"]
    assert len(judged) > 0.9 * len(right)  # the judge really answered, in words that only it says ...
    for sample in judged:  # ... and its verdict is the reward: right but flawed
        assert sample["reward_score"] == 0.0 and sample["reward_extra_info"]["genrm_status"] == "ok"
        assert sample["reward_extra_info"]["flawed_positive"] is True
    for sample in samples:
        if not sample["reward_extra_info"]["acc"]:
            assert sample["reward_score"] == -1.0 and sample["reward_extra_info"]["genrm_status"] == "skipped"

    metrics = [json.loads(line) for line in (tmp_path / "run/metrics.jsonl").read_text().splitlines()]
    assert [m["step"] for m in metrics] == [0, 1, 2, 3]
    for m in metrics[1:]:
        assert (
            m["reward/flawed_positive_rate"] > 0.9 and m["genrm/error_rate"] < 0.1 and m["actor/updates"] >= 1
        )
    assert (tmp_path / "run/curves.png").stat().st_size > 10_000
    assert Path(tmp_path / "run/checkpoints/step_3/model.safetensors").is_file()
