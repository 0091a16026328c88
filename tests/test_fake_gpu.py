"""The policy on a simulated GPU: mixing devices or types fails, and bytes are counted."""

import shutil
import sys
from pathlib import Path

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

sys.path.insert(0, str(Path(__file__).parent.parent / "benchmarks"))
import fake_gpu

WAYS = {
    "all weights": "",
    "two terms, recomputed": "--kl-coef 0.1 --entropy-coef 0.1 --tis-cap 2 --gradient-checkpointing",
    "adapters": "--lora-rank 8 --kl-coef 0.1",
    "2 ranks": "--policy-ranks 2 --entropy-coef 0.1",
    "4 ranks, recomputed": "--policy-ranks 4 --gradient-checkpointing --kl-coef 0.1",
    "8 ranks, adapters": "--policy-ranks 8 --lora-rank 8 --gradient-checkpointing",
    "2 ranks, in the host's memory": "--policy-ranks 2 --policy-offload",
}
pytestmark = pytest.mark.slow
RUN = "--train-file t --out-dir o --max-prompt-length 64 --max-response-length 192"


@pytest.fixture(scope="module")
def found():
    if not shutil.which("g++"):
        pytest.skip("needs g++")
    base = ["--model", fake_gpu.folder_of("tiny"), *RUN.split(), "--max-tokens-per-micro-batch", "512"]
    results = fake_gpu.in_child([base + flags.split() for flags in WAYS.values()])
    return dict(zip(WAYS, results, strict=True))


def numel():
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(fake_gpu.folder_of("tiny")))
    return sum(parameter.numel() for parameter in model.parameters())


def test_types_and_devices(found):
    """Weights, gradients and moments are float32 on the GPU. Frozen weights and servers use bf16."""
    moments = ["exp_avg torch.float32 cuda", "exp_avg_sq torch.float32 cuda"]
    rest = ["gradients torch.float32 cuda", "sent torch.bfloat16 cuda", "step torch.float32 cuda"]
    on_gpu = [*moments, *rest, "weights torch.float32 cuda"]
    for way, result in found.items():
        kinds = list(on_gpu)
        if "adapters" in way:
            kinds.append("weights torch.bfloat16 cuda")
        if "host" in way:
            kinds = [kind if "sent" in kind else kind.replace("cuda", "cpu") for kind in kinds]
        assert result["kinds"] == sorted(kinds), way


def test_what_is_held_between_updates(found):
    """A weight takes 16 bytes, divided by the number of ranks, and 4 more with a reference model."""
    size = numel()
    assert found["all weights"]["held"]["cuda"] == pytest.approx(16 * size, rel=0.02)
    assert found["two terms, recomputed"]["held"]["cuda"] == pytest.approx(20 * size, rel=0.02)
    assert found["2 ranks"]["held"]["cuda"] == pytest.approx(8 * size, rel=0.02)
    host = found["2 ranks, in the host's memory"]["held"]
    assert host["cpu"] == pytest.approx(8 * size, rel=0.02)
    assert found["adapters"]["held"]["cuda"] < 0.4 * found["all weights"]["held"]["cuda"]


def test_the_peak_is_smaller_where_activations_are_computed_again(found):
    peak = {way: result["peak"]["cuda"] for way, result in found.items()}
    assert peak["two terms, recomputed"] < peak["all weights"]
    assert peak["8 ranks, adapters"] < 0.7 * peak["adapters"]
    assert peak["2 ranks, in the host's memory"] < peak["2 ranks"]
