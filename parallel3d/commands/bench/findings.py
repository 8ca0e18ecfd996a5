"""Which exchanges are slow beside the others, and what is said of them."""

from __future__ import annotations

import statistics
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from parallel3d.commands.bench.where import Where
from parallel3d.topology.layout import Layout

Pair = tuple[int, int]
Seconds = npt.NDArray[np.float64]


@dataclass(frozen=True)
class Finding:
    """A slow rank (`ranks` has one) or pair (two).

    seconds, median_s: its exchange of `nbytes`, and the median that it was compared with.
    """

    ranks: tuple[int, ...]
    nbytes: int
    seconds: float
    median_s: float

    @property
    def times(self) -> float:
        return self.seconds / self.median_s

    def sentence(self, where: Where) -> str:
        """Names it by rank, coordinates, host, GPU, rail and groups."""
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
        """For JSON."""
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
    """`tp group [4, 5]`, … of a rank; groups of one are left out."""
    groups = {dim: layout.group_of(rank, dim) for dim in ("tp", "dp", "pp")}
    return [f"{dim} group {shown(ranks)}" for dim, ranks in groups.items() if len(ranks) > 1]


def shown(ranks: list[int]) -> str:
    """The ranks of a group, the middle of long ones left out."""
    if len(ranks) <= 8:
        return str(ranks)
    return f"[{ranks[0]}, {ranks[1]}, … {ranks[-1]}]"


Slow = tuple[tuple[int, ...], float, float]  # ranks, seconds, the median's seconds


@dataclass(frozen=True)
class Judging:
    """Which times are slow beside the others.

    Attributes:
        pairs: as probed; classes: (pairs,) the `LinkClass` of each.
        sizes: bytes of each message size.
        outlier: from how many times the median on something is slow.
        floor_s: by how many seconds at least.
    """

    pairs: list[Pair]
    classes: npt.NDArray[np.int64]
    sizes: tuple[int, ...]
    outlier: float
    floor_s: float

    def findings(self, times: Seconds) -> list[Finding]:
        """Of times (sizes, pairs): slow ranks, then slow pairs of ranks that are not.

        With two ranks there is one pair and nothing to compare it with: nothing is found.
        """
        found: dict[tuple[int, ...], Finding] = {}
        ends = np.array(self.pairs).reshape(-1, 2)
        for size, nbytes in enumerate(self.sizes):
            for ranks, seconds, median in self._slow_ranks(times[size], ends):
                found.setdefault(ranks, Finding(ranks, nbytes, seconds, median))
        slow = [rank for (rank,) in found]
        healthy = np.flatnonzero(~np.isin(ends, slow).any(axis=1))
        for size, nbytes in enumerate(self.sizes):
            for ranks, seconds, median in self._slow_pairs(times[size], ends, healthy):
                found.setdefault(ranks, Finding(ranks, nbytes, seconds, median))
        return list(found.values())

    def _slow_ranks(self, times: Seconds, ends: npt.NDArray[np.int64]) -> Iterator[Slow]:
        """By each rank's fastest pair, over every kind of wire that it has.

        A rank that is slow over one kind alone has a slow wire, and its pairs are named.
        """
        verdicts: dict[int, list[tuple[float, float] | None]] = {}
        for kind in np.unique(self.classes):
            of_kind = self.classes == kind
            fastest = {
                int(rank): float(times[of_kind & (ends == rank).any(axis=1)].min())
                for rank in np.unique(ends[of_kind])
            }
            if len(fastest) < 3:  # two ranks and the pair between them
                continue
            median = statistics.median(fastest.values())
            for rank, own in fastest.items():
                verdicts.setdefault(rank, []).append(self._evidence(own, median))
        for rank, evidence in verdicts.items():
            if all(evidence):
                yield (rank,), *max(evidence, key=lambda e: e[0] / e[1])

    def _slow_pairs(
        self, times: Seconds, ends: npt.NDArray[np.int64], healthy: npt.NDArray[np.int64]
    ) -> Iterator[Slow]:
        for kind in np.unique(self.classes[healthy]):
            of_kind = healthy[self.classes[healthy] == kind]
            if len(of_kind) < 3:
                continue
            median = float(np.median(times[of_kind]))
            for i in of_kind:
                if evidence := self._evidence(float(times[i]), median):
                    yield tuple(ends[i].tolist()), *evidence

    def _evidence(self, own: float, median: float) -> tuple[float, float] | None:
        """Both, if `own` is slow beside `median`."""
        slow = own > max(self.outlier * median, median + self.floor_s)
        return (own, median) if slow else None
