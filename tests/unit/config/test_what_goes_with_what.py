"""Tests that docs/what_goes_with_what.md has the rows by which a configuration is checked."""

from __future__ import annotations

import runpy
from pathlib import Path

import pytest

from parallel3d.run_config import CONFLICTS

PAGE = Path(__file__).resolve().parents[3] / "docs" / "what_goes_with_what.md"
made = runpy.run_path(str(PAGE.with_name("compatibility.py")))


@pytest.mark.more
def test_the_committed_page_is_the_generated_one() -> None:
    assert PAGE.read_text("utf-8") == made["page"](), (
        "run: python docs/compatibility.py > docs/what_goes_with_what.md"
    )


def test_every_conflict_is_on_the_page_with_its_keys() -> None:
    found = [settings for several in made["rows"]().values() for settings in several]
    assert len(found) == len(CONFLICTS)
    for conflict in CONFLICTS:
        words = [name.removesuffix(".name") for name in conflict.settings]
        assert any(all(f"`{word}=" in settings for word in words) for settings in found), words


def test_every_unsupported_combination_is_refused() -> None:
    refused = [set(conflict.settings) for conflict in CONFLICTS]
    for keys in made["NOT_BUILT"]:
        assert any(set(keys) <= names for names in refused), keys
