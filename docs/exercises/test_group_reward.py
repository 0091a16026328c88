"""Exercise 5: red with a function of one response, green with one of the group."""

import pytest
from group_reward import compute_score

import reward_loop


def scores_of(*responses, **settings):
    about = dict(data_source="sums", ground_truth="4", extra_info={})
    results = compute_score(solution_strs=list(responses), **about, **settings)
    return [result["score"] for result in results]


def test_the_short_right_answer_gets_the_bonus():
    """Those of 12, 22 and 32 characters are right; one of 22 is wrong."""
    responses = [text.rjust(22) for text in (r"\boxed{4}", r"\boxed{5}")]
    responses += [r"\boxed{4}".rjust(length) for length in (12, 32)]
    assert scores_of(*responses) == pytest.approx([1.25, -1.0, 1.5, 1.0])
    assert scores_of(*responses, bonus=0.0) == [1.0, -1.0, 1.0, 1.0]


def test_without_a_difference_there_is_no_bonus():
    assert scores_of(r"\boxed{4}", r"\boxed{4}", r"\boxed{5}") == [1.0, 1.0, -1.0]
    assert scores_of(r"\boxed{4}", r"a long way to \boxed{5}") == [1.0, -1.0]
    assert scores_of(r"\boxed{5}") == [-1.0]


def test_the_reward_loop_calls_it_with_groups():
    job = reward_loop.RewardOptions(reward_fn="docs/exercises/group_reward.py:compute_score").check_rewards()
    assert job.sees_group
