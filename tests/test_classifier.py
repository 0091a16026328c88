"""recipes/toy_classifier.py: its labels, its losses, and how it is measured."""

import random
import types

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification, AutoTokenizer

from test_recipes import ROOT, load
from toy import toy_world

QUESTION = "Ben has 65 eggs, gets 9, loses 8. Rest by 5?"
SOUND = ["65+9=74", "74-8=66", r"Rest \boxed{1}"]


@pytest.fixture(scope="module")
def classifier():
    return load("recipes/toy_classifier")


@pytest.fixture(scope="module")
def tokenizer():
    return AutoTokenizer.from_pretrained(ROOT / "toy/models/judge")


@pytest.mark.parametrize("paragraphs, shared", [
    (SOUND, "65+9=74\n\n74-8=66\n\nRest \\boxed{1}<|end|>"),
    (["65+9=74", "74-8=76", r"Rest \boxed{1}"], "65+9=74\n\n74-8="),
    (SOUND[:2], "65+9=74\n\n74-8=66"),  # it ends too early
    (["67+9=76"], "6"),
])  # fmt: skip
def test_a_token_is_sound_as_long_as_all_up_to_it_is(classifier, tokenizer, paragraphs, shared):
    ids, begin, sound = classifier.read(tokenizer, toy_world.parse_problem(QUESTION), paragraphs)
    assert tokenizer.decode(ids[:begin]) == f"<|user|>{QUESTION}<|assistant|>"
    assert tokenizer.decode(ids[begin:sound]) == shared
    assert tokenizer.decode(ids[begin:]) == "\n\n".join(paragraphs) + "<|end|>"


def test_the_losses_by_hand(classifier):
    """Two conversations of other lengths; a model whose hidden state is its token, a head that says t - 2."""
    batch = [(torch.tensor([1, 2, 3, 2]), 1, 3), (torch.tensor([1, 4]), 1, 2)]
    states = torch.tensor([[0.0], [1.0], [2.0], [3.0], [4.0]])
    model = types.SimpleNamespace(
        model=lambda input_ids: types.SimpleNamespace(last_hidden_state=states[input_ids]),
        score=lambda hidden: hidden - 2,
    )

    def lm_head(hidden):  # the token after t is t + 1, three to one against each of the four others
        return torch.nn.functional.one_hot(hidden[:, 0].long() + 1, 5) * torch.log(torch.tensor(3.0))

    label_loss, lm_loss = classifier.losses(model, lm_head, batch)
    # Logits 0, 1, 0 with labels 1, 1, 0 and weights 1, 1, 3; then logit 2 with label 1 and weight 3.
    expected = [0.6931, 0.3133, 3 * 0.6931, 3 * 0.1269]
    assert label_loss.item() == pytest.approx(sum(expected) / 8, abs=1e-4)
    # Written: 2 after 1, 3 after 2, 4 after 1; the last one is not what the head expects.
    assert lm_loss.item() == pytest.approx((0.8473 + 0.8473 + 1.9459) / 3, abs=1e-4)


def test_what_it_reads_and_how_it_is_measured(classifier, tokenizer):
    """A judge of everything as sound keeps all and finds nothing; its score is that of the last token."""
    rng = random.Random(0)
    verdicts = [toy_world.first_wrong_paragraph(str(p), s) == -1
                for p, s in (classifier.a_solution(rng) for _ in range(300))]  # fmt: skip
    assert 0.25 < sum(verdicts) / 300 < 0.45
    model = AutoModelForSequenceClassification.from_pretrained(ROOT / "toy/models/judge", num_labels=1).float()
    model.config.pad_token_id = tokenizer.pad_token_id
    with torch.no_grad():
        model.score.weight.zero_()
        assert classifier.measure(model, tokenizer, rng, 20) == (1.0, 0.0)
        model.score.weight.normal_()
        ids, _, _ = classifier.read(tokenizer, toy_world.parse_problem(QUESTION), SOUND)
        hidden = model.model(input_ids=ids[None]).last_hidden_state[0, -1]
        score = model(input_ids=ids[None]).logits.item()
    assert score == pytest.approx((model.score.weight @ hidden).item(), abs=1e-4)


@pytest.mark.slow
def test_a_few_updates_lower_both_losses(classifier, tokenizer):
    model = AutoModelForSequenceClassification.from_pretrained(ROOT / "toy/models/judge", num_labels=1).float()
    lm_head = AutoModelForCausalLM.from_pretrained(ROOT / "toy/models/judge").float().lm_head
    rng = random.Random(0)
    batch = [classifier.read(tokenizer, *classifier.a_solution(rng)) for _ in range(8)]
    parameters = [*model.parameters(), *lm_head.parameters()]
    optimizer = torch.optim.AdamW(parameters, lr=1e-3)
    first = [loss.item() for loss in classifier.losses(model, lm_head, batch)]
    for _ in range(20):
        optimizer.zero_grad()
        sum(classifier.losses(model, lm_head, batch)).backward()
        optimizer.step()
    last = [loss.item() for loss in classifier.losses(model, lm_head, batch)]
    assert last[0] < first[0] / 2 and last[1] < first[1] / 2
