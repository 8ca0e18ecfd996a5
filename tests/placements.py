"""Makes random clusters, layouts and traffic for placement tests, and classifies links slowly."""

from __future__ import annotations

import itertools
import math
import random
from collections import Counter, defaultdict
from collections.abc import Iterator

from parallel3d.blueprint.cluster import Cluster, Link
from parallel3d.blueprint.collectives import Transfer
from parallel3d.blueprint.layout import Layout
from parallel3d.blueprint.rank_mapping import RankMapping, Tiling, joined

NVLINK, RAIL, SPINE = Link(450.0, 2.0), Link(50.0, 5.0), Link(50.0, 8.0)


def a_cluster(nodes: int, gpus: int = 8, domain: int | None = None, **other: object) -> Cluster:
    """Returns a cluster with H100-like speeds; one NIC and rail per GPU unless `rails` says
    otherwise."""
    given = {"rails": gpus, "oversubscription": 1.0, **other}
    return Cluster(
        "test", nodes, gpus, domain or gpus, nvlink=NVLINK, rail=RAIL, spine=SPINE, **given
    )


def random_cluster(rng: random.Random, most_nodes: int = 12) -> Cluster:
    """Returns a random cluster, even or uneven; domains are a part of a node, a node, or several
    nodes."""
    nodes, gpus = rng.randint(1, most_nodes), rng.choice([1, 2, 3, 4, 6, 8])
    parts = [d for d in range(1, gpus + 1) if gpus % d == 0]
    domain = rng.choice([*parts, gpus, gpus, 2 * gpus, 3 * gpus])
    other: dict[str, object] = {
        "rails": rng.choice([gpus, gpus, 1, 2, 4]),
        "unit_nodes": rng.choice([None, 1, 2, 3, 4]),
        "oversubscription": rng.choice([None, 1.0, 1.0, 2.0, 4.0]),
    }
    if rng.random() < 0.3:
        other["node_gpus"] = tuple(rng.randint(1, gpus) for _ in range(nodes))
    if rng.random() < 0.2 and domain >= gpus:
        other["node_domain"] = tuple(rng.randint(0, 3) for _ in range(nodes))
    if rng.random() < 0.2:
        other["node_unit"] = tuple(rng.randint(0, 2) for _ in range(nodes))
    if rng.random() < 0.1:
        other["local_rail"] = tuple(rng.randrange(int(other["rails"])) for _ in range(gpus))
    if rng.random() < 0.1:
        other["local_domain"] = tuple(rng.randrange(3) for _ in range(gpus))
    return a_cluster(nodes, gpus, domain, **other)


def random_layout(rng: random.Random, at_most: int) -> Layout:
    """Returns a random layout of up to `at_most` ranks."""
    sizes = {"tp": 1, "cp": 1, "dp": 1, "pp": 1}
    for dim in rng.sample(list(sizes), 4):
        room = at_most // _product(sizes)
        sizes[dim] = rng.choice([n for n in (1, 2, 2, 3, 4, 4, 8) if n <= room])
    return Layout(**sizes)


def _product(sizes: dict[str, int]) -> int:
    return sizes["tp"] * sizes["cp"] * sizes["dp"] * sizes["pp"]


def some_traffic(layout: Layout, rng: random.Random | None = None) -> list[Transfer]:
    """Returns the traffic of a step of a model with 13e9 parameters; with `rng`, in random
    proportions."""
    scale = {d: 10 ** rng.uniform(-3, 1) if rng else 1.0 for d in ("tp", "cp", "dp", "pp")}
    hidden = 4096 * 5120 * 2
    shard = int(13e9 * 4 / layout.tp / layout.pp)
    found = [
        Transfer("tp", "all_reduce", int(hidden * scale["tp"]), 4 * 8 * 40 // layout.pp, "layers"),
        Transfer("cp", "all_gather", int(hidden * scale["cp"]), 2 * 8 * 40 // layout.pp, "keys"),
        Transfer("pp", "send_recv", int(hidden * scale["pp"]), 8, "forward"),
        Transfer("pp", "send_recv", int(hidden * scale["pp"]), 8, "back"),
        Transfer(layout.replica_dim, "all_reduce", int(shard * scale["dp"]), 1, "gradients"),
        Transfer("embedding", "all_reduce", 4 * 5120 * 50304 // layout.tp, 1, "tied table"),
        Transfer("world", "all_reduce", 12, 1, "gradient norm"),
    ]
    return [t for t in found if t.dim in ("embedding", "world") or layout.size(t.dim) > 1]


def slow_places(cluster: Cluster) -> list[tuple[int, int, object, int]]:
    """Returns (node, local, domain, unit) of every slot, counted from the fields alone."""
    found = []
    for node in range(cluster.nodes):
        count = cluster.node_gpus[node] if cluster.node_gpus else cluster.gpus_per_node
        for local in range(count):
            if cluster.node_domain:
                domain: object = cluster.node_domain[node]
            elif cluster.local_domain:
                domain = (node, cluster.local_domain[local])
            elif cluster.domain_gpus >= cluster.gpus_per_node:
                domain = node * cluster.gpus_per_node // cluster.domain_gpus
            else:
                domain = (node, local // cluster.domain_gpus)
            if cluster.node_unit:
                unit = cluster.node_unit[node]
            else:
                unit = node // cluster.unit_nodes if cluster.unit_nodes else 0
            found.append((node, local, domain, unit))
    return found


def slow_groups(layout: Layout, dim: str) -> list[list[int]]:
    """Returns groups in rank order, from coordinates in dicts."""
    groups: dict[tuple, list[int]] = defaultdict(list)
    names = ("pp", "dp", "cp", "tp")  # slowest first
    along = {"embedding": ("pp",), "dp_cp": ("dp", "cp")}.get(dim, (dim,))
    for rank, place in enumerate(itertools.product(*(range(layout.size(d)) for d in names))):
        groups[tuple(i for d, i in zip(names, place, strict=True) if d not in along)].append(rank)
    if dim == "embedding":
        return [[g[0], g[-1]] if len(g) > 1 else g for g in groups.values()]
    return list(groups.values())


def slow_pairs(group: list[int], dim: str) -> list[tuple[int, int]]:
    """Returns neighbours in one group: a ring, or a chain of stages."""
    pairs = list(itertools.pairwise(group))
    if dim != "pp" and len(group) > 1:
        pairs.append((group[-1], group[0]))
    return pairs


def slow_classes(placement: RankMapping, dim: str) -> dict[str, object]:
    """Returns the same facts about a dimension as `classify`, by sets and dicts."""
    cluster, places = placement.cluster, slow_places(placement.cluster)
    at = {rank: places[int(slot)] for rank, slot in enumerate(placement.slots)}

    def leaf(rank: int) -> tuple[int, int]:
        local = at[rank][1]
        rail = cluster.local_rail[local] if cluster.local_rail else local % cluster.rails
        return at[rank][3], rail

    def kind(a: int, b: int) -> str:
        if at[a][2] == at[b][2]:
            return "nvlink"
        if leaf(a) == leaf(b):
            return "rail"
        return "none" if cluster.oversubscription is None else "spine"

    groups = slow_groups(placement.layout, dim)
    pairs = [p for g in groups for p in slow_pairs(g, dim)]
    inside = [g for g in groups if len({at[r][2] for r in g}) == 1]
    on_rail = [g for g in groups if g not in inside and len({leaf(r) for r in g}) == 1]
    levels = [sorted(Counter(at[r][2] for r in g).values()) for g in groups]
    inner = {n for counts in levels for n in counts}
    outer = {len(counts) for counts in levels}
    alike = dim not in ("pp", "embedding") and len(inner) == 1 and len(outer) == 1
    sizes = (inner.pop(), outer.pop()) if alike else None
    return {
        "pairs": Counter(kind(*p) for p in pairs),
        "in_domain": len(inside),
        "on_rail": len(on_rail),
        "crossing": len(groups) - len(inside) - len(on_rail),
        "between_units": sum(
            kind(a, b) in ("spine", "none") and leaf(a)[1] == leaf(b)[1] for a, b in pairs
        ),
        "levels": sizes if sizes and min(sizes) > 1 else None,
        "worse than a rail": [p for p in pairs if kind(*p) in ("spine", "none")],
    }


def every_tiling(layout: Layout, most: int) -> list[Tiling]:
    """Returns all orders of the dimensions' prime factors; none if there are more than `most`."""
    left = Counter((d, p) for d in ("tp", "cp", "dp", "pp") for p in _primes(layout.size(d)))
    orders = math.factorial(left.total())
    for times in left.values():
        orders //= math.factorial(times)
    return [joined(digits) for digits in _arrangements(left)] if orders <= most else []


def _primes(n: int) -> list[int]:
    first = next((p for p in range(2, math.isqrt(n) + 1) if n % p == 0), n)
    return [first, *_primes(n // first)] if n > 1 else []


def _arrangements(left: Counter[tuple[str, int]]) -> Iterator[list[tuple[str, int]]]:
    if not left.total():
        yield []
    for digit in [d for d, times in left.items() if times]:
        for rest in _arrangements(left - Counter([digit])):
            yield [digit, *rest]
