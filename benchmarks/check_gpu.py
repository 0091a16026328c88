"""Check everything that can be tested only on an NVIDIA GPU, and print a table of results.

    make check-gpu                                    # or python benchmarks/check_gpu.py; needs no network
    python benchmarks/check_gpu.py --size small       # a model of 1 M parameters instead of 1,066 M
    python benchmarks/check_gpu.py --model FOLDER     # a real model
    python benchmarks/check_gpu.py --only servers     # a single check

Each check is a function that yields rows. It runs in a separate process with a time limit, because a check
that fails, hangs or dies must not stop the others. Logs are in outputs/check_gpu. The exit code is 1 if a
check fails, and 2 if there is no GPU.

The models have random weights (gpu_models.py).

Not covered: the quality of training, several machines, and GPUs from other vendors.
"""

import contextlib
import json
import math
import random
import re
import shlex
import shutil
import subprocess
import sys
import time
import traceback
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Literal
from unittest.mock import patch

import ray
import torch
import transformers
import tyro
from torch.nn.utils import parameters_to_vector
from transformers import AutoTokenizer

from measuring import ROOT, error_text, groups_of, started
import compute_score
import genrm_server
import grpo_trainer
import causal_lm
import policy
from gpu_models import (
    measure,
    new_model,
    peak_of,
    random_samples,
    time_update,
    toy_problems,
    toy_tokenizer,
    write_model,
)
from tools import plan_run
import reward_loop
from prepare_data import write_table
from toy import toy_world, warm_start
from cluster.placement import Reservation, process_specs
from cluster.policy_group import PolicyGroup
from cluster.servers import ClusterServers
from rollout import PolicyServers, rollout_hf, rollout_vllm
from run_folder import read_lines

WORK, GPU = ROOT / "outputs" / "check_gpu", torch.device("cuda:0")
AGREE = 0.1  # limit of the mean difference in nats per token between two bf16 computations
STALE = grpo_trainer.Config.max_logprob_diff  # limit at which the trainer stops
SHARE = 0.3  # fraction of the GPU for servers next to the policy
POLICY_SHARE = 0.6  # fraction of the GPU that the policy and a judge use in turns (colocate)
TOP_P = 0.7


# ---- models and samples for the checks


def make_models(work: Path, device=GPU):
    """Write the models `tiny` and `model` and rows for training to the directory `work`."""
    config, tokenizer = json.loads((work / "config.json").read_text()), toy_tokenizer()
    write_model(warm_start.new_model(len(tokenizer), seed=0), tokenizer, work / "tiny")
    rows = []
    for index, problem in enumerate(toy_problems(32)):
        rows.append(toy_world.policy_row(problem, "toy", "train", index))
    write_table(work / "train.parquet", rows)
    if config["model"] or config["size"] == "small":
        (work / "model").symlink_to(Path(config["model"] or work / "tiny").resolve())
    else:
        write_model(new_model("1b", device), tokenizer, work / "model")
    yield "made", True, config["model"] or config["size"]


def config_of(model: Path, **settings) -> grpo_trainer.Config:
    return grpo_trainer.Config(model=str(model), train_file="", out_dir=str(model.parent), **settings)


def load(work: Path, device, **settings) -> policy.Policy:
    config = config_of(work / "model", max_tokens_per_micro_batch=4096, **settings)
    return policy.Policy(config, config.model, device)


def plan_update(model: Path, device, length: int, tokens: int, **settings) -> tuple:
    """Return the settings for micro-batches of this many tokens, and the memory in GB by plan_run's estimate.

    The memory is that of the device, while vLLM samples responses of this length.
    """
    config = config_of(
        model,
        rollout="vllm",
        device=device.type,
        max_prompt_length=64,
        max_response_length=length,
        max_tokens_per_micro_batch=tokens,
        **settings,
    )
    memory = plan_run.estimate_memory(config, device.type)
    return config, sum(gb or 0.0 for name, gb in memory.items() if "host" not in name)


def seconds_of(device, function) -> float:
    return measure(device, function)[1]


def samples_of(work: Path, prompts: int) -> list[policy.Sample]:
    """Return eight empty samples for each prompt, which is a problem of the toy world."""
    tokenizer = AutoTokenizer.from_pretrained(work / "model")
    texts = map(str, toy_problems(prompts))
    return [policy.Sample({}, tokenizer.encode(text)) for text in texts for _ in range(8)]


def roll_out(learner, samples, length: int):
    # No token ends a response, so all have full length.
    options = dict(temperature=1.0, eos_ids=(), seed=0, rollout_batch_size=512)
    rollout_hf(learner.model, samples, max_response_length=length, **options)
    return samples


def difference(learner, samples) -> float:
    """Return the mean absolute difference between sampler and trainer (rollout/logprob_diff)."""
    sums = learner.compare_with_sampler(samples)
    return sums["difference_sum"] / sums["compared_tokens"]


def agreement(work: Path, learner, fill):
    """Compare vLLM and the trainer at another temperature, greedily (log-probabilities at 1) and with top_p.

    vLLM's log-probabilities are those within the nucleus, which exceed the trainer's by at most the negative
    log of top_p.

    Args:
        fill: fill(samples, temperature=..., top_p=...) samples the responses.
    """
    ways = (("temperature 1.2", 1.2, 1.0), ("greedy", 0.0, 1.0), (f"top_p {TOP_P}", 1.0, TOP_P))
    for name, temperature, top_p in ways:
        samples = samples_of(work, 4)
        fill(samples, temperature=temperature, top_p=top_p)
        learner.config.temperature = temperature or 1.0
        off, most = difference(learner, samples), AGREE - math.log(top_p)
        text = f"{off:.4f} nats apart on average, expected below {most:.2f}"
        yield f"vLLM and trainer, {name}", off < most, text
    learner.config.temperature = 1.0


# ---- the checks: each yields rows (tested property, True, False or None for skipped, measurement)


def check_environment(work: Path):
    driver = subprocess.getoutput("nvidia-smi --query-gpu=driver_version --format=csv,noheader")
    (free, total), name = torch.cuda.mem_get_info(GPU), torch.cuda.get_device_name(GPU)
    memory = f"{total / 2**30:.0f} GiB, {free / 2**30:.0f} free"
    yield "GPU", True, f"{torch.cuda.device_count()} x {name}, {memory}, driver {driver.splitlines()[0]}"
    versions = f"torch {torch.__version__}, transformers {transformers.__version__}"
    yield "packages", True, f"Python {sys.version.split()[0]}, {versions}"
    try:
        import vllm

        yield "vllm", True, vllm.__version__
    except Exception as error:  # An installed but broken vllm may raise any exception.
        is_missing = getattr(error, "name", "") == "vllm"
        yield "vllm", None if is_missing else False, f"{type(error).__name__}: {error}"


def check_precision(work: Path, device=GPU, length=256):
    """Compare an ordinary update with one that recomputes activations and one in float32.

    All updates use the same samples and leave the weights unchanged.
    """
    learner = load(work, device, tis_cap=2.0)  # With this cap, the loss depends on the log-probabilities.
    samples, rng = samples_of(work, 4), random.Random(0)
    for index, sample in enumerate(samples):  # Make prompts of different lengths.
        sample.prompt_ids *= 1 + index // 8
    roll_out(learner, samples, length)
    for sample in samples:
        keep = rng.randint(length // 4, length)
        sample.advantage = rng.gauss(1, 1)  # With a mean of 0, the loss would be about 0.
        del sample.response_ids[keep:], sample.rollout_logprobs[keep:]

    def update():
        metrics, _, _, above = measure(device, lambda: learner.update(groups_of(samples), lr=0.0))
        gradient = parameters_to_vector(one.grad for one in learner.model.parameters())
        logprobs = torch.cat([logprobs for _, logprobs in learner.logprobs_of(samples)])
        return metrics, above, gradient, logprobs.cpu()

    update()  # This update creates the optimizer's state.
    plain, above, gradient, logprobs = update()
    # Gradient checkpointing also turns off shared prompts in a run.
    shares, learner.model.shares_prompts = learner.model.shares_prompts, False
    learner.config.gradient_checkpointing = True
    spare, spare_above, *_ = update()
    learner.config.gradient_checkpointing = False
    learner.model.shares_prompts = shares
    torch.set_float32_matmul_precision("highest")
    with patch.object(causal_lm, "precision", contextlib.nullcontext):
        exact, _, exact_gradient, exact_logprobs = update()

    off = (logprobs - exact_logprobs).abs().mean().item()
    text = f"{off:.4f} nats apart on average, entropy {-logprobs.mean():.1f} nats"
    yield "bf16 and float32: log-probabilities", off < AGREE, text
    for key in ("actor/loss", "actor/grad_norm"):
        off = abs(plain[key] / exact[key] - 1)
        text = f"{plain[key]:.5f} and {exact[key]:.5f}, {off:.2%} apart"
        yield f"bf16 and float32: {key}", off < 0.05, text
    cosine = torch.cosine_similarity(gradient, exact_gradient, dim=0).item()
    yield "bf16 and float32: direction of the gradient", cosine > 0.98, f"cosine {cosine:.5f}"
    off = abs(spare["actor/grad_norm"] / plain["actor/grad_norm"] - 1)
    memory = f"{spare_above:.2f} instead of {above:.2f} GB in addition to weights and optimizer"
    text = f"{off:.2%} apart; {memory}"
    yield "--gradient-checkpointing: the same norm, less memory", off < 0.01 and spare_above <= above, text


def check_update(work: Path, device=GPU, length=1024):
    """Measure speed and memory with the trainer's micro-batches, or with those that fit by its estimate."""
    total = 1e-9 * torch.cuda.get_device_properties(device).total_memory if device.type == "cuda" else 1e6
    for budget in (16384, 8192, 4096, 2048):
        config, estimate = plan_update(work / "model", device, length, budget)
        if estimate < 0.8 * total:
            break
    learner = policy.Policy(config, config.model, device)
    length = min(length, learner.model.config.max_position_embeddings // 2)
    found, _ = time_update(learner, random_samples(learner, length, 32), device)
    peak = found["peak_gb"]
    text = f"{found['tokens_per_s']:,.0f} tokens/s, {found['of_peak']:.1%} of {1e-12 * peak_of(device):.0f}"
    yield "update: speed", True, f"{text} TFLOP/s ({found['m_weights']:,.0f} M weights)"
    text = f"{peak:.1f} GB at the peak, {estimate:.1f} GB estimated, micro-batches of {budget} tokens"
    as_planned = 0.9 * estimate < peak < 1.1 * estimate or device.type == "cpu"  # The plan is only for GPUs.
    yield "update: memory, 0.9 to 1.1 times plan_run's estimate", as_planned, text


def check_servers(work: Path, length=64):
    """Check vLLM servers that have the policy's weights and share its GPU. check_speed measures syncs."""
    learner, tokenizer = load(work, GPU), AutoTokenizer.from_pretrained(work / "model")
    total = 1e-9 * torch.cuda.get_device_properties(GPU).total_memory

    def fill(samples, **options):
        options |= dict(max_response_length=length, eos_ids=(), rollout_batch_size=512)
        rollout_vllm(servers, samples, **options)

    def served():
        """Return the difference between sampler and trainer, and the seconds of sampling."""
        samples = samples_of(work, 4)
        seconds = seconds_of(GPU, lambda: fill(samples, temperature=1.0))
        return difference(learner, samples), seconds

    @torch.no_grad()
    def move():
        for parameter in learner.model.parameters():
            parameter += 0.2 * parameter.std() * torch.randn_like(parameter)

    settings = genrm_server.Config(
        model="", gpu_share=SHARE, max_model_len=512, queue_timeout=240, log_dir=work / "servers"
    )
    servers, ready, *_ = measure(GPU, lambda: PolicyServers(learner, tokenizer, settings))
    try:
        off, _ = served()
        text = f"{off:.4f} nats apart on average, expected below {AGREE}; ready after {ready:.0f} s"
        yield "vLLM and trainer", off < AGREE, text
        yield from agreement(work, learner, fill)
        log = (work / "servers/server_0.log").read_text()
        plan = plan_run.server_memory(learner.config, "policy server", servers.service.config, total)
        yield from room_row(log, plan)
        move()
        off, _ = served()
        text = f"{off:.3f} nats apart; the trainer stops above {STALE}"
        yield "old weights are detected", off > STALE, text
        servers.sync()
        off, seconds = served()
        text = f"{off:.4f} nats apart; {32 * length / seconds:,.0f} tokens/s"
        yield "new weights", off < AGREE, text
        process = servers.service.slots[0].server.child
        process.kill()
        process.wait()
        move()
        synced = seconds_of(GPU, servers.sync)
        off, seconds = served()
        text = f"{off:.4f} nats apart; ready after {synced + seconds:.0f} s"
        yield "a killed server restarts with the new weights", off < AGREE, text
    finally:
        servers.shutdown()


def room_row(log: str, plan: str):
    """Compare the capacity of a server's KV cache with the estimate of plan_run. Yields no row on a CPU."""
    found = re.findall(r"GPU KV cache size: ([\d,]+) tokens", log)
    planned = re.search(r"room for ([\d,]+) tokens", plan)
    if found and planned:
        tokens, expected = (int(text.replace(",", "")) for text in (found[-1], planned[1]))
        text = f"{tokens:,} tokens, {tokens / expected:.2f} times plan_run's {expected:,}"
        yield "KV-cache capacity, 0.8 to 1.25 times plan_run's estimate", 0.8 < tokens / expected < 1.25, text


def check_speed(work: Path, device=GPU, count=512, length=512):
    """Measure tokens/s of a server, compared with bare vLLM, and a weight sync.

    Bare vLLM gets the same requests without router and log-probabilities. As in all runs on GPUs, the policy
    is a rank, and the server is a Ray actor.
    """
    shares = dict(policy_gpu_share=1 - SHARE, rollout_gpu_share=SHARE)
    config = config_of(work / "model", device=device.type, rollout="vllm", **shares)
    tokenizer, samples = AutoTokenizer.from_pretrained(config.model), samples_of(work, count // 8)
    reward_loop.connect_ray()
    with contextlib.ExitStack() as stack:
        reservation = Reservation(process_specs(config))  # for the rank and the server
        stack.callback(reservation.close)
        group = PolicyGroup(config, config.model, reservation)
        stack.callback(group.shutdown)
        settings = replace(config.policy_server_config(), max_model_len=2 * length, log_dir=work / "speed")
        servers, ready, *_ = measure(device, partial(ClusterServers, group, tokenizer, settings))
        stack.callback(servers.shutdown)
        options = dict(temperature=1.0, eos_ids=(), rollout_batch_size=count)
        rollout_vllm(servers, samples[:8], max_response_length=8, **options)  # warms up
        seconds = seconds_of(
            device, lambda: rollout_vllm(servers, samples, max_response_length=length, **options)
        )
        text = f"{count * length / seconds:,.0f} tokens/s, ready after {ready:.0f} s"
        yield f"{count} samples of {length} tokens", True, text
        bare = seconds_of(device, lambda: ask_bare(servers, samples, length))
        text = f"{bare / seconds:.2f} times {count * length / bare:,.0f} tokens/s, expected 0.95"
        yield "tokens/s, as a fraction of those of bare vLLM", bare / seconds > 0.95, text
        first, again = (seconds_of(device, servers.sync) for _ in range(2))
        sent = 2e-9 * group.model_info()["numel"] / again
        yield "weight sync", True, f"{again:.2f} s (first {first:.2f} s), {sent:.2f} GB/s"


def ask_bare(servers, samples, length: int) -> None:
    """Send the same requests to a server without the router, and without log-probabilities and token ids."""
    url, config = f"{servers.service.slots[0].url}/v1/completions", servers.service.config
    body = {"model": config.served_model_name, "max_tokens": length, "ignore_eos": True}

    def ask(sample):
        request = body | {"prompt": sample.prompt_ids}
        status, text = genrm_server.request("POST", url, request, config.server_key, timeout=None)
        if status != 200:
            raise RuntimeError(f"the server returned {status}: {text}")

    with ThreadPoolExecutor(len(samples)) as pool:
        list(pool.map(ask, samples))


def check_ranks(work: Path, device=GPU, length=256):
    """Compare the same update by one process and by two ranks, and the memory that each rank holds."""
    count = torch.cuda.device_count()
    if device.type == "cuda" and count < 2:
        yield "two ranks", None, f"needs 2 GPUs, torch sees {count}"
        return
    settings, rng = dict(lr_warmup_steps=0, group_size=8, mini_batch_size=2), random.Random(0)
    alone = load(work, device, **settings)
    samples = roll_out(alone, samples_of(work, 4), length)
    for sample in samples:
        sample.advantage = rng.gauss(1, 1)

    def two_updates(learner):
        return [learner.update(groups_of(samples), lr=1e-6) for _ in range(2)][1]

    expected, seconds, peak, _ = measure(device, partial(two_updates, alone))
    alone = None
    measure(device, lambda: None)  # This frees unused memory, which a rank may need on the same GPU.
    reward_loop.connect_ray()
    settings |= dict(policy_ranks=2, device=device.type, max_tokens_per_micro_batch=4096)
    config = config_of(work / "model", **settings)
    group = PolicyGroup(config, config.model)
    try:
        found, of_two, *_ = measure(device, partial(two_updates, group))
        held = ray.get(
            [actor.__ray_call__.remote(lambda _: torch.cuda.max_memory_allocated()) for actor in group.actors]
        )
    finally:
        group.shutdown()
    for key in ("actor/loss", "actor/grad_norm", "actor/entropy"):
        off = abs(found[key] - expected[key]) / max(abs(expected[key]), 1e-2)
        yield f"two ranks and one process: {key}", off < 0.02, f"{found[key]:.5f} and {expected[key]:.5f}"
    text = (
        f"{1e-9 * max(held):.1f} GB at the peak on each, alone {peak:.1f}; {of_two:.1f} s for two updates, "
        f"alone {seconds:.1f}"
    )
    yield "two ranks: memory and time", max(held) <= 1e9 * peak, text


def check_sleep(work: Path):
    def used():
        free, total = torch.cuda.mem_get_info(GPU)
        return (total - free) / 2**30

    def answers():
        body = {"model": "judge", "max_tokens": 32, "temperature": 0, "return_token_ids": True}
        url, key = f"http://{judge.router_address}/v1/completions", judge.config.server_key
        bodies = [body | {"prompt": [number] * 64} for number in range(5, 9)]
        found = [genrm_server.request("POST", url, one, key, timeout=120) for one in bodies]
        if any(status != 200 for status, _ in found):
            raise RuntimeError(f"the judge returned {found}")
        return [json.loads(text)["choices"][0]["token_ids"] for _, text in found]

    before = used()
    judge = genrm_server.ModelServers(
        genrm_server.Config(
            model=str(work / "model"),
            port=0,
            gpu_share=POLICY_SHARE,
            served_model_name="judge",
            dtype="bfloat16",
            max_model_len=512,
            sleep_mode=True,
            log_dir=work / "sleep",
        )
    )
    try:
        first, awake = answers(), used()
        to_sleep = seconds_of(GPU, judge.sleep)
        asleep = used()
        size = int(POLICY_SHARE * torch.cuda.get_device_properties(GPU).total_memory)
        try:
            torch.empty(size, dtype=torch.uint8, device=GPU).fill_(1)
            fits, text = True, "allocated"
        except torch.cuda.OutOfMemoryError as error:
            fits, text = False, str(error)[:150]
        torch.cuda.empty_cache()
        what = f"a policy with GPU share {POLICY_SHARE} fits next to a sleeping judge with the same share"
        yield what, fits, f"{size / 2**30:.1f} GiB {text}; expected: allocated"
        to_wake = seconds_of(GPU, partial(judge.sleep, False))
        text = f"{before:.1f} GiB before, {awake:.1f} awake, {asleep:.1f} asleep, {used():.1f} awake again; "
        text += "expected: frees more than half"
        yield "a sleeping judge frees most of its memory", asleep - before < 0.5 * (awake - before), text
        text = f"{to_sleep:.1f} s to sleep, {to_wake:.1f} s to wake, greedy answers of 32 tokens"
        yield "after waking, the judge gives the same answers", answers() == first, text
    finally:
        judge.shutdown()


RUN = """--model tiny --train-file train.parquet --total-steps 2 --train-batch-size 4 --mini-batch-size 4
    --group-size 4 --max-response-length 32 --overlong-buffer 0 --max-no-verdict-rate 0 --lr 1e-4 """
# --enforce-eager makes a server ready half a minute sooner.
EAGER = "--policy-gpu-share 0.4 --rollout-gpu-share 0.3 --rollout-vllm-args=--enforce-eager"
JUDGE = "--genrm tiny --genrm-gpu-share 0.25 --genrm-vllm-args=--enforce-eager"
SERVER = "--rollout-vllm-args=--enforce-eager"
RUNS = {  # name -> (flags, number of GPUs, expected result)
    "shares": (f"{EAGER} {JUDGE}", 1, "every sample judged"),
    "colocate": (f"{EAGER} {JUDGE} --reward-mode colocate", 1, "every sample judged by a judge that slept"),
    "lora": (f"{EAGER} --lora-rank 16", 1, "adapter checkpoints, merged at the end"),
    "offload": (f"{EAGER} --policy-offload", 1, "slower steps than in shares"),
    "two_ranks": (f"{EAGER} --policy-ranks 2 --rollout-servers 2", 2, "a rank and a server on each GPU"),
    "tensor_parallel": (f"{SERVER} --rollout-tensor-parallel 2", 3, "one server on two GPUs"),
}


async def score_by_asking(
    data_source, solution_str, ground_truth, extra_info, reward_router_address=None, **_
) -> dict:
    """Score the samples of whole runs. A sample gets no score if the judge does not respond."""
    status, answer = "skipped", ""
    if reward_router_address:
        status, answer, _ = await compute_score.chat(
            extra_info["question"], reward_router_address, max_tokens=8, timeout_s=100
        )
    failed = status in ("http_error", "timeout")  # After eight tokens, the status is usually "truncated".
    return {"score": None if failed else len(solution_str + answer) % 7 / 6, "genrm_status": status}


def check_run(work: Path, name: str):
    """Run grpo_trainer.py as a user does, for two steps with the tiny model; vLLM and trainer must agree."""
    flags, gpus, expected = RUNS[name]
    if torch.cuda.device_count() < gpus:
        yield f"two-step run, {name}", None, f"needs {gpus} GPUs, torch sees {torch.cuda.device_count()}"
        return
    command = [sys.executable, str(ROOT / "grpo_trainer.py"), "--reward-fn", f"{__file__}:score_by_asking"]
    command += ["--out-dir", name, *shlex.split(RUN + flags)]
    begun = time.perf_counter()
    run = subprocess.run(command, cwd=work, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    seconds = time.perf_counter() - begun
    print(run.stdout)
    if run.returncode:
        raise RuntimeError(f"exit code {run.returncode}: {run.stdout.strip()[-300:]}")
    yield run_row(work / name, name, f"{expected}; {seconds:.0f} s in total")


def run_row(folder: Path, name: str, expected: str) -> tuple:
    """Check that a run has two steps, log-probabilities agree, and a LoRA run saved no full weights."""
    steps = read_lines(folder / "metrics.jsonl")[0][1:]
    keys = ("time/step", "rollout/logprob_diff")
    times, offs = (", ".join(f"{step[key]:.3g}" for step in steps) for key in keys)
    holds = len(steps) == 2 and all(step["rollout/logprob_diff"] < AGREE for step in steps)
    if "--lora-rank" in RUNS[name][0]:
        holds &= (folder / "checkpoints/step_2/adapter_model.safetensors").is_file()
    figure = f"steps of {times} s; sampler and trainer {offs} nats apart; expected: {expected}"
    return f"two-step run, {name}", holds, figure


CHECKS = {  # name -> (function, seconds that it may take, whether it needs vllm)
    "environment": (check_environment, 120, False),
    "models": (make_models, 120, False),
    "precision": (check_precision, 180, False),
    "update": (check_update, 120, False),
    "ranks": (check_ranks, 240, False),
    "servers": (check_servers, 360, True),
    "speed": (check_speed, 480, True),
    "sleep": (check_sleep, 240, True),
    **{name: (partial(check_run, name=name), 240, True) for name in RUNS},
}


@dataclass
class Config:
    """Check everything that can be tested only on an NVIDIA GPU."""

    size: Literal["small", "large"] = "large"
    """Size of the generated model. large: 1,066 M parameters, shaped like Qwen2; small: 1 M parameters."""
    model: str = ""
    """Folder of a real model to use instead of --size."""
    only: tuple[Literal[tuple(CHECKS)], ...] = ()
    """Checks to run, in this order. Default: all checks."""


# ---- the table of results


def work_on(name: str) -> None:
    """Run one check in this process: print its rows as lines of JSON, and an exception as one more row."""
    torch.manual_seed(0)
    with open(WORK / f"{name}.jsonl", "a") as file:
        try:
            for row in CHECKS[name][0](WORK):
                print(json.dumps(row), file=file, flush=True)
        except Exception as error:  # The table shows the error, and the next check continues.
            traceback.print_exc()
            print(json.dumps((name, False, error_text(error))), file=file)


def in_child(name: str, seconds: float) -> list:
    """Return the rows of a check that runs in a separate process.

    The process and its children are ended after `seconds`.
    """
    command = [sys.executable, __file__, "--worker", name]
    with started({name: command}, WORK, RAY_ADDRESS="local", HF_HUB_OFFLINE="1") as runs:
        failure = ""
        try:
            code = runs[name].wait(seconds)
            if code:
                failure = f"ended with exit code {code}"
        except subprocess.TimeoutExpired:
            failure = f"timed out after {seconds} s"
    rows, _ = read_lines(WORK / f"{name}.jsonl")
    if failure:
        rows.append((name, False, f"{failure}; see {WORK / name}.log"))
    return rows


def main() -> None:
    if sys.argv[1:2] == ["--worker"]:  # this script as a child process
        return work_on(sys.argv[2])
    config, begun = tyro.cli(Config, description=__doc__), time.perf_counter()
    if not torch.cuda.is_available():
        print("no NVIDIA GPU was found, so there is nothing to check")
        raise SystemExit(2)
    if config.model and not Path(config.model, "config.json").is_file():
        raise SystemExit(
            f"error: --model {config.model}: contains no config.json; pass a folder in Hugging Face format"
        )
    shutil.rmtree(WORK, ignore_errors=True)
    WORK.mkdir(parents=True)
    (WORK / "config.json").write_text(json.dumps(asdict(config)))
    print("| check | result | tested property | measurement |\n| --- | --- | --- | --- |", flush=True)
    results = []
    has_vllm = True
    for name in dict.fromkeys(("environment", "models", *(config.only or CHECKS))):
        _, seconds, needs_vllm = CHECKS[name]
        rows = [(name, None, "needs vllm")]
        if has_vllm or not needs_vllm:
            rows = in_child(name, seconds)
        for what, holds, figure in rows:
            results.append({True: "passed", False: "failed", None: "skipped"}[holds])
            print(f"| {name} | {results[-1]} | {what} | {figure.replace('|', '/')} |", flush=True)
            if what == "vllm":
                has_vllm = holds
    if not (WORK / "model").is_symlink():
        for weights in WORK.glob("model/*.safetensors"):
            weights.unlink()
    counts = ", ".join(f"{results.count(result)} {result}" for result in ("passed", "failed", "skipped"))
    print(f"\n{counts}, in {time.perf_counter() - begun:.0f} s; logs in {WORK}")
    raise SystemExit("failed" in results)


if __name__ == "__main__":
    main()
