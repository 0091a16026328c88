"""Print tables for finished runs in the toy worlds.

    python -m toy.report --runs outputs/demo_seed0                    # a demo; also writes report.md there
    python -m toy.report --runs outputs/demo_seed0 --so-far           # while the demo is still running
    python -m toy.report --runs outputs/own1_fapo outputs/own1_mine   # any runs from the same checkpoint

A demo's output directory contains the runs baseline/ and fapo/, and judge/ if a judge was trained.
docs/make_evidence.py summarises many runs, and tools/view_run.py shows every metric and sample. This file
needs command_line.py, reward_worker.py and run_folder.py.
"""

import sys
from dataclasses import dataclass
from pathlib import Path
from statistics import median


sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
from command_line import cli, one_line_errors
from run_folder import has_evaluation, read_lines

RUNS = {"outcome reward only": "baseline", "FAPO": "fapo"}
COLUMNS = {
    "accuracy": "toy",
    "flawed positives": "toy/oracle_flawed_positive_rate",
    "fully correct": "toy/truly_correct",
    '"How many?" accuracy': "toy_total",
}


@dataclass
class Config:
    """Settings of the report."""

    # Output directories of demos (with baseline/, fapo/ and possibly judge/), or of runs from one checkpoint.
    runs: tuple[Path, ...]
    # Report unfinished runs up to their latest evaluation, and skip missing runs and a judge in training.
    so_far: bool = False


def read_metrics(run: Path, so_far: bool = False, flag: str = "--runs") -> list[dict]:
    """Return the lines of a run's metrics.jsonl. With `so_far`, stop at the latest evaluation.

    An error names the `flag` that named the run.

    Raises:
        ValueError: The run is not finished, or with `so_far` it has fewer than two evaluations.
    """
    metrics, torn = read_lines(run / "metrics.jsonl")
    if so_far:
        torn = 0
        while metrics and not has_evaluation(metrics[-1]):
            metrics.pop()
    whole = len(metrics) > 1 and has_evaluation(metrics[0]) and has_evaluation(metrics[-1])
    if torn or not whole:
        raise ValueError(
            f"{flag} {run}: the run lacks its first or last evaluation; wait until it has "
            "finished, or resume it"
        )
    return metrics


def table(heads: list[str], *rows: list[str]) -> str:
    """Return a Markdown table with these column heads and rows."""
    text = f"| {' | '.join(heads)} |\n" + "|---" * len(heads) + "|"
    for cells in rows:
        text += f"\n| {' | '.join(cells)} |"
    return text


def cell(values: list[float], digits: int = 2) -> str:
    """Format the median and the range, such as 0.83 (0.78-0.87). Infinity becomes "never"."""
    shown = (min(values), median(values), max(values))
    low, middle, high = (f"{value:.{digits}f}".replace("inf", "never") for value in shown)
    if len(values) == 1 or low == "never":
        return middle
    return f"{middle} ({low}-{high})"


def check_evaluated(label: str, metrics: list[dict], key: str) -> None:
    """Raise ValueError if the first or the last evaluation of a run lacks this metric."""
    for line in (metrics[0], metrics[-1]):
        if f"val/{key}/mean@1" not in line:
            raise ValueError(
                f"--runs: {label} was not evaluated on the toy world's held-out data (no val/{key}/mean@1 in "
                "metrics.jsonl); use tools/view_run.py for runs on other data"
            )


def policy_table(runs: dict[str, list[dict]], columns=COLUMNS) -> str:
    """Return a table of held-out metrics before and after the runs, which start from the same model.

    Raises ValueError if a run was not evaluated on the toy world's held-out problems.
    """
    lines = {"initial policy": next(iter(runs.values()))[0]}
    for label, metrics in runs.items():
        check_evaluated(label, metrics, COLUMNS["accuracy"])
        lines[f"{label}, step {metrics[-1]['step']}"] = metrics[-1]
    rows = []
    for label, line in lines.items():
        row = [label]
        for key in columns.values():
            # A custom reward function need not return this key.
            value = line.get(f"val/{key}/mean@1")
            row.append("-" if value is None else "%.3f" % value)
        rows.append(row)
    return table(["512 held-out problems", *columns], *rows)


def judge_table(metrics: list[dict]) -> str:
    """Return a table of the judge before and after training. Half of the held-out solutions are flawed."""
    check_evaluated("judge", metrics, "fapo_critic/recall")
    rows = []
    for when, line in ("before", metrics[0]), ("after", metrics[-1]):
        shares = []
        for key in "recall", "sound_kept", "location":
            shares.append("%.3f" % line[f"val/fapo_critic/{key}/mean@1"])
        rows.append([when, *shares])
    return table(["judge, 512 held-out solutions", "recall", "specificity", "first-error accuracy"], *rows)


def report(folder: Path, so_far: bool = False) -> str:
    """Write FOLDER/report.md and return its text. Raises ValueError if a run is missing or unfinished."""
    policies = {}
    for label, name in RUNS.items():
        if not so_far or (folder / name).is_dir():
            policies[label] = read_metrics(folder / name, so_far)
    if not policies:
        raise ValueError(f"--runs {folder}: contains no run; pass the output directory of a demo or of a run")
    text = policy_table(policies)
    if (folder / "judge").is_dir():
        try:
            text = judge_table(read_metrics(folder / "judge", so_far)) + "\n\n" + text
        except ValueError:  # The demo evaluates its judge only before and after the training.
            if not so_far:
                raise
    (folder / "report.md").write_text(text + "\n")
    return text


def main() -> None:
    config = cli(Config, __doc__, end="docs/make_evidence.py")
    with one_line_errors():
        if (config.runs[0] / "metrics.jsonl").is_file():
            runs = {str(run): read_metrics(run, config.so_far) for run in config.runs}
            print(policy_table(runs, COLUMNS | {"all sums right": "toy/sums_right"}))
        else:
            for folder in config.runs:
                print(report(folder, config.so_far))


if __name__ == "__main__":
    main()
