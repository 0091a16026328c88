"""Weight transfer: files that safetensors can read, transfers from node to node, and nodes that die."""

import json
import mmap
import os
import shutil
import socket
import tempfile
from itertools import chain
from pathlib import Path
from types import SimpleNamespace

import pytest
import ray
import torch
from ray.cluster_utils import Cluster
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy
from safetensors.torch import load_file
from transformers import AutoConfig, AutoModelForCausalLM, Gemma2Config, Gemma2ForCausalLM
from transformers import GraniteMoeConfig, LlamaConfig, LlamaForCausalLM, MixtralConfig, NemotronHConfig
from transformers import Qwen3MoeConfig

import rollout
import weight_sync
from causal_lm import set_dtypes
from cluster import ranks
from cluster.weights import send, to_all
from policy import Policy
from test_policy import FAMILIES, GROUPED, of_family
from tiny import CPU, config_of, policy_of, write_model
from tools import merge_lora
from weight_sync import WeightFolder, WorkerExtension, compare, packs, summed, weight_sums


def tensors(dtype):
    generator = torch.Generator().manual_seed(0)
    shapes = {"a": (3, 5), "b": (7,), "c": (2, 2, 2), "d": (), "large": (40, 11), "last": (1,)}
    return {name: torch.randn(shape, generator=generator).to(dtype) for name, shape in shapes.items()}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("is_here", [True, False])
@pytest.mark.parametrize("size, count", [(2**20, 1), (100, 4), (1, 6)])
def test_packs_are_safetensors_files_with_each_tensor_once(
    tmp_path, monkeypatch, dtype, is_here, size, count
):
    """This includes transposed tensors. A second sync overwrites the files of the first.

    The sender maps the files of its own folder into memory once. Other folders get the same files.
    """
    monkeypatch.setattr(weight_sync, "PACK", size * dtype.itemsize // 4 or 1)
    monkeypatch.setattr(WeightFolder, "mapped", {})
    sent = tensors(dtype)
    sent["large"] = sent["large"].T
    folder = WeightFolder(str(tmp_path / "folder"), {"config.json": b"{}", "sub/file": b"1"})
    inodes = set()
    for _ in range(2):
        for number, pack in enumerate(packs(sent.items(), folder if is_here else None)):
            if not is_here:
                folder.write(number, pack)
        files = sorted(folder.path.glob("*.safetensors"))
        assert len(files) == count and folder.path / "model.safetensors" in files
        inodes |= {file.stat().st_ino for file in files}
        assert len(inodes) == count and len(folder.mapped) == count * is_here
        found = [load_file(file) for file in files]
        assert sum(map(len, found)) == len(sent)
        for name, tensor in {name: tensor for part in found for name, tensor in part.items()}.items():
            assert tensor.dtype == dtype and torch.equal(tensor, sent[name]), name
        sent = {name: tensor + 1 for name, tensor in sent.items()}
    assert (folder.path / "sub/file").read_bytes() == b"1"
    folder.close()
    assert not folder.path.exists() and not folder.mapped


def test_a_folder_that_was_removed_and_made_again_gets_the_weights(tmp_path):
    """The files that were mapped into memory before no longer belong to the folder."""
    sent = {"a": torch.zeros(3)}
    for value in (1.0, 2.0):
        folder = WeightFolder(str(tmp_path / "folder"), {})
        sent["a"].fill_(value)
        assert len(list(packs(sent.items(), folder))) == 1
        assert torch.equal(load_file(folder.path / "model.safetensors")["a"], sent["a"])
        shutil.rmtree(folder.path)
    folder.close()


def test_a_mapped_file_that_changes_its_size_is_mapped_again(tmp_path):
    """Writing behind the end of a mapped file would kill this process."""
    folder = WeightFolder(str(tmp_path / "folder"), {})
    sizes = {"long": 3 * mmap.PAGESIZE, "short": 3}
    for name in ("long", "short", "long"):
        sent = {name: torch.rand(sizes[name])}
        list(packs(sent.items(), folder))
        assert torch.equal(load_file(folder.path / "model.safetensors")[name], sent[name])
    os.truncate(folder.path / "model.safetensors", 1)
    list(packs(sent.items(), folder))
    assert torch.equal(load_file(folder.path / "model.safetensors")["long"], sent["long"])
    assert len(folder.mapped) == 1
    folder.close()


def test_an_error_of_the_sender_does_not_keep_the_other_ranks_waiting(tmp_path, monkeypatch):
    """The other ranks take part in gathering each weight, so the sender must ask for all of them."""
    gathered = []

    def gather(policy, dtype):
        for number in range(3):
            gathered.append(number)
            yield f"w{number}", torch.zeros(3)

    def fail(weights, *_):
        next(weights)
        raise OSError("No space left on device")

    monkeypatch.setattr(ranks, "served_weights", gather)
    monkeypatch.setattr(ranks, "send", fail)
    sender = SimpleNamespace(is_main_rank=True)
    with pytest.raises(OSError, match="No space"):
        ranks.RankedPolicy.send_weights(sender, {}, str(tmp_path), torch.float32)
    assert gathered == [0, 1, 2]


def test_weights_without_room_are_an_error_before_anything_is_written(monkeypatch):
    """Writing to mapped memory without room would kill the process instead."""
    monkeypatch.setattr(WeightFolder, "mapped", {})
    folder = WeightFolder(f"/dev/shm/test_weights_{os.getpid()}", {})
    try:
        with pytest.raises(OSError, match="No space left on device .*; enlarge /dev/shm there"):
            folder.map_file(0, 2**45)
        assert not folder.mapped
    finally:
        folder.close()


def test_a_write_without_room_names_the_node_and_a_remedy(tmp_path, monkeypatch):
    folder = WeightFolder(str(tmp_path / "folder"), {})
    monkeypatch.setattr(folder, "file_of", lambda number: Path("/dev/full"))
    folder.add(0, b"1")
    where = f"for the weights in {folder.path} on {socket.gethostname()}; enlarge {tmp_path} there"
    with pytest.raises(OSError, match=f"No space left on device {where}"):
        folder.finish(1)
    monkeypatch.setattr(folder, "file_of", lambda number: tmp_path)
    folder.add(0, b"1")
    with pytest.raises(IsADirectoryError):
        folder.finish(1)


@pytest.mark.parametrize("error, lines", [(0, 0), (1, 1)])
def test_cuda_registers_each_file_or_says_once_that_it_cannot(tmp_path, monkeypatch, capfd, error, lines):
    asked, kernels = [], []

    def register(pointer, size, flags):
        asked.append((pointer, size, flags))
        return error

    def kernel(*_, **__):
        kernels.append(error)
        raise RuntimeError("CUDA error: out of memory")

    released = []
    cuda = SimpleNamespace(cudaHostRegister=register, cudaHostUnregister=released.append)
    monkeypatch.setattr(WeightFolder, "mapped", {})
    folder = WeightFolder(str(tmp_path / "folder"), {})
    folder.map_file(7, 8)  # This process does not use CUDA.
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "cudart", lambda: cuda)
    monkeypatch.setattr(torch, "ones", kernel)
    monkeypatch.setattr(WeightFolder, "can_register", True)
    buffers = [folder.map_file(number, 100 + number) for number in (0, 1, 0, 1)]
    registered = [(buffer.data_ptr(), len(buffer), 0) for buffer in buffers]
    assert asked == registered[: 1 if error else 2]
    assert kernels == [1] * error  # The error is not reported again later.
    assert capfd.readouterr().out.count("CUDA cannot register memory (1), so syncs are slower") == lines
    pointers = [buffer.data_ptr() for buffer in buffers[:2]]
    shutil.rmtree(folder.path)
    other = WeightFolder(str(tmp_path / "other"), {})
    other.map_file(0, 10)  # This releases the files of the removed folder, whose memory may be used again.
    assert released == ([] if error else pointers) and len(other.mapped) == 1
    folder.close()
    assert len(other.mapped) == 1
    other.close()
    assert not other.mapped and len(released) == (0 if error else 3)


def test_a_run_that_was_killed_finds_its_folder_gone_and_another_run_has_another_one(tmp_path):
    path = rollout.folder_for(tmp_path / "rollout_logs", 100)
    WeightFolder(path, {"config.json": b"{}"}).write(3, b"of before")
    assert rollout.folder_for(tmp_path / "rollout_logs", 100) == path
    WeightFolder(path, {}).close()
    others = {rollout.folder_for(tmp_path / "other", 100), rollout.folder_for(tmp_path / "rollout_logs", 101)}
    assert len(others | {path}) == 3


@pytest.mark.parametrize("before, after", [(0, 1000), (1000, 0), (0, 0), (1000, 1000)])
def test_weights_of_a_killed_run_are_removed_although_there_is_more_or_less_room(
    tmp_path, monkeypatch, capsys, before, after
):
    monkeypatch.setattr(tempfile, "gettempdir", lambda: str(tmp_path))
    paths = []
    for free in (before, after):
        monkeypatch.setattr(shutil, "disk_usage", lambda path: SimpleNamespace(free=free))
        paths.append(Path(rollout.folder_for(tmp_path / "rollout_logs", 100)))
        assert not any(path.exists() for path in paths)
        paths[-1].mkdir()
        assert (paths[-1].parent == tmp_path) == (capsys.readouterr().out != "") == (free == 0)
    paths[-1].rmdir()


def test_a_folder_that_another_user_has_made_first_is_not_used(tmp_path, monkeypatch):
    """The folder's name is predictable, and everyone can write to /dev/shm."""
    (tmp_path / "theirs").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "theirs")
    with pytest.raises(PermissionError, match="not a folder that this user owns"):
        WeightFolder(str(tmp_path / "link"), {"config.json": b"{}"})
    monkeypatch.setattr(weight_sync.os, "getuid", lambda: 12345)
    with pytest.raises(PermissionError, match="not a folder that this user owns"):
        WeightFolder(str(tmp_path / "theirs"), {"config.json": b"{}"})
    assert not list((tmp_path / "theirs").iterdir())


@pytest.mark.parametrize(
    "config, device, problem",
    [
        (MixtralConfig(num_local_experts=4), "cpu", "mixture of experts; pass --rollout hf"),
        (Qwen3MoeConfig(num_experts=4), "cpu", "mixture of experts; pass --rollout hf"),
        (GraniteMoeConfig(num_hidden_layers=1), "cpu", "mixture of experts; pass --rollout hf"),
        (MixtralConfig(num_local_experts=4), "cuda", ""),
        (LlamaConfig(), "cpu", ""),
        # The configuration counts eight experts in both cases.
        (NemotronHConfig(layers_block_type=["mamba", "attention", "mlp"]), "cpu", ""),
        (NemotronHConfig(layers_block_type=["mamba", "moe"]), "cpu", "mixture of experts; pass --rollout hf"),
        (Gemma2Config(), "cpu", ""),
        (Gemma2Config(tie_word_embeddings=False), "cpu", "not support a separate head; pass --rollout hf"),
    ],
)
def test_what_vllm_cannot_serve_is_rejected_with_a_remedy(config, device, problem):
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    about = Policy.model_info(SimpleNamespace(model=model, has_adapters=False))
    if problem:
        with pytest.raises(ValueError, match=problem):
            rollout.check_servable(about, device)
    else:
        rollout.check_servable(about, device)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_checksums_add_up_and_do_not_fit_other_words(dtype):
    """The bits of 1.0 are 3f80 in bfloat16, and 3f80 0000 in float32. Five times 3f80 is 1_3d80."""
    ones = torch.ones(1, 5, dtype=dtype)
    assert weight_sums([("w", ones)]) == {f"w ({dtype})": [5, 5, 0x3D80]}
    assert weight_sums([("empty", ones[:0]), ("scale", ones.byte())]) == {}


def worker(**weights):
    """Return what the worker of a server returns that holds these weights."""
    model = torch.nn.ParameterDict(weights)
    held = WorkerExtension()
    held.get_model = lambda: model
    return json.loads(json.dumps(held.weight_sums()))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_server_with_another_weight_is_noticed_however_its_workers_share_the_weights(dtype):
    sent, zeros = {}, torch.zeros(58, 8, dtype=dtype)  # vLLM pads 6 rows to 64.
    whole = {name: torch.randn(6, 8).to(dtype) for name in ("head", "down", "norm", "q_proj", "other_dtype")}
    whole["down"] = whole["down"].T
    whole["merged_zeros"] = torch.zeros(6, 8, dtype=dtype)  # A sum of 0 is not that of nothing.
    for name, tensor in summed(whole.items(), sent):
        assert tensor is whole[name]
    copies = {"norm": whole["norm"], "other_dtype": whole["other_dtype"].half()}
    head, down = whole["head"], whole["down"]
    padded = torch.cat([head[4:], zeros])
    one = [worker(**copies, head=torch.cat([head, zeros]), down=down, qkv_proj=head)]
    two = [worker(**copies, head=head[:4], down=down[:, :1]), worker(**copies, head=padded, down=down[:, 1:])]
    kept = {f"{name} ({dtype})" for name in ("head", "down", "norm")}
    assert compare("s", sent, one) == compare("s", sent, two) == kept
    overlapping = [worker(head=head.repeat(10, 1)), worker(head=head.repeat(2, 1))]
    assert compare("s", sent, overlapping) == compare("s", sent, []) == set()
    with pytest.raises(RuntimeError, match="s: .* 3 of 3 .*; resume the run"):
        compare("s", sent, [], kept)  # After a sync, the server must still return them.
    for name, index in {"head": (5, 7), "down": (0, 0), "norm": (2, 2)}.items():
        before = whole[name][index].clone()
        whole[name][index] = torch.nextafter(
            before, torch.tensor(9, dtype=dtype)
        )  # only the last bit differs
        now = {}
        list(summed(whole.items(), now))
        whole[name][index] = before
        for held in (one, two):
            with pytest.raises(RuntimeError, match=rf"s: .* 1 of 3 .* {name} \({dtype}\); resume the run"):
                compare("s", now, held, kept)
            # At the start, this would be a weight that vLLM does not keep as it is sent.
            assert compare("s", now, held) == kept - {f"{name} ({dtype})"}


@pytest.mark.parametrize("kind, has_head", [(Gemma2ForCausalLM, False), (LlamaForCausalLM, True)])
def test_a_model_without_a_head_in_vllm_is_sent_none(kind, has_head):
    sizes = dict(hidden_size=8, num_hidden_layers=1, num_attention_heads=1, num_key_value_heads=1, head_dim=8)
    config = kind.config_class(vocab_size=64, intermediate_size=8, tie_word_embeddings=True, **sizes)
    policy = policy_of(kind(config))
    names = [name for name, _ in rollout.served_weights(policy, torch.float32)]
    assert ("lm_head.weight" in names) == has_head and "model.embed_tokens.weight" in names
    about = policy.model_info()
    files = rollout.model_files(about, SimpleNamespace(save_pretrained=lambda folder: None))
    assert json.loads(files["config.json"])["tie_word_embeddings"] == (not has_head)


EXPERTS = GROUPED | dict(num_hidden_layers=2, tie_word_embeddings=False)
EXPERTS |= dict(moe_intermediate_size=8, num_experts_per_tok=2)
KEPT = {
    "glm4_moe": EXPERTS | dict(n_routed_experts=8, n_group=1, topk_group=1, first_k_dense_replace=1),
    "ernie4_5_moe": EXPERTS
    | dict(moe_num_experts=8, moe_k=2, moe_layer_start_index=1, moe_layer_end_index=1, use_bias=False),
    "afmoe": EXPERTS | dict(num_experts=8, num_dense_layers=1, num_shared_experts=1),
    "qwen3_5_text": FAMILIES["qwen3_5_text"],
}


@pytest.mark.parametrize("name", KEPT)
def test_the_biases_that_route_tokens_to_experts_are_not_rounded(tmp_path, monkeypatch, tokenizer, name):
    """The trainer and vLLM keep these biases and A_log of linear attention in float32, and so does the merged
    model of a LoRA run. A bf16 tensor of odd size before them changes nothing.
    """
    a_model, kept = of_family(name, **KEPT[name]), []
    for key, tensor in a_model.state_dict().items():
        if key.endswith(("e_score_correction_bias", "expert_bias", "A_log")):
            kept.append(tensor.copy_(3 + torch.arange(tensor.numel()).view_as(tensor) / 1000))
    base = write_model(tmp_path / "base", a_model, tokenizer)
    about = json.loads(Path(base, "config.json").read_text())
    Path(base, "config.json").write_text(json.dumps(about | {"dtype": "bfloat16"}))
    monkeypatch.setattr(WeightFolder, "mapped", {})
    odd = torch.ones(3)
    for lora in ({}, dict(lora_rank=4, lora_targets=("v_proj",))):
        policy = Policy(config_of(model=base, **lora), base, CPU)
        folder = WeightFolder(str(tmp_path / "folder"), {})
        list(packs(chain([("odd", odd.bfloat16())], rollout.served_weights(policy, torch.bfloat16)), folder))
        served = load_file(folder.path / "model.safetensors")
        stored = dict(policy.weights()) | {"odd": odd}
        assert served.keys() == stored.keys()
        for key, tensor in served.items():
            is_kept = key.endswith(("e_score_correction_bias", "expert_bias", "A_log"))
            dtype = torch.float32 if is_kept else torch.bfloat16
            assert tensor.dtype == dtype and torch.equal(tensor, stored[key].to(dtype)), key
        assert [tensor.dtype for tensor in served.values()].count(torch.float32) == len(kept) > 0
        folder.close()
    policy.save(tmp_path / "saved")
    tokenizer.save_pretrained(tmp_path / "saved")
    merge_lora.merge(tmp_path / "saved", tmp_path / "merged")
    merged = load_file(tmp_path / "merged/model.safetensors")
    assert merged.keys() == served.keys() - {"odd"}
    for key, tensor in merged.items():
        assert tensor.dtype == served[key].dtype and torch.equal(tensor, served[key]), key
    assert AutoConfig.from_pretrained(tmp_path / "merged").dtype == torch.bfloat16
    set_dtypes(policy.model, 4, "cuda")  # On a GPU, frozen layers are bf16.
    for key, tensor in policy.weights(torch.bfloat16):
        assert tensor.dtype == served[key].dtype and torch.equal(tensor, served[key]), key


class Told:
    """A stand-in for an actor's handle with what to_all needs. It counts running calls."""

    waves = []

    @property
    def add(self):
        return self

    def remote(self, number, pack):
        self.waves[-1] += 1
        return ray.put(number)


def test_who_has_a_pack_hands_it_on(monkeypatch):
    ended = []

    def get(call):
        if Told.waves[-1]:
            ended.append(Told.waves[-1])
            Told.waves.append(0)

    monkeypatch.setattr(ray, "put", lambda number: number)
    monkeypatch.setattr(ray, "get", get)
    Told.waves = [0]
    to_all({node: Told() for node in range(12)}, "add", 0, b"")
    assert ended == [1, 2, 4, 5]  # rank 0's node has it from the start


def test_parts_that_a_process_lost_by_dying_are_an_error(tmp_path):
    """Ray restarts the process, and sends it only the parts that it had not yet taken."""
    parts = [bytes([number]) * 3 for number in range(3)]
    folder = WeightFolder(str(tmp_path / "folder"), {})
    for number, part in enumerate(parts):
        folder.add(number, part)
        if number == 1:
            folder = WeightFolder(str(tmp_path / "folder"), {})
    with pytest.raises(RuntimeError, match="folder died during a sync, so weights are missing there; resume"):
        folder.finish(3)
    for _ in range(2):  # The next sync starts again.
        for number, part in enumerate(parts):
            folder.add(number, part)
        folder.finish(3)
    assert [folder.file_of(number).read_bytes() for number in range(3)] == parts


@pytest.mark.slow
def test_weights_reach_all_nodes_but_those_that_are_gone(tmp_path, small_ray):
    cluster = Cluster(initialize_head=True, head_node_args=dict(num_cpus=1, include_dashboard=False))
    others = [cluster.add_node(num_cpus=1) for _ in range(3)]
    ray.init(cluster.address, logging_level="error", log_to_driver=False)
    try:
        nodes = [node.node_id for node in (*others, cluster.head_node)]
        here = str(tmp_path / nodes[-1])  # The sender is on the head node.
        folders = {}
        for node in nodes:
            there = NodeAffinitySchedulingStrategy(node, soft=False)
            kind = ray.remote(WeightFolder).options(
                num_cpus=0, max_restarts=-1, max_task_retries=-1, scheduling_strategy=there
            )
            folders[node] = kind.remote(str(tmp_path / node), {})
        sent = tensors(torch.float32)
        assert send(sent.items(), folders, here) == set()
        cluster.remove_node(others[0])
        sent = {name: tensor + 1 for name, tensor in sent.items()}
        assert send(sent.items(), folders, here) == {nodes[0]}
        for node in nodes[1:]:
            found = load_file(tmp_path / node / "model.safetensors")
            assert all(torch.equal(found[name], tensor) for name, tensor in sent.items())
        # A folder that cannot be made is an error, although its node exists.
        broken = {nodes[-1]: kind.remote(here + "/model.safetensors", {})}
        with pytest.raises(RuntimeError, match="^FileExistsError: .*model.safetensors"):
            to_all(broken, "finish", 0)
    finally:
        ray.shutdown()
        cluster.shutdown()
