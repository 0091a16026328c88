"""Measure the training time to a held-out score, for grpo_trainer.py and for TRL's GRPOTrainer.

    pip install --target ~/trl --no-deps "trl==1.16.*" datasets multiprocess pandas
    python benchmarks/time_to_score.py --trl ~/trl --model toy/models/own0 --threshold 0.85 \
        --train-file data/own0/toy_train.parquet --val-file data/own0/toy_test.parquet \
        --reward-fn compute_score.py:compute_score --out time_to_score.jsonl

Both sides get the same model, prompts in the same order, reward function, loss (token mean, clipped to
0.8..1.28, no KL term), optimizer, learning rates and lengths, in float32 on the same number of threads. The
samples differ, because the sides use random numbers in different ways. Held-out rows are answered with greedy
decoding; the score is the fraction that the reward function calls correct (acc).

The clock of a side starts with its process, includes imports and Ray, and stops during evaluations. The sides
run one after the other, seed by seed. The table has the CPU time of each trainer's main process, which other
work on the machine changes less than the time that passes; the file of --out has both times.

Not covered: GPUs, vLLM, and TRL's evaluation loop (the script calls model.generate directly).
"""

import inspect
import json
import os
import signal
import statistics
import sys
import tempfile
import time
from dataclasses import asdict, dataclass
from pathlib import Path

import tyro
from measuring import groups_of, run_worker

from prepare_data import read_rows
from run_folder import write_lines

WARMUP_STEPS = 5  # The learning rate rises from 1/5 in the first step to --lr in the fifth.


@dataclass
class Config:
    """Measure the training time until a held-out score is reached, in comparison with TRL."""

    model: Path  # Folder of the policy.
    train_file: Path  # File of training rows.
    val_file: Path  # File of held-out rows.
    reward_fn: str  # Reward function FILE:NAME, not async, which scores one sample with `score` and `acc`.
    threshold: float  # Held-out score to reach.
    trl: Path  # Folder in which TRL and datasets are installed.
    out: Path | None = None  # JSONL file to which all curves are appended.
    suffix: str = ""  # Text to add after the question in every prompt.
    sides: tuple[str, ...] = ("ours", "trl", "trl_no_checkpointing")  # Trainers to compare.
    seeds: tuple[int, ...] = (0,)  # Seeds. Each side runs once per seed.
    steps: int = 40  # Number of training steps per run.
    val_every: int = 4  # Number of steps between evaluations.
    num_val: int = 64  # Number of held-out rows, from the start of the file.
    prompts: int = 16  # Number of prompts per step.
    group: int = 8  # Number of samples per prompt.
    length: int = 112  # Maximum number of tokens per response.
    lr: float = 1e-4  # Learning rate, after a warm-up over the first five steps.
    threads: int = 1  # Number of CPU threads per side.


def rows_of(path: Path, suffix: str) -> list[dict]:
    """Return a file's rows, with this text after the question."""
    rows = read_rows(path)
    if suffix:
        for row in rows:
            row["prompt"] = [{"role": "user", "content": f"{row['extra_info']['question']} {suffix}"}]
    return rows


def log_event(job: dict, kind: str, **values) -> None:
    """Append an event with its time as a line of JSON to the side's file, which the parent process reads."""
    line = {"kind": kind, "at": time.monotonic(), "cpu": time.process_time()} | values
    with open(Path(job["folder"], f"{job['side']}.jsonl"), "a") as file:
        print(json.dumps(line), file=file)


# ---- our side: the command line of the trainer, in a process that also notes when steps end


def run_ours(job: dict) -> None:
    import grpo_trainer

    evaluate, log_step = grpo_trainer.evaluate, grpo_trainer.Run.log_step
    folder = Path(job["folder"])

    def timed_evaluate(run):
        log_event(job, "evaluation begins")
        evaluate(run)
        line = read_rows(folder / "run/metrics.jsonl")[-1]
        log_event(job, "evaluation", score=line[f"val/{source}/mean@1"])

    def timed_log_step(run, metrics):
        spread = metrics["reward/groups_with_spread"]
        log_event(job, "rewards", reward=metrics["reward/mean"], spread=spread)
        log_event(job, "step")
        log_step(run, metrics)

    grpo_trainer.evaluate, grpo_trainer.Run.log_step = timed_evaluate, timed_log_step
    source = read_rows(folder / "val.jsonl")[0]["data_source"]
    sys.argv = ["grpo_trainer.py", "--model", job["model"], "--reward-fn", job["reward_fn"]]
    sys.argv += ["--train-file", f"{folder}/train.jsonl", "--val-file", f"{folder}/val.jsonl"]
    sys.argv += ["--out-dir", f"{folder}/run"]
    sys.argv += f"""--total-steps {job["steps"]} --train-batch-size {job["prompts"]} --seed {job["seed"]}
        --mini-batch-size {job["prompts"]} --group-size {job["group"]} --max-response-length {job["length"]}
        --overlong-buffer 0 --lr {job["lr"]} --lr-warmup-steps {WARMUP_STEPS} --val-every {job["val_every"]}
        --val-temperature 0 --save-every 0 --num-threads {job["threads"]} --num-workers 1""".split()
    grpo_trainer.main(grpo_trainer.parse_command_line(grpo_trainer.Config))


# ---- TRL's side


def run_trl(job: dict) -> None:
    sys.path.insert(0, os.path.expanduser(job["trl"]))
    import torch
    from transformers import TrainerCallback

    from reward_worker import load_in_this_process
    from trl_side import new_trainer

    function = load_in_this_process("reward_fn", job["reward_fn"])
    if inspect.iscoroutinefunction(function):
        raise ValueError(f"--reward-fn: {job['reward_fn']} is async, but TRL's side needs a sync function")
    folder = Path(job["folder"])
    val_rows = read_rows(folder / "val.jsonl")

    def result_of(row: dict, text: str) -> dict:
        return function(
            data_source=row["data_source"],
            solution_str=text,
            ground_truth=row["reward_model"]["ground_truth"],
            extra_info=row["extra_info"],
        )

    def reward(completions, number, **_):
        scores = []
        for completion, one in zip(completions, number):
            scores.append(result_of(rows[one], completion[0]["content"])["score"])
        spread = statistics.fmean(len(set(group)) > 1 for group in groups_of(scores, job["group"]))
        log_event(job, "rewards", reward=statistics.fmean(scores), spread=spread)
        return scores

    @torch.no_grad()
    def evaluate() -> None:
        log_event(job, "evaluation begins")
        model, tokenizer = trainer.model, trainer.processing_class
        options = dict(add_generation_prompt=True, return_dict=True, return_tensors="pt", padding=True)
        prompts = tokenizer.apply_chat_template([row["prompt"] for row in val_rows], **options)
        # In training mode, gradient checkpointing would prevent a key-value cache. Each step calls train().
        model.eval()
        output = model.generate(**prompts, do_sample=False, max_new_tokens=job["length"])
        texts = tokenizer.batch_decode(output[:, prompts["input_ids"].shape[1] :], skip_special_tokens=True)
        right = [result_of(row, text)["acc"] for row, text in zip(val_rows, texts)]
        log_event(job, "evaluation", score=statistics.fmean(right))

    class Watch(TrainerCallback):
        def on_train_begin(self, *_, **__):
            evaluate()

        def on_step_end(self, args, state, control, **_):
            log_event(job, "step")
            if state.global_step % job["val_every"] == 0:
                evaluate()

    rows = read_rows(folder / "drawn.jsonl")
    columns = {"prompt": [row["prompt"] for row in rows], "number": list(range(len(rows)))}
    job |= {"samples": job["prompts"] * job["group"], "warmup": WARMUP_STEPS}
    job["checkpointing"] = job["side"] == "trl"
    trainer = new_trainer(job, reward, columns, Watch())
    trainer.train()


# ---- both sides: curves over the running time of a side


def curve_of(events: list[dict], begun: float) -> dict:
    """Return scores and ends of steps. The clock starts at `begun` and stops during evaluations."""
    paused = paused_cpu = 0.0
    points = []
    step_ends = []
    rewards = []
    spread = []
    for event in events:
        own, cpu, kind = event["at"] - begun, event["cpu"], event["kind"]
        if kind == "rewards":
            rewards.append(event["reward"])
            spread.append(event["spread"])
        elif kind == "step":
            step_ends.append([own - paused, cpu - paused_cpu])
        elif kind == "evaluation begins":
            own_before, cpu_before = own, cpu
        elif kind == "evaluation":
            times = {"seconds": own_before - paused, "cpu": cpu_before - paused_cpu}
            points.append({"step": len(step_ends), "score": event["score"]} | times)
            paused += own - own_before
            paused_cpu += cpu - cpu_before
    return {"points": points, "step_ends": step_ends, "rewards": rewards, "groups_with_spread": spread}


def compare(config: Config, seed: int) -> list[dict]:
    """Return the curves of all sides for one seed. Raises ChildProcessError if a side fails."""
    from grpo_trainer import draw

    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        train_rows = rows_of(config.train_file, config.suffix)
        write_lines(folder / "train.jsonl", train_rows)
        write_lines(folder / "val.jsonl", rows_of(config.val_file, config.suffix)[: config.num_val])
        # TRL gets the prompts of all steps in the order in which our trainer draws them.
        write_lines(folder / "drawn.jsonl", draw(train_rows, 0, config.prompts * config.steps, seed))
        curves = []
        for side in config.sides:
            job = asdict(config) | {"seed": seed, "side": side, "folder": name}
            begun = time.monotonic()
            # By default, a waiting thread spins, which would count as CPU time.
            threads = {"OMP_NUM_THREADS": str(config.threads), "OMP_WAIT_POLICY": "passive"}
            run_worker(__file__, side, job, folder, **threads)
            curve = curve_of(read_rows(folder / f"{side}.jsonl"), begun)
            curves.append({"side": side} | curve | {"seed": seed})
        return curves


def reached(curve: dict, threshold: float) -> dict | None:
    """Return the first evaluation at or above the threshold."""
    for point in curve["points"]:
        if point["score"] >= threshold:
            return point
    return None


def cpu_of_a_step(curve: dict) -> float:
    """Return the median CPU time of a step in seconds."""
    ends = [cpu for _, cpu in curve["step_ends"]]
    return statistics.median(after - before for before, after in zip(ends, ends[1:]))


def table(curves: list[dict], threshold: float) -> str:
    from toy.report import table as markdown

    rows = []
    for curve in curves:
        cells = ["-", "-", "-", f"{curve['points'][-1]['score']:.2f}"]
        point = reached(curve, threshold)
        if point:
            cells[:2] = [str(point["step"]), f"{point['cpu']:.0f}"]
        steps = len(curve["step_ends"])
        if steps > 1:
            cells[2] = f"{cpu_of_a_step(curve):.2f}"
        rows.append([curve["side"], str(curve["seed"]), *cells, str(steps)])
    heads = ["", "seed", f"steps to {threshold:g}", f"CPU s to {threshold:g}", "CPU s per step"]
    return markdown([*heads, "score after", "steps"], *rows)


def main() -> None:
    if sys.argv[1:2] == ["--worker"]:  # this script as a child process
        job = json.loads(sys.argv[2])
        return {"ours": run_ours}.get(job["side"], run_trl)(job)
    config = tyro.cli(Config)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # Otherwise a stopped side would be left behind.
    curves = []
    for seed in config.seeds:
        found = compare(config, seed)
        curves += found
        if config.out:
            with config.out.open("a") as file:
                file.writelines(json.dumps(curve) + "\n" for curve in found)
        print(table(curves, config.threshold), flush=True)


if __name__ == "__main__":
    main()
