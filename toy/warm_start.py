"""Make the models of the toy world: a tokenizer and two Llamas with 1 M parameters, the policy and the judge.

    python prepare_data.py --tasks toy --out-dir data/toy             # copies the models of toy/models/
    python -m toy.warm_start --out-dir data/toy                       # trains them again: 5 to 8 minutes
    python -m toy.warm_start --out-dir data/weak --kind weak_policy   # another kind of world
    python -m toy.warm_start --out-dir data/own --kind own_flaws --models policy   # the second world
    python -m toy.warm_start --out-dir data/own0 --kind own_flaws --models         # only its rows
    python -m toy.warm_start --out-dir data/shop --kind shop --models policy       # the world with a tool
    python -m toy.warm_start --out-dir data/shop_judge --kind shop_judge --models judge   # and its judge

The warm start is supervised training on texts that toy/toy_world.py generates. It teaches errors that
reinforcement learning can then correct: the policy forgets carries, and the judge overlooks half of the wrong
lines. In the second world, the policy is trained only on sound solutions, and its training stops early. On
the same kind of processor, the same seed produces the same files.

Not covered: training on GPUs, and models with more than a million parameters. If you copy this file, copy
toy/toy_world.py, toy/shop_world.py, toy/shop_judge.py, prepare_data.py, command_line.py, reward_worker.py and
compute_score.py as well.
"""

import math
import re
import sys
from dataclasses import dataclass
from pathlib import Path
from random import Random
from typing import Literal

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
from command_line import cli


@dataclass
class Config:
    """Settings of a toy world: the rows of its data sets, and the models to train from scratch."""

    out_dir: Path  # Output directory for the Parquet files and the models.
    seed: int = 0  # Random seed for the problems, the tokenizer and the training.
    # Kind of toy world. narrow_judge: the judge is trained only on forgotten carries. weak_policy: the policy
    # is wrong more often than correct. own_flaws: the second world, whose policy is trained only on sound
    # solutions. shop: the world with a tool. shop_judge: the judge of the world with a tool, which starts as
    # the shipped judge of the first world.
    kind: Literal["standard", "narrow_judge", "weak_policy", "own_flaws", "shop", "shop_judge"] = "standard"
    # Models to train. The policy takes about 2 minutes (5 with --kind shop) and the judge about 4 (20
    # with --kind shop_judge). --models without a name writes only the rows.
    models: tuple[Literal["policy", "judge"], ...] = ("policy", "judge")
    # With --kind own_flaws or shop: stop training the policy when this fraction of its solutions is sound.
    stop_at: float = 0.25


# The command line is parsed before torch and transformers are imported, which takes four seconds.
if __name__ == "__main__":
    CONFIG = cli(Config, __doc__, end="Not covered")

import torch
from tokenizers import Regex, Tokenizer, decoders, normalizers, pre_tokenizers, trainers
from tokenizers.models import BPE
from torch.nn.functional import cross_entropy
from torch.nn.utils.rnn import pad_sequence
from tqdm import trange
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from prepare_data import write_table
from toy import shop_judge, shop_world
from toy.toy_world import (
    COARSE,
    JUDGE,
    KINDS,
    SHIPPED,
    SHORT_WORDS,
    TOTAL,
    Kind,
    Slips,
    critic_prompt,
    make_rows,
    random_problem,
    right_solution,
    write_critique,
    write_solution,
)

# ---- Tokenizer ---------------------------------------------------------------------------------------------

USER, ASSISTANT, END, PAD = "<|user|>", "<|assistant|>", "<|end|>", "<|pad|>"
CHAT_TEMPLATE = (
    "{% for message in messages %}{{ '<|' + message['role'] + '|>' + message['content'] }}"
    "{% if message['role'] == 'assistant' %}{{ '<|end|>' }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|assistant|>' }}{% endif %}"
)


def chat(prompt: str, response: str):
    """Return a prompt and a response in the format of the chat template."""
    return f"{USER}{prompt}{ASSISTANT}", f"{response}{END}"


def partly_learned(prompt: str, lines: list[str], learned, mark: str) -> tuple[str, ...]:
    """Return an example for `fit` in which the model learns only the ends of some lines.

    Args:
        learned: The indices of these lines. All other text is given.
        mark: The end of a line begins with its last `mark`.
    """
    pieces = [prompt]
    for index, line in enumerate(lines):
        if index in learned:
            given, _, end = line.rpartition(mark)
            pieces[-1] += given
            pieces += [mark + end, "\n"]
        else:
            pieces[-1] += f"{line}\n"
    pieces[-1] += END
    return tuple(pieces)


def tokenizer_corpus(rng: Random, kind: Kind = KINDS["standard"]) -> list[str]:
    """Return examples of all texts that the models read or write."""
    texts = []
    for _ in range(3000):
        problem = random_problem(rng, rng.choice((kind.question, TOTAL)), kind.lengths)
        paragraphs = write_solution(problem, rng, kind.policy)
        critique = write_critique(problem, paragraphs, rng, **JUDGE)
        texts += [str(problem), "\n\n".join(paragraphs), critic_prompt(problem, paragraphs), critique]
    return texts


def build_tokenizer(texts: list[str]) -> PreTrainedTokenizerFast:
    """Train a byte-level BPE tokenizer on `texts`: each digit is one token, and "\\n\\n" is never split.

    The tokenizer replaces the keys of SHORT_WORDS with their values. Decoding restores the long words, even
    if the original text contained a short word.
    """
    tokenizer = Tokenizer(BPE())
    split = pre_tokenizers.Split(Regex(r"\n\n|\n?[^\d\n]+|\n|\d"), behavior="isolated")
    byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([split, byte_level])
    shorten = []
    lengthen = []
    for word, short in SHORT_WORDS.items():
        shorten.append(normalizers.Replace(word, short))
        # In byte-level tokens, Ġ stands for a space.
        lengthen.append(decoders.Replace(short.replace(" ", "Ġ"), word.replace(" ", "Ġ")))
    tokenizer.normalizer = normalizers.Sequence(shorten)
    tokenizer.decoder = decoders.Sequence([*lengthen, decoders.ByteLevel()])
    trainer = trainers.BpeTrainer(
        vocab_size=1024,
        special_tokens=[PAD, END, USER, ASSISTANT],
        min_frequency=2,
        show_progress=False,
        initial_alphabet=byte_level.alphabet(),
    )
    tokenizer.train_from_iterator(texts, trainer)
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        eos_token=END,
        pad_token=PAD,
        padding_side="left",
        chat_template=CHAT_TEMPLATE,
    )


# ---- Warm start --------------------------------------------------------------------------------------------


def new_model(vocab_size: int, seed: int) -> LlamaForCausalLM:
    """Return a Llama with about 1 M parameters and an untied head: vLLM on CPU reloads tied heads wrongly."""
    torch.manual_seed(seed)
    config = LlamaConfig(
        vocab_size=vocab_size,
        hidden_size=128,
        intermediate_size=384,
        num_hidden_layers=4,
        num_attention_heads=4,
        max_position_embeddings=512,
        tie_word_embeddings=False,
        pad_token_id=0,
        eos_token_id=1,
        bos_token_id=None,
        initializer_range=0.05,  # With the usual 0.02, such a narrow model learns more slowly.
    )
    return LlamaForCausalLM(config)


def response_losses(model, tokenizer, examples, count: int):
    """Return the losses, ids and row numbers of all tokens that the model writes in `count` examples."""
    texts = []
    responses = []  # For each token of each text: whether the model writes it.
    for _ in range(count):
        text = []
        own = []
        for number, piece in enumerate(examples()):
            ids = tokenizer.encode(piece)
            text += ids
            own += [number % 2 == 1] * len(ids)
        texts.append(torch.tensor(text))
        responses.append(torch.tensor(own))
    ids = pad_sequence(texts, batch_first=True)
    counts = pad_sequence(responses, batch_first=True)
    targets = ids[counts]
    hidden = model.model(ids).last_hidden_state[counts.roll(-1, 1)]
    losses = cross_entropy(model.lm_head(hidden), targets, reduction="none")
    return losses, targets, counts.nonzero()[:, 0]


@torch.no_grad()
def sound_share(model, tokenizer, examples) -> float:
    """Return the mean probability of the sound solution at temperature 1. Each problem has exactly one."""
    losses, _, rows = response_losses(model, tokenizer, examples, 128)
    return torch.zeros(128).index_add(0, rows, losses).neg().exp().mean().item()


def fit(model, tokenizer, examples, steps, lr, final_lr, verdict_weight, stop_at=None, of=None, **bar):
    """Train a model on the responses in the examples, with 16 examples per step.

    Args:
        examples: A function that returns an example: (prompt, response), or (prompt, response, given text,
            response, ...). Only the responses are learned.
        verdict_weight: The weight of the tokens " ok" and " not", which are rare but determine the verdict.
        stop_at: Stop when the `sound_share` of examples from the function `of` reaches this value.
        bar: Options of the tqdm progress bar.
    """
    verdicts = torch.tensor(tokenizer.encode(" ok") + tokenizer.encode(" not"))
    optimizer = torch.optim.AdamW(model.parameters(), lr=lr, betas=(0.9, 0.95), weight_decay=0.01)
    progress = trange(steps, mininterval=2, leave=False, **bar)
    for step in progress:
        cosine = final_lr + (lr - final_lr) * 0.5 * (1 + math.cos(math.pi * step / steps))
        optimizer.param_groups[0]["lr"] = cosine * min(1.0, (step + 1) / 20)
        losses, targets, _ = response_losses(model, tokenizer, examples, 16)
        weights = torch.where(torch.isin(targets, verdicts), verdict_weight, 1.0)
        loss = (losses * weights).sum() / weights.sum()
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        progress.set_postfix(loss=loss.item(), refresh=False)
        if stop_at and step % 20 == 19 and sound_share(model, tokenizer, of) >= stop_at:
            break


def phases(name: str, rng: Random, kind: Kind):
    """Return the phases of a model's warm start as [(what it learns, *arguments of `fit`)].

    The arguments start with `examples`. The judge learns to add before it learns to compare, because with a
    solution in the prompt it would only learn to copy.
    """

    def solve(question=kind.question, slips=Slips(), lengths=kind.lengths):
        problem = random_problem(rng, question, lengths)
        return chat(str(problem), "\n\n".join(write_solution(problem, rng, slips)))

    def solve_either(slips=Slips()):
        question = kind.question
        if rng.random() >= 0.6:
            question = TOTAL
        return solve(question, slips)

    def solve_short_too():  # Half of the stories are short, so that the model first learns the question.
        if rng.random() < 0.5:
            return solve(lengths=(0, 2))
        return solve_either()

    def critique(problem, paragraphs, **how):
        return chat(critic_prompt(problem, paragraphs), write_critique(problem, paragraphs, rng, **how))

    def compare():  # The critique checks all lines. Half of them are wrong, so there are many verdicts.
        if rng.random() < 0.3:
            return solve()
        problem = random_problem(rng, kind.question, kind.lengths)
        return critique(problem, write_solution(problem, rng, kind.practice), stop=False)

    def criticise(**how):
        return critique(*right_solution(rng, rng.random() < 0.5, kind), **how)

    if name == "policy" and kind.stop_at:
        return [("to solve", solve_short_too, 4000, 2e-3, 2e-3, 1.0, kind.stop_at, solve)]
    if name == "policy":
        return [
            ("to solve", solve_either, 1000, 2e-3, 2e-4, 1.0),
            ("to slip", lambda: solve_either(kind.policy), 200, 1e-3, 1e-4, 1.0),
        ]
    add = solve
    patience = 1
    if kind.stop_at:  # This kind has longer stories.
        add = solve_short_too
        patience = 2
    return [
        ("to add", add, 400 * patience, 2e-3, 1.2e-3, 1.0),
        ("to compare", compare, 500 * patience, 2e-3, 1.2e-3, 5.0),
        ("to criticise", criticise, 400 * patience, 1.5e-3, 2e-4, 3.0),
        ("to overlook", lambda: criticise(**JUDGE), 150 * patience, 1e-3, 1e-4, 1.0),
    ]


def shop_phases(rng: Random, stop_at: float):
    """Return the phases for the shop's policy. Half of the texts look prices up, and half just state them."""

    def solve(looks_up=None, lengths=(3, 4)):
        problem = shop_world.random_problem(rng, COARSE, lengths)
        if looks_up is None:
            looks_up = rng.random() < 0.5
        pieces = [text for _, text in shop_world.write_solution(problem, looks_up)]
        prompt, pieces[-1] = chat(str(problem), pieces[-1])
        return [prompt, *pieces]

    def solve_short_too():  # Half of the stories are short, so that the model first learns the question.
        return solve(lengths=rng.choice([(0, 2), (3, 4)]))

    return [("to solve", solve_short_too, 4000, 2e-3, 2e-3, 1.0, stop_at, lambda: solve(looks_up=True))]


def shop_corpus(rng: Random) -> list[str]:
    """Return the words of the shop's texts one by one, so that no token contains a whole story."""
    words = []
    for _ in range(3000):
        problem = shop_world.random_problem(rng, COARSE)
        for _, text in (("user", str(problem)), *shop_world.write_solution(problem, rng.random() < 0.5)):
            words += re.findall(r"\n\n| ?\w+|\W", text)
    return words


def shop_judge_phases(rng: Random):
    """Return the phases for the shop's judge, which starts as the first world's judge.

    In all phases but one, a quarter of the texts are solutions without a tool, because the judge must add
    instead of copying. It learns to list the deals before it sees trajectories, because otherwise it would
    copy the policy's items. Before whole critiques, it learns parts of them: the sums with their quotes, then
    the quotes of items and their verdicts. Otherwise, it would learn to compare items only by chance.
    """

    def add():
        problem = random_problem(rng, COARSE)
        return chat(str(problem), "\n\n".join(write_solution(problem, rng)))

    def read():
        if rng.random() < 0.25:
            return add()
        problem = shop_world.random_problem(rng)
        return chat(str(problem), " ".join(shop_judge.list_deals(problem)))

    def practise(first):  # The judge learns only the checks of items (first is 0) or of sums (first is 1).
        problem, turns, (deals, *checks) = shop_judge.write_practice(rng, errors=0.9)
        prompt, _ = chat(shop_judge.critic_prompt(problem, turns), "")
        return partly_learned(f"{prompt}{deals}\n", checks, range(first, len(checks), 2), ":")

    def check_sums():
        if rng.random() < 0.25:
            return add()
        return practise(1)

    def check_items():
        part = rng.random()
        if part < 0.4:  # The judge learns only the verdicts.
            checks = shop_judge.write_comparisons(rng)
            return partly_learned(f"{USER}{ASSISTANT}", checks, range(len(checks)), " ")
        if part < 0.8:
            return practise(0)
        return practise(1)

    def check_all():
        if rng.random() < 0.25:
            return add()
        problem, turns, checks = shop_judge.write_practice(rng, errors=0.5)
        return chat(shop_judge.critic_prompt(problem, turns), "\n".join(checks))

    def criticise():
        if rng.random() < 0.25:
            return add()
        problem, turns = shop_judge.right_trajectory(rng, rng.random() < 0.5)
        return chat(shop_judge.critic_prompt(problem, turns), shop_judge.write_critique(problem, turns))

    return [
        ("to list deals", read, 500, 2e-3, 1.5e-3, 3.0),
        ("to check sums", check_sums, 400, 2e-3, 1.5e-3, 1.0),
        ("to check items", check_items, 600, 2e-3, 1.5e-3, 1.0),
        ("to check all", check_all, 300, 2e-3, 1.5e-3, 3.0),
        ("to criticise", criticise, 400, 1e-3, 1e-4, 3.0),
        # Before these two, the judge accepts one of six wrong sums.
        ("to check all", check_all, 300, 1.5e-3, 1e-3, 3.0),
        ("to criticise", criticise, 400, 1e-3, 1e-4, 3.0),
    ]


def shop_judge_corpus(rng: Random) -> list[str]:
    """Return the words of the texts that the shop's judge reads and writes."""
    words = []
    examples = dict.fromkeys(example for _, example, *_ in shop_judge_phases(rng))  # Two phases come twice.
    for _ in range(1500):
        for example in examples:
            words += re.findall(r"\n\n|\n<|> \(\w+\) |[\n ]?\w+|\W", "".join(example()))
    return words


def continue_from(model, tokenizer, folder: Path) -> None:
    """Copy a trained model's weights. Tokens that its tokenizer lacks keep their initial embeddings."""
    weights = LlamaForCausalLM.from_pretrained(folder, dtype=torch.float32).state_dict()
    known = PreTrainedTokenizerFast.from_pretrained(folder).get_vocab()
    shared = {number: known[token] for token, number in tokenizer.get_vocab().items() if token in known}
    for name in ("model.embed_tokens.weight", "lm_head.weight"):
        rows = model.state_dict()[name].clone()
        rows[list(shared)] = weights[name][list(shared.values())]
        weights[name] = rows
    model.load_state_dict(weights)


def warm_start(row: int, names, tokenizer, out_dir: Path, seed: int, kind, stop_at=0.25) -> None:
    """Train the model names[row] and save it in `out_dir` in bf16.

    Args:
        kind: The kind of toy world, or None for the shop and its judge.
    """
    torch.set_num_threads(1)  # One thread is fastest for this model size.
    name = names[row]
    model = new_model(len(tokenizer), seed)
    rng = Random(f"{seed}/{name}")
    if kind is None and name == "judge":
        continue_from(model, tokenizer, SHIPPED / name)
        learning = shop_judge_phases(rng)
    elif kind is None:
        learning = shop_phases(rng, stop_at)
    else:
        learning = phases(name, rng, kind)
    for what, *phase in learning:
        fit(model, tokenizer, *phase, desc=f"{name:6} learns {what}", position=row)
    model.bfloat16().save_pretrained(out_dir / name)
    tokenizer.save_pretrained(out_dir / name)


# ---- A world: its rows, and its models ---------------------------------------------------------------------


def shop_row(rng: Random, split: str, index: int) -> dict:
    return shop_world.policy_row(shop_world.random_problem(rng), split, index)


def shop_judge_row(rng: Random, split: str, index: int) -> dict:
    """Return a row of the shop's judge. Half of the trajectories are flawed."""
    problem, turns = shop_judge.right_trajectory(rng, flawed=index % 2 == 0)
    return shop_judge.critic_row(problem, turns, split, index)


def write_rows(make_row, name: str, out_dir: Path, seed: int) -> None:
    """Write the rows that make_row(rng, split, index) returns to NAME_train.parquet and NAME_test.parquet."""
    rng = Random(f"{seed}/rows")
    for split, count in (("train", 4096), ("test", 512)):
        rows = [make_row(rng, split, index) for index in range(count)]
        write_table(out_dir / f"{name}_{split}.parquet", rows)


def main(config: Config) -> None:
    kind = KINDS.get(config.kind)
    config.out_dir.mkdir(parents=True, exist_ok=True)
    rng = Random(f"{config.seed}/tokenizer")
    own = {"shop": "policy", "shop_judge": "judge"}.get(config.kind)
    for name in config.models:
        if own and name != own:
            raise SystemExit(
                f"error: --models {name}: --kind {config.kind} has no {name}; pass --models {own}"
            )
    if config.kind == "shop":
        write_rows(shop_row, "shop", config.out_dir, config.seed)
        tokenizer = build_tokenizer(shop_corpus(rng))
    elif config.kind == "shop_judge":
        write_rows(shop_judge_row, "fapo_critic", config.out_dir, config.seed)
        tokenizer = build_tokenizer(shop_judge_corpus(rng))
    else:
        if kind.stop_at:
            kind = kind._replace(stop_at=config.stop_at)
        for name, rows in make_rows(config.kind, {"seed": config.seed}).items():
            write_table(config.out_dir / f"{name}.parquet", rows)
        tokenizer = build_tokenizer(tokenizer_corpus(rng, kind))
    arguments = (config.models, tokenizer, config.out_dir, config.seed, kind, config.stop_at)
    torch.multiprocessing.spawn(warm_start, arguments, nprocs=len(config.models))  # one process per model


if __name__ == "__main__":
    main(CONFIG)
