"""Actions of a pipeline rank, and the lists of actions that form schedules and programs."""

from __future__ import annotations

import functools
import re
from dataclasses import dataclass, field
from enum import StrEnum
from typing import TypeAlias, final


class Kind(StrEnum):
    """Kinds of actions: F, B, I and W compute; the other kinds send or receive a result.

    F is a forward and B a whole backward. I is the half of a backward that computes the gradient of
    the input, for which the previous stage waits. W is the other half, which computes the gradients
    of the weights; they are needed only at the end of the step (Qi et al. 2023, arXiv:2401.10241).
    In each chunk a micro-batch has either a B, or an I and, at any later time, a W.

    Messages of a kind "…_F" carry activations to the next stage. Messages of a kind "…_B" carry
    gradients of activations, which B or I computes, to the previous stage.
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

    Attributes:
        microbatch: number of the micro-batch, from 0.
        chunk: number of this rank's model chunk, from 0 in the order of the forward. Each end of a
            message names its own chunk: SF5 on rank 3 may be RF5.1 on rank 0.
        row: a number that encodes kind and chunk. It is an index into tables of actions, which are
            lists, because a dictionary would have to hash each action.

    Raises ValueError for a number below 0.
    """

    kind: Kind
    microbatch: int
    chunk: int = 0
    row: int = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        if self.microbatch < 0 or self.chunk < 0:
            raise ValueError(
                f"micro-batches and chunks are numbered from 0, but {self} has a negative number"
            )
        object.__setattr__(self, "row", row_of(self.kind, self.chunk))

    def __str__(self) -> str:
        """Returns the compact form, such as "F0", or "F3.1" for a chunk after the first."""
        return f"{self.kind}{self.microbatch}" + (f".{self.chunk}" if self.chunk else "")

    @classmethod
    def parse(cls, text: str) -> Action:
        """Parses a compact form such as "F3.1"; raises ValueError for any other text."""
        match = _ACTION.fullmatch(text)
        if match is None:
            raise ValueError(
                f"{text!r} is not a pipeline action: actions look like F0, B3, SF0, RB1 or F3.1"
            )
        kind, microbatch, chunk = match.groups()
        return cls(Kind(kind), int(microbatch), int(chunk or 0))


def row_of(kind: Kind, chunk: int) -> int:
    """Returns the `Action.row` that belongs to this kind and chunk."""
    return chunk * len(Kind) + _NUMBER[kind]


@functools.lru_cache(maxsize=1 << 18)
def action(kind: Kind, microbatch: int, chunk: int = 0) -> Action:
    """Returns an action; equal actions share one object, so large programs need few objects."""
    return Action(kind, microbatch, chunk)


@functools.lru_cache(maxsize=1 << 12)
def actions_of(kind: Kind, chunk: int, count: int) -> tuple[Action, ...]:
    """Returns a chunk's actions of one kind for the micro-batches 0 to `count` - 1."""
    return tuple(action(kind, m, chunk) for m in range(count))


@functools.lru_cache(maxsize=1 << 12)
def groups_of_one(kind: Kind, chunk: int, count: int) -> tuple[tuple[Action, ...], ...]:
    """Returns the messages that `actions_of` returns, each in a separate group."""
    return tuple((message,) for message in actions_of(kind, chunk, count))


# orders[rank] holds the compute actions of that rank, in order.
ComputeSchedule: TypeAlias = list[list[Action]]
# Messages are posted in groups; all sends and receives of a group are in flight together.
CommGroup: TypeAlias = tuple[Action, ...]
Step: TypeAlias = Action | CommGroup
# program[rank] holds the steps of that pipeline rank, in order.
PipelineProgram: TypeAlias = list[list[Step]]
