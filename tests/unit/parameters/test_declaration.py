"""Tests that shapes, shards and sums over tp follow from what a tensor's declaration says."""

from __future__ import annotations

import numpy as np
import pytest

from parallel3d.blueprint.parameters import LocalParameter
from parallel3d.parameters.declaration import (
    Dimension,
    FullTensor,
    Held,
    column_parallel,
    named,
    part_of,
    placed,
    row_parallel,
    vector,
    vocabulary_table,
    within,
)
from parallel3d.parameters.spec import ParameterSpec

HIDDEN = Dimension("hidden", 6)
KEYS = Dimension("keys", 2 * 4, heads=2)
HEAD_NORM = vector("k_norm.weight", Dimension("head", 4), fill=1.0)._replace(of_heads=True)
TENSORS = {
    "column": FullTensor("q.weight", (Dimension("queries", 8 * 4, heads=8), HIDDEN), 0),
    "keys": FullTensor("k.weight", (KEYS, HIDDEN), 0),
    "row": FullTensor("out.weight", (HIDDEN, Dimension("queries", 8 * 4, heads=8)), 1),
    "norm": vector("norm.weight", HIDDEN),
    "norm of heads": HEAD_NORM,
    "table": vocabulary_table("word.weight", 21, 32, HIDDEN, 0.02, replicated=False),
}


@pytest.mark.parametrize("tp", [1, 2, 4, 8])
@pytest.mark.parametrize("tensor", TENSORS.values(), ids=TENSORS.keys())
def test_the_ranks_parts_cover_a_tensor_as_often_as_it_has_copies(
    tensor: FullTensor, tp: int
) -> None:
    seen = np.zeros(tensor.shape, dtype=int)
    for index in range(tp):
        spec = ParameterSpec.of([tensor], tp, index)
        assert spec.shape == tensor.local_shape(tp)
        for shard in spec.shards:
            ends = map(sum, zip(shard.start, shard.shape, strict=True))
            seen[tuple(map(slice, shard.start, ends))] += 1
    assert (seen == tensor.copies(tp)).all()


@pytest.mark.parametrize(
    ("tensor", "copies", "summed", "replicated"),
    [
        ("column", 1, 1, False),
        ("keys", 4, 4, False),  # 8 ranks hold 2 heads
        ("row", 1, 1, False),
        ("norm", 8, 1, True),  # only under sequence parallelism a rank has a part of its gradient
        ("norm of heads", 8, 8, False),
        ("table", 1, 1, False),
    ],
)
def test_sums_over_tp_follow_from_copies_and_from_heads(
    tensor: str, copies: int, summed: int, replicated: bool
) -> None:
    of = TENSORS[tensor]
    assert (of.copies(8), of.summed_over(8), of.is_replicated(8)) == (copies, summed, replicated)
    assert (of.copies(1), of.summed_over(1), of.is_replicated(1)) == (1, 1, True)


def test_the_last_ranks_of_a_table_hold_only_padding() -> None:
    specs = [ParameterSpec.of([TENSORS["table"]], 8, index) for index in range(8)]
    assert [sum(shard.shape[0] for shard in spec.shards) for spec in specs] == [4] * 5 + [1, 0, 0]
    assert all(spec.shape == (4, 6) and spec.decays for spec in specs)


def fused() -> Held:
    matrices = {"q": Dimension("queries", 8, heads=4), "k": Dimension("keys", 4, heads=2)}
    return column_parallel(matrices, HIDDEN, 0.1, bias=True)


def test_matrices_of_one_parameter_are_cut_separately_and_stacked() -> None:
    spec = ParameterSpec.of(fused()["weight"], 4, 3)
    q, k = spec.shards
    assert (q.name, q.start, q.shape, q.row, q.tp_replicas) == ("q.weight", (6, 0), (2, 6), 0, 1)
    assert (k.name, k.start, k.shape, k.row, k.tp_replicas) == ("k.weight", (2, 0), (2, 6), 2, 2)
    assert (q.std, q.muon, spec.decays, spec.replicated) == (0.1, True, True, False)
    bias = ParameterSpec.of(fused()["bias"], 4, 3)
    assert ([s.row for s in bias.shards], bias.shape, bias.decays) == ([0, 2], (4,), False)
    held = LocalParameter.of("qk.weight", fused()["weight"], 4)
    assert (held.numel, held.columns, held.shared, held.owners) == (24, 6, 12, 2)


def test_a_row_parallel_layers_bias_is_whole_on_every_rank() -> None:
    held = row_parallel("out", Dimension("ffn", 8), HIDDEN, 0.1, bias=True)
    weight, bias = (ParameterSpec.of(held[name], 4, 1) for name in ("weight", "bias"))
    assert (weight.shape, weight.shards[0].start) == ((6, 2), (0, 2))
    assert (bias.shape, bias.replicated, bias.decays) == ((6,), True, False)


def test_experts_are_stacked_one_after_another() -> None:
    gate, up = (
        FullTensor(f"experts.{{}}.{part}.weight", (Dimension("ffn", 3), HIDDEN), experts=4)
        for part in ("gate", "up")
    )
    spec = ParameterSpec.of((gate, up), 2, 1, range(2, 4))
    names = [f"experts.{number}.{part}.weight" for number in (2, 3) for part in ("gate", "up")]
    assert [shard.name for shard in spec.shards] == names
    assert [shard.row for shard in spec.shards] == [0, 3, 6, 9]
    assert (spec.shape, spec.is_expert, spec.replicated) == ((12, 6), True, False)
    held = LocalParameter.of("experts.up", (gate, up), 2, 2)
    assert (held.numel, held.expert, held.replicated, held.shared) == (72, True, False, 0)
    assert gate.names == [f"experts.{number}.gate.weight" for number in range(4)]


def test_names_get_the_prefixes_of_their_modules() -> None:
    held = row_parallel("out", Dimension("ffn", 8), HIDDEN, 0.1, bias=False)
    layer = within("layers.3", within("attention", placed("out", held)))
    assert {name: [t.name for t in tensors] for name, tensors in layer.items()} == {
        "layers.3.attention.out.weight": ["layers.3.attention.out.weight"]
    }
    assert part_of(layer, "layers.3.attention.out") == named("layers.3.attention", held)
