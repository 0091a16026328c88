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

# What the policy writes after the tool's first answer, 7, and after its second answer, 5.
SUMS = {
    "with another price": ("65+9=74\n\n", "74-5=69"),
    "in another order": ("", "65+5=70\n\n70-7=63"),
    "with an additional price": ("65+7=72\n\n72-9=63\n\n", "63-5=58"),
    "with an additional price at the end": ("65+7=72\n\n", "72-5=67\n\n67-9=58"),
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


@pytest.mark.parametrize("sums", SUMS)
def test_other_sums_are_not_grounded(sums):
    first, second = SUMS[sums]
    turns = turns_of(("policy", "pears?"), ("tool", "7"), ("policy", f"\n\n{first}nuts?"), ("tool", "5"))
    turns += turns_of(("policy", f"\n\n{second}\n\nMore \\boxed{{yes}}"))
    assert not is_grounded(turns, QUESTION)


def test_a_wrong_answer_loses_only_the_cost_of_its_calls():
    """This test passes before and after the exercise: only correct answers are penalised."""
    wrong = turns_of(*((turn["who"], turn["text"].replace("yes", "no")) for turn in STATED))
    assert score_of(wrong) == -1.0
