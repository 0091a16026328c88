"""Exercise 2: another reward term (docs/teaching.md).

FAPO tells a wrong answer only that it is wrong. Pay for the part of every solution, right or wrong, that
stands before its first wrong paragraph: `progress`, a share of its paragraphs, 1.0 where none is wrong. In
the toy world the oracle knows it (toy_world.first_wrong_paragraph). `with_progress` is to return a new dict,
`result` staying as it is, with `share` x progress added to `score` and with `progress` beside it. A score of
None stays None.

    pytest docs/exercises/test_reward_term.py
    python grpo_trainer.py ... --reward-fn docs/exercises/reward_term.py:compute_score
"""

from toy import toy_world


def with_progress(result: dict, solution_str: str, question: str, share: float) -> dict:
    """`result` with the term in its score and `progress` beside it. The exercise."""
    return result


def compute_score(data_source, solution_str, ground_truth, extra_info, penalty=1.0, share=0.5) -> dict:
    sample = data_source, solution_str, ground_truth, extra_info
    result = toy_world.compute_score_fapo_oracle(*sample, penalty=penalty)
    return with_progress(result, solution_str, extra_info["question"], share)
