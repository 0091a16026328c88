"""The page of a run: its data, and its filters, links and views in a real browser."""

import atexit
import functools
import html
import json
import os
import platform
import re
import select
import shutil
import socket
import struct
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.parse
import urllib.request
from dataclasses import dataclass

import pytest

from run_folder import note_start
from tools import view_run

CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
in_browser = pytest.mark.skipif(
    CHROMIUM is None, reason="no chromium, chromium-browser or google-chrome on this machine"
)
PROBLEM, SOUND, FLAWED = (
    "Ben has 65 eggs, gets 9, loses 3. Remainder mod 5?",
    ("65+9=74", "74-3=71"),
    ("65+9=64", "64-3=61"),
)
EVIL = "</script><script>document.title = 'owned'</script><img src=x onerror=\"document.title = 'owned'\">"


def line(
    step=1,
    split="train",
    group=0,
    prompt=PROBLEM,
    solution=SOUND,
    advantage=0.5,
    reward=1.0,
    status="ok",
    **more,
):
    """Return a line of samples.jsonl. `info` is added to what the reward function returned."""
    info = {
        "score": reward,
        "acc": True,
        "flawed_positive": False,
        "genrm_status": "ok",
        "first_wrong": -1,
        "critique": "fine\n\\boxed{-1}",
    }
    info |= {"oracle_flawed_positive": False} | more.pop("info", {})
    return {
        "step": step,
        "split": split,
        "group": group,
        "data_source": "toy",
        "prompt": prompt,
        "ground_truth": "1",
        "reward_score": reward,
        "reward_extra_info": info,
        "status": status,
        "seconds": 0.25,
        "advantage": advantage,
        "response_length": 21,
        "clipped": False,
        "response": "\n\n".join([*solution, "Remainder \\boxed{1}"]),
    } | more


CAUGHT = dict(solution=FLAWED, reward=0.0, advantage=-1.5)
CAUGHT |= {
    "info": {
        "flawed_positive": True,
        "first_wrong": 0,
        "critique": "0:65+9=74?6 not\n\\boxed{0}",
        "oracle_flawed_positive": True,
    }
}
MISSED = dict(solution=FLAWED, info={"oracle_flawed_positive": True})
SILENT = dict(
    reward=None,
    advantage=None,
    status="no_verdict",
    info={"flawed_positive": None, "first_wrong": None, "genrm_status": "timeout"},
)
CUT = dict(reward=-1.0, advantage=-1.0, clipped=True, info={"acc": False, "genrm_status": "skipped"})
CUT["info"] |= {"genrm_error": "", "first_wrong": None, "critique": ""}


METRICS = (
    {"step": 0, "val/toy/mean@1": 0.25, "val/toy/no_verdict/mean@1": 0.0},
    {"step": 1, "reward/acc": 0.5},
)


def write_run(folder, samples, metrics=METRICS):
    folder.mkdir(parents=True)
    for name, lines in (("metrics", metrics), ("samples", samples)):
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(one) + "\n" for one in lines))
    return folder


def data_of(page):
    """Return the data in the page, and check that its script element ends where it should."""
    return json.loads(
        re.search(r'id="data">(.*?)</script>\n<script>\n"use strict"', page.read_text(), re.S)[1]
    )


class Browser:
    """One Chromium for all pages, because its start takes a second.

    It reads commands of the DevTools protocol from file descriptor 3 and writes answers to 4.
    """

    def __init__(self):
        command = [
            "sh",
            "-c",
            'exec 3<&0 4>&1 >/dev/null "$0" "$@"',
            CHROMIUM,
            "--headless",
            "--no-sandbox",
            "--disable-gpu",
            "--remote-debugging-pipe",
        ]
        quiet = subprocess.DEVNULL
        self.process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=quiet)
        self.unread, self.last_id, self.events = b"", 0, []
        atexit.register(self.close)

    def close(self):
        """End the browser. It leaves megabytes in the user's folders if it is killed."""
        try:
            self.call("Browser.close")
            self.process.wait(20)
        finally:
            self.process.kill()

    def receive(self):
        """Return the next answer or event."""
        while b"\0" not in self.unread:
            assert select.select([self.process.stdout], [], [], 120)[0], "the browser says nothing"
            more = os.read(self.process.stdout.fileno(), 1 << 20)
            assert more, "the browser has ended"
            self.unread += more
        text, _, self.unread = self.unread.partition(b"\0")
        return json.loads(text)

    def call(self, method, session=None, **params):
        self.last_id += 1
        request = {"id": self.last_id, "method": method, "params": params}
        request |= {"sessionId": session} if session else {}
        self.process.stdin.write(json.dumps(request).encode() + b"\0")
        self.process.stdin.flush()
        message = self.receive()
        while message.get("id") != self.last_id:
            self.events.append(message)
            message = self.receive()
        assert "error" not in message, message
        return message["result"]

    @functools.cached_property
    def tab(self):
        """Return the session of the tab in which all pages are shown, because a new one takes a second."""
        target = self.call("Target.createTarget", url="about:blank")["targetId"]
        session = self.call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        self.call("Page.enable", session)
        return session

    def html_of(self, address, budget):
        """Return the HTML of a page after this many milliseconds of virtual time, without stored data."""
        self.call("Emulation.setVirtualTimePolicy", self.tab, policy="advance")
        self.call("Page.navigate", self.tab, url="about:blank")
        self.call("Storage.clearDataForOrigin", self.tab, origin="file://", storageTypes="all")
        self.events.clear()
        self.call("Page.navigate", self.tab, url=address)
        policy = dict(policy="pauseIfNetworkFetchesPending", maxVirtualTimeTaskStarvationCount=9999)
        self.call("Emulation.setVirtualTimePolicy", self.tab, budget=budget, **policy)
        while "Emulation.virtualTimeBudgetExpired" not in [event.get("method") for event in self.events]:
            self.events.append(self.receive())
        expression = "document.documentElement.outerHTML"
        return self.call("Runtime.evaluate", self.tab, expression=expression)["result"]["value"]


the_browser = functools.cache(Browser)


def dom(page, /, **state):
    """Return the page's HTML after a browser has rendered it in this state."""
    return the_browser().html_of(f"{page.as_uri()}#{urllib.parse.urlencode(state)}", 2000)


def doms(page, *states):
    """Return the page's HTML in each of these states, which one visit of the browser shows in turn.

    The states must differ. Without keys, a state is the first view.
    """
    script = """
      const texts = [], states = STATES;
      addEventListener("hashchange", () => {
        texts.push(document.documentElement.outerHTML);
        if (texts.length < states.length) location.hash = states[texts.length];
        else document.title = JSON.stringify(texts);
      });
      location.hash = states[0];
    """
    addresses = [urllib.parse.urlencode(state or {"view": "curves"}) for state in states]
    return played(page, script.replace("STATES", json.dumps(addresses)))


def rows_of(sample):
    """Return the tables of a sample as {name: value}."""
    return dict(re.findall('<tr><th scope="row">(.*?)</th><td[^>]*>(.*?)</td></tr>', sample))


def part(text, name):
    """Return the inner HTML of the element with this id, up to the next element with an id of the page."""
    return re.search(rf'id="{name}"[^>]*>(.*?)(?=<(?:div|section|span|script)[^>]* id="|$)', text, re.S)[1]


@pytest.fixture(scope="module")
def page(tmp_path_factory):
    """Return the page of two runs.

    In "fapo", step 1 has a group with every kind of sample, and step 2 has one with hostile texts.
    """
    folder = tmp_path_factory.mktemp("runs")
    everything = [line(**case) for case in ({}, CAUGHT, MISSED, SILENT, CUT)]
    hostile = line(step=2, group=3, prompt=EVIL, solution=(EVIL,), info={"critique": EVIL, "pred": EVIL})
    before, after = (dict(split="val", advantage=None) | case for case in (CAUGHT, {}))
    held_out = [line(step=0, **before), line(step=5, **before), line(step=10, **after)]
    fapo = write_run(folder / "fapo", everything + [hostile] + held_out)
    (fapo / "config.json").write_text('{"reward_fn": "compute_score.py:compute_score_fapo"}')
    write_run(folder / "baseline", [line()] + [line(step=step, **before) for step in (0, 5, 10)])
    return view_run.write_page([folder])


# ---- from files to data


def test_lines_become_whole_groups_and_curves(tmp_path):
    samples = [line(**case) for case in ({}, CAUGHT, MISSED, SILENT, CUT)] + [line(group=1), line(step=2)]
    run = write_run(tmp_path / "run", samples)
    (run_data,) = data_of(view_run.write_page([run]))["runs"]
    groups = run_data["groups"]
    assert [(g["step"], g["group"], len(g["samples"])) for g in groups] == [(1, 0, 5), (1, 1, 1), (2, 0, 1)]
    assert [sample["oracle"] for sample in groups[0]["samples"]] == [-1, 0, 0, -1, -1]
    assert run_data["metrics"]["val/toy/mean@1"] == [[0, 0.25]] and run_data["metrics"]["reward/acc"] == [
        [1, 0.5]
    ]
    assert len(run_data["metrics"]) == 3
    unfinished = "step 2 has samples but no metrics: it is in progress, or the run stopped in it"
    assert run_data["notes"] == [f"run: {unfinished}"]


def test_what_only_some_of_a_group_say_of_all_is_not_the_groups(tmp_path):
    samples = [line(info={"group_kind": None, "group_best": 2}), line(info={"group_best": 2}), line(group=1)]
    (data,) = data_of(view_run.write_page([write_run(tmp_path / "run", samples)]))["runs"]
    assert [group["verdict"] for group in data["groups"]] == [{"best": 2}, {}]


def test_torn_lines_and_runs_in_progress_are_shown_as_far_as_they_go(tmp_path):
    run = write_run(
        tmp_path / "run", [line(), line(), line(group=1)], metrics=[{"step": 1, "reward/a": float("nan")}]
    )
    with open(run / "samples.jsonl", "ab") as file:
        file.write('{"step": 2, "prompt": "caf\u00e9'.encode()[:-1])  # truncated in the middle of a character
    (data,) = data_of(view_run.write_page([run]))["runs"]
    assert [len(group["samples"]) for group in data["groups"]] == [2, 1]
    assert data["metrics"] == {} and data["notes"] == [
        "run: incomplete lines were skipped (the run is in progress or was killed)"
    ]
    fresh = write_run(tmp_path / "fresh", [], metrics=[])
    assert data_of(view_run.write_page([fresh]))["runs"][0]["notes"] == [
        "fresh: no samples (samples.jsonl is empty or missing)"
    ]


def test_numbers_that_json_does_not_have_are_null_on_the_page(tmp_path):
    run = write_run(tmp_path / "run", [line(info={"ratio": float("nan"), "bound": float("-inf")}), line()])
    (run / "config.json").write_text('{"lr": Infinity, "seed": 1}')
    (data,) = data_of(view_run.write_page([run]))["runs"]
    info = data["groups"][0]["samples"][0]["reward_extra_info"]
    assert info["ratio"] is info["bound"] is None and info["acc"] is True
    assert data["settings"] == {"lr": None, "seed": 1}


@pytest.mark.parametrize(
    "measured, samples, note",
    [
        ({"reward/acc": 0.5}, [SILENT], ""),
        ({"val/toy/mean@1": 0.5}, [{}, SILENT, SILENT], "step 1 has {}; 2 of 3 {}timeout"),
        (
            {},
            [SILENT | {"info": {"error": "IndexError: 7\n\x1b[2J"}}],
            "step 1 has {}; 1 of 1 {}IndexError: 7",
        ),
        ({}, [SILENT | {"info": {"genrm_error": "HTTP 500"}}], "step 1 has {}; 1 of 1 {}HTTP 500"),
        (
            {},
            [SILENT | {"info": {"genrm_error": "", "genrm_status": "truncated"}}],
            "step 1 has {}; 1 of 1 {}truncated",
        ),
        (
            {},
            [SILENT | {"status": "ok", "info": {}}],
            "step 1 has {}; 1 of 1 {}the function returned no score",
        ),
        ({"reward/acc": 0.5}, [{"split": "val"}], "the evaluation after step 1 has {}"),
        ({"reward/acc": 0.5, "val/toy/mean@1": 0.5}, [{"split": "val"}], ""),
    ],
)
def test_a_step_that_has_not_ended_is_named_with_its_first_failure(tmp_path, measured, samples, note):
    run = write_run(tmp_path / "run", [line(**sample) for sample in samples], [{"step": 1} | measured])
    (data,) = data_of(view_run.write_page([run]))["runs"]
    unfinished = "samples but no metrics: it is in progress, or the run stopped in it"
    note = note.format(unfinished, "logged samples have no verdict, the first: ")
    assert len(data["notes"]) == bool(note) and "".join(data["notes"]).startswith(note and f"run: {note}")
    assert "".join(data["notes"]).isprintable()


@pytest.mark.slow
def test_a_long_run_is_thinned_in_whole_groups_evenly_and_says_so(tmp_path):
    """200 steps of 8 samples with 8,000 characters take 13 MB."""
    samples = [line(step=step, response="7" * 8000) for step in range(1, 201) for _ in range(8)]
    for step in (0, 100, 200):
        samples += [line(step=step, split="val", group=group, prompt=f"{group}") for group in range(3)]
    metrics = [{"step": step, "a": 1.0} | {f"m/{i}": step / 7 for i in range(6)} for step in range(5001)]
    run = write_run(tmp_path / "run", samples, metrics)
    page = view_run.write_page([run])
    assert (run / "samples.jsonl").stat().st_size > 13e6 and page.stat().st_size < 12e6
    (data,) = data_of(page)["runs"]
    steps = {group["step"] for group in data["groups"] if group["split"] == "train"}
    assert {1, 200} <= steps and len(data["metrics"]["m/0"]) == 5001
    assert re.match(r"run: samples of only one step in \d \(raise --max-mb for more; ", data["notes"][0])
    page = view_run.write_page([run], max_mb=4)
    assert 2e6 < page.stat().st_size < 5.2e6  # the curves of seven metrics take 1 MB
    (data,) = data_of(page)["runs"]
    kept = [group["step"] for group in data["groups"] if group["split"] == "train"]
    assert all(len(group["samples"]) == 8 for group in data["groups"] if group["split"] == "train")
    # There is no gap, neither early nor late.
    assert 40 < len(kept) < 65 and max(b - a for a, b in zip([0, *kept], [*kept, 201])) <= 8
    assert {(g["step"], g["group"]) for g in data["groups"] if g["split"] == "val"} >= {
        (0, 0),
        (100, 0),
        (200, 0),
    }
    assert data["notes"][0].startswith("run: samples of only one step in 4 (raise --max-mb for more; ")
    assert len(data["metrics"]["a"]) == 5001
    assert len(data_of(view_run.write_page([run], max_mb=20))["runs"][0]["groups"]) == 209


def test_many_evaluations_are_thinned_but_for_the_first_and_the_last(tmp_path):
    samples = [line(step=step, split="val", group=group) for step in range(101) for group in range(20)]
    samples += [line(step=step) for step in range(1, 101)]
    run = write_run(tmp_path / "run", samples)
    page = view_run.write_page([run], max_mb=0.2)
    (data,) = data_of(page)["runs"]
    evaluated = sorted({group["step"] for group in data["groups"] if group["split"] == "val"})
    trained = {group["step"] for group in data["groups"] if group["split"] == "train"}
    assert evaluated[0] == 0 and evaluated[-1] == 100 and 3 < len(evaluated) < 30 and len(trained) > 20
    assert "samples of only one evaluation in " in data["notes"][0] and page.stat().st_size < 0.35e6


ALIKE = {"reward/mean": 0.0, "reward/groups_with_spread": 0.0, "reward/acc": 0.5}
AUDIT = {"reward/audited": 0.1, "perf/tokens": 1000, "response_length/mean": 10}


def test_what_keeps_a_run_from_learning_is_on_its_page(tmp_path):
    steps = [{"step": step} | ALIKE for step in (1, 2, 3, 4)] + [{"step": 5, "reward/mean": 0.1}]
    for flawed, step in zip((0.0, 0.2), steps):
        step |= AUDIT | {"reward/audit_flawed": flawed}
    (data,) = data_of(view_run.write_page([write_run(tmp_path / "run", [], steps)]))["runs"]
    about = {finding["name"]: finding["steps"] for finding in data["findings"]}
    assert about == {"constant-reward": [3, 4], "no-learning-signal": [3, 4]}
    assert data["audit"] == [
        [1, 1 / 12, pytest.approx((11 / 12**3) ** 0.5)],
        [2, 3 / 22, pytest.approx((57 / 22**3) ** 0.5)],
    ]
    (data,) = data_of(view_run.write_page([write_run(tmp_path / "good", [line()])]))["runs"]
    assert data["findings"] == data["audit"] == []


def test_runs_are_found_and_named_and_what_is_none_is_refused(tmp_path):
    for name in ("a/fapo", "a/baseline", "b/fapo"):
        write_run(tmp_path / name, [line()])
    assert list(view_run.find_runs([tmp_path / "a"])) == ["baseline", "fapo"]
    assert list(view_run.find_runs([tmp_path / "b/fapo"])) == ["fapo"]
    data = data_of(
        view_run.write_page([tmp_path / "a", tmp_path / "b/fapo", tmp_path / "b"], out=tmp_path / "page.html")
    )
    assert [run["name"] for run in data["runs"]] == ["a/baseline", "a/fapo", "b/fapo"]
    assert not (tmp_path / "a/report.html").exists()
    with pytest.raises(ValueError, match=".*page.html: contains no run"):
        view_run.write_page([tmp_path / "page.html"])
    for file, text in (("metrics", '{"step": 1, "reward/mean": "high"}'), ("samples", '{"step": 1}')):
        write_run(tmp_path / file, [line()])
        (tmp_path / file / f"{file}.jsonl").write_text(text + "\n")
        with pytest.raises(
            ValueError, match=f"^.*/{file}: is not a run of this version .*; pass another run"
        ):
            view_run.write_page([tmp_path / file])


def test_what_models_wrote_cannot_become_markup(page):
    assert page.read_text().count("</script>") == 2 and "<img" not in page.read_text()
    (group,) = [group for group in data_of(page)["runs"][1]["groups"] if group["group"] == 3]
    (sample,) = group["samples"]
    info = sample["reward_extra_info"]
    assert group["prompt"] == sample["response"].split("\n\n")[0] == info["critique"] == info["pred"] == EVIL


# ---- in a browser


def played(page, script):
    """Run this script at the end of a copy of the page, and return the page's title, parsed as JSON."""
    copy = page.with_name("played.html")
    copy.write_text(page.read_text() + f"<script>{{{script}}}</script>")
    return json.loads(html.unescape(re.search("<title>(.*?)</title>", dom(copy), re.S)[1]))


def understood(page):
    """Return how the page interprets the samples in each run's first group."""
    return played(page, "document.title = JSON.stringify(RUNS.map(run => run.groups[0].samples))")


@pytest.mark.slow
@in_browser
def test_samples_have_flags_verdicts_and_the_named_paragraphs(page):
    _, samples = understood(page)
    expected = [
        ("good", "right answer, sound", [], -1),
        ("flawed", "right answer, flawed", ["judge", "oracle"], 0),
        ("flawed", "right answer, sound (oracle: flawed)", ["oracle", "wrong"], -1),
        ("silent", "no verdict: timeout", ["silent"], None),
        ("bad", "wrong answer", ["cut"], None),
    ]
    keys = ("kind", "verdict", "flags", "judge")
    assert [tuple(sample[key] for key in keys) for sample in samples] == expected
    assert samples[1]["paragraphs"] == [*FLAWED, "Remainder \\boxed{1}"] and samples[1]["advantage"] == -1.5


@in_browser
def test_a_judge_in_training_is_measured_against_the_truth(tmp_path):
    cases = {
        (2, 2, True): ("verdict right", ["judge", "oracle"]),
        (1, 2, True): ("right that it is flawed, other paragraph", ["judge", "oracle"]),
        (-1, 2, False): ("verdict wrong", ["oracle", "wrong"]),
        (None, -1, False): ("verdict wrong", []),
    }
    infos = [
        {"acc": right, "exact": pred == truth, "pred": pred, "gt": truth} for pred, truth, right in cases
    ]
    page = view_run.write_page(
        [write_run(tmp_path / "run", [line() | {"reward_extra_info": info} for info in infos])]
    )
    (samples,) = understood(page)
    assert [(sample["verdict"], sample["flags"]) for sample in samples] == list(cases.values())


FILTERED = {
    "": [0, 1, 2, 3, 4],
    "judge": [1],
    "oracle": [1, 2],
    "wrong": [2],
    "silent": [3],
    "cut": [4],
}


@in_browser
def test_a_filter_shows_what_it_names(page):
    texts = doms(page, *[dict(view="groups", run="fapo", filter=name) for name in FILTERED])
    for text, (name, chosen) in zip(texts, FILTERED.items(), strict=True):
        check_filter(text, name, chosen)


def check_filter(text, name, chosen):
    noun = "logged sample" if len(chosen) == 1 else "logged samples"
    expected = f"{len(chosen)} {noun} in 1 group at 1 step"
    if not name:
        expected = "6 logged samples in 2 groups at 2 steps"
    assert expected in part(text, "count")
    cards = re.findall(r'<a id="card-(\d)" aria-current="(\w+)" class="(card(?: dim)?)" href="([^"]+)"', text)
    assert [int(number) for number, _, kind, _ in cards if kind == "card"] == chosen and len(cards) == 5
    # The chosen card is the sample below.
    assert [int(number) for number, is_chosen, _, _ in cards if is_chosen == "true"] == chosen[:1]
    assert f"Sample {chosen[0]}, paragraph by paragraph" in text
    state = urllib.parse.parse_qs(html.unescape(cards[3][3]).lstrip("#"))
    kept = {
        "view": "groups",
        "run": "fapo",
        "split": "train",
        "step": "1",
        "group": "0",
        "sample": "3",
        "filter": name,
    }
    assert state == {key: [value] for key, value in kept.items() if value}


@in_browser
def test_a_group_and_a_sample_explain_the_reward(page):
    place = dict(view="groups", run="fapo", step=1, group=0)
    text, unjudged, searched = doms(
        page, place | {"sample": 1}, place | {"sample": 4}, dict(view="groups", run="fapo", q="onerror")
    )
    group, sample = part(text, "group"), part(text, "sample")
    # of 1, 0, 1, -1: a sample without a verdict does not count
    assert PROBLEM in group and "Mean reward 0.25, standard deviation 0.957." in group
    tints = re.findall(r'class="advantage" style="(.*?)">(.*?)<', group)
    assert [words for _, words in tints] == [
        "advantage +0.5",
        "advantage −1.5",
        "advantage +0.5",
        "no advantage",
        "advantage −1",
    ]
    assert [re.findall("good|bad", style) for style, _ in tints] == [["good"], ["bad"], ["good"], [], ["bad"]]
    assert (
        '<li class="named">65+9=64<div class="why">← the judge and the oracle: first wrong paragraph'
        in sample
    )
    assert sample.count("<li") == 3 and "0:65+9=74?6 not\n\\boxed{0}" in sample
    rows = rows_of(sample)
    terms = ("rule", "flaw found by the judge", "length penalty", "reward")
    assert [rows[name] for name in terms] == ["+1", "−1", "0", "0"]
    assert "(0 − 0.25) / 0.957 = −1.5" in rows["advantage"] and rows["status"] == "ok in 0.25 s"
    assert "No judge was queried." in part(unjudged, "sample")
    # What models wrote is text, also for the search.
    assert "1 logged sample in 1 group at 1 step" in part(searched, "count")
    assert "<img" not in searched and searched.count("<script") == 3  # the third one belongs to this test
    escaped = html.escape(EVIL, quote=False)
    # the solution, the critique and a value
    assert escaped in part(searched, "group") and part(searched, "sample").count(escaped) == 3
    assert re.search(r"<title>(.*?)</title>", searched)[1] == str(page.parent)  # their scripts did not run


@in_browser
@pytest.mark.slow
def test_curves_tell_held_out_points_from_training_and_what_changed_compares_the_runs(page):
    text, hidden, changed = doms(page, {}, {"hide": "baseline"}, {"view": "changed"})
    # One curve per run for accuracy. No verdict is missing in evaluations, which is one line.
    assert "0 at every step: samples without a verdict." in part(text, "zero")
    assert (
        len(re.findall(r'<figure data-key="reward/acc">', text)) == 1 and text.count('class="held-out"') == 2
    )
    assert text.count("<polyline") == 4  # a thin and a thick line per run, without lines between markers
    colours = re.findall(r'<polyline [^>]*style="color:(.*?)"', text)
    assert colours == 2 * ["var(--run-0)"] + 2 * ["var(--run-1)"]  # the first run's, then the second run's
    markers = re.findall(r'class="held-out"[^>]*style="color:(.*?)"', text)
    assert sorted(markers) == ["var(--run-0)", "var(--run-1)"]
    assert hidden.count("<polyline") == 2
    assert "The same problem in the first and the last evaluation, and in one between them" in changed
    answers = part(changed, "answers")
    rows = [
        re.findall(r"<td>.*?>step (\d+)</a>.*?class=\"chip\"[^>]*>([^<]+)", row)
        for row in answers.split("<tr>")[1:]
    ]
    flawed, sound = "! right answer, flawed", "✓ right answer, sound"
    assert rows == [
        [("0", flawed), ("5", flawed), ("10", flawed)],
        [("0", flawed), ("5", flawed), ("10", sound)],
    ]


@in_browser
def test_findings_are_above_the_curves_and_lead_to_their_samples(tmp_path):
    steps = [{"step": step} | ALIKE for step in (1, 2, 3, 4)]
    steps[3] |= AUDIT | {"reward/audit_flawed": 0.5}
    text = dom(view_run.write_page([write_run(tmp_path / "run", [line()], steps)]))
    assert part(text, "findings").count('class="box finding"') == 2
    assert "Remainder " in part(text, "findings") and "\\n" not in part(text, "findings")
    assert "<b>run: constant-reward</b> at steps <a" in text and "step=4" in text and "3–4</a>" in text
    (chart,) = re.findall('<figure data-key="reward/audit_flawed">.*?</figure>', text, re.S)
    assert len(re.findall(r'<path stroke="currentColor"[^>]*class="error" d="M[\d.]+ [\d.]+V', chart)) == 1


@in_browser
def test_a_source_may_have_slashes_and_a_run_a_comma(tmp_path):
    metrics = {f"val/openai/gsm8k/{key}mean@2": 0.5 for key in ("", "no_verdict/", "score/")}
    page = view_run.write_page(
        [write_run(tmp_path / "lr1,seed0", [line()], [{"step": 1, "reward/acc": 0.5} | metrics])]
    )
    text, hidden = doms(page, {}, {"hide": "lr1,seed0"})
    (chart,) = re.findall('<figure data-key="reward/acc">.*?</figure>', text, re.S)
    assert (
        chart.count('class="held-out"') == 1
        and chart.count("<polyline") == 2
        and " (● openai/gsm8k)" in part(text, "how")
    )
    assert "<polyline" not in hidden.partition("<script>")[0]


@in_browser
def test_slider_search_and_keys_do_what_the_mouse_does(page):
    """Run a script that simulates the user, at the end of a copy of the page."""
    plays = """
      const chart = document.querySelector("[data-key='reward/acc']");
      const readout = chart.querySelector(".readout");
      const set = (id, value, event) => { $(id).value = value; $(id).dispatchEvent(new Event(event)); };
      const press = key => chart.querySelector("svg").dispatchEvent(new KeyboardEvent("keydown", {key}));
      press("ArrowLeft");
      const seen = [readout.textContent];
      press("ArrowLeft");
      seen.push(readout.textContent);
      const steps = [  // each when the page has drawn what the one before asked for
        () => { seen.push(location.hash); set("run", "fapo", "change"); },
        () => { seen.push($("at").value); set("step", 1, "input"); },
        () => { seen.push($("at").value); $("q").focus(); set("q", "onerror", "input"); },
        () => { seen.push(document.activeElement.id, location.hash);
                document.title = JSON.stringify(seen); }];
      addEventListener("hashchange", () => steps.shift()());
      press("Enter");
    """
    seen = played(page, plays)
    # from step 1 to step 0, the first
    assert seen[0].startswith("step 0baseline● 0.25") and seen[1] == seen[0]
    assert seen[2:] == ["#view=groups&step=0", "1", "2", "q", "#view=groups&step=2&run=fapo&q=onerror"]


@in_browser
def test_the_reward_is_a_sum_of_what_the_function_says(tmp_path):
    """An answer is correct if `acc` is true or 1.

    If a function does not report flaws, only its score is shown.
    """
    cases = [
        (
            dict(acc=True, flawed_positive=True, score=0.25),
            "right answer, flawed",
            ["rule +1", "flaw found by the reward function −0.5", "other terms −0.25"],
        ),
        (
            dict(acc=True, flawed_positive=True, oracle_flawed_positive=True, score=0.0),
            "right answer, flawed",
            ["rule +1", "flaw found by the reward function −0.5", "other terms −0.5"],
        ),
        (dict(acc=0, flawed_positive=False, score=-1.03), "wrong answer", ["rule −1", "other terms −0.03"]),
        (dict(acc=1, score=0.5), "right answer, not judged", ["score +0.5"]),
        (dict(acc=False, score=-1.0), "wrong answer", ["rule −1"]),
        (
            dict(acc=True, exact=False, score=0.8),
            "right that it is flawed, other paragraph",
            ["flawed or not +1", "distance −0.2"],
        ),
        (dict(acc=0.5, score=0.5), "wrong answer", ["score +0.5"]),
        (dict(acc="yes", score=0.5), "wrong answer", ["score +0.5"]),
    ]
    lines = [
        line(reward=info["score"] - 0.1) | {"reward_extra_info": info | {"overlong_penalty": -0.1}}
        for info, *_ in cases
    ]
    run = write_run(tmp_path / "run", lines)
    (run / "config.json").write_text(json.dumps({"reward_kwargs": '{"penalty": 0.5}'}))
    page = view_run.write_page([run])
    samples = played(
        page,
        """const [group] = RUNS[0].groups, words = ([name, value]) => `${name} ${signed(value)}`;
        document.title = JSON.stringify(group.samples.map(sample =>
        [sample.verdict, termsOf(sample, group, RUNS[0]).map(words)]))""",
    )
    assert samples == [[verdict, [*terms, "length penalty −0.1"]] for _, verdict, terms in cases]


@in_browser
def test_a_length_penalty_that_is_not_a_number_is_none(tmp_path):
    """Without --overlong-buffer, a reward function may return a key of this name with any value."""
    info = {"score": 1.0, "acc": True, "overlong_penalty": "none"}
    page = view_run.write_page([write_run(tmp_path / "run", [line() | {"reward_extra_info": info}])])
    seen = re.sub("<script.*?</script>", "", dom(page, view="groups", sample=0), flags=re.S)
    assert "Where the reward came from" in seen and "NaN" not in seen


@in_browser
def test_what_a_judge_costs_is_not_guessed_if_the_configuration_does_not_say_it(tmp_path):
    """The same holds for the paragraph: without first_wrong, a box in the critique has no special meaning."""
    info = {"acc": True, "flawed_positive": True, "score": 0.2}
    info |= {"genrm_status": "ok", "critique": "\\boxed{1}"}
    equal = [line(reward=0.2) | {"reward_extra_info": info} for _ in range(2)]
    text = dom(view_run.write_page([write_run(tmp_path / "run", equal)]), view="groups")
    sample = part(text, "sample")
    rows = rows_of(sample)
    assert rows["flaw found by the judge, and other terms"] == "−0.8"
    assert "first wrong paragraph" not in sample and "\\boxed{1}" in sample
    assert "All rewards are equal: no learning signal." in part(text, "group")


GROUP = {"group_label": "4", "group_votes": 0.5, "group_critique": "0 beats 1\n\\boxed{1, 0}"}


@in_browser
def test_a_groups_verdict_is_there_once_at_its_head_and_its_score_is_the_groups(tmp_path):
    lines = [line(info=GROUP | {"group_rank": rank, "group_none": None}) for rank in (0, 1)]
    page = view_run.write_page([write_run(tmp_path / "run", lines)])
    (data,) = data_of(page)["runs"]
    (group,) = data["groups"]
    assert group["verdict"] == {key.removeprefix("group_"): value for key, value in GROUP.items()}
    infos = [sample["reward_extra_info"] for sample in group["samples"]]
    assert [{key: info[key] for key in info if key.startswith("group_")} for info in infos] == [
        {"group_rank": 0},
        {"group_rank": 1},
    ]
    text = dom(page, view="groups")
    group = part(text, "group")
    assert "<b>The group's verdict: </b>label 4 · votes 0.5</p>" in group
    assert f"<b>The group's critique</b><pre>{GROUP['group_critique']}</pre>" in group
    rows = rows_of(part(text, "sample"))
    assert rows["group"] == "+1" and not {"rule", "flaw found by the judge", "group_label"} & rows.keys()


@in_browser
def test_paragraphs_have_the_colours_of_their_advantages(tmp_path):
    """Tokens before the first wrong paragraph are not blamed.

    A sample without a wrong paragraph has a single advantage.
    """
    blamed = CAUGHT | {"paragraph_advantages": [0.25, 0.25, -1.5, -1.5], "solution": (*SOUND, "71-1=60")}
    blamed = line(**blamed | {"info": CAUGHT["info"] | {"first_wrong": 2}})
    page = view_run.write_page([write_run(tmp_path / "run", [blamed, line()])])
    text, other = doms(page, dict(view="groups"), dict(view="groups", sample=1))
    items = re.findall('<li class="[a-z]*"(?: style="(.*?)")?>(.*?)</li>', part(text, "sample"), re.S)
    assert [re.findall("good|bad", style) for style, _ in items] == [["good"], ["good"], ["bad"], ["bad"]]
    said = [re.findall("advantage [^<]*", inner) for _, inner in items]
    assert said == [["advantage +0.25"], [], ["advantage −1.5"], []]
    bars = re.findall('class="advantage" style="(.*?)">(.*?)<', part(text, "group"))
    assert [words for _, words in bars] == ["advantage +0.25", "then −1.5", "advantage +0.5"]
    assert [re.findall("good|bad", style) for style, _ in bars] == [["good"], ["bad"], ["good"]]
    assert "−1.5; of the paragraphs +0.25, +0.25, −1.5, −1.5" in part(text, "sample")
    assert "<li" in part(other, "sample") and '<li class="" style' not in part(other, "sample")


def test_of_an_evaluation_that_was_repeated_the_page_has_the_last_samples(tmp_path):
    twice = [line(split="val", group=group, solution=(text,)) for text in ("old", "new") for group in (0, 1)]
    run = write_run(tmp_path / "run", [line(solution=("trained",)), *twice])
    groups = data_of(view_run.write_page([run]))["runs"][0]["groups"]
    shown = [(group["split"], group["group"], group["samples"][0]["response"].split()[0]) for group in groups]
    assert shown == [("train", 0, "trained"), ("val", 0, "new"), ("val", 1, "new")]


@in_browser
def test_settings_that_all_runs_share_are_said_once(tmp_path):
    own = dict(advantage="recipes/advantages.py:terms", advantage_kwargs='{"weights": {"acc": 1}}')
    lora = dict(own, lora_rank=8, own_flag=0.5, overlap=True)
    for name, more in {"plain": dict(overlap=False), "lora": lora}.items():
        settings = dict(
            model="m",
            reward_fn="compute_score.py:compute_score_fapo",
            advantage="grpo",
            seed=1,
            kl_coef=0.1,
            key=name,
        )
        (write_run(tmp_path / name, [line()]) / "config.json").write_text(json.dumps(settings | more))
    said = re.findall("<p[^>]*>(.*?)</p>", part(dom(view_run.write_page([tmp_path])), "settings"))
    assert [re.sub("<.*?>", "", text) for text in said] == [
        "all runs · model m · reward compute_score.py:compute_score_fapo · λ 1 · seed 1",
        'lora · LoRA rank 8 · advantage recipes/advantages.py:terms {"weights": {"acc": 1}} · own_flag 0.5 · '
        "overlap true",
        "plain · advantage grpo · own_flag not set · overlap false",
    ]
    settings["reward_kwargs"] = '{"penalty": null}'
    (write_run(tmp_path / "measured", [line()]) / "config.json").write_text(json.dumps(settings))
    assert "λ" not in part(dom(view_run.write_page([tmp_path / "measured"])), "settings")


@in_browser
def test_what_a_function_measures_only_in_evaluations_has_a_chart_too(tmp_path):
    metrics = {f"val/toy/{key}mean@1": 0.5 for key in ("", "no_verdict/", "politeness/")}
    write_run(tmp_path / "policy", [], [{"step": 0} | metrics])
    judge = {f"val/critic/{key}mean@1": 0.5 for key in ("", "no_verdict/", "exact/")}
    write_run(tmp_path / "judge", [], [{"step": 0} | judge])
    text = part(dom(view_run.write_page([tmp_path])), "main-charts")
    charts = re.findall('<figure data-key="(.*?)"><figcaption>(.*?)</figcaption>', text)
    assert ("reward/politeness", "politeness") in charts
    assert ("reward/acc", "accuracy") in charts and ("reward/acc", "accuracy, judges in training") in charts


@in_browser
def test_the_page_says_what_the_run_did_and_shows_what_its_function_measures(tmp_path):
    metrics = {
        "reward/acc": 0.5,
        "reward/no_verdict": 0.1,
        "reward/politeness": 0.3,
        "actor/loss": 0.1,
        "reward/score": 0.2,
    }
    policy = write_run(tmp_path / "policy", [line(), line()], [{"step": 1} | metrics])
    settings = dict(
        model="models/small",
        reward_fn="my.py:fapo",
        reward_kwargs='{"penalty": 0.5}',
        advantage="dr_grpo",
        lr=1e-6,
        train_batch_size=16,
        group_size=8,
        wandb_key="secret",
    )
    (policy / "config.json").write_text(json.dumps(settings))
    write_run(tmp_path / "judge", [line()], [{"step": 1, "reward/acc": 0.9, "reward/exact": 0.8}])
    page = view_run.write_page([tmp_path])
    text, groups, judge = doms(page, {}, dict(view="groups", run="policy"), dict(view="groups", run="judge"))
    assert "2 logged samples in 1 group at 1 step; a step has 128 samples" in part(groups, "count")
    assert "1 logged sample in 1 group at 1 step<" in part(judge, "count")
    (said,) = re.findall(r"<p[^>]*>(?:(?!<p).)*?learning rate.*?</p>", part(text, "settings"))
    words = re.sub("<.*?>", "", said)
    for expected in (
        "model models/small",
        "reward my.py:fapo",
        "λ 0.5",
        "advantage dr_grpo",
        "learning rate 1e-6",
        "16 × 8",
    ):
        assert expected in words
    assert "secret" not in page.read_text()
    charts = re.findall(r'<figure data-key="(.*?)"><figcaption>(.*?)</figcaption>', part(text, "main-charts"))
    assert charts == [
        ("reward/acc", "accuracy"),
        ("reward/acc", "accuracy, judges in training"),
        ("reward/no_verdict", "samples without a verdict"),
        ("reward/exact", "exact, judges in training"),
        ("reward/politeness", "politeness"),
    ]
    text = part(text, "main-charts")
    assert text.count(">step</text>") == len(charts) and text.count(">share</text>") == 3
    assert "Advantage = reward − mean." in part(groups, "group")


@pytest.fixture
def served(tmp_path):
    """Yield a run in progress and the address of a server that shows it."""
    run = write_run(tmp_path / "run", [line(prompt="the first prompt")])
    with view_run.start_server([run]) as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.01,))
        thread.start()
        try:
            yield run, f"http://127.0.0.1:{server.server_port}/"
        finally:
            server.shutdown()
            thread.join()


def fetched(address, **headers):
    request = urllib.request.Request(address, headers=headers)
    direct = urllib.request.build_opener(urllib.request.ProxyHandler({}))  # not through HTTP_PROXY
    with direct.open(request, timeout=60) as answer:
        assert answer.headers["Cache-Control"] == "no-store"
        assert "charset=utf-8" in answer.headers["Content-Type"]
        return answer.read().decode()


def test_a_served_page_follows_its_run_and_nobody_else_can_read_it(served):
    run, address = served
    before = fetched(address + "version")
    page = fetched(address)
    assert "the first prompt" in page and before in page and "connect-src 'self'" in page
    with open(run / "samples.jsonl", "a") as file:
        file.write(json.dumps(line(step=2, prompt="the second prompt")) + "\n")
    assert fetched(address + "version") != before
    assert "the second prompt" in fetched(address)
    for path, headers, code in (("", {"Host": "evil.example:80"}, 403), ("../config.json", {}, 404)):
        with pytest.raises(urllib.error.HTTPError) as refused:
            fetched(address + path, **headers)
        assert refused.value.code == code
    for host in ("127.0.0.1", "localhost"):  # Browsers omit port 80.
        assert fetched(address + "version", Host=host) == fetched(address + "version")
    (run / "samples.jsonl").unlink()
    assert "the first prompt" not in fetched(address)
    with pytest.raises(ValueError, match="contains no run"):
        view_run.start_server([run / "checkpoints"])
    port = int(address.split(":")[2].strip("/"))
    with pytest.raises(OSError, match=f"^--port {port}: Address already in use; pass another port, or 0"):
        view_run.start_server([run], port)
    with pytest.raises(OSError, match="^--port 99999: .*port must be 0-65535.*; pass another port, or 0"):
        view_run.start_server([run], 99999)


@pytest.mark.parametrize("path", ["", "version"])
def test_a_page_of_a_run_that_was_deleted_says_why_it_is_missing(served, path):
    run, address = served
    shutil.rmtree(run)
    with pytest.raises(urllib.error.HTTPError) as refused:
        fetched(address + path)
    assert (refused.value.code, refused.value.reason) == (500, "cannot read the run")
    assert str(run) in refused.value.read().decode()


def test_a_browser_that_closes_its_connection_causes_no_output(served, capfd):
    """The linger time of 0 makes the kernel reset the connection, as a reload during a transfer does."""
    run, address = served
    with open(run / "samples.jsonl", "a") as file:
        file.write(json.dumps(line(step=2, prompt="x" * 5_000_000)) + "\n")
    host = address.split("/")[2]
    with socket.create_connection(host.split(":")) as browser:
        browser.sendall(f"GET / HTTP/1.1\r\nHost: {host}\r\n\r\n".encode())
        browser.recv(10)
        browser.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    time.sleep(0.5)
    assert fetched(address + "version")
    assert capfd.readouterr() == ("", "")


def test_a_reload_parses_only_what_is_new_and_equals_a_fresh_page(tmp_path, monkeypatch):
    run = tmp_path / "run"
    steps = [{"step": step} | ALIKE for step in range(1, 7)]
    write_run(run, [line(step=step, info=GROUP) for step in (1, 2, 3, 4)], steps[:4])
    parsed = []
    parse_lines = view_run.parse_lines
    monkeypatch.setattr(view_run, "parse_lines", lambda text: parsed.append(text) or parse_lines(text))

    def shown(lines, metrics, mode):
        """Write these lines, and return the new page's data and the lines that were parsed."""
        for name, found in (("samples", lines), ("metrics", metrics)):
            with open(run / f"{name}.jsonl", mode) as file:
                file.writelines(json.dumps(one) + "\n" for one in found)
        parsed.clear()
        (data,) = data_of(view_run.write_page([run]))["runs"]
        again = [json.loads(text) for part in parsed for text in part.splitlines()]
        view_run.READ.clear()
        view_run.DIAGNOSED.clear()
        assert data_of(view_run.write_page([run]))["runs"] == [data]
        return data, [(one["step"], "prompt" in one) for one in again]

    cached = [shown([], [], "a"), shown([line(step=5)], [steps[4]], "a")]
    assert [new for _, new in cached] == [
        [(step, name) for name in (False, True) for step in (1, 2, 3, 4)],
        [(5, False), (5, True)],
    ]
    found = [[finding["steps"] for finding in data["findings"]] for data, _ in cached]
    assert found == [2 * [[3, 4]], 2 * [[3, 4, 5]]]
    # A run that resumes after step 2 writes its files again.
    repeated = {"reward/mean": 0.5, "reward/groups_with_spread": 1.0}
    data, new = shown([line(step=1), line(step=3)], [steps[0], steps[1], steps[2] | repeated], "w")
    assert [step for step, _ in new] == [1, 2, 3, 1, 3] and data["findings"] == []


@in_browser
@pytest.mark.slow
def test_a_browser_shows_what_a_run_writes_while_its_page_is_open(served, monkeypatch):
    """The run writes only after the browser has loaded the page, so the page must update itself."""
    run, address = served
    pages = []
    page_of = view_run.page_of

    def page_and_then_more(*arguments, **options):
        page = page_of(*arguments, **options)
        pages.append(page)
        if len(pages) == 1:
            with open(run / "samples.jsonl", "a") as file:
                file.write(json.dumps(line(group=1, prompt="the second prompt")) + "\n")
        return page

    monkeypatch.setattr(view_run, "page_of", page_and_then_more)
    text = the_browser().html_of(f"{address}#view=groups", 10000)
    assert len(pages) == 2 and "the second prompt" not in pages[0]
    assert "the second prompt" in part(text, "list")


@dataclass
class RunConfig:
    out_dir: str
    device: str = "cpu"
    lr: float = 3e-5
    own_flag: str = "plain"


@in_browser
def test_the_page_tells_each_start_of_a_run(tmp_path, monkeypatch):
    program = tmp_path / "nvidia-smi"
    program.write_text("#!/bin/sh\necho Big GPU\necho Big GPU\n")
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    command = ["python", "grpo_trainer.py", "--lr", "3e-5", "--wandb-key", "hush"]
    monkeypatch.setattr(sys, "orig_argv", command)
    run = write_run(tmp_path / "run", [line()])
    config = RunConfig(out_dir=str(run))
    note_start(config, 0)
    note_start(config, 20)
    text = dom(view_run.write_page([run]), view="about")
    starts = part(text, "starts")
    assert "resumed 1 time" in starts and "--wandb-key (hidden)" in starts and "hush" not in text
    assert starts.count(", started") == 1 and starts.count(", resumed after step 20") == 1
    assert starts.count("--lr 3e-5") == 2 and f"python {platform.python_version()}" in starts
    assert re.search("torch [0-9.]+", starts) and "cores, 2 x Big GPU, device cpu" in starts


@in_browser
@pytest.mark.slow
def test_the_samples_of_all_steps_are_one_list_that_keys_lead_along(page):
    text = dom(page, view="samples", run="fapo", sort="low")
    assert "6 samples, page 1 of 1" in part(text, "found")
    rows = part(text, "rows")
    cells = re.findall(r'<tr><td><a href="[^"]*">(.*?)</a></td>.*?<td class="number">(.*?)</td>', rows)
    # The rows are sorted by reward, with the one without a verdict last. Hostile text stays text.
    assert [reward for _, reward in cells] == ["−1", "0", "1", "1", "1", "–"]
    assert cells[0][0] == "1, sample 4" and "<img" not in rows and "&lt;/script&gt;" in rows
    plays = """
      const press = key => document.body.dispatchEvent(new KeyboardEvent("keydown", {key, bubbles: true}));
      const seen = [];
      const note = () => seen.push(`${current.group.step} ${current.chosen}`);
      const steps = [  // each when the page has drawn what the one before asked for
        () => { note(); press("j"); }, () => { note(); press("j"); }, () => { note(); press("k"); },
        () => { note(); document.title = JSON.stringify(seen); }];
      addEventListener("hashchange", () => steps.shift()());
      location.hash = "view=groups&run=fapo&split=train&step=1&group=0&sample=3";
    """
    assert played(page, plays) == ["1 3", "1 4", "2 0", "1 4"]


@in_browser
@pytest.mark.slow
def test_a_long_list_is_paged_and_a_wrong_answer_with_a_reward_is_found(tmp_path):
    samples = [line(step=step) for step in range(1, 151)] + [line(step=151, info={"acc": False})]
    page = view_run.write_page([write_run(tmp_path / "run", samples)])
    text, odd = doms(page, dict(view="samples", page=1), dict(view="samples", filter="odd"))
    assert "151 samples, page 2 of 2" in text and part(text, "rows").count("<tr>") == 51
    text = odd
    assert part(text, "rows").count("<tr>") == 1 and ">151, sample 0<" in part(text, "rows")


@in_browser
def test_turns_are_told_apart_and_the_first_wrong_one_is_marked(tmp_path):
    turns = [
        {"who": "policy", "text": "look up 2+2"},
        {"who": "tool", "text": EVIL},
        {"who": "policy", "text": "It is 5."},
    ]
    page = view_run.write_page([write_run(tmp_path / "run", [line(turns=turns, info={"first_wrong": 2})])])
    sample = part(dom(page, view="groups"), "sample")
    items = re.findall('<li class="([a-z ]*)">(.*?)</li>', sample, re.S)
    assert [kind for kind, _ in items] == ["", "observation", "named"]
    assert "first wrong turn" in items[2][1] and "<img" not in sample and "&lt;/script&gt;" in items[1][1]


@in_browser
def test_a_run_that_ended_earlier_keeps_its_last_value_and_the_mean_can_be_longer(tmp_path):
    for name, steps in (("long", 9), ("short", 3)):
        metrics = [{"step": step, "reward/acc": step / 10} for step in range(1, steps + 1)]
        write_run(tmp_path / name, [], metrics)
    page = view_run.write_page([tmp_path])
    text, one, twenty = doms(page, {}, {"window": 1}, {"window": 20})
    assert "<b>0.3</b> (step 3)" in text
    thick = r'stroke-width="2" opacity="1" points="([^"]*)"'
    assert re.findall(thick, one) != re.findall(thick, twenty)
