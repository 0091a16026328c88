"""What a run leaves in its folder: checkpoints, metrics.jsonl, samples.jsonl, curves.png, TensorBoard, Weights & Biases.

Used by grpo_trainer.py, whose configuration `config` is everywhere. Samples are policy.Sample; the `result` of one is what
reward_loop.py returns.

Also what goes with it: is the folder fit for a run, and Ctrl-C, which must not cut a step in half.

Left out: standard errors, histograms, checkpoints on object stores. Several runs side by side are a page of view_run.py.
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
import matplotlib.pyplot as plt  # here, not in plot(): an interrupt in the middle of its import would break both

AS_JSON = "backslashreplace"  # half a surrogate pair, which a reward function may return, is no UTF-8; as \ud83d it is JSON

# -------------------------------------------------------------------------------------------------- the folder and its config


def check_folder(config) -> None:
    """Makes the folder if need be. Raises ValueError where it cannot be written to, or holds a run that is not to go on."""
    out_dir, old, trial = Path(config.out_dir), checkpoints_in(Path(config.out_dir, "checkpoints")), ".can_be_written"
    names = ("trainer_state.pt", "optimizer.pt")
    unread = [path.parent.name for name in names for path in out_dir.glob(f"checkpoints/step_*/{name}")]
    if unread and config.resume == "auto":  # going on from the start would overwrite it
        raise ValueError(f"out_dir: {out_dir} holds checkpoints of an earlier layout ({unread[0]}); give another folder, and "
                         f"{out_dir}/checkpoints/{unread[-1]} as --model")  # fmt: skip
    if old and config.resume == "never":
        raise ValueError(f"out_dir: {out_dir} holds a run ({old[-1].name}); give another one, or go on with it by --resume auto")
    try:
        out_dir.mkdir(parents=True, exist_ok=True)
        replace_file(out_dir / trial, "")
        (out_dir / trial).unlink()
        for rest in out_dir.glob("checkpoints/.step_*.tmp"):  # of a run that was killed while it wrote
            shutil.rmtree(rest)
    except OSError as error:
        raise ValueError(f"out_dir: {out_dir} cannot be written to ({error}); give a folder that can") from error


def check_room(config, checkpoint: float) -> None:
    """Raises ValueError where the disk has no room for the checkpoints to come, of so many GB each."""
    kept = len(checkpoints_in(Path(config.out_dir, "checkpoints")))
    needed = checkpoint * max(1, config.keep_checkpoints + 1 - kept)  # the newest is written before the oldest is deleted
    free = 1e-9 * shutil.disk_usage(config.out_dir).free
    if free < needed:
        raise ValueError(f"out_dir: {free:.1f} GB are free in {config.out_dir}, checkpoints need {needed:.1f}; make room")


def write_config(config, resumed: bool) -> None:
    """Writes config.json; of a run that goes on, says which settings are not what they were."""
    path = Path(config.out_dir, "config.json")
    if resumed:
        before = json.loads(path.read_text())
        for name, value in json.loads(json.dumps(asdict(config))).items():
            if value != before.get(name) and name != "resume":
                print(f"{name}: {value!r} from here on; it was {before.get(name)!r}")
    replace_file(path, json.dumps(asdict(config), indent=2) + "\n")


def replace_file(path: Path, text: str) -> None:
    """Writes a file that exists in its old or in its new form at any moment."""
    temporary = path.with_name(f".{path.name}.tmp")
    temporary.write_text(text, errors=AS_JSON)
    temporary.replace(path)


# ------------------------------------------------------------------------------------------------------------- checkpoints


def save_checkpoint(policy, tokenizer, state: dict, config) -> Path:
    """Writes checkpoints/step_N: an ordinary Hugging Face folder, the optimizer, trainer_state.json (`state`, with `step` in it).

    It appears whole or not at all, also after a power cut, and older ones are deleted only then. Raises RuntimeError when it
    cannot be written.
    """
    folder = Path(config.out_dir, "checkpoints")
    target, temporary = folder / f"step_{state['step']}", folder / f".step_{state['step']}.tmp"
    try:
        shutil.rmtree(temporary, ignore_errors=True)
        policy.save(temporary)
        tokenizer.save_pretrained(temporary)
        (temporary / "trainer_state.json").write_text(json.dumps(state))
        for path in filter(Path.is_file, temporary.rglob("*")):  # on the disk, not only on its way there, before older ones go
            with open(path, "rb") as file:
                os.fsync(file.fileno())
        shutil.rmtree(target, ignore_errors=True)
        temporary.rename(target)
    except Exception as error:  # safetensors and torch raise kinds of their own when the disk is full
        shutil.rmtree(temporary, ignore_errors=True)
        kept = checkpoints_in(folder)
        raise RuntimeError(
            f"{target}: could not be written ({error}); {shutil.disk_usage(config.out_dir).free / 1e9:.1f} GB are free there; "
            f"make room, then --resume auto goes on from {kept[-1].name if kept else 'the start'}"
        ) from error
    for old in checkpoints_in(folder)[: -config.keep_checkpoints] if config.keep_checkpoints else []:
        shutil.rmtree(old)
    return target


def checkpoints_in(folder: Path) -> list[Path]:
    """The whole checkpoints of a run, oldest first. A copy that somebody keeps beside them (step_20_best) is none of them."""
    steps = {path.parent: path.parent.name.removeprefix("step_") for path in folder.glob("step_*/trainer_state.json")}
    return sorted((path for path, step in steps.items() if step.isdecimal()), key=lambda path: int(steps[path]))


# ------------------------------------------------------------------------------------------------- means over scored samples


def mean(values) -> float | None:
    known = [float(value) for value in values if value is not None]
    return sum(known) / len(known) if known else None


def averages(results: list[dict]) -> dict[str, float | None]:
    """The means of the numbers and booleans in the results' reward_extra_info, over the samples that have them; else None.

    `flawed_positive` (and what ends so) becomes a rate among right answers, as in the paper, not among all samples.
    """
    infos, means = [result["reward_extra_info"] for result in results], {}
    for key in dict.fromkeys(key for info in infos for key in info if key not in ("pred", "gt")):  # an index has no mean
        is_rate = key.endswith("flawed_positive")
        values = [info.get(key) for info in infos if info.get("acc") or not is_rate]
        # NaN and what is too large for a float (a number that a model wrote out) count as not there.
        numbers = [value for value in values if isinstance(value, (int, float)) and abs(value) <= sys.float_info.max]
        means[f"{key}_rate" if is_rate else key] = mean(numbers)
    return means


def reward_metrics(samples: list) -> dict:
    """Means over the samples of a step; what no sample has is left out."""
    rewards, results = [sample.reward for sample in samples], [sample.result for sample in samples]
    statuses = [result["reward_extra_info"].get("genrm_status") for result in results]
    asked = [status for status in statuses if status not in (None, "skipped")]
    metrics = {f"reward/{key}": value for key, value in averages(results).items()}  # first: a key of theirs may be "mean", too
    metrics |= {"reward/mean": mean(rewards), "reward/no_verdict": mean(reward is None for reward in rewards)}
    seconds = [result["seconds"] for result in results if result.get("seconds") is not None]
    if seconds:
        metrics |= {"reward/seconds_mean": mean(seconds), "reward/seconds_max": max(seconds)}
    if asked:
        metrics["genrm/error_rate"] = mean(status != "ok" for status in asked)
        metrics["genrm/truncated"] = mean(status == "truncated" for status in asked)
        metrics["genrm/asked"] = len(asked)
    return {key: value for key, value in metrics.items() if value is not None}


def pass_at_k(n: int, correct: int, k: int) -> float:
    """Unbiased chance that one of k samples drawn from n, of which `correct` are right, is right (Chen et al. 2021, eq. 1)."""
    return 1.0 - math.comb(n - correct, k) / math.comb(n, k)


def validation_metrics(samples: list, n: int, suffix: str = "") -> dict:
    """Metrics by data source of n samples per row: mean@n, maj@n and pass@k (k = 1, 2, 4 ... n) of `acc`, and mean@n of each
    other number that the reward function returns. `suffix` replaces "mean@n" where it is given."""
    metrics, label = {}, suffix or f"mean@{n}"
    for source in dict.fromkeys(sample.row["data_source"] for sample in samples):
        results = [sample.result for sample in samples if sample.row["data_source"] == source]
        means = averages(results)
        accuracy = means.pop("acc", None)
        metrics |= {f"val/{source}/{key}/{label}": value for key, value in means.items()}
        metrics[f"val/{source}/{label}"] = accuracy
        metrics[f"val/{source}/no_verdict/{label}"] = mean(result["reward_score"] is None for result in results)
        if n == 1 or accuracy is None:
            continue
        infos = [result["reward_extra_info"] for result in results]
        groups = [infos[start : start + n] for start in range(0, len(infos), n)]
        # What has no `acc` (an error, say) is no wrong answer: it is left out, here as in the mean.
        answers = [[(info.get("pred"), bool(info["acc"])) for info in group if info.get("acc") is not None] for group in groups]
        majority = [max(group, key=lambda answer: sum(answer[0] == other[0] for other in group))[1] for group in answers if group]
        metrics[f"val/{source}/maj@{n}"] = mean(majority)
        for k in {2**power for power in range(n.bit_length())} | {n}:
            enough = [group for group in answers if len(group) >= k]
            metrics[f"val/{source}/pass@{k}"] = mean(pass_at_k(len(g), sum(right for _, right in g), k) for g in enough)
    return {key: value for key, value in metrics.items() if value is not None}


# -------------------------------------------------------------------------------------------------------- metrics, samples, plots


def read_lines(path: Path) -> tuple[list[dict], int]:
    """The objects of a JSONL file, and how many lines are none: the last one of a run in progress may be cut in the middle."""
    lines, torn = [], 0
    # Not splitlines(), which would split texts at U+2028 and the like, too. Half a character at the end is half a line.
    for line in filter(None, path.read_text(errors="replace").split("\n") if path.is_file() else []):
        try:
            lines.append(json.loads(line))
        except json.JSONDecodeError:
            torn += 1
    return lines, torn


def has_evaluation(line: dict) -> bool:
    """Whether a step's line of metrics has those of its evaluation."""
    return any(key.startswith("val/") for key in line)


class Log:
    """metrics.jsonl (one line a step), samples.jsonl and curves.png of a run's folder; TensorBoard and W&B where asked for.

    config: the trainer's. Lines of steps after `first_step` are dropped: what came after the checkpoint is done again.
    """

    def __init__(self, config, first_step: int):
        self.config, self.folder, self.writer, self.wandb = config, Path(config.out_dir), None, None
        self.rewind(first_step or -1)
        if config.tensorboard:
            from torch.utils.tensorboard import SummaryWriter

            self.writer = SummaryWriter(self.folder / "tensorboard", purge_step=first_step + 1 if first_step else None)
        if config.wandb:
            import wandb

            id_file = self.folder / "wandb_id"  # a resumed run is the same run
            if not (first_step and id_file.is_file()):
                replace_file(id_file, os.urandom(4).hex())
            run = dict(name=self.folder.name, id=id_file.read_text(), resume="allow", dir=self.folder)
            self.wandb = wandb.init(project="fapo", config=asdict(config), **run)

    def rewind(self, step: int) -> None:
        """Drops all lines of later steps, and samples of an evaluation that was stopped before its metrics were written."""
        self.history, samples = (
            [line for line in read_lines(self.folder / name)[0] if line["step"] <= step]
            for name in ("metrics.jsonl", "samples.jsonl")
        )
        evaluated = {line["step"] for line in self.history if has_evaluation(line)}
        samples = [line for line in samples if line.get("split") != "val" or line["step"] in evaluated]
        for name, lines in (("metrics.jsonl", self.history), ("samples.jsonl", samples)):
            replace_file(self.folder / name, "".join(json.dumps(line, ensure_ascii=False) + "\n" for line in lines))

    def metrics(self, values: dict) -> None:
        """Writes a step's line. What comes later for the same step, such as its evaluation, is added to that line."""
        rounded = {key: float(f"{value:.6g}") if isinstance(value, float) else value for key, value in values.items()}
        if self.history and self.history[-1]["step"] == rounded["step"]:
            self.history[-1] |= rounded
            replace_file(self.folder / "metrics.jsonl", "".join(json.dumps(line) + "\n" for line in self.history))
        else:
            self.history.append(rounded)
            with open(self.folder / "metrics.jsonl", "a") as file:
                file.write(json.dumps(rounded) + "\n")
        if self.writer:
            for key, value in rounded.items():
                self.writer.add_scalar(key, value, rounded["step"])
            self.writer.flush()
        if self.wandb:
            self.wandb.log(rounded, step=rounded["step"])

    def samples(self, step: int, split: str, samples: list, eos_ids) -> None:
        """A step's first groups of each data source to samples.jsonl; an evaluation's samples also as a table, for the eye.

        A group is never split, so that it shows what its advantages come from. In an evaluation each sample is one.
        """
        table, written, size = [], Counter(), self.config.group_size if split == "train" else 1
        with open(self.folder / "samples.jsonl", "a", errors=AS_JSON) as file:
            for place, sample in enumerate(samples):
                row, group = sample.row, place // size
                if place % size == 0:
                    shown = written[row["data_source"]] < self.config.samples_per_step
                    written[row["data_source"]] += size
                if not shown:
                    continue
                prompt, truth = row["prompt"][-1]["content"], row["reward_model"]["ground_truth"]
                line = {"step": step, "split": split, "group": group, "data_source": row["data_source"], "prompt": prompt,
                        "ground_truth": truth, **sample.result, "advantage": sample.advantage,
                        "response_length": len(sample.response_ids), "clipped": sample.response_ids[-1] not in eos_ids,
                        "response": sample.text}  # fmt: skip
                file.write(json.dumps(line, ensure_ascii=False, default=str) + "\n")
                table.append([step, prompt, sample.text, str(truth), str(sample.reward)])
        if split != "val":
            return
        for _, prompt, response, truth, reward in table[:3]:
            ends = [" ".join(text.split())[-cut:] for text, cut in ((prompt, 40), (response, 60))]
            print(f"    {ends[0]:>40} | {ends[1]:<60} | truth {truth[:12]} | reward {reward}")
        columns = ["step", "prompt", "response", "ground_truth", "reward"]
        if self.writer:
            cells = [[" ".join(str(cell).split()).replace("|", "\\|") for cell in line] for line in (columns, ["-"] * 5, *table)]
            self.writer.add_text("val/samples", "\n".join("| " + " | ".join(line) + " |" for line in cells), step)
        if self.wandb:
            import wandb

            self.wandb.log({"val/samples": wandb.Table(columns, table)}, step=step)

    def plot(self) -> None:
        """Redraws curves.png from all metrics so far."""
        seen = sorted({key for metrics in self.history for key in metrics})
        # val/SOURCE/mean@k, not val/SOURCE/KEY/mean@k: the only one that has a val/SOURCE/no_verdict/mean@k beside it.
        held_out = [key for key in seen if "/mean@" in key and "/no_verdict/".join(key.rsplit("/", 1)) in seen]
        flawed = [key for key in seen if "flawed_positive_rate" in key and "greedy" not in key]
        panels = [
            ("reward", ["reward/mean", "reward/score"]),
            ("accuracy", ["reward/acc", *held_out]),
            ("flawed positives among right answers", flawed),
            ("response length (tokens)", ["response_length/mean", "response_length/max"]),
            ("entropy", ["actor/entropy"]),
            ("seconds", ["time/rollout", "time/reward_wait", "time/update", "time/step"]),
        ]  # fmt: skip
        figure, axes = plt.subplots(2, 3, figsize=(15, 7.5), constrained_layout=True)
        for axis, (title, keys) in zip(axes.flat, panels):
            for key in keys:
                points = [(m["step"], m[key]) for m in self.history if key in m]
                if points:  # between two evaluations nothing was measured: no line
                    axis.plot(*zip(*points), "o" if key.startswith("val/") else "-", label=key)
            axis.set(title=title, xlabel="step")
            axis.grid(alpha=0.3)
            if axis.lines:
                axis.legend(fontsize=8)
        figure.savefig(self.folder / ".curves.png", dpi=100, format="png")
        plt.close(figure)
        (self.folder / ".curves.png").rename(self.folder / "curves.png")  # a viewer never sees half a picture

    def close(self) -> None:
        if self.history:
            self.plot()
        if self.writer:
            self.writer.close()
        if self.wandb:
            self.wandb.finish()


# ------------------------------------------------------------------------------------------------------------ being stopped


class Interrupts:
    """Ctrl-C and SIGTERM: at once while nothing can be lost; during an update (`hold`) only when that and its log are done."""

    def __init__(self):
        self.hold = self.asked = False
        here = threading.current_thread() is threading.main_thread()  # elsewhere Python allows no handlers
        self.before = {number: signal.signal(number, self.handle) for number in (signal.SIGINT, signal.SIGTERM) if here}

    def handle(self, *_) -> None:
        if self.asked or not self.hold:
            raise KeyboardInterrupt
        self.asked = True
        print("finishing this step, then saving; Ctrl-C again leaves at once, with the last checkpoint", flush=True)

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
        for number, handler in self.before.items():
            signal.signal(number, handler or signal.SIG_DFL)  # None: one that Python did not set
