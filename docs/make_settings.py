"""Writes docs/settings.md, every setting of every script, from the dataclasses and the comments in them.

    python docs/make_settings.py

A test compares the page with the dataclasses. The help texts are the comments that `--help` shows: at the end
of a field's line, above it, or a string below it.
"""

import ast
import dataclasses
import importlib
import inspect
import sys
import typing
from pathlib import Path

DOCS = Path(__file__).resolve().parent
sys.path.insert(0, str(DOCS.parent))

import reward_loop

HEAD = """# Settings

Every setting of every script, with its default; `--help` prints the same texts. A setting that is "off" is
switched on by its flag, and one that is "on" is switched off by the flag with "no-" in front
(`--no-val-before-train`). Several values are separated by spaces. `docs/make_settings.py` writes this page.
"""
OTHERS = {
    "score_file": "Scores a file of responses. The groups [Rewards](#rewards) and [Reward model]"
    "(#reward-model)\napply as well, except `--reward-mode`.",
    "genrm_server": "Serves a reward model: vLLM servers behind a router.",
    "router": "One HTTP address in front of servers that run already.",
    "prepare_data": "Writes data sets as parquet files.",
    "tools.evaluate_genrm": "Evaluates a judge on labelled solutions.",
    "tools.plan_run": "Estimates memory and placement. It takes all flags of the trainer as well.",
    "tools.view_run": "Writes or serves the web page of one or several runs.",
    "tools.merge_lora": "Merges a checkpoint of LoRA adapters into an ordinary model.",
    "toy.warm_start": "Makes the warm-started checkpoints of the toy worlds.",
    "toy.report": "Prints the tables of finished runs in the toy worlds.",
}
GROUPS = {  # of the trainer's settings, by their names; a name ending in _ stands for all that begin so
    "Model and data": """model train_file val_file out_dir chat_template_kwargs max_prompt_length
        max_positions trust_remote_code seed""",
    "Rewards": """reward_fn reward_kwargs num_workers sync_processes timeout max_in_flight max_rpm
        http_retries max_no_verdict_rate""",
    "Reward model": "genrm genrm_ router_address reward_mode reward_model_",
    "Rollouts": """rollout rollout_ group_size temperature max_response_length overlong_ overlap
        max_logprob_diff""",
    "Algorithm": """advantage credit loss reward_terms prefix_ clip_ tis_cap kl_coef entropy_coef
        dynamic_sampling max_refills max_idle_steps""",
    "Optimizer": """total_steps train_batch_size mini_batch_size lr lr_warmup_steps adam_betas weight_decay
        max_grad_norm lora_ max_tokens_per_micro_batch gradient_checkpointing""",
    "Evaluation": "val_",
    "Checkpoints and logs": "save_every keep_checkpoints resume samples_per_step tensorboard wandb dry_run",
    "Hardware": "device policy_ max_restarts num_threads",
}


def group_of(name: str) -> str:
    """The group of a trainer's setting. KeyError for one that no group has."""
    for exact in (True, False):
        for title, names in GROUPS.items():
            for one in names.split():
                if name == one or not exact and one.endswith("_") and name.startswith(one):
                    return title
    raise KeyError(f"docs/make_settings.py: no group has the setting {name}")


def comments_above(lines: list[str], number: int) -> str:
    """The block of comment lines that ends just above this line."""
    found = []
    while number > 0 and lines[number - 1].strip().startswith("#"):
        number -= 1
        found.insert(0, lines[number].strip().lstrip("# "))
    return " ".join(found)


def help_texts(config: type) -> dict[str, str]:
    """{field: help} of a dataclass and of those that it inherits from."""
    texts = {}
    for base in reversed(config.__mro__[:-1]):
        lines = inspect.getsource(base).splitlines()
        body = ast.parse("\n".join(lines)).body[0].body
        for node, following in zip(body, [*body[1:], None]):
            if not isinstance(node, ast.AnnAssign):
                continue
            last = lines[node.end_lineno - 1].encode()[node.end_col_offset :].decode()
            text = last.partition("#")[2].strip() or comments_above(lines, node.lineno - 1)
            if isinstance(following, ast.Expr) and isinstance(following.value, ast.Constant):
                text = " ".join(following.value.value.split())
            texts[node.target.id] = text
    return texts


def default_of(field) -> str:
    value = field.default
    if field.default_factory is not dataclasses.MISSING:
        value = field.default_factory()
    if value is dataclasses.MISSING:
        return "required"
    if value in (None, "", ()):
        return ""
    if isinstance(value, bool):
        return "on" if value else "off"
    if isinstance(value, (tuple, list)):
        value = " ".join(map(str, value))
    return f"`{value}`"


def choices_of(hint) -> str:
    """The values that a setting may have, if they are few."""
    if typing.get_origin(hint) is typing.Literal:
        return ", ".join(f"`{value}`" for value in typing.get_args(hint))
    found = [choices_of(inner) for inner in typing.get_args(hint)]
    return next(filter(None, found), "")


def table(config: type, fields: list) -> str:
    texts, hints = help_texts(config), typing.get_type_hints(config, include_extras=True)
    rows = ["| setting | default | meaning |", "| --- | --- | --- |"]
    for field in fields:
        if not field.init:
            continue
        name = f"--{field.name.replace('_', '-')}"
        if "Positional" in repr(hints[field.name]):
            name = field.name.upper()
        meaning = texts[field.name].replace("|", "\\|")
        choices = choices_of(hints[field.name])
        if choices:
            meaning = f"{meaning} ({choices})"
        rows.append(f"| `{name}` | {default_of(field)} | {meaning} |")
    return "\n".join(rows)


def page() -> str:
    """docs/settings.md."""
    trainer = importlib.import_module("grpo_trainer").Config
    parts = [HEAD, "## The trainer (`grpo_trainer.py`)\n"]
    grouped = {title: [] for title in GROUPS}
    for field in dataclasses.fields(trainer):
        grouped[group_of(field.name)].append(field)
    for title, fields in grouped.items():
        required = [field for field in fields if default_of(field) == "required"]
        fields = required + [field for field in fields if field not in required]
        parts.append(f"### {title}\n\n{table(trainer, fields)}\n")
    for script, about in OTHERS.items():
        config = importlib.import_module(script).Config
        inherited = {field.name for field in dataclasses.fields(reward_loop.RewardOptions)}
        if issubclass(config, trainer):
            inherited = {field.name for field in dataclasses.fields(trainer)}
        if not issubclass(config, reward_loop.RewardOptions):
            inherited = set()
        fields = [field for field in dataclasses.fields(config) if field.name not in inherited]
        path = script.replace(".", "/") + ".py"
        parts.append(f"## `{path}`\n\n{about}\n\n{table(config, fields)}\n")
    return "\n".join(parts)


if __name__ == "__main__":
    (DOCS / "settings.md").write_text(page())
