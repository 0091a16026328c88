"""TRL's GRPOTrainer with the settings of grpo_trainer.py, for bench_trainer.py and other benchmarks.

    pip install --target ~/trl --no-deps "trl==1.16.*" datasets multiprocess pandas

TRL is imported only if a trainer is made.
"""

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer


def new_trainer(job: dict, reward, rows: dict[str, list], callback, kind=None):
    """Return a GRPOTrainer, for float32 on the CPU by default, whose `train` has not been called.

    Args:
        job: The settings: `model`, `folder` (for output), `steps`, `samples` (per step), `group`
            (samples per prompt), `length` (of a response), `lr`, `warmup` (steps), `checkpointing`, `seed`,
            and optionally `options`, which replace arguments of GRPOConfig.
        reward: A reward function of TRL.
        rows: The columns of the training data, in the order of the steps.
        callback: A TrainerCallback.
        kind: A subclass of GRPOTrainer to use instead of it.
    """
    from datasets import Dataset
    from trl import GRPOConfig, GRPOTrainer

    model = AutoModelForCausalLM.from_pretrained(job["model"], dtype=torch.float32)
    arguments = dict(
        output_dir=job["folder"],
        use_cpu=True,
        bf16=False,
        gradient_checkpointing=job["checkpointing"],
        max_steps=job["steps"],
        per_device_train_batch_size=job["samples"],
        num_generations=job["group"],
        max_completion_length=job["length"],
        temperature=1.0,
        loss_type="dapo",
        scale_rewards="group",
        epsilon=0.2,
        epsilon_high=0.28,
        beta=0.0,
        max_grad_norm=1.0,
        shuffle_dataset=False,
        seed=job["seed"],
        report_to="none",
        save_strategy="no",
        logging_strategy="no",
        disable_tqdm=True,
    )
    args = GRPOConfig(**arguments | job.get("options", {}))
    # TRL's own warm-up begins at 0, and its weight decay excludes norms. Ours does neither.
    optimizer = torch.optim.AdamW(model.parameters(), lr=job["lr"], weight_decay=0.1, fused=True)
    warmup = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda done: min(1.0, (done + 1) / job["warmup"]))
    return (kind or GRPOTrainer)(
        model,
        reward,
        args,
        Dataset.from_dict(rows),
        processing_class=AutoTokenizer.from_pretrained(job["model"], padding_side="left"),
        callbacks=[callback],
        optimizers=(optimizer, warmup),
    )


def set_end_tokens(trainer, ids: list[int]) -> None:
    """Replace the tokens that end a response."""
    trainer.generation_config.eos_token_id = trainer.generation_kwargs["eos_token_id"] = ids
    trainer.eos_token_ids = ids
