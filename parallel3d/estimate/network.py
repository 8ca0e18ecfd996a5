"""Links of a rank mapping: pairs of neighbours classified, and flows that share NICs and uplinks.

All numpy: a million ranks take a fraction of a second.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from functools import cached_property
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from parallel3d.estimate.traffic import OPERATIONS, bus_factor, check_sizes
from parallel3d.topology.cluster.parts import Cluster, Link, LinkClass, Slots
from parallel3d.topology.layout import Layout
from parallel3d.topology.tiling import RankMapping

if TYPE_CHECKING:
    from parallel3d.estimate.traffic import Transfer


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


# Price of a step's communication under a rank mapping, by the α–β model.
#
# The formulas are for `n` ranks, each with one full-duplex port of `link.gb_per_s` (B) and
# `link.latency_us` (α) a message. `nbytes` is the whole buffer as nccl-tests counts it: the input
# of all-reduce, broadcast, send, reduce-scatter, scatter and all-to-all, the output of all-gather
# and gather. Reductions cost no arithmetic. Every function returns 0 for one rank, and raises
# ValueError for fewer ranks or a negative size.


def _message(nbytes: float, link: Link) -> float:
    return link.latency_us * 1e-6 + nbytes / (link.gb_per_s * 1e9)


def send_recv(nbytes: float, link: Link) -> float:
    """Seconds of one message: α + N/B (Hockney 1994)."""
    check_sizes(2, nbytes)
    return _message(nbytes, link)


def broadcast(n: int, nbytes: float, link: Link, segments: int = 1) -> float:
    """Seconds of a chain in `segments` pipelined segments: (S + n − 2)(α + N/(S·B)).

    S = 1 is store and forward, (n − 1)(α + N/B); with many segments the time tends to N/B for any
    n.
    Source: Woolley, "NCCL: Accelerated Multi-GPU Collective Communications", 2015, with α added.
    """
    check_sizes(n, nbytes)
    if segments < 1:
        raise ValueError(f"a broadcast in {segments} segments")
    if n == 1:
        return 0.0
    return (segments + n - 2) * _message(nbytes / segments, link)


def best_segments(n: int, nbytes: float, link: Link) -> int:
    """Returns the S that makes `broadcast` fastest, √((n − 2)·N / (α·B)) rounded to the better one.

    At least 1 and at most one segment a byte.
    """
    check_sizes(n, nbytes)
    most = max(1, int(nbytes))
    if n <= 2 or nbytes == 0:
        return 1
    if link.latency_us == 0:
        return most
    wire = nbytes / (link.gb_per_s * 1e9)
    exact = math.sqrt((n - 2) * wire / (link.latency_us * 1e-6))
    around = {min(most, max(1, s)) for s in (math.floor(exact), math.ceil(exact))}
    return min(around, key=lambda s: broadcast(n, nbytes, link, s))


def reduce(n: int, nbytes: float, link: Link, segments: int = 1) -> float:
    """Seconds of a broadcast run backwards: each rank adds its input and passes the sum on."""
    return broadcast(n, nbytes, link, segments)


def reduce_scatter(n: int, nbytes: float, link: Link) -> float:
    """Seconds of a ring of n − 1 messages of N/n: (n − 1)·α + (n − 1)/n · N/B.

    Source: nccl-tests, doc/PERFORMANCE.md; Patarasuk and Yuan 2009.
    """
    check_sizes(n, nbytes)
    return (n - 1) * _message(nbytes / n, link)


def all_gather(n: int, nbytes: float, link: Link) -> float:
    """Seconds of a ring of n − 1 messages of N/n, as `reduce_scatter`."""
    return reduce_scatter(n, nbytes, link)


def ring_all_reduce(n: int, nbytes: float, link: Link) -> float:
    """Seconds of a reduce-scatter and an all-gather: 2(n − 1)·α + 2(n − 1)/n · N/B.

    Bandwidth-optimal among algorithms that add on the ranks (Patarasuk and Yuan 2009).
    """
    return reduce_scatter(n, nbytes, link) + all_gather(n, nbytes, link)


def tree_all_reduce(n: int, nbytes: float, link: Link) -> float:
    """Seconds of a pipelined double binary tree: 2⌈log₂ n⌉·α + 2·N/B.

    Two trees carry half of the bytes each, and a leaf in one is an inner node in the other, so all
    ports are busy (Sanders, Speck and Träff 2009; NCCL since 2.4). Faster than the ring for many
    ranks and little data; it sends n/(n − 1) times as much.
    """
    check_sizes(n, nbytes)
    if n == 1:
        return 0.0
    return 2 * math.ceil(math.log2(n)) * link.latency_us * 1e-6 + 2 * _message(nbytes, _free(link))


def _free(link: Link) -> Link:
    return Link(link.gb_per_s, 0.0)


def hierarchical_all_reduce(
    inner: int, outer: int, nbytes: float, inner_link: Link, outer_link: Link
) -> float:
    """Seconds of a reduce-scatter inside, an all-reduce of N/inner between, an all-gather inside.

    For `inner` ranks in each of `outer` NVLink domains: each rank reduces its shard along its own
    rail: 2(g − 1)(α₁ + N/(g·B₁)) + 2(m − 1)(α₂ + N/(g·m·B₂)). Source: Jia et al. 2018
    (arXiv:1807.11205) §3; ml-engineering's network notes.
    """
    check_sizes(inner, nbytes)
    inside = reduce_scatter(inner, nbytes, inner_link) + all_gather(inner, nbytes, inner_link)
    return inside + ring_all_reduce(outer, nbytes / inner, outer_link)


def all_to_all(n: int, nbytes: float, link: Link) -> float:
    """Seconds of n − 1 messages of N/n to different ranks: (n − 1)·α + (n − 1)/n · N/B.

    Assumes a network on which all pairs can talk at once. Source: nccl-tests, doc/PERFORMANCE.md.
    """
    return reduce_scatter(n, nbytes, link)


def scatter(n: int, nbytes: float, link: Link) -> float:
    """Seconds of the root's n − 1 messages of N/n: (n − 1)·α + (n − 1)/n · N/B.

    Source: nccl-tests, src/scatter.cu.
    """
    return reduce_scatter(n, nbytes, link)


def gather(n: int, nbytes: float, link: Link) -> float:
    """Seconds of a scatter run backwards. Source: nccl-tests, src/gather.cu."""
    return scatter(n, nbytes, link)


def barrier(n: int, link: Link) -> float:
    """Seconds of a dissemination barrier, ⌈log₂ n⌉·α: in round k a rank signals the one 2ᵏ on.

    Source: Hensgen, Finkel and Manber 1988 (gloo). NCCL all-reduces one element instead.
    """
    check_sizes(n)
    return math.ceil(math.log2(n)) * link.latency_us * 1e-6


def all_reduce(n: int, nbytes: float, link: Link) -> float:
    """Seconds of the faster of ring and tree."""
    return min(ring_all_reduce(n, nbytes, link), tree_all_reduce(n, nbytes, link))


def collective_time(op: str, n: int, nbytes: float, link: Link) -> float:
    """Seconds of any of `OPERATIONS`; broadcast and reduce with their best number of segments.

    Raises ValueError for another name.
    """
    if op == "send_recv":
        check_sizes(n, nbytes)
        return send_recv(nbytes, link) if n > 1 else 0.0
    if op == "barrier":
        return barrier(n, link)
    if op in ("broadcast", "reduce"):
        return broadcast(n, nbytes, link, best_segments(n, nbytes, link))
    if op == "all_reduce":
        return all_reduce(n, nbytes, link)
    if op in OPERATIONS:  # the others: n − 1 messages of N/n through the busiest port
        return reduce_scatter(n, nbytes, link)
    raise ValueError(f"{op!r} is none of {', '.join(OPERATIONS)}")


@dataclass(frozen=True)
class Route:
    """One route: the GPUs, sender and receiver included, and the wire of each hop."""

    slots: tuple[int, ...]
    hops: tuple[LinkClass, ...]
    seconds: float

    def describe(self, cluster: Cluster) -> str:
        """Formats `node0 GPU 0 -nvlink- node0 GPU 1 -rail- node1 GPU 1`."""
        names = [cluster.slot_name(s) for s in self.slots]
        hops = (f" -{h.label}- {n}" for h, n in zip(self.hops, names[1:], strict=True))
        return names[0] + "".join(hops)


def routes(cluster: Cluster, a: int, b: int, nbytes: float) -> list[Route]:
    """Returns the routes for one message from slot `a` to slot `b`, cheapest first.

    Without a common domain or leaf switch: over the spine, or forwarded by the GPU of a's domain
    that is under b's leaf switch (NCCL's PXN; NCCL_P2P_PXN_LEVEL), priced as store and forward,
    each message with its wire to itself.
    """
    kind = LinkClass(int(cluster.link_class(a, b)))
    if kind is LinkClass.SELF:
        return []
    found = []
    if kind is not LinkClass.NONE:
        found.append(Route((a, b), (kind,), send_recv(nbytes, cluster.link(kind))))
    relay = _relay(cluster, a, b) if kind > LinkClass.RAIL else None
    if relay is not None:
        seconds = send_recv(nbytes, cluster.nvlink) + send_recv(nbytes, cluster.rail)
        found.append(Route((a, relay, b), (LinkClass.NVLINK, LinkClass.RAIL), seconds))
    return sorted(found, key=lambda r: (r.seconds, len(r.hops)))


def _relay(cluster: Cluster, a: int, b: int) -> int | None:
    """Returns a GPU of a's domain on b's rail and unit, preferably on a's node."""
    near = cluster.domain == cluster.domain[a]
    near &= (cluster.rail_of == cluster.rail_of[b]) & (cluster.unit == cluster.unit[b])
    found = np.flatnonzero(near)
    if not found.size:
        return None
    same_node = found[cluster.node[found] == cluster.node[a]]
    return int((same_node if same_node.size else found)[0])


# Model of a step:
#
# 1. The groups of one dimension communicate at once, the dimensions one after another, and nothing
# overlaps with compute: the seconds are an upper bound of what a step waits. 2. A flow is the
# traffic of one rank to its neighbour. Inside a domain it has the GPU's NVLink for    itself
# (NVSwitch does not block). Between domains it has its GPU's NIC, divided by the flows through
# that NIC in one direction. Over the spine it also shares the leaf switch's uplinks: bandwidth of
# the    NICs under the leaf / oversubscription, divided by the flows going up (or down). 3. A ring
# runs at its slowest flow, a dimension at its slowest ring: lowest bandwidth and highest    latency
# of any pair. A tree, for small messages, has the same wire. 4. In two levels (reduce-scatter
# inside the domain, all-reduce along the rails with 1/inner of the    bytes, all-gather inside) the
# outer rings all run at once and share as in 2. 5. The stages of a pipeline are a chain of ranks.
# With loops the last rank sends to the first, in all    loops but one, at the same time as the
# others to their next. 6. For each transfer the cheapest of ring, tree and two levels counts. A
# ring over a pair without a    wire costs infinity.
#
# Sources: Wang et al. 2023 (arXiv:2307.12169) for rails and domains; the DGX SuperPOD reference
# architecture for leaf switches, units and uplinks.


ALGORITHMS = ("ring", "tree", "hierarchical")
IN_TWO_LEVELS = ("all_reduce", "reduce_scatter", "all_gather")


@dataclass(frozen=True)
class Paths:
    """Wires of one dimension: `flat` for rings and trees, `outer` between domains."""

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
    """Price of one dimension in a step. `nbytes`: sent by all ranks, by link class."""

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
    """Price of one step: `dims` in the order of the transfers; ports None if unused."""

    dims: dict[str, DimPrice]
    nic: Port | None
    leaf_up: Port | None

    @cached_property
    def seconds(self) -> float:
        return math.fsum(d.seconds for d in self.dims.values())

    @property
    def reachable(self) -> bool:
        """Whether all neighbours in rings have a wire; `world`'s scalars can take any route."""
        return all(d.paths.flat is not None for d in self.dims.values() if d.dim != "world")

    @property
    def nbytes(self) -> dict[LinkClass, float]:
        """Bytes that all ranks send in a step, by link class."""
        return {
            k: math.fsum(d.nbytes[k] for d in self.dims.values())
            for k in LinkClass
            if any(d.nbytes.get(k) for d in self.dims.values())
        }


def price_transfer(
    transfer: Transfer, paths: Paths, cluster: Cluster, algorithms: tuple[str, ...] = ALGORITHMS
) -> PricedTransfer:
    """Returns the cheapest of the allowed algorithms for one kind of transfer."""
    n, nbytes, link, op = paths.n, transfer.nbytes, paths.flat, transfer.op
    options = {}
    if link is not None and op == "all_reduce":
        options["ring"] = ring_all_reduce(n, nbytes, link)
        if "tree" in algorithms:
            options["tree"] = tree_all_reduce(n, nbytes, link)
    elif link is not None:
        name = "send_recv" if op == "send_recv" else "ring"
        options[name] = collective_time(op, n, nbytes, link)
    if op in IN_TWO_LEVELS and paths.outer is not None and "hierarchical" in algorithms:
        options["hierarchical"] = _two_levels(op, nbytes, paths, paths.outer, cluster.nvlink)
    if not options:
        return PricedTransfer(transfer, math.inf, "no path")
    name = min(options, key=lambda k: options[k])
    return PricedTransfer(transfer, options[name] * transfer.count, name)


def _two_levels(op: str, nbytes: float, paths: Paths, outer: Link, nvlink: Link) -> float:
    """Returns seconds with all bytes inside the domains, and 1/inner of them between."""
    if op == "all_reduce":
        return hierarchical_all_reduce(paths.inner, paths.domains, nbytes, nvlink, outer)
    inside = collective_time(op, paths.inner, nbytes, nvlink)
    return inside + collective_time(op, paths.domains, nbytes / paths.inner, outer)


def price_step(
    placement: RankMapping,
    transfers: list[Transfer],
    *,
    fabric: Fabric | None = None,
    algorithms: tuple[str, ...] = ALGORITHMS,
) -> StepPrice:
    """Returns seconds by dimension, bytes by link class and the busiest ports of one step.

    `transfers` are the busiest rank's; those of pp are the traffic between two neighbours, half of
    it each way. Dimensions of size one are left out. `algorithms` limits those of reductions.
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
    """Returns the bytes that all ranks send by link class, and adds them to the ports."""
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
    """Returns the bytes of one flow in a step: in the flat ring or chain; in two levels, inside and
    between. A tree counts as a ring: it sends at most n / (n − 1) times as much."""
    flat = inside = between = 0.0
    for p in priced:
        op, total = p.transfer.op, float(p.transfer.nbytes) * p.transfer.count
        if p.algorithm != "hierarchical":
            flat += total * bus_factor(op, paths.n)
        else:
            inside += total * bus_factor(op, paths.inner)
            between += total / paths.inner * bus_factor(op, paths.domains)
    return flat, inside, between


@dataclass(frozen=True)
class Loads:
    """Bytes that one step sends over each wire, one way: the line widths of the picture.

    `nvlink` and `nic`: (size,), from each GPU into its domain and through its NIC. `uplink`:
    (units, rails), from each leaf switch to the spine; `port`: over one of its uplinks.
    """

    nvlink: npt.NDArray[np.float64]
    nic: npt.NDArray[np.float64]
    uplink: npt.NDArray[np.float64]
    port: npt.NDArray[np.float64]

    @property
    def largest(self) -> float:
        """Bytes on the busiest wire."""
        return float(max(a.max(initial=0.0) for a in (self.nvlink, self.nic, self.port)))


def loads_of(placement: RankMapping, price: StepPrice) -> Loads:
    """Returns the bytes from every GPU into its domain and NIC, and from every leaf to the spine.

    The flows are those of `price`, whose busiest ports are the maxima.
    """
    cluster = placement.cluster
    nvlink, nic = np.zeros(cluster.size), np.zeros(cluster.size)
    leaf = np.zeros((int(cluster.unit.max()) + 1) * cluster.rails)

    def add(flows: Flows, ranks: Slots, nbytes: float) -> None:
        """Adds `nbytes` from each of `ranks`, the senders of the flows."""
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
