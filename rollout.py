"""Sampling from the policy: in this process, or on vLLM servers that get its newest weights after each update.

    rollout_hf(model, samples, ...)         token by token, best for small models; the same samples for the same seed
    rollout_vllm(servers, samples, ...)     one request per sample to a PolicyServers, vLLM servers with the policy's weights
    read_rollouts(folder, step)             what another run has sampled and scored, without doing it again

The first two fill in the `response_ids` and `rollout_logprobs` of the samples they are given (policy.Sample), and report each
one the moment it ends, while others go on: from there it is on its way to its reward.

Left out: several turns, tools, speculative decoding, sampling with penalties.

Shapes: B sequences, V vocabulary.
"""

import asyncio
import contextlib
import copy
import itertools
import json
import os
import secrets
import tempfile
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, replace
from pathlib import Path

import aiohttp
import ray
import torch
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy
from transformers import DynamicCache
from transformers.cache_utils import DynamicLayer

from genrm_server import SLEEP_WITHOUT_WEIGHTS, Config, ModelServers, Slot, complete
from genrm_server import end_servers, http, place_servers, server_actor
from policy import Policy, Sample, body_of, left_padded, logits_of, precision, temper
from cluster.policy_group import RanksLost
from run_folder import replace_file
from vllm_server import WeightFolder


# ------------------------------------------------------------------------------------------------------------ in this process


def rollout_hf(model, samples: list[Sample], *, max_response_length, temperature, top_p=1.0, eos_ids, seed, rollout_batch_size,
               on_finished=lambda sample: None, remote_code=False):  # fmt: skip
    """Samples the responses with the model in this process, `rollout_batch_size` sequences at a time.

    samples: those of one prompt one after the other; the prompt is read once for all of them. temperature 0 is greedy. A
    response ends by an end token, which is part of it, or at max_response_length. rollout_logprobs are those at this temperature,
    before top_p. on_finished(sample) is called the moment a sample has ended. remote_code: the model's code came with its folder.
    """
    device = next(model.parameters()).device
    stop_ids, generator = torch.tensor(sorted(eos_ids), device=device), torch.Generator(device).manual_seed(seed % 2**64)
    # Inference mode is a tenth faster on CPU. But what a model's own code may keep of it (tables, say) could not be trained with,
    # and on a GPU it would turn off the cache of weights cast to bf16.
    with torch.inference_mode() if device.type == "cpu" and not remote_code else torch.no_grad():
        for first in range(0, len(samples), rollout_batch_size):
            batch = samples[first : first + rollout_batch_size]
            generate(model, batch, max_response_length, temperature, top_p, stop_ids, generator, on_finished)


def generate(model, alive, max_response_length, temperature, top_p, stop_ids, generator, on_finished) -> None:
    """The samples of one batch, all at once, token by token. alive: those whose rows are computed."""
    device = stop_ids.device
    distinct = {}  # prompt -> its number
    rows = [distinct.setdefault(tuple(sample.prompt_ids), len(distinct)) for sample in alive]
    rows, (ids, attended, positions) = torch.tensor(rows, device=device), left_padded(list(distinct), device)
    cache = DynamicCache(config=model.config)
    cache.layers = [RoomyLayer() if type(layer) is DynamicLayer else layer for layer in cache.layers]
    with precision(device, keep_casts=True):  # one context for all tokens of the batch
        logits = next_logits(model, ids, attended, positions, cache)
        cache.reorder_cache(rows)
        attended, position, logits = attended[rows], positions[rows, -1:], logits[rows]
        running = [True] * len(alive)
        for length in range(1, max_response_length + 1):
            tokens, logprobs = sample_tokens(logits, temperature, top_p, generator)
            # As one tensor: a GPU is waited for once a token. Doubles hold token ids exactly.
            ended = torch.isin(tokens, stop_ids)
            sampled = torch.stack([tokens.double(), logprobs.double(), ended.double()], 1).tolist()
            for row, (sample, (token, logprob, is_end)) in enumerate(zip(alive, sampled)):
                if running[row]:
                    sample.response_ids.append(int(token))
                    sample.rollout_logprobs.append(logprob)
                    if is_end or length == max_response_length:
                        running[row] = False
                        on_finished(sample)
            if not any(running):
                break
            if sum(running) <= len(running) // 2:  # half of the rows are done: compute only the others from here on
                keep = [row for row, is_running in enumerate(running) if is_running]
                alive, running = [alive[row] for row in keep], [True] * len(keep)
                keep = torch.tensor(keep, device=device)
                attended, position, tokens = attended[keep], position[keep], tokens[keep]
                cache.reorder_cache(keep)
            attended = torch.cat([attended, attended.new_ones(len(attended), 1)], 1)
            position = position + 1
            logits = next_logits(model, tokens[:, None], attended, position, cache)


def next_logits(model, ids, attended, positions, cache):
    """Logits B x V of the token after these, which the cache then holds."""
    output = body_of(model)(input_ids=ids, attention_mask=attended, position_ids=positions, past_key_values=cache, use_cache=True)
    return logits_of(model, output, output.last_hidden_state[:, -1])


def check_sampling(policy: Policy) -> None:
    """Raises ValueError for a model that this process cannot sample from, found out with two short prompts.

    Families differ in their caches: some take none of this kind, and with some a response would not see its prompt.
    """
    name, size = type(policy.model).__name__, policy.model.config.get_text_config().vocab_size
    samples = [Sample({}, [number * 7919 % size for number in range(1, length)]) for length in (4, 9) for _ in range(2)]
    settings = dict(max_response_length=4, temperature=policy.config.temperature, eos_ids=(), rollout_batch_size=4)
    try:
        rollout_hf(policy.model, samples, seed=0, remote_code=policy.config.trust_remote_code, **settings)
        difference = torch.cat([logprobs.cpu() - torch.tensor(sample.rollout_logprobs)
                                for sample, (logprobs, _) in zip(samples, policy.score(samples))]).abs().mean().item()
    except (TypeError, AttributeError, NotImplementedError, ValueError, RuntimeError) as error:
        raise ValueError(f"rollout: hf cannot sample from a {name} ({type(error).__name__}: {error}); take vllm") from error
    if not difference <= (0.2 if policy.device.type == "cuda" else 0.01):
        raise ValueError(f"rollout: hf samples wrongly from a {name} (log-probabilities are off by {difference:.2g}); take vllm")


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
            # A GPU computes keys in float32 (rotary positions) and values in bf16; attention takes both in bf16.
            shapes = [(*new.shape[:-2], end + self.room, new.shape[-1]) for new in (keys, values)]
            self.buffers = [values.new_empty(shape) for shape in shapes]
            if start:
                self.buffers[0][..., :start, :], self.buffers[1][..., :start, :] = self.keys, self.values
        for buffer, new in zip(self.buffers, (keys, values)):
            buffer[..., start:end, :] = new
        self.keys, self.values = (buffer[..., :end, :] for buffer in self.buffers)
        return self.keys, self.values


def sample_tokens(logits_B_V, temperature, top_p, generator):
    """One token per row and its log-probability at this temperature (before top_p). Temperature 0 takes the likeliest."""
    logprobs = temper(logits_B_V, temperature or 1.0).log_softmax(-1)
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


# ----------------------------------------------------------------------------------------------------------- on vLLM servers


def rollout_vllm(servers, samples: list[Sample], *, max_response_length, temperature, top_p=1.0, eos_ids, rollout_batch_size,
                 on_finished=lambda sample: None, stop=threading.Event()):  # fmt: skip
    """As rollout_hf, on a PolicyServers: one request per sample, token ids in, token ids and log-probabilities out.

    With top_p the log-probabilities are those within the nucleus. No request has a seed, which vLLM's CPU engine does not
    survive: unlike rollout_hf, the same call twice gives different samples. Raises RuntimeError where a request fails.
    stop: when another thread sets it, what is on its way is given up; RuntimeError then, too.
    """
    address, key = servers.servers.router_address, servers.servers.config.api_key
    body = dict(max_tokens=max_response_length, temperature=temperature, top_p=top_p, logprobs=0, return_token_ids=True)
    body |= dict(stop_token_ids=sorted(eos_ids), ignore_eos=True)  # the trainer's end tokens, and no others

    async def generate_one(session, sample):
        for pause in (1, 2, 4, 8, 16, None):
            try:
                async with session.post("/v1/completions", json=body | {"prompt": sample.prompt_ids}) as answer:
                    status, text = answer.status, await answer.text()
            except (aiohttp.ClientError, OSError) as error:  # cut in the middle: the server died, or its router
                status, text = 502, f"{type(error).__name__}: {error}"
            if status < 500 or pause is None:
                break
            await asyncio.sleep(pause)  # the router holds the next attempt until a server is back
        if status != 200:
            raise RuntimeError(f"policy servers at {address}: HTTP {status}: {text[:300]}")
        choice = json.loads(text)["choices"][0]
        if choice["finish_reason"] not in ("stop", "length"):
            raise RuntimeError(f"policy servers at {address}: a response ended with {choice['finish_reason']!r}")
        sample.response_ids, sample.rollout_logprobs = choice["token_ids"], choice["logprobs"]["token_logprobs"]
        on_finished(sample)

    async def generate_all():
        headers = {"Authorization": f"Bearer {key}"} if key else {}
        connector = aiohttp.TCPConnector(limit=rollout_batch_size)  # what waits here is under no time limit of the router
        options = dict(headers=headers, connector=connector, timeout=aiohttp.ClientTimeout())
        async with aiohttp.ClientSession(f"http://{address}", **options) as session:
            everything = asyncio.gather(*(generate_one(session, sample) for sample in samples))
            everything.add_done_callback(lambda all: all.exception())  # or asyncio reports what was given up as forgotten
            while not everything.done():
                await asyncio.wait({everything}, timeout=1.0)
                servers.check_policy()
                if stop.is_set():
                    raise RuntimeError("the rollouts were given up")
            everything.result()

    asyncio.run(generate_all())


RESET_PREFIX_CACHE = "/reset_prefix_cache?reset_running_requests=true"  # with it a failed reset is an error in every vLLM
TRANSFER_S = 300.0  # for weights by NCCL, which takes seconds
RELOAD = (("/collective_rpc", {"method": "reload_weights"}), (RESET_PREFIX_CACHE,))  # the weights, and no keys of the old ones


class PolicyServers:
    """A policy in training on vLLM servers: they start with its weights and get the new ones at every `sync`.

    The servers of a node read them in a folder there (vllm_server.WeightFolder), when they start and at every sync. One that dies
    is restarted and comes back with the newest weights; meanwhile the others do its work. On GPU they are served in bf16, else
    in float32. A Policy has its servers on this machine. Those of a PolicyGroup are Ray actors, which Ray places on its nodes,
    and weights travel from the ranks to the nodes without passing this process.
    config: everything but the model's folder. Raises what ModelServers raises, and RuntimeError naming the server when one
    refuses the weights.

    transfer="nccl" sends later weights from GPU to GPU instead (vLLM's weight transfer; the trainer's GPU must be none of the
    servers'). The folder then keeps the first weights: a server that was restarted waits outside the router for the next sync.

    config.sleep_mode: the servers share the policy's GPUs. `sleep` leaves these to the policy, and the next sync wakes the
    servers; while they are awake the policy's optimizer is in the host's memory.
    """

    def __init__(self, policy, tokenizer, config: Config, transfer: str = "file"):
        self.policy, self.transfer, self.checked = policy, transfer, False
        self.policy_starts, self.members = 0, {}  # of the NCCL group: the policy's, and {server's URL: its restarts}
        self.servers, self.actors, self.placement, self.lost, self.lock = None, [], None, None, threading.Lock()
        self.dtype = torch.bfloat16 if policy.device.type == "cuda" else torch.float32
        about = policy.about()
        served = copy.deepcopy(about["config"])
        served.tie_word_embeddings = False  # vLLM's reload leaves a tied head with its old weights, silently
        served.architectures = [about["architecture"]]
        served.head_dtype = "float32"  # as in training, where vLLM's release can do it; 0.24 says that it cannot
        with tempfile.TemporaryDirectory() as folder:
            served.save_pretrained(folder)
            tokenizer.save_pretrained(folder)
            self.files = {str(p.relative_to(folder)): p.read_bytes() for p in Path(folder).rglob("*") if p.is_file()}
        # Log-probabilities after temperature; no top_k or penalty that the model's folder may suggest.
        vllm_args = ("--logprobs-mode", "processed_logprobs", "--generation-config", "vllm")
        if transfer == "nccl":
            vllm_args += ("--weight-transfer-config", '{"backend": "nccl"}')
        self.size = 2 * self.dtype.itemsize * about["numel"]  # old and new weights
        base = "/dev/shm" if os.path.isdir("/dev/shm") else tempfile.gettempdir()  # every node has it, and for itself
        self.path = f"{base}/policy_of_{secrets.token_hex(4)}"
        here = WeightFolder(self.path, self.files, self.size)  # also where no server reads it: settings are checked against it
        self.here, self.folder, self.folders = here, here.folder, {}  # node (None: this machine) -> its folder
        try:
            config = complete(replace(config, model=self.path, device=policy.device.type, port=0, control=True,
                                      dtype=str(self.dtype).removeprefix("torch."), vllm_args=vllm_args + config.vllm_args))
            if isinstance(policy, Policy):
                self.folders[None] = here
                policy.send_weights([here], self.dtype)
                here.publish()
            else:
                if config.sleep_mode:
                    self.actors = place_beside(config, policy.actors)
                else:
                    self.actors, self.placement = place_servers([config])
                self.provide({ray.get(actor.node.remote()) for actor in self.actors})
            if config.sleep_mode:
                policy.release_memory(optimizer=True)
            self.servers = ModelServers(config, "policy", self.actors, before_starting=self.before_starting,
                                        before_joining=self.is_current, sleep_call=SLEEP_WITHOUT_WEIGHTS)
        except BaseException:
            self.shutdown()
            raise

    def before_starting(self, slot: Slot) -> None:
        """Of a server in an actor: sees to it that its node has the weights. The actor may have moved to another one.

        While the others sleep no server starts: the policy has the memory.
        """
        while self.servers and self.servers.asleep and not self.servers.stopping.wait(0.2):
            pass
        if self.actors:
            starts = self.policy.starts
            try:
                self.provide({ray.get(slot.server.node.remote())})
            except RanksLost as error:
                self.lost = starts, error
                raise

    def check_policy(self) -> None:
        """Raises RanksLost where a server needs weights and the policy's ranks are gone: without new ones it never comes."""
        lost, self.lost = self.lost, None
        if lost and lost[0] == self.policy.starts:  # not of ranks before these
            raise lost[1]

    def provide(self, nodes: set[str]) -> None:
        """Makes a folder with the policy's weights of now on each of these nodes that has none."""
        with self.lock:
            for node in nodes & set(self.folders):
                try:
                    ray.get(self.folders[node].__ray_ready__.remote())
                except ray.exceptions.RayActorError:
                    del self.folders[node]
            new = {}
            for node in nodes - set(self.folders):
                options = dict(num_cpus=0, scheduling_strategy=NodeAffinitySchedulingStrategy(node, soft=False))
                new[node] = ray.remote(WeightFolder).options(**options).remote(self.path, self.files, self.size)
            gone = self.policy.send_weights(list(new.values()), self.dtype) if new else ()
            for index, (node, folder) in enumerate(new.items()):
                if index not in gone:
                    ray.get(folder.publish.remote())
                    self.folders[node] = folder

    def is_current(self, slot: Slot) -> bool:
        """Whether a server may join: one that was restarted may have read the weights of before a sync and be ready after it."""
        if self.servers is None or self.servers.asleep:  # all start for the first time, or none has weights until they wake
            return True
        if self.transfer == "nccl":
            return not self.members or self.members.get(slot.url) == slot.restarts
        for call in RELOAD:
            self.servers.ask(slot, *call)
        return True

    def sleep(self) -> None:
        """Leaves GPUs that are shared to the policy, until the next sync. Nothing may be generating."""
        self.servers.sleep()
        for slot in self.servers.slots:
            if not slot.joined:  # it is just starting, and would take the memory for as long as that lasts
                with contextlib.suppress(Exception):  # an actor that is gone, of which its thread tells
                    self.servers.call(slot, "stop", 0)

    def sync(self) -> None:
        """The policy's weights to all servers. Nothing may be generating. One that dies of it gets them when it is restarted."""
        if self.transfer == "nccl":
            return self.broadcast()
        with self.lock:
            nodes, folders = list(self.folders), list(self.folders.values())
            gone = {nodes[index] for index in self.policy.send_weights(folders, self.dtype)}
        with self.servers.lock:  # no server can join between the new files and the reload
            for node, folder in zip(nodes, folders):
                try:
                    if node not in gone:
                        folder.publish() if node is None else ray.get(folder.publish.remote())
                except ray.exceptions.RayActorError:
                    gone.add(node)
            with self.lock:
                for node, folder in zip(nodes, folders):
                    if node in gone and self.folders.get(node) is folder:  # else a server's thread has renewed it
                        del self.folders[node]
            if gone:  # where only the folder died its servers go on
                self.provide(gone & {node["NodeID"] for node in ray.nodes() if node["Alive"]})
            calls = RELOAD
            if self.servers.asleep:
                self.policy.release_memory(optimizer=True)
                self.servers.asleep = False
                calls = (("/wake_up?tags=weights",), *RELOAD, ("/wake_up?tags=kv_cache",))  # keys last: reloading takes memory
            for call in calls:
                self.servers.ask_all(*call)
        if not self.checked:
            self.checked = True
            for slot in self.servers.slots:
                if slot.joined and (said := self.servers.call(slot, "said", "weights were not loaded")):
                    print(f"policy servers: WARNING: {said}", flush=True)

    def broadcast(self) -> None:
        """`sync` by NCCL: the policy (its rank 0) sends; each server's `tensor_parallel_size` processes have the next ranks.

        NCCL knows no time limit, so there is one here: a server that dies in the middle would leave all others waiting.
        """

        def healthy():
            return [slot for slot in self.servers.slots if slot.url and http("GET", slot.url + "/health")[0] == 200]

        policy = self.policy
        while not healthy():  # all are being restarted
            if self.servers.given_up():
                raise RuntimeError("policy servers: every one was given up")
            time.sleep(1)
        deadline = threading.Timer(TRANSFER_S, policy.abandon_transfer)
        with self.servers.lock, ThreadPoolExecutor(64) as pool:
            slots, size = healthy(), self.servers.config.tensor_parallel_size

            def ask(path, body=lambda number: {}):  # all at once: some calls answer only when the policy has done its part
                return [pool.submit(self.servers.ask, slot, path, body(number)) for number, slot in enumerate(slots)]

            def wait(answers):
                for answer in answers:
                    answer.result()

            try:
                deadline.start()
                members = {slot.url: slot.restarts for slot in slots}
                if (policy.starts, members) != (self.policy_starts, self.members):  # a group takes nobody back: make a new one
                    address, port = policy.offer_transfer()
                    info = dict(master_address=address, master_port=port, world_size=1 + size * len(slots))
                    joined = ask("/init_weight_transfer_engine", lambda n: {"init_info": info | {"rank_offset": 1 + size * n}})
                    policy.open_transfer(address, port, info["world_size"])
                    self.policy_starts, self.members = policy.starts, members
                    wait(joined)
                shapes = policy.about()["shapes"]
                info = {"names": list(shapes), "dtype_names": [str(self.dtype).removeprefix("torch.")] * len(shapes)}
                info["shapes"] = list(shapes.values())
                wait(ask("/start_weight_update"))
                received = ask("/update_weights", lambda number: {"update_info": info})
                policy.transfer_weights(self.dtype)
                wait(received)
                wait(ask("/finish_weight_update"))
                wait(ask(RESET_PREFIX_CACHE))
            except BaseException:
                self.members = {"nobody": 0}
                for slot in slots:  # it may wait in NCCL for ever, and holds half of the new weights
                    self.servers.call(slot, "stop", 0)
                raise
            finally:
                deadline.cancel()

    def shutdown(self) -> None:
        """Ends the servers and removes the folders."""
        if self.servers:
            self.servers.stopping.set()
        end_servers(self.actors, self.placement)
        if self.servers:
            self.servers.shutdown()
        for node, folder in self.folders.items():
            if node is not None and ray.is_initialized():
                ray.kill(folder)
        self.here.close()


def place_beside(config: Config, ranks: list) -> list:
    """An actor for each of the policy's servers, on nodes and GPUs of the ranks. It reserves none in Ray: they have done that.

    config: complete(). ValueError where no node has GPUs enough for a server.
    """

    def held(rank):
        context = ray.get_runtime_context()
        return context.get_node_id(), context.get_accelerator_ids()["GPU"]

    gpus, size = {}, config.tensor_parallel_size  # node -> its GPUs
    for node, ids in ray.get([rank.__ray_call__.remote(held) for rank in ranks]):
        gpus.setdefault(node, []).extend(ids)
    places = [(node, ids[at : at + size]) for node, ids in gpus.items() for at in range(0, len(ids) - size + 1, size)]
    if len(places) < config.num_servers:
        have = [len(ids) for ids in gpus.values()]
        raise ValueError(f"rollout_shares_gpus: {config.num_servers} servers, each with {size} GPUs of one node, and the policy "
                         f"has {have} on its nodes; lower rollout_servers or rollout_tensor_parallel")  # fmt: skip
    return [server_actor(config, index, NodeAffinitySchedulingStrategy(node, soft=False), 0, part=0, parts=1, gpus=ids)
            for index, (node, ids) in enumerate(places[: config.num_servers])]  # fmt: skip


# ------------------------------------------------------------------------------------------------ kept, to be trained on again


def write_rollouts(out_dir: str, step: int, samples: list[Sample]) -> None:
    """What a step trains on: rollouts/step_N.jsonl, one sample a line, whole groups one after the other."""
    path = kept_rollouts(out_dir, step)
    path.parent.mkdir(exist_ok=True)
    replace_file(path, "".join(json.dumps(asdict(sample), ensure_ascii=False, default=str) + "\n" for sample in samples))


def kept_rollouts(run: str, step: int) -> Path:
    return Path(run, "rollouts", f"step_{step}.jsonl")


def read_rollouts(run: str, step: int) -> list[Sample]:
    """The samples that the run in folder `run` kept of a step."""
    return [Sample(**json.loads(line)) for line in kept_rollouts(run, step).read_text().rstrip("\n").split("\n")]


def check_rollouts(run: str, steps: int, group_size: int) -> None:
    """Raises ValueError where a run did not keep the rollouts of so many steps, or in groups of another size."""
    for step in range(1, steps + 1):
        if not kept_rollouts(run, step).is_file():
            raise ValueError(f"replay: {run} kept no rollouts of step {step} (--save-rollouts); lower --total-steps")
    rows = [sample.row for sample in read_rollouts(run, 1)] if steps else []
    sizes = [len(list(group)) for _, group in itertools.groupby(rows)]
    if any(size % group_size for size in sizes):
        raise ValueError(f"replay: {run} has groups of {sizes[0]} samples, and group_size is {group_size}; make them equal")
