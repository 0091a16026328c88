"""The schedules in recipes/lambda_schedule.py: scores computed by hand."""

import pytest

from recipes import lambda_schedule
from reward_loop import RewardOptions

QUESTION = "Ben has 65 eggs, gets 9. Remainder mod 5?"
ABOUT = {"data_source": "toy", "ground_truth": "4", "extra_info": {"question": QUESTION}}
SOUND = "65+9=74\n\nRemainder \\boxed{4}"
FLAWED = "65+9=64\n\nRemainder \\boxed{4}"
WRONG = "65+9=75\n\nRemainder \\boxed{0}"


@pytest.mark.parametrize("name", ["by_step", "by_majority"])
def test_the_loop_takes_each_schedule(name):
    job = RewardOptions(reward_fn=f"recipes/lambda_schedule.py:{name}").make_job()
    assert job.sees_group == (name != "by_step") and not job.is_async


@pytest.mark.parametrize(
    ("settings", "steps", "scores"),
    [
        ({}, (0, 1, 20, 21, 40), (1, 1, 1, 0, 0)),  # a penalty of 1 from step 21 on
        ({"penalty": 2.0}, (20, 21), (1, -1)),  # then as bad as a wrong answer
        ({"first": 0, "ramp": 20}, (0, 1, 10, 20, 40), (1, 0.95, 0.5, 0, 0)),  # from 0 to 1 in twenty steps
        ({"first": 5, "ramp": 0}, (5, 6), (1, 0)),  # at once, as with ramp = 1
        ({"first": 10, "ramp": 4, "penalty": 2.0}, (10, 11, 14), (1, 0.5, -1)),
    ],
)
def test_a_flawed_positive_costs_more_from_step_to_step(settings, steps, scores):
    for step, score in zip(steps, scores, strict=True):
        result = lambda_schedule.by_step(solution_str=FLAWED, step=step, **ABOUT, **settings)
        assert result["score"] == pytest.approx(score) and result["lambda"] == pytest.approx(1 - score)
        assert result["flawed_positive"] and not result["truly_correct"]
        for text, fixed in ((SOUND, 1), (WRONG, -1)):
            other = lambda_schedule.by_step(solution_str=text, step=step, **ABOUT, **settings)
            assert other["score"] == fixed


@pytest.mark.parametrize(
    ("sound", "flawed", "wrong", "penalty"),
    [
        (3, 4, 1, 1),
        (1, 4, 3, 0),
        (2, 4, 2, 0),  # equally many
        (0, 4, 4, 0),
        (4, 4, 0, 1),
        (0, 8, 0, 0),
        (1, 0, 0, 1),  # an evaluation has one answer
    ],
)
def test_the_majority_in_the_group_decides(sound, flawed, wrong, penalty):
    texts = [SOUND] * sound + [FLAWED] * flawed + [WRONG] * wrong
    results = lambda_schedule.by_majority(solution_strs=texts, **ABOUT)
    scores = [result["score"] for result in results]
    assert scores == [1] * sound + [1 - penalty] * flawed + [-1] * wrong
    assert {result["lambda"] for result in results} == {penalty}


def test_the_majority_may_forbid_flawed_positives():
    results = lambda_schedule.by_majority(solution_strs=[SOUND, FLAWED], penalty=2.0, **ABOUT)
    assert [result["score"] for result in results] == [1, -1]
    assert [result["flawed_positive"] for result in results] == [False, True]
