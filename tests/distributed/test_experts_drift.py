"""Tests that the check for drift knows which ranks hold the same experts, and compares biases."""

from __future__ import annotations

import re
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist

from parallel3d.blueprint.layout import Layout
from parallel3d.build import Trainer
from parallel3d.comm.process_groups import ProcessGroups
from parallel3d.faults.health import Health
from parallel3d.parameters.copies import CopyGroups
from parallel3d.parameters.spec import ParameterSpec
from tests.distributed.harness import Sizes, make_trainer, plain_groups
from tests.distributed.pool import Pool
from tests.distributed.seams import COPY_GROUPS, planted
from tests.distributed.test_mutations_experts import TP, experts

pytestmark = pytest.mark.nightly

TWO_OF_EACH = (2, 1, 2, 1, 2)  # ranks 0 and 2 hold the same experts, and 1 and 3


def changed_experts(trainer: Trainer) -> None:
    with torch.no_grad():
        trainer.parameters["layers.1.mlp.experts.down"][0, 0] += 1e-15


def changed_bias(trainer: Trainer) -> None:
    assert trainer.balance is not None
    trainer.balance.states["layers.0.mlp.router.bias"][3] += 1e-15


def nothing_changed(trainer: Trainer) -> None: ...


def says(sizes: Sizes, change: Any) -> list[str]:
    """Returns this rank's log lines about copies, after a step and a change on the last rank."""
    groups = plain_groups(Layout(*sizes))
    said: list[str] = []
    trainer = make_trainer(experts(), groups)
    trainer.train_step()
    if dist.get_rank() == dist.get_world_size() - 1:
        change(trainer)
    Health(trainer, SimpleNamespace(), said.append).compare_replicas(1)
    groups.close()
    return said


def said_by_any(pool: Pool, sizes: Sizes, change: Any) -> list[str]:
    by_rank = pool.run(Layout(*sizes).world_size, says, sizes, change)
    return [sentence for said in by_rank for sentence in said]


@pytest.mark.parametrize("sizes", [TP, TWO_OF_EACH], ids=["edp-is-tp", "ep2"])
def test_experts_and_biases_that_drift_are_named(sizes: Sizes, pool: Pool) -> None:
    assert said_by_any(pool, sizes, nothing_changed) == []
    found = said_by_any(pool, sizes, changed_experts)
    assert len(found) == 1
    assert re.search(
        r": layers\.1\.mlp\.experts\.down, which is replicated over edp, differs", found[0]
    )
    found = said_by_any(pool, sizes, changed_bias)
    assert found
    for sentence in found:
        assert re.search(r": layers\.0\.mlp\.router\.bias, which is replicated over ", sentence)


@planted(COPY_GROUPS)
def experts_have_copies_like_other_matrices(
    sound: Any, spec: ParameterSpec, groups: ProcessGroups
) -> CopyGroups:
    """Planted: experts are compared over dp and cp instead of edp."""
    return CopyGroups(groups.dp_cp) if spec.is_expert else sound(spec, groups)


def says_nothing(sizes: Sizes) -> list[str]:
    """Returns the log lines of a rank that looks for copies of experts elsewhere."""
    with experts_have_copies_like_other_matrices():
        return says(sizes, changed_experts)


@pytest.mark.more
def test_copies_that_are_looked_for_elsewhere_are_told(pool: Pool) -> None:
    assert pool.run(2, says_nothing, TP) == [[], []]
