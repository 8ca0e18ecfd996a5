"""Tests composing for a job: once if that suffices, otherwise like `@hydra.main`."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
from hydra._internal.config_loader_impl import ConfigLoaderImpl

from parallel3d.cli.hydra_run import run


@pytest.mark.nightly
@pytest.mark.parametrize(
    ("words", "sizes", "once"),
    [
        ([], [1], True),
        (["tp=2"], [2], True),
        (["tp=2", "hydra.job.name=a"], [2], False),
        (["--multirun", "tp=1,2"], [1, 2], False),
        (["hydra.mode=MULTIRUN", "tp=choice(1,2)"], [1, 2], False),
    ],
)
def test_a_single_job_composes_once(
    words: list[str],
    sizes: list[int],
    once: bool,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
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
    run(lambda composed: found.append(composed.tp), words)
    assert found == sizes
    assert (len(times) == 1) == once


def test_exceptions_of_a_job_are_passed_on() -> None:
    begun = []

    def job(composed: object) -> None:
        begun.append(composed)
        raise AssertionError("of the job")

    with pytest.raises(AssertionError, match="of the job"):
        run(job, [])
    assert len(begun) == 1
