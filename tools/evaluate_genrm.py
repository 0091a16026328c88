"""How good is a judge (GenRM)? ProcessBench and FlawedPositiveBench, with majority vote (paper section 4.2, table 2).

    python prepare_data.py --tasks processbench --out-dir data
    python genrm_server.py --model dyyyyyyyy/FAPO-GenRM-4B --port 30000
    python -m tools.evaluate_genrm --data data/processbench_test.parquet --router-address 127.0.0.1:30000 \\
        --n 8 --temperature 0.6 --out critiques.parquet

Asks for n critiques of every row (any judge rows of prepare_data.py will do): `ask_judge` is a reward function, and a critique is
one call of it. Each goes to critiques.jsonl as it comes, so that a run that was stopped goes on where it was. Prints two tables:

    ProcessBench          per subset: share of flawed solutions whose first error is found exactly (error), share of
                          correct ones that are called correct (correct), their harmonic mean (F1); mean F1 of the subsets
    FlawedPositiveBench   rows whose final answer is correct: precision, recall and F1 of "flawed"

The paper reports for FAPO-GenRM-4B: average F1 83.3; precision 87.5, recall 91.4, F1 89.4. An unparsable critique, or one
that was cut at --max-tokens, has no vote. A solution without any vote is unparsable: a miss in every accuracy and in recall,
but never counted as "flawed" (the original counts it as such). A request that fails is neither: it is left out, reported,
and asked again next time; where some fail every time, such as prompts that are too long, --max-error-rate ends the matter.

What it leaves out: judges that answer True or False, and scoring by log-probabilities.
"""

import asyncio
import hashlib
import json
import statistics
import sys
from collections import Counter
from dataclasses import dataclass
from pathlib import Path

import aiohttp
import pyarrow.parquet as pq
import tyro

import compute_score as scores
from prepare_data import read_rows
from reward_loop import RewardOptions
from score_file import as_table, score_the_rest, scored_before


@dataclass
class Config:
    data: Path
    """Judge rows of prepare_data.py, such as data/processbench_test.parquet."""
    router_address: str
    """host:port of the judge: a router or one OpenAI-compatible server."""
    out: Path = Path("critiques.parquet")
    """Every row with its critiques and the prediction; the same name with .jsonl keeps the progress."""
    model: str | None = None
    """Model name to ask for; by default the first that the server names."""
    n: int = 8
    """Critiques per row; the majority is the prediction."""
    temperature: float = 0.6
    """Sampling temperature (paper table 1)."""
    top_p: float = 0.95
    """Nucleus sampling (paper table 1)."""
    max_tokens: int = scores.GENRM_MAX_TOKENS
    """Longest critique."""
    chat_kwargs: str = "{}"
    """JSON for the judge's chat template, such as '{"enable_thinking": false}'."""
    concurrency: int = 256
    """Requests at the same time."""
    timeout_s: float = 3600.0
    """Seconds for one critique, its waiting in the server's queue and all attempts included."""
    max_error_rate: float = 0.0
    """The run is complete (exit code 0) if at most this share of all critiques, old and new, is missing."""
    limit: int | None = None
    """Only the first so many rows."""


ANSWERED = ("ok", "truncated")  # final; any other status is a request that failed, to be asked again


def majority_vote(indices: list[int | None]) -> int | None:
    """The most frequent index, of equally frequent ones the earliest; None (unparsable) has no vote."""
    votes = [index for index in indices if index is not None]
    return statistics.mode(votes) if votes else None


def _mean(values: list[float]) -> float:
    return sum(values) / len(values) if values else float("nan")


def _harmonic_mean(a: float, b: float) -> float:
    return 0.0 if a + b == 0 else 2 * a * b / (a + b)


def processbench_metrics(rows: list[dict]) -> dict[str, dict[str, float]]:
    """Subset -> {"count", "error", "correct", "f1"} (paper eq. 6), shares from 0 to 1; NaN where a subset has no such rows."""
    metrics = {}
    for subset in sorted({row["subset"] for row in rows}):
        own = [row for row in rows if row["subset"] == subset]
        error = _mean([row["prediction"] == row["label"] for row in own if row["label"] != -1])
        correct = _mean([row["prediction"] == -1 for row in own if row["label"] == -1])
        metrics[subset] = {"count": len(own), "error": error, "correct": correct, "f1": _harmonic_mean(error, correct)}
    return metrics


def flawed_positive_metrics(rows: list[dict]) -> dict[str, float]:
    """{"count", "precision", "recall", "f1", "acc"} of "flawed" on the rows with a correct final answer; NaN where undefined."""
    own = [row for row in rows if row["final_answer_correct"]]
    precision = _mean([row["label"] != -1 for row in own if row["prediction"] not in (None, -1)])
    recall = _mean([row["prediction"] not in (None, -1) for row in own if row["label"] != -1])
    acc = _mean([row["prediction"] is not None and (row["prediction"] == -1) == (row["label"] == -1) for row in own])
    return {"count": len(own), "precision": precision, "recall": recall, "f1": _harmonic_mean(precision, recall), "acc": acc}


def report(rows: list[dict]) -> str:
    """The tables as text. Rows as `judge_rows` returns them; rows without any answered request are left out and counted."""

    def line(name: str, metrics: dict) -> str:
        count, *shares = metrics.values()
        return f"{name:24}{count:>8}" + "".join(f"{100 * share:>11.1f}" for share in shares)

    answered = [row for row in rows if any(critique["status"] in ANSWERED for critique in row["critiques"])]
    critiques = [critique for row in rows for critique in row["critiques"]]
    ok = [critique for critique in critiques if critique["status"] in ANSWERED]
    failed = [critique for critique in critiques if critique["status"] not in ANSWERED]
    by_subset = processbench_metrics(answered)
    average = _mean([metrics["f1"] for metrics in by_subset.values()])
    unparsable, no_vote = [c["index"] is None for c in ok], [row["prediction"] is None for row in answered]
    lines = [
        f"{'ProcessBench':24}{'rows':>8}{'error':>11}{'correct':>11}{'F1':>11}",
        *(line(subset, metrics) for subset, metrics in by_subset.items()),
        f"{'average F1':24}{len(answered):>8}{100 * average:>33.1f}",
        f"\n{'FlawedPositiveBench':24}{'rows':>8}{'precision':>11}{'recall':>11}{'F1':>11}{'accuracy':>11}",
        line("", flawed_positive_metrics(answered)),
        f"\nunparsable: {100 * _mean(unparsable):.1f} % of the critiques, {100 * _mean(no_vote):.1f} % of the rows",
        f"cut off: {100 * _mean([c['status'] == 'truncated' for c in ok]):.1f} %; "
        f"mean tokens per critique: {_mean([c['tokens'] for c in ok]):.1f}",
    ]
    if failed:
        lines.append(f"INCOMPLETE: requests failed: {dict(Counter(c['status'] for c in failed))} of {len(critiques)}, one with: "
                     f"{failed[0]['text']}\n{len(rows) - len(answered)} rows are left out of the tables; run the same command "
                     "again to ask for the missing answers, or accept them as missing with --max-error-rate")  # fmt: skip
    return "\n".join(lines)


async def ask_judge(data_source, solution_str, ground_truth, extra_info, reward_router_address, chat) -> dict:
    """Reward function: one critique, for the prompt `solution_str`. Score 1 if it gives the exact index, None if none came."""
    status, text, tokens = await scores.chat(solution_str, reward_router_address, **chat)
    index = scores.parse_critique(text, extra_info["total_steps"]) if status == "ok" else None
    score = float(index == ground_truth) if status in ANSWERED else None
    return {"score": score, "status": status, "text": text, "tokens": tokens, "index": index}


def critique_of(result: dict) -> dict:
    """What `ask_judge` returned, or what became of the call instead."""
    extra = result["reward_extra_info"]
    nothing = {"status": result["status"], "text": extra.get("error"), "tokens": 0, "index": None}
    return {key: extra.get(key, value) for key, value in nothing.items()}


def read_judge_rows(path: Path, limit: int | None = None) -> list[dict]:
    """The judge rows of a file, checked, with what the metrics need. Raises ValueError naming the file, the row and the field."""
    rows = read_rows(path, ["data_source", "prompt", "reward_model", "extra_info"])[:limit]
    for number, row in enumerate(rows):
        extra, label = row["extra_info"] or {}, row["reward_model"]["ground_truth"]
        steps = extra.get("total_steps") or 0
        if not (isinstance(label, int) and -1 <= label < steps):
            raise ValueError(f"{path}, row {number}: not a judge row: ground_truth {label!r} is no integer in -1 .. {steps - 1}")
        row |= {"response": row["prompt"][0]["content"], "label": label, "subset": extra.get("subset") or row["data_source"],
                "final_answer_correct": extra.get("final_answer_correct") is not False}  # fmt: skip
    return rows


def chat_settings(config: Config) -> dict:
    """How `scores.chat` asks the judge. Raises ValueError for bad settings, OSError where the judge does not name its model."""
    settings = {name: getattr(config, name) for name in ("model", "temperature", "top_p", "max_tokens", "timeout_s")}
    try:
        settings["chat_kwargs"] = dict(json.loads(config.chat_kwargs)) or None
    except (ValueError, TypeError) as error:
        raise ValueError(f"--chat-kwargs: {config.chat_kwargs!r} is not a JSON object") from error

    async def first_model() -> str:
        try:
            return await scores.model_id(config.router_address)
        finally:
            await scores.close_session()

    try:
        settings["model"] = config.model or asyncio.run(first_model())
    except (aiohttp.ClientError, OSError, ValueError, LookupError, TypeError) as error:
        raise OSError(f"--router-address: {config.router_address} names no model ({error!r})") from error
    return settings


def judge_rows(rows: list[dict], config: Config) -> list[dict]:
    """Adds "critiques" ({"status", "text", "tokens", "index"}, n of them) and "prediction" to the rows. Resumes."""
    chat = chat_settings(config)
    changes_a_critique = {key: value for key, value in chat.items() if key != "timeout_s"}
    header = json.dumps(changes_a_critique | {"data (sha256)": hashlib.sha256(config.data.read_bytes()).hexdigest()})
    progress = config.out.with_suffix(".jsonl")
    done = scored_before(progress, header, resume=True)  # {"row/sample": result}
    samples = {f"{i}/{j}": row for i, row in enumerate(rows) for j in range(config.n)}
    options = RewardOptions(
        reward_fn=f"{Path(__file__).resolve()}:ask_judge", reward_kwargs=json.dumps({"chat": chat}),
        router_address=(config.router_address,), num_workers=1, max_in_flight=config.concurrency, timeout=config.timeout_s + 60,
    )  # fmt: skip
    score_the_rest(options, samples, done, progress, header)
    for i, row in enumerate(rows):
        row["critiques"] = [critique_of(done[f"{i}/{j}"]) for j in range(config.n)]
        row["prediction"] = majority_vote([critique["index"] for critique in row["critiques"]])
    return rows


def main() -> None:
    config = tyro.cli(Config, description=__doc__)
    try:
        if config.n < 1 or config.concurrency < 1:
            raise ValueError(f"--n {config.n}, --concurrency {config.concurrency}: both must be 1 or more")
        if config.out.suffix != ".parquet" or config.out.with_suffix(".jsonl").resolve() == config.data.resolve():
            raise ValueError(f"--out {config.out}: it must end with .parquet, and the same name with .jsonl must not be the data")
        rows = read_judge_rows(config.data, config.limit)
        as_table(rows)  # now, not after the last critique, rows that parquet cannot hold are refused
        judged = judge_rows(rows, config)
        pq.write_table(as_table(judged), config.out)
    except (ValueError, OSError, RuntimeError) as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(2)
    except KeyboardInterrupt:
        print("interrupted; the same command goes on", file=sys.stderr)
        sys.exit(130)
    print(report(judged))
    missing = _mean([critique["status"] not in ANSWERED for row in judged for critique in row["critiques"]])
    sys.exit(1 if missing > config.max_error_rate else 0)


if __name__ == "__main__":
    main()
