"""Counts the micro-batches in flight on a rank of a pipeline, before each action of its order.

The memory of activations is a matrix product of these counts and the bytes per micro-batch, so one
walk through a schedule serves every model, micro-batch size and form of recomputation in a search.
"""

from __future__ import annotations

import functools
from collections import defaultdict, deque
from dataclasses import dataclass
from typing import NamedTuple, TypeAlias

import numpy as np
from numpy.typing import NDArray

from parallel3d.blueprint.blueprint import Blueprint
from parallel3d.schedules.actions import Action, Kind, PipelineProgram
from parallel3d.schedules.messages import SENDS
from parallel3d.schedules.orders import StageAssignment
from parallel3d.schedules.schedule import make

# Messages with the input of a stage or the gradient of it, and then those of its result.
MESSAGES = (Kind.RECV_F, Kind.SEND_B, Kind.RECV_B, Kind.SEND_F)


@dataclass(frozen=True)
class States:
    """States of one rank before one kind of action on one of its chunks, with a row for each state.

    Attributes:
        live: for each chunk, number of micro-batches between their forward and their backward (or
            I, the half of a backward that computes the gradient of the input).
        deferred: for each chunk, number of micro-batches between I and W, the other half.
        messages: numbers of messages that hold a tensor: sends in flight, and receives that no
            action has read yet, without the one that the action itself reads. There are columns
            for the chunks of each kind of message, in the order of MESSAGES.
        handed: the same of results that another chunk of the rank has not read yet.
        begun: for each chunk, whether the chunk has had a backward in this step.
        final: whether no backward (or I) of the step follows the action.
    """

    live: NDArray[np.float64]
    deferred: NDArray[np.float64]
    messages: NDArray[np.float64]
    handed: NDArray[np.float64]
    begun: NDArray[np.bool_]
    final: NDArray[np.bool_]

    @property
    def in_flight(self) -> NDArray[np.float64]:
        """Number of messages that hold a tensor."""
        counts: NDArray[np.float64] = self.messages.sum(axis=1)
        return counts


Seen: TypeAlias = dict[tuple[Kind, int], States]  # (kind, chunk) of the action → states


def enough_microbatches(name: str, pp: int, microbatches: int) -> int:
    """Returns how many of the `microbatches` are enough to reach the memory peak.

    Further micro-batches would only repeat the steady state.
    """
    least = max(3 * pp, pp + SENDS)  # by then, sends in flight have reached their limit
    if name == "gpipe" or microbatches <= least + pp:
        return microbatches
    return least + (microbatches - least) % pp


class _Steps(NamedTuple):
    """The stages of a pipeline's ranks, and each rank's actions and messages in a step."""

    assignment: StageAssignment
    program: PipelineProgram


@functools.lru_cache(maxsize=64)
def _steps(name: str, pp: int, microbatches: int, vpp: int, whole_backwards: bool) -> _Steps:
    made = make(name, pp, microbatches, vpp)
    made = made.with_whole_backwards() if whole_backwards else made
    return _Steps(made.assignment, made.program())


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
    """Returns the states of a rank, found by a walk through this rank's own steps."""
    few = enough_microbatches(name, pp, microbatches)
    assignment, program = _steps(name, pp, few, vpp, whole_backwards)
    live = [0] * vpp
    deferred = [0] * vpp
    begun = [0] * vpp
    sends: deque[int] = deque()
    unread: set[Action] = set()
    handed: set[Action] = set()
    seen: dict[tuple[Kind, int], set[tuple[int, ...]]] = defaultdict(set)
    around, left = assignment.around(rank), vpp * few
    for step in program[rank]:
        if not isinstance(step, Action):
            # The executor first waits until at most SENDS older sends are in flight.
            while len(sends) > SENDS:
                sends.popleft()
            sends.extend(_side(message, vpp) for message in step if message.kind.is_send)
            unread.update(message for message in step if not message.kind.is_send)
            continue
        kind, chunk, forward = step.kind, step.chunk, step.kind == Kind.F
        left -= kind in (Kind.B, Kind.I)
        received = Action(Kind.RECV_F if forward else Kind.RECV_B, step.microbatch, chunk)
        if kind != Kind.W:
            unread.discard(received)
            handed.discard(received)
        messages, waiting = [0] * (len(MESSAGES) * vpp), [0] * (len(MESSAGES) * vpp)
        for side in (*sends, *(_side(message, vpp) for message in unread)):
            messages[side] += 1
        for result in handed:
            waiting[_side(result, vpp)] += 1
        seen[kind, chunk].add((*live, *deferred, *begun, *messages, *waiting, not left))
        if kind == Kind.W:
            deferred[chunk] -= 1
            continue
        live[chunk] += 1 if forward else -1
        deferred[chunk] += kind == Kind.I
        begun[chunk] |= not forward
        _, before, after = around[chunk]
        reader = after if forward else before
        if reader is not None and reader[0] == rank:
            handed.add(Action(received.kind, step.microbatch, reader[1]))
    found = {}
    for action, states in seen.items():
        rows = np.array(sorted(states), dtype=float)
        counts, moved = rows[:, : 3 * vpp], rows[:, 3 * vpp : -1]
        live_, deferred_, begun_ = np.split(counts, 3, axis=1)
        messages_, handed_ = np.split(moved, 2, axis=1)
        last = rows[:, -1] > 0
        found[action] = States(live_, deferred_, messages_, handed_, begun_ > 0, last)
    return found


def _side(message: Action, chunks: int) -> int:
    """Returns the column of a message in `States.messages`."""
    return message.chunk + chunks * MESSAGES.index(message.kind)
