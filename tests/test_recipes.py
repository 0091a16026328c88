"""Every command in recipes/ parses against the script it calls. (Those of README and docs: test_docs.py.)"""

import importlib
import importlib.util
import re
import shlex
import sys
from pathlib import Path

import pytest
import tyro

ROOT = Path(__file__).resolve().parent.parent
RECIPES = sorted((ROOT / "recipes").glob("*.sh"))
REASONING = dict(group_size=8, temperature=1.0, max_prompt_length=2048, val_temperature=1.0, val_top_p=0.7)
PAPER = {  # paper Table 1
    "genrm_4b": dict(group_size=16, temperature=1.2, max_prompt_length=5120, max_response_length=8192,
                     val_temperature=0.6, val_top_p=0.95),
    "7b": REASONING | dict(max_response_length=8192),
    "32b": REASONING | dict(max_response_length=20480),
}  # fmt: skip
SHARED = dict(
    train_batch_size=512, mini_batch_size=32, lr=1e-6, lr_warmup_steps=10, weight_decay=0.1,
    max_grad_norm=1.0, adam_betas=(0.9, 0.999), clip_low=0.2, clip_high=0.28, clip_c=10.0,
    overlong_buffer=4096, overlong_factor=1.0, entropy_coef=0.0,
)  # fmt: skip

COMMAND = r"(?:[AB]?\$ )?\s*(?:\[.*\|\|\s*)?(?:\w+=\S+ )*python (?:([\w/]+)\.py|-m ([\w.]+))(?: (.*)|$)"


def commands(text):
    """(script, arguments) of every `python SCRIPT.py ...` and `python -m FOLDER.SCRIPT ...`.

    Shell variables become "7", which is a number, a name and a path. WHERE (where the judge is) takes each of
    the values that the recipe gives it; "..." stands for what the trainer needs.
    """
    text = re.sub(r"\\\n\s*", " ", text)
    places = re.findall(r"WHERE=\((.*)\)", text) or [""]
    for place in places:
        for line in text.replace('"${WHERE[@]}"', place).splitlines():
            match = re.match(COMMAND, line)
            if match:
                arguments = re.sub(r'"\$(@|\{@:\d\})"', "", match[3] or "")
                arguments = re.sub(r"\s+(#|&|[12]?>|\|\|).*$", "", arguments)
                arguments = re.sub(r"\$\{?\w+\}?", "7", arguments)
                arguments = arguments.replace("...", "--model m --train-file t --out-dir o", 1)
                yield match[1] or match[2], shlex.split(arguments)


def load(script):
    """The module of a script: "grpo_trainer", "toy.report" or "benchmarks/bench_router"."""
    if "/" not in script:
        return importlib.import_module(script)
    spec = importlib.util.spec_from_file_location(script.replace("/", "_"), ROOT / f"{script}.py")
    module = sys.modules[spec.name] = importlib.util.module_from_spec(spec)  # its dataclasses need the entry
    spec.loader.exec_module(module)
    return module


def parse(script, arguments):
    own = arguments[: arguments.index("--")] if "--" in arguments else arguments
    return tyro.cli(load(script).Config, args=own)


@pytest.mark.parametrize("path", RECIPES, ids=lambda path: path.stem)
def test_recipe_parses(path):
    found = list(commands(path.read_text()))
    both = path.stem.startswith(("fapo", "baseline", "toy"))  # with and without an external judge
    assert len(found) >= 1 + both
    for script, arguments in found:
        config = parse(script, arguments)
        if script == "grpo_trainer" and not path.stem.startswith("toy"):
            expected = SHARED | PAPER["genrm_4b" if "genrm" in path.stem else path.stem.split("_")[1]]
            assert {name: getattr(config, name) for name in expected} == expected
            file, name = config.reward_fn.split(":")
            assert config.baseline == path.stem.startswith("baseline")
            assert hasattr(importlib.import_module(file.removesuffix(".py")), name)


def test_the_papers_settings_are_the_trainers_defaults():
    config = parse("grpo_trainer", ["--model", "m", "--train-file", "t", "--out-dir", "o"])
    assert {name: getattr(config, name) for name in SHARED | PAPER["7b"]} == SHARED | PAPER["7b"]
