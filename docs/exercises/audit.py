"""Exercise 3: a judge that can be hacked, and how to notice (docs/teaching.md).

`compute_score` pays like FAPO, with a judge that knows forgotten carries and no other slip. It is given, and
right. A policy trained with it soon looks flawless to it. `missed_by_judge` is the alarm, and it never rings:
it looks again at what the judge has flagged. Mend it: draw `n` at random (or all, if fewer) of the right
answers (`acc`) in which the judge found nothing, and return the share that the second opinion calls flawed.

    pytest docs/exercises/test_audit.py
    python grpo_trainer.py ... --reward-fn docs/exercises/audit.py:audited
"""

import random
import re

import compute_score as scores
from toy import toy_world


def narrow_verdict(solution: str) -> int:
    """The first paragraph in which a carry was forgotten, -1 if there is none."""
    for index, line in enumerate(scores.split_paragraphs(solution)):
        parts = re.fullmatch(r"(\d+)([+-]\d+)=(\d+)", line)
        if parts and int(parts[3]) == toy_world.forgets_carry(int(parts[1]), int(parts[2])):
            return index
    return -1


def compute_score(data_source, solution_str, ground_truth, extra_info, penalty=1.0) -> dict:
    """FAPO with that judge; the oracle looks on (`oracle_flawed_positive`) and pays nothing."""
    rule = scores.compute_score(data_source, solution_str, ground_truth)
    flawed = rule["acc"] and narrow_verdict(solution_str) != -1
    result = rule | {"score": rule["score"] - penalty * flawed, "flawed_positive": flawed}
    return toy_world.with_oracle(result, solution_str, extra_info)


def audited(data_source, solution_str, ground_truth, extra_info, share=0.05) -> dict:
    """The same, with the alarm in it: the oracle is the second opinion, on a share of what the judge passes.
    The run watches `audited` and `audit_flawed` (docs/judges.py does the same with two judges)."""
    result = compute_score(data_source, solution_str, ground_truth, extra_info)
    passed = result["acc"] and not result["flawed_positive"]
    result["audited"] = passed and random.random() < share
    if result["audited"]:
        result["audit_flawed"] = result["oracle_flawed_positive"]
    return result


def missed_by_judge(samples: list[dict], second_opinion, n: int = 100) -> float:
    """Of right answers that the judge passed, the share that a second opinion calls flawed. The exercise.

    samples: lines of samples.jsonl. second_opinion(question, solution) says whether a solution is flawed.
    It is expensive (a larger judge, a person), so it is asked `n` times at most.
    """
    doubtful = [sample for sample in samples if sample["reward_extra_info"]["flawed_positive"]][:n]
    overruled = [not second_opinion(sample["prompt"], sample["response"]) for sample in doubtful]
    return sum(overruled) / max(len(overruled), 1)
