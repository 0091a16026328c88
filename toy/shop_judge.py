"""A judge model for the world with a tool: trajectories with planted flaws, critiques, and a reward function.

    bash recipes/toy_tools_judge.sh 0 outputs/shop0_judged      # serves the shipped judge and trains a policy
    python -m toy.warm_start --kind shop_judge --models judge --out-dir data/shop_judge   # a new judge

The judge reads what compute_score_fapo shows of a trajectory: "(policy) pears?", "(tool) 7". It never sees
the prices, only what the tool has answered. Its critique first lists the deals of the problem. Then it
derives each paragraph of the policy from this list and the tool's answers, and quotes what the policy wrote:
the item of a look-up, or a result up to the first wrong digit. Not covered: judging answers that are wrong.
"""

import re
from itertools import zip_longest
from random import Random

import compute_score as scores
from toy import shop_world, toy_world
from toy.shop_world import FLAWS, ITEMS, Problem, first_flaw, random_problem, write_solution

# A row draws one of these: the probability of each of FLAWS in a deal (made_up, miscopied, wrong_sum, other).
CRITIC = ((1, 0, 0, 0), (0.3, 0.02, 0.1, 0.1), (0, 0.05, 0.3, 0.1), (0, 0.05, 0.1, 0.5))
ERRORS = (-10, -5, -3, -2, -1, 1, 2, 3, 5, 10)  # of a wrong sum

MAX_TOKENS = 160  # of a critique. The longest sound one has fewer.


def write_flawed(problem: Problem, rng: Random, rates: tuple) -> list[dict]:
    """Return the turns of a policy that makes errors with these probabilities, and continues from them."""
    turns = []
    value = problem.start
    text = ""
    items = [item for _, item in problem.deals]
    for number, (sign, _) in enumerate(problem.deals):
        flaw = rng.choices(("", *FLAWS), (1 - sum(rates), *rates))[0]
        if flaw == "other" and rng.random() < 0.6:  # a later item first, with the sign of this deal
            later = rng.randrange(number, len(items))
            items[number], items[later] = items[later], items[number]
        item = items[number]
        price = rng.randint(2, 9)
        if flaw == "made_up":
            text += f"{item}={price}"
        elif flaw != "other" or rng.random() < 0.8:  # "other" can also mean no look-up, or any item
            asked = item
            if flaw == "other" and rng.random() < 0.4:
                asked = rng.choice(ITEMS)
            price = problem.prices[asked]
            turns += [("policy", f"{text}{asked}?"), ("tool", str(price))]
            text = ""
        if flaw == "miscopied" and rng.random() < 0.5:
            price = rng.randint(2, 9)
        elif flaw == "miscopied":
            value = abs(value + rng.choice((-10, -1, 1, 10)))
        task = f"{value}{sign * price:+}"
        value += sign * price
        if flaw == "wrong_sum":
            value += rng.choice(ERRORS)
        value = max(value, 0)
        text += f"\n\n{task}={value}\n\n"
    return as_turns([*turns, last_turn(problem, value, text)])


def last_turn(problem: Problem, value: int, text: str) -> tuple[str, str]:
    """Return the policy's last turn: the text so far, and the answer for this final value."""
    answer = toy_world.Problem("", "", value, (), problem.question).answer
    return "policy", f"{text}{problem.question.split()[0]} \\boxed{{{answer}}}"


def as_turns(pairs) -> list[dict]:
    """Return (who, text) pairs as the turns of a rollout function, which have `tokens`."""
    return [{"who": who, "text": text, "tokens": 0} for who, text in pairs]


def right_trajectory(rng: Random, flawed: bool) -> tuple[Problem, list[dict]]:
    """Draw a problem and a flawed or sound trajectory with a correct answer."""
    rates = rng.choice(CRITIC)
    while True:
        problem = random_problem(rng)
        turns = as_turns(write_solution(problem))
        if flawed:
            turns = write_flawed(problem, rng, rates)
        right = turns[-1]["text"].endswith(f"{{{problem.answer}}}")
        if right and (first_flaw(problem, turns)[0] != -1) == flawed:
            return problem, turns


def list_deals(problem: Problem) -> list[str]:
    """Return the problem's deals: ["0: sells pears", "2: buys nuts"]. A number is the turn of the look-up."""
    clauses = str(problem).partition(". ")[0].split(",")[1:]
    return [f"{2 * number}:{clause}" for number, clause in enumerate(clauses)]


def check_paragraph(index: int, true: str, text: str, deals: list[str]) -> str:
    """Return a check such as "2: buys nuts 2:nuts? ok" or "2:65+7=72?74 not".

    Args:
        index: The index of the turn.
        true: The correct paragraph.
        text: What the policy wrote instead, or the same.
        deals: The deals from `list_deals`.
    """
    finding = "ok" if text == true else "not"
    if true.endswith("?"):  # a look-up
        quote = re.match(r"[a-z]*.?", text)[0]
        return f"{deals[index // 2]} {index}:{quote} {finding}"
    check = f"{index}:{true}?"
    task, equals, result = true.partition("=")
    if equals and text.startswith(task + equals):  # Compare only the results.
        true, text = result, text.removeprefix(task + equals)
    shared = toy_world.first_difference(true, text)
    return f"{check}{text[: shared + 1]} {finding}"


def write_critique(problem: Problem, turns: list[dict]) -> str:
    """Write a critique: the deals, a check of each paragraph up to the first wrong one, and "\\boxed{2}"."""
    deals = list_deals(problem)
    checks = [" ".join(deals)]
    written = [turn["text"] for turn in turns]
    for index, (who, wanted) in enumerate(write_solution(problem)):
        if who == "tool":
            continue
        stated = "".join(written[index : index + 1])
        for true, text in zip_longest(*map(scores.split_paragraphs, (wanted, stated)), fillvalue=""):
            if true == text and true.endswith("}"):
                continue  # The answer is known to be correct.
            checks.append(check_paragraph(index, true, text, deals))
            if true != text:
                return "\n".join([*checks, f"\\boxed{{{index}}}"])
    return "\n".join([*checks, "\\boxed{-1}"])


def write_comparisons(rng: Random) -> list[str]:
    """Return ten checks of items without a trajectory. About half of the items are wrong."""
    checks = []
    for _ in range(10):
        index = rng.randrange(0, 10, 2)
        item = rng.choice(ITEMS)
        asked = rng.choice((item, rng.choice(ITEMS)))
        deal = f"{index}: {rng.choice(('sells', 'buys'))} {item}"
        checks.append(check_paragraph(index, f"{item}?", f"{asked}?", [deal] * 5))
    return checks


def write_practice(rng: Random, errors: float) -> tuple[Problem, list[dict], list[str]]:
    """Return a problem, a trajectory, and the list of deals followed by the checks of all items and sums.

    The checks do not end at the first error. With few errors, the judge would only learn to repeat what it
    has derived, instead of quoting what the policy wrote.

    Args:
        errors: The probability that an item is drawn at random, and that a sum is wrong.
    """
    problem = random_problem(rng)
    deals = list_deals(problem)
    checks = [" ".join(deals)]
    turns = []
    value = problem.start
    text = ""
    for number, (sign, item) in enumerate(problem.deals):
        asked = item
        if rng.random() < errors:
            asked = rng.choice(ITEMS)
        price = problem.prices[asked]
        task = f"{value}{sign * price:+}"
        true = value = value + sign * price
        if rng.random() < errors:
            value = max(true + rng.choice(ERRORS), 0)
        turns += [("policy", f"{text}{asked}?"), ("tool", str(price))]
        text = f"\n\n{task}={value}\n\n"
        checks.append(check_paragraph(2 * number, f"{item}?", f"{asked}?", deals))
        checks.append(check_paragraph(2 * number + 2, f"{task}={true}", f"{task}={value}", deals))
    return problem, as_turns([*turns, last_turn(problem, value, text)]), checks


def critic_prompt(problem: Problem, turns: list[dict]) -> str:
    return toy_world.critic_prompt(problem, scores.show_solution("", turns))


def as_shown(first_wrong: int, turns: list[dict]) -> int:
    """Return the index of the first wrong turn in what the judge sees, where a single turn is part 0."""
    if len(turns) == 1:
        return min(first_wrong, 0)
    return first_wrong


def critic_row(problem: Problem, turns: list[dict], split: str, index: int) -> dict:
    """Return a row for training or evaluating the judge on a trajectory. The label is the index of a turn."""
    first_wrong, flaw = first_flaw(problem, turns)
    first_wrong = as_shown(first_wrong, turns)
    row = toy_world.labelled_row(problem, scores.show_solution("", turns), first_wrong, split, index)
    row["extra_info"]["flaw"] = flaw
    return row


async def compute_score_fapo(
    data_source,
    solution_str,
    ground_truth,
    extra_info,
    reward_router_address,
    turns,
    *,
    penalty=1.0,
    call_cost=0.0,
    keep_critique=False,
) -> dict:
    """Return FAPO's score with a served judge, minus the look-ups' cost. The oracle only adds metrics."""
    result = await scores.compute_score_fapo(
        data_source,
        solution_str,
        ground_truth,
        extra_info,
        reward_router_address,
        turns=turns,
        penalty=penalty,
        keep_critique=keep_critique,
        prompt_style="brief",
        genrm_temperature=0.0,
        genrm_max_tokens=MAX_TOKENS,
    )
    seen = shop_world.compute_score_outcome(data_source, solution_str, ground_truth, extra_info, turns)
    if result["score"] is not None:
        result["score"] -= call_cost * seen["calls"]
    flawed = seen["flawed_positive"]
    agrees = None  # whether the judge names the same turn as the oracle
    if result["genrm_status"] == "ok":
        agrees = result["first_wrong"] == as_shown(seen["first_wrong"], turns)
    elif extra_info.get("split") == "test":  # The judge is not asked, so the oracle measures.
        result["flawed_positive"] = flawed
        # With the status "skipped", the flawed-positive rate would not count the answer. Without a status,
        # the answer counts as one with a verdict.
        del result["genrm_status"]
    return {**seen, **result, "oracle_flawed_positive": flawed, "agrees": agrees}


compute_score_fapo.check_row = scores.compute_score_fapo.check_row
