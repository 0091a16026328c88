"""Train a policy with GRPO and the reward loop: rollouts, rewards, advantages, update.

    python prepare_data.py --tasks toy --out-dir data/toy
    python grpo_trainer.py --model data/toy/policy --train-file data/toy/toy_train.parquet \\
        --val-file data/toy/toy_test.parquet --reward-fn toy/toy_world.py:compute_score_fapo_oracle \\
        --out-dir outputs/first --total-steps 20 --train-batch-size 16 --mini-batch-size 8 \\
        --max-response-length 64 --overlong-buffer 0 --lr 2e-4 --adam-betas 0.9 0.95 --val-top-p 1 \\
        --num-threads 1 --device cpu

Read `train` first: it is the algorithm. The other functions are in the order in which a sample passes through
them. A sample is one policy.Sample from prompt to update, and each stage fills in more of its fields; a group
is the list of a prompt's samples. Advantages and losses are in algorithm.py, the update in policy.py, the
model's log-probabilities in causal_lm.py, sampling in rollout.py, turns and tools in trajectory.py, scoring
in reward_loop.py, starting, stopping and resuming in run.py, and output files and metrics in run_folder.py.

On a CPU, the policy runs in this process unless --policy-ranks shards it. On GPUs, Ray places the ranks of
the policy (cluster/), its servers and the judges, each on whole GPUs or on a fraction of one. `python -m
tools.plan_run` with the same flags estimates memory and placement.

Four terms are kept apart: the score is what the reward function returns, the length penalty is at most 0, the
reward is their sum, and the advantage is the reward relative to its group.
Not covered: a critic model, prompts with images.
"""

import os
import random
import threading
import time
from collections import Counter
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import dataclass, field
from itertools import chain
from pathlib import Path

from command_line import named, one_line_errors, parse_command_line
from settings import Config

# Parse the command line before importing torch and transformers, which takes four seconds.
if __name__ == "__main__":
    CONFIG = parse_command_line(Config, description=__doc__, end="Read `train` first")

import huggingface_hub
from tqdm import tqdm

from algorithm import add_length_penalties, set_advantages
from policy import Sample
from rollout import rollout_hf, rollout_vllm
from run import Run
from run_folder import batch_metrics, done_line, has_evaluation, validation_metrics, verdict_counts

# With fewer samples that need a verdict, one lost verdict says little about the judge.
MIN_VERDICTS = 20

# ---- the algorithm


def train(config: Config) -> Path | None:
    """Train a policy from the first step, or from the newest checkpoint, to the last step.

    All randomness depends only on the seed, the step and the number of prompts drawn so far. A resumed run
    therefore equals an uninterrupted one (exactly, with --rollout hf on a CPU).

    Returns:
        The folder of the last checkpoint, or None after a dry run.
    Raises:
        ValueError: The configuration, the data or the model is invalid.
        OSError: The output directory cannot be used, or the disk is full.
        RuntimeError: The run must stop: there are too few verdicts, a loss is not finite, rollouts come from
            weights other than the policy's, or a checkpoint cannot be written.
    """
    with Run(config) as run:

        def collect(batch: Batch) -> None:  # With --overlap, a thread calls this during the previous update.
            while batch.needs_prompts(run.config):  # Only --dynamic-sampling repeats this.
                prompts = draw_prompts(run, batch)
                groups = roll_out(run, batch, prompts)  # Each sample is scored as soon as it ends.
                scored = wait_for_rewards(run, batch, groups)
                batch.groups_to_train += compute_group_advantages(run, batch, scored)
            finish_batch(run, batch)

        for step in run.remaining_steps():
            if run.evaluation_is_due():
                with run.restarting_ranks():
                    evaluate(run)
                continue
            with run.protected_step():  # If a rank dies, the run resumes from a checkpoint.
                batch = next_batch(run, step, collect)
                with run.interrupts.held():  # Ctrl-C waits until the step is logged and saved.
                    run.log.samples(step, "train", batch.groups, run.decode)
                    lr = config.lr * min(1.0, step / max(config.lr_warmup_steps, 1))
                    max_logprob_diff = config.max_logprob_diff * (1 + batch.staleness)
                    started = time.perf_counter()
                    metrics = run.policy.update(batch.groups_to_train, lr, max_logprob_diff)
                    metrics |= {"actor/lr": lr, "time/update": time.perf_counter() - started}
                    # The step and its metrics count even if a later line fails.
                    run.count_step(step, batch.num_prompts_drawn, batch.metrics | metrics)

                    metrics |= run.sync_weights()
                    run.log_step(batch.metrics | metrics)
                    run.save_if_due()
    return run.result


# ---- the parts of a step, in the order in which a sample passes through them


@dataclass
class Batch:
    """The samples of a training step, or of an evaluation."""

    step: int
    temperature: float
    top_p: float = 1.0
    split: str = "train"  # or "val", in an evaluation
    groups: list[list[Sample]] = field(default_factory=list)  # Each group has the samples of one prompt.
    groups_to_train: list[list[Sample]] = field(default_factory=list)
    rounds: int = 0  # How often prompts were drawn: once, or more often with --dynamic-sampling.
    num_prompts_drawn: int = 0  # Counted over the whole run, including this batch so far.
    staleness: int = 0  # Age of the weights that sampled the batch, in steps.
    metrics: dict = field(default_factory=dict)
    times: Counter = field(default_factory=Counter)
    # Set when generation for this batch has ended. With --overlap, also set if collecting the batch failed.
    rolled_out: threading.Event = field(default_factory=threading.Event)
    collected: Future | None = None  # With --overlap: done when the batch is complete.

    def needs_prompts(self, config: Config) -> bool:
        if not config.dynamic_sampling:
            return self.rounds == 0
        return self.rounds <= config.max_refills and self.num_missing(config) > 0

    def num_missing(self, config: Config) -> int:
        return config.train_batch_size - len(self.groups_to_train)


def next_batch(run: Run, step: int, collect) -> Batch:
    """Return the collected batch of a step: samples with rewards and advantages, and the batch's metrics.

    With --overlap, a thread collects each batch, and the rollouts of the next step begin as soon as the
    rollouts of this step have ended.
    """
    config = run.config
    if not config.overlap:
        batch = Batch(step, config.temperature)
        collect(batch)
        return batch

    def start(step: int) -> Batch:
        batch = Batch(step, config.temperature)
        pool = ThreadPoolExecutor(1, f"step {step} ")
        batch.collected = pool.submit(collect, batch)
        pool.shutdown(wait=False)  # The thread exits when the batch is complete.
        batch.collected.add_done_callback(lambda _: batch.rolled_out.set())
        return batch

    staleness = int(run.prefetched is not None)
    batch = run.prefetched or start(step)
    batch.rolled_out.wait()
    if batch.collected.done():
        batch.collected.result()  # This raises the error if collecting failed.
    run.prefetched = None
    if step < config.total_steps:
        run.prefetched = start(step + 1)
    batch.collected.result()
    batch.staleness = batch.metrics["rollout/staleness"] = staleness
    return batch


def draw_prompts(run: Run, batch: Batch) -> list[tuple[dict, int]]:
    """Draw the rows of a round. Returns each row with its number of samples."""
    config = run.config
    rows = draw(run.train_rows, run.num_prompts_drawn, batch.num_missing(config), config.seed)
    run.num_prompts_drawn += len(rows)
    batch.num_prompts_drawn = run.num_prompts_drawn  # Stored now, because a prefetch may draw more.
    batch.rounds += 1
    return [(row, config.group_size) for row in rows]


def draw(rows: list, first: int, count: int, seed: int) -> list:
    """Return `count` rows, beginning with row `first`, of an endless stream of shuffled epochs."""
    epoch, start = divmod(first, len(rows))
    stream = []
    while len(stream) < start + count:
        shuffled = list(rows)
        random.Random(f"{seed}/{epoch}").shuffle(shuffled)
        stream += shuffled
        epoch += 1
    return stream[start : start + count]


def roll_out(run: Run, batch: Batch, prompts: list[tuple[dict, int]]) -> list[list[Sample]]:
    """Sample responses to these prompts. Returns one group of samples per prompt.

    Each sample, or each group if the reward function takes groups, is submitted for scoring when it ends.
    """
    config = run.config
    started = time.perf_counter()
    groups = [[Sample(row, row["prompt_ids"]) for _ in range(count)] for row, count in prompts]
    samples = list(chain(*groups))
    submitter = Submitter(run.rewards, groups, batch.step)
    progress = tqdm(total=len(samples), desc=f"step {batch.step}", leave=False, disable=None)

    def finished(sample: Sample) -> None:
        sample.text = run.decode(sample.response_ids)
        if config.reward_mode == "standalone":
            submitter.submit_ended(sample)
        progress.update()

    options = dict(
        max_response_length=config.max_response_length,
        temperature=batch.temperature,
        top_p=batch.top_p,
        rollout_batch_size=config.rollout_batch_size,
        eos_ids=run.eos_ids,
        on_finished=finished,
    )
    seed = config.seed  # Every evaluation uses the same seed.
    if batch.split == "train":
        seed = config.seed * 1_000_003 + batch.step
    if batch.rounds > 1:
        seed = random.Random(f"{seed}/refill {batch.rounds}").getrandbits(32)
    with progress:
        if config.rollout_fn:
            run.rollout_runner.roll_out(
                groups,
                model=getattr(run.policy, "model", None),
                servers=run.servers,
                seed=seed,
                step=batch.step,
                split=batch.split,
                stop=run.cancelled,
                **options,
            )
        elif run.servers:
            rollout_vllm(run.servers, samples, stop=run.cancelled, **options)
        else:
            rollout_hf(run.policy.model, samples, seed=seed, **options)
    batch.times["time/rollout"] += time.perf_counter() - started
    if not config.dynamic_sampling:  # Otherwise, the verdicts decide whether another round follows.
        batch.rolled_out.set()
    return groups


class Submitter:
    """Submits each sample for scoring as soon as its rollout ends, or each group when its last rollout ends.

    A failed rollout has no response to score, and its group is scored without it.
    """

    def __init__(self, rewards, groups: list[list[Sample]], step: int):
        self.rewards = rewards
        self.step = step
        self.unit_of_running = {}  # id of a sample -> the samples that are scored together with it
        for group in groups:
            for sample in group:
                unit = [sample]
                if rewards.job.sees_group:
                    unit = group
                self.unit_of_running[id(sample)] = unit

    def submit_ended(self, sample: Sample) -> None:
        """Submit this sample, which has ended, or its group if all of the group has ended."""
        unit = self.unit_of_running.pop(id(sample))
        if any(id(other) in self.unit_of_running for other in unit):
            return
        unit = [other for other in unit if not other.failure]
        if unit:
            futures = self.rewards.submit_group([scoring_row(other, self.step) for other in unit])
            for other, future in zip(unit, futures):
                other.pending_result = future


def scoring_row(sample: Sample, step: int) -> dict:
    """Return the row of a sample with what the reward loop needs to score it."""
    return sample.row | {
        "response": sample.text,
        "response_length": len(sample.response_ids),
        "turns": sample.turns or [{"who": "policy", "text": sample.text}],
        "rollout_info": sample.info,
        "step": step,
    }


def wait_for_rewards(run: Run, batch: Batch, groups: list[list[Sample]]) -> list[list[Sample]]:
    """Wait for the results of these samples and store them in `Sample.result`. Returns the groups."""
    started = time.perf_counter()
    ended = without_failures(groups)  # Samples whose rollout failed already have results.
    samples = list(chain(*ended))
    if run.config.reward_mode == "standalone":
        futures = [sample.pending_result for sample in samples]
        while wait(futures, timeout=1.0).not_done:
            if run.cancelled.is_set():
                raise RuntimeError("interrupted while waiting for rewards")
        results = [future.result() for future in futures]
    else:
        run.policy.release_memory()  # The judges are about to wake up and need the memory.
        rows = []
        for number, group in enumerate(ended):
            for sample in group:
                rows.append(scoring_row(sample, batch.step) | {"group": number})
        results = run.rewards.score_batch(rows)
    for sample, result in zip(samples, results):
        sample.result = result
        sample.pending_result = None
    batch.times["time/reward_wait"] += time.perf_counter() - started
    return groups


def without_failures(groups: list[list[Sample]]) -> list[list[Sample]]:
    """Return the groups without failed rollouts, and drop groups that are then empty."""
    kept = []
    for group in groups:
        ended = [sample for sample in group if not sample.failure]
        if ended:
            kept.append(ended)
    return kept


def compute_group_advantages(run: Run, batch: Batch, groups: list[list[Sample]]) -> list[list[Sample]]:
    """Add a round's groups to the batch, with rewards and advantages. Returns the groups to train on.

    With --dynamic-sampling, only groups with a learning signal are returned. Raises RuntimeError if
    check_results does. That check comes last, because a sample whose advantage is not finite loses its
    verdict.
    """
    config = run.config
    add_length_penalties(groups, config)
    batch.groups += groups
    is_first = batch.step == run.first_step and batch.rounds == 1
    groups_to_train = set_advantages(groups, config, run.decode, config.dynamic_sampling, is_first)
    check_results(run, batch, groups)
    return groups_to_train


def finish_batch(run: Run, batch: Batch) -> None:
    """Choose the groups to train on, at least one, and compute the batch's metrics."""
    if run.config.dynamic_sampling and batch.groups_to_train:  # An advantage may depend on all of them.
        set_advantages(batch.groups_to_train, run.config, run.decode)
    # If no group has a learning signal, the update trains nothing, but still checks the sampler.
    chosen = without_failures(batch.groups_to_train) or without_failures(batch.groups)[-1:]
    batch.groups_to_train = chosen
    batch.metrics = batch_metrics(batch, run.config)


def check_results(run: Run, batch: Batch, groups: list[list[Sample]]) -> None:
    """Raise RuntimeError if too many rollouts failed, or too many samples that needed a verdict have none.

    One lost verdict must not stop a run in which few samples need one. So the rate divides by at least
    MIN_VERDICTS (or by all samples, if there are fewer), and a step with few samples that need a verdict also
    counts together with the steps before it: all of the latest steps that together needed MIN_VERDICTS, and
    all but the oldest of them, whose verdicts could hide later losses. `groups` are the groups that were not
    checked before: those of a step, or with --dynamic-sampling those of a round, which counts as a step here.
    """
    limit = run.config.max_no_verdict_rate
    samples = list(chain(*batch.groups))
    failed = [sample for sample in samples if sample.failure]
    rate = len(failed) / len(samples)
    if rate > limit or rate == 1:
        complaint = f"{rate:.0%} of the rollouts have failed"
        remedy = "fix the rollout function, because failed rollouts get no reward"
        stop_run(run, batch, failed[0], complaint, remedy)
    recent = run.recent_verdicts[batch.split]
    counts = verdict_counts(sample.result for sample in chain(*without_failures(groups)))
    counts["step"] = batch.step  # A resumed run drops the counts of steps that it repeats.
    # A step that needed no verdict only matters while there are few samples.
    if counts["needed"] or sum(earlier["samples"] for earlier in recent[1:]) < MIN_VERDICTS:
        recent.append(counts)
    while sum(earlier["needed"] for earlier in recent[1:]) >= MIN_VERDICTS:
        del recent[0]
    ended = [sample for sample in samples if not sample.failure]
    of_batch = verdict_counts(sample.result for sample in ended)
    rate = 0.0
    for counts in (of_batch, sum(recent, Counter()), sum(recent[1:], Counter())):
        needed = max(counts["needed"], min(counts["samples"], MIN_VERDICTS), 1)
        rate = max(rate, counts["missing"] / needed)
    if of_batch["missing"] and rate > limit:
        first = next(sample for sample in ended if sample.result["reward_score"] is None)
        complaint = f"{rate:.0%} of the samples that needed a verdict have none"
        del recent[-1]  # A resumed run repeats this step or evaluation.
        stop_run(run, batch, first, complaint, "check the reward function and the reward model")


def stop_run(run: Run, batch: Batch, sample: Sample, complaint: str, remedy: str) -> None:
    """Write the samples of a batch for diagnosis, and raise RuntimeError. `sample` is the first bad one."""
    # If this step has been evaluated before, the samples stay, because the metrics do.
    if batch.split == "train" or not has_evaluation(run.log.history[-1]):
        run.log.samples(batch.step, batch.split, batch.groups, run.decode)
    raise RuntimeError(
        f"step {batch.step}: {complaint} (--max-no-verdict-rate {run.config.max_no_verdict_rate:g}); "
        f'{remedy}. The first such sample has the status "{sample.result["status"]}": '
        f"{sample.result['reward_extra_info']}"
    )


# ---- evaluation


def evaluate(run: Run) -> None:
    """Evaluate the policy after `run.step` steps."""
    config, step = run.config, run.step
    groups = sample_validation(run, config.val_temperature)
    metrics = validation_metrics(groups)
    if config.val_greedy:
        metrics |= validation_metrics(sample_validation(run, 0.0, 1), "greedy")
    run.log.samples(step, "val", groups, run.decode)
    run.log.metrics({"step": step} | metrics)  # Last, because a step with metrics counts as evaluated.
    run.num_evaluations += 1


def sample_validation(run: Run, temperature: float, count: int | None = None) -> list[list[Sample]]:
    """Sample and score responses to the validation rows: `count` per row, or as in --val-file and --val-n."""
    batch = Batch(run.step, temperature, run.config.val_top_p, "val")
    groups = roll_out(run, batch, [(row, count or n) for row, n in run.val_rows])
    batch.groups = wait_for_rewards(run, batch, groups)
    add_length_penalties(batch.groups, run.config)
    check_results(run, batch, batch.groups)
    return batch.groups


# ---- the command line


def main(config: Config) -> None:
    with one_line_errors():
        models = [config.model, *named("genrm", config.genrm).values()]
        if config.reward_model_tokenizer:
            models.append(config.reward_model_tokenizer)
        is_local = all(Path(name).is_dir() for name in models)
        if is_local and "HF_HUB_OFFLINE" not in os.environ:  # Local models need no hub.
            os.environ["HF_HUB_OFFLINE"] = "1"  # Child processes read this variable.
            huggingface_hub.constants.HF_HUB_OFFLINE = True
        target = train(config)
        print(done_line(config, target))


if __name__ == "__main__":
    main(CONFIG)
