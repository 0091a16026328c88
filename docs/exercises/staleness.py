"""Exercise 4: samples from older weights, and their correction (docs/teaching.md).

One token is sampled from a small vocabulary. `gradient` computes the expected policy gradient exactly:
instead of sampling, it weights each token with its probability under the old weights. If the old weights
differ from the current weights (--overlap), the result is not the gradient of the current policy. Fix
`gradient` with the correction that compute_policy_loss offers.

    pytest docs/exercises/test_staleness.py
"""

import torch

from algorithm import compute_policy_loss


def gradient(logits_V, stale_logits_V, rewards_V, cap: float) -> torch.Tensor:
    """Return d loss / d logits (V) for a token sampled from softmax(stale_logits_V).

    `cap` is the upper bound of a token's importance weight.
    """
    logits_V = logits_V.clone().requires_grad_()
    logprobs_V, stale_V = logits_V.log_softmax(-1), stale_logits_V.log_softmax(-1)
    now_V = logprobs_V.detach()
    advantages_V = stale_V.exp() * (rewards_V - (now_V.exp() * rewards_V).sum())
    mask = torch.ones(len(rewards_V), 1, dtype=torch.bool)
    loss, _ = compute_policy_loss(logprobs_V[:, None], now_V[:, None], advantages_V, mask, num_tokens=1)
    loss.backward()
    return logits_V.grad
