"""Tests warnings about a placement, and its refusals."""

from __future__ import annotations

import numpy as np
import pytest

from parallel3d.blueprint.cluster import Cluster
from parallel3d.blueprint.layout import Layout
from parallel3d.blueprint.rank_mapping import RankMapping, Tiling
from parallel3d.errors import UserError
from parallel3d.topology.links import classify, refuse_unreachable, warnings_for
from parallel3d.topology.search import place
from tests.placements import a_cluster, some_traffic


def said(
    cluster: Cluster, layout: Layout, text: str = "tp-cp-dp-pp", slots: np.ndarray | None = None
) -> list[str]:
    placement = RankMapping.tiled(cluster, layout, Tiling.parse(text, layout), slots)
    return warnings_for(placement, classify(placement), some_traffic(layout))


def test_a_good_placement_gets_no_warning() -> None:
    assert said(a_cluster(16), Layout(tp=8, dp=4, pp=4)) == []


def test_tp_outside_of_the_domain_is_priced() -> None:
    (first, *_) = said(a_cluster(4), Layout(tp=16, dp=2))
    assert first.startswith("tp=16 leaves the NVLink domain of 8 GPUs in 2 of 2 groups")
    assert "50 GB/s instead of 450" in first and "tp=8 fits" in first
    assert "and its communication takes" in first and "ms a step instead of" in first


def test_alternating_rails_offer_two_levels_and_a_snake() -> None:
    first, last = said(a_cluster(16), Layout(tp=4, dp=8, pp=4))
    assert first.startswith("dp=8 alternates between 2 rails: 64 of 128 pairs go over the spine")
    assert "first over 2 ranks of each domain and then over 4 domains (on one rail)" in first
    assert "placement=tp4-dp2-dp4-pp4-snake" in first
    assert last.startswith("NCCL does not know rails")
    assert said(a_cluster(16), Layout(tp=4, dp=8, pp=4), "tp4-dp2-dp4-pp4-snake") == []


def test_pairs_between_units_go_over_the_spine() -> None:
    cluster = a_cluster(8, unit_nodes=4, oversubscription=2.0)
    (only,) = said(cluster, Layout(tp=8, dp=4, pp=2))
    assert only.startswith("32 of 32 pp pairs are on one rail but in different units")
    assert "2:1 oversubscribed" in only


def test_h100_keeps_pp_outermost() -> None:
    (only,) = said(a_cluster(16), Layout(tp=8, dp=4, pp=4), "tp-pp-dp")
    assert "keep pp outermost (placement=default)" in only


def test_nvl72_names_the_order_and_the_segment() -> None:
    cluster, layout = a_cluster(36, 4, 72), Layout(tp=4, cp=2, pp=8, dp=2)
    torn = [s for s in said(cluster, layout) if "--segment" in s]
    assert len(torn) == 1 and torn[0].startswith("2 of 2 replicas of tp·cp·pp = 64 GPUs")
    assert "placement=tp-cp-pp-dp" in torn[0] and "--segment=16" in torn[0]
    chosen = place("tp-cp-pp-dp", cluster, layout, some_traffic(layout))
    (whole,) = warnings_for(chosen, classify(chosen), some_traffic(layout))
    assert whole.startswith("each replica of 64 GPUs is in one NVLink domain")


def test_nvl72_reports_how_many_whole_replicas_fit() -> None:
    # 16 of 72 GPUs: 4 whole replicas per rack.
    torn = said(a_cluster(36, 4, 72), Layout(tp=4, pp=4, dp=9))
    assert any("dp=8 would keep replicas whole" in sentence for sentence in torn)


@pytest.mark.nightly
def test_rail_only_refuses_tp_outside_of_the_domain_with_a_layout_that_works() -> None:
    cluster, layout = a_cluster(4, oversubscription=None), Layout(tp=16, dp=2)
    with pytest.raises(UserError) as refused:
        said(cluster, layout)
    message = str(refused.value)
    assert message.startswith("tp=16: cluster test has no spine")
    assert "node0 GPU 7" in message and "node1 GPU 0" in message and "PXN" in message
    assert message.endswith("the largest tp that works on as many GPUs is tp=8 with dp=4")
    assert said(cluster, Layout(tp=8, dp=4)) == []
    for text in ("default", "auto", "tp-dp"):
        with pytest.raises(UserError, match=r"the largest tp that works .* is tp=8"):
            place(text, cluster, layout, some_traffic(layout))


@pytest.mark.nightly
def test_rail_only_names_an_order_that_has_paths() -> None:
    cluster, layout = a_cluster(4, oversubscription=None), Layout(tp=4, dp=8)
    with pytest.raises(
        UserError, match=r"placement=tp4-dp2-dp4-snake gives all neighbours a path$"
    ):
        said(cluster, layout)
    assert said(cluster, layout, "tp4-dp2-dp4-snake") == []
    auto = place("auto", cluster, layout, some_traffic(layout))
    assert auto.how == "tp4-dp2-dp4-snake"


def test_a_pair_without_a_wire_is_found_among_many_that_only_leave_their_domain() -> None:
    cluster, layout = a_cluster(10, 2, oversubscription=None), Layout(tp=2, dp=5)
    slots = np.array([0, 2, 4, 6, 8, 10, 12, 14, 16, 19])  # the last pair is on two rails
    placement = RankMapping(cluster, layout, slots, "by hand")
    assert len(classify(placement)["tp"].offending) == 5
    with pytest.raises(UserError, match=r"tp=2: .*no path between rank 8 .*rank 9 "):
        refuse_unreachable(placement, classify(placement), some_traffic(layout))
