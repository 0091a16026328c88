"""The clock of benchmarks/time_to_score.py, with events computed by hand."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "benchmarks"))
import time_to_score  # noqa: E402


def event(kind, at, cpu, **values):
    return {"kind": kind, "at": at, "cpu": cpu} | values


def test_evaluations_do_not_count():
    events = [
        event("evaluation begins", 102, 1.0),
        event("evaluation", 105, 3.0, score=0.1),  # it took 3 s, with 2 s of CPU time
        event("rewards", 108, 4.0, reward=-0.5, spread=0.25),
        event("step", 115, 5.0),  # after 15 s, 3 s of them evaluating
        event("rewards", 118, 6.0, reward=0.5, spread=1.0),
        event("step", 120, 7.0),
        event("evaluation begins", 121, 8.0),
        event("evaluation", 129, 12.0, score=0.9),
    ]
    curve = time_to_score.curve_of(events, begun=100)
    assert curve["step_ends"] == [[12, 3.0], [17, 5.0]]
    assert curve["rewards"] == [-0.5, 0.5] and curve["groups_with_spread"] == [0.25, 1.0]
    assert curve["points"] == [
        {"step": 0, "score": 0.1, "seconds": 2, "cpu": 1.0},
        {"step": 2, "score": 0.9, "seconds": 18, "cpu": 6.0},
    ]
    assert time_to_score.reached(curve, 0.5)["seconds"] == 18
    assert time_to_score.reached(curve, 0.95) is None
    row = time_to_score.table([curve | {"side": "ours", "seed": 3}], 0.5).splitlines()[-1]
    assert row == "| ours | 3 | 2 | 6 | 2.00 | 0.90 | 2 |"
