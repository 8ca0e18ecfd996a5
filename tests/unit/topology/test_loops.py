"""Tests topology with several stages per rank: the chain of a pipeline closes, or turns as in a
V."""

from __future__ import annotations

import io

import numpy as np
import pytest

from parallel3d.blueprint.cluster import LinkClass
from parallel3d.blueprint.groups import members
from parallel3d.blueprint.keys import ClusterConfig
from parallel3d.blueprint.layout import Layout
from parallel3d.blueprint.rank_mapping import RankMapping, Tiling
from parallel3d.commands.topology.report import TopologyReport, make_report, write_report
from parallel3d.errors import UserError
from parallel3d.estimate.network import flows_of, price_step
from parallel3d.estimate.traffic import transfers
from parallel3d.models.keys import ModelConfig
from parallel3d.resolve import blueprint_of
from parallel3d.run_config import Config, check_config
from parallel3d.topology.assumptions import preset
from parallel3d.topology.links import classify, loads_of, refuse_unreachable
from tests.placements import a_cluster

PIPELINES = [("1f1b", 4, 1), ("interleaved", 2, 2), ("interleaved", 2, 3), ("interleaved", 3, 2)]
PIPELINES += [("interleaved_zb", 4, 3), ("zbv", 2, 2), ("zbv", 3, 2), ("v_half", 4, 2)]
pipelines = pytest.mark.parametrize(("name", "pp", "vpp"), PIPELINES)


def config_of(name: str, pp: int, vpp: int, tp: int = 1, dp: int = 1, **more: object) -> Config:
    model = ModelConfig(num_layers=pp * vpp + 1)
    config = Config(tp=tp, pp=pp, dp=dp, vpp=vpp, model=model, **more)
    config.micro_batch_size, config.global_batch_size = 1, 6 * dp
    config.schedule.name = name
    return check_config(config, own_samples=True)


def placed(cluster, config: Config, text: str = "tp-cp-dp-pp") -> RankMapping:
    layout = blueprint_of(config).looped_layout
    return RankMapping.tiled(cluster, layout, Tiling.parse(text, layout))


def pp_bytes(config: Config, layout: Layout, rank: int) -> int:
    """Returns the messages that one rank sends along pp, from its own list."""
    return sum(t.nbytes * t.count for t in transfers(config, layout, rank) if t.dim == "pp")


@pipelines
def test_the_price_covers_all_traffic_of_the_ranks(name: str, pp: int, vpp: int) -> None:
    """The list for two neighbours, applied to all pairs, is the sum of the lists of all ranks."""
    config = config_of(name, pp, vpp, dp=2)
    layout = blueprint_of(config).looped_layout
    placement = placed(a_cluster(2 * pp, gpus=1), config)  # each GPU has a NIC, and no NVLink
    price = price_step(placement, [t for t in transfers(config, layout) if t.dim == "pp"])
    sent = [pp_bytes(config, layout, rank) for rank in range(pp)]
    assert sum(price.dims["pp"].nbytes.values()) == pytest.approx(2 * sum(sent))
    loads = loads_of(placement, price)
    by_rank = loads.nic[placement.slots].reshape(pp, 2)
    assert by_rank == pytest.approx(np.array([sent, sent], dtype=float).T)
    assert loads.busiest(placement.cluster)["nic"][1] == pytest.approx(max(sent))


@pipelines
def test_in_loops_the_last_rank_is_a_neighbour_of_the_first(name: str, pp: int, vpp: int) -> None:
    layout = blueprint_of(config_of(name, pp, vpp)).looped_layout
    flows = flows_of("pp", a_cluster(pp, gpus=1), members(layout, "pp"), layout.loops).ring
    pairs = [set(ends) for ends in zip(flows.here.tolist(), flows.there.tolist(), strict=True)]
    expected = [{rank, rank + 1} for rank in range(pp - 1)]
    if "interleaved" in name and pp > 2:
        expected.append({0, pp - 1})
    assert pairs == expected


def test_the_way_back_to_the_first_rank_is_priced_and_shown() -> None:
    """With four nodes in two units, ranks 1 and 2 send over the spine; in a loop, ranks 3 and 0 do
    so too."""
    cluster = a_cluster(4, gpus=1, unit_nodes=2, oversubscription=4.0)
    chain, loops = (config_of(n, 4, v) for n, v in (("1f1b", 1), ("interleaved", 2)))
    seconds, kinds = [], []
    for config in (chain, loops):
        placement = placed(cluster, config)
        sent = [t for t in transfers(config, placement.layout) if t.dim == "pp"]
        found = price_step(placement, sent).dims["pp"]
        (message,) = {t.nbytes for t in sent}
        seconds.append(found.seconds)
        kinds.append(
            {k: n / message / config.num_microbatches / 2 for k, n in found.nbytes.items()}
        )
        assert classify(placement)["pp"].pairs == (
            {LinkClass.RAIL: 2, LinkClass.SPINE: 1 + (config is loops)}
        )
    assert kinds[0] == {LinkClass.RAIL: 2, LinkClass.SPINE: 1}
    # With two loops each neighbour sends twice as much, and the way back is used once.
    assert kinds[1] == {LinkClass.RAIL: 4, LinkClass.SPINE: 3}
    assert seconds[1] == pytest.approx(2 * seconds[0])


def test_a_way_back_without_a_wire_is_refused() -> None:
    """With three nodes of two GPUs and no spine, NVLink and a rail join the ranks, but not into a
    ring."""
    cluster = a_cluster(3, gpus=2, unit_nodes=3, oversubscription=None)
    config = config_of("interleaved", 3, 2, dp=1)
    layout = blueprint_of(config).looped_layout
    # Ranks 0 and 1 in one NVLink domain, 1 and 2 on rail 1; 2 and 0 share neither.
    placement = RankMapping(cluster, layout, np.array([0, 1, 3]), "by hand")
    sent = transfers(config, layout)
    with pytest.raises(UserError, match=r"pp=3 with tp=1: .*no path between rank 2 .*rank 0 "):
        refuse_unreachable(placement, classify(placement), sent)
    as_v = config_of("zbv", 3, 2)
    layout = blueprint_of(as_v).looped_layout
    placement = RankMapping(cluster, layout, placement.slots, "by hand")
    refuse_unreachable(placement, classify(placement), transfers(as_v, layout))


def report_and_text(name: str, vpp: int) -> tuple[TopologyReport, str]:
    values = preset("cluster", "dgx_h100")
    cluster = ClusterConfig(**values | {"nodes": 4})
    config = Config(cluster=cluster, tp=8, pp=4, vpp=vpp)
    config.schedule.name = name
    report = make_report(config, ("tp=8",), {})
    out = io.StringIO()
    write_report(report, [], out)
    return report, out.getvalue()


@pytest.mark.slow
def test_the_report_shows_the_bytes_of_a_pipeline_with_chunks() -> None:
    once, _ = report_and_text("1f1b", 1)
    for name, boundaries in (("interleaved", 3 * 2 + 1), ("zbv", 2 * 3)):
        report, text = report_and_text(name, 2)
        assert f"tp=8 pp=4 vpp=2 dp=1 schedule={name}; " in text
        moved, was = (sum(r.price.dims["pp"].nbytes.values()) for r in (report, once))
        assert moved == pytest.approx(was * boundaries / 3)
        assert sum(report.links["pp"].pairs.values()) == 8 * (4 if name == "interleaved" else 3)


def test_a_layout_needs_at_least_one_loop() -> None:
    with pytest.raises(ValueError, match="loops=0"):
        Layout(pp=2, loops=0)
    assert not Layout(pp=2, loops=2).wraps
