"""What a run reads, and in which words it refuses what it cannot read."""

import random
import re

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
import tyro

import grpo_trainer
import run_folder
from policy import Policy
from run import Run
from test_grpo_trainer import prepared, run_config
from tiny import a_step, config_of, groups_of
from toy import toy_world


def train_file_of(folder, name, indices):
    rng = random.Random(1)
    problems = [toy_world.random_problem(rng, toy_world.REST) for _ in indices]
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
    with pytest.raises(ValueError, match="nowhere.parquet: no such file"):
        prepared(tmp_path, model, tokenizer, train_file=(files[0], "nowhere.parquet"))


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
    with pytest.raises(ValueError, match=re.escape(f"chat_template_kwargs: {text!r} is not JSON, or no")):
        prepared(tmp_path, model, tokenizer, chat_template_kwargs=text)


# ---- files that were cut: a full disk, a power cut, a download that broke off


def cut(path):
    path.write_bytes(path.read_bytes()[:1000])


def write_checkpoint(folder, model, tokenizer, **changes):
    """run/checkpoints/step_1, from which a run of test_grpo_trainer.prepared can go on."""
    model.save_pretrained(folder / "model")
    config = run_config(folder, "run", **changes)
    source = str(folder / "model")
    policy = Policy(config_of(model=source, **changes), source, torch.device("cpu"))
    policy.update(groups_of(a_step(policy.model)), lr=1e-3)
    return run_folder.save_checkpoint(policy, tokenizer, {"step": 1, "prompts_drawn": 4}, config)


@pytest.mark.parametrize("changes, name", [({}, "model"), (dict(lora_rank=2), "adapter_model")])
def test_cut_weights_of_a_checkpoint_are_named_in_one_line(tmp_path, model, tokenizer, changes, name):
    checkpoint = write_checkpoint(tmp_path, model, tokenizer, **changes)
    prepared(tmp_path, model, tokenizer, resume="auto", **changes).lock.close()
    cut(checkpoint / f"{name}.safetensors")
    message = rf"^model: .*step_1/{name}.safetensors cannot be read \(.*\); copy .*$"
    with pytest.raises(ValueError, match=message):
        prepared(tmp_path, model, tokenizer, resume="auto", **changes)


def test_a_cut_model_is_named_also_for_an_evaluation(tmp_path, model, tokenizer):
    config = prepared(tmp_path, model, tokenizer, total_steps=0).config
    cut(tmp_path / "model/model.safetensors")
    with pytest.raises(ValueError, match="^model: .*model/model.safetensors cannot be read"):
        Run(grpo_trainer.replace(config, out_dir=str(tmp_path / "another")))


@pytest.mark.parametrize("name", [".metadata", "__0_0.distcp"])
def test_a_cut_optimizer_is_named_in_one_line(tmp_path, model, tokenizer, name):
    checkpoint = write_checkpoint(tmp_path, model, tokenizer)
    run = prepared(tmp_path, model, tokenizer, resume="auto", device="cpu")
    run.policy = Policy(run.config, run.source, torch.device("cpu"))
    run.load_optimizer()
    cut(checkpoint / "optimizer" / name)
    with pytest.raises(ValueError) as refused:
        run.load_optimizer()
    message = r".*step_1/optimizer cannot be read \(.*\); delete .*step_1 to go on from the .* before it"
    assert re.fullmatch(message, str(refused.value))


# ---- adapters of a run that goes on


@pytest.mark.parametrize(
    "changes, message",
    [
        (dict(lora_rank=4), "lora_rank: 4, but the run in out_dir has 2; take that"),
        (dict(lora_rank=0), "lora_rank: 0, but the run in out_dir has 2; take that"),
        (dict(lora_rank=2, lora_alpha=160), "lora_alpha: 160, but the run in out_dir has 4; take that"),
    ],
)
def test_a_run_goes_on_with_its_own_adapters(tmp_path, model, tokenizer, changes, message):
    write_checkpoint(tmp_path, model, tokenizer, lora_rank=2)
    with pytest.raises(ValueError, match=f"^{message}$"):
        prepared(tmp_path, model, tokenizer, resume="auto", **changes)
    prepared(tmp_path, model, tokenizer, resume="auto", lora_rank=2, lora_alpha=4)
