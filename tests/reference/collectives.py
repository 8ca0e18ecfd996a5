"""Counts the messages of each rank in the reference collectives, by closed formulas.

N elements, n ranks, b(r) the block of rank r, S segments. Nothing from parallel3d is used.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple


class Sends(NamedTuple):
    messages: int
    elements: int

    def __add__(self, other: Sends) -> Sends:  # type: ignore[override]
        return Sends(self[0] + other[0], self[1] + other[1])


NOTHING = Sends(0, 0)


class Ranks(NamedTuple):
    """A collective's size, and the trees on its ranks."""

    n: int
    count: int
    segments: int

    def blocks(self, first: int, end: int) -> int:
        """Returns the elements of blocks first … end − 1."""
        return min(end, self.n) * self.count // self.n - first * self.count // self.n

    def b(self, r: int) -> int:
        return self.blocks(r, r + 1)

    def low(self, r: int) -> int:
        """Returns the lowest bit: the number of ranks from r on in its part of the binomial
        tree."""
        return r & -r if r else 1 << (self.n - 1).bit_length()

    def children(self, r: int) -> int:
        """Returns the children in the binomial tree."""
        steps = (1 << k for k in range(20))
        return sum(step < self.low(r) and r + step < self.n for step in steps)

    def below(self, r: int) -> int:
        """Returns the elements of the blocks of r and of all ranks below it."""
        return self.blocks(r, r + self.low(r))

    def power(self) -> int:
        return 1 << (self.n.bit_length() - 1)

    def is_folded(self, r: int) -> bool:
        """Returns whether r is the second of a pair, for which the first one sends."""
        return r % 2 == 1 and r < 2 * (self.n - self.power())

    def is_speaker(self, r: int) -> bool:
        return r % 2 == 0 and r < 2 * (self.n - self.power())

    def spans(self, r: int) -> int:
        """Returns the elements that rank r, not the second of a pair, sends while it doubles its
        data."""
        groups = [[first, first + 1] for first in range(0, 2 * (self.n - self.power()), 2)]
        groups += [[rank] for rank in range(2 * (self.n - self.power()), self.n)]
        place = next(i for i, members in enumerate(groups) if r in members)
        total, width = 0, 1
        while width < len(groups):
            low = place - place % width
            members = [rank for group in groups[low : low + width] for rank in group]
            total += sum(map(self.b, members))
            width *= 2
        return total


def in_order(first: int, last: int) -> dict[int, list[int]]:
    """Returns node → children: the largest complete tree that fits goes left, the rest right."""
    if first > last:
        return {}
    size = 1 << ((last - first + 1).bit_length() - 1)
    root = first + size - 1
    left, right = in_order(first, root - 1), in_order(root + 1, last)
    own = [tree_root(tree) for tree in (left, right) if tree]
    return left | right | {root: own}


def tree_root(tree: dict[int, list[int]]) -> int:
    below = {child for children in tree.values() for child in children}
    (root,) = set(tree) - below
    return root


def double_tree(n: int) -> list[dict[int, list[int]]]:
    """Returns both trees, with rank 0 above their roots; the second one is mirrored or shifted by
    one."""
    first = in_order(1, n - 1)
    first[0] = [tree_root(first)]
    move = {r: (n - r if n % 2 else 1 + r % (n - 1)) if r else 0 for r in range(n)}
    return [first, {move[up]: [move[down] for down in downs] for up, downs in first.items()}]


def broadcast(form: str, c: Ranks, r: int) -> Sends:
    if form == "naive":
        return Sends(c.n - 1, (c.n - 1) * c.count) if r == 0 else NOTHING
    if form == "chain":
        return Sends(1, c.count) if r < c.n - 1 else NOTHING
    if form == "segmented":
        return Sends(c.segments, c.count) if r < c.n - 1 else NOTHING
    if form == "tree":
        return Sends(c.children(r), c.children(r) * c.count)
    if form == "double_tree":
        halves = (c.count // 2, c.count - c.count // 2)
        kids = [len(tree[r]) for tree in double_tree(c.n)]
        return Sends(c.segments * sum(kids), kids[0] * halves[0] + kids[1] * halves[1])
    return scatter("tree", c, r) + all_gather(form, c, r)


def reduce(form: str, c: Ranks, r: int) -> Sends:
    if form in ("ring", "recursive_doubling"):
        return reduce_scatter(form, c, r) + gather("tree", c, r)
    messages = {"segmented": c.segments, "double_tree": 2 * c.segments}.get(form, 1)
    return Sends(messages, c.count) if r > 0 else NOTHING


def scatter(form: str, c: Ranks, r: int) -> Sends:
    if form == "naive":
        return Sends(c.n - 1, c.count - c.b(0)) if r == 0 else NOTHING
    if form == "chain":
        return Sends(1, c.blocks(r + 1, c.n)) if r < c.n - 1 else NOTHING
    return Sends(c.children(r), c.below(r) - c.b(r))


def gather(form: str, c: Ranks, r: int) -> Sends:
    elements = {"naive": c.b(r), "chain": c.blocks(r, c.n), "tree": c.below(r)}[form]
    return Sends(1, elements) if r > 0 else NOTHING


def all_gather(form: str, c: Ranks, r: int) -> Sends:
    if form == "ring":
        return Sends(c.n - 1, c.count - c.b((r - 1) % c.n))
    if form == "recursive_doubling":
        if c.is_folded(r):
            return Sends(1, c.b(r))
        after = Sends(1, c.count) if c.is_speaker(r) else NOTHING
        return Sends(c.power().bit_length() - 1, c.spans(r)) + after
    return gather(form, c, r) + broadcast(form, c, r)


def reduce_scatter(form: str, c: Ranks, r: int) -> Sends:
    if form == "ring":
        return Sends(c.n - 1, c.count - c.b(r))
    if form == "recursive_doubling":
        if c.is_folded(r):
            return Sends(1, c.count)
        return Sends(c.power().bit_length() - 1 + c.is_speaker(r), c.count - c.b(r))
    return reduce(form, c, r) + scatter(form, c, r)


def all_reduce(form: str, c: Ranks, r: int) -> Sends:
    if form == "ring":
        return reduce_scatter(form, c, r) + all_gather(form, c, r)
    if form == "recursive_halving":
        half = "recursive_doubling"
        return reduce_scatter(half, c, r) + all_gather(half, c, r)
    if form == "recursive_doubling":
        messages = c.power().bit_length() - 1 + c.is_speaker(r)
        return Sends(1, c.count) if c.is_folded(r) else Sends(messages, messages * c.count)
    return reduce(form, c, r) + broadcast(form, c, r)


def barrier(form: str, c: Ranks, r: int) -> Sends:
    if form == "ring":
        return Sends(c.n - 1, 0)
    if form == "recursive_doubling":
        return Sends((c.n - 1).bit_length(), 0)
    return Sends((reduce(form, c, r) + broadcast(form, c, r)).messages, 0)


FORMULAS: dict[str, Callable[[str, Ranks, int], Sends]] = {
    "broadcast": broadcast,
    "reduce": reduce,
    "scatter": scatter,
    "gather": gather,
    "all_gather": all_gather,
    "reduce_scatter": reduce_scatter,
    "all_reduce": all_reduce,
    "barrier": barrier,
}
OF_BLOCKS = ("naive", "chain", "tree")
OF_ALL = (*OF_BLOCKS, "ring", "recursive_doubling")
OF_WHOLE = (*OF_ALL, "segmented", "double_tree")
# This list is written by hand, because the code's own list is under test.
FORMS = {
    "broadcast": OF_WHOLE,
    "reduce": OF_WHOLE,
    "scatter": OF_BLOCKS,
    "gather": OF_BLOCKS,
    "all_gather": OF_ALL,
    "reduce_scatter": OF_ALL,
    "all_reduce": (*OF_WHOLE, "recursive_halving"),
    "barrier": OF_ALL,
}


def sends(collective: str, form: str, n: int, count: int, segments: int) -> list[Sends]:
    """Returns the number of elements that each rank sends."""
    if n == 1:
        return [NOTHING]
    c = Ranks(n, count, segments)
    return [FORMULAS[collective](form, c, r) for r in range(n)]
