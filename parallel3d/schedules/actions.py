"""Actions of a pipeline rank, and the lists of actions that make a schedule and a program."""

from __future__ import annotations

import functools
import re
from dataclasses import dataclass, field
from enum import StrEnum
from typing import TypeAlias, final


class Kind(StrEnum):
    """Kinds of action: F, B, I and W compute, the others carry a result from rank to rank.

    B is a whole backward. I is its half that computes the gradient of the input, for which the
    previous stage waits; W is the other half, the gradients of the weights, needed only at the end
    of the step (Qi et al. 2023, arXiv:2401.10241). In each chunk a micro-batch has either one B, or
    an I and, at any later time, a W.

    "_F" messages are activations for the next stage; "_B" messages are gradients of activations,
    computed by B or I, for the previous stage.
    """

    F = "F"
    B = "B"
    I = "I"  # noqa: E741 (the field's name)
    W = "W"
    SEND_F = "SF"
    RECV_F = "RF"
    SEND_B = "SB"
    RECV_B = "RB"

    __hash__ = str.__hash__  # Enum's own __hash__ is a Python call for each look-up

    @property
    def is_compute(self) -> bool:
        return self in COMPUTE

    @property
    def is_send(self) -> bool:
        return self in (Kind.SEND_F, Kind.SEND_B)


COMPUTE = frozenset((Kind.F, Kind.B, Kind.I, Kind.W))
_NUMBER = {kind: number for number, kind in enumerate(Kind)}
_ACTION = re.compile(r"(F|B|I|W|SF|RF|SB|RB)(\d+)(?:\.(\d+))?", re.ASCII)


@final
@dataclass(frozen=True, slots=True)
class Action:
    """One action of one rank for one micro-batch.

    `chunk` is the model chunk of this rank, from 0 in the order of the forward. Each end of a
    message names its own chunk: SF5 of rank 3's chunk 0 may be RF5.1 on rank 0.
    `row` numbers kind and chunk together, so that tables are lists and need no hash.

    Raises ValueError for a number below 0.
    """

    kind: Kind
    microbatch: int
    chunk: int = 0
    row: int = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        if self.microbatch < 0 or self.chunk < 0:
            raise ValueError(f"micro-batches and chunks count from 0, but {self} has less")
        object.__setattr__(self, "row", row_of(self.kind, self.chunk))

    def __str__(self) -> str:
        """Returns the compact form: "F0", "SB12"; or "F3.1" for a chunk other than the first."""
        return f"{self.kind}{self.microbatch}" + (f".{self.chunk}" if self.chunk else "")

    @classmethod
    def parse(cls, text: str) -> Action:
        """Parses the compact form. Raises ValueError for anything else."""
        match = _ACTION.fullmatch(text)
        if match is None:
            raise ValueError(
                f"{text!r} is not a pipeline action: actions look like F0, B3, SF0, RB1 or F3.1"
            )
        kind, microbatch, chunk = match.groups()
        return cls(Kind(kind), int(microbatch), int(chunk or 0))


def row_of(kind: Kind, chunk: int) -> int:
    """Returns `Action.row` of this kind and chunk."""
    return chunk * len(Kind) + _NUMBER[kind]


@functools.lru_cache(maxsize=1 << 18)
def action(kind: Kind, microbatch: int, chunk: int = 0) -> Action:
    """Returns one shared object per action, so that large programs hold few objects."""
    return Action(kind, microbatch, chunk)


@functools.lru_cache(maxsize=1 << 12)
def actions_of(kind: Kind, chunk: int, count: int) -> tuple[Action, ...]:
    """Returns one kind of action of one chunk for the micro-batches 0 to `count` - 1."""
    return tuple(action(kind, m, chunk) for m in range(count))


@functools.lru_cache(maxsize=1 << 12)
def groups_of_one(kind: Kind, chunk: int, count: int) -> tuple[tuple[Action, ...], ...]:
    """Returns the messages of `actions_of`, each a group of its own."""
    return tuple((message,) for message in actions_of(kind, chunk, count))


# orders[rank]: the compute actions of that rank, in order.
ComputeSchedule: TypeAlias = list[list[Action]]
# A group is posted as one batch: all of its sends and receives are in flight together.
CommGroup: TypeAlias = tuple[Action, ...]
Step: TypeAlias = Action | CommGroup
# program[rank]: the steps of that pipeline rank, in order.
PipelineProgram: TypeAlias = list[list[Step]]
