"""Prices collectives on a network in which a rank mapping determines the links that groups share.

A message takes α + N/B seconds (Hockney 1994). The price of a step follows these rules:

1. All groups of one dimension communicate at the same time, one dimension after the other, and
   nothing overlaps with compute. The seconds are an upper bound on the waits in a step.
2. A flow is the traffic of one rank to its neighbour. Inside a domain, a flow has the GPU's NVLink
   to itself (NVSwitch does not block). Between domains, it has the bandwidth of its GPU's NIC
   divided by the number of flows through that NIC in one direction. Over the spine, it also shares
   the uplinks of the leaf switch, whose bandwidth is that of the NICs under the leaf divided by the
   oversubscription, with all flows going up (or down).
3. A ring is as fast as its slowest flow, and a dimension is as fast as its slowest ring. All rings
   are priced with the lowest bandwidth and the highest latency of any pair. A tree, for small
   messages, is priced with the same bandwidth and latency.
4. In two levels (reduce-scatter inside the domain, all-reduce along the rails with 1/inner of the
   bytes, all-gather inside the domain), all outer rings run at the same time and share links as in
   rule 2.
5. The stages of a pipeline form a chain of ranks. With several loops, the last rank also sends to
   the first one, in all loops but the last.
6. Each transfer takes the cheapest of ring, tree and two levels. A ring costs infinity if a pair in
   it has no wire.
7. An all-to-all of experts (ep) is not a ring: each rank sends to all other ranks of its group at
   the same time. The all-to-all takes as long as the fullest NVLink, NIC or leaf switch needs for
   the bytes of all its pairs.

Sources: Wang et al. 2023 (arXiv:2307.12169) for rails and domains; the DGX SuperPOD reference
architecture for leaf switches, units and uplinks. All computations are vectorized with numpy, so
that a million ranks take a fraction of a second.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from parallel3d.blueprint.cluster import Cluster, Link, LinkClass, Slots
from parallel3d.blueprint.collectives import OPERATIONS, Transfer, bus_factor
from parallel3d.blueprint.groups import Matrix, levels, members, tiled
from parallel3d.blueprint.rank_mapping import RankMapping

OPEN_CHAINS = ("pp", "embedding")  # the last rank sends to the first only in looped pipelines
ALGORITHMS = ("ring", "tree", "hierarchical")
PAIRS = "pairs"  # the algorithm of an all-to-all of experts
IN_TWO_LEVELS = ("all_reduce", "reduce_scatter", "all_gather")

Bytes = npt.NDArray[np.float64]

# The following functions price collectives of `n` ranks, each with one full-duplex port of
# bandwidth `link.gb_per_s` (B) and latency `link.latency_us` (α) per message. `nbytes` (N) is the
# size of the whole buffer as nccl-tests counts it: the input of all-reduce, broadcast, send,
# reduce-scatter, scatter and all-to-all, and the output of all-gather and gather. The arithmetic of
# reductions costs nothing, and neither does a collective of one rank. Fewer than one rank or a
# negative size raises ValueError.


def check_sizes(n: int, nbytes: float = 0.0) -> None:
    """Raises ValueError for fewer than one rank or a negative number of bytes."""
    if n < 1:
        raise ValueError(f"a collective of {n} ranks")
    if not nbytes >= 0:
        raise ValueError(f"a message of {nbytes} bytes")


def messages(count: float, nbytes: float, link: Link, latencies: float | None = None) -> float:
    """Returns the seconds of `count` messages, one after the other: count · (α + N/B).

    With `latencies`, α counts that many times instead: latencies · α + count · N/B.
    """
    wire = nbytes / (link.gb_per_s * 1e9)
    if latencies is None:
        return count * (link.latency_us * 1e-6 + wire)
    return latencies * link.latency_us * 1e-6 + count * wire


def ring_time(op: str, n: int, nbytes: float, link: Link) -> float:
    """Returns the seconds of a ring: (n − 1)·α + (n − 1)/n · N/B for n − 1 messages of N/n.

    An all-reduce has twice as many messages; a send_recv has one message of N.

    A ring is bandwidth-optimal among algorithms that do the reduction on the ranks (Patarasuk and
    Yuan 2009; nccl-tests, doc/PERFORMANCE.md). In a scatter, the root sends the n − 1 messages; in
    an all-to-all, every rank does, on a network on which all pairs can communicate at once.
    """
    check_sizes(n, nbytes)
    if op == "send_recv":
        return messages(1, nbytes, link) if n > 1 else 0.0
    return messages((2 if op == "all_reduce" else 1) * (n - 1), nbytes / n, link)


def tree_all_reduce(n: int, nbytes: float, link: Link) -> float:
    """Returns the seconds of an all-reduce by a double binary tree: 2⌈log₂ n⌉·α + 2·N/B.

    Two pipelined trees carry half of the bytes each. A leaf in one tree is an inner node in the
    other, so that all ports are busy (Sanders, Speck and Träff 2009; NCCL since 2.4). The tree is
    faster than a ring for many ranks and little data, but sends n/(n − 1) times as many bytes.
    """
    check_sizes(n, nbytes)
    return messages(2, nbytes, link, 2 * math.ceil(math.log2(n))) if n > 1 else 0.0


def broadcast(n: int, nbytes: float, link: Link, segments: int = 1) -> float:
    """Returns the seconds of a broadcast along a chain, in pipelined segments.

    With S = `segments` it takes (S + n − 2)(α + N/(S·B)). A reduce takes as long, in the opposite
    direction. S = 1 is store and forward and takes (n − 1)(α + N/B); with many segments, the time
    tends to N/B for any n. Source: Woolley, "NCCL: Accelerated Multi-GPU Collective
    Communications", 2015, with α added.
    """
    check_sizes(n, nbytes)
    if segments < 1:
        raise ValueError(f"a broadcast in {segments} segments")
    return messages(segments + n - 2, nbytes / segments, link) if n > 1 else 0.0


def best_segments(n: int, nbytes: float, link: Link) -> int:
    """Returns the number of segments with which `broadcast` is fastest.

    The number is √((n − 2)·N / (α·B)), rounded up or down, whichever is faster. There is at least
    one segment, and each segment has at least one byte.
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
    """Returns the seconds of a collective in two levels: `inner` ranks in each of `outer` domains.

    All bytes travel inside domains. Between domains, each rank sends its shard, 1/inner of the
    bytes, on its own rail. With g = `inner` and m = `outer`, an all-reduce takes
    2(g − 1)(α₁ + N/(g·B₁)) + 2(m − 1)(α₂ + N/(g·m·B₂)) seconds. Sources: Jia et al. 2018
    (arXiv:1807.11205) §3; the network notes of ml-engineering.
    """
    inside = ring_time(op, inner, nbytes, inner_link)
    return inside + ring_time(op, outer, nbytes / inner, outer_link)


def collective_time(op: str, n: int, nbytes: float, link: Link) -> float:
    """Returns the seconds of a collective, which is one of `OPERATIONS`.

    An all-reduce uses the faster of ring and tree, and a broadcast or reduce uses the best number
    of segments. A barrier takes ⌈log₂ n⌉·α (dissemination: Hensgen, Finkel and Manber 1988; used by
    gloo). Raises ValueError for another name.
    """
    if op not in OPERATIONS:
        raise ValueError(f"{op!r} must be one of {', '.join(OPERATIONS)}")
    check_sizes(n, nbytes)
    if op == "barrier":
        return messages(0, 0.0, link, math.ceil(math.log2(n)))
    if op in ("broadcast", "reduce"):
        return broadcast(n, nbytes, link, best_segments(n, nbytes, link))
    ring = ring_time(op, n, nbytes, link)
    return min(ring, tree_all_reduce(n, nbytes, link)) if op == "all_reduce" else ring


@dataclass(frozen=True)
class Flows:
    """Simultaneous flows from each slot in `here` to the slot at the same index in `there`.

    `weights`: the share of a full flow's bytes that each flow sends, or None if all are full.
    """

    cluster: Cluster
    here: Slots
    there: Slots
    weights: Bytes | None = None

    def reversed(self) -> Flows:
        return Flows(self.cluster, self.there, self.here, self.weights)

    @cached_property
    def kinds(self) -> npt.NDArray[np.int8]:
        return self.cluster.link_class(self.here, self.there)

    @cached_property
    def counts(self) -> dict[LinkClass, float]:
        """Returns link class → sum of the weights of the flows over such links."""
        found = np.bincount(self.kinds, self.weights, minlength=len(LinkClass))
        return {k: found[k].item() for k in LinkClass if found[k]}

    def slowest(self) -> Link | None:
        """Returns the lowest bandwidth of the flows, which share links, and their highest latency.

        Returns None if a pair has no wire.
        """
        if LinkClass.NONE in self.counts:
            return None
        cluster, ends = self.cluster, (self.here, self.there)
        # `through_nic`: largest number of flows through a NIC. `up`: largest number of flows up (or
        # down) a leaf switch, divided by the number of NICs under it.
        through_nic, up = 1, 0.0
        outside, spine = self.kinds > LinkClass.NVLINK, self.kinds == LinkClass.SPINE
        if cluster.shares_nics:
            through_nic = max(
                int(np.bincount(cluster.nic[end[outside]]).max(initial=1)) for end in ends
            )
        if spine.any():
            nics = np.maximum(cluster.leaf_nics, 1)
            flows = (np.bincount(cluster.leaf[end[spine]], minlength=nics.size) for end in ends)
            up = max(float((count / nics).max()) for count in flows)
        found = [cluster.nvlink] if LinkClass.NVLINK in self.counts else []
        if LinkClass.RAIL in self.counts:
            found.append(Link(cluster.rail.gb_per_s / through_nic, cluster.rail.latency_us))
        if LinkClass.SPINE in self.counts:
            shared = max(through_nic, up * (cluster.oversubscription or 1.0))
            found.append(Link(cluster.spine.gb_per_s / shared, cluster.spine.latency_us))
        return Link(min(w.gb_per_s for w in found), max(w.latency_us for w in found))


@dataclass(frozen=True)
class Exchange:
    """Simultaneous flows from each rank to all others of its group.

    Flows of a rank over links of the same class are merged into one.

    Attributes:
        size: number of ranks in a group.
        here: slot that sends, for each merged flow.
        kinds: link class of each merged flow.
        weights: number of receivers of each merged flow.
    """

    cluster: Cluster
    size: int
    here: Slots
    kinds: npt.NDArray[np.int8]
    weights: Bytes

    @classmethod
    def of(cls, cluster: Cluster, groups: Matrix) -> Exchange:
        """Returns the flows of an all-to-all in every group; each row of `groups` is a group."""
        slots, size = groups.ravel(), groups.shape[1]
        domain, leaf = cluster.domain[groups], cluster.leaf[groups]
        near, on_leaf = _equals(domain), _equals(leaf)
        both = _equals(domain * (int(leaf.max()) + 1) + leaf)
        far = LinkClass.NONE if cluster.oversubscription is None else LinkClass.SPINE
        counts = {
            LinkClass.NVLINK: near - 1,
            LinkClass.RAIL: on_leaf - both,
            far: size - near - on_leaf + both,
        }
        here, kinds, weights = [], [], []
        for kind, count in counts.items():
            some = count.ravel() > 0
            here.append(slots[some])
            kinds.append(np.full(int(some.sum()), kind, dtype=np.int8))
            weights.append(count.ravel()[some].astype(float))
        return cls(cluster, size, *(np.concatenate(part) for part in (here, kinds, weights)))

    @cached_property
    def counts(self) -> dict[LinkClass, float]:
        """Returns link class → number of pairs with such a link."""
        found = np.bincount(self.kinds, self.weights, minlength=len(LinkClass))
        return {k: found[k].item() for k in LinkClass if found[k]}

    def slowest(self) -> Link | None:
        """Returns a link over which one rank's whole buffer takes as long as the exchange.

        Returns None if a pair has no wire.
        """
        if LinkClass.NONE in self.counts:
            return None
        cluster = self.cluster
        inside, spine = self.kinds == LinkClass.NVLINK, self.kinds == LinkClass.SPINE
        outside = ~inside
        found = [self.weights[inside].max(initial=0.0) / cluster.nvlink.gb_per_s]
        rates = np.where(spine, cluster.spine.gb_per_s, cluster.rail.gb_per_s)
        nics = cluster.nic[self.here[outside]]
        found.append(np.bincount(nics, (self.weights / rates)[outside]).max(initial=0.0))
        if spine.any():
            up = np.bincount(cluster.leaf[self.here[spine]], self.weights[spine])
            nics = np.maximum(cluster.leaf_nics[: up.size], 1)
            over = cluster.oversubscription or 1.0
            found.append(float((up / nics).max()) * over / cluster.spine.gb_per_s)
        latency = max(cluster.link(kind).latency_us for kind in self.counts)
        return Link(self.size / float(max(found)), latency)


def _equals(numbers: npt.NDArray[Any]) -> Slots:
    """Returns, for each element, the number of equal elements in its row, including itself."""
    rows = np.arange(len(numbers))[:, None] * (int(numbers.max()) + 1) + numbers
    _, place, count = np.unique(rows, return_inverse=True, return_counts=True)
    return count[place].reshape(numbers.shape)


class DimFlows(NamedTuple):
    """Simultaneous flows of all groups of one dimension.

    Attributes:
        ring: flows of the rings of all groups or, for pp, from each stage to the next.
        inner: number of ranks of a group in one domain, or 1 without two levels.
        inside, between: with two levels, flows of the rings inside and between domains.
        pairs: flows of an all-to-all of experts, or None if the dimension is not ep.
    """

    ring: Flows
    inner: int = 1
    inside: Flows | None = None
    between: Flows | None = None
    pairs: Exchange | None = None

    def sent(self, price: DimPrice) -> Iterator[tuple[Flows | Exchange, float]]:
        """Yields (flows, bytes of each flow) of a step.

        A tree is counted as a ring, although it sends n / (n − 1) times as many bytes.
        """
        paths = price.paths
        flat = 0.0
        inside = 0.0
        between = 0.0
        exchanged = 0.0
        for p in price.transfers:
            op, total = p.transfer.op, float(p.transfer.nbytes) * p.transfer.count
            if p.algorithm == PAIRS:
                exchanged += total / paths.n
            elif p.algorithm != "hierarchical":
                flat += total * bus_factor(op, paths.n)
            else:
                inside += total * bus_factor(op, paths.inner)
                between += total / paths.inner * bus_factor(op, paths.domains)
        if price.dim == "pp":  # half of the bytes go to the next stage, half to the previous one
            yield self.ring, flat / 2
            yield self.ring.reversed(), flat / 2
        else:
            yield self.ring, flat
        if self.between is not None and self.inside is not None and between:
            yield self.between, between
            yield self.inside, inside
        if self.pairs is not None and exchanged:
            yield self.pairs, exchanged


def flows_of(dim: str, cluster: Cluster, groups: Matrix, loops: int = 1) -> DimFlows:
    """Returns the flows of a dimension; each row of `groups` holds the slots of a group.

    For a pipeline, only the flows of the forward are returned, because those of the backward mirror
    them. With several `loops`, the last rank sends to the first in all loops but one.
    """
    if dim == "pp" and (loops == 1 or groups.shape[1] == 2):
        return DimFlows(Flows(cluster, groups[:, :-1].ravel(), groups[:, 1:].ravel()))
    if dim == "pp":
        weights = np.ones(groups.shape)
        weights[:, -1] = (loops - 1) / loops
        return DimFlows(replace(_ring(cluster, groups, 1), weights=weights.ravel()))
    order = None if dim in OPEN_CHAINS else levels(cluster, groups)
    pairs = Exchange.of(cluster, groups) if dim == "ep" else None
    if order is None:
        return DimFlows(_ring(cluster, groups, 1), pairs=pairs)
    placed = tiled(groups, order)  # each row is a domain
    inside, between = (_ring(cluster, placed, axis) for axis in (2, 1))
    return DimFlows(_ring(cluster, groups, 1), order.shape[2], inside, between, pairs)


def _ring(cluster: Cluster, slots: Matrix, axis: int) -> Flows:
    return Flows(cluster, slots.ravel(), np.roll(slots, -1, axis=axis).ravel())


@dataclass(frozen=True)
class Paths:
    """Links that price the transfers of one dimension.

    Attributes:
        n: number of ranks in a group.
        flat: link of rings and trees, or None if a pair has no wire.
        inner: number of ranks of a group in one domain, for two levels.
        outer: link of rings between domains, or None if two levels are not possible.
        pairs: link of an all-to-all of experts, or None if an all-to-all is priced as a ring.
    """

    n: int
    flat: Link | None
    inner: int = 1
    outer: Link | None = None
    pairs: Link | None = None

    @property
    def domains(self) -> int:
        return self.n // self.inner


@dataclass(frozen=True)
class PricedTransfer:
    """A transfer with its price and algorithm."""

    transfer: Transfer
    seconds: float  # for all `transfer.count` calls
    algorithm: str  # ring, tree, hierarchical, send_recv, pairs, or "no path"


@dataclass(frozen=True)
class DimPrice:
    """Price of one dimension in a step. `nbytes`: link class → bytes that all ranks send."""

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
    """Price of one step. `dims`: dimension → price, in the order of the transfers."""

    dims: dict[str, DimPrice]

    @cached_property
    def seconds(self) -> float:
        return math.fsum(d.seconds for d in self.dims.values())

    @property
    def reachable(self) -> bool:
        """Returns whether all neighbours in rings have a wire.

        The sums of scalars over `world` are ignored, because they may take any route.
        """
        return all(d.paths.flat is not None for d in self.dims.values() if d.dim != "world")

    @property
    def nbytes(self) -> dict[LinkClass, float]:
        """Returns link class → bytes that all ranks send in a step."""
        every = [d.nbytes for d in self.dims.values()]
        sums = {k: math.fsum(nbytes.get(k, 0.0) for nbytes in every) for k in LinkClass}
        return {k: total for k, total in sums.items() if total}


def price_transfer(
    transfer: Transfer, paths: Paths, cluster: Cluster, algorithms: tuple[str, ...] = ALGORITHMS
) -> PricedTransfer:
    """Returns the price of a transfer with the cheapest of the allowed algorithms."""
    n = paths.n
    nbytes = transfer.nbytes
    link = paths.flat
    op = transfer.op
    options = {}
    if link is not None and op == "all_reduce":
        options["ring"] = ring_time(op, n, nbytes, link)
        if "tree" in algorithms:
            options["tree"] = tree_all_reduce(n, nbytes, link)
    elif op == "all_to_all" and paths.pairs is not None:
        options[PAIRS] = messages(1, nbytes, paths.pairs)
    elif link is not None:
        options["send_recv" if op == "send_recv" else "ring"] = collective_time(op, n, nbytes, link)
    if op in IN_TWO_LEVELS and paths.outer is not None and "hierarchical" in algorithms:
        options["hierarchical"] = two_level_time(
            op, paths.inner, paths.domains, nbytes, cluster.nvlink, paths.outer
        )
    if not options:
        return PricedTransfer(transfer, math.inf, "no path")
    name = min(options, key=lambda k: options[k])
    return PricedTransfer(transfer, options[name] * transfer.count, name)


def price_dim(
    dim: str,
    transfers: list[Transfer],
    paths: Paths,
    cluster: Cluster,
    algorithms: tuple[str, ...] = ALGORITHMS,
) -> DimPrice:
    """Returns the price of a dimension's transfers over `paths`, without bytes by link class."""
    mine = (price_transfer(t, paths, cluster, algorithms) for t in transfers if t.dim == dim)
    return DimPrice(dim, paths, tuple(mine), {})


def price_step(
    placement: RankMapping,
    transfers: list[Transfer],
    *,
    algorithms: tuple[str, ...] = ALGORITHMS,
) -> StepPrice:
    """Returns the seconds and the bytes by link class of every dimension in one step.

    Dimensions of size one are left out.

    Args:
        transfers: transfers of the busiest rank; those of pp are the traffic between two
            neighbours, half in each direction.
        algorithms: algorithms to choose from; a ring is always allowed.
    """
    cluster, layout = placement.cluster, placement.layout
    dims = {}
    for dim in dict.fromkeys(t.dim for t in transfers):
        groups = placement.slots[members(layout, dim)]
        if groups.shape[1] == 1:
            continue
        flows = flows_of(dim, cluster, groups, layout.loops)
        between = None if flows.between is None else flows.between.slowest()
        flat, pairs = flows.ring.slowest(), None
        if flows.pairs is not None:
            pairs = flows.pairs.slowest()
            flat = None if pairs is None else flat  # a single pair without a wire rules out rings
        paths = Paths(groups.shape[1], flat, flows.inner, between, pairs)
        price = price_dim(dim, transfers, paths, cluster, algorithms)
        for used, nbytes in flows.sent(price):
            for kind, count in used.counts.items():
                if nbytes:
                    price.nbytes[kind] = price.nbytes.get(kind, 0.0) + count * nbytes
        dims[dim] = price
    return StepPrice(dims)
