"""The policy: a model and its optimizer, on one device or as one rank of many, and the samples that it learns from.

    policy = Policy(config, "PATH", torch.device("cpu"))       # config: the trainer's
    metrics = policy.update(samples, lr=1e-6)                  # one pass over a step's samples, in mini-batches

    Sample    one response to one prompt, from the draw to the loss
    Policy    score (log-probabilities and entropies), update, weights, save, load
    below     log-probabilities in chunks that never hold all logits; micro-batches by token budget

The formulas are in algorithm.py; sampling from the model is in rollout.py. With many ranks (sharding.py) each is a Policy, a Ray
actor that policy_group.py starts; all are called with the same samples and each computes a part of them.

Left out: a critic model, adapters (LoRA), images.

Shapes: B sequences of a micro-batch, T tokens of the longest response, N response tokens in a row, H hidden, V vocabulary.
"""

import contextlib
import copy
import math
import os
import socket
import warnings
from collections import Counter
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from types import MethodType

import safetensors.torch
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.fsdp import register_fsdp_forward_method
from torch.distributed.tensor import DTensor
from torch.nn.utils.rnn import pad_sequence
from torch.utils.checkpoint import checkpoint
from transformers import AutoModelForCausalLM, DynamicCache
from transformers.cache_utils import DynamicLayer

from algorithm import compute_kl_loss, compute_policy_loss
from cluster.sharding import Ranks, layers_of, shard

# Logits (float32 numbers) that exist at a time, of which a forward and backward pass holds five or six copies: 128 MiB, 1 GiB.
LOGITS_AT_ONCE = {"cpu": 2**25, "cuda": 2**28}
# Prompts are shared in the update where at least this share of the tokens repeats others: sharing needs an attention mask, and
# that costs as much as it saves when answers are long.
SHARE_FROM = 0.25
PACK = 2**29  # bytes of weights that travel together
# What adds up over micro-batches, mini-batches and ranks.
SUMS = ("loss_sum", "loss_tokens", "clipped_tokens", "approx_kl_sum", "reference_kl_sum",
        "difference_sum", "entropy_sum", "tokens")  # fmt: skip
warnings.filterwarnings("ignore", message="torch.distributed is disabled")  # checkpoints of one process say so, as intended


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
    """A model and its optimizer. config: the trainer's; source: a folder or hub name; ranks: which of many this one is.

    Weights and optimizer are float32. On a GPU the layers compute in bf16 and the head in float32 (TF32): in bf16 it alone
    would move log-probabilities by 0.02. The model is always in evaluation mode: dropout would make the policy that learns
    another one than the policy that was sampled.

    Of many ranks all do the same calls with the same arguments, and return the same, if not said otherwise.

    Raises ValueError for a model whose log-probabilities come out wrong here, or that could not be saved.
    """

    starts = 1  # how often its processes were started; a PolicyGroup's may be started again
    transfer = None  # the NCCL group with the servers

    def __init__(self, config, source: str, device: torch.device, ranks: Ranks | None = None):
        self.config, self.device, self.ranks, self.num_updates = config, device, ranks or Ranks(), 0
        if device.type == "cuda":
            torch.cuda.set_device(device)
            torch.set_float32_matmul_precision("high")
        if self.ranks.count > 1:
            cores = len(os.sched_getaffinity(0)) // self.ranks.turns if config.policy_offload else 1  # Adam is on the CPU then
            torch.set_num_threads(config.num_threads or max(cores, 1))
            self.ranks.join(device)
        self.model, self.share_prompts = self.ranks.by_turns(lambda: self.load(source, is_checked=True))
        self.share_prompts = self.ranks.agree(self.share_prompts)
        self.reference = self.ranks.by_turns(lambda: self.load(config.model)[0]) if config.kl_coef else None
        options = dict(lr=config.lr, betas=config.adam_betas, weight_decay=config.weight_decay, fused=True)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), **options)

    def load(self, source: str, is_checked: bool = False):
        """The model, ready to be computed with, and whether it can share prompts (for rank 0 to say)."""
        options = dict(dtype=torch.float32, trust_remote_code=self.config.trust_remote_code)
        model, can_share = AutoModelForCausalLM.from_pretrained(source, **options).eval(), False
        if self.ranks.count == 1:
            model = model.to(self.device)
        if is_checked:
            generation = model.generation_config
            try:
                generation.validate(strict=True)
            except ValueError:  # sampling values without do_sample, as some folders have them: transformers refuses to save those
                generation.do_sample = True
                generation.validate(strict=True)
            if self.ranks.rank == 0:
                check_logprobs(model, source)
                can_share = can_share_prompts(model)
        if self.ranks.count > 1:
            shard(model, self.ranks, self.config.policy_offload)
        # As a method of the model: its weights are whole only within a method that FSDP knows of.
        model.logprobs_and_entropy = MethodType(logprobs_and_entropy, model)
        register_fsdp_forward_method(model, "logprobs_and_entropy")
        return model, can_share

    def about(self) -> dict:
        """What whoever serves or saves this model has to know of it."""
        shapes = {name: list(tensor.shape) for name, tensor in self.model.state_dict().items()}
        return {"config": self.model.config, "architecture": type(self.model).__name__.removeprefix("FSDP"),
                "eos_token_id": self.model.generation_config.eos_token_id, "shapes": shapes,
                "numel": sum(map(math.prod, shapes.values()))}  # fmt: skip

    def update(self, samples: list[Sample], lr: float) -> dict:
        """One pass over the step's samples in mini-batches, one optimizer update each. Returns metrics.

        samples: whole groups, one after the other, dealt out evenly to the mini-batches. What has no gradient is not trained
        on: no verdict, or advantage 0 where nothing but the advantage moves the policy. The token mean counts all with a
        verdict. Entropy and rollout/logprob_diff are those of all samples before the first update; what else is logged is a
        mean over the tokens trained on.
        Raises RuntimeError where the loss or the gradient is not finite.
        """
        config, rank = self.config, self.ranks.rank
        self.optimizer_to(None)
        for group in self.optimizer.param_groups:
            group["lr"] = lr
        mini_batches = deal(samples, config.group_size, config.mini_batch_size)
        # Per mini-batch and rank: a sample is scored where it will be trained on.
        learning = [self.spread(list(filter(self.has_gradient, batch))) for batch in mini_batches]
        resting = [self.spread([sample for sample in batch if not self.has_gradient(sample)]) for batch in mini_batches]
        # Log-probabilities from before the first update. In the first mini-batch they are what the update itself computes.
        rest = [sum(parts, []) for parts in zip(*learning[1:], *resting)]
        old, reference, sums, norms = self.score_mine(rest), {}, Counter(), []
        for sample in rest[rank]:
            logprobs, entropy = old[id(sample)]
            sums.update(agreement(logprobs, torch.tensor(sample.rollout_logprobs, device=self.device), entropy))
        sums = self.ranks.sum(sums, SUMS)
        if self.reference is not None:
            reference = self.score_mine([sum(parts, []) for parts in zip(*learning)], self.reference)
        for dealt, everyone in zip(learning, mini_batches):
            if not any(dealt):  # every group is all right or all wrong: no gradient, and no update
                continue
            num_tokens = sum(len(sample.response_ids) for sample in everyone if sample.advantage is not None)
            self.optimizer.zero_grad(set_to_none=True)
            found = self.ranks.sum(self.accumulate_gradients(dealt, num_tokens, old, reference), SUMS)
            norm = torch.nn.utils.clip_grad_norm_(self.model.parameters(), config.max_grad_norm)
            norm = (norm.full_tensor() if isinstance(norm, DTensor) else norm).item()
            if not math.isfinite(found["loss_sum"]) or not math.isfinite(norm):
                raise RuntimeError(
                    f"loss {found['loss_sum']:g}, gradient norm {norm:g}: not finite; look at the last rewards in samples.jsonl "
                    "and at actor/grad_norm and rollout/logprob_diff of the steps before, then lower --lr or --max-grad-norm"
                )
            self.num_updates += 1  # from here on the weights are no longer those of before
            self.optimizer.step()
            sums.update(found)
            norms.append(norm)
        metrics = {"actor/updates": len(norms), "actor/entropy": sums["entropy_sum"] / sums["tokens"]}
        metrics["rollout/logprob_diff"] = sums["difference_sum"] / sums["tokens"]
        if norms:
            metrics |= {"actor/loss": sums["loss_sum"] / len(norms), "actor/grad_norm": sum(norms) / len(norms)}
            per_token = {"actor/clip_fraction": "clipped_tokens", "actor/approx_kl": "approx_kl_sum"}
            per_token |= {"actor/kl_to_reference": "reference_kl_sum"} if self.reference is not None else {}
            metrics |= {name: sums[key] / sums["loss_tokens"] for name, key in per_token.items()}
        return metrics

    def has_gradient(self, sample: Sample) -> bool:
        always = self.config.entropy_coef != 0 or self.reference is not None
        return sample.advantage is not None and (always or sample.advantage != 0)

    def spread(self, samples: list[Sample]) -> list[list[Sample]]:
        """The samples of each rank, of lengths as equal as can be."""
        ordered = sorted(samples, key=length, reverse=True) if self.ranks.count > 1 else samples
        return [ordered[rank :: self.ranks.count] for rank in range(self.ranks.count)]

    def accumulate_gradients(self, dealt: list[list[Sample]], num_tokens: int, old: dict, reference: dict) -> Counter:
        """Adds the gradient of these samples' part of a mini-batch's loss to the parameters. Returns sums, which add up too.

        dealt: the samples of each rank. num_tokens: response tokens of the whole mini-batch, so that any split of it, over
        calls, micro-batches or ranks, has the same sum. old: {id(sample): log-probabilities and entropies} from before the
        first update, without an entry what the model says now (the first update starts from there). reference: the same of
        the reference model, if there is one.
        """
        config, sums = self.config, Counter()
        with checkpointed_layers(self.model) if config.gradient_checkpointing else contextlib.nullcontext():
            for part, logprobs, entropy, mask in self.forward(dealt):
                if not part:  # a pass that only keeps step with the other ranks
                    (logprobs.sum() * 0.0).backward()
                    continue
                known = id(part[0]) in old
                old_logprobs = padded([old[id(sample)][0] for sample in part], self.device) if known else logprobs.detach()
                rollout_logprobs = padded([sample.rollout_logprobs for sample in part], self.device)
                loss, found = compute_policy_loss(
                    logprobs, old_logprobs, torch.tensor([sample.advantage for sample in part], device=self.device), mask,
                    num_tokens, config.clip_low, config.clip_high, config.clip_c, rollout_logprobs, config.tis_cap,
                )  # fmt: skip
                if config.entropy_coef:
                    loss = loss - config.entropy_coef * entropy[mask].sum() / num_tokens
                if reference:
                    reference_logprobs = padded([reference[id(sample)][0] for sample in part], self.device)
                    kl = compute_kl_loss(logprobs, reference_logprobs, mask, num_tokens)
                    loss = loss + config.kl_coef * kl
                    found["reference_kl_sum"] = kl.item() * num_tokens
                loss.backward()
                sums.update(found | {"loss_sum": loss.item()})
                if not known:
                    sums.update(agreement(old_logprobs[mask], rollout_logprobs[mask], entropy[mask]))
        return sums

    def score(self, samples: list[Sample], model=None) -> list[tuple[torch.Tensor, torch.Tensor] | None]:
        """Log-probabilities and entropies of each sample's response tokens under the policy, or another model.

        Of many ranks each gives its part, and None for the samples of the others.
        """
        scored = self.score_mine(self.spread(samples), model)
        return [scored.get(id(sample)) for sample in samples]

    @torch.no_grad()
    def score_mine(self, dealt: list[list[Sample]], model=None) -> dict:
        """`score` of samples that are dealt to the ranks: {id(sample): (log-probabilities, entropies)} of this one's."""
        scored = {}
        for part, logprobs, entropy, _ in self.forward(dealt, model):
            for sample, *rows in zip(part, logprobs, entropy):
                scored[id(sample)] = tuple(row[: len(sample.response_ids)] for row in rows)
        if self.ranks.count > 1:
            (model or self.model).reshard()  # without a backward pass it would go on holding its embedding and head whole
        return scored

    def forward(self, dealt: list[list[Sample]], model=None):
        """This rank's samples through the model, in micro-batches: yields (samples, logprobs, entropy, mask), the latter B x T.

        dealt: the samples of each rank. All ranks make equally many passes of the same kind, or one would wait for ever for the
        others to gather a layer: one that has fewer micro-batches repeats somebody's, yielded without samples.
        """
        limit, config = self.config.max_tokens_per_micro_batch, self.config
        batches = [[[samples[m] for m in micro] for micro in micro_batches(map(length, samples), limit)] for samples in dealt]
        for number in range(max(map(len, batches))):
            parts = [mine[number] if number < len(mine) else None for mine in batches]
            part = parts[self.ranks.rank]
            share = self.share_prompts and not config.gradient_checkpointing  # which computes a layer's keys twice
            share = share and all(worth_sharing(part) for part in parts if part)
            used = part or next(filter(None, parts))
            counts = [len(sample.response_ids) for sample in used]
            sequences = [sample.prompt_ids + sample.response_ids for sample in used]
            options = dict(entropy_gradient=config.entropy_coef != 0, share_prompts=share)
            logprobs, entropy = (model or self.model).logprobs_and_entropy(sequences, counts, config.temperature, **options)
            yield part or [], logprobs, entropy, mask_of(counts, self.device)

    def weights(self, dtype: torch.dtype | None = None):
        """Name and whole tensor of every weight, one after the other; a tied head as a tensor of its own."""
        for name, tensor in self.model.state_dict().items():
            tensor = tensor.detach().to(self.device, dtype or tensor.dtype)  # before it is gathered: there is less to send
            yield name, tensor.full_tensor() if isinstance(tensor, DTensor) else tensor

    def packs(self, dtype: torch.dtype):
        """All weights as the contents of safetensors files of about half a GiB each, from rank 0; the others only take part."""
        pack, size = {}, 0
        for name, tensor in self.weights(dtype):
            if self.ranks.rank:
                continue
            if pack and size + tensor.nbytes > PACK:
                yield safetensors.torch.save(pack, metadata={"format": "pt"})
                pack, size = {}, 0
            pack[name], size = tensor.to("cpu", copy=True).contiguous(), size + tensor.nbytes
        if pack:
            yield safetensors.torch.save(pack, metadata={"format": "pt"})

    def send_weights(self, folders: list, dtype: torch.dtype) -> set[int]:
        """The weights to rollout.WeightFolders: objects here, or from rank 0 to Ray actors. Returns which of those are gone."""
        gone = set()
        for number, pack in enumerate(self.packs(dtype)):
            if self.ranks.count == 1:
                for folder in folders:
                    folder.add(number, pack)
                continue
            import numpy
            import ray

            pack = ray.put(numpy.frombuffer(pack, numpy.uint8))  # in the object store, once for all nodes
            writing = {index: folder.add.remote(number, pack) for index, folder in enumerate(folders) if index not in gone}
            for index, done in writing.items():
                try:
                    ray.get(done)
                except (ray.exceptions.RayActorError, ray.exceptions.ActorUnschedulableError):  # its node went
                    gone.add(index)
        return gone

    def offer_transfer(self) -> tuple[str, int]:
        """Where rank 0 can be met by servers that take weights by NCCL."""
        import ray

        host = ray.util.get_node_ip_address() if self.ranks.count > 1 else "127.0.0.1"  # servers may be on other nodes
        with socket.socket() as free:
            free.bind((host, 0))
            return free.getsockname()

    def open_transfer(self, address: str, port: int, size: int) -> None:
        """Rank 0 becomes rank 0 of an NCCL group with the servers. RuntimeError without NCCL."""
        if self.ranks.rank:
            return
        from vllm.distributed.device_communicators.pynccl import PyNcclCommunicator
        from vllm.distributed.utils import StatelessProcessGroup

        self.transfer = PyNcclCommunicator(StatelessProcessGroup.create(address, port, 0, size), device=self.device)
        if self.transfer.disabled:  # without libnccl it would send nothing and say nothing
            raise RuntimeError("NCCL: not available in this process; take the transfer by file")

    def transfer_weights(self, dtype: torch.dtype) -> None:
        """All weights to that group."""
        for _, weight in self.weights(dtype):
            if not self.ranks.rank:
                self.transfer.broadcast(weight.contiguous(), src=0)
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)

    def abandon_transfer(self) -> None:
        """Ends a transfer that hangs; from another thread. A group that is still being made cannot be ended."""
        if self.transfer is not None:
            self.transfer.destroy()

    def release_memory(self, optimizer: bool = False) -> None:
        """Gives the GPU memory that PyTorch keeps for later back to the device, for others that share it.

        optimizer: that of the gradients too, and the optimizer's state waits in the host's memory for the next update.
        """
        if optimizer:
            self.optimizer.zero_grad(set_to_none=True)
            self.optimizer_to("cpu")
        if self.device.type == "cuda":
            torch.cuda.empty_cache()

    def optimizer_to(self, device: str | None) -> None:
        """Moves the optimizer's state to this device; None: to where the weights are."""
        for parameter, state in self.optimizer.state.items():
            for key, value in state.items():
                state[key] = value.to(device or parameter.device)

    def save(self, folder: Path) -> None:
        """Writes an ordinary Hugging Face folder (from rank 0), and the optimizer beside it, for any number of ranks to load."""
        if self.ranks.count == 1:
            self.model.save_pretrained(folder)
        else:
            whole = {name: tensor.cpu() for name, tensor in self.weights() if self.ranks.rank == 0}
            if whole:
                self.model.save_pretrained(folder, state_dict=whole)
        dcp.save(self.moments(), checkpoint_id=folder / "optimizer", no_dist=self.ranks.count == 1)

    def load_optimizer(self, folder: Path) -> None:
        """What `save` wrote, with however many ranks."""
        saved = dcp.FileSystemReader(folder / "optimizer").read_metadata().state_dict_metadata
        for name, parameter in self.model.named_parameters():
            if f"{name}/step" in saved:  # it has had a gradient
                state = self.optimizer.state[parameter]
                state["step"] = torch.zeros((), device=parameter.device)
                state |= {key: torch.zeros_like(parameter) for key in ("exp_avg", "exp_avg_sq")}
        dcp.load(self.moments(), checkpoint_id=folder / "optimizer", no_dist=self.ranks.count == 1)  # in place

    def moments(self) -> dict[str, torch.Tensor]:
        """The optimizer's state by the names of the parameters."""
        state = self.optimizer.state
        return {f"{name}/{key}": value for name, p in self.model.named_parameters() for key, value in state.get(p, {}).items()}


def length(sample: Sample) -> int:
    return len(sample.prompt_ids) + len(sample.response_ids)


def worth_sharing(samples: list[Sample]) -> bool:
    """Whether enough of these tokens repeats other samples' prompts, and there is something behind the first token."""
    prompts = [tuple(sample.prompt_ids) for sample in samples]
    repeated = sum(map(len, prompts)) - sum(map(len, set(prompts)))
    return repeated > SHARE_FROM * sum(map(length, samples)) and max(len(sample.response_ids) for sample in samples) > 1


def deal(samples: list[Sample], group_size: int, mini_batch_size: int) -> list[list[Sample]]:
    """The groups in as few mini-batches as hold at most `mini_batch_size` groups each, as even as can be.

    A mini-batch is an optimizer update, however few groups it has: a rest of one group must not weigh as much as the others.
    """
    groups = len(samples) // group_size
    count = math.ceil(groups / mini_batch_size)
    bounds = [groups * number // count * group_size for number in range(count + 1)]
    return [samples[start:end] for start, end in zip(bounds, bounds[1:])]


def agreement(logprobs, rollout_logprobs, entropy) -> dict:
    """Sums over response tokens, for rollout/logprob_diff and actor/entropy."""
    difference = (logprobs.detach() - rollout_logprobs).abs().sum().item()
    return {"difference_sum": difference, "entropy_sum": entropy.detach().sum().item(), "tokens": len(logprobs)}


def micro_batches(lengths, max_tokens: int) -> list[list[int]]:
    """Indices in batches of similar lengths, each at most `max_tokens` with padding (one longer sequence goes alone)."""
    batches, lengths = [], list(lengths)
    for index in sorted(range(len(lengths)), key=lambda i: -lengths[i]):
        if batches and lengths[batches[-1][0]] * (len(batches[-1]) + 1) <= max_tokens:
            batches[-1].append(index)
        else:
            batches.append([index])
    return batches


# ------------------------------------------------------------------------------------------------------- log-probabilities


def logprobs_and_entropy(model, sequences, responses, temperature, entropy_gradient=True, share_prompts=False):
    """Log-probabilities of the response tokens and the entropies there: two B x T tensors, zero in the padding.

    sequences: prompt + response token ids; responses: how many of the last ones count. The logits of as many tokens as
    LOGITS_AT_ONCE allows exist at a time, in the backward pass as well. share_prompts: compute equal prompts once.
    """
    device = next(model.parameters()).device
    with precision(device):
        if share_prompts:
            output, hidden_N_H, targets_N = states_with_shared_prompts(model, sequences, responses, device)
        else:  # padding stands on the right, where a causal model cannot see it: no attention mask is needed
            ids = padded(sequences, device, torch.long)
            rows = torch.repeat_interleave(torch.arange(len(sequences)), torch.tensor(responses)).to(device)
            # The state at t predicts the token at t + 1.
            columns = torch.cat([torch.arange(len(s) - n - 1, len(s) - 1) for s, n in zip(sequences, responses)]).to(device)
            output = body_of(model)(input_ids=ids, use_cache=False)
            hidden_N_H, targets_N = output.last_hidden_state[rows, columns], ids[rows, columns + 1]

    def of_chunk(hidden_n_H, targets_n):
        logp_n_V = temper(logits_of(model, output, hidden_n_H), temperature).log_softmax(-1)
        with torch.set_grad_enabled(entropy_gradient and torch.is_grad_enabled()):
            entropy_n = -(logp_n_V.exp() * logp_n_V).sum(-1)
        return logp_n_V.gather(-1, targets_n[:, None])[:, 0], entropy_n

    chunk = max(1, LOGITS_AT_ONCE[device.type] // model.config.get_text_config().vocab_size)
    parts = []
    for arguments in zip(hidden_N_H.split(chunk), targets_N.split(chunk)):
        # A single chunk is within the limit as it is; of several, each one's logits are computed again when it is their turn.
        again = torch.is_grad_enabled() and len(targets_N) > chunk
        parts.append(checkpoint(of_chunk, *arguments, use_reentrant=False) if again else of_chunk(*arguments))
    logprobs_N, entropy_N = (torch.cat(part) for part in zip(*parts))
    mask = mask_of(responses, device)
    return tuple(torch.zeros(mask.shape, device=device).masked_scatter(mask, values) for values in (logprobs_N, entropy_N))


def states_with_shared_prompts(model, sequences, responses, device):
    """The body's output, the states that predict each response token (N x H), and those tokens (N).

    Each distinct prompt is computed once: its keys and values, and so their gradients, are shared by its responses.
    """
    prompts = [tuple(sequence[: len(sequence) - count]) for sequence, count in zip(sequences, responses)]
    body, distinct = body_of(model), {prompt: number for number, prompt in enumerate(dict.fromkeys(prompts))}
    cache, which = DynamicCache(config=model.config), torch.tensor([distinct[prompt] for prompt in prompts], device=device)
    ids, attended, positions = left_padded(list(distinct), device)
    output = body(input_ids=ids, attention_mask=attended, position_ids=positions, past_key_values=cache, use_cache=True)
    hidden = output.last_hidden_state[which, -1:]  # predicts the first token
    ids, mask = padded([s[len(s) - n :] for s, n in zip(sequences, responses)], device, torch.long), mask_of(responses, device)
    if ids.shape[1] > 1:
        cache.reorder_cache(which)
        attended = torch.cat([attended[which], mask[:, :-1]], 1)
        positions = positions[which, -1:] + torch.arange(1, ids.shape[1], device=device)
        inputs = dict(attention_mask=attended, position_ids=positions, past_key_values=cache, use_cache=True)
        hidden = torch.cat([hidden, body(input_ids=ids[:, :-1], **inputs).last_hidden_state], 1)
    return output, hidden[mask], ids[mask]


@torch.no_grad()
def can_share_prompts(model) -> bool:
    """Whether sharing gives this model the same log-probabilities: only caches of full attention can, and it is tried."""
    if not all(type(layer) is DynamicLayer for layer in DynamicCache(config=model.config).layers):
        return False
    size = model.config.get_text_config().vocab_size
    ids = [number * 7919 % size for number in range(1, 20)]
    sequences, responses = [ids[:11], ids[:8] + ids[12:], ids[:8] + ids[11:13], ids[4:9]], [3, 7, 2, 1]
    try:
        shared, plain = (logprobs_and_entropy(model, sequences, responses, 1.0, share_prompts=s)[0] for s in (True, False))
    except (TypeError, AttributeError, NotImplementedError, ValueError, RuntimeError):  # a cache of its own kind, say
        return False
    return (shared - plain).abs().mean().item() < (1e-4 if shared.device.type == "cpu" else 0.05)


def precision(device, keep_casts=False):
    """On a GPU the matrix products run in bf16; the weights that they use stay float32, and on CPU everything does.

    keep_casts: each weight is cast once, and the copies (2 bytes a parameter) live as long as the context.
    """
    return torch.autocast(device.type, torch.bfloat16, enabled=device.type == "cuda", cache_enabled=keep_casts)


def temper(logits, temperature):
    return logits if temperature == 1 else logits / temperature


def body_of(model):
    """The module that the model's own forward asks for hidden states: all layers, without the head."""
    body = model.base_model if model.base_model is not model else model.model  # Llama-4 misnames its own
    return getattr(body, "decoder", body)  # OPT's has one inside


def logits_of(model, output, hidden_N_H):
    """Logits N x V, float32, of hidden states taken from `output` of the body.

    Families differ in what they do after the layers: soft caps, scales, one more layer. So the model's own forward computes
    the logits, with these hidden states for an answer when it asks its body.
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
def check_logprobs(model, name: str) -> None:
    """Raises ValueError where log-probabilities made here differ from those that the model itself gives, on one short text."""
    size = model.config.get_text_config().vocab_size
    ids = [number * 7919 % size for number in range(1, 10)]
    logprobs, _ = logprobs_and_entropy(model, [ids], [len(ids) - 1], 1.0)
    device = logprobs.device
    with precision(device):
        logits = model(input_ids=torch.tensor([ids], device=device), use_cache=False).logits[0, :-1].float()
    expected = logits.log_softmax(-1).gather(-1, torch.tensor(ids[1:], device=device)[:, None])[:, 0]
    difference, allowed = (logprobs[0] - expected).abs().mean().item(), 1e-3 if device.type == "cpu" else 0.1
    if not difference < allowed:
        raise ValueError(
            f"model: {name} ({type(model).__name__}) cannot be trained here: log-probabilities differ from its own by "
            f"{difference:.2g}; its family turns hidden states into logits in a way that policy.logits_of does not know"
        )


@contextlib.contextmanager
def checkpointed_layers(model):
    """Inside, the layers' activations are computed again in the backward pass instead of being kept.

    Not by transformers' own switch: that one needs training mode, in which some models turn dropout on and all turn their
    key-value caches off.
    """
    layers = layers_of(model, "gradient_checkpointing")
    for layer in layers:
        layer.forward = partial(checkpoint, layer.forward, use_reentrant=False, preserve_rng_state=False)
    try:
        yield
    finally:
        for layer in layers:
            del layer.forward


# ------------------------------------------------------------------------------------------------------------------ batches


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
