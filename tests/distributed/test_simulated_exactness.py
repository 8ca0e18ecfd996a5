"""Tests that trainings on the simulated accelerator equal the reference's, and that the host waits
once per step.

The trainings of `matrix.on_streams` have every level of the settings on which streams, events and
the order of a communicator depend; the CPU's tests prove that the numbers are right for every pair.
Besides the numbers, they have no unordered access and no operation that ranks call differently
(both raise), one wait of the host per step, none per micro-batch, and no context on another rank's
device.
"""

from __future__ import annotations

import pytest

from tests.distributed import matrix
from tests.distributed.cases import Case, Problem
from tests.distributed.conditions import of_matrix
from tests.distributed.covering import Levels
from tests.distributed.harness import (
    References,
    check_cases,
    differences,
    with_copies_of_two,
)
from tests.distributed.simulated import SimulatedPool
from tests.distributed.simulated_runs import (
    DROPS,
    run_on_own_device,
    run_without_residual_gradients,
    warned_of_a_step,
)

# The first has the most of those levels; the others add few each.
ON_STREAMS = [
    pytest.param(levels, id=matrix.name_of(levels), marks=[pytest.mark.nightly] if at else [])
    for at, levels in enumerate(matrix.on_streams())
]


@pytest.mark.parametrize("levels", ON_STREAMS)
def test_training_equals_the_reference(
    levels: Levels, simulated: SimulatedPool, references: References
) -> None:
    check_cases(
        matrix.layout(levels),
        [matrix.case(levels)],
        simulated,
        references,
        of_matrix,
        matrix.groups_of(levels),
        run=run_on_own_device,
    )


COPIES = Case(
    Problem("gpt_tiny", "adamw", True, layers=2, steps=2, batch=8),
    microbatches=2,
    bucket_cap_mb=0.02,
    keys=(
        ("zero", 3),
        ("ddp.shard_size", 2),
        ("ddp.reduce_every_microbatch", False),
        ("recompute", "[norm,attention,mlp]"),
        ("offload_layers", [1]),
    ),
)


@pytest.mark.nightly
def test_copies_of_sharded_weights_train_like_the_reference(
    simulated: SimulatedPool, references: References
) -> None:
    check_cases(
        (1, 1, 4),
        [COPIES],
        simulated,
        references,
        of_matrix,
        with_copies_of_two,
        run=run_on_own_device,
    )


# The sum of the residual stream is in the norm's kernel: alone, next to recomputed parts, and in a
# recomputed layer with its masks. The settings above recompute norms, where it is a kernel of its
# own.
LLAMA = Problem("llama_tiny", "sgd", True, layers=2, steps=2, batch=12)
NORMS = Problem("llama_tiny", "sgd", True, model=(("qk_norm", True),), layers=2, steps=2, batch=12)
MASKS = Problem("llama_tiny", "sgd", True, model=(("dropout", 0.2),), layers=2, steps=2, batch=12)
RESIDUALS = [
    Case(LLAMA, sp=True),
    Case(NORMS, keys=(("recompute", ["mlp"]),)),
    Case(MASKS, sp=True, keys=(("recompute", ["layer"]),)),
]


@pytest.mark.nightly
def test_residuals_added_in_the_norms_train_like_the_reference(
    simulated: SimulatedPool, references: References
) -> None:
    check_cases((2, 1, 1), RESIDUALS, simulated, references, run=run_on_own_device)


@pytest.mark.more
def test_a_residual_without_its_gradient_is_found(
    simulated: SimulatedPool, references: References
) -> None:
    case = Case(LLAMA)
    (outcomes,) = simulated.run(1, run_without_residual_gradients, (1, 1, 1), [case], timeout_s=900)
    assert "weights" in differences(outcomes, references.of(case.problem), case.problem)


def test_pytorchs_sync_debug_mode_sees_one_wait_a_step(simulated: SimulatedPool) -> None:
    """Counts like `benchmarks.gpu.first` on a card."""
    (said,) = simulated.run(1, warned_of_a_step, Case(DROPS, microbatches=2))
    assert said == ["trainer.py: called a synchronizing CUDA operation"]
