"""What is refused before the first step, so that nothing expensive starts in vain, and what a run will need.

    python grpo_trainer.py ... --dry-run       # checks everything, prints the configuration and an estimate of memory

Used by grpo_trainer.py, whose configuration `config` is everywhere. Each mistake is one line: the field, its value, the remedy.

Left out: memory of the judges' and the policy's vLLM servers, which take the share of a GPU that they are told.
"""

import dataclasses
import importlib.util
import json
import math
import os
import re
from dataclasses import asdict
from pathlib import Path

import ray
import torch
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

import genrm_server
import reward_loop
from prepare_data import read_rows
from policy import LOGITS_AT_ONCE
from cluster.policy_group import rank_bundles
from rollout import check_rollouts
from run_folder import check_folder, check_room
from cluster.sharding import layers_of

LEAST = {"group_size": 2, "total_steps": 0, "seed": -math.inf}  # a group of one has no advantage
LEAST |= dict.fromkeys(("train_batch_size", "mini_batch_size", "max_prompt_length", "max_response_length", "val_n", "clip_c",
                        "rollout_servers", "rollout_tensor_parallel", "rollout_batch_size", "policy_ranks"), 1)  # fmt: skip


def check(config) -> None:
    """Refuses what cannot work before anything expensive starts. config: as `settle` gives it back. Raises ValueError."""
    for name, value in asdict(config).items():
        if isinstance(value, (int, float)) and not value >= LEAST.get(name, 0):
            raise ValueError(f"{name}: {value} must be at least {LEAST.get(name, 0)}")
    if config.train_batch_size % config.mini_batch_size:
        raise ValueError(f"mini_batch_size: {config.mini_batch_size} does not divide train_batch_size {config.train_batch_size}")
    if not config.temperature > 0:
        raise ValueError(f"temperature: {config.temperature} must be above 0; greedy rollouts of a group are all the same")
    if not 0 < config.val_top_p <= 1:
        raise ValueError(f"val_top_p: {config.val_top_p} must be above 0 and at most 1")
    if config.policy_offload and config.policy_ranks == 1:
        raise ValueError("policy_offload: it is about the shards of several ranks; give --policy-ranks 2 or leave it off")
    if config.max_staleness:
        ahead = f"max_staleness: {config.max_staleness} rolls out and judges during the update"
        if config.rollout == "hf":
            raise ValueError(f"{ahead}, and --rollout hf in the same process cannot overlap with it; take vllm, or 0")
        if config.reward_mode == "colocate":
            raise ValueError(f"{ahead}, and --reward-mode colocate has the judge sleep then; take standalone, or 0")
        if config.replay:
            raise ValueError(f"{ahead}, and --replay rolls out nothing; take 0")
        if config.tis_cap is None:
            print(f"{ahead}, with weights that are older by then: --tis-cap 2 corrects for it, and is off")
    if config.overlong_buffer > config.max_response_length:
        limit = f"max_response_length {config.max_response_length}; lower it, 0 is no penalty"
        raise ValueError(f"overlong_buffer: {config.overlong_buffer} is larger than {limit}")
    judges = reward_loop.named("genrm", config.genrm).values()
    for name, value in [("model", config.model), *(("genrm", judge) for judge in judges)]:
        if not Path(value).is_dir() and (value.count("/") != 1 or value[0] in "./~"):
            raise ValueError(f"{name}: {value!r} is neither a folder nor a hub name such as Qwen/Qwen2.5-Math-7B")
    reward_loop.split_arguments("rollout_vllm_args", config.rollout_vllm_args)
    config.check_rewards()
    for name in ("tensorboard", "wandb"):
        if getattr(config, name) and not importlib.util.find_spec(name):
            raise ValueError(f"{name}: the package is not installed; run: pip install {name}")
    if config.replay:
        check_rollouts(config.replay, config.total_steps, config.group_size)
    check_folder(config)


def samples_itself(config) -> bool:
    """False for a replay without evaluations, in which nothing is sampled and nothing judged."""
    return not config.replay or bool(config.val_file)


def settle(config):
    """The configuration with what depends on this machine filled in."""
    device, rollout_gpus, genrm_gpus = place(config) if config.policy_ranks > 1 else deal_gpus(config, torch.cuda.device_count())
    if config.weight_sync == "nccl" and device == "cpu":
        raise ValueError("weight_sync: nccl sends from GPU to GPU, and the policy is on the CPU; take file")
    vllm_args = config.rollout_vllm_args
    if config.rollout_shares_gpus:
        check_sharing(config, device)
        rollout_gpus = by_name([device[5:]]) if device[5:] else ""  # Ray places those of several
        if "gpu-memory-utilization" not in vllm_args:  # vLLM's own default is nearly all, and the policy is there already
            vllm_args += " --gpu-memory-utilization 0.5"
    reward_fn = config.reward_fn
    if config.baseline:
        reward_fn = re.sub(r":\w*$", "", reward_fn or f"{reward_loop.HERE}/compute_score.py") + ":compute_score_baseline"
    budget = config.max_tokens_per_micro_batch or (2048 if device == "cpu" else 16384)
    return dataclasses.replace(config, device=device, rollout_gpus=rollout_gpus, genrm_gpus=genrm_gpus,
                               rollout_vllm_args=vllm_args, max_tokens_per_micro_batch=budget, reward_fn=reward_fn)  # fmt: skip


def check_sharing(config, device: str) -> None:
    """Refuses what --rollout-shares-gpus does not go with."""
    needed = config.rollout_servers * config.rollout_tensor_parallel
    for is_wrong, why in (
        (config.rollout == "hf", "with --rollout hf there are no servers; take vllm"),
        (device == "cpu", "vLLM cannot sleep on the CPU, where the policy is; leave it out"),
        (config.rollout_gpus, f"the servers get the policy's GPUs, and rollout_gpus is {config.rollout_gpus}; leave one out"),
        (config.weight_sync == "nccl", "weight_sync nccl cannot send within a GPU; take file"),
        (config.max_staleness, f"max_staleness {config.max_staleness} rolls out during the update, when servers sleep; take 0"),
        (needed > config.policy_ranks, f"rollout_servers x rollout_tensor_parallel is {needed}, and the policy is on "
                                       f"{config.policy_ranks} GPUs; lower one of them"),
    ):  # fmt: skip
        if is_wrong:
            raise ValueError(f"rollout_shares_gpus: {why}")


def deal_gpus(config, count: int) -> tuple[str, str, str]:
    """Device of the policy, GPUs of its servers and of the judges, out of `count`; each is the caller's word, where it is given.

    The judges get the first, then the servers, the policy the last. Raises ValueError where two would collide, or there are too
    few. Servers with a share of the memory of their own (--gpu-memory-utilization) may share the policy's GPU, and judges in
    colocate mode share any, as they sleep meanwhile.
    """
    policy = config.device if config.device != "auto" else f"cuda:{count - 1}" if count else "cpu"
    policy = "cuda:0" if policy == "cuda" else policy
    if not re.fullmatch(r"cpu|cuda:\d+", policy) or policy != "cpu" and not int(policy[5:]) < count:
        raise ValueError(f"device: {config.device!r} must be auto, cpu, cuda or cuda:N, and torch sees {count} GPUs")
    if policy == "cpu":  # servers of a policy on the CPU are on the CPU too; where judges are is their own matter
        return policy, config.rollout_gpus, config.genrm_gpus
    taken, dealt = {policy[5:]: "device"}, {}
    for name in ("genrm", "rollout"):
        needed = gpus_needed(config)[f"{name}_servers"]
        share = "gpu-memory-utilization" in getattr(config, f"{name}_vllm_args")
        sleeps = name == "genrm" and config.reward_mode == "colocate"
        chosen = [gpu for gpu in getattr(config, f"{name}_gpus").split(",") if gpu]
        elsewhere = name == "genrm" and os.environ.get("RAY_ADDRESS", "local") != "local"  # a cluster deals out its own GPUs
        if not chosen and needed and not elsewhere:
            free = [gpu for gpu in map(str, range(count)) if sleeps or gpu not in taken]
            chosen = (free + [policy[5:]] * (share and not free))[:needed]
            if len(chosen) < needed and not share:
                text = f"{needed} more GPUs are needed for {name}_servers, {len(chosen)} of {count} are free"
                raise ValueError(f"{name}_gpus: {text}; name those to share, with --gpu-memory-utilization in {name}_vllm_args")
        for gpu in chosen:
            if not (gpu.isdigit() and int(gpu) < count):
                raise ValueError(f"{name}_gpus: {gpu!r} is no GPU; write numbers such as 0,1, and torch sees {count} GPUs")
            if gpu in taken and not share and not sleeps:
                raise ValueError(f"{name}_gpus: GPU {gpu} is {taken[gpu]}'s; name others, or a share of its memory by "
                                 f'--{name}-vllm-args="--gpu-memory-utilization 0.4"')  # fmt: skip
            if not sleeps:
                taken[gpu] = f"{name}_gpus"
        dealt[name] = by_name(chosen)
    return policy, dealt["rollout"], dealt["genrm"]


def by_name(gpus: list[str]) -> str:
    """GPUs as CUDA_VISIBLE_DEVICES of another process names them, from the numbers that torch gives them in this one."""
    names = [name for name in os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",") if name]
    return ",".join(names[int(gpu)] for gpu in gpus) if names else ",".join(gpus)


def place(config) -> tuple[str, str, str]:
    """`deal_gpus` for a policy of several ranks: Ray, which is there already, deals out all GPUs, those of this machine too."""
    if config.rollout == "hf" and samples_itself(config):
        raise ValueError(f"policy_ranks: {config.policy_ranks} ranks need --rollout vllm; token by token they would gather every "
                         "layer for each token")  # fmt: skip
    for name in ("rollout_gpus", "genrm_gpus"):
        if getattr(config, name):
            raise ValueError(f"{name} is {getattr(config, name)}: with policy_ranks Ray deals out the GPUs; leave it out")
    if config.device not in ("auto", "cpu", "cuda"):
        raise ValueError(f"device: {config.device!r} is for one process, not for policy_ranks; take auto, cpu or cuda")
    have = ray.cluster_resources().get("GPU", 0)
    device = config.device if config.device != "auto" else "cuda" if have else "cpu"
    needs = gpus_needed(config)
    if device == "cuda" and sum(needs.values()) > have:
        text = " + ".join(f"{count} for {name}" for name, count in needs.items() if count)
        raise ValueError(f"policy_ranks: {text} are {sum(needs.values())} GPUs, the Ray cluster has {have:g}; lower one")
    return device, "", ""


def gpus_needed(config) -> dict[str, int]:
    """How many GPUs the ranks, the policy's servers and the judges take."""
    own_gpus = config.rollout == "vllm" and not config.rollout_shares_gpus
    servers = own_gpus * config.rollout_servers * config.rollout_tensor_parallel
    judges = len(config.genrm) * config.genrm_servers * config.genrm_tensor_parallel
    used = samples_itself(config)
    return {"policy_ranks": config.policy_ranks, "rollout_servers": used * servers, "genrm_servers": used * judges}


def load_tokenizer(source: str, config):
    tokenizer = AutoTokenizer.from_pretrained(source, trust_remote_code=config.trust_remote_code)
    if not tokenizer.chat_template:
        raise ValueError(f"model: the tokenizer of {source} has no chat template; take an instruct model or add one")
    return tokenizer


def load_rows(path: str, tokenizer, config) -> list[dict]:
    """The rows of a file, each with `prompt_ids`. Raises ValueError naming the file, the row and what is wrong."""
    rows, kept = read_rows(Path(path), ["data_source", "prompt", "reward_model", "extra_info"]), []
    for number, row in enumerate(rows):
        try:
            ids = tokenizer.apply_chat_template(row["prompt"], add_generation_prompt=True, tokenize=True, return_dict=False)
        except Exception as error:  # a template is a program that came with the model: it may raise anything
            text = f"{path} row {number}: the chat template refuses prompt {str(row['prompt'])[:200]} ({error})"
            raise ValueError(f"{text}; it must be a list of {{role, content}}") from error
        if len(ids) <= config.max_prompt_length:
            kept.append(row | {"prompt_ids": ids})
    if len(kept) < len(rows):
        print(f"{path}: dropped {len(rows) - len(kept)} of {len(rows)} rows with prompts over {config.max_prompt_length} tokens")
    if not kept:
        raise ValueError(f"{path}: no row is left; raise --max-prompt-length or look at the file")
    return kept


def check_sizes(source: str, rows: list[dict], config) -> int:
    """The tokens of the longest prompt and response. Raises ValueError where the model or the disk is too small for the run."""
    shape = AutoConfig.from_pretrained(source, trust_remote_code=config.trust_remote_code).get_text_config()
    longest = max(len(row["prompt_ids"]) for row in rows) + config.max_response_length
    if longest > (limit := getattr(shape, "max_position_embeddings", None) or math.inf):
        text = f"{config.max_response_length} and the longest prompt are {longest} tokens, the model takes {limit}"
        raise ValueError(f"max_response_length: {text}; lower it, or max_prompt_length")
    weights = count_parameters(config)[0]
    if weights and config.total_steps:  # an evaluation writes no checkpoint
        check_room(config, checkpoint=12e-9 * weights)
    return longest


def count_parameters(config) -> tuple[int, int, int] | tuple[None, None, None]:
    """The model's parameters, those of its largest layer, and those outside of layers, from its config.json; None: not known."""
    try:
        with torch.device("meta"):
            shape = AutoConfig.from_pretrained(config.model, trust_remote_code=config.trust_remote_code)
            model = AutoModelForCausalLM.from_config(shape, trust_remote_code=config.trust_remote_code)
        of_layers = [sum(parameter.numel() for parameter in layer.parameters()) for layer in layers_of(model, "")] or [0]
    except Exception:  # families' own code, which need not be able to build a model without data
        return None, None, None
    weights = sum(parameter.numel() for parameter in model.parameters())
    return weights, max(of_layers), weights - sum(of_layers)


def estimate_memory(config, device: str) -> dict[str, float | None]:
    """Rough GB by use on the policy's device, or each of its ranks', from the model's config.json alone; None: not known.

    A step holds the update's part or the rollout's, not both.
    """
    text = AutoConfig.from_pretrained(config.model, trust_remote_code=config.trust_remote_code).get_text_config()
    weights, of_layer, outside = count_parameters(config)
    part = weights and weights / config.policy_ranks
    longest = config.max_prompt_length + config.max_response_length
    tokens = max(config.max_tokens_per_micro_batch or 16384, longest)
    sequences = min(config.rollout_batch_size, config.train_batch_size * config.group_size)
    try:
        layers, hidden, heads = text.num_hidden_layers, text.hidden_size, text.num_attention_heads
        kv_size = (getattr(text, "num_key_value_heads", None) or heads) * (getattr(text, "head_dim", None) or hidden // heads)
        layer = tokens * (10 * hidden + 4 * getattr(text, "intermediate_size", 4 * hidden))  # what its backward pass needs
        kept = tokens * hidden * layers + layer if config.gradient_checkpointing else layer * layers
        kept += 6 * min(LOGITS_AT_ONCE[device], tokens * text.vocab_size)
        cache = 2 * layers * kv_size * longest * sequences / (2 if device == "cuda" else 1)
    except Exception:  # other names, or one number a layer: configurations raise errors of their own kinds
        kept = cache = None
    numbers = {"weights": part, "gradients": part, "Adam": part and 2 * part}
    numbers |= {"reference model": part} if config.kl_coef else {}
    if config.policy_offload and device == "cuda":
        numbers = {f"in the host's memory, of each rank: {name}": number for name, number in numbers.items()}
    numbers["update: activations of a micro-batch"] = kept
    numbers |= {"rollout: key-value cache": cache} if config.rollout == "hf" else {}
    copies = weights and weights / 2  # in bf16: kept for the backward pass, and from token to token
    if config.policy_ranks > 1:  # two layers at a time, in bf16 on a GPU, and embedding and head in float32, with gradients twice
        numbers["update: gathered weights"] = weights and 3 * outside + 3 * of_layer
    elif device == "cuda":
        numbers |= {"update: weights in bf16": copies} if not config.gradient_checkpointing else {}
        numbers |= {"rollout: weights in bf16": copies} if config.rollout == "hf" else {}
    return {name: count and 4e-9 * count for name, count in numbers.items()}  # float32


def report(config, train_rows: list[dict]) -> None:
    """What --dry-run prints."""
    device = torch.device(config.device)
    print(json.dumps(asdict(config), indent=2))
    prompts = config.total_steps * config.train_batch_size
    print(f"{config.total_steps} steps take {prompts} prompts, {prompts / len(train_rows):.1f} epochs of {len(train_rows)}")
    estimate, where = estimate_memory(config, device.type), device
    have = 1e-9 * os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    if config.policy_ranks > 1:
        for node, held in placement(config).items():
            print(f"{node}: {', '.join(held)}")
        if config.rollout_shares_gpus:
            print(f"{config.rollout_servers} policy servers: on the ranks' own GPUs, in turns with them")
        where, have = f"each of {config.policy_ranks} ranks, {device}", gpu_memory() if device.type == "cuda" else have
    elif device.type == "cuda":
        have = 1e-9 * torch.cuda.get_device_properties(device).total_memory
    for name, gb in estimate.items():
        print(f"{gb:9.2f} GB  {name}" if gb is not None else f"  unknown     {name}")
    phases = [sum(gb or 0.0 for name, gb in estimate.items() if name.startswith(phase)) for phase in ("update", "rollout")]
    peak = sum(gb or 0.0 for name, gb in estimate.items() if ":" not in name) + max(phases)
    remedy = "lower --max-tokens-per-micro-batch or --rollout-batch-size, --gradient-checkpointing, or more --policy-ranks"
    known = "at the peak, roughly" if None not in estimate.values() else "of what is known, at the peak"
    print(f"{peak:9.2f} GB  {known}, of {have:.1f} GB on {where}: " + (f"too little; {remedy}" if peak > have else "it fits"))


def placement(config) -> dict[str, list[str]]:
    """What Ray would place on which node (its address), found out by reserving it all and giving it back at once."""
    used = samples_itself(config)
    judges = [dataclasses.replace(judge, device=config.device) for judge in config.server_configs().values() if used]
    count = config.rollout_servers if used and not config.rollout_shares_gpus else 0
    servers = genrm_server.Config("", num_servers=count, tensor_parallel_size=config.rollout_tensor_parallel,
                                  device=config.device)  # fmt: skip
    wanted = {"rank": rank_bundles(config)}
    wanted |= {"judge": genrm_server.reserved(judges), "policy server": genrm_server.reserved([servers])}
    addresses, held, groups = {node["NodeID"]: node["NodeManagerAddress"] for node in ray.nodes()}, {}, []
    try:
        for name, (bundles, strategy) in wanted.items():
            if not bundles:
                continue
            group, nodes = genrm_server.hold(bundles, strategy, name)
            groups.append(group)
            for number, (bundle, node) in enumerate(zip(bundles, nodes)):
                gpus = f" ({count} GPUs)" if (count := bundle.get("GPU", 0)) > 1 else ""
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
