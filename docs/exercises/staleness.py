"""Exercise 4: samples of older weights, and their correction (docs/teaching.md).

One token is drawn from a small vocabulary. `gradient` is the expected policy gradient, exactly: instead of
drawing it takes each token once, with the chance that the old weights would draw it. Where those are not the
weights of now (--overlap) it is not the policy's own gradient: mend it with what compute_policy_loss offers.

    pytest docs/exercises/test_staleness.py
"""

import torch

from algorithm import compute_policy_loss


def gradient(logits_V, stale_logits_V, rewards_V, cap: float) -> torch.Tensor:
    """d loss / d logits, V, of a token drawn from softmax(stale_logits); cap: of a token's weight."""
    logits_V = logits_V.clone().requires_grad_()
    logprobs_V, stale_V = logits_V.log_softmax(-1), stale_logits_V.log_softmax(-1)
    now_V = logprobs_V.detach()
    advantages_V = stale_V.exp() * (rewards_V - (now_V.exp() * rewards_V).sum())
    mask = torch.ones(len(rewards_V), 1, dtype=torch.bool)
    loss, _ = compute_policy_loss(logprobs_V[:, None], now_V[:, None], advantages_V, mask, num_tokens=1)
    loss.backward()
    return logits_V.grad
