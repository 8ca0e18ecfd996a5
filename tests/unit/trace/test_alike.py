"""Tests which blocks of a user's own model count as alike."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from parallel3d.comm.group import SINGLE
from parallel3d.models.own_model import Parallel
from parallel3d.trace.alike import facts_of


class Block(nn.Module):
    def __init__(self, number: int, **held: Any) -> None:
        super().__init__()
        self.number = number
        self.linear = nn.Linear(2, 2)
        self.parallel = Parallel(SINGLE, False, 0, "a part")
        vars(self).update(held)

    def forward(self, x: Tensor) -> Tensor:
        return x


class Reading(Block):
    def forward(self, x: Tensor) -> Tensor:
        return (lambda y: y * self.number)(x)


class OfProperty(Block):
    @property
    def window(self) -> int:
        return self.number % 2


class OfChild(nn.Module):
    def __init__(self, number: int) -> None:
        super().__init__()
        self.child = Block(number)

    def forward(self, x: Tensor) -> Tensor:
        return x * self.child.number


def closing(number: int, held: Any) -> nn.Module:
    class Closing(nn.Module):
        def forward(self, x: Tensor) -> Any:
            return held, x

    return Closing()


def alike(*blocks: nn.Module) -> bool:
    found = {repr(facts_of(block, number)) for number, block in enumerate(blocks)}
    return len(found) == 1


@pytest.mark.parametrize(
    "held", [3, True, (1, 2), [1], {"a": 1.5}, torch.tanh, partial(torch.sum, dim=1), lambda x: x]
)
def test_blocks_that_hold_the_same_are_alike(held: Any) -> None:
    assert alike(Block(0, held=held), Block(1, held=held), Block(2, held=held))
    assert alike(closing(0, held), closing(1, held))


@pytest.mark.parametrize(
    ("one", "other"),
    [
        (3, 4),
        (False, True),
        ([1], [2]),
        ({"a": 1.5}, {"a": 2.5}),
        (torch.tanh, torch.sin),
        (partial(torch.sum, dim=1), partial(torch.sum, dim=2)),
        (lambda x: x, lambda x: -x),
        (torch.ones(2), torch.ones(3)),
    ],
)
def test_blocks_that_hold_something_else_are_not(one: Any, other: Any) -> None:
    assert not alike(Block(0, held=one), Block(1, held=other))
    assert not alike(closing(0, one), closing(1, other))


def test_what_a_module_keeps_out_of_sight_tells_blocks_apart() -> None:
    assert alike(Block(0, _window=5), Block(1, _window=5))
    assert not alike(Block(0, _window=5), Block(1, _window=6))
    buffered, hooked = ([Block(number) for number in range(3)] for _ in range(2))
    for size, block in zip((2, 2, 3), buffered, strict=True):
        block.register_buffer("mask", torch.zeros(size))
    for times, block in zip((2, 2, 3), hooked, strict=True):
        block.linear.register_forward_hook(lambda _, __, y, times=times: y * times)
    for blocks in (buffered, hooked):
        assert alike(*blocks[:2]) and not alike(*blocks)


def test_functions_made_alike_count_as_equal() -> None:
    assert alike(*(Block(number, held=lambda x: x + 1) for number in range(3)))
    assert not alike(*(Block(number, held=lambda x, n=number: x + n) for number in range(3)))


def test_a_number_that_a_method_reads_tells_blocks_apart() -> None:
    assert alike(Block(0), Block(1))
    assert not alike(Reading(0), Reading(1))
    assert not alike(OfProperty(0), OfProperty(1))
    assert not alike(OfChild(0), OfChild(1))
    assert not alike(closing(0, 0), closing(1, 1))


def test_a_size_that_happens_to_be_the_layers_number_is_not_left_out() -> None:
    class Sized(Block):
        def forward(self, x: Tensor) -> Tensor:
            return x[: self.size]

    assert not alike(Sized(0, size=0), Sized(1, size=1))
