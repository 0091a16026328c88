"""Other ways to use a judge: four reward functions that you can use as they are or adapt (docs/judge.md).

    python grpo_trainer.py ... --reward-fn docs/judges.py:votes --genrm PATH

    audited      FAPO. A second judge checks a fraction of the accepted answers, without changing any reward.
    two_judges   FAPO. A strict judge checks the answers that a quick judge accepts, and its verdict counts.
    votes        FAPO. The same judge gives several verdicts, and the majority decides.
    rubric       A checklist replaces the search for the first wrong step.

The first three functions also accept the settings of compute_score_fapo. All verdicts on an answer share the
time limit genrm_timeout_s. If you copy this file, copy compute_score.py as well and remove the import of the
toy world.
"""

import asyncio
import inspect
import random
import re
import time
import zlib
from collections import Counter

import compute_score as fapo
import toy.toy_world  # noqa: F401  (for the prompt style "brief" of the toy judge)


seen = Counter()  # How often this worker has scored each answer.


def is_accepted(result: dict) -> bool:
    """Return whether the judge accepted a correct answer."""
    return result["acc"] is True and result["flawed_positive"] is False and result["genrm_status"] == "ok"


async def first_verdict(address: str, *sample, **settings) -> tuple:
    """Return FAPO's result with this judge, and a function `again(address, **changed settings)`.

    `again` gives a later verdict, which gets only the time that the first one left. With a full time limit
    each, verdicts could exceed the reward loop's --timeout, which loses all of them.
    """
    start = time.monotonic()
    result = await fapo.compute_score_fapo(*sample, address, **settings)
    rest = settings.get("genrm_timeout_s", fapo.GENRM_TIMEOUT_S) - (time.monotonic() - start)

    def again(address, **changed):
        own = settings | changed
        own["genrm_timeout_s"] = max(0.0, min(rest, own.get("genrm_timeout_s", rest)))
        return fapo.compute_score_fapo(*sample, address, **own)

    return result, again


def check_share(share) -> None:
    if not isinstance(share, int | float) or not 0 < share <= 1:
        raise ValueError(f"share {share!r}: must be above 0 and at most 1 (in --reward-kwargs)")


def is_drawn(share: float, *about) -> bool:
    """Return whether an answer is in a random sample of all answers. Raises ValueError for a wrong `share`.

    The draw depends on the answer and on how often this worker has scored the answer. The first copy of an
    answer therefore has the same draw in every run and on every worker; further copies on a worker are drawn
    independently.
    """
    check_share(share)
    name = zlib.crc32(repr(about).encode())
    seen[name] += 1
    return random.Random(f"{name} {seen[name]}").random() < share


async def audited(
    data_source,
    solution_str,
    ground_truth,
    extra_info,
    reward_router_address,
    reward_router_addresses,
    step=0,
    turns=(),
    *,
    share=0.05,
    second=None,
    **settings,
):
    """Score with FAPO, and let a second judge check a random sample of the answers that the first accepts.

    This detects reward hacking, because the policy learns to exploit what its judge misses. The second judge
    is the reward model named `audit`. Without one, it is the same model with different settings, such as
    second={"prompt_style": "no_truth"}.

    Every result has `audited`, which is False if there is no second verdict. Audited samples also have
    `audit_flawed`, the second verdict. No reward depends on it.
    """
    is_wanted = is_drawn(share, step, extra_info.get("question"), solution_str)
    sample = (data_source, solution_str, ground_truth, extra_info)
    result, again = await first_verdict(reward_router_address, *sample, turns=turns, **settings)
    result["audited"] = False
    if is_wanted and is_accepted(result):
        address = reward_router_addresses.get("audit", reward_router_address)
        opinion = await again(address, **second or {})
        result["audit_status"] = opinion["genrm_status"]
        if opinion["genrm_status"] == "ok":
            result |= {"audited": True, "audit_flawed": opinion["flawed_positive"]}
    return result


def check_audited(row: dict, settings: dict) -> None:
    """Raise ValueError if the check of compute_score_fapo fails, or the share or second judge is invalid."""
    check_share(settings.get("share", 0.05))
    check_second(row, settings, "second")
    models = list(settings["reward_router_addresses"])  # in the order of the command line
    if not settings.get("second") and "audit" not in models[1:]:
        raise ValueError(
            "audited: there is no second judge; name it audit (--genrm judge=PATH audit=PATH2), or give the "
            "settings `second` (in --reward-kwargs)"
        )


def check_second(row: dict, settings: dict, name: str) -> None:
    """Check the settings, and those of the second judge, settings[name], like compute_score_fapo's."""
    fapo.check_judged(row, settings)
    second = settings.get(name) or {}
    if not isinstance(second, dict):
        raise ValueError(f"{name}: {second!r} is not an object of settings (in --reward-kwargs)")
    parameters = inspect.signature(fapo.compute_score_fapo).parameters.values()
    known = [parameter.name for parameter in parameters if parameter.kind == parameter.KEYWORD_ONLY]
    for key in second:
        fapo.one_of(name, key, known)
    fapo.check_judged(row, settings | second)


async def two_judges(
    data_source,
    solution_str,
    ground_truth,
    extra_info,
    reward_router_address,
    reward_router_addresses,
    turns=(),
    *,
    strict=None,
    **settings,
):
    """Query a strict judge only on answers that a quick judge accepts: --genrm quick=PATH strict=PATH.

    A correct answer is sound if both judges accept it. `strict_asked` says whether the strict judge was
    queried. `strict` contains settings for this judge alone, such as strict={"genrm_model": "NAME"}.
    """
    sample = (data_source, solution_str, ground_truth, extra_info)
    result, again = await first_verdict(reward_router_address, *sample, turns=turns, **settings)
    is_open = is_accepted(result)
    if is_open:
        result = await again(reward_router_addresses["strict"], **strict or {})
    return result | {"strict_asked": is_open}


def check_two_judges(row: dict, settings: dict) -> None:
    """Raise ValueError if the check of compute_score_fapo fails, or a strict judge is missing or invalid."""
    check_second(row, settings, "strict")
    models = list(settings["reward_router_addresses"])
    if "strict" not in models[1:]:
        raise ValueError(
            "two_judges: no second reward model is named strict; pass --genrm quick=PATH strict=PATH2"
        )


async def votes(
    data_source, solution_str, ground_truth, extra_info, reward_router_address, turns=(), *, k=3, **settings
):
    """Score with the verdict of more than half of k critiques. Without such a majority, there is no verdict.

    A verdict says whether any step is wrong, even in a wrong answer (judge_wrong). `genrm_agreement` is the
    fraction of the k critiques with the majority's verdict. If it stays near 1, one critique is enough.
    Without a majority, `first_wrong` is None, and so is `flawed_positive` of a correct answer, also with
    on_no_verdict="rule".

    Raises ValueError if genrm_temperature is 0, because equal requests then share one answer.
    """
    check_critiques(k, settings)
    sample = (data_source, solution_str, ground_truth, extra_info)
    first, again = await first_verdict(reward_router_address, *sample, turns=turns, **settings)
    if first["genrm_status"] == "skipped":
        return first
    others = [again(reward_router_address) for _ in range(k - 1)]
    results = [first, *await asyncio.gather(*others)]
    counted = [result for result in results if result["genrm_status"] == "ok"]
    verdicts = [result["first_wrong"] != -1 for result in counted]
    for result, verdict in zip(counted, verdicts):
        agreement = verdicts.count(verdict) / k
        if agreement > 0.5:
            return result | {"genrm_agreement": agreement}
    unknown = {"flawed_positive": None if first["acc"] else False, "first_wrong": None}
    if len({result["score"] for result in results}) > 1:  # With equal scores, the judge only adds metrics.
        unknown["score"] = None
        if settings.get("on_no_verdict") == "rule":  # as if the solution were sound
            unknown["score"] = max(result["score"] for result in results)
    return min(results, key=lambda result: result["genrm_status"] == "ok") | unknown


def check_votes(row: dict, settings: dict) -> None:
    """Raise ValueError if the check of compute_score_fapo fails, or if `votes` would raise ValueError."""
    fapo.check_judged(row, settings)
    check_critiques(settings.get("k", 3), settings)


def check_critiques(k, settings: dict) -> None:
    if not isinstance(k, int) or k < 1:
        raise ValueError(f"k {k!r}: must be a whole number of at least 1 (in --reward-kwargs)")
    if settings.get("genrm_temperature") == 0:
        raise ValueError("genrm_temperature 0: all k critiques would be the same; pass 0.6")


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
    data_source,
    solution_str,
    ground_truth,
    extra_info,
    reward_router_address,
    turns=(),
    *,
    points=POINTS,
    weight=1.0,
    max_tokens=fapo.GENRM_MAX_TOKENS,
    temperature=None,
):
    """Score a correct answer with 1 minus `weight` times the fraction of a checklist that it misses.

    The points of the checklist come from the row's extra_info["rubric"] or else from `points`.
    `flawed_positive` is the missed fraction, from 0 (all points met) to 1. The advantage papo uses this
    fraction instead of the score, so it ignores `weight`. The trainer averages `met_1`, `met_2` ... as
    metrics. Evaluations use only the outcome reward.
    """
    result = fapo.compute_score(data_source, solution_str, ground_truth, turns=turns)
    result |= {"flawed_positive": False, "genrm_status": "skipped"}
    if not result["acc"]:
        return result
    if extra_info.get("split") == "test":  # The answer is correct, but the judge is not queried.
        return result | {"flawed_positive": None}
    points = extra_info.get("rubric") or points
    listed = ""
    for number, point in enumerate(points, 1):
        listed += f"{number}. {point}\n"
    solution = fapo.show_solution(solution_str, turns)
    if not isinstance(solution, str):
        solution = "\n\n".join(solution)
    solution = fapo.break_frame(solution, CHECKLIST)
    prompt = CHECKLIST.format(
        problem=fapo.question_of(extra_info), solution=solution, points=listed, count=len(points)
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
    """Parse {"met_1": True ...} from the critique's final box. Return {} unless it has `count` words."""
    box = fapo.final_box(critique) or ""
    words = re.findall(r"\b(?:yes|no)\b", box.lower())
    if len(words) != count:
        return {}
    return {f"met_{number}": word == "yes" for number, word in enumerate(words, 1)}


def check_rubric(row: dict, settings: dict) -> None:
    """Raise ValueError if the check of compute_score_fapo fails, or a checklist or setting is invalid."""
    fapo.check_judged(row, settings)
    fapo.one_kind(settings, "weight", "a number", int, float)
    fapo.one_kind(settings, "max_tokens", "a whole number above 0", int, fapo.NULL, least=1)
    fapo.one_kind(settings, "temperature", "a number of at least 0", int, float, fapo.NULL, least=0)
    own = (row.get("extra_info") or {}).get("rubric") or POINTS
    for name, points in (("points", settings.get("points", POINTS)), ("extra_info['rubric']", own)):
        is_list = isinstance(points, list | tuple) and points
        if not is_list or not all(isinstance(point, str) and point.strip() for point in points):
            raise ValueError(f"{name}: {points!r:.80} is not a list of texts")


audited.check_row, two_judges.check_row = check_audited, check_two_judges
votes.check_row, rubric.check_row = check_votes, check_rubric
