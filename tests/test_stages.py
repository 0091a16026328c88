"""The three stages for a GPU, on a CPU: tiny models, a stand-in for vLLM, and a scripted TRL."""

import dataclasses
import json
import os
import shlex
import shutil
import struct
import subprocess
import sys
import tarfile
import time
from pathlib import Path
from types import SimpleNamespace

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
import tyro

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT / "benchmarks"), str(ROOT / "benchmarks/gpu_kit")]
import check_gpu
import forked
import gpu_models
import measuring
import prepare_data
import stages
from cluster.placement import layout, process_specs
from played import MODELS, stand_in_for_vllm
from toy import warm_start

TINY = dict(device="cpu", size="tiny")


def lines_of(capfd):
    return [json.loads(line) for line in capfd.readouterr().out.splitlines() if line.startswith("{")]


@pytest.mark.slow
def test_speed_measures_each_way_and_continues_after_one_that_fails(tmp_path, monkeypatch, capfd):
    """The same samples and weights give the same gradient with and without recomputed activations."""
    monkeypatch.setitem(stages.WAYS, "unknown", dict(no_such_setting=1))
    monkeypatch.setitem(gpu_models.PEAK, "CPU", 1e12)
    rollouts = []

    def check_speed(work, device, count, length):
        rollouts.append((count, length, (work / "model/config.json").is_file()))
        yield "weight sync", True, "0.1 s"

    monkeypatch.setattr(check_gpu, "check_speed", check_speed)
    ways = ("plain", "checkpointing", "unknown", "four mini-batches", "offload, checkpointing", "bf16 head")
    stages.speed(stages.Config("speed", ways=ways, length=16, **TINY), tmp_path)
    made, *updates, sync = lines_of(capfd)
    assert made["made"] == "tiny" and rollouts == [(8, 16, True)]
    assert {key: sync[key] for key in ("part", "property", "holds", "found")} == {
        "part": "rollouts",
        "property": "weight sync",
        "holds": True,
        "found": "0.1 s",
    }
    found = {line.get("way", "unknown"): line for line in updates}
    assert list(found) == list(ways) and "no_such_setting" in found["unknown"]["error"]
    plain = found["plain"]
    assert plain["samples"] == 32 and plain["update_s"] > 0 and plain["planned_gb"] > 0
    # 32 samples of 48 tokens: operations per second are tokens/s times operations per token.
    operations = 6e6 * plain["m_weights"] + 6 * 2 * 64 * 48
    assert plain["of_peak"] == pytest.approx(plain["tokens_per_s"] * operations / 1e12)
    for way in ("checkpointing", "offload, checkpointing"):
        assert found[way]["actor/grad_norm"] == pytest.approx(plain["actor/grad_norm"], rel=1e-4), way
    norm = found["bf16 head"]["actor/grad_norm"]
    assert norm != plain["actor/grad_norm"] == pytest.approx(norm, rel=1e-2)
    assert found["four mini-batches"]["actor/grad_norm"] != pytest.approx(plain["actor/grad_norm"], rel=1e-2)


def test_every_way_has_settings_of_this_commit():
    names = {field.name for field in dataclasses.fields(check_gpu.grpo_trainer.Config)}
    for settings in stages.WAYS.values():
        assert set(settings) <= names
    assert set(stages.Config("speed").ways) <= set(stages.WAYS)


def test_the_way_with_cudnn_attention_uses_no_other_kernel(tmp_path, monkeypatch):
    """A policy turns it off, because it gave NaN gradients with an attention mask."""
    seen, cuda = [], torch.backends.cuda

    def time_update(learner, samples, device):
        seen.append((cuda.cudnn_sdp_enabled(), cuda.flash_sdp_enabled(), cuda.math_sdp_enabled()))
        return {}, {"actor/loss": 0.0, "actor/grad_norm": 0.0}

    monkeypatch.setattr(gpu_models, "time_update", time_update)
    list(stages.model_of("tiny", tmp_path, torch.device("cpu")))
    was_on = cuda.cudnn_sdp_enabled()
    cuda.enable_cudnn_sdp(False)  # as a policy on a GPU does
    try:
        for way in ("cuDNN attention", "plain"):
            list(stages.update(stages.Config("speed", **TINY), tmp_path, way, "tiny", 8, 2))
    finally:
        cuda.enable_cudnn_sdp(was_on)
    assert seen == [(True, False, False), (False, True, True)]


class PlayedTrainer:
    """A GRPOTrainer whose steps take no time, with completions of 3 and 9 letters."""

    def __init__(self, model, reward, args, data, processing_class, callbacks, optimizers):
        (self.clock,), self.args, self.reward, self.rows = callbacks, args, reward, data

    def train(self):
        assert len(self.rows["prompt"]) == 8 * self.args["max_steps"]
        assert self.reward([[{"content": "abc"}], [{"content": "abcdefghi"}]]) == [3 / 6, 2 / 6]
        for step in range(1, 1 + self.args["max_steps"]):
            self.clock.on_step_begin(None, None, None)
            self.clock.on_step_end(None, None, None)
            state = SimpleNamespace(global_step=step)
            self.clock.on_log(None, state, None, {"completions/mean_length": 6.0})
            self.clock.on_log(None, state, None, {"train_runtime": 1.0})


@pytest.fixture
def trl(monkeypatch):
    arguments = []
    config = lambda **options: arguments.append(options) or options  # noqa: E731
    monkeypatch.setitem(sys.modules, "trl", SimpleNamespace(GRPOConfig=config, GRPOTrainer=PlayedTrainer))
    datasets = SimpleNamespace(Dataset=SimpleNamespace(from_dict=dict))
    monkeypatch.setitem(sys.modules, "datasets", datasets)
    return arguments


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_steps_of_trl_are_followed_like_ours(device, tmp_path, trl, monkeypatch, tokenizer):
    warm_start.new_model(len(tokenizer), seed=0).save_pretrained(tmp_path / "model")
    tokenizer.save_pretrained(tmp_path / "model")
    rows = [{"prompt": [{"role": "user", "content": "?"}]}] * 32
    pq.write_table(pa.Table.from_pylist(rows), tmp_path / "train.parquet")
    monkeypatch.setattr(stages.torch.cuda, "synchronize", lambda: None)
    monkeypatch.setattr(stages.os, "environ", dict(os.environ))
    stages.run_trl(str(tmp_path), "5", "16", device)
    (arguments,) = trl
    assert arguments["max_steps"] == 5 and arguments["num_generations"] == 8
    assert arguments["max_completion_length"] == 16 and arguments["logging_strategy"] == "steps"
    batch = arguments["per_device_train_batch_size"] * arguments.get("gradient_accumulation_steps", 1)
    assert batch == 64 and arguments["use_cpu"] is (device == "cpu")
    assert arguments.get("vllm_mode") == {"cpu": None, "cuda": "colocate"}[device]
    ended = SimpleNamespace(poll=lambda: 0, returncode=0)
    *steps, last = stages.follow({"trl": ended}, tmp_path)
    assert [step.get("step") for step in steps] == [None, 1, 2, 3, 4, 5]
    assert steps[1]["response_length/mean"] == 6.0 and list(last["medians"]) == ["time/step"]


def test_a_run_that_fails_shows_the_end_of_its_log_and_the_others_continue(tmp_path, capfd):
    (tmp_path / "good").mkdir()
    written = 'echo \'{"step": 0}\n{"step": 1, "time/step": 2.0, "other": 3}\' > good/metrics.jsonl'
    commands = {
        "bad": ["bash", "-c", "echo no room; exit 3"],
        "good": ["bash", "-c", f"cd {tmp_path}; {written}"],
    }
    with stages.started(commands, tmp_path) as runs:
        stages.say("fapo", stages.follow(runs, tmp_path))
    lines = [{k: line[k] for k in line if k not in ("part", "after")} for line in lines_of(capfd)]
    assert {"run": "bad", "error": "no room"} in lines
    good = [line for line in lines if line["run"] == "good"]
    assert good == [
        {"run": "good", "step": 0},
        {"run": "good", "step": 1, "time/step": 2.0},
        {"run": "good", "medians": {"time/step": 2.0}},
    ]


def test_an_evaluation_is_shown_although_its_step_was(tmp_path):
    path, polls = tmp_path / "run/metrics.jsonl", iter([None, 0])
    path.parent.mkdir()
    path.write_text('{"step": 0}\n{"step": 1, "time/step": 2.0}\n')

    def poll():
        state = next(polls)
        if state == 0:
            path.write_text('{"step": 0}\n{"step": 1, "time/step": 2.0, "val/toy/mean@1": 0.5}\n')
        return state

    found = list(stages.follow({"run": SimpleNamespace(poll=poll, returncode=0)}, tmp_path))
    step = {"run": "run", "step": 1, "time/step": 2.0}
    assert found[1:] == [step, step | {"val/toy/mean@1": 0.5}, {"run": "run", "medians": {"time/step": 2.0}}]


def test_what_was_started_ends_with_its_children(tmp_path):
    with stages.started({"sleeps": ["bash", "-c", "sleep 600 & echo $!; wait"]}, tmp_path) as runs:
        while not (tmp_path / "sleeps.log").read_text().strip():
            pass
    child = (tmp_path / "sleeps.log").read_text().strip()
    assert runs["sleeps"].returncode == -9
    state = Path(f"/proc/{child}/stat")
    until = time.monotonic() + 60
    while state.exists() and state.read_text().split()[2] not in "ZX":  # It takes a moment to end.
        assert time.monotonic() < until
        time.sleep(0.01)


@pytest.mark.parametrize(
    "arguments, error",
    [("speed --ways odd", "--ways odd: no such way"), ("fapo --judge /nowhere", "has no config.json")],
)
def test_bad_input_is_rejected_first(arguments, error, monkeypatch):
    monkeypatch.setattr(sys, "argv", ["stages.py", *arguments.split()])
    with pytest.raises(SystemExit, match=error):
        stages.main()


@pytest.fixture(scope="module")
def played_vllm(tmp_path_factory):
    """Let this file's Ray, which must start afterwards, find a stand-in for vLLM."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", stand_in_for_vllm(tmp_path_factory.mktemp("vllm")))
        yield


@pytest.mark.slow
def test_fapo_trains_both_policies_with_a_served_judge(tmp_path, monkeypatch, capfd, played_vllm, one_ray):
    """The trainers and the router are real, and a stand-in for vLLM serves the judge."""
    python = forked.on_path(tmp_path / "bin").split(":")[0] + "/python"
    (tmp_path / "functions.sh").write_text(f'python() {{ {python} "$@"; }}\n')
    monkeypatch.setenv("BASH_ENV", str(tmp_path / "functions.sh"))  # comes before any `python` in PATH
    data = tmp_path / "toy"
    prepare_data.prepare(prepare_data.Config(tasks=("toy",), out_dir=data))
    for file in (data / "toy_test.parquet", data / "toy_total_test.parquet"):
        pq.write_table(pq.read_table(file).slice(0, 8), file)
    capfd.readouterr()
    config = stages.Config("fapo", judge=MODELS / "judge", data=data, device="cpu", steps=2)
    stages.say("fapo", stages.fapo(config, tmp_path))
    lines = lines_of(capfd)
    assert not [line for line in lines if "error" in line], lines
    steps = [(line["run"], line["step"]) for line in lines if "step" in line]
    assert sorted(set(steps)) == [(run, step) for run in ("baseline", "fapo") for step in range(3)]
    *_, last = (line for line in lines if line.get("run") == "fapo" and line.get("step") == 2)
    assert last["time/reward_wait"] >= 0 and "val/toy/mean@1" in last
    assert "| FAPO, step 2 |" in lines[-1]["table"]


@pytest.mark.slow
def test_trl_that_is_missing_is_an_error_and_our_steps_are_measured(
    tmp_path, monkeypatch, capfd, played_vllm, one_ray
):
    python = forked.on_path(tmp_path / "bin").split(":")[0] + "/python"
    monkeypatch.setattr(sys, "executable", python)
    config = stages.Config("trl", length=8, steps=2, **TINY)
    stages.say("trl", stages.trl(config, tmp_path))
    lines = lines_of(capfd)
    (error,) = (line for line in lines if "error" in line)
    assert lines[0]["models"] == "small" and error["run"] == "trl" and "No module named" in error["error"]
    ours = [line for line in lines if line.get("run") == "ours"]
    assert {line["step"] for line in ours[:-1]} == {0, 1, 2} and ours[-1]["medians"]["time/step"] > 0


@pytest.mark.slow
def test_speed_measures_rollouts_and_a_sync_on_servers(tmp_path, capfd, played_vllm, one_ray):
    stages.speed(stages.Config("speed", ways=("plain",), length=16, **TINY), tmp_path)
    lines = lines_of(capfd)
    assert not [line for line in lines if "error" in line], lines
    rows = {line["property"]: line["found"] for line in lines if line["part"] == "rollouts"}
    assert (
        "tokens/s" in rows["tokens/s, as a fraction of those of bare vLLM"] and "GB/s" in rows["weight sync"]
    )


@pytest.mark.parametrize("stage, count", [("fapo", 2), ("trl", 1)])
def test_the_runs_of_a_stage_fit_on_one_gpu(stage, count, tmp_path, monkeypatch):
    """Record the command lines for a GPU, which the stages start in this order, instead of running them."""
    for folder in ("bin", "copy"):
        (tmp_path / folder).mkdir()
    shutil.copytree(ROOT / "recipes", tmp_path / "copy/recipes")  # without .venv, so that bin/ comes first
    python, log = tmp_path / "bin/python", tmp_path / "arguments"
    python.write_text(f'#!/bin/bash\necho "${{@@Q}}" >>{log}\n')
    python.chmod(0o755)
    judges = []

    def play_judge(config):
        judges.append(config)
        return SimpleNamespace(router_address="127.0.0.1:7", shutdown=lambda: None)

    monkeypatch.setattr(sys, "executable", str(python))
    monkeypatch.setattr(measuring, "ROOT", tmp_path / "copy")
    monkeypatch.setattr(stages.genrm_server, "ModelServers", play_judge)
    monkeypatch.setattr(check_gpu, "make_models", lambda work, device: [])
    monkeypatch.setattr(stages.report, "report", lambda work: "")
    list(getattr(stages, stage)(stages.Config(stage, judge=MODELS / "judge"), tmp_path))
    lines = [shlex.split(line) for line in log.read_text().splitlines()]
    runs = [arguments[1:] for arguments in lines if arguments[0] == "grpo_trainer.py"]
    assert len(runs) == count
    shares = [judge.gpu_share for judge in judges]
    for flags in runs:
        config = tyro.cli(check_gpu.grpo_trainer.Config, args=flags).resolved(1)
        assert (config.device, config.rollout, config.total_steps) == ("cuda", "vllm", {2: 60, 1: 5}[count])
        ((bundle,), _) = layout(process_specs(config), 1)  # ValueError if the processes do not fit
        assert bundle["GPU"] == 1
        shares += [config.policy_gpu_share, config.rollout_gpu_share]
    assert len(shares) == {2: 5, 1: 2}[count] and sum(shares) <= 0.97
    judged = [flags for flags in runs if "127.0.0.1:7" in flags]
    assert len(judged) == len(judges) == count - 1


@pytest.mark.skipif(not (ROOT / ".git").exists(), reason="a copy without the repository")
def test_the_packed_tree_has_what_a_stage_needs_and_not_the_rest(tmp_path):
    judge, data, tree = (tmp_path / name for name in ("judge", "data", "tree"))
    for folder in (judge / "optimizer", data / "policy", data / "judge"):
        folder.mkdir(parents=True)
    for file in (judge / "config.json", judge / "optimizer/big", data / "toy_train.parquet"):
        file.write_text("{}")
    pack = ["bash", str(ROOT / "benchmarks/gpu_kit/pack.sh"), tree, judge, data]
    done = subprocess.run(pack, capture_output=True, text=True)
    assert done.returncode == 0 and f"{tree}: " in done.stdout and " MiB" in done.stdout, done.stderr
    needed = ["grpo_trainer.py", "recipes/toy_runs.sh", "benchmarks/check_gpu.py", "toy/report.py"]
    needed += ["data/toy/toy_train.parquet", "data/toy/policy", stages.Config.judge / "config.json"]
    assert [name for name in needed if not (tree / name).exists()] == []
    left = ["tests", "docs", "toy/models", "data/toy/judge", stages.Config.judge / "optimizer"]
    assert [name for name in left if (tree / name).exists()] == []
    again = subprocess.run(pack, capture_output=True, text=True)
    assert again.returncode == 2 and "exists; pass a new folder" in again.stderr
    (judge / "model.safetensors").touch()
    os.truncate(judge / "model.safetensors", 61 * 2**20)
    pack[2] = tmp_path / "large"
    large = subprocess.run(pack, capture_output=True, text=True)
    assert large.returncode == 1 and "more than 60 MiB" in large.stderr


def test_run_sh_unpacks_the_kit_and_limits_the_time_of_each_stage(tmp_path):
    """Python and `timeout` are played. The limits and the start of the machine fit into 900 s."""
    kit, out = tmp_path / "kit", tmp_path / "out"
    for folder in (kit, tmp_path / "bin"):
        folder.mkdir()
    shutil.copy(ROOT / "benchmarks/gpu_kit/run.sh", kit)
    (tmp_path / "package.py").touch()
    with tarfile.open(kit / "kit1.tar.xz", "w:xz") as archive:
        archive.add(tmp_path / "package.py", "package.py")
    python = f"""[ "$1" != -c ] || exec {shlex.quote(sys.executable)} "$@"
        echo "{{\\"command\\": \\"$*\\", \\"path\\": \\"$PYTHONPATH\\"}}"; echo why >&2; exit 3"""
    timeout = f"""echo "$1 $2 $3" >>{tmp_path}/limits; shift 3; exec "$@" """
    for name, text in (("python3", python), ("timeout", timeout)):
        (tmp_path / "bin" / name).write_text(f"#!/bin/bash\n{text}\n")
        (tmp_path / "bin" / name).chmod(0o755)
    settings = dict(PATH=f"{tmp_path}/bin:{os.environ['PATH']}", OUT=str(out), SITE=str(tmp_path / "site"))
    settings |= dict(HOME=str(tmp_path), PYTHONPATH="before")
    limits = dict(fapo=260, speed=280, trl=230)
    for stage in limits:
        run = ["bash", kit / "run.sh", stage, "--size", "tiny"]
        done = subprocess.run(run, cwd=tmp_path, env=settings, capture_output=True, text=True)
        line, error = done.stdout.splitlines()
        command = f"{kit}/stages.py {stage} --size tiny"
        assert json.loads(line) == {"command": command, "path": f"{tmp_path}/site:before"}
        assert (out / f"{stage}.jsonl").read_text() == line + "\n" and error == "why" and done.returncode == 3
    assert (tmp_path / "site/package.py").exists()
    for limit, said in zip(limits.values(), (tmp_path / "limits").read_text().splitlines(), strict=True):
        kill, after, seconds = said.split()
        assert (kill, after) == ("-k", "10") and limit - 200 < int(seconds) <= limit  # less for unpacking
    assert sum(limits.values()) + 120 < 900
    unknown = subprocess.run(["bash", kit / "run.sh", "odd"], env=settings, capture_output=True, text=True)
    assert unknown.returncode == 2 and "unknown stage" in unknown.stdout


def test_a_slim_library_keeps_the_code_for_one_architecture_where_it_was(tmp_path):
    def entry(kind, architecture, content):
        head = struct.pack("<HHIQIIII", kind, 0, 32, len(content), 0, 0, 0, architecture)
        return head + content

    def container(*entries):
        content = b"".join(entries)
        return struct.pack("<IHHQ", 0xBA55ED50, 1, 16, len(content)) + content

    machine = [entry(2, architecture, bytes([architecture]) * 8) for architecture in (80, 90, 100)]
    ptx = [entry(1, architecture, bytes([architecture]) * 8) for architecture in (80, 100)]
    library = tmp_path / "library.so"
    library.write_bytes(b"start" + container(*machine) + b"middle" + container(*ptx) + b"end")
    script = ROOT / "benchmarks/gpu_kit/slim_so.py"
    subprocess.run([sys.executable, script, "90", library], check=True, capture_output=True)
    kept = container(machine[1]) + bytes(80), container(ptx[0]) + bytes(40)
    assert library.read_bytes() == b"start" + kept[0] + b"middle" + kept[1] + b"end"
