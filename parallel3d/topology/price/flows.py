"""Which flows meet where: in a NIC, in a leaf switch's uplinks.

The rules are those of `price`.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np

from parallel3d.topology.cluster.parts import Cluster, Link, LinkClass, Slots
from parallel3d.topology.price.links import OPEN_CHAINS, Wiring, inner_size, outer_order


@dataclass(frozen=True)
class Fabric:
    """The cluster's shared capacities, made once and used for many placements."""

    cluster: Cluster

    @cached_property
    def leaf_nics(self) -> Slots:
        """(leaf switches,): NICs under each; a NIC is counted at its first GPU."""
        cluster = self.cluster
        first = np.flatnonzero(cluster.local < cluster.rails)
        if cluster.local_rail:
            nics = cluster.node * cluster.rails + cluster.rail_of
            first = np.unique(nics, return_index=True)[1]
        return np.bincount(cluster.unit[first] * cluster.rails + cluster.rail_of[first])

    @cached_property
    def shares_nics(self) -> bool:
        """Whether any NIC has several GPUs."""
        rails = self.cluster.local_rail
        return len(set(rails)) < len(rails) or int(self.cluster.local.max()) >= self.cluster.rails

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
    """What ranks send at the same time, from `here` to `there`, element by element.

    `weights`: how much of what is one flow's each of them sends; None: all of it.
    """

    here: Wiring
    there: Wiring
    weights: np.ndarray | None = None

    @property
    def back(self) -> Flows:
        """The same the other way."""
        return Flows(self.there, self.here, self.weights)

    @cached_property
    def kinds(self) -> np.ndarray:
        return self.here.to(self.there)

    @cached_property
    def counts(self) -> dict[LinkClass, float]:
        """How many flows use each class, by their weights."""
        found = np.bincount(self.kinds, self.weights, minlength=len(LinkClass))
        return {k: found[k].item() for k in LinkClass if found[k]}

    def per(self, numbers: Slots, chosen: np.ndarray, size: int) -> np.ndarray:
        """(size,): how many of the `chosen` flows have each of `numbers`, by their weights."""
        weights = None if self.weights is None else self.weights[chosen]
        return np.bincount(numbers[chosen], weights, minlength=size)

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
class Port:
    """A switch port and the bytes that it passes in one step, one way."""

    name: str
    nbytes: float


def flows_of(dim: str, groups: Wiring, loops: int = 1) -> tuple[Flows, Flows | None]:
    """The flows of all groups' rings (or of the stages), and between domains in two levels.

    `groups`: (groups, n). Of a chain of stages the way forward; backward is its mirror image. Where
    it goes round in `loops`, the last rank sends to the first, in all rounds but one.
    """
    size = groups.domain.shape[1]
    if dim == "pp" and (loops == 1 or size == 2):
        return Flows(groups.flat(np.s_[:, :-1]), groups.flat(np.s_[:, 1:])), None
    following = np.roll(np.arange(size), -1)
    ring = Flows(groups.flat(np.s_[:, :]), groups.flat(np.s_[:, following]))
    if dim == "pp":
        weights = np.ones(groups.domain.shape)
        weights[:, -1] = (loops - 1) / loops
        return replace(ring, weights=weights.ravel()), None
    order = None if dim in OPEN_CHAINS else outer_order(groups)
    if order is None:
        return ring, None
    inner = inner_size(groups)
    ordered = groups.take(order)
    following = np.roll(np.arange(size), -inner)  # the same member of the next domain
    return ring, Flows(ordered.flat(np.s_[:, :]), ordered.flat(np.s_[:, following]))


class Ports:
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
            self.nics += share * flows.per(end.nic, outside, self.nics.size)
            self.leaves += share * flows.per(end.leaf, spine, self.leaves.size)

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
