"""Which latency and bandwidth would have priced the measured times right."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from parallel3d.topology import collective_costs as costs
from parallel3d.topology.cluster import Link, LinkClass

# Of these the cost is a·α + b/B with a and b that do not depend on the link, and training sends
# nearly all of its bytes by them.
FITTED = {
    "all_reduce": costs.ring_all_reduce,
    "all_gather": costs.all_gather,
    "reduce_scatter": costs.reduce_scatter,
    "send_recv": lambda n, nbytes, link: costs.send_recv(nbytes, link),
}


@dataclass(frozen=True)
class Sample:
    """One measured operation: n ranks, `nbytes` as nccl-tests counts them."""

    op: str
    n: int
    nbytes: int
    seconds: float


@dataclass(frozen=True)
class Fit:
    """`link` prices half of the samples within a factor of `typical_factor` of the measured."""

    link: Link
    samples: int
    typical_factor: float

    def overrides(self, kind: LinkClass, rail_gb_per_s: float) -> dict[str, float]:
        """The keys of `cluster` that say so; the spine's speed is told by its oversubscription."""
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


def fit(samples: Sequence[Sample]) -> Fit | None:
    """The link that makes the squares of the relative errors least; None without two sizes.

    Small and large messages count alike: an error of 10 % is one wherever it is. A latency that
    would come out below zero is zero. Where larger messages take no longer, the bandwidth cannot
    be told: it is then what the fastest sample has at least.
    """
    samples = [s for s in samples if s.op in FITTED and s.nbytes > 0]
    if len({s.nbytes for s in samples}) < 2:
        return None
    # Seconds by microsecond of latency, and by (1 / (GB/s)).
    a = np.array([_cost(s, Link(1e30, 1.0)) for s in samples])
    b = np.array([_cost(s, Link(1.0, 0.0)) for s in samples])
    t = np.array([s.seconds for s in samples])
    columns = np.stack((a, b), axis=1) / t[:, None]
    latency, slowness = np.linalg.lstsq(columns, np.ones(len(t)), rcond=None)[0]
    if latency < 0:
        latency, slowness = 0.0, _alone(b / t)
    elif slowness <= 0:
        slowness = 1 / (b / t).max()
        latency = max(0.0, _alone(a / t, 1 - slowness * b / t))
    link = Link(1 / float(slowness), float(latency))
    off = [max(p := _cost(s, link) / s.seconds, 1 / p) for s in samples]
    return Fit(link, len(samples), statistics.median(off))


def _alone(column: np.ndarray, wanted: np.ndarray | float = 1.0) -> float:
    """The x for which column · x is closest to what is wanted."""
    return float((column * wanted).sum() / (column * column).sum())


def _cost(sample: Sample, link: Link) -> float:
    return FITTED[sample.op](sample.n, sample.nbytes, link)


def _round(value: float) -> float:
    """To three digits."""
    return float(f"{value:.3g}")
