"""What a placement does badly, in sentences, and what to do about it."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np

from parallel3d.errors import UserError
from parallel3d.topology.cluster.parts import LinkClass
from parallel3d.topology.placement.candidates import permutations, snaked
from parallel3d.topology.price.links import DimLinks, classify, members
from parallel3d.topology.price.step import Paths, price_step, price_transfer
from parallel3d.topology.tiling import RankMapping, Tiling

if TYPE_CHECKING:
    from parallel3d.sizes.transfer import Transfer

TRIED_RANKS = 65_536  # worlds up to which other orders are tried for a refused one


def warnings_for(
    placement: RankMapping, links: dict[str, DimLinks], transfers: list[Transfer] | None = None
) -> list[str]:
    """What the user should know before the job starts, worst first; empty if all is well.

    `links` is `classify(placement)`. With `transfers` (one step's) the cost is in the sentence, and
    groups that send nothing are not counted.

    Raises:
        UserError: a group has no path but forwarding (see `refuse_unreachable`).
    """
    refuse_unreachable(placement, links, transfers)
    found = [_leaves_domain(placement, links[d], transfers) for d in ("tp", "cp")]
    found += [_alternates_rails(placement, links[d]) for d in ("dp", "pp")]
    found += [_between_units(placement, links[d]) for d in ("dp", "pp")]
    found += [_replica_and_domain(placement), _pp_inside_dp(placement)]
    if any(_off_rail(links[d]) for d in ("dp", "pp")):
        found.append(
            "NCCL knows no rails: NCCL_CROSS_NIC=0 keeps each ring on one NIC's rail, PXN "
            "(NCCL_PXN_DISABLE=0) reaches another rail through an NVLink peer"
        )
    return [sentence for sentence in found if sentence]


def refuse_unreachable(
    placement: RankMapping, links: dict[str, DimLinks], transfers: list[Transfer] | None = None
) -> None:
    """Raises UserError where neighbours have no wire between them, with what does work.

    Forwarding through an NVLink peer (PXN) would reach them, on NCCL alone and at the price of both
    hops for every message, so it is not counted as a path.
    """
    for dim, of_dim in links.items():
        silent = transfers is not None and not any(t.dim == dim for t in transfers)
        if silent or not of_dim.pairs.get(LinkClass.NONE):
            continue
        layout, cluster = placement.layout, placement.cluster
        key = f"tp={layout.tp}" if dim == "tp" else f"{dim}={of_dim.size} with tp={layout.tp}"
        pair = next(p for p in of_dim.offending if p.kind is LinkClass.NONE)
        raise UserError(
            f"{key}: cluster {cluster.name} has no spine, so {pair} have no path but forwarding "
            f"by an NVLink peer (PXN); {_what_works(placement, transfers)}"
        )


def _what_works(placement: RankMapping, transfers: list[Transfer] | None) -> str:
    """The nearest layout or order whose neighbours all have wires, tried out."""
    layout, cluster = placement.layout, placement.cluster
    if layout.world_size <= TRIED_RANKS:
        orders = permutations(layout)
        snake = snaked(orders[0], cluster.domain_gpus)
        for tiling in [*([snake] if snake else []), *orders[1:]]:
            tried = RankMapping.tiled(cluster, layout, tiling)
            if _has_paths(tried, transfers) and not _leaves_domain(tried, classify(tried)["tp"]):
                order = str(tiling) if tiling.snake else "-".join(d for d, _ in tiling.digits)
                return f"placement={order} has a path for all"
    both = layout.tp * layout.dp
    fitting = (t for t in range(min(both, cluster.domain_gpus), 0, -1) if both % t == 0)
    for tp in fitting:
        if tp == layout.tp:
            continue
        other = replace(layout, tp=tp, dp=both // tp)
        if _has_paths(RankMapping.tiled(cluster, other, permutations(other)[0]), transfers):
            return f"the largest tp that works on as many GPUs is tp={tp} with dp={both // tp}"
    return f"no tp works with cp={layout.cp} pp={layout.pp} here; set cluster.spine=true or pp=1"


def _has_paths(placement: RankMapping, transfers: list[Transfer] | None) -> bool:
    used = None if transfers is None else {t.dim for t in transfers}
    links = classify(placement)
    return not any(
        x.pairs.get(LinkClass.NONE) for d, x in links.items() if used is None or d in used
    )


def _leaves_domain(
    placement: RankMapping, links: DimLinks, transfers: list[Transfer] | None = None
) -> str | None:
    out = links.groups - links.in_domain
    if not out:
        return None
    cluster, dim = placement.cluster, links.dim
    fits = math.gcd(cluster.domain_gpus, links.size)
    advice = f"{dim}={fits} fits" if fits < links.size else "placement=auto may keep it inside"
    wire = cluster.link(links.worst)
    cost = f"its slowest pair has {wire.gb_per_s:.4g} GB/s instead of {cluster.nvlink.gb_per_s:.4g}"
    priced = price_step(placement, [t for t in transfers or [] if t.dim == dim]).dims.get(dim)
    if priced is not None:
        ideal = Paths(links.size, cluster.nvlink)
        inside = math.fsum(
            price_transfer(t.transfer, ideal, cluster).seconds for t in priced.transfers
        )
        cost += (
            f", {1e3 * priced.seconds:,.0f} ms of communication a step instead of "
            f"{1e3 * inside:,.0f} ms"
        )
    return (
        f"{dim}={links.size} leaves the NVLink domain of {cluster.domain_gpus} GPUs in {out} of "
        f"{links.groups} groups (first: {links.offending[0]}): {cost}; {advice}"
    )


def _off_rail(links: DimLinks) -> int:
    """Pairs that change rail."""
    return links.pairs.get(LinkClass.SPINE, 0) - links.between_units


def _alternates_rails(placement: RankMapping, links: DimLinks) -> str | None:
    off = _off_rail(links)
    if not off:
        return None
    cluster, levels = placement.cluster, links.hierarchy
    advice = f"a stride that is a multiple of {cluster.gpus_per_node} keeps a group on one rail"
    advice += " (placement=auto looks for one)"
    if levels is not None:
        then = "which stays on one rail" if levels.one_rail else "which still changes rail"
        advice = (
            f"reduce in two levels, {levels.inner} inside each domain and then {levels.outer} "
            f"between domains, {then}; or {advice}"
        )
    snake = _snake_on_rails(placement, links.dim)
    if snake is not None:
        advice += f"; placement={snake} turns every other ring round and changes no rail"
    return (
        f"{links.dim}={links.size} alternates between {links.rails} rails: {off} of "
        f"{sum(links.pairs.values())} pairs go over the spine (first: {links.offending[0]}); "
        f"{advice}"
    )


def _snake_on_rails(placement: RankMapping, dim: str) -> Tiling | None:
    """The default order as a snake over the same GPUs, where that keeps `dim` on its rails."""
    cluster, layout = placement.cluster, placement.layout
    snake = snaked(permutations(layout)[0], cluster.domain_gpus)
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
        f"but in different units: they pass leaf, spine and leaf{thin}"
    )


def _replica_and_domain(placement: RankMapping) -> str | None:
    """Domains of several nodes (NVL72): one replica in each, and the Slurm segment for it."""
    layout, cluster = placement.layout, placement.cluster
    replica = layout.tp * layout.cp * layout.pp
    several = cluster.domain_gpus > cluster.gpus_per_node
    if not several or layout.pp == 1 or layout.dp == 1 or replica > cluster.domain_gpus:
        return None
    domain = cluster.domain[placement.slots].reshape(layout.pp, layout.dp, -1)
    torn = int((domain != domain[:1, :, :1]).any(axis=(0, 2)).sum())
    segment = -(-replica // cluster.gpus_per_node)
    ask = f"sbatch --segment={segment} (tp·pp·cp / GPUs per node) keeps its nodes in one domain"
    if not torn:
        return f"each replica of {replica} GPUs is in one NVLink domain; {ask}"
    whole = np.unique(cluster.domain).size * (cluster.domain_gpus // replica)
    fit = f"dp={whole} would leave room for whole replicas, " if whole < layout.dp else ""
    return (
        f"{torn} of {layout.dp} replicas of tp·cp·pp = {replica} GPUs reach over several NVLink "
        f"domains of {cluster.domain_gpus}; {fit}placement=tp-cp-pp-dp puts each in one, and {ask}"
    )


def _pp_inside_dp(placement: RankMapping) -> str | None:
    """Single-node domains (H100): runs that were measured keep pp outermost."""
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
        "pp outermost (placement=default): its messages are the smallest and wait for nobody"
    )
