"""Tests the facts that follow from `optim.freeze`: names, the first trained layer, trained
shares."""

from __future__ import annotations

import math
from typing import Any

import pytest

from parallel3d.blueprint.parameters import (
    TABLE,
    active_parameter_count,
    first_trained,
    fixed_states,
    frozen_parameters,
    parameter_count,
    stage_parameters,
    tensors_by_parameter,
    trained_shares,
)
from parallel3d.blueprint.rank import PipelineRank, buckets_of
from parallel3d.models.declared import parameter_shapes_of
from parallel3d.models.keys import ModelConfig
from parallel3d.optim.keys import OptimConfig
from parallel3d.resolve import blueprint_of
from parallel3d.run_config import Config

SIZES = {"num_layers": 4, "hidden_size": 32, "num_attention_heads": 4, "vocab_size": 61}
GPT: dict[str, Any] = {}
QWEN3: dict[str, Any] = {
    "norm": "rmsnorm", "position_embedding": "rope", "activation": "swiglu", "qk_norm": True,
    "attention_bias": "qkv", "tie_embeddings": False,
}  # fmt: skip
EXPERTS = QWEN3 | {
    "num_experts": 8, "experts_per_token": 2, "expert_ffn_size": 24, "dense_layers": [1],
    "shared_expert_size": 16, "shared_expert_gate": True, "bias": False, "router_bias": True,
}  # fmt: skip
MODELS = [GPT, QWEN3, QWEN3 | {"qk_norm_width": "full", "tie_embeddings": True}, EXPERTS]


def model_of(keys: dict[str, Any]) -> ModelConfig:
    return ModelConfig(**(SIZES | keys))


@pytest.mark.parametrize("keys", MODELS)
def test_parameters_of_ranks_hold_each_tensor_once(keys: dict[str, Any]) -> None:
    model = model_of(keys)
    held = stage_parameters(model, 1, range(model.num_layers), True, True)
    tensors = tensors_by_parameter(model)
    found = [tensor for parameter in held for tensor in tensors[parameter.name]]
    assert sorted(found) == sorted(parameter_shapes_of(model))
    assert {*tensors} == {parameter.name for parameter in held} | {TABLE}


@pytest.mark.parametrize("keys", MODELS)
def test_parameters_count_once_without_padding_and_active_ones_with_the_chosen_experts(
    keys: dict[str, Any],
) -> None:
    model = model_of(keys)
    shapes = parameter_shapes_of(model)
    assert parameter_count(model) == sum(map(math.prod, shapes.values()))
    unused = {name for n in range(2, 8) for name in shapes if f".experts.{n}." in name}
    active = sum(math.prod(shape) for name, shape in shapes.items() if name not in unused)
    assert active_parameter_count(model) == active


def test_a_state_is_fixed_if_it_is_frozen_or_learns_at_rate_0() -> None:
    model = model_of(EXPERTS)
    states = [f"layers.{n}.mlp.router.bias" for n in (0, 2, 3)]
    groups = {"layers.2.*": {"lr_mult": 0.0}, "layers.3.*": {"lr_mult": 0.5}}
    optim = OptimConfig(freeze=["layers.0.*"], groups=groups)
    assert fixed_states(model, optim) == {*states[:2]}
    assert fixed_states(model, OptimConfig()) == frozenset()


def frozen(keys: dict[str, Any], *patterns: str) -> frozenset[str]:
    return frozen_parameters(model_of(keys), OptimConfig(freeze=list(patterns)))


def test_a_parameter_is_frozen_if_all_its_tensors_are() -> None:
    assert frozen(QWEN3, "layers.0.attention.k.weight", "*.mlp.up.weight") == frozenset()
    fused = {f"layers.{n}.mlp.up.weight" for n in range(4)}
    assert frozen(QWEN3, "*.mlp.up.weight", "*.gate.weight") == fused
    assert frozen(EXPERTS, "layers.0.mlp.experts.[0-6].*") == frozenset()
    experts = {"layers.0.mlp.experts.up", "layers.0.mlp.experts.down"}
    assert frozen(EXPERTS, "layers.0.mlp.experts.*") == experts
    # Both copies of a tied table are frozen.
    assert frozen(GPT, "embedding.word.*") == {"embedding.word.weight", "head.table"}
    assert frozen(QWEN3, "embedding.word.*") == {"embedding.word.weight"}


@pytest.mark.parametrize(
    ("keys", "patterns", "first"),
    [
        (QWEN3, (), -1),
        (QWEN3, ("layers.*",), -1),
        (QWEN3, ("embedding.*",), 0),
        (QWEN3, ("embedding.*", "layers.[01].*", "layers.2.mlp.*"), 2),
        (QWEN3, ("embedding.*", "layers.*"), 4),
        (GPT, ("embedding.position.*", "layers.*"), -1),  # the head is the embedding
    ],
)
def test_the_first_layer_that_is_trained(
    keys: dict[str, Any], patterns: tuple[str, ...], first: int
) -> None:
    assert first_trained(model_of(keys), frozen(keys, *patterns)) == first


def test_stages_before_it_have_no_backward_and_buckets_hold_nothing_frozen() -> None:
    config = Config(pp=4, global_batch_size=4, model=model_of(QWEN3))
    config.optim.freeze = ["embedding.*", "layers.0.*", "layers.1.*", "layers.2.attention.*"]
    config.schedule.layers_per_stage = [1, 1, 1, 1]
    blueprint = blueprint_of(config)
    assert [stage.has_backward for stage in blueprint.stages] == [False, False, True, True]
    assert [stage.without_backward for stage in blueprint.stages] == [1, 1, 0, 0]
    assert blueprint.stages_without_backward == 2
    assert len(blueprint.stages[0].backward.layers) == 0
    for index, rank in enumerate(PipelineRank(blueprint, index) for index in range(4)):
        names = [p.name for bucket in buckets_of(rank) for p in bucket]
        assert sorted(names) == sorted(p.name for p in rank.trained)
        assert bool(names) is (index > 1)
        back = rank.neighbours(-1, with_backward=True), rank.neighbours(1, with_backward=True)
        assert back == (int(index == 3), int(index == 2))
    messages = PipelineRank(blueprint, 1).neighbours(1), PipelineRank(blueprint, 1).neighbours(-1)
    assert messages == (1, 1)


def test_shares_of_a_model() -> None:
    model = model_of(QWEN3)
    assert trained_shares(model, OptimConfig()) == (1.0, 1.0, 1.0, 1.0)
    half = OptimConfig(freeze=["embedding.*", "layers.[01].*"])
    assert trained_shares(model, half) == (0.5, 0.5, 0.0, 1.0)
    head = OptimConfig(freeze=["embedding.*", "layers.*", "final_norm.*"])
    assert trained_shares(model, head) == (0.0, 0.0, 0.0, 1.0)
