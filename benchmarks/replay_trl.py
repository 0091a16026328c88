"""Check that TRL's GRPOTrainer and Policy.update turn the same samples into the same weights.

    pip install --target ~/trl --no-deps "trl==1.16.*" datasets multiprocess pandas
    python benchmarks/replay_trl.py --trl ~/trl

TRL trains a Llama of 1 M parameters with the settings of time_to_score.py, and the script records samples,
rewards and gradient norms. Then Policy.update trains the same initial weights on the same samples. The script
divides the distance between the two final weights by the distance from the initial weights. The exit code is
1 if the result exceeds 0.1 %.

Not covered: sampling; steps in which the rewards of every group are equal. In such a step, TRL's optimizer
takes a step with a zero gradient, and ours takes none.
"""

import json
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

import torch
import tyro
from bench_trainer import GROUP, tiny_model, with_advantages
from time_to_score import Events, run_trl, warmup_factor

from policy import Policy, Sample
from settings import PolicyOptions

TOLERANCE = 1e-3  # TRL adds 1e-4 to the std of rewards, and we add 1e-6.
REWARD = """
def compute_score(data_source, solution_str, ground_truth, extra_info):
    vowels = sum(letter in "aeiou" for letter in solution_str)
    return {"score": 100 * vowels / max(len(solution_str), 1), "acc": 0.0}
"""


@dataclass
class Config:
    """Compare the weights after training on the same samples with TRL."""

    trl: Path  # Folder in which TRL and datasets are installed.
    steps: int = 12  # Number of training steps.
    lr: float = 1e-3  # Learning rate after the warm-up.


def record_trl(job: dict, folder: Path):
    """Train with TRL. Returns the samples, rewards and gradient norm of each step, and the final weights."""
    from trl import GRPOTrainer

    steps = []

    class Recorder(GRPOTrainer):
        def _generate(self, *arguments):
            result = super()._generate(*arguments)
            steps.append({"prompts": result[0], "responses": result[1]})
            return result

        def _calculate_rewards(self, *arguments):
            result = super()._calculate_rewards(*arguments)
            steps[-1]["rewards"] = result[:, 0].tolist()
            return result

        def _clip_grad_norm(self, model):
            norm = super()._clip_grad_norm(model)
            steps[-1]["norm"] = float(norm)
            return norm

    trainer = run_trl(job, Events(str(folder / "events.jsonl")), Recorder)
    weights = {name: tensor.detach().clone() for name, tensor in trainer.model.state_dict().items()}
    return steps, weights


def distance(one: dict, other: dict) -> float:
    """Return the Euclidean distance between two sets of weights."""
    return sum((one[name] - other[name]).square().sum() for name in one).sqrt().item()


def main() -> None:
    config = tyro.cli(Config)
    sys.path.insert(0, str(config.trl.expanduser()))
    torch.set_num_threads(1)
    with tiny_model() as (model, problems), tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        (folder / "reward.py").write_text(REWARD)
        rows = []
        for problem in problems:
            row = {"data_source": "toy", "reward_model": {"ground_truth": ""}, "extra_info": {}}
            rows.append(json.dumps(row | {"prompt": [{"role": "user", "content": problem}]}) + "\n")
        (folder / "train.jsonl").write_text("".join(rows * config.steps))
        (folder / "val.jsonl").write_text(rows[0])
        job = {
            "side": "trl_no_checkpointing",
            "model": model,
            "train_file": str(folder / "train.jsonl"),
            "val_file": str(folder / "val.jsonl"),
            "reward_fn": str(folder / "reward.py") + ":compute_score",
            "folder": name,
            "steps": config.steps,
            "val_every": config.steps + 1,
            "prompts": len(problems),
            "group": GROUP,
            "length": 48,
            "lr": config.lr,
            "threads": 1,
            "seed": 0,
        }
        steps, theirs = record_trl(job, folder)
        policy = Policy(PolicyOptions(model=model, mini_batch_size=len(problems)), model, torch.device("cpu"))
        initial = {name: tensor.clone() for name, tensor in policy.model.state_dict().items()}
        print("| step | mean reward | tokens | gradient norm, TRL | ours |")
        print("| ---: " * 5 + "|")
        for number, step in enumerate(steps, 1):
            samples = []
            for prompt, response in zip(step["prompts"], step["responses"]):
                # Only a metric needs the sampler's log-probabilities.
                samples.append(Sample({}, prompt, response, [0.0] * len(response)))
            lr = config.lr * warmup_factor(number)
            norm = policy.update(with_advantages(samples, step["rewards"]), lr)["actor/grad_norm"]
            mean = sum(step["rewards"]) / len(samples)
            tokens = sum(map(len, step["responses"]))
            print(f"| {number} | {mean:.2f} | {tokens:,} | {step['norm']:.5f} | {norm:.5f} |", flush=True)
    ours = policy.model.state_dict()
    apart = distance(ours, theirs) / distance(ours, initial)
    print(f"\nThe final weights differ by {apart:.1e} of the distance from the initial weights.")
    if not apart <= TOLERANCE:
        raise SystemExit(f"error: this fraction exceeds {TOLERANCE:g}")


if __name__ == "__main__":
    main()
