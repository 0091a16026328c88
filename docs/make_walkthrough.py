"""Write docs/walkthrough.md, which shows one real step of the demo in numbers, from docs/walkthrough.json.

    python docs/make_walkthrough.py      # writes the page from the recorded step
    python docs/make_walkthrough.py --record outputs/demo_seed0/fapo --step 9 --group 9

The JSON file contains the texts that the two models wrote, and the log-probabilities of the policy's tokens
before and after each update of the step. The trainer's functions compute everything else on the page.

--record repeats a step. It samples again from the checkpoint before the step, which gives the same samples,
and takes the verdicts from samples.jsonl. The run to record therefore needs the flags --rollout hf,
--save-every 1, --keep-checkpoints 0 and --samples-per-step 128 (all samples of a step), and the setting
`keep_critique` in its --reward-kwargs, which the demo already has.
"""

import asyncio
import json
import re
import sys
from dataclasses import dataclass
from pathlib import Path

DOCS = Path(__file__).resolve().parent
sys.path.insert(0, str(DOCS.parent))

import torch

from transformers import AutoTokenizer

import compute_score as scores
import grpo_trainer
from algorithm import compute_advantages, compute_policy_loss, count_tokens_before, set_advantages
from policy import Policy, Sample, split_mini_batches
from rollout import rollout_hf
from run import load_rows
from run_folder import read_lines
from toy import toy_world
from toy.report import table

WHEN = ("before the step", "before the update of its mini-batch", "after the step")


@dataclass
class Config:
    """Writes docs/walkthrough.md from docs/walkthrough.json; --record writes the JSON file first."""

    record: Path | None = None  # Output directory of the run to record. Default: use the existing JSON file.
    step: int = 9  # Step to record, counted from 1.
    group: int = 9  # Group to record within the step, counted from 0.


def record(run: Path, step: int, group: int) -> dict:
    """Repeat a step, and return one of its groups with log-probabilities before and after each update."""
    config = grpo_trainer.Config(**json.loads((run / "config.json").read_text()))
    torch.set_num_threads(config.num_threads or torch.get_num_threads())
    folder = run / f"checkpoints/step_{step - 1}" if step > 1 else Path(config.model)
    policy, tokenizer = (
        Policy(config, str(folder), torch.device("cpu")),
        AutoTokenizer.from_pretrained(folder),
    )
    if step > 1:
        policy.load_optimizer(folder)
    rows, prompts = load_rows(config.train_file, tokenizer, config), config.train_batch_size
    rows = grpo_trainer.draw(rows, (step - 1) * prompts, prompts, config.seed)
    groups = [[Sample(row, row["prompt_ids"]) for _ in range(config.group_size)] for row in rows]
    samples, seed = sum(groups, []), config.seed * 1_000_003 + step
    rollout_hf(policy.model, samples, max_response_length=config.max_response_length, seed=seed,
               temperature=config.temperature, eos_ids={tokenizer.eos_token_id},
               rollout_batch_size=config.rollout_batch_size)  # fmt: skip
    lines, _ = read_lines(run / "samples.jsonl")
    lines = [line for line in lines if (line["step"], line["split"]) == (step, "train")]
    for sample, sample.result in zip(samples, lines, strict=True):
        sample.text = tokenizer.decode(sample.response_ids, skip_special_tokens=True)
        if sample.text != sample.result["response"]:
            raise ValueError(
                f"--record {run}: step {step} produced different samples this time; use the kind of "
                "processor on which the run was made"
            )
    set_advantages(groups, config, tokenizer.decode)
    chosen, batches = groups[group], split_mini_batches(groups, config.mini_batch_size)
    own = next(number for number, batch in enumerate(batches) if any(sample is chosen[0] for sample in batch))
    seen, update = [], policy.optimizer.step

    def look():
        by_sample = {id(sample): logprobs.tolist() for sample, logprobs in policy.logprobs_of(chosen)}
        seen.append([by_sample[id(sample)] for sample in chosen])

    def update_and_look():
        update()
        look()

    look()
    policy.optimizer.step = update_and_look
    lr = config.lr * min(1.0, step / config.lr_warmup_steps)
    policy.update(groups, lr)
    return {
        "step": step,
        "group": group,
        "row": {key: chosen[0].row[key] for key in ("data_source", "prompt", "reward_model", "extra_info")},
        "reward_kwargs": json.loads(config.reward_kwargs),
        "update": {
            "number": own + 1,
            "of": len(batches),
            "tokens": sum(len(s.response_ids) for s in batches[own]),
            "lr": lr,
        },
        "samples": [
            {
                "text": sample.text,
                "critique": sample.result["reward_extra_info"].get("critique"),
                "tokens": [tokenizer.decode([token]) for token in sample.response_ids],
                "logprobs": [[round(x, 6) for x in seen[when][number]] for when in (0, own, -1)],
            }
            for number, sample in enumerate(chosen)
        ],
    }


def score(data: dict) -> list[dict]:
    """Score the samples with the demo's reward function. The recorded critiques replace the judge."""
    row, critiques = data["row"], iter([])

    async def recorded(prompt, *_, **__):
        return "ok", next(critiques), 0

    ask, scores.chat = scores.chat, recorded
    try:
        results = []
        for sample in data["samples"]:
            critiques = iter([sample["critique"]])
            about = {key: row[key] for key in ("data_source", "extra_info")}
            about |= {"solution_str": sample["text"], "ground_truth": row["reward_model"]["ground_truth"]}
            about |= {"reward_router_address": "recorded"} | data["reward_kwargs"]
            results.append(asyncio.run(toy_world.compute_score_fapo(**about)))
        return results
    finally:
        scores.chat = ask


def one_token(data: dict, sample: int, token: int, advantage: float) -> tuple[list[float], float, float]:
    """Return a token's probability at each time in WHEN, its loss times N, and the unclipped loss times N."""
    old, now, after = (torch.tensor([[row[token]]]) for row in data["samples"][sample]["logprobs"])
    mask, advantages = torch.ones(1, 1, dtype=torch.bool), torch.tensor([advantage])
    loss, _ = compute_policy_loss(now, old, advantages, mask, 1)
    unclipped, _ = compute_policy_loss(now, old, advantages, mask, 1, clip_low=1.0, clip_high=1e9, clip_c=1e9)
    return [x.exp().item() for x in (old, now, after)], loss.item(), unclipped.item()


def prefix_length(sample: dict, wrong: int) -> int:
    """Return the number of tokens before the wrong paragraph, to which --credit prefix gives no blame."""
    ids, pieces = list(range(len(sample["tokens"]))), [*sample["tokens"][:-1], ""]  # "" for the end token
    return count_tokens_before(wrong, sample["text"], ids, lambda some: "".join(pieces[i] for i in some))


def page(data: dict) -> str:
    """Return the text of docs/walkthrough.md."""
    row, samples, results, update = data["row"], data["samples"], score(data), data["update"]
    question, truth = row["extra_info"]["question"], row["reward_model"]["ground_truth"]
    paragraphs = [scores.split_paragraphs(sample["text"]) for sample in samples]
    oracle = [toy_world.first_wrong_paragraph(question, lines) for lines in paragraphs]
    judge = ["-" if sample["critique"] is None else str(scores.parse_critique(sample["critique"], len(lines)))
             for sample, lines in zip(samples, paragraphs)]  # fmt: skip
    rewards = torch.tensor([result["score"] for result in results])
    rule_rewards = torch.tensor([1.0 if result["acc"] else -1.0 for result in results])
    advantages, rule_only = compute_advantages(torch.stack([rewards, rule_rewards])).tolist()

    # The page compares a flawed and a sound sample at the first token in which they differ.
    flawed = next(n for n, result in enumerate(results) if result["flawed_positive"])
    missed = [result["oracle_flawed_positive"] and not result["flawed_positive"] for result in results]
    overlooked = missed.index(True)
    sound = next(n for n, result in enumerate(results) if result["truly_correct"])
    pairs = zip(samples[flawed]["tokens"], samples[sound]["tokens"])
    fork = next(n for n, (one, other) in enumerate(pairs) if one != other)
    line = "".join(samples[sound]["tokens"][:fork]).split("\n\n")[-1]
    losses, moves = [], []
    for number in (sound, flawed):
        token = f"`{line}{samples[number]['tokens'][fork]}`"
        (old, now, after), loss, unclipped = one_token(data, number, fork, advantages[number])
        cells = [f"{now / old:.4f}", f"{advantages[number]:+.3f}", f"{unclipped:+.4f}", f"{loss:+.4f}"]
        losses.append([token, str(number + 1), *cells, f"{loss / update['tokens']:+.2e}"])
        moves.append([token, *(f"{p:.4f}" for p in (old, now, after))])

    numbers = {}  # Identical samples share a row of the table.
    columns = zip(paragraphs, rule_rewards, judge, oracle, rewards, advantages, rule_only)
    for n, (lines, by_rule, says, knows, reward, advantage, other) in enumerate(columns, 1):
        cells = [f"`{', '.join(lines)}`", "correct" if by_rule > 0 else "wrong", says, str(knows)]
        cells += [f"{reward:g}", f"{advantage:+.3f}", f"{other:+.3f}"]
        numbers.setdefault(tuple(cells), []).append(str(n))
    heads = ["samples", "solution", "answer", "judge", "oracle", "reward", "advantage", "outcome only"]
    group = table(heads, *([", ".join(some), *cells] for cells, some in numbers.items()))
    if not advantages[flawed] < 0 < advantages[sound] or any(cells[4] != cells[5] for cells in losses):
        raise ValueError("--group: in the recorded group, no unclipped flawed sample has a reward below the "
                         "mean; pass a different number")  # fmt: skip
    shown = [[*cells[:4], *cells[5:]] for cells in losses]  # An unclipped loss is -r x advantage.
    loss_table = table(["token", "sample", "r", "advantage", "loss", "loss / N"], *shown)
    spared = prefix_length(samples[flawed], results[flawed]["first_wrong"])
    one, two, N = sound + 1, flawed + 1, f"{update['tokens']:,}"
    sound_token, flawed_token = (samples[number]["tokens"][fork] for number in (sound, flawed))
    passed = paragraphs[overlooked][oracle[overlooked]]
    style = data["reward_kwargs"]["prompt_style"]
    prompt = scores.format_critic_prompt(question, truth, samples[flawed]["text"], style)
    return f"""# Walkthrough: the demo, and one training step in numbers

## What `make demo` does

The script `recipes/toy_demo.sh` trains [two Llama models](../toy/models/README.md) with one million
parameters each: a policy that often forgets carries, and a judge that misses half of the flawed solutions.

1. `prepare_data.py` writes the problems and copies the two models.
2. `grpo_trainer.py` trains the judge with GRPO and, at the same time, a policy with the outcome reward.
3. `genrm_server.py` serves the trained judge, and `grpo_trainer.py` trains the same initial policy with FAPO.
4. `toy.report` prints [the tables](../README.md#quick-start), and `tools.view_run` writes the web page.

`SEED=1 make demo` uses a different seed, and `PORT=31000 make demo` sets the judge's port.

Towards the end of the FAPO run, the judge finds only about half of the flawed positives that the oracle, an
exact checker, counts. The policy keeps making the mistakes that the judge misses, such as an error of ten in
a sum without a carry (`27-7=10`).

## The prompt

The rest of this page follows one prompt through step {data["step"]} of 60 (seed 0, FAPO with the trained
judge):

> {question}

The correct answer is {truth}. In each step, the trainer draws 16 prompts and samples a *group* of
{len(samples)} answers to each prompt at temperature 1.

## Eight samples and their advantages

A solution has one paragraph per sum and a final paragraph with the answer. The columns "judge" and "oracle"
give the first wrong paragraph, counted from 0; -1 means that no paragraph is wrong.

{group}

`compute_score_fapo` queries the judge only on correct answers. A wrong answer gets a reward of -1. A correct
answer gets 0 if the judge names a wrong paragraph, and 1 otherwise. `compute_advantages` subtracts the mean
of the group's rewards, {rewards.mean():.3f}, and divides by their standard deviation, {rewards.std():.3f}.
The last column shows the advantages that the outcome reward would give. Training does not use the oracle.

Sample {two} has a correct answer but a wrong step. With FAPO, its advantage is {advantages[flawed]:+.3f}
instead of {rule_only[flawed]:+.3f}. The sign is negative because more samples in this group have a reward of
1 than of -1. In the opposite case, FAPO encourages flawed positives.

## What the judge reads and writes

For sample {two}, the judge reads:

```text
{prompt}
```

The judge recomputes each line from the previous value and stops at the first line that differs:

```text
{samples[flawed]["critique"]}
```

`parse_critique` extracts the paragraph index {judge[flawed]} from the box. For sample {overlooked + 1}, the
judge writes:

```text
{samples[overlooked]["critique"]}
```

The judge misses that paragraph {oracle[overlooked]}, `{passed}`, is wrong, so the sample is rewarded as if it
were sound.

## The loss of one token

Samples {one} and {two} are identical up to `{line}`. Sample {one} continues with `{sound_token}` and sample
{two} with `{flawed_token}`. The ratio r is a token's current probability divided by its probability before
the step; an earlier mini-batch has already changed the policy. The mini-batch of these samples has N = {N}
response tokens, and `compute_policy_loss` returns:

{loss_table}

Neither token is clipped (r would have to exceed 1.28 for the first token, or fall below 0.8 for the second),
so the loss is -r times the advantage. Every token of a sample has the same advantage, so the update does not
know which digit is wrong. The wrong digit still becomes less likely, because sound solutions contain the
other tokens of sample {two} and encourage them. [`--credit prefix`](algorithms.md#credit-for-the-good-prefix)
would set the advantage of the {spared} tokens before the wrong paragraph to 0.

## The new probability

{table(["token", *WHEN], *moves)}

The step makes {update["of"]} updates with a learning rate of {update["lr"]:g}.
"""


def main() -> None:
    import tyro

    config = tyro.cli(Config)
    source = DOCS / "walkthrough.json"
    if config.record:
        text = json.dumps(record(config.record, config.step, config.group), indent=1)
        a_list_a_line = re.sub(r"\[\s+[^][]*\]", lambda found: re.sub(r"\n\s*", " ", found[0]), text)
        source.write_text(a_list_a_line + "\n")
    (DOCS / "walkthrough.md").write_text(page(json.loads(source.read_text())))


if __name__ == "__main__":
    main()
