"""tools/simulate.py beside a run that was measured: half of its steps give the speeds, for the others.

    python benchmarks/bench_simulate.py --run outputs/demo_seed0/fapo

For a run of one machine with --rollout hf, whose critiques are in samples.jsonl (keep_critique), as in the
demo. Every second step gives the speeds. All samples of a step are generated side by side, token by token;
the judge's one server works on one critique after the other, which ends when all at once would. Medians,
because the first seconds after an evaluation, and whatever else the machine did, are no part of it.
"""

import json
import random
import sys
from dataclasses import dataclass
from pathlib import Path
from statistics import median

import tyro

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
from tools.simulate import play


@dataclass
class Config:
    """Which run."""

    run: Path  # Its folder.


def predict(run: Path) -> dict[str, tuple[float, float]]:
    """{part of a step: (seconds predicted, measured)} for every second step of the run."""
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    lines = [line for line in lines if "time/step" in line]
    halves = lines[::2], lines[1::2]
    samples = [json.loads(line) for line in (run / "samples.jsonl").read_text().splitlines()]
    samples = [[s for s in samples if s["split"] == "train" and s["step"] % 2 == odd] for odd in (1, 0)]

    def of(key, half=0):
        return median(line[key] for line in halves[half])

    def critiques(half):
        return [len(text) for s in samples[half] if (text := s["reward_extra_info"].get("critique"))]

    def lengths(half):
        return [s["response_length"] for s in samples[half]]

    batch = round(of("perf/tokens") / of("response_length/mean"))
    speed = of("response_length/max") / of("time/rollout")  # tokens/s of each sample
    # all that the judge wrote, from the end of the shortest response to that of the last critique
    seconds = of("time/rollout") + of("time/reward_wait") - min(lengths(0)) / speed
    judge = of("genrm/asked") * sum(critiques(0)) / len(critiques(0)) / seconds
    rng, jobs = random.Random(0), []
    for number in range(batch):
        jobs.append([("policy", rng.choice(lengths(1)) / speed)])
        if number < of("genrm/asked", 1):
            jobs[-1].append(("judge", rng.choice(critiques(1)) / judge))
    done, _ = play(jobs, {"policy": batch, "judge": 1})
    parts = [f"time/{name}" for name in ("rollout", "reward_wait", "update")]
    rest = median(line["time/step"] - sum(line[part] for part in parts) for line in halves[0])
    found = {"rollout": done["policy"], "reward_wait": max(done.values()) - done["policy"]}
    found["update"] = of("perf/tokens", 1) * of("time/update") / of("perf/tokens")
    found["step"] = sum(found.values()) + rest
    return {name: (seconds, of(f"time/{name}", 1)) for name, seconds in found.items()}


def main() -> None:
    print("| part of a step | predicted s | measured s | ratio |\n| --- | ---: | ---: | ---: |")
    for name, (predicted, measured) in predict(tyro.cli(Config, description=__doc__).run).items():
        print(f"| {name} | {predicted:.2f} | {measured:.2f} | {predicted / measured:.2f} |")


if __name__ == "__main__":
    main()
