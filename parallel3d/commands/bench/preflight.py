"""`preflight=true`: probes every wire of a run before its first step.

Pairs are probed as in `bench comm`. Then all groups of a dimension at once do their work of
training: all-reduces for tp and dp, messages between stages for pp. Slow wires are logged, a line
each, and written to preflight.json; the run goes on.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from parallel3d.comm.process_groups import ProcessGroups
from parallel3d.commands.bench.measure import WORLD, Where, groups_of, sites
from parallel3d.commands.bench.operations import (
    BenchOperation,
    Site,
    prepare,
    timed_calls,
)
from parallel3d.commands.bench.probe import PAUSES_S, floor_of, probe, shown
from parallel3d.config.schema import Config
from parallel3d.device import accelerator
from parallel3d.estimate.network import collective_time
from parallel3d.metrics.jsonl import write_json
from parallel3d.run.launch import Worker

NBYTES = 1 << 20
CALLS = 5


@dataclass(frozen=True)
class GroupTime:
    """Fastest of some calls in one group, at its slowest rank, and the price by the model."""

    dim: str
    ranks: tuple[int, ...]
    operation: BenchOperation
    nbytes: int
    seconds: float
    priced_s: float | None  # None: no wire leads through the group

    @property
    def times_the_price(self) -> float | None:
        return self.seconds / self.priced_s if self.priced_s else None

    def facts(self) -> dict[str, Any]:
        """Returns plain data for JSON."""
        return {
            "dim": self.dim,
            "ranks": list(self.ranks),
            "op": self.operation.name,
            "bytes": self.nbytes,
            "seconds": self.seconds,
            "priced_s": self.priced_s,
            "times_the_price": self.times_the_price,
        }

    def sentence(self, times: float, where: Where) -> str:
        """Describes the group, slow by a factor of `times`, and where its ranks sit."""
        ranks = self.ranks if len(self.ranks) <= 8 else (self.ranks[0], self.ranks[-1])
        return (
            f"slow group: {self.dim} group {shown(list(self.ranks))}: {self.operation.label} of "
            f"{self.nbytes:,} bytes takes {self.seconds * 1e3:.3g} ms, {times:.1f} times what its "
            f"price and the other {self.dim} groups let expect; "
            + "; ".join(where.name(rank) for rank in ranks)
        )


def preflight(
    config: Config, groups: ProcessGroups, worker: Worker, log: Callable[[str], None]
) -> None:
    """Probes, logs slow wires on rank 0 and writes preflight.json; collective over the world."""
    if groups.layout.world_size == 1:
        return
    worker.phase = "preflight"
    start = time.perf_counter()
    device = torch.device(worker.device)
    where = Where.find(config, worker, groups.layout)
    outlier = config.bench.outlier
    findings, pairs = probe(where, groups, device, outlier)
    times, slow = _probe_groups(groups, where, device, config)
    if worker.rank > 0:
        return
    known = {rank for finding in findings for rank in finding.ranks}
    lines = [finding.sentence(where) for finding in findings]
    lines += [g.sentence(by, where) for g, by in slow if not known & set(g.ranks)]
    if accelerator.is_accelerator(device):  # the cluster's speeds are those of GPUs
        lines += off_the_price(times, outlier)
    for line in lines:
        log(f"preflight: {line}")
    write_json(
        worker.run_dir / "preflight.json",
        {
            "seconds": time.perf_counter() - start,
            "outlier": outlier,
            "warnings": lines,
            "findings": [finding.facts(where) for finding in findings],
            "groups": [group.facts() for group in times],
            "pairs": [{"ranks": list(pair), "seconds": t} for pair, t in pairs.items()],
        },
    )


def _probe_groups(
    groups: ProcessGroups, where: Where, device: torch.device, config: Config
) -> tuple[list[GroupTime], list[tuple[GroupTime, float]]]:
    """Returns (times of every group, the slow groups) on every rank."""
    mine = {dim: site for dim, site in sites(groups, device, config.launch).items() if dim != WORLD}
    judging = (config.bench.outlier, floor_of(device))
    times = [group for dim, site in mine.items() for group in _fastest(site, dim, where)]
    slow = judge(times, *judging)
    for pause in PAUSES_S:
        if not slow:  # equal on every rank, as the times are
            break
        time.sleep(pause)
        again = [group for dim, site in mine.items() for group in _fastest(site, dim, where)]
        times = [min(both, key=lambda g: g.seconds) for both in zip(times, again, strict=True)]
        slow = judge(times, *judging)
    for site in mine.values():
        site.close()
    return times, slow


def _fastest(site: Site, dim: str, where: Where) -> list[GroupTime]:
    """Times all groups of the dimension at once; the same list on every rank."""
    layout = where.placement.layout
    groups = groups_of(layout, dim)
    name = "send_recv" if dim == "pp" else "all_reduce"
    operation = BenchOperation(name, None if dim == "pp" else "sum", own=True)
    call = prepare(operation, site, NBYTES)
    seconds = timed_calls(call.run, dist.barrier, site.device, 1, CALLS)
    by_call = torch.zeros(len(groups), CALLS, dtype=torch.float64)
    by_call[groups.index(list(site.group.ranks))] = torch.tensor(seconds, dtype=torch.float64)
    by_call = by_call.to(site.device)
    dist.all_reduce(by_call, dist.ReduceOp.MAX)
    fastest = by_call.min(dim=1).values.tolist()
    nbytes, found = site.whole_bytes(NBYTES), []
    for ranks, own in zip(groups, fastest, strict=True):
        _, link = where.slowest_link(ranks, chain=dim == "pp")
        priced = None if link is None else collective_time(name, len(ranks), nbytes, link)
        found.append(GroupTime(dim, tuple(ranks), operation, nbytes, own, priced))
    return found


def judge(groups: list[GroupTime], outlier: float, floor_s: float) -> list[tuple[GroupTime, float]]:
    """Returns groups that take more than `outlier` times the median multiple of the prices of their
    dimension, and by how much. Fewer than three groups have no meaningful median."""
    found = []
    for priced in _priced(groups):
        usual = float(np.median([g.seconds / price for g, price in priced]))
        for group, price in priced if len(priced) > 2 else ():
            times = group.seconds / price
            if times > outlier * usual and group.seconds > usual * price + floor_s:
                found.append((group, times / usual))
    return found


def off_the_price(groups: list[GroupTime], outlier: float) -> list[str]:
    """Returns a line for each dimension whose median group is much slower than its price."""
    lines = []
    for priced in _priced(groups):
        usual, (group, _) = np.median([g.seconds / price for g, price in priced]), priced[0]
        if usual > outlier:
            lines.append(
                f"{group.dim} groups: {group.operation.label} of {group.nbytes:,} bytes takes "
                f"{usual:.1f} times its price in the median group: the cluster's speeds or the "
                "network's settings are not what the model says; parallel3d bench comm shows more"
            )
    return lines


def _priced(groups: list[GroupTime]) -> list[list[tuple[GroupTime, float]]]:
    """Returns the groups that have a price, with it, by dimension."""
    by_dim: dict[str, list[tuple[GroupTime, float]]] = {}
    for group in groups:
        if group.priced_s:
            by_dim.setdefault(group.dim, []).append((group, group.priced_s))
    return list(by_dim.values())
