"""Compares blends with a slow exact reference, and measures the cost of a sample.

    python -m benchmarks.data.blends [--sets 100] [--samples 1000000]

The reference shares no code with the package: it uses fractions, lists that are sorted again for
every join, and counters that go up one by one. It gives the owner of each sample, and the ideal
shares.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Iterator, Sequence
from fractions import Fraction
from itertools import islice
from random import Random

import numpy as np
import numpy.typing as npt

from parallel3d.data.blend import Shares


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

    def __init__(self, weight: Fraction, order: int, owner: int | None, two: Sequence[Node] = ()):
        self.weight, self.order, self.owner, self.two = weight, order, owner, two
        self.slots = self.lefts = 0

    def take(self) -> int:
        """Returns the owner of the next slot."""
        if self.owner is not None:
            return self.owner
        right, left = self.two
        self.slots += 1
        # Slots of the left child, rounded: halves go up.
        due = left.weight / self.weight * self.slots
        if self.lefts < (due + Fraction(1, 2)).__floor__():
            self.lefts += 1
            return left.take()
        return right.take()


def tree(weights: Sequence[int]) -> Node:
    nodes = [Node(Fraction(weight), k, k) for k, weight in enumerate(weights)]
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
    whole, twice = int(node.weight), 2 * int(left.weight)
    lefts = (twice * np.arange(slots + 1) + whole) // (2 * whole)
    is_left = np.diff(lefts) > 0
    found = np.empty(slots, np.int64)
    found[is_left] = owners(left, int(lefts[-1]))
    found[~is_left] = owners(right, slots - int(lefts[-1]))
    return found


def compare(weights: Sequence[int], samples: int, slowly: int) -> float:
    """Returns the largest |count - ideal| over all prefixes and sets; SystemExit if the reference
    differs.

    Only the set of each sample is compared, before and after it: a set's count is furthest from the
    ideal there, because between its samples only the ideal moves. The first `slowly` samples are
    compared with fractions, all of them with whole numbers.
    """
    shares, total = Shares(weights), sum(weights)
    expected = owners(tree(weights), samples).tolist()
    if list(islice(oracle(weights), slowly)) != expected[:slowly]:
        raise SystemExit(f"the reference does not agree with itself for weights {weights}")
    had, worst = [0] * len(weights), 0
    for slot, owner in enumerate(expected):
        if shares.at(slot) != (owner, had[owner]):
            raise SystemExit(f"slot {slot} of {weights}: {shares.at(slot)}, reference {owner}")
        worst = max(worst, abs(had[owner] * total - weights[owner] * slot))
        had[owner] += 1
        worst = max(worst, abs(had[owner] * total - weights[owner] * (slot + 1)))
    if shares.counts(samples) != had:
        raise SystemExit(f"counts of {samples} of {weights} differ")
    return worst / total


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--sets", type=int, default=100)
    parser.add_argument("--samples", type=int, default=1_000_000)
    parser.add_argument("--slowly", type=int, default=20_000)
    args = parser.parse_args()
    worst = 0.0
    for seed in range(args.sets):
        weights = random_weights(Random(seed))
        off = compare(weights, args.samples, args.slowly)
        worst = max(worst, off)
        if seed % 10 == 9:
            print(f"{seed + 1} of {args.sets}: prefixes off by {worst:.3f} at most", flush=True)
    print(
        f"{args.sets} sets of weights x {args.samples:,} samples equal; largest error of a "
        f"prefix {worst:.3f}"
    )
    shares, random = Shares(random_weights(Random(5), 4000)[:2000]), Random(6)
    slots = [random.randrange(10**12) for _ in range(20_000)]
    start = time.thread_time()
    for slot in slots:
        shares.at(slot)
    each = (time.thread_time() - start) / len(slots)
    print(f"time to find the owner of a sample among {shares.owners:,} sets: {each * 1e6:.2f} us")


if __name__ == "__main__":
    main()
