"""evaluate_genrm.py: metrics computed by hand, and whole runs with a scripted HTTP server."""

import asyncio
import json
import math
import subprocess
import signal
import sys
from dataclasses import replace
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from played import says, score_files_here, server
from test_compute_score import Judge, completion

import genrm_server
from tools import evaluate_genrm
from tools.evaluate_genrm import (
    Config,
    flawed_positive_metrics,
    judge_rows,
    majority_vote,
    processbench_metrics,
    read_judge_rows,
    report,
)
from prepare_data import Config as DataConfig
from prepare_data import prepare

REPO = Path(__file__).parent.parent


def row(label, prediction, subset="math", correct=True):
    return {"label": label, "prediction": prediction, "subset": subset, "final_answer_correct": correct}


@pytest.mark.parametrize(
    ("indices", "vote"),
    [
        ([1, 1, -1], 1),
        ([-1, 2, 2, -1], -1),
        ([None, None, 3], 3),
        ([None, None], None),
        ([], None),
        ([2, -1, None, -1], -1),
    ],
)
def test_majority_vote(indices, vote):
    assert majority_vote(indices) == vote


def test_processbench_metrics():
    rows = [
        row(2, 2),
        row(2, 1),
        row(0, -1),
        row(1, None),
        row(-1, -1),
        row(-1, None),
        row(-1, 0),
        row(-1, -1),
    ]
    metrics = processbench_metrics(rows + [row(3, 3, "gsm8k"), row(-1, -1, "gsm8k")])
    # math: 1 of 4 errors is found exactly, and 2 of 4 correct solutions are called correct. An unparsable row
    # counts as a miss in both.
    assert metrics["math"] == pytest.approx((8, 0.25, 0.5, 2 * 0.25 * 0.5 / 0.75))
    assert metrics["gsm8k"] == (2, 1.0, 1.0, 1.0)
    assert processbench_metrics([row(1, 0), row(-1, 0)])["math"][-1] == 0.0
    for prediction in (0, 1):  # no sound solution, so nothing is known about them
        assert math.isnan(processbench_metrics([row(1, prediction)])["math"][-1])


def test_flawed_positive_metrics():
    rows = [
        row(2, 0),
        row(1, 1),
        row(0, -1),
        row(3, None),
        row(-1, 4),
        row(-1, -1),
        row(-1, None),
        row(5, 5, correct=False),
    ]
    metrics = flawed_positive_metrics(rows)
    # Of 3 rows called flawed, 2 are flawed; of 4 flawed rows, 2 are found.
    assert metrics == pytest.approx((7, 2 / 3, 0.5, 4 / 7))
    assert math.isnan(flawed_positive_metrics([row(-1, -1)])[-1])


@pytest.fixture
def bench(tmp_path) -> Path:
    """Return six rows of two subsets, as prepare_data.py builds them.

    Row k has problem k; the labels are -1 1 0 -1 2 -1.
    """
    rows = [
        {
            "id": f"{'gsm8k' if k < 3 else 'math'}-{k}",
            "generator": "g",
            "problem": f"Problem {k}",
            "label": label,
            "steps": ["one", "two", "so \\boxed{7}"],
            "final_answer_correct": k != 4,
        }
        for k, label in enumerate([-1, 1, 0, -1, 2, -1])
    ]
    (tmp_path / "processbench.json").write_text(json.dumps(rows))
    prepare(DataConfig(tasks=["processbench"], source_dir=tmp_path, out_dir=tmp_path))
    return tmp_path / "processbench_test.parquet"


def problem_of(request: dict) -> int:
    return int(request["messages"][0]["content"].split("[Math Problem]\n\nProblem ")[1][0])


def answer(request: dict) -> str:
    """Return a critique: exact on 0, 1, 3 and 4, a wrong paragraph on 2, no index on 5."""
    return ["\\boxed{-1}", "so \\boxed{1}", "\\boxed{2}", "\\boxed{-1}", "\\boxed{2}", "I do not know"][
        problem_of(request)
    ]


def run(judge: Judge, config: Config) -> list[dict]:
    """Score in this process. test_command_line has the workers of the Reward Loop."""

    async def main():
        async with judge.running():
            config.router_address = judge.address
            return await asyncio.to_thread(judge_rows, read_judge_rows(config.data, config.limit), config)

    with pytest.MonkeyPatch.context() as patch:
        score_files_here(patch)
        return asyncio.run(main())


def test_a_whole_run(bench, tmp_path, monkeypatch):
    monkeypatch.setenv("http_proxy", "http://127.0.0.1:1")  # the judge must not be reached through a proxy
    progress = []
    partial = tmp_path / "c.parquet.jsonl"
    judge = Judge(lambda request: progress.append(partial.read_text()) or answer(request))
    rows = run(judge, Config(data=bench, router_address="", out=tmp_path / "c.parquet", n=3, concurrency=4))
    # A run that was killed before its first response can be resumed as well.
    assert progress[0].startswith("{") and progress[0].endswith("}\n")
    assert len(judge.requests) == 18 and judge.model_lookups == 2  # for the requests and for --resume
    sent = {"model": "the-judge", "temperature": 0.6, "top_p": 0.95, "max_tokens": 16384}
    assert {key: value for key, value in judge.requests[0].items() if key != "messages"} == sent
    assert [row["prediction"] for row in rows] == [-1, 1, 2, -1, 2, None]
    assert all(len(row["critiques"]) == 3 for row in rows)
    lines = [line.split() for line in report(rows).splitlines()]
    assert ["gsm8k", "3", "50.0", "100.0", "66.7"] in lines
    assert ["math", "3", "100.0", "50.0", "66.7"] in lines
    assert ["average", "F1:", "66.7"] in lines
    assert ["5", "100.0", "100.0", "100.0"] in lines  # 2 flawed rows, both found
    assert "requests: {'ok': 18}; 16.7% of the critiques have no valid index" in report(rows)
    assert "INCOMPLETE" not in report(rows)


@pytest.mark.slow
def test_resume_asks_only_for_what_is_missing(bench, tmp_path):
    config = Config(data=bench, router_address="", out=tmp_path / "c.parquet", n=2, concurrency=2)
    rows = run(Judge(lambda request: 400 if problem_of(request) in (1, 4) else answer(request)), config)
    assert [row["prediction"] for row in rows] == [-1, None, 2, -1, None, None]
    text = report(rows)
    assert "INCOMPLETE: 4 requests failed (the first: ClientResponseError: 400" in text and "no luck" in text
    assert "requests: {'ok': 8, 'http_error': 4}" in text
    assert [line.split()[1] for line in text.splitlines()[1:3]] == ["2", "2"]  # of three rows each

    progress = tmp_path / "c.parquet.jsonl"
    settings, *lines = progress.read_text().splitlines()
    answered = [line for line in lines if json.loads(line)[1]["reward_score"] is not None]
    assert len(answered) == 8
    # Simulate a run that was killed in the middle of its last line.
    progress.write_text("\n".join([settings, *answered])[:-5])
    judge = Judge(answer)
    rows = run(judge, config)
    assert len(judge.requests) == 4 + 1 and {1, 4} <= set(map(problem_of, judge.requests))
    assert [row["prediction"] for row in rows] == [-1, 1, 2, -1, 2, None]
    judge = Judge(answer)
    assert run(judge, config) == rows and judge.requests == []
    run(judge, Config(data=bench, router_address="", out=tmp_path / "c.parquet", n=3, concurrency=2))
    assert len(judge.requests) == 6  # one more critique per row


def test_the_judge_gets_all_messages_of_a_row(bench, tmp_path):
    rows = pq.read_table(bench).to_pylist()
    system = {"role": "system", "content": "You are a strict grader."}
    for row in rows:
        row["extra_info"]["total_steps"] = "3"  # A number may be a text, as in a CSV file.
    for row in rows[1:]:
        row["prompt"] = [system, *row["prompt"]]
    rows[1]["prompt"][0] = system | {"name": "x"}  # Parquet gives all other messages a name, too: None.
    path = tmp_path / "with_system.parquet"
    pq.write_table(pa.Table.from_pylist(rows), path)
    judge = Judge("\\boxed{-1}")
    judged = run(judge, Config(data=path, router_address="", out=tmp_path / "c.parquet", n=1))
    users = [{"role": "user", "content": row["prompt"][-1]["content"]} for row in rows]
    expected = [[users[0]], *([system, user] for user in users[1:])]
    expected[1][0] = rows[1]["prompt"][0]
    sent = [request["messages"] for request in judge.requests]
    assert sorted(map(json.dumps, sent)) == sorted(map(json.dumps, expected))
    assert [row["critiques"][0]["score"] for row in judged] == [1.0, 0.0, 0.0, 1.0, 0.0, 1.0]


def test_samples_of_one_row_may_fail_alone(bench, tmp_path):
    calls = []

    def flaky(request):
        calls.append(problem_of(request))
        return 400 if calls.count(problem_of(request)) == 2 else answer(request)

    rows = run(Judge(flaky), Config(data=bench, router_address="", out=tmp_path / "c.parquet", n=3))
    assert [row["prediction"] for row in rows] == [-1, 1, 2, -1, 2, None]
    assert "{'ok': 12, 'http_error': 6}" in report(rows)


def test_a_critique_that_was_cut_has_no_vote_and_is_not_asked_again(bench, tmp_path):
    def long(request):
        return completion("\\boxed{-1} and so", "length") if problem_of(request) == 0 else answer(request)

    config = Config(
        data=bench,
        router_address="",
        out=tmp_path / "c.parquet",
        n=2,
        chat_kwargs='{"enable_thinking": false}',
    )
    judge = Judge(long)
    rows = run(judge, config)
    assert [row["prediction"] for row in rows] == [None, 1, 2, -1, 2, None]
    assert judge.requests[0]["chat_template_kwargs"] == {"enable_thinking": False}
    assert "requests: {'truncated': 2, 'ok': 10}; 33.3% of the critiques" in report(rows)
    assert "INCOMPLETE" not in report(rows)
    judge = Judge(answer)
    assert run(judge, config) == rows and judge.requests == []


def test_a_resumed_run_has_the_same_settings_and_version_of_compute_score(bench, tmp_path):
    config = Config(data=bench, router_address="", out=tmp_path / "c.parquet", n=1)
    run(Judge(answer), config)
    different = "c.parquet.jsonl belongs to a run with different data"
    changes = {"chat_kwargs": '{"a": 1}', "model": "other", "max_tokens": 7, "top_p": 1.0, "temperature": 0.0}
    for name, value in changes.items():
        with pytest.raises(ValueError, match=different):
            run(Judge(answer), replace(config, **{name: value}))
    judge = Judge(answer)
    run(judge, config)
    assert judge.requests == []

    progress = tmp_path / "c.parquet.jsonl"
    header, *lines = progress.read_text().splitlines()
    header = json.loads(header)
    assert [Path(file).name for file in header["files"]] == ["compute_score.py"]
    header["files"] = dict.fromkeys(header["files"], "the digest of an older version")
    progress.write_text("\n".join([json.dumps(header), *lines]))
    with pytest.raises(ValueError, match=different):
        run(Judge(answer), config)


def test_what_changes_no_answer_throws_none_away(bench, tmp_path):
    """Pass --limit by mistake; then reorder the rows, correct a label and enlarge the server's context."""
    config = Config(data=bench, router_address="", out=tmp_path / "c.parquet", n=1, limit=4)
    first = Judge(answer)
    first.card["max_model_len"] = 4096
    run(first, config)
    rows = pq.read_table(bench).to_pylist()[::-1]
    rows[-2]["reward_model"]["ground_truth"] = 2  # the label of problem 1
    pq.write_table(pa.Table.from_pylist(rows), bench)
    judge = Judge(answer)
    judged = run(judge, replace(config, limit=None, timeout_s=100.0, concurrency=2))
    assert sorted(map(problem_of, judge.requests)) == [1, 4, 5]
    assert [row["prediction"] for row in judged] == [None, 2, -1, 2, 1, -1]
    assert [row["critiques"][0]["score"] for row in judged] == [0.0, 1.0, 1.0, 0.0, 0.0, 1.0]


def test_limit_and_bad_files(bench, tmp_path):
    assert len(read_judge_rows(bench, limit=2)) == 2
    prepare(DataConfig(tasks=["aime25"], source_dir=REPO / "tests" / "data", out_dir=tmp_path))
    message = "aime25_test.parquet, row 0: ability is 'Math'; judge rows have 'math_critic'"
    with pytest.raises(ValueError, match=message):
        read_judge_rows(tmp_path / "aime25_test.parquet")
    row = pq.read_table(bench).to_pylist()[0]
    path = tmp_path / "rows.jsonl"
    for prompt in ("Is it right?", [], ["Is it right?"], [{"role": "user"}], [{"content": "Is it right?"}]):
        path.write_text(json.dumps(row | {"prompt": prompt}))
        with pytest.raises(
            ValueError, match="row 0: prompt (is|contains) .*; (it|each message|the content) must be"
        ):
            read_judge_rows(path)
    path.write_text("")
    with pytest.raises(ValueError, match="rows.jsonl: the file has no rows"):
        read_judge_rows(path)
    # What --out cannot contain is rejected before the judge is asked.
    for first, second in ((7, "seven"), ("seven", True), ({}, {}), (1, 1 << 70)):
        path.write_text("\n".join(json.dumps(row | {"uid": uid}) for uid in (first, second)))
        with pytest.raises(ValueError, match="rows.jsonl: the column 'uid' cannot be written to --out .*; "):
            read_judge_rows(path)
    path.write_text("\n".join(json.dumps(row | more) for more in ({}, {"uid": "b7"})))
    table = pa.Table.from_pylist(read_judge_rows(path))
    assert table["uid"].to_pylist() == [None, "b7"] and table.column_names[0] == next(iter(row))


@pytest.mark.parametrize(
    ("flag", "value", "problem"),
    [
        ("n", 0, "must be at least 1"),
        ("n", -2, "must be at least 1"),
        ("limit", 0, "must be at least 1"),
        ("limit", -1, "must be at least 1"),
        ("max-tokens", 0, "must be at least 1"),
        ("concurrency", 0, "must be at least 1"),
        ("timeout-s", 0.0, "must be a finite number above 0"),
        ("timeout-s", math.inf, "must be a finite number above 0"),
        ("temperature", -0.1, "must be a finite number of at least 0"),
        ("temperature", math.nan, "must be a finite number of at least 0"),
        ("top-p", 0.0, "must be above 0 and at most 1"),
        ("top-p", 1.5, "must be above 0 and at most 1"),
        ("out", "c.jsonl", "must end in .parquet"),
        ("out", "folder.parquet", "must not be a directory"),
        ("router-address", "http://127.0.0.1:1", "must be host:port"),
        ("router-address", "127.0.0.1", "must be host:port"),
        ("router-address", "genrm=127.0.0.1:1", "must be host:port"),
        ("router-address", "user:password@h:1", "must be host:port"),
    ],
)
def test_settings_that_measure_nothing_are_refused(
    bench, tmp_path, monkeypatch, capsys, flag, value, problem
):
    monkeypatch.chdir(tmp_path)
    Path("folder.parquet").mkdir()
    out = tmp_path / "c.parquet"
    out.write_text("an earlier result")
    arguments = ["--data", bench, "--out", out, "--router-address", "127.0.0.1:1", f"--{flag}={value}"]
    monkeypatch.setattr(sys, "argv", ["evaluate_genrm.py", *map(str, arguments)])
    with pytest.raises(SystemExit) as ended:
        evaluate_genrm.main()
    shown = str(value).removeprefix("user:password@")  # Errors show no password.
    assert (ended.value.code, capsys.readouterr().err) == (2, f"error: --{flag} {shown}: {problem}\n")
    assert out.read_text() == "an earlier result"


def test_half_a_character_in_a_critique_is_replaced_and_the_report_comes_before_the_file(
    bench, tmp_path, monkeypatch, capsys
):
    """A judge may write half a surrogate pair, which a Parquet file cannot contain."""
    score_files_here(monkeypatch)
    out = tmp_path / "c.parquet"

    def fail(*arguments, **options):
        raise OSError("No space left on device")

    with server(lambda path, body: says("so \ud83d \\boxed{-1}")) as address:
        arguments = ["--data", bench, "--out", out, "--router-address", address, "--n", 1]
        monkeypatch.setattr(sys, "argv", ["evaluate_genrm.py", *map(str, arguments)])
        with pytest.raises(SystemExit) as ended:
            evaluate_genrm.main()
        assert not ended.value.code and "average F1:" in capsys.readouterr().out
        critiques = [row["critiques"][0]["text"] for row in pq.read_table(out).to_pylist()]
        assert critiques == ["so \ufffd \\boxed{-1}"] * 6
        monkeypatch.setattr(pq, "write_table", fail)
        with pytest.raises(SystemExit) as ended:
            evaluate_genrm.main()
    said = capsys.readouterr()
    assert ended.value.code == 2 and "average F1:" in said.out and "No space left" in said.err


def test_whole_numbers_may_be_floats(bench, tmp_path):
    """Pandas turns a column with gaps into floats."""
    row = pq.read_table(bench).to_pylist()[1]
    path = tmp_path / "rows.jsonl"
    row["extra_info"]["total_steps"] = 3.0
    row["reward_model"]["ground_truth"] = 1.0
    path.write_text(json.dumps(row))
    (read,) = read_judge_rows(path)
    (same,) = read_judge_rows(bench, 2)[1:]
    assert evaluate_genrm.names_of(read, 2) == evaluate_genrm.names_of(same, 2)
    for steps in (2.5, math.nan, math.inf, "many", None):
        row["extra_info"]["total_steps"] = steps
        path.write_text(json.dumps(row))
        with pytest.raises(ValueError, match="row 0: .*extra_info.total_steps is"):
            read_judge_rows(path)


@pytest.mark.parametrize("names", [["a", "b"], ["b", "a"]])
def test_of_several_models_one_must_be_chosen(bench, names):
    cards = {"data": [{"id": name} for name in names]}
    with server(lambda path, body: {}, get=lambda path: cards) as address:
        config = Config(data=bench, router_address=address)
        with pytest.raises(ValueError, match=r"several models \(a, b\); choose one with --model a$"):
            evaluate_genrm.model_name(config)
        for card in cards["data"]:
            card["root"] = "/judge"  # Both are names of one model.
        assert evaluate_genrm.model_name(config) == "a"
        assert evaluate_genrm.model_name(replace(config, model="b")) == "b"


def test_a_wrong_key_is_not_taken_for_a_judge_that_does_not_run(bench, monkeypatch):
    monkeypatch.setattr(genrm_server, "request", lambda *arguments, **options: (401, "no"))
    with pytest.raises(RuntimeError, match="^--router-address h:1: wrong or missing key; set ROUTER_API_KEY"):
        evaluate_genrm.model_name(Config(data=bench, router_address="h:1"))


def interrupted(*_):
    """Send Ctrl-C, also to a background job, in which Python ignores it."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        signal.raise_signal(signal.SIGINT)
    finally:
        signal.signal(signal.SIGINT, before)


def test_the_end_of_a_command(bench, tmp_path, monkeypatch, capsys):
    rows = pq.read_table(bench).to_pylist()
    (tmp_path / "rows.jsonl").write_text("\n".join(map(json.dumps, rows)))
    rows[0]["reward_model"]["ground_truth"] = 9
    (tmp_path / "mixed.jsonl").write_text("\n".join(map(json.dumps, rows)))
    for data, more, code, message in [
        ("mixed.jsonl", [], 2, "mixed.jsonl, row 0: reward_model.ground_truth is 9"),
        ("rows.jsonl", ["--chat-kwargs", "[1]"], 2, "error: --chat-kwargs: must be a JSON object such"),
        ("rows.jsonl", [], 2, "error: --router-address 127.0.0.1:1: cannot get the model name"),
        ("rows.jsonl", ["--model", "m"], 130, "run the same command again"),
    ]:
        if code == 130:
            monkeypatch.setattr(evaluate_genrm, "judge_rows", interrupted)
        arguments = ["--data", tmp_path / data, "--router-address", "127.0.0.1:1", *more]
        arguments += ["--out", tmp_path / "c.parquet"]
        monkeypatch.setattr(sys, "argv", ["evaluate_genrm.py", *map(str, arguments)])
        with pytest.raises(SystemExit) as ended:
            evaluate_genrm.main()
        assert ended.value.code == code and message in capsys.readouterr().err


@pytest.mark.slow
def test_command_line(bench, tmp_path):
    async def main():
        arguments = ["--data", str(bench), "--out", str(tmp_path / "c.parquet"), "--n", "1"]
        async with Judge(answer).running() as judge:
            command = [sys.executable, "-m", "tools.evaluate_genrm", *arguments]
            command += ["--router-address", judge.address]
            options = dict(cwd=REPO, capture_output=True, text=True, timeout=240)
            done = await asyncio.to_thread(subprocess.run, command, **options)
        assert (done.returncode, "FlawedPositiveBench" in done.stdout) == (0, True), done.stderr

    asyncio.run(main())
    rows = pq.read_table(tmp_path / "c.parquet").to_pylist()
    assert [row["prediction"] for row in rows] == [-1, 1, 2, -1, 2, None]
    assert rows[1]["critiques"] == [
        {"status": "ok", "text": "so \\boxed{1}", "tokens": 12, "index": 1, "score": 1.0}
    ]


def test_a_command_whose_requests_fail_every_time_has_exit_code_1(bench, tmp_path, monkeypatch, capsys):
    """An example is a prompt that is too long."""
    arguments = ["--data", bench, "--out", tmp_path / "c.parquet", "--n", "1", "--router-address", "h:1"]
    monkeypatch.setattr(sys, "argv", ["evaluate_genrm.py", *map(str, arguments)])
    refused = Judge(lambda request: 400 if problem_of(request) == 3 else answer(request))
    monkeypatch.setattr(evaluate_genrm, "judge_rows", lambda rows, config: run(refused, config))
    with pytest.raises(SystemExit) as ended:
        evaluate_genrm.main()
    assert ended.value.code == 1 and "INCOMPLETE" in capsys.readouterr().out
