"""The numbers of a run: what the samples of a step or of an evaluation add up to.

A group is a list of policy.Sample, whose `result` is what reward_loop.py returns. A new metric is a line in
`reward_metrics` (training) or `source_metrics` (evaluation); what the user's function returns is averaged
without one.

Needs none of our other files. Left out: histograms, error bars. tools/view_run.py shows more, and several
runs together.
"""

import math
from collections import Counter
from itertools import chain

WITHOUT_MEAN = ("pred", "gt", "first_wrong", "genrm_shared")  # answers and places, and what is counted apart


def mean(values) -> float | None:
    """The mean of the values that are not None; None where there are none."""
    known = [float(value) for value in values if value is not None]
    if not known:
        return None
    return sum(known) / len(known)


def is_bounded(value) -> bool:
    """Whether a value of the user's function can be averaged: no NaN, and no number whose sum overflows."""
    return isinstance(value, (int, float)) and abs(value) <= 1e300


def averages(infos: list[dict]) -> dict:
    """The means of the numbers and booleans in these reward_extra_infos, over the samples that have them.

    `flawed_positive` (and what ends so) is a rate among right answers, as in the paper.
    """
    numbers = {}
    for info in infos:
        for key, value in info.items():
            is_number = is_bounded(value)
            if key.endswith("flawed_positive"):
                key = f"{key}_rate"
                is_number = is_number and info.get("acc") == 1
            if is_number and key not in WITHOUT_MEAN:
                numbers.setdefault(key, []).append(value)
    return {key: mean(found) for key, found in numbers.items()}


def reward_metrics(samples: list) -> dict:
    """Means over the samples of a step; None where no sample has a value."""
    infos = infos_of(samples)
    rewards = [sample.result["reward_score"] for sample in samples]
    metrics = {f"reward/{key}": value for key, value in averages(infos).items()}
    metrics["reward/mean"] = mean(rewards)  # a function's own "mean" gives way
    metrics["reward/no_verdict"] = rewards.count(None) / len(rewards)
    seconds = [sample.result["seconds"] for sample in samples if "seconds" in sample.result]
    if seconds:
        metrics["reward/seconds_mean"] = mean(seconds)
        metrics["reward/seconds_max"] = max(seconds)
    statuses = Counter()
    shared = []
    for info in infos:
        status = str(info.get("genrm_status", "skipped"))  # a function may return anything
        if status != "skipped":
            statuses[status] += 1
            if is_bounded(info.get("genrm_shared")):
                shared.append(info["genrm_shared"])
    asked = statuses.total()
    if asked:
        metrics["genrm/asked"] = asked
        metrics["genrm/error_rate"] = 1 - statuses["ok"] / asked
        metrics["genrm/truncated"] = statuses["truncated"] / asked
        metrics["genrm/shared"] = mean(shared)
    return metrics


def rollout_metrics(samples: list) -> dict:
    """What rollout functions did; a failed rollout has no reward, whatever else its sample has."""
    failures = Counter(sample.failure for sample in samples)
    seconds = [sample.tool_seconds for sample in samples]
    turns = [Counter(turn["who"] for turn in sample.turns) for sample in samples]
    return {
        "rollout/turns": mean(who["policy"] for who in turns),
        "rollout/answered_turns": mean(who.total() - who["policy"] for who in turns),
        "rollout/called": mean(who.total() > who["policy"] for who in turns),
        "rollout/observed_tokens": mean(sample.loss_mask.count(False) for sample in samples),
        "rollout/tool_seconds_mean": mean(seconds),
        "rollout/tool_seconds_max": max(seconds),
        "rollout/error_rate": 1 - failures[""] / len(samples),
        "rollout/errors": failures["error"],
        "rollout/timeouts": failures["timeout"],
    }


def validation_metrics(groups: list[list], suffix: str = "") -> dict:
    """Metrics of the groups of n samples of each data source: mean@n, maj@n and pass@k (k = 1, 2, 4 ... n) of
    `acc`, and mean@n of each other number that the reward function returns. `suffix` replaces "mean@n"."""
    of_source = {}
    for group in groups:
        of_source.setdefault((group[0].row["data_source"], len(group)), []).append(group)
    metrics = {}
    for source, n in sorted(of_source):  # pass@k is that of the larger n
        found = source_metrics(of_source[source, n], n, suffix or f"mean@{n}")
        metrics |= {f"val/{source}/{name}": value for name, value in found.items()}
    return metrics


def source_metrics(groups: list[list], n: int, label: str) -> dict:
    """Those of the groups of n samples of one data source."""
    samples = list(chain(*groups))
    means = averages(infos_of(samples))
    accuracy = means.pop("acc", None)
    metrics = {label: accuracy} | {f"{key}/{label}": value for key, value in means.items()}
    metrics[f"no_verdict/{label}"] = mean(sample.result["reward_score"] is None for sample in samples)
    if n == 1 or accuracy is None:
        return metrics
    chances = {}  # k: that of each group
    k = 1
    while k < n:
        chances[k] = []
        k = 2 * k
    chances[n] = []
    votes = []
    for group in groups:
        # What has no `acc` (an error, say) is no wrong answer: it is left out, here as in the mean.
        infos = [info for info in infos_of(group) if info.get("acc") is not None]
        votes.append(majority(infos))
        correct = sum(info["acc"] == 1 for info in infos)
        for k, found in chances.items():
            if len(infos) >= k:
                found.append(pass_at_k(len(infos), correct, k))
    metrics[f"maj@{n}"] = mean(votes)
    for k, found in chances.items():
        metrics[f"pass@{k}"] = mean(found)
    return metrics


def infos_of(samples: list) -> list[dict]:
    return [sample.result["reward_extra_info"] for sample in samples]


def majority(infos: list[dict]) -> bool | None:
    """Whether the answer that most samples give is right; None where the function does not say answers.

    A sample without an answer casts no vote.
    """
    if not any("pred" in info for info in infos):
        return None
    votes = [info for info in infos if info.get("pred") not in (None, "[INVALID]")]
    preds = [info["pred"] for info in votes]
    winner = max(votes, key=lambda info: preds.count(info["pred"]), default={})
    return winner.get("acc") == 1


def pass_at_k(n: int, correct: int, k: int) -> float:
    """Unbiased chance that one of k samples drawn from n, `correct` of them right, is right (Chen, 2021)."""
    return 1.0 - math.comb(n - correct, k) / math.comb(n, k)


def no_verdict_rate(results, at_least: int = 1) -> float:
    """Share of reward_loop.py's results without a score, among those that needed a verdict, or `at_least`.

    A sample with a score needed none where no judge was asked, or only where a wrong answer went wrong."""
    missing = needed = 0
    for result in results:
        info = result["reward_extra_info"]
        judged = info.get("genrm_status")
        if result["reward_score"] is None:
            missing += 1
            needed += 1
        elif not judged or judged != "skipped" and info.get("acc") is not False:
            needed += 1
    return missing / max(needed, at_least)
