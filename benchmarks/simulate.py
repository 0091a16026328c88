"""Find what limits scaling: simulate a training step on many GPUs, event by event, from measured constants.

    python benchmarks/simulate.py                                            # FAPO-7B on 8 to 4,096 GPUs
    python benchmarks/simulate.py --gpus 64 --drawn outputs/RUN/samples.jsonl           # with a run's lengths
    python benchmarks/simulate.py --run outputs/demo_seed0/fapo        # predicted and measured times of a run

Each sample passes the stations of the Reward Loop: the policy's router, a slot on a policy server, and the
trainer's loop. A judged sample also passes a reward worker, the judges' router and a slot on a judge. A
station serves its queue in order. The trainer's loop, on one core, reads each response, decodes its text
and passes it to the reward loop.

Then the trainer computes advantages and pickles the samples, each rank reads its share, and the ranks update
and exchange weights and gradients for each micro-batch. Rank 0 packs the new weights. Each pack goes from
node to node while the next pack is made: to one node, to two more, then to four more. Several nodes may
request a pack from the same node.

These parts follow one another, as in the code without --overlap: no part starts while samples are still
generated. The simulation does not hide traffic between ranks behind computing. gloo hides none and NCCL hides
much of it, so `update` is an upper bound. bench_cluster.py compares the simulation with a real run over four
hosts. Not covered: the cost of prompts, cached prefixes, failures, --overlap, and servers that read their
weights.

--run needs a run with --rollout hf and critiques in samples.jsonl (keep_critique), as in the demo. The speeds
are taken from every second step and used to predict the other steps. All samples of a step are generated in
parallel, token by token. The judge's server is simulated with one critique at a time, so that its last
critique ends when a batch would end. The figures are medians, because other work on the machine is not part
of the run.
"""

import heapq
import json
import math
import random
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from statistics import median

import tyro


@dataclass
class Config:
    """Constants of the simulation: assumed for GPUs, measured for everything else (docs/cluster.md)."""

    gpus: tuple[int, ...] = (8, 64, 1024, 4096)  # Numbers of GPUs in the cluster, one table row each.
    shares: tuple[float, float, float] = (0.5, 0.25, 0.25)  # GPU fractions: ranks, policy servers, judges.
    samples: int = 512  # Samples per step and GPU. 512 means 512 prompts of 8 samples on eight GPUs.
    length: tuple[float, int] = (1161, 8192)  # Tokens per response: mean (log-normal, sigma 0.7) and limit.
    critique: tuple[float, int] = (3000, 16384)  # Tokens per critique: mean and limit.
    judged: float = 0.5  # Fraction of the samples that the judge reads.
    places: int = 128  # Concurrent sequences per policy server.
    judge_places: int = 128  # Concurrent critiques per judge.
    speed: float = 50  # Tokens/s of each sequence on a policy server.
    judge_speed: float = 70  # Tokens/s of each critique on a judge.
    train_speed: float = 8000  # Tokens/s of a rank in an update: a 7B model on an H100 at 35 % utilisation.
    updates: int = 16  # Mini-batches per step.
    micro_batch: int = 16384  # Tokens per micro-batch.
    loop: float = 1450  # Samples/s that the trainer's loop reads, submits and collects (bench_driver.py).
    workers: int = 2  # Reward workers, with 1,800 calls/s each.
    router: float = 3100  # Responses/s (of 92 kB) per router. The policy and the judges each have a router.
    advantages: float = 70000  # Samples/s for metrics, advantages and entropy (bench_driver.py).
    hand_over: float = 38e6  # Tokens/s that the trainer pickles for the ranks, at 14 bytes per token.
    unpack: float = 9e6  # Tokens/s at which a rank reads its share (bench_hand_over.py).
    weights: float = 15.2e9  # Bytes of the policy's weights, in bf16.
    gradients: float = 30.4e9  # Bytes of the gradients, in float32.
    pack: float = 1.85e9  # Bytes/s at which rank 0 packs weights and puts them into Ray's object store.
    pack_size: float = 2**29  # Bytes per pack.
    link: float = 12.5e9  # Bytes/s out of a node for Ray's objects: 100 Gbit/s.
    fabric: float = 400e9  # Bytes/s out of a node between ranks: eight adapters of 400 Gbit/s.
    per_node: int = 8  # GPUs per node.
    drawn: Path | None = None  # samples.jsonl of a run: draw the response lengths from it.
    run: Path | None = None  # Output directory of a run to compare with the simulation.


def play(jobs: list[list[tuple[str, float]]], places: dict[str, int]) -> tuple[dict, dict]:
    """Return when each station finished, in seconds, and its busy seconds divided by its slots.

    Args:
        jobs: The stations of each job, [(station, seconds), ...].
        places: The number of jobs that each station serves at the same time.
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


def drawn(rng: random.Random, mean: float, most: float) -> float:
    """Draw a length in tokens: log-normal with this mean, cut off at the limit."""
    return min(mean * rng.lognormvariate(-0.245, 0.7), most)


def step(config: Config, gpus: int, seed: int = 0) -> tuple[dict, dict]:
    """Return the seconds of a step's parts, and the seconds for which each station is busy."""
    rng, jobs, total = random.Random(seed), [], 0.0

    written = config.drawn.read_text().splitlines() if config.drawn else ()
    lengths = [json.loads(line)["response_length"] for line in written]
    for _ in range(config.samples * gpus):
        total += (length := rng.choice(lengths) if lengths else drawn(rng, *config.length))
        jobs.append([("policy's router", 1 / config.router), ("policy servers", length / config.speed)])
        jobs[-1].append(("loop", 1 / config.loop))
        if rng.random() < config.judged:
            seconds = drawn(rng, *config.critique) / config.judge_speed
            jobs[-1] += [("workers", 1 / 1800), ("judges' router", 1 / config.router), ("judges", seconds)]
    ranks, servers, judges = (max(round(share * gpus), 1) for share in config.shares)
    places = {"policy's router": 1, "loop": 1, "workers": config.workers, "judges' router": 1}
    places |= {"policy servers": servers * config.places, "judges": judges * config.judge_places}
    done, busy = play(jobs, places)
    between = between_ranks(config, ranks, total / ranks)
    parts = {
        "rollout": done["loop"],
        "reward wait": max(done.values()) - done["loop"],
        "advantages": len(jobs) / config.advantages,
        "to the ranks": to_ranks(config, ranks, total),
        "update": total / config.train_speed / ranks + between,
        "weights": to_servers(config, ranks, math.ceil(servers / config.per_node), rng),
    }
    return parts, busy | {name: parts[name] for name in list(parts)[2:]} | {"between ranks": between}


def to_ranks(config: Config, ranks: int, tokens: float) -> float:
    """Return the seconds to pickle these tokens, send them with 14 bytes each, and read a rank's share."""
    return tokens / config.hand_over + 14 * tokens / config.link + tokens / ranks / config.unpack


def between_ranks(config: Config, ranks: int, tokens: float) -> float:
    """Return the seconds that an update spends on exchanging weights and gradients, if none are hidden.

    Each pass over a micro-batch gathers the weights forward and backward, and adds up the gradients. Before
    the first update, the log-probabilities for all later updates are computed in forward passes.
    """
    passes = math.ceil(tokens / config.updates / config.micro_batch)  # passes of each update
    gathered = 2 * config.updates + config.updates - 1
    size = passes * (gathered * config.weights + config.updates * config.gradients)
    return size * (1 - 1 / ranks) / config.fabric


def to_servers(config: Config, ranks: int, nodes: int, rng) -> float:
    """Return the seconds until all nodes have the weights. A pack is made while the previous one is sent."""
    count = math.ceil(config.weights / config.pack_size)
    size = config.weights / count
    made = size / config.pack + size * (1 - 1 / ranks) / config.fabric
    seconds = made
    for number in range(count):
        sent = links(nodes, rng) * size / config.link
        if number + 1 < count:
            sent = max(sent, made)
        seconds += sent
    return seconds


def links(nodes: int, rng) -> int:
    """Return the number of consecutive transfers until a pack is on all nodes.

    First one node gets the pack from rank 0's node. In each later round, the number of nodes that have the
    pack doubles. Each new node asks a random owner, as in Ray, so an owner may have to serve several nodes.
    """
    times, have = 0, 1
    while have <= nodes:
        asked = Counter(rng.randrange(have) for _ in range(min(have, nodes + 1 - have)))
        times += max(asked.values())
        have += asked.total()
    return times


def table(config: Config) -> str:
    """Return a table by number of GPUs: the parts of a step in seconds, and its busiest part on a CPU."""
    parts = "rollout | reward wait | advantages | to the ranks | update | weights"
    rows = [f"| GPUs | {parts} | step s | bottleneck outside the GPUs |"]
    rows.append("| ---: " * 8 + "| --- |")
    for gpus in config.gpus:
        parts, busy = step(config, gpus)
        seconds = sum(parts.values())
        host = {name: busy[name] for name in busy if name not in ("policy servers", "judges", "update")}
        worst = max(host, key=host.get)
        shown = "".join(f"{value:,.1f} | " for value in [*parts.values(), seconds])
        rows.append(f"| {gpus:,} | {shown}{worst}, busy {host[worst] / seconds:.1%} of a step |")
    return "\n".join(rows)


def predict(run: Path) -> dict[str, tuple[float, float]]:
    """Return {part of a step: (predicted seconds, measured seconds)} for every second step of the run."""
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
    # The judge writes from the end of the shortest response to the end of the last critique.
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
    config = tyro.cli(Config, description=__doc__)
    if not config.run:
        return print(table(config))
    print("| part of a step | predicted s | measured s | ratio |\n| --- | ---: | ---: | ---: |")
    for name, (predicted, measured) in predict(config.run).items():
        print(f"| {name} | {predicted:.2f} | {measured:.2f} | {predicted / measured:.2f} |")


if __name__ == "__main__":
    main()
