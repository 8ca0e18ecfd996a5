"""Counts the micro-batches in flight on a rank of a pipeline, before each action of its order.

The memory of activations is a matrix product of these counts and the bytes per micro-batch, so one
walk through a schedule serves every model, micro-batch size and form of recomputation in a search.
"""

from __future__ import annotations

import functools
from collections import defaultdict
from dataclasses import dataclass
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

from parallel3d.blueprint.blueprint import Blueprint
from parallel3d.schedules.actions import Kind
from parallel3d.schedules.messages import SENDS
from parallel3d.schedules.schedule import Schedule, make


@dataclass(frozen=True)
class States:
    """States of one rank before one kind of action on one of its chunks, with a row for each state.

    Attributes:
        live: for each chunk, number of micro-batches between their forward and their backward (or
            I, the half of a backward that computes the gradient of the input).
        deferred: for each chunk, number of micro-batches between I and W, the other half.
        in_flight: number of sends in flight, which hold their tensors.
        begun: for each chunk, whether the chunk has had a backward in this step.
        final: whether no backward (or I) of the step follows the action.
    """

    live: NDArray[np.float64]
    deferred: NDArray[np.float64]
    in_flight: NDArray[np.float64]
    begun: NDArray[np.bool_]
    final: NDArray[np.bool_]


Seen: TypeAlias = dict[tuple[Kind, int], States]  # (kind, chunk) of the action → states


def enough_microbatches(name: str, pp: int, microbatches: int) -> int:
    """Returns how many of the `microbatches` are enough to reach the memory peak.

    Further micro-batches would only repeat the steady state.
    """
    if name == "gpipe" or microbatches <= 4 * pp:
        return microbatches
    return 3 * pp + microbatches % pp


@functools.lru_cache(maxsize=64)
def _schedule(name: str, pp: int, microbatches: int, vpp: int, whole_backwards: bool) -> Schedule:
    made = make(name, pp, microbatches, vpp)
    return made.with_whole_backwards() if whole_backwards else made


def states_of(blueprint: Blueprint, rank: int, microbatches: int | None = None) -> Seen:
    """Returns the states of `rank` along pp in a step of `microbatches` micro-batches.

    If `microbatches` is None, the run's number is used.
    """
    pipeline = blueprint.pipeline
    count = pipeline.microbatches if microbatches is None else microbatches
    whole = pipeline.whole_backwards
    return _states(pipeline.name, pipeline.ranks, pipeline.chunks, count, rank, whole)


@functools.lru_cache(maxsize=4096)
def _states(
    name: str, pp: int, vpp: int, microbatches: int, rank: int, whole_backwards: bool
) -> Seen:
    """Returns the states of a rank, found by a walk through this rank's own order.

    A walk through the orders of all ranks would be too slow for a search.
    """
    made = _schedule(name, pp, enough_microbatches(name, pp, microbatches), vpp, whole_backwards)
    live = [0] * vpp
    deferred = [0] * vpp
    begun = [0] * vpp
    in_flight = 0
    seen: dict[tuple[Kind, int], set[tuple[int, ...]]] = defaultdict(set)
    around, left = made.assignment.around(rank), vpp * made.microbatches
    for step in made.orders[rank]:
        kind, chunk = step.kind, step.chunk
        left -= kind in (Kind.B, Kind.I)
        seen[kind, chunk].add((*live, *deferred, *begun, in_flight, not left))
        _, before, after = around[chunk]
        if kind == Kind.W:
            deferred[chunk] -= 1
            continue
        forward = kind == Kind.F
        live[chunk] += 1 if forward else -1
        deferred[chunk] += kind == Kind.I
        begun[chunk] |= not forward
        reader = after if forward else before
        if reader is not None and reader[0] != rank:
            in_flight = min(in_flight + 1, SENDS)
    found = {}
    for action, states in seen.items():
        rows = np.array(sorted(states), dtype=float)
        counts, (sends, last) = rows[:, :-2].reshape(-1, 3, vpp), rows[:, -2:].T
        found[action] = States(counts[:, 0], counts[:, 1], sends, counts[:, 2] > 0, last > 0)
    return found
