"""Rewards that depend on the whole group: four reward functions that you can use as they are or adapt.

    python grpo_trainer.py ... --reward-fn docs/group_rewards.py:majority_vote

The Reward Loop calls a function that takes `solution_strs` once per prompt, as soon as the group's last
sample has finished. The function returns a list with one element per response: a number, a dict with `score`,
or None ("no verdict"). docs/reward_functions.md describes its other arguments. If you copy this file, copy
compute_score.py as well and remove the import of the toy world.
Not covered: rollout functions, because a tool's text would count as part of the policy's answer.
"""

import asyncio
import collections
import math
import random
import re

import compute_score as fapo
import toy.toy_world  # noqa: F401  (for the prompt style "brief" of the toy judge)

RANKING = """Here are {count} solutions of one problem.

[Problem]

{problem}

{solutions}

Compare them: which reasons soundly, and how far does each one get? Give each a mark from 0 (worst) to 1
(best). Put the marks, in the order of the solutions and separated by commas, in \\boxed{{}}."""
SOLUTION = "[Solution {index}]\n\n{text}\n\n"


async def listwise_judge(
    data_source, solution_strs, ground_truth, extra_info, reward_router_address, *, max_tokens=8192
):
    """Let the judge compare all answers of a group in one request.

    GRPO only needs to know which answers of a group are better than others. It is easier to compare answers
    than to say how good a single answer is (RULER, https://art.openpipe.ai/fundamentals/ruler). The prompt
    contains each distinct answer once, in random order, because judges favour what they read first.
    Evaluations, and groups in which all answers are equal, use only the outcome reward.
    """
    results = [fapo.compute_score(data_source, text, ground_truth) for text in solution_strs]
    answers = list(dict.fromkeys(solution_strs))
    if len(answers) == 1 or extra_info.get("split") == "test":
        return results
    random.shuffle(answers)
    solutions = ""
    for number, text in enumerate(answers, 1):
        solutions += SOLUTION.format(index=number, text=fapo.break_frame(text, RANKING + SOLUTION))
    prompt = RANKING.format(
        count=len(answers),
        problem=fapo.question_of(extra_info),
        solutions=solutions.removesuffix("\n\n"),
    )
    status, critique, _ = await fapo.chat(prompt, reward_router_address, max_tokens=max_tokens)
    mark_of = {}  # An answer without a mark has no verdict.
    if status == "ok":
        mark_of = read_marks(critique, answers)
        if not mark_of:
            status = "unparsable"
    for text, result in zip(solution_strs, results):
        result["score"] = mark_of.get(text)
        result["group_status"] = status
        result["group_critique"] = critique
    return results


def read_marks(critique, answers):
    """Parse each answer's mark from the critique's final box. Return {} unless all marks are from 0 to 1."""
    box = fapo.final_box(critique, fapo.TAIL_CHARS + 10 * len(answers)) or ""
    marks = [float(mark) for mark in re.findall(r"-?(?:\d+\.?\d*|\.\d+)", box)]
    if len(marks) != len(answers) or not all(0 <= mark <= 1 for mark in marks):
        return {}
    return dict(zip(answers, marks))


def majority_vote(data_source, solution_strs, ground_truth, extra_info):
    """Use the group's most frequent answer as the label: RL without ground truth (arXiv:2504.16084).

    Answers vote for the same label if `is_equal` says that they are equal. If the row has a ground truth
    other than "", `acc` says whether the answer is correct, and `group_label_right` whether the label is.
    A group without any answer has no verdict.
    """
    is_known = ground_truth != ""
    truth = ground_truth if is_known else "unknown"
    results = []
    answers = []
    for text in solution_strs:
        results.append(fapo.compute_score(data_source, text, truth))
        answers.append(fapo.find_answer(data_source, text[-fapo.TAIL_CHARS :]) or "")
    # A response without an answer has no vote, because no answer is equal to an empty one.
    votes_for = [[fapo.is_equal(other, answer) for other in answers] for answer in answers]
    # A bare 5 equals 5 cm and 5 km, which differ, so answers with the same equal answers count first.
    votes = max(votes_for, key=lambda votes: (any(votes) and votes_for.count(votes), sum(votes)))
    winner = dict(results[votes_for.index(votes)])
    for result, vote in zip(results, votes):
        result["score"] = 1.0 if vote else -1.0
        result["group_label"] = winner["pred"]
        if not any(votes):
            result["score"] = result["group_label"] = None
        result["group_votes"] = sum(votes) / len(votes)
        if is_known:
            result["group_label_right"] = winner["acc"]
        else:
            result["acc"] = None
    return results


def rule_and_variety(data_source, solution_strs, ground_truth, extra_info, *, penalty=0.5, words=8):
    """Subtract up to `penalty` from the outcome reward of an answer that repeats other answers of its group.

    `repeated` is the fraction of the answer's sequences of `words` words that also occur in another answer.
    """
    runs_of = [runs(text.split(), words) for text in solution_strs]
    counts = collections.Counter()  # number of answers that contain each sequence
    for mine in runs_of:
        counts.update(mine)
    results = []
    for text, mine in zip(solution_strs, runs_of):
        result = fapo.compute_score(data_source, text, ground_truth)
        result["repeated"] = sum(counts[run] > 1 for run in mine) / len(mine)
        result["score"] -= penalty * result["repeated"]
        results.append(result)
    return results


def runs(text, length):
    """Return all sequences of `length` consecutive words in a text, or the whole text if it is shorter."""
    starts = range(max(len(text) - length, 0) + 1)
    return {tuple(text[start : start + length]) for start in starts}


async def fapo_against_others(data_source, solution_strs, ground_truth, extra_info, **settings):
    """Score an answer with the fraction of other answers that it beats, minus the fraction that beat it.

    A correct answer beats a wrong one, and a sound answer beats a flawed one. Of two flawed answers, the one
    whose first wrong step comes later wins. FAPO's judge reads each distinct answer once, and `settings` are
    passed to compute_score_fapo. An answer that gets no verdict from the judge is not compared and has no
    score.
    """
    distinct = list(dict.fromkeys(solution_strs))
    asked = [
        fapo.compute_score_fapo(data_source, text, ground_truth, extra_info, **settings) for text in distinct
    ]
    verdict_of = dict(zip(distinct, await asyncio.gather(*asked)))
    for verdict in verdict_of.values():
        # If the judge only measures, compute_score_fapo keeps the score of an answer without a verdict.
        if verdict["genrm_status"] != "skipped" and verdict["flawed_positive"] is None:
            verdict["score"] = None
    results = [verdict_of[text] | {"group_distinct": len(distinct)} for text in solution_strs]
    compared = [result for result in results if result["score"] is not None]
    places = [place(result) for result in compared]
    for result, mine in zip(compared, places):
        beaten = sum(mine > other for other in places)
        beaten_by = sum(mine < other for other in places)
        result["score"] = (beaten - beaten_by) / max(len(places) - 1, 1)
    return results


fapo_against_others.check_row = fapo.check_judged


def place(verdict):
    """Return the key for comparisons: whether the answer is correct, and how many of its steps are sound."""
    if not verdict["acc"]:  # Verdicts on wrong answers (judge_wrong) do not count here.
        return False, 0
    if verdict["first_wrong"] is None:  # The judge was not queried.
        return True, 0
    if verdict["first_wrong"] == -1:
        return True, math.inf
    return True, verdict["first_wrong"]
