"""Tests folders with quantized weights: they are read as the numbers that they stand for."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor

os.environ["HF_HUB_OFFLINE"] = "1"  # set before transformers is imported: tests use no network
from transformers.integrations.finegrained_fp8 import Fp8Dequantize
from transformers.integrations.mxfp4 import convert_moe_packed_tensors

from parallel3d.checkpoint.hf.config import from_hf
from parallel3d.checkpoint.hf.dequantize import dequantized, from_fp8, from_mxfp4
from parallel3d.checkpoint.hf.folder import HFFolder, keep_rest, read_hf_config, tensors_of
from parallel3d.checkpoint.hf.names import hf_tensors
from parallel3d.checkpoint.hf.quantization import Quantization, take_quantization
from parallel3d.commands.checkpoint.command import checkpoint
from parallel3d.errors import UserError
from parallel3d.models.keys import ModelConfig
from tests.huggingface import DIALECTS, EXPERTS, GROUPED, read, save_model

FP8 = torch.float8_e4m3fn
SIZES = {
    **{"hidden_size": 32, "max_position_embeddings": 24},
    **{"pad_token_id": None, "bos_token_id": 60, "eos_token_id": 60},
}
PUBLISHED = {"activation_scheme": "dynamic", "fmt": "e4m3", "quant_method": "fp8"}
FAMILIES = {
    "llama": ("llama", {"mlp_bias": True, **GROUPED}),
    "qwen3": ("qwen3", {"head_dim": 12, **GROUPED}),
    "gpt2": ("gpt2", {}),
    **DIALECTS,
    **{kind: (kind, keys) for kind, keys in EXPERTS.items() if kind != "gpt_oss"},
}
# The parts of a layer that published folders keep in bf16.
KEPT = re.compile(r"norm|embed|wte|wpe|lm_head|\.gate\.|ln_|bias|rotary|conv1d")


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(os, "fsync", lambda descriptor: None)


def some_scales(*shape: int) -> Tensor:
    return torch.rand(shape, generator=torch.Generator().manual_seed(7)) * 0.3 + 0.01


def products(weight: Tensor, scale: Tensor, block: tuple[int, int]) -> Tensor:
    """Multiplies element by element in fp64, where each product is exact, and rounds to fp32."""
    found = torch.empty(weight.shape, dtype=torch.float64)
    for row in range(weight.shape[0]):
        for column in range(weight.shape[1]):
            by = float(scale[row // block[0], column // block[1]].float())
            found[row, column] = float(weight[row, column].float()) * by
    return found.float()


def quantize(
    folder: str, block: tuple[int, int] | None, scale_type: torch.dtype = torch.float32
) -> dict[str, Tensor]:
    """Quantizes the matrices of a folder; returns the numbers that the new tensors stand for."""
    path, config = Path(folder, "model.safetensors"), Path(folder, "config.json")
    tensors = load_file(path)
    plain = dict(tensors)
    for key, tensor in list(tensors.items()):
        if tensor.dim() < 2 or KEPT.search(key):
            continue
        size = block or (max(tensor.shape), max(tensor.shape))
        grid = [-(-length // part) for length, part in zip(tensor.shape, size, strict=True)]
        scale = some_scales(*grid).to(scale_type)
        tensors[key] = (tensor * 4).to(FP8)
        plain[key] = products(tensors[key], scale, size)
        tensors[f"{key}_scale_inv"] = scale if block else scale.reshape(())
        if block is None:
            tensors[f"{key.removesuffix('weight')}activation_scale"] = torch.tensor(0.5)
    assert plain.keys() != tensors.keys()
    save_file(tensors, path, metadata={"format": "pt"})
    about = {"weight_block_size": block and list(block)}
    about |= {} if block else {"activation_scheme": "static"}
    more = {"quantization_config": PUBLISHED | about}
    config.write_text(json.dumps(json.loads(config.read_text()) | more))
    return plain


def write_plain(folder: str, plain: Mapping[str, Tensor]) -> None:
    Path(folder).mkdir()
    config = json.loads(Path("hf/config.json").read_text())
    del config["quantization_config"]
    Path(folder, "config.json").write_text(json.dumps(config))
    save_file(dict(plain), Path(folder, "model.safetensors"), metadata={"format": "pt"})


def all_equal(one: Mapping[str, Tensor], other: Mapping[str, Tensor]) -> bool:
    return one.keys() == other.keys() and all(torch.equal(one[key], other[key]) for key in one)


@pytest.mark.parametrize("scale_type", [torch.float32, torch.bfloat16, torch.float8_e8m0fnu])
def test_fp8_is_multiplied_by_the_scale_of_its_own_block_and_rounded_once(
    scale_type: torch.dtype,
) -> None:
    codes = torch.arange(256, dtype=torch.uint8)
    weight = codes[(codes & 127) != 127].view(FP8)  # all but NaN
    weight = weight[torch.randperm(254, generator=torch.Generator().manual_seed(1))]
    weight = weight[:253].view(11, 23)
    for block in ((4, 8), (3, 23), (128, 128), (1, 1), (11, 5)):
        scale = some_scales(-(-11 // block[0]), -(-23 // block[1])).to(scale_type)
        expected = products(weight, scale, block)
        assert torch.equal(from_fp8(weight, scale, block), expected)
        if (
            11 % scale.shape[0] == 0
            and 23 % scale.shape[1] == 0
            and block[0] * scale.shape[0] == 11
        ):
            theirs = Fp8Dequantize(None)._dequantize_one(weight, scale, torch.float32)
            assert torch.equal(theirs, expected)


def test_rows_are_read_alone_whether_or_not_they_begin_with_a_block() -> None:
    weight = torch.randn(3, 11, 8, generator=torch.Generator().manual_seed(2)).to(FP8)
    scale = some_scales(3, 3, 2)
    save_file({"w": weight, "w_scale_inv": scale}, "a.safetensors")
    with safe_open("a.safetensors", "pt") as file:
        where = dict.fromkeys(("w", "w_scale_inv"), file)
        found = dequantized(Path("hf"), where, Quantization("fp8", (4, 6)))
        assert found.keys() == {"w"}
        whole = torch.stack([products(weight[e], scale[e], (4, 6)) for e in range(3)])
        tensor = found["w"].get_slice("w")
        assert tensor.get_shape() == [3, 11, 8] and torch.equal(tensor.get_tensor("w"), whole)
        for expert in range(3):
            for first in range(11):
                for end in range(first + 1, 12):
                    part = tensor[expert : expert + 1, first:end]
                    assert torch.equal(part[0], whole[expert, first:end])


@pytest.mark.nightly
@pytest.mark.parametrize("name", FAMILIES)
def test_a_folder_in_fp8_is_read_as_the_same_folder_without_quantization(name: str) -> None:
    kind, keys = FAMILIES[name]
    save_model(Path("hf"), kind, **SIZES | keys)
    plain = quantize("hf", (16, 24))
    write_plain("plain", plain)
    model, weights = read(Path("hf"))
    assert (model, True) == (read(Path("plain"))[0], all_equal(weights, read(Path("plain"))[1]))
    stored, kind = read_hf_config(Path("hf")).quantization, read_hf_config(Path("hf")).kind
    for dtype in (torch.bfloat16, torch.float64):  # rounded once, from fp32
        found = dict(tensors_of(Path("hf"), model, kind, dtype=dtype, quantization=stored))
        assert all_equal(found, dict(tensors_of(Path("plain"), model, kind, dtype=dtype)))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "block", "scale_type"),
    [
        ("qwen3_moe", (16, 24), torch.bfloat16),
        pytest.param("ministral3", None, torch.float32, marks=pytest.mark.nightly),
        pytest.param("qwen3", (128, 128), torch.float8_e8m0fnu, marks=pytest.mark.nightly),
    ],
)
def test_an_import_of_fp8_is_proven_and_exported_without_quantization(
    kind: str,
    block: tuple[int, int] | None,
    scale_type: torch.dtype,
    capsys: pytest.CaptureFixture[str],
) -> None:
    kind, keys = FAMILIES[kind]
    save_model(Path("hf"), kind, **SIZES | keys)
    plain = quantize("hf", block, scale_type)
    assert checkpoint(["import", "from=hf", "run=t"]) == 0
    said = capsys.readouterr().err
    assert "proven: the logits of " in said
    where = "tensor" if block is None else f"block of {block[0]} × {block[1]}"
    assert f"quant_method=fp8: each {where} is multiplied by its scale" in said
    assert checkpoint(["export", "run=t", "to=out", "dtype=fp32"]) == 0
    assert "quantization_config" not in json.loads(Path("out/config.json").read_text())
    exported = load_file("out/model.safetensors")
    assert exported.keys() == plain.keys()
    assert all_equal(exported, {key: value.float() for key, value in plain.items()})


def test_layers_of_multi_token_prediction_in_fp8_are_kept_in_bf16() -> None:
    """Published folders of Qwen3-Next, Qwen3.5 and Qwen3.6 in fp8 have them."""
    weight, name = torch.randn(40, 24).to(FP8), "mtp.layers.0.mlp.up_proj.weight"
    scale = some_scales(3, 1)
    as_it_is = {"mtp.norm.weight": torch.arange(5.0), "mtp.fc.weight": torch.ones(2, 3).bfloat16()}
    Path("hf").mkdir()
    tensors = {name: weight, f"{name}_scale_inv": scale, **as_it_is}
    save_file(tensors | {"lm_head.weight": torch.zeros(2, 2)}, "hf/model.safetensors")
    source = HFFolder("qwen3_next", {}, False, {}, quantization=Quantization("fp8", (16, 24)))
    keep_rest(Path("hf"), source, Path("kept"))
    kept = load_file("kept/others.safetensors")
    assert all_equal(kept, {name: products(weight, scale, (16, 24)).bfloat16(), **as_it_is})
    assert kept[name].dtype == torch.bfloat16 and kept["mtp.norm.weight"].dtype == torch.float32


@pytest.mark.parametrize("wrapped", [False, True])
@pytest.mark.parametrize("in_fp8", [False, True])
def test_the_notice_says_that_layers_of_multi_token_prediction_leave_fp8(
    wrapped: bool, in_fp8: bool
) -> None:
    beside = {"mtp.fc.weight": torch.ones(16, 24).bfloat16()}
    if in_fp8:
        beside = {
            "mtp.fc.weight": torch.ones(16, 24).to(FP8),
            "mtp.fc.weight_scale_inv": some_scales(1, 1),
        }
    prefix = "model.language_model" if wrapped else "model"
    tensors = {f"{prefix}.layers.0.mlp.gate.weight": torch.ones(2, 2)} | beside
    text = {"model_type": "qwen3_5_text", "num_hidden_layers": 1}
    about = {"quant_method": "fp8", "weight_block_size": [16, 24]}
    config = {"model_type": "qwen3_5", "text_config": text} if wrapped else text
    Path("hf").mkdir()
    save_file(tensors, "hf/model.safetensors")
    Path("hf/config.json").write_text(json.dumps(config | {"quantization_config": about}))
    found = read_hf_config(Path("hf"))
    said = next(line for line in found.notices if "unchanged" in line)
    assert found.wrapped is wrapped
    assert said.endswith("except that tensors mtp.* in fp8 are written in bf16") is in_fp8
    assert said.endswith("back unchanged") is not in_fp8


def test_a_number_in_fp8_is_refused_by_its_name() -> None:
    there = {"a.weight": torch.ones(()).to(FP8), "a.weight_scale_inv": torch.ones(())}
    save_file(there, "one.safetensors")
    with safe_open("one.safetensors", "pt") as file:
        where = dict.fromkeys(there, file)
        with pytest.raises(
            UserError, match=r"a\.weight in fp8 has shape \(\): it must be a matrix"
        ):
            dequantized(Path("hf"), where, Quantization("fp8"))


@pytest.mark.parametrize("about", [None, {"quant_method": "fp8"}])
@pytest.mark.parametrize("name", ["model.embed_tokens.weight", "lm_head.weight"])
def test_a_weight_in_fp8_without_its_scale_is_refused_by_what_is_missing(
    name: str, about: Any
) -> None:
    """A head to which config.json ties the embedding is of another type than that."""
    config = {"model_type": "llama", "num_hidden_layers": 1, "tie_word_embeddings": True}
    config |= {
        "hidden_size": 32,
        "vocab_size": 61,
        "intermediate_size": 8,
        "num_attention_heads": 4,
    }
    shapes = {t.name: t.shape for t in hf_tensors(ModelConfig(**from_hf(config).keys), "llama")}
    tensors = {key: torch.ones(shape) for key, shape in (shapes | {name: (61, 32)}).items()}
    tensors[name] = tensors[name].to(FP8)
    Path("hf").mkdir()
    save_file(tensors, "hf/model.safetensors")
    Path("hf/config.json").write_text(json.dumps(config | {"quantization_config": about}))
    said = f"{name} is of type F8_E4M3; .* unless {name}_scale_inv lies beside it and quantization_"
    with pytest.raises(UserError, match=said):
        read(Path("hf"))


@pytest.mark.nightly
@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"scale": torch.ones(2, 1)}, r"q_proj.weight_scale_inv has shape \(2, 1\), but .* need"),
        ({"scale": torch.ones(3, 2, dtype=torch.int32)}, "is of type I32.* must be F32 or BF16"),
        ({"scale": torch.full((3, 2), torch.nan)}, "q_proj.weight holds NaN or inf"),
        ({"scale": None}, "q_proj.weight is of type F8_E4M3"),
        ({"weight": torch.ones(48, 32)}, "q_proj.weight is of type F32; with quantization_config"),
        ({"weight": torch.ones(48, 32).to(torch.float8_e5m2)}, "q_proj.weight is of type F8_E5M2"),
        ({"config": None}, "q_proj.weight is of type F8_E4M3"),
        ({"config": {"weight_block_size": [16, 16]}}, "need .* by quantization_config"),
        ({"config": {"weight_block_size": None}}, r"need \(1, 1\) by quantization_config"),
    ],
)
def test_damaged_fp8_is_refused_by_the_tensors_name(changes: dict[str, Any], said: str) -> None:
    kind, keys = FAMILIES["qwen3"]
    save_model(Path("hf"), kind, **SIZES | keys)
    quantize("hf", (16, 24))
    tensors = load_file("hf/model.safetensors")
    key = "model.layers.0.self_attn.q_proj.weight"
    for part, name in (("weight", key), ("scale", f"{key}_scale_inv")):
        if part in changes:
            tensors[name] = changes[part]
    save_file({k: v for k, v in tensors.items() if v is not None}, "hf/model.safetensors")
    config = json.loads(Path("hf/config.json").read_text())
    if "config" in changes:
        own = changes["config"]
        config["quantization_config"] = own and config["quantization_config"] | own
        Path("hf/config.json").write_text(json.dumps(config))
    with pytest.raises(UserError, match=said):
        read(Path("hf"))


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        (
            {"quant_method": "fp9"},
            "quant_method=fp9, which is not read: fp8 in blocks .*nearest is fp8",
        ),
        ({"quant_method": "awq"}, "quant_method=awq, .*nearest is the folder before quantization"),
        ({"quant_method": None}, "quant_method=null"),
        ({"weight_block_size": [128]}, r"weight_block_size=\[128\].*such as \[128,128\]"),
        ({"weight_block_size": [128, True]}, r"weight_block_size=\[128,true\]"),
        ({"weight_block_size": [0, 128]}, r"weight_block_size=\[0,128\]"),
        ({"weight_block_size": [10**5000, 1]}, "numbers from 1 to 1,048,576, such as"),
        ({"activation_scheme": "statik"}, "activation_scheme=statik.*nearest is static"),
        ({"fmt": "e5m2"}, "fmt=e5m2, which is not read: it must be null or e4m3"),
        ({"expert_dtype": "fp4"}, "expert_dtype=fp4"),
        ({"dequantize": 1}, "dequantize=1"),
        (
            {"weight_block_sise": [64, 64]},
            r"weight_block_sise=\[64,64\].*nearest is weight_block_size",
        ),
        ({"modules_to_not_convert": "lm_head"}, "must be a list of names"),
        ({"bits\n": 4}, r"quantization_config\.bits\\n=4"),
        ({"quant_method": "mxfp4"}, "activation_scheme=dynamic, .*of mxfp4, quant_method"),
    ],
)
def test_other_quantization_is_refused_by_its_key(changes: dict[str, Any], said: str) -> None:
    content = PUBLISHED | {"weight_block_size": [128, 128], "ignored_layers": ["lm_head"]}
    assert take_quantization({"quantization_config": content})[1] == Quantization("fp8", (128, 128))
    for config in (
        {"quantization_config": content | changes},
        {"text_config": {"quantization_config": content | changes}},
    ):
        with pytest.raises(UserError, match=said) as refused:
            take_quantization(config, "text_config")
        assert "\n" not in str(refused.value)


def test_the_keys_of_qwen3_5_in_fp8_are_read() -> None:
    """Qwen3.5-35B-A3B-FP8 has these; without blocks, the scale of a tensor needs a null block."""
    about = {"quant_method": "fp8", "activation_scheme": "dynamic", "weight_per_tensor": False}
    about |= {"act_per_tensor": False, "weight_block_size": [128, 128]}
    about |= {"modules_to_not_convert": ["lm_head", "mtp.fc"]}
    assert take_quantization({"quantization_config": about})[1] == Quantization("fp8", (128, 128))
    with pytest.raises(UserError, match="weight_per_tensor=true"):
        take_quantization({"quantization_config": about | {"weight_per_tensor": True}})


def test_every_code_and_exponent_of_mxfp4_is_exact() -> None:
    numbers = [0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6]
    exponents = torch.arange(255, dtype=torch.uint8)
    low, high = torch.arange(16, dtype=torch.uint8), torch.arange(16, dtype=torch.uint8).flip(0)
    blocks = (low | (high << 4)).expand(255, 1, 16)
    found = from_mxfp4(blocks.contiguous(), exponents.view(255, 1))
    assert found.shape == (255, 32) and found.dtype == torch.float32
    for exponent in range(255):
        for code in range(16):
            for place, number in ((2 * code, numbers[code]), (2 * code + 1, numbers[15 - code])):
                value, exact = float(found[exponent, place]), number * 2.0 ** (exponent - 127)
                if abs(exact) >= 2.0**128:
                    exact = exact * float("inf")
                assert value == exact and str(value)[0] == str(exact)[0], (exponent, code)
    held = found[:253]  # the largest, 6 · 2^125, and the smallest, 2^-128, are exact in bf16 too
    assert torch.equal(held.bfloat16().float(), held)
    nothing = from_mxfp4(blocks[:1].contiguous(), torch.tensor([[255]], dtype=torch.uint8))
    assert nothing.isnan().all()


def some_mxfp4(*shape: int) -> tuple[Tensor, Tensor]:
    """Returns random bytes (…, groups, 16) and exponents near 1."""
    random = torch.Generator().manual_seed(3)
    blocks = torch.randint(0, 256, (*shape, 16), generator=random, dtype=torch.uint8)
    return blocks, torch.randint(122, 126, shape, generator=random, dtype=torch.uint8)


def test_mxfp4_is_read_as_transformers_reads_it() -> None:
    blocks, exponents = some_mxfp4(2, 6, 3)
    theirs = convert_moe_packed_tensors(blocks, exponents, dtype=torch.bfloat16)
    assert torch.equal(from_mxfp4(blocks, exponents).bfloat16().transpose(1, 2), theirs)


@pytest.mark.nightly
def test_experts_in_mxfp4_are_read_and_proven(capsys: pytest.CaptureFixture[str]) -> None:
    save_model(
        Path("hf"), "qwen3_moe", **SIZES | EXPERTS["qwen3_moe"] | {"moe_intermediate_size": 32}
    )
    tensors = load_file("hf/model.safetensors")
    tensors = {key: tensor for key, tensor in tensors.items() if ".experts." not in key}
    plain, block = dict(tensors), "model.layers.1.mlp.experts"
    for name, rows in (("gate_up_proj", 64), ("down_proj", 32)):
        blocks, exponents = some_mxfp4(6, rows, 1)
        tensors |= {f"{block}.{name}_blocks": blocks, f"{block}.{name}_scales": exponents}
        plain[f"{block}.{name}"] = from_mxfp4(blocks, exponents)
    save_file(tensors, "hf/model.safetensors", metadata={"format": "pt"})
    path = Path("hf/config.json")
    about = {"quant_method": "mxfp4", "modules_to_not_convert": ["model.layers.*.self_attn"]}
    path.write_text(json.dumps(json.loads(path.read_text()) | {"quantization_config": about}))
    write_plain("plain", plain)
    assert all_equal(read(Path("hf"))[1], read(Path("plain"))[1])
    assert checkpoint(["import", "from=hf", "run=t"]) == 0
    said = capsys.readouterr().err
    assert "proven: the logits" in said and "quant_method=mxfp4: each 32 weights in a row" in said
    tensors[f"{block}.down_proj_scales"] = torch.zeros(6, 32, 2, dtype=torch.uint8)
    save_file(tensors, "hf/model.safetensors", metadata={"format": "pt"})
    with pytest.raises(
        UserError, match=r"down_proj_blocks has shape \(6, 32, 1, 16\) and .*scales"
    ):
        read(Path("hf"))
