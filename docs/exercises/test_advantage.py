"""Exercise 1: red with the division, green without it."""

import math

import torch
from advantage import advantages


def test_a_small_difference_stays_small():
    """A box around a wrong number against none, and a right answer against wrong ones."""
    form, answer = advantages(torch.tensor([[-1.0, -1.0, -1.0, -0.8], [-1.0, -1.0, -1.0, 1.0]]))
    assert torch.allclose(form, torch.tensor([-0.05, -0.05, -0.05, 0.15]))
    assert torch.allclose(answer, torch.tensor([-0.5, -0.5, -0.5, 1.5]))


def test_the_most_is_learnt_where_half_are_right():
    """By the sum of the squares; with the division a single right one of eight weighs as much."""
    rewards_P_G = torch.tensor([[1.0] * right + [-1.0] * (8 - right) for right in range(9)])
    weights = advantages(rewards_P_G).square().sum(1)
    assert weights.argmax() == 4 and weights[0] == weights[8] == 0
    assert torch.allclose(weights[[1, 4]], torch.tensor([3.5, 8.0]))


def test_no_verdict_is_no_number():
    """Green before and after: it must stay so."""
    advantages_P_G = advantages(torch.tensor([[1.0, math.nan, 0.0], [1.0, math.nan, math.nan]]))
    assert advantages_P_G[0, 1] == 0 and advantages_P_G[0].sum() == 0 and not advantages_P_G[1].any()
