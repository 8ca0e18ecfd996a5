"""Planted bugs of `optim.freeze` and `optim.groups` are caught; both are on in test_matrix."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import replace
from typing import Any
from unittest.mock import patch

import pytest
import torch

from parallel3d import optim
from parallel3d.optim import Optimizer
from parallel3d.parameters.sharding import Segment, ShardSpec
from tests.distributed.cases import Case, Problem
from tests.distributed.harness import References, check_caught
from tests.distributed.pool import Pool

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


@contextmanager
def frozen_matrices_decay() -> Iterator[None]:
    sound = Optimizer.step

    def step(self: Optimizer, rate: float, *rest: Any) -> None:
        sound(self, rate, *rest)
        for group in self.groups:
            if group.treated.frozen:
                torch._foreach_mul_(group.masters, 1 - rate * group.weight_decay)

    with patch.object(Optimizer, "step", step):
        yield


@contextmanager
def the_norm_counts_what_is_frozen() -> Iterator[None]:
    sound = Optimizer.__init__

    def init(self: Optimizer, *args: Any, **kwargs: Any) -> None:
        sound(self, *args, **kwargs)
        self.segments = [s for group in self.groups for s in group.segments]

    with patch.object(Optimizer, "__init__", init):
        yield


@contextmanager
def a_matrix_is_treated_as_the_one_before_it() -> Iterator[None]:
    """Of fused matrices: k as q, which learns slowly, and v as k, which is frozen."""
    sound = Segment.split

    def split(self: Segment, kind_of: Callable[[ShardSpec], Any]) -> Any:
        def kind_of_another(shard: ShardSpec) -> Any:
            name = shard.name.replace(".k.", ".q.").replace(".v.", ".k.")
            return kind_of(replace(shard, name=name))

        return sound(self, kind_of_another)

    with patch.object(Segment, "split", split):
        yield


@contextmanager
def a_factor_of_another_group() -> Iterator[None]:
    sound = optim.treatment

    def treatment(settings: Any, name: str) -> Any:
        found = sound(settings, name)
        return found if found.frozen else found._replace(lr_mult=1.5 - found.lr_mult)

    with patch.object(optim, "treatment", treatment):
        yield


@pytest.mark.parametrize(
    "mutation",
    [
        frozen_matrices_decay,
        the_norm_counts_what_is_frozen,
        a_matrix_is_treated_as_the_one_before_it,
        a_factor_of_another_group,
    ],
)
def test_a_planted_bug_is_caught(
    mutation: Callable[[], AbstractContextManager[None]], pool: Pool, references: References
) -> None:
    told_by = {"loss", "grad norm", "weights"}
    check_caught(mutation, (1, 1, 1), Case(TREATED), told_by, pool, references)
