"""Tests the executor on real ranks, with stages that compute nothing: every schedule keeps its
promises.

Tensors that it holds are counted when they are made and freed; messages go through shared memory or
the network, and are smaller or larger than a socket's buffer.
"""

from __future__ import annotations

from typing import Any

import pytest

from parallel3d.schedules.check import check
from parallel3d.schedules.schedule import LOOPED, NAMED_SCHEDULES, V_SHAPED, Schedule, make
from tests.distributed.pool import Pool
from tests.tools.sleeping_stages import Ran, run_all

LARGE = (1, 256, 16384)  # 16 MiB


def forms(ranks: int, microbatches: int) -> list[Schedule]:
    chunks = dict.fromkeys(V_SHAPED, 2) | dict.fromkeys(LOOPED, 3)
    return [make(name, ranks, microbatches, chunks.get(name, 1)) for name in NAMED_SCHEDULES]


def is_right(by_rank: list[Ran], schedule: Schedule) -> None:
    """Asserts that every stage added 1 both ways, once per micro-batch, and kept nothing."""
    stages, count = schedule.assignment.stages, schedule.microbatches
    assert sum(ran.loss for ran in by_rank) == stages * count
    for ran in by_rank:
        assert ran.weights == [count] * schedule.assignment.chunks
        assert ran.left == 0
        assert len(ran.spans) == len({name for name, _, _ in ran.spans})


def run_each_way(schedules: list[Schedule], ways: list[dict[str, Any]]) -> list[Ran]:
    return [ran for way in ways for ran in run_all(schedules, way)]


@pytest.mark.parametrize("ranks", [2, 4])
def test_a_rank_holds_as_many_activations_as_the_checker_counts(ranks: int, pool: Pool) -> None:
    schedules = forms(ranks, 2 * ranks + 1)
    ways = [{"shared_memory": True}, {"shared_memory": False}]
    by_rank = pool.run(ranks, run_each_way, schedules, ways)
    for schedule, ran in zip(schedules * 2, zip(*by_rank, strict=True), strict=True):
        is_right(list(ran), schedule)
        report = check(schedule.program(), schedule.microbatches, schedule.assignment)
        assert [one.peak_live for one in ran] == report.peaks, schedule.name


def test_a_late_stage_changes_no_result(pool: Pool) -> None:
    """A rank far ahead waits for room; no rank waits for ever, and nothing is overwritten."""
    schedules = forms(3, 7)
    first_and_last = [{"late": (0.005, 0.0, 0.0)}, {"late": (0.0, 0.0, 0.005)}]
    by_rank = pool.run(3, run_each_way, schedules, first_and_last)
    for schedule, ran in zip(schedules * 2, zip(*by_rank, strict=True), strict=True):
        is_right(list(ran), schedule)


def test_messages_larger_than_every_buffer_do_not_deadlock(pool: Pool) -> None:
    """Sends messages of 16 MiB: a send ends only when its receiver has the message."""
    schedules = [make("interleaved", 2, 2, 2), make("zbv", 2, 2, 2)]
    by_rank = pool.run(2, run_all, schedules, {"shape": LARGE})
    for schedule, ran in zip(schedules, zip(*by_rank, strict=True), strict=True):
        is_right(list(ran), schedule)
