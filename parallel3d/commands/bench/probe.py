"""Probe of pairs: finds slow ranks and pairs by exchanging messages, each pair alone.

A rank is slow if its fastest pair is slower than `outlier` times the median rank's; a pair is slow
if it is slower than `outlier` times the median pair while its ranks are not. Times are compared
within a link class. As a busy machine is slow at times, the fastest exchange of a pair counts, and
a finding must be confirmed after three pauses of growing length.
"""

from __future__ import annotations

import itertools
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import numpy as np
import numpy.typing as npt
import torch
import torch.distributed as dist

from parallel3d.comm.group import Group
from parallel3d.comm.process_groups import ProcessGroups
from parallel3d.commands.bench.measure import Where
from parallel3d.commands.bench.operations import send_receive, timed_calls
from parallel3d.device import accelerator
from parallel3d.topology.layout import DIMENSIONS, Layout

ROUNDS = 3  # over all pairs
PINGS = 5  # exchanges of a pair in one round
PAUSES_S = (0.2, 0.4, 0.8)  # before rounds that confirm a finding
ALL_PAIRS = 8  # largest group whose pairs are all probed; in larger ones only neighbours

Pair = tuple[int, int]
Seconds = npt.NDArray[np.float64]


def sizes_of(device: torch.device) -> tuple[int, ...]:
    """Returns bytes of the messages: one for latency, one for bandwidth."""
    return (4096, 32 << 20) if accelerator.is_accelerator(device) else (4096, 1 << 20)


def floor_of(device: torch.device) -> float:
    """Returns seconds below which a difference is the operating system's."""
    return 5e-6 if accelerator.is_accelerator(device) else 1e-3


@dataclass(frozen=True)
class Finding:
    """A slow rank (one entry in `ranks`) or pair (two).

    seconds, median_s: its exchange of `nbytes`, and the median of the others.
    """

    ranks: tuple[int, ...]
    nbytes: int
    seconds: float
    median_s: float

    @property
    def times(self) -> float:
        return self.seconds / self.median_s

    def is_slow(self, outlier: float, floor_s: float) -> bool:
        return self.seconds > max(outlier * self.median_s, self.median_s + floor_s)

    def sentence(self, where: Where) -> str:
        """Describes it by rank, coordinates, host, GPU, rail and groups."""
        slower = (
            f"{self.times:.1f} times the median, {self.seconds * 1e3:.3g} against "
            f"{self.median_s * 1e3:.3g} ms for {self.nbytes:,} bytes"
        )
        if len(self.ranks) == 1:
            groups = ", ".join(groups_of(where.placement.layout, self.ranks[0]))
            return f"slow rank: {where.name(self.ranks[0])}, of {groups}: {slower}"
        a, b = self.ranks
        wire = where.link_class(a, b).label
        return f"slow pair: {where.name(a)} and {where.name(b)}, by {wire}: {slower}"

    def facts(self, where: Where) -> dict[str, object]:
        """Returns plain data for JSON."""
        layout = where.placement.layout
        return {
            "kind": "rank" if len(self.ranks) == 1 else "pair",
            "ranks": [
                where.facts(rank) | {"groups": groups_of(layout, rank)} for rank in self.ranks
            ],
            "bytes": self.nbytes,
            "seconds": self.seconds,
            "median_s": self.median_s,
            "times_the_median": self.times,
        }


def groups_of(layout: Layout, rank: int) -> list[str]:
    """Formats `tp group [4, 5]`, … of a rank, without groups of one."""
    groups = {dim: layout.group_of(rank, dim) for dim in DIMENSIONS}
    return [f"{dim} group {shown(ranks)}" for dim, ranks in groups.items() if len(ranks) > 1]


def shown(ranks: list[int]) -> str:
    """Formats the ranks of a group, without the middle of long ones."""
    if len(ranks) <= 8:
        return str(ranks)
    return f"[{ranks[0]}, {ranks[1]}, … {ranks[-1]}]"


def findings_in(
    times: Seconds,
    pairs: list[Pair],
    classes: npt.NDArray[np.int64],
    sizes: tuple[int, ...],
    outlier: float,
    floor_s: float,
) -> list[Finding]:
    """Returns, from times (sizes, pairs), the slow ranks, and the slow pairs of other ranks.

    A rank is slow if its fastest pair is over every link class (`classes`, of each pair): over one
    class only, it has a slow wire, found as a pair. Fewer than three have no meaningful median.
    """
    found: dict[tuple[int, ...], Finding] = {}
    ends = np.array(pairs).reshape(-1, 2)
    for nbytes, seconds in zip(sizes, times, strict=True):
        verdicts: dict[int, list[Finding]] = {}
        for kind in np.unique(classes):
            of_kind = classes == kind
            fastest = {
                rank: float(seconds[of_kind & (ends == rank).any(axis=1)].min())
                for rank in np.unique(ends[of_kind]).tolist()
            }
            median = statistics.median(fastest.values())
            for rank, own in fastest.items() if len(fastest) > 2 else ():
                verdicts.setdefault(rank, []).append(Finding((rank,), nbytes, own, median))
        for rank, of_rank in verdicts.items():
            if all(one.is_slow(outlier, floor_s) for one in of_rank):
                found.setdefault((rank,), max(of_rank, key=lambda one: one.times))
    healthy = ~np.isin(ends, [rank for (rank,) in found]).any(axis=1)
    for nbytes, seconds in zip(sizes, times, strict=True):
        for kind in np.unique(classes[healthy]):
            of_kind = np.flatnonzero(healthy & (classes == kind))
            median = float(np.median(seconds[of_kind]))
            for i in of_kind if len(of_kind) > 2 else ():
                one = Finding(tuple(ends[i].tolist()), nbytes, float(seconds[i]), median)
                if one.is_slow(outlier, floor_s):
                    found.setdefault(one.ranks, one)
    return list(found.values())


def pairs_to_probe(layout: Layout) -> list[Pair]:
    """Returns all pairs of groups up to ALL_PAIRS ranks, and ring neighbours of larger ones and the
    world."""
    found = set(_ring(list(range(layout.world_size))))
    for dim in DIMENSIONS:
        for ranks in layout.groups(dim):
            small = len(ranks) <= ALL_PAIRS
            found.update(itertools.combinations(ranks, 2) if small else _ring(ranks))
    return sorted(found)


def _ring(ranks: list[int]) -> list[Pair]:
    ends = zip(ranks, [*ranks[1:], ranks[0]], strict=True)
    return [(min(pair), max(pair)) for pair in ends if pair[0] != pair[1]]


def turns(pairs: list[Pair], share: Callable[[int], object]) -> list[list[Pair]]:
    """Returns rounds of pairs that do not disturb each other.

    `share` returns what a rank occupies exclusively: on CPUs its host's cores, else only itself.
    """
    waiting, rounds = pairs, []
    while waiting:
        busy: set[object] = set()
        taken, left = [], []
        for pair in waiting:
            needs = {share(rank) for rank in pair}
            if busy & needs:
                left.append(pair)
            else:
                busy |= needs
                taken.append(pair)
        rounds.append(taken)
        waiting = left
    return rounds


def probe(
    where: Where, groups: ProcessGroups, device: torch.device, outlier: float
) -> tuple[list[Finding], dict[Pair, list[float]]]:
    """Returns (findings, seconds of each pair by size) on every rank; collective over the world.

    Args:
        groups: of the run; its own communicators are probed.
        outlier: multiple of the median that counts as slow.
    """
    pairs = pairs_to_probe(where.placement.layout)
    classes = np.array([where.link_class(a, b) for a, b in pairs])

    def share(rank: int) -> object:
        return rank if accelerator.is_accelerator(device) else where.hosts[rank]

    order, judging = turns(pairs, share), (outlier, floor_of(device))
    fastest = _rounds(pairs, order, groups, device)
    findings = findings_in(fastest, pairs, classes, sizes_of(device), *judging)
    for pause in PAUSES_S:
        if not findings:  # equal on every rank, as the times are
            break
        time.sleep(pause)
        fastest = np.minimum(fastest, _rounds(pairs, order, groups, device))
        findings = findings_in(fastest, pairs, classes, sizes_of(device), *judging)
    return findings, {pair: fastest[:, i].tolist() for i, pair in enumerate(pairs)}


def _rounds(
    pairs: list[Pair], order: list[list[Pair]], groups: ProcessGroups, device: torch.device
) -> Seconds:
    """Returns (sizes, pairs): the fastest exchange at its slower end; equal on every rank."""
    rank, sizes = dist.get_rank(), sizes_of(device)
    number = {pair: i for i, pair in enumerate(pairs)}
    buffers = [[torch.zeros(size // 4, device=device) for _ in range(2)] for size in sizes]
    mine = torch.zeros(ROUNDS, len(sizes), len(pairs), dtype=torch.float64)
    for turn in range(ROUNDS):
        for together in order:
            for a, b in together:
                if rank not in (a, b):
                    continue
                peer = b if rank == a else a
                by = _group_with(peer, groups)
                for size, (sent, received) in enumerate(buffers):
                    ping = partial(send_receive, sent, peer, received, peer, by)
                    seconds = timed_calls(ping, lambda: None, device, 1, PINGS)
                    mine[turn, size, number[a, b]] = min(seconds)
            dist.barrier()
    mine = mine.to(device)
    dist.all_reduce(mine, dist.ReduceOp.MAX)
    return mine.cpu().numpy().min(axis=0)


def _group_with(peer: int, groups: ProcessGroups) -> Group:
    """Returns the smallest group of this rank and `peer`, which may have its own wires."""
    dims = (groups.tp, groups.cp, groups.dp, groups.pp, groups.world)
    return next(g for g in dims if g.size > 1 and peer in g.ranks)
