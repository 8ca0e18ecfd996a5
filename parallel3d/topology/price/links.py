"""Links of a rank mapping: pairs of neighbours classified, and flows that share NICs and uplinks.

All numpy: a million ranks take a fraction of a second.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np
import numpy.typing as npt

from parallel3d.topology.cluster.parts import Cluster, Link, LinkClass, Slots
from parallel3d.topology.layout import Layout
from parallel3d.topology.tiling import RankMapping

CLASSIFIED = ("tp", "cp", "dp", "pp", "embedding")
OPEN_CHAINS = ("pp", "embedding")  # the last member has no next one, except in pipeline loops
SHOWN_PAIRS = 4

Numbers = npt.NDArray[np.int32]
Matrix = npt.NDArray[np.int64]  # (groups, members)


def members(layout: Layout, dim: str) -> Matrix:
    """Returns (groups, n): the ranks of every group of `dim`, in the group's order.

    `dim`: tp, cp, dp, pp, `embedding` (first and last stage) or `world` (loss and gradient norm).
    Raises ValueError for another `dim`.
    """
    known = {**{d: (d,) for d in ("tp", "cp", "dp", "pp")}, "world": ("tp", "cp", "dp", "pp")}
    if dim == "embedding":
        ends = members(layout, "pp")[:, [0, -1]]
        return ends if layout.pp > 1 else ends[:, :1]
    if dim not in known:
        raise ValueError(f"{dim!r} is none of {', '.join((*known, 'embedding'))}")
    slowest_first = layout.order.split("-")[::-1]
    grid = np.arange(layout.world_size).reshape([layout.size(d) for d in slowest_first])
    axes = [i for i, d in enumerate(slowest_first) if d in known[dim]]
    size = int(np.prod([layout.size(d) for d in known[dim]]))
    moved = np.moveaxis(grid, axes, range(-len(axes), 0)).reshape(-1, size)
    return np.ascontiguousarray(moved)


def neighbours(layout: Layout, dim: str) -> tuple[Slots, Slots]:
    """Returns (pairs,), (pairs,): ranks that exchange data along `dim`, from and to.

    Rings for tp, cp and dp; two members are one pair. For pp rank k with rank k + 1, and the last
    with the first if stages loop; for `embedding` the first with the last.
    """
    ranks = members(layout, dim)
    first, second = ranks[:, :-1], ranks[:, 1:]
    if _is_ring(layout, dim, ranks.shape[1]):
        first, second = ranks, np.roll(ranks, -1, axis=1)
    return first.ravel(), second.ravel()


def _is_ring(layout: Layout, dim: str, size: int) -> bool:
    return layout.wraps if dim == "pp" else size > 2 and dim not in OPEN_CHAINS


@dataclass(frozen=True)
class Pair:
    """Two neighbouring ranks of a group, and their GPUs."""

    ranks: tuple[int, int]
    names: tuple[str, str]
    kind: LinkClass

    def __str__(self) -> str:
        return f"rank {self.ranks[0]} ({self.names[0]}) and rank {self.ranks[1]} ({self.names[1]})"


@dataclass(frozen=True)
class Hierarchy:
    """Two-level (hierarchical) reduction: `inner` members of one domain, then `outer` domains.

    Every group has `inner` members in each of `outer` domains, so inner shards line up. The j-th
    members of all domains, in the order of their rails, form an outer group.
    `one_rail`: no outer group leaves its rail; `kind` is `RAIL` if none leaves its leaf switch.
    """

    inner: int
    outer: int
    one_rail: bool
    kind: LinkClass


@dataclass(frozen=True)
class DimLinks:
    """Links of all groups of one dimension.

    `in_domain`: groups in one NVLink domain; `on_rail`: other groups under one leaf switch;
    `crossing`: the rest. `rails`: number of rails of the first crossing group. `between_units`:
    pairs
    on one rail that need the spine. `offending`: the first pairs worse than they should be (tp and
    cp belong on NVLink, the others on one rail).
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

    @property
    def wanted(self) -> LinkClass:
        """The slowest class that this dimension should use."""
        return LinkClass.NVLINK if self.dim in ("tp", "cp") else LinkClass.RAIL


@dataclass(frozen=True)
class Wiring:
    """Switch numbers of a set of GPUs: equal numbers are the same switch."""

    domain: Numbers
    leaf: Numbers  # one rail of one unit
    rail: Numbers
    nic: Numbers  # one rail of one node
    has_spine: bool

    @classmethod
    def of(cls, cluster: Cluster, slots: Slots) -> Wiring:
        rail = cluster.rail_of[slots]
        leaf = cluster.unit[slots] * cluster.rails + rail
        nic = cluster.node[slots] * cluster.rails + rail
        has_spine = cluster.oversubscription is not None
        # int32 halves the memory traffic at a million ranks.
        arrays = (cluster.domain[slots], leaf, rail, nic)
        domains, leaves, rails, nics = (numbers.astype(np.int32) for numbers in arrays)
        return cls(domains, leaves, rails, nics, has_spine)

    def _each(self, change: Callable[[Numbers], Numbers]) -> Wiring:
        domain, leaf, rail, nic = map(change, (self.domain, self.leaf, self.rail, self.nic))
        return Wiring(domain, leaf, rail, nic, self.has_spine)

    def __getitem__(self, index: Slots) -> Wiring:
        return self._each(lambda numbers: numbers[index])

    def take(self, order: Matrix) -> Wiring:
        """Returns (groups, n) reordered along each group."""
        return self._each(lambda numbers: np.take_along_axis(numbers, order, axis=1))

    def flat(self, index: tuple[slice, slice | Slots]) -> Wiring:
        """Returns the part `index` of (groups, n), flattened."""
        return self._each(lambda numbers: numbers[index].ravel())

    def to(self, other: Wiring) -> npt.NDArray[np.int8]:
        """Returns `Cluster.link_class` of each GPU with the GPU at the same place in `other`; no
        GPU may meet itself."""
        far = LinkClass.SPINE if self.has_spine else LinkClass.NONE
        found = np.where(self.leaf == other.leaf, np.int8(LinkClass.RAIL), np.int8(far))
        found[self.domain == other.domain] = LinkClass.NVLINK
        return found


def classify(placement: RankMapping) -> dict[str, DimLinks]:
    """Classifies the links of tp, cp, dp, pp and `embedding`."""
    wiring = Wiring.of(placement.cluster, placement.slots)
    return {dim: _classify(placement, wiring, dim) for dim in CLASSIFIED}


def _classify(placement: RankMapping, wiring: Wiring, dim: str) -> DimLinks:
    ranks = members(placement.layout, dim)
    groups, size = ranks.shape
    if size == 1:
        return DimLinks(dim, 1, groups, {}, groups, 0, 0)
    first, second = neighbours(placement.layout, dim)
    here, there, wired = wiring[first], wiring[second], wiring[ranks]
    kinds = here.to(there)
    counts = np.bincount(kinds, minlength=len(LinkClass))
    inside = (wired.domain == wired.domain[:, :1]).all(axis=1)
    one_leaf = (wired.leaf == wired.leaf[:, :1]).all(axis=1) & ~inside
    crossing = np.flatnonzero(~inside & ~one_leaf)
    links = DimLinks(
        dim=dim,
        size=size,
        groups=groups,
        pairs={k: int(counts[k]) for k in LinkClass if counts[k]},
        in_domain=int(inside.sum()),
        on_rail=int(one_leaf.sum()),
        crossing=crossing.size,
        rails=np.unique(wired.rail[crossing[0]]).size if crossing.size else 0,
        between_units=int(((kinds > LinkClass.RAIL) & (here.rail == there.rail)).sum()),
        hierarchy=None if dim in OPEN_CHAINS else hierarchy_of(wired),
    )
    bad = np.flatnonzero(kinds > links.wanted)[:SHOWN_PAIRS]
    offending = tuple(_pair(placement, first[i], second[i], kinds[i]) for i in bad)
    return DimLinks(**{**vars(links), "offending": offending})


def _pair(placement: RankMapping, a: int, b: int, kind: int) -> Pair:
    first, second = (placement.cluster.slot_name(int(placement.slots[r])) for r in (a, b))
    return Pair((int(a), int(b)), (first, second), LinkClass(kind))


def hierarchy_of(groups: Wiring) -> Hierarchy | None:
    """Returns the two levels of groups (groups, n); None if groups have none or differ."""
    order = outer_order(groups)
    if order is None:
        return None
    shape = (len(order), -1, inner_size(groups))
    leaf, rail = (
        np.take_along_axis(x, order, axis=1).reshape(shape) for x in (groups.leaf, groups.rail)
    )
    far = LinkClass.SPINE if groups.has_spine else LinkClass.NONE
    kind = LinkClass.RAIL if (leaf == leaf[:, :1]).all() else far
    return Hierarchy(shape[2], leaf.shape[1], bool((rail == rail[:, :1]).all()), kind)


def inner_size(groups: Wiring) -> int:
    """Counts the members of the first group in the domain of its first member."""
    return int((groups.domain[0] == groups.domain[0, 0]).sum())


def outer_order(groups: Wiring) -> Matrix | None:
    """Returns (groups, n): members by domain, then by leaf switch; None unless all groups have
    `inner_size` > 1 members in each of several domains."""
    size, inner = groups.domain.shape[1], inner_size(groups)
    if inner in (1, size) or size % inner:
        return None
    order = np.lexsort((groups.leaf, groups.domain), axis=1)
    placed = np.take_along_axis(groups.domain, order, axis=1).reshape(len(order), -1, inner)
    whole = (placed == placed[:, :, :1]).all()
    apart = (placed[:, 1:, 0] != placed[:, :-1, 0]).all()
    return order if whole and apart else None


def two_levels(placement: RankMapping, dim: str) -> tuple[list[list[int]], list[list[int]]] | None:
    """Returns the inner and outer groups of ranks that reduce `dim` in two levels (`Hierarchy`).

    The j-th members of the inner groups are an outer group, and hold the same shard between the
    levels. None without two levels, or if ranks inside a domain are not in the order of their rails
    (snake), as the members of a process group are in rank order.
    """
    ranks = members(placement.layout, dim)
    wired = Wiring.of(placement.cluster, placement.slots)[ranks]
    order = outer_order(wired) if ranks.shape[1] > 1 else None
    if order is None:
        return None
    placed = np.take_along_axis(ranks, order, axis=1)
    tiled = placed.reshape(len(placed), -1, inner_size(wired))
    if (np.diff(tiled, axis=2) < 0).any():
        return None
    outer = np.sort(tiled.transpose(0, 2, 1), axis=2)
    return tiled.reshape(-1, tiled.shape[2]).tolist(), outer.reshape(-1, tiled.shape[1]).tolist()


@dataclass(frozen=True)
class Fabric:
    """Shared capacities of a cluster, computed once for many rank mappings."""

    cluster: Cluster

    @cached_property
    def leaf_nics(self) -> Slots:
        """(leaf switches,): NICs under each; a NIC counts at its first GPU."""
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
        """Returns the wire of the slowest flow; None if one of `kinds` is no wire.

        `nic_flows`: the most flows through one NIC. `leaf_load`: the most flows up one leaf switch,
        over the NICs under it.
        """
        found = []
        for kind in kinds:
            if kind is LinkClass.NONE:
                return None
            if kind is LinkClass.NVLINK:
                found.append(self.cluster.nvlink)
                continue
            rail, spine = self.cluster.rail, self.cluster.spine
            wire, flows = rail, float(nic_flows)
            if kind is LinkClass.SPINE:
                thin = leaf_load * (self.cluster.oversubscription or 1.0)
                wire, flows = spine, max(nic_flows, thin)
            found.append(Link(wire.gb_per_s / flows, wire.latency_us))
        return Link(min(w.gb_per_s for w in found), max(w.latency_us for w in found))


@dataclass(frozen=True)
class Flows:
    """Simultaneous flows from `here` to `there`, element by element; `weights`: the fraction of a
    flow's bytes that each sends, None: 1."""

    here: Wiring
    there: Wiring
    weights: np.ndarray | None = None

    @property
    def back(self) -> Flows:
        """The flows in the other direction."""
        return Flows(self.there, self.here, self.weights)

    @cached_property
    def kinds(self) -> np.ndarray:
        return self.here.to(self.there)

    @cached_property
    def counts(self) -> dict[LinkClass, float]:
        """Number of flows in each link class, by weight."""
        found = np.bincount(self.kinds, self.weights, minlength=len(LinkClass))
        return {k: found[k].item() for k in LinkClass if found[k]}

    def per(self, numbers: Numbers, chosen: np.ndarray, size: int) -> np.ndarray:
        """Returns (size,): the `chosen` flows with each of `numbers`, by weight."""
        weights = None if self.weights is None else self.weights[chosen]
        return np.bincount(numbers[chosen], weights, minlength=size)

    def slowest(self, fabric: Fabric) -> Link | None:
        """Returns the wire of the slowest of these flows, with sharing."""
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


def _most(numbers: Numbers) -> int:
    return int(np.bincount(numbers).max()) if numbers.size else 1


@dataclass(frozen=True)
class Port:
    """A switch port and its bytes in one step, one way."""

    name: str
    nbytes: float


def flows_of(dim: str, groups: Wiring, loops: int = 1) -> tuple[Flows, Flows | None]:
    """Returns the flows of all groups' rings (or stages), and in two levels those between domains.

    `groups`: (groups, n). A chain of stages has its forward flows only; backward is the mirror
    image. With `loops` the last rank sends to the first in all loops but one.
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
    """Bytes through every NIC and up every leaf switch, summed over the dimensions."""

    def __init__(self, fabric: Fabric) -> None:
        self.fabric = fabric
        cluster = fabric.cluster
        self.nics = np.zeros(cluster.nodes * cluster.rails)
        self.leaves = np.zeros(fabric.leaf_nics.size)

    def add(self, flows: Flows, nbytes: float, both_ways: bool = False) -> None:
        """Adds `nbytes` to each flow; `both_ways`: half of them in the other direction."""
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
        """Returns the busiest uplink; a leaf has NICs / oversubscription of them, evenly loaded."""
        cluster = self.fabric.cluster
        per_port = self.leaves / np.maximum(self.fabric.leaf_nics, 1)
        per_port *= cluster.oversubscription or 1.0
        leaf = int(per_port.argmax())
        if not per_port[leaf]:
            return None
        unit, rail = divmod(leaf, cluster.rails)
        return Port(f"uplink of the leaf of rail {rail} in unit {unit}", float(per_port[leaf]))
