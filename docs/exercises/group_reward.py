"""Exercise 5: a reward that sees the whole group (docs/teaching.md).

This rule sees one response, which cannot tell whether it is a short one among the right responses to its
prompt. Make it a function of all of them (`solution_strs` instead of `solution_str`), which is called once
per prompt and returns a list. The shortest right one gets `bonus`, the longest right one nothing, those
between in proportion.

    pytest docs/exercises/test_group_reward.py
    python grpo_trainer.py ... --reward-fn docs/exercises/group_reward.py:compute_score
"""

import compute_score as scores


def compute_score(data_source, solution_str, ground_truth, extra_info, bonus=0.5):
    return scores.compute_score(data_source, solution_str, ground_truth)
