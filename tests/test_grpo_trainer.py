"""The trainer: what it rejects, and whole runs on a tiny model, including runs that are stopped, killed or
fail.
"""

import contextlib
import copy
import dataclasses
import functools
import json
import math
import multiprocessing
import os
import random
import re
import signal
import statistics
import subprocess
import sys
import threading
import time
from collections import Counter, defaultdict
from pathlib import Path
from types import SimpleNamespace

import aiohttp
import huggingface_hub
import psutil
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
import transformers
from transformers import AutoConfig, AutoModelForCausalLM

import algorithm
import forked
import grpo_trainer
import reward_loop
import run_folder
from toy import toy_world, warm_start
from played import RewardsHere, lines_of, rows, server, toy_config, without_ray
from policy import Policy, RanksLost, Sample
from run import Interrupts, Run
from command_line import GROUPS, help_texts
from tools.plan_run import estimate_memory, report
from tiny import config_of, terms, worked

# ------------------------------------------------------------------------------------------------------------
# - small parts


def test_every_epoch_is_a_shuffle_and_a_draw_depends_on_its_place_alone():
    rows = list(range(10))
    flat = grpo_trainer.draw(rows, 0, 20, seed=0)
    assert sorted(flat[:10]) == rows and sorted(flat[10:]) == rows and flat[:10] != flat[10:]
    assert grpo_trainer.draw(rows, 8, 7, seed=0) == flat[8:15]
    assert grpo_trainer.draw(rows, 17, 6, seed=0) == grpo_trainer.draw(rows, 0, 30, seed=0)[17:23]
    assert grpo_trainer.draw(rows, 0, 20, seed=1) != flat


def test_a_sample_is_scored_with_its_row_text_length_and_turns():
    sample = Sample({"prompt": "?"}, [1, 2], [5, 6, 7], text="so", info={"seen": 1})
    row = {"prompt": "?", "response": "so", "response_length": 3, "rollout_info": {"seen": 1}, "step": 4}
    assert grpo_trainer.scoring_row(sample, 4) == row | {"turns": [{"who": "policy", "text": "so"}]}
    sample.turns = [{"who": "policy", "text": "s", "tokens": 2}, {"who": "tool", "text": "o", "tokens": 1}]
    assert grpo_trainer.scoring_row(sample, 4) == row | {"turns": sample.turns}


@pytest.mark.parametrize("mode", ["standalone", "colocate"])
@pytest.mark.parametrize("buffer", [0, 4])
def test_the_reward_is_the_score_plus_the_length_penalty(monkeypatch, tmp_path, mode, buffer):
    """Also in evaluations. A sample without a verdict has a penalty, but no reward."""
    without_ray(monkeypatch)
    calls = iter(range(1000))

    def rollout_hf(model, samples, *, on_finished, **options):
        for sample in samples:
            length = 6 + next(calls) % 3
            sample.response_ids, sample.rollout_logprobs = [5] * length, [-1.0] * length
            on_finished(sample)

    def score_batch(self, rows):
        return [self.submit(row).result() for row in rows]

    monkeypatch.setattr(grpo_trainer, "rollout_hf", rollout_hf)
    monkeypatch.setattr(RewardsHere, "score_batch", score_batch)
    score = "dict(score=[1.0, None, -1.0][response_length % 3], overlong='mine')"
    parameters = "data_source, solution_str, ground_truth, extra_info, response_length"
    (tmp_path / "own.py").write_text(f"def reward({parameters}):\n    return {score}\n")
    options = dict(max_response_length=8, overlong_buffer=buffer, reward_fn=f"{tmp_path}/own.py:reward")
    options |= dict(total_steps=1, reward_mode=mode, max_no_verdict_rate=1.0, max_logprob_diff=1e9)
    options |= dict(val_file=(rows(tmp_path / "val.jsonl", 3, "test"),), val_n=2, lr_warmup_steps=0)
    grpo_trainer.train(toy_config(tmp_path, **options))
    lines = lines_of(tmp_path / "run", "samples.jsonl")
    assert {line["split"] for line in lines} == {"train", "val"}
    found = {(line["response_length"], line["reward_score"]) for line in lines}
    infos = {line["response_length"]: line["reward_extra_info"] for line in lines}
    if buffer:
        assert found == {(6, 0.5), (7, None), (8, -2.0)}
        assert infos[7] == {"score": None, "overlong": True, "overlong_penalty": -0.75}
    else:
        assert found == {(6, 1.0), (7, None), (8, -1.0)}
        assert infos[7] == {"score": None, "overlong": "mine"}


def test_every_round_has_other_random_numbers_and_every_evaluation_the_same(monkeypatch, tmp_path):
    """No answer is right, so that every step with dynamic sampling has three rounds."""
    without_ray(monkeypatch)
    asked = []

    def rollout_hf(model, samples, *, seed, temperature, top_p, on_finished, **options):
        asked.append((seed, temperature, top_p, len(samples)))
        for sample in samples:
            sample.response_ids, sample.rollout_logprobs = [5], [-1.0]
            on_finished(sample)

    monkeypatch.setattr(grpo_trainer, "rollout_hf", rollout_hf)
    monkeypatch.setattr(Policy, "update", lambda policy, *_: {"actor/updates": 0})
    seeds = []
    for seed in (0, 1):
        folder = tmp_path / str(seed)
        folder.mkdir()
        options = dict(dynamic_sampling=True, max_refills=2, train_batch_size=2, group_size=3, seed=seed)
        options |= dict(val_every=1, val_n=2, val_temperature=0.6, val_top_p=0.8, val_greedy=True)
        options |= dict(temperature=1.1, mini_batch_size=2, val_file=(rows(folder / "val.jsonl", 5, "test"),))
        grpo_trainer.train(toy_config(folder, **options))
        evaluation = [(seed, 0.6, 0.8, 10), (seed, 0.0, 0.8, 5)]
        training = [one for one in asked if one not in evaluation]
        assert asked == [*evaluation, *training[:3], *evaluation, *training[3:], *evaluation]
        assert [one[1:] for one in training] == [(1.1, 1.0, 6)] * 6
        lines = lines_of(folder / "run")
        assert [line["dynamic/prompts"] for line in lines if "dynamic/prompts" in line] == [6, 6]
        seeds += [one[0] for one in training]
        asked.clear()
    assert len(set(seeds)) == 12


def scored(score, penalty=0.0, **info):
    reward = None if score is None else score + penalty
    info = {"score": score} | info
    if penalty:
        info["overlong_penalty"] = penalty
    result = {"reward_score": reward, "reward_extra_info": info, "status": "ok"}
    return Sample({}, [], [6], result=result)


def teaches(group, **changes):
    """Return whether dynamic sampling keeps this group."""
    group = [dataclasses.replace(sample) for sample in group]
    kept = algorithm.set_advantages([group], config_of(**changes), decode, drop_zero_advantages=True)
    assert kept or [sample.advantage for sample in group] == [None] * len(group)
    return kept == [group]


def test_a_group_teaches_where_scores_differ():
    good, bad, silent = scored(1.0, acc=True), scored(-1.0, acc=False), scored(None, acc=True)
    assert teaches([good, bad, silent])
    assert not teaches([good, good, silent]) and not teaches([bad, bad]) and not teaches([good, silent])
    assert teaches([good, scored(0.98, acc=True)], advantage="dr_grpo")  # A small difference counts.
    # The length penalty does not matter.
    late = [good, scored(1.0, penalty=-0.5, acc=True)]
    assert not teaches(late)
    # Without dynamic sampling, the policy learns to write shorter responses.
    assert algorithm.set_advantages([late], config_of(), decode) == [late]
    assert late[0].advantage > 0 > late[1].advantage


def judged(kind):
    """Return a sample that was judged (or not), or whose rollout failed."""
    info = {"genrm_status": "skipped", "acc": False}
    score, status = -1.0, "ok"
    if kind == "right":
        score, info = 1.0, {"genrm_status": "ok", "acc": True}
    elif kind == "down":
        score, info, status = None, {"genrm_status": "timeout", "acc": True}, "no_verdict"
    elif kind == "failed":
        score, info, status = None, {"error": "LookupError: no such shop"}, "error"
    result = {"reward_score": score, "reward_extra_info": info, "status": status}
    return Sample({}, [5], [6], result=result, failure="error" * (kind == "failed"))


DOWN = {"down": 4, "wrong": 4}  # a step of 8 samples without a judge


@pytest.mark.parametrize(
    "steps, message",
    [
        # A tool that hangs, and a judge that is late once, cost a sample and not the run.
        ([{"wrong": 23, "failed": 1}], None),
        ([{"wrong": 63, "failed": 1}], None),
        ([{"wrong": 127, "down": 1}], None),
        ([{"wrong": 7, "down": 1}] * 10, None),
        ([{"right": 12, "failed": 12}], None),  # half is not more than half
        ([{"right": 11, "failed": 13}], "step 1: 54% of the rollouts have failed .*no such shop"),
        ([{"failed": 8}], "step 1: 100% of the rollouts have failed"),
        # Failed rollouts need no verdict.
        ([{"right": 10, "down": 8, "wrong": 2, "failed": 12}], None),
        # The judge is down: for all samples that need it, for all samples of small steps, and for few.
        ([{"wrong": 86, "down": 14}], "step 1: 70% of the samples that needed a verdict have none"),
        ([{"right": 40}, {"down": 21, "right": 20}], "step 2: 51% of the samples that needed"),
        ([{"right": 8}, {"down": 8}], "step 2: 100% of the samples that needed"),
        ([{"right": 8}, DOWN, DOWN, DOWN], "step 4: 60% of the samples that needed"),
        ([{"right": 20}] + [{"wrong": 7, "down": 1}] * 11, "step 12: 55% of the samples that needed"),
        # Steps count together with those before them, wherever the judge fails.
        ([{"right": 10, "wrong": 30}] + [{"down": 10, "wrong": 30}] * 2, "step 3: 100% of the samples that"),
        ([{"right": 10, "wrong": 30}] * 4 + [{"down": 10, "wrong": 30}] * 2, "step 6: 100% of the samples"),
        ([{"right": 19, "wrong": 30}] + [{"wrong": 7, "down": 1}] * 11, "step 12: 55% of the samples that"),
        ([{"right": 10, "wrong": 30}, {"down": 10, "wrong": 30}] * 4, None),
    ],
)
@pytest.mark.parametrize("split", ["train", "val"])
def test_a_run_stops_for_many_failures_and_not_for_one(steps, message, split, monkeypatch):
    """Neither does an evaluation, which counts apart from training."""
    log = SimpleNamespace(samples=lambda *arguments: None, history=[{}])
    config = config_of(max_no_verdict_rate=0.5)
    run = SimpleNamespace(config=config, decode=decode, log=log, recent_verdicts=defaultdict(list))
    run.val_rows, run.first_step = [], 1
    monkeypatch.setattr(grpo_trainer, "roll_out", lambda *arguments: None)
    monkeypatch.setattr(grpo_trainer, "wait_for_rewards", lambda *arguments: groups)
    stopped = None
    for step, kinds in enumerate(steps, 1):
        run.step = step
        groups = [[judged(kind) for kind, count in kinds.items() for _ in range(count)]]
        try:
            if split == "train":
                grpo_trainer.compute_group_advantages(run, grpo_trainer.Batch(step, 1.0), groups)
            else:
                grpo_trainer.sample_validation(run, 1.0)
        except RuntimeError as error:
            stopped = str(error)
            break
    assert step == len(steps) and bool(stopped) == bool(message), stopped
    assert not message or re.match(message, stopped), stopped
    assert set(run.recent_verdicts) <= {split}
    # A resumed run repeats the step that stopped, which must not count twice.
    assert not stopped or step not in [counts["step"] for counts in run.recent_verdicts[split]]


def test_steps_that_need_no_verdict_are_not_kept():
    """In a run without a judge, the counts would otherwise grow with each step."""
    run = SimpleNamespace(config=config_of(), decode=decode, recent_verdicts=defaultdict(list), first_step=1)
    for step in range(1, 100):
        groups = [[judged("wrong") for _ in range(8)]]
        grpo_trainer.compute_group_advantages(run, grpo_trainer.Batch(step, 1.0), groups)
    assert [counts["step"] for counts in run.recent_verdicts["train"]] == [1, 2, 3, 4]


# --------------------------------------------------------------------------------------------------------
# whole runs (Ray)


REWARD = '''
import os, signal
def likes_sevens(data_source, solution_str, ground_truth, extra_info, limit=40, **_):
    """The share of sevens among what was written: a trivial task."""
    share = solution_str.count("7") / max(len(solution_str), 1)
    return {"score": share, "acc": share > 0.9, "pred": solution_str}
def silent(data_source, solution_str, ground_truth, extra_info, **_):
    return {"score": None, "why": "the judge sleeps"}
def by_index(data_source, solution_str, ground_truth, extra_info, **_):
    """Rows 0, 1, 6, 7 ... are always right, 2, 3, 8, 9 ... always wrong; the others by what was written."""
    acc = [True, False, len(solution_str) % 2 == 0][extra_info["index"] // 2 % 3]
    return {"score": 1.0 if acc else -1.0, "acc": acc}
def always_right(data_source, solution_str, ground_truth, extra_info, **_):
    return {"score": 1.0, "acc": True, "flawed_positive": None}
def compute_score_fapo(data_source, solution_str, ground_truth, extra_info, **_):
    raise RuntimeError("only the baseline was asked for")
def with_two_models(data_source, solution_str, ground_truth, extra_info, step, reward_router_addresses,
                    reward_model_tokenizer):
    messages = [{"role": "user", "content": solution_str}]
    tokens = len(reward_model_tokenizer.apply_chat_template(messages, tokenize=True))
    return {"score": float(step), "models": len(reward_router_addresses), "tokens": tokens}
def compute_score_baseline(data_source, solution_str, ground_truth, extra_info, **_):
    return {"score": 1.0, "acc": True, "flawed_positive": len(solution_str) % 2 == 0}
'''


@pytest.fixture(scope="module")
def workshop(tmp_path_factory, tokenizer, one_ray):
    """Yield a folder with a tiny model, training data and reward functions.

    Ray runs for all tests of this file.
    """
    folder = tmp_path_factory.mktemp("workshop")
    tiny = warm_start.new_model(len(tokenizer), seed=0)
    tiny.save_pretrained(folder / "model")
    tokenizer.save_pretrained(folder / "model")
    rng = random.Random(0)
    rows = [
        toy_world.policy_row(toy_world.random_problem(rng, toy_world.REMAINDER), "toy", "train", i)
        for i in range(32)
    ]
    pq.write_table(pa.Table.from_pylist(rows), folder / "train.parquet")
    pq.write_table(pa.Table.from_pylist(rows[:6]), folder / "val.parquet")
    (folder / "reward.py").write_text(REWARD)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(run_folder.Log, "plot", lambda self: None)  # takes half a second
        yield folder


@pytest.fixture
def rewards_here():
    """Compute rewards in the run's own process, for tests in which it does not matter where."""
    with pytest.MonkeyPatch.context() as patch:
        without_ray(patch)
        yield


DRAWS_CURVES = run_folder.Log.plot


def run_config(folder, name, **changes):
    defaults = dict(
        model=str(folder / "model"),
        train_file=str(folder / "train.parquet"),
        out_dir=str(folder / name),
        reward_fn=f"{folder}/reward.py:likes_sevens",
        total_steps=3,
        train_batch_size=4,
        mini_batch_size=2,
        group_size=4,
        max_response_length=8,
        overlong_buffer=0,
        lr=3e-3,
        lr_warmup_steps=1,
        weight_decay=0.0,
        val_every=0,
        num_threads=1,
        num_workers=1,
        sync_processes=1,
    )
    return grpo_trainer.Config(**(defaults | changes))


def without_times(metrics):
    return [
        {k: v for k, v in m.items() if not k.startswith(("time/", "perf/", "reward/seconds"))}
        for m in metrics
    ]


@pytest.mark.slow
@pytest.mark.parametrize("rollout", ["hf", "vllm"])
def test_learns_a_trivial_task(workshop, rollout):
    config = run_config(
        workshop,
        f"learns_{rollout}",
        rollout=rollout,
        rollout_cpus="0" if rollout == "vllm" else "",
        total_steps=16,
        lr=1e-2,
        max_idle_steps=0,  # it may learn everything
        train_batch_size=8,
        mini_batch_size=8,
        # Any seed works, also with vLLM.
        group_size=8,
        val_file=(str(workshop / "val.parquet"),),
        val_n=2,
        val_top_p=1.0,
        seed=-1,
    )
    grpo_trainer.train(config)
    metrics = lines_of(workshop / f"learns_{rollout}/metrics.jsonl")
    assert metrics[1]["reward/mean"] < 0.2 and metrics[-1]["reward/mean"] > 0.9
    assert metrics[-1]["val/toy/mean@2"] > metrics[0]["val/toy/mean@2"]
    assert {"val/toy/maj@2", "val/toy/pass@2"} <= set(metrics[-1])
    # The rollouts of every step used the current weights.
    assert max(m["rollout/logprob_diff"] for m in metrics[1:]) < 1e-4
    assert rollout == "hf" or all(0 < m["time/sync"] < m["time/step"] for m in metrics[1:])


@pytest.mark.slow
def test_a_run_leaves_what_it_promises_and_resumes_exactly(workshop, monkeypatch):
    monkeypatch.setattr(run_folder.Log, "plot", DRAWS_CURVES)
    whole = run_config(
        workshop,
        "whole",
        total_steps=4,
        val_file=(str(workshop / "val.parquet"),),
        val_every=2,
        val_greedy=True,
    )
    target = grpo_trainer.train(whole)
    folder = workshop / "whole"
    files = {"config.json", "metrics.jsonl", "samples.jsonl", "curves.png", "report.html", "checkpoints"}
    assert files <= {p.name for p in folder.iterdir()}
    assert json.loads((folder / "config.json").read_text())["lr"] == 3e-3
    metrics = lines_of(folder / "metrics.jsonl")
    assert [m["step"] for m in metrics] == [0, 1, 2, 3, 4]
    assert ["val/toy/mean@1" in m for m in metrics] == [True, False, True, False, True]
    expected = """
        reward/mean reward/no_verdict actor/entropy actor/grad_norm rollout/logprob_diff response_length/mean
        time/rollout time/reward_wait time/update time/step perf/tokens_per_s
    """
    # A step in which all rewards are equal has no gradient.
    assert set(expected.split()) <= set().union(*metrics[1:])
    sample = lines_of(folder / "samples.jsonl")[-1]
    assert {
        "step",
        "split",
        "group",
        "prompt",
        "response",
        "reward_score",
        "advantage",
        "status",
        "reward_extra_info",
    } <= set(sample)
    assert (folder / "curves.png").read_bytes()[:4] == b"\x89PNG"
    from transformers import AutoTokenizer

    trained = AutoModelForCausalLM.from_pretrained(target)
    assert AutoTokenizer.from_pretrained(target).chat_template

    part = run_config(workshop, "part", total_steps=2, val_file=whole.val_file, val_every=2, val_greedy=True)
    grpo_trainer.train(part)
    resumed = grpo_trainer.train(dataclasses.replace(part, total_steps=4, resume="auto"))
    assert grpo_trainer.train(dataclasses.replace(part, total_steps=4, resume="auto")) == resumed
    assert without_times(lines_of(workshop / "part/metrics.jsonl")) == without_times(metrics)
    again = AutoModelForCausalLM.from_pretrained(resumed)
    assert all(torch.equal(a, b) for a, b in zip(trained.parameters(), again.parameters()))


@pytest.mark.slow
def test_colocate_gives_the_same_run_as_standalone(workshop):
    for mode in ("standalone", "colocate"):  # with a seed such as `date +%s%N`
        grpo_trainer.train(run_config(workshop, mode, total_steps=2, reward_mode=mode, seed=10**18))
    first, second = (
        without_times(lines_of(workshop / mode / "metrics.jsonl")) for mode in ("standalone", "colocate")
    )
    assert first == second


@pytest.mark.slow
def test_a_function_of_groups_sees_those_that_the_advantage_is_made_of(workshop):
    """Test training, in which each prompt occurs twice per step, and evaluation, in both modes and with
    refills.
    """
    rows = pq.read_table(workshop / "train.parquet").slice(0, 2)
    pq.write_table(rows, workshop / "two.parquet")
    function = Path(__file__).parent / "reward_functions/groups.py:against_the_mean"
    options = dict(reward_fn=str(function), train_file=str(workshop / "two.parquet"), total_steps=1, val_n=2)
    options |= dict(val_file=(str(workshop / "two.parquet"),), samples_per_step=1000)
    options |= dict(dynamic_sampling=True, max_refills=1)
    metrics = {}
    for mode in ("standalone", "colocate"):
        folder = workshop / f"groups_{mode}"
        grpo_trainer.train(run_config(workshop, folder.name, reward_mode=mode, **options))
        metrics[mode], samples = lines_of(folder / "metrics.jsonl"), lines_of(folder / "samples.jsonl")
        assert metrics[mode][1]["reward/no_verdict"] == 0
        groups = {}
        for line in samples:
            groups.setdefault((line["step"], line["split"], line["group"]), []).append(line)
        assert len(groups) >= 4 + 2
        for (_, split, _), lines in groups.items():
            seen = lines[0]["reward_extra_info"]["group_texts"]
            assert all(line["reward_extra_info"]["group_texts"] == seen for line in lines)
            if split == "train":
                assert seen == sorted(line["response"] for line in lines)
            else:  # evaluations write the first sample of each group
                assert len(seen) == 2 and lines[0]["response"] in seen
    assert metrics["standalone"][0]["val/toy/pass@2"] == metrics["colocate"][0]["val/toy/pass@2"]


@pytest.mark.slow
def test_dynamic_sampling_refills_and_counts_what_it_keeps(workshop, rewards_here):
    options = dict(reward_fn=f"{workshop}/reward.py:by_index", dynamic_sampling=True, max_refills=100)
    options |= dict(total_steps=4, samples_per_step=1000)
    grpo_trainer.train(run_config(workshop, "dynamic", **options))
    metrics = lines_of(workshop / "dynamic/metrics.jsonl")[1:]
    for m in metrics:
        assert m["dynamic/kept"] == 4 and (m["dynamic/refills"] > 0) == (m["dynamic/prompts"] > 4)
        assert m["reward/groups_with_spread"] == pytest.approx(4 / m["dynamic/prompts"], rel=1e-5)
        assert m["actor/updates"] == 2  # two mini-batches of two prompts each
    assert sum(m["dynamic/prompts"] for m in metrics) >= 4 * 4 + 6
    samples = lines_of(workshop / "dynamic/samples.jsonl")
    learnt = [s["advantage"] for s in samples if s["advantage"] is not None]  # dropped samples have none
    assert len(learnt) == 4 * sum(m["dynamic/kept"] for m in metrics) and all(learnt)
    assert [sum(learnt[i : i + 4]) for i in range(0, len(learnt), 4)] == pytest.approx(
        [0.0] * (len(learnt) // 4), abs=1e-5
    )
    prompts = [s["prompt"] for s in samples if s["split"] == "train"][::4]
    # The prompts are those of an epoch, without omissions.
    assert len(prompts) == sum(m["dynamic/prompts"] for m in metrics) and len(set(prompts[:32])) == 32

    # A resumed run continues with the prompt after the last one drawn. It therefore equals the uninterrupted
    # run if it was stopped after the first step.
    grpo_trainer.train(run_config(workshop, "dynamic_part", **options | {"total_steps": 2}))
    grpo_trainer.train(run_config(workshop, "dynamic_part", **options, resume="auto"))
    assert without_times(lines_of(workshop / "dynamic_part/metrics.jsonl"))[1:] == without_times(metrics)


@pytest.mark.slow
def test_dynamic_sampling_makes_do_with_what_it_has_after_the_last_refill(workshop, rewards_here):
    options = dict(
        reward_fn=f"{workshop}/reward.py:compute_score_baseline",
        dynamic_sampling=True,
        max_refills=2,
        samples_per_step=5,
    )
    grpo_trainer.train(run_config(workshop, "nothing_kept", total_steps=1, **options))
    metrics = lines_of(workshop / "nothing_kept/metrics.jsonl")[1]
    assert metrics["dynamic/kept"] == metrics["actor/updates"] == 0 and metrics["dynamic/prompts"] == 12
    # The log has two groups of the step, not of each round.
    assert len(lines_of(workshop / "nothing_kept/samples.jsonl")) == 8
    assert 0 <= metrics["rollout/logprob_diff"] < 1e-5  # stale weights would still be noticed


@pytest.mark.slow
def test_every_reward_of_the_loop_can_be_had_from_the_trainer(workshop):
    """Test a discriminative model with the default function; then two named models, a tokenizer and the step,
    with a function that takes them.
    """

    def sevens(path, body):
        return {"data": [{"probs": [body["input"].count("7") / 10]}]}

    tokenizer = str(workshop / "model")
    with server(sevens) as address:
        options = dict(
            router_address=(address,),
            reward_model_task=("classify",),
            reward_model_tokenizer=tokenizer,
            reward_fn=None,
        )
        grpo_trainer.train(run_config(workshop, "classified", total_steps=1, **options))
        (_, metrics), samples = (
            lines_of(workshop / f"classified/{name}.jsonl") for name in ("metrics", "samples")
        )
        assert (
            metrics["reward/no_verdict"] == 0
            and 0 < metrics["reward/seconds_mean"] <= metrics["reward/seconds_max"] < 60
        )
        assert all(
            s["reward_score"] == pytest.approx((s["prompt"] + s["response"]).count("7") / 10) for s in samples
        )

        options = dict(
            router_address=(f"judge={address}", f"rm={address}"),
            reward_fn=f"{workshop}/reward.py:with_two_models",
        )
        grpo_trainer.train(
            run_config(
                workshop, "two", total_steps=2, reward_model_tokenizer=tokenizer, max_rpm=1e6, **options
            )
        )
        steps = lines_of(workshop / "two/metrics.jsonl")[1:]
        assert [(m["reward/mean"], m["reward/models"]) for m in steps] == [(1.0, 2.0), (2.0, 2.0)]
        assert steps[0]["reward/tokens"] > 3


@pytest.mark.slow
def test_baseline_calls_the_function_that_only_measures(workshop, rewards_here):
    grpo_trainer.train(run_config(workshop, "base", reward_fn=f"{workshop}/reward.py:compute_score_baseline"))
    metrics = lines_of(workshop / "base/metrics.jsonl")[-1]
    assert metrics["reward/no_verdict"] == 0 and 0 <= metrics["reward/flawed_positive_rate"] <= 1


@pytest.mark.slow
def test_an_error_of_the_judges_address_comes_before_the_policy_loads(workshop, monkeypatch):
    monkeypatch.setattr(Run, "start_policy", lambda *arguments: pytest.fail("the policy loads"))
    models = {"data": [{"id": "small"}, {"id": "large"}]}
    with server(lambda path, body: {}, get=lambda path: models) as address:
        fapo = f"{Path(grpo_trainer.__file__).parent}/compute_score.py:compute_score_fapo"
        config = run_config(workshop, "two_judges", reward_fn=fapo, router_address=(address,))
        with pytest.raises(ValueError, match=f"{address}: the server serves several models"):
            grpo_trainer.train(config)


@pytest.mark.slow
def test_a_reward_function_that_is_edited_while_a_run_starts_ends_the_start(workshop, rewards_here, tmp_path):
    """Otherwise, starts.jsonl would name another version of the function than the one that scores."""
    file = tmp_path / "reward.py"
    file.write_text(REWARD)
    start = reward_loop.start_rewards

    def edit_and_start(*arguments, **options):
        file.write_text(REWARD + "# edited")
        return start(*arguments, **options)

    config = run_config(workshop, "edited", reward_fn=f"{file}:likes_sevens")
    with (
        pytest.MonkeyPatch.context() as patch,
        pytest.raises(ValueError, match="reward.py has changed since"),
    ):
        patch.setattr(reward_loop, "start_rewards", edit_and_start)
        grpo_trainer.train(config)


def test_stale_weights_stop_the_run(workshop, rewards_here):
    with pytest.raises(
        RuntimeError, match="logprob_diff .* exceeds --max-logprob-diff 1e-12: the sampler does not use"
    ):
        grpo_trainer.train(run_config(workshop, "stale", max_logprob_diff=1e-12))


@pytest.mark.slow
def test_what_was_learnt_is_saved_whatever_goes_wrong(workshop, rewards_here, monkeypatch):
    """The run fails in a rollout, at the start of an update or in an evaluation, and is resumed.

    In the middle of an update, nothing is saved.
    """
    options = dict(total_steps=4, val_file=(str(workshop / "val.parquet"),), val_every=2, save_every=0)
    grpo_trainer.train(run_config(workshop, "whole_of_four", **options))
    config = run_config(workshop, "fails", **options, resume="auto")

    def fail_at(name, call):
        original, calls = getattr(grpo_trainer, name), Counter()

        def failing(*arguments):
            calls["n"] += 1
            if calls["n"] == call:
                raise aiohttp.ClientOSError(f"cut in {name}")  # not a RuntimeError
            return original(*arguments)

        return monkeypatch.setattr(grpo_trainer, name, failing)

    def run_until_it_fails(error):
        with pytest.raises(error):
            grpo_trainer.train(config)
        monkeypatch.undo()
        return [path.name for path in run_folder.checkpoints_in(workshop / "fails/checkpoints")]

    fail_at("draw_prompts", 2)
    assert run_until_it_fails(aiohttp.ClientOSError) == ["step_1"]
    fail_at("roll_out", 2)  # the evaluation after step 2
    assert run_until_it_fails(aiohttp.ClientOSError) == ["step_1", "step_2"]
    # The step's line was written before the evaluation.
    assert "val/toy/mean@1" not in lines_of(workshop / "fails/metrics.jsonl")[2]

    def out_of_memory(*arguments):
        raise torch.OutOfMemoryError("no memory for the update")

    monkeypatch.setattr(Policy, "update", out_of_memory)  # in step 3, after the evaluation of step 2
    assert run_until_it_fails(torch.OutOfMemoryError) == ["step_1", "step_2"]
    step = torch.optim.AdamW.step

    def step_and_fail(self, **named):  # with `closure` it is PyTorch, which makes the state for a checkpoint
        step(self, **named)
        if not named:
            out_of_memory()

    monkeypatch.setattr(torch.optim.AdamW, "step", step_and_fail)
    # In the middle of an update, the weights belong to no step.
    assert run_until_it_fails(torch.OutOfMemoryError) == [
        "step_1",
        "step_2",
    ]
    grpo_trainer.train(config)
    expected, got = (
        without_times(lines_of(workshop / name / "metrics.jsonl")) for name in ("whole_of_four", "fails")
    )
    assert got == expected
    kept, again = (lines_of(workshop / name / "samples.jsonl") for name in ("whole_of_four", "fails"))
    assert [(s["step"], s["split"], s["response"]) for s in again] == [
        (s["step"], s["split"], s["response"]) for s in kept
    ]


def test_help_shows_every_setting_once_in_a_group_and_the_required_ones_first(monkeypatch, capsys):
    monkeypatch.setenv("COLUMNS", "100")  # a wider terminal would get several columns
    with pytest.raises(SystemExit):
        grpo_trainer.parse_command_line(grpo_trainer.Config, args=["--help"])
    said = capsys.readouterr().out.partition("show this help message")[2]  # without the example in the header
    settings = dataclasses.fields(grpo_trainer.Config)
    shown = []
    for line in said.splitlines():
        text = line.strip("│| ")
        if text.startswith("--"):
            shown += re.findall(r"--([\w-]+)(?=[ ,]|$)", text.split("  ")[0])
    for setting in settings:
        assert shown.count(setting.name.replace("_", "-")) == 1, setting.name
    assert re.findall(r"\W(\w+) options\W", said) == ["required", *GROUPS]
    assert "default: None" not in said and "default: )" not in said and "{[" not in said
    assert "--train-file FILE [FILE ...]" in said and "--num-workers INT, --num-reward-workers INT" in said
    texts = help_texts(grpo_trainer.Config)
    assert all(len(texts[setting.name]) > 10 and texts[setting.name][-1] == "." for setting in settings)
    assert said.index("--model ") < said.index("--train-file ") < said.index("--out-dir ")
    assert said.index("--out-dir ") < said.index("data options") < said.index("--val-file ")


def test_the_command_line_in_groups_gives_the_configuration():
    needed = ["--model", "m", "--train-file", "a", "b", "--out-dir", "o"]
    flags = ["--num-reward-workers", "3", "--val-greedy", "--lora-targets", "q_proj", "v_proj"]
    config = grpo_trainer.parse_command_line(grpo_trainer.Config, args=[*needed, *flags])
    expected = grpo_trainer.Config(
        model="m",
        train_file=("a", "b"),
        out_dir="o",
        num_workers=3,
        val_greedy=True,
        lora_targets=("q_proj", "v_proj"),
    )
    assert config == expected and type(config) is grpo_trainer.Config


def test_checkpoints_are_written_now_and_then_by_default():
    config = grpo_trainer.Config(model="m", train_file="t", out_dir="o")
    assert 0 < config.save_every <= 50


def test_all_logs_of_servers_are_in_the_output_directory():
    """The working directory may be read-only."""
    config = grpo_trainer.Config(model="m", train_file="t", out_dir="o", genrm=("a", "rm=b"))
    logs = {name: judge.log_dir for name, judge in config.server_configs().items()}
    assert logs == {"genrm": Path("o/genrm_logs"), "rm": Path("o/genrm_logs")}
    assert config.policy_server_config().log_dir == Path("o/rollout_logs")


@pytest.mark.slow
def test_an_evaluation_can_be_interrupted_at_once(workshop):
    """An evaluation may have thousands of samples.

    Only the update, the weights and the log must be completed.
    """
    options = dict(val_file=(str(workshop / "val.parquet"),), max_response_length=64, val_n=6000)
    config = run_config(workshop, "long_evaluation", **options)
    process = start_run(config)
    wait_for_step(config, process, 0)  # this line is written before the evaluation begins
    process.send_signal(signal.SIGINT)
    assert process.wait(90) == 130, Path(f"{config.out_dir}.log").read_text()


@pytest.mark.slow
def test_evaluation_alone_with_a_number_of_samples_for_each_file(workshop, rewards_here, capsys):
    other = pq.read_table(workshop / "val.parquet").to_pylist()
    pq.write_table(
        pa.Table.from_pylist([row | {"data_source": "an/other"} for row in other]), workshop / "other.parquet"
    )
    files = (str(workshop / "val.parquet"), f"{workshop}/other.parquet:4")
    config = run_config(workshop, "evaluation", total_steps=0, val_file=files, val_n=2)
    assert grpo_trainer.train(config) == workshop / "model"
    (metrics,) = lines_of(workshop / "evaluation/metrics.jsonl")
    assert {"val/toy/mean@2", "val/toy/pass@2", "val/an/other/mean@4", "val/an/other/pass@4"} <= set(metrics)
    assert "an/other/mean@4 " in capsys.readouterr().out
    assert "val/an/other/mean@2" not in metrics and not (workshop / "evaluation/checkpoints").exists()
    for changes in (dict(val_n=1), dict(total_steps=3)):
        with pytest.raises(ValueError, match="^--out-dir .*: already contains an evaluation; pass another"):
            grpo_trainer.train(dataclasses.replace(config, **changes))
    assert lines_of(workshop / "evaluation/metrics.jsonl") == [metrics]


@pytest.mark.slow
def test_a_checkpoint_is_evaluated_when_it_has_gone_further_than_it_should(workshop, rewards_here):
    options = dict(val_file=(), val_every=0)
    grpo_trainer.train(run_config(workshop, "further", total_steps=1, **options))
    options["val_file"] = (str(workshop / "val.parquet"),)
    grpo_trainer.train(run_config(workshop, "further", total_steps=0, resume="auto", **options))
    lines = lines_of(workshop / "further/metrics.jsonl")
    assert [("val/toy/mean@1" in line) for line in lines] == [False, True]
    options["val_n"] = 2  # evaluate again with more samples
    grpo_trainer.train(run_config(workshop, "further", total_steps=0, resume="auto", **options))
    line = lines_of(workshop / "further/metrics.jsonl")[-1]
    assert line["step"] == 1 and {"val/toy/mean@1", "val/toy/mean@2", "reward/mean"} <= line.keys()
    samples = (workshop / "further/samples.jsonl").read_text()
    options["reward_fn"] = f"{workshop}/reward.py:silent"  # The metrics stay, and so do their samples.
    with pytest.raises(RuntimeError, match="100% of the samples that needed a verdict have none"):
        grpo_trainer.train(run_config(workshop, "further", total_steps=0, resume="auto", **options))
    assert (workshop / "further/samples.jsonl").read_text() == samples


def test_papo_normalises_answer_and_reasoning_apart():
    """If all answers are correct, FAPO's reward and PAPO's process reward distinguish the flawed one.

    Among wrong answers, nothing does.
    """
    papo = config_of(**worked("papo"))
    right, flawed = dict(acc=True, flawed_positive=False), dict(acc=True, flawed_positive=True)
    group = [
        scored(1.0, **right),
        scored(0.0, **flawed),
        scored(-1.0, acc=False, flawed_positive=False),
        scored(None, **flawed),
    ]
    algorithm.set_advantages([group], papo, decode)
    assert group[3].advantage is None
    outcome, process = 2 / 3 / (math.sqrt(4 / 3) + 1e-6), 0.5 / (math.sqrt(0.5) + 1e-6)
    got = [sample.advantage for sample in group[:3]]
    assert got == pytest.approx([outcome + process, outcome - process, -2 * outcome], rel=1e-5)
    long = [scored(1.0, penalty=penalty, **right) for penalty in (0.0, -0.5, 0.0, 0.0)]
    algorithm.set_advantages([long], papo, decode)  # the length penalty is part of the outcome
    assert long[1].advantage < 0 < long[0].advantage
    # A correct answer stays correct if its penalty makes the outcome 0 or less, so its reasoning counts.
    late = [scored(1.0, penalty=-1.0, **right), scored(1.0, penalty=-1.0, **flawed)]
    algorithm.set_advantages([late], papo, decode)
    assert late[0].advantage > 0.5 > -0.5 > late[1].advantage
    message = r"no result has the key flawed_positive, .* keys are score, acc\); see"
    with pytest.raises(RuntimeError, match=message):
        algorithm.set_advantages([[scored(1.0, acc=True)] * 4], papo, decode, require_keys=True)


def decode(ids):
    """Decode one character per token. Negative tokens are special."""
    return "".join(chr(token) for token in ids if token >= 0)


def written(text, score, first_wrong, **info):
    """Return a sample with this text and an end token, for a prompt of two tokens."""
    sample = scored(score, first_wrong=first_wrong, acc=score is not None and score >= 0, **info)
    return dataclasses.replace(sample, prompt_ids=[5, 6], response_ids=[*map(ord, text), -1], text=text)


def credited(group, **changes):
    """Return the advantages of each sample's tokens, or its single advantage, as a step would set them."""
    config = config_of(**changes)
    algorithm.set_advantages([group], config, decode)
    return [sample.token_advantages or sample.advantage for sample in group]


def a_group():
    """Return samples: correct; flawed; wrong; wrong at an unknown place; no verdict.

    The prefix is 3 of 5 tokens.
    """
    return [
        written("1\n\n2", 1.0, -1),
        written("1\n\n2", 0.0, 1),
        written("1\n\n2", -1.0, 1),
        written("1\n\n2", -1.0, None),
        written("1\n\n2", None, None),
    ]


def test_credit_for_the_good_prefix_blames_no_token_before_the_first_wrong_paragraph():
    std = math.sqrt((1.25**2 + 0.25**2 + 2 * 0.75**2) / 3) + 1e-6  # of 1, 0, -1, -1
    right, flawed, wrong, unknown, silent = credited(a_group(), **worked("spare_good_prefix"))
    assert right == pytest.approx([1.25 / std] * 5)
    assert flawed == pytest.approx([0.25 / std] * 5)  # a positive advantage applies to the whole response
    assert wrong == pytest.approx([0, 0, 0, -0.75 / std, -0.75 / std])
    assert unknown == pytest.approx([-0.75 / std] * 5) and silent is None
    by_default = credited(a_group())  # prefixes are not used
    assert by_default == [pytest.approx(x / std) for x in (1.25, 0.25, -0.75, -0.75)] + [None]
    early = [written("1\n\n2", -1.0, 2), written("1", 1.0, -1)]
    (missing, _) = credited(early, **worked("spare_good_prefix"))
    # A paragraph is missing because the end token came too early.
    assert missing[:4] == [0] * 4 and missing[4] < 0


def test_vppo_by_hand():
    """The flawed sample scores 0 and is not correct.

    The values are 1; 0.5 on 3 of 5 tokens, twice; 0. The mean is 0.4.
    """
    mean = (1 + 2 * 0.5 * 3 / 5) / 4
    right, flawed, wrong, unknown, silent = credited(a_group(), **worked("vppo", prefix_cut=0.0))
    assert right == pytest.approx([1 - mean] * 5) and silent is None
    assert flawed == wrong == pytest.approx([0.5 - mean] * 3 + [-mean] * 2)
    assert unknown == pytest.approx([-mean] * 5)
    short = credited(a_group(), **worked("vppo", prefix_cut=1.0))  # cut by the prompt's two tokens
    assert short[2] == pytest.approx([0.5 - 1.2 / 4] + [-1.2 / 4] * 4)
    assert credited(a_group(), **worked("vppo", prefix_cut=9.0))[2] == pytest.approx([-0.25] * 5)
    # By equation 8, a good prefix is not blamed, even if the other samples are better.
    good = [written("1\n\n2", 1.0, -1) for _ in range(3)] + [written("1\n\n2", -1.0, 1)]
    assert credited(copy.deepcopy(good), **worked("vppo", prefix_cut=0.0))[3][0] < 0
    spared = credited(good, **worked("spare_good_prefix", advantage="vppo", prefix_cut=0.0))[3]
    assert spared[:3] == [0] * 3 and spared[3] < 0
    # The length penalty is part of the outcome.
    late = [written("1\n\n2", 1.0, -1), written("1\n\n2", 1.0, -1, overlong_penalty=-0.5)]
    late[1].result["reward_score"] = 0.5
    assert credited(late, **worked("vppo")) == [pytest.approx([x] * 5) for x in (0.25, -0.25)]


def test_vppo_spares_the_part_of_the_good_prefix_that_it_does_not_pay():
    """There are three segments: rewarded (one of three good tokens, because the prompt has two), spared,
    blamed.
    """
    paid, *spared_and_blamed = credited(a_group(), **worked("spare_good_prefix", advantage="vppo"))[2]
    mean = (1 + 2 * 0.5 * 1 / 5) / 4
    assert paid == pytest.approx(0.5 - mean) and paid > 0
    assert spared_and_blamed == pytest.approx([0, 0, -mean, -mean])


def test_scores_of_steps_by_hand():
    """A token gets the scores of its own and later paragraphs, normalised over the group's paragraphs, plus
    the outcome.
    """
    group = [
        written("1\n\n2", 1.0, None, step_scores=[1.0, 1.0]),
        written("1\n\n2", -1.0, None, step_scores=[1.0, 0.0]),
        written("1\n\n2", 1.0, None, step_scores=None),  # unscored steps: no verdict
        written("1\n\n2", None, None, step_scores=[5.0, 5.0]),
    ]
    first, second, unscored, silent = credited(group, **worked("steps"))
    outcome = 1 / (math.sqrt(2) + 1e-6)  # sample std of 1, -1
    high, low = 0.25 / (0.5 + 1e-6), -0.75 / (0.5 + 1e-6)  # of 1, 1, 1, 0: mean 0.75, std 0.5
    assert first == pytest.approx([outcome + 2 * high] * 3 + [outcome + high] * 2)
    assert second == pytest.approx([-outcome + high + low] * 3 + [-outcome + low] * 2)
    assert unscored is None and group[2].result["status"] == "no_verdict" and silent is None
    # A paragraph without a score learns only from the outcome. A score without a paragraph is ignored.
    group = [
        written("1\n\n2", 1.0, None, step_scores=[1.0]),
        written("1\n\n2", -1.0, None, step_scores=[0.0, 0.0, 7.0]),
    ]
    first, second = credited(group, **worked("steps"))
    high, low = 2 / 3 / (math.sqrt(1 / 3) + 1e-6), -1 / 3 / (math.sqrt(1 / 3) + 1e-6)
    assert first == pytest.approx([outcome + high] * 3 + [outcome] * 2)
    assert second == pytest.approx([-outcome + 2 * low] * 3 + [-outcome + low] * 2)


def test_reward_terms_and_dr_grpo():
    group = [written("1", 1.0, -1, style=style) for style in (2.0, 4.0, None)]
    options = terms(acc=1, style=-0.5)
    low, high, unknown = credited(group, **options)
    assert low > 0 > high and unknown == 0 and low == pytest.approx(1, rel=1e-5) == -high
    assert credited(a_group()[:3], advantage="dr_grpo") == [1, 0, -1]


@pytest.mark.parametrize(
    "changes, absent",
    [
        (worked("spare_good_prefix"), "first_wrong"),
        (worked("vppo"), "first_wrong"),
        (terms(acc=1, stile=2), "stile"),
        (terms(pred=1), "pred"),  # not a number
    ],
)
def test_what_the_reward_function_does_not_give_is_named_in_one_line(changes, absent):
    samples = [scored(1.0, acc=True, pred="7"), scored(None)]
    message = rf"no result has the key {absent}, .* keys are score, acc, pred\); see docs"
    with pytest.raises(RuntimeError, match=message):
        algorithm.set_advantages([samples], config_of(**changes), decode, require_keys=True)
    # At later steps, no sample may have a usable value, and missing verdicts are reported elsewhere.
    algorithm.set_advantages([samples], config_of(**changes), decode)
    algorithm.set_advantages([samples[1:]], config_of(**changes), decode, require_keys=True)


@pytest.mark.parametrize(
    "changes, message",
    [
        (worked("terms"), "terms() missing 1 required positional argument: 'weights'"),
        (dict(advantage_kwargs='{"weights": {}}'), "grpo() got an unexpected keyword argument 'weights'"),
        (terms(), "weights must be an object such as"),
        (worked("terms", weights=["acc"]), "weights must be an object such as"),
        (terms(acc="1"), "the weight of acc is '1', but it must be a finite number"),
        (terms(acc=None), "the weight of acc is None, but it must be a finite number"),
        (
            terms(acc=1) | dict(max_response_length=64, overlong_buffer=8),
            "the length penalty is missing from weights; add overlong_penalty with the weight 1, or",
        ),
        (worked("spare_good_prefix", advantage="rloo"), "advantage 'rloo' is unknown; use one of grpo"),
        (worked("vpo"), "advantages.py has no function vpo; it defines papo, vppo"),
        (dict(advantage="papo"), "--advantage papo: must be grpo, dr_grpo or FILE.py:NAME"),
        (dict(loss="dapo"), "--loss dapo: must be clip, gspo, cispo or FILE.py:NAME"),
        (dict(loss="gspo", clip_c=5.0), "--clip-c: the loss gspo has no setting clip_c; omit --clip-c"),
        (dict(loss_kwargs='{"tau": 1}'), "clip_loss() got an unexpected keyword argument 'tau'"),
        (dict(loss_kwargs="[1]"), "--loss-kwargs: must be a JSON object such as '{\"NAME\": 1}'"),
        (dict(loss_kwargs='{"clip_c": 0.5}'), "--loss-kwargs: pass --clip-c instead of clip_c"),
    ],
)
def test_settings_of_the_algorithm_that_cannot_work_are_refused(changes, message, tmp_path):
    with pytest.raises(ValueError, match=re.escape(message)):
        config_of(model=str(tmp_path), **changes).check()


def test_dynamic_sampling_keeps_what_each_advantage_learns_from():
    wrong, early, right = written("1\n\n2", -1.0, 1), written("1\n\n2", -1.0, 0), written("1", 1.0, -1)
    wrong.result["reward_extra_info"]["acc"] = early.result["reward_extra_info"]["acc"] = False
    for advantage in (dict(advantage="grpo"), dict(advantage="dr_grpo"), worked("papo")):
        assert not teaches([wrong, wrong], **advantage)
    # VPPO raises the prefix and lowers the rest, even if all samples are wrong at the same place.
    assert teaches([wrong, wrong], **worked("vppo")) and teaches([wrong, early], **worked("vppo"))
    assert not teaches([early, early], **worked("vppo"))
    assert not teaches([right, right], **worked("vppo"))
    first_wrong = terms(first_wrong=1)
    assert teaches([wrong, early], **first_wrong) and not teaches([early, early], **first_wrong)
    # The length penalty is ignored, even if it is a reward component.
    late = [scored(1.0, acc=True), scored(1.0, penalty=-0.5, acc=True)]
    late[0].result["reward_extra_info"]["overlong_penalty"] = 0.0
    both = terms(acc=1, overlong_penalty=1)
    assert not teaches(late, **both) and algorithm.set_advantages([late], config_of(**both), decode)
    assert late[0].advantage > 0 > late[1].advantage


def test_dynamic_sampling_keeps_the_groups_that_papo_learns_from():
    """All answers are correct with equal scores, as with a function that only measures.

    FAPO learns nothing, and PAPO learns from the reasoning.
    """
    group = [scored(1.0, acc=True, flawed_positive=flawed) for flawed in (True, False, False)]
    assert not teaches(group) and teaches(group, **worked("papo"))
    assert not teaches(group[1:], **worked("papo"))


@pytest.mark.parametrize(
    "acc, right",
    [(True, True), (1, True), (1.0, True), (0.5, False), ("yes", None), (0, False), (None, None)],
)
def test_what_counts_as_right(acc, right):
    """PAPO takes its outcome from `acc` (None: no verdict). The other sample is wrong."""
    group = [scored(1.0, acc=acc, flawed_positive=False), scored(1.0, acc=False, flawed_positive=False)]
    algorithm.set_advantages([group], config_of(**worked("papo")), decode)
    if right is None:
        assert group[0].advantage is None
    else:
        assert (group[0].advantage > 0) == right


@pytest.mark.slow
def test_papo_without_a_judge_stops_instead_of_learning_nothing(workshop, rewards_here):
    """A correct answer has no verdict if its reasoning was not judged."""
    val_file = (str(workshop / "val.parquet"),)  # which needs no judge
    options = dict(worked("papo"), reward_fn=f"{workshop}/reward.py:always_right", val_file=val_file)
    with pytest.raises(RuntimeError, match="step 1: 100% of the samples that needed a verdict have none"):
        grpo_trainer.train(run_config(workshop, "papo", **options))


def test_what_depends_on_the_machines():
    """On a CPU, everything can run in this process. On GPUs, Ray places all processes."""
    for changes, gpus, expected in (
        (dict(), 0, ("cpu", "hf")),
        (dict(rollout="vllm"), 0, ("cpu", "vllm")),
        (dict(overlap=True), 0, ("cpu", "vllm")),
        (dict(policy_ranks=2), 0, ("cpu", "vllm")),
        (dict(device="cpu"), 8, ("cpu", "hf")),
        (dict(rollout_servers=7), 8, ("cuda", "vllm")),
        (
            dict(policy_gpu_share=0.4, rollout_gpu_share=0.3, genrm=("j",), genrm_gpu_share=0.3),
            1,
            ("cuda", "vllm"),
        ),
    ):
        config = config_of(**changes).resolved(gpus)
        assert (config.device, config.rollout) == expected, changes
    for changes, gpus, message in (
        (dict(rollout="hf"), 1, "--rollout hf: needs the policy in the trainer's process"),
        (dict(rollout="hf", policy_ranks=2), 0, "--rollout hf: needs the policy in the trainer's process"),
        (dict(bf16_head=True), 0, "--bf16-head: does not work with --rollout hf, which samples with a"),
        (dict(temperature=2.5), 1, "--temperature, --val-temperature 2.5: vLLM accepts at most 2"),
    ):
        with pytest.raises(ValueError, match=re.escape(message)):
            config_of(**changes).resolved(gpus)


@pytest.mark.slow
@pytest.mark.parametrize("family", ["gemma4_text", "gemma3n_text", "mamba", "llama"])
def test_an_estimate_that_a_family_does_not_allow_is_unknown_and_stops_nothing(tmp_path, family):
    AutoConfig.for_model(family, **({"head_dim": 8} if family == "llama" else {})).save_pretrained(tmp_path)
    estimate = estimate_memory(config_of(model=str(tmp_path)), "cpu")
    assert (None in estimate.values()) == (family != "llama")
    assert ("unknown" in report(config_of(model=str(tmp_path)).resolved(0), 1)) == (family != "llama")


def test_without_a_hub_name_nothing_asks_a_hub_also_where_the_library_is_loaded_already(
    monkeypatch, tmp_path
):
    seen = []
    monkeypatch.delenv("HF_HUB_OFFLINE")
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(
        grpo_trainer, "train", lambda config: seen.append(transformers.utils.hub.is_offline_mode())
    )
    tokenizer, judge = ["--reward-model-tokenizer", "owner/name"], ["--genrm", str(tmp_path), "b=owner/name"]
    here = str(tmp_path)
    cases = ((here, [], False), ("owner/name", [], False), (here, tokenizer, False), (here, [], True))
    cases += ((here, judge, False),)
    for model, more, online in cases:
        monkeypatch.setattr(
            sys, "argv", ["grpo_trainer.py", "--model", model, "--train-file", "t", "--out-dir", "o", *more]
        )
        if online:
            monkeypatch.setenv("HF_HUB_OFFLINE", "0")
        grpo_trainer.main(grpo_trainer.parse_command_line(grpo_trainer.Config))
        monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", False)
        monkeypatch.delenv("HF_HUB_OFFLINE", raising=False)
    assert seen == [True, False, False, False, False]


# ---- runs that are interrupted


def arguments_of(config):
    """Return the command line for these settings."""
    arguments = []
    for name, value in dataclasses.asdict(config).items():
        if value is not None and value is not False and value != ():
            arguments.append(f"--{name.replace('_', '-')}")
            arguments += (
                []
                if value is True
                else [str(part) for part in (value if isinstance(value, tuple) else [value])]
            )
    return arguments


def start_run(config, *script):
    """Start the run in a separate process, through the command line."""
    with open(f"{config.out_dir}.log", "a") as log:
        return forked.Script([*(script or ("grpo_trainer.py",)), *arguments_of(config)], log)


def wait_for_step(config, process, step):
    """Wait until metrics.jsonl has the line of this step."""
    path, patience = Path(config.out_dir, "metrics.jsonl"), time.monotonic() + 400
    while not path.is_file() or not re.search(f'{{"step": {step}[,}}]', path.read_text()):
        assert process.poll() is None and time.monotonic() < patience, Path(
            f"{config.out_dir}.log"
        ).read_text()
        time.sleep(0.02)


@pytest.mark.slow
def test_killed_at_random_moments_and_resumed_is_exactly_the_uninterrupted_run(workshop):
    """Send SIGKILL three times, at random moments."""
    options = dict(
        total_steps=15,
        save_every=1,
        val_every=3,
        val_file=(str(workshop / "val.parquet"),),
        max_response_length=48,
        train_batch_size=8,
        keep_checkpoints=1,
        dynamic_sampling=True,
        resume="auto",
    )
    grpo_trainer.train(run_config(workshop, "unkilled", **options))
    times = [line["time/step"] for line in lines_of(workshop / "unkilled/metrics.jsonl")[1:]]
    config, rng = run_config(workshop, "killed", **options), random.Random()
    reached = 0
    for _ in range(3):
        process = start_run(config)
        wait_for_step(config, process, reached + 1)
        # The checkpoint of step 1 may take a moment.
        while not run_folder.checkpoints_in(workshop / "killed/checkpoints"):
            time.sleep(0.02)
        time.sleep(rng.uniform(0, 2 * statistics.median(times)))
        assert process.poll() is None, "the run is over too soon for this test"
        process.kill()
        process.wait()
        reached = max(m["step"] for m in run_folder.read_lines(workshop / "killed/metrics.jsonl")[0])
        assert run_folder.checkpoints_in(workshop / "killed/checkpoints")
    process = start_run(config)
    assert process.wait(300) == 0, (workshop / "killed.log").read_text()
    expected, got = (
        without_times(lines_of(workshop / name / "metrics.jsonl")) for name in ("unkilled", "killed")
    )
    assert [m["step"] for m in got] == list(range(16)) and got == expected
    samples = [lines_of(workshop / name / "samples.jsonl") for name in ("unkilled", "killed")]
    assert [s | {"seconds": 0} for s in samples[0]] == [s | {"seconds": 0} for s in samples[1]]


@pytest.mark.slow
@pytest.mark.parametrize("name", ["SIGINT", "SIGTERM"])
def test_ctrl_c_saves_and_leaves_cleanly(workshop, name):
    config = run_config(workshop, f"stopped_{name}", total_steps=500, resume="auto", max_response_length=48)
    if name == "SIGINT":  # a start that shares nothing with these tests
        with open(f"{config.out_dir}.log", "a") as log:
            command = [sys.executable, "grpo_trainer.py", *arguments_of(config)]
            options = dict(env=os.environ | {"RAY_ADDRESS": "local"}, start_new_session=True)
            process = subprocess.Popen(command, stdout=log, stderr=log, **options)
    else:  # in a Ray that other runs use
        process = start_run(config)
    wait_for_step(config, process, 2)
    process.send_signal(getattr(signal, name))
    assert process.wait(90) == 130, Path(f"{config.out_dir}.log").read_text()
    steps = [m["step"] for m in lines_of(workshop / f"stopped_{name}/metrics.jsonl")]
    (saved,) = run_folder.checkpoints_in(workshop / f"stopped_{name}/checkpoints")
    assert saved.name == f"step_{steps[-1]}" and steps == list(range(steps[-1] + 1))
    text = Path(f"{config.out_dir}.log").read_text()
    assert f"--resume auto resumes after step {steps[-1]}" in text and "Traceback" not in text
    assert not psutil.pid_exists(process.pid) and not [
        p
        for p in psutil.process_iter(["cmdline"])
        if str(config.out_dir) in " ".join(p.info["cmdline"] or [])
    ]


def test_ctrl_c_during_an_update_waits_for_its_end_and_a_second_one_does_not():
    before = [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)]
    interrupts = Interrupts()
    try:
        with pytest.raises(KeyboardInterrupt):
            signal.raise_signal(signal.SIGINT)
        with pytest.raises(KeyboardInterrupt), interrupts.held():
            signal.raise_signal(signal.SIGTERM)
            held = True  # nothing has happened yet
        assert held
        done = []
        with pytest.raises(KeyboardInterrupt), interrupts.held():
            signal.raise_signal(signal.SIGINT)
            done.append("delayed")
            signal.raise_signal(signal.SIGINT)
            done.append("delayed again")
        assert done == ["delayed"]
    finally:
        signal.signal(signal.SIGINT, before[0])
        signal.signal(signal.SIGTERM, before[1])


@pytest.mark.parametrize(("signals", "saved"), [(0, True), (1, True), (2, False)])
def test_one_more_ctrl_c_does_not_end_the_last_save_and_two_more_do(signals, saved, capfd):
    before = [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)]
    interrupts, written = Interrupts(), []

    def save():
        for _ in range(signals):
            signal.raise_signal(signal.SIGINT)
        written.append("step 7")

    run = SimpleNamespace(step=7, saved_step=5, num_updates=3, interrupts=interrupts, save=save)
    run.policy, run.unlogged_metrics = SimpleNamespace(num_updates=3), None
    interrupts.asked = True  # The run has been interrupted once.
    try:
        Run.save_after_failure(run)
    finally:
        signal.signal(signal.SIGINT, before[0])
        signal.signal(signal.SIGTERM, before[1])
    assert written == ["step 7"] * saved
    said = capfd.readouterr().out
    assert said.startswith("saving step 7\n") and said.count("press Ctrl-C again") == (signals > 0)
    assert "the run stopped; --resume auto resumes after step" in said


def test_a_rank_that_dies_after_ctrl_c_starts_no_new_ranks():
    run = SimpleNamespace(interrupts=SimpleNamespace(asked=True))
    with pytest.raises(KeyboardInterrupt):
        Run.recover(run, RanksLost("a rank of the policy died"))


@pytest.mark.parametrize("max_restarts", [0, 2])
def test_ranks_that_die_more_often_than_allowed_end_the_run(max_restarts, capsys):
    lost = [RanksLost("rank 0 died"), RanksLost("rank 1 died"), RanksLost("rank 2 died")]
    left = lost[1:]

    def restart(source):
        raise left.pop(0)

    run = SimpleNamespace(
        interrupts=SimpleNamespace(asked=False),
        cancelled=threading.Event(),
        prefetched=None,
        num_restarts=0,
        config=SimpleNamespace(max_restarts=max_restarts),
        find_checkpoint=lambda: None,
        loading=contextlib.nullcontext,
        policy=SimpleNamespace(restart=restart),
        saved_step=4,
        resume_from="step_4",
    )
    run.recover = functools.partial(Run.recover, run)
    message = f"^rank {max_restarts} died; --max-restarts {max_restarts} allows no further restart; see the "
    with pytest.raises(RanksLost, match=message) as ended:
        run.recover(lost[0])
    assert ended.value.__cause__ is lost[max_restarts] and len(left) == 2 - max_restarts
    lines = [f"(attempt {number + 1} of --max-restarts 2)" for number in range(max_restarts)]
    assert re.findall(r"\(attempt .*\)", capsys.readouterr().out) == lines


@pytest.mark.parametrize("name, code", [("SIGTERM", -15), ("SIGHUP", -1), ("SIGINT", 1)])
def test_a_process_that_a_tool_forks_reacts_to_signals_as_without_a_trainer(name, code):
    """With --overlap, a tool may fork it while the trainer delays signals until the end of its update."""
    numbers = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
    before = [signal.signal(number, signal.SIG_DFL) for number in numbers]
    interrupts, forking = Interrupts(), multiprocessing.get_context("fork")
    ready = forking.Event()

    def run_code():
        try:
            ready.set()
            time.sleep(60)
        except KeyboardInterrupt:  # Printing it could wait for a lock that a thread held at the fork.
            os._exit(1)

    process = forking.Process(target=run_code)
    try:
        with interrupts.held():
            process.start()
            assert ready.wait(10)
            os.kill(process.pid, getattr(signal, name))
            process.join(30)  # on a busy machine
            assert process.exitcode == code
            signal.raise_signal(signal.SIGTERM)
            assert interrupts.asked  # The trainer still delays its own signals.
            interrupts.asked = False
    finally:
        process.kill()
        for number, handler in zip(numbers, before):
            signal.signal(number, handler)


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
def test_ctrl_c_that_python_ignores_in_a_destructor_ends_the_run_after_the_step():
    class Broken:
        def __del__(self):
            raise ValueError

    class Interrupted:
        def __del__(self):
            signal.raise_signal(signal.SIGINT)

    before = [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)]
    interrupts = Interrupts()
    try:
        Broken()  # destroyed at once; only a KeyboardInterrupt counts
        assert not interrupts.was_dropped
        Interrupted()  # nothing is raised here
        with pytest.raises(KeyboardInterrupt), interrupts.held():
            pass
        time.sleep(0.2)  # It is raised only once.
    finally:
        signal.signal(signal.SIGINT, before[0])
        signal.signal(signal.SIGTERM, before[1])


def test_ctrl_c_that_python_ignores_in_a_destructor_is_raised_again():
    """Without a step that ends soon, for example in a long evaluation."""

    class Interrupted:
        def __del__(self):
            signal.raise_signal(signal.SIGTERM)

    before = [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)]
    hook = sys.unraisablehook
    Interrupts()
    try:
        Interrupted()
        with pytest.raises(KeyboardInterrupt):
            time.sleep(10)
    finally:
        signal.signal(signal.SIGINT, before[0])
        signal.signal(signal.SIGTERM, before[1])
        sys.unraisablehook = hook


@pytest.mark.slow
def test_a_full_disk_costs_no_earlier_checkpoint(workshop, rewards_here):
    """A limit on file sizes simulates a full disk: the kernel rejects the write in the same place."""
    config = run_config(workshop, "full", total_steps=1)
    grpo_trainer.train(config)
    code = f"""
import dataclasses, resource, signal, grpo_trainer, policy
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
update = policy.Policy.update
def update_and_fill_the_disk(*arguments):
    resource.setrlimit(resource.RLIMIT_FSIZE, (1_000_000, 1_000_000))
    return update(*arguments)
policy.Policy.update = update_and_fill_the_disk
config = grpo_trainer.{config!r}
grpo_trainer.train(dataclasses.replace(config, resume="auto", total_steps=2))
"""
    run = forked.run(["-c", code], timeout=400)
    last = run.stderr.strip().splitlines()[-1]
    assert (
        run.returncode == 1
        and "the checkpoint of step 2 could not be written" in last
        and "--resume auto resumes after step 1" in last
    )
    assert [p.name for p in (workshop / "full/checkpoints").iterdir()] == ["step_1"]
    grpo_trainer.train(dataclasses.replace(config, resume="auto", total_steps=2))
    assert [m["step"] for m in lines_of(workshop / "full/metrics.jsonl")] == [0, 1, 2]


@pytest.mark.slow
def test_dry_run_checks_and_starts_nothing_and_the_plan_says_what_a_run_needs(workshop):
    config = run_config(workshop, "dry", dry_run=True, kl_coef=0.1)
    process = start_run(config)
    assert process.wait(300) == 0
    text = (workshop / "dry.log").read_text()
    assert '"kl_coef": 0.1' in text and "Ray" not in text
    assert not (workshop / "dry").exists()
    process = start_run(dataclasses.replace(config, dry_run=False), "-m", "tools.plan_run")
    assert process.wait(300) == 0
    assert not (workshop / "dry").exists()
    text = (workshop / "dry.log").read_text()
    assert "GB  reference model" in text and "approximate peak" in text and "epochs of 32" in text


@pytest.mark.slow
def test_the_estimate_of_memory_counts_the_parameters(workshop, model):
    config = run_config(workshop, "estimate", kl_coef=0.1)
    size = 4e-9 * sum(p.numel() for p in model.parameters())
    estimate = estimate_memory(config, "cpu")
    names = ("weights", "gradients", "Adam", "reference model")
    assert [estimate[name] for name in names] == pytest.approx([size, size, 2 * size, size])
    text = transformers.AutoConfig.from_pretrained(config.model)
    rounded = estimate_memory(dataclasses.replace(config, bf16_head=True), "cpu")["update: head in bf16"]
    assert rounded == pytest.approx(2e-9 * text.vocab_size * text.hidden_size)
    sizes = []
    for tokens in (0, 2048, 4096):  # 0: the policy's default on a CPU
        changed = dataclasses.replace(config, max_tokens_per_micro_batch=tokens)
        sizes.append(estimate_memory(changed, "cpu")["update: activations of a micro-batch"])
    assert sizes[0] == sizes[1] and 1.5 < sizes[2] / sizes[1] <= 2


@pytest.mark.slow
def test_a_run_without_verdicts_stops_with_a_word_on_why(workshop, rewards_here):
    with pytest.raises(
        RuntimeError,
        match="100% of the samples that needed a verdict have none.*"
        "check the reward function and the reward model.*sleeps",
    ):
        grpo_trainer.train(run_config(workshop, "silent", reward_fn=f"{workshop}/reward.py:silent"))
    assert {s["reward_extra_info"]["why"] for s in lines_of(workshop / "silent/samples.jsonl")} == {
        "the judge sleeps"
    }


@pytest.mark.parametrize(
    "changes, message",
    [
        (dict(train_file="nowhere.parquet"), "nowhere.parquet: the file does not exist"),
        (dict(policy_gpu_share=0.0), "--policy-gpu-share 0.0: must be above 0"),
        (
            dict(policy_gpu_share=2.0),
            "--policy-gpu-share 2.0: must be at most 1; for more GPUs, raise --policy-r",
        ),
        (dict(temperature=0.0), "--temperature 0.0: must be above 0"),
        (dict(lr=math.inf), "--lr inf: must be a finite number"),
        (dict(entropy_coef=math.nan), "--entropy-coef nan: must be a finite number"),
        (dict(temperature=math.nan), "--temperature nan: must be a finite number"),
        (dict(timeout=math.nan), "--timeout nan: must be above 0"),
        (dict(clip_high=math.nan), "--clip-high nan: must be at least 0"),
        (dict(out_dir=""), "--out-dir '': is empty; pass a folder for this run"),
        (dict(clip_c=1.0), "--clip-c 1.0: must be above 1"),
        (dict(val_top_p=1.5), "--val-top-p 1.5: must be at most 1"),
        (dict(adam_betas=(0.9, 1.0)), "--adam-betas 0.9 1.0: both must be at least 0 and below 1"),
        (dict(adam_betas=(-0.1, 0.9)), "--adam-betas -0.1 0.9: both must be at least 0 and below 1"),
        (dict(rollout_gpu_share=1.5), "--rollout-gpu-share 1.5: must be above 0 and at most 1"),
        (dict(rollout_gpu_share=0.5, rollout_tensor_parallel=2), "--rollout-gpu-share 0.5: a server with"),
        (dict(model="nowhere"), "--model nowhere: must be a folder with config.json"),
        (dict(rollout="hf", bf16_head=True), "--bf16-head: does not work with --rollout hf"),
        (dict(rollout="vllm", val_temperature=3.0), "--temperature, --val-temperature 3: vLLM accepts"),
        (dict(rollout="hf", policy_ranks=2), "--rollout hf: needs the policy in the trainer's process"),
        (dict(rollout="hf", rollout_servers=2), "--rollout-servers 2: has no effect without --rollout vllm"),
        (dict(rollout="auto", device="cpu", rollout_cpus="0"), "--rollout-cpus 0: has no effect without"),
        (dict(device="cpu", bf16_head=True), "--bf16-head: does not work with --rollout hf"),
        (dict(max_refills=3), "--max-refills 3: has no effect without --dynamic-sampling"),
        (dict(val_file="val.jsonl"), "val_file='val.jsonl': must be a tuple, such as ('val.jsonl',)"),
        (dict(val_file=(), val_n=4), "--val-n 4: has no effect without --val-file; pass both"),
        (dict(overlong_factor=2.0), "--overlong-factor 2.0: has no effect without --overlong-buffer"),
        (dict(total_steps=0), "--total-steps 0: an evaluation needs validation data; pass --val-file FILE"),
        (dict(max_grad_norm=0.0), "--max-grad-norm 0.0: must be above 0"),
        (dict(rollout_servers=0), "--rollout-servers 0: must be above 0"),
        (dict(save_every=-1), "--save-every -1: must be at least 0"),
        (dict(val_every=-1), "--val-every -1: must be at least 0"),
        (dict(keep_checkpoints=-1), "--keep-checkpoints -1: must be at least 0"),
        (dict(rollout_vllm_args="--a 'b"), '--rollout-vllm-args "--a \'b": cannot be split'),
        (dict(rollout_vllm_args="--kv-offloading-backend=lmcache"), "-args --kv-offloading-backend: vLLM"),
        (
            dict(rollout_vllm_args="--hf-token secret --kv_transfer_config '{}'"),
            "--rollout-vllm-args --kv_transfer_config: vLLM cannot empty",
        ),
        (
            dict(overlong_buffer=9),
            "--overlong-buffer 9: must be between 1 and --max-response-length 8; pass 0 to turn off",
        ),
        (
            dict(reward_kwargs='{"a": "s3cret"'),
            "--reward-kwargs: must be a JSON object such as '{\"NAME\": 1}' (Expecting ',' delimiter",
        ),
        (dict(reward_kwargs="[1]"), "must be a JSON object"),
        (dict(reward_kwargs='{"a": Infinity}'), "--reward-kwargs: all numbers must be finite"),
        (dict(reward_kwargs='{"a": [{"b": NaN}]}'), "all numbers must be finite"),
        (dict(reward_kwargs='{"a": -1e999}'), "all numbers must be finite"),
        (
            dict(genrm=(str(Path(__file__).parent),), router_address=("y:1",)),
            "--genrm cannot be combined with --router-address",
        ),
        (dict(max_prompt_length=1), "no rows are left"),
        (dict(group_size=1), "--group-size 1: must be at least 2"),
        (
            dict(max_response_length=1000),
            "--max-response-length 1000: with the longest prompt, a sequence can have 10",
        ),
        (dict(val_top_p=0.0), "--val-top-p 0.0: must be above 0"),
        (dict(train_file=__file__), "test_grpo_trainer.py: the name must end in .parquet, .jsonl"),
        (dict(reward_fn="/nowhere.py:x"), "--reward-fn /nowhere.py:x: the file /nowhere.py does not exist"),
        (dict(reward_fn=f"{toy_world.__file__}:nothing"), "toy_world.py has no function nothing"),
        (dict(genrm=("nowhere",)), "--genrm nowhere: must be a folder with config.json"),
        (
            dict(val_file=("val.parquet:0",)),
            "--val-file val.parquet:0: must be FILE or FILE:N, with N of at least 1",
        ),
    ],
)
def test_wrong_settings_are_refused_in_one_line(tmp_path, model, tokenizer, changes, message):
    with pytest.raises(ValueError, match=re.escape(message)):
        prepared(tmp_path, model, tokenizer, **changes)


def prepared(folder, tiny, tokenizer, **changes):
    """Return a Run that has checked and read its input, but has not started anything."""
    tiny.save_pretrained(folder / "model")
    tokenizer.save_pretrained(folder / "model")
    rng = random.Random(0)
    rows = [toy_world.policy_row(toy_world.random_problem(rng, toy_world.REMAINDER), "toy", "train", 0)]
    pq.write_table(pa.Table.from_pylist(rows), folder / "train.parquet")
    (folder / "reward.py").write_text(REWARD)
    return Run(run_config(folder, "run", **changes))


def test_max_positions_is_the_models_limit_from_then_on(tmp_path, model, tokenizer):
    run = prepared(tmp_path, model, tokenizer, max_positions=2000, max_response_length=1000, device="cpu")
    policy = Policy(run.config, run.resume_from, torch.device("cpu"))
    policy.save(tmp_path / "saved")
    assert AutoConfig.from_pretrained(tmp_path / "saved").max_position_embeddings == 2000


@pytest.mark.slow
def test_a_second_run_in_the_same_folder_is_refused_and_deletes_nothing(tmp_path, model, tokenizer):
    run = prepared(tmp_path, model, tokenizer)
    half = tmp_path / "run/checkpoints/.step_1.tmp"
    half.mkdir(parents=True)
    for changes in (dict(), dict(dry_run=True), dict(resume="auto")):
        process = start_run(dataclasses.replace(run.config, **changes))
        assert process.wait(300) == 2 and half.is_dir()
        text = Path(f"{run.config.out_dir}.log").read_text()
        assert "is in use by another run" in text.strip().splitlines()[-1]
    run.lock.close()
    Run(run.config).lock.close()
    assert not half.exists()


def test_a_dry_run_checks_the_output_directory_and_leaves_no_trace_in_it(tmp_path, model, tokenizer):
    (tmp_path / "file").touch()
    run = prepared(tmp_path, model, tokenizer)
    half = tmp_path / "run/checkpoints/.step_1.tmp"
    half.mkdir(parents=True)

    def dry(out_dir):
        return Run(dataclasses.replace(run.config, dry_run=True, out_dir=str(tmp_path / out_dir)))

    with pytest.raises(ValueError, match="run: is in use by another run; wait until it ends"):
        dry("run")
    run.lock.close()
    for out_dir in ("run", "a/b"):
        with dry(out_dir), dry(out_dir):  # Neither locks the directory.
            pass
    assert half.is_dir() and not (tmp_path / "a").exists()
    with pytest.raises(OSError, match="^--out-dir .*/file/run: Not a directory; pass another directory"):
        dry("file/run")


def test_a_missing_column_and_a_missing_chat_template_are_named(tmp_path, model, tokenizer):
    model.save_pretrained(tmp_path / "model")
    tokenizer.save_pretrained(tmp_path / "model")
    pq.write_table(
        pa.table({"data_source": ["x"], "prompt": [[{"role": "user", "content": "x"}]]}),
        tmp_path / "train.parquet",
    )
    (tmp_path / "reward.py").write_text(REWARD)
    with pytest.raises(ValueError, match="row 0: the column 'reward_model' is missing"):
        grpo_trainer.train(run_config(tmp_path, "run"))
    (tmp_path / "model/chat_template.jinja").unlink()
    with pytest.raises(ValueError, match="has no chat template"):
        grpo_trainer.train(run_config(tmp_path, "run"))


@pytest.mark.slow
def test_unknown_flags_are_errors_and_every_flag_is_read():
    out = subprocess.run(
        [sys.executable, "grpo_trainer.py", "--no-such-flag", "1"], capture_output=True, text=True
    )
    assert out.returncode == 2 and "no-such-flag" in out.stdout + out.stderr
    source = Path("settings.py").read_text().replace("self.", "config.")
    for name in ("policy.py", "algorithm.py", "causal_lm.py"):
        source += Path(name).read_text().replace("options.", "config.")
    for name in ("grpo_trainer.py", "run.py", "run_folder.py", "cluster/ranks.py"):
        source += Path(name).read_text()
    shared = {field.name for field in dataclasses.fields(reward_loop.RewardOptions)}  # read by reward_loop.py
    for field in dataclasses.fields(grpo_trainer.Config):
        if field.name in shared:
            continue
        assert f"config.{field.name}" in source or f'"{field.name}"' in source, (
            f"--{field.name} is read nowhere"
        )


def test_arguments_for_vllm_can_be_given_as_the_help_says():
    """Such arguments begin with dashes, so the command line accepts them as values only after "="."""
    import tyro

    text = Path("settings.py").read_text() + Path("reward_loop.py").read_text()
    flags = re.findall(r'--(?:rollout|genrm)-vllm-args="[^"]+"', text)
    needed = ["--model", "m", "--train-file", "t", "--out-dir", "o"]
    for flag in flags:
        config = tyro.cli(grpo_trainer.Config, args=[*needed, flag.replace('"', "")])
        assert (config.rollout_vllm_args + config.genrm_vllm_args).startswith("--")
    assert len(flags) == 2
