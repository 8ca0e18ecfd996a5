"""Tests weighted interleaving: after any sample each data set has its share, to within 2
samples."""

from __future__ import annotations

from fractions import Fraction
from itertools import islice, pairwise
from random import Random

import numpy as np
import pytest

from parallel3d.data.blend import Shares, whole_weights
from tests.unit.data.blend_oracle import oracle, owners, random_weights, tree

# One heavy set and many equal light ones, for which the rule without a tree fails.
HEAVY = [1000, *[1] * 1000]
WEIGHTS = [
    [1],
    [1, 1],
    [7, 2, 1],
    [5, 5, 5, 5, 5],
    [1, 2, 4, 8, 16, 32],
    [1, 1, 2, 3, 5, 8, 13, 21, 34, 55],
    [10**12, 1],
    [2**32 - 1, 1, 1, 1],
    HEAVY,
]


@pytest.mark.parametrize("weights", WEIGHTS, ids=lambda w: f"{len(w)} sets, {max(w)} to {min(w)}")
def test_every_prefix_has_every_share_to_within_two(weights: list[int]) -> None:
    shares, total = Shares(weights), sum(weights)
    had = [0] * len(weights)
    for slot in range(3000):
        owner, before = shares.at(slot)
        assert before == had[owner]
        had[owner] += 1
        if len(weights) < 20 or slot % 97 == 0:
            worst = max(abs(h * total - w * (slot + 1)) for h, w in zip(had, weights, strict=True))
            assert worst < 2 * total
            assert shares.counts(slot + 1) == had
        else:
            assert abs(had[owner] * total - weights[owner] * (slot + 1)) < 2 * total


@pytest.mark.parametrize("first", range(0, 100, 20))
def test_shares_are_those_of_the_slow_exact_oracle(first: int) -> None:
    for seed in range(first, first + 20):
        weights = random_weights(Random(seed))
        shares = Shares(weights)
        found = [shares.at(slot)[0] for slot in range(500)]
        assert found == list(islice(oracle(weights), 500)), (seed, weights)


@pytest.mark.parametrize("seed", range(8))
def test_a_million_samples_are_shared_out_as_the_oracle_does(seed: int) -> None:
    weights, samples = random_weights(Random(seed)), 1_000_000
    shares, expected = Shares(weights), owners(tree(weights), samples)
    assert shares.counts(samples) == np.bincount(expected, minlength=len(weights)).tolist()
    for slot in range(seed, samples, 9973):
        owner, before = shares.at(slot)
        assert owner == expected[slot] and before == np.count_nonzero(expected[:slot] == owner)


def test_counts_at_far_slots_equal_counts_of_the_sequence() -> None:
    weights = random_weights(Random(1), 2000)
    shares, far = Shares(weights), 10**12 + 7
    counts = shares.counts(far)
    assert sum(counts) == far
    for slot in range(far, far + 200):
        owner, before = shares.at(slot)
        assert before == counts[owner]
        counts[owner] += 1
    assert counts == shares.counts(far + 200)


def test_weights_become_the_smallest_integers() -> None:
    typed = [Fraction("0.7"), Fraction("0.2"), Fraction("0.1")]
    assert whole_weights(typed) == [7, 2, 1] == whole_weights([w * 30 for w in typed])
    assert whole_weights([Fraction(1, 3), Fraction(1)]) == [1, 3]


@pytest.mark.parametrize("weights", [[], [0], [3, -1]])
def test_weights_without_any_share_are_refused(weights: list[int]) -> None:
    with pytest.raises(ValueError, match="at least 1"):
        Shares(weights)


def cumulatively(weights: list[int], slots: int) -> list[int]:
    """Counts a set's samples as the rounded sum of all weights up to its own, less that up to the
    preceding one."""
    ends = [sum(weights[: k + 1]) * slots for k in range(len(weights))]
    rounded = [(2 * end + sum(weights)) // (2 * sum(weights)) for end in ends]
    return [end - before for before, end in zip([0, *rounded], rounded, strict=False)]


def by_time(weights: list[int], slots: int) -> list[int]:
    """Counts the first slots in the order of (j + 1/2) / w, Webster's rule for all at once."""
    times = [(Fraction(2 * j + 1, 2 * w), k) for k, w in enumerate(weights) for j in range(slots)]
    owners = [k for _, k in sorted(times)[:slots]]
    return [owners.count(k) for k in range(len(weights))]


def test_the_oracle_and_the_bound_tell_other_roundings_apart() -> None:
    """Shows the faults of other rules: with cumulative rounding a set's count may decrease; in the
    order of time, light sets wait."""
    weights = [3, 1, 1, 2]
    rounded = [cumulatively(weights, slots) for slots in range(200)]
    assert any(after[k] < before[k] for before, after in pairwise(rounded) for k in range(4))
    assert any(Shares(weights).counts(slots) != rounded[slots] for slots in range(200))
    light = [20, *[1] * 20]
    assert by_time(light, 10)[0] == 10  # although its share is 5
    assert abs(Shares(light).counts(10)[0] - 5) < 2
