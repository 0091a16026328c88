"""Reward Loop: scores each sample on the workers of a Ray cluster as soon as its rollout finishes.

You write one function (`FILE:NAME`, sync or async; see docs/reward_functions.md), and the loop calls it:

    options = RewardOptions(reward_fn="compute_score.py:compute_score_fapo", genrm=("PATH",))
    with contextlib.ExitStack() as stack:
        manager = start_rewards(options, stack)
        future = manager.submit(sample)           # does not block; thread-safe
        result = await manager.score_one(sample)  # the same for coroutines
        results = manager.score_batch(samples)    # blocks; sleeping reward models wake up for the batch
        futures = manager.submit_group(samples)   # all samples of a prompt, for functions that score groups

A result is {"reward_score": float | None, "reward_extra_info": dict, "status": "ok" | "no_verdict" |
"timeout" | "error", "seconds": float}. A failure is a status, never a number: if the function raises, hangs,
returns NaN or kills its process, its sample gets `reward_score: None`, and other samples are unaffected.

RewardLoopManager runs in the driver. Its thread with an event loop sends each call to the least busy worker
(reward_worker.py, a Ray actor) and enforces all limits for the whole cluster. Each worker has one `collect`
call in progress, which returns new results. Ray restarts workers that die, and the manager kills workers that
do not respond. A lost call is repeated (in a separate process after two losses); it fails after six losses.
The function's folder must have the same path on all nodes. Not covered: one limit for several drivers,
cancelling a sample that a worker already has, grading in a container (grading has your permissions).
Needs reward_worker.py and command_line.py; also genrm_server.py and cluster/ to start reward models,
genrm_server.py to ask running ones for their names, and compute_score.py for the default function.
"""

import asyncio
import atexit
import collections
import contextlib
import dataclasses
import inspect
import itertools
import json
import logging
import math
import os
import pickle
import random
import re
import signal
import threading
import time
from concurrent.futures import Future, InvalidStateError, as_completed
from pathlib import Path
from typing import Annotated, Literal

from tyro.conf import arg

import reward_worker
from command_line import check_unused, json_object, named, split_arguments
from reward_worker import (
    HERE,
    ISOLATE_AFTER,
    START_S,
    Job,
    error_line,
    failure,
    file_and_name,
    fingerprints,
    flag,
    load_function,
    modules_of_the_user,
    sha256,
)

STATUSES = ("ok", "no_verdict", "timeout", "error")
IN_FLIGHT_PER_SERVER = 128  # A vLLM server with a whole GPU handles this many calls at a time.
WORKER_CPUS = 0.01  # Not 0, because nodes without CPUs in Ray must not get workers.
NO_CPU = "the Ray cluster has no free CPU; end other programs, start fewer servers, or add nodes"
BLOCKED_S = 5.0  # After this time without a response from a worker, the manager logs a warning.
WEDGED_S = 20.0  # After the timeout plus this time without a response, the manager kills the worker.
GIVE_UP_AFTER = 5  # A call that is lost more than this many times gets the status "error".
OVERLOADED = (
    "a reward worker does not respond: the machine seems to be overloaded; end other programs, or pass "
    "--sync-processes 1"
)
BLOCKED = (
    "a reward worker does not respond: its async reward function blocks the event loop, or the machine is "
    "overloaded; await long operations, or define the function with `def`"
)
FURTHER_COLUMNS = {"prompt", "response_length", "step", "turns"}  # only for functions that name them

log = logging.getLogger("reward_loop")


# ---- options


@dataclasses.dataclass(kw_only=True)
class RewardOptions:
    """Options for scoring samples, which the configurations of the trainer and of score_file.py inherit."""

    # Reward function, as FILE:NAME. Default: the outcome reward (compute_score.py:compute_score), or the
    # score of a discriminative reward model.
    reward_fn: str | None = None
    # Arguments for every call of --reward-fn, as a JSON object such as '{"penalty": 0.5}'.
    reward_kwargs: str = "{}"
    # Address host:port of a running reward model. For several models, pass NAME=host:port for each.
    router_address: tuple[str, ...] = ()
    # Reward model to start: a folder or a Hub name. Several models: NAME=PATH for each, main model first.
    genrm: tuple[str, ...] = ()
    genrm_servers: int = 1  # Number of vLLM servers per --genrm model.
    genrm_tensor_parallel: int = 1  # Number of GPUs per vLLM server of --genrm.
    genrm_gpu_share: float = 1.0  # Fraction of a GPU, and of its memory, for each vLLM server of --genrm.
    # CPU cores for the vLLM servers of --genrm, such as 0,1; default: all cores, divided evenly.
    genrm_cpus: str = ""
    # Arguments for the vLLM servers of --genrm, such as --genrm-vllm-args="--max-num-seqs 64".
    genrm_vllm_args: str = ""
    # Task of the reward models: one task for all models, or one for each model.
    reward_model_task: tuple[Literal["generate", "classify"], ...] = ("generate",)
    # Tokenizer (a folder or a Hub name) for functions that need one; default: the tokenizer of --genrm.
    reward_model_tokenizer: str | None = None
    # Number of Ray workers that score samples; 0: one per node, but at least two.
    num_workers: Annotated[int, arg(name="num-reward-workers", aliases=["--num-workers"])] = 0
    # Number of grading processes per worker if --reward-fn is not async. 0: one per CPU core in the
    # cluster, or four per core with a reward model, divided among the workers.
    sync_processes: int = 0
    # Time limit of a call of --reward-fn, in seconds. A slower sample gets the status "timeout".
    timeout: Annotated[float, arg(name="reward-timeout", aliases=["--timeout"])] = 600.0
    # Maximum number of concurrent calls. Default: 2048, or 128 per server of the main reward model.
    max_in_flight: int | None = None
    # Maximum number of calls of --reward-fn per minute, evenly spaced. Default: no limit.
    max_rpm: float | None = None
    # Number of retries of a --reward-fn call that failed with a broken connection or HTTP 408, 429 or 5xx.
    http_retries: int = 6
    # Stop if more than this fraction of the samples that need a verdict did not get one.
    max_no_verdict_rate: float = 0.2

    # Other numeric options must be at least 0. These attributes have no type, so they are not options.
    must_be_positive = (
        "genrm_servers",
        "genrm_tensor_parallel",
        "genrm_gpu_share",
        "timeout",
        "max_in_flight",
        "max_rpm",
    )
    may_be_negative = ()
    may_be_infinite = ("timeout",)  # limits that inf turns off

    def make_job(self, started: dict[str, str] | None = None) -> Job:
        """Check the options and return the Job that the workers need.

        `started` is {name: address} of reward models that are already running. Raises ValueError if an option
        is invalid.
        """
        models = named("genrm", self.genrm)
        addresses = named("router_address", self.router_address)
        if not models:
            check_unused(self, [name for name in vars(self) if name.startswith("genrm_")], "--genrm")
        if not (models or addresses or started):
            needed = "a reward model (--genrm or --router-address)"
            check_unused(self, ("reward_model_task", "reward_model_tokenizer"), needed)
        for name, value in vars(self).items():
            if not isinstance(value, (int, float)):
                continue
            if not math.isfinite(value) and name not in self.may_be_infinite:
                raise ValueError(f"{flag(name)} {value}: must be a finite number")
            if name in self.may_be_negative:
                continue
            if name in self.must_be_positive and not value > 0:
                raise ValueError(f"{flag(name)} {value}: must be above 0")
            if not value >= 0:
                raise ValueError(f"{flag(name)} {value}: must be at least 0")
        if models and addresses:
            raise ValueError("--genrm cannot be combined with --router-address; pass only one of them")
        for address in addresses.values():
            check_address(address, "host:port or NAME=host:port, without a user")
        if models or addresses:
            router_key()
        if len(self.reward_model_task) not in (1, len(models or addresses)):
            tasks = " ".join(self.reward_model_task)
            raise ValueError(f"--reward-model-task {tasks}: pass one task, or one per reward model")
        for config in self.server_configs().values():
            config.check()
        return plan_call(self, started or addresses or dict.fromkeys(models, "host:0"))

    def scored_by(self, job: Job) -> dict:
        """Return what decides the scores (reward function and reward models) in values that JSON keeps.

        `job` is the result of make_job. A name or a path says nothing about the content, so "files" and
        "models" describe the files. A model whose server does not respond is None.
        """
        settings = json_object("reward_kwargs", self.reward_kwargs)
        models = served_models(named("router_address", self.router_address), chosen_models(settings))
        for name, path in named("genrm", self.genrm).items():
            models[name] = f"{path} {folder_digest(path)}"
        tokenizer = self.reward_model_tokenizer or ""
        return {
            "reward_fn": job.function.rpartition(":")[2],
            "files": sorted(job.files.values()),  # Their folder may have been moved.
            "models": models,
            # Arguments may contain keys, so files get only their digest.
            "reward_kwargs": sha256(self.reward_kwargs.encode()),
            "genrm_vllm_args": sha256(self.genrm_vllm_args.encode()),
            "reward_model_task": list(self.reward_model_task),
            "reward_model_tokenizer": f"{tokenizer} {folder_digest(tokenizer)}",
        }

    def server_configs(self, sleep_mode: bool = False) -> dict:
        """Return {name: genrm_server.Config} for the reward models to start."""
        if not self.genrm:
            return {}
        import genrm_server

        configs = {}
        tasks = itertools.cycle(self.reward_model_task)
        for (name, path), task in zip(named("genrm", self.genrm).items(), tasks):
            configs[name] = genrm_server.Config(
                path,
                task=task,
                port=0,
                num_servers=self.genrm_servers,
                tensor_parallel_size=self.genrm_tensor_parallel,
                gpu_share=self.genrm_gpu_share,
                cpus=self.genrm_cpus,
                vllm_args=split_arguments("genrm_vllm_args", self.genrm_vllm_args),
                sleep_mode=sleep_mode,
                flag_prefix="genrm-",
            )
        return configs


# ---- the manager, in the driver


def start_rewards(options: RewardOptions, stack, reservation=None, *, sleep_mode=False):
    """Start a RewardLoopManager and its reward models, which end with `stack` (a contextlib.ExitStack).

    Without a `reservation` (cluster.placement.Reservation), the RewardModelManager creates one. With
    `sleep_mode`, the reward models sleep between batches. Raises the errors of RewardLoopManager, and those
    of RewardModelManager if it starts models.
    """
    options.make_job()  # This checks the options before Ray starts.
    import ray

    if connect_ray():
        stack.callback(ray.shutdown)
    models = None
    if options.genrm:
        from cluster import placement

        servers = len(options.genrm) * options.genrm_servers
        cpus = ray.cluster_resources().get("CPU", 0)
        if cpus and servers * placement.SERVER_CPUS > cpus - WORKER_CPUS:  # Without any, nodes join later.
            raise ValueError(
                f"--genrm-servers {options.genrm_servers}: {servers} servers with {placement.SERVER_CPUS} "
                f"CPUs each leave none of the Ray cluster's {cpus:g} CPUs for the reward workers; start "
                "fewer servers"
            )
        models = placement.RewardModelManager(options.server_configs(sleep_mode), reservation)
        stack.callback(models.shutdown)
    manager = RewardLoopManager(options, reward_models=models)
    stack.callback(manager.shutdown)
    return manager


@dataclasses.dataclass(eq=False)
class ScoringCall:
    """One call of the function, for one sample or a group. The manager keeps it until a result arrives."""

    payload: bytes
    futures: list[Future]  # the future result of each sample
    times_lost: int = 0  # how often the call was lost: a process died, or Ray dropped the call
    http_tries: int = 0  # how often it failed with an HTTP error or a broken connection


@dataclasses.dataclass(eq=False)
class Worker:
    """A worker, which Ray restarts if it dies, on another node if necessary."""

    actor: object
    incarnation: str  # changes with each restart
    ready: bool = True
    pending: dict[int, ScoringCall] = dataclasses.field(default_factory=dict)  # number of the call -> call
    references: set = dataclasses.field(default_factory=set)  # to calls that are not known to have succeeded

    async def call(self, method: str, argument):
        """Call a method of the actor and return its result.

        If a reference to a call is freed while Ray shuts down, Ray ends the process. So it is kept unless the
        call succeeds while Ray is up.
        """
        import ray

        reference = getattr(self.actor, method).remote(argument)
        self.references.add(reference)
        result = await reference
        if ray.is_initialized():
            self.references.discard(reference)
        return result


class RewardLoopManager:
    """Scores samples on `options.num_workers` Ray workers. Safe to use from any thread and any event loop.

    Args:
        options: the options for scoring.
        reward_models: the cluster.placement.RewardModelManager that has started the models of options.genrm.
    Raises ValueError if an option is invalid, and RuntimeError if a worker does not start or the router
    rejects the key.
    """

    def __init__(self, options: RewardOptions, *, reward_models=None):
        addresses = named("router_address", options.router_address)
        if reward_models:
            addresses = reward_models.router_addresses
        self.job = options.make_job(addresses)
        self.options = options
        self.reward_models = reward_models
        # If another shell started Ray, workers lack ROUTER_API_KEY, so they get the key as an argument.
        self._key = router_key()
        self.max_in_flight = options.max_in_flight or 2048
        num_servers = [count_servers(address) for address in addresses.values()]  # This also checks the key.
        if num_servers and not options.max_in_flight:
            self.max_in_flight = IN_FLIGHT_PER_SERVER * num_servers[0]
        chosen = chosen_models(self.job.kwargs)
        if reward_models and any(chosen):
            served_models(addresses, chosen)  # It logs models that no server lists.
        if addresses and not reward_models:  # Models that a run starts have one name.
            self.job.models = models_to_ask(addresses, self.job)
            first = self.job.models.get(next(iter(addresses.values())))
            if first and self.job.kwargs.get("genrm_model", "") is None:
                self.job.kwargs["genrm_model"] = first["id"]
        if addresses and not {"reward_router_address", "reward_router_addresses"} & self.job.kwargs.keys():
            log.warning(
                "--reward-fn %s: does not take reward_router_address, so it asks no reward model",
                options.reward_fn,
            )
        self._warnings = set()
        self._workers = self._start_workers(addresses)
        self._queue = collections.deque()  # calls to dispatch; any thread may add to it
        self._unfinished = set()  # calls that have no result yet
        self._closed = None  # why the manager has closed; None while it runs
        self._ending = False
        self._loop = asyncio.new_event_loop()  # Only the loop's thread uses the attributes below.
        self._wake = asyncio.Event()  # set when there may be calls to dispatch
        self._numbers = itertools.count()
        self._thread = threading.Thread(target=self._loop.run_until_complete, args=[self._run()], daemon=True)
        self._thread.start()
        atexit.register(self.shutdown)

    def _start_workers(self, addresses: dict[str, str]) -> list[Worker]:
        """Start the workers and wait until they have loaded the function."""
        connect_ray()
        import ray

        nodes = [node["NodeManagerAddress"] for node in ray.nodes() if node["Alive"]]
        for address in addresses.values():
            if len(set(nodes)) > 1 and re.match(r"127\.|localhost:|\[::1\]", address):
                raise ValueError(
                    f"--router-address {address}: workers on other nodes cannot reach it; start "
                    "the router with --host 0.0.0.0 and a key, and pass its network address, "
                    "such as 10.0.0.2:30000"
                )
        num_workers = self.options.num_workers or max(2, len(nodes))
        processes = self.options.sync_processes
        if not processes:
            processes = max(1, int(ray.cluster_resources().get("CPU", 1)) // num_workers)
            if addresses:
                processes *= 4  # Most grading processes wait for the judge.
        self.job.sync_processes = processes
        ray.cloudpickle.register_pickle_by_value(reward_worker)  # Workers may not be able to import it.
        where = dict(num_cpus=WORKER_CPUS, scheduling_strategy="SPREAD", max_restarts=-1)
        actor = ray.remote(**where)(reward_worker.RewardLoopWorker)
        actors = [actor.remote(self.job, self._key) for _ in range(num_workers)]
        return list(map(Worker, actors, self._incarnations(actors)))

    def _incarnations(self, actors) -> list[str]:
        """Wait until the workers have loaded the function, and return their incarnations."""
        import ray

        calls = [actor.begin.options(max_task_retries=-1).remote() for actor in actors]
        deadline = time.monotonic() + START_S + WEDGED_S
        while True:
            try:
                return ray.get(calls, timeout=5.0)
            except ray.exceptions.GetTimeoutError as error:
                cause = error
                if ray.available_resources().get("CPU", 0) < WORKER_CPUS:
                    self._warn_once(f"reward workers wait: {NO_CPU}")
                    cause = NO_CPU
                kills = memory_kills()
                if kills:  # Ray would restart these workers forever.
                    cause = kills[-1]
                if len(kills) > GIVE_UP_AFTER or time.monotonic() > deadline:
                    raise start_error(cause) from None
            except ray.exceptions.RayActorError as error:
                raise start_error(error) from None

    # ---- Called in the threads of callers
    def submit(self, sample: dict) -> Future:
        """Accept a sample (a row plus `response`) and return the future of its result.

        Raises ValueError if the row lacks a column, and RuntimeError if the loop has ended.
        """
        return self._submit_call([sample])[0]

    def submit_group(self, samples: list[dict]) -> list[Future]:
        """Accept all samples of one prompt and return the futures of their results.

        A function with `solution_strs` is called once for the group, any other function once per sample. If a
        response is not a text, the function is not called, and the call fails.
        """
        if self.job.sees_group:
            return self._submit_call(samples)
        return [self.submit(sample) for sample in samples]

    def _submit_call(self, samples: list[dict]) -> list[Future]:
        """Queue one call of the function, for a sample or for a group."""
        try:
            arguments = arguments_of(self.job, samples)
        except KeyError as error:
            raise ValueError(f"the row has no column {error}; add the column (see docs/data.md)") from None
        call = ScoringCall(pickle.dumps(arguments, protocol=5), [Future() for _ in samples])
        self._unfinished.add(call)
        if self._closed:  # An earlier check could miss a manager that is closing.
            raise RuntimeError(self._closed)
        unreadable = [sample["response"] for sample in samples if text_of(sample["response"]) is None]
        if unreadable:
            message = f"column response: {unreadable[0]!r:.80} is not a text; pass one string per row"
            self._loop.call_soon_threadsafe(self._finish, call, failure("error", message), 0.0)
        else:
            self._enqueue(call)
        return call.futures

    async def score_one(self, sample: dict) -> dict:
        """Score one sample. Any event loop can run this coroutine."""
        return await asyncio.wrap_future(self.submit(sample))

    def score_batch(self, samples: list[dict], on_result=None) -> list[dict]:
        """Score samples and return the results in the same order.

        Sleeping reward models wake up for this call only; after Ctrl-C, they stay awake. A function with
        `solution_strs` gets the groups of `by_group`. on_result(index, result) is called as soon as a result
        arrives; its errors end the batch.
        """
        from tqdm import tqdm

        groups = [[index] for index in range(len(samples))]
        if self.job.sees_group:
            groups = by_group(samples)
        models = self.reward_models
        if models:
            models.wake_up()
        indices = {}  # future -> index of its sample
        try:
            for group in groups:
                futures = self.submit_group([samples[index] for index in group])
                indices.update(zip(futures, group))
            bar = tqdm(as_completed(indices), "scoring", len(indices), delay=3, leave=False, disable=None)
            for future in bar:
                result = future.result()
                if on_result:
                    on_result(indices[future], result)
        except KeyboardInterrupt:
            models = None  # Their sleep would wait for the calls in progress.
            raise
        finally:
            for future in indices:
                future.cancel()  # If the batch ended early, the remaining calls must not be sent.
            if models:
                models.sleep()
        return [future.result() for future in sorted(indices, key=indices.get)]

    def shutdown(self):
        """End the workers. Futures of unfinished samples raise RuntimeError. A second call does nothing."""
        import ray

        atexit.unregister(self.shutdown)
        self._ending = True
        self._thread.join()
        if ray.is_initialized():
            for worker in self._workers:
                worker.references.clear()

    def _enqueue(self, call):
        self._queue.append(call)
        self._loop.call_soon_threadsafe(self._wake.set)

    # ---- Called in the loop's thread
    async def _run(self):
        """Run until `shutdown` or an error, then fail unfinished calls so that their callers do not hang."""
        import ray

        try:
            async with asyncio.TaskGroup() as self._tasks:
                for work in (self._dispatch(), *map(self._collect_from, self._workers)):
                    self._tasks.create_task(work)
                while ray.is_initialized() and not self._ending:  # Without Ray, results never arrive.
                    if self.reward_models:
                        self.reward_models.check()
                    await asyncio.sleep(0.1)
                raise RuntimeError("the reward loop was shut down; start a new one")
        except ExceptionGroup as errors:
            reason = errors.exceptions[0]
        self._closed = f"the reward loop failed: {error_line(reason)}"
        if type(reason) is RuntimeError:
            self._closed = str(reason)
        if not ray.is_initialized():
            self._closed = "Ray was shut down while the reward loop was in use; start a new reward loop"
        for call in list(self._unfinished):
            for future in call.futures:
                with contextlib.suppress(InvalidStateError):  # The future may be cancelled or finished.
                    future.set_exception(RuntimeError(self._closed))
        for worker in self._workers:
            with contextlib.suppress(ray.exceptions.RayError):  # The worker or Ray may have ended.
                ray.kill(worker.actor)

    async def _dispatch(self):
        """Send queued calls to the least busy workers as the limits allow."""
        seconds_per_call = 60 / (self.options.max_rpm or math.inf)
        next_call = 0.0
        while await self._wake.wait():
            self._wake.clear()  # This comes first because calls that are added later set the event again.
            ready = [worker for worker in self._workers if worker.ready]
            free = self.max_in_flight - sum(len(worker.pending) for worker in self._workers)
            outgoing = collections.defaultdict(dict)
            while self._queue and ready and free > 0:
                now = time.monotonic()
                if now < next_call:
                    self._loop.call_later(next_call - now, self._wake.set)
                    break
                call = self._queue.popleft()
                if all(future.done() for future in call.futures):  # The caller cancelled the call.
                    self._unfinished.discard(call)
                    continue
                next_call = now + seconds_per_call
                worker = min(ready, key=lambda worker: len(worker.pending))
                number = next(self._numbers)
                worker.pending[number] = call
                outgoing[worker][number] = call.times_lost >= ISOLATE_AFTER, call.payload
                free -= 1
            for worker, batch in outgoing.items():
                self._tasks.create_task(self._send(worker, batch))

    async def _send(self, worker, batch: dict[int, tuple[bool, bytes]]):
        import ray

        try:
            await worker.call("submit", batch)
        except (ray.exceptions.RayActorError, ray.exceptions.TaskCancelledError):
            # The worker died, or the call was lost.
            worker.ready = False  # _collect_from sets this to True when the worker responds again.
            self._requeue(worker, batch)

    async def _collect_from(self, worker):
        """Receive the results of one worker, and detect whether the worker dies or hangs."""
        import ray

        arrived = []
        while True:
            if worker.ready:
                warn_after_s, timeout_s = BLOCKED_S, self.job.timeout + WEDGED_S
            else:
                warn_after_s = timeout_s = START_S + WEDGED_S
            reason = BLOCKED if self.job.is_async else OVERLOADED
            warning = self._loop.call_later(warn_after_s, self._warn_once, reason)
            try:
                async with asyncio.timeout(timeout_s):  # In Python 3.11, wait_for may ignore a cancellation.
                    incarnation, results = await worker.call("collect", arrived)
            except TimeoutError:
                ray.kill(worker.actor, no_restart=False)
                worker.ready = False
                self._requeue(worker, worker.pending, ISOLATE_AFTER)
                continue
            except (ray.exceptions.ActorUnavailableError, ray.exceptions.TaskCancelledError):
                # The worker restarts, Ray lost the call, or the function has cancelled all tasks.
                worker.ready = False
                await asyncio.sleep(0.1)
                continue
            except ray.exceptions.RayActorError as error:
                raise start_error(error) from None
            finally:
                warning.cancel()
            arrived = list(results)
            for number, (result, seconds) in results.items():
                if result is None:
                    self._requeue(worker, [number])
                elif number in worker.pending:  # Otherwise the call was considered lost and was repeated.
                    self._finish(worker.pending.pop(number), result, seconds)
            if worker.incarnation != incarnation:  # The worker has restarted and lost its calls.
                self._requeue(worker, worker.pending)
                for complaint in memory_kills()[-1:]:
                    self._warn_once(f"a reward worker was restarted: {complaint}")
            worker.incarnation = incarnation
            worker.ready = True
            self._wake.set()

    def _requeue(self, worker, numbers, times: int = 1):
        """Queue lost calls again. A call that was lost too often gets the status "error"."""
        for number in reversed(list(numbers)):
            call = worker.pending.pop(number, None)
            if not call:
                continue
            call.times_lost += times
            if call.times_lost > GIVE_UP_AFTER:
                message = f"no result: the grading process or the worker died or hung {call.times_lost} times"
                self._finish(call, failure("error", message), 0.0)
            else:
                self._queue.appendleft(call)
                self._wake.set()

    def _finish(self, call, result: bytes, seconds: float):
        """Set the result of each sample of the call, or retry the call."""
        try:
            outcomes, try_again = json.loads(result, parse_constant=lambda _: None)  # NaN becomes None.
        except (ValueError, RecursionError) as error:  # e.g. an integer of 5,000 digits
            result = failure("error", f"the result cannot be parsed: {error_line(error)}")
            outcomes, try_again = json.loads(result)
        if try_again and call.http_tries < self.options.http_retries:
            pause = min(2**call.http_tries, 60) * random.uniform(0.75, 1.25)
            self._loop.call_later(pause, self._enqueue, call)
            call.http_tries += 1
            return
        self._unfinished.discard(call)
        outcomes = itertools.cycle(outcomes)  # A failed call has one outcome for all samples.
        for future, (score, extra, status) in zip(call.futures, outcomes):
            if status in ("error", "timeout") and len(self._warnings) < 10:  # Each sample's error may differ.
                self._warn_once(f"a sample got no score ({status}): {extra['error']}")
            values = {
                "reward_score": score,
                "reward_extra_info": dict(extra),  # The samples of a failed group share one dict.
                "status": status,
                "seconds": seconds,
            }
            with contextlib.suppress(InvalidStateError):  # The caller may have cancelled the future.
                future.set_result(values)

    def _warn_once(self, text: str):
        """Log a warning once."""
        if text not in self._warnings:
            self._warnings.add(text)
            log.warning(text)


# ---- planning a call: the function and its arguments


def plan_call(options: RewardOptions, addresses: dict[str, str]) -> Job:
    """Load the reward function and select its arguments. Raise ValueError if it does not accept them."""
    tokenizer = options.reward_model_tokenizer
    if tokenizer and not Path(tokenizer).is_dir() and not re.fullmatch(r"[\w-][^/]*(/[^/]+)?", tokenizer):
        raise ValueError(
            f"--reward-model-tokenizer {tokenizer}: must be a folder with a tokenizer, or a Hub name"
        )
    if options.genrm and not tokenizer:
        tokenizer = next(iter(named("genrm", options.genrm).values()))
    spec = options.reward_fn or default_function(options, bool(addresses), tokenizer)
    path, name = file_and_name("reward_fn", spec)
    files = fingerprints(str(path))
    with modules_of_the_user(path.parent):
        function = load_function(f"{path}:{name}")
    signature = inspect.signature(function)
    takes = signature.parameters
    required = {key for key, parameter in takes.items() if parameter.default is parameter.empty}

    settings = json_object("reward_kwargs", options.reward_kwargs)
    models = model_arguments(takes, addresses)
    columns = {key: key in required for key in FURTHER_COLUMNS & (takes.keys() - settings)}
    sees_group = "solution_strs" in takes
    names = ["data_source", "ground_truth", "extra_info", *columns]
    names.append("solution_strs" if sees_group else "solution_str")
    try:
        signature.bind(**dict.fromkeys(names), **models | settings)
    except TypeError as error:
        raise ValueError(
            f"--reward-fn {spec}: cannot be called as a reward function ({error}); pass "
            "or correct --reward-kwargs, pass a reward model, or write an adapter (see "
            "docs/reward_functions.md)"
        ) from None
    # Loading a tokenizer takes seconds. Our functions have an optional one only because verl passes it.
    file = getattr(inspect.unwrap(function), "__globals__", {}).get("__file__")
    wanted = required if file == f"{HERE}/compute_score.py" else takes
    needs_tokenizer = options.reward_model_tokenizer or "reward_model_tokenizer" in wanted
    # A function with `check_row` is written for this loop, so it passes unknown settings on to our functions.
    takes_genrm_model = "genrm_model" in models or takes_any(takes) and hasattr(function, "check_row")
    if "reward_model_tokenizer" not in models or not needs_tokenizer:
        tokenizer = None
    elif tokenizer and Path(tokenizer).is_dir():
        tokenizer = str(Path(tokenizer).absolute())  # Workers may have another working directory.
    return Job(
        function=f"{path}:{name}",
        kwargs=models | settings,
        columns=columns,
        tokenizer=tokenizer,
        is_async=inspect.iscoroutinefunction(function),
        sees_group=sees_group,
        takes_genrm_model=takes_genrm_model,
        timeout=options.timeout,
        files=files,
    )


def default_function(options: RewardOptions, has_model: bool, tokenizer: str | None) -> str:
    """Return the reward function of a run without --reward-fn. Raise ValueError if there is none."""
    function = f"{HERE}/compute_score.py:compute_score"
    if options.reward_model_task[0] == "classify":
        if not tokenizer:
            raise ValueError(
                "--reward-model-task classify: the reward model needs a tokenizer; pass "
                "--reward-model-tokenizer PATH"
            )
        return f"{function}_discriminative"
    if has_model:
        raise ValueError(
            "--reward-fn: the default does not query a generative reward model; pass a "
            "function that does, such as compute_score.py:compute_score_fapo"
        )
    return function


def model_arguments(takes, addresses: dict[str, str]) -> dict:
    """Return the arguments about reward models, {name: address}, for a function with these parameters."""
    if not addresses:
        return {}
    offered = {"reward_router_address": next(iter(addresses.values())), "reward_model_tokenizer": None}
    arguments = {key: value for key, value in offered.items() if takes_any(takes) or key in takes}
    if "reward_router_addresses" in takes:  # It may ask several judges, which need not have the same limits.
        return arguments | {"reward_router_addresses": addresses}
    if "genrm_model" in takes and takes["genrm_model"].default is None:
        arguments["genrm_model"] = None  # RewardLoopManager fills in the name.
    return arguments


def takes_any(takes) -> bool:
    """Return whether a function with these parameters takes `**kwargs`."""
    return any(parameter.kind is parameter.VAR_KEYWORD for parameter in takes.values())


def row_checker(job: Job):
    """Return the check of rows that the function has as its attribute `check_row`. It raises ValueError."""
    file = job.function.rpartition(":")[0]
    with modules_of_the_user(Path(file).parent):
        function = load_function(job.function)
    check = getattr(function, "check_row", None)
    if check is None:
        return lambda row: None
    return lambda row: check(row, job.kwargs)


def arguments_of(job: Job, samples: list[dict]) -> dict:
    """Return the function's keyword arguments for one sample, or for all samples of a prompt (`sees_group`).

    A sample is a row plus `response`. Raises KeyError if a column is missing.
    """
    row = samples[0]
    num_turns = row.get("num_turns", 2)
    if isinstance(row.get("turns"), list):
        num_turns = 1 + len(row["turns"])  # verl counts the prompt as a turn.
    info = dict(row.get("extra_info") or {})
    info |= {"num_turns": num_turns, "rollout_reward_scores": {}}  # verl overwrites both keys.
    info |= row.get("rollout_info", {})
    if "step" in row:
        info["step"] = row["step"]
    arguments = {
        "data_source": row["data_source"],
        "ground_truth": row["reward_model"]["ground_truth"],
        "extra_info": info,
    }
    for key, is_needed in job.columns.items():
        if is_needed or key in row:
            arguments[key] = row[key]
    if not job.sees_group:
        return arguments | {"solution_str": text_of(row["response"])}
    for key in {"response_length", "turns"} & arguments.keys():  # These values differ within the group.
        arguments[key] = [sample[key] for sample in samples]
    return arguments | {"solution_strs": [text_of(sample["response"]) for sample in samples]}


def text_of(response) -> str | None:
    """Return the text of a response, which may be a list with a single text or message, or None."""
    if isinstance(response, list) and len(response) == 1:
        response = response[0]
        if isinstance(response, dict):
            response = response.get("content")
    return response if isinstance(response, str) else None


def by_group(samples: list[dict]) -> list[list[int]]:
    """Group samples by prompt, data source, reward_model and `group` (if present); return their indices."""
    groups = collections.defaultdict(list)
    for number, sample in enumerate(samples):
        key = [sample["prompt"], sample["data_source"], sample["reward_model"], sample.get("group")]
        groups[json.dumps(key, default=str)].append(number)
    return list(groups.values())


# ---- which models an address lists


def check_address(address: str, form: str) -> None:
    """Raise ValueError if this is not host:port. The error asks for `form`, and shows no password."""
    if not re.fullmatch(r"[^/=@]+:\d+", address):
        shown = address.rpartition("@")[2]
        raise ValueError(f"--router-address {shown}: must be {form}")


def models_to_ask(addresses: dict[str, str], job: Job) -> dict[str, dict]:
    """Return {address: entry of its only model in /v1/models} for the judges that the function may ask.

    Requests of all workers that name no model go to these models, so that a judge cannot change during the
    run. If an address does not respond, the workers look its model up themselves. Raises ValueError if there
    are several models, the settings name none, and the function would take `genrm_model`.
    """
    settings = job.kwargs
    uses_chat = any(Path(file).name == "compute_score.py" for file in job.files)
    if settings.get("genrm_model") or not (uses_chat or job.takes_genrm_model):
        return {}
    chosen = chosen_models(settings)
    count = len(addresses) if "reward_router_addresses" in settings else 1
    models = {}
    for number, address in enumerate(list(addresses.values())[:count]):
        try:
            cards = listed_models(address)
        except (OSError, ValueError, LookupError, TypeError):
            continue
        if number and any(card["id"] in chosen for card in cards):
            continue  # The settings of this judge name its model.
        remedy = """--reward-kwargs '{"genrm_model": "NAME"}'"""
        if number:
            remedy = "genrm_model in the settings of this judge (in --reward-kwargs)"
        try:
            models[address] = only_model(cards, address, remedy)
        except ValueError:
            if job.takes_genrm_model:
                raise
    return models


def only_model(cards: list[dict], address: str, remedy: str) -> dict:
    """Return the entry of the only model in a server's list. The model may have several names.

    Raises:
        ValueError: There are several models. The remedy has one of the names in place of NAME.
    """
    if len({card.get("root") or card["id"] for card in cards}) > 1:
        names = [card["id"] for card in cards]
        remedy = remedy.replace("NAME", names[0])
        raise ValueError(
            f"--router-address {address}: the server serves several models "
            f"({', '.join(names)}); choose one with {remedy}"
        )
    return cards[0]


def served_models(addresses: dict[str, str], chosen=()) -> dict[str, str | None]:
    """Ask the server at each address for its models. Return {name: models, or None without a response}.

    If a server lists models in `chosen`, only those are returned for it. A chosen model that no server
    lists is logged. It is not rejected, because some servers accept names that they do not list. Raises
    RuntimeError if a server rejects the key.
    """
    models = {}
    listed = []
    for name, address in addresses.items():
        models[name] = None
        try:
            cards = listed_models(address)
            listed += [card["id"] for card in cards]
            cards = [card for card in cards if card["id"] in chosen] or cards
            # Models with the same id differ in their root, which may be a folder that has been overwritten.
            texts = [f"{card['id']} {card.get('root')} {folder_digest(card.get('root'))}" for card in cards]
            models[name] = ", ".join(sorted(text.strip() for text in texts))
        except RuntimeError:  # The server rejects the key.
            raise
        except Exception:  # The server does not respond or lists no models.
            pass
    for model in chosen:
        if model and model not in listed and listed and None not in models.values():
            log.warning(
                "no server lists the model %s; choose one of %s with genrm_model (evaluate_genrm: --model)",
                model,
                ", ".join(dict.fromkeys(listed)),
            )
    return models


def listed_models(address: str) -> list[dict]:
    """Return the models that the server at this address lists, by name. Raise an error if there are none."""
    cards = get_json(address, "/v1/models", timeout=60)["data"]
    if not cards:
        raise ValueError("it lists no models")
    return sorted(cards, key=lambda card: card["id"])


def chosen_models(settings: dict) -> list[str | None]:
    """Return genrm_model of the settings, and of settings for a second judge (docs/judges.py)."""
    return [one.get("genrm_model") for one in (settings, *settings.values()) if isinstance(one, dict)]


def changes_between(before, now: dict) -> list[str]:
    """Return the names of the values that have changed between two results of `scored_by`.

    Another version may have written `before`. A model that did not respond at one start counts as unchanged.
    """
    has_keys = isinstance(before, dict) and before.keys() == now.keys()
    if not has_keys or type(before.get("files")) is not type(now.get("files")):  # once with the files' names
        return ["the version of the file"]
    changed = [name for name in now if name != "models" and before[name] != now[name]]
    # The order counts: a reward function gets the address of the first model.
    names = [", ".join(one["models"]) or "none" for one in (before, now)]
    if names[0] != names[1]:
        changed.append(f"the names of the models ({names[0]}; now {names[1]})")
    for name, model in before["models"].items():
        if model and now["models"].get(name) not in (None, model):
            changed.append(f"the model {name}")
    return changed


def folder_digest(path: str | None) -> str:
    """Return a digest of the sizes and modification times of a model's files; empty without a folder."""
    if not path or not os.path.isdir(os.path.expanduser(path)):
        return ""
    from genrm_server import model_state

    return sha256(json.dumps(model_state(path)).encode())


def count_servers(address: str) -> int:
    """Return the number of servers behind the router at this address, or 1 if there is no router.

    Raises RuntimeError if the router rejects the key.
    """
    try:
        workers = get_json(address, "/workers", timeout=10)["workers"]
        reasons = []
        for worker in workers:  # Routers of other programs list their servers in other forms.
            if isinstance(worker, dict) and worker.get("why") and not worker.get("healthy"):
                reasons.append(f"{worker['url']}: {worker['why']}")
        if len(reasons) == len(workers):
            reason = "; ".join(reasons) or "there are none"
            log.warning(
                "--router-address %s: no server is healthy (%s); samples wait for one", address, reason
            )
        return max(1, len(workers))
    except OSError as error:
        log.warning("--router-address %s: no response yet (%s); samples wait for the router", address, error)
        return 1
    except (ValueError, LookupError, TypeError):
        return 1


def get_json(address: str, path: str, timeout: float):
    """Return the JSON at this address. Raise OSError or ValueError if there is none.

    Raises RuntimeError if the router rejects the key.
    """
    from genrm_server import request

    status, text = request("GET", address + path, api_key=router_key(), timeout=timeout)
    if not status:
        raise OSError(text)
    if status == 401:
        raise WrongKey(
            f"--router-address {address}: wrong or missing key; set ROUTER_API_KEY to the router's key, or, "
            "if the router forwards to an API, start it with the API's key in ROUTER_SERVER_KEY"
        )
    if status != 200:
        raise ValueError(f"status {status}: {text:.200}")
    return json.loads(text)


class WrongKey(RuntimeError):
    """The router rejects the key."""

    exit_code = 2  # The key is an input.


def router_key() -> str:
    """Return the key for the router. If it accepts several, the environment variable ends with the newest.

    Raises ValueError if the key contains white space or is not ASCII.
    """
    key = os.environ.get("ROUTER_API_KEY", "").strip(", \n").rpartition(",")[2].strip()
    if re.search(r"[^!-~]", key):  # An HTTP library would show the key in its error.
        problem = "a key contains white space or a non-ASCII character; separate keys with commas"
        raise ValueError(f"ROUTER_API_KEY: {problem}")
    return key


# ---- joining or starting Ray


def connect_ray() -> bool:
    """Join the Ray cluster of RAY_ADDRESS or of this user, or start one. Return whether it started one."""
    import psutil
    import ray
    from ray._private import auto_init_hook, services
    from ray.job_config import JobConfig

    # A call after Ray's shutdown then raises an error, whereas by default, it would start another cluster.
    auto_init_hook.enable_auto_connect = False
    if ray.is_initialized():
        return False
    address = os.environ.get("RAY_ADDRESS")
    if not address:
        address = services.find_bootstrap_address(None)  # the cluster of the last `ray start`
        # Joining an ended cluster would take minutes. In the cluster of another user, reward functions would
        # run as that user, with the keys of this run.
        for process in psutil.process_iter(["cmdline", "uids"]):
            name, *arguments = process.info["cmdline"] or [""]
            is_of_cluster = "raylet" in name and f"--gcs-address={address}" in arguments
            if is_of_cluster and process.info["uids"].real == os.getuid():
                break
        else:
            address = "local"
    # With this variable, which scripts of other programs set, all actors would use the first GPU.
    os.environ.pop("RAY_EXPERIMENTAL_NOSET_CUDA_VISIBLE_DEVICES", None)
    # Otherwise, actors would import files of the working directory, such as another policy.py, before ours.
    config = JobConfig(_client_job=True, _py_driver_sys_path=[os.getcwd(), str(HERE)])
    # The processes of Ray inherit the blocked signal, and outlive the terminal until the run is saved.
    before = signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGHUP])
    try:
        ray.init(
            address,
            job_config=config,
            include_dashboard=False,
            log_to_driver=False,
            logging_level=logging.ERROR,
        )
    except Exception as error:
        raise RuntimeError(ray_failure(address, error_line(error))) from error
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)  # A signal that has arrived takes effect now.
        with contextlib.suppress(OSError):  # Ray writes this file unless the environment has a token.
            os.chmod(os.path.expanduser("~/.ray/auth_token"), 0o600)  # Ray lets all users read it.
    where = f"joined the cluster at {address} (set RAY_ADDRESS=local for a private cluster)"
    if address == "local":
        where = "started a cluster for this run"
    have = ray.cluster_resources()
    logs = os.path.join(ray._private.worker._global_node.get_session_dir_path(), "logs", "worker-*")
    print(
        f"Ray: {where}, with {have.get('CPU', 0):g} CPUs and {have.get('GPU', 0):g} GPUs; the output of "
        f"reward functions is in {logs}"
    )
    return address == "local"


def ray_failure(address: str, error: str) -> str:
    """Return why Ray could not be used at this address and what to do, in one line."""
    error = " ".join(error.replace(r"\n", " ").split())
    if "AF_UNIX path length" in error:  # Batch systems set TMPDIR to a long path.
        problem = "its folder for temporary files has a path that is too long for sockets"
        remedy = "set RAY_TMPDIR to a short path, such as /tmp (by default, Ray uses TMPDIR)"
    elif "/.ray'" in error:  # Containers may run as a user without a home.
        problem = "it cannot write to ~/.ray"
        remedy = "set HOME to a writable folder"
    elif address == "local" and "timed out during startup" in error:
        problem = "it did not start within its time limit of 30 s"
        remedy = "the machine is probably busy: start again when it has a free CPU core"
    elif address == "local":
        problem = "it cannot start a cluster on this machine"
        remedy = "see the logs in /tmp/ray/session_latest/logs (or in RAY_TMPDIR or TMPDIR)"
    else:  # The version of Ray or Python, or the key, may differ.
        problem = f"cannot join the cluster at {address}"
        remedy = "set RAY_ADDRESS=local to start a private cluster"
    return f"Ray: {problem} ({error:.300}); {remedy}"


def start_error(error: Exception | str) -> RuntimeError:
    """Return an error with the last line of Ray's long message about a worker that cannot start."""
    return RuntimeError(f"a reward worker cannot be started: {str(error).strip().splitlines()[-1]}")


def memory_kills() -> list[str]:
    """Return one complaint about each process of this program that Ray's memory monitor has killed."""
    import ray

    complaints = []
    with contextlib.suppress(AttributeError, ImportError):  # Other versions of Ray may store this elsewhere.
        from ray.core.generated import common_pb2, gcs_pb2

        job = ray.get_runtime_context().get_job_id()
        for row in ray._private.state.state._connect_and_get_accessor().get_worker_table():
            process = gcs_pb2.WorkerTableData.FromString(row)
            if process.exit_type == common_pb2.NODE_OUT_OF_MEMORY and process.job_id.hex() == job:
                report = re.sub(r", ID: \w+", "", process.exit_detail.partition("\n")[0])
                complaints.append(
                    f"out of memory. Ray reports: {report}; end other programs, or pass "
                    "--num-workers 1 --sync-processes 1"
                )
    return complaints
