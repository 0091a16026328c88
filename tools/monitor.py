"""A run shown while it goes: curves.png, samples on the screen, TensorBoard, Weights & Biases.

Used by run_folder.py. Needs none of our other files; tensorboard and wandb are imported only where the flag
asks for them. Left out: histograms, standard errors. tools/view_run.py shows more, and several runs together.
"""

import os
from dataclasses import asdict
from pathlib import Path

from matplotlib.figure import Figure


class Monitor:
    """What shows the run of this configuration, which goes on after `first_step`."""

    def __init__(self, config, first_step: int):
        self.folder, self.total_steps = Path(config.out_dir), config.total_steps
        wanted = [tensorboard] * config.tensorboard + [wandb] * config.wandb
        self.trackers = [tracker(config, first_step) for tracker in wanted]

    def send(self, line: dict) -> None:
        """Takes a step's line of metrics to TensorBoard and W&B."""
        for send, _ in self.trackers:
            send(line)

    def draw(self, history: list[dict]) -> None:
        """Draws curves.png from the lines of metrics so far; evaluations as points, not lines."""
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
            for key in filter(seen.__contains__, keys):
                points = [(line["step"], line[key]) for line in history if key in line]
                axis.plot(*zip(*points), "o" if key.startswith("val/") else "-", label=key)
            axis.set(title=title, xlabel="step")
            axis.grid()
            if axis.lines:
                axis.legend()
        figure.savefig(self.folder / "curves.png")

    def print_step(self, line: dict) -> None:
        """Prints the most important of a step's metrics."""
        shown = ("reward/mean", "reward/acc", "reward/flawed_positive_rate", "reward/no_verdict",
                 "response_length/mean", "actor/entropy", "rollout/logprob_diff", "time/step")  # fmt: skip
        values = "  ".join(f"{key} {line[key]:.4g}" for key in shown if key in line)
        print(f"step {line['step']}/{self.total_steps}  {values}", flush=True)

    def print_samples(self, lines: list[dict]) -> None:
        """Prints lines of samples.jsonl: how prompt and response end, the truth and the reward."""
        for line in lines:
            prompt, response = end_of(line["prompt"], 40), end_of(line["response"], 60)
            truth, reward = str(line["ground_truth"]), line["reward_score"]
            print(f"    {prompt} | {response} | truth {truth[:12] + '…' * (len(truth) > 12)} | reward "
                  f"{'none' if reward is None else f'{reward:.4g}'}")  # fmt: skip

    def close(self) -> None:
        """Ends TensorBoard and W&B."""
        for _, end in self.trackers:
            end()


def end_of(text: str, length: int) -> str:
    """The last characters of a text, on one line in quotation marks; an ellipsis for what came before."""
    return repr("…" * (len(text) > length) + text[-length:])


def tensorboard(config, first_step: int) -> tuple:
    """(what takes a line of metrics to OUT_DIR/tensorboard, what ends that)."""
    from torch.utils.tensorboard import SummaryWriter
    writer = SummaryWriter(Path(config.out_dir, "tensorboard"), purge_step=first_step + 1)
    return lambda line: [writer.add_scalar(key, line[key], line["step"]) for key in line], writer.close


def wandb(config, first_step: int) -> tuple:
    """The same for Weights & Biases, where a resumed run is the same run: its id stays in the folder."""
    import wandb
    id_file = Path(config.out_dir, "wandb_id")
    if not (first_step and id_file.is_file()):
        id_file.write_text(os.urandom(4).hex())
    run = wandb.init(project="fapo", name=id_file.parent.name, dir=id_file.parent, id=id_file.read_text(),
                     resume="allow", config=asdict(config))  # fmt: skip
    return lambda line: run.log(line, step=line["step"]), run.finish
