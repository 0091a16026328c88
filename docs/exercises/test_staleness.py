"""Exercise 4: these tests fail without the correction and pass with it."""

import math

import torch
from staleness import gradient

NOW, STALE = torch.tensor([0.5, 0.3, 0.2]).log(), torch.tensor([0.8, 0.15, 0.05]).log()
REWARDS = torch.tensor([0.0, 0.0, 1.0])


def test_old_samples_give_the_gradient_of_the_current_policy():
    """The gradient is -p x advantage for each token; the last token, for example, has -0.2 x (1 - 0.2)."""
    own = torch.tensor([0.5 * 0.2, 0.3 * 0.2, -0.2 * 0.8])
    assert torch.allclose(gradient(NOW, NOW, REWARDS, math.inf), own)
    assert torch.allclose(gradient(NOW, STALE, REWARDS, math.inf), own)


def test_the_cap_bounds_the_weight_of_a_sample():
    """The tokens are now 0.625, 2 and 4 times as likely. With a cap of 2, the last token counts half as much
    as it should. This adds a bias but bounds the variance."""
    capped = gradient(NOW, STALE, REWARDS, 2.0)
    # probability x weight x advantage
    counted = torch.tensor([0.8 * 0.625 * -0.2, 0.15 * 2 * -0.2, 0.05 * 2 * 0.8])
    assert torch.allclose(capped, counted.sum() * torch.tensor([0.5, 0.3, 0.2]) - counted)


def test_fresh_samples_need_no_correction():
    """This test passes before and after the exercise, for any cap of at least 1."""
    assert torch.allclose(gradient(NOW, NOW, REWARDS, 1.0), gradient(NOW, NOW, REWARDS, math.inf))


def test_the_cap_is_only_an_upper_bound_of_each_weight():
    """The test uses random probabilities and rewards, and several caps. Weights far below 1 do not change,
    and the cap does not depend on whether a token is better or worse than average."""
    torch.manual_seed(0)
    for cap in (1.0, 1.5, 3.0, 10.0):
        now, stale = (2 * torch.randn(2, 6)).log_softmax(-1)
        rewards = torch.randn(6)
        weights = (now - stale).exp().clamp(max=cap)
        counted = stale.exp() * weights * (rewards - now.exp() @ rewards)  # probability x weight x advantage
        expected = counted.sum() * now.exp() - counted
        assert torch.allclose(gradient(now, stale, rewards, cap), expected, atol=1e-5)
