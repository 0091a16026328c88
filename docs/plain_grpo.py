"""Plain GRPO on one page: rollouts, rewards, advantages, clipped loss, update.

    python docs/plain_grpo.py        # 15 seconds on a CPU: mean reward 0.04 -> 1.00 in 20 steps

The task is to write the digit 3 at least eight times. This script needs no Ray, server or judge.
grpo_trainer.py adds real rewards, logs and checkpoints; policy.py makes the same update in micro-batches.
"""

import sys
from pathlib import Path

import torch
from transformers import AutoTokenizer

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))
from algorithm import compute_advantages, compute_policy_loss
from causal_lm import load_causal_lm, logprobs_and_entropy, mask_of, padded
from policy import Sample, entropy_of
from rollout import rollout_hf

MODEL = str(ROOT / "toy/models/policy")
PROMPTS = ["Ben has 65 eggs, gets 9.", "Ann has 12 nuts, loses 8."]

tokenizer = AutoTokenizer.from_pretrained(MODEL)
model = load_causal_lm(MODEL, torch.float32)
optimizer = torch.optim.AdamW(model.parameters(), lr=3e-4, weight_decay=0.1)
sampling = dict(max_response_length=32, temperature=1.0, eos_ids={tokenizer.eos_token_id})

for step in range(1, 21):
    groups = []
    for prompt in PROMPTS:
        messages = [{"role": "user", "content": prompt}]
        ids = tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=False)
        groups.append([Sample(row={}, prompt_ids=ids) for _ in range(16)])
    rollout_hf(model, sum(groups, []), seed=step, rollout_batch_size=64, **sampling)
    texts = [[tokenizer.decode(sample.response_ids) for sample in group] for group in groups]
    rewards_P_G = torch.tensor([[min(text.count("3"), 8) / 8 for text in group] for group in texts])
    for group, advantages_G in zip(groups, compute_advantages(rewards_P_G)):  # one update per prompt
        counts = [len(sample.response_ids) for sample in group]
        sequences = [sample.prompt_ids + sample.response_ids for sample in group]
        logprobs_G_T, _ = logprobs_and_entropy(model, sequences, counts, temperature=1.0)
        old_G_T = padded([sample.rollout_logprobs for sample in group], model.device)
        mask_G_T = mask_of(counts, model.device)
        loss, _ = compute_policy_loss(logprobs_G_T, old_G_T, advantages_G, mask_G_T, sum(counts))
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), max_norm=1.0)
        optimizer.step()
    print(f"step {step}: mean reward {rewards_P_G.mean():.2f}, entropy {entropy_of(groups):.2f}")
