"""recipes/toy_classifier.py: labels, losses and measurements; its runs in docs/make_evidence.py."""

import asyncio
import json
import random
import types

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification, AutoTokenizer

import compute_score
from played import server
from test_recipes import ROOT, load
from toy import toy_world

JUDGE = ROOT / "toy/models/judge"
QUESTION = "Ben has 65 eggs, gets 9, loses 8. Remainder mod 5?"
SOUND = ["65+9=74", "74-8=66", r"Remainder \boxed{1}"]


@pytest.fixture(scope="module")
def classifier():
    return load("recipes/toy_classifier")


@pytest.fixture(scope="module")
def tokenizer():
    return AutoTokenizer.from_pretrained(JUDGE)


@pytest.mark.parametrize(
    "paragraphs, shared",
    [
        (SOUND, "65+9=74\n\n74-8=66\n\nRemainder \\boxed{1}<|end|>"),
        (["65+9=74", "74-8=76", r"Remainder \boxed{1}"], "65+9=74\n\n74-8="),
        (SOUND[:2], "65+9=74\n\n74-8=66"),  # it ends too early
        (["67+9=76"], "6"),
    ],
)
def test_a_token_is_sound_as_long_as_all_up_to_it_is(classifier, tokenizer, paragraphs, shared):
    ids, begin, sound = classifier.read(tokenizer, toy_world.parse_problem(QUESTION), paragraphs)
    assert tokenizer.decode(ids[:begin]) == f"<|user|>{QUESTION}<|assistant|>"
    assert tokenizer.decode(ids[begin:sound]) == shared
    assert tokenizer.decode(ids[begin:]) == "\n\n".join(paragraphs) + "<|end|>"


def test_the_losses_by_hand(classifier):
    """Two conversations have different lengths.

    The model's hidden state is its token, and the head returns t - 2.
    """
    batch = [(torch.tensor([1, 2, 3, 2]), 1, 3), (torch.tensor([1, 4]), 1, 2)]
    states = torch.tensor([[0.0], [1.0], [2.0], [3.0], [4.0]])
    model = types.SimpleNamespace(
        model=lambda input_ids: types.SimpleNamespace(last_hidden_state=states[input_ids]),
        score=lambda hidden: hidden - 2,
    )

    def lm_head(hidden):  # the token after t is t + 1, three to one against each of the four others
        return torch.nn.functional.one_hot(hidden[:, 0].long() + 1, 5) * torch.log(torch.tensor(3.0))

    label_loss, lm_loss = classifier.losses(model, lm_head, batch)
    # The logits 0, 1, 0 have labels 1, 1, 0 and weights 1, 1, 3; then the logit 2 has label 1 and weight 3.
    expected = [0.6931, 0.3133, 3 * 0.6931, 3 * 0.1269]
    assert label_loss.item() == pytest.approx(sum(expected) / 8, abs=1e-4)
    # The texts are 2 after 1, 3 after 2, and 4 after 1; the head does not expect the last one.
    assert lm_loss.item() == pytest.approx((0.8473 + 0.8473 + 1.9459) / 3, abs=1e-4)


def test_what_it_reads_and_how_it_is_measured(classifier, tokenizer):
    """A head of zeros calls nothing sound. As in vLLM, the score comes from the last token."""
    rng = random.Random(0)
    for kind in ("sound", "flawed", "wrong"):
        for _ in range(20):
            problem, paragraphs = classifier.a_solution(rng, kind)
            right = paragraphs[-1].endswith(f"{{{problem.answer}}}")
            assert right == (kind != "wrong")
            assert (toy_world.first_wrong_paragraph(str(problem), paragraphs) == -1) == (kind == "sound")
    model = AutoModelForSequenceClassification.from_pretrained(JUDGE, num_labels=1).float()
    model.config.pad_token_id = tokenizer.pad_token_id
    with torch.no_grad():
        model.score.weight.zero_()
        assert classifier.measure(model, tokenizer, rng, 5) == {"sound": 0, "flawed": 0, "wrong": 0}
        model.score.weight.normal_()
        ids, _, _ = classifier.read(tokenizer, toy_world.parse_problem(QUESTION), SOUND)
        hidden = model.model(input_ids=ids[None]).last_hidden_state[0, -1]
        score = model(input_ids=ids[None]).logits.item()
    assert score == pytest.approx((model.score.weight @ hidden).item(), abs=1e-4)


@pytest.mark.slow
def test_a_few_updates_lower_both_losses(classifier, tokenizer):
    model = AutoModelForSequenceClassification.from_pretrained(JUDGE, num_labels=1).float()
    lm_head = AutoModelForCausalLM.from_pretrained(JUDGE).float().lm_head
    rng = random.Random(0)
    batch = [classifier.read(tokenizer, *classifier.a_solution(rng, "practice")) for _ in range(8)]
    parameters = [*model.parameters(), *lm_head.parameters()]
    optimizer = torch.optim.AdamW(parameters, lr=1e-3)
    first = [loss.item() for loss in classifier.losses(model, lm_head, batch)]
    for _ in range(20):
        optimizer.zero_grad()
        sum(classifier.losses(model, lm_head, batch)).backward()
        optimizer.step()
    last = [loss.item() for loss in classifier.losses(model, lm_head, batch)]
    assert last[0] < first[0] / 2 and last[1] < first[1] / 2


@pytest.mark.parametrize(
    "logit, answer, score, asked",
    [
        (1.5, "1", 1.0, 1),
        (-0.5, "1", 0.0, 1),
        (1.5, "2", -1.0, 0),
    ],
)
def test_the_classifier_as_fapos_judge(logit, answer, score, asked):
    """The classifier is queried on correct answers only, and a negative score means a flaw.

    The oracle adds metrics.
    """
    function = load("recipes/toy_disrm_reward").compute_score_flagged
    bodies = []

    def classify(path, body):
        assert path == "/classify"
        bodies.append(body)
        return {"data": [{"probs": [logit]}]}

    async def ask(address):
        try:
            prompt = [{"role": "user", "content": QUESTION}]
            solution = "\n\n".join([*SOUND[:2], f"Remainder \\boxed{{{answer}}}"])
            tokenizer = types.SimpleNamespace(apply_chat_template=lambda messages, tokenize: "text")
            return await function(
                "toy",
                solution,
                "1",
                {"question": QUESTION},
                prompt=prompt,
                reward_router_address=address,
                reward_model_tokenizer=tokenizer,
            )
        finally:
            await compute_score.close_session()

    with server(classify) as address:
        result = asyncio.run(ask(address))
    assert result["score"] == score and len(bodies) == asked
    assert result["flawed_positive"] == (score == 0.0) and result["truly_correct"] == (answer == "1")


def test_what_the_classifier_said_of_samples(tmp_path):
    module = load("docs/make_evidence")

    def sample(step, score, acc, sound, split="train"):
        found = {"truly_correct": acc and sound, "oracle_flawed_positive": acc and not sound}
        about = {"prompt": QUESTION, "response": "65+9=64"}
        return about | dict(step=step, split=split, reward_score=score, reward_extra_info=found)

    samples = [
        sample(1, 2.0, True, True),
        sample(1, -2.0, True, False),
        sample(12, 0.5, True, False),
        sample(12, 1.0, False, False),
        sample(12, 3.0, True, True, split="val"),
    ]
    line = {"val/toy/mean@1": 0.5, "reward/acc": 0.5, "reward/groups_with_spread": 0.75}
    folder = tmp_path / "seed7/classifier"
    folder.mkdir(parents=True)
    for name, lines in ("metrics", [line | {"step": 0}, line | {"step": 12}]), ("samples", samples):
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(one) + "\n" for one in lines))
    (run,) = module.collect(tmp_path)
    assert (run["world"], run["algorithm"], run["seed"]) == ("algo0", "classifier", 7)
    assert run["first"] == {"truly correct": [1, 1], "flawed positive": [0, 1], "wrong": [0, 0]}
    assert run["last"] == {"truly correct": [0, 0], "flawed positive": [1, 1], "wrong": [1, 1]}
    assert run["first_spread"] == run["last_spread"] == 0.75
    assert run["flaws"] == {"arithmetic": 1}
    assert module.file_of(run) == "classifier.jsonl"
    assert module.accepted([run, run], "last", "flawed positive") == "1.00 of 2"
    assert module.accepted([run], "last", "truly correct") == "none"
    assert module.accepted([run | {"algorithm": "flagged"}], "first", "wrong") == "not queried"
