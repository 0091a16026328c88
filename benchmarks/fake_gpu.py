"""Simulate an update on GPUs that this machine lacks: devices, number formats and peak memory.

    python benchmarks/fake_gpu.py                           # each recipe's policy next to tools/plan_run.py
    python benchmarks/fake_gpu.py --recipes fapo_7b --layers 4      # quicker: each layer takes seconds

The tensors are fake (torch's FakeTensorMode): each has a device, a type and a size, but no numbers. The
script counts the bytes of all live tensors. It runs the trainer's code, with the ranks' code (FSDP2) on a
fake process group and the GPU's flash attention. An operation that mixes incompatible devices or types fails
as on a GPU. Not covered: memory within GPU kernels, fragmentation, and the memory of libraries (about 1 GB).
The script needs g++ for fake_gpu.cpp.
"""

import dataclasses
import json
import math
import os
import subprocess
import sys
import tempfile
import weakref
from pathlib import Path

import torch
import torch.distributed as dist
import tyro
from torch._subclasses import fake_tensor
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from transformers import AutoConfig, AutoModelForCausalLM, Qwen2Config, Qwen3Config, masking_utils

sys.path[:0] = [str(Path(__file__).parent.parent)]
import grpo_trainer
import causal_lm
import policy
import speedups
from cluster import ranks

HERE = Path(__file__).parent
SHAPES = {  # hidden, intermediate, layers, heads, key-value heads, vocabulary, tied
    "Qwen/Qwen2.5-Math-1.5B": (1536, 8960, 28, 12, 2, 151936, True),
    "Qwen/Qwen2.5-Math-7B": (3584, 18944, 28, 28, 4, 152064, False),
    "Qwen/Qwen2.5-32B": (5120, 27648, 64, 40, 8, 152064, False),
    "Qwen/Qwen3-4B-Instruct-2507": (2560, 9728, 36, 32, 8, 151936, True),
    "tiny": (64, 128, 2, 4, 2, 512, True),
}
RECIPES = ("fapo_1.5b_24gb", "fapo_7b_one_gpu", "genrm_4b", "fapo_7b", "fapo_32b")


@dataclasses.dataclass
class Config:
    """Which policies to simulate."""

    recipes: tuple[str, ...] = RECIPES  # Names of files in recipes/.
    layers: int = 0  # Number of layers of each model, to save time. 0: as in the real model.
    # JSON list of lists of trainer flags to simulate instead of recipes. The results are printed as JSON.
    cases: str = ""


# ---- a simulated GPU


class Anything:
    """A stand-in for a stream, an event or the properties of a device."""

    major, minor, total_memory, multi_processor_count, name = 9, 0, 80 * 2**30, 132, "none"

    def __init__(self, *args, **kwargs):
        pass

    def __enter__(self):
        return self

    def __exit__(self, *args):
        pass

    def __getattr__(self, name):
        return lambda *args, **kwargs: None


def believe() -> None:
    """Make torch behave like a build for GPUs."""
    torch._C._ensureCUDADeviceGuardSet()
    fake_tensor.init_gpu_context = lambda *args: None
    masking_utils.is_tracing = lambda *args: False  # avoids masks that are not needed on a GPU
    torch.cuda.amp.common.amp_definitely_not_available = lambda: False
    answers = dict(device_count=1, current_device=0, is_initialized=True, is_bf16_supported=True)
    answers |= dict(get_device_capability=(9, 0), get_device_properties=Anything, stream=Anything())
    answers |= dict(current_stream=Anything(), set_device=None, empty_cache=None, synchronize=None)
    answers["set_per_process_memory_fraction"] = None
    for name, value in answers.items():
        setattr(torch.cuda, name, lambda *args, value=value, **kwargs: value)
    torch.cuda.Stream = torch.cuda.Event = torch.Stream = torch.Event = Anything
    torch.nn.Module._apply = replace_all
    torch.nn.functional.scaled_dot_product_attention = attention
    AutoModelForCausalLM.from_pretrained = from_config


def replace_all(model, change, recurse=True):
    """Replace Module._apply: fake parameters cannot change in place, so tied ones are kept together here."""
    changed = {}

    def of(tensor):
        if tensor is None:
            return None
        if tensor not in changed:
            new = change(tensor)
            if isinstance(tensor, torch.nn.Parameter) and new is not tensor:
                new = torch.nn.Parameter(new.detach(), tensor.requires_grad)
            changed[tensor] = new
        return changed[tensor]

    for module in model.modules():
        for held in (module._parameters, module._buffers):
            for name, tensor in held.items():
                held[name] = of(tensor)
    return model


def attention(q, k, v, attn_mask=None, dropout_p=0.0, is_causal=False, scale=None, enable_gqa=False):
    """Compute attention as on a GPU with autocast: in bf16, with a kernel that never holds all scores."""
    q, k, v = q.bfloat16(), k.bfloat16(), v.bfloat16()
    flash = torch.ops.aten._scaled_dot_product_flash_attention
    return flash(q, k, v, dropout_p, is_causal, scale=scale)[0]


def from_config(source, dtype, trust_remote_code=False, max_position_embeddings=0):
    """Return a model without weights. For ranks it is on the GPU, as FSDP moves parameters in place."""
    shape = AutoConfig.from_pretrained(source)
    is_split = dtype == "auto"
    with torch.device("cuda:0" if is_split else "cpu"):
        return AutoModelForCausalLM.from_config(shape, dtype=torch.bfloat16 if is_split else dtype)


class Memory(TorchDispatchMode):
    """Counts the bytes of live storages per device, and answers operations that depend on numbers."""

    def __init__(self):
        super().__init__()
        self.now = {}
        self.peak = {}
        self.sizes = weakref.WeakKeyDictionary()  # storage -> [device, bytes]
        self.true = 0  # entries of the masks of this pass: the tokens of its responses

    def count(self, device: str, size: int) -> None:
        self.now[device] = self.now.get(device, 0) + size
        self.peak[device] = max(self.now[device], self.peak.get(device, 0))

    def see(self, tensor) -> None:
        if not isinstance(tensor, fake_tensor.FakeTensor):
            return
        storage = tensor.untyped_storage()
        if storage not in self.sizes:
            entry = self.sizes[storage] = [tensor.device.type, 0]
            weakref.finalize(storage, lambda: self.count(entry[0], -entry[1]))
        self.resized(storage)

    def resized(self, storage) -> None:
        """Count a changed size: FSDP frees gathered parameters by resizing them to 0."""
        if storage in self.sizes:
            entry = self.sizes[storage]
            self.count(entry[0], storage.nbytes() - entry[1])
            entry[1] = storage.nbytes()

    def __torch_dispatch__(self, function, types, arguments=(), options=None):
        if any("DTensor" in kind.__name__ for kind in types):
            return NotImplemented  # The operations on its local tensors arrive separately.
        out = self.answer(function, arguments, options or {})
        for tensor in tree_leaves(out):
            self.see(tensor)
        return out

    def answer(self, function, arguments, options):
        aten = torch.ops.aten
        if function is aten._local_scalar_dense.default:
            return 0.01 if arguments[0].dtype.is_floating_point else 1
        if function in (aten.is_nonzero.default, aten.equal.default, aten.is_pinned.default):
            return True
        if function is aten._pin_memory.default:
            return arguments[0]
        if function is aten.index.Tensor and arguments[1][0].dtype is torch.bool:
            tensor, (mask,) = arguments
            return tensor.new_empty((self.true, *tensor.shape[mask.dim() :]))
        if function in (aten._unsafe_index_put.default, aten.index_put.default):
            return arguments[0].clone()
        return function(*arguments, **options)


# ---- an update on the simulated GPU


def folder_of(model: str, fewer: int = 0) -> str:
    """Return a directory with only this model's configuration. `fewer` replaces its number of layers."""
    hidden, intermediate, layers, heads, kv_heads, vocabulary, tied = SHAPES[model]
    kind = Qwen3Config if "Qwen3" in model else Qwen2Config
    shape = kind(
        hidden_size=hidden,
        intermediate_size=intermediate,
        num_hidden_layers=fewer or layers,
        num_attention_heads=heads,
        num_key_value_heads=kv_heads,
        vocab_size=vocabulary,
        tie_word_embeddings=tied,
        max_position_embeddings=32768,
        eos_token_id=1,
    )
    folder = tempfile.mkdtemp()
    shape.architectures = [f"{kind.__name__.removesuffix('Config')}ForCausalLM"]
    shape.save_pretrained(folder)
    return folder


def samples_of(config) -> list[list[policy.Sample]]:
    """Return two groups of two full micro-batches each; in the second micro-batch gradients already exist."""
    longest = config.max_prompt_length + config.max_response_length
    tokens = max(config.max_tokens_per_micro_batch or policy.TOKENS_PER_PASS["cuda"], longest)
    count = -(-tokens // longest)
    length = tokens // count
    prompt = min(config.max_prompt_length, length // 4)
    groups = []
    for _ in range(2):
        group = []
        for _ in range(2 * count * config.policy_ranks):
            ids = [7] * (length - prompt)
            group.append(policy.Sample({}, [5] * prompt, ids, [-1.0] * len(ids), advantage=0.3))
        groups.append(group)
    return groups


def kind_of_policy(config):
    """Return a function that makes a Policy, or one rank with simulated responses of the other ranks."""
    device = torch.device("cuda:0")
    if config.policy_ranks == 1 and not config.policy_offload:
        return lambda: policy.Policy(config, config.model, device)
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=config.policy_ranks)
    mesh = ranks.init_device_mesh("cuda", (config.policy_ranks,))
    ranks.Ranks.join = lambda self, device: setattr(self, "mesh", mesh)
    ranks.Ranks.max = lambda self, number: number
    ranks.Ranks.sum = lambda self, sums: sums
    one = ranks.Ranks(0, config.policy_ranks)
    return lambda: ranks.RankedPolicy(config, config.model, device, one)


def run_case(flags: list[str]) -> dict:
    """Run an update; return the bytes between updates and at the peak, and the tensors' devices and types."""
    config = tyro.cli(grpo_trainer.Config, args=flags)
    config = dataclasses.replace(config, device="cuda", mini_batch_size=1, rollout="vllm")
    mode = fake_tensor.FakeTensorMode(allow_non_fake_inputs=True)
    memory = Memory()
    real_resize = torch.UntypedStorage.resize_

    def resize(storage, size):
        real_resize(storage, size)
        memory.resized(storage)
        return storage

    real_mask_of = causal_lm.mask_of
    real_states = speedups.shared_states

    def shared_states(model, body, sequences, counts, *rest):  # Each pass calls this first.
        memory.true = sum(counts)
        return real_states(model, body, sequences, counts, *rest)

    def mask_of(lengths, device):
        memory.true = sum(lengths)
        return real_mask_of(lengths, device)

    torch.UntypedStorage.resize_ = resize
    causal_lm.mask_of = mask_of
    speedups.shared_states = shared_states
    make = kind_of_policy(config)
    with mode, memory:
        learner = make()
        groups = samples_of(config)
        batches = policy.mini_batches(groups, config)
        for batch in batches:
            batch.samples = batch.samples[:: config.policy_ranks]
        learner.update_mini_batches(batches, 1e-6, math.inf)  # creates Adam's moments
        held = dict(memory.now)
        memory.peak = dict(memory.now)
        learner.update_mini_batches(batches, 1e-6, math.inf)
        peak = dict(memory.peak)
        kinds = set()
        for parameter in learner.model.parameters():
            kinds.add(f"weights {parameter.dtype} {parameter.device.type}")
            if parameter.grad is not None:
                kinds.add(f"gradients {parameter.grad.dtype} {parameter.grad.device.type}")
        for state in learner.optimizer.state.values():
            for name, tensor in state.items():
                kinds.add(f"{name} {tensor.dtype} {tensor.device.type}")
        for _, tensor in learner.weights(torch.bfloat16):
            kinds.add(f"sent {tensor.dtype} {tensor.device.type}")
    torch.UntypedStorage.resize_ = real_resize
    causal_lm.mask_of = real_mask_of
    speedups.shared_states = real_states
    if dist.is_initialized():
        dist.destroy_process_group()
    return {"held": held, "peak": peak, "kinds": sorted(kinds)}


# ---- in a separate process


def in_child(cases: list[list[str]]) -> list[dict]:
    """Call run_case for each case in a process with a simulated GPU. Raises RuntimeError if it fails."""
    with tempfile.TemporaryDirectory() as folder:
        library = build_guard(folder)
        libraries = str(Path(torch.__file__).parent / "lib")
        env = os.environ | {"LD_PRELOAD": library, "LD_LIBRARY_PATH": libraries}
        command = [sys.executable, __file__, "--cases", json.dumps(cases)]
        ended = subprocess.run(command, env=env, capture_output=True, text=True)
    if ended.returncode:
        raise RuntimeError(f"{ended.stdout}{ended.stderr[-9000:]}")
    return json.loads(ended.stdout.splitlines()[-1])


def build_guard(folder: str) -> str:
    """Compile fake_gpu.cpp, which takes seconds."""
    home = Path(torch.__file__).parent
    library = f"{folder}/fake_gpu.so"
    command = f"g++ -shared -fPIC -std=c++20 -I{home}/include {HERE}/fake_gpu.cpp -o {library} -L{home}/lib"
    subprocess.run([*command.split(), "-lc10", "-ltorch_cpu"], check=True)
    return library


def flags_of(recipe: str, layers: int = 0) -> list[str]:
    """Return the trainer's flags in a recipe, which runs with a shell function in place of python."""
    script = f'python() {{ shift; printf "%s\\0" "$@"; }}; source {HERE.parent}/recipes/{recipe}.sh'
    env = os.environ | {"JUDGE_MODEL": "a/judge", "DATA": "data", "OUT": "outputs"}
    said = subprocess.run(["bash", "-c", script], env=env, capture_output=True, text=True, check=True).stdout
    flags = said.split("\0")[:-1]
    place = flags.index("--model") + 1
    flags[place] = folder_of(flags[place], layers)
    return flags


def main() -> None:
    asked = tyro.cli(Config, description=__doc__)
    if asked.cases:
        believe()
        print(json.dumps([run_case(flags) for flags in json.loads(asked.cases)]))
        return
    from tools import plan_run

    print("| recipe | ranks | peak GB, simulated | plan_run | planned / simulated |")
    print("| --- | ---: | ---: | ---: | ---: |")
    for recipe in asked.recipes:
        flags = flags_of(recipe, asked.layers)
        config = tyro.cli(grpo_trainer.Config, args=flags)
        config = dataclasses.replace(config, device="cuda", rollout="vllm")
        estimate = plan_run.estimate_memory(config, "cuda")
        planned = sum(gb for name, gb in estimate.items() if "host" not in name)
        found = 1e-9 * in_child([flags])[0]["peak"]["cuda"]
        ratio = planned / found
        print(f"| {recipe} | {config.policy_ranks} | {found:.1f} | {planned:.1f} | {ratio:.2f} |", flush=True)


if __name__ == "__main__":
    main()
