"""toy/: problems, the oracle on hand-written texts, simulated solvers and critics, rows, report."""

import asyncio
import json
import random
import re
import sys
from pathlib import Path

import pyarrow.parquet as pq
import pytest
import torch
import tyro
from tokenizers import Tokenizer, decoders
from transformers import AutoModelForCausalLM, AutoTokenizer

import forked
import compute_score
import prepare_data
import run_folder
from policy import Sample
from rollout import rollout_hf
from toy import report, shop_world, toy_world, warm_start
from toy.toy_world import (
    REMAINDER,
    TOTAL,
    Problem,
    Slips,
    first_wrong_paragraph,
    write_critique,
    write_solution,
)

BEN = Problem("Ben", "eggs", 65, (9, -8, 3), REMAINDER)  # 74, 66 (with a borrow), 69
QUESTION = "Ben has 65 eggs, gets 9, loses 8, gets 3. Remainder mod 5?"
SOUND = ["65+9=74", "74-8=66", "66+3=69", r"Remainder \boxed{4}"]


def test_problem_text_and_its_inverse():
    assert str(BEN) == QUESTION and BEN.answer == "4"
    assert str(Problem("Ben", "eggs", 65, (9, -8, 3), TOTAL)).endswith("How many?")
    assert Problem("Ben", "eggs", 65, (9, -8, 3), TOTAL).answer == "69"
    rng = random.Random(0)
    for _ in range(300):
        problem = toy_world.random_problem(rng, rng.choice((REMAINDER, TOTAL)))
        assert toy_world.parse_problem(str(problem)) == problem
        value = problem.start
        for step in problem.steps:
            value += step
            assert toy_world.LOWEST <= value <= toy_world.HIGHEST


@pytest.mark.parametrize(
    "text", ["", "Ben has eggs. Remainder mod 5?", QUESTION + " Please.", QUESTION.replace("mod", "by")]
)
def test_a_foreign_question_is_refused(text):
    with pytest.raises(ValueError, match="is not a problem of the toy world"):
        toy_world.parse_problem(text)


@pytest.mark.parametrize(
    ("question", "answer", "head"),
    [
        ("Remainder mod 2?", "1", "Remainder"),
        ("Remainder mod 5?", "4", "Remainder"),
        ("More than 50?", "yes", "More"),
        ("More than 68?", "yes", "More"),
        ("More than 69?", "no", "More"),
    ],
)
def test_coarse_questions(question, answer, head):
    problem = BEN._replace(question=question)
    assert toy_world.parse_problem(str(problem)) == problem and problem.answer == answer
    sound = [*SOUND[:3], f"{head} \\boxed{{{answer}}}"]
    assert write_solution(problem, random.Random(0)) == sound
    assert first_wrong_paragraph(str(problem), sound) == -1
    assert compute_score.compute_score("toy", sound[-1], answer)["acc"]
    assert first_wrong_paragraph(str(problem), [*sound[:3], f"{head} \\boxed{{2}}"]) == 3
    right = problem.answer_for(69)
    assert problem.another_answer(right, random.Random(0)) not in (right, None)


def test_problems_of_the_second_world():
    rng, kind, answers = random.Random(0), toy_world.KINDS["own_flaws"], {}
    for _ in range(600):
        problem = toy_world.random_problem(rng, kind.question, kind.lengths)
        assert toy_world.parse_problem(str(problem)) == problem and 6 <= len(problem.steps) <= 9
        answers.setdefault(problem.question, []).append(problem.answer)
        flawless = write_solution(problem, rng, kind.policy)
        assert flawless == write_solution(problem, random.Random(0))
    assert set(answers) == set(toy_world.COARSE) and all(len(some) > 150 for some in answers.values())
    for question, one in (("More than 50?", "yes"), ("Remainder mod 2?", "1")):  # both answers are frequent
        assert 0.4 < answers[question].count(one) / len(answers[question]) < 0.6


@pytest.mark.parametrize(
    "left, step, result",
    [(65, 9, 64), (65, 4, None), (61, -8, 63), (68, -8, None), (95, 9, 94), (60, 5, None), (65, 5, 60)],
)
def test_forgotten_carry_is_off_by_ten(left, step, result):
    assert toy_world.forgets_carry(left, step) == result


@pytest.mark.parametrize(
    "solution, index",
    [
        (SOUND, -1),
        # A forgotten carry does not change the answer.
        (
            ["65+9=64", "64-8=56", "56+3=59", r"Remainder \boxed{4}"],
            0,
        ),
        (["65+9=74", "74-8=76", "76+3=79", r"Remainder \boxed{4}"], 1),  # forgotten borrow, likewise
        (["65+9=74", "75-8=67", "67+3=70", r"Remainder \boxed{0}"], 1),  # starts from an unstated value
        (["65+9=74", "74-7=67", "67+3=70", r"Remainder \boxed{0}"], 1),  # differs from the problem's step
        (["65+9=74", "74+8=82", "82+3=85", r"Remainder \boxed{0}"], 1),  # wrong sign
        (SOUND[:3] + [r"Remainder \boxed{3}"], 3),
        (SOUND[:3] + [r"Total \boxed{69}"], 3),  # answers a different question
        (SOUND[:3], 3),  # the last line is missing
        (SOUND + ["65+9=74"], 4),  # an additional line
        (["65 + 9 = 74"] + SOUND[1:], 0),  # malformed
        ([], 0),
        (["65+9=74\n74-8=66"] + SOUND[2:], 0),  # two lines in one paragraph
        (["65+9=" + "7" * 5000], 0),  # more digits than int() accepts
    ],
)
def test_oracle_by_hand(solution, index):
    assert first_wrong_paragraph(QUESTION, solution) == index
    assert first_wrong_paragraph(QUESTION, "\n\n".join(solution)) == index


def test_oracle_takes_any_text():
    rng = random.Random(0)
    alphabet = "0123456789+-=\n {}\\boxedRstTal,.?\x00é٣"
    for _ in range(3000):
        text = "".join(rng.choices(alphabet, k=rng.randint(0, 60)))
        assert first_wrong_paragraph(QUESTION, text) in range(0, 5)


def test_solver_without_slips_is_sound_and_with_them_slips_as_often_as_told():
    rng = random.Random(1)
    carries = forgotten = 0
    for _ in range(2000):
        problem = toy_world.random_problem(rng, rng.choice((REMAINDER, TOTAL)))
        assert first_wrong_paragraph(str(problem), write_solution(problem, rng, Slips())) == -1
        lines = write_solution(problem, rng, Slips(carry=0.35))
        value = problem.start
        for step, line in zip(problem.steps, lines):
            stated = int(line.split("=")[1])
            if toy_world.forgets_carry(value, step) not in (None, -1):
                carries += 1
                forgotten += stated != value + step
            value = stated
        if problem.question == REMAINDER:  # forgotten carries never change the answer
            assert compute_score.compute_score("toy", lines[-1], problem.answer)["acc"]
    assert carries > 2000 and abs(forgotten / carries - 0.35) < 0.03


def test_critique_by_hand():
    rng = random.Random(0)
    assert write_critique(BEN, SOUND, rng) == (
        "0:65+9=74?74 ok\n1:74-8=66?66 ok\n2:66+3=69?69 ok\n3:69 mod 5=4?4 ok\n\\boxed{-1}"
    )
    flawed = ["65+9=74", "74-8=76", "76+3=79", r"Remainder \boxed{4}"]
    assert write_critique(BEN, flawed, rng) == "0:65+9=74?74 ok\n1:74-8=66?7 not\n\\boxed{1}"
    everything = write_critique(BEN, flawed, rng, stop=False)
    assert everything == "0:65+9=74?74 ok\n1:74-8=66?7 not\n2:76+3=79?79 ok\n3:79 mod 5=4?4 ok"
    overlooked = write_critique(BEN, flawed, rng, miss=1.0)
    assert overlooked.splitlines()[1] == "1:74-8=76?76 ok" and overlooked.endswith("\\boxed{-1}")
    alarmed = write_critique(BEN, SOUND, rng, alarm=1.0)
    assert alarmed.startswith("0:65+9=") and alarmed.endswith(" not\n\\boxed{0}")


def test_critique_of_coarse_answers_by_hand():
    more = BEN._replace(question="More than 50?")
    last = r"More \boxed{yes}"
    critique = write_critique(more, [*SOUND[:3], last], random.Random(0))
    assert critique.splitlines()[3:] == ["3:69 than 50=yes?yes ok", "\\boxed{-1}"]
    critique = write_critique(more, [*SOUND[:3], last.replace("yes", "no")], random.Random(0))
    assert critique.splitlines()[3:] == ["3:69 than 50=yes?n not", "\\boxed{3}"]
    flawed = write_solution(more, random.Random(0), Slips(last=1.0))
    assert flawed == [*SOUND[:3], last.replace("yes", "no")]


@pytest.mark.parametrize("kind", ["standard", "own_flaws"])
def test_critic_without_oversights_agrees_with_the_oracle(kind):
    rng, kind = random.Random(2), toy_world.KINDS[kind]
    for i in range(500):
        problem, paragraphs = toy_world.right_solution(rng, flawed=i % 2 == 0, kind=kind)
        assert kind.lengths[0] <= len(problem.steps) <= kind.lengths[1]
        index = first_wrong_paragraph(str(problem), paragraphs)
        assert (index >= 0) == (i % 2 == 0)
        assert compute_score.compute_score("toy", paragraphs[-1], problem.answer)["acc"]
        critique = write_critique(problem, paragraphs, rng)
        assert compute_score.parse_critique(critique, len(paragraphs)) == index


def test_rows_have_the_schema():
    rng = random.Random(3)
    problem = toy_world.random_problem(rng, REMAINDER)
    critic_row = toy_world.critic_row(*toy_world.right_solution(rng, True), "test", 1)
    prepare_data.validate_row(toy_world.policy_row(problem, "toy", "train", 0), "toy policy")
    prepare_data.validate_row(critic_row, "toy critic")
    assert critic_row["reward_model"]["ground_truth"] >= 0 and critic_row["prompt"][0]["content"].endswith(
        "\nCheck:"
    )


def test_reward_functions():
    info = {"question": QUESTION, "split": "train"}
    flawed = "65+9=64\n\n64-8=56\n\n56+3=59\n\nRemainder \\boxed{4}"
    cases = {
        "\n\n".join(SOUND): (1.0, False, True),
        flawed: (0.0, True, False),
        flawed.replace("{4}", "{3}"): (-1.0, False, False),
    }
    for solution, (score, is_flawed, truly) in cases.items():
        result = toy_world.compute_score_fapo_oracle("toy", solution, "4", info)
        assert (result["score"], result["oracle_flawed_positive"], result["truly_correct"]) == (
            score,
            is_flawed,
            truly,
        )
        assert (
            toy_world.compute_score_fapo_oracle("toy", solution, "4", info, penalty=0.5)["score"]
            == score + 0.5 * is_flawed
        )
        assert result["first_wrong"] == (-1 if truly else 0) and result["sums_right"] == truly
        baseline = asyncio.run(toy_world.compute_score_baseline("toy", solution, "4", info))
        assert (
            baseline["score"] == (1.0 if score >= 0 else -1.0)
            and baseline["oracle_flawed_positive"] == is_flawed
        )


def test_what_the_oracle_can_be_told_to_say():
    info = {"question": QUESTION, "split": "train"}
    flawed = "65+9=74\n\n74-8=76\n\n76+3=79\n\nRemainder \\boxed{4}"
    wrong = flawed.replace("{4}", "{3}")

    def said(solution, function=toy_world.compute_score_fapo_oracle, **settings):
        return function("toy", solution, "4", info, **settings)

    assert said(wrong)["first_wrong"] == 1 and said(wrong)["score"] == -1
    assert said(wrong, place=1.0)["score"] == -0.75 and said(flawed, place=1.0)["score"] == 0
    assert said(wrong, judge_wrong=False) == said(wrong) | {"first_wrong": None}
    assert said(flawed, judge_wrong=False) == said(flawed)
    slipped_last = said("\n\n".join([*SOUND[:3], "Remainder \\boxed{3}"]))
    assert slipped_last["sums_right"] and not slipped_last["acc"] and not slipped_last["truly_correct"]
    goes_on = said("\n\n".join([*SOUND, "Remainder \\boxed{4}"]))
    assert goes_on["sums_right"] and goes_on["flawed_positive"] and goes_on["first_wrong"] == 4
    blind = said(flawed, recall=0.0)
    assert (blind["score"], blind["first_wrong"], blind["flawed_positive"]) == (1, -1, False)
    assert blind["oracle_flawed_positive"] and not blind["truly_correct"]
    seen = []
    for result in range(1000):
        text = flawed.replace("79", str(result))
        seen.append(said(text, recall=0.7)["flawed_positive"])
        assert seen[-1] == said(text, recall=0.7)["flawed_positive"]
    assert abs(sum(seen) / 1000 - 0.7) < 0.05
    steps = toy_world.compute_score_steps_oracle
    assert said(wrong, steps) == said(wrong) | {"step_scores": [1.0, 0.0, 0.0, 0.0]}
    assert said("\n\n".join(SOUND), steps)["step_scores"] == [1.0] * 4
    assert said(flawed, steps, recall=0.0)["step_scores"] == [1.0] * 4
    assert said(wrong, steps, judge_wrong=False)["step_scores"] is None  # the judge was not queried


def test_kinds_of_toy_worlds():
    rng, shares = random.Random(0), {}
    for name in ("standard", "weak_policy"):
        problems = [toy_world.random_problem(rng, toy_world.REMAINDER) for _ in range(2000)]
        solutions = [
            toy_world.write_solution(problem, rng, toy_world.KINDS[name].policy) for problem in problems
        ]
        sound = (
            sum(
                toy_world.first_wrong_paragraph(str(one), text) == -1
                for one, text in zip(problems, solutions)
            )
            / 2000
        )
        right = (
            sum(
                one[-1] == f"Remainder \\boxed{{{problem.answer}}}"
                for problem, one in zip(problems, solutions)
            )
            / 2000
        )
        shares[name] = (sound, right)
    assert 0.26 < shares["standard"][0] < 0.36 and 0.6 < shares["standard"][1] < 0.72
    # These policies are wrong far more often than fully correct.
    assert shares["weak_policy"][0] < 0.12 and shares["weak_policy"][1] < 0.4
    for _ in range(200):
        problem, paragraphs = toy_world.right_solution(rng, True, toy_world.KINDS["narrow_judge"])
        value = problem.start
        for step, line in zip(problem.steps, paragraphs):
            stated = int(line.split("=")[1])
            assert stated in (value + step, toy_world.forgets_carry(value, step))
            value = stated


@pytest.fixture(scope="module")
def world(tmp_path_factory):
    """Return the standard world with the shipped models."""
    folder = tmp_path_factory.mktemp("world")
    prepare_data.prepare(prepare_data.Config(tasks=["toy"], out_dir=folder))
    return folder


@pytest.mark.slow
def test_the_files_of_the_toy_world(world):
    rows = {path.stem: pq.read_table(path).to_pylist() for path in world.glob("*.parquet")}
    assert {name: len(some) for name, some in rows.items()} == {
        "toy_train": 4096,
        "toy_test": 512,
        "toy_total_test": 512,
        "fapo_critic_train": 4096,
        "fapo_critic_test": 512,
    }
    for some in rows.values():
        prepare_data.validate_row(some[-1], "the last row")


def answered(folder, rows, function) -> dict:
    """Score the answers of the model in this folder to these rows at temperature 1, averaged as in the
    trainer.
    """
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    assert sum(path.stat().st_size for path in folder.iterdir()) < 2e6
    samples = []
    for row in rows:
        ids = tokenizer.apply_chat_template(row["prompt"], add_generation_prompt=True, return_dict=False)
        samples.append(Sample(row, ids))
    rollout_hf(
        model, samples, max_response_length=112, temperature=1.0, eos_ids={1}, seed=1, rollout_batch_size=512
    )
    results = []
    for row, sample in zip(rows, samples):
        text = tokenizer.decode(sample.response_ids, skip_special_tokens=True)
        truth = row["reward_model"]["ground_truth"]
        results.append(function(row["data_source"], text, truth, extra_info=row["extra_info"]))
    return run_folder.averages(results)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "file", "function"),
    [
        ("policy", "toy_test", toy_world.compute_score_fapo_oracle),
        ("judge", "fapo_critic_test", compute_score.compute_score_fapo_genrm),
    ],
)
def test_the_shipped_models_score_as_their_card_says(world, name, file, function):
    """Test at temperature 1, on half of the rows, within three standard errors."""
    means = answered(world / name, pq.read_table(world / f"{file}.parquet").to_pylist()[:256], function)
    card = (toy_world.SHIPPED / "README.md").read_text()
    for key, line in (
        {
            "acc": "accuracy",
            "oracle_flawed_positive_rate": "flawed-positive rate, according to the oracle",
            "truly_correct": "fraction of fully correct samples",
        }.items()
        if name == "policy"
        else {
            "recall": "recall",
            "sound_kept": "specificity (on sound solutions)",
            "location": "first-error accuracy (on flawed solutions)",
        }.items()
    ):
        told = float(card.split(f"\n| {line} | ")[1].split(" ")[0])
        assert means[key] == pytest.approx(told, abs=0.12), key


@pytest.mark.slow
@pytest.mark.parametrize("start", [0, 1, 2])
def test_the_second_worlds_shipped_starts_score_as_their_card_says(start):
    """This is tested as above.

    Another model of the same seed, such as a teacher or a judge, has the same tokenizer.
    """
    rng, kind = random.Random(start), toy_world.KINDS["own_flaws"]
    problems = [toy_world.random_problem(rng, kind.question, kind.lengths) for _ in range(256)]
    rows = [toy_world.policy_row(problem, "toy", "test", i) for i, problem in enumerate(problems)]
    folder = toy_world.SHIPPED / f"own{start}"
    means = answered(folder, rows, toy_world.compute_score_fapo_oracle)
    card = (toy_world.SHIPPED / "README.md").read_text().split(f"\n| `own{start}` | ")[1].split("\n")[0]
    keys = ("acc", "oracle_flawed_positive_rate", "truly_correct", "sums_right")
    for key, told in zip(keys, card.split(" | ")):
        assert means[key] == pytest.approx(float(told), abs=0.12), key
    texts = warm_start.tokenizer_corpus(random.Random(f"{start}/tokenizer"), kind)
    tokenizer = warm_start.build_tokenizer(texts).backend_tokenizer
    assert tokenizer.to_str(pretty=True) == (folder / "tokenizer.json").read_text()


@pytest.mark.slow
def test_a_world_of_another_seed_has_other_problems_and_the_shipped_models(tmp_path, world):
    prepare_data.prepare(prepare_data.Config(tasks=["toy"], seed=1, out_dir=tmp_path))
    assert (tmp_path / "toy_test.parquet").read_bytes() != (world / "toy_test.parquet").read_bytes()
    for name in ("policy", "judge"):
        copy, shipped = tmp_path / name / "model.safetensors", toy_world.SHIPPED / name / "model.safetensors"
        assert copy.read_bytes() == shipped.read_bytes()


@pytest.mark.slow
def test_the_command_of_a_warm_start(tmp_path, monkeypatch, world):
    """Write rows and models for a seed and a kind.

    With default settings, they equal those that prepare_data.py writes.
    """
    trained = []
    monkeypatch.setattr(torch.multiprocessing, "spawn", lambda function, of, nprocs: trained.append(of))
    for name, *more in (("plain",), ("other", "--kind", "weak_policy", "--seed", "1", "--models", "judge")):
        monkeypatch.setattr("sys.argv", ["warm_start.py", "--out-dir", str(tmp_path / name), *more])
        warm_start.main(tyro.cli(warm_start.Config))
    for path in world.glob("*.parquet"):
        assert path.read_bytes() == (tmp_path / "plain" / path.name).read_bytes()
        assert path.read_bytes() != (tmp_path / "other" / path.name).read_bytes()
    told = [(models, seed, kind) for models, _, _, seed, kind, _ in trained]
    kinds = toy_world.KINDS
    assert told == [(("policy", "judge"), 0, kinds["standard"]), (("judge",), 1, kinds["weak_policy"])]
    shipped = (toy_world.SHIPPED / "policy/tokenizer.json").read_text()
    assert trained[0][1].backend_tokenizer.to_str(pretty=True) == shipped


@pytest.mark.slow
def test_rows_without_models(tmp_path):
    command = ["-m", "toy.warm_start", "--kind", "own_flaws", "--seed", "1", "--models"]
    done = forked.run([*command, "--out-dir", tmp_path])
    assert done.returncode == 0, done.stderr
    assert {path.suffix for path in tmp_path.iterdir()} == {".parquet"}
    (row,) = pq.read_table(tmp_path / "toy_test.parquet").slice(0, 1).to_pylist()
    assert row["extra_info"]["question"].count(",") >= 6


@pytest.mark.slow
def test_the_second_worlds_warm_start(tmp_path, monkeypatch, capsys):
    """The warm start writes five files and a policy, and stops when this fraction of solutions to long
    stories is sound.
    """
    monkeypatch.setattr(torch.multiprocessing, "spawn", lambda function, of, nprocs: function(0, *of))
    shares = iter((0.1, 0.3, 0.5))
    measured = []

    def sound_share(model, tokenizer, examples):
        assert all(examples()[0].count(",") >= 6 for _ in range(20))
        measured.append(next(shares))
        return measured[-1]

    monkeypatch.setattr(warm_start, "sound_share", sound_share)
    command = ["warm_start.py", "--out-dir", str(tmp_path), "--kind", "own_flaws", "--stop-at", "0.2"]
    monkeypatch.setattr("sys.argv", [*command, "--models", "policy"])
    warm_start.main(tyro.cli(warm_start.Config))
    assert measured == [0.1, 0.3]
    files = {path.stem: pq.read_table(path).to_pylist() for path in tmp_path.glob("*.parquet")}
    counts = {name: len(rows) for name, rows in files.items()}
    policys = {"toy_train": 4096, "toy_test": 512, "toy_total_test": 512}
    assert counts == policys | {"fapo_critic_train": 4096, "fapo_critic_test": 512}
    for rows in files.values():
        prepare_data.validate_row(rows[0], "the first row")
    assert all("How many?" in row["extra_info"]["question"] for row in files["toy_total_test"])
    assert not any("How many?" in row["extra_info"]["question"] for row in files["toy_train"])
    assert {path.name for path in (tmp_path / "policy").iterdir()} >= {"model.safetensors", "tokenizer.json"}


def test_sound_share_of_a_model_that_knows_nothing(tokenizer):
    model = warm_start.new_model(len(tokenizer), 0)
    torch.nn.init.zeros_(model.lm_head.weight)  # every token is equally probable
    share = warm_start.sound_share(model, tokenizer, lambda: warm_start.chat(QUESTION, "6"))
    assert share == pytest.approx(len(tokenizer) ** -2.0)  # the digit and the end token


SHIPPED = ["policy", "judge", "own0", "own1", "own2", "shop0", "shop1", "shop2", "shop_judge"]


@pytest.mark.parametrize("name", SHIPPED)
def test_the_words_of_the_world_have_the_token_ids_that_the_models_were_trained_on(name):
    """The vocabulary contains two words in shortened form, as in the original texts of the warm start."""
    tokenizer = AutoTokenizer.from_pretrained(toy_world.SHIPPED / name)
    trained = Tokenizer.from_file(str(toy_world.SHIPPED / name / "tokenizer.json"))
    trained.normalizer, trained.decoder = None, decoders.ByteLevel()
    rng = random.Random(7)
    texts = []
    if name.startswith("shop"):
        for _ in range(2000):
            problem = shop_world.random_problem(rng, toy_world.COARSE)
            texts += [str(problem), *(text for _, text in shop_world.write_solution(problem))]
    else:
        kind = toy_world.KINDS["own_flaws" if name.startswith("own") else "standard"]
        texts = warm_start.tokenizer_corpus(rng, kind)
    texts = [text for text in texts if "Remainder" in text or " mod " in text][:600]
    assert len(texts) == 600
    for text in texts:
        short = text.replace("Remainder", "Rest").replace(" mod ", " by ")
        ids = tokenizer.encode(text)
        assert ids == trained.encode(short).ids and trained.decode(ids) == short
        assert tokenizer.decode(ids) == text and "".join(map(tokenizer.decode, ids)) == text


def test_tokenizer_loses_nothing_and_its_chat_template_is_what_the_warm_start_writes(tmp_path, tokenizer):
    tokenizer.save_pretrained(tmp_path)
    tokenizer = AutoTokenizer.from_pretrained(tmp_path)
    for text in ["\n\n".join(SOUND), QUESTION, "Überraschung: 3²\t\x00"]:
        assert tokenizer.decode(tokenizer.encode(text)) == text
    assert tokenizer.tokenize("64\n\n64") == tokenizer.tokenize("64") + ["ĊĊ"] + tokenizer.tokenize("64")
    prompt, response = warm_start.chat(QUESTION, "x")
    messages = [{"role": "user", "content": QUESTION}]
    ids = tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=False)
    assert ids == tokenizer.encode(prompt, add_special_tokens=False)
    assert response == "x" + tokenizer.eos_token
    assert len(tokenizer) < 512


def test_report_puts_any_runs_side_by_side(tmp_path, monkeypatch, capsys):
    columns = [*report.COLUMNS.values(), "toy/sums_right"]
    for name, share in (("a", 0.25), ("b", 0.75)):
        (tmp_path / name).mkdir()
        lines = [{"step": step} | {f"val/{key}/mean@1": step * share for key in columns} for step in (0, 1)]
        (tmp_path / name / "metrics.jsonl").write_text("".join(json.dumps(one) + "\n" for one in lines))
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", ["report", "--runs", "a", "b"])
    report.main()
    head, _, before, a, b = capsys.readouterr().out.splitlines()
    assert head.endswith("| all sums right |") and before == "| initial policy" + 5 * " | 0.000" + " |"
    assert (a, b) == ("| a, step 1" + 5 * " | 0.250" + " |", "| b, step 1" + 5 * " | 0.750" + " |")
    lines = [{"step": step, "val/toy/mean@1": 0.5} for step in (0, 1)]  # of a custom reward function
    (tmp_path / "b/metrics.jsonl").write_text("".join(json.dumps(one) + "\n" for one in lines))
    report.main()
    assert capsys.readouterr().out.splitlines()[-1] == "| b, step 1 | 0.500" + 4 * " | -" + " |"
    monkeypatch.setattr(sys, "argv", ["report", "--runs", "nowhere"])
    with pytest.raises(SystemExit):
        report.main()
    assert "--runs nowhere/baseline: the run lacks its first or last" in capsys.readouterr().err


def test_report_rejects_runs_on_other_data(tmp_path, monkeypatch, capsys):
    lines = [{"step": step, "val/gsm8k/mean@1": 0.5} for step in (0, 1)]
    for name in ("own", "demo/baseline", "demo/fapo"):
        (tmp_path / name).mkdir(parents=True)
        (tmp_path / name / "metrics.jsonl").write_text("".join(json.dumps(one) + "\n" for one in lines))
    monkeypatch.chdir(tmp_path)
    for runs, named in (("own", "own"), ("demo", "outcome reward only")):
        monkeypatch.setattr(sys, "argv", ["report", "--runs", runs])
        with pytest.raises(SystemExit) as ended:
            report.main()
        assert ended.value.code == 2
        said = capsys.readouterr()
        assert f"--runs: {named} was not evaluated" in said.err and "view_run.py" in said.err
        assert "nan" not in said.out
    with pytest.raises(ValueError, match="judge was not evaluated .*no val/fapo_critic/recall"):
        report.judge_table(lines)
    assert not (tmp_path / "demo/report.md").exists()


def test_report_computes_its_numbers_from_the_runs(tmp_path):
    def run(name, *metrics):
        (tmp_path / name).mkdir()
        (tmp_path / name / "metrics.jsonl").write_text("".join(json.dumps(m) + "\n" for m in metrics))

    def critic(recall, kept):
        return {
            f"val/fapo_critic/{k}/mean@1": v
            for k, v in dict(recall=recall, sound_kept=kept, location=0.1).items()
        }

    with pytest.raises(ValueError, match="baseline: the run lacks its first or last"):
        report.report(tmp_path)
    run("judge", {"step": 0} | critic(1.0, 0.0), {"step": 9} | critic(0.5, 1.0))
    held_out = {f"val/{key}/mean@1": 0.25 for key in report.COLUMNS.values()}
    for name, acc in (("baseline", 0.75), ("fapo", 0.875)):
        run(name, {"step": 0} | held_out, {"step": 1, "reward/acc": 0.5} | held_out | {"val/toy/mean@1": acc})
        so_far = report.report(tmp_path, so_far=True)  # the other runs do not exist yet
        assert "| outcome reward only, step 1 | 0.750 |" in so_far
        assert ("| FAPO" in so_far) == (name == "fapo")
    text = report.report(tmp_path)
    assert "| before | 1.000 | 0.000 | 0.100 |" in text
    assert "| after | 0.500 | 1.000 | 0.100 |" in text
    assert "| initial policy | 0.250 | 0.250 | 0.250 | 0.250 |" in text
    assert "| outcome reward only, step 1 | 0.750 |" in text and "| FAPO, step 1 | 0.875 |" in text
    assert (tmp_path / "report.md").read_text() == text + "\n"
    with (tmp_path / "fapo" / "metrics.jsonl").open("a") as file:
        file.write('{"step": 2, "rew')  # killed while it wrote
    with pytest.raises(ValueError, match="fapo: the run lacks its first or last"):
        report.report(tmp_path)
    assert report.report(tmp_path, so_far=True) == text
    (tmp_path / "fapo" / "metrics.jsonl").write_text(json.dumps({"step": 0} | held_out) + "\n{}\n")
    with pytest.raises(ValueError, match="fapo: the run lacks its first or last"):
        report.report(tmp_path, so_far=True)


def test_a_report_so_far_leaves_out_a_judge_in_training_and_needs_a_run(tmp_path):
    for folder in (tmp_path, tmp_path / "typo"):
        with pytest.raises(ValueError, match=f"^--runs {folder}: contains no run"):
            report.report(folder, so_far=True)
    before = {f"val/fapo_critic/{key}/mean@1": 0.5 for key in ("recall", "sound_kept", "location")}
    policy = {f"val/{key}/mean@1": 0.25 for key in report.COLUMNS.values()}
    runs = {"judge": [before, {"reward/mean": 0.5}], "baseline": [policy, policy]}
    for name, lines in runs.items():
        (tmp_path / name).mkdir()
        text = "".join(json.dumps({"step": step} | line) + "\n" for step, line in enumerate(lines))
        (tmp_path / name / "metrics.jsonl").write_text(text)
    text = report.report(tmp_path, so_far=True)
    assert "| outcome reward only, step 1 | 0.250 |" in text and "judge" not in text
    with (tmp_path / "judge/metrics.jsonl").open("a") as file:
        file.write(json.dumps({"step": 2} | before) + "\n" + '{"step": 3, "rew')
    assert "| after | 0.500 | 0.500 | 0.500 |" in report.report(tmp_path, so_far=True)


@pytest.mark.slow
def test_a_short_warm_start_is_reproducible_and_learns(tmp_path, monkeypatch, tokenizer):
    """Repeat the first thirty steps of a warm start: equal weights, and a loss far below chance."""
    phases = warm_start.phases
    monkeypatch.setattr(warm_start, "phases", lambda *of: [(*phases(*of)[0][:2], 30, *phases(*of)[0][3:])])
    weights = []
    for run in ("a", "b"):
        warm_start.warm_start(0, ["policy"], tokenizer, tmp_path / run, 0, toy_world.Kind())
        model = AutoModelForCausalLM.from_pretrained(tmp_path / run / "policy", dtype=torch.float32)
        weights.append(torch.cat([p.flatten() for p in model.parameters()]))
    assert torch.equal(*weights)
    assert AutoTokenizer.from_pretrained(tmp_path / "a/policy").chat_template == tokenizer.chat_template
    ids = torch.tensor([tokenizer.encode("".join(warm_start.chat(QUESTION, "\n\n".join(SOUND))))])
    assert model(ids, labels=ids).loss.item() < 4.0  # chance is log(365) = 5.9
    assert sum(p.numel() for p in model.parameters()) < 1.1e6 and not model.config.tie_word_embeddings


def test_rows_for_a_judge_from_what_policies_wrote(tmp_path):
    """The rows have correct answers only, with as many flawed as sound ones, each once and labelled.

    No problem is in both files.
    """
    rng, lines = random.Random(0), []
    for number in range(60):
        problem, paragraphs = toy_world.right_solution(rng, number % 3 == 0, toy_world.KINDS["own_flaws"])
        line = {"split": "train", "prompt": str(problem), "response": "\n\n".join(paragraphs)}
        line["reward_extra_info"] = {"acc": number >= 6}  # treat the first ones as wrong
        failed = line | {"reward_extra_info": {"error": "TimeoutError"}}
        lines += [line, line, failed, line | {"split": "toy"}]
    (tmp_path / "samples.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    path = Path(warm_start.__file__).parents[1] / "recipes/critic_rows.py"
    command = [path, "--runs", tmp_path, "--out-dir", tmp_path / "rows", "--held-out", "9"]
    done = forked.run(command)
    assert done.returncode == 0, done.stderr
    paths = [tmp_path / f"rows/fapo_critic_{name}.parquet" for name in ("train", "test")]
    files = [pq.read_table(path).to_pylist() for path in paths]
    train, test = files
    assert len(train) == 27 and len(test) == 9
    questions = [{row["extra_info"]["question"] for row in rows} for rows in files]
    assert not questions[0] & questions[1] and len(questions[0] | questions[1]) == 36
    labels = [row["reward_model"]["ground_truth"] for row in train + test]
    assert labels.count(-1) == 18
    for row in train + test:
        prepare_data.validate_row(row, "row")
        written = [line for line in lines if line["prompt"] == row["extra_info"]["question"]][0]
        label = first_wrong_paragraph(written["prompt"], written["response"])
        assert row["reward_model"]["ground_truth"] == label and written["reward_extra_info"]["acc"]
    (tmp_path / "file").write_text("")
    for arguments, message in (
        (
            ["--runs", tmp_path, tmp_path / "typo"],
            rf"error: --runs {tmp_path}/typo: has no samples.jsonl; pass",
        ),
        (["--out-dir", tmp_path / "file"], "error: .*File exists"),
    ):
        wrong = forked.run([*command, *arguments])
        assert wrong.returncode == 2 and re.match(message, wrong.stderr) and wrong.stderr.count("\n") == 1
    (tmp_path / "samples.jsonl").write_text(json.dumps(lines[-3]) + "\n")
    few = forked.run(command)
    assert few.returncode == 1 and "for --held-out 9; pass more runs, or lower" in few.stderr
    assert re.search(r"error: --runs: too few solutions \((0 flawed, |[1-9]\d* flawed, 0 )", few.stderr)
    (tmp_path / "samples.jsonl").write_text(json.dumps(lines[-4] | {"prompt": "1+1?\n"}) + "\n")
    (tmp_path / "config.json").write_text(json.dumps({"train_file": str(tmp_path / "other.parquet")}))
    prepare_data.write_table(tmp_path / "other.parquet", [{"prompt": [{"role": "user", "content": "1+1?"}]}])
    other = forked.run(command)
    assert other.returncode == 2 and other.stderr.startswith("error: question: '1+1?\\n' is not a problem of")
