"""Schedules for FAPO's penalty lambda: two reward functions that you can use as they are or adapt.

    bash recipes/second_world.sh 0 outputs/own0_later --reward-fn recipes/lambda_schedule.py:by_step
    bash recipes/second_world.sh 0 outputs/own0_linear --reward-fn recipes/lambda_schedule.py:by_step \\
        --reward-kwargs '{"first": 0, "ramp": 20}'
    bash recipes/second_world.sh 0 outputs/own0_majority --reward-fn recipes/lambda_schedule.py:by_majority

A flawed positive scores 1 - lambda. Let alpha be the fraction of fully correct answers in a group, and beta
the fraction of wrong answers. The advantage of a flawed positive is negative if lambda > 2 beta / (alpha +
beta) (paper, appendix A). A constant lambda of 1 therefore discourages flawed positives once alpha > beta,
which is the paper's majority-guided choice. The functions in this file vary lambda with the step or with the
majority in the group.

The toy world's oracle serves as the judge. To use a served judge, replace `judged(...)` with `await
compute_score_fapo(...)`, from compute_score.py or toy/toy_world.py, and leave out samples whose score is
None. If you copy this file, copy these two files as well.
"""

from toy.toy_world import compute_score_fapo_oracle as judged


def by_step(data_source, solution_str, ground_truth, extra_info, step, *, first=20, ramp=1, penalty=1.0):
    """Apply no penalty up to step `first`, and then let it rise to `penalty` within `ramp` steps.

    If all answers of a group are correct, GRPO divides the penalty by a std that grows with it, so any
    penalty above 0 gives the same advantages. A ramp matters only in groups that also have wrong answers.
    """
    now = penalty * min(max(step - first, 0) / max(ramp, 1), 1.0)
    result = judged(data_source, solution_str, ground_truth, extra_info, penalty=now)
    return result | {"lambda": now}


def by_majority(data_source, solution_strs, ground_truth, extra_info, *, penalty=1.0):
    """Penalise flawed positives only in groups in which fully correct answers outnumber wrong ones."""
    results = [judged(data_source, text, ground_truth, extra_info, penalty=0.0) for text in solution_strs]
    correct = sum(result["acc"] and not result["flawed_positive"] for result in results)
    wrong = sum(not result["acc"] for result in results)
    now = penalty if correct > wrong else 0.0
    for result in results:
        result["score"] -= now * result["flawed_positive"]
        result["lambda"] = now
    return results
