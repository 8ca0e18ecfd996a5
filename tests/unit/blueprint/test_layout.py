"""Tests rank arithmetic: one group per rank and dimension, orthogonal dimensions, documented
strides."""

from __future__ import annotations

import itertools
import random
import subprocess
import sys

import pytest

from parallel3d.blueprint.layout import DIMENSIONS, Coordinates, Layout

ORDERS = ["-".join(p) for p in itertools.permutations(DIMENSIONS)]


def random_layouts(count: int) -> list[Layout]:
    rng = random.Random(0)
    sizes = [1, 2, 3, 4, 8]
    return [
        Layout(*(rng.choice(sizes) for _ in range(4)), order=rng.choice(ORDERS))
        for _ in range(count)
    ]


@pytest.mark.parametrize("layout", random_layouts(40), ids=str)
def test_groups_partition_the_ranks_and_are_orthogonal(layout: Layout) -> None:
    everyone = list(range(layout.world_size))
    for dim in DIMENSIONS:
        groups = layout.groups(dim)
        assert sorted(itertools.chain(*groups)) == everyone
        assert all(len(g) == layout.size(dim) and g == sorted(g) for g in groups)
    for a, b in itertools.combinations(DIMENSIONS, 2):
        for first, second in itertools.product(layout.groups(a), layout.groups(b)):
            assert len(set(first) & set(second)) <= 1


@pytest.mark.parametrize("layout", random_layouts(40), ids=str)
def test_coordinates_times_strides_are_the_rank(layout: Layout) -> None:
    groups = {dim: set(map(tuple, layout.groups(dim))) for dim in DIMENSIONS}
    for rank in range(layout.world_size):
        place = layout.coordinates(rank)
        assert sum(i * layout.stride(dim) for dim, i in place._asdict().items()) == rank
        for dim in DIMENSIONS:
            group = layout.group_of(rank, dim)
            assert group[getattr(place, dim)] == rank
            assert tuple(group) in groups[dim]


def test_default_order_puts_tp_first_and_pp_last() -> None:
    layout = Layout(tp=2, pp=2, dp=3)
    assert [layout.stride(d) for d in ("tp", "cp", "dp", "pp")] == [1, 2, 2, 6]
    assert layout.groups("tp")[:2] == [[0, 1], [2, 3]]
    assert layout.group_of(3, "dp") == [1, 3, 5]
    assert layout.group_of(3, "pp") == [3, 9]
    assert layout.group_of(3, "tp", "pp") == [2, 3, 8, 9]
    assert layout.coordinates(9) == Coordinates(pp=1, dp=1, cp=0, tp=1)
    assert layout.named(9) == "pp 1, dp 1, tp 1"


def test_ranks_are_named_with_cp_where_there_is_any() -> None:
    layout = Layout(tp=2, cp=2)
    assert [layout.named(rank) for rank in (1, 2)] == [
        "pp 0, dp 0, cp 0, tp 1",
        "pp 0, dp 0, cp 1, tp 0",
    ]


def test_model_and_data_groups_complete_the_world() -> None:
    layout = Layout(tp=2, pp=2, dp=2, cp=2, order="tp-cp-pp-dp")
    for model, data in itertools.product(layout.groups("tp", "pp", "cp"), layout.groups("dp")):
        assert len(set(model) & set(data)) == 1


def test_wrong_sizes_orders_and_ranks_are_refused() -> None:
    with pytest.raises(ValueError, match="tp=0"):
        Layout(tp=0)
    with pytest.raises(ValueError, match="order"):
        Layout(order="tp-dp-pp")
    with pytest.raises(ValueError, match="rank 8"):
        Layout(tp=2, pp=2, dp=2).coordinates(8)


def test_layout_needs_no_torch() -> None:
    code = "import sys, parallel3d.blueprint.layout; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
