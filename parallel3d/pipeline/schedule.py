"""Pipeline schedules as data: what every stage computes and sends, with no process in sight.

A plan is made in two layers. `compute_order` lists the forwards and backwards of each rank, which
is all that tells one schedule from another; `add_communication` lowers any such order to a full
plan by putting the messages between them. Checker, clock, renderer and executor all read the same
plan.

GPipe: Huang et al. 2019 (arXiv:1811.06965). 1F1B: Narayanan et al. 2021, section 2.2
(arXiv:2104.04473; first published as PipeDream-Flush, arXiv:2006.09503).
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from itertools import pairwise
from typing import TypeAlias

from parallel3d.errors import UserError, nearest

SCHEDULES = ("gpipe", "1f1b")


class Kind(StrEnum):
    """What an action does. F and B compute; the others carry a result to the neighbour or from it.

    "_F" messages are activations and flow to the next stage; "_B" messages are gradients of
    activations and flow to the previous one.
    """

    F = "F"
    B = "B"
    SEND_F = "SF"
    RECV_F = "RF"
    SEND_B = "SB"
    RECV_B = "RB"

    @property
    def is_compute(self) -> bool:
        return self in (Kind.F, Kind.B)

    @property
    def is_send(self) -> bool:
        return self in (Kind.SEND_F, Kind.SEND_B)

    @property
    def peer_offset(self) -> int:
        """The peer's stage minus mine: +1 for the next, -1 for the previous, 0 for compute."""
        if self.is_compute:
            return 0
        return 1 if self in (Kind.SEND_F, Kind.RECV_B) else -1


_ACTION = re.compile(r"(F|B|SF|RF|SB|RB)(\d+)(?:\.(\d+))?", re.ASCII)


@dataclass(frozen=True, slots=True)
class Action:
    """One thing that one stage does for one micro-batch.

    `chunk` is the model chunk of an interleaved stage; the schedules here have one chunk, number 0.
    """

    kind: Kind
    microbatch: int
    chunk: int = 0

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


# A group is posted as one batch: all of its sends and receives are in flight together.
CommGroup: TypeAlias = tuple[Action, ...]
# A step is either a compute action (an Action) or a group of messages (a tuple).
Step: TypeAlias = Action | CommGroup
# plan[rank] lists the steps of that pipeline stage in order.
Plan: TypeAlias = list[list[Step]]


def schedule(name: str, stages: int, microbatches: int) -> Plan:
    """The whole plan of schedule `name` ("gpipe" or "1f1b"): plan[rank] lists that stage's steps.

    Raises UserError for an unknown name, ValueError for fewer than one stage or micro-batch.
    """
    return add_communication(compute_order(name, stages, microbatches))


def compute_order(name: str, stages: int, microbatches: int) -> list[list[Action]]:
    """Every rank's forwards and backwards, in order, without messages. Raises as `schedule`."""
    if stages < 1 or microbatches < 1:
        raise ValueError(
            f"a schedule needs a stage and a micro-batch, not {stages=}, {microbatches=}"
        )
    if name == "gpipe":
        return [_gpipe(microbatches) for _ in range(stages)]
    if name == "1f1b":
        return [_one_f_one_b(rank, stages, microbatches) for rank in range(stages)]
    choice = nearest(name, SCHEDULES) or "1f1b"
    raise UserError(
        f"schedule={name} is not known: choose one of {', '.join(SCHEDULES)} (nearest: {choice})."
    )


def _gpipe(microbatches: int) -> list[Action]:
    """All forwards, then all backwards, first micro-batch first.

    Last-in-first-out backwards would free no more memory: every stage holds all micro-batches at
    its peak and frees one per backward in either order. In the forward's order, gradients are
    summed in the same order as under 1F1B and on a single process, so the sums are bit-identical,
    and the last backward is the last micro-batch's everywhere, where gradient reduction starts.
    """
    forwards = [Action(Kind.F, m) for m in range(microbatches)]
    return forwards + [Action(Kind.B, m) for m in range(microbatches)]


def _one_f_one_b(rank: int, stages: int, microbatches: int) -> list[Action]:
    """Warm-up forwards, then one forward and one backward in turn, then the remaining backwards.

    A stage never holds more than stages - rank micro-batches: just as many as it needs to stay
    busy until the first gradient comes back.
    """
    warmup = min(stages - rank - 1, microbatches)
    order = [Action(Kind.F, m) for m in range(warmup)]
    for m in range(microbatches - warmup):
        order += [Action(Kind.F, warmup + m), Action(Kind.B, m)]
    return order + [Action(Kind.B, m) for m in range(microbatches - warmup, microbatches)]


def add_communication(compute: Sequence[Sequence[Action]]) -> Plan:
    """Lower a compute order to a plan: one group of messages between two consecutive actions.

    The group holds the send of what the first action made and the receive that the second needs.
    They must be in flight together: in the steady state of 1F1B a stage sends an activation to the
    very neighbour that sends it a gradient, and if both sent first, both would wait for ever once
    messages outgrow the transport's buffer. The first stage receives no activation and sends no
    gradient; the last one sends no activation and receives no gradient. No group is empty.
    """
    stages = len(compute)
    plan: Plan = []
    for rank, actions in enumerate(compute):
        if any(action.chunk for action in actions):
            raise ValueError(
                f"rank {rank} has several chunks; messages are known for one chunk only"
            )
        steps: list[Step] = []
        for before, after in pairwise([None, *actions, None]):
            group = (*_sends(before, rank, stages), *_receives(after, rank, stages))
            if group:
                steps.append(group)
            if after is not None:
                steps.append(after)
        plan.append(steps)
    return plan


def _sends(done: Action | None, rank: int, stages: int) -> CommGroup:
    """The message that stage `rank` owes its neighbour after `done` (none, or a group of one)."""
    if done is None:
        return ()
    if done.kind == Kind.F:
        return (Action(Kind.SEND_F, done.microbatch),) if rank < stages - 1 else ()
    return (Action(Kind.SEND_B, done.microbatch),) if rank > 0 else ()


def _receives(coming: Action | None, rank: int, stages: int) -> CommGroup:
    """The message that stage `rank` needs before `coming` (none, or a group of one)."""
    if coming is None:
        return ()
    if coming.kind == Kind.F:
        return (Action(Kind.RECV_F, coming.microbatch),) if rank > 0 else ()
    return (Action(Kind.RECV_B, coming.microbatch),) if rank < stages - 1 else ()
