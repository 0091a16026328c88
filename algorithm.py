"""The mathematics of training: results -> advantages -> loss, as pure functions on tensors.

    groups_to_train = set_advantages(groups, options, decode)      # fills in Sample.advantage
    loss, sums = compute_policy_loss(logprobs, old_logprobs, advantages, mask, num_tokens)

To add an `--advantage` or a `--loss`, write one function, add one line to ADVANTAGES or LOSSES, and list its
name in settings.py. docs/algorithms.md compares them. FAPO's reward (equation 8 of the paper) is computed in
compute_score.py.

This file imports nothing from this repository.
Not covered: value functions (GAE), a KL term inside the reward, credit for units smaller than a paragraph.
Tensor names end in their shapes: P prompts, G samples per prompt, B = P * G sequences, T tokens in the
longest response, S paragraphs.
"""

import copy
import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property, partial
from itertools import accumulate, chain

import torch
from torch.nn.utils.rnn import pad_sequence

# In float32, exp() overflows above 88. The loss may still be finite, but its gradient would be NaN.
MAX_LOG_RATIO = 20.0


# ---- 1. rewards -> advantages, within the group of samples of one prompt


def compute_advantages(rewards_P_G: torch.Tensor, divide_by_std: bool = True) -> torch.Tensor:
    """Return (reward - mean) / (sample std + 1e-6) within each group (GRPO, arXiv:2402.03300).

    Args:
        rewards_P_G: The rewards, with one row per prompt. NaN marks a sample without a verdict: its
            advantage is 0, and the mean and std of its group exclude it.
        divide_by_std: Whether to divide by the std. Dr. GRPO (arXiv:2503.20783) does not.

    Returns:
        The advantages. They are 0 in a group with fewer than two verdicts or with only equal rewards.
    """
    known = ~rewards_P_G.isnan()
    count = known.sum(1, keepdim=True)
    mean = rewards_P_G.nan_to_num().sum(1, keepdim=True) / count.clamp(min=1)
    centred = torch.where(known, rewards_P_G - mean, 0.0)
    # If all rewards are equal, the std may be pure rounding error, and dividing by it would amplify it.
    lowest = torch.where(known, rewards_P_G, math.inf).amin(1, keepdim=True)
    highest = torch.where(known, rewards_P_G, -math.inf).amax(1, keepdim=True)
    has_spread = highest - lowest > 1e-9 * torch.maximum(highest.abs(), lowest.abs())
    if divide_by_std:
        # Without this scale, the squares of huge rewards would overflow.
        scale = centred.abs().amax(1, keepdim=True).clamp(min=1)
        variance = (centred / scale).square().sum(1, keepdim=True) / (count - 1).clamp(min=1)
        centred = centred / (scale * variance.sqrt() + 1e-6)
    return torch.where(has_spread, centred, 0.0)


def overlong_penalty(length: int, max_length: int, buffer: int, factor: float) -> float:
    """Return the length penalty of one response (DAPO, arXiv:2503.14476, equation 13).

    The penalty is 0 up to max_length - buffer tokens and falls linearly to -factor at max_length. The
    paper's third case cannot occur, because no response is longer than max_length.

    Raises:
        ValueError: The buffer is not between 1 and max_length.
    """
    if not 0 < buffer <= max_length:
        raise ValueError(f"--overlong-buffer {buffer}: must be between 1 and --max-response-length "
                         f"{max_length}; pass 0 to turn off the length penalty")  # fmt: skip
    exceed = length - (max_length - buffer)
    return min(-exceed / buffer * factor, 0.0)


def length_penalty_of(config) -> Callable[[int], float] | None:
    """Return overlong_penalty with the trainer's settings filled in, or None if the penalty is off."""
    if not config.overlong_buffer:
        return None
    penalty = partial(
        overlong_penalty,
        max_length=config.max_response_length,
        buffer=config.overlong_buffer,
        factor=config.overlong_factor,
    )
    penalty(0)  # Raises ValueError early if the buffer is out of range.
    return penalty


# ---- 2. the inputs of an advantage function


class Groups:
    """The results of P groups of G samples as float64 tensors.

    NaN marks a sample without a verdict, or a result that lacks the number.

    Advantage functions read these attributes:
        rewards_P_G: The score of the reward function plus the length penalty.
        number(key): The value of this key in each result, P x G.
        penalties_P_G: The length penalty, at most 0.
        lengths_P_G, prompt_lengths_P_G: The lengths of responses and prompts in tokens.
        tokens_T: The token indices 0, 1, ... of the longest response.
        prefixes_P_G: The number of tokens before the first wrong paragraph.
        steps: The score of each paragraph, and the paragraph to which each token belongs.

    Args:
        groups: Lists of policy.Sample objects that have a `result`.
        decode: A function from token ids to text.
        require_keys: Raise RuntimeError if an advantage needs a key that no result has. In that case, the
            run most likely uses the wrong reward function.
    """

    def __init__(self, groups: list[list], decode, require_keys: bool = False):
        self.shape = len(groups), -1
        self.samples = list(chain(*groups))
        self.decode = decode
        self.require_keys = require_keys
        self.infos = []  # What the reward function returned for each sample; empty without a verdict.
        rewards = []
        for sample in self.samples:
            reward = sample.result["reward_score"]
            info = sample.result["reward_extra_info"]
            if reward is None:
                info = {}
            rewards.append(number_or_nan(reward))
            self.infos.append(info)
        penalties = [number_or_nan(info.get("overlong_penalty", 0.0)) for info in self.infos]
        self.rewards_P_G = self.tensor(rewards)
        self.penalties_P_G = self.tensor(penalties) + 0 * self.rewards_P_G  # NaN without a verdict
        self.lengths_P_G = self.tensor([len(sample.response_ids) for sample in self.samples])
        self.prompt_lengths_P_G = self.tensor([len(sample.prompt_ids) for sample in self.samples])
        self.tokens_T = torch.arange(max(1, int(self.lengths_P_G.max())))

    def tensor(self, values: list) -> torch.Tensor:
        """Arrange one number per sample in a tensor, P x G."""
        return torch.tensor(values, dtype=torch.float64).unflatten(0, self.shape)

    def number(self, key: str) -> torch.Tensor:
        """Return the value of this key in each result, P x G."""
        self.check_key(key)
        return self.tensor([number_or_nan(info.get(key)) for info in self.infos])

    def check_key(self, key: str) -> None:
        """Raise RuntimeError if require_keys is set and no result has a usable value for this key."""
        infos = [info for info in self.infos if info]
        found = [info for info in infos if not isinstance(info.get(key, ""), (str, dict))]
        if self.require_keys and infos and not found:
            returned = ", ".join(infos[0])
            raise RuntimeError(f"--reward-fn: no result has the key {key}, which --advantage or --credit "
                               f"needs (the keys are {returned}); see docs/algorithms.md")  # fmt: skip

    @cached_property
    def prefixes_P_G(self) -> torch.Tensor:
        """The number of tokens before the first wrong paragraph (or turn), or 0 if no error is known.

        NaN means that `first_wrong` is not a number. The sample then has no verdict.
        """
        self.check_key("first_wrong")
        prefixes = []
        for sample, info in zip(self.samples, self.infos):
            first_wrong = number_or_nan(info.get("first_wrong") or 0)
            prefix = first_wrong  # NaN stays NaN
            if first_wrong <= 0:
                prefix = 0
            elif first_wrong > 0 and sample.has_turns:
                starts = starts_of(sample, int(first_wrong) + 1, self.decode)
                starts = [*starts, len(sample.response_ids) - 1]  # A missing turn counts as starting here.
                prefix = starts[min(int(first_wrong), len(starts) - 1)]
            elif first_wrong > 0:
                prefix = count_tokens_before(int(first_wrong), sample.text, sample.response_ids, self.decode)
            prefixes.append(prefix)
        return self.tensor(prefixes)

    @cached_property
    def steps(self) -> tuple[torch.Tensor, torch.Tensor]:
        """The score of each paragraph (or turn), P x G x S, and the paragraph of each token, P x G x T.

        The scores come from `step_scores` in the results. A paragraph without a score has NaN.
        """
        self.check_key("step_scores")
        steps = []
        paragraphs = []
        for sample, info in zip(self.samples, self.infos):
            scores = info.get("step_scores")
            if not isinstance(scores, list):
                scores = []
            # One more start than scores is needed, because the last score applies up to the next paragraph.
            starts = starts_of(sample, len(scores) + 1, self.decode)
            numbers = [*map(number_or_nan, scores[: len(starts)]), math.nan]
            steps.append(torch.tensor(numbers, dtype=torch.float64))
            paragraphs.append(torch.searchsorted(torch.tensor(starts[1:]), self.tokens_T, right=True))
        steps_B_S = pad_sequence(steps, batch_first=True, padding_value=math.nan)
        return steps_B_S.unflatten(0, self.shape), torch.stack(paragraphs).unflatten(0, self.shape)

    def without_length_penalty(self) -> "Groups":
        """Return a copy whose rewards are the scores alone."""
        other = copy.copy(self)
        other.require_keys = False  # The original has already checked the keys.
        other.infos = [info | {"overlong_penalty": 0.0} for info in self.infos]
        other.rewards_P_G = other.number("score")
        other.penalties_P_G = 0 * other.rewards_P_G
        return other


def number_or_nan(value) -> float:
    """Return the value as a float, or NaN if it is not a number or its size exceeds 1e300."""
    if isinstance(value, (int, float)) and abs(value) <= 1e300:
        return float(value)
    return math.nan


# ---- 3. one function per advantage
#
# Each function takes Groups and settings.PolicyOptions. It returns one advantage per sample (P x G) or per
# token (P x G x T). NaN marks a sample without a verdict.


def grpo(groups, options):
    """Return the reward, normalised within its group (GRPO, and also FAPO)."""
    return compute_advantages(groups.rewards_P_G)


def dr_grpo(groups, options):
    """Return GRPO's advantage without dividing by the std. policy.py divides the loss by a constant."""
    return compute_advantages(groups.rewards_P_G, divide_by_std=False)


def papo(groups, options):
    """Return A_outcome + A_process, each normalised separately (PAPO, arXiv:2603.26535).

    The outcome is 1 if the answer is correct and -1 otherwise, plus the length penalty. A_outcome is
    normalised over the whole group. The process reward is 1 if the reasoning is sound and 0 if it is flawed.
    A_process is normalised among the correct answers and is 0 for wrong answers. So a wrong answer never
    gains from good steps, but a group whose answers are all correct can still learn from its steps. A sample
    has no verdict if it lacks `acc`, or if its answer is correct but its reasoning was not judged.
    """
    acc_P_G = groups.number("acc")
    correct_P_G = acc_P_G == 1
    sound_P_G = 1 - groups.number("flawed_positive")
    unjudged_P_G = acc_P_G.isnan() | (correct_P_G & sound_P_G.isnan())
    outcome_P_G = torch.where(correct_P_G, 1.0, -1.0) + groups.penalties_P_G
    outcome_P_G = outcome_P_G.masked_fill(unjudged_P_G, math.nan)
    process_P_G = sound_P_G.masked_fill(~correct_P_G, math.nan)
    advantages_P_G = compute_advantages(outcome_P_G) + compute_advantages(process_P_G)
    return advantages_P_G.masked_fill(unjudged_P_G, math.nan)


def vppo(groups, options):
    """Return one advantage for the rewarded prefix and one for the rest (VPPO, arXiv:2601.18984, eq. 6, 7).

    A token of a correct solution has the value 1. A token of a wrong solution has the value `prefix_reward`
    (alpha) in the rewarded part of the prefix before the first error, and 0 elsewhere. The advantage of a
    token is its value minus a baseline. For the baseline, values are averaged over the tokens of each
    solution, and these means are averaged over the group. Advantages are not divided by a std. Unlike in the
    paper, the outcome includes the length penalty. A group with fewer than two verdicts gets 0.
    """
    correct_P_G = groups.number("score") > 0  # With FAPO's score and lambda = 1: correct and sound.
    outcome_P_G = correct_P_G + groups.penalties_P_G
    unrewarded_P_G = (options.prefix_cut * groups.prompt_lengths_P_G).round()
    rewarded_P_G = (groups.prefixes_P_G - unrewarded_P_G).clamp(min=0)
    share_P_G = rewarded_P_G / groups.lengths_P_G
    alpha_P_G = torch.where(correct_P_G, 0.0, options.prefix_reward)
    values_P_G = (outcome_P_G + alpha_P_G * share_P_G).nan_to_num()
    known_P_G = ~outcome_P_G.isnan()
    count = known_P_G.sum(1, keepdim=True)
    centred_P_G = outcome_P_G - values_P_G.sum(1, keepdim=True) / count.clamp(min=1)
    is_rewarded_P_G_T = groups.tokens_T < rewarded_P_G[..., None]
    advantages_P_G_T = centred_P_G[..., None] + alpha_P_G[..., None] * is_rewarded_P_G_T
    advantages_P_G_T = torch.where((known_P_G & (count >= 2))[..., None], advantages_P_G_T, 0.0)
    return advantages_P_G_T.masked_fill(groups.prefixes_P_G.isnan()[..., None], math.nan)


def terms(groups, options):
    """Return the weighted sum of reward components, normalised over the step (GDPO, arXiv:2601.05242).

    Each component is first normalised within its group. If a component is NaN, the sample is excluded from
    that component only. A sample without any component has no verdict. The step's mean is not subtracted,
    because the sums already have mean 0 in every group.
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
    # If components cancel out, rounding and the 1e-6 in the divisors leave a small remainder.
    total_P_G = torch.where(total_P_G.abs() > 1e-4 * size_P_G, total_P_G, 0.0)
    std = (total_P_G.square().sum() / (known_P_G.sum() - 1).clamp(min=1)).sqrt()
    return (total_P_G / (std + 1e-6)).masked_fill(~known_P_G, math.nan)


def parse_terms(reward_terms: tuple[str, ...]) -> dict[str, float]:
    """Parse --reward-terms into names and weights. Raises ValueError if a term is not NAME=WEIGHT."""
    weights = {}
    for term in reward_terms:
        name, _, weight = term.partition("=")
        try:
            weights[name] = float(weight)
        except ValueError:
            weights[name] = math.nan
        if not math.isfinite(weights[name]):
            raise ValueError(f"--reward-terms {term}: needs a finite weight; pass NAME=WEIGHT, as in acc=1")
    return weights


def steps(groups, options):
    """Return outcome advantages plus step scores (process supervision, arXiv:2402.03300, section 4.1.3).

    The step scores are normalised over all paragraphs of a group. A token gets the advantage of its response
    plus the scores of its own paragraph and of all later paragraphs. A sample without any score has no
    verdict.
    """
    steps_P_G_S, paragraphs_P_G_T = groups.steps
    unscored_P_G = steps_P_G_S.isnan().all(2)
    outcome_P_G = compute_advantages(groups.rewards_P_G.masked_fill(unscored_P_G, math.nan))
    scores_P_GS = compute_advantages(steps_P_G_S.flatten(1))
    scores_P_G_S = scores_P_GS.view(steps_P_G_S.shape)
    sums_P_G_S = scores_P_G_S.flip(2).cumsum(2).flip(2)
    advantages_P_G_T = outcome_P_G[..., None] + sums_P_G_S.gather(2, paragraphs_P_G_T)
    return advantages_P_G_T.masked_fill(unscored_P_G[..., None], math.nan)


ADVANTAGES = {  # settings.py repeats these names as choices of --advantage.
    "grpo": grpo,
    "dr_grpo": dr_grpo,
    "papo": papo,
    "vppo": vppo,
    "terms": terms,
    "steps": steps,
}


def spare_good_prefix(advantages, groups):
    """Set negative advantages before the first wrong paragraph to 0 (--credit prefix; VPPO, equation 8).

    The advantages are P x G or P x G x T. The result is P x G x T.
    """
    if advantages.dim() == 2:
        advantages = advantages[..., None]
    advantages = advantages.masked_fill(groups.prefixes_P_G.isnan()[..., None], math.nan)
    is_good_P_G_T = groups.tokens_T < groups.prefixes_P_G[..., None]
    return torch.where(is_good_P_G_T, advantages.clamp(min=0), advantages)


def apply_formula(groups: Groups, options) -> torch.Tensor:
    """Compute the advantages for --advantage and --credit, P x G or P x G x T."""
    advantages = ADVANTAGES[options.advantage](groups, options)
    if options.credit == "prefix":
        advantages = spare_good_prefix(advantages, groups)
    return advantages


# ---- 4. advantages -> samples


def set_advantages(
    groups: list[list], options, decode, drop_zero_advantages=False, require_keys=False
) -> list[list]:
    """Set the advantage of each sample, or of each of its tokens, and return the groups to train on.

    A sample without a verdict keeps the advantage None. If a value that the advantage needs is not a number,
    the sample loses its verdict, and the other samples of its group are normalised without it.

    Args:
        groups: Lists of policy.Sample objects that have a `result`.
        options: settings.PolicyOptions.
        decode: A function from token ids to text.
        drop_zero_advantages: Drop groups without a learning signal, and leave their advantages unset.
        require_keys: Check that each key the advantage needs occurs in at least one result.

    Raises:
        RuntimeError: require_keys is set, and one of these keys occurs in no result.
    """
    results = Groups(groups, decode, require_keys)
    advantages = apply_formula(results, options)
    # The loss is computed in float32, where a large number may become infinite.
    has_number_B = advantages.float().isfinite().reshape(len(results.samples), -1).all(1)
    has_number_B &= ~results.rewards_P_G.isnan().flatten()
    has_lost_verdict = False
    for sample, has_number in zip(results.samples, has_number_B.tolist()):
        if sample.result["reward_score"] is not None and not has_number:
            sample.result = sample.result | {"reward_score": None, "status": "no_verdict"}
            has_lost_verdict = True
    if has_lost_verdict:
        return set_advantages(groups, options, decode, drop_zero_advantages)

    has_signal_P = [True] * len(groups)
    if drop_zero_advantages:
        has_signal_P = has_learning_signal(results, options)
    groups_to_train = []
    for group, advantages_G, has_signal in zip(groups, advantages, has_signal_P):
        if has_signal:
            groups_to_train.append(group)
        for sample, advantage in zip(group, advantages_G):
            if sample.result["reward_score"] is None or not has_signal:
                continue
            if advantage.dim() == 0:
                sample.advantage = advantage.item()
            else:
                sample.token_advantages = advantage[: len(sample.response_ids)].tolist()
                sample.advantage = sample.token_advantages[-1]
    return groups_to_train


def has_learning_signal(groups: Groups, options) -> torch.Tensor:
    """Return, for each group, whether any advantage differs from 0 (DAPO's dynamic sampling).

    As in DAPO, the length penalty does not count: different lengths alone are not a learning signal.
    """
    advantages = apply_formula(groups.without_length_penalty(), options).nan_to_num()
    return advantages.abs().flatten(1).amax(1) > 1e-6


# ---- 5. advantages -> loss
#
# Each loss function takes B x T tensors and its Clip, and returns the loss of each token and whether the
# token was clipped, both B x T.


@dataclass(frozen=True)
class Clip:
    """The range 1 - low .. 1 + high to which the ratio of probabilities is clipped."""

    low: float
    high: float
    dual: float = 10.0  # The dual clip bounds the ratio of tokens with a negative advantage.


def clip_loss(logprobs, log_ratio, advantages, mask, clip):
    """Compute PPO's clipped loss with DAPO's clip-higher and dual clip (arXiv:1912.09729)."""
    ratio = log_ratio.exp()
    unclipped = -advantages * ratio
    clipped = -advantages * ratio.clamp(1 - clip.low, 1 + clip.high)
    loss_B_T = torch.maximum(unclipped, clipped)
    bound = -advantages * clip.dual
    loss_B_T = torch.where(advantages < 0, torch.minimum(loss_B_T, bound), loss_B_T)
    return loss_B_T, loss_B_T != unclipped


def gspo_loss(logprobs, log_ratio, advantages, mask, clip):
    """Compute the loss of GSPO-token (arXiv:2507.18071), which has no dual clip."""
    sequence_log_ratio = log_ratio.sum(1, keepdim=True) / lengths_of(mask)
    # The value is the sequence's ratio, but each token keeps the gradient of its own log-probability.
    ratio = (sequence_log_ratio.detach() + log_ratio - log_ratio.detach()).exp()
    unclipped = -advantages * ratio
    clipped = -advantages * ratio.clamp(1 - clip.low, 1 + clip.high)
    loss_B_T = torch.maximum(unclipped, clipped)
    return loss_B_T, loss_B_T != unclipped


def cispo_loss(logprobs, log_ratio, advantages, mask, clip):
    """Compute CISPO's loss (arXiv:2506.13585): log-probabilities weighted by the detached clipped ratio.

    Unlike a clipped loss, this loss gives every token a gradient. There is no dual clip.
    """
    ratio = log_ratio.exp().detach()
    weight = ratio.clamp(1 - clip.low, 1 + clip.high)
    return -advantages * weight * logprobs, weight != ratio


@dataclass(frozen=True)
class Loss:
    """A loss function and its default clip range, taken from the paper."""

    compute: Callable
    clip: Clip
    # Average over each sequence's tokens and then over sequences, instead of over all tokens.
    over_sequences: bool = False

    def clip_with(self, low: float | None, high: float | None, dual: float) -> Clip:
        return Clip(self.clip.low if low is None else low, self.clip.high if high is None else high, dual)


LOSSES = {  # settings.py repeats these names as choices of --loss.
    "clip": Loss(clip_loss, Clip(0.2, 0.28)),  # DAPO
    "gspo": Loss(gspo_loss, Clip(3e-4, 4e-4), over_sequences=True),
    "cispo": Loss(cispo_loss, Clip(1.0, 4.0)),  # ScaleRL (arXiv:2510.13786) clips the ratio to 0 .. 5.
}


def compute_policy_loss(
    logprobs: torch.Tensor,
    old_logprobs: torch.Tensor,
    advantages: torch.Tensor,
    mask: torch.Tensor,
    num_tokens: int,
    *,
    num_sequences: int | None = None,
    loss: str = "clip",
    clip_low: float | None = None,
    clip_high: float | None = None,
    clip_c: float = 10.0,
    rollout_logprobs: torch.Tensor | None = None,
    tis_cap: float | None = None,
) -> tuple[torch.Tensor, dict[str, float]]:
    """Return the policy loss of a micro-batch, and sums for the metrics.

    The loss is a mean over the tokens of the whole mini-batch (gspo: over its sequences). So the losses of
    micro-batches and ranks add up to the same number, however the samples are split.

    Args:
        logprobs: Log-probabilities of the sampled tokens under the current policy, B x T.
        old_logprobs: Log-probabilities of the sampled tokens before the first update of this step, B x T.
        advantages: One number per sequence (B) or per token (B x T).
        mask: True on the tokens that the policy wrote, B x T.
        num_tokens: Number of tokens that the policy wrote in the whole mini-batch.
        num_sequences: Number of sequences in the whole mini-batch, by default B. Only gspo uses it.
        loss: A name in LOSSES.
        clip_low, clip_high: The ratio is clipped to 1 - clip_low .. 1 + clip_high. Defaults: see LOSSES.
        clip_c: Dual-clip bound, used only by the "clip" loss.
        rollout_logprobs: The log-probabilities that the sampler reported, B x T; needed for tis_cap.
        tis_cap: Truncated importance sampling: each token is weighted by min(exp(old - rollout), tis_cap).

    Returns:
        The loss, and sums to add up over micro-batches, such as the number of clipped tokens.
    """
    chosen = LOSSES[loss]
    clip = chosen.clip_with(clip_low, clip_high, clip_c)
    if advantages.dim() == 1:
        advantages = advantages[:, None]
    mask = mask.to(logprobs.dtype)
    logprobs = torch.where(mask > 0, logprobs, 0.0)  # The padding may contain anything, even NaN.
    log_ratio = torch.where(mask > 0, logprobs - old_logprobs, 0.0).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)
    loss_B_T, is_clipped = chosen.compute(logprobs, log_ratio, advantages, mask, clip)
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
    """Return the number of tokens of each sequence, at least 1, as B x 1."""
    return mask.sum(1, keepdim=True).clamp(min=1)


def compute_kl_loss(logprobs, reference_logprobs, mask, num_tokens):
    """Estimate the KL divergence from the reference: the token mean of exp(d) - d - 1 (GRPO, eq. 4).

    d is the reference's log-probability minus the policy's. Shapes and `num_tokens` are as in
    compute_policy_loss.
    """
    mask = mask > 0
    difference = torch.where(mask, reference_logprobs - logprobs, 0.0).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)
    return ((difference.exp() - difference - 1) * mask).sum() / num_tokens


# ---- 6. locating paragraphs in the tokens of a response


def starts_of(sample, count: int, decode) -> list[int]:
    """Return the token indices at which the first `count` paragraphs (or turns) of a sample begin."""
    if sample.has_turns:
        lengths = [turn["tokens"] for turn in sample.turns]
        return list(accumulate(lengths[:-1], initial=0))[:count]
    places = paragraph_starts(sample.text)[:count]
    return tokens_before(places, sample.text, sample.response_ids, decode)


def paragraph_starts(text: str) -> list[int]:
    """Return where each paragraph begins. compute_score.split_paragraphs finds the same paragraphs."""
    starts = []
    end = 0
    for part in text.split("\n\n"):
        if part.strip():
            starts.append(end + len(part) - len(part.lstrip()))
        end += len(part) + 2
    return starts


def count_tokens_before(paragraph: int, text: str, ids: list[int], decode) -> int:
    """Return how many tokens of a response precede a paragraph, given by its 0-based index.

    A missing paragraph is taken to start at the last token. The other arguments are as in tokens_before.
    """
    starts = paragraph_starts(text)
    if paragraph >= len(starts):
        return len(ids) - 1
    return tokens_before([starts[paragraph]], text, ids, decode)[0]


def tokens_before(places: list[int], text: str, ids: list[int], decode) -> list[int]:
    """Return how many tokens of a response precede each place in its text.

    A token that spans a place belongs to the text after it. The text is not re-encoded, because that could
    yield different tokens. Instead, a binary search finds the first token at which the decoded text extends
    beyond the place. Each search starts near the previous place, so that it decodes few tokens.

    Args:
        places: Character indices, in ascending order.
        text: The text of all `ids`.
        ids: The tokens of the response.
        decode: A function from token ids to text.
    """
    counts = []
    low, last = 0, len(ids) - 1
    first, offset = 0, 0  # Decoding starts with token `first`, whose text starts at `offset`.
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
    """Return a token shortly before `end` at which decoding can start, and the offset of this token's text.

    Decoders drop a leading space, and one character may consist of several tokens. A start is therefore valid
    only if decoding from there gives the same text as decoding from `first`. Otherwise, `first` is returned.
    """
    decoded = decode(ids[first:end])
    for context in (8, 32):
        near = decode(ids[end - context : end])
        fits = near.strip() and near[0] != "\ufffd" and decoded.endswith(near)
        if end - context > first and fits and text.startswith(decoded, offset):
            return end - context, offset + len(decoded) - len(near)
    return first, offset
