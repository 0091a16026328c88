"""Exercise 3: a judge that can be hacked, and an audit that detects the hacking (docs/teaching.md).

`compute_score` is correct as given. It is FAPO with a judge that knows forgotten carries and no other errors.
A policy trained with this judge soon seems to make no errors. `missed_by_judge` should raise an alarm, but it
never does, because it re-checks the answers that the judge flagged. Fix it: consider the correct answers
(`acc`) in which the judge found no flaw, draw `n` of them at random (or all, if there are fewer), and return
the fraction that the second judge calls flawed.

    pytest docs/exercises/test_audit.py
    python grpo_trainer.py ... --reward-fn docs/exercises/audit.py:audited
"""

import random
import re

import compute_score as scores
from toy import toy_world


def narrow_verdict(solution: str) -> int:
    """Return the index of the first paragraph with a forgotten carry, or -1 if there is none."""
    for index, line in enumerate(scores.split_paragraphs(solution)):
        parts = re.fullmatch(r"(\d+)([+-]\d+)=(\d+)", line)
        if parts and int(parts[3]) == toy_world.forgets_carry(int(parts[1]), int(parts[2])):
            return index
    return -1


def compute_score(data_source, solution_str, ground_truth, extra_info, penalty=1.0) -> dict:
    """Score with FAPO and this judge.

    The oracle's verdict (`oracle_flawed_positive`) is recorded but does not affect the score.
    """
    rule = scores.compute_score(data_source, solution_str, ground_truth)
    first_wrong = narrow_verdict(solution_str)
    flawed = rule["acc"] and first_wrong != -1
    score = rule["score"] - penalty * flawed
    result = rule | {"score": score, "flawed_positive": flawed, "first_wrong": first_wrong}
    return toy_world.with_oracle(result, solution_str, extra_info)


def audited(data_source, solution_str, ground_truth, extra_info, share=0.05) -> dict:
    """Score with `compute_score`, and audit a fraction `share` of the answers that the judge accepts.

    The oracle is the second judge. The finding `reward-hacking` uses `audited` and `audit_flawed`. In
    docs/judges.py, a function of the same name audits with two served judges.
    """
    result = compute_score(data_source, solution_str, ground_truth, extra_info)
    passed = result["acc"] and not result["flawed_positive"]
    result["audited"] = passed and random.random() < share
    if result["audited"]:
        result["audit_flawed"] = result["oracle_flawed_positive"]
    return result


def missed_by_judge(samples: list[dict], second_opinion, n: int = 100) -> float:
    """Return the fraction of the accepted correct answers that a second judge calls flawed.

    If there are no such answers, it is 0.0. This function is the exercise.

    Args:
        samples: Lines of samples.jsonl.
        second_opinion: second_opinion(question, solution) returns whether the solution is flawed. Calls are
            expensive, because the second judge is a larger model or a person.
        n: Maximum number of calls.
    """
    doubtful = [sample for sample in samples if sample["reward_extra_info"]["flawed_positive"]][:n]
    overruled = [not second_opinion(sample["prompt"], sample["response"]) for sample in doubtful]
    return sum(overruled) / max(len(overruled), 1)
