"""Composing for a job: once where once is enough, and as `@hydra.main` where it is not."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
from hydra._internal.config_loader_impl import ConfigLoaderImpl

from parallel3d.cli.hydra_run import run

HYDRAS = """
defaults:
  - _self_
  - override hydra/job_logging: none
  - override hydra/hydra_logging: none
x: 0
hydra:
  output_subdir: null
  run: {dir: .}
  sweep: {dir: sweep}
"""
SWEEP = "  mode: MULTIRUN\n  sweeper: {params: {x: '3,4'}}\n"


@pytest.mark.parametrize(
    ("sweep", "words", "xs", "once"),
    [
        ("", [], [0], True),
        ("", ["x=1"], [1], True),
        ("", ["x=1", "hydra.job.name=a"], [1], False),
        ("", ["--multirun", "x=1,2"], [1, 2], False),
        ("", ["hydra.mode=MULTIRUN", "x=choice(1,2)"], [1, 2], False),
        (SWEEP, [], [3, 4], False),
    ],
)
def test_a_single_job_composes_once(
    sweep: str,
    words: list[str],
    xs: list[int],
    once: bool,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    (tmp_path / "config.yaml").write_text(HYDRAS + sweep)
    found, times = [], []
    load = ConfigLoaderImpl.load_configuration
    monkeypatch.setattr(
        ConfigLoaderImpl,
        "load_configuration",
        lambda *args, **keys: times.append(1) or load(*args, **keys),
    )
    monkeypatch.setattr(sys, "argv", ["parallel3d", *words])
    monkeypatch.setenv("HYDRA_FULL_ERROR", "1")
    monkeypatch.chdir(tmp_path)
    run(lambda composed: found.append(composed.x), words, tmp_path)
    assert found == xs
    assert (len(times) == 1) == once


def test_what_a_job_raises_is_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An assertion of its own is not taken for Hydra's."""
    (tmp_path / "config.yaml").write_text(HYDRAS)
    monkeypatch.setenv("HYDRA_FULL_ERROR", "1")
    monkeypatch.chdir(tmp_path)
    begun = []

    def job(composed: object) -> None:
        begun.append(composed)
        raise AssertionError("of the job")

    with pytest.raises(AssertionError, match="of the job"):
        run(job, [], tmp_path)
    assert len(begun) == 1
