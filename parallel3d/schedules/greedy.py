"""A greedy list scheduler: a free rank starts the next ready action, under a cap on activations.

Each rank has three queues, forwards, input gradients and weight gradients, in the order of a
schedule that cannot deadlock. A free rank takes the head of one that is ready; weight gradients
fill idle time. The base schedule decides which micro-batch and chunk comes next; the given costs
and hops decide which kind comes next and how far forwards run ahead.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from dataclasses import dataclass

from parallel3d.schedules.actions import Action, ComputeSchedule, Kind, action
from parallel3d.schedules.costs import Costs
from parallel3d.schedules.orders import StageAssignment

_LATER = 1e-9  # seconds: arrivals closer than this count as simultaneous


@dataclass(frozen=True)
class Rule:
    """Decision rule of a rank.

    caps: chunk-activations that each rank may hold; at least one micro-batch's.
    wait_fraction: a weight gradient starts if the next forward or input gradient arrives later than
        this fraction of its duration.
    alternates: a forward goes first after an input gradient; otherwise input gradients always do.
    """

    caps: tuple[int, ...]
    wait_fraction: float
    alternates: bool


def list_schedule(
    base: Sequence[Sequence[Action]], placement: StageAssignment, costs: Costs, rule: Rule
) -> ComputeSchedule | None:
    """Schedules by `rule`, each kind in the order of `base`; None if the caps deadlock."""
    run = _Run(base, placement, costs, rule)
    while run.events:
        now, rank = heapq.heappop(run.events)
        if run.free[rank] <= now + _LATER:
            run.decide(rank, now)
    return run.orders if all(map(run.is_done, range(placement.ranks))) else None


class _Run:
    """Schedules one step; queues are lists with the number of entries done."""

    def __init__(
        self,
        base: Sequence[Sequence[Action]],
        placement: StageAssignment,
        costs: Costs,
        rule: Rule,
    ) -> None:
        self.placement, self.costs, self.rule = placement, costs, rule
        self.forwards = [_queue(order, (Kind.F,)) for order in base]
        self.inputs = [_queue(order, (Kind.I, Kind.B)) for order in base]
        self.done = [[0, 0, 0] for _ in base]  # forwards, input gradients, weight gradients
        self.came: dict[tuple[bool, int, int, int], float] = {
            (False, *placement.place(0), m): 0.0 for m in {m for m, _ in self.forwards[0]}
        }  # (is backward, rank, chunk, micro-batch) → arrival of its input
        self.free = [0.0] * placement.ranks
        self.last_was_input = [False] * placement.ranks
        self.orders: ComputeSchedule = [[] for _ in base]
        self.events = [(0.0, rank) for rank in range(placement.ranks)]

    def is_done(self, rank: int) -> bool:
        return self.done[rank][2] == len(self.inputs[rank])

    def decide(self, rank: int, now: float) -> None:
        """Starts the rank's next action by the rule, or wakes it when that may change."""
        forwards, inputs, weights = self.done[rank]
        if weights == len(self.inputs[rank]):
            return
        full = forwards - weights >= self.rule.caps[rank]
        backward = self._arrival(True, rank, self.inputs[rank], inputs)
        forward = None if full else self._arrival(False, rank, self.forwards[rank], forwards)
        can_backward = backward is not None and backward <= now + _LATER
        can_forward = forward is not None and forward <= now + _LATER
        if can_backward and can_forward:
            can_backward = not (self.rule.alternates and self.last_was_input[rank])
        if can_backward:
            self._start(Kind.I, rank, now)
        elif can_forward:
            self._start(Kind.F, rank, now)
        else:
            coming = min((t for t in (backward, forward) if t is not None), default=float("inf"))
            if weights < inputs and (full or coming - now > self._wait(rank)):
                self._start(Kind.W, rank, now)
            elif coming < float("inf"):
                heapq.heappush(self.events, (coming, rank))

    def _arrival(
        self, backward: bool, rank: int, queue: Sequence[tuple[int, int]], done: int
    ) -> float | None:
        if done == len(queue):
            return None
        m, chunk = queue[done]
        return self.came.get((backward, rank, chunk, m))

    def _wait(self, rank: int) -> float:
        chunk = self.inputs[rank][self.done[rank][2]][1]
        return self.rule.wait_fraction * self.costs.weight[self.placement.stage(rank, chunk)]

    def _start(self, kind: Kind, rank: int, now: float) -> None:
        which = 0 if kind == Kind.F else 1 if kind == Kind.I else 2
        queue = self.forwards[rank] if kind == Kind.F else self.inputs[rank]
        m, chunk = queue[self.done[rank][which]]
        self.done[rank][which] += 1
        self.orders[rank].append(action(kind, m, chunk))
        end = now + self.costs.of(kind, self.placement.stage(rank, chunk))
        self.free[rank] = end
        heapq.heappush(self.events, (end, rank))
        self.last_was_input[rank] = kind == Kind.I
        if kind == Kind.W:
            return
        backward = kind == Kind.I
        reader = self.placement.neighbour(rank, chunk, -1 if backward else 1)
        if reader is None and backward:
            return
        # The last stage starts its own backward.
        if reader is None:
            backward, reader = True, (rank, chunk)
        arrival = end + (self.costs.hop if reader[0] != rank else 0.0)
        self.came[(backward, *reader, m)] = arrival
        heapq.heappush(self.events, (arrival, reader[0]))


def _queue(order: Sequence[Action], kinds: tuple[Kind, ...]) -> list[tuple[int, int]]:
    return [(step.microbatch, step.chunk) for step in order if step.kind in kinds]
