"""Schedules by name: the orders, where the stages lie, and the plan that an executor runs."""

from __future__ import annotations

from dataclasses import dataclass

from parallel3d.errors import UserError, nearest
from parallel3d.schedules import orders
from parallel3d.schedules.actions import ComputeSchedule, Kind, PipelineProgram
from parallel3d.schedules.blocks import v_half
from parallel3d.schedules.messages import add_communication
from parallel3d.schedules.placement import StageAssignment

ONE_CHUNK = ("gpipe", "1f1b", "zb_h1")
LOOPED = ("interleaved", "interleaved_zb")
V_SHAPED = ("zbv", "v_half")
NAMED_SCHEDULES = ("gpipe", "1f1b", "interleaved", "zb_h1", "interleaved_zb", "zbv", "v_half")
# They need messages in the order in which these are made: a receive stands before its reader.
IN_ORDER = ("gpipe", "1f1b")


@dataclass(frozen=True)
class Schedule:
    """What each rank computes, in order, and which stages it holds."""

    name: str
    placement: StageAssignment
    microbatches: int
    orders: ComputeSchedule

    @property
    def splits_backward(self) -> bool:
        """Whether some backward is made as I and W."""
        return any(step.kind == Kind.I for order in self.orders for step in order)

    def plan(self) -> PipelineProgram:
        """The orders with their messages. Raises ScheduleError where ranks wait for each other."""
        return self._with_messages(self.orders)

    def forwards(self) -> PipelineProgram:
        """The plan of an evaluation: the forwards alone, in the same order."""
        return self._with_messages([[s for s in o if s.kind == Kind.F] for o in self.orders])

    def _with_messages(self, orders: ComputeSchedule) -> PipelineProgram:
        return add_communication(orders, None if self.name in IN_ORDER else self.placement)


def make(name: str, ranks: int, microbatches: int, chunks: int = 1) -> Schedule:
    """The schedule `name`, one of FORMS, on `ranks` ranks of `chunks` chunks.

    Raises:
        UserError: an unknown name, or a number of chunks that the schedule does not have.
        ValueError: fewer than one rank, chunk or micro-batch.
    """
    if ranks < 1 or microbatches < 1 or chunks < 1:
        raise ValueError(
            f"a schedule needs a rank, a chunk and a micro-batch, not {ranks=}, {chunks=}, "
            f"{microbatches=}"
        )
    if name not in NAMED_SCHEDULES:
        choice = nearest(name, NAMED_SCHEDULES) or "1f1b"
        raise UserError(
            f"schedule={name} is not known: choose one of {', '.join(NAMED_SCHEDULES)} (nearest: {choice})."
        )
    check_vpp(name, chunks)
    placement = StageAssignment(ranks, chunks, "v" if name in V_SHAPED else "loop")
    made: ComputeSchedule
    if name == "gpipe":
        made = orders.gpipe(ranks, microbatches)
    elif name == "1f1b":
        made = orders.one_f_one_b(ranks, microbatches)
    elif name == "interleaved":
        made = orders.interleaved(ranks, chunks, microbatches)
    elif name == "zbv":
        made = orders.zero_bubble_v(ranks, microbatches)
    elif name == "v_half":
        made = v_half(ranks, microbatches)
    else:  # zb_h1 is the interleaved form of one chunk
        made = orders.interleaved_zero_bubble(ranks, chunks, microbatches)
    return Schedule(name, placement, microbatches, made)


def check_vpp(name: str, chunks: int) -> None:
    """Refuse a number of chunks that the schedule `name` does not have; raises UserError."""
    if name in V_SHAPED and chunks != 2:
        raise UserError(
            f"schedule={name} lays two chunks of each rank out as a V, so vpp={chunks} must be 2; "
            "the nearest is vpp=2."
        )
    if name in ONE_CHUNK and chunks != 1:
        other = "interleaved_zb" if name == "zb_h1" else "interleaved"
        raise UserError(
            f"schedule={name} has one chunk per rank, so vpp={chunks} does not fit it; the nearest "
            f"is vpp=1, or schedule={other}."
        )
