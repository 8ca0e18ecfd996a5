"""Tests folders of gpt-oss: bf16 and MXFP4 are one model, and misreadings are found."""

from __future__ import annotations

import json
import os
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

os.environ["HF_HUB_OFFLINE"] = "1"  # set before transformers is imported: tests use no network
from transformers.integrations.mxfp4 import convert_moe_packed_tensors

from parallel3d.checkpoint.hf.config import from_hf, hf_kind
from parallel3d.checkpoint.hf.folder import read_hf_config, tensors_of
from parallel3d.commands.checkpoint.command import checkpoint
from parallel3d.errors import UserError
from parallel3d.models.keys import ModelConfig
from tests.distributed.seams import Mutation, Seam, planted
from tests.huggingface import EXPERTS, SIZES, read, save_model

HALVES = Seam("checkpoint.hf.folder:rows_of_part")
E2M1 = Seam("checkpoint.hf.dequantize:from_mxfp4")
PATTERN = Seam("checkpoint.hf.layers:pattern_of")
MODEL: dict[str, Any] = SIZES | EXPERTS["gpt_oss"] | {
    **{"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2},
    **{"max_position_embeddings": 24, "pad_token_id": None, "bos_token_id": 60, "eos_token_id": 60},
}  # fmt: skip
ABOUT = {"quant_method": "mxfp4", "modules_to_not_convert": ["model.layers.*.self_attn", "lm_head"]}


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(os, "fsync", lambda descriptor: None)


def save() -> dict[str, Tensor]:
    """Saves a folder in bf16, and one in MXFP4 that stands for the same numbers."""
    save_model(Path("hf"), "gpt_oss", **MODEL)
    tensors = {k: v.bfloat16() for k, v in load_file("hf/model.safetensors").items()}
    packed, random = {}, torch.Generator().manual_seed(3)
    for key in [key for key, tensor in tensors.items() if tensor.dim() == 3]:
        count, inputs, outputs = tensors[key].shape
        grid = (count, outputs, inputs // 32)
        blocks = torch.randint(0, 256, (*grid, 16), generator=random, dtype=torch.uint8)
        exponents = torch.randint(122, 126, grid, generator=random, dtype=torch.uint8)
        packed |= {f"{key}_blocks": blocks, f"{key}_scales": exponents}
        theirs = convert_moe_packed_tensors(blocks.clone(), exponents.clone(), dtype=torch.bfloat16)
        tensors[key] = theirs.contiguous()
    config = json.loads(Path("hf/config.json").read_text())
    others = {key: tensor for key, tensor in tensors.items() if tensor.dim() != 3}
    for name, held, more in (
        ("hf", tensors, {}),
        ("packed", others | packed, {"quantization_config": ABOUT}),
    ):
        Path(name).mkdir(exist_ok=True)
        Path(name, "config.json").write_text(json.dumps(config | more))
        save_file(held, Path(name, "model.safetensors"), metadata={"format": "pt"})
    return tensors


@planted(HALVES)
def halves_for_turns(_: Any, whole: Tensor, first: int, parts: int) -> Tensor:
    """Gates are the first half of the rows, and ups the second, as in other families."""
    return whole.chunk(parts)[first]


@planted(E2M1)
def nibbles_swapped(sound: Any, blocks: Tensor, exponents: Tensor) -> Tensor:
    """The first number of a byte is in the high four bits."""
    return sound((blocks << 4) | (blocks >> 4), exponents)


@planted(E2M1)
def bias_of_128(sound: Any, blocks: Tensor, exponents: Tensor) -> Tensor:
    """Exponents have a bias of 128."""
    return sound(blocks, exponents - 1)


@planted(PATTERN)
def full_first(sound: Any, words: list[str]) -> list[str]:
    """The first layer is full, and the second has the window."""
    return sound(words[::-1])


def differs(bug: AbstractContextManager[None]) -> bool:
    """Returns whether the two folders are read as other numbers than those of transformers."""
    with bug:
        weights, packed = read(Path("hf"))[1], read(Path("packed"))[1]
    assert weights.keys() == packed.keys()
    return any(not torch.equal(weights[name].float(), packed[name].float()) for name in weights)


def test_both_forms_are_read_as_the_same_numbers() -> None:
    tensors = save()
    assert not differs(nullcontext())
    model, weights = read(Path("packed"))
    assert (model.expert_bias, model.router_logit_bias, model.swiglu_limit) == (True, True, 0.2)
    assert model.layer_types == ["sliding", "full"] and model.attention_sinks
    for number in (0, 5):
        joined = tensors["model.layers.1.mlp.experts.gate_up_proj"][number]
        expert = f"layers.1.mlp.experts.{number}"
        assert torch.equal(weights[f"{expert}.gate.weight"].bfloat16(), joined[:, 0::2].t())
        assert torch.equal(weights[f"{expert}.up.weight"].bfloat16(), joined[:, 1::2].t())
        biases = tensors["model.layers.1.mlp.experts.gate_up_proj_bias"][number]
        assert torch.equal(weights[f"{expert}.up.bias"], biases[1::2])


@pytest.mark.parametrize("bug", [nibbles_swapped, bias_of_128])
def test_a_bug_of_mxfp4_is_found(bug: Mutation) -> None:
    save()
    assert differs(bug())


@pytest.mark.parametrize("name", ["hf", "packed"])
def test_a_rank_reads_the_rows_of_its_own_experts(name: str) -> None:
    save()
    found = read_hf_config(Path(name))
    model = ModelConfig(**found.keys)
    whole = dict(tensors_of(Path(name), model, found.kind, quantization=found.quantization))
    wanted = {
        "layers.0.mlp.experts.4.up.weight": (3, 50),
        "layers.0.mlp.experts.4.down.weight": (0, 32),
        "layers.1.mlp.experts.5.gate.bias": (1, 64),
        "layers.1.mlp.experts.5.down.bias": (2, 3),
    }
    how = {"wanted": wanted, "quantization": found.quantization}
    rows = dict(tensors_of(Path(name), model, found.kind, **how))
    assert rows.keys() == wanted.keys()
    assert all(torch.equal(rows[key], whole[key][slice(*wanted[key])]) for key in wanted)


@pytest.mark.nightly
@pytest.mark.parametrize("name", ["hf", "packed"])
def test_an_import_is_proven_and_exported_in_bf16_byte_by_byte(
    name: str, capsys: pytest.CaptureFixture[str]
) -> None:
    tensors = save()
    assert checkpoint(["import", f"from={name}", "run=t"]) == 0
    said = capsys.readouterr().err
    assert "proven: the logits" in said
    assert ("quant_method=mxfp4: each 32 weights in a row" in said) == (name == "packed")
    assert checkpoint(["export", "run=t", "to=out", "dtype=bf16"]) == 0
    assert "quantization_config" not in json.loads(Path("out/config.json").read_text())
    exported = load_file("out/model.safetensors")
    assert exported.keys() == tensors.keys()
    for key, tensor in tensors.items():
        assert exported[key].dtype == torch.bfloat16 and torch.equal(exported[key], tensor), key


@pytest.mark.nightly
@pytest.mark.parametrize("bug", [halves_for_turns, full_first])
def test_the_proof_refuses_a_misread_folder(bug: Mutation) -> None:
    save()
    with bug(), pytest.raises(UserError, match="differ from those of transformers"):
        checkpoint(["import", "from=hf", "run=t"])
    assert not Path("runs/t/checkpoints").exists()


def test_other_formulas_are_refused_by_their_keys() -> None:
    config = {"model_type": "gpt_oss"}
    for keys, said in (
        ({"swiglu_alpha": 1.0}, "swiglu_alpha=1.0.* it must be 1.702"),
        ({"swiglu_limit": 0}, "swiglu_limit=0.* it must be above 0"),
        ({"swiglu_limit": None}, "swiglu_limit=null"),
        ({"experts_per_token": 2}, "experts_per_token=2.* it must be 4"),
        ({"layer_types": ["chunked_attention"] * 36}, "layer_types=chunked_attention"),
    ):
        with pytest.raises(UserError, match=said):
            from_hf(config | keys)
    model = ModelConfig(**from_hf(config).keys)
    assert hf_kind(model) == "gpt_oss"
    model.router_logit_bias = False
    with pytest.raises(UserError, match=r"router_logit_bias=false has no counterpart.*gpt-oss"):
        hf_kind(model)
