"""What a run reads, and its messages about invalid input."""

import contextlib
import copy
import dataclasses
import json
import random
import re
import shutil
import signal
from datetime import datetime, timedelta
from pathlib import Path
from types import SimpleNamespace

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from torch.distributed.checkpoint import CheckpointException
import tyro
from tokenizers import Tokenizer
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForImageTextToText
from transformers import AutoTokenizer, GenerationConfig

import grpo_trainer
import reward_loop
import run as run_file
import run_folder
from causal_lm import check_reading
from policy import Policy, RanksLost, Sample
from played import toy_config
from rollout import model_files
from run import load_rows
from test_grpo_trainer import judged, prepared, run_config, scored
from tiny import a_step, add_tekken, config_of, groups_of, worked
from toy import toy_world
from weight_sync import WeightFolder


def train_file_of(folder, name, indices):
    rng = random.Random(1)
    problems = [toy_world.random_problem(rng, toy_world.REMAINDER) for _ in indices]
    rows = [toy_world.policy_row(problem, "toy", "train", i) for i, problem in zip(indices, problems)]
    pq.write_table(pa.Table.from_pylist(rows), folder / name)
    return str(folder / name)


def test_rows_of_several_training_files_follow_each_other(tmp_path, model, tokenizer):
    files = train_file_of(tmp_path, "a.parquet", [3, 4]), train_file_of(tmp_path, "b.parquet", [5])
    run = prepared(tmp_path, model, tokenizer, train_file=files)
    assert [row["extra_info"]["index"] for row in run.train_rows] == [3, 4, 5]
    needed = ["--model", "m", "--out-dir", "o", "--train-file"]
    assert tyro.cli(grpo_trainer.Config, args=[*needed, *files]).train_file == files
    assert tyro.cli(grpo_trainer.Config, args=[*needed, files[0]]).train_file == files[0]
    run.lock.close()
    message = (
        "nowhere.parquet: the file does not exist; check the path, or write the file with prepare_data.py"
    )
    with pytest.raises(ValueError, match=message):
        prepared(tmp_path, model, tokenizer, train_file=(files[0], "nowhere.parquet"))


def test_rows_with_longer_prompts_than_allowed_are_dropped(tmp_path, model, tokenizer, capsys):
    file = tmp_path / "rows.jsonl"
    for number in (1, 2, 3, 9):
        row = {"prompt": [{"role": "user", "content": "7" * number}], "extra_info": {"index": number}}
        row |= {"data_source": "toy", "reward_model": {"ground_truth": "7"}}
        with file.open("a") as lines:
            lines.write(json.dumps(row) + "\n")
    run = prepared(tmp_path, model, tokenizer, train_file=str(file))
    run.lock.close()
    limit = len(run.train_rows[1]["prompt_ids"])
    run = prepared(tmp_path, model, tokenizer, train_file=str(file), max_prompt_length=limit)
    run.lock.close()
    assert [row["extra_info"]["index"] for row in run.train_rows] == [1, 2]
    assert f"dropped 2 of 4 rows because their prompts exceed --max-prompt-length {limit}" in (
        capsys.readouterr().out
    )


@pytest.mark.slow
def test_a_row_that_the_reward_function_cannot_score_is_named_before_the_run(tmp_path, model, tokenizer):
    """A function checks rows with its attribute `check_row`. Only a judge needs the text of the problem."""
    problem = toy_world.random_problem(random.Random(1), toy_world.REMAINDER)
    row = toy_world.policy_row(problem, "toy", "train", 0)
    truth = row | {"reward_model": {"ground_truth": '["1", "2"]'}}
    question = row | {"extra_info": row["extra_info"] | {"question": ""}}
    for name, bad in (("truth", truth), ("question", question)):
        (tmp_path / f"{name}.jsonl").write_text(json.dumps(row) + "\n" + json.dumps(bad))
    toy = "toy/toy_world.py:compute_score_"
    judge = {"router_address": ("h:1",)}
    for name, changes, message in (
        ("truth", {"reward_fn": toy + "fapo_oracle"}, "row 1: ground_truth: .* is not a single answer"),
        ("truth", {"reward_fn": "compute_score.py:compute_score"}, "row 1: ground_truth: .* is not a single"),
        ("question", {"reward_fn": toy + "fapo", **judge}, "row 1: extra_info.'question'. is ''; the judge"),
        ("question", {"reward_fn": toy + "baseline"}, ""),
        ("truth", {}, ""),  # The tests' own function has no such attribute.
    ):
        changes |= {"train_file": f"{tmp_path}/{name}.jsonl", "dry_run": True}
        run = prepared(tmp_path, model, tokenizer, **changes)
        if not message:
            with run:
                continue
        with pytest.raises(ValueError, match=f"^{tmp_path}/{name}.jsonl, {message}"), run:
            pass


def test_servers_that_would_use_a_gpu_despite_device_cpu_are_refused_first(
    tmp_path, model, tokenizer, monkeypatch
):
    monkeypatch.setattr(reward_loop, "connect_ray", lambda: False)
    monkeypatch.setattr(run_file.ray, "cluster_resources", lambda: {"GPU": 1})
    monkeypatch.setattr("importlib.metadata.version", {"vllm": "0.32.0"}.get)
    monkeypatch.setattr(run_file, "note_start", lambda *_: pytest.fail("the run starts"))
    run = prepared(tmp_path, model, tokenizer, device="cpu", overlap=True)
    with pytest.raises(ValueError, match="--device cpu: vLLM 0.32.0 runs only on GPUs; "), run:
        pass


def test_a_build_of_pytorch_for_cpus_trains_on_the_cpu_although_ray_counts_a_gpu(
    tmp_path, model, tokenizer, monkeypatch
):
    def note_start(config, *_):
        raise RuntimeError(config.device)

    monkeypatch.setattr(reward_loop, "connect_ray", lambda: False)
    monkeypatch.setattr(run_file.ray, "cluster_resources", lambda: {"GPU": 1})
    monkeypatch.setattr(run_file, "note_start", note_start)
    with pytest.raises(RuntimeError, match="^cpu$"), prepared(tmp_path, model, tokenizer, device="auto"):
        pass


def test_sigterm_during_the_start_ends_the_run_as_ctrl_c_does(tmp_path, model, tokenizer, monkeypatch):
    """With Ray's own handler, the process ended with a stack trace or an abort."""
    monkeypatch.setattr(reward_loop, "connect_ray", lambda: signal.signal(signal.SIGTERM, signal.SIG_IGN))
    monkeypatch.setattr(run_file.ray, "cluster_resources", dict)
    monkeypatch.setattr(run_file.ray, "shutdown", lambda: None)
    monkeypatch.setattr(run_file, "note_start", lambda *_: signal.raise_signal(signal.SIGTERM))
    before = [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)]
    try:
        with pytest.raises(KeyboardInterrupt), prepared(tmp_path, model, tokenizer):
            pass
    finally:
        signal.signal(signal.SIGINT, before[0])
        signal.signal(signal.SIGTERM, before[1])


def test_a_batch_larger_than_the_file_is_said(tmp_path, model, tokenizer, capsys):
    file = train_file_of(tmp_path, "a.parquet", range(4))
    for size, said in ((4, 0), (5, 1)):
        prepared(tmp_path, model, tokenizer, train_file=file, train_batch_size=size).lock.close()
        told = "--train-batch-size 5: exceeds the 4 rows of --train-file"
        assert capsys.readouterr().out.count(told) == said


def test_the_chat_template_gets_what_the_user_says(tmp_path, model, tokenizer):
    tokenizer.chat_template += "{% if enable_thinking is false %}7{% endif %}"
    try:
        plain = prepared(tmp_path, model, tokenizer)
        plain.lock.close()
        told = prepared(tmp_path, model, tokenizer, chat_template_kwargs='{"enable_thinking": false}')
    finally:
        tokenizer.chat_template = tokenizer.chat_template.partition("{% if enable_thinking")[0]
    seven = tokenizer.encode("7", add_special_tokens=False)
    assert told.train_rows[0]["prompt_ids"] == plain.train_rows[0]["prompt_ids"] + seven


@pytest.mark.parametrize("text", ["{1", "[1]", "enable_thinking=false"])
def test_template_settings_that_are_no_json_object_are_refused(tmp_path, model, tokenizer, text):
    with pytest.raises(ValueError, match="^--chat-template-kwargs: must be a JSON object"):
        prepared(tmp_path, model, tokenizer, chat_template_kwargs=text)


@pytest.mark.parametrize(
    "key", ["messages", "return_tensors", "padding", "add_generation_prompt", "tokenize"]
)
def test_template_settings_that_the_trainer_sets_itself_are_refused(tmp_path, model, tokenizer, key):
    with pytest.raises(ValueError, match=f"^--chat-template-kwargs: '{key}' is an argument of apply_chat"):
        prepared(tmp_path, model, tokenizer, chat_template_kwargs=json.dumps({"documents": [], key: False}))


@pytest.mark.parametrize("file", ["rows.parquet:0", "rows.parquet:-1", ":3"])
def test_a_validation_file_without_a_name_or_a_sample_is_refused(tmp_path, model, tokenizer, file):
    with pytest.raises(ValueError, match=f"^--val-file {file}: must be FILE or FILE:N, with N of at least 1"):
        prepared(tmp_path, model, tokenizer, val_file=(file,))


# ---- rows that do not follow the schema


CHATML = (
    "{% for message in messages %}<{{ message['role'] }}>{{ message['content'] }}<end>{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)
# This template renders unknown roles as nothing, and rejects messages with calls.
BY_ROLE = (
    "{% for message in messages %}"
    "{% if 'tool_calls' in message %}{{ raise_exception('no calls') }}{% endif %}"
    "{% if message.role == 'user' %}<user>{{ message.content | trim }}<end>"
    "{% elif message.role == 'assistant' %}<assistant>{{ message.content }}<end>{% endif %}"
    "{% endfor %}{% if add_generation_prompt %}<assistant>{% endif %}"
)
QUESTION = "What is 2+3?"
ASKED = {"role": "user", "content": QUESTION}


def rows_of(folder, tokenizer, template=CHATML, **columns):
    """Return what a run reads from a file whose second row has these columns."""
    row = {"data_source": "x", "prompt": [ASKED], "extra_info": None, "reward_model": {"ground_truth": "5"}}
    file = folder / columns.pop("table", "rows.parquet")
    if columns.pop("as_json", False):
        file = folder / "rows.jsonl"
        file.write_text(json.dumps(row) + "\n" + json.dumps(row | columns))
    else:
        pq.write_table(pa.Table.from_pylist([row | columns]), file)
    tokenizer = copy.deepcopy(tokenizer)
    tokenizer.chat_template = template
    return load_rows(str(file), tokenizer, SimpleNamespace(chat_template_kwargs="{}", max_prompt_length=512))


@pytest.mark.parametrize("template", [CHATML, BY_ROLE])
@pytest.mark.parametrize(
    "prompt, message",
    [
        (QUESTION, "prompt is 'What is 2+3?'; it must be a non-empty list of {role, content}"),
        (json.dumps([ASKED]), "it must be a non-empty list of {role, content}"),
        (ASKED, "it must be a non-empty list of {role, content}"),
        ([], "prompt is []; it must be a non-empty list of {role, content} messages"),
        (None, "prompt is None"),
        ([QUESTION], "prompt contains the message 'What is 2+3?'; each message must be an object with"),
        ([[ASKED]], "each message must be an object with role and content"),
        ([{"from": "human", "value": QUESTION}], "each message must be an object with role and content"),
        ([{"role": "user"}], "a user message with the content None"),
        ([{"role": "user", "content": None}], "a user message with the content None"),
        ([{"role": "user", "content": 5}], "a user message with the content 5"),
        ([{"role": "user", "content": [{"type": "image"}]}], "a string or a list of text parts"),
        ([{"role": "user", "content": ["a", "b"]}], "a user message with the content ['a', 'b']"),
        ([{"role": "user", "content": " "}], "the chat template drops the last message"),
    ],
)
def test_a_prompt_of_the_wrong_shape_is_refused_by_row(tmp_path, tokenizer, template, prompt, message):
    with pytest.raises(ValueError, match="^" + re.escape(f"{tmp_path}/rows.jsonl, row 1: ")) as refused:
        rows_of(tmp_path, tokenizer, template, prompt=prompt, as_json=True)
    assert message in str(refused.value)


@pytest.mark.parametrize(
    "template, reason",
    [
        ("{{ raise_exception('Roles must\n  alternate.') }}", "Roles must alternate."),
        ("{{ messages[0].content + 1 }}", 'can only concatenate str (not "int") to str'),
    ],
)
def test_a_prompt_that_the_template_rejects_is_refused_in_one_line(tmp_path, tokenizer, template, reason):
    message = f"{tmp_path}/rows.parquet, row 0: the chat template rejects the prompt ({reason}); change the "
    with pytest.raises(ValueError, match=f"^{re.escape(message)}prompt$"):
        rows_of(tmp_path, tokenizer, template)


def test_a_role_that_the_template_renders_as_nothing_is_refused(tmp_path, tokenizer):
    with pytest.raises(ValueError, match="row 0: the chat template drops the last message"):
        rows_of(tmp_path, tokenizer, BY_ROLE, prompt=[{"role": "human", "content": QUESTION}])


def test_a_row_without_extra_info_has_none_as_in_verl(tmp_path, tokenizer):
    row = {"data_source": "x", "prompt": [ASKED], "reward_model": {"ground_truth": "5"}}
    (tmp_path / "rows.jsonl").write_text(json.dumps(row))
    config = SimpleNamespace(chat_template_kwargs="{}", max_prompt_length=512)
    [read] = load_rows(str(tmp_path / "rows.jsonl"), tokenizer, config)
    assert read["extra_info"] == {}


@pytest.mark.parametrize(
    "columns, message",
    [
        (dict(data_source=None), "data_source is None; it must be a string"),
        (dict(data_source=3), "data_source is 3; it must be a string"),
        (dict(data_source=["a"]), "data_source is ['a']; it must be a string"),
        (dict(extra_info="{}"), "extra_info is '{}'; it must be an object"),
        (
            dict(images=[{"path": "a.png"}]),
            "the column images is not empty; only prompts of text are supported",
        ),
        (dict(videos=["a.mp4"]), "the column videos is not empty"),
        (dict(audios=["a.wav"]), "the column audios is not empty"),
    ],
)
def test_other_columns_of_the_wrong_kind_are_refused_by_row(tmp_path, tokenizer, columns, message):
    with pytest.raises(ValueError, match=re.escape(f"rows.jsonl, row 1: {message}")):
        rows_of(tmp_path, tokenizer, as_json=True, **columns)


def test_parts_are_joined_and_keys_that_a_table_added_are_dropped(tmp_path, tokenizer):
    """Parquet gives each message the keys of all messages, but some templates check whether a key exists."""
    plain = rows_of(tmp_path, tokenizer, BY_ROLE, images=[], videos=None)
    parts = [{"type": "text", "text": "What is "}, {"type": "text", "text": "2+3?"}]
    for content in (QUESTION, parts, f" {QUESTION}\n"):
        message = {"role": "user", "content": content, "tool_calls": None}
        (row,) = rows_of(tmp_path, tokenizer, BY_ROLE, prompt=[message])
        assert row["prompt_ids"] == plain[0]["prompt_ids"]
        assert set(row["prompt"][0]) == {"role", "content"} and isinstance(row["prompt"][0]["content"], str)


ADD = {"name": "add", "arguments": {"a": 2, "b": 3}}
CALLS = {"role": "assistant", "content": None, "tool_calls": [ADD]}


@pytest.mark.parametrize("table, as_json", [("rows.parquet", False), ("ROWS.PARQUET", False), ("", True)])
def test_nested_keys_that_a_table_added_are_dropped(tmp_path, tokenizer, table, as_json):
    """In a table, each call has the arguments of all calls. In JSON, an argument may be null on purpose."""
    template = "{% for message in messages %}"
    template += "{{ (message.tool_calls or []) | tojson }}{{ message.content }}{% endfor %}"
    other = {"name": "look", "arguments": {"up": [None, "x"], "b": None}}
    calls, said = CALLS | {"tool_calls": [ADD, other]}, CALLS | {"content": "I add."}
    prompt = [calls, said, ASKED]
    row = rows_of(tmp_path, tokenizer, template, prompt=prompt, table=table, as_json=as_json)[-1]
    if not as_json:
        del other["arguments"]["b"]
    expected = CALLS | {"content": "", "tool_calls": [ADD, other]}
    assert row["prompt"] == [expected, said, ASKED]


TOOLS = [{"type": "function", "function": {"name": "add", "parameters": {"a": {"type": "number"}}}}]
WITH_TOOLS = "{% if tools %}<tools>{{ tools | tojson }}{% endif %}" + CHATML


@pytest.mark.parametrize(
    "tools, shown",
    [
        (TOOLS, json.dumps(TOOLS)),
        (json.dumps(TOOLS), json.dumps(TOOLS)),
        ([], ""),
        ("", ""),
        (None, ""),
    ],
)
@pytest.mark.parametrize("as_json", [False, True])
def test_the_chat_template_gets_the_tools_of_a_row(tmp_path, tokenizer, capsys, tools, shown, as_json):
    row = rows_of(tmp_path, tokenizer, WITH_TOOLS, tools=tools, as_json=as_json)[-1]
    text = "<user>What is 2+3?<end><assistant>"
    assert tokenizer.decode(row["prompt_ids"]) == (f"<tools>{shown}" if shown else "") + text
    assert not capsys.readouterr().out
    rows_of(tmp_path, tokenizer, CHATML, tools=tools, as_json=as_json)
    said = f"{tmp_path}/rows.{'jsonl' if as_json else 'parquet'}: the chat template ignores the column tools"
    assert (said in capsys.readouterr().out) is bool(shown)


@pytest.mark.parametrize("tools", ["add", {"name": "add"}, '{"name": "add"}', 5])
def test_a_column_of_tools_that_is_something_else_is_refused_by_row(tmp_path, tokenizer, tools):
    with pytest.raises(ValueError, match="row 1: tools is .*; it must be a list of JSON schemas"):
        rows_of(tmp_path, tokenizer, WITH_TOOLS, tools=tools, as_json=True)


@pytest.mark.parametrize(
    "template, role, content, shown",
    [
        ("{{ messages[-1].content | tojson }}", "tool", '{"price": 7}', r'"{\"price\": 7}"'),
        ("{{ messages[-1].content.replace('/think', '').strip() }}", "user", "/think\nGo on", "Go on"),
        ("{% if messages[-1].content != 'a' %}{{ raise_exception('not a') }}{% endif %}a", "user", "a", "a"),
    ],
)
def test_a_template_may_rewrite_the_last_message(tmp_path, tokenizer, template, role, content, shown):
    message = {"role": role, "content": content}
    (row,) = rows_of(tmp_path, tokenizer, template, prompt=[message])
    assert tokenizer.decode(row["prompt_ids"]) == shown


def test_a_dropped_message_is_noticed_even_if_the_same_text_stands_elsewhere(tmp_path, tokenizer):
    prompt = [ASKED, {"role": "assistant", "content": "5"}, {"role": "human", "content": QUESTION}]
    with pytest.raises(ValueError, match="the chat template drops the last message"):
        rows_of(tmp_path, tokenizer, BY_ROLE, prompt=prompt)


def test_a_resumed_run_shows_the_date_of_its_first_start(tmp_path, model, tokenizer, monkeypatch):
    """The chat templates of Llama 3 show today's date."""
    changed = copy.deepcopy(tokenizer)
    changed.chat_template = "{{ strftime_now('%d %m %Y') }}" + tokenizer.chat_template
    first = datetime(2026, 11, 28, 23, 59)

    def started(day, **changes):
        clock = SimpleNamespace(now=lambda: day, fromisoformat=datetime.fromisoformat)
        monkeypatch.setattr(run_file, "datetime", clock)
        run = prepared(tmp_path, model, changed, **changes)
        run.lock.close()
        return run

    run = started(first)
    assert tokenizer.decode(run.train_rows[0]["prompt_ids"]).startswith("28 11 2026<|user|>")
    run.policy = Policy(run.config, run.resume_from, torch.device("cpu"))
    run.step = 1
    run.save()
    resumed = started(first + timedelta(days=1), resume="auto")
    assert resumed.train_rows[0]["prompt_ids"] == run.train_rows[0]["prompt_ids"]
    other = started(first + timedelta(days=1), out_dir=str(tmp_path / "other"))
    assert tokenizer.decode(other.train_rows[0]["prompt_ids"]).startswith("29 11 2026")


def test_a_run_that_is_resumed_with_other_prompts_says_so(tmp_path, model, tokenizer, capsys):
    old, copied = (train_file_of(tmp_path, name, range(4)) for name in ("old.parquet", "copy.parquet"))
    more = train_file_of(tmp_path, "more.parquet", range(5))
    run = prepared(tmp_path, model, tokenizer, train_file=old, total_steps=9)
    run.lock.close()
    run.policy = Policy(run.config, run.resume_from, torch.device("cpu"))
    run.step, run.num_prompts_trained = 2, 3
    run.save()
    said = "are not those of the checkpoint; the run skips the first 3 of them"

    def is_said(**changes):
        changes = dict(train_file=old, total_steps=9, resume="auto") | changes
        capsys.readouterr()
        prepared(tmp_path, model, tokenizer, **changes).lock.close()
        return said in capsys.readouterr().out

    assert not is_said() and not is_said(train_file=copied) and not is_said(train_file=more, total_steps=2)
    assert is_said(train_file=more) and is_said(train_file=(old, copied)) and is_said(seed=1)
    # An older checkpoint does not know its prompts.
    (tmp_path / "run/checkpoints/step_2/trainer_state.json").write_text('{"step": 2, "prompts_drawn": 3}')
    assert not is_said(train_file=more)
    (tmp_path / "run/config.json").write_text(json.dumps({"train_file": [old, copied]}))
    assert is_said(train_file=more) and not is_said(train_file=(old, copied))


@pytest.mark.parametrize("template", [CHATML, BY_ROLE])
def test_an_answer_that_the_row_begins_is_continued(tmp_path, tokenizer, template):
    """If the answer were closed and another assistant message followed, the prompt would be different."""
    begun = {"role": "assistant", "content": "The sum is"}
    (row,) = rows_of(tmp_path, tokenizer, template, prompt=[ASKED, begun])
    assert tokenizer.decode(row["prompt_ids"]) == "<user>What is 2+3?<end><assistant>The sum is"


TEMPLATES = Path(__file__).with_name("data") / "templates"
WITH_THOUGHT = (
    "{% for m in messages %}<{{ m.role }}>{% if m.role == 'assistant' %}<think></think>{% endif %}"
    "{{ m.content | trim }}<end>{% endfor %}{% if add_generation_prompt %}<assistant><think>{% endif %}"
)


@pytest.mark.parametrize(
    "template, begun, ends",
    [
        (CHATML, "Step 1:\n", ""),
        (TEMPLATES / "llama3.jinja", "Step 1:", ""),
        (TEMPLATES / "llama3.jinja", "Step 1:\n", r"\n\nStep 1:', not"),
        (TEMPLATES / "mistral.jinja", "Step 1:", ""),
        (WITH_THOUGHT, "Step 1:", "<assistant><think></think>Step 1:', not"),
    ],
)
def test_a_template_that_changes_the_answer_that_a_row_begins_is_reported(
    tmp_path, tokenizer, capsys, template, begun, ends
):
    """With Qwen3.5's template, for example, the policy would not think."""
    if isinstance(template, Path):
        template = template.read_text()
    rows_of(tmp_path, tokenizer, template, prompt=[ASKED, {"role": "assistant", "content": begun}])
    said = capsys.readouterr().out
    assert said.startswith(f"{tmp_path}/rows.parquet, row 0: the chat template changes") is bool(ends)
    assert ends in said and said.count("\n") == bool(ends)


def test_two_messages_of_the_assistant_at_the_end_are_continued_without_a_word(tmp_path, tokenizer, capsys):
    answers = [{"role": "assistant", "content": text} for text in ("one", "two")]
    rows_of(tmp_path, tokenizer, CHATML, prompt=[ASKED, *answers])
    assert capsys.readouterr().out == ""


@pytest.mark.parametrize("before", [[], [{"role": "human", "content": "Go on"}]])
def test_a_beginning_that_cannot_be_compared_is_continued(tmp_path, tokenizer, before):
    """The template rejects the messages before it, or there are none."""
    begun = {"role": "assistant", "content": "The sum"}
    (row,) = rows_of(tmp_path, tokenizer, BY_ROLE, prompt=[*before, begun])
    assert tokenizer.decode(row["prompt_ids"]) == "<assistant>The sum"


# ---- truncated files: a full disk, a power cut, an interrupted download


def cut(path):
    path.write_bytes(path.read_bytes()[:1000])


def write_checkpoint(folder, model, tokenizer, **changes):
    """Write run/checkpoints/step_1, from which a run of test_grpo_trainer.prepared can resume."""
    model.save_pretrained(folder / "model")
    config = run_config(folder, "run", **changes)
    source = str(folder / "model")
    policy = Policy(config_of(model=source, **changes), source, torch.device("cpu"))
    policy.update(groups_of(a_step(policy.model)), lr=1e-3)
    return run_folder.save_checkpoint(policy, tokenizer, {"step": 1, "prompts_drawn": 4}, config)


def load(run):
    """Load the checkpoint as `start` does."""
    run.config = run.config.resolved(0)
    run.reservation = None
    with contextlib.ExitStack() as stack:
        run.start_policy(stack)


@pytest.mark.parametrize("changes, name", [({}, "model"), (dict(lora_rank=2), "adapter_model")])
def test_cut_weights_of_a_checkpoint_are_named_in_one_line(tmp_path, model, tokenizer, changes, name):
    checkpoint = write_checkpoint(tmp_path, model, tokenizer, **changes)
    run = prepared(tmp_path, model, tokenizer, resume="auto", **changes)
    load(run)
    cut(checkpoint / f"{name}.safetensors")
    with pytest.raises(ValueError, match=r"^cannot load .*step_1 \(.*\); if .*$"):
        load(run)


@pytest.mark.parametrize("name", [".metadata", "__0_0.distcp"])
def test_a_cut_optimizer_is_named_in_one_line(tmp_path, model, tokenizer, name):
    checkpoint = write_checkpoint(tmp_path, model, tokenizer)
    run = prepared(tmp_path, model, tokenizer, resume="auto")
    load(run)
    cut(checkpoint / "optimizer" / name)
    message = r"cannot load .*step_1 \(\w+Error: .*\); .* "
    message += "delete the checkpoint to resume from the previous one"
    with pytest.raises(ValueError) as refused:
        load(run)
    assert re.fullmatch(message, str(refused.value))
    run.interrupts = SimpleNamespace(asked=False)
    run.policy.restart = lambda source: None
    with pytest.raises(ValueError) as refused:
        run.recover(RanksLost("a rank of the policy died"))
    assert re.fullmatch(message, str(refused.value))


def test_an_optimizer_that_cannot_be_written_is_named_in_one_line(tmp_path, model, tokenizer):
    write_checkpoint(tmp_path, model, tokenizer)
    run = prepared(tmp_path, model, tokenizer, resume="auto")
    load(run)
    save = run.policy.save

    def save_where_something_is_in_the_way(folder):
        (folder / "optimizer/__0_0.distcp").mkdir(parents=True)
        save(folder)

    run.policy.save = save_where_something_is_in_the_way
    run.step = 2
    message = r"the checkpoint of step 2 could not be written \(.*Is a directory: .*__0_0.distcp.*\); "
    with pytest.raises(RuntimeError) as stopped:
        run.save()
    assert re.fullmatch(message + "--resume auto resumes after step 1", str(stopped.value))


@pytest.mark.parametrize(
    "has_saved, before, resume, total_steps, is_refused",
    [
        (True, 60, "never", 60, True),
        (True, 60, "auto", 60, False),
        (True, 60, "auto", 0, True),  # There is no checkpoint to evaluate.
        (True, 0, "never", 60, True),  # Its checkpoint was evaluated last.
        (True, 0, "auto", 60, False),
        (False, 60, "never", 60, False),
    ],
)
def test_results_of_a_run_whose_checkpoints_are_gone_are_kept(
    tmp_path, model, tokenizer, has_saved, before, resume, total_steps, is_refused
):
    """A run that was killed before its first checkpoint may be started again."""
    run = tmp_path / "run"
    if has_saved:
        shutil.rmtree(write_checkpoint(tmp_path, model, tokenizer).parent)
    run.mkdir(exist_ok=True)
    (run / "config.json").write_text(json.dumps(dict(total_steps=before)))
    lines = [json.dumps({"step": step, "val/toy/mean@1": 0.5, "reward/mean": 0.5}) for step in range(4)]
    (run / "metrics.jsonl").write_text("\n".join(lines))
    expected = contextlib.nullcontext()
    if is_refused:
        message = "^--out-dir .*run: already contains a run, whose checkpoints are gone; pass .*--resume auto"
        expected = pytest.raises(ValueError, match=message)
    settings = dict(resume=resume, total_steps=total_steps, val_file=(str(tmp_path / "train.parquet"),))
    with expected:
        prepared(tmp_path, model, tokenizer, **settings)


def test_an_evaluation_is_kept_and_one_that_was_interrupted_is_repeated(tmp_path, model, tokenizer):
    run = tmp_path / "run"
    run.mkdir()
    (run / "config.json").write_text('{"total_steps": 0}')
    settings = dict(total_steps=0, val_file=(str(tmp_path / "train.parquet"),))
    (run / "metrics.jsonl").write_text('{"step": 0}\n')
    prepared(tmp_path, model, tokenizer, **settings).lock.close()
    (run / "metrics.jsonl").write_text('{"step": 0, "val/toy/mean@1": 0.5}\n')
    with pytest.raises(ValueError, match="^--out-dir .*run: already contains an evaluation; pass another"):
        prepared(tmp_path, model, tokenizer, **settings)


def test_ctrl_c_while_the_optimizer_is_read_or_written_blames_no_checkpoint(tmp_path, model, tokenizer):
    """torch catches it and raises a CheckpointException."""
    write_checkpoint(tmp_path, model, tokenizer)
    run = prepared(tmp_path, model, tokenizer, resume="auto")
    run.lock.close()

    def interrupted(*_):
        raise CheckpointException("", {0: (KeyboardInterrupt(), None)})

    run.policy = SimpleNamespace(save=interrupted)
    with pytest.raises(KeyboardInterrupt):
        run.save()
    with pytest.raises(KeyboardInterrupt), run.loading():
        interrupted()


NCCL = """NCCL error in: NCCLUtils.cpp:94, unhandled system error, NCCL version 2.29.3
ncclSystemError: System call (e.g. socket, malloc) or external library call failed or device error.
Last error:
socketStartConnect: connect to 10.0.0.2 failed"""


def error_of_a_resume(tmp_path, model, tokenizer, monkeypatch, error) -> str:
    """Return the message of a run that resumes and whose policy cannot be loaded because of this error."""

    def fails(*_):
        raise error

    write_checkpoint(tmp_path, model, tokenizer)
    run = prepared(tmp_path, model, tokenizer, resume="auto")
    monkeypatch.setattr(run_file, "Policy", fails)
    with pytest.raises(RuntimeError) as caught:
        load(run)
    return str(caught.value)


def test_too_little_memory_at_a_resume_does_not_blame_the_checkpoint(tmp_path, model, tokenizer, monkeypatch):
    for number, error in enumerate(
        [
            torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB"),
            torch.AcceleratorError("CUDA error: out of memory\nFor debugging, ..."),
        ]
    ):
        message = error_of_a_resume(tmp_path / str(number), model, tokenizer, monkeypatch, error)
        assert re.match("not enough memory for the policy .*; stop other", message)
        assert "checkpoint" not in message


@pytest.mark.parametrize(
    "error",
    [
        torch.AcceleratorError("CUDA error: uncorrectable ECC error\nFor debugging, ..."),
        RuntimeError("The NVIDIA driver on your system is too old"),
        RuntimeError("No CUDA GPUs are available"),
        torch.distributed.DistBackendError(NCCL),
    ],
)
def test_a_gpu_that_fails_at_a_resume_is_not_blamed_on_the_checkpoint(
    tmp_path, model, tokenizer, monkeypatch, error
):
    message = error_of_a_resume(tmp_path, model, tokenizer, monkeypatch, error)
    first_line = re.escape(str(error).splitlines()[0])
    assert re.fullmatch(rf"the GPU, its [^(]*\(\w+: {first_line}.*\); .*", message)
    assert "checkpoint" not in message


@pytest.mark.parametrize("content", ["", '{"step": 1'])
def test_a_cut_trainer_state_is_named_in_one_line(tmp_path, model, tokenizer, content):
    """A full disk or a power failure may truncate the file."""
    (write_checkpoint(tmp_path, model, tokenizer) / "trainer_state.json").write_text(content)
    message = r"^cannot load .*step_1 \(trainer_state.json: .*\); delete the checkpoint to resume .*$"
    with pytest.raises(ValueError, match=message):
        prepared(tmp_path, model, tokenizer, resume="auto")


def test_a_run_that_resumes_with_another_judge_says_so(tmp_path, model, tokenizer, capsys):
    """The folder is the same, but the next judge has been trained into it."""
    write_checkpoint(tmp_path, model, tokenizer)
    judge = tmp_path / "judge"
    judge.mkdir()
    (judge / "config.json").write_text("{}")
    reward = f"{grpo_trainer.__file__}/../compute_score.py:compute_score_fapo"
    run = prepared(tmp_path, model, tokenizer, resume="auto", genrm=(str(judge),), reward_fn=reward)
    for version, told in (("1st", 0), ("1st", 0), ("2nd judge", 1), ("2nd judge", 0)):
        if told or not (judge / "model.safetensors").exists():
            (judge / "model.safetensors").write_text(version)
        run.compare_scoring(run.config.scored_by(run.config.make_job()))
        line = "resuming with a different judge or reward function (not the same: the model genrm); rewards "
        assert capsys.readouterr().out.count(line) == told
    run.lock.close()


def test_a_run_that_resumes_with_another_reward_function_says_so(tmp_path, model, tokenizer, capsys):
    write_checkpoint(tmp_path, model, tokenizer)
    file = tmp_path / "own.py"
    source = "def first(data_source, solution_str, ground_truth, extra_info, bonus=0):\n    return bonus\n"
    file.write_text(source + source.replace("first", "second"))
    begun = dict(reward_fn=f"{file}:first", reward_kwargs="{}")
    run = prepared(tmp_path, model, tokenizer, resume="auto", **begun)
    for changes, told in (
        ({}, None),
        ({}, None),
        ({"reward_kwargs": '{"bonus": 2}'}, "reward_kwargs"),
        ({"reward_kwargs": '{"bonus": 2}', "reward_fn": f"{file}:second"}, "reward_fn"),
        ({}, "reward_fn, reward_kwargs"),
        ({"edit": True}, "files"),
    ):
        if changes.pop("edit", False):
            file.write_text(source.replace("return bonus", "return bonus + 1"))
        config = dataclasses.replace(run.config, **begun | changes)
        run.compare_scoring(config.scored_by(config.make_job()))
        line = f"resuming with a different judge or reward function (not the same: {told}); rewards before "
        output = capsys.readouterr().out
        assert (line in output) == ("different judge or reward function" in output) == bool(told)
    run.step = 0  # A run that has not trained yet has no rewards to compare.
    run.compare_scoring({"reward_fn": "other.py:rule"})
    assert not capsys.readouterr().out
    run.lock.close()


def test_a_run_that_resumes_with_another_advantage_loss_or_rollout_function_says_so(
    tmp_path, model, tokenizer, capsys
):
    """The first start resumes from an older checkpoint, which does not say how its steps were trained."""
    write_checkpoint(tmp_path, model, tokenizer)
    file = tmp_path / "own.py"
    source = "def first(groups, scale=1):\n    return groups.rewards_P_G * scale\n"
    file.write_text(source + source.replace("first", "second"))
    rollout = "async def act(trajectory):\n    await trajectory.generate()\n"
    (tmp_path / "act.py").write_text(rollout)
    begun = dict(
        advantage=f"{file}:first", advantage_kwargs="{}", loss="clip", rollout_fn=f"{tmp_path}/act.py:act"
    )
    run = prepared(tmp_path, model, tokenizer, resume="auto", **begun)
    capsys.readouterr()
    for changes, told in (
        ({}, None),
        ({}, None),
        ({"advantage_kwargs": '{"scale": 2, "shift": 0}'}, "advantage_kwargs"),
        ({"advantage_kwargs": '{"shift": 0, "scale": 2}', "clip_high": 0.3}, "clip_high"),
        ({"advantage": f"{file}:second", "loss": "gspo"}, "advantage, advantage_kwargs, loss"),
        ({}, "advantage, loss"),
        ({"edited": tmp_path / "act.py"}, "rollout_fn"),
        ({"rollout_fn": None}, "rollout_fn"),
        ({"edited": file, "rollout_fn": None}, "advantage"),
    ):
        if "edited" in changes:
            changes.pop("edited").open("a").write("# edited\n")
        run.config = dataclasses.replace(run.config, **begun | changes)
        run.compare_functions()
        line = "resuming with a different advantage, loss or rollout function "
        line += f"(not the same: {told}); the steps up to step {run.step} were trained without this change\n"
        assert capsys.readouterr().out == (line if told else "")
    load(run)
    run.step += 1
    run.save()
    run.lock.close()
    run = prepared(tmp_path, model, tokenizer, resume="auto", **begun)
    run.compare_functions()
    assert "(not the same: rollout_fn, clip_high); the steps up to step 2" in capsys.readouterr().out
    run.lock.close()


@pytest.mark.parametrize("is_resumed", [False, True])
def test_the_first_step_after_each_start_checks_that_the_advantage_has_its_keys(
    tmp_path, model, tokenizer, is_resumed
):
    """A run may resume with another advantage or reward function."""
    if is_resumed:
        write_checkpoint(tmp_path, model, tokenizer)
    run = prepared(tmp_path, model, tokenizer, resume="auto", **worked("vppo"))
    run.lock.close()
    groups = [[scored(1.0, acc=True), scored(0.0, acc=False)]]
    later, first = (grpo_trainer.Batch(run.step + ahead, 1.0, rounds=1) for ahead in (2, 1))
    grpo_trainer.compute_group_advantages(run, later, groups)
    with pytest.raises(RuntimeError, match="no result has the key first_wrong, which --advantage needs"):
        grpo_trainer.compute_group_advantages(run, first, groups)


def test_scores_are_compared_with_those_of_the_checkpoint(tmp_path, model, tokenizer, monkeypatch, capsys):
    """A start that trains nothing changes nothing, and a judge that is down may be the same as before."""
    judge = None
    monkeypatch.setattr(reward_loop, "served_models", lambda addresses, chosen: {"genrm": judge})
    write_checkpoint(tmp_path, model, tokenizer)
    for judge, trains, told in (
        ("A", True, False),  # An older checkpoint does not name the judge.
        ("B", False, True),
        ("A", False, False),
        (None, True, False),
        ("A", False, False),
        ("B", True, True),
        ("B", False, False),
    ):
        run = prepared(tmp_path, model, tokenizer, resume="auto", router_address=("h:1",))
        run.compare_scoring(run.config.scored_by(run.config.make_job()))
        if trains:
            load(run)
            run.step += 1
            run.save()
        run.lock.close()
        assert ("not the same: the model genrm" in capsys.readouterr().out) == told


def test_lost_verdicts_of_several_steps_count_together_in_a_resumed_run(tmp_path, model, tokenizer):
    """Steps that are repeated, as after the loss of a rank, count once."""

    def count(step, kind):
        batch = grpo_trainer.Batch(step, 1.0, rounds=1)
        groups = [[judged(kind) for _ in range(10)] + [judged("wrong") for _ in range(30)]]
        grpo_trainer.compute_group_advantages(run, batch, groups)

    for step, kind in ((1, "right"), (2, "down"), (3, "down")):
        run = prepared(tmp_path, model, tokenizer, resume="auto")
        run.lock.close()
        run.policy, run.log = SimpleNamespace(save=model.save_pretrained), SimpleNamespace(samples=print)
        if step == 3:
            break
        count(step, kind)
        if step == 2:
            run.find_checkpoint()
            count(step, kind)
        else:
            count(2, "down")  # with --overlap, before step 1 is saved
        run.step = step
        run.save()
    with pytest.raises(RuntimeError, match="step 3: 100% of the samples that needed a verdict have none"):
        count(step, kind)


@pytest.mark.parametrize("judges", [["strict=h:2", "quick=h:1"], ["judge=h:1", "strict=h:2"], ["quick=h:1"]])
def test_a_run_that_resumes_with_judges_of_other_names_or_in_another_order_says_so(
    tmp_path, model, tokenizer, capsys, judges
):
    """The first judge is the one that most functions ask, and the others are asked by name."""
    write_checkpoint(tmp_path, model, tokenizer)
    reward = f"{grpo_trainer.__file__}/../docs/judges.py:two_judges"
    begun = ("quick=h:1", "strict=h:2")
    run = prepared(tmp_path, model, tokenizer, resume="auto", router_address=begun, reward_fn=reward)
    for addresses in (begun, begun, judges):
        config = dataclasses.replace(run.config, router_address=tuple(addresses))
        run.compare_scoring(config.scored_by(config.make_job()))
    names = ", ".join(judge.split("=")[0] for judge in judges)
    line = f"(not the same: the names of the models (quick, strict; now {names})); rewards before and "
    assert capsys.readouterr().out.count("resuming with a different judge or reward function " + line) == 1
    run.lock.close()


@pytest.mark.parametrize("changes", [dict(kl_coef=0.1), dict(lora_rank=2)])
def test_a_cut_configuration_of_the_run_is_named_in_one_line(tmp_path, model, tokenizer, changes):
    write_checkpoint(tmp_path, model, tokenizer, **changes)
    (tmp_path / "run/config.json").write_text('{"model": ')
    message = rf"^--out-dir {tmp_path}/run: .*run/config.json is truncated \(.*\); delete this file, .*$"
    with pytest.raises(ValueError, match=message):
        prepared(tmp_path, model, tokenizer, resume="auto", **changes)


@pytest.mark.parametrize("name", ["tokenizer.json", "tokenizer_config.json"])
def test_a_cut_tokenizer_is_named_in_one_line(tmp_path, model, tokenizer, name):
    run = prepared(tmp_path, model, tokenizer)
    run.lock.close()
    file = tmp_path / "model" / name
    file.write_bytes(file.read_bytes()[:100])
    message = rf"^--model {tmp_path}/model: .* of the tokenizer cannot be read \(.*\); .* copy it again; .*$"
    with pytest.raises(ValueError, match=message):
        grpo_trainer.Run(run.config)


@pytest.mark.parametrize(
    "name, before, after",
    [
        ("tokenizer.json", '"BPE"', '"NewBPE"'),  # of a newer version of tokenizers
        ("tokenizer_config.json", '"<|end|>"', '{"a": 1}'),
        ("config.json", '"max_position_embeddings": 512', '"max_position_embeddings": 512.0'),
        ("config.json", '"num_attention_heads": 4', '"num_attention_heads": 5'),
        ("config.json", '"llama"', '["llama"]'),
    ],
)
def test_a_file_that_transformers_rejects_is_named_in_one_line(
    tmp_path, model, tokenizer, name, before, after
):
    run = prepared(tmp_path, model, tokenizer)
    run.lock.close()
    file = tmp_path / "model" / name
    text = file.read_text()
    assert before in text, text
    file.write_text(text.replace(before, after))
    message = rf"^--model {tmp_path}/model: config.json or a file .* cannot be read \(.*\); .*$"
    with pytest.raises(ValueError, match=message):
        grpo_trainer.Run(run.config)


def test_a_model_with_code_of_its_own_asks_for_the_flag(tmp_path, model, tokenizer):
    run = prepared(tmp_path, model, tokenizer)
    run.lock.close()
    file = tmp_path / "model/config.json"
    changes = {
        "model_type": "own",
        "auto_map": {"AutoConfig": "own.Own", "AutoModelForCausalLM": "own.Model"},
    }
    file.write_text(json.dumps(json.loads(file.read_text()) | changes))
    message = rf"^--model {tmp_path}/model: contains Python code of its own; .*--trust-remote-code to run it$"
    with pytest.raises(ValueError, match=message):
        grpo_trainer.Run(run.config)


def calls_itself(folder, name):
    """Change the class in tokenizer_config.json, and return a text and the tokens that stand for it."""
    file = folder / "tokenizer_config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"tokenizer_class": name}))
    text = "It has 65 eggs.\n\n  7 left"
    return text, Tokenizer.from_file(str(folder / "tokenizer.json")).encode(text).ids


@pytest.mark.parametrize("name", ["LlamaTokenizerFast", "LlamaTokenizer"])
def test_a_byte_level_tokenizer_with_the_name_of_another_keeps_its_spaces(
    tmp_path, model, tokenizer, name, capsys
):
    """transformers would replace its pre-tokenizer and its decoder. The policy would read no spaces."""
    plain = prepared(tmp_path, model, tokenizer)
    plain.lock.close()
    text, ids = calls_itself(tmp_path / "model", name)
    run = grpo_trainer.Run(plain.config)
    run.lock.close()
    said = f"--model {tmp_path}/model: LlamaTokenizer would split text differently from tokenizer.json"
    assert said in capsys.readouterr().out
    assert run.train_rows[0]["prompt_ids"] == plain.train_rows[0]["prompt_ids"]
    assert run.tokenizer.encode(text) == ids and run.decode(ids) == text
    assert run.tokenizer.eos_token == tokenizer.eos_token
    policy = Policy(run.config, run.resume_from, torch.device("cpu"))
    state = {"step": 1, "prompts_drawn": 4}
    checkpoint = run_folder.save_checkpoint(policy, run.tokenizer, state, run.config)
    for content in (model_files(policy.model_info(), run.tokenizer), checkpoint):  # for servers and others
        folder = tmp_path / "served"
        if content is checkpoint:
            folder = checkpoint
        else:
            WeightFolder(str(folder), content)
        read = AutoTokenizer.from_pretrained(folder)
        assert read.encode(text) == ids and read.decode(ids) == text
    resumed = grpo_trainer.Run(dataclasses.replace(plain.config, resume="auto"))
    resumed.lock.close()
    assert resumed.train_rows[0]["prompt_ids"] == plain.train_rows[0]["prompt_ids"]


def test_a_tokenizer_beside_tekken_json_keeps_its_chat_template(tmp_path, model, tokenizer):
    """transformers prefers tekken.json, which Mistral's newer models have, but its class has no templates."""
    plain = prepared(tmp_path, model, tokenizer)
    plain.lock.close()
    folder = tmp_path / "model"
    add_tekken(folder)
    assert AutoTokenizer.from_pretrained(folder).chat_template is None
    run = grpo_trainer.Run(plain.config)
    run.lock.close()
    assert run.train_rows[0]["prompt_ids"] == plain.train_rows[0]["prompt_ids"]
    policy = Policy(run.config, run.resume_from, torch.device("cpu"))
    content = model_files(policy.model_info(), run.tokenizer)
    WeightFolder(str(tmp_path / "served"), content)
    served = AutoTokenizer.from_pretrained(tmp_path / "served")
    assert served.chat_template == tokenizer.chat_template and served.vocab == tokenizer.vocab
    (folder / "tokenizer.json").unlink()
    message = f"^--model {folder}: has tekken.json, but no tokenizer.json; .*$"
    with pytest.raises(ValueError, match=message):
        grpo_trainer.Run(run.config)


def test_a_tokenizer_that_loses_spaces_is_refused_by_row(tmp_path, model, tokenizer):
    """Such a tokenizer was saved after transformers had damaged it."""
    run = prepared(tmp_path, model, tokenizer)
    run.lock.close()
    calls_itself(tmp_path / "model", "LlamaTokenizerFast")
    AutoTokenizer.from_pretrained(tmp_path / "model").save_pretrained(tmp_path / "model")
    message = r"^.*train.parquet, row 0: the tokenizer reads '.* has .*' as '.*'; copy the tokenizer's files"
    with pytest.raises(ValueError, match=message):
        grpo_trainer.Run(run.config)


def test_a_tokenizer_may_normalise_and_spell_differently(tokenizer):
    """Rounding off is a matter of the tokenizer; what may not happen is that words or letters are lost."""
    whole = "Ben has\n\n ten  eggs and \ufb01ve more<|end|>"
    for text, is_read in [
        ("ben has ten eggs and five more", True),
        ("<|end|>Ben has ten eggs and five more <|end|>", True),
        ("Benhasteneggsandfivemore", False),
        ("Ben has ten eggs and", False),
        ("Ben\u0120has\u0120ten\u0120eggs\u0120and\u0120five\u0120more", False),
    ]:
        ids = tokenizer.encode(text)
        if is_read:
            check_reading(tokenizer, whole, ids)
        else:
            with pytest.raises(ValueError, match="the tokenizer reads 'Ben has"):
                check_reading(tokenizer, whole, ids)


def test_nothing_is_read_of_a_folder_where_another_run_may_still_write(tmp_path, model, tokenizer):
    """Otherwise, a run that ends in the meantime could have newer checkpoints than the one that was found."""
    other = prepared(tmp_path, model, tokenizer)
    (write_checkpoint(tmp_path, model, tokenizer) / "trainer_state.json").write_text("{")  # being written
    with pytest.raises(ValueError, match="is in use by another run"):
        prepared(tmp_path, model, tokenizer, resume="auto")
    other.lock.close()


def test_a_run_that_is_refused_lets_go_of_its_folder(tmp_path, model, tokenizer):
    """This holds even if something keeps a reference to the error, as a notebook does."""
    with pytest.raises(ValueError, match="no rows are left") as refused:
        prepared(tmp_path, model, tokenizer, max_prompt_length=1)
    prepared(tmp_path, model, tokenizer).lock.close()
    assert refused.traceback  # the reference is kept until here


# ---- adapters of a resumed run


@pytest.mark.parametrize("before, after", [(2, 4), (2, 0), (0, 2)])
def test_a_run_does_not_go_on_with_other_adapters(tmp_path, model, tokenizer, before, after):
    write_checkpoint(tmp_path, model, tokenizer, lora_rank=before)
    with pytest.raises(ValueError, match="^(--)?lora.rank.*checkpoints/step_1"):
        load(prepared(tmp_path, model, tokenizer, resume="auto", lora_rank=after))


# ---- free space on the disk


def test_a_disk_without_room_for_the_checkpoints_is_noticed_first(tmp_path, model, tokenizer, monkeypatch):
    free = SimpleNamespace(free=20_000_000)
    monkeypatch.setattr(run_folder.shutil, "disk_usage", lambda path: free)
    run = prepared(tmp_path, model, tokenizer, save_every=1)
    message = r"^--out-dir .*: the disk has 0.0 GB of free space, "
    message += r"but checkpoints need 0.[0-9] GB; .*--save-every$"
    with pytest.raises(ValueError, match=message):
        load(run)
    run.lock.close()
    evaluation = dict(total_steps=0, val_file=(str(tmp_path / "train.parquet"),))
    load(prepared(tmp_path, model, tokenizer, out_dir=str(tmp_path / "evaluation"), **evaluation))
    free.free = 3.1 * 12 * sum(tensor.numel() for tensor in model.state_dict().values())
    load(run)
    shape = copy.deepcopy(model.config)
    shape.tie_word_embeddings = True  # A checkpoint contains a tied head only once.
    tied = AutoModelForCausalLM.from_config(shape).eval()
    free.free = 3.1 * 12 * sum(parameter.numel() for parameter in tied.parameters())
    (tmp_path / "tied").mkdir()
    load(prepared(tmp_path / "tied", tied, tokenizer, save_every=1))


def test_the_longest_sequence_has_the_longest_prompt_of_all_files(tmp_path, model, tokenizer):
    run = prepared(tmp_path, model, tokenizer)
    run.lock.close()
    (short,) = pq.read_table(tmp_path / "train.parquet").to_pylist()
    long, longest = copy.deepcopy(short), copy.deepcopy(short)
    long["prompt"][0]["content"] *= 2
    longest["prompt"][0]["content"] *= 3
    pq.write_table(pa.Table.from_pylist([short, long]), tmp_path / "train.parquet")
    pq.write_table(pa.Table.from_pylist([short, longest]), tmp_path / "val.parquet")
    for val_file in ((), (str(tmp_path / "val.parquet"),)):
        run = grpo_trainer.Run(dataclasses.replace(run.config, val_file=val_file))
        run.lock.close()
        rows = run.train_rows + [row for row, _ in run.val_rows]
        assert run.max_sequence_length == len(rows[-1]["prompt_ids"]) + run.config.max_response_length
        assert len(rows[-1]["prompt_ids"]) > max(len(row["prompt_ids"]) for row in rows[:-1])


@pytest.mark.parametrize(
    "rope_type, boundary", [("longrope", "original_max_position_embeddings"), ("dynamic", None)]
)
def test_positions_that_depend_on_the_longest_text_of_a_batch_are_rejected(
    tmp_path, model, tokenizer, rope_type, boundary
):
    """Beyond this length, such models encode every position differently."""
    run = prepared(tmp_path, model, tokenizer)
    run.lock.close()
    config = copy.deepcopy(model.config)
    factors = dict(short_factor=[1.0] * 16, long_factor=[2.0] * 16) if boundary else {}
    config.rope_parameters = {"rope_type": rope_type, "factor": 2.0, "rope_theta": 1e4} | factors
    config.max_position_embeddings = 4 * run.max_sequence_length
    if boundary:
        config.rope_parameters[boundary] = run.max_sequence_length - 1
    else:
        config.max_position_embeddings = run.max_sequence_length - 1
    config.save_pretrained(tmp_path / "model")
    length = run.max_sequence_length
    with pytest.raises(ValueError, match=f"{length} tokens, but the model supports only {length - 1}; lower"):
        grpo_trainer.Run(run.config)
    shorter = dataclasses.replace(run.config, max_response_length=4, out_dir=str(tmp_path / "short"))
    grpo_trainer.Run(shorter).lock.close()


@pytest.mark.parametrize("name", ["tensorboard", "wandb"])
def test_an_option_names_the_package_that_it_lacks(monkeypatch, name):
    monkeypatch.setenv("WANDB_MODE", "offline")
    config_of(**{name: True}).check()
    monkeypatch.setattr("settings.find_spec", lambda package: None)
    with pytest.raises(ValueError, match=f"--{name}: needs the package {name}, .*; run pip install {name}"):
        config_of(**{name: True}).check()


# ---- models that the user cannot have meant


def test_a_model_whose_files_do_not_match_is_no_truncated_checkpoint(tmp_path, model, tokenizer):
    run = prepared(tmp_path, model, tokenizer)
    run.lock.close()
    file = tmp_path / "model/config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"intermediate_size": 32}))
    run = grpo_trainer.Run(run.config)
    with pytest.raises(ValueError, match=f"^cannot load {tmp_path}/model .*; check that its") as error:
        load(run)
    assert "delete" not in str(error.value) and "\n" not in str(error.value)


def test_a_folder_without_weights_is_refused_before_anything_starts(tmp_path, model, tokenizer):
    run = prepared(tmp_path, model, tokenizer, dry_run=True)
    run.lock.close()
    (tmp_path / "model/model.safetensors").unlink()
    with pytest.raises(ValueError, match=f"--model {tmp_path}/model: the folder contains no weights"):
        grpo_trainer.train(run.config)


def test_adapters_that_do_not_fit_the_model_are_refused_in_a_dry_run(tmp_path, model, tokenizer):
    run = prepared(tmp_path, model, tokenizer, dry_run=True, lora_rank=2)
    run.lock.close()
    for target, message in (
        ("nope", "--lora-targets: Target modules {'nope'} not found in the base model"),
        ("embed_tokens", "--lora-targets: model.embed_tokens is a Embedding, not a plain linear layer"),
    ):
        with pytest.raises(ValueError, match=f"^{message}"):
            grpo_trainer.train(dataclasses.replace(run.config, lora_targets=(target,)))
    grpo_trainer.train(run.config)


@pytest.mark.parametrize("with_config", [False, True])
def test_a_folder_of_adapters_is_no_model(tmp_path, model, tokenizer, with_config):
    """transformers would load it silently, and train adapters and base under unexpected names."""
    run = prepared(tmp_path, model, tokenizer)
    run.lock.close()
    adapters = write_checkpoint(tmp_path, model, tokenizer, lora_rank=2)
    tokenizer.save_pretrained(adapters)
    if with_config:
        model.config.save_pretrained(adapters)
    changed = dataclasses.replace(run.config, model=str(adapters), out_dir=str(tmp_path / "other"))
    with pytest.raises(ValueError, match="the folder contains LoRA adapters; merge them with python -m"):
        grpo_trainer.Run(changed)


def test_quantised_weights_are_refused_before_anything_starts(tmp_path, model, tokenizer):
    run = prepared(tmp_path, model, tokenizer)
    run.lock.close()
    file = tmp_path / "model/config.json"
    about = {"quantization_config": {"quant_method": "gptq"}}
    file.write_text(json.dumps(json.loads(file.read_text()) | about))
    with pytest.raises(ValueError, match=r"quantised weights \(gptq\) cannot be trained"):
        grpo_trainer.Run(run.config)


def test_a_token_of_a_prompt_that_the_embedding_does_not_have_is_named(tmp_path, model, tokenizer):
    larger = copy.deepcopy(tokenizer)
    larger.add_tokens(["<|sum|>"], special_tokens=True)
    prepared(tmp_path, model, larger).lock.close()  # no prompt contains this token
    file = tmp_path / "asked.jsonl"
    row = {"data_source": "x", "extra_info": {}, "reward_model": {"ground_truth": "5"}}
    file.write_text(json.dumps(row | {"prompt": [{"role": "user", "content": "<|sum|>2+3?"}]}))
    with pytest.raises(ValueError, match=r"a prompt contains token \d+ \('<\|sum\|>'\), but the embedding"):
        prepared(tmp_path, model, larger, train_file=str(file))


def test_a_token_of_a_tool_that_the_embedding_does_not_have_fails_its_own_sample(tmp_path, model, tokenizer):
    larger = copy.deepcopy(tokenizer)
    larger.add_tokens(["<|sum|>"], special_tokens=True)
    beyond = larger.convert_tokens_to_ids("<|sum|>")
    (tmp_path / "tool.py").write_text(
        "async def inserts(trajectory):\n"
        "    await trajectory.generate(max_tokens=2)\n"
        f"    trajectory.insert([{beyond} - trajectory.number])\n"
        "    await trajectory.generate(max_tokens=2)\n"
    )
    run = prepared(tmp_path, model, larger, rollout_fn=f"{tmp_path}/tool.py:inserts")
    run.rollout_runner.start()
    samples = [Sample(row, row["prompt_ids"]) for row in run.train_rows for _ in range(2)]
    settings = dict(max_response_length=9, temperature=1.0, eos_ids=set(), seed=0, rollout_batch_size=8)
    try:
        run.rollout_runner.roll_out([samples], model=model, **settings)
    finally:
        run.rollout_runner.close()
        run.lock.close()
    assert [sample.failure for sample in samples] == ["error", ""]
    error = samples[0].result["reward_extra_info"]["error"]
    assert f"insert: {beyond} is not a token of the tokenizer and the model; pass ints" in error


def test_a_warm_up_that_never_ends_is_said(tmp_path, model, tokenizer, capsys):
    for steps, said in ((5, 0), (4, 1)):
        prepared(tmp_path, model, tokenizer, total_steps=steps, lr_warmup_steps=5).lock.close()
        told = "--lr-warmup-steps 5: exceeds --total-steps 4, so the learning rate never reaches"
        assert capsys.readouterr().out.count(told) == said


def test_parts_of_a_model_that_are_left_out_are_named(tmp_path, model, tokenizer, capsys):
    """In a vision-language model, only the language model is trained and saved."""
    run = prepared(tmp_path, model, tokenizer)
    run.lock.close()
    text = dict(
        vocab_size=len(tokenizer),
        hidden_size=32,
        num_hidden_layers=1,
        num_attention_heads=4,
        num_key_value_heads=2,
        intermediate_size=64,
        head_dim=8,
        pad_token_id=0,
        eos_token_id=1,
        layer_types=["full_attention"],
    )
    sight = dict(hidden_size=32, intermediate_size=32, depth=1, num_heads=2, out_hidden_size=32)
    whole = AutoConfig.for_model("qwen3_5", text_config=text, vision_config=sight)
    AutoModelForImageTextToText.from_config(whole, dtype=torch.float32).save_pretrained(tmp_path / "model")
    load(run)
    told = "/model: only the language model (qwen3_5_text) of qwen3_5 is trained"
    assert told not in capsys.readouterr().out
    run = grpo_trainer.Run(run.config)
    load(run)
    assert told in capsys.readouterr().out


def test_a_model_that_is_loaded_with_its_vision_encoder_is_rejected_with_servers(tmp_path, model, tokenizer):
    """Checkpoints and the servers' folder lack its image processor. In this process, none is needed."""
    run = prepared(tmp_path, model, tokenizer, dry_run=True, reward_mode="standalone")
    run.lock.close()
    parts = dict(text_config=dict(vocab_size=len(tokenizer)), vision_config=dict(num_hidden_layers=1))
    AutoConfig.for_model("gemma3", **parts).save_pretrained(tmp_path / "model")
    told = "/model: vLLM cannot serve Gemma3ForConditionalGeneration without an image processor"
    for rollout in ("auto", "vllm"):
        with pytest.raises(ValueError, match=f"^--model {tmp_path}{told}, .*; pass a text-only model, or"):
            grpo_trainer.Run(dataclasses.replace(run.config, rollout=rollout))
    grpo_trainer.Run(dataclasses.replace(run.config, rollout="hf")).lock.close()
    AutoConfig.for_model("gemma3_text", vocab_size=len(tokenizer)).save_pretrained(tmp_path / "model")
    grpo_trainer.Run(dataclasses.replace(run.config, rollout="vllm")).lock.close()


def test_a_checkpoint_names_all_tokens_at_which_the_run_stops(tmp_path, model, tokenizer):
    """The tokenizer of a base model may have the chat's end token.

    Programs that generate from the checkpoint need both end tokens.
    """
    base = copy.deepcopy(model)
    other = tokenizer.convert_tokens_to_ids("<|user|>")
    base.generation_config.eos_token_id = base.config.eos_token_id = other
    run = prepared(tmp_path, base, tokenizer)
    load(run)
    assert run.eos_ids == {other, tokenizer.eos_token_id}
    saved = run_folder.save_checkpoint(run.policy, run.tokenizer, {"step": 1, "prompts_drawn": 4}, run.config)
    assert GenerationConfig.from_pretrained(saved).eos_token_id == sorted(run.eos_ids)


def test_a_run_whose_responses_could_not_end_is_refused(tmp_path, model, tokenizer):
    base, without = copy.deepcopy(model), copy.deepcopy(tokenizer)
    base.generation_config.eos_token_id = base.config.eos_token_id = without.eos_token = None
    run = prepared(tmp_path, base, without)
    with (
        contextlib.closing(run.lock),
        pytest.raises(ValueError, match="^--model .*/model: neither the model"),
    ):
        load(run)


@pytest.mark.parametrize(
    "changes, use",
    [
        (dict(kl_coef=0.1), "--kl-coef now compares with"),
        (dict(lora_rank=2), "the adapters are now added to"),
        ({}, ""),
    ],
)
def test_a_run_that_goes_on_with_another_model_says_what_it_is_used_for(
    tmp_path, model, tokenizer, capsys, changes, use
):
    run = prepared(tmp_path, model, tokenizer, **changes)
    run.lock.close()
    write_checkpoint(tmp_path, model, tokenizer, **changes)
    before = json.dumps({"model": run.config.model})
    (tmp_path / "run/config.json").write_text(before)
    prepared(tmp_path, model, tokenizer, resume="auto", **changes).lock.close()
    assert "the run started with" not in capsys.readouterr().out
    model.save_pretrained(tmp_path / "other")
    tokenizer.save_pretrained(tmp_path / "other")
    other = dataclasses.replace(run.config, model=str(tmp_path / "other"), resume="auto")
    grpo_trainer.Run(other).lock.close()
    said = capsys.readouterr().out
    told = f"--model {tmp_path}/other: the run started with {run.config.model}, but {use} this model; pass"
    assert said.count(told) == bool(use) and use in said


def test_a_model_is_compared_with_that_of_the_first_start_and_not_of_the_last(
    tmp_path, model, tokenizer, capsys
):
    run = prepared(tmp_path, model, tokenizer, kl_coef=0.1)
    config = dataclasses.replace(run.config, resume="auto")
    load(run)
    policy = run.policy
    model.save_pretrained(tmp_path / "other")
    tokenizer.save_pretrained(tmp_path / "other")
    for step, name in enumerate(("model", "other", "other", "model"), start=1):
        if step > 1:
            run = grpo_trainer.Run(dataclasses.replace(config, model=str(tmp_path / name)))
        told = f"--model {tmp_path}/{name}: the run started with {config.model}, "
        assert (told in capsys.readouterr().out) == (name == "other")
        run_folder.note_start(run.config, run.step)
        run.policy, run.step = policy, step
        run.save()
        run.lock.close()


def test_each_start_gives_the_policy_servers_other_random_numbers(monkeypatch, tmp_path):
    """Otherwise, a run that is often interrupted would sample with the same few random numbers."""
    seeds = []

    class Servers:
        def __init__(self, policy, tokenizer, config):
            seeds.append(config.seed)

        def shutdown(self):
            pass

    monkeypatch.setattr(run_file, "PolicyServers", Servers)
    for seed, step in ((0, 0), (0, 3), (1, 0), (10**18, 0), (-1, 0), (0, 0)):
        run = run_file.Run(toy_config(tmp_path, seed=seed, rollout="vllm"))
        run.step = step
        run.policy = object.__new__(Policy)
        with contextlib.ExitStack() as stack:
            run.start_servers(stack)
        run.lock.close()
    assert seeds.pop() == seeds[0] and len(set(seeds)) == 5
    assert all(0 <= seed < 2**31 for seed in seeds)
