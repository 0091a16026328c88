"""Trains a policy with GRPO on the rewards of the Reward Loop: rollouts -> rewards -> advantages -> policy update.

    python grpo_trainer.py --model data/toy/policy --train-file data/toy/toy_train.parquet --val-file data/toy/toy_test.parquet \\
        --reward-fn toy_world.py:compute_score_fapo_oracle --out-dir outputs/first --total-steps 20 --train-batch-size 16 \\
        --mini-batch-size 8 --max-response-length 64 --overlong-buffer 0 --lr 2e-4 --adam-betas 0.9 0.95 --num-threads 1

What is covered, top to bottom:
    Config           the whole command line; the defaults are the paper's (FAPO-7B)
    loss functions   group-normalised advantages, clip-higher, dual clip, token mean over the global token count
    rollouts         sampling with a key-value cache; a sample goes to its reward the moment it ends
    rewards          Ray workers call your function (reward_loop.py); a sample without verdict leaves the loss
    update           micro-batches by token budget, log-probabilities in chunks that never hold all logits
    evaluation, checkpoints, logs, plots
What is left out: several GPUs for the policy, KL to a reference model, rollouts on vLLM, dynamic sampling.

Names carry shapes: P prompts, G samples of each, B = P*G sequences, T tokens of the longest, N tokens in a row,
H hidden, V vocabulary.
Four words for four things: score (the function's), penalty (length), reward (their sum), advantage (reward within its group).
"""

import json
import math
import os
import random
import shutil
import sys
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Literal

import pyarrow.parquet as pq
import torch
import tyro
from torch.utils.checkpoint import checkpoint
from tqdm import tqdm
from transformers import AutoModelForCausalLM, AutoTokenizer, DynamicCache
from transformers.utils import logging as transformers_logging

import genrm_server
import reward_loop


@dataclass
class Config:
    model: str
    """Folder of the policy (Hugging Face format), or a hub name such as Qwen/Qwen2.5-Math-7B."""
    train_file: str
    """Parquet file of training rows (prepare_data.py writes them)."""
    out_dir: str
    """Folder of the run: config.json, metrics.jsonl, samples.jsonl, curves.png, checkpoints/."""
    val_file: tuple[str, ...] = ()
    """Parquet files of validation rows; none: no evaluation."""

    # Rewards
    reward_fn: str = "compute_score.py:compute_score"
    """FILE:NAME of the reward function."""
    reward_kwargs: str = "{}"
    """JSON object of keyword arguments for the reward function, such as {"penalty": 1.0}."""
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
    temperature: float = 1.0
    """Sampling temperature of rollouts; the loss uses the same distribution. (The paper trains its GenRM at 1.2.)"""

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
    """Cap of truncated importance sampling between rollout and trainer; default: off."""
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
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """Where the policy lives; auto: the GPU if there is one."""
    num_threads: int = 0
    """CPU threads of torch; 0: torch's own choice. For models of a few million parameters 1 is fastest."""
    rollout_batch_size: int = 512
    """Sequences generated at once."""
    max_tokens_per_micro_batch: int = 16384
    """Token budget (with padding) of one forward and backward pass."""
    gradient_checkpointing: bool = False
    """Recompute activations in the backward pass: slower, much less memory."""
    seed: int = 0
    """Seed of data order and sampling."""

    # Files
    save_every: int = 0
    """Steps between checkpoints; 0: only the last step's."""
    keep_checkpoints: int = 2
    """Older checkpoints are deleted; 0: keep all."""
    resume: Literal["never", "auto"] = "never"
    """auto: go on from the newest checkpoint in out_dir, if there is one."""
    samples_per_step: int = 8
    """Samples written to samples.jsonl per step and per validation set."""
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


def compute_policy_loss(
    logprobs,
    old_logprobs,
    advantages,
    mask,
    num_tokens,
    clip_low=0.2,
    clip_high=0.28,
    clip_c=10.0,
    rollout_logprobs=None,
    tis_cap=None,
):
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


overlong_penalty = reward_loop.overlong_penalty  # the Reward Loop adds it to the score; DAPO's length rule


# --------------------------------------------------------------------------------------------------------------- rollouts


def precision(device):
    """On a GPU the matrix products run in bf16; the weights that they use stay float32, and on CPU everything does."""
    return torch.autocast(device.type, torch.bfloat16, enabled=device.type == "cuda")


@torch.no_grad()
def rollout_hf(
    model,
    prompts,
    group_size,
    *,
    max_response_length,
    temperature,
    top_p=1.0,
    eos_ids,
    generator,
    batch_size=512,
    on_finished=None,
    progress=None,
):
    """Samples `group_size` responses to each prompt with the model in this process.

    prompts: lists of token ids. temperature 0 is greedy. on_finished(b, response) is called the moment sequence
    b = prompt_index * group_size + g has ended, by an end token or at max_response_length, while others go on.
    Returns (responses_B, logprobs_B): lists of token ids, the end token included, and the log-probabilities that they were
    sampled with (at this temperature, before top_p).
    """
    responses = [[] for _ in range(len(prompts) * group_size)]
    logprobs = [[] for _ in responses]
    device = next(model.parameters()).device
    stop_ids = torch.tensor(sorted(eos_ids), device=device)
    per_batch = max(1, batch_size // group_size)
    for first in range(0, len(prompts), per_batch):
        batch = prompts[first : first + per_batch]
        # Prompts are padded on the left, so that all responses start in the same column. Each is read once, not G times.
        width = max(len(prompt) for prompt in batch)
        ids = torch.zeros(len(batch), width, dtype=torch.long, device=device)
        attended = torch.zeros_like(ids)
        for row, prompt in enumerate(batch):
            ids[row, width - len(prompt) :] = torch.tensor(prompt, device=device)
            attended[row, width - len(prompt) :] = 1
        positions = (attended.cumsum(1) - 1).clamp(min=0)
        cache = DynamicCache(config=model.config)
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
            with precision(device):
                out = model(input_ids=tokens[:, None], attention_mask=attended, position_ids=position, past_key_values=cache)
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
        tokens = torch.multinomial(probs, 1, generator=generator)[:, 0]
    return tokens, logprobs.gather(-1, tokens[:, None])[:, 0]


# ---------------------------------------------------------------------------------------------------------------- rewards


class Scorer:
    """The Reward Loop as the training loop sees it: `submit` returns at once, `collect` waits."""

    def __init__(self, config: Config, tokenizer):
        self.config, self.tokenizer = config, tokenizer
        self.models = None
        if config.genrm:
            server = genrm_server.Config(model=config.genrm, num_servers=config.genrm_servers, port=0, cpus=config.genrm_cpus)
            self.models = genrm_server.RewardModelManager({"genrm": server})
        overlong = None
        if config.overlong_buffer:
            overlong = reward_loop.Overlong(config.max_response_length, config.overlong_buffer, config.overlong_factor)
        self.manager = reward_loop.RewardLoopManager(
            reward_fn=config.reward_fn,
            reward_kwargs=json.loads(config.reward_kwargs),
            router_addresses={"genrm": config.router_address} if config.router_address else None,
            reward_models=self.models,
            num_workers=config.num_reward_workers,
            timeout=config.reward_timeout,
            overlong=overlong,
        )

    def submit(self, row: dict, response: list[int]):
        """Hands one finished sample to the Reward Loop, at once in standalone mode. Returns what `collect` takes."""
        text = self.tokenizer.decode(response, skip_special_tokens=True)
        sample = row | {"response": text, "response_length": len(response)}
        if self.config.reward_mode == "colocate":
            return sample, None
        return sample, self.manager.submit(sample)

    def collect(self, submitted: list) -> list[dict]:
        """The results in the order given; each has `response` (text) beside the keys of reward_loop.py."""
        samples, futures = zip(*submitted)
        results = self.manager.score_batch(list(samples)) if futures[0] is None else [future.result() for future in futures]
        return [result | {"response": sample["response"]} for sample, result in zip(samples, results)]

    def close(self) -> None:
        self.manager.shutdown()
        if self.models:
            self.models.shutdown()


def mean(values) -> float | None:
    known = [float(value) for value in values if value is not None]
    return sum(known) / len(known) if known else None


def averages(results: list[dict]) -> dict[str, float | None]:
    """The means of the numbers and booleans in the results' reward_extra_info, over the samples that have them.

    `flawed_positive` (and what ends so) becomes a rate among right answers, as in the paper, not among all samples.
    """
    infos = [result["reward_extra_info"] for result in results]
    keys = dict.fromkeys(key for info in infos for key, value in info.items() if isinstance(value, (bool, int, float)))
    means = {}
    for key in keys:
        if key in ("pred", "gt"):  # an index, say: its mean means nothing
            continue
        counted = [info for info in infos if info.get("acc")] if key.endswith("flawed_positive") else infos
        values = (info.get(key) for info in counted)
        name = f"{key}_rate" if key.endswith("flawed_positive") else key
        means[name] = mean(value for value in values if isinstance(value, (bool, int, float)))
    return means


def reward_metrics(results: list[dict]) -> dict:
    """Means over the samples of a step; what no sample has is left out."""
    rewards = [result["reward_score"] for result in results]
    statuses = [result["reward_extra_info"].get("genrm_status") for result in results]
    asked = [status for status in statuses if status not in (None, "skipped")]
    metrics = {"reward/mean": mean(rewards), "reward/no_verdict": mean(reward is None for reward in rewards)}
    metrics |= {f"reward/{key}": value for key, value in averages(results).items()}
    if asked:
        metrics["genrm/error_rate"] = mean(status != "ok" for status in asked)
        metrics["genrm/asked"] = len(asked)
    return {key: value for key, value in metrics.items() if value is not None}


# ----------------------------------------------------------------------------------------------------------------- update


def logprobs_and_entropy(model, sequences, responses, temperature, device, chunk=2048):
    """Log-probabilities of the response tokens and the entropies there: two B x T tensors, zero in the padding.

    sequences: prompt + response token ids; responses: how many of the last ones count. The logits of `chunk` tokens exist at
    a time, in the backward pass as well.
    """
    width = max(len(sequence) for sequence in sequences)
    ids = torch.zeros(len(sequences), width, dtype=torch.long)
    mask = torch.zeros(len(sequences), width, dtype=torch.bool)
    for row, (sequence, count) in enumerate(zip(sequences, responses)):
        ids[row, : len(sequence)] = torch.tensor(sequence)
        mask[row, len(sequence) - count : len(sequence)] = True
    ids, mask = ids.to(device), mask.to(device)
    # Padding stands on the right, where a causal model cannot see it: no attention mask is needed, and none is faster.
    hidden = model.base_model(input_ids=ids, use_cache=False).last_hidden_state[:, :-1]
    predicted = mask[:, 1:]  # the state at t predicts the token at t + 1
    hidden_N_H, targets_N = hidden[predicted], ids[:, 1:][predicted]
    head = model.get_output_embeddings()

    def of_chunk(hidden_n_H, targets_n):
        logits_n_V = head(hidden_n_H).float() / temperature
        logp = logits_n_V.log_softmax(-1)
        return logp.gather(-1, targets_n[:, None])[:, 0], -(logp.exp() * logp).sum(-1)

    parts = []
    for start in range(0, len(targets_N), chunk):
        arguments = hidden_N_H[start : start + chunk], targets_N[start : start + chunk]
        parts.append(checkpoint(of_chunk, *arguments, use_reentrant=False) if torch.is_grad_enabled() else of_chunk(*arguments))
    logprobs_N, entropy_N = (torch.cat(part) for part in zip(*parts))
    shape = (len(sequences), max(responses))
    row, column = response_positions(responses, device)
    # index_put is differentiable and leaves the padding at zero.
    return tuple(torch.zeros(shape, device=device).index_put((row, column), values) for values in (logprobs_N, entropy_N))


def response_positions(lengths, device):
    """Row and column of every response token of right-padded rows of these lengths, in reading order."""
    rows = torch.repeat_interleave(torch.arange(len(lengths)), torch.tensor(lengths))
    columns = torch.cat([torch.arange(length) for length in lengths])
    return rows.to(device), columns.to(device)


def micro_batches(lengths: list[int], max_tokens: int) -> list[list[int]]:
    """Indices in batches of similar lengths, each at most `max_tokens` with padding (one longer sequence goes alone)."""
    batches = []
    for index in sorted(range(len(lengths)), key=lambda i: -lengths[i]):
        if batches and lengths[batches[-1][0]] * (len(batches[-1]) + 1) <= max_tokens:
            batches[-1].append(index)
        else:
            batches.append([index])
    return batches


def update_policy(model, optimizer, batch: dict, config: Config, device) -> dict:
    """One pass over the step's samples in mini-batches, one optimizer update each. Returns metrics.

    batch: lists of length B: prompts, responses, rollout_logprobs (token ids and floats), advantages, has_verdict.
    Samples of advantage 0 add nothing to the gradient; they count in the token mean and are not computed.
    """
    rows = config.mini_batch_size * config.group_size
    total = len(batch["responses"])
    needs_entropy = config.entropy_coef != 0
    metrics, norms, diffs, entropies = {}, [], [], []

    def passes(indices):
        """Micro-batches of the samples that matter: their indices, log-probabilities, entropies, and the mask."""
        chosen = [i for i in indices if batch["has_verdict"][i] and (needs_entropy or batch["advantages"][i] != 0)]
        lengths = [len(batch["prompts"][i]) + len(batch["responses"][i]) for i in chosen]
        for micro in micro_batches(lengths, config.max_tokens_per_micro_batch):
            part = [chosen[m] for m in micro]
            counts = [len(batch["responses"][i]) for i in part]
            sequences = [batch["prompts"][i] + batch["responses"][i] for i in part]
            with precision(device):
                logprobs, entropy = logprobs_and_entropy(model, sequences, counts, config.temperature, device)
            mask = torch.arange(max(counts), device=device) < torch.tensor(counts, device=device)[:, None]
            yield part, logprobs, entropy, mask

    # The first update starts from the rollout's own weights; for the later ones "old" must be kept from before it.
    old = {}
    if total > rows:
        with torch.no_grad():
            for part, logprobs, _, _ in passes(range(rows, total)):
                old.update({i: logprobs[k] for k, i in enumerate(part)})
    for start in range(0, total, rows):
        indices = range(start, min(start + rows, total))
        num_tokens = sum(len(batch["responses"][i]) for i in indices if batch["has_verdict"][i])
        optimizer.zero_grad(set_to_none=True)
        has_gradient = False
        for part, logprobs, entropy, mask in passes(indices):
            width = logprobs.shape[1]
            old_logprobs = (
                logprobs.detach()
                if start == 0
                else torch.stack([torch.nn.functional.pad(old[i], (0, width))[:width] for i in part])
            )
            rollout = torch.tensor(
                [batch["rollout_logprobs"][i] + [0.0] * (width - len(batch["rollout_logprobs"][i])) for i in part], device=device
            )
            advantages = torch.tensor([batch["advantages"][i] for i in part], device=device)
            loss, parts = compute_policy_loss(
                logprobs,
                old_logprobs,
                advantages,
                mask,
                num_tokens,
                config.clip_low,
                config.clip_high,
                config.clip_c,
                rollout,
                config.tis_cap,
            )
            if needs_entropy:
                loss = loss - config.entropy_coef * entropy[mask].sum() / num_tokens
            if not torch.isfinite(loss):
                raise RuntimeError("loss: not finite; look at the last lines of samples.jsonl and lower --lr or --max-grad-norm")
            loss.backward()
            has_gradient = True
            for key, value in (parts | {"actor/loss": loss.item()}).items():
                metrics[key] = metrics.get(key, 0.0) + value
            diffs.append((old_logprobs - rollout).abs()[mask])
            entropies.append(entropy.detach()[mask])
        if has_gradient:  # where every group is all right or all wrong there is nothing to learn, and no update
            norms.append(torch.nn.utils.clip_grad_norm_(model.parameters(), config.max_grad_norm).item())
            optimizer.step()
    if norms:
        updates = math.ceil(total / rows)
        metrics = {key: value / updates for key, value in metrics.items()}
        diff = torch.cat(diffs)
        metrics |= {"actor/entropy": torch.cat(entropies).mean().item(), "actor/grad_norm": sum(norms) / len(norms)}
        metrics |= {"rollout/logprob_diff": diff.mean().item(), "rollout/logprob_diff_max": diff.max().item()}
    return metrics | {"actor/updates": len(norms)}


# ------------------------------------------------------------------------------------------------------------------- data


def load_rows(path: str, tokenizer, config: Config) -> list[dict]:
    """The rows of a parquet file, each with `prompt_ids`. Raises ValueError for a missing column or an empty file."""
    if not Path(path).is_file():
        raise ValueError(f"{path}: no such file; write it with prepare_data.py")
    rows = pq.read_table(path).to_pylist()
    for column in ("data_source", "prompt", "reward_model", "extra_info"):
        if rows and column not in rows[0]:
            raise ValueError(f"{path}: column {column!r} is missing (it has {', '.join(rows[0])}); write it with prepare_data.py")
    kept = []
    for row in rows:
        row["prompt_ids"] = tokenizer.apply_chat_template(
            row["prompt"], add_generation_prompt=True, tokenize=True, return_dict=False
        )
        if len(row["prompt_ids"]) <= config.max_prompt_length:
            kept.append(row)
    if len(kept) < len(rows):
        print(f"{path}: dropped {len(rows) - len(kept)} of {len(rows)} rows with prompts over {config.max_prompt_length} tokens")
    if not kept:
        raise ValueError(f"{path}: no row is left; raise --max-prompt-length or look at the file")
    return kept


def rows_of_step(rows: list, step: int, config: Config) -> list[dict]:
    """The prompts of a step (counted from 1): every epoch is a new shuffle, and a step depends on seed and number alone."""
    chosen = []
    shuffles = {}
    for place in range((step - 1) * config.train_batch_size, step * config.train_batch_size):
        epoch, index = divmod(place, len(rows))
        if epoch not in shuffles:
            shuffles[epoch] = list(range(len(rows)))
            random.Random(f"{config.seed}/{epoch}").shuffle(shuffles[epoch])
        chosen.append(rows[shuffles[epoch][index]])
    return chosen


# ------------------------------------------------------------------------------------------------------------- evaluation


def pass_at_k(n: int, correct: int, k: int) -> float:
    """Unbiased chance that one of k samples drawn from n, of which `correct` are right, is right (Chen et al. 2021, eq. 1)."""
    return 1.0 - math.comb(n - correct, k) / math.comb(n, k)


def evaluate(model, rows, scorer: Scorer, config: Config, eos_ids, step: int, n: int, temperature: float, suffix: str):
    """Samples and scores every row n times. Returns (metrics by data source, results): mean@n, maj@n and pass@n of `acc`,
    and mean@n of each other number the reward function returns; `suffix` replaces "mean@n" where it is given."""
    generator = torch.Generator(next(model.parameters()).device).manual_seed(config.seed)
    submitted = [None] * (len(rows) * n)

    def finished(b, response):
        submitted[b] = scorer.submit(rows[b // n], response)

    with tqdm(total=len(submitted), desc=f"evaluation {step}", leave=False, disable=None) as progress:
        rollout_hf(
            model, [row["prompt_ids"] for row in rows], n, max_response_length=config.max_response_length,
            temperature=temperature, top_p=config.val_top_p, eos_ids=eos_ids, generator=generator,
            batch_size=config.rollout_batch_size, on_finished=finished, progress=progress,
        )  # fmt: skip
    results = scorer.collect(submitted)
    metrics = {}
    sources = dict.fromkeys(row["data_source"] for row in rows)
    for source in sources:
        of_row = [results[i * n : (i + 1) * n] for i, row in enumerate(rows) if row["data_source"] == source]
        name = f"val/{source}"
        scored = [result for group in of_row for result in group]
        means = averages(scored)
        label = suffix or f"mean@{n}"
        metrics[f"{name}/{label}"] = means.pop("acc", None)
        metrics[f"{name}/no_verdict/{label}"] = mean(result["reward_score"] is None for result in scored)
        metrics |= {f"{name}/{key}/{label}": value for key, value in means.items()}
        if n > 1:
            answers = [
                [(r["reward_extra_info"].get("pred"), bool(r["reward_extra_info"].get("acc"))) for r in group] for group in of_row
            ]
            majority = [max(group, key=lambda answer: sum(answer[0] == other[0] for other in group))[1] for group in answers]
            metrics[f"{name}/maj@{n}"] = mean(majority)
            metrics[f"{name}/pass@{n}"] = mean(pass_at_k(n, sum(right for _, right in group), n) for group in answers)
    return {key: value for key, value in metrics.items() if value is not None}, results


# ----------------------------------------------------------------------------------------------- checkpoints, logs, plots


def save_checkpoint(model, tokenizer, optimizer, step: int, config: Config) -> Path:
    """Writes checkpoints/step_N, an ordinary Hugging Face folder plus trainer_state.pt; it appears whole or not at all."""
    folder = Path(config.out_dir, "checkpoints")
    target, temporary = folder / f"step_{step}", folder / f".step_{step}.tmp"
    shutil.rmtree(temporary, ignore_errors=True)
    model.save_pretrained(temporary)
    tokenizer.save_pretrained(temporary)
    torch.save({"step": step, "optimizer": optimizer.state_dict()}, temporary / "trainer_state.pt")
    shutil.rmtree(target, ignore_errors=True)
    temporary.rename(target)
    for old in checkpoints_in(folder)[: -config.keep_checkpoints or None]:
        if config.keep_checkpoints:
            shutil.rmtree(old)
    return target


def checkpoints_in(folder: Path) -> list[Path]:
    """The whole checkpoints of a run, oldest first."""
    found = [path for path in folder.glob("step_*") if (path / "trainer_state.pt").is_file()]
    return sorted(found, key=lambda path: int(path.name.removeprefix("step_")))


class Log:
    """metrics.jsonl (one line a step), samples.jsonl and curves.png of a run's folder."""

    def __init__(self, config: Config, first_step: int):
        self.folder, self.limit = Path(config.out_dir), config.samples_per_step
        self.history = []
        for name in ("metrics.jsonl", "samples.jsonl"):
            path = self.folder / name
            lines = path.read_text().splitlines() if path.is_file() and first_step else []
            kept = [
                line for line in lines if json.loads(line)["step"] <= first_step
            ]  # what came after the checkpoint is done again
            path.write_text("".join(line + "\n" for line in kept))
            if name == "metrics.jsonl":
                self.history = [json.loads(line) for line in kept]

    def metrics(self, values: dict) -> None:
        rounded = {key: float(f"{value:.6g}") if isinstance(value, float) else value for key, value in values.items()}
        self.history.append(rounded)
        with open(self.folder / "metrics.jsonl", "a") as file:
            file.write(json.dumps(rounded) + "\n")

    def samples(self, step: int, split: str, rows: list[dict], results: list[dict]) -> None:
        with open(self.folder / "samples.jsonl", "a") as file:
            for row, result in list(zip(rows, results))[: self.limit]:
                prompt = row["prompt"][-1]["content"]
                truth = row["reward_model"]["ground_truth"]
                line = {"step": step, "split": split, "data_source": row["data_source"], "prompt": prompt, "ground_truth": truth}
                file.write(json.dumps(line | result, ensure_ascii=False, default=str) + "\n")

    def plot(self) -> None:
        """Redraws curves.png from all metrics so far."""
        import matplotlib

        matplotlib.use("Agg")
        import matplotlib.pyplot as plt

        seen = sorted({key for metrics in self.history for key in metrics})
        held_out = [key for key in seen if key.startswith("val/") and "/mean@" in key and key.count("/") == 2]
        flawed = [key for key in seen if key.startswith("reward/") and key.endswith("flawed_positive_rate")]
        panels = [
            ("reward", ["reward/mean", "reward/score"]),
            ("accuracy", ["reward/acc", *held_out]),
            ("flawed positives among right answers", flawed),
            ("response length (tokens)", ["response_length/mean", "response_length/max"]),
            ("entropy", ["actor/entropy"]),
            ("seconds", ["time/rollout", "time/reward_wait", "time/update", "time/step"]),
        ]  # fmt: skip
        figure, axes = plt.subplots(2, 3, figsize=(15, 7.5), constrained_layout=True)
        for axis, (title, keys) in zip(axes.flat, panels):
            for key in keys:
                points = [(m["step"], m[key]) for m in self.history if key in m]
                if points:
                    axis.plot(*zip(*points), label=key, marker="." if key.startswith("val/") else "")
            axis.set(title=title, xlabel="step")
            axis.grid(alpha=0.3)
            if axis.lines:
                axis.legend(fontsize=8)
        figure.savefig(self.folder / ".curves.png", dpi=100, format="png")
        plt.close(figure)
        (self.folder / ".curves.png").rename(self.folder / "curves.png")  # a viewer never sees half a picture


# --------------------------------------------------------------------------------------------------------------- training


def check(config: Config) -> None:
    """Refuses what cannot work before anything expensive starts. Raises ValueError."""
    for name in ("total_steps", "train_batch_size", "group_size", "mini_batch_size", "max_response_length", "val_n"):
        if getattr(config, name) < 1:
            raise ValueError(f"{name}: {getattr(config, name)} must be at least 1")
    if config.train_batch_size % config.mini_batch_size:
        raise ValueError(f"mini_batch_size: {config.mini_batch_size} does not divide train_batch_size {config.train_batch_size}")
    if config.temperature <= 0:
        raise ValueError(f"temperature: {config.temperature} must be above 0; greedy rollouts of a group are all the same")
    if config.overlong_buffer > config.max_response_length:
        raise ValueError(
            f"overlong_buffer: {config.overlong_buffer} is larger than max_response_length {config.max_response_length}"
        )
    if config.genrm and config.router_address:
        raise ValueError(
            "genrm and router_address: give one of them; the first starts a reward model, the second uses a running one"
        )
    try:
        kwargs = json.loads(config.reward_kwargs)
    except json.JSONDecodeError as error:
        raise ValueError(f"reward_kwargs: {config.reward_kwargs!r} is not JSON ({error})") from error
    if not isinstance(kwargs, dict):
        raise ValueError(f"reward_kwargs: {config.reward_kwargs!r} must be a JSON object")
    if not config.model or not Path(config.model).is_dir() and config.model.count("/") != 1:
        raise ValueError(f"model: {config.model!r} is neither a folder nor a hub name such as Qwen/Qwen2.5-Math-7B")


def train(config: Config) -> Path:
    """Runs the training. Returns the folder of the last checkpoint.

    Raises ValueError for what is wrong with the input, RuntimeError where the run must stop (too few verdicts, loss not finite).
    """
    check(config)
    transformers_logging.disable_progress_bar()
    if config.num_threads:
        torch.set_num_threads(config.num_threads)
    device = torch.device(("cuda" if torch.cuda.is_available() else "cpu") if config.device == "auto" else config.device)
    done = checkpoints_in(Path(config.out_dir, "checkpoints")) if config.resume == "auto" else []
    source = str(done[-1]) if done else config.model
    tokenizer = AutoTokenizer.from_pretrained(source, trust_remote_code=config.trust_remote_code)
    if not tokenizer.chat_template:
        raise ValueError(f"model: the tokenizer of {source} has no chat template; take an instruct model or add one")
    train_rows = load_rows(config.train_file, tokenizer, config)
    val_rows = [row for path in config.val_file for row in load_rows(path, tokenizer, config)]
    model = AutoModelForCausalLM.from_pretrained(source, dtype=torch.float32, trust_remote_code=config.trust_remote_code).to(
        device
    )
    if config.gradient_checkpointing:
        model.gradient_checkpointing_enable()
    eos = model.generation_config.eos_token_id
    eos_ids = {*(eos if isinstance(eos, list) else [eos]), tokenizer.eos_token_id} - {None}
    if not eos_ids:
        raise ValueError(f"model: neither the model nor the tokenizer of {source} has an end token; add eos_token")
    optimizer = torch.optim.AdamW(model.parameters(), lr=config.lr, betas=config.adam_betas, weight_decay=config.weight_decay)
    first_step = 0
    if done:
        state = torch.load(done[-1] / "trainer_state.pt", map_location=device, weights_only=True)
        optimizer.load_state_dict(state["optimizer"])
        first_step = state["step"]
    Path(config.out_dir).mkdir(parents=True, exist_ok=True)
    Path(config.out_dir, "config.json").write_text(json.dumps(asdict(config), indent=2) + "\n")
    log = Log(config, first_step)
    scorer = Scorer(config, tokenizer)
    try:
        return run_steps(config, model, tokenizer, optimizer, scorer, log, train_rows, val_rows, eos_ids, first_step, device)
    finally:
        scorer.close()


def run_steps(config, model, tokenizer, optimizer, scorer, log, train_rows, val_rows, eos_ids, first_step, device) -> Path:
    """The loop itself: one turn is one step. Everything random depends on the seed and the step's number alone."""

    def validate(step) -> dict:
        if not val_rows:
            return {}
        metrics, results = evaluate(model, val_rows, scorer, config, eos_ids, step, config.val_n, config.val_temperature, "")
        log.samples(step, "val", [row for row in val_rows for _ in range(config.val_n)], results)
        if config.val_greedy:
            metrics |= evaluate(model, val_rows, scorer, config, eos_ids, step, 1, 0.0, "greedy")[0]
        print(f"step {step}: " + ", ".join(f"{key} {value:.3f}" for key, value in metrics.items() if key.count("/") == 2))
        return metrics

    if first_step == 0:
        log.metrics({"step": 0} | validate(0))
    target = Path(config.out_dir, "checkpoints", f"step_{first_step}")
    for step in range(first_step + 1, config.total_steps + 1):
        started = time.perf_counter()
        for group in optimizer.param_groups:
            group["lr"] = config.lr * min(1.0, step / max(config.lr_warmup_steps, 1))

        # Rollouts; in standalone mode each sample is on its way to its reward while the others are still being written.
        rows = rows_of_step(train_rows, step, config)
        submitted = [None] * (len(rows) * config.group_size)

        def finished(b, response):
            submitted[b] = scorer.submit(rows[b // config.group_size], response)

        generator = torch.Generator(device).manual_seed(config.seed * 1_000_003 + step)
        with tqdm(total=len(submitted), desc=f"rollout {step}", leave=False, disable=None) as progress:
            responses, rollout_logprobs = rollout_hf(
                model, [row["prompt_ids"] for row in rows], config.group_size, max_response_length=config.max_response_length,
                temperature=config.temperature, eos_ids=eos_ids, generator=generator, batch_size=config.rollout_batch_size,
                on_finished=finished, progress=progress,
            )  # fmt: skip
        rolled_out = time.perf_counter()

        # Rewards
        results = scorer.collect(submitted)
        rewarded = time.perf_counter()
        log.samples(step, "train", [row for row in rows for _ in range(config.group_size)], results)
        metrics = {"step": step} | reward_metrics(results)
        if metrics["reward/no_verdict"] > config.max_no_verdict_rate:
            first = next(result for result in results if result["reward_score"] is None)
            raise RuntimeError(
                f"step {step}: {metrics['reward/no_verdict']:.0%} of the samples have no verdict (max_no_verdict_rate "
                f"{config.max_no_verdict_rate:.0%}); is the reward model up? First of them: status {first['status']!r}, "
                f"{first['reward_extra_info']}"
            )
        rewards = [math.nan if result["reward_score"] is None else result["reward_score"] for result in results]
        advantages_P_G = compute_advantages(torch.tensor(rewards).view(len(rows), config.group_size))

        # Update
        batch = {
            "prompts": [row["prompt_ids"] for row in rows for _ in range(config.group_size)],
            "responses": responses,
            "rollout_logprobs": rollout_logprobs,
            "advantages": advantages_P_G.flatten().tolist(),
            "has_verdict": [not math.isnan(reward) for reward in rewards],
        }
        model.train()
        metrics |= update_policy(model, optimizer, batch, config, device)
        model.eval()
        updated = time.perf_counter()

        lengths = [len(response) for response in responses]
        metrics |= {
            "reward/groups_with_spread": (advantages_P_G != 0).any(1).float().mean().item(),
            "response_length/mean": mean(lengths),
            "response_length/max": max(lengths),
            "response_length/clipped": mean(response[-1] not in eos_ids for response in responses),
            "actor/lr": optimizer.param_groups[0]["lr"],
            "time/rollout": rolled_out - started,
            "time/reward_wait": rewarded - rolled_out,
            "time/update": updated - rewarded,
            "time/step": updated - started,
            "perf/tokens_per_s": sum(lengths) / (updated - started),
        }
        last = step == config.total_steps
        if last or config.save_every and step % config.save_every == 0:
            target = save_checkpoint(model, tokenizer, optimizer, step, config)
        evaluates = last or config.val_every and step % config.val_every == 0
        if evaluates:
            metrics |= validate(step)
        log.metrics(metrics)
        if evaluates or step % 10 == 0:
            log.plot()
        shown = (
            "reward/mean",
            "reward/acc",
            "reward/flawed_positive_rate",
            "genrm/error_rate",
            "response_length/mean",
            "actor/entropy",
            "time/step",
        )
        print(
            f"step {step}/{config.total_steps}  " + "  ".join(f"{key} {metrics[key]:.3f}" for key in shown if key in metrics),
            flush=True,
        )
    return target


def main() -> None:
    config = tyro.cli(Config, description=__doc__)
    if all(Path(name).is_dir() for name in (config.model, config.genrm) if name):
        os.environ.setdefault("HF_HUB_OFFLINE", "1")  # no hub name was given, so nothing may ask a hub
    try:
        print(f"done: {train(config)}")
    except (ValueError, OSError, RuntimeError) as error:
        print(f"error: {error}", file=sys.stderr)
        raise SystemExit(2 if isinstance(error, (ValueError, OSError)) else 1) from error


if __name__ == "__main__":
    main()
