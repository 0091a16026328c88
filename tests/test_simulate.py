"""A step played event by event: lines and places by hand, and the part that is named."""

import json
import sys

import pytest

from tools import simulate
from tools.simulate import Config, play, step


def test_lines_by_hand():
    """Two places, three jobs: the third waits for the first place that is free, then all for one judge."""
    jobs = [[("gpu", 3.0), ("judge", 2.0)], [("gpu", 1.0)], [("gpu", 4.0), ("judge", 1.0)]]
    done, busy = play(jobs, {"gpu": 2, "judge": 1})
    assert done == {"gpu": 5.0, "judge": 6.0}  # 0-3, 0-1, 1-5; the judge 3-5 and 5-6
    assert busy == {"gpu": 4.0, "judge": 3.0}  # 8 s on two places; 3 s on one


def test_a_line_is_served_in_the_order_of_arrival_not_of_numbers():
    jobs = [[("gpu", 2.0), ("judge", 5.0)], [("gpu", 1.0), ("judge", 1.0)]]
    assert play(jobs, {"gpu": 2, "judge": 1})[0]["judge"] == 7.0  # the second 1-2, the first 2-7


def test_a_step_by_hand(tmp_path):
    """Eight samples of 100 tokens, none judged, on four GPUs: two ranks, a server of two places, a judge."""
    drawn = tmp_path / "samples.jsonl"
    drawn.write_text(json.dumps({"response_length": 100}) + "\n")
    speeds = dict(speed=50.0, train_speed=40.0, hand_over=200.0, weights=3e9, link=1e9)
    config = Config(samples=2, judged=0.0, places=2, drawn=drawn, **speeds)
    parts, busy = step(config, 4)
    # four rounds of 2 s behind routers and loops that take next to nothing
    assert parts == pytest.approx(
        {"rollout": 8.0, "reward wait": 0.0, "to the ranks": 4.0, "update": 10.0, "weights": 3.0}, abs=1e-2
    )
    assert busy["policy servers"] == pytest.approx(8.0) and busy["judges"] == 0.0


@pytest.mark.parametrize(
    "flag, first",
    [("--router=2", "policy's router"), ("--link=1e6", "weights"), ("--loop=1", "loop"),
     ("--hand-over=10", "to the ranks")],
)  # fmt: skip
def test_the_part_that_breaks_first_is_named(flag, first, monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["simulate.py", "--gpus", "2", "--samples", "8", flag])
    simulate.main()
    assert f"| {first}, at work" in capsys.readouterr().out
