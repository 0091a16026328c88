"""Reward Loop: every sample is scored on its own, the moment it is ready, on many workers of a Ray cluster.

You write one function (`FILE:NAME`, sync or async; see docs/reward_functions.md); the loop calls it:

    with contextlib.ExitStack() as stack:
        manager = start_rewards(RewardOptions(reward_fn="compute_score.py:compute_score_fapo", genrm=("PATH",)), stack)
        future = manager.submit(sample)             # standalone: as each rollout ends, from any thread; never waits
        result = await manager.score_one(sample)    # the same for an event loop
        results = manager.score_batch(samples)      # colocate: the reward models wake up, everything is scored, they sleep again

(`score_file.py` does it for a file.) A result is {"reward_score": float | None, "reward_extra_info": dict, "status": "ok" |
"no_verdict" | "timeout" | "error", "seconds": float}. A failure is a status, never a number: whatever the function does (raise,
hang, return NaN, kill its process), its sample has `reward_score: None`, and no other sample is touched.

RewardLoopManager runs in the driver. A thread with an event loop deals samples out to the least busy of its workers
(reward_worker.py, Ray actors) and holds every limit (each one for the whole cluster). A worker's answer to a standing `collect`
call brings what has been scored since the last. A dead worker is replaced and its samples are dealt out again.

Left out: several drivers sharing one limit; cancelling a sample that was handed to a worker; grading in a container (a
grading process has the rights of the user who started it). The function's file and this folder must be readable under the same
path on every node (a shared file system, or Ray's `runtime_env` working directory).
"""

import asyncio
import atexit
import collections
import concurrent.futures
import contextlib
import dataclasses
import functools
import inspect
import itertools
import json
import logging
import math
import os
import pickle
import random
import re
import shlex
import sys
import threading
import time
from pathlib import Path
from typing import Annotated, Any, Literal

import tyro

import reward_worker
from reward_worker import HERE, ISOLATE_AFTER, START_S, Job, bearer, describe, failure, load_function

STATUSES = ("ok", "no_verdict", "timeout", "error")
IN_FLIGHT_PER_SERVER = 128  # what a vLLM server works on without making single requests slow; the rest waits without a clock
WEDGED_S = 20.0  # a worker silent for timeout + this is taken for dead: not even threads run in it
GIVE_UP_AFTER = 10  # a sample that so many hand-overs have lost has the status "error"
RAY_WENT = "Ray was shut down while the reward loop was in use: start another one"

os.environ.setdefault("RAY_ENABLE_AUTO_CONNECT", "0")  # or a call after ray.shutdown() quietly starts another cluster

log = logging.getLogger("reward_loop")


class Overlong:
    """Overlong shaping: from `max_length - buffer` tokens on, a response loses up to `factor`, in a straight line.

    `penalty(length)` is what a response of `length` tokens loses (<= 0). Raises ValueError for a buffer that makes no sense.
    """

    def __init__(self, max_length: int, buffer: int, factor: float = 1.0):
        from algorithm import overlong_penalty  # with torch: only where it is needed

        self.penalty = functools.partial(overlong_penalty, max_length=max_length, buffer=buffer, factor=factor)
        self.penalty(0)


# ---- What the user sets


@dataclasses.dataclass(kw_only=True)
class RewardOptions:
    """How samples are scored. Every command line that scores has these flags: its configuration inherits from this one."""

    reward_fn: str | None = None
    """Reward function as FILE:NAME; default: the score of a discriminative reward model, without a reward model the rule."""
    reward_kwargs: str = "{}"
    """JSON object of further keyword arguments for every call, such as '{"penalty": 0.5}'."""
    router_address: tuple[str, ...] = ()
    """Reward model that runs already, as host:port; for several NAME=host:port each, the first being the main one."""
    genrm: tuple[str, ...] = ()
    """Reward model to start and stop with this run, as PATH (or hub name); for several NAME=PATH each, the first the main one."""
    genrm_servers: int = 1
    """vLLM servers for each model of --genrm."""
    genrm_tensor_parallel: int = 1
    """GPUs of each of them."""
    genrm_cpus: str = ""
    """On CPU: cores for the servers of --genrm, such as 0,1; default: all, shared out evenly."""
    genrm_gpus: str = ""
    """GPUs for the servers of --genrm, such as 2,3; default: all that Ray sees."""
    genrm_vllm_args: str = ""
    """Arguments for the servers of --genrm, in quotes and with a =: --genrm-vllm-args="--gpu-memory-utilization 0.4"."""
    reward_model_task: tuple[Literal["generate", "classify"], ...] = ("generate",)
    """Kind of the reward model: generative (a judge that writes) or discriminative (one number); for several one each, or one."""
    reward_model_tokenizer: str | None = None
    """Path of the tokenizer for discriminative models and for functions that take one; default for the former: --genrm's own."""
    num_workers: Annotated[int, tyro.conf.arg(aliases=["--num-reward-workers"])] = 2
    """Ray workers that call the function, spread over the nodes of the cluster."""
    sync_processes: int = 0
    """Grading processes per worker for a sync function; 0 shares each node's cores out over its workers."""
    timeout: Annotated[float, tyro.conf.arg(aliases=["--reward-timeout"])] = 600.0
    """Seconds for one call of the function; then its status is "timeout"."""
    max_in_flight: int | None = None
    """Samples in the workers' hands at once, others wait without a clock; default: 128 per server of the main reward model."""
    max_concurrency: int | None = None
    """Calls of the function at once in the whole cluster."""
    max_rpm: float | None = None
    """Calls of the function per minute in the whole cluster, evenly paced."""
    max_tpm: float | None = None
    """Judge tokens per minute in the whole cluster, a call being reckoned as --tokens-per-call."""
    tokens_per_call: int = 2000
    """What one call costs in judge tokens, for --max-tpm."""
    http_retries: int = 6
    """How often a call that raised a broken connection, HTTP 429 or 5xx is made again, after 1, 2, 4 ... 10 s."""
    max_no_verdict_rate: float = 0.2
    """Stop with an error when more than this share of the samples that needed a verdict has none."""

    def check_rewards(self, started: dict[str, str] | None = None) -> Job:
        """Refuses what cannot work before anything starts: ValueError naming the field, the value and the remedy.

        started: {name: "host:port"} of the models of `genrm` that are up. Returns what the workers need to know.
        """
        for name in (field.name for field in dataclasses.fields(RewardOptions)):
            value, may_be_0 = getattr(self, name), name in ("sync_processes", "http_retries", "max_no_verdict_rate")
            if isinstance(value, (int, float)) and not (value > 0 or value == 0 and may_be_0):
                raise ValueError(f"{name} is {value}: it must be {'at least' if may_be_0 else 'greater than'} 0")
        models, addresses = named("genrm", self.genrm), named("router_address", self.router_address)
        if models and addresses:
            raise ValueError("genrm starts a reward model, router_address names a running one: give one of them")
        for name, address in addresses.items():
            if not re.fullmatch(r"[^/]+:\d+", address):
                raise ValueError(f"router_address is {address!r} for {name}: it must be host:port or NAME=host:port")
        for name in ("genrm_servers", "genrm_tensor_parallel", "genrm_cpus", "genrm_gpus", "genrm_vllm_args"):
            if not models and getattr(self, name) not in (1, ""):
                raise ValueError(f"{name} is {getattr(self, name)!r}: about the servers of genrm; give genrm")
        if len(self.reward_model_task) not in (1, len(models or addresses)):
            raise ValueError(f"reward_model_task is {self.reward_model_task}: give one for all models, or one for each of them")
        for config in self.server_configs().values():
            config.check()
        return plan_call(self, started or addresses or dict.fromkeys(models, "host:0"))

    def server_configs(self, sleep_mode: bool = False) -> dict:
        """{name: genrm_server.Config} of the reward models to start."""
        if not (models := named("genrm", self.genrm)):
            return {}
        import genrm_server

        tasks = self.reward_model_task * (len(models) if len(self.reward_model_task) == 1 else 1)
        rest = dict(num_servers=self.genrm_servers, tensor_parallel_size=self.genrm_tensor_parallel, port=0,
                    cpus=self.genrm_cpus, gpus=self.genrm_gpus, sleep_mode=sleep_mode,
                    vllm_args=split_arguments("genrm_vllm_args", self.genrm_vllm_args))  # fmt: skip
        return {name: genrm_server.Config(path, task=task, **rest) for (name, path), task in zip(models.items(), tasks)}


def named(field: str, values: tuple[str, ...]) -> dict[str, str]:
    """("a:1", "rm=b:2") -> {"genrm": "a:1", "rm": "b:2"}; what has no name is "genrm", and "genrm1" ... behind others."""
    found = {}
    for number, value in enumerate(values):
        name, text = re.fullmatch(r"(?:([A-Za-z_][\w-]*)=)?(.*)", value, re.DOTALL).groups()
        name = name or f"genrm{number or ''}"
        if name in found:
            raise ValueError(f"{field}: there are two models with the name {name!r}; write NAME=... with different names")
        found[name] = text
    return found


def split_arguments(field: str, text: str) -> tuple[str, ...]:
    """As a shell splits them. ValueError naming the field where a quotation is left open."""
    try:
        return tuple(shlex.split(text))
    except ValueError as error:
        raise ValueError(f"{field}: {text!r} cannot be read ({error})") from None


def plan_call(options: RewardOptions, addresses: dict[str, str]) -> Job:
    """How samples will be scored, with these reward models. Loads the function to see that it fits. Raises ValueError."""
    try:
        kwargs = dict(json.loads(options.reward_kwargs).items())
    except (ValueError, AttributeError):
        raise ValueError(f"reward_kwargs is {options.reward_kwargs!r}: it is not JSON, or not a JSON object") from None
    discriminative = bool(addresses) and options.reward_fn is None and options.reward_model_task[0] == "classify"
    tokenizer = options.reward_model_tokenizer
    if options.reward_model_task[0] == "classify" and options.genrm:
        tokenizer = tokenizer or next(iter(named("genrm", options.genrm).values()))
    if addresses and options.reward_fn is None and not discriminative:
        raise ValueError("a generative reward model needs a function that asks it: give reward_fn as FILE:NAME")
    if discriminative and not tokenizer:
        raise ValueError("a discriminative reward model needs reward_model_tokenizer (a path) for its chat template")
    file, _, name = (options.reward_fn or f"{HERE}/compute_score.py:compute_score").rpartition(":")
    path = Path(file).expanduser().resolve()
    if not file.endswith(".py") or not name:
        raise ValueError(f"reward_fn is {options.reward_fn!r}: it must be FILE:NAME, such as compute_score.py:compute_score")
    if not discriminative and not path.is_file():
        raise ValueError(f"reward_fn is {options.reward_fn!r}: there is no file {path}")
    spec = None if discriminative else f"{path}:{name}"
    import_path = sys.path.copy()
    try:
        function = load_function(spec)
    finally:
        sys.path[:] = import_path  # the driver has modules of its own to import
    signature, common = inspect.signature(function), {}
    if addresses:
        common = {"reward_router_address": next(iter(addresses.values())), "reward_router_addresses": addresses}
        common["reward_model_tokenizer"] = None
    if not any(p.kind is p.VAR_KEYWORD for p in signature.parameters.values()):  # a plain rule runs beside a reward model
        common = {key: value for key, value in common.items() if key in signature.parameters}
    common |= kwargs
    sample = dict.fromkeys(["data_source", "solution_str", "ground_truth", "extra_info"] + ["prompt"] * discriminative)
    step = {"step": None} if "step" in signature.parameters.keys() - common else {}
    try:
        signature.bind(**sample, **step, **common)
    except TypeError as error:
        remedy = "reward_kwargs must name its further parameters, and those of a reward model need one"
        raise ValueError(f"{spec} cannot be called as reward functions are: {error}; {remedy}") from None
    is_async = any(map(inspect.iscoroutinefunction, (function, function.__call__)))
    tokenizer = tokenizer if "reward_model_tokenizer" in common else None
    return Job(spec, common, tokenizer, is_async, options.timeout, options.sync_processes)


# ---- The manager


@dataclasses.dataclass(eq=False)
class Ticket:
    """One sample on its way."""

    number: int
    payload: bytes
    penalty: float  # overlong
    future: concurrent.futures.Future
    lost: int = 0  # hand-overs that came to nothing: the worker died, or Ray lost the call
    tries: int = 0  # failed HTTP tries


@dataclasses.dataclass(eq=False)
class Slot:
    """One worker's place: its actor may be replaced."""

    index: int
    worker: Any = None  # None while there is none that can take samples
    pending: dict[int, Ticket] = dataclasses.field(default_factory=dict)


class RewardLoopManager:
    """Scores samples on `options.num_workers` Ray workers. Safe to use from any thread and any event loop.

    Raises ValueError (a missing function, an option that makes no sense) before anything is scored. `start_rewards` makes one
    from options alone; here the models of options.genrm are handed over as
    reward_models: a genrm_server.RewardModelManager; gives the addresses, and is woken and put to sleep by score_batch.
    overlong: Overlong(max_length, buffer, factor) or None; samples then need `response_length` in tokens.
    """

    def __init__(self, options: RewardOptions, *, reward_models=None, overlong: Overlong | None = None):
        import ray

        self.job = options.check_rewards(reward_models and reward_models.router_addresses)

        self._ray = ray
        self._started_ray = connect_ray()
        self._connection = connection()
        # By value: a worker's Python then needs no import path to this file.
        ray.cloudpickle.register_pickle_by_value(reward_worker)
        self.options, self.reward_models, self.overlong = options, reward_models, overlong
        self._addresses = reward_models.router_addresses if reward_models else named("router_address", options.router_address)
        self.max_in_flight = options.max_in_flight or 2048

        self._queue = collections.deque()  # filled from any thread
        self._open = set()  # the futures without a result; from any thread
        self._numbers = itertools.count()
        self._closed = None  # the reason, once closed
        self._loop = asyncio.new_event_loop()  # everything below belongs to its thread
        self._wake, self._wake_is_due = asyncio.Event(), False  # there may be samples to deal out
        self._slots = [Slot(index) for index in range(options.num_workers)]
        self._tasks = set()
        self._said, self._warnings_left = set(), 3
        self._thread = threading.Thread(target=self._loop.run_forever, name="reward-loop", daemon=True)
        self._thread.start()
        atexit.register(self.shutdown)
        try:
            asyncio.run_coroutine_threadsafe(self._start(), self._loop).result()
        except BaseException as error:
            self.shutdown()
            raise RuntimeError(self._closed) if isinstance(error, concurrent.futures.CancelledError) else error

    # ---- for callers, in their own threads

    def submit(self, sample: dict) -> concurrent.futures.Future:
        """Takes one row of the schema plus `response` (str) [and `response_length` in tokens, `step`] -> its result's future."""
        try:
            arguments = dict(data_source=sample["data_source"], solution_str=sample["response"])
            arguments |= dict(ground_truth=sample["reward_model"]["ground_truth"], extra_info=sample.get("extra_info") or {})
            if self.job.function is None:
                arguments["prompt"] = sample["prompt"]
            if "step" in sample:
                arguments |= {"step": sample["step"], "extra_info": arguments["extra_info"] | {"step": sample["step"]}}
            penalty = self.overlong.penalty(sample["response_length"]) if self.overlong else 0.0
        except KeyError as error:
            raise ValueError(f"the sample has no {error}: a sample is a row of the schema plus `response`") from None
        future = concurrent.futures.Future()
        ticket = Ticket(next(self._numbers), pickle.dumps(arguments, protocol=5), penalty, future)
        self._open.add(future)
        future.add_done_callback(self._open.discard)
        if self._closed:  # asked only now: whoever closes either sees this future or is seen here
            raise RuntimeError(self._closed)
        self._put(ticket)
        return future

    async def score_one(self, sample: dict) -> dict:
        """`submit` for coroutines, of any event loop."""
        return await asyncio.wrap_future(self.submit(sample))

    def score_batch(self, samples: list[dict], on_result=None) -> list[dict]:
        """Scores any number of samples -> results in their order, all with the same keys of extra info (missing ones: None).

        Wakes the reward models first and puts them to sleep afterwards. A batch that takes long shows a progress bar.
        on_result(index, result) is called as each result arrives; what it raises ends the batch.
        """
        from tqdm import tqdm

        if self._closed:
            raise RuntimeError(self._closed)
        if self.reward_models:
            self.reward_models.wake_up()
        futures = {}
        try:
            for index, sample in enumerate(samples):
                futures[self.submit(sample)] = index
            arriving = concurrent.futures.as_completed(futures)
            for future in tqdm(arriving, "scoring", len(futures), unit="sample", delay=3, leave=False, disable=None):
                result = future.result()
                if on_result:
                    on_result(futures[future], result)
        finally:
            for future in futures:
                future.cancel()  # in a batch that ended early: those not yet handed out never will be
            if self.reward_models:
                self.reward_models.sleep()
        return with_equal_keys([future.result() for future in futures])

    def shutdown(self) -> None:
        """Ends the workers (and Ray, if this manager started it); samples on their way raise RuntimeError. Twice is allowed."""
        atexit.unregister(self.shutdown)
        if self._thread.is_alive():
            asyncio.run_coroutine_threadsafe(self._stop("the reward loop was shut down"), self._loop).result()
            self._loop.call_soon_threadsafe(self._loop.stop)
            self._thread.join()
            self._loop.close()
            if self._started_ray and self._ray_is_up():
                self._ray.shutdown()

    def _put(self, ticket: Ticket) -> None:
        self._queue.append(ticket)
        if not self._wake_is_due:  # one wake-up of the loop's thread for many samples
            self._wake_is_due = True
            self._loop.call_soon_threadsafe(self._wake.set)

    def _ray_is_up(self) -> bool:
        """Whether Ray is the one of the start: a call to an actor of one that has gone waits for ever, or starts another Ray."""
        try:
            return self._ray.is_initialized() and connection() == self._connection
        except Exception:  # it is going just now
            return False

    def _kill(self, worker) -> None:
        """Ends an actor; one that went with its Ray needs no ending."""
        if self._ray_is_up():
            with contextlib.suppress(self._ray.exceptions.RayError):
                self._ray.kill(worker)

    # ---- in the loop's thread

    async def _start(self) -> None:
        self._spawn(self._watch_ray())
        await asyncio.gather(*map(self._start_worker, self._slots))
        if self._addresses and not self.options.max_in_flight:
            self._spawn(self._follow_servers())
        for slot in self._slots:
            self._spawn(self._serve(slot))
        self._spawn(self._deal_out())

    def _spawn(self, coroutine) -> None:
        """Runs something in the background. What it raises ends the manager: nobody shall wait for what will never come."""
        task = self._loop.create_task(coroutine)
        self._tasks.add(task)
        task.add_done_callback(self._ended)

    def _ended(self, task: asyncio.Task) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and (error := task.exception()) and not self._closed:
            plain = isinstance(error, (RuntimeError, ValueError))  # our own: says it all
            reason = str(error) if plain else f"the reward loop failed: {describe(error)}"
            self._spawn(self._stop(reason if self._ray_is_up() else RAY_WENT))

    async def _deal_out(self) -> None:
        """Deals waiting samples out to the least busy workers, as far as the limits allow."""
        options, next_call = self.options, 0.0
        per_minute = min(options.max_rpm or math.inf, (options.max_tpm or math.inf) / options.tokens_per_call)
        while await self._wake.wait():
            self._wake.clear()
            self._wake_is_due = False  # first: a sample from now on wakes this again
            ready = [slot for slot in self._slots if slot.worker]
            limit = min(self.max_in_flight, options.max_concurrency or math.inf)
            free = limit - sum(len(slot.pending) for slot in self._slots)
            outgoing, pause = collections.defaultdict(list), 0.0
            while self._queue and ready and free > 0 and (pause := next_call - time.monotonic()) <= 0:
                ticket = self._queue.popleft()
                if ticket.future.done():  # its caller has gone
                    continue
                next_call = max(next_call, time.monotonic()) + 60 / per_minute
                slot = min(ready, key=lambda slot: len(slot.pending))
                slot.pending[ticket.number] = ticket
                outgoing[slot].append(ticket)
                free -= 1
            if not self._ray_is_up():
                raise RuntimeError(RAY_WENT)
            for slot, tickets in outgoing.items():
                batch = [(ticket.number, ticket.lost >= ISOLATE_AFTER, ticket.payload) for ticket in tickets]
                self._spawn(self._confirm(slot, slot.worker, tickets, slot.worker.submit.remote(batch)))
            if pause > 0:
                await asyncio.sleep(pause)
                self._wake.set()

    async def _confirm(self, slot: Slot, worker, tickets: list[Ticket], call) -> None:
        """Waits until a worker has its samples. If Ray loses the call they are queued again; a dead worker is seen in _serve."""
        try:
            await call
        except self._ray.exceptions.ActorUnavailableError:
            if slot.worker is worker:
                self._requeue(slot, tickets)
        except self._ray.exceptions.RayActorError:
            pass

    def _requeue(self, slot: Slot, tickets: list[Ticket], lost: int = 1) -> None:
        """Samples that no result will come for go to the front of the queue."""
        for ticket in reversed(tickets):
            if slot.pending.pop(ticket.number, None):
                ticket.lost += lost
                if ticket.lost < GIVE_UP_AFTER:
                    self._queue.appendleft(ticket)
                else:
                    self._finish(ticket, failure("error", f"{ticket.lost} reward workers died with this sample"), 0.0)
        self._wake.set()

    async def _start_worker(self, slot: Slot) -> None:
        """A new actor in this slot, on the next living node in turn (another one, should that be gone meanwhile)."""
        ray, reason = self._ray, ""
        for attempt in range(5):
            await asyncio.sleep(2**attempt if attempt else 0)
            while not (nodes := self._nodes()):
                self._say("the Ray cluster has no living node with CPUs: the reward loop waits for one")
                await asyncio.sleep(1)
            number = slot.index % len(nodes)
            neighbours = len(range(number, len(self._slots), len(nodes)))  # on the same node, itself included
            processes = self.options.sync_processes or max(1, int(nodes[number]["Resources"]["CPU"]) // neighbours)
            strategy = ray.util.scheduling_strategies.NodeAffinitySchedulingStrategy(nodes[number]["NodeID"], soft=True)
            actor = ray.remote(num_cpus=0.01, max_restarts=0, scheduling_strategy=strategy, concurrency_groups={"collect": 2})
            worker = actor(reward_worker.RewardLoopWorker).remote(dataclasses.replace(self.job, sync_processes=processes))
            try:
                # The key goes as an argument: a cluster that was started in another shell does not have it.
                call = worker.prepare.remote(os.environ.get("ROUTER_API_KEY", "").strip())
                complaint = await asyncio.wait_for(call, START_S + WEDGED_S)
            except (ray.exceptions.RayError, TimeoutError) as error:
                why = describe(error) if str(error) else f"no answer within {START_S + WEDGED_S:g} s"
                reason = f"reward worker {slot.index} cannot be started: {why}"
                self._kill(worker)
                continue
            if complaint:
                raise ValueError(complaint)
            slot.worker = worker
            return
        raise RuntimeError(" ".join(reason.split()))

    def _nodes(self) -> list[dict]:
        """The living nodes for workers. ValueError where a reward model's address means another machine there than here."""
        if not self._ray_is_up():
            raise RuntimeError(RAY_WENT)
        alive = [node for node in self._ray.nodes() if node["Alive"]]
        nodes = sorted((node for node in alive if node["Resources"].get("CPU", 0) > 0), key=lambda node: node["NodeID"])
        here = self._ray.get_runtime_context().get_node_id()
        machines = {node["NodeManagerAddress"] for node in alive if node in nodes or node["NodeID"] == here}
        for name, address in self._addresses.items():
            if len(machines) > 1 and re.match(r"127\.|localhost:|\[::1\]", address):
                raise ValueError(
                    f"the reward model {name} is at {address}, which workers on other nodes cannot reach: start it with --host "
                    "0.0.0.0 (and a ROUTER_API_KEY) and give this machine's own address"
                )
        return nodes

    async def _watch_ray(self) -> None:
        """Ends the manager when Ray is shut down: no answer of an actor comes then."""
        while self._ray_is_up():
            await asyncio.sleep(1)
        raise RuntimeError(RAY_WENT)

    async def _serve(self, slot: Slot) -> None:
        """Takes the results of one worker for as long as the manager lives, and replaces the worker when it dies."""
        errors, taken = self._ray.exceptions, 0
        while True:
            try:
                call = slot.worker.collect.options(concurrency_group="collect").remote(taken)
                results, complaint, lost = await asyncio.wait_for(call, self.job.timeout + WEDGED_S)
            except errors.ActorUnavailableError:  # Ray lost the call: the same again
                await asyncio.sleep(0.1)
                continue
            except (errors.RayActorError, TimeoutError) as error:
                what, lost = ("is wedged", ISOLATE_AFTER) if isinstance(error, TimeoutError) else ("died", 1)
                results, complaint = [], f"reward worker {slot.index} {what}; a new one takes over"
            for number, result, seconds in results:
                if ticket := slot.pending.pop(number, None):  # else it is a second result: the first was only thought lost
                    self._finish(ticket, result, seconds)
            taken += len(results)
            self._say(complaint)
            if lost is not None:
                self._kill(slot.worker)
                slot.worker, taken = None, 0
                self._requeue(slot, list(slot.pending.values()), lost)
                await self._start_worker(slot)
            self._wake.set()

    def _finish(self, ticket: Ticket, result: bytes, seconds: float) -> None:
        score, extra, status, retry_after = json.loads(result, parse_constant=lambda _: None)  # a NaN in extra info: null
        if retry_after is not None and ticket.tries < self.options.http_retries:
            pause = max(retry_after, min(2**ticket.tries, 10) * random.uniform(0.75, 1.25))
            ticket.tries += 1
            self._loop.call_later(pause, self._put, ticket)
            return
        if status in ("error", "timeout") and self._warnings_left:
            self._warnings_left -= 1
            log.warning("a sample got no score (%s): %s", status, extra.get("error"))
        if self.overlong:
            extra |= {"overlong_penalty": ticket.penalty, "overlong": ticket.penalty < 0}
        reward = None if score is None else score + ticket.penalty
        with contextlib.suppress(concurrent.futures.InvalidStateError):  # cancelled: its caller has gone
            values = {"reward_score": reward, "reward_extra_info": extra, "status": status, "seconds": seconds}
            ticket.future.set_result(values)

    def _say(self, text: str) -> None:
        """Warns, once with the same words."""
        if text and text not in self._said:
            self._said.add(text)
            log.warning(text)

    async def _follow_servers(self) -> None:
        """Keeps `max_in_flight` in step with the servers behind the main router: a slow judge is to be slow, not overdue."""
        import aiohttp

        address, count = next(iter(self._addresses.values())), 1  # 1: an address that is no router of ours
        async with aiohttp.ClientSession(headers=bearer(), timeout=aiohttp.ClientTimeout(total=10)) as session:
            while True:
                with contextlib.suppress(aiohttp.ClientError, OSError, ValueError, LookupError, TypeError):
                    async with session.get(f"http://{address}/workers") as response:
                        count = len((await response.json())["workers"])
                self.max_in_flight = IN_FLIGHT_PER_SERVER * max(1, count)
                self._wake.set()
                await asyncio.sleep(30)

    async def _stop(self, reason: str) -> None:
        self._closed = self._closed or reason
        for future in list(self._open):  # first of all: whatever fails below, nobody waits
            with contextlib.suppress(concurrent.futures.InvalidStateError):
                future.set_exception(RuntimeError(self._closed))
        for slot in self._slots:
            if slot.worker:
                self._kill(slot.worker)
            slot.worker = None
        others = asyncio.all_tasks() - {asyncio.current_task()}
        for task in others:
            task.cancel()
        await asyncio.gather(*others, return_exceptions=True)


def with_equal_keys(results: list[dict]) -> list[dict]:
    """The same results with the union of all extra-info keys in each; what a sample lacks is None."""
    empty = {key: None for result in results for key in result["reward_extra_info"]}
    return [result | {"reward_extra_info": empty | result["reward_extra_info"]} for result in results]


def needed_verdict(result: dict) -> bool:
    """False for a sample that has a score and whose function says that the judge was not asked (`genrm_status` "skipped")."""
    return result["reward_score"] is None or result["reward_extra_info"].get("genrm_status") != "skipped"


def no_verdict_rate(results: list[dict]) -> float:
    """Share of samples without a score among those that needed a verdict; 0.0 where none needed one."""
    return sum(result["reward_score"] is None for result in results) / max(sum(map(needed_verdict, results)), 1)


def connection() -> tuple[str, str]:
    """Which Ray this process is connected to: another one has another node, the same one joined again another driver."""
    import ray

    context = ray.get_runtime_context()
    return context.get_node_id(), context.get_worker_id()


def connect_ray(gpus: str = "") -> bool:
    """Joins the Ray cluster that RAY_ADDRESS names or that runs on this machine, else starts one; True: it was started now.

    Says which in one line. gpus: what a cluster that is started may deal out, such as "2,3". RuntimeError if it cannot be joined.
    """
    import ray

    no_choice = ValueError(f"genrm_gpus is {gpus}: the Ray cluster deals out its own GPUs; RAY_ADDRESS=local starts another")
    if ray.is_initialized():
        if gpus:
            raise no_choice
        return False
    quiet = dict(include_dashboard=False, log_to_driver=False, logging_level=logging.ERROR)
    address, visible = os.environ.get("RAY_ADDRESS") or "auto", os.environ.get("CUDA_VISIBLE_DEVICES")
    try:
        if address != "local":
            with contextlib.suppress(*[ConnectionError] * (address == "auto")):  # there is none
                ray.init(address, **quiet)
        if started := not ray.is_initialized():
            os.environ |= {"CUDA_VISIBLE_DEVICES": gpus} if gpus else {}  # Ray, and all that it starts, reads it now
            ray.init("local", **quiet)
    except Exception as error:  # another version of Ray or Python, another key: of many types, some with a page of text
        text = f"Ray: the cluster {address} cannot be joined ({describe(error):.300}); RAY_ADDRESS=local starts one of your own"
        raise RuntimeError(" ".join(text.split())) from error
    finally:
        os.environ.pop("CUDA_VISIBLE_DEVICES", None)
        os.environ |= {"CUDA_VISIBLE_DEVICES": visible} if visible is not None else {}
    if gpus and not started:
        ray.shutdown()  # leaves it
        raise no_choice
    have = ray.cluster_resources()
    text = f"{have.get('CPU', 0):g} CPUs, {have.get('GPU', 0):g} GPUs"
    where = f"joined the cluster at {ray.get_runtime_context().gcs_address}" if not started else "started a cluster for this run"
    print(f"Ray: {where} ({text})" + "; RAY_ADDRESS=local starts one of your own" * (not started), flush=True)
    return started


def start_rewards(options: RewardOptions, stack: contextlib.ExitStack, *, sleep_mode: bool = False,
                  overlong: Overlong | None = None) -> RewardLoopManager:  # fmt: skip
    """Starts the reward models that the options name, and the loop -> RewardLoopManager. All of it ends with `stack`.

    sleep_mode: the models' servers can be put to sleep, for a GPU that they share with a trainer (score_batch does it).
    """
    options.check_rewards()
    if connect_ray(options.genrm_gpus):
        stack.callback(sys.modules["ray"].shutdown)
    models = None
    if options.genrm:
        import genrm_server

        models = genrm_server.RewardModelManager(options.server_configs(sleep_mode))
        stack.callback(models.shutdown)
    manager = RewardLoopManager(options, reward_models=models, overlong=overlong)
    stack.callback(manager.shutdown)
    return manager


if __name__ == "__main__":
    print("scoring a file is a command of its own: python score_file.py, with the same flags", file=sys.stderr)
    sys.exit(2)
