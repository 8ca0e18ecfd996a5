"""The price of a tiling from a sample of its ranks, for the placement search.

A tiling repeats itself over the cluster, so a few stretches of whole domains or units show which
wires each dimension uses and how many flows each leaf switch has. The model is that of `price`,
except that only what leaves a NIC or leaf is counted, not what arrives. The search prices its
winners in full.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np

from parallel3d.topology.cluster.parts import LinkClass, Slots
from parallel3d.topology.layout import DIMENSIONS, Layout
from parallel3d.topology.placement.candidates import cut_at
from parallel3d.topology.price.flows import Fabric, Flows
from parallel3d.topology.price.links import OPEN_CHAINS, Wiring
from parallel3d.topology.price.step import Paths, price_transfer
from parallel3d.topology.tiling import SNAKED, Tiling

if TYPE_CHECKING:
    from parallel3d.sizes.transfer import Transfer
    from parallel3d.topology.cluster.parts import Link

SAMPLE = 2048  # GPUs looked at, and the most of a stretch
STRETCH = 256  # GPUs of a stretch, rounded up to whole domains, where units are not smaller

Coordinates = dict[str, Slots]


@dataclass(frozen=True)
class Digit:
    """One digit of a tiling: its place in the dimension's index and in the position."""

    dim: str
    factor: int
    weight: int  # of the dimension's index
    stride: int  # in positions
    snake: bool = False

    def of(self, index: Slots) -> Slots:
        """This digit of the position, where the dimension has `index`."""
        digit = index // self.weight % self.factor
        if not self.snake:
            return digit
        turn = index // (self.weight * self.factor) % 2
        return np.where(turn, self.factor - 1 - digit, digit)


def digits_of(tiling: Tiling) -> tuple[Digit, ...]:
    """The tiling's digits, each with what it counts."""
    found, stride = [], 1
    weight = dict.fromkeys(DIMENSIONS, 1)
    for dim, factor in tiling.digits:
        snake = tiling.snake and dim in SNAKED
        found.append(Digit(dim, factor, weight[dim], stride, snake))
        weight[dim] *= factor
        stride *= factor
    return tuple(found)


@dataclass
class RankSample:
    """Stretches of the positions 0..world-1 of `slots`, the same for all tilings over them.

    `domain`, `unit`: positions of most domains and units.
    """

    layout: Layout
    slots: Slots
    domain: int
    unit: int
    fabric: Fabric
    positions: Slots = field(init=False)
    wiring: Wiring = field(init=False)
    leaf_weight: np.ndarray = field(init=False)

    def __post_init__(self) -> None:
        world = self.layout.world_size
        stretch = self.domain * -(-STRETCH // self.domain)
        if stretch < self.unit <= SAMPLE:
            stretch = self.unit
        count = max(1, min(SAMPLE // stretch, -(-world // stretch)))
        starts = np.unique(np.linspace(0, (world - 1) // stretch, count).astype(np.int64)) * stretch
        positions = (starts[:, None] + np.arange(stretch)).ravel()
        self.positions = positions[positions < world]
        self.wiring = Wiring.of(self.fabric.cluster, self.slots[:world])
        nics = self.fabric.leaf_nics
        used = np.bincount(self.wiring.leaf, minlength=nics.size)
        seen = np.bincount(self.wiring.leaf[self.positions], minlength=nics.size)
        self.leaf_weight = used / np.maximum(seen, 1) / np.maximum(nics, 1)

    def seconds(
        self, tiling: Tiling, transfers: list[Transfer], exposed: Mapping[str, float]
    ) -> float:
        """Predicted seconds a step, `exposed` of each dimension; infinity where one has no path."""
        digits = digits_of(tiling)
        cut = digits_of(cut_at(tiling, self.domain))
        place = tiling.coordinates(self.positions)
        total = 0.0
        for dim in dict.fromkeys(t.dim for t in transfers):
            paths = self._paths(dim, digits, cut, place)
            if paths is None:
                continue
            if paths.flat is None and dim != "world":
                return math.inf
            cluster = self.fabric.cluster
            mine = (price_transfer(t, paths, cluster) for t in transfers if t.dim == dim)
            total += exposed.get(dim, 1.0) * math.fsum(p.seconds for p in mine)
        return total

    def _paths(
        self, dim: str, digits: tuple[Digit, ...], cut: tuple[Digit, ...], place: Coordinates
    ) -> Paths | None:
        """The wires of `dim`; None for groups of one.

        `cut` are the digits with a border at the domain's; which positions a group has does not
        depend on the direction in which a snake runs through them.
        """
        dims = {"world": ("tp", "cp", "dp", "pp"), "embedding": ("pp",)}.get(dim, (dim,))
        n = math.prod(self.layout.size(d) for d in dims)
        if n == 1:
            return None
        own = [x for x in digits if x.dim in dims]
        flat = self._slowest(dim, dims, own, place)
        n = 2 if dim == "embedding" else n
        own = [x for x in cut if x.dim in dims]
        inner = math.prod(x.factor for x in own if x.stride * x.factor <= self.domain)
        whole = any(x.stride * x.factor == self.domain for x in cut)
        if dim in OPEN_CHAINS or inner in (1, n) or not whole:
            return Paths(n, flat)
        outside = [x for x in own if x.stride >= self.domain]
        return Paths(n, flat, inner, self._outer(outside))

    def _slowest(
        self, dim: str, dims: tuple[str, ...], own: list[Digit], place: Coordinates
    ) -> Link | None:
        """The slowest flow of the ring (or between stages), sampled."""
        now, goes = _next(dim, dims, place, self.layout)
        to = self.positions + _shift(own, place, now)
        return self._wire(self.positions[goes], to[goes])

    def _outer(self, outside: list[Digit]) -> Link | None:
        """The slowest flow to the same member of the next domain, sampled."""
        step = np.zeros_like(self.positions)
        carry = np.ones_like(self.positions)
        for x in outside:  # add one to the number that the outside digits form
            digit = self.positions // x.stride % x.factor
            following = (digit + carry) % x.factor
            step += (following - digit) * x.stride
            carry = carry * (digit == x.factor - 1)
        return self._wire(self.positions, self.positions + step)

    def _wire(self, at: Slots, to: Slots) -> Link | None:
        """The wire of the slowest of these flows."""
        flows = Flows(self.wiring[at], self.wiring[to])
        nic_flows, leaf_load = 1, 0.0
        if self.fabric.shares_nics:
            nics = flows.here.nic[flows.kinds > LinkClass.NVLINK]
            nic_flows = int(np.unique(nics, return_counts=True)[1].max(initial=1))
        spine = flows.kinds == LinkClass.SPINE
        if spine.any():
            up = np.bincount(flows.here.leaf[spine], minlength=self.leaf_weight.size)
            leaf_load = float((up * self.leaf_weight).max())
        return self.fabric.slowest(flows.counts, nic_flows, leaf_load)


def _shift(own: list[Digit], was: Coordinates, now: Coordinates) -> Slots:
    """How far the position moves when the coordinates of these digits change."""
    moved: Slots | int = 0
    for x in own:
        moved = moved + (x.of(now[x.dim]) - x.of(was[x.dim])) * x.stride
    return np.asarray(moved)


def _next(
    dim: str, dims: tuple[str, ...], was: Coordinates, layout: Layout
) -> tuple[Coordinates, np.ndarray]:
    """The coordinates of each rank's next neighbour, and which ranks have one."""
    if dim == "embedding":
        ends = (was["pp"] == 0) | (was["pp"] == layout.pp - 1)
        return {"pp": layout.pp - 1 - was["pp"]}, ends
    now, carry = {}, np.ones_like(was[dims[0]])
    for d in dims:  # fastest first
        now[d] = (was[d] + carry) % layout.size(d)
        carry = carry * (was[d] == layout.size(d) - 1)
    is_chain = dim == "pp" and not layout.wraps
    goes = was["pp"] < layout.pp - 1 if is_chain else np.ones(carry.shape, dtype=bool)
    return now, goes
