"""Measure a judge (GenRM) on ProcessBench and FlawedPositiveBench by majority vote (paper section 4.2).

    python prepare_data.py --tasks processbench --out-dir data
    python genrm_server.py --model dyyyyyyyy/FAPO-GenRM-4B --port 30000
    python -m tools.evaluate_genrm --data data/processbench_test.parquet --router-address 127.0.0.1:30000 \\
        --n 8 --temperature 0.6 --out critiques.parquet

This script requests n critiques of each judge row from prepare_data.py, and immediately writes each critique
to critiques.parquet.jsonl. To resume a run, repeat the command; the rows and the address may differ, and n
may be larger. The script prints two tables:

    ProcessBench         for each subset: error, the fraction of flawed solutions whose first wrong step is
                         found; correct, the fraction of sound solutions that are called sound; their harmonic
                         mean (F1); then the mean F1 over all subsets
    FlawedPositiveBench  for rows with a correct final answer: precision, recall and F1 of "flawed"

For FAPO-GenRM-4B, the paper reports an average F1 of 83.3 (ProcessBench), and precision 87.5, recall 91.4 and
F1 89.4 (FlawedPositiveBench). Unparsable and truncated critiques have no vote. A solution without votes is a
miss in error, correct and recall, but never counts as flawed (the original counts it as flawed). Failed
requests are excluded and reported (exit code 1), and the next run repeats them.
Not covered: judges that answer True or False, judges that reject temperature or top_p, scoring by
log-probabilities.
"""

import json
import math
import sys
from collections import Counter, defaultdict
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean, harmonic_mean, mode
from typing import Annotated

import pyarrow as pa
import pyarrow.parquet as pq
import tyro

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
import compute_score as scores
from command_line import IN_WORDS, cli, json_object, one_line_errors
from prepare_data import ROWS_AT_ONCE, checked_row, errors_at, read_rows, validate_row
from reward_loop import RewardOptions, check_address, listed_models, only_model, served_models
from reward_worker import fingerprints, flag, sha256
from score_file import score_samples


@dataclass
class Config:
    data: Path  # File of judge rows from prepare_data.py, such as data/processbench_test.parquet.
    router_address: str  # Address host:port of the judge (a router or an OpenAI-compatible server).
    # Output file for the rows with their critiques. OUT.jsonl receives each critique immediately.
    out: Path = Path("critiques.parquet")
    # Model name in requests. Default: the model that the server lists.
    model: Annotated[str | None, IN_WORDS] = None
    n: int = 8  # Number of critiques per row. The most frequent verdict is the prediction.
    temperature: float = 0.6  # Sampling temperature (paper table 1).
    top_p: float = 0.95  # Nucleus sampling (paper table 1).
    # Maximum length of a critique, in tokens. The prompt and the critique must fit into the server's context.
    max_tokens: int = scores.GENRM_MAX_TOKENS
    # Settings for the judge's chat template, as a JSON object such as '{"enable_thinking": false}'.
    chat_kwargs: str = "{}"
    concurrency: int = 256  # Maximum number of concurrent requests.
    timeout_s: float = 3600.0  # Time limit for one critique with all attempts and queueing, in seconds.
    # Number of rows to use, from the start of the file. Default: all rows.
    limit: Annotated[int | None, IN_WORDS] = None

    def check(self) -> None:
        """Raise ValueError if a setting is invalid."""
        for name in ("n", "limit", "max_tokens", "concurrency"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ValueError(f"{flag(name)} {value}: must be at least 1")
        check_address(self.router_address, "host:port")
        if self.out.suffix != ".parquet":
            raise ValueError(f"--out {self.out}: must end in .parquet")
        if self.out.is_dir():
            raise ValueError(f"--out {self.out}: must not be a directory")
        if not 0 < self.timeout_s < math.inf:
            raise ValueError(f"--timeout-s {self.timeout_s}: must be a finite number above 0")
        if not 0 <= self.temperature < math.inf:
            raise ValueError(f"--temperature {self.temperature}: must be a finite number of at least 0")
        if not 0 < self.top_p <= 1:
            raise ValueError(f"--top-p {self.top_p}: must be above 0 and at most 1")


ANSWERED = ("ok", "truncated")  # Any other status is a failed request, which the next run repeats.


def majority_vote(indices: list[int | None]) -> int | None:
    """Return the most frequent index (in a tie, the one that came first). None is not a vote."""
    votes = [index for index in indices if index is not None]
    if votes:
        return mode(votes)
    return None


def _mean(values: list[float]) -> float:
    if values:
        return fmean(values)
    return math.nan


def with_f1(first: list[bool], second: list[bool]) -> tuple[float, float, float]:
    """Return two fractions and their harmonic mean, which is NaN if a fraction is NaN."""
    shares = _mean(first), _mean(second)
    if any(map(math.isnan, shares)):
        return *shares, math.nan
    return *shares, harmonic_mean(shares)


def processbench_metrics(rows: list[dict]) -> dict[str, tuple]:
    """Return {subset: (number of rows, error, correct, F1)} (paper eq. 6), with NaN if there are no rows."""
    subsets = defaultdict(lambda: ([], []))  # for each flawed and each sound solution: whether it was found
    for row in rows:
        flawed, sound = subsets[row["subset"]]
        of_kind = sound if row["label"] == -1 else flawed
        of_kind.append(row["prediction"] == row["label"])
    metrics = {}
    for subset, (flawed, sound) in sorted(subsets.items()):
        metrics[subset] = len(flawed + sound), *with_f1(flawed, sound)
    return metrics


def flawed_positive_metrics(rows: list[dict]) -> tuple:
    """Return (number of rows, precision, recall, F1) of "flawed" for rows with a correct final answer."""
    count = 0
    precision = []  # for each solution that was called flawed: whether it is flawed
    recall = []  # for each flawed solution: whether it was called flawed
    for row in rows:
        if row["final_answer_correct"]:
            count += 1
            is_flawed = row["label"] != -1
            called_flawed = row["prediction"] not in (None, -1)
            if called_flawed:
                precision.append(is_flawed)
            if is_flawed:
                recall.append(called_flawed)
    return count, *with_f1(precision, recall)


def table_line(name: str, count: int, *shares: float) -> str:
    return f"{name:24}{count:>8}" + "".join(f"{100 * share:>11.1f}" for share in shares)


def report(rows: list[dict]) -> str:
    """Format the tables for the rows of `judge_rows`. Exclude rows without an answered request."""
    answered = []
    answers = []
    failed = []
    for row in rows:
        found = []
        for critique in row["critiques"]:
            if critique["status"] in ANSWERED:
                found.append(critique)
            else:
                failed.append(critique)
        answers += found
        if found:
            answered.append(row)
    subsets = processbench_metrics(answered)
    lines = ["ProcessBench                rows      error    correct         F1"]
    for subset, metrics in subsets.items():
        lines.append(table_line(subset, *metrics))
    average = _mean([metrics[-1] for metrics in subsets.values()])
    lines.append(f"average F1: {100 * average:.1f}\n")
    lines.append("FlawedPositiveBench         rows  precision     recall         F1")
    lines.append(table_line("", *flawed_positive_metrics(answered)))
    statuses = Counter(critique["status"] for critique in answers + failed)
    unparsable = _mean([critique["index"] is None for critique in answers])
    lines.append(f"\nrequests: {dict(statuses)}; {unparsable:.1%} of the critiques have no valid index")
    if failed:
        why = failed[0].get("error") or failed[0]["text"]
        lines.append(f"INCOMPLETE: {len(failed)} requests failed (the first: {why}); run the command again")
    return "\n".join(lines)


async def ask_judge(data_source, solution_str, ground_truth, extra_info, prompt, reward_router_address, chat):
    """Request one critique as a reward function does. The score is 1 if the index is correct, else 0."""
    status, text, tokens = await scores.chat(prompt, reward_router_address, **chat)
    index = None
    if status == "ok":
        index = scores.parse_critique(text, scores.whole_number(extra_info["total_steps"]))
    score = None
    if status in ANSWERED:
        score = float(index == ground_truth)
    return {"score": score, "status": status, "text": text, "tokens": tokens, "index": index}


def read_judge_rows(path: Path, limit: int | None = None) -> list[dict]:
    """Read judge rows and add fields for the metrics. Raises ValueError."""
    rows = read_rows(path, ["data_source", "prompt", "reward_model", "extra_info"])[:limit]
    for number, row in enumerate(rows):
        with errors_at(f"{path}, row {number}"):
            row = rows[number] = checked_row(row, is_table=path.suffix.lower() == ".parquet")
        if row.get("ability") != "math_critic":
            raise ValueError(
                f"{path}, row {number}: ability is {row.get('ability')!r}; judge rows have "
                "'math_critic' (see prepare_data.py)"
            )
        validate_row(row, f"{path}, row {number}")
        extra = row["extra_info"]
        row["response"] = row["prompt"][0]["content"]
        if len(row["prompt"]) > 1:
            row["response"] = json.dumps(row["prompt"])
        row["label"] = scores.whole_number(row["reward_model"]["ground_truth"])
        row["subset"] = extra.get("subset") or row["data_source"]
        row["final_answer_correct"] = extra.get("final_answer_correct") is not False
    rows[0] = dict.fromkeys(name for row in rows for name in row) | rows[0]  # from_pylist asks only row 0.
    for name in rows[0]:
        try:
            column = pa.table({name: [row.get(name) for row in rows]})
            pq.ParquetWriter(pa.BufferOutputStream(), column.schema).close()
        except Exception as error:  # pyarrow raises many types.
            raise ValueError(
                f"{path}: the column {name!r} cannot be written to --out ({error}); remove it, or give "
                "all its values the same type"
            ) from error
    return rows


def model_name(config: Config) -> str:
    """Return the model name for requests.

    Raises:
        ValueError: The judge serves several models.
        OSError: No judge responds.
        RuntimeError: The router rejects the key.
    """
    if config.model:
        return config.model
    try:
        cards = listed_models(config.router_address)
    except RuntimeError:  # The router rejects the key.
        raise
    except Exception as error:  # The address may belong to another kind of server.
        raise OSError(
            f"--router-address {config.router_address}: cannot get the model name "
            f"({error!r}); check that the judge is running; if it lists no models, pass --model"
        ) from error
    return only_model(cards, config.router_address, "--model NAME")["id"]


def judge_rows(rows: list[dict], config: Config) -> list[dict]:
    """Add "critiques" (n times {"status", "text", "tokens", "index", ...}) and "prediction" to the rows.

    Raises ValueError, or OSError if no judge responds.
    """
    chat_kwargs = json_object("chat_kwargs", config.chat_kwargs) or None
    chat = {
        "chat_kwargs": chat_kwargs,
        "model": model_name(config),
        "temperature": config.temperature,
        "top_p": config.top_p,
        "max_tokens": config.max_tokens,
    }
    # A result depends on these settings, and on the prompt and the label of its row.
    files = fingerprints(scores.__file__)
    models = served_models({"genrm": config.router_address}, [chat["model"]])
    header = chat | {"files": files, "models": models}
    progress = Path(f"{config.out}.jsonl")
    samples = {}  # {name of a critique: row}
    for row in rows:
        for name in names_of(row, config.n):
            samples[name] = row
    options = RewardOptions(
        reward_fn=f"{Path(__file__).resolve()}:ask_judge",
        router_address=(config.router_address,),
        reward_kwargs=json.dumps({"chat": chat | {"timeout_s": config.timeout_s}}),
        num_workers=1,
        max_in_flight=config.concurrency,
        timeout=config.timeout_s + 60,
    )
    done, *_ = score_samples(options, samples, progress, header, resume=True)
    for row in rows:
        row["critiques"] = []
        for name in names_of(row, config.n):
            critique = {"text": None, "tokens": 0, "index": None, "status": done[name]["status"]}
            row["critiques"].append(critique | done[name]["reward_extra_info"])
        row["prediction"] = majority_vote([critique["index"] for critique in row["critiques"]])
    return rows


def names_of(row: dict, n: int) -> list[str]:
    """Name the n critiques of a row, independently of the file and of the row's position."""
    digest = sha256(f"{row['label']} {row['response']}".encode())
    return [f"{digest[:16]}/{number}" for number in range(n)]


def main() -> None:
    config = cli(Config, __doc__, markers=[tyro.conf.DisallowNone])
    with one_line_errors("interrupted; run the same command again to resume\n"):
        config.check()
        judged = judge_rows(read_judge_rows(config.data, config.limit), config)
        text = report(judged)
        print(text)
        pq.write_table(pa.Table.from_pylist(judged), config.out, row_group_size=ROWS_AT_ONCE)
    sys.exit("INCOMPLETE" in text)


if __name__ == "__main__":
    main()
