"""Tests that every rank skips a step that overflows.

`matrix` tests that lower precisions stay close to fp32.
"""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch

from parallel3d.blueprint.layout import Layout
from parallel3d.comm.operation_log import OperationLog
from parallel3d.comm.process_groups import ProcessGroups
from tests.distributed.cases import Case, Problem
from tests.distributed.harness import make_trainer
from tests.distributed.pool import Pool

LAYOUTS = [(1, 1, 1), (2, 2, 1), (1, 1, 2)]
GPT = Problem("gpt_tiny", "sgd", tied=True)
LLAMA = Problem("llama_tiny", "adamw", tied=False)


def overflowing_run(sizes: tuple[int, int, int]) -> tuple[list, list, float, bool, list]:
    """Runs steps from too large a loss scale, which grows with every good step.

    Returns whether each step was skipped, scale and updates after it; the final loss; whether
    skipped steps left the masters unchanged; and the log's divergence after each step.
    """
    groups = ProcessGroups.create(Layout(*sizes), "cpu", timeout_s=300)
    log = OperationLog()
    keys = (
        ("precision.initial_loss_scale", 2.0**21),
        ("precision.loss_scale_window", 1),
        ("precision.loss_scale_hysteresis", 1),
        ("train.steps", 8),
        ("zero", int(sizes[2] > 1)),
    )
    # Micro-batches have one size, because overflow depends on the number of tokens that a GEMM adds
    # up.
    case = Case(replace(GPT, precision="fp16"), microbatches=6 // sizes[2], keys=keys)
    trainer = make_trainer(case, groups.observed(log=log))
    seen, losses, untouched, odd = [], [], True, []
    for _ in range(8):
        log.boundary("train step")
        before = [s.values["parameter"].clone() for s in trainer.parameter_slices()]
        result = trainer.train_step()
        after = [s.values["parameter"] for s in trainer.parameter_slices()]
        same = all(torch.equal(a, b) for a, b in zip(before, after, strict=True))
        untouched = untouched and same == result.skipped
        seen.append((result.skipped, trainer.loss_scale.scale, trainer.optimizer.updates))
        losses.append(result.loss)
        odd.append(log.divergence())
    loss = trainer.evaluate()
    groups.close()
    return seen, losses, loss, untouched, odd


def test_the_loss_scale_overflows_and_recovers_equally_under_all_layouts(pool: Pool) -> None:
    runs = {sizes: pool.run(math.prod(sizes), overflowing_run, sizes) for sizes in LAYOUTS}
    expected, _, loss, *_ = runs[1, 1, 1][0]
    skipped = [step[0] for step in expected]
    assert skipped[0] and not all(skipped), "it starts with an overflow and gets over it"
    assert True in skipped[skipped.index(False) :], "the growing scale overflows again"
    assert expected[-1][2] == skipped.count(False), "skipped steps are no updates"
    for sizes, ranks in runs.items():
        for rank, (seen, _, its_loss, untouched, odd) in enumerate(ranks):
            assert seen == expected, f"{sizes} rank {rank}"
            assert untouched, f"{sizes} rank {rank}: a skipped step moved a parameter"
            assert its_loss == pytest.approx(loss, rel=5e-3), f"{sizes} rank {rank}"
            assert odd == [None] * 8, f"{sizes} rank {rank}: a skipped step is no divergence"


def one_bad_gradient(sizes: tuple[int, int, int], bad_rank: int) -> list[tuple[bool, bool, int]]:
    """Runs three steps in fp32; in the second, one rank's gradients have a NaN.

    Returns whether each was skipped, whether it left the masters unchanged, and the samples
    consumed.
    """
    groups = ProcessGroups.create(Layout(*sizes), "cpu", timeout_s=300)
    trainer = make_trainer(Case(replace(LLAMA, precision="fp32")), groups)
    finish = trainer.data_parallel.finish_step

    def finish_step() -> list[str]:
        unused = finish()
        if trainer.steps_done == 1 and groups.rank == bad_rank:
            trainer.data_parallel.segments[0].grad[3] = torch.nan
        return unused

    trainer.data_parallel.finish_step = finish_step
    seen = []
    for _ in range(3):
        before = [s.values["parameter"].clone() for s in trainer.parameter_slices()]
        skipped = trainer.train_step().skipped
        after = [s.values["parameter"] for s in trainer.parameter_slices()]
        same = all(torch.equal(a, b) for a, b in zip(before, after, strict=True))
        seen.append((skipped, same, trainer.consumed_samples))
    groups.close()
    return seen


def test_a_gradient_that_is_not_finite_on_one_rank_skips_the_step_on_all(pool: Pool) -> None:
    """The other ranks learn of it over tp and over pp."""
    for seen in pool.run(4, one_bad_gradient, (2, 2, 1), 3):
        assert seen == [(False, False, 24), (True, True, 48), (False, False, 72)]
