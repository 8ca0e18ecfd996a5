"""Tests that `parallel3d help NAME` explains keys and sections, and refuses other names."""

from __future__ import annotations

import pytest

from parallel3d.cli.command_line import main


def test_a_key_is_explained_with_range_and_conflicts(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["help", "ddp.comm_hook", "plan.confirm"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "ddp.comm_hook=none"
    assert "    must be one of none, bf16" in lines
    assert "    refused: ddp.comm_hook=bf16 with zero=1" in lines
    assert "plan.confirm=3" in lines


def test_a_section_lists_all_of_its_keys(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["help", "checkpoint"]) == 0
    found = capsys.readouterr().out
    assert found.startswith("checkpoint: ") and "\ncheckpoint.every=" in found
    assert max(map(len, found.splitlines())) <= 100


def test_an_unknown_name_is_refused_with_the_nearest(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert main(["help", "zeor"]) == 2
    assert "the nearest is zero" in capsys.readouterr().err
