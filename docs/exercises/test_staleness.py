"""Exercise 4: red without the correction, green with it."""

import math

import torch
from staleness import gradient

NOW, STALE = torch.tensor([0.5, 0.3, 0.2]).log(), torch.tensor([0.8, 0.15, 0.05]).log()
REWARDS = torch.tensor([0.0, 0.0, 1.0])


def test_old_samples_give_the_gradient_of_now():
    """Weighed by how much likelier the token has become: 0.2 x (0.2 - 1), and so on."""
    own = torch.tensor([0.5 * 0.2, 0.3 * 0.2, -0.2 * 0.8])
    assert torch.allclose(gradient(NOW, NOW, REWARDS, math.inf), own)
    assert torch.allclose(gradient(NOW, STALE, REWARDS, math.inf), own)


def test_the_cap_bounds_what_one_sample_weighs():
    """The tokens are 0.625, 2 and 4 times as likely now. With a cap of 2 the last one counts half of what it
    should: a little wrong, and never wild."""
    capped = gradient(NOW, STALE, REWARDS, 2.0)
    # chance x weight x advantage
    counted = torch.tensor([0.8 * 0.625 * -0.2, 0.15 * 2 * -0.2, 0.05 * 2 * 0.8])
    assert torch.allclose(capped, counted.sum() * torch.tensor([0.5, 0.3, 0.2]) - counted)


def test_fresh_samples_need_no_correction():
    """Green before and after: whatever the cap, as long as it is not below 1."""
    assert torch.allclose(gradient(NOW, NOW, REWARDS, 1.0), gradient(NOW, NOW, REWARDS, math.inf))


def test_the_cap_bounds_each_weight_from_above_and_no_other_way():
    """For any chances, rewards and caps: weights far below 1 stay as they are, and the cap does not ask
    whether a token is better or worse than the average."""
    torch.manual_seed(0)
    for cap in (1.0, 1.5, 3.0, 10.0):
        now, stale = (2 * torch.randn(2, 6)).log_softmax(-1)
        rewards = torch.randn(6)
        weights = (now - stale).exp().clamp(max=cap)
        counted = stale.exp() * weights * (rewards - now.exp() @ rewards)  # chance x weight x advantage
        expected = counted.sum() * now.exp() - counted
        assert torch.allclose(gradient(now, stale, rewards, cap), expected, atol=1e-5)
