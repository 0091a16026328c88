"""The page of a run in a browser: axes, zoom, seeds, histograms, details, filters, colours, labels."""

import html
import json
import re
import shutil
import subprocess

import pytest
from test_view_run import (
    CAUGHT,
    EVIL,
    data_of,
    dom,
    doms,
    in_browser,
    line,
    part,
    played,
    rows_of,
    the_browser,
    write_run,
)

from tools import view_run
from tools.view_run import PAGE

VIEWS = ("curves", "groups", "samples", "changed", "about")


def figure(text, key):
    """Return the chart of this metric."""
    return re.search(f'<figure data-key="{key}">.*?</figure>', text, re.S)[0]


def thick_lines(text, key="reward/acc"):
    """Return the points of each thick line in a chart, as [[x, y], ...]."""
    found = re.findall(r'<polyline [^>]*stroke-width="2"[^>]*points="([^"]*)"', figure(text, key))
    return [[list(map(float, point.split(","))) for point in points.split()] for points in found]


def words_of(text):
    return html.unescape(re.sub("<.*?>", "", text))


def steps_of(accuracies, **more):
    """Return lines of metrics.jsonl, from step 1 on."""
    return [{"step": step, "reward/acc": value} | more for step, value in enumerate(accuracies, 1)]


def configured(folder, metrics, samples=(), **settings):
    write_run(folder, samples, metrics)
    (folder / "config.json").write_text(json.dumps(settings))
    return folder


# ---- curves


@in_browser
@pytest.mark.slow
def test_steps_time_and_tokens_are_axes(tmp_path):
    """Ten steps of one run take as long as five steps of the other, and have as many tokens as two and a
    half.
    """
    write_run(tmp_path / "fast", [], steps_of([0.5] * 10, **{"time/step": 10.0, "perf/tokens": 100}))
    write_run(tmp_path / "slow", [], steps_of([0.5] * 10, **{"time/step": 20.0, "perf/tokens": 400}))
    page = view_run.write_page([tmp_path])
    ends = {}
    axes = ("", "time", "tokens")
    for axis, text in zip(axes, doms(page, *[{"axis": axis} for axis in axes]), strict=True):
        fast, slow = (points[-1][0] for points in thick_lines(text))
        left = 58  # the axis begins here
        ends[axis] = (fast - left) / (slow - left)
        name = {"": "step", "time": "minutes", "tokens": "response tokens"}[axis]
        assert f">{name}</text>" in figure(text, "reward/acc")
    assert ends == {"": 1, "time": pytest.approx(1 / 2, abs=0.01), "tokens": pytest.approx(1 / 4, abs=0.01)}


@in_browser
def test_a_metric_of_a_single_step_is_a_circle(tmp_path):
    """A line through one point draws nothing. A bar reaches from the lowest to the highest seed."""
    for seed, value in ((0, 0.25), (1, 0.75)):
        metrics = steps_of([0.5, 0.5])
        metrics[1]["actor/entropy"] = value
        configured(tmp_path / f"run_seed{seed}", metrics, seed=seed)
    page = view_run.write_page([tmp_path])
    circle = r'<circle[^>]*cx="([\d.]+)" cy="([\d.]+)"[^>]*style="color:(.*?)"'
    single, seeds, zoomed = doms(page, {}, {"bands": 1}, {"from": 0, "to": 1})
    chart = figure(single, "actor/entropy")
    assert re.findall(circle, chart) == [("344", "120", "var(--run-0)"), ("344", "12", "var(--run-1)")]
    assert "<circle" not in figure(single, "reward/acc") and "<circle" in figure(zoomed, "reward/acc")
    chart = figure(seeds, "actor/entropy")
    assert [x for x, _, _ in re.findall(circle, chart)] == ["344"]
    assert len(re.findall(r'<path style="color:var\(--run-0\)[^>]*d="M344 [\d.]+V', chart)) == 1


@in_browser
@pytest.mark.slow
def test_a_log_scale_spaces_factors_evenly_and_says_what_it_cannot_show(tmp_path):
    values = {"actor/entropy": [100, 10, 1, 0.1, 0]}
    metrics = [{"step": step, "actor/entropy": value} for step, value in enumerate(values["actor/entropy"])]
    page = view_run.write_page([write_run(tmp_path / "run", [], metrics)])
    plain, whole, text = doms(page, {"window": 1}, {}, {"window": 1, "log": 1})
    (points,) = thick_lines(plain, "actor/entropy")
    assert len(points) == 5 and "log scale" not in figure(whole, "actor/entropy")
    (points,) = thick_lines(text, "actor/entropy")
    heights = [y for _, y in points]
    gaps = [after - before for before, after in zip(heights, heights[1:])]
    assert len(points) == 4 and gaps == pytest.approx([gaps[0]] * 3, abs=0.2)
    assert "A log scale cannot show values of 0 or less." in figure(text, "actor/entropy")


@in_browser
@pytest.mark.slow
def test_dragging_over_a_chart_shows_that_part_of_all_charts(tmp_path):
    metrics = steps_of([step / 100 for step in range(100)], **{"actor/entropy": 1.0})
    page = view_run.write_page([write_run(tmp_path / "run", [], metrics)])
    plays = """
      const picture = document.querySelector("[data-key='reward/acc'] svg");
      const box = picture.getBoundingClientRect();
      const at = step => box.left + (58 + step / 100 * (360 - 58 - 16)) / 360 * box.width;
      const point = (kind, step) => picture.dispatchEvent(new PointerEvent(kind, {clientX: at(step)}));
      addEventListener("hashchange", () => document.title = JSON.stringify(
        [state, $("from").value, document.querySelectorAll("[data-key='actor/entropy'] polyline").length]));
      point("pointerdown", 20);
      point("pointermove", 50);
      point("pointerup", 60);
    """
    state, start, lines = played(page, plays)
    assert float(state["from"]) == pytest.approx(20, abs=0.1) == float(start)
    assert float(state["to"]) == pytest.approx(60, abs=0.1) and lines == 2
    text = dom(page, **{"from": 20, "to": 60})
    (points,) = thick_lines(text)
    assert len(points) == 41 and points[0][0] == 58 and points[-1][0] == 344
    places = re.findall(r'class="place"[^>]*>(.*?)<', figure(text, "reward/acc"))
    assert places == ["20", "30", "40", "50", "60"]


@pytest.fixture
def seeds(tmp_path):
    """Return three seeds of one setting, of which one ended early, and a run of another setting."""
    for seed, values in enumerate(([0.1, 0.2], [0.3, 0.4], [0.8])):
        configured(tmp_path / f"fapo_seed{seed}", steps_of(values), lr=1.0, seed=seed, out_dir=f"x{seed}")
    configured(tmp_path / "other", steps_of([0.5, 0.5]), lr=2.0, seed=0, out_dir="y")
    return view_run.write_page([tmp_path])


@in_browser
@pytest.mark.slow
def test_the_seeds_of_a_setting_are_a_median_and_a_band(seeds):
    single, text = doms(seeds, {}, {"bands": 1, "window": 1})
    assert len(thick_lines(single)) == 4 and 'class="band"' not in single
    chart = figure(text, "reward/acc")
    assert len(thick_lines(text)) == 2 and chart.count('class="band"') == 1
    names = re.findall('<label>(?:(?!<label>).)*?id="show-(.*?)".*?</label>', part(text, "legend"))
    assert names == ["fapo (3 seeds)", "other"]
    (first, last) = thick_lines(text)[0]
    height = {0.3: first[1], 0.5: thick_lines(text)[1][0][1]}  # the median of 0.1, 0.3 and 0.8 is lower
    assert height[0.3] > height[0.5]
    # At step 2, two seeds are left.
    readout = words_of(re.search('<div class="readout">.*', chart, re.S)[0])
    assert readout == "step 2fapo (3 seeds)0.3 (0.2 to 0.4) of 2 seedsother0.5"


@in_browser
def test_histograms_count_the_logged_samples_of_each_step(tmp_path):
    rewards = {1: [-1.0, -1.0, -1.0, 1.0], 2: [1.0, 1.0, 1.0, 1.0]}
    samples = [line(step=step, reward=reward) for step, found in rewards.items() for reward in found]
    text = dom(view_run.write_page([write_run(tmp_path / "run", samples)]))
    (chart,) = re.findall('<figure data-histogram="reward">.*?</figure>', text, re.S)
    cells = re.findall(r'opacity="([\d.]+)"><title>(.*?)</title>', chart)
    assert dict(map(reversed, cells)) == {
        "step 1: 3 of 4 samples, reward −1": "0.79",
        "step 1: 1 of 4 samples, reward 1": "0.36",
        "step 2: 4 of 4 samples, reward 1": "1.00",
    }
    assert "8 of 8 samples" not in chart and 'data-histogram="length"' in text


# ---- details of a run


@in_browser
@pytest.mark.slow
def test_settings_that_differ_from_the_defaults_come_first(tmp_path):
    run = configured(tmp_path / "run", steps_of([0.5]), lr=1e-6, seed=0, own_flag="mine")
    start = {"time": 0, "step": 0, "command": "python train.py", "commit": "", "versions": {}, "machine": ""}
    (run / "starts.jsonl").write_text(json.dumps(start | {"defaults": {"own_flag": "plain"}}) + "\n")
    text = part(dom(view_run.write_page([run]), view="about"), "configuration")
    tables = dict(re.findall('<table class="settings" data-rows="(.*?)">(.*?)</table>', text, re.S))
    rows = {
        name: re.findall('<th scope="row">(.*?)</th><td(?: class="(.*?)")?>(.*?)</td>', table)
        for name, table in tables.items()
    }
    assert rows["chosen"] == [("--own-flag", "set", "mine")] and ">plain</td>" in tables["chosen"]
    assert [row[0] for row in rows["others"]] == ["--lr", "--seed"]
    # If defaults are unknown and there are two runs, the page shows the settings in which they differ.
    configured(tmp_path / "twin", steps_of([0.5]), lr=1e-6, seed=1, own_flag="mine")
    (run / "starts.jsonl").unlink()
    text = part(dom(view_run.write_page([tmp_path]), view="about"), "configuration")
    chosen = re.search('data-rows="chosen">(.*?)</table>', text, re.S)[1]
    assert re.findall("<td>(.*?)</td>", chosen) == ["0", "1"] and "--seed" in chosen


def test_secrets_are_not_on_the_page(tmp_path):
    command = "python train.py --wandb-key hush1 --judge-token=hush2 --max-tokens 512 "
    command += """--reward-kwargs '{"api_key": "hush3", "genrm_max_tokens": 96}'"""
    run = configured(
        tmp_path / "run",
        steps_of([0.5]),
        wandb_key="hush1",
        judge_token="hush2",
        max_tokens=512,
        reward_kwargs='{"api_key": "hush3", "genrm_max_tokens": 96}',
        password="",
        API_KEY="hush4",
        judges=[{"apiKey": "hush5"}, {"url": "b"}],
        openai_tokens=["hush6"],
    )
    start = {"time": 0, "step": 0, "command": command, "commit": "", "versions": {}, "machine": ""}
    (run / "starts.jsonl").write_text(json.dumps(start) + "\n")
    page = view_run.write_page([run])
    (data,) = data_of(page)["runs"]
    assert "hush" not in page.read_text() and data["settings"]["judges"][1] == {"url": "b"}
    assert data["settings"]["max_tokens"] == 512 and data["settings"]["password"] == ""
    assert json.loads(data["settings"]["reward_kwargs"])["genrm_max_tokens"] == 96
    assert "--max-tokens 512" in data["starts"][0]["command"]


def in_node(page, expression, scripts=("base.js",)):
    """Return what an expression is after these scripts of the page, which need no browser."""
    if not shutil.which("node"):
        pytest.skip("no node on this machine")
    data = json.dumps(json.dumps(data_of(page)))
    program = f"const document = {{getElementById: () => ({{textContent: {data}}})}};"
    program += "const addEventListener = () => {};"
    program += "".join((PAGE / name).read_text() for name in scripts)
    program += f"; console.log(JSON.stringify({expression}))"
    done = subprocess.run(["node", "-"], input=program, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def test_a_source_whose_name_begins_with_that_of_another_source_keeps_its_metrics(tmp_path):
    sources = ("gsm8k", "gsm8k/main", "gsm8k/socratic")  # The page meets them in another order.
    metrics = steps_of([0.5])
    for source in sources:
        metrics[0] |= {f"val/{source}/mean@1": 0.5, f"val/{source}/no_verdict/mean@1": 0.0}
    page = view_run.write_page([write_run(tmp_path / "run", [], metrics)])
    keys = [f"val/{source}/mean@1" for source in sources]
    found = in_node(page, f"{keys}.map(key => [sourceOf(key), inTraining(key)])", ("base.js", "curves.js"))
    assert found == [[source, "reward/acc"] for source in sources]


def test_a_link_with_an_unknown_order_or_axis_shows_the_samples_by_step(tmp_path):
    page = view_run.write_page([write_run(tmp_path / "run", [line(step=2), line(step=1)], steps_of([0.5]))])
    steps = "allSamples(RUNS[0], 'train').map(one => one.group.step)"
    for name in ("nothing", "constructor", "toString"):
        shown = f"(state.sort = state.axis = '{name}', [axisName(), xOf(RUNS[0], 2), {steps}])"
        assert in_node(page, shown, ("base.js", "curves.js", "samples.js")) == ["step", 2, [1, 2]]


@pytest.mark.parametrize(
    "kwargs, penalty",
    [
        ('{"penalty": 0.5, "genrm_timeout_s": Infinity}', 0.5),
        (r'{"note": "NaN \" Infinity", "x": [-Infinity, NaN]}', 1),
        ('{"penalty": NaN}', "NaN"),
    ],
)
def test_a_run_with_settings_that_only_python_reads_has_a_page(tmp_path, kwargs, penalty):
    settings = dict(reward_fn="compute_score.py:compute_score_fapo", reward_kwargs=kwargs)
    page = view_run.write_page([configured(tmp_path / "run", steps_of([0.5]), **settings)])
    assert in_node(page, "penaltyOf(RUNS[0].settings)") == penalty


def test_a_flaw_in_an_evaluation_that_is_judged_costs_nothing(tmp_path):
    info = {"acc": True, "flawed_positive": True, "first_wrong": 0, "genrm_status": "ok"}
    lines = [line(split="val", reward=score, info=info | {"score": score}) for score in (1.0, 0.0)]
    kwargs = dict(reward_fn="compute_score.py:compute_score_fapo", reward_kwargs='{"judge_test": true}')
    page = view_run.write_page([configured(tmp_path / "run", steps_of([0.5]), lines, **kwargs)])
    free, charged = in_node(
        page, "RUNS[0].groups[0].samples.map(one => termsOf(one, RUNS[0].groups[0], RUNS[0]))"
    )
    assert free == [["rule", 1], ["flaw found by the judge", 0], ["length penalty", 0]]
    assert charged == [["rule", 1], ["flaw found by the judge", -1], ["length penalty", 0]]


@pytest.mark.parametrize(
    "function, finder",
    [
        ("toy/toy_world.py:compute_score_fapo_oracle", "the oracle"),
        ("docs/exercises/audit.py:audited", "the reward function"),
        (None, "the reward function"),
    ],
)
def test_a_flaw_is_the_oracles_only_if_the_oracle_decides_the_score(tmp_path, function, finder):
    """A reward function may return the oracle's verdict for comparison, without using it."""
    info = {"acc": True, "flawed_positive": True, "oracle_flawed_positive": True, "score": 0.0}
    sample = line(reward=0.0) | {"reward_extra_info": info}
    settings = {"reward_fn": function} if function else {}
    run = configured(tmp_path / "run", steps_of([0.5]), [sample], reward_kwargs='{"penalty": 1}', **settings)
    terms = in_node(
        view_run.write_page([run]), "termsOf(RUNS[0].groups[0].samples[0], RUNS[0].groups[0], RUNS[0])"
    )
    assert terms == [["rule", 1], [f"flaw found by {finder}", -1], ["length penalty", 0]]


def test_critiques_and_truths_that_are_no_text_are_shown_as_json(tmp_path):
    """A reward function may return any JSON, and a ground truth may be a list."""
    lines = [line(group=0, info={"critique": {"step": 2}}), line(group=1, ground_truth=["4", "four"])]
    lines.append(line(group=2, info={"critique": ["fine", 1]}, ground_truth={"tests": 3}))
    page = view_run.write_page([write_run(tmp_path / "run", lines)])
    found = in_node(page, "RUNS[0].groups.map(group => [group.truth, group.samples[0].critique])")
    text = "fine\n\\boxed{-1}"
    assert found == [["1", '{"step":2}'], ['["4","four"]', text], ['{"tests":3}', '["fine",1]']]


@in_browser
@pytest.mark.slow
def test_the_time_of_a_step_is_split_into_its_parts(tmp_path):
    """With --overlap, rollouts and rewards happen during the update, so only the wait for them counts."""
    plain = {"time/rollout": 5.0, "time/reward_wait": 1.0, "time/update": 3.0, "time/step": 10.0}
    write_run(tmp_path / "plain", [], steps_of([0.5, 0.5], **plain))
    overlap = plain | {"time/rollout_wait": 2.0, "time/sync": 1.0, "time/step": 8.0}
    write_run(tmp_path / "overlap", [], steps_of([0.5], **overlap))
    text = part(dom(view_run.write_page([tmp_path]), view="about"), "spent")
    charts = dict(re.findall('<figure data-time="(.*?)">(.*?)</figure>', text, re.S))
    readout = {name: re.search('<div class="readout">(.*)', chart)[1] for name, chart in charts.items()}
    assert words_of(readout["plain"]).split(") ") == [
        "rollout 50 % (10 s",
        "waiting for rewards 10 % (2 s",
        "update 30 % (6 s",
        "other 10 % (2 s",
        "",
    ]
    assert words_of(readout["overlap"]).split(") ") == [
        "update 38 % (3 s",
        "weight sync 13 % (1 s",
        "waiting for overlapped rollouts 25 % (2 s",
        "other 25 % (2 s",
        "",
    ]
    assert charts["plain"].count("step 2: rollout 5 s") == 1
    assert "--run-" not in charts["plain"].split("<svg")[1]
    assert charts["plain"].count("color:var(--part-0)") == 3  # two steps and the readout


@in_browser
@pytest.mark.slow
def test_a_slow_first_step_does_not_flatten_the_others_and_zeros_need_no_chart(tmp_path):
    """Nine steps take 2 s and the first takes 40 s, so the axes end at 1.2 x 2 s."""
    metrics = steps_of([0.5] * 10, **{"time/step": 2.0, "genrm/error_rate": 0.0, "reward/no_verdict": 0.0})
    metrics[0]["time/step"] = 40.0
    page = view_run.write_page([write_run(tmp_path / "run", [], metrics)])
    text, about, log = doms(page, {"window": 1}, {"view": "about"}, {"log": 1})
    said = "The axis ends at 2.4 s; 1 of 10 values is higher, up to 40 s."
    assert said in figure(text, "time/step") and said in part(about, "spent")
    assert said not in figure(log, "time/step")
    (points,) = thick_lines(text, "time/step")
    heights = [y for _, y in points]
    assert heights[0] == 12 and len(set(heights[1:])) == 1 and heights[1] > 12  # 12 is the top of the axis
    zeros = "samples without a verdict; requests to the judge without a verdict"
    assert part(text, "zero").startswith(f"0 at every step: {zeros}.</p>")


# ---- samples


@in_browser
@pytest.mark.slow
def test_a_users_terms_are_bars_and_a_game_without_a_ground_truth_is_solved_or_not(tmp_path):
    info = {"acc": False, "score": -0.75, "terms": {"win": -1.0, "style": 0.5}}
    info |= {"flawed_positive": None, "first_wrong": None, "genrm_status": "skipped"}
    lost = line(
        ground_truth="",
        reward=-0.75,
        info=info,
        file="data/games.jsonl",
        row=7,
        seed=11,
        extra_info={"board": "X.O"},
    )
    won = line(ground_truth=None, info={"terms": [1]}, group=1)
    page = view_run.write_page([write_run(tmp_path / "run", [lost, won])])
    first, second = doms(page, dict(view="groups", group=0), dict(view="groups", group=1))
    assert "toy; row 7 of data/games.jsonl; seed 11</p>" in part(first, "group")
    sample = part(first, "sample")
    rows = rows_of(sample)
    assert [rows[name] for name in ("win", "style", "other terms", "length penalty")] == [
        "−1",
        "+0.5",
        "−0.25",
        "0",
    ]
    assert "terms" not in rows and rows["board"] == "X.O" and "✗ not solved" in rows["verdict"]
    gradient = r'<td style="background:linear-gradient\(to right, rgb\(var\(--(\w+)\) / .3\) (\d+)%'
    bars = re.findall(gradient, sample)
    assert bars == [("bad", "100"), ("good", "50"), ("bad", "25")]
    assert "✓ solved, sound" in part(second, "sample") and "ground truth" not in part(second, "group")
    assert rows_of(part(second, "sample"))["terms"] == "[1]"  # a list is no sum


@pytest.mark.parametrize(
    "rewards, said",
    [
        ([None, None], "No sample has a verdict."),
        ([None, 0.5], ""),
        ([None, 0.5, -0.5], "Mean reward 0, standard deviation 0.707. Advantage = reward − mean."),
    ],
)
@in_browser
def test_a_group_without_verdicts_has_no_mean(tmp_path, rewards, said):
    samples = [line(reward=reward, advantage=None) for reward in rewards]
    run = configured(tmp_path / "run", steps_of([0.5]), samples, advantage="dr_grpo")
    text = part(dom(view_run.write_page([run]), view="groups"), "group")
    assert re.findall("<p>(.*?)</p>", text) == [said]


@in_browser
@pytest.mark.slow
def test_samples_are_filtered_by_status_source_and_steps(tmp_path):
    samples = [line(step=step, group=step) for step in range(1, 6)]
    samples += [line(step=5, group=9, data_source="math")]
    samples += [line(step=5, group=9, status="timeout", reward=None)]
    page = view_run.write_page([write_run(tmp_path / "run", samples)])
    steps = {"first": 2, "last": 4}
    states = ({}, {"status": "timeout"}, {"source": "math"}, steps, steps | {"source": "math"})
    texts = doms(page, *[{"view": "samples"} | state for state in states])
    assert [int(re.match(r"\d+", part(text, "found"))[0]) for text in texts] == [7, 1, 2, 3, 0]
    plays = """
      const set = (id, value) => { $(id).value = value; $(id).dispatchEvent(new Event("change")); };
      const seen = [];
      const steps = [
        () => set("first", 5), () => set("status", "timeout"),
        () => { seen.push($("found").textContent); $("reset").click(); },
        () => { seen.push($("found").textContent, $("reset").hidden);
                document.title = JSON.stringify(seen); }];
      addEventListener("hashchange", () => steps.shift()());
      location.hash = "view=samples";
    """
    assert played(page, plays) == ["1 sample, page 1 of 1", "7 samples, page 1 of 1", True]


@in_browser
@pytest.mark.slow
def test_the_download_has_the_lines_of_the_samples_that_match(tmp_path):
    samples = [line(), line(**CAUGHT), line(step=2)]
    page = view_run.write_page([write_run(tmp_path / "run", samples)])
    plays = """
      URL.createObjectURL = blob => {
        blob.text().then(text => document.title = JSON.stringify(text));
        return "#";
      };
      addEventListener("hashchange", () => $("download").onclick());
      location.hash = "view=samples&filter=judge";
    """
    (saved,) = map(json.loads, played(page, plays).splitlines())
    assert saved.pop("run") == "run" and saved.pop("sample") == 1 and saved.pop("oracle") == 0
    assert saved == samples[1]


@in_browser
@pytest.mark.slow
def test_the_critique_stands_at_the_step_that_it_flags(tmp_path):
    """If a function has no judge, it names the step itself. A judge that failed names none."""
    alone = line(**CAUGHT)
    del alone["reward_extra_info"]["genrm_status"]
    failed = line(info=CAUGHT["info"] | {"genrm_status": "timeout"})
    page = view_run.write_page([write_run(tmp_path / "run", [line(**CAUGHT), alone, failed])])
    texts = doms(page, *[dict(view="groups", sample=number) for number in range(3)])
    texts = [part(text, "sample") for text in texts]
    items = [re.findall("<li.*?</li>", text, re.S) for text in texts]
    assert 'class="critique"' in items[0][0] and "65+9=74?6 not" in items[0][0]
    assert "The judge's critique" not in texts[0] and texts[0].count("65+9=74?6 not") == 1
    assert "← the reward function and the oracle: first wrong paragraph" in items[1][0]
    assert 'class="named"' not in items[2][1] and "← the judge" not in texts[2]
    assert "The judge's critique" in texts[2] and "65+9=74?6 not" in texts[2]


@in_browser
@pytest.mark.slow
def test_the_advantage_of_each_token_is_a_line_of_colours(tmp_path):
    turns = [
        {"who": "policy", "text": "2+2?", "tokens": 3},
        {"who": "tool", "text": "4", "tokens": 1},
        {"who": "policy", "text": "It is 5.", "tokens": 4},
    ]
    several = line(turns=turns, response_length=8, token_advantages=[[6, 0.5], [2, -1.5]])
    run = write_run(tmp_path / "run", [several, line(response_length=8), line(advantage=None)])
    page = view_run.write_page([run])
    heat = re.compile(r'<span class="(\w+)" style="flex:(\d+);(.*?)" title="(.*?)">')
    first, second, third = doms(page, *[dict(view="groups", sample=number) for number in range(3)])
    pieces = heat.findall(part(first, "heat"))
    assert [(kind, int(width), title) for kind, width, _, title in pieces] == [
        ("learnt", 3, "tokens 0 to 2: advantage +0.5"),
        ("unlearnt", 1, "tokens 3 to 3: tool, not learnt from"),
        ("learnt", 2, "tokens 4 to 5: advantage +0.5"),
        ("learnt", 2, "tokens 6 to 7: advantage −1.5"),
    ]
    assert [re.findall("good|bad", style) for _, _, style, _ in pieces] == [["good"], [], ["good"], ["bad"]]
    pieces = heat.findall(part(second, "heat"))
    assert [title for *_, title in pieces] == ["tokens 0 to 7: advantage +0.5"]
    assert 'id="heat"' not in third


# ---- hostile texts and sizes


@in_browser
@pytest.mark.slow
def test_no_text_of_a_run_becomes_markup_in_any_view(tmp_path):
    """This includes texts from a model, a status, a source, a setting, a command line and the name of a
    metric.
    """
    turns = [{"who": EVIL, "text": EVIL, "tokens": 2}, {"who": "policy", "text": EVIL, "tokens": 2}]
    info = {"critique": EVIL, "first_wrong": 0, "flawed_positive": True, EVIL: EVIL, "error": EVIL}
    info |= {"group_critique": EVIL + "\n", "genrm_error": EVIL}
    sample = line(data_source=EVIL, status=EVIL, ground_truth=EVIL, turns=turns, prompt=EVIL, info=info)
    metrics = steps_of([0.5], **{EVIL: 0.5, f"reward/{EVIL}": 0.5, "time/step": 1.0})
    metrics[0] |= {f"val/{EVIL}/mean@1": 0.5, f"val/{EVIL}/no_verdict/mean@1": 0.0}
    run = configured(tmp_path / "run", metrics, [sample, sample | {"split": "val"}], own=EVIL, reward_fn=EVIL)
    start = {"time": 0, "step": 0, "command": EVIL, "commit": EVIL, "versions": {EVIL: EVIL}, "machine": EVIL}
    (run / "starts.jsonl").write_text(json.dumps(start | {"defaults": {"own": EVIL}}) + "\n")
    page = view_run.write_page([run])
    assert "<img" not in page.read_text()
    for view, text in zip(VIEWS, doms(page, *[{"view": view} for view in VIEWS]), strict=True):
        drawn = re.sub("<script.*?</script>", "", text, flags=re.S)
        assert html.escape(EVIL, quote=False) in drawn and "<img" not in drawn, view
        assert re.search("<title>(.*?)</title>", text)[1] == str(run)


# ---- colours, labels, keys, narrow screens


def themes():
    """Return the colours in page.css as {theme: {name: (red, green, blue)}}."""
    style = (PAGE / "page.css").read_text()
    light, dark = re.findall(r":root \{(.*?)\}", style, re.S)[:2]
    found = {}
    for theme, block in (("light", light), ("dark", dark)):
        colours = {}
        for name, value in re.findall(r"--([\w-]+): ([^;]*)", block):
            if value.startswith("#"):
                colours[name] = tuple(int(value[i : i + 2], 16) for i in (1, 3, 5))
            else:
                colours[name] = tuple(map(int, value.split()))
        found[theme] = colours
    return found


def linear(colour):
    channels = [channel / 255 for channel in colour]
    return [c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in channels]


def luminance(colour):
    red, green, blue = linear(colour)
    return 0.2126 * red + 0.7152 * green + 0.0722 * blue


def contrast(one, other):
    """Return the contrast ratio as defined by WCAG 2."""
    dark, light = sorted((luminance(one), luminance(other)))
    return (light + 0.05) / (dark + 0.05)


def mixed(front, back, share):
    return tuple(share * f + (1 - share) * b for f, b in zip(front, back))


KINDS = ("good", "flawed", "bad", "silent", "plain")


@pytest.mark.parametrize("theme", ["light", "dark"])
def test_texts_and_lines_have_the_contrast_of_wcag_aa(theme):
    """The ratio must be 4.5 for texts, also on tinted backgrounds, and 3 for lines and markers."""
    colours = themes()[theme]
    for back in ("back", "panel"):
        for front in ("text", "soft", "link", *KINDS):
            assert contrast(colours[front], colours[back]) >= 4.5, (front, back)
        for number in range(6):
            for kind in ("run", "part"):
                assert contrast(colours[f"{kind}-{number}"], colours[back]) >= 3, (kind, number, back)
        tints = {"good": 0.4, "bad": 0.4, "flawed": 0.14, "plain": 0.17}  # the strongest tints
        for tint, share in tints.items():
            under = mixed(colours[tint], colours[back], share)
            assert contrast(colours["text"], under) >= 4.5, (tint, back)
        observation = mixed(colours["plain"], colours[back], 0.17)
        flagged = mixed(colours["flawed"], colours[back], 0.14)
        assert contrast(colours["soft"], observation) >= 4.5 and contrast(colours["flawed"], flagged) >= 4.5


# Colours as seen by people without one type of cone (Machado, Oliveira and Fernandes, 2009).
VISIONS = {
    "normal": [[1, 0, 0], [0, 1, 0], [0, 0, 1]],
    "protanopia": [
        [0.152286, 1.052583, -0.204868],
        [0.114503, 0.786281, 0.099216],
        [-0.003882, -0.048116, 1.051998],
    ],
    "deuteranopia": [
        [0.367322, 0.860646, -0.227968],
        [0.280085, 0.672501, 0.047413],
        [-0.01182, 0.04294, 0.968881],
    ],
    "tritanopia": [
        [1.255528, -0.076749, -0.178779],
        [-0.078411, 0.930809, 0.147602],
        [0.004733, 0.691367, 0.3039],
    ],
}
TO_CONES = [[0.41222, 0.53633, 0.05145], [0.2119, 0.6807, 0.1074], [0.0883, 0.28172, 0.62998]]
TO_LAB = [[0.21045, 0.79362, -0.00407], [1.978, -2.42859, 0.45059], [0.0259, 0.78277, -0.80868]]


def product(matrix, vector):
    return [sum(m * v for m, v in zip(row, vector)) for row in matrix]


def oklab(colour, vision):
    seen = [min(max(channel, 0), 1) for channel in product(VISIONS[vision], linear(colour))]
    return product(TO_LAB, [cone ** (1 / 3) for cone in product(TO_CONES, seen)])


@pytest.mark.parametrize("theme", ["light", "dark"])
def test_colour_blind_readers_can_tell_the_colours_of_runs_apart(theme):
    """Distances are in Oklab, where people can see differences of about 0.02.

    Good, flawed and bad must differ as well.
    """
    colours = themes()[theme]
    runs = [f"run-{number}" for number in range(6)]
    parts = [f"part-{number}" for number in range(6)]
    assert not {colours[name] for name in runs} & {colours[name] for name in parts}
    for names, least in ((runs, 0.1), (parts, 0.1), (["good", "flawed"], 0.1), (["good", "bad"], 0.1)):
        for vision in VISIONS:
            for index, one in enumerate(names):
                for other in names[:index]:
                    distance = sum(
                        (a - b) ** 2
                        for a, b in zip(oklab(colours[one], vision), oklab(colours[other], vision))
                    )
                    assert distance**0.5 >= least, (one, other, vision)


@pytest.fixture(scope="module")
def everything(tmp_path_factory):
    """Return a run with everything that the page can show."""
    folder = tmp_path_factory.mktemp("runs")
    for seed in (0, 1):
        turns = [{"who": "policy", "text": "a" * 300, "tokens": 5}, {"who": "tool", "text": "4", "tokens": 1}]
        samples = [line(step=step, **case) for step in (1, 2) for case in ({}, CAUGHT, {"turns": turns})]
        failed = {"reward": None, "info": {"error": "z" * 200}}
        samples += [line(step=0, split="val"), line(step=2, split="val", **failed)]
        metrics = steps_of([0.5, 0.6], **{"time/step": 2.0, "time/update": 1.0, "more/numbers": 1.0})
        settings = {"seed": seed, "lr": 1e-6, "path": "/data/" + "x" * 200}
        run = configured(folder / f"run_seed{seed}", metrics, samples, **settings)
        start = {"time": 0, "step": 0, "command": "python train.py " + "y" * 300, "commit": ""}
        start |= {"versions": {}, "machine": "host", "defaults": {"lr": 1e-5}}
        (run / "starts.jsonl").write_text(json.dumps(start) + "\n")
    return view_run.write_page([folder])


@in_browser
@pytest.mark.slow
def test_every_view_of_a_run_that_has_written_nothing_yet_is_drawn(tmp_path):
    page = view_run.write_page([write_run(tmp_path / "run", [], [])])
    plays = """
      const failures = [], views = VIEWS;
      addEventListener("error", event => failures.push(`${views[0]}: ${event.message}`));
      addEventListener("hashchange", () => setTimeout(() => {
        views.shift();
        if (views.length) location.hash = `view=${views[0]}`;
        else document.title = JSON.stringify([failures, $("found").textContent]);
      }));
      location.hash = "view=groups";
    """
    views = ["groups", "samples", "changed", "about", "curves"]
    failures, found = played(page, plays.replace("VIEWS", json.dumps(views)))
    assert failures == [] and found == "0 samples, page 1 of 1"
    said = {
        "groups": "No sample matches",
        "changed": "No run has been evaluated yet.",
        "about": "No config.json was found.",
    }
    for text, seen in zip(said.values(), doms(page, *[{"view": view} for view in said]), strict=True):
        assert text in re.sub("<script.*?</script>", "", seen, flags=re.S)


NAMELESS = """
  const nameOf = node => node.getAttribute("aria-label") || node.labels?.[0]?.textContent.trim()
    || (node.tagName === "A" || node.tagName === "SUMMARY" ? node.textContent.trim() : "");
  const found = new Set();
  const check = view => {
    for (const node of document.querySelectorAll("a, input, select, svg, summary, [tabindex], [role=img]"))
      if (!nameOf(node)) found.add(`${view}: ${node.outerHTML.slice(0, 90)}`);
    for (const node of document.querySelectorAll("a"))  // without an address the Tab key passes it by
      if (node.offsetParent && !node.href) found.add(`${view}: no address: ${node.textContent}`);
    const ids = [...document.querySelectorAll("[id]")].map(node => node.id);
    if (new Set(ids).size < ids.length) found.add(`${view}: an id twice`);
  };
  const views = VIEWS;
  addEventListener("hashchange", () => {
    check(views.shift());
    if (views.length) location.hash = `view=${views[0]}`;
    else document.title = JSON.stringify([...found]);
  });
  location.hash = `view=${views[0]}`;
"""


@in_browser
@pytest.mark.slow
def test_every_control_has_a_name_and_every_link_an_address(everything):
    assert played(everything, NAMELESS.replace("VIEWS", json.dumps(VIEWS))) == []


@in_browser
@pytest.mark.slow
def test_on_a_phone_nothing_is_wider_than_the_screen(everything, tmp_path):
    """In a frame as wide as a phone, the page must not scroll sideways in any view."""
    frame = tmp_path / "phone.html"
    source = json.dumps(everything.read_text()).replace("</", "<\\/")
    frame.write_text(f"""<!doctype html><title></title>
      <iframe id="phone" width="390" height="800"></iframe>
      <script>
      const source = {source}, wide = [], views = {json.dumps(VIEWS)};
      const phone = document.getElementById("phone");
      phone.onload = () => {{
        const inside = phone.contentWindow, root = phone.contentDocument.documentElement;
        inside.addEventListener("hashchange", () => {{
          if (root.scrollWidth > 390) wide.push([views[0], root.scrollWidth]);
          views.shift();
          if (views.length) inside.location.hash = "view=" + views[0];
          else document.title = JSON.stringify([inside.matchMedia("(max-width: 760px)").matches, wide]);
        }});
        inside.location.hash = "view=" + views[0];
      }};
      phone.srcdoc = source;
    </script>""")
    text = the_browser().html_of(frame.as_uri(), 4000)
    assert re.search("<title>(.*?)</title>", text)[1] == "[true,[]]"


@in_browser
@pytest.mark.slow
def test_keys_do_not_move_the_sample_while_the_user_types(everything):
    plays = """
      const press = (node, key) => node.dispatchEvent(new KeyboardEvent("keydown", {key, bubbles: true}));
      const seen = [];
      const steps = [
        () => { const before = location.hash;
                press($("q"), "j"); press(document.body, "x");
                seen.push(location.hash === before, current.chosen); press(document.body, "j"); },
        () => { seen.push(current.chosen); document.querySelector("[aria-keyshortcuts=j]").click(); },
        () => { seen.push(current.chosen); document.title = JSON.stringify(seen); }];
      addEventListener("hashchange", () => steps.shift()());
      location.hash = "view=groups";
    """
    assert played(everything, plays) == [True, 0, 1, 2]
