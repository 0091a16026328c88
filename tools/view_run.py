"""A run, or several side by side, as one web page: curves, groups of samples, one sample, and what changed in training.

    python -m tools.view_run outputs/demo_seed0        # writes outputs/demo_seed0/report.html, which opens from the disk

Give the folder of a run (--out-dir of grpo_trainer.py), or one that holds runs; runs in progress, too. The page is one file that
asks nobody for anything. Its views:

    Curves         every metric of every run; lines are training rollouts, markers are held-out problems, hover for the values
    Groups         one prompt and its G samples with their rewards and advantages, the picture that explains GRPO; below it one
                   sample: its paragraphs, the one the judge (and the oracle) named, the critique, where the reward came from
    What changed   the same held-out problem answered at the start, in the middle and at the end, by every run

What is looked at stands in the address, so that a link shows the same again. What models wrote is data: it is embedded as JSON
that cannot end its script element, and the script makes text nodes of it, never markup.

Left out: comparing runs statistically, editing, live updates (write the page again), prompts of several turns (their last).
"""

import contextlib
import itertools
import json
import math
import os
import sys
from collections import Counter
from dataclasses import dataclass
from operator import itemgetter
from pathlib import Path

import tyro

from compute_score import parse_critique, split_paragraphs
from run_folder import has_evaluation, read_lines
from toy.toy_world import first_wrong_paragraph

# As in toy_world.py's figure, so that a run has one colour wherever it is drawn; other runs take the further ones in turn.
COLOURS = {"baseline": "#d62728", "fapo": "#2ca02c", "papo": "#1f77b4"}
FURTHER = ("#9467bd", "#ff7f0e", "#17becf", "#e377c2", "#8c564b", "#bcbd22")
MAX_POINTS = 1000  # of a curve
NO_VERDICT = ("truncated", "unparsable", "http_error", "timeout")  # what a judge that was asked can answer instead of one


@dataclass
class Config:
    """Writes a page about runs."""

    folders: tyro.conf.Positional[tuple[Path, ...]]
    """Folders of runs, or folders that hold such folders."""
    out: Path | None = None
    """The page; default: report.html in the first folder."""
    max_mb: float = 4.0
    """Where the samples take more, whole groups are left out, evenly over the steps, and the page says so."""


# --------------------------------------------------------------------------------------------- from a run's files to the data


def find_runs(folders) -> dict[str, Path]:
    """The runs in these folders by their path below what they have in common. Raises ValueError for a folder without any."""
    found = []
    for folder in map(Path, folders):
        runs = [folder] if (folder / "metrics.jsonl").is_file() else sorted(p.parent for p in folder.glob("*/metrics.jsonl"))
        if not runs:
            raise ValueError(f"folders: {folder} holds no run (no metrics.jsonl, nor folders with one); give a run's --out-dir")
        found += [run.resolve() for run in runs]
    if not found:
        raise ValueError("folders: none was given; name the --out-dir of a run")
    common = os.path.commonpath([run.parent for run in found])
    return {run.relative_to(common).as_posix(): run for run in found}


def short(value) -> float | None:
    """Four digits are enough for the eye; None for what JSON cannot say."""
    return float(f"{value:.4g}") if isinstance(value, (int, float)) and math.isfinite(value) else None


def curves_of(lines: list[dict]) -> dict[str, list]:
    """Metric -> [[step, value], ...], of at most about MAX_POINTS lines and all that hold an evaluation."""
    every, curves = math.ceil(len(lines) / MAX_POINTS), {}
    for index, line in enumerate(lines):
        if index % every == 0 or index == len(lines) - 1 or has_evaluation(line):
            for key, value in line.items():
                if key != "step" and short(value) is not None:
                    curves.setdefault(key, []).append([line["step"], short(value)])
    return curves


def is_critique(info: dict) -> bool:
    """Whether a judge is in training: it says a paragraph, `pred`, where `gt` is the first wrong one (-1 for none)."""
    return {"acc", "exact", "pred", "gt"} <= info.keys()


def verdict_of(line: dict, info: dict) -> tuple[str, str]:
    """(kind, words): what became of a sample. A kind has a colour: good, flawed, bad, silent or plain."""
    right, flawed, oracle = info.get("acc"), info.get("flawed_positive"), info.get("oracle_flawed_positive")
    if line.get("reward_score") is None:
        return "silent", f"no verdict: {info.get('genrm_status', line.get('status'))}"
    if right is None:
        return "plain", "scored"
    if is_critique(info):
        words = "verdict right" if info["exact"] else "right that it is flawed, other paragraph" if right else "verdict wrong"
        return "good" if info["exact"] else "flawed" if right else "bad", words
    if not right:
        return "bad", "wrong answer"
    words = "not judged" if flawed is None else "flawed" if flawed else "sound"
    if oracle is not None and oracle != flawed:
        words += f" (oracle: {'flawed' if oracle else 'sound'})"
    known = oracle if flawed is None else flawed
    return "plain" if known is None else "flawed" if known else "good", f"right answer, {words}"


def flags_of(line: dict, info: dict) -> list[str]:
    """The filters of the page that find this sample."""
    judge, oracle, status = info.get("flawed_positive"), info.get("oracle_flawed_positive"), info.get("genrm_status")
    if is_critique(info):
        judge, oracle = None if info["pred"] is None else info["pred"] != -1, info["gt"] != -1
    flags = {
        "judge": judge,
        "oracle": oracle,
        "wrong": judge is not None and oracle is not None and judge != oracle,
        "silent": line.get("reward_score") is None or status in NO_VERDICT,
        "cut": line.get("clipped") or status == "truncated",
    }
    return [name for name, is_so in flags.items() if is_so]


def sample_of(line: dict) -> dict:
    """What the page shows of a line of samples.jsonl."""
    info = line.get("reward_extra_info") or {}
    kind, words = verdict_of(line, info)
    paragraphs, sample = split_paragraphs(line.get("response", "")), {}
    if "critique" in info:
        sample["critique"] = str(info["critique"])
        if info.get("genrm_status") == "ok":
            sample["judge"] = parse_critique(sample["critique"], None)
    if "oracle_flawed_positive" in info:
        with contextlib.suppress(ValueError):  # a world of the user's own, with an oracle of its own
            sample["oracle"] = first_wrong_paragraph(line["prompt"], paragraphs)
    rest = {key: value for key, value in info.items() if key not in ("score", "critique", "overlong_penalty")}
    return sample | {
        "paragraphs": paragraphs, "kind": kind, "verdict": words, "flags": flags_of(line, info),
        "score": short(info.get("score", line.get("reward_score"))), "penalty": short(info.get("overlong_penalty", 0.0)),
        "reward": short(line.get("reward_score")), "advantage": short(line.get("advantage")), "status": line.get("status"),
        "length": line.get("response_length"), "clipped": line.get("clipped"), "seconds": short(line.get("seconds")),
        "info": {key: value if isinstance(value, str) else json.dumps(value, ensure_ascii=False) for key, value in rest.items()},
    }  # fmt: skip


def groups_of(lines: list[dict]) -> list[dict]:
    """One prompt with its samples each; `place` counts those of a step and data source."""
    groups, places = [], Counter()
    for (step, split, number), members in itertools.groupby(lines, itemgetter("step", "split", "group")):
        first, *_ = members = list(members)
        source = first["data_source"]
        groups.append({"step": step, "split": split, "group": number, "source": source, "place": places[step, split, source],
                       "prompt": str(first["prompt"]), "truth": str(first["ground_truth"]),
                       "samples": [sample_of(line) for line in members]})  # fmt: skip
        places[step, split, source] += 1
    return groups


def thin(groups: list[dict], limit: float) -> tuple[list[dict], float]:
    """(whole groups of at most `limit` bytes of JSON, what all would take).

    The first group of every step comes before the second of any. Within that what the last view compares comes first (the
    evaluations at start, middle and end), then the steps in an order whose every beginning is spread over the run.
    """
    steps = sorted({group["step"] for group in groups})
    evaluated = sorted({group["step"] for group in groups if group["split"] == "val"})
    ends = [min(evaluated, key=lambda step: abs(step - share * evaluated[-1])) for share in (0, 0.5, 1)] if evaluated else []
    spread = {step: int(f"{index:032b}"[::-1], 2) for index, step in enumerate(steps)}  # bits reversed: 0, 1/2, 1/4, 3/4, ...
    sizes = [len(json.dumps(group, ensure_ascii=False).encode(errors="replace")) for group in groups]
    ranks = [(g["place"], not (g["split"] == "val" and g["step"] in ends), spread[g["step"]]) for g in groups]
    order = sorted(range(len(groups)), key=ranks.__getitem__)
    totals = itertools.accumulate(sizes[i] for i in order)
    kept = sorted(i for i, total in zip(order, totals) if total <= limit)
    return [groups[i] for i in kept], sum(sizes)


def read_run(name: str, folder: Path, limit: float) -> dict:
    """All that the page knows of a run, and notes on what it does not show."""
    metrics, torn_metrics = read_lines(folder / "metrics.jsonl")
    samples, torn_samples = read_lines(folder / "samples.jsonl")
    if samples and "group" not in samples[0]:
        raise ValueError(f"folders: the samples.jsonl of {folder} was written by an earlier version, without groups")
    groups, notes = groups_of(samples), []
    kept, size = thin(groups, limit)
    if len(kept) < len(groups):
        notes.append(f"{name}: {len(kept)} of {len(groups)} groups are here, spread over the run; all take {1e-6 * size:.1f} MB "
                     f"(--max-mb shows more, and {folder.name}/samples.jsonl has them all)")  # fmt: skip
    if len(metrics) > MAX_POINTS:
        notes.append(f"{name}: curves have about {MAX_POINTS} of {len(metrics)} steps")
    if torn_metrics + torn_samples:
        notes.append(f"{name}: {torn_metrics + torn_samples} torn lines were left out (the run goes on, or was killed)")
    if not groups:
        notes.append(f"{name}: no samples (samples.jsonl is empty or missing)")
    config = json.loads((folder / "config.json").read_text()) if (folder / "config.json").is_file() else {}
    advantage = config.get("advantage", "fapo")
    return {"name": name, "notes": notes, "advantage": advantage, "metrics": curves_of(metrics), "groups": kept}


def write_page(folders, out: Path | None = None, max_mb: float = 4.0) -> Path:
    """Writes the page about the runs in `folders`; returns its path. Raises ValueError where there is no run, OSError."""
    runs, own, further = find_runs(folders), dict(COLOURS), itertools.cycle(FURTHER)
    data = [read_run(name, folder, 1e6 * max_mb / len(runs)) for name, folder in runs.items()]
    for run in data:
        run["colour"] = own.pop(run["name"].split("/")[-1], None) or next(further)  # the second "fapo" needs another one
    data = {"title": ", ".join(str(folder) for folder in folders), "runs": data}
    text = json.dumps(data, ensure_ascii=False, separators=(",", ":"), allow_nan=False).replace("<", "\\u003c")
    out = out or Path(folders[0], "report.html")
    out.write_text(PAGE.replace("__DATA__", text), encoding="utf-8", errors="replace")  # a lone surrogate becomes "?"
    return out


# ------------------------------------------------------------------------------------------------------------------- the page

PAGE = r"""<!doctype html>
<html lang="en">
<meta charset="utf-8">
<meta http-equiv="Content-Security-Policy" content="default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>Runs</title>
<style>
  :root { color-scheme: light dark; --text: #1c2128; --soft: #59636e; --back: #fff; --panel: #f6f8fa; --line: #d1d9e0;
          --link: #0550ae; --good: 26 127 55; --flawed: 154 103 0; --bad: 207 34 46; --silent: 130 80 223; --plain: 89 99 110 }
  @media (prefers-color-scheme: dark) { :root {
    --text: #e6edf3; --soft: #9aa4af; --back: #0d1117; --panel: #161b22; --line: #3d444d;
    --link: #79b8ff; --good: 63 185 80; --flawed: 210 153 34; --bad: 248 81 73; --silent: 171 125 248; --plain: 154 164 175 } }
  body { margin: 0 auto; max-width: 1240px; padding: 0 1rem 3rem; font: 15px/1.45 system-ui, sans-serif;
         color: var(--text); background: var(--back) }
  h1 { font-size: 1.25rem } h2 { font-size: 1.05rem; margin: 1rem 0 .4rem } a { color: var(--link) } p { margin: .5rem 0 }
  [hidden] { display: none !important } :focus-visible { outline: 2px solid var(--link); outline-offset: 2px }
  nav a { display: inline-block; padding: .3rem .8rem; text-decoration: none; border-bottom: 3px solid transparent }
  nav a[aria-current] { border-color: var(--link); font-weight: 600 }
  .note, .soft { color: var(--soft); font-size: .87rem } .note { border-left: 3px solid rgb(var(--flawed)); padding-left: .6rem }
  .bar { display: flex; flex-wrap: wrap; gap: .4rem 1rem; align-items: center; margin: .8rem 0 }
  select, input { font: inherit; max-width: 32rem } #step { width: 16rem; max-width: 60vw } #q { width: 19rem }
  .charts, .beside, .cards, .two { display: grid; gap: 1rem; grid-template-columns: repeat(auto-fit, minmax(330px, 1fr)) }
  .cards { gap: .2rem; grid-template-columns: repeat(auto-fill, minmax(195px, 1fr)) }
  .two { grid-template-columns: minmax(180px, 1fr) minmax(0, 3.4fr) }
  figure, pre, .box { margin: .2rem 0; padding: .5rem .7rem; background: var(--panel) }
  figure, pre, .box, .list a, .card { border: 1px solid var(--line); border-radius: 6px }
  figcaption { font-weight: 600; font-size: .92rem } svg { width: 100%; display: block; cursor: crosshair }
  text { fill: var(--soft); font-size: 10px; text-anchor: middle } .held-out { font-size: 13px; dominant-baseline: central }
  .readout { font-size: .8rem } .readout span { margin-right: .7em; white-space: nowrap }
  .swatch { display: inline-block; width: .75em; height: .75em; border-radius: 2px; margin-right: .3em }
  .list { max-height: 34rem; overflow: auto } .list div { white-space: nowrap; overflow: hidden; text-overflow: ellipsis }
  .list a, .card { display: block; margin: 3px; padding: .35rem .5rem; color: inherit; text-decoration: none }
  a[aria-current=true] { box-shadow: 0 0 0 2px var(--link) } .dim { opacity: .38 }
  .advantage { display: block; text-align: center; font-weight: 600; border-radius: 4px; margin: .2rem 0 }
  .chip { display: inline-block; border-radius: 1em; padding: 0 .55em; font-size: .85rem; border: 1px solid }
  pre, li { white-space: pre-wrap; overflow-wrap: anywhere; font: .87rem/1.4 ui-monospace, monospace }
  pre, .box { max-height: 30rem; overflow: auto } ol { padding-left: 2.2rem; margin: 0 }
  li { padding: .15rem .4rem; border-left: 3px solid transparent }
  li.named { border-color: rgb(var(--flawed)); background: rgb(var(--flawed) / .16) }
  td, th { text-align: left; vertical-align: top; padding: .2rem .7rem .2rem 0 } td { overflow-wrap: anywhere }
  .changed { width: 100%; table-layout: fixed } .changed th { width: 7rem }
  @media (max-width: 760px) { .two { grid-template-columns: minmax(0, 1fr) } .list { max-height: 10rem } }
</style>
<h1 id="title"></h1>
<nav><a id="tab-curves">Curves</a><a id="tab-groups">Groups and samples</a><a id="tab-changed">What changed</a></nav>
<div id="notes"></div>
<section id="curves">
  <div class="bar" id="legend"></div>
  <p class="soft">Lines are training rollouts (thin: each step; thick: mean of the last five). Markers are held-out problems<span
    id="glyphs"></span>: between two, nothing was measured. Hover or arrow keys: the values; click or Enter: the samples.</p>
  <div class="charts" id="main-charts"></div>
  <details id="more"><summary>All other metrics</summary><div class="charts" id="more-charts"></div></details>
</section>
<section id="groups">
  <div class="bar">
    <label>Run <select id="run"></select></label>
    <label>Split <select id="split"><option value="train">training</option><option value="val">held-out</option></select></label>
    <label>Show <select id="filter"></select></label>
    <label>Search <input id="q" type="search" placeholder="in prompts, solutions, critiques"></label>
  </div>
  <div class="bar">
    <label>Step <input id="step" type="range" min="0"></label><output id="at" for="step"></output>
    <a id="previous">previous</a><a id="next">next</a><span id="count" role="status" class="soft"></span>
  </div>
  <div class="two"><div class="list" id="list"></div><div id="group"></div></div>
  <div class="beside" id="sample"></div>
</section>
<section id="changed">
  <div class="bar"><label>Held-out problem <select id="problem"></select></label></div>
  <p class="soft">The same problem at the start, in the middle and at the end; those whose verdicts differ most come first.</p>
  <div id="answers"></div>
</section>
<script type="application/json" id="data">__DATA__</script>
<script>
"use strict";
const $ = id => document.getElementById(id), {title: TITLE, runs: RUNS} = JSON.parse($("data").textContent);
const FILTERS = {"": "all samples", judge: "flawed by the judge", oracle: "flawed by the oracle", wrong: "judge wrong",
                 silent: "no verdict", cut: "truncated"};
const CHARTS = {"reward/mean": "reward", "reward/acc": "accuracy",
  "reward/flawed_positive_rate": "flawed among right answers, by the judge",
  "reward/oracle_flawed_positive_rate": "flawed among right answers, by the oracle",
  "reward/truly_correct": "truly correct: right, no wrong step", "response_length/mean": "response length (tokens)",
  "actor/entropy": "entropy", "genrm/error_rate": "judge without a verdict", "time/step": "seconds a step"};
const SHARES = /acc$|_rate$|_correct$/, GLYPHS = "●◆■▲▼★";  // drawn from 0 to 1; one for each held-out data source
let state = {};  // what the address says after the #

// ---- Small tools. Whatever comes from the data goes through append(), which makes text of it, or through a link's encoding.
function build(node, attributes, children) {
  for (const [name, value] of Object.entries(attributes)) if (value != null) node.setAttribute(name, value);
  node.append(...children.flat(2).filter(child => child != null));
  return node;
}
const el = (tag, attributes, ...children) => build(document.createElement(tag), attributes, children);
const SVG = "http://www.w3.org/2000/svg";
const svg = (tag, attributes, ...children) => build(document.createElementNS(SVG, tag), attributes, children);
const show = value => value == null ? "–" : String(+value.toPrecision(3)).replace("-", "−");
const signed = value => (value > 0 ? "+" : "") + show(value);
const sum = values => values.reduce((total, value) => total + value, 0);
const unique = values => [...new Set(values)].sort((a, b) => a - b);
const nearest = (values, to) => values.reduce((a, b) => Math.abs(b - to) < Math.abs(a - to) ? b : a, values[0]);
const square = (colour, title) => el("i", {class: "swatch", style: `background:${colour}`, title});
const link = changes => "#" + new URLSearchParams(Object.entries({...state, ...changes}).filter(([, value]) => value !== ""));
const go = changes => location.replace(link(changes));

// ---- Curves
const METRICS = [...new Set(RUNS.flatMap(run => Object.keys(run.metrics)))].sort();
// A source's name may have slashes: the one metric that every source has tells where it ends.
const SOURCES = [...new Set(METRICS.map(key => key.match(/^val\/(.+)\/no_verdict\/mean@\d+$/)?.[1]).filter(Boolean))];
const sourceOf = key => SOURCES.find(source => key.startsWith(`val/${source}/`));
const glyph = source => GLYPHS[SOURCES.indexOf(source) % GLYPHS.length];
const LAST = Math.max(1, ...RUNS.flatMap(run => Object.values(run.metrics).map(points => points.at(-1)[0])));
const isHidden = run => (state.hide ?? "").split("\n").includes(run.name);
const smooth = points => points.map(([step], i) => {
  const last = points.slice(Math.max(0, i - 4), i + 1);
  return [step, sum(last.map(point => point[1])) / last.length];
});
let drawn = [];  // a function of each chart on the screen: all show the values of the step that one of them is pointed at

function belongs(name, key) {  // is it the metric `key`, or what that is on held-out problems?
  const parts = sourceOf(name) && name.slice(`val/${sourceOf(name)}`.length).match(/^(?:\/(.+))?\/mean@\d+$/);
  return name === key || parts && key === `reward/${{score: "mean"}[parts[1]] ?? parts[1] ?? "acc"}`;
}

function ticks(low, high) {
  const least = (high - low) / 5, power = 10 ** Math.floor(Math.log10(least));
  const size = power * [1, 2, 5, 10].find(n => n * power > .99 * least), first = Math.ceil(low / size - 1e-9);
  return Array.from({length: Math.floor(high / size + 1e-9) - first + 1}, (_, i) => (first + i) * size);
}

function chart(key, title) {
  const seriesOf = run => Object.entries(run.metrics).filter(([name]) => belongs(name, key))
    .map(([name, points]) => ({run, points, source: sourceOf(name)}));
  const series = RUNS.filter(run => !isHidden(run)).flatMap(seriesOf).sort((a, b) => !!a.source - !!b.source);  // markers on top
  if (!series.length) return null;
  const values = series.flatMap(one => one.points.map(point => point[1]));
  let [low, high] = SHARES.test(key) ? [0, 1] : [Math.min(...values), Math.max(...values)];
  if (low > 0 && low < high / 2) low = 0;
  if (high === low) [low, high] = [low - .5 * (Math.abs(low) || 1), high + .5 * (Math.abs(high) || 1)];
  const W = 360, H = 190, left = 44, right = 10, top = 8, bottom = 18;
  const x = step => left + step / LAST * (W - left - right);
  const y = value => top + (high - value) / (high - low) * (H - top - bottom);
  const line = (run, points, width, opacity) => svg("polyline", {fill: "none", stroke: run.colour, "stroke-width": width, opacity,
    points: points.map(([step, value]) => `${x(step).toFixed(1)},${y(value).toFixed(1)}`).join(" ")});
  const cursor = svg("path", {stroke: "currentColor", opacity: .4}), readout = el("div", {class: "readout"});
  const picture = svg("svg", {viewBox: `0 0 ${W} ${H}`, tabindex: 0, role: "img", "aria-label": `${title} (arrow keys: steps)`},
    ticks(low, high).map(value => [svg("path", {d: `M${left} ${y(value)}H${W - right}`, stroke: "var(--line)"}),
      svg("text", {x: left - 22, y: y(value) + 3}, show(value))]),
    ticks(0, LAST).filter(Number.isInteger).map(step => svg("text", {x: x(step), y: H - 4}, String(step))),
    series.map(({run, points, source}) => source ? points.map(([step, value]) => svg("text",
      {class: "held-out", x: x(step), y: y(value), style: `fill:${run.colour}`}, glyph(source)))
      : [line(run, points, 1, .35), line(run, smooth(points), 2, 1)]), cursor);
  const steps = unique(series.flatMap(one => one.points.map(point => point[0])));
  let at;
  const point = wanted => {
    at = nearest(steps, wanted);
    cursor.setAttribute("d", `M${x(at)} ${top}V${H - bottom}`);
    readout.replaceChildren(`step ${at}`, ...RUNS.filter(run => series.some(one => one.run === run)).map(run => el("div", {},
      square(run.colour), el("span", {}, run.name), series.filter(one => one.run === run).map(({points, source}) => {
        const value = points.find(found => found[0] === at)?.[1];
        return value == null ? null : el("span", {}, source ? `${glyph(source)} ` : "", el("b", {}, show(value)));
      }))));
  };
  const pointAll = step => drawn.forEach(other => other(step));
  const samples = () => location.hash = link({view: "groups", step: at, group: "", sample: ""});
  picture.addEventListener("pointermove", event => {
    const box = picture.getBoundingClientRect();
    pointAll(((event.clientX - box.left) / box.width * W - left) / (W - left - right) * LAST);
  });
  picture.addEventListener("click", samples);
  picture.addEventListener("keydown", event => {
    const to = steps[steps.indexOf(at) + ({ArrowLeft: -1, ArrowRight: 1}[event.key] ?? NaN)];
    if (to != null) pointAll(to);
    if (event.key === "Enter") samples();
  });
  point(LAST);
  drawn.push(point);
  return el("figure", {"data-key": key}, el("figcaption", {}, title), picture, readout);
}

function renderCurves() {
  $("legend").replaceChildren(...RUNS.map(run => {
    const box = el("input", {type: "checkbox", id: `show-${run.name}`}), toggled = one => isHidden(one) !== (one === run);
    box.checked = !isHidden(run);
    box.addEventListener("change", () => go({hide: RUNS.filter(toggled).map(one => one.name).join("\n")}));
    return el("label", {}, box, square(run.colour), run.name);
  }));
  drawn = [];
  const others = METRICS.filter(key => !Object.keys(CHARTS).some(main => belongs(key, main)));
  const draw = (id, charts) => $(id).replaceChildren(...charts.map(([key, title]) => chart(key, title)).filter(Boolean));
  draw("main-charts", Object.entries(CHARTS));
  $("more").ontoggle = () => draw("more-charts", $("more").open ? others.map(key => [key, key]) : []);
  $("more").ontoggle();
}

// ---- Groups and samples
const matches = (group, sample) => (!state.filter || sample.flags.includes(state.filter)) && (!state.q || [group.prompt,
  ...sample.paragraphs, sample.critique, sample.verdict].join("\n").toLowerCase().includes(state.q.toLowerCase()));
const chip = ({kind, verdict}) => el("span", {class: "chip", style: `color:rgb(var(--${kind}))`}, verdict);
const tint = ({advantage}) => advantage  // green to red; nothing where there is no advantage, or one of 0
  ? `background:rgb(var(--${advantage > 0 ? "good" : "bad"}) / ${(.15 + .3 * Math.min(Math.abs(advantage), 2)).toFixed(2)})` : "";
const addressOf = (run, {split, step, group}, sample = "") => ({view: "groups", run: run.name, split, step, group, sample});

function solution({paragraphs, judge, oracle}) {
  const missing = oracle >= paragraphs.length ? ["(a paragraph is missing)"] : [];
  return el("ol", {start: 0}, [...paragraphs, ...missing].map((text, i) => {
    const names = [judge === i && "the judge", oracle === i && "the oracle"].filter(Boolean).join(" and ");
    return el("li", {class: names && "named"}, text, names && el("div", {class: "soft"}, `← ${names}: first wrong paragraph`));
  }));
}

function renderGroups() {
  const run = RUNS.find(one => one.name === state.run) ?? RUNS.find(one => one.groups.length) ?? RUNS[0];
  const split = state.split ?? (run.groups.some(group => group.split === "train") ? "train" : "val");
  const found = run.groups.filter(group => group.split === split && group.samples.some(sample => matches(group, sample)));
  const steps = unique(found.map(group => group.step)), step = nearest(steps, +(state.step ?? 0)), i = steps.indexOf(step);
  for (const [id, value] of Object.entries({run: run.name, split, filter: state.filter ?? "", q: state.q ?? ""}))
    if ($(id).value !== value) $(id).value = value;
  Object.assign($("step"), {max: Math.max(steps.length - 1, 0), value: i, disabled: !found.length,
    oninput: () => go({step: steps[$("step").value], group: "", sample: ""})});
  $("step").setAttribute("aria-valuetext", $("at").value = String(step ?? "none"));
  for (const [id, to] of [["previous", steps[i - 1]], ["next", steps[i + 1]]])
    build($(id), {href: link({step: to ?? step ?? "", group: "", sample: ""}), class: to == null ? "dim" : ""}, []);
  const number = sum(found.map(group => group.samples.filter(sample => matches(group, sample)).length));
  $("count").textContent = `${number} samples in ${found.length} groups at ${steps.length} steps`;
  const here = found.filter(group => group.step === step), group = here.find(one => String(one.group) === state.group) ?? here[0];
  $("list").replaceChildren(...here.map(one => el("a", {id: `group-${one.group}`, "aria-current": one === group,
    href: link(addressOf(run, one))}, el("div", {}, one.prompt),
    one.samples.map(({kind, verdict}) => square(`rgb(var(--${kind}))`, verdict)))));
  const chosen = group?.samples[+state.sample] ? +state.sample : group?.samples.findIndex(sample => matches(group, sample));
  $("group").replaceChildren(...group ? groupView(run, group, chosen) : ["Nothing matches."]);
  $("sample").replaceChildren(...group ? sampleView(run, group, chosen) : []);
}

function statistics(group) {
  const rewards = group.samples.map(sample => sample.reward).filter(reward => reward != null);
  const mean = sum(rewards) / rewards.length;
  return [mean, Math.sqrt(sum(rewards.map(reward => (reward - mean) ** 2)) / (rewards.length - 1))];
}

function groupView(run, group, chosen) {
  const [mean, std] = statistics(group), formula = run.advantage !== "fapo" ? "Answer and reasoning are normalised apart (PAPO)."
    : "Advantage = (reward − mean) / standard deviation: better than its siblings becomes likelier, worse less likely.";
  return [
    el("h2", {}, square(run.colour), `${run.name}, step ${group.step}: one prompt, G = ${group.samples.length}`),
    el("pre", {}, group.prompt), el("p", {class: "soft"}, `${group.source}; truth: ${group.truth}`),
    el("p", {}, std >= 0 ? `Mean reward ${show(mean)}, standard deviation ${show(std)}. ${formula}` : ""),
    el("div", {class: "cards"}, group.samples.map((sample, i) => el("a", {id: `card-${i}`, "aria-current": i === chosen,
      class: matches(group, sample) ? "card" : "card dim", href: link(addressOf(run, group, i))},
      `sample ${i}: reward `, el("b", {}, show(sample.reward)), el("span", {class: "advantage", style: tint(sample)},
        sample.advantage == null ? "no advantage" : `advantage ${signed(sample.advantage)}`), chip(sample),
      el("div", {class: "soft"}, `${sample.length} tokens`, sample.clipped ? ", cut" : "")))),
  ];
}

function sampleView(run, group, chosen) {
  const sample = group.samples[chosen], [mean, std] = statistics(group), {genrm_status: status, genrm_error: error} = sample.info;
  const silence = error ?? (!status || status === "skipped" ? "No judge was asked."
    : `It was not kept: --reward-kwargs '{"keep_critique": true}' keeps it.`);
  const reward = sample.reward == null ? "none: no verdict"
    : `score ${signed(sample.score)}, length penalty ${show(sample.penalty)}: reward ${signed(sample.reward)}`;
  const formula = run.advantage === "fapo" && std > 0 ? `(${show(sample.reward)} − ${show(mean)}) / ${show(std)} = ` : "";
  const advantage = sample.advantage != null ? formula + signed(sample.advantage)
    : group.split === "val" ? "none: a held-out problem"
    : sample.reward == null ? "none: no verdict, no part in the loss" : "none: the group was dropped, it teaches nothing";
  const rows = [["verdict", chip(sample)], ["reward", reward], ["advantage", el("span", {style: tint(sample)}, advantage)],
    ["status", sample.status + (sample.seconds == null ? "" : ` in ${show(sample.seconds)} s`)], ...Object.entries(sample.info)];
  return [
    el("div", {}, el("h2", {}, `Sample ${chosen}, paragraph by paragraph`), el("div", {class: "box"}, solution(sample))),
    el("div", {}, el("h2", {}, "The judge's critique"), el("pre", {}, sample.critique ?? silence)),
    el("div", {}, el("h2", {}, "Where the reward came from"), el("table", {}, rows.map(([name, value]) =>
      el("tr", {}, el("th", {}, name), el("td", {}, value))))),
  ];
}

// ---- What changed
const idOf = group => `${group.source}: ${group.prompt}`;
const EVALUATED = RUNS.map(run => {
  const groups = run.groups.filter(group => group.split === "val"), steps = unique(groups.map(group => group.step));
  const looks = unique([0, .5, 1].map(share => nearest(steps, share * steps.at(-1))));  // at the start, in the middle, at the end
  return {run, groups, looks, found: new Map(groups.map(group => [`${group.step} ${idOf(group)}`, group]))};
});
const PROBLEMS = [...new Set(EVALUATED.flatMap(({groups}) => groups.map(idOf)))].map((id, number) => {
  const rows = EVALUATED.map(({run, looks, found}) => ({run, groups: looks.map(step => found.get(`${step} ${id}`))}))
    .filter(row => row.groups.some(Boolean));
  const kinds = new Set(rows.flatMap(row => row.groups.map(group => group?.samples[0].kind)));
  return {id, number, rows, variety: rows.length + kinds.size};
}).sort((a, b) => b.variety - a.variety);

function renderChanged() {
  const problem = PROBLEMS.find(one => String(one.number) === state.problem) ?? PROBLEMS[0];
  $("problem").replaceChildren(...PROBLEMS.map(({id, number}) => el("option", {value: number}, id.slice(0, 90))));
  if (!problem) return $("answers").replaceChildren("No run was evaluated yet.");
  $("problem").value = problem.number;
  const {source, prompt, truth} = problem.rows[0].groups.find(Boolean);
  $("answers").replaceChildren(el("pre", {}, prompt), el("p", {class: "soft"}, `${source}; truth: ${truth}`),
    el("table", {class: "changed"}, problem.rows.map(({run, groups}) => el("tr", {}, el("th", {}, square(run.colour), run.name),
      groups.map(group => el("td", {}, group ? [el("a", {href: link({...addressOf(run, group, 0), filter: "", q: ""})},
        `step ${group.step}`), " ", chip(group.samples[0]), solution(group.samples[0])] : "not in this page"))))));
}

// ---- The page as the address says
function render() {
  state = Object.fromEntries(new URLSearchParams(location.hash.slice(1)));
  const views = {curves: renderCurves, groups: renderGroups, changed: renderChanged}, focus = document.activeElement.id;
  const view = Object.hasOwn(views, state.view) ? state.view : "curves";
  for (const name of Object.keys(views)) {
    $(name).hidden = name !== view;
    $(`tab-${name}`).href = link({view: name});
    $(`tab-${name}`).toggleAttribute("aria-current", name === view);
  }
  views[view]();
  if (focus) $(focus)?.focus({preventScroll: true});  // what had the focus may have been drawn anew
}

document.title = $("title").textContent = TITLE;
$("glyphs").textContent = SOURCES.length ? ` (${SOURCES.map(source => `${glyph(source)} ${source}`).join(", ")})` : "";
$("notes").append(...RUNS.flatMap(run => run.notes).map(note => el("p", {class: "note"}, note)));
$("run").append(...RUNS.map(run => el("option", {value: run.name}, run.name)));
$("filter").append(...Object.entries(FILTERS).map(([value, name]) => el("option", {value}, name)));
for (const id of ["run", "split", "filter", "problem"])
  $(id).addEventListener("change", () => go({[id]: $(id).value, group: "", sample: ""}));
$("q").addEventListener("input", () => go({q: $("q").value, group: "", sample: ""}));
addEventListener("hashchange", render);
render();
</script>
"""


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
