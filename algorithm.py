"""The mathematics of FAPO's training, as pure functions on tensors.

    from algorithm import compute_advantages, compute_policy_loss

Read it beside the README's three equations: R_FAPO itself is made in compute_score.py (paper eq. 8); what
turns rewards into a gradient is here. Nothing here knows of models, files or servers, and nothing is mutated.
Needs none of our other files. docs/algorithms.md has all of it in one table.
Left out: value functions (GAE), a KL term inside the reward.
Shapes: P prompts, G samples of each, B = P*G sequences, T tokens of the longest response.
"""

import math

import torch

MAX_LOG_RATIO = 20.0  # beyond 88 exp() overflows in float32: the loss may be finite, its gradient is NaN
# How far the ratio may go below and above 1, as published: DAPO; GSPO; CISPO (from 0 to 5: ScaleRL).
CLIP_RANGES = {"clip": (0.2, 0.28), "gspo": (3e-4, 4e-4), "cispo": (1.0, 4.0)}


# ---- advantages


def compute_advantages(rewards_P_G: torch.Tensor, divide_by_std: bool = True) -> torch.Tensor:
    """(reward - mean) / (sample std + 1e-6) within each group (GRPO; FAPO, section 3).

    NaN means no verdict: such a sample has advantage 0 and is left out of its group's mean and std. A group
    with fewer than two verdicts or without spread gets 0. divide_by_std=False: Dr. GRPO (arXiv:2503.20783),
    whose loss is divided by a constant length as well. Returns advantages_P_G.
    """
    known = ~rewards_P_G.isnan()
    count = known.sum(1, keepdim=True)
    mean = rewards_P_G.nan_to_num().sum(1, keepdim=True) / count.clamp(min=1)
    centred = torch.where(known, rewards_P_G - mean, 0.0)
    std = (centred.square().sum(1, keepdim=True) / (count - 1).clamp(min=1)).sqrt()
    # A group without spread can have a std of rounding errors, which the division would blow up.
    lowest = torch.where(known, rewards_P_G, math.inf).amin(1, keepdim=True)
    highest = torch.where(known, rewards_P_G, -math.inf).amax(1, keepdim=True)
    scale = std + 1e-6 if divide_by_std else 1.0
    return torch.where(highest > lowest, centred / scale, 0.0)


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


def compute_term_advantages(terms: list[torch.Tensor], weights: list[float]) -> torch.Tensor:
    """Terms normalised in their groups, the weighted sum in the batch, all P x G (GDPO, arXiv:2601.05242).

    NaN leaves a sample out of that term only. The batch's mean, 0 like every group's, is not subtracted."""
    total = sum(weight * compute_advantages(term) for term, weight in zip(terms, weights, strict=True))
    count = (~torch.stack(terms).isnan()).any(0).sum()
    return total / ((total.square().sum() / (count - 1).clamp(min=1)).sqrt() + 1e-6)


def compute_prefix_advantages(outcome_P_G, right_P_G, share_P_G, prefix_reward: float = 0.5) -> tuple:
    """Two advantages a sample: on its rewarded prefix, and after it (VPPO, arXiv:2601.18984, eq. 6 and 7).

    A token's value is 1 in a right solution; in a wrong one `prefix_reward` (alpha) in the part of the prefix
    before the first error that is rewarded, 0 after it. From it goes the group's mean of the solutions' mean
    values, which is outcome + alpha * share in a wrong one; no division by a deviation. Eq. 8, which never
    blames that prefix, is --credit prefix. Not in the paper: a length penalty is part of the outcome.

    outcome_P_G: 1 right, 0 wrong (plus a length penalty, if any), NaN no verdict: 0, left out of the mean;
    a group with fewer than two verdicts gets 0. right_P_G: bool. share_P_G: rewarded prefix over length.
    Returns (prefix_P_G, rest_P_G).
    """
    known = ~outcome_P_G.isnan()
    count = known.sum(1, keepdim=True)
    alpha_P_G = torch.where(right_P_G, 0.0, prefix_reward)
    mean = (outcome_P_G + alpha_P_G * share_P_G).nan_to_num().sum(1, keepdim=True) / count.clamp(min=1)
    known &= count >= 2
    rest_P_G = outcome_P_G - mean
    return torch.where(known, rest_P_G + alpha_P_G, 0.0), torch.where(known, rest_P_G, 0.0)


def count_tokens_before(paragraph: int, text: str, ids: list[int], decode) -> int:
    """How many tokens of a response come before one of its paragraphs.

    paragraph: counted from 0, as compute_score.split_paragraphs does; one that is missing begins with the
    last token, by which the response ended. text: what decode(ids) gives. A token across the boundary belongs
    to the later paragraph. Nothing is encoded again, which could give other tokens: bisection finds the first
    token up to which the decoded text is all that precedes the paragraph, and more.
    """
    end, starts = 0, []
    for part in text.split("\n\n"):
        if part.strip():
            starts.append(end + len(part) - len(part.lstrip()))
        end += len(part) + 2
    low, high = 0, len(ids) - 1
    if paragraph >= len(starts):
        return high
    before = text[: starts[paragraph]]
    while low < high:
        middle = (low + high) // 2
        if (part := decode(ids[: middle + 1])).startswith(before) and part != before:
            high = middle
        else:
            low = middle + 1
    return low


def overlong_penalty(length: int, max_length: int, buffer: int, factor: float) -> float:
    """0 up to max_length - buffer tokens, then falling linearly to -factor at max_length.

    Source: DAPO (arXiv:2503.14476), equation 13, without its cut at max_length: a response cannot be longer
    than that. Raises ValueError for a buffer outside 1 .. max_length.
    """
    if not 0 < buffer <= max_length:
        raise ValueError(f"overlong buffer is {buffer}: it must be between 1 and max_length ({max_length})")
    exceed = length - (max_length - buffer)
    return min(-exceed / buffer * factor, 0.0)


# ---- losses


def compute_policy_loss(logprobs, old_logprobs, advantages, mask, num_tokens, clip_low=0.2, clip_high=0.28,
                        clip_c=10.0, rollout_logprobs=None, tis_cap=None, *, loss="clip",
                        tis_mode="truncate", num_sequences=None):  # fmt: skip
    """The policy loss, a token mean over the global `num_tokens`.

    loss: "clip" (GRPO, DAPO's clip-higher; clip_c: dual clip, a bound on the ratio where the advantage is
    negative), "gspo" (arXiv:2507.18071, its GSPO-token: the ratio is the sequence's, the mean is over
    sequences) or "cispo" (arXiv:2506.13585: the clipped ratio is a constant weight of log-probabilities).

    logprobs, old_logprobs, rollout_logprobs: B x T, of the sampled tokens under the policy now, before this
    step's first update, and as the sampler had them. advantages: B or B x T. mask: B x T, true on response
    tokens. num_tokens: response tokens of the whole mini-batch, so that the sum over any split into
    micro-batches or ranks is the same loss; num_sequences: its sequences (gspo; default: those given here).
    clip_low, clip_high: None takes the loss's own (CLIP_RANGES). tis_cap: weigh tokens by exp(old - rollout),
    see importance_weights; needs rollout_logprobs.

    Returns (loss, sums): the sums over these tokens of what was clipped and of the KL estimate r - 1 - log r,
    and the number of tokens to divide them by, all three floats that add up over micro-batches and ranks.
    """
    if advantages.dim() == 1:
        advantages = advantages[:, None]
    mask = mask.to(logprobs.dtype)
    logprobs = torch.where(mask > 0, logprobs, 0.0)  # what stands in the padding may be anything, NaN too
    log_ratio = torch.where(mask > 0, logprobs - old_logprobs, 0.0).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)
    ratio = log_ratio.exp()
    kl_B_T = (ratio - 1 - log_ratio).detach()
    if loss == "gspo":  # the value is the sequence's, the gradient that of each token's log-probability
        ratio = (sequence_mean(log_ratio, mask).detach() + log_ratio - log_ratio.detach()).exp()
        advantages = advantages * num_tokens / (num_sequences or len(mask)) / lengths(mask)  # equal weights
    both = zip((clip_low, clip_high), CLIP_RANGES[loss])
    clip_low, clip_high = (own if given is None else given for given, own in both)
    unclipped = -advantages * ratio
    clipped = -advantages * ratio.clamp(1 - clip_low, 1 + clip_high)
    loss_B_T = torch.maximum(unclipped, clipped)
    if loss == "clip":
        bound = -advantages * clip_c
        loss_B_T = torch.where(advantages < 0, torch.minimum(loss_B_T, bound), loss_B_T)
    is_clipped = loss_B_T != unclipped
    if loss == "cispo":
        loss_B_T, is_clipped = clipped.detach() * logprobs, clipped != unclipped
    sums = {}
    if tis_cap is not None:
        if rollout_logprobs is None:
            raise ValueError("tis_cap: needs rollout_logprobs")
        weight, is_capped = importance_weights(old_logprobs, rollout_logprobs, mask, tis_cap, tis_mode)
        sums["tis_sum"] = (weight * mask).sum().item()
        sums["tis_capped_tokens"] = (is_capped * mask).sum().item()
        loss_B_T = loss_B_T * weight
    sums |= {
        "clipped_tokens": (is_clipped * mask).sum().item(),
        "approx_kl_sum": (kl_B_T * mask).sum().item(),
        "loss_tokens": mask.sum().item(),
    }
    return (loss_B_T * mask).sum() / num_tokens, sums


def importance_weights(old_logprobs, rollout_logprobs, mask, cap: float, mode: str = "truncate"):
    """Weights for samples that another policy sampled, and which of them went beyond `cap` (C).

    w = exp(old - rollout) of each token; "truncate": min(w, C); "mask": 0 where w > C; "sequence": the
    geometric mean of the sequence's w for all its tokens, 0 where it is outside [1/C, C].
    """
    log_weight = torch.where(mask > 0, old_logprobs - rollout_logprobs, 0.0).detach()
    weight = (sequence_mean(log_weight, mask) if mode == "sequence" else log_weight).exp()
    beyond = (weight > cap) | (weight < 1 / cap) if mode == "sequence" else weight > cap
    return (weight.clamp(max=cap) if mode == "truncate" else torch.where(beyond, 0.0, weight)), beyond


def sequence_mean(values_B_T, mask):
    """The mean over each sequence's tokens, B x 1. values: 0 in the padding."""
    return values_B_T.sum(1, keepdim=True) / lengths(mask)


def lengths(mask):
    return mask.sum(1, keepdim=True).clamp(min=1)


def compute_kl_loss(logprobs, reference_logprobs, mask, num_tokens):
    """KL to the reference: token mean of exp(d) - d - 1 (GRPO, arXiv:2402.03300, eq. 4).

    d is reference - policy. Shapes and `num_tokens` as in compute_policy_loss.
    """
    difference = torch.where(mask, reference_logprobs - logprobs, 0.0).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)
    return ((difference.exp() - difference - 1) * mask).sum() / num_tokens
