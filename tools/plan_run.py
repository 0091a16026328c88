"""What a run will need, before it starts: memory on the policy's device, and where Ray would place what.

    python -m tools.plan_run --model PATH ...                          # the trainer's flags
    python -m tools.plan_run --model PATH ... --gpus 1 --gpu-gb 24     # for a GPU that is not here

Checks everything that the trainer checks, then prints an estimate from the models' config.json alone. With
GPUs it also reserves all of the run in Ray, says which node got what, and gives it back (with --gpus: says
what would share a GPU); and says what a vLLM server's share of a GPU leaves for keys and values.
benchmarks/simulate.py is about time.
"""

import dataclasses
import os
import re
import sys
from dataclasses import dataclass

import ray
import torch
import tyro
from transformers import AutoConfig, AutoModelForCausalLM

import lora
import grpo_trainer
import reward_loop
from cluster.placement import Places, layout, parts_of
from policy import LOGITS_AT_ONCE, layers_of, set_dtypes

VLLM_GB = 2.0  # roughly what a server needs beside weights and cache: activations, CUDA graphs
VLLM_SHARE = 0.9  # of a GPU that it takes if nobody says otherwise


@dataclass
class Config(grpo_trainer.Config):
    """The run that is planned, by the trainer's flags, and the GPUs for it."""

    gpus: int = 0  # Plan for so many GPUs, which need not be here; 0: for the machines of the Ray cluster.
    gpu_gb: float = 0.0  # Memory of a GPU; 0: that of the cluster's, or 80 where it cannot be asked for.

    def server_configs(self, sleep_mode: bool = False) -> dict:
        configs = super().server_configs(sleep_mode)
        if self.gpus:  # what is here does not matter
            configs = {name: dataclasses.replace(one, device="cuda") for name, one in configs.items()}
        return configs


def count_parameters(config, device: str = "cpu") -> tuple:
    """Parameters, in units of 4 bytes: of the model, those that learn, of its largest layer, and outside of
    layers; None: not known."""
    try:
        with torch.device("meta"):
            shape = AutoConfig.from_pretrained(config.model, trust_remote_code=config.trust_remote_code)
            model = AutoModelForCausalLM.from_config(shape, trust_remote_code=config.trust_remote_code)
            if config.lora_rank:
                lora.add(model, config, "")
            set_dtypes(model, config, device)
        size = {parameter: parameter.nbytes / 4 for parameter in model.parameters()}
        of_layers = [sum(map(size.get, layer.parameters())) for layer in layers_of(model, "")]
    except Exception:  # families' own code, which need not be able to build a model without data
        return [None] * 4
    learning = sum(parameter.numel() for parameter in model.parameters() if parameter.requires_grad)
    return sum(size.values()), learning, max(of_layers), sum(size.values()) - sum(of_layers)


def cache_of(text) -> int:
    """Keys and values of a token, in numbers."""
    heads = text.num_attention_heads
    size = getattr(text, "head_dim", None) or text.hidden_size // heads
    return 2 * text.num_hidden_layers * (getattr(text, "num_key_value_heads", None) or heads) * size


def estimate_memory(config, device: str) -> dict[str, float | None]:
    """Rough GB by use on the policy's device, or each of its ranks', from config.json alone; None: unknown.

    A step holds the update's part or the rollout's, not both.
    """
    text = AutoConfig.from_pretrained(config.model, trust_remote_code=config.trust_remote_code)
    text = text.get_text_config()
    weights, learning, of_layer, outside = count_parameters(config, device)
    part, learning = (count and count / config.policy_ranks for count in (weights, learning))
    longest = config.max_prompt_length + config.max_response_length
    tokens = max(config.max_tokens_per_micro_batch or 16384, longest)
    sequences = min(config.rollout_batch_size, config.train_batch_size * config.group_size)
    try:
        layers, hidden = text.num_hidden_layers, text.hidden_size
        # what its backward pass needs
        layer = tokens * (10 * hidden + 4 * getattr(text, "intermediate_size", 4 * hidden))
        kept = tokens * hidden * layers + layer if config.gradient_checkpointing else layer * layers
        kept += 6 * min(LOGITS_AT_ONCE[device], tokens * text.vocab_size)
        cache = cache_of(text) * longest * sequences
    except Exception:  # other names, or one number a layer: configurations raise errors of their own kinds
        kept = cache = None
    numbers = {"weights": part, "gradients": learning, "Adam": learning and 2 * learning}
    numbers |= {"reference model": part} if config.kl_coef and not config.lora_rank else {}
    if config.policy_offload and device == "cuda":
        numbers = {f"in the host's memory, of each rank: {name}": number for name, number in numbers.items()}
    numbers["update: activations of a micro-batch"] = kept
    numbers |= {"rollout: key-value cache": cache} if config.rollout == "hf" else {}
    if config.policy_ranks > 1:  # two layers at a time, and embedding and head, with gradients twice
        numbers["update: gathered weights"] = weights and 3 * outside + 3 * of_layer
    elif device == "cuda" and not (config.gradient_checkpointing or config.lora_rank):
        numbers["update: weights in bf16"] = weights and weights / 2  # kept for the backward pass
    return {name: count and 4e-9 * count for name, count in numbers.items()}  # float32


def report(config, num_rows: int) -> str:
    """The plan as text. config: `settled`."""
    prompts, lines = config.total_steps * config.train_batch_size, []
    epochs = f"{prompts / num_rows:.1f} epochs of {num_rows}"
    lines.append(f"{config.total_steps} steps take {prompts} prompts, {epochs}")
    where, have = config.device, 1e-9 * os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    if config.device == "cuda" or config.policy_ranks > 1:
        lines += [f"{node}: {', '.join(held)}" for node, held in placement(config).items()]
        where = f"each of {config.policy_ranks} ranks, {config.device}"
    if config.device == "cuda":
        have = (gpu := gpu_memory(config)) * config.policy_gpu_share
        lines += [server_memory(config, *server, gpu) for server in servers_of(config)]
    estimate = estimate_memory(config, config.device)
    for name, gb in estimate.items():
        lines.append(f"{gb:9.2f} GB  {name}" if gb is not None else f"  unknown     {name}")
    known = {name: gb or 0.0 for name, gb in estimate.items()}
    phases = [sum(gb for name, gb in known.items() if name.startswith(p)) for p in ("update", "rollout")]
    always = sum(gb for name, gb in known.items() if ":" not in name)
    peak = always + max(phases)
    if peak <= have:
        fits = "it fits"
    elif always > have and not config.lora_rank:
        fits = "too little for all weights; train adapters (--lora-rank 32), or take more --policy-ranks"
    else:
        fits = ("too little; lower --max-tokens-per-micro-batch or --rollout-batch-size, or take "
                "--gradient-checkpointing or more --policy-ranks")  # fmt: skip
    what = "at the peak, roughly" if None not in estimate.values() else "of what is known, at the peak"
    lines.append(f"{peak:9.2f} GB  {what}, of {have:.1f} GB on {where}: {fits}")
    return "\n".join(lines)


def servers_of(config) -> list[tuple[str, str, float, int, int]]:
    """Name, model, share of a GPU, GPUs and longest sequence (0: the model's) of the kinds of servers."""
    longest = config.max_prompt_length + config.max_response_length
    tensor_parallel = config.rollout_tensor_parallel
    servers = [("policy server", config.model, config.rollout_gpu_share, tensor_parallel, longest)]
    for name, judge in config.server_configs().items():
        longest = re.search(r"--max-model-len[ =](\d+)", " ".join(judge.vllm_args))
        servers.append((name, judge.model, judge.gpu_share, judge.tensor_parallel_size,
                        int(longest[1]) if longest else 0))  # fmt: skip
    return servers


def server_memory(config, name: str, model: str, share: float, gpus: int, longest: int, gpu: float) -> str:
    """What a server of this model does with its share of so many GPUs of so many GB, in bf16."""
    config = dataclasses.replace(config, model=model, lora_rank=0)
    have = gpus * gpu * (share if share < 1 else VLLM_SHARE)
    try:
        text = AutoConfig.from_pretrained(model, trust_remote_code=config.trust_remote_code).get_text_config()
        weights, per_token = 2e-9 * count_parameters(config)[0], 2e-9 * cache_of(text)
        if name == "policy server" and text.tie_word_embeddings:  # it is served untied
            weights += 2e-9 * text.vocab_size * text.hidden_size
        longest = longest or text.max_position_embeddings
    except Exception:  # no such file here, or a family of another kind
        return f"{have:9.2f} GB  {name}: what it takes is unknown"
    tokens = max(have - weights - VLLM_GB * gpus, 0) / per_token
    fits = "it fits" if tokens >= longest else "too little; raise its share, or lower its --max-model-len"
    return (f"{have:9.2f} GB  {name}: {weights:.2f} of weights, room for {tokens:,.0f} tokens "
            f"(a sequence: {longest:,}): {fits}")  # fmt: skip


def placement(config) -> dict[str, list[str]]:
    """What Ray would place on which node: it is reserved and given back at once. "a + b" share a GPU."""
    parts, held = parts_of(config), {}
    if config.gpus:
        bundles, where = layout(parts, config.gpus)
        shared = [[] for _ in bundles]
        for (name, number), (index, gpus) in where.items():
            shared[index].append(f"{name} {number}" + (f" ({gpus:g} GPUs)" if gpus != 1 else ""))
        count = f"{config.gpus} GPU{'s' if config.gpus > 1 else ''}"
        return {count: [" + ".join(members) for members in shared]}
    addresses = {node["NodeID"]: node["NodeManagerAddress"] for node in ray.nodes()}
    for together in [parts] if config.device == "cuda" else [{name: part} for name, part in parts.items()]:
        places, bundles = Places(together), {}
        for name in together:
            for number, node in enumerate(places.nodes(name)):
                index, gpus = places.where[name, number]
                told = f"{name} {number}" + (f" ({gpus:g} GPUs)" if gpus not in (0, 1) else "")
                bundles.setdefault((addresses[node], index), []).append(told)
        places.close()
        for (address, _), members in sorted(bundles.items()):
            held.setdefault(address, []).append(" + ".join(members))
    return held


def gpu_memory(config) -> float:
    """GB of a GPU, of the cluster or as the config has it."""
    if config.gpu_gb:
        return config.gpu_gb

    def ask():
        return torch.cuda.get_device_properties(0).total_memory if torch.cuda.is_available() else None

    found = None if config.gpus else ray.get(ray.remote(num_cpus=0, num_gpus=1)(ask).remote())
    if not found:
        print("the memory of the GPUs cannot be asked for: taken as 80 GB; --gpu-gb says another")
    return 1e-9 * (found or 80e9)


def main() -> None:
    try:
        run = grpo_trainer.Run(tyro.cli(Config, description=__doc__))
        config = run.config
        started = not config.gpus and reward_loop.connect_ray()
        gpus = config.gpus or ray.cluster_resources().get("GPU", 0)
        print(report(config.settled(gpus), len(run.train_rows)))
        if started:
            ray.shutdown()
    except (ValueError, OSError, RuntimeError) as error:
        print(f"error: {error}", file=sys.stderr)
        raise SystemExit(2) from error


if __name__ == "__main__":
    main()
