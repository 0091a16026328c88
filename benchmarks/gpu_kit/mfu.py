"""Measure updates with different settings: tokens/s, fraction of the GPU's peak, and memory use.

    python benchmarks/gpu_kit/mfu.py [--size 0.5b|1.5b|7b] [--profile]
    python benchmarks/gpu_kit/mfu.py --device cpu --size tiny --tokens 1024 --length 256

The table compares the memory with the estimate of tools/plan_run.py. The model has random weights in the
shape of a Qwen2.5. Offload uses a single FSDP2 rank in this process.
"""

import dataclasses
import gc
import random
import sys
import tempfile
import time
from pathlib import Path
from typing import Literal

sys.path[:0] = [str(Path(__file__).parents[2]), str(Path(__file__).parents[1])]
import torch
import torch.distributed as dist
import tyro
from transformers import Qwen2Config, Qwen2ForCausalLM

import check_gpu
import grpo_trainer
import policy
from cluster.ranks import RankedPolicy, Ranks
from tools import plan_run

SHAPES = {  # hidden, intermediate, layers, heads, key-value heads, vocabulary, tied
    "tiny": (64, 128, 2, 4, 2, 512, True),
    "0.5b": (896, 4864, 24, 14, 2, 151936, True),
    "1.5b": (1536, 8960, 28, 12, 2, 151936, True),
    "7b": (3584, 18944, 28, 28, 4, 152064, False),
}
RECOMPUTED = dict(gradient_checkpointing=True)
WAYS = {
    "all weights": {},
    "checkpointing": RECOMPUTED,
    "LoRA": dict(lora_rank=32),
    "LoRA + checkpointing": dict(lora_rank=32) | RECOMPUTED,
    "KL + entropy + checkpointing": dict(kl_coef=0.01, entropy_coef=0.001) | RECOMPUTED,
    "offload + checkpointing": dict(policy_offload=True) | RECOMPUTED,
}


@dataclasses.dataclass
class Config:
    size: Literal[tuple(SHAPES)] = "1.5b"
    device: Literal["cuda", "cpu"] = "cuda"
    tokens: int = 16384  # Tokens per micro-batch; an update has two micro-batches.
    length: int = 2048  # Tokens per sample.
    profile: bool = False  # Profile "checkpointing", and write outputs/mfu_profile.txt.


def write_model(size: str, device) -> str:
    hidden, intermediate, layers, heads, kv_heads, vocabulary, tied = SHAPES[size]
    shape = Qwen2Config(
        vocab_size=vocabulary,
        hidden_size=hidden,
        intermediate_size=intermediate,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=kv_heads,
        max_position_embeddings=32768,
        tie_word_embeddings=tied,
        eos_token_id=1,
    )
    folder = tempfile.mkdtemp(prefix="mfu_")
    with torch.device(device):
        Qwen2ForCausalLM(shape).to(torch.bfloat16).save_pretrained(folder)
    return folder


def group_of(config: Config) -> list[policy.Sample]:
    rng = random.Random(0)
    words = SHAPES[config.size][5]
    samples = []
    for _ in range(max(2, 2 * config.tokens // config.length)):
        ids = [rng.randrange(2, words) for _ in range(config.length)]
        logprobs = [0.0] * (config.length - 64)
        samples.append(policy.Sample({}, ids[:64], ids[64:], logprobs, advantage=rng.gauss(0, 1)))
    return samples


def operations(model, config: Config, samples) -> float:
    """Return the operations of an update: 6 per weight and token, plus those of causal attention."""
    hidden, _, layers, *_ = SHAPES[config.size]
    weights = sum(parameter.numel() for name, parameter in model.named_parameters() if "lora_" not in name)
    tokens = sum(sample.length for sample in samples)
    return tokens * (6 * weights + 6 * layers * hidden * config.length)


def measure(config: Config, way: str, folder: str, store) -> str:
    """Return the row of the table for these settings."""
    device = torch.device("cuda:0" if config.device == "cuda" else "cpu")
    flags = dict(max_prompt_length=64, max_response_length=config.length - 64)
    flags |= dict(max_tokens_per_micro_batch=config.tokens, rollout="vllm", device=config.device)
    settings = grpo_trainer.Config(model=folder, train_file="", out_dir="", **flags, **WAYS[way])
    estimate = plan_run.estimate_memory(settings, config.device)
    planned = sum(gb or 0.0 for name, gb in estimate.items() if "host" not in name)
    begun = time.perf_counter()
    if settings.policy_offload:
        learner = RankedPolicy(settings, folder, device, Ranks(0, 1, f"127.0.0.1:{store.port}"))
    else:
        learner = policy.Policy(settings, folder, device)
    loaded = time.perf_counter() - begun
    samples = group_of(config)
    flops = operations(learner.model, config, samples)
    learner.update([samples], lr=0.0)  # This warms up and creates Adam's moments.
    _, seconds, peak, _ = check_gpu.measure(device, lambda: learner.update([samples], lr=0.0))
    named = learner.weights(torch.bfloat16)
    _, sent, *_ = check_gpu.measure(device, lambda: sum(tensor.nbytes for _, tensor in named))
    if config.profile and way == "checkpointing":
        with torch.profiler.profile() as profile:
            learner.update([samples], lr=0.0)
        table = profile.key_averages().table(sort_by=f"self_{config.device}_time_total", row_limit=25)
        Path("outputs/mfu_profile.txt").write_text(table)
    tokens = sum(sample.length for sample in samples)
    share = flops / seconds / check_gpu.peak_of(device)
    numbers = f"{planned:.2f} | {peak:.2f} | {loaded:.1f} | {seconds:.2f} | {tokens / seconds:,.0f}"
    return f"| {way} | {numbers} | {share:.1%} | {sent:.2f} |"


def main() -> None:
    config = tyro.cli(Config, description=__doc__)
    Path("outputs").mkdir(exist_ok=True)
    folder = write_model(config.size, config.device)
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    print(f"| {config.size} | GB plan | GB peak | s load | s update | tokens/s | of the peak | s weights |")
    print("| --- " + "| ---: " * 7 + "|")
    for way in WAYS:
        try:
            print(measure(config, way, folder, store), flush=True)
        except Exception as error:  # The other settings are still measured.
            text = " ".join(str(error).split())
            print(f"| {way} | failed: {type(error).__name__}: {text:.200} |", flush=True)
        gc.collect()
        if dist.is_initialized():
            dist.destroy_process_group()


if __name__ == "__main__":
    main()
