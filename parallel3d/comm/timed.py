"""Collectives that tell their group's clock when they begin and when they are waited for."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

from torch import Tensor

from parallel3d.comm.clock import OF_GROUP, StepTimer
from parallel3d.comm.operation_log import operation_name

if TYPE_CHECKING:
    from parallel3d.comm.group import Group


class _Work(Protocol):
    def wait(self) -> object: ...


def kind_of(group: Group) -> str:
    """The kind under which a group's communication counts."""
    return OF_GROUP.get(group.name, "model")


@dataclass
class Timed:
    """A handle whose wait counts as communication."""

    work: _Work
    clock: StepTimer
    kind: str
    name: str | None = None  # in a profile

    def wait(self) -> None:
        self.clock.push(self.kind, self.name)
        self.work.wait()
        self.clock.pop()


def timed(call: Callable[[Tensor, Group], Any]) -> Callable[[Tensor, Group], Any]:
    """Counts a collective's wait, and on the CPU its start, as its group's communication.

    `call` returns a handle, or a tensor and a handle. A group without a clock, or of one rank, is
    handed through.
    """
    operation = operation_name(call)

    @functools.wraps(call)
    def run(tensor: Tensor, group: Group) -> Any:
        clock = group.clock
        if clock is None or group.size == 1:
            return call(tensor, group)
        kind = kind_of(group)
        name = wait = None
        if clock.ranges is not None:
            name = f"{operation} {group.name}"
            wait = f"wait {name}"
        starts = clock.times.marks_starts
        if starts:
            clock.push(kind, name)
        elif name is not None:
            clock.ranges.push(name)
        result = call(tensor, group)
        if starts:
            clock.pop()
        elif name is not None:
            clock.ranges.pop()
        if isinstance(result, tuple):
            return result[0], Timed(result[1], clock, kind, wait)
        return Timed(result, clock, kind, wait)

    return run
