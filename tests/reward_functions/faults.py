"""Reward functions that misbehave as the response tells them to. test_reward_loop.py uses them."""

import asyncio
import collections.abc
import contextlib
import ctypes
import json
import os
import resource
import signal
import sys
import threading
import time
from typing import Literal

import helper_beside  # The loop must make this file importable, which is in the same folder.

circular = []
circular.append(circular)

RETURNS = {
    "one": 1.0,
    "integer": 2,
    "true": True,
    "nan": float("nan"),
    "infinite": float("inf"),
    "own_penalty": {"score": 1.0, "overlong_penalty": -0.5},
    "none": None,
    "string": "1.0",
    "list": [1.0],
    "no_score": {"acc": True},
    "score_none": {"score": None, "acc": True},
    "score_string": {"score": "1"},
    "acc": {"score": 1.0, "acc": True},
    "nan_beside": {"score": 1.0, "entropy": float("nan")},
    "other_keys": {"score": 0.5, "pred": "x"},
    "object": {"score": 1.0, "thing": threading.Lock()},
    "circular": {"score": 1.0, "thing": circular},
}


class Unprintable(Exception):
    def __str__(self):
        raise AttributeError("as aiohttp's errors do that were made without a request")


def act(response, ground_truth=None, extra_info=None):
    """Do what sync and async functions have in common."""
    if response == "raise":
        raise KeyError("no such thing")
    if response == "terminal":
        raise ValueError("cannot read \x1b[2J\nstep 9/10 reward 1.000")
    if response == "unprintable":
        raise Unprintable
    if response == "sys_exit":
        sys.exit(3)
    if response == "os_exit":
        os._exit(1)
    if response == "block":
        time.sleep(3600)
    if response == "block_all_threads":  # as long regular expressions do
        ctypes.PyDLL(None).sleep(3600)  # does not release the interpreter
    if response == "library":
        json.loads("{")
    if response == "helper":
        return helper_beside.answer()
    if response == "numpy":
        import numpy as np

        return {"score": np.float32(0.5), "array": np.arange(3), "flag": np.bool_(True)}
    if response == "pid":
        return {"score": 1.0, "pid": os.getpid()}
    if response == "environment":
        files, most_files = resource.getrlimit(resource.RLIMIT_NOFILE)
        key = os.environ.get("ROUTER_API_KEY")
        return {"score": 1.0, "key": key, "files": files, "most_files": most_files}
    if response == "mutates":
        seen = extra_info["list"] + [ground_truth]
        extra_info["list"].append("mutated")
        return {"score": 1.0, "seen": seen}
    if response in ("digits", "depth"):
        return {"score": 1.0, "thing": beyond_limits(response)}
    return RETURNS[response]


def sync_fault(data_source, solution_str, ground_truth, extra_info):
    if solution_str == "own_loop":

        async def answer():
            await asyncio.sleep(0)
            return 1.0

        return asyncio.run(answer())
    return act(solution_str, ground_truth, extra_info)


def beyond_limits(kind):
    """Return a value that can be read only without Python's limits."""
    sys.set_int_max_str_digits(0)
    sys.setrecursionlimit(100_000)
    if kind == "digits":
        return 10**16_901
    nested = []
    for _ in range(5000):
        nested = [nested]
    return nested


async def async_fault(data_source, solution_str, ground_truth, extra_info):
    if solution_str == "cancel_all_tasks":  # also those of the worker, and those that have not begun
        for task in asyncio.all_tasks():
            task.cancel()
    await asyncio.sleep(0)
    if solution_str == "hang":
        await asyncio.Event().wait()
    if solution_str in ("one_later", "cancel_all_tasks"):
        await asyncio.sleep(0.3)
        return 1.0
    if solution_str == "hang_stubbornly":  # it cannot be cancelled
        while True:
            try:
                await asyncio.sleep(3600)
            except asyncio.CancelledError:
                pass
    if solution_str == "block_in_a_task":

        async def block():
            time.sleep(3600)

        await asyncio.gather(block())
    if solution_str == "exit_in_a_task":

        async def leave():
            sys.exit(3)

        await asyncio.gather(leave())
    return act(solution_str)


def forks(data_source, solution_str, ground_truth, extra_info):
    """Fork children that return, raise or exit as the response says.

    With "noise", write to all open files.
    """
    if solution_str.startswith("child") and os.fork() == 0:
        leave(solution_str)
        return 99.0
    if solution_str.startswith("noise"):
        for fd in map(int, os.listdir("/proc/self/fd")):
            with contextlib.suppress(OSError):
                os.write(fd, solution_str.removeprefix("noise").encode())
    return float(ground_truth)


async def forks_async(data_source, solution_str, ground_truth, extra_info):
    if solution_str.startswith("child") and os.fork() == 0:
        leave(solution_str)
        return 99.0
    return float(ground_truth)


def leave(response):
    if response == "child raises":
        raise RuntimeError("in a child")
    if response == "child exits":
        sys.exit(0)
    if response == "child ends":
        os._exit(0)
    if response == "child writes":
        for fd in map(int, os.listdir("/proc/self/fd")):
            with contextlib.suppress(OSError):
                os.write(fd, b'0 [[[99.0, {}, "ok"]], false]\n')


def names_columns(data_source, solution_str, ground_truth, extra_info, prompt, response_length=None):
    return {"score": 1.0, "seen": [prompt, response_length]}


def returns_an_exception(data_source, solution_str, ground_truth, extra_info):
    from aiohttp import ClientResponseError, RequestInfo
    from multidict import CIMultiDict
    from yarl import URL

    request = RequestInfo(
        URL("http://h"), "POST", CIMultiDict(Authorization="Bearer s3cret"), URL("http://h")
    )
    return {"score": None, "why": ClientResponseError(request, (), status=401)}


def has_settings(
    data_source, solution_str, ground_truth, extra_info, verifier: Literal["rule", "other"] = "rule"
):
    return 1.0


def has_types(
    data_source,
    solution_str,
    ground_truth,
    extra_info,
    weight: float = 1.0,
    count: int = 1,
    marks: dict = None,
    names: collections.abc.Sequence = (),
    limit=5,
    strict=True,
    free=None,
):
    return 1.0


def sets_an_alarm(data_source, solution_str, ground_truth, extra_info):
    """Set an alarm as some time limits do, and never cancel it.

    A long sample then gets the alarm of a short one.
    """
    if solution_str == "0.3":
        signal.signal(signal.SIGALRM, ring)
        signal.setitimer(signal.ITIMER_REAL, 0.3)
    else:
        time.sleep(float(solution_str))
    return 1.0


def ring(*_):
    raise TimeoutError("the alarm rang")


def waits_until_released(data_source, solution_str, ground_truth, extra_info, folder):
    open(os.path.join(folder, str(os.getpid())), "w").close()
    while not os.path.exists(os.path.join(folder, "released")):
        time.sleep(0.02)
    return 1.0


def of_trl(prompts, completions, **kwargs):
    return [1.0] * len(completions)


def of_math_dapo(solution_str, ground_truth, strict_box_verify=False, pause_tokens_index=None):
    return {"score": 1.0, "acc": True}


def with_marks(data_source, solution_str, ground_truth, extra_info, folder):
    """Write a file named after the process, then take a while."""
    open(os.path.join(folder, str(os.getpid())), "w").close()
    time.sleep(float(solution_str))
    return float(ground_truth)


async def async_with_marks(data_source, solution_str, ground_truth, extra_info, folder):
    open(os.path.join(folder, str(os.getpid())), "w").close()
    await asyncio.sleep(float(solution_str))
    return float(ground_truth)


def takes_step(data_source, solution_str, ground_truth, extra_info, step=None):
    time.sleep(float(solution_str))
    return {"score": 1.0, "seen": [step, extra_info.get("step")]}


async def async_takes_step(data_source, solution_str, ground_truth, extra_info, step=None):
    await asyncio.sleep(float(solution_str))
    return {"score": 1.0, "seen": [step, extra_info.get("step")]}


def takes_anything(solution_str, extra_info, **others):
    time.sleep(float(solution_str))
    return {"score": 1.0, "seen": [others.get("step"), extra_info.get("step")]}


def takes_no_extra_info(data_source, solution_str, ground_truth):
    return 1.0


loops = set()


def looks_sync(*args, **kwargs):
    """Use a decorator around an async function, which may keep objects of a particular event loop."""

    async def answer():
        loops.add(id(asyncio.get_running_loop()))
        await asyncio.sleep(0)
        return {"score": 1.0, "loops": len(loops)}

    return answer()


def computes(data_source, solution_str, ground_truth, extra_info):
    """Use a core for this many seconds."""
    end = time.thread_time() + float(solution_str)
    while time.thread_time() < end:
        pass
    return {"score": 1.0, "pid": os.getpid()}


async def blocks(data_source, solution_str, ground_truth, extra_info):
    """Wait for this many seconds.

    A positive number waits correctly, and a negative one blocks the event loop.
    """
    if float(solution_str) < 0:
        time.sleep(-float(solution_str))
    else:
        await asyncio.sleep(float(solution_str))
    return 1.0


def stop_worker(data_source, solution_str, ground_truth, extra_info):
    """Stop the worker of this grading process for a while, as a machine with too many processes does."""
    os.kill(os.getppid(), signal.SIGSTOP)
    time.sleep(1.5)
    os.kill(os.getppid(), signal.SIGCONT)
    return 1.0
