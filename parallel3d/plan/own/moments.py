"""What a rank of a pipeline holds when: the schedule's orders, walked once, as counts.

A moment is an action with what is there when it begins. Bytes are a product with it, so that one
walk serves every model, micro-batch and recomputation of a search.
"""

from __future__ import annotations

import functools
from collections import deque
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from parallel3d.schedules.actions import Kind
from parallel3d.schedules.placement import StageAssignment
from parallel3d.schedules.schedule import LOOPED, Schedule, make

SENDS = 8  # under way at a time: pipeline/executor.py
_KINDS = (Kind.F, Kind.B, Kind.I, Kind.W)


@dataclass(frozen=True)
class Moments:
    """Of one rank; a row is a moment, different from all others.

    Attributes:
        kind: index into F, B, I, W. chunk: of the action.
        live: by chunk, micro-batches between their forward and their (first half of the) backward.
        put_off: by chunk, those between I and W. sent: messages that nothing else holds.
        begun: whether a backward of this step is done.
    """

    kind: NDArray[np.int64]
    chunk: NDArray[np.int64]
    live: NDArray[np.float64]
    put_off: NDArray[np.float64]
    sent: NDArray[np.float64]
    begun: NDArray[np.bool_]


def few(name: str, pp: int, microbatches: int) -> int:
    """As many micro-batches as hold as much as all of them: more only repeat the steady state."""
    if name == "gpipe" or microbatches <= 4 * pp:
        return microbatches
    if name in LOOPED and microbatches % pp:
        return 3 * pp + microbatches % pp
    return 3 * pp + microbatches % pp


@functools.lru_cache(maxsize=64)
def _schedule(name: str, pp: int, vpp: int, microbatches: int) -> Schedule:
    return make(name, pp, microbatches, vpp)


@functools.lru_cache(maxsize=4096)
def moments(name: str, pp: int, vpp: int, microbatches: int, rank: int) -> Moments:
    """Of `rank` under the schedule `name`, one of schedules.FORMS, with `vpp` chunks."""
    schedule = _schedule(name, pp, vpp, few(name, pp, microbatches))
    placement = schedule.placement
    live, put_off = [0] * vpp, [0] * vpp
    under_way: deque[tuple[int, int]] = deque(maxlen=SENDS)  # (chunk, micro-batch), -1: a gradient
    done: set[tuple[int, int]] = set()  # forwards whose backward is done: their result is free
    seen: set[tuple[int, ...]] = set()
    sends = [_sends(placement, rank, chunk) for chunk in range(vpp)]
    begun = 0
    for step in schedule.orders[rank]:
        kind, chunk, mb = step.kind, step.chunk, step.microbatch
        lone = sum(m < 0 or (c, m) in done for c, m in under_way)
        seen.add((_KINDS.index(kind), chunk, lone, begun, *live, *put_off))
        if kind == Kind.F:
            live[chunk] += 1
            if sends[chunk][1]:
                under_way.append((chunk, mb))
        elif kind == Kind.W:
            put_off[chunk] -= 1
        else:
            live[chunk] -= 1
            put_off[chunk] += kind == Kind.I
            done.add((chunk, mb))
            begun = 1
            if sends[chunk][0]:
                under_way.append((chunk, -1))
    rows = np.array(sorted(seen))
    return Moments(
        rows[:, 0],
        rows[:, 1],
        rows[:, 4 : 4 + vpp].astype(float),
        rows[:, 4 + vpp :].astype(float),
        rows[:, 2].astype(float),
        rows[:, 3] > 0,
    )


def _sends(placement: StageAssignment, rank: int, chunk: int) -> tuple[bool, bool]:
    """Whether the stage before and the one after lie on other ranks."""
    before, after = (placement.neighbour(rank, chunk, offset) for offset in (-1, 1))
    return tuple(place is not None and place[0] != rank for place in (before, after))  # type: ignore[return-value]
