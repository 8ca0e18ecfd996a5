"""Compares the price of a placement with figures computed by hand, and tests the routes between two
GPUs."""

from __future__ import annotations

import math

import pytest

from parallel3d.blueprint.cluster import LinkClass
from parallel3d.blueprint.collectives import Transfer
from parallel3d.blueprint.layout import Layout
from parallel3d.blueprint.rank_mapping import RankMapping, Tiling
from parallel3d.estimate.network import price_step
from parallel3d.topology.links import loads_of, routes
from tests.placements import NVLINK, RAIL, SPINE, a_cluster

GB = 10**9


def placed(cluster, layout: Layout, text: str = "tp-cp-dp-pp") -> RankMapping:
    return RankMapping.tiled(cluster, layout, Tiling.parse(text, layout))


def seconds(cluster, layout: Layout, transfer: Transfer, **options) -> float:
    return price_step(placed(cluster, layout), [transfer], **options).seconds


def test_ring_on_one_rail_has_the_whole_nic() -> None:
    """Expects 2(n − 1) messages of N/n: 6 · (5 µs + 1 GB / 4 / 50 GB/s)."""
    grads = Transfer("dp", "all_reduce", GB, 3, "gradients")
    found = seconds(a_cluster(4), Layout(tp=8, dp=4), grads)
    assert found == pytest.approx(3 * 6 * (5e-6 + 0.25 / 50))


def test_oversubscribed_spine_is_shared_by_those_who_use_it() -> None:
    """If all four NICs of a leaf send up at 4:1, each has a quarter; if only one does, it has its
    whole bandwidth."""
    stage = Transfer("pp", "send_recv", GB, 1, "activations")
    thin = a_cluster(8, unit_nodes=4, oversubscription=4.0)
    assert seconds(thin, Layout(tp=8, dp=4, pp=2), stage) == pytest.approx(8e-6 + 1 / 12.5)
    lone = placed(thin, Layout(tp=8, dp=4, pp=2), "tp-pp-dp")
    assert price_step(lone, [stage]).seconds == pytest.approx(5e-6 + 1 / 50)
    grads = Transfer("dp", "all_reduce", GB, 1, "gradients")
    one_up = price_step(placed(thin, Layout(tp=8, dp=8)), [grads]).dims["dp"]
    assert one_up.paths.flat == SPINE  # one of a leaf's four NICs sends up: its whole 50 GB/s


def test_nic_is_shared_by_the_gpus_behind_it() -> None:
    grads = Transfer("dp", "all_reduce", GB, 1, "gradients")
    paths = price_step(placed(a_cluster(2, rails=2), Layout(tp=8, dp=2)), [grads]).dims["dp"].paths
    assert paths.flat.gb_per_s == pytest.approx(50 / 4) and paths.flat.latency_us == 5


def test_two_levels_are_taken_where_they_are_cheaper() -> None:
    """With dp=8 over 4 nodes of 8 and tp=4, half of the bytes cross, on two rails at once."""
    layout = Layout(tp=4, dp=8)
    grads = Transfer("dp", "all_reduce", GB, 1, "gradients")
    placement = placed(a_cluster(4), layout)
    found = price_step(placement, [grads])
    inside = 2 * (2e-6 + 0.5 / 450)
    between = 6 * (5e-6 + 0.5 / 4 / 50)
    assert found.seconds == pytest.approx(inside + between)
    assert found.dims["dp"].algorithms == ("hierarchical",)
    flat = price_step(placed(a_cluster(4), layout), [grads], algorithms=("ring",))
    assert flat.seconds == pytest.approx(14 * (8e-6 + 0.125 / 50)) and flat.seconds > found.seconds
    # Each rank sends 1 GB inside its node and 2 · 3/4 · 0.5 GB along its rail.
    assert found.nbytes == pytest.approx(
        {LinkClass.NVLINK: 32 * GB, LinkClass.RAIL: 32 * 0.75 * GB}
    )
    ports = loads_of(placement, found).busiest(placement.cluster)
    assert set(ports) == {"nic"} and ports["nic"][1] == pytest.approx(0.75 * GB)


def test_small_messages_go_by_tree() -> None:
    norm = Transfer("dp", "all_reduce", 8, 1, "norm")
    found = price_step(placed(a_cluster(16), Layout(tp=8, dp=16)), [norm])
    assert found.dims["dp"].algorithms == ("tree",)
    assert found.seconds == pytest.approx(8 * 5e-6, rel=1e-3)


def test_bytes_and_ports_of_a_pipeline_over_the_spine() -> None:
    """With two units of 2 nodes at 2:1, the two NICs of a leaf send 3 GB each over one uplink."""
    cluster = a_cluster(4, unit_nodes=2, oversubscription=2.0)
    forward = Transfer("pp", "send_recv", GB, 3, "forward")
    back = Transfer("pp", "send_recv", GB, 3, "back")
    placement = placed(cluster, Layout(tp=8, dp=2, pp=2))
    found = price_step(placement, [forward, back])
    assert found.nbytes == {LinkClass.SPINE: 16 * 6 * GB}
    ports = loads_of(placement, found).busiest(cluster)
    assert ports["nic"][1] == 3 * GB
    assert ports["uplink"] == ("uplink of the leaf of rail 0 in unit 0", 2 * 3 * GB)
    assert found.seconds == pytest.approx(6 * (8e-6 + 1 / 25))


def test_pair_without_a_wire_costs_infinity() -> None:
    work = Transfer("tp", "all_reduce", GB, 1, "activations")
    cluster = a_cluster(2, oversubscription=None)
    found = price_step(placed(cluster, Layout(tp=16)), [work], algorithms=("ring", "tree"))
    assert math.isinf(found.seconds) and not found.reachable
    assert found.dims["tp"].algorithms == ("no path",)


def test_routes_price_the_spine_and_the_forwarding() -> None:
    """In rails_3x2, A1 reaches B2 over the spine, or over NVLink to B1 and along rail 2."""
    cluster = a_cluster(3, 2, oversubscription=4.0)
    spine, forwarded = (8e-6 + 1 / 12.5), (2e-6 + 1 / 450) + (5e-6 + 1 / 50)
    found = routes(cluster, 0, 3, GB)
    assert [r.seconds for r in found] == pytest.approx([forwarded, spine])
    assert (found[0].slots, found[0].hops) == ((0, 1, 3), (LinkClass.NVLINK, LinkClass.RAIL))
    full = a_cluster(3, 2)
    # A spine with full bandwidth is cheaper.
    assert [len(r.hops) for r in routes(full, 0, 3, GB)] == [1, 2]
    assert [r.hops for r in routes(full, 0, 2, GB)] == [(LinkClass.RAIL,)]
    assert [r.hops for r in routes(full, 0, 1, GB)] == [(LinkClass.NVLINK,)]
    no_spine = routes(a_cluster(3, 2, oversubscription=None), 0, 3, GB)
    assert [r.slots for r in no_spine] == [(0, 1, 3)]
    apart = a_cluster(2, 1, unit_nodes=1, oversubscription=None)
    assert routes(apart, 0, 1, GB) == []
    assert NVLINK.gb_per_s > RAIL.gb_per_s
