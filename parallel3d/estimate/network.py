"""The one model of the network: what collectives cost, and what a rank mapping makes them share.

A message takes α + N/B (Hockney 1994). The price of a step:

1. The groups of one dimension communicate at once, the dimensions one after another, and nothing
   overlaps with compute: the seconds are an upper bound of what a step waits.
2. A flow is the traffic of one rank to its neighbour. Inside a domain it has the GPU's NVLink for
   itself (NVSwitch does not block). Between domains it has its GPU's NIC, divided by the flows
   through that NIC in one direction. Over the spine it also shares the leaf switch's uplinks:
   bandwidth of the NICs under the leaf / oversubscription, divided by the flows going up (or down).
3. A ring runs at its slowest flow, a dimension at its slowest ring: lowest bandwidth and highest
   latency of any pair. A tree, for small messages, has the same wire.
4. In two levels (reduce-scatter inside the domain, all-reduce along the rails with 1/inner of the
   bytes, all-gather inside) the outer rings all run at once and share as in 2.
5. The stages of a pipeline are a chain of ranks. With loops the last rank sends to the first, in
   all loops but one, at the same time as the others to their next.
6. For each transfer the cheapest of ring, tree and two levels counts. A ring over a pair without a
   wire costs infinity.

Sources: Wang et al. 2023 (arXiv:2307.12169) for rails and domains; the DGX SuperPOD reference
architecture for leaf switches, units and uplinks. All numpy: a million ranks take a fraction of a
second.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from parallel3d.topology.cluster.parts import Cluster, Link, LinkClass, Slots
from parallel3d.topology.layout import Layout
from parallel3d.topology.tiling import RankMapping

OPERATIONS = (
    *("broadcast", "reduce", "all_reduce", "all_gather", "reduce_scatter", "scatter", "gather"),
    *("all_to_all", "send_recv", "barrier"),
)
CLASSIFIED = ("tp", "cp", "dp", "pp", "embedding")
OPEN_CHAINS = ("pp", "embedding")  # the last member has no next one, except in pipeline loops
SHOWN_PAIRS = 4
ALGORITHMS = ("ring", "tree", "hierarchical")
IN_TWO_LEVELS = ("all_reduce", "reduce_scatter", "all_gather")

Matrix = npt.NDArray[np.int64]  # (groups, members)
Bytes = npt.NDArray[np.float64]

# Collectives of `n` ranks, each with one full-duplex port of `link.gb_per_s` (B) and
# `link.latency_us` (α) a message. `nbytes` (N) is the whole buffer as nccl-tests counts it: the
# input of all-reduce, broadcast, send, reduce-scatter, scatter and all-to-all, the output of
# all-gather and gather. Reductions cost no arithmetic. One rank costs nothing; fewer, or a negative
# size, raise ValueError.


def check_sizes(n: int, nbytes: float = 0.0) -> None:
    """Raises ValueError for fewer than one rank or a negative number of bytes."""
    if n < 1:
        raise ValueError(f"a collective of {n} ranks")
    if not nbytes >= 0:
        raise ValueError(f"a message of {nbytes} bytes")


def bus_factor(op: str, n: Any) -> Any:
    """Returns bytes through the busiest port over `nbytes`, of `n` ranks (or an array of them).

    It is nccl-tests' busbw factor: bus bandwidth = factor · nbytes / time is comparable with the
    link's bandwidth for any operation and n. Source: nccl-tests, doc/PERFORMANCE.md,
    src/scatter.cu and src/gather.cu. 0 for one rank and for a barrier. Raises ValueError for an
    unknown name.
    """
    if op not in OPERATIONS:
        raise ValueError(f"{op!r} is none of {', '.join(OPERATIONS)}")
    if op == "all_reduce":
        return 2 * (n - 1) / n
    if op in ("broadcast", "reduce", "send_recv"):
        return 1.0 * (n > 1)
    return 0.0 * n if op == "barrier" else (n - 1) / n


@dataclass(frozen=True)
class Transfer:
    """`count` equal calls of one collective, or messages, of one rank in a step.

    Attributes:
        dim: the group: tp, cp, dp, pp, embedding or world.
        op: one of `OPERATIONS`.
        nbytes: of one call, the whole buffer, as nccl-tests counts it.
        count: calls in a step; of send_recv, messages that the rank sends.
        what: the content, in a few words.
    """

    dim: str
    op: str
    nbytes: int
    count: int
    what: str


def wire_bytes(transfer: Transfer, n: int) -> float:
    """Returns the bytes that one rank sends for all calls in a ring (or chain) of n ranks."""
    return transfer.count * transfer.nbytes * bus_factor(transfer.op, n)


def messages(count: float, nbytes: float, link: Link, latencies: float | None = None) -> float:
    """Seconds of `count` messages one after another: count · (α + N/B).

    `latencies`: the number of α where it is another: latencies · α + count · N/B.
    """
    wire = nbytes / (link.gb_per_s * 1e9)
    if latencies is None:
        return count * (link.latency_us * 1e-6 + wire)
    return latencies * link.latency_us * 1e-6 + count * wire


def ring_time(op: str, n: int, nbytes: float, link: Link) -> float:
    """Seconds of a ring of n − 1 messages of N/n: (n − 1)·α + (n − 1)/n · N/B; of twice as many in
    an all-reduce; of one message of N in a send_recv.

    A ring is bandwidth-optimal among algorithms that add on the ranks (Patarasuk and Yuan 2009;
    nccl-tests, doc/PERFORMANCE.md). A scatter's root sends the n − 1 messages, as every rank does
    in an all-to-all, on a network on which all pairs can talk at once.
    """
    check_sizes(n, nbytes)
    if op == "send_recv":
        return messages(1, nbytes, link) if n > 1 else 0.0
    return messages((2 if op == "all_reduce" else 1) * (n - 1), nbytes / n, link)


def tree_all_reduce(n: int, nbytes: float, link: Link) -> float:
    """Seconds of a pipelined double binary tree: 2⌈log₂ n⌉·α + 2·N/B.

    Two trees carry half of the bytes each, and a leaf in one is an inner node in the other, so all
    ports are busy (Sanders, Speck and Träff 2009; NCCL since 2.4). Faster than the ring for many
    ranks and little data; it sends n/(n − 1) times as much.
    """
    check_sizes(n, nbytes)
    return messages(2, nbytes, link, 2 * math.ceil(math.log2(n))) if n > 1 else 0.0


def broadcast(n: int, nbytes: float, link: Link, segments: int = 1) -> float:
    """Seconds of a chain in `segments` pipelined segments: (S + n − 2)(α + N/(S·B)).

    A reduce is one run backwards. S = 1 is store and forward, (n − 1)(α + N/B); with many segments
    the time tends to N/B for any n. Source: Woolley, "NCCL: Accelerated Multi-GPU Collective
    Communications", 2015, with α added.
    """
    check_sizes(n, nbytes)
    if segments < 1:
        raise ValueError(f"a broadcast in {segments} segments")
    return messages(segments + n - 2, nbytes / segments, link) if n > 1 else 0.0


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


def two_level_time(
    op: str, inner: int, outer: int, nbytes: float, inner_link: Link, outer_link: Link
) -> float:
    """Seconds of `inner` ranks in each of `outer` NVLink domains: all bytes inside, and 1/inner of
    them between, as each rank has its shard on its own rail.

    All-reduce: 2(g − 1)(α₁ + N/(g·B₁)) + 2(m − 1)(α₂ + N/(g·m·B₂)). Source: Jia et al. 2018
    (arXiv:1807.11205) §3; ml-engineering's network notes.
    """
    inside = ring_time(op, inner, nbytes, inner_link)
    return inside + ring_time(op, outer, nbytes / inner, outer_link)


def collective_time(op: str, n: int, nbytes: float, link: Link) -> float:
    """Seconds of any of `OPERATIONS`: the faster of ring and tree, the best number of segments, and
    a dissemination barrier of ⌈log₂ n⌉·α (Hensgen, Finkel and Manber 1988; gloo's).

    Raises ValueError for another name.
    """
    if op not in OPERATIONS:
        raise ValueError(f"{op!r} is none of {', '.join(OPERATIONS)}")
    check_sizes(n, nbytes)
    if op == "barrier":
        return messages(0, 0.0, link, math.ceil(math.log2(n)))
    if op in ("broadcast", "reduce"):
        return broadcast(n, nbytes, link, best_segments(n, nbytes, link))
    ring = ring_time(op, n, nbytes, link)
    return min(ring, tree_all_reduce(n, nbytes, link)) if op == "all_reduce" else ring


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
    size = math.prod(layout.size(d) for d in known[dim])
    moved = np.moveaxis(grid, axes, range(-len(axes), 0)).reshape(-1, size)
    return np.ascontiguousarray(moved)


def neighbours(layout: Layout, dim: str) -> tuple[Slots, Slots]:
    """Returns (pairs,), (pairs,): ranks that exchange data along `dim`, from and to.

    Rings for tp, cp and dp; two members are one pair. For pp rank k with rank k + 1, and the last
    with the first if stages loop; for `embedding` the first with the last.
    """
    ranks = members(layout, dim)
    if layout.wraps if dim == "pp" else ranks.shape[1] > 2 and dim not in OPEN_CHAINS:
        return ranks.ravel(), np.roll(ranks, -1, axis=1).ravel()
    return ranks[:, :-1].ravel(), ranks[:, 1:].ravel()


def _levels(cluster: Cluster, groups: Matrix) -> Matrix | None:
    """Returns (groups, outer, inner): positions in `groups` (of slots) by domain, then by leaf
    switch; None unless all groups have `inner` > 1 members in each of several domains.

    The j-th members of all domains, in the order of their rails, form an outer group.
    """
    domain, size = cluster.domain[groups], groups.shape[1]
    inner = int((domain[0] == domain[0, 0]).sum())
    if inner in (1, size) or size % inner:
        return None
    order = np.lexsort((cluster.leaf[groups], domain), axis=1).reshape(len(groups), -1, inner)
    placed = _tiled(domain, order)
    whole = (placed == placed[:, :, :1]).all()
    apart = (placed[:, 1:, 0] != placed[:, :-1, 0]).all()
    return order if whole and apart else None


def _tiled(groups: npt.NDArray[Any], order: Matrix) -> npt.NDArray[Any]:
    """Returns (groups, outer, inner) of (groups, n) in the order of `_levels`."""
    return np.take_along_axis(groups, order.reshape(len(order), -1), axis=1).reshape(order.shape)


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
    """Classifies the links of tp, cp, dp, pp and `embedding`."""
    return {dim: _classify(placement, dim) for dim in CLASSIFIED}


def _classify(placement: RankMapping, dim: str) -> DimLinks:
    cluster = placement.cluster
    groups = placement.slots[members(placement.layout, dim)]
    count, size = groups.shape
    if size == 1:
        return DimLinks(dim, 1, count, {}, count, 0, 0)
    ranks = neighbours(placement.layout, dim)
    here, there = (placement.slots[r] for r in ranks)
    kinds, rail = cluster.link_class(here, there), cluster.rail_of
    counts = np.bincount(kinds, minlength=len(LinkClass))
    inside, one_leaf = (
        (numbers == numbers[:, :1]).all(axis=1)
        for numbers in (cluster.domain[groups], cluster.leaf[groups])
    )
    crossing = np.flatnonzero(~inside & ~one_leaf)

    def pair(i: int) -> Pair:
        a, b = (cluster.slot_name(int(slots[i])) for slots in (here, there))
        return Pair((int(ranks[0][i]), int(ranks[1][i])), (a, b), LinkClass(kinds[i]))

    wanted = LinkClass.NVLINK if dim in ("tp", "cp") else LinkClass.RAIL
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
        hierarchy=None if dim in OPEN_CHAINS else _hierarchy(cluster, groups),
        offending=tuple(pair(i) for i in np.flatnonzero(kinds > wanted)[:SHOWN_PAIRS]),
    )


def _hierarchy(cluster: Cluster, groups: Matrix) -> Hierarchy | None:
    """Returns the two levels of groups of slots; None if groups have none or differ."""
    order = _levels(cluster, groups)
    if order is None:
        return None
    rail = _tiled(cluster.rail_of[groups], order)
    return Hierarchy(order.shape[2], order.shape[1], bool((rail == rail[:, :1]).all()))


def two_levels(placement: RankMapping, dim: str) -> tuple[list[list[int]], list[list[int]]] | None:
    """Returns the inner and outer groups of ranks that reduce `dim` in two levels (`Hierarchy`).

    The j-th members of the inner groups are an outer group, and hold the same shard between the
    levels. None without two levels, or if ranks inside a domain are not in the order of their rails
    (snake), as the members of a process group are in rank order.
    """
    ranks = members(placement.layout, dim)
    order = _levels(placement.cluster, placement.slots[ranks])
    if order is None:
        return None
    tiled = _tiled(ranks, order)
    if (np.diff(tiled, axis=2) < 0).any():
        return None
    outer = np.sort(tiled.transpose(0, 2, 1), axis=2)
    return tiled.reshape(-1, tiled.shape[2]).tolist(), outer.reshape(-1, tiled.shape[1]).tolist()


@dataclass(frozen=True)
class Flows:
    """Simultaneous flows from slots `here` to `there`, element by element; `weights`: the fraction
    of a flow's bytes that each sends, None: 1."""

    cluster: Cluster
    here: Slots
    there: Slots
    weights: Bytes | None = None

    @cached_property
    def kinds(self) -> npt.NDArray[np.int8]:
        return self.cluster.link_class(self.here, self.there)

    @cached_property
    def counts(self) -> dict[LinkClass, float]:
        """Number of flows in each link class, by weight."""
        found = np.bincount(self.kinds, self.weights, minlength=len(LinkClass))
        return {k: found[k].item() for k in LinkClass if found[k]}

    def slowest(self, leaf_weight: Bytes | None = None) -> Link | None:
        """Returns the wire of the slowest flow, with sharing; None if a pair has no wire.

        `leaf_weight`: these are a sample, of which the outgoing flows count: flows up a leaf
        switch, times its weight, are those over the NICs under it.
        """
        if LinkClass.NONE in self.counts:
            return None
        cluster = self.cluster
        ends = (self.here,) if leaf_weight is not None else (self.here, self.there)
        through_nic, up = 1, 0.0  # the most flows through a NIC, and up a leaf over its NICs
        outside, spine = self.kinds > LinkClass.NVLINK, self.kinds == LinkClass.SPINE
        if cluster.shares_nics:
            through_nic = max(
                int(np.bincount(cluster.nic[end[outside]]).max(initial=1)) for end in ends
            )
        if spine.any():
            nics = cluster.leaf_nics
            for end in ends:
                flows = np.bincount(cluster.leaf[end[spine]], minlength=nics.size)
                load = flows / np.maximum(nics, 1) if leaf_weight is None else flows * leaf_weight
                up = max(up, float(load.max()))
        found = [cluster.nvlink] if LinkClass.NVLINK in self.counts else []
        if LinkClass.RAIL in self.counts:
            found.append(Link(cluster.rail.gb_per_s / through_nic, cluster.rail.latency_us))
        if LinkClass.SPINE in self.counts:
            shared = max(through_nic, up * (cluster.oversubscription or 1.0))
            found.append(Link(cluster.spine.gb_per_s / shared, cluster.spine.latency_us))
        return Link(min(w.gb_per_s for w in found), max(w.latency_us for w in found))


def flows_of(
    dim: str, cluster: Cluster, groups: Matrix, loops: int = 1
) -> tuple[Flows, int, Flows | None]:
    """Returns the flows of all groups' rings (or stages), and in two levels the members inside of a
    domain and the flows between domains; else 1, None.

    `groups`: slots. A chain of stages has its forward flows only; backward is the mirror image.
    With `loops` the last rank sends to the first in all loops but one.
    """
    if dim == "pp" and (loops == 1 or groups.shape[1] == 2):
        return Flows(cluster, groups[:, :-1].ravel(), groups[:, 1:].ravel()), 1, None
    ring = Flows(cluster, groups.ravel(), np.roll(groups, -1, axis=1).ravel())
    if dim == "pp":
        weights = np.ones(groups.shape)
        weights[:, -1] = (loops - 1) / loops
        return replace(ring, weights=weights.ravel()), 1, None
    order = None if dim in OPEN_CHAINS else _levels(cluster, groups)
    if order is None:
        return ring, 1, None
    placed = _tiled(groups, order)
    after = np.roll(placed, -1, axis=1)  # the same member of the next domain
    return ring, order.shape[2], Flows(cluster, placed.ravel(), after.ravel())


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
    """Price of one step: `dims` in the order of the transfers."""

    dims: dict[str, DimPrice]

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
        every = [d.nbytes for d in self.dims.values()]
        sums = {k: math.fsum(nbytes.get(k, 0.0) for nbytes in every) for k in LinkClass}
        return {k: total for k, total in sums.items() if total}


def price_transfer(
    transfer: Transfer, paths: Paths, cluster: Cluster, algorithms: tuple[str, ...] = ALGORITHMS
) -> PricedTransfer:
    """Returns the cheapest of the allowed algorithms for one kind of transfer."""
    n, nbytes, link, op = paths.n, transfer.nbytes, paths.flat, transfer.op
    options = {}
    if link is not None and op == "all_reduce":
        options["ring"] = ring_time(op, n, nbytes, link)
        if "tree" in algorithms:
            options["tree"] = tree_all_reduce(n, nbytes, link)
    elif link is not None:
        name = "send_recv" if op == "send_recv" else "ring"
        options[name] = collective_time(op, n, nbytes, link)
    if op in IN_TWO_LEVELS and paths.outer is not None and "hierarchical" in algorithms:
        options["hierarchical"] = two_level_time(
            op, paths.inner, paths.domains, nbytes, cluster.nvlink, paths.outer
        )
    if not options:
        return PricedTransfer(transfer, math.inf, "no path")
    name = min(options, key=lambda k: options[k])
    return PricedTransfer(transfer, options[name] * transfer.count, name)


def price_step(
    placement: RankMapping,
    transfers: list[Transfer],
    *,
    algorithms: tuple[str, ...] = ALGORITHMS,
) -> StepPrice:
    """Returns seconds by dimension and bytes by link class of one step.

    `transfers` are the busiest rank's; those of pp are the traffic between two neighbours, half of
    it each way. Dimensions of size one are left out. `algorithms` limits those of reductions.
    """
    cluster, layout = placement.cluster, placement.layout
    dims = {}
    for dim in dict.fromkeys(t.dim for t in transfers):
        groups = placement.slots[members(layout, dim)]
        if groups.shape[1] == 1:
            continue
        ring, inner, outer = flows_of(dim, cluster, groups, layout.loops)
        between_domains = None if outer is None else outer.slowest()
        paths = Paths(groups.shape[1], ring.slowest(), inner, between_domains)
        priced = tuple(
            price_transfer(t, paths, cluster, algorithms) for t in transfers if t.dim == dim
        )
        flat, inside, between = flow_bytes(priced, paths)
        nbytes = {k: count * flat for k, count in ring.counts.items() if flat}
        if outer is not None and between:
            for k, count in outer.counts.items():
                nbytes[k] = nbytes.get(k, 0.0) + count * between
            nvlink = nbytes.get(LinkClass.NVLINK, 0.0)
            nbytes[LinkClass.NVLINK] = nvlink + groups.size * inside
        dims[dim] = DimPrice(dim, paths, priced, nbytes)
    return StepPrice(dims)


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


def loads_of(placement: RankMapping, price: StepPrice) -> Loads:
    """Returns the bytes that every GPU and leaf switch sends."""
    cluster = placement.cluster
    nvlink, nic = np.zeros(cluster.size), np.zeros(cluster.size)
    leaf = np.zeros(cluster.leaf_nics.size)

    def add(flows: Flows, nbytes: float) -> None:
        """Adds `nbytes` at the senders of the flows."""
        kinds, slots = flows.kinds, flows.here
        for total, chosen, numbers in (
            (nvlink, kinds == LinkClass.NVLINK, slots),
            (nic, kinds > LinkClass.NVLINK, slots),
            (leaf, kinds == LinkClass.SPINE, cluster.leaf[slots]),
        ):
            weights = None if flows.weights is None else flows.weights[chosen]
            total += nbytes * np.bincount(numbers[chosen], weights, minlength=total.size)

    for dim, priced in price.dims.items():
        groups = placement.slots[members(placement.layout, dim)]
        flat, inside, between = flow_bytes(priced.transfers, priced.paths)
        ring, _, outer = flows_of(dim, cluster, groups, placement.layout.loops)
        if dim == "pp":  # half of the bytes goes forward, half back
            add(ring, flat / 2)
            add(Flows(cluster, ring.there, ring.here, ring.weights), flat / 2)
            continue
        add(ring, flat)
        if outer is not None and between:
            add(outer, between)
            nvlink[groups.ravel()] += inside
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
    each message with its wire to itself.
    """
    kind, found = LinkClass(int(cluster.link_class(a, b))), []
    if kind not in (LinkClass.SELF, LinkClass.NONE):
        found.append(Route(messages(1, nbytes, cluster.link(kind)), (a, b), (kind,)))
    near = cluster.domain == cluster.domain[a]
    near &= (cluster.rail_of == cluster.rail_of[b]) & (cluster.unit == cluster.unit[b])
    relays = np.flatnonzero(near)
    if kind > LinkClass.RAIL and relays.size:
        same_node = relays[cluster.node[relays] == cluster.node[a]]
        relay = int((same_node if same_node.size else relays)[0])
        seconds = messages(1, nbytes, cluster.nvlink) + messages(1, nbytes, cluster.rail)
        found.append(Route(seconds, (a, relay, b), (LinkClass.NVLINK, LinkClass.RAIL)))
    return sorted(found, key=lambda r: (r.seconds, len(r.hops)))
