"""Scoring a file: the command line, errors, and runs that are stopped, killed and resumed."""

import dataclasses
import errno
import hashlib
import json
import math
import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from aiohttp import web

import forked
from played import RewardsHere, lines_of, score_files_here, server
from test_reward_loop import FAULTS, GROUPS, critic, free_port, sample, until, write_function
from test_reward_loop import serve  # noqa: F401  (a fixture)

import reward_loop
import score_file

ROOT = Path(score_file.__file__).parent


@pytest.fixture(autouse=True)
def ray_if_slow(request):
    """Start Ray for slow tests only. The quick ones score nothing."""
    if request.node.get_closest_marker("slow"):
        request.getfixturevalue("one_ray")


def write_jsonl(path, rows):
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def command_line(*arguments, **options):
    """Run the script as a user does. Returns a CompletedProcess."""
    return forked.run([ROOT / "score_file.py", *arguments], timeout=400, **options)


@pytest.mark.slow
def test_command_line_errors_are_one_line_and_exit_2(tmp_path):
    good = write_jsonl(tmp_path / "good.jsonl", [sample("one")] * 2)
    row = {"data_source": "x", "reward_model": {"ground_truth": "1"}}
    write_jsonl(tmp_path / "no_response.jsonl", [row])
    (tmp_path / "broken.jsonl").write_text("{}\n{\n")
    no_truth = row | {"response": "r", "reward_model": {"ground_truth": None}}
    write_jsonl(tmp_path / "no_truth.jsonl", [no_truth])
    asked = {"reward_fn": f"{ROOT}/compute_score.py:compute_score_fapo", "router_address": ("h:1",)}
    tests = row | {"response": "r", "reward_model": {"ground_truth": '{"inputs": []}'}}
    write_jsonl(tmp_path / "tests.jsonl", [row | {"response": "r"}, tests])
    write_jsonl(tmp_path / "question.jsonl", [row | {"response": "r", "extra_info": {"question": " "}}])
    write_jsonl(tmp_path / "extra.jsonl", [row | {"response": "r", "extra_info": "{}"}])
    write_jsonl(tmp_path / "source.jsonl", [row | {"response": "r", "data_source": ["a"]}])
    (tmp_path / "fake.parquet").write_text("PAR?")
    write_jsonl(tmp_path / "status.jsonl", [sample("one"), sample("one", status="reviewed")])
    out = tmp_path / "out.jsonl"
    (tmp_path / "link.jsonl").symlink_to(good)
    (tmp_path / "copy.jsonl").write_bytes(good.read_bytes())
    cases = [  # in this process, because Ray need not start
        (dict(data=tmp_path / "none.jsonl", out=out), "the file does not exist"),
        (dict(data=tmp_path / "no_response.jsonl", out=out), "row 0: the column 'response' is missing"),
        (dict(data=tmp_path / "broken.jsonl", out=out), "line 2"),
        (dict(data=tmp_path / "no_truth.jsonl", out=out), "row 0: reward_model is {'ground_truth': None}"),
        (dict(data=tmp_path / "tests.jsonl", out=out), "tests.jsonl, row 1: ground_truth: '{"),
        (dict(data=tmp_path / "question.jsonl", out=out) | asked, "row 0: extra_info['question'] is ' '"),
        (
            dict(data=tmp_path / "extra.jsonl", out=out) | asked,
            "row 0: extra_info is '{}'; it must be an object",
        ),
        (
            dict(data=tmp_path / "source.jsonl", out=out),
            "row 0: data_source is ['a']; it must be a string that",
        ),
        (dict(data=tmp_path / "fake.parquet", out=out), "parquet"),
        (dict(data=tmp_path / "good.txt", out=out), ".jsonl"),
        (dict(data=tmp_path / "status.jsonl", out=out), "the result would overwrite the column 'status'"),
        (dict(data=good, out=tmp_path / "out.csv"), "must end in .jsonl"),
        (dict(data=good, out=tmp_path / "out.parquet"), "or in .parquet if --data does"),
        (
            dict(data=good, out=tmp_path / "link.jsonl"),
            "link.jsonl: is the same file as --data; pass another",
        ),
        (dict(data=good, out=good, resume=True), "good.jsonl: is the same file as --data; pass another name"),
        (
            dict(data=good, out=tmp_path / "copy.jsonl", resume=True),
            "copy.jsonl, row 0: the column 'reward_s",
        ),
        (dict(data=good, out=out, reward_kwargs="{"), "must be a JSON object"),
        (dict(data=good, out=out, reward_kwargs="[]"), "must be a JSON object"),
        (dict(data=good, out=out, reward_kwargs='{"key": "s3cret"'), "(Expecting ',' delimiter: line 1 col"),
        (dict(data=good, out=out, reward_kwargs='{"key": "s3cret", "a": NaN}'), "numbers must be finite"),
        (dict(data=good, out=out, router_address=("http://h:1",)), "host:port"),
        (dict(data=good, out=out, router_address=("user:password@h:1",)), "-address h:1: must be host:port"),
        (dict(data=good, out=out, num_workers=-1), "--num-workers -1: must be at least 0"),
        (dict(data=good, out=out, reward_fn="none.py:f"), "none.py does not exist"),
    ]
    for options, message in cases:
        with pytest.raises((ValueError, OSError)) as caught:
            score_file.run(score_file.Config(**options))
        assert message in str(caught.value) and "\n" not in str(caught.value), options
        assert "s3cret" not in str(caught.value)
    for arguments in (["--data", tmp_path / "none.jsonl"], ["--data", good, "--no-such-flag", 1]):
        ended = command_line("--out", out, *arguments)
        assert ended.returncode == 2 and ended.stderr.strip() and not ended.stdout
        assert "Traceback" not in ended.stderr
    assert not out.exists()


def test_a_folder_that_cannot_be_written_is_named_before_a_judge_starts(tmp_path, monkeypatch):
    monkeypatch.setattr(score_file, "start_rewards", lambda *given: pytest.fail("a judge starts"))
    write_jsonl(tmp_path / "rows.jsonl", [sample("one")])
    config = score_file.Config(data=tmp_path / "rows.jsonl", out=tmp_path / "rows.jsonl/out.jsonl")
    with pytest.raises(OSError, match=r"^--out: cannot write to .*rows.jsonl \(File exists\); pass another"):
        score_file.run(config)
    config.out = tmp_path / "folder.jsonl"
    config.out.mkdir()
    with pytest.raises(ValueError, match=r"^--out .*folder.jsonl: must not be a directory"):
        score_file.run(config)


def test_a_key_that_is_wrong_or_cannot_be_sent_is_an_input_error(tmp_path, serve, monkeypatch, capsys):
    monkeypatch.setattr(score_file, "start_rewards", lambda *given: pytest.fail("Ray starts"))
    server = serve(critic)
    server.key = "right"
    data = write_jsonl(tmp_path / "rows.jsonl", [sample("one")])
    arguments = ["--data", data, "--out", tmp_path / "out.jsonl", "--router-address", server.address]
    arguments += ["--reward-fn", f"{ROOT}/compute_score.py:compute_score_fapo"]
    monkeypatch.setattr(sys, "argv", ["score_file.py", *map(str, arguments)])
    for key, message in (
        ("wrong", "wrong or missing key; set ROUTER_API_KEY"),
        ("s3c ret", "ROUTER_API_KEY: a key contains white space"),
    ):
        monkeypatch.setenv("ROUTER_API_KEY", key)
        with pytest.raises(SystemExit) as ended:
            score_file.main()
        said = capsys.readouterr().err
        assert ended.value.code == 2 and message in said and "s3c ret" not in said


@pytest.mark.slow
def test_command_line_scores_a_file(tmp_path):
    import pyarrow
    import pyarrow.parquet

    responses = ["acc", "other_keys", "raise", "none"] * 5
    scored_before = {"reward_score": 7.0, "status": "old", "reward_extra_info": "{}"}
    rows = [sample(response, score=1, **scored_before) for response in responses]
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), tmp_path / "responses.parquet")
    arguments = ["--data", tmp_path / "responses.parquet", "--reward-fn", f"{FAULTS}:sync_fault"]
    arguments += ["--max-no-verdict-rate", "0.5", "--num-workers", 1]
    for name in ("scored.parquet", "scored.jsonl"):
        ended = command_line(*arguments, "--out", tmp_path / name)
        assert ended.returncode == 0, ended.stderr
        assert "scored 20 samples" in ended.stdout
        assert "ok 10, no_verdict 5, timeout 0, error 5" in ended.stdout
        assert "mean reward: 0.75" in ended.stdout and "acc: 1.0000" in ended.stdout
        assert not [path for path in tmp_path.iterdir() if "partial" in path.name or "tmp" in path.name]
    table = pyarrow.parquet.read_table(tmp_path / "scored.parquet")
    assert table.column_names == list(rows[0])  # the columns of earlier scores were replaced
    assert table.schema.field("reward_score").type == pyarrow.float64()
    assert table["reward_score"].null_count == 10
    written = table.to_pylist()
    assert [row["reward_score"] for row in written] == [1.0, 0.5, None, None] * 5
    assert [row["status"] for row in written] == ["ok", "ok", "error", "no_verdict"] * 5
    assert [json.loads(row["reward_extra_info"]) for row in written[:2]] == [
        {"score": 1.0, "acc": True},
        {"score": 0.5, "pred": "x"},
    ]
    assert lines_of(tmp_path / "scored.jsonl") == written


HALF = """
async def ask(data_source, solution_str, ground_truth, extra_info, reward_router_address):
    if ground_truth not in solution_str:
        return -1.0
    async with aiohttp.ClientSession(raise_for_status=True) as session:
        async with session.post(f"http://{reward_router_address}/v1/chat/completions", json={}) as response:
            return 1.0
"""


@pytest.mark.slow
def test_command_line_stops_when_the_judge_stays_down_and_resumes(tmp_path, serve):
    port = free_port()
    rows = [sample("\\boxed{2}"), sample("\\boxed{1}")] * 20  # every second sample needs the judge
    data = write_jsonl(tmp_path / "responses.jsonl", rows)
    out = tmp_path / "scored.jsonl"
    arguments = ["--data", data, "--out", out, "--reward-fn", write_function(tmp_path, HALF)]
    arguments += ["--router-address", f"127.0.0.1:{port}", "--http-retries", "0", "--num-workers", 1]
    ended = command_line(*arguments)
    assert ended.returncode == 1 and "have no score" in ended.stderr
    assert "--max-no-verdict-rate" in ended.stderr
    assert not out.exists()
    ended = command_line(*arguments)
    assert ended.returncode == 2 and "--resume" in ended.stderr

    # The run may stop before it records any sample that needs no judge. All recorded samples are kept.
    noted = (tmp_path / "scored.jsonl.partial.jsonl").read_text().splitlines()[1:]
    kept = sum("-1.0" in line for line in noted)
    server = serve(critic, port)
    ended = command_line(*arguments, "--resume")
    assert ended.returncode == 0, ended.stderr
    assert (f"resuming: {kept} of 40" in ended.stdout) == (kept > 0) and len(server.requests) == 20
    scored = lines_of(out)
    assert [row["reward_score"] for row in scored] == [-1.0, 1.0] * 20
    assert {row["status"] for row in scored} == {"ok"}


@pytest.mark.slow
def test_a_judge_that_is_down_is_seen_also_when_few_answers_need_it(tmp_path):
    """With 14 % correct answers and no judge, no sample that needed a verdict has one.

    The rate is 100 %, not 14 %.
    """
    rows = [sample("\\boxed{1}" if index % 7 == 0 else "\\boxed{2}") for index in range(700)]
    data = write_jsonl(tmp_path / "responses.jsonl", rows)
    config = score_file.Config(
        data=data,
        out=tmp_path / "scored.jsonl",
        reward_fn="compute_score.py:compute_score_fapo",
        router_address=(f"127.0.0.1:{free_port()}",),
        reward_kwargs='{"genrm_timeout_s": 1}',
        num_workers=1,
    )
    with pytest.raises(RuntimeError, match="^100 samples have no score"):
        score_file.run(config)
    assert not config.out.exists()


@pytest.mark.slow
def test_resume_takes_the_same_data_and_settings_only_and_can_end(tmp_path):
    out, responses = tmp_path / "scored.jsonl", ["none"] * 3 + ["one"] * 97
    rows = [sample(response, response_length=10) for response in responses]
    data = write_jsonl(tmp_path / "responses.jsonl", rows)
    function = Path(shutil.copytree(Path(FAULTS).parent, tmp_path / "functions"), "faults.py")
    config = score_file.Config(data=data, out=out, reward_fn=f"{function}:sync_fault", num_workers=1)
    with pytest.raises(
        RuntimeError, match="^3 samples have no score.* its settings change, delete .*partial"
    ):
        score_file.run(dataclasses.replace(config, max_no_verdict_rate=0.02))
    config.resume = True
    with pytest.raises(ValueError):
        score_file.run(dataclasses.replace(config, reward_kwargs='{"a": 1}'))
    write_jsonl(data, rows[:-1] + [sample("acc", response_length=10)])
    with pytest.raises(ValueError, match=r"different data.*not the same: data\)"):
        score_file.run(config)
    assert not out.exists()
    write_jsonl(data, rows)
    function.write_text(function.read_text() + "# another version\n")
    with pytest.raises(ValueError, match=r"different reward function \(not the same: files\)"):
        score_file.run(config)
    function.write_text(Path(FAULTS).read_text())
    score_file.run(config)  # still no verdict for some, but 3 % is below the limit
    assert [json.loads(line)["reward_score"] for line in out.open()] == [None] * 3 + [1.0] * 97


@pytest.mark.slow
def test_resume_notices_another_judge_behind_the_address(tmp_path, serve, monkeypatch):
    """Otherwise, the scores of two judges would be mixed.

    A judge that has not responded yet does not count as different.
    """
    data = write_jsonl(tmp_path / "responses.jsonl", [sample("\\boxed{1}")])
    partial = tmp_path / "scored.jsonl.partial.jsonl"
    score_files_here(monkeypatch)
    port = free_port()
    config = score_file.Config(
        data=data,
        out=tmp_path / "scored.jsonl",
        reward_fn="compute_score.py:compute_score_fapo",
        router_address=(f"127.0.0.1:{port}",),
        num_workers=1,
        resume=True,
        reward_kwargs='{"genrm_timeout_s": 2}',
    )
    with pytest.raises(RuntimeError, match="1 samples have no score"):
        score_file.run(config)
    serve(critic, port)
    score_file.run(config)  # the first start did not know the judge
    assert json.loads(config.out.read_text())["reward_score"] == 1.0

    config.out.unlink()
    arguments = hashlib.sha256(config.reward_kwargs.encode()).hexdigest()  # They may contain secrets.
    header = {"reward_fn": config.reward_fn, "reward_kwargs": arguments, "genrm": []}
    header["data"] = hashlib.sha256(data.read_bytes()).hexdigest()
    header["files"] = config.make_job().files
    header |= config.scored_by(config.make_job())
    for model, is_other in (("judge None", False), ("another-judge None", True), ("judge /models/b", True)):
        header["models"] = {"genrm": model}
        partial.write_text(json.dumps(header) + "\n")
        config.out.unlink(missing_ok=True)
        if is_other:
            with pytest.raises(ValueError, match="different judge"):
                score_file.run(config)
        else:
            score_file.run(config)


@pytest.fixture
def judge_folder(tmp_path):
    folder = tmp_path / "judge"
    folder.mkdir()
    (folder / "config.json").write_text("{}")
    (folder / "model.safetensors").write_text("1st")
    return folder


def overwrite(folder):
    (folder / "model.safetensors").write_text("another judge")


@pytest.mark.slow
def test_resume_notices_other_files_and_settings_of_the_judge(tmp_path, judge_folder, monkeypatch):
    data = write_jsonl(tmp_path / "responses.jsonl", [sample("\\boxed{1}")])
    partial = tmp_path / "scored.jsonl.partial.jsonl"
    config = score_file.Config(
        data=data,
        out=tmp_path / "scored.jsonl",
        reward_fn="compute_score.py:compute_score_fapo",
        genrm=(str(judge_folder),),
        genrm_vllm_args="--api-key hush",
        resume=True,
        reward_kwargs='{"genrm_chat_kwargs": {"note": "hush"}}',
    )
    headers = []
    read = score_file.scored_before

    def begin(partial, header, resume):
        headers.append(json.dumps(header))
        read(partial, header, resume)
        raise RuntimeError("the scoring begins")

    monkeypatch.setattr(score_file, "scored_before", begin)

    def start(change=lambda: None, **changes):
        change()
        score_file.run(dataclasses.replace(config, **changes))

    with pytest.raises(RuntimeError, match="the scoring begins"):
        start()
    assert "hush" not in headers[0]
    partial.write_text(headers[0] + "\n")
    with pytest.raises(RuntimeError, match="the scoring begins"):
        start(lambda: (judge_folder / "notes.log").touch())  # not a file of the model
    for changes, name in [
        ({"genrm_vllm_args": "--max-num-seqs 3"}, "genrm_vllm_args"),
        ({"reward_kwargs": '{"penalty": 0.5}'}, "reward_kwargs"),
        ({"reward_model_task": ("classify",)}, "reward_model_task"),
        ({"reward_model_tokenizer": str(judge_folder)}, "reward_model_tokenizer"),
        ({"change": lambda: overwrite(judge_folder)}, "the model genrm"),
    ]:
        with pytest.raises(ValueError, match=rf"different judge .*\(not the same: {name}\); delete"):
            start(**changes)
    older = json.loads(headers[0]) | {
        "reward_fn": config.reward_fn,
        "files": {"compute_score.py": "a digest"},
    }
    partial.write_text(json.dumps(older) + "\n")
    with pytest.raises(ValueError, match=r"\(not the same: the version of the file\); delete"):
        start()


def test_a_wrong_key_ends_the_start_also_without_a_router(tmp_path, serve, monkeypatch):
    async def locked(request):
        return web.Response(status=401)

    monkeypatch.setattr(score_file, "start_rewards", lambda *given: pytest.fail("the scoring begins"))
    address = serve(locked).address
    config = score_file.Config(
        data=write_jsonl(tmp_path / "responses.jsonl", [sample("\\boxed{1}")]),
        out=tmp_path / "scored.jsonl",
        reward_fn="compute_score.py:compute_score_fapo",
        reward_kwargs='{"genrm_model": "judge"}',
        router_address=(address,),
    )
    with pytest.raises(RuntimeError, match=f"{address}: wrong or missing key; set ROUTER_API_KEY"):
        score_file.run(config)


def test_a_function_that_is_edited_while_a_judge_starts_scores_nothing(tmp_path, monkeypatch):
    """Otherwise, the header would name another version of the function than the one that scored."""
    function = write_function(tmp_path, "def ask(solution_str, **_):\n    return 1.0\n")

    def start(options, stack):
        write_function(tmp_path, "def ask(solution_str, **_):\n    return 2.0\n")
        return RewardsHere(options)

    monkeypatch.setattr(score_file, "start_rewards", start)
    data = write_jsonl(tmp_path / "responses.jsonl", [sample("one")])
    with pytest.raises(ValueError, match="asking.py has changed since the run began; restore the file"):
        score_file.run(score_file.Config(data=data, out=tmp_path / "scored.jsonl", reward_fn=function))
    assert not (tmp_path / "scored.jsonl").exists()


def test_what_is_known_of_the_models_behind_an_address(judge_folder):
    """The order of the list may change, and the folder that a server names may be overwritten."""
    cards = [{"id": "b", "root": str(judge_folder)}, {"id": "a", "root": "on-a-hub/a"}]
    with server(lambda path, body: {}, get=lambda path: {"data": cards}) as address:
        addresses = {"genrm": address, "gone": f"127.0.0.1:{free_port()}"}
        both = reward_loop.served_models(addresses)
        assert both["gone"] is None and both["genrm"].startswith(f"a on-a-hub/a, b {judge_folder} ")
        a, b = (reward_loop.served_models(addresses, [chosen]) for chosen in "ab")
        assert a["genrm"] == "a on-a-hub/a" and b["genrm"] == both["genrm"].removeprefix("a on-a-hub/a, ")
        cards.reverse()
        assert reward_loop.served_models(addresses) == both
        overwrite(judge_folder)
        assert reward_loop.served_models(addresses) != both
        assert reward_loop.served_models(addresses, ["a"]) == a != b


@pytest.mark.parametrize("cards", [{"data": []}, {"data": None}, {"data": [{"root": "/x"}]}, {}, []])
def test_a_server_without_a_list_of_models_does_not_count_as_another_one(cards):
    with server(lambda path, body: {}, get=lambda path: cards) as address:
        with pytest.raises((ValueError, LookupError, TypeError)):
            reward_loop.listed_models(address)
        now = {"models": reward_loop.served_models({"genrm": address}, ["small"])}
    assert now == {"models": {"genrm": None}}
    assert reward_loop.changes_between({"models": {"genrm": "small"}}, now) == []


@pytest.mark.parametrize("before", [None, [], {}, {"models": {"genrm": "small"}}])
def test_what_an_older_version_wrote_of_the_scoring_counts_as_changed(before):
    now = {"models": {"genrm": "small"}, "function": "f"}
    assert reward_loop.changes_between(before, now) == ["the version of the file"]
    assert reward_loop.changes_between(now, now) == []


def test_a_model_that_no_server_lists_is_named_before_it_is_asked(caplog):
    """A server that does not respond may serve it. Some servers accept names that they do not list."""
    cards = [{"data": [{"id": "small"}]}, {"data": [{"id": "large"}, {"id": "other"}]}]
    with (
        server(lambda path, body: {}, get=lambda path: cards[0]) as quick,
        server(lambda path, body: {}, get=lambda path: cards[1]) as strict,
    ):
        both = (f"quick={quick}", f"strict={strict}")
        for addresses, model, second, unlisted in (
            (both, "small", "large", ""),
            (both, "small", "lage", "lage"),
            (both, "smal", None, "smal"),
            ((*both, f"gone=127.0.0.1:{free_port()}"), "smal", "lage", ""),
        ):
            caplog.clear()
            settings = {"genrm_model": model, "strict": {"genrm_model": second}}
            config = reward_loop.RewardOptions(
                reward_fn=f"{ROOT}/docs/judges.py:two_judges",
                router_address=addresses,
                reward_kwargs=json.dumps(settings),
            )
            models = config.scored_by(config.make_job())["models"]
            if second == "large":
                assert models == {"quick": "small None", "strict": "large None"}
            said = f"no server lists the model {unlisted}; choose one of small, large, other with genrm_model"
            assert (said in caplog.text) == bool(caplog.text) == bool(unlisted)


@pytest.mark.slow
def test_groups_of_a_file_by_prompt_or_by_column_and_resumed_as_a_whole(tmp_path):
    prompts = [[{"role": "user", "content": text}] for text in "xyzx" * 2]
    rows = [sample(text, prompt=prompt) for text, prompt in zip(["a", "raise", "none", "b"] * 2, prompts)]
    data, calls = write_jsonl(tmp_path / "responses.jsonl", rows), tmp_path / "calls"
    config = score_file.Config(
        data=data,
        out=tmp_path / "scored.jsonl",
        reward_fn=f"{GROUPS}:notes_calls",
        reward_kwargs=json.dumps({"file": str(calls)}),
        num_workers=1,
        sync_processes=1,
        max_no_verdict_rate=0.4,
    )
    down = tmp_path / "calls.down"
    down.touch()
    with pytest.raises(RuntimeError, match="4 samples have no score"):
        score_file.run(config)
    assert sorted(calls.read_text().splitlines()) == ["a b a b", "none none", "raise raise"]
    down.unlink()
    calls.unlink()
    partial = tmp_path / "scored.jsonl.partial.jsonl"
    noted = [line for line in partial.read_text().splitlines(keepends=True) if not line.startswith("[3,")]
    partial.write_text("".join(noted))  # killed before the last line of a group was written
    score_file.run(dataclasses.replace(config, resume=True))
    assert sorted(calls.read_text().splitlines()) == ["a b a b", "none none", "raise raise"]
    scored = lines_of(config.out)
    assert [row["reward_score"] for row in scored] == [4.0, 2.0, 2.0, 4.0] * 2

    calls.unlink()
    for number, row in enumerate(rows):
        row["group"] = number // 4  # a column `group` in addition to the prompt
    write_jsonl(data, rows)
    score_file.run(config)
    assert sorted(calls.read_text().splitlines()) == ["a b"] * 2 + ["none"] * 2 + ["raise"] * 2
    calls.unlink()
    write_jsonl(data, [{name: row[name] for name in row if name != "prompt"} for row in rows])
    with pytest.raises(ValueError, match="row 0: the column 'prompt' is missing"):
        score_file.run(config)


def test_a_function_gets_the_prompt_as_in_training_and_the_file_keeps_it(tmp_path, monkeypatch):
    """A Parquet file has each key in all messages, with the value None where a message lacks it."""
    score_files_here(monkeypatch)
    asked = [{"role": "user", "content": [{"type": "text", "text": "1"}, {"type": "text", "text": "+0?"}]}]
    called = [{"role": "user", "content": "hi"}, {"role": "tool", "content": "4", "tool_call_id": "1"}]
    body = "def ask(data_source, solution_str, ground_truth, extra_info, prompt):\n"
    function = write_function(tmp_path, body + "    return {'score': 1.0, 'prompt': prompt}\n")

    def scored(path, out):
        config = score_file.Config(data=path, out=tmp_path / out, reward_fn=function)
        score_file.run(config)
        rows = lines_of(config.out)
        return [[row["prompt"], json.loads(row["reward_extra_info"])["prompt"]] for row in rows]

    data = write_jsonl(
        tmp_path / "responses.jsonl", [sample("one", prompt=asked), sample("two", prompt=called)]
    )
    joined = [{"role": "user", "content": "1+0?"}]
    assert scored(data, "scored.jsonl") == [[asked, joined], [called, called]]
    for name in ("responses.parquet", "RESPONSES.PARQUET"):
        table = tmp_path / name
        pq.write_table(pa.Table.from_pylist([sample("two", prompt=called)]), table)
        ((kept, seen),) = scored(table, "from_table.jsonl")
        assert seen == called and kept == pq.read_table(table)["prompt"].to_pylist()[0] != called
    score_file.run(score_file.Config(data=table, out=tmp_path / "scored.parquet", reward_fn=function))
    write_jsonl(data, [sample("one", prompt=called), sample("one", prompt="1+0?")])
    with pytest.raises(ValueError, match="responses.jsonl, row 1: prompt is '1.0.'; it must be a non-empty"):
        scored(data, "text.jsonl")


@pytest.mark.slow
def test_rows_without_some_columns_become_parquet(tmp_path, monkeypatch):
    score_files_here(monkeypatch)
    rows = [sample("one"), sample("none", extra="x")]
    data = tmp_path / "responses.parquet"
    pq.write_table(pa.Table.from_pylist([rows[0] | {"extra": None}, rows[1]]), data)
    config = score_file.Config(
        data=data,
        out=tmp_path / "scored.parquet",
        reward_fn=f"{FAULTS}:sync_fault",
        num_workers=1,
        max_no_verdict_rate=1.0,
    )
    score_file.run(config)
    written = pq.read_table(config.out).to_pylist()
    assert [row["reward_score"] for row in written] == [1.0, None]
    assert [row["extra"] for row in written] == [None, "x"]


def test_empty_cells_of_a_table_are_null_in_jsonl(tmp_path):
    """pandas writes them as NaN, which is not JSON."""
    row = sample("one") | {"extra_info": {"solve_rate": math.nan}, "0.1": 0.1, "big": 1 << 70}
    result = {"reward_score": 1.0, "status": "ok", "reward_extra_info": {}}
    score_file.write_rows([row], [result], tmp_path / "any.parquet", tmp_path / "scored.jsonl")
    written = json.loads((tmp_path / "scored.jsonl").read_text(), parse_constant=pytest.fail)
    assert written["extra_info"] == {"solve_rate": None} and written["reward_score"] == 1.0
    assert (written["0.1"], written["big"]) == (0.1, 1 << 70)


@pytest.mark.parametrize("written", ["", '{"genrm": [], "da'])
def test_a_file_without_a_complete_header_is_begun_again(tmp_path, monkeypatch, written):
    """The disk may be full at the first write."""
    score_files_here(monkeypatch)
    data = write_jsonl(tmp_path / "responses.jsonl", [sample("one")])
    config = score_file.Config(data=data, out=tmp_path / "scored.jsonl", reward_fn=f"{FAULTS}:sync_fault")
    partial = tmp_path / "scored.jsonl.partial.jsonl"
    for resume in (False, True):
        partial.write_text(written)
        config.out.unlink(missing_ok=True)
        score_file.run(dataclasses.replace(config, resume=resume))
        assert json.loads(config.out.read_text())["reward_score"] == 1.0 and not partial.exists()


def test_a_file_is_scored_by_one_run_at_a_time(tmp_path, monkeypatch):
    data = write_jsonl(tmp_path / "responses.jsonl", [sample("one")])
    config = score_file.Config(data=data, out=tmp_path / "scored.jsonl", reward_fn=f"{FAULTS}:sync_fault")
    config.resume = True

    def start_rewards(options, stack):
        with pytest.raises(
            ValueError, match=r"^--out: .*partial.jsonl: is in use by another run; wait until"
        ):
            score_file.run(config)  # as another process does
        return RewardsHere(options)

    monkeypatch.setattr(score_file, "start_rewards", start_rewards)
    score_file.run(config)
    assert json.loads(config.out.read_text())["reward_score"] == 1.0


def test_a_file_system_without_locks_is_no_obstacle(tmp_path, monkeypatch):
    def flock(*_):
        raise OSError(errno.ENOSYS, "Function not implemented")

    score_files_here(monkeypatch)
    monkeypatch.setattr("fcntl.flock", flock)
    data = write_jsonl(tmp_path / "responses.jsonl", [sample("one")])
    config = score_file.Config(data=data, out=tmp_path / "scored.jsonl", reward_fn=f"{FAULTS}:sync_fault")
    score_file.run(config)
    assert json.loads(config.out.read_text())["reward_score"] == 1.0


def test_resume_of_a_finished_file_says_so_and_stops(tmp_path, capsys):
    data = write_jsonl(tmp_path / "responses.jsonl", [sample("one")])
    config = score_file.Config(
        data=data,
        out=tmp_path / "scored.jsonl",
        reward_fn=f"{FAULTS}:sync_fault",
        num_workers=1,
    )
    write_jsonl(
        config.out, [sample("one") | {"reward_score": 0.5, "status": "ok", "reward_extra_info": "{}"}]
    )
    before = config.out.read_text()
    again = dataclasses.replace(config, resume=True)
    score_file.run(again)
    said = capsys.readouterr().out
    assert f"{config.out} already has a score for each response" in said and "scored 1" not in said
    assert config.out.read_text() == before
    write_jsonl(config.out, [json.loads(before) | {"reward_score": None, "status": "no_verdict"}])
    score_file.run(again)
    said = capsys.readouterr().out
    assert f"{config.out} is finished, but 1 of its 1 responses got no score; to score all responses" in said
    write_jsonl(config.out, [json.loads(before)])
    other = write_jsonl(tmp_path / "others.jsonl", [sample("two")])
    for changes, message in (
        ({"data": other}, "--resume: .*scored.jsonl has scores of other responses"),
        ({"reward_fn": f"{FAULTS}:nothing"}, "nothing"),
    ):
        with pytest.raises(ValueError, match=message):
            score_file.run(dataclasses.replace(again, **changes))
    assert config.out.read_text() == before


@pytest.mark.slow
def test_command_line_goes_on_after_ctrl_c_and_a_kill(tmp_path):
    rows = [sample("0.05", ground_truth=str(index)) for index in range(200)]
    data = write_jsonl(tmp_path / "responses.jsonl", rows)
    out, marks = tmp_path / "scored.jsonl", tmp_path / "marks"
    marks.mkdir()
    arguments = ["--data", data, "--out", out, "--reward-fn", f"{FAULTS}:with_marks"]
    arguments += ["--reward-kwargs", json.dumps({"folder": str(marks)})]
    arguments += ["--num-workers", 1, "--sync-processes", 1]
    command = [sys.executable, str(ROOT / "score_file.py"), *map(str, arguments)]
    partial = tmp_path / "scored.jsonl.partial.jsonl"
    running = subprocess.Popen(command, stderr=subprocess.PIPE, text=True, start_new_session=True)
    until(lambda: partial.exists() and partial.read_text().count("\n") > 3, 300)
    running.send_signal(signal.SIGINT)
    _, said = running.communicate(timeout=300)
    assert running.returncode == 130 and "Traceback" not in said
    assert "interrupted; pass --resume to continue" in said
    running = subprocess.Popen([*command, "--resume"], start_new_session=True)
    until(lambda: partial.read_text().count("\n") > 32, 300)  # with the headers of both starts
    os.kill(running.pid, signal.SIGKILL)
    running.wait()
    with partial.open("a") as file:
        file.write('[7, {"reward_sc')  # the kill truncated this line
    ended = command_line(*arguments, "--resume", "--reward-kwargs", json.dumps({"folder": str(tmp_path)}))
    assert ended.returncode == 2 and "belongs to a run with different" in ended.stderr
    ended = command_line(*arguments, "--resume")
    assert ended.returncode == 0, ended.stderr
    assert "resuming" in ended.stdout
    again = int(ended.stdout.split("scored ")[1].split()[0])
    assert 0 < again <= 170  # at least 30 results were on disk
    assert [json.loads(line)["reward_score"] for line in out.open()] == [float(index) for index in range(200)]
    assert not partial.exists()


CHAOS = '''
import os, random, sys, time

def by_index(data_source, solution_str, ground_truth, extra_info):
    """The score is the sample's own number, whatever else happens in the meantime."""
    index = extra_info["index"]
    if index % 7 == 1 and os.fork() == 0:
        return 1000.0  # the child comes back as well
    if index % 7 == 2:
        print("a line", index)
        os.write(1, b"0 [[[1000.0, {}, 'ok']], false]\\n")
    if index % 31 == 3 and not os.path.exists(f"{ground_truth}/{index}"):
        open(f"{ground_truth}/{index}", "w").close()
        os._exit(1)  # the grading process dies, once
    if index % 7 == 4:
        time.sleep(random.random() / 50)
    return {"score": float(index), "index": index}
'''


@pytest.mark.slow
def test_every_row_of_a_file_gets_its_own_score(tmp_path):
    """Returning children, noise, deaths and random pauses must not move a score to a different row."""
    (tmp_path / "chaos.py").write_text(CHAOS)
    rows = []
    for index in range(300):
        rows.append(
            {
                "data_source": "x",
                "prompt": [{"role": "user", "content": f"question {index}"}],
                "response": "answer",
                "reward_model": {"style": "rule", "ground_truth": str(tmp_path)},
                "extra_info": {"index": index, "split": "train"},
            }
        )
    (tmp_path / "responses.jsonl").write_text("\n".join(map(json.dumps, rows)))
    arguments = ["--data", tmp_path / "responses.jsonl", "--out", tmp_path / "scored.jsonl"]
    done = command_line(*arguments, "--reward-fn", f"{tmp_path}/chaos.py:by_index")
    assert done.returncode == 0, done.stderr
    scored = lines_of(tmp_path / "scored.jsonl")
    assert [row["reward_score"] for row in scored] == [float(index) for index in range(300)]
    assert [json.loads(row["reward_extra_info"])["index"] for row in scored] == list(range(300))
