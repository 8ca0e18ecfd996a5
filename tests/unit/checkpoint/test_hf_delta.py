"""Tests the names of gated DeltaNets in Hugging Face folders, and that wrong ones change logits."""

from __future__ import annotations

import itertools
import json
import os
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

os.environ["HF_HUB_OFFLINE"] = "1"  # set before transformers is imported: tests use no network

from parallel3d.checkpoint.hf import families, names
from parallel3d.checkpoint.hf.folder import read_hf_config, tensors_of
from parallel3d.checkpoint.hf.names import hf_tensors
from parallel3d.commands.checkpoint.command import checkpoint
from parallel3d.context_parallel.documents import make_documents
from parallel3d.context_parallel.split import SequenceSplit
from parallel3d.errors import UserError
from parallel3d.models import transformer
from parallel3d.models.keys import ModelConfig
from tests.huggingface import DIALECTS, EXPERTS, SIZES, filled, logits_of, read, save_model

pytestmark = pytest.mark.nightly

MORE = {"hidden_size": 32, "max_position_embeddings": 24, "pad_token_id": None}
MORE |= {"bos_token_id": 60, "eos_token_id": 60}


def make(name: str, folder: Path) -> torch.nn.Module:
    kind, changes = DIALECTS[name] if name in DIALECTS else (name, EXPERTS[name])
    return save_model(folder, kind, **SIZES | MORE | changes)


@pytest.mark.parametrize("name", ["qwen3_next", "qwen3_5", "olmo_hybrid"])
def test_rows_read_alone_are_those_of_the_whole_tensor(name: str, tmp_path: Path) -> None:
    """A rank's rows begin and end anywhere in a head, in a group of heads, and in a cut file."""
    make(name, tmp_path)
    model, full = read(tmp_path)
    kind = read_hf_config(tmp_path).kind
    cuts = ((0, 1), (1, 3), (1, 2), (2, 5), (0, 3))
    for (begin, of), (end, by) in itertools.combinations(cuts, 2):
        wanted = {}
        for key, tensor in full.items():
            first, last = len(tensor) * begin // of, len(tensor) - len(tensor) * end // by
            if first < last:
                wanted[key] = (first, last)
        found = dict(tensors_of(tmp_path, model, kind, wanted=wanted))
        assert found.keys() == wanted.keys()
        for key, (first, last) in wanted.items():
            assert torch.equal(found[key], full[key][first:last]), key


def test_every_row_of_a_file_has_one_place(tmp_path: Path) -> None:
    make("qwen3_next", tmp_path)
    found = read_hf_config(tmp_path)
    for tensor in hf_tensors(ModelConfig(**found.keys), found.kind):
        rows = [
            row
            for part, height in enumerate(tensor.rows)
            for begin, end in tensor.places_of(part, 0, height)
            for row in range(begin, end)
        ]
        assert sorted(rows) == list(range(tensor.shape[0])), tensor.name


def test_rows_of_q_k_v_and_z_follow_each_other_in_each_key_head(tmp_path: Path) -> None:
    make("qwen3_next", tmp_path)
    found = read_hf_config(tmp_path)
    tensors = {t.name: t for t in hf_tensors(ModelConfig(**found.keys), found.kind)}
    joined = tensors["model.layers.0.linear_attn.in_proj_qkvz.weight"]
    # Two key heads of 8, and two value heads of 12 for each.
    where = [list(joined.places_of(part, 0, joined.rows[part])) for part in range(4)]
    assert where == [
        [(0, 8), (64, 72)],
        [(8, 16), (72, 80)],
        [(16, 40), (80, 104)],
        [(40, 64), (104, 128)],
    ]


def wrong_qkvz(monkeypatch: pytest.MonkeyPatch) -> None:
    """All rows of q come first, then all of k, of v and of z."""
    family = families.FAMILIES["qwen3_next"]
    assert family.delta is not None
    ba = frozenset(("linear_attn.in_proj_ba",))
    wrong = replace(family, delta=replace(family.delta, by_head=ba))
    monkeypatch.setitem(families.FAMILIES, "qwen3_next", wrong)


def wrong_ba(monkeypatch: pytest.MonkeyPatch) -> None:
    """All rows of b come before those of a."""
    family = families.FAMILIES["qwen3_next"]
    assert family.delta is not None
    qkvz = frozenset(("linear_attn.in_proj_qkvz",))
    wrong = replace(family, delta=replace(family.delta, by_head=qkvz))
    monkeypatch.setitem(families.FAMILIES, "qwen3_next", wrong)


def a_before_b(monkeypatch: pytest.MonkeyPatch) -> None:
    """In a key head, the rows of a come before those of b."""
    family = families.FAMILIES["qwen3_next"]
    assert family.delta is not None
    modules = family.delta.modules | {"linear_attn.in_proj_ba": "attention.a attention.b"}
    wrong = replace(family, delta=replace(family.delta, modules=modules))
    monkeypatch.setitem(families.FAMILIES, "qwen3_next", wrong)


def all_gates_last(monkeypatch: pytest.MonkeyPatch) -> None:
    """All rows of q come before all those of the gate."""
    sound = names._groups

    def groups(model: ModelConfig, family: Any, name: str) -> int:
        return 1 if "q_proj" in name else sound(model, family, name)

    monkeypatch.setattr(names, "_groups", groups)


def gates_first(monkeypatch: pytest.MonkeyPatch) -> None:
    """In a head, the rows of the gate come before those of q."""
    monkeypatch.setattr(names, "_WITH_GATE", "attention.gate attention.q")


def gate_of_silu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Attention's output is multiplied by SiLU(gate)."""
    sound = transformer.sigmoid_gated
    monkeypatch.setattr(transformer, "sigmoid_gated", lambda y, gate: sound(y, gate) * gate)


def q_after_k(monkeypatch: pytest.MonkeyPatch) -> None:
    """The rows of k come first in in_proj_qkv."""
    family = families.FAMILIES["qwen3_5_text"]
    assert family.delta is not None
    modules = family.delta.modules | {
        "linear_attn.in_proj_qkv": "attention.k attention.q attention.v"
    }
    wrong = replace(family, delta=replace(family.delta, modules=modules))
    monkeypatch.setitem(families.FAMILIES, "qwen3_5_text", wrong)


def usual_eps(monkeypatch: pytest.MonkeyPatch) -> None:
    """The norm of heads has the epsilon of config.json, which OLMo Hybrid does not use there."""
    family = families.FAMILIES["olmo_hybrid"]
    assert family.delta is not None
    wrong = replace(family, delta=replace(family.delta, norm_eps=None))
    monkeypatch.setitem(families.FAMILIES, "olmo_hybrid", wrong)


def no_negative(monkeypatch: pytest.MonkeyPatch) -> None:
    """β is not doubled."""
    family = families.FAMILIES["olmo_hybrid"]
    assert family.delta is not None
    wrong = replace(family, delta=replace(family.delta, negative=None))
    monkeypatch.setitem(families.FAMILIES, "olmo_hybrid", wrong)


MUTANTS = [
    pytest.param(wrong_qkvz, "qwen3_next", id="qkvz-as-q|k|v|z"),
    pytest.param(wrong_ba, "qwen3_next", id="ba-as-b|a"),
    pytest.param(a_before_b, "qwen3_next", id="a-before-b"),
    pytest.param(all_gates_last, "qwen3_5", id="gate-as-q|gate"),
    pytest.param(gates_first, "qwen3_5", id="gate-before-q"),
    pytest.param(gate_of_silu, "qwen3_5", id="gate-as-silu"),
    pytest.param(q_after_k, "qwen3_5", id="k-before-q"),
    pytest.param(usual_eps, "olmo_hybrid", id="eps-of-other-norms"),
    pytest.param(no_negative, "olmo_hybrid", id="beta-not-doubled"),
]


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, tuple[Path, Tensor]]]:
    """Folders of the families, each with the logits of transformers."""
    found = {}
    for name in ("qwen3_next", "qwen3_5", "olmo_hybrid"):
        folder = tmp_path_factory.mktemp(name)
        theirs = make(name, folder)
        with torch.no_grad():
            found[name] = folder, theirs.eval()(tokens()).logits
    yield found


def tokens() -> Tensor:
    return torch.randint(0, 61, (2, 24), generator=torch.Generator().manual_seed(3))


def distance(folder: Path, expected: Tensor) -> float:
    """Returns how far our logits are from the expected ones, relative to the largest."""
    model, weights = read(folder)
    with torch.no_grad():
        found = logits_of(filled(model, weights), model, tokens())
    return float((found - expected).abs().max() / expected.abs().max())


@pytest.mark.parametrize(("mutant", "name"), MUTANTS)
def test_wrong_names_and_keys_change_the_logits(
    mutant: Any,
    name: str,
    folders: dict[str, tuple[Path, Tensor]],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    assert distance(*folders[name]) <= 1e-5
    mutant(monkeypatch)
    assert distance(*folders[name]) > 1e-3


@pytest.mark.parametrize("name", ["qwen3_next", "qwen3_5", "qwen3_5_moe_text", "olmo_hybrid"])
def test_packed_documents_have_the_logits_of_each_alone(name: str, tmp_path: Path) -> None:
    """transformers ignores the bounds of documents in its own form of the rule."""
    theirs = make(name, tmp_path).eval()
    model, weights = read(tmp_path)
    lengths, packed = (9, 4, 11), tokens()[:1]
    starts = np.repeat(np.cumsum((0, *lengths[:-1])), lengths)[None].astype(np.int32)
    documents = make_documents(starts, torch.device("cpu"), SequenceSplit(packed.shape[1]))
    with torch.no_grad():
        found = logits_of(filled(model, weights), model, packed, documents)
        expected = [theirs(document).logits for document in packed.split(lengths, dim=1)]
    joined = torch.cat(expected, dim=1)
    assert float((found - joined).abs().max()) <= 1e-5 * float(joined.abs().max())


def test_norms_in_the_place_of_other_layers_have_no_tensors(
    folders: dict[str, tuple[Path, Tensor]], monkeypatch: pytest.MonkeyPatch
) -> None:
    family = families.FAMILIES["olmo_hybrid"]
    assert family.delta is not None
    wrong = replace(family, delta=replace(family.delta, norms=family.norms))
    monkeypatch.setitem(families.FAMILIES, "olmo_hybrid", wrong)
    with pytest.raises(UserError, match=r"there is no tensor model\.layers\.0\.post_"):
        read(folders["olmo_hybrid"][0])


@pytest.mark.parametrize("how", ["joined", "elsewhere"])
def test_convolutions_are_read_joined_or_cut_elsewhere(how: str, tmp_path: Path) -> None:
    make("olmo_hybrid", tmp_path)
    _, expected = read(tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    parts = [
        [f"model.layers.{n}.linear_attn.{part}_conv1d.weight" for part in "qkv"] for n in (0, 1, 2)
    ]
    for three in parts:
        whole = torch.cat([tensors.pop(name) for name in three])
        if how == "joined":
            tensors[three[0].replace("q_conv1d", "conv1d")] = whole
        else:
            tensors |= dict(zip(three, whole.split((1, 30, len(whole) - 31)), strict=True))
    tensors = {name: tensor.clone() for name, tensor in tensors.items()}
    save_file(tensors, tmp_path / "model.safetensors", metadata={"format": "pt"})
    _, found = read(tmp_path)
    assert all(torch.equal(found[name], expected[name]) for name in expected)


def test_an_export_in_bf16_has_each_tensors_own_type(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Qwen3.5's folders have A_log and the norms of heads in fp32, all else in bf16."""
    monkeypatch.chdir(tmp_path)
    make("qwen3_5", Path("hf"))
    wide = ("linear_attn.A_log", "linear_attn.norm.weight")
    before = {
        name: tensor if name.endswith(wide) else tensor.to(torch.bfloat16)
        for name, tensor in load_file("hf/model.safetensors").items()
    }
    save_file(before, "hf/model.safetensors", metadata={"format": "pt"})
    path = Path("hf/config.json")
    path.write_text(json.dumps(json.loads(path.read_text()) | {"dtype": "bfloat16"}))
    assert checkpoint(["import", "from=hf", "run=t"]) == 0
    assert checkpoint(["export", "run=t", "to=out", "dtype=bf16"]) == 0
    after = load_file("out/model.safetensors")
    assert after.keys() == before.keys()
    for name, tensor in before.items():
        assert after[name].dtype == tensor.dtype and torch.equal(after[name], tensor), name
