"""Lists the ranks of every group of a layout, and splits groups into two levels on a cluster."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import numpy.typing as npt

from parallel3d.blueprint.cluster import Cluster
from parallel3d.blueprint.layout import DIMENSIONS, EXPERT_DIMENSIONS, Layout
from parallel3d.blueprint.rank_mapping import RankMapping

# Further groups → the dimensions along which their members lie, the fastest first.
GROUPED = {"world": DIMENSIONS, "embedding": ("pp",), "dp_cp": ("cp", "dp")}
Matrix = npt.NDArray[np.int64]  # (groups, members)


def members(layout: Layout, dim: str) -> Matrix:
    """Returns the ranks of every group of `dim`, (groups, n), in their order inside the group.

    `dim` is tp, cp, dp, pp, `dp_cp` (gradients), `ep` (experts), `edp` (gradients of experts),
    `embedding` (first and last stage) or `world` (loss and gradient norm). Raises ValueError for
    another `dim`, and for `ep` and `edp` in a layout without experts.
    """
    if layout.ep and dim in EXPERT_DIMENSIONS:
        stages = np.sort(_along(layout, ("tp", "cp", "dp")), axis=1)
        runs = stages.reshape(len(stages), -1, layout.ep)
        every = runs if dim == "ep" else runs.transpose(0, 2, 1)
        found: Matrix = every.reshape(-1, every.shape[2])
        return np.ascontiguousarray(found[np.argsort(found[:, 0])])
    along = (dim,) if dim in DIMENSIONS else GROUPED.get(dim)
    if along is None:
        raise ValueError(f"{dim!r} is not one of {', '.join((*DIMENSIONS, *GROUPED))}")
    if dim == "embedding":
        ends = members(layout, "pp")[:, [0, -1]]
        return ends if layout.pp > 1 else ends[:, :1]
    return _along(layout, along)


def _along(layout: Layout, along: tuple[str, ...]) -> Matrix:
    slowest_first = layout.order.split("-")[::-1]
    grid = np.arange(layout.world_size).reshape([layout.size(d) for d in slowest_first])
    axes = [i for i, d in enumerate(slowest_first) if d in along]
    size = math.prod(layout.size(d) for d in along)
    moved = np.moveaxis(grid, axes, range(-len(axes), 0)).reshape(-1, size)
    return np.ascontiguousarray(moved)


def levels(cluster: Cluster, groups: Matrix) -> Matrix | None:
    """Returns the positions of each group's members, sorted by domain, (groups, outer, inner).

    `groups` are slots. The `inner` members in a domain are in the order of their leaf switches, and
    the j-th members of all domains form an outer group. The result is None unless every group has
    the same number of members, more than 1, in each of several domains.
    """
    domain, size = cluster.domain[groups], groups.shape[1]
    inner = int((domain[0] == domain[0, 0]).sum())
    if inner in (1, size) or size % inner:
        return None
    order = np.lexsort((cluster.leaf[groups], domain), axis=1).reshape(len(groups), -1, inner)
    placed = tiled(domain, order)
    whole = (placed == placed[:, :, :1]).all()
    apart = (placed[:, 1:, 0] != placed[:, :-1, 0]).all()
    return order if whole and apart else None


def tiled(groups: npt.NDArray[Any], order: Matrix) -> npt.NDArray[Any]:
    """Reorders (groups, n) to (groups, outer, inner), by the positions that `levels` returned."""
    return np.take_along_axis(groups, order.reshape(len(order), -1), axis=1).reshape(order.shape)


def two_levels(placement: RankMapping, dim: str) -> tuple[list[list[int]], list[list[int]]] | None:
    """Returns the inner and outer groups of ranks that reduce `dim` in two levels.

    The j-th members of the inner groups form an outer group, and hold the same shard between the
    two reductions. The result is None if there are no two levels. It is also None if ranks inside a
    domain are not in the order of their rails (snake), because the members of a process group are
    in rank order.
    """
    ranks = members(placement.layout, dim)
    order = levels(placement.cluster, placement.slots[ranks])
    if order is None:
        return None
    groups = tiled(ranks, order)
    if (np.diff(groups, axis=2) < 0).any():
        return None
    outer = np.sort(groups.transpose(0, 2, 1), axis=2)
    inner = groups.reshape(-1, groups.shape[2])
    return inner.tolist(), outer.reshape(-1, groups.shape[1]).tolist()
