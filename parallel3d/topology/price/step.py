"""What the communication of one step costs under a placement.

The model, on half a page. It is the α–β model (a message takes latency + bytes / bandwidth), with
bandwidth shared where flows meet:

1. The groups of one dimension all communicate at once, the dimensions one after another. Nothing
   is hidden behind compute, so the seconds are an upper bound of what a step may wait.
2. A flow is what one rank sends to its neighbour. Inside a domain it has the GPU's NVLink for
   itself (NVSwitch does not block). Between domains it has its GPU's NIC, divided by the flows that
   leave or enter that NIC at once. Over the spine it also shares the leaf switch's uplinks: the
   NICs under the leaf × their bandwidth / oversubscription, divided by the flows going up (or
   down) there. Few flows are not slowed by a thin spine; all of them at once are.
3. A ring runs at its slowest flow, and a dimension at its slowest ring: lowest bandwidth and
   highest latency of any pair. A tree, for small messages, is given the same wire.
4. In two levels (reduce-scatter inside the domain, all-reduce along the rails with 1/inner of the
   bytes, all-gather inside) the outer rings all run at once and share as in 2.
5. The stages of a pipeline are a chain of ranks. Where they go round in loops, its last rank sends
   to its first, in all rounds but one, at the same time as the others to their next.
6. For each transfer the cheapest of ring, tree and two levels counts, and is named. A ring over a
   pair without a wire costs infinity.

Sources: `costs` for the formulas; Wang et al. 2023 (arXiv 2307.12169) for rails and
domains; the DGX SuperPOD reference architecture for leaf switches, units and uplinks.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING

import numpy as np

from parallel3d.sizes.bus import bus_factor
from parallel3d.topology.cluster.parts import Cluster, Link, LinkClass
from parallel3d.topology.price import costs
from parallel3d.topology.price.flows import Fabric, Flows, Port, Ports, flows_of
from parallel3d.topology.price.links import Wiring, inner_size, members
from parallel3d.topology.tiling import RankMapping

if TYPE_CHECKING:
    from parallel3d.sizes.transfer import Transfer

ALGORITHMS = ("ring", "tree", "hierarchical")
IN_TWO_LEVELS = ("all_reduce", "reduce_scatter", "all_gather")


@dataclass(frozen=True)
class Paths:
    """The wires of one dimension: `flat` for rings and trees, `outer` between domains."""

    n: int
    flat: Link | None
    inner: int = 1
    outer: Link | None = None

    @property
    def domains(self) -> int:
        return self.n // self.inner


@dataclass(frozen=True)
class PricedTransfer:
    transfer: Transfer
    seconds: float  # of all `count` of them
    algorithm: str  # ring, tree, hierarchical, send_recv, or "no path"


@dataclass(frozen=True)
class DimPrice:
    """One dimension's share of a step. `nbytes`: sent by all ranks, on each class."""

    dim: str
    paths: Paths
    transfers: tuple[PricedTransfer, ...]
    nbytes: dict[LinkClass, float]

    @property
    def seconds(self) -> float:
        return math.fsum(t.seconds for t in self.transfers)

    @property
    def algorithms(self) -> tuple[str, ...]:
        return tuple(dict.fromkeys(t.algorithm for t in self.transfers))


@dataclass(frozen=True)
class StepPrice:
    """One step's communication: `dims` in the order of the transfers; ports None where unused."""

    dims: dict[str, DimPrice]
    nic: Port | None
    leaf_up: Port | None

    @cached_property
    def seconds(self) -> float:
        return math.fsum(d.seconds for d in self.dims.values())

    @property
    def reachable(self) -> bool:
        """Whether all neighbours have a wire between them, as the groups' rings need it.

        `world` carries a few scalars, and any algorithm and route will do.
        """
        return all(d.paths.flat is not None for d in self.dims.values() if d.dim != "world")

    @property
    def nbytes(self) -> dict[LinkClass, float]:
        """Bytes that all ranks send in a step, on each class."""
        return {
            k: math.fsum(d.nbytes[k] for d in self.dims.values())
            for k in LinkClass
            if any(d.nbytes.get(k) for d in self.dims.values())
        }


def price_transfer(
    transfer: Transfer, paths: Paths, cluster: Cluster, algorithms: tuple[str, ...] = ALGORITHMS
) -> PricedTransfer:
    """The cheapest of the allowed algorithms for one kind of transfer."""
    n, nbytes, link, op = paths.n, transfer.nbytes, paths.flat, transfer.op
    options = {}
    if link is not None and op == "all_reduce":
        options["ring"] = costs.ring_all_reduce(n, nbytes, link)
        if "tree" in algorithms:
            options["tree"] = costs.tree_all_reduce(n, nbytes, link)
    elif link is not None:
        name = "send_recv" if op == "send_recv" else "ring"
        options[name] = costs.collective_time(op, n, nbytes, link)
    if op in IN_TWO_LEVELS and paths.outer is not None and "hierarchical" in algorithms:
        options["hierarchical"] = _two_levels(op, nbytes, paths, cluster.nvlink)
    if not options:
        return PricedTransfer(transfer, math.inf, "no path")
    name = min(options, key=lambda k: options[k])
    return PricedTransfer(transfer, options[name] * transfer.count, name)


def _two_levels(op: str, nbytes: float, paths: Paths, nvlink: Link) -> float:
    """Inside the domain with all bytes, between domains with 1/inner of them."""
    if op == "all_reduce":
        return costs.hierarchical_all_reduce(
            paths.inner, paths.domains, nbytes, nvlink, paths.outer
        )
    inside = costs.collective_time(op, paths.inner, nbytes, nvlink)
    return inside + costs.collective_time(op, paths.domains, nbytes / paths.inner, paths.outer)


def price_step(
    placement: RankMapping,
    transfers: list[Transfer],
    *,
    fabric: Fabric | None = None,
    algorithms: tuple[str, ...] = ALGORITHMS,
) -> StepPrice:
    """Seconds a step per dimension, bytes per link class, busiest ports; the model is above.

    `transfers` is what one rank does, the busiest of its kind; those of pp are what passes between
    two neighbours, half of it each way. Dimensions of size one are left out. `algorithms` limits
    what a reduction may use, `("ring",)` for one that has nothing else.
    """
    fabric = fabric or Fabric(placement.cluster)
    wiring = Wiring.of(placement.cluster, placement.slots)
    ports = Ports(fabric)
    dims = {}
    for dim in dict.fromkeys(t.dim for t in transfers):
        ranks = members(placement.layout, dim)
        if ranks.shape[1] > 1:
            mine = [t for t in transfers if t.dim == dim]
            flows = flows_of(dim, wiring[ranks], placement.layout.loops)
            dims[dim] = _price_dim(dim, ranks, wiring, flows, mine, fabric, ports, algorithms)
    return StepPrice(dims, ports.busiest_nic(), ports.busiest_uplink())


def _price_dim(
    dim: str,
    ranks: np.ndarray,
    wiring: Wiring,
    flows: tuple[Flows, Flows | None],
    transfers: list[Transfer],
    fabric: Fabric,
    ports: Ports,
    algorithms: tuple[str, ...],
) -> DimPrice:
    ring, outer = flows
    n = ranks.shape[1]
    paths = Paths(n, ring.slowest(fabric))
    if outer is not None:
        paths = Paths(n, paths.flat, inner_size(wiring[ranks[:1]]), outer.slowest(fabric))
    priced = tuple(price_transfer(t, paths, fabric.cluster, algorithms) for t in transfers)
    nbytes = _count(ring, outer, priced, paths, ports, both_ways=dim == "pp")
    return DimPrice(dim, paths, priced, nbytes)


def _count(
    ring: Flows,
    outer: Flows | None,
    priced: tuple[PricedTransfer, ...],
    paths: Paths,
    ports: Ports,
    both_ways: bool,
) -> dict[LinkClass, float]:
    """Bytes that all ranks send on each class; the ports get theirs."""
    flat, inside, between = flow_bytes(priced, paths)
    nbytes = {k: count * flat for k, count in ring.counts.items() if flat}
    ports.add(ring, flat, both_ways)
    if outer is not None and between:
        for k, count in outer.counts.items():
            nbytes[k] = nbytes.get(k, 0.0) + count * between
        nvlink = nbytes.get(LinkClass.NVLINK, 0.0)
        nbytes[LinkClass.NVLINK] = nvlink + outer.kinds.size * inside
        ports.add(outer, between)
    return nbytes


def flow_bytes(priced: tuple[PricedTransfer, ...], paths: Paths) -> tuple[float, float, float]:
    """Bytes of one flow in a step: in the flat ring or chain; in two levels, inside and between.

    A tree is counted like a ring: it sends at most n / (n − 1) times as much.
    """
    flat = inside = between = 0.0
    for p in priced:
        op, total = p.transfer.op, float(p.transfer.nbytes) * p.transfer.count
        if p.algorithm != "hierarchical":
            flat += total * bus_factor(op, paths.n)
        else:
            inside += total * bus_factor(op, paths.inner)
            between += total / paths.inner * bus_factor(op, paths.domains)
    return flat, inside, between
