"""Tests which pieces of a model `calibrate` times, so that they fit into memory."""

from __future__ import annotations

import dataclasses
import math
import re

import pytest

from parallel3d.blueprint.ops import layer_kinds
from parallel3d.calibrate.pieces import (
    BLOCKS,
    MICRO_BATCHES,
    Extent,
    Pieces,
    extents,
    fitting,
    fitting_on_all,
)
from parallel3d.errors import UserError
from parallel3d.models.declared import LayerKind
from parallel3d.models.keys import ModelConfig
from parallel3d.run_config import Config

DENSE = ModelConfig(num_layers=6, hidden_size=128, num_attention_heads=4, seq_length=256)
# Four kinds of layers; the experts have most of the parameters.
MIXED = dataclasses.replace(
    DENSE, num_layers=8, norm="rmsnorm", bias=False, position_embedding="rope",
    activation="swiglu", layer_types=["sliding", "full"], sliding_window=64, num_experts=4,
    experts_per_token=2, expert_ffn_size=512, dense_layers=[0, 1],
)  # fmt: skip
MODELS = {"dense": DENSE, "mixed": MIXED}


def config(model: ModelConfig = MIXED) -> Config:
    return Config(model=model, global_batch_size=16)


@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("tp", [1, 2])
def test_a_pipeline_of_pieces_has_the_layers_of_its_stages(model: str, tp: int) -> None:
    of = MODELS[model]
    extent, kinds = Extent((1, 2), BLOCKS), layer_kinds(of)
    apart = dataclasses.replace(extent, apart=True)
    again = [
        part for e in (extent, apart) for kind in kinds for part in e.of_recomputation(kind, tp)
    ]
    for pieces in (extent.of_size(2, tp), *(pieces for _, pieces in again)):
        made = pieces.configured(config(of), "cpu")
        for blocks, layers in pieces.stages(of):
            assert 0 < len(layers) <= kinds[blocks.kind]
            heads = blocks.kind.heads // (tp if made.tp == 1 else 1)
            kv_heads = max(1, blocks.kind.kv_heads // (tp if made.tp == 1 else 1))
            kind = blocks.kind._replace(heads=heads, kv_heads=kv_heads)
            assert {LayerKind.of(made.model, layer) for layer in layers} == {kind}
        assert made.model.num_layers == sum(len(layers) for _, layers in pieces.stages(of))


@pytest.mark.parametrize("model", MODELS)
def test_without_limits_everything_is_timed_and_nothing_is_said(model: str) -> None:
    found, said = fitting(config(MODELS[model]), "cuda", 4, math.inf)
    assert found == Extent(MICRO_BATCHES, BLOCKS) and said == ""


@pytest.mark.nightly
@pytest.mark.parametrize("model", MODELS)
def test_the_best_extent_that_fits_is_timed_and_the_rest_is_named(model: str) -> None:
    made = config(MODELS[model])
    every = {extent: max(extent.nbytes(made, "cpu", 2)) for extent in extents(made)}
    whole = next(iter(every))
    assert every[whole] == max(every.values()), "all else needs less"
    seen = set()
    rooms = sorted({*every.values()}, reverse=True)
    for room in (*rooms[: len(rooms) // 2], *rooms[-2:]):
        found, said = fitting(made, "cpu", 2, room)
        assert found == next(extent for extent in every if every[extent] <= room)
        seen.add(found)
        if found == whole:
            continue
        assert f"everything would need {every[whole] / 2**30:.1f} GiB" in said
        assert "\n" not in said
        assert (f"at most {found.blocks} block" in said) == (found.blocks < BLOCKS)
        assert ("of up to 2 samples instead of 16" in said) == (found.sizes == (1, 2))
        assert (f"ep={found.ep} or more" in said) == (found.ep > 1)
    assert {(extent.blocks, extent.apart) for extent in seen} >= {(4, False), (2, False), (1, True)}
    assert len({extent.sizes for extent in seen}) > 1
    assert (max(extent.ep for extent in seen) > 1) == (model == "mixed")


@pytest.mark.parametrize("model", MODELS)
def test_a_model_of_which_no_block_fits_is_refused_with_the_nearest_length(model: str) -> None:
    made = config(MODELS[model])
    *_, least = extents(made)
    needed = max(least.nbytes(made, "cuda", 1))
    with pytest.raises(UserError, match=r"model.seq_length=256 must be smaller .* GiB") as refused:
        fitting(made, "cuda", 1, needed - 1)
    near = re.search(r"the nearest that fits is (\d+)$", str(refused.value))
    assert near and "\n" not in str(refused.value)
    shorter = dataclasses.replace(made.model, seq_length=int(near[1]))
    fitting(dataclasses.replace(made, model=shorter), "cuda", 1, needed - 1)
    with pytest.raises(UserError, match=r"no length fits, so give .*hidden_size$"):
        fitting(made, "cuda", 1, 1e6)


@pytest.mark.parametrize("model", MODELS)
def test_ranks_at_once_hold_fewer_blocks_and_experts_or_are_refused(model: str) -> None:
    made, extent = config(MODELS[model]), Extent((1, 2), blocks=2)
    few = fitting_on_all(made, "cpu", 8, math.inf, extent)
    assert few == Pieces(1, most_blocks=2), "no more blocks than rank 0 can hold"
    alone = dataclasses.replace(few, most_blocks=1)
    room = 8 * alone.nbytes(made, "cpu")
    assert fitting_on_all(made, "cpu", 8, room, extent) == alone
    least = alone
    if made.model.num_experts:
        least = dataclasses.replace(alone, ep=4)
        assert fitting_on_all(made, "cpu", 8, 8 * least.nbytes(made, "cpu"), extent) == least
    room = 5 * least.nbytes(made, "cpu")
    with pytest.raises(UserError, match=r"calibrate.ranks=8 must be at most 4: .*ranks=4$"):
        fitting_on_all(made, "cpu", 8, room, extent)
    assert fitting_on_all(made, "cpu", 4, room, extent).most_blocks == 1


def test_a_rank_that_times_a_larger_ep_holds_less() -> None:
    made, bounds = config(), []
    for ep in (1, 2, 4):
        extent = Extent((1, 2), 1, ep)
        bounds.append(max(extent.nbytes(made, "cpu", 1)))
        assert [*extent.of_experts(MIXED, 1, 2)] == [n for n in (1, 2, 4) if ep <= n <= max(2, ep)]
    assert bounds == sorted(bounds, reverse=True) and bounds[-1] < 0.7 * bounds[0]
