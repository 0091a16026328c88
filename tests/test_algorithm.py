"""The mathematics: advantages and losses computed by hand, and the invariances that training relies on."""

import itertools
import math
import os
import random
import re
import sys
import textwrap
from collections import Counter
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

import algorithm
from algorithm import (
    ADVANTAGES,
    LOSSES,
    compute_advantages,
    compute_kl_loss,
    compute_policy_loss,
    overlong_penalty,
    paragraph_starts,
    tokens_before,
)
from compute_score import split_paragraphs
from played import sample_of
from policy import Sample
from recipes import advantages
from settings import PolicyOptions
from tiny import config_of, terms, worked

NAN = math.nan


def groups_with(numbers=(), **tensors):
    """Return a stand-in for algorithm.Groups with only the attributes that an advantage reads."""
    return SimpleNamespace(number=dict(numbers).get, **tensors)


def test_advantages_by_hand():
    rewards = torch.tensor(
        [[1.0, 0.0, -1.0, 0.0], [1.0, 1.0, 1.0, 1.0], [1.0, NAN, -1.0, NAN], [NAN, NAN, NAN, 1.0]]
    )
    kept = rewards.clone()
    got = compute_advantages(rewards)
    std = math.sqrt(2 / 3)  # sample variance of 1, 0, -1, 0: (1 + 1) / 3
    assert torch.allclose(got[0], torch.tensor([1.0, 0.0, -1.0, 0.0]) / (std + 1e-6))
    assert got[1].tolist() == [0, 0, 0, 0]  # no spread
    # NaN is excluded from the statistics.
    assert torch.allclose(got[2], torch.tensor([1.0, 0.0, -1.0, 0.0]) / (math.sqrt(2) + 1e-6))
    assert got[3].tolist() == [0, 0, 0, 0]  # fewer than two verdicts
    assert torch.equal(rewards.nan_to_num(7.0), kept.nan_to_num(7.0))  # nothing is mutated


def test_a_failed_sample_has_no_vote_in_its_group():
    """The rewards are 1, 1, 0, 0, and the second sample has no verdict.

    Without its vote, the mean is 1/3 instead of 1/2. The standard deviation is sqrt(1/3) in both cases.
    """
    samples = [Sample({}, [5], [6]) for _ in range(4)]
    for sample, score in zip(samples, (1.0, 1.0, 0.0, 0.0)):
        sample.result = {"reward_score": score, "reward_extra_info": {}, "status": "ok"}
    samples[1].result |= {"reward_score": None, "status": "no_verdict"}
    algorithm.set_advantages([samples], config_of(), str)
    first, failed, *others = [sample.advantage for sample in samples]
    assert failed is None  # so it is excluded from the loss as well
    assert [first, *others] == pytest.approx([1.1547, -0.57735, -0.57735], abs=1e-4)


def test_a_verdict_that_is_lost_in_a_later_call_leaves_no_advantage(tmp_path):
    """With --dynamic-sampling, the advantages of the chosen groups are computed again, without the others."""
    code = "def divided(groups):\n    r = groups.rewards_P_G\n    return (r - 0.5) / (r.nansum() - 1)\n"
    (tmp_path / "own.py").write_text(code)
    options = config_of(advantage=f"{tmp_path}/own.py:divided")
    groups = [[sample_of(1.0), sample_of(0.0)], [sample_of(1.0), sample_of(1.0)]]
    algorithm.set_advantages(groups, options, str)
    assert [sample.advantage for sample in groups[0]] == [0.25, -0.25]
    algorithm.set_advantages(groups[:1], options, str)  # divides by 0
    assert [sample.result["reward_score"] for sample in groups[0]] == [None, None]
    assert [sample.advantage for sample in groups[0]] == [None, None]


def test_advantages_of_equal_rewards_are_zero_in_spite_of_rounding():
    assert compute_advantages(torch.full((1, 7), 0.1)).abs().max() == 0


def test_flawed_positives_get_a_negative_advantage_exactly_when_right_outnumbers_wrong():
    """With lambda = 1, the advantage of flawed answers changes sign where correct and wrong answers are
    equally frequent (paper, appendix A).
    """

    def flawed(right, wrong):
        return compute_advantages(torch.tensor([[1.0] * right + [0.0] * 2 + [-1.0] * wrong]))[0, right].item()

    assert flawed(2, 4) > 0 and flawed(3, 3) == pytest.approx(0) and flawed(4, 2) < 0


def loss_of(ratio, advantage, **kwargs):
    logprobs = torch.tensor([[math.log(ratio)]])
    loss, metrics = compute_policy_loss(
        logprobs, torch.zeros(1, 1), torch.tensor([advantage]), torch.ones(1, 1), 1, **kwargs
    )
    return loss.item(), metrics


@pytest.mark.parametrize(
    "ratio, advantage, loss",
    [
        (1.1, 2.0, -2.2),  # inside the range
        (1.5, 2.0, -2.56),  # clipped from above at 1.28
        (0.5, 2.0, -1.0),  # a decrease of a good token is not clipped
        (0.5, -2.0, 1.6),  # clipped from below at 0.8
        (1.5, -2.0, 3.0),  # an increase of a bad token is not clipped ...
        (20.0, -2.0, 20.0),  # ... but bounded at 10 (dual clip)
        (20.0, 2.0, -2.56),
    ],
)
def test_policy_loss_by_hand(ratio, advantage, loss):
    assert loss_of(ratio, advantage)[0] == pytest.approx(loss, rel=1e-5)


def test_clipped_tokens_are_counted_and_no_others():
    assert loss_of(1.5, 2.0)[1]["clipped_tokens"] == 1
    assert loss_of(1.5, -2.0)[1]["clipped_tokens"] == 0
    assert loss_of(1.1, 2.0)[1]["clipped_tokens"] == 0
    assert loss_of(20.0, -2.0)[1]["clipped_tokens"] == 1  # by the dual clip, so it has no gradient either


def test_truncated_importance_sampling():
    logprobs, old, rollout = (
        torch.zeros(1, 2),
        torch.zeros(1, 2),
        torch.tensor([[math.log(0.25), math.log(2.0)]]),
    )
    loss, _ = compute_policy_loss(
        logprobs, old, torch.ones(1), torch.ones(1, 2), 2, rollout_logprobs=rollout, tis_cap=2.0
    )
    assert loss.item() == pytest.approx(-(2.0 + 0.5) / 2)  # weights 4 -> 2 and 0.5
    # The weights 4 -> 0.5 and 1/8 do not depend on the current policy. There is no lower limit.
    logprobs, old, mask = torch.tensor([[0.1, 0.1, 0.0]]), torch.zeros(1, 3), torch.tensor([[1, 1, 0]])
    rollout = torch.tensor([[math.log(0.25), math.log(8.0), 0.0]])
    loss, sums = compute_policy_loss(
        logprobs, old, torch.ones(1), mask, 2, rollout_logprobs=rollout, tis_cap=0.5
    )
    assert loss.item() == pytest.approx(-math.exp(0.1) * (0.5 + 0.125) / 2)
    assert sums["tis_capped_tokens"] == 1 and sums["tis_sum"] == pytest.approx(0.625)


def losses_of(log_ratios, advantages, lengths, num_tokens=6, **options):
    """Return loss, gradient and sums for these log-ratios. The padding contains NaN."""
    mask = torch.arange(len(log_ratios[0])) < torch.tensor(lengths)[:, None]
    old = torch.full(mask.shape, -1.0)
    logprobs = torch.where(mask, torch.tensor(log_ratios) + old, NAN).requires_grad_()
    loss, sums = compute_policy_loss(logprobs, old, torch.tensor(advantages), mask, num_tokens, **options)
    loss.backward()
    assert logprobs.grad[~mask].abs().sum() == 0
    return loss.item(), logprobs.grad.nan_to_num(), sums


def test_gspo_by_hand():
    """Two sequences of 3 and 1 tokens have the ratios exp(0.2), below the clip, and exp(0.9), above it."""
    log_ratios, wide = [[0.1, 0.2, 0.3], [0.9, 0.0, 0.0]], dict(loss="gspo", clip_low=0.5, clip_high=0.5)
    loss, grad, sums = losses_of(log_ratios, [2.0, 1.0], [3, 1], **wide)
    assert loss == pytest.approx(-(2 * math.exp(0.2) + 1.5) / 2, rel=1e-5)  # each sequence weighs 1/2
    assert grad[0].tolist() == pytest.approx([-2 * math.exp(0.2) / 3 / 2] * 3, rel=1e-5)
    assert grad[1, 0] == 0 and sums["clipped_tokens"] == 1 and sums["loss_tokens"] == 4
    kl = sum(math.exp(x) - 1 - x for x in (0.1, 0.2, 0.3, 0.9))
    assert sums["approx_kl_sum"] == pytest.approx(kl, rel=1e-5)  # a mean over tokens, for every loss
    # The padding does not count in the sequence's ratio.
    assert losses_of([[0.3, 0.0, 0.0]], [1.0], [1], **wide)[0] == pytest.approx(-math.exp(0.3), rel=1e-5)
    # A sequence without a token of the policy adds no loss, but counts in the mean.
    assert losses_of(log_ratios, [2.0, 1.0], [3, 0], **wide)[0] == pytest.approx(-math.exp(0.2), rel=1e-5)
    # The mini-batch has four sequences. With one advantage per token, this is GSPO-token.
    assert losses_of(log_ratios, [2.0, 1.0], [3, 1], num_sequences=4, **wide)[0] == pytest.approx(loss / 2)
    loss, grad, _ = losses_of(log_ratios, [[0.0, 2.0, -1.0], [0.0] * 3], [3, 1], **wide)
    assert loss == pytest.approx(-math.exp(0.2) / 3 / 2, rel=1e-5) and grad[0, 0] == 0 > grad[0, 1]
    # Without explicit limits, gspo uses its own range, far below exp(0.2). There is no dual clip.
    loss, _, _ = losses_of(log_ratios, [2.0, 1.0], [3, 1], loss="gspo")
    assert loss == pytest.approx(-3 * 1.0004 / 2, rel=1e-5)
    assert losses_of([[5.0]], [-1.0], [1], loss="gspo")[0] == pytest.approx(math.exp(5), rel=1e-4)


def test_cispo_by_hand():
    """A ratio above the range is clipped but keeps its gradient.

    By default, there is no dual clip and no lower limit.
    """
    log_ratios, advantages = [[0.0, 2.0, -1.0], [3.0, 0.0, 0.0]], [1.0, -2.0]
    loss, grad, sums = losses_of(log_ratios, advantages, [3, 1], loss="cispo")
    weights = [1.0, 5.0, math.exp(-1)], [5.0]
    logprobs = [-1.0, 1.0, -2.0], [2.0]
    expected = sum(a * w * x for a, *row in zip(advantages, weights, logprobs) for w, x in zip(*row))
    assert loss == pytest.approx(-expected / 6, rel=1e-5) and sums["clipped_tokens"] == 2
    assert grad[0].tolist() == pytest.approx([-w / 6 for w in weights[0]], rel=1e-5)
    assert grad[1, 0].item() == pytest.approx(2 * 5 / 6)
    loss, grad, sums = losses_of([[-2.0]], [1.0], [1], num_tokens=1, loss="cispo", clip_low=0.4)
    assert loss == pytest.approx(0.6 * 3) and grad.item() == pytest.approx(-0.6)
    assert sums["clipped_tokens"] == 1


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
                leaf,
                old[rows],
                advantages[rows],
                mask[rows],
                num_tokens,
                rollout_logprobs=rollout[rows],
                tis_cap=1.5,
            )
            loss.backward()
            grads[rows] += leaf.grad
            losses, kls = losses + loss.item(), kls + metrics["approx_kl_sum"].item()
        return losses, kls, grads

    whole = total([[0, 1, 2, 3, 4, 5]])
    for splits in ([[0], [1], [2], [3], [4], [5]], [[5, 0, 3], [1, 2, 4]]):
        parts = total(splits)
        assert parts[0] == pytest.approx(whole[0], abs=1e-6) and parts[1] == pytest.approx(whole[1], abs=1e-6)
        assert torch.allclose(parts[2], whole[2], atol=1e-7)
    assert all(torch.equal(a, b) for a, b in zip(arguments, copies))
    garbage = logprobs.clone()
    garbage[~mask] = NAN  # the content of the padding does not matter
    losses = [
        compute_policy_loss(values, old, advantages, mask, num_tokens)[0] for values in (garbage, logprobs)
    ]
    assert losses[0] == losses[1]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("loss", ["clip", "gspo", "cispo"])
def test_a_loss_of_16_bits_is_computed_in_32(dtype, loss):
    """Otherwise 1 - 3e-4 would be 1, so gspo would not clip, and 1,001 tokens would be 1,000."""
    generator = torch.Generator().manual_seed(0)
    old = (-2 * torch.rand(3, 1001, generator=generator)).to(dtype)
    rollout, logprobs = ((old + 0.02 * torch.randn(3, 1001, generator=generator)).to(dtype) for _ in range(2))
    rest = dict(advantages=torch.tensor([1.0, -1.0, 0.5]), mask=torch.ones(3, 1001), num_tokens=3003)

    def loss_and_sums(*tensors):
        leaf = tensors[0].requires_grad_()
        settings = dict(loss=loss, rollout_logprobs=tensors[2], tis_cap=1.01)
        found, sums = compute_policy_loss(leaf, tensors[1], **rest, **settings)
        found.backward()
        return found.item(), {name: value.item() for name, value in sums.items()}, leaf.grad.to(dtype)

    *narrow, narrow_gradient = loss_and_sums(logprobs, old, rollout)
    *wide, wide_gradient = loss_and_sums(logprobs.detach().float(), old.float(), rollout.float())
    assert narrow == wide and torch.equal(narrow_gradient, wide_gradient)
    assert narrow[1]["loss_tokens"] == 3003


def test_a_divergence_of_16_bits_is_computed_in_32():
    """In bf16, exp(d) - d - 1 of a small d is noise, which may even be negative."""
    generator = torch.Generator().manual_seed(0)
    logprobs = (-2 * torch.rand(3, 1001, generator=generator)).bfloat16()
    reference = (logprobs + 0.02 * torch.randn(3, 1001, generator=generator)).bfloat16()
    mask = torch.ones(3, 1001)
    narrow = compute_kl_loss(logprobs, reference, mask, 3003)
    wide = compute_kl_loss(logprobs.float(), reference.float(), mask, 3003)
    assert narrow.dtype == torch.float32 and narrow == wide > 1e-4


def test_old_log_probabilities_may_be_the_current_ones_with_their_gradient():
    """A loop of one's own that takes one step per rollout may pass the same tensor twice."""
    logprobs, advantages, mask = torch.zeros(2, 3, requires_grad=True), torch.ones(2), torch.ones(2, 3)
    loss, _ = compute_policy_loss(logprobs, logprobs, advantages, mask, 6)
    loss.backward()
    assert logprobs.grad.sum().item() == pytest.approx(-1)


def test_kl_to_the_reference_by_hand():
    logprobs, reference = torch.tensor([[-1.0, -2.0, NAN]]), torch.tensor([[-1.5, -1.0, 3.0]])
    mask = torch.tensor([[True, True, False]])
    kl = compute_kl_loss(logprobs, reference, mask, 4)
    assert kl.item() == pytest.approx((math.exp(-0.5) + 0.5 - 1 + math.exp(1) - 1 - 1) / 4)
    assert compute_kl_loss(logprobs, logprobs, mask, 4).item() == 0


def test_a_loss_taken_alone_has_its_own_range_and_masks_may_be_numbers():
    ratio = dict(ratio=1.5, advantage=2.0)
    assert loss_of(**ratio)[0] == pytest.approx(-2.56)
    assert loss_of(**ratio, loss="gspo")[0] == pytest.approx(-2 * 1.0004, rel=1e-5)
    assert loss_of(**ratio, loss="gspo", clip_high=0.1)[0] == pytest.approx(-2.2, rel=1e-5)
    logprobs, reference = torch.tensor([[-1.0, -2.0]]), torch.tensor([[-1.5, -1.0]])
    of_booleans, of_numbers = (
        compute_kl_loss(logprobs, reference, mask, 1)
        for mask in (torch.tensor([[True, False]]), torch.tensor([[1.0, 0.0]]))
    )
    assert of_booleans == of_numbers > 0


OWN = {  # Functions as a user may write them.
    "rloo": """
from algorithm import dr_grpo

def rloo(groups):
    count = (~groups.rewards_P_G.isnan()).sum(1, keepdim=True)
    return dr_grpo(groups) * count / (count - 1).clamp(min=1)
""",
    "sapo": """
import torch

def sapo(logprobs, log_ratio, advantages, mask, positive=1.0, negative=1.05):
    tau = torch.where(advantages > 0, positive, negative)
    return -advantages * 4 / tau * torch.sigmoid(tau * (log_ratio.exp() - 1))

sapo.over_sequences = True
""",
}


@pytest.fixture
def own(tmp_path):
    """Write functions of a user, and return {name: FILE:NAME}."""
    for name, code in OWN.items():
        (tmp_path / f"my_{name}.py").write_text(code)
    return {name: f"{tmp_path}/my_{name}.py:{name}" for name in OWN}


ALL_ADVANTAGES = {
    **{name: dict(advantage=name) for name in ADVANTAGES},
    "papo": worked("papo"),
    "vppo": worked("vppo", prefix_cut=0),
    "terms": terms(acc=1, flawed_positive=-0.5),
    "steps": worked("steps"),
    "progress": worked("progress"),
    "floored": worked("floored"),
    "spare_good_prefix": worked("spare_good_prefix"),
    "spare_good_prefix of progress": worked("spare_good_prefix", advantage="progress"),
    "spare_good_prefix of floored": worked("spare_good_prefix", advantage="floored"),
    "rloo": dict(advantage="rloo"),
}
RIGHT = dict(score=1.0, acc=True, flawed_positive=False, first_wrong=-1, step_scores=[1.0, 1.0])
WRONG = dict(score=-1.0, acc=False, flawed_positive=True, first_wrong=1, step_scores=[1.0, 0.0])


def group_of(*infos):
    """Return samples of five tokens, whose second paragraph starts at the fourth token."""
    group = []
    for info in infos:
        result = {"reward_score": info["score"], "reward_extra_info": dict(info), "status": "ok"}
        group.append(Sample({}, [1], [*b"1\n\n23"], text="1\n\n23", result=result))
    return group


def token_advantages(groups, options):
    algorithm.set_advantages(groups, options, lambda ids: bytes(ids).decode())
    found = []
    for sample in itertools.chain(*groups):
        if sample.advantage is None:
            found.append(None)
        else:
            found.append(sample.token_advantages or [sample.advantage] * 5)
    return found


def test_every_worked_example_is_among_them():
    listed = re.findall(r"^    (\w+)  +", advantages.__doc__, re.M)
    assert listed and set(listed) <= ALL_ADVANTAGES.keys()


@pytest.mark.parametrize("name", ALL_ADVANTAGES)
def test_the_contract_of_every_advantage(name, own):
    """Better samples gain, equal samples do not, and a sample without a verdict does not matter."""
    settings = ALL_ADVANTAGES[name]
    options = config_of(overlong_buffer=0, **settings | {"advantage": own.get(name, settings["advantage"])})
    algorithm.check_functions(options)
    silent = {"score": None}
    groups = [group_of(RIGHT, WRONG, silent), group_of(RIGHT, RIGHT, silent)]
    results = [sample.result.copy() for sample in itertools.chain(*groups)]
    right, wrong, nothing, equal, also_equal, nothing_either = token_advantages(groups, options)
    assert nothing is nothing_either is None and equal == also_equal == [0] * 5
    assert right[-1] > 0 > wrong[-1] and len(right) == len(wrong) == 5
    assert [sample.result for sample in itertools.chain(*groups)] == results  # nothing is mutated
    without = token_advantages([group_of(RIGHT, WRONG), group_of(RIGHT, RIGHT)], options)
    assert without == [pytest.approx(one, rel=1e-6) for one in (right, wrong, equal, equal)]


@pytest.mark.parametrize("name", [*LOSSES, "sapo"])
def test_the_contract_of_every_loss(name, own):
    """Any split gives the same loss, gradient and sums; masked tokens and zero advantages give no gradient.

    The padding may contain anything, and only losses that clip count clipped tokens.
    """
    options = config_of(loss=own.get(name, name))
    algorithm.check_functions(options)
    loss = algorithm.loss_function(options)
    generator = torch.Generator().manual_seed(0)
    logprobs, old = torch.randn(2, 6, 9, generator=generator) * 0.3
    advantages = torch.randn(6, 9, generator=generator)
    advantages[2] = 0
    mask = torch.arange(9) < torch.tensor([9, 3, 5, 1, 9, 7])[:, None]
    mask[4, 2:6] = False  # the tokens of a tool
    logprobs[~mask] = NAN
    counts = dict(num_tokens=int(mask.sum()), num_sequences=6)

    def total(*splits):
        value, sums, grads = 0.0, Counter(), torch.zeros_like(logprobs)
        for rows in splits:
            leaf = logprobs[rows].clone().requires_grad_()
            part, found = compute_policy_loss(
                leaf, old[rows], advantages[rows], mask[rows], loss=loss, **counts
            )
            part.backward()
            grads[rows] += leaf.grad.nan_to_num()
            sums.update({name: number.item() for name, number in found.items()})
            value += part.item()
        return value, sums, grads

    value, sums, grads = total([0, 1, 2, 3, 4, 5])
    assert grads[~mask].abs().max() == grads[2].abs().max() == 0 < grads[mask].abs().max()
    assert ("clipped_tokens" in sums) == (name != "sapo")
    for splits in ([[0], [1], [2], [3], [4], [5]], [[5, 0, 3], [1, 2, 4]]):
        other_value, other_sums, other_grads = total(*splits)
        assert other_value == pytest.approx(value, abs=1e-6) and other_sums == pytest.approx(sums)
        assert torch.allclose(other_grads, grads, atol=1e-7)


@pytest.mark.parametrize(
    "field, code, why",
    [
        ("advantage", "return groups.rewards_P_G[0]", r"returned \(\d,\), but it must return a tensor of"),
        ("advantage", "return None", "returned NoneType, but it must return a tensor of the shape"),
        ("advantage", "return groups.rewards_P_G - groups.rewards_P_G.mean()", "verdict .* changes"),
        ("advantage", "r = groups.rewards_P_G.nan_to_num(); return r - r.mean(1, keepdim=True)", "changes"),
        ("advantage", "return groups.tensor([i['acc'] for i in groups.infos])", "KeyError: 'acc' .own.py:5."),
        ("advantage", "return groups.reward", "AttributeError: .* .own.py:5."),
        ("loss", "return (advantages * log_ratio).sum()", "must return a tensor of the shape of its inputs"),
        ("loss", "return advantages * mask", "has no gradient or is not finite"),
        ("loss", "return advantages * log_ratio / 0", "has no gradient or is not finite"),
        ("loss", "return -advantages.squeeze(1)[:, None] * log_ratio.exp()", "a tensor of the shape of its"),
        ("loss", "return [advantages * log_ratio][int(not advantages.any())]", "IndexError: .* .own.py:5."),
        ("loss", "return advantages.mean() * log_ratio", "depends on the other sequences of its micro-batch"),
        ("loss", "return advantages * log_ratio / log_ratio.std(0)", "depends on the other sequences"),
        ("loss", "return -advantages * log_ratio.mean(1, keepdim=True).exp()", "or on the padding"),
    ],
)
def test_a_function_that_breaks_its_contract_is_rejected_before_the_run(field, code, why, tmp_path):
    arguments = {"advantage": "groups", "loss": "logprobs, log_ratio, advantages, mask"}[field]
    file = tmp_path / "own.py"
    file.write_text(f"import torch\n\n\ndef mine({arguments}):\n    {code}\n")
    with pytest.raises(ValueError, match=f"^--{field} {file}:mine: on a small example, .*{why}"):
        config_of(overlong_buffer=0, **{field: f"{file}:mine"}).check()


def test_a_clip_range_may_end_at_1():
    loss = algorithm.loss_function(config_of(clip_low=0.0))
    losses, is_clipped = loss(
        torch.zeros(1, 1), torch.full((1, 1), -0.1), -torch.ones(1, 1), torch.ones(1, 1)
    )
    assert losses.item() == 1.0 and is_clipped.item()


@pytest.mark.parametrize("name", ["clip_low", "clip_high", "clip_c"])
def test_a_flag_that_a_loss_does_not_take_is_named(name, tmp_path):
    file = tmp_path / "own.py"
    mine = "def mine(logprobs, log_ratio, advantages, mask{}):\n    return -advantages * log_ratio.exp()\n"
    file.write_text(mine.format("") + mine.replace("mine", "any", 1).format(", **settings"))
    flag = "--" + name.replace("_", "-")
    with pytest.raises(
        ValueError, match=f"^{flag}: the loss {file}:mine has no setting {name}; omit {flag}$"
    ):
        config_of(loss=f"{file}:mine", **{name: 2.0}).check()
    config_of(loss=f"{file}:any", **{name: 2.0}).check()


def test_a_loss_without_a_signature_may_take_each_flag(tmp_path):
    code = """
        import torch

        def mine(logprobs, log_ratio, advantages, mask, clip_low: float):
            return -advantages * torch.clamp(log_ratio.exp(), min=1 - clip_low)

        mine = torch.jit.script(mine)
    """
    (tmp_path / "own.py").write_text(textwrap.dedent(code))
    config_of(loss=f"{tmp_path}/own.py:mine", clip_low=0.3).check()


ODD_BUT_RIGHT = """
import functools
import torch
from algorithm import dr_grpo, grpo

def with_own_key(groups):
    bonus = [info["style"] if info else 0.0 for info in groups.infos]
    return grpo(groups) + groups.tensor(bonus)

def by_level(groups):
    return grpo(groups) * groups.tensor([sample.row["extra_info"]["level"] for sample in groups.samples])

def with_noise(groups):
    return grpo(groups) + 1e-3 * torch.rand_like(groups.rewards_P_G)

def best_of_four(groups):
    return grpo(groups) + 0 * groups.rewards_P_G.nan_to_num().topk(4, dim=1).values[:, :1]

class Callable:
    def __call__(self, groups):
        return grpo(groups) / self.scale

Callable.scale = 1
an_object = Callable()
partial = functools.partial(lambda scale, groups: scale * dr_grpo(groups), 2.0)

def dropped(logprobs, log_ratio, advantages, mask):
    return -advantages * log_ratio.exp() * (torch.rand_like(mask) < 0.5)

def of_means(logprobs, log_ratio, advantages, mask):
    if not advantages.any():
        return torch.zeros_like(mask)  # without a gradient
    lengths = mask.sum(1, keepdim=True)
    return -advantages * (log_ratio * mask).sum(1, keepdim=True) / lengths * mask
"""


@pytest.mark.parametrize(
    "name", ["with_own_key", "by_level", "with_noise", "best_of_four", "an_object", "partial"]
)
@pytest.mark.parametrize("loss", ["dropped", "of_means"])
def test_a_function_that_the_example_cannot_judge_is_not_rejected(name, loss, tmp_path):
    """It may need keys of its own reward function or whole groups, or draw random numbers."""
    file = tmp_path / "own.py"
    file.write_text(ODD_BUT_RIGHT)
    config_of(advantage=f"{file}:{name}", loss=f"{file}:{loss}", group_size=4).check()


def test_a_sample_without_a_verdict_has_no_info_in_dynamic_sampling(tmp_path):
    (tmp_path / "own.py").write_text(ODD_BUT_RIGHT)
    options = config_of(advantage=f"{tmp_path}/own.py:with_own_key", overlong_buffer=0)
    group = group_of(RIGHT | {"style": 0.5}, WRONG | {"style": 0.0}, {"score": None})
    assert algorithm.set_advantages([group], options, str, drop_zero_advantages=True) == [group]
    assert [sample.advantage is None for sample in group] == [False, False, True]


def test_an_advantage_that_fails_only_on_real_samples_is_named(tmp_path):
    """Its shape is wrong, or its number is not finite, for a sample that the example lacks."""
    file = tmp_path / "own.py"
    file.write_text(
        "def shape(groups):\n    return groups.rewards_P_G[: 1 + (groups.infos[0]['score'] < 9)]\n\n\n"
        "def number(groups):\n    return groups.rewards_P_G / (groups.rewards_P_G != 9)\n"
    )
    groups = [group_of(RIGHT | {"score": 9.0}, WRONG), group_of(RIGHT, WRONG)]
    options = config_of(advantage=f"{file}:shape", overlong_buffer=0)
    algorithm.check_functions(options)
    with pytest.raises(ValueError, match=f"^--advantage {file}:shape: the function returned .1, 2., but it"):
        algorithm.set_advantages(groups, options, str)
    options = config_of(advantage=f"{file}:number", overlong_buffer=0)
    algorithm.check_functions(options)
    algorithm.set_advantages(groups, options, str)
    lost = groups[0][0]
    assert lost.advantage is lost.result["reward_score"] is None and groups[0][1].advantage == -1
    assert lost.result["reward_extra_info"]["error"] == "the advantage is not a finite number"


def test_an_error_in_a_callable_object_is_named(tmp_path):
    file = tmp_path / "own.py"
    file.write_text(ODD_BUT_RIGHT.replace("Callable.scale = 1", ""))
    with pytest.raises(ValueError, match=f"^--advantage {file}:an_object: on .*, AttributeError: .*'scale'"):
        config_of(advantage=f"{file}:an_object").check()


def test_a_file_that_was_edited_between_two_runs_is_loaded_again(tmp_path, monkeypatch):
    """Python's cache of compiled files would miss an edit of the same size within the same second."""
    monkeypatch.setattr(sys, "dont_write_bytecode", False)
    file = tmp_path / "own.py"
    for factor in (1, 3):
        code = f"def mine(groups):\n    return {factor} * grpo(groups)"
        file.write_text(f"from algorithm import grpo\n\n{code}")
        os.utime(file, (1, 1))
        options = config_of(advantage=f"{file}:mine", overlong_buffer=0)
        options.check()
        assert max(token_advantages([group_of(RIGHT, WRONG)], options)[0]) == pytest.approx(factor * 0.5**0.5)


def test_the_example_of_the_page_is_rloo(tmp_path):
    """The page's advantage is the reward minus the mean of the others. Dynamic sampling supports it."""
    page = (Path(__file__).parent.parent / "docs/algorithms.md").read_text()
    (block,) = re.findall(r"```python\n(.*?def rloo.*?)```", page, re.S)
    (tmp_path / "rloo.py").write_text(block)
    results = [{"reward_score": score, "reward_extra_info": {"score": score}} for score in (1.0, 0.0, -1.0)]
    group = [Sample({}, [5], [6], result=result) for result in results]
    options = PolicyOptions(model="", advantage=f"{tmp_path}/rloo.py:rloo")
    equal = [Sample({}, [5], [6], result=results[0]) for _ in range(3)]
    assert algorithm.set_advantages([group, equal], options, str, drop_zero_advantages=True) == [group]
    assert [sample.advantage for sample in group] == [1.5, 0.0, -1.5]
    assert [sample.advantage for sample in equal] == [None] * 3


def test_scores_of_steps_add_up_from_the_end():
    """The paragraphs begin at the tokens 0, 1 and 3."""
    words = ["a", "\n\nb", "c", "\n\nd"]
    group = []
    for score, steps in ((1.0, [1.0, 0.0, 0.0]), (1.0, [1.0]), (0.0, None)):
        info = {"score": score, "step_scores": steps}
        result = {"reward_score": score, "reward_extra_info": info, "status": "ok"}
        group.append(Sample({}, [9], [0, 1, 2, 3], text="".join(words), result=result))
    options = config_of(**worked("steps"))
    algorithm.set_advantages([group], options, lambda ids: "".join(words[id] for id in ids))
    std = math.sqrt(1 / 3) + 1e-6  # std of 1, 0, 0, 1 (mean 0.5)
    assert group[0].token_advantages == pytest.approx([-0.5 / std, -1 / std, -1 / std, -0.5 / std])
    assert group[1].token_advantages == pytest.approx([0.5 / std, 0, 0, 0])
    assert group[2].advantage is None  # without step scores: no verdict, and excluded from the mean


def test_advantages_per_token_or_per_sequence():
    logprobs, old, mask = torch.randn(2, 3), torch.randn(2, 3), torch.ones(2, 3)
    per_row = compute_policy_loss(logprobs, old, torch.tensor([1.0, -2.0]), mask, 6)[0]
    per_token = compute_policy_loss(logprobs, old, torch.tensor([[1.0] * 3, [-2.0] * 3]), mask, 6)[0]
    assert per_row == per_token


def test_a_failed_rollout_has_no_length_penalty():
    """Neither does any sample without --overlong-buffer."""
    result = {"reward_score": None, "reward_extra_info": {"error": "x"}, "status": "timeout"}
    samples = [Sample({}, [5], [6] * 8, result=result, failure=failure) for failure in ("timeout", "")]
    algorithm.add_length_penalties([samples], config_of(max_response_length=8, overlong_buffer=0))
    assert [sample.result for sample in samples] == [result, result]
    algorithm.add_length_penalties([samples], config_of(max_response_length=8, overlong_buffer=4))
    assert samples[0].result == result and samples[1].result["reward_score"] is None
    assert samples[1].result["reward_extra_info"] == {
        "error": "x",
        "overlong_penalty": -1.0,
        "overlong": True,
    }


def test_overlong_penalty_is_the_reward_loops():
    assert overlong_penalty(100, 100, 40, 1.0) == -1.0
    assert overlong_penalty(60, 100, 40, 1.0) == 0.0
    assert overlong_penalty(80, 100, 40, 0.5) == -0.25
    assert overlong_penalty(50, 100, 100, 1.0) == -0.5  # The buffer may be the whole response.


def test_log_ratios_are_cut_at_20():
    """A ratio of exp(30) counts as exp(20), and a ratio of exp(19) is unchanged."""
    logprobs, mask = torch.tensor([[0.0, 0.0]]), torch.ones(1, 2)
    _, sums = compute_policy_loss(logprobs, torch.tensor([[-30.0, -19.0]]), torch.ones(1), mask, 2)
    assert sums["approx_kl_sum"] == pytest.approx(math.exp(20) - 21 + math.exp(19) - 20, rel=1e-5)


def test_a_log_ratio_beyond_what_float32_can_raise_leaves_the_gradient_finite():
    logprobs = torch.tensor([[-1.0, -100.0]], requires_grad=True)
    old, advantage, mask = torch.tensor([[-100.0, -1.0]]), torch.tensor([-1.0]), torch.ones(1, 2)
    loss, sums = compute_policy_loss(logprobs, old, advantage, mask, 2, clip_c=math.inf)
    loss.backward()
    assert (
        math.isfinite(loss.item()) and math.isfinite(sums["approx_kl_sum"]) and logprobs.grad.isfinite().all()
    )
    kl = compute_kl_loss(logprobs, old, mask.bool(), 2)
    (gradient,) = torch.autograd.grad(kl, logprobs)
    assert math.isfinite(kl.item()) and gradient.isfinite().all()


def test_the_sums_are_over_the_tokens_given_whatever_the_loss_is_divided_by():
    logprobs, old, mask = (
        torch.full((1, 4), -0.5),
        torch.full((1, 4), -1.0),
        torch.tensor([[1.0, 1.0, 1.0, 0.0]]),
    )
    for num_tokens in (3, 300):
        _, sums = compute_policy_loss(logprobs, old, torch.tensor([1.0]), mask, num_tokens)
        assert sums["loss_tokens"] == 3 and sums["clipped_tokens"] == 3  # exp(0.5) exceeds 1.28
        assert sums["approx_kl_sum"] == pytest.approx(3 * (math.exp(0.5) - 1 - 0.5), rel=1e-5)


def test_process_aware_advantages_by_hand():
    """Groups: correct and sound, correct and flawed, wrong, correct without a verdict; all correct; all
    wrong.
    """
    acc = torch.tensor([[1.0, 1.0, 0.0, 1.0], [1.0, 1.0, 1.0, 1.0], [0.0, 0.0, 0.0, 0.0]])
    flawed = torch.tensor([[0.0, 1.0, 0.0, NAN], [0.0, 0.0, 0.0, 1.0], [0.0, 1.0, 0.0, 1.0]])

    def papo(penalty):
        numbers = dict(acc=acc, flawed_positive=flawed)
        return advantages.papo(groups_with(numbers, penalties_P_G=torch.full((3, 4), penalty)))

    got = papo(0.0)
    spread, half = math.sqrt(4 / 3) + 1e-6, math.sqrt(0.5) + 1e-6  # sample stds of 1, 1, -1 and of 1, 0
    right, wrong = (2 / 3) / spread, (-4 / 3) / spread
    assert torch.allclose(got[0, :3], torch.tensor([right + 0.5 / half, right - 0.5 / half, wrong]))
    assert got[0, 3].isnan()  # excluded from both means
    # The steps still distinguish them.
    assert torch.allclose(got[1], torch.tensor([0.25, 0.25, 0.25, -0.75]) / (0.5 + 1e-6))
    assert got[2].tolist() == [0, 0, 0, 0]  # a wrong answer gains nothing from good steps
    assert torch.equal(papo(-1.5)[1], got[1])  # a correct answer with a length penalty is still correct


def test_without_the_deviation_by_hand():
    rewards = torch.tensor([[1.0, 0.0, -1.0, NAN], [0.5, 0.5, NAN, NAN]])
    got = compute_advantages(rewards, divide_by_std=False)
    assert got.tolist() == [[1, 0, -1, 0], [0, 0, 0, 0]]


def vppo(scores, prefixes):
    """Return the token advantages of one group; every token of a good prefix is rewarded.

    The token `prefix` begins the second paragraph, which is the first wrong one.
    """
    group = []
    for score, prefix in zip(scores, prefixes):
        words = ["a", "a", "a", "a"]
        if prefix:
            words[prefix] = "\n\nb"
        info = {"score": score, "first_wrong": 1 if prefix else 0}
        result = {"reward_score": score, "reward_extra_info": info, "status": "ok"}
        group.append(Sample({}, [9], words, text="".join(words), result=result))
    algorithm.set_advantages([group], config_of(**worked("vppo", prefix_cut=0)), "".join)
    return [sample.advantage if sample.advantage is None else sample.token_advantages for sample in group]


def test_prefix_advantages_by_hand():
    """Samples: correct, wrong from the middle, wrong from the start, no verdict.

    The mean value is (1 + 0.25 + 0) / 3.
    """
    mean = 1.25 / 3
    right, half, wrong, unknown = vppo([1.0, -1.0, -1.0, None], [0, 2, 0, 3])
    assert right == pytest.approx([1 - mean] * 4) and wrong == pytest.approx([-mean] * 4)
    assert half == pytest.approx([0.5 - mean] * 2 + [-mean] * 2) and unknown is None
    # All are wrong at the same place. Rewards cannot distinguish them, but prefix and rest differ.
    assert vppo([-1.0, -1.0], [2, 2]) == [[0.25, 0.25, -0.25, -0.25]] * 2
    # A single verdict is not a group, even with a good prefix. Then: all correct; all wrong from the start.
    assert vppo([-1.0, None], [2, 0]) == [[0] * 4, None]
    for scores in ([1.0, 1.0], [-1.0, -1.0]):
        assert vppo(scores, [0, 0]) == [[0] * 4] * 2


def terms_of(numbers, **weights):
    penalties = torch.zeros_like(next(iter(numbers.values())))
    return advantages.terms(groups_with(numbers, penalties_P_G=penalties), weights)


def test_term_advantages_by_hand():
    """Two groups have two terms. The second term is unknown for one sample, and constant in one group."""
    acc = torch.tensor([[1.0, 1.0, 0.0], [1.0, 0.0, 0.0]])
    flawed = torch.tensor([[1.0, 0.0, NAN], [0.0, 0.0, 0.0]])
    got = terms_of(dict(acc=acc, flawed=flawed), acc=1, flawed=-0.5)
    third, half = math.sqrt(1 / 3) + 1e-6, math.sqrt(1 / 2) + 1e-6  # sample stds of 1, 1, 0 and of 1, 0
    total = torch.tensor(
        [
            [1 / 3 / third - 0.25 / half, 1 / 3 / third + 0.25 / half, -2 / 3 / third],
            [2 / 3 / third, -1 / 3 / third, -1 / 3 / third],
        ]
    )
    assert torch.allclose(got, total / (total.std() + 1e-6), atol=1e-6)  # their mean is 0
    unknown = torch.full((1, 3), NAN)
    assert terms_of(dict(acc=acc[:1], flawed=unknown), acc=1, flawed=1)[0].tolist() == pytest.approx(
        (acc[0] - 2 / 3).div(third).div(1 + 1e-6).tolist(), rel=1e-4
    )
    assert terms_of(dict(acc=torch.ones(2, 3)), acc=2).abs().max() == 0
    nothing_said = terms_of(dict(judge=torch.tensor([[1.0, 0.0, NAN]])), judge=1)[0].tolist()
    half = math.sqrt(1 / 2)  # of the two, whose std is 1 again at the end
    assert nothing_said[:2] == pytest.approx([half, -half], rel=1e-4) and math.isnan(nothing_said[2])


def byte_level(*merged):
    """Return a byte-level tokenizer, as in GPT and Qwen, in which these pieces of text are single tokens."""
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary, merges = {letter: number for number, letter in enumerate(letters)}, []
    level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    for text in merged:
        letters = [*level.pre_tokenize_str(text)[0][0]]
        while len(letters) > 1:
            merges.append((letters[0], letters[1]))
            letters[:2] = [letters[0] + letters[1]]
            vocabulary.setdefault(letters[0], len(vocabulary))
    raw = Tokenizer(models.BPE(vocabulary, list(dict.fromkeys(merges))))
    raw.pre_tokenizer, raw.decoder = level, decoders.ByteLevel()
    return PreTrainedTokenizerFast(tokenizer_object=raw, eos_token="<end>")


def byte_fallback():
    """Return a tokenizer like SentencePiece's, as in Llama 2: words have a leading space, other characters
    are bytes.
    """
    pieces = ["<unk>", *(f"<0x{byte:02X}>" for byte in range(256)), "▁", *"absetp"]
    merges = [("▁", "a"), ("▁", "s"), ("▁s", "t"), ("▁st", "e"), ("▁ste", "p")]
    pieces += [left + right for left, right in merges if left + right not in pieces]
    vocabulary = {piece: number for number, piece in enumerate(pieces)}
    raw = Tokenizer(models.BPE(vocabulary, merges, unk_token="<unk>", byte_fallback=True, fuse_unk=True))
    raw.pre_tokenizer = pre_tokenizers.Metaspace()
    steps = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    raw.decoder = decoders.Sequence(steps)
    return PreTrainedTokenizerFast(tokenizer_object=raw, eos_token="<end>", unk_token="<unk>")


def decoding(tokenizer):
    return lambda ids: tokenizer.decode(ids, skip_special_tokens=True)


def count_tokens_before(paragraph, text, ids, decode):
    """A missing paragraph starts at the last token, as in recipes/advantages.py."""
    starts = tokens_before(paragraph_starts(text), text, ids, decode)
    return [*starts, len(ids) - 1][min(paragraph, len(starts))]


@pytest.mark.parametrize(
    "pieces, paragraph, count",
    [
        (["ab", "\n\n", "cd", "\n\n", "ef"], 0, 0),
        (["ab", "\n\n", "cd", "\n\n", "ef"], 1, 2),
        (["ab", "\n\n", "cd", "\n\n", "ef"], 2, 4),
        (["ab", "\n\ncd", "\n\n", "ef"], 1, 1),  # a token across the boundary belongs to the later one
        (["ab", "\n", "\n", " ", "cd"], 1, 4),
        (["\n\n", "ab", "\n\n\n", "cd"], 0, 1),  # empty paragraphs do not count
        (["\n\n", "ab", "\n\n\n", "cd"], 1, 3),
        (["ab", "\n\n", "cd"], 2, 3),  # a missing paragraph starts at the end token, the fourth
        (["ab"], 7, 1),
    ],
)
def test_tokens_before_a_paragraph_by_hand(pieces, paragraph, count):
    tokenizer = byte_level(*pieces)
    ids = [tokenizer.convert_tokens_to_ids(tokenizer.tokenize(piece)) for piece in pieces]
    assert all(len(one) == 1 for one in ids)
    ids = sum(ids, []) + [tokenizer.eos_token_id]
    decode = decoding(tokenizer)
    assert decode(ids) == "".join(pieces)
    assert count_tokens_before(paragraph, decode(ids), ids, decode) == count


def test_tokens_before_a_paragraph_whatever_the_tokenizer(tokenizer):
    """The tokens before a paragraph decode to at most the text before it; with one more token, they decode to
    more.
    """
    rng = random.Random(0)
    kinds = {
        "bytes": (byte_level("\n\n", "\n\ns", "step"), "abstep \n\n\n\té€😀"),
        "byte fallback": (byte_fallback(), "abstep \n\n\n\té€😀"),
        "toy": (tokenizer, "0123456789+-=\n\n\n Remainder"),
    }
    seen = 0
    for name, (kind, alphabet) in kinds.items():
        for _ in range(400):
            written = "".join(rng.choices(alphabet, k=rng.randint(1, 40)))
            ids = kind.encode(written, add_special_tokens=False) + [kind.eos_token_id] * rng.randint(0, 1)
            decode = decoding(kind)
            text = decode(ids)
            paragraphs, end = split_paragraphs(text), 0
            for index, paragraph in enumerate(paragraphs):
                # The paragraph is found as a whole, between empty lines.
                start = min(
                    i
                    for i in range(end, len(text))
                    if text.startswith(paragraph, i) and split_paragraphs(text[:i]) == paragraphs[:index]
                )
                count, end = count_tokens_before(index, text, ids, decode), start + len(paragraph)
                more, no_more = decode(ids[: count + 1]), decode(ids[:count])
                assert more.startswith(text[:start]) and more != text[:start], (name, text, index)
                assert not (no_more.startswith(text[:start]) and no_more != text[:start]), (name, text, index)
                seen += index > 0
            assert count_tokens_before(len(paragraphs), text, ids, decode) == len(ids) - 1
    assert seen > 300


@pytest.mark.parametrize("first", ["step 😀😀😀", "𠮷𠮷𠮷𠮷"])
def test_half_a_character_is_not_taken_for_the_next_paragraph(first):
    """Byte-level tokenizers decode each byte of an incomplete character to a replacement character, so
    decoded text can become shorter with more tokens.
    """
    tokenizer = byte_fallback()
    before = tokenizer.encode(first + "\n\n", add_special_tokens=False)
    ids = tokenizer.encode(first + "\n\nstep", add_special_tokens=False)
    text, decode = tokenizer.decode(ids), decoding(tokenizer)
    assert ids[: len(before)] == before and len(decode(before[:-3])) > len(decode(before))
    assert count_tokens_before(1, text, ids, decode) == len(before)


def test_scores_that_differ_by_rounding_alone_are_equal():
    """In floating point, 0.1 + 0.2 is not 0.3. A group of such scores has no learning signal."""
    close = torch.tensor([[0.1 + 0.2, 0.3], [2.0**24 + 1, 2.0**24]], dtype=torch.float64)
    advantages = compute_advantages(close)
    assert advantages[0].tolist() == [0.0, 0.0]
    assert advantages[1].tolist() == pytest.approx([0.5**0.5, -(0.5**0.5)], rel=1e-5)


def first_token_beyond(start, text, ids, decode):
    """Return the first token at which the decoded text contains everything before `start` and more (the
    definition).
    """
    for count in range(len(ids) - 1):
        decoded = decode(ids[: count + 1])
        if decoded.startswith(text[:start]) and decoded != text[:start]:
            return count
    return len(ids) - 1


@pytest.mark.slow
def test_tokens_before_places_are_those_of_the_definition_for_any_tokens():
    """Cases: characters split over several tokens, tokens across a boundary, many line breaks."""
    byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False)
    bpe = Tokenizer(models.BPE())
    bpe.pre_tokenizer, bpe.decoder = byte_level, decoders.ByteLevel()
    trainer = trainers.BpeTrainer(vocab_size=330, initial_alphabet=byte_level.alphabet())
    bpe.train_from_iterator(["So x=3.\n\n Then \u00dcber 4.\n\n\U0001f600 end\n\n\n\n"] * 3, trainer)
    breaks = [number for number in range(bpe.get_vocab_size()) if "\n" in bpe.decode([number])]
    rng = random.Random(0)
    for _ in range(500):
        ids = []
        for _ in range(rng.randint(1, 60)):
            ids.append(rng.choice(breaks) if rng.random() < 0.3 else rng.randrange(bpe.get_vocab_size()))
        text = bpe.decode(ids)
        places = paragraph_starts(text)
        expected = [first_token_beyond(place, text, ids, bpe.decode) for place in places]
        assert tokens_before(places, text, ids, bpe.decode) == expected, (text, ids)
