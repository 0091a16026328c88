"""What a run will need, before it starts: memory on the policy's device, and where Ray would place what.

    python -m tools.plan_run --model PATH ...                          # the trainer's flags
    python -m tools.plan_run --model PATH ... --gpus 1 --gpu-gb 24     # for a GPU that is not here
    python -m tools.plan_run --model PATH ... --gpus 4 4               # for two nodes with four GPUs each

Checks everything that the trainer checks, then prints an estimate from the models' config.json alone. With
GPUs it also reserves all of the run in Ray, says which node got what, and gives it back (with --gpus: says
what would share a GPU); and says what a vLLM server's share of a GPU leaves for keys and values.
benchmarks/simulate.py is about time.
"""

import dataclasses
import math
import os
import re
import sys
from collections import defaultdict
from dataclasses import dataclass

import ray
import torch
import tyro
from transformers import AutoConfig, AutoModelForCausalLM

import lora
import grpo_trainer
import reward_loop
from cluster.placement import Reservation, layout, process_specs
from policy import LOGITS_AT_ONCE, TOKENS_PER_PASS, layers_of, set_dtypes

# Of vLLM: what a server takes of a GPU if nobody says otherwise; what it has beside weights, cache and what a
# pass needs (CUDA itself, graphs), roughly; sequences at once on GPUs from 70 GiB on, and on smaller ones.
VLLM_SHARE = 0.92
VLLM_GB = 1.0
VLLM_SEQUENCES = 1024, 256
SAMPLER_COPIES = 6  # of the logits, float32, as it sorts them for top-p


@dataclass
class Config(grpo_trainer.Config):
    """The run that is planned, by the trainer's flags, and the GPUs for it."""

    # GPUs of each planned node: 8, or 4 4 for two nodes. They need not be here; default: the Ray cluster's.
    gpus: tuple[int, ...] = ()
    gpu_gb: float = 0.0  # Memory of a GPU; 0: that of the cluster's, or 80 where it cannot be asked for.

    def server_configs(self, sleep_mode: bool = False) -> dict:
        configs = super().server_configs(sleep_mode)
        if self.gpus:  # what is here does not matter
            configs = {name: dataclasses.replace(one, device="cuda") for name, one in configs.items()}
        return configs


def shape_of(config, model: str):
    shape = AutoConfig.from_pretrained(model, trust_remote_code=config.trust_remote_code)
    return shape.get_text_config()


def count_parameters(config, device: str = "cpu") -> tuple:
    """Parameters, in units of 4 bytes: of the model, those that learn, of its largest layer, and outside of
    layers; NaN: not known."""
    remote = dict(trust_remote_code=config.trust_remote_code)
    try:
        with torch.device("meta"):
            shape = AutoConfig.from_pretrained(config.model, **remote)
            model = AutoModelForCausalLM.from_config(shape, **remote)
            if config.lora_rank:
                lora.add(model, config, "")
            set_dtypes(model, config, device)
        layers = [sum_of_sizes(layer) for layer in layers_of(model, "")]
        whole = sum_of_sizes(model)
    except Exception:  # families' own code, which need not be able to build a model without data
        return math.nan, math.nan, math.nan, math.nan
    learning = sum(parameter.numel() for parameter in model.parameters() if parameter.requires_grad)
    return whole, learning, max(layers), whole - sum(layers)


def sum_of_sizes(module) -> float:
    return sum(parameter.nbytes / 4 for parameter in module.parameters())


def cache_of(text) -> int:
    """Keys and values of a token, in numbers."""
    heads = getattr(text, "num_key_value_heads", None) or text.num_attention_heads
    return 2 * text.num_hidden_layers * heads * head_size(text)


def head_size(text) -> int:
    return getattr(text, "head_dim", None) or text.hidden_size // text.num_attention_heads


def activations_of(config, text, tokens: int, device: str) -> int:
    """What the backward pass of a micro-batch needs, in numbers; on GPUs as benchmarks/fake_gpu.py counts."""
    layers = text.num_hidden_layers
    hidden = text.hidden_size
    intermediate = getattr(text, "intermediate_size", 4 * hidden)
    layer = tokens * (10 * hidden + 4 * intermediate)
    copies = 6  # of the logits
    if device == "cuda":
        layer = tokens * (6.5 * hidden + 1.75 * intermediate)  # bf16, norms and residuals float32
        copies = 3
        if config.entropy_coef:
            copies = 5
    logits = copies * min(LOGITS_AT_ONCE[device], tokens * text.vocab_size) + 4 * tokens * hidden
    if config.gradient_checkpointing:  # one layer at a time, when the logits are gone
        if device == "cuda":
            queries = text.num_attention_heads * head_size(text)
            layer = tokens * (6 * hidden + 4 * queries + 3.5 * intermediate)  # with gradients of its own
        return tokens * hidden * layers + max(layer, logits)
    return layer * layers + logits


def estimate_memory(config, device: str) -> dict[str, float | None]:
    """Rough GB by use on the policy's device, or each of its ranks', from config.json alone; None: unknown.

    A step holds the update's part or the rollout's, not both.
    """
    text = shape_of(config, config.model)
    weights, learning, of_layer, outside = count_parameters(config, device)
    longest = config.max_prompt_length + config.max_response_length
    tokens = max(config.max_tokens_per_micro_batch or TOKENS_PER_PASS[device], longest)
    sequences = min(config.rollout_batch_size, config.train_batch_size * config.group_size)
    try:
        activations = activations_of(config, text, tokens, device)
        cache = cache_of(text) * longest * sequences
    except Exception:  # other names, or one number a layer: configurations raise errors of their own kinds
        activations = math.nan
        cache = math.nan
    where = ""
    if config.policy_offload and device == "cuda":
        where = "in the host's memory, of each rank: "
    numbers = {
        f"{where}weights": weights / config.policy_ranks,
        f"{where}gradients": learning / config.policy_ranks,
        f"{where}Adam": 2 * learning / config.policy_ranks,
    }
    if config.kl_coef and not config.lora_rank:
        numbers[f"{where}reference model"] = weights / config.policy_ranks
    numbers["update: activations of a micro-batch"] = activations
    if config.rollout == "hf":
        numbers["rollout: key-value cache"] = cache
    if config.policy_ranks > 1 or config.policy_offload:
        # embedding, head and its gradient; a layer in float32, its gradient or itself, and others in bf16
        gathered = outside + 2.25 * of_layer
        if not config.lora_rank:
            gathered += text.vocab_size * text.hidden_size
        numbers["update: gathered weights"] = gathered
    elif device == "cuda" and not (config.gradient_checkpointing or config.lora_rank):
        numbers["update: weights in bf16"] = weights / 2  # kept for the backward pass
    gigabytes = {}
    for name, number in numbers.items():
        gigabytes[name] = None if math.isnan(number) else 4e-9 * number  # float32
    return gigabytes


def report(config, num_rows: int) -> str:
    """The plan as text. config: `resolved`."""
    prompts = config.total_steps * config.train_batch_size
    epochs = f"{prompts / num_rows:.1f} epochs of {num_rows}"
    lines = [f"{config.total_steps} steps take {prompts} prompts, {epochs}"]
    where = config.device
    have = 1e-9 * os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    if config.device == "cuda" or config.policy_ranks > 1:
        where = f"each of {config.policy_ranks} ranks, {config.device}"
        for node, held in placement(config).items():
            lines.append(f"{node}: {', '.join(held)}")
    if config.device == "cuda":
        gpu = gpu_memory(config)
        have = gpu * config.policy_gpu_share
        for name, server in servers_of(config).items():
            lines.append(server_memory(config, name, server, gpu))
    estimate = estimate_memory(config, config.device)
    always = 0.0
    phases = {"update": 0.0, "rollout": 0.0}
    for name, gb in estimate.items():
        if gb is None:
            lines.append(f"  unknown     {name}")
            continue
        lines.append(f"{gb:9.2f} GB  {name}")
        phase, of_phase, _ = name.partition(":")
        if not of_phase:
            always += gb
        elif phase in phases:
            phases[phase] += gb
    peak = always + max(phases.values())
    if peak <= have:
        fits = "it fits"
    elif always > have and not config.lora_rank:
        fits = "too little for all weights; train adapters (--lora-rank 32), or take more --policy-ranks"
    else:
        fits = (
            "too little; lower --max-tokens-per-micro-batch or --rollout-batch-size, or take "
            "--gradient-checkpointing or more --policy-ranks"
        )
    what = "of what is known, at the peak" if None in estimate.values() else "at the peak, roughly"
    lines.append(f"{peak:9.2f} GB  {what}, of {have:.1f} GB on {where}: {fits}")
    return "\n".join(lines)


def servers_of(config) -> dict:
    """{name: genrm_server.Config} of the policy's servers and the judges'."""
    longest = config.max_prompt_length + config.max_response_length
    policy_server = dataclasses.replace(config.policy_servers(), max_model_len=longest)
    return {"policy server": policy_server} | config.server_configs()


def server_memory(config, name: str, server, gpu: float) -> str:
    """What such a server does with its share of GPUs of so many GB, in bf16."""
    gpus = server.tensor_parallel_size
    share = server.gpu_share
    if share == 1:
        share = VLLM_SHARE
    share = told(server, "--gpu-memory-utilization", share)
    have = gpus * gpu * share
    try:
        text = shape_of(config, server.model)
        served = dataclasses.replace(config, model=server.model, lora_rank=0)
        weights = 2e-9 * count_parameters(served)[0]
        if name == "policy server" and text.tie_word_embeddings:  # it is served untied
            weights += 2e-9 * text.vocab_size * text.hidden_size
        sequences = told(server, "--max-num-seqs", VLLM_SEQUENCES[gpu < 75])
        logits = 4e-9 * SAMPLER_COPIES * sequences * text.vocab_size  # of each GPU: all gather them
        cache = max(have - weights - (VLLM_GB + logits) * gpus, 0)
        tokens = round(cache / (2e-9 * cache_of(text)))  # of weights that are not known there is none
        longest = server.max_model_len or text.max_position_embeddings
        longest = told(server, "--max-model-len", longest)
    except Exception:  # no such file here, or a family of another kind
        return f"{have:9.2f} GB  {name}: what it takes is unknown"
    room = f"room for {tokens:,.0f} tokens (a sequence: {longest:,.0f})"
    fits = "it fits" if tokens >= longest else "too little; raise its share, or lower its --max-model-len"
    if not splits_heads(text, gpus):
        heads = text.num_attention_heads
        fits = f"vLLM cannot split its {heads} attention heads over {gpus} GPUs; take fewer"
    line = f"{have:9.2f} GB  {name}: {weights:.2f} of weights, {room}: {fits}"
    if server.gpu_share < 1:
        fixed = f"{1000 * cache:.0f}000000"
        line += f"\n              vLLM measures no neighbour with --kv-cache-memory-bytes {fixed}"
    return line


def splits_heads(text, gpus: int) -> bool:
    """Whether vLLM takes so many GPUs: each has the same number of heads, and of grouped keys or copies."""
    groups = getattr(text, "num_key_value_heads", None) or text.num_attention_heads
    return text.num_attention_heads % gpus == 0 and (groups % gpus == 0 or gpus % groups == 0)


def told(server, flag: str, default: float) -> float:
    """The number that goes with a flag in the server's vLLM arguments."""
    found = re.search(rf"{flag}[ =]([\d.]+)", " ".join(server.vllm_args))
    if found:
        return float(found[1])
    return default


def placement(config) -> dict[str, list[str]]:
    """What would be on which node; "a + b" share a GPU. In Ray it is reserved, and given back at once."""
    specs = process_specs(config)
    bundles = defaultdict(list)  # (node, number) -> who is in it
    if config.gpus:
        needed, where = layout(specs, sum(config.gpus))
        nodes = nodes_of([bundle.get("GPU", 0) for bundle in needed], config.gpus)
        for (name, number), (bundle, share) in where.items():
            bundles[nodes[bundle], bundle].append(described(name, number, share))
    else:
        addresses = {node["NodeID"]: node["NodeManagerAddress"] for node in ray.nodes()}
        reservation = Reservation(specs)
        for name in specs:
            for number, node in enumerate(reservation.nodes(name)):
                bundle, share = reservation.placed[name, number]
                bundles[addresses[node], bundle].append(described(name, number, share))
        reservation.close()
    held = defaultdict(list)
    for node, bundle in sorted(bundles):
        held[node].append(" + ".join(bundles[node, bundle]))
    return held


def nodes_of(needed: list[float], gpus: tuple[int, ...]) -> list[str]:
    """The node of each bundle, which needs this many whole GPUs: the first node that has them left.

    ValueError if a bundle fits on no node: a server or a rank cannot have GPUs of several nodes.
    """
    free = list(gpus)
    nodes = []
    for count in needed:
        fitting = [node for node, left in enumerate(free) if left >= count]
        if not fitting:
            here = " ".join(map(str, gpus))
            raise ValueError(
                f"--gpus {here}: no node has {count:g} GPUs left for a server that needs them together; add "
                "GPUs, or lower the tensor parallelism"
            )
        node = fitting[0]
        free[node] -= count
        name = f"{gpus[node]} GPUs"
        if len(gpus) > 1:
            name = f"node {node}, {name}"
        nodes.append(name)
    return nodes


def described(name: str, number: int, gpus: float) -> str:
    if gpus in (0, 1):
        return f"{name} {number}"
    return f"{name} {number} ({gpus:g} GPUs)"


def gpu_memory(config) -> float:
    """GB of a GPU, of the cluster or as the config has it."""

    def ask():
        if torch.cuda.is_available():
            return torch.cuda.get_device_properties(0).total_memory

    if config.gpu_gb:
        return config.gpu_gb
    found = None
    if not config.gpus:
        found = ray.get(ray.remote(num_cpus=0, num_gpus=1)(ask).remote())
    if not found:
        print("the memory of the GPUs cannot be asked for: taken as 80 GB; --gpu-gb says another")
    return 1e-9 * (found or 80e9)


def main() -> None:
    try:
        run = grpo_trainer.Run(tyro.cli(Config, description=__doc__))
        config = run.config
        started = not config.gpus and reward_loop.connect_ray()
        gpus = sum(config.gpus) or ray.cluster_resources().get("GPU", 0)
        print(report(config.resolved(gpus), len(run.train_rows)))
        if started:
            ray.shutdown()
    except (ValueError, OSError, RuntimeError) as error:
        print(f"error: {error}", file=sys.stderr)
        raise SystemExit(2) from error


if __name__ == "__main__":
    main()
