"""Tests that reducing gradients inside domains and then between them equals a single reduction."""

from __future__ import annotations

import pytest
import torch

from parallel3d.blueprint.cluster import Cluster, Link
from parallel3d.blueprint.groups import two_levels
from parallel3d.blueprint.layout import Layout
from parallel3d.blueprint.rank_mapping import RankMapping, Tiling
from parallel3d.comm.process_groups import ProcessGroups
from parallel3d.data_parallel.comm_hooks import HierarchicalAllReduce
from parallel3d.data_parallel.reducer import GradBucket
from tests.distributed.pool import Pool

WIRE = Link(10.0, 1.0)


def placed(layout: Layout, tiling: str = "tp-cp-dp-pp") -> RankMapping:
    """Returns `layout` on nodes of four GPUs, each with a domain and four rails."""
    nodes = layout.world_size // 4
    cluster = Cluster("nodes of four", nodes, 4, 4, 4, WIRE, WIRE, WIRE)
    return RankMapping.tiled(cluster, layout, Tiling.parse(tiling, layout))


def in_two_levels(layout: Layout) -> ProcessGroups:
    levels = two_levels(placed(layout), layout.replica_dim)
    assert levels is not None
    groups = ProcessGroups.create(layout, "cpu", timeout_s=300, levels=levels)
    assert (groups.dp_inner.size, groups.dp_outer.size) == (4 // layout.tp, 2)
    return groups


def test_levels_are_domains_and_rails() -> None:
    inner, outer = two_levels(placed(Layout(tp=2, dp=4)), "dp")
    assert inner == [[0, 2], [4, 6], [1, 3], [5, 7]]  # ranks of one node
    assert outer == [[0, 4], [2, 6], [1, 5], [3, 7]]  # ranks on one rail


@pytest.mark.parametrize(
    ("layout", "tiling"),
    [
        (Layout(tp=4, dp=2), "tp-dp"),  # each domain has one member
        (Layout(dp=4), "dp"),  # all members are in one domain
        (Layout(tp=2, dp=4), "tp2-dp2-dp2-snake"),  # rails in the reverse order in every other node
    ],
    ids=str,
)
def test_without_two_levels_or_with_ranks_across_rails_the_sum_is_flat(
    layout: Layout, tiling: str
) -> None:
    assert two_levels(placed(layout, tiling), "dp") is None


def sums(layouts: list[tuple[Layout, int]]) -> list[bool]:
    """Returns, by layout and elements, whether the sum over the replicas in two levels equals that
    in one, and whether only a shard goes between domains.

    The tensor differs from rank to rank.
    """
    found = []
    for layout, elements in layouts:
        groups = in_two_levels(layout)
        ramp = torch.arange(1.0, elements + 1, dtype=torch.float64)
        tensor = (groups.rank + 1) * ramp
        bucket = GradBucket(0, True, tensor, [])
        started = HierarchicalAllReduce(groups.dp_inner, groups.dp_outer, bucket)
        sent = started.shard.numel()
        started.wait()
        whole = sum(rank + 1 for rank in groups.dp_cp.ranks) * ramp
        found.append(torch.equal(tensor, whole) and sent == elements // groups.dp_inner.size)
        groups.close()
    return found


def test_two_levels_give_the_sum_and_send_only_a_shard_between_domains(pool: Pool) -> None:
    """`matrix` tests that trainings with such sums equal the reference's."""
    layouts = [(Layout(dp=8), elements) for elements in (64, 67, 3)]
    layouts += [(Layout(tp=2, dp=4), 67), (Layout(dp=2, cp=4), 67)]
    assert pool.run(8, sums, layouts) == [[True] * len(layouts)] * 8
