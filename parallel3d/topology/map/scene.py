"""What a map of a cluster shows: tiles of nodes, the marks of one rank's groups, bytes per wire.

The terminal map and the SVG draw the same scene. Pure numpy, for two nodes or a hundred thousand.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import chain

import numpy as np
import numpy.typing as npt

from parallel3d.topology.cluster.parts import Cluster
from parallel3d.topology.layout import Layout
from parallel3d.topology.tiling import Placement

CHOSEN = "rank"  # the mark of the chosen rank itself
GROUPS = ("tp", "cp", "pp", "dp")
GROUP_WORDS = {"tp": "tensor", "cp": "context", "pp": "pipeline", "dp": "data"}
MANY_STAGES = 8  # with more, only the first, the last and those beside the rank are drawn
Nodes = npt.NDArray[np.int64]


@dataclass(frozen=True)
class Tile:
    """Nodes that are drawn side by side under one set of leaf switches.

    `domain` is the NVLink domain that they all belong to where domains span nodes; None where every
    node holds whole domains.
    """

    unit: int
    domain: int | None
    nodes: Nodes


def marks(layout: Layout, rank: int) -> dict[int, str]:
    """The ranks to highlight: rank -> the dimension whose group it shares with the chosen one."""
    found = {
        member: dim
        for dim in GROUPS
        if layout.size(dim) > 1
        for member in layout.group_of(rank, dim)
    }
    found[rank] = CHOSEN
    return found


def domains_span_nodes(cluster: Cluster) -> bool:
    """Whether some NVLink domain has GPUs of two nodes."""
    if cluster.node_domain:
        return len(set(cluster.node_domain)) < cluster.nodes
    return cluster.domain_gpus > cluster.gpus_per_node


def tiles(cluster: Cluster) -> list[Tile]:
    """All nodes, by unit and, where domains span nodes, by domain; in the order of their nodes."""
    first = np.minimum(cluster.first_slot, cluster.size - 1)
    unit = cluster.unit[first]
    wide = domains_span_nodes(cluster)
    domain = cluster.domain[first] if wide else np.zeros_like(unit)
    order = np.lexsort((np.arange(cluster.nodes), domain, unit))
    changes = (np.diff(unit[order]) != 0) | (np.diff(domain[order]) != 0)
    parts = np.split(order, np.flatnonzero(changes) + 1)
    made = [Tile(int(unit[p[0]]), int(domain[p[0]]) if wide else None, p) for p in parts]
    return sorted(made, key=lambda tile: (tile.unit, int(tile.nodes[0])))


def shown_nodes(placement: Placement, rank: int, limit: int) -> Nodes:
    """At most `limit` nodes to draw, ascending: those that tell most about the chosen rank.

    Its own node, those of its tp, cp and pp groups, the cluster's ends, then its dp group.
    """
    cluster, layout = placement.cluster, placement.layout
    if cluster.nodes <= limit:
        return np.arange(cluster.nodes)

    def where(dim: str) -> list[int]:
        group = np.asarray(layout.group_of(rank, dim)[: 4 * limit])
        nodes = cluster.node[placement.slots[group]]
        return list(dict.fromkeys(nodes.tolist()))

    near = chain([int(cluster.node[placement.slots[rank]])], where("tp"), where("cp"))
    stages, ends = where("pp"), [0, cluster.nodes - 1]
    if len(stages) > MANY_STAGES:
        mine = layout.coordinates(rank).pp
        here = max(0, min(mine - 1, len(stages) - 3))
        stages = [*stages[here : here + 3], *stages[:2], stages[-1]]
    # A few members of dp tell the pattern.
    wanted = chain(near, stages, ends, where("dp")[: max(4, limit // 4)], (1, 2))
    return np.sort(np.asarray(list(dict.fromkeys(wanted))[:limit], dtype=np.int64))


def hidden_marks(
    placement: Placement, marked: dict[int, str], shown: Nodes
) -> dict[str, dict[int, int]]:
    """Marked ranks on nodes that are not shown: dimension -> node -> how many."""
    visible = np.zeros(placement.cluster.nodes, dtype=bool)
    visible[shown] = True
    found: dict[str, dict[int, int]] = {}
    ranks = np.fromiter(marked, dtype=np.int64)
    for rank, node in zip(
        ranks.tolist(), placement.cluster.node[placement.slots[ranks]].tolist(), strict=True
    ):
        if not visible[node]:
            by_node = found.setdefault(marked[rank], {})
            by_node[node] = by_node.get(node, 0) + 1
    return found


def byte_text(nbytes: float) -> str:
    """`1.25 GB`: three digits, decimal units."""
    sizes = (1e18, 1e15, 1e12, 1e9, 1e6, 1e3)
    for unit, size in zip(("EB", "PB", "TB", "GB", "MB", "kB"), sizes, strict=True):
        if nbytes >= 0.9995 * size:
            return f"{_three_digits(nbytes / size)} {unit}"
    return f"{nbytes:.0f} B"


def _three_digits(value: float) -> str:
    if value >= 999.5:
        return f"{value:,.0f}"
    return f"{value:.{2 if value < 9.995 else 1 if value < 99.95 else 0}f}"
