"""How results of a reward function become advantages: unusual numbers, rounding, rounds."""

import copy
import math

import pytest

import grpo_trainer
from algorithm import set_advantages
from played import toy_config, without_ray
from policy import Policy, Sample
from tiny import config_of, terms, worked

HALF = math.sqrt(0.5)  # normalised rewards of two samples, whose std is their distance / sqrt(2)
RIGHT = dict(score=1.0, acc=True, flawed_positive=False, first_wrong=-1, step_scores=[1.0])
WRONG = dict(score=-1.0, acc=False, flawed_positive=False, first_wrong=0, step_scores=[0.0])


def decode(ids):
    return "".join(map(chr, ids))


def sample_of(info, text="ab", prompt_length=2):
    result = {"reward_score": info["score"], "reward_extra_info": info, "status": "ok"}
    ids = [ord(letter) for letter in text]
    return Sample({}, [1] * prompt_length, ids, [-0.5] * len(ids), text, result=result)


def group_of(*infos):
    return [sample_of(info) for info in infos]


def advantages(group, **options):
    set_advantages([group], config_of(**options), decode)
    return [sample.advantage for sample in group]


ODD = [10**400, -(10**400), math.inf, math.nan, "second", [1], {"at": 1}]


@pytest.mark.parametrize("odd", ODD, ids=lambda odd: str(odd)[:6])
@pytest.mark.parametrize(
    "key, options",
    [
        ("first_wrong", worked("spare_good_prefix")),
        ("first_wrong", worked("vppo")),
        ("acc", worked("papo")),
        ("acc", terms(acc=1)),
        ("step_scores", worked("steps")),
    ],
)
def test_an_odd_number_costs_its_sample_the_verdict_and_no_other_sample(key, options, odd):
    said = [odd] if key == "step_scores" else odd
    group = group_of(RIGHT, WRONG | {key: said}, WRONG)
    got = advantages(group, **options)
    assert got[1] is None and group[1].result["status"] == "no_verdict"
    assert group[1].result["reward_score"] is None
    # The other samples are compared as if this sample did not exist.
    assert got[0] > 0 > got[2] and [got[0], got[2]] == advantages(group_of(RIGHT, WRONG), **options)


@pytest.mark.parametrize("options", [worked("spare_good_prefix"), worked("vppo")])
def test_nothing_said_of_the_first_wrong_paragraph_costs_no_verdict(options):
    group = group_of(RIGHT, WRONG | {"first_wrong": None})
    assert None not in advantages(group, **options)


def test_papo_has_no_verdict_on_a_sample_without_acc():
    without = {key: value for key, value in WRONG.items() if key != "acc"}
    group = group_of(RIGHT, WRONG, without, WRONG | {"acc": None})
    assert advantages(group, **worked("papo")) == [pytest.approx(HALF), pytest.approx(-HALF), None, None]


def test_papo_judges_the_reasoning_of_right_answers_alone():
    """A wrong answer that was not judged is wrong, and no flaw of a wrong answer counts among the right."""
    for flawed in (None, True, False):
        group = group_of(RIGHT, RIGHT | {"flawed_positive": True}, WRONG | {"flawed_positive": flawed})
        spread = math.sqrt(4 / 3)  # sample std of 1, 1, -1
        expected = [2 / 3 / spread + HALF, 2 / 3 / spread - HALF, -4 / 3 / spread]
        assert advantages(group, **worked("papo")) == pytest.approx(expected, rel=1e-5)


@pytest.mark.parametrize(
    "options",
    [
        worked("papo"),
        worked("vppo"),
        worked("steps"),
        terms(acc=1),
    ],
    ids=lambda options: options["advantage"].rpartition(":")[2],
)
def test_what_is_said_of_a_sample_without_a_verdict_counts_in_no_mean(options):
    """The reward function may return all other keys although it has no score."""
    silent = RIGHT | {"score": None, "flawed_positive": True, "first_wrong": 1, "step_scores": [7.0]}
    got = advantages(group_of(RIGHT, WRONG, silent), **options)
    assert got == [*advantages(group_of(RIGHT, WRONG), **options), None] and got[0] > 0 > got[1]


def test_a_step_score_ends_with_its_paragraph():
    group = [sample_of(RIGHT, "a\n\nb"), sample_of(WRONG, "a\n\nb")]
    set_advantages([group], config_of(**worked("steps")), decode)
    assert group[0].token_advantages == pytest.approx([2 * HALF] * 3 + [HALF], rel=1e-5)
    assert group[1].token_advantages == pytest.approx([-2 * HALF] * 3 + [-HALF], rel=1e-5)


def test_progress_is_the_last_score_minus_the_one_before():
    """The mean last score is 0.5. Repeating a score, as padding does, earns nothing."""
    padded = RIGHT | {"step_scores": [0.5, 1.0, 1.0, 1.0]}
    group = [sample_of(padded, "a\n\nb\n\nc\n\nd"), sample_of(WRONG | {"step_scores": [1.0, 0.0]}, "a\n\nb")]
    set_advantages([group], config_of(**worked("progress")), decode)
    gains = [[0.5] * 3, [0.5] * 3, [0.0] * 3, [0.0]]
    assert group[0].token_advantages == pytest.approx([HALF + gain for gain in sum(gains, [])], rel=1e-5)
    assert group[1].token_advantages == pytest.approx([-HALF - 0.5] * 3 + [-HALF - 1.0], rel=1e-5)
    group = [sample_of(RIGHT | {"step_scores": [None, 1.0]}, "a\n\nb"), sample_of(WRONG, "a")]
    set_advantages([group], config_of(**worked("progress")), decode)  # The first paragraph has no score.
    assert group[0].token_advantages == pytest.approx([HALF + 0.5] * 4, rel=1e-5)


@pytest.mark.parametrize("cost", [0.003, 0.1])
def test_a_floor_keeps_a_small_term_small(cost):
    """GRPO gives a cost of any size the same advantages. The floor changes no group of mixed answers."""
    cheap, dear = RIGHT, RIGHT | {"score": 1.0 - cost}
    assert advantages(group_of(cheap, dear)) == pytest.approx([HALF, -HALF], rel=1e-3)
    assert advantages(group_of(cheap, dear), **worked("floored")) == pytest.approx([cost, -cost])
    half = dict(worked("floored"), advantage_kwargs='{"floor": 1.0}')
    assert advantages(group_of(cheap, dear), **half) == pytest.approx([cost / 2, -cost / 2])
    for group in (group_of(RIGHT, WRONG), group_of(*[RIGHT] * 7, WRONG)):
        assert advantages(group, **worked("floored")) == advantages(group)


@pytest.mark.parametrize("high, low", [(1e30, 0.0), (1e39, 0.0), (1e300, -1e300), (2.0**24 + 1, 2.0**24)])
def test_large_scores_that_differ_are_told_apart(high, low):
    got = advantages(group_of(RIGHT | {"score": high}, WRONG | {"score": low}))
    assert got == pytest.approx([HALF, -HALF], rel=1e-5)


def test_an_advantage_that_a_policy_cannot_compute_with_is_no_verdict():
    """Dr. GRPO does not divide by the std, and 5e299 is infinite in float32."""
    group = group_of(RIGHT | {"score": 1e300}, WRONG)
    assert advantages(group, advantage="dr_grpo") == [None, None]


def test_a_lost_verdict_may_make_others_lose_theirs(tmp_path):
    """This function has no advantage for the best sample of several."""
    (tmp_path / "own.py").write_text(
        "def mine(groups):\n"
        "    rewards_P_G = groups.rewards_P_G\n"
        "    is_best_P_G = rewards_P_G == rewards_P_G.nan_to_num(-9).amax(1, keepdim=True)\n"
        "    is_best_P_G &= rewards_P_G.isfinite().sum(1, keepdim=True) > 1\n"
        "    return rewards_P_G.masked_fill(is_best_P_G, float('nan'))\n"
    )
    group = group_of(*[RIGHT | {"score": score} for score in (1.0, 2.0, 3.0)])
    assert advantages(group, advantage=f"{tmp_path}/own.py:mine") == [1.0, None, None]


def test_a_score_that_is_too_large_to_compute_with_is_no_verdict():
    """Its sample would have the advantage 0, and count in the token mean."""
    group = group_of(RIGHT, RIGHT | {"score": 1e301}, WRONG)
    assert advantages(group) == [pytest.approx(HALF), None, pytest.approx(-HALF)]
    assert group[1].result["status"] == "no_verdict" and group[1].result["reward_score"] is None


TERMS = terms(acc=1, score=-1)


@pytest.mark.parametrize("size", range(2, 9))
def test_terms_that_cancel_teach_nothing(size):
    """acc and score contain the same information in different units, so only rounding and the 1e-6 differ."""
    group = group_of(RIGHT, *[WRONG] * (size - 1))
    assert set(advantages(group, **TERMS)) == {0}
    assert set_advantages([group], config_of(**TERMS), decode, drop_zero_advantages=True) == []


def test_terms_that_cancel_in_one_group_leave_the_others_as_they_are():
    cancelling = group_of(RIGHT, WRONG)
    useful = group_of(RIGHT | {"score": 1.0}, WRONG | {"score": 1.0})
    set_advantages([cancelling, useful], config_of(**TERMS), decode)
    assert [sample.advantage for sample in cancelling] == [0, 0]
    std = math.sqrt(2 * HALF**2 / 3)  # of HALF, -HALF, 0 and 0
    assert [sample.advantage for sample in useful] == pytest.approx([HALF / std, -HALF / std], rel=1e-5)


@pytest.mark.parametrize("useless", [(), (0,), (0, 1, 2), (0, 1, 2, 4, 5)])
def test_equal_groups_get_equal_advantages_in_whatever_round_they_are_drawn(useless, monkeypatch, tmp_path):
    """With --dynamic-sampling and the example `terms`, the divisor is the std over all groups that train."""
    without_ray(monkeypatch)
    options = dict(terms(acc=1), dynamic_sampling=True, train_batch_size=4)
    rolled_out, trained = [], []

    def roll_out(run, batch, prompts):
        groups = []
        for row, count in prompts:
            number_right = 4 if len(rolled_out) in useless else 2
            said = [copy.deepcopy(RIGHT if number < number_right else WRONG) for number in range(count)]
            groups.append(group_of(*said))
            for sample in groups[-1]:
                sample.row = row
            rolled_out.append(groups[-1])
        return groups

    class Enough(Exception):
        pass

    def update(self, groups, *_):
        trained.extend(groups)
        raise Enough

    monkeypatch.setattr(grpo_trainer, "roll_out", roll_out)
    monkeypatch.setattr(grpo_trainer, "wait_for_rewards", lambda run, batch, groups: groups)
    monkeypatch.setattr(Policy, "update", update)
    with pytest.raises(Enough):
        grpo_trainer.train(toy_config(tmp_path, **options))
    assert len(trained) == 4 and len(rolled_out) == 4 + len(useless)
    got = [sample.advantage for group in trained for sample in group]
    alone = math.sqrt(0.75)  # of 1, 1, 0, 0 with std sqrt(1/3); 16 of them have std sqrt(12/15)
    expected = alone / math.sqrt(12 / 15)
    assert got == pytest.approx([expected, expected, -expected, -expected] * 4, rel=1e-5)


def test_a_samples_token_advantages_end_with_its_response():
    group = [sample_of(RIGHT, "abcde"), sample_of(WRONG | {"first_wrong": 1}, "a\n\nb")]
    set_advantages([group], config_of(**worked("spare_good_prefix")), decode)
    assert group[0].token_advantages == pytest.approx([HALF] * 5, rel=1e-5)
    assert group[1].token_advantages == pytest.approx([0, 0, 0, -HALF], rel=1e-5)
    assert group[1].advantage == group[1].token_advantages[-1]
    # A positive advantage stays, and a paragraph that is missing counts as the last token.
    flawed = sample_of(RIGHT | {"first_wrong": 1}, "a\n\nb")
    missing = sample_of(WRONG | {"first_wrong": 5}, "a\n\nb")
    set_advantages([[flawed, missing]], config_of(**worked("spare_good_prefix")), decode)
    assert flawed.token_advantages == pytest.approx([HALF] * 4, rel=1e-5)
    assert missing.token_advantages == pytest.approx([0, 0, 0, -HALF], rel=1e-5)
    set_advantages([[flawed, missing]], config_of(), decode)  # Nothing of an earlier call is left.
    assert flawed.advantage == pytest.approx(HALF, rel=1e-5) and flawed.token_advantages == []


OF_THE_REST = """
def mine(groups):
    return groups.rewards_P_G[..., None] / (groups.lengths_P_G[..., None] - groups.tokens_T)

def of_padding(groups):
    return (groups.tokens_T >= groups.lengths_P_G[..., None]).double()
"""


def test_the_padding_behind_a_response_does_not_matter(tmp_path):
    """The first function divides by the number of tokens that are left, which is 0 behind the response."""
    (tmp_path / "own.py").write_text(OF_THE_REST)
    group = [sample_of(RIGHT, "ab"), sample_of(WRONG, "abcd")]
    set_advantages([group], config_of(advantage=f"{tmp_path}/own.py:mine"), decode)
    assert group[0].token_advantages == [1 / 2, 1]
    options = config_of(advantage=f"{tmp_path}/own.py:of_padding")
    assert set_advantages([group], options, decode, drop_zero_advantages=True) == []


def test_vppo_rewards_no_prefix_of_a_right_answer():
    """All tokens of a correct answer have the value 1, even if one of its paragraphs is called wrong."""
    group = [sample_of(RIGHT | {"first_wrong": 1}, "a\n\nb"), sample_of(WRONG, "a\n\nb")]
    set_advantages([group], config_of(**worked("vppo", prefix_cut=0.0)), decode)
    assert group[0].token_advantages == [0.5] * 4 and group[1].token_advantages == [-0.5] * 4


@pytest.mark.parametrize("prompt_length, rewarded", [(1, 5), (3, 3), (5, 3), (7, 1)])
def test_the_unrewarded_part_of_a_prefix_is_rounded(prompt_length, rewarded):
    """Half of 1, 3, 5 and 7 prompt tokens is rounded to 0, 2, 2 and 4 of the prefix's 5 tokens."""
    group = []
    for info in (RIGHT, WRONG | {"first_wrong": 1}):
        group.append(sample_of(info, "abc\n\nd", prompt_length))
    options = worked("vppo", prefix_cut=0.5, prefix_reward=0.6)
    set_advantages([group], config_of(**options), decode)
    mean = (1 + 0.6 * rewarded / 6) / 2
    expected = [0.6 - mean] * rewarded + [-mean] * (6 - rewarded)
    assert group[1].token_advantages == pytest.approx(expected)


@pytest.mark.parametrize(
    "advantage", ["grpo", "dr_grpo", *(worked(name)["advantage"] for name in ("papo", "vppo"))]
)
def test_dynamic_sampling_drops_groups_that_differ_in_the_length_penalty_alone(advantage):
    group = group_of(RIGHT, RIGHT | {"overlong_penalty": -0.5})
    group[1].result["reward_score"] = 0.5
    options = config_of(advantage=advantage)
    assert set_advantages([group], options, decode, drop_zero_advantages=True) == []
    assert [sample.advantage for sample in group] == [None, None]
    assert set_advantages([group], options, decode) == [group]  # otherwise it would learn from lengths
    assert group[0].advantage > 0.2 and group[1].advantage < -0.2
