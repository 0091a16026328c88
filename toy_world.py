"""The toy world: FAPO's problem in miniature, small enough to watch on a laptop in minutes.

    python prepare_data.py --tasks toy --out-dir data/toy      # about 6 minutes on two cores

A problem is a short story of sums ("Ben has 65 eggs, gets 9, loses 3. Rest by 5?"). A solution is one paragraph per sum
("65+9=74") and a last one with the answer ("Rest \\boxed{1}"). Who forgets a carry is wrong by ten, and ten is a multiple of
five: the step is wrong and the answer still right. That is a flawed positive, and no rule that reads only the answer can see it.
Asked "How many?" instead, the same slip costs the answer.

What is here, top to bottom:
    problems and solutions   problems, solvers that slip at chosen rates, and critics that overlook slips at chosen rates
    the oracle               names the first wrong paragraph of any text, exactly
    reward functions         those of compute_score.py plus what the oracle sees: a worked example of a user's own file
    rows and tokenizer       parquet files in the row schema, a byte-pair tokenizer with a chat template
    warm start               two Llama models of 1 M parameters: a policy that slips and a judge that overlooks

What it leaves out: it is no benchmark. The flaw is put in by hand and is invisible to the rule by construction; real flawed
positives are as varied as mathematics. It shows the mechanism and exercises every part of the code, nothing more.
"""

import json
import multiprocessing
import random
import re
from dataclasses import dataclass
from pathlib import Path

import compute_score as scores

# The two kinds of question. Only the first is trained with RL: in it a forgotten carry never costs the answer.
REST, TOTAL = "Rest by 5?", "How many?"
NAMES = ("Ben", "Ann", "Tom", "Eva", "Max", "Lea")
ITEMS = ("eggs", "pens", "nuts", "cards")
LOWEST, HIGHEST = 15, 99  # every true intermediate value stays in here


# ---------------------------------------------------------------------------------------------- problems and solutions


@dataclass(frozen=True)
class Problem:
    """Start value, then (+n or -n) steps, then a question. `str(problem)` is its text; `parse_problem` its inverse."""

    name: str
    item: str
    start: int
    steps: tuple[int, ...]
    question: str

    def __str__(self) -> str:
        story = "".join(f", {'gets' if step > 0 else 'loses'} {abs(step)}" for step in self.steps)
        return f"{self.name} has {self.start} {self.item}{story}. {self.question}"

    @property
    def answer(self) -> str:
        total = self.start + sum(self.steps)
        return str(total % 5 if self.question == REST else total)


def parse_problem(text: str) -> Problem:
    """The problem that `text` tells. Raises ValueError where the text is not one of this world."""
    match = re.fullmatch(r"(\w+) has (\d+) (\w+)((?:, (?:gets|loses) \d+)+)\. (.+)", text.strip())
    if not match or match[5] not in (REST, TOTAL):
        raise ValueError(f"question: not a problem of the toy world: {text!r}; prepare data with --tasks toy")
    steps = tuple(int(n) if verb == "gets" else -int(n) for verb, n in re.findall(r"(gets|loses) (\d+)", match[4]))
    return Problem(match[1], match[3], int(match[2]), steps, match[5])


def random_problem(rng: random.Random, question: str) -> Problem:
    """3 or 4 steps of 2-9; every true intermediate value in LOWEST..HIGHEST."""
    value = start = rng.randint(20, 89)
    steps = []
    for _ in range(rng.randint(3, 4)):
        step = rng.choice([s for s in (*range(-9, -1), *range(2, 10)) if LOWEST <= value + s <= HIGHEST])
        steps.append(step)
        value += step
    return Problem(rng.choice(NAMES), rng.choice(ITEMS), start, tuple(steps), question)


def forgets_carry(left: int, step: int) -> int | None:
    """The result of left+step if the carry (or borrow) is forgotten; None where there is nothing to forget."""
    units = left % 10 + step
    return left + step - 10 if units > 9 else left + step + 10 if units < 0 else None


@dataclass(frozen=True)
class Slips:
    """How often a solver goes wrong, per step."""

    carry: float = 0.0  # a carry or borrow is forgotten: off by ten, which "Rest by 5?" never notices
    off: float = 0.0  # off by one or two: costs the answer nearly always
    last: float = 0.0  # a wrong last line


def write_solution(problem: Problem, rng: random.Random, slips: Slips) -> list[str]:
    """A solution as paragraphs, with slips. A slip is carried on: the next line starts from what was stated."""
    value, lines = problem.start, []
    for step in problem.steps:
        result, forgotten = value + step, forgets_carry(value, step)
        if forgotten is not None and rng.random() < slips.carry:
            result = forgotten
        elif rng.random() < slips.off:
            result += rng.choice((-2, -1, 1, 2))
        result = max(result, 0)
        lines.append(f"{value}{'+' if step > 0 else '-'}{abs(step)}={result}")
        value = result
    answer = value % 5 if problem.question == REST else value
    if rng.random() < slips.last:
        answer = (answer + rng.randint(1, 4)) % 5 if problem.question == REST else max(answer + rng.choice((-1, 1)), 0)
    lines.append(f"{'Rest' if problem.question == REST else 'Total'} \\boxed{{{answer}}}")
    return lines


LINE = re.compile(r"(\d+)([+-])(\d+)=(\d+)")


def first_wrong_paragraph(question: str, solution: str | list[str]) -> int:
    """The oracle: the 0-based index of the first wrong paragraph of any text, -1 if there is none.

    A line is right if it starts from the value stated before it, applies the problem's own step and states its true result;
    the last one must give what the question asks of the last stated value. A malformed, missing or surplus paragraph is wrong
    at its index. Raises ValueError where the question is not of this world.
    """
    problem = parse_problem(question)
    paragraphs = scores.split_paragraphs(solution) if isinstance(solution, str) else solution
    value = problem.start
    for index, step in enumerate(problem.steps):
        match = LINE.fullmatch(paragraphs[index]) if index < len(paragraphs) else None
        if not match or int(match[1]) != value or int(match[2] + match[3]) != step or int(match[4]) != value + step:
            return index
        value = int(match[4])
    last = f"Rest \\boxed{{{value % 5}}}" if problem.question == REST else f"Total \\boxed{{{value}}}"
    if len(paragraphs) <= len(problem.steps) or paragraphs[len(problem.steps)] != last:
        return len(problem.steps)
    return -1 if len(paragraphs) == len(problem.steps) + 1 else len(problem.steps) + 1


@dataclass(frozen=True)
class Oversights:
    """How often a critic goes wrong, per line."""

    miss: float = 0.0  # a wrong result is nodded through: the critic "recomputes" what the line states
    alarm: float = 0.0  # a right result is recomputed wrongly, and so flagged


def write_critique(problem: Problem, paragraphs: list[str], rng: random.Random, oversights: Oversights) -> str:
    """Recomputes line after line from the value stated before ("0:65+9=74?64 not") and stops at the first that differs."""
    value, checks, verdict = problem.start, [], -1
    for index, paragraph in enumerate(paragraphs):
        if index < len(problem.steps):
            step, stated = problem.steps[index], int(paragraph.split("=")[1])
            true, sum_ = value + step, f"{value}{'+' if step > 0 else '-'}{abs(step)}"
            wrong = forgets_carry(value, step)
            wrong = true + rng.choice((-1, 1)) if wrong is None or rng.random() < 0.2 else wrong
        else:
            stated = int(re.search(r"\d+", paragraph)[0])
            true, sum_ = (value % 5, f"{value} by 5") if problem.question == REST else (value, f"{value}")
            wrong = (true + rng.randint(1, 4)) % 5 if problem.question == REST else true + 1
        slip = rng.random()
        recomputed = stated if true != stated and slip < oversights.miss else max(wrong, 0) if true == stated and slip < oversights.alarm else true
        same = recomputed == stated
        checks.append(f"{index}:{sum_}={recomputed}?{stated} {'ok' if same else 'not'}")
        if not same:
            verdict = index
            break
        value = stated
    return "\n".join(checks) + f"\n\\boxed{{{verdict}}}"


# ------------------------------------------------------------------------------------------------------ reward functions


def with_oracle(result: dict, solution_str: str, extra_info: dict) -> dict:
    """Adds what only the oracle knows, under keys that the trainer averages and plots. The score stays as it is."""
    sound = first_wrong_paragraph(extra_info["question"], solution_str) == -1
    return result | {"oracle_flawed_positive": result["acc"] and not sound, "truly_correct": result["acc"] and sound}


async def compute_score_baseline(data_source, solution_str, ground_truth, extra_info, **kwargs) -> dict:
    """compute_score.py's baseline, with the oracle looking on."""
    result = await scores.compute_score_baseline(data_source, solution_str, ground_truth, extra_info, **kwargs)
    return with_oracle(result, solution_str, extra_info)


async def compute_score_fapo(data_source, solution_str, ground_truth, extra_info, **kwargs) -> dict:
    """compute_score.py's FAPO (a served judge finds the flaws), with the oracle looking on."""
    result = await scores.compute_score_fapo(data_source, solution_str, ground_truth, extra_info, **kwargs)
    return with_oracle(result, solution_str, extra_info)


def compute_score_fapo_oracle(data_source, solution_str, ground_truth, extra_info, penalty=1.0, **_) -> dict:
    """FAPO with the oracle as a perfect judge (paper eq. 8: a flawed positive gets 1 - penalty)."""
    result = with_oracle(scores.compute_score(data_source, solution_str, ground_truth), solution_str, extra_info)
    flawed = result["oracle_flawed_positive"]
    return result | {"score": result["score"] - penalty * flawed, "flawed_positive": flawed}


# ---------------------------------------------------------------------------------------------------- rows and tokenizer

USER, ASSISTANT, END, PAD = "<|user|>", "<|assistant|>", "<|end|>", "<|pad|>"
CHAT_TEMPLATE = (
    "{% for message in messages %}{{ '<|' + message['role'] + '|>' + message['content'] }}"
    "{% if message['role'] == 'assistant' %}{{ '<|end|>' }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|assistant|>' }}{% endif %}"
)


def build_tokenizer(texts: list[str]):
    """A byte-level BPE tokenizer trained on `texts`; digits stay single and "\\n\\n" is always one piece."""
    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    tokenizer = Tokenizer(models.BPE())
    split = pre_tokenizers.Split(Regex(r"\n\n|\n?[^\d\n]+|\n|\d"), behavior="isolated")
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([split, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)])
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=1024, special_tokens=[PAD, END, USER, ASSISTANT], initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        min_frequency=2, show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token=END, pad_token=PAD, padding_side="left")
    fast.chat_template = CHAT_TEMPLATE
    return fast


def policy_row(problem: Problem, data_source: str, split: str, index: int) -> dict:
    """A row of the schema for training or validating the policy."""
    return {
        "data_source": data_source,
        "prompt": [{"role": "user", "content": str(problem)}],
        "ability": "Math",
        "reward_model": {"style": "rule", "ground_truth": problem.answer},
        "extra_info": {"split": split, "index": index, "question": str(problem)},
    }


def right_solution(rng: random.Random, flawed: bool) -> tuple[Problem, list[str]]:
    """A problem and a solution with the right answer, sound or flawed as asked: what FAPO-Critic consists of."""
    while True:
        problem = random_problem(rng, REST)
        paragraphs = write_solution(problem, rng, POLICY_SLIPS if flawed else Slips())
        answered = scores.compute_score("toy", paragraphs[-1], problem.answer)["acc"]
        if answered and (first_wrong_paragraph(str(problem), paragraphs) >= 0) == flawed:
            return problem, paragraphs


def critic_prompt(problem: Problem, paragraphs: list[str]) -> str:
    return scores.format_critic_prompt(str(problem), problem.answer, paragraphs, prompt_style="brief")


def critic_row(rng: random.Random, flawed: bool, split: str, index: int) -> dict:
    """A row of the schema for training or validating the judge."""
    problem, paragraphs = right_solution(rng, flawed)
    return {
        "data_source": "fapo_critic",
        "prompt": [{"role": "user", "content": critic_prompt(problem, paragraphs)}],
        "ability": "math_critic",
        "reward_model": {"style": "rule", "ground_truth": first_wrong_paragraph(str(problem), paragraphs)},
        "extra_info": {"split": split, "index": index, "total_steps": len(paragraphs)},
    }
