"""Collect finished runs in docs/evidence/*.jsonl, and generate all figures, tables and CSV files from them.

    make evidence                                         # nine to twelve hours: the runs, then this script
    python docs/make_evidence.py --runs outputs/evidence  # adds the finished runs of recipes/evidence.sh
    python docs/make_evidence.py --runs outputs/disrm     # adds the finished runs of recipes/toy_disrm.sh
    python docs/make_evidence.py                          # regenerates figures and tables

Each line of a JSONL file is one run: its world (a checkpoint with its data), algorithm and seed, the held-out
metrics before and after training, and the rollout metrics of each step. docs/evidence/tables.toml describes
all tables: their rows, columns and titles. In the pages, each table stands between <!-- evidence: NAME -->
and <!-- end -->. Larger tables are CSV files. A test checks that all tables match the JSONL files. A cell is
the median of the runs, with the range in parentheses. A run in --runs replaces an earlier run with the same
world, algorithm and seed.
"""

import csv
import io
import json
import math
import re
import sys
import tomllib
from collections import Counter, defaultdict
from dataclasses import dataclass
from pathlib import Path
from random import Random
from statistics import fmean, median

DOCS = Path(__file__).resolve().parent
sys.path.insert(0, str(DOCS.parent))

import numpy as np
import tyro
from matplotlib.figure import Figure

from command_line import one_line_errors
from compute_score import split_paragraphs
from run_folder import read_lines, write_lines
from toy.report import cell, read_metrics, table
from toy.shop_world import FLAWS as SHOP_FLAWS
from toy.toy_world import first_difference, parse_problem, write_solution

FOLDER = DOCS / "evidence"
FILES = ("runs.jsonl", "shop.jsonl", "classifier.jsonl")
Runs = list[dict]  # Each dict is a line of these files.
LAST = 10  # Some columns summarise the training samples of this many steps.

# ---- worlds, and what to show of them

DATA = tomllib.loads((FOLDER / "tables.toml").read_text())
TITLES, WORLDS = DATA["titles"], DATA["worlds"]
COLOURS = defaultdict(lambda: "#009E73", DATA["colours"])
STANDARD, COMPARED, OWN, SHOP = map(WORLDS.get, ("standard", "compared", "own", "shop"))
OWN_JUDGES = ("first_judge", "trained_judge")
CLASSIFIED = ("classifier", "flagged")  # the algorithms of recipes/toy_disrm.sh
KNOWN = set(OWN_JUDGES).union(*TITLES.values())  # algorithms of the tables
CURVES = ("acc", "oracle_flawed_positive_rate", "truly_correct", "calls", "flawed_positive_rate", "lambda")


@dataclass
class Config:
    """Generate the figures and tables from docs/evidence/*.jsonl. With --runs, add finished runs first."""

    runs: Path | None = None
    """Folder with the finished runs: WORLD/ALGORITHM_seedN, WORLD/trained_judge or seedN/classifier."""


# ---- collecting runs


def collect(folder: Path) -> Runs:
    """Return one dict per run, sorted by name. Raises ValueError if a run has not finished."""
    runs = []
    for file in sorted(folder.glob("*/*/metrics.jsonl")):
        path = file.parent
        world = path.parent.name
        algorithm, _, seed = path.name.partition("_seed")
        if algorithm.partition("_cost")[0] not in KNOWN:
            print(f"skipped {world}/{path.name}: no table of tables.toml names it")
            continue
        metrics = read_metrics(path)
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
            curve = [line.get(f"reward/{key}") for line in metrics if line["step"]]
            if set(curve) - {None}:
                # A rate among correct answers is missing in a step without correct answers, and counts as 0.
                run["curves"][key] = [round(value or 0.0, 4) for value in curve]
        if algorithm in CLASSIFIED or world in OWN and algorithm not in OWN_JUDGES:
            run |= count_flaws(path, since=run["steps"] - LAST + 1)
        if world in SHOP and algorithm == "fapo_judge":
            run["verdicts"] = count_verdicts(path)
        if algorithm in CLASSIFIED:
            spread = [line["reward/groups_with_spread"] for line in metrics[1:]]
            steps = range(1, run["steps"] + 1)
            for when, some in ("first", slice(LAST)), ("last", slice(-LAST, None)):
                run[when] = count_accepted(path, steps[some])
                run[f"{when}_spread"] = fmean(spread[some])
        runs.append(run)
    if not runs:
        raise ValueError(f"--runs {folder}: contains no finished run; run make evidence first")
    return runs


def kind_of_flaw(question: str, solution: str) -> str:
    """Return the kind of the first error in a flawed solution from the toy world, such as "arithmetic"."""
    problem = parse_problem(question)
    sound = write_solution(problem, Random(0))
    stated = split_paragraphs(solution)
    index = first_difference(stated, sound)
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
        info = line["reward_extra_info"]
        is_flawed = info["oracle_flawed_positive"]
        if line["step"] < since or not (is_flawed or info["truly_correct"]):
            continue
        is_passed = info.get("flawed_positive") is False
        passed += is_passed
        if is_flawed:
            kind = kind_of_flaw(line["prompt"], line["response"])
            flaws[kind] += 1
            overlooked[kind] += is_passed
    return {"flaws": flaws, "passed": passed, "overlooked": overlooked}


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
    if run["algorithm"] in CLASSIFIED:
        return "classifier.jsonl"
    return "runs.jsonl"


def read() -> Runs:
    return [json.loads(line) for name in FILES for line in (FOLDER / name).read_text().splitlines()]


def runs_of(runs: Runs, algorithm: str, *worlds: str) -> Runs:
    return [run for run in runs if run["algorithm"] == algorithm and run["world"] in worlds]


def of(runs: Runs, algorithm: str, *worlds: str) -> Runs:
    """Return the runs of an algorithm in these worlds (default: STANDARD). Raises ValueError if empty."""
    worlds = worlds or STANDARD
    found = runs_of(runs, algorithm, *worlds)
    if not found:
        raise ValueError(f"no finished run of {algorithm} in {' or '.join(worlds)}; run make evidence first")
    return found


def with_same_seeds(runs: Runs, algorithms: list[str]) -> Runs:
    """Return the runs of these algorithms from those checkpoints and seeds that all of them have."""
    found = [run for run in runs if run["algorithm"] in algorithms]
    of_start = Counter((run["world"], run["seed"]) for run in found)
    return [run for run in found if of_start[run["world"], run["seed"]] == len(algorithms)]


# ---- numbers of one run


def smooth(values) -> np.ndarray:
    """Return the mean of each value and the four values before it."""
    return np.array([fmean(values[max(0, end - 5) : end]) for end in range(1, len(values) + 1)])


def first_step(is_reached: np.ndarray) -> float:
    """Return the first step at which this is true, or infinity."""
    return is_reached.argmax() + 1 if is_reached.any() else math.inf


def half_correct(run: dict) -> float:
    """Return the first step at which half of the samples are fully correct (smoothed), or infinity."""
    return first_step(smooth(run["curves"]["truly_correct"]) >= 0.5)


def half_flawed(run: dict) -> float:
    """Return the first step at which the smoothed flawed-positive rate has halved, or infinity."""
    half = run["before"]["toy/oracle_flawed_positive_rate/mean@1"] / 2
    return first_step(smooth(run["curves"]["oracle_flawed_positive_rate"]) <= half)


def shares(run: dict) -> dict[str, np.ndarray]:
    """Return the paper's alpha, gamma and beta (appendix A) at each step, as fractions of all samples."""
    right, sound = np.array(run["curves"]["acc"]), np.array(run["curves"]["truly_correct"])
    return {"fully correct": sound, "flawed positives": right - sound, "wrong": 1 - right}


def flawed_at(run: dict, step: int) -> float:
    """Return the smoothed fraction of flawed positives at this step, which counts from 0."""
    return smooth(shares(run)["flawed positives"])[step]


def most_flawed(run: dict) -> float:
    return max(smooth(shares(run)["flawed positives"]))


def turning_point(run: dict) -> float:
    """Return the first step at which fully correct samples outnumber wrong ones (smoothed), or infinity."""
    parts = shares(run)
    return first_step(smooth(parts["fully correct"]) > smooth(parts["wrong"]))


def halfway(run: dict) -> float:
    return smooth(run["curves"]["truly_correct"])[run["steps"] // 2 - 1]


def last_steps(run: dict, curve: str) -> float:
    """Return the mean of a rollout metric over the last steps."""
    return fmean(run["curves"][curve][-LAST:])


def missed(run: dict) -> float:
    """Return the fraction of flawed positives among the answers that the judge accepted."""
    return sum(run["overlooked"].values()) / run["passed"]


def calls(run: dict) -> float:
    """Return the mean number of judge calls per step of 128 samples.

    An algorithm queries the judge on no answers, on the correct answers or on all answers.
    """
    judged, name = DATA["judged"], run["algorithm"]
    if name.startswith(tuple(judged["none"])):
        return 0.0
    if name in judged["all"]:
        return 128.0
    right = run["curves"]["acc"]
    return 128 * sum(right[judged["correct_after_step"].get(name, 0) :]) / len(right)


def minus_cost(run: dict, accuracy, num_calls):
    """Return the outcome reward minus the cost of the look-ups, whatever the run's own reward."""
    cost = run["algorithm"].partition("_cost")[2] or 0.03
    return 2 * accuracy - 1 - float(cost) * num_calls


def best_earned(run: dict) -> float:
    """Return the mean outcome reward minus cost of the best five consecutive training steps."""
    right, num_calls = np.array(run["curves"]["acc"]), np.array(run["curves"]["calls"])
    return max(smooth(minus_cost(run, right, num_calls))[4:])


# ---- cells: texts about all runs of a row


def num_runs(runs: Runs, when: str) -> str:
    return str(len(runs))


def earned(runs: Runs, when: str) -> str:
    """Return the mean outcome reward minus cost on the held-out problems."""
    return cell([minus_cost(run, run[when]["shop/mean@1"], run[when]["shop/calls/mean@1"]) for run in runs])


def median_calls(runs: Runs, when: str) -> str:
    return f"{median(map(calls, runs)):.0f}"


def turning_points(runs: Runs, when: str) -> str:
    return ", ".join(f"{turn:.0f}" for turn in sorted(map(turning_point, runs)))


def groups_with_spread(runs: Runs, when: str) -> str:
    return cell([run[f"{when}_spread"] for run in runs])


def flaws_of(runs: Runs) -> Counter:
    total = Counter()
    for run in runs:
        total.update(run["flaws"])
    return total


def num_flaws(runs: Runs, when: str) -> str:
    return str(flaws_of(runs).total())


def share_of_flaws(runs: Runs, when: str, kind: str) -> str:
    flaws = flaws_of(runs)
    return f"{flaws[kind] / flaws.total():.2f}"


def judged(runs: Runs, when: str, kind: str, place: int) -> str:
    """Return how many trajectories with this flaw the judge called flawed (0) or located (1)."""
    counts = np.sum([run["verdicts"][kind] for run in runs], 0)
    return f"{counts[place]} of {counts[2]}"


def accepted(runs: Runs, when: str, verdict: str) -> str:
    """Return the fraction of samples with this oracle's verdict that the classifier accepts."""
    if runs[0]["algorithm"] == "flagged" and verdict == "wrong":
        return "not queried"
    sound, count = np.sum([run[when][verdict] for run in runs], 0)
    return f"{sound / count:.2f} of {count}" if count else "none"


# ---- tables, as docs/evidence/tables.toml describes them


def merged(parts: dict[str, dict], names: list[str]) -> dict:
    """Return the union of these parts. A value replaces an earlier one of the same key."""
    union = {}
    for name in names:
        union |= parts[name]
    return union


@dataclass
class Rows:
    """A group of rows: one per algorithm, in the same worlds."""

    titles: dict[str, str]
    worlds: tuple[str, ...]
    lead: tuple[str, ...] = ()
    suffix: str = ""
    when: str = "after"
    way: str = "mean@1"
    optional: bool = False


@dataclass
class Table:
    heads: list[str]  # heads of the rows' labels
    columns: dict
    rows: list[Rows]
    same_seeds: bool = False

    @property
    def algorithms(self) -> list[str]:
        return [name + rows.suffix for rows in self.rows for name in rows.titles]

    def lines(self, runs: Runs) -> list[list[str]]:
        """Return the heads, and the text of all rows."""
        return [[*self.heads, *self.columns], *self.cells(runs)]

    def cells(self, runs: Runs) -> list[list[str]]:
        """Return the text of all rows. Raises ValueError if a row has no run and is not optional."""
        if self.same_seeds:
            runs = with_same_seeds(runs, self.algorithms)
        made = []
        for rows in self.rows:
            for name, title in rows.titles.items():
                name += rows.suffix
                if rows.optional and not all(runs_of(runs, name, world) for world in rows.worlds):
                    continue
                some = of(runs, name, *rows.worlds)
                cells = [*rows.lead, title.format(steps=some[0]["steps"])]
                for column in self.columns.values():
                    cells.append(cell_of(column, rows, some, runs))
                made.append(cells)
        return made


def cell_of(column: str | dict, rows: Rows, some: Runs, runs: Runs) -> str:
    """Return a cell. `some` are the row's runs; a column of another world selects its own from all runs."""
    if isinstance(column, str):
        column = {"metric": column}
    if "world" in column:
        some = runs_of(runs, some[0]["algorithm"], column["world"].format(rows.worlds[0][-1]))
    if not some:
        return ""
    if "metric" in column:
        return cell([run[rows.when][f"{column['metric']}/{rows.way}"] for run in some])
    if rows.when == "before" and not column.get("initial"):
        return ""
    arguments = column.get("of", ())
    if "text" in column:
        return globals()[column["text"]](some, rows.when, *arguments)
    number = globals()[column["number"]]
    return cell([number(run, *arguments) for run in some], column.get("digits", 2))


def table_of(about: dict) -> Table:
    """Return the table that an entry of tables.toml describes."""
    groups = []
    for group in about["rows"]:
        titles, worlds = group["titles"], group["worlds"]
        if isinstance(titles, list):
            titles = merged(TITLES, titles)
        groups.append(Rows(**group | {"titles": titles, "worlds": WORLDS.get(worlds, (worlds,))}))
    return Table(**about | {"columns": merged(DATA["columns"], about["columns"]), "rows": groups})


PAGE_TABLES = {name: table_of(about) for name, about in DATA["page"].items()}
CSV_TABLES = {name: table_of(about) for name, about in DATA["csv"].items()}


def ranking(runs: Runs, about: dict) -> str:
    """Rank the algorithms that have runs from each checkpoint. Each cell is the median over the seeds."""
    worlds = WORLDS[about["worlds"]]
    ranked = []
    for name, flags in about["flags"].items():
        by_world = [runs_of(runs, name, world) for world in worlds]
        if not all(by_world):
            continue
        scores, rates = [], []
        for some in by_world:
            scores.append(median(run["after"][about["correct"]] for run in some))
            rates.append(median(run["after"][about["rate"]] for run in some))
        cells = [f"{value:.2f}" for value in (*scores, fmean(scores), fmean(rates))]
        every = sum(by_world, [])
        # The fastest run counts, because other runs shared its core.
        seconds = min(run["seconds"] for run in every if "seconds" in run)
        cells += [median_calls(every, "after"), f"{seconds:.0f}", str(len(every))]
        cells.append(f"`{flags}`" if flags else "")
        title = TITLES[about["titles"]][name].replace("`", "")
        ranked.append((-fmean(scores), [title, *cells]))
    heads = ["method", *(f"checkpoint {world[-1]}" for world in worlds), "mean", "flawed-positive rate"]
    heads += ["judge calls per step", "seconds", "runs", "FLAGS"]
    return table(heads, *(cells for _, cells in sorted(ranked)))


def tables(runs: Runs) -> dict[str, str]:
    """Return all tables of the pages as {name: Markdown}."""
    made = {}
    for name, one in PAGE_TABLES.items():
        made[name] = table(*one.lines(runs))
    for name, about in DATA["ranking"].items():
        made[name] = ranking(runs, about)
    return made


def csv_files(runs: Runs) -> dict[str, str]:
    """Return {name in docs/evidence: CSV text} for the tables that are too large for a page."""
    made = {}
    for name, one in CSV_TABLES.items():
        file = io.StringIO()
        csv.writer(file, lineterminator="\n").writerows(one.lines(runs))
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
    axes = figure.subplots(rows, columns, squeeze=False, subplot_kw={"xlabel": "step"}, **options)
    return figure, list(axes.flat)


def save(figure, name: str, ylim=(-0.02, 1.02)) -> None:
    """Save panels, by default of fractions, with one legend below."""
    for axis in figure.axes:
        axis.set_ylim(ylim)
        axis.grid(alpha=0.3)
    handles, labels = figure.axes[-1].get_legend_handles_labels()
    title = None  # A single panel has its own title.
    if len(figure.axes) > 1:
        title = "median and range of the runs"
    figure.legend(handles, labels, loc="outside lower center", ncols=4, title=title)
    figure.savefig(FOLDER / name)


def band(axis, curves: list[list[float]], colour: str, label: str) -> None:
    """Plot the median and the range of the smoothed curves at each step."""
    smoothed = np.array([*map(smooth, curves)])
    steps = range(1, smoothed.shape[1] + 1)
    axis.plot(steps, np.median(smoothed, 0), color=colour, linewidth=2, label=label)
    axis.fill_between(steps, smoothed.min(0), smoothed.max(0), color=colour, alpha=0.15, linewidth=0)


def plot(axes, about: dict, runs: Runs) -> None:
    """Plot rollout metrics of the algorithms, as an entry of tables.toml describes the panels."""
    for axis, (metric, worlds, title) in zip(axes, about["panels"]):
        for name, label in TITLES[about["titles"]].items():
            curves = [run["curves"][metric] for run in of(runs, name, *worlds)]
            band(axis, curves, COLOURS[name], label)
        axis.set_title(title, size=about["title_size"])


def draw_weak_start(runs: Runs) -> None:
    """Plot three fractions of all samples, and mark when FAPO begins to discourage flawed positives."""
    figure, axes = panels(9.5, 4.2, 1, 2, sharey=True)
    for axis, (name, title) in zip(axes, TITLES["weak_start"].items()):
        some = [shares(run) for run in of(runs, name, "weak")]
        for part in some[0]:
            band(axis, [share[part] for share in some], COLOURS[part], part)
        axis.set_title(title)
    for turn in map(turning_point, of(runs, "fapo_oracle", "weak")):
        # Matplotlib draws nothing at infinity.
        axes[1].axvline(turn, color="black", linestyle=":", linewidth=1)
    axes[0].set_ylabel("fraction of all samples")
    save(figure, "weak_start.png")


def draw_judges(runs: Runs) -> None:
    """Plot the final metrics against the judge's recall. Recall 0 means outcome reward only."""
    served = {}
    for name, judge in {"fapo_first_judge": "first_judge", "fapo_judge": "trained_judge"}.items():
        served[name] = of(runs, judge, OWN[1])[0]["after"]["fapo_critic/recall/greedy"]
    figure, (axis,) = panels(6.2, 4, 1, 1)
    for key, (label, colour) in DATA["ends"].items():
        for some, style in (DATA["recalls"], {"label": label}), (served, {"marker": "x"}):
            dots = []
            for name, recall in some.items():
                for run in of(runs, name, OWN[1]):
                    dots.append((recall, run["after"][f"toy/{key}/mean@1"]))
            axis.scatter(*zip(*dots), color=colour, **style)
    axis.set_title("FAPO after 40 steps, each run a dot; x: the served judges")
    axis.set_xlabel("recall of the judge")
    save(figure, "judges.png")


def draw_variants(runs: Runs) -> None:
    """Plot the median and range of each variant's flawed-positive rate, from checkpoint 0 and its twin."""
    figure, (axis,) = panels(10, 6.4, 1, 1)
    for world, (label, colour, marker, shift) in DATA["twins"].items():
        medians = []
        for place, name in enumerate(TITLES["variants"]):
            some = runs_of(runs, name, world)
            found = [run["after"]["toy/oracle_flawed_positive_rate/mean@1"] for run in some]
            if found:
                height = place + shift
                axis.plot([min(found), max(found)], [height] * 2, color=colour, alpha=0.35, linewidth=2)
                medians.append((median(found), height))
        axis.scatter(*zip(*medians), color=colour, marker=marker, zorder=3, label=label)
    steps = of(runs, "rule_long", OWN[0])[0]["steps"]
    labels = [title.format(steps=steps).replace("`", "") for title in TITLES["variants"].values()]
    axis.set_yticks(range(len(labels)), labels)
    axis.invert_yaxis()
    axis.set_xlim(0, 0.9)
    axis.set_xlabel("flawed positives (fraction of correct answers), median and range of the runs")
    save(figure, "variants.png", ylim=None)


def draw_shop(runs: Runs) -> None:
    """Plot the training curves of both rewards, and the final metrics for each cost of a look-up."""
    figure, axes = panels(11, 7.4, 2, 2)
    figure.suptitle("A tool that costs 0.03 per call: nine runs, smoothed over 5 steps")
    *curves, ends = axes
    plot(curves, DATA["shop"], runs)
    compared = with_same_seeds(runs, CSV_TABLES["shop_costs"].algorithms)
    for name, label in TITLES["tools_compared"].items():
        values = []
        for cost, end in DATA["costs"].items():
            found = [run["after"]["shop/truly_correct/mean@1"] for run in of(compared, name + end, *SHOP)]
            ends.scatter([cost] * len(found), found, color=COLOURS[name], s=22)
            values.append(median(found))
        ends.plot([*DATA["costs"]], values, color=COLOURS[name], label=label)
    ends.set(title="fully correct after 40 steps: each run, and the median", xlabel="cost per call")
    save(figure, "shop.png", ylim=None)


def draw(runs: Runs) -> None:
    for name, about in DATA["curves"].items():
        figure, axes = panels(*about["size"], sharey=about["sharey"])
        plot(axes, about, runs)
        save(figure, name)
    for figure in (draw_weak_start, draw_judges, draw_variants, draw_shop):
        figure(runs)


def main() -> None:
    config = tyro.cli(Config)
    with one_line_errors():
        try:
            runs = read()
            if config.runs:
                runs += collect(config.runs)  # The dict keeps the last run of each name.
                runs = list({(run["world"], run["algorithm"], run["seed"]): run for run in runs}.values())
            made, files = tables(runs), csv_files(runs)  # Write nothing if a run is missing.
            draw(runs)
        except KeyError as error:
            raise ValueError(f"the key {error} is missing; see the rules in LEADERBOARD.md") from error
    for name in FILES:
        write_lines(FOLDER / name, [run for run in runs if file_of(run) == name])
    for name, text in files.items():
        (FOLDER / name).write_text(text)
    for page in pages():
        page.write_text(fill(page.read_text(), made))
    print(f"{len(runs)} runs; tables: {', '.join(made)}")


if __name__ == "__main__":
    main()
