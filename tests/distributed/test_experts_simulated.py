"""Tests the host's launches before it waits for the counts of a layer of experts."""

from __future__ import annotations

import dataclasses

import pytest

from tests.distributed.simulated import SimulatedPool
from tests.distributed.simulated_runs import products_behind_counts
from tests.distributed.test_mutations_experts import ADAMW, GATED, experts

pytestmark = pytest.mark.nightly


@pytest.mark.parametrize("way", ["gather", "all_to_all"])
def test_the_shared_expert_runs_while_the_host_waits_for_counts(
    way: str, simulated: SimulatedPool
) -> None:
    """Each of two micro-batches has two layers of experts, with two products and a gate of the
    shared expert; recomputed layers do not wait."""
    problem = dataclasses.replace(GATED, precision="bf16", steps=1)
    case = experts(problem, way, keys={"recompute": "full"})
    assert simulated.run(2, products_behind_counts, (2, 1, 1, 1, 2), case) == [[3] * 4] * 2


def test_without_a_shared_expert_nothing_is_launched_before_the_wait(
    simulated: SimulatedPool,
) -> None:
    case = experts(dataclasses.replace(ADAMW, precision="bf16", steps=1), "all_to_all")
    assert simulated.run(2, products_behind_counts, (2, 1, 1, 1, 2), case) == [[0] * 4] * 2
