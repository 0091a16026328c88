"""What breaks first: a step of training on many GPUs, played event by event from measured constants.

    python -m tools.simulate --gpus 8 64 1024                        # the paper's 7B run, grown with the GPUs
    python -m tools.simulate --run outputs/demo_seed0/fapo           # a run of one machine: predicted, measured

Each sample passes the stations of the Reward Loop in turn: a slot of a policy server, the trainer's loop, and
where a judge is asked a reward worker, the router and a slot of a judge. A station serves its line in order.
Then come the update and the new weights. With --run lengths are drawn from its samples.jsonl, and its first
half gives the speeds with which the second half is predicted.

Left out: prompts' own cost, prefix caches, failures, --overlap, links that others use.
"""

import heapq
import json
import random
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import median

import tyro


@dataclass
class Config:
    """A machine's and a run's constants; the defaults are FAPO-7B on 80 GB GPUs."""

    gpus: tuple[int, ...] = (8, 64, 1024)  # Sizes of the cluster; the batch grows with it.
    samples_per_gpu: float = 512  # 512 prompts x 8 samples on eight GPUs.
    parts: tuple[float, float, float] = (0.5, 0.25, 0.25)  # Of the GPUs: ranks, policy servers, judges.
    routers: int = 1  # Processes of the judges' router; 5,000 requests/s each.
    loops: int = 1  # Trainer's loops, 14,000 samples/s each.
    workers: int = 2  # Reward workers, 1,800 calls/s each that ask a judge.
    length: float = 1161  # Mean tokens of a response, log-normal; critiques likewise.
    critique: float = 3000
    most: int = 8192  # Tokens of the longest.
    judged: float = 0.5  # Share of samples that a judge reads.
    slots: int = 128  # Sequences that a server works on at once.
    speed: float = 30  # Tokens/s of each of them in a full server of the policy.
    judge_speed: float = 40  # The same of a judge.
    train_speed: float = 4000  # Tokens/s of an update, each rank: 40 % of an H100 for 7B.
    hand_over_speed: float = 2e7  # Tokens/s of samples on their way from the trainer to the ranks.
    weights: float = 15.2e9  # Bytes of the policy, in bf16.
    link: float = 12.5e9  # Bytes/s out of the node of rank 0, to one node of servers after the other.
    run: Path | None = None  # Folder of a run on one machine, with --rollout hf and one judge.


def play(jobs: list[list[tuple[str, float]]], places: dict[str, int]) -> tuple[float, float, dict[str, float]]:
    """Seconds until the last job has left its first station, and its last; and of each station how busy it was.

    jobs: what each does, [(station, seconds), ...]; places: how many a station serves at once.
    """
    free, busy, first = {name: [0.0] * count for name, count in places.items()}, dict.fromkeys(places, 0.0), 0.0
    events = [(0.0, number, 0) for number in range(len(jobs))]
    while events:
        now, number, stage = heapq.heappop(events)
        station, seconds = jobs[number][stage]
        end = max(now, free[station][0]) + seconds
        heapq.heapreplace(free[station], end)
        busy[station] += seconds
        first = first if stage else max(first, end)
        if stage + 1 < len(jobs[number]):
            heapq.heappush(events, (end, number, stage + 1))
    last = max(max(times) for times in free.values())
    return first, last, {name: seconds / last / places[name] for name, seconds in busy.items()}


def step(config: Config, gpus: int, lengths=None, critiques=None) -> dict[str, float]:
    """Seconds of a step's parts and the busiest stations' load."""
    rng = random.Random(0)

    def drawn(mean, given):
        return rng.choice(given) if given else min(rng.lognormvariate(0, 0.7) * mean / 1.278, config.most)

    jobs, tokens = [], 0.0
    for _ in range(round(config.samples_per_gpu * gpus)):
        length = drawn(config.length, lengths)
        job, tokens = [("policy servers", length / config.speed), ("loop", 1 / 14000)], tokens + length
        if rng.random() < config.judged:
            job += [("workers", 1 / 1800), ("router", 1 / 5000)]
            job += [("judges", drawn(config.critique, critiques) / config.judge_speed)]
        jobs.append(job)
    ranks, servers, judges = (max(1, round(part * gpus)) for part in config.parts)
    places = {"policy servers": servers * config.slots, "judges": judges * config.slots}
    places |= {"loop": config.loops, "workers": config.workers, "router": config.routers}
    rollout, scored, busy = play(jobs, places)
    seconds = {"rollout": rollout, "reward wait": scored - rollout, "hand-over": tokens / config.hand_over_speed}
    seconds |= {"update": tokens / config.train_speed / ranks}
    seconds["weights"] = config.weights / config.link * -(-servers // 8)
    return seconds | busy
