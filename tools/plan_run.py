"""Estimate what a run needs before it starts: the memory of its processes, and where Ray places them.

    python -m tools.plan_run --model PATH ...                          # with the trainer's flags
    python -m tools.plan_run --model PATH ... --gpus 1 --gpu-gb 24     # for a GPU of another machine
    python -m tools.plan_run --model PATH ... --gpus 4 4               # for two nodes with four GPUs each

This script checks settings and prompts as the trainer does, then estimates memory from each model's
config.json. It does not check the weights, whether the adapters fit the model, or whether the rows have what
the reward function needs; the trainer's --dry-run checks all three. On GPUs, it also reserves the resources
of the run in Ray, prints the processes of each node, and releases the resources; if you pass --gpus, it
computes the placement without Ray. For each vLLM server, it prints how many tokens fit into the key-value
cache. Not covered: vLLM servers on a CPU.
"""

import dataclasses
import math
import os
import re
import sys
from collections import defaultdict
from dataclasses import dataclass
from itertools import chain
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
import settings
from command_line import one_line_errors, parse_command_line


@dataclass
class Config(settings.Config):
    """The run to plan (the trainer's options) and its GPUs."""

    # Number of GPUs of each planned node, such as 4 4 for two nodes. Default: the GPUs of the Ray cluster.
    gpus: tuple[int, ...] = ()
    gpu_gb: float = 0.0  # Memory of each GPU, in GB. 0: the memory of the cluster's GPUs, or 80 if unknown.

    def server_configs(self, sleep_mode: bool = False) -> dict:
        configs = super().server_configs(sleep_mode)
        if self.gpus:  # Plan for these GPUs even if this machine has none.
            configs = {name: dataclasses.replace(one, device="cuda") for name, one in configs.items()}
        return configs


# Parse the command line before the imports of torch and transformers, which take four seconds.
if __name__ == "__main__":
    CONFIG = parse_command_line(Config, description=__doc__)

import ray
import torch
from transformers import AutoModelForCausalLM

import reward_loop
from causal_lm import LOGITS_AT_ONCE, add_adapters, layers_of, read_config, set_dtypes
from cluster.placement import ProcessSpec, Reservation, layout, process_specs
from genrm_server import count_gpus
from policy import TOKENS_PER_PASS
from run import Run

VLLM_SHARE = 0.92  # fraction of a GPU's memory that a vLLM server uses by default
SHARED = 0.97  # largest sum of the shares of a GPU (docs/training.md)
VLLM_GB = 1.0  # approximate memory of a server's CUDA context and graphs
# vLLM's default --max-num-seqs on GPUs of at least 70 GiB (but 256 on an A100), and on smaller ones.
VLLM_SEQUENCES = 1024, 256
IN_HOST = "in host memory, for each rank"  # with --policy-offload
ON_NODE = "in host memory, once"
SAMPLER_COPIES = 6  # copies of the float32 logits while vLLM sorts them for top-p


def shape_of(config):
    return read_config(config.model, config.trust_remote_code)


@dataclass
class Sizes:
    """Sizes in units of 4 bytes, or NaN if the model cannot be built without its weights."""

    weights: float = math.nan
    trained: float = math.nan
    largest_layer: float = math.nan
    rest: float = math.nan  # what is not in a layer
    in_bf16: float = math.nan  # all weights in bf16
    pinned: float = math.nan  # a rank's shards in page-locked memory
    pinned_gradients: float = math.nan


def sizes_of(config, device: str = "cpu") -> Sizes:
    """Return the sizes of the configuration's model."""
    try:
        with torch.device("meta"):
            model = AutoModelForCausalLM.from_config(
                shape_of(config), trust_remote_code=config.trust_remote_code
            )
            if config.lora_rank:
                add_adapters(model, config, "")
            set_dtypes(model, config.lora_rank, device)
        layers = [sum_of_sizes(layer) for layer in layers_of(model, "")]
        total = sum_of_sizes(model)
    except Exception:  # Code of a model may raise any exception.
        return Sizes()
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    return Sizes(
        weights=total,
        trained=model.num_parameters(only_trainable=True),
        largest_layer=max(layers),
        rest=total - sum(layers),
        in_bf16=model.num_parameters() / 2,
        pinned=pinned_size(model.parameters(), config.policy_ranks),
        pinned_gradients=pinned_size(trained, config.policy_ranks),
    )


def sum_of_sizes(module) -> float:
    return sum(parameter.nbytes / 4 for parameter in module.parameters())


def pinned_size(parameters, ranks: int) -> float:
    """Return the size of a rank's shards in page-locked memory. torch rounds each up to a power of two."""
    return sum(2 ** math.ceil(math.log2(parameter.nbytes / ranks)) / 4 for parameter in parameters)


def cache_of(text, gpus: int = 1) -> int:
    """Return the number of values in the key-value cache of one token. Each GPU has at least one key head."""
    heads = getattr(text, "num_key_value_heads", None) or text.num_attention_heads
    return 2 * text.num_hidden_layers * max(heads, gpus) * head_size(text)


def head_size(text) -> int:
    return getattr(text, "head_dim", None) or text.hidden_size // text.num_attention_heads


def activations_of(config, text, tokens: int, device: str) -> int:
    """Return the number of activations that the backward pass of a micro-batch needs.

    The formulas for GPUs agree with counts on fake tensors (benchmarks/README.md).
    """
    layers = text.num_hidden_layers
    hidden = text.hidden_size
    intermediate = getattr(text, "intermediate_size", 4 * hidden)
    layer = tokens * (10 * hidden + 4 * intermediate)
    copies = 6  # number of copies of the logits that exist at the same time
    if device == "cuda":
        layer = tokens * (6.5 * hidden + 1.75 * intermediate)  # bfloat16; norms and residuals are float32
        copies = 3
        if config.entropy_coef:
            copies = 5
    logits = copies * min(LOGITS_AT_ONCE[device], tokens * text.vocab_size) + 4 * tokens * hidden
    if config.gradient_checkpointing:  # one layer at a time, after the logits are freed
        if device == "cuda":
            queries = text.num_attention_heads * head_size(text)
            layer = tokens * (6 * hidden + 4 * queries + 3.5 * intermediate)  # with the layer's gradients
        return tokens * hidden * layers + max(layer, logits)
    return layer * layers + logits


def estimate_memory(config, device: str, num_validation: int = 0) -> dict[str, float | None]:
    """Return the approximate memory in GB by purpose, on the device of the policy or of each rank.

    `num_validation` is the number of samples of an evaluation. None means unknown. Entries named
    "update: ..." and "rollout: ..." do not exist at the same time.
    """
    text = shape_of(config).get_text_config()
    sizes = sizes_of(config, device)
    longest = config.max_prompt_length + config.max_response_length
    tokens = max(config.max_tokens_per_micro_batch or TOKENS_PER_PASS[device], longest)
    samples = max(config.train_batch_size * config.group_size, num_validation)
    sequences = min(config.rollout_batch_size, samples)
    try:
        activations = activations_of(config, text, tokens, device)
        cache = cache_of(text) * longest * sequences
    except Exception:  # The configuration may use other names, or one number per layer.
        activations = math.nan
        cache = math.nan
    where = ""
    shards = sizes.weights / config.policy_ranks
    gradients = sizes.trained / config.policy_ranks
    numbers = {}
    if config.policy_offload and device == "cuda":
        where = f"{IN_HOST}: "
        shards = sizes.pinned
        gradients = sizes.pinned_gradients
        numbers[f"{ON_NODE}: weights while the first rank writes a checkpoint"] = sizes.trained
        numbers[f"{ON_NODE}: weights for the policy's servers"] = sizes.in_bf16
        if not config.lora_rank:
            models = 2 if config.kl_coef else 1
            numbers[f"{where}buffers of the loaded weights (bf16)"] = models * sizes.pinned / 2
    numbers |= {
        f"{where}weights": shards,
        f"{where}gradients": gradients,
        f"{where}Adam": 2 * sizes.trained / config.policy_ranks,
    }
    if config.kl_coef and not config.lora_rank:
        numbers[f"{where}reference model"] = shards
    numbers["update: activations of a micro-batch"] = activations
    if config.bf16_head:
        numbers["update: head in bf16"] = text.vocab_size * text.hidden_size / 2
    if config.rollout == "hf":
        numbers["rollout: key-value cache"] = cache
    if config.policy_ranks > 1 or config.policy_offload:
        # Embedding, head, the head's gradient, a layer in float32, its gradient, and layers in bfloat16.
        gathered = sizes.rest + 2.25 * sizes.largest_layer
        if not config.lora_rank:
            gathered += text.vocab_size * text.hidden_size
        numbers["update: gathered weights"] = gathered
    elif device == "cuda" and not (config.gradient_checkpointing or config.lora_rank):
        numbers["update: weights in bf16"] = sizes.weights / 2  # casts that the backward pass needs
    gigabytes = {}
    for name, number in numbers.items():
        gigabytes[name] = None if math.isnan(number) else 4e-9 * number  # float32
    return gigabytes


def report(config, num_rows: int, num_validation: int = 0) -> str:
    """Return the plan for a resolved configuration and this many training rows and validation samples."""
    prompts = config.total_steps * config.train_batch_size
    epochs = f"{prompts / num_rows:.1f} epochs of {num_rows} rows"
    lines = [f"{config.total_steps} steps need {prompts} prompts: {epochs}"]
    memory = 1e-9 * os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    ranks = 1  # of a node
    specs = process_specs(config)
    on_gpus = any(spec.gpus for spec in specs.values())  # A policy on the CPU may have a judge on a GPU.
    nodes = {}
    if on_gpus or config.policy_ranks > 1:
        nodes = placement(config, specs)
        ranks = max([name for name, _ in chain(*bundles)].count("rank") for bundles in nodes.values())
    estimate = estimate_memory(config, config.device, num_validation)
    kept = 0.0  # fraction of a GPU that a rank uses while the judges are awake
    if on_gpus:
        gpu = gpu_memory(config)
        if config.reward_mode == "colocate":
            kept = sum(estimate.get(name) or 0.0 for name in ("weights", "Adam", "reference model")) / gpu
    lines += placement_lines(nodes, specs, kept)
    for name, server in servers_of(config).items():
        if name in specs and specs[name].gpus:
            lines.append(server_memory(config, name, server, gpu))
    device = config.device
    available = memory / ranks
    if device == "cuda":
        available = gpu * config.policy_gpu_share
        device = "the GPU of rank 0"
    if config.policy_ranks > 1:
        device = f"each of {config.policy_ranks} ranks, {config.device}"
    totals = defaultdict(float)  # "" is memory that is needed all the time
    for name, gb in estimate.items():
        if gb is None:
            lines.append(f"  unknown     {name}")
            continue
        lines.append(f"{gb:9.2f} GB  {name}")
        totals[name.rpartition(": ")[0]] += gb
    in_host = ranks * totals[IN_HOST] + totals[ON_NODE]
    if in_host:
        fits = "it fits"
        if in_host > memory:
            fits = "too little memory; use larger or more nodes"
        where = f"in host memory of a node with {ranks} of the ranks"
        lines.append(f"{in_host:9.2f} GB  {where}, of {memory:.1f} GB on this machine: {fits}")
    peak = totals[""] + max(totals["update"], totals["rollout"])
    if peak <= available:
        fits = "it fits"
    elif totals[""] > available and not config.lora_rank:
        fits = "too little memory for all weights; train adapters (--lora-rank 32) or raise --policy-ranks"
    else:
        fits = (
            "too little memory; lower --max-tokens-per-micro-batch or --rollout-batch-size, pass "
            "--gradient-checkpointing, or raise --policy-ranks"
        )
    what = "peak of the known parts" if None in estimate.values() else "approximate peak"
    lines.append(f"{peak:9.2f} GB  {what}, of {available:.1f} GB on {device}: {fits}")
    return "\n".join(lines)


def servers_of(config) -> dict:
    """Return {name: genrm_server.Config} for the servers of the policy and the judges."""
    longest = config.max_prompt_length + config.max_response_length
    policy_server = dataclasses.replace(config.policy_server_config(), max_model_len=longest)
    return {"policy server": policy_server} | config.server_configs()


def server_memory(config, name: str, server, gpu: float) -> str:
    """Describe how a vLLM server with bfloat16 weights uses its share of GPUs of `gpu` GB."""
    gpus = server.tensor_parallel_size
    share = server.gpu_share
    if share == 1:
        share = VLLM_SHARE
    have = gpus * gpu * share
    try:
        have = gpus * gpu * vllm_argument(server, "--gpu-memory-utilization", share)
        served = dataclasses.replace(config, model=server.model, lora_rank=0)
        text = shape_of(served).get_text_config()
        weights = 2e-9 * sizes_of(served).weights
        if name == "policy server" and text.tie_word_embeddings:  # The served policy has untied weights.
            weights += 2e-9 * text.vocab_size * text.hidden_size
        sequences = vllm_argument(server, "--max-num-seqs", VLLM_SEQUENCES[gpu < 75])
        logits = 4e-9 * SAMPLER_COPIES * sequences * text.vocab_size  # on each GPU: all gather them
        cache = max(have - weights - (VLLM_GB + logits) * gpus, 0)
        tokens = round(cache / (2e-9 * cache_of(text, gpus)))  # ValueError if the weights are unknown
        longest = server.max_model_len or text.max_position_embeddings
        longest = vllm_argument(server, "--max-model-len", longest)
    except Exception:  # The model is missing, quantised or of an unknown kind, or an argument is unreadable.
        return f"{have:9.2f} GB  {name}: its memory use is unknown"
    room = f"room for {tokens:,.0f} tokens (longest sequence: {longest:,.0f})"
    fits = "it fits" if tokens >= longest else "too little memory; raise its share or lower --max-model-len"
    heads = text.num_attention_heads
    key_heads = getattr(text, "num_key_value_heads", None) or heads
    if heads % gpus or key_heads % gpus and gpus % key_heads:  # Key heads, or their copies, are also split.
        fits = f"vLLM cannot split {heads} attention heads over {gpus} GPUs; use fewer GPUs"
    line = f"{have:9.2f} GB  {name}: {weights:.2f} GB of weights, {room}: {fits}"
    if server.gpu_share < 1:
        fixed = f"{1000 * cache:.0f}000000"
        line += f"\n              with --kv-cache-memory-bytes {fixed}, vLLM need not measure the free memory"
    return line


def vllm_argument(server, flag: str, default: float) -> float:
    """Return the number after a flag in the vLLM arguments of a server.

    Raises ValueError if it is not a plain number: vLLM also reads 8k and 8M. For "auto" and -1, vLLM chooses.
    """
    flag = flag.replace("-", "[-_]")  # vLLM accepts both spellings.
    found = re.search(rf"{flag}[ =](\S+)", " ".join(server.vllm_args))
    if found and found[1] not in ("auto", "-1"):
        return float(found[1])
    return default


def placement_lines(nodes: dict[str, list], specs: dict[str, ProcessSpec], kept: float) -> list[str]:
    """Describe the processes of each node, as in "a + b" if they share a GPU, and shares that are too large.

    While the judges are awake, each rank uses only the fraction `kept` of a GPU (--reward-mode colocate).
    """
    weights = "weights and Adam of rank"
    specs = specs | {weights: ProcessSpec(1, 0.0, round(kept, 2))}
    lines = []
    for node, bundles in nodes.items():
        held = []
        too_large = []
        for processes in bundles:
            held.append(labels(processes, specs))
            during_updates = [one for one in processes if not specs[one[0]].awake]
            while_judging = [
                (weights if specs[name].apart else name, number)
                for name, number in processes
                if kept or not specs[name].apart
            ]
            for together in (during_updates, while_judging):
                total = sum(specs[name].share for name, _ in together)
                if len(together) > 1 and round(total, 2) > SHARED:
                    problem = f"too much for one GPU; lower these shares to at most {SHARED} in total"
                    too_large.append(f"{total:9.2f} of a GPU  {labels(together, specs)}: {problem}")
                    break
        lines += [f"{node}: {', '.join(held)}", *too_large]
    return lines


def labels(processes: list[tuple[str, int]], specs: dict[str, ProcessSpec]) -> str:
    texts = []
    for name, number in processes:
        text = f"{name} {number}"
        gpus = specs[name].share
        if gpus not in (0, 1):
            text += f" ({gpus:g} GPUs)"
        texts.append(text)
    return " + ".join(texts)


def placement(config, specs: dict[str, ProcessSpec]) -> dict[str, list[list[tuple[str, int]]]]:
    """Return the processes (name, number) that would run on each node, in one list for each GPU.

    Without --gpus, reserve the resources in Ray and release them immediately.
    """
    bundles = defaultdict(list)  # (node, number) -> its processes
    if config.gpus:
        needed, where = layout(specs, sum(config.gpus))
        nodes = nodes_of([bundle.get("GPU", 0) for bundle in needed], config.gpus)
        for process, (bundle, _) in where.items():
            bundles[nodes[bundle], bundle].append(process)
    else:
        addresses = {node["NodeID"]: node["NodeManagerAddress"] for node in ray.nodes()}
        reservation = Reservation(specs)
        for name in specs:
            for number, node in enumerate(reservation.nodes(name)):
                bundle, _ = reservation.placed[name, number]
                bundles[addresses[node], bundle].append((name, number))
        reservation.close()
    on_node = defaultdict(list)
    for node, bundle in sorted(bundles):
        on_node[node].append(bundles[node, bundle])
    return on_node


def nodes_of(needed: list[float], gpus: tuple[int, ...]) -> list[str]:
    """Return the node of each bundle: the first node with enough free GPUs.

    Raises ValueError if no node is large enough: a server or a rank cannot use GPUs of several nodes.
    """
    free = list(gpus)
    nodes = []
    for count in needed:
        fitting = [node for node, left in enumerate(free) if left >= count]
        if not fitting:
            here = " ".join(map(str, gpus))
            raise ValueError(
                f"--gpus {here}: no node has {count:g} free GPUs for a server that needs them together; add "
                "GPUs or lower the tensor parallelism"
            )
        node = fitting[0]
        free[node] -= count
        name = f"{gpus[node]} GPU{'s' * (gpus[node] > 1)}"
        if len(gpus) > 1:
            name = f"node {node}, {name}"
        nodes.append(name)
    return nodes


def gpu_memory(config) -> float:
    """Return the memory of a GPU in GB: --gpu-gb, or the memory of the cluster's GPUs."""

    def total_memory():
        if torch.cuda.is_available():
            return torch.cuda.get_device_properties(0).total_memory

    if config.gpu_gb:
        return config.gpu_gb
    found = None
    if not config.gpus:
        found = ray.get(ray.remote(num_cpus=0, num_gpus=1)(total_memory).remote())
    if not found:
        print("the memory of the GPUs is unknown, so the plan assumes 80 GB; pass --gpu-gb to change it")
    return 1e-9 * (found or 80e9)


def main(config: Config) -> None:
    with one_line_errors():
        if min(config.gpus, default=1) < 1:
            here = " ".join(map(str, config.gpus))
            raise ValueError(
                f"--gpus {here}: every number must be above 0; to plan for a CPU, pass --device cpu instead"
            )
        run = Run(dataclasses.replace(config, dry_run=True))
        started = not config.gpus and reward_loop.connect_ray()
        gpus = sum(config.gpus) or count_gpus()
        num_validation = sum(n for _, n in run.val_rows)
        print(report(config.resolved(gpus), len(run.train_rows), num_validation))
        if started:
            ray.shutdown()


if __name__ == "__main__":
    main(CONFIG)
