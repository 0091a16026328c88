"""--overlap: what may overlap, what must not, what is trained on, and runs that are stopped, killed or fail.

The tests run the trainer's loop with the stand-ins of played_run.py: a real HTTP server whose responses end
when a test decides, and begin with the version of the weights that sampled them.
"""

import asyncio
import concurrent.futures
import errno
import gc
import itertools
import json
import os
import signal
import threading
from pathlib import Path
from types import SimpleNamespace

import pyarrow.parquet as pq
import pytest
from aiohttp import web

import forked
import grpo_trainer
import run_folder
from grpo_trainer import draw
from played import lines_of
from played_run import PlayedPolicy, PlayedRewards, PlayedRun, PlayedServers, write_input
from policy import RanksLost
from test_router import until
from tiny import terms, worked
from tools import view_run

PER_STEP = 16  # samples: 4 prompts x 4


@pytest.fixture(scope="module")
def settings(tmp_path_factory):
    return write_input(tmp_path_factory.mktemp("pipeline"))


@pytest.fixture(autouse=True)
def no_curves(monkeypatch):
    monkeypatch.setattr(run_folder.Log, "plot", lambda self: None)  # this takes a second each time


def trainer_of(settings, folder, **changes):
    defaults = dict(
        total_steps=5,
        train_batch_size=4,
        mini_batch_size=2,
        group_size=4,
        overlap=True,
        val_every=0,
        samples_per_step=1000,
        save_every=1,
        keep_checkpoints=0,
    )
    return PlayedRun(grpo_trainer.Config(**settings | dict(out_dir=str(folder / "run")) | defaults | changes))


class Scene:
    """A run with hooks for the test: `generate` for each training response, and `update`.

    Both get the step.
    """

    def __init__(self, trainer, generate=None, update=None, rewards=None):
        self.trainer, self.generate_hook, self.update_hook = trainer, generate, update
        self.first = trainer.step
        self.asked = 0  # training samples requested so far
        self.updating = self.first  # the step whose update has begun
        self.trained = {}  # step -> its samples
        # For each response of an evaluation: (weights, running training responses, trained steps).
        self.evaluated = []
        self.servers, self.policy = PlayedServers(self.first, self.generate), PlayedPolicy(trainer.config)
        self.play_update, self.policy.update = self.policy.update, self.update
        self.rewards = rewards or PlayedRewards()

    def run(self):
        return self.trainer.play(self.servers, self.rewards, self.policy)

    async def generate(self, body):
        if body["top_p"] < 1:
            self.evaluated.append((self.servers.version, self.servers.generating, self.updating))
        else:
            self.asked += 1
            step = self.first + 1 + (self.asked - 1) // PER_STEP
            if self.generate_hook:
                await self.generate_hook(self, step)

    def update(self, groups, lr, max_logprob_diff):
        self.updating += 1
        self.trained[self.updating] = sum(groups, [])
        if self.update_hook:
            self.update_hook(self, self.updating)
        return self.play_update(groups, lr, max_logprob_diff)

    def prompts(self):
        return [
            sample.row["extra_info"]["index"]
            for step in sorted(self.trained)
            for sample in self.trained[step][::4]
        ]


@pytest.mark.slow
def test_a_step_is_rolled_out_during_the_update_and_weights_change_between_responses(settings, tmp_path):
    async def generate(scene, step):
        if step > 2:  # the prefetch ends after the previous update
            await until(lambda: len(scene.trained) >= step - 1 and scene.policy.num_updates >= step - 1)
            # This is long enough to catch a sync that does not wait: PlayedServers.sync would raise.
            await asyncio.sleep(0.05)

    def update(scene, step):
        ahead = min(step + 1, 5) * PER_STEP
        asyncio.run(until(lambda: scene.asked == ahead))  # the prefetch has begun, so both overlap

    scene = Scene(trainer_of(settings, tmp_path), generate, update)
    metrics = scene.run()
    expected = [0, 1, 1, 1, 1]
    assert [line["rollout/staleness"] for line in metrics[1:]] == expected
    for step, samples in scene.trained.items():  # which weights sampled them
        assert {sample.response_ids[0] for sample in samples} == {step - 1 - expected[step - 1]}
    # No prompts are drawn after the last step.
    assert scene.asked == 5 * PER_STEP and scene.servers.version == 5
    rows = [row["extra_info"]["index"] for row in draw(scene.trainer.train_rows, 0, 20, 0)]
    assert scene.prompts() == rows and scene.trainer.num_prompts_trained == 20
    assert all({"time/rollout_wait", "time/sync", "time/reward_wait"} <= set(line) for line in metrics[1:])


class JudgedLate(PlayedRewards):
    """The verdicts of a step arrive after the rollouts of the next step were requested, and thus after its
    draw.
    """

    def submit(self, sample):
        future = concurrent.futures.Future()
        ready = super().submit(sample).result()
        ahead = min(sample["step"] + 1, 4) * PER_STEP

        async def answer():
            await until(lambda: self.scene.asked == ahead)
            future.set_result(ready)

        asyncio.run_coroutine_threadsafe(answer(), self.scene.servers.loop)
        return future


@pytest.mark.slow
def test_a_step_counts_its_own_prompts_though_the_next_ones_are_drawn_before_its_verdicts(settings, tmp_path):
    """Otherwise, a resumed run would continue with different prompts."""
    rewards = JudgedLate()
    rewards.scene = scene = Scene(trainer_of(settings, tmp_path, total_steps=4), rewards=rewards)
    scene.run()
    states = [tmp_path / f"run/checkpoints/step_{step}/trainer_state.json" for step in (1, 2, 3, 4)]
    assert [json.loads(state.read_text())["prompts_drawn"] for state in states] == [4, 8, 12, 16]


def test_without_overlap_nothing_does(settings, tmp_path):
    async def generate(scene, step):
        assert scene.servers.version == scene.policy.num_updates == step - 1

    def update(scene, step):
        assert scene.asked == step * PER_STEP and scene.servers.generating == 0

    scene = Scene(trainer_of(settings, tmp_path, overlap=False), generate, update)
    metrics = scene.run()
    assert not {"rollout/staleness", "time/rollout_wait"} & set(metrics[1])
    assert all(
        {sample.response_ids[0] for sample in samples} == {step - 1}
        for step, samples in scene.trained.items()
    )
    assert scene.trainer.prefetched is None


@pytest.mark.slow
def test_an_evaluation_has_the_servers_and_the_newest_weights_to_itself(settings, tmp_path):
    """This also holds if prefetched rollouts end some time after the update."""

    async def generate(scene, step):
        if step > 1:
            await until(lambda: scene.policy.num_updates >= step - 1)
            await asyncio.sleep(0.05)
            assert scene.evaluated[-1][2] < step - 1  # so far, only evaluations of earlier steps

    rows = pq.read_table(settings["train_file"]).slice(0, 3)
    pq.write_table(rows, tmp_path / "val.parquet")
    scene = Scene(
        trainer_of(settings, tmp_path, val_file=(str(tmp_path / "val.parquet"),), val_every=2), generate
    )
    metrics = scene.run()
    assert [line["step"] for line in metrics if "val/toy/mean@1" in line] == [0, 2, 4, 5] and len(
        scene.evaluated
    ) == 4 * 3
    for version, generating, step in scene.evaluated:
        assert version == step and generating <= 3
    assert [line["rollout/staleness"] for line in metrics[1:]] == [0, 1, 1, 1, 1]


def with_evaluation(settings, folder, **changes):
    rows = pq.read_table(settings["train_file"]).slice(0, 3)
    pq.write_table(rows, folder / "val.parquet")
    return trainer_of(settings, folder, val_file=(str(folder / "val.parquet"),), overlap=False, **changes)


@pytest.mark.slow
@pytest.mark.parametrize("total", [4, 5])
def test_an_evaluation_whose_line_was_lost_is_done_again(settings, tmp_path, total):
    """A power cut removed the last lines of metrics.jsonl, but the checkpoint of step 4 is complete."""
    Scene(with_evaluation(settings, tmp_path, val_every=2, total_steps=4)).run()
    path = tmp_path / "run/metrics.jsonl"
    path.write_text("".join(path.read_text().splitlines(keepends=True)[:3]))  # of steps 0, 1 and 2
    again = with_evaluation(settings, tmp_path, val_every=2, total_steps=total, resume="auto")
    metrics = Scene(again).run()
    evaluated = [line["step"] for line in metrics if "val/toy/mean@1" in line]
    assert evaluated == sorted({0, 2, 4, total})


@pytest.mark.slow
@pytest.mark.parametrize("total, steps", [(3, [2, 3]), (0, [0])])
def test_the_evaluation_before_training_can_be_left_out(settings, tmp_path, total, steps):
    """An evaluation that is the whole run (--total-steps 0) cannot."""
    run = with_evaluation(settings, tmp_path, val_every=2, total_steps=total, val_before_train=False)
    assert [line["step"] for line in Scene(run).run() if "val/toy/mean@1" in line] == steps


class SeesGroups(PlayedRewards):
    """Records how many responses had been requested when a group arrived."""

    job = SimpleNamespace(sees_group=True)

    def __init__(self):
        super().__init__()
        self.came = []  # (step, rows, responses)

    def submit_group(self, samples):
        rows = {sample["extra_info"]["index"] for sample in samples}
        self.came.append((samples[0]["step"], rows, [sample["response"] for sample in samples]))
        futures = super().submit_group(samples)
        for sample, future in zip(samples, futures):
            future.result()["reward_extra_info"]["scored"] = sample["response"]
        return futures


@pytest.mark.parametrize("overlap", [False, True])
def test_a_group_is_on_its_way_the_moment_its_last_sample_has_ended(settings, tmp_path, overlap):
    rewards = SeesGroups()

    async def generate(scene, step):
        row = (scene.asked - 1) % PER_STEP // 4
        if row == 0:  # the first group ends after the others were requested
            await until(lambda: len([step_ for step_, *_ in rewards.came if step_ == step]) == 3)
        elif scene.asked % 4 == 0:
            await asyncio.sleep(0.05)  # the last sample of a group ends later than the others

    scene = Scene(trainer_of(settings, tmp_path, overlap=overlap, total_steps=2), generate, rewards=rewards)
    texts = itertools.count()
    scene.trainer.decode = lambda ids: str(next(texts))  # Each response has another text.
    scene.run()
    for step, samples in scene.trained.items():
        rows = [sample.row["extra_info"]["index"] for sample in samples[::4]]
        came = [rows_ for step_, rows_, _ in rewards.came if step_ == step]
        assert came[-1] == {rows[0]} and sorted(came, key=min) == sorted(({row} for row in rows), key=min)
        for sample in samples:  # Each has the result of its own response.
            assert sample.result["reward_extra_info"]["scored"] == sample.text
        assert len({sample.text for sample in samples}) == PER_STEP
    assert all(len(responses) == 4 for *_, responses in rewards.came) and len(rewards.came) == 2 * 4


class ByRow(PlayedRewards):
    """A third of the rows are always correct, a third are always wrong, and the others differ within their
    group.
    """

    calls = 0

    def score(self, sample):
        self.calls += 1
        return [1.0, 0.0, float(self.calls % 2)][sample["extra_info"]["index"] % 3]


@pytest.mark.slow
def test_with_dynamic_sampling_no_prompt_is_left_out_and_none_drawn_twice(settings, tmp_path):
    """Refills are drawn before the next step. A resumed run continues with the next prompt."""
    options = dict(dynamic_sampling=True, max_refills=20, train_batch_size=4)
    stopped = trainer_of(settings, tmp_path, total_steps=2, **options)
    Scene(stopped, rewards=ByRow()).run()
    drawn = stopped.num_prompts_trained
    resumed = trainer_of(settings, tmp_path, total_steps=5, resume="auto", **options)
    assert (resumed.step, resumed.num_prompts_trained) == (2, drawn)
    scene = Scene(resumed, rewards=ByRow())
    metrics = scene.run()
    assert all(line["dynamic/kept"] == 4 and line["dynamic/refills"] > 0 for line in metrics[1:])
    # The first step is on-policy, also after resuming.
    assert [line["rollout/staleness"] for line in metrics[1:]] == [
        0,
        1,
        0,
        1,
        1,
    ]
    total = sum(line["dynamic/prompts"] for line in metrics[1:])
    rows = draw(scene.trainer.train_rows, 0, total, 0)
    written = lines_of(tmp_path / "run", "samples.jsonl")
    assert [sample["prompt"] for sample in written][::4] == [row["prompt"][-1]["content"] for row in rows]
    assert scene.trainer.num_prompts_trained == total
    for step, samples in scene.trained.items():
        assert {sample.response_ids[0] for sample in samples} == {
            step - 1 - metrics[step]["rollout/staleness"]
        }


class StyleOfSome(ByRow):
    """Returns another key for the first sample only, as a function may do for correct answers."""

    def submit(self, sample):
        future = super().submit(sample)
        if self.calls == 1:
            future.result()["reward_extra_info"]["style"] = 1.0
        return future


def test_a_refill_of_which_the_function_says_less_stops_nothing(settings, tmp_path):
    options = terms(acc=1, style=0.1) | dict(dynamic_sampling=True)
    trainer = trainer_of(settings, tmp_path, total_steps=1, overlap=False, **options)
    scene = Scene(trainer, rewards=StyleOfSome())
    assert scene.run()[-1]["dynamic/refills"] > 0


def killed_in_the_middle(settings, folder):
    """A separate process kills itself with SIGKILL in the update of step 3, while the rollouts of step 4 are
    running.
    """

    def update(scene, step):
        if step == 3:
            asyncio.run(until(lambda: scene.asked == 4 * PER_STEP))
            os.kill(os.getpid(), signal.SIGKILL)

    async def generate(scene, step):
        if step == 4:
            await asyncio.sleep(3600)

    Scene(trainer_of(settings, folder), generate, update).run()


@pytest.mark.slow
def test_killed_with_a_batch_in_flight_and_resumed_trains_on_every_prompt_once(settings, tmp_path):
    code = (
        f"import pathlib, test_pipeline as t; t.killed_in_the_middle({settings!r}, "
        f"pathlib.Path({str(tmp_path)!r}))"
    )
    paths = os.pathsep.join(str(Path(__file__).parent.parent / name) for name in ("", "tests"))
    killed = forked.run(["-c", code], env=os.environ | {"PYTHONPATH": paths})
    assert killed.returncode == -signal.SIGKILL, killed.stderr
    written = Path(tmp_path, "run/samples.jsonl").read_text()
    # Everything that is logged was trained on, or was about to be.
    assert '"step": 3' in written and '"step": 4' not in written

    scene = Scene(trainer_of(settings, tmp_path, resume="auto"))
    metrics = scene.run()
    assert [line["step"] for line in metrics] == [0, 1, 2, 3, 4, 5] and sorted(scene.trained) == [3, 4, 5]
    assert [line["rollout/staleness"] for line in metrics[1:]] == [0, 1, 0, 1, 1]
    rows = draw(scene.trainer.train_rows, 0, 20, 0)
    # The prefetched batch is drawn again.
    assert scene.prompts() == [row["extra_info"]["index"] for row in rows[8:]]
    samples = lines_of(tmp_path / "run", "samples.jsonl")
    assert [sample["prompt"] for sample in samples][::4] == [row["prompt"][-1]["content"] for row in rows]
    assert [sample["step"] for sample in samples] == [step for step in range(1, 6) for _ in range(PER_STEP)]


def test_a_rollout_that_fails_in_the_background_stops_the_run_with_its_message(settings, tmp_path):
    """The step that is being trained in the meantime is not lost."""

    async def generate(scene, step):
        if step == 3:
            raise web.HTTPBadRequest(text="the prompt is too long")

    def update(scene, step):
        if step == 2:
            asyncio.run(until(lambda: scene.trainer.prefetched.rolled_out.is_set()))

    scene = Scene(trainer_of(settings, tmp_path, save_every=0), generate, update)
    with pytest.raises(RuntimeError, match="HTTP 400: the prompt is too long"):
        scene.run()
    assert sorted(scene.trained) == [1, 2]
    assert [path.name for path in Path(tmp_path, "run/checkpoints").iterdir()] == ["step_2"]
    assert scene.asked <= 3 * PER_STEP


@pytest.mark.parametrize("dynamic", [False, True])
def test_a_judge_that_falls_silent_stops_the_run_with_its_message(settings, tmp_path, dynamic):
    class FallsSilent(ByRow):
        def score(self, sample):
            return super().score(sample) if sample["step"] < 3 else None

    scene = Scene(trainer_of(settings, tmp_path, dynamic_sampling=dynamic), rewards=FallsSilent())
    with pytest.raises(RuntimeError, match="step 3: 100% of the samples that needed a verdict have none"):
        scene.run()
    assert sorted(scene.trained) == [1, 2]


@pytest.mark.parametrize("fault", [None, OSError("the disk is full"), KeyboardInterrupt()])
def test_a_run_that_stops_with_an_error_has_a_page(settings, tmp_path, monkeypatch, capsys, fault):
    """An error of the page does not hide that of the run."""

    class Silent(PlayedRewards):
        def score(self, sample):
            return None

    def fail(folders):
        raise fault

    if fault:
        monkeypatch.setattr(view_run, "write_page", fail)
    scene = Scene(trainer_of(settings, tmp_path, overlap=False), rewards=Silent())
    with pytest.raises(RuntimeError, match="step 1: 100% of the samples that needed a verdict have none"):
        scene.run()
    page = tmp_path / "run/report.html"
    assert page.is_file() == (f"page: {page}" in capsys.readouterr().out) == (not fault)
    if not fault:
        count = PER_STEP
        assert f"{count} of {count} logged samples have no verdict, the first: no_verdict" in page.read_text()


def test_ctrl_c_does_not_wait_for_a_page(settings, tmp_path):
    def update(scene, step):
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        Scene(trainer_of(settings, tmp_path), update=update).run()
    assert not Path(tmp_path, "run/report.html").exists()


class ByStep(PlayedRewards):
    """Every answer is correct.

    The first paragraph has a different score in each sample, and the second has none.
    """

    silent_from = 100

    def submit(self, sample):
        future = concurrent.futures.Future()
        self.calls = getattr(self, "calls", 0) + 1
        score = 1.0
        if sample["step"] >= self.silent_from and self.calls % 4:
            score = None
        info = {"score": score, "acc": True, "step_scores": [float(self.calls % 2)]}
        future.set_result({"reward_score": score, "reward_extra_info": info, "status": "ok"})
        return future


def of_two_paragraphs(settings, folder, **changes):
    """Return a run whose responses have two tokens, with one paragraph each."""
    trainer = trainer_of(settings, folder, **worked("steps"), **changes)
    trainer.decode = lambda ids: "1\n\n2"[: 3 * len(ids)]
    return trainer


@pytest.mark.slow
def test_a_group_whose_last_tokens_alone_learn_nothing_teaches(settings, tmp_path):
    """Paragraphs after the last score learn from the outcome, which is the same for all samples.

    Earlier ones have step scores.
    """
    scene = Scene(of_two_paragraphs(settings, tmp_path, total_steps=2, max_idle_steps=2), rewards=ByStep())
    metrics = scene.run()
    assert [line["reward/groups_with_spread"] for line in metrics[1:]] == [1.0, 1.0]
    assert all(sample.advantage == 0 and sample.token_advantages[0] for sample in scene.trained[1])


def test_too_few_verdicts_are_told_also_where_paragraphs_have_advantages(settings, tmp_path):
    rewards = ByStep()
    rewards.silent_from = 2
    scene = Scene(of_two_paragraphs(settings, tmp_path), rewards=rewards)
    with pytest.raises(RuntimeError, match="step 2: 75% of the samples that needed a verdict have none"):
        scene.run()
    written = lines_of(tmp_path / "run", "samples.jsonl")
    assert len([line for line in written if line["step"] == 2]) == PER_STEP


def threads_end():
    for thread in threading.enumerate():
        if thread.name.startswith("step "):
            thread.join(200)
            assert not thread.is_alive()


class NeverSays(PlayedRewards):
    """The judge never responds in step 3."""

    def submit(self, sample):
        return super().submit(sample) if sample["step"] < 3 else concurrent.futures.Future()


@pytest.mark.slow
@pytest.mark.parametrize("moment", ["in the update", "while waiting for verdicts"])
def test_ctrl_c_with_rollouts_and_verdicts_that_never_come_leaves_at_once(settings, tmp_path, moment, caplog):
    async def generate(scene, step):
        if scene.asked == 4 * PER_STEP and moment != "in the update":
            os.kill(os.getpid(), signal.SIGINT)
        if step == 4 or step == 3 and moment == "in the update":
            await asyncio.sleep(3600)

    def update(scene, step):
        if moment == "in the update" and step == 2:
            asyncio.run(until(lambda: scene.asked == 3 * PER_STEP))
            signal.raise_signal(signal.SIGTERM)

    scene = Scene(trainer_of(settings, tmp_path, save_every=0), generate, update, NeverSays())
    with pytest.raises(KeyboardInterrupt):
        scene.run()
    # The step was completed.
    assert [path.name for path in Path(tmp_path, "run/checkpoints").iterdir()] == ["step_2"]
    lines = lines_of(tmp_path / "run")
    assert [line["step"] for line in lines] == [0, 1, 2] and ("time/sync" in lines[2]) == (
        moment != "in the update"
    )
    threads_end()
    del scene
    gc.collect()
    # There is no message about cancelled requests.
    assert not [record for record in caplog.records if record.name == "asyncio"]


@pytest.mark.slow
def test_where_ranks_are_lost_the_batch_in_flight_is_drawn_again(settings, tmp_path):
    """The ranks die in the update of step 4, while step 5 is rolled out.

    New ranks start from the checkpoint of step 2 in the same process.
    """
    lost = []

    async def generate(scene, step):
        if step == 5 and not lost:
            await asyncio.sleep(3600)

    def update(scene, step):
        if step == 4 and not lost:
            asyncio.run(until(lambda: scene.asked == 5 * PER_STEP))
            lost.append(step)
            raise RanksLost("rank 1 died")

    scene = Scene(trainer_of(settings, tmp_path, save_every=2), generate, update)

    def restart(source):
        # It has noticed that step 5 was cancelled.
        asyncio.run(until(lambda: scene.servers.generating == 0))
        scene.updating, scene.servers.version, scene.asked = 2, 1, 2 * PER_STEP  # recover() syncs: 2

    scene.policy.restart, scene.policy.load_optimizer = restart, lambda folder: None
    metrics = scene.run()
    assert [line["step"] for line in metrics] == [0, 1, 2, 3, 4, 5]
    assert [line["rollout/staleness"] for line in metrics[1:]] == [0, 1, 0, 1, 1]
    assert scene.prompts() == [row["extra_info"]["index"] for row in draw(scene.trainer.train_rows, 0, 20, 0)]
    for step, samples in scene.trained.items():
        assert {sample.response_ids[0] for sample in samples} == {
            step - 1 - metrics[step]["rollout/staleness"]
        }


@pytest.mark.slow
def test_an_error_in_the_update_leaves_the_rollouts_behind(settings, tmp_path):
    async def generate(scene, step):
        if step == 3:
            await asyncio.sleep(3600)

    def update(scene, step):
        if step == 2:
            raise RuntimeError("loss nan")

    scene = Scene(trainer_of(settings, tmp_path), generate, update)
    with pytest.raises(RuntimeError, match="loss nan"):
        scene.run()
    threads_end()


def test_the_limit_on_the_difference_is_twice_as_large_for_samples_that_are_one_update_old(
    settings, tmp_path
):
    limits = []
    scene = Scene(trainer_of(settings, tmp_path, max_logprob_diff=0.3))
    update = scene.policy.update
    scene.policy.update = lambda groups, lr, limit: limits.append(limit) or update(groups, lr, limit)
    scene.run()
    assert limits == [0.3] + [0.6] * 4


def test_the_learning_rate_rises_over_the_warmup_steps(settings, tmp_path):
    rates = []
    scene = Scene(trainer_of(settings, tmp_path, lr=1.0, lr_warmup_steps=2, total_steps=3))
    update = scene.policy.update
    scene.policy.update = lambda groups, lr, limit: rates.append(lr) or update(groups, lr, limit)
    metrics = scene.run()
    assert rates == [line["actor/lr"] for line in metrics[1:]] == [0.5, 1, 1]


@pytest.mark.parametrize(
    "changes, message",
    [
        (dict(rollout="hf"), "--overlap: does not work with --rollout hf"),
        (dict(reward_mode="colocate"), "--overlap: does not work with .*--reward-mode colocate"),
        (dict(tis_cap=0.0), "--tis-cap 0.0: must be above 0"),
    ],
)
def test_what_cannot_overlap_is_refused(settings, tmp_path, changes, message):
    with pytest.raises(ValueError, match=message):
        trainer_of(settings, tmp_path, **changes)


def test_old_samples_are_corrected_for_by_default(settings, tmp_path):
    assert trainer_of(settings, tmp_path / "a", tis_cap=None).config.resolved(0).tis_cap == 2.0
    assert trainer_of(settings, tmp_path / "b", tis_cap=1.5).config.resolved(0).tis_cap == 1.5
    in_turn = trainer_of(settings, tmp_path / "c", tis_cap=None, overlap=False)
    assert in_turn.config.resolved(0).tis_cap is None


@pytest.mark.parametrize("overlap", [True, False])
def test_an_update_whose_weights_cannot_be_handed_over_is_saved(settings, tmp_path, overlap):
    scene = Scene(trainer_of(settings, tmp_path, save_every=0, overlap=overlap))
    sync = scene.servers.sync

    def refused():
        if scene.updating == 2:
            raise RuntimeError("server 0: POST /collective_rpc failed")
        sync()

    scene.servers.sync = refused
    with pytest.raises(RuntimeError, match="collective_rpc failed"):
        scene.run()
    has_metrics_of_step_2(tmp_path / "run")


def has_metrics_of_step_2(folder):
    """Check that the saved step, which a resumed run does not repeat, has its metrics."""
    assert [path.name for path in Path(folder, "checkpoints").iterdir()] == ["step_2"]
    lines = lines_of(folder)
    assert [line["step"] for line in lines] == [0, 1, 2]
    of_whole_steps = {"time/sync", "time/rollout_wait", "time/step", "perf/tokens_per_s", "actor/restarts"}
    assert lines[2].keys() >= lines[1].keys() - of_whole_steps


def test_a_step_that_could_not_be_logged_is_saved_with_its_metrics(settings, tmp_path, monkeypatch):
    scene = Scene(trainer_of(settings, tmp_path, save_every=0, overlap=False))

    def open_on_a_full_disk(path, *mode, **options):
        file = open(path, *mode, **options)
        if Path(path).name == "metrics.jsonl" and scene.updating == 2:
            monkeypatch.undo()  # There is space again.
            file.write('{"step": 2, "rewa')
            file.close()
            raise OSError(errno.ENOSPC, "No space left on device")
        return file

    monkeypatch.setattr(run_folder, "open", open_on_a_full_disk, raising=False)
    with pytest.raises(OSError, match="No space left on device"):
        scene.run()
    has_metrics_of_step_2(tmp_path / "run")


def test_a_judge_that_is_down_ends_an_evaluation_also_the_last_one(settings, tmp_path):
    rows, done = pq.read_table(settings["train_file"]).slice(0, 3), []
    pq.write_table(rows, tmp_path / "val.parquet")

    class FallsSilent(PlayedRewards):
        def score(self, sample):
            return None if done else super().score(sample)

    run = trainer_of(settings, tmp_path, val_file=(str(tmp_path / "val.parquet"),))
    scene = Scene(run, update=lambda scene, step: done.extend([1] * (step == 5)), rewards=FallsSilent())
    with pytest.raises(RuntimeError, match="step 5: 100% of the samples that needed a verdict have none"):
        scene.run()
    assert sorted(scene.trained) == [1, 2, 3, 4, 5]
