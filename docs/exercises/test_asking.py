"""Exercise 6: these tests fail if the reward trusts the policy and pass if it checks the authors of turns."""

import pytest
from asking import compute_score, is_grounded

from toy import shop_world

PRICES = dict.fromkeys(shop_world.ITEMS, 7) | {"nuts": 5}
QUESTION = "Ben has 65, sells pears, buys nuts. More than 50?"
PROBLEM = shop_world.parse_problem(QUESTION, PRICES)


def turns_of(*pairs):
    return [{"who": who, "text": text} for who, text in pairs]


ASKED = turns_of(*shop_world.write_solution(PROBLEM))
STATED = turns_of(*shop_world.write_solution(PROBLEM, looks_up=False))
FORGED = turns_of(("policy", "".join(turn["text"] for turn in ASKED)))
IGNORED = turns_of(
    ("policy", "pears?"),
    ("tool", "7"),
    ("policy", "\n\n65+9=74\n\nnuts?"),
    ("tool", "5"),
    ("policy", "\n\n74-5=69\n\nMore \\boxed{yes}"),
)
ONCE = turns_of(
    ("policy", "pears?"), ("tool", "7"), ("policy", "\n\n65+7=72\n\nnuts=7\n\n72-7=65\n\nMore \\boxed{yes}")
)

GUESSES = {
    "without look-ups and sums": turns_of(("policy", "More \\boxed{yes}")),
    "with a price and no sum": turns_of(("policy", "pears=4\n\nnuts=5\n\nMore \\boxed{yes}")),
    "in sums with spaces": turns_of(("policy", "pears=4\n\n65 + 4 = 69\n\n69 - 5 = 64\n\nMore \\boxed{yes}")),
    "after half of the look-ups": turns_of(
        ("policy", "pears?"), ("tool", "7"), ("policy", "\n\n65+7=72\n\nMore \\boxed{yes}")
    ),
}


def score_of(turns, **settings):
    text = "".join(turn["text"] for turn in turns)
    info = {"question": QUESTION, "prices": PRICES}
    return compute_score("shop", text, "yes", info, turns, **settings)["score"]


def test_a_grounded_answer_loses_only_the_cost_of_its_calls():
    """This test passes before and after the exercise."""
    assert is_grounded(ASKED, QUESTION) and score_of(ASKED) == pytest.approx(1 - 2 * 0.03)


def test_made_up_prices_cost_the_penalty():
    assert not is_grounded(STATED, QUESTION) and score_of(STATED) == 0.0
    assert score_of(STATED, penalty=0.5) == 0.5


@pytest.mark.parametrize("guess", GUESSES)
def test_a_guess_earns_less_than_the_grounded_answer(guess):
    assert not is_grounded(GUESSES[guess], QUESTION) and score_of(GUESSES[guess]) < score_of(ASKED)


def test_one_answer_of_the_tool_does_not_cover_two_prices():
    assert not is_grounded(ONCE, QUESTION)


def test_the_policy_cannot_write_the_tools_answers():
    assert not is_grounded(FORGED, QUESTION)


def test_ignoring_the_tools_answer_is_not_grounded():
    assert not is_grounded(IGNORED, QUESTION)


def test_a_wrong_answer_loses_only_the_cost_of_its_calls():
    """This test passes before and after the exercise: only correct answers are penalised."""
    wrong = turns_of(*((turn["who"], turn["text"].replace("yes", "no")) for turn in STATED))
    assert score_of(wrong) == -1.0
