"""Tests a profile's names for the parts of a step that schedules and ZeRO add."""

from __future__ import annotations

from collections import Counter

import pytest

from parallel3d.blueprint.layout import Layout
from parallel3d.comm.process_groups import ProcessGroups
from tests.distributed.cases import Case, Problem
from tests.distributed.harness import make_trainer
from tests.distributed.pool import Pool
from tests.unit.loop.test_profiling import Opened

pytestmark = pytest.mark.nightly

PROBLEM = Problem("llama_tiny", "sgd", tied=False, layers=2)


def names_of_a_step(sizes: tuple[int, int, int], case: Case) -> Counter[str]:
    """Returns how often each range is opened in a rank's second step."""
    groups = ProcessGroups.create(Layout(*sizes), "cpu", timeout_s=300)
    trainer = make_trainer(case, groups)
    trainer.train_step()
    trainer.step_timer.ranges = opened = Opened()
    trainer.train_step()
    trainer.step_timer.ranges = None
    groups.close()
    assert not opened.open
    return Counter(name for _, name in opened.names)


@pytest.mark.parametrize(
    ("sizes", "case", "names"),
    [
        (
            (1, 2, 1),
            Case(PROBLEM, schedule="zb_h1", microbatches=2),
            {f"{part} m{m} c0": 1 for m in (0, 1) for part in ("input gradient", "weight gradient")}
            | {"backward m0 c0": 0},
        ),
        (
            (1, 1, 2),
            Case(PROBLEM, microbatches=2, keys=(("zero", 1),)),
            {"gradient reduction of bucket 0": 1, "wait gradient reduction": 1}
            | {
                "parameter all-gather": 1,
                "wait parameter all-gather": 1,
                "weight gradient m0 c0": 0,
            },
        ),
    ],
    ids=["a backward in two", "zero=1"],
)
def test_parts_of_a_step_have_names_in_a_profile(
    sizes: tuple[int, int, int], case: Case, names: dict[str, int], pool: Pool
) -> None:
    for found in pool.run(2, names_of_a_step, sizes, case):
        assert {name: min(1, found[name]) for name in names} == names
