"""The settings of a training run. This file imports no torch, so --help is quick.

    config = command_line.parse_command_line(Config)
    config = Config(model="PATH", train_file="FILE", out_dir="outputs/first", total_steps=20)

To add a setting, add a line to PolicyOptions if the policy or the loss reads it, and to Config otherwise.
The comment on or above this line is the help text; docs/make_settings.py copies it to docs/settings.md.
Needs reward_loop.py, reward_worker.py and command_line.py; algorithm.py, policy.py and causal_lm.py to check
a run, and genrm_server.py to describe its servers.
"""

import os
import re
from dataclasses import dataclass, fields, replace
from importlib.util import find_spec
from pathlib import Path
from typing import Annotated, Literal

from tyro.conf import arg

import reward_loop
from command_line import check_unused, json_object, split_arguments
from reward_worker import flag

# The setting on the left -> the settings that have no effect without it.
ONLY_WITH = {
    "lora_rank": "lora_alpha lora_targets",
    "rollout_fn": "rollout_kwargs rollout_timeout",
    "dynamic_sampling": "max_refills",
    "val_file": "val_n val_greedy",
    "overlong_buffer": "overlong_factor",
}
# The settings of the policy's vLLM servers, which --rollout hf does not start.
OF_SERVERS = "rollout_servers rollout_tensor_parallel rollout_gpu_share rollout_cpus rollout_vllm_args"


@dataclass(kw_only=True)
class PolicyOptions:
    """Settings of the policy and its training. The defaults are the paper's for FAPO-7B."""

    model: str  # Policy model: a Hugging Face folder, or a Hub name such as Qwen/Qwen2.5-Math-7B.
    # Run the Python code that comes with --model, also on its vLLM servers, but not the judge's code.
    trust_remote_code: bool = False
    max_positions: int = 0  # New value of the model's max_position_embeddings; 0: keep the old value.
    temperature: float = 1.0  # Sampling temperature of rollouts; the loss uses it as well.
    max_response_length: int = 8192  # Maximum length of a response in tokens; longer responses are cut off.
    mini_batch_size: int = 32  # Maximum number of prompts per optimizer update.

    # How rewards become advantages: grpo, dr_grpo, or your own function FILE:NAME, such as
    # recipes/advantages.py:vppo; docs/algorithms.md compares them.
    advantage: str = "grpo"
    advantage_kwargs: str = "{}"  # JSON object of arguments for every call of --advantage.
    # Policy loss: PPO's clipped loss with one ratio per token (clip) or per sequence (gspo),
    # log-probabilities weighted by the clipped ratio (cispo), or your own function FILE:NAME.
    loss: str = "clip"
    loss_kwargs: str = "{}"  # JSON object of arguments for every call of --loss.
    # The ratio is clipped from below at 1 minus this number; default: 0.2 for clip, 0.0003 for gspo, 1 for
    # cispo.
    clip_low: float | None = None
    # The ratio is clipped from above at 1 plus this number (clip-higher); default: 0.28 for clip, 0.0004 for
    # gspo, 4 for cispo.
    clip_high: float | None = None
    # Upper bound of the ratio for negative advantages (dual clip of --loss clip), above 1; default: 10.
    clip_c: float | None = None
    # Cap of the importance weights that correct for differences between sampler and policy; default: no
    # correction, or 2 with --overlap.
    tis_cap: float | None = None
    # Take the log-probabilities before the step from the sampler, except in the first update of each step.
    # This saves a forward pass, and the loss corrects for differences between sampler and policy by
    # importance sampling.
    sampler_logprobs: bool = False
    # Weight of the KL divergence from the initial --model; 0: no KL term, and no second model in memory.
    kl_coef: float = 0.0
    entropy_coef: float = 0.0  # Weight of the entropy bonus.

    lr: float = 1e-6  # Learning rate of AdamW, constant after the warm-up.
    # Decay rates (betas) of AdamW; 0.9 0.95 is more stable in short runs.
    adam_betas: tuple[float, float] = (0.9, 0.999)
    weight_decay: float = 0.1  # Weight decay of AdamW.
    max_grad_norm: float = 1.0  # Gradient norm above which gradients are scaled down.
    # Rank of the LoRA adapters, which need 5 to 10 times the --lr; 0: train all weights, without adapters.
    lora_rank: int = 0
    lora_alpha: int = 0  # LoRA alpha: adapters are scaled by alpha / rank; 0: 2 x rank.
    # Layers with LoRA adapters: all-linear, or names such as q_proj v_proj.
    lora_targets: tuple[str, ...] = ("all-linear",)
    # Maximum number of tokens per forward and backward pass, including padding; a longer sequence gets a
    # separate pass. 0: 16384 on a GPU, 2048 on a CPU.
    max_tokens_per_micro_batch: int = 0
    gradient_checkpointing: bool = False  # Recompute activations in the backward pass to save memory.
    # Compile the model's layers with torch.compile. Intended for --rollout vllm on GPUs.
    compile_layers: bool = False
    # Round the operands of the output layer's matrix products to bf16; sums stay float32. Intended for
    # --rollout vllm on GPUs.
    bf16_head: bool = False
    seed: int = 0  # Random seed for the data order, sampling and new adapters.


@dataclass(kw_only=True)
class Config(reward_loop.RewardOptions, PolicyOptions):
    """Settings of a training run, including those of the reward loop and of the policy."""

    # Training data: Parquet or JSONL files in the format that prepare_data.py writes.
    train_file: Annotated[str | tuple[str, ...], arg(metavar="FILE [FILE ...]")]
    # Output directory of the run: config.json, metrics.jsonl, samples.jsonl, report.html, checkpoints/.
    out_dir: str
    # Validation data in the format of --train-file; FILE:4 samples 4 responses per row of FILE. Default: no
    # evaluation.
    val_file: tuple[str, ...] = ()
    # JSON object of arguments for the policy's chat template, such as '{"enable_thinking": false}'.
    chat_template_kwargs: str = "{}"
    # Maximum length of a prompt in tokens; rows with longer prompts are dropped before the first step.
    max_prompt_length: int = 2048

    # When to score samples: each sample when its rollout ends (standalone), or all samples after the last
    # rollout, so that --genrm can sleep during rollouts (colocate).
    reward_mode: Literal["standalone", "colocate"] = "standalone"
    # Stop the run if more than this fraction of the rollouts of a step or an evaluation failed, or of the
    # samples that need a verdict got none. If fewer than 20 samples of a step need one, those of the latest
    # steps count as well (docs/glossary.md#statuses).
    max_no_verdict_rate: float = 0.5

    # Where to sample rollouts: in the trainer's process (hf) or on vLLM servers (vllm); auto chooses hf on a
    # CPU with one rank unless --overlap is set, and vllm otherwise.
    rollout: Literal["auto", "hf", "vllm"] = "auto"
    # Rollout function FILE:NAME, an async function for multi-turn rollouts, tools or environments; see
    # docs/rollouts.md.
    rollout_fn: str | None = None
    rollout_kwargs: str = "{}"  # JSON object of arguments for every call of --rollout-fn.
    # Time limit of --rollout-fn per sample in seconds, excluding the policy's generation time.
    rollout_timeout: float = 600.0
    rollout_servers: int = 1  # Number of vLLM servers of the policy.
    rollout_tensor_parallel: int = 1  # Number of GPUs per vLLM server of the policy.
    # Fraction of a GPU for each vLLM server of the policy; below 1, other processes can use the rest.
    rollout_gpu_share: float = 1.0
    # CPU cores for the vLLM servers of the policy, such as 0,1; default: all cores, divided evenly.
    rollout_cpus: str = ""
    # Additional arguments for the policy's vLLM servers, such as --rollout-vllm-args="--max-num-seqs 64".
    rollout_vllm_args: str = ""
    rollout_batch_size: int = 512  # Maximum number of sequences that a sampler generates at once.
    group_size: int = 8  # Number of samples per prompt.
    # Roll out and score the next step during the update, with weights that are one step old. Needs
    # --rollout vllm and --reward-mode standalone.
    overlap: bool = False
    # Stop the run if rollout/logprob_diff exceeds this bound, or twice this bound if the samples are from
    # weights that are one step old (--overlap).
    max_logprob_diff: float = 0.2

    # Replace groups without a learning signal with groups of new prompts (DAPO).
    dynamic_sampling: bool = False
    max_refills: int = 10  # Maximum number of times per step that --dynamic-sampling draws more prompts.
    # Stop the run after this many consecutive steps without a learning signal; 0: never.
    max_idle_steps: int = 10
    # Number of tokens before the length limit in which the length penalty grows (DAPO); 0: no penalty.
    overlong_buffer: int = 4096
    overlong_factor: float = 1.0  # Maximum length penalty, which applies at the length limit.

    total_steps: int = 200  # Number of training steps; 0: only evaluate.
    train_batch_size: int = 512  # Number of prompts per step.
    lr_warmup_steps: int = 10  # Number of steps over which the learning rate rises linearly to --lr.

    val_every: int = 10  # Number of steps between evaluations; 0: evaluate only before and after training.
    val_before_train: bool = True  # Evaluate before the first step.
    val_n: int = 1  # Number of samples per validation row (the k of mean@k, maj@k and pass@k).
    val_temperature: float = 1.0  # Sampling temperature in evaluations; 0: greedy decoding.
    val_top_p: float = 0.7  # Probability mass (top-p) of nucleus sampling in evaluations.
    # Also evaluate with greedy decoding, with one sample per row (val/<data_source>/greedy).
    val_greedy: bool = False

    # Number of steps between checkpoints; 0: save only after the last step, or if the run stops or fails.
    save_every: int = 20
    keep_checkpoints: int = 2  # Number of newest checkpoints to keep; 0: keep all.
    # Resume from the newest checkpoint in --out-dir, if there is one (auto), or reject an --out-dir that
    # contains checkpoints, or the metrics of a run whose checkpoints are gone (never).
    resume: Literal["never", "auto"] = "never"
    # Number of samples to write to samples.jsonl per step and data source: complete groups during training,
    # the first sample of each group in an evaluation.
    samples_per_step: int = 8
    tensorboard: bool = False  # Also write the metrics for TensorBoard, to tensorboard/ in --out-dir.
    # Also send the metrics, and the samples of evaluations as a table, to Weights & Biases, to the project
    # WANDB_PROJECT (default: fapo).
    wandb: bool = False
    dry_run: bool = False  # Check the configuration and the data, print the configuration, and exit.

    # Device of the policy; auto: cuda if the Ray cluster has GPUs and PyTorch is a build for GPUs, otherwise
    # cpu.
    device: Literal["auto", "cpu", "cuda"] = "auto"
    # Number of processes (ranks) over which FSDP2 shards the policy. On GPUs, each rank is a Ray
    # actor with --policy-gpu-share of a GPU, and two ranks never share a GPU.
    policy_ranks: int = 1
    policy_gpu_share: float = 1.0  # Fraction of a GPU for each rank of the policy.
    # Keep the weights and optimizer state of the ranks in host memory, which saves GPU memory but is slower.
    policy_offload: bool = False
    # Maximum number of times that the ranks are restarted from the newest checkpoint after a rank has died.
    max_restarts: int = 3
    # Number of CPU threads that torch uses (1 is fastest for tiny models). 0: torch's default, or 1 if there
    # are several ranks. With --policy-offload, 0 divides the node's cores among its ranks.
    num_threads: int = 0

    # Settings that must be above 0 (all other numbers may be 0), that may be negative, or that inf turns off.
    must_be_positive = (
        *reward_loop.RewardOptions.must_be_positive,
        *"train_batch_size mini_batch_size max_response_length max_grad_norm temperature tis_cap".split(),
        *"rollout_batch_size rollout_timeout rollout_servers rollout_tensor_parallel".split(),
        *"rollout_gpu_share policy_gpu_share policy_ranks val_n val_top_p".split(),
    )
    may_be_negative = ("entropy_coef", "seed")
    may_be_infinite = (
        *reward_loop.RewardOptions.may_be_infinite,
        *"rollout_timeout max_grad_norm max_logprob_diff clip_high clip_c tis_cap".split(),
    )

    def check(self) -> None:
        """Raise ValueError for settings that would fail late or silently do harm."""
        for field in fields(self):  # On the command line, these are always tuples.
            value = getattr(self, field.name)
            if isinstance(field.default, tuple) and isinstance(value, str):
                raise ValueError(f"{field.name}={value!r}: must be a tuple, such as ({value!r},)")
        if not self.out_dir:
            raise ValueError("--out-dir '': is empty; pass a folder for this run")
        if self.group_size < 2:
            raise ValueError(
                f"--group-size {self.group_size}: must be at least 2, because each sample is "
                "compared with other samples of its prompt"
            )
        if self.clip_c is not None and not self.clip_c > 1:
            raise ValueError(
                f"--clip-c {self.clip_c}: must be above 1, or wrong answers would get no gradient"
            )
        if self.val_top_p > 1:
            raise ValueError(f"--val-top-p {self.val_top_p}: must be at most 1, because it is a probability")
        if self.policy_gpu_share > 1:
            raise ValueError(
                f"--policy-gpu-share {self.policy_gpu_share}: must be at most 1; for more GPUs, raise "
                "--policy-ranks"
            )
        if not all(0 <= beta < 1 for beta in self.adam_betas):
            betas = " ".join(map(str, self.adam_betas))
            raise ValueError(f"--adam-betas {betas}: both must be at least 0 and below 1, as in 0.9 0.95")
        if not (self.total_steps or self.val_file):
            raise ValueError("--total-steps 0: an evaluation needs validation data; pass --val-file FILE")
        for needed, names in ONLY_WITH.items():
            if not getattr(self, needed):
                check_unused(self, names.split(), flag(needed))
        found = re.search("--kv.(transfer.config|offloading.backend(?![= ]+native))", self.rollout_vllm_args)
        if found:
            raise ValueError(
                f"--rollout-vllm-args {found[0]}: vLLM cannot empty every store of keys and values, so those "
                "of old weights would be used after an update; pass --kv-offloading-size GB alone, which "
                "keeps them in the CPU's memory"
            )
        if self.rollout != "auto" or self.device == "cpu":  # Otherwise, the number of GPUs decides later.
            if self.resolved(0).rollout == "hf":  # This checks what the kind of rollout requires.
                check_unused(self, OF_SERVERS.split(), "--rollout vllm")
        check_loggers(self)
        self.make_job()  # This checks all numbers and the settings of the rewards, and loads the function.
        for name in ("advantage_kwargs", "loss_kwargs"):
            json_object(name, getattr(self, name))
        from algorithm import check_functions, overlong_penalty  # here, because it imports torch

        check_functions(self)
        if self.overlong_buffer:  # This checks that the buffer is not too large.
            overlong_penalty(0, self.max_response_length, self.overlong_buffer, self.overlong_factor)
        if self.overlap and (self.rollout == "hf" or self.reward_mode == "colocate"):
            raise ValueError(
                "--overlap: does not work with --rollout hf or --reward-mode colocate; pass "
                "--rollout vllm and --reward-mode standalone"
            )

    def server_configs(self, sleep_mode: bool = False) -> dict:
        """Return the judges' configurations, with their logs in the output directory."""
        logs = Path(self.out_dir, "genrm_logs")
        configs = super().server_configs(sleep_mode)
        return {name: replace(config, log_dir=logs) for name, config in configs.items()}

    def policy_server_config(self):
        """Return the genrm_server.Config of the servers of --rollout vllm."""
        import genrm_server

        return genrm_server.Config(
            self.model,
            num_servers=self.rollout_servers,
            tensor_parallel_size=self.rollout_tensor_parallel,
            gpu_share=self.rollout_gpu_share,
            cpus=self.rollout_cpus,
            queue_timeout=900,
            log_dir=Path(self.out_dir, "rollout_logs"),
            vllm_args=split_arguments("rollout_vllm_args", self.rollout_vllm_args),
            flag_prefix="rollout-",
        )

    def resolved(self, gpus: float) -> "Config":
        """Return this configuration with every "auto" replaced, given the number of GPUs (count_gpus).

        Raises ValueError if a setting does not fit the kind of rollout.
        """
        device = self.device
        if device == "auto":
            device = "cuda" if gpus else "cpu"
        in_process = device == "cpu" and self.policy_ranks == 1
        rollout = self.rollout
        if rollout == "auto":
            rollout = "hf" if in_process and not self.overlap else "vllm"
        if rollout == "hf" and not in_process:
            raise ValueError(
                "--rollout hf: needs the policy in the trainer's process (--device cpu and one "
                "rank); pass --rollout vllm"
            )
        if rollout == "hf" and self.bf16_head:
            raise ValueError(
                "--bf16-head: does not work with --rollout hf, which samples with a float32 head; pass "
                "--rollout vllm, or omit --bf16-head"
            )
        hottest = max(self.temperature, self.val_temperature)
        if rollout == "vllm" and hottest > 2:
            raise ValueError(
                f"--temperature, --val-temperature {hottest:g}: vLLM accepts at most 2; lower it, or pass "
                "--rollout hf (on a CPU)"
            )
        tis_cap = self.tis_cap
        if self.overlap and tis_cap is None:
            tis_cap = 2.0
        return replace(self, device=device, rollout=rollout, tis_cap=tis_cap)


def check_loggers(config: Config) -> None:
    """Raise ValueError if a package is missing, or if W&B has no API key and cannot ask for one."""
    for name in ("tensorboard", "wandb"):
        if getattr(config, name) and not find_spec(name):
            raise ValueError(
                f"--{name}: needs the package {name}, which is not installed; run pip install {name}"
            )
    if not config.wandb or os.environ.get("WANDB_MODE", "online") != "online":
        return
    import wandb  # here, because it takes seconds

    try:
        wandb.login(verify=False)
    except wandb.Error as error:
        raise ValueError(
            f"--wandb: {error} Run wandb login, or set WANDB_API_KEY, or WANDB_MODE=offline to "
            "send the metrics later with wandb sync"
        ) from error
