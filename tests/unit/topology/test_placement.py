"""Tests tilings and placements: every rank on one GPU, groups orthogonal and complete."""

from __future__ import annotations

import itertools
import random

import numpy as np
import pytest

from parallel3d.blueprint.groups import members
from parallel3d.blueprint.layout import Layout
from parallel3d.blueprint.rank_mapping import RankMapping, Tiling
from parallel3d.estimate.network import flows_of
from tests.placements import a_cluster, random_cluster, random_layout, slow_groups, slow_pairs

DIMS = ("tp", "cp", "dp", "pp")


def random_tiling(rng: random.Random, layout: Layout) -> Tiling:
    """Returns a tiling with each dimension cut at random, the pieces shuffled, sometimes a
    snake."""
    digits = []
    for dim in DIMS:
        left = layout.size(dim)
        while left > 1:
            factor = rng.choice([f for f in range(2, left + 1) if left % f == 0])
            digits.append((dim, factor))
            left //= factor
    rng.shuffle(digits)
    return Tiling(tuple(digits), snake=rng.random() < 0.3)


@pytest.mark.nightly
def test_random_placements_keep_groups_whole_orthogonal_and_complete() -> None:
    """Tests 2,000 random clusters, layouts and tilings: every rank is in one group per
    dimension."""
    rng = random.Random(3)
    for _ in range(2000):
        cluster = random_cluster(rng)
        layout = random_layout(rng, min(cluster.size, 64))
        placement = RankMapping.tiled(cluster, layout, random_tiling(rng, layout))
        everyone = set(range(layout.world_size))
        assert len(set(placement.slots.tolist())) == len(everyone)
        assert placement.slots[0] == 0
        of = {}
        for dim in DIMS:
            groups = members(layout, dim).tolist()
            assert groups == slow_groups(layout, dim)
            assert sorted(itertools.chain(*groups)) == sorted(everyone)
            of[dim] = {r: frozenset(g) for g in groups for r in g}
        for a, b in itertools.combinations(DIMS, 2):
            assert all(of[a][r] & of[b][r] == {r} for r in everyone)
        reached = {0}
        for dim in DIMS:
            reached = set().union(*(of[dim][r] for r in reached))
        assert reached == everyone
        assert sorted(members(layout, "world")[0].tolist()) == sorted(everyone)


def neighbours(layout: Layout, dim: str) -> list[tuple[int, int]]:
    """Returns pairs (sender, receiver) of ranks; each rank is on the GPU with its number."""
    cluster = a_cluster(layout.world_size, 1)
    flows = flows_of(dim, cluster, members(layout, dim)).ring
    return list(zip(flows.here.tolist(), flows.there.tolist(), strict=True))


@pytest.mark.nightly
def test_neighbours_are_the_pairs_of_rings_and_chains() -> None:
    rng = random.Random(4)
    for _ in range(200):
        layout = random_layout(rng, 64)
        for dim in (*(d for d in DIMS if layout.size(d) > 1), *["embedding"] * (layout.pp > 1)):
            slow = [p for g in slow_groups(layout, dim) for p in slow_pairs(g, dim)]
            assert sorted(neighbours(layout, dim)) == sorted(slow)


def test_a_ring_closes_and_a_chain_does_not() -> None:
    layout = Layout(tp=2, dp=3, pp=3)
    assert neighbours(layout, "tp")[:2] == [(0, 1), (1, 0)]
    assert set(neighbours(layout, "dp")) >= {(0, 2), (2, 4), (4, 0)}
    pp = set(neighbours(layout, "pp"))
    assert (0, 6) in pp and (6, 12) in pp and (12, 0) not in pp
    assert (0, 12) in set(neighbours(layout, "embedding"))


def test_unknown_dimension_is_refused() -> None:
    with pytest.raises(ValueError, match="'ep' is not one of tp, cp, dp, pp, world, embedding"):
        members(Layout(tp=2), "ep")


def test_a_tiling_survives_a_round_trip_through_text() -> None:
    layout = Layout(tp=4, dp=8, pp=2)
    for text in ("tp4-dp2-pp2-dp4", "pp2-dp8-tp4", "tp4-dp2-dp4-pp2-snake"):
        assert str(Tiling.parse(text, layout)) == text
    assert str(Tiling.parse("tp-pp-dp", layout)) == "tp4-pp2-dp8"
    for wrong, why in (("tp4-dp2-pp2", "dp multiplies to 2, not to 8"), ("tp-xx", "'xx'")):
        with pytest.raises(ValueError, match=why):
            Tiling.parse(wrong, layout)


def test_split_dimension_counts_earlier_digits_faster() -> None:
    layout = Layout(tp=2, dp=4)
    ranks = Tiling.parse("dp2-tp2-dp2", layout).rank_of_slot(layout)
    assert ranks.tolist() == [0, 2, 1, 3, 4, 6, 5, 7]  # rank = tp + 2 · dp


def test_snake_neighbours_differ_in_one_digit() -> None:
    """dp runs 0 1 | 3 2 | 4 5 | 7 6 over nodes of two: each step stays in a node, or keeps its
    rail."""
    layout = Layout(dp=8)
    ranks = Tiling.parse("dp2-dp4-snake", layout).rank_of_slot(layout)
    assert ranks.tolist() == [0, 1, 3, 2, 4, 5, 7, 6]
    at = np.argsort(ranks)
    for a, b in zip(at, np.roll(at, -1), strict=True):
        assert (a // 2 != b // 2) != (a % 2 != b % 2)


def test_placement_refuses_invalid_maps() -> None:
    cluster, layout = a_cluster(2, 4), Layout(tp=4)
    for slots, why in (
        ([0, 1, 2], "3 slots for 4 ranks"),
        ([0, 1, 2, 2], "two ranks share"),
        ([0, 1, 2, 8], "outside of 0..7"),
    ):
        with pytest.raises(ValueError, match=why):
            RankMapping(cluster, layout, np.array(slots), "test")
    with pytest.raises(ValueError, match="4 GPUs for 8 ranks"):
        RankMapping.tiled(cluster, Layout(tp=8), Tiling.parse("tp", Layout(tp=8)), np.arange(4))
