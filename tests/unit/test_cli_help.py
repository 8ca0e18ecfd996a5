"""Help on streams that are not Unicode."""

from __future__ import annotations

import io
import sys

import pytest

from parallel3d.cli import help_text


def test_help_is_printable_on_an_ascii_stdout(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(io.BytesIO(), encoding="ascii"))
    for text in (help_text.overview(), *map(help_text._template, help_text.ABOUT)):
        assert text.isascii()
        assert "[key=value ...]" in text or "run=..." in text
    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(io.BytesIO(), encoding="utf-8"))
    assert "…" in help_text.overview()
