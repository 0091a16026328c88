"""Collect finished runs in docs/evidence/*.jsonl, and generate all figures, tables and CSV files from them.

    make evidence                                         # nine to twelve hours: the runs, then this script
    python docs/make_evidence.py --runs outputs/evidence  # adds the finished runs of recipes/evidence.sh
    python docs/make_evidence.py --runs outputs/disrm     # adds the finished runs of recipes/toy_disrm.sh
    python docs/make_evidence.py                          # regenerates figures and tables

Each line of a JSONL file is one run: its world (a checkpoint with its data), algorithm and seed, the held-out
metrics before and after training, and the rollout metrics of each step. In the pages, each table stands
between <!-- evidence: NAME --> and <!-- end -->. Larger tables are CSV files. A test checks that all tables
match the JSONL files. A cell is the median of the runs, with the range in parentheses. A run in --runs
replaces an earlier run with the same world, algorithm and seed.

To add an algorithm to a table, add its name and title to one of the dicts below, such as VARIANTS. To add a
table, add a Table to PAGE_TABLES or CSV_TABLES.
"""

import csv
import io
import json
import math
import os
import re
import sys
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from random import Random
from statistics import fmean, median

DOCS = Path(__file__).resolve().parent
sys.path.insert(0, str(DOCS.parent))

import tyro
from matplotlib.figure import Figure

from compute_score import split_paragraphs
from run_folder import read_lines
from toy.report import COLUMNS, cell, read_metrics, table
from toy.shop_world import FLAWS as SHOP_FLAWS
from toy.toy_world import parse_problem, write_solution

FOLDER = DOCS / "evidence"
FILES = ("runs.jsonl", "shop.jsonl", "classifier.jsonl")
LAST = 10  # Some columns summarise the training samples of this many steps.

# ---- worlds, and the algorithms in each of them

STANDARD = ("warm0", "warm1", "warm2")
COMPARED = ("algo0", "algo1", "algo2")  # separate checkpoints for the comparison of algorithms
# The second world's three shipped checkpoints (toy/models). Another kind of processor produces their twins,
# again0 to again2, from the same seeds.
OWN = ("own0", "own1", "own2")
SHOP = ("shop0", "shop1", "shop2")  # the world with a tool


def chosen(titles: dict[str, str], *names: str) -> dict[str, str]:
    return {name: titles[name] for name in names}


NAMES = {
    "rule": "outcome reward only",
    "fapo_judge": "FAPO, served judge",
    "fapo_oracle": "FAPO, oracle as judge",
    "papo_oracle": "PAPO, oracle as judge",
}
TWO = chosen(NAMES, "rule", "fapo_oracle")
FIRST_TABLE = {  # rows of the table in the README
    "rule": "GRPO, outcome reward only",
    "fapo_judge": "FAPO, judge trained and served",
    "fapo_oracle": "FAPO, oracle as the judge",
}
ALGORITHMS = {
    "rule": "outcome reward only",
    "fapo_oracle": "FAPO",
    "prefix_oracle": "FAPO, good prefix spared",
    "vppo_oracle": "VPPO, FAPO's score",
    "papo_oracle": "PAPO",
    "dr_grpo_oracle": "Dr. GRPO",
    "terms_oracle": "terms: acc=1 flawed_positive=-0.5",
    "gspo_oracle": "GSPO",
    "cispo_oracle": "CISPO",
    "lora_oracle": "FAPO with LoRA",
    "fapo_judge": "FAPO, served judge",
    "prefix_judge": "FAPO, served judge, good prefix spared",
    "vppo_judge": "VPPO, served judge",
}
PENALTIES = {
    "rule": "λ = 0 (outcome reward only)",
    "penalty0.667": "λ = 2/3",
    "fapo_oracle": "λ = 1",
    "penalty1.333": "λ = 4/3",
}
OWN_ALGORITHMS = {
    "rule": "outcome reward only",
    "fapo_oracle": "FAPO",
    "prefix_oracle": "FAPO, good prefix spared",
    "vppo_oracle": "VPPO, FAPO's score",
    "papo_oracle": "PAPO",
    "steps_oracle": "FAPO, step scores",
    "distill": "on-policy distillation, no reward",
}
LONG = {
    "rule": "rule_long",
    "fapo_oracle": "fapo_long",
    "prefix_oracle": "prefix_long",
    "vppo_oracle": "vppo_long",
}
VARIANTS = {  # runs from the second world's checkpoint 0; {steps} becomes the number of steps
    "rule": "outcome reward only",
    "rule_slow": "outcome reward, half the learning rate",
    "rule_fast": "outcome reward, twice the learning rate",
    "rule_kl": "outcome reward, `--kl-coef 0.05`",
    "rule_group16": "outcome reward, groups of 16",
    "rule_long": "outcome reward, {steps} steps",
    "fapo_oracle": "FAPO",
    "fapo_long": "FAPO, {steps} steps",
    "fapo_group16": "FAPO, groups of 16",
    "penalty0.5": "FAPO, λ = 1/2",
    "penalty2": "FAPO, λ = 2",
    "place_oracle": "FAPO, wrong answers scored by location",
    "prefix_oracle": "FAPO, good prefix spared",
    "prefix_long": "good prefix spared, {steps} steps",
    "prefix_right": "good prefix spared, judge queried on correct answers only",
    "vppo_oracle": "VPPO",
    "vppo_long": "VPPO, {steps} steps",
    "vppo_right": "VPPO, judge queried on correct answers only",
}
SCHEDULES = {  # lambda schedules (recipes/lambda_schedule.py), from the second world's checkpoint 0
    "rule": "0 (outcome reward only)",
    "fapo_oracle": "1",
    "penalty2": "2",
    "later": "0 for 20 steps, then 1",
    "linear": "from 0 to 1 within 20 steps",
    "majority": "1 in groups with more fully correct than wrong answers, else 0",
}
FORBIDDING = {  # With lambda = 2, flawed positives score like wrong answers.
    "penalty2": "forbidden from the start (λ = 2)",
    "later2": "forbidden in the second half (λ = 0, then 2)",
    "fapo_oracle": "penalised (λ = 1)",
    "rule": "never penalised (λ = 0)",
}
SCHEDULED = {
    "later": "FAPO, λ: 0 for 20 steps, then 1",
    "linear": "FAPO, λ: from 0 to 1 within 20 steps",
    "majority": "FAPO, λ: 1 in groups with more fully correct than wrong answers, else 0",
    "later2": "FAPO, λ: 0 for 20 steps, then 2",
}
OVERLOOKING = {  # FAPO with judges of different recall, from the second world's checkpoint 1
    "rule": "outcome reward only, no judge",
    "fapo_recall0.5": "FAPO, recall 0.5",
    "fapo_recall0.7": "FAPO, recall 0.7",
    "fapo_recall0.9": "FAPO, recall 0.9",
    "fapo_first_judge": "FAPO, served judge, first world's flaws",
    "fapo_first_judge_long": "FAPO, served judge, first world's flaws, {steps} steps",
    "fapo_judge": "FAPO, served judge, the policies' own flaws",
    "fapo_judge_long": "FAPO, served judge, the policies' own flaws, {steps} steps",
    "fapo_oracle": "FAPO, oracle as judge",
}
OVERLOOKING_SHORT = {name: title for name, title in OVERLOOKING.items() if not name.endswith("_long")}
OWN_JUDGES = ("first_judge", "trained_judge")
SERVED = {"fapo_first_judge": "first_judge", "fapo_judge": "trained_judge"}
BESIDE = {
    "rule": "outcome reward only",
    "classifier": "classifier score as the reward",
    "flagged": "FAPO, classifier as the judge",
    "fapo_judge": "FAPO, generative judge",
    "fapo_oracle": "FAPO, oracle as the judge",
}
CLASSIFIED = ("classifier", "flagged")  # the algorithms of recipes/toy_disrm.sh
TOOL_NAMES = {
    "outcome": "outcome reward only",
    "outcome_dr_grpo": "outcome reward only, `--advantage dr_grpo`",
    "outcome_floor": "outcome reward only, floor under the std",
    "outcome_undivided": "outcome reward only, all groups divided by 2",
    "grounded_rule": "rule: operands must be the tool's answers",
    "fapo_judge": "FAPO, judge model",
    "fapo": "FAPO",
    "prefix": "FAPO, good prefix spared",
    "vppo": "VPPO, FAPO's score",
}
# These runs used an earlier judge model. They were measured at commit aac468a, and cannot be repeated here.
PAST = {"fapo_narrow_judge": "FAPO, narrower judge model"}
COSTS = ("_cost0", "_cost0.01", "", "_cost0.1")  # ends of names; see cost_of
SMALL_COSTS = ("_cost0.003", "_cost0.01", "")  # those on the page
ALL_COSTS = ("_cost0", *SMALL_COSTS, "_cost0.1")
NORMALISED = {  # the outcome reward minus the cost, with other normalisations
    "outcome": "GRPO: divided by the std",
    "outcome_floor": "`floored`: divided by max(std, 0.5)",
    "outcome_undivided": "`floored`: divided by 2",  # no std is as large, so only the division is missing
    "outcome_dr_grpo": "Dr. GRPO: not divided",  # and the loss is divided by a constant
}
VARIED = {  # other divisors, learning rates and numbers of steps
    "outcome_undivided8": "`floored`: divided by 8",
    "outcome_half": "GRPO, half the learning rate",
    "outcome_dr_grpo_half": "Dr. GRPO, half the learning rate",
    "outcome_dr_grpo_twice": "Dr. GRPO, twice the learning rate",
    "outcome_dr_grpo_fast": "Dr. GRPO, four times the learning rate",
    "outcome_long": "GRPO, {steps} steps",
    "outcome_floor_long": "`floored`: divided by max(std, 0.5), {steps} steps",
    "outcome_undivided_long": "`floored`: divided by 2, {steps} steps",
    "outcome_dr_grpo_long": "Dr. GRPO, {steps} steps",
}
ADVANTAGE = "--advantage recipes/advantages.py:"
SPARED = ADVANTAGE + "spare_good_prefix"
VPPO = ADVANTAGE + "vppo --advantage-kwargs '{\"prefix_cut\": 0}'"
OUTCOME = "--reward-fn toy/shop_world.py:compute_score_outcome"
FLOOR = f"{OUTCOME} {ADVANTAGE}floored"
FLAGS = {  # flags of each algorithm, in addition to those in recipes/toy_tools.sh
    "outcome": OUTCOME,
    "outcome_dr_grpo": OUTCOME + " --advantage dr_grpo",
    "outcome_floor": FLOOR,
    "outcome_undivided": FLOOR + " --advantage-kwargs '{\"floor\": 2}'",
    "grounded_rule": "--reward-fn toy/shop_world.py:compute_score_grounded_rule",
    "fapo_judge": "--reward-fn toy/shop_judge.py:compute_score_fapo --router-address HOST:PORT",
    "fapo": "",
    "prefix": SPARED,
    "vppo": VPPO,
}
SECOND_WORLD = {  # flags of each algorithm, in addition to those in recipes/second_world.sh
    "rule": "--reward-fn toy/toy_world.py:compute_score_baseline",
    "fapo_oracle": "",
    "prefix_oracle": SPARED,
    "vppo_oracle": VPPO,
    "papo_oracle": ADVANTAGE + "papo",
    "steps_oracle": "--reward-fn toy/toy_world.py:compute_score_steps_oracle " + ADVANTAGE + "steps",
}
# Algorithms that query no judge (their names start like this), and those that query it on wrong answers too.
UNJUDGED = ("rule", "distill", "outcome", "grounded_rule")
LOCATED = (
    "prefix",
    "prefix_oracle",
    "prefix_long",
    "vppo",
    "vppo_oracle",
    "vppo_long",
    "steps_oracle",
    "place_oracle",
)
UNASKED = {"later": 20, "later2": 20}  # number of initial steps without a judge, because lambda is 0
PANELS = {
    "acc": "answer accuracy",
    "oracle_flawed_positive_rate": "flawed positives by the oracle\n(fraction of correct answers)",
    "truly_correct": "fully correct\n(correct answer, no wrong step)",
}
TOOL_PANELS = {
    "acc": "accuracy",
    "truly_correct": "fully correct (every price looked up, every sum right)",
    "calls": "look-ups per problem",
}
ENDS = {  # labels and colours of final metrics
    "oracle_flawed_positive_rate": ("flawed positive rate", "#D55E00"),
    "truly_correct": ("fully correct", "#0072B2"),
    "sums_right": ("sums right", "#999999"),
}
CURVES = ("acc", "oracle_flawed_positive_rate", "truly_correct", "calls", "flawed_positive_rate", "lambda")
COLOURS = {  # the Okabe-Ito palette, which is safe for colour-blind readers
    "rule": "#D55E00",
    "fapo_judge": "#0072B2",
    "fapo_oracle": "#56B4E9",
    "papo_oracle": "#CC79A7",
    "prefix_oracle": "#E69F00",
    "vppo_oracle": "#000000",
    "steps_oracle": "#999999",
    "distill": "#7F4F24",
    "outcome": "#D55E00",
    "fapo": "#0072B2",
    "classifier": "#CC79A7",
    "flagged": "#E69F00",
    "truly correct": "#0072B2",
    "flawed positives": "#D55E00",
    "wrong": "#999999",
}


@dataclass
class Config:
    """Generate the figures and tables from docs/evidence/*.jsonl. With --runs, add finished runs first."""

    runs: Path | None = None
    """Folder with the finished runs: WORLD/ALGORITHM_seedN, WORLD/trained_judge or seedN/classifier."""


# ---- collecting runs


def collect(folder: Path) -> list[dict]:
    """Return one dict per run, sorted by name. Raises ValueError if a run has not finished."""
    runs = []
    for path in sorted(folder.glob("*/*/metrics.jsonl")):
        metrics = read_metrics(path.parent)
        world = path.parent.parent.name
        algorithm, _, seed = path.parent.name.partition("_seed")
        if algorithm in CLASSIFIED:  # These runs start from the shipped models.
            world, seed = COMPARED[0], world.removeprefix("seed")
        run = {"world": world, "algorithm": algorithm, "seed": int(seed or 0), "steps": metrics[-1]["step"]}
        for when, line in ("before", metrics[0]), ("after", metrics[-1]):
            run[when] = {}
            for key, value in line.items():
                if re.match(r"val/.*/(mean@1|greedy)$", key):
                    run[when][key[4:]] = round(value, 4)
        run["seconds"] = round(sum(line.get("time/step", 0.0) for line in metrics), 1)
        run["curves"] = {}
        for key in CURVES:
            curve = curve_of(metrics, key)
            if curve:
                run["curves"][key] = curve
        if algorithm in CLASSIFIED or world in OWN and algorithm not in OWN_JUDGES:
            run |= count_flaws(path.parent, since=run["steps"] - LAST + 1)
        if world in SHOP and algorithm == "fapo_judge":
            run["verdicts"] = count_verdicts(path.parent)
        if algorithm in CLASSIFIED:
            spread = [line["reward/groups_with_spread"] for line in metrics[1:]]
            steps = range(1, run["steps"] + 1)
            for when, some in ("first", slice(LAST)), ("last", slice(-LAST, None)):
                run[when] = count_accepted(path.parent, steps[some])
                run[f"{when}_spread"] = fmean(spread[some])
        runs.append(run)
    if not runs:
        raise ValueError(f"--runs {folder}: contains no finished run; run make evidence first")
    return runs


def curve_of(metrics: list[dict], key: str) -> list[float]:
    """Return a rollout metric of each step, or [] if no step has it.

    A rate among correct answers is missing in a step without correct answers, and counts as 0 there.
    """
    values = [line.get(f"reward/{key}") for line in metrics if line["step"]]
    if set(values) == {None}:
        return []
    return [round(value or 0.0, 4) for value in values]


def kind_of_flaw(question: str, solution: str) -> str:
    """Return the kind of the first error in a flawed solution from the toy world, such as "arithmetic"."""
    problem = parse_problem(question)
    sound = write_solution(problem, Random(0))
    stated = split_paragraphs(solution)
    index = len(os.path.commonprefix([stated, sound]))
    if index >= len(problem.steps):
        return "answer"
    left, is_sum, _ = [*stated, ""][index].partition("=")
    task = sound[index].partition("=")[0]
    value = re.match(r"\d+", task)[0]
    if left == task:
        return "arithmetic"
    if left in [f"{value}{step:+}" for step in problem.steps[index + 1 :]]:
        return "skipped"
    if is_sum and re.fullmatch(r"\d+[+-]\d+", left):
        return "copied"
    return "other"


def training_samples(folder: Path) -> list[dict]:
    return [line for line in read_lines(folder / "samples.jsonl")[0] if line["split"] == "train"]


def count_flaws(folder: Path, since: int) -> dict[str, dict | int]:
    """Count flaws in the training samples from step `since` on.

    Returns:
        A dict with the number of flawed positives of each kind ("flaws"), the number of correct answers that
        the judge accepted ("passed"), and the flawed positives of each kind among those ("overlooked").
    """
    flaws, overlooked, passed = Counter(), Counter(), 0
    for line in training_samples(folder):
        if line["step"] < since:
            continue
        info = line["reward_extra_info"]
        is_right = info["oracle_flawed_positive"] or info["truly_correct"]
        is_passed = is_right and info.get("flawed_positive") is False
        passed += is_passed
        if info["oracle_flawed_positive"]:
            kind = kind_of_flaw(line["prompt"], line["response"])
            flaws[kind] += 1
            overlooked[kind] += is_passed
    return {"flaws": dict(flaws), "passed": passed, "overlooked": dict(overlooked)}


def count_verdicts(folder: Path) -> dict[str, list[int]]:
    """Return {flaw or "sound": [called flawed, first error located, all]} for the training samples judged."""
    counts = {kind: [0, 0, 0] for kind in ("sound", *SHOP_FLAWS)}
    for line in training_samples(folder):
        info = line["reward_extra_info"]
        if info["agrees"] is not None:
            kinds = [kind for kind in SHOP_FLAWS if info[f"flawed_{kind}"]]
            one = counts[(*kinds, "sound")[0]]
            one[0] += info["flawed_positive"]
            one[1] += info["agrees"]
            one[2] += 1
    return counts


def count_accepted(folder: Path, steps: range) -> dict[str, list[int]]:
    """Return {the oracle's verdict: [samples with a score above 0, all samples]} for these steps."""
    counts = {"truly correct": [0, 0], "flawed positive": [0, 0], "wrong": [0, 0]}
    for line in training_samples(folder):
        if line["step"] in steps:
            verdict = "wrong"
            if line["reward_extra_info"]["truly_correct"]:
                verdict = "truly correct"
            elif line["reward_extra_info"]["oracle_flawed_positive"]:
                verdict = "flawed positive"
            counts[verdict][0] += line["reward_score"] > 0
            counts[verdict][1] += 1
    return counts


def file_of(run: dict) -> str:
    """Return the name of the JSONL file that holds this run."""
    if run["world"] in SHOP:
        return "shop.jsonl"
    return "classifier.jsonl" if run["algorithm"] in CLASSIFIED else "runs.jsonl"


def read() -> list[dict]:
    return [json.loads(line) for name in FILES for line in (FOLDER / name).read_text().splitlines()]


def runs_of(runs: list[dict], algorithm: str, *worlds: str) -> list[dict]:
    return [run for run in runs if run["algorithm"] == algorithm and run["world"] in worlds]


def of(runs: list[dict], algorithm: str, *worlds: str) -> list[dict]:
    """Return the runs of an algorithm in these worlds (default: STANDARD). Raises ValueError if empty."""
    found = runs_of(runs, algorithm, *(worlds or STANDARD))
    if not found:
        where = " or ".join(worlds or STANDARD)
        raise ValueError(f"no finished run of {algorithm} in {where}; run make evidence first")
    return found


def with_same_seeds(runs: list[dict], algorithms: list[str]) -> list[dict]:
    """Return the runs of these algorithms from those checkpoints and seeds that all of them have."""
    found = [run for run in runs if run["algorithm"] in algorithms]
    of_start = Counter((run["world"], run["seed"]) for run in found)
    return [run for run in found if of_start[run["world"], run["seed"]] == len(algorithms)]


# ---- numbers of one run


def smooth(values: list[float]) -> list[float]:
    """Return the mean of each value and the four values before it."""
    return [fmean(values[max(0, end - 5) : end]) for end in range(1, len(values) + 1)]


def first_step(is_reached: list[bool]) -> float:
    """Return the first step at which this is true, or infinity."""
    return is_reached.index(True) + 1 if True in is_reached else math.inf


def half_correct(run: dict) -> float:
    """Return the first step at which half of the samples are fully correct (smoothed), or infinity."""
    return first_step([value >= 0.5 for value in smooth(run["curves"].get("truly_correct", []))])


def half_mended(run: dict) -> float:
    """Return the first step at which the smoothed flawed-positive rate has halved, or infinity."""
    half = run["before"]["toy/oracle_flawed_positive_rate/mean@1"] / 2
    return first_step([value <= half for value in smooth(run["curves"]["oracle_flawed_positive_rate"])])


def shares(run: dict) -> dict[str, list[float]]:
    """Return the paper's alpha, gamma and beta (appendix A) at each step, as fractions of all samples."""
    right, sound = run["curves"]["acc"], run["curves"]["truly_correct"]
    return {
        "truly correct": sound,
        "flawed positives": [a - s for a, s in zip(right, sound)],
        "wrong": [1 - a for a in right],
    }


def flawed(run: dict) -> list[float]:
    return smooth(shares(run)["flawed positives"])


def turning_point(run: dict) -> float:
    """Return the first step at which fully correct samples outnumber wrong ones (smoothed), or infinity."""
    sound, wrong = (smooth(shares(run)[name]) for name in ("truly correct", "wrong"))
    return first_step([s > w for s, w in zip(sound, wrong)])


def halfway(run: dict) -> float:
    return smooth(run["curves"]["truly_correct"])[run["steps"] // 2 - 1]


def calls(run: dict) -> float:
    """Return the mean number of judge calls per step of 128 samples.

    An algorithm queries the judge on no answers, on the correct answers or on all answers.
    """
    if run["algorithm"].startswith(UNJUDGED):
        return 0.0
    if run["algorithm"] in LOCATED:
        return 128.0
    right = run["curves"]["acc"]
    return 128 * sum(right[UNASKED.get(run["algorithm"], 0) :]) / len(right)


# ---- columns: {head: a held-out metric, or a function that returns the cell of a row's runs}


def number(of_run, digits: int = 2):
    """Return a column with the median and range of a number of each run."""
    return lambda runs, when: cell([of_run(run) for run in runs], digits)


def last_steps(curve: str):
    """Return a column with the mean of a rollout metric over the last steps."""
    return number(lambda run: fmean(run["curves"][curve][-LAST:]))


def num_runs(runs: list[dict], when: str) -> str:
    return str(len(runs))


def num_runs_at_all(runs: list[dict], when: str) -> str:
    """Return the number of runs, which the row of the initial policy shows as well."""
    return str(len(runs))


def cost_of(algorithm: str) -> str:
    """Return the cost of a look-up, which is the end of the algorithm's name unless it is 0.03."""
    return algorithm.partition("_cost")[2] or "0.03"


def minus_cost(run: dict, accuracy: float, num_calls: float) -> float:
    """Return the outcome reward minus the cost of the look-ups, whatever the run's own reward."""
    return 2 * accuracy - 1 - float(cost_of(run["algorithm"])) * num_calls


def earned(runs: list[dict], when: str) -> str:
    """Return the mean outcome reward minus cost on the held-out problems."""
    return cell([minus_cost(run, run[when]["shop/mean@1"], run[when]["shop/calls/mean@1"]) for run in runs])


def best_earned(runs: list[dict], when: str) -> str:
    """Return the mean outcome reward minus cost of the best five consecutive training steps."""
    found = []
    for run in runs:
        curves = zip(run["curves"]["acc"], run["curves"]["calls"])
        steps = [minus_cost(run, *both) for both in curves]
        found.append(max(smooth(steps)[4:]))
    return cell(found)


def median_calls(runs: list[dict], when: str) -> str:
    return f"{median(map(calls, runs)):.0f}"


def turning_points(runs: list[dict], when: str) -> str:
    return ", ".join(f"{turn:.0f}" for turn in sorted(map(turning_point, runs)))


def flaws_of(runs: list[dict]) -> Counter:
    return sum((Counter(run.get("flaws", {})) for run in runs), Counter())


def share_of_flaws(kind: str):
    return lambda runs, when: f"{flaws_of(runs)[kind] / flaws_of(runs).total():.2f}"


def judged(kind: str, place: int):
    """Return a column: how many trajectories with this flaw the judge called flawed (0) or located (1)."""

    def show(runs, when):
        counts = [run["verdicts"][kind] for run in runs]
        return f"{sum(one[place] for one in counts)} of {sum(one[2] for one in counts)}"

    return show


def accepted(verdict: str):
    """Return a column: the fraction of samples with this oracle's verdict that the classifier accepts."""

    def show(runs, when):
        if runs[0]["algorithm"] == "flagged" and verdict == "wrong":
            return "not queried"
        sound, count = (sum(run[when][verdict][place] for run in runs) for place in (0, 1))
        return f"{sound / count:.2f} of {count}" if count else "none"

    return show


HELD_OUT = "512 held-out problems"
MAIN = chosen(COLUMNS, "flawed positives", "fully correct")
TOY = {"accuracy": COLUMNS["accuracy"], **MAIN}  # without "How many?" questions
HALF = {"step at which half are fully correct": number(half_correct, 0), "runs": num_runs}
MENDED = {
    "step at which the flawed-positive rate has halved": number(half_mended, 0),
    "judge calls per step": median_calls,
}
OWN_COLUMNS = {
    "accuracy": "toy",
    "flawed positives": "toy/oracle_flawed_positive_rate",
    "fully correct": "toy/truly_correct",
    "all sums right": "toy/sums_right",
    '"How many?" accuracy': "toy_total",
    **MENDED,
    "runs": num_runs,
    # The metric of the twin checkpoint; {} becomes the number of the row's checkpoint.
    "flawed positives, twin checkpoint": ("toy/oracle_flawed_positive_rate", "again{}"),
    "fully correct, twin checkpoint": ("toy/truly_correct", "again{}"),
}
BY_START = {f"checkpoint {world[-1]}": ("toy/oracle_flawed_positive_rate", world) for world in OWN}
IN_USE = {
    "accuracy": last_steps("acc"),
    "flawed positives found by the judge": last_steps("flawed_positive_rate"),
    "flawed positives counted by the oracle": last_steps("oracle_flawed_positive_rate"),
}
MISSED = {
    "flawed positives (of accepted answers)": number(
        lambda run: sum(run["overlooked"].values()) / run["passed"]
    ),
}
FLAWED = {
    "first step": number(lambda run: flawed(run)[0]),
    "highest": number(lambda run: max(flawed(run))),
    "last step": number(lambda run: flawed(run)[-1]),
    "ρ = 1 at step": turning_points,
}
FORBIDDEN = {"fully correct, halfway": number(halfway), "ρ = 1 at step": number(turning_point, 0)}
OF_JUDGES = {
    "recall": "fapo_critic/recall",
    "specificity": "fapo_critic/sound_kept",
    "first-error accuracy": "fapo_critic/location",
}
KINDS = {kind: share_of_flaws(kind) for kind in ("arithmetic", "copied", "skipped", "answer", "other")}
KINDS["counted"] = lambda runs, when: str(flaws_of(runs).total())
TOOL_COLUMNS = {
    "accuracy": "shop",
    "fully correct": "shop/truly_correct",
    "flawed-positive rate": "shop/flawed_positive_rate",
    "looked up every price": "shop/looked_all_up",
    "calls per problem": "shop/calls",
    "runs": num_runs_at_all,
}
WORTH = {"outcome reward minus cost": earned}
EARNED = WORTH | {
    "accuracy": "shop",
    "fully correct": "shop/truly_correct",
    "calls per problem": "shop/calls",
    "runs": num_runs_at_all,
}
TOOL_KINDS = {
    "made-up price": "shop/flawed_made_up",
    "wrong sum": "shop/flawed_wrong_sum",
    "wrongly copied number": "shop/flawed_miscopied",
    "other flaw": "shop/flawed_other",
    "runs": num_runs_at_all,
}
OF_SHOP_JUDGE = {"sound, called sound": judged("sound", 1)}
for title, key in TOOL_KINDS.items():
    if isinstance(key, str):
        OF_SHOP_JUDGE[f"{title}, found"] = judged(key.removeprefix("shop/flawed_"), 0)
        OF_SHOP_JUDGE[f"{title}, located"] = judged(key.removeprefix("shop/flawed_"), 1)
OF_SHOP_JUDGE["runs"] = num_runs
CALLED = {
    "fully correct": accepted("truly correct"),
    "flawed positive": accepted("flawed positive"),
    "wrong": accepted("wrong"),
    "groups with a learning signal": lambda runs, when: cell([run[f"{when}_spread"] for run in runs]),
}


# ---- rows


@dataclass
class Row:
    """A row: the runs of an algorithm in some worlds."""

    labels: list[str]  # The first cells. {steps} becomes the number of steps.
    algorithm: str
    worlds: tuple[str, ...]
    when: str = "after"
    way: str = "mean@1"  # "mean@1" is temperature 1; judges also have "greedy".
    optional: bool = False  # Leave out the row unless there are runs in each of these worlds.


def each(titles: dict[str, str], worlds, first="", lead=(), optional=False) -> list[Row]:
    """Return a row for each algorithm in `titles`.

    If `first` names an algorithm, the first row shows the initial policy in that algorithm's runs.
    """
    rows = []
    if first:
        rows.append(Row([*lead, "initial policy"], first, worlds, when="before"))
    for name, title in titles.items():
        rows.append(Row([*lead, title], name, worlds, optional=optional))
    return rows


def by_checkpoint(titles: dict[str, str], worlds, first="rule") -> list[Row]:
    """Return the rows of `each` for one checkpoint after the other, which is the first cell."""
    rows = []
    for world in worlds:
        rows += each(titles, (world,), first, [world[-1]], optional=True)
    return rows


def judge_row(title: str, algorithm: str, worlds, when: str, way: str) -> Row:
    return Row([f"{title}, {WAYS[way]}"], algorithm, worlds, when, way)


def classified_rows() -> list[Row]:
    rows = []
    for name in CLASSIFIED:
        for when in ("first", "last"):
            rows.append(Row([f"{BESIDE[name]}, {when} {LAST} steps"], name, COMPARED[:1], when))
    return rows


def cost_rows() -> list[Row]:
    rows = []
    for name, title in OUTCOME_AND_FAPO.items():
        for end in COSTS:
            rows.append(Row([cost_of(end), title], name + end, SHOP))
    return rows


def normalised_rows(costs, varied: dict[str, str]) -> list[Row]:
    """Return rows for the outcome reward minus these costs. Each cost begins with the initial policy.

    Args:
        costs: The ends of the algorithms' names, as in COSTS.
        varied: Titles of further algorithms, whose runs start from checkpoint 0.
    """
    rows = []
    for end in costs:
        for titles, worlds, first in (NORMALISED, SHOP, f"outcome{end}"), (varied, SHOP[:1], ""):
            titles = {name + end: title for name, title in titles.items()}
            rows += each(titles, worlds, first, [cost_of(end)], optional=True)
    return rows


# ---- tables


@dataclass
class Table:
    """A table of runs. Its columns are as described above."""

    heads: list[str]  # heads of the rows' labels
    columns: dict
    rows: list[Row]
    same_seeds: bool = False  # Compare only checkpoints and seeds that all rows have.

    def cells(self, runs: list[dict]) -> list[list[str]]:
        """Return the text of all rows. Raises ValueError if a row has no run."""
        if self.same_seeds:
            runs = with_same_seeds(runs, [row.algorithm for row in self.rows])
        made = []
        for row in self.rows:
            there = {run["world"] for run in runs if run["algorithm"] == row.algorithm}
            if row.optional and not there.issuperset(row.worlds):
                continue
            some = of(runs, row.algorithm, *row.worlds)
            labels = [label.format(steps=some[0]["steps"]) for label in row.labels]
            made.append(labels + [cell_of(column, row, some, runs) for column in self.columns.values()])
        return made


def cell_of(column, row: Row, some: list[dict], runs: list[dict]) -> str:
    """Return a cell. `some` are the row's runs; a column of another world selects its own from all runs."""
    if isinstance(column, tuple):
        column, world = column
        some = runs_of(runs, row.algorithm, world.format(row.worlds[0][-1]))
    if not some:
        return ""
    if isinstance(column, str):
        return cell([run[row.when][f"{column}/{row.way}"] for run in some])
    if row.when == "before" and column not in (num_runs_at_all, earned):
        return ""
    return column(some, row.when)


WAYS = {"mean@1": "temperature 1", "greedy": "greedy"}
JUDGES = [
    ("three judges, warm-started", "trained_judge", STANDARD, "before"),
    ("three judges, after GRPO", "trained_judge", STANDARD, "after"),
    ("narrow judge, warm-started", "trained_judge", ("narrow",), "before"),
    ("narrow judge, after GRPO", "trained_judge", ("narrow",), "after"),
]
TRAINED = [
    ("warm-started", "first_judge", OWN[1:2], "before"),
    ("trained on the first world's flaws", "first_judge", OWN[1:2], "after"),
    ("trained on the policies' own flaws", "trained_judge", OWN[1:2], "after"),
]
IN_BOTH = [
    Row(["judge trained on flaws of every kind"], "fapo_judge", STANDARD),
    Row(["judge trained on forgotten carries only"], "fapo_judge", ("narrow",)),
]
IN_OWN_USE = {
    "fapo_first_judge": "judge trained on the first world's flaws",
    "fapo_judge": "judge trained on the policies' own flaws",
}
OUTCOME_AND_FAPO = chosen(TOOL_NAMES, "outcome", "fapo")
PAGE_TABLES = {
    "policies": Table([HELD_OUT], COLUMNS, each(FIRST_TABLE, STANDARD, first="rule")),
    "algorithms": Table(["method"], TOY | HALF, each(ALGORITHMS, COMPARED[:1], optional=True)),
    "narrow judge": Table(["last ten steps"], IN_USE, IN_BOTH),
    "stepping stones": Table(["flawed positives (of all samples)"], FLAWED, each(TWO, ("weak",))),
    "second world by start": Table(
        ["flawed positives (of correct answers)"], BY_START, each(OWN_ALGORITHMS, OWN, first="rule")
    ),
    "schedules of lambda": Table(["λ"], MAIN | MENDED, each(SCHEDULES, OWN[:1])),
    "forbidden from a weak start": Table(
        ["flawed positives are"], MAIN | FORBIDDEN, each(FORBIDDING, ("again_weak",), first="rule")
    ),
    "overlooking": Table([HELD_OUT], MAIN, each(OVERLOOKING_SHORT, OWN[1:2], first="rule")),
    "tools": Table([HELD_OUT], TOOL_COLUMNS | WORTH, each(OUTCOME_AND_FAPO, SHOP, first="outcome")),
    "normalisations": Table(["cost per call", "advantage"], EARNED, normalised_rows(SMALL_COSTS, {})),
    "classifier": Table(["method"], TOY, each(BESIDE, COMPARED[:1], first="rule")),
    "called sound": Table(["method and steps"], CALLED, classified_rows()),
}
CSV_TABLES = {
    "second_world": Table(
        ["checkpoint", HELD_OUT],
        OWN_COLUMNS,
        by_checkpoint(OWN_ALGORITHMS | VARIANTS | SCHEDULED, OWN[:1])
        + by_checkpoint(OWN_ALGORITHMS | OVERLOOKING, OWN[1:2])
        + by_checkpoint(OWN_ALGORITHMS, OWN[2:]),
    ),
    "kinds_of_flaws": Table(["flawed positives, last ten steps"], KINDS, each(OWN_ALGORITHMS, OWN)),
    "first_world": Table(["checkpoint", HELD_OUT], COLUMNS, by_checkpoint(NAMES, STANDARD)),
    "penalties": Table([HELD_OUT], COLUMNS, each(PENALTIES, ("warm0",))),
    "weak_start": Table([HELD_OUT], COLUMNS, each(TWO, ("weak",), first="rule")),
    "algorithms": Table(
        ["checkpoints", "method"],
        COLUMNS | HALF,
        each(ALGORITHMS, COMPARED[:1], lead=["1"], optional=True)
        + each(ALGORITHMS, COMPARED, lead=["3"], optional=True),
    ),
    "judges": Table(
        ["512 held-out solutions"], OF_JUDGES, [judge_row(*about, way) for about in JUDGES for way in WAYS]
    ),
    "own_judges": Table(
        ["512 held-out solutions"], OF_JUDGES, [judge_row(*about, way) for way in WAYS for about in TRAINED]
    ),
    "own_judges_in_use": Table(["last ten steps"], IN_USE | MISSED, each(IN_OWN_USE, OWN[1:2])),
    "shop": Table(["checkpoint", HELD_OUT], TOOL_COLUMNS, by_checkpoint(TOOL_NAMES | PAST, SHOP, "outcome")),
    "shop_flaws": Table(
        ["fraction of the 512 problems"],
        TOOL_KINDS,
        each(TOOL_NAMES | PAST, SHOP, first="outcome", optional=True),
    ),
    "shop_judge": Table(
        ["checkpoint", "run"],
        OF_SHOP_JUDGE,
        by_checkpoint(chosen(TOOL_NAMES, "fapo_judge") | PAST, SHOP, first=""),
    ),
    "shop_normalisations": Table(
        ["cost per call", "advantage"],
        EARNED | {"training samples, best five steps": best_earned},
        normalised_rows(ALL_COSTS, VARIED),
    ),
    "shop_costs": Table(
        ["cost per call", HELD_OUT],
        TOOL_COLUMNS | WORTH,
        cost_rows(),
        same_seeds=True,
    ),
}
RANKINGS = {  # worlds, flags and titles of the algorithms, and the metrics to show
    "tool world": (SHOP, FLAGS, TOOL_NAMES, "shop/truly_correct", "shop/flawed_positive_rate"),
    "second world": (
        OWN,
        SECOND_WORLD,
        OWN_ALGORITHMS,
        "toy/truly_correct",
        "toy/oracle_flawed_positive_rate",
    ),
}


def ranking(runs: list[dict], worlds, flags: dict[str, str], titles: dict[str, str], correct: str, rate: str):
    """Rank the algorithms that have runs from each checkpoint. Each cell is the median over the seeds."""
    ranked = []
    for name, arguments in flags.items():
        if not {run["world"] for run in runs if run["algorithm"] == name}.issuperset(worlds):
            continue
        every = of(runs, name, *worlds)
        scores, rates = [], []
        for world in worlds:
            ends = [run["after"] for run in of(runs, name, world)]
            scores.append(median(end[f"{correct}/mean@1"] for end in ends))
            rates.append(median(end[f"{rate}/mean@1"] for end in ends))
        cells = [f"{value:.2f}" for value in (*scores, fmean(scores), fmean(rates))]
        # The fastest run counts, because other runs shared its core.
        seconds = min(run["seconds"] for run in every if "seconds" in run)
        cells += [median_calls(every, "after"), f"{seconds:.0f}", str(len(every))]
        cells.append(f"`{arguments}`" if arguments else "none")
        ranked.append((-fmean(scores), [titles[name].replace("`", ""), *cells]))
    heads = ["method", *(f"checkpoint {world[-1]}" for world in worlds), "mean", "flawed-positive rate"]
    heads += ["judge calls per step", "seconds", "runs", "FLAGS"]
    return table(heads, *(cells for _, cells in sorted(ranked)))


def tables(runs: list[dict]) -> dict[str, str]:
    """Return all tables of the pages as {name: Markdown}."""
    made = {}
    for name, one in PAGE_TABLES.items():
        made[name] = table([*one.heads, *one.columns], *one.cells(runs))
    return made | {name: ranking(runs, *about) for name, about in RANKINGS.items()}


def csv_files(runs: list[dict]) -> dict[str, str]:
    """Return {name in docs/evidence: CSV text} for the tables that are too large for a page."""
    made = {}
    for name, one in CSV_TABLES.items():
        file = io.StringIO()
        rows = [[*one.heads, *one.columns], *one.cells(runs)]
        csv.writer(file, lineterminator="\n").writerows(rows)
        made[f"{name}.csv"] = file.getvalue()
    return made


def pages() -> list[Path]:
    return [*DOCS.parent.glob("*.md"), *DOCS.glob("*.md")]


def fill(page: str, made: dict[str, str]) -> str:
    """Return the page with its tables replaced by `made`. Raises KeyError if `made` lacks a table."""
    return re.sub(
        r"(<!-- (?:evidence|runs): ([\w ]+) -->\n).*?(<!-- end -->)",
        lambda found: f"{found[1]}\n{made[found[2]]}\n\n{found[3]}",
        page,
        flags=re.S,
    )


# ---- figures


def panels(width: float, height: float, rows: int, columns: int, **options):
    """Return a new figure and the list of its axes."""
    figure = Figure(figsize=(width, height), layout="constrained", dpi=90)
    return figure, list(figure.subplots(rows, columns, squeeze=False, **options).flat)


def save(figure, name: str, xlabel: str = "step", ylim=(-0.02, 1.02)) -> None:
    """Save panels, by default of fractions, with one legend below."""
    for axis in figure.axes:
        axis.set(xlabel=axis.get_xlabel() or xlabel, ylim=ylim)
        axis.grid(alpha=0.3)
    handles, labels = figure.axes[-1].get_legend_handles_labels()
    title = None  # A single panel has its own title.
    if len(figure.axes) > 1:
        title = "median and range of the runs"
    figure.legend(handles, labels, loc="outside lower center", ncols=4, title=title)
    figure.savefig(FOLDER / name)


def band(axis, curves: list[list[float]], colour: str, label: str) -> None:
    """Plot the median and the range of the smoothed curves at each step."""
    columns = list(zip(*map(smooth, curves), strict=True))
    steps = range(1, len(columns) + 1)
    axis.plot(steps, list(map(median, columns)), color=colour, linewidth=2, label=label.replace("`", ""))
    low, high = list(map(min, columns)), list(map(max, columns))
    axis.fill_between(steps, low, high, color=colour, alpha=0.15, linewidth=0)


def draw_panels(
    name: str, shape: tuple, places: list[tuple], titles: dict[str, str], fontsize, sharey
) -> None:
    """Plot curves. `places` contains the title, the metric and the runs by algorithm for each panel."""
    figure, axes = panels(*shape, sharey=sharey)
    for axis, (title, key, shown) in zip(axes, places):
        for algorithm, some in shown.items():
            if some:
                band(axis, [run["curves"][key] for run in some], COLOURS[algorithm], titles[algorithm])
        axis.set_title(title, fontsize=fontsize)
    save(figure, name)


def draw_three(name: str, shown: dict[str, list[dict]], titles: dict[str, str]) -> None:
    """Plot PANELS side by side. `shown` maps each algorithm to its runs."""
    places = [(title, key, shown) for key, title in PANELS.items()]
    draw_panels(name, (13.5, 4.2, 1, 3), places, titles, "large", True)


def draw_second_world(runs: list[dict]) -> None:
    """Plot each algorithm from each checkpoint: flawed positives above, fully correct answers below."""
    places = []
    for key in ("oracle_flawed_positive_rate", "truly_correct"):
        for world in OWN:
            shown = {name: runs_of(runs, name, world) for name in OWN_ALGORITHMS}
            places.append((f"checkpoint {world[-1]}: {PANELS[key]}", key, shown))
    draw_panels("second_world.png", (13.9, 7.6, 2, 3), places, OWN_ALGORITHMS, 10, "row")


def draw_weak_start(runs: list[dict]) -> None:
    """Plot three fractions of all samples, and mark when FAPO begins to discourage flawed positives."""
    figure, axes = panels(9.5, 4.2, 1, 2, sharey=True)
    for axis, (name, title) in zip(axes, TWO.items()):
        some = [shares(run) for run in of(runs, name, "weak")]
        for part in some[0]:
            band(axis, [share[part] for share in some], COLOURS[part], part.replace("truly", "fully"))
        axis.set_title(title)
    for turn in map(turning_point, of(runs, "fapo_oracle", "weak")):
        if turn < math.inf:
            axes[1].axvline(turn, color="black", linestyle=":", linewidth=1)
    axes[0].set_ylabel("fraction of all samples")
    save(figure, "weak_start.png")


def draw_judges(runs: list[dict]) -> None:
    """Plot the final metrics against the judge's recall. Recall 0 means outcome reward only."""
    recalls = {"rule": 0.0, "fapo_recall0.5": 0.5, "fapo_recall0.7": 0.7, "fapo_recall0.9": 0.9}
    recalls["fapo_oracle"] = 1.0
    served = {}
    for name, judge in SERVED.items():
        served[name] = of(runs, judge, OWN[1])[0]["after"]["fapo_critic/recall/greedy"]
    figure, (axis,) = panels(6.2, 4, 1, 1)
    for key, (label, colour) in ENDS.items():
        for some, style in (recalls, {"label": label}), (served, {"marker": "x"}):
            dots = []
            for name, recall in some.items():
                for run in of(runs, name, OWN[1]):
                    dots.append((recall, run["after"][f"toy/{key}/mean@1"]))
            axis.scatter(*zip(*dots), color=colour, **style)
    axis.set_title("FAPO after 40 steps, each run a dot; x: the served judges")
    save(figure, "judges.png", "recall of the judge")


def draw_variants(runs: list[dict]) -> None:
    """Plot the median and range of each variant's flawed-positive rate, from checkpoint 0 and its twin."""
    figure, (axis,) = panels(10, 6.4, 1, 1)
    worlds = (OWN[0], "checkpoint 0", "#0072B2", "o", -0.15), ("again0", "twin", "#D55E00", "s", 0.15)
    for world, label, colour, marker, shift in worlds:
        for place, name in enumerate(VARIANTS):
            ends = [run["after"] for run in runs_of(runs, name, world)]
            found = [end["toy/oracle_flawed_positive_rate/mean@1"] for end in ends]
            if found:
                axis.plot(
                    [min(found), max(found)], [place + shift] * 2, color=colour, alpha=0.35, linewidth=2
                )
                axis.scatter(median(found), place + shift, color=colour, marker=marker, zorder=3)
        axis.scatter([], [], color=colour, marker=marker, label=label)
    steps = of(runs, "rule_long", OWN[0])[0]["steps"]
    labels = [title.format(steps=steps).replace("`", "") for title in VARIANTS.values()]
    axis.set_yticks(range(len(labels)), labels)
    axis.invert_yaxis()
    axis.grid(alpha=0.3)
    axis.set_xlabel("flawed positives (fraction of correct answers), median and range of the runs")
    axis.set_xlim(0, 0.9)
    figure.legend(loc="outside lower center", ncols=2)
    figure.savefig(FOLDER / "variants.png")


def draw_shop(runs: list[dict]) -> None:
    """Plot the training curves of both rewards, and the final metrics for each cost of a look-up."""
    figure, axes = panels(11, 7.4, 2, 2)
    figure.suptitle("A tool that costs 0.03 per call: nine runs, smoothed over 5 steps")
    compared = with_same_seeds(runs, [name + end for name in OUTCOME_AND_FAPO for end in COSTS])
    *curves, ends = axes
    for name, label in OUTCOME_AND_FAPO.items():
        for axis, (key, title) in zip(curves, TOOL_PANELS.items()):
            band(axis, [run["curves"][key] for run in of(runs, name, *SHOP)], COLOURS[name], label)
            axis.set_title(title)
        values = []
        for place, end in enumerate(COSTS):
            some = of(compared, name + end, *SHOP)
            found = [run["after"]["shop/truly_correct/mean@1"] for run in some]
            ends.scatter([place] * len(found), found, color=COLOURS[name], s=22)
            values.append(median(found))
        ends.plot(range(len(COSTS)), values, color=COLOURS[name], label=label)
    ends.set(title="fully correct after 40 steps: each run, and the median", xlabel="cost per call")
    ends.set_xticks(range(len(COSTS)), map(cost_of, COSTS))
    save(figure, "shop.png", ylim=None)


def draw(runs: list[dict]) -> None:
    draw_three("policies.png", {name: of(runs, name) for name in NAMES}, NAMES)  # nine runs each
    longer = {name: of(runs, long, OWN[0]) for name, long in LONG.items()}
    draw_three("second_world_long.png", longer, OWN_ALGORITHMS)
    beside = {name: of(runs, name, COMPARED[0]) for name in ("rule", *CLASSIFIED, "fapo_judge")}
    draw_three("classifier.png", beside, BESIDE)
    for figure in (draw_weak_start, draw_second_world, draw_judges, draw_variants, draw_shop):
        figure(runs)


def main() -> None:
    config = tyro.cli(Config)
    try:
        runs = read()
        if config.runs:
            runs += collect(config.runs)  # The dict keeps the last run of each name.
            runs = list({(run["world"], run["algorithm"], run["seed"]): run for run in runs}.values())
        made, files = tables(runs), csv_files(runs)  # Write nothing if a run is missing.
        draw(runs)
    except ValueError as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(2)
    for name in FILES:
        lines = [json.dumps(run) + "\n" for run in runs if file_of(run) == name]
        (FOLDER / name).write_text("".join(lines))
    for name, text in files.items():
        (FOLDER / name).write_text(text)
    for page in pages():
        page.write_text(fill(page.read_text(), made))
    print(f"{len(runs)} runs; tables: {', '.join(made)}")


if __name__ == "__main__":
    main()
