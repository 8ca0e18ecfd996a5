"""Probe of pairs: finds slow ranks and pairs by exchanging messages, each pair alone.

A rank is slow if its fastest pair is slower than `outlier` times the median rank's; a pair is slow
if it is slower than `outlier` times the median pair while its ranks are not. Times are compared
within a link class. As a busy machine is slow at times, the fastest exchange of a pair counts, and
a finding must be confirmed after three pauses of growing length.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Iterator
from functools import partial

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from parallel3d.comm.group import Group
from parallel3d.comm.process_groups import ProcessGroups
from parallel3d.commands.bench.fit import Finding, Judging, Pair, Seconds
from parallel3d.commands.bench.measure import Where
from parallel3d.commands.bench.operations import finisher
from parallel3d.device import accelerator
from parallel3d.topology.layout import DIMENSIONS, Layout

ROUNDS = 3  # over all pairs
PINGS = 5  # exchanges of a pair in one round
PAUSES_S = (0.2, 0.4, 0.8)  # before rounds that confirm a finding
ALL_PAIRS = 8  # largest group whose pairs are all probed; in larger ones only neighbours

Exchange = Callable[[Tensor, Tensor, int, Group], None]


def sizes_of(device: torch.device) -> tuple[int, ...]:
    """Returns bytes of the messages: one for latency, one for bandwidth."""
    return (4096, 32 << 20) if accelerator.is_accelerator(device) else (4096, 1 << 20)


def floor_of(device: torch.device) -> float:
    """Returns seconds below which a difference is the operating system's."""
    return 5e-6 if accelerator.is_accelerator(device) else 1e-3


def exchange(sent: Tensor, received: Tensor, peer: int, group: Group) -> None:
    """Exchanges a message with world rank `peer` of the group."""
    works = dist.batch_isend_irecv(
        [
            dist.P2POp(dist.isend, sent, peer, group.handle),
            dist.P2POp(dist.irecv, received, peer, group.handle),
        ]
    )
    for work in works:
        work.wait()


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
    where: Where,
    groups: ProcessGroups,
    device: torch.device,
    outlier: float,
    send: Exchange = exchange,
) -> tuple[list[Finding], dict[Pair, list[float]]]:
    """Returns (findings, seconds of each pair by size) on every rank; collective over the world.

    Args:
        groups: of the run; its own communicators are probed.
        outlier: multiple of the median that counts as slow.
        send: exchanges a message with a rank.
    """
    layout = where.placement.layout
    pairs = pairs_to_probe(layout)
    classes = np.array([where.link_class(a, b) for a, b in pairs])

    def share(rank: int) -> object:
        return rank if accelerator.is_accelerator(device) else where.hosts[rank]

    order = turns(pairs, share)
    judging = Judging(pairs, classes, sizes_of(device), outlier, floor_of(device))
    fastest = _rounds(pairs, order, groups, device, send)
    findings = judging.findings(fastest)
    for pause in PAUSES_S:
        if not findings:  # equal on every rank, as the times are
            break
        time.sleep(pause)
        fastest = np.minimum(fastest, _rounds(pairs, order, groups, device, send))
        findings = judging.findings(fastest)
    return findings, {pair: fastest[:, i].tolist() for i, pair in enumerate(pairs)}


def _rounds(
    pairs: list[Pair],
    order: list[list[Pair]],
    groups: ProcessGroups,
    device: torch.device,
    send: Exchange,
) -> Seconds:
    """Returns (sizes, pairs): the fastest exchange at its slower end; equal on every rank."""
    rank = dist.get_rank()
    number = {pair: i for i, pair in enumerate(pairs)}
    finish = finisher(device)
    sizes = sizes_of(device)
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
                    pings = _pings(finish, partial(send, sent, received, peer, by))
                    mine[turn, size, number[a, b]] = min(pings)
            dist.barrier()
    mine = mine.to(device)
    dist.all_reduce(mine, dist.ReduceOp.MAX)
    return mine.cpu().numpy().min(axis=0)


def _group_with(peer: int, groups: ProcessGroups) -> Group:
    """Returns the smallest group of this rank and `peer`, which may have its own wires."""
    dims = (groups.tp, groups.cp, groups.dp, groups.pp, groups.world)
    return next(g for g in dims if g.size > 1 and peer in g.ranks)


def _pings(finish: Callable[[], None], ping: Callable[[], object]) -> Iterator[float]:
    """Yields seconds of each exchange after a first one."""
    for number in range(PINGS + 1):
        start = time.perf_counter()
        ping()
        finish()
        if number > 0:
            yield time.perf_counter() - start
