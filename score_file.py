"""Score a file of responses and write its rows with their rewards.

    python score_file.py --data responses.jsonl --out scored.jsonl --reward-fn compute_score.py:compute_score

The rows have the schema of prepare_data.py and a column `response`. Each result is written to
OUT.partial.jsonl immediately. If the run is killed, or stopped by --max-no-verdict-rate, --resume keeps the
results that have a score.

Needs prepare_data.py, compute_score.py, reward_loop.py, reward_worker.py, command_line.py and run_folder.py.
Not covered: files larger than memory (a row takes about 5 KB), length penalties.
"""

import collections
import contextlib
import dataclasses
import json
import time
from pathlib import Path

import pyarrow
import pyarrow.parquet as pq

from command_line import one_line_errors, parse_command_line
from prepare_data import ROWS_AT_ONCE, checked_row, errors_at, read_rows, read_table
from reward_loop import STATUSES, RewardOptions, by_group, changes_between, row_checker, start_rewards
from reward_worker import check_files, sha256
from run_folder import averages, lock_file, no_verdict_rate, read_lines

COLUMNS = {
    "reward_score": pyarrow.float64(),  # Without a type, a column with only None would get the type null.
    "status": pyarrow.string(),
    "reward_extra_info": pyarrow.string(),
}


@dataclasses.dataclass
class Config(RewardOptions):
    """Score a file of responses with a reward function."""

    # Parquet or JSONL file with the columns data_source, reward_model, response and, as a rule, extra_info.
    data: Path
    # Output file: .jsonl, or .parquet if --data is also a .parquet file. Additional columns: reward_score,
    # status and reward_extra_info (JSON).
    out: Path
    # Resume an interrupted run: keep the results that have a score, and score the rest. A group whose samples
    # are scored together is kept only if all of them have a score. A finished --out is not changed.
    resume: bool = False


def scored_before(partial: Path, header: dict, resume: bool) -> dict[int, dict]:
    """Read the results of an interrupted run from the file `partial`, and return {row: result}.

    Each start of a run adds its header to the file. Raises ValueError if the file belongs to another run.
    """
    done = {}
    entries, _ = read_lines(partial)  # Truncated lines are skipped: the last line of each start may be one.
    if entries and not resume:
        raise ValueError(f"{partial} is from an interrupted run; pass --resume or delete the file")
    for number, entry in enumerate(entries):
        if number == 0 or isinstance(entry, dict):
            changed = changes_between(entry, header)
            if changed:
                raise ValueError(
                    f"{partial} belongs to a run with different data, a different judge or a "
                    f"different reward function (not the same: {', '.join(changed)}); delete "
                    "the file"
                )
        else:
            row, result = entry
            done[row] = result
    return {row: result for row, result in done.items() if result["reward_score"] is not None}


def score_samples(
    options, samples: dict, partial: Path, header, resume, groups=(), on_result=lambda done: None
):
    """Score the samples that have no score in the file `partial`, and write each result there immediately.

    Args:
        options: The RewardOptions.
        samples: {key: sample}. Results are kept by key.
        header: What the results depend on (see `scored_before`).
        groups: Lists of keys whose samples are scored together.
        on_result: This function is called with all results so far after each new result.

    Returns:
        {key: result}, the number of samples that were scored now, and the seconds this took.
    """
    with contextlib.ExitStack() as stack:
        try:  # before a judge starts, which takes minutes
            partial.parent.mkdir(parents=True, exist_ok=True)
            file = stack.enter_context(partial.open("a", encoding="utf-8", buffering=1))  # line by line
        except OSError as error:
            why = f"--out: cannot write to {partial.parent} ({error.strerror}); pass another folder"
            raise OSError(why) from error
        with contextlib.suppress(OSError):  # The file system may have no locks.
            lock_file(file, f"--out: {partial}", "file")
        done = scored_before(partial, header, resume)
        for group in groups:
            if not done.keys() >= set(group):
                for key in group:
                    done.pop(key, None)
        if done:
            print(f"resuming: {len(done):,} of {len(samples):,} samples already have a score")
        left = [key for key in samples if key not in done]
        files = options.make_job().files
        manager = start_rewards(options, stack)
        check_files(files)  # The header describes these versions.
        file.write("\n" if file.tell() else "")  # The last line may be truncated.
        file.write(json.dumps(header) + "\n")

        def note(position, result):
            key = left[position]
            done[key] = result
            file.write(json.dumps([key, result]) + "\n")
            on_result(done)

        started = time.monotonic()
        manager.score_batch([samples[key] for key in left], note)
        return done, len(left), time.monotonic() - started


def write_rows(rows: list[dict], results: list[dict], data: Path, out: Path):
    """Write the rows of `data` with their results to `out`, completely or not at all."""
    added = []
    for result in results:
        info = json.dumps(result["reward_extra_info"])
        values = (result["reward_score"], result["status"], info)
        added.append(dict(zip(COLUMNS, values)))
    temporary = out.with_name(out.name + ".tmp")
    if out.suffix == ".jsonl":
        with temporary.open("w", encoding="utf-8") as file:
            for row, columns in zip(rows, added):
                text = json.dumps(row | columns, default=str)
                valid = json.loads(text, parse_constant=lambda name: None)  # NaN, as in empty cells
                file.write(json.dumps(valid) + "\n")
    else:
        table = read_table(data).drop_columns([name for name in COLUMNS if name in rows[0]])
        new = pyarrow.Table.from_pylist(added, pyarrow.schema(COLUMNS))
        for name in COLUMNS:
            table = table.append_column(name, new[name])
        pq.write_table(table, temporary, row_group_size=ROWS_AT_ONCE)
    temporary.replace(out)


def summary(results: list[dict]) -> str:
    """Return the summary of a run: counts of statuses, means, and counts of the judge's statuses."""
    infos = [{"mean reward": result["reward_score"]} | result["reward_extra_info"] for result in results]
    statuses = collections.Counter(result["status"] for result in results)
    judge = collections.Counter(info.get("genrm_status") for info in infos)
    lines = ["statuses: " + ", ".join(f"{status} {statuses[status]:,}" for status in STATUSES)]
    for name, value in averages(infos).items():
        lines.append(f"{name}: {value:.4f}")
    for status, count in judge.most_common():
        if status:
            lines.append(f"judge: {status} {count:,}")
    return "\n".join(lines)


def read_samples(config: Config, job) -> tuple[list[dict], list[dict]]:
    """Return the rows of --data, and the samples to score, whose prompts are converted as in training.

    Raises ValueError if the rows or the name of --out do not fit.
    """
    needed = ["data_source", "reward_model", "response"]
    needed += [name for name, is_needed in job.columns.items() if is_needed]
    if job.sees_group:
        needed.append("prompt")
    rows = read_rows(config.data, needed)
    is_table = config.data.suffix.lower() == ".parquet"
    if config.out.suffix != ".jsonl" and not (config.out.suffix == ".parquet" and is_table):
        raise ValueError(f"--out {config.out}: must end in .jsonl, or in .parquet if --data does")
    if config.out.resolve() == config.data.resolve():
        raise ValueError(f"--out {config.out}: is the same file as --data; pass another name")
    if config.out.is_dir():
        raise ValueError(f"--out {config.out}: must not be a directory")
    check_row = row_checker(job)
    samples = []
    for number, row in enumerate(rows):
        with errors_at(f"--data {config.data}, row {number}"):
            check_row(row)
            gets_prompt = "prompt" in job.columns and "prompt" in row
            samples.append(checked_row(row, is_table) if gets_prompt else row)
        theirs = COLUMNS.keys() & row.keys()
        if theirs and len(theirs) < len(COLUMNS):  # A row with all three columns has been scored before.
            raise ValueError(
                f"--data {config.data}: the result would overwrite the column {min(theirs)!r}; "
                "rename the column"
            )
    return rows, samples


def run(config: Config):
    """Score the file. Raise ValueError or OSError for invalid input, RuntimeError for too few scores."""
    partial = config.out.with_name(config.out.name + ".partial.jsonl")  # results so far
    job = config.make_job()
    rows, samples = read_samples(config, job)
    if config.resume and config.out.exists() and not partial.exists():
        scored = read_rows(config.out, ["response", "reward_score"])
        if [row["response"] for row in scored] != [row["response"] for row in rows]:
            raise ValueError(f"--resume: {config.out} has scores of other responses; run without --resume")
        missing = sum(row["reward_score"] is None for row in scored)
        state = "already has a score for each response, perhaps of another function or judge"
        if missing:  # A run may finish without some scores, as many as --max-no-verdict-rate allows.
            state = f"is finished, but {missing:,} of its {len(rows):,} responses got no score"
        print(f"{config.out} {state}; to score all responses again, run without --resume")
        return
    header = {  # A run can be resumed only if these values have not changed. The judge's address may change.
        "genrm": list(config.genrm),
        "data": sha256(config.data.read_bytes()),
    } | config.scored_by(job)

    def check(done, at_least):
        rate = no_verdict_rate(done.values(), at_least)
        if rate > config.max_no_verdict_rate:
            failed = [result for result in done.values() if result["reward_score"] is None]
            text = f"{len(failed):,} samples have no score, which is more than --max-no-verdict-rate allows"
            last = failed[-1]["reward_extra_info"]
            raise RuntimeError(
                f"{text}; fix the cause and pass --resume, or, if the function or its settings change, "
                f"delete {partial} (last failure: {last})"
            )

    def on_result(done):
        if len(done) % (100 + len(rows) // 100) == 0:  # A check reads all results, so checks must be rare.
            # Failures tend to arrive first, because a refused connection is faster than a critique.
            check(done, 1000)

    groups = ()
    if job.sees_group:
        groups = by_group(rows)
    samples = dict(enumerate(samples))
    done, count, seconds = score_samples(config, samples, partial, header, config.resume, groups, on_result)
    check(done, 1)
    results = [done[row] for row in samples]
    write_rows(rows, results, config.data, config.out)
    partial.unlink(missing_ok=True)  # Another run may have read the results and finished first.
    print(f"scored {count:,} samples in {seconds:.1f} s ({count / seconds:,.0f} samples/s)")
    print(summary(results) + f"\nwritten to {config.out}")


def main() -> None:
    config = parse_command_line(Config, description=__doc__)
    with one_line_errors("interrupted; pass --resume to continue\n"):
        run(config)


if __name__ == "__main__":
    main()
