"""Train on tasks from reasoning-gym: make rows, score with the task's verifier, allow a second attempt.

    pip install "reasoning-gym>=0.1.25,<0.2"
    python prepare_data.py --tasks 'reasoning_gym:chain_sum:{"max_terms": 3}' --out-dir data/chain_sum
    python grpo_trainer.py ... --reward-fn recipes/gym_tasks.py:compute_score
    python grpo_trainer.py ... --rollout-fn recipes/gym_tasks.py:second_attempt

Each row contains the task's name, its settings (including seed and size) and the problem's index. The reward
function regenerates the problem from these three values, because the verifier needs the complete problem.
This file needs compute_score.py. Not covered: tasks with an unsafe verifier, or with problems that cannot be
regenerated (see REASONS).
"""

import functools
import json
import re
import zlib

from compute_score import last_boxed_only_string, policy_text, remove_boxed

SUFFIX = "\n\nPlease reason step by step, and put your final answer within \\boxed{}."
SIZE = 4608  # problems per task if the settings contain no size; about 512 of them are held out
HELD_OUT = 9  # One question in nine, selected by its checksum, belongs to the test split.

EVALUATES = "its verifier evaluates the answer as Python code"
# The reasons for rejecting tasks, as of reasoning-gym 0.1.25, and the rejected tasks.
REASONS = {
    EVALUATES: "binary_matrix n_queens spiral_matrix string_insertion",
    EVALUATES + " (sympy's parse_expr)": """countdown intermediate_integration polynomial_multiplication
        puzzle24 simple_integration""",
    "its verifier hangs on short answers such as 1e99999999": "coin_flip",
    "its verifier hangs on short answers such as D9999999": "rubiks_cube",
    "its verifier hangs on short answers such as AA+999999999": "rush_hour",
    "its verifier accepts the answer nan": "complex_arithmetic",
    "its verifier accepts every answer": "game_of_life_halting",
    "its problems depend on PYTHONHASHSEED, so they cannot be regenerated from seed and index": """
        isomorphic_strings knight_swap ransom_note word_ladder""",
    "its premises may contradict each other, and then every conclusion is right": "propositional_logic",
    "some of its problems do not depend on the seed alone, so they cannot be regenerated": """
        codeio list_functions""",
    "it only combines other tasks": "composite",
}
REJECTED = {name: reason for reason, names in REASONS.items() for name in names.split()}
# Exceptions that verifiers raise if they cannot parse an answer.
UNREADABLE = (ValueError, TypeError, AttributeError, LookupError, ArithmeticError, RecursionError)


@functools.lru_cache(maxsize=64)
def load_task(task: str, settings: str):
    """Return the data set of a task. `settings` is a JSON object with the task's options.

    Raises ValueError if the task is unknown or in REJECTED, or if it does not accept the settings.
    """
    import reasoning_gym  # This import takes several seconds.
    from reasoning_gym.factory import DATASETS

    if task in REJECTED:
        raise ValueError(f"{task} is not supported: {REJECTED[task]}; choose a different task")
    if task not in DATASETS:
        raise ValueError(f"reasoning-gym has no task {task!r}; choose from {', '.join(sorted(DATASETS))}")
    try:
        dataset = reasoning_gym.create_dataset(task, **json.loads(settings))
        if dataset.config.seed is None:  # The problems would differ each time.
            raise ValueError("a seed is missing")
        dataset[0]  # Some settings, such as a seed that is a string, fail only here.
        return dataset
    except (AssertionError, TypeError, ValueError) as error:
        raise ValueError(f"{task} does not accept the settings {settings} ({error}); correct them") from error


def is_held_out(question: str) -> bool:
    """Return whether the question belongs to the test split, which does not depend on seed and size."""
    return zlib.crc32(question.encode()) % HELD_OUT == 0


def make_rows(task: str, settings: dict) -> dict[str, list[dict]]:
    """Return the rows of both splits, {"train": [...], "test": [...]}.

    A question's checksum determines its split, so no question is in both splits. The questions of the test
    split are distinct.
    """
    text = json.dumps({"size": SIZE} | settings, sort_keys=True)
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
        row = {
            "data_source": f"reasoning_gym_{task}",
            "prompt": [{"role": "user", "content": question + SUFFIX}],
            "ability": "Reasoning",
            # Some tasks accept many answers and do not list any of them.
            "reward_model": {"style": "rule", "ground_truth": "" if answer is None else str(answer)},
            "extra_info": about,
        }
        rows[split].append(row)
    return rows


def find_answer(text: str) -> str | None:
    """Return the content of the last `\\boxed{...}`, else of the last `<answer>...</answer>`, else None."""
    if "\\boxed{" in text:
        boxed = last_boxed_only_string(text)
        return remove_boxed(boxed).strip() if boxed else None
    before, _, _ = text.rpartition("</answer>")
    _, start, inside = before.rpartition("<answer>")
    if start:
        return inside.strip()
    return None


def compute_score(data_source, solution_str, ground_truth, extra_info, turns=()) -> dict:
    """Score the policy's final answer with the task's own verifier, which may give partial credit.

    Returns:
        A dict. `score` is between 0 and 1, and 0 if there is no answer in a box or in answer tags. `acc` says
        whether the score is 1. `pred` is the answer. `unreadable` says whether the verifier could not parse
        the answer; in this case, the score is 0.

    Raises:
        ValueError: The installed reasoning-gym generates a different problem for this row.
    """
    dataset = load_task(extra_info["task"], extra_info["settings"])
    entry = dataset[extra_info["index"]]
    if entry["question"] != extra_info["question"]:
        raise ValueError(
            f"row {extra_info['index']} of {extra_info['task']} differs from what the installed version of "
            "reasoning-gym generates; run prepare_data.py again"
        )
    answer = find_answer(policy_text(solution_str, turns))
    score = 0.0
    unreadable = False
    if answer is not None:
        try:
            score = float(dataset.score_answer(answer, entry))
        except UNREADABLE:
            if entry["answer"] is not None:
                dataset.score_answer(entry["answer"], entry)  # This raises as well if the verifier is broken.
            unreadable = True
    return {"score": score, "acc": score == 1.0, "pred": answer or "[INVALID]", "unreadable": unreadable}


def compute_score_shaped(
    data_source, solution_str, ground_truth, extra_info, turns=(), number=0.3, box=0.1
) -> dict:
    """Score like `compute_score`, but give at least `box` for a box, and `number` for a correct last number.

    This reward suits a model that often answers correctly but rarely uses a box. With `compute_score`, all
    answers of most groups would score 0.
    """
    result = compute_score(data_source, solution_str, ground_truth, extra_info, turns)
    numbers = re.findall(r"-?[0-9]+", policy_text(solution_str, turns))
    least = 0.0
    if result["pred"] != "[INVALID]":
        least = box
    last_is_right = bool(numbers) and numbers[-1] == str(ground_truth)
    if last_is_right:
        least = number
    return result | {"score": max(result["score"], least), "last_is_right": last_is_right}


async def second_attempt(trajectory, data_source, ground_truth, extra_info):
    """Let the policy answer again unless the first answer gets the full score.

    The second answer then counts, because the reward functions use the last answer of the policy's turns.
    """
    answer = await trajectory.generate()
    first = compute_score(data_source, answer, ground_truth, extra_info)
    trajectory.info["first_score"] = first["score"]
    if first["acc"]:
        return
    feedback = f"The verifier gives this answer {first['score']:.2f} of 1."
    if first["pred"] == "[INVALID]":
        feedback = "There is no answer in a box."
    trajectory.reply(f"{feedback} Please answer again.", role="user")
    await trajectory.generate()
