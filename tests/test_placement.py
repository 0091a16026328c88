"""Which process gets which GPU: layouts computed by hand, and what each process sees of GPUs that exist only
in Ray's records.
"""

import contextlib
import itertools
import json
import os
import random
import re
from types import SimpleNamespace
from unittest.mock import patch

import pytest
import ray
import torch

from cluster import policy_group
from cluster.placement import SLEEPER_GPUS as ASLEEP
from cluster.placement import ProcessSpec as Spec
from cluster.placement import Reservation, layout, process_specs
from cluster.ranks import RankedPolicy, Ranks
from genrm_server import SLEEP, Config, VllmServer
from policy import Policy
from run import Run
from test_genrm_server import stand_in, told  # noqa: F401
from tiny import CPU, config_of, write_model


def on_gpus(specs, gpus):
    """Return [{"rank 0": 0.5, ...}, ...]: the processes of each bundle, with the fraction that each requests
    from Ray.
    """
    bundles, where = layout(specs, gpus)
    held = [{} for _ in bundles]
    for (name, number), (index, share) in where.items():
        held[index][f"{name} {number}"] = share
    return held


def test_ranks_and_servers_share_the_same_eight_gpus():
    specs = {"rank": Spec(8, 0.25, 0.5, apart=True), "server": Spec(8, 0.5, 0.4)}
    assert on_gpus(specs, 8) == [{f"rank {i}": 0.5, f"server {i}": 0.4} for i in range(8)]
    assert layout(specs, 8)[0] == [{"CPU": 0.75, "GPU": 1}] * 8


def test_one_gpu_takes_all_parts_and_servers_of_several_take_theirs_whole():
    three = {"rank": Spec(1, 0.25, 0.4, apart=True), "server": Spec(1, 0.5, 0.3), "judge": Spec(1, 0.5, 0.3)}
    assert on_gpus(three, 1) == [{"rank 0": 0.4, "server 0": 0.3, "judge 0": 0.3}]
    specs = {"rank": Spec(2, 0, 1.0, apart=True), "judge": Spec(3, 0, 0.4), "server": Spec(2, 0, 2.0)}
    expected = [{"server 0": 2}, {"server 1": 2}, {"rank 0": 1}, {"rank 1": 1}]
    assert on_gpus(specs, 9) == [*expected, {"judge 0": 0.4}, {"judge 1": 0.4}, {"judge 2": 0.4}]
    assert on_gpus(specs, 8) == [*expected, {"judge 0": 0.4, "judge 2": 0.4}, {"judge 1": 0.4}]
    assert [bundle["GPU"] for bundle in layout(specs, 8)[0]] == [2, 2, 1, 1, 1, 1]
    assert on_gpus({"rank": Spec(2, 0.25, apart=True)}, 0) == [{"rank 0": 0}, {"rank 1": 0}]  # on CPU


def test_a_judge_that_sleeps_is_on_a_full_gpu_too():
    """Ray counts in units of 1/10,000.

    All specs must add up to at most one GPU, and each must get a fraction.
    """
    specs = {"rank": Spec(2, 0, 1.0, apart=True), "judge": Spec(2, 0, ASLEEP), "rm": Spec(1, 0, ASLEEP)}
    first, second = on_gpus(specs, 8)
    assert first == {"rank 0": 0.999, "judge 0": ASLEEP, "rm 0": ASLEEP}
    assert second == {"rank 1": 0.999, "judge 1": ASLEEP}


def test_judges_that_sleep_are_spread_and_go_where_least_is_taken():
    held = on_gpus({"rank": Spec(1, 0, 1.0, apart=True), "judge": Spec(5, 0, ASLEEP)}, 4)
    assert sorted(sum(who.startswith("judge") for who in one) for one in held) == [1, 1, 1, 2]
    beside = {"rank": Spec(2, 0, 0.7, apart=True), "server": Spec(1, 0, 0.3)}
    first, second = on_gpus(beside | {"judge": Spec(1, 0, ASLEEP)}, 2)
    assert set(first) == {"rank 0", "server 0"} and set(second) == {"rank 1", "judge 0"}


def test_servers_that_are_awake_together_fit_on_their_gpu():
    """The policy frees memory for judges that are awake, but its servers do not."""
    rank = {"rank": Spec(1, 0, 0.7, apart=True)}
    server = {"server": Spec(1, 0, 0.3)}
    assert len(on_gpus(rank | server | {"judge": Spec(1, 0, ASLEEP, awake=0.7)}, 1)) == 1
    for judges in (
        {"judge": Spec(1, 0, ASLEEP, awake=0.75)},
        {"judge": Spec(2, 0, ASLEEP, awake=0.4)},
        {"judge": Spec(1, 0, ASLEEP, awake=0.4), "rm": Spec(1, 0, ASLEEP, awake=0.4)},
    ):
        with pytest.raises(ValueError, match=r"not enough GPUs: (judge|rm) [01] needs 0\.(4|75) of 1 GPUs"):
            layout(rank | server | judges, 1)
        assert len(on_gpus(rank | server | judges, 2)) == 2  # A second GPU has room.


def can_fit(specs, gpus):
    """Return whether the ranks (the first spec, each on a separate GPU) and all others fit.

    Tries all ways to fill one GPU after another.
    """
    ranks, *others = specs.values()
    gpus -= sum(int(part.gpus) * part.count for part in others if part.gpus >= 1)
    others = [part for part in others if part.gpus < 1]
    wanted = tuple(part.count for part in others)
    reached = {(0,) * len(others)}
    for number in range(gpus):
        room = 1.0 - (ranks.gpus if number < ranks.count else 0.0)
        numbers = [range(int(room / part.gpus + 1e-9) + 1) for part in others]
        full = [
            each
            for each in itertools.product(*numbers)
            if sum(n * part.gpus for n, part in zip(each, others)) < room + 1e-9
        ]
        sums = {tuple(map(sum, zip(so_far, each))) for so_far in reached for each in full}
        reached = {tuple(map(min, numbers, wanted)) for numbers in sums}
    return ranks.count <= gpus and wanted in reached


def test_plans_that_fit_are_hardly_ever_refused():
    ranks = Spec(8, 0, 0.4, apart=True)
    assert len(on_gpus({"rank": ranks, "server": Spec(4, 0, 0.5), "judge": Spec(4, 0, 0.45)}, 8)) == 8
    rng, fitting, refused = random.Random(0), 0, []
    shares = [0.2, 0.25, 0.3, 0.35, 0.4, 0.45, 0.5, 0.6, 1.0, 2.0]
    while fitting < 1000:
        gpus = rng.randint(1, 8)
        share = rng.choice([0.3, 0.4, 0.5, 0.6, 0.7, 1.0])
        specs = {"rank": Spec(rng.randint(1, gpus), 0, share, apart=True)}
        for name in ("server", "judge", "rm")[: rng.choice([1, 2, 2, 2, 3])]:
            specs[name] = Spec(rng.randint(1, gpus + gpus * (name == "server")), 0, rng.choice(shares))
        if can_fit(specs, gpus):
            fitting += 1
            try:
                placed = on_gpus(specs, gpus)
                assert all(sum(held.values()) < 1.001 for held in placed if len(held) > 1)
            except ValueError:
                refused.append((specs, gpus))
    assert len(refused) <= 0.01 * fitting, refused[:3]


@pytest.mark.parametrize(
    "specs, gpus, message",
    [
        ({"rank": Spec(1, 0, 1.0, apart=True)}, 0, "rank 0 needs 1 of 0 GPUs; make more GPUs visible"),
        ({"server": Spec(1, 0, 2.0)}, 1, "server 0 needs 2 of 1 GPUs; make more GPUs visible, lower the"),
        (
            {"rank": Spec(2, 0, 0.5, apart=True)},
            1,
            "not enough GPUs: rank 1 needs 0.5 of 1 GPUs in addition to rank 0; ranks cannot share",
        ),
        (
            {"rank": Spec(2, 0, 0.5, apart=True), "policy server": Spec(2, 0, 0.6)},
            2,
            "policy server 0 needs 0.6 of 2 GPUs in addition to rank 0, rank 1; lower their shares of a GPU "
            "(--policy-gpu-share 0.5 --rollout-gpu-share 0.2), or start fewer processes",
        ),
        (
            {"rank": Spec(2, 0, 0.6, apart=True), "server": Spec(1, 0, 1.0)},
            2,
            "rank 1 needs 0.6 of 2 GPUs in addition to server 0, rank 0; lower their shares of a GPU",
        ),
        ({"genrm": Spec(2, 0, 2.0)}, 3, "needs 2 of 3 GPUs in addition to genrm 0; start fewer processes"),
        ({"genrm": Spec(2, 0, 1.0)}, 1, "in addition to genrm 0; lower their shares of a GPU (--genrm-gpu-"),
        ({"rank": Spec(7, 0, 1.0), "server": Spec(1, 0, 2.0)}, 8, "rank 6 needs 1 of 8 GPUs"),
    ],
)
def test_what_does_not_fit_is_refused_in_one_line_with_what_was_tried(specs, gpus, message):
    with pytest.raises(ValueError, match=re.escape(message)) as caught:
        layout(specs, gpus)
    assert "\n" not in str(caught.value)


def test_the_parts_of_a_run(monkeypatch):
    monkeypatch.setattr(ray, "cluster_resources", lambda: {"GPU": 8.0})
    monkeypatch.setattr("torch.version.cuda", "13.0")
    changes = dict(device="cuda", rollout="vllm", policy_ranks=4, policy_gpu_share=0.5, rollout_servers=2)
    changes |= dict(rollout_tensor_parallel=2, genrm=("j", "rm=r"), genrm_servers=3, genrm_gpu_share=0.25)
    specs = process_specs(config_of(**changes))
    assert specs["rank"] == Spec(4, 0.25, 0.5, apart=True) and specs["policy server"] == Spec(2, 0.5, 2.0)
    assert specs["genrm"] == specs["rm"] == Spec(3, 0.5, 0.25)
    asleep = process_specs(config_of(**changes, reward_mode="colocate"))
    assert asleep["genrm"] == Spec(3, 0.5, ASLEEP, awake=0.25) and asleep["policy server"].gpus == 2.0
    own = process_specs(config_of(**changes | {"genrm_gpu_share": 1.0}, reward_mode="colocate"))
    assert own["genrm"].gpus == 1.0  # the judge has a GPU alone, so it need not sleep
    monkeypatch.setattr("torch.version.cuda", None)  # Ray counts GPUs that this PyTorch cannot use.
    assert process_specs(config_of(**changes))["genrm"].gpus == 0


def test_a_process_that_would_use_the_first_gpu_of_the_node_is_refused(monkeypatch):
    monkeypatch.setenv("RAY_EXPERIMENTAL_NOSET_CUDA_VISIBLE_DEVICES", "1")
    for start in (
        lambda: RankedPolicy(config_of(), "model", torch.device("cuda:0"), Ranks()),
        lambda: VllmServer(Config("model", device="cuda"), 0, 0, 1, "", driver_node="this"),
    ):
        with pytest.raises(ValueError, match="NOSET_CUDA_VISIBLE_DEVICES is set, .*; unset it before ray st"):
            start()


@pytest.fixture
def ray_with(small_ray, monkeypatch):
    """Start a Ray cluster that claims to have this many GPUs, with a PyTorch that claims to use them."""
    monkeypatch.setattr("torch.version.cuda", "13.0")

    def start(gpus):
        quiet = dict(include_dashboard=False, log_to_driver=False, logging_level="error")
        ray.init("local", num_cpus=4, num_gpus=gpus, **quiet)

    yield start
    ray.shutdown()


@pytest.mark.slow
def test_what_each_process_sees_of_eight_gpus(ray_with):
    class Process:
        def sees(self):
            return os.environ["CUDA_VISIBLE_DEVICES"]

    ray_with(8)
    specs = {"rank": Spec(4, 0.1, 0.5, apart=True), "server": Spec(4, 0.1, 0.4), "judge": Spec(2, 0.1, 2.0)}
    specs["sleeper"] = Spec(2, 0.1, ASLEEP)
    reservation, started = Reservation(specs), []

    def seen(name):
        options = [reservation.options(name, number) for number in range(specs[name].count)]
        made = [ray.remote(Process).options(**each).remote() for each in options]
        started.extend(made)
        return ray.get([process.sees.remote() for process in made], timeout=300)

    try:
        judges, sleepers, servers, ranks = map(seen, ("judge", "sleeper", "server", "rank"))
        assert len(set(ranks)) == 4 and servers == ranks and sleepers == ranks[:2]
        assert sorted(sum((judge.split(",") for judge in judges), []) + ranks) == [str(i) for i in range(8)]
        ray.kill(started[-1])  # the actor that replaces it sees the same GPU
        again = ray.remote(Process).options(**reservation.options("rank", 3)).remote()
        assert ray.get(again.sees.remote(), timeout=300) == ranks[3]
    finally:
        reservation.close()


def rank_on_cpu():
    class Rank(RankedPolicy):
        """A policy that acts as if on a GPU but computes on the CPU, with what it saw of the GPU."""

        def __init__(self, config, source, device, ranks):
            make, join = Policy.__init__, Ranks.join

            def make_on_cpu(self, config, source, device):
                make(self, SimpleNamespace(**vars(config) | {"device": "cpu"}), source, CPU)

            with (
                patch.object(torch.cuda, "set_per_process_memory_fraction") as held,
                patch.object(Policy, "__init__", make_on_cpu),
                patch.object(Ranks, "join", lambda self, device: join(self, CPU)),
            ):
                super().__init__(config, source, device, ranks)
            self.seen = os.environ["CUDA_VISIBLE_DEVICES"], str(held.call_args.args)

    return Rank


REWARD = "def compute_score(data_source, solution_str, ground_truth, extra_info): return 0.0\n"


@pytest.mark.slow
def test_a_run_on_one_gpu(ray_with, stand_in, tmp_path, model, tokenizer, monkeypatch):
    """Rank, policy server and judge see the same GPU, and each is limited to its share of the memory.

    With colocate, the judge sleeps between batches.
    """
    row = {
        "data_source": "toy",
        "prompt": [{"role": "user", "content": "1"}],
        "extra_info": {},
        "reward_model": {"ground_truth": "1"},
    }
    (tmp_path / "rows.jsonl").write_text(json.dumps(row) + "\n")
    (tmp_path / "score.py").write_text(REWARD)
    settings = dict(
        model=write_model(tmp_path / "policy", model, tokenizer),
        train_file=str(tmp_path / "rows.jsonl"),
        reward_fn=f"{tmp_path}/score.py:compute_score",
        num_workers=1,
        rollout_gpu_share=0.3,
        genrm=(str(stand_in),),
        genrm_gpu_share=0.3,
        reward_model_tokenizer=str(tmp_path / "policy"),
        max_response_length=8,
        overlong_buffer=0,
    )
    monkeypatch.setattr(policy_group, "RankedPolicy", rank_on_cpu())
    ray_with(1)
    shares = {"standalone": (0.4, [0.3, 0.3, 0.4]), "colocate": (0.7, [ASLEEP, 0.299, 0.699])}
    for mode, (share, expected) in shares.items():
        changes = dict(policy_gpu_share=share, reward_mode=mode, out_dir=str(tmp_path / mode))
        run = Run(config_of(**settings, **changes))
        with contextlib.ExitStack() as stack:
            run.start(stack)
            assert run.reservation.bundles == [{"CPU": 1.25, "GPU": 1}]
            assert sorted(gpus for _, gpus in run.reservation.placed.values()) == expected
            seen = ray.get(run.policy.actors[0].__ray_call__.remote(lambda rank: rank.seen))
            assert seen == ("0", f"({share}, device(type='cuda', index=0))")
            judge = told(run.rewards.reward_models.models["genrm"])
            for server in (told(run.servers.service), judge):
                line = " ".join(server["argv"])
                assert server["env"]["CUDA_VISIBLE_DEVICES"] == "0"
                assert "--gpu-memory-utilization 0.3" in line
            assert (SLEEP in judge["calls"]) == (mode == "colocate")
