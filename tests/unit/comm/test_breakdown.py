"""Tests the clock of a step: nested times, idle beyond a baseline, warm-up; events on a simulated
GPU."""

from __future__ import annotations

import time

import pytest
import torch

from parallel3d.comm.collectives import observed
from parallel3d.comm.group import Group
from parallel3d.comm.step_timer import KINDS, StepTimer

CUDA = torch.device("cuda:0")


class Time:
    """A host clock and a GPU's, which advance when told to, and the GPU's module of streams and
    events.

    Attributes: passed: time until which the GPU has done its work. stream: the current one.
    recorded: events so far.
    """

    def __init__(self) -> None:
        self.now = 100.0
        self.passed = 0.0
        self.stream = "compute"
        self.recorded = 0

    def __call__(self) -> float:
        return self.now

    def current_stream(self, device: torch.device) -> str:
        assert device == CUDA
        return self.stream

    def Event(self, enable_timing: bool) -> Event:
        assert enable_timing
        return Event(self)


class Event:
    """An event, which happens when the GPU's clock reaches the time at which it was recorded."""

    def __init__(self, told: Time) -> None:
        self.told = told

    def record(self, stream: str) -> None:
        assert stream == "compute"
        self.at = self.told.now
        self.told.recorded += 1

    def query(self) -> bool:
        return self.at <= self.told.passed

    def synchronize(self) -> None:
        self.told.passed = max(self.told.passed, self.at)

    def elapsed_time(self, later: Event) -> float:
        return 1e3 * (later.at - self.at)


@pytest.fixture
def clock_time(monkeypatch: pytest.MonkeyPatch) -> Time:
    told = Time()
    monkeypatch.setattr(time, "perf_counter", told)
    monkeypatch.setattr(torch, "get_device_module", lambda device: told)
    return told


def a_step(clock: StepTimer, told: Time) -> None:
    """Runs a step of 14 s: 1 s of optimizer, a forward of 2 + 2 s around 3 s of tp, 4 s of pp with
    a baseline of 1.5 s, and 2 s more."""
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


@pytest.mark.parametrize("device", [None, torch.device("cpu"), CUDA])
def test_nested_intervals_count_once_and_idle_time_starts_at_the_floor(
    device: torch.device | None, clock_time: Time
) -> None:
    clock = StepTimer(device)
    clock_time.passed = 1e9
    with clock.within("tp"):  # an evaluation is outside any step
        clock_time.now += 50
    a_step(clock, clock_time)
    assert clock.last == pytest.approx(EXPECTED)
    assert sum(clock.last.values()) == pytest.approx(14.0)


def test_means_leave_the_warm_up_out_where_there_is_more(clock_time: Time) -> None:
    clock = StepTimer()
    assert set(clock.means().values()) == {0.0}
    for seconds in (10.0, 10.0, 10.0, 1.0, 3.0):
        clock.start_step()
        clock_time.now += seconds
        clock.end_step()
        if clock_time.now == 120.0:
            assert clock.means()["optimizer"] == 10.0
    assert clock.means()["optimizer"] == 2.0


def test_a_gpu_is_read_when_it_has_passed_and_never_waited_for(clock_time: Time) -> None:
    clock = StepTimer(CUDA)
    a_step(clock, clock_time)
    assert clock.last is None  # the GPU has not begun
    end_of_first = clock_time.now
    clock_time.passed = end_of_first
    a_step(clock, clock_time)
    assert clock.last == pytest.approx(EXPECTED)  # the previous step
    assert clock_time.passed == end_of_first
    assert clock.means() == pytest.approx(EXPECTED)  # the end waits for the device
    assert clock_time.passed == clock_time.now


def test_on_a_gpu_one_step_of_seven_is_marked_after_the_warm_up(clock_time: Time) -> None:
    clock, marked, known = StepTimer(CUDA), [], []
    for number in range(1, 20):
        before = clock_time.recorded
        a_step(clock, clock_time)
        clock_time.passed = clock_time.now
        if clock_time.recorded > before:
            marked.append(number)
        if clock.last is not None:
            assert clock.last == pytest.approx(EXPECTED)
            known.append(number)
    assert marked == [1, 2, 3, 4, 11, 18]
    assert known == [n + 1 for n in marked]  # reported in the line of the next step
    assert clock_time.recorded == 8 * len(marked)
    assert clock.means() == pytest.approx(EXPECTED)


def test_work_of_another_stream_takes_no_time_of_the_compute_stream(clock_time: Time) -> None:
    """FSDP2 calls its collectives while one of its own streams is current."""
    clock = StepTimer(CUDA)
    clock.start_step()
    with clock.within("backward"):
        clock_time.now += 2
        clock_time.stream = "reduce-scatter"
        with clock.within("dp"):
            clock_time.now += 3
        clock_time.stream = "compute"
        clock_time.now += 1
    clock.end_step()
    assert clock.means() == pytest.approx(dict.fromkeys(KINDS, 0.0) | {"backward": 6.0})


@pytest.mark.parametrize(("device", "tp_s", "forward_s"), [(None, 5.0, 1.0), (CUDA, 3.0, 3.0)])
def test_on_a_gpu_the_wait_for_a_collective_counts_and_its_start_does_not(
    device: torch.device | None, tp_s: float, forward_s: float, clock_time: Time
) -> None:
    class Work:
        def wait(self) -> None:
            clock_time.now += 3

    def start() -> Work:
        clock_time.now += 2
        return Work()

    clock = StepTimer(device)
    group = Group("tp", (0, 1), 0, None, timer=clock)
    clock.start_step()
    with clock.within("forward"):
        work = observed("all_reduce", torch.zeros(1), group, start)
        clock_time.now += 1
        work.wait()
    clock.end_step()
    means = clock.means()
    assert (means["tp"], means["forward"]) == pytest.approx((tp_s, forward_s))
    # Marks of the step, the forward and the wait.
    assert clock_time.recorded == (6 if device else 0)
