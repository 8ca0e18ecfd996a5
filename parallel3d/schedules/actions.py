"""What a pipeline rank does, one action at a time, and lists of that: the words of every plan."""

from __future__ import annotations

import functools
import re
from dataclasses import dataclass, field
from enum import StrEnum
from typing import TypeAlias


class Kind(StrEnum):
    """What an action does. F, B, I and W compute; the others carry a result from rank to rank.

    B is a whole backward. I is its half that makes the gradient of the input, which the stage
    before waits for; W is the other half, the gradients of the weights, which nobody waits for
    before the end of the step (Qi et al. 2023, arXiv:2401.10241). A micro-batch passes a chunk
    backward either as B or as I and, at any time after it, W.

    "_F" messages are activations and flow to the next stage; "_B" messages are gradients of
    activations, made by B or I, and flow to the previous one.
    """

    F = "F"
    B = "B"
    I = "I"  # noqa: E741 (the field's name)
    W = "W"
    SEND_F = "SF"
    RECV_F = "RF"
    SEND_B = "SB"
    RECV_B = "RB"

    __hash__ = str.__hash__  # Enum's own is a call of Python for each look-up

    @property
    def is_compute(self) -> bool:
        return self in COMPUTE

    @property
    def is_send(self) -> bool:
        return self in (Kind.SEND_F, Kind.SEND_B)


COMPUTE = frozenset((Kind.F, Kind.B, Kind.I, Kind.W))
_NUMBER = {kind: number for number, kind in enumerate(Kind)}
_ACTION = re.compile(r"(F|B|I|W|SF|RF|SB|RB)(\d+)(?:\.(\d+))?", re.ASCII)


@dataclass(frozen=True, slots=True)
class Action:
    """One thing that one rank does for one micro-batch.

    `chunk` is the model chunk of this rank, from 0 in the order of the forward. A message bears the
    chunk of the rank whose action it is: what rank 3 sends from its chunk 0 as SF5, rank 0 may
    receive for its chunk 1 as RF5.1.

    `row` is a number for kind and chunk together: tables by it need no hash of words.

    Raises ValueError for a number below 0.
    """

    kind: Kind
    microbatch: int
    chunk: int = 0
    row: int = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        if self.microbatch < 0 or self.chunk < 0:
            raise ValueError(f"micro-batches and chunks count from 0, unlike those of {self}")
        object.__setattr__(self, "row", row_of(self.kind, self.chunk))

    def __str__(self) -> str:
        """Compact form: "F0", "SB12"; chunks other than the first are written "F3.1"."""
        return f"{self.kind}{self.microbatch}" + (f".{self.chunk}" if self.chunk else "")

    @classmethod
    def parse(cls, text: str) -> Action:
        """The action whose compact form is `text`. Raises ValueError for anything else."""
        match = _ACTION.fullmatch(text)
        if match is None:
            raise ValueError(
                f"{text!r} is no pipeline action; they look like F0, B3, SF0, RB1 or F3.1"
            )
        kind, microbatch, chunk = match.groups()
        return cls(Kind(kind), int(microbatch), int(chunk or 0))


def row_of(kind: Kind, chunk: int) -> int:
    """`Action.row` of this kind and chunk."""
    return chunk * len(Kind) + _NUMBER[kind]


@functools.lru_cache(maxsize=1 << 18)
def action(kind: Kind, microbatch: int, chunk: int = 0) -> Action:
    """The same action for the same words: plans of thousands are made of few objects."""
    return Action(kind, microbatch, chunk)


@functools.lru_cache(maxsize=1 << 12)
def actions_of(kind: Kind, chunk: int, count: int) -> tuple[Action, ...]:
    """One kind of action of one chunk, for the micro-batches 0 to `count` - 1."""
    return tuple(action(kind, m, chunk) for m in range(count))


@functools.lru_cache(maxsize=1 << 12)
def groups_of_one(kind: Kind, chunk: int, count: int) -> tuple[tuple[Action, ...], ...]:
    """The messages of `line`, each a group of its own."""
    return tuple((message,) for message in actions_of(kind, chunk, count))


# orders[rank] lists what that rank computes, in order: all that tells one schedule from another.
ComputeSchedule: TypeAlias = list[list[Action]]
# A group is posted as one batch: all of its sends and receives are in flight together.
CommGroup: TypeAlias = tuple[Action, ...]
# A step is either a compute action (an Action) or a group of messages (a tuple).
Step: TypeAlias = Action | CommGroup
# plan[rank] lists the steps of that pipeline rank in order.
PipelineProgram: TypeAlias = list[list[Step]]
