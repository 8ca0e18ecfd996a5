"""Tests that config.json files in the style of published fine-tunes are imported with a proof.

Each has keys as tools and versions of transformers write them: unsloth, axolotl, mergekit,
llm-compressor, transformers 4.40 to 5.24. The sizes are those of small models.
"""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest

from parallel3d.commands.checkpoint.command import checkpoint
from parallel3d.errors import UserError
from tests.huggingface import DIALECTS, EXPERTS, GROUPED, LLAMA3, SIZES, YARN, save_model

pytestmark = pytest.mark.nightly

WIDTHS = SIZES | {"hidden_size": 32, "max_position_embeddings": 24, "pad_token_id": None}
# Other form of positions before version 5.
_OLD = {"rope_parameters": None, "rope_theta": 1e4, "rope_scaling": None, "dtype": None}
_UNSLOTH = {"unsloth_fixed": True, "unsloth_version": "2025.9.4"}
_WINDOW = {"use_sliding_window": False, "sliding_window": None, "max_window_layers": 28}
# Keys of the saved model, keys that a tool writes (None removes the saved key), and keys of the
# line that lists what parallel3d does not read.
PUBLISHED: dict[str, tuple[str, dict[str, Any], dict[str, Any], list[str]]] = {
    "llama of unsloth, 4.51": (
        "llama",
        {"rope_parameters": {"rope_theta": 1e4, **LLAMA3}, **GROUPED},
        _OLD
        | {"rope_scaling": LLAMA3, "torch_dtype": "bfloat16", "transformers_version": "4.51.3"}
        | {"_name_or_path": "unsloth/Llama-3.2-1B", "pretraining_tp": 1, **_UNSLOTH},
        ["unsloth_fixed=true", "unsloth_version=2025.9.4"],
    ),
    "qwen2 of axolotl, 4.47": (
        "qwen2",
        GROUPED,
        _OLD
        | {"torch_dtype": "bfloat16", "transformers_version": "4.47.1", "use_cache": False}
        | {"layer_types": None, "_name_or_path": "Qwen/Qwen2.5-0.5B", **_WINDOW},
        [],
    ),
    "mistral of mergekit, 4.40": (
        "mistral",
        {"sliding_window": None, **GROUPED},
        _OLD
        | {"torch_dtype": "float16", "transformers_version": "4.40.2", "use_cache": True}
        | {"_name_or_path": "mistralai/Mistral-7B-v0.1", "mergekit_version": "0.0.4"},
        ["mergekit_version=0.0.4"],
    ),
    "gpt2, 4.40": (
        "gpt2",
        {},
        {"n_ctx": 24, "model_max_length": 24, "output_past": True, "torch_dtype": "float32"}
        | {"task_specific_params": {"text-generation": {"do_sample": True, "max_length": 50}}}
        | {"transformers_version": "4.40.0"},
        ["model_max_length=24"],
    ),
    "qwen3 of unsloth, 4.56": (
        "qwen3",
        {"head_dim": 12, **GROUPED},
        _OLD | {"transformers_version": "4.56.2", "dtype": "bfloat16", **_UNSLOTH, **_WINDOW},
        ["unsloth_version=2025.9.4"],
    ),
    "qwen3_moe of axolotl, 4.55": (
        "qwen3_moe",
        EXPERTS["qwen3_moe"],
        _OLD | {"transformers_version": "4.55.4", "torch_dtype": "bfloat16", **_WINDOW},
        [],
    ),
    "mixtral of mergekit, 4.41": (
        "mixtral",
        EXPERTS["mixtral"],
        _OLD
        | {"transformers_version": "4.41.2", "torch_dtype": "bfloat16", "sliding_window": None}
        | {"router_jitter_noise": 0.0, "output_router_logits": False, "mixture": "hidden"},
        ["mixture=hidden"],
    ),
    "gemma3 of unsloth, 4.52": (
        *DIALECTS["gemma3_text"],
        _OLD
        | {"rope_scaling": {"rope_type": "linear", "factor": 8.0}, "rope_theta": 1e6}
        | {"rope_local_base_freq": 1e4, "layer_types": None, "sliding_window_pattern": 6}
        | {"torch_dtype": "bfloat16", "transformers_version": "4.52.4"}
        | {"cache_implementation": "hybrid", **_UNSLOTH},
        ["unsloth_version=2025.9.4"],
    ),
    "phi3 of axolotl, 4.44": (
        "phi3",
        {"sliding_window": 7, **GROUPED},
        _OLD
        | {"torch_dtype": "bfloat16", "transformers_version": "4.44.2", "attention_bias": False}
        | {"auto_map": {"AutoConfig": "configuration_phi3.Phi3Config"}, "use_cache": False},
        [],
    ),
    "granite, 4.48": (
        *DIALECTS["granite"],
        _OLD | {"transformers_version": "4.48.0", "torch_dtype": "bfloat16", "mlp_bias": False},
        [],
    ),
    "olmo3, 4.57": (
        *DIALECTS["olmo3"],
        _OLD
        | {"rope_scaling": YARN, "rope_theta": 3e5, "transformers_version": "4.57.1"}
        | {"dtype": "bfloat16", "attention_bias": False},
        [],
    ),
    "glm4 of llm-compressor, 5.24": (
        *DIALECTS["glm4"],
        {"transformers_version": "5.24.0", "dtype": "bfloat16", "quantization_config": None}
        | {"llmcompressor_version": "0.9.0"},
        ["llmcompressor_version=0.9.0"],
    ),
    "smollm3 of unsloth, 5.24": (
        "smollm3",
        {"num_hidden_layers": 4, **GROUPED},
        {"transformers_version": "5.24.0", "pretraining_tp": 2, **_UNSLOTH},
        ["unsloth_version=2025.9.4"],
    ),
}


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(os, "fsync", lambda descriptor: None)


def make(name: str, **more: Any) -> None:
    kind, keys, changes, _ = PUBLISHED[name]
    save_model(Path("hf"), kind, **WIDTHS | keys)
    path = Path("hf/config.json")
    saved = json.loads(path.read_text())
    kept = {key: saved[key] for key in saved if changes.get(key, 0) is not None}
    written = {key: value for key, value in changes.items() if value is not None}
    path.write_text(json.dumps(kept | written | more))


@pytest.mark.parametrize("name", PUBLISHED)
def test_a_published_config_is_imported_with_its_keys_listed(
    name: str, capsys: pytest.CaptureFixture[str]
) -> None:
    make(name)
    assert checkpoint(["import", "from=hf", "run=t"]) == 0
    [line] = [line for line in capsys.readouterr().err.splitlines() if "proven" in line]
    assert line.startswith("parallel3d: proven: the logits of")
    for unread in PUBLISHED[name][3]:
        assert unread in line


def test_a_published_quantized_model_is_refused_by_its_key() -> None:
    quantized = {"quant_method": "compressed-tensors", "format": "pack-quantized", "version": "0.9"}
    make("llama of unsloth, 4.51", quantization_config=quantized)
    with pytest.raises(UserError, match=r"quantization_config\.quant_method=compressed"):
        checkpoint(["import", "from=hf", "run=t"])
    assert not Path("runs/t").exists()
