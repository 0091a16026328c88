"""What breaks first: one step of training on many GPUs, played event by event from measured constants.

    python -m tools.simulate                                                # FAPO-7B on 8, 64 and 1,024 GPUs
    python -m tools.simulate --gpus 64 --drawn outputs/RUN/samples.jsonl    # a run's lengths

Each sample passes the stations of the Reward Loop: a place on a policy server and the trainer's loop; where a
judge is asked also a reward worker, the router and a place on a judge. A station serves its line in order.
Then the samples go to the ranks, they update, and the new weights go to one node of servers after the other.
benchmarks/bench_simulate.py holds it beside a run that was measured.

Left out: the cost of prompts, cached prefixes, single sequences being faster, failures, --overlap.
"""

import heapq
import json
import math
import random
from dataclasses import dataclass
from pathlib import Path

import tyro


@dataclass
class Config:
    """The constants. Of GPUs they are assumed, of everything else measured (docs/cluster.md)."""

    gpus: tuple[int, ...] = (8, 64, 1024)  # In the cluster.
    shares: tuple[float, float, float] = (0.5, 0.25, 0.25)  # Of them: ranks, policy servers, judges.
    samples: int = 512  # In a step, for each GPU: 512 prompts of 8 samples on eight of them.
    length: tuple[float, int] = (1161, 8192)  # Tokens of a response: mean (log-normal, sigma 0.7) and limit.
    critique: tuple[float, int] = (3000, 16384)  # The same of a critique.
    judged: float = 0.5  # Share of the samples that the judge reads.
    places: int = 128  # Sequences that a server works on at once.
    speed: float = 50  # Tokens/s of each of them, policy.
    judge_speed: float = 70  # Tokens/s of each of them, judge.
    train_speed: float = 8000  # Tokens/s of a rank in an update: 35 % of an H100 for 7B.
    loop: float = 14000  # Samples/s that the trainer's loop hands over and collects.
    workers: int = 2  # Reward workers, 1,800 calls/s each.
    router: float = 5000  # Requests/s of a router; the policy's servers and the judges have one each.
    hand_over: float = 5e6  # Tokens/s from the trainer to the ranks: each unpacks all samples.
    weights: float = 15.2e9  # Bytes of the policy's weights.
    link: float = 12.5e9  # Bytes/s out of a node.
    drawn: Path | None = None  # A run's samples.jsonl, to draw the responses' lengths from.


def play(jobs: list[list[tuple[str, float]]], places: dict[str, int]) -> tuple[dict, dict]:
    """When each station was done, in seconds, and how long it was busy, divided by its places.

    jobs: what each does, [(station, seconds), ...]; places: how many jobs a station serves at once.
    """
    free = {name: [0.0] * count for name, count in places.items()}
    done, busy = dict.fromkeys(places, 0.0), dict.fromkeys(places, 0.0)
    events = [(0.0, number, 0) for number in range(len(jobs))]
    while events:
        now, number, stage = heapq.heappop(events)
        station, seconds = jobs[number][stage]
        end = max(now, free[station][0]) + seconds
        heapq.heapreplace(free[station], end)
        done[station] = max(done[station], end)
        busy[station] += seconds / places[station]
        if stage + 1 < len(jobs[number]):
            heapq.heappush(events, (end, number, stage + 1))
    return done, busy


def step(config: Config, gpus: int) -> tuple[dict, dict]:
    """Seconds of a step's parts, and for how many of them each station is at work."""
    rng, jobs, total = random.Random(0), [], 0.0

    def tokens(mean, most):
        return min(mean * rng.lognormvariate(-0.245, 0.7), most)

    written = config.drawn.read_text().splitlines() if config.drawn else ()
    lengths = [json.loads(line)["response_length"] for line in written]
    for _ in range(config.samples * gpus):
        total += (length := rng.choice(lengths) if lengths else tokens(*config.length))
        jobs.append([("policy's router", 1 / config.router), ("policy servers", length / config.speed)])
        jobs[-1].append(("loop", 1 / config.loop))
        if rng.random() < config.judged:
            seconds = tokens(*config.critique) / config.judge_speed
            jobs[-1] += [("workers", 1 / 1800), ("judges' router", 1 / config.router), ("judges", seconds)]
    ranks, servers, judges = (max(round(share * gpus), 1) for share in config.shares)
    places = {"policy's router": 1, "loop": 1, "workers": config.workers, "judges' router": 1}
    places |= {"policy servers": servers * config.places, "judges": judges * config.places}
    done, busy = play(jobs, places)
    parts = {"rollout": done["loop"], "reward wait": max(done.values()) - done["loop"],
             "to the ranks": total / config.hand_over, "update": total / config.train_speed / ranks,
             "weights": config.weights / config.link * math.ceil(servers / 8)}  # fmt: skip
    return parts, busy | {name: parts[name] for name in ("to the ranks", "update", "weights")}


def table(config: Config) -> str:
    """A row for each size: a step's parts in seconds, and what has most to do of what is no GPU's work."""
    rows = ["| GPUs | rollout | reward wait | to the ranks | update | weights | step s | breaks first |"]
    rows.append("| ---: " * 7 + "| --- |")
    for gpus in config.gpus:
        parts, busy = step(config, gpus)
        seconds = sum(parts.values())
        host = {name: busy[name] for name in busy if name not in ("policy servers", "judges", "update")}
        worst = max(host, key=host.get)
        shown = "".join(f"{value:,.1f} | " for value in [*parts.values(), seconds])
        rows.append(f"| {gpus:,} | {shown}{worst}, at work {host[worst] / seconds:.1%} of a step |")
    return "\n".join(rows)


def main() -> None:
    print(table(tyro.cli(Config, description=__doc__)))


if __name__ == "__main__":
    main()
