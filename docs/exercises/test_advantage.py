"""Exercise 1: these tests fail with the division and pass without it."""

import math

import pytest
import torch
from advantage import advantages


def test_a_small_difference_stays_small():
    """One group differs only in the format of an answer, and the other in its correctness."""
    form, answer = advantages(torch.tensor([[-1.0, -1.0, -1.0, -0.8], [-1.0, -1.0, -1.0, 1.0]]))
    assert form.tolist() == pytest.approx([-0.05, -0.05, -0.05, 0.15])
    assert answer.tolist() == pytest.approx([-0.5, -0.5, -0.5, 1.5])


def test_groups_with_half_correct_answers_weigh_most():
    """The weight is the sum of squared advantages. With the division, all mixed groups weigh the same."""
    rewards_P_G = torch.tensor([[1.0] * right + [-1.0] * (8 - right) for right in range(9)])
    weights = advantages(rewards_P_G).square().sum(1)
    assert weights.argmax() == 4 and weights[0] == weights[8] == 0
    assert weights[[1, 4]].tolist() == pytest.approx([3.5, 8.0])


def test_a_sample_without_a_verdict_has_no_advantage():
    """It does not affect the others in its group either: their mean is 0.5."""
    two, one = advantages(torch.tensor([[1.0, math.nan, 0.0], [1.0, math.nan, math.nan]]))
    assert two.tolist() == pytest.approx([0.5, 0, -0.5]) and not one.any()
