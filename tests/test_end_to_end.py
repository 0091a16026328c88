"""Everything at once and for real: vLLM serves a tiny judge behind the router, Ray workers ask it, GRPO
trains on its word."""

import json
import subprocess
import sys
from pathlib import Path

import prepare_data
import pytest


@pytest.mark.slow
def test_training_with_a_served_judge(tmp_path):
    """The two models that are shipped, as a newcomer's first run would take them."""
    prepare_data.prepare(prepare_data.Config(tasks=["toy"], out_dir=tmp_path))
    command = [
        sys.executable,
        "grpo_trainer.py",
        "--model",
        tmp_path / "policy",
        "--train-file",
        tmp_path / "toy_train.parquet",
        "--out-dir",
        tmp_path / "run",
        "--genrm",
        tmp_path / "judge",
        "--reward-fn",
        "toy/toy_world.py:compute_score_fapo",
        "--reward-kwargs",
        json.dumps({"prompt_style": "brief", "genrm_temperature": 0, "genrm_max_tokens": 96}
                   | {"keep_critique": True}),  # fmt: skip
        "--total-steps",
        "3",
        "--train-batch-size",
        "8",
        "--mini-batch-size",
        "4",
        "--group-size",
        "8",
        "--max-response-length",
        "64",
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
    infos = [sample["reward_extra_info"] for sample in samples]
    right = [info for info in infos if info["acc"]]
    judged = [info for info in right if info["genrm_status"] == "ok"]
    assert len(right) > 60 and len(judged) > 0.9 * len(right)
    assert 0.1 < sum(info["flawed_positive"] for info in judged) / len(judged) < 0.9
    for sample, info in zip(samples, infos):
        if not info["acc"]:
            assert sample["reward_score"] == -1.0 and info["genrm_status"] == "skipped"
        elif info["genrm_status"] == "ok":  # the judge's own words, and its verdict is the reward
            assert info["critique"].startswith("0:")
            assert sample["reward_score"] == 1.0 - info["flawed_positive"]
            assert info["critique"].endswith(f"\\boxed{{{info['first_wrong']}}}")
    words = {}  # to equal solutions it said the same, and was asked once
    for sample, info in zip(samples, infos):
        if info["acc"]:
            words.setdefault((sample["prompt"], sample["response"]), []).append(info)
    for equal in words.values():
        assert len({info["critique"] for info in equal}) == 1
        assert [info["genrm_shared"] for info in equal].count(False) == 1
    assert any(len(equal) > 1 for equal in words.values())

    metrics = [json.loads(line) for line in (tmp_path / "run/metrics.jsonl").read_text().splitlines()]
    assert [m["step"] for m in metrics] == [0, 1, 2, 3]
    for m in metrics[1:]:
        assert 0 < m["genrm/shared"] < 1 and m["genrm/error_rate"] < 0.1 and m["actor/updates"] >= 1
    assert (tmp_path / "run/curves.png").stat().st_size > 10_000
    assert Path(tmp_path / "run/checkpoints/step_3/model.safetensors").is_file()
