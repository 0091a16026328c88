"""Make training rows for a toy world's judge from the policies' own solutions, without planted flaws.

    python recipes/critic_rows.py --runs outputs/evidence/own1/*_seed0 --out-dir data/own1_judge
    python recipes/critic_rows.py --runs outputs/shop0_* --out-dir data/shop0_judge

The script reads the training samples that the runs saved (see the trainer's --samples-per-step). It selects
equal numbers of flawed and sound solutions with correct answers, and the oracle labels them. No problem is in
both fapo_critic_train.parquet and fapo_critic_test.parquet. In the world with a tool, the hidden prices come
from the run's --train-file. For your own task, the labels must come from people or from a stronger model.
"""

import json
import random
import sys
from dataclasses import dataclass
from pathlib import Path

import tyro

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
from command_line import one_line_errors
from compute_score import split_paragraphs
from prepare_data import read_rows, write_table
from run_folder import read_lines
from toy import shop_judge, shop_world, toy_world


@dataclass
class Config:
    runs: tuple[Path, ...]  # Output directories of training runs in one of the toy worlds.
    out_dir: Path  # Output directory for the two Parquet files.
    held_out: int = 512  # Maximum number of rows in fapo_critic_test.parquet.
    seed: int = 0  # Random seed for selecting and shuffling the solutions.


def row_of(line: dict, prices: dict[str, dict]) -> dict:
    """Return the judge's row for a line of samples.jsonl. `prices`: see prices_of."""
    prompt = line["prompt"]
    if not prices:
        paragraphs = split_paragraphs(line["response"])
        return toy_world.critic_row(toy_world.parse_problem(prompt), paragraphs, "train", 0)
    turns = line.get("turns") or shop_judge.as_turns([("policy", line["response"])])
    return shop_judge.critic_row(shop_world.parse_problem(prompt, prices[prompt]), turns, "train", 0)


def prices_of(run: Path) -> dict[str, dict]:
    """Return {problem: prices} from the run's training files, or {} outside the world with a tool."""
    if not (run / "config.json").exists():
        return {}
    files = json.loads((run / "config.json").read_bytes())["train_file"]
    if isinstance(files, str):
        files = [files]
    prices = {}
    for file in files:
        for row in read_rows(Path(file)):
            if "prices" in (row.get("extra_info") or {}):
                prices[row["prompt"][-1]["content"]] = row["extra_info"]["prices"]
    return prices


def right_solutions(runs: tuple[Path, ...]) -> dict[bool, list[dict]]:
    """Return the rows of the distinct solutions with correct answers as {is flawed: [row, ...]}."""
    found = {True: {}, False: {}}
    for run in runs:
        if not (run / "samples.jsonl").is_file():
            raise ValueError(f"--runs {run}: has no samples.jsonl; pass the output directory of a run")
        prices = prices_of(run)
        for line in read_lines(run / "samples.jsonl")[0]:
            if line["split"] == "train" and line["reward_extra_info"].get("acc"):
                row = row_of(line, prices)
                flawed = row["reward_model"]["ground_truth"] != -1
                found[flawed][line["prompt"], line["response"]] = row
    return {flawed: list(rows.values()) for flawed, rows in found.items()}


def make_files(config: Config) -> None:
    """Write both files. Raise RuntimeError if there are too few solutions for them."""
    rng = random.Random(config.seed)
    found = right_solutions(config.runs)
    count = min(map(len, found.values()))
    chosen = rng.sample(found[True], count) + rng.sample(found[False], count)
    rng.shuffle(chosen)
    held_out = {row["extra_info"]["question"] for row in chosen[: config.held_out]}
    rows = {"train": [], "test": []}
    for row in chosen:
        split = "train"
        if row["extra_info"]["question"] in held_out:
            split = "test"
        row["extra_info"] |= {"split": split, "index": len(rows[split])}
        rows[split].append(row)
    del rows["test"][config.held_out :]
    if not rows["train"]:
        raise RuntimeError(
            f"--runs: too few solutions ({len(found[True])} flawed, {len(found[False])} sound) for "
            f"--held-out {config.held_out}; pass more runs, or lower --held-out"
        )
    config.out_dir.mkdir(parents=True, exist_ok=True)
    for split, some in rows.items():
        write_table(config.out_dir / f"fapo_critic_{split}.parquet", some)


if __name__ == "__main__":
    with one_line_errors():
        make_files(tyro.cli(Config, description=__doc__))
