"""Tests a pipeline of plain modules without other ranks: how it is cut, and its mean."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import parallel3d as p3d
from parallel3d.comm.group import SINGLE
from parallel3d.errors import UserError
from parallel3d.library.module_pipeline import stages_of
from parallel3d.schedules.orders import StageAssignment


def modules_of_ranks(count: int, placement: StageAssignment) -> list[int]:
    """Returns the number of modules that each rank gets of `count`."""
    stages = stages_of([nn.Identity() for _ in range(count)], placement, None)
    assert [i for members in stages for i in members] == list(range(count))
    assert min(map(len, stages)) >= 1
    held = [0] * placement.ranks
    for (rank, _), members in zip(placement.places, stages, strict=True):
        held[rank] += len(members)
    return held


def test_six_modules_are_split_evenly_over_two_ranks() -> None:
    """In a V one rank holds the first stage and the last, the other one both middle ones."""
    assert modules_of_ranks(6, StageAssignment(2, 2, "v")) == [3, 3]
    # The split is not 2, 4 and 4, although its fullest rank is no fuller.
    assert sorted(modules_of_ranks(10, StageAssignment(3, 2, "v"))) == [3, 3, 4]


@pytest.mark.parametrize("shape", ["loop", "v"])
@pytest.mark.parametrize("chunks", [1, 2, 3])
@pytest.mark.parametrize("ranks", [1, 2, 3, 5])
def test_ranks_differ_by_one_module_at_most(ranks: int, chunks: int, shape: str) -> None:
    placement = StageAssignment(ranks, chunks, shape)
    for count in range(placement.stages, placement.stages + 4 * ranks):
        held = modules_of_ranks(count, placement)
        assert max(held) - min(held) <= 1, (count, held)


def test_additional_modules_go_to_the_middle_stages() -> None:
    stages = stages_of([nn.Identity() for _ in range(6)], StageAssignment(4), None)
    assert list(map(len, stages)) == [1, 2, 2, 1]


def test_the_nearest_split_is_even_over_ranks() -> None:
    with pytest.raises(UserError, match=r"the nearest is split=\[2, 2, 1, 1\]"):
        stages_of([nn.Identity() for _ in range(6)], StageAssignment(2, 2, "v"), [1, 2, 2, 2])


def test_class_weights_are_those_of_the_step() -> None:
    """A loss module's weights may change, or move to another device, after the pipeline is made."""
    torch.manual_seed(3)
    loss_fn = nn.CrossEntropyLoss(weight=torch.ones(3))
    net = nn.Linear(4, 3)
    pipe = p3d.Pipeline([net], SINGLE, loss_fn=loss_fn, num_microbatches=2)
    loss_fn.weight = torch.tensor([1.0, 5.0, 25.0])
    x, y = torch.randn(6, 4), torch.tensor([0, 0, -100, 1, 2, 2])
    assert float(pipe.step(x, y)) == pytest.approx(float(loss_fn(net(x), y)), rel=1e-6)
