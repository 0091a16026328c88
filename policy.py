"""The policy: a model and its optimizer in one process, and the samples from which it learns.

    policy = Policy(settings.PolicyOptions(model="PATH"), "PATH", torch.device("cpu"))
    metrics = policy.update(groups, lr=1e-6)           # one pass over the samples of a step, in mini-batches

The losses are in algorithm.py, the forward pass is in causal_lm.py, and sampling is in rollout.py.
docs/plain_grpo.py makes the same update in a script of one page. For several ranks, cluster/ranks.py has a
subclass that overrides `load`, `setup_model`, `all_reduce`, `model_logprobs`, `forward` and `logprobs_of`.
There, `update_mini_batches` gets one rank's share of the samples.
This file needs algorithm.py and causal_lm.py.
Not covered: a critic model, images, several passes over the same samples.
Tensor names end in their shapes: B sequences in a micro-batch, T tokens in the longest response.
"""

import contextlib
import math
import re
import warnings
from collections import Counter
from concurrent.futures import Future
from dataclasses import dataclass, field
from itertools import chain, compress, groupby, pairwise
from pathlib import Path

import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict
from torch.nn.utils import clip_grad_norm_
from transformers.core_model_loading import revert_weight_conversion

from algorithm import MAX_LOG_RATIO, compute_kl_loss, compute_policy_loss, has_gradient_at_zero, loss_function
from causal_lm import (
    FLOAT32_NAMES,
    add_adapters,
    can_share_prompts,
    check_logprobs,
    check_plain_head,
    checkpointed_layers,
    code_files,
    compile_layers,
    count_adapters,
    layers_of,
    load_causal_lm,
    logprobs_and_entropy,
    merged_weights,
    padded,
    set_dtypes,
    without_adapters,
)

# Tokens per forward and backward pass, including padding, if --max-tokens-per-micro-batch is 0.
TOKENS_PER_PASS = {"cpu": 2048, "cuda": 16384}
# The metrics that are means over tokens, and the sums that are divided by the number of tokens.
MEANS = {
    "actor/clip_fraction": "clipped_tokens",
    "actor/approx_kl": "approx_kl_sum",
    "actor/kl_to_reference": "reference_kl_sum",
    "rollout/tis_mean": "tis_sum",
    "rollout/tis_capped": "tis_capped_tokens",
    "rollout/is_mean": "ratio_sum",
}
LAYER = re.compile(r"(.*?\.\d+\.)?")  # Weight names start with the layer, such as model.layers.3.
warnings.filterwarnings("ignore", message="torch.distributed is disabled")  # It is not needed here.


@dataclass
class Sample:
    """One response to one prompt. Each stage of a training step fills in more fields."""

    row: dict  # The row of the data file.
    prompt_ids: list[int]
    response_ids: list[int] = field(default_factory=list)  # These include the end token, if there is one.
    rollout_logprobs: list[float] = field(default_factory=list)  # One per response token, from the sampler.
    text: str = ""  # The decoded response.
    # What the Reward Loop returned: reward_score, reward_extra_info and status.
    result: dict = field(default_factory=dict)
    # None means that the sample has no verdict and is excluded from the loss. If each token has its own
    # advantage, this is the advantage of the last token.
    advantage: float | None = None
    token_advantages: list[float] = field(default_factory=list)  # If empty, all tokens have `advantage`.
    pending_result: Future | None = None  # Set while the sample is being scored.
    # Whether the policy wrote each response token, and so learns from it. If empty, it wrote all of them.
    loss_mask: list[bool] = field(default_factory=list)
    truncated: bool = False  # Whether the response ran out of tokens.
    # A rollout function (trajectory.py) sets the next five fields.
    seed: int | None = None  # The seed of the trajectory, which its group shares.
    turns: list[dict] = field(default_factory=list)  # {"who": "policy", "text": "65+9=?", "tokens": 5}
    info: dict = field(default_factory=dict)  # Additional data for the reward function.
    failure: str = ""  # "error" or "timeout" if the rollout failed; such a sample gets no reward.
    tool_seconds: float = 0.0  # Seconds spent in the rollout function, excluding waits for the policy.
    # Policy.update fills in the next two fields, one log-probability per token, before the first update.
    old_logprobs: torch.Tensor | list[float] | None = field(default=None, compare=False)
    reference_logprobs: torch.Tensor | None = field(default=None, compare=False)

    @property
    def length(self) -> int:
        return len(self.prompt_ids) + len(self.response_ids)

    @property
    def own_tokens(self) -> list[bool]:
        """Whether the policy wrote each token of the response."""
        return self.loss_mask or [True] * len(self.response_ids)

    @property
    def has_turns(self) -> bool:
        """Whether credit goes to turns. In a single turn, credit goes to paragraphs."""
        return len(self.turns) > 1


@dataclass
class MiniBatch:
    """The samples of one optimizer update. With several ranks, each rank has a share of the samples."""

    samples: list[Sample]  # Samples without a gradient are left out.
    # The next two fields are divisors of the loss. They count all samples with a verdict, on all ranks.
    num_tokens: int = 0  # Number of tokens that the policy wrote.
    num_sequences: int = 0  # If this is 0, the update only checks the sampler.


class RanksLost(RuntimeError):
    """A rank has died, and its shard of the policy is lost. The run resumes from its newest checkpoint."""


class Policy:
    """A model and its optimizer.

    Trained weights and the optimizer state are float32. On a GPU, the layers compute in bf16 and the head in
    float32 (TF32), because a bf16 head alone would change log-probabilities by 0.02. With the option
    bf16_head, only the operands of the head's products are bf16, while logits and sums stay float32. The
    model is always in evaluation mode, because with dropout, training and sampling would use different
    policies.

    Args:
        options: settings.PolicyOptions, or any object with the same attributes.
        source: The folder or Hub name to load: options.model, or a checkpoint.
        device: The device that runs the model.

    Raises:
        ValueError: The model's log-probabilities are wrong, or an option does not fit the model.
    """

    is_main_rank = True  # The main rank writes checkpoints and sends weights.
    # True if this process also samples the rollouts. In float32, rollout_logprobs are then exact, so
    # updates after the first use them as the old ones. With sampler_logprobs, they do so for any sampler.
    samples_itself = False
    load_dtype = torch.float32  # The dtype of the loaded weights.

    def __init__(self, options, source: str, device: torch.device):
        self.config = options
        self.device = device
        self.num_updates = 0
        self.max_tokens = options.max_tokens_per_micro_batch or TOKENS_PER_PASS[device.type]
        if device.type == "cuda":
            torch.cuda.set_device(device)
            torch.set_float32_matmul_precision("high")
            # With an attention mask, cuDNN's gradients are NaN for some lengths (pytorch issue 196678).
            torch.backends.cuda.enable_cudnn_sdp(False)
        self.has_adapters = options.lora_rank > 0
        loss_function(options)  # Fail early if the function cannot be loaded.
        self.model = self.load(source)
        self.reference = None
        if options.kl_coef and self.has_adapters:
            self.reference = self.model  # Without its adapters, the model is the reference.
        elif options.kl_coef:
            self.reference = self.load(options.model)
        self.optimizer = self.new_optimizer()

    def new_optimizer(self):
        """Create the optimizer. Any optimizer whose state consists of tensors can be saved and loaded."""
        options = self.config
        return torch.optim.AdamW(
            self.trainable(),
            lr=options.lr,
            betas=options.adam_betas,
            weight_decay=options.weight_decay,
            fused=True,
        )

    def load(self, source: str):
        """Load a model, with adapters if the options ask for them, and check its log-probabilities."""
        options = self.config
        base = options.model if self.has_adapters else source
        model = load_causal_lm(base, self.load_dtype, options.trust_remote_code, options.max_positions)
        if self.has_adapters:
            add_adapters(model, options, source)
        self.setup_model(model)
        if options.gradient_checkpointing:
            layers_of(model, "--gradient-checkpointing")  # Fail early if the model has no such layers.
        if options.compile_layers:
            compile_layers(model)
        check_logprobs(self.model_logprobs, model, source, self.device)
        if options.bf16_head:
            check_plain_head(model, self.device)
        return model

    # ---- methods that the subclass for several ranks overrides; it also overrides `load` and `logprobs_of`

    def setup_model(self, model) -> None:
        """Set the dtypes of a loaded model, and move the model to its device."""
        set_dtypes(model, self.config.lora_rank, self.device.type)
        model.to(self.device)
        model.shares_prompts = can_share_prompts(model)

    def all_reduce(self, sums: Counter) -> Counter:
        """Return the totals of these sums over all processes."""
        return sums

    def model_logprobs(self, model, *arguments):
        """Call causal_lm.logprobs_and_entropy."""
        return logprobs_and_entropy(model, *arguments)

    def forward(self, samples: list[Sample], model=None):
        """Compute log-probabilities and entropies in micro-batches.

        Yields (samples, logprobs, entropy, mask); the last three are B x T. The mask is true on tokens that
        the policy wrote. The other tokens skip the head, and their log-probabilities and entropies are 0.
        `model` is the policy's model by default.
        """
        head_dtype = None
        if self.config.bf16_head:
            head_dtype = torch.bfloat16
        for indices in micro_batches([sample.length for sample in samples], self.max_tokens):
            part = [samples[index] for index in indices]
            counts = [len(sample.response_ids) for sample in part]
            sequences = [sample.prompt_ids + sample.response_ids for sample in part]
            mask = padded([sample.own_tokens for sample in part], self.device, torch.bool)
            own_B_T = None  # Without tokens of others, selecting all tokens would only copy them.
            if any(sample.loss_mask for sample in part):
                own_B_T = mask
            logprobs, entropy = self.model_logprobs(
                model or self.model,
                sequences,
                counts,
                self.config.temperature,
                self.config.entropy_coef != 0,
                head_dtype,
                own_B_T,
            )
            yield part, logprobs, entropy, mask

    # ---- the update

    def update(self, groups: list[list[Sample]], lr: float, max_logprob_diff: float = math.inf) -> dict:
        """Train once on the groups of a step, with one optimizer update per mini-batch.

        Samples without a gradient are skipped: samples without a verdict, and, unless the loss has an entropy
        or KL term or a gradient of its own at advantage 0, samples with advantage 0. The token mean still
        counts every sample with a verdict.

        Returns:
            Metrics. actor/entropy is estimated from the sampler's log-probabilities of these samples.
            rollout/logprob_diff compares sampler and policy on the tokens whose log-probabilities are
            computed before the first optimizer step. Other rates are means over the tokens trained on.

        Raises:
            RuntimeError: Sampler and policy differ by more than max_logprob_diff (the weights are then
                unchanged), or a loss or gradient is not finite.
        """
        batches = mini_batches(groups, self.config)
        metrics = self.update_mini_batches(batches, lr, max_logprob_diff)
        return metrics | {"actor/entropy": entropy_of(groups)}

    def update_mini_batches(self, batches: list[MiniBatch], lr: float, max_logprob_diff: float) -> dict:
        """Do the work of `update` on the result of mini_batches()."""
        for group in self.optimizer.param_groups:
            group["lr"] = lr
        norms = []
        if not batches[0].num_sequences:  # No sample has a gradient.
            sums = self.compare_with_sampler(batches[0].samples)
            check_sampler(sums, max_logprob_diff)
            return self.metrics(sums, norms)
        sums = self.fill_old_logprobs(batches)
        for batch in batches:
            self.optimizer.zero_grad(set_to_none=True)
            found = self.all_reduce(self.accumulate_gradients(batch, is_first_update=not norms))
            sums.update(found)
            if not norms:  # By now, the comparison is complete.
                check_sampler(sums, max_logprob_diff)
            norms.append(self.optimizer_step(found["loss_sum"]))
        return self.metrics(sums, norms)

    def fill_old_logprobs(self, batches: list[MiniBatch]) -> Counter:
        """Fill in the old and the reference log-probabilities before the first update of a step.

        The first mini-batch gets no old log-probabilities here, because its update computes them.
        Returns the sums of compare_with_sampler.
        """
        sums = Counter()
        later = samples_of(batches[1:])
        if self.samples_itself or self.config.sampler_logprobs:
            for sample in later:
                sample.old_logprobs = sample.rollout_logprobs
        else:
            sums = self.compare_with_sampler(later)
        if self.reference is not None:
            with without_adapters(self.reference):
                for sample, logprobs in self.logprobs_of(samples_of(batches), self.reference):
                    sample.reference_logprobs = logprobs
        return sums

    def compare_with_sampler(self, samples: list[Sample]) -> Counter:
        """Fill in old log-probabilities, and sum their distances from the sampler's over all ranks."""
        sums = Counter()
        for sample, logprobs in self.logprobs_of(samples):
            sample.old_logprobs = logprobs
            own = torch.tensor(sample.own_tokens, device=self.device)
            rollout = torch.tensor(sample.rollout_logprobs, device=self.device)
            add_sums(sums, logprob_difference(logprobs[own], rollout[own]))
        return self.all_reduce(as_numbers(sums))

    def accumulate_gradients(self, batch: MiniBatch, is_first_update: bool) -> Counter:
        """Accumulate the gradient of this mini-batch's loss, and return sums for the metrics.

        The loss of a micro-batch is divided by the counts of the whole mini-batch. Any split of the samples
        over micro-batches or ranks therefore gives the same gradient and the same sums. In the first update
        of a step, the model has not changed yet, so its log-probabilities are the old ones.
        """
        config = self.config
        compute_loss = loss_function(config)
        sums = Counter()
        divisor = batch.num_tokens
        if config.advantage == "dr_grpo" and not compute_loss.over_sequences:
            divisor = batch.num_sequences * config.max_response_length
        activations = contextlib.nullcontext()
        if config.gradient_checkpointing:
            activations = checkpointed_layers(self.model)
        with activations:
            for part, logprobs, entropy, mask in self.forward(batch.samples):
                rollout = padded([sample.rollout_logprobs for sample in part], self.device)
                advantages = padded([advantages_of(sample) for sample in part], self.device)
                if is_first_update:
                    old = logprobs.detach()
                else:
                    old = padded([sample.old_logprobs for sample in part], self.device)
                loss, found = compute_policy_loss(
                    logprobs,
                    old,
                    advantages,
                    mask,
                    divisor,
                    num_sequences=batch.num_sequences,
                    loss=compute_loss,
                    rollout_logprobs=rollout,
                    tis_cap=config.tis_cap,
                )
                # Selecting by a mask waits for a GPU, so the metrics come before the backward pass.
                if is_first_update:
                    found |= logprob_difference(old[mask], rollout[mask])
                if config.sampler_logprobs:
                    log_ratio = logprobs.detach()[mask] - rollout[mask]
                    ratio = log_ratio.clamp(max=MAX_LOG_RATIO).exp()
                    found |= {"ratio_sum": ratio.sum(), "squared_ratio_sum": ratio.square().sum()}
                if config.entropy_coef:
                    loss = loss - config.entropy_coef * entropy[mask].sum() / divisor
                if self.reference is not None:
                    reference = padded([sample.reference_logprobs for sample in part], self.device)
                    kl = compute_kl_loss(logprobs, reference, mask, divisor)
                    loss = loss + config.kl_coef * kl
                    found["reference_kl_sum"] = kl.detach().double() * divisor
                loss.backward()
                found["loss_sum"] = loss.detach()
                add_sums(sums, found)
        return as_numbers(sums)

    def optimizer_step(self, loss: float) -> float:
        """Clip the gradient, take one optimizer step, and return the gradient norm before clipping.

        Raises:
            RuntimeError: The loss or the gradient is not finite.
        """
        norm = gather_full(clip_grad_norm_(self.model.parameters(), self.config.max_grad_norm)).item()
        if not math.isfinite(loss + norm):
            raise RuntimeError(
                f"the loss ({loss:g}) or the gradient norm ({norm:g}) is not finite; look "
                "for unusual samples in samples.jsonl, or lower --lr"
            )
        self.num_updates += 1  # Count first: if the next line fails, weights may have changed.
        self.optimizer.step()
        return norm

    def metrics(self, sums: Counter, norms: list[float]) -> dict:
        """Compute the metrics of an update from its sums and gradient norms."""
        metrics = {
            "actor/updates": len(norms),
            "rollout/logprob_diff": sums["difference_sum"] / sums["compared_tokens"],
        }
        if not norms:
            return metrics
        num_tokens = sums["loss_tokens"]
        metrics["actor/loss"] = sums["loss_sum"] / len(norms)
        metrics["actor/grad_norm"] = sum(norms) / len(norms)
        for name, name_of_sum in MEANS.items():
            if name_of_sum in sums:  # Some losses do not clip, and the other sums depend on options.
                metrics[name] = sums[name_of_sum] / num_tokens
        if self.config.sampler_logprobs:
            mean_square = sums["squared_ratio_sum"] / num_tokens
            metrics["rollout/is_effective"] = metrics["rollout/is_mean"] ** 2 / mean_square
        return metrics

    @torch.no_grad()
    def logprobs_of(self, samples: list[Sample], model=None):
        """Yield each sample and the log-probabilities of its response, under the policy or another model."""
        for part, logprobs_B_T, _, _ in self.forward(samples, model):
            for sample, logprobs_T in zip(part, logprobs_B_T):
                yield sample, logprobs_T[: len(sample.response_ids)]

    # ---- weights and checkpoints

    def release_memory(self) -> None:
        """Free unused GPU memory for other processes on the same device."""
        self.optimizer.zero_grad(set_to_none=True)
        torch.cuda.empty_cache()

    def model_info(self) -> dict:
        """Return the model properties that serving and saving need."""
        return {
            "code": code_files(self.model),
            "config": self.model.config,
            "architecture": type(self.model).__name__,
            "eos_token_id": self.model.generation_config.eos_token_id,
            # The configuration may count experts that no layer has.
            "has_experts": any(re.search("experts|moe", name) for name, _ in self.model.named_parameters()),
            "numel": sum(map(torch.numel, self.model.state_dict().values())),  # counts a tied head twice
            "parameters": self.model.num_parameters(),  # counts it once
            "adapters": count_adapters(self.model) if self.has_adapters else "",
        }

    def weights(self, dtype: torch.dtype | None = None):
        """Yield the name and the full tensor of every weight, with adapters merged.

        The names are those of checkpoint files, as vLLM expects. In memory, transformers uses other names and
        stores all experts of a layer in one tensor. A tied head is yielded like any other weight. The weights
        in FLOAT32_NAMES are not cast.
        """
        if self.has_adapters:
            named = merged_weights(self.model)
        else:
            named = self.model.state_dict().items()
        for _, of_layer in groupby(named, lambda item: LAYER.match(item[0])[0]):
            tensors = {}
            for name, tensor in of_layer:
                is_exact = name.endswith(FLOAT32_NAMES)
                tensor = tensor.to(self.device, None if is_exact else dtype)
                tensors[name] = gather_full(tensor)  # Casting first leaves less to gather.
            yield from revert_weight_conversion(self.model, tensors).items()

    def trainable(self):
        """Yield the name and the tensor of every trained parameter: all weights, or the adapters."""
        for name, parameter in self.model.named_parameters():
            if parameter.requires_grad:
                yield name, parameter

    def save(self, folder: Path) -> None:
        """Write the model in Hugging Face format (with LoRA: only the adapters), and the optimizer state.

        Raises:
            RuntimeError: A weight is not finite.
        """
        named = self.trainable() if self.has_adapters else self.model.state_dict().items()
        weights = {}
        for name, tensor in named:
            # save_pretrained omits a tied weight only if it shares memory, which gathered weights do not.
            if name in self.model.all_tied_weights_keys:
                continue
            tensor = gather_full(tensor.detach().to(self.device))  # Every rank must take part.
            if not tensor.isfinite().all():
                raise RuntimeError(f"the weight {name} is not finite, so nothing was saved; lower --lr")
            if self.is_main_rank:
                weights[name] = tensor.cpu()
        if weights:
            self.model.save_pretrained(folder, state_dict=weights)
        state = {}
        if self.optimizer.state:  # torch would take an optimizer step to fill an empty state.
            state = self.optimizer_state()
        dcp.save(state, checkpoint_id=folder / "optimizer")

    def load_optimizer(self, folder: Path) -> None:
        """Load the optimizer that `save` wrote. The number of ranks may differ."""
        metadata = dcp.FileSystemReader(folder / "optimizer").read_metadata()
        saved = {name for name, *_ in metadata.planner_data.values()}
        if not saved:
            return
        state = self.optimizer_state()
        if saved < state.keys():  # A parameter has no state before its first gradient.
            for name, parameter in self.trainable():
                if name not in saved:
                    del state[name], self.optimizer.state[parameter]
        dcp.load(state, checkpoint_id=folder / "optimizer")  # in place

    def optimizer_state(self) -> dict:
        """Return the optimizer's tensors by parameter name. The tensors of a new optimizer are zeros."""
        return get_optimizer_state_dict(self.model, self.optimizer)["state"]


def gather_full(tensor: torch.Tensor) -> torch.Tensor:
    """Return the full tensor if it is sharded over ranks (a DTensor), and the tensor itself otherwise."""
    return tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor


# ---- mini-batches and micro-batches


def mini_batches(groups: list[list[Sample]], options) -> list[MiniBatch]:
    """Return the samples of each optimizer update.

    If no sample has a gradient, the only mini-batch is one group that serves to check the sampler.
    """
    batches = []
    # Whether samples with advantage 0 have a gradient.
    at_zero = has_gradient_at_zero(options) or options.entropy_coef or options.kl_coef
    for samples in split_mini_batches(groups, options.mini_batch_size):
        scored = [sample for sample in samples if sample.advantage is not None]
        with_gradient = [sample for sample in scored if at_zero or any(advantages_of(sample))]
        if with_gradient:
            num_tokens = 0
            for sample in scored:
                num_tokens += sum(sample.own_tokens)
            batches.append(MiniBatch(with_gradient, num_tokens, len(scored)))
    return batches or [MiniBatch(groups[0])]


def split_mini_batches(groups: list[list[Sample]], mini_batch_size: int) -> list[list[Sample]]:
    """Split the samples into mini-batches of at most `mini_batch_size` groups, as evenly as possible.

    Each mini-batch gets one optimizer update, so a small remainder would weigh as much as a full mini-batch.
    """
    count = math.ceil(len(groups) / mini_batch_size)
    bounds = [len(groups) * number // count for number in range(count + 1)]
    return [list(chain(*groups[start:end])) for start, end in pairwise(bounds)]


def micro_batches(lengths: list[int], max_tokens: int) -> list[list[int]]:
    """Group sequences of similar length into micro-batches. Returns lists of their indices.

    A micro-batch has at most `max_tokens` tokens after padding, or a single longer sequence.
    """
    batches = []
    for index in sorted(range(len(lengths)), key=lambda i: -lengths[i]):
        if batches and lengths[batches[-1][0]] * (len(batches[-1]) + 1) <= max_tokens:
            batches[-1].append(index)
        else:
            batches.append([index])
    return batches


def samples_of(batches: list[MiniBatch]) -> list[Sample]:
    return [sample for batch in batches for sample in batch.samples]


def advantages_of(sample: Sample) -> list[float]:
    """Return one advantage per token."""
    return sample.token_advantages or [sample.advantage] * len(sample.response_ids)


# ---- metrics


def entropy_of(groups: list[list[Sample]]) -> float:
    """Estimate the policy's entropy in nats per token: the mean of -logprob over all sampled tokens."""
    total = 0.0
    num_tokens = 0
    for sample in chain(*groups):
        total += sum(compress(sample.rollout_logprobs, sample.own_tokens))
        num_tokens += sum(sample.own_tokens)
    return -total / num_tokens


def logprob_difference(logprobs: torch.Tensor, rollout_logprobs: torch.Tensor) -> dict:
    """Return the sums over tokens that rollout/logprob_diff is computed from."""
    apart = (logprobs - rollout_logprobs).abs().sum()
    return {"difference_sum": apart, "compared_tokens": torch.tensor(logprobs.numel())}


def add_sums(sums: Counter, found: dict) -> None:
    """Add tensors to the sums, as tensors: reading a number would make the CPU wait for the GPU."""
    for name, value in found.items():
        sums[name] = sums[name] + value.double()


def as_numbers(sums: Counter) -> Counter:
    """Return sums of tensors as sums of numbers."""
    return Counter({name: float(value) for name, value in sums.items()})


def check_sampler(sums: Counter, limit: float) -> None:
    """Raise RuntimeError if the samples do not seem to come from the policy's weights."""
    apart = sums["difference_sum"] / sums["compared_tokens"]
    if not apart <= limit:  # This is also true for NaN.
        raise RuntimeError(
            f"rollout/logprob_diff {apart:.3f} exceeds --max-logprob-diff {limit:g}: the "
            "sampler does not use the trainer's weights, or uses a different precision; "
            "see policy-mismatch in docs/troubleshooting.md"
        )
