"""The trainer: losses worked out by hand, invariances, sampling against transformers, and whole runs on a tiny model."""

import contextlib
import dataclasses
import json
import math
import random
import re
import signal
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path
from types import SimpleNamespace

import pyarrow as pa
import pyarrow.parquet as pq
import psutil
import pytest
import torch
from transformers import AutoModelForCausalLM, BloomConfig, GPT2Config, LlamaConfig, LlamaForCausalLM, MistralConfig

import genrm_server
import grpo_trainer
import run_folder
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


def test_kl_to_the_reference_by_hand():
    logprobs, reference = torch.tensor([[-1.0, -2.0, NAN]]), torch.tensor([[-1.5, -1.0, 3.0]])
    mask = torch.tensor([[True, True, False]])
    kl = grpo_trainer.compute_kl_loss(logprobs, reference, mask, 4)
    assert kl.item() == pytest.approx((math.exp(-0.5) + 0.5 - 1 + math.exp(1) - 1 - 1) / 4)
    assert grpo_trainer.compute_kl_loss(logprobs, logprobs, mask, 4).item() == 0


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


SMALL = dict(vocab_size=64, hidden_size=32, num_hidden_layers=2, num_attention_heads=2)
OTHERS = {  # what may not get the mask in the form that full attention with rotary positions can take
    "sliding window": MistralConfig(**SMALL, intermediate_size=64, num_key_value_heads=1, sliding_window=4),
    "learnt positions": GPT2Config(**SMALL, bos_token_id=1, eos_token_id=1),
    "positions from the mask": BloomConfig(**SMALL),
}


@pytest.mark.parametrize("kind", ["ours", *OTHERS])
def test_rollout_logprobs_are_the_trainers(model, kind):
    if kind in OTHERS:
        torch.manual_seed(0)
        model = AutoModelForCausalLM.from_config(OTHERS[kind]).eval()
        for weight in model.parameters():  # as they begin, such small models hardly look at what came before
            torch.nn.init.normal_(weight, std=0.2)
    prompts = [[5, 6, 7], [8], [9, 10, 11, 12, 13]]
    for temperature in (1.0, 1.3):
        responses, sampled = rollout(model, prompts, group_size=3, temperature=temperature, at_once=6)
        sequences = [prompts[b // 3] + response for b, response in enumerate(responses)]
        with torch.no_grad():
            logprobs, entropy = grpo_trainer.logprobs_and_entropy(
                model, sequences, [len(r) for r in responses], temperature, CPU, chunk=5
            )
        for row, values in zip(logprobs, sampled):
            assert torch.allclose(row[: len(values)], torch.tensor(values), atol=1e-5)
            assert row[len(values) :].abs().sum() == 0
        assert 0 < entropy.max() < math.log(model.config.vocab_size)


def test_what_a_model_keeps_from_inference_mode_can_be_trained_with():
    """Here tables of rotary positions that are made anew when a text gets longer than any before."""
    scaling = {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 10_000.0}
    model = LlamaForCausalLM(LlamaConfig(**SMALL, intermediate_size=64, max_position_embeddings=8, rope_parameters=scaling))
    before = model.model.rotary_emb.inv_freq.clone()
    with torch.inference_mode():
        responses, _ = rollout(model.eval(), [[5, 6, 7]], length=12)
    assert not torch.equal(model.model.rotary_emb.inv_freq, before)
    sequences = [[5, 6, 7] + response for response in responses]
    logprobs, _ = grpo_trainer.logprobs_and_entropy(model, sequences, [len(r) for r in responses], 1.0, CPU)
    logprobs.sum().backward()
    assert all(parameter.grad is not None for parameter in model.parameters())


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
    assert metrics["rollout/logprob_diff"] < 1e-5 and metrics["actor/updates"] == 1


def test_update_does_not_depend_on_micro_batches(model):
    batch = a_batch(model)
    whole, metrics = updated(model, batch, config_of(max_tokens_per_micro_batch=10_000, entropy_coef=0.01))
    parts, part_metrics = updated(model, batch, config_of(max_tokens_per_micro_batch=1, entropy_coef=0.01))
    assert torch.allclose(whole, parts, atol=2e-7)
    for key in ("actor/loss", "actor/entropy", "actor/grad_norm"):
        assert part_metrics[key] == pytest.approx(metrics[key], rel=1e-4)


def test_each_prompt_is_computed_once_where_that_saves_much(model):
    """Eight samples of two prompts: the model sees each prompt once; the results are the same as one by one."""
    import copy

    prompts = [list(range(5, 30)), list(range(40, 50))]
    sequences = [prompts[i // 4] + [60 + i] * (1 + i) for i in range(8)]
    counts, seen = [1 + i for i in range(8)], []

    def run(batches):
        clone = copy.deepcopy(model)
        clone.get_input_embeddings().register_forward_hook(lambda module, inputs, out: seen.append(inputs[0].shape))
        parts = []
        for batch in batches:
            chosen = [sequences[i] for i in batch], [counts[i] for i in batch]
            part = grpo_trainer.logprobs_and_entropy(clone, *chosen, 1.0, CPU)[0]
            part.sum().backward()
            parts += [row[: counts[i]].detach() for row, i in zip(part, batch)]
        return torch.cat(parts), torch.cat([p.grad.flatten() for p in clone.parameters()])

    together, gradient = run([range(8)])
    assert seen == [(2, 25), (8, 7)]  # prompts, padded on the left; all response tokens but the last
    seen.clear()
    alone, expected = run([[i] for i in range(8)])
    assert seen == [(1, len(sequence)) for sequence in sequences]
    assert torch.allclose(together, alone, atol=1e-5) and torch.allclose(gradient, expected, atol=1e-4, rtol=1e-3)


def test_second_mini_batch_uses_the_log_probabilities_from_before_the_first_update(model):
    batch = a_batch(model)
    _, metrics = updated(model, batch, config_of(mini_batch_size=1, lr=0.05))
    assert metrics["actor/updates"] > 1
    assert metrics["rollout/logprob_diff"] < 1e-5  # "old" is the rollout's, in every mini-batch
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
    assert metrics["actor/updates"] == 0 and "actor/loss" not in metrics
    assert metrics["rollout/logprob_diff"] < 1e-5 and metrics["actor/entropy"] > 1  # watched all the same


def rank_of_two(rank, folder, model, batch, config, total):
    """One of two processes: half of the samples, gradients summed over both."""
    import torch.distributed as dist

    dist.init_process_group("gloo", init_method=f"file://{folder}/rendezvous", rank=rank, world_size=2)
    torch.set_num_threads(1)
    matter = [i for i in range(16) if batch["has_verdict"][i]]
    metrics = grpo_trainer.accumulate_gradients(model, batch, matter[rank::2], total, config, CPU, {}, {})
    sums = torch.tensor([metrics["actor/loss"], metrics["tokens"]], dtype=torch.float64)
    for tensor in [sums, *(p.grad for p in model.parameters())]:
        dist.all_reduce(tensor)
    if rank == 0:
        torch.save([sums] + [p.grad for p in model.parameters()], f"{folder}/result")
    dist.destroy_process_group()


@pytest.mark.slow
def test_two_ranks_have_the_gradient_of_one(model, tmp_path):
    """The loss is divided by the tokens of the whole mini-batch, so the sum over ranks is the loss, for any split."""
    import copy

    batch, config = a_batch(model), config_of(entropy_coef=0.01)
    total = sum(len(r) for r, known in zip(batch["responses"], batch["has_verdict"]) if known)
    torch.multiprocessing.spawn(rank_of_two, (str(tmp_path), copy.deepcopy(model), batch, config, total), nprocs=2)
    sums, *gradients = torch.load(tmp_path / "result")
    one = copy.deepcopy(model)
    matter = [i for i in range(16) if batch["has_verdict"][i]]
    metrics = grpo_trainer.accumulate_gradients(one, batch, matter, total, config, CPU, {}, {})
    assert sums.tolist() == [pytest.approx(metrics["actor/loss"], abs=1e-6), metrics["tokens"]] and metrics["tokens"] == total
    assert max(g.abs().max() for g in gradients) > 1e-4
    for got, parameter in zip(gradients, one.parameters()):
        assert torch.allclose(got, parameter.grad, atol=1e-6)


def test_nothing_is_mutated(model):
    import copy

    batch = a_batch(model)
    before = copy.deepcopy(batch)
    updated(model, batch, config_of(mini_batch_size=2, tis_cap=2.0, entropy_coef=0.01))
    assert batch == before


def test_kl_pulls_back_to_the_reference_also_where_no_reward_differs(model):
    """All advantages zero: only the KL term is left, and it moves the policy towards the reference."""
    import copy

    batch, policy = a_batch(model), copy.deepcopy(model)
    batch["advantages"] = [0.0] * 16
    with torch.no_grad():
        for parameter in policy.parameters():
            parameter.add_(0.02 * torch.randn(parameter.shape, generator=torch.Generator().manual_seed(1)))
    optimizer, config = torch.optim.SGD(policy.parameters(), lr=0.05), config_of(kl_coef=1.0, max_grad_norm=1e9)
    kls = [
        grpo_trainer.update_policy(policy, optimizer, batch, config, CPU, reference_model=model)["actor/kl_to_reference"]
        for _ in range(4)
    ]
    assert kls[0] > 1e-3 and kls == sorted(kls, reverse=True) and kls[-1] < 0.9 * kls[0]
    same = copy.deepcopy(model)
    at_home = grpo_trainer.update_policy(same, torch.optim.SGD(same.parameters(), lr=0.0), batch, config, CPU, model)
    assert at_home["actor/kl_to_reference"] == pytest.approx(0, abs=1e-7) and at_home["actor/grad_norm"] < 1e-4


def test_truncated_importance_sampling_weighs_the_update(model):
    """Where the sampler was half as sure as the trainer, the weight is 2, or the cap."""
    batch = a_batch(model)
    batch["rollout_logprobs"] = [[value - math.log(2) for value in row] for row in batch["rollout_logprobs"]]
    norms = {cap: updated(model, batch, config_of(tis_cap=cap))[1]["actor/grad_norm"] for cap in (None, 1.5, 4.0)}
    assert norms[1.5] == pytest.approx(1.5 * norms[None], rel=1e-3) and norms[4.0] == pytest.approx(2 * norms[None], rel=1e-3)


def test_the_end_token_counts_even_if_it_is_the_padding_token(model):
    """Masks go by length. Token 0 pads; a response that ends in it has its log-probability all the same."""
    sequences, counts = [[5, 6, 0], [7, 8, 9, 10, 0]], [1, 3]
    with torch.no_grad():
        logprobs, _ = grpo_trainer.logprobs_and_entropy(model, sequences, counts, 1.0, CPU)
        expected = model(torch.tensor([sequences[0]])).logits[0, 1].log_softmax(-1)[0]
    assert logprobs.shape == (2, 3) and logprobs[0, 0].item() == pytest.approx(expected.item(), abs=1e-5)
    assert logprobs[0, 1:].tolist() == [0, 0] and (logprobs[1] < 0).all()


@pytest.mark.slow
def test_gradient_checkpointing_changes_nothing_but_memory(workshop, model):
    batch, norms = a_batch(model), []
    for on in (False, True):
        trainer = grpo_trainer.Trainer(run_config(workshop, f"checkpointing_{on}", gradient_checkpointing=on))
        trainer.load()
        layers = [m for m in trainer.model.modules() if type(m).__name__ == "LlamaDecoderLayer"]
        assert all(layer.training == on and not layer.self_attn.training for layer in layers) and layers
        norms.append(grpo_trainer.update_policy(trainer.model, trainer.optimizer, batch, config_of(), CPU)["actor/grad_norm"])
    assert norms[0] == pytest.approx(norms[1], rel=1e-5)


def test_a_loss_that_is_not_finite_stops_the_run(model):
    batch = a_batch(model)
    batch["advantages"] = [math.inf if a else 0.0 for a in batch["advantages"]]
    with pytest.raises(RuntimeError, match="loss -?(inf|nan).*not finite"):
        updated(model, batch, config_of())


# ------------------------------------------------------------------------------------------------------------- small parts


def test_every_epoch_is_a_shuffle_and_a_draw_depends_on_its_place_alone():
    rows = list(range(10))
    flat = grpo_trainer.draw(rows, 0, 20, seed=0)
    assert sorted(flat[:10]) == rows and sorted(flat[10:]) == rows and flat[:10] != flat[10:]
    assert grpo_trainer.draw(rows, 8, 7, seed=0) == flat[8:15]
    assert grpo_trainer.draw(rows, 0, 20, seed=1) != flat


def result(score, **info):
    return {"reward_score": score, "reward_extra_info": info, "status": "ok" if score is not None else "no_verdict"}


def test_why_a_group_is_useless():
    good, bad, silent = result(1.0, acc=True), result(-1.0, acc=False), result(None, acc=True)
    assert grpo_trainer.why_useless([good, bad, silent]) is None
    assert grpo_trainer.why_useless([good, good, silent]) == "all_right"
    assert grpo_trainer.why_useless([bad, bad]) == "all_wrong"
    assert grpo_trainer.why_useless([good, silent, silent]) == "no_verdict"
    assert grpo_trainer.why_useless([result(0.0, acc=True), result(0.0, acc=False)]) == "equal_rewards"


# -------------------------------------------------------------------------------------------------------- whole runs (Ray)

REWARD = '''
import os, signal
def likes_sevens(data_source, solution_str, ground_truth, extra_info, limit=40, **_):
    """The share of sevens among what was written: a trivial task."""
    share = solution_str.count("7") / max(len(solution_str), 1)
    return {"score": share, "acc": share > 0.9}
def silent(data_source, solution_str, ground_truth, extra_info, **_):
    return {"score": None, "why": "the judge sleeps"}
def by_index(data_source, solution_str, ground_truth, extra_info, **_):
    """Rows 0, 1, 6, 7 ... are always right, 2, 3, 8, 9 ... always wrong; of the others it depends on what was written."""
    acc = [True, False, len(solution_str) % 2 == 0][extra_info["index"] // 2 % 3]
    return {"score": 1.0 if acc else -1.0, "acc": acc}
def compute_score_fapo(data_source, solution_str, ground_truth, extra_info, **_):
    raise RuntimeError("only the baseline was asked for")
def compute_score_baseline(data_source, solution_str, ground_truth, extra_info, **_):
    return {"score": 1.0, "acc": True, "flawed_positive": len(solution_str) % 2 == 0}
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
@pytest.mark.parametrize("rollout", ["hf", "vllm"])
def test_learns_a_trivial_task(workshop, rollout):
    config = run_config(
        workshop, f"learns_{rollout}", rollout=rollout, rollout_cpus="0", total_steps=40, train_batch_size=8, mini_batch_size=8,
        group_size=8, val_file=(str(workshop / "val.parquet"),), val_n=2, val_top_p=1.0,
    )  # fmt: skip
    grpo_trainer.train(config)
    metrics = lines_of(workshop / f"learns_{rollout}/metrics.jsonl")
    assert metrics[1]["reward/mean"] < 0.2 and metrics[-1]["reward/mean"] > 0.9
    assert metrics[-1]["val/toy/mean@2"] > metrics[0]["val/toy/mean@2"]
    assert {"val/toy/maj@2", "val/toy/pass@2"} <= set(metrics[-1])
    assert max(m["rollout/logprob_diff"] for m in metrics[1:]) < 1e-4  # every step's rollouts had the weights of the step before
    assert rollout == "hf" or all(0 < m["time/sync"] < m["time/step"] for m in metrics[1:])


def tied_policy(tokenizer):
    shape = toy_world.new_model(len(tokenizer), seed=3).config
    shape.tie_word_embeddings = True
    policy = LlamaForCausalLM(shape).eval()
    assert policy.lm_head.weight is policy.model.embed_tokens.weight
    return policy


def move(policy, scale):
    with torch.no_grad():
        for parameter in policy.parameters():
            parameter.add_(scale * torch.randn_like(parameter))


def served_difference(servers, policy, temperature=1.0):
    """rollout/logprob_diff of 16 samples from the servers, after a look at the samples themselves."""
    prompts, ends, finished = [[5, 6, 7], [8], [9, 10, 11, 12], [13, 14]], {1, 20, 21, 22, 23, 24, 25}, []
    responses, logprobs = grpo_trainer.rollout_vllm(
        servers, prompts, 4, max_response_length=10, temperature=temperature, eos_ids=ends, at_once=8,
        on_finished=lambda b, response: finished.append((b, response)),
    )  # fmt: skip
    assert sorted(finished) == list(enumerate(responses))  # each sample reported once
    assert all(len(row) == len(response) <= 10 for row, response in zip(logprobs, responses))
    assert all(response[-1] in ends or len(response) == 10 for response in responses)
    batch = a_batch(policy) | {"responses": responses, "rollout_logprobs": logprobs, "has_verdict": [True] * 16}
    return updated(policy, batch, config_of(temperature=temperature))[1]["rollout/logprob_diff"]


@pytest.mark.slow
def test_stale_weights_on_the_servers_are_noticed_and_a_restarted_server_has_the_newest(workshop, tokenizer):
    """Real vLLM, a model with tied embeddings. What the servers say is what the trainer says, except without a sync."""
    policy = tied_policy(tokenizer)
    settings = genrm_server.Config(model="", cpus="0", max_model_len=32, log_dir=workshop / "policy_logs")
    servers = genrm_server.PolicyServers(policy, tokenizer, settings)
    try:
        assert served_difference(servers, policy) < 1e-5 and served_difference(servers, policy, temperature=1.3) < 1e-5
        move(policy, 0.02)
        stale = served_difference(servers, policy)
        servers.sync(policy)
        # The same prompts again: no key or value of the old weights is left in a cache.
        assert stale > 0.02 > 1e-5 > served_difference(servers, policy)
        move(policy, 0.02)
        servers.sync(policy)
        servers.servers.slots[0].server.child.kill()
        assert served_difference(servers, policy) < 1e-5 and servers.servers.restarts == 1  # the requests waited for the new one
    finally:
        servers.shutdown()
    assert not servers.folder.exists()


class StoreCommunicator:
    """vLLM's PyNcclCommunicator over the TCP store, for machines without a GPU."""

    disabled = False

    def __init__(self, store, device):
        self.broadcast = store.broadcast


@pytest.mark.slow
def test_weights_sent_from_process_to_process_and_a_restarted_server_waits_for_them(workshop, tokenizer, monkeypatch):
    """Real vLLM and its endpoints for weight transfer; only NCCL itself is replaced, which needs GPUs."""
    monkeypatch.setattr("vllm.distributed.device_communicators.pynccl.PyNcclCommunicator", StoreCommunicator)
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parent))
    policy = tied_policy(tokenizer)
    stand_in = ("--weight-transfer-config", '{"backend": "store"}', "--worker-extension-cls", "store_transfer.Extension")
    folder = workshop / "transfer_logs"
    settings = genrm_server.Config(model="", num_servers=2, max_model_len=32, log_dir=folder, vllm_args=stand_in)
    servers = genrm_server.PolicyServers(policy, tokenizer, settings, "nccl")
    try:
        move(policy, 0.02)
        stale = served_difference(servers, policy)
        servers.sync(policy)
        assert stale > 0.02 > 1e-5 > served_difference(servers, policy)
        servers.servers.slots[1].server.child.kill()
        assert served_difference(servers, policy) < 1e-5  # by the other one
        until = time.monotonic() + 120
        while genrm_server.http("GET", servers.servers.slots[1].url + "/health")[0] != 200 or not servers.servers.restarts:
            assert time.monotonic() < until
            time.sleep(0.5)
        move(policy, 0.02)
        servers.sync(policy)  # a new group, with both
        while servers.servers.slots[1].state != "ready":
            assert time.monotonic() < until
            time.sleep(0.1)
        assert len(servers.members) == 2 and served_difference(servers, policy) < 1e-5
    finally:
        servers.shutdown()


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
    assert set(expected.split()) <= set().union(*metrics[1:])  # a step in which no reward differs has no gradient
    sample = lines_of(folder / "samples.jsonl")[-1]
    assert {"step", "split", "prompt", "response", "reward_score", "status", "reward_extra_info"} <= set(sample)
    assert (folder / "curves.png").read_bytes()[:4] == b"\x89PNG"
    from transformers import AutoModelForCausalLM, AutoTokenizer

    trained = AutoModelForCausalLM.from_pretrained(target)
    assert AutoTokenizer.from_pretrained(target).chat_template

    part = run_config(workshop, "part", total_steps=2, val_file=whole.val_file, val_every=2, val_greedy=True)
    grpo_trainer.train(part)
    resumed = grpo_trainer.train(dataclasses.replace(part, total_steps=4, resume="auto"))
    assert grpo_trainer.train(dataclasses.replace(part, total_steps=4, resume="auto")) == resumed  # nothing left to do
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
def test_dynamic_sampling_refills_and_counts_what_it_drops_by_reason(workshop):
    options = dict(reward_fn=f"{workshop}/reward.py:by_index", dynamic_sampling=True, max_refills=100)
    options |= dict(total_steps=4, samples_per_step=1000)
    grpo_trainer.train(run_config(workshop, "dynamic", **options))
    metrics = lines_of(workshop / "dynamic/metrics.jsonl")[1:]
    reasons = Counter()
    for m in metrics:
        dropped = {name: m[f"dynamic/dropped_{name}"] for name in ("all_right", "all_wrong", "equal_rewards", "no_verdict")}
        assert m["dynamic/kept"] == 4 and m["dynamic/prompts"] == 4 + sum(dropped.values())
        assert (m["dynamic/refills"] > 0) == (sum(dropped.values()) > 0)
        reasons.update(dropped)
        assert m["actor/updates"] == 2  # two mini-batches of two prompts each
    assert reasons["all_right"] >= 3 and reasons["all_wrong"] >= 3 and reasons["no_verdict"] == 0
    prompts = [s["prompt"] for s in lines_of(workshop / "dynamic/samples.jsonl") if s["split"] == "train"][::4]
    assert len(prompts) == sum(m["dynamic/prompts"] for m in metrics) and len(set(prompts[:32])) == 32  # an epoch, none left out

    # It goes on with the prompt after the last one drawn: the same run, when it was stopped after the first step.
    grpo_trainer.train(run_config(workshop, "dynamic_part", **options | {"total_steps": 2}))
    grpo_trainer.train(run_config(workshop, "dynamic_part", **options, resume="auto"))
    assert without_times(lines_of(workshop / "dynamic_part/metrics.jsonl"))[1:] == without_times(metrics)


@pytest.mark.slow
def test_dynamic_sampling_makes_do_with_what_it_has_after_the_last_refill(workshop):
    options = dict(reward_fn=f"{workshop}/reward.py:compute_score_baseline", dynamic_sampling=True, max_refills=2)
    grpo_trainer.train(run_config(workshop, "nothing_kept", total_steps=1, **options))
    metrics = lines_of(workshop / "nothing_kept/metrics.jsonl")[1]
    assert metrics["dynamic/kept"] == metrics["actor/updates"] == 0 and metrics["dynamic/dropped_all_right"] == 12
    assert 0 <= metrics["rollout/logprob_diff"] < 1e-5  # stale weights would be noticed all the same


@pytest.mark.slow
def test_baseline_calls_the_function_that_only_measures(workshop):
    grpo_trainer.train(run_config(workshop, "base", reward_fn=f"{workshop}/reward.py:compute_score_fapo", baseline=True))
    metrics = lines_of(workshop / "base/metrics.jsonl")[-1]
    assert metrics["reward/no_verdict"] == 0 and 0 <= metrics["reward/flawed_positive_rate"] <= 1


@pytest.mark.slow
def test_tensorboard_and_wandb_get_what_metrics_jsonl_gets(workshop, monkeypatch):
    monkeypatch.setenv("WANDB_MODE", "offline")
    config = run_config(workshop, "watched", tensorboard=True, wandb=True, val_file=(str(workshop / "val.parquet"),))
    grpo_trainer.train(config)
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(workshop / "watched/tensorboard")).Reload()
    means = [m["reward/mean"] for m in lines_of(workshop / "watched/metrics.jsonl") if m["step"] > 0]
    assert [event.value for event in events.Scalars("reward/mean")] == pytest.approx(means)
    assert "val/samples/text_summary" in events.Tags()["tensors"]
    (offline,) = (workshop / "watched/wandb").glob("offline-run-*/*.wandb")
    assert b"reward/mean" in offline.read_bytes() and b"val/samples" in offline.read_bytes()


@pytest.mark.slow
def test_stale_weights_stop_the_run(workshop):
    with pytest.raises(RuntimeError, match="logprob_diff .* is over max_logprob_diff 1e-12: the sampler does not use"):
        grpo_trainer.train(run_config(workshop, "stale", max_logprob_diff=1e-12))


# ------------------------------------------------------------------------------------------------ runs that are interrupted


def start_run(config):
    """The run as a process of its own, through the command line."""
    arguments = []
    for name, value in dataclasses.asdict(config).items():
        if value is not None and value is not False and value != ():
            arguments.append(f"--{name.replace('_', '-')}")
            arguments += [] if value is True else [str(part) for part in (value if isinstance(value, tuple) else [value])]
    log = open(f"{config.out_dir}.log", "a")
    return subprocess.Popen([sys.executable, "grpo_trainer.py", *arguments], stdout=log, stderr=log, start_new_session=True)


def wait_for_step(config, process, step):
    """Until metrics.jsonl has the line of this step."""
    path, patience = Path(config.out_dir, "metrics.jsonl"), time.monotonic() + 120
    while not path.is_file() or f'{{"step": {step},' not in path.read_text():
        assert process.poll() is None and time.monotonic() < patience, Path(f"{config.out_dir}.log").read_text()
        time.sleep(0.02)


@pytest.mark.slow
def test_killed_at_random_moments_and_resumed_is_exactly_the_uninterrupted_run(workshop):
    """SIGKILL three times, in the middle of whatever happens to go on."""
    options = dict(
        total_steps=12, save_every=1, val_every=3, val_file=(str(workshop / "val.parquet"),), max_response_length=48,
        train_batch_size=8, keep_checkpoints=1, dynamic_sampling=True, resume="auto",
    )  # fmt: skip
    grpo_trainer.train(run_config(workshop, "unkilled", **options))
    config, rng = run_config(workshop, "killed", **options), random.Random()
    reached = 0
    for _ in range(3):
        process = start_run(config)
        wait_for_step(config, process, reached + 1)
        time.sleep(rng.uniform(0, 1.5))
        assert process.poll() is None, "the run is over too soon for this test"
        process.kill()
        process.wait()
        reached = max(m["step"] for m in lines_of_torn(workshop / "killed/metrics.jsonl"))
        assert len(grpo_trainer.checkpoints_in(workshop / "killed/checkpoints")) >= 1
    process = start_run(config)
    assert process.wait(300) == 0, (workshop / "killed.log").read_text()
    expected, got = (without_times(lines_of(workshop / name / "metrics.jsonl")) for name in ("unkilled", "killed"))
    assert [m["step"] for m in got] == list(range(13)) and got == expected
    samples = [lines_of(workshop / name / "samples.jsonl") for name in ("unkilled", "killed")]
    assert samples[0] == samples[1]


def lines_of_torn(path):
    """The lines of a file whose last one may be cut off."""
    found = []
    for line in Path(path).read_text().splitlines():
        with contextlib.suppress(json.JSONDecodeError):
            found.append(json.loads(line))
    return found


@pytest.mark.slow
@pytest.mark.parametrize("name", ["SIGINT", "SIGTERM"])
def test_ctrl_c_saves_and_leaves_cleanly(workshop, name):
    config = run_config(workshop, f"stopped_{name}", total_steps=500, resume="auto", max_response_length=48)
    process = start_run(config)
    wait_for_step(config, process, 2)
    process.send_signal(getattr(signal, name))
    assert process.wait(60) == 130, Path(f"{config.out_dir}.log").read_text()
    steps = [m["step"] for m in lines_of(workshop / f"stopped_{name}/metrics.jsonl")]
    (saved,) = grpo_trainer.checkpoints_in(workshop / f"stopped_{name}/checkpoints")
    assert saved.name == f"step_{steps[-1]}" and steps == list(range(steps[-1] + 1))
    text = Path(f"{config.out_dir}.log").read_text()
    assert f"--resume auto goes on after step {steps[-1]}" in text and "Traceback" not in text
    assert not psutil.pid_exists(process.pid) and not [
        p for p in psutil.process_iter(["cmdline"]) if str(config.out_dir) in " ".join(p.info["cmdline"] or [])
    ]


def test_ctrl_c_during_an_update_waits_for_its_end_and_a_second_one_does_not():
    before = signal.getsignal(signal.SIGINT)  # not the same in a shell's background job, where it is ignored
    interrupts = grpo_trainer.Interrupts()
    assert signal.getsignal(signal.SIGINT) != before
    try:
        with pytest.raises(KeyboardInterrupt):
            signal.raise_signal(signal.SIGINT)
        interrupts.hold = True
        signal.raise_signal(signal.SIGTERM)  # nothing yet
        with pytest.raises(KeyboardInterrupt):
            interrupts.release()
        interrupts.hold = True
        with pytest.raises(KeyboardInterrupt):
            signal.raise_signal(signal.SIGINT)
    finally:
        interrupts.restore()
    assert signal.getsignal(signal.SIGINT) is before


@pytest.mark.slow
def test_a_full_disk_costs_no_earlier_checkpoint(workshop):
    """A limit on the size of files stands in for a full disk: the kernel refuses the write in the same place."""
    config = run_config(workshop, "full", total_steps=1)
    grpo_trainer.train(config)
    code = f"""
import dataclasses, resource, signal, grpo_trainer
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
update = grpo_trainer.update_policy
def update_and_fill_the_disk(*arguments):
    resource.setrlimit(resource.RLIMIT_FSIZE, (1_000_000, 1_000_000))
    return update(*arguments)
grpo_trainer.update_policy = update_and_fill_the_disk
config = grpo_trainer.{config!r}
grpo_trainer.train(dataclasses.replace(config, resume="auto", total_steps=2))
"""
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    last = run.stderr.strip().splitlines()[-1]
    assert run.returncode == 1 and "step_2: could not be written" in last and "--resume auto goes on from step_1" in last
    assert [p.name for p in (workshop / "full/checkpoints").iterdir()] == ["step_1"]
    grpo_trainer.train(dataclasses.replace(config, resume="auto", total_steps=2))
    assert [m["step"] for m in lines_of(workshop / "full/metrics.jsonl")] == [0, 1, 2]


@pytest.mark.slow
def test_dry_run_checks_and_estimates_and_starts_nothing(workshop):
    process = start_run(run_config(workshop, "dry", dry_run=True, kl_coef=0.1))
    assert process.wait(60) == 0
    text = (workshop / "dry.log").read_text()
    assert '"kl_coef": 0.1' in text and "GB  reference model" in text and "at the peak" in text and "epochs of 32" in text
    assert "Ray" not in text and not any((workshop / "dry").iterdir())


def test_the_estimate_of_memory_counts_the_parameters(workshop):
    config = run_config(workshop, "estimate", kl_coef=0.1)
    tiny = toy_world.new_model(len(toy_world.build_tokenizer(toy_world.tokenizer_corpus(random.Random(0)))), seed=0)
    size = 4e-9 * sum(p.numel() for p in tiny.parameters())
    estimate = grpo_trainer.estimate_memory(config)
    names = ("weights", "gradients", "Adam", "reference model")
    assert [estimate[name] for name in names] == pytest.approx([size, size, 2 * size, size])
    more = grpo_trainer.estimate_memory(dataclasses.replace(config, max_tokens_per_micro_batch=2 * 16384))
    assert 1.5 < more["update: activations of a micro-batch"] / estimate["update: activations of a micro-batch"] <= 2


@pytest.mark.slow
def test_a_run_without_verdicts_stops_with_a_word_on_why(workshop):
    with pytest.raises(RuntimeError, match=r"100% of the samples have no verdict.*is the reward model up.*the judge sleeps"):
        grpo_trainer.train(run_config(workshop, "silent", reward_fn=f"{workshop}/reward.py:silent"))


@pytest.mark.parametrize(
    "changes, message",
    [
        (dict(train_file="nowhere.parquet"), "nowhere.parquet: no such file"),
        (dict(mini_batch_size=3), "mini_batch_size: 3 does not divide"),
        (dict(temperature=0.0), "temperature: 0.0 must be above 0"),
        (dict(overlong_buffer=9), "overlong_buffer: 9 is larger than max_response_length 8"),
        (dict(reward_kwargs="{1"), "reward_kwargs: '{1' is not JSON"),
        (dict(reward_kwargs="[1]"), "or not a JSON object"),
        (dict(model="nowhere"), "model: 'nowhere' is neither a folder nor a hub name"),
        (dict(genrm="x", router_address="y:1"), "genrm and router_address: give one"),
        (dict(max_prompt_length=1), "no row is left"),
        (dict(total_steps=0), "total_steps: 0 must be at least 1"),
        (dict(max_response_length=1000), "1000 and the longest prompt are 10"),
        (dict(weight_sync="nccl"), "weight_sync: nccl sends from GPU to GPU"),
        (dict(val_top_p=0.0), "val_top_p: 0.0 must be above 0"),
        (dict(device="gpu"), "device: 'gpu' must be auto, cpu, cuda or cuda:N"),
        (dict(out_dir="/proc/run"), "out_dir: /proc/run cannot be written to"),
        (dict(train_file=__file__), "test_grpo_trainer.py: the name must end with .parquet or .jsonl"),
        (dict(reward_fn="nowhere.py:x"), "reward function 'nowhere.py:x': loading the file failed"),
        (dict(reward_fn=f"{toy_world.__file__}:nothing"), "has no function 'nothing'"),
        (dict(genrm="nowhere"), "genrm: 'nowhere' is neither a folder nor a hub name"),
    ],
)
def test_wrong_settings_are_refused_in_one_line(tmp_path, model, tokenizer, changes, message):
    with pytest.raises(ValueError, match=re.escape(message)):
        prepared(tmp_path, model, tokenizer, **changes)


def test_a_disk_without_room_for_the_checkpoints_is_noticed_first(tmp_path, model, tokenizer, monkeypatch):
    monkeypatch.setattr(run_folder.shutil, "disk_usage", lambda path: SimpleNamespace(free=20_000_000))
    with pytest.raises(ValueError, match=r"out_dir: 0.0 GB are free in .*run, checkpoints need 0.[0-9]; make room"):
        prepared(tmp_path, model, tokenizer)


def prepared(folder, tiny, tokenizer, **changes):
    """A Trainer that has checked and read its input and not started anything."""
    tiny.save_pretrained(folder / "model")
    tokenizer.save_pretrained(folder / "model")
    rng = random.Random(0)
    rows = [toy_world.policy_row(toy_world.random_problem(rng, toy_world.REST), "toy", "train", 0)]
    pq.write_table(pa.Table.from_pylist(rows), folder / "train.parquet")
    (folder / "reward.py").write_text(REWARD)
    return grpo_trainer.Trainer(run_config(folder, "run", **changes))


def test_a_missing_column_and_a_missing_chat_template_are_named(tmp_path, model, tokenizer):
    model.save_pretrained(tmp_path / "model")
    tokenizer.save_pretrained(tmp_path / "model")
    pq.write_table(pa.table({"data_source": ["x"], "prompt": [[{"role": "user", "content": "x"}]]}), tmp_path / "train.parquet")
    (tmp_path / "reward.py").write_text(REWARD)
    with pytest.raises(ValueError, match="row 0: no 'reward_model'"):
        grpo_trainer.train(run_config(tmp_path, "run"))
    (tmp_path / "model/chat_template.jinja").unlink()
    with pytest.raises(ValueError, match="has no chat template"):
        grpo_trainer.train(run_config(tmp_path, "run"))


def test_unknown_flags_are_errors_and_every_flag_is_read():
    out = subprocess.run([sys.executable, "grpo_trainer.py", "--no-such-flag", "1"], capture_output=True, text=True)
    assert out.returncode == 2 and "no-such-flag" in out.stdout + out.stderr
    source = Path("grpo_trainer.py").read_text().split("# ---", 1)[1] + Path("run_folder.py").read_text()
    for field in dataclasses.fields(grpo_trainer.Config):
        assert f"config.{field.name}" in source or f'"{field.name}"' in source, f"--{field.name} is read nowhere"
