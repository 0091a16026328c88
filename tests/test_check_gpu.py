"""The GPU checks, as far as a CPU can run them: that they run, and what the table shows if a check fails or
hangs.
"""

import asyncio
import json
import math
import os
import shlex
import sys
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import pytest
import ray
import torch
import tyro

sys.path.insert(0, str(Path(__file__).parent.parent / "benchmarks"))
import check_gpu
import forked
import gpu_models
import grpo_trainer
import causal_lm
import policy
from cluster.placement import layout, process_specs
from played import lines_of, server

CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def work(tmp_path_factory):
    folder = tmp_path_factory.mktemp("check_gpu")
    (folder / "config.json").write_text(json.dumps({"size": "small", "model": ""}))
    assert [holds for _, holds, _ in check_gpu.make_models(folder, CPU)] == [True]
    return folder


def in_bf16(device):
    return torch.autocast("cpu", torch.bfloat16)


@pytest.mark.slow
def test_the_update_in_bf16_beside_float32(work, monkeypatch):
    monkeypatch.setattr(policy, "check_logprobs", lambda *_: None)  # on a CPU, the bound is that of float32
    monkeypatch.setattr(causal_lm, "precision", in_bf16)
    rows = list(check_gpu.check_precision(work, CPU, length=8))
    assert len(rows) == 5 and all(holds for _, holds, _ in rows), rows
    assert not rows[0][2].startswith("0.0000 nats") and "cosine 1.00000" != rows[3][2]  # the two differ


@pytest.mark.slow
def test_an_update_in_another_precision_than_it_says_fails(work, monkeypatch):
    """A check must detect a model that computes something else in bf16."""
    right = causal_lm.logits_of

    def wrong(model, output, hidden):
        return right(model, output, hidden) * (1.5 if causal_lm.precision is in_bf16 else 1.0)

    monkeypatch.setattr(policy, "check_logprobs", lambda *_: None)
    monkeypatch.setattr(causal_lm, "precision", in_bf16)
    monkeypatch.setattr(causal_lm, "logits_of", wrong)
    failed = [what for what, holds, _ in check_gpu.check_precision(work, CPU, length=4) if not holds]
    assert "bf16 and float32: log-probabilities" in failed and "bf16 and float32: actor/grad_norm" in failed


def test_a_sampler_that_ignores_what_it_is_told_is_seen(work):
    """Test a sampler with log-probabilities within the nucleus, and one that ignores the temperature."""
    learner = check_gpu.load(work, CPU)

    def rows(change=lambda options: options):
        def fill(samples, **options):
            options = change(options)
            check_gpu.rollout_hf(
                learner.model,
                samples,
                **options,
                max_response_length=6,
                eos_ids=(),
                seed=0,
                rollout_batch_size=64,
            )
            for sample in samples:  # as in vLLM; here the probability mass is at least top_p
                lost = -math.log(options["top_p"])
                sample.rollout_logprobs = [logprob + lost for logprob in sample.rollout_logprobs]

        return list(check_gpu.agreement(work, learner, fill))

    found = rows()
    assert [holds for _, holds, _ in found] == [True] * 3 and "0.3567 nats" in found[2][2], found
    assert "expected below 0.46" in found[2][2]
    forgetful = rows(lambda options: options | {"temperature": 1.0})
    assert [holds for _, holds, _ in forgetful] == [False, True, True], forgetful
    assert learner.config.temperature == 1.0


@pytest.mark.parametrize("tokens, holds", [("1,000", True), ("790", False), ("1,260", False)])
def test_room_for_keys_and_values_beside_the_plan(tokens, holds):
    log = f"... GPU KV cache size: 5 tokens\n... GPU KV cache size: {tokens} tokens\n"
    ((what, found, figure),) = check_gpu.room_row(log, "1.0 GB: room for 1,000 tokens (longest sequence: 9)")
    assert found is holds and figure.startswith(f"{tokens} tokens, ")
    assert list(check_gpu.room_row("", "room for 1,000 tokens")) == []


@pytest.mark.parametrize("seconds, holds", [(4.0, True), (8.0, False)])
def test_the_speed_beside_that_of_bare_vllm(work, monkeypatch, seconds, holds):
    """Use simulated processes to test their order and the ratio. Bare vLLM takes 3.9 s."""
    started, times_of, reserved = [], [seconds, 3.9, 1.0, 0.5], []

    class Played:
        def __init__(self, learner, tokenizer, settings):
            started.append(settings)

        def shutdown(self):
            started.append("ended")

        def sync(self):
            started.append("new weights")

    def reserve(specs):
        reserved.append(layout(specs, 1))  # ValueError if the processes do not fit on one GPU
        return SimpleNamespace(close=lambda: started.append("all free"))

    group = SimpleNamespace(model_info=lambda: {"numel": 10**9}, shutdown=lambda: started.append("no rank"))
    plays = {"ClusterServers": Played, "PolicyGroup": lambda *_: group, "ask_bare": print}
    plays["rollout_vllm"] = lambda servers, samples, **options: None
    plays["Reservation"] = reserve
    for name, played in plays.items():
        monkeypatch.setattr(check_gpu, name, played)
    monkeypatch.setattr(check_gpu.reward_loop, "connect_ray", lambda: None)

    def measured(device, function):
        took = 1.0 if isinstance(function, partial) else times_of.pop(0)
        return function(), took, 0.0, 0.0

    monkeypatch.setattr(check_gpu, "measure", measured)
    own, bare, sync = check_gpu.check_speed(work, check_gpu.GPU, count=16, length=8)
    assert started[0].vllm_args == ()
    assert started[1:] == ["new weights"] * 2 + ["ended", "no rank", "all free"]
    (((bundle,), placed),) = reserved  # The rank and the server share one reservation.
    assert bundle["GPU"] == 1 and set(placed) == {("rank", 0), ("policy server", 0)}
    assert own[1] and own[2].startswith(f"{128 / seconds:,.0f} tokens/s"), own
    assert bare[1] is holds and bare[2].startswith(f"{3.9 / seconds:.2f} times 33 tokens/s"), bare
    assert sync == ("weight sync", True, "0.50 s (first 1.00 s), 4.00 GB/s")


def test_bare_requests_ask_one_server_for_text_alone():
    asked = []
    with server(lambda path, body: asked.append((path, body)) or {}) as address:
        settings = SimpleNamespace(served_model_name="m", server_key="k")
        slots = [SimpleNamespace(url=f"http://{address}")]
        servers = SimpleNamespace(service=SimpleNamespace(slots=slots, config=settings))
        check_gpu.ask_bare(servers, [policy.Sample({}, [5, 6]), policy.Sample({}, [7])], 9)
    expected = {"model": "m", "max_tokens": 9, "ignore_eos": True}
    bodies = sorted((body for _, body in asked), key=lambda body: body["prompt"])
    assert bodies == [expected | {"prompt": [5, 6]}, expected | {"prompt": [7]}]
    assert {path for path, _ in asked} == {"/v1/completions"}


@pytest.mark.parametrize("same, used", [(True, [0, 9, 1, 9]), (False, [0, 9, 8, 9])])
def test_a_judge_that_answers_differently_after_waking_is_seen(work, monkeypatch, same, used):
    """vLLM looks up only whole blocks of 16 tokens in its prefix cache, which may be stale after waking."""
    prompts = []

    def answer(path, body):
        prompts.append(body["prompt"])
        return {"choices": [{"token_ids": [same or len(prompts)]}]}

    monkeypatch.setattr(check_gpu, "GPU", CPU)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (-used.pop(0) * 2**30, 0))
    properties = SimpleNamespace(total_memory=100)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: properties)
    with server(answer) as address:
        key = SimpleNamespace(server_key="k")
        judge = SimpleNamespace(router_address=address, config=key, sleep=lambda *_: None, shutdown=print)
        monkeypatch.setattr(check_gpu.genrm_server, "ModelServers", lambda config: judge)
        rows = list(check_gpu.check_sleep(work))
    assert [holds for _, holds, _ in rows] == [True, same, same], rows
    assert len(prompts) == 8 and all(len(prompt) >= 32 for prompt in prompts)


def test_update(work, monkeypatch):
    monkeypatch.setitem(gpu_models.PEAK, "CPU", 1e12)
    speed, memory = check_gpu.check_update(work, CPU, length=8)
    assert speed[1] and "% of 1 TFLOP/s (1 M weights)" in speed[2] and memory[1], (speed, memory)


@pytest.mark.slow
def test_two_ranks_beside_one_process(work, monkeypatch, small_ray):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    assert list(check_gpu.check_ranks(work)) == [("two ranks", None, "needs 2 GPUs, torch sees 1")]
    try:
        rows = list(check_gpu.check_ranks(work, CPU, length=6))
    finally:
        ray.shutdown()
    assert [holds for _, holds, _ in rows] == [True] * 4, rows


@pytest.mark.parametrize("name", check_gpu.RUNS)
def test_the_whole_runs_have_flags_that_the_trainer_takes_and_fit_on_their_gpus(name, monkeypatch):
    flags, gpus, _ = check_gpu.RUNS[name]
    config = tyro.cli(grpo_trainer.Config, args=[*shlex.split(check_gpu.RUN + flags), "--out-dir", name])
    monkeypatch.setattr(ray, "cluster_resources", lambda: {"GPU": float(gpus)})
    monkeypatch.setattr("torch.version.cuda", "13.0")
    specs = process_specs(config.resolved(gpus))
    assert sum(bundle["GPU"] for bundle in layout(specs, gpus)[0]) == gpus
    assert config.rollout_vllm_args == "--enforce-eager"


def test_the_row_of_a_whole_run(tmp_path, monkeypatch):
    def row(offs, name="shares"):
        lines = [{"step": i, "time/step": 2.0, "rollout/logprob_diff": off} for i, off in enumerate(offs)]
        (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
        return check_gpu.run_row(tmp_path, name, "so")

    assert row([0, 0.01, 0.02])[1:] == (
        True,
        "steps of 2, 2 s; sampler and trainer 0.01, 0.02 nats apart; expected: so",
    )
    assert not row([0, 0.01])[1] and not row([0, 0.01, 0.2])[1]
    assert not row([0, 0.01, 0.02], "lora")[1]  # its checkpoint has no adapters
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    (skipped,) = check_gpu.check_run(tmp_path, "two_ranks")
    assert skipped == ("two-step run, two_ranks", None, "needs 2 GPUs, torch sees 1")


@pytest.mark.parametrize(
    "status, score", [("ok", 3 / 6), ("truncated", 3 / 6), ("http_error", None), ("timeout", None)]
)
def test_a_judge_that_does_not_answer_gives_no_score(monkeypatch, status, score):
    """A whole run with such a judge therefore ends with an error."""

    async def chat(prompt, address, *, max_tokens, timeout_s):
        return status, "no", 8

    monkeypatch.setattr(check_gpu.compute_score, "chat", chat)
    asked = check_gpu.score_by_asking("toy", "7", "7", {"question": "7?"}, "host:1")
    assert asyncio.run(asked) == {"score": score, "genrm_status": status}


def test_a_check_that_raises_is_a_row_and_so_is_one_that_hangs(tmp_path, monkeypatch):
    def raises(work):
        yield "the first", True, "1 s"
        raise RuntimeError("no\nroom")

    monkeypatch.setattr(check_gpu, "WORK", tmp_path)
    monkeypatch.setitem(check_gpu.CHECKS, "raises", (raises, 1, False))
    check_gpu.work_on("raises")
    rows = lines_of(tmp_path / "raises.jsonl")
    assert rows == [["the first", True, "1 s"], ["raises", False, "RuntimeError: no room"]]
    assert check_gpu.in_child("models", 0.1) == [
        ("models", False, f"timed out after 0.1 s; see {tmp_path}/models.log")
    ]


@pytest.mark.slow
def test_without_a_gpu_it_says_so_and_ends_with_2():
    hidden = os.environ | {"CUDA_VISIBLE_DEVICES": ""}
    done = forked.run([check_gpu.__file__], env=hidden)
    said = "no NVIDIA GPU was found, so there is nothing to check\n"
    assert (done.returncode, done.stdout, done.stderr) == (2, said, "")
