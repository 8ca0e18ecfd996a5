"""Records what happened in the steps of a wrapper, for its logging data."""

from __future__ import annotations

import functools
import time
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Concatenate, ParamSpec, Protocol, TypeVar

if TYPE_CHECKING:
    from parallel3d.parts.ddp.buckets import DDPBucket

P = ParamSpec("P")
R = TypeVar("R")


class DDPStepRecord:
    """What has happened in the steps of a wrapper.

    Attributes:
        forwards: forwards with gradients, outside of `no_sync`.
        error: what was raised last, with its type.
        comm_hook: name of the communication hook.
        joins: it was in `join`, where ranks may run out of inputs.
        forward_at, backward_at, computed_at, comm_at, comm_ended_at: when, in the last step, the
            forward and the backward began, the backward's own work ended, the first bucket left,
            and the last mean was there; nanoseconds of `time.perf_counter_ns`.
        sums: of the durations over `backwards` backwards.
    """

    def __init__(self) -> None:
        self.forwards = self.backwards = 0
        self.error = self.comm_hook = ""
        self.joins = False
        self.forward_at = self.backward_at = self.computed_at = 0
        self.comm_at = self.comm_ended_at = 0
        self.sums: dict[str, int] = {}

    def forward(self) -> None:
        """A forward begins whose backward will be reduced."""
        self.forwards += 1
        self.forward_at = time.perf_counter_ns()

    def backward(self) -> None:
        """A backward begins."""
        self.backward_at = time.perf_counter_ns()

    def computed(self) -> None:
        """The backward's own work has ended."""
        self.computed_at = time.perf_counter_ns()

    def comm(self) -> None:
        """The first bucket leaves."""
        self.comm_at = time.perf_counter_ns()

    def comm_ended(self) -> None:
        """The parameters have the means."""
        self.comm_ended_at = time.perf_counter_ns()
        self.backwards += 1
        for name, duration in self.durations().items():
            self.sums[name] = self.sums.get(name, 0) + duration

    def durations(self) -> dict[str, int]:
        """Of the last step that was reduced."""
        return {
            "forward_compute_time": self.backward_at - self.forward_at,
            "backward_compute_time": self.computed_at - self.backward_at,
            "backward_comm_time": self.comm_ended_at - self.comm_at,
            "backward_compute_comm_overlap_time": max(0, self.computed_at - self.comm_at),
        }

    def times(self) -> dict[str, int | str]:
        """Nanoseconds: how long, on the mean how long, and since 1970 when."""
        if not self.backwards:
            return {}
        since_1970 = time.time_ns() - time.perf_counter_ns()
        return {
            **self.durations(),
            **{f"avg_{name}": total // self.backwards for name, total in self.sums.items()},
            "forward_compute_time_start": since_1970 + self.forward_at,
            "backward_compute_time_start": since_1970 + self.backward_at,
            "backward_compute_time_end": since_1970 + self.computed_at,
            "backward_comm_time_start": since_1970 + self.comm_at,
            "backward_comm_time_end": since_1970 + self.comm_ended_at,
        }


class _Recording(Protocol):
    step_record: DDPStepRecord


S = TypeVar("S", bound=_Recording)


def recorded(method: Callable[Concatenate[S, P], R]) -> Callable[Concatenate[S, P], R]:
    """Notes in `self.step_record` what the method raises."""

    @functools.wraps(method)
    def noting(self: S, *args: P.args, **kwargs: P.kwargs) -> R:
        try:
            return method(self, *args, **kwargs)
        except Exception as error:
            self.step_record.error = f"{type(error).__name__}: {error}"
            raise

    return noting


def sizes_of(buckets: Iterable[DDPBucket]) -> list[int]:
    """Bytes of the gradients in each."""
    return [bucket.flat.nbytes for bucket in buckets]
