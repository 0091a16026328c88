"""Exercise 1: advantages without division by the standard deviation (docs/teaching.md).

`advantages` implements GRPO, as algorithm.py does. The division gives every group the same weight: if one
response is only 0.2 better than the others, it gets the same advantage as the only correct response among
wrong ones. Change `advantages` so that small differences in reward give small advantages.

    pytest docs/exercises/test_advantage.py
"""

import torch


def advantages(rewards_P_G: torch.Tensor) -> torch.Tensor:
    """Return the advantage of each reward within its group.

    NaN means that a sample has no verdict. Its advantage is 0, and the group's mean excludes it.
    """
    known = ~rewards_P_G.isnan()
    count = known.sum(1, keepdim=True)
    mean = rewards_P_G.nan_to_num().sum(1, keepdim=True) / count.clamp(min=1)
    centred = torch.where(known, rewards_P_G - mean, 0.0)
    std = (centred.square().sum(1, keepdim=True) / (count - 1).clamp(min=1)).sqrt()
    return centred / (std + 1e-6)
