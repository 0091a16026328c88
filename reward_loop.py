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
manager ends one that is silent. What was lost is tried again, soon alone, and given up in the end.
Left out: several drivers sharing one limit; cancelling a sample that was handed to a worker; grading in a
container (a grading process has your rights). Function and folder need the same path on all nodes. Needs
reward_worker.py; for models of its own genrm_server.py and cluster/; by default compute_score.py.
"""

import asyncio
import atexit
import collections
import contextlib
import dataclasses
import http.client
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
import sysconfig
import threading
import time
from concurrent.futures import Future, InvalidStateError, as_completed
from importlib.machinery import ModuleSpec
from pathlib import Path
from typing import Annotated, Literal

from tyro.conf import arg

import reward_worker
from reward_worker import ALONE_AFTER, HERE, START_S, Job, describe, failure, fingerprints, load_function

STATUSES = ("ok", "no_verdict", "timeout", "error")
IN_FLIGHT_PER_SERVER = 128  # what a vLLM server works on without making single requests slow
BLOCKED_S = 5.0  # a worker silent for so long is worth a warning
WEDGED_S = 20.0  # ... and for timeout + this it is taken for dead
GIVE_UP_AFTER = 5  # a sample that was lost more often has the status "error"
BLOCKED = "a reward worker is silent: an async function that blocks must `await`, or be written with `def`"
STDLIB = sysconfig.get_paths()["stdlib"]
FURTHER_COLUMNS = {"prompt", "response_length", "step", "turns"}  # of a row: if a function names them

os.environ.setdefault("RAY_ENABLE_AUTO_CONNECT", "0")  # else a call after shutdown starts a cluster
log = logging.getLogger("reward_loop")


@dataclasses.dataclass(kw_only=True)
class RewardOptions:
    """How samples are scored: flags of every command line that scores, whose configuration inherits them."""

    # Reward function FILE:NAME; default: the outcome rule, or the score of a discriminative model.
    reward_fn: str | None = None
    # JSON object of arguments for every call of --reward-fn, such as '{"penalty": 0.5}'.
    reward_kwargs: str = "{}"
    # Address host:port of a reward model that is running; several: NAME=host:port each.
    router_address: tuple[str, ...] = ()
    # Reward model to start: a folder or hub name; several: NAME=PATH each, the main one first.
    genrm: tuple[str, ...] = ()
    genrm_servers: int = 1  # Number of vLLM servers per --genrm model.
    genrm_tensor_parallel: int = 1  # Number of GPUs per vLLM server of --genrm.
    genrm_gpu_share: float = 1.0  # Fraction of a GPU, and of its memory, for each vLLM server of --genrm.
    # CPU cores for the vLLM servers of --genrm, such as 0,1; default: all cores, divided evenly.
    genrm_cpus: str = ""
    # Arguments for the vLLM servers of --genrm: --genrm-vllm-args="--max-num-seqs 64".
    genrm_vllm_args: str = ""
    # Task of the reward models: one for all models, or one for each.
    reward_model_task: tuple[Literal["generate", "classify"], ...] = ("generate",)
    # Tokenizer folder for reward functions that need one; default: the tokenizer of --genrm.
    reward_model_tokenizer: str | None = None
    # Number of Ray workers that score samples; 0: one per node, and at least two.
    num_workers: Annotated[int, arg(aliases=["--num-reward-workers"])] = 0
    # Number of grading processes per worker for a reward function without async; 0: by CPU cores.
    sync_processes: int = 0
    # Seconds that a call of --reward-fn may take; after that the sample has the status "timeout".
    timeout: Annotated[float, arg(aliases=["--reward-timeout"])] = 600.0
    # Concurrent calls in the cluster; default: 128 per server of the main reward model, else 2048.
    max_in_flight: int | None = None
    # Calls of --reward-fn per minute in the whole cluster, evenly paced; default: no limit.
    max_rpm: float | None = None
    # Number of retries of a call that raised a broken connection or HTTP 408, 429 or 5xx.
    http_retries: int = 6
    # Stop if more than this fraction of the samples that need a verdict have none.
    max_no_verdict_rate: float = 0.2

    # Of the numbers, which may otherwise be 0. No fields: they have no type.
    above_0 = ("genrm_servers", "genrm_tensor_parallel", "genrm_gpu_share", "timeout", "max_in_flight",
               "max_rpm")  # fmt: skip
    of_any_sign = ()

    def check_rewards(self, started: dict[str, str] | None = None) -> Job:
        """What workers need to know; ValueError with field, value, remedy. started: {model: address}."""
        models = named("genrm", self.genrm)
        addresses = named("router_address", self.router_address)
        for name, value in vars(self).items():
            if name.startswith("genrm_") and not models and value not in (1, ""):
                raise ValueError(f"{name} is {value!r}: about the servers of genrm; give genrm")
            if not isinstance(value, (int, float)) or name in self.of_any_sign:
                continue
            if name in self.above_0 and not value > 0:
                raise ValueError(f"{name}: {value} must be above 0")
            if not value >= 0:
                raise ValueError(f"{name}: {value} must be at least 0")
        if models and addresses:
            raise ValueError("genrm starts a reward model, router_address names a running one: give one")
        for address in addresses.values():
            if not re.fullmatch(r"[^/]+:\d+", address):
                raise ValueError(f"router_address is {address!r}: it must be host:port or NAME=host:port")
        if len(self.reward_model_task) not in (1, len(models or addresses)):
            raise ValueError(f"reward_model_task is {self.reward_model_task}: give one, or one for each")
        for config in self.server_configs().values():
            config.check()
        return plan_call(self, started or addresses or dict.fromkeys(models, "host:0"))

    def server_configs(self, sleep_mode: bool = False) -> dict:
        """{name: genrm_server.Config} of the reward models to start."""
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
            )
        return configs


def named(field: str, values: tuple[str, ...]) -> dict[str, str]:
    """("a:1", "rm=b:2") -> {"genrm": "a:1", "rm": "b:2"}."""
    found = {}
    for value in values:
        name, text = re.fullmatch(r"(?:([A-Za-z_][\w-]*)=)?(.*)", value, re.DOTALL).groups("genrm")
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


def json_object(field: str, text: str) -> dict:
    """ValueError naming the field where the text is no JSON object."""
    try:
        return dict(**json.loads(text))  # refuses a list, which dict() alone might take
    except (TypeError, ValueError):
        raise ValueError(f"{field}: {text!r} is not JSON, or no JSON object") from None


def plan_call(options: RewardOptions, addresses: dict[str, str]) -> Job:
    """How samples will be scored with these reward models. ValueError where the function does not fit."""
    tokenizer = options.reward_model_tokenizer
    if options.genrm and not tokenizer:
        tokenizer = next(iter(named("genrm", options.genrm).values()))
    spec = options.reward_fn
    if not spec:
        spec = f"{HERE}/compute_score.py:compute_score"
        if options.reward_model_task[0] == "classify":
            spec += "_discriminative"
            if not tokenizer:
                raise ValueError("a discriminative reward model needs reward_model_tokenizer (a path)")
        elif addresses:
            raise ValueError("a generative reward model needs a function that asks it: give reward_fn")
    path, name = file_and_name("reward_fn", spec)
    files = fingerprints(str(path))
    with modules_of_the_user(path.parent):
        function = load_function(f"{path}:{name}")
    signature = inspect.signature(function)
    takes = signature.parameters
    required = {key for key, parameter in takes.items() if parameter.default is parameter.empty}
    settings = json_object("reward_kwargs", options.reward_kwargs)

    models = {}
    if addresses:
        models = {"reward_router_address": next(iter(addresses.values())), "reward_model_tokenizer": None}
        if not any(parameter.kind is parameter.VAR_KEYWORD for parameter in takes.values()):  # **settings
            models = {key: value for key, value in models.items() if key in takes}
        if "reward_router_addresses" in takes:
            models["reward_router_addresses"] = addresses
    is_needed = options.reward_model_tokenizer or "reward_model_tokenizer" in required
    if "reward_model_tokenizer" not in models or not is_needed:  # to do without is quicker
        tokenizer = None
    columns = {key: key in required for key in FURTHER_COLUMNS & takes.keys() - settings}

    sees_group = "solution_strs" in takes
    names = ["data_source", "ground_truth", "extra_info", *columns]
    names.append("solution_strs" if sees_group else "solution_str")
    try:
        signature.bind(**dict.fromkeys(names), **models | settings)
    except TypeError as error:
        remedy = "give reward_kwargs or a reward model; adapters for others: docs/reward_functions.md"
        raise ValueError(f"{spec} cannot be called as reward functions are: {error}; {remedy}") from None
    return Job(
        function=f"{path}:{name}",
        kwargs=models | settings,
        columns=columns,
        tokenizer=tokenizer,
        is_async=inspect.iscoroutinefunction(function),
        sees_group=sees_group,
        timeout=options.timeout,
        files=files,
    )


def file_and_name(field: str, spec: str) -> tuple[Path, str]:
    """The parts of FILE:NAME. ValueError naming the field if there is no such file."""
    file, _, name = spec.rpartition(":")
    path = Path(file).expanduser().resolve()
    if not name or path.suffix != ".py" or not path.is_file():
        raise ValueError(f"{field} is {spec!r}: there is no file {path}; it must be FILE:NAME, a .py")
    return path, name


def load_in_this_process(field: str, spec: str):
    """A function of the user that this process will call. What it imports later is found beside it, too."""
    path, name = file_and_name(field, spec)
    with modules_of_the_user(path.parent):
        function = load_function(f"{path}:{name}", field)
        theirs = {module: sys.modules[module] for module in local_modules(path.parent)}
    for module, loaded in theirs.items():
        sys.modules.setdefault(module, loaded)  # ours stay where both have one of this name
    if str(path.parent) not in sys.path:
        sys.path.append(str(path.parent))
    return function


@contextlib.contextmanager
def modules_of_the_user(folder: Path):
    """Hides our modules inside this block, and removes the user's after it: both may have a policy.py."""
    import_path = sys.path.copy()
    before = sys.modules.copy()
    for name in local_modules(HERE):
        del sys.modules[name]
    try:
        yield
    finally:
        for name in local_modules(HERE, folder):
            del sys.modules[name]
        for name in before.keys() - sys.modules.keys():
            sys.modules[name] = before[name]
        sys.path[:] = import_path


def local_modules(*folders: Path) -> list[str]:
    """Names of the loaded modules in these folders, without Python's own and installed ones."""
    names = []
    for name, module in sys.modules.copy().items():
        spec = getattr(module, "__spec__", None)
        if name == "__main__" or not isinstance(spec, ModuleSpec):
            continue
        places = [spec.origin, *(spec.submodule_search_locations or [])]
        file = Path(next((place for place in places if place), "/"))
        if "site-packages" in file.parts or file.is_relative_to(STDLIB):
            continue
        if any(file.is_relative_to(folder) for folder in folders):
            names.append(name)
    return names


@dataclasses.dataclass(eq=False)
class Ticket:
    """One call of the function on its way: for one sample, or for a group."""
    payload: bytes
    lengths: dict[Future, int | None]  # each sample's result to come, and the tokens of its response
    lost: int = 0  # times that it got no result: its worker or grading process died, or Ray lost the call
    tries: int = 0  # failed HTTP tries


@dataclasses.dataclass(eq=False)
class Worker:
    """One worker, which Ray restarts when it dies, on another node if need be."""
    actor: object
    life: str  # another one after a restart
    ready: bool = True
    pending: dict[int, Ticket] = dataclasses.field(default_factory=dict)  # by the number of their hand-over


class RewardLoopManager:
    """Scores samples on `options.num_workers` Ray workers. Safe to use from any thread and any event loop.

    num_workers 0: one on each node, but two where there is one node.

    ValueError for an option that makes no sense, before anything starts; RuntimeError where no worker starts.
    reward_models: cluster.placement.RewardModelManager, the started models of options.genrm.
    overlong: length of a response -> its penalty (<= 0); samples then need `response_length` in tokens.
    """

    def __init__(self, options: RewardOptions, *, reward_models=None, overlong=None):
        addresses = named("router_address", options.router_address)
        if reward_models:
            addresses = reward_models.router_addresses
        self.job = options.check_rewards(addresses)
        self.options = options
        self.reward_models = reward_models
        self.overlong = overlong
        # Of the router: a cluster of another shell does not have it. A secret's file may end with a newline.
        self._key = os.environ.get("ROUTER_API_KEY", "").strip()
        self.max_in_flight = options.max_in_flight or 2048
        if addresses and not options.max_in_flight:
            address = next(iter(addresses.values()))
            self.max_in_flight = IN_FLIGHT_PER_SERVER * count_servers(address, self._key)
        self._workers = self._start_workers(addresses)
        self._queue = collections.deque()  # tickets to deal out, from any thread
        self._open = set()  # tickets without a result
        self._closed = None  # the reason, once closed
        self._ending = False
        self._loop = asyncio.new_event_loop()  # what follows belongs to its thread
        self._wake = asyncio.Event()  # there may be samples to deal out
        self._numbers = itertools.count()
        self._said = set()
        self._thread = threading.Thread(target=self._loop.run_until_complete, args=[self._run()], daemon=True)
        self._thread.start()
        atexit.register(self.shutdown)

    def _start_workers(self, addresses: dict[str, str]) -> list[Worker]:
        """Returns when they have loaded the function."""
        connect_ray()
        import ray
        self._ray = ray
        nodes = [node["NodeManagerAddress"] for node in ray.nodes() if node["Alive"]]
        for address in addresses.values():
            if len(set(nodes)) > 1 and re.match(r"127\.|localhost:|\[::1\]", address):
                raise ValueError(f"--router-address {address}: workers on other nodes cannot reach it; start "
                                 "the router with --host 0.0.0.0 and a key")  # fmt: skip
        num_workers = self.options.num_workers or max(2, len(nodes))
        processes = self.options.sync_processes
        if not processes:
            processes = max(1, int(ray.cluster_resources().get("CPU", 1)) // num_workers)
            if addresses:
                processes *= 4  # most of them wait for the judge
        job = dataclasses.replace(self.job, sync_processes=processes)
        ray.cloudpickle.register_pickle_by_value(reward_worker)  # a worker's Python may have no path to it
        where = dict(num_cpus=0.01, scheduling_strategy="SPREAD", max_restarts=-1)
        actor = ray.remote(**where)(reward_worker.RewardLoopWorker)
        actors = [actor.remote(job, self._key) for _ in range(num_workers)]
        lives = [actor.begin.options(max_task_retries=-1).remote() for actor in actors]
        try:
            lives = ray.get(lives, timeout=START_S + WEDGED_S)
        except (ray.exceptions.GetTimeoutError, ray.exceptions.RayActorError) as error:
            raise start_error(error) from None
        return list(map(Worker, actors, lives))

    # ---- for callers, in their own threads
    def submit(self, sample: dict) -> Future:
        """Takes a row of the schema plus `response` [, `response_length`, `step`] -> its result's future."""
        return self.submit_group([sample])[0]

    def submit_group(self, samples: list[dict]) -> list[Future]:
        """Takes all samples of a prompt. A function that sees groups is called once, another one for each."""
        if not self.job.sees_group and len(samples) > 1:
            return [self.submit(sample) for sample in samples]
        row, lengths = samples[0], {}
        try:
            info = dict(row.get("extra_info") or {})
            if "step" in row:
                info["step"] = row["step"]
            info.setdefault("num_turns", row.get("num_turns", 2))  # verl sets both for every sample
            info.setdefault("rollout_reward_scores", {})
            arguments = {
                "data_source": row["data_source"],
                "ground_truth": row["reward_model"]["ground_truth"],
                "extra_info": info,
            }
            for key, is_needed in self.job.columns.items():
                if is_needed or key in row:
                    arguments[key] = row[key]
            if self.job.sees_group:  # what differs within a group is a list, the rest is the first one's
                arguments["solution_strs"] = [sample["response"] for sample in samples]
                for key in {"response_length", "turns"} & arguments.keys():
                    arguments[key] = [sample[key] for sample in samples]
            else:
                arguments["solution_str"] = row["response"]
            for sample in samples:
                lengths[Future()] = sample["response_length"] if self.overlong else None
        except KeyError as error:
            raise ValueError(f"the sample has no {error}; it must be a row plus `response`") from None
        ticket = Ticket(pickle.dumps(arguments, protocol=5), lengths)
        self._open.add(ticket)
        if self._closed:  # asked only now: whoever closes either sees this ticket or is seen here
            raise RuntimeError(self._closed)
        self._put(ticket)
        return list(lengths)

    async def score_one(self, sample: dict) -> dict:
        """`submit` for coroutines, of any event loop."""
        return await asyncio.wrap_future(self.submit(sample))

    def score_batch(self, samples: list[dict], on_result=None) -> list[dict]:
        """Scores samples, in the groups of `by_group` if the function sees those, the reward models being
        awake only meanwhile -> results in their order.
        on_result(index, result) is called as each result arrives; what it raises ends the batch."""
        from tqdm import tqdm
        groups = [[index] for index in range(len(samples))]
        if self.job.sees_group:
            groups = by_group(samples)
        if self.reward_models:
            self.reward_models.wake_up()
        places = {}  # future -> index of its sample
        try:
            for group in groups:
                futures = self.submit_group([samples[index] for index in group])
                places.update(zip(futures, group))
            bar = tqdm(as_completed(places), "scoring", len(places), delay=3, leave=False, disable=None)
            for future in bar:
                result = future.result()
                if on_result:
                    on_result(places[future], result)
        finally:
            for future in places:
                future.cancel()  # in a batch that ended early: those not yet handed out never will be
            if self.reward_models:
                self.reward_models.sleep()
        return [future.result() for future in sorted(places, key=places.get)]

    def shutdown(self):
        """Ends the workers; samples on their way raise RuntimeError. Twice is allowed."""
        atexit.unregister(self.shutdown)
        if self._thread.is_alive():
            self._ending = True
            self._thread.join()

    def _put(self, ticket):
        self._queue.append(ticket)
        self._loop.call_soon_threadsafe(self._wake.set)

    # ---- in the loop's thread
    async def _run(self):
        """Runs until `shutdown`, or until something fails: nobody shall wait for what will never come."""
        try:
            async with asyncio.TaskGroup() as self._tasks:
                for work in (self._deal_out(), *map(self._serve, self._workers)):
                    self._tasks.create_task(work)
                while self._ray.is_initialized() and not self._ending:  # without Ray no answer comes
                    await asyncio.sleep(0.1)
                raise RuntimeError("the reward loop was shut down: start another one")
        except ExceptionGroup as errors:
            reason = errors.exceptions[0]
        self._closed = str(reason) if type(reason) is RuntimeError else f"reward loop: {describe(reason)}"
        if not self._ray.is_initialized():
            self._closed = "Ray was shut down while the reward loop was in use: start another one"
        for ticket in list(self._open):
            for future in ticket.lengths:
                with contextlib.suppress(InvalidStateError):  # cancelled, or it has its result
                    future.set_exception(RuntimeError(self._closed))
        for worker in self._workers:
            if self._ray.is_initialized():  # else they went with it, and this would start another Ray
                with contextlib.suppress(self._ray.exceptions.RayError):  # it has ended
                    self._ray.kill(worker.actor)

    async def _deal_out(self):
        """Deals waiting samples out to the least busy workers, as far as the limits allow."""
        seconds_a_call = 60 / (self.options.max_rpm or math.inf)
        next_call = 0.0
        while await self._wake.wait():
            self._wake.clear()  # first: a sample from now on wakes this again
            if not self._ray.is_initialized():
                break
            ready = [worker for worker in self._workers if worker.ready]
            free = self.max_in_flight - sum(len(worker.pending) for worker in self._workers)
            outgoing = collections.defaultdict(dict)
            while self._queue and ready and free > 0:
                now = time.monotonic()
                if now < next_call:
                    self._loop.call_later(next_call - now, self._wake.set)
                    break
                ticket = self._queue.popleft()
                if all(future.done() for future in ticket.lengths):  # its caller has gone
                    self._open.discard(ticket)
                    continue
                next_call = now + seconds_a_call
                worker = min(ready, key=lambda worker: len(worker.pending))
                number = next(self._numbers)
                worker.pending[number] = ticket
                outgoing[worker][number] = ticket.lost >= ALONE_AFTER, ticket.payload
                free -= 1
            for worker, batch in outgoing.items():
                self._tasks.create_task(self._hand_over(worker, batch))

    async def _hand_over(self, worker, batch: dict[int, tuple[bool, bytes]]):
        try:
            await worker.actor.submit.remote(batch)
        except self._ray.exceptions.RayActorError:  # it has died, or Ray lost the call
            worker.ready = False  # until it answers again
            self._lose(worker, list(batch))

    async def _serve(self, worker):
        """Takes the results of one worker as long as the manager lives; sees that it has died or hangs."""
        arrived = []
        while self._ray.is_initialized():  # else a call would start another Ray
            if worker.ready:
                silence, patience = BLOCKED_S, self.job.timeout + WEDGED_S
            else:
                silence = patience = START_S + WEDGED_S
            warning = self._loop.call_later(silence, self._say, BLOCKED)
            try:
                async with asyncio.timeout(patience):  # wait_for may lose the end of the loop in Python 3.11
                    life, results = await worker.actor.collect.remote(arrived)
            except TimeoutError:
                self._ray.kill(worker.actor, no_restart=False)
                worker.ready = False
                self._lose(worker, list(worker.pending), ALONE_AFTER)
                continue
            except self._ray.exceptions.ActorUnavailableError:  # Ray restarts it, or has lost the call
                worker.ready = False
                await asyncio.sleep(0.1)
                continue
            except self._ray.exceptions.RayActorError as error:
                raise start_error(error) from None
            finally:
                warning.cancel()
            arrived = list(results)
            for number, (result, seconds) in results.items():
                if result is None:
                    self._lose(worker, [number])
                elif number in worker.pending:  # else the hand-over was thought lost
                    self._finish(worker.pending.pop(number), result, seconds)
            if worker.life != life:
                self._lose(worker, list(worker.pending))
            worker.life = life
            worker.ready = True
            self._wake.set()

    def _lose(self, worker, numbers: list[int], losses: int = 1):
        """No result will come for these: they are tried again, but not for ever."""
        for number in reversed(numbers):
            ticket = worker.pending.pop(number, None)
            if not ticket:
                continue
            ticket.lost += losses
            if ticket.lost > GIVE_UP_AFTER:
                message = f"no result, {ticket.lost} times: its grading process or worker died or hung"
                self._finish(ticket, failure("error", message), 0.0)
            else:
                self._queue.appendleft(ticket)
                self._wake.set()

    def _finish(self, ticket, result: bytes, seconds: float):
        try:
            outcomes, try_again = json.loads(result, parse_constant=lambda _: None)  # NaN: null
        except (ValueError, RecursionError) as error:  # an integer of 5,000 digits, 1,000 brackets
            result = failure("error", f"the result cannot be read: {describe(error)}")
            outcomes, try_again = json.loads(result)
        if try_again and ticket.tries < self.options.http_retries:
            pause = min(2**ticket.tries, 60) * random.uniform(0.75, 1.25)
            self._loop.call_later(pause, self._put, ticket)
            ticket.tries += 1
            return
        self._open.discard(ticket)
        if len(outcomes) < len(ticket.lengths):  # a failure is that of the whole group
            outcomes = outcomes * len(ticket.lengths)
        for (future, length), (score, extra, status) in zip(ticket.lengths.items(), outcomes):
            if status in ("error", "timeout"):
                self._say(f"a sample got no score ({status}): {extra['error']}")
            reward = score
            extra = dict(extra)  # a failure is one dict for all
            if self.overlong:
                penalty = self.overlong(length)
                extra |= {"overlong_penalty": penalty, "overlong": penalty < 0}
                if score is not None:
                    reward = score + penalty
            values = {
                "reward_score": reward,
                "reward_extra_info": extra,
                "status": status,
                "seconds": seconds,
            }
            with contextlib.suppress(InvalidStateError):  # cancelled: its caller has gone
                future.set_result(values)

    def _say(self, text: str):
        """Warns, once with the same words and not for ever."""
        if text not in self._said and len(self._said) < 10:
            self._said.add(text)
            log.warning(text)


def count_servers(address: str, key: str) -> int:
    """How many servers are behind a router of ours; 1 where the address is none, or nobody answers yet."""
    connection = http.client.HTTPConnection(address, timeout=10)
    try:
        connection.request("GET", "/workers", headers={"Authorization": f"Bearer {key}"})
        return max(1, len(json.load(connection.getresponse())["workers"]))
    except OSError as error:
        log.warning("router_address: nobody answers at %s yet (%s); samples will wait for it", address, error)
        return 1
    except (http.client.HTTPException, ValueError, LookupError, TypeError):
        return 1
    finally:
        connection.close()


def start_error(error: Exception) -> RuntimeError:
    """What Ray's page of text about an actor that cannot be started ends with."""
    return RuntimeError(f"a reward worker cannot be started: {str(error).strip().splitlines()[-1]}")


def by_group(samples: list[dict]) -> list[list[int]]:
    """Their numbers, group by group: of one prompt, source and truth, and of one column `group` if any."""
    groups = collections.defaultdict(list)
    for number, sample in enumerate(samples):
        key = [sample["prompt"], sample["data_source"], sample["reward_model"], sample.get("group")]
        groups[json.dumps(key, default=str)].append(number)
    return list(groups.values())


def connect_ray() -> bool:
    """Joins the Ray of RAY_ADDRESS or of this machine, or starts one: True. RuntimeError if refused."""
    import ray
    if ray.is_initialized():
        return False
    from ray._private import services
    address = os.environ.get("RAY_ADDRESS")
    if not address:
        address = services.find_bootstrap_address(None)  # of the last `ray start`
        if address not in services.find_gcs_addresses():  # it has ended: Ray itself would try for minutes
            address = "local"
    try:
        ray.init(address, include_dashboard=False, log_to_driver=False, logging_level=logging.ERROR)
    except Exception as error:  # another version of Ray or Python, another key: some with a page of text
        text = f"Ray: the cluster {address} cannot be joined ({describe(error):.300})"
        raise RuntimeError(" ".join(text.split()) + "; RAY_ADDRESS=local starts one of your own") from error
    where = f"joined the cluster at {address}; RAY_ADDRESS=local starts one of your own"
    if address == "local":
        where = "started a cluster for this run"
    have = ray.cluster_resources()
    logs = os.path.join(ray._private.worker._global_node.get_session_dir_path(), "logs", "worker-*")
    print(f"Ray: {where} ({have.get('CPU', 0):g} CPUs, {have.get('GPU', 0):g} GPUs); what reward functions "
          f"print goes to {logs}", flush=True)  # fmt: skip
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
