"""Show one or more runs as a web page: curves, groups of samples, single samples, and the configuration.

    python -m tools.view_run outputs/demo_seed0            # writes outputs/demo_seed0/report.html
    python -m tools.view_run outputs/demo_seed0 --serve    # serves the page and follows runs in progress

Pass the output directory of a run (--out-dir of grpo_trainer.py), or a directory that contains runs. Runs may
still be in progress.

Needs tools/page/, diagnose.py (with findings.toml), command_line.py, reward_worker.py, run_folder.py, and
toy/toy_world.py (with compute_score.py) for the oracle of the toy world. Not covered: statistical tests
between runs; messages of a prompt other than the question.

With --serve, a reload parses and diagnoses only what the runs have written since the last one.

This script selects the data, and tools/page/ displays it: page.html, page.css and four scripts in plain
JavaScript are embedded in the page together with the data. The page loads nothing else. Its address contains
the state of the view, so you can share a view as a link. Text from models cannot inject code: it is stored as
JSON that cannot end its script element, and the scripts insert it as text nodes.
"""

import contextlib
import itertools
import json
import math
import os
import sys
from collections import Counter
from dataclasses import asdict, dataclass, replace
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from operator import itemgetter
from pathlib import Path
from typing import Annotated

import tyro

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
from command_line import cli, hint_of, one_line_errors, without_secrets
from run_folder import parse_lines, read_lines
from tools.diagnose import Finding, audit, diagnose, errors_of, unfinished_step
from toy.toy_world import first_wrong_paragraph

PAGE = Path(__file__).parent / "page"
SCRIPTS = ("base.js", "curves.js", "samples.js", "about.js")  # in the order in which they must run
# All samples of a group have the same values of these keys in samples.jsonl.
OF_GROUP = ("step", "split", "group", "data_source", "file", "row", "seed", "prompt", "ground_truth")
READ = {}  # {path: (content, its lines)}, so that --serve parses only what is new
DIAGNOSED = {}  # {folder: (the steps that were diagnosed, {name: finding})}, for the same reason


@dataclass
class Config:
    """Write a web page about runs."""

    # Output directories of runs, or directories that contain such directories.
    folders: tyro.conf.Positional[tuple[Path, ...]] = (Path("outputs"),)
    # Output file of the page. Default: report.html in the first directory.
    out: Annotated[Path | None, tyro.conf.arg(help_behavior_hint=hint_of)] = None
    serve: bool = False  # Serve the page to browsers on this machine and follow the runs until Ctrl-C.
    port: int = 8123  # Port for --serve. 0: choose a free port.
    max_mb: float = 8.0  # Maximum size of all samples, in MB. Larger runs keep every second, third ... step.


def find_runs(folders) -> dict[str, Path]:
    """Return the runs in these directories, named by their paths below their common directory.

    Raises ValueError if a directory contains no runs.
    """
    found = []
    for folder in map(Path, folders):
        runs = sorted(path.parent for path in folder.glob("*/metrics.jsonl"))
        if (folder / "metrics.jsonl").is_file():
            runs = [folder]
        if not runs:
            raise ValueError(f"{folder}: contains no run (metrics.jsonl); pass the --out-dir of a run")
        found += map(Path.resolve, runs)
    common = os.path.commonpath([run.parent for run in found])
    return {run.relative_to(common).as_posix(): run for run in found}


def read_new(path: Path) -> tuple[list[dict], int]:
    """Return the objects of a JSONL file and the number of incomplete lines, as run_folder.read_lines does.

    Lines that this process has read before are not parsed again. Do not change them. Each object gets the key
    `bytes`, which is its size on the page without what its group shares.
    """
    content = path.read_bytes() if path.is_file() else b""
    known, lines = READ.get(path, (b"", []))
    if not content.startswith(known):  # A run that resumes writes its files again.
        known, lines = b"", []
    end = content.rfind(b"\n") + 1  # A run in progress may be writing the rest.
    new, torn = parse_lines(content[len(known) : end].decode(errors="replace"))
    rest, torn_rest = parse_lines(content[end:].decode(errors="replace"))
    for line in new + rest:
        line["bytes"] = len(json.dumps({key: line[key] for key in line.keys() - OF_GROUP}))
    lines = lines + new
    READ[path] = content[:end], lines
    return lines + rest, torn + torn_rest


def findings_of(folder: Path, metrics: list[dict], samples: list[dict]) -> list[Finding]:
    """Return the findings of a run. Only steps that are new since the last call are diagnosed."""
    steps = [
        (line["step"], line["reward/mean"], line.get("time/step"))
        for line in metrics
        if "reward/mean" in line
    ]
    known, before = DIAGNOSED.get(folder, ([], {}))
    if steps[: len(known)] != known:  # The run has resumed and repeated steps.
        known, before = [], {}
    found = dict(before)
    for finding in diagnose(metrics, samples, last=len(steps) - len(known)):
        if finding.name in before:
            finding = replace(finding, steps=before[finding.name].steps + finding.steps)
        found[finding.name] = finding
    DIAGNOSED[folder] = steps, found
    return list(found.values())


def curves_of(lines: list[dict]) -> dict[str, list]:
    """Return {metric: [[step, value], ...]}."""
    curves = {}
    for line in lines:
        for key, value in line.items():
            if key not in ("step", "bytes") and math.isfinite(value):
                curves.setdefault(key, []).append([line["step"], value])
    return curves


def group_of(lines: list[dict]) -> dict:
    """Return one prompt with its samples, and their first errors according to the toy world's oracle.

    A reward function for groups returns the same `group_...` keys for all samples of a group. They become the
    group's `verdict`.
    """
    group = {key: lines[0][key] for key in OF_GROUP if key in lines[0]}
    infos = [line["reward_extra_info"] for line in lines]
    common = set()
    group["verdict"] = {}
    for key, value in infos[0].items():
        if key.startswith("group_") and all(info.get(key) == value for info in infos):
            common.add(key)
            if value is not None:
                group["verdict"][key.removeprefix("group_")] = value
    group["samples"] = []
    for line in lines:
        sample = {key: value for key, value in line.items() if key not in (*OF_GROUP, "bytes")}
        info = line["reward_extra_info"]
        sample["reward_extra_info"] = {key: info[key] for key in info if key not in common}
        if "oracle_flawed_positive" in info:
            with contextlib.suppress(ValueError):  # The prompt is not from the toy world.
                sample["oracle"] = first_wrong_paragraph(line["prompt"], line["response"])
        group["samples"].append(sample)
    return group


def fit(groups: list[list[dict]], limit: float) -> tuple[list[list[dict]], float, int]:
    """Return the groups of every n-th step and of the last step, their size, and the smallest n that fits."""
    sizes = Counter()
    for lines in groups:
        sizes[lines[0]["step"]] += len(str(lines[0]["prompt"])) + sum(line["bytes"] for line in lines)
    steps = sorted(sizes)
    every = 1
    while True:
        kept = {*steps[::every], *steps[-1:]}
        size = sum(sizes[step] for step in kept)
        if every >= len(steps) or size <= limit:
            return [lines for lines in groups if lines[0]["step"] in kept], size, every
        every += 1


def thin(groups: list[list[dict]], limit: float) -> tuple[list[list[dict]], list[str]]:
    """Return the groups that fit in `limit` bytes, and notes on omissions. Evaluations get at most half."""
    trained = [lines for lines in groups if lines[0]["split"] != "val"]
    evaluated = [lines for lines in groups if lines[0]["split"] == "val"]
    evaluated, size, every_evaluation = fit(evaluated, limit / 2)
    trained, _, every_step = fit(trained, limit - size)
    notes = []
    for what, every in (("step", every_step), ("evaluation", every_evaluation)):
        if every > 1:
            notes.append(f"samples of only one {what} in {every}")
    return trained + evaluated, notes


def settings_of(folder: Path) -> dict:
    """Return the configuration of a run without secrets, which older versions wrote to its files."""
    path = folder / "config.json"
    if not path.is_file():
        return {}
    return without_secrets(json.loads(path.read_bytes()))


def read_run(name: str, folder: Path, limit: float) -> dict:
    """Return the data of a run for the page, with notes on omitted data."""
    metrics, torn_metrics = read_new(folder / "metrics.jsonl")
    samples, torn_samples = read_new(folder / "samples.jsonl")
    by_group = {}  # A repeated evaluation replaces the earlier one.
    for place, lines in itertools.groupby(samples, itemgetter("step", "split", "group")):
        by_group[place] = list(lines)
    groups, left_out = thin(list(by_group.values()), limit)
    notes = []
    if left_out:
        notes.append(f"{', '.join(left_out)} (raise --max-mb for more; {folder}/samples.jsonl has all)")
    if torn_metrics + torn_samples:
        notes.append("incomplete lines were skipped (the run is in progress or was killed)")
    if not groups:
        notes.append("no samples (samples.jsonl is empty or missing)")
    unfinished = unfinished_step(metrics, samples)
    if unfinished:
        notes.append(unfinished)
    bars = []  # (step, fraction, standard error) from the second judge
    for index, line in enumerate(metrics):
        if "reward/audit_flawed" in line:
            bars.append([line["step"], *audit(metrics[: index + 1])])
    starts, _ = read_lines(folder / "starts.jsonl")
    for start in starts:
        start["command"] = without_secrets(start["command"])
    return {
        "name": name,
        "notes": [f"{name}: {note}" for note in notes],
        "settings": settings_of(folder),
        "metrics": curves_of(metrics),
        "findings": [asdict(finding) for finding in findings_of(folder, metrics, samples)],
        "audit": bars,
        "starts": starts,
        "written": (folder / "metrics.jsonl").stat().st_mtime,
        "groups": list(map(group_of, groups)),
    }


def page_of(folders, max_mb: float, live: str = "") -> str:
    """Return the page of the runs in `folders`. `live` is the version of the data if the page is served."""
    runs = find_runs(folders)
    data = []
    for name, folder in runs.items():
        with errors_of(folder):
            data.append(read_run(name, folder, 1e6 * max_mb / len(runs)))
    compact = json.JSONEncoder(ensure_ascii=False, separators=(",", ":"), allow_nan=False)
    everything = {"title": ", ".join(map(str, folders)), "live": live, "runs": data}
    try:
        text = compact.encode(everything)
    except ValueError:  # NaN and Infinity are invalid JSON.
        text = compact.encode(json.loads(json.dumps(everything), parse_constant=lambda _: None))
    page = read_part("page.html").replace("__STYLE__", read_part("page.css"))
    page = page.replace("__SCRIPT__", "\n".join(map(read_part, SCRIPTS)))
    if live:  # A page on disk does not need connections.
        page = page.replace("default-src 'none';", "default-src 'none'; connect-src 'self';")
    return page.replace("__DATA__", text.replace("<", "\\u003c"))


def read_part(name: str) -> str:
    return (PAGE / name).read_text(encoding="utf-8")


def write_page(folders, out: Path | None = None, max_mb: float = 8.0) -> Path:
    """Write the page of the runs in `folders` and return its path. Raises ValueError or OSError."""
    page = page_of(folders, max_mb)
    out = out or Path(folders[0], "report.html")
    out.write_text(page, encoding="utf-8", errors="replace")  # A lone surrogate becomes "?".
    return out


def version_of(folders) -> str:
    """Return a version that changes when a run in `folders` writes data for the page."""
    parts = []
    for folder in find_runs(folders).values():
        for name in ("metrics.jsonl", "samples.jsonl"):
            path = folder / name
            if path.is_file():
                about = path.stat()
                parts += [about.st_size, about.st_mtime_ns]
    return "-".join(map(str, parts))


def start_server(folders, port: int = 0, max_mb: float = 8.0) -> ThreadingHTTPServer:
    """Return a server for the page (/) and the version of the data (/version); `serve_forever` runs it.

    Only this machine can reach the server. It rejects requests for other hosts, which prevents DNS rebinding:
    another web page cannot read the data through a name that points to 127.0.0.1. Raises OSError.
    """

    class Handler(BaseHTTPRequestHandler):
        def handle(self):
            with contextlib.suppress(ConnectionError):  # A browser may close its connection at any time.
                super().handle()

        def do_GET(self):
            host = self.headers.get("Host", "").partition(":")[0]  # Browsers omit port 80.
            if host not in ("127.0.0.1", "localhost"):
                return self.send_error(403)
            try:
                body = version_of(folders)
                kind = "text/plain"
                if self.path == "/":
                    body = page_of(folders, max_mb, live=body)
                    kind = "text/html"
                elif self.path != "/version":
                    return self.send_error(404)
            except (OSError, ValueError) as error:
                return self.send_error(500, "cannot read the run", str(error))
            self.send_response(200)
            self.send_header("Content-Type", f"{kind}; charset=utf-8")
            self.send_header("Cache-Control", "no-store")
            self.end_headers()
            self.wfile.write(body.encode("utf-8", errors="replace"))

        def log_message(self, *_):
            pass  # A log line per poll would hide all other output.

    find_runs(folders)  # Fail early if a directory contains no runs.
    try:
        return ThreadingHTTPServer(("127.0.0.1", port), Handler)
    except (OSError, OverflowError) as error:
        why = getattr(error, "strerror", error)
        raise OSError(f"--port {port}: {why}; pass another port, or 0 for a free one") from error


def main() -> None:
    config = cli(Config, __doc__, markers=[tyro.conf.DisallowNone])
    with one_line_errors():
        if config.serve:
            with start_server(config.folders, config.port, config.max_mb) as server:
                print(f"page: http://127.0.0.1:{server.server_port}/ (press Ctrl-C to stop)")
                server.serve_forever()
        out = write_page(config.folders, config.out, config.max_mb)
        print(f"page: {out} ({1e-6 * out.stat().st_size:.1f} MB); open it in a browser")


if __name__ == "__main__":
    main()
