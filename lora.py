"""LoRA by peft: adapters put into a model for training.

    add(model, config, source)           # freezes the model; what learns from then on is its adapters

Used by policy.py. Needs none of our other files. Left out: merging (tools/), quantised bases, adapters of
experts that are no linear layers.
"""

import contextlib
from collections import Counter
from pathlib import Path

import torch
from peft import LoraConfig, set_peft_model_state_dict
from peft.tuners.lora import LoraLayer
from peft.tuners.tuners_utils import cast_adapter_dtype
from safetensors.torch import load_file
from transformers.pytorch_utils import Conv1D


def add(model, config, source: str) -> None:
    """Freezes the model and gives its layers adapters, in float32: those of the checkpoint `source`, or new.

    New ones change nothing yet (B is 0) and are the same for a seed. config: the trainer's. ValueError where
    no layer has such a name, and where one has that is none of the usual linear layers.
    """
    targets = list(config.lora_targets)
    if "all-linear" in targets:
        targets = "all-linear"
    settings = LoraConfig(
        r=config.lora_rank,
        lora_alpha=config.lora_alpha or 2 * config.lora_rank,
        target_modules=targets,
        task_type="CAUSAL_LM",
    )
    model.add_adapter(settings)
    cast_adapter_dtype(model, "default")
    torch.manual_seed(config.seed)
    for name, layer in layers_with_adapters(model).items():
        kind = type(layer.get_base_layer())
        # Experts are none; a router answers with more than a product; a tied head is the embedding, too.
        is_linear = issubclass(kind, (torch.nn.Linear, Conv1D)) and "Router" not in kind.__name__
        if not is_linear or (name == "lm_head" and model.config.tie_word_embeddings):
            raise ValueError(f"lora_targets: {name} is a {kind.__name__}, no plain linear layer of its own; "
                             "name the layers that are to learn, such as q_proj v_proj")  # fmt: skip
        layer.reset_lora_parameters("default", True)
    saved = Path(source, "adapter_model.safetensors")
    if saved.is_file():
        before = LoraConfig.from_pretrained(source)
        if (before.r, before.lora_alpha) != (settings.r, settings.lora_alpha):
            raise ValueError(f"lora_rank, lora_alpha: {source} has {before.r} and {before.lora_alpha}; give "
                             "the run's own")  # fmt: skip
        found = set_peft_model_state_dict(model, load_file(saved))
        wrong = found.unexpected_keys + [name for name in found.missing_keys if ".lora_" in name]
        if wrong:
            raise ValueError(f"lora_targets: {source} has adapters of other layers, as {wrong[0]} tells; "
                             "give the run's own")  # fmt: skip


def layers_with_adapters(model):
    """By their names."""
    return {name: module for name, module in model.named_modules() if isinstance(module, LoraLayer)}


def describe(model):
    """Which layers have adapters."""
    kinds = Counter(name.rpartition(".")[2] for name in layers_with_adapters(model))
    return f"layers with adapters: {dict(kinds)}"


@contextlib.contextmanager
def off(model):
    """Inside, the model computes what it did before it got adapters.

    By their scale: peft's own switch also freezes them, which FSDP does not take.
    """
    layers = layers_with_adapters(model).values()
    try:
        for layer in layers:
            layer.set_scale("default", 0.0)
        yield
    finally:
        for layer in layers:
            layer.set_scale("default", 1.0)


@torch.no_grad()
def merged(model):
    """Name and tensor of each weight of the model as it was before it got adapters, with what they add.

    A layer's is W + alpha / rank * B @ A, in float32; of a model over many ranks it is as split as W.
    """
    layers = layers_with_adapters(model)
    for name, tensor in model.state_dict().items():
        layer = layers.get(name.removesuffix(".base_layer.weight"))
        if layer is not None:
            tensor = tensor + layer.get_delta_weight("default")
        if ".lora_" not in name:
            yield name.replace(".base_layer.", "."), tensor
