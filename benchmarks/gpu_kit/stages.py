"""Three stages for 15 minutes with one GPU, which print JSON lines as they go, so that no result is lost.

    bash benchmarks/gpu_kit/run.sh fapo     # FAPO with a judge on vLLM, and the outcome reward, side by side
    bash benchmarks/gpu_kit/run.sh speed    # updates with settings of WAYS, rollouts, a weight sync
    bash benchmarks/gpu_kit/run.sh trl      # five steps of TRL with vLLM and Liger, and five of ours
    python benchmarks/gpu_kit/stages.py speed --device cpu --size tiny --length 64   # a dry run

The unit of times is seconds. run.sh has the time limits. Random weights are enough for speeds. The stage fapo
trains and evaluates the toy models of 1 M parameters with a judge that `make demo` has trained.
Not covered: several GPUs; whether two ways learn the same (tests/ compares them on a CPU).
"""

import contextlib
import gc
import json
import os
import signal
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Literal

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
import torch
import torch.distributed as dist
import tyro
from torch.nn.attention import SDPBackend, sdpa_kernel

import check_gpu
from measuring import error_text, started
import genrm_server
import gpu_models
import policy
from cluster.ranks import RankedPolicy, Ranks
from run_folder import read_lines
from toy import report

TOKENS = 16384  # maximum number per micro-batch
RECOMPUTED = dict(gradient_checkpointing=True)
# The settings of an update. An unknown setting becomes an error in the output, and the other ways are still
# measured.
WAYS = {
    "plain": {},
    "four mini-batches": dict(mini_batch_size=1),
    "four mini-batches, sampler's log-probabilities": dict(mini_batch_size=1, sampler_logprobs=True),
    "compiled layers": dict(compile_layers=True),
    "bf16 head": dict(bf16_head=True),
    "compiled layers, bf16 head": dict(compile_layers=True, bf16_head=True),
    "cuDNN attention": {},
    "checkpointing": RECOMPUTED,
    "LoRA": dict(lora_rank=32),
    "LoRA, checkpointing": dict(lora_rank=32) | RECOMPUTED,
    "KL, entropy, checkpointing": dict(kl_coef=0.01, entropy_coef=0.001) | RECOMPUTED,
    "offload, checkpointing": dict(policy_offload=True) | RECOMPUTED,
}
SHOWN = ("step", "perf/tokens", "response_length/mean", "rollout/logprob_diff", "reward/mean")
SHOWN += ("reward/no_verdict", *(f"val/{key}/mean@1" for key in report.COLUMNS.values()))
ROOM = ("--enforce-eager", "--kv-cache-memory-bytes", "2000000000")  # A fixed size needs no memory profile.
ON_GPU = "--device cuda --rollout vllm --rollout-gpu-share 0.15 --policy-gpu-share 0.2".split()
ON_GPU.append(f"--rollout-vllm-args={' '.join(ROOM)}")


@dataclass
class Config:
    """Run one of three stages on a GPU."""

    stage: tyro.conf.Positional[Literal["fapo", "speed", "trl"]]  # What to run.
    judge: Path = Path("outputs/demo_seed0/judge/checkpoints/step_60")  # Trained judge of the stage fapo.
    data: Path = Path("data/toy")  # The toy world's rows and initial policy, for fapo.
    device: Literal["cuda", "cpu"] = "cuda"  # cpu: a dry run.
    size: Literal[tuple(gpu_models.SHAPES)] = "1b"  # Shape of the model, for speed and trl.
    ways: tuple[str, ...] = tuple(WAYS)[:6]  # Names in WAYS, for speed.
    length: int = 0  # Tokens per response; 0: 1,024 for speed and 512 for trl.
    steps: int = 0  # Training steps; 0: 60 for fapo and 5 for trl.

    @property
    def on(self) -> torch.device:
        return torch.device("cuda:0" if self.device == "cuda" else "cpu")


def say(part: str, results) -> None:
    """Print each result as a JSON line. An exception becomes a line too, so the next part still runs."""
    begun = time.perf_counter()
    try:
        for values in results:
            write({"part": part, "after": time.perf_counter() - begun} | values)
    except Exception as error:
        write({"part": part, "error": error_text(error)})


def write(values: dict) -> None:
    print(json.dumps(values), file=sys.__stdout__, flush=True)  # What servers print goes to stderr.


# ---- runs of trainers, whose metrics are followed


def follow(runs: dict, work: Path):
    """Yield the metrics of each step when a run logs it, and the medians, or the error, when a run ends."""
    seen = {name: [] for name in runs}  # the lines of each run that has not ended
    while seen:
        for name, before in list(seen.items()):
            has_ended = runs[name].poll() is not None  # before the last look
            seen[name], _ = read_lines(work / name / "metrics.jsonl")
            for line in seen[name]:
                if line not in before:  # An evaluation adds its values to the line of its step.
                    yield {"run": name} | {k: line[k] for k in line if k in SHOWN or k.startswith("time/")}
            if has_ended:
                steps = seen.pop(name)[1:]
                if runs[name].returncode or not steps:
                    yield {"run": name, "error": (work / f"{name}.log").read_text().strip()[-600:]}
                    continue
                keys = sorted(key for key in steps[-1] if key.startswith("time/"))
                medians = {key: median(step[key] for step in steps if key in step) for key in keys}
                yield {"run": name, "medians": medians}
        time.sleep(0.2)


def fapo(config: Config, work: Path):
    """Train with the served judge and with the outcome reward, as `make demo` does, but side by side."""
    on_gpu = config.device == "cuda"
    judge = genrm_server.ModelServers(
        genrm_server.Config(
            model=str(config.judge),
            port=0,
            device=config.device,
            gpu_share=0.15,
            max_model_len=512,
            log_dir=work / "judge_logs",
            vllm_args=ROOM if on_gpu else (),
        )
    )
    flags, port = ["--total-steps", str(config.steps or 60)], judge.router_address.rpartition(":")[2]
    commands = {}
    for name, reward in {"fapo": "JUDGE", "baseline": "RULE"}.items():
        trained = f'train_policy {config.data} 0 {work}/{name} "${{{reward}[@]}}" "$@"'
        script = f"source recipes/toy_runs.sh; {trained}"
        commands[name] = ["bash", "-c", script, "bash", *flags, *(ON_GPU if on_gpu else ())]
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    try:
        yield {"judge": "ready"}
        with started(commands, work, PORT=port, PATH=path) as runs:
            yield from follow(runs, work)
    finally:
        judge.shutdown()
    yield {"table": report.report(work)}


# ---- updates, rollouts and a weight sync


def update(config: Config, work: Path, way: str, size: str, length: int, count: int):
    """Measure an update of `count` samples with the settings of this way."""
    device = config.on
    settings, planned = check_gpu.plan_update(work / size, device, length, TOKENS, **WAYS[way])
    if settings.policy_offload:  # a single FSDP2 rank in this process
        store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        learner = RankedPolicy(settings, settings.model, device, Ranks(0, 1, f"127.0.0.1:{store.port}"))
    else:
        learner = policy.Policy(settings, settings.model, device)
    attention = contextlib.nullcontext()
    if way == "cuDNN attention":  # The policy has turned it off, and no other kernel may stand in for it.
        attention = sdpa_kernel(SDPBackend.CUDNN_ATTENTION)
    try:
        samples = gpu_models.random_samples(learner, length, count)
        with attention:
            found, metrics = gpu_models.time_update(learner, samples, device)
        about = {"way": way, "size": size, "length": length, "samples": count, "planned_gb": planned}
        yield about | found | {key: metrics[key] for key in ("actor/loss", "actor/grad_norm")}
    finally:
        learner = None
        gc.collect()
        if dist.is_initialized():
            dist.destroy_process_group()


def model_of(size: str, work: Path, device):
    gpu_models.write_model(gpu_models.new_model(size, device), gpu_models.toy_tokenizer(), work / size)
    yield {"made": size}


def speed(config: Config, work: Path) -> None:
    length = config.length or 1024
    say("model", model_of(config.size, work, config.on))
    for way in config.ways:
        say("update", update(config, work, way, config.size, length, 32))
    if config.device == "cuda":  # prime-rl's published benchmark on one H100: 11,896 tokens/s
        say("model", model_of("0.6b", work, config.on))
        say("update", update(config, work, "checkpointing", "0.6b", 16384 - 32, 4))
    (work / "model").symlink_to(work / config.size)
    count = 512 if config.device == "cuda" else 8
    rows = check_gpu.check_speed(work, config.on, count, min(length, 512))
    say("rollouts", ({"property": what, "holds": holds, "found": found} for what, holds, found in rows))


# ---- steps of TRL and of ours


def trl(config: Config, work: Path):
    """Train on 8 prompts x 8 samples per step, first with TRL, then with grpo_trainer.py."""
    steps, length = str(config.steps or 5), str(config.length or 512)
    size = "small" if config.size == "tiny" else "large"
    (work / "config.json").write_text(json.dumps({"size": size, "model": ""}))
    yield from ({"models": found} for _, _, found in check_gpu.make_models(work, config.on))
    theirs = [sys.executable, __file__, "--trl", str(work), steps, length, config.device]
    ours = [sys.executable, "grpo_trainer.py", "--model", f"{work}/model", "--out-dir", f"{work}/ours"]
    ours += ["--train-file", f"{work}/train.parquet", "--reward-fn", f"{check_gpu.__file__}:score_by_asking"]
    ours += f"""--total-steps {steps} --train-batch-size 8 --mini-batch-size 8 --group-size 8 --save-every 0
        --max-response-length {length} --overlong-buffer 0 --lr 1e-6 --device {config.device}""".split()
    if config.device == "cuda":
        ours += "--rollout vllm --rollout-gpu-share 0.3 --policy-gpu-share 0.6".split()
    for name, command in {"trl": theirs, "ours": ours}.items():
        with started({name: command}, work) as runs:
            yield from follow(runs, work)


def run_trl(folder: str, steps: str, length: str, device: str) -> None:
    """Train with TRL in this process, and log its steps as grpo_trainer.py does."""
    import pyarrow.parquet as pq
    from transformers import TrainerCallback

    from trl_side import new_trainer

    work = Path(folder)
    (work / "trl").mkdir()
    lines = open(work / "trl/metrics.jsonl", "w", buffering=1)
    print("{}", file=lines)  # Our first line is step 0.

    class Clock(TrainerCallback):
        def on_step_begin(self, *_, **__):
            self.begun = time.perf_counter()

        def on_step_end(self, *_, **__):
            if device == "cuda":
                torch.cuda.synchronize()
            self.seconds = time.perf_counter() - self.begun

        def on_log(self, args, state, control, logs, **_):
            if "completions/mean_length" in logs:
                values = {"step": state.global_step, "time/step": self.seconds}
                values["response_length/mean"] = logs["completions/mean_length"]
                print(json.dumps(values), file=lines)

    def reward(completions, **_):
        return [len(completion[0]["content"]) % 7 / 6 for completion in completions]

    job = dict(
        model=f"{folder}/model",
        folder=f"{folder}/trl",
        steps=int(steps),
        samples=64,
        group=8,
        length=int(length),
        lr=1e-6,
        warmup=1,
        checkpointing=False,
        seed=0,
        options=dict(logging_strategy="steps", logging_steps=1),
    )
    if device == "cuda":
        os.environ |= dict(MASTER_ADDR="127.0.0.1", MASTER_PORT="29511", WORLD_SIZE="1")  # for vLLM in TRL
        job["options"] |= dict(
            use_cpu=False,
            bf16=True,
            use_liger_kernel=True,
            use_vllm=True,
            vllm_mode="colocate",
            vllm_gpu_memory_utilization=0.3,
            vllm_max_model_length=1024,
            per_device_train_batch_size=16,
            gradient_accumulation_steps=4,
        )
    prompts = pq.read_table(work / "train.parquet")["prompt"].to_pylist()
    rows = {"prompt": (prompts * job["steps"])[: 8 * job["steps"]]}
    new_trainer(job, reward, rows, Clock()).train()


def main() -> None:
    if sys.argv[1:2] == ["--trl"]:  # this script as a child process
        return run_trl(*sys.argv[2:])
    config = tyro.cli(Config, description=__doc__)
    unknown = set(config.ways) - set(WAYS)
    if unknown:
        raise SystemExit(f"error: --ways {sorted(unknown)[0]}: no such way; choose from {', '.join(WAYS)}")
    if config.stage == "fapo" and not (config.judge / "config.json").is_file():
        raise SystemExit(f"error: --judge {config.judge}: has no config.json; run make demo, or pass a judge")
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # The time limit also ends what was started.
    with contextlib.redirect_stdout(sys.stderr), tempfile.TemporaryDirectory(prefix="stage_") as folder:
        if config.stage == "speed":
            speed(config, Path(folder))
        else:
            say(config.stage, {"fapo": fapo, "trl": trl}[config.stage](config, Path(folder)))


if __name__ == "__main__":
    main()
