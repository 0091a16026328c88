"""How good is a judge (GenRM)? ProcessBench and FlawedPositiveBench, by majority vote (paper section 4.2).

    python prepare_data.py --tasks processbench --out-dir data
    python genrm_server.py --model dyyyyyyyy/FAPO-GenRM-4B --port 30000
    python -m tools.evaluate_genrm --data data/processbench_test.parquet --router-address 127.0.0.1:30000 \\
        --n 8 --temperature 0.6 --out critiques.parquet

Asks for n critiques of every judge row of prepare_data.py; each goes to critiques.parquet.jsonl as it comes:
a run that was stopped goes on where it was, also with other rows, a larger n, another address. Two tables:
    ProcessBench         per subset: share of flawed solutions whose first error is found exactly (error), of
                         correct ones that are called correct (correct), their harmonic mean (F1); mean F1
    FlawedPositiveBench  rows whose final answer is correct: precision, recall and F1 of "flawed"
The paper reports for FAPO-GenRM-4B: average F1 83.3; precision 87.5, recall 91.4, F1 89.4. A critique that is
unparsable or was cut has no vote; a solution without any vote is a miss in "error", "correct" and recall, but
never "flawed" (the original counts it so). A failed request is left out, reported (exit code 1), and asked
again next time.
Left out: judges that answer True or False, scoring by log-probabilities.
"""

import asyncio
import hashlib
import json
import math
import sys
from collections import Counter, defaultdict
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean, harmonic_mean, mode

import pyarrow as pa
import pyarrow.parquet as pq
import tyro

import compute_score as scores
from prepare_data import read_rows, validate_row
from reward_loop import RewardOptions, json_object
from score_file import score_the_rest, scored_before, served_models


@dataclass
class Config:
    data: Path  # Judge rows of prepare_data.py, such as data/processbench_test.parquet.
    router_address: str  # host:port of the judge: a router or one OpenAI-compatible server.
    out: Path = Path("critiques.parquet")  # Every row with its critiques; OUT.jsonl: the progress.
    model: str | None = None  # Model name to ask for; by default the first that the server names.
    n: int = 8  # Critiques per row; the majority is the prediction.
    temperature: float = 0.6  # Sampling temperature (paper table 1).
    top_p: float = 0.95  # Nucleus sampling (paper table 1).
    max_tokens: int = scores.GENRM_MAX_TOKENS  # Longest critique; the server must hold its prompt, too.
    chat_kwargs: str = "{}"  # JSON for the judge's chat template, such as '{"enable_thinking": false}'.
    concurrency: int = 256  # Requests at the same time.
    timeout_s: float = 3600.0  # Seconds for one critique, waiting in the queue and all attempts included.
    limit: int | None = None  # Only the first so many rows.


ANSWERED = ("ok", "truncated")  # final; any other status is a request that failed, to be asked again


def majority_vote(indices: list[int | None]) -> int | None:
    """The most frequent index, of equally frequent ones the earliest; None (unparsable) has no vote."""
    votes = [index for index in indices if index is not None]
    if votes:
        return mode(votes)
    return None


def _mean(values: list[float]) -> float:
    if values:
        return fmean(values)
    return math.nan


def with_f1(first: list[bool], second: list[bool]) -> tuple[float, float, float]:
    """Two shares and their harmonic mean, NaN where one of them is."""
    shares = _mean(first), _mean(second)
    if any(map(math.isnan, shares)):
        return *shares, math.nan
    return *shares, harmonic_mean(shares)


def processbench_metrics(rows: list[dict]) -> dict[str, tuple]:
    """Subset -> (rows, error, correct, F1) (paper eq. 6), shares of 1; NaN without such rows."""
    flawed = defaultdict(list)  # subset -> whether the prediction is right, of each flawed solution
    sound = defaultdict(list)
    for row in rows:
        of_subset = sound if row["label"] == -1 else flawed
        of_subset[row["subset"]].append(row["prediction"] == row["label"])
    metrics = {}
    for subset in sorted({*flawed, *sound}):
        count = len(flawed[subset] + sound[subset])
        metrics[subset] = count, *with_f1(flawed[subset], sound[subset])
    return metrics


def flawed_positive_metrics(rows: list[dict]) -> tuple:
    """(rows, precision, recall, F1) of "flawed" where the answer is correct."""
    count = 0
    precision = []  # of what was called flawed: is it?
    recall = []  # of what is flawed: was it called so?
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
    """The tables as text, of the rows of `judge_rows`; those without any answered request are left out."""
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
    lines.append(f"\nrequests: {dict(statuses)}; {unparsable:.1%} of the critiques name no paragraph")
    if failed:
        why = failed[0].get("error") or failed[0]["text"]
        lines.append(f"INCOMPLETE: {len(failed)} requests failed, one with: {why}; ask again: same command")
    return "\n".join(lines)


async def ask_judge(data_source, solution_str, ground_truth, extra_info, reward_router_address, chat):
    """Reward function: one critique, of the prompt `solution_str`. Score 1: exactly right; None: none."""
    status, text, tokens = await scores.chat(solution_str, reward_router_address, **chat)
    index = None
    if status == "ok":
        index = scores.parse_critique(text, extra_info["total_steps"])
    score = None
    if status in ANSWERED:
        score = float(index == ground_truth)
    return {"score": score, "status": status, "text": text, "tokens": tokens, "index": index}


def read_judge_rows(path: Path, limit: int | None = None) -> list[dict]:
    """The judge rows of a file with what the metrics need. ValueError naming the file, row and field."""
    rows = read_rows(path, ["data_source", "prompt", "reward_model", "extra_info"])[:limit]
    for number, row in enumerate(rows):
        if row.get("ability") != "math_critic":
            raise ValueError(f"{path}, row {number}: not a judge row (ability {row.get('ability')!r})")
        validate_row(row, f"{path}, row {number}")
        extra = row["extra_info"]
        row["response"] = row["prompt"][0]["content"]
        row["label"] = row["reward_model"]["ground_truth"]
        row["subset"] = extra.get("subset") or row["data_source"]
        row["final_answer_correct"] = extra.get("final_answer_correct") is not False
    return rows


async def chat_settings(config: Config) -> dict:
    """How `scores.chat` asks the judge. Raises ValueError, OSError."""
    chat_kwargs = json_object("chat_kwargs", config.chat_kwargs) or None
    model = config.model
    try:
        model = model or (await scores.served_model(config.router_address))["id"]
    except Exception as error:  # whatever is there, it is no server of models
        raise OSError(f"--router-address: {config.router_address} names no model ({error!r})") from error
    finally:
        await scores.close_session()
    return {
        "model": model,
        "temperature": config.temperature,
        "top_p": config.top_p,
        "max_tokens": config.max_tokens,
        "chat_kwargs": chat_kwargs,
    }


def judge_rows(rows: list[dict], config: Config) -> list[dict]:
    """Adds "critiques" (n times {"status", "text", "tokens", "index", ...}) and "prediction" to the rows."""
    chat = asyncio.run(chat_settings(config))
    # What an answer depends on, besides the prompt and the label of its row.
    header = chat | {"models": asyncio.run(served_models({"genrm": config.router_address}))}
    progress = Path(f"{config.out}.jsonl")
    done = scored_before(progress, header, resume=True)  # {name of a critique: result}
    samples = {}
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
    score_the_rest(options, samples, done, progress, header)
    for row in rows:
        row["critiques"] = []
        for name in names_of(row, config.n):
            critique = {"text": None, "tokens": 0, "index": None, "status": done[name]["status"]}
            row["critiques"].append(critique | done[name]["reward_extra_info"])
        row["prediction"] = majority_vote([critique["index"] for critique in row["critiques"]])
    return rows


def names_of(row: dict, n: int) -> list[str]:
    """Names of its n critiques, the same in whatever file and place the row is."""
    digest = hashlib.sha256(f"{row['label']} {row['response']}".encode()).hexdigest()
    return [f"{digest[:16]}/{number}" for number in range(n)]


def main() -> None:
    config = tyro.cli(Config, description=__doc__)
    try:
        judged = judge_rows(read_judge_rows(config.data, config.limit), config)
        pq.write_table(pa.Table.from_pylist(judged), config.out)
    except (ValueError, OSError, RuntimeError) as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(2)
    except KeyboardInterrupt:
        print("interrupted; the same command goes on", file=sys.stderr)
        sys.exit(130)
    text = report(judged)
    print(text)
    sys.exit("INCOMPLETE" in text)


if __name__ == "__main__":
    main()
