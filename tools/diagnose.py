"""Why does a run not learn? Findings from what it has logged: name, steps, evidence in numbers, what to do.

    python -m tools.diagnose outputs/RUN    # of a run that goes on, has ended, or comes from elsewhere

The trainer prints a finding when it appears, and the page of a run (tools/view_run.py) has them above its
curves. RULES is the table: a rule holds where all its conditions did in so many steps in a row. They are
about metrics (docs/glossary.md) and `more_numbers`; a number that is missing rings no alarm. A rule of your
own is a row. What each finding means: docs/troubleshooting.md.

The bounds are for alarms that are read: none rings in runs that learn from rewards, those of
docs/evidence/runs.jsonl and tests/data/good_runs.json (under distillation, which pays none, no-signal does).
Left out: what only another run could tell (is this policy as good as its paper says? See the evaluation
before training), and what would take a new metric. Needs run_folder.py.
"""

import sys
from dataclasses import dataclass
from math import nan, sqrt
from operator import gt, lt
from pathlib import Path

import tyro

from run_folder import read_lines

RECENT = 10  # steps whose samples say something about a step
SIGNS = {"<": lt, ">": gt}
AT_FIRST = {"accuracy": "reward/acc", "length": "response_length/mean", "entropy": "actor/entropy",
            "calls": "rollout/answered_turns"}

# (name, steps in a row, "number < or > bound" of each step, what to do); causes before what follows from them
RULES = [
    # Text has 0.1 to 1.5 nats a token, random weights have ln(vocabulary).
    ("noise", 3, ["actor/entropy > 3"], "are these the trained weights, and all of them? --model"),
    ("ends-at-once", 3, ["response_length/mean < 4"], "wrong chat template or end token"),
    # They have said their answer, and go on.
    ("never-ends", 3, ["response_length/clipped > 0.9", "without_answer < 0.5"],
     "wrong chat template, or no end token in generation_config.json"),
    # With long answers a tenth is usual.
    ("cut", 3, ["response_length/clipped > 0.3", "without_answer > 0.3"],
     "raise --max-response-length; if they ramble, look at the chat template"),
    # A base model forgets the box, and learns it where some groups have one, or where the form is paid.
    ("no-answer", 3, ["without_answer > 0.8", "reward/groups_with_spread < 0.2"],
     "ask for \\boxed{} in the prompt, or take a reward function for what they write"),
    ("one-number", 3, ["reward/groups_with_spread < 0.001", "reward/acc < 0.99", "reward/acc > 0.01"],
     "right and wrong answers score alike: call the reward function with a line of samples.jsonl"),
    ("never-right", 3, ["reward/acc < 0.001", "without_answer < 0.8", "reward/groups_with_spread < 0.2"],
     "does it look right? Then mend the rule or the truth; else take easier problems"),
    # The first error of the rollout function is in samples.jsonl.
    ("rollouts-fail", 3, ["rollout/error_rate > 0.1"],
     "mend the function, or its tool; see `error` in samples.jsonl, and docs/rollouts.md"),
    ("never-calls", 3, ["rollout/called < 0.02", "calls/ever < 0.02"],
     "does the prompt say how to call a tool? Is the stop text what the policy writes?"),
    # Turns fill the room: a response of one turn would be `cut`.
    ("no-room", 3, ["response_length/clipped > 0.5", "rollout/called > 0.5"],
     "raise --max-response-length, or let tools say less"),
    # Made-up results pay more than looked-up ones, if only the answer counts.
    ("calls-collapse", 3, ["calls/first < 0.3", "accuracy/first > 0.95"],
     "calls cost more than they pay: lower their cost, or reward grounded steps, as FAPO does"),
    # What is left may be what is easy to judge.
    ("no-verdict", 3, ["reward/no_verdict > 0.1"], "is the judge up? `error` in samples.jsonl says why"),
    ("judge-fails", 3, ["genrm/error_rate > 0.1"], "is the judge up? unparsable, truncated: docs/judge.md"),
    # Seconds after the last rollout.
    ("slow-judge", 3, ["time/reward_wait > 60"], "--genrm-servers 2, a smaller genrm_max_tokens, --overlap"),
    # Of 160 right answers, or more; the paper finds flaws in 20 to 40 %.
    ("passes-all", 10, ["reward/flawed_positive_rate < 0.001", "judged_right > 15"],
     "read critiques (keep_critique): is there nothing to find, or does it find nothing?"),
    ("flags-all", 3, ["reward/flawed_positive_rate > 0.97", "judged_right > 15"],
     "read critiques (keep_critique): does the judge count paragraphs as you do?"),
    # Twice what the judge itself finds. One as good as the demo's lets 5 to 15 % pass, most of it early.
    ("narrow-judge", 1, ["audit_flawed/surely > 0.1", "audit_flawed/unseen > 0"],
     "the policy has found what the judge overlooks: stop, and take a better judge"),
    # Usual are 0.00001 to 0.01.
    ("high-lr", 2, ["actor/approx_kl > 0.03"], "a third of this --lr, from an earlier checkpoint"),
    # Less than rounding makes in float32; the first update of a step cannot show it.
    ("low-lr", 5, ["actor/approx_kl < 1e-8", "actor/updates > 1"],
     "ten times this --lr; adapters want more than whole models"),
    # bf16 on a GPU makes 0.005 to 0.02.
    ("apart", 3, ["rollout/logprob_diff > 0.05"], "do the servers have the new weights? else --tis-cap 2"),
    ("fell", 3, ["accuracy/first < 0.5"], "back to an earlier checkpoint; a lower --lr; another reward"),
    # What helps to answer may be long, and who learns grows sure.
    ("longer", 3, ["length/first > 2", "accuracy/first < 1"], "does length pay? --overlong-buffer"),
    ("shorter", 3, ["length/first < 0.5", "accuracy/first < 1"], "what is paid: is it to stop early?"),
    ("sure", 3, ["entropy/first < 0.2", "accuracy/first < 1"], "lower --lr; --entropy-coef 0.001"),
    ("repeated", 3, ["prompts/groups < 0.5"], "more rows in --train-file: these are known by heart"),
    ("no-signal", 3, ["reward/groups_with_spread < 0.001"],
     "all right: harder problems; all wrong: easier ones; else: what does the reward tell apart?"),
]  # fmt: skip


@dataclass
class Finding:
    """Something that keeps a run from learning."""

    name: str
    steps: list[int]  # at which it holds
    evidence: str  # at the last of them
    remedy: str

    def __str__(self) -> str:
        return f"{self.name}, steps {self.steps[0]}-{self.steps[-1]}: {self.evidence}\n    {self.remedy}"


def more_numbers(lines: list[dict], samples: list[dict]) -> dict[str, float]:
    """What rules ask about a step beside its metrics; what cannot be said is left out.

    lines: of the run up to this step; samples: the newest by then.
    """
    numbers = {}
    newest = lines[-1]
    for name, key in AT_FIRST.items():  # of what it was in the first three steps, if that was not next to 0
        first = sum(line.get(key, 0) for line in lines[:3]) / 3
        if first > 0.1 and key in newest:
            numbers[f"{name}/first"] = newest[key] / first
    if "rollout/called" in newest:
        numbers["calls/ever"] = max(line.get("rollout/called", 0) for line in lines)
    # Right answers that a judge read, or fewer; wrong ones may be asked about, too (judge_wrong).
    numbers["judged_right"] = newest.get("genrm/asked", 0) * newest.get("reward/acc", 0)
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
    if len(groups) >= 8:
        numbers["prompts/groups"] = len(prompts) / len(groups)
    return numbers


def audit(lines: list[dict]) -> tuple[float, float]:
    """Of what a judge let pass in the last 20 steps: the share that a second one calls flawed
    (docs/judges.py), and its standard error. Laplace's rule: one more of either kind, so that few answers
    prove nothing."""
    asked = 2
    flawed = 1
    for line in lines[-20:]:
        if "reward/audited" in line:
            count = line["reward/audited"] * line["perf/tokens"] / line["response_length/mean"]
            asked += count
            flawed += count * line.get("reward/audit_flawed", 0)  # of none audited there is no share
    share = flawed / asked
    return share, sqrt(share * (1 - share) / asked)


def holds(conditions: list[str], numbers: list[dict]) -> bool:
    """Whether all conditions do in all these steps; one about a number that is missing never does."""
    for condition in conditions:
        key, sign, bound = condition.split()
        for step in numbers:
            if not SIGNS[sign](step.get(key, nan), float(bound)):
                return False
    return True


def diagnose(lines: list[dict], samples: list[dict]) -> list[Finding]:
    """The findings of a run's lines of metrics.jsonl and samples.jsonl, in the order in which they began."""
    lines = [line for line in lines if "reward/mean" in line]
    samples = [sample for sample in samples if sample["split"] == "train"]
    numbers = []  # of each step
    found = {}
    for line in lines:
        step = line["step"]
        recent = [sample for sample in samples if step - RECENT < sample["step"] <= step]
        numbers.append(line | more_numbers(lines[: len(numbers) + 1], recent))
        for name, count, conditions, remedy in RULES:
            if len(numbers) >= count and holds(conditions, numbers[-count:]):
                finding = found.setdefault(name, Finding(name, [], "", remedy))
                finding.steps.append(step)
                finding.evidence = evidence(numbers[-1], conditions, recent)
    return list(found.values())


def evidence(numbers: dict, conditions: list[str], samples: list[dict]) -> str:
    """The numbers of a rule, and how the newest response ends."""
    keys = [condition.split()[0] for condition in conditions]
    text = ", ".join(f"{key} {numbers[key]:.3g}" for key in keys)
    if samples:
        end = " ".join(samples[-1]["response"][-40:].split())  # the evidence is one line of text
        text += f"; ...{end!r}, truth {samples[-1]['ground_truth']!r}"
    return text


def main(folder: tyro.conf.Positional[Path]) -> None:
    """Says why the run in a folder does not learn."""
    lines, _ = read_lines(folder / "metrics.jsonl")
    samples, _ = read_lines(folder / "samples.jsonl")
    try:
        found = diagnose(lines, samples)
        if not any("reward/mean" in line for line in lines):
            raise ValueError("no training step in metrics.jsonl")
    except (ValueError, TypeError, LookupError, AttributeError) as error:
        print(f"error: {folder}: {error!r}; give the --out-dir of a run of this version", file=sys.stderr)
        raise SystemExit(2) from error
    print("\n".join(map(str, found)) or "no finding")


if __name__ == "__main__":
    tyro.cli(main)
