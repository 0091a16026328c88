"""Exercise 2: these tests fail without the term and pass with it."""

from pathlib import Path

import pytest
from reward_term import compute_score, with_progress

import reward_loop

QUESTION = "Ben has 65 eggs, gets 9, loses 8, gets 3. Remainder mod 5?"
WRONG = r"65+9=74, 74-8=66, 66+3=68, Remainder \boxed{3}"  # The third of four paragraphs is wrong.


def score(solution, **settings):
    return compute_score("toy", solution.replace(", ", "\n\n"), "4", {"question": QUESTION}, **settings)


def test_the_sound_beginning_is_rewarded():
    """Of four paragraphs, the first two, all four or only the first come before a wrong one."""
    wrong = score(WRONG)
    sound = score(r"65+9=74, 74-8=66, 66+3=69, Remainder \boxed{4}")
    flawed = score(r"65+9=74, 74-8=76, 76+3=79, Remainder \boxed{4}", share=0.2)
    assert [each["progress"] for each in (wrong, sound, flawed)] == [0.5, 1.0, 0.25]
    assert wrong["score"] == pytest.approx(-0.75) and not wrong["acc"]
    assert sound["score"] == pytest.approx(1.5) and flawed["score"] == pytest.approx(0.05)


def test_an_empty_answer_makes_no_progress():
    empty = score("")
    assert empty["progress"] == 0.0 and empty["score"] == -1.0


@pytest.mark.parametrize("before, after", [(1.0, 1.25), (None, None)])
def test_the_given_result_stays_unchanged(before, after):
    """If the judge is down, the score is None. The term must not replace the missing score."""
    result = {"score": before, "acc": True}
    found = with_progress(result, WRONG.replace(", ", "\n\n"), QUESTION, 0.5)
    assert found == {"score": after, "acc": True, "progress": 0.5}
    assert result == {"score": before, "acc": True}


def test_the_trainer_accepts_the_setting():
    """This test passes before and after the exercise. A misspelt setting is rejected."""
    options = dict(reward_fn=f"{Path(__file__).with_name('reward_term.py')}:compute_score")
    reward_loop.RewardOptions(**options, reward_kwargs='{"share": 0.1}').make_job()
    with pytest.raises(ValueError, match="shares"):
        reward_loop.RewardOptions(**options, reward_kwargs='{"shares": 0.1}').make_job()
