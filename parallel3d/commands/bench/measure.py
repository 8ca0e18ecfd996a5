"""Measures the rows of `bench comm` on every rank: checked first, then timed within the budget."""

from __future__ import annotations

import dataclasses
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial

import torch
import torch.distributed as dist

from parallel3d.comm.exchange import gather_json
from parallel3d.commands.bench.operations import REDUCTIONS, Site, prepare
from parallel3d.commands.bench.rows import BenchRow, Measured, described, groups_of, result, turns
from parallel3d.commands.bench.timing import CallCounts, finisher, timed_calls
from parallel3d.commands.bench.where import Where

Progress = Callable[[str, int, int], None]  # what is done now, how many of how many


@dataclass
class Measurement:
    """All rows on one rank; every method is collective over the world.

    Attributes:
        rows: the same list on every rank.
        sites: this rank's groups.
        warmup, calls: of each row, as long as `budget_s` from now allows.
        progress: told before each row.
    """

    rows: list[BenchRow]
    sites: dict[str, Site]
    where: Where
    warmup: int
    calls: int
    budget_s: float
    progress: Progress = lambda row, done, of: None
    refused: str | None = None  # why AVG is not offered
    rows_cut: int = 0
    started: float = field(default_factory=time.perf_counter)

    def __post_init__(self) -> None:
        self.rank = dist.get_rank()
        self.layout = self.where.placement.layout
        self.device = next(iter(self.sites.values())).device
        self.finish = finisher(self.device)
        self.refused = self._why_no_average()

    def results(self) -> Iterator[tuple[str, list[dict]]]:
        """(dimension, its rows for JSON; on rank 0 alone, else empty), as they are done.

        Raises WrongResult on a rank that finds a wrong number.
        """
        offered = [row for row in self.rows if not self._is_refused(row)]
        plan = self._plan(offered)
        for dim in self.sites:
            calls: list[int] = []
            seen: list[Measured] = []
            of_dim = [row for row in offered if row.dim == dim]
            for number, row in enumerate(of_dim):
                self.progress(row.label, len(offered) + plan.row, 2 * len(offered))
                warmup, timed = self._agreed(plan)
                start = time.perf_counter()
                seen += self._measure(row, number, warmup, timed)
                plan.done(warmup + timed, time.perf_counter() - start)
                calls.append(timed)
            gathered = self._gathered(seen)
            if self.rank > 0:
                yield dim, []
                continue
            done = [
                result(row, calls[i], gathered[i], self.sites[dim], self.where)
                for i, row in enumerate(of_dim)
            ]
            not_offered = [row for row in self.rows if row.dim == dim and self._is_refused(row)]
            yield (
                dim,
                done + [described(row) | {"not_offered": self.refused} for row in not_offered],
            )
        self.rows_cut = plan.cut

    def _why_no_average(self) -> str | None:
        """None where the backend can average (gloo could not before torch 2.13)."""
        site = next(iter(self.sites.values()))
        try:
            dist.all_reduce(torch.ones(1, device=self.device), REDUCTIONS["avg"], site.group.handle)
        except (RuntimeError, ValueError) as error:  # refused before anything is sent
            if "AVG" not in str(error):
                raise
            return f"{site.backend} of torch {torch.__version__} has no AVG"
        return None

    def _is_refused(self, row: BenchRow) -> bool:
        return self.refused is not None and row.operation.reduction == "avg"

    def _plan(self, rows: list[BenchRow]) -> CallCounts:
        """Calls every operation once, all groups together, and looks at the clock.

        That also makes the connections. A row that lets the groups work one after another is
        taken to last as many times as long.
        """
        first: dict[tuple, float] = {}
        for number, row in enumerate(rows):
            key = row[:3]
            if key in first:
                continue
            self.progress(f"first call of {row.label}", number, 2 * len(rows))
            call = prepare(row.operation, self.sites[row.dim], row.size)
            dist.barrier()
            start = time.perf_counter()
            call.run()
            self.finish()
            dist.barrier()
            first[key] = time.perf_counter() - start
        left = self.budget_s - (time.perf_counter() - self.started)
        estimates = [first[row[:3]] * len(turns(self.layout, row)) for row in rows]
        return CallCounts(estimates, left, self.warmup, self.calls)

    def _agreed(self, plan: CallCounts) -> tuple[int, int]:
        """Rank 0's plan for the next row, on every rank."""
        word = torch.tensor(plan.next(), device=self.device)
        dist.broadcast(word, 0)
        warmup, timed = word.tolist()
        return warmup, timed

    def _measure(self, row: BenchRow, number: int, warmup: int, timed: int) -> list[Measured]:
        site = self.sites[row.dim]
        mine = groups_of(self.layout, row.dim).index(list(site.group.ranks))
        call = prepare(row.operation, site, row.size)
        together = row.mode == "together"
        barrier = dist.barrier if together else partial(dist.barrier, group=site.group.handle)
        seen = []
        for turn in turns(self.layout, row):
            if mine in turn:
                call.check(f"{row.label}, rank {self.rank}")  # the first warm-up call
                seconds = timed_calls(call.run, barrier, self.finish, max(0, warmup - 1), timed)
                path = site.path(row.operation, row.size)
                seen.append(Measured(number, mine, path, tuple(seconds)))
            dist.barrier()
        return seen

    def _gathered(self, seen: list[Measured]) -> dict[int, list[list[Measured]]]:
        """On rank 0: row number → groups → members in the order of their ranks."""
        facts = [dataclasses.astuple(measured) for measured in seen]
        found: dict[int, dict[int, list[Measured]]] = defaultdict(lambda: defaultdict(list))
        for of_rank in gather_json(facts, dist.group.WORLD, self.device):
            for row, group, path, seconds in of_rank:
                found[row][group].append(Measured(row, group, path, tuple(seconds)))
        return {row: [groups[g] for g in sorted(groups)] for row, groups in found.items()}
