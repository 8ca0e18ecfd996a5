"""The clock of a pipeline whose ranks share cores: what is computed at once takes longer.

`schedules/simulate.py` is the clock of ranks with a device each.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Sequence

from parallel3d.schedules.actions import Action, Kind
from parallel3d.schedules.placement import StageAssignment
from parallel3d.schedules.simulate import Costs, ScheduleError

Made = tuple[bool, int, int]  # of a forward, stage, micro-batch


def shared_clock(
    orders: Sequence[Sequence[Action]],
    placement: StageAssignment,
    costs: Costs,
    replicas: int,
    speed: Callable[[int], float],
    ends: Sequence[float] | None = None,
) -> float:
    """Seconds until the last rank has done its order, and then its `ends`.

    All ranks that compute at a moment are equally fast: processor sharing, as an operating system
    deals cores out. A waiting rank takes no core. So work done is one number for all of them, which
    grows by `speed` a second, and a rank that begins knows at which number it ends.

    Args:
        costs: seconds of a rank alone; the hop is work, half of it the sender's.
        replicas: ranks that do as each of the pipeline's does: tp × dp.
        speed: ranks that compute → how fast each is, 1 as if alone.
        ends: what each rank of the pipeline does after its order: reductions, the update.

    Raises ScheduleError where ranks wait for each other.
    """
    run = _Run(orders, placement, costs, ends or [0.0] * len(orders))
    wall = done = 0.0
    for rank in range(len(orders)):
        run.begin(rank, done)
    while run.busy:
        end, rank = run.busy[0]
        wall += (end - done) / speed(len(run.busy) * replicas)
        done = end
        heapq.heappop(run.busy)
        run.finish(rank, done)
    if run.left:
        raise ScheduleError("ranks wait for each other")
    return wall


class _Run:
    """Who computes until which amount of work, and who waits for what."""

    def __init__(
        self,
        orders: Sequence[Sequence[Action]],
        placement: StageAssignment,
        costs: Costs,
        ends: Sequence[float],
    ) -> None:
        self.orders, self.costs, self.ends = orders, costs, ends
        self.around = [placement.around(rank) for rank in range(placement.ranks)]
        self.busy: list[tuple[float, int]] = []
        self.place = [0] * len(orders)
        self.left = len(orders)
        self.made: set[Made] = set()
        self.waiting: dict[Made, int] = {}

    def begin(self, rank: int, done: float) -> None:
        """The next action of `rank`, if its input is there."""
        place, order = self.place[rank], self.orders[rank]
        if place == len(order):
            heapq.heappush(self.busy, (done + self.ends[rank], rank))
            return
        step = order[place]
        stage, before, after = self.around[rank][step.chunk]
        forward, count = step.kind == Kind.F, step.microbatch
        source, work = None, self.costs.of(step.kind, stage)
        if forward and before is not None:
            source = (True, stage - 1, count)
        elif step.kind in (Kind.B, Kind.I) and after is not None:
            source = (False, stage + 1, count)
        if step.kind in (Kind.B, Kind.I) and (True, stage, count) not in self.made:
            return  # for ever: only this rank could make it
        if source is not None and source not in self.made:
            self.waiting[source] = rank
            return
        to, come = (after, before) if forward else (before, after)
        if step.kind != Kind.W:
            crossed = (to is not None and to[0] != rank) + (come is not None and come[0] != rank)
            work += crossed * self.costs.hop / 2
        heapq.heappush(self.busy, (done + work, rank))

    def finish(self, rank: int, done: float) -> None:
        """`rank` has done what it did; who waited for it goes on."""
        place, order = self.place[rank], self.orders[rank]
        self.place[rank] += 1
        if place == len(order):
            self.left -= 1
            return
        step = order[place]
        if step.kind != Kind.W:
            made = (step.kind == Kind.F, self.around[rank][step.chunk][0], step.microbatch)
            self.made.add(made)
            if made in self.waiting:
                self.begin(self.waiting.pop(made), done)
        self.begin(rank, done)
