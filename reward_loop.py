"""Reward Loop: every sample is scored on its own, the moment it is ready, on many workers of a Ray cluster.

You write one function (`FILE:NAME`, sync or async; see docs/reward_functions.md); the loop calls it:

    options = RewardOptions(reward_fn="compute_score.py:compute_score_fapo", genrm=("PATH",))
    with contextlib.ExitStack() as stack:
        manager = start_rewards(options, stack)
        future = manager.submit(sample)           # as each rollout ends, from any thread; never waits
        result = await manager.score_one(sample)  # the same for an event loop
        results = manager.score_batch(samples)    # colocate: the reward models are awake while it scores
        futures = manager.submit_group(samples)   # of one prompt: for a function that takes `solution_strs`

A result is {"reward_score": float | None, "reward_extra_info": dict, "status": "ok" | "no_verdict" |
"timeout" | "error", "seconds": float}. A failure is a status, never a number: whatever the function does
(raise, hang, return NaN, kill its process), its sample has `reward_score: None`, and no other is touched.

RewardLoopManager runs in the driver. A thread with an event loop deals samples out to the least busy of its
workers (reward_worker.py, Ray actors) and holds every limit for the whole cluster. A worker's answer to a
standing `collect` call brings what has been scored since the last. Ray restarts a worker that has died, the
manager ends one that hangs. What fails in company is tried again, in the end alone; there it is at fault.
Left out: several drivers sharing one limit; cancelling a sample that was handed to a worker; grading in a
container (a grading process has your rights). Function and folder need the same path on all nodes. Needs
reward_worker.py; for models of its own genrm_server.py and cluster/; by default compute_score.py.
"""

import asyncio
import atexit
import collections
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
import socket
import sys
import threading
import time
from concurrent.futures import Future, InvalidStateError, as_completed
from pathlib import Path
from types import NoneType, UnionType
from typing import Annotated, Literal, Union, get_args, get_origin

from tyro.conf import arg

import reward_worker
from reward_worker import ALONE_AFTER, HERE, START_S, Job, bearer, describe, failure, load_function

STATUSES = ("ok", "no_verdict", "timeout", "error")
IN_FLIGHT_PER_SERVER = 128  # what a vLLM server works on without making single requests slow
WEDGED_S = 20.0  # a worker silent for timeout + this is taken for dead: not even threads run in it
GIVE_UP_AFTER = 10  # a sample that so many workers have died with has the status "error"
MAY_BE_0 = ("sync_processes", "http_retries", "max_no_verdict_rate")
FURTHER_COLUMNS = {"prompt", "response_length", "step"}  # of a row: a function gets those that it names

os.environ.setdefault("RAY_ENABLE_AUTO_CONNECT", "0")  # else a call after shutdown starts a cluster
log = logging.getLogger("reward_loop")


@dataclasses.dataclass(kw_only=True)
class RewardOptions:
    """How samples are scored: flags of every command line that scores, whose configuration inherits them."""

    reward_fn: str | None = None  # As FILE:NAME; default: the rule, or a discriminative model's score.
    reward_kwargs: str = "{}"  # JSON object: keyword arguments for every call, such as '{"penalty": 0.5}'.
    router_address: tuple[str, ...] = ()  # Running reward model, as host:port; several: NAME=host:port each.
    genrm: tuple[str, ...] = ()  # Reward model to start: PATH or hub name; several: NAME=PATH, main first.
    genrm_servers: int = 1  # vLLM servers for each model of --genrm.
    genrm_tensor_parallel: int = 1  # GPUs of each of them.
    genrm_gpu_share: float = 1.0  # Share of a GPU for each of them; below 1 also of its memory.
    genrm_cpus: str = ""  # On CPU: their cores, such as 0,1; default: all, shared out evenly.
    genrm_vllm_args: str = ""  # Their vLLM arguments, with a =: --genrm-vllm-args="--max-num-seqs 64".
    reward_model_task: tuple[Literal["generate", "classify"], ...] = ("generate",)  # For all, or one each.
    reward_model_tokenizer: str | None = None  # Path, for functions that need one; default: that of --genrm.
    num_workers: Annotated[int, arg(aliases=["--num-reward-workers"])] = 2  # Ray workers, over all nodes.
    sync_processes: int = 0  # Grading processes per worker, for a sync function; 0 shares the cores out.
    timeout: Annotated[float, arg(aliases=["--reward-timeout"])] = 600.0  # Seconds a call; then "timeout".
    max_in_flight: int | None = None  # Calls at once in the whole cluster; default: 128 per judge's server.
    max_rpm: float | None = None  # Calls of the function per minute in the whole cluster, evenly paced.
    max_tpm: float | None = None  # Judge tokens per minute in the cluster, a call being --tokens-per-call.
    tokens_per_call: int = 2000  # What one call costs in judge tokens, for --max-tpm.
    http_retries: int = 6  # Further tries of a call that raised a broken connection, HTTP 429 or 5xx.
    max_no_verdict_rate: float = 0.2  # Stop when more of the samples that needed a verdict have none.

    def check_rewards(self, started: dict[str, str] | None = None) -> Job:
        """What workers need to know; ValueError with field, value, remedy. started: {model: address}."""
        for name in (field.name for field in dataclasses.fields(RewardOptions)):
            value, least = getattr(self, name), "at least" if name in MAY_BE_0 else "greater than"
            if isinstance(value, (int, float)) and not (value > 0 or value == 0 and name in MAY_BE_0):
                raise ValueError(f"{name} is {value}: it must be {least} 0")
        models, addresses = named("genrm", self.genrm), named("router_address", self.router_address)
        if models and addresses:
            raise ValueError("genrm starts a reward model, router_address names a running one: give one")
        if wrong := [text for text in addresses.values() if not re.fullmatch(r"[^/]+:\d+", text)]:
            raise ValueError(f"router_address is {wrong[0]!r}: it must be host:port or NAME=host:port")
        for name in ("servers", "tensor_parallel", "gpu_share", "cpus", "vllm_args"):
            if not models and (value := getattr(self, f"genrm_{name}")) not in (1, ""):
                raise ValueError(f"genrm_{name} is {value!r}: about the servers of genrm; give genrm")
        if len(self.reward_model_task) not in (1, len(models or addresses)):
            raise ValueError(f"reward_model_task is {self.reward_model_task}: give one, or one for each")
        for config in self.server_configs().values():
            config.check()
        return plan_call(self, started or addresses or dict.fromkeys(models, "host:0"))

    def server_configs(self, sleep_mode: bool = False) -> dict:
        """{name: genrm_server.Config} of the reward models to start."""
        if not (models := named("genrm", self.genrm)):
            return {}
        import genrm_server
        rest = dict(num_servers=self.genrm_servers, tensor_parallel_size=self.genrm_tensor_parallel, port=0,
                    gpu_share=self.genrm_gpu_share, cpus=self.genrm_cpus, sleep_mode=sleep_mode,
                    vllm_args=split_arguments("genrm_vllm_args", self.genrm_vllm_args))  # fmt: skip
        tasks = zip(models.items(), itertools.cycle(self.reward_model_task))
        return {name: genrm_server.Config(path, task=task, **rest) for (name, path), task in tasks}


def named(field: str, values: tuple[str, ...]) -> dict[str, str]:
    """("a:1", "rm=b:2") -> {"genrm": "a:1", "rm": "b:2"}; without a name number i is "genrm{i}"."""
    found = {}
    for number, value in enumerate(values):
        name, text = re.fullmatch(r"(?:([A-Za-z_][\w-]*)=)?(.*)", value, re.DOTALL).groups()
        name = name or f"genrm{number or ''}"
        if name in found:
            raise ValueError(f"{field}: two models are named {name!r}; write NAME=... with different names")
        found[name] = text
    return found


def split_arguments(field: str, text: str) -> tuple[str, ...]:
    """As a shell splits them. ValueError naming the field where a quotation is left open."""
    try:
        return tuple(shlex.split(text))
    except ValueError as error:
        raise ValueError(f"{field}: {text!r} cannot be read ({error})") from None


def plan_call(options: RewardOptions, addresses: dict[str, str]) -> Job:
    """How samples will be scored with these reward models. ValueError where the function does not fit."""
    try:
        kwargs = dict(json.loads(options.reward_kwargs).items())
    except (ValueError, AttributeError):
        raise ValueError(f"reward_kwargs: {options.reward_kwargs!r} is not JSON, or no JSON object") from None
    spec = options.reward_fn or f"{HERE}/compute_score.py:compute_score"
    tokenizer = options.reward_model_tokenizer or next(iter(named("genrm", options.genrm).values()), None)
    if addresses and not options.reward_fn:
        spec += "_discriminative"
        if options.reward_model_task[0] != "classify":
            raise ValueError("a generative reward model needs a function that asks it: give reward_fn")
        if not tokenizer:
            raise ValueError("a discriminative reward model needs reward_model_tokenizer (a path)")
    file, _, name = spec.rpartition(":")
    path = Path(file).expanduser().resolve()
    if not (name and path.suffix == ".py" and path.is_file()):
        raise ValueError(f"reward_fn is {spec!r}: there is no file {path}; it must be FILE:NAME, a .py")
    function = load_once(f"{path}:{name}", path.stat().st_mtime_ns)
    takes = (signature := inspect.signature(function)).parameters
    sees_group, main = "solution_strs" in takes, next(iter(addresses.values()), None)
    models = dict(reward_router_address=main, reward_model_tokenizer=None, reward_router_addresses=addresses)
    passed_on = [*models][:2] if any(p.kind is p.VAR_KEYWORD for p in takes.values()) else []  # **settings
    models = {key: models[key] for key in models if addresses and (key in takes or key in passed_on)}
    required = {key for key, one in takes.items() if one.default is signature.empty}
    columns = {key: key in required for key in FURTHER_COLUMNS & takes.keys() - kwargs}
    names = ["data_source", "solution_str" + "s" * sees_group, "ground_truth", "extra_info", *columns]
    try:
        signature.bind(**dict.fromkeys(names), **models | kwargs)
    except TypeError as error:
        remedy = "give reward_kwargs or a reward model; adapters for others: docs/reward_functions.md"
        raise ValueError(f"{spec} cannot be called as reward functions are: {error}; {remedy}") from None
    for key in kwargs.keys() & takes:
        kind = kind_of(takes[key])
        if not fits(kwargs[key], kind):
            wanted = inspect.formatannotation(kind)
            raise ValueError(f"reward_kwargs: {key} is {kwargs[key]!r}; it must be {wanted}")
    needs_one = options.reward_model_tokenizer or "reward_model_tokenizer" in required
    if "reward_model_tokenizer" not in models or not needs_one:  # it can do without, which is quicker
        tokenizer = None
    is_async = any(map(inspect.iscoroutinefunction, (function, function.__call__)))
    return Job(f"{path}:{name}", models | kwargs, columns, tokenizer, is_async, sees_group, options.timeout)


@functools.lru_cache
def load_once(spec: str, changed_at: int):
    """The function, whose file is executed once in this process, and again when it has changed."""
    import_path = sys.path.copy()
    try:
        return load_function(spec)
    finally:
        sys.path[:] = import_path  # the driver has modules of its own to import


def kind_of(parameter: inspect.Parameter):
    """What a parameter takes: as its annotation says, or else what its default is, or None."""
    if parameter.annotation is not parameter.empty:
        return parameter.annotation
    if parameter.default is None or parameter.default is parameter.empty:
        return object
    kind = type(parameter.default)
    if kind is int:
        kind = float  # 5 stands for any number
    return kind | None


def fits(value, kind) -> bool:
    """Whether a value from JSON is of a kind, as far as can be seen: what JSON does not know fits."""
    origin = get_origin(kind)
    if origin is Literal:
        return value in get_args(kind)
    if origin in (Union, UnionType):
        return any(fits(value, one) for one in get_args(kind))
    if kind is float:
        return type(value) in (int, float)
    if (origin or kind) in (bool, int, str, list, dict, NoneType):
        return type(value) is (origin or kind)
    return True


@dataclasses.dataclass(eq=False)
class Ticket:
    """One call on its way: of one sample, or of a group."""
    payload: bytes
    waiting: dict[Future, float]  # of each sample; its penalty for length
    lost: int = 0  # times that it got no result: its worker or grading process died, or Ray lost the call
    tries: int = 0  # failed HTTP tries


@dataclasses.dataclass(eq=False)
class Slot:
    """One worker, which Ray restarts when it dies, on another node if need be."""
    worker: object
    life: str  # another one after a restart
    ready: bool = True
    pending: dict[int, Ticket] = dataclasses.field(default_factory=dict)  # by the number of their hand-over


class RewardLoopManager:
    """Scores samples on `options.num_workers` Ray workers. Safe to use from any thread and any event loop.

    ValueError for an option that makes no sense, before anything starts; RuntimeError where no worker starts.
    reward_models: cluster.placement.RewardModelManager, the started models of options.genrm.
    overlong: length of a response -> its penalty (<= 0); samples then need `response_length` in tokens.
    """

    def __init__(self, options: RewardOptions, *, reward_models=None, overlong=None):
        running = reward_models.router_addresses if reward_models else {}
        self.job = options.check_rewards(running)
        self.options, self.reward_models, self.overlong = options, reward_models, overlong
        addresses = running or named("router_address", options.router_address)
        self._main_router = next(iter(addresses.values()), None)
        self.max_in_flight = options.max_in_flight or (IN_FLIGHT_PER_SERVER if addresses else 2048)
        self._slots = self._start_workers(addresses.items())
        self._queue, self._open = collections.deque(), set()  # from any thread; futures without a result
        self._closed = None  # the reason, once closed
        self._loop = asyncio.new_event_loop()  # everything below belongs to its thread
        self._wake, self._wake_is_due = asyncio.Event(), False  # there may be samples to deal out
        self._ending, self._said, self._numbers = False, set(), itertools.count()
        self._thread = threading.Thread(target=self._loop.run_until_complete, args=[self._run()], daemon=True)
        self._thread.start()
        atexit.register(self.shutdown)

    def _start_workers(self, addresses) -> list[Slot]:
        """Returns when they have loaded the function."""
        connect_ray()
        import ray
        self._ray = ray
        machines = {node["NodeManagerAddress"] for node in ray.nodes() if node["Alive"]}
        for name, address in addresses:
            if len(machines) > 1 and re.match(r"127\.|localhost:|\[::1\]", address):
                raise ValueError(f"the reward model {name} is at {address}, which workers on other nodes "
                                 "cannot reach; start it with --host 0.0.0.0 and a key")  # fmt: skip
        processes = int(ray.cluster_resources().get("CPU", 1)) // self.options.num_workers
        job = dataclasses.replace(self.job, sync_processes=self.options.sync_processes or max(1, processes))
        ray.cloudpickle.register_pickle_by_value(reward_worker)  # a worker's Python may have no path to it
        spread = dict(num_cpus=0.01, scheduling_strategy="SPREAD", concurrency_groups={"collect": 2})
        actor = ray.remote(max_restarts=-1, **spread)(reward_worker.RewardLoopWorker)
        key = os.environ.get("ROUTER_API_KEY", "").strip()  # which a cluster of another shell does not have
        workers = [actor.remote(job, key) for _ in range(self.options.num_workers)]
        calls = [worker.begin.options(max_task_retries=-1).remote() for worker in workers]
        try:
            return list(map(Slot, workers, ray.get(calls, timeout=START_S + WEDGED_S)))
        except (ray.exceptions.GetTimeoutError, ray.exceptions.RayActorError) as error:
            raise start_error(error) from None

    # ---- for callers, in their own threads
    def submit(self, sample: dict) -> Future:
        """Takes a row of the schema plus `response` [, `response_length`, `step`] -> its result's future."""
        return self.submit_group([sample])[0]

    def submit_group(self, samples: list[dict]) -> list[Future]:
        """Takes all samples of a prompt. A function that sees groups is called once, another one for each."""
        if not self.job.sees_group and len(samples) > 1:
            return [self.submit(sample) for sample in samples]
        try:
            row, responses = samples[0], "solution_str" + "s" * self.job.sees_group
            if self.job.sees_group:  # what differs within a group is a list, the rest is the first one's
                differ = {"response", "response_length"} & row.keys()
                row = row | {key: [sample[key] for sample in samples] for key in differ}
            arguments = {key: row[key] for key, needed in self.job.columns.items() if needed or key in row}
            step = {"step": row["step"]} if "step" in row else {}
            arguments |= {"data_source": row["data_source"], responses: row["response"],
                          "ground_truth": row["reward_model"]["ground_truth"],
                          "extra_info": (row.get("extra_info") or {}) | step}  # fmt: skip
            penalties = [self.overlong(s["response_length"]) if self.overlong else 0.0 for s in samples]
        except KeyError as error:
            raise ValueError(f"the sample has no {error}; it must be a row plus `response`") from None
        waiting = {Future(): penalty for penalty in penalties}
        for future in waiting:
            self._open.add(future)
            future.add_done_callback(self._open.discard)
        if self._closed:  # asked only now: whoever closes either sees these futures or is seen here
            raise RuntimeError(self._closed)
        self._put(Ticket(pickle.dumps(arguments, protocol=5), waiting))
        return list(waiting)

    async def score_one(self, sample: dict) -> dict:
        """`submit` for coroutines, of any event loop."""
        return await asyncio.wrap_future(self.submit(sample))

    def score_batch(self, samples: list[dict], on_result=None) -> list[dict]:
        """Scores samples, in the groups of `by_group` if the function sees those, the reward models being
        awake only meanwhile -> results in their order, with equal keys (with_equal_keys).
        on_result(index, result) is called as each result arrives; what it raises ends the batch."""
        from tqdm import tqdm
        if self.reward_models:
            self.reward_models.wake_up()
        futures = {}
        try:
            for group in by_group(samples) if self.job.sees_group else [[i] for i in range(len(samples))]:
                futures |= zip(self.submit_group([samples[index] for index in group]), group)
            look = dict(unit="sample", delay=3, leave=False, disable=None)
            for future in tqdm(as_completed(futures), "scoring", len(futures), **look):
                result = future.result()
                if on_result:
                    on_result(futures[future], result)
        finally:
            for future in futures:
                future.cancel()  # in a batch that ended early: those not yet handed out never will be
            if self.reward_models:
                self.reward_models.sleep()
        return with_equal_keys([future.result() for future in sorted(futures, key=futures.get)])

    def shutdown(self) -> None:
        """Ends the workers; samples on their way raise RuntimeError. Twice is allowed."""
        atexit.unregister(self.shutdown)
        if self._thread.is_alive():
            self._ending = True
            self._thread.join()

    def _put(self, ticket: Ticket) -> None:
        self._queue.append(ticket)
        if not self._wake_is_due:  # one wake-up of the loop's thread for many samples
            self._wake_is_due = True
            self._loop.call_soon_threadsafe(self._wake.set)

    # ---- in the loop's thread
    async def _run(self) -> None:
        """Runs until `shutdown`, or until something fails: nobody shall wait for what will never come."""
        try:
            async with asyncio.TaskGroup() as self._tasks:
                for work in (self._deal_out(), self._follow_servers(), *map(self._serve, self._slots)):
                    self._tasks.create_task(work)
                while self._ray.is_initialized() and not self._ending:  # without Ray no answer comes
                    await asyncio.sleep(0.1)
                raise RuntimeError("the reward loop was shut down: start another one")
        except ExceptionGroup as errors:
            error = errors.exceptions[0]
            self._closed = str(error) if type(error) is RuntimeError else f"reward loop: {describe(error)}"
        if not self._ray.is_initialized():
            self._closed = "Ray was shut down while the reward loop was in use: start another one"
        for future in list(self._open):
            with contextlib.suppress(InvalidStateError):
                future.set_exception(RuntimeError(self._closed))
        for slot in self._slots:
            with contextlib.suppress(self._ray.exceptions.RayError, ValueError):  # it went with its Ray
                self._ray.kill(slot.worker)

    async def _deal_out(self) -> None:
        """Deals waiting samples out to the least busy workers, as far as the limits allow."""
        options, next_call = self.options, 0.0
        per_minute = min(options.max_rpm or math.inf, (options.max_tpm or math.inf) / options.tokens_per_call)
        while await self._wake.wait():
            self._wake.clear()
            self._wake_is_due = False  # first: a sample from now on wakes this again
            ready = [slot for slot in self._slots if slot.ready]
            free = self.max_in_flight - sum(len(slot.pending) for slot in self._slots)
            outgoing, pause = collections.defaultdict(list), 0.0
            while self._queue and ready and free > 0 and (pause := next_call - time.monotonic()) <= 0:
                ticket = self._queue.popleft()
                if all(future.done() for future in ticket.waiting):  # its caller has gone
                    continue
                next_call = max(next_call, time.monotonic()) + 60 / per_minute
                slot, number = min(ready, key=lambda slot: len(slot.pending)), next(self._numbers)
                slot.pending[number] = ticket
                outgoing[slot].append((number, ticket.lost >= ALONE_AFTER, ticket.payload))
                free -= 1
            for slot, batch in outgoing.items():
                self._tasks.create_task(self._hand_over(slot, batch))
            if pause > 0:
                await asyncio.sleep(pause)
                self._wake.set()

    async def _hand_over(self, slot: Slot, batch: list[tuple[int, bool, bytes]]) -> None:
        try:
            await slot.worker.submit.remote(batch)
        except self._ray.exceptions.RayActorError:  # it has died, or Ray lost the call
            slot.ready = False  # until it answers again
            self._lose(slot, [number for number, *_ in batch])

    async def _serve(self, slot: Slot) -> None:
        """Takes the results of one worker as long as the manager lives; sees that it has died or hangs."""
        arrived = []
        while True:
            call = slot.worker.collect.options(concurrency_group="collect").remote(arrived)
            try:
                patience = WEDGED_S + (self.job.timeout if slot.ready else START_S)
                life, results, place, stuck = await asyncio.wait_for(call, patience)
            except TimeoutError:
                life, results, place, stuck = "", {}, "an unknown place, with all threads", True
            except self._ray.exceptions.ActorUnavailableError:  # Ray restarts it, or has lost the call
                slot.ready = False
                await asyncio.sleep(0.1)
                continue
            except self._ray.exceptions.RayActorError as error:
                raise start_error(error) from None
            arrived = list(results)
            for number in arrived:
                if ticket := slot.pending.pop(number, None):  # else the hand-over was thought lost
                    self._finish(ticket, *results[number])
            if place:
                self._say(f"an async function blocks the event loop of its worker at {place}, where nothing "
                          "is scored meanwhile: `await` what waits, or write `def`")  # fmt: skip
            if stuck:
                self._ray.kill(slot.worker, no_restart=False)
            if stuck or slot.life != life:
                self._lose(slot, list(slot.pending), ALONE_AFTER if stuck else 1)
            slot.life, slot.ready = life, not stuck
            self._wake.set()

    def _lose(self, slot: Slot, numbers: list[int], losses: int = 1) -> None:
        """No result will come for these."""
        for number in reversed(numbers):
            if ticket := slot.pending.pop(number, None):
                self._try_again(ticket, losses, GIVE_UP_AFTER, "the reward worker died with this sample")

    def _try_again(self, ticket: Ticket, losses: int, limit: int, complaint: str) -> None:
        ticket.lost += losses
        if ticket.lost > limit:
            return self._finish(ticket, failure("error", f"{complaint}, {ticket.lost} times"), 0.0)
        self._queue.appendleft(ticket)
        self._wake.set()

    def _finish(self, ticket: Ticket, result: bytes, seconds: float) -> None:
        try:
            outcomes, retry_after = json.loads(result, parse_constant=lambda _: None)  # NaN: null
        except (ValueError, RecursionError) as error:  # an integer of 5,000 digits, 1,000 brackets
            outcomes, retry_after = json.loads(failure("error", f"the result cannot be read: {describe(error)}"))
        if outcomes[0][2] == "lost":  # with its grading process, where it was alone
            return self._try_again(ticket, 1, ALONE_AFTER, outcomes[0][1]["error"])
        if retry_after is not None and ticket.tries < self.options.http_retries:
            pause = max(retry_after, min(2**ticket.tries, 10) * random.uniform(0.75, 1.25))
            ticket.tries += 1
            self._loop.call_later(pause, self._put, ticket)
            return
        outcomes *= len(ticket.waiting) // len(outcomes)  # a failure is that of the whole group
        for (future, penalty), (score, extra, status) in zip(ticket.waiting.items(), outcomes):
            if status in ("error", "timeout"):
                self._say(f"a sample got no score ({status}): {extra['error']}")
            extra = extra | ({"overlong_penalty": penalty, "overlong": penalty < 0} if self.overlong else {})
            reward = None if score is None else score + penalty
            values = dict(reward_score=reward, reward_extra_info=extra, status=status, seconds=seconds)
            with contextlib.suppress(InvalidStateError):  # cancelled: its caller has gone
                future.set_result(values)

    def _say(self, text: str) -> None:
        """Warns, once with the same words and not for ever."""
        if text not in self._said and len(self._said) < 10:
            self._said.add(text)
            log.warning(text)

    async def _follow_servers(self) -> None:
        """Keeps `max_in_flight` in step with the servers of the main router: a slow judge is not overdue."""
        if self.options.max_in_flight or not self._main_router:
            return
        import aiohttp
        count, limit = 1, aiohttp.ClientTimeout(total=10)  # 1: an address that is no router of ours
        async with aiohttp.ClientSession(headers=bearer(), timeout=limit) as session:
            while True:
                with contextlib.suppress(aiohttp.ClientError, OSError, ValueError, LookupError, TypeError):
                    async with session.get(f"http://{self._main_router}/workers") as response:
                        count = len((await response.json())["workers"])
                self.max_in_flight = IN_FLIGHT_PER_SERVER * max(1, count)
                self._wake.set()
                await asyncio.sleep(30)


def start_error(error: Exception) -> RuntimeError:
    """What Ray's page of text about an actor that cannot be started ends with."""
    return RuntimeError(f"a reward worker cannot be started: {str(error).strip().splitlines()[-1]}")


def by_group(samples: list[dict]) -> list[list[int]]:
    """Their numbers, group by group: of one prompt, source and truth, and of one column `group`."""
    groups = collections.defaultdict(list)
    for number, sample in enumerate(samples):
        key = [sample.get(name) for name in ("group", "prompt", "data_source", "reward_model")]
        if key[:2] == [None, None]:
            raise ValueError(f"row {number} has no `group` and no `prompt`, which say whose group it is of")
        groups[json.dumps(key, default=str)].append(number)
    return list(groups.values())


def with_equal_keys(results: list[dict]) -> list[dict]:
    """The same results with the union of all extra-info keys in each; what a sample lacks is None."""
    empty = {key: None for result in results for key in result["reward_extra_info"]}
    return [result | {"reward_extra_info": empty | result["reward_extra_info"]} for result in results]


def needed_verdict(result: dict) -> bool:
    """False for a sample with a score where no judge was asked, or only where a wrong answer went wrong."""
    info = result["reward_extra_info"]
    needless = info.get("genrm_status") and (info["genrm_status"] == "skipped" or info.get("acc") is False)
    return result["reward_score"] is None or not needless


def no_verdict_rate(results: list[dict]) -> float:
    """Share of samples without a score among those that needed a verdict; 0.0 where none needed one."""
    missing = sum(result["reward_score"] is None for result in results)
    return missing / max(sum(map(needed_verdict, results)), 1)


def connect_ray() -> bool:
    """Joins the Ray of RAY_ADDRESS or of this machine, or starts one: True. RuntimeError if refused."""
    import ray
    if ray.is_initialized():
        return False
    file = Path(os.environ.get("RAY_TMPDIR", "/tmp"), "ray/ray_current_cluster")
    address = os.environ.get("RAY_ADDRESS") or "auto"
    if found := address == "auto":
        address = file.read_text().strip() if file.exists() else "local"
    try:
        if re.fullmatch(r"[\w.-]+:\d+", address):
            try:  # Ray itself would try for minutes
                socket.create_connection(address.split(":"), timeout=2 if found else 5).close()
            except OSError as error:
                if not found:
                    raise
                print(f"Ray: nobody answers at {address}, which {file} names ({error})", flush=True)
                address = "local"
        ray.init(address, include_dashboard=False, log_to_driver=False, logging_level=logging.ERROR)
    except Exception as error:  # another version of Ray or Python, another key: some with a page of text
        text = f"Ray: the cluster {address} cannot be joined ({describe(error):.300})"
        raise RuntimeError(" ".join(text.split()) + "; RAY_ADDRESS=local starts one of your own") from error
    joined = f"joined the cluster at {address}; RAY_ADDRESS=local starts one of your own"
    have, where = ray.cluster_resources(), "started a cluster for this run" if address == "local" else joined
    print(f"Ray: {where} ({have.get('CPU', 0):g} CPUs, {have.get('GPU', 0):g} GPUs)", flush=True)
    return address == "local"


def start_rewards(options: RewardOptions, stack, places=None, *, sleep_mode=False, overlong=None):
    """A RewardLoopManager and its models, until `stack` (contextlib.ExitStack) ends. places: the models', a
    cluster.placement.Places; default: their own. sleep_mode: they sleep between batches."""
    options.check_rewards()
    if connect_ray():
        stack.callback(sys.modules["ray"].shutdown)
    models = None
    if options.genrm:
        from cluster import placement
        models = placement.RewardModelManager(options.server_configs(sleep_mode), places)
        stack.callback(models.shutdown)
    manager = RewardLoopManager(options, reward_models=models, overlong=overlong)
    stack.callback(manager.shutdown)
    return manager
