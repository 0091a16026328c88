"""Write docs/walkthrough.md, one real step of the demo in numbers, from docs/walkthrough.json.

    python docs/make_walkthrough.py      # writes the page from the recorded step
    python docs/make_walkthrough.py --record outputs/demo_seed0/fapo --step 9 --group 9

The recording contains the texts that the two models wrote, and the log-probabilities of the policy's tokens
before and after each update of the step. The functions of the trainer compute everything else on the page.
--record repeats a step: it samples from the checkpoint before the step, which gives the same samples, and
takes the verdicts from samples.jsonl. The recorded run therefore needs --rollout hf, --save-every 1,
--keep-checkpoints 0, --samples-per-step 128 (all samples of a step) and `keep_critique`. The demo's FAPO run
with these flags meets these conditions.
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

    record: Path | None = None  # Output directory of the run to record; default: use walkthrough.json.
    step: int = 9  # Number of the recorded step, from 1.
    group: int = 9  # Number of the recorded group in the step, from 0.


def record(run: Path, step: int, group: int) -> dict:
    """Repeat a step; return one of its groups with the log-probabilities before and after each update."""
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
                f"--record: step {step} of {run} gave other samples; use the same kind of processor"
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
    """Score the samples with the reward function of the demo, and the recorded critiques as the judge."""
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


def credit(sample: dict, lines: list[str], wrong: int, advantage: float) -> tuple[str, int]:
    """Return a table of a sample's advantages by line with both values of --credit, and the prefix length."""
    ids, pieces = list(range(len(sample["tokens"]))), [*sample["tokens"][:-1], ""]  # end token: no text

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

    # The page compares a flawed and a sound sample at their first different token.
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
    loss_table = table(["token", "sample", "r", "advantage", "-r x advantage", "loss", "loss / N"], *losses)
    if not advantages[flawed] < 0 < advantages[sound] or any(cells[4] != cells[5] for cells in losses):
        raise ValueError("--group: this group has no unclipped flawed sample below the mean; pass another")
    named = results[flawed]["first_wrong"]
    credits, spared = credit(samples[flawed], paragraphs[flawed], named, advantages[flawed])
    right = sum(result["acc"] for result in results)
    one, two, N = sound + 1, flawed + 1, f"{update['tokens']:,}"
    sound_token, flawed_token = (samples[number]["tokens"][fork] for number in (sound, flawed))
    passed = paragraphs[overlooked][oracle[overlooked]]
    style = data["reward_kwargs"]["prompt_style"]
    prompt = scores.format_critic_prompt(question, truth, samples[flawed]["text"], style)
    return f"""# Walkthrough: the demo, and one training step in numbers

## What `make demo` does

The toy world asks questions such as *"Ben has 65 eggs, gets 9, loses 8, gets 3. Remainder mod 5?"*. A model
solves this problem line by line: `65+9=74`, `74-8=66`, `66+3=69`, `Remainder \\boxed{{4}}`. The repository
ships [two Llama models](../toy/models/README.md) with one million parameters each: a policy that often
forgets carries, and a judge that misses half of the wrong lines. `make demo` trains both models with these
commands (`recipes/toy_demo.sh`):

| step | command |
| --- | --- |
| 1. Write the problems and copy the two models. | `prepare_data.py --tasks toy` |
| 2. Train the judge with GRPO. | `grpo_trainer.py` with `compute_score_fapo_genrm` |
| 2. Meanwhile, train a policy with the outcome reward. | `grpo_trainer.py` with `compute_score_baseline` |
| 3. Serve the trained judge with vLLM behind the router. | `genrm_server.py` |
| 3. Train the same initial policy with FAPO. | `grpo_trainer.py --router-address ...` |
| 4. Print an interim table after a third of the FAPO steps. | `python -m toy.report --so-far ...` |
| 5. Print the final tables and write the web page. | `python -m toy.report`, `python -m tools.view_run` |

`SEED=1 make demo` uses another seed and writes to `outputs/demo_seed1`. `PORT=31000 make demo` sets the
judge's port, which is otherwise a random one from 20000 to 29999.

The two trained policies have nearly the same accuracy. With the outcome reward alone, the flawed-positive
rate drifts. With FAPO the flawed-positive rate falls to nearly the rate of a perfect judge. On "How many?"
questions, a forgotten carry makes the answer wrong, and FAPO's policy is correct about twice as often.
[The evidence](evidence.md) reports nine runs from other checkpoints.

**The judge is not the oracle.** Towards the end of the run, the judge finds only about half of the flawed
positives that the oracle counts. The policy keeps the flaws that the judge misses, such as a lost ten
in a sum without a carry (`27-7=10`). A judge that only knows forgotten carries leads to outright
[reward hacking](evidence.md#reward-hacking).

**Limits of the demo.** The flaws are planted, and the outcome reward cannot see them by construction.
[The second world](evidence.md#the-second-world-flaws-of-the-policys-own) has no planted flaws. Real models
make many other kinds of mistakes. The paper measured its gains on AIME and GPQA with policies of 7B and 32B
parameters.

The rest of this page follows one prompt through step {data["step"]} of a demo run (seed 0, FAPO with the
trained judge). The two models wrote the texts, and the functions of the trainer compute every number.

## The prompt

> {question}

"Remainder mod 5?" asks for the remainder on division by 5. The correct answer is {truth}, and the outcome
reward knows only this answer. The step draws 16 prompts and samples {len(samples)} answers to each prompt
at temperature 1. The {len(samples)} answers to one prompt form a *group*.

## Eight samples and their advantages

A solution has one paragraph per sum and a last paragraph with the answer. Paragraphs are counted from 0, and
-1 means that no paragraph is wrong.

{group}

- **Answer**: `compute_score` compares the last box with the correct answer. Here {right} of {len(samples)}
  answers are correct.
- **Judge**: for correct answers only, `compute_score_fapo` asks the judge for the first wrong paragraph.
- **Oracle**: `first_wrong_paragraph` computes what the judge should have said. Training does not use the
  oracle.
- **Reward**: a wrong answer gets -1. A correct answer gets 0 if the judge names a paragraph, and 1 otherwise.
- **Advantage**: `compute_advantages` returns (reward - {rewards.mean():.3f}) / {rewards.std():.3f}, with
  the mean and the standard deviation of the group.
- **Advantage, outcome only**: this would be the advantage if every correct answer got 1. Flawed and sound
  answers would be encouraged alike.

Sample {two} has a correct answer and a wrong step. With the outcome reward alone, its advantage would be
{rule_only[flawed]:+.3f}, as high as a sound solution's. With FAPO the advantage is
{advantages[flawed]:+.3f}. It is negative because fully correct samples outnumber wrong ones in this group.
In a group with more wrong samples than fully correct ones, FAPO encourages flawed positives.

## What the judge reads and writes

The judge reads sample {two} in the prompt style "{style}", made for a judge of one million parameters:

```text
{prompt}
```

The judge computes each line again from the previous value and stops at the first line that differs:

```text
{samples[flawed]["critique"]}
```

`parse_critique` takes the paragraph index from the box: {judge[flawed]}. For sample {overlooked + 1}, the
judge writes:

```text
{samples[overlooked]["critique"]}
```

The judge misses paragraph {oracle[overlooked]}, `{passed}`, so the sample is rewarded as if it were sound.
The policy can learn from a judge that errs now and then. A flaw that the judge misses every time survives in
the policy.

## The loss of one token

Samples {one} and {two} have the same text up to `{line}`. Sample {one} continues with `{sound_token}` and
sample {two} with `{flawed_token}`. The group is in mini-batch {update["number"]} of {update["of"]}, so the
policy has already changed a little before this mini-batch is used. The ratio r is a token's current
probability divided by its probability before the step. The mini-batch has N = {N} response tokens, and
`compute_policy_loss` returns:

{loss_table}

Neither token is clipped: r would have to exceed 1.28 for the first token, or fall below 0.8 for the second.
The loss of the mini-batch is the sum of the last column over all {N} tokens. Every token of a sample has
the same advantage, so the update does not know which digit is wrong. Even so, the wrong digit becomes less
likely: the other tokens of sample {two} also occur in sound solutions, which encourage them.

## Credit for the good prefix

The judge also says which paragraph is the first wrong one. With `--credit prefix`, the {spared} tokens
before that paragraph get no negative advantage (`count_tokens_before`). Sample {two} then has two different
advantages:

{credits}

With `--credit prefix` the update knows the wrong line but not the digit: `{line}` gets the same advantage as
`{flawed_token}`. The demo runs without `--credit prefix`, and
[algorithms](algorithms.md#results-in-the-toy-world) shows the effect of the flag.

## The new probability

{table(["token", *WHEN], *moves)}

The table shows the effect of {update["of"]} updates with a learning rate of {update["lr"]:g} on all samples
of the step. The demo trains each model for 60 such steps.
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
