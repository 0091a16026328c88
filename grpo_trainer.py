"""Trains a policy with GRPO on the Reward Loop: rollouts, rewards, advantages, policy update.

    python grpo_trainer.py --model data/toy/policy --train-file data/toy/toy_train.parquet \\
        --val-file data/toy/toy_test.parquet --reward-fn toy/toy_world.py:compute_score_fapo_oracle \\
        --out-dir outputs/first --total-steps 20 --train-batch-size 16 --mini-batch-size 8 \\
        --max-response-length 64 --overlong-buffer 0 --lr 2e-4 --adam-betas 0.9 0.95 --val-top-p 1 \\
        --num-threads 1

Read `train` first: it is the algorithm from top to bottom. Its parts follow in the order in which a sample
passes them; run.py holds what a run starts. The formulas are in algorithm.py, how samples come by their
advantages in credit.py, the model and its update in policy.py, sampling in rollout.py, turns and tools in
trajectory.py, scoring in reward_loop.py, what a run writes in run_folder.py.

On CPU the policy is in this process, unless --policy-ranks splits it. On GPUs Ray places everything: its
ranks (cluster/), its servers and the judges, each with a share of a GPU. `python -m tools.plan_run` with the
same flags says what a run will need.
Left out: a critic model, prompts with images.
Four words: score (the function's), penalty (for length), reward (their sum), advantage (in its group).
"""

import contextlib
import json
import os
import random
import sys
import threading
import time
from collections import Counter
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import asdict, dataclass, replace
from importlib.util import find_spec
from itertools import chain
from pathlib import Path
from typing import Literal

import huggingface_hub
import tyro
from tqdm import tqdm

import genrm_server
import reward_loop
from algorithm import parse_terms, penalty_of
from credit import set_advantages
from metrics import mean, no_verdict_rate, reward_metrics, rollout_metrics, validation_metrics
from policy import PolicyOptions, Sample, advantages_of
from rollout import rollout_hf, rollout_vllm
from run import Run
from run_folder import has_evaluation


@dataclass(kw_only=True)
class Config(reward_loop.RewardOptions, PolicyOptions):
    """A run of the trainer. How the policy learns: PolicyOptions; how it is rewarded: RewardOptions."""

    train_file: str | tuple[str, ...]  # Training rows, parquet or JSONL (as prepare_data.py writes them).
    out_dir: str  # Folder of the run: config.json, metrics.jsonl, samples.jsonl, report.html, checkpoints/.
    val_file: tuple[str, ...] = ()  # Files of validation rows; gpqa.parquet:4 takes 4 samples of each row.

    reward_mode: Literal["standalone", "colocate"] = "standalone"  # colocate: all rollouts, then all scores.
    max_no_verdict_rate: float = 0.5  # Stop when more of the samples that needed a verdict have none.
    max_idle_steps: int = 10  # Stop after so many steps in a row in which no group taught anything; 0: never.
    overlong_buffer: int = 4096  # The last so many tokens cost a growing penalty; 0: no penalty.
    overlong_factor: float = 1.0  # Penalty of a response of full length.

    total_steps: int = 200  # Training steps; 0: evaluate and stop.
    train_batch_size: int = 512  # Prompts per step (P).
    group_size: int = 8  # Samples per prompt (G).
    chat_template_kwargs: str = "{}"  # For the policy's chat template: '{"enable_thinking": false}'.
    max_prompt_length: int = 2048  # Rows with longer prompts (tokens) are dropped before the first step.
    dynamic_sampling: bool = False  # Replace groups that teach nothing, as all scores are equal (DAPO).
    max_refills: int = 10  # Rounds of replacement per step, at most.
    lr_warmup_steps: int = 10  # Steps over which the learning rate rises linearly.

    rollout: Literal["auto", "hf", "vllm"] = "auto"  # hf: in this process. vllm: servers. auto: hf if it can.
    rollout_fn: str | None = None  # As FILE:NAME: an async function of several turns; docs/rollouts.md.
    rollout_kwargs: str = "{}"  # JSON object: keyword arguments for every call of --rollout-fn.
    rollout_timeout: float = 600.0  # Seconds that it may take for a sample, without the policy's time.
    rollout_servers: int = 1  # Number of vLLM servers for --rollout vllm.
    rollout_tensor_parallel: int = 1  # GPUs of each of them.
    rollout_gpu_share: float = 1.0  # Share of a GPU that each of them takes; below 1 others can use the rest.
    rollout_cpus: str = ""  # On CPU: cores for those servers, such as "1"; default: all, shared out evenly.
    rollout_vllm_args: str = ""  # Their vLLM arguments: --rollout-vllm-args="--max-num-seqs 64".
    rollout_batch_size: int = 512  # Sequences generated at once, by each server.
    max_logprob_diff: float = 0.2  # Stop when rollout/logprob_diff is larger; with --overlap twice as much.
    overlap: bool = False  # Roll out and judge the next step during the update, from weights one step old.

    val_every: int = 10  # Steps between evaluations; 0: only those before and after training.
    val_before_train: bool = True  # Evaluate before the first step, too.
    val_n: int = 1  # Samples per validation row (k of mean@k, maj@k, pass@k).
    val_temperature: float = 1.0  # Sampling temperature in evaluation; 0: greedy.
    val_top_p: float = 0.7  # Nucleus of sampling in evaluation.
    val_greedy: bool = False  # Evaluate greedily as well, once per row (val/<data_source>/greedy).

    device: Literal["auto", "cpu", "cuda"] = "auto"  # Where the policy is; auto: GPUs where Ray has some.
    policy_ranks: int = 1  # Processes that hold the policy together (FSDP2), Ray actors with a GPU each.
    policy_gpu_share: float = 1.0  # Share of a GPU that each of them takes.
    policy_offload: bool = False  # Keep the ranks' weights and Adam in the host's memory: slower.
    max_restarts: int = 3  # How often ranks are started anew from the newest checkpoint when one dies.
    num_threads: int = 0  # CPU threads of torch; 0: its own choice, 1 is fastest for tiny models.

    save_every: int = 20  # Steps between checkpoints; 0: only the last, and where the run stops or fails.
    keep_checkpoints: int = 2  # Older checkpoints are deleted; 0: keep all.
    resume: Literal["never", "auto"] = "never"  # auto: go on from the newest checkpoint in out_dir, if any.
    samples_per_step: int = 8  # Samples of each data source written to samples.jsonl, in whole groups.
    tensorboard: bool = False  # Write the metrics for TensorBoard too (out_dir/tensorboard).
    wandb: bool = False  # Send the metrics to Weights & Biases too (WANDB_PROJECT, default "fapo").
    dry_run: bool = False  # Check everything, print the whole configuration, and stop.

    above_0 = (
        *reward_loop.RewardOptions.above_0,
        "train_batch_size",
        "mini_batch_size",
        "max_response_length",
        "max_grad_norm",
        "temperature",
        "tis_cap",
        "rollout_batch_size",
        "rollout_timeout",
        "rollout_servers",
        "rollout_tensor_parallel",
        "rollout_gpu_share",
        "policy_gpu_share",
        "policy_ranks",
        "val_n",
        "val_top_p",
    )
    of_any_sign = ("entropy_coef", "seed")

    def check(self) -> None:
        """Refuses what would go wrong in silence or late. Raises ValueError."""
        if self.group_size < 2:
            raise ValueError(f"group_size: {self.group_size} must be at least 2; samples are compared")
        if not self.clip_c > 1:
            raise ValueError(f"clip_c: {self.clip_c} must be above 1, or wrong answers teach nothing")
        if not (self.total_steps or self.val_file):
            raise ValueError("total_steps: 0 is an evaluation; give --val-file, too")
        adapters = self.lora_alpha, self.lora_targets
        if not self.lora_rank and adapters != (Config.lora_alpha, Config.lora_targets):
            raise ValueError(f"lora_alpha, lora_targets: {adapters} are of adapters; give --lora-rank, too")
        for name in ("tensorboard", "wandb"):
            if getattr(self, name) and not find_spec(name):
                raise ValueError(f"--{name}: the package is not installed; run: pip install {name}")
        terms = parse_terms(self.reward_terms)
        if bool(terms) != (self.advantage == "terms"):
            raise ValueError("reward_terms: goes with --advantage terms, as in --reward-terms acc=1 "
                             "flawed_positive=-0.5")  # fmt: skip
        if terms and self.overlong_buffer and "overlong_penalty" not in terms:
            raise ValueError("reward_terms: the length penalty is a term; add overlong_penalty=1, or "
                             "--overlong-buffer 0")  # fmt: skip
        penalty_of(self)
        if not self.rollout_fn and (self.rollout_kwargs, self.rollout_timeout) != ("{}", 600.0):
            raise ValueError("rollout_kwargs, rollout_timeout: are for --rollout-fn; give it, too")
        if self.overlap and (self.rollout == "hf" or self.reward_mode == "colocate"):
            raise ValueError("overlap: needs servers and a judge of their own, not hf, not colocate")
        self.check_rewards()

    def policy_servers(self) -> genrm_server.Config:
        """Those of --rollout vllm."""
        return genrm_server.Config(
            self.model,
            num_servers=self.rollout_servers,
            tensor_parallel_size=self.rollout_tensor_parallel,
            gpu_share=self.rollout_gpu_share,
            cpus=self.rollout_cpus,
            seed=self.seed % 2**31,
            queue_timeout=900,
            log_dir=Path(self.out_dir, "rollout_logs"),
            vllm_args=reward_loop.split_arguments("rollout_vllm_args", self.rollout_vllm_args),
        )

    def settled(self, gpus: float) -> "Config":
        """With what depends on the machines; `gpus`: how many Ray has."""
        device = self.device
        if device == "auto":
            device = "cuda" if gpus else "cpu"
        in_process = device == "cpu" and self.policy_ranks == 1
        rollout = self.rollout
        if rollout == "auto":
            rollout = "hf" if in_process and not self.overlap else "vllm"
        if rollout == "hf" and not in_process:
            raise ValueError("rollout: hf needs the policy in this process (CPU, one rank); take vllm")
        tis_cap = self.tis_cap
        if self.overlap and tis_cap is None:
            tis_cap = 2.0
        return replace(self, device=device, rollout=rollout, tis_cap=tis_cap)


# ---- the algorithm


def train(config: Config) -> Path | None:
    """A whole run. Returns the folder of its last checkpoint, None for a dry run.

    Everything random depends on the seed, the step and the number of prompts drawn so far: a run that was
    stopped, in whatever way, and goes on from a checkpoint is the same run (exactly so on CPU with --rollout
    hf). Raises ValueError for what is wrong with the input, RuntimeError where the run must stop: too few
    verdicts, a loss that is not finite, stale rollout weights, a checkpoint that cannot be written.
    """
    run = Run(config)
    with contextlib.ExitStack() as stack:
        stack.enter_context(run.lock)
        run.check_weights()
        if config.dry_run:
            print(json.dumps(asdict(config), indent=2))
            return None
        run.start(stack)
        config, log, policy = run.config, run.log, run.policy
        with run.saved_on_failure():
            while True:
                with run.restarting_ranks():
                    evaluate(run)  # after this many steps, where it is due and not yet done
                    if run.step >= config.total_steps:
                        break
                    step, started = run.step + 1, time.perf_counter()

                    # 1. P prompts, G samples of each, scored by the user's function the moment they end.
                    # 2. Each sample's advantage within its group.
                    batch = next_batch(run, step)
                    log.samples(step, "train", batch.groups, run.eos_ids, run.decode)
                    rewarded = time.perf_counter()

                    # 3. The update. A Ctrl-C from here on waits until the step is whole, logged and saved.
                    with run.interrupts.held():
                        lr = config.lr * min(1.0, step / max(config.lr_warmup_steps, 1))
                        allowed = config.max_logprob_diff * (1 + batch.metrics.get("rollout/staleness", 0))
                        metrics = batch.metrics | policy.update(batch.kept, lr, allowed)
                        run.step = step  # from here on the step counts, whatever fails
                        run.prompts_drawn = batch.drawn
                        run.updates = policy.num_updates
                        metrics |= {"actor/lr": lr, "time/update": time.perf_counter() - rewarded}

                        # 4. The new weights to the policy's servers, and the log.
                        if run.servers:
                            metrics |= hand_over_weights(run)
                        metrics["time/step"] = time.perf_counter() - started
                        metrics["perf/tokens_per_s"] = metrics["perf/tokens"] / metrics["time/step"]
                        log.metrics(metrics | {"actor/restarts": run.num_restarts})
                        if step == config.total_steps or config.save_every and step % config.save_every == 0:
                            run.save()
                    if step % 10 == 0:
                        log.plot()
                    log.diagnose()
        run.finish()
        return Path(run.source)


# ---- the parts of a step, in the order in which a sample passes them


@dataclass
class Batch:
    """The samples of a step."""

    groups: list[list[Sample]]  # all
    kept: list[list[Sample]]  # those to learn from
    metrics: dict
    drawn: int  # prompts drawn in the whole run by then


@dataclass
class Ahead:
    """A step that is rolled out and judged in a thread, during the update of the step before."""

    rolled_out: threading.Event  # nothing more is generated, also where it failed
    batch: Future


def next_batch(run: Run, step: int) -> Batch:
    """The samples of this step; with --overlap the next step's rollouts begin when this one's have ended."""
    if not run.config.overlap:
        return draw_and_score(run, step, threading.Event())
    staleness = int(run.ahead is not None)  # what was rolled out ahead has the weights of a step before
    current = run.ahead or start_ahead(run, step)
    current.rolled_out.wait()
    if current.batch.done():
        current.batch.result()  # raises what went wrong
    run.ahead = None
    if step < run.config.total_steps:
        run.ahead = start_ahead(run, step + 1)
    batch = current.batch.result()
    batch.metrics["rollout/staleness"] = staleness
    return batch


def start_ahead(run: Run, step: int) -> Ahead:
    rolled_out = threading.Event()
    pool = ThreadPoolExecutor(1, f"step {step} ")
    batch = pool.submit(draw_and_score, run, step, rolled_out)
    pool.shutdown(wait=False)  # of a thread that ends with this
    batch.add_done_callback(lambda _: rolled_out.set())
    return Ahead(rolled_out, batch)


def draw_and_score(run: Run, step: int, rolled_out: threading.Event) -> Batch:
    """Draws, rolls out, waits for verdicts; `rolled_out` is set when nothing more is generated.

    With dynamic sampling groups that teach nothing are replaced by groups of further prompts, in rounds.
    """
    config = run.config
    groups, kept = [], []
    times = Counter()
    rounds = 1
    if config.dynamic_sampling:
        rounds += config.max_refills
    for number in range(rounds):
        rows = draw(run.train_rows, run.drawn, config.train_batch_size - len(kept), config.seed)
        run.drawn += len(rows)
        drawn = run.drawn  # now: with --overlap the next step draws while this one waits for its verdicts
        new = [new_group(row, config.group_size) for row in rows]
        seed = config.seed * 1_000_003 + step + (number << 40)
        times["time/rollout"] += roll_out(run, new, step, config.temperature, 1.0, seed)
        if rounds == 1:
            rolled_out.set()
        times["time/reward_wait"] += await_verdicts(run, new, step)
        groups += new
        is_first = step == 1 and number == 0
        kept += set_advantages(new, config, run.decode, config.dynamic_sampling, is_first)
        check_verdicts(run, step, "train", groups)
        if len(kept) == config.train_batch_size:
            break
    if config.dynamic_sampling and kept:  # `terms` is divided by the deviation of what is learnt from
        set_advantages(kept, config, run.decode)
    if not kept:  # every group was dropped: one is looked at all the same, and not learnt from
        kept = groups[-1:]
    kept = without_failures(kept) or without_failures(groups)[-1:]
    num_teaching = 0
    for group in groups:
        num_teaching += any(any(advantages_of(sample)) for sample in group)
    samples = list(chain(*groups))
    lengths = [len(sample.response_ids) for sample in samples]
    metrics = {"step": step} | reward_metrics(samples) | times
    if config.rollout_fn:
        metrics |= rollout_metrics(samples)
    metrics |= {
        "reward/groups_with_spread": num_teaching / len(groups),
        "response_length/mean": mean(lengths),
        "response_length/max": max(lengths),
        "response_length/clipped": mean(sample.is_truncated(run.eos_ids) for sample in samples),
        "perf/tokens": sum(lengths),
    }
    if config.dynamic_sampling:
        metrics["dynamic/prompts"] = len(groups)
        metrics["dynamic/refills"] = number
        metrics["dynamic/kept"] = num_teaching
    return Batch(groups, kept, metrics, drawn)


def new_group(row: dict, count: int) -> list[Sample]:
    return [Sample(row, row["prompt_ids"]) for _ in range(count)]


def without_failures(groups: list[list[Sample]]) -> list[list[Sample]]:
    """The samples whose rollouts have ended; a group without any is left out."""
    ended = [[sample for sample in group if not sample.failure] for group in groups]
    return [group for group in ended if group]


def draw(rows: list, first: int, count: int, seed: int) -> list:
    """Rows number `first` to `first + count` of an endless stream: epoch after epoch, each shuffled anew."""
    epoch, start = divmod(first, len(rows))
    stream = []
    while len(stream) < start + count:
        shuffled = list(rows)
        random.Random(f"{seed}/{epoch}").shuffle(shuffled)
        stream += shuffled
        epoch += 1
    return stream[start : start + count]


def roll_out(run: Run, groups: list[list[Sample]], step: int, temperature, top_p, seed) -> float:
    """Fills in responses, each or its group on its way to its reward the moment it ends. Returns seconds."""
    config = run.config
    started = time.perf_counter()
    samples = list(chain(*groups))
    together = groups  # those that are scored together
    if not run.rewards.job.sees_group:
        together = [[sample] for sample in samples]
    # Of each sample that has not ended: those that it is scored with.
    running = {id(sample): part for part in together for sample in part}

    def finished(sample: Sample) -> None:
        sample.text = run.decode(sample.response_ids)
        part = running.pop(id(sample))
        has_ended = not any(id(other) in running for other in part)
        part = [other for other in part if not other.failure]  # a failure is no response to compare with
        if has_ended and part and config.reward_mode == "standalone":
            verdicts = run.rewards.submit_group([to_score(other, step) for other in part])
            for other, verdict in zip(part, verdicts):
                other.verdict = verdict
        progress.update()

    options = dict(
        max_response_length=config.max_response_length,
        temperature=temperature,
        top_p=top_p,
        rollout_batch_size=config.rollout_batch_size,
        eos_ids=run.eos_ids,
        on_finished=finished,
    )
    with tqdm(total=len(samples), desc=f"step {step}", leave=False, disable=None) as progress:
        if config.rollout_fn:
            run.rollouts.roll_out(
                groups, model=getattr(run.policy, "model", None), servers=run.servers, seed=seed, step=step,
                stop=run.leaving, **options)  # fmt: skip
        elif run.servers:
            rollout_vllm(run.servers, samples, stop=run.leaving, **options)
        else:
            rollout_hf(run.policy.model, samples, seed=seed, **options)
    return time.perf_counter() - started


def to_score(sample: Sample, step: int) -> dict:
    row = sample.row | {"response": sample.text, "response_length": len(sample.response_ids), "step": step}
    row["turns"] = sample.turns or [{"who": "policy", "text": sample.text}]
    if sample.turns:
        row["extra_info"] = (row["extra_info"] or {}) | sample.info
        row["num_turns"] = len(sample.turns) + 1  # as verl counts: the prompt is one
    return row


def await_verdicts(run: Run, groups: list[list[Sample]], step: int) -> float:
    """Fills in the results. Returns the seconds that this took."""
    started = time.perf_counter()
    groups = without_failures(groups)  # failures have their results
    samples = list(chain(*groups))
    if run.config.reward_mode == "standalone":
        waiting = [sample.verdict for sample in samples]
        while wait(waiting, timeout=1.0).not_done:
            if run.leaving.is_set():
                raise RuntimeError("the verdicts were given up")
        results = [verdict.result() for verdict in waiting]
    else:
        run.policy.release_memory()  # a judge that slept wakes up
        rows = []
        for number, group in enumerate(groups):
            rows += [to_score(sample, step) | {"group": number} for sample in group]
        results = run.rewards.score_batch(rows)
    for sample, result in zip(samples, results):
        sample.result = result
        sample.verdict = None
    return time.perf_counter() - started


def check_verdicts(run: Run, step: int, split: str, groups: list[list[Sample]]) -> None:
    """RuntimeError where too many samples have no verdict."""
    samples = list(chain(*groups))
    limit = run.config.max_no_verdict_rate
    rate = no_verdict_rate([sample.result for sample in samples])
    if rate > limit or all(sample.failure for sample in samples):
        run.log.samples(step, split, groups, run.eos_ids, run.decode)  # they explain it
        first = next(sample for sample in samples if sample.result["reward_score"] is None)
        what = "is the reward model up?"
        if first.failure:
            what = "rollouts failed, which have no reward;"
        raise RuntimeError(
            f"step {step}: {rate:.0%} of the samples that needed a verdict have none (max_no_verdict_rate "
            f"{limit:.0%}); {what} First: {first.result['status']}, {first.result['reward_extra_info']}")


def hand_over_weights(run: Run) -> dict:
    """The new weights to the servers, once nothing is being generated."""
    started = time.perf_counter()
    while run.ahead and not run.ahead.rolled_out.wait(0.2):
        if run.interrupts.asked:  # who leaves waits for no rollout, and needs no new weights
            return {}
    ended = time.perf_counter()
    run.servers.sync()
    times = {"time/sync": time.perf_counter() - ended}
    if run.config.overlap:
        times["time/rollout_wait"] = ended - started
    return times


def evaluate(run: Run) -> None:
    """The evaluation after run.step steps, if it is due and not done yet."""
    config, log, step = run.config, run.log, run.step
    due = config.val_every and step % config.val_every == 0
    if step == 0:
        due = config.val_before_train
    if step >= config.total_steps:
        due = True
    if not log.history or log.history[-1]["step"] != step:  # a power cut may have taken this step's line
        log.metrics({"step": step})
    if config.total_steps and has_evaluation(log.history[-1]):  # 0 steps ask for another one
        return
    if not run.val_rows or not due:
        return
    groups = answers(run, config.val_temperature)
    metrics = validation_metrics(groups)
    if config.val_greedy:
        metrics |= validation_metrics(answers(run, 0.0, 1), "greedy")
    log.samples(step, "val", groups, run.eos_ids, run.decode)
    log.metrics({"step": step} | metrics)  # last: a step with these metrics counts as evaluated


def answers(run: Run, temperature: float, count: int | None = None) -> list[list[Sample]]:
    """To the validation rows, with their verdicts. count: of samples a row; default: the row's own."""
    config, step = run.config, run.step
    groups = [new_group(row, count or n) for row, n in run.val_rows]
    roll_out(run, groups, step, temperature, config.val_top_p, config.seed)
    await_verdicts(run, groups, step)
    check_verdicts(run, step, "val", groups)
    return groups


def main() -> None:
    config = tyro.cli(Config, description=__doc__)
    try:
        models = [config.model, *reward_loop.named("genrm", config.genrm).values()]
        if all(Path(name).is_dir() for name in models):  # no hub name was given, so nothing may ask a hub
            os.environ["HF_HUB_OFFLINE"] = "1"  # for what this process starts; the library has read it
            huggingface_hub.constants.HF_HUB_OFFLINE = True
        target = train(config)
        print(f"done: {target or 'dry run'}")
    except KeyboardInterrupt:
        raise SystemExit(130) from None
    except RuntimeError as error:
        print(f"error: {error}", file=sys.stderr)
        raise SystemExit(1) from error
    except (ValueError, OSError) as error:  # the input's or the machine's
        print(f"error: {error}", file=sys.stderr)
        raise SystemExit(2) from error


if __name__ == "__main__":
    main()
