"""Maps each rank to a GPU of a cluster.

A rank is a place in `Layout`'s default order; a slot is a GPU of the cluster. Every group holds the
same ranks in the same order under every mapping, so training gives the same bits.
"""

from __future__ import annotations

import itertools
import math
import re
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from parallel3d.blueprint.cluster import Cluster, Slots
from parallel3d.blueprint.layout import DEFAULT_ORDER, DIMENSIONS, Layout

SNAKE = "-snake"
SNAKED = ("dp", "pp")


@dataclass(frozen=True)
class Tiling:
    """Mixed-radix digits of a slot number, fastest first: `tp8-dp2-pp4-dp16`.

    A dimension may occur more than once. In this example dp is split into 2 neighbours inside a
    domain and 16 outside. Earlier digits of a dimension are less significant digits of its index.

    With `snake` (`tp4-dp2-dp8-snake`), an earlier digit of dp or pp runs backwards in every other
    turn of the later digits, as in a reflected Gray code. Neighbours then differ in only one digit,
    so a ring leaves a domain and enters the next domain on the same rail. NCCL reverses its rings
    on every other node for the same reason (NCCL_CROSS_NIC).
    """

    digits: tuple[tuple[str, int], ...]
    snake: bool = False

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
                raise ValueError(f"{part!r} is not a dimension, with or without a factor")
            digits.append((match[1], int(match[2]) if match[2] else layout.size(match[1])))
        for dim in DIMENSIONS:
            product = math.prod(n for d, n in digits if d == dim)
            if product != layout.size(dim):
                raise ValueError(f"its {dim} multiplies to {product}, not to {layout.size(dim)}")
        return cls(tuple(digits), snake=plain != text)

    def __str__(self) -> str:
        digits = "-".join(f"{d}{n}" for d, n in self.digits if n > 1) or "one rank"
        return digits + SNAKE if self.snake else digits

    def rank_of_slot(self, layout: Layout) -> Slots:
        """Returns the rank of each slot number, (world size,)."""
        places, stride = np.arange(layout.world_size), layout.world_size
        index = {d: np.zeros_like(places) for d in DIMENSIONS}
        for dim, factor in reversed(self.digits):
            stride //= factor
            digit = places // stride % factor
            if self.snake and dim in SNAKED:
                digit = np.where(index[dim] % 2, factor - 1 - digit, digit)
            index[dim] = index[dim] * factor + digit
        return np.sum([index[d] * layout.stride(d) for d in DIMENSIONS], axis=0)

    def snaked(self, domain: int) -> Tiling | None:
        """Returns this tiling as a snake that turns at the borders of domains of `domain` slots.

        It returns None if no digit of dp or pp would turn.
        """
        digits: list[tuple[str, int]] = []
        stride = 1
        for dim, factor in self.digits:
            first = domain // stride if stride < domain < stride * factor else 1
            fits = first > 1 and domain % stride == 0 and factor % first == 0
            digits += [(dim, first), (dim, factor // first)] if fits else [(dim, factor)]
            stride *= factor
        times = Counter(dim for dim, _ in digits)
        return Tiling(tuple(digits), snake=True) if any(times[d] > 1 for d in SNAKED) else None

    def moved(self) -> Iterator[Tiling]:
        """Yields the tilings with one prime factor of a digit moved to another place."""
        for i, (dim, factor) in enumerate(self.digits):
            for prime in primes(factor):
                rest = [*self.digits[:i], (dim, factor // prime), *self.digits[i + 1 :]]
                for place in range(len(rest) + 1):
                    yield joined([*rest[:place], (dim, prime), *rest[place:]])


def joined(digits: Iterable[tuple[str, int]]) -> Tiling:
    """Joins neighbouring digits of one dimension and drops digits of size one."""
    runs = itertools.groupby((d for d in digits if d[1] > 1), key=lambda digit: digit[0])
    return Tiling(tuple((dim, math.prod(n for _, n in run)) for dim, run in runs))


def orders(layout: Layout) -> list[Tiling]:
    """Returns every order of the dimensions in use, with the default order first."""
    used = [(d, layout.size(d)) for d in DEFAULT_ORDER.split("-") if layout.size(d) > 1]
    return [Tiling(digits) for digits in itertools.permutations(used)]


def primes(n: int) -> list[int]:
    """Returns the distinct prime factors of `n`."""
    return [p for p in range(2, n + 1) if n % p == 0 and all(p % q for q in range(2, p))]


@dataclass(frozen=True)
class RankMapping:
    """Maps ranks to GPUs: `slots[rank]` is the slot of `rank`.

    `how` is a phrase that names the source of the mapping. Raises ValueError unless every rank has
    a slot of its own.
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
        """Creates the mapping that fills `slots` with ranks in the order of `tiling`.

        If `slots` is None, they are all slots of the cluster, in order; if `how` is None, it is the
        tiling as text.
        """
        free = np.arange(cluster.size) if slots is None else slots
        if free.size < layout.world_size:
            raise ValueError(f"{free.size} GPUs for {layout.world_size} ranks")
        placed = np.empty(layout.world_size, dtype=np.int64)
        placed[tiling.rank_of_slot(layout)] = free[: layout.world_size]
        return cls(cluster, layout, placed, how or str(tiling))

    @cached_property
    def ranks(self) -> Slots:
        """(cluster.size,): the rank at each slot; -1 where a slot has no rank."""
        found = np.full(self.cluster.size, -1, dtype=np.int64)
        found[self.slots] = np.arange(self.layout.world_size)
        return found
