"""From results to advantages: what the samples of a step have, as tensors, and what they get for it.

    kept = set_advantages(groups, options, decode)     # Sample.advantage, or Sample.token_advantages

The formulas, one for each --advantage, are in algorithm.py; nothing here knows their names. groups: lists of
policy.Sample with their results; options: policy.PolicyOptions. Needs policy.py and algorithm.py.
Left out: credit for less than a paragraph. Shapes as in algorithm.py.
"""

import copy
import math
from functools import cached_property
from itertools import accumulate, chain

import torch
from torch.nn.utils.rnn import pad_sequence

from algorithm import (
    ADVANTAGES,
    count_tokens_before,
    paragraph_starts,
    spare_good_prefix,
    tokens_before,
)
from policy import PolicyOptions, Sample


def set_advantages(
    groups: list[list[Sample]], options: PolicyOptions, decode, drop_useless=False, is_first=False
) -> list[list[Sample]]:
    """Each sample's advantage within its group, or one for each token. Returns the groups to learn from.

    A sample has None without a verdict. A sample loses its verdict, and leaves its group's means, if the
    reward function does not say of it what the advantage needs, or says something that is not a number.
    decode(ids): the text of tokens. drop_useless: groups that teach nothing get no advantages, either.
    is_first: RuntimeError where the function says what the advantage needs of no sample at all.
    """
    tensors = Groups(groups, decode, is_first)
    advantages = by_formula(tensors, options)
    known_B = advantages.float().isfinite().reshape(len(tensors.samples), -1).all(1)  # as policy.py has them
    known_B &= ~tensors.rewards_P_G.isnan().flatten()
    has_lost = False
    for sample, is_known in zip(tensors.samples, known_B.tolist()):
        if sample.result["reward_score"] is not None and not is_known:
            sample.result = sample.result | {"reward_score": None, "status": "no_verdict"}
            has_lost = True
    if has_lost:  # the others are compared without them
        return set_advantages(groups, options, decode, drop_useless)
    teaches_P = [True] * len(groups)
    if drop_useless:
        teaches_P = teaching(tensors, options)
    kept = []
    for group, advantages_G, teaches in zip(groups, advantages, teaches_P):
        if teaches:
            kept.append(group)
        for sample, advantage in zip(group, advantages_G):
            if sample.result["reward_score"] is None or not teaches:
                continue
            if advantage.dim() == 0:
                sample.advantage = advantage.item()
            else:
                sample.token_advantages = advantage[: len(sample.response_ids)].tolist()
                sample.advantage = sample.token_advantages[-1]
    return kept


def teaching(tensors, options):
    """Of each group whether an advantage is not 0, the length penalty left aside.

    As in DAPO different lengths alone make no group worth learning from.
    """
    tensors = copy.copy(tensors)
    tensors.is_first = False  # what was needed was there
    tensors.infos = [info | {"overlong_penalty": 0.0} for info in tensors.infos]
    tensors.rewards_P_G = tensors.number("score")
    tensors.penalties_P_G = 0 * tensors.rewards_P_G
    advantages = by_formula(tensors, options).nan_to_num()
    return advantages.abs().flatten(1).amax(1) > 1e-6


def by_formula(tensors, options):
    """P x G, or P x G x T where the tokens of a sample have different ones. NaN: no verdict."""
    advantages = ADVANTAGES[options.advantage](tensors, options)
    if options.credit == "prefix":
        advantages = spare_good_prefix(advantages, tensors)
    return advantages


class Groups:
    """What advantages are made of: P groups of G samples, as tensors. NaN: no verdict, or no such number."""

    def __init__(self, groups, decode, is_first):
        self.shape = len(groups), -1
        self.samples = list(chain(*groups))
        self.decode = decode
        self.is_first = is_first
        self.infos = []  # what the function says of each sample; nothing without a verdict
        rewards = []
        for sample in self.samples:
            reward = sample.result["reward_score"]
            info = sample.result["reward_extra_info"]
            if reward is None:
                info = {}
            rewards.append(number_of(reward))
            self.infos.append(info)
        penalties = [number_of(info.get("overlong_penalty", 0.0)) for info in self.infos]
        self.rewards_P_G = self.tensor(rewards)  # score + penalty
        self.penalties_P_G = self.tensor(penalties) + 0 * self.rewards_P_G  # for length, at most 0
        self.lengths_P_G = self.tensor([len(sample.response_ids) for sample in self.samples])
        self.prompt_lengths_P_G = self.tensor([len(sample.prompt_ids) for sample in self.samples])
        self.tokens_T = torch.arange(max(1, int(self.lengths_P_G.max())))  # the longest one's tokens

    def tensor(self, values):
        return torch.tensor(values, dtype=torch.float64).unflatten(0, self.shape)

    def need(self, key):
        """RuntimeError where the function says this of none of the first samples (a text is nothing said)."""
        infos = [info for info in self.infos if info]
        found = [info for info in infos if not isinstance(info.get(key, ""), (str, dict))]
        if self.is_first and infos and not found:
            raise RuntimeError(f"advantage, credit: need {key}, the function gives {', '.join(infos[0])}; "
                               "docs/algorithms.md says which advantage needs what, and who gives it")

    def number(self, key: str) -> torch.Tensor:
        """A number of the function's dict, P x G."""
        self.need(key)
        return self.tensor([number_of(info.get(key)) for info in self.infos])

    @cached_property
    def prefixes_P_G(self):
        """Tokens before the first wrong paragraph (or turn); 0: there is none. NaN: no number says so."""
        self.need("first_wrong")
        prefixes = []
        for sample, info in zip(self.samples, self.infos):
            place = number_of(info.get("first_wrong") or 0)
            prefix = place  # NaN stays
            if place <= 0:
                prefix = 0
            elif place > 0 and sample.has_turns:
                starts = [*starts_of(sample, int(place) + 1, self.decode), len(sample.response_ids) - 1]
                prefix = starts[min(int(place), len(starts) - 1)]
            elif place > 0:
                prefix = count_tokens_before(int(place), sample.text, sample.response_ids, self.decode)
            prefixes.append(prefix)
        return self.tensor(prefixes)

    @cached_property
    def steps(self):
        """One score a paragraph (or turn), P x G x S, else NaN; the paragraph of each token, P x G x T."""
        self.need("step_scores")
        steps = []
        paragraphs = []
        for sample, info in zip(self.samples, self.infos):
            scores = info.get("step_scores")
            if not isinstance(scores, list):
                scores = []
            starts = starts_of(sample, len(scores) + 1, self.decode)  # with a score, and the first without
            numbers = [*map(number_of, scores[: len(starts)]), math.nan]
            steps.append(torch.tensor(numbers, dtype=torch.float64))
            paragraphs.append(torch.searchsorted(torch.tensor(starts[1:]), self.tokens_T, right=True))
        steps_B_S = pad_sequence(steps, batch_first=True, padding_value=math.nan)
        return steps_B_S.unflatten(0, self.shape), torch.stack(paragraphs).unflatten(0, self.shape)


def starts_of(sample: Sample, count: int, decode) -> list[int]:
    """With which tokens the first `count` of a sample's turns begin, or of its paragraphs without turns."""
    if sample.has_turns:
        lengths = [turn["tokens"] for turn in sample.turns]
        return list(accumulate(lengths[:-1], initial=0))[:count]
    places = paragraph_starts(sample.text)[:count]
    return tokens_before(places, sample.text, sample.response_ids, decode)


def number_of(value):
    """NaN for what is not a number, is infinite, or is too large to compute with."""
    if isinstance(value, (int, float)) and abs(value) <= 1e300:
        return float(value)
    return math.nan
