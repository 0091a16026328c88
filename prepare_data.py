"""Data sets and prompts -> parquet files in the row schema of the trainer (verl's, so that files go both ways).

    python prepare_data.py --tasks dapo aime24 aime25 gpqa --out-dir data      # the paper's training and test problems
    python prepare_data.py --tasks critic processbench --out-dir data          # to train and to evaluate a judge
    python prepare_data.py --tasks gsm8k math500 --out-dir data --source-dir ~/files     # from local files, no network

Each data set becomes OUT_DIR/<data_source>_<split>.parquet with rows
    data_source  str, names the metric val/<data_source>/...
    prompt       [{"role": "user", "content": str}]
    ability      "Math", "General" or "math_critic"
    reward_model {"style": "rule", "ground_truth": str}; for a judge an int: -1 = no error, else the first wrong paragraph
    extra_info   {"split", "index", "question", ...}; for a judge also total_steps, subset, final_answer_correct, ...

A file in --source-dir (parquet, JSON, JSONL or CSV) serves a data set if its name begins with the data source, and a split
if that follows somewhere: gsm8k_train_2000.jsonl. Without a split in its name it serves the first one listed in SOURCES:
aime24.jsonl is the test set, fapo_critic_100.jsonl the training set.

What it leaves out: filtering by length (the trainer's), sampling several answers per problem (the trainer's --val-n).
"""

import csv
import itertools
import json
import os
import random
import re
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, NamedTuple

import pyarrow as pa
import pyarrow.parquet as pq
import tyro
from tqdm import tqdm

from compute_score import format_critic_prompt, last_boxed_only_string, remove_boxed

# --- 1. Prompts (paper appendix F), letter by letter ------------------------------------------------------------------

MATH_PROMPT = "{question}\n\nPlease reason step by step, and put your final answer within \\boxed{{}}."
CHOICES = "{question}\nA. {A}\nB. {B}\nC. {C}\nD. {D}"
CHOICE_PROMPT = "{problem}\n\nPlease reason step by step, and put your final answer (only the choice letter) within \\boxed{{}}."

# --- 2. Row schema ----------------------------------------------------------------------------------------------------


def _schema(ground_truth: pa.DataType, *extra: tuple[str, pa.DataType]) -> pa.Schema:
    return pa.schema([
        ("data_source", pa.string()),
        ("prompt", pa.list_(pa.struct([("role", pa.string()), ("content", pa.string())]))),
        ("ability", pa.string()),
        ("reward_model", pa.struct([("style", pa.string()), ("ground_truth", ground_truth)])),
        ("extra_info", pa.struct([("split", pa.string()), ("index", pa.int64()), ("question", pa.string()), *extra])),
    ])  # fmt: skip


REASONING_SCHEMA = _schema(pa.string())
CRITIC_SCHEMA = _schema(pa.int64(), ("total_steps", pa.int64()), ("question_index", pa.int64()), ("subset", pa.string()),
                        ("final_answer_correct", pa.bool_()))  # fmt: skip


def validate_row(row: dict, where: str) -> None:
    """Raises ValueError, naming `where`, the field and its value, for the first field that breaks the schema.

    A row is a judge's if its ability is "math_critic": integer ground_truth in -1 .. total_steps - 1.
    """

    def check(owner: dict, field: str, fine, expected: str):
        value = owner.get(field.rpartition(".")[2])
        if not fine(value):
            raise ValueError(f"{where}: {field} is {str('missing' if value is None else value)[:80]!r}; expected {expected}")
        return value

    def is_text(value) -> bool:
        return isinstance(value, str) and value.strip() != ""

    def is_chat(value) -> bool:
        return isinstance(value, list) and value != [] and all(isinstance(message, dict) for message in value)

    check(row, "data_source", is_text, "a name")
    for message in check(row, "prompt", is_chat, "a list of {role, content}"):
        check(message, "prompt.role", lambda x: x in ("system", "user", "assistant"), "system, user or assistant")
        check(message, "prompt.content", is_text, "a non-empty string")
    ability = check(row, "ability", lambda x: isinstance(x, str), "a string")
    reward_model = check(row, "reward_model", lambda x: isinstance(x, dict), "{style, ground_truth}")
    check(reward_model, "reward_model.style", lambda x: isinstance(x, str), "a string")
    extra = check(row, "extra_info", lambda x: isinstance(x, dict), "{split, index, question, ...}")
    check(extra, "extra_info.split", lambda x: x in ("train", "test"), "train or test")
    check(extra, "extra_info.index", lambda x: type(x) is int, "an integer")  # a bool is none
    check(extra, "extra_info.question", lambda x: isinstance(x, str), "the problem text")
    if ability == "math_critic":
        steps = check(extra, "extra_info.total_steps", lambda x: type(x) is int and x > 0, "a positive integer")
        check(reward_model, "reward_model.ground_truth", lambda x: type(x) is int and -1 <= x < steps, f"-1 .. {steps - 1}")
    else:
        check(reward_model, "reward_model.ground_truth", is_text, "a non-empty string")


# --- 3. One raw row of a data set -> one row (without its index and split) --------------------------------------------


def _pick(raw: dict, columns: tuple[str, ...]) -> object:
    """The first of `columns` that is there and not empty. Raises ValueError naming the columns wanted and those there."""
    for column in columns:
        if raw.get(column) not in (None, ""):
            return raw[column]
    raise ValueError(f"no column {' or '.join(map(repr, columns))}, or it is empty; columns: {', '.join(map(str, raw))}")


def _row(source: "Source", question: str, prompt: str, ground_truth: str, ability: str = "Math", **extra) -> dict:
    return {
        "data_source": source.data_source,
        "prompt": [{"role": "user", "content": prompt}],
        "ability": ability,
        "reward_model": {"style": "rule", "ground_truth": ground_truth},
        "extra_info": {"split": source.split, "index": None, "question": question, **extra},
    }


def build_math(raw: dict, source: "Source", seed: int) -> dict:
    """Problem and final answer, under the hub's column names or those of common copies."""
    question = str(_pick(raw, source.question))
    answer = str(_pick(raw, source.answer)).strip()
    if source.data_source == "gsm8k":  # the worked solution ends in "#### 1,234"
        if "####" not in answer:
            raise ValueError(f"column 'answer' has no '####': {answer[-80:]!r}")
        answer = answer.rsplit("####", 1)[1].strip().replace(",", "")
    if source.data_source.startswith("aime"):  # integers 0-999, some written 025
        if not re.fullmatch(r"\d{1,3}", answer):
            raise ValueError(f"column {' or '.join(source.answer)} is {answer[:80]!r}; expected an integer from 0 to 999")
        answer = str(int(answer))
    return _row(source, question, MATH_PROMPT.format(question=question.strip()), answer)


def build_gpqa(raw: dict, source: "Source", seed: int) -> dict:
    """Four choices in an order that depends on the seed and the question only, so that every build is the same."""
    question = str(_pick(raw, ("Question",)))
    right = str(_pick(raw, ("Correct Answer",))).strip()
    choices = [right] + [str(_pick(raw, (f"Incorrect Answer {i}",))).strip() for i in (1, 2, 3)]
    order = [0, 1, 2, 3]  # positions, not texts: two choices of a question may read the same
    random.Random(f"{seed} {question}").shuffle(order)
    letters = {letter: choices[i] for letter, i in zip("ABCD", order, strict=True)}
    problem = CHOICES.format(question=question, **letters)  # the judge needs the choices, too; the original strips no question
    return _row(source, problem, CHOICE_PROMPT.format(problem=problem), "ABCD"[order.index(0)], ability="General")


def build_critic(raw: dict, source: "Source", seed: int) -> dict:
    """A ready-made row of FAPO-Critic, in the one schema of judge rows. Its prompt stays as it is, byte for byte."""
    for column in ("prompt", "reward_model", "extra_info", "data_source"):
        _pick(raw, (column,))
    prompt, extra = raw["prompt"][0]["content"], raw["extra_info"]
    problem = re.search(r"\[Math Problem\]\n\n(.*?)\n\n\[Ground Truth\]", prompt, re.S)
    subset = raw["data_source"].split("/")[1] if "/" in raw["data_source"] else None
    return _row(
        source, problem[1] if problem else "", prompt, int(_pick(raw["reward_model"], ("ground_truth",))), "math_critic",
        total_steps=int(extra.get("total_steps") or len(re.findall(r"^<paragraph_\d+>$", prompt, re.M))),
        question_index=extra.get("question_index"), subset=subset, final_answer_correct=True,
    )  # fmt: skip


def build_processbench(raw: dict, source: "Source", seed: int) -> dict:
    """A solution in steps and the index of its first wrong one. raw["answer"] is of `with_known_answers`."""
    problem, steps, label = str(_pick(raw, ("problem",))), _pick(raw, ("steps",)), int(_pick(raw, ("label",)))
    if not (isinstance(steps, list) and all(isinstance(step, str) for step in steps)):
        raise ValueError(f"column 'steps' is {str(steps)[:80]!r}; expected a list of strings (a CSV file cannot hold one)")
    style = "tagged" if raw["answer"] else "no_truth"
    prompt = format_critic_prompt(problem, raw["answer"], [step.strip() for step in steps], style)
    return _row(
        source, problem, prompt, label, "math_critic",
        total_steps=len(steps), question_index=None, subset=str(_pick(raw, ("id",))).rsplit("-", 1)[0],
        final_answer_correct=bool(_pick(raw, ("final_answer_correct",))),
    )  # fmt: skip


def with_known_answers(rows: list[dict]) -> list[dict]:
    """The rows of ProcessBench, which has no column for it, with the true answer as far as they tell it, else "".

    A solution whose final answer is correct tells it in its last box, also for the other solutions of the same problem.
    """
    right = [row for row in rows if row.get("final_answer_correct")]
    boxes = [(row.get("problem"), last_boxed_only_string("\n".join(map(str, row.get("steps") or [])))) for row in right]
    answers = {problem: remove_boxed(box) for problem, box in boxes if box}
    return [row | {"answer": answers.get(row.get("problem"), "")} for row in rows]


def build_ready_made(raw: dict, source: "Source", seed: int) -> dict:
    """A row that is in the schema already; nothing is changed, columns outside the schema are dropped."""
    return {field: _pick(raw, (field,)) for field in REASONING_SCHEMA.names}


# --- 4. Where the data sets are ---------------------------------------------------------------------------------------


class Source(NamedTuple):
    """One output file: the task that asks for it, its name, and where its rows come from."""

    task: str
    data_source: str
    split: str
    repo: str  # on the Hugging Face hub
    files: str  # the hub's files, a glob pattern
    build: object  # raw row -> row
    question: tuple[str, ...] = ()  # columns, the first that is there: the hub's name, then those of common copies
    answer: tuple[str, ...] = ()
    local: str = ""  # how local files are called, where not as the data source


SOURCES = [
    Source("dapo", "math-dapo", "train", "open-r1/DAPO-Math-17k-Processed", "all/train-*.parquet", build_math,
           ("prompt", "problem"), ("solution", "answer")),
    Source("aime24", "aime24", "test", "Maxwell-Jia/AIME_2024", "*.parquet", build_math,
           ("Problem", "problem"), ("Answer", "answer")),
    Source("aime25", "aime25", "test", "yentinglin/aime_2025", "*.parquet", build_math,
           ("problem",), ("answer", "solution")),
    Source("gpqa", "gpqa-diamond", "test", "Idavidrein/gpqa", "gpqa_diamond.csv", build_gpqa),
    Source("math500", "math500", "test", "HuggingFaceH4/MATH-500", "test.jsonl", build_math, ("problem",), ("answer",)),
    Source("gsm8k", "gsm8k", "train", "openai/gsm8k", "main/train-*.parquet", build_math, ("question",), ("answer",)),
    Source("gsm8k", "gsm8k", "test", "openai/gsm8k", "main/test-*.parquet", build_math, ("question",), ("answer",)),
    Source("critic", "fapo_critic", "train", "dyyyyyyyy/FAPO-Critic", "train.parquet", build_critic),
    Source("critic", "fapo_critic", "test", "dyyyyyyyy/FAPO-Critic", "test.parquet", build_critic),
    Source("processbench", "processbench", "test", "Qwen/ProcessBench", "*.json", build_processbench),
    Source("processbench", "flawed_positive_bench", "test", "Qwen/ProcessBench", "*.json", build_processbench,
           local="processbench"),  # the rows of ProcessBench with a correct final answer (paper section 4.2)
    Source("fapo-reasoning", "fapo-reasoning", "train", "dyyyyyyyy/FAPO-Reasoning-Dataset", "train.parquet", build_ready_made),
    Source("fapo-reasoning", "fapo-reasoning", "test", "dyyyyyyyy/FAPO-Reasoning-Dataset", "test.parquet", build_ready_made),
]  # fmt: skip
Task = Literal["toy", *dict.fromkeys(source.task for source in SOURCES), "all"]


def local_files(source: Source, source_dir: Path) -> list[Path]:
    """The files in `source_dir` that serve this data set and split, by the rule of the module's docstring."""
    if not source_dir.is_dir():
        raise OSError(f"--source-dir: {source_dir} is not a directory")
    name = (source.local or source.data_source).replace("-", "_")
    main_split = next(other.split for other in SOURCES if other.data_source == source.data_source)
    pattern = re.compile(re.escape(name) + r"(?![a-z0-9])(?:.*?_(train|test)(?![a-z0-9]))?.*\.(?:parquet|jsonl?|csv)")
    found = {path: pattern.fullmatch(path.name.lower().replace("-", "_")) for path in sorted(source_dir.iterdir())}
    return [path for path, match in found.items() if match and (match[1] or main_split) == source.split]


def hub_files(source: Source) -> list[Path]:
    """The data set's files from the Hugging Face hub (or its cache). Raises OSError with the remedy."""
    from huggingface_hub import snapshot_download

    print(f"{source.data_source} {source.split}: fetching {source.repo} ({source.files}) from the hub ...", flush=True)
    try:
        folder = Path(snapshot_download(source.repo, repo_type="dataset", allow_patterns=[source.files]))
    except OSError as error:
        raise OSError(
            f"{source.repo}: cannot be fetched from the hub ({' '.join(str(error).split())[:200]}); if it is gated, accept its "
            "terms on its page and set HF_TOKEN; without a network use --source-dir"
        ) from error
    found = sorted(folder.rglob(source.files))
    if not found:
        raise OSError(f"{source.repo}: has no file {source.files}; download it by hand and use --source-dir")
    return found


def read_raw(path: Path) -> Iterator[dict]:
    """The rows of a parquet, JSON (a list of objects), JSONL or CSV file. Raises ValueError naming a file that is not one."""
    kind = path.suffix.lower()
    try:
        if kind == ".parquet":
            for batch in pq.ParquetFile(path).iter_batches(batch_size=1000):
                yield from batch.to_pylist()
        elif kind == ".csv":
            with path.open(newline="", encoding="utf-8-sig") as file:  # spreadsheets begin a file with a byte order mark
                yield from csv.DictReader(file)
        else:
            text = path.read_text(encoding="utf-8-sig")
            yield from json.loads(text) if text.lstrip().startswith("[") else map(json.loads, filter(str.strip, text.split("\n")))
    except (ValueError, csv.Error) as error:  # pyarrow's and json's errors are ValueErrors
        raise ValueError(f"{path}: not a readable {kind} file: {error}") from error


# --- 5. Building ------------------------------------------------------------------------------------------------------


def read_rows(path: Path, needed: list[str]) -> list[dict]:
    """The rows of a parquet or JSONL file of the row schema, each with the columns `needed` (a null will do for extra_info).

    Raises ValueError naming the file, the row and what is wrong with it.
    """
    if path.suffix not in (".parquet", ".jsonl"):
        raise ValueError(f"{path}: the name must end with .parquet or .jsonl")
    if not path.is_file():
        raise ValueError(f"{path}: no such file")
    rows = []
    try:
        if path.suffix == ".parquet":
            rows = pq.read_table(path).to_pylist()
        else:
            for line in path.read_text(encoding="utf-8").rstrip("\n").split("\n"):
                rows.append(dict(json.loads(line)))
    except (ValueError, TypeError) as error:  # pyarrow's are ValueErrors, too
        place = f", line {len(rows) + 1}: not a JSON object" if path.suffix == ".jsonl" else ": cannot be read as parquet"
        raise ValueError(f"{path}{place} ({error})") from None
    if not rows:
        raise ValueError(f"{path}: no rows")
    for number, row in enumerate(rows):
        for column in needed:
            if row.get(column) is None and (column not in row or column != "extra_info"):
                raise ValueError(f"{path} row {number}: no {column!r} (there are {', '.join(row)}); see prepare_data.py")
        if not isinstance(row["reward_model"], dict) or row["reward_model"].get("ground_truth") is None:
            text = f"{path} row {number}: reward_model is {row['reward_model']!r}; it must be a dict with ground_truth"
            raise ValueError(f'{text} ("" where the reward function needs none)')
        if not isinstance(row.get("response", ""), str):
            raise ValueError(f"{path} row {number}: response is {row['response']!r}; it must be a string")
    return rows


@dataclass
class Config:
    tasks: list[Task]
    """Which data sets: one or more. `all` is every public one (with --source-dir: every one that has a file there); `toy`
    builds the offline miniature and is not part of `all`."""
    out_dir: Path = Path("data")
    """Where the parquet files go; ~ is expanded."""
    source_dir: Path | None = None
    """Take the data sets from files in this directory instead of the hub; ~ is expanded."""
    seed: int = 0
    """For the order of GPQA's choices, and for the toy world."""
    toy_models: tuple[Literal["policy", "judge"], ...] = ("policy", "judge")
    """Which models of the toy world to warm-start, side by side: the policy takes two minutes, the judge four. May be empty."""
    toy_kind: Literal["standard", "narrow_judge", "weak_policy"] = "standard"
    """narrow_judge: the judge is shown forgotten carries only; weak_policy: the policy is wrong more often than right."""
    repeat: int = 1
    """Write all rows this many times over. For exchange with verl, which averages over k answers by k copies; the trainer
    here does not need it (--val-n)."""


def built_rows(source: Source, files: list[Path], seed: int) -> Iterator[dict]:
    """The rows of one data set in order, each built and validated. Raises ValueError naming file, row and column."""
    index = 0
    for path in files:
        raw_rows = read_raw(path)
        if source.task == "processbench":
            raw_rows = with_known_answers(list(raw_rows))
            told = sum(raw["answer"] != "" for raw in raw_rows)
            print(f"{path.name}: {told} of {len(raw_rows)} rows with a known true answer; the others' prompts go without it")
        for number, raw in enumerate(raw_rows):
            try:
                row = source.build(raw, source, seed)
            except (ValueError, TypeError, AttributeError, LookupError) as error:
                raise ValueError(f"{path}, row {number}: {error}") from error
            if source.data_source == "flawed_positive_bench" and not row["extra_info"]["final_answer_correct"]:
                continue
            if source.build is not build_ready_made:
                row["extra_info"]["index"] = index
            validate_row(row, f"{path}, row {number}")
            yield row
            index += 1


def write_source(source: Source, files: list[Path], config: Config) -> int:
    """Writes OUT_DIR/<data_source>_<split>.parquet (whole or not at all), prints what it wrote, returns the row count."""
    schema = CRITIC_SCHEMA if source.task in ("critic", "processbench") else REASONING_SCHEMA
    name = f"{source.data_source} {source.split}"
    out = config.out_dir / f"{source.data_source}_{source.split}.parquet"
    if out.resolve() in [path.resolve() for path in files]:
        raise ValueError(f"--out-dir: {out} is also a source file; use another directory")
    partial, count, example = out.with_suffix(".partial"), 0, None
    try:
        with pq.ParquetWriter(partial, schema) as writer:
            for _ in range(config.repeat):
                rows = iter(tqdm(built_rows(source, files, config.seed), desc=name, unit=" rows"))
                while chunk := list(itertools.islice(rows, 1000)):
                    example = example or chunk[0]
                    writer.write_table(pa.Table.from_pylist(chunk, schema=schema))
                    count += len(chunk)
        if example is None:
            raise ValueError(f"{name}: no rows in {', '.join(map(str, files))}")
        os.replace(partial, out)
    finally:
        partial.unlink(missing_ok=True)
    print(f"{out}: {count} rows from {', '.join(path.name for path in files)}; the first one:")
    print("  " + json.dumps(example, ensure_ascii=False)[:1500])
    return count


def prepare(config: Config) -> dict[str, int]:
    """Builds what the config asks for; returns rows written per file name. Raises ValueError or OSError in one line."""
    if config.repeat < 1:
        raise ValueError(f"--repeat: {config.repeat} is too small; use 1 or more")
    config.out_dir = config.out_dir.expanduser()
    config.out_dir.mkdir(parents=True, exist_ok=True)
    found, failed = {}, {}
    for source in SOURCES:
        if source.task in config.tasks or "all" in config.tasks:
            try:
                found[source] = local_files(source, config.source_dir.expanduser()) if config.source_dir else hub_files(source)
            except OSError as error:
                if config.source_dir or source.task in config.tasks:
                    raise
                failed[source.task] = error  # `all` goes on: one gated data set must not cost the others
                print(f"{source.data_source} {source.split}: skipped: {error}", flush=True)
    for task in config.tasks:
        sources = [source for source in found if source.task == task]
        if sources and not any(found[source] for source in sources):
            names = ", ".join(f"{source.local or source.data_source}[_{source.split}]*" for source in sources)
            raise OSError(f"--tasks {task}: no file in {config.source_dir} is called {names} (parquet, json, jsonl or csv)")
    counts = {}
    for source, files in found.items():
        if files:
            counts[f"{source.data_source}_{source.split}.parquet"] = write_source(source, files, config)
        else:
            print(f"{source.data_source} {source.split}: skipped, {config.source_dir} has no file for it")
    if "toy" in config.tasks:
        from toy import models

        models.build(config.out_dir, config.seed, config.toy_models, config.toy_kind)
    if failed:
        raise OSError(f"--tasks all: {', '.join(failed)} could not be fetched, see above; the others are in {config.out_dir}")
    return counts


def main() -> None:
    config = tyro.cli(Config, description=__doc__)
    try:
        prepare(config)
    except (ValueError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(2)


if __name__ == "__main__":
    main()
