"""Train a discriminative reward model for the toy world, which scores a solution without a critique.

    python recipes/toy_classifier.py --out-dir data/toy/classifier

The model consists of the toy judge's body and a head with one label. It learns to distinguish sound from
flawed solutions. Each problem has exactly one sound solution, so every token has a label: whether the text up
to this token is the beginning of the sound solution. The score is the output at the last token, as in vLLM's
/classify. toy_disrm.sh trains policies with this model.

To recognise that "74" is wrong, a model must know the correct result. During training, the body therefore
also learns to write the sound solution, with an lm_head that is not saved. Without this second loss, the
classifier finds almost no flaws.

With seed 0, on 256 held-out solutions of each kind, the classifier calls 99.2 % of the sound solutions sound,
12.9 % of the flawed solutions with a correct answer, and 46.1 % of a weak solver's wrong answers. Like the
toy judge, it is meant to find flaws in correct answers, so it has seen few wrong answers. Training takes two
and a half minutes on one core.
"""

import random
import sys
from dataclasses import dataclass
from pathlib import Path

import torch
import tyro
from torch.nn.functional import binary_cross_entropy_with_logits, cross_entropy
from torch.nn.utils.rnn import pad_sequence
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification, AutoTokenizer

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))
from toy import toy_world


@dataclass
class Config:
    out_dir: str  # Output directory for the model, in Hugging Face format.
    # Model that supplies the body and the tokenizer. It must be able to add.
    model: str = str(ROOT / "toy/models/judge")
    steps: int = 600  # Number of updates.
    batch_size: int = 32  # Number of solutions per update.
    lr: float = 1e-3  # Peak learning rate. It is reached after a tenth of the steps and then decays to 0.
    held_out: int = 256  # Number of held-out solutions of each kind for the evaluation at the end.
    seed: int = 0  # Random seed for the head's weights and the training solutions.


def a_solution(rng: random.Random, kind: str) -> tuple[toy_world.Problem, list[str]]:
    """Return a problem and a solution of this kind.

    Args:
        kind: "sound", "flawed" (with a correct answer), "practice" (with many wrong lines) or "wrong" (with
            the wrong answer of a weak solver).
    """
    if kind in ("sound", "flawed"):
        return toy_world.right_solution(rng, flawed=kind == "flawed")
    slips = toy_world.Kind().policy
    if kind == "practice":
        slips = toy_world.Kind().practice
    while True:
        problem = toy_world.random_problem(rng, toy_world.REMAINDER)
        paragraphs = toy_world.write_solution(problem, rng, slips)
        sound = toy_world.write_solution(problem, random.Random(0))
        if kind == "practice" or paragraphs[-1] != sound[-1]:
            return problem, paragraphs


def read(tokenizer, problem: toy_world.Problem, paragraphs: list[str]) -> tuple[torch.Tensor, int, int]:
    """Return a conversation's token ids, the start of the solution, and the end of its sound prefix."""

    def ids_of(solution: list[str]) -> list[int]:
        messages = [
            {"role": "user", "content": str(problem)},
            {"role": "assistant", "content": "\n\n".join(solution)},
        ]
        return tokenizer.apply_chat_template(messages, return_dict=False)

    ids = ids_of(paragraphs)
    begin = len(ids_of([])) - 1  # The end token follows the solution.
    sound = ids_of(toy_world.write_solution(problem, random.Random(0)))
    return torch.tensor(ids), begin, toy_world.first_difference(ids, sound)


def losses(model, lm_head, batch) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the classification loss and the loss of writing the sound solution."""
    ids_B_T = pad_sequence([ids for ids, _, _ in batch], batch_first=True)  # padded on the right
    labels_B_T = torch.zeros(ids_B_T.shape)
    weights_B_T = torch.zeros(ids_B_T.shape)
    written_B_T = torch.zeros(ids_B_T.shape, dtype=torch.bool)
    for row, (ids, begin, sound) in enumerate(batch):
        labels_B_T[row, :sound] = 1
        weights_B_T[row, begin : len(ids)] = 1
        weights_B_T[row, len(ids) - 1] = 3  # The output at this token is the score.
        written_B_T[row, begin:sound] = True
    hidden_B_T_D = model.model(input_ids=ids_B_T).last_hidden_state
    logits_B_T = model.score(hidden_B_T_D)[..., 0]
    label_loss = binary_cross_entropy_with_logits(logits_B_T, labels_B_T, weights_B_T, reduction="sum")
    before = written_B_T.roll(-1, 1)  # The hidden state before a token predicts it.
    lm_loss = cross_entropy(lm_head(hidden_B_T_D[before]), ids_B_T[written_B_T])
    return label_loss / weights_B_T.sum(), lm_loss


@torch.no_grad()
def measure(model, tokenizer, rng: random.Random, count: int) -> dict[str, float]:
    """Return the fraction of solutions of each kind that the model calls sound (a score above 0)."""
    shares = {}
    for kind in ("sound", "flawed", "wrong"):
        called_sound = 0
        for _ in range(count):
            ids, _, _ = read(tokenizer, *a_solution(rng, kind))
            called_sound += model(input_ids=ids[None]).logits.item() > 0
        shares[kind] = called_sound / count
    return shares


def main() -> None:
    config = tyro.cli(Config, description=__doc__)
    torch.manual_seed(config.seed)
    rng = random.Random(config.seed)
    tokenizer = AutoTokenizer.from_pretrained(config.model)
    model = AutoModelForSequenceClassification.from_pretrained(config.model, num_labels=1).float()
    model.config.pad_token_id = tokenizer.pad_token_id
    lm_head = AutoModelForCausalLM.from_pretrained(config.model).float().lm_head
    parameters = [*model.parameters(), *lm_head.parameters()]
    optimizer = torch.optim.AdamW(parameters, lr=config.lr, betas=(0.9, 0.95), weight_decay=0.0)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, config.lr, config.steps, pct_start=0.1)
    for step in range(1, config.steps + 1):
        batch = []
        for _ in range(config.batch_size):
            kind = rng.choice(("sound", "flawed", "practice"))
            batch.append(read(tokenizer, *a_solution(rng, kind)))
        label_loss, lm_loss = losses(model, lm_head, batch)
        optimizer.zero_grad()
        (label_loss + lm_loss).backward()
        torch.nn.utils.clip_grad_norm_(parameters, 1.0)
        optimizer.step()
        schedule.step()
        if step % 50 == 0:
            print(f"step {step}: loss {label_loss.item():.3f}, LM loss {lm_loss.item():.3f}", flush=True)
    shares = measure(model, tokenizer, random.Random("held out"), config.held_out)
    print(
        "held-out solutions that are called sound:",
        ", ".join(f"{share:.3f} of {kind}" for kind, share in shares.items()),
    )
    model.save_pretrained(config.out_dir)
    tokenizer.save_pretrained(config.out_dir)


if __name__ == "__main__":
    main()
