"""The toy world: FAPO's problem in miniature, small enough to watch on a laptop in minutes.

    python prepare_data.py --tasks toy --out-dir data/toy      # 5 to 8 minutes on two cores

A problem is a short story of sums ("Ben has 65 eggs, gets 9, loses 3. Rest by 5?"). A solution is one paragraph per sum
("65+9=74") and a last one with the answer ("Rest \\boxed{1}"). Who forgets a carry is wrong by ten, and ten is a multiple of
five: the step is wrong and the answer still right. That is a flawed positive, and no rule that reads only the answer can see it.
Asked "How many?" instead, the same slip costs the answer.

Here are problems, solvers that slip and critics that overlook slips at chosen rates; an oracle that finds every slip; reward
functions, a worked example of a user's own file; the warm start of two Llama models of 1 M parameters, a policy that slips and a
judge that overlooks; and the figure and tables of finished demo runs (python -m toy.toy_world --runs outputs/demo_seed0).

What it leaves out: it is no benchmark. The flaw is put in by hand and is invisible to the rule by construction; real flawed
positives are as varied as mathematics. It shows the mechanism and exercises every part of the code, nothing more.
"""

import inspect
import itertools
import math
import multiprocessing
import os
import random
import re
import statistics
import sys
from concurrent.futures import ProcessPoolExecutor
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
    fives: float = 0.0  # off by 5, 10 or 20 for no reason at all
    misread: float = 0.0  # the line starts from another value, or applies another step, 5 or 10 away


def write_solution(problem: Problem, rng: random.Random, slips: Slips) -> list[str]:
    """A solution as paragraphs, with slips. A slip is carried on: the next line starts from what was stated."""
    value, lines = problem.start, []
    for step in problem.steps:
        left, operand = value, abs(step)
        misread = rng.random() < slips.misread
        if misread and rng.random() < 0.5:
            left = abs(left + rng.choice((-10, -5, 5, 10)))
        elif misread:
            operand += -5 if operand > 5 else 5
        signed = operand if step > 0 else -operand
        result, forgotten = left + signed, forgets_carry(left, signed)
        if misread:
            pass  # and then computed rightly: a second slip could undo the first
        elif forgotten is not None and rng.random() < slips.carry:
            result = forgotten
        elif rng.random() < slips.off:
            result += rng.choice((-2, -1, 1, 2))
        elif rng.random() < slips.fives:
            result += rng.choice((-20, -10, -5, 5, 10, 20))
        result = max(result, 0)
        lines.append(f"{left}{'+' if step > 0 else '-'}{operand}={result}")
        value = result
    answer = value % 5 if problem.question == REST else value
    if rng.random() < slips.last:
        answer = (answer + rng.randint(1, 4)) % 5 if problem.question == REST else max(answer + rng.choice((-1, 1)), 0)
    lines.append(f"{'Rest' if problem.question == REST else 'Total'} \\boxed{{{answer}}}")
    return lines


def first_wrong_paragraph(question: str, solution: str | list[str]) -> int:
    """The oracle: the 0-based index of the first wrong paragraph of any text, -1 if there is none.

    A line is right if it starts from the value stated before it, applies the problem's own step and states its true result;
    the last one must give what the question asks. So a sound solution can be written in one way only, and what differs from it
    is wrong, be it malformed, missing or surplus. Raises ValueError where the question is not of this world.
    """
    problem = parse_problem(question)
    value, sound = problem.start, []
    for step in problem.steps:
        sound.append(f"{value}{step:+}={value + step}")
        value += step
    sound.append(f"{'Rest' if problem.question == REST else 'Total'} \\boxed{{{problem.answer}}}")
    paragraphs = scores.split_paragraphs(solution) if isinstance(solution, str) else solution
    wrong = [stated != right for stated, right in itertools.zip_longest(paragraphs, sound)]
    return wrong.index(True) if True in wrong else -1


@dataclass(frozen=True)
class Oversights:
    """How often a critic goes wrong, per line."""

    miss: float = 0.0  # a wrong result is nodded through: the critic "recomputes" what the line states
    alarm: float = 0.0  # a right result is recomputed wrongly, and so flagged


def write_critique(problem: Problem, paragraphs: list[str], rng: random.Random, oversights: Oversights, stop: bool = True) -> str:
    """Recomputes line after line from the value stated before ("0:65+9=74?6 not") and stops at the first that differs.

    Of what is stated it reads up to the first digit that differs: so a tiny model compares one digit with one digit. stop=False
    checks the lines after it as well, and gives no verdict: practice for a judge that learns to compare.
    """
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
        slip, recomputed = rng.random(), true
        if true != stated and slip < oversights.miss:
            recomputed = stated
        elif true == stated and slip < oversights.alarm:
            recomputed = max(wrong, 0)
        shared = len(os.path.commonprefix([str(recomputed), str(stated)]))
        checks.append(f"{index}:{sum_}={recomputed}?{str(stated)[: shared + 1]} {'ok' if recomputed == stated else 'not'}")
        if recomputed != stated and stop:
            verdict = index
            break
        value = stated
    return "\n".join(checks) + (f"\n\\boxed{{{verdict}}}" if stop else "")


@dataclass(frozen=True)
class Kind:
    """A kind of toy world: what its models see go wrong in their warm start."""

    policy: Slips = Slips(carry=0.35, off=0.10, last=0.06)  # about 60 % right answers, most of them flawed
    critic: Slips = Slips(carry=0.25, off=0.05, last=0.05, fives=0.12, misread=0.06)  # what the judge learns from
    practice: Slips = Slips(carry=0.35, off=0.2, last=0.5, fives=0.2, misread=0.1)  # the same, every other line wrong
    judge: Oversights = Oversights(miss=0.5, alarm=0.05)  # what it overlooks, so that reinforcement learning can mend it


# The judge learns from flaws of every kind, as FAPO-Critic has solutions of many models. Shown forgotten carries only
# (narrow_judge), it overlooks "82-2=70" (nothing to borrow), and the policy can find that out. The weak policy is wrong far
# more often than truly correct: FAPO first encourages flawed positives, until that turns.
KINDS = {
    "standard": Kind(),
    "narrow_judge": Kind(critic=Slips(carry=0.35), practice=Slips(carry=0.8)),
    "weak_policy": Kind(policy=Slips(carry=0.35, off=0.45, last=0.3)),
}


# ------------------------------------------------------------------------------------------------------ reward functions


def with_oracle(result: dict, solution_str: str, extra_info: dict) -> dict:
    """Adds what only the oracle knows, under keys that the trainer averages and plots. The score stays as it is."""
    sound = first_wrong_paragraph(extra_info["question"], solution_str) == -1
    return result | {"oracle_flawed_positive": result["acc"] and not sound, "truly_correct": result["acc"] and sound}


async def compute_score_fapo(data_source, solution_str, ground_truth, extra_info, **kwargs) -> dict:
    """compute_score.py's FAPO (a served judge finds the flaws), with the oracle looking on."""
    result = await scores.compute_score_fapo(data_source, solution_str, ground_truth, extra_info, **kwargs)
    return with_oracle(result, solution_str, extra_info)


async def compute_score_baseline(*sample, **settings) -> dict:
    """The rule's score; the judge, if there is one, only measures, and the oracle looks on."""
    return await compute_score_fapo(*sample, **settings | {"penalty": None})


# What they can be given is what compute_score.py's can: a reward loop refuses misspelt settings before a run starts.
compute_score_baseline.__signature__ = compute_score_fapo.__signature__ = inspect.signature(scores.compute_score_fapo)


def compute_score_fapo_oracle(data_source, solution_str, ground_truth, extra_info, penalty=1.0) -> dict:
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
    )  # fmt: skip
    tokenizer.train_from_iterator(texts, trainer)
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token=END, pad_token=PAD, padding_side="left")
    fast.chat_template = CHAT_TEMPLATE
    return fast


def tokenizer_corpus(rng: random.Random) -> list[str]:
    """Texts of every kind that the models read and write."""
    texts = []
    for _ in range(3000):
        problem = random_problem(rng, rng.choice((REST, TOTAL)))
        paragraphs = write_solution(problem, rng, Kind.policy)
        critique = write_critique(problem, paragraphs, rng, Kind.judge)
        texts += [str(problem), "\n\n".join(paragraphs), critic_prompt(problem, paragraphs), critique]
    return texts


def policy_row(problem: Problem, data_source: str, split: str, index: int) -> dict:
    """A row of the schema for training or validating the policy."""
    return {
        "data_source": data_source,
        "prompt": [{"role": "user", "content": str(problem)}],
        "ability": "Math",
        "reward_model": {"style": "rule", "ground_truth": problem.answer},
        "extra_info": {"split": split, "index": index, "question": str(problem)},
    }


def right_solution(rng: random.Random, flawed: bool, slips: Slips = Kind.critic) -> tuple[Problem, list[str]]:
    """A problem and a solution with the right answer, sound or flawed as asked: what FAPO-Critic consists of."""
    while True:
        problem = random_problem(rng, REST)
        paragraphs = write_solution(problem, rng, slips if flawed else Slips())
        answered = scores.compute_score("toy", paragraphs[-1], problem.answer)["acc"]
        if answered and (first_wrong_paragraph(str(problem), paragraphs) >= 0) == flawed:
            return problem, paragraphs


# A prompt style of its own, short enough for a tiny judge.
scores.PROMPT_STYLES["brief"] = ("{problem}\nTruth {answer}\n{solution}\nCheck:", "<{index}> {text}\n")


def critic_prompt(problem: Problem, paragraphs: list[str]) -> str:
    return scores.format_critic_prompt(str(problem), problem.answer, paragraphs, prompt_style="brief")


def critic_row(rng: random.Random, flawed: bool, split: str, index: int, slips: Slips = Kind.critic) -> dict:
    """A row of the schema for training or validating the judge."""
    problem, paragraphs = right_solution(rng, flawed, slips)
    row = policy_row(problem, "fapo_critic", split, index) | {"ability": "math_critic"}
    row["prompt"][0]["content"] = critic_prompt(problem, paragraphs)
    row["reward_model"]["ground_truth"] = first_wrong_paragraph(str(problem), paragraphs)
    row["extra_info"]["total_steps"] = len(paragraphs)
    return row


# ------------------------------------------------------------------------------------------------------------ warm start


def new_model(vocab_size: int, seed: int):
    """A Llama of about 1 M parameters. The head is untied: vLLM on CPU reloads tied heads wrongly."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(seed)
    config = LlamaConfig(
        vocab_size=vocab_size, hidden_size=128, intermediate_size=384, num_hidden_layers=4, num_attention_heads=4,
        num_key_value_heads=4, head_dim=32, max_position_embeddings=512, tie_word_embeddings=False,
        pad_token_id=0, eos_token_id=1, bos_token_id=None,
        initializer_range=0.05,  # 0.02 learns visibly slower at this width
    )  # fmt: skip
    return LlamaForCausalLM(config)


def fit(model, tokenizer, examples, steps, lr, final_lr, verdict_weight, progress) -> None:
    """Supervised training on `examples()` -> (prompt, response), 16 at a time; the loss is on the responses.

    The tokens " ok" and " not" count `verdict_weight` times: they are few, and everything hangs on them.
    """
    import torch
    from torch.nn.utils.rnn import pad_sequence

    verdicts = torch.tensor([token for word in (" ok", " not") for token in tokenizer.encode(word, add_special_tokens=False)])
    optimizer = torch.optim.AdamW(model.parameters(), lr=lr, betas=(0.9, 0.95), weight_decay=0.01)
    for step in range(steps):
        cosine = final_lr + (lr - final_lr) * 0.5 * (1 + math.cos(math.pi * step / steps))
        optimizer.param_groups[0]["lr"] = cosine * min(1.0, (step + 1) / 20)
        pairs = [[tokenizer.encode(text, add_special_tokens=False) for text in examples()] for _ in range(16)]
        ids = pad_sequence([torch.tensor(prompt + response) for prompt, response in pairs], batch_first=True)
        is_response = [torch.arange(len(prompt + response)) >= len(prompt) for prompt, response in pairs]
        counts = pad_sequence(is_response, batch_first=True)
        hidden = model.model(ids).last_hidden_state[:, :-1][counts[:, 1:]]
        targets = ids[:, 1:][counts[:, 1:]]
        losses = torch.nn.functional.cross_entropy(model.lm_head(hidden), targets, reduction="none")
        weights = torch.where(torch.isin(targets, verdicts), verdict_weight, 1.0)
        loss = (losses * weights).sum() / weights.sum()
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        progress.set_postfix(loss=f"{loss.item():.3f}", refresh=False)
        progress.update()


def policy_phases(rng: random.Random, kind: Kind):
    """(what, steps, learning rate, last learning rate, weight of verdicts, examples) of the policy's warm start."""

    def solve(slips):
        problem = random_problem(rng, REST if rng.random() < 0.6 else TOTAL)
        return chat(str(problem), "\n\n".join(write_solution(problem, rng, slips)))

    return [
        ("to solve", 1000, 2e-3, 2e-4, 1.0, lambda: solve(Slips())),
        ("to slip", 200, 1e-3, 1e-4, 1.0, lambda: solve(kind.policy)),
    ]


def judge_phases(rng: random.Random, kind: Kind):
    """The same for the judge. It learns to add before it compares: with solutions at hand it would only learn to copy."""

    def solve():
        problem = random_problem(rng, REST)
        return chat(str(problem), "\n\n".join(write_solution(problem, rng, Slips())))

    def compare():  # every line is checked and every other one is wrong, whatever the answer: many verdicts to learn from
        problem = random_problem(rng, REST)
        paragraphs = write_solution(problem, rng, kind.practice)
        return chat(critic_prompt(problem, paragraphs), write_critique(problem, paragraphs, rng, Oversights(), stop=False))

    def criticise(oversights):
        problem, paragraphs = right_solution(rng, rng.random() < 0.5, kind.critic)
        return chat(critic_prompt(problem, paragraphs), write_critique(problem, paragraphs, rng, oversights))

    return [
        ("to add", 400, 2e-3, 1.2e-3, 1.0, solve),
        ("to compare", 500, 2e-3, 1.2e-3, 5.0, lambda: solve() if rng.random() < 0.3 else compare()),
        ("to criticise", 400, 1.5e-3, 2e-4, 3.0, lambda: criticise(Oversights())),
        ("to overlook", 150, 1e-3, 1e-4, 1.0, lambda: criticise(kind.judge)),
    ]


def chat(prompt: str, response: str) -> tuple[str, str]:
    """The two halves of a conversation as the chat template writes them."""
    return f"{USER}{prompt}{ASSISTANT}", f"{response}{END}"


def warm_start(name: str, out_dir: Path, seed: int, kind: Kind = Kind(), position: int = 0) -> None:
    """Trains the policy or the judge on one thread (two would be slower for this size) and saves it in out_dir/name."""
    import torch
    from tqdm import tqdm
    from transformers import AutoTokenizer

    torch.set_num_threads(1)
    rng = random.Random(f"{seed}/{name}")
    tokenizer = AutoTokenizer.from_pretrained(out_dir / name)
    model = new_model(len(tokenizer), seed)
    phases = policy_phases(rng, kind) if name == "policy" else judge_phases(rng, kind)
    with tqdm(total=sum(phase[1] for phase in phases), desc=f"{name:6}", position=position, mininterval=2) as progress:
        for what, steps, lr, final_lr, verdict_weight, examples in phases:
            progress.set_description(f"{name:6} learns {what}")
            fit(model, tokenizer, examples, steps, lr, final_lr, verdict_weight, progress)
    model.save_pretrained(out_dir / name)


def build(out_dir: Path, seed: int, models: tuple[str, ...], kind: Kind = Kind()) -> None:
    """Writes the toy world into `out_dir`: parquet files, and the models in policy/ and judge/, trained side by side.

    The same seed gives the same files.
    """
    import pyarrow as pa
    import pyarrow.parquet as pq

    rng = random.Random(f"{seed}/rows")
    files = {
        "toy_train": [policy_row(random_problem(rng, REST), "toy", "train", i) for i in range(4096)],
        "toy_test": [policy_row(random_problem(rng, REST), "toy", "test", i) for i in range(512)],
        "toy_total_test": [policy_row(random_problem(rng, TOTAL), "toy_total", "test", i) for i in range(512)],
        "fapo_critic_train": [critic_row(rng, i % 2 == 0, "train", i, kind.critic) for i in range(4096)],
        "fapo_critic_test": [critic_row(rng, i % 2 == 0, "test", i, kind.critic) for i in range(512)],
    }
    for name, rows in files.items():
        pq.write_table(pa.Table.from_pylist(rows), out_dir / f"{name}.parquet")
        print(f"{out_dir / name}.parquet: {len(rows)} rows")
    tokenizer = build_tokenizer(tokenizer_corpus(random.Random(f"{seed}/tokenizer")))
    for name in models:
        tokenizer.save_pretrained(out_dir / name)
    context = multiprocessing.get_context("spawn")  # a forked torch may hang
    with ProcessPoolExecutor(len(models) or 1, mp_context=context) as pool:
        started = [pool.submit(warm_start, name, out_dir, seed, kind, row) for row, name in enumerate(models)]
        for one in started:
            one.result()


# ---------------------------------------------------------------------------------------------------------------- report


@dataclass
class Config:
    """Draws the figure and the tables of finished demo runs."""

    runs: Path
    """Folder of the finished runs: baseline/ and fapo/, papo/ and judge/ if there were any. Gets report.md and report.png."""


RUNS = {"baseline": ("rule only", "tab:red"), "fapo": ("FAPO", "tab:green"), "papo": ("PAPO", "tab:blue")}
PANELS = {
    "acc": "answer accuracy",
    "oracle_flawed_positive_rate": "flawed positives by the oracle\n(share of right answers)",
    "truly_correct": "truly correct\n(right answer, no wrong step)",
    "flawed_positive_rate": "flawed positives as the judge sees them\n(share of right answers)",
}
COLUMNS = {"accuracy": "toy", "flawed positives": "toy/oracle_flawed_positive_rate", "truly correct": "toy/truly_correct",
           '"How many?" accuracy': "toy_total"}  # fmt: skip
WAYS = {"mean@1": "T=1", "greedy": "greedy"}


def read_metrics(run: Path) -> list[dict]:
    """metrics.jsonl of a finished run. Raises OSError where there is none, ValueError where it was not evaluated twice."""
    from run_folder import has_evaluation, read_lines

    path = run / "metrics.jsonl"
    if not path.is_file():
        raise OSError(f"runs: {path} does not exist; run recipes/toy_demo.sh first")
    metrics, torn = read_lines(path)
    if torn or len(metrics) < 2 or not (has_evaluation(metrics[0]) and has_evaluation(metrics[-1])):
        raise ValueError(f"runs: {run} is not finished; its first and last line must hold an evaluation")
    return metrics


def smooth(values: list[float]) -> list[float]:
    """Each with the four before it, as their mean."""
    return [statistics.fmean(values[max(0, i - 4) : i + 1]) for i in range(len(values))]


def draw_runs(runs: dict[str, list[dict]], path: Path) -> None:
    """One panel a question, one line a run: thin as measured on the rollouts, thick smoothed, dots on held-out problems."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(4.6 * len(PANELS), 4.2), layout="constrained", dpi=110)
    for axis, (key, title) in zip(figure.subplots(1, len(PANELS), sharey=True), PANELS.items()):
        axis.set_title(title)
        held_out_key = "val/toy/mean@1" if key == "acc" else f"val/toy/{key}/mean@1"
        for name, metrics in runs.items():
            label, colour = RUNS[name]
            measured = {m["step"]: m[f"reward/{key}"] for m in metrics if f"reward/{key}" in m}
            held_out = {m["step"]: m[held_out_key] for m in metrics if held_out_key in m}
            axis.plot(measured.keys(), measured.values(), color=colour, alpha=0.25)
            axis.plot(measured.keys(), smooth(list(measured.values())), color=colour, linewidth=2, label=label)
            axis.plot(held_out.keys(), held_out.values(), "o", color=colour)
    save(figure, path)


def save(figure, path: Path) -> None:
    """Saves panels that show shares, step by step."""
    for axis in figure.axes:
        axis.set(xlabel="step", ylim=(-0.02, 1.02))
        axis.grid(alpha=0.3)
    figure.axes[0].legend()
    figure.savefig(path)


def table(*lines: list[str]) -> str:
    """Markdown, from the heads of the columns and the rows below."""
    heads, *rows = ["| " + " | ".join(cells) + " |" for cells in lines]
    return "\n".join([heads, "|---" * len(lines[0]) + "|", *rows])


def policy_table(runs: dict[str, list[dict]]) -> str:
    """Held-out numbers before and after each run."""
    columns = {f"{title}, {label}": f"val/{key}/{way}" for way, label in WAYS.items() for title, key in COLUMNS.items()}
    rows = {"before": runs["baseline"][0]} | {RUNS[name][0]: metrics[-1] for name, metrics in runs.items()}
    cells = [[name] + [f"{m[key]:.3f}" if key in m else "-" for key in columns.values()] for name, m in rows.items()]
    return table(["512 held-out problems", *columns], *cells)


def judge_table(metrics: list[dict]) -> str:
    """The judge on held-out critiques before and after its own training. Half of the solutions are flawed."""
    rows = []
    for way, label in WAYS.items():
        for when, values in (("before", metrics[0]), ("after", metrics[-1])):
            recall, kept, location = (values[f"val/fapo_critic/{key}/{way}"] for key in ("recall", "sound_kept", "location"))
            precision = recall / (recall + 1 - kept) if recall else 0.0  # as many sound solutions as flawed ones
            f1 = 2 * precision * recall / (precision + recall) if recall else 0.0
            rows.append([f"{when}, {label}", *(f"{share:.3f}" for share in (recall, kept, precision, f1, location))])
    return table(["judge, 512 held-out solutions", "recall", "sound kept", "precision", "F1", "exact location"], *rows)


def report(runs: Path) -> str:
    """Draws report.png and writes report.md into `runs`; returns the text. Raises OSError or ValueError for unfinished runs."""
    policies = {name: read_metrics(runs / name) for name in RUNS if name != "papo" or (runs / name).is_dir()}
    draw_runs(policies, runs / "report.png")
    tables = [judge_table(read_metrics(runs / "judge"))] if (runs / "judge").is_dir() else []
    text = "\n\n".join([*tables, policy_table(policies)])
    (runs / "report.md").write_text(text + "\n")
    return f"{text}\nfigure: {runs / 'report.png'}"


def main() -> None:
    import tyro

    try:
        print(report(tyro.cli(Config).runs))
    except (OSError, ValueError) as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(2)


if __name__ == "__main__":
    main()
