"""Tests the report's tables of lost time: what a run lost by cause, and what the model expects."""

from __future__ import annotations

import re

import pytest

from parallel3d.commands.report.lost import lost_time, measured
from parallel3d.loop.failure_cost import DAY_S, FailureCosts, expected_waste
from parallel3d.metrics.lost_time import Cost
from parallel3d.metrics.starts import Goodput, Start, goodput

AT = 1_700_000_000.0
SUMS = {"evaluation_s": 0.0, "skipped_s": 0.0, "rolled_back_s": 0.0}


def start(begun: float, saves: int, checkpoint_s: float, status: str | None = None) -> Start:
    """Returns a start whose first step is 100 s after its process began."""
    found = Start({"layout": {"world_size": 64}}, AT + begun, AT + begun + 100)
    found.saves, found.status = saves, status
    found.sums = SUMS | {"checkpoint_s": checkpoint_s}
    return found


def run(*, fails: bool = True) -> tuple[Goodput, list[Start]]:
    """Returns ten hours of a run on 8 nodes whose node3 dies after four of them."""
    one, two = start(0, 8, 14.0), start(16_000, 12, 24.0, "finished")
    two.lost_s, two.between_s = 900.0, 1600.0
    two.costs = {
        "node": Cost(1, {"lost": 900.0, "detect": 36.0, "end": 4.0, "probe": 5.0, "queue": 1440.0,
                         "start": 115.0, "load": 60.0, "ready": 40.0}),
    }  # fmt: skip
    if not fails:
        two.lost_s, two.costs = 0.0, {"requeue": Cost(1, {"queue": 1600.0, "load": 100.0})}
    two.account = AT + 36_000
    found = goodput([one, two], 33_000.0)
    assert found is not None
    return found, [one, two]


def cells(html: str) -> list[list[str]]:
    rows = re.findall(r"<tr>(.*?)</tr>", html)
    return [re.findall(r"<t[hd][^>]*>(.*?)</t[hd]>", row) for row in rows]


def test_the_model_is_that_of_the_docs() -> None:
    """64 nodes at an hour's queue lose 1.65 %, and 0.64 % without a queue."""
    run = FailureCosts(delay=1.0, interval=3000.0, detect=420.0, restart=240.0, queue=3600.0)
    waste = expected_waste(run, 264 * DAY_S / 64)
    assert waste.sum == pytest.approx(0.0165, abs=1e-4)
    assert waste.sum - waste.queue == pytest.approx(0.0064, abs=1e-4)
    assert waste.of_wall.sum == pytest.approx(0.0165 / 1.0165, abs=1e-4)
    unknown = expected_waste(FailureCosts(1.0, None, None, 240.0, None), 1e4)
    assert unknown == (None, None, None, 0.024, None) and unknown.sum == 0.024


def test_the_model_takes_the_runs_own_times() -> None:
    spent, starts = run()
    # The time of the first start's last save is not known, so that seven and twelve count.
    assert measured(spent, starts) == FailureCosts(2.0, 33_900 / 20, 36.0, 224.0, 1440.0)
    spent, starts = run(fails=False)
    assert measured(spent, starts) == FailureCosts(2.0, 1650.0, None, 100.0, None)


def test_the_tables_of_a_run_that_lost_a_node() -> None:
    spent, starts = run()
    cause, row, head, *parts = cells(lost_time(spent, starts, 264.0, 8, 64))
    assert cause == ["lost time by cause", "times", "in all", "of the wall time",
                     "repeated steps", "noticing", "restart", "queue"]  # fmt: skip
    assert row == ["node", "1", "43:20", "7.22%", "15.0 min", "36.0 s", "3.73 min", "24.0 min"]
    assert head == ["saves and failures", "each time", "expected", "measured"]
    assert [part[0] for part in parts] == [
        "saves", "repeated steps", "noticing a failure", "restart", "queue", "sum"
    ]  # fmt: skip
    assert parts[0][1] == "2.00 s each 28.2 min"
    assert parts[1][1] == "14.1 min expected, 15.0 min measured"
    mean_s = 33 * DAY_S
    assert parts[4][2:] == [f"{1440 / mean_s / (1 + 1.18e-3 + 9e-4):.3%}", "4.000%"]
    words = lost_time(spent, starts, 264.0, 8, 64)
    assert "one of 8 nodes fails every 33.0 days (recovery.node_days=264.0)" in words


def test_a_run_on_one_node_without_a_failure_looks_as_before() -> None:
    spent, starts = run(fails=False)
    undisturbed = spent._replace(costs={})
    assert lost_time(undisturbed, starts, 264.0, 1, 8) == ""
    (head, row) = cells(lost_time(spent, starts, 264.0, 1, 8))  # a requeue, and no model
    assert row[0] == "requeue" and "noticing" not in head
    assert "saves and failures" in lost_time(undisturbed, starts, 264.0, 8, 64)
    chosen = spent._replace(costs={"user": Cost(1, {"lost": 2.0, "queue": 3600.0})})
    assert "saves and failures" not in lost_time(chosen, starts, 264.0, 1, 8)
