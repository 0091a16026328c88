"""Tasks of reasoning-gym: rows, the tasks' verifiers, rejected tasks, and a second attempt."""

import contextlib
import inspect
import io
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pyarrow.parquet as pq
import pytest

import prepare_data
import score_file
from played import lines_of, score_files_here
from recipes import gym_tasks as tasks
from test_trajectory import rolled_out
from policy import Sample

pytest.importorskip("reasoning_gym")
ROOT = Path(__file__).resolve().parent.parent


@pytest.fixture(scope="module")
def sums():
    """Return the rows of chain_sum with seed 1. The first problem is 4 - 1 - 7, and the second is 1 + 5."""
    splits = tasks.make_rows("chain_sum", {"seed": 1, "size": 40})
    return {row["extra_info"]["index"]: row for rows in splits.values() for row in rows}


def scored(row, text):
    truth = row["reward_model"]["ground_truth"]
    return tasks.compute_score(row["data_source"], text, truth, row["extra_info"])


def prepared(tmp_path, *names, **options):
    counts = prepare_data.prepare(prepare_data.Config(list(names), tmp_path, **options))
    return {name: pq.read_table(tmp_path / name).to_pylist() for name in counts}


def test_rows_name_their_task_seed_index_and_settings(tmp_path):
    files = prepared(tmp_path, 'reasoning_gym:chain_sum:{"size": 60, "max_digits": 1}', seed=7)
    assert list(files) == ["reasoning_gym_chain_sum_train.parquet", "reasoning_gym_chain_sum_test.parquet"]
    rows = [row for file in files.values() for row in file]
    assert sorted(row["extra_info"]["index"] for row in rows) == list(range(60))
    for row in rows:
        about = row["extra_info"]
        assert json.loads(about["settings"]) == {"size": 60, "seed": 7, "max_digits": 1}
        assert (about["task"], row["data_source"]) == ("chain_sum", "reasoning_gym_chain_sum")
        assert row["prompt"][0]["content"].startswith(about["question"])
        assert "\\boxed{}" in row["prompt"][0]["content"]
        sum_of_digits = re.fullmatch(r"State the final .*: ([\d +-]+) =", about["question"])[1]
        total = sum(int(term) for term in re.findall(r"-?\d+", sum_of_digits.replace(" ", "")))
        assert row["reward_model"]["ground_truth"] == str(total)
        assert scored(row, f"So \\boxed{{{total}}}.")["score"] == 1.0


def test_settings_that_fail_at_the_first_problem_are_named(tmp_path):
    with pytest.raises(ValueError, match=r"^--tasks reasoning_gym:chain_sum:.* does not accept the settings"):
        prepared(tmp_path, 'reasoning_gym:chain_sum:{"seed": "x"}')
    with pytest.raises(ValueError, match=r"^--tasks reasoning_gym:chain_sum:.* does not accept .*seed"):
        prepared(tmp_path, 'reasoning_gym:chain_sum:{"seed": null}')
    assert list(tmp_path.iterdir()) == []


def test_no_question_is_in_both_splits_and_held_out_questions_differ():
    """Two one-digit terms allow at most 200 questions, so each occurs many times."""
    settings = {"size": 2000, "seed": 3, "max_terms": 2, "max_digits": 1}
    splits = tasks.make_rows("chain_sum", settings)
    questions = {}
    for split, rows in splits.items():
        questions[split] = [row["extra_info"]["question"] for row in rows]
    assert not set(questions["train"]) & set(questions["test"])
    assert len(questions["test"]) == len(set(questions["test"])) > 10
    assert len(questions["train"]) > 1500


@pytest.mark.parametrize(
    ("text", "score"),
    [
        ("The answer is \\boxed{-4}.", 1.0),
        ("\\boxed{ -4.0 }", 1.0),  # the verifier compares decimals
        ("\\boxed{5}, no: \\boxed{-4}", 1.0),
        ("<answer>5</answer> <answer>-4</answer>", 1.0),
        ("<answer>-4</answer> \\boxed{5}", 0.0),  # a box takes precedence
        ("\\boxed{so -4 it is}", 2 / 11),  # the verifier's partial credit: fraction of correct characters
        ("\\boxed{5}", 0.0),
        ("\\boxed{-4", 0.0),
        ("-4", 0.0),
        ("", 0.0),
    ],
)
def test_the_tasks_own_verifier_scores(sums, text, score):
    result = scored(sums[0], text)
    assert result["score"] == pytest.approx(score)
    assert result["acc"] is (score == 1.0)
    assert result["unreadable"] is False


def test_feedback_cannot_hide_the_policys_answer(sums):
    """The policy answers in tags, and a box in the text between its attempts is not its answer."""
    turns = [
        {"who": "policy", "text": "It is 5."},
        {"who": "user", "text": "There is no answer in a \\boxed{}. The number was 6."},
        {"who": "policy", "text": "<answer>-4</answer>"},
    ]
    text = "".join(turn["text"] for turn in turns)
    about = ("x", text, "-4", sums[0]["extra_info"])
    assert tasks.compute_score(*about, turns=turns)["score"] == 1.0
    turns[2]["text"] = "Yes."
    shaped = tasks.compute_score_shaped(*about, turns=turns)
    assert (shaped["score"], shaped["pred"], shaped["last_is_right"]) == (0.0, "[INVALID]", False)


def test_an_answer_that_the_verifier_cannot_read_scores_zero_and_is_counted():
    row = tasks.make_rows("prime_factorization", {"seed": 1, "size": 20})["train"][0]
    assert scored(row, "\\boxed{two times three}") == {
        "score": 0.0,
        "acc": False,
        "pred": "two times three",
        "unreadable": True,
    }
    assert scored(row, f"\\boxed{{{row['reward_model']['ground_truth']}}}")["score"] == 1.0


def test_a_row_of_another_version_is_an_error_and_no_score(sums):
    row = sums[0] | {"extra_info": sums[0]["extra_info"] | {"question": "What else?"}}
    with pytest.raises(ValueError, match="differs from what the installed version of reasoning-gym"):
        scored(row, "\\boxed{-4}")


def test_tasks_that_evaluate_the_answer_are_rejected():
    """Check all tasks of the installed package, so that a new version cannot silently add one."""
    from reasoning_gym.factory import DATASETS

    found = set()
    for name, (dataset, _) in DATASETS.items():
        verifier = inspect.getsource(dataset.score_answer)
        if re.search(r"\b(eval|exec|parse_expr|sympify|literal_eval)\((answer|\w*\.?answer)\b", verifier):
            found.add(name)
    assert found == {name for name, why in tasks.REJECTED.items() if why.startswith(tasks.EVALUATES)}
    row = {"data_source": "x", "reward_model": {"ground_truth": ""}}
    row["extra_info"] = {"task": "n_queens", "settings": "{}", "index": 0, "question": "?"}
    with pytest.raises(ValueError, match="n_queens is not supported: its verifier evaluates"):
        scored(row, "\\boxed{__import__('os').abort()}")


@pytest.mark.parametrize(
    ("name", "why"),
    [
        ("game_of_life_halting", "its verifier accepts every answer"),
        ("rubiks_cube", "its verifier hangs on short answers such as D9999999"),
        ("complex_arithmetic", "its verifier accepts the answer nan"),
        ("propositional_logic", "its premises may contradict each other, and then every conclusion is right"),
    ],
)
def test_tasks_whose_verifier_accepts_everything_or_hangs_are_rejected(name, why):
    with pytest.raises(ValueError, match=f"{name} is not supported: {why}"):
        tasks.make_rows(name, {"seed": 1, "size": 20})


def test_the_page_says_how_many_tasks_are_supported():
    from reasoning_gym.factory import DATASETS

    page = (ROOT / "docs/data.md").read_text()
    count = len(set(DATASETS) - set(tasks.REJECTED))
    assert f"{count} of these types are supported" in page and f"one of {count} generated tasks" in page


@pytest.mark.slow
def test_no_supported_verifier_accepts_every_answer():
    from reasoning_gym.factory import DATASETS

    found = []
    for name in sorted(set(DATASETS) - set(tasks.REJECTED)):
        about = {"task": name, "settings": '{"seed": 1, "size": 20}', "index": 0}
        about["question"] = tasks.load_task(name, about["settings"])[0]["question"]
        for answer in ("?", "nan"):
            if tasks.compute_score(name, f"\\boxed{{{answer}}}", "", about)["acc"]:
                found.append((name, answer))
    assert not found


@pytest.mark.slow
def test_what_is_offered_is_the_same_in_every_process():
    """Sets and hashes of strings differ between processes, but a worker has to generate the same problem as
    the trainer.
    """
    code = (
        "import sys, zlib; from recipes import gym_tasks as tasks;"
        "from reasoning_gym.factory import DATASETS\n"
        "for name in sorted(set(DATASETS) - set(tasks.REJECTED)):\n"
        '    made = tasks.load_task(name, \'{"seed": 1, "size": 20}\')\n'
        "    texts = [made[index]['question'] + str(made[index]['answer']) for index in (0, 1, 7, 10)]\n"
        "    print(name, zlib.crc32(str(texts).encode()))"
    )
    seed = "2" if os.environ.get("PYTHONHASHSEED") == "1" else "1"
    environment = os.environ | {"PYTHONHASHSEED": seed}
    there = subprocess.check_output([sys.executable, "-c", code], cwd=ROOT, env=environment, text=True)
    with contextlib.redirect_stdout(io.StringIO()) as here:
        exec(code, {})
    assert here.getvalue() == there and there.count("\n") > 80


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("reasoning_gym:no_such", "--tasks reasoning_gym:no_such: reasoning-gym has no task 'no_such'"),
        ('reasoning_gym:chain_sum:{"max_terms": 1}', "max_terms must be >= min_terms"),
        ('reasoning_gym:chain_sum:{"terms": 1}', "unexpected keyword argument 'terms'"),
        ("reasoning_gym:chain_sum:{", "--tasks reasoning_gym:chain_sum:{: { is not a JSON object .*; cor"),
        ("reasoning_gym:chain_sum:[3]", r"--tasks .*:chain_sum:\[3\]: \[3\] is not a JSON object"),
        ('reasoning_gym:chain_sum:{"size": 1}', "no .* rows; pass a larger size"),
        ("reasoning_gym:composite", "composite is not supported"),
        ("reasoning_gym", "--tasks reasoning_gym: unknown task; choose from toy, .*, reasoning_gym:NAME"),
    ],
)
def test_a_task_that_cannot_be_made_is_one_line_and_leaves_no_file(tmp_path, name, message):
    with pytest.raises(ValueError, match=message) as error:
        prepared(tmp_path, name)
    assert "\n" not in str(error.value)
    assert not list(tmp_path.iterdir())


def test_a_task_cannot_be_given_twice(tmp_path):
    message = "^--tasks reasoning_gym:gcd: occurs twice; .* use a separate --out-dir"
    with pytest.raises(ValueError, match=message):
        prepared(tmp_path, "reasoning_gym:gcd", 'reasoning_gym:gcd:{"size": 30}')


@pytest.mark.parametrize(("said", "turns"), [("\\boxed{-4}", 1), ("\\boxed{5}", 3), ("5", 3)])
def test_the_policy_answers_again_unless_the_verifier_is_content(sums, said, turns, model, tokenizer):
    """The model is untrained, so the test provides its first answer."""

    async def with_first_answer(trajectory, data_source, ground_truth, extra_info):
        generate = trajectory.generate

        async def say(**options):
            await generate(max_tokens=2)
            trajectory.generate = generate
            return said

        trajectory.generate = say
        await tasks.second_attempt(trajectory, data_source, ground_truth, extra_info)

    groups = [[Sample(sums[0], [5, 6, 7])]]
    sample = rolled_out(with_first_answer, model, tokenizer, groups, length=200, eos_ids=())[0]
    assert not sample.failure
    assert len(sample.turns) == turns
    if turns == 3:
        asked = sample.turns[1]["text"]
        assert ("gives this answer 0.00 of 1" in asked) is (said != "5")
        assert ("There is no answer" in asked) is (said == "5")


def test_a_file_of_responses_is_scored(sums, tmp_path, monkeypatch):
    lines = []
    for index, box in ((0, -4), (1, 5)):  # 4 - 1 - 7 and 1 + 5
        lines.append(json.dumps(sums[index] | {"response": f"\\boxed{{{box}}}"}))
    (tmp_path / "responses.jsonl").write_text("\n".join(lines))
    score_files_here(monkeypatch)
    function = f"{ROOT}/recipes/gym_tasks.py:compute_score"
    paths = dict(data=tmp_path / "responses.jsonl", out=tmp_path / "out.jsonl")
    score_file.run(score_file.Config(reward_fn=function, **paths))
    out = lines_of(tmp_path / "out.jsonl")
    assert [(row["status"], row["reward_score"]) for row in out] == [("ok", 1.0), ("ok", 0.0)]
