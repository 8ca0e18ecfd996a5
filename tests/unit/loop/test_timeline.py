"""Tests that a measured step is drawn by rank, next to the clock with its costs."""

from __future__ import annotations

import errno
import os
from pathlib import Path

import pytest

from parallel3d.loop import timeline
from parallel3d.loop.timeline import (
    keys_of,
    measured_costs,
    pictures,
    simulated_timeline,
    timeline_of,
    trace_events,
)
from parallel3d.schedules.schedule import make
from parallel3d.schedules.walk import Costs, time_orders


@pytest.mark.parametrize(("name", "chunks"), [("1f1b", 1), ("zbv", 2)])
def test_a_measured_step_without_hops_equals_the_clock(name: str, chunks: int) -> None:
    made = make(name, 3, 5, chunks)
    stages = made.assignment.stages
    costs = Costs(*(tuple(c + 0.1 * s for s in range(stages)) for c in (1.0, 1.2, 1.2)))
    exact = time_orders(made.orders, made.assignment, costs)
    late = 7.0  # the time on a rank's clock when the first action begins
    spans = [[(str(s.action), s.start + late, s.end + late) for s in row] for row in exact.spans]
    measured = timeline_of(spans)
    again = simulated_timeline(measured, made)
    for of_one in (measured, again):
        assert of_one.makespan == pytest.approx(exact.makespan)
        assert of_one.bubble == pytest.approx(exact.bubble)
    events = trace_events(measured)["traceEvents"]
    assert sum(event.get("dur", 0.0) for event in events) == pytest.approx(
        1e6 * sum(s.end - s.start for row in exact.spans for s in row)
    )
    assert {event["pid"] for event in events} == {0, 1, 2}


@pytest.mark.parametrize(("name", "chunks"), [("1f1b", 1), ("interleaved_zb", 2), ("zbv", 2)])
def test_the_printed_costs_are_those_of_an_average_rank(name: str, chunks: int) -> None:
    """There are three layers per rank; the last stage, which also has the head, is not read."""
    made = make(name, 2, 4, chunks)
    split = (
        [range(3), range(3, 6)] if chunks == 1 else [range(i, i + 1 + (i == 0)) for i in range(4)]
    )
    layers = [list(stage) for stage in split]
    total = sum(map(len, layers))
    each = (1.0, 1.2, 1.2 if chunks == 1 else 0.8)
    costs = Costs(*(tuple(c * len(stage) for stage in layers) for c in each))
    # forwards, which are recorded in addition to the keys
    again = [0.25, 0.0, 0.5, 0.75][: len(split)]
    twice = (more * forward for more, forward in zip(again, costs.forward, strict=True))
    slower = tuple(map(sum, zip(costs.input, twice, strict=True)))
    costs = Costs((*costs.forward[:-1], 9.0), slower, costs.weight)
    spans = time_orders(made.orders, made.assignment, costs).spans
    measured = timeline_of([[(str(s.action), s.start, s.end) for s in row] for row in spans])
    said = measured_costs(measured, made, split, again)
    assert said == pytest.approx([c * total / 2 for c in each])
    assert keys_of((0.0302, 0.0292, 0.5), 1e-5) == (
        "schedule.costs=[30.2,29.2,500] schedule.hop=0.01"
    )


def test_a_failing_disk_loses_only_the_picture(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    def full(path: Path, content: bytes) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(timeline, "replace_durably", full)
    timeline._write(tmp_path / "timeline.svg", "<svg/>")
    assert "timeline.svg could not be written: No space left on device" in capsys.readouterr().err


def test_both_timelines_share_one_axis() -> None:
    made = make("1f1b", 2, 3)
    exact = time_orders(made.orders, made.assignment, Costs.even(made.assignment))
    slow = timeline_of([[(str(s.action), 2 * s.start, 2 * s.end) for s in r] for r in exact.spans])
    picture = pictures(slow, exact, "1f1b")
    assert picture.count(f">{slow.makespan:.4g} s<") == 2, (
        "both axes end where the longer step does"
    )
