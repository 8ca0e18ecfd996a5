"""Compares FLOPs per token and parameter counts with figures computed by hand or published."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import yaml

from parallel3d.blueprint.parameters import active_parameter_count, parameter_count
from parallel3d.models.flops import flops_per_token, layer_costs
from parallel3d.models.keys import ModelConfig
from parallel3d.run_config import conf_dir


def preset(name: str) -> ModelConfig:
    path: Path = conf_dir() / "model" / f"{name}.yaml"
    return ModelConfig(**yaml.safe_load(path.read_text()))


@pytest.mark.parametrize(
    ("name", "published"),
    [
        ("gpt2_124m", 124_439_808),
        ("llama3_8b", 8_030_261_248),
        ("llama3_70b", 70_553_706_496),
        ("llama_1b", 1_235_814_400),
        ("llama_3b", 3_212_749_824),
        ("llama3_1_8b", 8_030_261_248),
        ("qwen2_5_0_5b", 494_032_768),
        ("qwen3_0_6b", 596_049_920),
        ("qwen3_8b", 8_190_735_360),
        ("qwen3_30b_a3b", 30_532_122_624),
        ("qwen3_235b_a22b", 235_093_634_560),
        # llama.cpp reports 752.39 M, 8.95 B and 34.66 B for the text models.
        ("qwen3_5_0_8b", 752_393_024),
        ("qwen3_5_9b", 8_953_803_264),
        ("qwen3_5_35b_a3b", 34_660_610_688),
        ("mixtral_8x7b", 46_702_792_704),
        ("olmoe_1b_7b", 6_919_161_856),
        ("mistral_7b", 7_241_732_096),
        ("mistral_nemo_12b", 12_247_782_400),
        ("smollm3_3b", 3_075_098_624),
        ("phi4_14b", 14_659_507_200),
        ("phi4_mini", 3_836_021_760),
        ("glm4_9b", 9_400_279_040),
        ("seed_oss_36b", 36_151_104_512),
        ("olmo2_7b", 7_298_617_344),
        ("olmo3_7b", 7_298_011_136),
        ("exaone4_32b", 32_003_216_384),
        ("gemma3_1b", 999_885_952),
        ("gpt_oss_20b", 20_914_757_184),
        ("gpt_oss_120b", 116_829_156_672),
        # The safetensors also count the biases of 61 routers.
        ("dots1", 142_774_381_696 - 61 * 128),
    ],
)
def test_parameter_count_equals_the_published_one(name: str, published: int) -> None:
    assert parameter_count(preset(name)) == published


@pytest.mark.parametrize(
    ("name", "published"),
    [
        ("qwen3_30b_a3b", 3.3),
        ("qwen3_235b_a22b", 22),
        ("qwen3_5_35b_a3b", 3 + 248320 * 2048 / 1e9),  # published without the embedding
        ("mixtral_8x7b", 12.9),
        ("olmoe_1b_7b", 1.3),
        ("dots1", 14),
        ("glm_4_5_air", 12 + 2 * 151552 * 4096 / 1e9),  # published without the two tables
    ],
)
def test_active_parameters_are_the_published_billions(name: str, published: float) -> None:
    assert active_parameter_count(preset(name)) / 1e9 == pytest.approx(published, rel=0.02)


@pytest.mark.parametrize(("name", "published"), [("gpt_oss_20b", 3.61), ("gpt_oss_120b", 5.13)])
def test_active_parameters_of_gpt_oss_are_published_without_the_embedding(
    name: str, published: float
) -> None:
    model = preset(name)
    active = active_parameter_count(model) - model.vocab_size * model.hidden_size
    assert active / 1e9 == pytest.approx(published, rel=1e-3)


def small(**changes: object) -> ModelConfig:
    shape = {
        "name": "small",
        "num_layers": 2,
        "hidden_size": 8,
        "num_attention_heads": 4,
        "ffn_hidden_size": 24,
        "vocab_size": 10,
        "seq_length": 16,
    }
    return ModelConfig(**(shape | changes))


def test_parameter_count_by_hand_for_gpt() -> None:
    layer = 4 * (8 * 8 + 8) + (8 * 24 + 24) + (24 * 8 + 8) + 2 * (8 + 8)
    assert parameter_count(small()) == 2 * layer + 10 * 8 + 16 * 8 + 16


def test_parameter_count_by_hand_for_gqa_swiglu_untied() -> None:
    model = small(
        num_query_groups=2,
        activation="swiglu",
        norm="rmsnorm",
        bias=False,
        position_embedding="rope",
        tie_embeddings=False,
    )
    layer = 8 * 8 + 2 * (8 * 4) + 8 * 8 + 3 * 8 * 24 + 2 * 8
    assert parameter_count(model) == 2 * layer + 2 * 10 * 8 + 8


def test_parameter_count_of_wide_normed_heads_with_projection_biases_equals_a_hand_count() -> None:
    model = small(head_dim=6, num_query_groups=2, qk_norm=True, bias=False, attention_bias="qkv")
    attention = 2 * (8 * 24) + 2 * (8 * 12) + (24 + 2 * 12) + 2 * 6
    layer = attention + 2 * 8 * 24 + 2 * (8 + 8)
    assert parameter_count(model) == 2 * layer + 10 * 8 + 16 * 8 + 16
    every = small(head_dim=6, bias=False, attention_bias="all")
    none = small(head_dim=6, bias=False)
    assert parameter_count(every) - parameter_count(none) == 2 * (3 * 24 + 8)


def test_flops_of_wide_heads_by_hand() -> None:
    forward = 2 * (4 * 8 * 24 + 2 * 8 * 24 + 2 * 16 * 24) + 8 * 10
    assert flops_per_token(small(head_dim=6), 16) == 3 * 2 * forward


def test_swiglu_with_biases_has_a_bias_for_the_gate_too() -> None:
    plain, gated = small(), small(activation="swiglu")
    assert parameter_count(gated) - parameter_count(plain) == 2 * (8 * 24 + 24)


def test_flops_by_hand_per_product() -> None:
    # Multiply-adds of one token, forward: q k v out, up and down, scores and values, head.
    forward = 2 * (4 * 8 * 8 + 2 * 8 * 24 + 2 * 16 * 8) + 8 * 10
    assert flops_per_token(small(), 16) == 3 * 2 * forward


def test_flops_agree_with_narayanan_2021_equation_3() -> None:
    # 96 B s l h² (1 + s/6h + V/16lh): the layers' part has a recomputed forward, 4 passes of which
    # 3 are model FLOPs; the head's part (V/16lh) has none.
    model = preset("megatron_1t")
    layers, hidden, sequence, vocab = 128, 25600, 2048, 51200
    unit = 96 * layers * hidden**2
    in_layers, in_head = 1 + sequence / (6 * hidden), vocab / (16 * layers * hidden)
    expected = unit * (in_layers * 3 / 4 + in_head)
    assert flops_per_token(model, sequence) == pytest.approx(expected, rel=1e-12)


def test_flops_do_not_depend_on_tying_positions_or_padding() -> None:
    base = flops_per_token(small(), 16)
    assert flops_per_token(small(tie_embeddings=False), 16) == base
    assert flops_per_token(small(vocab_multiple=1), 16) == base
    assert flops_per_token(small(max_position_embeddings=4096), 16) == base


def test_only_attention_flops_grow_with_the_sequence() -> None:
    model = small()
    assert flops_per_token(model, 32) - flops_per_token(model, 16) == 12 * 2 * 8 * 16


def test_a_window_counts_the_keys_that_are_seen() -> None:
    """Query i of 64 sees min(i + 1, 10) keys; a window that no sequence fills changes nothing."""
    full = ModelConfig(num_layers=3, hidden_size=32, num_attention_heads=4, seq_length=64)
    pattern = replace(full, layer_types=["sliding", "sliding", "full"], sliding_window=10)
    seen = sum(min(i + 1, 10) for i in range(64)) / 64
    lacking = 2 * 3 * 4 * 32 * (64 - seen)  # two layers, forward and backward, two matmuls
    assert flops_per_token(pattern, 64) == pytest.approx(flops_per_token(full, 64) - lacking)
    wide = replace(pattern, sliding_window=64)
    assert flops_per_token(wide, 64) == flops_per_token(full, 64)
    sliding, *_, whole = layer_costs(pattern)
    assert whole == layer_costs(full)[0]
    assert whole - sliding == pytest.approx(4 * 32 * (64 / 2 - seen))


def test_a_layer_of_gated_deltanet_counts_by_hand() -> None:
    """Counts a layer with the sizes of Qwen3.5-9B, whose rule costs as much whatever the length."""
    model = ModelConfig(
        num_layers=1, hidden_size=4096, num_attention_heads=16, vocab_size=2, vocab_multiple=2,
        layer_types=["gated_deltanet"], delta_key_heads=16, delta_value_heads=32,
        delta_key_size=128, ffn_hidden_size=1, bias=False, position_embedding="none",
    )  # fmt: skip
    keys, values = 16 * 128, 32 * 128
    projections = 4096 * (2 * keys + 2 * values + 2 * 32) + values * 4096
    convolution = 4 * (2 * keys + values)
    others = 2 * 4096 + 2 * 4096  # the MLP and the embedding
    of_norms = 128 + 3 * 2 * 4096
    held = projections + convolution + 2 * 32
    assert parameter_count(model) == held + of_norms + others
    assert held + 128 == pytest.approx(67.4e6, rel=1e-3)
    # With the state: Sᵀk, k ⊗ v, Sᵀq; with 64 tokens: KKᵀ, QKᵀ, a system for V and K, scores · V.
    rule = 32 * 2 * (3 * 128 * 128 + 64 * (128 + 128 + 2 * 128 + 128))
    assert rule == pytest.approx(5.8e6, rel=1e-2)
    forward = 2 * (projections + convolution + others) + rule
    assert flops_per_token(model, 64) == flops_per_token(model, 1 << 20) == 3 * forward
    assert layer_costs(model) == (forward - 2 * 2 * 4096,)
