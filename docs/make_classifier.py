"""Write the tables and the figure of docs/classifier.md from finished runs of recipes/toy_disrm.sh.

    for seed in 0 1 2; do SEED=$seed bash recipes/toy_disrm.sh --val-every 0; done
    python docs/make_classifier.py --runs outputs/disrm   # from these runs
    python docs/make_classifier.py                        # from docs/evidence/classifier.jsonl

With --runs, the script first writes the results of the runs to classifier.jsonl. The tables compare them with
the runs in runs.jsonl (docs/make_evidence.py) that have the same checkpoint, problems and seeds.
"""

import json
import sys
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean

import tyro
from matplotlib.figure import Figure

sys.path.insert(0, str(Path(__file__).resolve().parent))
import make_evidence as evidence
from run_folder import read_lines
from toy.report import read_metrics, table

FILE = evidence.FILE.with_name("classifier.jsonl")
PAGE = evidence.DOCS / "classifier.md"
START = "algo0"  # the runs in runs.jsonl that start from the shipped models
BESIDE = {
    "rule": "outcome reward only",
    "classifier": "classifier score as the reward",
    "flagged": "FAPO, classifier as the judge",
    "fapo_judge": "FAPO, generative judge",
    "fapo_oracle": "FAPO, oracle as the judge",
}
OURS = ("classifier", "flagged")
COLOURS = evidence.COLOURS | {"classifier": "#CC79A7", "flagged": "#E69F00"}
KINDS = ("truly correct", "flawed positive", "wrong")
LAST = 10  # A table summarises the training samples of this many steps.


@dataclass
class Config:
    """Writes the tables and the figure of docs/classifier.md."""

    runs: Path | None = None
    """Folder of finished runs (seedN/classifier and seedN/flagged). Default: use classifier.jsonl."""


def kind_of(result: dict) -> str:
    """Return the oracle's verdict on a sample (one of KINDS)."""
    if result["truly_correct"]:
        return "truly correct"
    if result["oracle_flawed_positive"]:
        return "flawed positive"
    return "wrong"


def called_sound(folder: Path, first: int, last: int) -> dict[str, list[int]]:
    """Return {kind: [samples with a score above 0, all samples]} for the samples logged in these steps."""
    counts = {kind: [0, 0] for kind in KINDS}
    for line in read_lines(folder / "samples.jsonl")[0]:
        if line["split"] == "train" and first <= line["step"] <= last:
            count = counts[kind_of(line["reward_extra_info"])]
            count[0] += line["reward_score"] > 0
            count[1] += 1
    return counts


def collect(folder: Path) -> list[dict]:
    """Return one dict for each run of OURS: that of `evidence.collect`, and the classifier's verdicts."""
    found = []
    for run in evidence.collect(folder):
        if run["algorithm"] not in OURS:
            continue
        path = folder / run["world"] / run["algorithm"]
        seed = int(run["world"].removeprefix("seed"))
        end = run["steps"]
        run |= {"world": START, "seed": seed}
        run["flaws"] = evidence.count_flaws(path, since=end - LAST + 1)["flaws"]
        run["first"] = called_sound(path, 1, LAST)
        run["last"] = called_sound(path, end - LAST + 1, end)
        spread = [line["reward/groups_with_spread"] for line in read_metrics(path)[1:]]
        run |= {"first_spread": fmean(spread[:LAST]), "last_spread": fmean(spread[-LAST:])}
        found.append(run)
    return found


def share(runs: list[dict], when: str, kind: str) -> str:
    """Return the fraction of this kind of sample that was called sound, and the number of samples."""
    sound = sum(run[when][kind][0] for run in runs)
    count = sum(run[when][kind][1] for run in runs)
    if not count:
        return "none"
    return f"{sound / count:.2f} of {count}"


def tables(runs: list[dict]) -> dict[str, str]:
    """Return all tables of the page as {name: Markdown}. `runs` contains the runs of both JSONL files."""
    columns = evidence.TOY_COLUMNS
    rows = [evidence.row("initial policy", evidence.of(runs, "rule", START), columns, when="before")]
    for name, title in BESIDE.items():
        some = evidence.of(runs, name, START)
        rows.append(evidence.row(title, some, columns))
    made = {"classifier": table(["method", *columns], *rows)}
    rows = []
    for name in OURS:
        some = evidence.of(runs, name, START)
        for title, when in (f"first {LAST} steps", "first"), (f"last {LAST} steps", "last"):
            spread = evidence.cell([run[f"{when}_spread"] for run in some])
            shares = [share(some, when, kind) for kind in KINDS]
            if name == "flagged":
                shares[-1] = "not queried"
            rows.append([f"{BESIDE[name]}, {title}", *shares, spread])
    heads = ["method and steps", "fully correct", *KINDS[1:]]
    heads.append("groups with a learning signal")
    made["called sound"] = table(heads, *rows)
    return made


def draw(runs: list[dict], path: Path) -> None:
    """Plot the oracle's verdicts on each step's training samples."""
    figure = Figure(figsize=(13.5, 4.2), layout="constrained", dpi=90)
    for axis, (key, title) in zip(figure.subplots(1, 3, sharey=True), evidence.PANELS.items()):
        for name in ("rule", *OURS, "fapo_judge"):
            curves = [run["curves"][key] for run in evidence.of(runs, name, START)]
            evidence.band(axis, curves, COLOURS[name], BESIDE[name])
        axis.set_title(title)
    evidence.save(figure, path)


def read() -> list[dict]:
    """Return the runs in runs.jsonl and classifier.jsonl."""
    return evidence.read() + [json.loads(line) for line in FILE.read_text().splitlines()]


def main() -> None:
    config = tyro.cli(Config)
    try:
        if config.runs:
            found = collect(config.runs)
            FILE.write_text("".join(json.dumps(run) + "\n" for run in found))
        runs = read()
        PAGE.write_text(evidence.fill(PAGE.read_text(), tables(runs)))
        draw(runs, FILE.with_suffix(".png"))
    except ValueError as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(2)


if __name__ == "__main__":
    main()
