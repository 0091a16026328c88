"""Functions that see all responses to a prompt, and do as the responses say; used by test_reward_loop.py."""

import asyncio
import os
import time


def act(solution_strs):
    if "raise" in solution_strs:
        raise KeyError("no such thing")
    if "os_exit" in solution_strs:
        os._exit(1)
    if "hang" in solution_strs:
        time.sleep(3600)
    if "number" in solution_strs:
        return 1.0
    if "short" in solution_strs:
        return [1.0] * (len(solution_strs) - 1)
    if "array" in solution_strs:
        import numpy as np

        return np.arange(len(solution_strs)) / 2
    scores = {"none": None, "nan": float("nan"), "dict": {"score": 1.0, "acc": True}}
    return [scores.get(text, len(solution_strs)) for text in solution_strs]


def sync_group(data_source, solution_strs, ground_truth, extra_info):
    return act(solution_strs)


async def async_group(data_source, solution_strs, ground_truth, extra_info):
    if "hang" in solution_strs:
        await asyncio.Event().wait()
    return act(solution_strs)


def sees(data_source, solution_strs, ground_truth, extra_info, prompt, response_length, step=None, **settings):
    """Tells each response what the call got."""
    seen = [data_source, solution_strs, ground_truth, extra_info, prompt, response_length, step, settings]
    extra_info["changed"] = "by the function"
    return [{"score": float(text), "seen": seen} for text in solution_strs]


async def logs_calls(data_source, solution_strs, ground_truth, extra_info, file, step=None):
    """Notes each call; a group's score is its size."""
    with open(file, "a") as log:
        log.write(f"{time.time()} {step} {extra_info['index']} {extra_info['split']} {len(solution_strs)}\n")
    return [{"score": float(len(text)), "acc": len(text) > 5, "group_size": len(solution_strs)}
            for text in solution_strs]  # fmt: skip


def both(data_source, solution_str, solution_strs, ground_truth, extra_info):
    return []


def of_one(data_source, solution_str, ground_truth, extra_info):
    return 1.0
