"""Tests that the planner prices what a traced layer does: its products, and the bytes beside."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator

import numpy as np
import pytest

from parallel3d.blueprint.keys import ClusterConfig
from parallel3d.estimate.fitted_cost import StepWork
from parallel3d.estimate.search import (
    LayoutChoice,
    configure,
    constants_of,
    planned,
    sizes_of,
    works,
)
from parallel3d.models.keys import ModelConfig
from parallel3d.run_config import Config
from parallel3d.trace.child import RecordingProcess
from parallel3d.trace.layer_trace import LayerPasses
from parallel3d.trace.wanted import WantedTrace

DENSE = ModelConfig(
    num_layers=2, hidden_size=512, num_attention_heads=8, num_query_groups=4, ffn_hidden_size=2048,
    seq_length=1024, norm="rmsnorm", position_embedding="rope", activation="swiglu", bias=False,
)  # fmt: skip
MODELS = {
    "dense": DENSE,
    "a window": dataclasses.replace(DENSE, layer_types=["sliding"], sliding_window=64),
    "experts": dataclasses.replace(
        DENSE, num_experts=8, experts_per_token=2, expert_ffn_size=256, shared_expert_size=512
    ),
}
SEQUENCES = 2

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def record() -> Iterator[RecordingProcess]:
    made = RecordingProcess()
    yield made
    made.close()


def priced(
    record: RecordingProcess, model: ModelConfig, **keys: object
) -> tuple[StepWork, LayerPasses]:
    """Returns the work of a layer, and what its trace does with the same micro-batch."""
    config = Config(model=model, cluster=ClusterConfig(gpu="h100"), global_batch_size=8)
    config.precision.name = "bf16"
    given = {"tp": 1, "recompute": "none", "ep": 1} | keys
    usual = {"pp": 1, "vpp": 1, "dp": 2, "schedule": "1f1b", "zero": 0}
    choice = LayoutChoice(micro_batch_size=SEQUENCES, **usual | given)  # type: ignore[arg-type]
    (kind,) = works([choice], sizes_of(config) | {"load": 1.0}, 8).by_kind
    blueprint = planned(configure(config, choice))
    wanted = WantedTrace.of(blueprint, model.num_layers - 1, given["recompute"] != "none")
    (trace,) = record([wanted])
    return kind, trace.at(SEQUENCES)


@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("tp", [1, 2])
@pytest.mark.parametrize("recompute", ["none", "[norm,mlp]", "full"])
def test_products_and_what_is_repeated_of_them_are_those_of_a_trace(
    record: RecordingProcess, model: str, tp: int, recompute: str
) -> None:
    work, passes = priced(record, MODELS[model], tp=tp, recompute=recompute)
    flops = [2 * of.rows * of.inputs * of.outputs * work.tokens for of in work.layer_products]
    again = [of.again * each for of, each in zip(work.layer_products, flops, strict=True)]
    assert float(np.ravel(sum(flops))[0]) == pytest.approx(passes.forward.product_flops)
    assert float(np.ravel(sum(again))[0]) == pytest.approx(passes.repeated.product_flops)
    assert passes.backward.product_flops == pytest.approx(2 * passes.forward.product_flops)


def test_other_operations_of_a_dense_layer_move_as_many_bytes_as_in_a_trace(
    record: RecordingProcess,
) -> None:
    work, passes = priced(record, DENSE, recompute="full")
    config = Config(cluster=ClusterConfig(gpu="h100"))
    config.precision.name = "bf16"
    moved = work.moved(constants_of(config))
    for mine, traced in zip(moved, (passes.forward, passes.backward, passes.repeated), strict=True):
        assert float((work.tokens * mine)[0]) == pytest.approx(traced.other_bytes, rel=0.1)
