"""Why a run does not learn: each cause is found by step 10, and runs that learn have no findings."""

import dataclasses
import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

import grpo_trainer
from played import advantages_of, sample_of, toy_config, without_ray
from policy import Sample
from run import check_progress
from run_folder import Log, line_of
from tiny import config_of, worked
from tools import diagnose

HERE = Path(__file__).parent
GOOD = json.loads((HERE / "data/good_runs.json").read_text())  # {name: {metric: values, or one for all}}
# [[step, group, [[acc, calls, flawed_positive], ...]], ...] of a run in the world with a tool
GROUPS = json.loads((HERE / "data/shop_groups.json").read_text())
BAD = json.loads((HERE / "data/bad_runs.json").read_text())  # {cause: {"metrics": as in GOOD, "samples": []}}


def lines_of(columns):
    lines = [{"step": step} for step in range(1, columns["step"] + 1)]
    for key, values in columns.items():
        if key != "step":
            values = values if isinstance(values, list) else [values] * len(lines)
            for line, value in zip(lines, values):
                if value is not None:
                    line[key] = value
    return lines


def samples_of(samples):
    more = {"split": "train", "reward_score": 0.0}
    return [more | sample | {"reward_extra_info": {"pred": sample["pred"]}} for sample in samples]


def named(lines, samples=()):
    return {finding.name: finding for finding in diagnose.diagnose(lines, samples)}


# ---- findings


@pytest.mark.parametrize("cause", BAD)
def test_a_recorded_run_that_cannot_learn(cause):
    """Ten steps of real runs in the toy world, for example with a constant reward, 22 tokens, --lr 1e-9 or
    four rows.
    """
    lines = lines_of(BAD[cause]["metrics"])
    found = named(lines, samples_of(BAD[cause]["samples"]))
    finding = found[cause]
    assert next(iter(found)) == cause  # consequences come later
    assert finding.steps[0] <= 10 and finding.remedy in str(finding)
    for condition in next(rule[2] for rule in diagnose.RULES if rule[0] == cause):
        assert condition.split()[0] in finding.evidence


# These changes are added to the last seven of ten good steps, or describe what only the sampled answers show.
MADE = {
    "rollout-failures": {"rollout/error_rate": 0.2},
    "no-tool-calls": {"rollout/called": 0.0},
    "trajectory-truncation": {"response_length/clipped": 0.6, "rollout/called": 1.0},
    "tool-call-collapse": {"rollout/called": 0.1, "rollout/answered_turns": 0.2},
    "empty-responses": {"response_length/mean": 2.0},
    "missing-end-token": {"response_length/clipped": 0.95},
    "no-answer": {"reward/groups_with_spread": 0.1},
    "no-verdict": {"reward/no_verdict": 0.3},
    "judge-failures": {"genrm/error_rate": 0.4, "reward/no_verdict": 0.05},
    "slow-judge": {"time/reward_wait": 90.0, "time/step": 200.0, "genrm/asked": 128},
    "policy-mismatch": {"rollout/logprob_diff": 0.1},
    "accuracy-collapse": {"reward/acc": 0.2},
    "length-growth": {"response_length/mean": 70.0, "reward/acc": 0.5},
    "length-collapse": {"response_length/mean": 10.0, "reward/acc": 0.5},
    "entropy-collapse": {"actor/entropy": 0.01, "reward/acc": 0.6},
    "reward-hacking": {
        "reward/audited": 0.06,
        "reward/audit_flawed": 0.5,
        "perf/tokens": 4224,
        "reward/flawed_positive_rate": 0.1,
    },
    "no-learning-signal": {"reward/groups_with_spread": 0.0, "reward/acc": 1.0},
}

AT_FIRST = {"tool-call-collapse": {"rollout/called": 1.0, "rollout/answered_turns": 2.0}}


def answers(step, pred):
    """Return the samples of two groups of eight."""
    about = {"split": "train", "reward_extra_info": {"pred": pred}, "response": f"so {pred}"}
    about |= {"ground_truth": "3", "reward_score": 1.0, "step": step}
    return [about | {"group": number, "prompt": f"{step}.{number}"} for number in range(2) for _ in range(8)]


@pytest.mark.parametrize("cause", MADE)
def test_a_made_up_run_that_cannot_learn(cause):
    lines = lines_of(GOOD["fapo"])[:10]
    for line in lines[:3]:
        line |= AT_FIRST.get(cause, {})
    for line in lines[3:]:
        line |= MADE[cause]
    pred = "[INVALID]" if cause == "no-answer" else "3"
    found = named(lines, sum([answers(step, pred) for step in range(1, 11)], []))
    assert list(found) == [cause]
    assert found[cause].steps[0] <= 10 and found[cause].steps[-1] == 10


def costly(step, cost, small, advantages=None):
    """Return ten groups of four answers with 0 to 3 calls. In `small` groups, all answers are correct."""
    lines = []
    for number in range(10):
        accs = [True, True, True, number < small]
        scores = [(1.0 if acc else -1.0) - cost * calls for calls, acc in enumerate(accs)]
        group = advantages_of([sample_of(score) for score in scores], **(advantages or {}))
        for calls, (acc, score, advantage) in enumerate(zip(accs, scores, group)):
            info = {"pred": "3", "acc": acc, "score": score, "length": 7, "calls": calls, "kind": "x"}
            about = {"split": "train", "step": step, "group": number, "prompt": f"{step}.{number}"}
            about |= {"reward_score": score, "reward_extra_info": info, "advantage": advantage}
            lines.append(about | {"response": "so 3", "ground_truth": "3"})
    return lines


@pytest.mark.parametrize(
    "cost, small, advantages, finding",
    [
        (0.003, 6, {}, True),
        (0.1, 4, {}, True),
        (0.003, 6, worked("floored"), False),  # The term has the weight of its size.
        (0.003, 6, {"advantage": "dr_grpo"}, False),
        (0.5, 6, {}, False),  # Like FAPO's penalty, this term is not small.
        (0.0, 6, {}, False),
        (0.003, 2, {}, False),  # In most groups, the answers differ.
        (0.003, 10, {}, False),  # Nothing is known of the weight in other groups.
    ],
)
def test_a_small_term_that_groups_of_equal_answers_learn_from(cost, small, advantages, finding):
    lines = lines_of(GOOD["fapo"])[:6]
    samples = sum([costly(step, cost, small, advantages) for step in range(1, 7)], [])
    found = named(lines, samples)
    assert list(found) == ["small-term"] * finding
    if finding:
        evidence = found["small-term"].evidence
        assert f"small_term/groups {small / 10}" in evidence and "small_term/name calls" in evidence
    for sample in samples:
        del sample["reward_extra_info"]["calls"]
    for one in named(lines, samples).values():
        assert "small_term/name unknown" in one.evidence


def test_a_length_penalty_that_groups_of_equal_answers_learn_from_counts_once():
    """The rewards of correct answers differ by 0.3, less than a fifth of the range of all rewards (2.3)."""
    samples = sum([costly(step, 0.1, 6) for step in range(1, 7)], [])
    for sample in samples:
        info = sample["reward_extra_info"]
        penalty = -0.1 * info.pop("calls")
        info |= {"score": 1.0 if info["acc"] else -1.0, "overlong_penalty": penalty}
        assert sample["reward_score"] == pytest.approx(info["score"] + penalty)
    found = named(lines_of(GOOD["fapo"])[:6], samples)
    assert list(found) == ["small-term"]
    assert "small_term/name overlong_penalty" in found["small-term"].evidence


@pytest.mark.parametrize(
    "name, values",
    [
        ("digits", [int("7" * 400), 4]),
        ("large", [1e308, 1e308, -1e308]),
        ("infinite", [float("inf"), float("-inf"), 1.0]),
        ("acc", [[True, False], True]),
    ],
)
def test_no_result_of_the_users_function_ends_a_diagnosis(name, values):
    samples = sum([costly(step, 0.003, 7) for step in range(1, 7)], [])
    for number, sample in enumerate(samples):
        if sample["group"] == 0:
            sample["reward_extra_info"][name] = values[number % len(values)]
    found = named(lines_of(GOOD["fapo"])[:6], samples)
    assert "small_term/name calls" in found["small-term"].evidence


def test_no_mean_of_the_users_results_ends_a_diagnosis():
    lines = lines_of(GOOD["fapo"])
    for line in lines:
        line |= {"reward/acc": 1e200 * line["step"]}  # The square is infinite.
        line |= {"reward/audited": 0.5, "reward/audit_flawed": -1.0}
    assert not {"accuracy-decline", "reward-hacking"} & named(lines).keys()


@pytest.mark.parametrize(
    "cost, penalty, advantages, finding",
    [
        (0.003, 0, {}, True),
        (0.01, 0, {}, True),
        (0.03, 0, {}, True),
        (0.1, 0, {}, True),
        (0.0, 0, {}, False),
        (0.03, 1, {}, False),  # With FAPO, most of these groups differ in their flaws.
        (0.03, 0, worked("floored"), False),
        (0.03, 0, {"advantage": "dr_grpo"}, False),
    ],
)
def test_groups_of_the_world_with_a_tool(cost, penalty, advantages, finding):
    """The first twelve steps of a recorded run, with the scores and advantages of these rewards."""
    lines = [{"step": step, "reward/mean": 0.8} for step in range(1, 13)]
    samples = []
    for step, number, recorded in GROUPS:
        scores = [2 * acc - 1 - cost * calls - penalty * flawed for acc, calls, flawed in recorded]
        group = advantages_of([sample_of(score) for score in scores], **advantages)
        for (acc, calls, flawed), score, advantage in zip(recorded, scores, group):
            info = {"acc": bool(acc), "calls": calls, "flawed_positive": bool(flawed)}
            about = {"split": "train", "step": step, "group": number, "turns": [], "advantage": advantage}
            about |= {"reward_score": score, "reward_extra_info": info}
            samples.append(about | {"prompt": "", "response": "", "ground_truth": ""})
    found = named(lines, samples)
    assert list(found) == ["small-term"] * finding
    if found:
        assert found["small-term"].steps[0] <= 7 and "small_term/name calls" in found["small-term"].evidence


def test_prompts_that_end_with_the_same_words_of_the_assistant_are_not_the_same():
    lines, samples = lines_of(GOOD["fapo"])[:10], []
    for step in range(1, 11):
        asked = [{"role": "user", "content": f"2+{step}?"}, {"role": "assistant", "content": "I add:"}]
        sample = sample_of(1.0, pred="3")
        sample.row = {"prompt": asked, "reward_model": {"ground_truth": "3"}}
        samples.append({"split": "train", "step": step, "group": 0} | line_of(sample, None))
    assert samples[0]["prompt"] == "2+1?" and not named(lines, samples)


def test_every_rule_is_tested():
    tested_apart = {"accuracy-decline", "small-term"}
    assert {rule[0] for rule in diagnose.RULES} == BAD.keys() | MADE.keys() | tested_apart
    assert len(BAD.keys() | MADE.keys()) >= 15


def test_a_finding_ends_with_its_cause():
    lines = lines_of(GOOD["fapo"])
    for line in lines[20:30]:
        line["reward/no_verdict"] = 0.3
    found = named(lines)
    assert found["no-verdict"].steps == list(range(23, 31))  # three steps in a row
    assert "reward/no_verdict 0.3" in found["no-verdict"].evidence


def test_a_finding_quotes_a_response_as_it_was_written():
    about = {"response": "so\n\\boxed{it's}", "ground_truth": "it's"}
    assert diagnose.evidence({"a": 1.0}, ["a > 0"], [about]) == (
        'a 1; response "...so \\boxed{it\'s}", ground truth "it\'s"'
    )
    game = about | {"ground_truth": ""}  # An environment may have no ground truth.
    assert diagnose.evidence({"a": 1.0}, ["a > 0"], [game]) == 'a 1; response "...so \\boxed{it\'s}"'


def test_the_numbers_of_a_finding_are_explained():
    """Metrics are explained in the glossary, and other numbers in the finding itself."""
    glossary = (HERE.parent / "docs/glossary.md").read_text()
    for _, _, conditions, _ in diagnose.RULES:
        keys = [condition.split()[0] for condition in conditions]
        numbers = dict.fromkeys(keys, 0.5) | {"small_term/name": "calls"}
        text = diagnose.evidence(numbers, conditions, [])
        for key in keys:
            assert f"{key} 0.5 (" in text or f"`{key}`" in glossary, key
    (conditions,) = [rule[2] for rule in diagnose.RULES if rule[0] == "reward-hacking"]
    numbers = {"audit_flawed/surely": 0.3634, "audit_flawed/unseen": 0.442}
    assert diagnose.evidence(numbers, conditions, []) == (
        "audit_flawed/surely 0.363 (flawed fraction of the audited answers, minus three standard errors), "
        "audit_flawed/unseen 0.442 (flawed fraction, minus twice the fraction that the judge calls flawed)"
    )


@pytest.mark.parametrize("key", ["audit_flawed/surely", "reward/no_verdict", "reward/acc"])
def test_a_finding_quotes_a_sample_that_it_is_about(key):
    """A wrong answer, which no judge accepted, says nothing of an audit."""
    about = {"ground_truth": "3", "reward_score": 1.0, "reward_extra_info": {"audit_flawed": False}}
    flawed = about | {"reward_extra_info": {"audit_flawed": True}, "response": "audit_flawed/surely"}
    silent = about | {"reward_score": None, "response": "reward/no_verdict"}
    wrong = about | {"reward_extra_info": {}, "response": "reward/acc"}
    quoted = diagnose.evidence({key: 0.5}, [f"{key} > 0.1"], [flawed, silent, wrong])
    assert quoted.endswith(f'; response "...{key}", ground truth "3"')
    others = [about | {"response": "so 3"}]
    assert ("response" in diagnose.evidence({key: 0.5}, [f"{key} > 0.1"], others)) == (key == "reward/acc")


def test_a_second_opinion_that_says_little_rings_nothing():
    """In each of 20 steps, audit 5 % of 100 answers, of which 8 % are flawed.

    Then audit two answers, of which one is flawed. Then audit 60, of which half are flawed, while the first
    judge calls 40 % or 10 % of the answers flawed.
    """
    about = {"reward/mean": 1.0, "perf/tokens": 1000, "response_length/mean": 10.0}
    cases = (
        (20, 0.05, 0.08, 0, False),
        (1, 0.02, 0.5, 0, False),
        (20, 0.03, 0.5, 0.4, False),
        (20, 0.03, 0.5, 0.1, True),
    )
    for steps, audited, flawed, found, rings in cases:
        about |= {"reward/audited": audited, "reward/audit_flawed": flawed}
        about["reward/flawed_positive_rate"] = found
        lines = [{"step": step} | about for step in range(1, steps + 1)]
        assert ("reward-hacking" in named(lines)) == rings
    share, error = diagnose.audit(lines)  # 31 of 62
    assert share == 0.5 and error == pytest.approx((0.25 / 62) ** 0.5)


def test_half_of_the_keys_of_an_audit_end_no_run():
    """A custom function may return only one of the keys. Without audits in a step, there is no fraction."""
    about = {"reward/mean": 1.0, "perf/tokens": 1000, "response_length/mean": 10.0}
    assert diagnose.audit([about | {"reward/audit_flawed": 0.9}])[0] == 0.5
    assert diagnose.audit([about | {"reward/audited": 0.0}])[0] == 0.5
    assert diagnose.audit([about | {"reward/audited": 0.08}])[0] == 0.1  # none of eight, with Laplace's rule


OF_128 = {"perf/tokens": 1280, "response_length/mean": 10.0}


@pytest.mark.parametrize(
    "acc, asked, rings",
    [
        (0.03, {"genrm/asked": 128}, False),
        (0.2, {"genrm/asked": 128}, True),
        (0.03, {"genrm/asked": 128} | OF_128, False),
        (0.2, {"genrm/asked": 128} | OF_128, True),
        (0.2, {"genrm/asked": 26} | OF_128, True),  # The judge reads only correct answers.
    ],
)
def test_few_right_answers_say_nothing_of_a_judge_that_reads_wrong_ones_too(acc, asked, rings):
    """With judge_wrong, all 128 samples of a step are judged, even if few of them are correct."""
    about = {"reward/mean": -0.9, "reward/acc": acc} | asked
    for rate, name in ((1.0, "judge-rejects-all"), (0.0, "judge-accepts-all")):
        about["reward/flawed_positive_rate"] = rate
        assert (name in named([{"step": step} | about for step in range(1, 21)])) == rings


@pytest.mark.parametrize("approx_kl, name", [(0.1, "learning-rate-too-high"), (0.0, "learning-rate-too-low")])
def test_a_divergence_from_the_sampler_says_nothing_of_the_learning_rate(approx_kl, name):
    """With --sampler-logprobs, the ratio divides by the probability of the sampler, which may be inexact."""
    columns = GOOD["rule"] | {"actor/approx_kl": approx_kl, "actor/updates": 2}
    assert name in named(lines_of(columns))
    assert name not in named(lines_of(columns | {"rollout/is_mean": 1.0}))


def test_a_slow_reward_function_without_a_judge_is_no_slow_judge():
    lines = [{"step": step, "reward/mean": 0.5, "time/reward_wait": 90.0} for step in range(1, 9)]
    assert "slow-judge" not in named(lines)
    judged = [line | {"genrm/asked": 128} for line in lines]
    assert "slow-judge" in named(judged)
    # With --overlap, the policy is updated while the rewards arrive.
    assert "slow-judge" not in named([line | {"rollout/staleness": 1} for line in judged])


def test_chance_is_no_fall():
    """If one answer in a hundred is correct, three steps may have none."""
    lines = [{"step": step, "reward/mean": -0.9, "reward/acc": 0.02 * (step < 4)} for step in range(1, 9)]
    assert "accuracy-collapse" not in named(lines)
    assert "accuracy-collapse" in named([line | {"reward/acc": 10 * line["reward/acc"]} for line in lines])


def test_an_accuracy_that_falls_slowly_is_a_decline():
    """With one update per step, actor/approx_kl is 0 and does not show that the learning rate is too high."""
    about = {"reward/mean": 0.0, "actor/approx_kl": 0.0, "actor/updates": 1}

    def found(accuracies):
        lines = [{"step": step, "reward/acc": acc} | about for step, acc in enumerate(accuracies, 1)]
        return named(lines).get("accuracy-decline")

    # At steps 15 to 18, the mean of the last five is .28, .26, .25 and .24, more than a quarter below .42.
    noise = [0.01, -0.01] * 9
    falls = [0.42] * 8 + [0.39, 0.36, 0.33, 0.30, 0.27, 0.24, 0.24, 0.24, 0.24, 0.24]
    finding = found([acc + off for acc, off in zip(falls, noise)])
    assert finding.steps == [17, 18] and "accuracy/lost 0.4" in finding.evidence
    assert "actor/approx_kl" not in finding.evidence and "--lr" in finding.remedy
    # The same fall among steps that differ by .2 is chance, and a fall from .42 to .36 is small.
    assert found([acc + 10 * off for acc, off in zip(falls, noise)]) is None
    assert found([0.42, 0.41] * 6 + [0.36, 0.35] * 6) is None
    numbers = diagnose.lost_accuracy([{"reward/acc": acc} for acc in [0.5, 0.4] * 3 + [0.3, 0.2] * 5])
    lost = 1 - 0.24 / 0.46  # of the mean of .5, .4, .5, .4, .5, if the last five are .2, .3, .2, .3, .2
    assert numbers["accuracy/lost"] == pytest.approx(lost)
    assert numbers["accuracy/lost_in_errors"] == pytest.approx((0.46 - 0.24) / (0.1 / 5**0.5))
    assert diagnose.lost_accuracy([{"reward/acc": acc} for acc in [0.5, 0.4] * 7]) == {}  # too few steps


def test_an_environment_whose_state_is_not_in_the_prompt_repeats_no_prompts():
    """The state may depend on trajectory.seed, so more rows would change nothing."""
    lines = lines_of(GOOD["fapo"])[:10]
    samples = [one | {"prompt": "Guess!"} for step in range(1, 11) for one in answers(step, "3")]
    assert "repeated-prompts" in named(lines, samples)
    turns = [{"who": "policy", "text": "4"}, {"who": "environment", "text": "Higher"}]
    assert named(lines, [one | {"turns": turns} for one in samples]) == {}
    assert (
        named(lines, [one | {"seed": 1} for one in samples]) == {}
    )  # as of a rollout function with one turn


class Counted(dict):
    """A dict that counts how often any of these dicts is read."""

    reads = 0

    def __getitem__(self, key):
        Counted.reads += 1
        return super().__getitem__(key)

    def get(self, *arguments):
        Counted.reads += 1
        return super().get(*arguments)


def test_the_work_grows_with_the_length_of_a_run_and_not_with_its_square():
    """A served page of a long run repeats it at each reload."""
    reads = []
    for steps in (200, 400):
        Counted.reads = 0
        about = {"reward/mean": 0.5, "reward/acc": 0.5, "rollout/called": 0.5, "rollout/answered_turns": 1.0}
        lines = [Counted({"step": step} | about) for step in range(1, steps + 1)]
        samples = [Counted(one) for step in range(1, steps + 1) for one in answers(step, "3")]
        assert diagnose.diagnose(lines, samples) == []
        reads.append(Counted.reads)
    assert 100 < reads[0] < reads[1] < 2.2 * reads[0]


def test_a_rule_of_ones_own_is_a_row(monkeypatch):
    mine = ("too-nice", 2, ["reward/politeness > 0.9"], "be rude")
    monkeypatch.setattr(diagnose, "RULES", [*diagnose.RULES, mine])
    lines = [{"step": step, "reward/mean": 1.0, "reward/politeness": 0.95} for step in (1, 2, 3)]
    (finding,) = diagnose.diagnose(lines, [])
    assert (finding.name, finding.steps, finding.remedy) == ("too-nice", [2, 3], "be rude")


def test_flags_in_remedies_exist():
    fields = {field.name for field in dataclasses.fields(grpo_trainer.Config)}
    flags = re.findall(r"--([\w-]+)", " ".join(rule[3] for rule in diagnose.RULES))
    assert flags and {flag.replace("-", "_") for flag in flags} <= fields


# ---- no findings


def test_a_model_that_learns_the_form_first_rings_nothing():
    """GSM8K with a small model behaves like this (recipes/README.md): first boxes, shorter responses, no
    correct answer.
    """
    lines = []
    samples = []
    for step in range(1, 21):
        about = {"reward/groups_with_spread": 0.6, "reward/acc": 0.0, "reward/mean": step / 20 - 1}
        about |= {"actor/entropy": 1 / step, "response_length/mean": 52 - 2 * step}
        lines.append({"step": step} | about)
        samples += answers(step, "[INVALID]" if step < 8 else "3")
    assert named(lines, samples) == {}


@pytest.mark.parametrize("name", GOOD)
def test_a_recorded_run_that_learns_rings_nothing(name):
    """The runs are from the toy world: the oracle as judge, other seeds, outcome reward only, adapters, VPPO,
    PAPO ...
    """
    lines = lines_of(GOOD[name])
    assert len(lines) >= 25 and named(lines) == {}


def test_the_runs_of_the_evidence_ring_nothing():
    """The accuracy and flawed positives of each step are known. All correct answers were judged."""
    files = (HERE.parent / "docs/evidence/runs.jsonl").read_text().splitlines()
    assert len(files) >= 125
    for run in map(json.loads, files):
        curves = run["curves"]
        lines = []
        for index, acc in enumerate(curves["acc"]):
            line = {"step": index + 1, "reward/mean": acc, "reward/acc": acc, "genrm/asked": 128 * acc}
            if "flawed_positive_rate" in curves:
                line["reward/flawed_positive_rate"] = curves["flawed_positive_rate"][index]
            lines.append(line)
        assert named(lines) == {}, (run["world"], run["algorithm"], run["seed"])


# ---- the command


def command(*arguments):
    ran = subprocess.run(
        [sys.executable, "-m", "tools.diagnose", *map(str, arguments)],
        cwd=HERE.parent,
        capture_output=True,
        text=True,
        timeout=60,
    )
    return ran.returncode, ran.stdout, ran.stderr


def write(folder, lines, end=""):
    folder.mkdir()
    (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines) + end)
    return folder


def test_the_command_says_it_of_a_folder(tmp_path):
    lines = lines_of(BAD["learning-rate-too-low"]["metrics"])
    code, out, _ = command(write(tmp_path / "low", lines, end='{"step": 1'))
    assert code == 0 and out.startswith("learning-rate-too-low, steps 5-10: actor/approx_kl ")
    assert "ten times" in out
    code, out, _ = command(write(tmp_path / "good", lines_of(GOOD["rule"])))
    assert (code, out) == (0, "no findings\n")


@pytest.mark.slow
def test_bad_folders_are_refused_in_one_line(tmp_path):
    evaluated = write(tmp_path / "evaluated", [{"step": 0, "val/toy/mean@1": 0.5}])
    foreign = write(tmp_path / "foreign", [{"step": 1, "reward/mean": "high", "actor/entropy": "low"}] * 3)
    older = write(tmp_path / "older", [{"step": 1, "reward/mean": 0.5}])
    (older / "samples.jsonl").write_text('{"step": 1, "text": "of another version"}\n')
    stopped = write(tmp_path / "stopped", [{"step": 0}])
    sample = {"step": 1, "split": "train", "group": 0, "prompt": "", "reward_score": None, "status": "error"}
    sample |= {"reward_extra_info": {"error": "IndexError: list index out of range"}}
    (stopped / "samples.jsonl").write_text(json.dumps(sample) + "\n")
    for folder, why in (
        (tmp_path / "none", "none: the folder does not exist; pass the --out-dir of a run"),
        (evaluated, "no training step"),
        (stopped, "1 of 1 logged samples have no verdict, the first: IndexError: list index out of range"),
        (foreign, "(TypeError: "),
        (older, "(KeyError: 'split')"),
    ):
        code, out, err = command(folder)
        assert code == 2 and out == "" and err.count("\n") == 1 and str(folder) in err and why in err, err


# ---- the trainer


def test_a_run_says_it_once_and_stops_where_nothing_teaches(tmp_path, capsys):
    """The trainer calls this after each step. Without tools/, it still stops."""
    config = config_of(out_dir=str(tmp_path), max_idle_steps=4)
    log = Log(config, 0)
    log.metrics({"step": 0, "val/toy/mean@1": 0.5})
    lines = [{"reward/mean": 0.0, "reward/acc": 0.4, "reward/groups_with_spread": 0.0}] * 8
    for step, line in enumerate(lines[:3], 1):
        log.metrics({"step": step} | line)
        check_progress(log)
    out = capsys.readouterr().out
    assert out.count("constant-reward, step 3: ") == out.count("no-learning-signal, step 3: ") == 1
    log.metrics({"step": 4} | line)
    with pytest.raises(RuntimeError, match="no group had a learning signal in 4 consecutive steps"):
        check_progress(log)
    log.metrics({"step": 5} | line | {"reward/groups_with_spread": 0.1})
    check_progress(log)
    for step in (6, 7, 8):  # three steps since the last learning signal
        log.metrics({"step": step} | line)
        check_progress(log)
    assert capsys.readouterr().out.count("constant-reward, ") == 1  # again since step 8
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(sys.modules, "tools.diagnose", None)
        log.metrics({"step": 9} | line)
        with pytest.raises(RuntimeError, match="--max-idle-steps"):
            check_progress(log)
    config.max_idle_steps = 0
    check_progress(log)
    first = Log(config_of(out_dir=str(tmp_path), max_idle_steps=4), 0)
    first.metrics({"step": 1} | line)  # --no-val-before-train: no line of step 0 precedes it.
    check_progress(first)


def test_what_lasts_is_not_said_again(tmp_path, capsys):
    """The samples of a step count for ten steps, and rules look at three steps.

    At step 13, the samples of step 1 still count.
    """
    log = Log(config_of(out_dir=str(tmp_path)), 0)
    preds = {1: "3", 5: "[INVALID]", 6: "3", 11: "3"}
    for step in range(1, 15):
        log.metrics({"step": step, "reward/mean": 0.0, "response_length/clipped": 1.0})
        result = {"reward_score": 0.0, "reward_extra_info": {"pred": preds.get(step)}, "status": "ok"}
        row = {"prompt": [{"content": "1+2?"}], "data_source": "a", "reward_model": {"ground_truth": "3"}}
        group = [Sample(row, [1], [2], result=result, text="so", truncated=True)]
        log.samples(step, "train", [group] if step in preds else [], None)
        check_progress(log)
    assert re.findall("missing-end-token, step.*?:", capsys.readouterr().out) == [
        "missing-end-token, step 3:",
        "missing-end-token, step 8:",  # after a step in which half of them had no answer
    ]


@pytest.mark.slow
def test_the_trainer_says_it_once_and_stops_where_nothing_teaches(tmp_path, monkeypatch, capsys):
    """Every reward is 0 in the toy world. Then run with --max-idle-steps 0 and without tools/."""
    without_ray(monkeypatch)
    zero = "def score(solution_str, **_):\n    return {'score': 0.0, 'acc': '7' in solution_str}"
    (tmp_path / "zero.py").write_text(zero)
    options = dict(reward_fn=f"{tmp_path}/zero.py:score", train_batch_size=4, max_response_length=40)
    with pytest.raises(SystemExit) as ended:
        grpo_trainer.main(toy_config(tmp_path, total_steps=20, max_idle_steps=5, **options))
    said = capsys.readouterr()
    assert said.out.count("constant-reward, step 3: reward/groups_with_spread 0, reward/acc") == 1
    assert ended.value.code == 1
    assert "error: no group had a learning signal in 5 consecutive steps" in said.err
    assert (tmp_path / "run/checkpoints/step_5/trainer_state.json").is_file()
    monkeypatch.setitem(sys.modules, "tools.diagnose", None)
    options |= dict(out_dir=str(tmp_path / "goes_on"), total_steps=6, max_idle_steps=0)
    grpo_trainer.main(toy_config(tmp_path, **options))
    said = capsys.readouterr().out
    assert "6/6" in said and "constant-reward" not in said
