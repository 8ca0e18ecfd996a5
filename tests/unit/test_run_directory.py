"""The run directory: named, made and refused."""

from __future__ import annotations

import dataclasses
import re
import stat
from pathlib import Path

import pytest

from parallel3d.config import Config, DataConfig, LoggerConfig, ModelConfig
from parallel3d.errors import UserError
from parallel3d.run_directory import (
    check_run_is_free,
    differences,
    discard_unused,
    load_config,
    make_run_directory,
)


def config(folder: Path, **changes: object) -> Config:
    base = Config(model=ModelConfig(name="gpt_tiny"), runs_dir=str(folder / "runs"), tp=2, dp=3)
    return dataclasses.replace(base, **changes)


def test_made_name_holds_time_model_layout_and_job(tmp_path: Path) -> None:
    named, directory = make_run_directory(config(tmp_path), job_id="77", job_number=4)
    assert re.fullmatch(r"\d{8}-\d{6}-gpt_tiny-tp2pp1dp3-job77-4", directory.name)
    assert named.run == directory.name
    assert stat.S_IMODE(directory.stat().st_mode) == 0o700


def test_config_is_read_back_as_it_was(tmp_path: Path) -> None:
    data = DataConfig(name="text", path="a: b # c\n'ü'")
    named, directory = make_run_directory(config(tmp_path, data=data))
    assert load_config(directory) == named


def test_runs_of_the_same_second_do_not_meet(tmp_path: Path) -> None:
    names = {make_run_directory(config(tmp_path))[1].name for _ in range(5)}
    assert len(names) == 5


def test_taken_name_is_refused_early_and_late(tmp_path: Path) -> None:
    mine = config(tmp_path, run="mine")
    check_run_is_free(mine)
    _, directory = make_run_directory(mine)
    before = (directory / "config.yaml").read_bytes()
    for attempt in (check_run_is_free, make_run_directory):
        with pytest.raises(UserError, match="run=mine exists already in"):
            attempt(mine)
        with pytest.raises(UserError, match="seed is 1234 there, now 5; choose another run="):
            attempt(dataclasses.replace(mine, seed=5))
    assert (directory / "config.yaml").read_bytes() == before


def test_taken_name_of_a_sweep_is_the_numbered_one(tmp_path: Path) -> None:
    mine = config(tmp_path, run="mine")
    make_run_directory(mine, job_number=0)
    check_run_is_free(mine)
    check_run_is_free(mine, job_number=1)
    with pytest.raises(UserError, match="run=mine-0 exists"):
        check_run_is_free(mine, job_number=0)


def test_config_that_cannot_be_read_is_refused(tmp_path: Path) -> None:
    mine = config(tmp_path, run="mine")
    _, directory = make_run_directory(mine)
    for broken in ("tp: [", "tp: two", "unknown: 1", "- list"):
        (directory / "config.yaml").write_text(broken)
        with pytest.raises(UserError, match=r"config\.yaml cannot be read"):
            check_run_is_free(mine)


def test_runs_dir_that_is_a_file_is_refused(tmp_path: Path) -> None:
    (tmp_path / "runs").touch()
    with pytest.raises(UserError, match=r"runs_dir=.*is not a folder"):
        make_run_directory(config(tmp_path))


def test_many_differences_are_counted(tmp_path: Path) -> None:
    mine = config(tmp_path, run="mine")
    make_run_directory(mine)
    changed = dataclasses.replace(mine, tp=1, pp=2, seed=5, zero=1, vpp=2)
    with pytest.raises(UserError, match="and 2 more"):
        check_run_is_free(changed)


def test_what_is_watched_is_no_difference(tmp_path: Path) -> None:
    here = config(tmp_path)
    there = dataclasses.replace(here, runs_dir="x", logger=LoggerConfig(project="y"), run="z")
    assert differences(here, there) == []
    data = dataclasses.replace(here.data, path="p")
    assert differences(here, dataclasses.replace(there, data=data)) == [("data.path", None, "p")]


def test_directory_with_results_is_never_discarded(tmp_path: Path) -> None:
    _, directory = make_run_directory(config(tmp_path, run="mine"))
    (directory / "metrics.jsonl").touch()
    discard_unused(directory)
    assert directory.exists()
    (directory / "metrics.jsonl").unlink()
    discard_unused(directory)
    assert not directory.exists()
