"""Tests when checkpoints are saved by time, with a clock that the test sets."""

from __future__ import annotations

import json
import math
import random
from pathlib import Path

import pytest

from parallel3d.checkpoint.keys import CheckpointConfig
from parallel3d.config.values import nearest_interval, seconds_of
from parallel3d.loop.failure_cost import FailureRate, best_interval
from parallel3d.loop.save_clock import SaveClock, save_clock
from parallel3d.metrics.starts import Failures, failures_of, starts_of
from parallel3d.run.launch import Worker
from parallel3d.run_config import Config

DAY = 86400.0


class Loop:
    """A loop of steps on a clock that only advances when it is told to."""

    def __init__(self, interval_s: float | None, mean_s: float = DAY) -> None:
        self.now = 1e5
        self.said: list[str] = []
        rate = FailureRate(mean_s, "one node fails now and then")
        self.clock = SaveClock(interval_s, lambda: rate, self.said.append, lambda: self.now)
        self.clock.begin()
        self.saves: list[float] = []
        self.written = -math.inf  # when the save in flight is on the disk
        self.left_s = 0.0  # the part of its stall that is in the next step

    def step(self, step_s: float, stall_s: float = 0.0, write_s: float = 0.0) -> None:
        """Runs a step, and a save if one is due: half of its stall is in the step that follows."""
        step_s, self.left_s = step_s + self.left_s, 0.0
        self.now += step_s
        is_due = self.clock.is_due()
        if is_due:
            self.saves.append(self.now)
            self.written = self.now + max(write_s, stall_s / 2 + 1e-3)
            self.left_s = stall_s / 2
            self.now += self.left_s
        writes = self.now < self.written
        self.clock.after_step(step_s, stall_s / 2 if is_due else 0.0, saved=is_due, writes=writes)


def waste(interval_s: float, stall_s: float, mean_s: float) -> float:
    """Returns the lost share of the time if failures come as a Poisson process (Daly 2006)."""
    work = interval_s / mean_s
    return (mean_s / interval_s) * math.expm1((interval_s + stall_s) / mean_s) - 1 if work else 0.0


@pytest.mark.nightly
def test_auto_loses_little_more_than_the_best_interval_that_its_bounds_allow() -> None:
    """Saves are measured on steps whose times vary; a save's delay varies more."""
    for seed in range(200):
        draw = random.Random(seed)
        mean = 3600 * math.exp(draw.uniform(0, math.log(60 * 24)))
        stall = 0.1 * math.exp(draw.uniform(0, math.log(300)))
        step, write = min(20, math.sqrt(2 * stall * mean) / 100), stall * draw.uniform(1, 3)
        loop = Loop(None, mean)
        while len(loop.saves) < 7:
            now = stall * draw.lognormvariate(0, 0.2)
            loop.step(step * draw.gauss(1, 0.003), now, write)
        chosen = loop.clock.interval_s
        longest = max(3600.0, stall / 0.035)
        tried = [10 ** (i / 200) for i in range(1001)]
        best = min(waste(t, stall, mean) for t in tried if 1.5 * write <= t <= longest)
        assert waste(chosen, stall, mean) <= 1.05 * best, (seed, mean, stall, write, chosen)


def test_the_interval_is_youngs_within_its_bounds() -> None:
    assert best_interval(1.0, 4.125 * DAY, 10.0) == (pytest.approx(844.25, abs=0.1), "")
    short = best_interval(0.01, 3600.0, 60.0)
    assert short.seconds == 90 and short.but.endswith("but one takes 1.00 min to write")
    long = best_interval(5.0, 30 * DAY, 10.0)
    assert long.seconds == 3600 and long.but.endswith("but auto saves at least every 1.00 h")
    # Saves that stall the loop for minutes are not made each hour.
    assert best_interval(350.0, 300 * DAY, 350.0).seconds == pytest.approx(1e4)


def test_a_save_follows_the_step_that_ends_nearest_to_the_interval() -> None:
    for interval, steps in ((60.0, 10), (62.0, 10), (64.0, 11), (3.1, 1), (1.0, 1)):
        loop = Loop(interval)
        for _ in range(200):
            loop.step(6.0)
        gaps = {round((b - a) / 6) for a, b in zip(loop.saves[1:], loop.saves[2:], strict=False)}
        assert gaps == {steps}, interval
        assert not loop.said


def test_auto_saves_first_after_ten_steps_and_says_once_what_it_chose_and_why() -> None:
    loop = Loop(None, mean_s=4 * DAY)
    for _ in range(900):
        loop.step(6.0, 2.0, 9.0)
    assert loop.saves[0] == pytest.approx(1e5 + 60)
    assert loop.saves[2] - loop.saves[1] == pytest.approx(math.sqrt(2 * 2 * 4 * DAY), rel=0.01)
    assert loop.said == [
        "checkpoint.every=auto: a checkpoint every 19.6 min, about 196 steps, because a save "
        "delays training by 2.00 s and one node fails now and then"
    ]
    for _ in range(6000):
        loop.step(6.0, 8.0, 9.0)  # the disk has become slow
    assert len(loop.said) == 2 and "every 39.2 min" in loop.said[1]


def test_auto_measures_its_first_save_to_the_end_before_the_next_one() -> None:
    loop = Loop(None, mean_s=DAY)
    for _ in range(600):
        loop.step(0.5, 0.2, 60.0)
    assert loop.saves[1] - loop.saves[0] == pytest.approx(math.sqrt(2 * 0.2 * DAY), rel=0.01)


def test_the_median_of_saves_counts_so_that_one_slow_save_changes_little() -> None:
    loop = Loop(None)
    for number in range(3000):
        loop.step(1.0, 300.0 if number == 700 else 1.0, 2.0)
    before = loop.clock.interval_s
    loop.clock.after_step(1.0, 300.0, saved=True, writes=False)
    assert loop.clock.interval_s == pytest.approx(before, rel=0.01)


def start_of(folder: Path, *lines: dict[str, object]) -> None:
    text = "".join(json.dumps(line) + "\n" for line in lines)
    (folder / "starts.jsonl").write_text(text)


def test_the_runs_own_failures_give_their_rate_from_the_third_on(tmp_path: Path) -> None:
    """Starts on 8 ranks, then on 4; one that a signal has stopped is no failure."""
    started = {"first_step": 1, "started": "2026-11-29T00:00:00+00:00"}
    eight, four = ({"layout": {"world_size": size}} for size in (8, 4))
    lines = [
        started | eight | {"begun": 0.0, "at": 100.0},
        started | eight | {"begun": 1300.0, "at": 1400.0, "lost_s": 50.0, "between_s": 200.0},
        started | eight | {"begun": 2400.0, "at": 2500.0, "lost_s": 0.0, "between_s": 0.0},
        started | four | {"begun": 3500.0, "at": 3600.0, "lost_s": 9.0, "between_s": 0.0},
        started | four | {"begun": 4600.0, "at": 4700.0, "lost_s": 9.0, "between_s": 0.0},
    ]
    start_of(
        tmp_path,
        *lines,
        {"account": 5700.0, "step": 9}
        | dict.fromkeys(("evaluation_s", "checkpoint_s", "skipped_s", "rolled_back_s"), 0.0),
    )
    found = failures_of(starts_of(tmp_path / "starts.jsonl"))
    assert found == Failures(3, 8 * (1000 + 1000 + 1000) + 4 * (1000 + 1000))
    every = Config(dp=4, checkpoint=CheckpointConfig(every="auto"))
    said: list[str] = []

    def told(starts: int) -> str:
        start_of(tmp_path, *lines[:starts])
        worker = Worker(0, 0, 4, 2, tmp_path, "local")
        clock = save_clock(every, worker, said.append, lambda: 0.0)
        for _ in range(11):
            clock.after_step(1.0, 1.0, saved=clock.is_due(), writes=False)
        return said[-1]

    assert "one of 2 nodes fails every 132 days (recovery.node_days=264.0)" in told(4)
    assert "this run failed 3 times, every 38.9 min" in told(5)  # 28,000 ÷ 4 ranks ÷ 3


def test_only_rank_0_of_a_run_by_time_has_a_clock(tmp_path: Path) -> None:
    def of(rank: int, every: object) -> SaveClock | None:
        config = Config(dp=4, checkpoint=CheckpointConfig(every=every))
        return save_clock(config, Worker(rank, 0, 4, 2, tmp_path, "local"), print)

    assert of(0, "90s").interval_s == 90
    assert of(0, "auto").interval_s is None
    assert [of(0, 500), of(0, 0), of(3, "90s"), of(3, "auto")] == [None] * 4


@pytest.mark.parametrize(
    ("given", "seconds"),
    [
        ("90s", 90),
        ("10min", 600),
        ("2h", 7200),
        ("1.5h", 5400),
        ("auto", None),
        ("10m", None),
        ("500", None),
        (500, None),
        ("-5s", None),
        ("1e3s", None),
        ("10min ", None),
    ],
)
def test_times_are_read(given: object, seconds: float | None) -> None:
    assert seconds_of(given) == seconds


@pytest.mark.parametrize(
    ("given", "near"),
    [
        ("10min", "10min"),
        ("auto", "auto"),
        ("10m", "10min"),
        ("10 minutes", "10min"),
        ("1 Hour", "1h"),
        ("90sec", "90s"),
        ("3 days", "72h"),
        ("0s", "1s"),
        ("20ms", "1s"),
        ("500 steps", 500),
        ("5x", 500),
        ("automatic", "auto"),
        ("-5s", 500),
        ("", 500),
        ("999999999999h", "277777h"),
        ("0.0001min", "1s"),
    ],
)
def test_the_nearest_interval_to_any_text_is_allowed(given: str, near: object) -> None:
    assert nearest_interval(given, 500) == near
    assert near == 500 or nearest_interval(near, 500) == near
