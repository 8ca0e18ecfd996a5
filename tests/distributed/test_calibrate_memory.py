"""Tests the memory of the pieces that `calibrate` times against that of the simulated device."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from parallel3d.blueprint.ops import layer_kinds
from parallel3d.calibrate.measure import ModelPieces
from parallel3d.calibrate.pieces import Extent, Pieces
from parallel3d.models.keys import ModelConfig
from parallel3d.run_config import Config
from tests.distributed.simulated import SimulatedPool, here

pytestmark = pytest.mark.more

MODEL = ModelConfig(
    num_layers=4, hidden_size=128, num_attention_heads=4, seq_length=128, vocab_size=512,
    norm="rmsnorm", bias=False, position_embedding="rope", activation="swiglu",
)  # fmt: skip
MIXED = dataclasses.replace(
    MODEL, layer_types=["sliding", "full"], sliding_window=32, num_experts=8, experts_per_token=2,
    expert_ffn_size=128, dense_layers=[0, 1],
)  # fmt: skip
EXTENT = Extent((1, 2), 2)
CASES = {
    "dense": (MODEL, EXTENT.of_size(2, 1)),
    "dense, tp=2": (MODEL, EXTENT.of_size(2, 2)),
    "experts": (MIXED, EXTENT.of_size(2, 1)),
    "experts, tp=2": (MIXED, EXTENT.of_size(2, 2)),
    "experts, ep=4": (MIXED, dataclasses.replace(EXTENT, ep=4).of_size(2, 1)),
    "recomputation": (MODEL, EXTENT.of_recomputation(next(iter(layer_kinds(MODEL))), 1)[0][1]),
    "recomputation of experts": (
        MIXED,
        EXTENT.of_recomputation([*layer_kinds(MIXED)][-1], 1)[0][1],
    ),
}


def peak(model: ModelConfig, pieces: Pieces) -> tuple[float, float]:
    """Returns the bytes that pieces need on this rank's device, and their bound."""
    config = Config(device="simulated", model=model, global_batch_size=16)
    api = torch.get_device_module(here())
    api.reset_peak_memory_stats()
    before = api.memory_allocated()
    with ModelPieces(config, pieces, here()) as held:
        held.run()
        held.run()
        most = api.max_memory_allocated() - before
    return most, pieces.nbytes(config, "simulated")


@pytest.mark.parametrize("case", CASES)
def test_the_bound_of_the_pieces_is_just_above_their_peak(
    case: str, simulated: SimulatedPool
) -> None:
    most, bound = simulated.run(1, peak, *CASES[case])[0]
    assert 0.97 * most < bound < 1.12 * most, (most, bound)
