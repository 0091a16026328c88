"""Rollouts that you write: several turns, tools and environments (--rollout-fn FILE:NAME).

    async def with_calculator(trajectory):              # in a file of yours
        async for said in trajectory.calls("?"):        # the policy's text up to "65+9=?"
            trajectory.observe(calculate(said))         # "74": tokens that the policy did not write

The trainer calls the function once for each sample, for all samples of a step at the same time. Token in,
token out: what the policy wrote is never encoded or rendered again, and history is only added to. Tokens that
the policy did not write take no part in the loss. A function that raises an error or takes too long costs
its own sample, which then has a failure and no reward. docs/rollouts.md has the rules and four examples.

The functions run in one event loop, in a thread of its own that lives as long as the run. In this process all
unfinished trajectories get their next turn together, in a fixed order, so that a run depends on its seed
alone, however long tools take. On servers each trajectory proceeds at its own pace.
Needs rollout.py, policy.py, algorithm.py and reward_worker.py. Left out: images, histories that are changed
afterwards, functions in other processes.
"""

import asyncio
import contextlib
import copy
import inspect
import pickle
import queue
import re
import secrets
import sys
import threading
import time
import traceback
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from random import Random

from policy import Sample
from reward_worker import error_line
from rollout import open_session, request_completion, rollout_hf, sampling_parameters

OFFERED = {"trajectory", "prompt", "ground_truth", "extra_info", "data_source", "step"}
ADDRESSES = {"reward_router_address", "reward_router_addresses"}  # offered if there is a reward model
TICK_S = 0.1  # the clocks of trajectories count in such ticks: one that blocks the loop costs the others one
BLOCKED_S = 2.0  # an event loop that stands still for so long is worth a message
THREADS = 64  # for asyncio.to_thread
SPOKEN, CONTENT = "assistant-has-spoken", "content-of-the-reply"  # stand for messages in a chat template


class NoRoom(BaseException):  # not an Exception: a function that catches each of those must end, too
    """The trajectory has no room for more tokens, and ends as it is."""


@dataclass
class Turn:
    """What a trajectory asks of the policy."""

    place: int  # of its sample among all
    ids: list[int]
    limit: int
    stop: tuple[str, ...]
    session: str
    answer: asyncio.Future | None = None  # (token ids, log-probabilities)


class Trajectory:
    """What a rollout function is given: a sample on its way."""

    def __init__(self, sample: Sample, place: int, number: int, seed: int, wave: "Wave"):
        self.number = number  # within its group, from 0
        self.seed = seed  # the same for the whole group, so that its environments begin alike
        self.info = sample.info  # yours: what you put here reaches the reward function in extra_info
        self.stopped: str | None = None  # the stop text that ended the policy's last turn
        self._sample = sample
        self._place = place
        self._wave = wave
        self._rollouts = wave.rollouts
        self._session = secrets.token_hex(8)  # the router sends all turns of a session to the same server
        self._left = wave.rollouts.timeout  # seconds that the function may still take
        self._expired: asyncio.Future | None = None  # done if it has taken them all
        self._working_since: float | None = None  # None: it waits for the policy, or has ended
        self._is_full = False
        self._has_ended = False  # whatever the function has left running can add nothing more

    @property
    def turns(self) -> list[dict]:
        """Who has spoken so far: {"who": "policy", "tool" or "user", "text": ..., "tokens": how many}."""
        return self._sample.turns

    @property
    def text(self) -> str:
        """The response so far, whoever wrote it."""
        return self._rollouts.decode(self._sample.response_ids)

    @property
    def ids(self) -> list[int]:
        """All tokens so far, the prompt's included."""
        return self._sample.prompt_ids + self._sample.response_ids

    @property
    def room(self) -> int:
        """How many tokens may still be added, whoever writes them."""
        return self._wave.max_response_length - len(self._sample.response_ids)

    async def generate(self, stop: str | tuple[str, ...] = (), max_tokens: int | None = None) -> str:
        """Let the policy continue until an end token, one of the stop texts (which stays), or max_tokens.

        Returns what it wrote. If the last token has further characters after the stop text, they stay, too.
        """
        if isinstance(stop, str):
            stop = (stop,)
        if "" in stop or max_tokens is not None and max_tokens < 1:
            raise ValueError(f"generate: stop {stop!r}, max_tokens {max_tokens!r}: a stop text must not be "
                             "empty, max_tokens must be at least 1")  # fmt: skip
        for word in stop:
            if any(token in word for token in self._rollouts.special):
                raise ValueError(f"generate: stop {word!r} has a special token, which texts leave out; the "
                                 "policy stops there only if the model's generation config has it as an "
                                 "end token")  # fmt: skip
        if self._is_full or self._has_ended:
            await asyncio.sleep(TICK_S)  # a function that catches whatever is raised must not spin
        self._check_open()
        limit = min(max_tokens or self.room, self.room)
        if limit < 1:
            self._end()
        self._pause()
        try:
            turn = Turn(self._place, self.ids, limit, tuple(stop), self._session)
            ids, logprobs = await self._wave.ask(turn)
        finally:
            if not self._has_ended:
                self._working_since = time.monotonic()
        self._check_open()
        text = self._rollouts.decode(ids)
        self._add("policy", text, ids, logprobs)
        self.stopped = first_stop(text, stop)
        if not self.stopped and not self.room and ids[-1] not in self._wave.eos_ids:
            self._end()
        return text

    async def calls(self, *stop: str):
        """Yield each of the policy's turns that one of these texts ends, to be answered; end with the policy.

        A turn is the policy's text up to and including the stop text.
        """
        while True:
            text = await self.generate(stop)
            if not self.stopped:
                return
            yield text

    def observe(self, text: str) -> None:
        """Add a tool's text inside the policy's turn, which continues right after it."""
        self.insert(self._rollouts.encode("", text, ""), text=text)

    def reply(self, content: str, role: str = "tool") -> None:
        """Add a message of a tool or user in the model's chat template; then it is the policy's turn."""
        last = self._sample.response_ids[-1:]
        end = ""
        if last and last[0] in self._wave.eos_ids:  # the template would write it again
            end = self._rollouts.tokenizer.decode(last)
        before, inside, behind = self._rollouts.render(content, role)
        who = role if role == "user" else "tool"
        self.insert(self._rollouts.encode(before.removeprefix(end), inside, behind), who, content)

    def insert(self, ids: list[int], who: str = "tool", text: str | None = None) -> None:
        """Add tokens as they are, which the policy did not write."""
        self._check_open()
        if who == "policy":
            raise ValueError("insert: who is 'policy', which speaks by generate alone; give 'tool' or 'user'")
        if len(ids) > self.room:
            self._end()
        if text is None:
            text = self._rollouts.decode(ids)
        self._add(who, text, list(ids), [0.0] * len(ids))

    def _add(self, who, text, ids, logprobs):
        sample = self._sample
        sample.turns.append({"who": who, "text": text, "tokens": len(ids)})
        sample.response_ids += ids
        sample.rollout_logprobs += logprobs
        sample.loss_mask += [who == "policy"] * len(ids)

    def _check_open(self):
        if self._is_full:
            raise NoRoom
        if self._working_since is None:
            raise RuntimeError("generate, observe, reply, insert: the policy is writing this trajectory "
                               "already, or it has ended")  # fmt: skip

    def _end(self):
        self._is_full = True
        raise NoRoom

    def _pause(self):
        """The function's clock stands still from here on."""
        if self._working_since is not None:
            self._sample.tool_seconds += time.monotonic() - self._working_since
        self._working_since = None

    def _close(self, call: asyncio.Task):
        """End the trajectory with this call of the function, whose failure is its sample's alone."""
        self._pause()
        self._has_ended = True
        sample = self._sample
        sample.truncated = self._is_full
        sample.info = self.info
        if not call.done():
            self._fail("timeout", f"it took over {self._rollouts.timeout:g} s, without the policy's time")
            return
        failure = self._failure_of(call)
        if failure:
            self._fail("error", failure)

    def _failure_of(self, call: asyncio.Task) -> str:
        """What is wrong with a call that is done; empty if nothing is."""
        if call.cancelled():
            return "CancelledError: the function has cancelled its own task"
        error = call.exception()
        if isinstance(error, BaseExceptionGroup):  # of a TaskGroup: what is left without the want of room
            error = error.split(NoRoom)[1]
        if error and not isinstance(error, NoRoom):
            return error_line(error, self._rollouts.file)
        has_spoken = any(self._sample.loss_mask)
        if self._is_full and not has_spoken:
            return "it left the policy no room: raise --max-response-length"
        if not has_spoken:
            return "it ended before the policy had written anything: await trajectory.generate()"
        if not isinstance(self.info, dict):
            return f"trajectory.info is {self.info!r:.60}; it must be a dict"
        try:
            pickle.dumps(self.info)
        except Exception as problem:
            return f"trajectory.info cannot be sent to the reward function: {error_line(problem)}"
        return ""

    def _fail(self, kind, message):
        info = {"error": f"rollout function: {message}"}
        self._sample.failure = kind
        self._sample.info = {}
        self._sample.result = {"reward_score": None, "reward_extra_info": info, "status": kind}


def first_stop(text: str, stop) -> str | None:
    """The stop text that is complete first."""
    found = [word for word in stop if word in text]
    return min(found, key=lambda word: text.index(word) + len(word), default=None)


def names_taken(function, settings: dict, with_addresses: bool) -> set[str]:
    """What a rollout function takes of what it is offered. ValueError if it cannot be called so."""
    if not inspect.iscoroutinefunction(function) and not inspect.iscoroutinefunction(
        getattr(function, "__call__", None)
    ):
        raise ValueError("it is not async: write `async def`; a tool that blocks goes in asyncio.to_thread")
    signature = inspect.signature(function)
    offered = OFFERED
    if with_addresses:
        offered = OFFERED | ADDRESSES
    taken = offered & signature.parameters.keys() - settings.keys() | {"trajectory"}
    try:
        signature.bind(**dict.fromkeys(taken), **settings)
    except TypeError as error:
        raise ValueError(f"it cannot be called with `trajectory`, --rollout-kwargs, and what it names of "
                         f"{', '.join(sorted(offered))}: {error}") from None  # fmt: skip
    return taken


class Threads(ThreadPoolExecutor):
    """For asyncio.to_thread. The threads are daemons: a run that is stopped does not wait for a tool."""

    def __init__(self):
        super().__init__(1)  # which starts no thread
        self.calls = queue.SimpleQueue()
        for _ in range(THREADS):
            threading.Thread(target=self.work, daemon=True).start()

    def submit(self, function, *arguments, **named):
        future = Future()
        self.calls.put((future, partial(function, *arguments, **named)))
        return future

    def work(self):
        while True:
            future, call = self.calls.get()
            if future.set_running_or_notify_cancel():
                try:
                    future.set_result(call())
                except BaseException as error:
                    future.set_exception(error)


class Rollouts:
    """The rollout function of a run, its event loop, and how the policy's chat template writes replies.

    function: as names_taken accepts it; settings: --rollout-kwargs; addresses: {name: host:port} of reward
    models; timeout: seconds that the function may take for a sample, without its waits for the policy.
    """

    def __init__(self, function, tokenizer, *, settings=None, timeout=600.0, template_options=None,
                 addresses=None):  # fmt: skip
        self.function = function
        self.settings = settings or {}
        self.timeout = timeout
        self.tokenizer = tokenizer
        self.template_options = template_options or {}
        self.models = {}
        if addresses:
            self.offer_models(addresses)
        self.names = names_taken(function, self.settings, bool(addresses))
        code = getattr(inspect.unwrap(function), "__code__", None)
        self.file = code.co_filename if code else ""
        self.decode = partial(tokenizer.decode, skip_special_tokens=True)
        self.special = tokenizer.all_special_tokens
        added = [text for text in tokenizer.get_added_vocab() if len(text.strip()) > 1]
        self.added = re.compile("|".join(map(re.escape, sorted(added, key=len, reverse=True))) or "(?!)")

    def offer_models(self, addresses: dict[str, str]):
        """Where the reward models are that the function may ask."""
        self.models["reward_router_address"] = next(iter(addresses.values()))
        self.models["reward_router_addresses"] = addresses

    def start(self):
        self.loop = asyncio.new_event_loop()
        self.loop.set_default_executor(Threads())
        self.beat = time.monotonic()  # when the loop was last seen to go on
        self.is_closing = False
        self.thread = threading.Thread(target=self.run_loop, daemon=True)
        self.thread.start()
        threading.Thread(target=self.watch, daemon=True).start()
        self.beating = asyncio.run_coroutine_threadsafe(self.keep_beating(), self.loop)

    def run_loop(self):
        while not self.is_closing:
            # A task of the function that exits stops the loop, which then continues with the other tasks.
            with contextlib.suppress(SystemExit, KeyboardInterrupt):
                self.loop.run_forever()

    def close(self):
        self.is_closing = True
        self.beating.cancel()
        self.loop.call_soon_threadsafe(self.loop.call_soon, self.loop.stop)
        self.thread.join(timeout=1.0)  # a tool may block it: nobody waits for that

    async def keep_beating(self):
        while True:
            self.beat = time.monotonic()
            await asyncio.sleep(TICK_S)

    def watch(self):
        """Print which line of the function blocks the event loop, and so all trajectories, once a line."""
        said = set()
        while self.thread.is_alive():
            time.sleep(BLOCKED_S / 4)
            frame = sys._current_frames().get(self.thread.ident)
            if time.monotonic() - self.beat < BLOCKED_S or not frame:
                continue
            for place in reversed(traceback.extract_stack(frame)):
                line = f"{place.filename}:{place.lineno}"
                if place.filename == self.file and line not in said:
                    said.add(line)
                    print(f"rollout_fn: {line} ({place.name}) blocks all trajectories; call a tool that "
                          "blocks as `await asyncio.to_thread(tool, ...)`", flush=True)  # fmt: skip
                if place.filename == self.file:
                    break

    def encode(self, before: str, inside: str, behind: str) -> list[int]:
        """Token ids of a text, in whose middle part special and added tokens are plain text."""
        text = before + inside + behind
        start, end = len(before), len(before) + len(inside)
        cuts = [0]
        match = self.added.search(text)
        while match:
            after = match.end()
            if match.start() < end and match.end() > start:  # a part of it is the content's: cut there
                after = max(match.start() + 1, start)
                cuts.append(after)
            match = self.added.search(text, after)
        ids = []
        for first, last in zip(cuts, [*cuts[1:], len(text)]):
            ids += self.tokenizer.encode(text[first:last], add_special_tokens=False)
        return ids

    def render(self, content: str, role: str) -> tuple[str, str, str]:
        """What a chat template writes after an assistant's message: before, in and behind this content."""
        framed = self.written_after_assistant(CONTENT, role)
        before, found, behind = framed.partition(CONTENT)
        if not found:
            raise ValueError(f"reply: the chat template leaves out messages of the role {role!r}; give one "
                             "that it knows, such as role='user'")  # fmt: skip
        whole = self.written_after_assistant(content, role)
        if not (whole.startswith(before) and whole.endswith(behind)):
            raise ValueError(f"reply: the chat template changes its frame for {content!r:.60}; use observe()")
        return before, whole[len(before) : len(whole) - len(behind)], behind

    def written_after_assistant(self, content, role):
        messages = [
            {"role": "user", "content": "?"},
            {"role": "assistant", "content": SPOKEN},
            {"role": role, "content": content},
        ]
        options = self.template_options | {"add_generation_prompt": True}
        try:
            text = self.tokenizer.apply_chat_template(messages, tokenize=False, **options)
        except Exception as error:  # a template is a program that came with the model
            raise ValueError(f"reply: the chat template rejects the role {role!r} ({error}); give one that "
                             "it knows, such as role='user'") from error  # fmt: skip
        _, spoken, after = text.partition(SPOKEN)
        if not spoken:
            raise ValueError("reply: the chat template leaves out the assistant's message; use observe()")
        return after

    def roll_out(self, groups: list[list[Sample]], *, max_response_length, temperature, top_p=1.0, eos_ids,
                 seed, rollout_batch_size, step=0, model=None, servers=None,
                 on_finished=lambda sample: None, stop=threading.Event()):  # fmt: skip
        """Fill in the samples of these groups by calling the function for each of them.

        model: samples in this process, in this thread; servers: a PolicyServers instead. on_finished(sample)
        is called in this thread when a sample has ended. RuntimeError if a thread sets `stop`.
        """
        sampled_with = dict(temperature=temperature, top_p=top_p, eos_ids=eos_ids)
        sampling = sampling_parameters(**sampled_with)
        wave = Wave(self, max_response_length, eos_ids, servers, sampling, rollout_batch_size)
        wave.arrange(groups, seed, step)
        ending = asyncio.run_coroutine_threadsafe(wave.run(), self.loop)
        ending.add_done_callback(lambda _: wave.events.put(("end", None)))
        rounds = 0
        checked = time.monotonic()
        try:
            while True:
                if time.monotonic() - checked >= 1.0:
                    checked = time.monotonic()
                    if servers:
                        servers.check()
                    if stop.is_set():
                        raise RuntimeError("the rollouts were given up")
                try:
                    kind, value = wave.events.get(timeout=1.0)
                except queue.Empty:
                    continue
                if kind == "finished":
                    on_finished(value)
                elif kind == "round":
                    # The first round is what a run without a function would sample.
                    round_seed = seed + (rounds << 52)
                    results = sample_round(model, value, self.decode, seed=round_seed,
                                           rollout_batch_size=rollout_batch_size, **sampled_with)  # fmt: skip
                    self.loop.call_soon_threadsafe(deliver, value, results)
                    rounds += 1
                else:
                    ending.result()
                    return
        finally:
            ending.cancel()


@dataclass
class Wave:
    """The trajectories that are rolled out together."""

    rollouts: Rollouts
    max_response_length: int
    eos_ids: set[int]
    servers: object | None
    settings: dict  # of requests
    rollout_batch_size: int
    events: queue.SimpleQueue = field(default_factory=queue.SimpleQueue)  # for the thread of the caller
    trajectories: list = field(default_factory=list)
    arguments: list[dict] = field(default_factory=list)  # of each trajectory's call
    waiting: dict[int, Turn] = field(default_factory=dict)  # for the next round
    unfinished: int = 0
    tasks: asyncio.TaskGroup | None = None
    ask: Callable | None = None  # a Turn -> (ids, logprobs)

    def arrange(self, groups, seed, step):
        for group_number, group in enumerate(groups):
            group_seed = Random(f"{seed}/{group_number}").getrandbits(31)
            for number, sample in enumerate(group):
                trajectory = Trajectory(sample, len(self.trajectories), number, group_seed, self)
                row = sample.row
                given = self.rollouts.models | {
                    "trajectory": trajectory,
                    "prompt": row["prompt"],  # copied below: the samples of a group share a row
                    "ground_truth": row["reward_model"]["ground_truth"],
                    "extra_info": row.get("extra_info") or {},
                    "data_source": row["data_source"],
                    "step": step,
                }
                self.trajectories.append(trajectory)
                arguments = {}
                for name in self.rollouts.names:
                    arguments[name] = given[name]
                    if name in ("prompt", "ground_truth", "extra_info"):
                        arguments[name] = copy.deepcopy(given[name])
                self.arguments.append(arguments)
        self.unfinished = len(self.trajectories)

    async def run(self):
        """All calls; ends with the last one, or raises what went wrong with the policy's servers."""
        try:
            if self.servers:
                async with open_session(self.servers, self.rollout_batch_size) as session:
                    self.ask = partial(self.ask_servers, session)
                    await self.run_all()
            else:
                self.ask = self.ask_in_rounds
                await self.run_all()
        except ExceptionGroup as errors:
            raise errors.exceptions[0] from None

    async def run_all(self):
        async with asyncio.TaskGroup() as self.tasks:
            trajectories = []
            for trajectory, arguments in zip(self.trajectories, self.arguments):
                trajectories.append(self.tasks.create_task(self.one(trajectory, arguments)))
            clock = self.tasks.create_task(self.count_seconds())
            await asyncio.wait(trajectories)
            clock.cancel()

    async def one(self, trajectory, arguments):
        """A call of the function. It is a task of its own: nobody waits for one that does not end."""
        trajectory._expired = asyncio.get_running_loop().create_future()
        trajectory._working_since = time.monotonic()
        call = asyncio.create_task(self.rollouts.function(**arguments, **self.rollouts.settings))
        try:
            await asyncio.wait({call, trajectory._expired}, return_when=asyncio.FIRST_COMPLETED)
            trajectory._close(call)
        finally:
            call.add_done_callback(lambda call: call.cancelled() or call.exception())  # or asyncio prints it
            call.cancel()
        left = self.waiting.pop(trajectory._place, None)
        if left:  # by a task that the function has started
            left.answer.cancel()
        self.unfinished -= 1
        self.events.put(("finished", trajectory._sample))
        self.begin_round()

    async def count_seconds(self):
        """Ends the calls that have taken too long. A tick is at most TICK_S, or one call that blocks the
        loop would cost all the others their time."""
        last = time.monotonic()
        while True:
            await asyncio.sleep(TICK_S)
            now = time.monotonic()
            passed = min(now - last, 2 * TICK_S)
            last = now
            for trajectory in self.trajectories:
                if trajectory._working_since is None:
                    continue
                trajectory._left -= passed
                if trajectory._left <= 0 and not trajectory._expired.done():
                    trajectory._expired.set_result(None)

    async def ask_servers(self, session, turn: Turn):
        request = self.settings | {"prompt": turn.ids, "max_tokens": turn.limit}
        if turn.stop:
            request["stop"] = list(turn.stop)
        address = self.servers.service.router_address
        headers = {"X-Session-Id": turn.session}
        # As a task of the group: servers that fail end the run, whatever the function catches.
        choice = await self.tasks.create_task(request_completion(session, address, request, headers))
        return choice.token_ids, choice.logprobs.token_logprobs

    async def ask_in_rounds(self, turn: Turn):
        turn.answer = asyncio.get_running_loop().create_future()
        self.waiting[turn.place] = turn
        self.begin_round()
        try:
            return await turn.answer
        finally:
            if self.waiting.get(turn.place) is turn:  # the function has given it up
                del self.waiting[turn.place]

    def begin_round(self):
        """As soon as all unfinished trajectories wait, each gets its turn, in the order of the samples."""
        if self.waiting and len(self.waiting) == self.unfinished:
            self.events.put(("round", [self.waiting[place] for place in sorted(self.waiting)]))
            self.waiting = {}


def deliver(turns, results):
    for turn, result in zip(turns, results):
        if not turn.answer.done():  # its function may have given it up
            turn.answer.set_result(result)


def sample_round(model, turns: list[Turn], decode, **options) -> list[tuple[list[int], list[float]]]:
    """The policy's next turn in each of these, sampled in this process."""
    samples = []
    turn_of = {}
    for turn in turns:
        sample = Sample({}, turn.ids)
        samples.append(sample)
        turn_of[id(sample)] = turn

    def is_done(sample):
        turn = turn_of[id(sample)]
        if len(sample.response_ids) >= turn.limit:
            return True
        longest = max((len(word.encode()) for word in turn.stop), default=0)
        if not longest:
            return False
        tail = decode(sample.response_ids[-longest - 8 :])  # tokens of less than a character may begin it
        return any(word in tail for word in turn.stop)

    limit = max(turn.limit for turn in turns)
    rollout_hf(model, samples, max_response_length=limit, is_done=is_done, **options)
    return [(sample.response_ids, sample.rollout_logprobs) for sample in samples]
