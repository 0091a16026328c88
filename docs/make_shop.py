"""Collect runs of the world with a tool in docs/evidence/shop.jsonl, and generate the tables from it.

    WORLDS=tools make evidence                            # the runs, then this script
    python docs/make_shop.py --runs outputs/evidence      # adds the finished runs of recipes/evidence.sh
    python docs/make_shop.py                              # regenerates tables and figure from the JSONL files

Each line of shop.jsonl is one run, with the keys of runs.jsonl (docs/make_evidence.py) and the seconds of its
steps. The tables are in docs/rollouts.md, LEADERBOARD.md and the CSV files of docs/evidence. LEADERBOARD.md
also has the second world's runs. A test checks that the tables match the JSONL files.
"""

import json
import re
import sys
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean, median

import tyro
from matplotlib.figure import Figure

sys.path.insert(0, str(Path(__file__).resolve().parent))
import make_evidence as evidence
from toy.report import read_metrics, table

FILE = evidence.FILE.with_name("shop.jsonl")
FIGURE = FILE.with_suffix(".png")
LEADERBOARD = evidence.DOCS.parent / "LEADERBOARD.md"
PAGES = (evidence.DOCS / "rollouts.md", LEADERBOARD)
STARTS = ("shop0", "shop1", "shop2")
COST = 0.03  # cost of a look-up, unless the algorithm's name ends with another cost
COSTS = (0, 0.01, 0.03, 0.1)
NAMES = {
    "outcome": "outcome reward only",
    "outcome_dr_grpo": "outcome reward only, `--advantage dr_grpo`",
    "fapo": "FAPO",
    "prefix": "FAPO, `--credit prefix`",
    "vppo": "VPPO, FAPO's score",
}
COLUMNS = {
    "accuracy": "shop",
    "fully correct": "shop/truly_correct",
    "flawed-positive rate": "shop/flawed_positive_rate",
    "looked up every price": "shop/looked_all_up",
    "calls per problem": "shop/calls",
}
KINDS = {
    "made-up price": "shop/flawed_made_up",
    "wrong sum": "shop/flawed_wrong_sum",
    "wrongly copied number": "shop/flawed_miscopied",
    "other flaw": "shop/flawed_other",
}
PANELS = {
    "acc": "accuracy",
    "truly_correct": "fully correct (every price looked up, every sum right)",
    "calls": "look-ups per problem",
}
SHOWN = {"outcome": ("outcome reward only", "#D55E00"), "fapo": ("FAPO", "#0072B2")}
OUTCOME = "--reward-fn toy/shop_world.py:compute_score_outcome"
FLAGS = {  # flags of each algorithm, in addition to those in recipes/toy_tools.sh
    "outcome": OUTCOME,
    "outcome_dr_grpo": f"{OUTCOME} --advantage dr_grpo",
    "fapo": "",
    "prefix": "--credit prefix",
    "vppo": "--advantage vppo --prefix-cut 0",
}
SECOND_WORLD = {  # flags of each algorithm, in addition to those in recipes/second_world.sh
    "rule": "--reward-fn toy/toy_world.py:compute_score_baseline",
    "fapo_oracle": "",
    "prefix_oracle": "--credit prefix",
    "vppo_oracle": "--advantage vppo --prefix-cut 0",
    "papo_oracle": "--advantage papo",
    "steps_oracle": "--reward-fn toy/toy_world.py:compute_score_steps_oracle --advantage steps",
}


@dataclass
class Config:
    """Generate the tables and the figure from shop.jsonl. With --runs, add finished runs first."""

    runs: Path | None = None
    """Folder with the runs: shopN/ALGORITHM_seedN. Unfinished runs are skipped."""


def collect(folder: Path) -> list[dict]:
    """Return one dict per finished run, sorted by name."""
    runs = []
    for path in sorted(folder.glob("shop*/*/metrics.jsonl")):
        try:
            metrics = read_metrics(path.parent)
        except ValueError as error:
            print(f"skipped: {error}")
            continue
        algorithm, _, seed = path.parent.name.partition("_seed")
        curves = {}
        for name in (*PANELS, "flawed_positive_rate"):
            found = [line.get(f"reward/{name}") for line in metrics if line["step"]]
            curves[name] = [0.0 if value is None else round(value, 4) for value in found]
        runs.append({
            "world": path.parent.parent.name,
            "algorithm": algorithm,
            "seed": int(seed),
            "steps": metrics[-1]["step"],
            "before": held_out(metrics[0]),
            "after": held_out(metrics[-1]),
            "curves": curves,
            "seconds": evidence.seconds_of(metrics),
        })  # fmt: skip
    return runs


def held_out(line: dict) -> dict:
    """Return the metrics of the evaluation in this line."""
    return {key[4:]: round(line[key], 4) for key in line if re.match(r"val/.*/mean@1$", key)}


def read() -> list[dict]:
    return [json.loads(line) for line in FILE.read_text().splitlines()]


def some_of(runs: list[dict], algorithm: str, *worlds: str) -> list[dict]:
    return [run for run in runs if run["algorithm"] == algorithm and run["world"] in (worlds or STARTS)]


def at_cost(runs: list[dict], algorithm: str, cost: float) -> list[dict]:
    """Return runs of `outcome` or `fapo` with this cost of a look-up.

    To keep the rows comparable, only checkpoints and seeds with runs at all costs are included.
    """
    found = []
    for each in COSTS:
        name = algorithm if each == COST else f"{algorithm}_cost{each:g}"
        found.append({(run["world"], run["seed"]): run for run in some_of(runs, name)})
    common = set.intersection(*map(set, found))
    return [run for place, run in found[COSTS.index(cost)].items() if place in common]


def row(title: str, runs: list[dict], columns=COLUMNS, when: str = "after") -> list[str]:
    return [*evidence.row(title, runs, columns, when=when), str(len(runs))]


def tables(runs: list[dict], second_world: list[dict]) -> dict[str, str]:
    """Return all tables of the pages as {name: Markdown}."""
    heads = ["512 held-out problems", *COLUMNS, "runs"]
    before = some_of(runs, "outcome")
    rows = [row("initial policy", before, when="before")]
    rows += [row(NAMES[name], some_of(runs, name)) for name in ("outcome", "fapo")]
    made = {"tools": table(heads, *rows)}
    keys = ("shop/truly_correct", "shop/flawed_positive_rate")
    made["tool world"] = leaderboard(runs, STARTS, FLAGS, NAMES, keys)
    keys = ("toy/truly_correct", "toy/oracle_flawed_positive_rate")
    titles = evidence.OWN_ALGORITHMS
    made["second world"] = leaderboard(second_world, evidence.OWN, SECOND_WORLD, titles, keys)
    return made


def csv_files(runs: list[dict]) -> dict[str, str]:
    """Return {file in docs/evidence: CSV text} for the tables that are too large for a page."""
    made, rows = {}, []
    for world in STARTS:
        before = row("initial policy", some_of(runs, "outcome", world), when="before")
        rows.append([world[-1], *before])
        for name, title in NAMES.items():
            found = some_of(runs, name, world)
            if found:
                rows.append([world[-1], *row(title, found)])
    heads = ["512 held-out problems", *COLUMNS, "runs"]
    made["shop.csv"] = evidence.csv_table(["checkpoint", *heads], *rows)
    rows = []
    for name in ("outcome", "fapo"):
        rows += [[f"{cost:g}", *row(NAMES[name], at_cost(runs, name, cost))] for cost in COSTS]
    kinds = [row("initial policy", some_of(runs, "outcome"), KINDS, "before")]
    kinds += [row(NAMES[name], some_of(runs, name), KINDS) for name in NAMES if some_of(runs, name)]
    made["shop_flaws.csv"] = evidence.csv_table(["fraction of the 512 problems", *KINDS, "runs"], *kinds)
    made["shop_costs.csv"] = evidence.csv_table(["cost per call", *heads], *rows)
    return made


def leaderboard(runs: list[dict], worlds, flags: dict[str, str], titles: dict[str, str], keys) -> str:
    """Rank the algorithms that have runs from each checkpoint. Each cell is the median over the seeds."""
    heads = ["method", *(f"checkpoint {world[-1]}" for world in worlds), "mean", "flawed-positive rate"]
    heads += ["judge calls per step", "seconds", "runs", "FLAGS"]
    ranked = []
    for name, arguments in flags.items():
        found = [some_of(runs, name, world) for world in worlds]
        if not all(found):
            continue
        correct, rates = ([median_after(some, key) for some in found] for key in keys)
        every = [run for some in found for run in some]
        cells = [titles[name].replace("`", "")]
        cells += [f"{value:.2f}" for value in (*correct, fmean(correct), fmean(rates))]
        cells += [f"{median(map(judge_calls, every)):.0f}", fastest(every), str(len(every))]
        cells.append(f"`{arguments}`" if arguments else "none")
        ranked.append((-fmean(correct), cells))
    return table(heads, *(cells for _, cells in sorted(ranked)))


def median_after(runs: list[dict], key: str) -> float:
    return median(run["after"][f"{key}/mean@1"] for run in runs)


def fastest(runs: list[dict]) -> str:
    """Return the seconds of the fastest run, because other runs shared its core."""
    return f"{min(run['seconds'] for run in runs if 'seconds' in run):.0f}"


def judge_calls(run: dict) -> float:
    """Return the mean number of judge calls per step of 128 samples."""
    if run["algorithm"].startswith("outcome"):
        return 0.0
    if run["algorithm"] in ("prefix", "vppo"):
        return 128.0
    return evidence.calls(run)


def draw(runs: list[dict], path: Path) -> None:
    """Plot the training curves of both rewards, and the final metrics for each cost of a look-up."""
    figure = Figure(figsize=(11, 7.4), layout="constrained", dpi=90)
    axes = figure.subplots(2, 2).flat
    figure.suptitle("A tool that costs 0.03 per call: median and range of nine runs, smoothed over 5 steps")
    ends = {"acc": (0.83, 1.0), "truly_correct": (0.03, 0.66), "calls": (0.35, 2.9)}  # label positions
    for axis, (key, title) in zip(axes, PANELS.items()):
        for (name, (label, colour)), height in zip(SHOWN.items(), ends[key]):
            evidence.band(axis, [run["curves"][key] for run in some_of(runs, name)], colour, label)
            axis.annotate(label, (28, height), color=colour)
        axis.set(title=title, xlabel="step")
    figure.axes[0].set(ylim=(0.78, 1.02))
    figure.axes[1].set(ylim=(-0.02, 1.02))
    figure.axes[2].set(ylim=(-0.1, 4.1))
    axis = figure.axes[3]
    places = range(len(COSTS))
    for (name, (label, colour)), marker in zip(SHOWN.items(), "so"):
        values = []
        for place, cost in zip(places, COSTS):
            found = [run["after"]["shop/truly_correct/mean@1"] for run in at_cost(runs, name, cost)]
            axis.scatter([place] * len(found), found, color=colour, marker=marker, s=22)
            values.append(median(found))
        axis.plot(places, values, color=colour)
        axis.annotate(label, (1.6, values[2] + 0.05), color=colour)
    axis.set(title="fully correct after 40 steps: each run, and the median", xlabel="cost per call",
             ylim=(-0.02, 1.02))  # fmt: skip
    axis.set_xticks(places, [f"{cost:g}" for cost in COSTS])
    for axis in figure.axes:
        axis.grid(alpha=0.3)
    figure.savefig(path)


def fill(page: str, made: dict[str, str]) -> str:
    """Return the page with its tables replaced by `made`. Raises KeyError if `made` lacks a table."""
    return re.sub(r"(<!-- runs: ([\w ]+) -->\n).*?(<!-- end -->)",
                  lambda found: f"{found[1]}\n{made[found[2]]}\n\n{found[3]}", page, flags=re.S)  # fmt: skip


def main() -> None:
    config = tyro.cli(Config)
    runs = read() if FILE.exists() else []
    if config.runs:
        runs += collect(config.runs)  # The dict keeps the last run of each name.
        runs = list({(run["world"], run["algorithm"], run["seed"]): run for run in runs}.values())
    made = tables(runs, evidence.read())  # Write nothing if a run is missing.
    FILE.write_text("".join(json.dumps(run) + "\n" for run in runs))
    draw(runs, FIGURE)
    for name, text in csv_files(runs).items():
        FILE.with_name(name).write_text(text)
    for page in PAGES:
        page.write_text(fill(page.read_text(), made))
    print(f"{len(runs)} runs; tables: {', '.join(made)}")


if __name__ == "__main__":
    main()
