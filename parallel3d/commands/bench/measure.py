"""Measures the rows of `bench comm`: operations in the groups of a layout, at several sizes."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from parallel3d.blueprint.collectives import bus_factor
from parallel3d.blueprint.layout import DIMENSIONS, Layout
from parallel3d.comm.exchange import all_gather_json
from parallel3d.comm.timed_operations import (
    PLAIN,
    REDUCING,
    REDUCTIONS,
    WORLD,
    Site,
    TimedOperation,
    dimensions,
    prepare,
    timed_calls,
)
from parallel3d.device import accelerator
from parallel3d.estimate.network import collective_time
from parallel3d.run.cluster_view import ClusterView

# Share of the time budget that the rows may use; the probe of pairs and the report need the rest.
MEASURING_SHARE = 0.75


def slowest_rank(by_rank: Sequence[Sequence[float]]) -> float:
    """Returns the median over calls of the time of each call at its slowest rank.

    `by_rank` has, for each rank, the seconds of each call.
    """
    return statistics.median(max(call) for call in zip(*by_rank, strict=True))


@dataclass
class CallCounts:
    """Divides a time budget among rows, each of which has at least one timed call."""

    estimates: Sequence[float]  # seconds of one call of each row
    seconds: float  # time left for all rows
    warmup: int  # warm-up calls of every row, if time allows
    calls: int  # timed calls of every row, if time allows
    row: int = 0  # number of rows that are done
    spent: float = 0.0  # seconds that these rows took
    cut: int = 0  # number of rows with fewer calls than requested

    def next(self) -> tuple[int, int]:
        """Returns the numbers of warm-up calls and of timed calls for the next row.

        They are chosen so that the time left suffices for as many calls in every remaining row.
        """
        ahead, full = sum(self.estimates[self.row :]), self.warmup + self.calls
        affordable = (self.seconds - self.spent) / max(ahead, 1e-9)
        if affordable >= full:
            return self.warmup, self.calls
        self.cut += 1
        calls = max(1, int(affordable * self.calls / full))
        return max(0, min(self.warmup, int(affordable) - calls)), calls

    def done(self, seconds: float) -> None:
        """Records that all calls of the row took `seconds`."""
        self.spent += seconds
        self.row += 1


# Collectives by which training sends activations and gradients; its reductions are sums.
COLLECTIVES = ("all_reduce", "all_gather", "reduce_scatter")
TRAINING = dict.fromkeys(("tp", "cp", "dp", "dp_cp"), COLLECTIVES) | {"pp": ("send_recv",)}


def is_trainings(dim: str, name: str, reduction: str | None) -> bool:
    """Returns whether training calls the collective `name` in the groups of `dim`."""
    return reduction in ("sum", None) and name in TRAINING.get(dim, ())


def operations(dim: str) -> list[TimedOperation]:
    """Returns the operations to measure in the groups of `dim`.

    A reducing collective is measured with every reduction. The collectives that training calls are
    also measured on training's own path.
    """
    return [
        TimedOperation(name, reduction, own)
        for name in (*REDUCING, *PLAIN)
        for reduction in (REDUCTIONS if name in REDUCING else (None,))
        for own in ((False, True) if is_trainings(dim, name, reduction) else (False,))
    ]


ALONE, TOGETHER = "alone", "together"
MOST_ALONE = 16  # maximum number of a dimension's groups, evenly spread, that are measured alone


class BenchRow(NamedTuple):
    """One operation at one size in the groups of one dimension.

    Attributes:
        dim: the dimension, or WORLD.
        operation: the operation.
        size: the size of the buffer in bytes, or 0 for a barrier.
        mode: ALONE, if the groups work one after another, or TOGETHER, if they work at once.
    """

    dim: str
    operation: TimedOperation
    size: int
    mode: str

    @property
    def label(self) -> str:
        """The row in words, such as `dp all-reduce sum, 4096 bytes, together`."""
        size = f", {self.size} bytes" if self.size else ""
        own = ", training's way" if self.operation.own else ""
        return f"{self.dim} {self.operation.label}{size}{own}, {self.mode}"

    def facts(self) -> dict[str, Any]:
        """Returns the fields that identify the row in JSON."""
        name, reduction, own = self.operation
        named = {"dim": self.dim, "op": name, "reduction": reduction, "training_path": own}
        return named | {"size": self.size, "mode": self.mode}


def groups_of(layout: Layout, dim: str) -> list[list[int]]:
    return layout.groups(*(DIMENSIONS if dim == WORLD else (dim,)))


def all_rows(
    mine: dict[str, Site], sizes: Sequence[int], layout: Layout
) -> tuple[list[BenchRow], dict[str, str]]:
    """Returns all rows, and the reasons why dimensions or reductions have none.

    The call is collective over the world, and the result is equal on every rank. Training's own
    path has a row only if it differs from the backend on some rank.
    """
    left_out = dimensions(layout)[1]
    if why := _why_no_average(next(iter(mine.values()))):
        left_out["avg"] = why
    every = [
        BenchRow(dim, operation, size, mode)
        for dim in mine
        for operation in operations(dim)
        if operation.reduction not in left_out
        for size in ((0,) if operation.name == "barrier" else dict.fromkeys(sizes))
        for mode in ((ALONE, TOGETHER) if len(groups_of(layout, dim)) > 1 else (ALONE,))
    ]
    differs = [
        row.operation.own and mine[row.dim].path(row.operation, row.size) != mine[row.dim].backend
        for row in every
    ]
    device = next(iter(mine.values())).device
    by_rank = all_gather_json(differs, dist.group.WORLD, device)
    special = [any(of_row) for of_row in zip(*by_rank, strict=True)]
    rows = [row for row, own in zip(every, special, strict=True) if own or not row.operation.own]
    return rows, left_out


def _why_no_average(site: Site) -> str | None:
    """Returns why the backend cannot average, like gloo before torch 2.13, or None if it can."""
    try:
        dist.all_reduce(torch.ones(1, device=site.device), REDUCTIONS["avg"], site.group.handle)
    except (RuntimeError, ValueError) as error:  # every rank raises it before anything is sent
        if "AVG" not in str(error):
            raise
        return f"{site.backend} in torch {torch.__version__} has no AVG"
    return None


def turns(layout: Layout, row: BenchRow) -> list[list[int]]:
    """Returns, for each turn of a row, the numbers of the groups that work at the same time."""
    count = len(groups_of(layout, row.dim))
    if row.mode == TOGETHER:
        return [list(range(count))]
    taken = min(count, MOST_ALONE)
    return [[turn * count // taken] for turn in range(taken)]


# The path and the seconds of each call on one rank, or None if the rank was not measured.
Timing = tuple[str, list[float]] | None


def result(
    row: BenchRow, calls: int, by_rank: Sequence[Timing], site: Site, where: ClusterView
) -> dict[str, Any]:
    """Returns a measured row for JSON.

    `seconds` is the median over calls of the time at the slowest rank, in the slowest group. Bytes
    and bandwidths in 1e9 B/s are defined as in nccl-tests, whose busbw is `bus_gb_per_s`.

    Args:
        row: the row.
        calls: number of timed calls.
        by_rank: the timing of every rank.
        site: this rank's site in the dimension of the row.
        where: the rank mapping and the hosts.
    """
    groups = groups_of(where.placement.layout, row.dim)
    nbytes = site.whole_bytes(row.size) if row.size else 0
    name, n = row.operation.name, site.group.size
    found: list[dict[str, Any]] = []
    for ranks in groups:
        members = [timing for timing in (by_rank[rank] for rank in ranks) if timing is not None]
        if not members:
            continue
        kind, link = where.slowest_link(ranks, chain=site.chain and name == "send_recv")
        found.append(
            {
                "ranks": ranks,
                "path": members[0][0],
                "link": kind.label,
                "seconds": slowest_rank([seconds for _, seconds in members]),
                "priced_s": link and collective_time(name, n, nbytes, link),
                "rank_seconds": [statistics.median(seconds) for _, seconds in members],
            }
        )
    slowest = max(found, key=lambda group: group["seconds"])
    bandwidth = nbytes / slowest["seconds"] / 1e9
    return row.facts() | {
        "bytes": nbytes,
        "ranks_of_a_group": n,
        "path": " or ".join(sorted({group["path"] for group in found})),
        "groups_measured": len(found),
        "groups_of_the_dimension": len(groups),
        "calls": calls,
        "seconds": slowest["seconds"],
        "algorithm_gb_per_s": bandwidth,
        "bus_gb_per_s": bandwidth * bus_factor(name, n),
        "link": slowest["link"],
        "priced_s": slowest["priced_s"],
        "times_the_price": slowest["priced_s"] and slowest["seconds"] / slowest["priced_s"],
        "result_checked": name != "barrier",
        "groups": found,
    }


# The arguments are a description of the work, the number of units that are done, and their total.
Progress = Callable[[str, int, int], None]


@dataclass
class Measurement:
    """Checks and times all rows within a time budget. All methods are collective."""

    rows: list[BenchRow]  # equal on every rank
    sites: dict[str, Site]  # the sites of this rank by dimension
    where: ClusterView
    warmup: int  # warm-up calls of each row, if `budget_s` allows them
    calls: int  # timed calls of each row, if `budget_s` allows them
    budget_s: float  # seconds for all rows
    progress: Progress = lambda row, done, of: None
    rows_cut: int = 0  # number of rows with fewer calls than `calls`, known after `results`

    def __post_init__(self) -> None:
        self.ends = time.perf_counter() + self.budget_s
        self.layout = self.where.placement.layout
        self.device = next(iter(self.sites.values())).device

    def results(self) -> Iterator[tuple[str, list[dict]]]:
        """Measures and yields each dimension with its rows for JSON, which only rank 0 has.

        Raises WrongResult on a rank that finds a wrong number.
        """
        plan = self._plan()
        for dim, site in self.sites.items():
            of_dim = [row for row in self.rows if row.dim == dim]
            calls, mine = [], []
            for row in of_dim:
                self.progress(row.label, len(self.rows) + plan.row, 2 * len(self.rows))
                warmup, timed = self._agreed(plan)
                start = time.perf_counter()
                mine.append(self._measure(row, warmup, timed))
                plan.done(time.perf_counter() - start)
                calls.append(timed)
            by_row = zip(*all_gather_json(mine, dist.group.WORLD, self.device), strict=True)
            seen = zip(of_dim, calls, by_row, strict=True) if dist.get_rank() == 0 else ()
            yield dim, [result(*row, site, self.where) for row in seen]
        self.rows_cut = plan.cut

    def _plan(self) -> CallCounts:
        """Calls every operation once, to connect the groups and to plan the numbers of calls.

        All groups work at once here. If the groups of a row take turns, the measured time is
        multiplied by the number of turns.
        """
        first: dict[tuple, float] = {}
        for number, row in enumerate(self.rows):
            key = row[:3]
            if key not in first:
                self.progress(f"first call of {row.label}", number, 2 * len(self.rows))
                call = prepare(row.operation, self.sites[row.dim], row.size)
                dist.barrier()
                start = time.perf_counter()
                call.run()
                accelerator.synchronize(self.device)
                dist.barrier()
                first[key] = time.perf_counter() - start
        estimates = [first[row[:3]] * len(turns(self.layout, row)) for row in self.rows]
        return CallCounts(estimates, self.ends - time.perf_counter(), self.warmup, self.calls)

    def _agreed(self, plan: CallCounts) -> tuple[int, int]:
        """Returns, on every rank, rank 0's numbers of calls for the next row: warm-up and timed."""
        calls = torch.tensor(plan.next(), device=self.device)
        dist.broadcast(calls, 0)
        warmup, timed = calls.tolist()
        return warmup, timed

    def _measure(self, row: BenchRow, warmup: int, timed: int) -> Timing:
        site, seen = self.sites[row.dim], None
        mine = groups_of(self.layout, row.dim).index(list(site.group.ranks))
        call = prepare(row.operation, site, row.size)
        together = row.mode == TOGETHER
        barrier = dist.barrier if together else partial(dist.barrier, group=site.group.handle)
        for turn in turns(self.layout, row):
            if mine in turn:
                call.check(f"{row.label}, rank {dist.get_rank()}")  # the first warm-up call
                calls = max(0, warmup - 1), timed
                seen = (
                    site.path(row.operation, row.size),
                    timed_calls(call.run, barrier, self.device, *calls),
                )
            dist.barrier()
        return seen
