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

from metrics import averages
from prepare_data import read_rows
from reward_loop import HERE, STATUSES, RewardOptions, by_group, needed_verdict, start_rewards, with_equal_keys

# What --resume may not change, beside the data and the function's files. (The judge may have moved.)
CHANGE_A_SCORE = ("reward_fn", "reward_kwargs", "genrm", "reward_model_task", "reward_model_tokenizer",
                  "max_response_length", "overlong_buffer", "overlong_factor")  # fmt: skip


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
        modules = set()
        for node in ast.walk(ast.parse(file.read_bytes())):
            if isinstance(node, ast.Import):
                modules |= {alias.name for alias in node.names}
            if isinstance(node, ast.ImportFrom):  # of a module, or modules of a package
                package = node.module or ""
                modules |= {package} | {f"{package}.{alias.name}".lstrip(".") for alias in node.names}
        for module in sorted(modules):
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
            done.update([json.loads(line)])
    return {row: result for row, result in done.items() if result["reward_score"] is not None}


def score_the_rest(options, samples, done, partial: Path, header, overlong=None, on_result=lambda _: None):
    """Scores the samples that `done` lacks -> seconds. Each result goes there, to `partial` and on_result."""
    left = [key for key in samples if key not in done]
    with contextlib.ExitStack() as stack:
        manager = start_rewards(options, stack, overlong=overlong)
        partial.parent.mkdir(parents=True, exist_ok=True)
        file = stack.enter_context(partial.open("a", encoding="utf-8", buffering=1))  # each line at once
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
        pq.write_table(table.slice(0, 0), pyarrow.BufferOutputStream())  # holds fewer types
    except (pyarrow.ArrowException, UnicodeError) as error:
        raise ValueError(f"data: its rows do not fit into a parquet file ({error}); write .jsonl") from None
    return table


def write_rows(rows: list[dict], table, results: list[dict], out: Path) -> None:
    """Writes rows with results; `out` appears when it is complete. table: the rows, for parquet."""
    added = {name: [result[name] for result in results] for name in ("reward_score", "status")}
    added["reward_extra_info"] = [json.dumps(result["reward_extra_info"]) for result in results]
    temporary = out.with_name(out.name + ".tmp")
    if table is None:
        lines = (row | dict(zip(added, values)) for row, *values in zip(rows, *added.values()))
        temporary.write_text("".join(json.dumps(line, default=str) + "\n" for line in lines), "utf-8")
    else:
        added["reward_score"] = pyarrow.array(added["reward_score"], pyarrow.float64())  # also without any
        columns = dict(zip(table.column_names, table.columns)) | added
        pq.write_table(pyarrow.table(columns), temporary)
    temporary.replace(out)


def summary(results: list[dict], seconds: float, scored_now: int) -> str:
    """What the run prints at its end."""
    extras = [result["reward_extra_info"] for result in results]
    took = [result["seconds"] for result in results]
    statuses = collections.Counter(result["status"] for result in results)
    judge = collections.Counter(extra["genrm_status"] for extra in extras if extra.get("genrm_status"))
    means = averages([{"mean reward": result["reward_score"]} for result in results]) | averages(extras)
    return "\n".join([
        f"scored {scored_now:,} samples in {seconds:.1f} s ({scored_now / seconds:,.0f} samples/s)",
        f"seconds in the function: {sum(took) / len(took):.2g} on average, {max(took):.2g} at most",
        "statuses: " + ", ".join(f"{status} {statuses[status]:,}" for status in STATUSES),
        *(f"{name}: {value:.4f}" for name, value in means.items() if value is not None),
        *(f"judge: {status} {count:,}" for status, count in judge.most_common())])


def run(config: Config) -> None:
    """The command line's work. ValueError, OSError for what the user gave, RuntimeError if it must stop."""
    partial = config.out.with_name(config.out.name + ".partial.jsonl")  # the results while the run goes on
    if config.resume and config.out.exists() and not partial.exists():
        print(f"{config.out} is complete: nothing to do (without --resume all is scored again)")
        return
    job, table, overlong = config.check_rewards(), None, None
    needed = ["data_source", "reward_model", "response", *(key for key, must in job.columns.items() if must)]
    needed += ["response_length"] * (config.max_response_length is not None)
    rows = read_rows(config.data, needed)
    if config.max_response_length is not None:
        from algorithm import overlong_penalty  # with torch: only where it is needed
        overlong = functools.partial(overlong_penalty, max_length=config.max_response_length,
                                     buffer=config.overlong_buffer, factor=config.overlong_factor)
        overlong(0)  # refuses a buffer that does not fit
    if config.out.suffix not in (".parquet", ".jsonl"):
        raise ValueError(f"out is {config.out}: the name must end with .parquet or .jsonl")
    if config.out.suffix == ".parquet":  # a parquet file has types that its values do not show
        table = pq.read_table(config.data) if config.data.suffix == ".parquet" else as_table(rows)
    files = [config.data, *files_of(Path(job.function.rpartition(":")[0]))]
    settings = {name: getattr(config, name) for name in CHANGE_A_SCORE}
    header = json.dumps([hashlib.sha256(file.read_bytes()).hexdigest() for file in files] + [settings])
    done = scored_before(partial, header, config.resume)
    for group in by_group(rows) if job.sees_group else []:
        if not done.keys() >= set(group):  # it is scored again as a whole
            for row in group:
                done.pop(row, None)
    left, counts = len(rows) - len(done), collections.Counter(needed=sum(map(needed_verdict, done.values())))
    if done:
        print(f"resuming: {len(done):,} of {len(rows):,} samples have a score already")

    def on_result(result: dict) -> None:
        counts.update(done=1, needed=needed_verdict(result), failed=result["reward_score"] is None)
        # Failures tend to come first (a refused connection is quicker than a critique): wait for a share.
        share = min(len(rows), 1000) if counts["done"] < left else 0
        if counts["failed"] > config.max_no_verdict_rate * max(counts["needed"], share):
            extra = {"genrm_status": result["status"]} | result["reward_extra_info"]
            why = extra.get("error") or extra.get("genrm_error") or extra["genrm_status"]
            text = f"{counts['failed']:,} samples have no score, the last: {why}; mend it, then --resume"
            raise RuntimeError(f"more than --max-no-verdict-rate {config.max_no_verdict_rate} allows: {text}")

    seconds = score_the_rest(config, dict(enumerate(rows)), done, partial, header, overlong, on_result)
    results = with_equal_keys([done[index] for index in range(len(rows))])
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
