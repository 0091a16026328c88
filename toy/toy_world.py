"""The toy world: FAPO's problem in miniature, and a worked example of your own reward functions.

    python grpo_trainer.py ... --reward-fn toy/toy_world.py:compute_score_fapo_oracle

A problem is a short story of sums: "Ben has 65 eggs, gets 9, loses 3. Remainder mod 5?" A solution has one
paragraph per sum ("65+9=74") and a final paragraph with the answer ("Remainder \\boxed{1}"). A forgotten
carry is an error of ten, which leaves the remainder unchanged: the step is wrong but the answer correct. A
reward that checks only the answer cannot detect such a flawed positive. If the question is "How many?", the
same slip makes the answer wrong.

In the second world (`own_flaws` in KINDS), no flaws are planted. Its stories have six to nine sums, and its
questions have few possible answers ("More than 50?", "Remainder mod 2?", "Remainder mod 5?"). A wrong
solution therefore often ends with the correct answer. Its policy was trained only on sound solutions, but not
for long enough.

This file generates problems, solutions with slips, and critiques that overlook slips, at adjustable rates. It
also contains an oracle that finds every slip, the reward functions, and the rows of the data sets.
toy/warm_start.py trains models on generated texts, and toy/report.py prints tables for finished runs. If you
copy this file, copy compute_score.py as well.

Not covered: the toy world is not a benchmark. The flaw of the first world is planted, and by construction a
check of the answer cannot see it. Real flawed positives are much more varied.
"""

import functools
import os
import re
import shutil
from pathlib import Path
from random import Random
from typing import NamedTuple

import compute_score as scores

# Questions of the first world. RL uses only REMAINDER, because a forgotten carry never changes its answer.
REMAINDER, TOTAL = "Remainder mod 5?", "How many?"
COARSE = ("More than 50?", "Remainder mod 2?", REMAINDER)  # questions of the second world
NAMES = ("Ben", "Ann", "Tom", "Eva", "Max", "Lea")
ITEMS = ("eggs", "pens", "nuts", "cards")
# The shipped models were trained on these shorter words. Their tokenizers replace the long words with the
# short ones, which keeps token ids, random choices and all published results unchanged.
SHORT_WORDS = {"Remainder": "Rest", " mod": " by"}
STEPS = (*range(-9, -1), *range(2, 10))
LOWEST, HIGHEST = 15, 99  # bounds of all correct intermediate values
SHIPPED = Path(__file__).with_name("models")  # models/README.md lists the metrics of these models.


# ---- Problems and solutions --------------------------------------------------------------------------------


class Problem(NamedTuple):
    """A start value, steps of +n or -n, and a question. `parse_problem` is the inverse of `str`."""

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
        """The question's kind, its condition and its number, such as ("Remainder", "mod 5", 5)."""
        if self.question == TOTAL:
            return "Total", "", 0
        head, _, condition = self.question.strip("?").partition(" ")
        return head, condition, int(condition.split()[1])

    def answer_for(self, total: int) -> int | str:
        """Return the answer to the question if the story ends with this total."""
        head, _, number = self.asked
        if head == "Total":
            return total
        if head == "Remainder":
            return total % number
        if total > number:
            return "yes"
        return "no"

    def another_answer(self, answer: int | str, rng: Random) -> int | str:
        """Return an answer of the same kind that differs from `answer`."""
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
    """Return the problem that `text` describes. Raises ValueError if `text` is not from the toy world."""
    asked = r"Remainder mod [2-9]\?|How many\?|More than \d+\?"
    match = re.fullmatch(rf"(\w+) has (\d+) (\w+)((?:, (?:gets|loses) \d+)+)\. ({asked})", text.strip())
    if not match:
        raise ValueError(
            f"question: {text!r} is not a problem of the toy world; prepare the data with "
            "prepare_data.py --tasks toy"
        )
    name, start, item, story, question = match.groups()
    signed = story.replace(", gets ", " ").replace(", loses ", " -")
    return Problem(name, item, int(start), tuple(map(int, signed.split())), question)


def random_problem(rng: Random, question: str | tuple, lengths: tuple[int, int] = (3, 4)) -> Problem:
    """Draw a problem with steps of 2 to 9 whose correct intermediate values are from LOWEST to HIGHEST.

    Args:
        question: The question, or a tuple of questions from which one is drawn.
        lengths: Minimum and maximum number of steps.
    """
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
    """Return left+step without the carry (or borrow), or None if the sum has no carry."""
    units = left % 10 + step
    if units > 9:
        return left + step - 10
    if units < 0:
        return left + step + 10
    return None


class Slips(NamedTuple):
    """Probabilities of a simulated solver's slips, per step."""

    carry: float = 0.0  # A carry or borrow is forgotten. The remainder mod 5 hides this error of ten.
    off: float = 0.0  # The result is off by one or two, which nearly always makes the answer wrong.
    last: float = 0.0  # The last line gives the wrong answer for the stated total.
    fives: float = 0.0  # The result is off by 5, 10 or 20.
    misread: float = 0.0  # The line starts from a value that is off by 5 or 10, or its step is off by 5.


def write_solution(problem: Problem, rng: Random, slips: Slips = Slips()) -> list[str]:
    """Return a solution as a list of paragraphs. Without slips, the solution is sound.

    The line after a slip starts from the wrong value.
    """
    value = problem.start
    lines = []
    for step in problem.steps:
        left = value
        value = left + step
        forgotten = forgets_carry(left, step)
        if rng.random() < slips.misread:  # Only one slip per line, because a second one could undo it.
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
    """Return the oracle's verdict: the 0-based index of the first wrong paragraph, or -1 if there is none.

    A line is correct if it starts from the previous value, applies the problem's step and states the correct
    result. The last line must answer the question. A problem therefore has exactly one sound solution, and
    every malformed, missing or additional line is wrong. Raises ValueError if the question is not from the
    toy world.
    """
    sound = write_solution(parse_problem(question), Random(0))
    stated = scores.split_paragraphs(solution)
    if stated == sound:
        return -1
    return first_difference(stated, sound)


def first_difference(one, other) -> int:
    """Return the index at which two texts or lists begin to differ, or the length of the shorter one."""
    return len(os.path.commonprefix([one, other]))


def write_critique(problem: Problem, paragraphs: list[str], rng: Random, miss=0.0, alarm=0.0, stop=True):
    """Write a critique that recomputes each line ("0:65+9=74?6 not") up to the first wrong line.

    The critique recomputes each line from the previous value. It then quotes the stated result up to the
    first wrong digit, because a tiny model can compare only single digits.

    Args:
        miss: The probability of accepting a wrong line, by "recomputing" the result that the line states.
        alarm: The probability of rejecting a correct line.
        stop: Whether to stop at the first wrong line and give a verdict. Otherwise, the critique checks all
            lines and gives no verdict, so that a judge can practise comparing.
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
        shared = first_difference(recomputed, stated)
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
    """A kind of toy world: its problems, and the slips in the texts from which its models learn."""

    question: str | tuple = REMAINDER  # The question of RL, or a tuple from which each problem draws one.
    lengths: tuple[int, int] = (3, 4)  # Minimum and maximum number of steps of a problem.
    # Slips of the policy, with which 70 % of its answers are correct. More than half of these are flawed.
    policy: Slips = Slips(carry=0.35, off=0.1, last=0.06)
    # Slips in the solutions that the judge reads.
    critic: Slips = Slips(carry=0.25, off=0.05, last=0.05, fives=0.12, misread=0.06)
    # Slips in the judge's practice texts, in which about half of the lines are wrong.
    practice: Slips = Slips(carry=0.35, off=0.2, last=0.5, fives=0.2, misread=0.1)
    # If set, the policy is trained on sound solutions, until this fraction of its own solutions is sound.
    stop_at: float | None = None


# The standard judge learns from all kinds of flaws, because FAPO-Critic contains solutions of many models.
#
# narrow_judge: The judge has seen only forgotten carries. It overlooks "82-2=70", where there is nothing to
# borrow, and the policy may learn to exploit this gap (reward hacking).
# weak_policy: The policy is wrong far more often than fully correct. FAPO encourages its flawed positives
# until that changes.
# own_flaws: The second world, without planted flaws. Its judge sees the flaws of the first world, but
# recipes/critic_rows.py makes rows from the policies' own flaws.
JUDGE = {"miss": 0.5, "alarm": 0.05}  # Error rates of the warm-started judge, which RL should reduce.
KINDS = {
    "standard": Kind(),
    "narrow_judge": Kind(critic=Slips(carry=0.35), practice=Slips(carry=0.8)),
    "weak_policy": Kind(policy=Slips(carry=0.35, off=0.45, last=0.3)),
    "own_flaws": Kind(question=COARSE, lengths=(6, 9), policy=Slips(), stop_at=0.25),
}


# ---- Reward functions --------------------------------------------------------------------------------------


def with_oracle(result: dict, solution_str: str, extra_info: dict) -> dict:
    """Add the oracle's findings to a result. The trainer averages the new keys.

    If the result already contains `first_wrong` or `sums_right`, its values are kept.
    """
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
    """Add the oracle's metrics to a reward function, and keep its signature to reject misspelt settings."""

    @functools.wraps(function)
    async def score(data_source, solution_str, ground_truth, extra_info, **settings) -> dict:
        result = await function(data_source, solution_str, ground_truth, extra_info, **settings)
        return with_oracle(result, solution_str, extra_info)

    return score


compute_score_fapo = watched(scores.compute_score_fapo)  # A served judge finds the flaws.
compute_score_baseline = watched(scores.compute_score_baseline)  # A judge can only add metrics.


def compute_score_fapo_oracle(
    data_source,
    solution_str,
    ground_truth,
    extra_info,
    *,
    penalty=1.0,
    recall=1.0,
    judge_wrong=True,
    place=0.0,
) -> dict:
    """Return FAPO's score with the oracle as a perfect judge (paper eq. 8).

    Args:
        penalty: FAPO's lambda. A flawed positive scores 1 - penalty.
        recall: The fraction of flawed solutions that the judge detects. For a given solution, the verdict is
            always the same.
        judge_wrong: Whether to locate the first error of wrong answers as well. Some advantages need it.
        place: A wrong answer gets this bonus times the fraction of its paragraphs before the first error.
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


compute_score_fapo_oracle.check_row = scores.check_answer


@functools.wraps(compute_score_fapo_oracle, assigned=())  # The signature rejects misspelt settings.
def compute_score_steps_oracle(data_source, solution_str, ground_truth, extra_info, **settings) -> dict:
    """Add `step_scores` to the score, for recipes/advantages.py:steps: 1 before the first error, then 0."""
    result = compute_score_fapo_oracle(data_source, solution_str, ground_truth, extra_info, **settings)
    first_wrong = result["first_wrong"]
    steps = [1.0] * len(scores.split_paragraphs(solution_str))
    if first_wrong is None:
        steps = None
    elif first_wrong != -1:
        steps[first_wrong:] = [0.0] * len(steps[first_wrong:])
    return result | {"step_scores": steps}


# ---- Rows --------------------------------------------------------------------------------------------------

# The toy judge needs a prompt that is short enough for a tiny model.
scores.PROMPT_STYLES["brief"] = ("{problem}\nTruth {answer}\n{solution}\nCheck:", "<{index}> {text}\n")


def critic_prompt(problem, paragraphs: list[str]) -> str:
    return scores.format_critic_prompt(str(problem), problem.answer, paragraphs, prompt_style="brief")


def policy_row(problem, data_source: str, split: str, index: int) -> dict:
    """Return a row for training or evaluating the policy on a problem of this world or of shop_world.py."""
    return {
        "data_source": data_source,
        "prompt": [{"role": "user", "content": str(problem)}],
        "ability": "Math",
        "reward_model": {"style": "rule", "ground_truth": problem.answer},
        "extra_info": {"split": split, "index": index, "question": str(problem)},
    }


def right_solution(rng: Random, flawed: bool, kind: Kind = KINDS["standard"]) -> tuple[Problem, list[str]]:
    """Draw a problem and a flawed or sound solution with a correct answer, as in FAPO-Critic."""
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
    """Return a row for training or evaluating the judge on a solution."""
    first_wrong = first_wrong_paragraph(str(problem), paragraphs)
    return labelled_row(problem, paragraphs, first_wrong, split, index)


def labelled_row(problem, paragraphs: list[str], first_wrong: int, split: str, index: int) -> dict:
    row = policy_row(problem, "fapo_critic", split, index)
    row["ability"] = "math_critic"
    row["prompt"][0]["content"] = critic_prompt(problem, paragraphs)
    row["reward_model"]["ground_truth"] = first_wrong
    row["extra_info"]["total_steps"] = len(paragraphs)
    return row


def make_rows(kind: str, settings: dict) -> dict[str, list[dict]]:
    """Return the rows of a toy world's five files, as {file: rows}.

    Args:
        kind: The name of a kind in KINDS. An empty string stands for "standard".
        settings: {"seed": the random seed of the problems}.
    """
    rng = Random(f"{settings['seed']}/rows")
    made = KINDS[kind or "standard"]
    files = {}
    for source, split, count in (
        ("toy", "train", 4096),
        ("toy", "test", 512),
        ("toy_total", "test", 512),
        ("fapo_critic", "train", 4096),
        ("fapo_critic", "test", 512),
    ):
        rows = []
        for index in range(count):
            if source == "fapo_critic":
                row = critic_row(*right_solution(rng, index % 2 == 0, made), split, index)
            else:
                problem = random_problem(rng, made.question if source == "toy" else TOTAL, made.lengths)
                row = policy_row(problem, source, split, index)
            rows.append(row)
        files[f"{source}_{split}"] = rows
    return files


def copy_models(out_dir: Path) -> None:
    """Copy the warm-started models of toy/models/ into this directory."""
    for name in ("policy", "judge"):
        shutil.copytree(SHIPPED / name, out_dir / name, dirs_exist_ok=True)
        print(f"{out_dir / name}: the warm-started {name} from {SHIPPED}")
