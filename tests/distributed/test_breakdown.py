"""Tests the breakdown of a step: it adds up to the step, and each delay shows under its own
name."""

from __future__ import annotations

import statistics
import time
from typing import Any

import pytest
import torch.distributed as dist

from parallel3d.blueprint.layout import Layout
from parallel3d.build import Trainer
from parallel3d.comm.process_groups import ProcessGroups
from parallel3d.comm.step_timer import KINDS
from tests.distributed.cases import STEPS, Case, Problem
from tests.distributed.harness import make_trainer
from tests.distributed.pool import Pool
from tests.pace import pace

pytestmark = pytest.mark.nightly

GPT = Problem("gpt_tiny", "adamw", tied=True, precision="fp32")
LATE_S = 0.06  # delay of every forward or backward of the slow rank


def timed_steps(sizes: tuple[int, int, int], case: Case) -> tuple[list[float], list[dict]]:
    """Returns the share of each step's time, measured from outside, that the breakdown misses, and
    its means."""
    groups = ProcessGroups.create(Layout(*sizes), "cpu", timeout_s=300)
    trainer = make_trainer(case, groups)
    missed = []
    for _ in range(STEPS):
        start = time.perf_counter()
        trainer.train_step()
        seconds = time.perf_counter() - start
        missed.append(1 - sum(trainer.step_timer.last.values()) / seconds)
    times = trainer.step_times()
    groups.close()
    return missed, times


@pytest.mark.parametrize(
    ("sizes", "case"),
    [
        ((2, 1, 1), Case(GPT, sp=True)),
        ((1, 2, 2), Case(GPT, keys=(("zero", 1), ("launch.shared_memory", False)))),
    ],
    ids=str,
)
def test_the_kinds_of_time_add_up_to_the_step(
    sizes: tuple[int, int, int], case: Case, pool: Pool
) -> None:
    tp, pp, dp = sizes
    here = {"forward", "backward", "optimizer", "data", "model" if tp * pp * dp > 1 else "data"}
    here |= {k for k, size in (("tp", tp), ("pp", pp), ("dp", dp)) if size > 1}
    for missed, times in pool.run(tp * pp * dp, timed_steps, sizes, case):
        assert abs(statistics.median(missed)) < 0.01
        assert [t["rank"] for t in times] == list(range(tp * pp * dp))
        for mine in times:
            seconds = {kind: mine[kind] for kind in KINDS}
            used = {kind for kind, spent in seconds.items() if spent > 0}
            # A middle stage reads no data; idle time depends on the schedule.
            assert used - {"idle"} == here, mine
            assert min(seconds.values()) >= 0.0


def with_delay(
    sizes: tuple[int, int, int], where: str, keys: tuple, late_s: float
) -> dict[str, float]:
    """Returns the smallest seconds by kind over three steps in which `where` is slow, on one rank
    or on all.

    The smallest counts because a busy machine may delay any step.
    """
    groups = ProcessGroups.create(Layout(*sizes), "cpu", timeout_s=300)
    trainer = make_trainer(Case(GPT, microbatches=2, keys=keys), groups)

    def late(*_: Any) -> None:
        time.sleep(late_s)

    if where == "data":
        slow_source(trainer, late_s)
    elif dist.get_rank() == int(where == "last stage" or sizes[1] == 1):
        if where == "backward":
            trainer.stages[0].register_full_backward_pre_hook(late)
        else:
            trainer.stages[0].register_forward_pre_hook(late)
    steps = []
    for _ in range(3):
        trainer.train_step()
        steps.append(dict(trainer.step_timer.last))
    groups.close()
    return {kind: min(step[kind] for step in steps) for kind in KINDS}


def slow_source(trainer: Trainer, late_s: float) -> None:
    micro_batch = trainer.train_batches.micro_batch

    def slow(first: int, m: int) -> Any:
        time.sleep(late_s)
        return micro_batch(first, m)

    trainer.train_batches.micro_batch = slow


TCP = (("launch.shared_memory", False),)


@pytest.mark.parametrize(
    ("sizes", "where", "keys", "rank", "kind"),
    [
        # (layout, the slow part, settings, the ranks that wait for it, the name of their wait)
        ((2, 1, 1), "forward", (), 0, "tp"),
        ((1, 1, 2), "backward", (), 0, "dp"),
        ((1, 2, 1), "first stage", (), 1, "idle"),
        ((1, 2, 1), "first stage", TCP, 1, "idle"),
        ((1, 2, 1), "last stage", (), 0, "idle"),
        ((1, 1, 1), "data", (), 0, "data"),
    ],
    ids=str,
)
def test_a_wait_for_a_slow_rank_is_counted_under_its_cause(
    sizes: tuple[int, int, int], where: str, keys: tuple, rank: int, kind: str, pool: Pool
) -> None:
    late_s = LATE_S * pace()  # far above the waits that a busy machine causes
    by_rank = pool.run(sizes[0] * sizes[1] * sizes[2], with_delay, sizes, where, keys, late_s)
    waiting = by_rank[rank]
    # With two micro-batches, the neighbour waits for at least one forward, and only for the last
    # backward, which fills the buckets.
    others = {k: s for k, s in waiting.items() if k not in (kind, "forward", "backward")}
    assert waiting[kind] > 0.8 * late_s
    assert max(others.values()) < 0.5 * waiting[kind], waiting
    if kind != "data":
        slow = by_rank[1 - rank]
        assert slow["backward" if where == "backward" else "forward"] > 2 * late_s
