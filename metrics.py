"""The numbers of a run: what its samples add up to, and how they are shown while the run goes.

A group is a list of policy.Sample, whose `result` is what reward_loop.py returns; `config` is that of
grpo_trainer.py. A new metric is a line in `reward_metrics` (training) or `source_metrics` (evaluation);
what the user's function returns is averaged without one.

Needs none of our other files. Left out: histograms, error bars. tools/view_run.py shows more, and several
runs together.
"""

import math
import os
from dataclasses import asdict
from pathlib import Path

WITHOUT_MEAN = ("pred", "gt", "first_wrong", "genrm_shared")  # answers and places, and what is counted apart


# ---- made from samples


def mean(values) -> float | None:
    """The mean of the values that are not None; None where there are none."""
    known = [float(value) for value in values if value is not None]
    return sum(known) / len(known) if known else None


def averages(infos: list[dict]) -> dict:
    """The means of the numbers and booleans in these reward_extra_infos, over the samples that have them.

    `flawed_positive` (and what ends so) is a rate among right answers, as in the paper.
    """
    means = {}
    for key in dict.fromkeys(key for info in infos for key in info):
        if key in WITHOUT_MEAN:
            continue
        if key.endswith("flawed_positive"):
            right = [info for info in infos if info.get("acc") == 1]
            means[f"{key}_rate"] = mean(numbers(right, key))
        else:
            means[key] = mean(numbers(infos, key))
    return means


def numbers(infos: list[dict], key: str) -> list:
    """Without NaN, and without integers too large for a float, which a model may write out."""
    values = [info.get(key) for info in infos]
    return [value for value in values if isinstance(value, (int, float)) and abs(value) <= 1e308]


def reward_metrics(samples: list) -> dict:
    """Means over the samples of a step; what no sample has is left out."""
    infos = [sample.result["reward_extra_info"] for sample in samples]
    asked = [info for info in infos if info.get("genrm_status", "skipped") != "skipped"]
    seconds = [sample.result.get("seconds") for sample in samples]
    known_seconds = [value for value in seconds if value is not None]
    metrics = {f"reward/{key}": value for key, value in averages(infos).items()}
    metrics |= {  # a function's own "mean" gives way
        "reward/mean": mean(sample.reward for sample in samples),
        "reward/no_verdict": mean(sample.reward is None for sample in samples),
        "reward/seconds_mean": mean(known_seconds),
        "reward/seconds_max": max(known_seconds, default=None),
        "genrm/error_rate": mean(info["genrm_status"] != "ok" for info in asked),
        "genrm/truncated": mean(info["genrm_status"] == "truncated" for info in asked),
        "genrm/shared": mean(info.get("genrm_shared") for info in asked),
        "genrm/asked": len(asked) or None,
    }
    return without_none(metrics)


def validation_metrics(groups: list[list], suffix: str = "") -> dict:
    """Metrics of the groups of n samples of each data source: mean@n, maj@n and pass@k (k = 1, 2, 4 ... n) of
    `acc`, and mean@n of each other number that the reward function returns. `suffix` replaces "mean@n"."""
    of_source = {}
    for group in groups:
        of_source.setdefault((group[0].row["data_source"], len(group)), []).append(group)
    metrics = {}
    for (source, n), mine in sorted(of_source.items()):  # pass@k is that of the larger n
        for name, value in source_metrics(mine, n, suffix or f"mean@{n}").items():
            metrics[f"val/{source}/{name}"] = value
    return without_none(metrics)


def source_metrics(groups: list[list], n: int, label: str) -> dict:
    """Those of one data source. What has no `acc` (an error, say) is no wrong answer: it is left out."""
    infos = [[sample.result["reward_extra_info"] for sample in group] for group in groups]
    means = averages(sum(infos, []))
    accuracy = means.pop("acc", None)
    means["no_verdict"] = mean(sample.reward is None for sample in sum(groups, []))
    metrics = {f"{key}/{label}": value for key, value in means.items()}
    metrics[label] = accuracy
    if n == 1 or accuracy is None:
        return metrics
    answers = [[info for info in group if info.get("acc") is not None] for group in infos]
    if any("pred" in info for info in sum(answers, [])):
        metrics[f"maj@{n}"] = mean(majority(group) for group in answers if group)
    powers = {2**power for power in range(n.bit_length())}
    for k in sorted(powers | {n}):
        chances = []
        for group in answers:
            if len(group) >= k:
                correct = sum(info["acc"] == 1 for info in group)
                chances.append(pass_at_k(len(group), correct, k))
        metrics[f"pass@{k}"] = mean(chances)
    return metrics


def majority(infos: list[dict]) -> bool:
    """Whether the answer that most samples give is right; a sample without an answer casts no vote."""
    votes = [info for info in infos if info.get("pred") not in (None, "[INVALID]")]
    preds = [info["pred"] for info in votes]
    winner = max(votes, key=lambda info: preds.count(info["pred"]), default={})
    return winner.get("acc") == 1


def pass_at_k(n: int, correct: int, k: int) -> float:
    """Unbiased chance that one of k samples drawn from n, `correct` of them right, is right (Chen, 2021)."""
    return 1.0 - math.comb(n - correct, k) / math.comb(n, k)


def without_none(metrics: dict) -> dict:
    return {key: value for key, value in metrics.items() if value is not None}


# ---- shown


def print_step(line: dict, total_steps: int) -> None:
    """Prints the most important of a step's metrics."""
    shown = ("reward/mean", "reward/acc", "reward/flawed_positive_rate", "reward/no_verdict",
             "response_length/mean", "actor/entropy", "rollout/logprob_diff", "time/step")  # fmt: skip
    values = "  ".join(f"{key} {line[key]:.4g}" for key in shown if key in line)
    cut = line["response_length/clipped"]
    print(f"step {line['step']}/{total_steps}  {values}" + (f"  {cut:.0%} cut" if cut else ""), flush=True)


def print_samples(lines: list[dict]) -> None:
    """Prints lines of samples.jsonl: how the prompt begins and the response ends, the truth, the reward."""
    for line in lines:
        prompt, response, reward = line["prompt"], line["response"], line["reward_score"]
        if len(response) > 60:
            response = "…" + response[-60:]
        parts = [repr(shortened(prompt, 40)), repr(response)]
        if line["clipped"]:
            parts.append("cut")
        parts.append(f"truth {shortened(str(line['ground_truth']), 12)}")
        parts.append("reward none" if reward is None else f"reward {reward:.4g}")
        print("    " + " | ".join(parts))


def shortened(text: str, length: int) -> str:
    """The first characters of a text; an ellipsis for what follows."""
    return text if len(text) <= length else text[:length] + "…"


def draw_curves(history: list[dict], path: Path) -> None:
    """Draws the lines of metrics so far; evaluations as points, not lines."""
    from matplotlib.figure import Figure  # which takes half a second

    seen = sorted({key for line in history for key in line if not key.endswith("/greedy")})
    held_out = [key.replace("/no_verdict/", "/") for key in seen if "/no_verdict/mean@" in key]
    panels = {
        "reward": ["reward/mean", "reward/score"],
        "accuracy": ["reward/acc", *held_out],
        "flawed positives among right answers": [key for key in seen if "flawed_positive_rate" in key],
        "response length (tokens)": ["response_length/mean", "response_length/max"],
        "entropy": ["actor/entropy"],
        "seconds": ["time/rollout", "time/reward_wait", "time/update", "time/step"],
    }
    figure = Figure(figsize=(15, 7.5), layout="constrained")
    for axis, (title, keys) in zip(figure.subplots(2, 3).flat, panels.items()):
        for key in keys:
            steps = [line["step"] for line in history if key in line]
            if key in seen:
                values = [line[key] for line in history if key in line]
                axis.plot(steps, values, "o" if key.startswith("val/") else "-", label=key)
        axis.set(title=title, xlabel="step")
        axis.grid()
        if axis.lines:
            axis.legend()
    figure.savefig(path)


def tensorboard(config, first_step: int) -> tuple:
    """(what takes a line of metrics to OUT_DIR/tensorboard, what ends that)."""
    from torch.utils.tensorboard import SummaryWriter

    writer = SummaryWriter(Path(config.out_dir, "tensorboard"), purge_step=first_step + 1)

    def send(line):
        for key, value in line.items():
            writer.add_scalar(key, value, line["step"])

    return send, writer.close


def wandb(config, first_step: int) -> tuple:
    """The same for Weights & Biases, where a resumed run is the same run: its id stays in the folder."""
    import wandb

    id_file = Path(config.out_dir, "wandb_id")
    if not (first_step and id_file.is_file()):
        id_file.write_text(os.urandom(4).hex())
    project = os.environ.get("WANDB_PROJECT", "fapo")
    run = wandb.init(project=project, name=id_file.parent.name, dir=id_file.parent, id=id_file.read_text(),
                     resume="allow", config=asdict(config))  # fmt: skip
    return lambda line: run.log(line, step=line["step"]), run.finish
