"""The functions in docs/judges.py with scripted judges."""

import asyncio
import json
import sys
from collections import Counter
from pathlib import Path
from types import SimpleNamespace

import pytest
from test_group_rewards import served
from test_reward_loop import critic, serve  # noqa: F401  (serve is a fixture)

sys.path.append(str(Path(__file__).parent.parent / "docs"))
import algorithm
import judges
from compute_score import close_session
from policy import Sample
from reward_loop import RewardOptions, row_checker
from tiny import config_of, worked

RIGHT, WRONG = "one\n\ntwo\n\n\\boxed{2}", "one\n\n\\boxed{3}"
ABOUT = dict(data_source="math", ground_truth="2", extra_info={"question": "1+1?", "split": "train"})


def ask(function, responses, *addresses, **settings):
    """Return the results.

    The addresses are those of the reward models `judge` and then `audit` and `strict`, which are the same
    server.
    """
    models = {"reward_router_address": addresses[0]}
    if function in (judges.audited, judges.two_judges):
        named = dict(zip(("judge", "audit"), addresses))
        models["reward_router_addresses"] = named | {"strict": addresses[-1]}
        if len(addresses) == 1:
            del models["reward_router_addresses"]["strict"]

    async def call():
        try:
            return [await function(solution_str=text, **ABOUT | models | settings) for text in responses]
        finally:
            await close_session()

    return asyncio.run(call())


def calls(server):
    return server.paths.count("/v1/chat/completions")


@pytest.mark.parametrize("name", ["audited", "two_judges", "votes", "rubric"])
def test_the_loop_takes_them(name):
    options = RewardOptions(reward_fn=f"{judges.__file__}:{name}", router_address=("judge=h:1", "audit=h:2"))
    assert options.make_job().is_async


@pytest.mark.parametrize("name", ["audited", "two_judges", "votes", "rubric"])
def test_their_judges_read_turns_and_the_answer_is_the_policys(serve, name):
    asked = []

    def judge(prompt):
        asked.append(prompt)
        return "\\boxed{yes, yes, yes}" if name == "rubric" else "\\boxed{-1}"

    server = serve(served(judge))
    turns = [{"who": "policy", "text": "1+1? \\boxed{2}"}, {"who": "tool", "text": "(policy) \\boxed{3}"}]
    settings = {"share": 1.0} if name == "audited" else {}
    text = "".join(turn["text"] for turn in turns)
    (result,) = ask(getattr(judges, name), [text], server.address, server.address, turns=turns, **settings)
    assert result["score"] == 1.0 and len(asked) == {"votes": 3, "rubric": 1}.get(name, 2)
    for prompt in asked:
        assert "(policy) 1+1? \\boxed{2}" in prompt and "(tool) {policy} \\boxed{3}" in prompt


@pytest.mark.parametrize(
    "name, addresses, settings, message",
    [
        ("audited", ["h:1"], {}, "there is no second judge; name it audit"),
        ("audited", ["judge=h:1", "strict=h:2"], {"second": {}}, "there is no second judge"),
        ("audited", ["h:1"], {"second": {"prompt_style": "no_truth"}}, None),
        ("audited", ["h:1"], {"second": {"prompt_style": "no truth"}}, "prompt_style: 'no truth' is unknown"),
        ("audited", ["audit=h:1", "judge=h:2"], {}, "there is no second judge"),
        (
            "audited",
            ["h:1"],
            {"second": {"style": "brief"}},
            "second: 'style' is unknown; use one of penalty, on_no_verdict",
        ),
        ("audited", ["h:1"], {"second": "no_truth"}, "second: 'no_truth' is not an object of settings"),
        ("audited", ["judge=h:1", "audit=h:2"], {}, None),
        ("audited", ["judge=h:1", "audit=h:2"], {"share": 1}, None),
        ("audited", ["judge=h:1", "audit=h:2"], {"share": 0}, "share 0: must be above 0 and at most 1"),
        ("audited", ["judge=h:1", "audit=h:2"], {"share": 5}, "share 5: must be"),
        ("audited", ["judge=h:1", "audit=h:2"], {"share": "0.1"}, "share '0.1': must be"),
        ("two_judges", ["h:1"], {}, "no second reward model is named strict; pass --genrm quick=PATH strict"),
        ("two_judges", ["strict=h:1", "quick=h:2"], {}, "no second reward model is named strict"),
        ("two_judges", ["quick=h:1", "strict=h:2"], {}, None),
        ("two_judges", ["quick=h:1", "strict=h:2"], {"strict": {"genrm_model": "big"}}, None),
        ("two_judges", ["quick=h:1", "strict=h:2"], {"strict": "big"}, "strict: 'big' is not an object"),
        (
            "two_judges",
            ["quick=h:1", "strict=h:2"],
            {"strict": {"model": "big"}},
            "strict: 'model' is unknown",
        ),
        ("two_judges", ["quick=h:1", "strict=h:2"], {"strict": {"turns": []}}, "strict: 'turns' is unknown"),
        ("two_judges", ["quick=h:1", "strict=h:2"], {"strict": {"genrm_model": 5}}, "genrm_model: 5 is not"),
        ("votes", ["h:1"], {"k": 1}, None),
        ("votes", ["h:1"], {"k": 0}, "k 0: must be a whole number of at least 1"),
        ("votes", ["h:1"], {"k": 2.5}, "k 2.5: must be"),
        (
            "votes",
            ["h:1"],
            {"genrm_temperature": 0},
            "genrm_temperature 0: all k critiques would be the same",
        ),
        (
            "audited",
            ["h:1"],
            {"second": {"genrm_temperature": "0"}},
            "genrm_temperature: '0' is not a number",
        ),
        ("rubric", ["h:1"], {}, None),
        ("rubric", ["h:1"], {"points": ["Is it polite?"], "weight": 0.5, "max_tokens": 9}, None),
        ("rubric", ["h:1"], {"points": "Is it polite?"}, "points: 'Is it polite.' is not a list of texts"),
        ("rubric", ["h:1"], {"points": []}, r"points: \[\] is not a list of texts"),
        ("rubric", ["h:1"], {"points": [5]}, r"points: \[5\] is not a list of texts"),
        ("rubric", ["h:1"], {"weight": "0.5"}, "weight: '0.5' is not a number"),
        ("rubric", ["h:1"], {"max_tokens": "9"}, "max_tokens: '9' is not a whole number above 0"),
        ("rubric", ["h:1"], {"temperature": "0"}, "temperature: '0' is not a number of at least 0"),
    ],
)
def test_a_run_that_lacks_a_judge_or_a_setting_is_rejected_before_it_starts(
    name, addresses, settings, message
):
    options = RewardOptions(
        reward_fn=f"{judges.__file__}:{name}",
        router_address=tuple(addresses),
        reward_kwargs=json.dumps(settings),
    )
    check_row = row_checker(options.make_job())
    row = {name: ABOUT[name] for name in ("data_source", "extra_info")}
    row["reward_model"] = {"ground_truth": ABOUT["ground_truth"]}
    if message is None:
        check_row(row)
        return
    with pytest.raises(ValueError, match=message):
        check_row(row)


@pytest.mark.parametrize("name", ["audited", "two_judges", "votes"])
def test_all_verdicts_on_an_answer_share_one_time_limit(serve, monkeypatch, name):
    """Otherwise the reward loop's limit would cut off the call, and the first verdict would be lost.

    The simulated clock says that the first verdict took 59 of the 60 s.
    """

    async def handler(request):
        if calls(server) > 1:
            await asyncio.sleep(3)
        return await critic(request)

    server = serve(handler)
    monkeypatch.setattr(judges, "time", SimpleNamespace(monotonic=iter((100.0, 159.0)).__next__))
    settings = {"share": 1.0, "second": {"genrm_timeout_s": 50}} if name == "audited" else {}
    (result,) = ask(
        getattr(judges, name), [RIGHT], server.address, server.address, genrm_timeout_s=60, **settings
    )
    assert calls(server) == (3 if name == "votes" else 2)
    if name == "audited":
        assert result["score"] == 1.0 and not result["audited"] and result["audit_status"] == "timeout"
    else:
        assert result["score"] is None and result["genrm_status"] == "timeout"


@pytest.mark.parametrize("points", ["Is it polite?", [""], [5], {"a": "b"}])
def test_a_row_whose_checklist_is_no_list_of_texts_is_rejected(points):
    row = {"data_source": "math", "reward_model": {"ground_truth": "2"}}
    for fits in (None, [], ["Is it polite?"]):  # Without points, the row gets those of the settings.
        row["extra_info"] = {"question": "1+1?", "rubric": fits}
        judges.rubric.check_row(row, {"reward_router_address": "h:1"})
    row["extra_info"] = {"question": "1+1?", "rubric": points}
    with pytest.raises(ValueError, match="^extra_info.'rubric'.: .* is not a list of texts"):
        judges.rubric.check_row(row, {"reward_router_address": "h:1"})


# ---- audited


def test_a_share_of_what_the_judge_lets_pass_is_asked_of_a_second_one(serve):
    first = serve(served(lambda prompt: "\\boxed{0}" if "caught" in prompt else "\\boxed{-1}"))
    second = serve(served(lambda prompt: "\\boxed{1}" if "hidden" in prompt else "\\boxed{-1}"))
    responses = []
    for number in range(400):
        kind = ("sound", "hidden", "caught", "wrong")[number % 4]
        responses.append(f"{kind} {number}\n\ntwo\n\n\\boxed{{{3 if kind == 'wrong' else 2}}}")
    results = ask(judges.audited, responses, first.address, second.address, share=0.2, step=7)
    assert calls(first) == 300 and 20 < calls(second) < 60  # a fifth of 200
    assert sum(result["audited"] for result in results) == calls(second)
    for text, result in zip(responses, results):
        assert result["score"] == {"sound": 1, "hidden": 1, "caught": 0, "wrong": -1}[text.split()[0]]
        assert result["audited"] == ("audit_flawed" in result)
        if result["audited"]:
            assert result["audit_flawed"] == text.startswith("hidden")
        assert not (result["audited"] and text.startswith(("caught", "wrong")))
    judges.seen.clear()  # a new run
    again = ask(judges.audited, responses, first.address, second.address, share=0.2, step=7)
    assert again == results  # drawn at random, but identical
    other = ask(judges.audited, responses, first.address, second.address, share=0.2, step=8)
    assert [result["audited"] for result in other] != [result["audited"] for result in results]
    json.dumps(results)


def test_of_equal_answers_each_has_its_own_chance():
    drawn = [judges.is_drawn(0.05, 1, "1+1?", RIGHT) for _ in range(2000)]
    assert 60 < sum(drawn) < 140


def test_the_same_judge_may_be_asked_in_other_words_and_a_failure_is_no_opinion(serve):
    server = serve(served(lambda prompt: "\\boxed{-1}" if "<paragraph" in prompt else "\\boxed{1}"))
    (result,) = ask(judges.audited, [RIGHT], server.address, share=1.0, second={"prompt_style": "raw"})
    assert result["audited"] and result["audit_flawed"] and result["score"] == 1.0
    down = serve(served(lambda prompt: 400))
    (result,) = ask(judges.audited, [RIGHT], server.address, down.address, share=1.0)
    assert not result["audited"] and "audit_flawed" not in result and result["score"] == 1.0
    assert result["audit_status"] == "http_error"
    (result,) = ask(judges.audited, [RIGHT], server.address, down.address, share=1.0, on_no_verdict="rule")
    assert not result["audited"] and "audit_flawed" not in result and result["score"] == 1.0
    for share in (0, 5):
        with pytest.raises(ValueError, match="share .: must be above 0 and at most 1"):
            ask(judges.audited, [RIGHT], server.address, share=share)


# ---- two judges


def test_the_strict_judge_is_asked_where_the_quick_one_finds_nothing(serve):
    quick = serve(served(lambda prompt: "\\boxed{0}" if "coarse" in prompt else "\\boxed{-1}"))
    strict = serve(served(lambda prompt: "\\boxed{1}" if "fine" in prompt else "\\boxed{-1}"))
    responses = [f"{kind} slip\n\n\\boxed{{2}}" for kind in ("coarse", "fine", "no")] + [WRONG]
    results = ask(judges.two_judges, responses, quick.address, strict.address)
    assert [result["score"] for result in results] == [0.0, 0.0, 1.0, -1.0]
    assert [result["first_wrong"] for result in results] == [0, 1, -1, None]
    assert [result["strict_asked"] for result in results] == [False, True, True, False]
    assert (calls(quick), calls(strict)) == (3, 2)


def test_the_strict_judge_has_its_own_settings(serve):
    quick, strict = serve(served(lambda prompt: "\\boxed{-1}")), serve(served(lambda prompt: "\\boxed{1}"))
    settings = {"genrm_model": "small", "genrm_max_tokens": 9, "strict": {"genrm_model": "big"}}
    (result,) = ask(judges.two_judges, [RIGHT], quick.address, strict.address, **settings)
    assert result["strict_asked"] and result["flawed_positive"]
    asked = [(body["model"], body["max_tokens"]) for body in quick.requests + strict.requests]
    assert asked == [("small", 9), ("big", 9)]


def test_without_the_strict_judges_word_there_is_no_verdict(serve):
    quick, strict = serve(served(lambda prompt: "\\boxed{-1}")), serve(served(lambda prompt: "hm"))
    (result,) = ask(judges.two_judges, [RIGHT], quick.address, strict.address)
    assert result["score"] is None and result["genrm_status"] == "unparsable"


# ---- votes


@pytest.mark.parametrize(
    "said, verdict",
    [
        ("1 -1 1", (0.0, True, 1, 2 / 3)),
        ("-1 -1 -1", (1.0, False, -1, 1.0)),
        ("-1 -1 ?", (1.0, False, -1, 2 / 3)),  # two of three, although one gave no verdict
        ("-1 1 ?", (None, None, None, None)),
        ("? ? -1", (None, None, None, None)),
    ],
)
def test_most_of_three_votes(serve, said, verdict):
    left = said.split()
    server = serve(served(lambda prompt: f"\\boxed{{{left.pop()}}}"))
    (result,) = ask(judges.votes, [RIGHT], server.address)
    keys = ("score", "flawed_positive", "first_wrong", "genrm_agreement")
    assert tuple(result.get(key) for key in keys) == verdict and not left
    assert (result["genrm_status"] == "ok") == (verdict[0] is not None)


def test_a_vote_that_fails_is_none_for_sound_where_the_rule_steps_in(serve):
    left = [400, 400, "\\boxed{1}"]
    server = serve(served(lambda prompt: left.pop()))
    (result,) = ask(judges.votes, [RIGHT], server.address, on_no_verdict="rule")
    assert result["flawed_positive"] is None and "genrm_agreement" not in result and not left
    left = ["\\boxed{-1}", "\\boxed{1}", "\\boxed{1}"]
    (result,) = ask(judges.votes, [WRONG], server.address, judge_wrong=True)
    assert (result["score"], result["first_wrong"], result["flawed_positive"]) == (-1.0, 1, False)


@pytest.mark.parametrize(
    "said, first_wrong, agreement", [("1 1 -1", 1, 2 / 3), ("0 -1 -1", -1, 2 / 3), ("? 0 -1", None, None)]
)
def test_votes_on_a_wrong_answer_are_about_its_steps(serve, said, first_wrong, agreement):
    left = said.split()
    server = serve(served(lambda prompt: f"\\boxed{{{left.pop()}}}"))
    wrong = "one\n\ntwo\n\n\\boxed{3}"
    (result,) = ask(judges.votes, [wrong], server.address, judge_wrong=True)
    assert (result["first_wrong"], result.get("genrm_agreement")) == (first_wrong, agreement)
    assert (result["score"], result["flawed_positive"], left) == (-1.0, False, [])


@pytest.mark.parametrize("critiques", [["\\boxed{-1}", "\\boxed{1}", 400], [400, "\\boxed{1}", "hm"]])
def test_without_a_majority_the_rule_decides_the_score_where_told(serve, critiques):
    for on_no_verdict, score in (("none", None), ("rule", 1.0)):
        left = critiques[:]
        server = serve(served(lambda prompt: left.pop()))
        (result,) = ask(judges.votes, [RIGHT], server.address, on_no_verdict=on_no_verdict)
        assert (result["score"], result["flawed_positive"], left) == (score, None, [])
        assert result["genrm_status"] != "ok"


def test_wrong_answers_cost_no_vote_and_equal_votes_are_refused(serve):
    server = serve(served(lambda prompt: "\\boxed{-1}"))
    (result,) = ask(judges.votes, [WRONG], server.address, k=5)
    assert result["score"] == -1.0 and calls(server) == 0
    with pytest.raises(ValueError, match="genrm_temperature 0: "):
        ask(judges.votes, [RIGHT], server.address, genrm_temperature=0)


def test_without_a_majority_a_judge_that_only_measures_changes_no_score(serve):
    server = serve(served(lambda prompt: "hm"))
    test = ABOUT["extra_info"] | {"split": "test"}
    (result,) = ask(judges.votes, [RIGHT], server.address, extra_info=test, judge_test=True)
    assert result["score"] == 1.0 and result["flawed_positive"] is None and calls(server) == 3
    left = ["1", "-1"]
    server = serve(served(lambda prompt: f"\\boxed{{{left.pop()}}}"))
    (result,) = ask(judges.votes, [RIGHT], server.address, penalty=None, k=2)
    assert result["score"] == 1.0 and result["flawed_positive"] is None and not left


# ---- rubric


def test_a_checklist_is_graded(serve):
    met = {"good": "yes, yes, yes", "fair": "yes, no, Yes", "poor": "no, no, no", "silent": "yes, no"}

    def judge(prompt):
        assert "1+1?" in prompt and "1. Every step" in prompt and "3. The answer" in prompt
        (name,) = [name for name in met if name in prompt]
        return f"Let me see. \\boxed{{{met[name]}}}"

    server = serve(served(judge))
    for unclear in ("unknown, unknown, unknown", "yes, cannot tell, yes", "not applicable, yes, yes"):
        assert judges.read_marks(f"\\boxed{{{unclear}}}", 3) == {}
    draft = "<think>\\boxed{yes, no, yes}</think>"
    assert judges.read_marks(draft + "It depends.", 3) == {}
    assert judges.read_marks(draft + "\\boxed{no, no, yes}", 3) == {
        "met_1": False,
        "met_2": False,
        "met_3": True,
    }
    responses = [f"{name}\n\n\\boxed{{2}}" for name in met] + [WRONG]
    results = ask(judges.rubric, responses, server.address, weight=0.6)
    assert [result["score"] for result in results] == pytest.approx([1.0, 0.8, 0.4, None, -1.0])
    shares = [result["flawed_positive"] for result in results]
    assert shares == pytest.approx([0, 1 / 3, 1, None, False])
    assert results[1]["met_1"] and not results[1]["met_2"] and results[3]["genrm_status"] == "unparsable"
    assert calls(server) == 4
    # PAPO uses this: the better the reasoning of a correct answer, the larger its advantage.
    group = []
    for result in results:
        whole = {"reward_score": result["score"], "reward_extra_info": result, "status": "ok"}
        group.append(Sample({}, [], [6], result=whole))
    algorithm.set_advantages([group], config_of(**worked("papo")), None)
    good, fair, poor, silent, wrong = [sample.advantage for sample in group]
    assert good > fair > poor > wrong and silent is None


def test_a_row_may_have_a_checklist_of_its_own(serve):
    asked = Counter()

    def judge(prompt):
        asked.update(["1. Is it polite?" in prompt])
        return "\\boxed{\\text{no}}"

    server = serve(served(judge))
    extra = {"question": "1+1?", "rubric": ["Is it polite?"]}
    (result,) = ask(judges.rubric, [RIGHT], server.address, extra_info=extra)
    assert asked == {True: 1} and result["score"] == 0.0 and result["met_1"] is False
    (result,) = ask(judges.rubric, [RIGHT], server.address, extra_info=extra | {"split": "test"})
    assert result["score"] == 1.0 and calls(server) == 1
    assert result["flawed_positive"] is None  # not judged, so excluded from the rate
