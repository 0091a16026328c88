"""Which files import which, and the layout of the code. The top level does not depend on the folders."""

import ast
import importlib
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

import forked

ROOT = Path(__file__).resolve().parent.parent
FOLDERS = ("toy", "tools", "cluster")
TOP_SCRIPTS = re.findall(r"^(\w+\.py) {2,}", (ROOT / "README.md").read_text(), re.M)  # its list of files
IN_FOLDERS = [
    f"{folder}/{path.name}" for folder in FOLDERS for path in sorted((ROOT / folder).glob("[!_]*.py"))
]
SCRIPTS = [*TOP_SCRIPTS, *IN_FOLDERS, "recipes/gym_tasks.py"]
TOP = [ROOT / script for script in TOP_SCRIPTS]


@pytest.mark.parametrize("command", ["check", "format --diff"])
def test_the_layout_is_ruffs(command):
    done = subprocess.run(
        [Path(sys.executable).with_name("ruff"), *command.split(), "--no-cache", ROOT],
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stdout


@pytest.mark.parametrize("path", TOP, ids=lambda path: path.name)
def test_the_top_level_imports_nothing_from_a_folder(path):
    """This holds at import time; functions may import a folder if a flag requires it."""
    imported = set()
    for node in ast.parse(path.read_text()).body:
        names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
        names += [node.module or ""] if isinstance(node, ast.ImportFrom) else []
        imported |= {name.split(".")[0] for name in names}
    assert not imported & set(FOLDERS)


# All scripts are imported in one process, because torch, Ray and vLLM take seconds. Our modules are imported
# anew for each script.
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
    """The benchmark is started as its header says, so Python searches its folder and not this one."""
    environment = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"}
    command = [sys.executable, "-c", EACH]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == sorted(path.name for path in ROOT.glob("benchmarks/*.py"))


COMMANDS = [name for name in SCRIPTS if 'if __name__ == "__main__":' in (ROOT / name).read_text()]
COMMANDS.remove("reward_worker.py")  # a grading process, which reward_loop.py starts
# All show their help in one process, whose modules are listed after each of them.
HELP = """
import contextlib, io, json, runpy, sys
sys.path[0] = "."
for name in sys.argv[1:]:
    sys.argv, text, code = [name, "--help"], io.StringIO(), 0
    with contextlib.redirect_stdout(text):
        try:
            runpy.run_path(name, run_name="__main__")
        except SystemExit as exit:
            code = exit.code or 0
    modules = {module.split(".")[0] for module in sys.modules}
    print(json.dumps([code, text.getvalue(), sorted(modules)]))
"""


@pytest.fixture(scope="module")
def helped():
    """Return the exit code of each script's help, its text, and all modules that are loaded by then."""
    command = [sys.executable, "-c", HELP, *COMMANDS]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    lines = map(json.loads, done.stdout.splitlines())
    return dict(zip(COMMANDS, lines)), done.stderr


@pytest.mark.parametrize("name", COMMANDS)
def test_help_imports_nothing_that_takes_seconds(name, helped):
    results, errors = helped
    assert name in results, errors
    code, text, modules = results[name]
    assert code == 0 and text.startswith("usage: ") and "--help" in text
    said = " ".join(text.replace("│", " ").split())
    assert "default: None" not in said and "default: ''" not in said  # The text says what happens instead.
    assert not {"torch", "transformers", "ray", "vllm"} & set(modules)
    assert len(COMMANDS) > 10


LIKE_A_REAL_ONE = """
import atexit, os, sys, threading
ours = {path.removesuffix(".py") for path in os.listdir(sys.argv[1])}
print(sys.path[:2], sys.argv, os.getcwd(), os.environ["X"], sys.stdin.read(), ours & {*sys.modules}, __name__)
atexit.register(print, "exit handler")
threading.Timer(0.1, print, ["thread"]).start()
sys.exit(eval(sys.argv[2]))
"""


@pytest.mark.slow
@pytest.mark.parametrize("end", ["3", "None", "'a text'", "1 / 0"])
def test_a_script_that_the_tests_fork_is_like_one_that_python_starts(tmp_path, end):
    script = tmp_path / "script.py"
    script.write_text(LIKE_A_REAL_ONE)
    given = dict(env=os.environ | {"X": "1", "PYTHONPATH": "/nowhere"}, cwd=tmp_path)
    quiet = dict(stdin=subprocess.DEVNULL, capture_output=True, text=True)
    real = subprocess.run([sys.executable, str(script), str(ROOT), end], **given, **quiet)
    forked_one = forked.run([script, ROOT, end], **given)
    assert (forked_one.returncode, forked_one.stdout) == (real.returncode, real.stdout)
    assert forked_one.stderr.splitlines()[-1:] == real.stderr.splitlines()[-1:]
    assert "set() __main__\nthread\nexit handler\n" in real.stdout


def names_of_our_modules(path):
    """Return the names that a script imports, reads or patches in this repository's modules, such as
    policy.Sample.
    """
    tree = ast.parse(path.read_text())
    modules, wanted = {}, set()
    ours = {script.removesuffix(".py") for script in SCRIPTS} | set(FOLDERS)
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                if alias.name.split(".")[0] in ours:
                    modules[alias.asname or alias.name] = alias.name
        elif isinstance(node, ast.ImportFrom) and node.module.split(".")[0] in ours:
            for alias in node.names:
                wanted.add((node.module, alias.name))
                if (ROOT / node.module / f"{alias.name}.py").exists():
                    modules[alias.asname or alias.name] = f"{node.module}.{alias.name}"
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute):
            module, _, name = ast.unparse(node).partition(".")
            if module in modules and re.fullmatch(r"[\w.]+", name):
                wanted.add((modules[module], name))
        elif isinstance(node, ast.Call) and ast.unparse(node.func) in ("patch.object", "setattr"):
            target, name = node.args[:2]
            if ast.unparse(target) in modules and isinstance(name, ast.Constant):
                wanted.add((modules[ast.unparse(target)], name.value))
    return wanted


@pytest.mark.parametrize("path", sorted(ROOT.glob("benchmarks/**/*.py")), ids=lambda path: path.stem)
def test_the_names_that_a_benchmark_imports_or_patches_exist(path):
    """Renaming a function could break a benchmark that no other test runs."""
    for module, name in sorted(names_of_our_modules(path)):
        value = importlib.import_module(module)
        for part in name.split("."):
            if not isinstance(value, (type, type(importlib))):
                break  # attributes of other objects are not checked
            if (ROOT / module / f"{part}.py").exists():
                break  # a module in a folder
            assert hasattr(value, part), f"{path.name} uses {module}.{name}"
            value = getattr(value, part)


def test_names_of_our_modules_by_hand(tmp_path):
    text = "import policy, os\nfrom cluster import ranks\nfrom rollout import gone\n"
    text += "policy.Sample.lost = os.sep\npatch.object(ranks, 'Ranks')\nranks.Ranks.join\n"
    (tmp_path / "bench.py").write_text(text)
    found = names_of_our_modules(tmp_path / "bench.py")
    assert {("rollout", "gone"), ("policy", "Sample.lost"), ("cluster.ranks", "Ranks")} <= found
    assert {("cluster.ranks", "Ranks.join"), ("policy", "Sample")} <= found
    assert not [module for module, _ in found if module == "os"]
