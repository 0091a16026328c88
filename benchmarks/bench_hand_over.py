"""Measure the cost of what the trainer sends in a step: samples to each rank, and new weights in packs.

    python benchmarks/bench_hand_over.py                        # CPU time, on one core

Samples: the trainer pickles all samples, and each of 8 or 64 ranks reads its share. The benchmark compares
this with sending all objects to all ranks. Weights: bf16 tensors with the sizes of a 7B model are copied into
packs (compared with safetensors' function), then into Ray's object store or a file in shared memory. The last
row sends everything through an actor on this node. Not covered: the network, and the copy from a GPU.
"""

import os
import pickle
import random
import shutil
import time
from dataclasses import dataclass

import ray
import safetensors.torch
import torch
import tyro

from bench_router import machine  # This import comes first, because it extends the path to the other scripts.

import reward_loop
from cluster.policy_group import split
from cluster.weights import packs, portions, send
from policy import MiniBatch, Sample
from rollout import WeightFolder


@dataclass
class Config:
    samples: int = 2048  # Number of responses, with log-normal lengths (mean: 1,161 tokens).
    ranks: tuple[int, ...] = (8, 64)  # Numbers of simulated ranks.
    gigabytes: float = 2.0  # Size of the bf16 weights, in GB.
    rounds: int = 3  # Number of measurements. The best one is printed.


def cpu_of(rounds: int, function) -> float:
    """Return the CPU seconds that `function` takes in this process: the lowest of `rounds` rounds."""
    seconds = []
    for _ in range(rounds):
        begun = time.process_time()
        function()
        seconds.append(time.process_time() - begun)
    return min(seconds)


def made_up(count: int) -> list[MiniBatch]:
    rng = random.Random(0)
    samples = []
    for _ in range(count):
        length = min(int(1161 * rng.lognormvariate(-0.245, 0.7)) + 1, 8192)
        ids = [rng.randrange(150_000) for _ in range(length)]
        logprobs = [-rng.random() for _ in range(length)]
        samples.append(Sample({}, ids[:100], ids, logprobs, advantage=0.5))
    size = -(-count // 16)
    return [MiniBatch(samples[start : start + size], 1, 1) for start in range(0, count, size)]


def measure_samples(config: Config) -> None:
    batches = made_up(config.samples)
    everything = sum((batch.samples for batch in batches), [])
    million = 1e-6 * sum(sample.length for sample in everything)
    print(f"\n{config.samples} samples, {million:.1f} M tokens\n")
    print("| ranks | | trainer: CPU s per M tokens of the step | rank: CPU s per M tokens of the step |")
    print("| ---: | --- | ---: | ---: |")
    for ranks in config.ranks:
        sent = cpu_of(config.rounds, lambda: pickle.dumps(everything, 5))
        text = pickle.dumps(everything, 5)
        got = cpu_of(config.rounds, lambda: pickle.loads(text))
        print(f"| {ranks} | all objects to all ranks | {sent / million:.3f} | {got / million:.4f} |")

        def packed(ranks=ranks):
            return [pickle.dumps(part, 5) for part in split(batches, ranks)]

        sent = cpu_of(config.rounds, packed)
        own = packed()[0]
        got = cpu_of(config.rounds, lambda: pickle.loads(own))
        print(f"| {ranks} | **each rank's share, compact** | {sent / million:.3f} | {got / million:.4f} |")


def layers(gigabytes: float):
    """Yield names and tensors as Policy.weights does."""
    shapes = [(3584, 3584)] * 2 + [(512, 3584)] * 2 + [(18944, 3584)] * 2 + [(3584, 18944)]
    held = [torch.zeros(shape, dtype=torch.bfloat16) for shape in shapes]
    total = 0
    number = 0
    while total < gigabytes * 1e9:
        for tensor in held:
            yield f"model.layers.{number}.weight", tensor
            total += 2 * tensor.numel()
            number += 1


def measure_weights(config: Config) -> None:
    path = f"/dev/shm/bench_hand_over_{os.getpid()}"
    torch.set_num_threads(1)

    def saved():
        for tensors in portions(layers(config.gigabytes)):
            copies = {name: tensor.clone() for name, tensor in tensors.items()}
            safetensors.torch.save(copies)

    def packed():
        for _ in packs(layers(config.gigabytes)):
            pass

    def stored():
        for one in packs(layers(config.gigabytes)):
            ray.put(one)

    def written():
        folder = WeightFolder(path, {})
        for number, one in enumerate(packs(layers(config.gigabytes))):
            folder.write(number, one)

    print(f"\n{config.gigabytes:g} GB of weights in bf16\n")
    print("| | GB/s of CPU time | GB/s |\n| --- | ---: | ---: |")

    def row(name, function):
        function()  # The first call touches new memory.
        begun = time.perf_counter()
        seconds = cpu_of(config.rounds, function)
        wall = (time.perf_counter() - begun) / config.rounds
        print(f"| {name} | {config.gigabytes / seconds:.2f} | {config.gigabytes / wall:.2f} |", flush=True)

    row("copied, safetensors.save", saved)
    row("**packed**", packed)
    row("packed, put into Ray's object store", stored)
    row("packed, written to shared memory", written)
    actor = ray.remote(num_cpus=0)(WeightFolder).remote(path, {})
    row("packed, sent to an actor: this process", lambda: send(layers(config.gigabytes), {"here": actor}))
    shutil.rmtree(path)


def main() -> None:
    config = tyro.cli(Config, description=__doc__)
    print(machine())
    measure_samples(config)
    reward_loop.connect_ray()
    measure_weights(config)


if __name__ == "__main__":
    main()
