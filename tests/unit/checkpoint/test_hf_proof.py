"""Tests that an import's proof fails for errors in places of a model that depend on positions.

The errors are planted in our keys of a folder, as if config.json had been read wrongly.
"""

from __future__ import annotations

import dataclasses
import os
from pathlib import Path
from typing import Any

import pytest

from parallel3d.commands.checkpoint import huggingface, proof
from parallel3d.commands.checkpoint.command import checkpoint
from parallel3d.errors import UserError
from parallel3d.models.keys import ModelConfig
from tests.huggingface import (
    DIALECTS,
    EXPERTS,
    GROUPED,
    LLAMA3,
    LONGROPE,
    SIZES,
    YARN,
    phi3_longrope,
    save_model,
)

pytestmark = pytest.mark.nightly

WIDTHS = SIZES | {"hidden_size": 48, "max_position_embeddings": 400, "pad_token_id": None}
SHORT, LONG = LONGROPE["short_factor"], LONGROPE["long_factor"]
_ORIGINAL = {"original_max_position_embeddings": 300}
FOLDERS: dict[str, tuple[str, dict[str, Any]]] = {
    "mistral": ("mistral", {"sliding_window": 300, **GROUPED}),
    "phi3": ("phi3", phi3_longrope(300, 0.5)),
    "ministral3": (
        "ministral3",
        {
            "head_dim": 12,
            "rope_parameters": {
                "rope_theta": 1e4,
                "llama_4_scaling_beta": 0.1,
                **YARN,
                **_ORIGINAL,
            },
            **GROUPED,
        },
    ),
    "llama": (
        "llama",
        {"rope_parameters": {"rope_theta": 500.0, **LLAMA3, **_ORIGINAL}, **GROUPED},
    ),
    "qwen2_unused_window": (
        "qwen2",
        {"use_sliding_window": True, "max_window_layers": 2, "sliding_window": 300, **GROUPED},
    ),
    "minimax_m2": ("minimax_m2", EXPERTS["minimax_m2"]),
    **{
        name: DIALECTS[name]
        for name in (
            *("smollm3", "smollm3_window", "gemma2", "gemma3_text", "olmo3", "exaone4", "glm4"),
            *("qwen2_window", "qwen3_types", "dots1_window"),
        )
    },
}
HALF = ["sliding", "full"]
# Folder, and the keys that are read wrongly; the first error of a family is tried in every run.
PLANTED: list[tuple[str, dict[str, Any]]] = [
    ("mistral", {"sliding_window": 301}),
    ("mistral", {"sliding_window": 299}),
    ("mistral", {"sliding_window": None, "layer_types": []}),
    ("phi3", {"rope_short_factors": LONG, "rope_long_factors": SHORT}),
    ("phi3", {"rope_long_factors": [1.0, 2.0, 4.1]}),
    ("phi3", {"rope_original_length": 301}),
    ("phi3", {"rope_original_length": 299}),
    ("phi3", {"rope_attention_factor": 1.0}),
    ("phi3", {"rope_scaling": "llama3", "rope_scaling_factor": 1.0}),
    ("ministral3", {"query_temperature": 0.11}),
    ("ministral3", {"query_temperature": 0.0}),
    ("ministral3", {"rope_original_length": 301}),
    ("ministral3", {"rope_original_length": 299}),
    ("ministral3", {"rope_scaling_factor": 4.01}),
    ("llama", {"rope_original_length": 301}),
    ("llama", {"rope_low_freq_factor": 1.01}),
    ("llama", {"rope_scaling_factor": 1.0}),
    ("llama", {"rope_scaling": "yarn"}),
    ("smollm3", {"layer_types": ["full", "full", "full_nope", "full"]}),
    ("smollm3_window", {"layer_types": ["full", "full", "sliding_nope", "full"]}),
    ("smollm3_window", {"sliding_window": 8}),
    ("gemma2", {"layer_types": ["full", "sliding"]}),
    ("gemma2", {"sliding_window": 6}),
    ("gemma3_text", {"layer_types": [*["sliding"] * 4, "full", "sliding"]}),
    ("gemma3_text", {"sliding_rotary_base": None}),
    ("gemma3_text", {"rope_scaling_factor": 1.0}),
    ("olmo3", {"layer_types": [*["sliding"] * 2, "full", "sliding"]}),
    ("exaone4", {"layer_types": [*["sliding"] * 3, "full"]}),
    ("exaone4", {"layer_types": [*["sliding"] * 2, "full_nope", "sliding"]}),
    ("glm4", {"rotary_percent": 0.375}),
    ("minimax_m2", {"rotary_percent": 1 / 3}),
    ("qwen2_window", {"layer_types": [*["full"] * 2, *["sliding"] * 6]}),
    ("qwen3_types", {"layer_types": ["full", "sliding"]}),
    ("dots1_window", {"layer_types": [*["full"] * 5, *["sliding"] * 3]}),
]
FIRST = {name: number for number, (name, _) in reversed([*enumerate(PLANTED)])}


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("folders")


def made(folders: Path, name: str) -> Path:
    kind, changes = FOLDERS[name]
    if not (folders / name).is_dir():
        save_model(folders / name, kind, **WIDTHS | changes)
    return folders / name


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(os, "fsync", lambda descriptor: None)


@pytest.mark.parametrize("name", FOLDERS)
def test_a_folder_is_proven(name: str, folders: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert checkpoint(["import", f"from={made(folders, name)}", "run=t"]) == 0
    assert "proven: the logits" in capsys.readouterr().err


def plant(monkeypatch: pytest.MonkeyPatch, folder: Path, **keys: Any) -> None:
    found = huggingface.read_hf_config(folder)
    assert any(found.keys.get(key) != value for key, value in keys.items())
    wrong = dataclasses.replace(found, keys=found.keys | keys)
    monkeypatch.setattr(huggingface, "read_hf_config", lambda folder: wrong)


@pytest.mark.parametrize(
    ("name", "keys"),
    [
        pytest.param(name, keys, marks=[] if FIRST[name] == number else [pytest.mark.more])
        for number, (name, keys) in enumerate(PLANTED)
    ],
)
def test_an_error_behind_some_position_fails_the_proof(
    name: str,
    keys: dict[str, Any],
    folders: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    folder = made(folders, name)
    plant(monkeypatch, folder, **keys)
    # The number of a window is compared, too, but the rows must already reach it.
    said = "the logits of .* nothing is imported" if "sliding_window" in keys else "nothing is impo"
    with pytest.raises(UserError, match=said):
        checkpoint(["import", f"from={folder}", "run=t", "prove=true"])
    assert list(Path("runs").iterdir()) == []


@pytest.mark.parametrize(
    ("keys", "said"),
    [
        ({"sliding_window": 301}, "the run has model.sliding_window=301"),
        ({"layer_types": ["full", "sliding"]}, "differ from those of transformers"),
    ],
)
def test_a_window_that_is_too_long_to_run_is_compared_by_its_number(
    keys: dict[str, Any],
    said: str,
    folders: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    folder = made(folders, "mistral")
    monkeypatch.setattr(proof, "MOST_WORK", 1.0)
    assert checkpoint(["import", f"from={folder}", "run=s"]) == 0
    reached = "not reached was model.sliding_window=300, which transformers reads as well"
    assert reached in capsys.readouterr().err
    plant(monkeypatch, folder, **keys)
    with pytest.raises(UserError, match=said):
        checkpoint(["import", f"from={folder}", "run=t"])


def test_a_window_that_no_layer_has_is_proven_without_effect(
    folders: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = made(folders, "qwen2_unused_window")
    monkeypatch.setattr(proof, "MOST_WORK", 1.0)
    assert checkpoint(["import", f"from={folder}", "run=t"]) == 0
    assert "proven: the logits" in capsys.readouterr().err


def test_frequencies_that_are_not_shown_are_not_called_compared(
    folders: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    said = "; not compared were the frequencies of rotary positions"
    folder = made(folders, "llama")
    assert checkpoint(["import", f"from={folder}", "run=s"]) == 0
    assert said not in capsys.readouterr().err
    monkeypatch.setattr(proof, "_their_frequencies", lambda theirs: [])
    assert checkpoint(["import", f"from={folder}", "run=t"]) == 0
    assert said in capsys.readouterr().err


def test_the_sentence_says_what_was_reached(
    folders: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = made(folders, "phi3")
    assert checkpoint(["import", f"from={folder}", "run=t"]) == 0
    said = capsys.readouterr().err
    assert (
        "positions 0 to 255, both sides of model.rope_original_length=300, some up to 399" in said
    )
    assert checkpoint(["import", f"from={folder}", "run=u", "model.seq_length=280"]) == 0
    assert "not reached were positions 256 to 279, where nothing changes" in capsys.readouterr().err


def test_rows_are_short_and_reach_every_change() -> None:
    model = ModelConfig(
        **{"position_embedding": "rope", "seq_length": 1 << 17, "query_temperature": 0.1},
        **{"rope_original_length": 1 << 14, "layer_types": ["sliding"], "sliding_window": 1000},
    )
    rows = proof.rows_of(model, proof.changes_of(model))
    assert [len(row.positions) for row in rows[:1]] == [1002]
    assert all(len(row.positions) < 64 for row in rows[1:])
    assert sum(len(row.kept) for row in rows) <= proof.KEPT
    last = [row.positions[-1] for row in rows]
    assert {(1 << 14) - 1, 1 << 14, (1 << 17) - 1} < set(last)
    assert {2 << 14, (2 << 14) - 1, 3 << 14, (3 << 14) - 1} < set(rows[-1].positions)
