"""Tests the copies of runs of elements over all ranks of a layout."""

from __future__ import annotations

from collections import defaultdict

import pytest

from parallel3d.blueprint.layout import Layout
from parallel3d.comm.group import SINGLE, Group
from parallel3d.comm.process_groups import ProcessGroups
from parallel3d.parameters.copies import Copies, CopyGroups, copy_groups
from parallel3d.parameters.spec import ParameterSpec, ShardSpec

LAYOUT = Layout(tp=4, pp=2, dp=3)


def groups_of_rank(rank: int) -> ProcessGroups:
    """Returns the groups of a rank, none of which can communicate."""
    found = {}
    for kind, dim in {"tp": "tp", "pp": "pp", "dp_cp": "dp"}.items():
        ranks = tuple(LAYOUT.group_of(rank, dim))
        found[kind] = Group(kind, ranks, ranks.index(rank), None)
    ends = tuple(found["pp"].ranks[i] for i in (0, -1))
    found["embedding"] = Group("embedding", ends, ends.index(rank), None)
    return ProcessGroups(LAYOUT, rank, **found)


def shard(rows: int, start: int, copies: int = 1) -> ShardSpec:
    return ShardSpec("x", (8, 4), (start, 0), (rows, 4), tp_replicas=copies)


def split(tp: int) -> ParameterSpec:
    return ParameterSpec((2, 4), (shard(2, 2 * tp),), replicated=False)


def replicated(tp: int) -> ParameterSpec:
    return ParameterSpec((8, 4), (shard(8, 0),), replicated=True)


def heads_of_two(tp: int) -> ParameterSpec:
    return ParameterSpec((4, 4), (shard(4, tp // 2 * 4, 2),), replicated=False)


def norm_of_heads(tp: int) -> ParameterSpec:
    return ParameterSpec((8, 4), (shard(8, 0, 4),), replicated=False)


def padded(tp: int) -> ParameterSpec:
    """Returns a table of eight rows over four ranks of four rows: the last two only hold
    padding."""
    return ParameterSpec((4, 4), (shard(4, 4 * tp),) if tp < 2 else (), replicated=False)


@pytest.mark.parametrize(
    ("spec_of", "is_tied", "holders"),
    [
        (split, False, 3),
        (split, True, 6),
        (replicated, False, 12),
        (replicated, True, 24),
        (heads_of_two, False, 6),
        (norm_of_heads, False, 12),
    ],
)
def test_each_copy_has_its_own_number_and_one_is_the_first(
    spec_of: object, is_tied: bool, holders: int
) -> None:
    found: dict[object, list[Copies]] = defaultdict(list)
    for rank in range(LAYOUT.world_size):
        place, spec = LAYOUT.coordinates(rank), spec_of(LAYOUT.coordinates(rank).tp)
        if is_tied:
            spec = ParameterSpec(spec.shape, spec.shards, spec.replicated, tied=True)
        (piece,) = spec.shards
        stage = None if is_tied else place.pp  # other stages hold other parameters
        held = copy_groups(spec, groups_of_rank(rank))
        found[piece.start, stage].append(held.of(spec, piece))
    for copies in found.values():
        assert {c.count for c in copies} == {holders}
        assert sorted(c.index for c in copies) == list(range(holders))
        assert sum(c.is_first for c in copies) == 1


def test_sharded_parameters_have_no_copies_over_dp() -> None:
    tp = Group("tp", (0, 1), 1, None)
    assert CopyGroups(SINGLE, tp).of(split(1), shard(2, 2)) == Copies(0, 1)
    assert CopyGroups(SINGLE, tp).of(replicated(1), shard(8, 0)) == Copies(1, 2)


def test_a_run_ends_where_copies_change_and_includes_padding() -> None:
    spec = ParameterSpec(
        (6, 4),
        (shard(2, 2), ShardSpec("y", (2, 4), (0, 0), (2, 4), row=2, tp_replicas=2)),
        replicated=False,
    )
    held = CopyGroups(Group("dp", (0, 2), 1, None), Group("tp", (2, 3), 0, None))
    runs = list(held.runs(spec, 4, 20))
    assert runs == [(Copies(1, 2), 0, 4), (Copies(2, 4), 4, 20)]


@pytest.mark.parametrize(
    ("spec_of", "over_tp"),
    [(split, 0), (replicated, 1), (heads_of_two, 0), (norm_of_heads, 1), (padded, 0)],
)
def test_all_ranks_of_a_group_agree_that_each_holds_the_whole_parameter(
    spec_of: object, over_tp: bool
) -> None:
    """A rank whose rows of a table are only padding takes part: the check for drift compares over
    tp."""
    for rank in range(LAYOUT.world_size):
        groups, spec = groups_of_rank(rank), spec_of(LAYOUT.coordinates(rank).tp)
        found = [group.name for group in copy_groups(spec, groups).of_whole(spec)]
        assert ("tp" in found) == over_tp
        assert found[0] == "dp_cp"
        assert "embedding" not in found
