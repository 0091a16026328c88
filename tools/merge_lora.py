"""LoRA adapters (by peft): put into a model for training, and merged into it as an ordinary model folder.

    python -m tools.merge_lora outputs/run/checkpoints/step_60 outputs/run/merged

OUT is a Hugging Face folder that every server and script here takes, in the numbers (bf16, say) of the base
model, whose folder is named in CHECKPOINT/adapter_config.json; --model names it where it has moved. It needs
4 bytes of memory for each weight. A run that trains adapters merges its last checkpoint by itself.

Left out: quantised base models, adapters of experts that are no linear layers. To copy it, take policy.py
and algorithm.py along.
"""

import json
import sys
from dataclasses import dataclass
from pathlib import Path

import torch
import tyro
from peft import LoraConfig, PeftModel
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer
from transformers.pytorch_utils import Conv1D

from policy import adapters_of, layers_of


@dataclass
class Config:
    """What is merged."""

    checkpoint: tyro.conf.Positional[Path]  # Folder of a checkpoint with adapters.
    out: tyro.conf.Positional[Path]  # Folder to be written.
    model: str = ""  # Folder or hub name of the base model; default: the one that the checkpoint names.
    max_positions: int = 0  # Sets max_position_embeddings, as the run did; 0: as the base model has it.
    trust_remote_code: bool = False  # Run code that comes with the model's folder.


def add_adapters(model, config, source: str) -> None:
    """Freezes the model and gives its layers adapters: those of the checkpoint `source`, or new ones.

    New ones change nothing yet (B is 0) and are the same for a seed. Adapters are float32; for a GPU the
    frozen layers become bf16, as which they are computed. config: the trainer's. ValueError where no layer
    has such a name, and where one has that is none of the usual linear layers.
    """
    if Path(source, "adapter_config.json").is_file():
        model.load_adapter(source, is_trainable=True)
    else:
        targets = "all-linear" if "all-linear" in config.lora_targets else list(config.lora_targets)
        alpha = config.lora_alpha or 2 * config.lora_rank
        settings = LoraConfig(r=config.lora_rank, lora_alpha=alpha, target_modules=targets)
        torch.manual_seed(config.seed)
        try:
            model.add_adapter(settings)
        except ValueError as error:
            raise ValueError(f"lora_targets: {' '.join(config.lora_targets)}: {error}") from error
        for name, layer in adapters_of(model):  # experts, and routers, which answer with more than a product
            kind = type(layer.get_base_layer())
            if not issubclass(kind, (torch.nn.Linear, Conv1D)) or "Router" in kind.__name__:
                raise ValueError(f"lora_targets: {name} is a {kind.__name__}, no plain linear layer; name "
                                 "the layers that are to learn, such as q_proj v_proj")  # fmt: skip
    base = Path(config.model).absolute() if Path(config.model).is_dir() else config.model
    model.peft_config["default"].base_model_name_or_path = str(base)
    for layer in layers_of(model, "lora_rank") if config.device == "cuda" else ():
        for parameter in layer.parameters():
            if not parameter.requires_grad:
                parameter.data = parameter.data.bfloat16()


def merge(checkpoint: Path, out: Path, model="", max_positions=0, trust_remote_code=False) -> None:
    """Writes the base model with the checkpoint's adapters merged into it, and the tokenizer, to `out`."""
    if not (settings := checkpoint / "adapter_config.json").is_file():
        raise ValueError(f"checkpoint: {checkpoint} has no adapter_config.json; take one of a LoRA run")
    base = model or json.loads(settings.read_text())["base_model_name_or_path"]
    remote = dict(trust_remote_code=trust_remote_code)
    stored = AutoConfig.from_pretrained(base, **remote).dtype or torch.float32
    # in float32, and only the sum is rounded: the same numbers as the policy's servers had
    whole = AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32, **remote)
    whole = PeftModel.from_pretrained(whole, checkpoint).merge_and_unload()
    whole.config.max_position_embeddings = max_positions or whole.config.max_position_embeddings
    whole.to(stored).save_pretrained(out)
    AutoTokenizer.from_pretrained(checkpoint, **remote).save_pretrained(out)


def main() -> None:
    config = tyro.cli(Config, description=__doc__)
    try:
        merge(**vars(config))
        print(f"merged: {config.out}")
    except (ValueError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        raise SystemExit(2) from error


if __name__ == "__main__":
    main()
