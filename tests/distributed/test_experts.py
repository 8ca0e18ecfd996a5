"""Tests that balanced routing trains the same experts in every layout.

The reference has no such routing, so the comparison is with one process. The matrix compares all
other trainings of experts with the reference.
"""

from __future__ import annotations

import numpy as np
import pytest

from parallel3d.blueprint.layout import Layout
from tests.distributed.cases import Case, Problem
from tests.distributed.harness import Sizes, run_cases
from tests.distributed.pool import Pool

EIGHT: dict[str, object] = {
    "num_experts": 8,
    "experts_per_token": 2,
    "expert_ffn_size": 24,
    "qk_norm": True,
}
LOSSES = (("aux_loss", 0.1), ("z_loss", 0.01), ("bias_update_rate", 0.05))


PROBLEM = Problem(
    "llama_tiny",
    "sgd",
    False,
    model=tuple(EIGHT.items()),
    layers=4,
    steps=2,
    moe=LOSSES,
    batch=8,
    optim=(("clip_grad", 0.3),),
)


def case(sizes: Sizes, way: str, recompute: str, samples: int) -> Case:
    """Returns a case with micro-batches of `samples` sequences."""
    keys = {"moe.routing": "balanced", "moe.dispatch": way, "recompute": recompute}
    microbatches = PROBLEM.batch // sizes[2] // samples
    return Case(PROBLEM, sp=sizes[0] > 1, microbatches=microbatches, keys=tuple(keys.items()))


def _id(value: object) -> str | None:
    return "-".join(map(str, value)) if isinstance(value, tuple) else None


BALANCED = [
    ((2, 1, 2, 1, 4), "all_to_all"),
    ((1, 1, 1, 4, 4), "gather"),
    pytest.param((2, 1, 1, 2, 2), "gather", marks=pytest.mark.nightly),
    pytest.param((1, 2, 2, 1, 2), "all_to_all", marks=pytest.mark.nightly),
]


@pytest.mark.parametrize(("sizes", "way"), BALANCED, ids=_id)
def test_balanced_routing_gives_equal_counts_and_the_same_training_in_every_layout(
    sizes: Sizes, way: str, pool: Pool
) -> None:
    one = case((1, 1, 1, 1, 1), way, "none", 1)
    many = case(sizes, way, "full", min(2, PROBLEM.batch // sizes[2]))
    [alone] = pool.run(1, run_cases, (1, 1, 1, 1, 1), [one])[0]
    ranks = pool.run(Layout(*sizes).world_size, run_cases, sizes, [many])
    for [outcome] in ranks:
        for step, expected in zip(outcome.steps, alone.steps, strict=True):
            assert step.counts == expected.counts
            assert all(len(set(counts)) == 1 for _, counts in step.counts)
            for name in ("loss", "grad_norm", "aux", "z", "entropy"):
                assert getattr(step, name) == pytest.approx(getattr(expected, name), rel=1e-9)
    for name, weight in ranks[0][0].final.items():
        np.testing.assert_allclose(weight, alone.final[name], rtol=1e-9, atol=1e-12, err_msg=name)
