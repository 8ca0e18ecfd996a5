"""Compares groups and prices of expert parallelism with pairs counted one by one."""

from __future__ import annotations

import itertools
import json
import random
from collections import Counter
from dataclasses import replace
from xml.etree import ElementTree

import numpy as np
import pytest

from parallel3d.blueprint.cluster import LinkClass
from parallel3d.blueprint.collectives import Transfer
from parallel3d.blueprint.groups import members
from parallel3d.blueprint.layout import Layout
from parallel3d.blueprint.rank_mapping import RankMapping, Tiling
from parallel3d.cli.overrides import compose
from parallel3d.commands.topology.report import facts_of, make_report
from parallel3d.errors import UserError
from parallel3d.estimate.network import Exchange, price_step
from parallel3d.topology.links import classify, loads_of, refuse_unreachable
from parallel3d.topology.picture import cluster_svg
from parallel3d.topology.search import search
from tests.placements import a_cluster, random_cluster, random_layout

GB = 10**9
TOKENS = Transfer("ep", "all_to_all", GB, 2, "tokens of experts")


def placed(cluster, layout: Layout, text: str = "tp-cp-dp-pp") -> RankMapping:
    return RankMapping.tiled(cluster, layout, Tiling.parse(text, layout))


def with_ep(rng: random.Random, layout: Layout) -> Layout:
    sizes = [n for n in range(1, layout.stage_ranks + 1) if layout.stage_ranks % n == 0]
    return replace(layout, ep=rng.choice(sizes))


def test_members_are_the_groups_of_the_layout() -> None:
    rng = random.Random(1)
    for _ in range(100):
        layout = with_ep(rng, random_layout(rng, 64))
        for dim in ("ep", "edp"):
            assert members(layout, dim).tolist() == layout.groups(dim)


def test_an_exchange_counts_each_pair_once() -> None:
    rng = random.Random(2)
    for _ in range(60):
        cluster = random_cluster(rng)
        count = rng.choice([n for n in range(1, 9) if n <= cluster.size])
        size = rng.randint(1, cluster.size // count)
        slots = np.random.default_rng(rng.randrange(99)).permutation(cluster.size)
        groups = slots[: count * size].reshape(count, size)
        found = Exchange.of(cluster, groups)
        pairs = [p for group in groups.tolist() for p in itertools.permutations(group, 2)]
        kinds = [LinkClass(int(cluster.link_class(a, b))) for a, b in pairs]
        assert found.counts == Counter(kinds)
        sent = Counter((a, kind) for (a, _), kind in zip(pairs, kinds, strict=True))
        each = zip(found.here.tolist(), found.kinds.tolist(), found.weights.tolist(), strict=True)
        assert {(a, LinkClass(kind)): n for a, kind, n in each} == sent


def test_inside_a_node_all_bytes_go_over_nvlink() -> None:
    """Expects seven eighths of a buffer and one latency for each call, for all groups at once."""
    price = price_step(placed(a_cluster(4), Layout(dp=32, ep=8)), [TOKENS])
    assert price.seconds == pytest.approx(2 * (2e-6 + 7 / 8 / 450))
    assert price.nbytes == {LinkClass.NVLINK: pytest.approx(2 * 32 * 7 / 8 * GB)}
    assert price.dims["ep"].algorithms == ("pairs",)


def test_the_network_carries_what_leaves_the_node() -> None:
    """Of 15 other ranks, 7 are in the node and 8 outside: one on the rail, 7 over the spine."""
    price = price_step(placed(a_cluster(2), Layout(dp=16, ep=16)), [TOKENS])
    assert price.seconds == pytest.approx(2 * (8e-6 + 8 / 16 / 50))
    each = 2 * 16 * GB / 16
    counts = {LinkClass.NVLINK: 7, LinkClass.RAIL: 1, LinkClass.SPINE: 7}
    assert price.nbytes == {kind: pytest.approx(each * n) for kind, n in counts.items()}
    # A NIC of four GPUs has four times the bytes; a thin spine has a quarter of the bandwidth.
    shared = price_step(placed(a_cluster(2, rails=2), Layout(dp=16, ep=16)), [TOKENS])
    assert shared.seconds == pytest.approx(2 * (8e-6 + 4 * 8 / 16 / 50))
    thin = a_cluster(2, oversubscription=4.0)
    slow = price_step(placed(thin, Layout(dp=16, ep=16)), [TOKENS])
    assert slow.seconds == pytest.approx(2 * (8e-6 + 4 * 7 / 16 / 50))


def test_gathers_are_rings_as_before() -> None:
    layout = Layout(dp=16, ep=16)
    gathers = Transfer("ep", "all_gather", GB, 1, "tokens of experts")
    as_dp = Transfer("dp", "all_gather", GB, 1, "tokens of experts")
    placement = placed(a_cluster(2), layout)
    assert price_step(placement, [gathers]).seconds == price_step(placement, [as_dp]).seconds


def test_bytes_of_all_wires_add_up_to_the_price() -> None:
    placement = placed(a_cluster(4), Layout(tp=2, dp=16, ep=16))
    sent = [TOKENS, Transfer("edp", "reduce_scatter", GB, 1, "gradients")]
    price = price_step(placement, sent)
    loads = loads_of(placement, price)
    assert loads.nvlink.sum() == pytest.approx(price.nbytes[LinkClass.NVLINK])
    outside = price.nbytes[LinkClass.RAIL] + price.nbytes[LinkClass.SPINE]
    assert loads.nic.sum() == pytest.approx(outside)
    assert loads.uplink.sum() == pytest.approx(price.nbytes[LinkClass.SPINE])


def test_the_search_keeps_experts_inside_their_node() -> None:
    """An order with pipelines inside spreads the ranks of ep over nodes, at a higher price."""
    cluster, layout = a_cluster(4), Layout(pp=4, dp=8, ep=8)
    found = search(cluster, layout, [TOKENS])
    links = classify(found[0].placement)["ep"]
    assert links.in_domain == links.groups == 4
    spread = price_step(placed(cluster, layout, "pp-dp"), [TOKENS]).seconds
    assert spread > 3 * found[0].seconds


def test_pairs_without_a_wire_are_refused() -> None:
    """Neighbours of a snake's ring are on one rail, but other members are not."""
    cluster, layout = a_cluster(2, oversubscription=None), Layout(dp=16, ep=16)
    placement = placed(cluster, layout, "dp8-dp2-snake")
    price = price_step(placement, [TOKENS])
    assert not price.reachable and price.dims["ep"].algorithms == ("no path",)
    with pytest.raises(UserError, match=r"ep=16 with tp=1: cluster test has no spine"):
        refuse_unreachable(placement, classify(placement), [TOKENS])
    inside = placed(cluster, replace(layout, ep=8), "dp8-dp2-snake")
    refuse_unreachable(inside, classify(inside), [TOKENS])


def test_the_picture_frames_the_group_of_experts() -> None:
    placement = placed(a_cluster(4), Layout(tp=2, dp=16, ep=8))
    loads = loads_of(placement, price_step(placement, [TOKENS]))
    root = ElementTree.fromstring(cluster_svg(placement, 9, loads, "title", "words"))
    frames = [e for e in root.iter() if e.get("class") == "experts"]
    assert sorted(int(e.get("data-rank", "")) for e in frames) == list(range(8, 16))
    assert any("its expert group (ep=8)" in (e.text or "") for e in root.iter())


@pytest.mark.slow
def test_a_report_of_experts_has_their_groups_and_is_json() -> None:
    words = ("model=qwen3_30b_a3b", "dp=8", "pp=2", "ep=8", "micro_batch_size=1")
    config = compose("cluster=dgx_h100", "cluster.nodes=2", "global_batch_size=64", *words)
    facts = json.loads(json.dumps(facts_of(make_report(config, words, {}))))
    assert facts["layout"]["ep"] == 8 and facts["groups"]["ep"]["seconds"] > 0
    warned = [text for text in facts["warnings"] if "ep=" in text]
    assert not warned
