"""Train on tasks of the package reasoning-gym: make rows, score by a task's verifier, allow a second attempt.

    pip install "reasoning-gym>=0.1.25,<0.2"
    python prepare_data.py --tasks 'reasoning_gym:chain_sum:{"max_terms": 3}' --out-dir data/chain_sum
    python grpo_trainer.py ... --reward-fn recipes/gym_tasks.py:compute_score
    python grpo_trainer.py ... --rollout-fn recipes/gym_tasks.py:second_attempt

A row names its task, the task's settings (with seed and size) and its index. The reward function generates
the problem again from these three values, because the verifier needs the whole problem. Standalone: no
imports from this repository. Not covered: tasks whose verifier is unsafe (see REJECTED).
"""

import functools
import json
import re
import zlib

SUFFIX = "\n\nPlease reason step by step, and put your final answer within \\boxed{}."
SIZE = 4608  # problems per task if the settings name no size; about 512 of them are held out
HELD_OUT = 9  # one question of nine, by its checksum, belongs to the test split

EVALUATES = "its verifier evaluates the answer as Python"
HANGS = "its verifier does not return if the answer is a short text such as "
NOT_REPRODUCIBLE = "its problems depend on PYTHONHASHSEED, so they cannot be made again from seed and index"
# Tasks that are not offered, and why. Checked with reasoning-gym 0.1.25.
REJECTED = {
    "binary_matrix": EVALUATES,
    "n_queens": EVALUATES,
    "spiral_matrix": EVALUATES,
    "string_insertion": EVALUATES,
    "countdown": EVALUATES + " (sympy's parse_expr)",
    "intermediate_integration": EVALUATES + " (sympy's parse_expr)",
    "polynomial_multiplication": EVALUATES + " (sympy's parse_expr)",
    "puzzle24": EVALUATES + " (sympy's parse_expr)",
    "simple_integration": EVALUATES + " (sympy's parse_expr)",
    "coin_flip": HANGS + "1e99999999",
    "rush_hour": HANGS + "AA+999999999",
    "isomorphic_strings": NOT_REPRODUCIBLE,
    "knight_swap": NOT_REPRODUCIBLE,
    "ransom_note": NOT_REPRODUCIBLE,
    "word_ladder": NOT_REPRODUCIBLE,
    "composite": "its settings are other tasks; name these instead",
}
# What verifiers raise if they cannot read an answer.
UNREADABLE = (ValueError, TypeError, AttributeError, LookupError, ArithmeticError, RecursionError)


@functools.lru_cache(maxsize=64)
def load_task(task: str, settings: str):
    """Return the data set of this task; `settings` is the JSON text of its fields.

    Raises ValueError if there is no such task or field, or if the task is in REJECTED.
    """
    import reasoning_gym  # This import takes seconds.
    from reasoning_gym.factory import DATASETS

    if task in REJECTED:
        raise ValueError(f"{task} is not offered: {REJECTED[task]}")
    if task not in DATASETS:
        raise ValueError(f"reasoning-gym has no task {task!r}; it has {', '.join(sorted(DATASETS))}")
    try:
        return reasoning_gym.create_dataset(task, **json.loads(settings))
    except (AssertionError, TypeError, ValueError) as error:
        raise ValueError(f"{task} does not take the settings {settings}: {error}") from error


def is_held_out(question: str) -> bool:
    """Return whether the question belongs to the test split, whatever the seed and the size are."""
    return zlib.crc32(question.encode()) % HELD_OUT == 0


def make_rows(task: str, settings: dict) -> dict[str, list[dict]]:
    """Return the rows of both splits, {"train": [...], "test": [...]}.

    The checksum of a question decides its split, so repeated questions are never in both. The held-out
    questions are all different.
    """
    text = json.dumps(settings, sort_keys=True)
    rows = {"train": [], "test": []}
    held_out = set()
    for index, entry in enumerate(load_task(task, text)):
        question = entry["question"]
        split = "train"
        if is_held_out(question):
            split = "test"
            if question in held_out:
                continue
            held_out.add(question)
        about = {"split": split, "index": index, "question": question, "task": task, "settings": text}
        answer = entry["answer"]
        rows[split].append({
            "data_source": f"reasoning_gym_{task}",
            "prompt": [{"role": "user", "content": question + SUFFIX}],
            "ability": "Reasoning",
            # Some tasks accept many answers and do not name one.
            "reward_model": {"style": "rule", "ground_truth": "" if answer is None else str(answer)},
            "extra_info": about,
        })
    return rows


def find_answer(text: str) -> str | None:
    """Return the content of the last `\\boxed{...}` or else of the last `<answer>...</answer>`, or None."""
    _, box, rest = text.rpartition("\\boxed{")
    if box:
        depth = 1
        for brace in re.finditer("[{}]", rest):
            depth += 1 if brace[0] == "{" else -1
            if depth == 0:
                return rest[: brace.start()].strip()
        return None
    before, end, _ = text.rpartition("</answer>")
    _, start, inside = before.rpartition("<answer>")
    if end and start:
        return inside.strip()
    return None


def compute_score(data_source, solution_str, ground_truth, extra_info) -> dict:
    """Score the final answer with the task's own verifier, partial credit included.

    Returns:
        `score` is from 0 to 1, and 0 without an answer in a box or in answer tags. `acc` says whether the
        score is 1. `pred` is the answer. `unreadable` says whether the verifier raised an error instead of
        reading the answer; such an answer scores 0.

    Raises:
        ValueError: The installed reasoning-gym makes a different problem from the row's settings and index.
    """
    dataset = load_task(extra_info["task"], extra_info["settings"])
    entry = dataset[extra_info["index"]]
    if entry["question"] != extra_info["question"]:
        raise ValueError(
            f"row {extra_info['index']} of {extra_info['task']} is not what this version of reasoning-gym "
            "makes; run prepare_data.py again"
        )
    answer = find_answer(solution_str)
    score = 0.0
    unreadable = False
    if answer is not None:
        try:
            score = float(dataset.score_answer(answer, entry))
        except UNREADABLE:
            if entry["answer"] is not None:
                dataset.score_answer(entry["answer"], entry)  # raises again if the verifier is at fault
            unreadable = True
    return {"score": score, "acc": score == 1.0, "pred": answer or "[INVALID]", "unreadable": unreadable}


def compute_score_shaped(data_source, solution_str, ground_truth, extra_info, number=0.3, box=0.1) -> dict:
    """Score like `compute_score`, but give at least `box` for a box, and `number` for a correct last number.

    This reward suits a model that often answers correctly but seldom in a box: otherwise all answers of most
    groups would score 0.
    """
    result = compute_score(data_source, solution_str, ground_truth, extra_info)
    numbers = re.findall(r"-?[0-9]+", solution_str)
    least = 0.0
    if result["pred"] != "[INVALID]":
        least = box
    last_is_right = bool(numbers) and numbers[-1] == str(ground_truth)
    if last_is_right:
        least = number
    return result | {"score": max(result["score"], least), "last_is_right": last_is_right}


async def second_attempt(trajectory, data_source, ground_truth, extra_info):
    """Let the policy answer a second time if the verifier does not give the first answer the full score.

    The second answer counts, because the reward function reads the last box of the whole text.
    """
    answer = await trajectory.generate()
    first = compute_score(data_source, answer, ground_truth, extra_info)
    trajectory.info["first_score"] = first["score"]
    if first["acc"]:
        return
    feedback = f"The verifier gives this answer {first['score']:.2f} of 1."
    if first["pred"] == "[INVALID]":
        feedback = "There is no answer in a \\boxed{}."
    trajectory.reply(f"{feedback} Please answer again.", role="user")
    await trajectory.generate()
