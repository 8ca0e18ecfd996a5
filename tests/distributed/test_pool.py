"""Tests the pool: results by rank, reuse, and one clear failure for each way in which a rank
fails."""

from __future__ import annotations

import os
import signal
import threading
import time

import pytest
import torch
import torch.distributed as dist

from tests.distributed.cases import Case, Problem
from tests.distributed.harness import run_cases
from tests.distributed.pool import GROUPS, Pool, WorkerFailure, gloo_groups
from tests.pace import in_time

pytestmark = pytest.mark.more


def sum_of_ranks(scale: float) -> tuple[int, int, float, int]:
    total = torch.tensor([scale * (dist.get_rank() + 1)], dtype=torch.float64)
    dist.all_reduce(total)
    return dist.get_rank(), dist.get_world_size(), total.item(), os.getpid()


def raise_on_rank_one() -> None:
    if dist.get_rank() == 1:
        raise KeyError("planted")
    dist.barrier()


def die_on_rank_two() -> None:
    if dist.get_rank() == 2:
        os.kill(os.getpid(), signal.SIGKILL)
    dist.barrier()


def miss_a_barrier_on_rank_zero() -> None:
    if dist.get_rank() == 0:
        threading.Event().wait()
    dist.barrier()


def wait_for_ever() -> None:
    threading.Event().wait()


def return_what_cannot_be_pickled() -> object:
    return threading.Lock()


def pid() -> int:
    return os.getpid()


def keep_groups(count: int) -> None:
    kept.extend(dist.new_group() for _ in range(count))


kept: list[object] = []


def test_every_world_size_runs_and_workers_are_reused(pool: Pool) -> None:
    pids: set[int] = set()
    for world in (1, 2, 8, 3, 8):
        results = pool.run(world, sum_of_ranks, 0.5)
        total = 0.5 * world * (world + 1) / 2
        assert [r[:3] for r in results] == [(rank, world, total) for rank in range(world)]
        pids |= {r[3] for r in results}
    assert len(pids) == 8 and os.getpid() not in pids


def test_a_warm_run_is_fast(pool: Pool) -> None:
    pool.run(8, sum_of_ranks, 1.0)
    start = time.monotonic()
    for _ in range(5):
        pool.run(8, sum_of_ranks, 1.0)
    # About 0.05 s on a quiet machine; a fresh start is 2 s.
    assert in_time((time.monotonic() - start) / 5, 2.0)


@pytest.mark.parametrize(
    ("function", "message"),
    [
        (raise_on_rank_one, r"rank 1 of 3 raised[\s\S]*KeyError: 'planted'"),
        (die_on_rank_two, "rank 2 of 3 died, exit code -9"),
        (return_what_cannot_be_pickled, r"rank \d of 3 raised[\s\S]*pickle"),
    ],
)
def test_a_failing_rank_is_named_and_the_next_run_works(function: object, message: str) -> None:
    with Pool() as own:
        before = own.run(3, pid)
        with pytest.raises(WorkerFailure, match=message):
            own.run(3, function)
        after = own.run(3, pid)
        assert not set(before) & set(after)


@pytest.mark.parametrize(
    ("function", "message"),
    [
        (miss_a_barrier_on_rank_zero, r"rank 1 of 2 raised[\s\S]*dist.barrier\(\)"),
        (wait_for_ever, "no result in time from rank 0, 1"),
    ],
)
def test_a_hang_ends_at_the_timeout_and_names_the_ranks(function: object, message: str) -> None:
    with Pool() as own:
        own.run(2, pid)
        start = time.monotonic()
        with pytest.raises(WorkerFailure, match=message):
            own.run(2, function, timeout_s=2.0)
        assert in_time(time.monotonic() - start, 20)


def test_ending_the_pool_leaves_no_worker() -> None:
    with Pool() as own:
        pids = own.run(2, pid)
        assert own.pids == pids
    for worker in pids:
        with pytest.raises(ProcessLookupError):
            os.kill(worker, 0)


def test_workers_that_keep_many_groups_are_replaced(pool: Pool) -> None:
    pool.end()  # objects that other tests have left in the workers count, too
    before = pool.run(2, pid)
    pool.run(2, keep_groups, GROUPS // 2)
    assert pool.run(2, pid) == before
    pool.run(2, keep_groups, GROUPS)
    assert not set(pool.run(2, pid)) & set(before)


def test_an_ended_trainer_leaves_none_of_its_groups(pool: Pool) -> None:
    pool.end()
    case = Case(Problem("gpt_tiny", "sgd", tied=True), keys=(("zero", 1),))
    left = []
    for _ in range(3):
        pool.run(4, run_cases, (1, 2, 2), [case])
        left.append(gloo_groups(pool.pids[0]))
    assert left[2] <= left[0] <= 2  # torch itself keeps the newest default group
