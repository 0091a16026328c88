"""The mathematics of FAPO's training, as pure functions on tensors.

    from algorithm import compute_advantages, compute_policy_loss

Read it beside the README's three equations: R_FAPO itself is made in compute_score.py (paper eq. 8); what
turns rewards into a gradient is here. Nothing here knows of models, files or servers, and nothing is mutated.
Needs none of our other files.

What is left out: value functions (GAE), losses per sequence (GSPO), a KL term inside the reward.

Shapes: P prompts, G samples of each, B = P*G sequences, T tokens of the longest response.
"""

import math

import torch

# beyond 88 exp() overflows in float32: the loss may still be finite, its gradient is NaN
MAX_LOG_RATIO = 20.0


# ------------------------------------------------------------------------------------------------------------
# ---- advantages



def compute_advantages(rewards_P_G: torch.Tensor) -> torch.Tensor:
    """(reward - mean) / (sample std + 1e-6) within each group (GRPO; FAPO, section 3).

    NaN means no verdict: such a sample has advantage 0 and is left out of its group's mean and std. A group
    with fewer than two verdicts or without spread gets 0. Returns advantages_P_G.
    """
    known = ~rewards_P_G.isnan()
    count = known.sum(1, keepdim=True)
    mean = rewards_P_G.nan_to_num().sum(1, keepdim=True) / count.clamp(min=1)
    centred = torch.where(known, rewards_P_G - mean, 0.0)
    std = (centred.square().sum(1, keepdim=True) / (count - 1).clamp(min=1)).sqrt()
    # A group without spread can have a std of rounding errors, which the division would blow up.
    lowest = torch.where(known, rewards_P_G, math.inf).amin(1, keepdim=True)
    highest = torch.where(known, rewards_P_G, -math.inf).amax(1, keepdim=True)
    return torch.where((count >= 2) & (highest > lowest), centred / (std + 1e-6), 0.0)


def compute_process_aware_advantages(outcome_P_G, process_P_G, right_P_G) -> torch.Tensor:
    """A_outcome + A_process, the two normalised apart (PAPO, arXiv:2603.26535).

    outcome_P_G: 1 where the answer is right, else -1 (plus a length penalty, if any), normalised over the
    whole group. process_P_G: quality of the reasoning, here 1 sound and 0 flawed, normalised among the right
    answers (right_P_G, bool) only and 0 for the others: however good its steps look, a wrong answer gains
    nothing, and in a group that is all right the steps still tell the samples apart. NaN in the outcome, or
    in the process of a right answer: no verdict, advantage 0, left out of both. Returns advantages_P_G.
    """
    known = ~(outcome_P_G.isnan() | right_P_G & process_P_G.isnan())
    outcome = compute_advantages(torch.where(known, outcome_P_G, math.nan))
    return outcome + compute_advantages(torch.where(known & right_P_G, process_P_G, math.nan))


def overlong_penalty(length: int, max_length: int, buffer: int, factor: float) -> float:
    """0 up to max_length - buffer tokens, then falling linearly to -factor at max_length.

    Source: DAPO (arXiv:2503.14476), equation 13, without its cut at max_length: a response cannot be longer
    than that. Raises ValueError for a buffer outside 1 .. max_length.
    """
    if not 0 < buffer <= max_length:
        raise ValueError(f"overlong buffer is {buffer}: it must be between 1 and max_length ({max_length})")
    exceed = length - (max_length - buffer)
    return min(-exceed / buffer * factor, 0.0)


# ------------------------------------------------------------------------------------------------------------
# -------- losses



def compute_policy_loss(logprobs, old_logprobs, advantages, mask, num_tokens, clip_low=0.2, clip_high=0.28,
                        clip_c=10.0, rollout_logprobs=None, tis_cap=None):  # fmt: skip
    """The clipped policy loss, a token mean over the global `num_tokens` (GRPO, DAPO's clip-higher).

    clip_c: dual clip, a bound on the ratio where the advantage is negative.
    logprobs, old_logprobs, rollout_logprobs: B x T, of the sampled tokens under the policy now, before this
    step's first update, and as the sampler had them. advantages: B or B x T. mask: B x T, true on response
    tokens. num_tokens: response tokens of the whole mini-batch, so that the sum over any split into
    micro-batches or ranks is the same loss. tis_cap: weigh each token by min(exp(old - rollout), tis_cap)
    (truncated importance sampling); needs rollout_logprobs.

    Returns (loss, sums): the sums over these tokens of what was clipped and of the KL estimate r - 1 - log r,
    and the number of tokens to divide them by, all three floats that add up over micro-batches and ranks.
    Nothing is mutated.
    """
    if advantages.dim() == 1:
        advantages = advantages[:, None]
    mask = mask.to(logprobs.dtype)
    # what stands in the padding may be anything, NaN too
    log_ratio = torch.where(mask > 0, logprobs - old_logprobs, 0.0)
    log_ratio = log_ratio.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)
    ratio = log_ratio.exp()
    unclipped = -advantages * ratio
    clipped = -advantages * ratio.clamp(1 - clip_low, 1 + clip_high)
    loss_B_T = torch.maximum(unclipped, clipped)
    bound = -advantages * clip_c
    loss_B_T = torch.where(advantages < 0, torch.minimum(loss_B_T, bound), loss_B_T)
    sums = {}
    if tis_cap is not None:
        if rollout_logprobs is None:
            raise ValueError("tis_cap: needs rollout_logprobs")
        weight = torch.where(mask > 0, old_logprobs - rollout_logprobs, 0.0).exp().detach()
        sums["tis_sum"] = (weight.clamp(max=tis_cap) * mask).sum().item()
        sums["tis_capped_tokens"] = ((weight > tis_cap) * mask).sum().item()
        loss_B_T = loss_B_T * weight.clamp(max=tis_cap)
    with torch.no_grad():
        sums |= {
            "clipped_tokens": ((clipped > unclipped) * mask).sum().item(),
            "approx_kl_sum": (((ratio - 1) - log_ratio) * mask).sum().item(),
            "loss_tokens": mask.sum().item(),
        }
    return (loss_B_T * mask).sum() / num_tokens, sums


def compute_kl_loss(logprobs, reference_logprobs, mask, num_tokens):
    """KL to the reference: token mean of exp(d) - d - 1 (GRPO, arXiv:2402.03300, eq. 4).

    d is reference - policy. Shapes and `num_tokens` as in compute_policy_loss.
    """
    difference = torch.where(mask, reference_logprobs - logprobs, 0.0).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)
    return ((difference.exp() - difference - 1) * mask).sum() / num_tokens
