"""The trainer: losses worked out by hand, invariances, sampling against transformers, and whole runs on a tiny model."""

import dataclasses
import json
import math
import random
import re
import subprocess
import sys
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch

import grpo_trainer
import toy_world
from grpo_trainer import compute_advantages, compute_policy_loss

NAN = math.nan
CPU = torch.device("cpu")


# ---------------------------------------------------------------------------------------------------------------- losses


def test_advantages_by_hand():
    rewards = torch.tensor([[1.0, 0.0, -1.0, 0.0], [1.0, 1.0, 1.0, 1.0], [1.0, NAN, -1.0, NAN], [NAN, NAN, NAN, 1.0]])
    kept = rewards.clone()
    got = compute_advantages(rewards)
    std = math.sqrt(2 / 3)  # sample variance of 1, 0, -1, 0: (1 + 1) / 3
    assert torch.allclose(got[0], torch.tensor([1.0, 0.0, -1.0, 0.0]) / (std + 1e-6))
    assert got[1].tolist() == [0, 0, 0, 0]  # no spread
    assert torch.allclose(got[2], torch.tensor([1.0, 0.0, -1.0, 0.0]) / (math.sqrt(2) + 1e-6))  # NaN leaves the statistics
    assert got[3].tolist() == [0, 0, 0, 0]  # fewer than two verdicts
    assert torch.equal(rewards, kept) or torch.equal(rewards.isnan(), kept.isnan())


def test_advantages_of_equal_rewards_are_zero_in_spite_of_rounding():
    assert compute_advantages(torch.full((1, 7), 0.1)).abs().max() == 0


def test_flawed_positives_get_a_negative_advantage_exactly_when_right_outnumbers_wrong():
    """Paper appendix A: with lambda = 1 the flawed ones' advantage changes sign at rho = #correct / #wrong = 1."""

    def flawed(right, wrong):
        return compute_advantages(torch.tensor([[1.0] * right + [0.0] * 2 + [-1.0] * wrong]))[0, right].item()

    assert flawed(2, 4) > 0 and flawed(3, 3) == pytest.approx(0) and flawed(4, 2) < 0


def loss_of(ratio, advantage, **kwargs):
    logprobs = torch.tensor([[math.log(ratio)]])
    loss, metrics = compute_policy_loss(logprobs, torch.zeros(1, 1), torch.tensor([advantage]), torch.ones(1, 1), 1, **kwargs)
    return loss.item(), metrics


@pytest.mark.parametrize(
    "ratio, advantage, loss",
    [
        (1.1, 2.0, -2.2),  # inside the range
        (1.5, 2.0, -2.56),  # clipped from above at 1.28
        (0.5, 2.0, -1.0),  # a fall of a good token is not clipped
        (0.5, -2.0, 1.6),  # clipped from below at 0.8
        (1.5, -2.0, 3.0),  # a rise of a bad token is not clipped ...
        (20.0, -2.0, 20.0),  # ... but bounded at 10 (dual clip)
        (20.0, 2.0, -2.56),
    ],
)
def test_policy_loss_by_hand(ratio, advantage, loss):
    assert loss_of(ratio, advantage)[0] == pytest.approx(loss, rel=1e-5)


def test_clip_fraction_counts_clipped_tokens_only():
    assert loss_of(1.5, 2.0)[1]["actor/clip_fraction"] == 1
    assert loss_of(1.5, -2.0)[1]["actor/clip_fraction"] == 0
    assert loss_of(1.1, 2.0)[1]["actor/clip_fraction"] == 0


def test_truncated_importance_sampling():
    logprobs, old, rollout = torch.zeros(1, 2), torch.zeros(1, 2), torch.tensor([[math.log(0.25), math.log(2.0)]])
    loss, _ = compute_policy_loss(logprobs, old, torch.ones(1), torch.ones(1, 2), 2, rollout_logprobs=rollout, tis_cap=2.0)
    assert loss.item() == pytest.approx(-(2.0 + 0.5) / 2)  # weights 4 -> 2 and 0.5
    with pytest.raises(ValueError, match="rollout_logprobs"):
        compute_policy_loss(logprobs, old, torch.ones(1), torch.ones(1, 2), 2, tis_cap=2.0)


def test_policy_loss_is_the_same_for_any_split_and_mutates_nothing():
    generator = torch.Generator().manual_seed(0)
    logprobs, old, rollout = (torch.randn(6, 9, generator=generator) * 0.3 for _ in range(3))
    advantages = torch.randn(6, generator=generator)
    mask = torch.arange(9) < torch.tensor([9, 3, 5, 1, 9, 7])[:, None]
    arguments = [logprobs, old, advantages, mask, rollout]
    copies = [tensor.clone() for tensor in arguments]
    num_tokens = int(mask.sum())

    def total(splits):
        losses, kls, grads = 0.0, 0.0, torch.zeros_like(logprobs)
        for rows in splits:
            leaf = logprobs[rows].clone().requires_grad_()
            loss, metrics = compute_policy_loss(
                leaf, old[rows], advantages[rows], mask[rows], num_tokens, rollout_logprobs=rollout[rows], tis_cap=1.5
            )
            loss.backward()
            grads[rows] += leaf.grad
            losses, kls = losses + loss.item(), kls + metrics["actor/approx_kl"]
        return losses, kls, grads

    whole = total([[0, 1, 2, 3, 4, 5]])
    for splits in ([[0], [1], [2], [3], [4], [5]], [[5, 0, 3], [1, 2, 4]]):
        parts = total(splits)
        assert parts[0] == pytest.approx(whole[0], abs=1e-6) and parts[1] == pytest.approx(whole[1], abs=1e-6)
        assert torch.allclose(parts[2], whole[2], atol=1e-7)
    assert all(torch.equal(a, b) for a, b in zip(arguments, copies))
    garbage = logprobs.clone()
    garbage[~mask] = NAN  # what stands in the padding does not matter
    assert (
        compute_policy_loss(garbage, old, advantages, mask, num_tokens)[0]
        == compute_policy_loss(logprobs, old, advantages, mask, num_tokens)[0]
    )


def test_advantages_per_token_or_per_sequence():
    logprobs, old, mask = torch.randn(2, 3), torch.randn(2, 3), torch.ones(2, 3)
    per_row = compute_policy_loss(logprobs, old, torch.tensor([1.0, -2.0]), mask, 6)[0]
    per_token = compute_policy_loss(logprobs, old, torch.tensor([[1.0] * 3, [-2.0] * 3]), mask, 6)[0]
    assert per_row == per_token


def test_overlong_penalty_is_the_reward_loops():
    assert grpo_trainer.overlong_penalty(100, 100, 40, 1.0) == -1.0
    assert grpo_trainer.overlong_penalty(60, 100, 40, 1.0) == 0.0
    assert grpo_trainer.overlong_penalty(80, 100, 40, 0.5) == -0.25


# -------------------------------------------------------------------------------------------------- rollouts and log-probs


@pytest.fixture(scope="module")
def tokenizer():
    return toy_world.build_tokenizer(toy_world.tokenizer_corpus(random.Random(0)))


@pytest.fixture(scope="module")
def model(tokenizer):
    return toy_world.new_model(len(tokenizer), seed=0).eval()


def rollout(model, prompts, group_size=2, temperature=1.0, length=12, **kwargs):
    generator = torch.Generator().manual_seed(7)
    return grpo_trainer.rollout_hf(
        model,
        prompts,
        group_size,
        max_response_length=length,
        temperature=temperature,
        eos_ids={1},
        generator=generator,
        **kwargs,
    )


def test_greedy_rollout_is_what_transformers_generates(model):
    prompts = [[5, 6, 7], [8], [9, 10, 11, 12, 13]]
    responses, _ = rollout(model, prompts, group_size=1, temperature=0)
    for prompt, response in zip(prompts, responses):
        expected = model.generate(
            torch.tensor([prompt]),
            attention_mask=torch.ones(1, len(prompt)),
            max_new_tokens=12,
            do_sample=False,
            eos_token_id=1,
            pad_token_id=0,
        )
        assert response == expected[0, len(prompt) :].tolist()


def test_rollout_logprobs_are_the_trainers(model):
    prompts = [[5, 6, 7], [8], [9, 10, 11, 12, 13]]
    for temperature in (1.0, 1.3):
        responses, sampled = rollout(model, prompts, group_size=3, temperature=temperature, batch_size=6)
        sequences = [prompts[b // 3] + response for b, response in enumerate(responses)]
        with torch.no_grad():
            logprobs, entropy = grpo_trainer.logprobs_and_entropy(
                model, sequences, [len(r) for r in responses], temperature, CPU, chunk=5
            )
        for row, values in zip(logprobs, sampled):
            assert torch.allclose(row[: len(values)], torch.tensor(values), atol=1e-5)
            assert row[len(values) :].abs().sum() == 0
        assert 0 < entropy.max() < math.log(model.config.vocab_size)


def test_each_sample_is_reported_once_the_moment_it_ends(model):
    """A sample that ends early is reported before the others have been written to their end; end tokens are part of it."""
    prompts = [[5, 6, 7], [8]] * 4
    ends = set(range(1, model.config.vocab_size, 4))  # an untrained model hardly ever writes its own end token
    generator = torch.Generator().manual_seed(7)
    order = []
    responses, logprobs = grpo_trainer.rollout_hf(
        model, prompts, 4, max_response_length=6, temperature=1.0, eos_ids=ends, generator=generator,
        on_finished=lambda b, response: order.append((b, list(response))),
    )  # fmt: skip
    assert sorted(b for b, _ in order) == list(range(32))
    assert all(response == responses[b] for b, response in order)
    lengths = [len(response) for _, response in order]
    assert lengths == sorted(lengths) and lengths[0] < lengths[-1]  # shorter ones were reported first
    for response, values in zip(responses, logprobs):
        assert len(values) == len(response) and all(token not in ends for token in response[:-1])
        assert response[-1] in ends or len(response) == 6


def test_sampling_follows_the_distribution_and_top_p():
    logits = torch.tensor([[2.0, 1.0, 0.0, -1.0]]).repeat(20_000, 1)
    generator = torch.Generator().manual_seed(0)
    tokens, logprobs = grpo_trainer.sample_tokens(logits, 1.0, 1.0, generator)
    expected = logits[0].softmax(-1)
    assert torch.allclose(tokens.bincount(minlength=4) / 20_000, expected, atol=0.015)
    assert torch.allclose(logprobs, expected.log()[tokens])
    tokens, _ = grpo_trainer.sample_tokens(logits, 1.0, 0.7, generator)  # .64 + .24: the second crosses 0.7 and stays
    assert set(tokens.tolist()) == {0, 1}
    assert set(grpo_trainer.sample_tokens(logits, 1.0, 0.6, generator)[0].tolist()) == {0}
    assert set(grpo_trainer.sample_tokens(logits, 0, 1.0, generator)[0].tolist()) == {0}


def test_micro_batches_hold_every_sample_once_within_the_budget():
    rng = random.Random(0)
    lengths = [rng.randint(1, 50) for _ in range(200)] + [500]
    batches = grpo_trainer.micro_batches(lengths, 120)
    assert sorted(i for batch in batches for i in batch) == list(range(201))
    assert all(len(batch) * max(lengths[i] for i in batch) <= 120 or len(batch) == 1 for batch in batches)
    assert len(batches) < 201 / 2 and grpo_trainer.micro_batches([], 10) == []


# ----------------------------------------------------------------------------------------------------------------- update


def a_batch(model, seed=0):
    """A step of 4 prompts x 4 samples with random rewards, one of them without verdict."""
    prompts = [[5, 6, 7], [8], [9, 10, 11, 12], [13, 14]]
    responses, logprobs = rollout(model, prompts, group_size=4, length=10)
    rewards = torch.randint(-1, 2, (4, 4), generator=torch.Generator().manual_seed(seed)).float()
    rewards[0, 1] = NAN
    return {
        "prompts": [prompt for prompt in prompts for _ in range(4)], "responses": responses, "rollout_logprobs": logprobs,
        "advantages": compute_advantages(rewards).flatten().tolist(), "has_verdict": (~rewards.isnan()).flatten().tolist(),
    }  # fmt: skip


def config_of(**changes):
    defaults = dict(model="m", train_file="t", out_dir="o", group_size=4, train_batch_size=4, mini_batch_size=4, lr=1e-2)
    return grpo_trainer.Config(**(defaults | changes))


def updated(model, batch, config):
    """A copy of the model after one update_policy with plain SGD (so that weights show gradients), and the metrics."""
    import copy

    clone = copy.deepcopy(model)
    optimizer = torch.optim.SGD(clone.parameters(), lr=config.lr)
    metrics = grpo_trainer.update_policy(clone, optimizer, batch, config, CPU)
    return torch.cat([p.detach().flatten() for p in clone.parameters()]), metrics


def test_update_is_the_plain_gradient_of_the_loss(model):
    """Against the loss written naively: full logits, no micro-batches, no samples skipped."""
    import copy

    batch, config = a_batch(model), config_of(max_grad_norm=1e9)
    got, metrics = updated(model, batch, config)
    clone = copy.deepcopy(model)
    num_tokens = sum(len(r) for r, known in zip(batch["responses"], batch["has_verdict"]) if known)
    loss = 0.0
    for prompt, response, advantage in zip(batch["prompts"], batch["responses"], batch["advantages"]):
        logits = clone(torch.tensor([prompt + response])).logits[0, len(prompt) - 1 : -1]
        logprobs = logits.log_softmax(-1).gather(-1, torch.tensor(response)[:, None])[:, 0]
        loss = loss - advantage * (logprobs - logprobs.detach()).exp().sum() / num_tokens
    loss.backward()
    expected = torch.cat([(p - config.lr * p.grad).detach().flatten() for p in clone.parameters()])
    before = torch.cat([p.detach().flatten() for p in model.parameters()])
    assert (expected - before).abs().max() > 1e-5
    assert torch.allclose(got, expected, atol=2e-8)
    assert metrics["actor/loss"] == pytest.approx(loss.item(), abs=1e-6)
    assert metrics["rollout/logprob_diff_max"] < 1e-5 and metrics["actor/updates"] == 1


def test_update_does_not_depend_on_micro_batches(model):
    batch = a_batch(model)
    whole, metrics = updated(model, batch, config_of(max_tokens_per_micro_batch=10_000, entropy_coef=0.01))
    parts, part_metrics = updated(model, batch, config_of(max_tokens_per_micro_batch=1, entropy_coef=0.01))
    assert torch.allclose(whole, parts, atol=2e-7)
    for key in ("actor/loss", "actor/entropy", "actor/grad_norm"):
        assert part_metrics[key] == pytest.approx(metrics[key], rel=1e-4)


def test_second_mini_batch_uses_the_log_probabilities_from_before_the_first_update(model):
    batch = a_batch(model)
    _, metrics = updated(model, batch, config_of(mini_batch_size=1, lr=0.05))
    assert metrics["actor/updates"] > 1
    assert metrics["rollout/logprob_diff_max"] < 1e-5  # "old" is the rollout's, in every mini-batch
    assert metrics["actor/approx_kl"] > 0  # while the policy has moved on


def test_a_stale_rollout_is_noticed(model):
    batch = a_batch(model)
    stale = toy_world.new_model(model.config.vocab_size, seed=1)
    _, metrics = updated(stale, batch, config_of())
    assert metrics["rollout/logprob_diff"] > 0.01


def test_samples_without_verdict_and_groups_without_spread_change_nothing(model):
    batch = a_batch(model)
    reference, _ = updated(model, batch, config_of())
    silent = [i for i, known in enumerate(batch["has_verdict"]) if not known]
    assert silent == [1]
    batch["responses"][1], batch["rollout_logprobs"][1] = [20] * 9, [-1.0] * 9  # its text is irrelevant
    assert torch.equal(updated(model, batch, config_of())[0], reference)
    batch["advantages"] = [0.0] * 16
    unchanged, metrics = updated(model, batch, config_of())
    assert torch.equal(unchanged, torch.cat([p.detach().flatten() for p in model.parameters()]))
    assert metrics == {"actor/updates": 0}


def test_a_loss_that_is_not_finite_stops_the_run(model):
    batch = a_batch(model)
    batch["advantages"] = [math.inf if a else 0.0 for a in batch["advantages"]]
    with pytest.raises(RuntimeError, match="loss: not finite"):
        updated(model, batch, config_of())


# ------------------------------------------------------------------------------------------------------------- small parts


def test_every_epoch_is_a_shuffle_and_a_step_depends_on_its_number_alone():
    rows, config = list(range(10)), config_of(train_batch_size=4)
    steps = [grpo_trainer.rows_of_step(rows, step, config) for step in range(1, 6)]
    flat = [row for step in steps for row in step]
    assert sorted(flat[:10]) == rows and sorted(flat[10:]) == rows and flat[:10] != flat[10:]
    assert grpo_trainer.rows_of_step(rows, 4, config) == steps[3]
    assert grpo_trainer.rows_of_step(rows, 1, config_of(train_batch_size=4, seed=1)) != steps[0]


def test_pass_at_k_by_hand():
    assert (
        grpo_trainer.pass_at_k(4, 1, 2) == 0.5 and grpo_trainer.pass_at_k(4, 0, 3) == 0 and grpo_trainer.pass_at_k(4, 2, 3) == 1
    )


def test_reward_metrics_by_hand():
    def result(score, **info):
        return {"reward_score": score, "reward_extra_info": info, "status": "ok" if score is not None else "no_verdict"}

    metrics = grpo_trainer.reward_metrics([
        result(1.0, acc=True, flawed_positive=False, genrm_status="ok", pred=3),
        result(0.0, acc=True, flawed_positive=True, genrm_status="ok", extra=2.0),
        result(-1.0, acc=False, flawed_positive=False, genrm_status="skipped"),
        result(None, acc=True, flawed_positive=None, genrm_status="timeout"),
    ])  # fmt: skip
    assert metrics == {
        "reward/mean": 0.0, "reward/no_verdict": 0.25, "reward/acc": 0.75, "reward/extra": 2.0,
        "reward/flawed_positive_rate": 0.5,  # one of the two right answers with a verdict
        "genrm/error_rate": pytest.approx(1 / 3), "genrm/asked": 3,
    }  # fmt: skip


# -------------------------------------------------------------------------------------------------------- whole runs (Ray)

REWARD = '''
import os, signal
def likes_sevens(data_source, solution_str, ground_truth, extra_info, limit=40, **_):
    """The share of sevens among what was written: a trivial task."""
    share = solution_str.count("7") / max(len(solution_str), 1)
    return {"score": share, "acc": share > 0.9}
def silent(data_source, solution_str, ground_truth, extra_info, **_):
    return {"score": None, "why": "the judge sleeps"}
'''


@pytest.fixture(scope="module")
def workshop(tmp_path_factory, tokenizer):
    """A folder with a tiny model, a training file and reward functions, and Ray running for all tests of this file."""
    import ray

    folder = tmp_path_factory.mktemp("workshop")
    tiny = toy_world.new_model(len(tokenizer), seed=0)
    tiny.save_pretrained(folder / "model")
    tokenizer.save_pretrained(folder / "model")
    rng = random.Random(0)
    rows = [toy_world.policy_row(toy_world.random_problem(rng, toy_world.REST), "toy", "train", i) for i in range(32)]
    pq.write_table(pa.Table.from_pylist(rows), folder / "train.parquet")
    pq.write_table(pa.Table.from_pylist(rows[:6]), folder / "val.parquet")
    (folder / "reward.py").write_text(REWARD)
    ray.init(num_cpus=2, include_dashboard=False, log_to_driver=False)
    yield folder
    ray.shutdown()


def run_config(folder, name, **changes):
    defaults = dict(
        model=str(folder / "model"), train_file=str(folder / "train.parquet"), out_dir=str(folder / name),
        reward_fn=f"{folder}/reward.py:likes_sevens",
        total_steps=3, train_batch_size=4, mini_batch_size=2, group_size=4, max_response_length=8, overlong_buffer=0, lr=3e-3,
        lr_warmup_steps=1, weight_decay=0.0, val_every=0, num_threads=1, num_reward_workers=1,
    )  # fmt: skip
    return grpo_trainer.Config(**(defaults | changes))


def lines_of(path):
    return [json.loads(line) for line in Path(path).read_text().splitlines()]


def without_times(metrics):
    return [{k: v for k, v in m.items() if not k.startswith(("time/", "perf/"))} for m in metrics]


@pytest.mark.slow
def test_learns_a_trivial_task(workshop):
    config = run_config(
        workshop,
        "learns",
        total_steps=40,
        train_batch_size=8,
        mini_batch_size=8,
        group_size=8,
        val_file=(str(workshop / "val.parquet"),),
        val_n=2,
        val_top_p=1.0,
    )
    grpo_trainer.train(config)
    metrics = lines_of(workshop / "learns/metrics.jsonl")
    assert metrics[1]["reward/mean"] < 0.2 and metrics[-1]["reward/mean"] > 0.9
    assert metrics[-1]["val/toy/mean@2"] > metrics[0]["val/toy/mean@2"]
    assert {"val/toy/maj@2", "val/toy/pass@2"} <= set(metrics[-1])


@pytest.mark.slow
def test_a_run_leaves_what_it_promises_and_resumes_exactly(workshop):
    whole = run_config(workshop, "whole", total_steps=4, val_file=(str(workshop / "val.parquet"),), val_every=2, val_greedy=True)
    target = grpo_trainer.train(whole)
    folder = workshop / "whole"
    assert {"config.json", "metrics.jsonl", "samples.jsonl", "curves.png", "checkpoints"} <= {p.name for p in folder.iterdir()}
    assert json.loads((folder / "config.json").read_text())["lr"] == 3e-3
    metrics = lines_of(folder / "metrics.jsonl")
    assert [m["step"] for m in metrics] == [0, 1, 2, 3, 4]
    assert ["val/toy/mean@1" in m for m in metrics] == [True, False, True, False, True]
    expected = """
        reward/mean reward/no_verdict actor/entropy actor/grad_norm rollout/logprob_diff response_length/mean
        time/rollout time/reward_wait time/update time/step perf/tokens_per_s
    """
    assert set(expected.split()) <= set(metrics[1])
    sample = lines_of(folder / "samples.jsonl")[-1]
    assert {"step", "split", "prompt", "response", "reward_score", "status", "reward_extra_info"} <= set(sample)
    assert (folder / "curves.png").read_bytes()[:4] == b"\x89PNG"
    from transformers import AutoModelForCausalLM, AutoTokenizer

    trained = AutoModelForCausalLM.from_pretrained(target)
    assert AutoTokenizer.from_pretrained(target).chat_template

    part = run_config(workshop, "part", total_steps=2, val_file=whole.val_file, val_every=2, val_greedy=True)
    grpo_trainer.train(part)
    resumed = grpo_trainer.train(dataclasses.replace(part, total_steps=4, resume="auto"))
    assert without_times(lines_of(workshop / "part/metrics.jsonl")) == without_times(metrics)
    again = AutoModelForCausalLM.from_pretrained(resumed)
    assert all(torch.equal(a, b) for a, b in zip(trained.parameters(), again.parameters()))


@pytest.mark.slow
def test_colocate_gives_the_same_run_as_standalone(workshop):
    for mode in ("standalone", "colocate"):
        grpo_trainer.train(run_config(workshop, mode, total_steps=2, reward_mode=mode))
    first, second = (without_times(lines_of(workshop / mode / "metrics.jsonl")) for mode in ("standalone", "colocate"))
    assert first == second


@pytest.mark.slow
def test_a_run_without_verdicts_stops_with_a_word_on_why(workshop):
    with pytest.raises(RuntimeError, match=r"100% of the samples have no verdict.*is the reward model up.*the judge sleeps"):
        grpo_trainer.train(run_config(workshop, "silent", reward_fn=f"{workshop}/reward.py:silent"))


def test_old_checkpoints_are_deleted_and_half_written_ones_ignored(tmp_path, model, tokenizer):
    config = config_of(out_dir=str(tmp_path), keep_checkpoints=2)
    optimizer = torch.optim.AdamW(model.parameters())
    for step in (1, 2, 10):
        grpo_trainer.save_checkpoint(model, tokenizer, optimizer, step, config)
    (tmp_path / "checkpoints/step_11").mkdir()
    assert [p.name for p in grpo_trainer.checkpoints_in(tmp_path / "checkpoints")] == ["step_2", "step_10"]


@pytest.mark.parametrize(
    "changes, message",
    [
        (dict(train_file="nowhere.parquet"), "nowhere.parquet: no such file"),
        (dict(mini_batch_size=3), "mini_batch_size: 3 does not divide"),
        (dict(temperature=0.0), "temperature: 0.0 must be above 0"),
        (dict(overlong_buffer=9), "overlong_buffer: 9 is larger than max_response_length 8"),
        (dict(reward_kwargs="{1"), "reward_kwargs: '{1' is not JSON"),
        (dict(reward_kwargs="[1]"), "must be a JSON object"),
        (dict(model="nowhere"), "model: 'nowhere' is neither a folder nor a hub name"),
        (dict(genrm="x", router_address="y:1"), "genrm and router_address: give one of them"),
        (dict(max_prompt_length=1), "no row is left"),
        (dict(total_steps=0), "total_steps: 0 must be at least 1"),
    ],
)
def test_wrong_settings_are_refused_in_one_line(tmp_path, model, tokenizer, changes, message):
    model.save_pretrained(tmp_path / "model")
    tokenizer.save_pretrained(tmp_path / "model")
    rng = random.Random(0)
    pq.write_table(
        pa.Table.from_pylist([toy_world.policy_row(toy_world.random_problem(rng, toy_world.REST), "toy", "train", 0)]),
        tmp_path / "train.parquet",
    )
    with pytest.raises(ValueError, match=re.escape(message)):
        grpo_trainer.train(run_config(tmp_path, "run", **changes))


def test_a_missing_column_and_a_missing_chat_template_are_named(tmp_path, model, tokenizer):
    model.save_pretrained(tmp_path / "model")
    tokenizer.save_pretrained(tmp_path / "model")
    pq.write_table(pa.table({"data_source": ["x"], "prompt": [[{"role": "user", "content": "x"}]]}), tmp_path / "train.parquet")
    with pytest.raises(ValueError, match="column 'reward_model' is missing"):
        grpo_trainer.train(run_config(tmp_path, "run"))
    (tmp_path / "model/chat_template.jinja").unlink()
    with pytest.raises(ValueError, match="has no chat template"):
        grpo_trainer.train(run_config(tmp_path, "run"))


def test_unknown_flags_are_errors_and_every_flag_is_read():
    out = subprocess.run([sys.executable, "grpo_trainer.py", "--no-such-flag", "1"], capture_output=True, text=True)
    assert out.returncode == 2 and "no-such-flag" in out.stdout + out.stderr
    source = Path("grpo_trainer.py").read_text().split("# ---", 1)[1]
    for field in dataclasses.fields(grpo_trainer.Config):
        assert f"config.{field.name}" in source or f'"{field.name}"' in source, f"--{field.name} is read nowhere"
