"""Exercise 6: the agent that stopped asking (docs/teaching.md).

In the world with a tool (toy/shop_world.py) the policy can look a price up: it writes "pears?", and the tool
continues with "7". `compute_score` rewards the answer and charges for each look-up. It is the obvious reward,
but it teaches the policy to make its prices up ("pears=4"), because nine of ten guesses are right.

Write `is_grounded`, without an oracle and without the true prices: whether the policy calculated with what
the tool said, and with nothing else. `compute_score` already takes `penalty` from a correct answer that is
not grounded. The turns say who wrote what: {"who": "policy" or "tool", "text": ...}.

    pytest docs/exercises/test_asking.py
    bash recipes/toy_tools.sh 0 outputs/class/asking --reward-fn docs/exercises/asking.py:compute_score
"""

import compute_score as scores
from toy import shop_world


def is_grounded(turns: list[dict]) -> bool:
    """Whether the numbers that the policy adds and subtracts are the tool's answers, in their order.

    A sum is "65+7=72": of 65 and a price that the tool has said before it. The exercise.
    """
    return True


def compute_score(
    data_source, solution_str, ground_truth, extra_info, turns, penalty=1.0, call_cost=0.03
) -> dict:
    """The answer, less the cost of its look-ups, less `penalty` if it is correct but not grounded."""
    result = scores.compute_score(data_source, solution_str, ground_truth)
    calls = sum(turn["who"] == "tool" for turn in turns)
    ungrounded = result["acc"] and not is_grounded(turns)
    seen = shop_world.compute_score_outcome(data_source, solution_str, ground_truth, extra_info, turns)
    result |= {
        "score": result["score"] - call_cost * calls - penalty * ungrounded,
        "calls": calls,
        "ungrounded": ungrounded,
        "truly_correct": seen["truly_correct"],  # by the oracle, which only measures
    }
    return result
