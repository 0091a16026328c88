"""Models with random weights, samples and timed updates, for check_gpu.py, bench_trainer.py and stages.py.

The logits of the models are scaled to an entropy of about four nats: near a uniform distribution, every
sampler would agree with every trainer. Not covered: the models' quality, several devices.
"""

import math
import random
import time
from functools import partial
from pathlib import Path

import torch
from transformers import AutoConfig, AutoModelForCausalLM

from measuring import groups_of
import policy
from toy import toy_world, warm_start

PEAK = {
    "NVIDIA H200": 989e12,
    "NVIDIA H100 80GB HBM3": 989e12,
    "NVIDIA A100": 312e12,
}  # dense bf16; the script measures the peak of other GPUs
NAMES = ("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads")
NAMES += ("num_key_value_heads", "vocab_size", "tie_word_embeddings")
SHAPES = {  # the values of NAMES
    "tiny": (64, 128, 2, 4, 2, 512, True),
    "0.6b": (1024, 3072, 28, 16, 8, 151936, True),  # Qwen3-0.6B
    "1b": (2048, 6144, 16, 16, 2, 151936, True),
    "7b": (3584, 18944, 28, 28, 4, 152064, False),
}


def new_model(size: str, device):
    """Return a model with random weights, in the shape of a Qwen2 or Qwen3."""
    shape = AutoConfig.for_model(
        "qwen3" if size == "0.6b" else "qwen2",
        **dict(zip(NAMES, SHAPES[size])),
        max_position_embeddings=32768,
        pad_token_id=0,
        eos_token_id=1,
        bos_token_id=None,
    )
    with torch.device(device):  # A CPU would draw a billion random numbers slowly.
        return AutoModelForCausalLM.from_config(shape)


def toy_problems(count: int) -> list[toy_world.Problem]:
    rng = random.Random(0)
    return [toy_world.random_problem(rng, toy_world.REMAINDER) for _ in range(count)]


def toy_tokenizer():
    return warm_start.build_tokenizer(warm_start.tokenizer_corpus(random.Random(0)))


@torch.no_grad()
def write_model(model, tokenizer, folder: Path) -> None:
    """Save a model with its logits scaled to an entropy of about four nats.

    For normally distributed logits the entropy is log V - variance / 2.
    """
    logits = model(torch.arange(64, device=model.device)[None]).logits
    model.model.norm.weight *= math.sqrt(2 * (math.log(model.config.vocab_size) - 4)) / logits.std(-1).mean()
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def random_samples(learner, length: int, count: int) -> list[policy.Sample]:
    """Return samples of random tokens with the learner's log-probabilities. Prompts have 32 tokens."""
    rng, words = random.Random(0), learner.model.config.vocab_size
    samples = []
    for _ in range(count):
        ids = [rng.randrange(2, words) for _ in range(32 + length)]
        samples.append(policy.Sample({}, ids[:32], ids[32:], advantage=rng.gauss(0, 1)))
    for sample, logprobs in learner.logprobs_of(samples):
        sample.rollout_logprobs = logprobs.tolist()
    return samples


def time_update(learner, samples, device) -> tuple[dict, dict]:
    """Measure an update, and return what was measured and the update's metrics.

    An update has six operations per weight and token, and those of causal attention.
    """
    shape, weights = learner.model.config, 0
    for name, parameter in learner.model.named_parameters():
        weights += parameter.numel() * ("lora_" not in name)
    if not shape.tie_word_embeddings:
        weights -= learner.model.get_input_embeddings().weight.numel()  # It is a lookup, not a product.
    tokens = sum(sample.length for sample in samples)
    operations = 6 * weights * tokens
    width = shape.num_hidden_layers * shape.hidden_size
    operations += 6 * width * sum(sample.length**2 for sample in samples)
    update = partial(learner.update, groups_of(samples), lr=0.0)
    _, first, *_ = measure(device, update)  # warms up
    metrics, seconds, peak, _ = measure(device, update)
    found = {"first_s": first, "update_s": seconds, "tokens_per_s": tokens / seconds, "peak_gb": peak}
    return found | {"of_peak": operations / seconds / peak_of(device), "m_weights": 1e-6 * weights}, metrics


def peak_of(device) -> float:
    """Return bf16 operations per second: the vendor's figure, or the measured speed of a large product.

    On a CPU, the product is small, because the figure only serves to test the other functions.
    """
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else "CPU"
    for start, rate in PEAK.items():
        if name.startswith(start) and not name.endswith(("NVL", "PCIe")):
            return rate
    size = 128 if name == "CPU" else 8192
    a = torch.randn(size, size, device=device, dtype=torch.bfloat16)
    return 40 * size**3 / min(measure(device, lambda: [a @ a for _ in range(20)])[1] for _ in range(3))


def measure(device, function):
    """Return the function's result, its seconds, the GPU's peak memory, and the peak above the start.

    Memory is in GB and 0 on a CPU.
    """
    cuda, peak, before = torch.cuda if device.type == "cuda" else None, 0, 0
    if cuda:
        cuda.empty_cache()
        cuda.reset_peak_memory_stats(device)
        cuda.synchronize(device)
        before = cuda.memory_allocated(device)
    begun, result = time.perf_counter(), function()
    if cuda:
        cuda.synchronize(device)
        peak = cuda.max_memory_allocated(device)
    return result, time.perf_counter() - begun, 1e-9 * peak, 1e-9 * (peak - before)
