"""Trains a policy with GRPO on the rewards of the Reward Loop: rollouts -> rewards -> advantages -> policy update.

    python grpo_trainer.py --model data/toy/policy --train-file data/toy/toy_train.parquet --val-file data/toy/toy_test.parquet \\
        --reward-fn toy_world.py:compute_score_fapo_oracle --out-dir outputs/first --total-steps 20 --train-batch-size 16 \\
        --mini-batch-size 8 --max-response-length 64 --overlong-buffer 0 --lr 2e-4 --adam-betas 0.9 0.95 --num-threads 1

What is covered, top to bottom:
    Config           the whole command line; the defaults are the paper's (FAPO-7B)
    loss functions   group-normalised advantages, clip-higher, dual clip, truncated importance sampling, KL
    rollouts         in this process (hf) or on vLLM servers (vllm); a sample goes to its reward the moment it ends
    update           micro-batches by token budget, log-probabilities in chunks that never hold all logits
    data, and what is checked before the first step
    Trainer          the loop itself, with the Reward Loop (reward_loop.py); what it writes is in run_folder.py
What is left out: several GPUs for the policy's update, a critic model, prompts with images, turns and tools.

Names carry shapes: P prompts, G samples of each, B = P*G sequences, T tokens of the longest, N tokens in a row,
H hidden, V vocabulary.
Four words for four things: score (the function's), penalty (length), reward (their sum), advantage (reward within its group).
"""

import asyncio
import contextlib
import importlib.util
import json
import math
import os
import random
import re
import shlex
import sys
import time
from collections import Counter
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Literal

import aiohttp
import torch
import tyro
from torch.nn.utils.rnn import pad_sequence
from torch.utils.checkpoint import checkpoint
from tqdm import tqdm
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, DynamicCache, GradientCheckpointingLayer
from transformers.cache_utils import DynamicLayer
from transformers.utils import logging as transformers_logging

import genrm_server
import reward_loop
from run_folder import Interrupts, Log, check_folder, check_room, checkpoints_in, save_checkpoint, write_config
from run_folder import mean, reward_metrics, validation_metrics


@dataclass
class Config:
    model: str
    """Folder of the policy (Hugging Face format), or a hub name such as Qwen/Qwen2.5-Math-7B."""
    train_file: str
    """File of training rows, parquet or JSONL (prepare_data.py writes them)."""
    out_dir: str
    """Folder of the run: config.json, metrics.jsonl, samples.jsonl, curves.png, checkpoints/."""
    val_file: tuple[str, ...] = ()
    """Files of validation rows; none: no evaluation."""

    # Rewards
    reward_fn: str = "compute_score.py:compute_score"
    """FILE:NAME of the reward function."""
    reward_kwargs: str = "{}"
    """JSON object of keyword arguments for the reward function, such as {"penalty": 1.0}."""
    baseline: bool = False
    """Take `compute_score_baseline` of the same FILE instead: the rule alone pays, the reward model only measures."""
    router_address: str | None = None
    """host:port of a reward model that runs already (genrm_server.py, or any OpenAI-compatible address)."""
    genrm: str | None = None
    """Folder or hub name of a generative reward model to start and stop with this run."""
    genrm_servers: int = 1
    """Number of vLLM servers for --genrm."""
    genrm_cpus: str = ""
    """On CPU: cores for the servers of --genrm, such as "1"; default: all, shared out evenly."""
    reward_mode: Literal["standalone", "colocate"] = "standalone"
    """standalone: score each sample the moment its rollout ends. colocate: first all rollouts, then all scores."""
    num_reward_workers: int = 2
    """Ray actors that call the reward function."""
    reward_timeout: float = 600.0
    """Seconds after which a sample's score is given up (status "timeout")."""
    max_no_verdict_rate: float = 0.5
    """The run stops when a larger share of a step's samples has no verdict: the judge is down, or the function is broken."""

    # Batch
    total_steps: int = 200
    """Training steps."""
    train_batch_size: int = 512
    """Prompts per step (P)."""
    group_size: int = 8
    """Samples per prompt (G)."""
    mini_batch_size: int = 32
    """Prompts per optimizer update."""
    max_prompt_length: int = 2048
    """Rows with longer prompts (tokens) are dropped and counted before the first step."""
    max_response_length: int = 8192
    """A rollout is cut after this many tokens."""
    dynamic_sampling: bool = False
    """Replace groups whose rewards are all equal, which teach nothing, by groups of further prompts (DAPO)."""
    max_refills: int = 10
    """Rounds of replacement per step at most; then the step makes do with what it has."""

    # Rollouts
    rollout: Literal["hf", "vllm"] = "hf"
    """hf: in this process, best for small models. vllm: on vLLM servers that get the new weights after each update."""
    rollout_servers: int = 1
    """Number of vLLM servers for --rollout vllm."""
    rollout_cpus: str = ""
    """On CPU: cores for those servers, such as "1"; default: all, shared out evenly."""
    rollout_gpus: str = ""
    """GPUs for those servers, such as 0,1,2; default: all that are visible."""
    rollout_vllm_args: str = ""
    """Arguments for those servers, in quotes, such as "--gpu-memory-utilization 0.5" where they share the trainer's GPU."""
    weight_sync: Literal["file", "nccl"] = "file"
    """How new weights reach those servers. file: through shared memory, everywhere. nccl: GPU to GPU, for large models."""
    rollout_batch_size: int = 512
    """Sequences generated at once."""
    temperature: float = 1.0
    """Sampling temperature of rollouts; the loss uses the same distribution. (The paper trains its GenRM at 1.2.)"""
    max_logprob_diff: float = 0.2
    """The run stops when sampler and trainer differ by more than this (rollout/logprob_diff): the sampler's weights are old."""

    # Algorithm
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
    """auto, cpu, cuda or cuda:N, where the policy is trained. auto: the last GPU (Ray gives judges the first ones), else cpu."""
    num_threads: int = 0
    """CPU threads of torch; 0: torch's own choice. For models of a few million parameters 1 is fastest."""
    max_tokens_per_micro_batch: int = 16384
    """Token budget (with padding) of one forward and backward pass."""
    gradient_checkpointing: bool = False
    """Recompute activations in the backward pass: slower, much less memory."""
    seed: int = 0
    """Seed of data order and sampling."""

    # Files
    save_every: int = 0
    """Steps between checkpoints; 0: only the last step's, and where the run is stopped."""
    keep_checkpoints: int = 2
    """Older checkpoints are deleted; 0: keep all."""
    resume: Literal["never", "auto"] = "never"
    """auto: go on from the newest checkpoint in out_dir, if there is one."""
    samples_per_step: int = 8
    """Samples of each data source written to samples.jsonl, per step and per evaluation."""
    tensorboard: bool = False
    """Write the metrics for TensorBoard too (out_dir/tensorboard)."""
    wandb: bool = False
    """Send the metrics to Weights & Biases too (project "fapo"; WANDB_MODE=offline keeps them in out_dir/wandb)."""
    dry_run: bool = False
    """Check everything, print the whole configuration and an estimate of memory, and stop."""
    trust_remote_code: bool = False
    """Run code that comes with the model's folder."""


# --------------------------------------------------------------------------------------------------------- loss functions


def compute_advantages(rewards_P_G: torch.Tensor) -> torch.Tensor:
    """(reward - mean) / (sample std + 1e-6) within each group (GRPO; FAPO uses it on its own rewards, paper section 3).

    NaN means no verdict: such a sample has advantage 0 and is left out of its group's mean and std. A group with fewer than
    two verdicts or without spread gets 0. Returns advantages_P_G.
    """
    known = ~rewards_P_G.isnan()
    count = known.sum(1, keepdim=True)
    mean = rewards_P_G.nan_to_num().sum(1, keepdim=True) / count.clamp(min=1)
    centred = torch.where(known, rewards_P_G - mean, 0.0)
    std = (centred.square().sum(1, keepdim=True) / (count - 1).clamp(min=1)).sqrt()
    # A group without spread can have a std of rounding errors, which the division would blow up.
    lowest = torch.where(known, rewards_P_G, math.inf).amin(1, keepdim=True)
    highest = torch.where(known, rewards_P_G, -math.inf).amax(1, keepdim=True)
    return torch.where((count >= 2) & (highest > lowest), centred / (std + 1e-6), 0.0)


def why_useless(results: list[dict]) -> str | None:
    """Why a group of samples teaches nothing, or None if it does: the reasons for which --dynamic-sampling drops groups."""
    rewards = [result["reward_score"] for result in results if result["reward_score"] is not None]
    if len(rewards) < 2:
        return "no_verdict"
    if min(rewards) < max(rewards):
        return None
    right = {bool(result["reward_extra_info"].get("acc")) for result in results}
    return "equal_rewards" if len(right) > 1 else "all_right" if right == {True} else "all_wrong"


def compute_policy_loss(logprobs, old_logprobs, advantages, mask, num_tokens, clip_low=0.2, clip_high=0.28, clip_c=10.0,
                        rollout_logprobs=None, tis_cap=None):  # fmt: skip
    """The clipped policy loss, a token mean over the global `num_tokens` (GRPO with DAPO's clip-higher, dual clip).

    logprobs, old_logprobs, rollout_logprobs: B x T, of the sampled tokens under the policy now, before this step's first
    update, and as the sampler had them. advantages: B or B x T. mask: B x T, true on response tokens. num_tokens: response
    tokens of the whole mini-batch, so that the sum over any split into micro-batches or ranks is the same loss.
    tis_cap: weigh each token by min(exp(old - rollout), tis_cap) (truncated importance sampling); needs rollout_logprobs.

    Returns (loss, metrics); metrics are floats that add up over micro-batches as the loss does. Nothing is mutated.
    """
    if advantages.dim() == 1:
        advantages = advantages[:, None]
    mask = mask.to(logprobs.dtype)
    log_ratio = torch.where(mask > 0, logprobs - old_logprobs, 0.0)  # what stands in the padding may be anything, NaN too
    ratio = log_ratio.exp()
    unclipped = -advantages * ratio
    clipped = -advantages * ratio.clamp(1 - clip_low, 1 + clip_high)
    loss_B_T = torch.maximum(unclipped, clipped)
    bound = -advantages * clip_c
    loss_B_T = torch.where(advantages < 0, torch.minimum(loss_B_T, bound), loss_B_T)
    if tis_cap is not None:
        if rollout_logprobs is None:
            raise ValueError("tis_cap: needs rollout_logprobs")
        weight = torch.where(mask > 0, old_logprobs - rollout_logprobs, 0.0).exp().clamp(max=tis_cap)
        loss_B_T = loss_B_T * weight.detach()
    with torch.no_grad():
        metrics = {
            "actor/clip_fraction": (((clipped > unclipped) * mask).sum() / num_tokens).item(),
            "actor/approx_kl": (((ratio - 1) - log_ratio) * mask).sum().item() / num_tokens,
        }
    return (loss_B_T * mask).sum() / num_tokens, metrics


def compute_kl_loss(logprobs, reference_logprobs, mask, num_tokens):
    """KL to the reference, token mean of exp(d) - d - 1 with d = reference - policy (GRPO, arXiv:2402.03300, eq. 4).

    Shapes and `num_tokens` as in compute_policy_loss.
    """
    difference = torch.where(mask, reference_logprobs - logprobs, 0.0)
    return ((difference.exp() - difference - 1) * mask).sum() / num_tokens


overlong_penalty = reward_loop.overlong_penalty  # the Reward Loop adds it to the score; DAPO's length rule


# --------------------------------------------------------------------------------------------------------------- rollouts


def precision(device):
    """On a GPU the matrix products run in bf16; the weights that they use stay float32, and on CPU everything does."""
    return torch.autocast(device.type, torch.bfloat16, enabled=device.type == "cuda")


def left_padded(prompts, device):
    """Token ids, mask and positions of prompts that end in the same column, where all responses can start."""
    width = max(map(len, prompts))
    ids = torch.tensor([[0] * (width - len(prompt)) + list(prompt) for prompt in prompts], device=device)
    attended = torch.tensor([[0] * (width - len(prompt)) + [1] * len(prompt) for prompt in prompts], device=device)
    return ids, attended, (attended.cumsum(1) - 1).clamp(min=0)


class RoomyLayer(DynamicLayer):
    """Keys and values of one layer in buffers with room behind them: new ones are written there, instead of copying all."""

    room, buffers = 16, None

    def update(self, keys, values, *args, **kwargs):
        if not self.is_initialized:
            self.lazy_initialization(keys, values)
        start = self.get_seq_length()
        end = start + keys.shape[-2]
        # After a selection of rows `self.keys` is a tensor of its own, no longer the front of the buffer.
        if not self.buffers or end > self.buffers[0].shape[-2] or self.keys.data_ptr() != self.buffers[0].data_ptr():
            self.buffers = [new.new_empty(*new.shape[:-2], end + self.room, new.shape[-1]) for new in (keys, values)]
            if start:
                self.buffers[0][..., :start, :], self.buffers[1][..., :start, :] = self.keys, self.values
        for buffer, new in zip(self.buffers, (keys, values)):
            buffer[..., start:end, :] = new
        self.keys, self.values = (buffer[..., :end, :] for buffer in self.buffers)
        return self.keys, self.values


@torch.no_grad()
def rollout_hf(model, prompts, group_size, *, max_response_length, temperature, top_p=1.0, eos_ids, generator, at_once=512,
               on_finished=None, progress=None):  # fmt: skip
    """Samples `group_size` responses to each prompt with the model in this process.

    prompts: lists of token ids. temperature 0 is greedy. on_finished(b, response) is called the moment sequence
    b = prompt_index * group_size + g has ended, by an end token or at max_response_length, while others go on. `at_once`
    sequences are generated together.
    Returns (responses_B, logprobs_B): lists of token ids, the end token included, and the log-probabilities that they were
    sampled with (at this temperature, before top_p).
    """
    responses = [[] for _ in range(len(prompts) * group_size)]
    logprobs = [[] for _ in responses]
    device = next(model.parameters()).device
    stop_ids = torch.tensor(sorted(eos_ids), device=device)
    per_batch = max(1, at_once // group_size)
    for first in range(0, len(prompts), per_batch):
        batch = prompts[first : first + per_batch]
        ids, attended, positions = left_padded(batch, device)  # each prompt is read once, not G times
        cache = DynamicCache(config=model.config)
        cache.layers = [RoomyLayer() if type(layer) is DynamicLayer else layer for layer in cache.layers]
        # A mask in its final form saves transformers the making of one per token; not for windows, or positions made of the mask.
        ready = hasattr(model.base_model, "rotary_emb") and all(type(layer) is RoomyLayer for layer in cache.layers)
        with precision(device):
            out = model(input_ids=ids, attention_mask=attended, position_ids=positions, past_key_values=cache, logits_to_keep=1)
        cache.batch_repeat_interleave(group_size)
        attended = attended.repeat_interleave(group_size, 0)
        position = positions[:, -1:].repeat_interleave(group_size, 0)
        logits = out.logits[:, -1].repeat_interleave(group_size, 0)
        alive = torch.arange(first * group_size, (first + len(batch)) * group_size)  # which sequence each row is
        running = torch.ones(len(alive), dtype=torch.bool)
        for length in range(1, max_response_length + 1):
            tokens, token_logprobs = sample_tokens(logits.float(), temperature, top_p, generator)
            ended = torch.isin(tokens, stop_ids).cpu() | (length == max_response_length)
            sampled = zip(alive.tolist(), running.tolist(), ended.tolist(), tokens.tolist(), token_logprobs.tolist())
            for b, is_running, is_end, token, logprob in sampled:
                if not is_running:
                    continue
                responses[b].append(token)
                logprobs[b].append(logprob)
                if is_end:
                    if on_finished:
                        on_finished(b, responses[b])
                    if progress is not None:
                        progress.update()
            running &= ~ended
            if not running.any():
                break
            if running.sum() <= len(running) // 2:  # half of the rows are done: compute only the others from here on
                keep = running.nonzero()[:, 0]
                alive, running = alive[keep], running[keep]
                keep = keep.to(device)
                attended, position, tokens = attended[keep], position[keep], tokens[keep]
                cache.batch_select_indices(keep)
            attended = torch.cat([attended, attended.new_ones(len(attended), 1)], 1)
            position = position + 1
            mask = attended.log()[:, None, None] if ready else attended  # 0 where attended, else -inf
            with precision(device):
                out = model(input_ids=tokens[:, None], attention_mask=mask, position_ids=position, past_key_values=cache)
            logits = out.logits[:, -1]
    return responses, logprobs


def sample_tokens(logits_B_V, temperature, top_p, generator):
    """One token per row and its log-probability at this temperature (before top_p). Temperature 0 takes the likeliest."""
    logprobs = (logits_B_V / (temperature or 1.0)).log_softmax(-1)
    if temperature == 0:
        tokens = logprobs.argmax(-1)
    else:
        probs = logprobs.exp()
        if top_p < 1:
            ordered, order = probs.sort(-1, descending=True)
            ordered[ordered.cumsum(-1) - ordered >= top_p] = 0  # the token that crosses top_p stays
            probs = torch.zeros_like(probs).scatter_(-1, order, ordered)
        # One random number per row; multinomial draws one per row and word.
        sums = probs.double().cumsum(-1)
        drawn = sums[:, -1:] * torch.rand(len(sums), 1, dtype=sums.dtype, device=sums.device, generator=generator)
        tokens = torch.searchsorted(sums, drawn, right=True)[:, 0].clamp(max=sums.shape[-1] - 1)
    return tokens, logprobs.gather(-1, tokens[:, None])[:, 0]


def rollout_vllm(servers, prompts, group_size, *, max_response_length, temperature, top_p=1.0, eos_ids, at_once, on_finished=None,
                 progress=None):  # fmt: skip
    """As rollout_hf, on a genrm_server.PolicyServers: one request per sample, token ids in, token ids and log-probabilities out.

    With top_p the log-probabilities are those within the nucleus. No request has a seed, which vLLM's CPU engine does not
    survive: unlike rollout_hf, the same call twice gives different samples. Raises RuntimeError where a request fails.
    """
    address, key = servers.servers.router_address, servers.servers.config.api_key
    body = dict(max_tokens=max_response_length, temperature=temperature, top_p=top_p, logprobs=0, return_token_ids=True)
    body |= dict(stop_token_ids=sorted(eos_ids), ignore_eos=True)  # the trainer's end tokens, and no others
    responses, logprobs = ([None] * (len(prompts) * group_size) for _ in range(2))

    async def sample(session, b):
        for attempt in (1, 2, 3):
            async with session.post("/v1/completions", json=body | {"prompt": prompts[b // group_size]}) as answer:
                status, text = answer.status, await answer.text()
            if status < 500 or attempt == 3:
                break
            await asyncio.sleep(5)  # a dying engine: the router holds the next attempt until a server is back
        if status != 200:
            raise RuntimeError(f"policy servers at {address}: HTTP {status}: {text[:300]}")
        choice = json.loads(text)["choices"][0]
        if choice["finish_reason"] not in ("stop", "length"):
            raise RuntimeError(f"policy servers at {address}: a response ended with {choice['finish_reason']!r}")
        responses[b], logprobs[b] = choice["token_ids"], choice["logprobs"]["token_logprobs"]
        if on_finished:
            on_finished(b, responses[b])
        if progress is not None:
            progress.update()

    async def sample_all():
        headers = {"Authorization": f"Bearer {key}"} if key else {}
        connector = aiohttp.TCPConnector(limit=at_once)  # what waits here is under no time limit of the router
        options = dict(headers=headers, connector=connector, timeout=aiohttp.ClientTimeout())
        async with aiohttp.ClientSession(f"http://{address}", **options) as session:
            await asyncio.gather(*(sample(session, b) for b in range(len(responses))))

    asyncio.run(sample_all())
    return responses, logprobs


# ----------------------------------------------------------------------------------------------------------------- update

LOGITS_AT_ONCE = 2**25  # float32: 128 MiB, of which a forward and backward pass holds five or six at a time


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


def forward(model, batch, indices, config: Config, device):
    """These samples through the model, in micro-batches: yields (their indices, logprobs, entropy, mask), the three B x T."""
    lengths = [len(batch["prompts"][i]) + len(batch["responses"][i]) for i in indices]
    for micro in micro_batches(lengths, config.max_tokens_per_micro_batch):
        part = [indices[m] for m in micro]
        counts = [len(batch["responses"][i]) for i in part]
        sequences = [batch["prompts"][i] + batch["responses"][i] for i in part]
        with precision(device):
            options = dict(entropy_gradient=config.entropy_coef != 0)
            logprobs, entropy = logprobs_and_entropy(model, sequences, counts, config.temperature, device, **options)
        yield part, logprobs, entropy, mask_of(counts, device)


def accumulate_gradients(model, batch, indices, num_tokens, config: Config, device, old, reference) -> Counter:
    """Adds the gradient of these samples' part of a mini-batch's loss to the parameters; returns metrics, which add up too.

    num_tokens: response tokens of the whole mini-batch, so that any split of it, over calls, micro-batches or ranks, has the
    same sum. old, reference: {sample: log-probabilities} before the first update and of the reference model; without an
    entry the first are what the model says now (the first update starts from there), and there is no KL.
    """
    sums = Counter()
    for part, logprobs, entropy, mask in forward(model, batch, indices, config, device):
        old_logprobs = padded([old[i] for i in part], device) if part[0] in old else logprobs.detach()
        rollout_logprobs = padded([batch["rollout_logprobs"][i] for i in part], device)
        loss, metrics = compute_policy_loss(
            logprobs, old_logprobs, torch.tensor([batch["advantages"][i] for i in part], device=device), mask, num_tokens,
            config.clip_low, config.clip_high, config.clip_c, rollout_logprobs, config.tis_cap,
        )  # fmt: skip
        if config.entropy_coef:
            loss = loss - config.entropy_coef * entropy[mask].sum() / num_tokens
        if part[0] in reference:
            kl = compute_kl_loss(logprobs, padded([reference[i] for i in part], device), mask, num_tokens)
            loss = loss + config.kl_coef * kl
            metrics["actor/kl_to_reference"] = kl.item()
        loss.backward()
        sums.update(metrics | {"actor/loss": loss.item()} | agreement(old_logprobs, rollout_logprobs, entropy, mask))
    return sums


@torch.no_grad()
def agreement(logprobs, rollout_logprobs, entropy, mask) -> dict:
    """Sums over tokens, from which update_policy makes rollout/logprob_diff and actor/entropy."""
    difference = (logprobs - rollout_logprobs).abs()[mask]
    return {"diff": difference.sum().item(), "entropy": entropy[mask].sum().item(), "tokens": len(difference)}


def make_optimizer(model, config: Config):
    options = dict(lr=config.lr, betas=config.adam_betas, weight_decay=config.weight_decay, fused=True)
    return torch.optim.AdamW(model.parameters(), **options)


def update_policy(model, optimizer, batch: dict, config: Config, device, reference_model=None) -> dict:
    """One pass over the step's samples in mini-batches, one optimizer update each. Returns metrics.

    batch: lists of length B: prompts, responses, rollout_logprobs (token ids and floats), advantages, has_verdict.
    Samples of advantage 0 add nothing to the policy loss's gradient; they count in the token mean and are not computed.
    Raises RuntimeError where the loss or the gradient is not finite.
    """
    total, rows = len(batch["responses"]), config.mini_batch_size * config.group_size
    all_count = config.entropy_coef != 0 or reference_model is not None
    matter = [i for i in range(total) if batch["has_verdict"][i] and (all_count or batch["advantages"][i] != 0)]
    later = [i for i in matter if i >= rows]  # in the first mini-batch the old log-probabilities are the model's own
    old, reference, sums, norms = {}, {}, Counter(), []
    with torch.no_grad():
        for known, which, indices in ((old, model, later), (reference, reference_model, matter if reference_model else [])):
            for part, logprobs, _, _ in forward(which, batch, indices, config, device):
                known.update({i: logprobs[k, : len(batch["responses"][i])] for k, i in enumerate(part)})
        if not matter:  # nothing to learn, still something to watch: samples with a verdict first
            some = sorted(range(total), key=lambda i: not batch["has_verdict"][i])[:8]
            for part, logprobs, entropy, mask in forward(model, batch, some, config, device):
                rollout_logprobs = padded([batch["rollout_logprobs"][i] for i in part], device)
                sums.update(agreement(logprobs, rollout_logprobs, entropy, mask))
    for start in range(0, total, rows):
        members = range(start, min(start + rows, total))
        num_tokens = sum(len(batch["responses"][i]) for i in members if batch["has_verdict"][i])
        indices = [i for i in matter if i in members]
        if not indices:  # every group is all right or all wrong: no gradient, and no update
            continue
        optimizer.zero_grad(set_to_none=True)
        sums.update(accumulate_gradients(model, batch, indices, num_tokens, config, device, old, reference))
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), config.max_grad_norm).item()
        if not math.isfinite(sums["actor/loss"]) or not math.isfinite(norm):
            raise RuntimeError(
                f"loss {sums['actor/loss']:g}, gradient norm {norm:g}: not finite; look at the last rewards in samples.jsonl and "
                "at actor/grad_norm and rollout/logprob_diff of the steps before, then lower --lr or --max-grad-norm"
            )
        optimizer.step()
        norms.append(norm)
    tokens, diff, entropy = (sums.pop(key) for key in ("tokens", "diff", "entropy"))
    metrics = {"actor/updates": len(norms), "rollout/logprob_diff": diff / tokens, "actor/entropy": entropy / tokens}
    if norms:
        metrics |= {key: value / math.ceil(total / rows) for key, value in sums.items()} | {"actor/grad_norm": mean(norms)}
    return metrics


# ------------------------------------------------------------------------------ data, and what is checked before the first step


def load_rows(path: str, tokenizer, config: Config) -> list[dict]:
    """The rows of a file, each with `prompt_ids`. Raises ValueError naming the file, the row and what is wrong."""
    rows, kept = reward_loop.read_rows(Path(path), ["data_source", "prompt", "reward_model", "extra_info"]), []
    for number, row in enumerate(rows):
        try:
            ids = tokenizer.apply_chat_template(row["prompt"], add_generation_prompt=True, tokenize=True, return_dict=False)
        except Exception as error:  # a template is a program that came with the model: it may raise anything
            text = f"{path} row {number}: the chat template refuses prompt {str(row['prompt'])[:200]} ({error})"
            raise ValueError(f"{text}; it must be a list of {{role, content}}") from error
        if len(ids) <= config.max_prompt_length:
            kept.append(row | {"prompt_ids": ids})
    if len(kept) < len(rows):
        print(f"{path}: dropped {len(rows) - len(kept)} of {len(rows)} rows with prompts over {config.max_prompt_length} tokens")
    if not kept:
        raise ValueError(f"{path}: no row is left; raise --max-prompt-length or look at the file")
    return kept


def draw(rows: list, first: int, count: int, seed: int) -> list:
    """Rows number `first` to `first + count` of an endless stream: epoch after epoch, each in a shuffle of its own."""
    drawn, shuffles = [], {}
    for place in range(first, first + count):
        epoch, index = divmod(place, len(rows))
        if epoch not in shuffles:
            shuffles[epoch] = list(range(len(rows)))
            random.Random(f"{seed}/{epoch}").shuffle(shuffles[epoch])
        drawn.append(rows[shuffles[epoch][index]])
    return drawn


def reward_function(config: Config) -> str:
    """FILE:NAME of the function that is called."""
    return config.reward_fn.rpartition(":")[0] + ":compute_score_baseline" if config.baseline else config.reward_fn


def check(config: Config) -> None:
    """Refuses what cannot work before anything expensive starts. Raises ValueError."""
    least_one = "total_steps train_batch_size group_size mini_batch_size max_prompt_length max_response_length val_n clip_c "
    least_one += "rollout_servers rollout_batch_size genrm_servers num_reward_workers max_tokens_per_micro_batch"
    for name, value in asdict(config).items():
        lowest = 1 if name in least_one.split() else 0
        if isinstance(value, (int, float)) and not value >= lowest:
            raise ValueError(f"{name}: {value} must be at least {lowest}")
    if config.train_batch_size % config.mini_batch_size:
        raise ValueError(f"mini_batch_size: {config.mini_batch_size} does not divide train_batch_size {config.train_batch_size}")
    if not config.temperature > 0:
        raise ValueError(f"temperature: {config.temperature} must be above 0; greedy rollouts of a group are all the same")
    if not 0 < config.val_top_p <= 1:
        raise ValueError(f"val_top_p: {config.val_top_p} must be above 0 and at most 1")
    if config.overlong_buffer > config.max_response_length:
        limit = f"max_response_length {config.max_response_length}; lower it, 0 is no penalty"
        raise ValueError(f"overlong_buffer: {config.overlong_buffer} is larger than {limit}")
    if config.genrm and config.router_address:
        raise ValueError("genrm and router_address: give one; the first starts a reward model, the second uses a running one")
    try:
        kwargs = dict(json.loads(config.reward_kwargs).items())
    except (ValueError, AttributeError) as error:
        raise ValueError(f"reward_kwargs: {config.reward_kwargs!r} is not JSON, or not a JSON object ({error})") from error
    for name in ("model", "genrm"):
        value = getattr(config, name)
        if value is not None and not Path(value).is_dir() and (value.count("/") != 1 or value[0] in "./~"):
            raise ValueError(f"{name}: {value!r} is neither a folder nor a hub name such as Qwen/Qwen2.5-Math-7B")
    addresses = {"genrm": "host:0"} if config.genrm or config.router_address else {}
    setup = dict(discriminative=False, router_addresses=addresses, reward_model_tokenizer=None, reward_kwargs=kwargs)
    reward_loop.build_call(setup | {"reward_fn": reward_function(config)})
    for name in ("tensorboard", "wandb"):
        if getattr(config, name) and not importlib.util.find_spec(name):
            raise ValueError(f"{name}: the package is not installed; run: pip install {name}")
    check_folder(config)


def estimate_memory(config: Config) -> dict[str, float]:
    """Rough GB by use, from the model's config.json alone; a step holds the update's part or the rollout's, not both."""
    shape = AutoConfig.from_pretrained(config.model, trust_remote_code=config.trust_remote_code)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(shape, trust_remote_code=config.trust_remote_code)
    text = shape.get_text_config()
    layers, hidden, heads = text.num_hidden_layers, text.hidden_size, text.num_attention_heads
    kv_size = (getattr(text, "num_key_value_heads", None) or heads) * (getattr(text, "head_dim", None) or hidden // heads)
    longest = config.max_prompt_length + config.max_response_length
    tokens = max(config.max_tokens_per_micro_batch, longest)
    layer = tokens * (10 * hidden + 4 * getattr(text, "intermediate_size", 4 * hidden))  # what its backward pass needs
    kept = tokens * hidden * layers + layer if config.gradient_checkpointing else layer * layers
    weights = sum(parameter.numel() for parameter in model.parameters())
    numbers = {"weights": weights, "gradients": weights, "Adam": 2 * weights, "reference model": weights * (config.kl_coef > 0)}
    numbers["update: activations of a micro-batch"] = kept + 6 * min(LOGITS_AT_ONCE, tokens * text.vocab_size)
    if config.rollout == "hf":
        sequences = min(config.rollout_batch_size, config.train_batch_size * config.group_size)
        numbers["rollout: key-value cache"] = 2 * layers * kv_size * longest * sequences
    return {name: 4e-9 * count for name, count in numbers.items()}  # float32


def report(config: Config, train_rows: int, device) -> None:
    """What --dry-run prints."""
    print(json.dumps(asdict(config), indent=2))
    prompts = config.total_steps * config.train_batch_size
    print(f"{config.total_steps} steps take {prompts} prompts, {prompts / train_rows:.1f} epochs of {train_rows}")
    estimate = estimate_memory(config)
    for name, gb in estimate.items():
        print(f"{gb:9.2f} GB  {name}")
    phases = [sum(gb for name, gb in estimate.items() if name.startswith(phase)) for phase in ("update", "rollout")]
    peak = sum(gb for name, gb in estimate.items() if ":" not in name) + max(phases)
    have = 1e-9 * os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    if device.type == "cuda":
        have = 1e-9 * torch.cuda.get_device_properties(device).total_memory
    remedy = "; too little: lower --max-tokens-per-micro-batch or --rollout-batch-size, or --gradient-checkpointing"
    print(f"{peak:9.2f} GB  at the peak, roughly, of {have:.1f} GB on {device}{remedy if peak > have else ''}")


def choose_device(name: str) -> torch.device:
    """Raises ValueError for a name that is none, and for a GPU that is not there."""
    gpus = torch.cuda.device_count()
    if name == "auto":
        name = f"cuda:{gpus - 1}" if gpus else "cpu"
    if not re.fullmatch(r"cpu|cuda(:\d+)?", name) or name != "cpu" and not gpus:
        raise ValueError(f"device: {name!r} must be auto, cpu, cuda or cuda:N, and torch sees {gpus} GPUs")
    return torch.device(name)


# --------------------------------------------------------------------------------------------------------------- training


class Trainer:
    """One run. The constructor checks and reads what is cheap, `load` makes the model, `run` is the loop.

    Everything random depends on the seed, the step and the number of prompts drawn so far, so that a run that was stopped, in
    whatever way, and goes on from a checkpoint is the same run (exactly so on CPU with --rollout hf).
    """

    def __init__(self, config: Config):
        check(config)
        transformers_logging.disable_progress_bar()
        if config.num_threads:
            torch.set_num_threads(config.num_threads)
        self.config, self.device = config, choose_device(config.device)
        if config.weight_sync == "nccl" and self.device.type != "cuda":
            raise ValueError("weight_sync: nccl sends from GPU to GPU, and the policy is on the CPU; take file")
        done = checkpoints_in(Path(config.out_dir, "checkpoints"))  # only with --resume auto can there be any
        self.source = str(done[-1]) if done else config.model
        self.state = {"step": 0, "prompts_drawn": 0, "optimizer": None}
        if done:
            self.state = torch.load(done[-1] / "trainer_state.pt", map_location="cpu", weights_only=True)
        self.saved = self.state["step"]
        self.tokenizer = AutoTokenizer.from_pretrained(self.source, trust_remote_code=config.trust_remote_code)
        if not self.tokenizer.chat_template:
            raise ValueError(f"model: the tokenizer of {self.source} has no chat template; take an instruct model or add one")
        self.train_rows = load_rows(config.train_file, self.tokenizer, config)
        self.val_rows = [row for path in config.val_file for row in load_rows(path, self.tokenizer, config)]
        shape = AutoConfig.from_pretrained(self.source, trust_remote_code=config.trust_remote_code).get_text_config()
        self.longest = max(len(row["prompt_ids"]) for row in self.train_rows + self.val_rows) + config.max_response_length
        if self.longest > (limit := getattr(shape, "max_position_embeddings", None) or math.inf):
            text = f"{config.max_response_length} and the longest prompt are {self.longest} tokens, the model takes {limit}"
            raise ValueError(f"max_response_length: {text}; lower it, or max_prompt_length")
        check_room(config, checkpoint=3 * estimate_memory(config)["weights"])

    def load(self) -> None:
        config = self.config
        if self.device.type == "cuda":
            torch.cuda.set_device(self.device)
        options = dict(dtype=torch.float32, trust_remote_code=config.trust_remote_code)
        self.model = AutoModelForCausalLM.from_pretrained(self.source, **options).to(self.device).eval()
        if config.gradient_checkpointing:
            self.model.gradient_checkpointing_enable()
            for module in self.model.modules():  # it works in training mode only; dropout inside the layers stays off
                module.training = isinstance(module, GradientCheckpointingLayer)
        self.reference = None
        if config.kl_coef:
            self.reference = AutoModelForCausalLM.from_pretrained(config.model, **options).to(self.device).eval()
        eos = self.model.generation_config.eos_token_id
        self.eos_ids = {*(eos if isinstance(eos, list) else [eos]), self.tokenizer.eos_token_id} - {None}
        if not self.eos_ids:
            raise ValueError(f"model: neither the model nor the tokenizer of {self.source} has an end token; add eos_token")
        self.optimizer = make_optimizer(self.model, config)
        if self.state["optimizer"]:
            self.optimizer.load_state_dict(self.state["optimizer"])

    def sample(self, rows, n, temperature, top_p, seed, title):
        """n responses to each row, each on its way to its reward the moment it ends (in standalone mode).

        Returns (responses, logprobs, results, times): lists of len(rows) * n, and seconds of rollout and of waiting after it.
        """
        samples, futures = ([None] * (len(rows) * n) for _ in range(2))

        def finished(b, response):
            text = self.tokenizer.decode(response, skip_special_tokens=True)
            samples[b] = rows[b // n] | {"response": text, "response_length": len(response)}
            if self.config.reward_mode == "standalone":
                futures[b] = self.rewards.submit(samples[b])

        started, prompts = time.perf_counter(), [row["prompt_ids"] for row in rows]
        with tqdm(total=len(samples), desc=title, leave=False, disable=None) as progress:
            options = dict(max_response_length=self.config.max_response_length, temperature=temperature, top_p=top_p,
                           eos_ids=self.eos_ids, at_once=self.config.rollout_batch_size, on_finished=finished, progress=progress)
            if self.servers:
                responses, logprobs = rollout_vllm(self.servers, prompts, n, **options)
            else:
                generator = torch.Generator(self.device).manual_seed(seed)
                # A tenth faster than no_grad; but what a model's own code may keep of it (tables, say) could not be trained with.
                with torch.no_grad() if self.config.trust_remote_code else torch.inference_mode():
                    responses, logprobs = rollout_hf(self.model, prompts, n, generator=generator, **options)
        rolled_out = time.perf_counter()
        standalone = self.config.reward_mode == "standalone"
        results = [future.result() for future in futures] if standalone else self.rewards.score_batch(samples)
        results = [result | {"response": sample["response"]} for result, sample in zip(results, samples)]
        times = Counter({"time/rollout": rolled_out - started, "time/reward_wait": time.perf_counter() - rolled_out})
        return responses, logprobs, results, times

    def evaluate(self, step: int) -> dict:
        config, metrics = self.config, {}
        if self.val_rows:
            for n, temperature, suffix in [(config.val_n, config.val_temperature, "")] + [(1, 0.0, "greedy")] * config.val_greedy:
                *_, results, _ = self.sample(self.val_rows, n, temperature, config.val_top_p, config.seed, f"evaluation {step}")
                metrics |= validation_metrics(self.val_rows, results, n, suffix)
                if not suffix:
                    self.log.samples(step, "val", self.val_rows, results[::n])
            print(f"step {step}: " + ", ".join(f"{key} {value:.3f}" for key, value in metrics.items() if key.count("/") == 2))
        return metrics

    def collect_batch(self, step: int) -> tuple[dict, dict, int]:
        """The samples of a step with their advantages, as update_policy takes them; metrics; and the prompts drawn by then."""
        config, size, drawn = self.config, self.config.group_size, self.state["prompts_drawn"]
        batch = {key: [] for key in ("prompts", "responses", "rollout_logprobs", "advantages", "has_verdict")}
        all_results, lengths, ended, times, drops, groups = [], [], [], Counter(), Counter(), 0
        for refill in range(1 + config.max_refills * config.dynamic_sampling):
            rows = draw(self.train_rows, drawn, config.train_batch_size - len(batch["prompts"]) // size, config.seed)
            drawn += len(rows)
            seed = config.seed * 1_000_003 + step + (refill << 40)
            responses, logprobs, results, spent = self.sample(rows, size, config.temperature, 1.0, seed, f"rollout {step}")
            all_results, times, groups = all_results + results, times + spent, groups + len(rows)
            lengths += [len(response) for response in responses]
            ended += [response[-1] in self.eos_ids for response in responses]
            self.log.samples(step, "train", [row for row in rows for _ in range(size)], results)
            missing = [result for result in all_results if result["reward_score"] is None]
            if len(missing) > config.max_no_verdict_rate * len(all_results):
                raise RuntimeError(
                    f"step {step}: {len(missing) / len(all_results):.0%} of the samples have no verdict (max_no_verdict_rate "
                    f"{config.max_no_verdict_rate:.0%}); is the reward model up? First of them: status {missing[0]['status']!r}, "
                    f"{missing[0]['reward_extra_info']}"
                )
            rewards = [math.nan if result["reward_score"] is None else result["reward_score"] for result in results]
            advantages = compute_advantages(torch.tensor(rewards).view(-1, size)).flatten().tolist()
            for p, row in enumerate(rows):
                group = slice(p * size, (p + 1) * size)
                reason = why_useless(results[group])
                drops.update([reason] if reason else [])
                if not (reason and config.dynamic_sampling):
                    batch["prompts"] += [row["prompt_ids"]] * size
                    batch["responses"] += responses[group]
                    batch["rollout_logprobs"] += logprobs[group]
                    batch["advantages"] += advantages[group]
                    batch["has_verdict"] += [not math.isnan(reward) for reward in rewards[group]]
            kept = len(batch["prompts"]) // size
            if kept == config.train_batch_size:
                break
        if not kept:  # every group was dropped: the last one stays to be looked at
            batch = {"prompts": [row["prompt_ids"]] * size, "responses": responses[group], "rollout_logprobs": logprobs[group],
                     "advantages": [0.0] * size, "has_verdict": [False] * size}  # fmt: skip
        metrics = {"step": step} | reward_metrics(all_results) | times | {
            "reward/groups_with_spread": 1 - drops.total() / groups,
            "response_length/mean": mean(lengths),
            "response_length/max": max(lengths),
            "response_length/clipped": 1 - mean(ended),
            "perf/tokens": sum(lengths),
        }
        if config.dynamic_sampling:
            metrics |= {"dynamic/prompts": groups, "dynamic/refills": refill, "dynamic/kept": kept}
            metrics |= {f"dynamic/dropped_{why}": drops[why] for why in ("all_right", "all_wrong", "equal_rewards", "no_verdict")}
        return batch, metrics, drawn

    def save(self) -> None:
        self.state["optimizer"] = self.optimizer.state_dict()
        save_checkpoint(self.model, self.tokenizer, self.state, self.config)
        self.saved = self.state["step"]

    def run(self) -> Path:
        """All steps. Returns the folder of the last checkpoint."""
        config, state = self.config, self.state
        if state["step"] >= config.total_steps:
            print(f"nothing to do: {self.source} is step {state['step']} of {config.total_steps}")
            return Path(self.source)
        write_config(config, resumed=state["step"] > 0)
        with contextlib.ExitStack() as stack:
            self.load()
            self.servers, models, overlong = None, None, None
            if config.genrm:
                sleeps = config.reward_mode == "colocate" and self.device.type == "cuda"  # the GPU is the trainer's meanwhile
                judge = genrm_server.Config(config.genrm, config.genrm_servers, port=0, cpus=config.genrm_cpus, sleep_mode=sleeps)
                models = genrm_server.RewardModelManager({"genrm": judge})
                stack.callback(models.shutdown)
            if config.overlong_buffer:
                overlong = reward_loop.Overlong(config.max_response_length, config.overlong_buffer, config.overlong_factor)
            self.rewards = reward_loop.RewardLoopManager(
                reward_fn=reward_function(config), reward_kwargs=json.loads(config.reward_kwargs), timeout=config.reward_timeout,
                reward_models=models, router_addresses={"genrm": config.router_address} if config.router_address else None,
                num_workers=config.num_reward_workers, overlong=overlong,
            )  # fmt: skip
            stack.callback(self.rewards.shutdown)
            if config.rollout == "vllm":
                servers = genrm_server.Config(
                    model="", num_servers=config.rollout_servers, cpus=config.rollout_cpus, gpus=config.rollout_gpus,
                    max_model_len=self.longest, seed=config.seed, policy="least_loaded", queue_timeout=900,
                    log_dir=Path(config.out_dir, "rollout_logs"), vllm_args=tuple(shlex.split(config.rollout_vllm_args)),
                )  # fmt: skip
                self.servers = genrm_server.PolicyServers(self.model, self.tokenizer, servers, config.weight_sync)
                stack.callback(self.servers.shutdown)
            self.log = Log(config, state["step"])
            stack.callback(self.log.close)
            interrupts = Interrupts()  # only now: Ray has put handlers of its own in place
            stack.callback(interrupts.restore)
            try:
                if state["step"] == 0:
                    self.log.metrics({"step": 0} | self.evaluate(0))
                while state["step"] < config.total_steps:
                    self.one_step(state["step"] + 1, interrupts)
            except (KeyboardInterrupt, RuntimeError):
                if not interrupts.hold and state["step"] > self.saved:  # in the middle of an update the weights are no step's
                    self.save()
                print(f"stopped; --resume auto goes on after step {self.saved}", flush=True)
                raise
        return Path(config.out_dir, "checkpoints", f"step_{self.saved}")

    def one_step(self, step: int, interrupts: Interrupts) -> None:
        config, started = self.config, time.perf_counter()
        for group in self.optimizer.param_groups:
            group["lr"] = config.lr * min(1.0, step / max(config.lr_warmup_steps, 1))
        batch, metrics, drawn = self.collect_batch(step)
        interrupts.hold = True
        rewarded = time.perf_counter()
        metrics |= update_policy(self.model, self.optimizer, batch, config, self.device, self.reference)
        updated = time.perf_counter()
        if metrics["rollout/logprob_diff"] > config.max_logprob_diff:
            raise RuntimeError(
                f"step {step}: rollout/logprob_diff {metrics['rollout/logprob_diff']:.3f} is over max_logprob_diff "
                f"{config.max_logprob_diff}: the sampler does not use the trainer's weights, or not their precision"
            )
        if self.servers:
            self.servers.sync(self.model)
            metrics["time/sync"] = time.perf_counter() - updated
        self.state |= {"step": step, "prompts_drawn": drawn}
        metrics |= {"actor/lr": group["lr"], "time/update": updated - rewarded, "time/step": time.perf_counter() - started}
        metrics["perf/tokens_per_s"] = metrics["perf/tokens"] / metrics["time/step"]
        last = step == config.total_steps
        evaluates = last or config.val_every and step % config.val_every == 0
        if evaluates:
            metrics |= self.evaluate(step)
        self.log.metrics(metrics)  # before the checkpoint: a run that dies in between does the step again
        if last or config.save_every and step % config.save_every == 0:
            self.save()
        if evaluates or step % 10 == 0:
            self.log.plot()
        shown = ("reward/mean", "reward/acc", "reward/flawed_positive_rate", "genrm/error_rate", "response_length/mean",
                 "actor/entropy", "rollout/logprob_diff", "time/step")  # fmt: skip
        values = "  ".join(f"{key} {metrics[key]:.3g}" for key in shown if key in metrics)
        print(f"step {step}/{config.total_steps}  {values}", flush=True)
        interrupts.release()


def train(config: Config) -> Path | None:
    """A whole run. Returns the folder of its last checkpoint, None for a dry run.

    Raises ValueError for what is wrong with the input, RuntimeError where the run must stop: too few verdicts, a loss that is
    not finite, stale rollout weights, a checkpoint that cannot be written.
    """
    trainer = Trainer(config)
    if config.dry_run:
        return report(config, len(trainer.train_rows), trainer.device)
    return trainer.run()


def main() -> None:
    config = tyro.cli(Config, description=__doc__)
    if all(Path(name).is_dir() for name in (config.model, config.genrm) if name):
        os.environ.setdefault("HF_HUB_OFFLINE", "1")  # no hub name was given, so nothing may ask a hub
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
