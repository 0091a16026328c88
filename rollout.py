"""Sampling from the policy: in this process, or on vLLM servers that have its weights.

    rollout_hf(model, samples, ...)       token by token, for small models; reproducible by its seed
    rollout_vllm(servers, samples, ...)   one request per sample to cluster/servers.py, vLLM with its weights

Both fill in `response_ids` and `rollout_logprobs` of the samples they are given (policy.Sample), and report
each one the moment it ends, while others go on: from there it is on its way to its reward.
Rollouts of several turns, with tools, are in trajectory.py, which samples each turn with the parts below.
Needs policy.py and algorithm.py; rollout_vllm a PolicyServers. Left out: speculative decoding.
Shapes: B sequences, V vocabulary.
"""

import asyncio
import threading

import aiohttp
import msgspec
import torch
from transformers import TopPLogitsWarper

from policy import Policy, Sample, left_padded, next_logits, precision

# ---- in this process


def rollout_hf(
    model,
    samples: list[Sample],
    *,
    max_response_length,
    temperature,
    top_p=1.0,
    eos_ids,
    seed,
    rollout_batch_size,
    on_finished=lambda sample: None,
    is_done=lambda sample: False,
):
    """Samples the responses with the model in this process, `rollout_batch_size` sequences at a time.

    samples: those of one prompt one after the other; the prompt is read once for all of them. temperature 0
    is greedy. A response ends by an end token, which is part of it, or at max_response_length.
    rollout_logprobs are those at this temperature, before top_p. on_finished(sample) is called the moment a
    sample has ended. is_done(sample) is asked after each token whether the response ends there.
    """
    device = model.device
    stop_ids = torch.tensor(sorted(eos_ids), device=device)
    generator = torch.Generator(device).manual_seed(seed % 2**64)
    # Inference mode is a tenth faster on CPU; on a GPU it would turn off the cache of weights cast to bf16.
    with torch.inference_mode(device.type == "cpu"), torch.no_grad():
        for first in range(0, len(samples), rollout_batch_size):
            batch = samples[first : first + rollout_batch_size]
            generate(model, batch, max_response_length, temperature, top_p, stop_ids, generator, on_finished,
                     is_done)  # fmt: skip


def generate(model, samples, max_response_length, temperature, top_p, stop_ids, generator, on_finished,
             is_done):  # fmt: skip
    """The samples of one batch, all at once, token by token."""
    device = stop_ids.device
    prompts = [sample.prompt_ids for sample in samples]
    prompt_of_row, ids, attended, positions = left_padded(prompts, device)
    with precision(device, keep_casts=True):  # one context for all tokens of the batch
        logits, cache = next_logits(model, ids, attended, positions)
        cache.reorder_cache(prompt_of_row)
        logits = logits[prompt_of_row]
        attended = attended[prompt_of_row]
        position = positions[prompt_of_row, -1:]
        rows = list(samples)  # of each row that is computed the sample; None: it has ended
        for length in range(1, max_response_length + 1):
            tokens, logprobs = sample_tokens(logits, temperature, top_p, generator)
            # As one tensor: a GPU is waited for once a token. Doubles hold token ids exactly.
            is_end = torch.isin(tokens, stop_ids)
            sampled = torch.stack([tokens.double(), logprobs.double(), is_end.double()], 1).tolist()
            for row, (token, logprob, ends) in enumerate(sampled):
                sample = rows[row]
                if sample is None:
                    continue
                sample.response_ids.append(int(token))
                sample.rollout_logprobs.append(logprob)
                if ends or length == max_response_length or is_done(sample):
                    rows[row] = None
                    on_finished(sample)
            going_on = [row for row, sample in enumerate(rows) if sample is not None]
            if not going_on:
                break
            if len(going_on) <= len(rows) // 2:  # from here on compute only the rows that go on
                rows = [rows[row] for row in going_on]
                keep = torch.tensor(going_on, device=device)
                cache.reorder_cache(keep)
                tokens = tokens[keep]
                attended = attended[keep]
                position = position[keep]
            attended = torch.cat([attended, attended.new_ones(len(attended), 1)], 1)
            position = position + 1
            logits, _ = next_logits(model, tokens[:, None], attended, position, cache)


def sample_tokens(logits_B_V, temperature, top_p, generator):
    """One token per row (temperature 0: the likeliest) and its log-probability before top_p."""
    if temperature > 0:
        logits_B_V = logits_B_V / temperature
    logprobs = logits_B_V.log_softmax(-1)
    if temperature == 0:
        tokens = logprobs.argmax(-1)
    else:
        nucleus = logprobs
        if top_p < 1:
            nucleus = TopPLogitsWarper(top_p)(None, logprobs)  # the token that crosses top_p stays
        # One random number per row; multinomial draws one per row and word.
        sums = nucleus.exp().double().cumsum(-1)
        uniform = torch.rand(len(sums), 1, dtype=sums.dtype, device=sums.device, generator=generator)
        tokens = torch.searchsorted(sums, sums[:, -1:] * uniform, right=True)[:, 0]
        tokens = tokens.clamp(max=sums.shape[-1] - 1)
    return tokens, logprobs.gather(-1, tokens[:, None])[:, 0]


def check_sampling(policy: Policy):
    """ValueError for a model that this process samples wrongly from, found out with two short prompts.

    Families differ in their caches: some lose a response's prompt.
    """
    samples = []
    for prompt in (range(1, 4), range(4, 12)):
        samples += [Sample({}, [*prompt]), Sample({}, [*prompt])]
    rollout_hf(
        policy.model,
        samples,
        max_response_length=4,
        temperature=policy.config.temperature,
        eos_ids=(),
        seed=0,
        rollout_batch_size=4,
    )
    apart = 0.0
    for sample, logprobs in policy.score(samples):
        apart += (logprobs - torch.tensor(sample.rollout_logprobs)).abs().mean().item() / len(samples)
    if not apart <= 0.01:  # a NaN is no agreement
        name = type(policy.model).__name__
        raise ValueError(f"rollout: hf samples wrongly from a {name} (off by {apart:.2g}); take vllm")


# ---- on vLLM servers


PORTS = 28000  # that Linux has for connections of a machine to one address: the router's


class Logprobs(msgspec.Struct):
    token_logprobs: list[float]


class Choice(msgspec.Struct):
    finish_reason: str | None
    token_ids: list[int]
    logprobs: Logprobs


class Answer(msgspec.Struct):
    """What is read of a server's answer, in a sixth of the time that all of it takes: this one process reads
    the answers to all samples."""

    choices: list[Choice]


def rollout_vllm(
    servers,
    samples: list[Sample],
    *,
    max_response_length,
    temperature,
    top_p=1.0,
    eos_ids,
    rollout_batch_size,
    on_finished=lambda sample: None,
    stop=threading.Event(),
):
    """As rollout_hf, on a PolicyServers: a request per sample, ids in, ids and log-probabilities out.

    rollout_batch_size: requests at once per server. With top_p the log-probabilities are those within the
    nucleus. No request has a seed, which vLLM's CPU engine does not survive: the same call twice gives
    different samples. A server that dies takes its requests along: they are sent again, and the router holds
    them until one is back. RuntimeError where a request fails all the same, and when a thread sets `stop`.
    """
    address = servers.service.router_address
    settings = sampling(temperature, top_p, eos_ids) | {"max_tokens": max_response_length}

    async def roll_out(session, sample):
        choice = await complete(session, address, settings | {"prompt": sample.prompt_ids})
        sample.response_ids = choice.token_ids
        sample.rollout_logprobs = choice.logprobs.token_logprobs
        on_finished(sample)

    async def roll_out_all():
        async with client(servers, rollout_batch_size) as session:
            rollouts = asyncio.gather(*(roll_out(session, sample) for sample in samples))
            rollouts.add_done_callback(lambda rollouts: rollouts.exception())  # else asyncio says it, too
            while not rollouts.done():
                await asyncio.wait({rollouts}, timeout=1.0)
                servers.check()
                if stop.is_set():
                    raise RuntimeError("the rollouts were given up")
            rollouts.result()

    asyncio.run(roll_out_all())


def sampling(temperature, top_p, eos_ids) -> dict:
    """What all requests have in common."""
    return {
        "temperature": temperature,
        "top_p": top_p,
        "logprobs": 0,  # the sampled token's alone
        "return_token_ids": True,
        "stop_token_ids": sorted(eos_ids),
        "ignore_eos": True,  # no end tokens but the trainer's
    }


def client(servers, rollout_batch_size) -> aiohttp.ClientSession:
    """A session with the servers' router, with so many requests at once per server."""
    config = servers.service.config
    return aiohttp.ClientSession(
        f"http://{servers.service.router_address}",
        headers={"Authorization": f"Bearer {config.api_key}"},
        # What waits for a connection here is under no time limit of the router.
        connector=aiohttp.TCPConnector(limit=min(rollout_batch_size * config.num_servers, PORTS)),
        timeout=aiohttp.ClientTimeout(),
    )


async def complete(session, address, request, headers=None):
    """The servers' answer to one request. RuntimeError where there is none after six attempts, or where the
    router's time limit, which may be hours, has passed twice."""
    timeouts = 0
    for pause in (0, 1, 2, 4, 8, 16):
        await asyncio.sleep(pause)
        try:
            async with session.post("/v1/completions", json=request, headers=headers) as answer:
                status = answer.status
                text = await answer.text()
        except (aiohttp.ClientError, OSError) as error:  # cut in the middle: a server or router died
            status = 502
            text = f"{type(error).__name__}: {error}"
        if status < 500 and status != 422:  # servers died, perhaps of something else
            break
        if status == 504:
            timeouts += 1
            if timeouts > 1:
                break
            print(f"policy servers at {address}: {text[:300]}; the request is sent once more", flush=True)
    if status != 200:
        raise RuntimeError(f"policy servers at {address}: HTTP {status}: {text[:300]}")
    choice = msgspec.json.decode(text, type=Answer).choices[0]
    if choice.finish_reason not in ("stop", "length"):
        raise RuntimeError(f"policy servers at {address}: a response ended with {choice.finish_reason}")
    return choice
