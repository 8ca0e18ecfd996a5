"""Tests that a global batch without a token to learn changes nothing, under every layout."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from parallel3d.blueprint.layout import Layout
from parallel3d.comm.process_groups import ProcessGroups
from parallel3d.data.sampler import Sample
from tests.distributed.cases import Case, Problem, UnequalMasks
from tests.distributed.harness import make_trainer
from tests.distributed.pool import Pool

pytestmark = pytest.mark.nightly

STEPS = 4
EMPTY = 2  # the step, counted from 0, whose samples are all masked
SIZES = {0: [(2, 1, 1)], 1: [(1, 2, 2), (1, 1, 1, 2)]}  # layouts by stage of ZeRO


class Masked:
    """A source whose samples from `first` to `last` are all masked."""

    def __init__(self, source: UnequalMasks, first: int, last: int) -> None:
        self.source, self.first, self.last = source, first, last

    def sample(self, i: int) -> Sample:
        sample = self.source.sample(i)
        if self.first <= i < self.last:
            return sample._replace(loss_mask=np.zeros_like(sample.loss_mask))
        return sample


def masked_run(
    sizes: tuple[int, ...], zero: int = 0, precision: str = "fp64"
) -> tuple[list[Any], float | None]:
    """Returns, for each step, its loss and norm, whether it was skipped, whether parameters and
    optimizer state were unchanged, and the updates so far; and the loss of masked held-out
    samples."""
    groups = ProcessGroups.create(Layout(*sizes), "cpu", timeout_s=300)
    problem = Problem("llama_tiny", "adamw", tied=False, precision=precision)
    trainer = make_trainer(Case(problem, keys=(("train.steps", STEPS), ("zero", zero))), groups)
    size = trainer.config.global_batch_size
    source = trainer.samples.train
    masked = Masked(source, EMPTY * size, (EMPTY + 1) * size)
    held_out = Masked(source, 0, 1 << 60)
    trainer.use_samples(replace(trainer.samples, train=masked, held_out=held_out))
    seen = []
    for _ in range(STEPS):
        scale = trainer.loss_scale.progress()
        before = [s.values[name].clone() for s in trainer.parameter_slices() for name in s.values]
        result = trainer.train_step()
        after = [s.values[name] for s in trainer.parameter_slices() for name in s.values]
        same = all(torch.equal(a, b) for a, b in zip(before, after, strict=True))
        if result.loss is None:
            assert trainer.loss_scale.progress() == scale
        figures = result.loss, result.grad_norm, result.skipped, same
        seen.append((*figures, trainer.optimizer.updates))
    loss = trainer.evaluate()
    groups.close()
    return seen, loss


def test_a_step_without_labels_updates_nothing_under_any_layout(pool: Pool) -> None:
    expected, _ = pool.run(1, masked_run, (1, 1, 1))[0]
    assert [step[2:] for step in expected] == [
        (False, False, 1), (False, False, 2), (True, True, 2), (False, False, 3)
    ]  # fmt: skip
    for zero, sizes in ((zero, sizes) for zero, some in SIZES.items() for sizes in some):
        ranks = pool.run(math.prod(sizes), masked_run, sizes, zero)
        for rank, (seen, evaluation) in enumerate(ranks):
            assert evaluation is None, f"{sizes} rank {rank}"
            for step, (found, wanted) in enumerate(zip(seen, expected, strict=True)):
                assert found[2:] == wanted[2:], f"{sizes} rank {rank} step {step}"
                if step == EMPTY:
                    assert found[0] is None and found[1] == 0.0
                else:
                    assert found[:2] == pytest.approx(wanted[:2], rel=1e-9)


def test_a_step_without_labels_does_not_change_the_loss_scale(pool: Pool) -> None:
    for seen, evaluation in pool.run(2, masked_run, (1, 2, 1), 0, "fp16"):
        assert evaluation is None
        assert [step[0] is None for step in seen] == [step == EMPTY for step in range(STEPS)]
