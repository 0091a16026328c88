"""The whole system for real: vLLM serves a tiny judge behind the router, Ray workers query it, and GRPO
trains on its verdicts.
"""

import json
import random
import signal

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import requests
import forked
from test_reward_loop import free_port, until

from toy import toy_world, warm_start


def teach(folder, tokenizer, examples, steps=40):
    """Train a tiny model to write what `examples()` contain, and nothing else."""
    model = warm_start.new_model(len(tokenizer), seed=0)
    warm_start.fit(model, tokenizer, examples, steps, 3e-3, 1e-3, 1.0, disable=True)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def answers(port):
    try:
        return requests.get(f"http://127.0.0.1:{port}/health", timeout=5).ok
    except requests.RequestException:
        return False


@pytest.fixture(scope="module")
def world(tmp_path_factory, one_ray):
    """Yield a folder with a policy, its problems and a judge, and the address of this judge while it is
    served.
    """
    folder, rng = tmp_path_factory.mktemp("world"), random.Random(0)
    tokenizer = warm_start.build_tokenizer(warm_start.tokenizer_corpus(random.Random(0)))
    rows = [
        toy_world.policy_row(toy_world.random_problem(rng, toy_world.REMAINDER), "toy", "train", i)
        for i in range(64)
    ]
    pq.write_table(pa.Table.from_pylist(rows), folder / "train.parquet")

    # The policy guesses a digit, so a fifth of its answers is correct. The judge always calls paragraph 0
    # wrong.
    def guess():
        problem = rng.choice(rows)["prompt"][0]["content"]
        return warm_start.chat(problem, f"Remainder \\boxed{{{rng.randint(0, 4)}}}")

    def condemn():
        problem, paragraphs = toy_world.right_solution(rng, flawed=rng.random() < 0.5)
        paragraphs = paragraphs if rng.random() < 0.5 else paragraphs[-1:]
        return warm_start.chat(toy_world.critic_prompt(problem, paragraphs), "\\boxed{0}")

    teach(folder / "policy", tokenizer, guess)
    teach(folder / "judge", tokenizer, condemn)
    port = free_port()
    command = ["genrm_server.py", "--model", folder / "judge", "--port", port, "--cpus", 1]
    with open(folder / "judge.log", "w") as log:
        server = forked.Script([*command, "--max-model-len", 512], log)
    until(lambda: answers(port), 240)
    yield folder, f"127.0.0.1:{port}"
    server.send_signal(signal.SIGTERM)
    server.wait(200)


def train(world, name, **flags):
    """Run the trainer with the served judge, and return samples and metrics."""
    folder, address = world
    judge = {"prompt_style": "brief", "genrm_max_tokens": 16, "keep_critique": True}
    flags = (
        dict(
            model=folder / "policy",
            train_file=folder / "train.parquet",
            out_dir=folder / name,
            router_address=address,
            reward_kwargs=json.dumps(judge),
            train_batch_size=8,
            mini_batch_size=4,
            group_size=8,
            max_response_length=12,
            overlong_buffer=0,
            lr=1e-4,
            num_threads=1,
            samples_per_step=64,
            num_reward_workers=1,
        )
        | flags
    )
    command = ["grpo_trainer.py"]
    for flag, value in flags.items():
        command += ["--" + flag.replace("_", "-"), str(value)]
    run = forked.run(command, timeout=600)
    assert run.returncode == 0, run.stdout + run.stderr
    return [
        [json.loads(line) for line in (folder / name / f"{file}.jsonl").read_text().splitlines()]
        for file in ("samples", "metrics")
    ]


@pytest.mark.slow
def test_training_with_a_served_judge(world):
    samples, metrics = train(world, "run", reward_fn="toy/toy_world.py:compute_score_fapo", total_steps=3)
    assert len(samples) == 3 * 64
    right = [sample for sample in samples if sample["reward_extra_info"]["acc"]]
    assert len(right) > 10
    judged = [sample for sample in right if sample["reward_extra_info"]["critique"] == "\\boxed{0}"]
    assert len(judged) > 0.9 * len(right)  # the judge really responded, in words that only it uses ...
    for sample in judged:  # ... and its verdict is the reward: correct but flawed
        assert sample["reward_score"] == 0.0 and sample["reward_extra_info"]["genrm_status"] == "ok"
        assert sample["reward_extra_info"]["flawed_positive"] is True
    for sample in samples:
        if not sample["reward_extra_info"]["acc"]:
            assert sample["reward_score"] == -1.0 and sample["reward_extra_info"]["genrm_status"] == "skipped"

    assert [m["step"] for m in metrics] == [0, 1, 2, 3]
    for m in metrics[1:]:
        assert (
            m["reward/flawed_positive_rate"] > 0.9 and m["genrm/error_rate"] < 0.1 and m["actor/updates"] >= 1
        )
    folder = world[0] / "run"
    assert (folder / "curves.png").stat().st_size > 10_000
    assert (folder / "checkpoints/step_3/model.safetensors").is_file()


@pytest.mark.slow
def test_training_with_a_judge_that_is_asked_about_whole_groups(world):
    function = "docs/group_rewards.py:fapo_against_others"
    samples, metrics = train(world, "groups", reward_fn=function, total_steps=2)
    groups = {}
    for sample in samples:
        groups.setdefault((sample["step"], sample["group"]), []).append(sample)
    assert [len(group) for group in groups.values()] == [8] * 16
    compared = 0
    for group in groups.values():
        distinct = len({sample["response"] for sample in group})
        known = [sample for sample in group if sample["reward_score"] is not None]
        infos = [sample["reward_extra_info"] for sample in known]
        places = [(info["acc"], info["first_wrong"] == -1) for info in infos]  # each has one paragraph
        for sample, info, mine in zip(known, infos, places):
            assert info["group_distinct"] == distinct and info["acc"] == ("boxed" in info["critique"])
            beaten = sum(mine > other for other in places) - sum(mine < other for other in places)
            assert sample["reward_score"] == pytest.approx(beaten / max(len(known) - 1, 1))
        compared += len({acc for acc, _ in places}) == 2
    assert compared > 8  # in which correct answers beat wrong ones
    for m in metrics[1:]:
        assert m["genrm/error_rate"] < 0.1 and m["reward/group_distinct"] < 8 and m["actor/updates"] >= 1
