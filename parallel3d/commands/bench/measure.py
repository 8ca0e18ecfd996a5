"""Rows of `bench comm`: the operations of each dimension, their measurement, and their ranks."""

from __future__ import annotations

import socket
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from parallel3d.comm.exchange import all_gather_json, gather_json
from parallel3d.comm.process_groups import ProcessGroups
from parallel3d.commands.bench.operations import (
    REDUCTIONS,
    BenchOperation,
    CallCounts,
    Site,
    operations,
    prepare,
    slowest_rank,
    timed_calls,
)
from parallel3d.config.schema import Config, LaunchConfig
from parallel3d.device import accelerator
from parallel3d.estimate.network import bus_factor, collective_time
from parallel3d.pipeline.p2p import SharedP2P
from parallel3d.run.launch import Worker
from parallel3d.topology.cluster.parts import Link, LinkClass, cluster_from_config
from parallel3d.topology.layout import DEFAULT_ORDER, Layout
from parallel3d.topology.tiling import RankMapping, Tiling


@dataclass(frozen=True)
class Where:
    """Rank mapping of the run, and the host name of every rank."""

    placement: RankMapping
    hosts: tuple[str, ...]

    @classmethod
    def find(cls, config: Config, worker: Worker, layout: Layout) -> Where:
        """Gathers all hosts; collective over the world.

        Without a rank mapping of the worker, ranks are in order on the configured cluster. Raises
        UserError if that has too few GPUs.
        """
        placement = worker.placement
        if placement is None:
            cluster = cluster_from_config(config.cluster, layout.world_size)
            placement = RankMapping.tiled(cluster, layout, Tiling.parse(DEFAULT_ORDER, layout))
        device = torch.device(worker.device)
        hosts = all_gather_json(socket.gethostname(), dist.group.WORLD, device)
        return cls(placement, tuple(hosts))

    def link_class(self, a: int, b: int) -> LinkClass:
        """Returns the class of the link between two ranks."""
        slots = self.placement.slots
        return LinkClass(int(self.placement.cluster.link_class(slots[a], slots[b])))

    def slowest_link(self, ranks: Sequence[int], chain: bool) -> tuple[LinkClass, Link | None]:
        """Returns the worst link between neighbours of a ring or chain; None: there is no wire."""
        ends = list(zip(ranks, [*ranks[1:], ranks[0]], strict=True))
        worst = max(self.link_class(a, b) for a, b in (ends[:-1] if chain else ends))
        return worst, None if worst is LinkClass.NONE else self.placement.cluster.link(worst)

    def name(self, rank: int) -> str:
        """Formats `rank 5 (pp 1, dp 0, tp 1) on web12 GPU 5, rail 5`, with the host in front if the
        cluster has another name for the node."""
        place, facts, host = self.placement.layout.named(rank), self.facts(rank), self.hosts[rank]
        gpu = str(facts["gpu"])
        if gpu.split(" GPU ")[0].split(".")[0] != host.split(".")[0]:
            gpu = f"{host}, {gpu}"
        return f"rank {rank} ({place}) on {gpu}, rail {facts['rail']}"

    def facts(self, rank: int) -> dict[str, object]:
        """Returns plain data for JSON."""
        cluster, slot = self.placement.cluster, int(self.placement.slots[rank])
        return {
            "rank": rank,
            **self.placement.layout.coordinates(rank)._asdict(),
            "host": self.hosts[rank],
            "gpu": cluster.slot_name(slot),
            "rail": int(cluster.rail_of[slot]),
        }


ALONE, TOGETHER = "alone", "together"
MOST_ALONE = 16  # groups of a dimension that are measured alone, evenly spread
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
        """Formats `dp all-reduce sum, 4096 bytes, together`."""
        size = f", {self.size} bytes" if self.size else ""
        own = ", training's way" if self.operation.own else ""
        return f"{self.dim} {self.operation.label}{size}{own}, {self.mode}"

    def facts(self) -> dict[str, Any]:
        """Returns the identity of the row for JSON."""
        name, reduction, own = self.operation
        named = {"dim": self.dim, "op": name, "reduction": reduction, "training_path": own}
        return named | {"size": self.size, "mode": self.mode}


def groups_of(layout: Layout, dim: str) -> list[list[int]]:
    return [list(range(layout.world_size))] if dim == WORLD else layout.groups(dim)


def dimensions(layout: Layout) -> tuple[list[str], dict[str, str]]:
    """Returns (dimensions to measure, reason why each of the others is left out)."""
    split = ("cp", "dp_cp") if layout.cp > 1 else ("dp",)
    left_out = {dim: f"{dim}=1: no groups" for dim in ("tp", "dp", "pp") if layout.size(dim) == 1}
    if layout.cp > 1 == layout.dp:
        left_out["dp_cp"] = "the same ranks as cp"
    elif layout.cp > 1:
        left_out["dp"] = "it sends a token count, and dp_cp the gradients"
    dims = [dim for dim in ("tp", *split, "pp") if dim not in left_out]
    same = next((dim for dim in dims if layout.size(dim) == layout.world_size), None)
    if same is None:
        return [*dims, WORLD], left_out
    return dims, left_out | {WORLD: f"the same ranks as {same}"}


def sites(groups: ProcessGroups, device: torch.device, launch: LaunchConfig) -> dict[str, Site]:
    """Returns this rank's group of each dimension; collective, as stages may share memory."""
    found = {}
    for dim in dimensions(groups.layout)[0]:
        group, boxes = getattr(groups, dim), None
        if dim == "pp" and device.type == "cpu" and launch.shared_memory:
            boxes = SharedP2P.open(group, launch.timeout_s)
        found[dim] = Site(group, device, boxes, chain=dim == "pp")
    return found


def all_rows(mine: dict[str, Site], sizes: Sequence[int], layout: Layout) -> list[BenchRow]:
    """Returns every row, equal on every rank; collective over the world.

    Training's path is a row if any rank has one that is not the backend's.
    """
    every = [
        BenchRow(dim, operation, size, mode)
        for dim in mine
        for operation in operations(dim)
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
    return [row for row, own in zip(every, special, strict=True) if own or not row.operation.own]


def turns(layout: Layout, row: BenchRow) -> list[list[int]]:
    """Returns the numbers of the groups that work at the same time, turn by turn."""
    count = len(groups_of(layout, row.dim))
    if row.mode == TOGETHER:
        return [list(range(count))]
    taken = min(count, MOST_ALONE)
    return [[turn * count // taken] for turn in range(taken)]


Timing = tuple[str, list[float]] | None  # path and seconds of each call; None: not measured here


def result(
    row: BenchRow, calls: int, by_rank: Sequence[Timing], site: Site, where: Where
) -> dict[str, Any]:
    """Returns the row for JSON.

    Seconds are the median over calls of the slowest rank, in the slowest group. Bytes and
    bandwidths (busbw: bus_gb_per_s, 1e9 B/s) are nccl-tests'.
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


Progress = Callable[[str, int, int], None]  # (description, rows done, of rows)


@dataclass
class Measurement:
    """Measures all rows on one rank: checks, then times within a budget; methods are collective.

    Attributes:
        rows: equal on every rank.
        sites: this rank's groups.
        warmup, calls: of each row, as far as `budget_s` from now allows.
        progress: called before each row.
    """

    rows: list[BenchRow]
    sites: dict[str, Site]
    where: Where
    warmup: int
    calls: int
    budget_s: float
    progress: Progress = lambda row, done, of: None
    rows_cut: int = 0

    def __post_init__(self) -> None:
        self.ends = time.perf_counter() + self.budget_s
        self.layout = self.where.placement.layout
        self.device = next(iter(self.sites.values())).device
        self.refused = self._why_no_average()

    def results(self) -> Iterator[tuple[str, list[dict]]]:
        """Yields (dimension, its rows for JSON on rank 0, else none).

        Raises WrongResult on a rank that finds a wrong number.
        """
        averages = [row for row in self.rows if row.operation.reduction == "avg" and self.refused]
        offered = [row for row in self.rows if row not in averages]
        plan = self._plan(offered)
        for dim, site in self.sites.items():
            of_dim = [row for row in offered if row.dim == dim]
            calls, mine = [], []
            for row in of_dim:
                self.progress(row.label, len(offered) + plan.row, 2 * len(offered))
                warmup, timed = self._agreed(plan)
                start = time.perf_counter()
                mine.append(self._measure(row, warmup, timed))
                plan.done(time.perf_counter() - start)
                calls.append(timed)
            by_row = zip(*gather_json(mine, dist.group.WORLD, self.device), strict=True)
            done = [
                result(row, count, seen, site, self.where)
                for row, count, seen in zip(
                    of_dim, calls, by_row, strict=False
                )  # none but on rank 0
            ]
            refused = [row.facts() | {"not_offered": self.refused} for row in averages]
            yield dim, done + [row for row in refused if row["dim"] == dim] if done else []
        self.rows_cut = plan.cut

    def _why_no_average(self) -> str | None:
        """Returns None if the backend can average (gloo cannot before torch 2.13)."""
        site = next(iter(self.sites.values()))
        try:
            dist.all_reduce(torch.ones(1, device=self.device), REDUCTIONS["avg"], site.group.handle)
        except (RuntimeError, ValueError) as error:  # refused before anything is sent
            if "AVG" not in str(error):
                raise
            return f"{site.backend} of torch {torch.__version__} has no AVG"
        return None

    def _plan(self, rows: list[BenchRow]) -> CallCounts:
        """Calls every operation once, all groups together, to connect and to estimate seconds.

        A row whose groups take turns is estimated to take as many times as long.
        """
        first: dict[tuple, float] = {}
        for number, row in enumerate(rows):
            key = row[:3]
            if key not in first:
                self.progress(f"first call of {row.label}", number, 2 * len(rows))
                call = prepare(row.operation, self.sites[row.dim], row.size)
                dist.barrier()
                start = time.perf_counter()
                call.run()
                accelerator.synchronize(self.device)
                dist.barrier()
                first[key] = time.perf_counter() - start
        estimates = [first[row[:3]] * len(turns(self.layout, row)) for row in rows]
        return CallCounts(estimates, self.ends - time.perf_counter(), self.warmup, self.calls)

    def _agreed(self, plan: CallCounts) -> tuple[int, int]:
        """Returns rank 0's plan for the next row on every rank."""
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
