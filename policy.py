"""The policy: a model and its optimizer in one process, and the samples that it learns from.

    policy = Policy(PolicyOptions(model="PATH"), "PATH", torch.device("cpu"))
    metrics = policy.update(groups, lr=1e-6)                   # one pass over a step, in mini-batches

The losses are in algorithm.py, sampling is in rollout.py; docs/plain_grpo.py is GRPO with these three alone.
cluster/ranks.py is the same policy over many GPUs: it overrides the seams `place`, `total`, `compute` and
`forward`, and its `learn` is given its own samples alone. Needs algorithm.py; if used speedups.py, lora.py.
Left out: a critic model, images.
Shapes: B sequences of a micro-batch, T tokens of the longest response, N in a row, H hidden, V vocabulary.
"""

import contextlib
import math
import re
import warnings
from collections import Counter
from concurrent.futures import Future
from dataclasses import dataclass, field
from functools import partial
from importlib import import_module
from itertools import chain, compress, groupby, pairwise
from pathlib import Path
from typing import Literal

import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict
from torch.nn.utils import clip_grad_norm_
from torch.nn.utils.rnn import pad_sequence
from torch.utils.checkpoint import checkpoint
from transformers import AutoConfig, AutoModelForCausalLM, DynamicCache, GradientCheckpointingLayer
from transformers.core_model_loading import revert_weight_conversion

from algorithm import ADVANTAGES, LOSSES, compute_kl_loss, compute_policy_loss

try:
    import speedups
except ImportError:  # slower without it, otherwise the same
    speedups = None

# Tokens of one pass, with padding, where --max-tokens-per-micro-batch is 0.
TOKENS_PER_PASS = {"cpu": 2048, "cuda": 16384}
# Logits (float32 numbers) that exist at a time; a forward and backward pass holds five or six copies of them.
LOGITS_AT_ONCE = {"cpu": 2**25, "cuda": 2**28}
LAYER = re.compile(r"(.*?\.\d+\.)?")  # the layer that a weight's name begins with
warnings.filterwarnings("ignore", message="torch.distributed is disabled")  # checkpoints of a single process


@dataclass(kw_only=True)
class PolicyOptions:
    """What a policy is and how it learns; the defaults are the paper's (FAPO-7B)."""

    model: str  # Model of the policy: a Hugging Face folder, or a hub name such as Qwen/Qwen2.5-Math-7B.
    trust_remote_code: bool = False  # Run code that comes with the model.
    max_positions: int = 0  # Value that replaces the model's max_position_embeddings; 0: keep the model's.
    temperature: float = 1.0  # Sampling temperature of rollouts; the loss uses the same distribution.
    max_response_length: int = 8192  # Longest response in tokens; longer rollouts are cut off.
    mini_batch_size: int = 32  # Largest number of prompts per optimizer update.

    # How rewards become advantages; docs/algorithms.md describes the choices.
    advantage: Literal[tuple(ADVANTAGES)] = "grpo"
    # Weights of reward components for --advantage terms: acc=1 flawed_positive=-0.5.
    reward_terms: tuple[str, ...] = ()
    prefix_reward: float = 0.5  # Reward of the tokens of a good prefix with --advantage vppo (its alpha).
    # With --advantage vppo: tokens at the end of a good prefix that earn nothing, in prompt lengths.
    prefix_cut: float = 1.0
    # Whether negative advantages apply to the whole sample, or only after its good prefix.
    credit: Literal["sample", "prefix"] = "sample"
    # Importance ratio of the loss: clip, per token; gspo, per sequence; cispo, as a constant weight.
    loss: Literal[tuple(LOSSES)] = "clip"
    # Lower clip range of the ratio; default: 0.2 for clip, 0.0003 for gspo, 1 for cispo.
    clip_low: float | None = None
    # Upper clip range of the ratio (clip-higher); default: 0.28, 0.0004 for gspo, 4 for cispo.
    clip_high: float | None = None
    clip_c: float = 10.0  # Dual clip of --loss clip: bound of the ratio for negative advantages, above 1.
    # Cap of the importance weights that correct for the sampler; default: off, or 2 with --overlap.
    tis_cap: float | None = None
    # Weight of the KL divergence from the initial --model; 0: off, without a second model in memory.
    kl_coef: float = 0.0
    entropy_coef: float = 0.0  # Weight of the entropy bonus.

    lr: float = 1e-6  # Learning rate of AdamW, constant after the warm-up.
    # Decay rates of AdamW; 0.9 0.95 is more stable in short runs.
    adam_betas: tuple[float, float] = (0.9, 0.999)
    weight_decay: float = 0.1  # Weight decay of AdamW.
    max_grad_norm: float = 1.0  # Gradient norm above which gradients are scaled down.
    # Rank of LoRA adapters, which train instead of the weights and need 5 to 10 times the --lr; 0: off.
    lora_rank: int = 0
    lora_alpha: int = 0  # LoRA alpha: adapters are scaled by alpha / rank; 0: 2 x rank.
    # Layers with LoRA adapters: all-linear, or names such as q_proj v_proj.
    lora_targets: tuple[str, ...] = ("all-linear",)
    # Tokens per forward and backward pass, with padding; 0: 16384 on a GPU, 2048 on a CPU.
    max_tokens_per_micro_batch: int = 0
    gradient_checkpointing: bool = False  # Recompute activations in the backward pass, which saves memory.
    seed: int = 0  # Seed of data order, sampling and new adapters.


@dataclass
class Sample:
    """One response to one prompt."""

    row: dict  # of the data file
    prompt_ids: list[int]
    response_ids: list[int] = field(default_factory=list)  # with the end token, if there is one
    rollout_logprobs: list[float] = field(default_factory=list)  # of response_ids, from the sampler
    text: str = ""  # the response, decoded
    result: dict = field(default_factory=dict)  # the Reward Loop's: reward_score, reward_extra_info, status
    # None: no verdict, no part in the loss. That of the last token where token_advantages has one for each.
    advantage: float | None = None
    token_advantages: list[float] = field(default_factory=list)  # empty: `advantage` for all tokens
    verdict: Future | None = None  # the result to come
    # Of response_ids: whether the policy wrote the token, and so learns from it. Empty: it wrote all of them.
    loss_mask: list[bool] = field(default_factory=list)
    # The next five are set by a rollout function (trajectory.py).
    turns: list[dict] = field(default_factory=list)  # {"who": "policy", "text": "65+9=?", "tokens": 5}
    info: dict = field(default_factory=dict)  # what it tells the reward function
    failure: str = ""  # "error" or "timeout": it has failed, and the sample has no reward
    truncated: bool | None = None  # whether it ran out of room; None: there is no rollout function
    tool_seconds: float = 0.0  # that it took, without its waits for the policy
    # Scratch of Policy.update, from before the step's first update: T log-probabilities each.
    old_logprobs: torch.Tensor | None = field(default=None, compare=False)
    reference_logprobs: torch.Tensor | None = field(default=None, compare=False)

    @property
    def length(self) -> int:
        return len(self.prompt_ids) + len(self.response_ids)

    @property
    def own_tokens(self) -> list[bool]:
        """One for each token of the response: whether the policy wrote it."""
        return self.loss_mask or [True] * len(self.response_ids)

    @property
    def has_turns(self) -> bool:
        """Whether credit goes to turns. A single turn is a response like any other, made of paragraphs."""
        return len(self.turns) > 1

    def is_truncated(self, eos_ids) -> bool:
        if self.truncated is None:
            return self.response_ids[-1] not in eos_ids
        return self.truncated


@dataclass
class MiniBatch:
    """What one optimizer update learns from; of several ranks each has its own samples."""

    samples: list[Sample]  # with a gradient
    num_tokens: int = 0  # that the policy wrote in responses with a verdict, whichever rank has them
    num_sequences: int = 0  # these responses; 0: nothing is learnt, the sampler is looked at


class RanksLost(RuntimeError):
    """A process that holds a part of the policy has died; the run goes on from its newest checkpoint."""


class Policy:
    """A model and its optimizer. options: PolicyOptions; source: a folder or hub name.

    Weights and optimizer are float32. On a GPU the layers compute in bf16 and the head in float32 (TF32): in
    bf16 it alone would move log-probabilities by 0.02. Always in evaluation mode: with dropout the policy
    that learns is not the one that was sampled. ValueError where its log-probabilities come out wrong.
    """

    is_first = True  # of several ranks the one that writes
    samples_itself = False  # true: rollout_logprobs are this model's own, to the precision of float32
    read_as = torch.float32  # a model's files

    def __init__(self, options: PolicyOptions, source: str, device: torch.device):
        self.config = options
        self.device = device
        self.num_updates = 0
        self.max_tokens = options.max_tokens_per_micro_batch or TOKENS_PER_PASS[device.type]
        if device.type == "cuda":
            torch.cuda.set_device(device)
            torch.set_float32_matmul_precision("high")
        self.adapters = import_module("lora") if options.lora_rank else None
        self.model = self.load(source)
        self.reference = None
        if options.kl_coef and self.adapters:
            self.reference = self.model  # the same one, without its adapters
        elif options.kl_coef:
            self.reference = self.load(options.model)
        self.optimizer = self.new_optimizer()

    def new_optimizer(self):
        """Any whose state are tensors will do: it is saved and loaded as it is."""
        options = self.config
        return torch.optim.AdamW(
            self.trainable(),
            lr=options.lr,
            betas=options.adam_betas,
            weight_decay=options.weight_decay,
            fused=True,
        )

    def load(self, source):
        """The model, ready to be computed with and to be saved."""
        options = dict(dtype=self.read_as, trust_remote_code=self.config.trust_remote_code)
        base = self.config.model if self.adapters else source
        shape = config_of(base, self.config.trust_remote_code).get_text_config()
        if getattr(shape, "attn_logit_softcapping", None):
            options["attn_implementation"] = "eager"  # the others leave out the cap
        if self.config.max_positions:
            options["max_position_embeddings"] = self.config.max_positions
        model = AutoModelForCausalLM.from_pretrained(base, **options).eval()
        model.generation_config.do_sample = True  # or transformers refuses to save a temperature
        if self.adapters:
            self.adapters.add(model, self.config, source)
        self.place(model)
        check_logprobs(self.compute, model, source, self.device)
        return model

    # ---- the seams: what a rank of many does in its own way

    def place(self, model):
        """Takes a model that was read to where it is computed."""
        set_dtypes(model, self.config, self.device.type)
        model.to(self.device)
        model.shares_prompts = speedups is not None and speedups.can_share_prompts(model)

    def total(self, sums):
        """These sums over all processes."""
        return sums

    def compute(self, model, *arguments):
        return logprobs_and_entropy(model, *arguments)

    def forward(self, samples, model=None):
        """The model on micro-batches: yields (samples, logprobs, entropy, mask), the last three B x T.

        The mask is true on the tokens that the policy wrote.
        """
        for indices in micro_batches([sample.length for sample in samples], self.max_tokens):
            part = [samples[index] for index in indices]
            counts = [len(sample.response_ids) for sample in part]
            sequences = [sample.prompt_ids + sample.response_ids for sample in part]
            logprobs, entropy = self.compute(
                model or self.model,
                sequences,
                counts,
                self.config.temperature,
                self.config.entropy_coef != 0,
            )
            mask = padded([sample.own_tokens for sample in part], self.device, torch.bool)
            yield part, logprobs, entropy, mask

    # ---- the update

    def update(self, groups: list[list[Sample]], lr: float, max_logprob_diff: float = math.inf) -> dict:
        """One pass over the step's groups in mini-batches, one optimizer update each. Returns metrics.

        Samples without a gradient are not computed: no verdict, or advantage 0 where only the advantage
        moves the policy. The token mean counts all that have a verdict. actor/entropy is estimated from all
        samples as they were sampled, rollout/logprob_diff is of the tokens that are computed before the
        first update, everything else is a mean over the tokens trained on. RuntimeError where sampler and
        policy are more than max_logprob_diff apart (then no weight has changed), or a loss is not finite.
        """
        batches = mini_batches(groups, self.config)
        return self.learn(batches, lr, max_logprob_diff) | {"actor/entropy": entropy_of(groups)}

    def learn(self, batches: list[MiniBatch], lr: float, max_logprob_diff: float):
        """`update` with what mini_batches() made of the groups."""
        for group in self.optimizer.param_groups:
            group["lr"] = lr
        norms = []
        if not batches[0].num_sequences:  # nothing is learnt
            sums = self.compare(batches[0].samples)
            check_sampler(sums, max_logprob_diff)
            return self.metrics(sums, norms)
        sums = self.look_before(batches)
        for batch in batches:
            self.optimizer.zero_grad(set_to_none=True)
            found = self.total(self.accumulate_gradients(batch, is_first_update=not norms))
            sums.update(found)
            if not norms:  # by now all that is computed before the first update is compared
                check_sampler(sums, max_logprob_diff)
            norms.append(self.step(found["loss_sum"]))
        return self.metrics(sums, norms)

    def look_before(self, batches):
        """Fills in old and reference log-probabilities, from before the first update. Returns sums."""
        sums = Counter()
        if not self.samples_itself:  # the first update computes its own
            sums = self.compare(samples_of(batches[1:]))
        if self.reference is not None:
            without_adapters = contextlib.nullcontext()
            if self.adapters:
                without_adapters = self.adapters.off(self.model)
            with without_adapters:
                for sample, logprobs in self.score(samples_of(batches), self.reference):
                    sample.reference_logprobs = logprobs
        return sums

    def compare(self, samples):
        """Fills in old log-probabilities. Returns sums over all processes: how far apart they are."""
        sums = Counter()
        for sample, logprobs in self.score(samples):
            sample.old_logprobs = logprobs
            own = torch.tensor(sample.own_tokens, device=self.device)
            rollout = torch.tensor(sample.rollout_logprobs, device=self.device)
            sums.update(difference(logprobs[own], rollout[own]))
        return self.total(sums)

    def accumulate_gradients(self, batch: MiniBatch, is_first_update):
        """Adds the gradient of these samples' part of the loss. Returns sums, which add up over all parts.

        Any split of the samples, over micro-batches or ranks, adds up to the same gradient: what divides it
        is of the whole mini-batch. is_first_update: the old log-probabilities are what the model says now.
        """
        config = self.config
        sums = Counter()
        num_tokens = loss_tokens = batch.num_tokens
        if config.advantage == "dr_grpo":
            loss_tokens = batch.num_sequences * config.max_response_length
        activations = contextlib.nullcontext()
        if config.gradient_checkpointing:
            activations = checkpointed_layers(self.model)
        with activations:
            for part, logprobs, entropy, mask in self.forward(batch.samples):
                rollout = padded([sample.rollout_logprobs for sample in part], self.device)
                advantages = padded([advantages_of(sample) for sample in part], self.device)
                if is_first_update:
                    old = logprobs.detach()
                elif self.samples_itself:
                    old = rollout
                else:
                    old = padded([sample.old_logprobs for sample in part], self.device)
                loss, found = compute_policy_loss(
                    logprobs,
                    old,
                    advantages,
                    mask,
                    loss_tokens,
                    num_sequences=batch.num_sequences,
                    loss=config.loss,
                    clip_low=config.clip_low,
                    clip_high=config.clip_high,
                    clip_c=config.clip_c,
                    rollout_logprobs=rollout,
                    tis_cap=config.tis_cap,
                )
                if config.entropy_coef:
                    loss = loss - config.entropy_coef * entropy[mask].sum() / num_tokens
                if self.reference is not None:
                    reference = padded([sample.reference_logprobs for sample in part], self.device)
                    kl = compute_kl_loss(logprobs, reference, mask, num_tokens)
                    loss = loss + config.kl_coef * kl
                    found["reference_kl_sum"] = kl.item() * num_tokens
                loss.backward()
                found["loss_sum"] = loss.item()
                sums.update(found)
                if is_first_update:
                    sums.update(difference(old[mask], rollout[mask]))
        return sums

    def step(self, loss):
        """One optimizer step. Returns the gradient norm; RuntimeError where it or the loss is not finite."""
        norm = whole(clip_grad_norm_(self.model.parameters(), self.config.max_grad_norm)).item()
        if not math.isfinite(loss + norm):
            raise RuntimeError(f"loss {loss:g}, gradient {norm:g}: not finite; see samples.jsonl, lower --lr")
        self.num_updates += 1  # from here on the weights are no longer those of before
        self.optimizer.step()
        return norm

    def metrics(self, sums, norms):
        """Of an update: what was added up, and the norms of its gradients."""
        metrics = {
            "actor/updates": len(norms),
            "rollout/logprob_diff": sums["difference_sum"] / sums["compared_tokens"],
        }
        if not norms:
            return metrics
        num_tokens = sums["loss_tokens"]
        metrics["actor/loss"] = sums["loss_sum"] / len(norms)
        metrics["actor/grad_norm"] = sum(norms) / len(norms)
        metrics["actor/clip_fraction"] = sums["clipped_tokens"] / num_tokens
        metrics["actor/approx_kl"] = sums["approx_kl_sum"] / num_tokens
        if self.reference is not None:
            metrics["actor/kl_to_reference"] = sums["reference_kl_sum"] / num_tokens
        if self.config.tis_cap is not None:
            metrics["rollout/tis_mean"] = sums["tis_sum"] / num_tokens
            metrics["rollout/tis_capped"] = sums["tis_capped_tokens"] / num_tokens
        return metrics

    @torch.no_grad()
    def score(self, samples, model=None):
        """Yields each sample and the log-probabilities of its response under the policy or another model."""
        for part, logprobs_B_T, _, _ in self.forward(samples, model):
            for sample, logprobs_T in zip(part, logprobs_B_T):
                yield sample, logprobs_T[: len(sample.response_ids)]

    # ---- weights, checkpoints

    def release_memory(self):
        """Gives GPU memory that is not in use back to the device, for others that share it."""
        self.optimizer.zero_grad(set_to_none=True)
        torch.cuda.empty_cache()

    def model_info(self) -> dict:
        """What serving or saving this model needs to know of it."""
        return {
            "config": self.model.config,
            "architecture": type(self.model).__name__.removeprefix("FSDP"),
            "eos_token_id": self.model.generation_config.eos_token_id,
            "numel": sum(map(torch.numel, self.model.state_dict().values())),
            "adapters": self.adapters.describe(self.model) if self.adapters else "",
        }

    def weights(self, dtype: torch.dtype | None = None):
        """Name and whole tensor of every weight, with what adapters add; a tied head is one of its own.

        The names are those of the model's files, which vLLM reads: transformers has names of its own, and
        all experts of a layer in one tensor.
        """
        if self.adapters:
            named = self.adapters.merged(self.model)
        else:
            named = self.model.state_dict().items()
        for _, of_layer in groupby(named, lambda item: LAYER.match(item[0])[0]):
            tensors = {}
            for name, tensor in of_layer:
                tensor = tensor.detach().to(self.device, dtype or tensor.dtype)  # cast: less to gather
                tensors[name] = whole(tensor)
            yield from revert_weight_conversion(self.model, tensors).items()

    def trainable(self):
        """Name and parameter of what is trained: everything, or adapters."""
        for name, parameter in self.model.named_parameters():
            if parameter.requires_grad:
                yield name, parameter

    def save(self, folder: Path) -> None:
        """Writes a Hugging Face folder (or adapters), the optimizer. RuntimeError: a weight is not finite."""
        named = self.trainable() if self.adapters else self.model.state_dict().items()
        weights = {}
        for name, tensor in named:
            tensor = whole(tensor.detach().to(self.device))  # gathered by all ranks together
            if not tensor.isfinite().all():
                raise RuntimeError(f"the weights are not finite (first {name}) and are not saved")
            if self.is_first:
                weights[name] = tensor.cpu()
        if weights:
            self.model.save_pretrained(folder, state_dict=weights)
        state = self.optimizer_state() if self.optimizer.state else {}  # asking would count as a step
        dcp.save(state, checkpoint_id=folder / "optimizer")

    def load_optimizer(self, folder: Path) -> None:
        """Reads what `save` wrote, with however many ranks."""
        if dcp.FileSystemReader(folder / "optimizer").read_metadata().state_dict_metadata:
            dcp.load(self.optimizer_state(), checkpoint_id=folder / "optimizer")  # in place

    def optimizer_state(self):
        """The optimizer's tensors by the names of the parameters; none yet: as after a step by zero."""
        return get_optimizer_state_dict(self.model, self.optimizer)["state"]


def config_of(source, trust_remote_code):
    """What a model's config.json says. ValueError if the model cannot be trained."""
    config = AutoConfig.from_pretrained(source, trust_remote_code=trust_remote_code)
    for part in (config, config.get_text_config()):
        quantised = getattr(part, "quantization_config", None)
        if quantised:
            method = dict(quantised).get("quant_method", "quantization_config")
            raise ValueError(f"model: {source} is quantised ({method}); its weights cannot be trained: "
                             "take the model in bf16 or float32 that it was made from")  # fmt: skip
    return config


def set_dtypes(model, options, device):
    """Everything is float32; for a GPU the layers that adapters leave as they are become bf16."""
    dtypes = dict.fromkeys(model.parameters(), torch.float32)
    if options.lora_rank and device == "cuda":
        for layer in layers_of(model, "lora_rank"):
            for parameter in layer.parameters():
                if not parameter.requires_grad:
                    dtypes[parameter] = torch.bfloat16
    model._apply(lambda tensor: tensor.to(dtypes.get(tensor, tensor.dtype)))  # split ones, too


def whole(tensor):
    """All of a tensor that may be sharded over ranks (a DTensor)."""
    return tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor


def mini_batches(groups: list[list[Sample]], options: PolicyOptions) -> list[MiniBatch]:
    """What each optimizer update learns from. At least one, which may be there to be looked at alone."""
    batches = []
    for samples in deal(groups, options.mini_batch_size):
        teaching = [sample for sample in samples if has_gradient(sample, options)]
        if teaching:  # else every group is all right or all wrong
            judged = [sum(sample.own_tokens) for sample in samples if sample.advantage is not None]
            batches.append(MiniBatch(teaching, sum(judged), len(judged)))
    return batches or [MiniBatch(groups[0])]


def deal(groups, mini_batch_size):
    """The groups' samples in mini-batches of at most `mini_batch_size` groups, as even as can be.

    A mini-batch is an optimizer update: a rest of one group must not weigh as much as the others.
    """
    count = math.ceil(len(groups) / mini_batch_size)
    bounds = [len(groups) * number // count for number in range(count + 1)]
    return [list(chain(*groups[start:end])) for start, end in pairwise(bounds)]


def has_gradient(sample, options):
    if sample.advantage is None:
        return False
    if options.entropy_coef or options.kl_coef:
        return True
    return any(advantages_of(sample))


def entropy_of(groups):
    """Of the policy, in nats a token, estimated from all samples as they were sampled."""
    samples = list(chain(*groups))
    num_tokens = sum(sum(sample.own_tokens) for sample in samples)
    total = 0.0
    for sample in samples:
        total += sum(compress(sample.rollout_logprobs, sample.own_tokens))
    return -total / num_tokens


def samples_of(batches):
    return [sample for batch in batches for sample in batch.samples]


def advantages_of(sample):
    """One for each token."""
    return sample.token_advantages or [sample.advantage] * len(sample.response_ids)


def difference(logprobs, rollout_logprobs):
    """Sums over response tokens, for rollout/logprob_diff."""
    apart = (logprobs - rollout_logprobs).abs().sum().item()
    return {"difference_sum": apart, "compared_tokens": logprobs.numel()}


def check_sampler(sums, limit):
    """RuntimeError where the samples did not come from the policy's weights."""
    apart = sums["difference_sum"] / sums["compared_tokens"]
    if not apart <= limit:  # a NaN is no agreement
        raise RuntimeError(f"rollout/logprob_diff {apart:.3f} is over max_logprob_diff {limit:g}: the "
                           "sampler does not use the trainer's weights, or not their precision")  # fmt: skip


def micro_batches(lengths, max_tokens):
    """Indices in batches of similar lengths, `max_tokens` at most with padding (a longer one alone)."""
    batches = []
    for index in sorted(range(len(lengths)), key=lambda i: -lengths[i]):
        if batches and lengths[batches[-1][0]] * (len(batches[-1]) + 1) <= max_tokens:
            batches[-1].append(index)
        else:
            batches.append([index])
    return batches


# ---- log-probabilities


def logprobs_and_entropy(model, sequences, counts, temperature, with_entropy=False):
    """Log-probabilities of the response tokens, and entropies: 2 x B x T, 0 in the padding.

    sequences: prompt + response ids; counts: of the response. LOGITS_AT_ONCE logits exist at a time.
    with_entropy: else they are NaN, which saves time: a loss term made from them is noticed.
    """
    device = model.device
    states = None
    with precision(device):
        if speedups:
            states = speedups.shared_states(model, body_of(model), sequences, counts, left_padded)
        if states is None:
            states = response_states(model, sequences, counts, device)
    output, hidden_N_H, targets_N = states

    def of_chunk(hidden_n_H, targets_n):
        logits_n_V = logits_of(model, output, hidden_n_H)
        if temperature != 1:  # else without a copy
            logits_n_V = logits_n_V / temperature
        logp_n_V = logits_n_V.log_softmax(-1)
        logprobs_n = logp_n_V.gather(-1, targets_n[:, None])[:, 0]
        entropy_n = torch.full_like(logprobs_n, math.nan)
        if with_entropy:  # an impossible token (-inf) adds 0
            entropy_n = -(logp_n_V.exp() * logp_n_V.clamp(min=torch.finfo(logp_n_V.dtype).min)).sum(-1)
        return torch.stack([logprobs_n, entropy_n])

    chunk = max(1, LOGITS_AT_ONCE[device.type] // model.config.get_text_config().vocab_size)
    compute = of_chunk
    if torch.is_grad_enabled() and len(targets_N) > chunk:  # the backward pass makes the logits again
        compute = partial(checkpoint, of_chunk, use_reentrant=False, preserve_rng_state=False)
    parts = []
    for hidden_n_H, targets_n in zip(hidden_N_H.split(chunk), targets_N.split(chunk)):
        parts.append(compute(hidden_n_H, targets_n))
    mask = mask_of(counts, device)
    return torch.zeros(2, *mask.shape, device=device).masked_scatter(mask, torch.cat(parts, 1))


def response_states(model, sequences, counts, device):
    """The body's output, the states that predict each response token (N x H), and those tokens (N)."""
    ids = padded(sequences, device, torch.long)  # on the right, unseen by a causal model: no mask needed
    output = body_of(model)(input_ids=ids, use_cache=False)
    ends = torch.tensor([len(sequence) - 1 for sequence in sequences], device=device)[:, None]
    starts = ends - torch.tensor(counts, device=device)[:, None]
    columns = torch.arange(ids.shape[1] - 1, device=device)  # each predicts the token after it
    chosen = (starts <= columns) & (columns < ends)
    return output, output.last_hidden_state[:, :-1][chosen], ids[:, 1:][chosen]


def next_logits(model, ids, attended, positions, cache=None):
    """Logits B x V of the token after these, and the cache, which then holds these, too. None: a new one."""
    body = body_of(model)
    if cache is None:
        cache = DynamicCache(config=model.config)
        if speedups:
            speedups.make_roomy(cache)
    inputs = dict(attention_mask=attended, position_ids=positions, past_key_values=cache, use_cache=True)
    output = body(input_ids=ids, **inputs)
    return logits_of(model, output, output.last_hidden_state[:, -1]), cache


def precision(device, keep_casts=False):
    """On a GPU matrix products run in bf16, from weights that stay float32; on CPU everything is float32.

    keep_casts: each weight is cast once, and the copies (2 bytes a parameter) live as long as the context.
    """
    return torch.autocast(device.type, torch.bfloat16, device.type == "cuda", keep_casts)


def body_of(model):
    """The module that the model's own forward asks for hidden states: all layers, without the head."""
    body = getattr(model, "model", model.base_model)  # Llama-4 misnames its own
    return getattr(body, "decoder", body)  # OPT's has one inside


def logits_of(model, output, hidden_N_H):
    """Logits N x V, float32, of hidden states taken from `output` of the body.

    Families differ in what follows the layers: soft caps, scales, one more layer. So the model's own forward
    computes the logits, and is given these hidden states when it asks its body for some.
    """
    body = body_of(model)
    output.last_hidden_state = hidden_N_H[None].float()
    body.forward = lambda *args, **kwargs: output
    try:
        with torch.autocast(hidden_N_H.device.type, enabled=False):
            ids = torch.zeros(1, len(hidden_N_H), dtype=torch.long, device=hidden_N_H.device)
            return model.forward(input_ids=ids, use_cache=False).logits[0].float()
    finally:
        del body.forward


@torch.no_grad()
def check_logprobs(compute, model, name, device):
    """ValueError where log-probabilities made here differ from the model's own, on short texts.

    Some have a prompt in common; where they come out wrong because it is shared, none is from then on.
    device: where it is computed; the weights may be in the host's memory.
    """
    ids = list(range(1, 20))
    sequences = [ids[:11], ids[:8] + ids[12:], ids[:10], ids[4:9]]
    counts = [3, 7, 2, 1]
    expected = []
    for sequence, count in zip(sequences, counts):
        with precision(device):
            logits = model(input_ids=torch.tensor([sequence], device=device), use_cache=False).logits
        logprobs = logits[0, -count - 1 : -1].float().log_softmax(-1)
        expected.append(logprobs[range(count), sequence[-count:]])
    allowed = {"cpu": 1e-3, "cuda": 0.1}[device.type]
    for _ in range(2):
        logprobs, _ = compute(model, sequences, counts, 1.0)
        difference = (logprobs[mask_of(counts, device)] - torch.cat(expected)).abs().mean().item()
        if difference < allowed:
            return
        model.shares_prompts = False
    raise ValueError(f"model: {name} ({type(model).__name__}) cannot be trained here: log-probabilities "
                     f"differ from its own by {difference:.2g}; see policy.logits_of")  # fmt: skip


@contextlib.contextmanager
def checkpointed_layers(model):
    """Inside, the layers' activations are computed again in the backward pass instead of being kept.

    Not by transformers' own switch: that needs training mode, in which some models turn dropout on.
    """
    layers = layers_of(model, "gradient_checkpointing")
    shares = model.shares_prompts
    model.shares_prompts = False  # its keys would be cached twice
    for layer in layers:
        layer.forward = partial(checkpoint, layer.forward, use_reentrant=False, preserve_rng_state=False)
    try:
        yield
    finally:
        model.shares_prompts = shares
        for layer in layers:
            del layer.forward


def layers_of(model, field):
    """The model's repeated layers, as transformers marks them. ValueError naming `field` without any."""
    layers = [module for module in model.modules() if isinstance(module, GradientCheckpointingLayer)]
    if not layers:
        raise ValueError(f"{field}: {type(model).__name__} has no layers marked for it; leave it off")
    return layers


def left_padded(prompts, device):
    """Of each prompt its row among the distinct ones; their token ids, mask and positions.

    They end in the same column, where all responses can start.
    """
    rows = {}
    row_of_prompt = [rows.setdefault(tuple(prompt), len(rows)) for prompt in prompts]
    ids = padded(rows, device, torch.long, "left")
    attended = mask_of(list(map(len, rows)), device).flip(1).long()
    return torch.tensor(row_of_prompt, device=device), ids, attended, (attended.cumsum(1) - 1).clamp(min=0)


def mask_of(lengths, device):
    """B x T, true on tokens. Made from lengths, never from tokens: EOS may be the padding token."""
    return torch.arange(max(lengths), device=device) < torch.tensor(lengths, device=device)[:, None]


def padded(rows, device, dtype=torch.float32, side="right"):
    """Rows of different lengths (lists or 1-d tensors) as one tensor, zeros on one side."""
    rows = [torch.as_tensor(row, dtype=dtype) for row in rows]
    return pad_sequence(rows, batch_first=True, padding_side=side).to(device)
