"""Compare grpo_trainer.py with TRL's GRPOTrainer: speed, loss, and the memory of an update.

    python benchmarks/bench_trainer.py                  # a Llama of 1 M parameters, about 2 minutes
    python benchmarks/bench_trainer.py --model FOLDER   # also your own model, such as SmolLM2-135M
    python benchmarks/bench_trainer.py --long           # also 300 + 1,000 tokens per sample, tiny model
    python benchmarks/bench_trainer.py --memory         # only the peak memory of one update of 8,192 tokens
    python benchmarks/bench_trainer.py --ranks 1 2 4    # only updates on 1, 2 and 4 ranks (or with --model)

TRL is included if this Python can import it: pip install "trl==1.16.*" next to the project's packages.

Speed: both sides generate, score and make one AdamW update with the same settings: float32 on CPU,
temperature 1, token-mean loss clipped to 0.8..1.28, no KL term. TRL runs both with gradient checkpointing
(its default) and without it. No token ends a completion, so all completions have full length. The sides take
turns in separate processes with the same number of threads. The table shows medians over all steps. The
median of each round shows how much the machine's speed drifts; the best step is affected least. Generation
includes decoding.

Same loss: the script records the samples, rewards, loss and gradient norm of TRL's first step, in which one
token in sixteen ends completions. Our compute_advantages and Policy.update get the same samples and weights.
The exit code is 1 if the loss or the norm differs by more than 0.1 %.

Ranks: one process with all threads and ranks with one thread each (gloo, on this machine) update on the same
samples in turn. The table shows the memory that each process needs between updates, the additional peak
during an update, and the times of the update and of the weight sync.

Memory: the memory that an update needs in addition to weights, gradients and Adam's moments, compared with an
implementation that holds all logits at the same time.

Not covered: GPUs, vLLM, reference models, and several updates per step. Both sides call the reward function
in their process, while in training grpo_trainer.py sends samples to Ray workers (see bench_reward_loop.py).
"""

import contextlib
import importlib.util
import json
import os
import random
import re
import statistics
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

import ray
import torch
import tyro
from torch.distributed.tensor import DTensor
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig, LlamaForCausalLM
from transformers.utils import logging as transformers_logging

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))
import reward_loop
from toy import toy_world, warm_start
from algorithm import compute_advantages, compute_policy_loss
from grpo_trainer import Config as TrainerConfig
from policy import Policy, Sample
from cluster.policy_group import PolicyGroup
from rollout import WeightFolder, rollout_hf
from cluster.weights import packs

GROUP = 8
PARTS = ("generation", "scoring", "update", "step", "cpu")  # parts of a step, in seconds
NEVER = 1 << 30  # an end token that no model can sample
# TRL adds 1e-4 to the standard deviation and we add 1e-6, which is small compared with the spread of scores.
TOLERANCE = 1e-3


@dataclass
class Config:
    """Measure the speed and memory of grpo_trainer.py."""

    model: str = ""
    """Folder of a second model to measure, with 16 completions (2 prompts x 8) of 32 tokens per step."""
    tiny_steps: int = 10
    """Timed steps per round for the tiny model, with 64 completions (8 prompts x 8) of 64 tokens per step."""
    model_steps: int = 2
    """Timed steps per round for --model."""
    long: bool = False
    """Also measure the tiny model on long texts: 2 prompts of 300 tokens x 8 completions of 1,000 tokens."""
    rounds: int = 2
    """Number of rounds, each in a new process per side."""
    num_threads: int = 0
    """Number of CPU threads per side; 0: torch's default."""
    memory: bool = False
    """Measure memory instead of speed."""
    ranks: tuple[int, ...] = ()
    """Numbers of ranks on which to measure updates instead."""


# ---- one side in a separate process


def score(text: str) -> float:
    """Return the percentage of vowels, which is cheap to compute and differs within every group."""
    return 100 * len(re.findall("[aeiou]", text)) / max(len(text), 1)


def load(job: dict):
    tokenizer = AutoTokenizer.from_pretrained(job["model"])
    return tokenizer, [[{"role": "user", "content": prompt}] for prompt in job["prompts"]]


def token_ids(tokenizer, messages) -> list[list[int]]:
    options = dict(add_generation_prompt=True, return_dict=False)
    return [tokenizer.apply_chat_template(one, **options) for one in messages]


def our_policy(model: str, num_prompts: int, ranks: int = 1) -> Policy | PolicyGroup:
    config = TrainerConfig(
        model=model,
        train_file="",
        out_dir="",
        group_size=GROUP,
        mini_batch_size=num_prompts,
        device="cpu",
        max_tokens_per_micro_batch=2048,
        policy_ranks=ranks,
    )
    if ranks > 1:
        return PolicyGroup(config, model)
    return Policy(config, model, torch.device("cpu"))


def hand_over(policy, folder) -> None:
    """Write all weights to a directory, as a weight sync for servers does."""
    if isinstance(policy, PolicyGroup):
        policy.send_weights({"here": folder}, torch.float32)
    else:
        for number, pack in enumerate(packs(policy.weights(torch.float32))):
            folder.write(number, pack)


def groups_of(samples: list[Sample]) -> list[list[Sample]]:
    return [samples[start : start + GROUP] for start in range(0, len(samples), GROUP)]


def with_advantages(samples: list[Sample], rewards: list[float]) -> list[list[Sample]]:
    advantages_P_G = compute_advantages(torch.tensor(rewards).view(-1, GROUP))
    for sample, advantage in zip(samples, advantages_P_G.flatten().tolist()):
        sample.advantage = advantage
    return groups_of(samples)


def run_ours(job: dict) -> list[dict]:
    tokenizer, messages = load(job)
    policy = our_policy(job["model"], len(messages))
    prompts = token_ids(tokenizer, messages)
    steps = []

    def finished(sample):
        sample.text = tokenizer.decode(sample.response_ids, skip_special_tokens=True)

    for step in range(1 + job["steps"]):
        samples = [Sample({}, prompt) for prompt in prompts for _ in range(GROUP)]
        begun, cpu_begun = time.perf_counter(), time.process_time()
        rollout_hf(
            policy.model,
            samples,
            max_response_length=job["length"],
            temperature=1.0,
            eos_ids={NEVER},
            seed=step,
            rollout_batch_size=512,
            on_finished=finished,
        )
        generated = time.perf_counter()
        rewards = [score(sample.text) for sample in samples]
        scored = time.perf_counter()
        policy.update(with_advantages(samples, rewards), lr=1e-6)
        end = time.perf_counter()
        tokens = sum(len(sample.response_ids) for sample in samples)
        steps.append(
            {
                "generation": generated - begun,
                "scoring": scored - generated,
                "update": end - scored,
                "step": end - begun,
                "cpu": time.process_time() - cpu_begun,
                "tokens": tokens,
            }
        )
    return steps[1:]  # The first step is a warm-up.


def run_trl(job: dict) -> dict:
    """Return the timed steps, and the samples and figures of the first step, which is not timed."""
    from datasets import Dataset
    from transformers import TrainerCallback
    from trl import GRPOConfig, GRPOTrainer

    tokenizer, messages = load(job)
    model = AutoModelForCausalLM.from_pretrained(job["model"], dtype=torch.float32)
    # At a ratio of 1, the loss is about -mean(advantage x length), which is 0 if all lengths are equal. In
    # the first step, every sixteenth token of the vocabulary therefore ends a completion.
    model.generation_config.eos_token_id = list(range(0, len(tokenizer), 16))
    first, steps, now = {}, [], {}

    class Watched(GRPOTrainer):
        def _generate(self, *arguments):
            begun = time.perf_counter()
            result = super()._generate(*arguments)
            now.update(generation=time.perf_counter() - begun, tokens=sum(map(len, result[1])))
            first.setdefault("prompts", result[0])
            first.setdefault("responses", result[1])
            return result

        def _calculate_rewards(self, *arguments):
            begun = time.perf_counter()
            result = super()._calculate_rewards(*arguments)
            now["scoring"] = time.perf_counter() - begun
            first.setdefault("rewards", result[:, 0].tolist())
            return result

        def _compute_loss(self, *arguments):
            loss = super()._compute_loss(*arguments)
            first.setdefault("loss", loss.item())
            return loss

        def _clip_grad_norm(self, model):
            norm = super()._clip_grad_norm(model)
            first.setdefault("gradient norm", float(norm))
            return norm

    class Clock(TrainerCallback):
        def on_step_end(self, args, state, control, **_):
            if state.global_step > 1:
                now.update(
                    step=time.perf_counter() - now["begun"], cpu=time.process_time() - now["cpu_begun"]
                )
                steps.append({"update": now["step"] - now["generation"] - now["scoring"]} | now)
            else:
                trainer.generation_config.eos_token_id = trainer.generation_kwargs["eos_token_id"] = [NEVER]
                trainer.eos_token_ids = [NEVER]
            now.update(begun=time.perf_counter(), cpu_begun=time.process_time())

    def reward(completions, **_):
        return [score(completion[0]["content"]) for completion in completions]

    args = GRPOConfig(
        output_dir=job["folder"],
        use_cpu=True,
        bf16=False,
        gradient_checkpointing=job["checkpointing"],
        max_steps=1 + job["steps"],
        per_device_train_batch_size=len(messages) * GROUP,
        num_generations=GROUP,
        max_completion_length=job["length"],
        temperature=1.0,
        loss_type="dapo",
        scale_rewards="group",
        epsilon=0.2,
        epsilon_high=0.28,
        beta=0.0,
        learning_rate=1e-6,
        weight_decay=0.1,
        max_grad_norm=1.0,
        lr_scheduler_type="constant",
        shuffle_dataset=False,
        report_to="none",
        save_strategy="no",
        logging_strategy="no",
        disable_tqdm=True,
    )
    rows = Dataset.from_dict({"prompt": messages * (1 + job["steps"])})
    trainer = Watched(model, reward, args, rows, processing_class=tokenizer, callbacks=[Clock()])
    trainer.train()
    return {"steps": steps, "first": first}


def run_check(job: dict) -> dict:
    """Return our loss and gradient norm on the samples of TRL's first step."""
    first = job["first"]
    # Only a metric needs the sampler's log-probabilities.
    samples = []
    for prompt, response in zip(first["prompts"], first["responses"]):
        samples.append(Sample({}, prompt, response, [0.0] * len(response)))
    policy = our_policy(job["model"], len(samples) // GROUP)
    metrics = policy.update(with_advantages(samples, first["rewards"]), lr=1e-6)
    return {"loss": metrics["actor/loss"], "gradient norm": metrics["actor/grad_norm"]}


def megabytes(name: str, path: str = "/proc/self/status") -> float:
    return int(re.search(rf"{name}:\s+(\d+) kB", Path(path).read_text())[1]) / 1024


def run_memory(job: dict) -> dict:
    """Return the resident memory before an update and at its peak, in MB, and the update's seconds."""
    shape = LlamaConfig(
        vocab_size=151_936,
        hidden_size=256,
        intermediate_size=512,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=4,
        max_position_embeddings=16_384,
        tie_word_embeddings=True,
    )
    LlamaForCausalLM(shape).save_pretrained(job["folder"])
    policy = our_policy(job["folder"], 1)
    model = policy.model
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-6)
    prompt = list(range(16))

    def update(tokens):
        response = torch.randint(shape.vocab_size, (tokens,)).tolist()
        if not job["plain"]:  # One sample has an advantage; the others in its group are too short to matter.
            samples = [Sample({}, prompt, response, [0.0] * tokens, advantage=1.0)]
            policy.update([samples + [Sample({}, prompt, [1], [0.0]) for _ in range(GROUP - 1)]], lr=1e-6)
            return
        ids = torch.tensor([prompt + response])
        optimizer.zero_grad()
        logits = model(input_ids=ids[:, :-1], use_cache=False, logits_to_keep=tokens).logits
        logprobs = logits.log_softmax(-1).gather(-1, ids[:, len(prompt) :, None])[..., 0]
        mask = torch.ones_like(logprobs)
        compute_policy_loss(logprobs, logprobs.detach(), torch.ones(1), mask, tokens)[0].backward()
        optimizer.step()

    update(64)  # This update allocates gradients and moments.
    before = megabytes("VmRSS")
    Path("/proc/self/clear_refs").write_text("5")  # resets the peak, VmHWM
    begun = time.perf_counter()
    update(job["tokens"])
    return {"before": before, "above": megabytes("VmHWM") - before, "seconds": time.perf_counter() - begun}


def work(path: str) -> None:
    job = json.loads(Path(path).read_text())
    torch.manual_seed(0)
    torch.set_num_threads(job["threads"])
    run = {"ours": run_ours, "trl": run_trl, "check": run_check, "memory": run_memory}[job["kind"]]
    Path(path).write_text(json.dumps(run(job)))


def in_child(job: dict):
    """Run `work` in a separate process, and stop it before the machine is out of memory.

    Raises RuntimeError if it fails.
    """
    with tempfile.TemporaryDirectory() as folder:
        path, log = Path(folder, "job.json"), Path(folder, "log")
        path.write_text(json.dumps(job | {"folder": folder}))
        with open(log, "w") as output:
            child = subprocess.Popen(
                [sys.executable, __file__, "--worker", str(path)],
                stdout=output,
                stderr=output,
                env=os.environ | {"HF_HUB_OFFLINE": "1"},
            )
            try:
                while child.poll() is None:
                    if megabytes("MemAvailable", "/proc/meminfo") < 1000:
                        raise RuntimeError(f"{job['kind']}: stopped, because less than 1 GB of RAM was left")
                    time.sleep(0.1)
            finally:
                child.kill()
                child.wait()
        if child.returncode:
            raise RuntimeError(f"{job['kind']}: exit code {child.returncode}\n{log.read_text()[-3000:]}")
        return json.loads(path.read_text())


# ---- tables


def compare(title: str, job: dict, config: Config, with_trl: bool) -> bool:
    """Print a model's table and the check of the loss. Returns False if the check fails."""
    theirs = {}  # name -> gradient checkpointing
    if with_trl:
        theirs = {"TRL": True, "TRL, no checkpointing": False}
    rounds = {"grpo_trainer.py": []}
    first = None
    for _ in range(config.rounds):
        rounds["grpo_trainer.py"].append(in_child(job | {"kind": "ours"}))
        for name, checkpointing in theirs.items():
            found = in_child(job | {"kind": "trl", "checkpointing": checkpointing})
            rounds.setdefault(name, []).append(found["steps"])
            first = first or found["first"]
    print(
        f"\n{title}: {len(job['prompts'])} prompts x {GROUP}, {job['length']} tokens each, "
        f"{config.rounds} rounds of {job['steps']} steps, {job['threads']} threads\n"
    )
    print(
        "| | generation s | scoring s | update s | step s (median of each round) | best step s | CPU s | "
        "tokens/s |"
    )
    print("| --- " + "| ---: " * 7 + "|")
    table = []
    for name, of_side in rounds.items():
        steps = sum(of_side, [])
        values = [statistics.median(step[key] for step in steps) for key in PARTS]
        generation, scoring, update, whole, cpu = values
        best = min(step["step"] for step in steps)
        rate = statistics.median(step["tokens"] / step["step"] for step in steps)
        each = ", ".join(f"{statistics.median(step['step'] for step in steps):.3f}" for steps in of_side)
        print(
            f"| {name} | {generation:.3f} | {scoring:.4f} | {update:.3f} | {whole:.3f} ({each}) | "
            f"{best:.3f} | {cpu:.3f} | {rate:,.0f} |"
        )
        table.append([generation, scoring, update, whole, best, cpu, 1 / rate])
    if not with_trl:
        return True
    for name, row in zip(list(rounds)[1:], table[1:]):
        ratios = "".join(f" {their / our:.2f} |" for our, their in zip(table[0], row))
        print(f"| times as fast as {name} |{ratios}", flush=True)

    ours = in_child(job | {"kind": "check", "first": first})
    lengths = [len(response) for response in first["responses"]]
    span = f"{min(lengths)} to {max(lengths)}"
    print(f"\nLoss on the same {len(lengths)} samples of {span} tokens with the same weights:\n")
    print("| | grpo_trainer.py | TRL | relative difference |\n| --- | ---: | ---: | ---: |")
    differences = []
    for name, value in ours.items():
        differences.append(abs(value - first[name]) / max(abs(first[name]), 1e-12))
        print(f"| {name} | {value:.7f} | {first[name]:.7f} | {differences[-1]:.1e} |", flush=True)
    same = all(difference <= TOLERANCE for difference in differences)
    if not same:
        print(f"error: {title}: a relative difference exceeds {TOLERANCE:g}", file=sys.stderr)
    return same


@contextlib.contextmanager
def tiny_model():
    """Return the directory of a Llama of 1 M parameters, and eight prompts for it."""
    rng = random.Random(0)
    problems = [str(toy_world.random_problem(rng, toy_world.REMAINDER)) for _ in range(8)]
    with tempfile.TemporaryDirectory(prefix="tiny_") as folder:
        tokenizer = warm_start.build_tokenizer(warm_start.tokenizer_corpus(rng))
        tokenizer.save_pretrained(folder)
        warm_start.new_model(len(tokenizer), seed=0).save_pretrained(folder)
        yield folder, problems


def compare_speed(config: Config, threads: int) -> bool:
    with_trl = importlib.util.find_spec("trl") is not None
    with tiny_model() as (folder, problems):
        tiny = {
            "model": folder,
            "prompts": problems,
            "length": 64,
            "steps": config.tiny_steps,
            "threads": threads,
        }
        same = compare("A Llama of 1 M parameters", tiny, config, with_trl)
        if config.long:
            prompts = [" ".join(problems * 99)[:n] for n in (900, 880)]  # about 300 tokens
            long = tiny | {"prompts": prompts, "length": 1000, "steps": 1}
            same = compare("The same with long texts", long, config, with_trl) and same
    if config.model:
        other = {
            "model": config.model,
            "prompts": problems[:2],
            "length": 32,
            "steps": config.model_steps,
            "threads": threads,
        }
        same = compare(Path(config.model).name, other, config, with_trl) and same
    if not with_trl:
        print('\nTRL is not installed in this environment; to compare with it, run pip install "trl==1.16.*"')
    return same


def compare_memory(threads: int) -> None:
    print(
        "Peak memory of one update of one sequence, in addition to weights, gradients and moments; "
        "vocabulary 151,936, hidden size 256, float32\n"
    )
    print("| | response tokens | additional MB | MB before | seconds |\n| --- | ---: | ---: | ---: | ---: |")
    for name, plain in (("Policy.update", False), ("all logits at once", True)):
        tokens = 8192
        free = megabytes("MemAvailable", "/proc/meminfo") - 2000
        needed = tokens * 151_936 * 4 * 3.3 / 2**20  # three copies of the logits, and some room
        if plain and needed > free:
            tokens = int(tokens * free / needed)
            name += " (fewer tokens, to fit into memory)"
        found = in_child({"kind": "memory", "plain": plain, "tokens": tokens, "threads": threads})
        print(
            f"| {name} | {tokens:,} | {found['above']:,.0f} | {found['before']:,.0f} | "
            f"{found['seconds']:.1f} |",
            flush=True,
        )


def bytes_held(policy) -> list[int]:
    """Return the bytes of parameters, gradients and moments in this process."""
    parameters, gradients, moments = [], [], []
    for parameter in policy.model.parameters():
        parameters.append(parameter)
        if parameter.grad is not None:
            gradients.append(parameter.grad)
        for key, value in policy.optimizer.state[parameter].items():
            if key != "step":
                moments.append(value)
    return [sum(map(bytes_here, tensors)) for tensors in (parameters, gradients, moments)]


def bytes_here(tensor) -> int:
    if isinstance(tensor, DTensor):
        tensor = tensor.to_local()
    return tensor.nbytes


def timed(function) -> float:
    begun = time.perf_counter()
    function()
    return time.perf_counter() - begun


def forget_peak(policy) -> float:
    Path("/proc/self/clear_refs").write_text("5")
    return megabytes("VmRSS")


def compare_ranks(model: str, prompts: list[str], steps: int, config: Config, threads: int) -> None:
    """Print a table of updates on the same samples with one process and with each number of ranks."""
    tokenizer, messages = load({"model": model, "prompts": prompts})
    samples = [Sample({}, prompt) for prompt in token_ids(tokenizer, messages) for _ in range(GROUP)]
    torch.set_num_threads(threads)
    alone = our_policy(model, len(prompts))
    rollout_hf(
        alone.model,
        samples,
        max_response_length=64,
        temperature=1.0,
        eos_ids={NEVER},
        seed=0,
        rollout_batch_size=512,
    )
    groups = with_advantages(samples, [score(tokenizer.decode(sample.response_ids)) for sample in samples])
    title = f"{Path(model).name}: {len(prompts)} prompts x {GROUP}, 64 tokens each"
    print(f"\n{title}, medians of {steps} updates\n")
    print(
        "| ranks | threads per rank | MB of parameters, gradients, moments per rank | additional peak MB | "
        "update s | x one process | weight sync s | MB |"
    )
    print("| ---: " * 8 + "|")
    sent = alone.model_info()["numel"] * 4 / 2**20
    for count in config.ranks:
        name = f"/dev/shm/bench_{os.getpid()}_{count}"
        if count == 1:
            threads_each = threads
            policy = alone
            target = WeightFolder(name, {})
            each = lambda function: [function(alone)]  # noqa: E731
        else:
            threads_each = 1
            policy = our_policy(model, len(prompts), count)
            target = ray.remote(num_cpus=0)(WeightFolder).remote(name, {})
            each = lambda f: ray.get([actor.__ray_call__.remote(f) for actor in policy.actors])  # noqa: E731
        policy.update(groups, lr=1e-6)  # This update allocates gradients and moments.
        before = max(each(forget_peak))
        seconds, handed, ratios = [], [], []
        for _ in range(steps):  # The sides alternate, so that drift of the machine affects both.
            seconds.append(timed(lambda: policy.update(groups, lr=1e-6)))
            ratio = 1.0
            if count > 1:
                ratio = seconds[-1] / timed(lambda: alone.update(groups, lr=1e-6))
            ratios.append(ratio)
        peak = max(each(lambda policy: megabytes("VmHWM"))) - before
        for _ in range(3):
            handed.append(timed(lambda: hand_over(policy, target)))
        held = [max(sizes) / 2**20 for sizes in zip(*each(bytes_held))]
        print(
            f"| {count} | {threads_each} | {', '.join(f'{size:.1f}' for size in held)} | {peak:.0f} | "
            f"{statistics.median(seconds):.3f} | {statistics.median(ratios):.2f} "
            f"({min(ratios):.2f}-{max(ratios):.2f}) | {statistics.median(handed):.3f} | {sent:.1f} |",
            flush=True,
        )
        if count == 1:
            target.close()
        else:
            policy.shutdown()
            ray.get(target.close.remote())
            ray.kill(target)


def main() -> None:
    if sys.argv[1:2] == ["--worker"]:  # this script as a child process
        transformers_logging.disable_progress_bar()
        work(sys.argv[2])
        return
    from bench_router import machine

    config = tyro.cli(Config)
    transformers_logging.disable_progress_bar()
    threads = config.num_threads or torch.get_num_threads()
    print(machine())
    try:
        if config.memory:
            compare_memory(threads)
        elif config.ranks:
            reward_loop.connect_ray()
            with tiny_model() as (folder, problems):
                compare_ranks(folder, problems, config.tiny_steps, config, threads)
                if config.model:
                    compare_ranks(config.model, problems, config.model_steps, config, threads)
        elif not compare_speed(config, threads):
            raise SystemExit(1)
    except (ValueError, OSError, RuntimeError) as error:
        print(f"error: {error}", file=sys.stderr)
        raise SystemExit(2) from None


if __name__ == "__main__":
    main()
