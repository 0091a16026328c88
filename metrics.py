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
    if not known:
        return None
    return sum(known) / len(known)


def averages(infos: list[dict]) -> dict:
    """The means of the numbers and booleans in these reward_extra_infos, over the samples that have them.

    `flawed_positive` (and what ends so) is a rate among right answers, as in the paper.
    """
    numbers = {}
    for info in infos:
        for key, value in info.items():
            if key in WITHOUT_MEAN:
                continue
            # No NaN, and no integer too large for a float, which a model may write out.
            is_number = isinstance(value, (int, float)) and abs(value) <= 1e308
            if key.endswith("flawed_positive"):
                key = f"{key}_rate"
                is_number = is_number and info.get("acc") == 1
            found = numbers.setdefault(key, [])
            if is_number:
                found.append(value)
    return {key: mean(found) for key, found in numbers.items()}


def reward_metrics(samples: list) -> dict:
    """Means over the samples of a step; what no sample has is left out."""
    infos = infos_of(samples)
    rewards = [sample.result["reward_score"] for sample in samples]
    metrics = {f"reward/{key}": value for key, value in averages(infos).items()}
    metrics["reward/mean"] = mean(rewards)  # a function's own "mean" gives way
    metrics["reward/no_verdict"] = rewards.count(None) / len(rewards)
    seconds = [sample.result["seconds"] for sample in samples if sample.result.get("seconds") is not None]
    if seconds:
        metrics["reward/seconds_mean"] = mean(seconds)
        metrics["reward/seconds_max"] = max(seconds)
    asked = [info for info in infos if info.get("genrm_status", "skipped") != "skipped"]
    if asked:
        statuses = [info["genrm_status"] for info in asked]
        metrics["genrm/error_rate"] = (len(asked) - statuses.count("ok")) / len(asked)
        metrics["genrm/truncated"] = statuses.count("truncated") / len(asked)
        metrics["genrm/shared"] = mean(info.get("genrm_shared") for info in asked)
        metrics["genrm/asked"] = len(asked)
    return without_none(metrics)


def validation_metrics(groups: list[list], suffix: str = "") -> dict:
    """Metrics of the groups of n samples of each data source: mean@n, maj@n and pass@k (k = 1, 2, 4 ... n) of
    `acc`, and mean@n of each other number that the reward function returns. `suffix` replaces "mean@n"."""
    of_source = {}
    for group in groups:
        of_source.setdefault((group[0].row["data_source"], len(group)), []).append(group)
    metrics = {}
    for source, n in sorted(of_source):  # pass@k is that of the larger n
        found = source_metrics(of_source[source, n], n, suffix or f"mean@{n}")
        metrics |= {f"val/{source}/{name}": value for name, value in found.items()}
    return without_none(metrics)


def source_metrics(groups: list[list], n: int, label: str) -> dict:
    """Those of the groups of n samples of one data source."""
    samples = sum(groups, [])
    rewards = [sample.result["reward_score"] for sample in samples]
    means = averages(infos_of(samples))
    accuracy = means.pop("acc", None)
    means["no_verdict"] = rewards.count(None) / len(rewards)
    metrics = {f"{key}/{label}": value for key, value in means.items()}
    metrics[label] = accuracy
    if n == 1 or accuracy is None:
        return metrics
    # What has no `acc` (an error, say) is no wrong answer: it is left out, here as in the mean.
    answers = []
    for group in groups:
        answers.append([info for info in infos_of(group) if info.get("acc") is not None])
    if any("pred" in info for info in sum(answers, [])):
        metrics[f"maj@{n}"] = mean(majority(infos) for infos in answers if infos)
    sizes = [1]
    while 2 * sizes[-1] < n:
        sizes.append(2 * sizes[-1])
    for k in [*sizes, n]:
        chances = []
        for infos in answers:
            if len(infos) >= k:
                correct = sum(info["acc"] == 1 for info in infos)
                chances.append(pass_at_k(len(infos), correct, k))
        metrics[f"pass@{k}"] = mean(chances)
    return metrics


def infos_of(samples: list) -> list[dict]:
    return [sample.result["reward_extra_info"] for sample in samples]


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
    parts = [f"step {line['step']}/{total_steps}"]
    for key in (
        "reward/mean",
        "reward/acc",
        "reward/flawed_positive_rate",
        "reward/no_verdict",
        "response_length/mean",
        "actor/entropy",
        "rollout/logprob_diff",
        "time/step",
    ):
        if key in line:
            parts.append(f"{key} {line[key]:.4g}")
    if line["response_length/clipped"]:
        parts.append(f"{line['response_length/clipped']:.0%} cut")
    print("  ".join(parts), flush=True)


def print_samples(lines: list[dict]) -> None:
    """Prints lines of samples.jsonl: how the prompt begins and the response ends, the truth, the reward."""
    for line in lines:
        response = line["response"]
        if len(response) > 60:
            response = "…" + response[-60:]
        parts = [repr(shortened(line["prompt"], 40)), repr(response)]
        if line["clipped"]:
            parts.append("cut")
        parts.append(f"truth {shortened(str(line['ground_truth']), 12)}")
        reward = line["reward_score"]
        parts.append("reward none" if reward is None else f"reward {reward:.4g}")
        print("    " + " | ".join(parts))


def shortened(text: str, length: int) -> str:
    """The first characters of a text; an ellipsis for what follows."""
    if len(text) <= length:
        return text
    return text[:length] + "…"


def draw_curves(history: list[dict], path: Path) -> None:
    """Draws the lines of metrics so far; evaluations as points, not lines."""
    from matplotlib.figure import Figure  # which takes half a second

    curves = {}  # metric: its steps, its values
    for line in history:
        for key, value in line.items():
            steps, values = curves.setdefault(key, ([], []))
            steps.append(line["step"])
            values.append(value)
    accuracies = ["reward/acc"]
    flawed = []
    for key in sorted(curves):
        if "/no_verdict/mean@" in key:  # each data source has it; its accuracy has no name
            accuracies.append(key.replace("/no_verdict/", "/"))
        if "flawed_positive_rate" in key and not key.endswith("/greedy"):
            flawed.append(key)
    panels = {
        "reward": ["reward/mean", "reward/score"],
        "accuracy": accuracies,
        "flawed positives among right answers": flawed,
        "response length (tokens)": ["response_length/mean", "response_length/max"],
        "entropy": ["actor/entropy"],
        "seconds": ["time/rollout", "time/reward_wait", "time/update", "time/step"],
    }
    figure = Figure(figsize=(15, 7.5), layout="constrained")
    for axis, (title, keys) in zip(figure.subplots(2, 3).flat, panels.items()):
        for key in keys:
            if key in curves:
                axis.plot(*curves[key], "o" if key.startswith("val/") else "-", label=key)
        axis.set(title=title, xlabel="step")
        axis.grid()
        if axis.lines:
            axis.legend()
    figure.savefig(path)


class TensorBoard:
    """Takes lines of metrics to OUT_DIR/tensorboard."""

    def __init__(self, config, first_step: int):
        from torch.utils.tensorboard import SummaryWriter

        self.writer = SummaryWriter(Path(config.out_dir, "tensorboard"), purge_step=first_step + 1)

    def send(self, line: dict) -> None:
        for key, value in line.items():
            self.writer.add_scalar(key, value, line["step"])

    def close(self) -> None:
        self.writer.close()


class WandB:
    """Takes them to Weights & Biases, where a resumed run is the same run: its id stays in the folder."""

    def __init__(self, config, first_step: int):
        import wandb

        folder = Path(config.out_dir)
        id_file = folder / "wandb_id"
        if not (first_step and id_file.is_file()):
            id_file.write_text(os.urandom(4).hex())
        self.run = wandb.init(
            project=os.environ.get("WANDB_PROJECT", "fapo"),
            name=folder.name,
            dir=folder,
            id=id_file.read_text(),
            resume="allow",
            config=asdict(config),
        )

    def send(self, line: dict) -> None:
        self.run.log(line, step=line["step"])

    def close(self) -> None:
        self.run.finish()
