"""Sample from the policy: in this process, or on vLLM servers that receive its weights.

    rollout_hf(model, samples, ...)       token by token, for small models; reproducible from its seed
    servers = PolicyServers(policy, tokenizer, config)
    rollout_vllm(servers, samples, ...)   one request per sample
    servers.sync()                        sends the new weights, after each update

Both functions fill in `response_ids`, `rollout_logprobs` and `truncated` of the samples (policy.Sample). They
report each sample as soon as its rollout ends, so its reward is computed while other rollouts continue.
trajectory.py samples the turns of multi-turn rollouts with this file. This file needs policy.py, causal_lm.py
and algorithm.py; vLLM servers also need genrm_server.py, router.py and weight_sync.py. Not covered:
speculative decoding, new weights in the middle of a response. Tensor names end in their shapes: B sequences,
vocabulary size V.
"""

import asyncio
import copy
import hashlib
import json
import os
import shutil
import tempfile
import threading
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path

import aiohttp
import msgspec
import torch
from transformers import TopPLogitsWarper

from causal_lm import distinct_prompts, new_cache, next_logits, precision
from policy import Policy, Sample

# ---- in this process


def rollout_hf(model, samples: list[Sample], *, seed, rollout_batch_size, **options):
    """Sample the responses with the model in this process, `rollout_batch_size` sequences at a time.

    Samples of one prompt in one batch share the computation of the prompt. Temperature 0 means greedy
    decoding. A response ends at max_response_length or with an end token, which is part of the response.
    rollout_logprobs are log-probabilities at this temperature, before top_p.

    Args:
        seed: The seed of the random numbers. On a CPU, only its lowest 32 bits count.
        options: max_response_length, temperature, eos_ids and other options of generate_batch.
    """
    device = model.device
    generator = torch.Generator(device).manual_seed(seed % 2**64)
    # Inference mode is 10 % faster on CPU. On a GPU, it would disable autocast's cache of bf16 weights.
    with torch.inference_mode(device.type == "cpu"), torch.no_grad():
        for first in range(0, len(samples), rollout_batch_size):
            batch = samples[first : first + rollout_batch_size]
            generate_batch(model, batch, generator, **options)


def generate_batch(
    model,
    samples: list[Sample],
    generator: torch.Generator,
    *,
    max_response_length,
    temperature,
    top_p=1.0,
    eos_ids,
    on_finished=lambda sample: None,
    is_done=lambda sample: False,
):
    """Sample one batch of responses together, token by token.

    Args:
        on_finished: Called with each sample as soon as it ends.
        is_done: Called with a sample after each of its tokens; a true result ends the response there.
    """
    device = model.device
    prompts = [sample.prompt_ids for sample in samples]
    prompt_of_row, ids, mask = distinct_prompts(prompts, device, "left")  # All prompts end in one column.
    attended = mask.long()
    positions = (attended.cumsum(1) - 1).clamp(min=0)
    with precision(device, keep_casts=True):  # One context, so that all tokens reuse the casts.
        cache = new_cache(model)
        logits = next_logits(model, ids, attended, positions, cache)
        cache.reorder_cache(prompt_of_row)
        logits = logits[prompt_of_row]
        attended = attended[prompt_of_row]
        position = positions[prompt_of_row, -1:]
        rows = list(samples)  # The sample of each row; None if its rollout has ended.
        for length in range(1, max_response_length + 1):
            tokens, logprobs = sample_tokens(logits, temperature, top_p, generator)
            # A single tensor makes the CPU wait for the GPU once per token. Doubles store token ids exactly.
            sampled = torch.stack([tokens.double(), logprobs.double()], 1).tolist()
            for row, (token, logprob) in enumerate(sampled):
                sample = rows[row]
                if sample is None:
                    continue
                sample.response_ids.append(int(token))
                sample.rollout_logprobs.append(logprob)
                ends = token in eos_ids
                if ends or length == max_response_length or is_done(sample):
                    rows[row] = None
                    sample.truncated = not ends
                    on_finished(sample)
            unfinished = [row for row, sample in enumerate(rows) if sample is not None]
            if not unfinished:
                break
            if len(unfinished) <= len(rows) // 2:  # Drop the rows that have ended.
                rows = [rows[row] for row in unfinished]
                keep = torch.tensor(unfinished, device=device)
                cache.reorder_cache(keep)
                tokens = tokens[keep]
                attended = attended[keep]
                position = position[keep]
            attended = torch.cat([attended, attended.new_ones(len(attended), 1)], 1)
            position = position + 1
            logits = next_logits(model, tokens[:, None], attended, position, cache)


def sample_tokens(logits_B_V, temperature, top_p, generator):
    """Sample one token per row (temperature 0: the likeliest) and return it with its log-probability.

    The log-probability does not include the effect of top_p.
    """
    if temperature > 0:
        logits_B_V = logits_B_V / temperature
    logprobs = logits_B_V.log_softmax(-1)
    if temperature == 0:
        tokens = logprobs.argmax(-1)
    else:
        nucleus = logprobs
        if top_p < 1:
            nucleus = TopPLogitsWarper(top_p)(None, logprobs)  # This keeps the token that crosses top_p.
        # One random number per row; torch.multinomial draws one for every token of the vocabulary.
        sums = nucleus.exp().double().cumsum(-1)
        uniform = torch.rand(len(sums), 1, dtype=sums.dtype, device=sums.device, generator=generator)
        tokens = torch.searchsorted(sums, sums[:, -1:] * uniform, right=True)[:, 0]
        tokens = tokens.clamp(max=sums.shape[-1] - 1)
    return tokens, logprobs.gather(-1, tokens[:, None])[:, 0]


def check_sampling(policy: Policy):
    """Raise ValueError if this process samples incorrectly from the policy's model.

    Model families differ in their caches, and some caches lose the prompt. Two short prompts show
    whether sampling and training compute the same log-probabilities.
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
    sums = policy.compare_with_sampler(samples)
    apart = sums["difference_sum"] / sums["compared_tokens"]
    if not apart <= 0.01:  # This is also true for NaN.
        name = type(policy.model).__name__
        raise ValueError(
            f"--rollout hf: sampling from {name} is incorrect (its log-probabilities differ from the "
            f"trainer's by {apart:.2g}); pass --rollout vllm"
        )


# ---- on vLLM servers

MAX_CONNECTIONS = 28000  # Linux has about this many ports for connections to the router.


class TokenLogprob(msgspec.Struct):
    logprob: float


class Logprobs(msgspec.Struct):
    token_logprobs: list[float] | None = None
    content: list[TokenLogprob] | None = None  # what vLLM's token endpoint returns instead

    def __post_init__(self):  # For a response without either, msgspec raises a ValidationError.
        if self.token_logprobs is None:
            self.token_logprobs = [token.logprob for token in self.content]


class Choice(msgspec.Struct):
    finish_reason: str | None
    token_ids: list[int]
    logprobs: Logprobs


class Answer(msgspec.Struct):
    """The fields that are decoded from a server's response.

    Decoding only these takes a sixth of the time, and this process decodes the responses to all requests.
    """

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
    """Sample the responses on the vLLM servers of a PolicyServers, with one request per sample.

    A request contains token ids; the server returns token ids and log-probabilities. With top_p, these are
    log-probabilities within the nucleus. Requests have no seed, because a seed crashes vLLM's engine on a
    CPU, so repeating a call gives different samples. Requests to a server that dies are retried, and the
    router queues them until a server is available. Raises RuntimeError if all attempts of a request fail, or
    if another thread sets `stop`.

    Args:
        rollout_batch_size: Number of concurrent requests per server.
        on_finished: Called with each sample as soon as it ends.
    """
    settings = sampling_parameters(temperature, top_p, eos_ids) | {"max_tokens": max_response_length}

    async def roll_out(session, sample):
        choice = await request_completion(session, servers, settings | {"prompt": sample.prompt_ids})
        sample.response_ids = choice.token_ids
        sample.rollout_logprobs = choice.logprobs.token_logprobs
        sample.truncated = choice.token_ids[-1] not in eos_ids
        on_finished(sample)

    async def roll_out_all():
        async with open_session(servers, rollout_batch_size) as session:
            rollouts = asyncio.gather(*(roll_out(session, sample) for sample in samples))
            # asyncio would print an exception that nobody retrieves, so this callback retrieves it.
            rollouts.add_done_callback(lambda rollouts: rollouts.exception())
            while not rollouts.done():
                await asyncio.wait({rollouts}, timeout=1.0)
                check_running(servers, stop)
            rollouts.result()

    asyncio.run(roll_out_all())


def check_running(servers, stop: threading.Event) -> None:
    """Raise RuntimeError if the servers can no longer respond, or if another thread has set `stop`."""
    if servers:
        servers.check()
    if stop.is_set():
        raise RuntimeError("interrupted during rollouts")


def sampling_parameters(temperature, top_p, eos_ids) -> dict:
    """Return the sampling parameters that all requests share."""
    return {
        "temperature": temperature,
        "top_p": top_p,
        "logprobs": 0,  # Return only the log-probability of the sampled token.
        "return_token_ids": True,
        "stop_token_ids": sorted(eos_ids),
        "ignore_eos": True,  # Responses end only at the trainer's end tokens.
    }


def open_session(servers, rollout_batch_size) -> aiohttp.ClientSession:
    """Return an HTTP session with the router, for `rollout_batch_size` concurrent requests per server."""
    config = servers.service.config
    limit = min(rollout_batch_size * config.num_servers, MAX_CONNECTIONS)
    return aiohttp.ClientSession(
        f"http://{servers.service.router_address}",
        headers={"Authorization": f"Bearer {config.api_key.rpartition(',')[2]}"},
        # No time limit here: requests may wait long for a connection, and the router has its own limit.
        connector=aiohttp.TCPConnector(limit=limit),
        timeout=aiohttp.ClientTimeout(),
    )


# vLLM 0.32 has an endpoint for token ids. With the same results, it costs less CPU time per token than
# /v1/completions. Older versions cannot enable it, or answer in another form.
TOKEN_ENDPOINT = "/inference/v1/generate"
ENABLE_TOKENS = "--enable-scale-out"


def can_enable_tokens() -> bool:
    """Return whether the vLLM of this machine has the flag ENABLE_TOKENS."""
    vllm = find_spec("vllm")
    if not vllm:
        return False
    files = Path(vllm.submodule_search_locations[0], "entrypoints").rglob("cli_args.py")
    return any(b"enable_scale_out" in file.read_bytes() for file in files)


def token_request(body: dict) -> dict:
    """Translate a request for /v1/completions into one for the token endpoint."""
    parameters = body | {"detokenize": "stop" in body}  # Only stop texts need the text.
    prompt = parameters.pop("prompt")
    parameters.pop("return_token_ids")
    return {"token_ids": prompt, "sampling_params": parameters}


async def request_completion(session, servers, body, headers=None) -> Choice:
    """Send one request for /v1/completions, or for the servers' token endpoint, and return the completion.

    Raises RuntimeError after six failed attempts, or after two timeouts of the router, which may take hours.
    """
    address = servers.service.router_address
    path, request = "/v1/completions", body
    if servers.has_token_endpoint:
        path, request = TOKEN_ENDPOINT, token_request(body)
    timeouts = 0
    for pause in (0, 1, 2, 4, 8, 16):
        await asyncio.sleep(pause)
        try:
            async with session.post(path, json=request, headers=headers) as answer:
                status = answer.status
                text = await answer.text()
        except (aiohttp.ClientError, OSError) as error:  # A server or the router has died.
            status = 502
            text = f"{type(error).__name__}: {error}"
        if status == 200:
            choice = msgspec.json.decode(text, type=Answer).choices[0]
            if choice.finish_reason == "abort":  # The server got SIGTERM.
                status = 502
                text = "the server aborted the request"
        # 422: another request may be the cause. Neither vLLM nor the router returns 408, 425 or 429 here.
        if status < 500 and status != 422:
            break
        if status == 504:
            timeouts += 1
            if timeouts > 1:
                break
            print(f"policy servers at {address}: {text[:300]}; retrying the request once")
    if status != 200:
        remedy = ""
        if status == 504:  # The router's own advice needs flags that these servers do not have.
            remedy = "; for the policy's servers, lower --rollout-batch-size or raise --rollout-servers"
        raise RuntimeError(
            f"policy servers at {address}: a request failed with HTTP {status}: {text[:300]}{remedy}"
        )
    if choice.finish_reason not in ("stop", "length"):
        raise RuntimeError(
            f"policy servers at {address}: a response has the unknown finish_reason {choice.finish_reason!r}"
        )
    if choice.finish_reason == "length" and len(choice.token_ids) < body["max_tokens"]:
        raise RuntimeError(
            f"policy servers at {address}: a response ended after {len(choice.token_ids)} of "
            f"{body['max_tokens']} tokens; raise --max-model-len in --rollout-vllm-args, or omit it"
        )
    return choice


# ---- the servers and their weights

# Load the new weights, then drop the keys and values that the old weights computed, also those that
# --kv-offloading-size keeps in the CPU's memory (reset_external). With reset_running_requests, every version
# of vLLM reports a failed reset of the server's own cache as an error.
RELOAD = (
    ("/collective_rpc", {"method": "reload_weights"}),
    ("/reset_prefix_cache?reset_running_requests=true&reset_external=true", None),
)
READ_SUMS = "/collective_rpc", {"method": "weight_sums"}
EXTENSION = "--worker-extension-cls", "weight_sync.WorkerExtension"
# For these models, vLLM's classes reuse the embedding as the head and reject a separate head.
NO_HEAD = {"Gemma2ForCausalLM"}


class PolicyServers:
    """vLLM servers on this machine that serve a policy in training, and load its new weights at every `sync`.

    The servers read the weights from a WeightFolder when they start and at every sync. A server that dies is
    restarted with the newest weights. Until then, the other servers take over its work. The servers compute
    in bfloat16 on GPUs and in float32 on CPUs. `config` (genrm_server.Config) has all settings but the model.

    Raises the errors of ModelServers, and a RuntimeError that names a server that rejects or loses weights.
    """

    def __init__(self, policy, tokenizer, config):
        from genrm_server import resolve_config
        from weight_sync import WeightFolder

        self.policy = policy
        self.service = None  # the ModelServers, after the start
        self.has_synced = False
        self.sums = {}  # checksums of the weights that were sent last
        self.kept = set()  # the weights that vLLM keeps as they are sent; their checksums must agree
        self.dtype = torch.bfloat16 if policy.device.type == "cuda" else torch.float32
        info = policy.model_info()
        check_servable(info, policy.device.type)
        path = folder_for(config.log_dir, self.dtype.itemsize * info["numel"])
        self.contents = path, model_files(info, tokenizer)  # arguments of a WeightFolder
        # Log-probabilities must include the temperature, and the model's default top_k must not apply.
        fixed = ("--logprobs-mode", "processed_logprobs", "--generation-config", "vllm")
        # vLLM accepts both spellings of a flag.
        has_sums = not any(arg.replace("_", "-").startswith(EXTENSION[0]) for arg in config.vllm_args)
        if policy.config.trust_remote_code:
            fixed += ("--trust-remote-code",)
        if has_sums:
            fixed += EXTENSION
        if can_enable_tokens():
            fixed += (ENABLE_TOKENS,)
        config = replace(
            config,
            model=path,
            device=policy.device.type,
            port=0,
            control=True,
            dtype=str(self.dtype).removeprefix("torch."),
            vllm_args=fixed + config.vllm_args,
        )
        self.folder = WeightFolder(*self.contents)  # resolve_config checks that the folder exists.
        try:
            self.start(resolve_config(config))
            self.find_kept(has_sums)
            self.has_token_endpoint = ENABLE_TOKENS in config.vllm_args and self.reads_tokens()
        except BaseException:
            self.shutdown()
            raise

    def start(self, config):
        from genrm_server import ModelServers

        self.write_weights()
        self.service = ModelServers(config, "policy", before_joining=self.reload)

    def find_kept(self, has_sums: bool):
        """Find the weights that vLLM keeps as they are sent. Without any, warn once, and never compare."""
        reason = "--worker-extension-cls is set"
        if has_sums:
            reason = "they all differ from those sent"
            try:
                with self.service.lock:
                    self.kept = self.compare_all()
            except RuntimeError as error:
                self.service.check()
                reason = " ".join(str(error).split())
        if not self.kept:
            print(
                f"policy servers: WARNING: no checksums of their weights to compare ({reason}), so a lost "
                "sync may go unnoticed; see docs/troubleshooting.md"
            )

    def reads_tokens(self) -> bool:
        """Return whether a server has the token endpoint. It then rejects an empty prompt, not the path."""
        from genrm_server import request

        key, url = self.service.config.server_key, self.service.slots[0].url
        return request("POST", url + TOKEN_ENDPOINT, {"token_ids": []}, key)[0] in (400, 422)

    def write_weights(self):
        from weight_sync import packs, summed

        self.sums = {}
        for _ in packs(summed(served_weights(self.policy, self.dtype), self.sums), self.folder):
            pass  # `packs` has already written the file.

    def sums_of(self, slot) -> dict:
        """Return the checksums of the weights that were sent to this server last."""
        return self.sums

    def reload(self, slot):
        """Reload the weights of a restarted server before it joins, because a sync may have changed them."""
        if self.service:
            for call in RELOAD:
                self.service.post_control(slot, *call)
            if self.kept:
                self.compare(slot, self.service.post_control(slot, *READ_SUMS))

    def sync(self):
        """Send the policy's weights to all servers. No server may be generating."""
        with self.service.lock:  # No server may join during a sync.
            self.write_weights()
            for call in RELOAD:
                self.service.post_control_all(*call)
            if self.kept:
                self.compare_all()
        if not self.has_synced:
            self.has_synced = True
            for slot in self.service.slots:
                if slot.joined:
                    line = self.service.call_server(slot, "last_line", "weights were not loaded")
                    if line:
                        print(f"policy servers: WARNING: {line}")

    def compare_all(self) -> set[str]:
        """Return which weights all servers hold as they were sent. The caller must hold the lock."""
        answers = self.service.post_control_all(*READ_SUMS)
        same = [self.compare(slot, answer) for slot, answer in answers.items()]
        return set.intersection(*same) if same else set()

    def compare(self, slot, answer: str) -> set[str]:
        """Return which weights a server holds as they were sent. Raise RuntimeError if `kept` ones differ."""
        import weight_sync

        held = json.loads(answer).get("results", [])
        return weight_sync.compare(f"{slot.name} (log: {slot.log})", self.sums_of(slot), held, self.kept)

    def check(self):
        """Raise RuntimeError if the servers can no longer respond. Rollouts call this while they wait."""
        self.service.check()

    def shutdown(self):
        """End the servers and remove the folder."""
        if self.service:
            self.service.shutdown()
        self.folder.close()


def check_servable(info: dict, device: str):
    """Raise ValueError if vLLM cannot load new weights of this policy, or gives wrong results afterwards."""
    name = info["architecture"]
    if device == "cpu" and info["has_experts"]:
        raise ValueError(
            f"--rollout vllm: on a CPU, vLLM gives wrong results after a weight update of {name}, which is "
            "a mixture of experts; pass --rollout hf, or use a GPU"
        )
    if name in NO_HEAD and not info["config"].tie_word_embeddings:
        raise ValueError(f"--rollout vllm: vLLM's {name} does not support a separate head; pass --rollout hf")


def served_weights(policy, dtype: torch.dtype):
    """Yield the policy's weights by name, without the head if vLLM's class of the model rejects one."""
    has_no_head = type(policy.model).__name__ in NO_HEAD
    for name, tensor in policy.weights(dtype):
        if name != "lm_head.weight" or not has_no_head:
            yield name, tensor


def folder_for(log_dir: Path | None, size: int) -> str:
    """Return the path of a folder for weights of `size` bytes, in shared memory if it has room.

    The path is the same on all nodes, and stays the same when a killed run is resumed.
    """
    owner = f"{os.getuid()} {Path(log_dir or str(os.getpid())).absolute()} {size}"
    name = f"fapo_policy_{hashlib.sha256(owner.encode()).hexdigest()[:12]}"
    for base in (tempfile.gettempdir(), "/dev/shm"):  # The killed run may have had more or less room.
        shutil.rmtree(f"{base}/{name}", ignore_errors=True)
    free = shutil.disk_usage(base).free
    if free < 1.1 * size:
        base = tempfile.gettempdir()
        print(
            f"policy servers: the weights need {size / 1e9:.1f} GB, but /dev/shm has only {free / 1e9:.1f} "
            f"GB free, so they are written to {base}, which may be on a slow disk; enlarge /dev/shm"
        )
    return f"{base}/{name}"


def model_files(info: dict, tokenizer) -> dict[str, bytes]:
    """Return the files of a model folder, except the weights, as {name: content}."""
    served = copy.deepcopy(info["config"])
    # The head is untied, because vLLM's reload silently leaves a tied head with its old weights.
    served.tie_word_embeddings = info["architecture"] in NO_HEAD
    served.architectures = [info["architecture"]]
    served.head_dtype = "float32"  # as in training; vLLM 0.24 warns that it cannot do this
    with tempfile.TemporaryDirectory() as folder:
        served.save_pretrained(folder)
        tokenizer.save_pretrained(folder)
        paths = [path for path in Path(folder).rglob("*") if path.is_file()]
        return {str(path.relative_to(folder)): path.read_bytes() for path in paths} | info["code"]
