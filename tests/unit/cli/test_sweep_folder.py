"""Tests that a sweep's folder belongs to its user alone."""

from __future__ import annotations

import os
import stat
from pathlib import Path

import pytest
from omegaconf import DictConfig, OmegaConf

from parallel3d.cli.hydra_run import PrivateSweepFolder


def sweep(tmp_path: Path) -> DictConfig:
    folder = {"dir": str(tmp_path / "runs" / ".multirun")}
    return OmegaConf.create({"runs_dir": str(tmp_path / "runs"), "hydra": {"sweep": folder}})


def test_folder_of_a_sweep_is_private(tmp_path: Path) -> None:
    folder = tmp_path / "runs" / ".multirun"
    for _ in range(2):
        PrivateSweepFolder().on_multirun_start(sweep(tmp_path))
        assert stat.S_IMODE(folder.stat().st_mode) == 0o700
        folder.chmod(0o777)  # mode given by an earlier version


def test_folder_of_somebody_else_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    other = os.getuid() + 1
    monkeypatch.setattr(os, "getuid", lambda: other)
    with pytest.raises(SystemExit) as refused:
        PrivateSweepFolder().on_multirun_start(sweep(tmp_path))
    assert refused.value.code == 2
    assert "belongs to another user" in capsys.readouterr().err
