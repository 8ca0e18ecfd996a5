"""Interleaves data sets by weight: maps sample i to a data set in O(log sets), without a table.

An owner, such as a data set, gets slots in proportion to its weight. Two owners divide the slots by
Webster's rule: the left owner, with the share w of the weight, has w·n of the first n slots,
rounded. With more than two owners, the owners are the leaves of a Huffman tree, and each inner node
divides its slots between its two children. An inner node has at most 2/3 of its parent's weight, so
the rounding errors of all levels above a leaf add up to less than 1.5 slots, and the last level
adds at most 0.5.

After any n slots, each owner is therefore within 2 slots of its share of n. Webster's rule for all
owners at once, which orders slot j of each owner by (j + 1/2) / w, does not guarantee this: next to
an owner of weight 1/2, a thousand owners of weight 1/2000 would get their first slots only after
the heavy owner has had 500.

Sources: M. Balinski and H. P. Young, Fair Representation, 1982 (Webster's rule; quotas); D. A.
Huffman, "A Method for the Construction of Minimum-Redundancy Codes", Proc. IRE 1952.
"""

from __future__ import annotations

import heapq
import math
import operator
from bisect import bisect_right
from collections.abc import Mapping, Sequence
from fractions import Fraction
from typing import NamedTuple

from parallel3d.data.sampler import DatasetOrder, Sample


def whole_weights(weights: Sequence[Fraction]) -> list[int]:
    """Returns the smallest whole numbers in the same proportions as `weights`, all above 0."""
    scale = math.lcm(*(weight.denominator for weight in weights))
    whole = [int(weight * scale) for weight in weights]
    common = math.gcd(*whole)
    return [weight // common for weight in whole]


class Shares:
    """Assigns slots to owners in proportion to their weights.

    All arithmetic is on integers, so no slot depends on floating-point rounding.
    """

    def __init__(self, weights: Sequence[int]) -> None:
        """Builds the Huffman tree. Raises ValueError if there are no weights or one is below 1."""
        if not weights or min(weights) < 1:
            raise ValueError("shares need weights, whole numbers of at least 1")
        self.owners = len(weights)
        # The inner nodes, children before their parents. Each entry holds twice the weight of the
        # left child, the weight of the node, the left child and the right child. A child is the
        # index of a node, or -1 - k for owner k.
        self._nodes: list[tuple[int, int, int, int]] = []
        # At equal weights, owners come first, in their order, and then nodes in order of creation.
        heap = [(weight, k, -1 - k) for k, weight in enumerate(weights)]
        heapq.heapify(heap)
        while len(heap) > 1:
            (small, _, right), (large, _, left) = heapq.heappop(heap), heapq.heappop(heap)
            node = len(self._nodes)
            self._nodes.append((2 * large, small + large, left, right))
            heapq.heappush(heap, (small + large, self.owners + node, node))
        self._root = heap[0][2]

    def at(self, slot: int) -> tuple[int, int]:
        """Returns the owner of `slot`, and the number of earlier slots of this owner."""
        node = self._root
        while node >= 0:
            twice, weight, left, right = self._nodes[node]
            lefts, rest = divmod(twice * slot + weight, 2 * weight)
            if rest + twice >= 2 * weight:
                slot, node = lefts, left
            else:
                slot, node = slot - lefts, right
        return -1 - node, slot

    def counts(self, slots: int) -> list[int]:
        """Returns the number of slots that each owner has among the first `slots` slots."""
        had = {self._root: slots}
        for node in reversed(range(len(self._nodes))):
            twice, weight, left, right = self._nodes[node]
            lefts = (twice * had[node] + weight) // (2 * weight)
            had[left], had[right] = lefts, had[node] - lefts
        return [had[-1 - owner] for owner in range(self.owners)]


# Samples of several data sets as one endless sequence


class WeightPeriod(NamedTuple):
    """The weights that apply from sample `first` of the run on.

    `weights` maps the index of a data set to a whole number above 0.
    """

    first: int
    weights: Mapping[int, int]


class StagedShares:
    """Maps each sample of a run to a data set, from the sample's number alone.

    Within a stage, each data set is always within 2 samples of its share (see `Shares`). A stage
    continues each data set where the previous stages stopped.
    """

    def __init__(self, stages: Sequence[WeightPeriod], sets: int) -> None:
        """Prepares the stages for `sets` data sets.

        Raises ValueError unless the first stage begins at sample 0 and each later stage begins
        after the stage before.
        """
        firsts = [stage.first for stage in stages]
        if not stages or firsts[0] != 0 or sorted(set(firsts)) != firsts:
            raise ValueError(
                f"stages begin at samples {firsts}, but the first must begin at 0, and each "
                "later one after the one before"
            )
        self._firsts = firsts
        self._members = [list(stage.weights) for stage in stages]
        self._shares = [Shares(list(stage.weights.values())) for stage in stages]
        self._before = [[0] * sets]  # number of samples of each data set before each stage
        for first in firsts[1:]:
            self._before.append(self.counts(first))

    def at(self, i: int) -> tuple[int, int]:
        """Returns the index of the data set of sample `i`, and the sample's number in that set."""
        if i < 0:
            raise IndexError(f"sample {i}: samples count from 0")
        stage = bisect_right(self._firsts, i) - 1
        owner, place = self._shares[stage].at(i - self._firsts[stage])
        part = self._members[stage][owner]
        return part, self._before[stage][part] + place

    def counts(self, samples: int) -> list[int]:
        """Returns the number of samples of each data set among the run's first `samples`."""
        stage = max(0, bisect_right(self._firsts, samples - 1) - 1)
        stage = min(stage, len(self._before) - 1)
        counts = list(self._before[stage])
        inside = self._shares[stage].counts(samples - self._firsts[stage])
        for part, had in zip(self._members[stage], inside, strict=True):
            counts[part] += had
        return counts


class BlendedSamples(StagedShares):
    """The samples of several data sets, mixed by weight."""

    def __init__(
        self,
        parts: Sequence[DatasetOrder],
        stages: Sequence[WeightPeriod],
        names: Sequence[str] = (),
    ) -> None:
        """Mixes `parts` by the weights of `stages`; `names` are the parts' names in reports."""
        super().__init__(stages, len(parts))
        self.parts = parts
        self.names = names
        self.seq_length = parts[0].seq_length
        self.masks = any(part.masks for part in parts)

    @property
    def windows(self) -> int:
        """The number of samples before any part begins to repeat its samples."""
        limits = [part.windows for part in self.parts]
        repeats = lambda n: any(map(operator.gt, self.counts(n), limits))  # noqa: E731
        return bisect_right(range(sum(limits) + 1), False, key=repeats) - 1

    def will_read(self, i: int) -> None:
        """Prefetches the tokens of sample `i`."""
        part, place = self.at(i)
        self.parts[part].will_read(place)

    def sample(self, i: int) -> Sample:
        """Returns sample `i` >= 0."""
        part, place = self.at(i)
        return self.parts[part].sample(place)

    def read(self, samples: int) -> dict[str, dict[str, float]]:
        """Returns the tokens and epochs of each part in the run's first `samples` samples."""
        return {
            name: {"tokens": had * part.seq_length, "epochs": round(had / part.windows, 4)}
            for name, part, had in zip(self.names, self.parts, self.counts(samples), strict=True)
        }
