"""FAPO from top to bottom: rollouts, verdicts of a served judge, rewards, advantages, update.

    python docs/plain_fapo.py        # two minutes on two cores; needs vllm, but no download

The policy and the judge are the toy world's shipped models. Each step prints three fractions: the correct
answers, and how many of these have a wrong step according to the judge and to an exact checker (the oracle).
The judge is not trained yet and overlooks half of the flawed solutions; training does not use the oracle.
grpo_trainer.py computes the same rewards and advantages, and adds exact resuming, evaluation, logs, more
judges and GPUs.
"""

import contextlib
import random
import sys
from pathlib import Path

import torch
from transformers import AutoTokenizer

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))
import genrm_server
from algorithm import compute_advantages
from policy import Policy, Sample
from reward_loop import RewardOptions, start_rewards
from rollout import rollout_hf
from settings import PolicyOptions
from toy import toy_world

MODEL, JUDGE = (str(ROOT / "toy/models" / name) for name in ("policy", "judge"))
PROMPTS, GROUP = 16, 8  # per step
OPTIONS = PolicyOptions(model=MODEL, mini_batch_size=8, lr=2e-4, adam_betas=(0.9, 0.95), weight_decay=0.0)
FAPO = f"{ROOT}/toy/toy_world.py:compute_score_fapo"  # compute_score.py's, plus the oracle's metrics
ASK = '{"prompt_style": "brief", "genrm_temperature": 0, "genrm_max_tokens": 96}'  # how to query the judge


def problems(step: int) -> list[dict]:
    """Return the rows of a step, which contain word problems such as "Ben has 65 eggs, gets 9, ..."."""
    rng = random.Random(step)
    drawn = [toy_world.random_problem(rng, toy_world.REMAINDER) for _ in range(PROMPTS)]
    return [toy_world.policy_row(problem, "toy", "train", index) for index, problem in enumerate(drawn)]


def train(policy: Policy, tokenizer, rewards, step: int) -> None:
    """Train one step, and print a line about its samples."""
    samples = []
    for row in problems(step):
        ids = tokenizer.apply_chat_template(row["prompt"], add_generation_prompt=True, return_dict=False)
        samples += [Sample(row, ids) for _ in range(GROUP)]

    def submit(sample):  # Called when this sample's rollout ends; the judge works during later rollouts.
        sample.text = tokenizer.decode(sample.response_ids, skip_special_tokens=True)
        sample.pending_result = rewards.submit(sample.row | {"response": sample.text})

    sampling = dict(max_response_length=64, temperature=1.0, seed=step, eos_ids={tokenizer.eos_token_id})
    rollout_hf(policy.model, samples, on_finished=submit, rollout_batch_size=512, **sampling)

    for sample in samples:
        sample.result = sample.pending_result.result()
    scores = [sample.result["reward_score"] for sample in samples]  # 1, 0 (flawed), -1 (wrong) or None
    rewards_P_G = torch.tensor([torch.nan if score is None else score for score in scores]).view(-1, GROUP)
    advantages = compute_advantages(rewards_P_G.double()).flatten().tolist()  # float64, as in the trainer
    for sample, score, advantage in zip(samples, scores, advantages):
        sample.advantage = None if score is None else advantage  # Without a verdict, a sample does not count.

    policy.update([samples[i : i + GROUP] for i in range(0, len(samples), GROUP)], lr=OPTIONS.lr)

    infos = [sample.result["reward_extra_info"] for sample in samples]
    right = [info for info in infos if info.get("acc")]
    by_judge = sum(info["flawed_positive"] is True for info in right) / max(len(right), 1)
    by_oracle = sum(info["oracle_flawed_positive"] is True for info in right) / max(len(right), 1)
    line = f"step {step}: accuracy {len(right) / len(samples):.2f}, flawed positives by the judge "
    print(line + f"{by_judge:.2f}, by the oracle {by_oracle:.2f}", flush=True)


def main(steps: int = 40) -> None:
    torch.set_num_threads(1)
    tokenizer = AutoTokenizer.from_pretrained(MODEL)
    with contextlib.ExitStack() as stack:
        judge = genrm_server.ModelServers(genrm_server.Config(model=JUDGE, port=0, max_model_len=512))
        stack.callback(judge.shutdown)  # The judge is a vLLM server behind router.py.
        options = RewardOptions(reward_fn=FAPO, reward_kwargs=ASK, router_address=(judge.router_address,))
        rewards = start_rewards(options, stack)
        policy = Policy(OPTIONS, MODEL, torch.device("cpu"))
        for step in range(1, steps + 1):
            train(policy, tokenizer, rewards, step)


if __name__ == "__main__":
    main()
