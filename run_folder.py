"""What a run leaves in its folder: config.json, checkpoints, metrics.jsonl, samples.jsonl, curves.png.

Used by grpo_trainer.py, whose configuration `config` is everywhere. A sample is a policy.Sample, a group is a
list of them; a sample's `result` is what reward_loop.py returns. Needs no other file of ours, and tensorboard
and wandb only where they are asked for. Also here: Ctrl-C, which must not cut a step in half.

Left out: standard errors, histograms, checkpoints on object stores. tools/view_run.py puts runs side by side.
"""

import contextlib
import json
import math
import os
import shutil
import signal
import sys
import threading
from collections import Counter
from dataclasses import asdict
from pathlib import Path

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt  # here, not in plot(): an interrupt in the middle of the import breaks both

AS_JSON = "backslashreplace"  # half a surrogate pair, as a model may write it, is no UTF-8; \ud83d is JSON

# ----------------------------------------------------------------------------- the folder and its config.json


def check_folder(config) -> None:
    """Makes the folder if need be. Raises ValueError where it is not writable, or holds a run already."""
    out_dir, trial = Path(config.out_dir), ".can_be_written"
    old = checkpoints_in(out_dir / "checkpoints")
    if old and config.resume == "never":
        remedy = "give another one, or go on with it by --resume auto"
        raise ValueError(f"out_dir: {out_dir} holds a run ({old[-1].name}); {remedy}")
    try:
        out_dir.mkdir(parents=True, exist_ok=True)
        replace_file(out_dir / trial, "")
        (out_dir / trial).unlink()
        for rest in out_dir.glob("checkpoints/.step_*.tmp"):  # of a run that was killed while it wrote
            shutil.rmtree(rest)
    except OSError as error:
        text = f"{out_dir} cannot be written to ({error}); give a folder that can"
        raise ValueError(f"out_dir: {text}") from error


def check_room(config, checkpoint: float) -> None:
    """Raises ValueError where the disk has no room for the checkpoints to come, of so many GB each."""
    to_come = config.keep_checkpoints + 1 - len(checkpoints_in(Path(config.out_dir, "checkpoints")))
    needed = checkpoint * max(1, to_come)  # the newest is written before the oldest is deleted
    free = 1e-9 * shutil.disk_usage(config.out_dir).free
    if free < needed:
        there = f"{free:.1f} GB are free in {config.out_dir}"
        raise ValueError(f"out_dir: {there}, checkpoints need {needed:.1f}; make room")


def write_config(config, resumed: bool) -> None:
    """Writes config.json; of a run that goes on, prints which settings have changed."""
    path, settings = Path(config.out_dir, "config.json"), json.dumps(asdict(config), indent=2)
    if resumed:
        before = json.loads(path.read_text())
        for name, value in json.loads(settings).items():
            if value != before.get(name) and name != "resume":
                print(f"{name}: {value!r} from here on; it was {before.get(name)!r}")
    replace_file(path, settings + "\n")


def replace_file(path: Path, text: str) -> None:
    """Writes a file that exists in its old or in its new form at any moment."""
    temporary = path.with_name(f".{path.name}.tmp")
    temporary.write_text(text, errors=AS_JSON)
    temporary.replace(path)


# ------------------------------------------------------------------------------------------------ checkpoints


def save_checkpoint(policy, tokenizer, state: dict, config) -> Path:
    """Writes checkpoints/step_N: a Hugging Face folder, the optimizer, `state` (with `step`) as JSON.

    It appears whole or not at all, also after a power cut, and older ones are deleted only then. Raises
    RuntimeError when it cannot be written.
    """
    folder = Path(config.out_dir, "checkpoints")
    target, temporary = folder / f"step_{state['step']}", folder / f".step_{state['step']}.tmp"
    try:
        shutil.rmtree(temporary, ignore_errors=True)
        policy.save(temporary)
        tokenizer.save_pretrained(temporary)
        (temporary / "trainer_state.json").write_text(json.dumps(state))
        for path in filter(Path.is_file, temporary.rglob("*")):  # on the disk before older ones go
            with open(path, "rb") as file:
                os.fsync(file.fileno())
        shutil.rmtree(target, ignore_errors=True)
        temporary.rename(target)
    except Exception as error:  # safetensors and torch raise kinds of their own when the disk is full
        shutil.rmtree(temporary, ignore_errors=True)
        free = f"{1e-9 * shutil.disk_usage(config.out_dir).free:.1f} GB are free there"
        last = next((path.name for path in checkpoints_in(folder)[::-1]), "the start")
        goes_on = f"--resume auto goes on from {last}"
        raise RuntimeError(f"{target}: could not be written ({error}); {free}; {goes_on}") from error
    for old in checkpoints_in(folder)[: -config.keep_checkpoints] if config.keep_checkpoints else []:
        shutil.rmtree(old)
    return target


def checkpoints_in(folder: Path) -> list[Path]:
    """The whole checkpoints of a run, oldest first; a copy by another name, such as step_20_best, is none."""
    paths = [path.parent for path in folder.glob("step_*/trainer_state.json")]
    steps = {int(path.name[5:]): path for path in paths if path.name[5:].isdecimal()}
    return [steps[step] for step in sorted(steps)]


# ---------------------------------------------------------------------------------- means over scored samples


def mean(values) -> float | None:
    """The mean of the values that are not None; None where there are none."""
    known = [float(value) for value in values if value is not None]
    return sum(known) / len(known) if known else None


def averages(infos: list[dict]) -> dict[str, float | None]:
    """The means of the numbers and booleans in these reward_extra_infos, over the samples that have them.

    `flawed_positive` (and what ends so) becomes a rate among right answers, as in the paper, not among all.
    """
    means = {}
    for key in dict.fromkeys(key for info in infos for key in info):
        if key in ("pred", "gt"):  # an index has no mean
            continue
        is_rate = key.endswith("flawed_positive")
        values = [info.get(key) for info in infos if info.get("acc") or not is_rate]
        # NaN and what is too large for a float (a number that a model wrote out) count as not there.
        numbers = [x for x in values if isinstance(x, (int, float)) and abs(x) <= sys.float_info.max]
        means[f"{key}_rate" if is_rate else key] = mean(numbers)
    return means


def reward_metrics(samples: list) -> dict:
    """Means over the samples of a step; what no sample has is left out."""
    rewards, results = [sample.reward for sample in samples], [sample.result for sample in samples]
    infos = [result["reward_extra_info"] for result in results]
    asked = [status for info in infos if (status := info.get("genrm_status", "skipped")) != "skipped"]
    seconds = [result["seconds"] for result in results if result.get("seconds") is not None]
    metrics = {f"reward/{key}": value for key, value in averages(infos).items()}  # "mean" may be among them
    metrics |= {
        "reward/mean": mean(rewards),
        "reward/no_verdict": mean(reward is None for reward in rewards),
        "reward/seconds_mean": mean(seconds),
        "reward/seconds_max": max(seconds, default=None),
        "genrm/error_rate": mean(status != "ok" for status in asked),
        "genrm/truncated": mean(status == "truncated" for status in asked),
        "genrm/asked": len(asked) or None,
    }
    return known(metrics)


def known(metrics: dict) -> dict:
    return {key: value for key, value in metrics.items() if value is not None}


def pass_at_k(n: int, correct: int, k: int) -> float:
    """Unbiased chance that one of k samples drawn from n, `correct` of them right, is right (Chen, 2021)."""
    return 1.0 - math.comb(n - correct, k) / math.comb(n, k)


def majority(group: list[dict]) -> bool:
    """Whether the answer that most samples give is right."""
    preds = [info.get("pred") for info in group]
    return bool(max(group, key=lambda info: preds.count(info.get("pred")))["acc"])


def validation_metrics(groups: list[list], suffix: str = "") -> dict:
    """Metrics of the groups of n samples of each data source: mean@n, maj@n and pass@k (k = 1, 2, 4 ... n) of
    `acc`, and mean@n of each other number that the reward function returns. `suffix` replaces "mean@n"."""
    metrics, of_source = {}, {}
    for group in groups:
        of_source.setdefault((group[0].row["data_source"], len(group)), []).append(group)
    for (source, n), mine in of_source.items():
        infos = [[sample.result["reward_extra_info"] for sample in group] for group in mine]
        means, label = averages(sum(infos, [])), suffix or f"mean@{n}"
        accuracy = means.pop("acc", None)
        means["no_verdict"] = mean(sample.reward is None for group in mine for sample in group)
        metrics |= {f"val/{source}/{key}/{label}": value for key, value in means.items()}
        metrics[f"val/{source}/{label}"] = accuracy
        if n == 1 or accuracy is None:
            continue
        # What has no `acc` (an error, say) is no wrong answer: it is left out, here as in the mean.
        answers = [[info for info in group if info.get("acc") is not None] for group in infos]
        metrics[f"val/{source}/maj@{n}"] = mean(majority(group) for group in answers if group)
        for k in {2**power for power in range(n.bit_length())} | {n}:
            chances = (pass_at_k(len(g), sum(bool(i["acc"]) for i in g), k) for g in answers if len(g) >= k)
            metrics[f"val/{source}/pass@{k}"] = mean(chances)
    return known(metrics)


# ------------------------------------------------------------------------------------ metrics, samples, plots


def read_lines(path: Path) -> tuple[list[dict], int]:
    """The objects of a JSONL file, and how many lines are none: a run in progress may end in half of one."""
    lines, torn = [], 0
    # Not splitlines(), which splits at U+2028 and the like, too. Half a character at the end is half a line.
    for line in filter(None, path.read_text(errors="replace").split("\n") if path.is_file() else []):
        try:
            lines.append(json.loads(line))
        except json.JSONDecodeError:
            torn += 1
    return lines, torn


def write_lines(path: Path, lines: list[dict]) -> None:
    replace_file(path, "".join(json.dumps(line, ensure_ascii=False) + "\n" for line in lines))


def has_evaluation(line: dict) -> bool:
    """Whether a step's line of metrics has those of its evaluation."""
    return any(key.startswith("val/") for key in line)


def tensorboard_hook(config, first_step: int) -> tuple:
    """(what takes a step's metrics to TensorBoard, what ends that)."""
    from torch.utils.tensorboard import SummaryWriter

    purge = first_step + 1 if first_step else None
    writer = SummaryWriter(Path(config.out_dir, "tensorboard"), purge_step=purge)
    return lambda line: [writer.add_scalar(key, line[key], line["step"]) for key in line], writer.close


def wandb_hook(config, first_step: int) -> tuple:
    """The same for Weights & Biases, where a resumed run is the same run: its id stays in the folder."""
    import wandb

    folder = Path(config.out_dir)
    id_file = folder / "wandb_id"
    if not (first_step and id_file.is_file()):
        replace_file(id_file, os.urandom(4).hex())
    about = dict(project="fapo", name=folder.name, id=id_file.read_text(), resume="allow", dir=folder)
    run = wandb.init(config=asdict(config), **about)
    return lambda line: run.log(line, step=line["step"]), run.finish


class Log:
    """metrics.jsonl (one line a step), samples.jsonl and curves.png; TensorBoard and W&B where asked for.

    config: the trainer's. Lines of steps after `first_step` are dropped: they will be done again.
    """

    def __init__(self, config, first_step: int):
        self.config, self.folder = config, Path(config.out_dir)
        self.rewind(first_step or -1)
        wanted = [tensorboard_hook] * config.tensorboard + [wandb_hook] * config.wandb
        self.hooks = [hook(config, first_step) for hook in wanted]

    def rewind(self, step: int) -> None:
        """Drops lines of later steps, and samples of an evaluation that ended before it wrote its metrics."""
        self.history, samples = (
            [line for line in read_lines(self.folder / name)[0] if line["step"] <= step]
            for name in ("metrics.jsonl", "samples.jsonl")
        )
        evaluated = {line["step"] for line in self.history if has_evaluation(line)}
        samples = [line for line in samples if line.get("split") != "val" or line["step"] in evaluated]
        write_lines(self.folder / "metrics.jsonl", self.history)
        write_lines(self.folder / "samples.jsonl", samples)

    def metrics(self, values: dict) -> None:
        """Writes a step's line. What comes later for that step, such as its evaluation, is added to it."""
        path = self.folder / "metrics.jsonl"
        values = {key: float(f"{x:.6g}") if isinstance(x, float) else x for key, x in values.items()}
        if self.history and self.history[-1]["step"] == values["step"]:
            self.history[-1] |= values
            write_lines(path, self.history)
        else:
            self.history.append(values)
            with open(path, "a") as file:
                file.write(json.dumps(values) + "\n")
        for send, _ in self.hooks:
            send(values)

    def samples(self, step: int, split: str, groups: list[list], eos_ids) -> None:
        """Writes a step's first groups to samples.jsonl, about `samples_per_step` samples of a data source.

        Groups of training are whole, to show what their advantages come from; an evaluation's are their first
        sample, and three of these are printed.
        """
        written = Counter()
        with open(self.folder / "samples.jsonl", "a", errors=AS_JSON) as file:
            for number, group in enumerate(groups):
                row, shown = group[0].row, group if split == "train" else group[:1]
                if written[row["data_source"]] >= self.config.samples_per_step:
                    continue
                written[row["data_source"]] += len(shown)
                prompt, truth = row["prompt"][-1]["content"], row["reward_model"]["ground_truth"]
                for sample in shown:
                    line = {"step": step, "split": split, "group": number, "data_source": row["data_source"],
                            "prompt": prompt, "ground_truth": truth, **sample.result,
                            "advantage": sample.advantage, "response_length": len(sample.response_ids),
                            "clipped": sample.response_ids[-1] not in eos_ids,
                            "response": sample.text}  # fmt: skip
                    file.write(json.dumps(line, ensure_ascii=False, default=str) + "\n")
                if split == "val" and written.total() <= 3:
                    ask, answer = (" ".join(text.split()) for text in (prompt, sample.text))
                    verdict = f"truth {str(truth)[:12]} | reward {sample.reward}"
                    print(f"    {ask[-40:]:>40} | {answer[-60:]:<60} | {verdict}")

    def plot(self) -> None:
        """Redraws curves.png from all metrics so far."""
        seen = sorted({key for line in self.history for key in line if not key.endswith("/greedy")})
        # val/SOURCE/mean@k, not val/SOURCE/KEY/mean@k: only the former has a val/SOURCE/no_verdict/mean@k.
        means = [key for key in seen if "/mean@" in key]
        held_out = [key for key in means if "/no_verdict/".join(key.rsplit("/", 1)) in seen]
        panels = {
            "reward": ["reward/mean", "reward/score"],
            "accuracy": ["reward/acc", *held_out],
            "flawed positives among right answers": [key for key in seen if "flawed_positive_rate" in key],
            "response length (tokens)": ["response_length/mean", "response_length/max"],
            "entropy": ["actor/entropy"],
            "seconds": ["time/rollout", "time/reward_wait", "time/update", "time/step"],
        }
        figure, axes = plt.subplots(2, 3, figsize=(15, 7.5), constrained_layout=True)
        for axis, (title, keys) in zip(axes.flat, panels.items()):
            for key in filter(seen.__contains__, keys):
                points = [(line["step"], line[key]) for line in self.history if key in line]
                # No line between two evaluations, where nothing was measured.
                style = "o" if key.startswith("val/") else "-"
                axis.plot(*zip(*points), style, label=key)
            axis.set(title=title, xlabel="step")
            axis.grid(alpha=0.3)
            if axis.lines:
                axis.legend(fontsize=8)
        figure.savefig(self.folder / ".curves.png", dpi=100, format="png")
        plt.close(figure)
        (self.folder / ".curves.png").rename(self.folder / "curves.png")  # a viewer never sees half a picture

    def close(self) -> None:
        """Draws the curves a last time and ends TensorBoard and W&B."""
        if self.history:
            self.plot()
        for _, end in self.hooks:
            end()


# ---------------------------------------------------------------------------------------------- being stopped


class Interrupts:
    """Ctrl-C and SIGTERM: at once while nothing can be lost; within `held` when that is done."""

    def __init__(self):
        self.hold = self.asked = False
        here = threading.current_thread() is threading.main_thread()  # elsewhere Python allows no handlers
        numbers = (signal.SIGINT, signal.SIGTERM) if here else ()
        self.before = {number: signal.signal(number, self.handle) for number in numbers}

    def handle(self, *_) -> None:
        if self.asked or not self.hold:
            raise KeyboardInterrupt
        self.asked = True
        again = "Ctrl-C again leaves at once, with the last checkpoint"
        print(f"finishing this step, then saving; {again}", flush=True)

    @contextlib.contextmanager
    def held(self):
        """Inside, the first Ctrl-C waits for the end."""
        self.hold = True
        try:
            yield
        finally:
            self.hold = False
        if self.asked:
            raise KeyboardInterrupt

    def restore(self) -> None:
        """Puts the earlier handlers back."""
        for number, handler in self.before.items():
            signal.signal(number, handler or signal.SIG_DFL)  # None: one that Python did not set
