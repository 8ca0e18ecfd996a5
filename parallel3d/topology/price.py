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
5. For each transfer the cheapest of ring, tree and two levels counts, and is named. A ring over a
   pair without a wire costs infinity.

Sources: `collective_costs` for the formulas; Wang et al. 2023 (arXiv 2307.12169) for rails and
domains; the DGX SuperPOD reference architecture for leaf switches, units and uplinks.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING

import numpy as np

from parallel3d.topology import collective_costs as costs
from parallel3d.topology.cluster import Cluster, Link, LinkClass, Slots
from parallel3d.topology.links import (
    OPEN_CHAINS,
    Wiring,
    inner_size,
    members,
    outer_order,
)
from parallel3d.topology.placement import Placement

if TYPE_CHECKING:
    from parallel3d.topology.traffic import Transfer

ALGORITHMS = ("ring", "tree", "hierarchical")
IN_TWO_LEVELS = ("all_reduce", "reduce_scatter", "all_gather")


@dataclass(frozen=True)
class Fabric:
    """The cluster's shared capacities, made once and used for many placements."""

    cluster: Cluster

    @cached_property
    def leaf_nics(self) -> Slots:
        """(leaf switches,): NICs under each; a NIC is counted at its first GPU."""
        cluster = self.cluster
        first = np.flatnonzero(cluster.local < cluster.rails)
        return np.bincount(cluster.unit[first] * cluster.rails + cluster.rail_of[first])

    @cached_property
    def shares_nics(self) -> bool:
        return int(self.cluster.local.max()) >= self.cluster.rails

    def slowest(self, kinds: Iterable[LinkClass], nic_flows: int, leaf_load: float) -> Link | None:
        """The wire of the slowest flow; None where one of `kinds` is no wire.

        `nic_flows`: most flows through one NIC. `leaf_load`: most flows up one leaf switch, divided
        by the NICs under it.
        """
        found = []
        for kind in kinds:
            if kind is LinkClass.NONE:
                return None
            if kind is LinkClass.NVLINK:
                found.append(self.cluster.nvlink)
                continue
            rail, spine = self.cluster.rail, self.cluster.spine
            wire, flows = (rail, nic_flows)
            if kind is LinkClass.SPINE:
                thin = leaf_load * (self.cluster.oversubscription or 1.0)
                wire, flows = spine, max(nic_flows, thin)
            found.append(Link(wire.gb_per_s / flows, wire.latency_us))
        return Link(min(w.gb_per_s for w in found), max(w.latency_us for w in found))


@dataclass(frozen=True)
class Flows:
    """What ranks send at the same time, from `here` to `there`, element by element."""

    here: Wiring
    there: Wiring

    @cached_property
    def kinds(self) -> np.ndarray:
        return self.here.to(self.there)

    @cached_property
    def counts(self) -> dict[LinkClass, int]:
        found = np.bincount(self.kinds, minlength=len(LinkClass))
        return {k: int(found[k]) for k in LinkClass if found[k]}

    def slowest(self, fabric: Fabric) -> Link | None:
        """The wire that the slowest of these flows sees, sharing counted."""
        nic_flows, leaf_load = 1, 0.0
        if fabric.shares_nics:
            outside = self.kinds > LinkClass.NVLINK
            nic_flows = max(_most(w.nic[outside]) for w in (self.here, self.there))
        spine = self.kinds == LinkClass.SPINE
        if spine.any():
            nics = fabric.leaf_nics
            for wiring in (self.here, self.there):
                flows = np.bincount(wiring.leaf[spine], minlength=nics.size)
                leaf_load = max(leaf_load, float((flows / np.maximum(nics, 1)).max()))
        return fabric.slowest(self.counts, nic_flows, leaf_load)


def _most(numbers: Slots) -> int:
    return int(np.bincount(numbers).max()) if numbers.size else 1


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
class Port:
    """A switch port and the bytes that it passes in one step, one way."""

    name: str
    nbytes: float


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

        `model` carries a few scalars, and any algorithm and route will do.
        """
        return all(d.paths.flat is not None for d in self.dims.values() if d.dim != "model")

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
    placement: Placement,
    transfers: list[Transfer],
    *,
    fabric: Fabric | None = None,
    algorithms: tuple[str, ...] = ALGORITHMS,
) -> StepPrice:
    """Seconds a step per dimension, bytes per link class, busiest ports; the model is above.

    `transfers` is what one rank does, the busiest of its kind; those of pp are what passes one
    stage boundary, half of it each way. Dimensions of size one are left out. `algorithms` limits
    what a reduction may use, `("ring",)` for one that has nothing else.
    """
    fabric = fabric or Fabric(placement.cluster)
    wiring = Wiring.of(placement.cluster, placement.slots)
    ports = _Ports(fabric)
    dims = {}
    for dim in dict.fromkeys(t.dim for t in transfers):
        ranks = members(placement.layout, dim)
        if ranks.shape[1] > 1:
            mine = [t for t in transfers if t.dim == dim]
            dims[dim] = _price_dim(dim, ranks, wiring, mine, fabric, ports, algorithms)
    return StepPrice(dims, ports.busiest_nic(), ports.busiest_uplink())


def _price_dim(
    dim: str,
    ranks: np.ndarray,
    wiring: Wiring,
    transfers: list[Transfer],
    fabric: Fabric,
    ports: _Ports,
    algorithms: tuple[str, ...],
) -> DimPrice:
    ring, outer = flows_of(dim, wiring[ranks])
    n = ranks.shape[1]
    paths = Paths(n, ring.slowest(fabric))
    if outer is not None:
        paths = Paths(n, paths.flat, inner_size(wiring[ranks[:1]]), outer.slowest(fabric))
    priced = tuple(price_transfer(t, paths, fabric.cluster, algorithms) for t in transfers)
    flat = inside = between = 0.0  # bytes of each flow: of the ring, in the domain, outside
    for p in priced:
        op, total = p.transfer.op, p.transfer.nbytes * p.transfer.count
        if p.algorithm != "hierarchical":
            flat += total * (1.0 if op == "send_recv" else costs.bus_factor(op, n))
        else:
            inside += total * costs.bus_factor(op, paths.inner)
            between += total / paths.inner * costs.bus_factor(op, paths.domains)
    nbytes = {k: count * flat for k, count in ring.counts.items()}
    ports.add(ring, flat, both_ways=dim == "pp")
    if outer is not None and between:
        for k, count in outer.counts.items():
            nbytes[k] = nbytes.get(k, 0.0) + count * between
        nbytes[LinkClass.NVLINK] = nbytes.get(LinkClass.NVLINK, 0.0) + ranks.size * inside
        ports.add(outer, between)
    return DimPrice(dim, paths, priced, nbytes)


def flows_of(dim: str, groups: Wiring) -> tuple[Flows, Flows | None]:
    """The flows of all groups' rings (or of the stages), and between domains in two levels.

    `groups`: (groups, n). Of a chain of stages the way forward; backward is its mirror image.
    """
    if dim == "pp":
        return Flows(groups.flat(np.s_[:, :-1]), groups.flat(np.s_[:, 1:])), None
    size = groups.domain.shape[1]
    following = np.roll(np.arange(size), -1)
    ring = Flows(groups.flat(np.s_[:, :]), groups.flat(np.s_[:, following]))
    order = None if dim in OPEN_CHAINS else outer_order(groups)
    if order is None:
        return ring, None
    inner = inner_size(groups)
    ordered = groups.take(order)
    following = np.roll(np.arange(size), -inner)  # the same member of the next domain
    return ring, Flows(ordered.flat(np.s_[:, :]), ordered.flat(np.s_[:, following]))


class _Ports:
    """Bytes through every NIC and up every leaf switch, added up over the dimensions."""

    def __init__(self, fabric: Fabric) -> None:
        self.fabric = fabric
        cluster = fabric.cluster
        self.nics = np.zeros(cluster.nodes * cluster.rails)
        self.leaves = np.zeros(fabric.leaf_nics.size)

    def add(self, flows: Flows, nbytes: float, both_ways: bool = False) -> None:
        """`nbytes` on each flow; `both_ways`: half of them in the other direction."""
        ends = (flows.here, flows.there) if both_ways else (flows.here,)
        outside, spine = flows.kinds > LinkClass.NVLINK, flows.kinds == LinkClass.SPINE
        for end in ends:
            share = nbytes / len(ends)
            self.nics += share * np.bincount(end.nic[outside], minlength=self.nics.size)
            self.leaves += share * np.bincount(end.leaf[spine], minlength=self.leaves.size)

    def busiest_nic(self) -> Port | None:
        nic, cluster = int(self.nics.argmax()), self.fabric.cluster
        if not self.nics[nic]:
            return None
        node, rail = divmod(nic, cluster.rails)
        return Port(f"NIC of {cluster.node_name(node)} on rail {rail}", float(self.nics[nic]))

    def busiest_uplink(self) -> Port | None:
        """A leaf has its NICs / oversubscription uplinks, which share its bytes evenly."""
        cluster = self.fabric.cluster
        per_port = self.leaves / np.maximum(self.fabric.leaf_nics, 1)
        per_port *= cluster.oversubscription or 1.0
        leaf = int(per_port.argmax())
        if not per_port[leaf]:
            return None
        unit, rail = divmod(leaf, cluster.rails)
        return Port(f"uplink of the leaf of rail {rail} in unit {unit}", float(per_port[leaf]))
