"""A toy world with a tool: problems whose prices must be looked up, a rollout function and reward functions.

    # Train with FAPO from a checkpoint in this repository:
    bash recipes/toy_tools.sh 0 outputs/shop0_fapo
    # Write the data and train a new checkpoint:
    python -m toy.warm_start --out-dir data/shop --kind shop --models policy

A typical problem is "Ben has 65, sells pears, buys nuts. More than 50?" Prices differ from problem to
problem. To look up a price, the policy writes "pears?", and the tool continues with "7". The policy can also
make up a price: "pears=4". The warm start trains it on correct solutions, half of which look up the prices
and half of which just state them. The question is coarse, so an answer based on made-up prices is often
correct.

An answer is grounded if every price comes from the tool and every sum is correct. No flaws are planted: every
wrong step is the policy's own. Not covered: tools that fail, and a choice between several tools. If you copy
this file, copy toy_world.py and compute_score.py as well.
"""

import re
from random import Random
from typing import NamedTuple

import compute_score as scores
from toy import toy_world
from toy.toy_world import COARSE, HIGHEST, LOWEST, NAMES, first_difference

ITEMS = ("eggs", "pens", "nuts", "cards", "pears", "plums", "cups", "hats")
QUESTION = COARSE[0]  # RL uses only this question, while the warm start uses all questions in COARSE.
FLAWS = ("made_up", "miscopied", "wrong_sum", "other")
SUM = r"\d+[+-]\d+=\d+"


class Problem(NamedTuple):
    name: str
    start: int
    deals: tuple[tuple[int, str], ...]  # (1, "eggs") sells eggs, and (-1, "nuts") buys nuts.
    question: str
    prices: dict[str, int]  # The prices of all items. The problem's text does not contain them.

    def __str__(self) -> str:
        story = f"{self.name} has {self.start}"
        for sign, item in self.deals:
            story += f", {'sells' if sign > 0 else 'buys'} {item}"
        return f"{story}. {self.question}"

    @property
    def answer(self) -> str:
        steps = tuple(sign * self.prices[item] for sign, item in self.deals)
        return toy_world.Problem(self.name, "", self.start, steps, self.question).answer


def parse_problem(text: str, prices: dict[str, int]) -> Problem:
    """Return the problem with this text and these prices."""
    story, question = text.split(". ")
    (name, _, start), *clauses = map(str.split, story.split(", "))
    deals = tuple((1 if verb == "sells" else -1, item) for verb, item in clauses)
    return Problem(name, int(start), deals, question, prices)


def random_problem(rng: Random, questions=(QUESTION,), lengths=(3, 4)) -> Problem:
    """Make a random problem whose values stay between LOWEST and HIGHEST.

    lengths: Minimum and maximum number of deals.
    """
    prices = {item: rng.randint(2, 9) for item in ITEMS}
    start = value = rng.randint(20, 89)
    deals = []
    for item in rng.sample(ITEMS, rng.randint(*lengths)):
        signs = [sign for sign in (1, -1) if LOWEST <= value + sign * prices[item] <= HIGHEST]
        sign = rng.choice(signs)
        deals.append((sign, item))
        value += sign * prices[item]
    return Problem(rng.choice(NAMES), start, tuple(deals), rng.choice(questions), prices)


def write_solution(problem: Problem, looks_up=True) -> list[tuple[str, str]]:
    """Return the correct solution as a list of turns (who, text).

    looks_up: Whether the solution looks up the prices. Otherwise, it states them in a single turn.
    """
    value = problem.start
    turns = []
    text = ""
    for sign, item in problem.deals:
        price = problem.prices[item]
        if looks_up:
            turns += [("policy", f"{text}{item}?"), ("tool", str(price))]
            text = ""
        else:
            text += f"{item}={price}"
        text += f"\n\n{value}{sign * price:+}={value + sign * price}\n\n"
        value += sign * price
    text += f"{problem.question.split()[0]} \\boxed{{{problem.answer}}}"
    return [*turns, ("policy", text)]


async def with_prices(trajectory, extra_info):
    """Rollout function: answer each "pears?" of the policy with the price of pears in this problem."""
    async for text in trajectory.calls("?"):
        item = re.search(r"(\w*)\?", text)[1]
        trajectory.observe(str(extra_info["prices"].get(item, "none")))


def first_flaw(problem: Problem, turns: list[dict]) -> tuple[int, str]:
    """Return the oracle's verdict: the first wrong turn, or the first wrong paragraph of a single turn.

    Each problem has exactly one grounded solution, to which the policy and the tool contribute turns. The
    function compares the sample with this solution.

    Returns:
        The index of the first wrong turn or paragraph, and its flaw (one of FLAWS); (-1, "") if nothing is
        wrong.
    """
    sound = write_solution(problem)
    written = [(turn["who"], turn["text"]) for turn in turns]
    if written == sound:
        return -1, ""
    lines = scores.split_paragraphs("".join(text for _, text in written))
    sound_lines = scores.split_paragraphs("".join(text for _, text in sound))
    line = first_difference(lines, sound_lines)
    place = line
    if len(written) > 1:
        place = first_difference(written, sound)
    return place, kind_of_flaw((*lines, "")[line], (*sound_lines, "")[line])


def kind_of_flaw(line: str, sound: str) -> str:
    """Return the flaw (one of FLAWS) of the first line that differs from the sound solution."""
    is_sum = re.fullmatch(SUM, line)
    if line == sound or re.fullmatch(r"[a-z]+=\d+", line) or is_sum and "?" in sound:
        return "made_up"  # Both lines may be equal if the policy also wrote the tool's output.
    if is_sum and line.partition("=")[0] == sound.partition("=")[0]:
        return "wrong_sum"
    return "miscopied" if is_sum else "other"


def compute_score_fapo_oracle(
    data_source, solution_str, ground_truth, extra_info, turns, *, penalty=1.0, call_cost=0.0
) -> dict:
    """Return FAPO's score with the oracle as the judge.

    A wrong answer scores -1. A correct answer scores 1 if it is grounded, and 1 - penalty otherwise. Each
    look-up costs `call_cost`.
    """
    result = scores.compute_score(data_source, solution_str, ground_truth, turns=turns)
    problem = parse_problem(extra_info["question"], extra_info["prices"])
    first_wrong, flaw = first_flaw(problem, turns)
    flawed = result["acc"] and first_wrong != -1
    calls = [turn["text"] for turn in turns if turn["who"] == "policy" and turn["text"].endswith("?")]
    asked = {re.search(r"(\w*)\?$", call)[1] for call in calls}
    result |= {
        "score": result["score"] - penalty * flawed - call_cost * len(calls),
        "first_wrong": first_wrong,
        "flawed_positive": flawed,
        "truly_correct": result["acc"] and not flawed,
        "calls": len(calls),
        "looked_all_up": asked >= {item for _, item in problem.deals},
    }
    for kind in FLAWS:
        result[f"flawed_{kind}"] = flawed and flaw == kind
    return result


def compute_score_outcome(
    data_source, solution_str, ground_truth, extra_info, turns, *, call_cost=0.0
) -> dict:
    """Return the outcome reward minus the cost of the look-ups. The oracle only adds metrics."""
    return compute_score_fapo_oracle(
        data_source, solution_str, ground_truth, extra_info, turns, penalty=0.0, call_cost=call_cost
    )


def compute_score_grounded_rule(
    data_source, solution_str, ground_truth, extra_info, turns, *, penalty=1.0, call_cost=0.0
) -> dict:
    """Return FAPO's score with a rule instead of a judge: the operands must be the tool's answers, in order.

    The rule sees no prices and does not add, so wrong sums pass. The oracle only adds metrics.
    """
    result = compute_score_outcome(
        data_source, solution_str, ground_truth, extra_info, turns, call_cost=call_cost
    )
    answers = [turn["text"] for turn in turns if turn["who"] == "tool"]
    written = scores.policy_text("", turns)
    is_unfounded = re.findall(r"\d+[+-](\d+)=", written) != answers
    result["score"] -= penalty * (result["acc"] and is_unfounded)
    return result


for score in (compute_score_fapo_oracle, compute_score_outcome, compute_score_grounded_rule):
    score.check_row = scores.check_answer


def policy_row(problem: Problem, split: str, index: int) -> dict:
    row = toy_world.policy_row(problem, "shop", split, index)
    row["extra_info"]["prices"] = problem.prices
    return row
