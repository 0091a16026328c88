"""The exercises of docs/teaching.md: their tests fail as shipped and pass with the solutions."""

import importlib.util
import os
import re
import shutil
import subprocess
from pathlib import Path

import pytest

import forked

ROOT = Path(__file__).resolve().parent.parent
FOLDER = "docs/exercises"
EXERCISES = {path.stem for path in (ROOT / FOLDER).glob("*.diff")}
# Students' mistakes, as {exercise: (text of the solution, wrong text)}. Each dict is tried at once.
MISTAKES = [
    {
        "advantage": ("where(known,", "where(known.all(1, keepdim=True),"),
        "asking": (
            're.findall(r"\\d+[+-](\\d+)=", written) == said',
            'set(re.findall(r"[+-](\\d+)=", written)) == set(said)',
        ),
        "audit": ("random.Random(0).sample(passed, min(n, len(passed)))", "passed[-n:]"),
        "group_reward": ("min(right)", "min(lengths)"),
        "reward_term": (
            'return result | {"score": score, "progress": progress}',
            'result |= {"score": score, "progress": progress}\n    return result',
        ),
    },
    {
        "asking": ("written) == said", "written)[: len(said)] == said"),
        "audit": ("max(len(missed), 1)", "len(missed)"),
        "group_reward": (
            "(max(right) - length) / (max(right) - min(right))",
            "sum(other > length for other in right) / (len(right) - 1)",
        ),
        "reward_term": ("max(len(paragraphs), 1)", "len(paragraphs)"),
    },
]


@pytest.mark.slow
def test_each_exercise_is_red_and_its_solution_green(tmp_path):
    """Run the commands of the page in a copy of the scripts and the exercises."""
    for pattern in ("*.py", "toy/*.py", "pytest.ini", f"{FOLDER}/*.*"):
        for path in ROOT.glob(pattern):
            target = tmp_path / path.relative_to(ROOT)
            target.parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(path, target)

    def results():
        """Return {(exercise, test): "PASSED" or "FAILED"}."""
        command = ["-m", "pytest", "-rA", "--tb=line", "-p", "no:cacheprovider", FOLDER]
        said = forked.run(command, tmp_path).stdout
        found = re.findall(rf"^(\w+) {FOLDER}/test_(\w+)\.py::(\w+(?:\[.*?\])?)", said, re.M)
        assert found and not re.search("^ERROR", said, re.M), said
        return {(exercise, test): result for result, exercise, test in found}

    assert len(EXERCISES) == 6
    before = results()
    assert {exercise for (exercise, _), result in before.items() if result == "FAILED"} == EXERCISES
    outside = os.environ | {"GIT_CEILING_DIRECTORIES": str(tmp_path.parent)}  # the copy is not a repository
    for exercise in EXERCISES:
        subprocess.run(["git", "apply", f"{FOLDER}/{exercise}.diff"], cwd=tmp_path, env=outside, check=True)
    assert results() == dict.fromkeys(before, "PASSED")
    said = list(before.values())
    counts = f"# {said.count('FAILED')} failed, {said.count('PASSED')} passed"
    assert counts in (ROOT / "docs/teaching.md").read_text()
    solved = {name: (tmp_path / FOLDER / f"{name}.py").read_text() for name in EXERCISES}
    for mistakes in MISTAKES:
        for name, text in solved.items():
            right, wrong = mistakes.get(name, ("", ""))
            assert right in text
            (tmp_path / FOLDER / f"{name}.py").write_text(text.replace(right, wrong))
        failed = {exercise for (exercise, _), result in results().items() if result == "FAILED"}
        assert failed == set(mistakes)


def exercise(name):
    """Return the module docs/exercises/NAME.py."""
    spec = importlib.util.spec_from_file_location(name, ROOT / FOLDER / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_narrow_judge_names_only_the_paragraphs_that_it_finds_wrong():
    """The report shows `first_wrong` as the verdict of the reward function, next to that of the oracle."""
    info = {"question": "Ben has 65 eggs, gets 9, loses 8, gets 3. Remainder mod 5?"}
    found = {}
    for first in ("65+9=74", "65+9=64", "65+9=84"):  # sound, a forgotten carry, and ten too many
        total = int(first[-2:])
        lines = [first, f"{total}-8={total - 8}", f"{total - 8}+3={total - 5}", r"Remainder \boxed{4}"]
        result = exercise("audit").compute_score("toy", "\n\n".join(lines), "4", info)
        assert result["flawed_positive"] == (result["first_wrong"] != -1)
        found[first] = result["first_wrong"], result["oracle_flawed_positive"], result["score"]
    assert found == {"65+9=74": (-1, False, 1), "65+9=64": (0, True, 0), "65+9=84": (-1, True, 1)}


@pytest.mark.parametrize("grounded", [True, False])
def test_the_check_of_the_exercise_and_the_oracle_have_separate_verdicts(grounded, monkeypatch):
    """With them, the report marks samples, and its filter shows those about which the two disagree."""
    asking = exercise("asking")
    monkeypatch.setattr(asking, "is_grounded", lambda turns, question: grounded)
    info = {"question": "Ben has 65, sells pears. More than 50?", "prices": {"pears": 7}}
    text = "pears=4\n\n65+4=69\n\nMore \\boxed{yes}"
    result = asking.compute_score("shop", text, "yes", info, [{"who": "policy", "text": text}])
    assert (result["flawed_positive"], result["oracle_flawed_positive"]) == (not grounded, True)
    assert result["score"] == (1.0 if grounded else 0.0)


def test_the_first_commands_install_what_they_run():
    """`make setup` installs requirements.txt or requirements-cpu.txt, without packages that only the tests
    need.
    """
    first = re.search(r"```bash\n(.*?)```", (ROOT / "docs/teaching.md").read_text(), re.S)[1].splitlines()
    assert first[0] == "make setup"
    ran = next(number for number, line in enumerate(first) if line.startswith("pytest "))
    for name in ("requirements.txt", "requirements-cpu.txt"):
        by_setup = re.findall(r"^(\w+)", (ROOT / name).read_text(), re.M)
        assert "pytest" in by_setup or "pip install pytest" in first[:ran]


def test_the_page_has_every_exercise_and_two_hours():
    page = (ROOT / "docs/teaching.md").read_text()
    assert sum(map(int, re.findall(r"^\| (\d+) \|", page, re.M))) == 120
    assert {name for name in EXERCISES if f"`{FOLDER}/{name}.py`" in page} == EXERCISES


def test_each_command_of_the_page_trains_in_a_new_folder():
    """A folder that contains a run is rejected, so the page cannot repeat a command after an edit."""
    page = (ROOT / "docs/teaching.md").read_text()
    runs = re.findall(
        r"^(?:train |bash .* outputs/class/)(\w+) --reward-fn (?:docs/exercises/)?(\w+)", page, re.M
    )
    names = [name for name, _ in runs]
    assert len(names) == len(set(names)) and [file for _, file in runs].count("asking") == 2
    command = re.search(r"^    (bash .*)", (ROOT / FOLDER / "asking.py").read_text(), re.M)[1]
    assert command in page and "outputs/class/checked" in command


def test_what_the_page_says_to_read_is_there():
    """The names between a `file.py` and the end of the phrase are functions and classes in that file."""
    text = (ROOT / "docs/teaching.md").read_text().split("## The exercises")[0]
    pieces = re.split(r"`(\w+\.py)`", text)
    number = 0
    for script, after in zip(pieces[1::2], pieces[2::2]):
        phrase = re.split(r"[;|]|\.\s", after)[0]
        for name in re.findall(r"`([\w.]+)`", phrase):
            last = name.split(".")[-1]
            assert re.search(rf"^ *(async )?(def|class) {last}\b", (ROOT / script).read_text(), re.M), name
            number += 1
    assert number >= 9
