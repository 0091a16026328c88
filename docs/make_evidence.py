"""Collect finished runs in docs/evidence/runs.jsonl, and generate the figures, tables and CSV files from it.

    make evidence                                         # seven to nine hours: the runs, then this script
    python docs/make_evidence.py --runs outputs/evidence  # adds the finished runs of recipes/evidence.sh
    python docs/make_evidence.py                          # regenerates figures and tables from runs.jsonl

Each line of runs.jsonl is one run: its world (a checkpoint with its data), algorithm and seed, the held-out
metrics before and after training, and the rollout metrics of each step. In the pages, each table stands
between <!-- evidence: NAME --> and <!-- end -->. Larger tables are CSV files. A test checks that all tables
match runs.jsonl. A cell is the median of the runs, with the range in parentheses. A run in --runs replaces an
earlier run with the same world, algorithm and seed.
"""

import csv
import io
import json
import math
import os
import re
import statistics
import sys
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from random import Random

DOCS = Path(__file__).resolve().parent
sys.path.insert(0, str(DOCS.parent))

import tyro
from matplotlib.figure import Figure

from compute_score import split_paragraphs
from run_folder import read_lines
from toy.report import COLUMNS, cell, read_metrics, table
from toy.toy_world import parse_problem, write_solution

FILE = DOCS / "evidence" / "runs.jsonl"
PAGES = (DOCS.parent / "README.md", DOCS / "evidence.md", DOCS / "algorithms.md", DOCS / "questions.md")
WAYS = {"mean@1": "temperature 1", "greedy": "greedy"}
PANELS = {
    "acc": "answer accuracy",
    "oracle_flawed_positive_rate": "flawed positives by the oracle\n(fraction of correct answers)",
    "truly_correct": "fully correct\n(correct answer, no wrong step)",
    "flawed_positive_rate": "flawed positives as the judge sees them\n(fraction of correct answers)",
}
STANDARD = ("warm0", "warm1", "warm2")
COMPARED = ("algo0", "algo1", "algo2")  # separate checkpoints for the comparison of algorithms
NAMES = {
    "rule": "outcome reward only",
    "fapo_judge": "FAPO, served judge",
    "fapo_oracle": "FAPO, oracle as judge",
    "papo_oracle": "PAPO, oracle as judge",
}
FIRST_TABLE = {  # rows of the table in the README
    "rule": "GRPO, outcome reward only",
    "fapo_judge": "FAPO, judge trained and served",
    "fapo_oracle": "FAPO, oracle as the judge",
}
ALGORITHMS = {
    "rule": "outcome reward only",
    "fapo_oracle": "FAPO",
    "prefix_oracle": "FAPO, `--credit prefix`",
    "vppo_oracle": "VPPO, FAPO's score",
    "papo_oracle": "PAPO",
    "dr_grpo_oracle": "Dr. GRPO",
    "terms_oracle": "terms: acc=1 flawed_positive=-0.5",
    "gspo_oracle": "GSPO",
    "cispo_oracle": "CISPO",
    "lora_oracle": "FAPO with LoRA",
    "fapo_judge": "FAPO, served judge",
    "prefix_judge": "FAPO, served judge, `--credit prefix`",
    "vppo_judge": "VPPO, served judge",
}
# The second world's three shipped checkpoints (toy/models). Another kind of processor produces their twins,
# again0 to again2, from the same seeds.
OWN = ("own0", "own1", "own2")
OWN_ALGORITHMS = {
    "rule": "outcome reward only",
    "fapo_oracle": "FAPO",
    "prefix_oracle": "FAPO, `--credit prefix`",
    "vppo_oracle": "VPPO, FAPO's score",
    "papo_oracle": "PAPO",
    "steps_oracle": "FAPO, `--advantage steps`",
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
    "prefix_oracle": "FAPO, `--credit prefix`",
    "prefix_long": "`--credit prefix`, {steps} steps",
    "prefix_right": "`--credit prefix`, judge queried on correct answers only",
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
SCHEDULED = {name: f"FAPO, λ: {SCHEDULES[name]}" for name in ("later", "linear", "majority")}
SCHEDULED["later2"] = "FAPO, λ: 0 for 20 steps, then 2"
UNASKED = {"later": 20, "later2": 20}  # number of initial steps without a judge, because lambda is 0
OVERLOOKING = {  # FAPO with judges of different recall, from the second world's checkpoint 1
    "rule": "outcome reward only, no judge",
    "fapo_recall0.5": "FAPO, recall .5",
    "fapo_recall0.7": "FAPO, recall .7",
    "fapo_recall0.9": "FAPO, recall .9",
    "fapo_first_judge": "FAPO, served judge, first world's flaws",
    "fapo_first_judge_long": "FAPO, served judge, first world's flaws, {steps} steps",
    "fapo_judge": "FAPO, served judge, the policies' own flaws",
    "fapo_judge_long": "FAPO, served judge, the policies' own flaws, {steps} steps",
    "fapo_oracle": "FAPO, oracle as judge",
}
OWN_JUDGES = {"first_judge": "the first world's flaws", "trained_judge": "the policies' own flaws"}
SERVED = {"fapo_first_judge": "first_judge", "fapo_judge": "trained_judge"}
# These algorithms also query the judge on wrong answers.
LOCATED = ("prefix_oracle", "vppo_oracle", "steps_oracle", "place_oracle", "prefix_long", "vppo_long")
OWN_COLUMNS = {
    "accuracy": "toy",
    "flawed positives": "toy/oracle_flawed_positive_rate",
    "fully correct": "toy/truly_correct",
    "all sums right": "toy/sums_right",
    '"How many?" accuracy': "toy_total",
}
MAIN_COLUMNS = {name: COLUMNS[name] for name in ("flawed positives", "fully correct")}
TOY_COLUMNS = {"accuracy": COLUMNS["accuracy"], **MAIN_COLUMNS}  # without "How many?" questions
HALF_CORRECT = "step at which half are fully correct"
REPEATED = ("flawed positives", "fully correct")  # columns that are also shown for the twin checkpoint
COLOURS = {  # the Okabe-Ito palette, which is safe for colour-blind readers
    "rule": "#D55E00",
    "fapo_judge": "#0072B2",
    "fapo_oracle": "#56B4E9",
    "papo_oracle": "#CC79A7",
    "prefix_oracle": "#E69F00",
    "vppo_oracle": "#000000",
    "steps_oracle": "#999999",
    "distill": "#7F4F24",
}
IN_USE = {
    "accuracy": "acc",
    "flawed positives found by the judge": "flawed_positive_rate",
    "flawed positives counted by the oracle": "oracle_flawed_positive_rate",
}
OF_JUDGES = {
    "recall": "fapo_critic/recall",
    "specificity": "fapo_critic/sound_kept",
    "first-error accuracy": "fapo_critic/location",
}


@dataclass
class Config:
    """Generate the figures and tables from runs.jsonl. With --runs, add finished runs to runs.jsonl first."""

    runs: Path | None = None
    """Folder with the finished runs: WORLD/ALGORITHM_seedN and WORLD/trained_judge."""


def collect(folder: Path) -> list[dict]:
    """Return one dict per run, sorted by name. Raises ValueError if a run has not finished."""
    runs = []
    for path in sorted(folder.glob("*/*/metrics.jsonl")):
        if path.parent.parent.name.startswith("shop"):  # collected by docs/make_shop.py
            continue
        metrics = read_metrics(path.parent)
        algorithm, _, seed = path.parent.name.partition("_seed")
        before, after = (
            {key[4:]: round(line[key], 4) for key in line if re.match(r"val/.*/(mean@1|greedy)$", key)}
            for line in (metrics[0], metrics[-1])
        )
        curves = {
            name: [round(line[f"reward/{name}"], 4) for line in metrics if f"reward/{name}" in line]
            for name in (*PANELS, "lambda")
        }
        run = dict(world=path.parent.parent.name, algorithm=algorithm, seed=int(seed or 0))
        run |= dict(steps=metrics[-1]["step"], before=before, after=after, seconds=seconds_of(metrics))
        if run["world"] in OWN and algorithm not in OWN_JUDGES:
            run |= count_flaws(path.parent, since=run["steps"] - 9)
        runs.append(run | {"curves": {name: curve for name, curve in curves.items() if curve}})
    if not runs:
        raise ValueError(f"--runs {folder}: contains no finished run; run make evidence first")
    return runs


def seconds_of(metrics: list[dict]) -> float:
    """Return the total duration of a run's steps."""
    return round(sum(line.get("time/step", 0.0) for line in metrics), 1)


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


def count_flaws(folder: Path, since: int) -> dict[str, dict | int]:
    """Count flaws in the training samples from step `since` on.

    Returns:
        A dict with the number of flawed positives of each kind ("flaws"), the number of correct answers that
        the judge accepted ("passed"), and the flawed positives of each kind among those ("overlooked").
    """
    flaws, overlooked, passed = Counter(), Counter(), 0
    for line in read_lines(folder / "samples.jsonl")[0]:
        info = line["reward_extra_info"]
        if line["split"] != "train" or line["step"] < since:
            continue
        is_right = info["oracle_flawed_positive"] or info["truly_correct"]
        is_passed = is_right and info.get("flawed_positive") is False
        passed += is_passed
        if info["oracle_flawed_positive"]:
            kind = kind_of_flaw(line["prompt"], line["response"])
            flaws[kind] += 1
            overlooked[kind] += is_passed
    return {"flaws": dict(flaws), "passed": passed, "overlooked": dict(overlooked)}


def read() -> list[dict]:
    return [json.loads(line) for line in FILE.read_text().splitlines()]


def of(runs: list[dict], algorithm: str, *worlds: str) -> list[dict]:
    """Return the runs of an algorithm in these worlds (default: STANDARD). Raises ValueError if empty."""
    found = [run for run in runs if run["algorithm"] == algorithm and run["world"] in (worlds or STANDARD)]
    if not found:
        where = " or ".join(worlds or STANDARD)
        raise ValueError(f"no finished run of {algorithm} in {where}; run make evidence first")
    return found


def row(
    name: str, runs: list[dict], columns: dict[str, str], way: str = "mean@1", when: str = "after"
) -> list[str]:
    return [name, *(cell([run[when][f"{key}/{way}"] for run in runs]) for key in columns.values())]


def half_correct(run: dict) -> float:
    """Return the first step at which half of the samples are fully correct (smoothed), or infinity."""
    values = smooth(run["curves"].get("truly_correct", []))
    return next((step for step, value in enumerate(values, 1) if value >= 0.5), math.inf)


def half_mended(run: dict) -> float:
    """Return the first step at which the smoothed flawed-positive rate has halved, or infinity."""
    values = smooth(run["curves"]["oracle_flawed_positive_rate"])
    half = run["before"]["toy/oracle_flawed_positive_rate/mean@1"] / 2
    return next((step for step, value in enumerate(values, 1) if value <= half), math.inf)


def algorithm_rows(runs: list[dict], columns: dict[str, str], *worlds: str) -> list[list[str]]:
    """Return the rows of the algorithms with finished runs in each of these worlds."""
    rows = []
    for algorithm, title in ALGORITHMS.items():
        some = [run for run in runs if run["algorithm"] == algorithm and run["world"] in worlds]
        if {run["world"] for run in some} == set(worlds):
            reached = cell(list(map(half_correct, some)), 0)
            rows.append([*row(title, some, columns), reached, str(len(some))])
    return rows


def algorithms_table(runs: list[dict], *worlds: str) -> str:
    """Return a table of the algorithms. algorithms.csv also has the accuracy on "How many?" questions."""
    rows = algorithm_rows(runs, TOY_COLUMNS, *worlds)
    return table(["method", *TOY_COLUMNS, HALF_CORRECT, "runs"], *rows)


def calls(run: dict) -> float:
    """Return the mean number of judge calls per step of 128 samples.

    An algorithm queries the judge on no answers, on the correct answers or on all answers.
    """
    if run["algorithm"].startswith(("rule", "distill")):
        return 0.0
    if run["algorithm"].startswith(LOCATED):
        return 128.0
    right = run["curves"]["acc"]
    return 128 * sum(right[UNASKED.get(run["algorithm"], 0) :]) / len(right)


def schedule_table(runs: list[dict]) -> str:
    """Return a table of FAPO with fixed and scheduled lambda from the second world's checkpoint 0."""
    rows = []
    for name, title in SCHEDULES.items():
        some = of(runs, name, OWN[0])
        asked = f"{statistics.median(map(calls, some)):.0f}"
        rows.append([*row(title, some, MAIN_COLUMNS), cell(list(map(half_mended, some)), 0), asked])
    return table(["λ", *MAIN_COLUMNS, HALVED, "judge calls per step"], *rows)


def forbidding_table(runs: list[dict], world: str) -> str:
    """Return a table that compares forbidding flawed positives from the first step, later or never."""
    rows = [row("initial policy", of(runs, "rule", world), MAIN_COLUMNS, when="before") + ["", ""]]
    for name, title in FORBIDDING.items():
        some = of(runs, name, world)
        halfway = [smooth(run["curves"]["truly_correct"])[run["steps"] // 2 - 1] for run in some]
        turns = [turning_point(run) or math.inf for run in some]
        rows.append([*row(title, some, MAIN_COLUMNS), cell(halfway), cell(turns, 0)])
    heads = [*MAIN_COLUMNS, "fully correct, halfway", "ρ = 1 at step"]
    return table(["flawed positives are", *heads], *rows)


def of_start(runs: list[dict], name: str, title: str, world: str, when: str = "after") -> list[str]:
    """Return a row for the columns OWN_HEADS: an algorithm's results from a checkpoint and from its twin."""
    found = of(runs, name, world)
    twin = [run for run in runs if (run["world"], run["algorithm"]) == (world.replace("own", "again"), name)]
    cells = row(title.format(steps=found[0]["steps"]), found, OWN_COLUMNS, when=when)
    if when == "after":
        asked = f"{statistics.median(map(calls, found)):.0f}"
        cells += [cell(list(map(half_mended, found)), 0), asked, str(len(found))]
    else:
        cells += ["", "", ""]
    for name in REPEATED:
        if twin:
            cells.append(cell([run[when][f"{OWN_COLUMNS[name]}/mean@1"] for run in twin]))
        else:
            cells.append("")
    return cells


def own_rows(runs: list[dict], names: dict[str, str], world: str, head: str = "") -> list[list[str]]:
    """Return rows for a checkpoint of the second world and for each algorithm with runs from it."""
    there = {run["algorithm"] for run in runs if run["world"] == world}
    rows = [of_start(runs, "rule", f"{head}initial policy", world, "before")]
    return rows + [of_start(runs, name, head + names[name], world) for name in names if name in there]


HALVED = "step at which the flawed-positive rate has halved"
OWN_HEADS = ["512 held-out problems", *OWN_COLUMNS, HALVED, "judge calls per step", "runs"]
OWN_HEADS += [f"{name}, twin checkpoint" for name in REPEATED]


def judges_table(runs: list[dict]) -> str:
    """Return a table of FAPO with judges of different recall; second_world.csv has more columns and rows."""
    shown = ["512 held-out problems", *MAIN_COLUMNS]
    places = [OWN_HEADS.index(name) for name in shown]
    short = {name: title for name, title in OVERLOOKING.items() if not name.endswith("_long")}
    rows = own_rows(runs, short, OWN[1])
    return table(shown, *([cells[place] for place in places] for cells in rows))


def flaws_by_start(runs: list[dict]) -> str:
    """Return a table of flawed-positive rates, with one row per algorithm and one column per checkpoint."""
    columns, place = {}, OWN_HEADS.index("flawed positives")
    for world in starts(runs):
        rows = own_rows(runs, OWN_ALGORITHMS, world)
        columns[f"checkpoint {world[-1]}"] = {cells[0]: cells[place] for cells in rows}
    titles = ["initial policy", *OWN_ALGORITHMS.values()]
    rows = [[title, *(column.get(title, "") for column in columns.values())] for title in titles]
    return table(["flawed positives (of correct answers)", *columns], *rows)


def csv_table(heads: list[str], *rows: list[str]) -> str:
    file = io.StringIO()
    csv.writer(file, lineterminator="\n").writerows([heads, *rows])
    return file.getvalue()


def csv_files(runs: list[dict]) -> dict[str, str]:
    """Return {name in docs/evidence: CSV text} for the tables that are too large for a page."""
    made, rows = {}, []
    for world, names in ((OWN[0], OWN_ALGORITHMS | VARIANTS | SCHEDULED),
                         (OWN[1], OWN_ALGORITHMS | OVERLOOKING), (OWN[2], OWN_ALGORITHMS)):  # fmt: skip
        rows += [[world[-1], *cells] for cells in own_rows(runs, names, world)]
    made["second_world.csv"] = csv_table(["checkpoint", *OWN_HEADS], *rows)
    made["kinds_of_flaws.csv"] = flaw_table(runs)
    heads, rows = ["512 held-out problems", *COLUMNS], []
    for number, world in enumerate(STANDARD):
        rows.append([str(number), *row("initial policy", of(runs, "rule", world), COLUMNS, when="before")])
        rows += [[str(number), *row(NAMES[name], of(runs, name, world), COLUMNS)] for name in NAMES]
    made["first_world.csv"] = csv_table(["checkpoint", *heads], *rows)
    penalties = {"0 (outcome reward only)": "rule", "2/3": "penalty0.667"}
    penalties |= {"1": "fapo_oracle", "4/3": "penalty1.333"}
    rows = [row(f"λ = {penalty}", of(runs, name, "warm0"), COLUMNS) for penalty, name in penalties.items()]
    made["penalties.csv"] = csv_table(heads, *rows)
    rows = []
    for title, worlds in (("three judges", STANDARD), ("narrow judge", ("narrow",))):
        for when, trained in (("before", "warm-started"), ("after", "after GRPO")):
            judges = of(runs, "trained_judge", *worlds)
            for way, label in WAYS.items():
                rows.append(row(f"{title}, {trained}, {label}", judges, OF_JUDGES, way, when))
    made["judges.csv"] = csv_table(["512 held-out solutions", *OF_JUDGES], *rows)
    rows = [["1", *cells] for cells in algorithm_rows(runs, COLUMNS, COMPARED[0])]
    rows += [["3", *cells] for cells in algorithm_rows(runs, COLUMNS, *COMPARED)]
    made["algorithms.csv"] = csv_table(["checkpoints", "method", *COLUMNS, HALF_CORRECT, "runs"], *rows)
    weak = {name: of(runs, name, "weak") for name in ("rule", "fapo_oracle")}
    rows = [row("initial policy", weak["rule"], COLUMNS, when="before")]
    rows += [row(NAMES[name], some, COLUMNS) for name, some in weak.items()]
    made["weak_start.csv"] = csv_table(heads, *rows)
    rows = []
    for way, label in WAYS.items():
        rows.append(row(f"warm-started, {label}", of(runs, "first_judge", OWN[1]), OF_JUDGES, way, "before"))
        for name, title in OWN_JUDGES.items():
            rows.append(row(f"trained on {title}, {label}", of(runs, name, OWN[1]), OF_JUDGES, way))
    made["own_judges.csv"] = csv_table(["512 held-out solutions", *OF_JUDGES], *rows)
    rows = []
    for name, judge in SERVED.items():
        found = of(runs, name, OWN[1])
        missed = [sum(run["overlooked"].values()) / run["passed"] for run in found]
        rows.append([*in_use(OWN_JUDGES[judge], found), cell(missed)])
    heads = ["last ten steps", *IN_USE, "flawed positives (of accepted answers)"]
    made["own_judges_in_use.csv"] = csv_table(heads, *rows)
    return made


def starts(runs: list[dict]) -> list[str]:
    """Return the checkpoints of the second world with runs of the first four algorithms."""
    core = set(list(OWN_ALGORITHMS)[:4])
    return [world for world in OWN if core <= {run["algorithm"] for run in runs if run["world"] == world}]


def flaw_table(runs: list[dict]) -> str:
    """Return a CSV table of the kinds of flaws in the last ten steps, as fractions over all checkpoints."""
    kinds = ("arithmetic", "copied", "skipped", "answer", "other")
    rows = []
    for name, title in OWN_ALGORITHMS.items():
        some = [run for run in runs if run["algorithm"] == name and run["world"] in OWN]
        found = sum((Counter(run["flaws"]) for run in some), Counter())
        if not found:
            continue
        rows.append([title, *(f"{found[kind] / found.total():.2f}" for kind in kinds), str(found.total())])
    return csv_table(["flawed positives, last ten steps", *kinds, "counted"], *rows)


def in_use(shown: str, runs: list[dict]) -> list[str]:
    """Return a row that compares a judge's verdicts during training with the oracle's."""
    curves = [[statistics.fmean(run["curves"][key][-10:]) for run in runs] for key in IN_USE.values()]
    return [f"judge trained on {shown}", *map(cell, curves)]


def tables(runs: list[dict]) -> dict[str, str]:
    """Return all tables of the pages as {name: Markdown}."""
    heads, made = ["512 held-out problems", *COLUMNS], {}
    rows = [row("initial policy", of(runs, "rule"), COLUMNS, when="before")]
    for algorithm, title in FIRST_TABLE.items():
        rows.append(row(title, of(runs, algorithm), COLUMNS))
    made["policies"] = table(heads, *rows)
    made |= {"algorithms": algorithms_table(runs, COMPARED[0])}
    shown = {"flaws of every kind": STANDARD, "forgotten carries only": ("narrow",)}
    rows = [in_use(name, of(runs, "fapo_judge", *worlds)) for name, worlds in shown.items()]
    made["narrow judge"] = table(["last ten steps", *IN_USE], *rows)
    rows = []
    for name in ("rule", "fapo_oracle"):
        some = of(runs, name, "weak")
        flawed = [smooth(shares(run)["flawed positives"]) for run in some]
        first, last = cell([values[0] for values in flawed]), cell([values[-1] for values in flawed])
        turns = sorted(turning_point(run) or math.inf for run in some)
        highest = cell(list(map(max, flawed)))
        rows.append([NAMES[name], first, highest, last, ", ".join(f"{turn:.0f}" for turn in turns)])
    heads = ["flawed positives (of all samples)", "first step", "highest", "last step", "ρ = 1 at step"]
    made["stepping stones"] = table(heads, *rows)
    made["second world by start"] = flaws_by_start(runs)
    made["schedules of lambda"] = schedule_table(runs)
    made["forbidden from a weak start"] = forbidding_table(runs, "again_weak")
    return made | {"overlooking": judges_table(runs)}


def fill(page: str, made: dict[str, str]) -> str:
    """Return the page with its tables replaced by `made`. Raises KeyError if `made` lacks a table."""
    return re.sub(r"(<!-- evidence: ([\w ]+) -->\n).*?(<!-- end -->)",
                  lambda found: f"{found[1]}\n{made[found[2]]}\n\n{found[3]}", page, flags=re.S)  # fmt: skip


def smooth(values: list[float]) -> list[float]:
    """Return the mean of each value and the four values before it."""
    return [statistics.fmean(values[max(0, end - 5) : end]) for end in range(1, len(values) + 1)]


def save(figure, path: Path, of_what: str = "step", about: str = "median and range of the runs") -> None:
    """Save panels of fractions with one legend below. `about` explains the lines and bands."""
    for axis in figure.axes:
        axis.set(xlabel=of_what, ylim=(-0.02, 1.02))
        axis.grid(alpha=0.3)
    handles, labels = figure.axes[-1].get_legend_handles_labels()
    title = about if len(figure.axes) > 1 else None  # A single panel has its own title.
    figure.legend(handles, labels, loc="outside lower center", ncols=4, title=title)
    figure.savefig(path)


def band(axis, curves: list[list[float]], colour: str, label: str) -> None:
    """Plot the median and the range of the smoothed curves at each step."""
    columns = list(zip(*map(smooth, curves), strict=True))
    steps = range(1, len(columns) + 1)
    axis.plot(steps, list(map(statistics.median, columns)), color=colour, linewidth=2, label=label)
    low, high = list(map(min, columns)), list(map(max, columns))
    axis.fill_between(steps, low, high, color=colour, alpha=0.15, linewidth=0)


def draw_side_by_side(shown: dict[str, list[dict]], names: dict[str, str], path: Path) -> None:
    """Plot the first three of PANELS. `shown` maps each algorithm to its runs, and `names` to its label."""
    figure = Figure(figsize=(13.5, 4.2), layout="constrained", dpi=90)
    for axis, (key, title) in zip(figure.subplots(1, 3, sharey=True), PANELS.items()):
        for name, some in shown.items():
            band(axis, [run["curves"][key] for run in some], COLOURS[name], names[name].replace("`", ""))
        axis.set_title(title)
    save(figure, path)


def draw_second_world(runs: list[dict], path: Path) -> None:
    """Plot each algorithm from each checkpoint: flawed positives above, fully correct answers below."""
    worlds = starts(runs)
    figure = Figure(figsize=(1 + 4.3 * len(worlds), 7.6), layout="constrained", dpi=90)
    keys = ("oracle_flawed_positive_rate", "truly_correct")
    for axes, key in zip(figure.subplots(2, len(worlds), sharey="row", squeeze=False), keys):
        for axis, world in zip(axes, worlds):
            for name, label in OWN_ALGORITHMS.items():
                curves = [run["curves"][key] for run in runs
                          if (run["world"], run["algorithm"]) == (world, name)]  # fmt: skip
                if curves:
                    band(axis, curves, COLOURS[name], label.replace("`", ""))
            axis.set_title(f"checkpoint {world[-1]}: {PANELS[key]}", fontsize=10)
    save(figure, path)


def draw_judges(runs: list[dict], path: Path) -> None:
    """Plot the final metrics against the judge's recall. Recall 0 means outcome reward only."""
    recalls = {"rule": 0.0, "fapo_oracle": 1.0}
    recalls |= {f"fapo_recall{recall}": recall for recall in (0.5, 0.7, 0.9)}
    keys = {"oracle_flawed_positive_rate": "#D55E00", "truly_correct": "#0072B2"}
    keys["sums_right"] = "#999999"
    served = {name: of(runs, judge, OWN[1])[0]["after"]["fapo_critic/recall/greedy"]
              for name, judge in SERVED.items()}  # fmt: skip
    figure = Figure(figsize=(6.2, 4), layout="constrained", dpi=90)
    axis = figure.subplots()
    for key, colour in keys.items():
        label = key.removeprefix("oracle_").replace("truly", "fully").replace("_", " ")
        dots = [(recall, run["after"][f"toy/{key}/mean@1"]) for name, recall in recalls.items()
                for run in runs if (run["world"], run["algorithm"]) == (OWN[1], name)]  # fmt: skip
        axis.scatter(*zip(*dots), color=colour, label=label)
        for name, recall in served.items():
            crosses = [run["after"][f"toy/{key}/mean@1"] for run in of(runs, name, OWN[1])]
            axis.scatter([recall] * len(crosses), crosses, color=colour, marker="x")
    axis.set_title("FAPO after 40 steps, each run a dot; x: the served judges")
    save(figure, path, "recall of the judge")


def draw_variants(runs: list[dict], path: Path) -> None:
    """Plot the median and range of each variant's flawed-positive rate, from checkpoint 0 and its twin."""
    key = "toy/oracle_flawed_positive_rate/mean@1"
    worlds = {OWN[0]: ("checkpoint 0", "#0072B2", "o", -0.15), "again0": ("twin", "#D55E00", "s", 0.15)}
    figure = Figure(figsize=(10, 6.4), layout="constrained", dpi=90)
    axis = figure.subplots()
    labels = []
    for place, (name, title) in enumerate(VARIANTS.items()):
        labels.append(title.format(steps=of(runs, name, OWN[0])[0]["steps"]).replace("`", ""))
        for world, (_, colour, marker, shift) in worlds.items():
            found = [run["after"][key] for run in runs if (run["world"], run["algorithm"]) == (world, name)]
            if found:
                height = place + shift
                axis.plot([min(found), max(found)], [height, height], color=colour, alpha=0.35, linewidth=2)
                axis.scatter(statistics.median(found), height, color=colour, marker=marker, zorder=3)
    for label, colour, marker, _ in worlds.values():
        axis.scatter([], [], color=colour, marker=marker, label=label)
    axis.set_yticks(range(len(labels)), labels)
    axis.invert_yaxis()
    axis.grid(alpha=0.3)
    axis.set_xlabel("flawed positives (fraction of correct answers), median and range of the runs")
    axis.set_xlim(0, 0.9)
    figure.legend(loc="outside lower center", ncols=2)
    figure.savefig(path)


def shares(run: dict) -> dict[str, list[float]]:
    """Return the paper's alpha, gamma and beta (appendix A) at each step, as fractions of all samples."""
    right, sound = run["curves"]["acc"], run["curves"]["truly_correct"]
    return {
        "truly correct": sound,
        "flawed positives": [a - s for a, s in zip(right, sound)],
        "wrong": [1 - a for a in right],
    }


def turning_point(run: dict) -> int | None:
    """Return the first step at which fully correct samples outnumber wrong ones, after smoothing, or None."""
    smoothed = {name: smooth(values) for name, values in shares(run).items()}
    more = [sound > wrong for sound, wrong in zip(smoothed["truly correct"], smoothed["wrong"])]
    return more.index(True) + 1 if True in more else None


def draw_weak_start(runs: list[dict], path: Path) -> None:
    """Plot three fractions of all samples, and mark when FAPO begins to discourage flawed positives."""
    figure = Figure(figsize=(9.5, 4.2), layout="constrained", dpi=90)
    colours = {"truly correct": "#0072B2", "flawed positives": "#D55E00", "wrong": "#999999"}
    for axis, name in zip(figure.subplots(1, 2, sharey=True), ("rule", "fapo_oracle")):
        some = of(runs, name, "weak")
        for part, colour in colours.items():
            label = part.replace("truly", "fully")
            band(axis, [shares(run)[part] for run in some], colour, label)
        for turn in filter(None, map(turning_point, some if name == "fapo_oracle" else [])):
            axis.axvline(turn, color="black", linestyle=":", linewidth=1)
        axis.set_title(NAMES[name])
    figure.axes[0].set_ylabel("fraction of all samples")
    save(figure, path)


def main() -> None:
    config = tyro.cli(Config)
    try:
        runs = read()
        if config.runs:
            runs += collect(config.runs)  # The dict keeps the last run of each name.
            runs = list({(run["world"], run["algorithm"], run["seed"]): run for run in runs}.values())
        made, files = tables(runs), csv_files(runs)  # Write nothing if a run is missing.
        FILE.write_text("".join(json.dumps(run) + "\n" for run in runs))
        policies = {name: of(runs, name) for name in NAMES}  # nine runs each
        draw_side_by_side(policies, NAMES, FILE.parent / "policies.png")
        draw_weak_start(runs, FILE.parent / "weak_start.png")
        draw_second_world(runs, FILE.parent / "second_world.png")
        longer = {name: of(runs, long, OWN[0]) for name, long in LONG.items()}
        draw_side_by_side(longer, OWN_ALGORITHMS, FILE.parent / "second_world_long.png")
        draw_judges(runs, FILE.parent / "judges.png")
        draw_variants(runs, FILE.parent / "variants.png")
        for name, text in files.items():
            FILE.with_name(name).write_text(text)
        for page in PAGES:
            page.write_text(fill(page.read_text(), made))
    except ValueError as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(2)
    print(f"{len(runs)} runs; tables: {', '.join(made)}")


if __name__ == "__main__":
    main()
