"""docs/walkthrough.md: the trainer's functions turn the recorded step into the numbers on the page."""

import asyncio
import json

import pytest
import torch

import compute_score
from algorithm import compute_advantages, compute_policy_loss, paragraph_starts, tokens_before
from test_recipes import ROOT
from toy import toy_world
from toy.report import table

TEXT = (ROOT / "docs/walkthrough.md").read_text()
PROSE = " ".join(TEXT.split())
# The texts of one group, and the log-probabilities of its tokens before and after each update of the step.
DATA = json.loads((ROOT / "docs/walkthrough.json").read_text())
SAMPLES, ROW = DATA["samples"], DATA["row"]
SOUND, FLAWED, OVERLOOKED = 0, 2, 7  # samples 1, 3 and 8 on the page


@pytest.fixture
def results(monkeypatch):
    """Score the samples with the demo's reward function. The recorded critiques replace the judge."""
    critiques = iter(sample["critique"] for sample in SAMPLES if sample["critique"] is not None)

    async def recorded(prompt, *arguments, **options):
        return "ok", next(critiques), 0

    monkeypatch.setattr(compute_score, "chat", recorded)
    found = []
    for sample in SAMPLES:
        about = {"data_source": ROW["data_source"], "extra_info": ROW["extra_info"]}
        about |= {"ground_truth": ROW["reward_model"]["ground_truth"], "solution_str": sample["text"]}
        about |= {"reward_router_address": "recorded"} | DATA["reward_kwargs"]
        found.append(asyncio.run(toy_world.compute_score_fapo(**about)))
    return found


@pytest.fixture
def advantages(results):
    """Return the advantages with FAPO's rewards and with the outcome reward."""
    fapo = [result["score"] for result in results]
    outcome = [1.0 if result["acc"] else -1.0 for result in results]
    return compute_advantages(torch.tensor([fapo, outcome]))


def lines_of(sample):
    return compute_score.split_paragraphs(sample["text"])


def oracle(sample):
    return toy_world.first_wrong_paragraph(ROW["extra_info"]["question"], lines_of(sample))


def test_the_recorded_samples_are_whole(results):
    for sample, result in zip(SAMPLES, results):
        assert "".join(sample["tokens"]).removesuffix("<|end|>") == sample["text"]
        assert all(len(row) == len(sample["tokens"]) for row in sample["logprobs"])
        assert result["genrm_status"] == ("skipped" if sample["critique"] is None else "ok")


def test_rewards_and_advantages(results, advantages):
    """Identical samples share a row of the page's table."""
    numbers = {}
    for number, (sample, result) in enumerate(zip(SAMPLES, results)):
        judge = "-"
        if sample["critique"] is not None:
            judge = str(compute_score.parse_critique(sample["critique"], len(lines_of(sample))))
        answer = "correct" if result["acc"] else "wrong"
        cells = [f"`{', '.join(lines_of(sample))}`", answer, judge, str(oracle(sample))]
        cells += [f"{result['score']:g}", *(f"{row[number]:+.3f}" for row in advantages)]
        numbers.setdefault(tuple(cells), []).append(str(number + 1))
    heads = ["samples", "solution", "answer", "judge", "oracle", "reward", "advantage", "outcome only"]
    assert table(heads, *([", ".join(some), *cells] for cells, some in numbers.items())) in TEXT
    rewards = torch.tensor([result["score"] for result in results])
    text = f"mean of the group's rewards, {rewards.mean():.3f}, and divides by their standard deviation, "
    assert f"{text}{rewards.std():.3f}." in PROSE
    fapo, outcome = advantages[:, FLAWED]
    assert f"With FAPO, its advantage is {fapo:+.3f} instead of {outcome:+.3f}" in PROSE
    assert results[FLAWED]["flawed_positive"] and results[SOUND]["truly_correct"]
    missed = results[OVERLOOKED]
    assert missed["oracle_flawed_positive"] and not missed["flawed_positive"]


def test_what_the_judge_reads_and_writes():
    question, truth = ROW["extra_info"]["question"], ROW["reward_model"]["ground_truth"]
    assert f"> {question}\n\nThe correct answer is {truth}." in TEXT
    style = DATA["reward_kwargs"]["prompt_style"]
    prompt = compute_score.format_critic_prompt(question, truth, SAMPLES[FLAWED]["text"], style)
    assert f"For sample {FLAWED + 1}, the judge reads:\n\n```text\n{prompt}\n```" in TEXT
    assert f"For sample {OVERLOOKED + 1}, the judge writes:" in PROSE
    for number in (FLAWED, OVERLOOKED):
        assert f"\n```text\n{SAMPLES[number]['critique']}\n```" in TEXT
    place = oracle(SAMPLES[OVERLOOKED])
    assert f"paragraph {place}, `{lines_of(SAMPLES[OVERLOOKED])[place]}`, is wrong" in PROSE


def test_the_loss_and_the_new_probability_of_one_token(results, advantages):
    """The two samples differ first at one token, which is not clipped."""
    pairs = zip(SAMPLES[FLAWED]["tokens"], SAMPLES[SOUND]["tokens"])
    fork = next(place for place, (one, other) in enumerate(pairs) if one != other)
    line = "".join(SAMPLES[SOUND]["tokens"][:fork]).split("\n\n")[-1]
    num_tokens = DATA["update"]["tokens"]
    losses, moves = [], []
    for number in (SOUND, FLAWED):
        token = f"`{line}{SAMPLES[number]['tokens'][fork]}`"
        old, now, after = (torch.tensor([[row[fork]]]) for row in SAMPLES[number]["logprobs"])
        advantage = advantages[0, number : number + 1]
        loss, _ = compute_policy_loss(now, old, advantage, torch.ones(1, 1, dtype=torch.bool), 1)
        ratio = (now - old).exp().item()
        assert loss.item() == pytest.approx(-ratio * advantage.item())
        cells = [f"{ratio:.4f}", f"{advantage.item():+.3f}", f"{loss:+.4f}", f"{loss / num_tokens:+.2e}"]
        losses.append([token, str(number + 1), *cells])
        moves.append([token, *(f"{logprob.exp().item():.4f}" for logprob in (old, now, after))])
    assert table(["token", "sample", "r", "advantage", "loss", "loss / N"], *losses) in TEXT
    times = ["before the step", "before the update of its mini-batch", "after the step"]
    assert table(["token", *times], *moves) in TEXT
    assert f"has N = {num_tokens:,} response tokens" in PROSE
    about = DATA["update"]
    assert f"makes {about['of']} updates with a learning rate of {about['lr']:g}" in PROSE


def test_the_tokens_that_credit_spares(results):
    sample, wrong = SAMPLES[FLAWED], results[FLAWED]["first_wrong"]
    pieces = [*sample["tokens"][:-1], ""]  # "" for the end token
    ids = list(range(len(pieces)))
    text, decode = sample["text"], lambda some: "".join(pieces[i] for i in some)
    spared = tokens_before(paragraph_starts(text), text, ids, decode)[wrong]
    assert f"the advantage of the {spared} tokens before the wrong paragraph to 0" in PROSE
