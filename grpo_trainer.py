"""Trains a policy with GRPO on the rewards of the Reward Loop: rollouts -> rewards -> advantages -> policy update.

    python grpo_trainer.py --model data/toy/policy --train-file data/toy/toy_train.parquet --val-file data/toy/toy_test.parquet \\
        --reward-fn toy_world.py:compute_score_fapo_oracle --out-dir outputs/first --total-steps 20 --train-batch-size 16 \\
        --mini-batch-size 8 --max-response-length 64 --overlong-buffer 0 --lr 2e-4 --adam-betas 0.9 0.95 --num-threads 1

Read `Trainer.one_step` first: it is the algorithm, and the rest of the file is what it needs.

    Config     the whole command line; the defaults are the paper's (FAPO-7B)
    Trainer    one_step, then its parts in the order in which a sample passes them, then the run as a whole
    checks     everything that is refused before the first step, and the estimate of memory

The formulas are in algorithm.py, the model and its update in policy.py, sampling in rollout.py, scoring in reward_loop.py, and
what a run writes in run_folder.py. No tensor is touched here.

What is left out: several GPUs for the policy's update, a critic model, prompts with images, turns and tools.

Four words for four things: score (the function's), penalty (length), reward (their sum), advantage (reward within its group).
"""

import contextlib
import importlib.util
import json
import math
import os
import random
import re
import shlex
import sys
import time
from collections import Counter
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Literal

import torch
import tyro
from tqdm import tqdm
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer
from transformers.utils import logging as transformers_logging

import genrm_server
import reward_loop
from algorithm import compute_advantages, compute_kl_loss, compute_policy_loss, overlong_penalty  # noqa: F401  (tools look here)
from policy import LOGITS_AT_ONCE, Policy, Sample
from rollout import PolicyServers, rollout_hf, rollout_vllm
from run_folder import Interrupts, Log, check_folder, check_room, checkpoints_in, save_checkpoint, write_config
from run_folder import mean, reward_metrics, validation_metrics


@dataclass
class Config:
    model: str
    """Folder of the policy (Hugging Face format), or a hub name such as Qwen/Qwen2.5-Math-7B."""
    train_file: str
    """File of training rows, parquet or JSONL (prepare_data.py writes them)."""
    out_dir: str
    """Folder of the run: config.json, metrics.jsonl, samples.jsonl, curves.png, checkpoints/."""
    val_file: tuple[str, ...] = ()
    """Files of validation rows; none: no evaluation."""

    # Rewards
    reward_fn: str = "compute_score.py:compute_score"
    """FILE:NAME of the reward function."""
    reward_kwargs: str = "{}"
    """JSON object of keyword arguments for the reward function, such as {"penalty": 1.0}."""
    baseline: bool = False
    """Take `compute_score_baseline` of the same FILE instead: the rule alone pays, the reward model only measures."""
    router_address: str | None = None
    """host:port of a reward model that runs already (genrm_server.py, or any OpenAI-compatible address)."""
    genrm: str | None = None
    """Folder or hub name of a generative reward model to start and stop with this run."""
    genrm_servers: int = 1
    """Number of vLLM servers for --genrm."""
    genrm_cpus: str = ""
    """On CPU: cores for the servers of --genrm, such as "1"; default: all, shared out evenly."""
    reward_mode: Literal["standalone", "colocate"] = "standalone"
    """standalone: score each sample the moment its rollout ends. colocate: first all rollouts, then all scores."""
    num_reward_workers: int = 2
    """Ray actors that call the reward function."""
    reward_timeout: float = 600.0
    """Seconds after which a sample's score is given up (status "timeout")."""
    max_no_verdict_rate: float = 0.5
    """The run stops when a larger share of a step's samples has no verdict: the judge is down, or the function is broken."""

    # Batch
    total_steps: int = 200
    """Training steps."""
    train_batch_size: int = 512
    """Prompts per step (P)."""
    group_size: int = 8
    """Samples per prompt (G)."""
    mini_batch_size: int = 32
    """Prompts per optimizer update."""
    max_prompt_length: int = 2048
    """Rows with longer prompts (tokens) are dropped and counted before the first step."""
    max_response_length: int = 8192
    """A rollout is cut after this many tokens."""
    dynamic_sampling: bool = False
    """Replace groups whose rewards are all equal, which teach nothing, by groups of further prompts (DAPO)."""
    max_refills: int = 10
    """Rounds of replacement per step at most; then the step makes do with what it has."""

    # Rollouts
    rollout: Literal["hf", "vllm"] = "hf"
    """hf: in this process, best for small models. vllm: on vLLM servers that get the new weights after each update."""
    rollout_servers: int = 1
    """Number of vLLM servers for --rollout vllm."""
    rollout_cpus: str = ""
    """On CPU: cores for those servers, such as "1"; default: all, shared out evenly."""
    rollout_gpus: str = ""
    """GPUs for those servers, such as 0,1,2; default: all that are visible."""
    rollout_vllm_args: str = ""
    """Arguments for those servers, in quotes, such as "--gpu-memory-utilization 0.5" where they share the trainer's GPU."""
    weight_sync: Literal["file", "nccl"] = "file"
    """How new weights reach those servers. file: through shared memory, everywhere. nccl: GPU to GPU, for large models."""
    rollout_batch_size: int = 512
    """Sequences generated at once."""
    temperature: float = 1.0
    """Sampling temperature of rollouts; the loss uses the same distribution. (The paper trains its GenRM at 1.2.)"""
    max_logprob_diff: float = 0.2
    """The run stops when sampler and trainer differ by more than this (rollout/logprob_diff): the sampler's weights are old."""

    # Algorithm
    lr: float = 1e-6
    """Learning rate of AdamW, constant after the warm-up."""
    adam_betas: tuple[float, float] = (0.9, 0.999)
    """AdamW's decay rates. A short run with a high learning rate is steadier with 0.9 0.95."""
    lr_warmup_steps: int = 10
    """Steps over which the learning rate rises linearly."""
    weight_decay: float = 0.1
    """AdamW's weight decay."""
    max_grad_norm: float = 1.0
    """Gradients are scaled down to this norm."""
    clip_low: float = 0.2
    """Lower clip range of the probability ratio."""
    clip_high: float = 0.28
    """Upper clip range of the probability ratio (clip-higher)."""
    clip_c: float = 10.0
    """Dual clip: bound on the ratio where the advantage is negative."""
    tis_cap: float | None = None
    """Cap of truncated importance sampling between rollout and trainer, such as 2.0; default: off."""
    kl_coef: float = 0.0
    """Weight of the KL divergence to --model as it was before training; 0: no second model is loaded."""
    entropy_coef: float = 0.0
    """Weight of an entropy bonus."""
    overlong_buffer: int = 4096
    """The last so many tokens of max_response_length cost a growing penalty; 0: no penalty."""
    overlong_factor: float = 1.0
    """Penalty of a response of full length."""

    # Evaluation
    val_every: int = 10
    """Steps between evaluations; there is one before and one after training too. 0: only those two."""
    val_n: int = 1
    """Samples per validation row (k of mean@k, maj@k, pass@k)."""
    val_temperature: float = 1.0
    """Sampling temperature in evaluation; 0: greedy."""
    val_top_p: float = 0.7
    """Nucleus of sampling in evaluation."""
    val_greedy: bool = False
    """Evaluate greedily as well, once per row (val/<data_source>/greedy)."""

    # Machine
    device: str = "auto"
    """auto, cpu, cuda or cuda:N, where the policy is trained. auto: the last GPU (Ray gives judges the first ones), else cpu."""
    num_threads: int = 0
    """CPU threads of torch; 0: torch's own choice. For models of a few million parameters 1 is fastest."""
    max_tokens_per_micro_batch: int = 16384
    """Token budget (with padding) of one forward and backward pass."""
    gradient_checkpointing: bool = False
    """Recompute activations in the backward pass: slower, much less memory."""
    seed: int = 0
    """Seed of data order and sampling."""

    # Files
    save_every: int = 0
    """Steps between checkpoints; 0: only the last step's, and where the run is stopped."""
    keep_checkpoints: int = 2
    """Older checkpoints are deleted; 0: keep all."""
    resume: Literal["never", "auto"] = "never"
    """auto: go on from the newest checkpoint in out_dir, if there is one."""
    samples_per_step: int = 8
    """Samples of each data source written to samples.jsonl, per step and per evaluation."""
    tensorboard: bool = False
    """Write the metrics for TensorBoard too (out_dir/tensorboard)."""
    wandb: bool = False
    """Send the metrics to Weights & Biases too (project "fapo"; WANDB_MODE=offline keeps them in out_dir/wandb)."""
    dry_run: bool = False
    """Check everything, print the whole configuration and an estimate of memory, and stop."""
    trust_remote_code: bool = False
    """Run code that comes with the model's folder."""


# ----------------------------------------------------------------------------------------------------------- training


class Trainer:
    """One run. The constructor checks and reads what is cheap, `run` starts the rest and is the loop over `one_step`.

    Everything random depends on the seed, the step and the number of prompts drawn so far, so that a run that was stopped, in
    whatever way, and goes on from a checkpoint is the same run (exactly so on CPU with --rollout hf).
    """

    def one_step(self, step: int) -> None:
        """One step of GRPO on FAPO's rewards."""
        config, started = self.config, time.perf_counter()
        samples, metrics, drawn = self.collect(step)  # draw prompts, roll out and score, drop groups that teach nothing
        self.set_advantages(samples)
        rewarded = time.perf_counter()
        with self.interrupts.held():
            lr = config.lr * min(1.0, step / max(config.lr_warmup_steps, 1))
            metrics |= self.policy.update(samples, lr)
            updated = time.perf_counter()
            self.check_sampler(step, metrics)
            if self.servers:
                self.servers.sync(self.policy)
                metrics["time/sync"] = time.perf_counter() - updated
            self.state |= {"step": step, "prompts_drawn": drawn}
            metrics |= {"actor/lr": lr, "time/update": updated - rewarded, "time/step": time.perf_counter() - started}
            metrics["perf/tokens_per_s"] = metrics["perf/tokens"] / metrics["time/step"]
            self.log.metrics(metrics)
            self.show(metrics)

    # ---- the parts of a step, in the order in which a sample passes them

    def collect(self, step: int) -> tuple[list[Sample], dict, int]:
        """The samples of a step, group after group; metrics; and the number of prompts drawn in the whole run by then.

        With dynamic sampling groups that teach nothing are replaced by groups of further prompts, in rounds.
        """
        config, drawn = self.config, self.state["prompts_drawn"]
        everything, kept, dropped, times = [], [], Counter(), Counter()
        for refill in range(1 + config.max_refills * config.dynamic_sampling):
            rows = draw(self.train_rows, drawn, config.train_batch_size - len(kept), config.seed)
            drawn += len(rows)
            seed = config.seed * 1_000_003 + step + (refill << 40)
            samples = [Sample(row, row["prompt_ids"]) for row in rows for _ in range(config.group_size)]
            times += self.roll_out_and_score(samples, config.temperature, 1.0, seed, f"rollout {step}")
            everything += samples
            self.check_verdicts(step, everything)
            self.log.samples(step, "train", samples)
            for group in groups_of(samples, config.group_size):
                reason = why_useless(group)
                dropped.update([reason] if reason else [])
                if not (reason and config.dynamic_sampling):
                    kept.append(group)
            if len(kept) == config.train_batch_size:
                break
        lengths, groups = [len(sample.response_ids) for sample in everything], len(everything) // config.group_size
        metrics = {"step": step} | reward_metrics(everything) | times | {
            "reward/groups_with_spread": 1 - dropped.total() / groups,
            "response_length/mean": mean(lengths),
            "response_length/max": max(lengths),
            "response_length/clipped": mean(sample.response_ids[-1] not in self.eos_ids for sample in everything),
            "perf/tokens": sum(lengths),
        }
        if config.dynamic_sampling:
            metrics |= {"dynamic/prompts": groups, "dynamic/refills": refill, "dynamic/kept": len(kept)}
            metrics |= {f"dynamic/dropped_{why}": dropped[why] for why in ("all_right", "all_wrong", "equal_rewards", "no_verdict")}
        return [sample for group in kept or [group] for sample in group], metrics, drawn

    def roll_out_and_score(self, samples: list[Sample], temperature: float, top_p: float, seed: int, title: str) -> Counter:
        """Fills in responses and results. In standalone mode a sample is on its way to its reward the moment it ends.

        Returns the seconds of the rollout and of waiting after it.
        """
        config, started, futures = self.config, time.perf_counter(), {}
        with tqdm(total=len(samples), desc=title, leave=False, disable=None) as progress:

            def finished(sample):
                sample.text = self.tokenizer.decode(sample.response_ids, skip_special_tokens=True)
                if config.reward_mode == "standalone":
                    futures[id(sample)] = self.rewards.submit(to_score(sample))
                progress.update()

            options = dict(max_response_length=config.max_response_length, temperature=temperature, top_p=top_p, eos_ids=self.eos_ids,
                           rollout_batch_size=config.rollout_batch_size, on_finished=finished)
            if self.servers:
                rollout_vllm(self.servers, samples, **options)
            else:
                generator = torch.Generator(self.device).manual_seed(seed)
                # A tenth faster than no_grad; but what a model's own code may keep of it (tables, say) could not be trained with.
                with torch.no_grad() if config.trust_remote_code else torch.inference_mode():
                    rollout_hf(self.policy.model, samples, generator=generator, **options)
        rolled_out = time.perf_counter()
        if config.reward_mode == "standalone":
            results = [futures[id(sample)].result() for sample in samples]
        else:
            results = self.rewards.score_batch([to_score(sample) for sample in samples])
        for sample, result in zip(samples, results):
            sample.result = result
        return Counter({"time/rollout": rolled_out - started, "time/reward_wait": time.perf_counter() - rolled_out})

    def check_verdicts(self, step: int, samples: list[Sample]) -> None:
        """Raises RuntimeError where too many samples have no verdict."""
        missing = [sample.result for sample in samples if sample.reward is None]
        if len(missing) > self.config.max_no_verdict_rate * len(samples):
            raise RuntimeError(
                f"step {step}: {len(missing) / len(samples):.0%} of the samples have no verdict (max_no_verdict_rate "
                f"{self.config.max_no_verdict_rate:.0%}); is the reward model up? First of them: status {missing[0]['status']!r}, "
                f"{missing[0]['reward_extra_info']}"
            )

    def set_advantages(self, samples: list[Sample]) -> None:
        """Each sample's advantage within its group; None without a verdict."""
        rewards = [math.nan if sample.reward is None else sample.reward for sample in samples]
        advantages_P_G = compute_advantages(torch.tensor(rewards).view(-1, self.config.group_size))
        for sample, advantage in zip(samples, advantages_P_G.flatten().tolist()):
            sample.advantage = None if sample.reward is None else advantage

    def check_sampler(self, step: int, metrics: dict) -> None:
        """Raises RuntimeError where the samples did not come from the policy's weights."""
        difference, limit = metrics["rollout/logprob_diff"], self.config.max_logprob_diff
        if not difference <= limit:  # a NaN is no agreement
            raise RuntimeError(
                f"step {step}: rollout/logprob_diff {difference:.3f} is over max_logprob_diff {limit}: the sampler does not use "
                "the trainer's weights, or not their precision"
            )

    def show(self, metrics: dict) -> None:
        """One line on the screen."""
        shown = ("reward/mean", "reward/acc", "reward/flawed_positive_rate", "genrm/error_rate", "response_length/mean",
                 "actor/entropy", "rollout/logprob_diff", "time/step")  # fmt: skip
        values = "  ".join(f"{key} {metrics[key]:.3g}" for key in shown if key in metrics)
        print(f"step {metrics['step']}/{self.config.total_steps}  {values}", flush=True)

    # ---- the run

    def __init__(self, config: Config):
        check(config)
        transformers_logging.disable_progress_bar()
        if config.num_threads:
            torch.set_num_threads(config.num_threads)
        self.config, self.device = config, choose_device(config.device)
        if config.weight_sync == "nccl" and self.device.type != "cuda":
            raise ValueError("weight_sync: nccl sends from GPU to GPU, and the policy is on the CPU; take file")
        done = checkpoints_in(Path(config.out_dir, "checkpoints"))  # only with --resume auto can there be any
        self.source = str(done[-1]) if done else config.model
        self.state = json.loads((done[-1] / "trainer_state.json").read_text()) if done else {"step": 0, "prompts_drawn": 0}
        self.saved = self.state["step"]
        self.tokenizer = AutoTokenizer.from_pretrained(self.source, trust_remote_code=config.trust_remote_code)
        if not self.tokenizer.chat_template:
            raise ValueError(f"model: the tokenizer of {self.source} has no chat template; take an instruct model or add one")
        self.train_rows = load_rows(config.train_file, self.tokenizer, config)
        self.val_rows = [row for path in config.val_file for row in load_rows(path, self.tokenizer, config)]
        shape = AutoConfig.from_pretrained(self.source, trust_remote_code=config.trust_remote_code).get_text_config()
        self.longest = max(len(row["prompt_ids"]) for row in self.train_rows + self.val_rows) + config.max_response_length
        if self.longest > (limit := getattr(shape, "max_position_embeddings", None) or math.inf):
            text = f"{config.max_response_length} and the longest prompt are {self.longest} tokens, the model takes {limit}"
            raise ValueError(f"max_response_length: {text}; lower it, or max_prompt_length")
        check_room(config, checkpoint=3 * estimate_memory(config)["weights"])

    def run(self) -> Path:
        """All steps. Returns the folder of the last checkpoint."""
        config, state = self.config, self.state
        if state["step"] >= config.total_steps:
            print(f"nothing to do: {self.source} is step {state['step']} of {config.total_steps}")
            return Path(self.source)
        write_config(config, resumed=state["step"] > 0)
        with contextlib.ExitStack() as stack:
            self.start(stack)
            try:
                if state["step"] == 0:
                    self.log.metrics({"step": 0} | self.evaluate(0))
                while state["step"] < config.total_steps:
                    step = state["step"] + 1
                    self.one_step(step)
                    last = step == config.total_steps
                    evaluates = last or config.val_every and step % config.val_every == 0
                    if evaluates:
                        self.log.metrics({"step": step} | self.evaluate(step))
                    if last or config.save_every and step % config.save_every == 0:
                        self.save()
                    if evaluates or step % 10 == 0:
                        self.log.plot()
            except (KeyboardInterrupt, RuntimeError):
                if state["step"] > self.saved:  # in the middle of an update the weights are no step's
                    self.save()
                print(f"stopped; --resume auto goes on after step {self.saved}", flush=True)
                raise
        return Path(config.out_dir, "checkpoints", f"step_{self.saved}")

    def start(self, stack: contextlib.ExitStack) -> None:
        """The model, the reward models and workers, the policy's servers, the log; `stack` ends them in the opposite order."""
        config = self.config
        self.policy, self.servers, models, overlong = Policy(config, self.source, self.device), None, None, None
        if self.state["step"]:
            self.policy.load_optimizer(Path(self.source))
        eos = self.policy.model.generation_config.eos_token_id
        self.eos_ids = {*(eos if isinstance(eos, list) else [eos]), self.tokenizer.eos_token_id} - {None}
        if not self.eos_ids:
            raise ValueError(f"model: neither the model nor the tokenizer of {self.source} has an end token; add eos_token")
        if config.genrm:
            sleeps = config.reward_mode == "colocate" and self.device.type == "cuda"  # the GPU is the trainer's meanwhile
            judge = genrm_server.Config(config.genrm, config.genrm_servers, port=0, cpus=config.genrm_cpus, sleep_mode=sleeps)
            models = genrm_server.RewardModelManager({"genrm": judge})
            stack.callback(models.shutdown)
        if config.overlong_buffer:
            overlong = reward_loop.Overlong(config.max_response_length, config.overlong_buffer, config.overlong_factor)
        self.rewards = reward_loop.RewardLoopManager(
            reward_fn=reward_function(config), reward_kwargs=json.loads(config.reward_kwargs), timeout=config.reward_timeout,
            reward_models=models, router_addresses={"genrm": config.router_address} if config.router_address else None,
            num_workers=config.num_reward_workers, overlong=overlong,
        )  # fmt: skip
        stack.callback(self.rewards.shutdown)
        if config.rollout == "vllm":
            servers = genrm_server.Config(
                model="", num_servers=config.rollout_servers, cpus=config.rollout_cpus, gpus=config.rollout_gpus,
                max_model_len=self.longest, seed=config.seed, policy="least_loaded", queue_timeout=900,
                log_dir=Path(config.out_dir, "rollout_logs"), vllm_args=tuple(shlex.split(config.rollout_vllm_args)),
            )  # fmt: skip
            self.servers = PolicyServers(self.policy, self.tokenizer, servers, config.weight_sync)
            stack.callback(self.servers.shutdown)
        self.log = Log(config, self.state["step"])
        stack.callback(self.log.close)
        self.interrupts = Interrupts()  # only now: Ray has put handlers of its own in place
        stack.callback(self.interrupts.restore)

    def evaluate(self, step: int) -> dict:
        config, metrics = self.config, {}
        if self.val_rows:
            for n, temperature, suffix in [(config.val_n, config.val_temperature, "")] + [(1, 0.0, "greedy")] * config.val_greedy:
                samples = [Sample(row, row["prompt_ids"]) for row in self.val_rows for _ in range(n)]
                self.roll_out_and_score(samples, temperature, config.val_top_p, config.seed, f"evaluation {step}")
                metrics |= validation_metrics(samples, n, suffix)
                if not suffix:
                    self.log.samples(step, "val", samples[::n])
            print(f"step {step}: " + ", ".join(f"{key} {value:.3f}" for key, value in metrics.items() if key.count("/") == 2))
        return metrics

    def save(self) -> None:
        save_checkpoint(self.policy, self.tokenizer, self.state, self.config)
        self.saved = self.state["step"]


def to_score(sample: Sample) -> dict:
    """The sample as the Reward Loop takes it."""
    return sample.row | {"response": sample.text, "response_length": len(sample.response_ids)}


def groups_of(samples: list[Sample], size: int) -> list[list[Sample]]:
    return [samples[start : start + size] for start in range(0, len(samples), size)]


def why_useless(group: list[Sample]) -> str | None:
    """Why a group of samples teaches nothing, or None if it does: the reasons for which --dynamic-sampling drops groups."""
    rewards = [sample.reward for sample in group if sample.reward is not None]
    if len(rewards) < 2:
        return "no_verdict"
    if min(rewards) < max(rewards):
        return None
    right = {bool(sample.result["reward_extra_info"].get("acc")) for sample in group}
    return "equal_rewards" if len(right) > 1 else "all_right" if right == {True} else "all_wrong"


def draw(rows: list, first: int, count: int, seed: int) -> list:
    """Rows number `first` to `first + count` of an endless stream: epoch after epoch, each in a shuffle of its own."""
    drawn, shuffles = [], {}
    for place in range(first, first + count):
        epoch, index = divmod(place, len(rows))
        if epoch not in shuffles:
            shuffles[epoch] = list(range(len(rows)))
            random.Random(f"{seed}/{epoch}").shuffle(shuffles[epoch])
        drawn.append(rows[shuffles[epoch][index]])
    return drawn


# --------------------------------------------------------------------------------------- what is checked before the first step


def load_rows(path: str, tokenizer, config: Config) -> list[dict]:
    """The rows of a file, each with `prompt_ids`. Raises ValueError naming the file, the row and what is wrong."""
    rows, kept = reward_loop.read_rows(Path(path), ["data_source", "prompt", "reward_model", "extra_info"]), []
    for number, row in enumerate(rows):
        try:
            ids = tokenizer.apply_chat_template(row["prompt"], add_generation_prompt=True, tokenize=True, return_dict=False)
        except Exception as error:  # a template is a program that came with the model: it may raise anything
            text = f"{path} row {number}: the chat template refuses prompt {str(row['prompt'])[:200]} ({error})"
            raise ValueError(f"{text}; it must be a list of {{role, content}}") from error
        if len(ids) <= config.max_prompt_length:
            kept.append(row | {"prompt_ids": ids})
    if len(kept) < len(rows):
        print(f"{path}: dropped {len(rows) - len(kept)} of {len(rows)} rows with prompts over {config.max_prompt_length} tokens")
    if not kept:
        raise ValueError(f"{path}: no row is left; raise --max-prompt-length or look at the file")
    return kept


def reward_function(config: Config) -> str:
    """FILE:NAME of the function that is called."""
    return config.reward_fn.rpartition(":")[0] + ":compute_score_baseline" if config.baseline else config.reward_fn


def check(config: Config) -> None:
    """Refuses what cannot work before anything expensive starts. Raises ValueError."""
    least_one = "total_steps train_batch_size group_size mini_batch_size max_prompt_length max_response_length val_n clip_c "
    least_one += "rollout_servers rollout_batch_size genrm_servers num_reward_workers max_tokens_per_micro_batch"
    for name, value in asdict(config).items():
        lowest = 1 if name in least_one.split() else 0
        if isinstance(value, (int, float)) and not value >= lowest:
            raise ValueError(f"{name}: {value} must be at least {lowest}")
    if config.train_batch_size % config.mini_batch_size:
        raise ValueError(f"mini_batch_size: {config.mini_batch_size} does not divide train_batch_size {config.train_batch_size}")
    if not config.temperature > 0:
        raise ValueError(f"temperature: {config.temperature} must be above 0; greedy rollouts of a group are all the same")
    if not 0 < config.val_top_p <= 1:
        raise ValueError(f"val_top_p: {config.val_top_p} must be above 0 and at most 1")
    if config.overlong_buffer > config.max_response_length:
        limit = f"max_response_length {config.max_response_length}; lower it, 0 is no penalty"
        raise ValueError(f"overlong_buffer: {config.overlong_buffer} is larger than {limit}")
    if config.genrm and config.router_address:
        raise ValueError("genrm and router_address: give one; the first starts a reward model, the second uses a running one")
    try:
        kwargs = dict(json.loads(config.reward_kwargs).items())
    except (ValueError, AttributeError) as error:
        raise ValueError(f"reward_kwargs: {config.reward_kwargs!r} is not JSON, or not a JSON object ({error})") from error
    for name in ("model", "genrm"):
        value = getattr(config, name)
        if value is not None and not Path(value).is_dir() and (value.count("/") != 1 or value[0] in "./~"):
            raise ValueError(f"{name}: {value!r} is neither a folder nor a hub name such as Qwen/Qwen2.5-Math-7B")
    addresses = {"genrm": "host:0"} if config.genrm or config.router_address else {}
    setup = dict(discriminative=False, router_addresses=addresses, reward_model_tokenizer=None, reward_kwargs=kwargs)
    reward_loop.build_call(setup | {"reward_fn": reward_function(config)})
    for name in ("tensorboard", "wandb"):
        if getattr(config, name) and not importlib.util.find_spec(name):
            raise ValueError(f"{name}: the package is not installed; run: pip install {name}")
    check_folder(config)


def estimate_memory(config: Config) -> dict[str, float]:
    """Rough GB by use, from the model's config.json alone; a step holds the update's part or the rollout's, not both."""
    shape = AutoConfig.from_pretrained(config.model, trust_remote_code=config.trust_remote_code)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(shape, trust_remote_code=config.trust_remote_code)
    text = shape.get_text_config()
    layers, hidden, heads = text.num_hidden_layers, text.hidden_size, text.num_attention_heads
    kv_size = (getattr(text, "num_key_value_heads", None) or heads) * (getattr(text, "head_dim", None) or hidden // heads)
    longest = config.max_prompt_length + config.max_response_length
    tokens = max(config.max_tokens_per_micro_batch, longest)
    layer = tokens * (10 * hidden + 4 * getattr(text, "intermediate_size", 4 * hidden))  # what its backward pass needs
    kept = tokens * hidden * layers + layer if config.gradient_checkpointing else layer * layers
    weights = sum(parameter.numel() for parameter in model.parameters())
    numbers = {"weights": weights, "gradients": weights, "Adam": 2 * weights, "reference model": weights * (config.kl_coef > 0)}
    numbers["update: activations of a micro-batch"] = kept + 6 * min(LOGITS_AT_ONCE, tokens * text.vocab_size)
    if config.rollout == "hf":
        sequences = min(config.rollout_batch_size, config.train_batch_size * config.group_size)
        numbers["rollout: key-value cache"] = 2 * layers * kv_size * longest * sequences
    return {name: 4e-9 * count for name, count in numbers.items()}  # float32


def report(config: Config, train_rows: int, device) -> None:
    """What --dry-run prints."""
    print(json.dumps(asdict(config), indent=2))
    prompts = config.total_steps * config.train_batch_size
    print(f"{config.total_steps} steps take {prompts} prompts, {prompts / train_rows:.1f} epochs of {train_rows}")
    estimate = estimate_memory(config)
    for name, gb in estimate.items():
        print(f"{gb:9.2f} GB  {name}")
    phases = [sum(gb for name, gb in estimate.items() if name.startswith(phase)) for phase in ("update", "rollout")]
    peak = sum(gb for name, gb in estimate.items() if ":" not in name) + max(phases)
    have = 1e-9 * os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    if device.type == "cuda":
        have = 1e-9 * torch.cuda.get_device_properties(device).total_memory
    remedy = "; too little: lower --max-tokens-per-micro-batch or --rollout-batch-size, or --gradient-checkpointing"
    print(f"{peak:9.2f} GB  at the peak, roughly, of {have:.1f} GB on {device}{remedy if peak > have else ''}")


def choose_device(name: str) -> torch.device:
    """Raises ValueError for a name that is none, and for a GPU that is not there."""
    gpus = torch.cuda.device_count()
    if name == "auto":
        name = f"cuda:{gpus - 1}" if gpus else "cpu"
    if not re.fullmatch(r"cpu|cuda(:\d+)?", name) or name != "cpu" and not gpus:
        raise ValueError(f"device: {name!r} must be auto, cpu, cuda or cuda:N, and torch sees {gpus} GPUs")
    return torch.device(name)


def train(config: Config) -> Path | None:
    """A whole run. Returns the folder of its last checkpoint, None for a dry run.

    Raises ValueError for what is wrong with the input, RuntimeError where the run must stop: too few verdicts, a loss that is
    not finite, stale rollout weights, a checkpoint that cannot be written.
    """
    trainer = Trainer(config)
    if config.dry_run:
        return report(config, len(trainer.train_rows), trainer.device)
    return trainer.run()


def main() -> None:
    config = tyro.cli(Config, description=__doc__)
    if all(Path(name).is_dir() for name in (config.model, config.genrm) if name):
        os.environ.setdefault("HF_HUB_OFFLINE", "1")  # no hub name was given, so nothing may ask a hub
    try:
        target = train(config)
        print("done: dry run" if target is None else f"done: {target}")
    except KeyboardInterrupt:
        raise SystemExit(130) from None
    except (ValueError, OSError, RuntimeError) as error:
        print(f"error: {error}", file=sys.stderr)
        raise SystemExit(2 if isinstance(error, (ValueError, OSError)) else 1) from error


if __name__ == "__main__":
    main()
