"""An endless row of slots shared out by weights: whose slot i is, in O(log) steps and no table.

Two share a row by Webster's rule: of the first n slots the left one has w·n, rounded. More than two
share it through Huffman's tree, whose nodes split their slots so between two children. No node with
children then has more than 2/3 of its parent's weight: the rounding of all levels above adds up to
less than 1.5 slots, and the last one to 0.5 more.

So after every n slots, every one has had its share of n to within 2: Webster's rule for all at once
(the slot's order by (j + 1/2) / w) does not keep that. Beside a weight of 1/2, a thousand of 1/2000
would all wait for their first slot until the heavy one has had 500.

Sources: M. Balinski and H. P. Young, Fair Representation, 1982 (Webster's rule; quotas); D. A.
Huffman, "A Method for the Construction of Minimum-Redundancy Codes", Proc. IRE 1952.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Sequence
from fractions import Fraction


def whole_weights(weights: Sequence[Fraction]) -> list[int]:
    """The smallest whole numbers in the same proportions; `weights` > 0."""
    scale = math.lcm(*(weight.denominator for weight in weights))
    whole = [int(weight * scale) for weight in weights]
    common = math.gcd(*whole)
    return [weight // common for weight in whole]


class Shares:
    """Slots shared out by whole weights > 0. Integers alone: no slot hangs on a rounded float."""

    def __init__(self, weights: Sequence[int]) -> None:
        """`weights` of at least one; else, or with one below 1, ValueError."""
        if not weights or min(weights) < 1:
            raise ValueError("shares need weights, whole numbers of at least 1")
        self.owners = len(weights)
        # Per node with children: twice the left child's weight, its own weight, its children: nodes
        # by their number, owner k as -1 - k. A child comes before its parent.
        self._twice_left: list[int] = []
        self._weight: list[int] = []
        self._left: list[int] = []
        self._right: list[int] = []
        # Of equal weights who comes first in the row of owners, then who was joined first.
        heap = [(weight, k, -1 - k) for k, weight in enumerate(weights)]
        heapq.heapify(heap)
        while len(heap) > 1:
            (small, _, right), (large, _, left) = heapq.heappop(heap), heapq.heappop(heap)
            node = len(self._weight)
            self._twice_left.append(2 * large)
            self._weight.append(small + large)
            self._left.append(left)
            self._right.append(right)
            heapq.heappush(heap, (small + large, self.owners + node, node))
        self._root = heap[0][2]

    def at(self, slot: int) -> tuple[int, int]:
        """Whose slot this is, and how many slots were theirs before it."""
        node = self._root
        while node >= 0:
            twice, weight = self._twice_left[node], self._weight[node]
            lefts, rest = divmod(twice * slot + weight, 2 * weight)
            if rest + twice >= 2 * weight:
                slot, node = lefts, self._left[node]
            else:
                slot, node = slot - lefts, self._right[node]
        return -1 - node, slot

    def counts(self, slots: int) -> list[int]:
        """Of the first `slots`, how many are each owner's; their sum is `slots`."""
        counts, inside = [0] * self.owners, [0] * len(self._weight)
        if self._root < 0:
            return [slots]
        inside[self._root] = slots
        for node in reversed(range(len(inside))):
            weight = self._weight[node]
            lefts = (self._twice_left[node] * inside[node] + weight) // (2 * weight)
            for child, had in (
                (self._left[node], lefts),
                (self._right[node], inside[node] - lefts),
            ):
                if child >= 0:
                    inside[child] = had
                else:
                    counts[-1 - child] = had
        return counts
