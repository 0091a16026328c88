"""Trains a policy with GRPO on the rewards of the Reward Loop: rollouts -> rewards -> advantages -> policy update.

    python grpo_trainer.py --model data/toy/policy --train-file data/toy/toy_train.parquet --val-file data/toy/toy_test.parquet \\
        --reward-fn toy/toy_world.py:compute_score_fapo_oracle --out-dir outputs/first --total-steps 20 --train-batch-size 16 \\
        --mini-batch-size 8 --max-response-length 64 --overlong-buffer 0 --lr 2e-4 --adam-betas 0.9 0.95 --num-threads 1

Read `Trainer.one_step` first: it is the algorithm, and the rest of the file is what it needs.

    Config     the whole command line; the defaults are the paper's (FAPO-7B)
    Trainer    one_step, then its parts in the order in which a sample passes them, then the run as a whole

The formulas are in algorithm.py, the model and its update in policy.py, sampling in rollout.py, scoring in reward_loop.py, what
is refused before the first step in preflight.py, and what a run writes in run_folder.py. The model's tensors live in Policy.

With --policy-ranks the policy is split over many devices (policy_group.py); all else stays in this process.

What is left out: a critic model, prompts with images, turns and tools.

Four words for four things: score (the function's), penalty (length), reward (their sum), advantage (reward within its group).
"""

import concurrent.futures
import contextlib
import dataclasses
import json
import math
import os
import random
import re
import sys
import threading
import time
from collections import Counter, deque
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import huggingface_hub
import ray
import torch
import tyro
from tqdm import tqdm
from transformers.utils import logging as transformers_logging

import genrm_server
import reward_loop
from tools import view_run
from algorithm import compute_advantages, compute_kl_loss, compute_policy_loss, overlong_penalty  # noqa: F401  (tools look here)
from algorithm import compute_process_aware_advantages
from policy import Policy, Sample
from cluster.policy_group import PolicyGroup, RanksLost
from tools.plan_run import check, check_sizes, load_rows, load_tokenizer, report, samples_itself, settle
from rollout import PolicyServers, check_sampling, read_rollouts, rollout_hf, rollout_vllm, write_rollouts
from run_folder import Interrupts, Log, checkpoints_in, save_checkpoint, write_config
from run_folder import has_evaluation, mean, reward_metrics, validation_metrics


@dataclass(kw_only=True)
class Config(reward_loop.RewardOptions):
    """How a policy is trained. The flags of the rewards are those of every command line that scores (reward_loop.py)."""

    model: str
    """Folder of the policy (Hugging Face format), or a hub name such as Qwen/Qwen2.5-Math-7B."""
    train_file: str
    """File of training rows, parquet or JSONL (prepare_data.py writes them)."""
    out_dir: str
    """Folder of the run: config.json, metrics.jsonl, samples.jsonl, curves.png, report.html, checkpoints/."""
    val_file: tuple[str, ...] = ()
    """Files of validation rows; none: no evaluation. gpqa.parquet:4 takes 4 samples of each of its rows instead of --val-n."""

    # Rewards, beside reward_loop.RewardOptions
    baseline: bool = False
    """Take `compute_score_baseline` of --reward-fn's FILE instead: the rule alone pays, the reward model only measures."""
    reward_mode: Literal["standalone", "colocate"] = "standalone"
    """standalone: score each sample the moment its rollout ends. colocate: first all rollouts, then all scores."""
    max_no_verdict_rate: float = 0.5
    """The run stops when more of a step's samples that needed a verdict have none: the judge is down, or the function broken."""

    # Batch
    total_steps: int = 200
    """Training steps; 0: evaluate and stop."""
    train_batch_size: int = 512
    """Prompts per step (P)."""
    group_size: int = 8
    """Samples per prompt (G)."""
    mini_batch_size: int = 32
    """Prompts per optimizer update; where groups were dropped, those left are dealt out evenly, at most so many each."""
    max_prompt_length: int = 2048
    """Rows with longer prompts (tokens) are dropped and counted before the first step."""
    max_response_length: int = 8192
    """A rollout is cut after this many tokens."""
    dynamic_sampling: bool = False
    """Replace groups whose scores are all equal, which teach nothing, by groups of further prompts (DAPO)."""
    max_refills: int = 10
    """Rounds of replacement per step at most; then the step makes do with what it has."""

    # Rollouts
    rollout: Literal["hf", "vllm"] = "hf"
    """hf: in this process, best for small models. vllm: on vLLM servers that get the new weights after each update."""
    rollout_servers: int = 1
    """Number of vLLM servers for --rollout vllm."""
    rollout_tensor_parallel: int = 1
    """GPUs of each of them."""
    rollout_cpus: str = ""
    """On CPU: cores for those servers, such as "1"; default: all, shared out evenly."""
    rollout_gpus: str = ""
    """GPUs for those servers, such as 0,1,2; default: the first that judges and policy leave free."""
    rollout_shares_gpus: bool = False
    """Those servers take the policy's GPUs, in turns with it: they sleep during the update, its optimizer waits in the host's
    memory during rollouts. How much they take is --gpu-memory-utilization in --rollout-vllm-args, 0.5 where it is not given: at
    most what the policy's weights, which stay there, leave free."""
    rollout_vllm_args: str = ""
    """Arguments for those servers: --rollout-vllm-args="--gpu-memory-utilization 0.5" where they share the trainer's GPU."""
    weight_sync: Literal["file", "nccl"] = "file"
    """How new weights reach those servers. file: through shared memory, everywhere. nccl: GPU to GPU, for large models."""
    rollout_batch_size: int = 512
    """Sequences generated at once."""
    temperature: float = 1.0
    """Sampling temperature of rollouts; the loss uses the same distribution. (The paper trains its GenRM at 1.2.)"""
    max_logprob_diff: float = 0.2
    """The run stops when sampler and trainer differ by more than this (rollout/logprob_diff): the sampler's weights are old.
    Each step of rollout/staleness adds as much again: that far one update may move the policy."""
    max_staleness: int = 0
    """0: the samples of a step come from the newest weights. K: those of the next K steps are rolled out and judged during the
    update, from weights that are up to K steps old (--rollout vllm; --tis-cap 2 corrects for it)."""

    # Algorithm
    advantage: Literal["fapo", "papo"] = "fapo"
    """fapo: the reward, normalised within its group. papo: answer and reasoning normalised apart (PAPO), from the reward
    function's `acc` and `flawed_positive`."""
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
    """auto, cpu, cuda or cuda:N, where the policy is trained. auto: the last GPU (judges and servers get the first), else cpu."""
    policy_ranks: int = 1
    """Devices that hold the policy together (FSDP2), one Ray actor each; needs --rollout vllm. 1: in this process."""
    policy_offload: bool = False
    """Keep each rank's part of the policy in the host's memory, on the GPU only while it is computed with: slower."""
    max_restarts: int = 3
    """How often the ranks are started anew from the newest checkpoint when one of them dies."""
    num_threads: int = 0
    """CPU threads of torch; 0: torch's own choice, 1 for each of several ranks. 1 is fastest for a few million parameters."""
    max_tokens_per_micro_batch: int = 0
    """Token budget (with padding) of one forward and backward pass; 0: 16384 on a GPU, on CPU what fits its caches, 2048."""
    gradient_checkpointing: bool = False
    """Compute activations again in the backward pass: slower, much less memory."""
    seed: int = 0
    """Seed of data order and sampling."""

    # Files
    save_every: int = 20
    """Steps between checkpoints; 0: only the last step's, and where the run is stopped or fails."""
    keep_checkpoints: int = 2
    """Older checkpoints are deleted; 0: keep all."""
    resume: Literal["never", "auto"] = "never"
    """auto: go on from the newest checkpoint in out_dir, if there is one."""
    samples_per_step: int = 8
    """Samples of each data source written to samples.jsonl, per step (in whole groups) and per evaluation."""
    save_rollouts: bool = False
    """Keep what each step trains on (tokens, log-probabilities, results) in out_dir/rollouts, for --replay."""
    replay: str | None = None
    """Train on the rollouts that another run kept (its folder), without sampling or judging: to debug or compare updates."""
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
        everything, samples, metrics, drawn = self.next_batch(step)  # draw, roll out and score, drop groups that teach nothing
        try:
            self.set_advantages(samples)
        finally:  # the samples explain what may go wrong here or from here on
            self.log.samples(step, "train", everything, self.eos_ids)
        rewarded = time.perf_counter()
        with self.interrupts.held():  # a Ctrl-C from here on waits until the step is whole and logged
            lr = config.lr * min(1.0, step / max(config.lr_warmup_steps, 1))
            if self.servers and config.rollout_shares_gpus:
                self.servers.sleep()  # the new weights wake them
            metrics |= self.policy.update(samples, lr)
            updated = time.perf_counter()
            self.check_sampler(step, metrics)
            if self.servers:
                metrics |= self.hand_over_weights()
            self.state |= {"step": step, "prompts_drawn": drawn}
            self.updates_at_step = self.policy.num_updates
            metrics |= {"actor/restarts": self.restarts} if config.policy_ranks > 1 else {}
            metrics |= {"actor/lr": lr, "time/update": updated - rewarded, "time/step": time.perf_counter() - started}
            metrics["perf/tokens_per_s"] = metrics["perf/tokens"] / metrics["time/step"]
            self.log.metrics(metrics)

    # ---- the parts of a step, in the order in which a sample passes them

    def next_batch(self, step: int) -> tuple[list[Sample], list[Sample], dict, int]:
        """What `collect` gives for this step. With --max-staleness the samples of the steps after it are rolled out from here on.

        In a thread, one step after the other; `hand_over_weights` waits for them. Outside of `one_step` nothing is generated: an
        evaluation has the servers, with the newest weights, to itself.
        """
        config = self.config
        if not config.max_staleness:
            *_, batch = self.collect(step)
            return batch
        for _, rollout in self.ahead:  # of the step before, all ended: an error of theirs ends the run here
            rollout.result()
        for later in range(step + len(self.ahead), min(step + config.max_staleness, config.total_steps) + 1):
            collecting = self.collect(later)
            self.ahead.append((collecting, self.thread.submit(next, collecting)))
        collecting, rollout = self.ahead.popleft()
        rollout.result()
        return next(collecting)

    def collect(self, step: int):
        """A generator of two parts: the first rolls out, the second waits for verdicts and yields what the step needs.

        That is its samples, group after group, all and those to learn from; metrics; prompts drawn in the whole run by then.
        With dynamic sampling groups that teach nothing are replaced by groups of further prompts, in rounds. To know which, the
        first part then waits for verdicts too.
        """
        config, staleness = self.config, step - 1 - self.state["step"]  # the servers have the weights of after that step
        everything, rounds, kept, dropped, times = [], 0, [], Counter(), Counter()
        refills = config.max_refills if config.dynamic_sampling and not config.replay else 0
        while not rounds or len(kept) < config.train_batch_size and rounds <= refills:
            rows = draw(self.train_rows, self.drawn, config.train_batch_size - len(kept), config.seed)
            drawn = self.drawn = self.drawn + len(rows)  # the steps after this one go on drawing before this one is done
            if config.replay:
                samples = read_rollouts(config.replay, step)
            else:
                samples = [Sample(row, row["prompt_ids"]) for row in rows for _ in range(config.group_size)]
                seed = config.seed * 1_000_003 + step + (rounds << 40)
                verdicts = self.roll_out_and_score(samples, step, config.temperature, 1.0, seed, f"rollout {step}")
                if not refills:
                    yield  # all is rolled out
                times += verdicts()
                self.check_verdicts(step, everything + samples)
            rounds += 1
            everything += samples
            for start in range(0, len(samples), config.group_size):
                group = samples[start : start + config.group_size]
                if reason := why_useless(group):
                    dropped[reason] += 1
                if not (reason and config.dynamic_sampling):
                    kept.append(group)
        if refills:
            yield
        if not kept:  # every group was dropped: the last one stays, to be looked at and not to be learnt from
            last = everything[-config.group_size :]
            kept = [[dataclasses.replace(sample, result=sample.result | {"reward_score": None}) for sample in last]]
        training = sum(kept, [])
        if config.save_rollouts:
            write_rollouts(config.out_dir, step, training)
        lengths, groups = [len(sample.response_ids) for sample in everything], len(everything) // config.group_size
        metrics = {"step": step} | reward_metrics(everything) | times | {
            "reward/groups_with_spread": 1 - dropped.total() / groups,
            "response_length/mean": mean(lengths),
            "response_length/max": max(lengths),
            "response_length/clipped": mean(sample.response_ids[-1] not in self.eos_ids for sample in everything),
            "perf/tokens": sum(lengths),
        }
        if not config.replay:
            metrics["rollout/staleness"] = staleness
        if config.dynamic_sampling:
            metrics |= {"dynamic/prompts": groups, "dynamic/refills": rounds - 1, "dynamic/kept": groups - dropped.total()}
            metrics |= {f"dynamic/dropped_{why}": dropped[why] for why in WHY_USELESS}
        yield everything, training, metrics, drawn

    def roll_out_and_score(self, samples, step: int, temperature: float, top_p: float, seed: int, title: str):
        """Fills in the responses. In standalone mode a sample is on its way to its reward the moment it ends.

        Returns a function that waits for the results, fills them in too, and returns the seconds of the rollout and of its wait.
        """
        config, started, futures = self.config, time.perf_counter(), {}

        def to_score(sample):
            return sample.row | {"response": sample.text, "response_length": len(sample.response_ids), "step": step}

        with tqdm(total=len(samples), desc=title, leave=False, disable=None) as progress:

            def finished(sample):
                sample.text = self.tokenizer.decode(sample.response_ids, skip_special_tokens=True)
                if config.reward_mode == "standalone":
                    futures[id(sample)] = self.rewards.submit(to_score(sample))
                progress.update()

            options = dict(max_response_length=config.max_response_length, temperature=temperature, top_p=top_p,
                           eos_ids=self.eos_ids, rollout_batch_size=config.rollout_batch_size, on_finished=finished)  # fmt: skip
            if self.servers:
                rollout_vllm(self.servers, samples, stop=self.leaving, **options)
            else:
                rollout_hf(self.policy.model, samples, seed=seed, remote_code=config.trust_remote_code, **options)
        seconds = time.perf_counter() - started

        def verdicts() -> Counter:
            asked = time.perf_counter()
            if config.reward_mode == "standalone":
                results = [futures[id(sample)].result() for sample in samples]
            else:
                self.policy.release_memory()  # a judge that slept wakes up
                results = self.rewards.score_batch([to_score(sample) for sample in samples])
            for sample, result in zip(samples, results):
                sample.result = result
            return Counter({"time/rollout": seconds, "time/reward_wait": time.perf_counter() - asked})

        return verdicts

    def check_verdicts(self, step: int, samples: list[Sample]) -> None:
        """Raises RuntimeError where too many samples have no verdict."""
        rate, limit = reward_loop.no_verdict_rate([sample.result for sample in samples]), self.config.max_no_verdict_rate
        if rate > limit:
            self.log.samples(step, "train", samples, self.eos_ids)  # they explain it
            first = next(sample.result for sample in samples if sample.reward is None)
            raise RuntimeError(
                f"step {step}: {rate:.0%} of the samples that needed a verdict have none (max_no_verdict_rate {limit:.0%}); "
                f"is the reward model up? First of them: status {first['status']!r}, {first['reward_extra_info']}"
            )

    def set_advantages(self, samples: list[Sample]) -> None:
        """Each sample's advantage within its group; None without a verdict."""

        def tensor_P_G(value_of):
            return torch.tensor([math.nan if s.reward is None else value_of(s) for s in samples]).view(-1, self.config.group_size)

        if self.config.advantage == "papo":
            advantages_P_G = compute_process_aware_advantages(tensor_P_G(outcome), tensor_P_G(process))
        else:
            advantages_P_G = compute_advantages(tensor_P_G(lambda sample: sample.reward))
        for sample, advantage in zip(samples, advantages_P_G.flatten().tolist()):
            sample.advantage = None if sample.reward is None else advantage

    def check_sampler(self, step: int, metrics: dict) -> None:
        """Raises RuntimeError where the samples did not come from the policy's weights."""
        if self.config.replay:
            return
        difference, limit, staleness = metrics["rollout/logprob_diff"], self.config.max_logprob_diff, metrics["rollout/staleness"]
        # Samples that are a step old show what that step's update moved, too, which may be as much as the limit. A sampler that
        # has stayed behind is further off with every step.
        if not difference <= limit * (1 + staleness):  # a NaN is no agreement
            raise RuntimeError(
                f"step {step}: rollout/logprob_diff {difference:.3f} is over max_logprob_diff {limit}"
                + f" x {1 + staleness} (staleness {staleness})" * (staleness > 0)
                + ": the sampler does not use the trainer's weights, or not their precision"
            )

    def hand_over_weights(self) -> dict:
        """The new weights to the servers, when what is being rolled out has ended: never in the middle of a response."""
        started, rollouts = time.perf_counter(), [rollout for _, rollout in self.ahead]
        while concurrent.futures.wait(rollouts, timeout=0.2).not_done:
            if self.interrupts.asked:  # who leaves waits for no rollout, and needs no new weights
                return {}
        ended = time.perf_counter()
        self.servers.sync()
        times = {"time/rollout_wait": ended - started} if self.config.max_staleness else {}
        return times | {"time/sync": time.perf_counter() - ended}

    # ---- the run

    def __init__(self, config: Config):
        self.started_ray = config.policy_ranks > 1 and reward_loop.connect_ray()  # which deals out the GPUs
        self.config = config = settle(config)
        check(config)
        transformers_logging.disable_progress_bar()
        if config.num_threads:
            torch.set_num_threads(config.num_threads)
        self.thread, self.leaving = concurrent.futures.ThreadPoolExecutor(1, "rollouts"), threading.Event()
        self.find_checkpoint()
        self.restarts = self.updates_at_step = 0
        self.tokenizer = load_tokenizer(self.source, config)
        self.train_rows = load_rows(config.train_file, self.tokenizer, config)
        self.val_rows = {}  # samples per row -> rows
        for file in config.val_file:
            path, n = re.fullmatch(r"(.*?)(?::([1-9]\d*))?", file).groups()
            self.val_rows.setdefault(int(n or config.val_n), []).extend(load_rows(path, self.tokenizer, config))
        self.longest = check_sizes(self.source, self.train_rows + sum(self.val_rows.values(), []), config)

    def run(self) -> Path:
        """All steps. Returns the folder of the last checkpoint (the model's own where there was no step)."""
        config = self.config
        write_config(config, resumed=self.state["step"] > 0)
        with contextlib.ExitStack() as stack:
            stack.callback(self.thread.shutdown, cancel_futures=True)  # last: when nothing is left that it could wait for
            self.log = Log(config, self.state["step"])
            stack.callback(self.log.close)
            if self.state["step"] >= config.total_steps and self.is_evaluated(self.state["step"]):
                print(f"nothing to do: {self.source} is step {self.state['step']} of {config.total_steps}")
                return Path(self.source)
            self.start(stack)
            stack.callback(self.leaving.set)
            try:
                if not self.log.history:
                    self.log.metrics({"step": 0})
                while True:
                    try:
                        self.evaluate(self.state["step"])  # also where a run was stopped in an evaluation
                        if self.state["step"] >= config.total_steps:
                            break
                        step = self.state["step"] + 1
                        self.one_step(step)
                        self.show(self.log.history[-1])
                        if step == config.total_steps or config.save_every and step % config.save_every == 0:
                            with self.interrupts.held():  # ranks that were left alone would go on writing
                                self.save()
                        if step % 10 == 0:
                            self.log.plot()
                    except RanksLost as error:
                        self.recover(error)
            except BaseException:  # whatever it was: nothing that was learnt is lost
                # In the middle of an update the weights are no step's, and nobody asked for them.
                if self.state["step"] > self.saved and self.policy.num_updates == self.updates_at_step:
                    with contextlib.suppress(RanksLost):  # the error on its way says more
                        self.save()
                print(f"stopped; --resume auto goes on after step {self.saved}", flush=True)
                raise
        print(f"page: {view_run.write_page([config.out_dir])}")
        return Path(self.source)

    def find_checkpoint(self) -> None:
        """Where the run goes on, `source`: its newest checkpoint (at the start only with --resume auto), or the model."""
        done = checkpoints_in(Path(self.config.out_dir, "checkpoints"))
        self.source = str(done[-1]) if done else self.config.model
        self.state = json.loads((done[-1] / "trainer_state.json").read_text()) if done else {"step": 0, "prompts_drawn": 0}
        self.saved = self.state["step"]
        self.drawn, self.ahead = self.state["prompts_drawn"], deque()  # what has been drawn; of steps to come: (collect, rollout)

    def recover(self, error: RanksLost) -> None:
        """New ranks from the newest checkpoint, where the run goes on. Judges, workers and the policy's servers stay."""
        self.leaving.set()  # what is ahead is drawn again
        concurrent.futures.wait([rollout for _, rollout in self.ahead])
        self.leaving.clear()
        self.restarts += 1
        if self.restarts > self.config.max_restarts:
            raise error
        self.find_checkpoint()
        count = f"{self.restarts} of max_restarts {self.config.max_restarts}"
        print(f"{error}; the ranks are started anew after step {self.saved} ({count})", flush=True)
        try:
            if self.servers and self.config.rollout_shares_gpus:
                self.servers.sleep()
            self.policy.restart(self.source)
            if self.saved:
                self.policy.load_optimizer(Path(self.source))
            if self.servers:
                self.servers.sync()
        except RanksLost as again:
            return self.recover(again)
        self.updates_at_step = self.policy.num_updates
        self.log.rewind(self.saved)

    def start(self, stack: contextlib.ExitStack) -> None:
        """The model, the reward models and workers, the policy's servers; `stack` ends them in the opposite order."""
        config, self.servers = self.config, None
        samples = samples_itself(config)
        sleeps = samples and config.reward_mode == "colocate" and bool(config.genrm) and config.device != "cpu"
        if sleeps:  # judge and policy share GPUs: first the judge, which takes its share of the memory and sleeps
            self.start_rewards(stack, sleep_mode=True)
            self.rewards.reward_models.sleep()
        if config.policy_ranks > 1:
            if self.started_ray:
                stack.callback(ray.shutdown)
            self.policy = PolicyGroup(config, self.source)
            stack.callback(self.policy.shutdown)
        else:
            self.policy = Policy(config, self.source, torch.device(config.device))
        if self.state["step"]:
            self.policy.load_optimizer(Path(self.source))
        eos = self.policy.about()["eos_token_id"]
        self.eos_ids = {*(eos if isinstance(eos, list) else [eos]), self.tokenizer.eos_token_id} - {None}
        if not self.eos_ids:
            raise ValueError(f"model: neither the model nor the tokenizer of {self.source} has an end token; add eos_token")
        if samples and config.rollout == "hf":
            check_sampling(self.policy)
        if samples and not sleeps:
            self.start_rewards(stack, sleep_mode=False)
        if samples and config.rollout == "vllm":
            servers = genrm_server.Config(
                model="", num_servers=config.rollout_servers, tensor_parallel_size=config.rollout_tensor_parallel,
                cpus=config.rollout_cpus, gpus=config.rollout_gpus,
                max_model_len=self.longest, seed=config.seed % 2**31, policy="least_loaded", queue_timeout=900,
                sleep_mode=config.rollout_shares_gpus, log_dir=Path(config.out_dir, "rollout_logs"),
                vllm_args=reward_loop.split_arguments("rollout_vllm_args", config.rollout_vllm_args),
            )  # fmt: skip
            self.servers = PolicyServers(self.policy, self.tokenizer, servers, config.weight_sync)
            stack.callback(self.servers.shutdown)
        self.interrupts = Interrupts()  # only now: Ray has put handlers of its own in place
        stack.callback(self.interrupts.restore)

    def start_rewards(self, stack: contextlib.ExitStack, sleep_mode: bool) -> None:
        config, overlong = self.config, None
        if config.overlong_buffer:
            overlong = reward_loop.Overlong(config.max_response_length, config.overlong_buffer, config.overlong_factor)
        self.rewards = reward_loop.start_rewards(config, stack, sleep_mode=sleep_mode, overlong=overlong)

    def is_evaluated(self, step: int) -> bool:
        """Whether there is no evaluation after this step, or it is done: then its metrics stand in the step's line."""
        config = self.config
        due = step == 0 or step == config.total_steps or config.val_every and step % config.val_every == 0
        return not self.val_rows or not due or any(map(has_evaluation, self.log.history[-1:]))

    def evaluate(self, step: int) -> None:
        """The evaluation after this step, if there is one, added to the step's line of metrics."""
        config, metrics, shown = self.config, {}, []
        if self.is_evaluated(step):
            return
        for n_sampled, rows in self.val_rows.items():
            for n, temperature, suffix in [(n_sampled, config.val_temperature, "")] + [(1, 0.0, "greedy")] * config.val_greedy:
                samples = [Sample(row, row["prompt_ids"]) for row in rows for _ in range(n)]
                self.roll_out_and_score(samples, step, temperature, config.val_top_p, config.seed, f"evaluation {step}")()
                metrics |= validation_metrics(samples, n, suffix)
                shown += [] if suffix else samples[::n]
        self.log.samples(step, "val", shown, self.eos_ids)
        sources = {f"val/{sample.row['data_source']}" for sample in shown}  # a name may have slashes, as openai/gsm8k has
        accuracies = [f"{key} {value:.3f}" for key, value in metrics.items() if key.rpartition("/")[0] in sources]
        print(f"step {step}: " + ", ".join(accuracies))
        self.log.metrics({"step": step} | metrics)
        self.log.plot()

    def show(self, metrics: dict) -> None:
        """One line on the screen."""
        shown = ("reward/mean", "reward/acc", "reward/flawed_positive_rate", "genrm/error_rate", "response_length/mean",
                 "actor/entropy", "rollout/logprob_diff", "time/step")  # fmt: skip
        values = "  ".join(f"{key} {metrics[key]:.3g}" for key in shown if key in metrics)
        print(f"step {metrics['step']}/{self.config.total_steps}  {values}", flush=True)

    def save(self) -> None:
        try:
            self.source = str(save_checkpoint(self.policy, self.tokenizer, self.state, self.config))
        except RuntimeError as error:
            raise error.__cause__ if isinstance(error.__cause__, RanksLost) else error
        self.saved = self.state["step"]


WHY_USELESS = ("all_right", "all_wrong", "equal_scores", "no_verdict")


def why_useless(group: list[Sample]) -> str | None:
    """Why a group of samples teaches nothing, or None if it does: the reasons for which --dynamic-sampling drops groups.

    By the function's scores, as in DAPO: that some right answers are longer than others makes no group worth learning from.
    """
    scores = [sample.result["reward_extra_info"]["score"] for sample in group if sample.reward is not None]
    if len(scores) < 2:
        return "no_verdict"
    if min(scores) < max(scores):
        return None
    accs = [sample.result["reward_extra_info"].get("acc") for sample in group]
    right = {bool(acc) for acc in accs if acc is not None}  # where the function says so
    return "all_right" if right == {True} else "all_wrong" if right == {False} else "equal_scores"


def outcome(sample: Sample) -> float:
    """PAPO's outcome: 1 for a right answer, else -1, and what the length cost. RuntimeError where the function does not say."""
    info = sample.result["reward_extra_info"]
    if not {"acc", "flawed_positive"} <= info.keys():
        given = ", ".join(info)
        raise RuntimeError(f"advantage: papo needs acc and flawed_positive from the reward function, which gives {given}")
    return (1.0 if info["acc"] else -1.0) + sample.reward - info["score"]


def process(sample: Sample) -> float:
    """PAPO's quality of the reasoning: 0 where the judge found a wrong step, NaN where it said nothing of a right answer."""
    flawed = sample.result["reward_extra_info"]["flawed_positive"]
    return math.nan if flawed is None else 1.0 - flawed


def draw(rows: list, first: int, count: int, seed: int) -> list:
    """Rows number `first` to `first + count` of an endless stream: epoch after epoch, each in a shuffle of its own."""
    epoch, start = divmod(first, len(rows))
    stream = []
    while len(stream) < start + count:
        shuffled = list(rows)
        random.Random(f"{seed}/{epoch}").shuffle(shuffled)
        stream += shuffled
        epoch += 1
    return stream[start : start + count]


def train(config: Config) -> Path | None:
    """A whole run. Returns the folder of its last checkpoint, None for a dry run.

    Raises ValueError for what is wrong with the input, RuntimeError where the run must stop: too few verdicts, a loss that is
    not finite, stale rollout weights, a checkpoint that cannot be written.
    """
    trainer = Trainer(config)
    return report(trainer.config, trainer.train_rows) if config.dry_run else trainer.run()


def main() -> None:
    config = tyro.cli(Config, description=__doc__)
    models = [config.model, *reward_loop.named("genrm", config.genrm).values()]
    if all(Path(name).is_dir() for name in models):  # no hub name was given, so nothing may ask a hub
        os.environ.setdefault("HF_HUB_OFFLINE", "1")  # for what this process starts; the library itself has read it by now
        huggingface_hub.constants.HF_HUB_OFFLINE = os.environ["HF_HUB_OFFLINE"] == "1"
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
