"""Tests folders of vision models: their text model is trained, and the rest comes back."""

from __future__ import annotations

import json
import os
import re
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

os.environ["HF_HUB_OFFLINE"] = "1"  # set before transformers is imported: tests use no network
import transformers

from parallel3d.checkpoint.hf.folder import read_hf_config
from parallel3d.checkpoint.hf.kept import keep_keys
from parallel3d.checkpoint.hf.names import is_of_text
from parallel3d.checkpoint.init_from import find_source
from parallel3d.checkpoint.runs import KEPT_FOLDER
from parallel3d.commands.checkpoint.command import checkpoint
from parallel3d.data.keys import DataConfig
from parallel3d.errors import UserError
from tests.huggingface import DIALECTS, EXPERTS, SIZES, save_model

pytestmark = pytest.mark.nightly

TEXT = {"hidden_size": 32, "max_position_embeddings": 24, "pad_token_id": None}
TEXT |= {"bos_token_id": 60, "eos_token_id": 60}
VISION = {
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "image_size": 28,
    "patch_size": 14,
}
_QWEN_VISION = {
    "depth": 1,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_heads": 2,
    "patch_size": 4,
    "out_hidden_size": 32,
    "num_position_embeddings": 16,
}
_QWEN_TOKENS = {
    "image_token_id": 59,
    "video_token_id": 58,
    "vision_start_token_id": 57,
    "vision_end_token_id": 56,
}
# The model_type of the whole model, its text part in `DIALECTS` or `EXPERTS`, and its other keys.
WHOLES: dict[str, tuple[str, str, dict[str, Any]]] = {
    "gemma3": (
        "gemma3",
        "gemma3_text",
        {"mm_tokens_per_image": 4, "vision_config": VISION, "image_token_index": 59},
    ),
    "mistral3": (
        "mistral3",
        "mistral",
        {
            "vision_config": VISION | {"model_type": "pixtral", "head_dim": 8},
            "tie_word_embeddings": False,
            "image_token_index": 59,
        },
    ),
    "mistral3_of_ministral3": (
        "mistral3",
        "ministral3",
        {
            "vision_config": VISION | {"model_type": "pixtral", "head_dim": 8},
            "tie_word_embeddings": True,
            "image_token_index": 59,
        },
    ),
    "llava": (
        "llava",
        "llama_yarn_geglu",
        {
            "vision_config": VISION | {"model_type": "clip_vision_model"},
            "image_token_index": 59,
        },
    ),
    "qwen3_5": (
        "qwen3_5",
        "qwen3_5",
        {"vision_config": _QWEN_VISION, "tie_word_embeddings": True, **_QWEN_TOKENS},
    ),
    "qwen3_5_moe": (
        "qwen3_5_moe",
        "qwen3_5_moe_text",
        {"vision_config": _QWEN_VISION, "tie_word_embeddings": False, **_QWEN_TOKENS},
    ),
}
# Name of a projector's or a merger's tensor.
PROJECTOR = re.compile(r"(model\.)?(multi_modal_projector|visual\.merger)\.")


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    # The default takes seconds on a busy disk.
    monkeypatch.setattr(os, "fsync", lambda descriptor: None)


def make(name: str) -> torch.nn.Module:
    """Makes a folder `hf` like transformers, with files of a processor."""
    kind, text, more = WHOLES[name]
    text_kind, changes = DIALECTS[text] if text in DIALECTS else (text, EXPERTS[text])
    inner = {"model_type": text_kind, **SIZES, **TEXT, **changes}
    config = transformers.AutoConfig.for_model(kind, text_config=inner, **more)
    torch.manual_seed(5)
    model = transformers.AutoModelForImageTextToText.from_config(config)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.1 * torch.randn_like(parameter))
    model.save_pretrained("hf")
    Path("hf/preprocessor_config.json").write_text('{"size":  {"height": 28}}\n')
    Path("hf/chat_template.json").write_text('{"chat_template": "{{ messages }}"}')
    return model


def tensors_in(folder: str) -> dict[str, torch.Tensor]:
    found: dict[str, torch.Tensor] = {}
    for file in sorted(Path(folder).glob("*.safetensors")):
        found |= load_file(file)
    return found


def same_bits(mine: torch.Tensor, theirs: torch.Tensor) -> bool:
    bits = (tensor.view(torch.uint8) for tensor in (mine, theirs))
    return mine.dtype == theirs.dtype and torch.equal(*bits)


@pytest.mark.parametrize("name", WHOLES)
def test_an_export_is_the_imported_folder_even_if_that_is_gone(
    name: str, capsys: pytest.CaptureFixture[str]
) -> None:
    theirs = make(name)
    kind, _, _ = WHOLES[name]
    before = tensors_in("hf")
    odd = next(key for key in before if PROJECTOR.match(key))
    before[odd] = before[odd].to(torch.bfloat16)  # other dtypes keep their bytes, too
    save_file(before, "hf/model.safetensors", metadata={"format": "pt"})
    config = json.loads(Path("hf/config.json").read_text())
    assert checkpoint(["import", "from=hf", "run=t"]) == 0
    said = capsys.readouterr().err
    assert "proven: the logits of " in said
    assert "its text model is trained" in said
    shutil.rmtree("hf")
    assert checkpoint(["export", "run=t", "to=out"]) == 0

    after = tensors_in("out")
    assert after.keys() == before.keys()
    assert all(same_bits(after[key], before[key]) for key in before)
    written = json.loads(Path("out/config.json").read_text())
    assert written["model_type"] == kind
    for key in config.keys() - {"text_config"}:
        assert written[key] == config[key], key
    assert Path("out/preprocessor_config.json").read_text() == '{"size":  {"height": 28}}\n'
    assert Path("out/chat_template.json").is_file()

    again, found = transformers.AutoModelForImageTextToText.from_pretrained(
        "out", output_loading_info=True, dtype=torch.float32
    )
    assert type(again) is type(theirs)
    assert not any(found[kind] for kind in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    tokens = torch.randint(0, 50, (2, 24), generator=torch.Generator().manual_seed(3))
    with torch.no_grad():
        torch.testing.assert_close(
            again.eval()(tokens).logits, theirs.eval()(tokens).logits, rtol=0, atol=1e-6
        )


def test_both_layouts_of_names_are_read_and_written() -> None:
    make("mistral3")
    old = tensors_in("hf")
    new = {}
    for key, tensor in old.items():
        inner = key.removeprefix("language_model.")
        if inner.startswith("model."):
            new[f"model.language_model.{inner.removeprefix('model.')}"] = tensor
        else:
            new[inner if inner != key else f"model.{key}"] = tensor
    save_file(new, "hf/model.safetensors", metadata={"format": "pt"})
    assert checkpoint(["import", "from=hf", "run=t"]) == 0
    assert checkpoint(["export", "run=t", "to=out", "dtype=bf16"]) == 0
    after = tensors_in("out")
    assert after.keys() == new.keys()
    for key, tensor in after.items():
        assert tensor.dtype == (torch.bfloat16 if is_of_text(key) else torch.float32)
    index = json.loads(Path("out/model.safetensors.index.json").read_text())
    assert index["weight_map"].keys() == new.keys()
    assert index["metadata"]["total_size"] == sum(t.nbytes for t in after.values())


@pytest.mark.parametrize("name", ["gemma3", "mistral3", "llava"])
def test_a_text_model_alone_under_the_config_of_a_vision_model_is_proven(
    name: str, capsys: pytest.CaptureFixture[str]
) -> None:
    theirs = make(name)
    alone = {
        key.replace("language_model.model.", "model.").removeprefix("language_model."): tensor
        for key, tensor in tensors_in("hf").items()
        if is_of_text(key)
    }
    assert any(key.startswith("model.layers.0.") for key in alone)
    save_file(alone, "hf/model.safetensors", metadata={"format": "pt"})
    assert checkpoint(["import", "from=hf", "run=t"]) == 0
    said = capsys.readouterr().err
    assert "config.json describes a vision model, but the weights" in said
    assert "proven: the logits of " in said
    assert checkpoint(["export", "run=t", "to=out"]) == 0
    assert tensors_in("out").keys() == alone.keys() - (
        {"lm_head.weight"} if theirs.config.get_text_config().tie_word_embeddings else set()
    )
    again = transformers.AutoModelForCausalLM.from_pretrained("out", dtype=torch.float32)
    tokens = torch.randint(0, 50, (2, 24), generator=torch.Generator().manual_seed(3))
    with torch.no_grad():
        torch.testing.assert_close(
            again.eval()(tokens).logits, theirs.eval()(tokens).logits, rtol=0, atol=1e-5
        )


def test_keys_beside_text_config_that_nothing_reads_are_listed(
    capsys: pytest.CaptureFixture[str],
) -> None:
    for name in ("gemma3", "llava", "mistral3"):
        shutil.rmtree("hf", ignore_errors=True)
        make(name)
        path = Path("hf/config.json")
        if name == "llava":  # keys that its class in transformers 4.36 wrote
            older = {"ignore_index": -100, "vocab_size": 61}
            path.write_text(json.dumps(json.loads(path.read_text()) | older))
        assert read_hf_config(Path("hf")).unread == {}
    config = json.loads(path.read_text()) | {"unsloth_version": "2026.1"}
    path.write_text(json.dumps(config | {"is_causal": False}))
    with pytest.raises(UserError, match=r"may be is_causal=false, unsloth_version=2026\.1"):
        checkpoint(["import", "from=hf", "run=t"])
    path.write_text(json.dumps(config))
    assert checkpoint(["import", "from=hf", "run=t"]) == 0
    said = capsys.readouterr().err
    assert "unsloth_version=2026.1 in config.json, which parallel3d does not read" in said


def test_what_lies_beside_the_text_model_follows_the_run(
    capsys: pytest.CaptureFixture[str],
) -> None:
    make("mistral3")
    assert checkpoint(["import", "from=hf", "run=t"]) == 0
    assert checkpoint(["ls"]) == 0
    assert checkpoint(["verify", "run=t"]) == 0
    assert checkpoint(["branch", "from=t", "run=u"]) == 0
    for begun, source in (("v", "t"), ("w", "hf")):  # a start with init_from does the same
        Path("runs", begun).mkdir()
        found = find_source(source, Path("runs"))
        keep_keys(found, DataConfig(), 61, Path("runs", begun))
    for name in ("others.safetensors", "config.json", "preprocessor_config.json"):
        kept = {Path("runs", run, KEPT_FOLDER, name).read_bytes() for run in "tuvw"}
        assert len(kept) == 1
    assert checkpoint(["export", "run=u", "to=out"]) == 0
    assert tensors_in("out").keys() == tensors_in("hf").keys()


def test_a_text_part_in_fp8_is_read_and_an_export_is_not_quantized(
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Reads the published form of Ministral 3: one scale for each tensor, and one for inputs."""
    make("mistral3_of_ministral3")
    before = tensors_in("hf")
    stored, plain = dict(before), {key: tensor.float() for key, tensor in before.items()}
    texts = [key for key in before if is_of_text(key) and key.endswith("_proj.weight")]
    for number, key in enumerate(texts):
        scale = torch.tensor(0.01 + 0.003 * number)
        stored[key] = (before[key] * 32).to(torch.float8_e4m3fn)
        stored[f"{key}_scale_inv"] = scale
        stored[key.removesuffix("weight") + "activation_scale"] = torch.tensor(3.0)
        plain[key] = stored[key].float() * scale
    save_file(stored, "hf/model.safetensors", metadata={"format": "pt"})
    about = {"quant_method": "fp8", "activation_scheme": "static", "weight_block_size": None}
    about |= {"modules_to_not_convert": ["model.vision_tower", "lm_head"], "dequantize": False}
    path = Path("hf/config.json")
    config = json.loads(path.read_text())
    path.write_text(json.dumps(config | {"quantization_config": about}))
    assert checkpoint(["import", "from=hf", "run=t"]) == 0
    assert "proven: the logits" in capsys.readouterr().err
    assert checkpoint(["export", "run=t", "to=out", "dtype=fp32"]) == 0
    assert "quantization_config" not in Path("out/config.json").read_text()
    back = tensors_in("out")
    assert back.keys() == plain.keys()
    assert all(torch.equal(back[key].float(), plain[key]) for key in plain)
    whole = transformers.AutoModelForImageTextToText.from_pretrained("out")
    assert whole.config.text_config.model_type == "ministral3"

    image = next(key for key in before if not is_of_text(key))
    stored[image] = before[image].to(torch.float8_e4m3fn)
    save_file(stored, "hf/model.safetensors", metadata={"format": "pt"})
    with pytest.raises(
        UserError, match="is quantized, but only the tensors of the text model may be"
    ):
        checkpoint(["import", "from=hf", "run=u"])
    assert not Path("runs/u").exists()


def test_tensors_and_keys_of_a_text_part_are_checked(tmp_path: Path) -> None:
    make("mistral3")
    tensors = tensors_in("hf")
    tensors["language_model.model.layers.0.self_attn.sinks"] = torch.ones(4)
    save_file(tensors, "hf/model.safetensors", metadata={"format": "pt"})
    with pytest.raises(UserError, match=r"no place for the tensor language_model\.model\.lay"):
        checkpoint(["import", "from=hf", "run=t"])
    del tensors["language_model.model.layers.0.self_attn.sinks"]
    save_file(tensors, "hf/model.safetensors", metadata={"format": "pt"})
    Path("hf/preprocessor_config.json").write_text("root:x:0:0")
    with pytest.raises(UserError, match="outside of the text model cannot be kept"):
        checkpoint(["import", "from=hf", "run=t"])
    assert not Path("runs/t").exists()
    path = Path("hf/config.json")
    config = json.loads(path.read_text())
    for changes, said in (
        ({"quantization_config": {"bits": 4}}, "quantization_config.quant_method=null"),
        ({"text_config": None}, "model_type=mistral3 without text_config"),
        ({"text_config": {"model_type": "t5"}}, "model_type=t5"),
        (
            {"text_config": {"model_type": "granite", "logits_scaling": 8.0}},
            "text_config has logits_scaling=8.0, which our model cannot express",
        ),
        (
            {"model_type": "gemma3", "text_config": {"final_logit_softcapping": 30.0}},
            "text_config has final_logit_softcapping=30.0",
        ),
        (
            {"model_type": "idefics3"},
            "or gemma3, mistral3, llava, qwen3_5 or qwen3_5_moe with one of these",
        ),
    ):
        path.write_text(json.dumps(config | changes))
        with pytest.raises(UserError, match=said.replace(".", r"\.")):
            read_hf_config(Path("hf"))
    path.write_text(
        json.dumps(config | {"text_config": config["text_config"] | {"logit_scale": 2.0}})
    )
    assert read_hf_config(Path("hf")).unread == {"logit_scale": 2.0}


def test_the_older_names_of_tensors_are_refused_for_qwen3_5() -> None:
    """transformers reads them as missing, so that it begins with random weights."""
    make("qwen3_5")
    older = {
        key.replace("model.language_model.", "language_model.model."): tensor
        for key, tensor in tensors_in("hf").items()
    }
    save_file(older, "hf/model.safetensors", metadata={"format": "pt"})
    with pytest.raises(UserError, match=r"there is no tensor model\.embed_tokens\.weight"):
        checkpoint(["import", "from=hf", "run=t"])


MTP = {
    "mtp.fc.weight": torch.arange(12.0).view(3, 4).to(torch.bfloat16),
    "mtp.layers.0.mlp.gate.weight": torch.arange(6.0).sin(),
    "mtp.norm.weight": torch.full((5,), -0.0),
}
SECTIONS = {"mrope_section": [1, 1, 0], "mrope_interleaved": True}


@pytest.mark.parametrize("name", ["qwen3_5", "qwen3_5_moe"])
def test_keys_and_tensors_of_multi_token_prediction_and_images_come_back(
    name: str, capsys: pytest.CaptureFixture[str]
) -> None:
    make(name)
    before = tensors_in("hf") | MTP
    save_file(before, "hf/model.safetensors", metadata={"format": "pt"})
    path = Path("hf/config.json")
    config = json.loads(path.read_text())
    text = config["text_config"]
    text["rope_parameters"] |= SECTIONS
    kept = {"mtp_num_hidden_layers": 1, "mtp_use_dedicated_embeddings": False}
    # Keys that only other readers have, with the values of all published folders.
    kept |= {"attn_output_gate": True, "output_gate_type": "swish", "mamba_ssm_dtype": "float32"}
    text |= kept | {"full_attention_interval": 4}
    path.write_text(json.dumps(config))
    assert checkpoint(["import", "from=hf", "run=t"]) == 0
    [line] = [line for line in capsys.readouterr().err.splitlines() if "proven" in line]
    assert line.startswith("parallel3d: proven: the logits of") and "in config.json" not in line
    shutil.rmtree("hf")
    assert checkpoint(["export", "run=t", "to=out"]) == 0
    after = tensors_in("out")
    assert after.keys() == before.keys()
    assert all(same_bits(after[key], before[key]) for key in before)
    written = json.loads(Path("out/config.json").read_text())["text_config"]
    assert {key: written[key] for key in kept} == kept
    assert {key: written["rope_parameters"][key] for key in SECTIONS} == SECTIONS


def test_a_text_model_alone_keeps_its_tensors_of_multi_token_prediction(
    capsys: pytest.CaptureFixture[str],
) -> None:
    save_model(Path("hf"), "qwen3_next", **SIZES | TEXT | EXPERTS["qwen3_next"])
    before = tensors_in("hf") | MTP
    save_file(before, "hf/model.safetensors", metadata={"format": "pt"})
    assert checkpoint(["import", "from=hf", "run=t"]) == 0
    said = capsys.readouterr().err
    assert "proven: the logits of " in said
    assert "the tensors mtp.* are not trained, and an export writes them back" in said
    shutil.rmtree("hf")
    assert checkpoint(["export", "run=t", "to=out"]) == 0
    after = tensors_in("out")
    assert after.keys() == before.keys()
    assert all(same_bits(after[key], before[key]) for key in before)
    assert checkpoint(["import", "from=out", "run=again"]) == 0


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"attn_output_gate": False}, "attn_output_gate=false"),
        ({"output_gate_type": "sigmoid"}, "output_gate_type=sigmoid"),
        ({"mamba_ssm_dtype": "bfloat16"}, "mamba_ssm_dtype=bfloat16"),
        ({"mtp_num_hidden_layers": "1"}, "mtp_num_hidden_layers=1"),
        ({"rope_parameters": {"mrope_section": [1, 1]}}, "mrope_section=[1,1]"),
        ({"rope_parameters": {"mrope_interleaved": False}}, "mrope_interleaved=false"),
        ({"layer_types": ["linear_attention", "sliding_attention"] * 2}, "sliding_attention"),
        ({"layer_types": ["linear_attention"] * 3}, "layer_types for 3 layers"),
        ({"linear_num_value_heads": 3}, "linear_num_value_heads=3"),
        ({"linear_conv_kernel_dim": 0}, "linear_conv_kernel_dim=0"),
        ({"hidden_act": "gelu"}, "hidden_act=gelu"),
    ],
)
def test_values_that_would_be_another_model_are_refused_by_their_key(
    changes: dict[str, Any], said: str
) -> None:
    make("qwen3_5")
    path = Path("hf/config.json")
    config = json.loads(path.read_text())
    path.write_text(json.dumps(config | {"text_config": config["text_config"] | changes}))
    with pytest.raises(UserError) as refused:
        checkpoint(["import", "from=hf", "run=t"])
    assert said in str(refused.value)
    assert not Path("runs/t").exists()
