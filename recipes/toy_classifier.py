"""A discriminative reward model for the toy world: a score for a whole solution, and no word on why.

    python recipes/toy_classifier.py --out-dir data/toy/classifier

The body of the toy policy and a head with one label, trained to tell sound solutions from all others. The
head learns at the end of every paragraph whether all is sound so far; it is asked at the end of the last one,
as vLLM's /classify does. toy_disrm.sh trains a policy with it.

Measured (seed 0, held out): after these 400 updates it keeps 0.957 of the sound solutions and finds only 0.117
of the flawed ones: too few for a policy to learn from. Give it more (--steps), and look before you train.
"""

import random
import sys
from dataclasses import dataclass
from pathlib import Path

import torch
import tyro
from transformers import AutoModelForSequenceClassification, AutoTokenizer

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))
from toy import toy_world


@dataclass
class Config:
    out_dir: str  # Folder of the model, in Hugging Face's format.
    model: str = str(ROOT / "toy/models/policy")  # Whose body it is, and whose tokenizer.
    steps: int = 400  # Updates.
    batch_size: int = 64  # Solutions of an update.
    lr: float = 1e-3  # Highest learning rate, after a tenth of the steps; then falling to 0.
    held_out: int = 512  # Solutions by which it is measured at the end.
    seed: int = 0


def a_solution(rng: random.Random) -> tuple[str, list[str]]:
    """A problem and a solution: half are sound, a quarter flawed and right, the rest as a weak solver's."""
    kind = rng.random()
    if kind < 0.75:
        problem, paragraphs = toy_world.right_solution(rng, flawed=kind < 0.25)
    else:
        problem = toy_world.random_problem(rng, toy_world.REST)
        paragraphs = toy_world.write_solution(problem, rng, toy_world.Kind().policy)
    return str(problem), paragraphs


def read(tokenizer, problem: str, paragraphs: list[str]) -> tuple[list[int], list[int], list[float]]:
    """Token ids of the conversation, the last token of each paragraph, whether all is sound up to there."""
    messages = [{"role": "user", "content": problem}, {"role": "assistant", "content": ""}]
    first_wrong = toy_world.first_wrong_paragraph(problem, paragraphs)
    ends, sound = [], []
    for count in range(1, len(paragraphs) + 1):
        messages[1]["content"] = "\n\n".join(paragraphs[:count])
        ids = tokenizer.apply_chat_template(messages, return_dict=False)
        ends.append(len(ids) - 2)  # before the end token, which is not there yet
        sound.append(float(first_wrong == -1 or first_wrong >= count))
    return ids, [*ends[:-1], len(ids) - 1], sound


def scores_of(model, batch) -> list[torch.Tensor]:
    """The head's logit at the end of each paragraph, for each solution."""
    ids = torch.nn.utils.rnn.pad_sequence([torch.tensor(ids) for ids, _, _ in batch], batch_first=True)
    logits_B_T = model.score(model.model(input_ids=ids).last_hidden_state)[..., 0]  # padding is on the right
    return [row[ends] for row, (_, ends, _) in zip(logits_B_T, batch)]


def main() -> None:
    config = tyro.cli(Config, description=__doc__)
    torch.manual_seed(config.seed)
    rng = random.Random(config.seed)
    tokenizer = AutoTokenizer.from_pretrained(config.model)
    model = AutoModelForSequenceClassification.from_pretrained(config.model, num_labels=1)
    model.config.pad_token_id = tokenizer.eos_token_id
    optimizer = torch.optim.AdamW(model.parameters(), lr=config.lr, weight_decay=0.0)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, config.lr, config.steps, pct_start=0.1)
    for step in range(1, config.steps + 1):
        batch = [read(tokenizer, *a_solution(rng)) for _ in range(config.batch_size)]
        labels = torch.tensor(sum([sound for _, _, sound in batch], []))
        logits = torch.cat(scores_of(model, batch))
        loss = torch.nn.functional.binary_cross_entropy_with_logits(logits, labels)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        schedule.step()
        if step % 50 == 0:
            print(f"step {step}: loss {loss.item():.3f}", flush=True)
    found = {True: [], False: []}  # the right verdicts, of sound ones and of flawed ones with a right answer
    with torch.no_grad():
        for number in range(config.held_out):
            flawed = number % 2 == 1
            solution = toy_world.right_solution(rng, flawed)
            batch = [read(tokenizer, str(solution[0]), solution[1])]
            found[flawed].append((scores_of(model, batch)[0][-1] < 0).item() == flawed)
    rates = {flawed: sum(right) / len(right) for flawed, right in found.items()}
    print(f"held out: {rates[False]:.3f} of the sound ones kept, {rates[True]:.3f} of the flawed ones found")
    model.save_pretrained(config.out_dir)
    tokenizer.save_pretrained(config.out_dir)


if __name__ == "__main__":
    main()
