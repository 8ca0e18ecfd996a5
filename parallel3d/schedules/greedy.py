"""Searches for schedules with a greedy list scheduler that has a cap on activations.

Each rank has three queues, of forwards, input gradients and weight gradients, in the order of a
base schedule that cannot deadlock. A rank that is free starts the head of a queue as soon as the
head's input has arrived; weight gradients fill idle time. So the base schedule decides which
micro-batch and chunk of a kind comes next, while the costs of computations and messages decide
which kind comes next and how far the forwards run ahead.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterator, Sequence
from itertools import product

from parallel3d.schedules.actions import Action, ComputeSchedule, Kind, action
from parallel3d.schedules.orders import StageAssignment, interleaved_zero_bubble
from parallel3d.schedules.schedule import Schedule
from parallel3d.schedules.walk import Costs, RankWork

WORK = 600_000  # maximum number of actions that a search schedules; they take a few seconds
SAME = 1e-9  # tolerance of a comparison with the cap on activations
_LATER = 1e-9  # arrivals closer than this, in seconds, count as simultaneous


def greedy_schedules(
    ranks: int, microbatches: int, chunks: int, work: RankWork, memory: float
) -> Iterator[Schedule]:
    """Yields greedy schedules over interleaved orders, the most promising first.

    They differ in the number of chunks, the size of groups of micro-batches and the rules by which
    a rank chooses its next action. The search ends when WORK actions have been scheduled.
    """
    # The numbers of chunks are `chunks` and a few smaller ones. Groups have `ranks` micro-batches,
    # or more where memory allows, which hides slow hops.
    counts = sorted({chunks, *(n for n in (4, 3, 2, 1) if n <= chunks)}, reverse=True)
    groups = [ranks, *(round(ranks * part) for part in (1.125, 1.25, 1.375) if part <= memory)]
    groups = sorted({min(group, microbatches) for group in groups})
    left = WORK
    for wait_fraction, alternates, slope, group, count in product(
        (0.25, 0.0, 0.5), (True, False), (0.0, 0.25), groups, counts
    ):
        actions = 3 * ranks * count * microbatches
        if left < actions:
            return
        left -= actions
        assignment = StageAssignment(ranks, count)
        if not work.fits(assignment):
            continue
        most = int(memory * min(ranks, microbatches) * count + SAME)
        caps = tuple(max(count, int(most - slope * rank)) for rank in range(ranks))
        base = interleaved_zero_bubble(ranks, count, microbatches, group)
        run = _Run(base, assignment, work.costs(assignment), caps, wait_fraction, alternates)
        orders = run.orders_of_ranks()
        if orders is not None:
            yield Schedule("auto", assignment, microbatches, orders)


class _Run:
    """Schedules one step by simulating it.

    A queue is a list together with the number of its entries that are done. The next action of a
    rank depends on the inputs that have arrived so far, so events are handled in order of time.
    `walk` needs no such order, because it times a schedule that is already fixed.

    Args:
        base: orders from which the queues are taken.
        costs: seconds of every computation and message.
        caps: for each rank, the chunk-activations that it may hold, at least those of one
            micro-batch.
        wait_fraction: a weight gradient starts if no forward or input gradient arrives within this
            fraction of the weight gradient's duration.
        alternates: whether a forward takes precedence after an input gradient. Otherwise input
            gradients always take precedence.
    """

    def __init__(
        self,
        base: Sequence[Sequence[Action]],
        assignment: StageAssignment,
        costs: Costs,
        caps: Sequence[int],
        wait_fraction: float,
        alternates: bool,
    ) -> None:
        self.assignment = assignment
        self.hop = costs.hop
        self.caps = caps
        self.wait_fraction = wait_fraction
        self.alternates = alternates
        self.seconds = {Kind.F: costs.forward, Kind.I: costs.input, Kind.W: costs.weight}
        self.forwards = [_queue(order, (Kind.F,)) for order in base]
        self.inputs = [_queue(order, (Kind.I, Kind.B)) for order in base]
        self.done = [{Kind.F: 0, Kind.I: 0, Kind.W: 0} for _ in base]
        # (kind, rank, chunk, micro-batch) of an action → time at which its input arrives
        self.came: dict[tuple[Kind, int, int, int], float] = {
            (Kind.F, *assignment.place(0), m): 0.0 for m, _ in self.forwards[0]
        }
        self.free = [0.0] * assignment.ranks
        self.last_was_input = [False] * assignment.ranks
        self.orders: ComputeSchedule = [[] for _ in base]
        self.events = [(0.0, rank) for rank in range(assignment.ranks)]

    def orders_of_ranks(self) -> ComputeSchedule | None:
        """Returns the orders of all ranks, or None if the caps make the ranks deadlock."""
        while self.events:
            now, rank = heapq.heappop(self.events)
            if self.free[rank] <= now + _LATER:
                self.decide(rank, now)
        return self.orders if all(map(self.is_done, range(self.assignment.ranks))) else None

    def is_done(self, rank: int) -> bool:
        return self.done[rank][Kind.W] == len(self.inputs[rank])

    def decide(self, rank: int, now: float) -> None:
        """Starts a rank's next action, or wakes the rank again when its next input arrives."""
        if self.is_done(rank):
            return
        done = self.done[rank]
        full = done[Kind.F] - done[Kind.W] >= self.caps[rank]
        backward = self._arrival(Kind.I, rank)
        forward = _NEVER if full else self._arrival(Kind.F, rank)
        can_backward, can_forward = backward <= now + _LATER, forward <= now + _LATER
        if can_backward and can_forward:
            can_backward = not (self.alternates and self.last_was_input[rank])
        coming = min(backward, forward)
        if can_backward:
            self._start(Kind.I, rank, now)
        elif can_forward:
            self._start(Kind.F, rank, now)
        elif done[Kind.W] < done[Kind.I] and (full or coming - now > self._wait(rank)):
            self._start(Kind.W, rank, now)
        elif coming < _NEVER:
            heapq.heappush(self.events, (coming, rank))

    def _next(self, kind: Kind, rank: int) -> tuple[int, int]:
        """Returns (micro-batch, chunk) of the rank's next action of this kind."""
        queue = self.forwards[rank] if kind == Kind.F else self.inputs[rank]
        return queue[self.done[rank][kind]]

    def _arrival(self, kind: Kind, rank: int) -> float:
        if self.done[rank][kind] == len(self.inputs[rank]):
            return _NEVER
        m, chunk = self._next(kind, rank)
        return self.came.get((kind, rank, chunk, m), _NEVER)

    def _wait(self, rank: int) -> float:
        chunk = self._next(Kind.W, rank)[1]
        return self.wait_fraction * self.seconds[Kind.W][self.assignment.stage(rank, chunk)]

    def _start(self, kind: Kind, rank: int, now: float) -> None:
        m, chunk = self._next(kind, rank)
        self.done[rank][kind] += 1
        self.orders[rank].append(action(kind, m, chunk))
        end = now + self.seconds[kind][self.assignment.stage(rank, chunk)]
        self.free[rank] = end
        heapq.heappush(self.events, (end, rank))
        self.last_was_input[rank] = kind == Kind.I
        if kind == Kind.W:
            return
        reader = self.assignment.neighbour(rank, chunk, -1 if kind == Kind.I else 1)
        if reader is None and kind == Kind.I:
            return
        if reader is None:  # the last stage starts its own backward
            kind, reader = Kind.I, (rank, chunk)
        arrival = end + (self.hop if reader[0] != rank else 0.0)
        self.came[(kind, *reader, m)] = arrival
        heapq.heappush(self.events, (arrival, reader[0]))


_NEVER = float("inf")


def _queue(order: Sequence[Action], kinds: tuple[Kind, ...]) -> list[tuple[int, int]]:
    return [(step.microbatch, step.chunk) for step in order if step.kind in kinds]
