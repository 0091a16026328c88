"""Convert data sets to Parquet files in the trainer's row schema, which is the schema of verl.

    python prepare_data.py --tasks dapo aime24 aime25 gpqa --out-dir data     # the paper's problems
    python prepare_data.py --tasks critic processbench --out-dir data         # to train and evaluate a judge
    python prepare_data.py --tasks gsm8k --out-dir data --source-dir ~/files  # from local files, no network
    python prepare_data.py --tasks reasoning_gym:chain_sum --out-dir data     # a task of reasoning-gym

Each data set becomes OUT_DIR/<data_source>_<split>.parquet with these fields:

    data_source  a string, which is part of the names of metrics: val/<data_source>/...
    ability      "Math", "General", "Reasoning" or "math_critic"
    prompt       [{"role": "user", "content": str}]
    reward_model {"style": "rule", "ground_truth": str}; in judge rows the ground truth is an integer: the
                 index of the first wrong paragraph, or -1
    extra_info   {"split", "index", "question", ...}; judge rows also have total_steps and subset

A file in --source-dir (Parquet, JSON, JSONL or CSV) belongs to a data set if its name starts with the data
source. The first word "train" or "test" in the name gives the split (gsm8k_train_2000.jsonl). Without such a
word, the file belongs to the first split of the data set (aime24.jsonl: test). Files of other splits, such as
gsm8k_dev.jsonl, are ignored.

Needs compute_score.py, command_line.py and reward_worker.py; also toy/ for the toy world, and
recipes/gym_tasks.py for reasoning_gym (see MAKERS).
Not covered: data larger than memory, filters (see the trainer).
"""

import contextlib
import csv
import importlib
import json
import math
import os
import re
from dataclasses import dataclass
from pathlib import Path
from random import Random
from typing import Annotated, Literal, NamedTuple, get_args

import pyarrow as pa
import pyarrow.parquet as pq
import tyro

from command_line import IN_WORDS, cli, one_line_errors
from compute_score import (
    TAIL_CHARS,
    format_critic_prompt,
    last_boxed_only_string,
    remove_boxed,
    whole_number,
    written_out,
)

# --- 1. Prompts (paper appendix F), verbatim --------------------------------------------------------
PROMPT = "{question}\n\nPlease reason step by step, and put your final answer{what} within \\boxed{{}}."
CHOICES = "{}\nA. {}\nB. {}\nC. {}\nD. {}"
QUESTION = "problem|Problem|prompt|question|Question"  # column names in the data sets
ANSWER = "answer|Answer|expected_answer|final_answer"
# What data sets write instead of an answer ("proof" and "notfound" in NuminaMath). A policy that boxes such a
# word must not be rewarded. "No solution" is an answer.
NO_ANSWER = re.compile(
    r"(?:proof|see (?:the )?(?:proof|solution|figure)|not[ _-]?(?:found|available|applicable|given)|n/a"
    r"|none|null|nan|unknown|no[ _-]?answer(?:[ _-]?(?:found|extracted))?|-+|\?+)\.?",
    re.IGNORECASE,
)

# --- 2. Row schema and files --------------------------------------------------------------------------------
TEXT = pa.string()
INT = pa.int64()


def _schema(ground_truth, **extra):
    return pa.schema(
        {
            "data_source": TEXT,
            "prompt": pa.list_(pa.struct({"role": TEXT, "content": TEXT})),
            "ability": TEXT,
            "reward_model": pa.struct({"style": TEXT, "ground_truth": ground_truth}),
            "extra_info": pa.struct({"split": TEXT, "index": INT, "question": TEXT} | extra),
        }
    )


REASONING = _schema(TEXT)
CRITIC = _schema(
    INT,
    total_steps=INT,
    question_index=INT,
    subset=TEXT,
    final_answer_correct=pa.bool_(),
)
SUFFIXES = (".parquet", ".jsonl", ".json", ".csv")
ROWS_AT_ONCE = 1000  # in a group of rows of a Parquet file
WITH_MARK = "utf-8-sig"  # Files from spreadsheets may start with a byte order mark.


def validate_row(row: dict, where: str) -> None:
    """Raise ValueError if the label of a judge row is neither -1 nor the index of a paragraph."""
    truth = row["reward_model"]["ground_truth"]
    if row["ability"] != "math_critic":
        return
    steps = (row["extra_info"] or {}).get("total_steps")
    try:
        count = whole_number(steps)
    except (TypeError, ValueError):  # for example None
        count = 0
    if count < 1 or truth not in range(-1, count):
        raise ValueError(
            f"{where}: reward_model.ground_truth is {truth!r}, but extra_info.total_steps is {steps!r}; the "
            "ground truth must be between -1 and total_steps - 1, and total_steps must be a whole number"
        )


def read_table(path: Path) -> pa.Table:
    """Read a Parquet file. pyarrow cannot read 2 GiB of nested texts at once."""
    file = pq.ParquetFile(path)
    return pa.Table.from_batches(file.iter_batches(ROWS_AT_ONCE), file.schema_arrow)


def read_rows(path: Path, needed=()) -> list[dict]:
    """Read the rows of a Parquet, JSONL, JSON or CSV file.

    A JSON file contains a list of objects, or a sequence of objects that may span several lines each. If
    there are `needed` columns, each row must have these columns, a data source and a ground truth. Raises
    ValueError.
    """
    kind = path.suffix.lower()
    if kind not in SUFFIXES:
        raise ValueError(f"{path}: the name must end in .parquet, .jsonl, .json or .csv")
    if not path.is_file():
        raise ValueError(
            f"{path}: the file does not exist; check the path, or write the file with prepare_data.py"
        )
    place = path
    rows = []
    try:
        if kind == ".parquet":
            rows = read_table(path).to_pylist()
        elif kind == ".csv":
            with path.open(newline="", encoding=WITH_MARK) as file:
                for number, row in enumerate(csv.DictReader(file)):
                    if None in row:  # Otherwise, a part of the question would become the answer.
                        place = f"{path}, row {number}"
                        raise ValueError("it has more cells than the header; quote texts with commas")
                    rows.append(row)
        else:
            text = path.read_text(encoding=WITH_MARK)
            if text.lstrip().startswith("["):
                rows = list(map(dict, json.loads(text)))
            else:
                unit, first, end = "line", 1, "\n"
                if re.match(r"\s*\{\s*\n", text):  # Each object spans several lines.
                    unit, first, end = "object", 0, r"(?m)(?<=^\})\s*$"
                for number, part in enumerate(re.split(end, text), first):
                    place = f"{path}, {unit} {number}"
                    if part.strip():
                        rows.append(dict(json.loads(part)))
    except (ValueError, TypeError, OSError, RecursionError, csv.Error) as error:  # or a subclass
        raise ValueError(f"{place}: cannot be read as a {kind} file: {error}") from error
    if not rows:
        raise ValueError(f"{path}: the file has no rows")
    if needed:
        for number, row in enumerate(rows):
            check_columns(row, needed, f"{path}, row {number}")
    return rows


@contextlib.contextmanager
def errors_at(where: str):
    """Name the place of a row in a ValueError that is raised inside this context."""
    try:
        yield
    except ValueError as error:
        raise ValueError(f"{where}: {error}") from error


def check_columns(row: dict, needed, where: str) -> None:
    """Raise ValueError if a column of a row is missing or has another type than the row schema requires."""
    for column in needed:
        if column not in row:
            names = ", ".join(row)
            raise ValueError(
                f"{where}: the column {column!r} is missing; the row has only {names}; see docs/data.md"
            )
    source, extra = row.get("data_source"), row.get("extra_info")
    if not isinstance(source, str):
        raise ValueError(
            f"{where}: data_source is {source!r:.60}; it must be a string that names the data set"
        )
    if not isinstance(extra, dict | None):
        raise ValueError(f"{where}: extra_info is {extra!r:.60}; it must be an object, such as {{}}")
    about = row.get("reward_model")
    truth = None
    if isinstance(about, dict):
        truth = about.get("ground_truth")
    if truth is None or truth != truth:  # Empty cells of a table may be NaN.
        raise ValueError(f"{where}: reward_model is {about!r:.60}; it needs a ground_truth")


def checked_row(row: dict, is_table: bool) -> dict:
    """Return the row with a prompt that chat templates accept. Raises ValueError if the row is malformed.

    If the row is from a table, keys with the value None are dropped at every level, because a table stores
    None for missing keys.
    """
    prompt = row["prompt"]
    if not isinstance(prompt, list) or not prompt:
        raise ValueError(
            f"prompt is {prompt!r:.60}; it must be a non-empty list of {{role, content}} messages"
        )
    for column in ("images", "videos", "audios"):  # Otherwise, the policy would read "<image>" as text.
        if row.get(column):
            raise ValueError(f"the column {column} is not empty; only prompts of text are supported")
    tools = row.get("tools")
    if isinstance(tools, str):
        with contextlib.suppress(ValueError):
            tools = json.loads(tools or "null")
    if not isinstance(tools, list | None):
        raise ValueError(
            f"tools is {tools!r:.60}; it must be a list of JSON schemas for the chat template; "
            "rename the column if it is something else"
        )
    if is_table:
        prompt, tools = without_nulls(prompt), without_nulls(tools)
    row = row | {"prompt": [checked_message(message) for message in prompt]}
    if tools:
        row["tools"] = tools
    return row


def without_nulls(value):
    """Return a value from JSON without the keys whose value is None, at every level."""
    if isinstance(value, list):
        return [without_nulls(inner) for inner in value]
    if isinstance(value, dict):
        return {key: without_nulls(inner) for key, inner in value.items() if inner is not None}
    return value


def checked_message(message) -> dict:
    """Return a message with its text parts joined. Raises ValueError if the message is malformed.

    Keys with the value None are dropped, because some templates check only whether a key exists.
    """
    if not isinstance(message, dict) or not isinstance(message.get("role"), str):
        raise ValueError(
            f"prompt contains the message {message!r:.60}; each message must be an object "
            "with role and content"
        )
    kept = {key: value for key, value in message.items() if value is not None}
    content = kept.get("content")
    if content is None and kept.get("tool_calls"):  # Only calls: some templates would write "None".
        content = ""
    if isinstance(content, list):
        with contextlib.suppress(TypeError, LookupError):  # A part is not an object with a text.
            content = "".join(part["text"] for part in content)
    if not isinstance(content, str):
        raise ValueError(
            f"prompt contains a {message['role']} message with the content {content!r:.60}; "
            "the content must be a string or a list of text parts"
        )
    return kept | {"content": content}


# --- 3. One raw row of a data set -> one row (without its index) --------------------------------------------
def _pick(raw, columns: str):
    """Return the value of the column that `_column` chooses."""
    return _column(raw, columns)[1]


def _text(raw, columns: str) -> str:
    """Return the value of the column that `_column` chooses. Raise ValueError if it is not a string."""
    column, text = _column(raw, columns)
    if not isinstance(text, str):
        raise ValueError(f"column {column!r} is {text!r:.80}; it must be a string")
    return text


def _column(raw, columns: str) -> tuple:
    """Return (name, value) of the first nonempty column among `columns` ("this|that").

    Raises ValueError if there is none.
    """
    for column in columns.split("|"):
        value = raw.get(column)
        if value is not None and value == value and str(value).strip():  # NaN does not equal itself.
            return column, value
    tried = columns.replace("|", " or ")
    raise ValueError(f"missing or empty column: {tried}; the row's columns are {', '.join(map(str, raw))}")


def _row(source: "Source", question: str, prompt: str, ground_truth, ability: str = "Math", **extra) -> dict:
    return {
        "data_source": source.data_source,
        "prompt": [{"role": "user", "content": prompt}],
        "ability": ability,
        "reward_model": {"style": "rule", "ground_truth": ground_truth},
        "extra_info": {"split": source.split, "index": None, "question": question, **extra},
    }


def _final_answer(raw, columns):
    """Return (column, final answer). Raise ValueError if it is neither a string nor a finite number."""
    if any(column in raw for column in ANSWER.split("|")):
        columns = ANSWER  # A column `solution` is then a worked solution.
    column, answer = _column(raw, columns)
    if type(answer) not in (str, int, float) or answer in (math.inf, -math.inf):  # such as 1e400
        raise ValueError(f"column {column!r} is {answer!r:.80}; it must be a string or a number, and finite")
    answer = written_out(answer).strip()
    if last_boxed_only_string(answer) not in (None, answer):
        raise ValueError(
            f"column {column!r} is a worked solution ({answer[:60]!r}); add a column 'answer' "
            "with only the final answer"
        )
    return column, answer


def build_math(raw: dict, source: "Source", seed: int) -> dict | None:
    """Build a row from a raw row with a problem and its final answer, in any of several columns.

    Returns None if the answer says that there is none.
    """
    question = _text(raw, QUESTION)
    columns = ANSWER
    if source.task in ("dapo", "aime25"):  # Some copies have the final answer in this column.
        columns += "|solution"
    column, answer = _final_answer(raw, columns)
    if source.data_source == "gsm8k":  # The worked solution ends in "#### 1,234".
        _, mark, number = answer.rpartition("####")
        number = number.strip().replace(",", "")
        if not (mark and number):
            raise ValueError(f"column {column!r} ends in {answer[-80:]!r}; it must end in '#### ANSWER'")
        answer = number
    bare = re.sub(r"\\(?:boxed|text|mathrm)|[\\{}$<>()\[\]]", "", answer)
    if NO_ANSWER.fullmatch(bare.strip()):  # The answer says, perhaps in a box, that there is none.
        return None
    if source.data_source.startswith("aime"):  # integers from 0 to 999, some written 025
        if not re.fullmatch(r"\d{1,3}", answer):
            raise ValueError(f"column {column!r} is {answer[:80]!r}; it must be an integer between 0 and 999")
        answer = str(int(answer))
    if len(f"\\boxed{{{answer}}}") > TAIL_CHARS:
        raise ValueError(
            f"the answer {answer[:60]!r}... has {len(answer)} characters, but only the last {TAIL_CHARS} "
            "characters of a solution are searched; add a column 'answer' with only the final answer"
        )
    return _row(source, question, PROMPT.format(question=question.strip(), what=""), answer)


def build_gpqa(raw: dict, source: "Source", seed: int) -> dict:
    """Build a row with four choices. Their order depends only on the seed and the question."""
    question = _pick(raw, "Question")
    columns = ["Correct Answer", "Incorrect Answer 1", "Incorrect Answer 2", "Incorrect Answer 3"]
    choices = {column: str(_pick(raw, column)).strip() for column in columns}
    # Names of columns are shuffled because two choices may have the same text.
    Random(f"{seed} {question}").shuffle(columns)
    shuffled = [choices[column] for column in columns]
    problem = CHOICES.format(question, *shuffled)  # The judge also needs the choices.
    prompt = PROMPT.format(question=problem, what=" (only the choice letter)")
    return _row(source, problem, prompt, "ABCD"[columns.index("Correct Answer")], ability="General")


def build_critic(raw: dict, source: "Source", seed: int) -> dict:
    """Convert a row of FAPO-Critic to the schema of judge rows without changing its prompt."""
    messages = _pick(raw, "prompt")
    truth = _pick(_pick(raw, "reward_model"), "ground_truth")
    _, _, subset = _pick(raw, "data_source").partition("/")
    prompt = messages[0]["content"]
    problem = re.search(r"\[Math Problem\]\n\n(.*?)\n\n\[Ground Truth\]", prompt, re.S)
    steps = re.findall(r"^<paragraph_\d+>$", prompt, re.M)
    return _row(
        source,
        problem[1] if problem else prompt,
        prompt,
        whole_number(truth),
        "math_critic",
        total_steps=len(steps),
        question_index=_pick(raw, "extra_info").get("question_index"),
        subset=subset or None,
        final_answer_correct=True,
    )


def build_processbench(raw: dict, source: "Source", seed: int) -> dict:
    """Build a judge row from a solution in steps. `add_answers` must have added raw["answer"]."""
    problem = _text(raw, "problem")
    steps = _pick(raw, "steps")
    if type(steps) is not list or not all(isinstance(step, str) for step in steps):
        raise ValueError(f"column 'steps' is {steps!r:.80}; it must be a list of strings")
    is_correct = _pick(raw, "final_answer_correct")
    if is_correct not in (True, False):
        raise ValueError(f"column 'final_answer_correct' is {is_correct!r:.80}; it must be true or false")
    paragraphs = [step.strip() for step in steps]
    style = "tagged" if raw["answer"] else "no_truth"
    return _row(
        source,
        problem,
        format_critic_prompt(problem, raw["answer"], paragraphs, style),
        whole_number(_pick(raw, "label")),
        "math_critic",
        total_steps=len(steps),
        subset=str(_pick(raw, "id")).rsplit("-", 1)[0],
        final_answer_correct=bool(is_correct),
    )


# --- 4. Where the data sets are -----------------------------------------------------------------------------
class Source(NamedTuple):  # An output file and the source of its rows.
    task: str
    data_source: str
    split: str
    repo: str  # on the Hugging Face Hub
    files: str  # glob pattern of the files on the Hub


SOURCES = [
    Source(*line.split())
    for line in """\
dapo         math-dapo    train open-r1/DAPO-Math-17k-Processed all/train-*.parquet
aime24       aime24       test  Maxwell-Jia/AIME_2024           *.parquet
aime25       aime25       test  yentinglin/aime_2025            *.parquet
gpqa         gpqa-diamond test  Idavidrein/gpqa                 gpqa_diamond.csv
math500      math500      test  HuggingFaceH4/MATH-500          test.jsonl
gsm8k        gsm8k        train openai/gsm8k                    main/train-*.parquet
gsm8k        gsm8k        test  openai/gsm8k                    main/test-*.parquet
critic       fapo_critic  train dyyyyyyyy/FAPO-Critic           train.parquet
critic       fapo_critic  test  dyyyyyyyy/FAPO-Critic           test.parquet
processbench processbench test  Qwen/ProcessBench               *.json""".splitlines()
]
# Builders return the row of a raw row, or None to leave it out. All other tasks have build_math.
BUILDERS = {"gpqa": build_gpqa, "critic": build_critic, "processbench": build_processbench}
Task = Literal["toy", *dict.fromkeys(source.task for source in SOURCES), "all"]
# Modules that make rows themselves, with a function make_rows(task, settings) -> {name: rows}.
MAKERS = {"toy": "toy.toy_world", "reasoning_gym": "recipes.gym_tasks"}

HELD_OUT = {"validation", "valid", "val", "dev", "eval"}  # names of splits that are not in SOURCES


def serves(path: Path, source: Source) -> bool:
    """Return whether a local file belongs to this data set and split (rule: see the module's docstring)."""
    words = re.split("[^a-z0-9]+", path.stem.lower())
    name = re.split("[-_]", source.data_source)
    if path.suffix.lower() not in SUFFIXES or words[: len(name)] != name or not HELD_OUT.isdisjoint(words):
        return False
    for word in words:
        if word in ("train", "test"):
            return word == source.split
    first = next(other for other in SOURCES if other.data_source == source.data_source)
    return source.split == first.split


def local_files(source: Source, source_dir: Path) -> list[Path]:
    """Return the files in `source_dir` for this data set and split. Raise OSError if there are none."""
    files = [path for path in sorted(source_dir.iterdir()) if serves(path, source)]
    if not files:
        name = source.data_source
        raise OSError(
            f"--source-dir {source_dir}: there is no file for {name} (split {source.split}); add one, such "
            f"as {name}_{source.split}.jsonl"
        )
    return files


def hub_files(source: Source) -> list[Path]:
    """Download a data set from the Hugging Face Hub or find it in the cache. Raise OSError on failure."""
    from huggingface_hub import snapshot_download

    print(f"{source.data_source} {source.split}: fetching {source.repo} ({source.files}) ...")
    try:
        folder = snapshot_download(source.repo, repo_type="dataset", allow_patterns=[source.files])
    except OSError as error:
        why = " ".join(str(error).split())[:200]
        remedy = "if it is gated, accept its terms and set HF_TOKEN, or pass --source-dir"
        raise OSError(f"--tasks {source.task}: cannot download {source.repo} ({why}); {remedy}") from error
    files = sorted(Path(folder).rglob(source.files))
    if not files:
        raise OSError(
            f"--tasks {source.task}: {source.repo} has no file that matches {source.files}; "
            "download the data and pass --source-dir"
        )
    return files


# --- 5. Building --------------------------------------------------------------------------------------------
@dataclass
class Config:
    # Data sets to convert. all: every public data set, but not toy (with --source-dir: only those that have a
    # file there). reasoning_gym:NAME or reasoning_gym:NAME:{"field": value}: a task of the package
    # reasoning-gym, with optional settings.
    tasks: list[Task | str]
    out_dir: Path = Path("data")  # Directory of the Parquet files.
    # Directory of local files to convert. Default: download from the Hub.
    source_dir: Annotated[Path | None, IN_WORDS] = None
    seed: int = 0  # Random seed for the order of GPQA's choices and the problems of toy and reasoning_gym.


def add_answers(raw_rows: list[dict]) -> None:
    """Add a column `answer` to rows of ProcessBench: the last box of a correct solution, or "" without one.

    ProcessBench does not contain the answer anywhere else.
    """
    answers = {}
    for raw in raw_rows:
        solution = "\n".join(map(str, raw.get("steps") or []))
        box = last_boxed_only_string(solution)
        if box and raw.get("final_answer_correct"):
            answers[str(raw.get("problem"))] = remove_boxed(box)
    for raw in raw_rows:
        raw["answer"] = answers.get(str(raw.get("problem")), "")


def write_source(source: Source, files: list[Path], config: Config) -> dict[str, int]:
    """Build, validate and write the rows of a data set, and return {file name: number of rows}.

    The file is OUT_DIR/<data_source>_<split>.parquet. Raises ValueError.
    """
    out = config.out_dir / f"{source.data_source}_{source.split}.parquet"
    if out.resolve() in [path.resolve() for path in files]:
        raise ValueError(f"--out-dir {config.out_dir}: {out} is also an input file; pass another directory")
    schema = CRITIC if source.task in ("critic", "processbench") else REASONING
    build = BUILDERS.get(source.task, build_math)
    rows = []
    left_out = []
    for path in files:
        raw_rows = read_rows(path)
        if source.task == "processbench":
            add_answers(raw_rows)
        for number, raw in enumerate(raw_rows):
            where = f"{path}, row {number}"
            try:
                row = build(raw, source, config.seed)
                if row is None:
                    left_out.append(where)
                    continue
                row["extra_info"]["index"] = len(rows)
                pa.array([row], pa.struct(schema))  # An error about the whole table would not name the row.
            except (ValueError, TypeError, AttributeError, LookupError, OverflowError) as error:
                raise ValueError(f"{where}: {error}") from error
            validate_row(row, where)
            rows.append(row)
    if left_out:
        print(
            f"{source.data_source} {source.split}: left out {len(left_out)} rows whose answer is a word "
            f'for "no answer", such as "proof" (the first: {left_out[0]})'
        )
    if not rows:
        raise ValueError(f"{left_out[0]}: this row and all others have no answer; add a column 'answer'")
    return write_table(out, rows, schema, ", ".join(path.name for path in files))


def write_table(out: Path, rows: list[dict], schema=None, names: str = "") -> dict[str, int]:
    """Write rows to `out`, either completely or not at all, and return {file name: number of rows}.

    If there are `names` of sources, the first row is shown.
    """
    table = pa.Table.from_pylist(rows, schema=schema)
    replaced = ""
    with contextlib.suppress(OSError, ValueError):  # There is no such file, or it is not a Parquet file.
        before = pq.read_metadata(out).num_rows
        if before != len(rows):
            replaced = f" (replaces {before} rows)"
    partial = out.with_suffix(f".{os.getpid()}.partial")  # Another process may be writing the same file.
    try:
        pq.write_table(table, partial, row_group_size=ROWS_AT_ONCE)
        partial.replace(out)
    finally:
        partial.unlink(missing_ok=True)
    text = f"{out}: {len(rows)} rows{replaced}"
    if names:
        first = json.dumps(rows[0], ensure_ascii=False)[:1500]
        text += f" from {names}; the first row:\n  {first}"
    print(text)
    return {out.name: len(rows)}


def write_made(spec: str, config: Config) -> dict[str, int]:
    """Write the rows that a module in MAKERS makes, and return {file name: number of rows}.

    `spec` is "toy", "reasoning_gym:NAME" or "reasoning_gym:NAME:JSON".
    """
    name, _, task = spec.partition(":")
    task, _, text = task.partition(":")
    settings = {"seed": config.seed}
    try:
        settings |= json.loads(text or "{}")
    except (ValueError, TypeError) as error:
        raise ValueError(f"--tasks {spec}: {text} is not a JSON object ({error}); correct it") from error
    maker = importlib.import_module(MAKERS[name])
    try:
        with errors_at(f"--tasks {spec}"):
            made = maker.make_rows(task, settings)
    except ImportError as error:
        raise OSError(f"--tasks {spec}: {error}; run pip install -r requirements-extra.txt") from error
    for split, rows in made.items():
        if not rows:
            raise ValueError(f"--tasks {spec}: the task has no {split} rows; pass a larger size or range")
    counts = {}
    names = ""
    if task:
        names = f"{spec} (seed {config.seed})"
    for rows in made.values():
        stem = f"{rows[0]['data_source']}_{rows[0]['extra_info']['split']}"
        counts |= write_table(config.out_dir / f"{stem}.parquet", rows, None, names)
    if name == "toy":
        maker.copy_models(config.out_dir)
    return counts


def prepare(config: Config) -> dict[str, int]:
    """Convert the data sets and return {file name: number of rows}. Raises ValueError or OSError."""
    source_dir = config.source_dir
    if source_dir and not source_dir.is_dir():
        raise OSError(f"--source-dir {source_dir}: must be an existing directory")
    generated = []
    for task in config.tasks:
        if task.startswith("reasoning_gym:"):
            generated.append(task)
        elif task not in get_args(Task):
            choices = ", ".join(get_args(Task))
            raise ValueError(f"--tasks {task}: unknown task; choose from {choices}, reasoning_gym:NAME")
    names = [task.split(":")[1] for task in generated]
    for name in names:
        if names.count(name) > 1:
            raise ValueError(
                f"--tasks reasoning_gym:{name}: occurs twice; pass it once, or use a separate "
                "--out-dir for each run"
            )
    if "toy" in config.tasks and {"critic", "all"} & set(config.tasks):
        raise ValueError("--tasks: toy and critic (in all) write files of the same name; use two --out-dirs")
    try:
        config.out_dir.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise OSError(f"--out-dir {config.out_dir}: {error.strerror}; pass another directory") from error
    if "toy" in config.tasks:
        generated.append("toy")
    counts = {}
    for task in generated:
        counts |= write_made(task, config)
    built = set()
    failed = {}
    for source in SOURCES:
        if source.task not in config.tasks and "all" not in config.tasks:
            continue
        try:
            if source_dir:
                files = local_files(source, source_dir)
            else:
                files = hub_files(source)
        except OSError as error:  # A gated data set must not affect the others.
            failed[source.task] = str(error)
            print(f"{source.data_source} {source.split}: skipped: {error}")
            continue
        counts |= write_source(source, files, config)
        built.add(source.task)
    errors = []
    for task, why in failed.items():
        # With --source-dir, one split of a data set suffices; with `all`, a data set may have no files.
        if not source_dir or not (task in built or "all" in config.tasks):
            errors.append(why)
    if errors:
        raise OSError("; ".join(errors))
    if not counts:
        raise ValueError(
            "--tasks: there is nothing to convert; name a task, or add its files to --source-dir"
        )
    return counts


def main() -> None:
    config = cli(Config, __doc__, markers=[tyro.conf.DisallowNone])
    with one_line_errors():
        prepare(config)


if __name__ == "__main__":
    main()
