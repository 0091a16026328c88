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
from algorithm import compute_advantages, compute_policy_loss, count_tokens_before
from credit import set_advantages
from policy import Policy, Sample, deal
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
    chosen, batches = groups[group], deal(groups, config.mini_batch_size)
    own = next(number for number, batch in enumerate(batches) if any(sample is chosen[0] for sample in batch))
    seen, update = [], policy.optimizer.step

    def look():
        by_sample = {id(sample): logprobs.tolist() for sample, logprobs in policy.score(chosen)}
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
        cells = [str(n), f"`{', '.join(lines)}`", "right" if by_rule > 0 else "wrong", says, str(knows)]
        rows.append([*cells, f"{reward:g}", f"{advantage:+.3f}", f"{other:+.3f}"])
    group = table(["", "solution", "rule", "judge", "oracle", "reward", "advantage", "rule only"], *rows)
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
    return f"""# One step of the demo, in numbers

One prompt of step {data["step"]} of a demo run (seed 0, FAPO with the trained judge), from the question
to the new probabilities. Two models wrote the texts; every number is computed by the functions that the run
uses (`docs/make_walkthrough.py` writes this page).

## The prompt

> {question}

"Rest by 5?" asks for the remainder on division by 5. The true answer is {truth}, and that is all the rule
knows. The step draws 16 such prompts, and the policy answers each {len(samples)} times at temperature 1: a
*group*.

## Eight samples and their advantages

A solution is one paragraph per sum and a last one with the answer. Paragraphs are counted from 0; -1 says
that none is wrong.

{group}

- **Rule** (`compute_score`): is the last box the true answer? {right} of {len(samples)} are right.
- **Judge** (`compute_score_fapo`): the first wrong paragraph, asked of right answers only.
- **Oracle** (`first_wrong_paragraph`): what the judge should have said. Training never sees it.
- **Reward**: 1 where the rule says right and the judge -1, 0 where the judge names a paragraph, -1 where the
  rule says wrong.
- **Advantage** (`compute_advantages`): (reward - {rewards.mean():.3f}) / {rewards.std():.3f},
  mean and standard deviation of the group.
- **Rule only**: the advantage if every right answer got 1: flawed and sound ones are encouraged alike.

Under the rule alone sample {two}, right with a wrong step, has {rule_only[flawed]:+.3f}, as much as a sound
solution; with FAPO it has {advantages[flawed]:+.3f}. That is negative because truly correct samples outnumber
wrong ones in this group; where they do not, flawed positives are encouraged.

## What the judge reads and writes

Sample {two}, as the judge reads it (the prompt style "{style}", made for a judge of 1 M parameters):

```text
{prompt}
```

It computes each line again from the value stated before, and stops at the first that differs:

```text
{samples[flawed]["critique"]}
```

`parse_critique` takes the index from the box: {judge[flawed]}. Of sample {overlooked + 1} the judge writes

```text
{samples[overlooked]["critique"]}
```

It overlooks paragraph {oracle[overlooked]}, `{passed}`, and the sample is paid as if it were sound. A judge
that errs now and then is enough to learn from; what it overlooks every time is what survives in the policy.

## The loss of one token

Samples {one} and {two} have the same text up to `{line}`. There one goes on with `{sound_token}` and the
other with `{flawed_token}`. The group is in mini-batch {update["number"]} of {update["of"]}: before its
update the policy has moved a little, and r is the token's probability then over that before the step.
`compute_policy_loss` gives, with N = {N} response tokens in the mini-batch:

{loss_table}

Neither is clipped: that would take an r above 1.28 for the first and below 0.8 for the second. The loss of
the mini-batch is the sum of the last column over its {N} tokens. Every token of a sample has the sample's
advantage: nobody told the update which digit is wrong. The wrong one stands out because the other tokens of
sample {two} occur in sound solutions as well, where they are encouraged.

## Where the blame begins

The judge has also said which paragraph is the first wrong one. With `--credit prefix` the {spared} tokens
before it are not blamed (`count_tokens_before`), and sample {two} has two advantages:

{credits}

So the update knows the line, still not the digit: `{line}` is blamed along with `{flawed_token}`. The demo
runs without it; [algorithms.md](algorithms.md#results-in-the-toy-world) has what it changes.

## The new probability

{table(["token", *WHEN], *moves)}

That is what {update["of"]} updates with a learning rate of {update["lr"]:g} do, through all samples of the
step. The demo does 60 such steps.
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
