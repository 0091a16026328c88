"""Exercise 3: these tests fail if the audit never raises an alarm and pass if it does."""

import json
from pathlib import Path

import pytest
from audit import missed_by_judge

from toy.toy_world import first_wrong_paragraph

# 16 samples from each of the first ten and the last ten steps of a run with `compute_score`
LINES = Path(__file__).with_name("narrow_judge.jsonl").read_text().splitlines()
SAMPLES = [json.loads(line) for line in LINES]
EARLY, LATE = ([sample for sample in SAMPLES if (sample["step"] > 30) == late] for late in (False, True))


def oracle(question, solution):
    return first_wrong_paragraph(question, solution) != -1


def test_the_judge_reports_fewer_and_fewer_flaws():
    """This test passes before and after the exercise. It checks the rate that a run plots."""
    for samples, said in ((EARLY, 0.288), (LATE, 0.027)):
        results = [sample["reward_extra_info"] for sample in samples]
        flawed = sum(result["flawed_positive"] for result in results)
        assert flawed / sum(result["acc"] for result in results) == pytest.approx(said, abs=0.001)


def test_more_and_more_of_the_accepted_answers_are_flawed():
    """The judge accepts 89 early answers, of which 22 are flawed, and 146 late answers, of which 106 are."""
    assert missed_by_judge(EARLY, oracle, n=1000) == pytest.approx(22 / 89)
    assert missed_by_judge(LATE, oracle, n=1000) == pytest.approx(106 / 146)


def test_forty_random_answers_are_enough():
    """The late answers come in the order of the oracle's verdict: neither the first nor the last 40 will do.

    One in 100,000 random draws fails this test.
    """
    asked = []
    in_order = sorted(LATE, key=lambda sample: oracle(sample["prompt"], sample["response"]))
    early, late = (
        missed_by_judge(samples, lambda *one: asked.append(one) or oracle(*one), n=40)
        for samples in (EARLY, in_order)
    )
    assert len(asked) == 80 and early < 0.55 and 0.45 < late < 0.98


def test_a_perfect_judge_raises_no_alarm():
    """This test passes before and after the exercise."""
    seen = [
        sample
        | {
            "reward_extra_info": sample["reward_extra_info"]
            | {"flawed_positive": oracle(sample["prompt"], sample["response"])}
        }
        for sample in LATE
    ]
    assert missed_by_judge(seen, oracle) == 0.0
    assert missed_by_judge([], oracle) == 0.0  # The judge has accepted nothing yet.
