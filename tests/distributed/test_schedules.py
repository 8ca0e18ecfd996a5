"""Tests that schedules with the same order of gradients end in the same bits.

`matrix` tests that each of them trains like the reference.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from parallel3d.schedules.schedule import V_SHAPED, make
from parallel3d.schedules.table import write_table
from tests.distributed.cases import Case, Problem
from tests.distributed.harness import Outcome, run_cases
from tests.distributed.pool import Pool

pytestmark = pytest.mark.nightly


def test_schedules_that_add_in_the_same_order_have_the_same_bits(
    pool: Pool, tmp_path: Path
) -> None:
    """Gradients are added in the order of micro-batches, so a rank's other work changes no bit."""
    problem = Problem("gpt_tiny", "adamw", True, layers=4, steps=2, batch=10)
    own = tmp_path / "own.csv"
    own.write_text(write_table(make("interleaved_zb", 2, 5, 2)))
    alike = [
        [("gpipe", 1, None), ("1f1b", 1, None), ("zb_h1", 1, None)],
        [("interleaved", 2, None), ("interleaved_zb", 2, None), ("file", 2, str(own))],
        [("zbv", 2, None), ("v_half", 2, None)],
    ]
    cases = [
        # A V's tied table gets the head's gradients in forwards and the embedding's in backwards.
        Case(
            replace(problem, tied=name not in V_SHAPED), name, microbatches=5,
            keys=(("vpp", chunks), ("schedule.file", file)),
        )
        for group in alike
        for name, chunks, file in group
    ]  # fmt: skip
    outcomes = iter(pool.run(2, run_cases, (1, 2, 1), cases)[0])
    for group in alike:
        found = [next(outcomes) for _ in group]
        bits = [(one.steps, one.evaluation, digests_of(one)) for one in found]
        assert bits == bits[:1] * len(bits), group


def digests_of(outcome: Outcome) -> dict[str, bytes]:
    return {name: weight.tobytes() for name, weight in outcome.final.items()}
