"""The outcome reward plus a small format reward: an example of your own reward function.

    python grpo_trainer.py ... --reward-fn recipes/gsm8k_reward.py:compute_score

A model that is rarely correct learns little from the outcome reward alone: if all answers of a group are
wrong, all advantages are zero. This function adds `format_share` if the last box contains a number, whether
or not it is correct. If you copy this file, copy compute_score.py as well.
"""

import re

import compute_score as rules


def compute_score(
    data_source,
    solution_str,
    ground_truth,
    extra_info=None,
    turns=(),
    *,
    format_share=0.2,
) -> dict:
    """Return the outcome reward (+1 or -1), plus `format_share` if the last box contains a number."""
    result = rules.compute_score(data_source, solution_str, ground_truth, turns=turns)
    tail = rules.policy_text(solution_str, turns)[-rules.TAIL_CHARS :]
    box = rules.last_boxed_only_string(tail) or ""
    boxed = bool(re.fullmatch(r"\\boxed\{\s*[-−]?(\\?\$)?[-−]?\d(\d|\{?,\}?)*(\.\d+)?(\\?%)?\s*\}", box))
    return result | {"score": result["score"] + format_share * boxed, "boxed": boxed}


compute_score.check_row = rules.check_answer
