"""The toy world: FAPO's problem in miniature, and a worked example of a file with your own reward functions.

    python grpo_trainer.py ... --reward-fn toy/toy_world.py:compute_score_fapo_oracle

A problem is a short story of sums: "Ben has 65 eggs, gets 9, loses 3. Remainder mod 5?" A solution has one
paragraph per sum ("65+9=74") and a last one with the answer ("Remainder \\boxed{1}"). A forgotten carry makes
a sum wrong by ten, which leaves the remainder unchanged: the step is wrong and the answer correct. That is a
flawed positive, and a rule that reads only the answer cannot see it. If the question is "How many?", the same
slip makes the answer wrong.

In the second world (`own_flaws` in KINDS) no flaws are planted. Its stories have six to nine sums and its
questions have few possible answers ("More than 50?", "Remainder mod 2?", "Remainder mod 5?"), so a wrong
solution often ends with the correct answer. Its policy has read sound solutions only, and too few of them.

This file contains the problems; solvers that make slips and critics that overlook slips, at chosen rates; an
oracle that finds every slip; the reward functions; and the rows of the data sets. toy/warm_start.py trains
models on them, and toy/report.py makes tables of finished runs. To copy this file, copy compute_score.py too.

Not covered: this is not a benchmark. The flaw of the first world is planted and invisible to the rule by
construction, while real flawed positives are as varied as mathematics. The toy world shows the mechanism and
exercises every part of the code.
"""

import functools
import os
import re
from random import Random
from typing import NamedTuple

import compute_score as scores

# The first world's questions. RL is asked REMAINDER only: there a forgotten carry never costs the answer.
REMAINDER, TOTAL = "Remainder mod 5?", "How many?"
COARSE = ("More than 50?", "Remainder mod 2?", REMAINDER)  # the second world's, one drawn with each problem
NAMES = ("Ben", "Ann", "Tom", "Eva", "Max", "Lea")
ITEMS = ("eggs", "pens", "nuts", "cards")
# The models were trained on shorter words. Their tokenizers still translate into these, so that token ids,
# random choices and all published figures stay what they were.
SHORT_WORDS = {"Remainder": "Rest", " mod": " by"}
STEPS = (*range(-9, -1), *range(2, 10))
LOWEST, HIGHEST = 15, 99  # every true intermediate value stays in here


# ---- Problems and solutions --------------------------------------------------------------------------------


class Problem(NamedTuple):
    """Start value, (+n or -n) steps, a question. `str(problem)` is its text; `parse_problem` the inverse."""

    name: str
    item: str
    start: int
    steps: tuple[int, ...]
    question: str

    def __str__(self) -> str:
        story = f"{self.name} has {self.start} {self.item}"
        for step in self.steps:
            verb = "gets" if step > 0 else "loses"
            story += f", {verb} {abs(step)}"
        return f"{story}. {self.question}"

    @property
    def asked(self) -> tuple[str, str, int]:
        """How the last line begins, what it says of the total, and its number: ("Remainder", "mod 5", 5)."""
        if self.question == TOTAL:
            return "Total", "", 0
        head, _, condition = self.question.strip("?").partition(" ")
        return head, condition, int(condition.split()[1])

    def answer_for(self, total: int) -> int | str:
        """What the question asks of a total."""
        head, _, number = self.asked
        if head == "Total":
            return total
        if head == "Remainder":
            return total % number
        if total > number:
            return "yes"
        return "no"

    def another_answer(self, answer: int | str, rng: Random) -> int | str:
        """A wrong one, where `answer` is right."""
        head, _, number = self.asked
        if head == "Total":
            return answer + 1
        if head == "Remainder":
            return (answer + rng.randint(1, number - 1)) % number
        return {"yes": "no", "no": "yes"}[answer]

    @property
    def answer(self) -> str:
        return str(self.answer_for(self.start + sum(self.steps)))


def parse_problem(text: str) -> Problem:
    """The problem that `text` tells. Raises ValueError where the text is not one of this world."""
    asked = r"Remainder mod [2-9]\?|How many\?|More than \d+\?"
    match = re.fullmatch(rf"(\w+) has (\d+) (\w+)((?:, (?:gets|loses) \d+)+)\. ({asked})", text.strip())
    if not match:
        raise ValueError(f"question: not a problem of the toy world: {text!r}; prepare data with --tasks toy")
    name, start, item, story, question = match.groups()
    signed = story.replace(", gets ", " ").replace(", loses ", " -")
    return Problem(name, item, int(start), tuple(map(int, signed.split())), question)


def random_problem(rng: Random, question: str | tuple, lengths: tuple[int, int] = (3, 4)) -> Problem:
    """3 or 4 steps of 2-9 (lengths: other bounds); every true intermediate value in LOWEST..HIGHEST. Of
    several questions one is drawn."""
    start = rng.randint(20, 89)
    value = start
    steps = []
    for _ in range(rng.randint(*lengths)):
        step = rng.choice([step for step in STEPS if LOWEST <= value + step <= HIGHEST])
        steps.append(step)
        value += step
    if isinstance(question, tuple):
        question = rng.choice(question)
    return Problem(rng.choice(NAMES), rng.choice(ITEMS), start, tuple(steps), question)


def forgets_carry(left: int, step: int) -> int | None:
    """The result of left+step with its carry (or borrow) forgotten; None where there is nothing to forget."""
    units = left % 10 + step
    if units > 9:
        return left + step - 10
    if units < 0:
        return left + step + 10
    return None


class Slips(NamedTuple):
    """How often a solver goes wrong, per step."""

    carry: float = 0.0  # a carry or borrow is forgotten: off by ten, which "Remainder mod 5?" never notices
    off: float = 0.0  # off by one or two: costs the answer nearly always
    last: float = 0.0  # a wrong last line
    fives: float = 0.0  # off by 5, 10 or 20 for no reason at all
    misread: float = 0.0  # the line starts from another value, or applies another step, 5 or 10 away


def write_solution(problem: Problem, rng: Random, slips: Slips = Slips()) -> list[str]:
    """A solution as paragraphs, sound without slips. The line after a slip starts from what was stated."""
    value = problem.start
    lines = []
    for step in problem.steps:
        left = value
        value = left + step
        forgotten = forgets_carry(left, step)
        if rng.random() < slips.misread:  # and then computed rightly: a second slip could undo the first
            if rng.random() < 0.5:
                left = abs(left + rng.choice((-10, -5, 5, 10)))
            elif step < -5 or 0 < step <= 5:
                step += 5
            else:
                step -= 5
            value = left + step
        elif forgotten is not None and rng.random() < slips.carry:
            value = forgotten
        elif rng.random() < slips.off:
            value += rng.choice((-2, -1, 1, 2))
        elif rng.random() < slips.fives:
            value += rng.choice((-20, -10, -5, 5, 10, 20))
        value = max(value, 0)
        lines.append(f"{left}{step:+}={value}")
    answer = problem.answer_for(value)
    slipped = rng.random() < slips.last
    if slipped and problem.question == TOTAL:
        answer = max(answer + rng.choice((-1, 1)), 0)
    elif slipped:
        answer = problem.another_answer(answer, rng)
    return [*lines, f"{problem.asked[0]} \\boxed{{{answer}}}"]


def first_wrong_paragraph(question: str, solution: str | list[str]) -> int:
    """The oracle: the 0-based index of the first wrong paragraph of any text, -1 if there is none.

    A line is right if it starts from the value stated before it, applies the problem's own step and states
    its true result; the last one must give what the question asks. So a sound solution can be written in one
    way only, and what differs from it is wrong, be it malformed, missing or surplus. Raises ValueError where
    the question is not of this world.
    """
    sound = write_solution(parse_problem(question), Random(0))
    stated = scores.split_paragraphs(solution) if isinstance(solution, str) else solution
    if stated == sound:
        return -1
    return len(os.path.commonprefix([stated, sound]))


def write_critique(problem: Problem, paragraphs: list[str], rng: Random, miss=0.0, alarm=0.0, stop=True):
    """Recomputes each line from the value stated before ("0:65+9=74?6 not"), up to the first that differs.

    Of what is stated it reads up to the first digit that differs: so a tiny model compares one digit with one
    digit. Per line, a wrong result is passed with probability `miss` ("recomputed" as stated), a right one
    flagged with `alarm`. stop=False checks the lines after it as well, and gives no verdict: practice for a
    judge that learns to compare.
    """
    value = problem.start
    checks = []
    for index, paragraph in enumerate(paragraphs):
        stated = re.findall(r"\w+", paragraph)[-1]
        if index < len(problem.steps):
            step = problem.steps[index]
            task = f"{value}{step:+}"
            true = value + step
            wrong = forgets_carry(value, step)
            if wrong is None or rng.random() < 0.2:
                wrong = true + rng.choice((-1, 1))
            wrong = max(wrong, 0)
        else:
            true = problem.answer_for(value)
            task = f"{value} {problem.asked[1]}".strip()
            wrong = problem.another_answer(true, rng)
        recomputed = str(true)
        slip = rng.random()
        if stated != recomputed and slip < miss:
            recomputed = stated
        elif stated == recomputed and slip < alarm:
            recomputed = str(wrong)
        finding = "ok" if recomputed == stated else "not"
        shared = len(os.path.commonprefix([recomputed, stated]))
        checks.append(f"{index}:{task}={recomputed}?{stated[: shared + 1]} {finding}")
        if recomputed != stated and stop:
            break
        if index < len(problem.steps):
            value = int(stated)
    else:
        index = -1
    if stop:
        checks.append(f"\\boxed{{{index}}}")
    return "\n".join(checks)


class Kind(NamedTuple):
    """A kind of toy world: its problems, and what its models see go wrong in their warm start."""

    question: str | tuple = REMAINDER  # what RL asks, or what it asks one of
    lengths: tuple[int, int] = (3, 4)  # fewest and most steps of a problem
    # About 60 % right answers, most of them flawed.
    policy: Slips = Slips(carry=0.35, off=0.1, last=0.06)
    # What the judge reads.
    critic: Slips = Slips(carry=0.25, off=0.05, last=0.05, fives=0.12, misread=0.06)
    # Every other line is wrong.
    practice: Slips = Slips(carry=0.35, off=0.2, last=0.5, fives=0.2, misread=0.1)
    # The policy sees sound solutions only, until so many of its own are sound.
    stop_at: float | None = None


# The judge learns from flaws of every kind, as FAPO-Critic has solutions of many models. Shown forgotten
# carries only (narrow_judge), it overlooks "82-2=70" (nothing to borrow), and the policy can find that out:
# reward hacking. The weak policy is wrong far more often than truly correct: FAPO first encourages flawed
# positives, until that turns. The second world is own_flaws: every wrong step of its policy is its own. Its
# judge is shown the first world's flaws, and then those of the policy's own (recipes/critic_rows.py).
JUDGE = {"miss": 0.5, "alarm": 0.05}  # how the warm-started judge errs, for reinforcement learning to mend
KINDS = {
    "standard": Kind(),
    "narrow_judge": Kind(critic=Slips(carry=0.35), practice=Slips(carry=0.8)),
    "weak_policy": Kind(policy=Slips(carry=0.35, off=0.45, last=0.3)),
    "own_flaws": Kind(question=COARSE, lengths=(6, 9), policy=Slips(), stop_at=0.25),
}


# ---- Reward functions --------------------------------------------------------------------------------------


def with_oracle(result: dict, solution_str: str, extra_info: dict) -> dict:
    """Adds what only the oracle knows, under keys that the trainer averages. What is there stays."""
    first_wrong = first_wrong_paragraph(extra_info["question"], solution_str)
    sound = first_wrong == -1
    acc = result["acc"]
    return {
        "first_wrong": first_wrong,
        "sums_right": not 0 <= first_wrong < len(parse_problem(extra_info["question"]).steps),
        **result,
        "oracle_flawed_positive": acc and not sound,
        "truly_correct": acc and sound,
    }


def watched(function):
    """`function` with the oracle looking on. Its settings stay, so that misspelt ones are refused."""

    @functools.wraps(function)
    async def score(data_source, solution_str, ground_truth, extra_info, **settings) -> dict:
        result = await function(data_source, solution_str, ground_truth, extra_info, **settings)
        return with_oracle(result, solution_str, extra_info)

    return score


compute_score_fapo = watched(scores.compute_score_fapo)  # a served judge finds the flaws
compute_score_baseline = watched(scores.compute_score_baseline)  # the rule's score; a judge only measures


def compute_score_fapo_oracle(
    data_source, solution_str, ground_truth, extra_info, *,
    penalty=1.0, recall=1.0, judge_wrong=True, place=0.0) -> dict:  # fmt: skip
    """FAPO with the oracle as a judge, a perfect one (paper eq. 8: a flawed positive gets 1 - penalty).

    recall: the share of flawed solutions that it sees; the same solution is always seen, or never.
    judge_wrong: say where wrong answers go wrong, too, for the advantages that want to know.
    place: what a wrong answer gets back, times the share of its paragraphs before the first wrong one.
    """
    rule = scores.compute_score(data_source, solution_str, ground_truth)
    result = with_oracle(rule, solution_str, extra_info)
    question = extra_info["question"]
    seed = f"{question}{solution_str}"
    for word, short in SHORT_WORDS.items():
        seed = seed.replace(word, short)
    if Random(seed).random() >= recall:
        result["first_wrong"] = -1
    first_wrong = result["first_wrong"]
    result["flawed_positive"] = result["acc"] and first_wrong != -1
    if result["flawed_positive"]:
        result["score"] -= penalty
    elif not result["acc"] and judge_wrong:
        result["score"] += place * max(first_wrong, 0) / (len(parse_problem(question).steps) + 1)
    elif not result["acc"]:
        result["first_wrong"] = None
    return result


@functools.wraps(compute_score_fapo_oracle, assigned=())  # its settings, so that misspelt ones are refused
def compute_score_steps_oracle(data_source, solution_str, ground_truth, extra_info, **settings) -> dict:
    """The same with a score for each step (--advantage steps): 1 before the first wrong one, then 0."""
    result = compute_score_fapo_oracle(data_source, solution_str, ground_truth, extra_info, **settings)
    first_wrong = result["first_wrong"]
    steps = [1.0] * len(scores.split_paragraphs(solution_str))
    if first_wrong is None:
        steps = None
    elif first_wrong != -1:
        steps[first_wrong:] = [0.0] * len(steps[first_wrong:])
    return result | {"step_scores": steps}


# ---- Rows --------------------------------------------------------------------------------------------------

# The judge's prompt: a style of its own, short enough for a tiny model.
scores.PROMPT_STYLES["brief"] = ("{problem}\nTruth {answer}\n{solution}\nCheck:", "<{index}> {text}\n")


def critic_prompt(problem: Problem, paragraphs: list[str]) -> str:
    return scores.format_critic_prompt(str(problem), problem.answer, paragraphs, prompt_style="brief")


def policy_row(problem: Problem, data_source: str, split: str, index: int) -> dict:
    """A row of the schema for training or validating the policy."""
    return {
        "data_source": data_source,
        "prompt": [{"role": "user", "content": str(problem)}],
        "ability": "Math",
        "reward_model": {"style": "rule", "ground_truth": problem.answer},
        "extra_info": {"split": split, "index": index, "question": str(problem)},
    }


def right_solution(rng: Random, flawed: bool, kind: Kind = KINDS["standard"]) -> tuple[Problem, list[str]]:
    """A problem and a solution with the right answer, sound or flawed as asked, as FAPO-Critic has them."""
    if flawed:
        slips = kind.critic
    else:
        slips = Slips()
    while True:
        problem = random_problem(rng, kind.question, kind.lengths)
        paragraphs = write_solution(problem, rng, slips)
        sound = write_solution(problem, Random(0))
        if paragraphs[-1] == sound[-1] and (paragraphs != sound) == flawed:
            return problem, paragraphs


def critic_row(problem: Problem, paragraphs: list[str], split: str, index: int) -> dict:
    """A row of the schema for training or validating the judge on a solution."""
    row = policy_row(problem, "fapo_critic", split, index)
    row["ability"] = "math_critic"
    row["prompt"][0]["content"] = critic_prompt(problem, paragraphs)
    row["reward_model"]["ground_truth"] = first_wrong_paragraph(str(problem), paragraphs)
    row["extra_info"]["total_steps"] = len(paragraphs)
    return row
