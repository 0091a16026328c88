"""Exercise 1: an advantage without the division by the deviation (docs/teaching.md).

This is GRPO's, as in algorithm.py. A group in which one response is 0.2 better than the others is pushed as
hard as one in which it is right and they are wrong. Change `advantages` so that what is small stays small.

    pytest docs/exercises/test_advantage.py
"""

import torch


def advantages(rewards_P_G: torch.Tensor) -> torch.Tensor:
    """Each reward within its group. NaN is no verdict: advantage 0, and left out of the group's mean."""
    known = ~rewards_P_G.isnan()
    count = known.sum(1, keepdim=True)
    mean = rewards_P_G.nan_to_num().sum(1, keepdim=True) / count.clamp(min=1)
    centred = torch.where(known, rewards_P_G - mean, 0.0)
    std = (centred.square().sum(1, keepdim=True) / (count - 1).clamp(min=1)).sqrt()
    return centred / (std + 1e-6)
