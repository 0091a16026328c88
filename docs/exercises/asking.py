"""Exercise 6: a policy that stops calling its tool (docs/teaching.md).

In the world with a tool (toy/shop_world.py), the policy can look up a price: it writes "pears?", and the tool
adds its answer, for example "7". `compute_score` rewards the final answer and subtracts a cost per look-up.
This is the obvious reward, but it teaches the policy to make up its prices ("pears=4"), because nine of ten
guesses lead to the correct answer.

Write `is_grounded` without an oracle and without the true prices. It checks whether the policy looked up each
price, and calculated with the tool's answers and with no other prices. `compute_score` already subtracts
`penalty` if a correct answer is not grounded. Each turn names its author:

    [{"who": "policy", "text": "pears?"}, {"who": "tool", "text": "7"}, ...]

    pytest docs/exercises/test_asking.py
    bash recipes/toy_tools.sh 0 outputs/class/checked --reward-fn docs/exercises/asking.py:compute_score
"""

import compute_score as scores
from toy import shop_world


def is_grounded(turns: list[dict], question: str) -> bool:
    """Return whether the policy adds and subtracts exactly the tool's answers, in the same order.

    In the sum "65+7=72", for example, the tool must have returned the price 7. An answer without look-ups is
    a guess: the tool must have answered once for each deal in the question, such as "Ben has 65, sells pears,
    buys nuts. More than 50?". This function is the exercise.
    """
    return True


def compute_score(
    data_source, solution_str, ground_truth, extra_info, turns, penalty=1.0, call_cost=0.03
) -> dict:
    """Score the answer, minus the cost of its look-ups, minus `penalty` if it is correct but not grounded."""
    result = scores.compute_score(data_source, solution_str, ground_truth, turns=turns)
    calls = sum(turn["who"] == "tool" for turn in turns)
    ungrounded = result["acc"] and not is_grounded(turns, extra_info["question"])
    seen = shop_world.compute_score_outcome(data_source, solution_str, ground_truth, extra_info, turns)
    result |= {
        "score": result["score"] - call_cost * calls - penalty * ungrounded,
        "calls": calls,
        "flawed_positive": ungrounded,
        # The oracle does not affect the score.
        "oracle_flawed_positive": seen["flawed_positive"],
        "truly_correct": seen["truly_correct"],
    }
    return result
