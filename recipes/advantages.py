"""Worked examples of advantages: copy one, change it, and pass it as --advantage FILE:NAME.

    python grpo_trainer.py ... --advantage recipes/advantages.py:vppo --advantage-kwargs '{"prefix_cut": 0}'

    papo                answer and reasoning, normalised separately (PAPO)
    vppo                a value for the good prefix and one for the rest (VPPO)
    terms               several reward components, each normalised within its group (GDPO)
    steps               a score for each step (GRPO's process supervision); rewards padding
    progress            differences between the scores of successive steps, which add up to the last score
    floored             GRPO, but small differences in the reward keep a small weight
    spare_good_prefix   any of these, or grpo or dr_grpo, without blame for the tokens before the first error

Each function takes an algorithm.Groups and its own settings, and returns one advantage per sample (P x G) or
per token (P x G x T). A sample with NaN has no verdict. docs/algorithms.md compares the results.
Needs algorithm.py. Not covered: credit for units smaller than a paragraph or turn.
Tensor names end in their shapes: P prompts, G samples per prompt, T tokens in the longest response, S
paragraphs (or turns).
"""

import math
from itertools import pairwise

import torch
from torch.nn.utils.rnn import pad_sequence

import algorithm
from algorithm import compute_advantages, number_or_nan, starts_of


def papo(groups):
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


def vppo(groups, prefix_reward: float = 0.5, prefix_cut: float = 1.0):
    """Return one advantage for the rewarded prefix and one for the rest (VPPO, arXiv:2601.18984, eq. 6, 7).

    A token of a correct solution has the value 1. A token of a wrong solution has the value `prefix_reward`
    (alpha) in the rewarded part of the prefix before the first error, and 0 elsewhere. The advantage of a
    token is its value minus a baseline. For the baseline, values are averaged over the tokens of each
    solution, and these means are averaged over the group. Advantages are not divided by a std. Unlike in the
    paper, the outcome includes the length penalty. A group with fewer than two verdicts gets 0.

    Args:
        prefix_reward: VPPO's alpha.
        prefix_cut: Number of tokens at the end of a good prefix that earn nothing, as a multiple of the
            prompt's length.
    """
    correct_P_G = groups.number("score") > 0  # With FAPO's score and lambda = 1: correct and sound.
    outcome_P_G = correct_P_G + groups.penalties_P_G
    prefixes_P_G = good_prefixes(groups)
    unrewarded_P_G = (prefix_cut * groups.prompt_lengths_P_G).round()
    rewarded_P_G = (prefixes_P_G - unrewarded_P_G).clamp(min=0)
    share_P_G = rewarded_P_G / groups.lengths_P_G
    alpha_P_G = torch.where(correct_P_G, 0.0, prefix_reward)
    values_P_G = (outcome_P_G + alpha_P_G * share_P_G).nan_to_num()
    known_P_G = ~outcome_P_G.isnan()
    count = known_P_G.sum(1, keepdim=True)
    centred_P_G = outcome_P_G - values_P_G.sum(1, keepdim=True) / count.clamp(min=1)
    is_rewarded_P_G_T = groups.tokens_T < rewarded_P_G[..., None]
    advantages_P_G_T = centred_P_G[..., None] + alpha_P_G[..., None] * is_rewarded_P_G_T
    advantages_P_G_T = torch.where((known_P_G & (count >= 2))[..., None], advantages_P_G_T, 0.0)
    return advantages_P_G_T.masked_fill(prefixes_P_G.isnan()[..., None], math.nan)


def terms(groups, weights: dict[str, float]):
    """Return the weighted sum of reward components, normalised over the step (GDPO, arXiv:2601.05242).

    Each component is first normalised within its group. If a component is NaN, the sample is excluded from
    that component only. A sample without any component has no verdict. The step's mean is not subtracted,
    because the sums already have mean 0 in every group.

    Args:
        weights: {key in the results of the reward function: weight}, such as {"acc": 1}.
    """
    check_weights(weights, groups)
    total_P_G = 0.0
    size_P_G = 0.0
    known_P_G = False
    for name, weight in weights.items():
        term_P_G = groups.number(name)
        weighted_P_G = weight * compute_advantages(term_P_G)
        total_P_G = total_P_G + weighted_P_G
        size_P_G = size_P_G + weighted_P_G.abs()
        known_P_G = known_P_G | ~term_P_G.isnan()
    # If components cancel out, rounding and the 1e-6 in the divisors leave a small remainder.
    total_P_G = torch.where(total_P_G.abs() > 1e-4 * size_P_G, total_P_G, 0.0)
    std = (total_P_G.square().sum() / (known_P_G.sum() - 1).clamp(min=1)).sqrt()
    return (total_P_G / (std + 1e-6)).masked_fill(~known_P_G, math.nan)


def check_weights(weights, groups) -> None:
    """Raise ValueError for weights that are not numbers, or that would drop the length penalty."""
    if not isinstance(weights, dict) or not weights:
        raise ValueError('weights must be an object such as {"acc": 1, "flawed_positive": -0.5}')
    for name, weight in weights.items():
        if math.isnan(number_or_nan(weight)):
            raise ValueError(f"the weight of {name} is {weight!r}, but it must be a finite number")
    has_penalty = bool((groups.penalties_P_G.nan_to_num() != 0).any())
    if has_penalty and "overlong_penalty" not in weights:
        raise ValueError(
            "the length penalty is missing from weights; add overlong_penalty with the weight "
            "1, or pass --overlong-buffer 0"
        )


def steps(groups):
    """Return outcome advantages plus step scores (process supervision, arXiv:2402.03300, section 4.1.3).

    The step scores are normalised over all paragraphs of a group. A token gets the advantage of its response
    plus the scores of its own paragraph and of all later paragraphs. A sample without any score has no
    verdict. A policy learns to add sound but useless steps, because each of them adds a score
    (recipes/padding.py; arXiv:2504.15275); `progress` does not reward them.
    """
    steps_P_G_S, paragraphs_P_G_T = step_scores(groups)
    scores_P_GS = compute_advantages(steps_P_G_S.flatten(1))
    scores_P_G_S = scores_P_GS.view(steps_P_G_S.shape)
    sums_P_G_S = scores_P_G_S.flip(2).cumsum(2).flip(2)
    return plus_outcome(groups, steps_P_G_S, sums_P_G_S.gather(2, paragraphs_P_G_T))


def progress(groups):
    """Return outcome advantages plus the progress that a token's own and all later steps make.

    A step score is the value of the solution after this step, and a step's progress is its score minus the
    previous one (potential-based shaping, Ng et al. 1999). The sum of a token's own and all later steps is
    thus the last score minus the score before the token's step, and a step that changes nothing earns
    nothing. The score before the first step is the mean last score of the group. A paragraph without a score
    changes nothing. A sample without any score has no verdict.
    """
    steps_P_G_S, paragraphs_P_G_T = step_scores(groups)
    after_P_G_S = steps_P_G_S.clone()
    for before_P_G, after_P_G in pairwise(after_P_G_S.unbind(2)):  # These are views.
        after_P_G[:] = torch.where(after_P_G.isnan(), before_P_G, after_P_G)
    last_P_G_1 = after_P_G_S[..., -1:]
    start_P_G_1 = last_P_G_1.nanmean(1, keepdim=True).expand_as(last_P_G_1)
    before_P_G_S = torch.cat([start_P_G_1, after_P_G_S[..., :-1]], 2)
    before_P_G_S = torch.where(before_P_G_S.isnan(), start_P_G_1, before_P_G_S)
    gains_P_G_S = last_P_G_1 - before_P_G_S
    return plus_outcome(groups, steps_P_G_S, gains_P_G_S.gather(2, paragraphs_P_G_T))


def plus_outcome(groups, steps_P_G_S, advantages_P_G_T) -> torch.Tensor:
    """Add outcome advantages, without the samples that have no step score. They have no verdict."""
    unscored_P_G = steps_P_G_S.isnan().all(2)
    outcome_P_G = compute_advantages(groups.rewards_P_G.masked_fill(unscored_P_G, math.nan))
    advantages_P_G_T = outcome_P_G[..., None] + advantages_P_G_T
    return advantages_P_G_T.masked_fill(unscored_P_G[..., None], math.nan)


def floored(groups, floor: float = 0.5):
    """Return (reward - mean) / max(std, floor), so that small differences keep a small weight.

    GRPO divides by the std alone. In a group of equally good answers whose rewards differ only in a small
    term, such as a cost per call, GRPO gives this term the same weight as the correctness of the answer.

    Args:
        floor: With scores of -1 and 1, 0.5 changes only groups whose answers are all correct or all wrong,
            because a group of eight with one wrong answer has a std of 0.71.
    """
    normalised_P_G = compute_advantages(groups.rewards_P_G)
    floored_P_G = compute_advantages(groups.rewards_P_G, divide_by_std=False) / floor
    return torch.where(floored_P_G.abs() < normalised_P_G.abs(), floored_P_G, normalised_P_G)


def spare_good_prefix(groups, advantage: str = "grpo", **settings):
    """Set negative advantages before the first wrong paragraph to 0 (VPPO, equation 8).

    Args:
        advantage: The advantage to change: a name in algorithm.ADVANTAGES, or another function of this file.
            Only --advantage dr_grpo also divides the loss by a constant; "dr_grpo" does not.
        settings: The settings of that advantage.
    """
    of_this_file = {one.__name__: one for one in (papo, vppo, terms, steps, progress, floored)}
    functions = algorithm.ADVANTAGES | of_this_file
    if advantage not in functions:
        raise ValueError(f"advantage {advantage!r} is unknown; use one of {', '.join(functions)}")
    advantages = functions[advantage](groups, **settings)
    if advantages.dim() == 2:
        advantages = advantages[..., None]
    prefixes_P_G = good_prefixes(groups)
    advantages = advantages.masked_fill(prefixes_P_G.isnan()[..., None], math.nan)
    is_good_P_G_T = groups.tokens_T < prefixes_P_G[..., None]
    return torch.where(is_good_P_G_T, advantages.clamp(min=0), advantages)


def good_prefixes(groups) -> torch.Tensor:
    """Return the number of tokens before the first wrong paragraph (or turn), P x G.

    The number is 0 if no error is known. NaN means that `first_wrong` is not a number. The sample then has no
    verdict.
    """
    groups.check_key("first_wrong")
    prefixes = []
    for sample, info in zip(groups.samples, groups.infos):
        prefix = number_or_nan(info.get("first_wrong") or 0)
        if prefix > 0:
            first_wrong = int(prefix)
            starts = starts_of(sample, first_wrong + 1, groups.decode)
            starts = [*starts, len(sample.response_ids) - 1]  # A missing paragraph counts as starting here.
            prefix = starts[min(first_wrong, len(starts) - 1)]
        prefixes.append(prefix)
    return groups.tensor(prefixes).clamp(min=0)  # -1 becomes 0, and NaN stays NaN.


def step_scores(groups) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the score of each paragraph (or turn), P x G x S, and the paragraph of each token, P x G x T.

    The scores come from `step_scores` in the results. A paragraph without a score has NaN. Raises
    RuntimeError if a response of several turns does not have one score (or None) per turn.
    """
    groups.check_key("step_scores")
    scores_of_samples = []
    paragraphs = []
    for sample, info in zip(groups.samples, groups.infos):
        scores = info.get("step_scores")
        if not isinstance(scores, list):
            scores = []
        if scores and sample.has_turns and len(scores) != len(sample.turns):  # such as scores of paragraphs
            raise RuntimeError(
                f"--reward-fn: step_scores has length {len(scores)}, but the response has "
                f"{len(sample.turns)} turns; return one score, or None, per turn"
            )
        # One more start than scores is needed, because the last score applies up to the next paragraph.
        starts = starts_of(sample, len(scores) + 1, groups.decode)
        numbers = [*map(number_or_nan, scores[: len(starts)]), math.nan]
        scores_of_samples.append(torch.tensor(numbers, dtype=torch.float64))
        paragraphs.append(torch.searchsorted(torch.tensor(starts[1:]), groups.tokens_T, right=True))
    scores_B_S = pad_sequence(scores_of_samples, batch_first=True, padding_value=math.nan)
    return scores_B_S.unflatten(0, groups.shape), torch.stack(paragraphs).unflatten(0, groups.shape)
