"""What a rank mapping does on its cluster, for warnings, tables and pictures: the links of every
dimension's groups, the bytes over each wire, and the routes between rails."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from parallel3d.estimate.network import Bytes, StepPrice, flows_of, members, messages
from parallel3d.topology.cluster.parts import Cluster, LinkClass
from parallel3d.topology.tiling import RankMapping

CLASSIFIED = ("tp", "cp", "dp", "dp_cp", "pp", "embedding")
SHOWN_PAIRS = 4


@dataclass(frozen=True)
class Pair:
    """Two neighbouring ranks of a group, and their GPUs."""

    ranks: tuple[int, int]
    names: tuple[str, str]
    kind: LinkClass

    def __str__(self) -> str:
        return f"rank {self.ranks[0]} ({self.names[0]}) and rank {self.ranks[1]} ({self.names[1]})"


class Hierarchy(NamedTuple):
    """Two-level (hierarchical) reduction: `inner` members of one domain, then `outer` domains.
    `one_rail`: no outer group leaves its rail."""

    inner: int
    outer: int
    one_rail: bool


@dataclass(frozen=True)
class DimLinks:
    """Links of all groups of one dimension.

    `pairs`: by link, how many ranks send to a next one: all of a ring, all but the last of a chain.
    `in_domain`: groups in one NVLink domain; `on_rail`: other groups under one leaf switch;
    `crossing`: the rest. `rails`: number of rails of the first crossing group. `between_units`:
    pairs on one rail that need the spine. `offending`: the first pairs worse than they should be
    (tp and cp belong on NVLink, the others on one rail).
    """

    dim: str
    size: int
    groups: int
    pairs: dict[LinkClass, int]
    in_domain: int
    on_rail: int
    crossing: int
    rails: int = 0
    between_units: int = 0
    hierarchy: Hierarchy | None = None
    offending: tuple[Pair, ...] = ()

    @property
    def worst(self) -> LinkClass:
        """The slowest class that any pair uses; `SELF` if there are no pairs."""
        return max((k for k, count in self.pairs.items() if count), default=LinkClass.SELF)


def classify(placement: RankMapping) -> dict[str, DimLinks]:
    """Classifies the links of tp, cp, dp, dp_cp, pp and `embedding`."""
    return {dim: _classify(placement, dim) for dim in CLASSIFIED}


def _classify(placement: RankMapping, dim: str) -> DimLinks:
    cluster, rail = placement.cluster, placement.cluster.rail_of
    groups = placement.slots[members(placement.layout, dim)]
    count, size = groups.shape
    if size == 1:
        return DimLinks(dim, 1, count, {}, count, 0, 0)
    flows = flows_of(dim, cluster, groups, placement.layout.loops)
    here, there, kinds = flows.ring.here, flows.ring.there, flows.ring.kinds
    counts = np.bincount(kinds, minlength=len(LinkClass))
    inside, one_leaf = (
        (numbers == numbers[:, :1]).all(axis=1)
        for numbers in (cluster.domain[groups], cluster.leaf[groups])
    )
    crossing = np.flatnonzero(~inside & ~one_leaf)
    hierarchy = None
    if flows.between is not None:
        one_rail = bool((rail[flows.between.here] == rail[flows.between.there]).all())
        hierarchy = Hierarchy(flows.inner, size // flows.inner, one_rail)

    def pair(i: int) -> Pair:
        ends = int(here[i]), int(there[i])
        a, b = (int(placement.ranks[slot]) for slot in ends)
        names = cluster.slot_name(ends[0]), cluster.slot_name(ends[1])
        return Pair((a, b), names, LinkClass(kinds[i]))

    wanted = LinkClass.NVLINK if dim in ("tp", "cp") else LinkClass.RAIL
    # The first ones, and the first without a wire, which refuses the placement.
    shown = (np.flatnonzero(kinds > wanted)[:SHOWN_PAIRS], np.flatnonzero(kinds == LinkClass.NONE))
    return DimLinks(
        dim=dim,
        size=size,
        groups=count,
        pairs={k: int(counts[k]) for k in LinkClass if counts[k]},
        in_domain=int(inside.sum()),
        on_rail=int((one_leaf & ~inside).sum()),
        crossing=crossing.size,
        rails=np.unique(rail[groups[crossing[0]]]).size if crossing.size else 0,
        between_units=int(((kinds > LinkClass.RAIL) & (rail[here] == rail[there])).sum()),
        hierarchy=hierarchy,
        offending=tuple(pair(i) for i in np.union1d(shown[0], shown[1][:1]).tolist()),
    )


@dataclass(frozen=True)
class Loads:
    """Bytes that one step sends over each wire, one way: the line widths of the picture.

    `nvlink` and `nic`: (size,), from each GPU into its domain and through its NIC. `uplink`:
    (units, rails), from each leaf switch to the spine; `port`: over one of its uplinks, of which it
    has NICs / oversubscription, evenly loaded.
    """

    nvlink: Bytes
    nic: Bytes
    uplink: Bytes
    port: Bytes

    @property
    def largest(self) -> float:
        """Bytes on the busiest wire."""
        return float(max(a.max(initial=0.0) for a in (self.nvlink, self.nic, self.port)))

    def busiest(self, cluster: Cluster) -> dict[str, tuple[str, float]]:
        """Returns (name, bytes) of the busiest `nic` and `uplink`, if they are used."""
        nics = np.bincount(cluster.nic, self.nic)
        node, rail = divmod(int(nics.argmax()), cluster.rails)
        unit, leaf = divmod(int(self.port.argmax()), cluster.rails)
        uplink = f"uplink of the leaf of rail {leaf} in unit {unit}"
        found = {
            "nic": (f"NIC of {cluster.node_name(node)} on rail {rail}", float(nics.max())),
            "uplink": (uplink, float(self.port.max())),
        }
        return {port: named for port, named in found.items() if named[1]}


def loads_of(placement: RankMapping, step: StepPrice) -> Loads:
    """Returns the bytes that every GPU and leaf switch sends."""
    cluster = placement.cluster
    nvlink, nic = np.zeros(cluster.size), np.zeros(cluster.size)
    leaf = np.zeros(cluster.leaf_nics.size)

    for dim, price in step.dims.items():
        groups = placement.slots[members(placement.layout, dim)]
        for flows, nbytes in flows_of(dim, cluster, groups, placement.layout.loops).sent(price):
            kinds, slots = flows.kinds, flows.here
            for total, chosen, numbers in (
                (nvlink, kinds == LinkClass.NVLINK, slots),
                (nic, kinds > LinkClass.NVLINK, slots),
                (leaf, kinds == LinkClass.SPINE, cluster.leaf[slots]),
            ):
                weights = None if flows.weights is None else flows.weights[chosen]
                total += nbytes * np.bincount(numbers[chosen], weights, minlength=total.size)
    uplink = leaf.reshape(-1, cluster.rails)
    nics = np.maximum(cluster.leaf_nics, 1).reshape(uplink.shape)
    return Loads(nvlink, nic, uplink, uplink / nics * (cluster.oversubscription or 1.0))


class Route(NamedTuple):
    """One route: seconds, the GPUs, sender and receiver included, and the wire of each hop."""

    seconds: float
    slots: tuple[int, ...]
    hops: tuple[LinkClass, ...]


def routes(cluster: Cluster, a: int, b: int, nbytes: float) -> list[Route]:
    """Returns the routes for one message from slot `a` to slot `b`, cheapest first.

    Without a common domain or leaf switch: over the spine, or forwarded by the GPU of a's domain
    that is under b's leaf switch (NCCL's PXN; NCCL_P2P_PXN_LEVEL), priced as store and forward,
    each message with its wire to itself. Over PCIe or sockets nothing is forwarded.
    """
    kind, found = LinkClass(int(cluster.link_class(a, b))), []
    if kind not in (LinkClass.SELF, LinkClass.NONE):
        found.append(Route(messages(1, nbytes, cluster.link(kind)), (a, b), (kind,)))
    near = cluster.domain == cluster.domain[a]
    near &= (cluster.rail_of == cluster.rail_of[b]) & (cluster.unit == cluster.unit[b])
    relays = np.flatnonzero(near)
    if kind > LinkClass.RAIL and relays.size and cluster.forwards:
        same_node = relays[cluster.node[relays] == cluster.node[a]]
        relay = int((same_node if same_node.size else relays)[0])
        seconds = messages(1, nbytes, cluster.nvlink) + messages(1, nbytes, cluster.rail)
        found.append(Route(seconds, (a, relay, b), (LinkClass.NVLINK, LinkClass.RAIL)))
    return sorted(found, key=lambda r: (r.seconds, len(r.hops)))
