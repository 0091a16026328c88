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
    if config.resume == "never" and (old := checkpoints_in(out_dir / "checkpoints")):
        raise ValueError(f"out_dir: {out_dir} holds a run ({old[-1].name}); give another or --resume auto")
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
    needed = checkpoint * max(1, config.keep_checkpoints + 1 - kept)  # the newest is written before one goes
    if (free := 1e-9 * shutil.disk_usage(config.out_dir).free) < needed:
        where = f"out_dir: {free:.1f} GB are free in {config.out_dir}"
        raise ValueError(f"{where}, checkpoints need {needed:.1f}; make room")


def write_config(config, resumed: bool) -> None:
    """Writes config.json; of a run that goes on, prints which settings have changed."""
    path, settings = Path(config.out_dir, "config.json"), json.dumps(asdict(config), indent=2)
    before = json.loads(path.read_text() if resumed else settings)
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
    folder, name = Path(config.out_dir, "checkpoints"), f"step_{state['step']}"
    target, temporary = folder / name, folder / f".{name}.tmp"
    try:
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
        last = next((path.name for path in checkpoints_in(folder)[::-1]), "the start")
        why = f"{target}: could not be written ({error}); --resume auto goes on from {last}"
        raise RuntimeError(why) from error
    for old in checkpoints_in(folder)[: -config.keep_checkpoints] if config.keep_checkpoints else []:
        try:
            shutil.rmtree(old)
        except OSError as error:  # a file that is open elsewhere, on NFS; the next checkpoint tries again
            print(f"warning: {old} could not be deleted ({error}); delete it by hand")
    return target


def checkpoints_in(folder: Path) -> list[Path]:
    """The whole checkpoints of a run, oldest first; a copy by another name, such as step_20_best, is none."""
    paths = {path.parent.name[5:]: path.parent for path in folder.glob("step_*/trainer_state.json")}
    return [paths[step] for step in sorted(filter(str.isdecimal, paths), key=int)]


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


def paragraph_advantages(sample, decode) -> dict:
    """That of each paragraph's first token, where the tokens of a sample have different ones."""
    if not sample.token_advantages:
        return {}
    from algorithm import count_tokens_before, paragraph_starts
    advantages = []
    for place in range(len(paragraph_starts(sample.text))):
        start = count_tokens_before(place, sample.text, sample.response_ids, decode)
        advantages.append(sample.token_advantages[start])
    return {"paragraph_advantages": advantages}


class Log:
    """metrics.jsonl (one line a step), samples.jsonl and curves.png; TensorBoard and W&B where asked for.
    Lines of steps after `first_step` are dropped: they will be done again."""

    def __init__(self, config, first_step: int):
        self.config, self.folder = config, Path(config.out_dir)
        self.rewind(first_step or -1)
        self.trackers = []
        if config.tensorboard:
            self.trackers.append(metrics.tensorboard(config, first_step))
        if config.wandb:
            self.trackers.append(metrics.wandb(config, first_step))

    def rewind(self, step: int) -> None:
        """Drops lines of later steps, and samples of an evaluation that ended before it wrote its metrics."""
        path = self.folder / "metrics.jsonl"
        lines, _ = read_lines(path)
        self.history = [line for line in lines if line["step"] <= step]
        write_lines(path, self.history)
        evaluated = {line["step"] for line in self.history if has_evaluation(line)}
        path = self.folder / "samples.jsonl"
        lines, _ = read_lines(path)
        kept = [line for line in lines if line["split"] == "train" or line["step"] in evaluated]
        write_lines(path, [line for line in kept if line["step"] <= step])

    def metrics(self, values: dict) -> None:
        """Writes a step's line. What comes later for that step, such as its evaluation, is added to it."""
        values = {key: float(f"{x:.6g}") if isinstance(x, float) else x for key, x in values.items()}
        if self.history and self.history[-1]["step"] == values["step"]:
            self.history[-1] |= values
            write_lines(self.folder / "metrics.jsonl", self.history)
        else:
            self.history.append(values)
            with open(self.folder / "metrics.jsonl", "a") as file:
                file.write(json.dumps(values) + "\n")
        for send, _ in self.trackers:
            send(values)

    def samples(self, step: int, split: str, groups: list[list], eos_ids, decode=None) -> None:
        """Writes a step's first groups to samples.jsonl, about `samples_per_step` samples of a data source:
        whole groups of training; of an evaluation the first sample of each, three of them on the screen.
        decode: of token ids, for the advantages of paragraphs."""
        written, lines = Counter(), []
        for number, group in enumerate(groups):
            row, shown = group[0].row, group if split == "train" else group[:1]
            if written[row["data_source"]] >= self.config.samples_per_step:
                continue
            written[row["data_source"]] += len(shown)
            lines += [{"step": step, "split": split, "group": number, "data_source": row["data_source"],
                       "prompt": row["prompt"][-1]["content"],
                       "ground_truth": row["reward_model"]["ground_truth"], **sample.result,
                       "advantage": sample.advantage, "response_length": len(sample.response_ids),
                       "clipped": sample.response_ids[-1] not in eos_ids,
                       **paragraph_advantages(sample, decode),
                       "response": sample.text} for sample in shown]  # fmt: skip
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
        for _, end in self.trackers:
            end()


class Interrupts:
    """Ctrl-C, SIGTERM and SIGHUP: at once while nothing can be lost; within `held` when that is done."""

    def __init__(self):
        self.hold, self.asked, self.before = False, False, {}
        with contextlib.suppress(ValueError):  # not in the main thread: Python allows no handlers there
            for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
                if number != signal.SIGHUP or signal.getsignal(number) != signal.SIG_IGN:  # nohup
                    self.before[number] = signal.signal(number, self.handle)

    def handle(self, *_) -> None:
        waits = self.hold and not self.asked
        later = b"finishing this step, then saving; Ctrl-C again leaves at once, with the last checkpoint\n"
        for stream, text in ((1, later * waits), (2, b"")):
            try:
                os.write(stream, text)
            except OSError:  # the terminal is gone: what is printed from here on must not raise
                os.dup2(os.open(os.devnull, os.O_WRONLY), stream)
        if not waits:
            raise KeyboardInterrupt
        self.asked = True

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
