"""Shares of the optimizer's step with its estimates: pieces of bf16 states, Muon's home ranks."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

PIECE = 1 << 24  # elements whose states in bf16 are widened and stepped together on a GPU


def is_hidden(name: str, dims: int) -> bool:
    """Whether Muon steps a tensor: the matrices of the layers, no table and no head."""
    return dims == 2 and name.startswith("layers.")


class Home(NamedTuple):
    """The rank of a stage that orthogonalises a matrix."""

    tp: int
    dp: int


def homes(shapes: Mapping[str, tuple[int, ...]], tp: int, dp: int) -> dict[str, Home]:
    """Returns each matrix's home, alike on all ranks: the longest task to the least busy rank.

    A matrix of m × n costs max(m, n) · min(m, n)² (Graham 1969: at most 4/3 of the best balance).
    """
    cost = {name: max(shape) * min(shape) ** 2 for name, shape in shapes.items()}
    busy = {Home(t, d): 0 for d in range(dp) for t in range(tp)}
    found = {}
    for name in sorted(cost, key=lambda name: (-cost[name], name)):
        found[name] = min(busy, key=lambda home: (busy[home], home))
        busy[found[name]] += cost[name]
    return found
