"""Who imports whom: the top level stands without the folders below it."""

import ast
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
SCRIPTS = re.findall(r"^\| `([\w/]+\.py)`", (ROOT / "README.md").read_text(), re.M)  # in its trees of files
TOP = [ROOT / script for script in SCRIPTS if "/" not in script]
FOLDERS = ("toy", "tools", "cluster")


@pytest.mark.parametrize("path", TOP, ids=lambda path: path.name)
def test_the_top_level_imports_nothing_from_a_folder(path):
    """When it is imported; a function may, where a flag asks for it."""
    imported = set()
    for node in ast.parse(path.read_text()).body:
        names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
        names += [node.module or ""] if isinstance(node, ast.ImportFrom) else []
        imported |= {name.split(".")[0] for name in names}
    assert not imported & set(FOLDERS)
