"""docs/changes: each diff applies to a copy of the current files, and its own test passes there.

Also tests of what docs/from_verl.md and docs/reward_functions.md say about functions written for other
frameworks.
"""

import asyncio
import math
import os
import re
import shlex
import shutil
import subprocess
import sys
import types
from dataclasses import fields
from pathlib import Path

import pytest
import ray

import compute_score
import forked
import grpo_trainer
import reward_loop
from command_line import parse_command_line
from played import lines_of, rows, says, server, stand_in_for_vllm, toy_config
from reward_loop import RewardOptions
from run import Run
from test_docs import blocks

ROOT = Path(__file__).resolve().parent.parent
FOLDER = ROOT / "docs/changes"
DIFFS = sorted(FOLDER.glob("*.diff"))
each_change = pytest.mark.parametrize("diff", DIFFS, ids=lambda diff: diff.stem)
COPIED = (
    "*.py",
    "pytest.ini",
    "toy/*.py",
    "toy/models/*/*",
    "tools/*",
    "tools/page/*",
    "cluster/*.py",
    "tests/*.py",
    "recipes/*",
    "docs/glossary.md",
)


@pytest.fixture
def copy(tmp_path):
    """Return a copy of the scripts and tests in a folder that is not a repository."""
    for pattern in COPIED:
        for path in ROOT.glob(pattern):
            if path.is_file():
                target = tmp_path / "copy" / path.relative_to(ROOT)
                target.parent.mkdir(parents=True, exist_ok=True)
                shutil.copy(path, target)
    return tmp_path / "copy"


def apply(diff, folder):
    outside = os.environ | {"GIT_CEILING_DIRECTORIES": str(folder.parent)}
    subprocess.run(["git", "apply", str(diff)], cwd=folder, env=outside, check=True)


@each_change
def test_a_change_applies_to_todays_files(diff, copy):
    apply(diff, copy)
    for path in copy.glob("*.py"):
        compile(path.read_text(), str(path), "exec")


@pytest.mark.slow
def test_the_page_names_the_pairs_of_changes_that_do_not_apply_together(copy):
    text = (FOLDER / "README.md").read_text()
    sentence = re.search(r"These pairs change the same lines.*?: (.*?)\.\n", text, re.S)[1]
    named = {frozenset(re.findall(r"`(\w+)`", pair)) for pair in sentence.split(";")}
    outside = os.environ | {"GIT_CEILING_DIRECTORIES": str(copy.parent)}
    clashing = set()
    for first in DIFFS:
        apply(first, copy)
        for second in DIFFS[DIFFS.index(first) + 1 :]:
            check = ["git", "apply", "--check", str(second)]
            if subprocess.run(check, cwd=copy, env=outside, capture_output=True).returncode:
                clashing.add(frozenset((first.stem, second.stem)))
        subprocess.run(["git", "apply", "--reverse", str(first)], cwd=copy, env=outside, check=True)
    assert clashing == named


@pytest.mark.slow
@each_change
def test_a_change_does_what_it_says(diff, copy):
    """Run the test that the diff contains."""
    (test,) = re.findall(r"^\+\+\+ b/(tests/.*)", diff.read_text(), re.M)
    apply(diff, copy)
    done = forked.run(["-m", "pytest", "-q", "-p", "no:cacheprovider", test], copy, timeout=900)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-1000:]


def counted(diff):
    """Return (our files that it changes, its new files), each with the lines of code added and removed."""
    ours, own = {}, {}
    for part in re.split(r"^diff --git ", diff.read_text(), flags=re.M)[1:]:
        name = part.split()[1].removeprefix("b/")
        if not name.startswith(("tests/", "docs/")):
            added = len(re.findall(r"^\+(?!\+\+ )", part, re.M))
            removed = len(re.findall(r"^-(?!-- )", part, re.M))
            (own if "\nnew file mode" in part else ours)[name] = added, removed
    return ours, own


def test_the_table_says_what_each_change_touches():
    """Compare each row (`name.diff` | files | lines) with the counts here.

    A change touches at most two of our files and 40 lines in them.
    """
    page = (FOLDER / "README.md").read_text()
    rows = re.findall(r"\]\((\w+)\.diff\) \|(.*?)\|(.*?)\|", page)
    assert [name for name, _, _ in rows] == list(dict.fromkeys(name for name, _, _ in rows))
    assert {name for name, _, _ in rows} == {diff.stem for diff in DIFFS}
    for name, files, lines in rows:
        ours, own = counted(FOLDER / f"{name}.diff")
        assert re.findall(r"`([\w/.]+)`", files) == [*ours, *own], name
        added = sum(a for a, _ in [*ours.values(), *own.values()])
        removed = sum(r for _, r in ours.values())
        assert lines.split() == [f"+{added}", f"-{removed}"], name
        assert len(ours) <= 2 and sum(a for a, _ in ours.values()) <= 40, name


# ---- discriminative models


SMALL = [
    "--total-steps",
    "1",
    "--train-batch-size",
    "4",
    "--mini-batch-size",
    "2",
    "--group-size",
    "4",
    "--no-val-before-train",
    "--num-threads",
    "1",
    "--num-reward-workers",
    "1",
    "--sync-processes",
    "1",
]


def run_recipe(name, *arguments, folder, **env):
    env = os.environ | {"PATH": forked.on_path(folder.parent / "bin"), "HF_HUB_OFFLINE": "1"} | env
    done = subprocess.run(
        ["bash", f"recipes/{name}.sh", *arguments],
        cwd=folder,
        env=env,
        capture_output=True,
        text=True,
        timeout=900,
    )
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    return done.stdout


def test_the_judge_and_a_classifier_together():
    """The score is FAPO's with the judge, plus half the classifier's probability of a sound solution."""
    sys.path.append(str(ROOT / "recipes"))
    import toy_disrm_reward

    def answer(path, body):
        if path == "/classify":
            assert body["input"] == "Ben has 20 eggs, gets 2, gets 3, gets 4. Remainder mod 5?|" + solution
            return {"data": [{"probs": [math.log(3)]}]}  # odds of three to one
        return says("\\boxed{1}")

    class Tokenizer:
        def apply_chat_template(self, messages, tokenize):
            return "|".join(message["content"] for message in messages)

    solution = "20+2=22\n\n22+3=15\n\n15+4=19\n\nRemainder \\boxed{4}"
    prompt = [{"role": "user", "content": "Ben has 20 eggs, gets 2, gets 3, gets 4. Remainder mod 5?"}]

    async def score(address):
        try:
            return await toy_disrm_reward.compute_score_both(
                "toy",
                solution,
                "4",
                {"question": prompt[0]["content"]},
                prompt=prompt,
                reward_router_addresses={"judge": address, "classifier": address},
                reward_model_tokenizer=Tokenizer(),
                prompt_style="brief",
            )
        finally:
            await compute_score.close_session()

    with server(answer) as address:
        result = asyncio.run(score(address))
    assert result["score"] == pytest.approx(0.0 + 0.5 * 0.75) and result["classifier"] == pytest.approx(0.75)
    assert result["oracle_flawed_positive"] and not result["truly_correct"] and result["first_wrong"] == 1


@pytest.mark.slow
def test_classifiers_train_policies_and_so_do_two_models_at_once(copy, tmp_path, monkeypatch, small_ray):
    """Run the toy recipe's three runs, and the GSM8K recipe with the toy recipe's models.

    A stand-in for vLLM serves all models, in one Ray whose servers find it. vLLM itself serves a classifier
    in test_genrm_server.py, where its parser also gets such arguments.
    """
    source = tmp_path / "source"
    source.mkdir()
    for name in ("gsm8k_train_100.jsonl", "gsm8k_test_400.jsonl"):
        lines = (ROOT / "tests/data" / name).read_text().splitlines()[:24]
        (source / name).write_text("\n".join(lines))
    folder = copy / "outputs/disrm/seed0"
    models = str(copy / "toy/models/policy"), str(folder.parent / "classifier")
    out = str(folder / "gsm8k")
    short = ["--max-response-length", "16", "--overlong-buffer", "0", "--max-prompt-length", "300"]
    short += ["--val-every", "0", "--genrm-cpus", "1", "--genrm-vllm-args=--max-model-len 512"]
    val = ["--val-file", rows(copy / "val.jsonl", 8, "test")]  # instead of the world's 1,024
    played = stand_in_for_vllm(tmp_path / "stand_in")
    with monkeypatch.context() as patch:
        patch.setenv("PYTHONPATH", played)
        reward_loop.connect_ray()
        env = dict(CLASSIFIER_STEPS="3", RAY_ADDRESS=ray.get_runtime_context().gcs_address)
        try:
            run_recipe("toy_disrm", *SMALL, *val, folder=copy, **env)
            env |= dict(SOURCE_DIR=str(source))
            run_recipe("disrm_gsm8k", *models, out, *SMALL, *short, folder=copy, **env)
        finally:
            ray.shutdown()

    def scores_of(run):
        return {line["reward_score"] for line in lines_of(run, "samples.jsonl")}

    for name in ("classifier", "flagged"):
        line = lines_of(folder / name)[-1]
        assert line["step"] == 1 and line["reward/no_verdict"] == 0 and "reward/truly_correct" in line
    assert len(scores_of(folder / "classifier")) > 4  # logits, not just +1 and -1
    assert scores_of(folder / "flagged") <= {-1.0, 0.0, 1.0}
    both = lines_of(folder / "both")[-1]
    assert 0 < both["reward/classifier"] < 1 and both["genrm/asked"] > 0 and both["reward/no_verdict"] == 0
    assert (folder / "report.html").stat().st_size > 10_000
    assert "reward/acc" in lines_of(out)[-1]  # the outcome rule adds metrics
    assert len(scores_of(out)) > 4


# ---- for users of other frameworks


def test_functions_of_verls_batch_manager_see_groups(monkeypatch):
    """Wrap a function with plural argument names as in docs/from_verl.md. verl passes them by keyword."""
    (block,) = blocks(ROOT / "docs/from_verl.md", "python")

    def plural(solution_strs, ground_truths, extra_infos, data_sources, bonus=0.0):
        assert data_sources == ["x", "x"]
        assert len({id(info) for info in extra_infos}) == len(data_sources) == 2
        assert extra_infos[1] == {"index": 7}
        return [float(text == truth) + bonus for text, truth in zip(solution_strs, ground_truths)]

    monkeypatch.setitem(sys.modules, "their_file", types.SimpleNamespace(compute_score=plural))
    names = {}
    exec(compile(block, "docs/from_verl.md", "exec"), names)
    asked = dict(data_source="x", ground_truth="4", extra_info={"index": 7})
    assert names["from_batch"](solution_strs=["4", "5"], **asked) == [1.0, 0.0]
    assert names["from_batch"](solution_strs=["4", "5"], bonus=0.5, **asked) == [1.5, 0.5]


def test_the_loop_takes_it_as_a_function_of_groups(tmp_path):
    (block,) = blocks(ROOT / "docs/from_verl.md", "python")
    (tmp_path / "my_reward.py").write_text(block)
    (tmp_path / "their_file.py").write_text("def compute_score(*lists, **settings):\n    return lists[1]\n")
    job = RewardOptions(reward_fn=f"{tmp_path}/my_reward.py:from_batch").make_job()
    assert job.sees_group


def test_the_defaults_that_the_page_gives_are_those_of_today():
    """In rows with an arrow, the first number after the arrow is the default of the row's first flag."""
    defaults = {"--" + one.name.replace("_", "-"): one.default for one in fields(grpo_trainer.Config)}
    found = 0
    for line in (ROOT / "docs/from_verl.md").read_text().splitlines():
        cells = line.split(" | ")
        if len(cells) == 3 and "→" in line:
            flag = re.search(r"`(--[a-z-]+)", cells[1])
            number = re.match(r" *\**([\d.]+)\b(?! on)", cells[2].split("→")[1])
            if flag and number and defaults[flag[1]] is not None:
                assert float(number[1]) == defaults[flag[1]], line
                found += 1
    assert found >= 15


def test_the_trainer_accepts_the_replacement_for_gdpo(tmp_path):
    page = (ROOT / "docs/from_verl.md").read_text()
    (flags,) = re.findall(r"manager `gdpo` \| `(.*?)` \|", page)
    body = "def f(data_source, solution_str, ground_truth, extra_info):\n"
    (tmp_path / "rewards.py").write_text(body + "    return {'score': 1.0, 'acc': 1.0, 'format': 0.0}\n")
    arguments = ["--model", "toy/models/policy", "--train-file", rows(tmp_path / "train.jsonl", 8)]
    arguments += ["--out-dir", str(tmp_path / "run"), "--reward-fn", f"{tmp_path}/rewards.py:f"]
    parse_command_line(grpo_trainer.Config, [*arguments, *shlex.split(flags)]).check()


def test_a_run_says_that_validation_rows_are_copies(tmp_path, capsys):
    """The AIME rows of the recipe's file are such copies: each is meant to get one sample."""
    path = Path(rows(tmp_path / "aime.jsonl", 2, "test"))
    path.write_text("\n".join([path.read_text()] * 3))
    for name, file, told in (("all", str(path), True), ("one", f"{path}:1", False)):
        config = toy_config(tmp_path, val_file=(file,), val_n=4, out_dir=str(tmp_path / name))
        Run(config).lock.close()
        said = f"each row gets 4 samples; pass {path}:1 to take one sample per row\n"
        assert capsys.readouterr().out.count(said) == told


def test_a_file_of_a_package_is_to_be_imported_in_a_file_of_yours(tmp_path):
    (tmp_path / "rewards.py").write_text("from ..utils import x\ndef f(**_): return 1.0\n")
    remedy = "pass a file outside the package that imports the function"
    with pytest.raises(ValueError, match=f"relative import.*{remedy}"):
        RewardOptions(reward_fn=f"{tmp_path}/rewards.py:f").make_job()
