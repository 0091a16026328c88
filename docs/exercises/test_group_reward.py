"""Exercise 5: these tests fail with a function of one response and pass with a function of the group."""

from pathlib import Path

import pytest
from group_reward import compute_score

import reward_loop


def scores_of(*responses, **settings):
    about = dict(data_source="sums", ground_truth="4", extra_info={})
    results = compute_score(solution_strs=list(responses), **about, **settings)
    return [result["score"] for result in results]


def test_short_correct_answers_get_the_bonus():
    """The correct responses have 17, 12 and 32 characters. The wrong response is the shortest, with 9."""
    responses = [r"\boxed{4}".rjust(17), r"\boxed{5}"]
    responses += [r"\boxed{4}".rjust(length) for length in (12, 32)]
    assert scores_of(*responses) == pytest.approx([1.375, -1.0, 1.5, 1.0])
    assert scores_of(*responses, bonus=0.0) == [1.0, -1.0, 1.0, 1.0]


def test_without_a_difference_there_is_no_bonus():
    assert scores_of(r"\boxed{4}", r"\boxed{4}", r"\boxed{5}") == [1.0, 1.0, -1.0]
    assert scores_of(r"\boxed{4}", r"a long way to \boxed{5}") == [1.0, -1.0]
    assert scores_of(r"\boxed{5}") == [-1.0]


def test_the_reward_loop_calls_it_with_groups():
    path = Path(__file__).with_name("group_reward.py")
    assert reward_loop.RewardOptions(reward_fn=f"{path}:compute_score").make_job().sees_group
