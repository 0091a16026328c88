"""The rule, and a small share for the form of the answer: an example of a reward function of your own.

    python grpo_trainer.py ... --reward-fn recipes/gsm8k_reward.py:compute_score

A model that is rarely right learns little from the rule alone: a group of wrong answers has no spread, so
no advantage. Here a box with a number in it is worth `format_share`, whatever the number. Needs
compute_score.py, which is found in the repository; a copy elsewhere takes that file with it.
"""

import re

import compute_score as rules


def compute_score(data_source, solution_str, ground_truth, extra_info=None, *, format_share=0.2) -> dict:
    """+1 or -1 by the rule, and `format_share` more where the last box holds a number (`boxed`)."""
    result = rules.compute_score(data_source, solution_str, ground_truth, extra_info)
    box = rules.last_boxed_only_string(solution_str[-rules.TAIL_CHARS :]) or ""
    boxed = bool(re.fullmatch(r"\\boxed\{\s*\$?-?\d[\d,]*(\.\d+)?\s*\}", box))
    return result | {"score": result["score"] + format_share * boxed, "boxed": boxed}
