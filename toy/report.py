"""The figure and the tables of finished demo runs.

    python -m toy.report --runs outputs/demo_seed0           # writes report.md and report.png in that folder
    python -m toy.report --runs outputs/demo_seed0 --so-far  # while the runs go on

The folder holds the runs baseline/ and fapo/, and judge/ if there was one. docs/make_evidence.py sums up many
such folders. It needs run_folder.py, and leaves out what tools/view_run.py shows: every metric and sample.
"""

import statistics
import sys
from dataclasses import dataclass
from pathlib import Path

import tyro
from matplotlib.figure import Figure

from run_folder import has_evaluation, read_lines

RUNS, COLOURS = {"rule only": "baseline", "FAPO": "fapo"}, ("tab:red", "tab:green")
PANELS = {
    "acc": "answer accuracy",
    "oracle_flawed_positive_rate": "flawed positives by the oracle\n(share of right answers)",
    "truly_correct": "truly correct\n(right answer, no wrong step)",
    "flawed_positive_rate": "flawed positives as the judge sees them\n(share of right answers)",
}
COLUMNS = {"accuracy": "toy", "flawed positives": "toy/oracle_flawed_positive_rate",
           "truly correct": "toy/truly_correct", '"How many?" accuracy': "toy_total"}  # fmt: skip


@dataclass
class Config:
    """Draws the figure and the tables of finished demo runs."""

    runs: Path  # Folder of the finished runs: baseline/ and fapo/, and judge/ if there was one
    so_far: bool = False  # Take unfinished runs up to their newest evaluation, and do without those to come


def read_metrics(run: Path, so_far: bool = False) -> list[dict]:
    """metrics.jsonl of a run. Raises ValueError where it is not finished, or `so_far` evaluated only once."""
    metrics, torn = read_lines(run / "metrics.jsonl")
    while so_far and metrics and not has_evaluation(metrics[-1]):
        metrics.pop()
    whole = len(metrics) > 1 and has_evaluation(metrics[0]) and has_evaluation(metrics[-1])
    if not whole or torn and not so_far:
        raise ValueError(f"runs: {run} is not finished; it lacks an evaluation at its start or end")
    return metrics


def smooth(values: list[float]) -> list[float]:
    """Each with the four before it, as their mean."""
    return [statistics.fmean(values[max(0, i - 4) : i + 1]) for i in range(len(values))]


def series(metrics: list[dict], key: str):
    """[steps, values] of a metric, where it was measured."""
    return [[line[name] for line in metrics if key in line] for name in ("step", key)]


def draw_runs(runs: dict[str, list[dict]], path: Path) -> None:
    """A panel a question, a line a run: thin: rollouts, thick: smoothed, dots: held-out problems."""
    figure = Figure(figsize=(4.6 * len(PANELS), 4.2), layout="constrained", dpi=110)
    for axis, (key, title) in zip(figure.subplots(1, len(PANELS), sharey=True), PANELS.items()):
        axis.set_title(title)
        for color, (label, metrics) in zip(COLOURS, runs.items()):
            steps, values = series(metrics, f"reward/{key}")
            axis.plot(steps, values, color=color, alpha=0.25)
            axis.plot(steps, smooth(values), color=color, linewidth=2, label=label)
            held_out = "val/toy/mean@1" if key == "acc" else f"val/toy/{key}/mean@1"
            axis.plot(*series(metrics, held_out), "o", color=color)
    save(figure, path)


def save(figure, path: Path) -> None:
    """Saves panels that show shares, step by step."""
    for axis in figure.axes:
        axis.set(xlabel="step", ylim=(-0.02, 1.02))
        axis.grid(alpha=0.3)
    figure.axes[0].legend()
    figure.savefig(path)


def table(heads: list[str], *rows: list[str]) -> str:
    """Markdown, from the heads of the columns and the rows below."""
    head, *lines = (f"| {' | '.join(cells)} |" for cells in (heads, *rows))
    return "\n".join([head, "|---" * len(heads) + "|", *lines])


def policy_table(runs: dict[str, list[dict]]) -> str:
    """Held-out numbers before and after each run."""
    lines = {"before": runs["rule only"][0]}
    lines |= {f"{label}, step {metrics[-1]['step']}": metrics[-1] for label, metrics in runs.items()}
    cells = [[label, *(f"{line[f'val/{key}/mean@1']:.3f}" for key in COLUMNS.values())]
             for label, line in lines.items()]  # fmt: skip
    return table(["512 held-out problems", *COLUMNS], *cells)


def judge_table(metrics: list[dict]) -> str:
    """The judge on held-out critiques before and after its own training. Half of the solutions are flawed."""
    rows = []
    for when, line in ("before", metrics[0]), ("after", metrics[-1]):
        keys = ("recall", "sound_kept", "location")
        recall, kept, location = (line[f"val/fapo_critic/{key}/mean@1"] for key in keys)
        flagged = recall + 1 - kept  # per flawed solution: there are as many sound ones
        shares = recall, kept, recall / (flagged or 1), 2 * recall / (1 + flagged), location
        rows.append([when, *(f"{share:.3f}" for share in shares)])
    heads = ["judge, 512 held-out solutions", "recall", "sound kept", "precision", "F1", "exact location"]
    return table(heads, *rows)


def report(runs: Path, so_far: bool = False) -> str:
    """Draws report.png and writes report.md in `runs`; returns the text. ValueError: see `read_metrics`."""
    policies = {label: read_metrics(runs / name, so_far) for label, name in RUNS.items()
                if not so_far or (runs / name).is_dir()}  # fmt: skip
    draw_runs(policies, runs / "report.png")
    tables = [judge_table(read_metrics(runs / "judge"))] if (runs / "judge").is_dir() else []
    text = "\n\n".join([*tables, policy_table(policies)])
    (runs / "report.md").write_text(text + "\n")
    return f"{text}\nfigure: {runs / 'report.png'}"


def main() -> None:
    try:
        config = tyro.cli(Config)
        print(report(config.runs, config.so_far))
    except ValueError as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(2)


if __name__ == "__main__":
    main()
