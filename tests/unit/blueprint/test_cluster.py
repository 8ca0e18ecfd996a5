"""Tests clusters: facts that follow from the sizes, classes of links, the order of slots."""

from __future__ import annotations

import random

import numpy as np

from parallel3d.blueprint.cluster import Cluster, Link, LinkClass

FAST, MIDDLE, SLOW = Link(400.0, 1.0), Link(50.0, 4.0), Link(40.0, 6.0)


def cluster(nodes: int, gpus: int, domain: int, rails: int | None = None, **more) -> Cluster:
    return Cluster("test", nodes, gpus, domain, rails or gpus, FAST, MIDDLE, SLOW, **more)


def random_cluster(rng: random.Random) -> Cluster:
    """Returns a random mixture of missing GPUs, scattered units and domains."""
    nodes, gpus = rng.randint(1, 9), rng.choice((1, 2, 4, 8))
    more: dict[str, object] = {}
    if rng.random() < 0.5:
        more["node_gpus"] = tuple(rng.randint(1, gpus) for _ in range(nodes))
    if rng.random() < 0.5:
        more["node_unit"] = tuple(rng.randrange(3) for _ in range(nodes))
    domain = rng.choice([d for d in (1, 2, 4, 8, 16) if gpus % d == 0 or d % gpus == 0])
    if domain >= gpus and rng.random() < 0.5:
        more["node_domain"] = tuple(rng.randrange(4) for _ in range(nodes))
    return cluster(nodes, gpus, domain, rng.randint(1, gpus), **more)


def pieces(labels: np.ndarray) -> int:
    """Returns runs of equal neighbours."""
    return 1 + int(np.count_nonzero(np.diff(labels)))


def test_an_even_cluster_in_order_is_already_sorted():
    for even in (cluster(4, 8, 8), cluster(4, 8, 4), cluster(36, 4, 72), cluster(1, 1, 1)):
        assert even.sorted_slots().tolist() == list(range(even.size))
    by_units = cluster(6, 2, 2, unit_nodes=4)  # the smaller unit is the last one anyway
    assert by_units.sorted_slots().tolist() == list(range(12))


def test_sorting_permutes_and_leaves_each_domain_in_one_piece():
    rng = random.Random(0)
    for _ in range(500):
        some = random_cluster(rng)
        order = some.sorted_slots()
        assert sorted(order.tolist()) == list(range(some.size))
        assert pieces(some.domain[order]) == np.unique(some.domain).size


def test_sorting_leaves_each_unit_in_one_piece_where_no_domain_crosses_units():
    rng = random.Random(1)
    for _ in range(500):
        some = random_cluster(rng)
        crossing = any(np.unique(some.unit[some.domain == d]).size > 1 for d in set(some.domain))
        if not crossing:
            order = some.sorted_slots()
            assert pieces(some.unit[order]) == np.unique(some.unit).size


def test_nodes_in_any_order_are_brought_together_by_their_units():
    scattered = cluster(4, 2, 2, node_unit=(7, 3, 7, 3))
    assert scattered.sorted_slots().tolist() == [0, 1, 4, 5, 2, 3, 6, 7]


def test_a_domain_with_a_missing_gpu_comes_after_the_whole_ones():
    assert cluster(3, 2, 2, node_gpus=(1, 2, 2)).sorted_slots().tolist() == [1, 2, 3, 4, 0]
    racks = cluster(3, 2, 4, node_domain=(5, 6, 6))
    assert racks.sorted_slots().tolist() == [2, 3, 4, 5, 0, 1]


def test_classes_of_links():
    two_units = cluster(4, 2, 2, unit_nodes=2)
    assert [LinkClass(int(c)) for c in two_units.link_class(0, np.arange(8))] == [
        *(LinkClass.SELF, LinkClass.NVLINK, LinkClass.RAIL, LinkClass.SPINE),
        *(LinkClass.SPINE, LinkClass.SPINE, LinkClass.SPINE, LinkClass.SPINE),
    ]
    assert cluster(2, 2, 2, oversubscription=None).link_class(0, 3) == LinkClass.NONE
