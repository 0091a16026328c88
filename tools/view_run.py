"""A run, or several side by side, as one web page: curves, groups of samples, one sample, what changed.

    python -m tools.view_run outputs/demo_seed0    # writes outputs/demo_seed0/report.html, to open from disk

Give the folder of a run (--out-dir of grpo_trainer.py), or one that holds runs; runs in progress, too. The
page is view_run.html beside this file with the data of the runs put into it: what it holds is chosen here,
how it looks is said there. It loads nothing from elsewhere; its address says what is looked at, for links.
What models wrote stays data: JSON that cannot end its script element, of which the script makes text nodes.

Needs view_run.html, diagnose.py, run_folder.py, and toy/toy_world.py (with compute_score.py) for the toy
world's oracle.

Left out: comparing runs statistically, live updates (write it again), all turns of a prompt but the last.
"""

import itertools
import json
import math
import os
import sys
from dataclasses import asdict, dataclass
from operator import itemgetter
from pathlib import Path

import tyro

from run_folder import read_lines
from tools.diagnose import audit, diagnose
from toy.toy_world import first_wrong_paragraph

TEMPLATE = Path(__file__).with_suffix(".html")
# Of a line of samples.jsonl, what all samples of a group share.
OF_GROUP = ("step", "split", "group", "data_source", "prompt", "ground_truth")
# Of config.json, the texts that the page shows; and all numbers, where runs differ in them.
SETTINGS = (
    "model",
    "reward_fn",
    "reward_kwargs",
    "genrm",
    "router_address",
    "advantage",
    "reward_terms",
    "credit",
    "loss",
)


@dataclass
class Config:
    """Writes a page about runs."""

    # Folders of runs, or folders that hold such folders.
    folders: tyro.conf.Positional[tuple[Path, ...]] = (Path("outputs"),)
    out: Path | None = None  # The page; default: report.html in the first folder.
    max_mb: float = 4.0  # Where the samples take more, those of every second, third ... step are there.


def find_runs(folders) -> dict[str, Path]:
    """The runs in these folders by their path below what they share. ValueError: a folder without any."""
    found = []
    for folder in map(Path, folders):
        runs = sorted(path.parent for path in folder.glob("*/metrics.jsonl"))
        if (folder / "metrics.jsonl").is_file():
            runs = [folder]
        if not runs:
            raise ValueError(f"folders: {folder} holds no run (metrics.jsonl); give the --out-dir of one")
        found += map(Path.resolve, runs)
    common = os.path.commonpath([run.parent for run in found])
    return {run.relative_to(common).as_posix(): run for run in found}


def curves_of(lines: list[dict]) -> dict[str, list]:
    """Metric -> [[step, value], ...]."""
    curves = {}
    for line in lines:
        for key, value in line.items():
            if key != "step" and math.isfinite(value):
                curves.setdefault(key, []).append([line["step"], value])
    return curves


def sample_of(line: dict) -> dict:
    """The sample's own part of a line of samples.jsonl, and the first error by the toy world's oracle."""
    sample = {key: value for key, value in line.items() if key not in OF_GROUP}
    if "oracle_flawed_positive" in line["reward_extra_info"]:
        try:
            sample["oracle"] = first_wrong_paragraph(line["prompt"], line["response"])
        except ValueError:
            pass  # a world of the user's own, with an oracle of its own
    return sample


def group_of(lines: list[dict]) -> dict:
    """One prompt with its samples. What a function of groups says of all of them alike (its keys begin with
    group_) is the group's `verdict`, once."""
    group = {key: lines[0][key] for key in OF_GROUP}
    group["verdict"] = {}
    group["samples"] = list(map(sample_of, lines))
    infos = [sample["reward_extra_info"] for sample in group["samples"]]
    for key, value in list(infos[0].items()):
        if key.startswith("group_") and all(info.get(key) == value for info in infos):
            if value is not None:
                group["verdict"][key.removeprefix("group_")] = value
            for info in infos:
                info.pop(key, None)
    return group


def thin(groups: list[dict], limit: float) -> tuple[list[dict], int]:
    """(the groups of every n-th step, and all of evaluations; n), where possible of at most `limit` bytes."""
    sizes = [len(json.dumps(group)) for group in groups]
    every = 1
    while True:
        kept = []
        total = 0
        for group, size in zip(groups, sizes):
            if group["split"] == "val" or group["step"] % every == 0:
                kept.append(group)
                total += size
        if total <= limit or every > groups[-1]["step"]:
            return kept, every
        every += 1


def read_run(name: str, folder: Path, limit: float) -> dict:
    """All that the page knows of a run, and notes on what it does not show."""
    metrics, torn_metrics = read_lines(folder / "metrics.jsonl")
    samples, torn_samples = read_lines(folder / "samples.jsonl")
    by_group = {}  # of evaluations that were asked for again the last one
    for place, lines in itertools.groupby(samples, itemgetter("step", "split", "group")):
        by_group[place] = group_of(list(lines))
    groups, every = thin(list(by_group.values()), limit)
    notes = []
    if every > 1:
        notes.append(f"samples of one step in {every} (--max-mb shows more, {folder}/samples.jsonl has all)")
    if torn_metrics + torn_samples:
        notes.append("torn lines were left out (the run goes on, or was killed)")
    if not groups:
        notes.append("no samples (samples.jsonl is empty or missing)")
    bars = []  # (step, share, error) of the second judge
    for index, line in enumerate(metrics):
        if "reward/audit_flawed" in line:
            bars.append([line["step"], *audit(metrics[: index + 1])])
    settings = {}
    path = folder / "config.json"
    if path.is_file():
        for key, value in json.loads(path.read_text()).items():
            if key in SETTINGS or isinstance(value, (int, float)):
                settings[key] = value
    return {
        "name": name,
        "notes": [f"{name}: {note}" for note in notes],
        "settings": settings,
        "metrics": curves_of(metrics),
        "findings": [asdict(finding) for finding in diagnose(metrics, samples)],
        "audit": bars,
        "groups": groups,
    }


def write_page(folders, out: Path | None = None, max_mb: float = 4.0) -> Path:
    """Writes the page about the runs in `folders`; returns its path. Raises ValueError, OSError."""
    runs = find_runs(folders)
    data = []
    for name, folder in runs.items():
        data.append(read_run(name, folder, 1e6 * max_mb / len(runs)))
    text = json.dumps({"title": ", ".join(map(str, folders)), "runs": data})
    valid = json.loads(text, parse_constant=lambda _: None)  # NaN, which Python writes, is no JSON
    text = json.dumps(valid, ensure_ascii=False, separators=(",", ":"))
    page = TEMPLATE.read_text(encoding="utf-8").replace("__DATA__", text.replace("<", "\\u003c"))
    out = out or Path(folders[0], "report.html")
    out.write_text(page, encoding="utf-8", errors="replace")  # half a surrogate pair becomes "?"
    return out


def main() -> None:
    config = tyro.cli(Config, description=__doc__)
    try:
        out = write_page(config.folders, config.out, config.max_mb)
        print(f"page: {out} ({1e-6 * out.stat().st_size:.1f} MB)")
    except (OSError, ValueError) as error:
        print(f"error: {error}", file=sys.stderr)
        raise SystemExit(2) from error


if __name__ == "__main__":
    main()
