"""The policy: a model and its optimizer on one device, and the samples that it learns from.

    policy = Policy(config, "PATH", torch.device("cpu"))       # config: the trainer's
    metrics = policy.update(samples, lr=1e-6)                  # one pass over a step's samples, in mini-batches

    Sample    one response to one prompt, from the draw to the loss
    Policy    score (log-probabilities and entropies), update, weights, save, load
    below     log-probabilities in chunks that never hold all logits; micro-batches by token budget

The formulas are in algorithm.py; sampling from the model is in rollout.py.

Left out: several devices, a critic model, adapters (LoRA), images.

Shapes: B sequences of a micro-batch, T tokens of the longest response, N response tokens in a row, H hidden, V vocabulary.
"""

import math
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path

import torch
from torch.nn.utils.rnn import pad_sequence
from torch.utils.checkpoint import checkpoint
from transformers import AutoModelForCausalLM, DynamicCache, GradientCheckpointingLayer
from transformers.cache_utils import DynamicLayer

from algorithm import compute_kl_loss, compute_policy_loss

LOGITS_AT_ONCE = 2**25  # float32: 128 MiB, of which a forward and backward pass holds five or six at a time


@dataclass
class Sample:
    """One response to one prompt."""

    row: dict
    """The row of the data file."""
    prompt_ids: list[int]
    response_ids: list[int] = field(default_factory=list)
    """The end token included, if there is one."""
    rollout_logprobs: list[float] = field(default_factory=list)
    """Of the response's tokens, as the sampler had them."""
    text: str = ""
    """The response, decoded."""
    result: dict = field(default_factory=dict)
    """What the Reward Loop says: reward_score, reward_extra_info, status."""
    advantage: float | None = None
    """None: no verdict, no part in the loss."""

    @property
    def reward(self) -> float | None:
        return self.result["reward_score"]


class Policy:
    """A model and its optimizer. config: the trainer's; source: a folder or hub name.

    Weights and optimizer are float32; on a GPU the matrix products run in bf16.
    """

    def __init__(self, config, source: str, device: torch.device):
        self.config, self.device = config, device
        if device.type == "cuda":
            torch.cuda.set_device(device)
        self.model = self.load_model(source)
        if config.gradient_checkpointing:
            self.model.gradient_checkpointing_enable()
            for module in self.model.modules():  # it works in training mode only; dropout inside the layers stays off
                module.training = isinstance(module, GradientCheckpointingLayer)
        self.reference = self.load_model(config.model) if config.kl_coef else None
        options = dict(lr=config.lr, betas=config.adam_betas, weight_decay=config.weight_decay, fused=True)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), **options)

    def load_model(self, source: str):
        options = dict(dtype=torch.float32, trust_remote_code=self.config.trust_remote_code)
        return AutoModelForCausalLM.from_pretrained(source, **options).to(self.device).eval()

    def update(self, samples: list[Sample], lr: float) -> dict:
        """One pass over the step's samples in mini-batches, one optimizer update each. Returns metrics.

        samples: whole groups, one after the other. Those of advantage 0 add nothing to the policy loss's gradient; they count
        in the token mean and are not computed. Raises RuntimeError where the loss or the gradient is not finite.
        """
        config = self.config
        for group in self.optimizer.param_groups:
            group["lr"] = lr
        everyone = config.entropy_coef != 0 or self.reference is not None  # else an advantage of 0 means no gradient

        def has_gradient(sample):
            return sample.advantage is not None and (everyone or sample.advantage != 0)

        rows = config.mini_batch_size * config.group_size
        mini_batches = [samples[start : start + rows] for start in range(0, len(samples), rows)]
        learning = [[sample for sample in batch if has_gradient(sample)] for batch in mini_batches]
        # Before the first update; in the first mini-batch the old log-probabilities are the model's own.
        later = [sample for batch in learning[1:] for sample in batch]
        old = {id(sample): logprobs for sample, (logprobs, _) in zip(later, self.score(later))}
        reference = {}
        if self.reference is not None:
            those = [sample for batch in learning for sample in batch]
            reference = {id(sample): logprobs for sample, (logprobs, _) in zip(those, self.score(those, self.reference))}
        sums, norms = Counter(), []
        if not any(learning):  # nothing to learn, still something to watch: samples with a verdict first
            some = sorted(samples, key=lambda sample: sample.advantage is None)[:8]
            with torch.no_grad():
                for part, logprobs, entropy, mask in self.forward(some):
                    sums.update(agreement(logprobs, self.padded_logprobs(part), entropy, mask))
        for batch, members in zip(learning, mini_batches):
            if not batch:  # every group is all right or all wrong: no gradient, and no update
                continue
            num_tokens = sum(len(sample.response_ids) for sample in members if sample.advantage is not None)
            self.optimizer.zero_grad(set_to_none=True)
            sums.update(self.accumulate_gradients(batch, num_tokens, old, reference))
            norm = torch.nn.utils.clip_grad_norm_(self.model.parameters(), config.max_grad_norm).item()
            if not math.isfinite(sums["actor/loss"]) or not math.isfinite(norm):
                raise RuntimeError(
                    f"loss {sums['actor/loss']:g}, gradient norm {norm:g}: not finite; look at the last rewards in samples.jsonl "
                    "and at actor/grad_norm and rollout/logprob_diff of the steps before, then lower --lr or --max-grad-norm"
                )
            self.optimizer.step()
            norms.append(norm)
        tokens, diff, entropy = (sums.pop(key) for key in ("tokens", "diff", "entropy"))
        metrics = {"actor/updates": len(norms), "rollout/logprob_diff": diff / tokens, "actor/entropy": entropy / tokens}
        if norms:
            metrics |= {key: value / len(mini_batches) for key, value in sums.items()}
            metrics["actor/grad_norm"] = sum(norms) / len(norms)
        return metrics

    def accumulate_gradients(self, samples: list[Sample], num_tokens: int, old: dict, reference: dict) -> Counter:
        """Adds the gradient of these samples' part of a mini-batch's loss to the parameters; returns sums that add up too.

        num_tokens: response tokens of the whole mini-batch, so that any split of it, over calls, micro-batches or ranks, has
        the same sum. old, reference: {id(sample): log-probabilities} before the first update and of the reference model;
        without an entry the first are what the model says now (the first update starts from there), and there is no KL.
        """
        config, sums = self.config, Counter()
        for part, logprobs, entropy, mask in self.forward(samples):
            old_logprobs = padded([old[id(s)] for s in part], self.device) if id(part[0]) in old else logprobs.detach()
            rollout_logprobs = self.padded_logprobs(part)
            loss, metrics = compute_policy_loss(
                logprobs, old_logprobs, torch.tensor([sample.advantage for sample in part], device=self.device), mask, num_tokens,
                config.clip_low, config.clip_high, config.clip_c, rollout_logprobs, config.tis_cap,
            )  # fmt: skip
            metrics = {key: metrics[name] / num_tokens for key, name in (("actor/clip_fraction", "clipped_tokens"), ("actor/approx_kl", "approx_kl_sum"))}
            if config.entropy_coef:
                loss = loss - config.entropy_coef * entropy[mask].sum() / num_tokens
            if id(part[0]) in reference:
                kl = compute_kl_loss(logprobs, padded([reference[id(s)] for s in part], self.device), mask, num_tokens)
                loss = loss + config.kl_coef * kl
                metrics["actor/kl_to_reference"] = kl.item()
            loss.backward()
            sums.update(metrics | {"actor/loss": loss.item()} | agreement(old_logprobs, rollout_logprobs, entropy, mask))
        return sums

    def padded_logprobs(self, samples):
        return padded([sample.rollout_logprobs for sample in samples], self.device)

    @torch.no_grad()
    def score(self, samples: list[Sample], model=None) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """Log-probabilities and entropies of each sample's response tokens under the policy, or another model."""
        scored = {}
        for part, logprobs, entropy, _ in self.forward(samples, model):
            for sample, *rows in zip(part, logprobs, entropy):
                scored[id(sample)] = tuple(row[: len(sample.response_ids)] for row in rows)
        return [scored[id(sample)] for sample in samples]

    def forward(self, samples: list[Sample], model=None):
        """The samples through the model, in micro-batches: yields (samples, logprobs, entropy, mask), the latter B x T."""
        lengths = [len(sample.prompt_ids) + len(sample.response_ids) for sample in samples]
        for micro in micro_batches(lengths, self.config.max_tokens_per_micro_batch):
            part = [samples[m] for m in micro]
            counts = [len(sample.response_ids) for sample in part]
            sequences = [sample.prompt_ids + sample.response_ids for sample in part]
            with precision(self.device):
                logprobs, entropy = logprobs_and_entropy(
                    model or self.model, sequences, counts, self.config.temperature, self.device,
                    entropy_gradient=self.config.entropy_coef != 0,
                )  # fmt: skip
            yield part, logprobs, entropy, mask_of(counts, self.device)

    def weights(self):
        """Name and tensor of every weight, one after the other; a tied head as a tensor of its own."""
        for name, tensor in self.model.state_dict().items():
            yield name, tensor.detach()

    def save(self, folder: Path) -> None:
        """Writes an ordinary Hugging Face folder, and optimizer.pt beside it."""
        self.model.save_pretrained(folder)
        torch.save(self.optimizer.state_dict(), folder / "optimizer.pt")

    def load_optimizer(self, folder: Path) -> None:
        self.optimizer.load_state_dict(torch.load(folder / "optimizer.pt", map_location="cpu", weights_only=True))


def precision(device):
    """On a GPU the matrix products run in bf16; the weights that they use stay float32, and on CPU everything does."""
    return torch.autocast(device.type, torch.bfloat16, enabled=device.type == "cuda")


def logprobs_and_entropy(model, sequences, responses, temperature, device, chunk=None, entropy_gradient=True):
    """Log-probabilities of the response tokens and the entropies there: two B x T tensors, zero in the padding.

    sequences: prompt + response token ids; responses: how many of the last ones count. The logits of `chunk` tokens (by
    default as many as LOGITS_AT_ONCE allows) exist at a time, in the backward pass as well.
    """
    hidden_N_H, targets_N = response_states(model, sequences, responses, device)
    head = model.get_output_embeddings()

    def of_chunk(hidden_n_H, targets_n):
        logp_n_V = head(hidden_n_H).float().div_(temperature).log_softmax(-1)
        with torch.set_grad_enabled(entropy_gradient and torch.is_grad_enabled()):
            entropy_n = -(logp_n_V.exp() * logp_n_V).sum(-1)
        return logp_n_V.gather(-1, targets_n[:, None])[:, 0], entropy_n

    chunk = chunk or max(1, LOGITS_AT_ONCE // head.weight.shape[0])
    parts = []
    for arguments in zip(hidden_N_H.split(chunk), targets_N.split(chunk)):
        # A single chunk is within the limit as it is; of several, each one's logits are computed again when it is their turn.
        again = torch.is_grad_enabled() and len(targets_N) > chunk
        parts.append(checkpoint(of_chunk, *arguments, use_reentrant=False) if again else of_chunk(*arguments))
    logprobs_N, entropy_N = (torch.cat(part) for part in zip(*parts))
    mask = mask_of(responses, device)
    return tuple(torch.zeros(mask.shape, device=device).masked_scatter(mask, values) for values in (logprobs_N, entropy_N))


def response_states(model, sequences, responses, device):
    """The hidden state that predicts each response token (N x H), and those tokens (N), sequence after sequence.

    Where samples repeat a good part of the tokens, being of one prompt, each prompt is computed once: its keys and values, and
    so their gradients, are shared. (Gradient checkpointing keeps no keys and values.)
    """
    prompts = [tuple(sequence[: len(sequence) - count]) for sequence, count in zip(sequences, responses)]
    distinct = {prompt: number for number, prompt in enumerate(dict.fromkeys(prompts))}
    repeated = sum(map(len, prompts)) - sum(map(len, distinct))
    cache = DynamicCache(config=model.config)
    shareable = all(type(layer) is DynamicLayer for layer in cache.layers) and not model.is_gradient_checkpointing
    if not shareable or repeated < sum(map(len, sequences)) / 8:  # sharing needs an attention mask, which costs something
        ids = padded(sequences, device, torch.long)
        rows = torch.repeat_interleave(torch.arange(len(sequences)), torch.tensor(responses)).to(device)
        # The state at t predicts the token at t + 1.
        columns = torch.cat([torch.arange(len(s) - count - 1, len(s) - 1) for s, count in zip(sequences, responses)]).to(device)
        # Padding stands on the right, where a causal model cannot see it: no attention mask is needed, and none is faster.
        return model.base_model(input_ids=ids, use_cache=False).last_hidden_state[rows, columns], ids[rows, columns + 1]
    which = torch.tensor([distinct[prompt] for prompt in prompts], device=device)
    ids, attended, positions = left_padded(list(distinct), device)
    read = model.base_model(input_ids=ids, attention_mask=attended, position_ids=positions, past_key_values=cache)
    hidden = read.last_hidden_state[which, -1:]  # predicts the first token
    ids, mask = padded([s[len(s) - n :] for s, n in zip(sequences, responses)], device, torch.long), mask_of(responses, device)
    if ids.shape[1] > 1:
        cache.batch_select_indices(which)
        attended = torch.cat([attended[which], mask[:, :-1]], 1)
        positions = positions[which, -1:] + torch.arange(1, ids.shape[1], device=device)
        rest = model.base_model(input_ids=ids[:, :-1], attention_mask=attended, position_ids=positions, past_key_values=cache)
        hidden = torch.cat([hidden, rest.last_hidden_state], 1)
    return hidden[mask], ids[mask]


def left_padded(prompts, device):
    """Token ids, mask and positions of prompts that end in the same column, where all responses can start."""
    width = max(map(len, prompts))
    ids = torch.tensor([[0] * (width - len(prompt)) + list(prompt) for prompt in prompts], device=device)
    attended = torch.tensor([[0] * (width - len(prompt)) + [1] * len(prompt) for prompt in prompts], device=device)
    return ids, attended, (attended.cumsum(1) - 1).clamp(min=0)


def mask_of(lengths, device):
    """B x T, true on the tokens of rows of these lengths. Never made from the tokens: the end token may be the padding token."""
    return torch.arange(max(lengths), device=device) < torch.tensor(lengths, device=device)[:, None]


def padded(rows, device, dtype=torch.float32):
    """Rows of different lengths (lists or 1-d tensors) as one tensor, zeros on the right."""
    return pad_sequence([torch.as_tensor(row, dtype=dtype) for row in rows], batch_first=True).to(device)


def micro_batches(lengths: list[int], max_tokens: int) -> list[list[int]]:
    """Indices in batches of similar lengths, each at most `max_tokens` with padding (one longer sequence goes alone)."""
    batches = []
    for index in sorted(range(len(lengths)), key=lambda i: -lengths[i]):
        if batches and lengths[batches[-1][0]] * (len(batches[-1]) + 1) <= max_tokens:
            batches[-1].append(index)
        else:
            batches.append([index])
    return batches


@torch.no_grad()
def agreement(logprobs, rollout_logprobs, entropy, mask) -> dict:
    """Sums over tokens, from which Policy.update makes rollout/logprob_diff and actor/entropy."""
    difference = (logprobs - rollout_logprobs).abs()[mask]
    return {"diff": difference.sum().item(), "entropy": entropy[mask].sum().item(), "tokens": len(difference)}
