"""Exercise 2: an additional reward term (docs/teaching.md).

FAPO gives all wrong answers the same reward. Add a term that rewards correct and wrong answers for the
paragraphs before the first wrong one. `progress` is the number of these paragraphs divided by the number of
all paragraphs, or 1.0 if no paragraph is wrong. In the toy world, the oracle finds the first wrong paragraph
(toy_world.first_wrong_paragraph). `with_progress` must return a new dict and leave `result` unchanged. The
new dict has the additional key `progress`, and `share` x progress is added to its `score`. A score of None
stays None.

    pytest docs/exercises/test_reward_term.py
    python grpo_trainer.py ... --reward-fn docs/exercises/reward_term.py:compute_score
"""

from toy import toy_world


def with_progress(result: dict, solution_str: str, question: str, share: float) -> dict:
    """Return a copy of `result` with the term added to `score` and with the key `progress`. The exercise."""
    return result


def compute_score(data_source, solution_str, ground_truth, extra_info, penalty=1.0, share=0.5) -> dict:
    sample = data_source, solution_str, ground_truth, extra_info
    result = toy_world.compute_score_fapo_oracle(*sample, penalty=penalty)
    return with_progress(result, solution_str, extra_info["question"], share)
