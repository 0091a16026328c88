"""What a run leaves in its folder: config.json, checkpoints, metrics.jsonl, samples.jsonl, curves.png.

Used by grpo_trainer.py, whose configuration is `config`. A group is a list of policy.Sample, whose `result`
is what reward_loop.py returns. Also: Ctrl-C. Left out: object stores. Needs metrics.py; for the
advantages of paragraphs algorithm.py.
"""

import contextlib
import fcntl
import json
import os
import shutil
import signal
from collections import Counter
from dataclasses import asdict
from pathlib import Path

import metrics

AS_JSON = "backslashreplace"  # half a surrogate pair, as a model may write it, is no UTF-8; \ud83d is JSON


def check_folder(config):
    """Makes the folder and holds it for this run. Returns the lock, an open file: closing it lets go. Raises
    ValueError, with nothing deleted, where a run is not to be resumed or goes on, or it cannot be written."""
    out_dir = Path(config.out_dir)
    checkpoints = checkpoints_in(out_dir / "checkpoints")
    if checkpoints and config.resume == "never":
        newest = checkpoints[-1].name
        raise ValueError(f"out_dir: {out_dir} holds a run ({newest}); give another or --resume auto")
    try:
        out_dir.mkdir(parents=True, exist_ok=True)
        lock = open(out_dir / ".lock", "a+")
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        lock.seek(0)
        raise ValueError(f"out_dir: {out_dir} is in use by {lock.read()}; wait or give another one") from None
    except OSError as error:
        raise ValueError(f"out_dir: {out_dir} cannot be written to ({error}); give another one") from error
    lock.truncate(0)
    lock.write(f"process {os.getpid()} on {os.uname().nodename}")
    lock.flush()
    for rest in out_dir.glob("checkpoints/.step_*.tmp"):  # of a run that was killed while it wrote
        shutil.rmtree(rest, ignore_errors=True)
    return lock


def check_room(config, checkpoint: float) -> None:
    """Raises ValueError where the disk has no room for the checkpoints to come, of so many GB each."""
    kept = len(checkpoints_in(Path(config.out_dir, "checkpoints")))
    to_come = max(1, config.keep_checkpoints + 1 - kept)  # the newest is written before the oldest goes
    needed = to_come * checkpoint
    free = 1e-9 * shutil.disk_usage(config.out_dir).free
    if free < needed:
        where = f"out_dir: {free:.1f} GB are free in {config.out_dir}"
        raise ValueError(f"{where}, checkpoints need {needed:.1f}; make room")


def write_config(config, resumed: bool) -> None:
    """Writes config.json; of a run that goes on, prints which settings have changed."""
    path = Path(config.out_dir, "config.json")
    settings = json.dumps(asdict(config), indent=2)
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


def save_checkpoint(policy, tokenizer, state: dict, config) -> Path:
    """Writes checkpoints/step_N: a Hugging Face folder, the optimizer, `state` (with `step`) as JSON.
    It appears whole or not at all, also after a power cut; then older ones go. RuntimeError: not written."""
    folder = Path(config.out_dir, "checkpoints")
    name = f"step_{state['step']}"
    target = folder / name
    temporary = folder / f".{name}.tmp"
    try:
        policy.save(temporary)
        tokenizer.save_pretrained(temporary)
        (temporary / "trainer_state.json").write_text(json.dumps(state))
        for path in temporary.rglob("*"):
            if path.is_file():
                with open(path, "rb") as file:
                    os.fsync(file.fileno())  # on the disk before older ones go
        shutil.rmtree(target, ignore_errors=True)
        temporary.rename(target)
    except Exception as error:  # safetensors and torch raise kinds of their own when the disk is full
        shutil.rmtree(temporary, ignore_errors=True)
        checkpoints = checkpoints_in(folder)
        last = checkpoints[-1].name if checkpoints else "the start"
        why = f"{target}: could not be written ({error}); --resume auto goes on from {last}"
        raise RuntimeError(why) from error
    if config.keep_checkpoints:
        for old in checkpoints_in(folder)[: -config.keep_checkpoints]:
            try:
                shutil.rmtree(old)
            except OSError as error:  # a file that is open elsewhere, on NFS; the next checkpoint tries again
                print(f"warning: {old} could not be deleted ({error}); delete it by hand")
    return target


def checkpoints_in(folder: Path) -> list[Path]:
    """The whole checkpoints of a run, oldest first; a copy by another name, such as step_20_best, is none."""
    found = {}
    for path in folder.glob("step_*/trainer_state.json"):
        step = path.parent.name.removeprefix("step_")
        if step.isdecimal():
            found[int(step)] = path.parent
    return [found[step] for step in sorted(found)]


def read_lines(path: Path) -> tuple[list[dict], int]:
    """The objects of a JSONL file, and how many lines are none: a run in progress may end in half of one."""
    lines = []
    torn = 0
    if not path.is_file():
        return lines, torn
    # Not splitlines(), which splits at U+2028 and the like, too. Half a character at the end is half a line.
    for line in path.read_text(errors="replace").split("\n"):
        if not line:
            continue
        try:
            lines.append(json.loads(line))
        except json.JSONDecodeError:
            torn += 1
    return lines, torn


def write_lines(path: Path, lines: list[dict]) -> None:
    text = "".join(json.dumps(line, ensure_ascii=False) + "\n" for line in lines)
    replace_file(path, text)


def has_evaluation(line: dict) -> bool:
    """Whether a step's line of metrics has those of its evaluation."""
    return any(key.startswith("val/") for key in line)


class Log:
    """metrics.jsonl (one line a step), samples.jsonl and curves.png; TensorBoard and W&B where asked for.
    Lines of steps after `first_step` are dropped: they will be done again."""

    def __init__(self, config, first_step: int):
        self.config = config
        self.folder = Path(config.out_dir)
        self.rewind(first_step or -1)
        self.trackers = []
        if config.tensorboard:
            self.trackers.append(metrics.TensorBoard(config, first_step))
        if config.wandb:
            self.trackers.append(metrics.WandB(config, first_step))

    def rewind(self, step: int) -> None:
        """Drops lines of later steps, and samples of an evaluation that ended before it wrote its metrics."""
        path = self.folder / "metrics.jsonl"
        lines, _ = read_lines(path)
        self.history = [line for line in lines if line["step"] <= step]
        write_lines(path, self.history)
        evaluated = {line["step"] for line in self.history if has_evaluation(line)}
        path = self.folder / "samples.jsonl"
        lines, _ = read_lines(path)
        kept = []
        for line in lines:
            is_whole = line["split"] == "train" or line["step"] in evaluated
            if is_whole and line["step"] <= step:
                kept.append(line)
        write_lines(path, kept)

    def metrics(self, values: dict) -> None:
        """Writes a step's line. What comes later for that step, such as its evaluation, is added to it."""
        values = dict(values)
        for key, value in values.items():
            if isinstance(value, float):
                values[key] = float(f"{value:.6g}")
        if self.history and self.history[-1]["step"] == values["step"]:
            self.history[-1] |= values
            write_lines(self.folder / "metrics.jsonl", self.history)
        else:
            self.history.append(values)
            with open(self.folder / "metrics.jsonl", "a") as file:
                file.write(json.dumps(values) + "\n")
        for tracker in self.trackers:
            tracker.send(values)

    def samples(self, step: int, split: str, groups: list[list], eos_ids, decode=None) -> None:
        """Writes a step's first groups to samples.jsonl, about `samples_per_step` samples of a data source:
        whole groups of training; of an evaluation the first sample of each, three of them on the screen.
        decode: of token ids, for the advantages of paragraphs."""
        written = Counter()
        lines = []
        for number, group in enumerate(groups):
            source = group[0].row["data_source"]
            if written[source] >= self.config.samples_per_step:
                continue
            if split == "val":
                group = group[:1]
            written[source] += len(group)
            for sample in group:
                place = {"step": step, "split": split, "group": number, "data_source": source}
                lines.append(place | line_of(sample, eos_ids, decode))
        with open(self.folder / "samples.jsonl", "a", errors=AS_JSON) as file:
            file.writelines(json.dumps(line, ensure_ascii=False, default=str) + "\n" for line in lines)
        if split == "val":
            metrics.print_samples(lines[:3])

    def plot(self) -> None:
        """Redraws curves.png from all metrics so far."""
        metrics.draw_curves(self.history, self.folder / "curves.png")

    def close(self) -> None:
        """Draws the curves a last time and ends TensorBoard and W&B."""
        self.plot()
        for tracker in self.trackers:
            tracker.close()


def line_of(sample, eos_ids, decode) -> dict:
    """What samples.jsonl has of a sample."""
    line = {
        "prompt": sample.row["prompt"][-1]["content"],
        "ground_truth": sample.row["reward_model"]["ground_truth"],
        **sample.result,
        "advantage": sample.advantage,
        "response_length": len(sample.response_ids),
        "clipped": sample.response_ids[-1] not in eos_ids,
    }
    if sample.token_advantages:
        line["paragraph_advantages"] = paragraph_advantages(sample, decode)
    line["response"] = sample.text
    return line


def paragraph_advantages(sample, decode) -> list[float]:
    """That of each paragraph's first token."""
    from algorithm import count_tokens_before, paragraph_starts

    advantages = []
    for place in range(len(paragraph_starts(sample.text))):
        start = count_tokens_before(place, sample.text, sample.response_ids, decode)
        advantages.append(sample.token_advantages[start])
    return advantages


class Interrupts:
    """Ctrl-C, SIGTERM and SIGHUP: at once while nothing can be lost; within `held` when that is done."""

    def __init__(self):
        self.hold = False
        self.asked = False
        self.before = {}  # the handlers that were there
        with contextlib.suppress(ValueError):  # not in the main thread: Python allows no handlers there
            self.replace(signal.SIGINT)
            self.replace(signal.SIGTERM)
            if signal.getsignal(signal.SIGHUP) != signal.SIG_IGN:  # nohup
                self.replace(signal.SIGHUP)

    def replace(self, number: int) -> None:
        self.before[number] = signal.signal(number, self.handle)

    def handle(self, *_) -> None:
        waits = self.hold and not self.asked
        later = b""
        if waits:
            later = (
                b"finishing this step, then saving; "
                b"Ctrl-C again leaves at once, with the last checkpoint\n"
            )
        self.say(1, later)
        self.say(2, b"")
        if not waits:
            raise KeyboardInterrupt
        self.asked = True

    def say(self, stream: int, text: bytes) -> None:
        """Where the terminal is gone, this goes nowhere, and so does what is printed from here on."""
        try:
            os.write(stream, text)
        except OSError:
            os.dup2(os.open(os.devnull, os.O_WRONLY), stream)

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
