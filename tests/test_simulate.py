"""A step played event by event: lines and places by hand, and the part that is named."""

import json
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent.parent / "benchmarks"))
import simulate
from simulate import Config, play, predict, step


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
    speeds = dict(speed=50.0, train_speed=40.0, hand_over=200.0, advantages=4.0, weights=3e9, link=1e9)
    config = Config(samples=2, judged=0.0, places=2, drawn=drawn, **speeds)
    parts, busy = step(config, 4)
    waits = {"reward wait": 0.0, "advantages": 2.0, "to the ranks": 4.0}
    # four rounds of 2 s behind routers and loops that take next to nothing
    assert parts == pytest.approx(
        {"rollout": 8.0, **waits, "update": 10.0, "weights": 3.0}, abs=1e-2
    )
    assert busy["policy servers"] == pytest.approx(8.0) and busy["judges"] == 0.0


@pytest.mark.parametrize(
    "flag, first",
    [("--router=1", "policy's router"), ("--link=1e6", "weights"), ("--loop=1", "loop"),
     ("--hand-over=10", "to the ranks"), ("--advantages=0.1", "advantages")],
)  # fmt: skip
def test_the_part_that_breaks_first_is_named(flag, first, monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["simulate.py", "--gpus", "2", "--samples", "8", flag])
    simulate.main()
    assert f"| {first}, at work" in capsys.readouterr().out


def test_a_run_is_predicted_from_every_second_step(tmp_path):
    """Four samples of 10 tokens in 1 s; then three critiques, 40 characters a second; an update of 2 s."""
    line = {"time/rollout": 1.0, "time/reward_wait": 3.0, "time/update": 2.0, "time/step": 6.5}
    line |= {"response_length/max": 10, "response_length/mean": 10, "perf/tokens": 40, "genrm/asked": 3}
    sample = {"split": "train", "response_length": 10, "reward_extra_info": {"critique": "x" * 40}}
    (tmp_path / "metrics.jsonl").write_text("\n".join(json.dumps(line | {"step": i}) for i in (1, 2, 3, 4)))
    (tmp_path / "samples.jsonl").write_text("\n".join(json.dumps(sample | {"step": i}) for i in (1, 2, 3, 4)))
    expected = {"rollout": (1, 1), "reward_wait": (3, 3), "update": (2, 2), "step": (6.5, 6.5)}
    assert predict(tmp_path) == {name: pytest.approx(both) for name, both in expected.items()}
