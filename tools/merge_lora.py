"""A checkpoint of adapters (LoRA) as an ordinary model.

    python -m tools.merge_lora outputs/run/checkpoints/step_60 outputs/run/merged

OUT is a Hugging Face folder that every server and script here takes, in the numbers (bf16, say) of the base
model, whose folder is named in CHECKPOINT/adapter_config.json; --model names it where it has moved. It needs
4 bytes of memory for each weight. A run that trains adapters merges its last checkpoint by itself.
Needs run_folder.py.
"""

import json
import sys
from dataclasses import dataclass
from pathlib import Path

import torch
import tyro
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

from run_folder import add_end_tokens


@dataclass
class Config:
    """What is merged."""

    checkpoint: tyro.conf.Positional[Path]  # Folder of a checkpoint with adapters.
    out: tyro.conf.Positional[Path]  # Folder to be written.
    model: str = ""  # Folder or hub name of the base model; default: the one that the checkpoint names.
    max_positions: int = 0  # Sets max_position_embeddings, as the run did; 0: as the base model has it.
    trust_remote_code: bool = False  # Run code that comes with the model's folder.


def merge(checkpoint: Path, out: Path, model="", max_positions=0, trust_remote_code=False) -> None:
    """Writes the base model with the checkpoint's adapters merged into it, and the tokenizer, to `out`."""
    from peft import PeftModel  # here: each run imports this file at its end

    settings = json.loads((checkpoint / "adapter_config.json").read_text())
    base = model or settings["base_model_name_or_path"]
    remote = dict(trust_remote_code=trust_remote_code)
    stored = AutoConfig.from_pretrained(base, **remote).dtype or torch.float32
    # in float32, and only the sum is rounded: the same numbers as the policy's servers had
    whole = AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32, **remote)
    whole = PeftModel.from_pretrained(whole, checkpoint).merge_and_unload()
    if max_positions:
        whole.config.max_position_embeddings = max_positions
    whole.generation_config.do_sample = True  # or transformers refuses to save a temperature
    whole.to(stored).save_pretrained(out)
    tokenizer = AutoTokenizer.from_pretrained(checkpoint, **remote)
    tokenizer.save_pretrained(out)
    add_end_tokens(out / "generation_config.json", tokenizer)
    print(f"merged: {out}")


def main() -> None:
    config = tyro.cli(Config, description=__doc__)
    try:
        merge(**vars(config))
    except (ValueError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        raise SystemExit(2) from error


if __name__ == "__main__":
    main()
