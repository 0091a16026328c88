"""Euclid's algorithm for reasoning-gym's task `gcd`: a policy that writes out its steps, and an exact check.

    bash recipes/public_flaws.sh 0 outputs/gcd0               # the whole comparison
    python -m recipes.gcd_steps --out-dir data/gcd/policy0    # trains the initial policy
    python grpo_trainer.py ... --reward-fn recipes/gcd_steps.py:compute_score_fapo

reasoning-gym supplies the questions and the verifier. The policy writes one division per line and then the
answer:

    84=36*2+12

    36=12*3+0

    \\boxed{12}

Most answers are small numbers, so a solution with a wrong remainder often still ends with the correct answer.
The verifier cannot detect such a flawed positive. No flaws are planted: the initial policy is trained only on
correct solutions, and its training stops early. Not covered: other ways to find the divisor, which count as
flawed.
"""

import json
import re
import statistics
import sys
from dataclasses import dataclass
from pathlib import Path
from random import Random

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
from recipes import gym_tasks  # noqa: E402

SETTINGS = {"max_value": 30}  # A policy of 1 M parameters would learn larger numbers too slowly.
LINE = re.compile(r"([0-9]{1,9})=([0-9]{1,9})\*([0-9]{1,9})\+([0-9]{1,9})")


def numbers_of(question: str) -> list[int]:
    """Return the numbers whose greatest common divisor the question asks for."""
    return [int(number) for number in re.findall(r"[0-9]+", question)]


def write_solution(first: int, second: int) -> str:
    """Return the only solution that `first_wrong` accepts."""
    lines = []
    while second:
        lines.append(f"{first}={second}*{first // second}+{first % second}")
        first, second = second, first % second
    return "\n\n".join([*lines, f"\\boxed{{{first}}}"])


def first_wrong(question: str, text: str) -> int:
    """Return the index of the first wrong paragraph, or -1 if every paragraph is correct.

    A line is correct if it divides the two numbers that follow from the previous lines, without a mistake.
    The last paragraph is correct if it follows a remainder of 0 and its box contains the last divisor.
    """
    first, second = numbers_of(question)
    paragraphs = text.strip().split("\n\n")
    for index, paragraph in enumerate(paragraphs):
        if second == 0:
            is_end = index == len(paragraphs) - 1 and paragraph == f"\\boxed{{{first}}}"
            return -1 if is_end else index
        line = LINE.fullmatch(paragraph)
        if not line or tuple(map(int, line.groups())) != (first, second, *divmod(first, second)):
            return index
        first, second = second, first % second
    return len(paragraphs)  # The solution ends without an answer.


def fapo_result(acc: bool, first_wrong: int, penalty: float) -> dict:
    """Return FAPO's result for an exact check, which found this first wrong step (-1: none).

    The score is 1 for a fully correct sample, 1 - penalty if the answer is correct but a step is wrong, and
    -1 for a wrong answer. The other keys are `acc`, `first_wrong`, `flawed_positive` and `fully_correct`.
    """
    flawed = acc and first_wrong != -1
    score = -1.0
    if acc:
        score = 1.0 - penalty * flawed
    return {
        "score": score,
        "acc": acc,
        "first_wrong": first_wrong,
        "flawed_positive": flawed,
        "fully_correct": acc and not flawed,
    }


def compute_score_fapo(data_source, solution_str, ground_truth, extra_info, *, penalty=1.0) -> dict:
    """Compute FAPO's score with the exact check as the judge. Returns fapo_result's keys and `pred`."""
    result = gym_tasks.compute_score(data_source, solution_str, ground_truth, extra_info)
    wrong = first_wrong(extra_info["question"], solution_str)
    return fapo_result(result["acc"], wrong, penalty) | {"pred": result["pred"]}


def compute_score_outcome(data_source, solution_str, ground_truth, extra_info) -> dict:
    """Return the outcome reward: 1 or -1, as the verifier decides. The check of the lines adds metrics."""
    return compute_score_fapo(data_source, solution_str, ground_truth, extra_info, penalty=0.0)


HELD_OUT = {"acc": "", "flawed_positive_rate": "flawed_positive_rate/", "fully_correct": "fully_correct/"}
TRAINING = ("acc", "flawed_positive_rate")
STEPS = 10  # The report averages the training samples of this many steps.


def read_run(run: Path) -> tuple:
    """Return a run's settings, the lines of its metrics.jsonl, and those of its training steps."""
    from toy.report import read_metrics  # The reward functions do not need toy/.

    metrics = read_metrics(run, flag="--report")
    config = json.loads((run / "config.json").read_bytes())
    return config, metrics, [line for line in metrics if "reward/acc" in line]


def report(folders: tuple[Path, ...]) -> list[dict]:
    """Return metrics before and after each run in the output directories of recipes/public_flaws.sh.

    The `train/...` values are means over the samples of the first or last ten steps. All other values are
    from held-out problems.
    """
    rows = []
    for folder in folders:
        for reward in ("outcome", "fapo"):
            config, metrics, steps = read_run(folder / reward)
            for line, some in ((metrics[0], steps[:STEPS]), (metrics[-1], steps[-STEPS:])):
                row = {
                    "policy": Path(config["model"]).name,
                    "reward": reward,
                    "seed": config["seed"],
                    "step": line["step"],
                }
                for name, key in HELD_OUT.items():
                    row[name] = line[f"val/reasoning_gym_gcd/{key}mean@4"]
                for name in TRAINING:
                    row[f"train/{name}"] = statistics.fmean(step[f"reward/{name}"] for step in some)
                rows.append(row)
    return rows


def table(rows: list[dict]) -> str:
    """Return a Markdown table of the held-out metrics: the median and range over the seeds."""
    from toy.report import cell, table as markdown_table

    groups = {}
    for row in rows:
        training = "none"  # Before training, the runs of both rewards have the same policy.
        if row["step"]:
            training = f"{row['step']} steps, {row['reward']}"
        groups.setdefault((row["policy"], training), []).append(row)
    lines = []
    for names, some in sorted(groups.items(), key=lambda item: item[0][0]):
        lines.append([*names, *(cell([row[name] for row in some]) for name in HELD_OUT)])
    return markdown_table(["policy", "training", "accuracy", "flawed positives", "fully correct"], *lines)


@dataclass
class Config:
    """Train the initial policy of recipes/public_flaws.sh on correct solutions, or print a --report."""

    out_dir: Path = Path("data/gcd/policy0")  # Output directory for the policy.
    base: str = ""  # Chat model to start from, a folder or a Hub name. Default: a new Llama with 1 M weights.
    seed: int = 0  # Random seed for the weights and the training problems.
    stop_at: float = 0.4  # Stop when the mean probability of correct solutions reaches this value.
    most_steps: int = 4000  # Maximum number of training steps, each with 16 solutions.
    report: tuple[Path, ...] = ()  # Print a table of the runs in these folders, without any training.
    report_out: Path | None = None  # With --report: JSONL file to which the table's values are also written.


def make_policy(config: Config) -> None:
    """Train the pretrained model, or a Llama of 1 M parameters on one thread, and save it in `out_dir`."""
    import torch
    from toy import warm_start
    from transformers import AutoModelForCausalLM, AutoTokenizer

    # Problem i of a data set uses seed + i, so this seed must be far away from the seeds of the rows.
    settings = SETTINGS | {"seed": 1_000_000 * (config.seed + 1), "size": 200_000}
    dataset = gym_tasks.load_task("gcd", json.dumps(settings))
    rng = Random(f"{config.seed}/gcd")

    def draw():
        while True:
            question = dataset[rng.randrange(len(dataset))]["question"]
            if not gym_tasks.is_held_out(question):
                return question + gym_tasks.SUFFIX, write_solution(*numbers_of(question))

    def example():
        prompt, solution = draw()
        messages = [{"role": "user", "content": prompt}]
        text = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
        return text, solution + tokenizer.eos_token

    lr = 2e-3
    if config.base:
        tokenizer = AutoTokenizer.from_pretrained(config.base)
        model = AutoModelForCausalLM.from_pretrained(config.base, dtype=torch.float32)
        lr = 1e-4
    else:
        torch.set_num_threads(1)
        texts = [text for _ in range(500) for text in warm_start.chat(*draw())]
        tokenizer = warm_start.build_tokenizer(texts)
        model = warm_start.new_model(len(tokenizer), config.seed)
    warm_start.fit(
        model, tokenizer, example, config.most_steps, lr, lr, 1.0, config.stop_at, example, desc="gcd"
    )
    for part in (model.bfloat16(), tokenizer):
        part.save_pretrained(config.out_dir)
    print(f"{config.out_dir}: {model.num_parameters():,} parameters, {len(tokenizer)} tokens")


if __name__ == "__main__":
    from command_line import cli, one_line_errors
    from run_folder import write_lines

    config = cli(Config, Config.__doc__)
    with one_line_errors():
        if config.report:
            rows = report(config.report)
            print(table(rows))
            if config.report_out:
                write_lines(config.report_out, rows)
        else:
            make_policy(config)
