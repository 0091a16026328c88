"""FrozenLake of gymnasium: games by hand, the check of the moves, and rows that a seed reproduces."""

import json
import random
import re

import pytest

from policy import Sample
from recipes import frozen_lake
from test_trajectory import said, with_servers
from toy import warm_start

pytest.importorskip("gymnasium")
SEED = 3
BOARD = "a: S F H F\nb: F F F F\nc: H F F F\nd: F F H G\nGo to G. At a1. Safe: down, right."
SHORTEST = ("right", "down", "down", "right", "right", "down")
DETOUR = ("down", "left", "right", "right", "right", "down", "down")


@pytest.fixture(scope="module")
def words():
    """A tokenizer whose tokens are single words."""
    return warm_start.build_tokenizer(["left", "down", "right", "up", "jump", "At", " Safe", ":", ","] * 9)


def played(words, *moves, prompt=BOARD, length=400):
    """Return the sample of a policy that makes these moves on the seed's board."""
    left = [words.encode(move) + [1] for move in moves]
    row = {
        "prompt": [{"role": "user", "content": prompt}],
        "data_source": "frozen_lake",
        "reward_model": {"ground_truth": ""},
        "extra_info": {"seed": SEED},
    }

    def answer(path, body):
        ids = left.pop(0)
        return said(ids)

    groups = [[Sample(row, [5, 6])]]
    return with_servers(answer, frozen_lake.play, words, {1}, length=length, groups=groups)


def scored(sample, **settings):
    info = {"seed": SEED} | sample.info
    return frozen_lake.compute_score("frozen_lake", sample.text, "", info, **settings)


def texts(sample, who):
    return [turn["text"] for turn in sample.turns if turn["who"] == who]


def test_the_shortest_path_by_hand(words):
    sample = played(words, *SHORTEST)
    assert texts(sample, "policy") == [*SHORTEST]
    assert texts(sample, "user") == [
        "At a2. Safe: left, down.",
        "At b2. Safe: left, down, right, up.",
        "At c2. Safe: down, right, up.",
        "At c3. Safe: left, right, up.",
        "At c4. Safe: left, down, up.",
    ]
    expected = dict(acc=True, first_wrong=-1, flawed_positive=False, fully_correct=True, moves=6)
    assert scored(sample) == scored(sample, penalty=0.0) == expected | {"score": 1.0}


def test_a_game_with_a_wasted_move_by_hand(words):
    """The policy walks into the left edge in its second turn, which is turn 2 of all."""
    sample = played(words, *DETOUR)
    assert texts(sample, "user")[:2] == ["At b1. Safe: right, up."] * 2
    result = scored(sample)
    assert (result["score"], result["first_wrong"], result["moves"]) == (0.0, 2, 7)
    assert result["acc"] and result["flawed_positive"] and not result["fully_correct"]
    assert scored(sample, penalty=0.0)["score"] == 1.0
    assert sample.turns[2] == {"who": "policy", "text": "left", "tokens": len(words.encode("left")) + 1}


@pytest.mark.parametrize(
    ("moves", "first_wrong", "replies"),
    [(("right", "right"), 2, 1), (("jump", *SHORTEST[:1], "right"), 0, 2), (("left",) * 12, 0, 11)],
    ids=["a hole", "not a move", "too many moves"],
)
def test_games_that_do_not_reach_g(words, moves, first_wrong, replies):
    sample = played(words, *moves)
    result = scored(sample)
    assert (result["score"], result["acc"], result["first_wrong"]) == (-1.0, False, first_wrong)
    assert len(texts(sample, "policy")) == len(moves) and len(texts(sample, "user")) == replies
    assert not sample.truncated and not sample.failure


def test_a_truncated_game_has_a_score(words):
    """The trajectory is full before the game is over; what the function had put into `info` counts."""
    sample = played(words, *SHORTEST, length=40)
    assert sample.truncated and not sample.failure and 0 < len(sample.info["squares"]) < 7
    assert scored(sample)["score"] == -1.0


def test_a_row_of_another_board_is_an_error(words):
    sample = played(words, *SHORTEST, prompt=BOARD.replace("S F H F", "S F F F"))
    assert sample.failure == "error" and "write the rows again" in sample.result["reward_extra_info"]["error"]


def test_rows_are_reproducible_and_no_board_is_in_both_splits():
    state = random.getstate()
    rows = frozen_lake.make_rows(range(300))
    assert random.getstate() == state
    assert rows == frozen_lake.make_rows(range(300))
    boards = {}
    for split, some in rows.items():
        assert [row["extra_info"]["index"] for row in some] == list(range(len(some)))
        boards[split] = {row["prompt"][0]["content"] for row in some}
        assert len(boards[split]) == len(some) > 20
    assert not boards["train"] & boards["test"]
    assert BOARD in boards["train"] | boards["test"]


def test_a_simple_rule_solves_many_of_the_held_out_boards():
    """The rule of the page: the first safe move of right, down, left and up."""
    rows = frozen_lake.make_rows(range(frozen_lake.SEEDS))["test"]
    solved = 0
    for row in rows:
        game = frozen_lake.new_game(row["extra_info"]["seed"])
        square, reward, is_over = 0, 0, False
        for _ in range(frozen_lake.MOST_MOVES):
            safe = frozen_lake.safe_moves(game, square)
            move = next(move for move in ("right", "down", "left", "up") if move in safe)
            square, reward, is_over, _, _ = game.step(frozen_lake.MOVES.index(move))
            if is_over:
                break
        solved += reward == 1
    assert (solved, len(rows)) == (99, 138)


def test_the_initial_policy_reads_games_as_the_rollouts_render_them(words):
    """No move of the player who wanders leads into a hole or a wall."""
    rng = random.Random(0)
    for _ in range(20):
        pieces = frozen_lake.wandering_game(rng)
        turns = re.findall(r"<\|(user|assistant)\|>([^<]*)", "".join(pieces))
        messages = [{"role": role, "content": text} for role, text in turns]
        assert words.apply_chat_template(messages, tokenize=False) == "".join(pieces)
        moves = [piece.removesuffix("<|end|>") for piece in pieces[1::2]]
        assert 6 <= len(moves) <= frozen_lake.MOST_MOVES
        for seen, move in zip(pieces[::2], moves):
            assert move in seen.split("Safe: ")[1].split(".")[0].split(", ")


def test_the_report_has_a_line_per_evaluation(tmp_path):
    """Training values are means of ten steps. A step without a solved game has no flawed-positive rate."""
    folder = tmp_path / "penalty1"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps({"reward_kwargs": '{"penalty": 1}', "seed": 4}))
    lines = [{"step": 0}]
    for step in range(1, 21):
        lines.append({"step": step, "reward/acc": step / 20, "reward/flawed_positive_rate": 0.5})
    del lines[20]["reward/flawed_positive_rate"]
    for line, share in ((lines[0], 0.25), (lines[20], 0.75)):
        line |= {"val/frozen_lake/mean@1": share, "val/frozen_lake/fully_correct/mean@1": share / 2}
    (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    frozen_lake.report((folder,), tmp_path / "lake.csv")
    assert (tmp_path / "lake.csv").read_text().splitlines() == [
        "penalty,seed,step,reached,fully correct,training: reached,training: flawed positives",
        "1,4,0,0.2500,0.1250,0.0500,0.5000",
        "1,4,20,0.7500,0.3750,0.7750,0.5000",
    ]
