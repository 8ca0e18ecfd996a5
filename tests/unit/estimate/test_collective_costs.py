"""Tests the α–β model: values by hand, identities between collectives, limits."""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest

from parallel3d.blueprint.cluster import Link
from parallel3d.blueprint.collectives import OPERATIONS, bus_factor
from parallel3d.estimate.network import (
    best_segments,
    broadcast,
    collective_time,
    ring_time,
    tree_all_reduce,
    two_level_time,
)

LINK = Link(gb_per_s=10.0, latency_us=5.0)  # 1 MB takes 100 µs
FREE = Link(gb_per_s=10.0, latency_us=0.0)
US = 1e-6
SIZES = (0, 1, 1000, 10**6, 10**9)


@pytest.mark.parametrize(
    "seconds, microseconds",
    [
        (ring_time("send_recv", 2, 1e6, LINK), 5 + 100),
        (broadcast(4, 1e6, LINK), 3 * 105),
        (broadcast(4, 1e6, LINK, segments=10), 12 * (5 + 10)),
        (broadcast(2, 1e6, LINK), 105),
        (collective_time("reduce", 4, 1e6, LINK), 8 * (5 + 100 / 6)),  # in six segments
        (ring_time("reduce_scatter", 4, 1e6, LINK), 3 * (5 + 25)),
        (ring_time("all_gather", 4, 1e6, LINK), 3 * (5 + 25)),
        (ring_time("all_reduce", 4, 1e6, LINK), 6 * (5 + 25)),
        (tree_all_reduce(4, 1e6, LINK), 2 * 2 * 5 + 2 * 100),
        (tree_all_reduce(5, 1e6, LINK), 2 * 3 * 5 + 2 * 100),
        (collective_time("all_to_all", 4, 1e6, LINK), 3 * (5 + 25)),
        (collective_time("scatter", 4, 1e6, LINK), 3 * (5 + 25)),
        (collective_time("gather", 4, 1e6, LINK), 3 * (5 + 25)),
        (collective_time("barrier", 8, 0, LINK), 3 * 5),
        (collective_time("barrier", 5, 0, LINK), 3 * 5),
        # 8 ranks inside at 100 GB/s and 1 µs, 4 domains: 2·7·(1 + 1.25) + 2·3·(5 + 3.125)
        (two_level_time("all_reduce", 8, 4, 1e6, Link(100, 1), LINK), 14 * 2.25 + 6 * 8.125),
        (two_level_time("all_gather", 8, 4, 1e6, Link(100, 1), LINK), 7 * 2.25 + 3 * 8.125),
    ],
)
def test_values_by_hand(seconds: float, microseconds: float) -> None:
    assert seconds == pytest.approx(microseconds * US)


def test_an_all_reduce_is_a_reduce_scatter_and_an_all_gather() -> None:
    for n, nbytes in itertools.product((1, 2, 3, 8, 1000), SIZES):
        halves = ring_time("reduce_scatter", n, nbytes, LINK) + ring_time(
            "all_gather", n, nbytes, LINK
        )
        assert ring_time("all_reduce", n, nbytes, LINK) == halves
        assert two_level_time("all_reduce", n, 1, nbytes, LINK, FREE) == halves
        assert two_level_time("all_reduce", 1, n, nbytes, FREE, LINK) == halves


def test_a_hierarchy_carries_an_inner_th_of_the_bytes_between_domains() -> None:
    free_inside = Link(1e30, 0)
    outer = two_level_time("all_reduce", 8, 16, 1e9, free_inside, LINK)
    assert outer == pytest.approx(ring_time("all_reduce", 16, 1e9 / 8, LINK))
    assert outer < ring_time("all_reduce", 128, 1e9, LINK) / 8


def test_many_segments_make_a_broadcast_as_fast_as_one_message() -> None:
    # Woolley's limit is N/B for any number of ranks; without segments it is (n − 1)·N/B.
    for n in (2, 8, 100):
        assert broadcast(n, 1e9, FREE) == pytest.approx((n - 1) * 0.1)
        assert broadcast(n, 1e9, FREE, segments=100_000) == pytest.approx(0.1, rel=1.1e-3)


@pytest.mark.parametrize("n", [2, 3, 4, 17, 500])
@pytest.mark.parametrize("nbytes", [1, 999, 10**5, 10**8])
def test_no_other_number_of_segments_is_faster_than_the_best(n: int, nbytes: int) -> None:
    best = best_segments(n, nbytes, LINK)
    fastest = broadcast(n, nbytes, LINK, best)
    tried = {1, 2, 3, best - 1, best + 1, best // 2, 2 * best, nbytes} - {0}
    assert best <= nbytes
    assert all(fastest <= broadcast(n, nbytes, LINK, s) * (1 + 1e-12) for s in tried)


def test_the_best_number_of_segments_by_hand() -> None:
    # √((n − 2)·N/(α·B)): 1 MB takes 100 µs, α is 5 µs: √(2·20) = 6.3 for four ranks
    assert best_segments(4, 1e6, LINK) == 6
    assert best_segments(2, 1e6, LINK) == 1  # no rank passes a message on
    assert best_segments(4, 0, LINK) == 1
    # without a cost per message, the best segments have one byte
    assert best_segments(4, 1000, FREE) == 1000


@pytest.mark.parametrize("op", OPERATIONS)
def test_the_factor_of_an_array_of_ranks_is_that_of_each(op: str) -> None:
    ranks = np.array([1, 2, 3, 8, 1000])
    assert bus_factor(op, ranks).tolist() == [bus_factor(op, n) for n in ranks.tolist()]


@pytest.mark.parametrize("op", OPERATIONS)
def test_one_rank_costs_nothing(op: str) -> None:
    assert collective_time(op, 1, 1e9, LINK) == 0
    assert bus_factor(op, 1) == 0
    assert tree_all_reduce(1, 1e9, LINK) == two_level_time("all_reduce", 1, 1, 1e9, LINK, LINK) == 0


@pytest.mark.parametrize("op", OPERATIONS)
def test_time_grows_with_ranks_bytes_and_latency_and_shrinks_with_bandwidth(op: str) -> None:
    ranks = (1, 2, 3, 4, 5, 8, 9, 64, 1000)
    for nbytes in SIZES:
        times = [collective_time(op, n, nbytes, LINK) for n in ranks]
        assert times == sorted(times), nbytes
    for n in ranks[1:]:
        times = [collective_time(op, n, nbytes, LINK) for nbytes in SIZES]
        assert times == sorted(times), n
        slower = Link(LINK.gb_per_s, 2 * LINK.latency_us)
        assert collective_time(op, n, 1e6, slower) > collective_time(op, n, 1e6, LINK)
        if op != "barrier":
            faster = Link(2 * LINK.gb_per_s, LINK.latency_us)
            assert collective_time(op, n, 1e6, faster) < collective_time(op, n, 1e6, LINK)


def test_large_messages_reach_the_link_s_bandwidth_as_bus_bandwidth() -> None:
    # nccl-tests' factors make a ring's bus bandwidth the link's, whatever n.
    for op, n in itertools.product(OPERATIONS, (2, 7, 64)):
        if op == "barrier":
            continue
        nbytes = 1e13
        bus = bus_factor(op, n) * nbytes / collective_time(op, n, nbytes, LINK) / 1e9
        assert bus == pytest.approx(LINK.gb_per_s, rel=2e-3), op


def test_the_tree_wins_for_little_data_on_many_ranks_the_ring_for_much() -> None:
    assert tree_all_reduce(256, 1e3, LINK) < ring_time("all_reduce", 256, 1e3, LINK) / 20
    assert ring_time("all_reduce", 256, 1e10, LINK) < tree_all_reduce(256, 1e10, LINK)
    assert collective_time("all_reduce", 256, 1e3, LINK) == tree_all_reduce(256, 1e3, LINK)
    assert collective_time("all_reduce", 256, 1e10, LINK) == ring_time(
        "all_reduce", 256, 1e10, LINK
    )
    for n in (2, 4, 64):
        assert tree_all_reduce(n, 0, LINK) == pytest.approx(2 * math.log2(n) * 5 * US)


@pytest.mark.parametrize(
    "call",
    [
        lambda: broadcast(0, 1, LINK),
        lambda: broadcast(4, 1, LINK, segments=0),
        lambda: ring_time("reduce_scatter", 4, -1, LINK),
        lambda: ring_time("send_recv", 2, float("nan"), LINK),
        lambda: collective_time("barrier", 0, 0, LINK),
        lambda: collective_time("all_reduced", 4, 1, LINK),
        lambda: bus_factor("all_reduced", 4),
    ],
)
def test_senseless_values_are_refused(call: object) -> None:
    with pytest.raises(ValueError):
        call()
