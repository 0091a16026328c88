"""Scores a file of responses with a reward function: rows of the schema plus `response` in, the same rows with rewards out.

    python score_file.py --data responses.parquet --out scored.parquet \\
        --reward-fn compute_score.py:compute_score_fapo --router-address 127.0.0.1:30000 --num-workers 2

Parquet or JSONL, both ways. A line per result goes to OUT.partial.jsonl at once: a run that was stopped, killed, or stopped by
--max-no-verdict-rate goes on with --resume, which keeps what has a score and scores the rest.

What it leaves out: files that do not fit into memory.
"""

import collections
import contextlib
import dataclasses
import hashlib
import json
import sys
import time
from pathlib import Path

import pyarrow
import pyarrow.parquet
import tyro

from prepare_data import read_rows
from reward_loop import STATUSES, Overlong, RewardOptions, needed_verdict, no_verdict_rate, start_rewards
from reward_loop import with_equal_keys


@dataclasses.dataclass
class Config(RewardOptions):
    """Scores a file of responses (rows of the schema plus `response`) with a reward function."""

    data: Path
    """Parquet or JSONL file to score; its rows have data_source, reward_model, extra_info and response."""
    out: Path
    """Parquet or JSONL file to write: the input's columns plus reward_score, status and reward_extra_info (JSON text)."""
    max_response_length: int | None = None
    """Longest response in tokens; given, overlong shaping is on and rows need a column response_length."""
    overlong_buffer: int = 4096
    """Tokens before --max-response-length over which the overlong penalty grows."""
    overlong_factor: float = 1.0
    """The overlong penalty at --max-response-length."""
    resume: bool = False
    """Go on with an interrupted run: what has a score is kept, the rest is scored."""


# What --resume may not change, beside the data. (The judge may have moved to another address.)
CHANGE_A_SCORE = ("reward_fn", "reward_kwargs", "genrm", "reward_model_task", "reward_model_tokenizer", "max_response_length",
                  "overlong_buffer", "overlong_factor")  # fmt: skip


def scored_before(partial: Path, header: str, resume: bool) -> dict[int, dict]:
    """{row: result} of an interrupted run, from the file `partial`, whose first line says what was being scored."""
    if not partial.exists():
        return {}
    if not resume:
        raise ValueError(f"{partial} is left from an interrupted run: add --resume to go on with it, or delete it")
    first, *lines = partial.read_text(encoding="utf-8").split("\n")
    if first != header:
        raise ValueError(f"{partial} belongs to another run or other data ({first:.300}): delete it or use the same arguments")
    done = {}
    for line in lines:
        with contextlib.suppress(ValueError):  # one may have been cut off
            row, result = json.loads(line)
            if result["reward_score"] is not None:
                done[row] = result
    return done


def score_the_rest(options: RewardOptions, samples: dict, done: dict, partial: Path, header: str,
                   overlong: Overlong | None = None, on_result=lambda result: None) -> float:  # fmt: skip
    """Scores the samples whose keys are not in `done` -> seconds.

    Each result goes there, into `partial`, and to on_result, as it comes; what that raises ends the run.
    """
    left = [key for key in samples if key not in done]
    with contextlib.ExitStack() as stack:
        manager = start_rewards(options, stack, overlong=overlong)
        partial.parent.mkdir(parents=True, exist_ok=True)
        file = stack.enter_context(partial.open("a", encoding="utf-8", buffering=1))  # each line at once, the first one too
        file.write("\n" if file.tell() else header + "\n")  # the last line may have been cut off

        def note(position: int, result: dict) -> None:
            done[left[position]] = result
            file.write(json.dumps([left[position], result]) + "\n")
            on_result(result)

        started = time.monotonic()
        manager.score_batch([samples[key] for key in left], note)
        return time.monotonic() - started


def as_table(rows: list[dict]):
    """The rows, which may lack columns, as a table that parquet can hold. Raises ValueError."""
    names = dict.fromkeys(name for row in rows for name in row)
    try:
        table = pyarrow.table({name: [row.get(name) for row in rows] for name in names})
        pyarrow.parquet.write_table(table.slice(0, 0), pyarrow.BufferOutputStream())  # has fewer types than a table
    except (pyarrow.ArrowException, UnicodeError) as error:
        raise ValueError(f"data: its rows do not fit into a parquet file ({error}); change them, or write .jsonl") from None
    return table


def write_rows(rows: list[dict], table, results: list[dict], out: Path) -> None:
    """Writes the input's columns plus the results, to a temporary file that then takes the name `out`. table: for parquet."""
    added = {name: [result[name] for result in results] for name in ("reward_score", "status", "reward_extra_info")}
    added["reward_extra_info"] = list(map(json.dumps, added["reward_extra_info"]))
    temporary = out.with_name(out.name + ".tmp")
    if table is None:
        with temporary.open("w", encoding="utf-8") as file:
            for row, *values in zip(rows, *added.values()):
                file.write(json.dumps(row | dict(zip(added, values)), default=str) + "\n")
    else:
        added["reward_score"] = pyarrow.array(added["reward_score"], pyarrow.float64())  # also where there is none
        pyarrow.parquet.write_table(pyarrow.table(dict(zip(table.column_names, table.columns)) | added), temporary)
    temporary.replace(out)


def summary(results: list[dict], seconds: float, scored_now: int) -> str:
    """What the run prints at its end."""

    def share(values: list) -> str:
        return f"{sum(map(bool, values)) / len(values):.4f} of {len(values):,}"

    extras = [result["reward_extra_info"] for result in results]
    scores = [result["reward_score"] for result in results if result["reward_score"] is not None]
    accurate = [extra["acc"] for extra in extras if extra.get("acc") is not None]
    flawed = [extra["flawed_positive"] for extra in extras if extra.get("acc") and extra.get("flawed_positive") is not None]
    statuses = collections.Counter(result["status"] for result in results)
    judge = collections.Counter(extra["genrm_status"] for extra in extras if extra.get("genrm_status"))
    took = [result["seconds"] for result in results]
    lines = [
        f"scored {scored_now:,} samples in {seconds:.1f} s ({scored_now / max(seconds, 1e-9):,.0f} samples/s)",
        f"seconds in the function: {sum(took) / len(took):.2g} on average, {max(took):.2g} at most",
        "statuses: " + ", ".join(f"{status} {statuses[status]:,}" for status in STATUSES),
        f"mean reward: {sum(scores) / len(scores):.4f}" if scores else "mean reward: none, no sample has a score",
    ]
    if accurate:
        lines.append(f"accuracy: {share(accurate)}")
    if flawed:
        lines.append(f"flawed positives: {share(flawed)} right answers with a verdict")
    if judge:
        lines.append("judge: " + ", ".join(f"{status} {count:,}" for status, count in judge.most_common()))
    return "\n".join(lines)


def run(config: Config) -> None:
    """The command line's work. Raises ValueError and OSError for what the user gave, RuntimeError when the run has to stop."""
    needed = ["data_source", "reward_model", "response"] + ["response_length"] * (config.max_response_length is not None)
    needed += ["prompt"] * (config.reward_model_task[0] == "classify" and config.reward_fn is None)
    rows = read_rows(config.data, needed)
    if config.out.suffix not in (".parquet", ".jsonl"):
        raise ValueError(f"out is {config.out}: the name must end with .parquet or .jsonl")
    table = overlong = None
    if config.out.suffix == ".parquet":  # a parquet file has types that its values do not show
        table = pyarrow.parquet.read_table(config.data) if config.data.suffix == ".parquet" else as_table(rows)
    if config.max_response_length is not None:
        overlong = Overlong(config.max_response_length, config.overlong_buffer, config.overlong_factor)
    settings = {name: getattr(config, name) for name in CHANGE_A_SCORE}
    header = json.dumps({"data (sha256)": hashlib.sha256(config.data.read_bytes()).hexdigest()} | settings)
    partial = config.out.with_name(config.out.name + ".partial.jsonl")  # the results while the run goes on
    done = scored_before(partial, header, config.resume)
    left, counts = len(rows) - len(done), collections.Counter(needed=sum(map(needed_verdict, done.values())))
    if done:
        print(f"resuming: {len(done):,} of {len(rows):,} samples have a score already")

    def stop(result: dict) -> None:
        extra = result["reward_extra_info"]
        why = extra.get("error") or extra.get("genrm_error") or extra.get("genrm_status") or result["status"]
        text = f"{counts['failed']:,} samples have no score, more of those that needed one than --max-no-verdict-rate "
        raise RuntimeError(f"{text}{config.max_no_verdict_rate} allows; the last: {why}; mend it and go on with --resume")

    def on_result(result: dict) -> None:
        counts.update(needed=needed_verdict(result), failed=result["reward_score"] is None)
        # Failures tend to come first (a refused connection is quicker than a critique): wait for a fair share.
        if counts["failed"] > config.max_no_verdict_rate * max(counts["needed"], min(len(rows), 1000)):
            stop(result)

    seconds = score_the_rest(config, dict(enumerate(rows)), done, partial, header, overlong, on_result)
    results = with_equal_keys([done[index] for index in range(len(rows))])
    if no_verdict_rate(results) > config.max_no_verdict_rate:
        stop(next(result for result in reversed(results) if result["reward_score"] is None))
    write_rows(rows, table, results, config.out)
    partial.unlink()
    print(summary(results, seconds, left))
    print(f"written to {config.out}")


def main() -> int:
    """Parses the command line and runs -> exit code: 0, 2 for a wrong argument or file, 1 for a run that had to stop."""
    config = tyro.cli(Config)
    try:
        run(config)
    except (ValueError, OSError, RuntimeError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1 if isinstance(error, RuntimeError) else 2
    except KeyboardInterrupt:
        print(f"interrupted; go on with --resume (results so far: {config.out}.partial.jsonl)", file=sys.stderr)
        return 130
    return 0


if __name__ == "__main__":
    sys.exit(main())
