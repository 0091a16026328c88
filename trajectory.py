"""Rollouts that you write: multi-turn generation, tools and environments (--rollout-fn FILE:NAME).

    async def with_calculator(trajectory):              # This function is in your own file.
        async for text in trajectory.calls("?"):        # `text` is the policy's text up to "65+9=?".
            trajectory.observe(calculate(text))         # The policy did not write "74".

The trainer calls the function once per sample, for all samples of a step concurrently. The policy's
tokens are never re-encoded or re-rendered, and the history is append-only. The loss ignores tokens that the
policy did not write. If a function raises an error or takes too long, its sample gets a failure status and no
reward. docs/rollouts.md has the rules and examples.

The functions run in one event loop, in a thread that lives as long as the run. With --rollout hf, all
unfinished trajectories get their next turn together and in a fixed order. The result then depends only on the
seed, however long tools take, unless one of them reaches the time limit. On servers, each trajectory proceeds
at its own pace.
Needs rollout.py, policy.py, causal_lm.py, algorithm.py and reward_worker.py. Not covered: images, rewritten
histories, functions in other processes.
"""

import asyncio
import contextlib
import copy
import gc
import inspect
import math
import pickle
import queue
import secrets
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable
from concurrent.futures import CancelledError, Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from itertools import accumulate, pairwise
from pathlib import Path
from random import Random

from causal_lm import added_tokens
from policy import Sample
from reward_worker import error_line
from rollout import check_running, open_session, request_completion, rollout_hf, sampling_parameters

# With reward models, Rollouts.offer_models offers their addresses as well.
OFFERED = {"trajectory", "prompt", "ground_truth", "extra_info", "data_source", "step"}
TICK_S = 0.1  # Timeouts are checked at this interval. A blocked event loop counts as at most two ticks.
BLOCKED_S = 2.0  # The trainer prints a message if the event loop is blocked for longer than this.
STALLED_S = 5.0  # The trainer prints a message if only waits for locks keep a round from starting for longer.
CLEANUP_S = 30.0  # When a run stops, the `finally` blocks of rollout functions may take this long.
# asyncio.to_thread runs at most this many calls at the same time. Waits of further calls count as tool time.
THREADS = 64
# Placeholders in a rendered template.
QUESTION, ANSWER, CONTENT = "the-users-question", "the-assistants-answer", "content-of-the-reply"


class NoRoom(BaseException):  # Not an Exception, so that it also ends functions that catch every Exception.
    """The trajectory has reached its maximum length, and ends as it is."""


class Closed(RuntimeError):
    """A task that the function left running has called a trajectory that has ended."""


@dataclass
class TurnRequest:
    """A trajectory's request to the policy."""

    place: int  # The index of the trajectory in its wave.
    ids: list[int]  # All tokens so far, including the prompt.
    limit: int  # The maximum number of tokens that the policy may add.
    stop: list[str]
    stop_ids: dict[int, str]  # The special tokens at which the turn stops, and their texts.
    session_id: str
    answer: asyncio.Future | None = None  # Its result is a pair: token ids and log-probabilities.


class Trajectory:
    """One sample, which a rollout function builds turn by turn.

    The policy's message is open at the start, and after each reply. The policy ends it with an end token.
    """

    def __init__(self, sample: Sample, place: int, number: int, wave: "Wave"):
        self.number = number  # The sample's index in its group.
        self.seed = sample.seed  # The group shares it, so that environments reset to the same state.
        self.info = {}  # Your own data, which the reward function gets in extra_info.
        self.stopped: str | None = None  # The stop text that ended the policy's last turn.
        # Rollout functions must not use attributes with an underscore, which Wave reads and writes.
        self._sample = sample
        self._place = place
        self._wave = wave
        self._runner = wave.runner
        self._session_id = secrets.token_hex(8)  # The router sends all turns of a session to the same server.
        self._left = wave.runner.timeout  # Seconds that the function may still take.
        self._expired: asyncio.Future | None = None  # Done when no seconds are left.
        self._task: asyncio.Task | None = None  # The task in which the function runs.
        # None means that the function is waiting for the policy, or that the trajectory has ended.
        self._working_since: float | None = None
        self._is_closed = False  # After that, tasks that the function left running can add nothing.
        self._end_id: int | None = None  # The end token of the policy's message; None while it is open.
        self._replies: list[tuple[str, str]] = []  # Roles and contents of replies that nothing has followed.
        self._before_replies = (0, 0, None)  # The number of turns and tokens, and the end token, before them.

    @property
    def ended(self) -> bool:
        """Whether the policy has ended its message, so that only `reply` can follow."""
        return self._end_id is not None

    @property
    def turns(self) -> list[dict]:
        """Copies of the turns so far: {"who": "policy", "tool" or "user", "text": str, "tokens": int}."""
        return copy.deepcopy(self._sample.turns)

    @property
    def text(self) -> str:
        """The response so far, including what the policy did not write."""
        return self._runner.decode(self._sample.response_ids)

    @property
    def ids(self) -> list[int]:
        """All token ids so far, including the prompt."""
        return self._sample.prompt_ids + self._sample.response_ids

    @property
    def room(self) -> int:
        """The number of tokens that can still be added."""
        return self._wave.max_response_length - len(self._sample.response_ids)

    async def generate(self, stop: str | tuple[str, ...] = (), max_tokens: int | None = None) -> str:
        """Let the policy continue until an end token, one of the stop texts, or max_tokens.

        A stop text may be a special token, which decoded text does not show. Afterwards, `stopped` and
        `ended` tell what happened; if neither is set, the policy has used up max_tokens.

        Returns the policy's text, including the stop text and any characters after it in the last token.
        """
        if isinstance(stop, str):
            stop = (stop,)
        if max_tokens is not None and (not isinstance(max_tokens, int) or max_tokens < 1):
            raise ValueError(f"generate: max_tokens must be a positive int; got {max_tokens!r}")
        texts, marks = self._runner.split_stops(stop)
        if self._sample.truncated or self._is_closed or self.ended:
            await asyncio.sleep(TICK_S)  # A loop that catches every error must not block the others.
        self._check_message("generate")
        limit = min(max_tokens or self.room, self.room)
        if limit < 1:
            self._truncate()
        self._pause()
        try:
            turn = TurnRequest(self._place, self.ids, limit, texts, marks, self._session_id)
            ids, logprobs = await self._wave.ask(turn)
        finally:
            self._working_since = time.monotonic()
        self._check_open()
        text = self._runner.decode(ids)
        self._add("policy", text, ids, logprobs)
        self.stopped = marks.get(ids[-1]) or first_stop(text, texts)
        if not self.stopped and not self.ended and not self.room:
            self._truncate()
        return text

    async def calls(self, *stop: str):
        """Yield each turn of the policy that ends with one of these stop texts, so that you can answer it.

        The yielded text includes the stop text. The loop ends when the policy ends its message.
        """
        while True:
            text = await self.generate(stop)
            if not self.stopped:
                return
            yield text

    def observe(self, text: str) -> None:
        """Add a tool's text inside the policy's message, which continues right after it."""
        self._check_message("observe")
        if not isinstance(text, str):
            raise ValueError(f"observe: text must be a str; got {text!r:.60}")
        self.insert(self._runner.encode("", text), text=text)

    def reply(self, content: str, role: str = "tool") -> None:
        """Add a message of a tool or user in the chat template, and open the policy's next message.

        Replies in a row are rendered together, as the template writes such messages. The policy has not read
        the earlier ones yet, so their tokens are replaced.
        """
        self._check_open()
        if not isinstance(content, str):
            raise ValueError(f"reply: content must be a str; got {content!r:.60}")
        sample = self._sample
        if not self._replies:
            self._before_replies = len(sample.turns), len(sample.response_ids), self._end_id
        first, kept, end_id = self._before_replies
        replies = [*self._replies, (role, content)]
        follows_prompt = not kept and sample.row["prompt"][-1]["role"] != "assistant"
        texts = self._runner.render(replies, follows_prompt)
        context = "\n"
        if end_id is not None:
            context = self._runner.tokenizer.decode([end_id])
            texts[0] = self._runner.without_end(texts, context)
        ids = self._checked(self._runner.encode(*texts, context=context), kept)
        if follows_prompt and not self._replies:
            sample.prompt_ids = self._runner.without_opening(sample.prompt_ids)
        # A turn has the tokens up to the end of its content. That of the previous reply is not known yet.
        ends = [*accumulate(turn["tokens"] for turn in sample.turns[first:-1])]
        if self._replies:
            ends.append(len(self._runner.encode(*texts[: 2 * len(self._replies)], context=context)))
        for values in (sample.response_ids, sample.rollout_logprobs, sample.loss_mask):
            del values[kept:]
        del sample.turns[first:]
        done = 0
        for (role, content), end in zip(replies, [*ends, len(ids)], strict=True):
            end = max(done, min(end, len(ids)))
            who = role if role == "user" else "tool"
            self._add(who, content, ids[done:end], [0.0] * (end - done))
            done = end
        self._replies = replies
        self._end_id = None

    def insert(self, ids: list[int], who: str = "tool", text: str | None = None) -> None:
        """Add these token ids unchanged, as tokens that the policy did not write.

        The policy continues right after them, unless they end with an end token.
        """
        self._check_open()
        if who not in ("tool", "user"):
            raise ValueError(f"insert: who must be 'tool' or 'user'; got {who!r}")
        if not isinstance(text, str | None):
            raise ValueError(f"insert: text must be a str, or None to use the decoded ids; got {text!r:.60}")
        ids = self._checked(ids, len(self._sample.response_ids))
        if text is None:
            text = self._runner.decode(ids)
        self._add(who, text, ids, [0.0] * len(ids))

    def _checked(self, ids, kept) -> list[int]:
        """Return these token ids if they exist and have room after the first `kept` tokens."""
        for id in ids:
            if not isinstance(id, int) or not 0 <= id < self._runner.num_tokens:
                raise ValueError(
                    f"insert: {id!r:.60} is not a token of the tokenizer and the model; pass "
                    f"ints between 0 and {self._runner.num_tokens - 1}"
                )
        if kept + len(ids) > self._wave.max_response_length:
            self._truncate()
        return list(ids)

    def _add(self, who, text, ids, logprobs):
        sample = self._sample
        sample.turns.append({"who": who, "text": text, "tokens": len(ids)})
        sample.response_ids += ids
        sample.rollout_logprobs += logprobs
        sample.loss_mask += [who == "policy"] * len(ids)
        self._replies = []
        if ids:
            self._end_id = ids[-1] if ids[-1] in self._wave.eos_ids else None

    def _check_open(self):
        # A thread could add tokens while the trajectory ends, or while a turn is being requested.
        if threading.current_thread() is not self._runner.thread:
            raise RuntimeError(
                "generate, observe, reply and insert cannot be called in another thread; "
                "return the tool's result to the rollout function"
            )
        if self._sample.truncated:
            raise NoRoom
        if self._is_closed:
            raise Closed(
                "generate, observe, reply and insert cannot be called after the trajectory has "
                "ended; await all tasks in the rollout function"
            )
        if self._working_since is None:
            raise RuntimeError(
                "generate, observe, reply and insert cannot be called while the policy "
                "generates; await generate()"
            )

    def _check_message(self, method):
        self._check_open()
        if self.ended:
            raise RuntimeError(
                f"{method}: the policy has ended its message; add another message with reply(), "
                "which opens a new one, or return"
            )

    def _truncate(self):
        self._sample.truncated = True
        raise NoRoom

    def _pause(self):
        """Stop the function's clock."""
        if self._working_since is not None:
            self._sample.tool_seconds += time.monotonic() - self._working_since
        self._working_since = None

    def _close(self, task: asyncio.Task):
        """End the trajectory. Its sample fails if the function failed or took too long."""
        self._pause()
        self._is_closed = True
        sample = self._sample
        if task.done():
            kind = "error"
            message = self._failure_of(task)
        else:
            kind = "timeout"
            line, is_lock = line_of(task, self._runner.file)
            remedy = "raise --rollout-timeout, or speed up the tools"
            if is_lock:
                remedy = "it waited for a lock; do not hold a lock around generate()"
            message = (
                f"the function took more than {self._runner.timeout:g} s, excluding waits for the "
                f"policy, and stood at {line}; {remedy}"
            )
        if message:
            sample.failure = kind
            info = {"error": f"--rollout-fn: {message}"}
            sample.result = {"reward_score": None, "reward_extra_info": info, "status": kind}

    def _failure_of(self, task: asyncio.Task) -> str:
        """Return why the function has failed in a finished task, or an empty string if it has not."""
        if task.cancelled():
            return "CancelledError: the function cancelled its own task"
        error = task.exception()
        if isinstance(error, BaseExceptionGroup):  # A TaskGroup raises groups. NoRoom is not a failure.
            error = error.split(NoRoom)[1]
        if error is not None and not isinstance(error, NoRoom):
            return error_line(error, self._runner.file)
        if not any(self._sample.loss_mask):
            return (
                "the function ended or used all tokens before the policy wrote any; await "
                "trajectory.generate() first, or raise --max-response-length"
            )
        if not isinstance(self.info, dict):
            return f"trajectory.info is a {type(self.info).__name__}; it must be a dict"
        try:  # Tasks that the function left running cannot change this copy.
            self._sample.info = pickle.loads(pickle.dumps(dict(self.info)))
        except Exception as problem:
            return (
                f"trajectory.info cannot be sent to the reward function ({error_line(problem)}); use "
                "only numbers, strings, lists and dicts in trajectory.info"
            )
        return ""


def first_stop(text: str, stop) -> str | None:
    """Return the stop text that ends earliest in the text, or None."""
    found = [word for word in stop if word in text]
    return min(found, key=lambda word: text.index(word) + len(word), default=None)


def line_of(task: asyncio.Task, file: str) -> tuple[str, bool]:
    """Return the line of the user's file at which a task stands, and whether it waits there for a lock."""
    line = "an unknown line"
    inner = ""
    step = task.get_coro()
    while step is not None:
        frame = getattr(step, "cr_frame", None)
        if frame:
            inner = frame.f_code.co_filename
            if inner == file:
                line = f"{Path(file).name}:{frame.f_lineno} ({frame.f_code.co_name})"
        step = getattr(step, "cr_await", None)
    return line, inner in (asyncio.locks.__file__, asyncio.queues.__file__)


def report(loop, context):
    """Print an exception that nobody retrieves, unless it only says that the trajectory has ended."""
    if not isinstance(context.get("exception"), NoRoom | Closed):
        loop.default_exception_handler(context)


def names_taken(function, settings: dict, offered: set[str]) -> set[str]:
    """Return which of the offered arguments, apart from `trajectory`, a rollout function takes.

    Raises:
        ValueError: The function is not async, or cannot be called with these arguments.
    """
    if not inspect.iscoroutinefunction(function) and not inspect.iscoroutinefunction(
        getattr(function, "__call__", None)
    ):
        raise ValueError(
            "the function is not async; define it with `async def`, and call blocking tools "
            "with `await asyncio.to_thread(tool, ...)`"
        )
    signature = inspect.signature(function)
    free = signature.parameters.keys() - settings.keys()
    taken = (offered & free) | {"trajectory"}
    try:
        signature.bind(**dict.fromkeys(taken), **settings)
    except TypeError as error:
        raise ValueError(
            f"the function cannot be called ({error}); it must accept `trajectory` and all "
            "arguments in --rollout-kwargs, and may accept any of "
            f"{', '.join(sorted(offered))}"
        ) from None
    return taken - {"trajectory"}


def frame_of(thread: threading.Thread):
    """Return the frame that a thread is executing, or None if the thread has ended.

    Before Python 3.11.9, garbage collection within sys._current_frames can stop all threads for good, if one
    of them starts another thread (https://github.com/python/cpython/issues/106883).
    """
    collects = gc.isenabled()
    gc.disable()
    frame = sys._current_frames().get(thread.ident)
    if collects:
        gc.enable()
    return frame


class ThreadCall(Future):
    """A call in one of the threads."""

    def __init__(self, threads: "Threads"):
        super().__init__()
        self.threads = threads
        self.is_abandoned = False

    def cancel(self):
        """Cancel the call. If it is running, another thread takes the place of its thread, which may hang."""
        is_cancelled = super().cancel()
        if self.running():
            self.is_abandoned = True
            self.threads.start_one()
        return is_cancelled


class Threads(ThreadPoolExecutor):
    """The threads of asyncio.to_thread. They are daemons, so that a stopped run does not wait for tools."""

    def __init__(self):
        super().__init__(1)  # The base class starts threads only in its own submit().
        self.submitted = queue.SimpleQueue()
        for _ in range(THREADS):
            self.start_one()

    def start_one(self):
        threading.Thread(target=self.work, daemon=True).start()

    def submit(self, function, *arguments, **named):
        future = ThreadCall(self)
        self.submitted.put((future, partial(function, *arguments, **named)))
        return future

    def shutdown(self, wait=False, *, cancel_futures=False):
        """End each thread when its current call returns, without waiting, because a call may hang."""
        self.submitted.put(None)

    def work(self):
        for future, call in iter(self.submitted.get, None):
            if future.set_running_or_notify_cancel():
                try:
                    future.set_result(call())
                except StopIteration as error:  # asyncio rejects this error, and the caller would hang.
                    future.set_exception(RuntimeError(f"a call in a thread raised {error!r}"))
                except BaseException as error:
                    future.set_exception(error)
                if future.is_abandoned:
                    return
        self.submitted.put(None)  # The next thread then ends as well.


class Rollouts:
    """The rollout function of a run, its event loop, and the chat template for replies.

    Args:
        function: The async function, which names_taken must accept.
        settings: The keyword arguments in --rollout-kwargs.
        timeout: The seconds that the function may take per sample, excluding waits for the policy.
        template_options: The keyword arguments in --chat-template-kwargs.
        addresses: The reward models that the function may call, {name: host:port}.
        num_embeddings: The number of tokens in the model's embedding.
    """

    def __init__(
        self,
        function,
        tokenizer,
        *,
        settings=None,
        timeout=600.0,
        template_options=None,
        addresses=None,
        num_embeddings=math.inf,
    ):
        self.function = function
        self.settings = settings or {}
        self.timeout = timeout
        self.tokenizer = tokenizer
        self.template_options = template_options or {}
        self.models = {}
        if addresses:
            self.offer_models(addresses)
        self.names = names_taken(function, self.settings, OFFERED | self.models.keys())
        code = getattr(inspect.unwrap(function), "__code__", None)
        self.file = getattr(code, "co_filename", "")
        self.decode = partial(tokenizer.decode, skip_special_tokens=True)
        tokens = tokenizer.added_tokens_decoder
        self.special = {token.content: id for id, token in tokens.items() if token.special}
        self.num_tokens = min(1 + max(tokenizer.get_vocab().values()), num_embeddings)
        self.added = added_tokens(tokenizer, shortest=2)

    def offer_models(self, addresses: dict[str, str]):
        """Set the addresses of the reward models that the function may call."""
        self.models["reward_router_address"] = next(iter(addresses.values()))
        self.models["reward_router_addresses"] = addresses

    def start(self):
        self.loop = asyncio.new_event_loop()
        self.loop.set_default_executor(Threads())
        self.loop.set_exception_handler(report)
        self.last_tick = time.monotonic()  # when the loop last ran
        self.is_closing = False
        self.printed = set()  # The lines that wait for locks and have been printed.
        self.running = set()  # The tasks in which the function still runs.
        self.thread = threading.Thread(target=self.run_loop, daemon=True)
        self.thread.start()
        threading.Thread(target=self.watch, daemon=True).start()
        asyncio.run_coroutine_threadsafe(self.keep_time(), self.loop)

    def run_loop(self):
        while not self.is_closing:
            # If a task of a rollout function calls sys.exit(), only that task may end.
            with contextlib.suppress(SystemExit, KeyboardInterrupt):
                self.loop.run_forever()
        self.loop.run_until_complete(self.loop.shutdown_asyncgens())  # closes the judge's HTTP session
        self.loop.close()  # This also shuts the threads down.

    def close(self):
        """End the loop. The rollouts have ended or been cancelled, but functions may still be cleaning up."""
        asyncio.run_coroutine_threadsafe(self.end_tasks(), self.loop)
        self.thread.join(timeout=1.0)
        if self.thread.is_alive():  # A tool may block the loop forever.
            print(
                f"--rollout-fn: waiting up to {CLEANUP_S:g} s for {len(self.running)} calls to clean up; "
                "press Ctrl-C to quit immediately"
            )
            self.thread.join(timeout=CLEANUP_S)

    async def end_tasks(self):
        """Let the calls clean up, then cancel what is left and stop the loop.

        A call that catches its cancellation is left behind. Other tasks are cancelled last, because
        asyncio.wait_for and other functions run parts of a cleanup in tasks.
        """
        end = time.monotonic() + CLEANUP_S
        if self.running:  # Their waves have cancelled them.
            await asyncio.wait(self.running, timeout=CLEANUP_S)
        tasks = asyncio.all_tasks() - {asyncio.current_task()}
        for task in tasks:
            task.cancel()
        if tasks:
            await asyncio.wait(tasks, timeout=max(end - time.monotonic(), 0.1))
        self.is_closing = True
        self.loop.stop()

    async def keep_time(self):
        while True:
            self.last_tick = time.monotonic()
            await asyncio.sleep(TICK_S)

    def watch(self):
        """Print each line of the rollout function that blocks the event loop, and so all trajectories.

        The loop must have stood still at several looks, because on a busy machine it may just have to wait.
        """
        printed = set()
        looks = 0
        tick = None
        while True:
            time.sleep(BLOCKED_S / 4)
            looks = looks + 1 if self.last_tick == tick else 0
            tick = self.last_tick
            frame = None
            if looks >= 4:
                frame = frame_of(self.thread)
            if not self.thread.is_alive():  # Otherwise the frame may belong to a new thread with its ident.
                return
            while frame and frame.f_code.co_filename not in (self.file, __file__):
                frame = frame.f_back
            # If the innermost of these frames is this file's, the function is in `await generate()`.
            if not frame or frame.f_code.co_filename != self.file:
                continue
            if frame.f_lineno not in printed:
                printed.add(frame.f_lineno)
                line = f"{self.file}:{frame.f_lineno} ({frame.f_code.co_name})"
                print(
                    f"--rollout-fn: {line} blocks all trajectories; call blocking tools with "
                    "`await asyncio.to_thread(tool, ...)`"
                )

    def split_stops(self, stop) -> tuple[list[str], dict[int, str]]:
        """Split stop texts into those that decoded text shows, and special tokens as {token id: text}."""
        texts = []
        marks = {}
        for word in stop:
            if not isinstance(word, str) or not word:
                raise ValueError(f"generate: every stop text must be a non-empty string; got {word!r}")
            if word in self.special:
                marks[self.special[word]] = word
            elif any(token in word for token in self.special):
                raise ValueError(
                    f"generate: stop {word!r} contains a special token, which decoded text does "
                    "not show; pass the special token alone"
                )
            else:
                texts.append(word)
        return texts, marks

    def encode(self, *texts: str, context: str = "\n") -> list[int]:
        """Encode these texts as one text that follows `context`, which is a token or a line break.

        Every second text is the content of a message, in which special and added tokens become plain text.
        """
        text = "".join(texts)
        bounds = accumulate(map(len, texts), initial=0)
        contents = list(pairwise(bounds))[1::2]  # The places where they start and end.
        cuts = [0]
        match = self.added.search(text)
        while match:
            after = match.end()
            for start, end in contents:
                if match.start() < end and match.end() > start:  # The token overlaps it, so split its text.
                    after = max(match.start() + 1, start)
                    cuts.append(after)
                    break
            match = self.added.search(text, after)
        ids = []
        for first, last in pairwise([*cuts, len(text)]):
            ids += self.encode_after(context, text[first:last])
            context = "\n"  # The next part continues a text.
        return ids

    def encode_after(self, before: str, text: str) -> list[int]:
        """Encode a text that follows another one. Alone, Llama-2's tokenizer would put a space before it."""
        start = self.tokenizer.encode(before, add_special_tokens=False)
        ids = self.tokenizer.encode(before + text, add_special_tokens=False)
        if ids[: len(start)] == start:
            return ids[len(start) :]
        return self.tokenizer.encode(text, add_special_tokens=False)  # A token contains parts of both texts.

    def render(self, replies: list[tuple[str, str]], follows_prompt=False) -> list[str]:
        """Render messages (role, content) that follow an assistant's message, or the prompt.

        Returns the template's texts and the contents by turns: before, content, between, content, behind.
        """
        start = ANSWER
        ended = ""
        if follows_prompt:  # Its last message has ended.
            start = QUESTION
            ended = self.end_of_question()
        marked = [(role, CONTENT) for role, _ in replies]
        framed = self.written_after(start, marked)
        frames = framed.removeprefix(ended).split(CONTENT)
        role, content = replies[-1]
        if len(frames) != len(replies) + 1:
            raise ValueError(
                f"reply: the chat template ignores messages with the role {role!r}; pass a "
                "role that the template knows, such as role='user'"
            )
        texts = [frames[0]]
        for number, (role, content) in enumerate(replies):
            given = list(marked)
            given[number] = role, content
            whole = self.written_after(start, given).removeprefix(ended)
            before = CONTENT.join(frames[: number + 1])
            behind = CONTENT.join(frames[number + 1 :])
            found = whole.removeprefix(before).removesuffix(behind)
            if before + found + behind != whole or not framed.startswith(ended):
                raise ValueError(f"reply: the chat template alters {content!r:.60}; call insert() instead")
            texts += [found, frames[number + 1]]
        return texts

    def written_after(self, start, messages, opens=True) -> str:
        """Render these messages (role, content) after a question or its answer, and return what follows it.

        opens: Whether the template then opens the assistant's next message.
        """
        given = [{"role": "user", "content": QUESTION}]
        if start == ANSWER:
            given.append({"role": "assistant", "content": ANSWER})
        for role, content in messages:
            given.append({"role": role, "content": content})
        role = given[-1]["role"]
        options = self.template_options | {"add_generation_prompt": opens}
        try:
            text = self.tokenizer.apply_chat_template(given, tokenize=False, **options)
        except Exception as error:  # A template is a program and may raise anything.
            raise ValueError(
                f"reply: the chat template rejects a message with the role {role!r} here "
                f"({error}); pass a role that the template accepts, such as role='user' after "
                "the policy's message, or join successive messages"
            ) from error
        _, found, after = text.partition(start)
        if not found:
            raise ValueError(
                "reply: the chat template drops the message before the reply; call insert() instead"
            )
        return after

    def without_end(self, texts: list[str], end: str) -> str:
        """Return the first text of `render` without the end of the policy's message, which has been written.

        The policy may have written another end token than the template, as in "<|eom_id|>" for "<|eot_id|>".
        """
        ends = [end]
        # Earlier messages may end differently from the last one, but then as the reply does.
        for after in (self.written_after(ANSWER, [], opens=False), texts[-1]):
            match = self.added.match(after.lstrip())
            if not match:
                break
            ends.append(match[0])
        rest = texts[0].lstrip()
        for end in ends:
            if end and rest.startswith(end):
                return rest.removeprefix(end)
        return texts[0]

    def end_of_question(self) -> str:
        """Return what follows a question before the next message. Phi-3's template may add an `eos_token`."""
        ended = self.written_after(QUESTION, [], opens=False)
        if not self.written_after(QUESTION, []).startswith(ended):
            ended = ended.removesuffix(self.tokenizer.eos_token or "")
        return ended

    def without_opening(self, prompt_ids: list[int]) -> list[int]:
        """Return a prompt without the opening of the policy's message, so that other messages can follow."""
        ended = self.end_of_question()
        opening = self.encode(self.written_after(QUESTION, []).removeprefix(ended))
        kept = len(prompt_ids) - len(opening)
        if prompt_ids[kept:] != opening:
            raise ValueError(
                "reply: the prompt does not end as the chat template opens a message; put the "
                "first message into the row's prompt"
            )
        return prompt_ids[:kept]

    def roll_out(
        self,
        groups: list[list[Sample]],
        *,
        max_response_length,
        temperature,
        top_p=1.0,
        eos_ids,
        seed,
        rollout_batch_size,
        step=0,
        split="train",
        model=None,
        servers=None,
        on_finished=lambda sample: None,
        stop=threading.Event(),
    ):
        """Call the rollout function for each sample of these groups, and fill in the samples.

        Args:
            seed: Determines what is sampled from `model`, and, with `split`, the seeds of the groups.
            split: "train" or "val". Groups of an evaluation never have the seeds of a training step.
            model: The policy's model, which this thread samples from; None if `servers` is given.
            servers: The PolicyServers to sample from.
            on_finished: Called in this thread with each sample that has ended.
            stop: If another thread sets this event, the rollouts end with a RuntimeError.

        Raises:
            RuntimeError: The servers fail, `stop` was set, or the function cancelled tasks of the run.
        """
        options = dict(temperature=temperature, top_p=top_p, eos_ids=eos_ids)
        sampling = sampling_parameters(**options)
        options |= {"decode": self.decode, "rollout_batch_size": rollout_batch_size}
        wave = Wave(self, max_response_length, eos_ids, servers, sampling, rollout_batch_size)
        wave.arrange(groups, f"{split}/{seed}", step)
        ending = asyncio.run_coroutine_threadsafe(wave.run(), self.loop)
        ending.add_done_callback(lambda _: wave.events.put(("end", None)))
        try:
            for number, turns in enumerate(rounds(wave.events, servers, stop, on_finished)):
                round_seed = seed  # The first round samples like a run without --rollout-fn.
                if number:
                    round_seed = Random(f"{seed}/round {number}").getrandbits(32)
                results = sample_round(model, turns, seed=round_seed, **options)
                self.loop.call_soon_threadsafe(deliver, turns, results)
            ending.result()
        except CancelledError:  # asyncio.all_tasks() contains the tasks of all rollouts.
            raise RuntimeError(
                f"--rollout-fn: the function in {self.file} cancelled tasks of the run; cancel only tasks "
                "that the function started"
            ) from None
        finally:
            ending.cancel()


@dataclass
class Wave:
    """The trajectories that are rolled out together."""

    runner: Rollouts
    max_response_length: int
    eos_ids: set[int]
    servers: object | None
    sampling: dict  # The sampling parameters, which all requests share.
    rollout_batch_size: int
    events: queue.SimpleQueue = field(default_factory=queue.SimpleQueue)  # roll_out reads these events.
    trajectories: dict = field(default_factory=dict)  # trajectory -> arguments of its call
    waiting: dict[int, TurnRequest] = field(default_factory=dict)  # The next round will sample these.
    requests: dict[int, asyncio.Task] = field(default_factory=dict)  # The last request of each trajectory.
    stalled_s: float = 0.0  # Seconds since the last change of `waiting`.
    unfinished: int = 0
    tasks: asyncio.TaskGroup | None = None
    session: object | None = None  # The HTTP session with the servers.

    def arrange(self, groups, seed, step):
        """Create a trajectory for each sample, and the arguments of its call."""
        for group_number, group in enumerate(groups):
            group_seed = Random(f"{seed}/{group_number}").getrandbits(31)
            for number, sample in enumerate(group):
                sample.seed = group_seed
                trajectory = Trajectory(sample, len(self.trajectories), number, self)
                row = sample.row
                given = self.runner.models | {
                    "prompt": row["prompt"],
                    "ground_truth": row["reward_model"]["ground_truth"],
                    "extra_info": row.get("extra_info") or {},
                    "data_source": row["data_source"],
                    "step": step,
                }
                arguments = {name: given[name] for name in self.runner.names} | self.runner.settings
                # All calls share the settings, and the samples of a group share a row, so copy both.
                self.trajectories[trajectory] = copy.deepcopy(arguments) | {"trajectory": trajectory}
        self.unfinished = len(self.trajectories)

    async def run(self):
        """Call the function for all samples. Raises RuntimeError if the policy's servers fail."""
        session = contextlib.nullcontext()
        if self.servers:
            session = open_session(self.servers, self.rollout_batch_size)
        try:
            async with session as self.session, asyncio.TaskGroup() as self.tasks:
                calls = [self.tasks.create_task(self.one(*call)) for call in self.trajectories.items()]
                clock = self.tasks.create_task(self.count_seconds())
                await asyncio.wait(calls)
                clock.cancel()
        except ExceptionGroup as errors:
            raise errors.exceptions[0] from None

    async def one(self, trajectory, arguments):
        """Call the function in a separate task, so that a call that never ends cannot hold up the run."""
        trajectory._expired = asyncio.get_running_loop().create_future()
        trajectory._working_since = time.monotonic()
        task = trajectory._task = asyncio.create_task(self.call(arguments))
        self.runner.running.add(task)
        task.add_done_callback(self.runner.running.discard)
        try:
            await asyncio.wait({task, trajectory._expired}, return_when=asyncio.FIRST_COMPLETED)
            trajectory._close(task)
        finally:
            # asyncio would print exceptions that nobody retrieves.
            task.add_done_callback(lambda task: task.cancelled() or task.exception())
            task.cancel()
        left = self.waiting.pop(trajectory._place, None)
        if left:  # A task that the function started is still waiting for the policy.
            left.answer.cancel()
        request = self.requests.pop(trajectory._place, None)
        if request:
            request.cancel()
        self.unfinished -= 1
        self.events.put(("finished", trajectory._sample))
        self.begin_round()

    async def call(self, arguments):
        await self.runner.function(**arguments)

    async def count_seconds(self):
        """End the calls that take too long.

        While a call blocks the event loop, at most two ticks count, because all other calls are blocked too.
        """
        last = time.monotonic()
        while True:
            await asyncio.sleep(TICK_S)
            now = time.monotonic()
            passed = min(now - last, 2 * TICK_S)
            last = now
            self.stalled_s += passed
            if self.waiting and self.stalled_s > STALLED_S:
                self.stalled_s = 0.0
                self.report_locks()
            for trajectory in self.trajectories:
                if trajectory._working_since is None:
                    continue
                trajectory._left -= passed
                if trajectory._left <= 0 and not trajectory._expired.done():
                    trajectory._expired.set_result(None)

    def report_locks(self):
        """Print where functions wait for locks if that is all that the next round waits for."""
        lines = Counter()
        for trajectory in self.trajectories:
            if trajectory._place not in self.waiting and not trajectory._is_closed:
                line, is_lock = line_of(trajectory._task, self.runner.file)
                if not is_lock:
                    return
                lines[line] += 1
        for line, count in lines.items():
            if line not in self.runner.printed:
                self.runner.printed.add(line)
                print(
                    "--rollout-fn: with --rollout hf, turns begin once all functions await generate(), "
                    f"but {count} wait for a lock at {line} while {len(self.waiting)} await generate(); "
                    "do not hold a lock or semaphore around generate()"
                )

    async def ask_servers(self, turn: TurnRequest):
        request = self.sampling | {"prompt": turn.ids, "max_tokens": turn.limit}
        if turn.stop:
            request["stop"] = turn.stop
        request["stop_token_ids"] = sorted({*self.eos_ids, *turn.stop_ids})
        headers = {"X-Session-Id": turn.session_id}
        # In a task of the group, a failure of the servers ends the run even if the function catches it.
        task = self.tasks.create_task(request_completion(self.session, self.servers, request, headers))
        self.requests[turn.place] = task
        choice = await task
        return choice.token_ids, choice.logprobs.token_logprobs

    async def ask(self, turn: TurnRequest):
        """Sample a turn on the servers, or in the next round. Returns token ids and log-probabilities."""
        if self.servers:
            return await self.ask_servers(turn)
        turn.answer = asyncio.get_running_loop().create_future()
        self.waiting[turn.place] = turn
        self.stalled_s = 0.0
        self.begin_round()
        try:
            return await turn.answer
        finally:
            self.waiting.pop(turn.place, None)  # The function may have stopped waiting for this turn.

    def begin_round(self):
        """Start a round once all unfinished trajectories are waiting. Turns are in the samples' order."""
        if self.waiting and len(self.waiting) == self.unfinished:
            self.events.put(("round", [self.waiting[place] for place in sorted(self.waiting)]))
            self.waiting = {}


def rounds(events: queue.SimpleQueue, servers, stop: threading.Event, on_finished: Callable):
    """Yield the turns of each round that this process has to sample, until all rollouts have ended.

    Args:
        events: The events of a Wave.
        servers: The PolicyServers, or None. They and `stop` are checked at each event, or once a second.
        stop: An event that ends the rollouts with a RuntimeError.
        on_finished: Called with each sample that has ended.
    """
    while True:
        check_running(servers, stop)
        try:
            kind, value = events.get(timeout=1.0)
        except queue.Empty:
            continue
        if kind == "finished":
            on_finished(value)
        elif kind == "round":
            yield value
        else:
            return


def deliver(turns, results):
    for turn, result in zip(turns, results):
        if not turn.answer.done():  # The function may have stopped waiting for this turn.
            turn.answer.set_result(result)


def sample_round(model, turns: list[TurnRequest], decode, **options) -> list[tuple[list[int], list[float]]]:
    """Sample one turn for each of these requests in this process. Returns token ids and log-probabilities."""
    samples = []
    for turn in turns:
        samples.append(Sample({}, turn.ids))
    turn_of = dict(zip(map(id, samples), turns))

    def is_done(sample):
        turn = turn_of[id(sample)]
        if len(sample.response_ids) >= turn.limit or sample.response_ids[-1] in turn.stop_ids:
            return True
        if not turn.stop:
            return False
        longest = max(len(word.encode()) for word in turn.stop)
        tail = decode(sample.response_ids[-longest - 8 :])  # Several tokens may form one character.
        return any(word in tail for word in turn.stop)

    limit = max(turn.limit for turn in turns)
    rollout_hf(model, samples, max_response_length=limit, is_done=is_done, **options)
    return [(sample.response_ids, sample.rollout_logprobs) for sample in samples]
