"""The policy: a model and its optimizer in one process, and the samples that it learns from.

    policy = Policy(config, "PATH", torch.device("cpu"))       # config: the trainer's
    metrics = policy.update(groups, lr=1e-6)                   # one pass over a step, in mini-batches

The losses are in algorithm.py, sampling is in rollout.py. cluster/ranks.py is the same policy over many GPUs:
it overrides four seams: `mine`, `total`, `compute`, `forward`. Needs algorithm.py; for speed speedups.py, for
LoRA lora.py. Left out: a critic model, images.
Shapes: B sequences of a micro-batch, T tokens of the longest response, N in a row, H hidden, V vocabulary.
"""

import contextlib
import copy
import math
import warnings
from collections import Counter
from concurrent.futures import Future
from dataclasses import dataclass, field
from functools import partial
from importlib import import_module
from pathlib import Path

import torch
import torch.distributed.checkpoint as dcp
from torch.nn.utils import clip_grad_norm_
from torch.nn.utils.rnn import pad_sequence
from torch.utils.checkpoint import checkpoint
from transformers import AutoModelForCausalLM, GradientCheckpointingLayer

from algorithm import compute_kl_loss, compute_policy_loss

try:
    import speedups
except ImportError:  # slower without it, otherwise the same
    speedups = None

# Logits (float32 numbers) that exist at a time; a forward and backward pass holds five or six copies of them.
LOGITS_AT_ONCE = {"cpu": 2**25, "cuda": 2**28}
# What adds up over micro-batches, mini-batches and ranks.
SUMS = ("loss_sum", "loss_tokens", "clipped_tokens", "approx_kl_sum", "reference_kl_sum", "tis_sum",
        "tis_capped_tokens", "difference_sum", "entropy_sum", "tokens")  # fmt: skip
warnings.filterwarnings("ignore", message="torch.distributed is disabled")  # checkpoints of a single process


@dataclass
class Sample:
    """One response to one prompt."""

    row: dict  # of the data file
    prompt_ids: list[int]
    response_ids: list[int] = field(default_factory=list)  # with the end token, if there is one
    rollout_logprobs: list[float] = field(default_factory=list)  # of response_ids, from the sampler
    text: str = ""  # the response, decoded
    result: dict = field(default_factory=dict)  # the Reward Loop's: reward_score, reward_extra_info, status
    advantage: float | None = None  # None: no verdict, no part in the loss
    prefix: int = 0  # so many tokens, those before the first wrong paragraph, have an advantage of their own
    prefix_advantage: float = 0.0
    verdict: Future | None = field(default=None, repr=False, compare=False)  # the result to come
    # Scratch of Policy.update, from before the step's first update: T log-probabilities each.
    old_logprobs: torch.Tensor | None = field(default=None, repr=False, compare=False)
    reference_logprobs: torch.Tensor | None = field(default=None, repr=False, compare=False)

    @property
    def reward(self) -> float | None:
        return self.result["reward_score"]

    @property
    def length(self) -> int:
        return len(self.prompt_ids) + len(self.response_ids)


class RanksLost(RuntimeError):
    """A process that holds a part of the policy has died; the run goes on from its newest checkpoint."""


class Policy:
    """A model and its optimizer. config: the trainer's; source: a folder or hub name.

    Weights and optimizer are float32. On a GPU the layers compute in bf16 and the head in float32 (TF32): in
    bf16 it alone would move log-probabilities by 0.02. Always in evaluation mode: with dropout the policy
    that learns is not the one that was sampled. ValueError where its log-probabilities come out wrong.
    """

    is_first = True  # of several ranks the one that writes
    read_as = torch.float32  # a model's files

    def __init__(self, config, source: str, device: torch.device):
        self.config, self.device, self.num_updates = config, device, 0
        if device.type == "cuda":
            torch.cuda.set_device(device)
            torch.set_float32_matmul_precision("high")
        self.adapters = import_module("lora") if config.lora_rank else None
        self.model, self.reference = self.load(source, check=True), None
        if config.kl_coef:  # with adapters it is the same model without them
            self.reference = self.model if self.adapters else self.load(config.model)
        options = dict(lr=config.lr, betas=config.adam_betas, weight_decay=config.weight_decay, fused=True)
        self.optimizer = torch.optim.AdamW(self.learning(), **options)

    def load(self, source: str, check: bool = False):
        """The model, ready to be computed with and to be saved."""
        options = dict(dtype=self.read_as, trust_remote_code=self.config.trust_remote_code)
        if self.config.max_positions:
            options["max_position_embeddings"] = self.config.max_positions
        base = self.config.model if self.adapters else source
        model = AutoModelForCausalLM.from_pretrained(base, **options).eval()
        try:
            model.generation_config.validate(strict=True)
        except ValueError:  # sampling values without do_sample, which transformers refuses to save
            model.generation_config.do_sample = True
            model.generation_config.validate(strict=True)
        if self.adapters:
            self.adapters.add(model, self.config, source)
        self.place(model)
        if check:
            check_logprobs(self.compute, model, source)
        return model

    # ---- the seams: what a rank of many does in its own way

    def place(self, model) -> None:
        """Takes a model that was read to where it is computed."""
        set_dtypes(model, self.config)
        model.to(self.device)
        if speedups:
            model.shares_prompts = speedups.can_share_prompts(model)

    def mine(self, samples: list[Sample]) -> list[Sample]:
        """The samples that this process computes."""
        return samples

    def total(self, sums: Counter) -> Counter:
        """These sums over all processes."""
        return sums

    def compute(self, model, *arguments):
        return logprobs_and_entropy(model, *arguments)

    def forward(self, samples: list[Sample], model=None):
        """The model on micro-batches: yields (samples, logprobs, entropy, mask), the last three B x T."""
        config = self.config
        for indices in micro_batches([s.length for s in samples], config.max_tokens_per_micro_batch):
            part = [samples[index] for index in indices]
            counts = [len(sample.response_ids) for sample in part]
            sequences = [sample.prompt_ids + sample.response_ids for sample in part]
            arguments = sequences, counts, config.temperature, config.entropy_coef != 0
            logprobs, entropy = self.compute(model or self.model, *arguments)
            yield part, logprobs, entropy, mask_of(counts, self.device)

    # ---- the update

    def update(self, groups: list[list[Sample]], lr: float, max_logprob_diff: float = math.inf) -> dict:
        """One pass over the step's groups in mini-batches, one optimizer update each. Returns metrics.

        Samples without a gradient are not trained on: no verdict, or advantage 0 where only the advantage
        moves the policy. The token mean counts all that have a verdict. Entropy and rollout/logprob_diff are
        those of all samples before the first update; everything else is a mean over the tokens trained on.

        Raises RuntimeError before the first optimizer step where sampler and policy differ by more than
        max_logprob_diff (mean over all tokens), and where the loss or the gradient is not finite.
        """
        config, sums, norms = self.config, Counter(), []
        self.optimizer.param_groups[0]["lr"] = lr
        mini_batches = deal(groups, config.mini_batch_size)
        learning = [self.mine([s for s in batch if self.has_gradient(s)]) for batch in mini_batches]
        resting = [self.mine([s for s in batch if not self.has_gradient(s)]) for batch in mini_batches]
        for sample in learning[0]:
            sample.old_logprobs = None  # what the first update computes anyway
        for sample, logprobs, entropy in self.score(sum(learning[1:] + resting, [])):
            sample.old_logprobs = logprobs
            sums.update(agreement(logprobs, sample.rollout_logprobs, entropy))
        if self.reference is not None:
            with self.adapters.off(self.model) if self.adapters else contextlib.nullcontext():
                for sample, logprobs, _ in self.score(sum(learning, []), self.reference):
                    sample.reference_logprobs = logprobs
        sums = self.total(sums)
        for batch, everyone in zip(learning, mini_batches):
            if not any(map(self.has_gradient, everyone)):
                continue  # every group is all right or all wrong: no update
            lengths = [len(sample.response_ids) for sample in everyone if sample.advantage is not None]
            num_tokens = sum(lengths)
            if config.advantage == "dr_grpo":  # as if all were of full length
                num_tokens = len(lengths) * config.max_response_length
            self.optimizer.zero_grad(set_to_none=True)
            found = self.total(self.accumulate_gradients(batch, num_tokens, len(lengths)))
            sums.update(found)
            if not norms:  # by now all samples from before the first update are counted
                check_sampler(sums, max_logprob_diff)
            norms.append(self.step(found["loss_sum"]))
        if not norms:
            check_sampler(sums, max_logprob_diff)
        return self.metrics(sums, norms)

    def has_gradient(self, sample: Sample) -> bool:
        always = self.config.entropy_coef != 0 or self.reference is not None
        moves = sample.advantage != 0 or sample.prefix and sample.prefix_advantage != 0
        return sample.advantage is not None and bool(always or moves)

    def accumulate_gradients(self, samples: list[Sample], num_tokens: int, num_sequences: int) -> Counter:
        """Adds the gradient of these samples' part of a mini-batch's loss. Returns sums (SUMS).

        num_tokens, num_sequences: of the whole mini-batch, so that any split of it, over micro-batches or
        ranks, adds up to the same gradient. Without old_logprobs they are what the model says now.
        """
        config, sums = self.config, Counter()
        with checkpointed_layers(self.model) if config.gradient_checkpointing else contextlib.nullcontext():
            for part, logprobs, entropy, mask in self.forward(samples):
                is_first = part[0].old_logprobs is None
                old = logprobs.detach() if is_first else padded([s.old_logprobs for s in part], self.device)
                rollout = padded([sample.rollout_logprobs for sample in part], self.device)
                loss, found = compute_policy_loss(
                    logprobs, old, self.advantages(part), mask, num_tokens, config.clip_low, config.clip_high,
                    config.clip_c, rollout, config.tis_cap, loss=config.loss, tis_mode=config.tis_mode,
                    num_sequences=num_sequences)  # fmt: skip
                if config.entropy_coef:
                    loss = loss - config.entropy_coef * entropy[mask].sum() / num_tokens
                if self.reference is not None:
                    reference = padded([sample.reference_logprobs for sample in part], self.device)
                    kl = compute_kl_loss(logprobs, reference, mask, num_tokens)
                    loss = loss + config.kl_coef * kl
                    found["reference_kl_sum"] = kl.item() * num_tokens
                loss.backward()
                sums.update(found | {"loss_sum": loss.item()})
                if is_first:
                    sums.update(agreement(old[mask], rollout[mask], entropy[mask]))
        return sums

    def advantages(self, samples: list[Sample]):
        """B x T: each sample's prefix_advantage on its prefix, its advantage on the rest."""
        return padded([[s.prefix_advantage] * s.prefix + [s.advantage] * (len(s.response_ids) - s.prefix)
                       for s in samples], self.device)  # fmt: skip

    def step(self, loss: float) -> float:
        """One optimizer step. Returns the gradient norm; RuntimeError where it or the loss is not finite."""
        norm = whole(clip_grad_norm_(self.model.parameters(), self.config.max_grad_norm)).item()
        if not math.isfinite(loss + norm):
            raise RuntimeError(f"loss {loss:g}, gradient {norm:g}: not finite; see samples.jsonl, lower --lr")
        self.num_updates += 1  # from here on the weights are no longer those of before
        self.optimizer.step()
        return norm

    def metrics(self, sums: Counter, norms: list[float]) -> dict:
        metrics = {"actor/updates": len(norms), "actor/entropy": sums["entropy_sum"] / sums["tokens"]}
        metrics["rollout/logprob_diff"] = sums["difference_sum"] / sums["tokens"]
        if norms:
            metrics["actor/loss"] = sums["loss_sum"] / len(norms)
            metrics["actor/grad_norm"] = sum(norms) / len(norms)
            per_token = {"actor/clip_fraction": "clipped_tokens", "actor/approx_kl": "approx_kl_sum"}
            per_token |= {"actor/kl_to_reference": "reference_kl_sum"} if self.reference is not None else {}
            if self.config.tis_cap is not None:
                per_token |= {"rollout/tis_mean": "tis_sum", "rollout/tis_capped": "tis_capped_tokens"}
            metrics |= {name: sums[key] / sums["loss_tokens"] for name, key in per_token.items()}
        return metrics

    @torch.no_grad()
    def score(self, samples: list[Sample], model=None):
        """Yields (sample, logprobs, entropies) of the response tokens under the policy or another model."""
        for part, logprobs, entropy, _ in self.forward(samples, model):
            for sample, *rows in zip(part, logprobs, entropy):
                yield sample, *(row[: len(sample.response_ids)] for row in rows)

    # ---- weights, checkpoints

    def release_memory(self) -> None:
        """Gives GPU memory that PyTorch keeps for later back to the device, for others that share it."""
        torch.cuda.empty_cache()

    def about(self) -> dict:
        """What serving or saving this model needs to know of it."""
        numel = sum(tensor.numel() for tensor in self.model.state_dict().values())
        return {"config": self.model.config, "architecture": type(self.model).__name__.removeprefix("FSDP"),
                "eos_token_id": self.model.generation_config.eos_token_id, "numel": numel,
                "adapters": self.adapters.describe(self.model) if self.adapters else ""}  # fmt: skip

    def weights(self, dtype: torch.dtype | None = None):
        """Name and whole tensor of every weight, with what adapters add; a tied head is one of its own."""
        named = self.adapters.merged(self.model) if self.adapters else self.model.state_dict().items()
        for name, tensor in named:
            yield name, whole(tensor.detach().to(self.device, dtype or tensor.dtype))  # cast: less to gather

    def learning(self):
        """Name and parameter of what is trained: everything, or adapters."""
        return ((name, p) for name, p in self.model.named_parameters() if p.requires_grad)

    def save(self, folder: Path) -> None:
        """Writes a Hugging Face folder (or adapters), the optimizer. RuntimeError: a weight is not finite."""
        named = ((n, whole(p.detach())) for n, p in self.learning()) if self.adapters else self.weights()
        weights = {name: tensor.cpu() for name, tensor in named if self.is_first}  # by all ranks together
        if broken := [name for name, tensor in weights.items() if not tensor.isfinite().all()]:
            raise RuntimeError(f"the weights are not finite (first {broken[0]}) and are not saved")
        if weights:
            self.model.save_pretrained(folder, state_dict=weights)
        dcp.save(self.moments(), checkpoint_id=folder / "optimizer")

    def load_optimizer(self, folder: Path) -> None:
        """Reads what `save` wrote, with however many ranks."""
        saved = dcp.FileSystemReader(folder / "optimizer").read_metadata().state_dict_metadata
        for name, parameter in self.learning():
            if f"{name}/step" in saved:  # it has had a gradient
                state = self.optimizer.state[parameter]
                state["step"] = torch.zeros((), device=parameter.device)
                state |= {key: torch.zeros_like(parameter) for key in ("exp_avg", "exp_avg_sq")}
        dcp.load(self.moments(), checkpoint_id=folder / "optimizer")  # in place

    def moments(self) -> dict[str, torch.Tensor]:
        """The optimizer's state by the names of the parameters."""
        states = ((name, self.optimizer.state.get(p, {})) for name, p in self.learning())
        return {f"{name}/{key}": value for name, state in states for key, value in state.items()}


def set_dtypes(model, config) -> None:
    """Everything is float32; for a GPU the layers that adapters leave as they are become bf16."""
    layers = layers_of(model, "lora_rank") if config.lora_rank and config.device == "cuda" else ()
    frozen = {p for layer in layers for p in layer.parameters() if not p.requires_grad}
    dtypes = {p: torch.bfloat16 if p in frozen else torch.float32 for p in model.parameters()}
    model._apply(lambda tensor: tensor.to(dtypes.get(tensor, tensor.dtype)))  # split ones, too


def whole(tensor):
    """All of a tensor that may be sharded over ranks (a DTensor)."""
    return tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor


def deal(groups: list[list[Sample]], mini_batch_size: int) -> list[list[Sample]]:
    """The groups' samples in mini-batches of at most `mini_batch_size` groups, as even as can be.

    A mini-batch is an optimizer update: a rest of one group must not weigh as much as the others.
    """
    count = math.ceil(len(groups) / mini_batch_size)
    bounds = [len(groups) * number // count for number in range(count + 1)]
    return [sum(groups[start:end], []) for start, end in zip(bounds, bounds[1:])]


def agreement(logprobs, rollout_logprobs, entropy) -> dict:
    """Sums over response tokens, for rollout/logprob_diff and actor/entropy."""
    difference = logprobs - torch.as_tensor(rollout_logprobs, device=logprobs.device)
    return {"difference_sum": difference.abs().sum().item(), "entropy_sum": entropy.sum().item(),
            "tokens": len(logprobs)}  # fmt: skip


def check_sampler(sums: Counter, limit: float) -> None:
    """RuntimeError where the samples did not come from the policy's weights."""
    difference = sums["difference_sum"] / sums["tokens"]
    if not difference <= limit:  # a NaN is no agreement
        raise RuntimeError(f"rollout/logprob_diff {difference:.3f} is over max_logprob_diff {limit:g}: the "
                           "sampler does not use the trainer's weights, or not their precision")  # fmt: skip


def micro_batches(lengths, max_tokens: int) -> list[list[int]]:
    """Indices in batches of similar lengths, `max_tokens` at most with padding (a longer one alone)."""
    batches = []
    for index in sorted(range(len(lengths)), key=lambda i: -lengths[i]):
        if batches and lengths[batches[-1][0]] * (len(batches[-1]) + 1) <= max_tokens:
            batches[-1].append(index)
        else:
            batches.append([index])
    return batches


# ---- log-probabilities


def logprobs_and_entropy(model, sequences, counts, temperature, entropy_gradient=True):
    """Log-probabilities of the response tokens, and entropies: two B x T tensors, 0 in the padding.

    sequences: prompt + response ids; counts: of the response. LOGITS_AT_ONCE logits exist at a time.
    """
    device = next(model.parameters()).device
    with precision(device):
        states = speedups and speedups.shared_states(model, sequences, counts)
        output, hidden_N_H, targets_N = states or response_states(model, sequences, counts, device)

    def of_chunk(hidden_n_H, targets_n):
        logp_n_V = temper(logits_of(model, output, hidden_n_H), temperature).log_softmax(-1)
        with torch.set_grad_enabled(entropy_gradient and torch.is_grad_enabled()):
            entropy_n = -(logp_n_V.exp() * logp_n_V).sum(-1)
        return logp_n_V.gather(-1, targets_n[:, None])[:, 0], entropy_n

    chunk = max(1, LOGITS_AT_ONCE[device.type] // model.config.get_text_config().vocab_size)
    again = torch.is_grad_enabled() and len(targets_N) > chunk  # each computes its logits again
    parts = [checkpoint(of_chunk, *arguments, use_reentrant=False) if again else of_chunk(*arguments)
             for arguments in zip(hidden_N_H.split(chunk), targets_N.split(chunk))]  # fmt: skip
    mask = mask_of(counts, device)
    empty = torch.zeros(mask.shape, device=device)
    return tuple(empty.masked_scatter(mask, torch.cat(part)) for part in zip(*parts))


def response_states(model, sequences, counts, device):
    """The body's output, the states that predict each response token (N x H), and those tokens (N)."""
    ids = padded(sequences, device, torch.long)  # on the right, unseen by a causal model: no mask needed
    rows = torch.repeat_interleave(torch.arange(len(sequences)), torch.tensor(counts)).to(device)
    ends = zip(map(len, sequences), counts)
    columns = torch.cat([torch.arange(end - count - 1, end - 1) for end, count in ends]).to(device)
    output = body_of(model)(input_ids=ids, use_cache=False)
    return output, output.last_hidden_state[rows, columns], ids[rows, columns + 1]  # t predicts t + 1


def precision(device, keep_casts=False):
    """On a GPU matrix products run in bf16, from weights that stay float32; on CPU everything is float32.

    keep_casts: each weight is cast once, and the copies (2 bytes a parameter) live as long as the context.
    """
    return torch.autocast(device.type, torch.bfloat16, device.type == "cuda", keep_casts)


def temper(logits, temperature):
    return logits if temperature == 1 else logits / temperature


def body_of(model):
    """The module that the model's own forward asks for hidden states: all layers, without the head."""
    body = model.base_model if model.base_model is not model else model.model  # Llama-4 misnames its own
    return getattr(body, "decoder", body)  # OPT's has one inside


def logits_of(model, output, hidden_N_H):
    """Logits N x V, float32, of hidden states taken from `output` of the body.

    Families differ in what follows the layers: soft caps, scales, one more layer. So the model's own forward
    computes the logits, and is given these hidden states when it asks its body for some.
    """
    body, answer = body_of(model), copy.copy(output)
    answer.last_hidden_state = hidden_N_H[None].float()
    body.forward = lambda *args, **kwargs: answer
    try:
        with torch.autocast(hidden_N_H.device.type, enabled=False):
            ids = torch.zeros(1, len(hidden_N_H), dtype=torch.long, device=hidden_N_H.device)
            return model.forward(input_ids=ids, use_cache=False).logits[0].float()
    finally:
        del body.forward


@torch.no_grad()
def check_logprobs(compute, model, name: str) -> None:
    """ValueError where log-probabilities made here differ from the model's own, on one short text."""
    size, device = model.config.get_text_config().vocab_size, next(model.parameters()).device
    ids = [number * 7919 % size for number in range(1, 10)]
    logprobs, _ = compute(model, [ids], [len(ids) - 1], 1.0)
    with precision(device):
        logits = model(input_ids=torch.tensor([ids], device=device), use_cache=False).logits[0, :-1].float()
    expected = logits.log_softmax(-1).gather(-1, torch.tensor(ids[1:], device=device)[:, None])[:, 0]
    difference = (logprobs[0] - expected).abs().mean().item()
    if not difference < (1e-3 if device.type == "cpu" else 0.1):
        name += f" ({type(model).__name__}) cannot be trained here: log-probabilities"
        raise ValueError(f"model: {name} differ from its own by {difference:.2g}; see policy.logits_of")


@contextlib.contextmanager
def checkpointed_layers(model):
    """Inside, the layers' activations are computed again in the backward pass instead of being kept.

    Not by transformers' own switch: that needs training mode, in which some models turn dropout on.
    """
    layers = layers_of(model, "gradient_checkpointing")
    shares = getattr(model, "shares_prompts", False)
    model.shares_prompts = False  # its keys would be cached twice
    for layer in layers:
        layer.forward = partial(checkpoint, layer.forward, use_reentrant=False, preserve_rng_state=False)
    try:
        yield
    finally:
        model.shares_prompts = shares
        for layer in layers:
            del layer.forward


def layers_of(model, field: str) -> list:
    """The model's repeated layers, as transformers marks them. ValueError naming `field` without any."""
    layers = [module for module in model.modules() if isinstance(module, GradientCheckpointingLayer)]
    if not layers:
        raise ValueError(f"{field}: {type(model).__name__} has no layers marked for it; leave it off")
    return layers


def left_padded(prompts, device):
    """Token ids, mask and positions of prompts that end in the same column, where all responses can start."""
    ids = padded(prompts, device, torch.long, "left")
    attended = padded([[1] * len(prompt) for prompt in prompts], device, torch.long, "left")
    return ids, attended, (attended.cumsum(1) - 1).clamp(min=0)


def mask_of(lengths, device):
    """B x T, true on tokens. Made from lengths, never from tokens: EOS may be the padding token."""
    return torch.arange(max(lengths), device=device) < torch.tensor(lengths, device=device)[:, None]


def padded(rows, device, dtype=torch.float32, side="right"):
    """Rows of different lengths (lists or 1-d tensors) as one tensor, zeros on one side."""
    rows = [torch.as_tensor(row, dtype=dtype) for row in rows]
    return pad_sequence(rows, batch_first=True, padding_side=side).to(device)
