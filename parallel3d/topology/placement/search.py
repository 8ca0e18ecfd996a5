"""Rank-mapping search: the configured mapping, or the one with the least predicted communication.

`search` compares, over each base of `candidates.bases`:

1. every order of the dimensions in use, with the default order;
2. every way to fill a domain with a factor of each dimension, the rest outside in every order. A
   lower bound (each dimension alone on the network) leaves the best `BEAM` ways;
3. for the best of these, two dimensions that share a unit (or a node of several domains);
4. the best of all these, and the default order, as snakes (see `Tiling`);
5. in small worlds every tiling, if there are at most `EVERY`.

Small or uneven worlds are priced in full; larger ones by `RankSample`, then the best few and the
default in full, so that the first never costs more than the default. In uneven worlds of over
`FULL_UNEVEN` ranks the sample may miss an odd domain; the full price of the winners has it.
"""

from __future__ import annotations

import itertools
import math
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import numpy as np

from parallel3d.errors import UserError, nearest
from parallel3d.estimate.network import (
    Paths,
    StepPrice,
    Transfer,
    members,
    price_dim,
    price_step,
)
from parallel3d.topology.cluster.parts import Cluster, LinkClass, Slots
from parallel3d.topology.layout import DEFAULT_ORDER, DIMENSIONS, Layout
from parallel3d.topology.links import DimLinks, classify
from parallel3d.topology.placement.candidates import (
    Base,
    RankSample,
    bases,
    every_tiling,
    inside_splits,
    permutations,
    snaked,
    split_at,
    tilings,
)
from parallel3d.topology.tiling import RankMapping, Tiling

if TYPE_CHECKING:
    from parallel3d.config.schema import Config


BEAM = 10  # ways to fill a domain that are priced
REFINED = 3  # tilings whose units are split in step 3
EVERY = 200  # tilings
FULL = 512  # ranks up to which every candidate is priced in full
FULL_UNEVEN = 4096  # the same for uneven clusters
PRICED = 3  # candidates of larger worlds that are then priced in full


@dataclass(frozen=True)
class Candidate:
    """A tiling over a base. `price` None: `seconds` is an estimate from a sample of the ranks."""

    tiling: Tiling
    base: Base
    seconds: float
    is_default: bool = False
    placement: RankMapping | None = None
    price: StepPrice | None = None

    def __str__(self) -> str:
        name = f"default order {self.tiling}" if self.is_default else str(self.tiling)
        return f"{name}, {self.base.note}" if self.base.note else name


@dataclass(frozen=True)
class _Task:
    """Common inputs of all candidates."""

    cluster: Cluster
    layout: Layout
    transfers: list[Transfer]

    def placed(self, tiling: Tiling, base: Base, is_default: bool = False) -> Candidate:
        """Returns the candidate priced in full; infinity if a needed wire is missing."""
        named = Candidate(tiling, base, math.inf, is_default)
        placement = RankMapping.tiled(self.cluster, self.layout, tiling, base.slots, str(named))
        price = price_step(placement, self.transfers)
        seconds = price.seconds if price.reachable else math.inf
        return replace(named, seconds=seconds, placement=placement, price=price)

    def bound(self, dim: str, factor: int) -> float:
        """Returns seconds of `dim` with `factor` of it in a domain, alone on the network."""
        n, cluster = self.layout.size(dim), self.cluster
        outside = cluster.rail
        if cluster.oversubscription is not None and cluster.spine.gb_per_s > outside.gb_per_s:
            outside = cluster.spine
        paths = Paths(n, cluster.nvlink if factor == n else outside)
        if 1 < factor < n:
            paths = Paths(n, outside, factor, outside)
        return price_dim(dim, self.transfers, paths, cluster).seconds


def search(
    cluster: Cluster,
    layout: Layout,
    transfers: list[Transfer],
    slots: Slots | None = None,
    priced: int = PRICED,
) -> list[Candidate]:
    """Returns rank mappings of `layout` over `slots` (default: all GPUs), cheapest first.

    The default order over the slots as they come is among them, and never cheaper than the first.
    Ties go to the default, then to fewer digits; of equal prices only the simplest is kept. The
    first `priced` are priced in full, the rest are estimates. If no candidate has all wires that it
    needs, all cost infinity.

    Raises ValueError for fewer slots than ranks.
    """
    task = _Task(cluster, layout, transfers)
    tried = bases(cluster, layout, slots)
    if tried[0].slots.size < layout.world_size:
        raise ValueError(f"{tried[0].slots.size} GPUs for {layout.world_size} ranks")
    even = tried[0].whole
    in_full = layout.world_size <= (FULL if even else FULL_UNEVEN)
    scored = [c for base in tried for c in _scored(task, base, in_full)]
    default = task.placed(permutations(layout)[0], tried[0], is_default=True)
    scored = [c for c in scored if c.base is not tried[0] or c.tiling != default.tiling]
    scored = _simplest(sorted(scored, key=_rank))
    best = [c if c.price else task.placed(c.tiling, c.base) for c in scored[: max(priced - 1, 1)]]
    return sorted([*best, default], key=_rank) + scored[len(best) :]


def _rank(candidate: Candidate) -> tuple:
    """Sorts by cost, default, digits, snake, other GPUs, similarity to the default order."""
    order = [DIMENSIONS.index(d) for d, _ in candidate.tiling.digits]
    note, name = candidate.base.note, str(candidate.tiling)
    plain = (len(order), candidate.tiling.snake, bool(note))
    return _cost(candidate), not candidate.is_default, *plain, order, name, note


def _cost(candidate: Candidate) -> float:
    return float(f"{candidate.seconds:.9g}")  # ignores rounding differences


def _simplest(ranked: list[Candidate]) -> list[Candidate]:
    """Keeps the first of those with one price over one base: most differ only inside a domain."""
    first: dict[tuple, Candidate] = {}
    for candidate in ranked:
        first.setdefault((_cost(candidate), candidate.base.note), candidate)
    return list(first.values())


def _scored(task: _Task, base: Base, in_full: bool) -> list[Candidate]:
    """Scores all tilings over one base."""
    layout = task.layout
    sample = (
        None if in_full else RankSample(layout, base.slots, base.domain, base.unit, task.cluster)
    )
    found: dict[Tiling, Candidate] = {}

    def score(tiling: Tiling) -> None:
        if tiling in found:
            return
        if sample is None:
            found[tiling] = task.placed(tiling, base)
        else:
            found[tiling] = Candidate(tiling, base, sample.seconds(tiling, task.transfers))

    for tiling in [*permutations(layout), *(every_tiling(layout, EVERY) if in_full else ())]:
        score(tiling)
    if layout.world_size > base.domain:
        for inside in _best_insides(task, base.domain):
            for tiling in tilings(layout, inside):
                score(tiling)
    best = sorted(found.values(), key=_rank)[:REFINED]
    node = task.cluster.gpus_per_node
    for candidate, boundary in itertools.product(best, {base.unit, node}):
        if base.domain < boundary <= layout.world_size:
            for tiling in split_at(candidate.tiling, base.domain, boundary):
                score(tiling)
    best = sorted(found.values(), key=_rank)[:REFINED]
    for tiling in [permutations(layout)[0], *(c.tiling for c in best)]:
        snake = snaked(tiling, base.domain)
        if snake is not None:
            score(snake)
    return list(found.values())


def _best_insides(task: _Task, domain: int) -> list[dict[str, int]]:
    """Returns the `BEAM` ways to fill a domain with the lowest bound."""
    splits = inside_splits(task.layout, domain)
    bounds = {(d, f): task.bound(d, f) for d in DIMENSIONS for f in sorted({s[d] for s in splits})}
    return sorted(splits, key=lambda s: math.fsum(bounds[d, s[d]] for d in s))[:BEAM]


def place(
    config: Config,
    cluster: Cluster,
    layout: Layout,
    transfers: list[Transfer],
    slots: Slots | None = None,
) -> RankMapping:
    """Returns the rank mapping of `config.placement`; rank 0 is on the first of `slots`.

    `default`: the default order over the slots as they come. `auto`: the first of `search`. An
    order or a tiling: over the slots as they come, sorted, or in equal segments of the domains,
    whichever is cheapest.

    Raises UserError if it is malformed, if there are fewer GPUs than ranks, or if a group needs a
    wire that the cluster lacks.
    """
    free = cluster.size if slots is None else slots.size
    if free < layout.world_size:
        raise UserError(
            f"cluster.nodes={cluster.nodes} gives {free} GPUs for {layout.world_size} ranks "
            f"(tp={layout.tp} · cp={layout.cp} · dp={layout.dp} · pp={layout.pp}); nearest that "
            f"works: cluster.nodes={-(-layout.world_size // cluster.gpus_per_node)}"
        )
    placement = _chosen(config.placement, cluster, layout, transfers, slots)
    if cluster.oversubscription is None:
        refuse_unreachable(placement, classify(placement), transfers)
    return placement


def _chosen(
    wanted: str, cluster: Cluster, layout: Layout, transfers: list[Transfer], slots: Slots | None
) -> RankMapping:
    if wanted == "auto":
        return _mapping(search(cluster, layout, transfers, slots, priced=2)[0])
    if wanted == "default":
        return RankMapping.tiled(cluster, layout, permutations(layout)[0], slots, "default order")
    tiling = _readable(wanted, layout)
    task = _Task(cluster, layout, transfers)
    tried = bases(cluster, layout, slots)
    if len(tried) == 1:
        return RankMapping.tiled(cluster, layout, tiling, slots)
    return _mapping(min((task.placed(tiling, base) for base in tried), key=_rank))


def _mapping(candidate: Candidate) -> RankMapping:
    assert candidate.placement is not None, "candidates that win are priced in full"
    return candidate.placement


def _readable(wanted: str, layout: Layout) -> Tiling:
    """Parses an order or a tiling; raises UserError if it is neither."""
    try:
        return Tiling.parse(wanted, layout)
    except ValueError as error:
        found = [p[:2] for p in wanted.split("-") if p[:2] in DIMENSIONS]
        named = list(dict.fromkeys(found))
        missing = [d for d in DEFAULT_ORDER.split("-") if d not in named and layout.size(d) > 1]
        close = nearest(wanted, ("default", "auto", "file"))
        if named or close is None:
            close = "-".join([*named, *missing])
        raise UserError(
            f"placement={wanted!r}: {error}; allowed are default, auto, file, an order of "
            f"{', '.join(d for d in DIMENSIONS if layout.size(d) > 1) or 'the dimensions'} and a "
            f"tiling such as tp4-dp2-pp2-dp4 whose factors multiply to the sizes; nearest: "
            f"placement={close}"
        ) from error


TRIED_RANKS = 65_536  # largest world in which alternatives to a refused order are tried


def warnings_for(
    placement: RankMapping, links: dict[str, DimLinks], transfers: list[Transfer] | None = None
) -> list[str]:
    """Returns warnings about a rank mapping, worst first.

    `links` is `classify(placement)`. With `transfers` (of one step) the cost is in the sentence,
    and silent groups are ignored. Raises UserError as `refuse_unreachable`.
    """
    refuse_unreachable(placement, links, transfers)
    found = [_leaves_domain(placement, links[d], transfers) for d in ("tp", "cp")]
    between = [links[d] for d in (placement.layout.replica_dim, "pp")]
    found += [_alternates_rails(placement, x) for x in between]
    found += [_between_units(placement, x) for x in between]
    found += [_replica_and_domain(placement), _pp_inside_dp(placement)]
    if any(map(_off_rail, between)):
        found.append(
            "NCCL knows no rails: NCCL_CROSS_NIC=0 keeps each ring on one NIC's rail"
            + ", PXN (NCCL_PXN_DISABLE=0) reaches another rail through an NVLink peer"
            * placement.cluster.forwards
        )
    return [sentence for sentence in found if sentence]


def refuse_unreachable(
    placement: RankMapping, links: dict[str, DimLinks], transfers: list[Transfer] | None = None
) -> None:
    """Raises UserError, with an alternative, if neighbours have no wire between them.

    Forwarding by an NVLink peer (PXN) would reach them, but only with NCCL and at the price of both
    hops for every message, so it does not count as a path.
    """
    for dim, of_dim in links.items():
        silent = transfers is not None and not any(t.dim == dim for t in transfers)
        if silent or not of_dim.pairs.get(LinkClass.NONE):
            continue
        layout, cluster = placement.layout, placement.cluster
        key = f"tp={layout.tp}" if dim == "tp" else f"{dim}={of_dim.size} with tp={layout.tp}"
        pair = next(p for p in of_dim.offending if p.kind is LinkClass.NONE)
        raise UserError(
            f"{key}: cluster {cluster.name} has no spine, so {pair} have no path"
            f"{' but forwarding by an NVLink peer (PXN)' * cluster.forwards}; "
            f"{_what_works(placement, transfers)}"
        )


def _what_works(placement: RankMapping, transfers: list[Transfer] | None) -> str:
    """Returns the nearest layout or order that has wires for all neighbours, by trial."""
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
        inside = price_dim(dim, transfers or [], Paths(links.size, cluster.nvlink), cluster).seconds
        cost += (
            f", {1e3 * priced.seconds:,.0f} ms of communication a step instead of "
            f"{1e3 * inside:,.0f} ms"
        )
    return (
        f"{dim}={links.size} leaves the {cluster.intra_name} domain of {cluster.domain_gpus} GPUs "
        f"in {out} of {links.groups} groups (first: {links.offending[0]}): {cost}; {advice}"
    )


def _off_rail(links: DimLinks) -> int:
    """Counts the pairs that change rail."""
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
    """Returns the default order as a snake over the same GPUs, if it keeps `dim` on its rails."""
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
    """Advises on domains of several nodes (NVL72): one replica in each, and the Slurm segment."""
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
    fit = f"dp={whole} would keep replicas whole, " if whole < layout.dp else ""
    return (
        f"{torn} of {layout.dp} replicas of tp·cp·pp = {replica} GPUs reach over several NVLink "
        f"domains of {cluster.domain_gpus}; {fit}placement=tp-cp-pp-dp puts each in one, and {ask}"
    )


def _pp_inside_dp(placement: RankMapping) -> str | None:
    """Advises on single-node domains (H100): measured runs keep pp outermost."""
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
