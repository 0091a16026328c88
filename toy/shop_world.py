"""A toy world with a tool: problems whose prices must be looked up, a rollout function and reward functions.

    # This command trains with FAPO from a checkpoint that comes with the repository:
    bash recipes/toy_tools.sh 0 outputs/shop0_fapo
    # This command writes the data and trains a new checkpoint:
    python -m toy.warm_start --out-dir data/shop --kind shop --models policy

An example of a problem is "Ben has 65, sells pears, buys nuts. More than 50?" Prices differ from problem to
problem. The policy can look a price up: it writes "pears?", and the tool continues with "7". The policy can
also make a price up: "pears=4". The policy was warm-started on correct solutions; half of them look the
prices up, and the other half state them. The question is coarse, so an answer from made-up prices is often
correct.

An answer is grounded if the tool has given each price and each sum is correct. No flaws are planted: the
policy makes every wrong step itself. Not covered: tools that fail, a choice among several tools. Needs
toy_world.py and compute_score.py.
"""

import os
import re
from random import Random
from typing import NamedTuple

import compute_score as scores
from toy.toy_world import COARSE, HIGHEST, LOWEST, NAMES

ITEMS = ("eggs", "pens", "nuts", "cards", "pears", "plums", "cups", "hats")
QUESTION = COARSE[0]  # RL problems ask only this question. The warm start asks all questions of COARSE.
FLAWS = ("made_up", "miscopied", "wrong_sum", "other")
SUM = r"\d+[+-]\d+=\d+"


class Problem(NamedTuple):
    name: str
    start: int
    deals: tuple[tuple[int, str], ...]  # (1, "eggs") sells eggs, and (-1, "nuts") buys nuts.
    question: str
    prices: dict[str, int]  # The prices of all items, which the text of the problem does not contain.

    def __str__(self) -> str:
        story = f"{self.name} has {self.start}"
        for sign, item in self.deals:
            story += f", {'sells' if sign > 0 else 'buys'} {item}"
        return f"{story}. {self.question}"

    @property
    def answer(self) -> str:
        total = self.start + sum(sign * self.prices[item] for sign, item in self.deals)
        number = int(self.question.strip("?").split()[-1])
        if self.question.startswith("Remainder"):
            return str(total % number)
        return "yes" if total > number else "no"


def parse_problem(text: str, prices: dict[str, int]) -> Problem:
    """Return the problem that has this text and these prices."""
    story, question = text.split(". ")
    (name, _, start), *clauses = map(str.split, story.split(", "))
    deals = tuple((1 if verb == "sells" else -1, item) for verb, item in clauses)
    return Problem(name, int(start), deals, question, prices)


def random_problem(rng: Random, questions=(QUESTION,), lengths=(3, 4)) -> Problem:
    """Make a random problem whose values stay between LOWEST and HIGHEST.

    lengths: The smallest and the largest number of deals.
    """
    prices = {item: rng.randint(2, 9) for item in ITEMS}
    start = value = rng.randint(20, 89)
    deals = []
    for item in rng.sample(ITEMS, rng.randint(*lengths)):
        signs = [sign for sign in (1, -1) if LOWEST <= value + sign * prices[item] <= HIGHEST]
        deals.append((rng.choice(signs), item))
        value += deals[-1][0] * prices[item]
    return Problem(rng.choice(NAMES), start, tuple(deals), rng.choice(questions), prices)


def write_solution(problem: Problem, looks_up=True) -> list[tuple[str, str]]:
    """Return the correct solution as a list of turns (who, text).

    looks_up: If False, the solution is a single turn, in which the policy states the prices.
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
    """Answer each "pears?" of the policy with the price of pears in this problem (a rollout function)."""
    async for text in trajectory.calls("?"):
        item = re.search(r"(\w*)\?", text)[1]
        trajectory.observe(str(extra_info["prices"].get(item, "none")))


def first_flaw(problem: Problem, turns: list[dict]) -> tuple[int, str]:
    """Find the first wrong turn as an oracle, or the first wrong paragraph of a single turn.

    There is exactly one grounded solution, which the policy and the tool write in turns, so the function
    compares the answer with this solution.

    Returns:
        The index of the first wrong turn or paragraph, and which of FLAWS it has. If nothing is wrong, the
        function returns (-1, "").
    """
    sound = write_solution(problem)
    written = [(turn["who"], turn["text"]) for turn in turns]
    if written == sound:
        return -1, ""
    lines = scores.split_paragraphs("".join(text for _, text in written))
    sound_lines = scores.split_paragraphs("".join(text for _, text in sound))
    line = len(os.path.commonprefix([lines, sound_lines]))
    place = line
    if len(written) > 1:
        place = len(os.path.commonprefix([written, sound]))
    return place, kind_of_flaw((*lines, "")[line], (*sound_lines, "")[line])


def kind_of_flaw(line: str, sound: str) -> str:
    """Return which of FLAWS the first line has that differs from the sound solution."""
    is_sum = re.fullmatch(SUM, line)
    if line == sound or re.fullmatch(r"[a-z]+=\d+", line) or is_sum and "?" in sound:
        return "made_up"  # The line may be equal if the policy also wrote the tool's part.
    if is_sum and line.partition("=")[0] == sound.partition("=")[0]:
        return "wrong_sum"
    return "miscopied" if is_sum else "other"


def compute_score_fapo_oracle(
    data_source, solution_str, ground_truth, extra_info, turns, *, penalty=1.0,
    call_cost=0.0) -> dict:  # fmt: skip
    """Return FAPO's score with the oracle as the judge.

    A wrong answer scores -1, a correct one 1, or 1 - penalty if it is not grounded. Each look-up costs
    `call_cost`.
    """
    result = scores.compute_score(data_source, solution_str, ground_truth)
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
    data_source, solution_str, ground_truth, extra_info, turns, *, call_cost=0.0) -> dict:  # fmt: skip
    """Return the score of the answer alone, minus the cost of the look-ups. The oracle only measures."""
    return compute_score_fapo_oracle(
        data_source, solution_str, ground_truth, extra_info, turns, penalty=0.0, call_cost=call_cost
    )


def policy_row(problem: Problem, split: str, index: int) -> dict:
    info = {"split": split, "index": index, "question": str(problem), "prices": problem.prices}
    return {
        "data_source": "shop",
        "prompt": [{"role": "user", "content": str(problem)}],
        "ability": "Math",
        "reward_model": {"style": "rule", "ground_truth": problem.answer},
        "extra_info": info,
    }
