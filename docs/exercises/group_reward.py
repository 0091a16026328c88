"""Exercise 5: a reward that sees the whole group (docs/teaching.md).

`compute_score` sees one response, so it cannot compare the response's length with the lengths of other
correct responses. Make it a group function: replace the parameter `solution_str` with `solution_strs`, the
list of all responses to a prompt, and return the list of their results, which are dicts. The shortest correct
response gets an additional `bonus`, the longest gets none, and the bonus decreases linearly with the length
in between. If all correct responses have the same length, none gets a bonus.

    pytest docs/exercises/test_group_reward.py
    python grpo_trainer.py ... --reward-fn docs/exercises/group_reward.py:compute_score
"""

import compute_score as scores


def compute_score(data_source, solution_str, ground_truth, extra_info, bonus=0.5):
    return scores.compute_score(data_source, solution_str, ground_truth)
