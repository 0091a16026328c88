"""Compare grpo_trainer.py with TRL's GRPOTrainer: speed and loss.

    python benchmarks/bench_trainer.py                  # a Llama of 1 M parameters, about 2 minutes
    python benchmarks/bench_trainer.py --model FOLDER   # also your own model, such as SmolLM2-135M

TRL is included if this Python can import it: pip install "trl==1.16.*" next to the project's packages.

Speed: both sides generate, score and make one AdamW update with the same settings: float32 on CPU,
temperature 1, token-mean loss clipped to 0.8..1.28, no KL term. TRL runs both with gradient checkpointing
(its default) and without it. No token ends a completion, so all completions have full length. The sides take
turns in separate processes with the same number of threads. The table shows medians over all steps. The
median of each round shows how much the machine's speed drifts. Generation includes decoding, and the update
includes scoring.

Same loss: the script records the samples, rewards, loss and gradient norm of TRL's first step, in which one
token in sixteen ends completions. Our compute_advantages and Policy.update get the same samples and weights.
The exit code is 1 if the loss or the norm differs by more than 0.1 %.

Not covered: GPUs, vLLM, ranks, reference models, and several updates per step. Both sides call the reward
function in their process, while in training grpo_trainer.py sends samples to Ray workers (see
bench_reward_loop.py).
"""

import importlib.util
import json
import re
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from statistics import median

import torch
import tyro
from measuring import groups_of, machine, run_worker
from gpu_models import toy_problems, toy_tokenizer
from transformers import AutoTokenizer, TrainerCallback
from transformers.utils import logging as transformers_logging

from algorithm import compute_advantages
from command_line import one_line_errors
from policy import Policy, Sample
from rollout import rollout_hf
from settings import PolicyOptions
from toy import warm_start
from toy.report import table

GROUP = 8
PARTS = ("generation", "update", "step")  # in seconds
NEVER = 1 << 30  # an end token that no model can sample
# TRL adds 1e-4 to the standard deviation and we add 1e-6, which is small compared with the spread of scores.
TOLERANCE = 1e-3


@dataclass
class Config:
    """Measure the speed of grpo_trainer.py, and compare it with TRL's."""

    model: str = ""
    """Folder of a second model to measure, with 16 completions (2 prompts x 8) of 32 tokens per step."""
    rounds: int = 2
    """Number of rounds, each in a new process per side."""


# ---- one side in a separate process


def score(text: str) -> float:
    """Return the percentage of vowels, which is cheap to compute and differs within every group."""
    return 100 * len(re.findall("[aeiou]", text)) / max(len(text), 1)


def our_policy(model: str, num_prompts: int) -> Policy:
    options = PolicyOptions(model=model, mini_batch_size=num_prompts)
    return Policy(options, model, torch.device("cpu"))


def with_advantages(samples: list[Sample], rewards: list[float]) -> list[list[Sample]]:
    """Set the advantages of the samples, and return them in groups."""
    advantages_P_G = compute_advantages(torch.tensor(rewards).view(-1, GROUP))
    for sample, advantage in zip(samples, advantages_P_G.flatten().tolist()):
        sample.advantage = advantage
    return groups_of(samples, GROUP)


def run_ours(model, prompts, length, steps, **_) -> dict:
    tokenizer = AutoTokenizer.from_pretrained(model)
    policy = our_policy(model, len(prompts))
    ids_of_prompts = tokenizer.apply_chat_template(prompts, add_generation_prompt=True, return_dict=False)
    timed = []
    for step in range(1 + steps):
        samples = [Sample({}, ids) for ids in ids_of_prompts for _ in range(GROUP)]
        begun = time.perf_counter()
        rollout_hf(
            policy.model,
            samples,
            max_response_length=length,
            temperature=1.0,
            eos_ids={NEVER},
            seed=step,
            rollout_batch_size=512,
        )
        responses = [sample.response_ids for sample in samples]
        texts = tokenizer.batch_decode(responses, skip_special_tokens=True)
        generated = time.perf_counter()
        rewards = list(map(score, texts))
        policy.update(with_advantages(samples, rewards), lr=1e-6)
        end = time.perf_counter()
        times = {"generation": generated - begun, "update": end - generated, "step": end - begun}
        timed.append(times | {"tokens": sum(map(len, responses))})
    return {"steps": timed[1:]}  # The first step is a warm-up.


def run_trl(**job) -> dict:
    """Return the timed steps, and the samples and figures of the first step, which is not timed."""
    from trl import GRPOTrainer

    from trl_side import new_trainer, set_end_tokens

    first, steps, now = {}, [], {}

    class Watched(GRPOTrainer):
        def _generate(self, *arguments):
            begun = time.perf_counter()
            result = super()._generate(*arguments)
            now.update(generation=time.perf_counter() - begun, tokens=sum(map(len, result[1])))
            first.setdefault("tokens", result[:2])
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
            if state.global_step == 1:
                set_end_tokens(trainer, [NEVER])
            else:
                seconds = time.perf_counter() - now["begun"]
                steps.append(now | {"step": seconds, "update": seconds - now["generation"]})
            now["begun"] = time.perf_counter()

    def reward(completions, **_):
        rewards = [score(completion[0]["content"]) for completion in completions]
        first.setdefault("rewards", rewards)
        return rewards

    job |= {"samples": GROUP * len(job["prompts"]), "group": GROUP, "lr": 1e-6, "warmup": 1, "seed": 42}
    job["steps"] += 1  # The first step is not timed.
    rows = {"prompt": job["prompts"] * job["steps"]}
    trainer = new_trainer(job, reward, rows, Clock(), Watched)
    # At a ratio of 1, the loss is about -mean(advantage x length), which is 0 if all lengths are equal. In
    # the first step, every sixteenth token of the vocabulary therefore ends a completion.
    set_end_tokens(trainer, list(range(0, len(trainer.processing_class), 16)))
    trainer.train()
    return {"steps": steps, "first": first}


def run_check(model: str, first: dict) -> dict:
    """Return our loss and gradient norm on the samples of TRL's first step."""
    samples = []
    for prompt, response in zip(*first["tokens"]):
        # Only a metric needs the sampler's log-probabilities.
        samples.append(Sample({}, prompt, response, [0.0] * len(response)))
    policy = our_policy(model, len(samples) // GROUP)
    metrics = policy.update(with_advantages(samples, first["rewards"]), lr=1e-6)
    return {"loss": metrics["actor/loss"], "gradient norm": metrics["actor/grad_norm"]}


def work(job: dict) -> None:
    torch.manual_seed(0)
    run = {"ours": run_ours, "trl": run_trl}[job["kind"]]
    Path(job["folder"], "result.json").write_text(json.dumps(run(**job)))


def in_child(job: dict) -> dict:
    """Run `work` in a separate process. Raises ChildProcessError if it fails."""
    with tempfile.TemporaryDirectory() as folder:
        run_worker(__file__, job["kind"], job | {"folder": folder}, Path(folder))
        return json.loads(Path(folder, "result.json").read_text())


# ---- tables


def compare(title: str, job: dict, num_rounds: int, with_trl: bool) -> bool:
    """Print a model's table and the check of the loss. Returns False if the check fails."""
    sides = {"grpo_trainer.py": {"kind": "ours"}}
    if with_trl:
        sides["TRL"] = {"kind": "trl", "checkpointing": True}
        sides["TRL, no checkpointing"] = {"kind": "trl", "checkpointing": False}
    rounds = {name: [] for name in sides}
    first = None
    for _ in range(num_rounds):
        for name, about in sides.items():
            found = in_child(job | about)
            rounds[name].append(found["steps"])
            first = first or found.get("first")
    print(
        f"\n{title}: {len(job['prompts'])} prompts x {GROUP}, {job['length']} tokens each, "
        f"{num_rounds} rounds of {job['steps']} steps, {torch.get_num_threads()} threads\n"
    )
    rows = []
    ours = 0.0  # our median seconds per step
    for name, of_side in rounds.items():
        steps = sum(of_side, [])
        medians = {part: median(step[part] for step in steps) for part in PARTS}
        ours = ours or medians["step"]
        each = ", ".join(f"{median(step['step'] for step in some):.3f}" for some in of_side)
        rate = median(step["tokens"] / step["step"] for step in steps)
        cells = [*(f"{value:.3f}" for value in medians.values()), each, f"{rate:,.0f}"]
        rows.append([name, *cells, f"{medians['step'] / ours:.2f}"])
    heads = ["seconds", *PARTS, "step in each round", "tokens/s", "step / ours"]
    print(table(heads, *rows), flush=True)
    return not with_trl or check_loss(title, job["model"], first)


def check_loss(title: str, model: str, first: dict) -> bool:
    ours = run_check(model, first)
    lengths = [len(response) for response in first["tokens"][1]]
    span = f"{min(lengths)} to {max(lengths)}"
    print(f"\nLoss on the same {len(lengths)} samples of {span} tokens with the same weights:\n")
    apart = {name: abs(value - first[name]) / max(abs(first[name]), 1e-12) for name, value in ours.items()}
    rows = [[name, f"{ours[name]:.7f}", f"{first[name]:.7f}", f"{apart[name]:.1e}"] for name in ours]
    print(table(["", "grpo_trainer.py", "TRL", "relative difference"], *rows), flush=True)
    same = max(apart.values()) <= TOLERANCE
    if not same:
        print(f"error: {title}: a relative difference exceeds {TOLERANCE:g}", file=sys.stderr)
    return same


def compare_models(config: Config) -> bool:
    """Compare the trainers on each model. Returns False if a check of the loss fails."""
    with_trl = importlib.util.find_spec("trl") is not None
    prompts = [[{"role": "user", "content": str(problem)}] for problem in toy_problems(8)]
    with tempfile.TemporaryDirectory(prefix="tiny_") as folder:
        tokenizer = toy_tokenizer()
        tokenizer.save_pretrained(folder)
        warm_start.new_model(len(tokenizer), seed=0).save_pretrained(folder)
        jobs = {"A Llama of 1 M parameters": dict(model=folder, prompts=prompts, length=64, steps=10)}
        if config.model:
            other = dict(model=config.model, prompts=prompts[:2], length=32, steps=2)
            jobs[Path(config.model).name] = other
        same = [compare(title, job, config.rounds, with_trl) for title, job in jobs.items()]
    if not with_trl:
        print('\nTRL is not installed in this environment; to compare with it, run pip install "trl==1.16.*"')
    return all(same)


def main() -> None:
    transformers_logging.disable_progress_bar()
    if sys.argv[1:2] == ["--worker"]:  # this script as a child process
        return work(json.loads(sys.argv[2]))
    config = tyro.cli(Config)
    print(machine())
    with one_line_errors():
        if not compare_models(config):
            raise SystemExit(1)


if __name__ == "__main__":
    main()
