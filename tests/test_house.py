"""Who imports whom: the top level stands without the folders below it."""

import ast
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
SCRIPTS = re.findall(r"^([\w/]+\.py) {2,}", (ROOT / "README.md").read_text(), re.M)  # its list of files
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


# One process for all, as torch, Ray and vLLM take seconds; what is ours is imported anew for each.
EACH = """
import runpy, sys
from pathlib import Path
root = Path.cwd()
path, known = sys.path[1:], set(sys.modules)
for file in sorted(root.glob("benchmarks/*.py")):
    sys.path[:] = [str(file.parent), *path]
    runpy.run_path(str(file))
    for name in set(sys.modules) - known:
        where = getattr(sys.modules[name], "__file__", None) or ""
        if Path(where).parent in (file.parent, root, *map(root.joinpath, ("toy", "tools", "cluster"))):
            del sys.modules[name]
    print(file.name)
"""


@pytest.mark.slow
def test_each_benchmark_finds_the_scripts():
    """Started as its header says: Python looks beside it, not here."""
    environment = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"}
    command = [sys.executable, "-c", EACH]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == sorted(path.name for path in ROOT.glob("benchmarks/*.py"))


COMMANDS = [name for name in SCRIPTS if 'if __name__ == "__main__":' in (ROOT / name).read_text()]
COMMANDS.remove("reward_worker.py")  # a grading process, which reward_loop.py starts
HELP = """
import runpy, sys
sys.path[0] = "."
sys.argv = [sys.argv[1], "--help"]
try:
    runpy.run_path(sys.argv[0], run_name="__main__")
finally:
    print(*{name.split(".")[0] for name in sys.modules}, file=sys.stderr)
"""


@pytest.mark.parametrize("name", COMMANDS)
def test_help_imports_nothing_that_takes_seconds(name):
    done = subprocess.run([sys.executable, "-c", HELP, name], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0 and done.stdout.startswith("usage: ") and "--help" in done.stdout
    assert not {"torch", "transformers", "ray", "vllm"} & set(done.stderr.split())
    assert len(COMMANDS) > 10
