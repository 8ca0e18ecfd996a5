"""Tests that the placement search is never worse than the default, optimal if the optimum is known,
and fast."""

from __future__ import annotations

import itertools
import math
import random
import time
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest

from parallel3d.blueprint.cluster import Cluster, Link
from parallel3d.blueprint.collectives import Transfer
from parallel3d.blueprint.layout import Layout
from parallel3d.blueprint.rank_mapping import RankMapping, Tiling
from parallel3d.errors import UserError
from parallel3d.estimate.network import price_step
from parallel3d.topology.links import classify
from parallel3d.topology.search import place, search
from tests.pace import in_cpu_time
from tests.placements import (
    a_cluster,
    every_tiling,
    random_cluster,
    random_layout,
    slow_places,
    some_traffic,
)


def cost(placement: RankMapping, traffic: list[Transfer]) -> float:
    price = price_step(placement, traffic)
    return price.seconds if price.reachable else math.inf


def default_cost(cluster: Cluster, layout: Layout, traffic: list[Transfer]) -> float:
    tiling = Tiling.parse("tp-cp-dp-pp", layout)
    return cost(RankMapping.tiled(cluster, layout, tiling), traffic)


def nvl72(nodes: int) -> Cluster:
    speeds = {"nvlink": Link(900.0, 2.0), "rail": Link(50.0, 5.0), "spine": Link(50.0, 8.0)}
    return Cluster("nvl72", nodes, 4, 72, 4, **speeds)


def llama_405b(layout: Layout, microbatches: int, chunks: int = 8) -> list[Transfer]:
    """Returns the traffic of one step of the MLPerf 405B runs: sequence parallel, interleaved,
    distributed optimizer.

    Sizes: mlcommons/training_results_v5.0 (126 layers, hidden 16384, 8 key/value heads, sequence
    8192, 8 chunks per stage); volumes by Narayanan et al. 2021 §3 and Korthikanti et al. 2022.
    """
    tp, cp, pp = layout.tp, layout.cp, layout.pp
    hidden, layers = 8192 // cp * 16384 * 2, 126 // pp * microbatches
    keys = 8192 * 2 * 8 * 128 * 2 // tp
    shard = 405_849_243_648 // (tp * pp)
    return [
        Transfer("tp", "all_gather", hidden, 4 * layers, "activations"),
        Transfer("tp", "reduce_scatter", hidden, 4 * layers, "activations"),
        Transfer("cp", "all_gather", keys, layers, "keys and values"),
        Transfer("cp", "reduce_scatter", keys, layers, "their gradients"),
        Transfer("pp", "send_recv", hidden // tp, chunks * microbatches, "forward"),
        Transfer("pp", "send_recv", hidden // tp, chunks * microbatches, "back"),
        Transfer("dp", "reduce_scatter", 4 * shard, 1, "gradients"),
        Transfer("dp", "all_gather", 2 * shard, 1, "parameters"),
    ]


@pytest.mark.nightly
def test_search_never_loses_to_the_default_order() -> None:
    """Tests 100 random clusters (uneven, without spine, with spare GPUs) and proportions of
    traffic."""
    rng = random.Random(11)
    won = 0
    for _ in range(100):
        cluster = random_cluster(rng, 16)
        layout = random_layout(rng, min(cluster.size, 96))
        traffic = some_traffic(layout, rng)
        found = search(cluster, layout, traffic)
        default = default_cost(cluster, layout, traffic)
        (listed,) = [c for c in found if c.is_default]
        assert listed.seconds == default
        assert found[0].seconds <= default
        assert found[0].seconds == cost(found[0].placement, traffic)
        assert found[0].is_default or found[0].seconds < default
        won += found[0].seconds < 0.99 * default
    assert won > 12  # it also finds better placements


@pytest.mark.nightly
def test_small_searches_find_the_best_of_all_tilings() -> None:
    rng = random.Random(13)
    compared = 0
    while compared < 40:
        cluster = random_cluster(rng, 8)
        layout = random_layout(rng, min(cluster.size, 48))
        traffic = some_traffic(layout, rng)
        every = every_tiling(layout, 200)
        if len(every) < 6:
            continue
        placements = (RankMapping.tiled(cluster, layout, t) for t in every)
        best = min(cost(p, traffic) for p in placements)
        found = search(cluster, layout, traffic)[0].seconds
        assert found <= best * (1 + 1e-9)
        compared += 1


TINY = [
    (a_cluster(3, 2), Layout(tp=2, pp=3)),
    (a_cluster(3, 2), Layout(tp=3, dp=2)),
    (a_cluster(2, 3), Layout(pp=2, dp=3)),
    (a_cluster(2, 4, 2), Layout(tp=4, pp=2)),
    (a_cluster(4, 2, unit_nodes=2, oversubscription=4.0), Layout(dp=4, pp=2)),
    (a_cluster(2, 4, oversubscription=None), Layout(tp=2, dp=4)),
]


def unlike_permutations(cluster: Cluster) -> list[np.ndarray]:
    """Yields permutations of the GPUs with the first one in place, one for each set that only
    renames equal GPUs.

    A renaming that keeps which GPUs share a node, domain, unit and rail changes no wire.
    """
    places = [(n, domain, unit, i % cluster.rails) for n, i, domain, unit in slow_places(cluster)]
    shared = np.array(
        [[[a == b for a, b in zip(x, y, strict=True)] for y in places] for x in places]
    )
    every = [(0, *p) for p in itertools.permutations(range(1, cluster.size))]
    same = [g for g in every if np.array_equal(shared[np.ix_(g, g)], shared)]
    return [np.array(p) for p in every if all(p <= tuple(g[gpu] for gpu in p) for g in same)]


@pytest.mark.nightly
@pytest.mark.parametrize(("cluster", "layout"), TINY)
def test_tiny_worlds_have_no_better_permutation(cluster: Cluster, layout: Layout) -> None:
    """Tests all permutations of 6 or 8 GPUs with rank 0 on the first one."""
    traffic = some_traffic(layout)
    tried = (RankMapping(cluster, layout, p, "tried") for p in unlike_permutations(cluster))
    best = min(cost(placement, traffic) for placement in tried)
    assert math.isfinite(best)
    assert search(cluster, layout, traffic)[0].seconds == pytest.approx(best)


def test_h100_tp8_keeps_the_default_order() -> None:
    layout = Layout(tp=8, dp=4, pp=4)
    assert search(a_cluster(16), layout, some_traffic(layout))[0].is_default


@pytest.mark.nightly
def test_nvl72_search_finds_one_replica_a_domain() -> None:
    """Tests MLPerf's 405B on GB200: tp4 cp2 pp8, --segment=16, rank order tp-cp-pp-dp."""
    cluster, layout = nvl72(8 * 18), Layout(tp=4, cp=2, pp=8, dp=8)
    traffic = llama_405b(layout, microbatches=144)
    config = SimpleNamespace(placement="tp-cp-pp-dp")
    known = place(config.placement, cluster, layout, traffic)
    links = classify(known)
    assert all(links[d].in_domain == links[d].groups for d in ("tp", "cp", "pp"))
    assert known.how == "tp4-cp2-pp8-dp8, 64 GPUs of each domain"
    default = default_cost(cluster, layout, traffic)
    assert cost(known, traffic) < 0.75 * default
    assert search(cluster, layout, traffic)[0].seconds <= cost(known, traffic)
    # The gradients of those runs are hidden by the backward pass; here a fifth of them is exposed
    seen = [replace(t, nbytes=t.nbytes // 5) if t.dim == "dp" else t for t in traffic]
    best = search(cluster, layout, seen)[0]
    assert (best.placement.slots == known.slots).all()


@pytest.mark.nightly
def test_shuffled_nodes_cost_no_more_than_sorted_ones() -> None:
    """Slurm alternates between the nodes of two units; auto reorders them."""
    cluster = a_cluster(8, unit_nodes=4, oversubscription=4.0)
    layout = Layout(tp=8, dp=4, pp=2)
    traffic = some_traffic(layout)
    in_turn = np.concatenate([np.arange(8) + 8 * n for n in (0, 4, 1, 5, 2, 6, 3, 7)])
    found = search(cluster, layout, traffic, in_turn)
    straight = search(cluster, layout, traffic)
    assert found[0].seconds == pytest.approx(straight[0].seconds)
    assert found[0].seconds < next(c for c in found if c.is_default).seconds


def test_unreadable_placements_name_the_nearest_choice() -> None:
    cluster, layout = a_cluster(2), Layout(tp=4, dp=2, pp=2)
    for text, nearest in (
        ("atuo", "placement=auto"),
        ("tp-dp", "placement=tp-dp-pp"),
        ("tp4-dp4-pp2", "placement=tp-dp-pp"),
        ("pp-tp-dp-zz", "placement=tp-dp-pp"),
    ):
        with pytest.raises(UserError, match=f"placement='{text}'.*the nearest is {nearest}$"):
            place(text, cluster, layout, some_traffic(layout))
    with pytest.raises(ValueError, match="8 GPUs for 16 ranks"):
        place("auto", a_cluster(1), layout, some_traffic(layout))


@pytest.mark.nightly
def test_search_answers_in_time() -> None:
    """It took, on one busy core, 0.2 s for 16,384 GPUs, and 2 s for 1,000,000, where it only
    compares orders."""
    for nodes, dp, limit in ((2048, 128, 0.8), (131_072, 8192, 8.0)):
        cluster = a_cluster(nodes, unit_nodes=32, oversubscription=2.0)
        layout = Layout(tp=8, pp=16, dp=dp)
        traffic = some_traffic(layout)
        start = time.process_time()
        found = search(cluster, layout, traffic)
        assert in_cpu_time(time.process_time() - start, limit)
        assert found[0].seconds <= next(c for c in found if c.is_default).seconds
