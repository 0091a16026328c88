"""Train a policy with GRPO and the reward loop: rollouts, rewards, advantages, update.

    python grpo_trainer.py --model data/toy/policy --train-file data/toy/toy_train.parquet \\
        --val-file data/toy/toy_test.parquet --reward-fn toy/toy_world.py:compute_score_fapo_oracle \\
        --out-dir outputs/first --total-steps 20 --train-batch-size 16 --mini-batch-size 8 \\
        --max-response-length 64 --overlong-buffer 0 --lr 2e-4 --adam-betas 0.9 0.95 --val-top-p 1 \\
        --num-threads 1

Read `train` first: it is the algorithm. The functions below it follow in the order in which a sample passes
them. Advantages and losses are in algorithm.py, the update in policy.py, the model's log-probabilities in
causal_lm.py, sampling in rollout.py, turns and tools in trajectory.py, scoring in reward_loop.py, everything
that a run starts and saves in run.py, and what it writes in run_folder.py.

On a CPU the policy is in this process, unless --policy-ranks shards it. On GPUs Ray places everything: the
ranks of the policy (cluster/), its servers and the judges, each with a fraction of a GPU. `python -m
tools.plan_run` with the same flags estimates what a run needs.

Four terms: the score is what the reward function returns, the length penalty is at most 0, the reward is
their sum, and the advantage is the reward relative to its group.
Left out: a critic model, prompts with images.
"""

import inspect
import os
import random
import re
import sys
import threading
import time
from collections import Counter
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import MISSING, Field, dataclass, field, fields, make_dataclass, replace
from importlib.util import find_spec
from itertools import accumulate, chain
from pathlib import Path
from typing import Annotated, Literal, get_type_hints

import huggingface_hub
import tyro
from tqdm import tqdm

import genrm_server
import reward_loop
from algorithm import length_penalty_of, parse_terms, set_advantages
from policy import PolicyOptions, Sample
from rollout import rollout_hf, rollout_vllm
from run import Run
from run_folder import batch_metrics, no_verdict_rate, validation_metrics


@dataclass(kw_only=True)
class Config(reward_loop.RewardOptions, PolicyOptions):
    """Settings of a training run, including those of the reward loop and of the policy."""

    # Training data: parquet or JSONL files with rows as prepare_data.py writes them.
    train_file: str | tuple[str, ...]
    # Output directory of the run: config.json, metrics.jsonl, samples.jsonl, report.html, checkpoints/.
    out_dir: str
    # Validation data in the format of --train-file; FILE:4 takes 4 samples of each row of FILE.
    val_file: tuple[str, ...] = ()
    # JSON object of arguments for the policy's chat template, such as '{"enable_thinking": false}'.
    chat_template_kwargs: str = "{}"
    # Longest prompt in tokens; rows with longer prompts are dropped before the first step.
    max_prompt_length: int = 2048

    # When samples are scored: standalone, each when its rollout ends; colocate, all after the last rollout.
    reward_mode: Literal["standalone", "colocate"] = "standalone"
    # Stop the run if more than this fraction of the samples that need a verdict have none.
    max_no_verdict_rate: float = 0.5

    # Sampler of the policy: hf, in the trainer's process; vllm, on servers; auto: hf on a CPU without
    # ranks and --overlap, vllm otherwise.
    rollout: Literal["auto", "hf", "vllm"] = "auto"
    # Rollout function FILE:NAME, an async function for turns, tools or environments (docs/rollouts.md).
    rollout_fn: str | None = None
    rollout_kwargs: str = "{}"  # JSON object of arguments for every call of --rollout-fn.
    # Seconds that --rollout-fn may take per sample, without the time in which the policy writes.
    rollout_timeout: float = 600.0
    rollout_servers: int = 1  # Number of vLLM servers of the policy.
    rollout_tensor_parallel: int = 1  # Number of GPUs per vLLM server of the policy.
    # Fraction of a GPU for each vLLM server of the policy; below 1, other processes can use the rest.
    rollout_gpu_share: float = 1.0
    # CPU cores for the vLLM servers of the policy, such as "0,1"; default: all cores, divided evenly.
    rollout_cpus: str = ""
    # Arguments for the vLLM servers of the policy: --rollout-vllm-args="--max-num-seqs 64".
    rollout_vllm_args: str = ""
    rollout_batch_size: int = 512  # Number of sequences that a sampler generates at a time.
    group_size: int = 8  # Number of samples per prompt.
    # Roll out and score the next step during the update, with weights that are one step old.
    overlap: bool = False
    # Stop the run if rollout/logprob_diff exceeds this bound, or twice this bound with --overlap.
    max_logprob_diff: float = 0.2

    # Replace groups without a learning signal by groups of further prompts (DAPO).
    dynamic_sampling: bool = False
    max_refills: int = 10  # Number of times per step that --dynamic-sampling may draw further prompts.
    # Stop the run after this many consecutive steps without a learning signal; 0: never.
    max_idle_steps: int = 10
    # Number of tokens before the length limit in which the length penalty grows (DAPO); 0: no penalty.
    overlong_buffer: int = 4096
    overlong_factor: float = 1.0  # Length penalty of a response that reaches the length limit.

    total_steps: int = 200  # Number of training steps; 0: only evaluate.
    train_batch_size: int = 512  # Number of prompts per step.
    lr_warmup_steps: int = 10  # Number of steps in which the learning rate rises linearly to --lr.

    val_every: int = 10  # Number of steps between evaluations; 0: evaluate only before and after training.
    val_before_train: bool = True  # Evaluate before the first step.
    val_n: int = 1  # Number of samples per validation row (the k of mean@k, maj@k and pass@k).
    val_temperature: float = 1.0  # Sampling temperature in evaluations; 0: greedy decoding.
    val_top_p: float = 0.7  # Nucleus sampling (top-p) in evaluations.
    # Evaluate with greedy decoding as well, with one sample per row (val/<data_source>/greedy).
    val_greedy: bool = False

    # Number of steps between checkpoints; 0: only after the last step, or if the run stops or fails.
    save_every: int = 20
    keep_checkpoints: int = 2  # Number of newest checkpoints to keep; 0: all.
    # Whether to resume: never; auto, from the newest checkpoint in --out-dir if there is one.
    resume: Literal["never", "auto"] = "never"
    # Number of samples per step and data source that are written to samples.jsonl, in whole groups.
    samples_per_step: int = 8
    tensorboard: bool = False  # Write the metrics for TensorBoard as well, to tensorboard/ in --out-dir.
    # Send the metrics to Weights & Biases as well (project WANDB_PROJECT, by default "fapo").
    wandb: bool = False
    dry_run: bool = False  # Check the configuration and the data, print the configuration, and exit.

    # Device of the policy; auto: GPUs if the Ray cluster has any.
    device: Literal["auto", "cpu", "cuda"] = "auto"
    # Number of processes (ranks) over which FSDP2 shards the policy; each is a Ray actor with a GPU.
    policy_ranks: int = 1
    policy_gpu_share: float = 1.0  # Fraction of a GPU for each rank of the policy.
    # Keep the weights and the optimizer state of the ranks in host memory, which is slower.
    policy_offload: bool = False
    max_restarts: int = 3  # Number of times that ranks which died are restarted from the newest checkpoint.
    # Number of CPU threads of torch; 0: torch's default. 1 is fastest for tiny models.
    num_threads: int = 0

    # Settings that must be above 0 (all other numbers may be 0), and those that may be negative.
    must_be_positive = (
        *reward_loop.RewardOptions.must_be_positive,
        *("train_batch_size", "mini_batch_size", "max_response_length", "max_grad_norm", "temperature"),
        *("tis_cap", "rollout_batch_size", "rollout_timeout", "rollout_servers", "rollout_tensor_parallel"),
        *("rollout_gpu_share", "policy_gpu_share", "policy_ranks", "val_n", "val_top_p"),
    )
    may_be_negative = ("entropy_coef", "seed")

    def check(self) -> None:
        """Raise ValueError for settings that would fail late or do harm silently."""
        if self.group_size < 2:
            raise ValueError(f"--group-size {self.group_size} must be at least 2: samples are compared")
        if not self.clip_c > 1:
            raise ValueError(f"--clip-c {self.clip_c} must be above 1: wrong answers have no gradient below")
        if not (self.total_steps or self.val_file):
            raise ValueError("--total-steps 0 only evaluates: pass --val-file")
        if not self.lora_rank and self.lora_alpha != Config.lora_alpha:
            raise ValueError(f"--lora-alpha {self.lora_alpha} has no effect without --lora-rank")
        if not self.lora_rank and self.lora_targets != Config.lora_targets:
            targets = " ".join(self.lora_targets)
            raise ValueError(f"--lora-targets {targets} has no effect without --lora-rank")
        for name in ("tensorboard", "wandb"):
            if getattr(self, name) and not find_spec(name):
                raise ValueError(f"--{name}: the package is not installed; run: pip install {name}")
        terms = parse_terms(self.reward_terms)
        if bool(terms) != (self.advantage == "terms"):
            raise ValueError("--reward-terms and --advantage terms need each other: pass --advantage terms "
                             "--reward-terms acc=1 flawed_positive=-0.5")  # fmt: skip
        if terms and self.overlong_buffer and "overlong_penalty" not in terms:
            raise ValueError("--reward-terms lacks the length penalty: add overlong_penalty=1, or pass "
                             "--overlong-buffer 0")  # fmt: skip
        length_penalty_of(self)
        if not self.rollout_fn and self.rollout_kwargs != "{}":
            raise ValueError("--rollout-kwargs has no effect without --rollout-fn")
        if not self.rollout_fn and self.rollout_timeout != Config.rollout_timeout:
            raise ValueError("--rollout-timeout has no effect without --rollout-fn")
        if self.overlap and (self.rollout == "hf" or self.reward_mode == "colocate"):
            raise ValueError("--overlap does not work with --rollout hf or --reward-mode colocate")
        self.check_rewards()

    def policy_servers(self) -> genrm_server.Config:
        """Return the configuration of the servers of --rollout vllm."""
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

    def resolved(self, gpus: float) -> "Config":
        """Return this configuration with every "auto" replaced. gpus: how many GPUs Ray has."""
        device = self.device
        if device == "auto":
            device = "cuda" if gpus else "cpu"
        in_process = device == "cpu" and self.policy_ranks == 1
        rollout = self.rollout
        if rollout == "auto":
            rollout = "hf" if in_process and not self.overlap else "vllm"
        if rollout == "hf" and not in_process:
            raise ValueError("--rollout hf needs the policy in the trainer's process (CPU, one rank): pass "
                             "--rollout vllm")  # fmt: skip
        tis_cap = self.tis_cap
        if self.overlap and tis_cap is None:
            tis_cap = 2.0
        return replace(self, device=device, rollout=rollout, tis_cap=tis_cap)


# ---- the algorithm


def train(config: Config) -> Path | None:
    """Train a policy from the first step, or from the newest checkpoint, to the last step.

    Everything random depends on the seed, the step and the number of prompts drawn so far. So a run that was
    stopped and is resumed equals the uninterrupted run (exactly so on CPU with --rollout hf).

    Returns:
        The folder of the last checkpoint, or None after a dry run.
    Raises:
        ValueError: The configuration, the data or the model does not fit.
        RuntimeError: The run must stop: too few verdicts, a loss that is not finite, rollouts from weights
            that are not the policy's, or a checkpoint that cannot be written.
    """
    with Run(config) as run:

        def collect(batch: Batch) -> None:  # with --overlap in a thread, during the update of the step before
            while batch.needs_prompts(run.config):  # once, unless --dynamic-sampling replaces groups
                prompts = draw_prompts(run, batch)
                rollouts = roll_out(run, batch, prompts)  # each goes to its reward function when it ends
                scored = await_rewards(run, batch, rollouts)
                batch.groups_to_train += compute_group_advantages(run, batch, scored)

        for step in run.steps(evaluate):  # evaluates whenever an evaluation is due
            with run.protected_step():  # if a rank dies, the run continues from the newest checkpoint
                batch = next_batch(run, step, collect)

                run.hold_interrupts()  # from here on Ctrl-C waits until the step is logged and saved
                run.log.samples(step, "train", batch.groups, run.eos_ids, run.decode)
                lr = config.lr * min(1.0, step / max(config.lr_warmup_steps, 1))
                max_logprob_diff = config.max_logprob_diff * (1 + batch.staleness)
                started = time.perf_counter()
                metrics = run.policy.update(batch.groups_to_train, lr, max_logprob_diff)
                metrics |= {"actor/lr": lr, "time/update": time.perf_counter() - started}
                run.count_step(step, batch.num_prompts_drawn)  # even if something fails from here on

                metrics |= run.sync_weights()
                run.log_step(batch.metrics | metrics)
                run.save_if_due()
    return run.result


# ---- the parts of a step, in the order in which a sample passes them


@dataclass
class Batch:
    """The samples of a training step, or of an evaluation."""

    step: int
    temperature: float
    top_p: float = 1.0
    groups: list[list[Sample]] = field(default_factory=list)  # one group of samples per prompt
    groups_to_train: list[list[Sample]] = field(default_factory=list)
    rounds: int = 0  # how often prompts were drawn; more than once only with --dynamic-sampling
    num_prompts_drawn: int = 0  # by the whole run, up to the newest round of this batch
    staleness: int = 0  # age of the weights that it was sampled from, in steps
    metrics: dict = field(default_factory=dict)
    times: Counter = field(default_factory=Counter)
    rolled_out: threading.Event = field(default_factory=threading.Event)  # nothing more will be generated

    def needs_prompts(self, config: Config) -> bool:
        if not config.dynamic_sampling:
            return self.rounds == 0
        return self.rounds <= config.max_refills and self.num_missing(config) > 0

    def num_missing(self, config: Config) -> int:
        return config.train_batch_size - len(self.groups_to_train)


@dataclass
class PrefetchedStep:
    """A step whose batch a thread collects during the update of the step before (--overlap)."""

    rolled_out: threading.Event  # the batch's; also set if collecting it failed
    batch: Future


def next_batch(run: Run, step: int, collect) -> Batch:
    """Collect the batch of a step: its samples with their rewards, advantages and metrics.

    With --overlap it was prefetched, and the next step's rollouts begin when this step's have ended.
    """
    if not run.config.overlap:
        return collect_batch(run, Batch(step, run.config.temperature), collect)
    staleness = int(run.prefetched is not None)
    current = run.prefetched or start_prefetch(run, step, collect)
    current.rolled_out.wait()
    if current.batch.done():
        current.batch.result()  # raises if collecting failed
    run.prefetched = None
    if step < run.config.total_steps:
        run.prefetched = start_prefetch(run, step + 1, collect)
    batch = current.batch.result()
    batch.staleness = batch.metrics["rollout/staleness"] = staleness
    return batch


def start_prefetch(run: Run, step: int, collect) -> PrefetchedStep:
    batch = Batch(step, run.config.temperature)
    pool = ThreadPoolExecutor(1, f"step {step} ")
    future = pool.submit(collect_batch, run, batch, collect)
    pool.shutdown(wait=False)  # the thread ends when the batch is complete
    future.add_done_callback(lambda _: batch.rolled_out.set())
    return PrefetchedStep(batch.rolled_out, future)


def collect_batch(run: Run, batch: Batch, collect) -> Batch:
    """Collect a batch, settle which groups the update gets (at least one), and compute metrics."""
    collect(batch)
    groups = batch.groups_to_train
    if run.config.dynamic_sampling and groups:  # --advantage terms divides by the deviation within all groups
        set_advantages(groups, run.config, run.decode)
    if not groups:  # the update then compares sampler and policy on this group, and trains on nothing
        groups = batch.groups[-1:]
    batch.groups_to_train = without_failures(groups) or without_failures(batch.groups)[-1:]
    batch.metrics = batch_metrics(batch, run.config, run.eos_ids)
    return batch


def draw_prompts(run: Run, batch: Batch) -> list[tuple[dict, int]]:
    """Draw the rows of a round, each with the number of samples to take."""
    config = run.config
    rows = draw(run.train_rows, run.num_prompts_drawn, batch.num_missing(config), config.seed)
    run.num_prompts_drawn += len(rows)
    batch.num_prompts_drawn = run.num_prompts_drawn  # noted now, because a prefetch may draw more
    batch.rounds += 1
    return [(row, config.group_size) for row in rows]


def draw(rows: list, first: int, count: int, seed: int) -> list:
    """Return rows `first` to `first + count` of an endless stream of epochs, each newly shuffled."""
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

    Each sample, or each group if the reward function sees groups, is submitted for scoring when it ends.
    """
    config = run.config
    started = time.perf_counter()
    groups = [[Sample(row, row["prompt_ids"]) for _ in range(count)] for row, count in prompts]
    samples = list(chain(*groups))
    units = groups  # what is scored together
    if not run.rewards.job.sees_group:
        units = [[sample] for sample in samples]
    unit_of_running = {id(sample): unit for unit in units for sample in unit}

    def finished(sample: Sample) -> None:
        sample.text = run.decode(sample.response_ids)
        unit = unit_of_running.pop(id(sample))
        has_ended = not any(id(other) in unit_of_running for other in unit)
        unit = [other for other in unit if not other.failure]  # a failed rollout has no response to score
        if has_ended and unit and config.reward_mode == "standalone":
            verdicts = run.rewards.submit_group([scoring_row(other, batch.step) for other in unit])
            for other, verdict in zip(unit, verdicts):
                other.verdict = verdict
        progress.update()

    options = dict(
        max_response_length=config.max_response_length,
        temperature=batch.temperature,
        top_p=batch.top_p,
        rollout_batch_size=config.rollout_batch_size,
        eos_ids=run.eos_ids,
        on_finished=finished,
    )
    seed = config.seed  # an evaluation draws no prompts, and takes the same seed each time
    if batch.rounds:
        seed = config.seed * 1_000_003 + batch.step
    if batch.rounds > 1:
        seed = random.Random(f"{seed}/refill {batch.rounds}").getrandbits(32)
    with tqdm(total=len(samples), desc=f"step {batch.step}", leave=False, disable=None) as progress:
        if config.rollout_fn:
            run.rollouts.roll_out(
                groups, model=getattr(run.policy, "model", None), servers=run.servers, seed=seed,
                step=batch.step, stop=run.cancelled, **options)  # fmt: skip
        elif run.servers:
            rollout_vllm(run.servers, samples, stop=run.cancelled, **options)
        else:
            rollout_hf(run.policy.model, samples, seed=seed, **options)
    batch.times["time/rollout"] += time.perf_counter() - started
    if not config.dynamic_sampling:  # otherwise verdicts decide whether more is generated
        batch.rolled_out.set()
    return groups


def scoring_row(sample: Sample, step: int) -> dict:
    """Return what the reward loop needs to score a sample."""
    row = sample.row | {"response": sample.text, "response_length": len(sample.response_ids), "step": step}
    row["turns"] = sample.turns or [{"who": "policy", "text": sample.text}]
    if sample.turns:
        row["extra_info"] = (row["extra_info"] or {}) | sample.info
        row["num_turns"] = len(sample.turns) + 1  # verl counts the prompt as a turn
    return row


def await_rewards(run: Run, batch: Batch, groups: list[list[Sample]]) -> list[list[Sample]]:
    """Wait for the results of these samples and store them in `Sample.result`. Returns the groups."""
    started = time.perf_counter()
    ended = without_failures(groups)  # samples whose rollout failed have their results
    samples = list(chain(*ended))
    if run.config.reward_mode == "standalone":
        verdicts = [sample.verdict for sample in samples]
        while wait(verdicts, timeout=1.0).not_done:
            if run.cancelled.is_set():
                raise RuntimeError("interrupted while waiting for rewards")
        results = [verdict.result() for verdict in verdicts]
    else:
        run.policy.release_memory()  # the judges, which were asleep, need it
        rows = []
        for number, group in enumerate(ended):
            rows += [scoring_row(sample, batch.step) | {"group": number} for sample in group]
        results = run.rewards.score_batch(rows)
    for sample, result in zip(samples, results):
        sample.result = result
        sample.verdict = None
    batch.times["time/reward_wait"] += time.perf_counter() - started
    return groups


def without_failures(groups: list[list[Sample]]) -> list[list[Sample]]:
    """Return the samples whose rollout has not failed, without the groups that have none."""
    ended = [[sample for sample in group if not sample.failure] for group in groups]
    return [group for group in ended if group]


def compute_group_advantages(run: Run, batch: Batch, groups: list[list[Sample]]) -> list[list[Sample]]:
    """Set the advantages of a round's samples. Returns the groups to train on.

    These are all groups, or with --dynamic-sampling those that have a learning signal.
    """
    batch.groups += groups
    is_first = batch.step == 1 and batch.rounds == 1
    config = run.config
    groups = set_advantages(groups, config, run.decode, config.dynamic_sampling, is_first)
    check_verdicts(run, batch, "train")
    return groups


def check_verdicts(run: Run, batch: Batch, split: str) -> None:
    """Raise RuntimeError if too many samples have no verdict."""
    samples = list(chain(*batch.groups))
    limit = run.config.max_no_verdict_rate
    rate = no_verdict_rate([sample.result for sample in samples])
    if rate > limit or all(sample.failure for sample in samples):
        run.log.samples(batch.step, split, batch.groups, run.eos_ids, run.decode)  # they explain it
        first = next(sample for sample in samples if sample.result["reward_score"] is None)
        what = "is the reward model up?"
        if first.failure:
            what = "failed rollouts have no reward."
        raise RuntimeError(
            f"step {batch.step}: {rate:.0%} of the samples that needed a verdict have none "
            f"(--max-no-verdict-rate {limit:g}); {what} The first one: {first.result['status']}, "
            f"{first.result['reward_extra_info']}"
        )


# ---- evaluation


def evaluate(run: Run) -> None:
    """Evaluate the policy after `run.step` steps."""
    config, step = run.config, run.step
    groups = sample_validation(run, config.val_temperature)
    metrics = validation_metrics(groups)
    if config.val_greedy:
        metrics |= validation_metrics(sample_validation(run, 0.0, 1), "greedy")
    run.log.samples(step, "val", groups, run.eos_ids, run.decode)
    run.log.metrics({"step": step} | metrics)  # last, because a step with these metrics counts as evaluated


def sample_validation(run: Run, temperature: float, count: int | None = None) -> list[list[Sample]]:
    """Sample and score responses to the validation rows: `count` per row, or the row's own number."""
    batch = Batch(run.step, temperature, run.config.val_top_p)
    rollouts = roll_out(run, batch, [(row, count or n) for row, n in run.val_rows])
    batch.groups = await_rewards(run, batch, rollouts)
    check_verdicts(run, batch, "val")
    return batch.groups


# ---- the command line

# The settings by the groups of --help. A name that ends in _ stands for all settings that begin with it.
GROUPS = {
    "data": "val_file chat_template_kwargs max_prompt_length seed",
    "rewards": """reward_fn reward_kwargs reward_mode num_workers sync_processes timeout max_in_flight max_rpm
        http_retries max_no_verdict_rate""",
    "judge": "genrm genrm_ router_address reward_model_",
    "rollout": """rollout rollout_ group_size temperature max_response_length overlap max_logprob_diff""",
    "algorithm": """advantage credit loss reward_terms prefix_ clip_ tis_cap kl_coef entropy_coef overlong_
        dynamic_sampling max_refills max_idle_steps""",
    "optimizer": """total_steps train_batch_size mini_batch_size lr lr_warmup_steps adam_betas weight_decay
        max_grad_norm max_tokens_per_micro_batch gradient_checkpointing""",
    "model": "max_positions trust_remote_code lora_",
    "evaluation": "val_",
    "checkpoints": "save_every keep_checkpoints resume samples_per_step tensorboard wandb dry_run",
    "hardware": "device policy_ max_restarts num_threads",
}


def group_of(setting: Field) -> str:
    if setting.default is MISSING:
        return "required"
    for prefix in (setting.name, *accumulate(f"{part}_" for part in setting.name.split("_"))):
        for group, names in GROUPS.items():
            if prefix in names.split():  # the whole name first: val_file is data, all other val_ evaluation
                return group
    return "other"


def help_texts(config: type) -> dict[str, str]:
    """Read the help of each setting: the comment at the end of its line, or else those above it."""
    texts = {}
    for kind in reversed(config.__mro__[:-1]):
        above = []
        for line in inspect.getsource(kind).splitlines():
            code, _, comment = line.partition("# ")
            setting = re.match(r"    (\w+): ", code)
            if setting:
                texts[setting[1]] = comment or " ".join(above)
            if code.strip() or not comment:
                above = []
            else:
                above.append(comment)
    return texts


def parse_command_line(config: type = Config, args: list[str] | None = None) -> Config:
    """Parse the command line. --help shows the settings in groups, the required ones first."""
    hints = get_type_hints(config, include_extras=True)
    texts = help_texts(config)
    groups = {group: [] for group in ("required", *GROUPS, "other")}
    for setting in fields(config):
        hint = Annotated[hints[setting.name], tyro.conf.arg(help=texts[setting.name])]
        groups[group_of(setting)].append((setting.name, hint, field(default=setting.default)))
    boxes = []
    for group, settings in groups.items():
        if settings:
            boxes.append((group, make_dataclass(group, settings, kw_only=True)))
    grouped = tyro.conf.OmitArgPrefixes[make_dataclass("Grouped", boxes)]
    parsed = tyro.cli(grouped, description=__doc__, args=args)
    values = {}
    for box in vars(parsed).values():
        values |= vars(box)
    return config(**values)


def main() -> None:
    config = parse_command_line()
    try:
        models = [config.model, *reward_loop.named("genrm", config.genrm).values()]
        if all(Path(name).is_dir() for name in models):  # without a hub name nothing may ask a hub
            os.environ["HF_HUB_OFFLINE"] = "1"  # for child processes; this process has read it already
            huggingface_hub.constants.HF_HUB_OFFLINE = True
        target = train(config)
        print(f"done: {target or 'dry run'}")
    except KeyboardInterrupt:
        raise SystemExit(130) from None
    except RuntimeError as error:
        print(f"error: {error}", file=sys.stderr)
        raise SystemExit(1) from error
    except (ValueError, OSError) as error:  # wrong input, or a failure of the machine
        print(f"error: {error}", file=sys.stderr)
        raise SystemExit(2) from error


if __name__ == "__main__":
    main()
