"""The judge of the world with a tool: what it reads and writes, and the scores that it and a rule decide."""

import asyncio
import json
import random
import re
import subprocess
import sys
from pathlib import Path

import pyarrow.parquet as pq
import pytest
import torch
from transformers import AutoTokenizer

import compute_score as scores
import prepare_data
from played import says, server
from run_folder import averages
from toy import shop_judge, shop_world, warm_start

ROOT = Path(__file__).parent.parent
PRICES = dict.fromkeys(shop_world.ITEMS, 7)
PROBLEM = shop_world.parse_problem("Ben has 50, sells pears, buys nuts, sells eggs. More than 50?", PRICES)


def changed(old, new):
    turns = [(who, text.replace(old, new)) for who, text in shop_world.write_solution(PROBLEM)]
    return shop_judge.as_turns(turns)


@pytest.mark.parametrize(
    "turns, critique",
    [
        (
            changed("", ""),
            "0: sells pears 0:pears? ok|2:50+7=57?57 ok|2: buys nuts 2:nuts? ok|4:57-7=50?50 ok|"
            "4: sells eggs 4:eggs? ok|6:50+7=57?57 ok|\\boxed{-1}",
        ),
        (changed("50+7=57", "50+7=59"), "0: sells pears 0:pears? ok|2:50+7=57?59 not|\\boxed{2}"),
        (changed("50+7=57", "51+7=58"), "0: sells pears 0:pears? ok|2:50+7=57?51 not|\\boxed{2}"),
        (
            changed("nuts?", "hats?"),
            "0: sells pears 0:pears? ok|2:50+7=57?57 ok|2: buys nuts 2:hats? not|\\boxed{2}",
        ),
        (
            shop_judge.as_turns(shop_world.write_solution(PROBLEM, looks_up=False)),
            "0: sells pears 0:pears= not|\\boxed{0}",
        ),
        (
            changed("", "")[:3],
            "0: sells pears 0:pears? ok|2:50+7=57?57 ok|2: buys nuts 2:nuts? ok|4:57-7=50? not|\\boxed{4}",
        ),
        (changed("pears?", ""), "0: sells pears 0: not|\\boxed{0}"),
    ],
)
def test_a_critique_derives_each_paragraph_and_ends_at_the_first_that_differs(turns, critique):
    deals, *checks = shop_judge.write_critique(PROBLEM, turns).splitlines()
    assert deals == "0: sells pears 2: buys nuts 4: sells eggs"
    assert checks == critique.split("|")


def test_practice_checks_every_item_and_sum_about_half_of_which_are_wrong():
    """Each check continues from what the policy has stated, and the tool answers what it was asked."""
    rng = random.Random(0)
    findings = {"look-up": [], "sum": []}
    for _ in range(100):
        problem, turns, (listed, *checks) = shop_judge.write_practice(rng, errors=0.5)
        assert len(checks) == 2 * len(problem.deals) and len(turns) == len(checks) + 1
        value = problem.start
        for number, (sign, item) in enumerate(problem.deals):
            verb = "sells" if sign > 0 else "buys"
            asked = turns[2 * number]["text"].split()[-1].removesuffix("?")
            price = int(turns[2 * number + 1]["text"])
            assert price == problem.prices[asked]
            is_right = asked == item
            wanted = f"{2 * number}: {verb} {item} {2 * number}:{asked}? {'ok' if is_right else 'not'}"
            assert checks[2 * number] == wanted and f"{2 * number}: {verb} {item}" in listed
            findings["look-up"].append(is_right)
            stated = turns[2 * number + 2]["text"].split()[0].split("=")[1]
            true = str(value + sign * price)
            assert checks[2 * number + 1].startswith(f"{2 * number + 2}:{value}{sign * price:+}={true}?")
            assert checks[2 * number + 1].endswith(" ok" if stated == true else " not")
            findings["sum"].append(stated == true)
            value = int(stated)
    for some in findings.values():
        assert 0.4 < sum(some) / len(some) < 0.65


def test_comparisons_are_right_and_half_of_their_items_are_wrong():
    rng = random.Random(0)
    right = []
    for check in (check for _ in range(50) for check in shop_judge.write_comparisons(rng)):
        index, item, asked, finding = re.fullmatch(
            r"(\d): (?:sells|buys) (\w+) \d:(\w+)\? (ok|not)", check
        ).groups()
        assert check.count(f"{index}:") == 2 and {item, asked} <= set(shop_world.ITEMS)
        right.append(item == asked)
        assert finding == ("ok" if right[-1] else "not")
    assert 0.4 < sum(right) / len(right) < 0.65


@pytest.fixture(scope="module")
def tokenizer():
    return warm_start.build_tokenizer(warm_start.shop_judge_corpus(random.Random(0)))


@pytest.mark.slow
def test_the_judge_first_learns_sums_and_then_quotes_and_verdicts_of_items(tokenizer):
    """The other tokens are given. Split into pieces, a text has the same tokens as in one piece."""
    found = {}
    for what, example, *_ in warm_start.shop_judge_phases(random.Random(0)):
        for pieces in (example() for _ in range(40)):
            ids = [number for piece in pieces for number in tokenizer.encode(piece)]
            assert ids == tokenizer.encode("".join(pieces))
            for text in pieces[1::2]:
                kind = re.sub(r"[a-z]+\?", "item?", re.sub(r"\d+[+-]\d+=\d+\?\d+", "sum", text))
                found.setdefault(what, set()).add(kind if len(text) < 20 else "text")
    items = {" ok", " not", ":item? ok", ":item? not"}
    assert found["to check items"] == items | {":sum ok", ":sum not"}
    assert found["to check sums"] == {"text", ":sum ok", ":sum not"}
    assert found["to check all"] == found["to criticise"] == {"text"}


def test_rows_show_what_the_judge_is_asked_and_agree_with_the_critiques():
    rng = random.Random(0)
    flaws = set()
    for number in range(400):
        problem, turns = shop_judge.right_trajectory(rng, flawed=number % 2 == 0)
        row = shop_judge.critic_row(problem, turns, "train", number)
        prepare_data.validate_row(row, "row")
        shown = scores.show_solution("".join(turn["text"] for turn in turns), turns)
        asked = scores.format_critic_prompt(str(problem), problem.answer, shown, "brief")
        assert row["prompt"][0]["content"] == asked and "(policy) " in asked
        label = row["reward_model"]["ground_truth"]
        assert (label == -1) == (number % 2 == 1) and row["extra_info"]["total_steps"] == len(turns)
        assert scores.parse_critique(shop_judge.write_critique(problem, turns), len(turns)) == label
        flaws.add(row["extra_info"]["flaw"])
    assert flaws == {"", *shop_world.FLAWS}
    # The judge sees a single turn as part 0, whichever of its paragraphs is wrong.
    row = shop_judge.critic_row(PROBLEM, shop_judge.as_turns(FORGED), "train", 0)
    assert row["reward_model"]["ground_truth"] == 0 and row["extra_info"]["total_steps"] == 1


FORGED = [("policy", "".join(text for _, text in shop_world.write_solution(PROBLEM)))]


@pytest.mark.parametrize(
    "turns, flaw, num_calls, verdict, score, agrees",
    [
        (changed("50+7=57", "50+7=59"), "wrong_sum", 3, -1, 0.91, False),
        (changed("50+7=57", "50+7=59"), "wrong_sum", 3, 2, -0.09, True),
        # The judge sees a single turn as part 0, whichever of its paragraphs is wrong.
        (shop_judge.as_turns(FORGED), "made_up", 0, 0, 0.0, True),
    ],
)
def test_the_served_judge_decides_the_score_and_the_oracle_measures(
    turns, flaw, num_calls, verdict, score, agrees
):
    """The judge that says -1 overlooks a wrong sum."""
    prompts = []
    solution = "".join(turn["text"] for turn in turns)
    info = {"question": str(PROBLEM), "prices": PRICES, "split": "train"}

    def answer(path, body):
        prompts.append(body["messages"][0]["content"])
        return says(f"\\boxed{{{verdict}}}")

    with server(answer, lambda path: {"data": [{"id": "judge"}]}) as address:
        result = asyncio.run(
            shop_judge.compute_score_fapo("shop", solution, "yes", info, address, turns, call_cost=0.03)
        )
    assert prompts == [shop_judge.critic_prompt(PROBLEM, turns)]
    assert result["score"] == pytest.approx(score) and result["flawed_positive"] == (verdict != -1)
    assert result["agrees"] == agrees and result["oracle_flawed_positive"] and not result["truly_correct"]
    assert result["calls"] == num_calls and result[f"flawed_{flaw}"]
    # On the test split, where no judge is asked, the oracle's finding is in the flawed-positive rate.
    held_out = shop_judge.compute_score_fapo("shop", solution, "yes", info | {"split": "test"}, None, turns)
    assert averages([asyncio.run(held_out)])["flawed_positive_rate"] == 1.0


STATED = shop_world.write_solution(PROBLEM, looks_up=False)


@pytest.mark.parametrize(
    "turns, score",
    [
        (changed("", ""), 0.91),
        (changed("50+7=57", "50+7=59"), 0.91),  # The rule does not add.
        (changed("50+7=57", "50+8=58"), -0.09),
        (changed("yes", "no"), -1.09),
        (changed("yes", "no")[2:], -1.06),  # A wrong answer is not punished twice.
        (shop_judge.as_turns(STATED), 0.0),
        (shop_judge.as_turns(FORGED), 0.0),
        (changed("", "")[2:], -0.06),  # The first price was not looked up.
    ],
)
def test_the_rule_without_a_judge_compares_operands_with_the_tools_answers(turns, score):
    info = {"question": str(PROBLEM), "prices": PRICES}
    solution = "".join(turn["text"] for turn in turns)
    function = shop_world.compute_score_grounded_rule
    result = function("shop", solution, "yes", info, turns, call_cost=0.03)
    assert result["score"] == pytest.approx(score)


def test_rows_from_trajectories_of_policies(tmp_path):
    """The hidden prices come from the run's training files, and a trajectory of one turn has no turns."""
    rng = random.Random(0)
    lines, rows = [], []
    for number in range(40):
        problem, turns = shop_judge.right_trajectory(rng, flawed=number % 2 == 0)
        rows.append(shop_world.policy_row(problem, "train", number))
        response = "".join(turn["text"] for turn in turns)
        line = {"split": "train", "prompt": str(problem), "response": response}
        line["reward_extra_info"] = {"acc": True}
        lines.append(line | ({"turns": turns} if len(turns) > 1 else {}))
    (tmp_path / "samples.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    files = [str(tmp_path / f"train{number}.jsonl") for number in (0, 1)]
    for number, file in enumerate(files):
        Path(file).write_text("".join(json.dumps(row) + "\n" for row in rows[number::2]))
    (tmp_path / "config.json").write_text(json.dumps({"train_file": files}))
    command = [ROOT / "recipes/critic_rows.py", "--runs", tmp_path, "--out-dir", tmp_path, "--held-out", "10"]
    subprocess.run([sys.executable, *map(str, command)], check=True, capture_output=True)
    found = []
    for split in ("train", "test"):
        found += pq.read_table(tmp_path / f"fapo_critic_{split}.parquet").to_pylist()
    assert len(found) == 40 and sum(row["reward_model"]["ground_truth"] == -1 for row in found) == 20
    assert all("<0> (policy) " in row["prompt"][0]["content"] for row in found)


def test_a_model_that_continues_keeps_the_embeddings_of_shared_tokens(tokenizer):
    model = warm_start.new_model(len(tokenizer), 0)
    fresh = model.model.embed_tokens.weight.clone()
    warm_start.continue_from(model, tokenizer, warm_start.SHIPPED / "judge")
    old = AutoTokenizer.from_pretrained(warm_start.SHIPPED / "judge")
    trained = warm_start.LlamaForCausalLM.from_pretrained(warm_start.SHIPPED / "judge", dtype=torch.float32)
    for rows, before in (("embed_tokens", trained.model.embed_tokens), ("lm_head", trained.lm_head)):
        now = model.lm_head if rows == "lm_head" else model.model.embed_tokens
        for token in ("7", "Ġok", "Ġnot"):
            here, there = tokenizer.convert_tokens_to_ids(token), old.convert_tokens_to_ids(token)
            assert torch.equal(now.weight[here], before.weight[there])
    alone = tokenizer.convert_tokens_to_ids("pears")
    assert "pears" not in old.get_vocab()
    assert torch.equal(model.model.embed_tokens.weight[alone], fresh[alone])
    assert len(tokenizer.encode(" ok")) == len(tokenizer.encode(" not")) == 1
