"""Tests that `checkpoint import` equals transformers or is refused, and that `export` restores the
folder."""

from __future__ import annotations

import dataclasses
import json
import math
import os
import shutil
from importlib.metadata import PackageNotFoundError
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

os.environ["HF_HUB_OFFLINE"] = "1"  # set before transformers is imported: tests use no network
import transformers

from benchmarks.inputs import fuzz_huggingface as fuzz
from parallel3d.checkpoint.hf import folder as hf_folder
from parallel3d.commands.checkpoint import huggingface, proof
from parallel3d.commands.checkpoint.command import checkpoint
from parallel3d.errors import UserError
from tests.huggingface import GROUPED, SIZES, save_model

pytestmark = pytest.mark.nightly

LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
    "rope_theta": 500.0,
}
WIDTHS = SIZES | {"hidden_size": 48, "max_position_embeddings": 64}
HEAD = "lm_head.weight"


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    # The default takes seconds on a busy disk.
    monkeypatch.setattr(os, "fsync", lambda descriptor: None)


def make(kind: str = "llama", **changes: Any) -> dict[str, Tensor]:
    """Makes a folder `hf` like transformers. Returns its tensors."""
    family = {} if kind == "gpt2" else GROUPED
    save_model(Path("hf"), kind, **WIDTHS | family | changes)
    return load_file("hf/model.safetensors")


def save(tensors: dict[str, Tensor], name: str = "model.safetensors") -> None:
    save_file(tensors, f"hf/{name}", metadata={"format": "pt"})


def configure(*gone: str, **changes: Any) -> None:
    """Changes config.json of the folder, and removes the keys `gone`."""
    path = Path("hf/config.json")
    content = json.loads(path.read_text()) | changes
    path.write_text(json.dumps({key: value for key, value in content.items() if key not in gone}))


def logits(folder: str) -> Tensor:
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    with torch.no_grad():
        return model.eval()(torch.arange(2 * 30).view(2, 30)).logits


def there_and_back(*words: str) -> dict[str, Any]:
    """Imports the folder and exports it: transformers must see the same model in both.

    Returns the exported config.json.
    """
    assert checkpoint(["import", "from=hf", "run=t", *words]) == 0
    assert checkpoint(["export", "run=t", "to=out"]) == 0
    expected = logits("hf")
    assert expected.std() > 0.3
    torch.testing.assert_close(logits("out"), expected, rtol=0, atol=1e-4)
    return json.loads(Path("out/config.json").read_text())


def refused(*words: str) -> str:
    """Returns the sentence with which the import is refused; it leaves nothing behind."""
    before = set(Path().rglob("*")) | {Path("runs")}
    with pytest.raises(UserError) as error:
        checkpoint(["import", "from=hf", "run=t", *words])
    assert set(Path().rglob("*")) <= before
    assert "\n" not in str(error.value)
    return str(error.value)


@pytest.mark.parametrize("kind", ["llama", "qwen2", "gpt2"])
def test_a_head_that_differs_from_the_tied_embedding_is_imported(
    kind: str, capsys: pytest.CaptureFixture[str]
) -> None:
    tensors = make(kind, tie_word_embeddings=True)
    save(tensors | {HEAD: torch.randn(61, 48)})
    config = there_and_back()
    assert "imported untied" in capsys.readouterr().err
    assert config["tie_word_embeddings"] is False


@pytest.mark.parametrize("kind", ["llama", "gpt2"])
def test_a_head_that_equals_the_tied_embedding_is_the_embedding(kind: str) -> None:
    tensors = make(kind, tie_word_embeddings=True)
    table = next(t for key, t in tensors.items() if key.endswith(("tokens.weight", "wte.weight")))
    save(tensors | {HEAD: table.clone()})
    assert there_and_back()["tie_word_embeddings"] is True


def test_a_tied_head_of_another_shape_is_refused() -> None:
    tensors = make(tie_word_embeddings=True)
    save(tensors | {HEAD: torch.zeros(62, 48)})
    assert "lm_head.weight has shape (62, 48)" in refused()


@pytest.mark.parametrize("renamed", [True, False])
def test_generic_names_of_gpt2s_sizes_take_precedence(renamed: bool) -> None:
    """No tensor's shape depends on the number of heads: a wrong number would go unnoticed."""
    make("gpt2", tie_word_embeddings=True)
    names = ("n_head", "n_embd", "n_layer", "n_positions") if renamed else ()
    general = ("num_attention_heads", "hidden_size", "num_hidden_layers", "max_position_embeddings")
    configure(*names, **{"n_head": 12} | {name: WIDTHS[name] for name in general})
    assert there_and_back()["n_head"] == 4


def test_a_single_file_takes_precedence_over_an_index() -> None:
    tensors = make()
    save({key: tensor.flip(0) for key, tensor in tensors.items()}, "old.safetensors")
    index = {"metadata": {}, "weight_map": dict.fromkeys(tensors, "old.safetensors")}
    Path("hf/model.safetensors.index.json").write_text(json.dumps(index))
    there_and_back()


def test_non_causal_attention_is_refused() -> None:
    make()
    configure(is_causal=False)
    assert "is_causal=false" in refused()
    configure(is_causal=None)  # transformers reads null as false
    assert "is_causal=null" in refused()
    configure(is_causal=True)
    there_and_back()


def test_the_original_length_at_the_top_level_takes_precedence() -> None:
    make(rope_parameters=dict(LLAMA3))
    configure(original_max_position_embeddings=16)
    there_and_back()


def test_the_original_length_defaults_to_all_positions() -> None:
    make(rope_parameters=dict(LLAMA3), max_position_embeddings=32)
    rope = {key: LLAMA3[key] for key in LLAMA3 if not key.startswith("original")}
    configure(rope_parameters=rope)
    there_and_back()


def test_another_file_that_config_json_names_is_refused() -> None:
    make()
    configure(transformers_weights="other.safetensors")
    assert "config.json has transformers_weights=other.safetensors" in refused()
    configure(transformers_weights=None)
    there_and_back()


def test_values_that_fp16_cannot_hold_are_not_exported() -> None:
    tensors = make()
    tensors["model.norm.weight"][3] = 1e5
    save(tensors)
    assert checkpoint(["import", "from=hf", "run=t"]) == 0
    with pytest.raises(UserError, match=r"model\.norm\.weight holds 100000, which fp16 cannot"):
        checkpoint(["export", "run=t", "to=out", "dtype=fp16"])
    assert sorted(path.name for path in Path().iterdir()) == ["hf", "runs"]
    assert checkpoint(["export", "run=t", "to=out", "dtype=bf16"]) == 0


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
def test_nan_and_inf_weights_are_not_imported(value: float) -> None:
    tensors = make()
    tensors["model.layers.1.mlp.up_proj.weight"][3, 4] = value
    save(tensors)
    assert "model.layers.1.mlp.up_proj.weight holds NaN or inf" in refused()


def test_weights_that_fp32_cannot_hold_are_not_imported() -> None:
    tensors = make()
    tensors[HEAD] = tensors[HEAD].double()
    tensors[HEAD][0, 0] = 1e300
    save(tensors)
    assert "lm_head.weight holds numbers too large for float32" in refused()


@pytest.mark.parametrize("low", [4.0, 5.0])
def test_a_low_frequency_factor_above_the_high_one_is_refused(low: float) -> None:
    make(rope_parameters=dict(LLAMA3))
    configure(rope_parameters=LLAMA3 | {"low_freq_factor": low})
    assert f"rope_type=llama3 with low_freq_factor={low:g}" in refused()


@pytest.mark.parametrize(
    ("kind", "changes", "said"),
    [
        ("llama", {"sliding_window": 4}, "sliding_window=4"),
        ("llama", {"hidden_size": None}, "hidden_size=null"),
        ("llama", {"num_hidden_layers": 2.0}, "num_hidden_layers=2.0"),
        ("llama", {"rms_norm_eps": "1e-6"}, "rms_norm_eps=1e-6"),
        ("llama", {"attention_bias": 0}, "attention_bias=0"),
        ("llama", {"rope_parameters": {"rope_theta": None}}, "rope_theta=null"),
        ("llama", {"rope_parameters": {"rope_theta": "500"}}, "rope_theta=500"),
        ("llama", {"num_attention_heads": 5}, "not a multiple of num_attention_heads=5"),
        ("llama", {"head_dim": 9}, "heads of 9"),
        ("llama", {"layer_types": ["full_attention"]}, "layer_types for 1 layer, but"),
        ("llama", {"eos_token_id": [1, "2"]}, "eos_token_id=[1,2]"),
        ("qwen2", {"head_dim": None}, "head_dim=null"),
        ("gpt2", {"num_attention_heads": None}, "n_head=null"),
    ],
)
def test_a_key_that_is_not_understood_is_refused(
    kind: str, changes: dict[str, Any], said: str
) -> None:
    make(kind, **{"head_dim": 12} if kind == "qwen3" else {})
    configure(**changes)
    assert said in refused()


@pytest.mark.parametrize(
    ("kind", "changes"),
    [
        (
            "llama",
            {"logit_scale": 0.5, "attention_chunk_size": 4, "auto_map": {"AutoModel": "m.M"}},
        ),
        ("llama", {"rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "mscale": 2.0}}),
        ("qwen2", {"attention_bias": False}),
        ("qwen3", {"mlp_bias": True, "norm_topk_prob": True}),
        ("gpt2", {"rope_theta": 500.0, "x" * 400: 1}),
    ],
)
def test_a_key_without_effect_in_transformers_is_imported(
    kind: str, changes: dict[str, Any]
) -> None:
    make(kind, **{"head_dim": 12} if kind == "qwen3" else {})
    configure(**changes)
    there_and_back()


@pytest.mark.parametrize(
    ("changes", "key"),
    [
        ({"per_layer_config": {"0": {"mlp_bias": True}}}, "per_layer_config={"),
        ({"configuration_files": ["config.5.0.0.json"]}, "configuration_files=["),
    ],
)
def test_a_key_that_every_configuration_reads_is_refused_without_a_proof(
    changes: dict[str, Any], key: str
) -> None:
    make()
    configure(**changes)
    assert "cannot load or run it" in refused()
    assert f"config.json has {key}" in refused("prove=false")


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("adapter_config.json", "merge it into the weights with peft"),
        ("shard-00000-model-00001-of-00001.safetensors", "cannot read distributed checkpoints"),
    ],
)
def test_files_that_transformers_would_read_instead_are_refused(name: str, said: str) -> None:
    make()
    Path("hf", name).write_text("{}")
    assert said in refused()


def test_a_comparison_is_reported_with_its_numbers(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Tests an import on a system that does not report its free memory."""
    make()
    monkeypatch.setattr(proof, "available_memory", lambda: math.inf)
    assert checkpoint(["import", "from=hf", "run=t"]) == 0
    said = capsys.readouterr().err
    assert (
        f"proven: the logits of 64 tokens equal those of transformers {transformers.__version__}"
        in said
    )
    assert "Loading weights" not in said


def test_an_import_with_other_logits_fails_and_leaves_nothing_behind(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    make()
    found = hf_folder.read_hf_config(Path("hf"))
    wrong = dataclasses.replace(found, keys=found.keys | {"rotary_base": 400.0})
    monkeypatch.setattr(huggingface, "read_hf_config", lambda folder: wrong)
    sentence = refused()
    assert "the logits of 64 tokens differ" in sentence
    assert "nothing is imported" in sentence
    assert list(Path("runs").iterdir()) == []
    assert checkpoint(["import", "from=hf", "run=t", "prove=false"]) == 0
    assert "not proven: prove=false" in capsys.readouterr().err


def test_keys_that_nothing_reads_are_decided_by_the_comparison(
    capsys: pytest.CaptureFixture[str],
) -> None:
    make()
    configure(unsloth_version="2026.4", mlp_bias=False, residual_multiplier=3.0)
    assert checkpoint(["import", "from=hf", "run=t"]) == 0
    said = capsys.readouterr().err
    assert (
        "unsloth_version=2026.4, residual_multiplier=3.0 in config.json, which parallel3d" in said
    )
    assert "changes none of them" in said
    shutil.rmtree("runs/t")
    configure(is_causal=False)
    sentence = refused()
    assert "the logits of 64 tokens differ" in sentence
    assert "the reason may be is_causal=false, " in sentence
    sentence = refused("prove=false")  # the code of transformers mentions only one of the keys
    assert "config.json has is_causal=false, which" in sentence
    assert "unsloth_version" not in sentence


def test_a_folder_that_transformers_cannot_load_is_imported_only_without_the_comparison() -> None:
    make()
    configure(use_cache="never")
    assert "cannot load or run it" in refused()
    assert checkpoint(["import", "from=hf", "run=t", "prove=false"]) == 0


def gone(name: str) -> str:
    raise PackageNotFoundError(name)


def test_nan_logits_fail_the_comparison() -> None:
    tensors = make()
    for key, tensor in tensors.items():
        if "norm" in key:
            tensor.fill_(1e30)
    save(tensors)
    assert "its logits are not finite" in refused()


@pytest.mark.parametrize("missing", ["transformers", "its version", "memory"])
def test_imports_that_cannot_be_verified_are_reported(
    missing: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    make()
    if missing == "transformers":
        monkeypatch.setattr(proof, "version", gone)
        reason = "transformers is not installed"
    elif missing == "its version":
        monkeypatch.setattr(proof, "version", lambda name: "4.57.1")
        reason = "transformers 4.57.1 is older than 5"
    else:
        monkeypatch.setattr(proof, "available_memory", lambda: 1e5)
        reason = "GB of memory"
    assert reason in refused("prove=true")
    assert checkpoint(["import", "from=hf", "run=t"]) == 0
    said = capsys.readouterr().err
    assert "not proven: " in said and reason in said


def test_no_tokenizer_is_made_up(capsys: pytest.CaptureFixture[str]) -> None:
    make(bos_token_id=7, eos_token_id=8)
    config = there_and_back()
    assert "without a tokenizer" in capsys.readouterr().err
    assert (config["bos_token_id"], config["eos_token_id"]) == (7, 8)
    names = sorted(path.name for path in Path("out").iterdir())
    assert names == ["config.json", "generation_config.json", "model.safetensors"]
    tokens = json.loads(Path("out/generation_config.json").read_text())
    assert tokens == {"bos_token_id": 7, "eos_token_id": 8, "pad_token_id": None}


def test_a_byte_tokenizer_is_used_if_asked_for() -> None:
    make(bos_token_id=7, vocab_size=300)
    config = there_and_back("data.tokenizer=byte")
    assert (config["bos_token_id"], config["eos_token_id"]) == (256, 256)
    assert Path("out/tokenizer.json").is_file()


def test_entries_missing_in_the_source_stay_missing() -> None:
    make()
    configure("bos_token_id", "eos_token_id", "pad_token_id")
    config = there_and_back()
    assert "eos_token_id" not in config
    assert not Path("out/generation_config.json").exists()


def test_padding_and_several_end_tokens_survive_a_round_trip() -> None:
    make(pad_token_id=3, eos_token_id=[8, 9])
    config = there_and_back()
    assert (config["pad_token_id"], config["eos_token_id"]) == (3, [8, 9])


def test_the_models_original_positions_survive_a_round_trip() -> None:
    make(max_position_embeddings=64)
    assert there_and_back("model.seq_length=32")["max_position_embeddings"] == 64


def test_a_tied_table_may_be_stored_as_the_head_only() -> None:
    tensors = make(tie_word_embeddings=True)
    tensors[HEAD] = tensors.pop("model.embed_tokens.weight")
    save(tensors)
    assert there_and_back()["tie_word_embeddings"] is True


@pytest.mark.parametrize("kind", ["qwen2", "qwen3"])
def test_without_a_number_of_key_heads_it_is_that_of_all_heads(kind: str) -> None:
    make(kind, num_key_value_heads=4, **{"head_dim": 12} if kind == "qwen3" else {})
    configure(num_key_value_heads=None)
    assert there_and_back()["num_key_value_heads"] == 4


def test_a_header_of_very_many_tensors_is_refused_before_it_is_read(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    make()
    size = hf_folder.LARGEST_HEADER + 8
    Path("hf/model.safetensors").write_bytes(size.to_bytes(8, "little") + b"{" + bytes(size))
    monkeypatch.setattr(hf_folder, "safe_open", None)
    assert "its header of" in refused()


@pytest.mark.more
def test_random_folders_are_equal_or_refused() -> None:
    """Runs a short form of benchmarks/inputs/fuzz_huggingface.py."""
    found = {}
    for number in range(25):
        case = fuzz.random_case(0, number)
        found[number] = (*fuzz.outcome(case), case.kind, case.changes)
    wrong = {n: how for n, how in found.items() if how[0] in ("DIFFERENT", "CRASH")}
    assert wrong == {}
    assert sum(how[0] == "equal" for how in found.values()) >= 5
