"""Tests that `parallel3d verify` compares complete parameters."""

from __future__ import annotations

import pytest

from parallel3d.blueprint.layout import Layout
from parallel3d.build import Trainer
from parallel3d.comm.process_groups import ProcessGroups
from parallel3d.commands import verify
from parallel3d.run_config import Config
from tests.distributed.cases import Case, Problem
from tests.distributed.harness import plain_groups, source_of
from tests.distributed.pool import Pool

pytestmark = pytest.mark.nightly


def failures_of_verify(case: Case) -> list[str | None]:
    """Returns the findings of `parallel3d verify` on two ranks, each of which steps half of the
    parameters."""
    groups, config = plain_groups(Layout(dp=2)), case.config(Layout(dp=2))
    source = source_of(case.problem, config)

    def make(config: Config, groups: ProcessGroups) -> Trainer:
        return Trainer(config, groups, device, train_source=source)

    device = groups.device
    compared = verify.compare(verify.Variant(config, verify.EXACT), groups, make)
    found = [row.failure for row in compared]
    groups.close()
    return found


def test_verify_compares_parameters_that_are_gathered(pool: Pool) -> None:
    """Under zero=1 the all-gather of a step continues until the next forward waits for it."""
    of_bytes = (("vocab_size", 260),)
    problem = Problem("gpt_tiny", "muon", True, steps=2, layers=2, model=of_bytes)
    case = Case(problem, keys=(("zero", 1),))
    assert pool.run(2, failures_of_verify, case) == [[None, None], []]
