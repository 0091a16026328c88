"""Exercise 1: these tests fail with the division and pass without it."""

import math

import torch
from advantage import advantages


def test_a_small_difference_stays_small():
    """One group differs only in the format of an answer, and the other in its correctness."""
    form, answer = advantages(torch.tensor([[-1.0, -1.0, -1.0, -0.8], [-1.0, -1.0, -1.0, 1.0]]))
    assert torch.allclose(form, torch.tensor([-0.05, -0.05, -0.05, 0.15]))
    assert torch.allclose(answer, torch.tensor([-0.5, -0.5, -0.5, 1.5]))


def test_groups_with_half_correct_answers_weigh_most():
    """The weight is the sum of squared advantages. With the division, all mixed groups weigh the same."""
    rewards_P_G = torch.tensor([[1.0] * right + [-1.0] * (8 - right) for right in range(9)])
    weights = advantages(rewards_P_G).square().sum(1)
    assert weights.argmax() == 4 and weights[0] == weights[8] == 0
    assert torch.allclose(weights[[1, 4]], torch.tensor([3.5, 8.0]))


def test_a_sample_without_a_verdict_has_no_advantage():
    """This test passes before and after the exercise."""
    advantages_P_G = advantages(torch.tensor([[1.0, math.nan, 0.0], [1.0, math.nan, math.nan]]))
    assert advantages_P_G[0, 1] == 0 and advantages_P_G[0].sum() == 0 and not advantages_P_G[1].any()
