"""Where the ranks of a run sit, and by what wires: what a finding is named by, and priced by."""

from __future__ import annotations

import dataclasses
import socket
import statistics
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import NamedTuple

import torch
import torch.distributed as dist

from parallel3d.comm.exchange import all_gather_json, gather_json
from parallel3d.comm.process_groups import ProcessGroups
from parallel3d.commands.bench.operations import (
    REDUCTIONS,
    BenchOperation,
    CallCounts,
    Site,
    finisher,
    operations,
    prepare,
    slowest_rank,
    timed_calls,
)
from parallel3d.config.schema import Config, LaunchConfig
from parallel3d.pipeline.shared_memory import SharedMemoryP2P
from parallel3d.run.launch import Worker
from parallel3d.sizes.transfer import bus_factor
from parallel3d.topology.cluster.parts import Link, LinkClass, cluster_from_config
from parallel3d.topology.layout import DEFAULT_ORDER, Layout
from parallel3d.topology.price.costs import collective_time
from parallel3d.topology.tiling import RankMapping, Tiling


@dataclass(frozen=True)
class Where:
    """The placement of the run, and the host name of every rank."""

    placement: RankMapping
    hosts: tuple[str, ...]

    @classmethod
    def find(cls, config: Config, worker: Worker, layout: Layout) -> Where:
        """Collective over the world: every rank says its host.

        Without a placement of the worker's own the ranks sit in their order on the configured
        cluster. Raises UserError if that has too few GPUs.
        """
        placement = worker.placement
        if placement is None:
            cluster = cluster_from_config(config.cluster, layout.world_size)
            placement = RankMapping.tiled(cluster, layout, Tiling.from_order(DEFAULT_ORDER, layout))
        device = torch.device(worker.device)
        hosts = all_gather_json(socket.gethostname(), dist.group.WORLD, device)
        return cls(placement, tuple(hosts))

    def link_class(self, a: int, b: int) -> LinkClass:
        """Of the wire between two ranks."""
        slots = self.placement.slots
        return LinkClass(int(self.placement.cluster.link_class(slots[a], slots[b])))

    def slowest_link(self, ranks: Sequence[int], chain: bool) -> tuple[LinkClass, Link | None]:
        """The worst wire between neighbours of a ring (of a chain, where it is not closed).

        The link is None where no wire leads from one to the other.
        """
        ends = list(zip(ranks, [*ranks[1:], ranks[0]], strict=True))
        worst = max(self.link_class(a, b) for a, b in (ends[:-1] if chain else ends))
        return worst, None if worst is LinkClass.NONE else self.placement.cluster.link(worst)

    def rail(self, rank: int) -> int:
        return int(self.placement.cluster.rail_of[self.placement.slots[rank]])

    def gpu(self, rank: int) -> str:
        return self.placement.cluster.slot_name(int(self.placement.slots[rank]))

    def name(self, rank: int) -> str:
        """`rank 5 (pp 1, dp 0, tp 1) on web12 GPU 5, rail 5`.

        The host comes first where the cluster does not call the node by its name.
        """
        place, gpu = self.placement.layout.coordinates(rank), self.gpu(rank)
        host = self.hosts[rank]
        known = gpu.split(" GPU ")[0].split(".")[0] == host.split(".")[0]
        return (
            f"rank {rank} ({place}) on {gpu if known else f'{host}, {gpu}'}, rail {self.rail(rank)}"
        )

    def facts(self, rank: int) -> dict[str, object]:
        """The same for JSON."""
        return {
            "rank": rank,
            **self.placement.layout.coordinates(rank)._asdict(),
            "host": self.hosts[rank],
            "gpu": self.gpu(rank),
            "rail": self.rail(rank),
        }


# The rows of `bench comm`: which there are, who takes part in each, and what comes of them.


ALONE, TOGETHER = "alone", "together"
MOST_ALONE = 16  # groups of a dimension that are measured alone; of more, evenly spread ones
WORLD = "world"


class BenchRow(NamedTuple):
    """One operation at one size in the groups of one dimension.

    mode: `alone`, one group at a time while the others wait, or `together`, all at once.
    """

    dim: str
    operation: BenchOperation
    size: int
    mode: str

    @property
    def label(self) -> str:
        """`dp all-reduce sum, 4096 bytes, together`, for errors and progress."""
        size = f", {self.size} bytes" if self.size else ""
        own = ", training's way" if self.operation.own else ""
        return f"{self.dim} {self.operation.label}{size}{own}, {self.mode}"


@dataclass(frozen=True)
class Measured:
    """What one rank saw of one row: its group's number, the path, and its time of each call."""

    row: int
    group: int
    path: str
    seconds: tuple[float, ...]


def groups_of(layout: Layout, dim: str) -> list[list[int]]:
    return [list(range(layout.world_size))] if dim == WORLD else layout.groups(dim)


def dimensions(layout: Layout) -> tuple[list[str], dict[str, str]]:
    """(what to measure, and why each of the others is left out)."""
    left_out = {dim: f"{dim}=1: no groups" for dim in ("tp", "dp", "pp") if layout.size(dim) == 1}
    dims = [dim for dim in ("tp", "dp", "pp") if dim not in left_out]
    same = next((dim for dim in dims if layout.size(dim) == layout.world_size), None)
    if same is None:
        return [*dims, WORLD], left_out
    return dims, left_out | {WORLD: f"the same ranks as {same}"}


def sites(groups: ProcessGroups, device: torch.device, launch: LaunchConfig) -> dict[str, Site]:
    """This rank's group of each dimension; collective, as the stages may share memory."""
    found = {}
    for dim in dimensions(groups.layout)[0]:
        group, boxes = getattr(groups, dim), None
        if dim == "pp" and device.type == "cpu" and launch.shared_memory:
            boxes = SharedMemoryP2P.open(group.handle, group.index, group.size, launch.timeout_s)
        found[dim] = Site(group, device, boxes, chain=dim == "pp")
    return found


def all_rows(mine: dict[str, Site], sizes: Sequence[int], layout: Layout) -> list[BenchRow]:
    """Every row, the same list on every rank; collective over the world.

    Training's own way is a row where any rank has one that is not the backend's.
    """
    special = {
        (dim, operation, size)
        for dim, site in mine.items()
        for operation in operations(dim)
        for size in sizes
        if operation.own and site.path(operation, size) != site.backend
    }
    device = next(iter(mine.values())).device
    said = all_gather_json(list(special), dist.group.WORLD, device)
    special = {(dim, BenchOperation(*op), size) for of_rank in said for dim, op, size in of_rank}
    rows = []
    for dim in mine:
        modes = (ALONE, TOGETHER) if len(groups_of(layout, dim)) > 1 else (ALONE,)
        for operation in operations(dim):
            for size in (0,) if operation.name == "barrier" else dict.fromkeys(sizes):
                if not operation.own or (dim, operation, size) in special:
                    rows += [BenchRow(dim, operation, size, mode) for mode in modes]
    return rows


def turns(layout: Layout, row: BenchRow) -> list[list[int]]:
    """Numbers of the groups of the row's dimension that work at the same time, turn by turn."""
    count = len(groups_of(layout, row.dim))
    if row.mode == TOGETHER:
        return [list(range(count))]
    taken = min(count, MOST_ALONE)
    return [[turn * count // taken] for turn in range(taken)]


def result(row: BenchRow, calls: int, seen: list[list[Measured]], site: Site, where: Where) -> dict:
    """The row for JSON; `seen` holds what the ranks of each measured group saw, in their order.

    Seconds are those of the slowest group, and of a group those of the slowest rank: the median
    over the calls. Bytes are counted as nccl-tests does, and so are both bandwidths, in 1e9 B/s.
    """
    layout = where.placement.layout
    groups = groups_of(layout, row.dim)
    nbytes = site.whole_bytes(row.size) if row.size else 0
    name, n = row.operation.name, site.group.size
    found = []
    for members in seen:
        ranks = groups[members[0].group]
        kind, link = where.slowest_link(ranks, chain=site.chain and name == "send_recv")
        found.append(
            {
                "ranks": ranks,
                "path": members[0].path,
                "link": kind.label,
                "seconds": slowest_rank([m.seconds for m in members]),
                "priced_s": link and collective_time(name, n, nbytes, link),
                "rank_seconds": [statistics.median(m.seconds) for m in members],
            }
        )
    slowest = max(found, key=lambda group: group["seconds"])
    bandwidth = nbytes / slowest["seconds"] / 1e9
    return described(row) | {
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


def described(row: BenchRow) -> dict:
    """What identifies the row in JSON."""
    return {
        "dim": row.dim,
        "op": row.operation.name,
        "reduction": row.operation.reduction,
        "training_path": row.operation.own,
        "size": row.size,
        "mode": row.mode,
    }


# Measures the rows of `bench comm` on every rank: checked first, then timed within the budget.


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
