"""The examples in docs/group_rewards.py: scores computed by hand, and a scripted judge."""

import asyncio
import contextlib
import json
import random
import sys
from collections import Counter
from pathlib import Path

import pytest
from aiohttp import web
from played import says
from test_reward_loop import serve  # noqa: F401  (a fixture)

sys.path.append(str(Path(__file__).parent.parent / "docs"))
import group_rewards
from compute_score import close_session
from reward_loop import RewardOptions, row_checker

ABOUT = dict(data_source="math", ground_truth="2", extra_info={"question": "1+1?", "split": "train"})
NAMES = ("listwise_judge", "majority_vote", "rule_and_variety", "fapo_against_others")


def of_all(results, key):
    return [result.get(key) for result in results]


def ask(function, responses, **settings):
    async def call():
        try:
            return await function(solution_strs=responses, **ABOUT | settings)
        finally:
            await close_session()

    return asyncio.run(call())


@pytest.mark.parametrize("name", NAMES)
def test_the_loop_takes_them_as_functions_of_groups(name):
    file = Path(group_rewards.__file__)
    job = RewardOptions(reward_fn=f"{file}:{name}", router_address=("h:1",)).make_job()
    assert job.sees_group and job.is_async == (name in ("listwise_judge", "fapo_against_others"))


@pytest.mark.parametrize(
    "settings, judge, error",
    [
        ("{}", ("h:1",), ""),
        ("{}", (), "needs a judge; pass --genrm"),
        ('{"penalty": "x"}', ("h:1",), "penalty: 'x' is not a number"),
        ('{"on_no_verdict": "rul"}', ("h:1",), "on_no_verdict"),
    ],
)
def test_settings_of_fapo_against_others_are_checked_before_a_run(settings, judge, error):
    function = f"{group_rewards.__file__}:fapo_against_others"
    options = RewardOptions(reward_fn=function, reward_kwargs=settings, router_address=judge)
    check_row = row_checker(options.make_job())
    row = {"data_source": "math", "reward_model": {"ground_truth": "2"}, "extra_info": ABOUT["extra_info"]}
    with pytest.raises(ValueError, match=error) if error else contextlib.nullcontext():
        check_row(row)


def test_majority_vote():
    responses = ["\\boxed{3}", "so \\boxed{2}", "\\boxed{ 3 }", "I do not know", "\\boxed{4}"]
    results = group_rewards.majority_vote(solution_strs=responses, **ABOUT)
    assert of_all(results, "score") == [1.0, -1.0, 1.0, -1.0, -1.0]
    assert of_all(results, "acc") == [False, True, False, False, False]  # the label does not know this
    assert of_all(results, "group_label") == ["3"] * 5 and of_all(results, "group_votes") == [0.4] * 5
    assert of_all(results, "group_label_right") == [False] * 5
    results = group_rewards.majority_vote(solution_strs=responses[1:2] + responses, **ABOUT)
    assert of_all(results, "group_label_right") == [True] * 6  # with two votes each, the first one wins
    results = group_rewards.majority_vote(solution_strs=responses, **ABOUT | {"ground_truth": ""})
    assert of_all(results, "score") == [1.0, -1.0, 1.0, -1.0, -1.0] and of_all(results, "acc") == [None] * 5
    # An empty box is not a vote.
    for nothing in (["no", "idea"], ["\\boxed{}", "\\boxed{ }", "\\boxed{}", "no"]):
        results = group_rewards.majority_vote(solution_strs=nothing, **ABOUT)
        assert set(of_all(results, "score")) == set(of_all(results, "group_label")) == {None}
    results = group_rewards.majority_vote(solution_strs=["\\boxed{}", "\\boxed{}", "\\boxed{2}"], **ABOUT)
    assert of_all(results, "score") == [-1.0, -1.0, 1.0]
    results = group_rewards.majority_vote(solution_strs=["no", "idea"], **ABOUT)
    assert of_all(results, "score") == of_all(results, "group_label") == [None, None]


@pytest.mark.parametrize(
    "answers, scores",
    [
        (["neither", "neither", r"\text{Even}", "even", "Even"], [-1, -1, 1, 1, 1]),
        (["5 km", "5 cm", "5 cm", "7"], [-1, 1, 1, -1]),
        (["5 cm", "5", "7", "7", "5 cm"], [1, 1, -1, -1, 1]),
        (["5 km", "5 cm", "5 cm", "5"], [-1, 1, 1, 1]),
    ],
)
def test_votes_are_for_the_same_answer_if_the_rule_says_so(answers, scores):
    for _ in answers:  # in any order
        answers, scores = answers[1:] + answers[:1], scores[1:] + scores[:1]
        responses = [f"\\boxed{{{answer}}}" for answer in answers]
        results = group_rewards.majority_vote(solution_strs=responses, **ABOUT | {"ground_truth": ""})
        assert of_all(results, "score") == scores


def test_rule_and_variety():
    # The sequences of two words are "a b", "b \boxed{2}" | "a b", "b \boxed{1}" | only "\boxed{2}".
    responses = ["a b \\boxed{2}", "a b \\boxed{1}", "\\boxed{2}"]
    results = group_rewards.rule_and_variety(solution_strs=responses, penalty=0.5, words=2, **ABOUT)
    assert of_all(results, "score") == [0.75, -1.25, 1.0] and of_all(results, "repeated") == [0.5, 0.5, 0.0]
    results = group_rewards.rule_and_variety(solution_strs=["a \\boxed{2}"] * 2, **ABOUT)  # under 8 words
    assert of_all(results, "score") == [0.5, 0.5]


def served(prompt_to_text):
    """Serve a judge that writes what `prompt_to_text` returns for a prompt: a text or an HTTP status."""

    async def handler(request):
        if request.path == "/v1/models":
            return web.json_response({"data": [{"id": "judge"}]})
        said = prompt_to_text((await request.json())["messages"][0]["content"])
        if isinstance(said, str):
            return web.json_response(says(said))
        return web.Response(status=said)

    return handler


def test_a_listwise_judge_is_asked_once_for_a_group(serve):
    marks = {"good \\boxed{2}": "0.9", "fair \\boxed{2}": ".5", "bad \\boxed{3}": "0"}
    orders = set()

    def judge(prompt):
        shown = sorted(marks, key=prompt.find)  # the order is random
        orders.add(tuple(shown))
        assert all(f"[Solution {i}]\n\n{text}" in prompt for i, text in enumerate(shown, 1))
        return f"The first ... \\boxed{{{', '.join(marks[text] for text in shown)}}}"

    server = serve(served(judge))
    responses = [*marks, "bad \\boxed{3}"]
    results = ask(group_rewards.listwise_judge, responses, reward_router_address=server.address)
    assert of_all(results, "score") == [0.9, 0.5, 0.0, 0.0]
    assert server.paths.count("/v1/chat/completions") == 1 and "1+1?" in str(server.requests)
    assert of_all(results, "acc") == [True, True, False, False]
    assert of_all(results, "group_status") == ["ok"] * 4
    assert len(set(of_all(results, "group_critique"))) == 1 and "The first" in results[0]["group_critique"]

    for seed in range(4):
        random.seed(seed)
        ask(group_rewards.listwise_judge, responses, reward_router_address=server.address)
    assert len(orders) > 1

    asked = len(server.paths)
    test = {"extra_info": {"question": "1+1?", "split": "test"}}
    for few, more in ((responses[:1] * 4, {}), (responses, test)):  # nothing to compare; an evaluation
        results = ask(group_rewards.listwise_judge, few, reward_router_address=server.address, **more)
        assert set(of_all(results, "score")) <= {1.0, -1.0} and len(server.paths) == asked


@pytest.mark.parametrize(
    "said, status",
    [
        ("\\boxed{0.9, 0.1}", "unparsable"),
        ("\\boxed{9, 5, 0}", "unparsable"),
        ("no box", "unparsable"),
        ("\\boxed{0.5, -0.9, 0.1}", "unparsable"),
        (400, "http_error"),
        ("<think>\\boxed{0.9, 0.5, 0.1}</think>I cannot decide.", "unparsable"),
    ],
)
def test_a_listwise_judge_that_says_nothing_usable_gives_no_verdict(serve, said, status):
    server = serve(served(lambda prompt: said))
    responses = ["a \\boxed{2}", "b \\boxed{2}", "c \\boxed{3}"]
    results = ask(group_rewards.listwise_judge, responses, reward_router_address=server.address)
    assert of_all(results, "score") == [None] * 3 and of_all(results, "group_status") == [status] * 3


def test_fapo_against_others(serve):
    verdicts = {"sound": "-1", "late": "2", "early": "0", "silent": "?"}
    asked = Counter()

    def judge(prompt):
        (name,) = [name for name in verdicts if name in prompt]
        asked[name] += 1
        return f"\\boxed{{{verdicts[name]}}}"

    def solution(name, answer=2):
        return f"{name}\n\ntwo\n\n\\boxed{{{answer}}}"

    server = serve(served(judge))
    names = ["sound", "late", "early", "late", "silent", "wrong"]
    responses = [solution(name, answer=3 if name == "wrong" else 2) for name in names]
    results = ask(group_rewards.fapo_against_others, responses, reward_router_address=server.address)
    # Five samples have a verdict, so each has four others: sound beats 4; late beats 2 and loses to 1; early
    # 1 and 3 ...
    assert of_all(results, "score") == [1.0, 0.25, -0.5, 0.25, None, -1.0]
    assert of_all(results, "flawed_positive") == [False, True, True, True, None, False]
    assert of_all(results, "group_distinct") == [5] * 6
    assert asked == {"sound": 1, "late": 1, "early": 1, "silent": 1}  # the rule finds wrong answers
    json.dumps(results)
    # Without a penalty and in an evaluation, the outcome reward counts, but the place still needs a verdict.
    test = {"extra_info": ABOUT["extra_info"] | {"split": "test"}, "judge_test": True}
    for more in ({"penalty": None}, test):
        settings = {"reward_router_address": server.address} | more
        results = ask(group_rewards.fapo_against_others, responses, **settings)
        assert of_all(results, "score") == [1.0, 0.25, -0.5, 0.25, None, -1.0]
    without = {"extra_info": ABOUT["extra_info"] | {"split": "test"}, "reward_router_address": server.address}
    results = ask(group_rewards.fapo_against_others, responses, **without)  # no answer is judged
    assert of_all(results, "score") == pytest.approx([0.2] * 5 + [-1.0])
