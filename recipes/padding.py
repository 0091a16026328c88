"""Show which advantages teach a policy of one parameter to pad its solutions, in a minute on a CPU.

    python recipes/padding.py docs/evidence/padding.csv

A solution has three needed steps, any number of trivial but sound steps, and an answer. The policy only
learns the probability of adding another trivial step, which never changes whether the answer is correct. A
needed step is sound with a probability of 0.9. Step scores are 1 for each sound step ("own"), or 1 before the
first error and 0 from there on ("so far"). Not covered: trivial steps that help, step scores of a model, and
policies that know whether their solution is sound.
"""

import csv
import math
import random
import sys
from itertools import accumulate
from pathlib import Path
from statistics import fmean

from tyro.conf import Positional

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
from algorithm import Groups, grpo
from command_line import cli
from policy import Sample
from recipes.advantages import progress, steps

METHODS = {  # advantage, FAPO's penalty, kind of step scores
    "outcome reward only": (grpo, 0, "own"),
    "FAPO": (grpo, 1, "own"),
    "`steps`, each step scored on its own": (steps, 0, "own"),
    "`steps`, 0 from the first error on": (steps, 0, "so far"),
    "`progress`, 0 from the first error on": (progress, 0, "so far"),
}
MOST = 12  # trivial steps per solution


def sample_of(rng: random.Random, padding: float, penalty: float, kind: str) -> Sample:
    """Return a solution whose paragraphs have a token each: n(eeded), p(adding) or a(nswer), or their end."""
    trivial = 0
    while trivial < MOST and rng.random() < padding:
        trivial += 1
    is_sound = [rng.random() < 0.9 for _ in range(3)]
    scores = [*map(float, is_sound), *[1.0] * (trivial + 1)]
    if kind == "so far":
        scores = list(accumulate(scores, min))
    acc = rng.random() < (0.9 if all(is_sound) else 0.4)
    score = (1.0 if acc else -1.0) - penalty * (acc and not all(is_sound))
    text = "\n\n".join("nnn" + "p" * trivial + "a")
    result = {"reward_score": score, "reward_extra_info": {"score": score, "step_scores": scores}}
    return Sample({}, [0], [*text.encode()], [], text, result=result)


def train(advantage, penalty: float, kind: str, seed: int, updates=150, logit=-2.0) -> list[float]:
    """Return the number of trivial steps per solution in each update of 16 groups of 8 solutions."""
    rng = random.Random(seed)
    means = []
    for _ in range(updates):
        padding = 1 / (1 + math.exp(-logit))
        groups = [[sample_of(rng, padding, penalty, kind) for _ in range(8)] for _ in range(16)]
        found = advantage(Groups(groups, lambda ids: bytes(ids).decode())).flatten(0, 1)
        gradient = 0.0
        samples = sum(groups, [])
        for sample, row in zip(samples, found.tolist()):
            of_tokens = row if isinstance(row, list) else [row] * len(sample.text)
            trivial = sample.text.count("p")
            for letter, of_token in zip(sample.text, of_tokens):  # Each decision is to write "p" or "a".
                if letter == "p":
                    gradient += of_token * (1 - padding)
                elif letter == "a" and trivial < MOST:
                    gradient -= of_token * padding
        means.append(fmean(sample.text.count("p") for sample in samples))
        logit += gradient / sum(sample.text.count("\n\n") + 1 for sample in samples)
    return means


def main(path: Positional[Path]) -> None:
    """Print the table, and write it to a CSV file.

    Args:
        path: CSV file to write.
    """
    seeds = range(3)
    rows = []
    for name, about in METHODS.items():
        curves = [train(*about, seed) for seed in seeds]
        ends = [f"{fmean(curve[-10:]):.2f}" for curve in curves]
        rows.append([name, f"{fmean(curve[0] for curve in curves):.2f}", *ends])
        print(*rows[-1])
    with open(path, "w", newline="") as file:
        heads = ["method", "first update", *(f"last ten updates, seed {seed}" for seed in seeds)]
        csv.writer(file, lineterminator="\n").writerows([heads, *rows])


if __name__ == "__main__":
    cli(main, __doc__)
