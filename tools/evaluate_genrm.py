"""How good is a judge (GenRM)? ProcessBench and FlawedPositiveBench, by majority vote (paper section 4.2).

    python prepare_data.py --tasks processbench --out-dir data
    python genrm_server.py --model dyyyyyyyy/FAPO-GenRM-4B --port 30000
    python -m tools.evaluate_genrm --data data/processbench_test.parquet --router-address 127.0.0.1:30000 \\
        --n 8 --temperature 0.6 --out critiques.parquet

Asks for n critiques of every judge row of prepare_data.py; each goes to critiques.jsonl as it comes: a run
that was stopped goes on where it was, also with other rows, a larger n, another address. Prints two tables:
    ProcessBench         per subset: share of flawed solutions whose first error is found exactly (error), of
                         correct ones that are called correct (correct), their harmonic mean (F1); mean F1
    FlawedPositiveBench  rows whose final answer is correct: precision, recall and F1 of "flawed"
The paper reports for FAPO-GenRM-4B: average F1 83.3; precision 87.5, recall 91.4, F1 89.4. A critique that is
unparsable or was cut has no vote; a solution without any vote is a miss in every accuracy and in recall, but
never "flawed" (the original counts it so). A failed request is left out, reported, and asked again next time.
Left out: judges that answer True or False, scoring by log-probabilities.
"""

import asyncio
import hashlib
import json
import sys
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean, harmonic_mean, mode

import aiohttp
import pyarrow.parquet as pq
import tyro

import compute_score as scores
from prepare_data import read_rows, validate_row
from reward_loop import RewardOptions
from score_file import as_table, score_the_rest, scored_before


@dataclass
class Config:
    data: Path  # Judge rows of prepare_data.py, such as data/processbench_test.parquet.
    router_address: str  # host:port of the judge: a router or one OpenAI-compatible server.
    out: Path = Path("critiques.parquet")  # Every row with its critiques; a .jsonl beside it: the progress.
    model: str | None = None  # Model name to ask for; by default the first that the server names.
    n: int = 8  # Critiques per row; the majority is the prediction.
    temperature: float = 0.6  # Sampling temperature (paper table 1).
    top_p: float = 0.95  # Nucleus sampling (paper table 1).
    max_tokens: int = scores.GENRM_MAX_TOKENS  # Longest critique; or all that its prompt leaves, if less.
    chat_kwargs: str = "{}"  # JSON for the judge's chat template, such as '{"enable_thinking": false}'.
    concurrency: int = 256  # Requests at the same time.
    timeout_s: float = 3600.0  # Seconds for one critique, waiting in the queue and all attempts included.
    max_error_rate: float = 0.0  # Exit code 0 if at most this share of all critiques is missing.
    limit: int | None = None  # Only the first so many rows.


ANSWERED = ("ok", "truncated")  # final; any other status is a request that failed, to be asked again


def majority_vote(indices: list[int | None]) -> int | None:
    """The most frequent index, of equally frequent ones the earliest; None (unparsable) has no vote."""
    votes = [index for index in indices if index is not None]
    return mode(votes) if votes else None


def _mean(values: list[float]) -> float:
    return fmean(values) if values else float("nan")


def processbench_metrics(rows: list[dict]) -> dict[str, dict[str, float]]:
    """Subset -> {"count", "error", "correct", "f1"} (paper eq. 6), shares of 1; NaN without such rows."""
    metrics = {}
    for subset in sorted({row["subset"] for row in rows}):
        own = [row for row in rows if row["subset"] == subset]
        error = _mean([row["prediction"] == row["label"] for row in own if row["label"] != -1])
        correct = _mean([row["prediction"] == -1 for row in own if row["label"] == -1])
        f1 = harmonic_mean([error, correct])
        metrics[subset] = {"count": len(own), "error": error, "correct": correct, "f1": f1}
    return metrics


def flawed_positive_metrics(rows: list[dict]) -> dict[str, float]:
    """{"count", "precision", "recall", "f1", "acc"} of "flawed" where the answer is correct."""
    own = [(row["label"], row["prediction"]) for row in rows if row["final_answer_correct"]]
    precision = _mean([label != -1 for label, index in own if index not in (None, -1)])
    recall = _mean([index not in (None, -1) for label, index in own if label != -1])
    acc = _mean([index is not None and (index == -1) == (label == -1) for label, index in own])
    f1 = harmonic_mean([precision, recall])
    return {"count": len(own), "precision": precision, "recall": recall, "f1": f1, "acc": acc}


def report(rows: list[dict]) -> str:
    """The tables as text, of the rows of `judge_rows`; those without any answered request are left out."""

    def line(name: str, metrics: dict) -> str:
        count, *shares = metrics.values()
        return f"{name:24}{count:>8}" + "".join(f"{100 * share:>11.1f}" for share in shares)

    critiques = [critique for row in rows for critique in row["critiques"]]
    ok = [critique for critique in critiques if critique["status"] in ANSWERED]
    failed = [critique for critique in critiques if critique["status"] not in ANSWERED]
    answered = [row for row in rows if any(critique["status"] in ANSWERED for critique in row["critiques"])]
    subsets = processbench_metrics(answered)
    lines = [
        f"{'ProcessBench':24}{'rows':>8}{'error':>11}{'correct':>11}{'F1':>11}",
        *(line(subset, metrics) for subset, metrics in subsets.items()),
        f"{'average F1':24}{len(answered):>8}{100 * _mean([m['f1'] for m in subsets.values()]):>33.1f}",
        f"\n{'FlawedPositiveBench':24}{'rows':>8}{'precision':>11}{'recall':>11}{'F1':>11}{'accuracy':>11}",
        line("", flawed_positive_metrics(answered)),
        f"\nunparsable: {100 * _mean([c['index'] is None for c in ok]):.1f} % of the critiques, "
        f"{100 * _mean([row['prediction'] is None for row in answered]):.1f} % of the rows",
        f"cut off: {100 * _mean([c['status'] == 'truncated' for c in ok]):.1f} %; "
        f"mean tokens per critique: {_mean([c['tokens'] for c in ok if c['tokens'] is not None]):.1f}",
    ]
    if failed:
        lines += [
            f"INCOMPLETE: requests failed: {dict(Counter(c['status'] for c in failed))} of {len(critiques)}, "
            f"one with: {failed[0].get('error') or failed[0]['text']}",
            f"{len(rows) - len(answered)} rows are left out of the tables; run the same command again to ask "
            "for the missing answers, or accept them as missing with --max-error-rate",
        ]
    return "\n".join(lines)


async def ask_judge(
    data_source, solution_str, ground_truth, extra_info, reward_router_address, chat, context):  # fmt: skip
    """Reward function: one critique, of the prompt `solution_str`. Score 1: exactly right; None: none.

    context: the tokens that the server has for both. A prompt has no more tokens than bytes; where that does
    not leave max_tokens none are named, and the server gives what there is.
    """
    if chat["max_tokens"] + len(solution_str.encode()) > context:
        chat = chat | {"max_tokens": None}
    status, text, tokens = await scores.chat(solution_str, reward_router_address, **chat)
    index = scores.parse_critique(text, extra_info["total_steps"]) if status == "ok" else None
    score = float(index == ground_truth) if status in ANSWERED else None
    return {"score": score, "status": status, "text": text, "tokens": tokens, "index": index}


def read_judge_rows(path: Path, limit: int | None = None) -> list[dict]:
    """The judge rows of a file with what the metrics need. ValueError naming the file, row and field."""
    rows = read_rows(path, ["data_source", "prompt", "reward_model", "extra_info"])[:limit]
    for number, row in enumerate(rows):
        if row.get("ability") != "math_critic":
            raise ValueError(f"{path}, row {number}: not a judge row (ability {row.get('ability')!r})")
        validate_row(row, f"{path}, row {number}")
        extra = row["extra_info"]
        row |= {"response": row["prompt"][0]["content"], "label": row["reward_model"]["ground_truth"],
                "subset": extra.get("subset") or row["data_source"],
                "final_answer_correct": extra.get("final_answer_correct") is not False}  # fmt: skip
    return rows


async def chat_settings(config: Config) -> tuple[dict, int]:
    """(how `scores.chat` asks the judge, the tokens that its server has). Raises ValueError, OSError."""
    try:
        chat_kwargs = dict(json.loads(config.chat_kwargs)) or None
    except (ValueError, TypeError) as error:
        raise ValueError(f"--chat-kwargs: {config.chat_kwargs!r} is not a JSON object") from error
    try:
        model = await scores.served_model(config.router_address)
        name, context = config.model or model["id"], int(model.get("max_model_len") or sys.maxsize)
    except (aiohttp.ClientError, OSError, ValueError, LookupError, TypeError) as error:
        raise OSError(f"--router-address: {config.router_address} names no model ({error!r})") from error
    finally:
        await scores.close_session()
    return dict(model=name, temperature=config.temperature, top_p=config.top_p,
                max_tokens=config.max_tokens, chat_kwargs=chat_kwargs), context  # fmt: skip


def judge_rows(rows: list[dict], config: Config) -> list[dict]:
    """Adds "critiques" (n times {"status", "text", "tokens", "index", ...}) and "prediction" to the rows."""
    chat, context = asyncio.run(chat_settings(config))
    header = json.dumps(chat)  # what an answer depends on, beside its row's prompt and label
    names = [hashlib.sha256(f"{row['label']} {row['response']}".encode()).hexdigest()[:16] for row in rows]
    progress = config.out.with_suffix(".jsonl")
    if progress.exists() and not scored_before(progress, progress.read_text().split("\n")[0], resume=True):
        progress.unlink()  # nothing came of the last command, so that this one may correct it
    done = scored_before(progress, header, resume=True)  # {"name of row/sample": result}
    samples = {f"{name}/{j}": row for name, row in zip(names, rows) for j in range(config.n)}
    options = RewardOptions(
        reward_fn=f"{Path(__file__).resolve()}:ask_judge", router_address=(config.router_address,),
        reward_kwargs=json.dumps({"chat": chat | {"timeout_s": config.timeout_s}, "context": context}),
        num_workers=1, max_in_flight=config.concurrency, timeout=config.timeout_s + 60)  # fmt: skip
    score_the_rest(options, samples, done, progress, header)
    nothing = {"text": None, "tokens": 0, "index": None}
    for name, row in zip(names, rows):
        results = [done[f"{name}/{j}"] for j in range(config.n)]
        row["critiques"] = [nothing | {"status": r["status"]} | r["reward_extra_info"] for r in results]
        row["prediction"] = majority_vote([critique["index"] for critique in row["critiques"]])
    return rows


def main() -> None:
    config = tyro.cli(Config, description=__doc__)
    try:
        if config.out.with_suffix(".jsonl").resolve() in (config.out.resolve(), config.data.resolve()):
            raise ValueError(f"--out {config.out}: the progress goes to this name with .jsonl; take another")
        judged = judge_rows(read_judge_rows(config.data, config.limit), config)
        pq.write_table(as_table(judged), config.out)
    except (ValueError, OSError, RuntimeError) as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(2)
    except KeyboardInterrupt:
        print("interrupted; the same command goes on", file=sys.stderr)
        sys.exit(130)
    print(report(judged))
    missing = _mean([c["status"] not in ANSWERED for row in judged for c in row["critiques"]])
    sys.exit(1 if missing > config.max_error_rate else 0)


if __name__ == "__main__":
    main()
