"""Tests that docs/configuration.md equals the dataclasses."""

from __future__ import annotations

import re
import runpy
from pathlib import Path

import pytest

from parallel3d.cli.overrides import groups, presets
from parallel3d.config.fields import all_keys
from parallel3d.run_config import Config

pytestmark = pytest.mark.more

PAGE = Path(__file__).resolve().parents[3] / "docs" / "configuration.md"
configuration_page = runpy.run_path(str(PAGE.with_suffix(".py")))["configuration_page"]

CLASSIC_FLAGS = [
    "tensor-model-parallel-size",
    "pipeline-model-parallel-size",
    "sequence-parallel",
    "num-layers",
    "hidden-size",
    "num-attention-heads",
    "seq-length",
    "max-position-embeddings",
    "micro-batch-size",
    "global-batch-size",
    "lr",
    "train-iters",
    "lr-decay-iters",
    "lr-decay-style",
    "min-lr",
    "weight-decay",
    "lr-warmup-fraction",
    "clip-grad",
    "fp16",
    "untie-embeddings-and-output-weights",
    "position-embedding-type",
    "rotary-percent",
    "fp16-lm-cross-entropy",
    "parallel-output",
]


def test_the_committed_page_is_the_generated_one() -> None:
    written = PAGE.read_text(encoding="utf-8")
    assert written == configuration_page(), (
        "run: python docs/configuration.py > docs/configuration.md"
    )


@pytest.mark.parametrize("flag", CLASSIC_FLAGS)
def test_every_flag_of_the_classic_launch_has_a_row_with_a_key(flag: str) -> None:
    row = re.search(rf"^\| `--{flag}` \| `([\w.]+)` \|", configuration_page(), re.MULTILINE)
    assert row is not None
    assert row[1] in all_keys(Config) or f"{row[1]}.name" in all_keys(Config)


def test_opposite_and_refused_flags_say_so() -> None:
    page = configuration_page()
    rows = {r[1]: r[0] for r in re.finditer(r"^\| `(--[\w-]+)` .*$", page, re.MULTILINE)}
    assert "the opposite" in rows["--untie-embeddings-and-output-weights"]
    assert "precision=bf16" in rows["--fp16"]
    assert "ring" in rows["--cp-comm-type"]
    assert "refused" not in rows["--fp16-lm-cross-entropy"] + rows["--lr"]


def test_every_key_and_every_preset_is_on_the_page() -> None:
    page = configuration_page()
    assert [name for name in all_keys(Config) if f"| `{name}` |" not in page] == []
    named = [f"| `{group}={preset}` |" for group in groups() for preset in presets(group)]
    assert [row for row in named if row not in page] == []


def test_every_choice_that_is_a_preset_has_its_file() -> None:
    for group in groups():
        key = all_keys(Config).get(f"{group}.name")
        if key is None or key.meta["choices"] is None:
            continue
        # A script gives data or an optimizer of its own, not a preset.
        assert set(key.meta["choices"]) - {"own"} == set(presets(group))


def test_no_key_lacks_a_help_text() -> None:
    assert [key.name for key in all_keys(Config).values() if not key.meta["help"]] == []


def test_a_preset_is_described_by_its_first_sentence_even_over_several_lines() -> None:
    row = re.search(r"^\| `cluster=rails_3x2` \| (.+) \|$", configuration_page(), re.MULTILINE)
    assert row is not None and row[1].startswith("Three servers") and row[1].endswith("another.")
