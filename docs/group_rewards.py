"""Rewards that see the whole group: four functions, to run as they are or to start from.

    python grpo_trainer.py ... --reward-fn docs/group_rewards.py:majority_vote

A function that takes `solution_strs` is called once per prompt, the moment its last sample has ended. It
returns a list: for each response a number, a dict with `score`, or None for "no verdict". What else it is
given: docs/reward_functions.md. To copy this file, take compute_score.py along and leave out the toy world.
"""

import asyncio
import collections
import itertools
import random
import re

import compute_score as fapo
import toy.toy_world  # noqa: F401  (for its prompt style "brief", which the toy world's judge has learnt)

RANKING = """Here are {count} solutions of one problem.

[Problem]

{problem}

{solutions}

Compare them: which reasons soundly, and how far does each one get? Give each a mark from 0 (worst) to 1
(best). Put the marks, in the order of the solutions and separated by commas, in \\boxed{{}}."""


async def listwise_judge(
    data_source, solution_strs, ground_truth, extra_info, reward_router_address, *,
    max_tokens=8192):  # fmt: skip
    """One request for the whole group: the judge marks its answers against each other.

    Within a group GRPO asks only who is better than whom, which is easier to say than how good one answer is
    by itself (RULER, https://art.openpipe.ai/fundamentals/ruler). Each distinct answer is shown once, and in
    a random order, as judges favour what they read first. The rule alone scores an evaluation, and a group
    whose answers are all the same.
    """
    results = [fapo.compute_score(data_source, text, ground_truth) for text in solution_strs]
    answers = random.sample(list(dict.fromkeys(solution_strs)), len(set(solution_strs)))
    if len(answers) == 1 or extra_info.get("split") == "test":
        return results
    solutions = "\n\n".join(f"[Solution {number}]\n\n{text}" for number, text in enumerate(answers, 1))
    prompt = RANKING.format(count=len(answers), problem=extra_info["question"], solutions=solutions)
    status, critique, _ = await fapo.chat(prompt, reward_router_address, max_tokens=max_tokens)
    marks = re.findall(r"-?(?:\d+\.?\d*|\.\d+)", fapo.last_boxed_only_string(critique) or "")
    if status == "ok" and (len(marks) != len(answers) or not all(0 <= float(mark) <= 1 for mark in marks)):
        status = "unparsable"
    mark_of = dict(zip(answers, map(float, marks))) if status == "ok" else {}  # no mark: no verdict
    about = {"group_status": status, "group_critique": critique}
    return [result | about | {"score": mark_of.get(text)} for text, result in zip(solution_strs, results)]


def majority_vote(data_source, solution_strs, ground_truth, extra_info):
    """The answer that most of the group give is the label: RL without a ground truth (arXiv:2504.16084).

    Where there is one after all (a row without has ""), `acc` and `group_label_right` say how often answers
    and labels are really right. There is no verdict on a group in which nobody answers.
    """
    is_known = ground_truth != ""
    truth = ground_truth if is_known else "unknown"
    results = [fapo.compute_score(data_source, text, truth) for text in solution_strs]
    votes = collections.Counter(result["pred"] for result in results if result["pred"] not in ("[INVALID]", ""))
    [(label, count)] = votes.most_common(1) or [(None, 0)]
    about = {"group_label": label, "group_votes": count / len(results)}
    if is_known:
        about["group_label_right"] = any(result["acc"] for result in results if result["pred"] == label)
    else:
        about["acc"] = None
    scores = [None if label is None else 1.0 if result["pred"] == label else -1.0 for result in results]
    return [result | about | {"score": score} for result, score in zip(results, scores)]


def rule_and_variety(
    data_source, solution_strs, ground_truth, extra_info, *, penalty=0.5, words=8):  # fmt: skip
    """The rule, minus up to `penalty` for what an answer has in common with others of its group.

    `repeated` is the share of its runs of `words` words that another answer has, too.
    """
    texts = [text.split() for text in solution_strs]
    runs = [set(zip(*(text[start:] for start in range(words)))) or {tuple(text)} for text in texts]
    counts = collections.Counter(itertools.chain.from_iterable(runs))
    results = []
    for text, mine in zip(solution_strs, runs):
        result = fapo.compute_score(data_source, text, ground_truth)
        repeated = sum(counts[run] > 1 for run in mine) / len(mine)
        results.append(result | {"score": result["score"] - penalty * repeated, "repeated": repeated})
    return results


async def fapo_against_others(data_source, solution_strs, ground_truth, extra_info, **settings):
    """FAPO's verdicts; the score is the share of the other answers that one beats, minus what beats it.

    Right beats wrong, sound beats flawed, and of two flawed answers the one with its first wrong step later.
    Each distinct answer is judged once: much less to ask where a policy repeats itself. settings: those of
    compute_score_fapo. An answer without a verdict has none here either, and is not compared with.
    """
    distinct = list(dict.fromkeys(solution_strs))
    asked = [fapo.compute_score_fapo(data_source, text, ground_truth, extra_info, **settings)
             for text in distinct]  # fmt: skip
    verdict_of, place_of = dict(zip(distinct, await asyncio.gather(*asked))), {}
    for text, verdict in verdict_of.items():
        if verdict["score"] is not None:
            # None: the judge was not asked. What it says of wrong answers (judge_wrong) ranks nobody.
            sound_until = verdict["first_wrong"] or 0 if verdict["acc"] else 0
            place_of[text] = verdict["acc"], float("inf") if sound_until == -1 else sound_until
    places, results = [place_of[text] for text in solution_strs if text in place_of], []
    for text in solution_strs:
        mine, score = place_of.get(text), None
        if mine:
            score = sum((mine > other) - (mine < other) for other in places) / max(len(places) - 1, 1)
        results.append(verdict_of[text] | {"score": score, "group_distinct": len(distinct)})
    return results
