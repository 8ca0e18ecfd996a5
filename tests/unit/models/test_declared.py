"""Tests that modules hold what they declare: the same parameters, in the same order, everywhere."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from parallel3d.blueprint.blueprint import StageBlueprint
from parallel3d.blueprint.parameters import stage_parameters, tensors_by_parameter
from parallel3d.comm.group import Group
from parallel3d.models.declared import (
    full_shapes_of,
    full_tensors,
    parameter_shapes_of,
    states_of,
)
from parallel3d.models.keys import ModelConfig
from parallel3d.models.layers import BuildContext
from parallel3d.models.transformer import Stage
from parallel3d.parameters.initializer import Initializer
from parallel3d.parameters.state import spec_of
from tests.reference.model import ReferenceModel

SIZES: dict[str, Any] = {
    "num_layers": 3, "hidden_size": 32, "num_attention_heads": 4, "vocab_size": 61,
    "vocab_multiple": 8,
}  # fmt: skip
GPT: dict[str, Any] = {}
QWEN3: dict[str, Any] = {
    "norm": "rmsnorm", "position_embedding": "rope", "activation": "swiglu", "qk_norm": True,
    "attention_bias": "qkv", "tie_embeddings": False, "num_query_groups": 2,
}  # fmt: skip
EXPERTS = QWEN3 | {
    "num_experts": 8, "experts_per_token": 2, "expert_ffn_size": 24, "dense_layers": [1],
    "shared_expert_size": 16, "shared_expert_gate": True, "bias": False, "router_bias": True,
}  # fmt: skip
DELTA = QWEN3 | {
    "layer_types": ["gated_deltanet", "full"], "delta_key_heads": 2, "delta_value_heads": 8,
    "delta_key_size": 6, "delta_value_size": 10, "delta_convolution": 3,
}  # fmt: skip
MODELS = {
    "gpt": GPT,
    "replicated": GPT | {"embedding": "replicated", "norm_position": "both"},
    "qwen3": QWEN3,
    "gated attention": QWEN3 | {"attention_gate": True, "attention_bias": "qkv"},
    "attention sinks": QWEN3 | {"attention_sinks": True, "attention_gate": True},
    "full norms": QWEN3 | {"qk_norm_width": "full", "norm_position": "after"},
    "experts": EXPERTS,
    "biased experts": EXPERTS | {"expert_bias": True, "router_logit_bias": True},
    "gated deltanet": DELTA,
}


def stage_of(model: ModelConfig, tp: int, index: int, ep: int) -> Stage:
    """Returns the whole model as one rank of `tp` holds it, with its experts over `ep` ranks."""
    group = Group("tp", tuple(range(tp)), index, None)
    experts = Group("ep", tuple(range(ep)), min(1, ep - 1), None)
    init = Initializer(1, torch.float32, torch.device("meta"))
    held = StageBlueprint.plain(range(model.num_layers), first=True, last=True)
    return Stage(model, held, BuildContext(init, group, sp=tp > 1, ep=experts))


@pytest.mark.parametrize("tp", [1, 2, 4])
@pytest.mark.parametrize("keys", MODELS.values(), ids=MODELS.keys())
def test_a_rank_holds_the_parameters_that_are_declared_in_their_order(
    keys: dict[str, Any], tp: int
) -> None:
    model = ModelConfig(**SIZES | keys)
    ep, tensors = 4 if model.num_experts else 1, tensors_by_parameter(model)
    whole = stage_parameters(model, tp, range(model.num_layers), True, True, ep=ep)
    for index in range(tp):
        built = list(stage_of(model, tp, index, ep).named_parameters())
        assert [(p.name, p.numel) for p in whole] == [(n, p.numel()) for n, p in built]
        for local, (name, parameter) in zip(whole, built, strict=True):
            spec = spec_of(parameter)
            assert local.columns == (parameter.shape[1] if parameter.dim() > 1 else 1), name
            assert {shard.name for shard in spec.shards} <= set(tensors[name])
            assert (local.decays, local.replicated) == (spec.decays, spec.replicated), name
            assert (local.expert, local.muon) == (spec.is_expert, any(s.muon for s in spec.shards))
            shared = [s for s in spec.shards if s.tp_replicas > 1]
            assert local.shared == sum(s.of_local(parameter).numel() for s in shared), name


@pytest.mark.parametrize("keys", MODELS.values(), ids=MODELS.keys())
def test_matrices_decay_and_muon_takes_those_of_layers_but_no_routers(keys: dict[str, Any]) -> None:
    model = ModelConfig(**SIZES | keys)
    shapes, states = full_shapes_of(model), states_of(model)
    decays = {name for t in full_tensors(model) if t.decays for name in t.names}
    matrices = {name for name, shape in shapes.items() if len(shape) == 2}
    assert decays == {name for name in matrices if not name.endswith("_conv.weight")}
    muon = {name for t in full_tensors(model) if t.muon for name in t.names}
    of_layers = {name for name in decays if name.startswith("layers.")}
    assert muon == {name for name in of_layers if not name.endswith(".router.weight")}
    biases = {f"layers.{n}.mlp.router.bias" for n in (0, 2)} if model.router_bias else set()
    assert states == biases
    sinks = {name for name in shapes if name.endswith(".sinks")}
    assert len(sinks) == (model.num_layers if model.attention_sinks else 0)
    rates = {name for name in shapes if name.endswith((".A_log", ".dt_bias", ".o_norm.weight"))}
    assert len(rates) == (6 if "gated_deltanet" in model.layer_types else 0)
    assert {t.name for t in full_tensors(model) if t.wide} == biases | sinks | rates


@pytest.mark.parametrize("keys", MODELS.values(), ids=MODELS.keys())
def test_tensors_have_the_shapes_of_the_reference(keys: dict[str, Any]) -> None:
    sizes = {"seq_length": 12, "max_position_embeddings": 20, "head_dim": 4, "ffn_hidden_size": 40}
    model = ModelConfig(**SIZES | sizes | keys)
    reference = ReferenceModel(model)
    theirs = {name: tuple(p.shape) for name, p in reference.named_parameters()}
    assert parameter_shapes_of(model) == theirs


@pytest.mark.parametrize("keys", MODELS.values(), ids=MODELS.keys())
def test_outputs_into_the_residual_stream_begin_smaller_and_norms_are_the_identity(
    keys: dict[str, Any],
) -> None:
    """Compares with the rules of GPT-2: std / sqrt(2 · layers) for the last matrix of each half."""
    drawn = {"init_std": 0.5, "norm_zero_centered": keys.get("norm") == "rmsnorm"}
    model = ModelConfig(**SIZES | keys | drawn)
    ones = 0.0 if model.norm_zero_centered else 1.0
    for tensor in full_tensors(model):
        name = tensor.name
        if name.endswith("_conv.weight"):  # as torch's Conv1d
            assert tensor.std == pytest.approx(1 / (3 * model.delta_convolution) ** 0.5), name
        elif name.endswith((".A_log", ".dt_bias")):
            assert tensor.drawn is not None, name
        elif len(tensor.shape) == 2:
            shrinks = name.endswith(("attention.out.weight", ".down.weight"))
            assert tensor.std == pytest.approx(0.5 / 6**0.5 if shrinks else 0.5), name
            assert tensor.fill == 0.0
        else:
            is_norm, is_sink = name.endswith("norm.weight"), name.endswith(".sinks")
            fill, std = ones if is_norm else 0.0, 0.5 if is_sink else 0.0
            fill = 1.0 if name.endswith(".o_norm.weight") else fill  # never centred around 0
            assert (tensor.std, tensor.fill) == (std, fill), name


@pytest.mark.parametrize("kind", ["vocab_parallel", "replicated"])
@pytest.mark.parametrize("tied", [True, False])
def test_a_replicated_embedding_is_whole_on_each_rank_and_so_is_only_a_tied_head(
    kind: str, tied: bool
) -> None:
    model = ModelConfig(**SIZES, embedding=kind, tie_embeddings=tied)
    word, table = (
        {p.name: p for p in stage_parameters(model, 4, range(0), first, not first)}[name]
        for first, name in ((True, "embedding.word.weight"), (False, "head.table"))
    )
    whole = kind == "replicated"
    assert (word.numel, word.replicated) == (64 * 32 // (1 if whole else 4), whole)
    whole &= tied
    assert (table.numel, table.replicated) == (64 * 32 // (1 if whole else 4), whole)


@pytest.mark.parametrize(
    ("keys", "norms"),
    [
        (QWEN3, {"q_norm.weight": 4, "k_norm.weight": 4}),
        (MODELS["full norms"], {"k_norm.weight": 2}),
    ],
)
def test_ranks_sum_the_gradients_of_copied_heads_and_of_norms_of_each_head(
    keys: dict[str, Any], norms: dict[str, int]
) -> None:
    """Two of four tp ranks share a key-value head; all of them share a norm of one head."""
    layer = "layers.1.attention."
    found = {t.name: t.summed_over(4) for t in full_tensors(ModelConfig(**SIZES | keys))}
    summed = {name.removeprefix(layer): n for name, n in found.items() if n > 1 and layer in name}
    assert summed == norms | {f"{x}.{part}": 2 for x in "kv" for part in ("weight", "bias")}


def test_ranks_sum_the_gradients_of_copied_key_heads_of_deltanet_and_of_its_norm() -> None:
    """Two of four tp ranks share a key head, with its taps; all of them share the heads' norm."""
    layer = "layers.0.attention."
    found = {t.name: t.summed_over(4) for t in full_tensors(ModelConfig(**SIZES | DELTA))}
    summed = {name.removeprefix(layer): n for name, n in found.items() if n > 1 and layer in name}
    copied = {f"{x}{part}.weight": 2 for x in "qk" for part in ("", "_conv")}
    assert summed == {"o_norm.weight": 4} | copied
