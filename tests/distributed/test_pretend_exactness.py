"""Every pair of settings trains on the pretended accelerator as the reference does.

The cases are those of `test_engines`, but for the compiled ones, which have no device to be lowered
for, and for two steps: the second reads what the first has left. Beside the numbers: no access that
nothing orders, no operation that the ranks call unlike (both raise), one wait of the host a step,
none a micro-batch, and no context on a device that is not the rank's own.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import pytest
import torch.distributed as dist

from parallel3d.pretend.device import this_machine
from parallel3d.pretend.races import caller
from parallel3d.pretend.records import Observer
from parallel3d.topology.layout import Layout
from tests.distributed.cases import Case, Problem
from tests.distributed.harness import (
    Outcome,
    References,
    differences,
    make_trainer,
    plain_groups,
    run_cases,
)
from tests.distributed.pretended import PretendedPool
from tests.distributed.test_engines import CASES

Sizes = tuple[int, int, int]
PLAIN = [
    (sizes, replace(case, problem=replace(case.problem, steps=2)))
    for sizes, case in CASES
    if not case.compile
]
LAYOUTS = sorted({sizes for sizes, _ in PLAIN})
STEPS = 2  # in which the host's waits are counted, after the first


def run_on_own_device(sizes: Sizes, cases: Sequence[Case]) -> list[Outcome]:
    """As `run_cases`; contexts are on this rank's device alone."""
    outcomes = run_cases(sizes, cases)
    assert this_machine().touched == {dist.get_rank()}
    return outcomes


@pytest.mark.parametrize("sizes", LAYOUTS, ids=str)
def test_trains_as_the_reference_does(
    sizes: Sizes, pretended: PretendedPool, references: References
) -> None:
    cases = [case for layout, case in PLAIN if layout == sizes]
    world = sizes[0] * sizes[1] * sizes[2]
    by_rank = pretended.run(world, run_on_own_device, sizes, cases, timeout_s=900)
    failures = []
    for case, outcomes in zip(cases, zip(*by_rank, strict=True), strict=True):
        found = differences(outcomes, references.of(case.problem), case.problem)
        failures += [f"{case}: {found}"] if found else []
    assert not failures, "\n".join(failures)


class Waits(Observer):
    """Why and where the host waited."""

    def __init__(self) -> None:
        self.found: list[str] = []

    def host_wait(self, why: str) -> None:
        self.found.append(f"{why} at {caller()}")


def waits_a_step(sizes: Sizes, case: Case) -> list[list[str]]:
    """Of each step but the first: where the host waited for the device."""
    groups = plain_groups(Layout(*sizes))
    trainer = make_trainer(case, groups)
    trainer.train_step()
    steps = []
    for _ in range(STEPS):
        waits = Waits()
        this_machine().observers.append(waits)
        trainer.train_step()
        this_machine().observers.remove(waits)
        steps.append(waits.found)
    groups.close()
    return steps


DROPS = Problem("llama_tiny", "adamw", True, "bf16", (("dropout", 0.1),))
WAITING = [
    ((2, 2, 1), Case(DROPS, sp=True)),
    ((2, 2, 2), replace(Case(DROPS), keys=(("zero", 1), ("recompute", "full")))),
    ((1, 2, 2), replace(Case(DROPS), keys=(("zero", 3),))),
    ((2, 1, 2), replace(Case(DROPS), keys=(("zero", 2),))),
    ((2, 1, 2), Case(Problem("gpt_tiny", "sgd", True, "fp16"), microbatches=6)),
]


@pytest.mark.parametrize(("sizes", "case"), WAITING, ids=lambda value: str(value))
def test_the_host_waits_once_a_step(sizes: Sizes, case: Case, pretended: PretendedPool) -> None:
    world = sizes[0] * sizes[1] * sizes[2]
    for steps in pretended.run(world, waits_a_step, sizes, case, timeout_s=900):
        for waits in steps:
            assert len(waits) == 1, "\n".join(waits)
            assert waits[0].startswith("tolist at") and "trainer.py" in waits[0]
