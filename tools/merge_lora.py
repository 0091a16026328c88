"""A checkpoint of adapters (LoRA) as an ordinary model.

    python -m tools.merge_lora outputs/run/checkpoints/step_60 outputs/run/merged

OUT is a Hugging Face folder that every server and script here takes, in the numbers (bf16, say) of the base
model, whose folder is named in CHECKPOINT/adapter_config.json; --model names it where it has moved. It needs
4 bytes of memory for each weight. A run that trains adapters merges its last checkpoint by itself.
Needs lora.py.
"""

import sys
from dataclasses import dataclass
from pathlib import Path

import tyro

from lora import merge


@dataclass
class Config:
    """What is merged."""

    checkpoint: tyro.conf.Positional[Path]  # Folder of a checkpoint with adapters.
    out: tyro.conf.Positional[Path]  # Folder to be written.
    model: str = ""  # Folder or hub name of the base model; default: the one that the checkpoint names.
    max_positions: int = 0  # Sets max_position_embeddings, as the run did; 0: as the base model has it.
    trust_remote_code: bool = False  # Run code that comes with the model's folder.


def main() -> None:
    config = tyro.cli(Config, description=__doc__)
    try:
        merge(**vars(config))
    except (ValueError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        raise SystemExit(2) from error


if __name__ == "__main__":
    main()
