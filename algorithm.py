"""The mathematics of FAPO's training, as pure functions on tensors.

    from algorithm import ADVANTAGES, LOSSES, compute_advantages, compute_policy_loss

Read it beside the README's three equations: R_FAPO itself is made in compute_score.py (paper eq. 8); what
turns rewards into a gradient is here. A new advantage is one function and one line in ADVANTAGES, a new loss
one function and one line in LOSSES; docs/algorithms.md has all of them in one table.
Nothing here knows of models, files or servers, and nothing is mutated. Needs none of our other files.
Left out: value functions (GAE), a KL term inside the reward.
Shapes: P prompts, G samples of each, B = P*G sequences, T tokens of the longest response, S paragraphs.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch

MAX_LOG_RATIO = 20.0  # beyond 88 exp() overflows in float32: the loss may be finite, its gradient is NaN


# ---- advantages: the formulas


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
    # The std of a group without spread can consist of rounding errors, which the division would blow up.
    lowest = torch.where(known, rewards_P_G, math.inf).amin(1, keepdim=True)
    highest = torch.where(known, rewards_P_G, -math.inf).amax(1, keepdim=True)
    has_spread = highest - lowest > 1e-9 * torch.maximum(highest.abs(), lowest.abs())
    if divide_by_std:
        scale = centred.abs().amax(1, keepdim=True).clamp(min=1)  # squares of huge rewards would overflow
        variance = (centred / scale).square().sum(1, keepdim=True) / (count - 1).clamp(min=1)
        centred = centred / (scale * variance.sqrt() + 1e-6)
    return torch.where(has_spread, centred, 0.0)


def overlong_penalty(length: int, max_length: int, buffer: int, factor: float) -> float:
    """0 up to max_length - buffer tokens, then falling linearly to -factor at max_length.

    Source: DAPO (arXiv:2503.14476), equation 13, without its cut at max_length: a response cannot be longer
    than that. Raises ValueError for a buffer outside 1 .. max_length.
    """
    if not 0 < buffer <= max_length:
        raise ValueError(
            f"overlong_buffer: {buffer} must be from 1 to max_response_length {max_length}; 0 is no penalty"
        )
    exceed = length - (max_length - buffer)
    return min(-exceed / buffer * factor, 0.0)


def penalty_of(config) -> Callable | None:
    """overlong_penalty with a configuration's settings, of the length alone; None where it has none."""
    if not config.overlong_buffer:
        return None
    penalty = partial(
        overlong_penalty,
        max_length=config.max_response_length,
        buffer=config.overlong_buffer,
        factor=config.overlong_factor,
    )
    penalty(0)  # refuses a buffer that does not fit
    return penalty


# ---- advantages: one function and one line in the table for each


# groups: credit.Groups, with `number(key)` of the reward function's dict, rewards_P_G (score + penalty),
# penalties_P_G (for length), lengths_P_G and prompt_lengths_P_G (tokens), tokens_T (0, 1, ...), prefixes_P_G
# (tokens before the first wrong paragraph), steps. NaN: no verdict, or no such number. options:
# policy.PolicyOptions. Each returns P x G, or P x G x T; NaN: no verdict on this sample.


def grpo(groups, options):
    return compute_advantages(groups.rewards_P_G)


def dr_grpo(groups, options):
    """Without the deviation; policy.py divides the loss as if all responses were of full length."""
    return compute_advantages(groups.rewards_P_G, divide_by_std=False)


def papo(groups, options):
    """A_outcome + A_process, the two normalised apart (PAPO, arXiv:2603.26535).

    Outcome: 1 where the answer is right, else -1, plus the length penalty, normalised over the whole group.
    Process: 1 sound, 0 flawed, normalised among the right answers only and 0 for the others: however good its
    steps look, a wrong answer gains nothing, and in a group that is all right the steps still tell the
    samples apart. A right answer whose reasoning nobody judged has no verdict. Nor does a sample without
    `acc`.
    """
    acc_P_G = groups.number("acc")
    right_P_G = acc_P_G == 1
    sound_P_G = 1 - groups.number("flawed_positive")
    unjudged_P_G = acc_P_G.isnan() | (right_P_G & sound_P_G.isnan())
    outcome_P_G = torch.where(right_P_G, 1.0, -1.0) + groups.penalties_P_G
    outcome_P_G = outcome_P_G.masked_fill(unjudged_P_G, math.nan)
    process_P_G = sound_P_G.masked_fill(~right_P_G, math.nan)
    advantages_P_G = compute_advantages(outcome_P_G) + compute_advantages(process_P_G)
    return advantages_P_G.masked_fill(unjudged_P_G, math.nan)


def vppo(groups, options):
    """Two advantages a sample: on its rewarded prefix, and after it (VPPO, arXiv:2601.18984, eq. 6 and 7).

    A token's value is 1 in a right solution; in a wrong one `prefix_reward` (alpha) in the part of the prefix
    before the first error that is rewarded, 0 after it. From it goes the group's mean of the solutions' mean
    values, which is outcome + alpha * share in a wrong one; no division by a deviation. Not in the paper: a
    length penalty is part of the outcome. A group with fewer than two verdicts gets 0.
    """
    right_P_G = groups.number("score") > 0  # by the function: FAPO's, at penalty 1, if it is sound
    outcome_P_G = right_P_G + groups.penalties_P_G
    unpaid_P_G = (options.prefix_cut * groups.prompt_lengths_P_G).round()
    paid_P_G = (groups.prefixes_P_G - unpaid_P_G).clamp(min=0)
    share_P_G = paid_P_G / groups.lengths_P_G
    alpha_P_G = torch.where(right_P_G, 0.0, options.prefix_reward)
    values_P_G = (outcome_P_G + alpha_P_G * share_P_G).nan_to_num()
    known_P_G = ~outcome_P_G.isnan()
    count = known_P_G.sum(1, keepdim=True)
    centred_P_G = outcome_P_G - values_P_G.sum(1, keepdim=True) / count.clamp(min=1)
    is_paid_P_G_T = groups.tokens_T < paid_P_G[..., None]
    advantages_P_G_T = centred_P_G[..., None] + alpha_P_G[..., None] * is_paid_P_G_T
    advantages_P_G_T = torch.where((known_P_G & (count >= 2))[..., None], advantages_P_G_T, 0.0)
    return advantages_P_G_T.masked_fill(groups.prefixes_P_G.isnan()[..., None], math.nan)


def terms(groups, options):
    """Terms normalised in their groups, the weighted sum among these groups (GDPO, arXiv:2601.05242).

    NaN leaves a sample out of that term only, and out of all where it has none. The sum's mean, 0 like every
    group's, is not subtracted.
    """
    total_P_G = 0.0
    size_P_G = 0.0
    known_P_G = False
    for name, weight in parse_terms(options.reward_terms).items():
        term_P_G = groups.number(name)
        weighted_P_G = weight * compute_advantages(term_P_G)
        total_P_G = total_P_G + weighted_P_G
        size_P_G = size_P_G + weighted_P_G.abs()
        known_P_G = known_P_G | ~term_P_G.isnan()
    # Terms that cancel leave a small rest, from rounding and from the 1e-6 in their divisors.
    total_P_G = torch.where(total_P_G.abs() > 1e-4 * size_P_G, total_P_G, 0.0)
    std = (total_P_G.square().sum() / (known_P_G.sum() - 1).clamp(min=1)).sqrt()
    return (total_P_G / (std + 1e-6)).masked_fill(~known_P_G, math.nan)


def parse_terms(reward_terms: tuple[str, ...]) -> dict[str, float]:
    """The names and weights of --reward-terms. ValueError for what is none."""
    weights = {}
    for term in reward_terms:
        name, _, weight = term.partition("=")
        try:
            weights[name] = float(weight)
        except ValueError:
            raise ValueError(f"reward_terms: {term}: write NAME=WEIGHT, as in acc=1") from None
    return weights


def steps(groups, options):
    """GRPO's advantage of the response, and on each paragraph the sum of its own and all later scores.

    The scores are normalised over all paragraphs of a group (GRPO, arXiv:2402.03300, section 4.1.3). A sample
    none of whose steps has a score has no verdict.
    """
    steps_P_G_S, paragraphs_P_G_T = groups.steps
    unscored_P_G = steps_P_G_S.isnan().all(2)
    outcome_P_G = compute_advantages(groups.rewards_P_G.masked_fill(unscored_P_G, math.nan))
    scores_P_GS = compute_advantages(steps_P_G_S.flatten(1))
    scores_P_G_S = scores_P_GS.view(steps_P_G_S.shape)
    sums_P_G_S = scores_P_G_S.flip(2).cumsum(2).flip(2)
    advantages_P_G_T = outcome_P_G[..., None] + sums_P_G_S.gather(2, paragraphs_P_G_T)
    return advantages_P_G_T.masked_fill(unscored_P_G[..., None], math.nan)


ADVANTAGES = {
    "grpo": grpo,
    "dr_grpo": dr_grpo,
    "papo": papo,
    "vppo": vppo,
    "terms": terms,
    "steps": steps,
}


def spare_good_prefix(advantages, groups):
    """--credit prefix: no token before the first wrong paragraph is blamed (VPPO, eq. 8). P x G x T."""
    if advantages.dim() == 2:
        advantages = advantages[..., None]
    advantages = advantages.masked_fill(groups.prefixes_P_G.isnan()[..., None], math.nan)
    is_good_P_G_T = groups.tokens_T < groups.prefixes_P_G[..., None]
    return torch.where(is_good_P_G_T, advantages.clamp(min=0), advantages)


def paragraph_starts(text: str) -> list[int]:
    """Where in a text its paragraphs begin, as compute_score.split_paragraphs finds them."""
    starts = []
    end = 0
    for part in text.split("\n\n"):
        if part.strip():
            starts.append(end + len(part) - len(part.lstrip()))
        end += len(part) + 2
    return starts


def count_tokens_before(paragraph: int, text: str, ids: list[int], decode) -> int:
    """How many tokens of a response come before one of its paragraphs.

    paragraph: counted from 0, as compute_score.split_paragraphs does; one that is missing begins with the
    last token, by which the response ended. The rest as in tokens_before.
    """
    starts = paragraph_starts(text)
    if paragraph >= len(starts):
        return len(ids) - 1
    return tokens_before([starts[paragraph]], text, ids, decode)[0]


def tokens_before(places: list[int], text: str, ids: list[int], decode) -> list[int]:
    """How many tokens of a response come before each of these places in its text, which ascend.

    text: what decode(ids) gives. A token across a place belongs to what follows. Nothing is encoded again,
    which could give other tokens: the search is for the first token up to which the decoded text is all that
    precedes the place, and more. It goes on from place to place and decodes only what is near.
    """
    counts = []
    low, last = 0, len(ids) - 1
    first, offset = 0, 0  # decoding begins with this token, whose text begins here
    for place in places:
        before = text[offset:place]
        reach = 8
        high = min(low + reach, last)
        while high < last and not goes_beyond(before, decode(ids[first : high + 1])):
            low = high + 1
            reach *= 2
            high = min(low + reach, last)
        while low < high:
            middle = (low + high) // 2
            if goes_beyond(before, decode(ids[first : middle + 1])):
                high = middle
            else:
                low = middle + 1
        counts.append(low)
        first, offset = later_start(first, offset, low, text, ids, decode)
    return counts


def goes_beyond(before: str, decoded: str) -> bool:
    return decoded.startswith(before) and decoded != before


def later_start(first: int, offset: int, end: int, text: str, ids: list[int], decode) -> tuple[int, int]:
    """A token a little before `end` to begin decoding with, and where its text begins.

    Decoders drop a space at the start, and join the bytes of a character. So the tokens between the new start
    and `end` must decode to what stands there in the text; else the old start remains.
    """
    decoded = decode(ids[first:end])
    for context in (8, 32):
        near = decode(ids[end - context : end])
        fits = near.strip() and near[0] != "\ufffd" and decoded.endswith(near)
        if end - context > first and fits and text.startswith(decoded, offset):
            return end - context, offset + len(decoded) - len(near)
    return first, offset


# ---- losses: one function and one line in the table for each


def clip_loss(logprobs, log_ratio, advantages, mask, clip_low, clip_high, clip_c):
    """GRPO with DAPO's clip-higher; clip_c: dual clip, a bound where the advantage is negative."""
    ratio = log_ratio.exp()
    unclipped = -advantages * ratio
    clipped = -advantages * ratio.clamp(1 - clip_low, 1 + clip_high)
    loss_B_T = torch.maximum(unclipped, clipped)
    bound = -advantages * clip_c
    loss_B_T = torch.where(advantages < 0, torch.minimum(loss_B_T, bound), loss_B_T)
    return loss_B_T, loss_B_T != unclipped


def gspo_loss(logprobs, log_ratio, advantages, mask, clip_low, clip_high, clip_c):
    """GSPO-token (arXiv:2507.18071): the ratio is the sequence's, the gradient each token's; no dual clip."""
    sequence_log_ratio = log_ratio.sum(1, keepdim=True) / lengths_of(mask)
    ratio = (sequence_log_ratio.detach() + log_ratio - log_ratio.detach()).exp()
    unclipped = -advantages * ratio
    clipped = -advantages * ratio.clamp(1 - clip_low, 1 + clip_high)
    loss_B_T = torch.maximum(unclipped, clipped)
    return loss_B_T, loss_B_T != unclipped


def cispo_loss(logprobs, log_ratio, advantages, mask, clip_low, clip_high, clip_c):
    """CISPO (arXiv:2506.13585): the clipped ratio is a constant weight of log-probabilities; no dual clip."""
    ratio = log_ratio.exp().detach()
    weight = ratio.clamp(1 - clip_low, 1 + clip_high)
    return -advantages * weight * logprobs, weight != ratio


@dataclass(frozen=True)
class Loss:
    compute: Callable  # (logprobs ... clip_c) -> (loss, whether it is clipped), B x T each
    clip_low: float  # how far the ratio may go below 1, as published
    clip_high: float  # and above it
    over_sequences: bool = False  # the mean is over sequences, each the mean of its tokens; else over tokens


LOSSES = {
    "clip": Loss(clip_loss, 0.2, 0.28),  # DAPO
    "gspo": Loss(gspo_loss, 3e-4, 4e-4, over_sequences=True),
    "cispo": Loss(cispo_loss, 1.0, 4.0),  # from 0 to 5: ScaleRL
}


def compute_policy_loss(logprobs, old_logprobs, advantages, mask, num_tokens, clip_low=None, clip_high=None,
                        clip_c=10.0, rollout_logprobs=None, tis_cap=None, *, loss="clip",
                        num_sequences=None):  # fmt: skip
    """The policy loss, a token mean over the global `num_tokens` (gspo: a mean over `num_sequences`).

    logprobs, old_logprobs, rollout_logprobs: B x T, of the sampled tokens under the policy now, before this
    step's first update, and as the sampler had them. advantages: B or B x T. mask: B x T, true on response
    tokens. num_tokens: response tokens of the whole mini-batch, so that the sum over any split into
    micro-batches or ranks is the same loss; num_sequences: its sequences (default: those given here).
    loss: a name in LOSSES. clip_low, clip_high: None takes the loss's own. tis_cap: each token weighs
    min(exp(old - rollout), tis_cap), truncated importance sampling; needs rollout_logprobs.

    Returns (loss, sums): the sums over these tokens of what was clipped and of the KL estimate r - 1 - log r,
    and the number of tokens to divide them by, all three floats that add up over micro-batches and ranks.
    """
    chosen = LOSSES[loss]
    if clip_low is None:
        clip_low = chosen.clip_low
    if clip_high is None:
        clip_high = chosen.clip_high
    if advantages.dim() == 1:
        advantages = advantages[:, None]
    mask = mask.to(logprobs.dtype)
    logprobs = torch.where(mask > 0, logprobs, 0.0)  # what stands in the padding may be anything, NaN too
    log_ratio = torch.where(mask > 0, logprobs - old_logprobs, 0.0).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)
    loss_B_T, is_clipped = chosen.compute(logprobs, log_ratio, advantages, mask, clip_low, clip_high, clip_c)
    kl_B_T = (log_ratio.exp() - 1 - log_ratio).detach()
    sums = {
        "clipped_tokens": (is_clipped * mask).sum().item(),
        "approx_kl_sum": (kl_B_T * mask).sum().item(),
        "loss_tokens": mask.sum().item(),
    }
    if tis_cap is not None:
        weight = torch.where(mask > 0, old_logprobs - rollout_logprobs, 0.0).detach().exp()
        sums["tis_capped_tokens"] = ((weight > tis_cap) * mask).sum().item()
        weight = weight.clamp(max=tis_cap)
        sums["tis_sum"] = (weight * mask).sum().item()
        loss_B_T = loss_B_T * weight
    if chosen.over_sequences:
        loss_B = (loss_B_T * mask).sum(1) / lengths_of(mask)[:, 0]
        return loss_B.sum() / (num_sequences or len(mask)), sums
    return (loss_B_T * mask).sum() / num_tokens, sums


def lengths_of(mask):
    """Tokens of each sequence, B x 1, at least 1."""
    return mask.sum(1, keepdim=True).clamp(min=1)


def compute_kl_loss(logprobs, reference_logprobs, mask, num_tokens):
    """KL to the reference: token mean of exp(d) - d - 1 (GRPO, arXiv:2402.03300, eq. 4).

    d is reference - policy. Shapes and `num_tokens` as in compute_policy_loss.
    """
    mask = mask > 0
    difference = torch.where(mask, reference_logprobs - logprobs, 0.0).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)
    return ((difference.exp() - difference - 1) * mask).sum() / num_tokens
