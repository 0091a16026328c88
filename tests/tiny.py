"""Tiny policies and steps of samples for several test files."""

import base64
import json
import math
import tempfile
from pathlib import Path

import torch
from safetensors.torch import save_file
from transformers import AutoModelForCausalLM

import grpo_trainer
from algorithm import compute_advantages
from policy import Policy, Sample
from rollout import rollout_hf

CPU = torch.device("cpu")
WORKED = Path(__file__).parent.parent / "recipes/advantages.py"
PROMPTS = [[5, 6, 7], [8], [9, 10, 11, 12], [13, 14]]


def worked(name, **settings):
    """Return the trainer's settings for one of the worked examples of advantages."""
    return dict(advantage=f"{WORKED}:{name}", advantage_kwargs=json.dumps(settings))


def terms(**weights):
    return worked("terms", weights=weights)


def config_of(**changes):
    defaults = dict(
        model="m",
        train_file="t",
        out_dir="o",
        group_size=4,
        train_batch_size=4,
        mini_batch_size=4,
        lr=1e-2,
        max_tokens_per_micro_batch=2048,
    )
    return grpo_trainer.Config(**(defaults | changes))


def policy_of(a_model, **changes):
    """Return a Policy with a copy of this model."""
    with tempfile.TemporaryDirectory() as folder:
        a_model.save_pretrained(folder)
        return Policy(config_of(**{"model": folder} | changes), folder, CPU)


def with_sgd(policy):
    """Replace AdamW with plain SGD, so that the weights show the gradient."""
    policy.optimizer = torch.optim.SGD(policy.model.parameters(), lr=0.0)
    return policy


def weights_of(policy):
    return torch.cat([parameter.detach().flatten() for parameter in policy.model.parameters()])


def samples_of(prompts, group_size):
    return [Sample({}, prompt) for prompt in prompts for _ in range(group_size)]


def groups_of(samples, group_size=4):
    return [samples[start : start + group_size] for start in range(0, len(samples), group_size)]


def roll_out(
    model,
    prompts,
    group_size=2,
    temperature=1.0,
    length=12,
    seed=7,
    eos_ids=(1,),
    rollout_batch_size=512,
    **options,
):
    """Sample `group_size` responses to each prompt in this process."""
    samples = samples_of(prompts, group_size)
    rollout_hf(
        model,
        samples,
        max_response_length=length,
        temperature=temperature,
        eos_ids=set(eos_ids),
        seed=seed,
        rollout_batch_size=rollout_batch_size,
        **options,
    )
    return samples


def set_rewards(samples, rewards_P_G):
    """Set results and advantages as the trainer would. NaN means no verdict."""
    advantages = compute_advantages(rewards_P_G).flatten().tolist()
    for sample, reward, advantage in zip(samples, rewards_P_G.flatten().tolist(), advantages):
        known = not math.isnan(reward)
        sample.result = {
            "reward_score": reward if known else None,
            "reward_extra_info": {},
            "status": "ok" if known else "no_verdict",
        }
        sample.advantage = advantage if known else None
    return samples


def a_step(model, seed=0, length=10):
    """Return a step of 4 prompts x 4 samples with random rewards, one of them without a verdict."""
    rewards = torch.randint(-1, 2, (4, 4), generator=torch.Generator().manual_seed(seed)).float()
    rewards[0, 1] = math.nan
    return set_rewards(roll_out(model, PROMPTS, group_size=4, length=length), rewards)


def write_model(folder: Path, model, tokenizer) -> str:
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return str(folder)


def add_tekken(folder: Path) -> None:
    """Add a tekken.json to a folder, and a type of models whose tokenizer transformers reads from it."""
    config = folder / "config.json"
    about = json.loads(config.read_text()) if config.exists() else {}
    config.write_text(json.dumps(about | {"model_type": "mistral"}))
    tokens = []
    for byte in range(256):
        letter = base64.b64encode(bytes([byte])).decode()
        tokens.append({"rank": byte, "token_bytes": letter, "token_str": None})
    shape = dict(pattern=".+", version="v3", num_vocab_tokens=256)
    shape |= dict(default_vocab_size=1256, default_num_special_tokens=1000)
    (folder / "tekken.json").write_text(json.dumps({"config": shape, "vocab": tokens}))


def read_again(policy, folder: Path):
    """Return the model that a server would make from the policy's weights."""
    weights = {name: weight.clone() for name, weight in policy.weights()}
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    policy.model.config.save_pretrained(folder)
    how = policy.model.config._attn_implementation
    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation=how).eval()
