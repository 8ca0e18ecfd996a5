"""Probes pairs and groups to find slow ranks and wires, for `bench comm` and `preflight=true`.

Pairs of ranks exchange messages without disturbing each other. A rank is slow if its fastest pair
takes more than `outlier` times as long as the fastest pair of the median rank. A pair is slow if it
takes more than `outlier` times as long as the median pair, although neither of its ranks is slow.
Times are compared within a link class.

Preflight probes every wire of a run before its first step. First it probes the pairs, then all
groups of a dimension at once with an operation that training uses: messages between stages for pp,
and all-reduces for other dimensions. It logs a line for each slow wire, writes preflight.json, and
lets the run continue.
"""

from __future__ import annotations

import itertools
import statistics
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
import torch.distributed as dist

from parallel3d.blueprint.cluster import Link
from parallel3d.blueprint.keys import ClusterConfig
from parallel3d.blueprint.layout import DIMENSIONS, Layout
from parallel3d.comm.group import Group
from parallel3d.comm.process_groups import ProcessGroups
from parallel3d.comm.timed_operations import (
    WORLD,
    Site,
    TimedOperation,
    prepare,
    send_receive,
    sites,
    timed_calls,
)
from parallel3d.device import accelerator
from parallel3d.faults.keys import OUTLIER
from parallel3d.metrics.jsonl import write_json
from parallel3d.run.cluster_view import ClusterView
from parallel3d.run.keys import LaunchConfig
from parallel3d.run.launch import Worker
from parallel3d.text import shortened

ROUNDS = 3  # number of passes over all pairs
PINGS = 5  # number of exchanges of a pair in one round
PAUSES_S = (0.2, 0.4, 0.8)  # pauses before the measurements that confirm a finding
ALL_PAIRS = 8  # largest group in which all pairs are probed, not only neighbours in the ring
GROUP_BYTES = 1 << 20  # size in bytes of the operation that probes a group
GROUP_CALLS = 5  # number of timed calls of this operation

Pair = tuple[int, int]
Seconds = npt.NDArray[np.float64]
# Prices a collective by its name, the ranks of its group, its bytes and the slowest link.
Price = Callable[[str, int, float, Link], float]


def sizes_of(device: torch.device) -> tuple[int, ...]:
    """Returns two sizes of messages in bytes: the first shows latency, the second bandwidth."""
    return (4096, 32 << 20) if accelerator.is_accelerator(device) else (4096, 1 << 20)


def floor_of(device: torch.device) -> float:
    """Returns the seconds below which a difference between times counts as noise."""
    return 5e-6 if accelerator.is_accelerator(device) else 1e-3


@dataclass(frozen=True)
class Finding:
    """A slow rank or a slow pair of ranks.

    Attributes:
        ranks: the slow rank, or both ranks of the pair.
        nbytes: the size of the exchanged messages.
        seconds: the time of the exchange.
        median_s: the median time over the ranks or pairs of its link class.
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

    def sentence(self, where: ClusterView) -> str:
        """Describes the finding: its ranks, where they are, and its times."""
        slower = (
            f"{self.times:.1f} times the median ({self.seconds * 1e3:.3g} ms instead of "
            f"{self.median_s * 1e3:.3g} ms for {self.nbytes:,} bytes)"
        )
        if len(self.ranks) == 1:
            groups = ", ".join(where.placement.layout.named_groups(self.ranks[0]))
            return f"slow rank: {where.name(self.ranks[0])}, in {groups}: {slower}"
        a, b = self.ranks
        wire = where.link_class(a, b).label
        return f"slow pair: {where.name(a)} and {where.name(b)}, by {wire}: {slower}"

    def facts(self, where: ClusterView) -> dict[str, object]:
        """Returns plain data for JSON."""
        layout = where.placement.layout
        return {
            "kind": "rank" if len(self.ranks) == 1 else "pair",
            "ranks": [
                where.facts(rank) | {"groups": layout.named_groups(rank)} for rank in self.ranks
            ],
            "bytes": self.nbytes,
            "seconds": self.seconds,
            "median_s": self.median_s,
            "times_the_median": self.times,
        }


def findings_in(
    times: Seconds,
    pairs: list[Pair],
    classes: npt.NDArray[np.int64],
    sizes: tuple[int, ...],
    outlier: float,
    floor_s: float,
) -> list[Finding]:
    """Returns the slow ranks, and the slow pairs among the other ranks.

    A rank is slow if its fastest pair is slow in every link class. If it is slow in some classes
    only, one of its wires is slow, which is found as a pair. A class of fewer than three ranks or
    pairs is not judged, because its median means nothing.

    Args:
        times: (sizes, pairs) the seconds of each exchange.
        pairs: the pairs of ranks.
        classes: (pairs,) the link class of each pair.
        sizes: the sizes of the messages in bytes.
        outlier: the multiple of the median above which a time is slow.
        floor_s: a time up to this many seconds above the median is not slow.
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
    """Returns the pairs to probe, sorted.

    These are all pairs in groups of up to ALL_PAIRS ranks, and the ring neighbours in larger groups
    and in the world.
    """
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
    """Divides the pairs into rounds, so that the pairs of one round do not disturb each other.

    `share` returns the resource that a rank needs exclusively: on CPUs the cores of its host, on
    GPUs only the rank itself.
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


def confirmed(measure: Callable[[], Seconds], judge: Callable[[Seconds], list]) -> Seconds:
    """Returns the elementwise minimum of repeated measurements.

    While `judge` finds something slow in the minimum, the measurement is repeated after the next
    pause of PAUSES_S, so that a machine that was only briefly busy is not reported. The times must
    be equal on every rank, so that all ranks repeat together.
    """
    fastest = measure()
    for pause in PAUSES_S:
        if not judge(fastest):
            break
        time.sleep(pause)
        fastest = np.minimum(fastest, measure())
    return fastest


def probe(
    where: ClusterView, groups: ProcessGroups, device: torch.device, outlier: float
) -> tuple[list[Finding], dict[Pair, list[float]]]:
    """Probes all pairs. The call is collective over the world.

    Returns, on every rank, the findings, and the seconds of each pair for both message sizes.

    Args:
        where: the rank mapping and the hosts.
        groups: the groups of the run, whose communicators are probed.
        device: this rank's device.
        outlier: the multiple of the median above which a time is slow.
    """
    pairs = pairs_to_probe(where.placement.layout)
    classes = np.array([where.link_class(a, b) for a, b in pairs])

    def share(rank: int) -> object:
        return rank if accelerator.is_accelerator(device) else where.hosts[rank]

    def judge(seconds: Seconds) -> list[Finding]:
        return findings_in(seconds, pairs, classes, sizes_of(device), outlier, floor_of(device))

    fastest = confirmed(partial(_rounds, pairs, turns(pairs, share), groups, device), judge)
    return judge(fastest), {pair: fastest[:, i].tolist() for i, pair in enumerate(pairs)}


def _rounds(
    pairs: list[Pair], order: list[list[Pair]], groups: ProcessGroups, device: torch.device
) -> Seconds:
    """Returns the seconds of the fastest exchange of each pair, (sizes, pairs), on every rank.

    The time of the slower rank of a pair counts. `order` contains the rounds of pairs (`turns`).
    """
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
    """Returns the smallest group of this rank and `peer`, whose communicator is to be probed."""
    dims = (groups.tp, groups.cp, groups.dp, groups.pp, groups.world)
    return next(g for g in dims if g.size > 1 and peer in g.ranks)


@dataclass(frozen=True)
class ProbedGroup:
    """A group in which an operation was timed, with its price.

    Attributes:
        dim: the dimension of the group.
        ranks: the ranks of the group.
        operation: the operation.
        nbytes: the size of the operation.
        seconds: the time of the fastest call at the slowest rank.
        priced_s: the seconds that the model of the cluster predicts, or None if a wire is missing.
    """

    dim: str
    ranks: tuple[int, ...]
    operation: TimedOperation
    nbytes: int
    seconds: float
    priced_s: float | None

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

    def sentence(self, times: float, where: ClusterView) -> str:
        """Describes a group that is slow by a factor of `times`, and where its ranks are."""
        ranks = self.ranks if len(self.ranks) <= 8 else (self.ranks[0], self.ranks[-1])
        return (
            f"slow group: {self.dim} group {shortened(self.ranks)}: {self.operation.label} of "
            f"{self.nbytes:,} bytes takes {self.seconds * 1e3:.3g} ms, {times:.1f} times as long "
            f"as its price and the other {self.dim} groups suggest; "
            + "; ".join(where.name(rank) for rank in ranks)
        )


def preflight(
    groups: ProcessGroups,
    worker: Worker,
    log: Callable[[str], None],
    cluster: ClusterConfig,
    launch: LaunchConfig,
    price: Price,
    outlier: float = OUTLIER,
) -> None:
    """Probes pairs and groups, after which rank 0 logs slow wires and writes preflight.json.

    The call is collective over the world. `outlier` is the multiple of the median above which a
    time is slow, `price` tells the expected times of the groups, and `log` receives the lines.
    """
    if groups.layout.world_size == 1:
        return
    worker.phase = "preflight"
    start = time.perf_counter()
    device = torch.device(worker.device)
    where = ClusterView.find(cluster, worker, groups.layout)
    findings, pairs = probe(where, groups, device, outlier)
    times, slow = _probe_groups(groups, where, device, launch, price, outlier)
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
    groups: ProcessGroups,
    where: ClusterView,
    device: torch.device,
    launch: LaunchConfig,
    price: Price,
    outlier: float,
) -> tuple[list[ProbedGroup], list[tuple[ProbedGroup, float]]]:
    """Returns, on every rank, the times of all groups, and the slow groups with their factors."""
    mine = {dim: site for dim, site in sites(groups, device, launch).items() if dim != WORLD}

    def timed(fastest: Seconds) -> list[ProbedGroup]:
        seconds, found = iter(fastest.tolist()), []
        for dim, site in mine.items():
            work, nbytes = work_of(dim), site.whole_bytes(GROUP_BYTES)
            for ranks in where.placement.layout.groups(dim):
                _, link = where.slowest_link(ranks, chain=site.chain)
                priced = None if link is None else price(work.name, len(ranks), nbytes, link)
                found.append(ProbedGroup(dim, tuple(ranks), work, nbytes, next(seconds), priced))
        return found

    def judged(fastest: Seconds) -> list[tuple[ProbedGroup, float]]:
        return judge(timed(fastest), outlier, floor_of(device))

    layout = where.placement.layout
    fastest = confirmed(
        lambda: np.concatenate([_fastest(site, dim, layout) for dim, site in mine.items()]), judged
    )
    for site in mine.values():
        site.close()
    return timed(fastest), judged(fastest)


def work_of(dim: str) -> TimedOperation:
    """Returns the operation, on training's own path, by which groups of `dim` are probed."""
    if dim == "pp":
        return TimedOperation("send_recv", own=True)
    return TimedOperation("all_reduce", "sum", own=True)


def _fastest(site: Site, dim: str, layout: Layout) -> Seconds:
    """Returns the seconds of the fastest call in each group, (groups,), on every rank.

    All groups of the dimension work at once. The slowest rank of a group counts.
    """
    groups = layout.groups(dim)
    call = prepare(work_of(dim), site, GROUP_BYTES)
    seconds = timed_calls(call.run, dist.barrier, site.device, 1, GROUP_CALLS)
    by_call = torch.zeros(len(groups), GROUP_CALLS, dtype=torch.float64)
    by_call[groups.index(list(site.group.ranks))] = torch.tensor(seconds, dtype=torch.float64)
    by_call = by_call.to(site.device)
    dist.all_reduce(by_call, dist.ReduceOp.MAX)
    return by_call.cpu().numpy().min(axis=1)


def judge(
    groups: list[ProbedGroup], outlier: float, floor_s: float
) -> list[tuple[ProbedGroup, float]]:
    """Returns the slow groups and the factor by which each of them is slow.

    A group is expected to take its price times the median ratio of time to price in its dimension.
    It is slow if it takes more than `outlier` times as long, and more than `floor_s` seconds
    longer. Dimensions with fewer than three groups are not judged, because their median means
    nothing.
    """
    found = []
    for usual, priced in _by_dim(groups):
        for group, price in priced if len(priced) > 2 else ():
            one = Finding(group.ranks, group.nbytes, group.seconds, usual * price)
            if one.is_slow(outlier, floor_s):
                found.append((group, one.times))
    return found


def off_the_price(groups: list[ProbedGroup], outlier: float) -> list[str]:
    """Returns a line for each dimension whose median group exceeds `outlier` times its price."""
    return [
        f"{priced[0][0].dim} groups: {priced[0][0].operation.label} of {priced[0][0].nbytes:,} "
        f"bytes takes {usual:.1f} times its price in the median group: the cluster's speeds or the "
        "network's settings differ from those assumed; parallel3d bench comm shows more"
        for usual, priced in _by_dim(groups)
        if usual > outlier
    ]


def _by_dim(groups: list[ProbedGroup]) -> Iterator[tuple[float, list[tuple[ProbedGroup, float]]]]:
    """Yields, for each dimension, the median ratio of time to price, and the priced groups."""
    for dim in dict.fromkeys(group.dim for group in groups):
        priced = [(g, g.priced_s) for g in groups if g.dim == dim and g.priced_s]
        if priced:
            yield float(np.median([g.seconds / price for g, price in priced])), priced
