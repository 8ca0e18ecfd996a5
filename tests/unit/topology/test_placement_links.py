"""Compares the classification of groups by their wires with sets and dicts."""

from __future__ import annotations

import random
import time
from dataclasses import replace

import numpy as np
import pytest

from parallel3d.blueprint.cluster import LinkClass, cluster_from_config
from parallel3d.blueprint.keys import ClusterConfig
from parallel3d.blueprint.layout import Layout
from parallel3d.blueprint.rank_mapping import RankMapping, Tiling
from parallel3d.topology.links import CLASSIFIED, classify, routes
from tests.pace import in_cpu_time
from tests.placements import a_cluster, random_cluster, random_layout, slow_classes

NVLINK, RAIL, SPINE, NONE = LinkClass.NVLINK, LinkClass.RAIL, LinkClass.SPINE, LinkClass.NONE


def placed(cluster, layout: Layout, text: str = "tp-cp-dp-pp") -> RankMapping:
    return RankMapping.tiled(cluster, layout, Tiling.parse(text, layout))


@pytest.mark.nightly
def test_classification_equals_a_slow_one_on_random_placements() -> None:
    """Tests 2,000 random clusters and layouts with ranks on random GPUs: nothing relies on
    symmetry."""
    rng, shuffled = random.Random(1), np.random.default_rng(1)
    seen = set()
    for i in range(2000):
        cluster = random_cluster(rng)
        layout = random_layout(rng, min(cluster.size, 48))
        slots = np.arange(cluster.size)[: layout.world_size]
        if i % 2:
            slots = shuffled.permutation(cluster.size)[: layout.world_size]
        placement = RankMapping(cluster, layout, slots, "random")
        links = classify(placement)
        assert tuple(links) == CLASSIFIED
        for dim, found in links.items():
            slow = slow_classes(placement, dim)
            assert {k.label: n for k, n in found.pairs.items()} == dict(slow["pairs"])
            groups = (found.in_domain, found.on_rail, found.crossing)
            assert groups == (slow["in_domain"], slow["on_rail"], slow["crossing"])
            assert sum(groups) == found.groups
            assert found.between_units == slow["between_units"]
            levels = found.hierarchy and (found.hierarchy.inner, found.hierarchy.outer)
            assert levels == slow["levels"]
            if dim not in ("tp", "cp"):
                named = {p.ranks for p in found.offending}
                assert named <= set(slow["worse than a rail"])
                assert len(named) == min(4, len(slow["worse than a rail"]))
            wanted = NVLINK if dim in ("tp", "cp") else RAIL
            assert bool(found.offending) == (found.worst > wanted)
            seen.update(found.pairs)
    assert seen == {NVLINK, RAIL, SPINE, NONE}  # the random cases include every class


def test_h100_tp8_gives_pure_rails_to_pp_and_dp() -> None:
    links = classify(placed(a_cluster(16), Layout(tp=8, dp=4, pp=4)))
    assert links["tp"].pairs == {NVLINK: 128} and links["tp"].in_domain == 16
    for dim in ("dp", "pp"):
        assert set(links[dim].pairs) == {RAIL} and links[dim].on_rail == links[dim].groups
        assert links[dim].offending == () and links[dim].hierarchy is None


def test_tp4_on_nodes_of_eight_alternates_rails_and_offers_two_levels() -> None:
    """With a dp stride of 4, members alternate between two rails."""
    links = classify(placed(a_cluster(16), Layout(tp=4, dp=8, pp=4)))["dp"]
    assert links.pairs == {NVLINK: 64, SPINE: 64} and links.worst is SPINE
    assert links.crossing == links.groups and links.rails == 2
    levels = links.hierarchy
    assert (levels.inner, levels.outer, levels.one_rail) == (2, 4, True)
    first = links.offending[0]
    assert first.ranks == (4, 8) and first.names == ("node0 GPU 4", "node1 GPU 0")
    snake = classify(placed(a_cluster(16), Layout(tp=4, dp=8, pp=4), "tp4-dp2-dp4-pp4-snake"))
    assert snake["dp"].pairs == {NVLINK: 64, RAIL: 64}


def test_nvl72_with_dp_outermost_has_one_replica_a_domain() -> None:
    """Uses tp·cp·pp = 64 of 72 GPUs, as a Slurm segment of 16 nodes gives them."""
    cluster = a_cluster(36, 4, 72)
    layout = Layout(tp=4, cp=2, pp=8, dp=2)
    slots = np.flatnonzero(np.arange(144) % 72 < 64)
    links = classify(RankMapping.tiled(cluster, layout, Tiling.parse("tp-cp-pp-dp", layout), slots))
    for dim in ("tp", "cp", "pp", "embedding"):
        assert set(links[dim].pairs) == {NVLINK}
    assert links["dp"].pairs == {RAIL: 128} and links["dp"].on_rail == 64
    packed = classify(placed(cluster, layout, "tp-cp-pp-dp"))
    # Without segments, the second replica is split.
    assert packed["pp"].in_domain < packed["pp"].groups


def test_units_turn_one_rail_into_the_spine() -> None:
    links = classify(placed(a_cluster(8, unit_nodes=4), Layout(tp=8, dp=4, pp=2)))
    assert links["dp"].on_rail == links["dp"].groups and links["dp"].between_units == 0
    assert links["pp"].pairs == {SPINE: 32} and links["pp"].between_units == 32


def test_without_spine_other_rails_have_no_wire() -> None:
    links = classify(placed(a_cluster(4, oversubscription=None), Layout(tp=16, dp=2)))["tp"]
    assert links.worst is NONE and links.pairs[NONE] == 4
    assert links.offending[0].names == ("node0 GPU 7", "node1 GPU 0")


def test_a_missing_gpu_changes_the_links_of_shifted_groups() -> None:
    cluster = a_cluster(4, node_gpus=(8, 7, 8, 8))
    links = classify(placed(cluster, Layout(tp=8, dp=3)))
    assert links["tp"].in_domain == 1 and links["tp"].groups == 3
    assert links["tp"].offending[0].names == ("node1 GPU 6", "node2 GPU 0")


@pytest.mark.nightly
@pytest.mark.parametrize("tp", [4, 8])
def test_a_million_ranks_classify_in_two_seconds(tp: int) -> None:
    """It took 0.2 to 0.5 s on one core."""
    cluster = a_cluster(131_072, unit_nodes=32)
    layout = Layout(tp=tp, pp=16, dp=2**20 // 16 // tp)
    placement = placed(cluster, layout)
    start = time.process_time()
    links = classify(placement)
    assert in_cpu_time(time.process_time() - start, 2)
    assert sum(links["pp"].pairs.values()) == 15 * 2**16


def test_over_pcie_and_sockets_nothing_is_forwarded() -> None:
    config = ClusterConfig(nodes=2, gpus_per_node=2, nvlink_gb_per_s=31.5)
    plain = cluster_from_config(config)
    fast = routes(plain, 0, 3, 1e6)
    assert {len(route.hops) for route in fast} == {1, 2}  # over the spine, or through the neighbour
    for change in ({"intra": "pcie"}, {"network": "socket"}):
        cluster = cluster_from_config(replace(config, **change))
        assert routes(cluster, 0, 3, 1e6) == [r for r in fast if len(r.hops) == 1]
    pcie = cluster_from_config(replace(config, intra="pcie"))
    assert [pcie.label(kind) for kind in LinkClass] == ["self", "pcie", "rail", "spine", "none"]
    assert plain.label(LinkClass.NVLINK) == "nvlink"
    # The transfer is priced by its own bandwidth.
    assert pcie.link(LinkClass.NVLINK) == plain.link(LinkClass.NVLINK)


def test_groups_of_experts_are_inside_a_domain_and_their_copies_on_rails() -> None:
    links = classify(placed(a_cluster(16), Layout(tp=2, dp=8, ep=8)))
    assert tuple(links) == (*CLASSIFIED, "ep", "edp")
    assert (
        links["ep"].worst is LinkClass.NVLINK and links["ep"].in_domain == links["ep"].groups == 2
    )
    assert links["edp"].worst is LinkClass.RAIL and links["edp"].groups == 8
    wide = classify(placed(a_cluster(16), Layout(dp=16, ep=16)))["ep"]
    assert wide.offending and wide.in_domain == 0
