"""Every pair of settings trains on the simulated accelerator as the reference does.

The settings are those of `test_engines`, which has each pair in fp64, but for what is compiled,
which has no device to be lowered for, and for fp32, which does what fp64 does. Streams, events and
the order of a communicator do not depend on the precision, so here a pair may meet in any; nor on
how many layers and micro-batches there are beyond a first and a last one, or ranks beyond two in a
dimension. There are two steps: the second reads what the first has left. Beside the numbers: no
access that nothing orders, no operation that the ranks call unlike (both raise), one wait of the
host a step, none a micro-batch, and no context on a device that is not the rank's own.
"""

from __future__ import annotations

import functools
from dataclasses import replace
from itertools import combinations

import pytest

from tests.distributed.cases import Case, Problem
from tests.distributed.harness import References, check_cases, cover, differences
from tests.distributed.simulated import SimulatedPool
from tests.distributed.simulated_runs import (
    DROPS,
    Sizes,
    check_one_wait,
    run_on_own_device,
    run_without_residual_gradients,
    waits_a_step,
    warned_of_a_step,
)
from tests.distributed.test_engines import (
    COMPILE,
    NAMES,
    TOGETHER,
    Levels,
    case_of,
    every_combination,
)

Pairs = frozenset[tuple[str, object, str, object]]


def possible() -> list[Levels]:
    return [c for c in every_combination() if not c[COMPILE] and c[-1] != "fp32"]


def pairs_of(levels: Levels) -> Pairs:
    """All pairs of levels of one combination."""
    return frozenset((*a, *b) for a, b in combinations(zip(NAMES, levels, strict=True), 2))


@functools.cache
def chosen_levels() -> list[Levels]:
    """A small set of combinations that holds every pair, found greedily; one has tp, pp and dp."""
    first = TOGETHER[0]
    return [first, *cover({levels: pairs_of(levels) - pairs_of(first) for levels in possible()})]


def small(levels: Levels) -> tuple[Sizes, Case]:
    """Two steps of as few ranks, layers and micro-batches as show the same."""
    (tp, pp, dp), case = case_of(levels)
    problem = replace(case.problem, steps=2)
    if tp * pp * dp == 8:
        problem, case = replace(problem, layers=2), replace(case, microbatches=2)
    return (tp, pp, min(dp, 2)), replace(case, problem=problem)


# Split backwards and several chunks on streams and one communicator's order.
FOUR = Problem("llama_tiny", "sgd", tied=True, layers=4, steps=2, batch=12)
SCHEDULES = [
    ((1, 2, 2), Case(FOUR, "zbv", microbatches=3, keys=(("vpp", 2), ("zero", 1)))),
    ((1, 2, 2), Case(FOUR, "zbv", microbatches=3, keys=(("vpp", 2), ("zero", 3)))),
    ((2, 2, 1), Case(FOUR, "interleaved_zb", microbatches=3, keys=(("vpp", 2),))),
    ((2, 2, 1), Case(FOUR, "zb_h1", sp=True, microbatches=3, keys=(("recompute", "full"),))),
]
LAYOUTS = [(1, 1, 2), (1, 2, 2), (2, 1, 2), (2, 2, 1), (2, 2, 2)]


def all_cases() -> list[tuple[Sizes, Case]]:
    return [*map(small, chosen_levels()), *SCHEDULES]


def test_every_pair_that_can_meet_is_there() -> None:
    chosen = chosen_levels()
    assert set().union(*map(pairs_of, chosen)) >= set().union(*map(pairs_of, possible()))
    assert sorted({sizes for sizes, _ in all_cases()}) == LAYOUTS
    assert len(chosen) < 25


@pytest.mark.parametrize("sizes", LAYOUTS, ids=str)
def test_trains_as_the_reference_does(
    sizes: Sizes, simulated: SimulatedPool, references: References
) -> None:
    cases = [case for layout, case in all_cases() if layout == sizes]
    check_cases(sizes, cases, simulated, references, run=run_on_own_device)


# The sum of the residual stream is in the norm's kernel, or apart where a norm is made again.
RESIDUALS = [
    Case(Problem("llama_tiny", "sgd", True, steps=2)),
    Case(Problem("llama_tiny", "sgd", True, steps=2), sp=True, microbatches=2),
    Case(Problem("llama_tiny", "sgd", True, "bf16", steps=2), sp=True),
    Case(Problem("llama_tiny", "sgd", True, steps=2), keys=(("recompute", ["norm", "attention"]),)),
    Case(Problem("llama_tiny", "sgd", True, steps=2), keys=(("recompute", ["layer"]),)),
    Case(Problem("llama_tiny", "sgd", True, steps=2), keys=(("recompute", ["mlp"]),)),
    Case(Problem("llama_tiny", "sgd", True, model=(("dropout", 0.2),), steps=2)),
    Case(Problem("llama_tiny", "sgd", True, model=(("qk_norm", True),), steps=2)),
]


def test_residuals_added_by_the_norms_train_as_the_reference_does(
    simulated: SimulatedPool, references: References
) -> None:
    check_cases((2, 1, 1), RESIDUALS, simulated, references, run=run_on_own_device)


def test_a_residual_without_its_gradient_is_found(
    simulated: SimulatedPool, references: References
) -> None:
    case = RESIDUALS[0]
    (outcomes,) = simulated.run(1, run_without_residual_gradients, (1, 1, 1), [case], timeout_s=900)
    assert "weights" in differences(outcomes, references.of(case.problem), case.problem)


def test_the_host_waits_once_a_step_with_dropout(simulated: SimulatedPool) -> None:
    """Whose masks, drawn again by a recomputed forward, none of the settings above has."""
    case = replace(Case(DROPS, sp=True, microbatches=2), keys=(("recompute", "full"),))
    for steps in simulated.run(2, waits_a_step, (2, 1, 1), case, timeout_s=900):
        for found in steps:
            check_one_wait(found)


def test_pytorchs_debug_mode_sees_one_wait_a_step(simulated: SimulatedPool) -> None:
    """As `benchmarks.gpu_first` counts on a card."""
    (said,) = simulated.run(1, warned_of_a_step, Case(DROPS, microbatches=2))
    assert said == ["trainer.py: called a synchronizing CUDA operation"]
