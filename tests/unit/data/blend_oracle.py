"""Shares out samples of a blend slowly and exactly, as a reference for `data.blend`.

It shares no code with the package: it uses lists that are sorted again for every join, and counters
that go up one by one.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from random import Random

import numpy as np
import numpy.typing as npt


def random_weights(random: Random, most: int = 40) -> list[int]:
    """Returns weights of up to `most` sets: equal, spread over many sizes, or partly equal."""
    count = random.randint(2, most)
    kind = random.randrange(3)
    if kind == 0:
        return [random.randint(1, 1000) for _ in range(count)]
    if kind == 1:
        return [1 + int(10 ** random.uniform(0, 9)) for _ in range(count)]
    return [random.choice((1, 1, 1, 7, count * 10)) for _ in range(count)]


class Node:
    """A node of the reference's tree: a weight, its owner or its two children, and its counts."""

    def __init__(self, weight: int, order: int, owner: int | None, two: Sequence[Node] = ()):
        self.weight, self.order, self.owner, self.two = weight, order, owner, two
        self.slots = self.lefts = 0

    def take(self) -> int:
        """Returns the owner of the next slot."""
        if self.owner is not None:
            return self.owner
        right, left = self.two
        self.slots += 1
        # Slots of the left child, rounded: halves go up.
        due = (2 * left.weight * self.slots + self.weight) // (2 * self.weight)
        if self.lefts < due:
            self.lefts += 1
            return left.take()
        return right.take()


def tree(weights: Sequence[int]) -> Node:
    nodes = [Node(weight, k, k) for k, weight in enumerate(weights)]
    order = len(nodes)
    while len(nodes) > 1:
        nodes.sort(key=lambda node: (node.weight, node.order))
        small, large, *rest = nodes
        nodes = [*rest, Node(small.weight + large.weight, order, None, (small, large))]
        order += 1
    return nodes[0]


def oracle(weights: Sequence[int]) -> Iterator[int]:
    """Yields the owner of each slot, one after the other."""
    root = tree(weights)
    while True:
        yield root.take()


def owners(node: Node, slots: int) -> npt.NDArray[np.int64]:
    """Returns the owners of the first `slots`, all at once; exact while 2 · weights · slots <
    2^63."""
    if node.owner is not None:
        return np.full(slots, node.owner)
    right, left = node.two
    lefts = (2 * left.weight * np.arange(slots + 1) + node.weight) // (2 * node.weight)
    is_left = np.diff(lefts) > 0
    found = np.empty(slots, np.int64)
    found[is_left] = owners(left, int(lefts[-1]))
    found[~is_left] = owners(right, slots - int(lefts[-1]))
    return found
