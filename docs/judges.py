"""Other ways to ask a judge: four functions, to run as they are or to start from (docs/judge.md shows each).

    python grpo_trainer.py ... --reward-fn docs/judges.py:votes --genrm PATH

    audited      FAPO; a share of what the judge lets pass is shown to a second one, which pays nothing
    two_judges   FAPO; what a quick judge lets pass is shown to a strict one, whose word counts
    votes        FAPO; the judge is asked several times, and most verdicts must agree
    rubric       a checklist in place of the first wrong step: the share that a right answer misses

Further settings of the first three are those of compute_score_fapo. To copy this file, take compute_score.py
along and leave out the toy world.
"""

import asyncio
import random
import re
import zlib
from collections import Counter

import compute_score as fapo
import toy.toy_world  # noqa: F401  (for its prompt style "brief", which the toy world's judge has learnt)


seen = Counter()  # how often each answer came to this worker


def let_pass(result: dict) -> bool:
    """Whether the judge was asked about a right answer, and found nothing."""
    return result["acc"] is True and result["flawed_positive"] is False and result["genrm_status"] == "ok"


def is_drawn(share: float, *about) -> bool:
    """True for a share of all things, in every run for the same ones; of equal ones each has its own chance
    (the first, the second ... that this worker sees). ValueError for what is no share."""
    if not 0 < share <= 1:
        raise ValueError(f"share: {share} must be above 0 and at most 1")
    name = zlib.crc32(repr(about).encode())
    seen[name] += 1
    return random.Random(f"{name} {seen[name]}").random() < share


async def audited(
    data_source, solution_str, ground_truth, extra_info, reward_router_address, reward_router_addresses,
    step=0, *, share=0.05, second=None, **settings):  # fmt: skip
    """The alarm for a judge that is being cheated: what it overlooks, the policy finds.

    Of the right answers that it lets pass a share is asked of the reward model named `audit`, or of the same
    one with other settings: second={"prompt_style": "no_truth"}. `audited` says of every sample whether it
    was, `audit_flawed` what was said. No reward depends on it. A second judge that fails says nothing.
    """
    sample = (data_source, solution_str, ground_truth, extra_info)
    is_wanted = is_drawn(share, step, extra_info.get("question"), solution_str)
    result = await fapo.compute_score_fapo(*sample, reward_router_address, **settings)
    result["audited"] = False
    if is_wanted and let_pass(result):
        address = reward_router_addresses.get("audit", reward_router_address)
        opinion = await fapo.compute_score_fapo(*sample, address, **settings | (second or {}))
        result["audit_status"] = opinion["genrm_status"]
        if opinion["genrm_status"] == "ok":
            result |= {"audited": True, "audit_flawed": opinion["flawed_positive"]}
    return result


async def two_judges(
    data_source, solution_str, ground_truth, extra_info, reward_router_address, reward_router_addresses,
    **settings):  # fmt: skip
    """A large judge is asked only about what a small one lets pass: --genrm quick=PATH strict=PATH.

    A right answer is sound if both say so. `strict_asked` is the share of samples that reached the second.
    """
    sample = (data_source, solution_str, ground_truth, extra_info)
    result = await fapo.compute_score_fapo(*sample, reward_router_address, **settings)
    is_open = let_pass(result)
    if is_open:
        result = await fapo.compute_score_fapo(*sample, reward_router_addresses["strict"], **settings)
    return result | {"strict_asked": is_open}


async def votes(
    data_source, solution_str, ground_truth, extra_info, reward_router_address, *, k=3,
    **settings):  # fmt: skip
    """Flawed, or sound, is what more than half of k verdicts say; without such a majority there is none.

    `genrm_agreement` is the share of the k that say so: where it is near 1, one would do. The judge must not
    be asked at temperature 0, where equal requests share one answer.
    """
    if settings.get("genrm_temperature") == 0:
        raise ValueError("genrm_temperature: 0 gives the same vote k times; take 0.6")
    sample = (data_source, solution_str, ground_truth, extra_info, reward_router_address)
    first = await fapo.compute_score_fapo(*sample, **settings)
    if first["genrm_status"] == "skipped":
        return first
    others = [fapo.compute_score_fapo(*sample, **settings) for _ in range(k - 1)]
    results = [first, *await asyncio.gather(*others)]
    counted = [result for result in results if result["genrm_status"] == "ok"]
    verdicts = [result["flawed_positive"] for result in counted]
    for result, verdict in zip(counted, verdicts):
        agreement = verdicts.count(verdict) / k
        if agreement > 0.5:
            return result | {"genrm_agreement": agreement}
    unknown = {"flawed_positive": None, "first_wrong": None}
    if len({result["score"] for result in results}) > 1:  # else a judge that only measures
        unknown["score"] = None
    return min(results, key=lambda result: result["genrm_status"] == "ok") | unknown


CHECKLIST = """[Problem]

{problem}

[Solution]

{solution}

[Checklist]

{points}
For each point: does the solution meet it? Put {count} words, yes or no, in the order of the points and
separated by commas, in \\boxed{{}}."""
POINTS = (
    "Every step follows from what stands before it.",
    "Every number comes from the problem or from a step.",
    "The answer is what was asked for.",
)


async def rubric(
    data_source, solution_str, ground_truth, extra_info, reward_router_address, *, points=POINTS, weight=1.0,
    max_tokens=fapo.GENRM_MAX_TOKENS, temperature=None):  # fmt: skip
    """The rule's score, less `weight` times the share of a checklist that a right answer misses.

    points: of --reward-kwargs; those of a row are in its extra_info["rubric"]. `flawed_positive` is that
    share, from 0 (all met) to 1, which --advantage papo takes as it is; `met_1`, `met_2` ... are curves. The
    rule alone scores an evaluation.
    """
    result = fapo.compute_score(data_source, solution_str, ground_truth)
    result |= {"flawed_positive": False, "genrm_status": "skipped"}
    if not result["acc"]:
        return result
    if extra_info.get("split") == "test":  # right, and judged by nobody
        return result | {"flawed_positive": None}
    points = extra_info.get("rubric") or points
    listed = ""
    for number, point in enumerate(points, 1):
        listed += f"{number}. {point}\n"
    prompt = CHECKLIST.format(
        problem=extra_info["question"], solution=solution_str, points=listed, count=len(points)
    )
    status, critique, _ = await fapo.chat(
        prompt, reward_router_address, max_tokens=max_tokens, temperature=temperature
    )
    met = {}
    if status == "ok":
        met = read_marks(critique, len(points))
        if not met:
            status = "unparsable"
    result |= {"genrm_status": status, "critique": critique, **met}
    if not met:  # a failure is a status, never a number
        return result | {"score": None, "flawed_positive": None}
    missed = 1 - sum(met.values()) / len(met)
    return result | {"score": result["score"] - weight * missed, "flawed_positive": missed}


def read_marks(critique: str, count: int) -> dict[str, bool]:
    """{"met_1": True ...} of the critique's last box; nothing unless it has exactly so many words."""
    box = fapo.last_boxed_only_string(critique) or ""
    words = re.findall(r"\b(?:yes|no)\b", box.lower().removeprefix("\\boxed"))
    if len(words) != count:
        return {}
    return {f"met_{number}": word == "yes" for number, word in enumerate(words, 1)}
