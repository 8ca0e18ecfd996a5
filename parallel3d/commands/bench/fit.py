"""Fits latency and bandwidth to measured times, and finds slow ranks and pairs."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from parallel3d.commands.bench.measure import Where
from parallel3d.estimate.network import ring_time
from parallel3d.topology.cluster.parts import Link, LinkClass
from parallel3d.topology.layout import DIMENSIONS, Layout

LIMIT = 30.0  # natural logarithm of microseconds, or ns a byte, that no link exceeds

# Their cost is a·α + b/B with a and b independent of the link, and training sends nearly all of its
# bytes by them.
FITTED = ("all_reduce", "all_gather", "reduce_scatter", "send_recv")


@dataclass(frozen=True)
class MeasuredOperation:
    """One measured operation: n ranks, `nbytes` as nccl-tests counts them."""

    op: str
    n: int
    nbytes: int
    seconds: float


@dataclass(frozen=True)
class Fit:
    """A fitted link; it prices half of the samples within a factor of `typical_factor`."""

    link: Link
    samples: int
    typical_factor: float

    def overrides(self, kind: LinkClass, rail_gb_per_s: float) -> dict[str, float]:
        """Returns the keys of `cluster`; the spine's bandwidth is given by its oversubscription."""
        speed, latency = _round(self.link.gb_per_s), _round(self.link.latency_us)
        if kind is not LinkClass.SPINE:
            return {
                f"cluster.{kind.label}_gb_per_s": speed,
                f"cluster.{kind.label}_latency_us": latency,
            }
        return {
            "cluster.oversubscription": max(1.0, _round(rail_gb_per_s / self.link.gb_per_s)),
            "cluster.spine_latency_us": latency,
        }


def fit(samples: Sequence[MeasuredOperation]) -> Fit | None:
    """Returns the link whose prices are off by the smallest factors; None without two sizes.

    Factors treat prices that are too high and too low alike, for all message sizes; relative
    differences would favour low prices. If larger messages take no longer, the bandwidth comes out
    as very high.
    """
    samples = [s for s in samples if s.op in FITTED and s.nbytes > 0]
    if len({s.nbytes for s in samples}) < 2:
        return None
    # Seconds per microsecond of latency, and per nanosecond a byte (1 / (GB/s)).
    each = np.array([[_cost(s, Link(1e30, 1.0)), _cost(s, Link(1.0, 0.0))] for s in samples])
    seconds = np.array([s.seconds for s in samples])

    def off(logarithms: np.ndarray) -> float:
        return float((np.log(each @ np.exp(logarithms) / seconds) ** 2).sum())

    latency, slowness = np.exp(_least(off, np.log((seconds[:, None] / each).min(axis=0))))
    link = Link(1 / float(slowness), float(latency))
    factors = [max(p := _cost(s, link) / s.seconds, 1 / p) for s in samples]
    return Fit(link, len(samples), statistics.median(factors))


def _least(off: Callable[[np.ndarray], float], start: np.ndarray) -> np.ndarray:
    """Minimises `off` by pattern search with shrinking steps along both axes and their diagonal, as
    latency and bandwidth trade off for messages of medium size."""
    best, least, step = start, off(start), 2.0
    directions = np.array([[1, 0], [-1, 0], [0, 1], [0, -1], [1, -1], [-1, 1]])
    while step > 1e-7:
        trial = min((best + step * d for d in directions), key=off)
        if off(trial) < least and np.abs(trial).max() < LIMIT:
            best, least = trial, off(trial)
        else:
            step /= 2
    return best


def _cost(sample: MeasuredOperation, link: Link) -> float:
    return ring_time(sample.op, sample.n, sample.nbytes, link)


def _round(value: float) -> float:
    """Rounds to three digits."""
    return float(f"{value:.3g}")


Pair = tuple[int, int]
Seconds = npt.NDArray[np.float64]


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


Slow = tuple[tuple[int, ...], float, float]  # ranks, seconds, the median's seconds


@dataclass(frozen=True)
class Judging:
    """Outlier detection.

    Attributes:
        pairs: as probed; classes: (pairs,) the `LinkClass` of each.
        sizes: bytes of each message size.
        outlier: multiple of the median that counts as slow.
        floor_s: and seconds above the median, at least.
    """

    pairs: list[Pair]
    classes: npt.NDArray[np.int64]
    sizes: tuple[int, ...]
    outlier: float
    floor_s: float

    def findings(self, times: Seconds) -> list[Finding]:
        """Finds, in times (sizes, pairs), slow ranks, and slow pairs of other ranks.

        Two ranks are a single pair without a comparison: nothing is found.
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
        """Yields ranks whose fastest pair is slow over every link class.

        A rank that is slow over one class only has a slow wire, found as a pair.
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
            slow = [one for one in evidence if one is not None]
            if len(slow) == len(evidence):
                yield (rank,), *max(slow, key=lambda e: e[0] / e[1])

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
        """Returns both times if `own` is slow against `median`."""
        slow = own > max(self.outlier * median, median + self.floor_s)
        return (own, median) if slow else None
