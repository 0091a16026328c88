"""Writes the evidence: docs/evidence/runs.jsonl from finished runs, and from that the figures, and the tables in the pages.

    make evidence                                          # one to two hours on two cores: the runs, then this
    python docs/make_evidence.py --runs outputs/evidence   # from runs that recipes/evidence.sh has made
    python docs/make_evidence.py                           # figures and tables anew, from what is in docs/evidence

A line of runs.jsonl is one run: its world (a warm start), algorithm and seed, the held-out figures before and after it, and what
was measured on the rollouts of each step. A table stands in a page between <!-- evidence: NAME --> and <!-- end -->; a test
compares it with runs.jsonl. Cells are the median over the runs, and the lowest and the highest.
"""

import json
import math
import re
import statistics
import sys
from dataclasses import dataclass
from pathlib import Path

DOCS = Path(__file__).resolve().parent
sys.path.insert(0, str(DOCS.parent))

import matplotlib
import tyro

import toy_world
from toy_world import COLUMNS, smooth, table

matplotlib.use("Agg")
import matplotlib.pyplot as plt

FILE = DOCS / "evidence" / "runs.jsonl"
PAGES = (DOCS.parent / "README.md", DOCS / "evidence.md")
STANDARD = ("warm0", "warm1", "warm2")
NAMES = {"rule": "rule only", "fapo_judge": "FAPO, served judge", "fapo_oracle": "FAPO, oracle as judge",
         "papo_oracle": "PAPO, oracle as judge"}  # fmt: skip
COLOURS = {"rule": "tab:red", "fapo_judge": "tab:green", "fapo_oracle": "tab:olive", "papo_oracle": "tab:blue"}
OF_JUDGES = {"recall": "fapo_critic/recall", "sound kept": "fapo_critic/sound_kept", "exact location": "fapo_critic/location"}
CURVES = ("acc", "oracle_flawed_positive_rate", "truly_correct", "flawed_positive_rate")


@dataclass
class Config:
    """Writes the figures and tables of the evidence; with --runs first what they are made of."""

    runs: Path | None = None
    """Folder of the finished runs, WORLD/ALGORITHM_seedN and WORLD/trained_judge."""


def collect(folder: Path) -> list[dict]:
    """One dict a run, in the order of their names. Raises OSError or ValueError for a run that is not finished."""
    runs = []
    for path in sorted(folder.glob("*/*/metrics.jsonl")):
        metrics = toy_world.read_metrics(path.parent)
        algorithm, _, seed = path.parent.name.partition("_seed")
        held_out = [{key[4:]: round(value, 4) for key, value in line.items() if re.match(r"val/.*/(mean@1|greedy)$", key)}
                    for line in (metrics[0], metrics[-1])]  # fmt: skip
        curves = {name: [round(line[f"reward/{name}"], 4) for line in metrics if f"reward/{name}" in line] for name in CURVES}
        runs.append(dict(world=path.parent.parent.name, algorithm=algorithm, seed=int(seed or 0), steps=metrics[-1]["step"],
                         before=held_out[0], after=held_out[1], curves={name: c for name, c in curves.items() if c}))  # fmt: skip
    if not runs:
        raise OSError(f"--runs {folder}: no finished run there; make evidence writes some")
    return runs


def read() -> list[dict]:
    return [json.loads(line) for line in FILE.read_text().splitlines()]


def of(runs: list[dict], algorithm: str, *worlds: str) -> list[dict]:
    return [run for run in runs if run["algorithm"] == algorithm and run["world"] in (worlds or STANDARD)]


def cell(values: list[float]) -> str:
    """.83 (.78-.87), or only .83 for one value."""
    low, middle, high = (f"{value:.2f}" for value in (min(values), statistics.median(values), max(values)))
    return middle if len(values) == 1 else f"{middle} ({low}-{high})"


def row(name: str, measured: list[dict], columns: dict[str, str], way: str = "mean@1") -> list[str]:
    return [name, *(cell([held_out[f"{key}/{way}"] for held_out in measured]) for key in columns.values())]


def before(runs: list[dict]) -> list[dict]:
    return [run["before"] for run in runs]


def after(runs: list[dict]) -> list[dict]:
    return [run["after"] for run in runs]


def last_steps(runs: list[dict], curve: str) -> list[float]:
    """The mean of the last ten steps of each run."""
    return [statistics.fmean(run["curves"][curve][-10:]) for run in runs]


def tables(runs: list[dict]) -> dict[str, str]:
    """Every table of the pages by its name, as Markdown."""
    heads, made = ["512 held-out problems", *COLUMNS], {}
    for name, way in (("policies", "mean@1"), ("policies greedy", "greedy")):
        rows = [row(title, after(of(runs, algorithm)), COLUMNS, way) for algorithm, title in NAMES.items()]
        made[name] = table(heads, row("before, as warm-started", before(of(runs, "rule")), COLUMNS, way), *rows)
    rows = []
    for number, world in enumerate(STANDARD):
        rows.append(row(f"warm start {number}: before", before(of(runs, "rule", world)), COLUMNS))
        rows += [row(f"{number}: {NAMES[name]}", after(of(runs, name, world)), COLUMNS) for name in ("rule", "fapo_judge")]
    made["warm starts"] = table(heads, *rows)
    rows = []
    for title, worlds in (("three judges", STANDARD), ("a judge shown forgotten carries only", ("narrow",))):
        judges = of(runs, "trained_judge", *worlds)
        for when in ("before", "after"):
            rows += [row(f"{title}, {when}, {label}", [judge[when] for judge in judges], OF_JUDGES, way)
                     for way, label in toy_world.WAYS.items()]  # fmt: skip
    made["judges"] = table(["512 held-out solutions", *OF_JUDGES], *rows)
    served = {"judge shown flaws of every kind": of(runs, "fapo_judge"),
              "judge shown forgotten carries only": of(runs, "fapo_judge", "narrow")}  # fmt: skip
    rows = [[title, *(cell(last_steps(some, curve)) for curve in ("acc", "flawed_positive_rate", "oracle_flawed_positive_rate"))]
            for title, some in served.items()]  # fmt: skip
    made["narrow judge"] = table(["last ten steps", "accuracy", "flawed, the judge says", "flawed, the oracle says"], *rows)
    penalties = {"0 (rule only)": "rule", "2/3": "penalty0.667", "1": "fapo_oracle", "4/3": "penalty1.333"}
    rows = [row(f"λ = {penalty}", after(of(runs, name, "warm0")), COLUMNS) for penalty, name in penalties.items()]
    made["penalties"] = table(heads, *rows)
    rows = [row(NAMES[name], after(of(runs, name, "weak")), COLUMNS) for name in ("rule", "fapo_oracle")]
    made["weak start"] = table(heads, row("before", before(of(runs, "rule", "weak")), COLUMNS), *rows)
    rows = []
    for name in ("rule", "fapo_oracle"):
        flawed = [smooth(shares(run)["flawed positives"]) for run in of(runs, name, "weak")]
        turns = sorted(turning_point(run) or math.inf for run in of(runs, name, "weak"))
        rows.append([NAMES[name], *(cell([pick(values) for values in flawed]) for pick in (lambda v: v[0], max, lambda v: v[-1])),
                     ", ".join(f"{turn:.0f}" for turn in turns)])  # fmt: skip
    made["stepping stones"] = table(["flawed positives, share of all samples", "first step", "highest", "last step",
                                     "ρ = 1 at step"], *rows)  # fmt: skip
    return made


def fill(page: str, made: dict[str, str]) -> str:
    """The page with its tables as they should be. KeyError for a table that nobody makes."""
    return re.sub(r"(<!-- evidence: ([\w ]+) -->\n).*?(<!-- end -->)",
                  lambda found: f"{found[1]}\n{made[found[2]]}\n\n{found[3]}", page, flags=re.S)  # fmt: skip


def band(axis, curves: list[list[float]], colour: str, label: str) -> None:
    """The median of runs, step by step, and from the lowest to the highest."""
    columns = list(zip(*map(smooth, curves), strict=True))
    steps = range(1, len(columns) + 1)
    axis.plot(steps, list(map(statistics.median, columns)), color=colour, linewidth=2, label=label)
    axis.fill_between(steps, list(map(min, columns)), list(map(max, columns)), color=colour, alpha=0.15, linewidth=0)


def save(figure, axes, path: Path) -> None:
    for axis in axes:
        axis.set(xlabel="step", ylim=(-0.02, 1.02))
        axis.grid(alpha=0.3)
    axes[0].legend(loc="best")
    figure.savefig(path, dpi=90)
    plt.close(figure)


def draw_policies(runs: list[dict], path: Path) -> None:
    """Four algorithms over all warm starts and seeds."""
    figure, axes = plt.subplots(1, 3, figsize=(13.5, 4.2), constrained_layout=True, sharey=True)
    for axis, (title, key, _) in zip(axes, toy_world.PANELS):
        for name, label in NAMES.items():
            band(axis, [run["curves"][key] for run in of(runs, name)], COLOURS[name], label)
        axis.set_title(title)
    save(figure, axes, path)


def shares(run: dict) -> dict[str, list[float]]:
    """The shares of all samples, step by step: truly correct, flawed positive, wrong (paper appendix A: alpha, gamma, beta)."""
    right, sound = run["curves"]["acc"], run["curves"]["truly_correct"]
    return {"truly correct": sound, "flawed positives": [a - s for a, s in zip(right, sound)], "wrong": [1 - a for a in right]}


def turning_point(run: dict) -> int | None:
    """The first step at which truly correct samples outnumber wrong ones (rho > 1), smoothed; None if there is none."""
    smoothed = {name: smooth(values) for name, values in shares(run).items()}
    more = [sound > wrong for sound, wrong in zip(smoothed["truly correct"], smoothed["wrong"])]
    return more.index(True) + 1 if True in more else None


def draw_weak_start(runs: list[dict], path: Path) -> None:
    """All samples in three parts, with the step at which FAPO turns from encouraging flawed positives to discouraging them."""
    figure, axes = plt.subplots(1, 2, figsize=(9.5, 4.2), constrained_layout=True, sharey=True)
    colours = {"truly correct": "tab:green", "flawed positives": "tab:orange", "wrong": "tab:gray"}
    for axis, name in zip(axes, ("rule", "fapo_oracle")):
        some = of(runs, name, "weak")
        for part, colour in colours.items():
            band(axis, [shares(run)[part] for run in some], colour, part)
        for turn in filter(None, map(turning_point, some if name == "fapo_oracle" else [])):
            axis.axvline(turn, color="black", linestyle=":", linewidth=1)
        axis.set_title(NAMES[name])
    axes[0].set_ylabel("share of all samples")
    save(figure, axes, path)


def main() -> None:
    config = tyro.cli(Config)
    try:
        if config.runs:
            FILE.parent.mkdir(exist_ok=True)
            FILE.write_text("".join(json.dumps(run) + "\n" for run in collect(config.runs)))
        runs = read()
        made = tables(runs)
        draw_policies(runs, FILE.parent / "policies.png")
        draw_weak_start(runs, FILE.parent / "weak_start.png")
        for page in PAGES:
            page.write_text(fill(page.read_text(), made))
    except (OSError, ValueError) as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(2)
    print(f"{len(runs)} runs; tables: {', '.join(made)}")


if __name__ == "__main__":
    main()
