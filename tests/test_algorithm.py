"""The mathematics: advantages and losses worked out by hand, and the invariances that training relies on."""

import math

import pytest
import torch

import grpo_trainer
from algorithm import (
    compute_advantages,
    compute_kl_loss,
    compute_policy_loss,
    compute_process_aware_advantages,
    overlong_penalty,
)

NAN = math.nan


def test_advantages_by_hand():
    rewards = torch.tensor(
        [[1.0, 0.0, -1.0, 0.0], [1.0, 1.0, 1.0, 1.0], [1.0, NAN, -1.0, NAN], [NAN, NAN, NAN, 1.0]]
    )
    kept = rewards.clone()
    got = compute_advantages(rewards)
    std = math.sqrt(2 / 3)  # sample variance of 1, 0, -1, 0: (1 + 1) / 3
    assert torch.allclose(got[0], torch.tensor([1.0, 0.0, -1.0, 0.0]) / (std + 1e-6))
    assert got[1].tolist() == [0, 0, 0, 0]  # no spread
    assert torch.allclose(
        got[2], torch.tensor([1.0, 0.0, -1.0, 0.0]) / (math.sqrt(2) + 1e-6)
    )  # NaN leaves the statistics
    assert got[3].tolist() == [0, 0, 0, 0]  # fewer than two verdicts
    assert torch.equal(rewards, kept) or torch.equal(rewards.isnan(), kept.isnan())


def test_advantages_of_equal_rewards_are_zero_in_spite_of_rounding():
    assert compute_advantages(torch.full((1, 7), 0.1)).abs().max() == 0


def test_flawed_positives_get_a_negative_advantage_exactly_when_right_outnumbers_wrong():
    """Paper appendix A: with lambda = 1 the flawed ones' advantage changes sign at rho = #correct / #wrong =
    1."""

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
        (0.5, 2.0, -1.0),  # a fall of a good token is not clipped
        (0.5, -2.0, 1.6),  # clipped from below at 0.8
        (1.5, -2.0, 3.0),  # a rise of a bad token is not clipped ...
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
            losses, kls = losses + loss.item(), kls + metrics["approx_kl_sum"]
        return losses, kls, grads

    whole = total([[0, 1, 2, 3, 4, 5]])
    for splits in ([[0], [1], [2], [3], [4], [5]], [[5, 0, 3], [1, 2, 4]]):
        parts = total(splits)
        assert parts[0] == pytest.approx(whole[0], abs=1e-6) and parts[1] == pytest.approx(whole[1], abs=1e-6)
        assert torch.allclose(parts[2], whole[2], atol=1e-7)
    assert all(torch.equal(a, b) for a, b in zip(arguments, copies))
    garbage = logprobs.clone()
    garbage[~mask] = NAN  # what stands in the padding does not matter
    losses = [
        compute_policy_loss(values, old, advantages, mask, num_tokens)[0] for values in (garbage, logprobs)
    ]
    assert losses[0] == losses[1]


def test_kl_to_the_reference_by_hand():
    logprobs, reference = torch.tensor([[-1.0, -2.0, NAN]]), torch.tensor([[-1.5, -1.0, 3.0]])
    mask = torch.tensor([[True, True, False]])
    kl = compute_kl_loss(logprobs, reference, mask, 4)
    assert kl.item() == pytest.approx((math.exp(-0.5) + 0.5 - 1 + math.exp(1) - 1 - 1) / 4)
    assert compute_kl_loss(logprobs, logprobs, mask, 4).item() == 0


def test_advantages_per_token_or_per_sequence():
    logprobs, old, mask = torch.randn(2, 3), torch.randn(2, 3), torch.ones(2, 3)
    per_row = compute_policy_loss(logprobs, old, torch.tensor([1.0, -2.0]), mask, 6)[0]
    per_token = compute_policy_loss(logprobs, old, torch.tensor([[1.0] * 3, [-2.0] * 3]), mask, 6)[0]
    assert per_row == per_token


def test_overlong_penalty_is_the_reward_loops():
    assert overlong_penalty(100, 100, 40, 1.0) == -1.0
    assert overlong_penalty(60, 100, 40, 1.0) == 0.0
    assert overlong_penalty(80, 100, 40, 0.5) == -0.25


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
        assert sums["loss_tokens"] == 3 and sums["clipped_tokens"] == 3  # exp(0.5) is over 1.28
        assert sums["approx_kl_sum"] == pytest.approx(3 * (math.exp(0.5) - 1 - 0.5), rel=1e-5)


def test_process_aware_advantages_by_hand():
    """Right and sound, right and flawed, wrong, right without a verdict; then a group that is all right; then
    all wrong."""
    outcome = torch.tensor([[1.0, 1.0, -1.0, 1.0], [1.0, 1.0, 1.0, 1.0], [-1.0, -1.0, -1.0, -1.0]])
    process = torch.tensor([[1.0, 0.0, 1.0, NAN], [1.0, 1.0, 1.0, 0.0], [1.0, 0.0, 1.0, 0.0]])
    got = compute_process_aware_advantages(outcome, process, outcome > 0)
    spread, half = math.sqrt(4 / 3) + 1e-6, math.sqrt(0.5) + 1e-6  # sample deviations of 1, 1, -1 and of 1, 0
    right, wrong = (2 / 3) / spread, (-4 / 3) / spread
    assert torch.allclose(got[0], torch.tensor([right + 0.5 / half, right - 0.5 / half, wrong, 0.0]))
    assert torch.allclose(
        got[1], torch.tensor([0.25, 0.25, 0.25, -0.75]) / (0.5 + 1e-6)
    )  # the steps still tell them apart
    assert got[2].tolist() == [0, 0, 0, 0]  # however good its steps, a wrong answer gains nothing
    late = compute_process_aware_advantages(outcome[1:2] - 1.5, process[1:2], outcome[1:2] > 0)
    assert torch.equal(late[0], got[1])  # a right answer that came late is a right answer


def test_the_trainer_has_the_same_functions_under_the_same_names():
    assert (
        grpo_trainer.compute_advantages is compute_advantages
        and grpo_trainer.compute_policy_loss is compute_policy_loss
    )
    assert grpo_trainer.overlong_penalty is overlong_penalty
