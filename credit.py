"""From rewards to advantages: what the samples of a step have, as tensors, and what they get for it.

    prepare_credit(groups, options, decode)     # where in the tokens the function's paragraphs begin
    set_advantages(groups, options)             # Sample.advantage, or Sample.token_advantages

The formulas, one for each --advantage, are in algorithm.py; nothing here knows their names. groups: lists of
policy.Sample with their results; options: policy.PolicyOptions. Needs policy.py and algorithm.py.
Left out: credit for less than a paragraph. Shapes as in algorithm.py.
"""

import math

import torch

from algorithm import ADVANTAGES, Groups, count_tokens_before, paragraph_starts, spare_good_prefix
from policy import PolicyOptions, Sample


def prepare_credit(groups: list[list[Sample]], options: PolicyOptions, decode, is_first=False) -> None:
    """Finds the tokens of what the reward function says about paragraphs.

    A sample of which the function does not say what the advantage needs has no verdict; RuntimeError where
    that goes for all of the first ones.
    """
    needs = [*ADVANTAGES[options.advantage].needs, *options.terms]
    if options.credit == "prefix":
        needs.append("first_wrong")
    judged = [sample for group in groups for sample in group if sample.reward is not None]
    if is_first and judged:
        check_keys(needs, [sample.result["reward_extra_info"] for sample in judged], options)
    for sample in judged:
        info = sample.result["reward_extra_info"]
        if "first_wrong" in needs and (info.get("first_wrong") or 0) > 0:
            place = int(info["first_wrong"])
            sample.prefix = count_tokens_before(place, sample.text, sample.response_ids, decode)
        if "step_scores" in needs:  # and where those paragraphs begin and end that have a score
            count = min(len(step_scores_of(sample)) + 1, len(paragraph_starts(sample.text)))
            for place in range(count):
                start = count_tokens_before(place, sample.text, sample.response_ids, decode)
                sample.paragraph_starts.append(start)
    for sample, advantages in zip(sum(groups, []), advantages_of(groups, options)):
        if sample.reward is not None and advantages.isnan().any():
            sample.result = sample.result | {"reward_score": None, "status": "no_verdict"}


def check_keys(needs: list[str], infos: list[dict], options: PolicyOptions) -> None:
    """RuntimeError where no sample has a key that the advantage needs, as a number (or a list of them)."""
    given = {key for info in infos for key, value in info.items() if not isinstance(value, (str, dict))}
    absent = set(needs) - given
    if absent:
        raise RuntimeError(
            f"advantage {options.advantage}, credit {options.credit}: need {min(absent)}, the function gives "
            f"{', '.join(infos[0])}; compute_score_fapo has first_wrong (judge_wrong: of wrong answers, too)")


WHY_USELESS = ("all_right", "all_wrong", "equal_scores", "no_verdict")


def why_useless(group: list[Sample], options: PolicyOptions) -> str | None:
    """Why a group teaches nothing, or None if it does: the reasons for which --dynamic-sampling drops groups.

    It teaches where an advantage is not 0, the length penalty left aside: as in DAPO different lengths alone
    make no group worth learning from.
    """
    judged = [sample for sample in group if sample.reward is not None]
    if len(judged) < 2:
        return "no_verdict"
    advantages = torch.stack(list(advantages_of([group], options, with_penalty=False)))
    if advantages.nan_to_num().abs().max() > 1e-6:
        return None
    infos = [sample.result["reward_extra_info"] for sample in judged]
    right = {info["acc"] == 1 for info in infos if info.get("acc") is not None}  # where the function says so
    if right == {True}:
        return "all_right"
    if right == {False}:
        return "all_wrong"
    return "equal_scores"


def set_advantages(groups: list[list[Sample]], options: PolicyOptions) -> None:
    """Each sample's advantage within its group, or one for each token; None without a verdict."""
    for sample, advantages in zip(sum(groups, []), advantages_of(groups, options)):
        if sample.reward is None:
            continue
        if advantages.dim() == 0:
            sample.advantage = advantages.item()
        else:
            sample.token_advantages = advantages[: len(sample.response_ids)].tolist()
            sample.advantage = sample.token_advantages[-1]


def advantages_of(groups: list[list[Sample]], options: PolicyOptions, with_penalty=True) -> torch.Tensor:
    """B, or B x T where the tokens of a sample have different ones. with_penalty: that for length."""
    tensors = as_tensors(groups, options, with_penalty)
    advantages = ADVANTAGES[options.advantage].compute(tensors, options)
    if options.credit == "prefix":
        advantages = spare_good_prefix(advantages, tensors)
    return advantages.flatten(0, 1)


def as_tensors(groups: list[list[Sample]], options: PolicyOptions, with_penalty=True) -> Groups:
    """What advantages are made of, as tensors. What a sample without a verdict has is NaN."""

    samples = sum(groups, [])

    def tensor_P_G(values: list) -> torch.Tensor:
        return torch.tensor(values).view(len(groups), -1)

    def numbers_P_G(key: str) -> torch.Tensor:
        values = []
        for sample in samples:
            value = sample.result["reward_extra_info"].get(key)
            if sample.reward is None or not isinstance(value, (int, float)):
                value = math.nan
            values.append(float(value))
        return tensor_P_G(values)

    names = {"score", "acc", *ADVANTAGES[options.advantage].needs, *options.terms}
    numbers = {name: numbers_P_G(name) for name in names}
    rewards_P_G = numbers["score"]
    penalties_P_G = 0 * rewards_P_G
    if with_penalty:
        rewards = [sample.reward for sample in samples]
        rewards_P_G = tensor_P_G([math.nan if reward is None else reward for reward in rewards])
        penalties_P_G = penalties_P_G + numbers_P_G("overlong_penalty").nan_to_num()
    tensors = Groups(
        rewards_P_G=rewards_P_G,
        penalties_P_G=penalties_P_G,
        numbers=numbers,
        lengths_P_G=tensor_P_G([len(sample.response_ids) for sample in samples]),
        prompt_lengths_P_G=tensor_P_G([len(sample.prompt_ids) for sample in samples]),
        prefixes_P_G=tensor_P_G([sample.prefix for sample in samples]),
    )
    if "step_scores" in names:
        tensors.steps_P_G_S, tensors.paragraphs_P_G_T = step_tensors(groups, len(tensors.tokens_T))
    return tensors


def step_tensors(groups: list[list[Sample]], num_tokens: int) -> tuple[torch.Tensor, torch.Tensor]:
    """One score a paragraph, P x G x S, NaN where there is none; the paragraph of each token, P x G x T."""
    samples = sum(groups, [])
    most = max(len(sample.paragraph_starts) for sample in samples)
    steps_B_S = torch.full((len(samples), most + 1), math.nan)
    paragraphs_B_T = torch.zeros(len(samples), num_tokens, dtype=torch.long)
    for number, sample in enumerate(samples):
        if sample.reward is None:
            continue
        starts = sample.paragraph_starts
        scores = step_scores_of(sample)[: len(starts)]
        steps_B_S[number, : len(scores)] = torch.tensor(scores)
        paragraphs_B_T[number] = torch.searchsorted(
            torch.tensor(starts[1:]), torch.arange(num_tokens), right=True
        )
    shape = len(groups), len(groups[0])
    return steps_B_S.unflatten(0, shape), paragraphs_B_T.unflatten(0, shape)


def step_scores_of(sample: Sample) -> list[float]:
    """The function's `step_scores`, one number a paragraph; empty where it has none."""
    scores = sample.result["reward_extra_info"].get("step_scores")
    if isinstance(scores, list) and all(isinstance(score, (int, float)) for score in scores):
        return scores
    return []
