"""Make training rows for the toy world's judge from the policies' own solutions, without planted flaws.

    python recipes/critic_rows.py --runs outputs/evidence/own1/*_seed0 --out-dir data/own1_judge

The script reads the training samples that the runs saved (see the trainer's --samples-per-step). It selects
equal numbers of flawed and sound solutions with correct answers, and the oracle labels them. No problem is in
both fapo_critic_train.parquet and fapo_critic_test.parquet. For your own task, the labels must come from
people or from a stronger model.
"""

import random
import sys
from dataclasses import dataclass
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import tyro

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
from compute_score import split_paragraphs
from run_folder import read_lines
from toy.toy_world import critic_row, first_wrong_paragraph, parse_problem


@dataclass
class Config:
    runs: tuple[Path, ...]  # Output directories of training runs in the toy world.
    out_dir: Path  # Output directory for the two Parquet files.
    held_out: int = 512  # Maximum number of rows in fapo_critic_test.parquet.
    seed: int = 0  # Random seed for selecting and shuffling the solutions.


def right_solutions(runs: tuple[Path, ...]) -> dict[bool, list[tuple[str, list[str]]]]:
    """Return the distinct solutions with correct answers as {is flawed: [(question, paragraphs), ...]}."""
    found = {True: {}, False: {}}
    for run in runs:
        for line in read_lines(run / "samples.jsonl")[0]:
            paragraphs = split_paragraphs(line["response"])
            if line["split"] == "train" and line["reward_extra_info"]["acc"]:
                flawed = first_wrong_paragraph(line["prompt"], paragraphs) != -1
                found[flawed][line["prompt"], line["response"]] = (line["prompt"], paragraphs)
    return {flawed: list(solutions.values()) for flawed, solutions in found.items()}


def main() -> None:
    config = tyro.cli(Config, description=__doc__)
    rng = random.Random(config.seed)
    found = right_solutions(config.runs)
    count = min(map(len, found.values()))
    chosen = rng.sample(found[True], count) + rng.sample(found[False], count)
    rng.shuffle(chosen)
    held_out = {question for question, _ in chosen[: config.held_out]}
    rows = {"train": [], "test": []}
    for question, paragraphs in chosen:
        if question not in held_out:
            split = "train"
        elif len(rows["test"]) < config.held_out:
            split = "test"
        else:
            continue
        rows[split].append(critic_row(parse_problem(question), paragraphs, split, len(rows[split])))
    if not rows["train"]:
        flawed, sound = len(found[True]), len(found[False])
        sys.exit(f"error: --runs: too few solutions ({flawed} flawed, {sound} sound); pass more runs")
    config.out_dir.mkdir(parents=True, exist_ok=True)
    for split, some in rows.items():
        path = config.out_dir / f"fapo_critic_{split}.parquet"
        pq.write_table(pa.Table.from_pylist(some), path)
        print(f"{path}: {len(some)} rows")


if __name__ == "__main__":
    main()
