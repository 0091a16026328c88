"""Exercise 3: red with an alarm that never rings, green with one that does."""

import json
from pathlib import Path

import pytest
from audit import missed_by_judge

from toy.toy_world import first_wrong_paragraph

# Of a run with `compute_score`: 16 samples of each of its first ten and its last ten steps.
LINES = Path(__file__).with_name("narrow_judge.jsonl").read_text().splitlines()
SAMPLES = [json.loads(line) for line in LINES]
EARLY, LATE = ([sample for sample in SAMPLES if (sample["step"] > 30) == late] for late in (False, True))


def oracle(question, solution):
    return first_wrong_paragraph(question, solution) != -1


def test_by_its_own_word_the_judge_has_less_and_less_to_do():
    """Green before and after: this is the curve that everybody looks at."""
    for samples, said in ((EARLY, 0.288), (LATE, 0.027)):
        results = [sample["reward_extra_info"] for sample in samples]
        flawed = sum(result["flawed_positive"] for result in results)
        assert flawed / sum(result["acc"] for result in results) == pytest.approx(said, abs=0.001)


def test_what_it_lets_pass_is_flawed_more_and_more():
    """22 of 89, and 106 of 146."""
    assert missed_by_judge(EARLY, oracle, n=1000) == pytest.approx(22 / 89)
    assert missed_by_judge(LATE, oracle, n=1000) == pytest.approx(106 / 146)


def test_forty_second_opinions_are_enough():
    asked = []
    shares = [missed_by_judge(samples, lambda *one: asked.append(one) or oracle(*one), n=40)
              for samples in (EARLY, LATE)]  # fmt: skip
    assert len(asked) == 80 and shares[0] < 0.45 and shares[1] > 0.55


def test_a_judge_that_sees_everything_rings_no_alarm():
    """Green before and after."""
    seen = [sample | {"reward_extra_info": sample["reward_extra_info"] | {
        "flawed_positive": oracle(sample["prompt"], sample["response"])}} for sample in LATE]  # fmt: skip
    assert missed_by_judge(seen, oracle) == 0.0
