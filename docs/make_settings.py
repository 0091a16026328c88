"""Write docs/settings.md, which lists the settings of scripts, from the dataclasses and their comments.

    python docs/make_settings.py

As for `--help`, command_line.py reads the comments and sorts settings into groups.
"""

import dataclasses
import importlib
import re
import sys
import typing
from pathlib import Path

DOCS = Path(__file__).resolve().parent
sys.path.insert(0, str(DOCS.parent))

import command_line
import reward_loop
import settings

HEAD = """# Settings

This page lists the settings of the scripts in the top-level folder, `tools/` and `toy/`, with their defaults.
`--help` prints the same texts. To turn on a setting whose default is "off", pass its flag. To turn off a
setting whose default is "on", put "no-" before its name (`--no-val-before-train`). Separate multiple values
with spaces. `docs/make_settings.py` writes this page.
"""
OTHERS = {
    "score_file": "Scores a file of responses. It also accepts the settings in the groups\n"
    "[Reward](#reward) and [Judge](#judge), except `--reward-mode`.",
    "genrm_server": "Serves a reward model with vLLM servers behind a router.",
    "router": "Provides one HTTP address for servers that are already running.",
    "prepare_data": "Writes data sets as Parquet files.",
    "tools.evaluate_genrm": "Evaluates a judge on labelled solutions.",
    "tools.plan_run": "Estimates memory and placement. It also accepts all flags of the trainer.",
    "tools.view_run": "Writes or serves the web page of one or more runs.",
    "tools.merge_lora": "Merges a checkpoint of LoRA adapters into an ordinary model.",
    "toy.warm_start": "Trains the warm-started checkpoints of the toy worlds.",
    "toy.report": "Prints tables for finished runs in the toy worlds.",
}


def default_of(field) -> str:
    value = field.default
    if value is dataclasses.MISSING:
        return "required"
    if value in (None, "", ()):
        return ""
    if isinstance(value, bool):
        return "on" if value else "off"
    if isinstance(value, tuple):
        value = " ".join(map(str, value))
    return f"`{value}`"


def table(config: type, fields: list) -> str:
    texts, hints = command_line.help_texts(config), typing.get_type_hints(config, include_extras=True)
    rows = ["| setting | default | meaning |", "| --- | --- | --- |"]
    for field in fields:
        hint = hints[field.name]
        if "Suppress" in repr(hint):  # This field is not a command-line flag.
            continue
        name = f"--{field.name.replace('_', '-')}"
        for about in getattr(hint, "__metadata__", ()):
            if getattr(about, "aliases", None):  # --help shows both flags.
                name += f"`, `--{about.name}"
        if "Positional" in repr(hint):
            name = field.name.upper()
        meaning = texts[field.name].replace("|", "\\|")
        choices = re.search(r"Literal\[(.*?)\]", repr(hint))
        if choices:
            meaning += f" ({choices[1]})".replace("'", "`")
        rows.append(f"| `{name}` | {default_of(field)} | {meaning} |")
    return "\n".join(rows)


def page() -> str:
    """Return the text of docs/settings.md."""
    trainer = settings.Config
    parts = [HEAD, "## The trainer (`grpo_trainer.py`)\n"]
    for group, fields in command_line.grouped(trainer).items():
        if fields:
            parts.append(f"### {group.capitalize()}\n\n{table(trainer, fields)}\n")
    for script, about in OTHERS.items():
        config = importlib.import_module(script).Config
        known = set()  # (name, default) of the settings that the trainer's tables list
        if issubclass(config, reward_loop.RewardOptions):
            known = {(field.name, default_of(field)) for field in dataclasses.fields(trainer)}
        fields = [
            field for field in dataclasses.fields(config) if (field.name, default_of(field)) not in known
        ]
        path = script.replace(".", "/") + ".py"
        parts.append(f"## `{path}`\n\n{about}\n\n{table(config, fields)}\n")
    return "\n".join(parts)


def main() -> None:
    (DOCS / "settings.md").write_text(page())


if __name__ == "__main__":
    command_line.cli(main, __doc__)
