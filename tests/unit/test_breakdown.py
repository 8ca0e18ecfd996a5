"""The clock of a step: nested times, idle beyond a floor, warm-up; events on a pretended GPU."""

from __future__ import annotations

import time
from typing import Any

import pytest
import torch

from parallel3d.metrics.breakdown import KINDS, Clock, RankTimes, by_stage
from parallel3d.topology.layout import Layout


class Time:
    """A host clock, and a GPU's, that go on when told to."""

    def __init__(self) -> None:
        self.now = 100.0
        self.passed = 0.0  # until when the GPU has done its work

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock_time(monkeypatch: pytest.MonkeyPatch) -> Time:
    told = Time()
    monkeypatch.setattr(time, "perf_counter", told)

    class Event:
        def __init__(self, enable_timing: bool) -> None:
            assert enable_timing

        def record(self) -> None:
            self.at = told.now

        def query(self) -> bool:
            return self.at <= told.passed

        def synchronize(self) -> None:
            told.passed = max(told.passed, self.at)

        def elapsed_time(self, later: Any) -> float:
            return 1e3 * (later.at - self.at)

    monkeypatch.setattr(torch.cuda, "Event", Event)
    return told


def a_step(clock: Clock, told: Time) -> None:
    """14 s: 1 before, a forward of 2 + 2 around 3 of tp, 4 of pp of which 1.5 is the floor, 2."""
    clock.start_step()
    told.now += 1
    with clock.within("forward"):
        told.now += 2
        clock.push("tp")
        told.now += 3
        clock.pop()
        told.now += 2
    clock.push("pp")
    told.now += 4
    clock.pop(idle_beyond=1.5)
    told.now += 2
    clock.end_step()


EXPECTED = dict.fromkeys(KINDS, 0.0) | {
    "forward": 4.0,
    "tp": 3.0,
    "pp": 1.5,
    "idle": 2.5,
    "optimizer": 3.0,
}


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_what_is_inside_counts_once_and_idle_begins_at_the_floor(
    device: str, clock_time: Time
) -> None:
    clock = Clock(device)
    clock_time.passed = 1e9
    with clock.within("tp"):  # outside of a step: an evaluation
        clock_time.now += 50
    a_step(clock, clock_time)
    assert clock.last == pytest.approx(EXPECTED)
    assert sum(clock.last.values()) == pytest.approx(14.0)


def test_means_leave_the_warm_up_out_where_there_is_more(clock_time: Time) -> None:
    clock = Clock()
    assert set(clock.means().values()) == {0.0}
    for seconds in (10.0, 10.0, 10.0, 1.0, 3.0):
        clock.start_step()
        clock_time.now += seconds
        clock.end_step()
        if clock_time.now == 120.0:
            assert clock.means()["optimizer"] == 10.0
    assert clock.means()["optimizer"] == 2.0


def test_a_gpu_is_read_when_it_has_passed_and_never_waited_for(clock_time: Time) -> None:
    clock = Clock("cuda")
    a_step(clock, clock_time)
    assert clock.last is None  # the GPU has not begun
    end_of_first = clock_time.now
    clock_time.passed = end_of_first
    a_step(clock, clock_time)
    assert clock.last == pytest.approx(EXPECTED)  # the step before
    assert clock_time.passed == end_of_first
    assert clock.means() == pytest.approx(EXPECTED)  # the end waits
    assert clock_time.passed == clock_time.now


def test_stages_are_means_over_their_ranks() -> None:
    layout = Layout(tp=2, pp=2)
    zero = dict.fromkeys(KINDS, 0.0)
    rows = [
        RankTimes(rank, layout.coordinates(rank), zero | {"idle": float(rank)}) for rank in range(4)
    ]
    assert {stage: times["idle"] for stage, times in by_stage(rows).items()} == {0: 0.5, 1: 2.5}
