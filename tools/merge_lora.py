"""Merge a checkpoint of LoRA adapters into an ordinary model.

    python -m tools.merge_lora outputs/run/checkpoints/step_60 outputs/run/merged

OUT is a Hugging Face folder with the data type of the base model. Only the biases that route tokens to
experts and A_log of linear attention are always in float32. CHECKPOINT/adapter_config.json names the base
model; pass --model if it has moved. Merging needs 4 bytes of memory per weight. A LoRA run merges its last
checkpoint automatically.

Needs command_line.py, reward_worker.py, run_folder.py and causal_lm.py.
"""

import json
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import tyro

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
from command_line import IN_WORDS, cli, one_line_errors
from run_folder import add_end_tokens


@dataclass
class Config:
    """Settings for merging adapters."""

    # Checkpoint with LoRA adapters, such as outputs/run/checkpoints/step_60.
    checkpoint: tyro.conf.Positional[Path]
    out: tyro.conf.Positional[Path]  # Output directory of the merged model.
    # Base model, a folder or a Hub name. Default: the one that the checkpoint names.
    model: Annotated[str, IN_WORDS] = ""
    # New max_position_embeddings, as in --max-positions of the run. 0: the value of the base model.
    max_positions: int = 0
    trust_remote_code: bool = False  # Allow running Python code that comes with the base model.


def base_model_of(checkpoint: Path, model: str) -> str:
    """Return `model`, or else the base model that the adapters name. Raises ValueError without adapters."""
    adapters = checkpoint / "adapter_config.json"
    if not adapters.is_file():
        raise ValueError(
            f"{checkpoint}: contains no adapters (adapter_config.json); pass a checkpoint of a "
            "run with --lora-rank, because other checkpoints are complete models"
        )
    try:
        base = model or json.loads(adapters.read_bytes())["base_model_name_or_path"]
        Path(base)  # raises TypeError for null or a number
    except (ValueError, KeyError, TypeError) as error:
        raise ValueError(
            f"{checkpoint}: adapter_config.json names no base model ({error!r}); pass --model"
        ) from error
    return base


def merge(checkpoint: Path, out: Path, model="", max_positions=0, trust_remote_code=False) -> None:
    """Merge the adapters of a checkpoint into the base model, and write it and the tokenizer to `out`.

    A checkpoint without a tokenizer gets that of the base model.
    Raises ValueError if `checkpoint` has no adapters that can be merged, or if `out` is a file or one of the
    two inputs, and OSError if the disk is full.
    """
    base = base_model_of(checkpoint, model)
    is_input = out.resolve() == Path(base).resolve() or (out / "adapter_config.json").exists()
    if is_input or out.is_file():
        raise ValueError(
            f"{out}: is the base model or a checkpoint with adapters, which merging would "
            "overwrite, or a file; pass another directory"
        )
    import torch  # These imports take four seconds, and --help does not need them.
    from peft import PeftModel
    from safetensors import SafetensorError

    from causal_lm import (
        FLOAT32_NAMES,
        adapter_layers,
        is_tied,
        load_causal_lm,
        load_tokenizer,
        read_config,
    )

    try:
        # Other programs may save only the adapters.
        has_tokenizer = any(checkpoint.glob("tokenizer*.json"))
        tokenizer = load_tokenizer(str(checkpoint) if has_tokenizer else base, trust_remote_code)
        config = read_config(base, trust_remote_code)
        stored = config.dtype or config.get_text_config().dtype or torch.float32
        # The sum is computed in float32 and then rounded, as on the policy servers.
        whole = load_causal_lm(base, torch.float32, trust_remote_code, max_positions)
        adapted = PeftModel.from_pretrained(whole, checkpoint)
        kind = adapted.active_peft_config
        if kind.is_prompt_learning or getattr(kind, "layer_replication", None):
            raise ValueError("it tunes a prompt or repeats layers, so it works only with peft")
        for name in adapter_layers(whole):
            if is_tied(whole, name):
                raise ValueError(f"{name} shares its weight with another layer, which merging would change")
        whole = adapted.merge_and_unload()
    except (OSError, ValueError, RuntimeError, SafetensorError) as error:
        why = " ".join(str(error).split())
        raise ValueError(
            f"{checkpoint}: cannot be merged into {base} ({why:.300}); if the base model has moved, pass "
            "its new path as --model; if a file of the checkpoint is missing or truncated, pass another "
            "checkpoint"
        ) from error
    exact = {name: tensor for name, tensor in whole.state_dict().items() if name.endswith(FLOAT32_NAMES)}
    try:
        whole.to(stored).save_pretrained(out, state_dict=whole.state_dict() | exact)
    except SafetensorError as error:  # for example, because the disk is full
        raise OSError(f"{out}: cannot be written ({error}); free some space, and merge again") from error
    tokenizer.save_pretrained(out)
    add_end_tokens(out / "generation_config.json", tokenizer)
    print(f"merged model: {out}")


def main() -> None:
    config = cli(Config, __doc__, markers=[tyro.conf.PositionalMetavarFromFieldName])
    with one_line_errors():
        merge(**vars(config))


if __name__ == "__main__":
    main()
