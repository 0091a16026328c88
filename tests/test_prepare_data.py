"""prepare_data.py on real samples in tests/data, and on made-up rows for data sets that may not be copied."""

import csv
import json
import os
import re
import subprocess
import sys
from collections import Counter
from pathlib import Path

import huggingface_hub
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

import prepare_data
from command_line import cli
from prepare_data import SOURCES, Config, prepare, read_rows, serves, validate_row

DATA = Path(__file__).parent / "data"
REPO = Path(__file__).parent.parent


def read(name: str) -> list[dict]:
    return [json.loads(line) for line in (DATA / name).read_text().splitlines()]


def write_jsonl(path: Path, rows: list[dict]) -> None:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


def build(tasks: list[str], source_dir: Path, out_dir: Path, **settings) -> dict[str, list[dict]]:
    """Return {file name: rows} as read back from parquet. Checks that the printed counts are correct."""
    counts = prepare(Config(tasks=tasks, source_dir=source_dir, out_dir=out_dir, **settings))
    files = {path.name: pq.read_table(path).to_pylist() for path in out_dir.glob("*.parquet")}
    assert {name: len(rows) for name, rows in files.items()} == counts
    assert [
        path for path in out_dir.iterdir() if path.suffix != ".parquet"
    ] == []  # there is no incomplete file
    return files


@pytest.fixture(scope="module")
def real(tmp_path_factory) -> dict[str, list[dict]]:
    return build(["all"], DATA, tmp_path_factory.mktemp("data"))


# --- the real samples ---------------------------------------------------------------------------------------


def test_counts(real):
    assert {name: len(rows) for name, rows in real.items()} == {
        "gsm8k_train.parquet": 100,
        "gsm8k_test.parquet": 400,
        "math500_test.parquet": 500,
        "aime24_test.parquet": 30,
        "aime25_test.parquet": 30,
        "fapo_critic_train.parquet": 100,
    }


@pytest.mark.parametrize(
    ("file", "sample", "question", "answer", "split"),
    [
        (
            "gsm8k_train",
            "gsm8k_train_100",
            "question",
            lambda row: row["answer"].split("#### ")[1].replace(",", ""),
            "train",
        ),
        (
            "gsm8k_test",
            "gsm8k_test_400",
            "question",
            lambda row: row["answer"].split("#### ")[1].replace(",", ""),
            "test",
        ),
        ("math500_test", "math500", "problem", lambda row: row["answer"], "test"),
        ("aime24_test", "aime24", "problem", lambda row: row["answer"].lstrip("0"), "test"),
        ("aime25_test", "aime25", "problem", lambda row: row["answer"], "test"),
    ],
)
def test_math_rows(real, file, sample, question, answer, split):
    for index, (row, raw) in enumerate(zip(real[f"{file}.parquet"], read(f"{sample}.jsonl"), strict=True)):
        prompt = (
            raw[question].strip()
            + "\n\nPlease reason step by step, and put your final answer within \\boxed{}."
        )
        assert row == {
            "data_source": file.split("_")[0],
            "prompt": [{"role": "user", "content": prompt}],
            "ability": "Math",
            "reward_model": {"style": "rule", "ground_truth": answer(raw)},
            "extra_info": {"split": split, "index": index, "question": raw[question]},
        }


def test_one_prompt_letter_by_letter(real):
    assert real["aime25_test.parquet"][0]["prompt"][0]["content"] == (
        "Find the sum of all integer bases $b>9$ for which $17_b$ is a divisor of $97_b.$\n\n"
        "Please reason step by step, and put your final answer within \\boxed{}."
    )


def test_critic_rows_keep_their_prompts_and_labels(real):
    rows, raws = real["fapo_critic_train.parquet"], read("fapo_critic_100.jsonl")
    for index, (row, raw) in enumerate(zip(rows, raws, strict=True)):
        assert (
            row["prompt"] == raw["prompt"]
            and row["ability"] == "math_critic"
            and row["data_source"] == "fapo_critic"
        )
        assert row["reward_model"] == raw["reward_model"]
        question = row["extra_info"]["question"]
        assert question and f"[Math Problem]\n\n{question}\n\n[Ground Truth]" in raw["prompt"][0]["content"]
        added = {"index": index, "question": question, "subset": None, "final_answer_correct": True}
        assert row["extra_info"] == raw["extra_info"] | added
    assert Counter(row["reward_model"]["ground_truth"] == -1 for row in rows) == {True: 50, False: 50}


# --- made-up rows of the other data sets


def gpqa_rows(count: int) -> list[dict]:
    wrong = {f"Incorrect Answer {i}": f"wrong {i}\n" for i in (1, 2, 3)}
    return [
        {"Question": f"Question {i}?", "Correct Answer": " right ", **wrong, "Record ID": i}
        for i in range(count)
    ]


def test_gpqa(tmp_path):
    write_jsonl(tmp_path / "gpqa_diamond.jsonl", gpqa_rows(200))
    rows = build(["gpqa"], tmp_path, tmp_path / "a")["gpqa-diamond_test.parquet"]
    for i, row in enumerate(rows):
        letter = row["reward_model"]["ground_truth"]
        question, *choices, empty, ask = row["prompt"][0]["content"].split("\n")
        assert (question, empty) == (f"Question {i}?", "")
        # The judge also needs the choices.
        assert row["extra_info"]["question"] == "\n".join([question, *choices])
        assert (
            ask == "Please reason step by step, and put your final answer "
            "(only the choice letter) within \\boxed{}."
        )
        assert [choice[:3] for choice in choices] == ["A. ", "B. ", "C. ", "D. "]
        assert choices["ABCD".index(letter)] == f"{letter}. right"
        assert sorted(choice[3:] for choice in choices) == ["right", "wrong 1", "wrong 2", "wrong 3"]
        assert row["ability"] == "General" and row["data_source"] == "gpqa-diamond"
    assert all(count > 30 for count in Counter(row["reward_model"]["ground_truth"] for row in rows).values())

    # A second build gives the same rows.
    assert build(["gpqa"], tmp_path, tmp_path / "b")["gpqa-diamond_test.parquet"] == rows
    other = build(["gpqa"], tmp_path, tmp_path / "c", seed=1)["gpqa-diamond_test.parquet"]
    assert sum(a["prompt"] != b["prompt"] for a, b in zip(rows, other)) > 150
    (tmp_path / "half").mkdir()  # a row's order does not depend on earlier rows
    write_jsonl(tmp_path / "half" / "gpqa-diamond.jsonl", gpqa_rows(200)[100:])
    half = build(["gpqa"], tmp_path / "half", tmp_path / "d")["gpqa-diamond_test.parquet"]
    assert [row["prompt"] for row in half] == [row["prompt"] for row in rows[100:]]


def test_dapo(tmp_path):
    write_jsonl(
        tmp_path / "math-dapo.jsonl", [{"prompt": " What is 1+1? ", "solution": "2", "source_prompt": []}]
    )
    (row,) = build(["dapo"], tmp_path, tmp_path / "out")["math-dapo_train.parquet"]
    assert row["prompt"][0]["content"].startswith("What is 1+1?\n\nPlease reason step by step")
    assert row["reward_model"]["ground_truth"] == "2"
    assert row["extra_info"] == {"split": "train", "index": 0, "question": " What is 1+1? "}


def test_processbench(tmp_path):
    def raw(id, problem, steps, label, correct):
        return {
            "id": id,
            "generator": "g",
            "problem": problem,
            "steps": steps,
            "label": label,
            "final_answer_correct": correct,
        }

    rows = [
        raw("gsm8k-0", "P", ["one ", "so \\boxed{7}"], -1, True),
        raw("gsm8k-1", "P", ["one", "two", "so \\boxed{8}"], 1, False),
        raw("gsm8k-2", "Q", ["one", "so 9"], 0, True),
    ]
    (tmp_path / "processbench_gsm8k.json").write_text(json.dumps(rows))
    write_jsonl(tmp_path / "processbench_omnimath.jsonl", [raw("omnimath-0", "R", ["one"], 0, False)])
    files = build(["processbench"], tmp_path, tmp_path / "out")
    (bench,) = files.values()
    assert [row["reward_model"]["ground_truth"] for row in bench] == [-1, 1, 0, 0]
    assert [row["extra_info"]["subset"] for row in bench] == ["gsm8k", "gsm8k", "gsm8k", "omnimath"]
    assert [row["extra_info"]["total_steps"] for row in bench] == [2, 3, 2, 1]
    assert [row["extra_info"]["index"] for row in bench] == [0, 1, 2, 3]
    correct = [row["extra_info"]["final_answer_correct"] for row in bench]
    assert correct == [True, False, True, False]
    prompts = [row["prompt"][0]["content"] for row in bench]
    assert (
        "[Ground Truth]\n\n7\n\n[AI Solution]\n\n<paragraph_0>\none\n</paragraph_0>\n\n<paragraph_1>\n"
        in prompts[0]
    )
    # The answer comes from the problem's other solution.
    assert "[Ground Truth]\n\n7\n\n" in prompts[1] and "\\boxed{8}" in prompts[1]
    assert "Ground Truth" not in prompts[2] and "Ground Truth" not in prompts[3]


# --- files --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "served"),
    [
        ("gsm8k_train_2000.jsonl", {("gsm8k", "train")}),
        ("gsm8k_test.parquet", {("gsm8k", "test")}),
        ("gsm8k.jsonl", {("gsm8k", "train")}),
        ("aime24.jsonl", {("aime24", "test")}),
        ("aime25_test.csv", {("aime25", "test")}),
        ("fapo_critic_100.jsonl", {("fapo_critic", "train")}),
        ("fapo_critic_test.parquet", {("fapo_critic", "test")}),
        ("gpqa_diamond.csv", {("gpqa-diamond", "test")}),
        ("GPQA-Diamond.CSV", {("gpqa-diamond", "test")}),
        ("gsm8k-main-test.parquet", {("gsm8k", "test")}),
        ("gsm8k_train_without_test.jsonl", {("gsm8k", "train")}),
        ("gsm8k_tested.jsonl", {("gsm8k", "train")}),
        ("math500.jsonl", {("math500", "test")}),
        ("math5000.jsonl", set()),
        ("my_gsm8k.jsonl", set()),
        ("gsm8k.txt", set()),
        ("processbench_math.json", {("processbench", "test")}),
    ],
)
def test_which_source_a_file_serves(name, served):
    assert {(source.data_source, source.split) for source in SOURCES if serves(Path(name), source)} == served


@pytest.mark.parametrize("encoding", ["utf-8", "utf-8-sig"])  # spreadsheets write the second one
@pytest.mark.parametrize("format", ["parquet", "json", "jsonl", "CSV"])
def test_formats(tmp_path, format, encoding):
    rows = [{"problem": 'One,\n"two"\u2028?', "answer": "1"}, {"problem": "Zwölf?", "answer": "12"}]
    path = tmp_path / f"math500.{format}"
    if format == "parquet":
        pq.write_table(pa.Table.from_pylist(rows), path)
    elif format == "json":
        path.write_text(json.dumps(rows, indent=1), encoding=encoding)
    elif format == "jsonl":
        path.write_text(
            "".join(json.dumps(row, ensure_ascii=False) + "\n\n" for row in rows), encoding=encoding
        )
    else:
        with path.open("w", newline="", encoding=encoding) as file:
            writer = csv.DictWriter(file, ["problem", "answer"])
            writer.writeheader()
            writer.writerows(rows)
    built = build(["math500"], tmp_path, tmp_path / "out")["math500_test.parquet"]
    assert [row["extra_info"]["question"] for row in built] == [row["problem"] for row in rows]


def test_tasks_are_obeyed(tmp_path):
    files = build(["aime24", "aime25"], DATA, tmp_path)
    assert set(files) == {"aime24_test.parquet", "aime25_test.parquet"}


def test_files_of_another_split_are_not_put_into_training(tmp_path):
    others = ("gsm8k_validation", "gsm8k-dev", "gsm8k_eval_2")
    for name in ("gsm8k_train", "gsm8k_train_2", "gsm8k_test", *others):
        write_jsonl(tmp_path / f"{name}.jsonl", [{"question": name, "answer": "#### 1"}])
    files = build(["gsm8k"], tmp_path, tmp_path / "out")
    found = {name: [row["extra_info"]["question"] for row in rows] for name, rows in files.items()}
    assert found == {
        "gsm8k_train.parquet": ["gsm8k_train", "gsm8k_train_2"],
        "gsm8k_test.parquet": ["gsm8k_test"],
    }


def test_tilde_is_expanded(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    (tmp_path / "in").mkdir()
    write_jsonl(tmp_path / "in" / "math500.jsonl", [{"problem": "1?", "answer": "1"}])
    prepare(cli(Config, args=["--tasks", "math500", "--source-dir=~/in", "--out-dir", "~/out"]))
    assert (tmp_path / "out" / "math500_test.parquet").exists()


def test_hub(tmp_path, monkeypatch):
    """A function simulates the Hub.

    Check which repository and files are requested, and the message of a failure.
    """
    asked = []

    def fetch(repo, repo_type, allow_patterns):
        asked.append((repo, repo_type, allow_patterns))
        if repo == "Idavidrein/gpqa":
            raise OSError("401 gated")
        if repo != "openai/gsm8k":
            return str(tmp_path / "a snapshot without files")
        (tmp_path / "hub" / "main").mkdir(parents=True, exist_ok=True)
        for split in ("train", "test"):
            rows = read(f"gsm8k_{split}_{100 if split == 'train' else 400}.jsonl")
            pq.write_table(
                pa.Table.from_pylist(rows), tmp_path / "hub" / "main" / f"{split}-00000-of-00001.parquet"
            )
        return str(tmp_path / "hub")

    monkeypatch.setattr(huggingface_hub, "snapshot_download", fetch)
    assert prepare(Config(tasks=["gsm8k"], out_dir=tmp_path / "out")) == {
        "gsm8k_train.parquet": 100,
        "gsm8k_test.parquet": 400,
    }
    assert asked[0] == ("openai/gsm8k", "dataset", ["main/train-*.parquet"])
    with pytest.raises(OSError, match="HF_TOKEN.*--source-dir"):
        prepare(Config(tasks=["gpqa"], out_dir=tmp_path / "out"))
    # One of two splits is less than was requested.
    (tmp_path / "hub/main/test-00000-of-00001.parquet").unlink()
    monkeypatch.setattr(huggingface_hub, "snapshot_download", lambda *_, **options: str(tmp_path / "hub"))
    with pytest.raises(OSError, match=r"--tasks gsm8k: openai/gsm8k has no file that matches main/test"):
        prepare(Config(tasks=["gsm8k"], out_dir=tmp_path / "half"))
    assert (tmp_path / "half/gsm8k_train.parquet").is_file()
    monkeypatch.setattr(huggingface_hub, "snapshot_download", fetch)
    # --tasks all continues with the other data sets.
    with pytest.raises(OSError, match=r"gpqa: cannot download .*gpqa .*MATH-500 has no file that matches"):
        prepare(Config(tasks=["all"], out_dir=tmp_path / "all"))
    assert {path.name for path in (tmp_path / "all").iterdir()} == {
        "gsm8k_train.parquet",
        "gsm8k_test.parquet",
    }
    with pytest.raises(OSError, match="has no file that matches test.jsonl"):
        prepare(Config(tasks=["math500"], out_dir=tmp_path / "out"))


# --- messages about invalid input


def critic_row(truth=0, **extra) -> dict:
    """Return a raw row of FAPO-Critic with one paragraph."""
    prompt = [{"role": "user", "content": "<paragraph_0>\nx\n</paragraph_0>"}]
    about = {"style": "rule", "ground_truth": truth}
    return {"data_source": "x/math", "prompt": prompt, "reward_model": about, "extra_info": extra | {"a": 1}}


@pytest.mark.parametrize(
    ("file", "row", "message"),
    [
        (
            "math500.jsonl",
            {"query": "?", "answer": "1"},
            r"math500.jsonl, row 0: missing or empty column: problem or .* columns are query, answer",
        ),
        (
            "math500.jsonl",
            {"problem": "?", "answer": ""},
            r"math500.jsonl, row 0: missing or empty column: answer or .* columns are problem, answer",
        ),
        (  # messages where a text is expected
            "math500.jsonl",
            {"problem": [{"role": "user", "content": "?"}], "answer": "1"},
            r"math500.jsonl, row 0: column 'problem' is \[{'role.*; it must be a string",
        ),
        (
            "gsm8k_test.jsonl",
            {"question": "?", "answer": "so 5"},
            r"gsm8k_test.jsonl, row 0: column 'answer' ends in 'so 5'; it must end in '#### ANSWER'",
        ),
        (
            "aime24.jsonl",
            {"problem": "?", "answer": "1/2"},
            r"aime24.jsonl, row 0: column 'answer.*' is '1/2'",
        ),
        ("gpqa-diamond.jsonl", {"Question": "?", "Correct Answer": "1"}, "empty column: Incorrect Answer 1"),
        (
            "fapo_critic.jsonl",
            {"prompt": [{"role": "user", "content": "?"}]},
            r"critic.jsonl, row 0: missing or empty column: reward_model",
        ),
        (
            "fapo_critic.jsonl",
            {"prompt": [{}], "reward_model": {"ground_truth": 0}, "extra_info": {"index": 1}},
            r"critic.jsonl, row 0: missing or empty column: data_source",
        ),
        (
            "processbench.jsonl",
            {"problem": "?", "steps": "['a', 'b']", "label": 1, "id": "math-0", "final_answer_correct": True},
            r"processbench.jsonl, row 0: column 'steps' is .*must be a list",
        ),
        (
            "processbench.jsonl",
            {"problem": ["?"], "steps": ["a"], "label": 0, "id": "math-0", "final_answer_correct": True},
            r"processbench.jsonl, row 0: column 'problem' is \['\?'\]; it must be a string",
        ),
        (
            "processbench.jsonl",
            {"problem": "?", "steps": [None], "label": 0, "id": "math-0", "final_answer_correct": True},
            r"processbench.jsonl, row 0: column 'steps' is .*must be a list",
        ),
        (
            "processbench.jsonl",
            {"problem": "?", "steps": ["a"], "label": 1, "id": "math-0", "final_answer_correct": True},
            r"processbench.jsonl, row 0: reward_model.ground_truth is 1, .*total_steps is 1; .* must be",
        ),
        (
            "processbench.jsonl",
            {"problem": "?", "steps": ["a"], "label": 0.9, "id": "math-0", "final_answer_correct": True},
            r"processbench.jsonl, row 0: 0.9 is not a whole number",
        ),
        (
            "processbench.jsonl",
            {"problem": "?", "steps": ["a"], "label": -0.5, "id": "math-0", "final_answer_correct": True},
            r"processbench.jsonl, row 0: -0.5 is not a whole number",
        ),
        (
            "processbench.jsonl",
            {"problem": "?", "steps": ["a"], "label": 0, "id": "math-0", "final_answer_correct": "False"},
            r"processbench.jsonl, row 0: column 'final_answer_correct' is 'False'; it must be true or false",
        ),
        ("fapo_critic.jsonl", critic_row(truth=0.6), r"critic.jsonl, row 0: 0.6 is not a whole number"),
        ("fapo_critic.jsonl", critic_row(question_index="q-12"), r"critic.jsonl, row 0: .*convert 'q-12'"),
        ("fapo_critic.jsonl", critic_row(question_index=2**70), r"critic.jsonl, row 0: .*too large"),
        ("fapo_critic.jsonl", critic_row(question_index=True), r"critic.jsonl, row 0: .*got bool"),
        ("fapo_critic.jsonl", critic_row() | {"prompt": []}, r"critic.jsonl, row 0: "),
        ("fapo_critic.jsonl", critic_row() | {"data_source": 7}, r"critic.jsonl, row 0: "),
        (
            "math500.jsonl",
            {"problem": "half \ud83d", "answer": "1"},
            r"math500.jsonl, row 0: .*'\\ud83d'.*surrogates not allowed",
        ),
    ],
)
def test_bad_rows(tmp_path, file, row, message):
    write_jsonl(tmp_path / file, [row])
    with pytest.raises(ValueError, match=message):
        prepare(Config(tasks=["all"], source_dir=tmp_path, out_dir=tmp_path / "out"))
    assert list((tmp_path / "out").glob("*.parquet")) == []


WORKED = "We add both numbers.\n\nSo it is \\boxed{2}. " * 20


@pytest.mark.parametrize(
    "columns",
    [
        {"problem": "1+1?", "answer": "2", "solution": WORKED},  # DeepScaleR, MinervaMath
        {"question": "1+1?", "final_answer": 2, "solution": [WORKED]},  # OlympiadBench, its list unpacked
        {"Question": "1+1?", "expected_answer": " 2 ", "generated_solution": WORKED},
        {"problem": "1+1?", "Answer": 2, "solution": WORKED},
        {"prompt": "1+1?", "solution": "2"},  # DAPO on the Hub
    ],
)
@pytest.mark.parametrize("over_lines", [None, 2])
def test_the_answer_is_taken_and_not_the_worked_solution(tmp_path, columns, over_lines):
    """This also holds for objects that span several lines."""
    text = "\n".join([json.dumps(columns, indent=over_lines)] * 3)
    (tmp_path / "math-dapo.json").write_text(text)
    rows = build(["dapo"], tmp_path, tmp_path / "out")["math-dapo_train.parquet"]
    assert [row["reward_model"]["ground_truth"] for row in rows] == ["2"] * 3
    assert {row["extra_info"]["question"] for row in rows} == {"1+1?"}


def test_small_and_large_numbers_are_written_out(tmp_path):
    values = [0.00005, 1e16, 0.5, 7]
    write_jsonl(tmp_path / "math-dapo.jsonl", [{"problem": "1+1?", "answer": value} for value in values])
    rows = build(["dapo"], tmp_path, tmp_path / "out")["math-dapo_train.parquet"]
    truths = [row["reward_model"]["ground_truth"] for row in rows]
    assert [float(truth) for truth in truths] == values and "e" not in "".join(truths)


@pytest.mark.parametrize(
    ("columns", "message"),
    [
        ({"answer": ["2"]}, r"is \['2'\]; it must be a string or a number"),
        ({"final_answer": ["2", "3"]}, r"is \['2', '3'\]; it must be a string or a number"),
        ({"answer": {"value": 2}}, "it must be a string or a number"),
        ({"answer": True}, "is True; it must be a string or a number"),
        ({"answer": float("inf")}, "is inf; it must be a string or a number"),
        ({"answer": float("-inf")}, "is -inf; it must be a string or a number"),
        ({"answer": float("nan")}, "missing or empty column: answer or "),
        ({"answer": " \n"}, "missing or empty column: answer or "),
        ({"answer": None, "solution": "so 2"}, "missing or empty column: answer or "),
        ({"answer": "9" * 293}, "has 293 characters, but only the last 300"),
        ({"solution": WORKED}, "is a worked solution"),
        ({"solution": "So it is $\\boxed{2}$."}, "is a worked solution"),
        ({"solution": "We add. " * 40}, "characters, but only the last 300"),
    ],
)
def test_a_truth_that_is_not_one_answer_is_named(tmp_path, columns, message):
    rows = [{"problem": "1+1?", "answer": "9" * 292}, {"problem": "1+1?"} | columns]
    write_jsonl(tmp_path / "math-dapo.jsonl", rows)
    with pytest.raises(ValueError, match=rf"math-dapo.jsonl, row 1: .*{message}"):
        prepare(Config(tasks=["dapo"], source_dir=tmp_path, out_dir=tmp_path / "out"))
    assert list((tmp_path / "out").iterdir()) == []


def test_rows_whose_answer_says_that_there_is_none_are_left_out(tmp_path, capsys):
    words = ["proof", "Proof.", "notfound", "not found", "N/A", "n/a", "\\text{None}", "?"]
    words += ["no_answer_extracted", "\\boxed{\\text{ none }}"]
    answers = ["2", *words, "\\text{no solution}", "-1", "Na"]
    write_jsonl(tmp_path / "math-dapo.jsonl", [{"problem": "1+1?", "answer": answer} for answer in answers])
    prepare(Config(tasks=["dapo"], source_dir=tmp_path, out_dir=tmp_path / "out"))
    rows = pq.read_table(tmp_path / "out" / "math-dapo_train.parquet").to_pylist()
    truths = [row["reward_model"]["ground_truth"] for row in rows]
    assert truths == ["2", "\\text{no solution}", "-1", "Na"]
    assert [row["extra_info"]["index"] for row in rows] == [0, 1, 2, 3]
    first = f"the first: {tmp_path}/math-dapo.jsonl, row 1)"
    assert f"left out {len(words)} rows" in (said := capsys.readouterr().out) and first in said
    write_jsonl(tmp_path / "math-dapo.jsonl", [{"problem": "1+1?", "answer": "proof"}])
    with pytest.raises(ValueError, match="row 0: this row and all others have no answer"):
        prepare(Config(tasks=["dapo"], source_dir=tmp_path, out_dir=tmp_path / "none"))


def test_a_missing_package_is_named_in_one_line(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "reasoning_gym", None)
    message = "^--tasks reasoning_gym:gcd: .*reasoning_gym.*; run pip install -r requirements-extra.txt$"
    with pytest.raises(OSError, match=message):
        prepare(Config(tasks=["reasoning_gym:gcd"], out_dir=tmp_path))


def test_nothing_after_the_mark_of_gsm8k_is_no_answer(tmp_path):
    write_jsonl(tmp_path / "gsm8k.jsonl", [{"question": "1+1?", "answer": "It is two. #### "}])
    with pytest.raises(ValueError, match="row 0: column 'answer' ends in 'It is two. ####'; it must end in"):
        prepare(Config(tasks=["gsm8k"], source_dir=tmp_path, out_dir=tmp_path / "out"))


def test_an_object_over_several_lines_that_is_torn_is_named(tmp_path):
    (tmp_path / "a.json").write_text('{\n "a": 1\n}\n{\n "a": \n}\n')
    with pytest.raises(ValueError, match="a.json, object 1: cannot be read as a .json file"):
        read_rows(tmp_path / "a.json")


def test_files_that_are_not_what_they_say(tmp_path):
    (tmp_path / "math500.jsonl").write_text('{"problem": "?", \n')
    with pytest.raises(ValueError, match="math500.jsonl"):
        prepare(Config(tasks=["math500"], source_dir=tmp_path, out_dir=tmp_path / "out"))
    (tmp_path / "math500.jsonl").unlink()
    (tmp_path / "math500.csv").write_text("problem,answer\n" + "x" * 140_000 + ",1\n")
    with pytest.raises(ValueError, match="math500.csv: cannot be read as a .csv file: field larger"):
        prepare(Config(tasks=["math500"], source_dir=tmp_path, out_dir=tmp_path / "out"))
    (tmp_path / "math500.csv").write_text("")
    with pytest.raises(ValueError, match="math500.csv: the file has no rows"):
        prepare(Config(tasks=["math500"], source_dir=tmp_path, out_dir=tmp_path / "out"))


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        ("a.jsonl", '{"a": 1}\n\n{"a": \n', "a.jsonl, line 3: cannot be read as a .jsonl file"),
        ("a.jsonl", "5\n", "a.jsonl, line 1: cannot be read as a .jsonl file"),
        ("a.json", "[1", "a.json: cannot be read as a .json file"),
        ("a.json", "[" * 100_000, "a.json: cannot be read as a .json file"),
        ("a.parquet", "PAR1", "a.parquet: cannot be read as a .parquet file"),
        (
            "a.csv",
            "a,b\n1,2\nSo, what?,2\n",
            "a.csv, row 1: .* it has more cells than the header; quote texts",
        ),
        ("a.txt", "", "a.txt: the name must end in .parquet, .jsonl"),
        ("a.jsonl", "\n", "a.jsonl: the file has no rows"),
        (
            "a.jsonl",
            '{"reward_model": {}}',
            "a.jsonl, row 0: the column 'data_source' is missing; the row has only reward_model",
        ),
        (
            "a.jsonl",
            '{"data_source": "x", "reward_model": "5"}',
            "a.jsonl, row 0: reward_model is '5'; it needs a ground_truth",
        ),
        (
            "a.jsonl",
            '{"data_source": "x", "reward_model": {"ground_truth": null}}',
            "a.jsonl, row 0: reward_model is {'ground_truth': None}",
        ),
        (
            "a.jsonl",
            '{"data_source": "x", "reward_model": {"ground_truth": NaN}}',
            "a.jsonl, row 0: reward_model is {'ground_truth': nan}; it needs a ground_truth",
        ),
    ],
)
def test_what_is_wrong_with_a_file_of_rows(tmp_path, name, text, message):
    (tmp_path / name).write_text(text)
    with pytest.raises(ValueError, match=message):
        read_rows(tmp_path / name, ["data_source", "reward_model"])
    with pytest.raises(ValueError, match="nowhere.jsonl: the file does not exist"):
        read_rows(tmp_path / "nowhere.jsonl")


@pytest.mark.parametrize("column", ["data_source", "extra_info", "reward_model"])
def test_an_error_shows_only_the_beginning_of_a_long_value(tmp_path, column):
    row = {"data_source": "code", "extra_info": {}, "reward_model": {"ground_truth": "1"}}
    (tmp_path / "a.jsonl").write_text(json.dumps(row | {column: ["x" * 9999]}))
    with pytest.raises(ValueError, match=f"row 0: {column} is .'xxx") as caught:
        read_rows(tmp_path / "a.jsonl", ["data_source"])
    assert len(str(caught.value).removeprefix(str(tmp_path))) < 200


def test_the_row_of_the_docs_is_one(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (code,) = re.findall(r"```python\n(.*?)```", (REPO / "docs" / "data.md").read_text(), re.S)
    exec(compile(code, "docs/data.md", "exec"), {})
    (row,) = read_rows(tmp_path / "my_train.jsonl", ["data_source", "prompt", "reward_model", "extra_info"])
    validate_row(row, "docs")
    assert row["prompt"][0]["content"].endswith("within \\boxed{}.")


def validate_rows(rows: list[dict], source: str) -> None:
    for number, row in enumerate(rows):
        validate_row(row, f"{source}, row {number}")


def edited(row: dict, field: str, value: object) -> dict:
    row = json.loads(json.dumps(row))
    *parents, last = field.split(".")
    target = row
    for parent in parents:
        target = target[parent][0] if isinstance(target[parent], list) else target[parent]
    target[last] = value
    return row


@pytest.mark.parametrize(
    ("file", "field", "value"),
    [
        ("fapo_critic_train", "reward_model.ground_truth", "1"),
        ("fapo_critic_train", "reward_model.ground_truth", -2),
        ("fapo_critic_train", "reward_model.ground_truth", 10**6),
        ("fapo_critic_train", "extra_info.total_steps", None),
        ("fapo_critic_train", "extra_info.total_steps", 0),
    ],
)
def test_validate_rows(real, file, field, value):
    row = real[f"{file}.parquet"][0]
    validate_rows([row], "s")
    with pytest.raises(ValueError, match=r"^s, row 1: reward_model.ground_truth is .*total_steps.*must be"):
        validate_rows([row, edited(row, field, value)], "s")


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (
            {"tasks": ["gpqa"]},
            r"--source-dir .* no file for gpqa-diamond \(split test\); add one, such as gpqa-.*_test.jsonl$",
        ),
        (
            {"tasks": ["aime24"], "source_dir": Path("/nowhere")},
            "--source-dir /nowhere: must be an existing directory",
        ),
        (
            {"tasks": ["aime24"], "out_dir": Path(__file__)},
            f"--out-dir {__file__}: File exists; pass another directory",
        ),
        (
            {"tasks": ["toy", "critic"]},
            "--tasks: toy and critic .in all. write files of the same name; use two --out-dirs",
        ),
        ({"tasks": []}, "--tasks: there is nothing to convert; name a task"),
        ({"tasks": ["all"], "source_dir": REPO / "docs"}, "--tasks: there is nothing to convert; .*add its"),
    ],
)
def test_bad_settings(tmp_path, settings, message):
    with pytest.raises((ValueError, OSError), match=message):
        prepare(Config(**({"source_dir": DATA, "out_dir": tmp_path} | settings)))


def test_all_skips_no_file_that_is_damaged_and_none_that_cannot_be_written(tmp_path):
    """Only missing files are skipped.

    For a damaged page, pyarrow raises an error that is not a ValueError.
    """
    rows = [{"problem": f"{number}?", "answer": f"{number}"} for number in range(1000)]
    pq.write_table(pa.Table.from_pylist(rows), tmp_path / "math500.parquet")
    whole = (tmp_path / "math500.parquet").read_bytes()
    (tmp_path / "math500.parquet").write_bytes(whole[:40] + b"\xff" * 40 + whole[80:])
    with pytest.raises(ValueError, match=r"math500.parquet: cannot be read as a .parquet file: Corrupt"):
        prepare(Config(tasks=["all"], source_dir=tmp_path, out_dir=tmp_path / "out"))
    (tmp_path / "math500.parquet").write_bytes(whole)
    (tmp_path / "out/math500_test.parquet").mkdir()
    with pytest.raises(OSError, match="math500_test"):
        prepare(Config(tasks=["all"], source_dir=tmp_path, out_dir=tmp_path / "out"))


def test_a_source_file_is_not_overwritten(tmp_path, real):
    pq.write_table(pa.Table.from_pylist(read("aime25.jsonl")), tmp_path / "aime25_test.parquet")
    with pytest.raises(ValueError, match="--out-dir"):
        prepare(Config(tasks=["aime25"], source_dir=tmp_path, out_dir=tmp_path))


def test_a_replaced_file_of_another_size_is_reported(tmp_path, capsys):
    settings = dict(tasks=["gsm8k"], source_dir=tmp_path, out_dir=tmp_path / "out")
    said = []
    for count in (3, 2, 2):
        rows = [{"question": f"{number}+1?", "answer": f"#### {number + 1}"} for number in range(count)]
        write_jsonl(tmp_path / "gsm8k.jsonl", rows)
        prepare(Config(**settings))
        said.append(capsys.readouterr().out)
    assert "gsm8k_train.parquet: 2 rows (replaces 3 rows) from gsm8k.jsonl" in said[1]
    assert "replaces" not in said[0] + said[2]
    (tmp_path / "out/gsm8k_train.parquet").write_text("no parquet")
    prepare(Config(**settings))


def test_no_command_of_the_page_overwrites_the_file_of_another():
    block = re.search("```bash\n(.*?)```", (REPO / "docs/data.md").read_text(), re.S)[1]
    written = Counter()
    for tasks, folder in re.findall(r"--tasks (.*?) --(?:source-dir \S+ --)?out-dir (\S+)", block):
        named = [task for task in tasks.split() if task in [*(source.task for source in SOURCES), "all"]]
        for source in SOURCES:
            if {source.task, "all"} & set(named):
                written[folder, source.data_source, source.split] += 1
    assert len(written) > len(SOURCES) and set(written.values()) == {1}


@pytest.mark.slow
def test_command_line(tmp_path):
    def run(*arguments):
        command = [sys.executable, str(REPO / "prepare_data.py"), *arguments]
        return subprocess.run(command, capture_output=True, text=True, timeout=120)

    result = run("--tasks", "aime24", "math500", "--out-dir", str(tmp_path), "--source-dir", str(DATA))
    assert result.returncode == 0, result.stderr
    assert (
        "math500_test.parquet: 500 rows from math500.jsonl" in result.stdout
        and '"data_source": "aime24"' in result.stdout
    )
    result = run("--tasks", "gpqa", "--out-dir", str(tmp_path), "--source-dir", str(DATA))
    assert (
        result.returncode == 2
        and result.stderr.startswith("error: --source-dir ")
        and result.stderr.count("\n") == 1
    )
    assert run("--tasks", "nonsense").returncode == 2


def test_nothing_large_is_loaded_before_it_is_needed():
    code = (
        "import sys, prepare_data; "
        "sys.exit(not {'torch', 'transformers', 'matplotlib', 'toy'}.isdisjoint(sys.modules))"
    )
    assert subprocess.run([sys.executable, "-c", code], cwd=REPO).returncode == 0


def test_every_task_has_a_source():
    tasks = set(prepare_data.Task.__args__)
    assert tasks == {source.task for source in SOURCES} | {"toy", "all"}


def test_a_file_that_two_processes_write_at_the_same_time_is_complete(tmp_path, monkeypatch):
    """Two recipes that start together on a fresh checkout do this. Neither leaves anything behind."""
    write = pq.write_table
    out, rows = tmp_path / "toy_train.parquet", [{"answer": "7"}]

    def write_table(*given, **options):
        write(*given, **options)
        with monkeypatch.context() as another_process:
            another_process.setattr(os, "getpid", lambda: 7)
            another_process.setattr(pq, "write_table", write)
            prepare_data.write_table(out, rows)

    def fails(table, path, **options):
        path.write_text("half")
        raise OSError("No space left on device")

    monkeypatch.setattr(pq, "write_table", write_table)
    prepare_data.write_table(out, rows)
    monkeypatch.setattr(pq, "write_table", fails)
    with pytest.raises(OSError, match="No space left"):
        prepare_data.write_table(out, rows)
    assert pq.read_table(out).to_pylist() == rows and list(tmp_path.iterdir()) == [out]


def test_files_consist_of_small_parts(tmp_path):
    """pyarrow writes 2 GiB of nested texts as one part, but cannot read it."""
    rows = [{"prompt": [{"content": str(number)}]} for number in range(2500)]
    prepare_data.write_table(tmp_path / "rows.parquet", rows)
    assert pq.ParquetFile(tmp_path / "rows.parquet").num_row_groups == 3
    assert prepare_data.read_rows(tmp_path / "rows.parquet") == rows
