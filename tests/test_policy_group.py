"""The policy on several ranks, each a Ray actor with gloo on CPU: the same numbers as one process,
checkpoints for any number of ranks, and ranks that die.
"""

import copy
import json
import math
import os
import signal
import sys
import time
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import patch

import pytest
import ray
import torch
import torch.distributed as dist
from safetensors.torch import load_file
from torch.distributed.checkpoint import CheckpointException

import causal_lm
import grpo_trainer
import policy as policy_file
from cluster import policy_group
import weight_sync
from genrm_server import Config
from grpo_trainer import train
from cluster.policy_group import PolicyGroup
from cluster.ranks import RankedPolicy, Ranks
from cluster.servers import ClusterServers
from cluster.weights import send
from policy import Policy, RanksLost, Sample
from rollout import model_files
from run import Run
from test_genrm_server import stand_in  # noqa: F401
from test_policy import GROUPED, of_family
from tiny import CPU, a_step, config_of, groups_of
from weight_sync import summed

pytestmark = pytest.mark.slow


@pytest.fixture(autouse=True)
def limit():
    """Fail a test that hangs, because collectives may wait for hours."""

    def stop(*_):
        raise TimeoutError("the test was not done after 900 s")

    before = signal.signal(signal.SIGALRM, stop)
    signal.alarm(900)
    yield
    signal.alarm(0)
    signal.signal(signal.SIGALRM, before)


@pytest.fixture(scope="module")
def forked_ray(tmp_path_factory, small_ray):
    """Start a Ray cluster whose workers are forked, because each rank would import torch for seconds.

    Yields a folder. Modules in its subfolder path/ replace others of the same name.
    """
    folder = tmp_path_factory.mktemp("ray")
    quiet = dict(include_dashboard=False, log_to_driver=False, logging_level="error")
    with pytest.MonkeyPatch.context() as patched:
        patched.setenv("PYTHONPATH", str(folder / "path"))
        ray.init("local", **quiet)
    yield folder
    ray.shutdown()


@pytest.fixture(scope="module")
def folder(tmp_path_factory, model, forked_ray):
    folder = tmp_path_factory.mktemp("policy")
    copy.deepcopy(model).bfloat16().save_pretrained(folder)  # most models are stored like this
    return str(folder)


def settings(folder, **changes):
    return config_of(
        **{
            "model": folder,
            "out_dir": folder,
            "device": "cpu",
            "mini_batch_size": 2,
            "lr": 1e-3,
            "kl_coef": 0.1,
            "entropy_coef": 0.01,
            "max_tokens_per_micro_batch": 60,
        }
        | changes
    )


@pytest.fixture
def group_of(folder):
    """Yield a function that starts a group with this many ranks, and end the groups afterwards."""
    groups = []

    def start(ranks, source=folder, **changes):
        groups.append(PolicyGroup(settings(folder, policy_ranks=ranks, **changes), str(source)))
        return groups[-1]

    yield start
    for group in groups:
        group.shutdown()


@pytest.fixture
def one_rank(monkeypatch):
    """Return a function that loads a policy on one rank in this process. Offloading shards the policy."""
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo")

    def load(model, source, **changes):
        if dist.is_initialized():
            dist.destroy_process_group()
        store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        options = settings(model, policy_offload=True, **changes)
        return RankedPolicy(options, str(source), CPU, Ranks(store=f"127.0.0.1:{store.port}"))

    yield load
    dist.destroy_process_group()


@pytest.fixture
def without_code_generation(monkeypatch):
    """Let ranks compile two of the layers without generating code, which takes minutes on a CPU."""
    layers_of = causal_lm.layers_of

    def compile_layers(model):
        with patch.object(causal_lm, "layers_of", lambda *arguments: layers_of(*arguments)[:2]):
            causal_lm.compile_layers(model, backend="aot_eager")

    class Compiled(RankedPolicy):
        def __init__(self, *arguments):
            with patch.object(policy_file, "compile_layers", compile_layers):
                super().__init__(*arguments)

    monkeypatch.setattr(policy_group, "RankedPolicy", Compiled)


def test_a_second_ctrl_c_does_not_wait_for_the_ranks(monkeypatch):
    group, calls = PolicyGroup.__new__(PolicyGroup), []

    def call(method, *_, **__):
        calls.append(method)
        raise KeyboardInterrupt

    monkeypatch.setattr(policy_group, "mini_batches", lambda *_: [])
    group.__dict__ |= dict(actors=[0, 0], config=config_of(), num_updates=5, call=call)
    with pytest.raises(KeyboardInterrupt):
        group.update([], lr=1e-3)
    assert calls == ["update_mini_batches"] and group.num_updates is None


@pytest.mark.parametrize(
    ("count", "changes", "threads"),
    [
        (1, {}, None),  # torch's default
        (1, {"num_threads": 3}, 3),
        (1, {"policy_offload": True}, 6),
        (2, {}, 1),
        (2, {"policy_offload": True}, 3),
        (2, {"policy_offload": True, "num_threads": 2}, 2),
    ],
)
def test_the_threads_of_a_rank(monkeypatch, count, changes, threads):
    seen = [None]
    monkeypatch.setattr(torch, "set_num_threads", seen.append)
    monkeypatch.setattr("os.sched_getaffinity", lambda _: range(6))
    monkeypatch.setattr(Policy, "__init__", lambda *_: None)
    ranks = SimpleNamespace(rank=0, count=count, per_node=count, files={}, join=lambda device: None)
    RankedPolicy(config_of(**changes), "model", CPU, ranks)
    assert seen[-1] == threads


def graphs_of(group):
    """Return the number of compiled graphs of each rank, and of the places that could not be compiled."""

    def graphs(policy):
        counters = torch._dynamo.utils.counters
        return counters["stats"]["unique_graphs"], counters["graph_break"].total()

    return ray.get([actor.__ray_call__.remote(graphs) for actor in group.actors])


def uneven_step(model):
    """Return long and short answers.

    One mini-batch has a single sample with a gradient, so one rank has nothing to do.
    """
    samples = a_step(model)
    for sample in samples[8:15]:
        sample.advantage = 0.0
    samples[0].response_ids += [20] * 40
    samples[0].rollout_logprobs += [-2.0] * 40
    return samples


def bytes_held(group):
    """Return the bytes of weights, gradients and moments that each rank keeps between updates."""

    def held(policy):
        weights = list(policy.model.parameters())
        tensors = weights + [weight.grad for weight in weights]
        for state in policy.optimizer.state.values():
            tensors += [state["exp_avg"], state["exp_avg_sq"]]
        if policy.reference is not None:
            tensors += policy.reference.parameters()
        return sum(tensor.to_local().nbytes for tensor in tensors)

    return ray.get([actor.__ray_call__.remote(held) for actor in group.actors])


def test_ranks_compute_what_one_process_does_and_save_for_any_number(
    folder, model, group_of, tmp_path, monkeypatch, without_code_generation
):
    """Each number of ranks trains one step, starting from the checkpoint of the previous number.

    Only the ranks recompute activations, and only two ranks compile their layers. The step on two ranks also
    has a head with bf16 operands, a reference model, which is sharded as well, a loss over whole sequences,
    advantages that change within a sequence, and tokens that a tool wrote. In the step on three ranks, one
    mini-batch has a single sample with a gradient, and the loss is a function of the user's own, whose file
    must not change before the ranks restart.
    """
    alone, first = (Policy(settings(folder), folder, CPU) for _ in range(2))
    step = a_step(model)
    assert first.update(groups_of(step), 1e-3) == alone.update(groups_of(step), 1e-3)
    first.save(tmp_path / "of_1")
    steps = {2: a_step(model, seed=1, length=3), 3: uneven_step(model)}
    for number, sample in enumerate(steps[2]):
        sample.loss_mask = [place % 3 != 1 for place in range(len(sample.response_ids))]  # from a tool
        if sample.advantage is not None:
            prefix = min(number % 3, len(sample.response_ids) - 1)
            rest = len(sample.response_ids) - prefix
            sample.token_advantages = [0.5] * prefix + [sample.advantage] * rest
    faster = dict(compile_layers=True, bf16_head=True)
    gspo = dict(loss="gspo", clip_high=0.2, tis_cap=2.0)
    own = tmp_path / "own.py"
    arguments = "logprobs, log_ratio, advantages, mask"
    own.write_text(f"def reinforce({arguments}):\n    return -advantages * logprobs\n")
    monkeypatch.chdir(tmp_path)
    of_user = dict(kl_coef=0.0, entropy_coef=0.0, loss="own.py:reinforce")
    for ranks, options in ((2, gspo | faster), (3, of_user)):
        alone.config = settings(folder, **options)
        alone.reference = alone.reference if alone.config.kl_coef else None
        group = group_of(ranks, tmp_path / f"of_{ranks - 1}", gradient_checkpointing=True, **options)
        group.load_optimizer(tmp_path / f"of_{ranks - 1}")
        group.release_memory()
        got, expected = (policy.update(groups_of(steps[ranks]), 1e-3) for policy in (group, alone))
        assert got.keys() == expected.keys() and got["actor/updates"] == 2
        assert got == {key: pytest.approx(value, rel=1e-4, abs=1e-6) for key, value in expected.items()}
        bytes_per_weight = 20 if alone.reference else 16  # weights, gradients and two moments in float32
        numel = sum(weight.numel() for weight in alone.model.parameters())
        for held in bytes_held(group):
            assert held == pytest.approx(bytes_per_weight * numel / ranks, rel=0.1)
        assert ("actor/clip_fraction" in got) == (ranks == 2)  # The user's loss does not clip.
        for graphs, breaks in graphs_of(group):
            assert (graphs > 0) == (ranks == 2) and breaks == 0
        group.save(tmp_path / f"of_{ranks}")
        group.shutdown()
    own.write_text(own.read_text() + "# edited\n")
    with pytest.raises(RuntimeError, match="own.py has changed since the run began"):
        group.restart(str(tmp_path / "of_3"))
    last = Policy(settings(folder), str(tmp_path / "of_3"), CPU)
    last.load_optimizer(tmp_path / "of_3")
    for (name, got), (same, weight) in zip(last.weights(), alone.weights()):
        assert name == same and torch.allclose(got, weight, atol=1e-5), name
    states, expected = last.optimizer_state(), alone.optimizer_state()
    assert states.keys() == expected.keys()
    for name, state in states.items():
        for part, tensor in state.items():
            assert torch.allclose(tensor, expected[name][part], atol=1e-5, rtol=1e-3), (name, part)


def test_ranks_split_adapters_and_the_frozen_model_alike(folder, model, group_of, tmp_path):
    """Start two and three ranks from a seed and from their own checkpoint. The reference has no adapters."""
    adapted = dict(lora_rank=10)
    alone, steps = Policy(settings(folder, **adapted), folder, CPU), [a_step(model), a_step(model, seed=1)]
    expected = [alone.update(groups_of(step), 1e-3) for step in steps]
    source = folder
    for ranks, step, metrics in zip((2, 3), steps, expected):
        group = group_of(ranks, source, **adapted)
        assert group.model_info()["adapters"] == alone.model_info()["adapters"] != ""
        if source != folder:
            group.load_optimizer(Path(source))
        got = group.update(groups_of(step), 1e-3)
        assert got == {key: pytest.approx(value, rel=1e-4, abs=1e-6) for key, value in metrics.items()}
        source = tmp_path / f"of_{ranks}"
        group.save(source)
        group.shutdown()
    last = Policy(settings(folder, **adapted), str(source), CPU)
    for (name, got), (same, weight) in zip(last.weights(), alone.weights()):
        assert name == same and torch.allclose(got, weight, atol=1e-5), name


def test_ranks_compute_with_the_scales_of_one_process(one_rank, tmp_path):
    """Gemma multiplies by constants such as the root of the hidden size, which bf16 would round."""
    stored = str(tmp_path / "model")
    family_model = of_family("gemma2", **GROUPED | dict(num_hidden_layers=1, hidden_size=40))
    family_model.bfloat16().save_pretrained(stored)
    alone = Policy(settings(stored), stored, CPU)
    sample = Sample({}, [5, 6, 7], [8, 9, 10])

    def logprobs(policy, *model):
        ((_, found),) = policy.logprobs_of([sample], *model)
        return found

    expected = logprobs(alone)
    rank = one_rank(stored, stored)
    assert torch.allclose(logprobs(rank), expected, atol=1e-5)
    rank.save(tmp_path / "saved")
    resumed = one_rank(stored, tmp_path / "saved")
    assert torch.allclose(logprobs(resumed), expected, atol=1e-5)
    assert torch.allclose(logprobs(resumed, resumed.reference), expected, atol=1e-5)


def test_a_rank_resumes_with_a_weight_that_never_had_a_gradient(
    one_rank, folder, model, tmp_path, monkeypatch
):
    load = policy_file.load_causal_lm

    def with_idle_weights(*arguments):
        loaded = load(*arguments)
        loaded.model.layers[0].idle = torch.nn.Linear(2, 2)
        return loaded

    monkeypatch.setattr(policy_file, "load_causal_lm", with_idle_weights)
    samples = a_step(model)[4:8]
    first = one_rank(folder, folder)
    first.update([samples], 1e-3)
    first.save(tmp_path)
    expected = first.optimizer_state().keys()
    resumed = one_rank(folder, tmp_path)
    resumed.load_optimizer(tmp_path)
    assert resumed.optimizer_state().keys() == expected
    assert len(expected) == len(dict(resumed.trainable())) - 2
    resumed.update([samples], 1e-3)


def pids_of(group):
    return ray.get([actor.__ray_call__.remote(lambda self: os.getpid()) for actor in group.actors])


def test_a_rank_that_dies_is_noticed_at_once_and_a_rank_that_fails_says_why(
    folder, model, group_of, tmp_path
):
    group, samples = group_of(2), a_step(model)
    group.update(groups_of(samples), 1e-3)
    # Rank 1 dies while rank 0 waits for it in a collective, whose time limit is hours.
    group.actors[1].__ray_call__.remote(lambda self: (time.sleep(1), os.kill(os.getpid(), signal.SIGKILL)))
    started = time.monotonic()
    with pytest.raises(RanksLost, match="a rank of the policy died"):
        group.update(groups_of(samples), 1e-3)
    assert time.monotonic() - started < 1000  # "At once" compared with hours, also on a busy machine.
    with pytest.raises(RanksLost):
        group.save(Path(folder, "never"))
    group.restart(folder)
    assert group.update(groups_of(samples), 1e-3)["actor/updates"] == group.num_updates == 2
    # A failure before the first optimizer step does no harm.
    with pytest.raises(RuntimeError, match="exceeds --max-logprob-diff 0: the sampler"):
        group.update(groups_of(samples), 1e-3, 0.0)
    assert group.num_updates == 2
    # Neither does a checkpoint that has been truncated.
    group.save(tmp_path / "cut")
    with open(tmp_path / "cut/optimizer/__1_0.distcp", "r+b") as file:
        file.truncate(1000)
    with pytest.raises(CheckpointException):
        group.load_optimizer(tmp_path / "cut")
    assert group.update(groups_of(samples), 1e-3)["actor/updates"] == 2
    # One rank fails with its own error, while the other one would wait for it.
    ray.get(group.actors[0].__ray_call__.remote(lambda self: setattr(self, "accumulate_gradients", None)))
    with pytest.raises(TypeError, match="NoneType"):
        group.update(groups_of(samples), 1e-3)
    # No rank stays in a collective, where it would mistake tensors of the next call for tensors of this one.
    with pytest.raises(RanksLost, match="have been shut down"):
        group.update(groups_of(samples), 1e-3)


def test_what_is_not_finite_stops_all_ranks_and_a_bad_model_is_refused_by_name(
    folder, model, group_of, tmp_path, monkeypatch
):
    samples = a_step(model)
    samples[-1].advantage = math.inf
    with pytest.raises(RuntimeError, match="not finite"):
        group_of(2).update(groups_of(samples), 1e-3)
    model.save_pretrained(tmp_path)
    Path(tmp_path, "config.json").write_text(
        Path(tmp_path, "config.json").read_text().replace('"llama"', '"no_such_family"')
    )
    with pytest.raises(ValueError, match="no_such_family"):
        group_of(2, tmp_path)
    monkeypatch.setattr(policy_group, "RESERVE_TIMEOUT", 1.0)
    with pytest.raises(RuntimeError, match="rank: the Ray cluster lacks resources for 500 bundles"):
        group_of(500)


def test_nccl_is_named_if_it_stops_a_constructor(group_of, monkeypatch):
    class Failing(RankedPolicy):
        def __init__(self, *_):
            raise dist.DistBackendError("NCCL error in: x.cpp:9\nncclSystemError: System call\nLast error:\n")

    monkeypatch.setattr(policy_group, "RankedPolicy", Failing)
    with pytest.raises(RuntimeError, match="^NCCL error in: x.cpp:9$"):
        group_of(1)


def test_a_sharded_model_with_its_own_code_is_saved_and_served_with_this_code(
    model, tokenizer, one_rank, tmp_path, monkeypatch
):
    monkeypatch.setattr("transformers.dynamic_module_utils.HF_MODULES_CACHE", str(tmp_path / "modules"))
    monkeypatch.setattr("sys.path", [*sys.path])  # transformers adds its folder of modules.
    base, saved = tmp_path / "base", tmp_path / "saved"
    model.save_pretrained(base)
    code = "from transformers import LlamaConfig, LlamaForCausalLM\n\n\n"
    code += "class Own(LlamaForCausalLM):\n    config_class = LlamaConfig\n"
    (base / "modeling_own.py").write_text(code)
    names = {"auto_map": {"AutoModelForCausalLM": "modeling_own.Own"}, "architectures": ["Own"]}
    config = json.loads((base / "config.json").read_text()) | names
    (base / "config.json").write_text(json.dumps(config))
    rank = one_rank(str(base), base, trust_remote_code=True)
    served = model_files(rank.model_info(), tokenizer)
    assert served["modeling_own.py"].decode() == code
    assert names.items() <= json.loads(served["config.json"]).items()
    rank.save(saved)
    assert names.items() <= json.loads((saved / "config.json").read_text()).items()
    assert {file.name: file.read_text() for file in saved.glob("*.py")} == {"modeling_own.py": code}
    assert one_rank(str(base), saved, trust_remote_code=True).model_info()["architecture"] == "Own"


def kill(group, rank, after):
    group.actors[rank].__ray_call__.remote(
        lambda self: (time.sleep(after), os.kill(os.getpid(), signal.SIGKILL))
    )


def test_a_run_whose_ranks_are_killed_ends_as_the_run_of_one_process_does(
    folder, model, tokenizer, monkeypatch, tmp_path, capfd
):
    """One rank dies in an update, one while it restarts, and one while a checkpoint is written.

    Only the steps after the last checkpoint are repeated. In addition, Ctrl-C while the ranks write a
    checkpoint takes effect afterwards.
    """
    tokenizer.save_pretrained(folder)
    row = {
        "data_source": "toy",
        "prompt": [{"role": "user", "content": "1 + 1"}],
        "reward_model": {"ground_truth": "2"},
        "extra_info": {},
    }
    (tmp_path / "rows.jsonl").write_text((json.dumps(row) + "\n") * 4)

    def played(run, batch, prompts):
        """Replace servers and rewards: return the same samples for any number of ranks."""
        groups = [[Sample(row, row["prompt_ids"]) for _ in range(count)] for row, count in prompts]
        for sample, made in zip(sum(groups, []), a_step(model, seed=batch.step), strict=True):
            sample.prompt_ids, sample.response_ids, sample.rollout_logprobs = (
                made.prompt_ids,
                made.response_ids,
                made.rollout_logprobs,
            )
            sample.result = made.result | {"reward_extra_info": {"score": made.result["reward_score"]}}
        return groups

    monkeypatch.setattr(grpo_trainer, "roll_out", played)
    monkeypatch.setattr(grpo_trainer, "wait_for_rewards", lambda run, batch, groups: groups)
    for name in ("start_rewards", "start_servers"):
        monkeypatch.setattr(Run, name, lambda *_, **__: None)
    update, save = PolicyGroup.update, PolicyGroup.save

    def update_and_die(self, groups, lr, max_logprob_diff):
        if len(seen) == 2 and self.starts == 1:
            kill(self, 1, 0.05)
            dying.touch()
        seen.append(len(groups))
        return update(self, groups, lr, max_logprob_diff)

    def save_and_die(self, path):
        if path.name == ".step_2.tmp":
            signal.raise_signal(signal.SIGINT)
        if path.name == ".step_4.tmp" and self.starts == 3:
            die = lambda *_, **__: os.kill(os.getpid(), signal.SIGKILL)  # noqa: E731
            ray.get(
                self.actors[0].__ray_call__.remote(
                    lambda self, die: setattr(self.model, "save_pretrained", die), die
                )
            )
        return save(self, path)

    class DiesInConstructor(RankedPolicy):
        def __init__(self, config, source, device, ranks):
            if ranks.rank == 1 and dying.exists():
                dying.unlink()
                os.kill(os.getpid(), signal.SIGKILL)
            super().__init__(config, source, device, ranks)

    seen, dying = [], tmp_path / "dying"
    monkeypatch.setattr(policy_group, "RankedPolicy", DiesInConstructor)
    monkeypatch.setattr(PolicyGroup, "update", update_and_die)
    monkeypatch.setattr(PolicyGroup, "save", save_and_die)
    weights, lines = [], []
    for ranks in (2, 1):
        out = tmp_path / f"of_{ranks}"
        config = config_of(
            model=folder,
            train_file=str(tmp_path / "rows.jsonl"),
            out_dir=str(out),
            device="cpu",
            rollout="vllm",  # the samples are from different weights
            policy_ranks=ranks,
            total_steps=4,
            save_every=2,
            lr=1e-3,
            overlong_buffer=0,
            max_prompt_length=64,
            max_logprob_diff=1e9,
            max_response_length=32,
            mini_batch_size=2,
            resume="auto",
        )
        if ranks == 2:
            with pytest.raises(KeyboardInterrupt):
                train(config)
            assert os.listdir(out / "checkpoints") == ["step_2"]
        last = train(config)
        weights.append(load_file(last / "model.safetensors"))
        lines.append([json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()])
        assert sorted(os.listdir(out / "checkpoints")) == ["step_2", "step_4"]  # nothing is incomplete
    said = capfd.readouterr().out
    assert "finishing this step, then saving" in said and "--resume auto resumes after step 2" in said
    for count in (1, 2, 3):
        assert f"restarting the ranks after step 2 (attempt {count} of --max-restarts 3)" in said
    assert [line["step"] for line in lines[0]] == [line["step"] for line in lines[1]] == [0, 1, 2, 3, 4]
    assert lines[0][-1]["actor/restarts"] == 3
    for several, alone in zip(*lines):
        for key, value in alone.items():
            assert key.startswith(("time/", "perf/", "actor/restarts")) or several[key] == pytest.approx(
                value, rel=1e-3, abs=1e-5
            ), key
    assert all(torch.allclose(weights[0][name], weight, atol=2e-5) for name, weight in weights[1].items())


class Sender:
    """A group with only what PolicyServers needs: it sends weights to Ray actors."""

    device, reservation, starts, lost = CPU, None, 1, False

    def __init__(self, policy):
        self.policy, self.config = policy, policy.config

    def model_info(self):
        return self.policy.model_info()

    def send_weights(self, folders, path, dtype):
        if self.lost:
            raise RanksLost("a rank of the policy died")
        sums = {}
        return send(summed(self.policy.weights(dtype), sums), folders, path), sums


def test_weights_reach_the_servers_of_every_node_also_after_a_death(
    folder,
    model,
    tokenizer,
    forked_ray,
    stand_in,
    monkeypatch,
):
    """The servers are actors with a stand-in for vLLM, and the packs of weights are smaller than a tensor.

    The process of a folder may die. A server that moves to another node needs the ranks; without them, the
    sampling code gets an error.
    """
    (forked_ray / "path").symlink_to(stand_in.parent / "path")  # Ray's actors then find the stand-in.
    monkeypatch.setattr(weight_sync, "PACK", 50_000)
    policy = Policy(settings(folder), folder, CPU)
    sender = Sender(policy)
    with pytest.raises(RuntimeError, match="server 0 failed .*: CPU core 99 is not available"):
        ClusterServers(sender, tokenizer, Config(model="", cpus="99", log_dir=stand_in.parent / "logs"))
    servers = ClusterServers(
        sender, tokenizer, Config(model="", num_servers=2, log_dir=stand_in.parent / "logs")
    )

    def served():
        parts = [load_file(path) for path in servers.folder.path.glob("*.safetensors")]
        assert len(parts) > 5 and len({name for part in parts for name in part}) == sum(map(len, parts))
        return {name: tensor for part in parts for name, tensor in part.items()}

    def is_served():
        return all(torch.equal(served()[name], weight) for name, weight in policy.model.state_dict().items())

    try:
        assert is_served() and len(servers.folders) == 1  # one node, one folder, two servers
        with torch.no_grad():
            policy.model.lm_head.weight.add_(1.0)
        assert not is_served()
        servers.sync()
        assert is_served() and all(slot.joined for slot in servers.service.slots)
        (folder,) = servers.folders.values()
        die = lambda self: os.kill(os.getpid(), signal.SIGKILL)  # noqa: E731
        folder.__ray_call__.options(max_task_retries=0).remote(die)
        policy.model.lm_head.weight.data.add_(1.0)
        servers.sync()
        assert is_served() and list(servers.folders.values()) == [folder]  # Ray has restarted it
        servers.folders.clear()  # as if the server came back on another node
        sender.lost = True
        os.kill(ray.get(servers.actors[0].__ray_call__.remote(lambda self: self.child.pid)), signal.SIGKILL)
        with pytest.raises(RanksLost):
            while True:
                servers.check()
                time.sleep(0.1)
        sender.lost = False
        end = time.monotonic() + 200
        while not (servers.service.slots[0].restarts and servers.folders and servers.service.slots[0].joined):
            assert time.monotonic() < end
            time.sleep(0.1)
        assert is_served()
    finally:
        servers.shutdown()
    assert not os.path.lexists(servers.folder.path)
