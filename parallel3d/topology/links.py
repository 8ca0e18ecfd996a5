"""Finds the links that a rank mapping uses on its cluster.

This module classifies the links between neighbours in each dimension's groups, counts the bytes
over each wire, and lists the routes between rails. It warns of slow links, and refuses a mapping
that needs a missing wire.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np

from parallel3d.blueprint.cluster import Cluster, Link, LinkClass
from parallel3d.blueprint.collectives import Transfer
from parallel3d.blueprint.groups import members
from parallel3d.blueprint.layout import EXPERT_DIMENSIONS
from parallel3d.blueprint.rank_mapping import RankMapping, Tiling, orders
from parallel3d.errors import UserError
from parallel3d.estimate.network import (
    Bytes,
    Flows,
    Paths,
    StepPrice,
    flows_of,
    messages,
    price_dim,
    price_step,
)

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
    """A two-level (hierarchical) reduction.

    It reduces over `inner` members of each domain, and then over `outer` domains. `one_rail`:
    whether every outer group stays on one rail.
    """

    inner: int
    outer: int
    one_rail: bool


@dataclass(frozen=True)
class DimLinks:
    """Links of all groups of one dimension.

    Attributes:
        pairs: number of ranks that send over each class of link. In a ring all ranks send; in a
            chain all ranks but the last one.
        in_domain: number of groups that lie inside one NVLink domain.
        on_rail: number of other groups that lie under one leaf switch.
        crossing: number of all remaining groups.
        rails: number of rails of the first crossing group.
        between_units: number of pairs on one rail that need the spine.
        hierarchy: the two-level reduction that the groups allow, or None.
        offending: the first pairs with a slower link than their dimension should have (NVLink for
            tp, cp and ep, one rail for the others).
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
        """Returns the slowest class of link that a pair uses; `SELF` if there are no pairs."""
        return max((k for k, count in self.pairs.items() if count), default=LinkClass.SELF)


def classify(placement: RankMapping) -> dict[str, DimLinks]:
    """Classifies the links of tp, cp, dp, dp_cp, pp, `embedding` and, with experts, ep and edp."""
    more = EXPERT_DIMENSIONS if placement.layout.ep else ()
    return {dim: _classify(placement, dim) for dim in (*CLASSIFIED, *more)}


def _classify(placement: RankMapping, dim: str) -> DimLinks:
    cluster, rail = placement.cluster, placement.cluster.rail_of
    groups = placement.slots[members(placement.layout, dim)]
    count, size = groups.shape
    if size == 1:
        return DimLinks(dim, 1, count, {}, count, 0, 0)
    flows = flows_of(dim, cluster, groups, placement.layout.loops)
    ring = flows.ring
    if flows.pairs is not None and LinkClass.NONE in flows.pairs.counts:
        # All pairs are listed, because pairs without a wire need not be neighbours in the ring.
        ring = Flows(
            cluster, np.repeat(groups, size, axis=1).ravel(), np.tile(groups, size).ravel()
        )
    here, there, kinds = ring.here, ring.there, ring.kinds
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

    wanted = LinkClass.NVLINK if dim in ("tp", "cp", "ep") else LinkClass.RAIL
    # A refusal names the first pair without a wire, so that pair is always kept.
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
    """The bytes that one step sends over each wire in one direction.

    Attributes:
        nvlink, nic: traffic from each GPU into its domain and through its NIC, (size,).
        uplink: traffic from each leaf switch to the spine, (units, rails).
        port: traffic over one uplink of each leaf switch. A switch with n NICs has
            n / oversubscription uplinks, which share its traffic evenly.
    """

    nvlink: Bytes
    nic: Bytes
    uplink: Bytes
    port: Bytes

    @property
    def largest(self) -> float:
        """Returns the bytes on the busiest wire."""
        return float(max(a.max(initial=0.0) for a in (self.nvlink, self.nic, self.port)))

    def busiest(self, cluster: Cluster) -> dict[str, tuple[str, float]]:
        """Returns the name and bytes of the busiest NIC and uplink, unless they have no traffic."""
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
    """A route of a message: its seconds, its GPUs from sender to receiver, and each hop's wire."""

    seconds: float
    slots: tuple[int, ...]
    hops: tuple[LinkClass, ...]


def routes(cluster: Cluster, a: int, b: int, nbytes: float) -> list[Route]:
    """Returns the routes for one message from slot `a` to slot `b`, cheapest first.

    Without a common domain or leaf switch, a message goes over the spine, or a GPU of a's domain
    under b's leaf switch forwards it (NCCL's PXN, see NCCL_P2P_PXN_LEVEL). Forwarding is priced as
    store and forward, without contention, and is not available over PCIe or sockets.
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


TRIED_RANKS = 65_536  # alternatives to a refused order are tried in worlds of up to this size


def warnings_for(
    placement: RankMapping, links: dict[str, DimLinks], transfers: list[Transfer]
) -> list[str]:
    """Returns warnings about a rank mapping with their cost, the worst kinds first.

    `links` is `classify(placement)`, and `transfers` are those of a step. Raises UserError like
    `refuse_unreachable`.
    """
    refuse_unreachable(placement, links, transfers)
    inside = [dim for dim in ("tp", "cp", "ep") if dim in links]
    found = [_leaves_domain(placement, links[dim], transfers) for dim in inside]
    between = [links[d] for d in (placement.layout.replica_dim, "pp")]
    found += [_alternates_rails(placement, x) for x in between]
    found += [_between_units(placement, x) for x in between]
    found += [_replica_and_domain(placement), _pp_inside_dp(placement)]
    if any(map(_off_rail, between)):
        pxn = ", and PXN (NCCL_PXN_DISABLE=0) reaches another rail through an NVLink peer"
        if not placement.cluster.forwards:
            pxn = ""
        found.append(
            f"NCCL does not know rails: NCCL_CROSS_NIC=0 keeps each ring on one NIC's rail{pxn}"
        )
    return [sentence for sentence in found if sentence]


def _without_wire(links: dict[str, DimLinks], transfers: list[Transfer]) -> DimLinks | None:
    """Returns the links of the first dimension in which neighbours without a wire communicate."""
    used = {t.dim for t in transfers}
    return next((x for d, x in links.items() if d in used and x.pairs.get(LinkClass.NONE)), None)


def refuse_unreachable(
    placement: RankMapping, links: dict[str, DimLinks], transfers: list[Transfer]
) -> None:
    """Raises UserError, which names an alternative, if neighbours have no wire between them.

    Forwarding by an NVLink peer (PXN) would connect them, but only with NCCL and at the cost of two
    hops per message, so it does not count as a path.
    """
    cut = _without_wire(links, transfers)
    if cut is None:
        return
    layout, cluster = placement.layout, placement.cluster
    key = f"tp={layout.tp}" if cut.dim == "tp" else f"{cut.dim}={cut.size} with tp={layout.tp}"
    pair = next(p for p in cut.offending if p.kind is LinkClass.NONE)
    raise UserError(
        f"{key}: cluster {cluster.name} has no spine, so there is no path between {pair}"
        f"{' except forwarding by an NVLink peer (PXN)' * cluster.forwards}; "
        f"{_what_works(placement, transfers)}"
    )


def _what_works(placement: RankMapping, transfers: list[Transfer]) -> str:
    """Returns a phrase that names the nearest order or layout with wires between all neighbours."""
    layout, cluster = placement.layout, placement.cluster
    default, *others = orders(layout)
    tried = [t for t in (default.snaked(cluster.domain_gpus), *others) if t is not None]
    for tiling in tried if layout.world_size <= TRIED_RANKS else ():
        links = classify(RankMapping.tiled(cluster, layout, tiling))
        if _without_wire(links, transfers) is None and links["tp"].in_domain == links["tp"].groups:
            order = str(tiling) if tiling.snake else "-".join(d for d, _ in tiling.digits)
            return f"placement={order} gives all neighbours a path"
    both = layout.tp * layout.dp
    for tp in range(min(both, cluster.domain_gpus), 0, -1):
        if both % tp or tp == layout.tp:
            continue
        other = replace(layout, tp=tp, dp=both // tp)
        links = classify(RankMapping.tiled(cluster, other, orders(other)[0]))
        if _without_wire(links, transfers) is None:
            return f"the largest tp that works on as many GPUs is tp={tp} with dp={both // tp}"
    return f"no tp works with cp={layout.cp} pp={layout.pp} here; set cluster.spine=true or pp=1"


def _leaves_domain(
    placement: RankMapping, links: DimLinks, transfers: list[Transfer]
) -> str | None:
    out = links.groups - links.in_domain
    if not out:
        return None
    cluster, dim = placement.cluster, links.dim
    fits = math.gcd(cluster.domain_gpus, links.size)
    advice = f"{dim}={fits} fits" if fits < links.size else "placement=auto may keep it inside"
    wire = cluster.link(links.worst)
    cost = f"its slowest pair has {wire.gb_per_s:.4g} GB/s instead of {cluster.nvlink.gb_per_s:.4g}"
    priced = price_step(placement, [t for t in transfers if t.dim == dim]).dims.get(dim)
    if priced is not None:
        near = cluster.nvlink
        most = Link(near.gb_per_s * links.size / (links.size - 1), near.latency_us)
        paths = Paths(links.size, near, pairs=most if dim == "ep" else None)
        inside = price_dim(dim, transfers, paths, cluster).seconds
        cost += (
            f", and its communication takes {1e3 * priced.seconds:,.0f} ms a step instead of "
            f"{1e3 * inside:,.0f} ms"
        )
    return (
        f"{dim}={links.size} leaves the {cluster.intra_name} domain of {cluster.domain_gpus} GPUs "
        f"in {out} of {links.groups} groups (first: {links.offending[0]}): {cost}; {advice}"
    )


def _off_rail(links: DimLinks) -> int:
    """Returns the number of pairs whose two GPUs are on different rails."""
    return links.pairs.get(LinkClass.SPINE, 0) - links.between_units


def _alternates_rails(placement: RankMapping, links: DimLinks) -> str | None:
    off = _off_rail(links)
    if not off:
        return None
    cluster, levels = placement.cluster, links.hierarchy
    advice = f"a stride that is a multiple of {cluster.gpus_per_node} keeps a group on one rail"
    advice += " (placement=auto looks for one)"
    if levels is not None:
        then = "on one rail" if levels.one_rail else "still across rails"
        advice = (
            f"reduce in two levels, first over {levels.inner} ranks of each domain and then over "
            f"{levels.outer} domains ({then}); alternatively, {advice}"
        )
    snake = _snake_on_rails(placement, links.dim)
    if snake is not None:
        advice += f"; placement={snake} reverses every other ring, and no ring changes rails"
    return (
        f"{links.dim}={links.size} alternates between {links.rails} rails: {off} of "
        f"{sum(links.pairs.values())} pairs go over the spine (first: {links.offending[0]}); "
        f"{advice}"
    )


def _snake_on_rails(placement: RankMapping, dim: str) -> Tiling | None:
    """Returns the default order as a snake, or None if this does not keep `dim` on its rails."""
    cluster, layout = placement.cluster, placement.layout
    snake = orders(layout)[0].snaked(cluster.domain_gpus)
    if snake is None or layout.world_size > TRIED_RANKS:
        return None
    tried = RankMapping.tiled(cluster, layout, snake, np.sort(placement.slots))
    return None if _off_rail(classify(tried)[dim]) else snake


def _between_units(placement: RankMapping, links: DimLinks) -> str | None:
    if not links.between_units:
        return None
    over = placement.cluster.oversubscription
    thin = f", which is {over:g}:1 oversubscribed" if over and over > 1 else ""
    return (
        f"{links.between_units} of {sum(links.pairs.values())} {links.dim} pairs are on one rail "
        f"but in different units, so their messages pass the spine{thin}"
    )


def _replica_and_domain(placement: RankMapping) -> str | None:
    """Returns advice on replicas in NVLink domains of several nodes (NVL72), or None."""
    layout, cluster = placement.layout, placement.cluster
    replica = layout.tp * layout.cp * layout.pp
    several = cluster.domain_gpus > cluster.gpus_per_node
    if not several or layout.pp == 1 or layout.dp == 1 or replica > cluster.domain_gpus:
        return None
    domain = cluster.domain[placement.slots].reshape(layout.pp, layout.dp, -1)
    torn = int((domain != domain[:1, :, :1]).any(axis=(0, 2)).sum())
    segment = -(-replica // cluster.gpus_per_node)
    ask = (
        f"sbatch --segment={segment} (tp·pp·cp / GPUs per node) keeps the nodes of a replica in "
        "one domain"
    )
    if not torn:
        return f"each replica of {replica} GPUs is in one NVLink domain; {ask}"
    whole = np.unique(cluster.domain).size * (cluster.domain_gpus // replica)
    fit = f"dp={whole} would keep replicas whole, " if whole < layout.dp else ""
    return (
        f"{torn} of {layout.dp} replicas of tp·cp·pp = {replica} GPUs span several NVLink "
        f"domains of {cluster.domain_gpus}; {fit}placement=tp-cp-pp-dp puts each into one, and "
        f"{ask}"
    )


def _pp_inside_dp(placement: RankMapping) -> str | None:
    """Returns advice if dp is outside of pp on domains of a single node (H100), or else None."""
    layout, cluster = placement.layout, placement.cluster
    if cluster.domain_gpus > cluster.gpus_per_node or layout.pp == 1 or layout.dp == 1:
        return None
    if layout.world_size <= cluster.domain_gpus:
        return None
    step = {
        d: abs(int(np.diff(placement.slots[members(layout, d)[0, :2]])[0])) for d in ("dp", "pp")
    }
    if step["pp"] > step["dp"]:
        return None
    return (
        "dp is outside of pp here; on clusters whose NVLink domain is one node, measured runs keep "
        "pp outermost (placement=default), because its messages are the smallest and each involves "
        "only two ranks"
    )
