"""Compare the parts of a step that simulate.py predicts with a real run over four hosts with slow links.

    python benchmarks/bench_cluster.py            # needs root and two nearly idle cores; takes ten minutes

The hosts are network namespaces (hosts.py), and `tc` limits the bytes per second into and out of each host.
Trainer, Ray, two ranks (FSDP2, gloo), router and reward worker are real. The vLLM servers, three for the
policy and two judges, are simulated with slots, a speed, log-normal lengths and random tokens.

The inputs of the simulation are measured first: a transfer between two hosts, collectives of a layer's size,
an update in two separate processes without ranks, and pickling on one core. Because the run has few samples,
the script also times sending made-up samples to the two ranks, and sending weights in four packs from rank 0
to the three other hosts. The tables show medians: for simulated steps with the middle 80 %, because lengths
are random, and for measured steps (without the first) with all values.

Not covered: GPUs, NCCL, servers that read their weights, and more than four hosts.
"""

import dataclasses
import json
import pickle
import random
import statistics
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

import ray
import torch
import torch.distributed as dist
import tyro
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy
from transformers import LlamaConfig, LlamaForCausalLM

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))
import grpo_trainer
import simulate
from bench_hand_over import cpu_of, made_up
from bench_router import machine
from cluster import policy_group, weights
from cluster.ranks import Ranks
from cluster.policy_group import split
from hosts import address_of, limit_links, played_hosts
from policy import MiniBatch, Policy, Sample
from rollout import WeightFolder
from toy import warm_start

RANKS, SERVERS, JUDGES = 2, 3, 2
PROMPTS, GROUP, UPDATES = 14, 5, 2
SAMPLES = PROMPTS * GROUP
LAYERS = 2  # With a few wide layers, communication takes more of an update than computing on two cores.
PACKS = 4  # number of packs in which rank 0 sends the weights to the other hosts
ROUNDS = 5  # repetitions of the measurements after the run
SEEDS = 100  # number of simulated steps
HANDED = "made-up samples to the ranks"
PACKED = f"weights, in {PACKS} packs to three other hosts"
CPUS = {"h1": 0, "h2": 4, "h3": 4, "h4": 4}

# This server replaces vLLM. TOLD has the slots, tokens/s, mean length and length limit of each path.
SERVER = """
import asyncio, random, sys
from aiohttp import web


def argument(name):
    return sys.argv[sys.argv.index(name) + 1]


async def generate(request):
    await request.read()
    places, speed, mean, most = TOLD[request.path]
    length = max(1, round(min(mean * random.lognormvariate(-0.245, 0.7), most)))
    async with free.setdefault(request.path, asyncio.Semaphore(places)):
        await asyncio.sleep(length / speed)
    choice = {"finish_reason": "stop", "message": {"content": "x"}}
    choice["token_ids"] = [random.randrange(10, 40) for _ in range(length)]
    choice["logprobs"] = {"token_logprobs": [-random.random() for _ in range(length)]}
    return web.json_response({"choices": [choice]})


async def say_yes(request):
    return web.json_response({})


free = {}
app = web.Application()
for path in TOLD:
    app.router.add_post(path, generate)
app.router.add_route("*", "/{path:.*}", say_yes)
web.run_app(app, host=argument("--host"), port=int(argument("--port")), print=None, access_log=None)
"""

REWARD = """
import random
import aiohttp


async def compute_score(data_source, solution_str, ground_truth, extra_info, reward_router_address):
    if random.random() < JUDGED:
        async with aiohttp.ClientSession() as session:
            body = {"messages": [{"role": "user", "content": solution_str}]}
            url = f"http://{reward_router_address}/v1/chat/completions"
            async with session.post(url, json=body) as answer:
                await answer.json()
    return random.random()
"""

RECEIVE = """
import socket, time
connection, _ = socket.create_server(("", 4711)).accept()
size = len(connection.recv(2**20))
begun = time.monotonic()
while more := connection.recv(2**20):
    size += len(more)
print(size / (time.monotonic() - begun))
"""
SEND = """
import socket, sys, time
for _ in range(100):
    try:
        connection = socket.create_connection((sys.argv[1], 4711))
        break
    except OSError:
        time.sleep(0.1)
connection.sendall(bytes(int(sys.argv[2])))
"""


@dataclass
class Config:
    link: float = 6e6  # Bytes/s into and out of each host.
    steps: int = 10  # Steps of the run. The tables exclude the first one.
    length: tuple[float, int] = (16, 48)  # Tokens per response: mean (log-normal, sigma 0.7) and limit.
    critique: tuple[float, int] = (60, 192)  # Tokens per critique: mean and limit.
    judged: float = 0.5  # Fraction of the samples that a judge reads.
    places: int = 8  # Concurrent sequences per policy server.
    judge_places: int = 4  # Concurrent critiques per judge.
    speed: float = 5  # Tokens/s of each sequence on a policy server.
    judge_speed: float = 15  # Tokens/s of each critique on a judge.
    hidden: int = 384  # Hidden size of the policy, which has 5 M parameters.
    samples: int = 1200  # Number of made-up samples to send to the ranks, with 1,161 tokens each.


def settings(config: Config, folder: Path) -> grpo_trainer.Config:
    return grpo_trainer.Config(
        model=str(folder / "policy"),
        genrm=(str(folder / "policy"),),
        genrm_servers=JUDGES,
        train_file=str(folder / "rows.jsonl"),
        out_dir=str(folder / "run"),
        reward_fn=f"{folder}/score.py:compute_score",
        num_workers=1,
        device="cpu",
        policy_ranks=RANKS,
        rollout="vllm",
        rollout_servers=SERVERS,
        rollout_batch_size=config.places,
        total_steps=config.steps,
        train_batch_size=PROMPTS,
        mini_batch_size=PROMPTS // UPDATES,
        group_size=GROUP,
        max_response_length=config.length[1],
        max_tokens_per_micro_batch=2**20,
        overlong_buffer=0,
        max_logprob_diff=1e9,
        save_every=0,
        num_threads=1,
    )


def shape(config: Config, vocab_size: int) -> LlamaConfig:
    """Return the configuration of the policy's model."""
    return LlamaConfig(
        vocab_size=vocab_size,
        hidden_size=config.hidden,
        intermediate_size=4 * config.hidden,
        num_hidden_layers=LAYERS,
        num_attention_heads=4,
        pad_token_id=0,
        eos_token_id=1,
        bos_token_id=None,
    )


def write_input(config: Config, folder: Path) -> int:
    """Write a policy, rows and a reward function. Returns the size of the policy's weights in bytes."""
    tokenizer = warm_start.build_tokenizer(warm_start.tokenizer_corpus(random.Random(0)))
    model = LlamaForCausalLM(shape(config, len(tokenizer)))
    model.save_pretrained(folder / "policy")
    tokenizer.save_pretrained(folder / "policy")
    with open(folder / "rows.jsonl", "w") as file:
        for number in range(64):
            row = {
                "data_source": "made up",
                "prompt": [{"role": "user", "content": f"{number} + 1"}],
                "extra_info": {"index": number},
                "reward_model": {"ground_truth": str(number + 1)},
            }
            file.write(json.dumps(row) + "\n")
    (folder / "score.py").write_text(f"JUDGED = {config.judged}\n{REWARD}")
    return 4 * sum(tensor.numel() for tensor in model.state_dict().values())


# ---- on the hosts


class MeasuredGroup(policy_group.PolicyGroup):
    """A policy group that measures transfers over the links before it writes the run's only checkpoint."""

    def save(self, folder: Path) -> None:
        found = {HANDED: [], PACKED: []}
        batches = made_up(self.samples)
        there = [node["NodeID"] for node in ray.nodes()]
        there.remove(self.own.nodes("rank")[0])
        folders = {}
        for number, node in enumerate(there):
            where = NodeAffinitySchedulingStrategy(node, soft=False)
            kind = ray.remote(WeightFolder).options(num_cpus=0, scheduling_strategy=where)
            folders[node] = kind.remote(f"{folder.parent}_{number}", {})
        ray.get([actor.finish.remote() for actor in folders.values()])  # Wait until all actors have started.
        size = 4 * self.model_info()["numel"]
        for _ in range(ROUNDS):
            begun = time.monotonic()
            parts = split(batches, RANKS)
            ray.get([rank.__ray_call__.remote(take, own) for rank, own in zip(self.actors, parts)])
            found[HANDED].append(time.monotonic() - begun)
            begun = time.monotonic()
            assert not ray.get(self.actors[0].__ray_call__.remote(send_packs, size, folders))
            found[PACKED].append(time.monotonic() - begun)
        self.results.write_text(json.dumps(found))
        super().save(folder)


def take(rank, batches: list) -> int:
    return len(batches)


def send_packs(rank, size: int, folders: dict) -> set:
    """Send made-up weights of `size` bytes in PACKS packs."""
    weights.PACK = size // PACKS
    return weights.send([(str(number), torch.zeros(size // PACKS // 4)) for number in range(PACKS)], folders)


def train(config: Config, folder: Path, rank: int) -> None:
    MeasuredGroup.samples = config.samples
    MeasuredGroup.results = folder / "crossed.json"
    policy_group.PolicyGroup = MeasuredGroup
    grpo_trainer.train(settings(config, folder))


def update_alone(config: Config, folder: Path, rank: int) -> None:
    """Update on a rank's share of a step's samples in one independent process, and print tokens/s."""
    torch.set_num_threads(1)
    options = settings(config, folder)
    policy = Policy(options, options.model, torch.device("cpu"))
    policy.model.shares_prompts = False  # Ranks cannot share prompts either.
    rng = random.Random(0)
    prompt_ids = list(range(10, 18))  # as long as the prompts of the rows
    batches = []
    total = 0
    for _ in range(UPDATES):
        samples = []
        for number in range(SAMPLES // UPDATES // RANKS):
            length = round(simulate.drawn(rng, *config.length)) + 1
            ids = [rng.randrange(10, 40) for _ in range(length)]
            samples.append(Sample({}, prompt_ids, ids, [-1.0] * length, advantage=rng.gauss(0, 1)))
            total += length
        batches.append(MiniBatch(samples, sum(len(sample.response_ids) for sample in samples), len(samples)))
    seconds = []
    for _ in range(ROUNDS):
        begun = time.monotonic()
        policy.update_mini_batches(batches, 1e-6, 1e9)
        seconds.append(time.monotonic() - begun)
    print(total / statistics.median(seconds))


def exchange(config: Config, folder: Path, rank: int) -> None:
    """Send the data of a pass over a layer without computing, and print bytes/s out of each host."""
    numel = sum(tensor.numel() for tensor in LlamaForCausalLM(shape(config, 8)).model.layers[0].parameters())
    first = address_of("h2")
    store = None
    if rank == 0:  # The ranks meet at this store, which must stay alive.
        store = dist.TCPStore(first, 4712, is_master=True, wait_for_workers=False)
    address = address_of(f"h{rank + 2}")
    Ranks(rank=rank, count=RANKS, store=f"{first}:4712", address=address).join(torch.device("cpu"))
    whole = torch.ones(numel)
    own = torch.ones(numel // RANKS)
    rates = []
    for _ in range(2 * ROUNDS):
        dist.barrier()
        begun = time.monotonic()
        for _ in range(2):
            dist.all_gather_single(whole, own)
        dist.reduce_scatter_single(own, whole)
        # Two gathers send half of the layer each. gloo then sends the whole layer to sum the gradients.
        rates.append(2 * 4 * numel / (time.monotonic() - begun))
    dist.barrier()
    del store
    print(statistics.median(rates))


# ---- the measurements


def number_of(process: subprocess.Popen, log: Path) -> float:
    """Return the last number that a program prints."""
    assert process.wait(300) == 0, log.read_text()
    return float(log.read_text().split()[-1])


def link_rate(on, config: Config, folder: Path) -> float:
    """Return the bytes/s of a plain transfer between two hosts."""
    log = folder / "receive.log"
    receiver = on("h3", sys.executable, "-c", RECEIVE, log=log)
    size = str(int(3 * config.link))
    on("h2", sys.executable, "-c", SEND, address_of("h3"), size, log=folder / "send.log")
    return number_of(receiver, log)


def this_script(role: str, folder: Path, rank: int = 0) -> list[str]:
    return [sys.executable, __file__, role, str(folder), str(rank)]


def of_two(on, role: str, folder: Path) -> float:
    """Run this script in this role on two hosts at the same time; return the mean of their numbers."""
    running = []
    for rank, host in enumerate(("h2", "h3")):
        log = folder / f"{role}_{host}.log"
        running.append((on(host, *this_script(role, folder, rank), log=log), log))
    return statistics.mean(number_of(process, log) for process, log in running)


def simulated(config: Config, link, fabric, train_speed, size: int) -> simulate.Config:
    batches = made_up(500)
    tokens = tokens_of(batches)
    packed = pickle.dumps(batches, 5)
    tensors = [(str(number), torch.zeros(size // 32)) for number in range(8)]
    gpus = RANKS + SERVERS + JUDGES
    return simulate.Config(
        shares=(RANKS / gpus, SERVERS / gpus, JUDGES / gpus),
        samples=SAMPLES // gpus,
        length=config.length,
        critique=config.critique,
        judged=config.judged,
        places=config.places,
        judge_places=config.judge_places,
        speed=config.speed,
        judge_speed=config.judge_speed,
        train_speed=train_speed,
        hand_over=tokens / cpu_of(3, lambda: pickle.dumps(batches, 5)),
        unpack=tokens / cpu_of(3, lambda: pickle.loads(packed)),
        weights=size,
        gradients=2 * size,  # With gloo, every rank sums all gradients.
        updates=UPDATES,
        pack=size / cpu_of(3, lambda: list(weights.packs(tensors))),
        link=link,
        fabric=fabric,
        micro_batch=2**20,
        per_node=1,
    )


def measured(folder: Path) -> dict[str, list[float]]:
    lines = (folder / "run/metrics.jsonl").read_text().splitlines()
    lines = [json.loads(line) for line in lines]
    parts = {"rollout": "rollout", "reward wait": "reward_wait", "update": "update", "weights": "sync"}
    found = {}
    for part, key in parts.items():
        found[part] = [line[f"time/{key}"] for line in lines if line["step"] > 1]
    return found | json.loads((folder / "crossed.json").read_text())


def main() -> None:
    roles = {"alone": update_alone, "exchange": exchange, "train": train}
    if sys.argv[1:2] and sys.argv[1] in roles:  # This process runs on one of the hosts.
        folder = Path(sys.argv[2])
        config = Config(**json.loads((folder / "config.json").read_text()))
        return roles[sys.argv[1]](config, folder, int(sys.argv[3]))
    config = tyro.cli(Config, description=__doc__)
    with tempfile.TemporaryDirectory() as name:
        compare(config, Path(name))


def compare(config: Config, folder: Path) -> None:
    (folder / "config.json").write_text(json.dumps(dataclasses.asdict(config)))
    size = write_input(config, folder)
    told = {
        "/v1/completions": (config.places, config.speed, *config.length),
        "/v1/chat/completions": (config.judge_places, config.judge_speed, *config.critique),
    }
    print(machine(), flush=True)
    with played_hosts(folder, f"TOLD = {told}\n{SERVER}", CPUS) as on:
        speed = of_two(on, "alone", folder)
        limit_links(config.link)
        link = link_rate(on, config, folder)
        fabric = of_two(on, "exchange", folder)
        print(f"\nlink {link / 1e6:.2f} MB/s, collectives {fabric / 1e6:.2f} MB/s per host")
        print(f"update {speed:.0f} tokens/s per rank, weights {size / 1e6:.1f} MB\n", flush=True)
        run = on("h1", *this_script("train", folder), log=folder / "run.log")
        assert run.wait() == 0, (folder / "run.log").read_text()
    shown(predicted(config, simulated(config, link, fabric, speed, size)), measured(folder))


def predicted(config: Config, told: simulate.Config) -> dict[str, list[float]]:
    """Return the seconds of each part in SEEDS simulated steps."""
    found = {part: [] for part in ("rollout", "reward wait", "update", "weights", PACKED)}
    alone = dataclasses.replace(told, pack_size=told.weights / PACKS)
    for seed in range(SEEDS):
        rng = random.Random(seed)
        parts, _ = simulate.step(told, RANKS + SERVERS + JUDGES, seed)
        # Rank 0 runs on one of the hosts with servers.
        parts["weights"] = simulate.to_servers(told, RANKS, SERVERS - 1, rng)
        parts[PACKED] = simulate.to_servers(alone, 1, len(CPUS) - 1, rng)
        for part, values in found.items():
            values.append(parts[part])
    tokens = tokens_of(made_up(config.samples))
    return found | {HANDED: [simulate.to_ranks(told, RANKS, tokens)] * SEEDS}


def tokens_of(batches: list[MiniBatch]) -> int:
    return sum(sample.length for batch in batches for sample in batch.samples)


def shown(predictions: dict[str, list[float]], found: dict[str, list[float]]) -> None:
    print("| part of a step | predicted s | measured s | predicted / measured |")
    print("| --- | ---: | ---: | ---: |")
    for part, values in found.items():
        expected = statistics.median(predictions[part])
        middle = statistics.median(values)
        tenths = statistics.quantiles(predictions[part], n=10)
        row = f"{expected:.2f} ({tenths[0]:.2f}-{tenths[-1]:.2f})"
        row += f" | {middle:.2f} ({min(values):.2f}-{max(values):.2f}) | {expected / middle:.2f}"
        print(f"| {part} | {row} |")


if __name__ == "__main__":
    main()
