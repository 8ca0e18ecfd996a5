"""Collectives that tell their group's clock when they begin and when they are waited for."""

from __future__ import annotations

import functools
import time
from collections.abc import Callable
from dataclasses import dataclass, fields, replace
from typing import TYPE_CHECKING, Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from parallel3d import accelerator
from parallel3d.exchange import transfer
from parallel3d.metrics.breakdown import OF_GROUP, Clock

if TYPE_CHECKING:
    from parallel3d.pipeline.mailbox import Mailboxes
    from parallel3d.topology.process_groups import Group, ProcessGroups

FLOOR_TRIES = 5  # the fastest of so many transfers is the floor


class _Work(Protocol):
    def wait(self) -> object: ...


def kind_of(group: Group) -> str:
    """The kind under which a group's communication counts."""
    return OF_GROUP.get(group.name, "model")


@dataclass
class Timed:
    """A handle whose wait counts as communication."""

    work: _Work
    clock: Clock
    kind: str

    def wait(self) -> None:
        self.clock.push(self.kind)
        self.work.wait()
        self.clock.pop()


def timed(call: Callable[[Tensor, Group], Any]) -> Callable[[Tensor, Group], Any]:
    """Counts a collective's wait, and on the CPU its start, as its group's communication.

    `call` returns a handle, or a tensor and a handle. A group without a clock, or of one rank, is
    handed through.
    """

    @functools.wraps(call)
    def run(tensor: Tensor, group: Group) -> Any:
        clock = group.clock
        if clock is None or group.size == 1:
            return call(tensor, group)
        kind = kind_of(group)
        starts = clock.times.marks_starts
        if starts:
            clock.push(kind)
        result = call(tensor, group)
        if starts:
            clock.pop()
        if isinstance(result, tuple):
            return result[0], Timed(result[1], clock, kind)
        return Timed(result, clock, kind)

    return run


def with_clock(groups: ProcessGroups, clock: Clock) -> ProcessGroups:
    """The same groups, whose collectives tell `clock` how long they take."""
    of_rank = {f.name: getattr(groups, f.name) for f in fields(groups)}
    kinds = {name: group for name, group in of_rank.items() if hasattr(group, "clock")}
    return replace(groups, **{n: replace(group, clock=clock) for n, group in kinds.items()})


def measure_floors(
    groups: ProcessGroups, message: Tensor, boxes: Mailboxes | None
) -> dict[str, float]:
    """Seconds that a transfer takes when nobody is late, by group (`Clock.floors`); collective.

    A sum of one number for dp, embedding and world. For pp, without shared memory, half the round
    trip of a tensor like `message` with the slower neighbour.
    """
    floors = {}
    for group in (groups.dp, groups.embedding, groups.world):
        if group.size > 1:
            floors[group.name] = min(_one_sum(group, message.device) for _ in range(FLOOR_TRIES))
    if groups.pp.size > 1 and boxes is None:
        floors["pp"] = _message_floor(groups.pp, message)
    return floors


def _one_sum(group: Group, device: torch.device) -> float:
    number = torch.zeros(1, dtype=torch.float64, device=device)
    return _seconds(device, lambda: dist.all_reduce(number, group=group.handle))


def _message_floor(pp: Group, message: Tensor) -> float:
    """Neighbours in pairs, first those whose lower stage is even, then the others."""
    floors = []
    for parity in (0, 1):
        lower = pp.index % 2 == parity
        peer = pp.index + 1 if lower else pp.index - 1
        if 0 <= peer < pp.size:
            there_and_back = functools.partial(_ping, pp, pp.ranks[peer], message, lower)
            times = [_seconds(message.device, there_and_back) for _ in range(FLOOR_TRIES)]
            floors.append(min(times) / 2)
    return max(floors)


def _ping(pp: Group, peer: int, message: Tensor, first: bool) -> None:
    """There and back, each way as the executor sends: on an accelerator as a batch."""
    calls = (dist.isend, dist.irecv) if first else (dist.irecv, dist.isend)
    for call in calls:
        if accelerator.is_on_accelerator(message):
            transfer(call, message, peer, pp.handle)
        else:
            call(message, peer, group=pp.handle).wait()


def _seconds(device: torch.device, action: Callable[[], object]) -> float:
    accelerator.synchronize(device)
    start = time.perf_counter()
    action()
    accelerator.synchronize(device)
    return time.perf_counter() - start
