"""Rank mapping: the GPU of a cluster that holds each rank.

A rank is a place in `Layout`'s default order, a slot a GPU of the cluster. Every group holds the
same ranks in the same order under every mapping, so training gives the same bits.
"""

from __future__ import annotations

import itertools
import operator
import re
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from parallel3d.topology.cluster.parts import Cluster, Slots
from parallel3d.topology.layout import DEFAULT_ORDER, DIMENSIONS, Layout

SNAKE = "-snake"
SNAKED = ("dp", "pp")


@dataclass(frozen=True)
class Tiling:
    """Mixed-radix digits of a slot number, fastest first: `tp8-dp2-pp4-dp16`.

    A dimension may occur more than once: here dp is split, two neighbours inside a domain and 16
    outside. The earlier digits of a dimension are the faster ones of its index.

    `snake` (`tp4-dp2-dp8-snake`): an earlier digit of dp or pp runs backwards in every other turn
    of the later ones, as in a reflected Gray code. Neighbours then differ in one digit only, so
    that a ring leaves a domain and enters the next one on the same rail. NCCL reverses its rings on
    every other node for the same reason (NCCL_CROSS_NIC).
    """

    digits: tuple[tuple[str, int], ...]
    snake: bool = False

    @classmethod
    def from_order(cls, order: str, layout: Layout) -> Tiling:
        """Makes a plain order, such as `tp-cp-dp-pp`: each dimension once, fastest first."""
        return cls(tuple((d, layout.size(d)) for d in order.split("-")))

    @classmethod
    def parse(cls, text: str, layout: Layout) -> Tiling:
        """Parses an order (`tp-dp-pp`; a missing dimension has size 1) or a tiling (`tp4-dp2-pp2`).

        Raises ValueError for malformed text, or factors that do not multiply to the layout's sizes.
        """
        digits: list[tuple[str, int]] = []
        plain = text.removesuffix(SNAKE)
        for part in plain.split("-"):
            match = re.fullmatch(r"(tp|cp|dp|pp)(\d*)", part)
            if match is None:
                raise ValueError(f"{part!r} is neither a dimension nor one with a factor")
            digits.append((match[1], int(match[2]) if match[2] else layout.size(match[1])))
        for dim in DIMENSIONS:
            product = int(np.prod([n for d, n in digits if d == dim], dtype=np.int64))
            if product != layout.size(dim):
                raise ValueError(f"its {dim} multiplies to {product}, not to {layout.size(dim)}")
        return cls(tuple(digits), snake=plain != text)

    def __str__(self) -> str:
        digits = "-".join(f"{d}{n}" for d, n in self.digits if n > 1) or "one rank"
        return digits + SNAKE if self.snake else digits

    def rank_of_slot(self, layout: Layout) -> Slots:
        """Returns (world,): the rank at each place of the grid that the digits count through."""
        place = self.coordinates(np.arange(layout.world_size))
        return np.sum([place[d] * layout.stride(d) for d in DIMENSIONS], axis=0)

    @property
    def strides(self) -> list[int]:
        """How far apart in the grid the neighbours along each digit are."""
        return list(itertools.accumulate((n for _, n in self.digits), operator.mul, initial=1))[:-1]

    def coordinates(self, positions: Slots) -> dict[str, Slots]:
        """Returns the index along each dimension at some places of the grid."""
        place = {d: np.zeros_like(positions) for d in DIMENSIONS}
        for (dim, factor), stride in reversed(list(zip(self.digits, self.strides, strict=True))):
            digit = positions // stride % factor
            if self.snake and dim in SNAKED:
                digit = np.where(place[dim] % 2, factor - 1 - digit, digit)
            place[dim] = place[dim] * factor + digit
        return place

    def positions(self, place: Mapping[str, Slots]) -> Slots:
        """Returns the places of the grid at some coordinates: the inverse of `coordinates`."""
        found, later = np.zeros_like(place[DIMENSIONS[0]]), dict(place)
        for (dim, factor), stride in zip(self.digits, self.strides, strict=True):
            later[dim], digit = np.divmod(later[dim], factor)
            if self.snake and dim in SNAKED:
                digit = np.where(later[dim] % 2, factor - 1 - digit, digit)
            found = found + digit * stride
        return found


@dataclass(frozen=True)
class RankMapping:
    """Rank mapping: `slots[rank]` is the GPU of `rank`; `how` describes its source.

    Raises ValueError unless every rank has one slot of its own.
    """

    cluster: Cluster
    layout: Layout
    slots: Slots
    how: str

    def __post_init__(self) -> None:
        if self.layout.order != DEFAULT_ORDER:
            raise ValueError(f"a placement permutes {DEFAULT_ORDER}, not {self.layout.order}")
        if self.slots.shape != (self.layout.world_size,):
            raise ValueError(f"{self.slots.size} slots for {self.layout.world_size} ranks")
        if self.slots.min() < 0 or self.slots.max() >= self.cluster.size:
            raise ValueError(f"a slot is outside of 0..{self.cluster.size - 1}")
        if np.bincount(self.slots).max() > 1:
            raise ValueError("two ranks share a slot")

    @classmethod
    def tiled(
        cls,
        cluster: Cluster,
        layout: Layout,
        tiling: Tiling,
        slots: Slots | None = None,
        how: str | None = None,
    ) -> RankMapping:
        """Counts `tiling` over `slots` (default: all of the cluster's, in order)."""
        free = np.arange(cluster.size) if slots is None else slots
        if free.size < layout.world_size:
            raise ValueError(f"{free.size} GPUs for {layout.world_size} ranks")
        placed = np.empty(layout.world_size, dtype=np.int64)
        placed[tiling.rank_of_slot(layout)] = free[: layout.world_size]
        return cls(cluster, layout, placed, how or str(tiling))

    @cached_property
    def ranks(self) -> Slots:
        """(cluster.size,): the rank at each slot, -1 for none."""
        found = np.full(self.cluster.size, -1, dtype=np.int64)
        found[self.slots] = np.arange(self.layout.world_size)
        return found
