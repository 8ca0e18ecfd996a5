"""Fits latency and bandwidth to measured times."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from parallel3d.estimate.network import ring_time
from parallel3d.topology.cluster.parts import Link, LinkClass

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
