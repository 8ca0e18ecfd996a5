"""Tests that Hugging Face folders compute the same function here and in transformers, both ways."""

from __future__ import annotations

import json
import os
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

os.environ["HF_HUB_OFFLINE"] = "1"  # set before transformers is imported: tests use no network
import transformers

from parallel3d.checkpoint.hf import folder
from parallel3d.checkpoint.hf.folder import export_hf, read_hf_config, tensors_of
from parallel3d.checkpoint.hf.names import HFTensor
from parallel3d.commands.checkpoint import proof
from parallel3d.errors import UserError
from parallel3d.models.declared import full_shapes_of
from parallel3d.models.keys import ModelConfig
from tests.huggingface import GROUPED, fill, logits_of, save_model

pytestmark = pytest.mark.slow

GPT = ModelConfig(
    num_layers=3,
    hidden_size=32,
    num_attention_heads=4,
    seq_length=24,
    vocab_size=61,
    vocab_multiple=8,
    init_std=0.2,
    norm_eps=1e-4,
)
LLAMA = replace(
    GPT,
    norm="rmsnorm",
    position_embedding="rope",
    rotary_base=500.0,
    activation="swiglu",
    bias=False,
    tie_embeddings=False,
    num_query_groups=2,
    ffn_hidden_size=44,
)
SCALED = replace(
    LLAMA,
    rope_scaling_factor=8.0,
    rope_low_freq_factor=1.0,
    rope_high_freq_factor=4.0,
    # With these values, some of four pairs stay, some slow down, and one is in between.
    rope_original_length=64,
)
QWEN3 = replace(LLAMA, qk_norm=True, head_dim=12)
MIXTRAL = replace(LLAMA, num_experts=5, experts_per_token=2)
QWEN3_MOE = replace(QWEN3, num_experts=6, experts_per_token=3, expert_ffn_size=20, dense_layers=[1])
QWEN2_MOE = replace(
    LLAMA,
    attention_bias="qkv",
    num_experts=5,
    experts_per_token=2,
    expert_ffn_size=20,
    shared_expert_size=28,
    shared_expert_gate=True,
    router_normalize=False,
)
OLMOE = replace(
    LLAMA,
    qk_norm=True,
    qk_norm_width="full",
    num_experts=8,
    experts_per_token=3,
    router_normalize=False,
)
SIGMOID = {"router_score": "sigmoid", "router_bias": True}
DOTS1 = replace(
    QWEN3,
    num_experts=8,
    experts_per_token=3,
    expert_ffn_size=20,
    shared_expert_size=40,
    router_scale=2.5,
    dense_layers=[0],
    **SIGMOID,
)
GLM = replace(
    DOTS1,
    qk_norm=False,
    attention_bias="qkv",
    rotary_percent=0.5,
    router_groups=4,
    router_top_groups=2,
    head_dim=16,
)
MINIMAX = replace(
    OLMOE, num_experts=6, router_normalize=True, head_dim=12, rotary_percent=0.5, **SIGMOID
)
MODELS = {
    "gpt2": GPT,
    "gpt2_tanh_positions": replace(GPT, activation="gelu_tanh", max_position_embeddings=30),
    "gpt2_untied_relu": replace(GPT, tie_embeddings=False, activation="relu", ffn_hidden_size=40),
    "llama": LLAMA,
    "llama_tied_bias": replace(LLAMA, tie_embeddings=True, bias=True, num_query_groups=None),
    "llama_wide_heads": replace(LLAMA, head_dim=12, attention_bias="all"),
    "llama_3_1": SCALED,
    "qwen2": replace(LLAMA, attention_bias="qkv"),
    "qwen2_tied_wide_scaled": replace(
        SCALED, attention_bias="qkv", head_dim=12, tie_embeddings=True
    ),
    "qwen3": QWEN3,
    "qwen3_tied_bias": replace(QWEN3, tie_embeddings=True, attention_bias="all"),
    "mixtral": MIXTRAL,
    "mixtral_wide_heads": replace(MIXTRAL, head_dim=12, expert_ffn_size=20),
    "qwen3_moe": QWEN3_MOE,
    "qwen3_moe_tied_scaled": replace(
        QWEN3_MOE, tie_embeddings=True, rope_scaling_factor=8.0, rope_original_length=64
    ),
    "qwen2_moe": QWEN2_MOE,
    "olmoe": OLMOE,
    "olmoe_one_key_head": replace(OLMOE, num_query_groups=1, attention_bias="all"),
    "dots1": DOTS1,
    "dots1_groups": replace(DOTS1, router_groups=4, router_top_groups=2, router_normalize=False),
    "glm4_moe": GLM,
    "glm4_moe_norms": replace(GLM, qk_norm=True, attention_bias="none"),
    "minimax_m2": MINIMAX,
}


def random_weights(model: ModelConfig) -> dict[str, Tensor]:
    """Makes every tensor random, also norms and biases: a wrong tensor shows in the logits."""
    generator = torch.Generator().manual_seed(7)
    return {
        name: torch.randn(shape, generator=generator) * 0.2 + ("norm.weight" in name)
        for name, shape in full_shapes_of(model).items()
    }


def our_logits(model: ModelConfig, weights: dict[str, Tensor], tokens: Tensor) -> Tensor:
    """Returns (b, s, vocab_size) of our own layers on one rank."""
    stage = proof.blank_model(model)
    fill(stage, weights)
    with torch.no_grad():
        return logits_of(stage, model, tokens)


def imported(folder: Path) -> tuple[ModelConfig, dict[str, Tensor]]:
    """Returns our model of a Hugging Face folder, and its tensors."""
    found = read_hf_config(folder)
    model = replace(ModelConfig(), **found.keys)
    return model, dict(tensors_of(folder, model, found.kind))


def their_logits(folder: Path, tokens: Tensor) -> Tensor:
    theirs, found = transformers.AutoModelForCausalLM.from_pretrained(
        folder, output_loading_info=True, attn_implementation="eager"
    )
    assert not any(found[kind] for kind in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    with torch.no_grad():
        return theirs.eval()(tokens).logits


def some_tokens(model: ModelConfig) -> Tensor:
    generator = torch.Generator().manual_seed(3)
    return torch.randint(0, model.vocab_size, (2, model.seq_length), generator=generator)


def export(model: ModelConfig, folder: Path, **changes: object) -> dict[str, Tensor]:
    weights = random_weights(model)
    settings = {"dtype": "fp32", "end_of_text": 60} | changes
    export_hf(model, lambda names: {n: weights[n] for n in names}, folder, **settings)
    return weights


@pytest.mark.parametrize("name", MODELS)
def test_exported_model_has_our_logits_in_transformers(name: str, tmp_path: Path) -> None:
    model = MODELS[name]
    weights = export(model, tmp_path / "hf")
    tokens = some_tokens(model)
    ours = our_logits(model, weights, tokens)
    assert ours.std() > 0.3
    torch.testing.assert_close(their_logits(tmp_path / "hf", tokens), ours, rtol=0, atol=1e-5)


THEIRS = {
    "llama": {"model_type": "llama", **GROUPED},
    "llama_tied": {
        "model_type": "llama",
        "tie_word_embeddings": True,
        "rope_parameters": {"rope_type": "default", "rope_theta": 700.0},
    },
    "llama_3_1": {
        "model_type": "llama",
        "rope_scaling": {
            "rope_type": "llama3",
            "factor": 8.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 64,
        },
        "rope_theta": 500.0,
        **GROUPED,
    },
    "llama_bias_in_attention": {
        "model_type": "llama",
        "attention_bias": True,
        "head_dim": 12,
        **GROUPED,
    },
    "qwen2": {"model_type": "qwen2", "sliding_window": 8, **GROUPED},
    "qwen3": {"model_type": "qwen3", "head_dim": 12, **GROUPED},
    "qwen3_tied": {"model_type": "qwen3", "tie_word_embeddings": True, **GROUPED},
    "gpt2": {"model_type": "gpt2"},  # gelu_new, as published
    "gpt2_exact_gelu": {"model_type": "gpt2", "activation_function": "gelu", "n_inner": 40},
}


@pytest.mark.parametrize("name", THEIRS)
def test_imported_model_has_the_logits_of_transformers(name: str, tmp_path: Path) -> None:
    ends = {"bos_token_id": 60, "eos_token_id": 60}
    sizes = {"hidden_size": 32, "max_position_embeddings": 24} | ends | THEIRS[name]
    theirs = save_model(tmp_path, sizes.pop("model_type"), **sizes)

    model, weights = imported(tmp_path)
    assert {n: tuple(t.shape) for n, t in weights.items()} == full_shapes_of(model)
    tokens = some_tokens(model)
    ours = our_logits(model, weights, tokens)
    with torch.no_grad():
        expected = theirs.eval()(tokens).logits
    assert expected.std() > 0.3
    torch.testing.assert_close(ours, expected, rtol=0, atol=1e-5)


def test_large_models_go_into_several_files(tmp_path: Path) -> None:
    weights = export(LLAMA, tmp_path / "hf", shard_bytes=20_000)
    index = json.loads((tmp_path / "hf" / "model.safetensors.index.json").read_text())
    files = sorted((tmp_path / "hf").glob("*.safetensors"))
    assert len(files) > 2
    assert files[0].name == f"model-00001-of-{len(files):05d}.safetensors"
    assert set(index["weight_map"].values()) == {f.name for f in files}
    assert index["metadata"]["total_size"] == sum(t.numel() * 4 for t in weights.values())
    assert all(sum(t.nbytes for t in load_file(f).values()) <= 20_000 for f in files)
    back = dict(tensors_of(tmp_path / "hf", LLAMA, "llama"))
    assert all(torch.equal(back[name], weights[name]) for name in weights)
    tokens = some_tokens(LLAMA)
    ours = our_logits(LLAMA, weights, tokens)
    torch.testing.assert_close(their_logits(tmp_path / "hf", tokens), ours, rtol=0, atol=1e-5)


def test_bf16_files_hold_the_rounded_weights(tmp_path: Path) -> None:
    weights = export(GPT, tmp_path / "hf", dtype="bf16")
    held = dict(tensors_of(tmp_path / "hf", GPT, "gpt2"))
    assert all(torch.equal(held[n], weights[n].bfloat16()) for n in weights)
    config = json.loads((tmp_path / "hf" / "config.json").read_text())
    assert config["dtype"] == config["torch_dtype"] == "bfloat16"


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_nan_and_inf_weights_are_not_exported(value: float, tmp_path: Path) -> None:
    weights = random_weights(GPT)
    weights["layers.1.attention.v.bias"][3] = value
    with pytest.raises(UserError, match=r"transformer\.h\.1\.attn\.c_attn\.bias holds NaN or inf"):
        export_hf(
            GPT, lambda n: {k: weights[k] for k in n}, tmp_path / "hf", dtype="fp32", end_of_text=60
        )
    assert list(tmp_path.iterdir()) == []


def test_names_without_prefix_and_masks_are_understood(tmp_path: Path) -> None:
    """Saves a folder like the first published GPT-2."""
    weights = export(GPT, tmp_path / "hf")
    file = tmp_path / "hf" / "model.safetensors"
    bare = {k.removeprefix("transformer."): t for k, t in load_file(file).items()}
    bare["h.0.attn.bias"] = torch.ones(1, 1, 4, 4)
    save_file(bare, file)
    back = dict(tensors_of(tmp_path / "hf", GPT, "gpt2"))
    assert all(torch.equal(back[name], weights[name]) for name in weights)


def test_a_folder_that_does_not_fit_its_config_is_refused_before_any_tensor_is_read(
    tmp_path: Path,
) -> None:
    folder = tmp_path / "hf"
    export(LLAMA, folder)
    file = folder / "model.safetensors"
    good = load_file(file)
    name = "model.layers.1.self_attn.k_proj.weight"

    def refused(changes: dict[str, Tensor | None]) -> str:
        content = {k: t for k, t in (good | changes).items() if t is not None}
        save_file(content, file)
        with pytest.raises(UserError) as error:
            next(tensors_of(folder, LLAMA, "llama"))
        return str(error.value)

    assert name in refused({name: None})
    assert "(16, 32)" in refused({name: torch.zeros(32, 32)})
    assert "I64" in refused({name: torch.zeros(16, 32, dtype=torch.int64)})
    assert "rotary.extra" in refused({"rotary.extra": torch.zeros(2)})
    file.write_bytes(file.read_bytes()[:-100])
    with pytest.raises(UserError, match=r"model\.safetensors cannot be read"):
        next(tensors_of(folder, LLAMA, "llama"))
    file.rename(folder / "pytorch_model.bin")
    with pytest.raises(UserError, match="is a pickle"):
        next(tensors_of(folder, LLAMA, "llama"))


def test_export_never_overwrites_a_folder_and_leaves_no_partial_one(tmp_path: Path) -> None:
    export(GPT, tmp_path / "hf")
    before = {p.name: p.read_bytes() for p in (tmp_path / "hf").iterdir()}
    with pytest.raises(UserError, match="not an empty folder"):
        export(GPT, tmp_path / "hf", dtype="bf16")
    assert {p.name: p.read_bytes() for p in (tmp_path / "hf").iterdir()} == before
    (tmp_path / "file").write_text("")
    with pytest.raises(UserError, match="cannot be written"):
        export(GPT, tmp_path / "file" / "hf")
    assert sorted(p.name for p in tmp_path.iterdir()) == ["file", "hf"]


@pytest.mark.parametrize("kind", ["llama", "mixtral"])
def test_square_matrices_that_are_read_transposed_change_the_logits(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Shapes do not distinguish a square matrix from its transpose, but logits do."""
    sizes = {"hidden_size": 32, "intermediate_size": 32, "max_position_embeddings": 24}
    save_model(tmp_path, kind, **GROUPED | sizes)
    model, weights = imported(tmp_path)
    tokens = some_tokens(model)
    ours = our_logits(model, weights, tokens)
    sound = folder.hf_tensors

    def transposed(model: ModelConfig, kind: str) -> list[HFTensor]:
        return [
            replace(tensor, transposed=len({*tensor.shape}) == 1 < len(tensor.shape))
            for tensor in sound(model, kind)
        ]

    monkeypatch.setattr(folder, "hf_tensors", transposed)
    _, changed = imported(tmp_path)
    square = [name for name, weight in changed.items() if not torch.equal(weight, weights[name])]
    assert any(".mlp." in name for name in square)
    assert any(".attention." in name for name in square)
    for part in (".attention.", ".mlp."):
        some = {name: changed[name] for name in square if part in name}
        off = our_logits(model, weights | some, tokens) - ours
        assert off.abs().max() > 100 * 1e-5  # far above the tolerance of the other tests
