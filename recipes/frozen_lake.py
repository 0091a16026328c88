"""An environment of another package: gymnasium's FrozenLake, a policy that plays it, and a check of moves.

    bash recipes/public_lake.sh 0 outputs/lake0              # the comparison in docs/public_tasks.md
    python -m recipes.frozen_lake --out-dir data/lake        # only the rows and the initial policy: a minute
    python grpo_trainer.py ... --rollout-fn recipes/frozen_lake.py:play \\
        --reward-fn recipes/frozen_lake.py:compute_score     # FAPO, or the outcome reward with penalty=0

The policy crosses a frozen lake of 4 x 4 squares to reach G, without stepping into a hole (H). The prompt
shows the board, and on each square the policy reads where it is and which moves are safe. The board depends
on the seed in the row, so there is one row per board. gymnasium rewards only reaching G; the check also finds
moves that do not lead closer to G. The initial policy imitates a player who makes random safe moves.
Needs gymnasium, recipes/gcd_steps.py, recipes/gym_tasks.py and compute_score.py; the initial policy and the
report also need toy/, prepare_data.py, run_folder.py, command_line.py and reward_worker.py. Not covered:
slippery ice, other sizes, and groups whose samples have different boards.
"""

import csv
import functools
import json
import math
import re
import statistics
import sys
from dataclasses import dataclass
from pathlib import Path
from random import Random

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
from recipes.gcd_steps import fapo_result, read_run  # noqa: E402
from recipes.gym_tasks import is_held_out  # noqa: E402

MOVES = ("left", "down", "right", "up")  # gymnasium's actions 0 to 3
MOST_MOVES = 12  # The shortest path to the opposite corner has six moves on nearly all boards.
SEEDS = 2000  # The number of seeds for rows. Many of them have the same board.


@functools.cache
def board_of(seed: int) -> list[str]:
    """Return the lines of a random board on which G can be reached."""
    from gymnasium.envs.toy_text.frozen_lake import generate_random_map

    return generate_random_map(size=4, p=0.7, seed=seed)


def new_game(seed: int):
    """Return the game with this seed's board, at its start."""
    import gymnasium

    game = gymnasium.make("FrozenLake-v1", desc=board_of(seed), is_slippery=False)
    game.reset(seed=seed)
    return game


def safe_moves(game, square: int) -> list[str]:
    """Return the moves that lead to another square that is not a hole."""
    safe = []
    for move, ((_, after, reward, is_over),) in zip(MOVES, game.unwrapped.P[square].values()):
        if after != square and (reward == 1 or not is_over):
            safe.append(move)
    return safe


def look(game, square: int) -> str:
    """Return what the policy reads on a square, such as "At b3. Safe: down, right."""
    return f"At {'abcd'[square // 4]}{square % 4 + 1}. Safe: {', '.join(safe_moves(game, square))}."


def first_observation(seed: int) -> str:
    lines = [f"{name}: {' '.join(line)}" for name, line in zip("abcd", board_of(seed))]
    return "\n".join([*lines, f"Go to G. {look(new_game(seed), 0)}"])


async def play(trajectory, prompt, extra_info):
    """Rollout function: the policy moves until it reaches G, falls into a hole or has used up its moves."""
    seed = extra_info["seed"]
    if prompt[-1]["content"] != first_observation(seed):
        raise ValueError("the installed gymnasium makes another board for this seed; write the rows again")
    game = new_game(seed)
    square, is_over = 0, False
    squares = [square]
    trajectory.info |= {"squares": squares, "reached": False}  # already now, in case of truncation
    while True:
        move = (await trajectory.generate(max_tokens=4)).strip()
        if move in MOVES:
            square, reward, is_over, _, _ = game.step(MOVES.index(move))
            trajectory.info["reached"] = reward == 1
        squares.append(square)
        if is_over or len(squares) > MOST_MOVES:
            return
        trajectory.reply(look(game, square), role="user")


@functools.cache
def distances(seed: int) -> list[float]:
    """Return how many moves each square is from G, from gymnasium's own table of transitions."""
    far = [math.inf] * 15 + [0]
    table = new_game(seed).unwrapped.P  # {square: {action: [(probability, next square, reward, is over)]}}
    for _ in range(15):
        for square, moves in table.items():
            for ((_, after, _, _),) in moves.values():
                far[square] = min(far[square], far[after] + 1)
    return far


def first_wasted(seed: int, squares: list[int]) -> int:
    """Return the index of the first turn of the policy that does not lead closer to G, or -1."""
    far = distances(seed)
    for number, (before, after) in enumerate(zip(squares, squares[1:])):
        if far[after] >= far[before]:
            return 2 * number  # The game replies after each move.
    return -1


def compute_score(data_source, solution_str, ground_truth, extra_info, *, penalty=1.0) -> dict:
    """Score 1 for reaching G, 1 - penalty if G was reached after a wasted move, and -1 otherwise."""
    reached = extra_info["reached"]
    wrong = first_wasted(extra_info["seed"], extra_info["squares"])
    return fapo_result(reached, wrong, penalty) | {"moves": len(extra_info["squares"]) - 1}


def belongs_to_test(seed: int) -> bool:
    """Return whether this seed's board belongs to the test split, as one board in nine does."""
    return is_held_out("".join(board_of(seed)))


def make_rows(seeds) -> dict[str, list[dict]]:
    """Return one row per board, {"train": [...], "test": [...]}. No board is in both splits."""
    rows = {"train": [], "test": []}
    boards = set()
    for seed in seeds:
        board = first_observation(seed)
        if board in boards:
            continue
        boards.add(board)
        split = "test" if belongs_to_test(seed) else "train"
        row = {
            "data_source": "frozen_lake",
            "prompt": [{"role": "user", "content": board}],
            "reward_model": {"ground_truth": ""},
            "extra_info": {"split": split, "index": len(rows[split]), "seed": seed},
        }
        rows[split].append(row)
    return rows


def wandering_game(rng: Random) -> list[str]:
    """Return the game of a player who makes random safe moves, as [prompt, move, reply, move, ...]."""
    from toy.warm_start import ASSISTANT, END, USER

    while True:
        seed = rng.randrange(10**6, 10**9)
        if not belongs_to_test(seed):
            break
    game = new_game(seed)
    pieces = [f"{USER}{first_observation(seed)}{ASSISTANT}"]
    square, is_over = 0, False
    while not is_over and len(pieces) < 2 * MOST_MOVES:
        move = rng.choice(safe_moves(game, square))
        square, _, is_over, _, _ = game.step(MOVES.index(move))
        pieces += [f"{move}{END}", f"{USER}{look(game, square)}{ASSISTANT}"]
    return pieces[:-1]


def report(folders: tuple[Path, ...], path: Path) -> None:
    """Write a CSV file with a line for each evaluation of the runs in these folders.

    `reached` and `fully correct` are fractions of the held-out boards with greedy decoding. The last two
    columns are means over the training samples of the last ten steps. In the line of step 0, they describe
    the first step, whose samples come from the initial policy.
    """
    names = ("reached", "fully correct", "training: reached", "training: flawed positives")
    table = [["penalty", "seed", "step", *names]]
    for folder in folders:
        config, lines, steps = read_run(folder)
        penalty = json.loads(config["reward_kwargs"])["penalty"]
        for line in lines:
            if "val/frozen_lake/mean@1" not in line:
                continue
            some = steps[: max(line["step"], 1)][-10:]
            values = [line["val/frozen_lake/mean@1"], line["val/frozen_lake/fully_correct/mean@1"]]
            for key in ("reward/acc", "reward/flawed_positive_rate"):
                values.append(statistics.fmean(step[key] for step in some if key in step))
            table.append([penalty, config["seed"], line["step"], *(f"{value:.4f}" for value in values)])
    with open(path, "w", newline="") as file:
        csv.writer(file, lineterminator="\n").writerows(table)


@dataclass
class Config:
    """Write the rows and train the initial policy of recipes/public_lake.sh, or write a --report."""

    out_dir: Path = Path("data/lake")  # Output directory for the rows and the policy.
    seed: int = 0  # Random seed for the games and the weights.
    steps: int = 80  # Number of training steps, each with 16 games.
    report: tuple[Path, ...] = ()  # Run folders to summarise in a CSV file. Empty: train the initial policy.
    report_out: Path = Path("outputs/lake.csv")  # Output file of --report.


def make_policy(config: Config) -> None:
    import torch
    from prepare_data import write_table
    from toy import warm_start

    config.out_dir.mkdir(parents=True, exist_ok=True)
    for split, rows in make_rows(range(SEEDS)).items():
        write_table(config.out_dir / f"lake_{split}.parquet", rows)
    torch.set_num_threads(1)
    rng = Random(f"{config.seed}/lake")

    example = functools.partial(wandering_game, rng)
    words = []
    for _ in range(50):
        words += re.findall(r" ?\w+|\W", "".join(example()))
    tokenizer = warm_start.build_tokenizer(words)
    model = warm_start.new_model(len(tokenizer), config.seed)
    warm_start.fit(model, tokenizer, example, config.steps, 2e-3, 2e-4, 1.0, desc="lake")
    for part in (model.bfloat16(), tokenizer):
        part.save_pretrained(config.out_dir / "policy")


if __name__ == "__main__":
    from command_line import cli, one_line_errors

    config = cli(Config, Config.__doc__)
    with one_line_errors():
        if config.report:
            report(config.report, config.report_out)
        else:
            make_policy(config)
