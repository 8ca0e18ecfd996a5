"""Finds the configured rank mapping, or the one with the least communication time.

A candidate is a tiling over a list of GPUs (`Base`). The search prices every order of the
dimensions over every base. It then varies the cheapest candidates, by moving each prime factor of
each dimension to every other place and by turning tilings into snakes (see `Tiling`), until no new
candidate is among the cheapest. Every candidate is priced in full.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING

import numpy as np

from parallel3d.blueprint.cluster import Cluster, Slots
from parallel3d.blueprint.collectives import Transfer
from parallel3d.blueprint.layout import DEFAULT_ORDER, DIMENSIONS, Layout
from parallel3d.blueprint.rank_mapping import RankMapping, Tiling, orders
from parallel3d.errors import UserError, nearest
from parallel3d.estimate.network import price_step
from parallel3d.topology.links import classify, refuse_unreachable

if TYPE_CHECKING:
    pass


SMALL = 4096  # with at most this many ranks, `WIDE` candidates are varied, else `NARROW`
WIDE, NARROW = 8, 3
# with more ranks, the search prices the orders but does not vary them, because each price takes
# 0.1 s
LARGE = 65_536


@dataclass(frozen=True)
class Base:
    """A list of GPUs to which ranks are assigned in order.

    Attributes:
        slots: the GPU at each position.
        domain: the usual number of positions per domain.
        note: a description, or "" for the GPUs in their given order.
    """

    slots: Slots
    domain: int
    note: str = ""


@dataclass(frozen=True)
class Candidate:
    """A tiling over a base, with its price.

    Attributes:
        seconds: predicted seconds of communication per step, or infinity if a wire is missing.
    """

    tiling: Tiling
    base: Base
    placement: RankMapping
    seconds: float
    is_default: bool

    def __str__(self) -> str:
        return self.placement.how

    @property
    def cost(self) -> float:
        return float(f"{self.seconds:.9g}")  # ignores rounding differences

    @cached_property
    def rank(self) -> tuple:
        """Returns the sort key.

        Lower cost sorts first. At equal cost, the default order comes first, then candidates with
        fewer digits, without a snake, over the GPUs in their given order, and in the usual order.
        """
        order = tuple(DIMENSIONS.index(d) for d, _ in self.tiling.digits)
        plain = (len(order), self.tiling.snake, bool(self.base.note))
        return self.cost, not self.is_default, *plain, order, str(self.tiling), self.base.note


def priced(
    cluster: Cluster,
    layout: Layout,
    transfers: list[Transfer],
    tiling: Tiling,
    base: Base,
    is_default: bool = False,
) -> Candidate:
    name = f"default order {tiling}" if is_default else str(tiling)
    if base.note:
        name += f", {base.note}"
    placement = RankMapping.tiled(cluster, layout, tiling, base.slots, name)
    price = price_step(placement, transfers)
    seconds = price.seconds if price.reachable else math.inf
    return Candidate(tiling, base, placement, seconds, is_default)


def search(
    cluster: Cluster, layout: Layout, transfers: list[Transfer], slots: Slots | None = None
) -> list[Candidate]:
    """Returns rank mappings of `layout` over `slots` (default: all GPUs), cheapest first.

    The result contains the default order over the slots in their given order. This order wins ties,
    followed by mappings with fewer digits. Among mappings with equal prices over one base, only the
    simplest is kept, because most of them differ only inside a domain. If no candidate has all
    needed wires, every candidate costs infinity.

    Raises ValueError for fewer slots than ranks.
    """
    bases = bases_of(cluster, layout, slots)
    found: dict[tuple[Tiling, str], Candidate] = {}

    def add(tiling: Tiling, base: Base) -> None:
        if (tiling, base.note) not in found:
            found[tiling, base.note] = priced(
                cluster, layout, transfers, tiling, base, is_default=not found
            )

    for base, tiling in itertools.product(bases, orders(layout)):  # the default comes first
        add(tiling, base)
    width = 0 if layout.world_size > LARGE else NARROW if layout.world_size > SMALL else WIDE
    climbed: set[tuple] = set()
    while new := [c for c in _sorted(found.values())[:width] if c.rank not in climbed]:
        for candidate in new:
            climbed.add(candidate.rank)
            if candidate.tiling.snake:
                continue
            snake = candidate.tiling.snaked(candidate.base.domain)
            for tiling in [*candidate.tiling.moved(), *([snake] if snake else [])]:
                add(tiling, candidate.base)
    first: dict[tuple, Candidate] = {}
    for candidate in _sorted(found.values()):
        first.setdefault((candidate.cost, candidate.base.note), candidate)
    return list(first.values())


def _sorted(candidates: Iterable[Candidate]) -> list[Candidate]:
    return sorted(candidates, key=lambda candidate: candidate.rank)


def bases_of(cluster: Cluster, layout: Layout, slots: Slots | None = None) -> list[Base]:
    """Returns the lists of GPUs to try: in the given order, sorted, and in segments of domains.

    `slots` (default: all GPUs) may be in any order, may have gaps and uneven nodes, and may be
    more than the layout needs.
    """
    given = np.arange(cluster.size) if slots is None else slots
    ordered = cluster.sorted_slots()
    ordered = ordered[np.isin(ordered, given)]
    domain = _usual_count(cluster.domain[given])
    found = [Base(given, domain)]
    if not (ordered[: layout.world_size] == given[: layout.world_size]).all():
        found.append(Base(ordered, domain, "sorted by domain"))
    return found + _segments(cluster, layout, ordered, domain)


def _usual_count(numbers: Slots) -> int:
    """Returns how often a number usually occurs (the mode), or the larger count on a tie."""
    sizes, times = np.unique(np.unique(numbers, return_counts=True)[1], return_counts=True)
    return int(max(zip(times, sizes, strict=True))[1])


def _segments(cluster: Cluster, layout: Layout, slots: Slots, domain: int) -> list[Base]:
    """Returns bases that fill each domain with whole blocks of ranks, if there are spare GPUs.

    Slurm's --segment does the same, for example with tp·cp·pp = 64 of a rack's 72 GPUs.
    """
    if slots.size <= layout.world_size or layout.world_size < domain:
        return []
    inner = layout.tp * layout.cp
    blocks = {layout.tp, inner, inner * layout.pp, inner * layout.dp}
    kept = {domain // block * block for block in blocks if block <= domain}
    _, first, number, count = np.unique(
        cluster.domain[slots], return_index=True, return_inverse=True, return_counts=True
    )
    place = np.arange(slots.size) - first[number]
    found = []
    for size in sorted(kept - {domain}, reverse=True):
        if domain >= cluster.gpus_per_node and size % cluster.gpus_per_node:
            continue  # a segment of Slurm consists of whole nodes
        chosen = slots[(count[number] >= size) & (place < size)]
        if chosen.size >= layout.world_size:
            found.append(Base(chosen, size, f"{size} GPUs of each domain"))
    return found


def place(
    wanted: str,
    cluster: Cluster,
    layout: Layout,
    transfers: list[Transfer],
    slots: Slots | None = None,
) -> RankMapping:
    """Returns the rank mapping that `placement=wanted` asks for.

    `default` means the default order over the given slots, and `auto` means the first result of
    `search`. An order or tiling is laid over the slots in the given order, sorted, or in equal
    segments of the domains, whichever is cheapest.

    Raises UserError if `wanted` is malformed or a group needs a wire that the cluster lacks.
    """
    if wanted == "auto":
        placement = search(cluster, layout, transfers, slots)[0].placement
    elif wanted == "default":
        tiling = orders(layout)[0]
        placement = RankMapping.tiled(cluster, layout, tiling, slots, "default order")
    else:
        tiling, bases = _readable(wanted, layout), bases_of(cluster, layout, slots)
        tried = (priced(cluster, layout, transfers, tiling, base) for base in bases)
        placement = _sorted(tried)[0].placement
    if cluster.oversubscription is None:
        refuse_unreachable(placement, classify(placement), transfers)
    return placement


def _readable(wanted: str, layout: Layout) -> Tiling:
    """Parses an order or a tiling. Raises UserError if `wanted` is neither."""
    try:
        return Tiling.parse(wanted, layout)
    except ValueError as error:
        used = [d for d in DEFAULT_ORDER.split("-") if layout.size(d) > 1]
        close = nearest(wanted, ("default", "auto", "file")) or "-".join(used)
        raise UserError(
            f"placement={wanted!r}: {error}; it must be default, auto, file, an order of "
            f"{', '.join(used) or 'the dimensions'}, or a tiling such as tp4-dp2-pp2-dp4 whose "
            f"factors multiply to the sizes; the nearest is placement={close}"
        ) from error
