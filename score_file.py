"""Scores a file of responses with a reward function: rows of the schema plus `response` in, with rewards out.

    python score_file.py --data responses.jsonl --out scored.jsonl --reward-fn compute_score.py:compute_score

Each result goes to OUT.partial.jsonl at once: a run that was killed, or stopped by --max-no-verdict-rate,
goes on with --resume and keeps what has a score. Left out: files larger than memory. Needs prepare_data.py,
compute_score.py, reward_loop.py, reward_worker.py and metrics.py; for the length penalty algorithm.py.
"""

import ast
import collections
import contextlib
import dataclasses
import functools
import hashlib
import json
import sys
import time
from pathlib import Path

import pyarrow
import pyarrow.parquet as pq
import tyro

from metrics import averages, needed_verdict
from prepare_data import read_rows
from reward_loop import HERE, STATUSES, RewardOptions, by_group, start_rewards, with_equal_keys

# What --resume may not change, beside the data and the function's files. (The judge may have moved.)
CHANGE_A_SCORE = (
    "reward_fn",
    "reward_kwargs",
    "genrm",
    "reward_model_task",
    "reward_model_tokenizer",
    "max_response_length",
    "overlong_buffer",
    "overlong_factor",
)
COLUMNS = {
    "reward_score": pyarrow.float64(),  # also where all are None
    "status": pyarrow.string(),
    "reward_extra_info": pyarrow.string(),
}


@dataclasses.dataclass
class Config(RewardOptions):
    """Scores a file of responses (rows of the schema plus `response`) with a reward function."""
    data: Path  # Parquet or JSONL file: rows with data_source, reward_model, extra_info and response.
    out: Path  # Parquet or JSONL file to write: adds reward_score, status, reward_extra_info (JSON text).
    max_response_length: int | None = None  # In tokens: overlong shaping is on, rows need response_length.
    overlong_buffer: int = 4096  # Tokens before --max-response-length over which the overlong penalty grows.
    overlong_factor: float = 1.0  # The overlong penalty at --max-response-length.
    resume: bool = False  # Go on with an interrupted run: what has a score is kept, the rest is scored.


def files_of(function_file: Path) -> list[Path]:
    """The function's file and those beside it, or here, that it imports, that these import, and so on."""
    files = [function_file]
    for file in files:  # which grows meanwhile
        for node in ast.walk(ast.parse(file.read_bytes())):
            modules = []
            if isinstance(node, (ast.Import, ast.ImportFrom)):
                package = getattr(node, "module", None) or ""
                modules = [package]
                for alias in node.names:  # a module, or a name in the module `package`
                    modules.append(f"{package}.{alias.name}".lstrip("."))
            for module in modules:
                for folder in (file.parent, function_file.parent, HERE):
                    place = folder / module.replace(".", "/")
                    for found in (place.with_suffix(".py"), place / "__init__.py"):
                        if found.is_file() and found not in files:
                            files.append(found)
    return files


def scored_before(partial: Path, header: str, resume: bool) -> dict[int, dict]:
    """{row: result} of an interrupted run, from the file `partial`, whose first line says of what."""
    if not partial.exists():
        return {}
    if not resume:
        raise ValueError(f"{partial} is left from an interrupted run: go on with --resume, or delete it")
    first, *lines = partial.read_text(encoding="utf-8").split("\n")
    if first != header:
        raise ValueError(f"{partial} belongs to another run, other data or another version of the reward "
                         "function: delete it")  # fmt: skip
    done = {}
    for line in lines:
        with contextlib.suppress(ValueError):  # one may have been cut off
            row, result = json.loads(line)
            done[row] = result
    return {row: result for row, result in done.items() if result["reward_score"] is not None}


def score_the_rest(options, samples, done, partial: Path, header, overlong=None, on_result=lambda _: None):
    """Scores the samples that `done` lacks -> seconds. Each result goes there, to `partial` and on_result."""
    left = [key for key in samples if key not in done]
    with contextlib.ExitStack() as stack:
        manager = start_rewards(options, stack, overlong=overlong)
        partial.parent.mkdir(parents=True, exist_ok=True)
        file = stack.enter_context(partial.open("a", encoding="utf-8", buffering=1))  # each line at once
        file.write("\n" if file.tell() else header + "\n")  # the last line may have been cut off

        def note(position, result):
            key = left[position]
            done[key] = result
            file.write(json.dumps([key, result]) + "\n")
            on_result(result)

        started = time.monotonic()
        manager.score_batch([samples[key] for key in left], note)
        return time.monotonic() - started


def as_table(rows: list[dict]):
    """The rows, which may lack columns, as a table that parquet can hold. Raises ValueError."""
    columns = {}
    for row in rows:
        columns |= dict.fromkeys(row)
    for name in columns:
        columns[name] = [row.get(name) for row in rows]
    try:
        table = pyarrow.table(columns)
        pq.write_table(table.slice(0, 0), pyarrow.BufferOutputStream())  # holds fewer types
    except (pyarrow.ArrowException, UnicodeError) as error:
        raise ValueError(f"data: its rows do not fit into a parquet file ({error}); write .jsonl") from None
    return table


def write_rows(rows: list[dict], table, results: list[dict], out: Path):
    """Writes rows with results; `out` appears when it is complete. table: the rows, for parquet."""
    added = []
    for result in results:
        info = json.dumps(result["reward_extra_info"])
        values = (result["reward_score"], result["status"], info)
        added.append(dict(zip(COLUMNS, values)))
    temporary = out.with_name(out.name + ".tmp")
    if table is None:
        with temporary.open("w", encoding="utf-8") as file:
            for row, columns in zip(rows, added):
                file.write(json.dumps(row | columns, default=str) + "\n")
    else:
        new = pyarrow.Table.from_pylist(added, pyarrow.schema(COLUMNS))
        columns = dict(zip(table.column_names, table.columns)) | dict(zip(COLUMNS, new.columns))
        pq.write_table(pyarrow.table(columns), temporary)
    temporary.replace(out)


def summary(results: list[dict], seconds: float, scored_now: int) -> str:
    """What the run prints at its end."""
    took, infos, statuses, judge = [], [], collections.Counter(), collections.Counter()
    for result in results:
        info = result["reward_extra_info"]
        infos.append({"mean reward": result["reward_score"]} | info)
        took.append(result["seconds"])
        statuses[result["status"]] += 1
        judge[info.get("genrm_status")] += 1
    lines = [
        f"scored {scored_now:,} samples in {seconds:.1f} s ({scored_now / seconds:,.0f} samples/s)",
        f"seconds in the function: {sum(took) / len(took):.2g} on average, {max(took):.2g} at most",
        "statuses: " + ", ".join(f"{status} {statuses[status]:,}" for status in STATUSES),
    ]
    for name, value in averages(infos).items():
        if value is not None:
            lines.append(f"{name}: {value:.4f}")
    for status, count in judge.most_common():
        if status:
            lines.append(f"judge: {status} {count:,}")
    return "\n".join(lines)


def run(config: Config):
    """The command line's work. ValueError, OSError for what the user gave, RuntimeError if it must stop."""
    partial = config.out.with_name(config.out.name + ".partial.jsonl")  # the results while the run goes on
    if config.resume and config.out.exists() and not partial.exists():
        print(f"{config.out} is complete: nothing to do (without --resume all is scored again)")
        return
    job = config.check_rewards()
    needed = ["data_source", "reward_model", "response"]
    needed += [name for name, is_needed in job.columns.items() if is_needed]
    overlong = None
    if config.max_response_length is not None:
        from algorithm import overlong_penalty  # with torch: only where it is needed
        needed.append("response_length")
        overlong = functools.partial(
            overlong_penalty,
            max_length=config.max_response_length,
            buffer=config.overlong_buffer,
            factor=config.overlong_factor,
        )
    rows = read_rows(config.data, needed)
    if overlong:
        overlong(0)  # refuses a buffer that does not fit
    if config.out.suffix not in (".parquet", ".jsonl"):
        raise ValueError(f"out is {config.out}: the name must end with .parquet or .jsonl")
    table = None
    if config.out.suffix == ".parquet":  # a parquet file has types that its values do not show
        table = pq.read_table(config.data) if config.data.suffix == ".parquet" else as_table(rows)

    header = [getattr(config, name) for name in CHANGE_A_SCORE]
    for file in (config.data, *files_of(Path(job.function.rpartition(":")[0]))):
        header.append(hashlib.sha256(file.read_bytes()).hexdigest())
    header = json.dumps(header)
    done = scored_before(partial, header, config.resume)
    if job.sees_group:
        for group in by_group(rows):
            if not done.keys() >= set(group):  # it is scored again as a whole
                for row in group:
                    done.pop(row, None)
    left = len(rows) - len(done)
    if done:
        print(f"resuming: {len(done):,} of {len(rows):,} samples have a score already")
    counts = collections.Counter(needed=sum(map(needed_verdict, done.values())))

    def on_result(result):
        counts.update(done=1, needed=needed_verdict(result), failed=result["reward_score"] is None)
        # Failures tend to come first (a refused connection is quicker than a critique): wait for a share.
        share = min(len(rows), 1000) if counts["done"] < left else 0
        if counts["failed"] > config.max_no_verdict_rate * max(counts["needed"], share):
            info = result["reward_extra_info"]
            why = info.get("error") or info.get("genrm_error") or info.get("genrm_status") or result["status"]
            text = f"{counts['failed']:,} samples have no score, the last: {why}; mend it, then --resume"
            raise RuntimeError(f"more than --max-no-verdict-rate {config.max_no_verdict_rate} allows: {text}")

    seconds = score_the_rest(config, dict(enumerate(rows)), done, partial, header, overlong, on_result)
    results = with_equal_keys([done[row] for row in range(len(rows))])
    write_rows(rows, table, results, config.out)
    partial.unlink()
    print(summary(results, seconds, left) + f"\nwritten to {config.out}")


def main() -> int:
    """Parses the command line and runs -> exit code: 2 for a wrong argument, 1 for a run that had to stop."""
    config = tyro.cli(Config)
    try:
        run(config)
    except (ValueError, OSError, RuntimeError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1 if isinstance(error, RuntimeError) else 2
    except KeyboardInterrupt:
        print(f"interrupted; go on with --resume (so far: {config.out}.partial.jsonl)", file=sys.stderr)
        return 130
    return 0


if __name__ == "__main__":
    sys.exit(main())
