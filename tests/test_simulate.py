"""A step simulated event by event: queues and slots computed by hand, and the bottleneck."""

import json
import random
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent.parent / "benchmarks"))
import simulate
from simulate import Config, links, play, predict, step, to_servers


def test_lines_by_hand():
    """There are two slots and three jobs.

    The third job waits for the first free slot; then all jobs use one judge.
    """
    jobs = [[("gpu", 3.0), ("judge", 2.0)], [("gpu", 1.0)], [("gpu", 4.0), ("judge", 1.0)]]
    done, busy = play(jobs, {"gpu": 2, "judge": 1})
    assert done == {"gpu": 5.0, "judge": 6.0}  # 0-3, 0-1, 1-5; the judge 3-5 and 5-6
    assert busy == {"gpu": 4.0, "judge": 3.0}  # 8 s on two slots; 3 s on one


def test_a_line_is_served_in_the_order_of_arrival_not_of_numbers():
    jobs = [[("gpu", 2.0), ("judge", 5.0)], [("gpu", 1.0), ("judge", 1.0)]]
    assert play(jobs, {"gpu": 2, "judge": 1})[0]["judge"] == 7.0  # the second 1-2, the first 2-7


def test_a_step_by_hand(tmp_path):
    """There are eight samples of 100 tokens, none of them judged, and four GPUs: two ranks, a server with two
    slots, a judge.
    """
    drawn = tmp_path / "samples.jsonl"
    drawn.write_text(json.dumps({"response_length": 100}) + "\n")
    speeds = dict(speed=50.0, train_speed=40.0, hand_over=200.0, advantages=4.0, fabric=1e9, link=1e9)
    sizes = dict(updates=2, micro_batch=100, weights=3e9, gradients=6e9, pack=2e9, pack_size=1e9)
    config = Config(samples=2, judged=0.0, places=2, drawn=drawn, **speeds, **sizes)
    parts, busy = step(config, 4)
    waits = {"reward wait": 0.0, "advantages": 2.0, "to the ranks": 4.0}
    # Rollouts take four rounds of 2 s; routers and loops take almost no time. Computing takes 10 s. The
    # exchange covers, in two updates of two micro-batches, half of ten times the weights and of four times
    # the gradients. A pack takes 1 s to make, half of it for gathering, and 1 s to send, while the next one
    # is made.
    assert parts == pytest.approx(
        {"rollout": 8.0, **waits, "update": 10.0 + 27.0, "weights": 4.0}, abs=1e-2
    )
    assert busy["policy servers"] == pytest.approx(8.0) and busy["judges"] == 0.0
    assert busy["between ranks"] == pytest.approx(27.0)


def test_the_slower_of_packing_and_sending_sets_the_pace():
    """Send four packs from a single rank: 3 s to make one and 1 s to send it, or the other way round."""
    config = Config(weights=4.0, pack_size=1.0, pack=1 / 3, link=1.0)
    assert to_servers(config, 1, 1, random.Random(0)) == pytest.approx(13.0)
    config = Config(weights=4.0, pack_size=1.0, pack=1.0, link=1 / 3)
    assert to_servers(config, 1, 1, random.Random(0)) == pytest.approx(13.0)


def test_a_pack_is_asked_of_any_node_that_has_it():
    """With one or two nodes, transfers follow one another.

    With three nodes, the last two request a pack from the same node or from two nodes.
    """
    found = [[links(nodes, random.Random(seed)) for seed in range(200)] for nodes in (1, 2, 3, 100)]
    assert set(found[0]) == {1} and set(found[1]) == {2}
    assert set(found[2]) == {2, 3} and 70 < found[2].count(3) < 130
    assert min(found[3]) > 7  # seven waves would be enough if no node got two requests


@pytest.mark.parametrize(
    "flag, first",
    [("--router=1", "policy's router"), ("--link=1e6", "weights"), ("--loop=1", "loop"),
     ("--hand-over=10", "to the ranks"), ("--advantages=0.1", "advantages"),
     ("--fabric=1e9", "between ranks")],
)  # fmt: skip
def test_the_part_that_breaks_first_is_named(flag, first, monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["simulate.py", "--gpus", "4", "--samples", "8", flag])
    simulate.main()
    assert f"| {first}, busy" in capsys.readouterr().out


def test_a_run_is_predicted_from_every_second_step(tmp_path):
    """Four samples of 10 tokens take 1 s.

    Then follow three critiques at 40 characters/s, and an update of 2 s.
    """
    line = {"time/rollout": 1.0, "time/reward_wait": 3.0, "time/update": 2.0, "time/step": 6.5}
    line |= {"response_length/max": 10, "response_length/mean": 10, "perf/tokens": 40, "genrm/asked": 3}
    sample = {"split": "train", "response_length": 10, "reward_extra_info": {"critique": "x" * 40}}
    (tmp_path / "metrics.jsonl").write_text("\n".join(json.dumps(line | {"step": i}) for i in (1, 2, 3, 4)))
    (tmp_path / "samples.jsonl").write_text("\n".join(json.dumps(sample | {"step": i}) for i in (1, 2, 3, 4)))
    expected = {"rollout": (1, 1), "reward_wait": (3, 3), "update": (2, 2), "step": (6.5, 6.5)}
    assert predict(tmp_path) == {name: pytest.approx(both) for name, both in expected.items()}
