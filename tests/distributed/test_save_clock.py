"""Tests that all ranks save after the same step if time says when, whatever their clocks say."""

from __future__ import annotations

import random
from pathlib import Path

import pytest
import torch.distributed as dist

from parallel3d.blueprint.layout import Layout
from parallel3d.build import Trainer
from parallel3d.checkpoint.checkpoints import Checkpoints
from parallel3d.checkpoint.manifest import list_checkpoints, step_of
from parallel3d.loop.save_clock import SaveClock, save_clock
from parallel3d.run.launch import Worker
from tests.distributed.cases import Case, Problem
from tests.distributed.harness import here, plain_groups, source_of
from tests.distributed.pool import Pool

RUNS, STEPS = 100, 3
PROBLEM = Problem("llama_tiny", "adamw", False)


class Skewed:
    """A rank's clock: up to an hour off, and up to twice as fast as another's."""

    def __init__(self, number: int) -> None:
        draw = random.Random(f"{dist.get_rank()} {number}")
        self.now, self.speed = draw.uniform(-3600, 3600), draw.uniform(1, 2)

    def __call__(self) -> float:
        return self.now

    def tick(self) -> None:
        self.now += 4 * self.speed


def run_all(folder: Path) -> tuple[list[list[bool]], list[list[bool]], list[int], int]:
    """Trains on this rank; returns after which steps it was told to save, and after which its own
    clock would have been, in each run; and the saved steps, with the failed saves."""
    groups = plain_groups(Layout(2, 1, 1))
    keys = (("run", folder.name), ("checkpoint.every", "10s"), ("checkpoint.keep", 99))
    config = Case(PROBLEM, microbatches=1, keys=(*keys, ("train.steps", 999))).config(groups.layout)
    asks = lambda: clock is not None and clock.is_due()  # noqa: E731
    trainer = Trainer(
        config, groups, here(), train_source=source_of(PROBLEM, config), save_requested=asks
    )
    checkpoints = Checkpoints(config, folder, groups, print)
    checkpoints.restore(trainer)
    worker = Worker(dist.get_rank(), dist.get_rank(), 2, 1, folder, "local")
    told: list[list[bool]] = []
    alone: list[list[bool]] = []
    saved, failed = [], 0
    for run in range(RUNS):
        time = Skewed(run)
        own = SaveClock(10.0, lambda: None, print, time)
        clock = save_clock(config, worker, print, time)
        told.append([])
        alone.append([])
        for _ in range(STEPS):
            time.tick()
            alone[-1].append(own.is_due())
            result = trainer.train_step()
            told[-1].append(result.save)
            for each in (own, clock):
                if each is not None:
                    each.after_step(0.0, 0.0, saved=result.save, writes=False)
            if run < 5:
                checkpoints.after_step(trainer, by_time=result.save)
                saved += [result.step] if result.save else []
    failed += not checkpoints.close()
    groups.close()
    return told, alone, saved, failed


@pytest.mark.nightly
def test_ranks_with_skewed_clocks_save_after_the_same_steps(pool: Pool, tmp_path: Path) -> None:
    (first, alone, saved, failed), (second, other, also_saved, also_failed) = pool.run(
        2, run_all, tmp_path
    )
    assert first == second and len(first) == RUNS
    assert first == alone, "rank 0's clock decides"
    assert sum(one != two for one, two in zip(alone, other, strict=True)) > RUNS / 4
    assert {sum(run) for run in first} == {1}  # the second step of 8 to 16 s, or the third
    assert saved == also_saved and len(saved) == 5 and not failed and not also_failed
    assert sorted(map(step_of, list_checkpoints(tmp_path))) == saved
