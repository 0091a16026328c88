"""Writes docs/walkthrough.md, one real step of the demo in numbers, from docs/walkthrough.json.

    python docs/make_walkthrough.py      # the page anew, from what was recorded
    python docs/make_walkthrough.py --record outputs/demo_seed0/fapo --step 9 --group 9

Recorded are the texts that two models wrote, and the log-probabilities of the policy's tokens around the
step's updates. All else on the page is computed by the functions that a run uses. --record does a step again:
sampled from the checkpoint before it, which gives the same samples, with the verdicts that samples.jsonl has.
So its run (--rollout hf) needs --save-every 1 --keep-checkpoints 0, whole steps in samples.jsonl
(--samples-per-step 128) and keep_critique: the demo's FAPO run with these flags.
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

WHEN = ("before the step", "at its own update", "after the step")


@dataclass
class Config:
    """Writes docs/walkthrough.md from docs/walkthrough.json; with --record the latter first."""

    record: Path | None = None  # Folder of a run to record a step of.
    step: int = 9  # Which step.
    group: int = 9  # Which group of it, from 0.


def record(run: Path, step: int, group: int) -> dict:
    """A group of a step and what the step did to it, by doing the step again."""
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
                f"record: step {step} of {run} was sampled otherwise, on another kind of machine?"
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
    """The samples' results, from the demo's own reward function; what the judge says is recorded."""
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
    """Probabilities before, at its update and after; its loss before division by N; the same unclipped."""
    old, now, after = (torch.tensor([[row[token]]]) for row in data["samples"][sample]["logprobs"])
    mask, advantages = torch.ones(1, 1, dtype=torch.bool), torch.tensor([advantage])
    loss, _ = compute_policy_loss(now, old, advantages, mask, 1)
    unclipped, _ = compute_policy_loss(now, old, advantages, mask, 1, clip_low=1.0, clip_high=1e9, clip_c=1e9)
    return [x.exp().item() for x in (old, now, after)], loss.item(), unclipped.item()


def credit(sample: dict, lines: list[str], wrong: int, advantage: float) -> tuple[str, int]:
    """A sample's advantages line by line, without --credit prefix and with it; the tokens that it spares."""
    ids, pieces = list(range(len(sample["tokens"]))), [*sample["tokens"][:-1], ""]  # an end token is no text

    def before(line):
        return count_tokens_before(line, sample["text"], ids, lambda some: "".join(pieces[i] for i in some))

    bounds = [*map(before, range(len(lines))), len(ids)]
    rows = []
    for n, line in enumerate(lines):
        credited = advantage if n >= wrong else max(advantage, 0)
        count = str(bounds[n + 1] - bounds[n])
        rows.append([str(n), f"`{line}`", count, f"{advantage:+.3f}", f"{credited:+.3f}"])
    return table(["", "paragraph", "tokens", "`--credit sample`", "`--credit prefix`"], *rows), bounds[wrong]


def page(data: dict) -> str:
    """docs/walkthrough.md."""
    row, samples, results, update = data["row"], data["samples"], score(data), data["update"]
    question, truth = row["extra_info"]["question"], row["reward_model"]["ground_truth"]
    paragraphs = [scores.split_paragraphs(sample["text"]) for sample in samples]
    oracle = [toy_world.first_wrong_paragraph(question, lines) for lines in paragraphs]
    judge = ["-" if sample["critique"] is None else str(scores.parse_critique(sample["critique"], len(lines)))
             for sample, lines in zip(samples, paragraphs)]  # fmt: skip
    rewards = torch.tensor([result["score"] for result in results])
    rule_rewards = torch.tensor([1.0 if result["acc"] else -1.0 for result in results])
    advantages, rule_only = compute_advantages(torch.stack([rewards, rule_rewards])).tolist()

    # Three samples to look at, and the first token in which the flawed and the sound one differ.
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

    rows = []
    columns = zip(paragraphs, rule_rewards, judge, oracle, rewards, advantages, rule_only)
    for n, (lines, by_rule, says, knows, reward, advantage, other) in enumerate(columns, 1):
        cells = [str(n), f"`{', '.join(lines)}`", "correct" if by_rule > 0 else "wrong", says, str(knows)]
        rows.append([*cells, f"{reward:g}", f"{advantage:+.3f}", f"{other:+.3f}"])
    heads = ["", "solution", "answer", "judge", "oracle", "reward", "advantage", "advantage, outcome only"]
    group = table(heads, *rows)
    loss_table = table(["token", "sample", "r", "advantage", "-r x advantage", "its loss", "over N"], *losses)
    if not advantages[flawed] < 0 < advantages[sound] or any(cells[4] != cells[5] for cells in losses):
        raise ValueError("group: the page needs a flawed sample below the mean, not clipped; take another")
    named = results[flawed]["first_wrong"]
    credits, spared = credit(samples[flawed], paragraphs[flawed], named, advantages[flawed])
    right = sum(result["acc"] for result in results)
    one, two, N = sound + 1, flawed + 1, f"{update['tokens']:,}"
    sound_token, flawed_token = (samples[number]["tokens"][fork] for number in (sound, flawed))
    passed = paragraphs[overlooked][oracle[overlooked]]
    style = data["reward_kwargs"]["prompt_style"]
    prompt = scores.format_critic_prompt(question, truth, samples[flawed]["text"], style)
    return f"""# The demo, and one of its steps in numbers

## What `make demo` does

A problem of the toy world, such as *"Ben has 65 eggs, gets 9, loses 8, gets 3. Remainder mod 5?"*, is solved
line by line: `65+9=74`, `74-8=66`, `66+3=69`, `Remainder \\boxed{{4}}`. The repository ships [two Llama
models](../toy/models/README.md) with one million parameters each, pretrained on noisy text: a policy that
forgets carries, and a judge that misses half of the wrong lines. `recipes/toy_demo.sh` then runs these
commands:

| step | command |
| --- | --- |
| 1. Write the problems and copy the two models. | `prepare_data.py --tasks toy` |
| 2. Train the judge with GRPO. | `grpo_trainer.py` with `compute_score_fapo_genrm` |
| 2. Meanwhile, train a policy with the outcome reward. | `grpo_trainer.py` with `compute_score_baseline` |
| 3. Serve the trained judge with vLLM behind the router. | `genrm_server.py` |
| 3. Train the same initial policy with FAPO. | `grpo_trainer.py --router-address ...` |
| 4. Print the table after a third of FAPO's steps. | `python -m toy.report --so-far ...` |
| 5. Print the tables, write the web page. | `python -m toy.report`, `python -m tools.view_run` |

`SEED=1 make demo` uses another seed and writes to `outputs/demo_seed1`. `PORT=31000 make demo` sets the
judge's port; by default it is a random one from 20000 to 29999.

By accuracy the two policies look the same. With the outcome reward alone, the fraction of flawed answers
among the correct ones drifts; with FAPO it falls to nearly that of a perfect judge. On "How many?"
questions, where a forgotten carry makes the answer wrong, FAPO's policy is correct about twice as often.
[The evidence](evidence.md) has nine runs from other checkpoints.

**The judge is not the oracle.** Towards the end of the run it finds only about half of the flawed
positives that the oracle counts. The policy keeps the flaws that the judge misses, often a ten dropped
where there is nothing to carry (`27-7=10`). A judge that only knows forgotten carries leads to outright
[reward hacking](evidence.md#reward-hacking).

**What the demo does not show.** The flaws are planted, and the outcome reward cannot see them by
construction; [the second world](evidence.md#the-second-world-flaws-of-the-policys-own) has no planted
flaws. Flawed positives of real models are as varied as mathematics, and the paper's gains were measured
on AIME and GPQA with policies of 7B and 32B parameters.

The rest of this page follows one prompt through step {data["step"]} of a demo run (seed 0, FAPO with the
trained judge). The models wrote the texts, and the functions of the run compute every number
(`docs/make_walkthrough.py` writes this page).

## The prompt

> {question}

"Remainder mod 5?" asks for the remainder on division by 5. The correct answer is {truth}, and the outcome
reward knows nothing else. The step draws 16 prompts, and the policy answers each one {len(samples)} times
at temperature 1. These
{len(samples)} answers are a *group*.

## Eight samples and their advantages

A solution has one paragraph for each sum and a last paragraph with the answer. Paragraphs are counted
from 0; -1 means that none is wrong.

{group}

- **Answer**: `compute_score` compares the last box with the correct answer. {right} of {len(samples)} are
  correct.
- **Judge**: `compute_score_fapo` asks the judge for the first wrong paragraph, for correct answers only.
- **Oracle**: `first_wrong_paragraph` is what the judge should have said. Training never sees it.
- **Reward**: -1 for a wrong answer, 0 if the judge names a paragraph, and 1 otherwise.
- **Advantage**: `compute_advantages` gives (reward - {rewards.mean():.3f}) / {rewards.std():.3f}, with
  the mean and the standard deviation of the group.
- **Advantage, outcome only**: the advantage if every correct answer got 1. It encourages flawed and sound
  answers alike.

With the outcome reward alone, sample {two}, which is correct with a wrong step, has
{rule_only[flawed]:+.3f}, as much as a sound solution. With FAPO it has {advantages[flawed]:+.3f}. The
advantage is negative because fully correct samples outnumber wrong ones in this group; in a group where
wrong ones are more frequent, flawed positives are encouraged.

## What the judge reads and writes

The judge reads sample {two} in the prompt style "{style}", made for a judge of one million parameters:

```text
{prompt}
```

It computes each line again from the value stated before, and stops at the first line that differs:

```text
{samples[flawed]["critique"]}
```

`parse_critique` takes the index from the box: {judge[flawed]}. About sample {overlooked + 1} the judge
writes:

```text
{samples[overlooked]["critique"]}
```

It misses paragraph {oracle[overlooked]}, `{passed}`, and the sample is rewarded as if it were sound. The
policy can learn from a judge that errs now and then; what the judge misses every time survives in the
policy.

## The loss of one token

Samples {one} and {two} have the same text up to `{line}`. Sample {one} continues with `{sound_token}` and
sample {two} with `{flawed_token}`. The group is in mini-batch {update["number"]} of {update["of"]}, so the
policy has already moved a little before the update of this mini-batch; r is a token's current probability
divided by its probability before the step. With N = {N} response tokens in the mini-batch,
`compute_policy_loss` gives:

{loss_table}

Neither token is clipped: that would need an r above 1.28 for the first one and below 0.8 for the second.
The loss of the mini-batch is the sum of the last column over its {N} tokens. Every token of a sample has
the sample's advantage, so the update is not told which digit is wrong. The wrong digit stands out because
the other tokens of sample {two} also occur in sound solutions, where they are encouraged.

## Credit for the good prefix

The judge also says which paragraph is the first wrong one. With `--credit prefix` the {spared} tokens
before that paragraph get no negative advantage (`count_tokens_before`), and sample {two} has two
advantages:

{credits}

So the update knows the line but not the digit: `{line}` gets the same advantage as `{flawed_token}`. The
demo runs without `--credit prefix`; [algorithms](algorithms.md#results-in-the-toy-world) shows what it
changes.

## The new probability

{table(["token", *WHEN], *moves)}

This is the effect of {update["of"]} updates with a learning rate of {update["lr"]:g}, through all samples
of the step. The demo does 60 such steps.
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
