"""What one step sends over each single wire of a priced placement: the widths of the picture."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from parallel3d.topology.cluster.parts import LinkClass, Slots
from parallel3d.topology.price.links import Wiring, members, neighbours, outer_order
from parallel3d.topology.price.step import Flows, StepPrice, flow_bytes, flows_of
from parallel3d.topology.tiling import RankMapping


@dataclass(frozen=True)
class Loads:
    """Bytes that one step sends over each wire, one way.

    `nvlink` and `nic` are (size,): what each GPU sends inside its domain and through its NIC.
    `uplink` is (units, rails): what each leaf switch sends up to the spine, and `port` the share of
    one of its uplinks.
    """

    nvlink: npt.NDArray[np.float64]
    nic: npt.NDArray[np.float64]
    uplink: npt.NDArray[np.float64]
    port: npt.NDArray[np.float64]

    @property
    def largest(self) -> float:
        """Bytes on the busiest wire of all."""
        return float(max(a.max(initial=0.0) for a in (self.nvlink, self.nic, self.port)))


def loads_of(placement: RankMapping, price: StepPrice) -> Loads:
    """Bytes sent by every GPU into its domain and its NIC, and by every leaf to the spine.

    The flows are those of `price`: its busiest NIC and uplink are maxima of these.
    """
    cluster = placement.cluster
    nvlink, nic = np.zeros(cluster.size), np.zeros(cluster.size)
    leaf = np.zeros((int(cluster.unit.max()) + 1) * cluster.rails)

    def add(flows: Flows, ranks: Slots, nbytes: float) -> None:
        """`nbytes` from each of `ranks`, which are the flows' senders."""
        slots, kinds = placement.slots[ranks], flows.kinds
        inside, spine = kinds == LinkClass.NVLINK, kinds == LinkClass.SPINE
        sent = np.full(slots.size, nbytes)
        if flows.weights is not None:
            sent *= flows.weights
        np.add.at(nvlink, slots[inside], sent[inside])
        np.add.at(nic, slots[~inside], sent[~inside])
        np.add.at(leaf, flows.here.leaf[spine], sent[spine])

    wiring = Wiring.of(cluster, placement.slots)
    for dim, priced in price.dims.items():
        ranks = members(placement.layout, dim)
        groups = wiring[ranks]
        flat, inside, between = flow_bytes(priced.transfers, priced.paths)
        ring, outer = flows_of(dim, groups, placement.layout.loops)
        if dim == "pp":  # half of the bytes goes forward, half back
            ahead, after = neighbours(placement.layout, dim)
            add(ring, ahead, flat / 2)
            add(ring.back, after, flat / 2)
            continue
        add(ring, ranks.ravel(), flat)
        order = outer_order(groups) if between else None
        if outer is not None and order is not None:
            add(outer, np.take_along_axis(ranks, order, axis=1).ravel(), between)
            np.add.at(nvlink, placement.slots[ranks.ravel()], inside)
    uplink = leaf.reshape(-1, cluster.rails)
    first = cluster.local < cluster.rails
    nics = np.bincount(
        cluster.unit[first] * cluster.rails + cluster.rail_of[first], minlength=leaf.size
    )
    ports = np.maximum(nics, 1).reshape(uplink.shape) / (cluster.oversubscription or 1.0)
    return Loads(nvlink, nic, uplink, uplink / ports)
