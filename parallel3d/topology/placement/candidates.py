"""Candidates of the rank-mapping search, and their price from a sample of ranks.

A candidate is a tiling over a base (the GPU at each position). A tiling repeats itself over the
cluster, so a few stretches of whole domains or units show which wires each dimension uses and how
many flows each leaf switch has. The model is that of `network.price_step`, except that only
outgoing flows of NICs and leaves count. The search prices its winners in full.
"""

from __future__ import annotations

import itertools
import math
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from parallel3d.estimate.network import GROUPED, OPEN_CHAINS, Flows, Paths, Transfer, price_dim
from parallel3d.topology.cluster.parts import Cluster, Link, Slots
from parallel3d.topology.layout import DEFAULT_ORDER, DIMENSIONS, Layout
from parallel3d.topology.tiling import SNAKED, Tiling

SAMPLE = 2048  # GPUs of the sample, and the most of a stretch
STRETCH = 256  # GPUs of a stretch, rounded up to whole domains, unless units are larger

Coordinates = dict[str, Slots]


class RankSample:
    """Stretches of the positions 0..world-1 of `slots`, the same for all tilings over them.

    `domain`, `unit`: positions of the usual domain and unit.
    """

    def __init__(
        self, layout: Layout, slots: Slots, domain: int, unit: int, cluster: Cluster
    ) -> None:
        self.layout, self.slots, self.domain, self.cluster = layout, slots, domain, cluster
        world = layout.world_size
        stretch = domain * -(-STRETCH // domain)
        if stretch < unit <= SAMPLE:
            stretch = unit
        count = max(1, min(SAMPLE // stretch, -(-world // stretch)))
        starts = np.unique(np.linspace(0, (world - 1) // stretch, count).astype(np.int64)) * stretch
        positions = (starts[:, None] + np.arange(stretch)).ravel()
        self.positions = positions[positions < world]
        leaf, nics = cluster.leaf[slots[:world]], cluster.leaf_nics
        used = np.bincount(leaf, minlength=nics.size)
        seen = np.bincount(leaf[self.positions], minlength=nics.size)
        self.leaf_weight = used / np.maximum(seen, 1) / np.maximum(nics, 1)

    def seconds(self, tiling: Tiling, transfers: list[Transfer]) -> float:
        """Predicts seconds a step; infinity if a dimension has no path."""
        place, total = tiling.coordinates(self.positions), 0.0
        for dim in dict.fromkeys(t.dim for t in transfers):
            paths = self._paths(dim, tiling, place)
            if paths is None:
                continue
            if paths.flat is None and dim != "world":
                return math.inf
            total += price_dim(dim, transfers, paths, self.cluster).seconds
        return total

    def _paths(self, dim: str, tiling: Tiling, place: Coordinates) -> Paths | None:
        """Returns the wires of `dim`; None for groups of one."""
        dims = GROUPED.get(dim, (dim,))
        n = math.prod(self.layout.size(d) for d in dims)
        if n == 1:
            return None
        n = 2 if dim == "embedding" else n
        now, goes = _next(dim, dims, place, self.layout)
        flat = self._slowest(self.positions[goes], tiling.positions({**place, **now})[goes])
        # A snake's direction does not change which positions a group has.
        cut = cut_at(tiling, self.domain)
        digits = [(d, n, stride) for (d, n), stride in zip(cut.digits, cut.strides, strict=True)]
        inner = math.prod(n for d, n, stride in digits if d in dims and stride * n <= self.domain)
        whole = any(stride * n == self.domain for _, n, stride in digits)
        if dim in OPEN_CHAINS or inner in (1, n) or not whole:
            return Paths(n, flat)
        outer = [(n, stride) for d, n, stride in digits if d in dims and stride >= self.domain]
        return Paths(n, flat, inner, self._slowest(self.positions, self._in_next_domain(outer)))

    def _in_next_domain(self, outer: list[tuple[int, int]]) -> Slots:
        """Returns the positions of the same members in the group's next domains; `outer`: factors
        and strides of the digits that count the domains."""
        carry, found = np.ones_like(self.positions), self.positions
        for factor, stride in outer:
            digit = self.positions // stride % factor
            found = found + ((digit + carry) % factor - digit) * stride
            carry = carry * (digit == factor - 1)
        return found

    def _slowest(self, at: Slots, to: Slots) -> Link | None:
        """Returns the wire of the slowest of these flows."""
        return Flows(self.cluster, self.slots[at], self.slots[to]).slowest(self.leaf_weight)


def _next(
    dim: str, dims: tuple[str, ...], was: Coordinates, layout: Layout
) -> tuple[Coordinates, np.ndarray]:
    """Returns the coordinates of each rank's next neighbour, and which ranks have one."""
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


@dataclass(frozen=True)
class Base:
    """The GPU at each position, and the positions of the usual domain and unit; `note`: why."""

    slots: Slots
    domain: int
    unit: int
    note: str = ""
    whole: bool = True  # all domains and units have equally many positions


def bases(cluster: Cluster, layout: Layout, slots: Slots | None = None) -> list[Base]:
    """Returns the lists of GPUs worth trying, the launcher's own order first.

    `slots` (default: all GPUs) may be in any order, with holes and uneven nodes, and more than the
    layout needs. All bases begin with slots[0], as rank 0 stays with the launcher. The others are
    sorted, so that domains and units are contiguous, or, with GPUs to spare, have the same number
    of GPUs in
    each domain: a multiple of a replica or of its inner part.
    """
    given = np.arange(cluster.size) if slots is None else np.asarray(slots)
    uneven = (cluster.node_gpus, cluster.node_domain, cluster.node_unit, cluster.local_domain)
    even = not any(uneven)
    in_order = slots is None or bool((given == np.arange(given.size)).all())
    found = [_base(cluster, layout, given, "", even and in_order)]
    ordered = given
    if not (even and in_order):
        for note, ordered in _sorted(cluster, given):
            if not (ordered[: layout.world_size] == given[: layout.world_size]).all():
                found.append(_base(cluster, layout, ordered, note, False))
        ordered = found[-1].slots
    found += _segments(cluster, layout, ordered, found[-1].domain)
    return found


def _base(cluster: Cluster, layout: Layout, slots: Slots, note: str, even: bool) -> Base:
    if even:
        unit = cluster.gpus_per_node * (cluster.unit_nodes or cluster.nodes)
        return Base(slots, cluster.domain_gpus, unit, note)
    used = slots[: layout.world_size]
    domain, unit = (_usual_count(x[used]) for x in (cluster.domain, cluster.unit))
    return Base(slots, domain, unit, note, whole=False)


def _usual_count(numbers: Slots) -> int:
    """Returns the most frequent count of the numbers; the larger one on a tie."""
    counts = np.bincount(numbers)
    counts = counts[counts > 0]
    sizes, times = np.unique(counts, return_counts=True)
    return int(max(zip(times, sizes, strict=True))[1])


def _sorted(cluster: Cluster, given: Slots) -> Iterator[tuple[str, Slots]]:
    """Yields `given` by unit, domain and node, slots[0] first: moved with its domain, or alone.

    With its domain, which stays contiguous, a smaller domain shifts the others; exchanging a single
    GPU may be cheaper.
    """
    mine = np.zeros(cluster.size, dtype=bool)
    mine[given] = True
    order = cluster.sorted_slots()
    order = order[mine[order]]
    first = given[0]
    local, domain, node = cluster.local[order], cluster.domain[order], cluster.node[order]
    home = cluster.unit[order[_first_place(domain)]]  # a domain belongs to one unit
    turned = (local - cluster.local[first]) % min(cluster.gpus_per_node, cluster.domain_gpus)
    place = _first_place(domain * cluster.nodes + node)
    here = np.flatnonzero(order == first)[0]
    keys = (place, node != node[here], domain != domain[here], home != home[here])
    yield "sorted by domain", order[np.lexsort((local, turned, *keys))]
    if order[0] != first:
        order = order.copy()
        order[[0, here]] = order[[here, 0]]
        yield "sorted by domain, one GPU exchanged", order


def _first_place(numbers: Slots) -> Slots:
    """Returns, for each element, the first place of its number."""
    _, first, inverse = np.unique(numbers, return_index=True, return_inverse=True)
    return first[inverse]


def _segments(cluster: Cluster, layout: Layout, slots: Slots, domain: int) -> list[Base]:
    """Returns bases with a multiple of a block of ranks from each domain, if there are spare GPUs.

    Slurm's --segment does the same: tp·cp·pp = 64 of the 72 GPUs of a rack.
    """
    if slots.size <= layout.world_size or layout.world_size < domain:
        return []
    blocks = {layout.tp, layout.tp * layout.cp}
    blocks |= {layout.tp * layout.cp * layout.pp, layout.tp * layout.cp * layout.dp}
    kept = {domain // block * block for block in blocks if block <= domain}
    place = np.arange(slots.size) - _first_place(cluster.domain[slots])
    found = []
    for size in sorted(kept - {domain}, reverse=True):
        if domain >= cluster.gpus_per_node and size % cluster.gpus_per_node:
            continue  # Slurm counts nodes
        full = np.bincount(cluster.domain[slots])[cluster.domain[slots]] >= size
        chosen = slots[full & (place < size)]
        if chosen.size >= layout.world_size and chosen[0] == slots[0]:
            note = f"{size} GPUs of each domain"
            unit = _usual_count(cluster.unit[chosen[: layout.world_size]])
            found.append(Base(chosen, size, unit, note))
    return found


def permutations(layout: Layout) -> list[Tiling]:
    """Returns every order of the dimensions in use; the default order first."""
    used = [d for d in DEFAULT_ORDER.split("-") if layout.size(d) > 1]
    return [Tiling(tuple((d, layout.size(d)) for d in p)) for p in itertools.permutations(used)]


def every_tiling(layout: Layout, most: int) -> list[Tiling]:
    """Returns all orders of the dimensions' prime factors; none if there are more than `most`."""
    left = Counter((d, p) for d in DIMENSIONS for p in _primes(layout.size(d)))
    orders = math.factorial(left.total())
    for times in left.values():
        orders //= math.factorial(times)
    return [merged(digits) for digits in _arrangements(left)] if orders <= most else []


def _primes(n: int) -> list[int]:
    first = next((p for p in range(2, math.isqrt(n) + 1) if n % p == 0), n)
    return [first, *_primes(n // first)] if n > 1 else []


def _arrangements(left: Counter[tuple[str, int]]) -> Iterator[list[tuple[str, int]]]:
    if not left.total():
        yield []
    for digit in [d for d, times in left.items() if times]:
        for rest in _arrangements(left - Counter([digit])):
            yield [digit, *rest]


def inside_splits(layout: Layout, domain: int) -> list[dict[str, int]]:
    """Returns the ways to fill a domain: a factor of each dimension, with product `domain`."""
    found: list[dict[str, int]] = [{}]
    for dim in DIMENSIONS:
        found = [
            {**split, dim: factor}
            for split in found
            for factor in _common_divisors(layout.size(dim), domain // math.prod(split.values()))
        ]
    return [split for split in found if math.prod(split.values()) == domain]


def _common_divisors(a: int, b: int) -> list[int]:
    return [f for f in range(1, min(a, b) + 1) if a % f == 0 and b % f == 0]


def tilings(layout: Layout, inside: dict[str, int]) -> list[Tiling]:
    """Returns `inside` in the default order, then the rest of each dimension in every order."""
    first = [(d, n) for d, n in inside.items() if n > 1]
    rest = [(d, layout.size(d) // n) for d, n in inside.items() if n < layout.size(d)]
    return [merged([*first, *p]) for p in itertools.permutations(rest)]


def split_at(tiling: Tiling, start: int, boundary: int) -> list[Tiling]:
    """Returns tilings in which two dimensions fill the positions from `start` to `boundary`.

    `start`: where the inner digits of `tiling` end (a domain); `boundary`: a node of several
    domains, or a unit. The order of the rest stays.
    """
    inner: list[tuple[str, int]] = []
    outer: list[tuple[str, int]] = []
    stride = 1
    for dim, factor in tiling.digits:
        (inner if stride * factor <= start else outer).append((dim, factor))
        stride *= factor
    if boundary % start or math.prod(n for _, n in inner) != start:
        return []
    found = []
    for i, j in itertools.permutations(range(len(outer)), 2):
        (a, n_a), (b, n_b) = outer[i], outer[j]
        for factor in _common_divisors(n_a, boundary // start):
            other = boundary // start // factor
            if a != b and n_b % other == 0 and factor > 1 and other > 1:
                rest = list(outer)
                rest[i], rest[j] = (a, n_a // factor), (b, n_b // other)
                found.append(merged([*inner, (a, factor), (b, other), *rest]))
    return found


def cut_at(tiling: Tiling, boundary: int) -> Tiling:
    """Returns the same map with the digit that spans position `boundary` split, if possible."""
    digits: list[tuple[str, int]] = []
    stride = 1
    for dim, factor in tiling.digits:
        first = boundary // stride if stride < boundary < stride * factor else 1
        fits = first > 1 and boundary % stride == 0 and factor % first == 0
        digits += [(dim, first), (dim, factor // first)] if fits else [(dim, factor)]
        stride *= factor
    return Tiling(tuple(digits))


def snaked(tiling: Tiling, domain: int) -> Tiling | None:
    """Returns `tiling` as a snake, split at the domain's border; None if that changes nothing."""
    cut = cut_at(tiling, domain).digits
    repeated = any(sum(d == dim for d, _ in cut) > 1 for dim in SNAKED)
    return Tiling(cut, snake=True) if repeated else None


def merged(digits: list[tuple[str, int]]) -> Tiling:
    """Joins neighbouring digits of one dimension and drops those of size one."""
    kept: list[tuple[str, int]] = []
    for dim, factor in digits:
        if factor > 1 and kept and kept[-1][0] == dim:
            kept[-1] = (dim, kept[-1][1] * factor)
        elif factor > 1:
            kept.append((dim, factor))
    return Tiling(tuple(kept))
