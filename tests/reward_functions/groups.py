"""Functions that see all responses to a prompt and do what the responses say."""

import asyncio
import os
import time

import numpy as np


def act(solution_strs):
    if "raise" in solution_strs:
        raise KeyError("no such thing")
    if "os_exit" in solution_strs:
        os._exit(1)
    if "number" in solution_strs:
        return 1.0
    if "nothing" in solution_strs:
        return None
    if "by_place" in solution_strs:
        return dict(enumerate([0.5] * len(solution_strs)))
    if "set" in solution_strs:
        return {float(number) for number in range(len(solution_strs))}
    if "short" in solution_strs:
        return [1.0] * (len(solution_strs) - 1)
    if "array" in solution_strs:
        return np.arange(len(solution_strs)) / 2
    scores = {"none": None, "nan": float("nan"), "dict": {"score": 1.0, "acc": True}}
    return [scores.get(text, float(len(solution_strs))) for text in solution_strs]


def sync_group(data_source, solution_strs, ground_truth, extra_info):
    if "hang" in solution_strs:
        time.sleep(3600)
    return act(solution_strs)


async def async_group(data_source, solution_strs, ground_truth, extra_info):
    if "hang" in solution_strs:
        await asyncio.Event().wait()
    return act(solution_strs)


def sees(data_source, solution_strs, ground_truth, extra_info, prompt, response_length=None, step=None):
    """Return what the call got, for each response."""
    seen = [data_source, solution_strs, ground_truth, dict(extra_info), prompt, response_length, step]
    extra_info["changed"] = True
    return [{"score": float(len(text)), "seen": seen} for text in solution_strs]


def against_the_mean(data_source, solution_strs, ground_truth, extra_info):
    """Score the number of sevens minus the group's mean, and return the group's texts as well."""
    sevens = [text.count("7") for text in solution_strs]
    mean = sum(sevens) / len(sevens)
    return [{"score": own - mean, "acc": own > 0, "group_texts": sorted(solution_strs)} for own in sevens]


def notes_calls(data_source, solution_strs, ground_truth, extra_info, file):
    """Record each call. While `file`.down exists, "raise" raises an error and "none" gets no verdict."""
    with open(file, "a") as log:
        log.write(" ".join(solution_strs) + "\n")
    down = os.path.exists(f"{file}.down")
    if down and "raise" in solution_strs:
        raise RuntimeError("the judge is down")
    return [None if down and text == "none" else float(len(solution_strs)) for text in solution_strs]


def takes_both(data_source, solution_str, solution_strs, ground_truth, extra_info):
    return []


async def passes_settings_on(data_source, solution_str, ground_truth, extra_info, **settings):
    return {"score": 1.0, "settings": sorted(settings)}
