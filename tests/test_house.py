"""The house's measures: length of lines, functions and files, who imports whom, size of the top level."""

import ast
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
SCRIPTS = re.findall(r"^\| `([\w/]+\.py)`", (ROOT / "README.md").read_text(), re.M)  # in its trees of files
HOUSE = [ROOT / script for script in SCRIPTS]
TOP = [path for path in HOUSE if path.parent == ROOT]
FOLDERS = ("toy", "tools", "cluster")
EVERY = [
    *HOUSE,
    *(path for folder in ("benchmarks", "docs", "tests") for path in (ROOT / folder).rglob("*.py")),
]
LONGER = {"grpo_trainer.train": 80}  # the loop


def name_of(path):
    return str(path.relative_to(ROOT))


@pytest.mark.parametrize("path", EVERY, ids=name_of)
def test_lines_are_at_most_110_characters(path):
    lines = path.read_text().splitlines()
    assert [f"{n}: {line}" for n, line in enumerate(lines, 1) if len(line) > 110] == []


@pytest.mark.parametrize("path", HOUSE, ids=name_of)
def test_files_and_functions_are_short(path):
    text = path.read_text()
    assert len(text.splitlines()) <= 650
    functions = (ast.FunctionDef, ast.AsyncFunctionDef)
    for node in (node for node in ast.walk(ast.parse(text)) if isinstance(node, functions)):
        lines = node.end_lineno - node.lineno + 1
        assert lines <= LONGER.get(f"{path.stem}.{node.name}", 60), f"{node.name}: {lines} lines"


@pytest.mark.parametrize("path", TOP, ids=name_of)
def test_the_top_level_imports_nothing_from_a_folder(path):
    """When it is imported; a function may, where a flag asks for it."""
    imported = set()
    for node in ast.parse(path.read_text()).body:
        names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
        names += [node.module or ""] if isinstance(node, ast.ImportFrom) else []
        imported |= {name.split(".")[0] for name in names}
    assert not imported & set(FOLDERS)


def test_the_top_level_is_at_most_5000_lines():
    assert sum(len(path.read_text().splitlines()) for path in TOP) <= 5000
