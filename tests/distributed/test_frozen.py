"""Tests that planted bugs of `optim.freeze` and `optim.groups` are caught; test_matrix uses
both."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from parallel3d.config.schema import OptimConfig, Treatment
from parallel3d.optim.optimizer import Optimizer
from parallel3d.parameters.segments import Segment
from parallel3d.parameters.spec import ShardSpec
from parallel3d.trainer import Trainer
from tests.distributed.cases import Case, Problem
from tests.distributed.harness import References, check_caught
from tests.distributed.pool import Pool
from tests.distributed.seams import (
    SEGMENT_BY_KIND,
    SHARE_OF_NORM,
    TREATMENT,
    UPDATE,
    Mutation,
    planted,
)

pytestmark = pytest.mark.more

TREATED = Problem(
    "llama_tiny",
    "adamw",
    True,
    layers=2,
    steps=2,
    batch=12,
    optim=(
        ("clip_grad", 0.3),
        ("freeze", ("layers.*.attention.k.weight", "layers.0.mlp.down.weight")),
        ("groups", (("*.attention.q.*", (("lr_mult", 0.5),)),)),
    ),
)


@planted(UPDATE)
def frozen_matrices_decay(sound: Any, optimizer: Optimizer, rate: float, *rest: Any) -> None:
    """Weight decay applies to frozen parameters, too."""
    sound(optimizer, rate, *rest)
    for group in optimizer.groups:
        if group.treated.frozen:
            torch._foreach_mul_(group.masters, 1 - rate * group.weight_decay)


@planted(SHARE_OF_NORM)
def the_norm_counts_what_is_frozen(sound: Any, trainer: Trainer, *how: Any) -> Tensor:
    """Gradients of frozen parameters enter the norm, by which the others are clipped."""
    optimizer = trainer.optimizer
    every = [segment for group in optimizer.groups for segment in group.segments]
    kept, optimizer.segments = optimizer.segments, every
    share = sound(trainer, *how)
    optimizer.segments = kept
    return share


@planted(SEGMENT_BY_KIND)
def a_matrix_is_treated_as_the_one_before_it(
    sound: Any, segment: Segment, kind_of: Callable[[ShardSpec], Any]
) -> Any:
    """In fused matrices, k is treated like q, which learns slowly, and v like k, which is
    frozen."""

    def kind_of_another(shard: ShardSpec) -> Any:
        name = shard.name.replace(".k.", ".q.").replace(".v.", ".k.")
        return kind_of(replace(shard, name=name))

    return sound(segment, kind_of_another)


@planted(TREATMENT)
def a_factor_of_another_group(sound: Any, settings: OptimConfig, name: str) -> Treatment:
    """Matrices with a learning rate of their own get the usual one, and the reverse."""
    found = sound(settings, name)
    return found if found.frozen else found._replace(lr_mult=1.5 - found.lr_mult)


@pytest.mark.parametrize(
    "mutation",
    [
        frozen_matrices_decay,
        the_norm_counts_what_is_frozen,
        a_matrix_is_treated_as_the_one_before_it,
        a_factor_of_another_group,
    ],
)
def test_a_planted_bug_is_caught(mutation: Mutation, pool: Pool, references: References) -> None:
    told_by = {"loss", "grad norm", "weights"}
    check_caught(mutation, (1, 1, 1), Case(TREATED), told_by, pool, references)
