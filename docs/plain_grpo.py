"""Plain GRPO with policy.py, rollout.py, algorithm.py and the options of settings.py.

    python docs/plain_grpo.py        # 15 seconds on a CPU: mean reward 0.04 -> 0.9 in 20 steps

The task is to write the digit 3 at least eight times. This script needs no Ray, server or judge.
grpo_trainer.py adds real rewards, logs and checkpoints.
"""

import sys
from pathlib import Path

import torch
from transformers import AutoTokenizer

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))
from algorithm import compute_advantages
from policy import Policy, Sample
from rollout import rollout_hf
from settings import PolicyOptions

MODEL = str(ROOT / "toy/models/policy")
PROMPTS = ["Ben has 65 eggs, gets 9.", "Ann has 12 nuts, loses 8."]

tokenizer = AutoTokenizer.from_pretrained(MODEL)
options = PolicyOptions(model=MODEL, mini_batch_size=1, lr=3e-4)
policy = Policy(options, MODEL, torch.device("cpu"))

for step in range(1, 21):
    groups = []
    for prompt in PROMPTS:
        messages = [{"role": "user", "content": prompt}]
        ids = tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=False)
        groups.append([Sample({}, ids) for _ in range(16)])
    rollout_hf(
        policy.model,
        sum(groups, []),
        max_response_length=32,
        temperature=1.0,
        seed=step,
        eos_ids={tokenizer.eos_token_id},
        rollout_batch_size=64,
    )
    texts = [[tokenizer.decode(sample.response_ids) for sample in group] for group in groups]
    rewards_P_G = torch.tensor([[min(text.count("3"), 8) / 8 for text in group] for group in texts])
    advantages_P_G = compute_advantages(rewards_P_G)
    for group, advantages_G in zip(groups, advantages_P_G):
        for sample, advantage in zip(group, advantages_G):
            sample.advantage = advantage.item()
    metrics = policy.update(groups, lr=options.lr)
    print(f"step {step}: mean reward {rewards_P_G.mean():.2f}, entropy {metrics['actor/entropy']:.2f}")
