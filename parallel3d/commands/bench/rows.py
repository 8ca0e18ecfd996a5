"""The rows of `bench comm`: which there are, who takes part in each, and what comes of them."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
import torch.distributed as dist

from parallel3d.comm.exchange import all_gather_json
from parallel3d.comm.process_groups import ProcessGroups
from parallel3d.commands.bench.operations import BenchOperation, Site, operations
from parallel3d.commands.bench.timing import slowest_rank
from parallel3d.commands.bench.where import Where
from parallel3d.config.schema import LaunchConfig
from parallel3d.pipeline.mailbox import SharedMemoryP2P
from parallel3d.sizes.bus import bus_factor
from parallel3d.topology.layout import Layout
from parallel3d.topology.price.costs import collective_time

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
