"""Find out why a run does not learn. Each finding has a name, the affected steps, evidence and a remedy.

    python -m tools.diagnose outputs/RUN    # a run that is in progress or has ended

The trainer prints a finding when it first appears, and report.html (tools/view_run.py) lists all findings.
tools/findings.toml is the table of findings: to add one, add it there. docs/troubleshooting.md explains each.

The bounds are chosen so that no run in docs/evidence/runs.jsonl and tests/data/good_runs.json that learns
from rewards has a finding. (Distillation has no rewards, so it has `no-learning-signal`.) Not covered: faults
that can be seen only by comparison with another run or with a new metric.
Needs findings.toml, command_line.py, reward_worker.py and run_folder.py.
"""

import sys
import tomllib
from collections import defaultdict
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from itertools import accumulate
from math import hypot, inf, nan, sqrt
from operator import gt, lt
from pathlib import Path
from statistics import correlation, fmean

import tyro

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
from command_line import cli, one_line_errors
from run_folder import printable, read_lines

RECENT = 10  # number of steps whose samples a finding uses
SIGNS = {"<": lt, ">": gt}
SINCE_START = {
    "accuracy": "reward/acc",
    "length": "response_length/mean",
    "entropy": "actor/entropy",
    "calls": "rollout/answered_turns",
}

FINDINGS = tomllib.loads((Path(__file__).parent / "findings.toml").read_text())
MEANINGS = FINDINGS["meanings"]
# (name, number of consecutive steps, conditions on each step, remedy)
RULES = [
    (name, rule["steps"], rule["conditions"], rule["remedy"]) for name, rule in FINDINGS["rules"].items()
]
# Findings about these numbers quote only samples for which the function returns true.
QUOTED = {
    "audit_flawed/surely": lambda sample: sample["reward_extra_info"].get("audit_flawed"),
    "reward/no_verdict": lambda sample: sample["reward_score"] is None,
}


@dataclass
class Finding:
    """A reason why a run does not learn."""

    name: str
    steps: list[int]  # the steps at which the rule holds
    evidence: str  # numbers of the last of these steps
    remedy: str

    def __str__(self) -> str:
        steps = f"step {self.steps[0]}"
        if len(self.steps) > 1:
            steps = f"steps {self.steps[0]}-{self.steps[-1]}"
        return f"{self.name}, {steps}: {self.evidence}\n    {self.remedy}"


def derived_numbers(lines: list[dict], samples: list[dict], called_ever: float) -> dict[str, float | str]:
    """Compute the numbers that rules need in addition to metrics. Unknown numbers are omitted.

    Args:
        lines: The metrics of the run up to this step.
        samples: The samples of the newest steps.
        called_ever: The highest rollout/called so far.
    """
    numbers = lost_accuracy(lines) | small_term(samples)
    newest = lines[-1]
    for name, key in SINCE_START.items():  # relative to the mean of the first three steps
        first = sum(line.get(key, 0) for line in lines[:3]) / 3
        if first > 0.1 and key in newest:  # A quotient by a number near 0 means nothing.
            numbers[f"{name}/first"] = newest[key] / first
    if "rollout/called" in newest:
        numbers["calls/ever"] = called_ever
    if "rollout/staleness" not in newest:  # With --overlap, the policy is updated during this time.
        numbers["reward_wait"] = newest.get("time/reward_wait", 0)
    if "rollout/is_mean" in newest:  # With --sampler-logprobs, the metric includes errors of the sampler.
        numbers["actor/approx_kl"] = nan
    # This is an upper bound because wrong answers may be judged as well (judge_wrong).
    asked = newest.get("genrm/asked", 0)
    numbers["judged_right"] = min(asked, newest.get("reward/acc", 0) * samples_of(newest, asked))
    share, error = audit(lines)
    numbers["audit_flawed/surely"] = share - 3 * error
    numbers["audit_flawed/unseen"] = share - 2 * newest.get("reward/flawed_positive_rate", 0)
    answers = []
    groups = set()
    prompts = set()
    for sample in samples:
        answers.append(sample["reward_extra_info"].get("pred"))
        groups.add((sample["step"], sample["group"]))
        prompts.add(sample["prompt"])
    if any(answers):
        numbers["without_answer"] = answers.count("[INVALID]") / len(answers)
    # With a rollout function, the state of an environment may depend on trajectory.seed, not on the prompt.
    if len(groups) >= 8 and not any(sample.keys() & {"seed", "turns"} for sample in samples):
        numbers["prompts/groups"] = len(prompts) / len(groups)
    return numbers


def lost_accuracy(lines: list[dict]) -> dict[str, float]:
    """Return which fraction of the accuracy was lost since the first steps, and how many standard errors.

    This compares the means of the first and the last third of the steps, of at least 5 and at most 20 steps
    each. The differences between consecutive steps measure the noise. Unknown numbers are omitted.
    """
    count = min(20, len(lines) // 3)
    means = []
    changes = []
    for part in (lines[:count], lines[-count:]):
        accuracies = [line["reward/acc"] for line in part if "reward/acc" in line]
        if count < 5 or len(accuracies) < count:
            return {}
        means.append(sum(accuracies) / count)
        changes += [after - before for before, after in zip(accuracies, accuracies[1:])]
    lost = means[0] - means[1]
    # Both means have a variance of half of this square. A square may overflow, but hypot does not.
    error = hypot(*changes) / sqrt(len(changes) * count)
    if means[0] < 0.1 or not error:
        return {}
    return {"accuracy/lost": lost / means[0], "accuracy/lost_in_errors": lost / error}


def samples_of(line: dict, unknown=0) -> float:
    """Return the number of samples of a step, or `unknown` if its metrics do not tell."""
    if not line.keys() >= {"perf/tokens", "response_length/mean"}:
        return unknown
    return line["perf/tokens"] / line["response_length/mean"]


def audit(lines: list[dict]) -> tuple[float, float]:
    """Return the fraction of accepted answers that a second judge calls flawed, and its standard error.

    The judge accepted these answers in the last 20 steps. (The second judge is in docs/judges.py.) Laplace's
    rule adds one sound and one flawed answer because a few answers prove nothing.
    """
    asked = 2
    flawed = 1
    for line in lines[-20:]:
        if "reward/audited" in line:
            count = line["reward/audited"] * samples_of(line)
            asked += count
            flawed += count * line.get("reward/audit_flawed", 0)  # missing in steps without audits
    share = flawed / asked
    return share, sqrt(max(0.0, share * (1 - share)) / asked)  # The user's own values may be negative.


def small_term(samples: list[dict]) -> dict[str, float | str]:
    """Return how many groups learn only from a small term of the reward, its weight there, and its name.

    In such a group, all answers are correct or all are wrong, and their rewards differ by less than a fifth
    of the range of all rewards. The weight compares the mean absolute advantages of these groups and of the
    other groups. The name is that of the result that explains the differences. Unknown numbers are omitted.
    """
    groups = defaultdict(list)
    rewards = []
    for sample in samples:
        is_known = None not in (sample["reward_score"], sample.get("advantage"))
        if is_known and isinstance(sample["reward_extra_info"].get("acc"), (int, float)):
            groups[sample["step"], sample["group"]].append(sample)
            rewards.append(sample["reward_score"])
    small = []
    others = []
    limit = 0.2 * (max(rewards, default=0) - min(rewards, default=0))
    for group in groups.values():
        found = [sample["reward_score"] for sample in group]
        spread = max(found) - min(found)
        answers = {sample["reward_extra_info"]["acc"] for sample in group}
        if len(answers) == 1 and 1e-6 < spread < limit:
            small.append(group)
        elif spread > 1e-6:
            others.append(group)
    count = len(small) + len(others)
    if count < 8 or not small or not others:
        return {}
    weights = []
    for some in (small, others):
        weights.append(fmean(abs(one["advantage"]) for group in some for one in group))
    return {
        "small_term/groups": len(small) / count,
        "small_term/weight": weights[0] / max(weights[1], 1e-9),
        "small_term/name": explaining_result(small),
    }


def explaining_result(groups: list[list[dict]]) -> str:
    """Return the key of the result that rises or falls with the reward in these groups, or "unknown"."""
    best = 0.95  # the lowest correlation that counts
    name = "unknown"
    for key in groups[0][0]["reward_extra_info"]:
        values = []
        rewards = []
        # The values may be constant, too large for a mean, or not numbers.
        with suppress(ArithmeticError, TypeError, ValueError):
            for group in groups:
                found = [sample["reward_extra_info"].get(key) for sample in group]
                values += [value - fmean(found) for value in found]
                mean = fmean(sample["reward_score"] for sample in group)
                rewards += [sample["reward_score"] - mean for sample in group]
            fit = abs(correlation(values, rewards))
            if key != "score" and fit > best:
                best = fit
                name = key
    return name


def holds(conditions: list[str], steps: list[dict]) -> bool:
    """Return whether all conditions hold in all these steps. Conditions on missing numbers never hold."""
    for condition in conditions:
        key, sign, bound = condition.split()
        for numbers in steps:
            if not SIGNS[sign](numbers.get(key, nan), float(bound)):
                return False
    return True


def diagnose(lines: list[dict], samples: list[dict], last: float = inf) -> list[Finding]:
    """Return the findings of a run, in the order of their first steps.

    Args:
        lines: The lines of metrics.jsonl.
        samples: The lines of samples.jsonl.
        last: Return only findings of this many latest steps.
    """
    lines = [line for line in lines if "reward/mean" in line]
    samples_at = defaultdict(list)  # by step
    for sample in samples:
        if sample["split"] == "train":
            samples_at[sample["step"]].append(sample)
    called = list(accumulate((line.get("rollout/called", 0) for line in lines), max))
    first = max(0, len(lines) - last)  # index of the first step to diagnose
    longest = max(count for _, count, _, _ in RULES)
    numbers = []  # one dict per step, from the first step that rules need
    found = {}
    for index in range(max(0, first - longest + 1), len(lines)):
        step = lines[index]["step"]
        recent = [sample for at in range(step - RECENT + 1, step + 1) for sample in samples_at[at]]
        numbers.append(lines[index] | derived_numbers(lines[: index + 1], recent, called[index]))
        if index < first:
            continue
        for name, count, conditions, remedy in RULES:
            if len(numbers) >= count and holds(conditions, numbers[-count:]):
                finding = found.setdefault(name, Finding(name, [], "", remedy))
                finding.steps.append(step)
                finding.evidence = evidence(numbers[-1], conditions, recent)
    return list(found.values())


def evidence(numbers: dict, conditions: list[str], samples: list[dict]) -> str:
    """Return the numbers that a rule uses, and the end of the newest response that the rule is about."""
    keys = [condition.split()[0] for condition in conditions]
    if keys[0] in QUOTED:
        samples = [sample for sample in samples if QUOTED[keys[0]](sample)]
    parts = []
    for key in keys:
        meaning = f" ({MEANINGS[key]})" if key in MEANINGS else ""
        parts.append(f"{key} {numbers[key]:.3g}{meaning}")
    text = ", ".join(parts)
    if keys[0].startswith("small_term/"):
        text += f", small_term/name {numbers['small_term/name']}"
    if samples:
        end = " ".join(samples[-1]["response"][-40:].split())  # without line breaks
        text += f'; response "...{end}"'
        if samples[-1]["ground_truth"] not in ("", None):
            text += f', ground truth "{samples[-1]["ground_truth"]}"'
    return text


def unfinished_step(lines: list[dict], samples: list[dict]) -> str:
    """Return a sentence on the newest samples if their step or evaluation has no metrics, else ""."""
    if not samples:
        return ""
    step, split = samples[-1]["step"], samples[-1]["split"]
    prefix = "val/" if split == "val" else "reward/"
    for line in lines:
        if line["step"] == step and any(key.startswith(prefix) for key in line):
            return ""
    what = f"the evaluation after step {step}" if split == "val" else f"step {step}"
    text = f"{what} has samples but no metrics: it is in progress, or the run stopped in it"
    newest = [sample for sample in samples if (sample["step"], sample["split"]) == (step, split)]
    silent = [sample for sample in newest if sample["reward_score"] is None]
    if silent:
        info = silent[0]["reward_extra_info"]
        why = info.get("error") or info.get("genrm_error") or info.get("genrm_status") or silent[0]["status"]
        if why == "ok":
            why = "the function returned no score"
        text += f"; {len(silent)} of {len(newest)} logged samples have no verdict, the first: "
        text += printable(str(why))
    return text


@contextmanager
def errors_of(folder: Path):
    """Name the run in errors inside this context. Other versions wrote other files."""
    try:
        yield
    except (ValueError, TypeError, LookupError, AttributeError) as error:
        why = f"{type(error).__name__}: {error}"
        raise ValueError(f"{folder}: is not a run of this version ({why}); pass another run") from error


def main(folder: tyro.conf.Positional[Path]) -> None:
    """Print why a run does not learn: findings with the affected steps, evidence and a remedy.

    Args:
        folder: Output directory of the run (--out-dir), which may be in progress.
    """
    lines, _ = read_lines(folder / "metrics.jsonl")
    samples, _ = read_lines(folder / "samples.jsonl")
    with one_line_errors():
        if not folder.is_dir():
            raise ValueError(f"{folder}: the folder does not exist; pass the --out-dir of a run")
        with errors_of(folder):
            found = diagnose(lines, samples)
            unfinished = unfinished_step(lines, samples)
        if not any("reward/mean" in line for line in lines):
            advice = "pass the --out-dir of a run, or wait for its first step"
            raise ValueError(f"{folder}: {unfinished or f'metrics.jsonl has no training step; {advice}'}")
    print("\n".join(map(str, found)) or "no findings")


if __name__ == "__main__":
    cli(main, __doc__, markers=[tyro.conf.PositionalMetavarFromFieldName], end="tools/findings.toml")
