"""What a run will need, before it starts: memory on the policy's device, and where Ray would place what.

    python -m tools.plan_run --model PATH ...          # the trainer's flags

Checks everything that the trainer checks, then prints an estimate from the model's config.json alone. With
GPUs it also reserves all of the run in Ray, says which node got what, and gives it back.

Left out: memory of vLLM servers, which take the share of a GPU that they are told; time.
"""

import dataclasses
import os
import sys

import ray
import torch
import tyro
from transformers import AutoConfig, AutoModelForCausalLM

import genrm_server
import reward_loop
from cluster import placement as placement_file
from cluster.policy_group import rank_bundles
from grpo_trainer import Config, Run
from policy import LOGITS_AT_ONCE, layers_of


def count_parameters(config) -> tuple[int, int, int] | tuple[None, None, None]:
    """Parameters of the model, its largest layer, and outside of layers; None: not known."""
    try:
        with torch.device("meta"):
            shape = AutoConfig.from_pretrained(config.model, trust_remote_code=config.trust_remote_code)
            model = AutoModelForCausalLM.from_config(shape, trust_remote_code=config.trust_remote_code)
        of_layers = [sum(p.numel() for p in layer.parameters()) for layer in layers_of(model, "")]
    except Exception:  # families' own code, which need not be able to build a model without data
        return None, None, None
    weights = sum(parameter.numel() for parameter in model.parameters())
    return weights, max(of_layers), weights - sum(of_layers)


def estimate_memory(config, device: str) -> dict[str, float | None]:
    """Rough GB by use on the policy's device, or each of its ranks', from config.json alone; None: unknown.

    A step holds the update's part or the rollout's, not both.
    """
    text = AutoConfig.from_pretrained(config.model, trust_remote_code=config.trust_remote_code)
    text = text.get_text_config()
    weights, of_layer, outside = count_parameters(config)
    part = weights and weights / config.policy_ranks
    longest = config.max_prompt_length + config.max_response_length
    tokens = max(config.max_tokens_per_micro_batch or 16384, longest)
    sequences = min(config.rollout_batch_size, config.train_batch_size * config.group_size)
    try:
        layers, hidden, heads = text.num_hidden_layers, text.hidden_size, text.num_attention_heads
        kv_heads = getattr(text, "num_key_value_heads", None) or heads
        kv_size = kv_heads * (getattr(text, "head_dim", None) or hidden // heads)
        # what its backward pass needs
        layer = tokens * (10 * hidden + 4 * getattr(text, "intermediate_size", 4 * hidden))
        kept = tokens * hidden * layers + layer if config.gradient_checkpointing else layer * layers
        kept += 6 * min(LOGITS_AT_ONCE[device], tokens * text.vocab_size)
        cache = 2 * layers * kv_size * longest * sequences
    except Exception:  # other names, or one number a layer: configurations raise errors of their own kinds
        kept = cache = None
    numbers = {"weights": part, "gradients": part, "Adam": part and 2 * part}
    numbers |= {"reference model": part} if config.kl_coef else {}
    if config.policy_offload and device == "cuda":
        numbers = {f"in the host's memory, of each rank: {name}": number for name, number in numbers.items()}
    numbers["update: activations of a micro-batch"] = kept
    numbers |= {"rollout: key-value cache": cache} if config.rollout == "hf" else {}
    if config.policy_ranks > 1:  # two layers at a time, and embedding and head, with gradients twice
        numbers["update: gathered weights"] = weights and 3 * outside + 3 * of_layer
    elif device == "cuda" and not config.gradient_checkpointing:
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
        have = gpu_memory() * config.policy_gpu_share
    estimate = estimate_memory(config, config.device)
    for name, gb in estimate.items():
        lines.append(f"{gb:9.2f} GB  {name}" if gb is not None else f"  unknown     {name}")
    known = {name: gb or 0.0 for name, gb in estimate.items()}
    phases = [sum(gb for name, gb in known.items() if name.startswith(p)) for p in ("update", "rollout")]
    peak = sum(gb for name, gb in known.items() if ":" not in name) + max(phases)
    fits = "it fits" if peak <= have else (
        "too little; lower --max-tokens-per-micro-batch or --rollout-batch-size, or take "
        "--gradient-checkpointing or more --policy-ranks")
    what = "at the peak, roughly" if None not in estimate.values() else "of what is known, at the peak"
    lines.append(f"{peak:9.2f} GB  {what}, of {have:.1f} GB on {where}: {fits}")
    return "\n".join(lines)


def placement(config) -> dict[str, list[str]]:
    """What Ray would place on which node: it is reserved and given back at once."""
    judges = [dataclasses.replace(judge, device=config.device) for judge in config.server_configs().values()]
    servers = genrm_server.Config("", num_servers=config.rollout_servers, device=config.device,
                                  tensor_parallel_size=config.rollout_tensor_parallel,
                                  gpu_share=config.rollout_gpu_share)  # fmt: skip
    wanted = {"rank": rank_bundles(config), "judge": placement_file.reserved(judges)}
    wanted["policy server"] = placement_file.reserved([servers])
    addresses = {node["NodeID"]: node["NodeManagerAddress"] for node in ray.nodes()}
    held, groups = {}, []
    try:
        for name, (bundles, strategy) in wanted.items():
            if not bundles:
                continue
            group, nodes = placement_file.hold(bundles, strategy, name)
            groups.append(group)
            for number, (bundle, node) in enumerate(zip(bundles, nodes)):
                gpus = f" ({count:g} GPUs)" if (count := bundle.get("GPU", 1)) != 1 else ""
                held.setdefault(addresses[node], []).append(f"{name} {number}{gpus}")
    finally:
        for group in groups:
            ray.util.remove_placement_group(group)
    return dict(sorted(held.items()))


def gpu_memory() -> float:
    """GB of a GPU of the cluster."""

    def ask():
        return torch.cuda.get_device_properties(0).total_memory if torch.cuda.is_available() else None

    found = ray.get(ray.remote(num_cpus=0, num_gpus=1)(ask).remote())
    if not found:
        print("the memory of the cluster's GPUs cannot be asked for: taken as 80 GB")
    return 1e-9 * (found or 80e9)


def main() -> None:
    try:
        run = Run(tyro.cli(Config, description=__doc__))
        started = reward_loop.connect_ray()
        print(report(run.config.settled(ray.cluster_resources().get("GPU", 0)), len(run.train_rows)))
        if started:
            ray.shutdown()
    except (ValueError, OSError, RuntimeError) as error:
        print(f"error: {error}", file=sys.stderr)
        raise SystemExit(2) from error


if __name__ == "__main__":
    main()
