"""How good is a judge (GenRM)? ProcessBench and FlawedPositiveBench, with majority vote (paper section 4.2, table 2).

    python prepare_data.py --tasks processbench --out-dir data
    python genrm_server.py --model dyyyyyyyy/FAPO-GenRM-4B --port 30000
    python evaluate_genrm.py --data data/processbench_test.parquet --router-address 127.0.0.1:30000 \\
        --n 8 --temperature 0.6 --out critiques.parquet

Asks for n critiques of every row (any judge rows of prepare_data.py will do), keeps every critique in critiques.jsonl as
it comes, so that a run that was stopped goes on where it was, and prints two tables:

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
import sys
from collections import Counter
from dataclasses import dataclass
from pathlib import Path

import aiohttp
import pyarrow as pa
import pyarrow.parquet as pq
import tyro
from tqdm import tqdm

import compute_score as scores


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


# --- Metrics (paper eq. 6); a row is {"label", "prediction", "subset", "final_answer_correct"} ------------------------


def majority_vote(indices: list[int | None]) -> int | None:
    """The most frequent index, of equally frequent ones the earliest; None (unparsable) has no vote."""
    votes = Counter(index for index in indices if index is not None)
    return votes.most_common(1)[0][0] if votes else None


def _share(hits: list[bool]) -> float:
    return sum(hits) / len(hits) if hits else float("nan")


def _harmonic_mean(a: float, b: float) -> float:
    return 0.0 if a + b == 0 else 2 * a * b / (a + b)


def processbench_metrics(rows: list[dict]) -> dict[str, dict[str, float]]:
    """Subset -> {"count", "error", "correct", "f1"}, shares from 0 to 1; NaN where a subset has no such rows."""
    metrics = {}
    for subset in sorted({row["subset"] for row in rows}):
        own = [row for row in rows if row["subset"] == subset]
        error = _share([row["prediction"] == row["label"] for row in own if row["label"] != -1])
        correct = _share([row["prediction"] == -1 for row in own if row["label"] == -1])
        metrics[subset] = {"count": len(own), "error": error, "correct": correct, "f1": _harmonic_mean(error, correct)}
    return metrics


def flawed_positive_metrics(rows: list[dict]) -> dict[str, float]:
    """{"count", "precision", "recall", "f1", "acc"} of "flawed" on the rows with a correct final answer; NaN where undefined."""
    own = [row for row in rows if row["final_answer_correct"]]
    said = [row["prediction"] not in (None, -1) for row in own]
    true = [row["label"] != -1 for row in own]
    precision = _share([is_flawed for says, is_flawed in zip(said, true) if says])
    recall = _share([says for says, is_flawed in zip(said, true) if is_flawed])
    acc = _share([row["prediction"] is not None and says == is_flawed for row, says, is_flawed in zip(own, said, true)])
    return {"count": len(own), "precision": precision, "recall": recall, "f1": _harmonic_mean(precision, recall), "acc": acc}


def report(rows: list[dict]) -> str:
    """The tables as text. Rows as `judge_rows` returns them; rows without any answered request are left out and counted."""
    answered = [row for row in rows if any(critique["status"] in ANSWERED for critique in row["critiques"])]
    critiques = [critique for row in rows for critique in row["critiques"]]
    ok = [critique for critique in critiques if critique["status"] in ANSWERED]

    def percent(*shares: float) -> str:
        return "".join(f"{'-' if share != share else format(100 * share, '.1f'):>11}" for share in shares)

    lines = [f"{'ProcessBench':24}{'rows':>8}{'error':>11}{'correct':>11}{'F1':>11}"]
    by_subset = processbench_metrics(answered)
    for subset, m in by_subset.items():
        lines.append(f"{subset:24}{m['count']:>8}{percent(m['error'], m['correct'], m['f1'])}")
    average = sum(m["f1"] for m in by_subset.values()) / len(by_subset) if by_subset else float("nan")
    lines += [f"{'average F1':24}{len(answered):>8}{percent(average):>33}", ""]
    m = flawed_positive_metrics(answered)
    lines.append(f"{'FlawedPositiveBench':24}{'rows':>8}{'precision':>11}{'recall':>11}{'F1':>11}{'accuracy':>11}")
    lines += [f"{'':24}{m['count']:>8}{percent(m['precision'], m['recall'], m['f1'], m['acc'])}", ""]
    unparsable = _share([critique["index"] is None for critique in ok])
    lines.append(f"unparsable: {percent(unparsable).strip()} % of the critiques, "
                 f"{percent(_share([row['prediction'] is None for row in answered])).strip()} % of the rows")  # fmt: skip
    cut = percent(_share([critique["status"] == "truncated" for critique in ok])).strip()
    lines.append(f"cut off: {cut} %; mean tokens per critique: {sum(c['tokens'] for c in ok) / max(1, len(ok)):.1f}")
    bad = [critique for critique in critiques if critique["status"] not in ANSWERED]
    if bad:
        lines.append(f"INCOMPLETE: requests failed: {dict(Counter(c['status'] for c in bad))} of {len(critiques)}, one with: "
                     f"{bad[0]['text']}\n{len(rows) - len(answered)} rows are left out of the tables; run the same command again "
                     "to ask for the missing answers, or accept them as missing with --max-error-rate")  # fmt: skip
    return "\n".join(lines)


# --- Asking -----------------------------------------------------------------------------------------------------------


def read_judge_rows(path: Path, limit: int | None = None) -> list[dict]:
    """The judge rows of a parquet file, checked. Raises OSError or ValueError naming the file and the field."""
    rows = []
    for number, row in enumerate(pq.read_table(path).slice(0, limit).to_pylist()):
        try:
            extra, label = row["extra_info"], row["reward_model"]["ground_truth"]
            prompt, total_steps = row["prompt"][0]["content"], extra["total_steps"]
            if not -1 <= label < total_steps:
                raise ValueError(f"ground_truth {label} is not in -1 .. {total_steps - 1}")
        except (KeyError, IndexError, TypeError, ValueError) as error:
            raise ValueError(f"{path}, row {number}: not a judge row ({type(error).__name__}: {error})") from error
        is_correct = extra.get("final_answer_correct")
        rows.append({"subset": extra.get("subset") or row["data_source"], "prompt": prompt, "label": label,
                     "total_steps": total_steps, "final_answer_correct": True if is_correct is None else is_correct})  # fmt: skip
    if not rows:
        raise ValueError(f"{path}: has no rows")
    return rows


def open_progress(path: Path, settings: dict) -> dict[tuple[int, int], dict]:
    """(row, sample) -> answered critique of an earlier run. Starts the file if there is none.

    Raises ValueError if the file belongs to a run with other settings or other data (its first line).
    """
    if not path.exists():
        path.write_text(json.dumps(settings) + "\n")
        return {}
    content = path.read_text()
    whole = content[: content.rfind("\n") + 1]
    if whole != content:  # the last run was killed while it wrote: drop the half line
        path.write_text(whole)
    first, *lines = whole.splitlines() or ["{}"]
    if json.loads(first) != settings:
        raise ValueError(f"--out: {path} is from a run with other settings or data: {first[:400]}; delete it or choose another")
    return {(critique["row"], critique["sample"]): critique for critique in map(json.loads, lines)}


async def judge_rows(rows: list[dict], config: Config) -> list[dict]:
    """The rows plus "critiques" ({"status", "text", "tokens", "index"}, n of them) and "prediction". Resumes.

    A request that fails is a status. Raises OSError if the judge cannot even be asked for its model's name.
    """
    try:
        chat_kwargs = dict(json.loads(config.chat_kwargs))
    except (ValueError, TypeError) as error:
        raise ValueError(f"--chat-kwargs: {config.chat_kwargs!r} is not a JSON object") from error
    try:
        model = config.model or await scores.model_id(config.router_address)
    except (aiohttp.ClientError, TimeoutError, LookupError, ValueError) as error:
        reason = f"{type(error).__name__}: {error}"
        raise OSError(f"--router-address: {config.router_address} names no model ({reason})") from error
    settings = {name: getattr(config, name) for name in ("temperature", "top_p", "max_tokens")}  # all that changes a critique
    settings |= {"model": model, "chat_kwargs": chat_kwargs, "data": hashlib.sha256(config.data.read_bytes()).hexdigest()}
    progress_path = config.out.with_suffix(".jsonl")
    done = open_progress(progress_path, settings)
    waiting = [(i, j) for i in range(len(rows)) for j in range(config.n) if (i, j) not in done]
    failed = {}
    total = len(rows) * config.n
    with progress_path.open("a") as progress, tqdm(total=total, initial=total - len(waiting), unit=" critiques") as bar:
        queue = iter(waiting)  # shared by the workers

        async def worker() -> None:
            for i, j in queue:
                status, text, tokens = await scores.chat(
                    rows[i]["prompt"], config.router_address, model=model, temperature=config.temperature,
                    top_p=config.top_p, max_tokens=config.max_tokens, timeout_s=config.timeout_s, chat_kwargs=chat_kwargs or None,
                )  # fmt: skip
                critique = {"row": i, "sample": j, "status": status, "text": text, "tokens": tokens}
                if status in ANSWERED:
                    done[i, j] = critique
                    progress.write(json.dumps(critique) + "\n")
                    progress.flush()
                else:
                    failed[i, j] = critique
                    bar.set_postfix_str(f"{len(failed)} failed, last: {text[:60]}")
                bar.update()

        await asyncio.gather(*(worker() for _ in range(config.concurrency)))
    judged = []
    for i, row in enumerate(rows):
        critiques = []
        for j in range(config.n):
            critique = done.get((i, j)) or failed[i, j]
            index = scores.parse_critique(critique["text"], row["total_steps"]) if critique["status"] == "ok" else None
            critiques.append({key: critique[key] for key in ("status", "text", "tokens")} | {"index": index})
        judged.append(row | {"critiques": critiques, "prediction": majority_vote([c["index"] for c in critiques])})
    return judged


async def run(config: Config) -> list[dict]:
    try:
        return await judge_rows(read_judge_rows(config.data, config.limit), config)
    finally:
        await scores.close_session()


def main() -> None:
    config = tyro.cli(Config, description=__doc__)
    try:
        if config.n < 1 or config.concurrency < 1:
            raise ValueError(f"--n {config.n}, --concurrency {config.concurrency}: both must be 1 or more")
        config.out.parent.mkdir(parents=True, exist_ok=True)
        judged = asyncio.run(run(config))
        pq.write_table(pa.Table.from_pylist(judged), config.out)
    except (ValueError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(2)
    print(report(judged))
    missing = _share([critique["status"] not in ANSWERED for row in judged for critique in row["critiques"]])
    sys.exit(1 if missing > config.max_error_rate else 0)


if __name__ == "__main__":
    main()
