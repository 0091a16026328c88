"""The exact check of Euclid's algorithm, and the two rewards that are compared on a public task."""

import json
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from recipes import gcd_steps, gym_tasks
from toy import warm_start

pytest.importorskip("reasoning_gym")
ROOT = Path(__file__).resolve().parent.parent
QUESTION = "Find the Greatest Common Divisor (GCD) of these numbers: 28, 12. Give only the GCD."
RIGHT = "28=12*2+4\n\n12=4*3+0\n\n\\boxed{4}"


@pytest.mark.parametrize(
    ("text", "index"),
    [
        (RIGHT, -1),
        (RIGHT + "\n", -1),
        ("28=12*2+5\n\n12=4*3+0\n\n\\boxed{4}", 0),  # 24 + 5 is not 28
        ("28=12*1+16\n\n12=4*3+0\n\n\\boxed{4}", 0),  # the remainder is larger than the divisor
        ("28=12*2+4\n\n16=4*4+0\n\n\\boxed{4}", 1),  # a correct division of another number
        ("28=12*2+4\n\n\\boxed{4}", 1),  # a line is missing
        ("\\boxed{4}", 0),
        ("28=12*2+4\n\n12=4*3+0", 2),  # the answer is missing
        ("28=12*2+4\n\n12=4*3+0\n\n\\boxed{2}", 2),
        ("28=12*2+4\n\n12=4*3+0\n\n\\boxed{4}\n\n\\boxed{4}", 2),
        ("28=12*2+4\n\n12=4*3+0\n\n4=0*0+4\n\n\\boxed{4}", 2),
        ("", 0),
    ],
)
def test_the_first_wrong_line(text, index):
    assert gcd_steps.first_wrong(QUESTION, text) == index


def test_the_policy_reads_solutions_that_the_check_accepts_for_every_problem():
    for first in range(1, 31):
        for second in range(1, 31):
            question = f"Find the Greatest Common Divisor (GCD) of these numbers: {first}, {second}."
            assert gcd_steps.first_wrong(question, gcd_steps.write_solution(first, second)) == -1


def test_a_pretrained_policy_learns_correct_solutions_in_its_own_chat_format(tmp_path, monkeypatch):
    """Train nothing: the saved weights are those of the base, and the examples have its chat template."""
    base = str(ROOT / "toy/models/policy")
    examples = []

    def fit(model, tokenizer, example, *settings, **bar):
        examples.extend(example() for _ in range(20))

    monkeypatch.setattr(warm_start, "fit", fit)
    gcd_steps.make_policy(gcd_steps.Config(tmp_path, base=base))
    saved = AutoModelForCausalLM.from_pretrained(tmp_path).state_dict()
    for name, weight in AutoModelForCausalLM.from_pretrained(base).state_dict().items():
        assert torch.equal(saved[name], weight)
    for prompt, response in examples:
        question = prompt.removeprefix("<|user|>").removesuffix(gym_tasks.SUFFIX + "<|assistant|>")
        assert gcd_steps.first_wrong(question, response.removesuffix("<|end|>")) == -1
        assert response.endswith("<|end|>") and not gym_tasks.is_held_out(question)


@pytest.fixture(scope="module")
def row():
    for rows in gym_tasks.make_rows("gcd", {"max_value": 30, "seed": 0, "size": 200}).values():
        for row in rows:
            first, second = gcd_steps.numbers_of(row["extra_info"]["question"])
            if first > second and first % second and row["reward_model"]["ground_truth"] != "1":
                return row


def test_fapo_and_the_outcome_reward_differ_only_in_flawed_positives(row):
    truth = row["reward_model"]["ground_truth"]
    right = gcd_steps.write_solution(*gcd_steps.numbers_of(row["extra_info"]["question"]))
    texts = {"right": right, "flawed": f"1=1*1+0\n\n\\boxed{{{truth}}}", "wrong": "\\boxed{1}", "": "no box"}
    scores = {}
    for name, text in texts.items():
        both = []
        for function in (gcd_steps.compute_score_outcome, gcd_steps.compute_score_fapo):
            result = function(row["data_source"], text, truth, row["extra_info"])
            both.append(result["score"])
        scores[name] = both
        assert result["flawed_positive"] is (name == "flawed")
        assert result["fully_correct"] is (name == "right")
    assert scores == {"right": [1, 1], "flawed": [1, 0], "wrong": [-1, -1], "": [-1, -1]}


@pytest.mark.parametrize("name", ["public_tasks", "public_tasks_smollm2"])
def test_the_page_shows_the_figures_of_the_evidence(name):
    lines = (ROOT / f"docs/evidence/{name}.jsonl").read_text().splitlines()
    page = (ROOT / "docs/public_tasks.md").read_text()
    assert gcd_steps.table([json.loads(line) for line in lines]) in page


def test_figures_are_read_from_the_runs_of_the_recipe(tmp_path):
    for reward, after in (("outcome", 0.75), ("fapo", 0.25)):
        folder = tmp_path / reward
        folder.mkdir()
        (folder / "config.json").write_text('{"seed": 3, "model": "data/gcd/policy2"}')
        lines = []
        for step in range(41):
            line = {"step": step}
            if step in (0, 40):
                flawed = after if step else 0.5
                keys = gcd_steps.HELD_OUT.values()
                line |= {f"val/reasoning_gym_gcd/{key}mean@4": flawed for key in keys}
            if step:  # The values are 0.01 to 0.40; the first ten have the mean 0.055, the last ten 0.355.
                line |= {"reward/acc": step / 100, "reward/flawed_positive_rate": step / 100}
            lines.append(json.dumps(line))
        (folder / "metrics.jsonl").write_text("\n".join(lines))
    rows = gcd_steps.report((tmp_path,))
    told = [(row["reward"], row["step"], row["flawed_positive_rate"]) for row in rows]
    assert told == [("outcome", 0, 0.5), ("outcome", 40, 0.75), ("fapo", 0, 0.5), ("fapo", 40, 0.25)]
    training = [round(row["train/acc"], 6) for row in rows]
    assert training == [0.055, 0.355, 0.055, 0.355]
    assert {(row["policy"], row["seed"]) for row in rows} == {("policy2", 3)}
    text = gcd_steps.table(rows).splitlines()[2:]
    assert text == [
        "| policy2 | none | 0.50 (0.50-0.50) | 0.50 (0.50-0.50) | 0.50 (0.50-0.50) |",
        "| policy2 | 40 steps, outcome | 0.75 | 0.75 | 0.75 |",
        "| policy2 | 40 steps, fapo | 0.25 | 0.25 | 0.25 |",
    ]


def test_the_table_has_the_median_and_the_range_over_the_seeds():
    rows = []
    for seed, value in enumerate((0.25, 1.0, 0.5)):
        row = {"policy": "policy0", "reward": "fapo", "seed": seed, "step": 40}
        rows.append(row | dict.fromkeys(gcd_steps.HELD_OUT, value))
    (line,) = gcd_steps.table(rows).splitlines()[2:]
    assert line == "| policy0 | 40 steps, fapo |" + " 0.50 (0.25-1.00) |" * 3
