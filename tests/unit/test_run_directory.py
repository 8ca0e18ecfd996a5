"""The run directory: named, made and refused."""

from __future__ import annotations

import dataclasses
import json
import os
import re
import stat
from pathlib import Path

import pytest

from parallel3d.config import CheckpointConfig, Config, DataConfig, LoggerConfig, ModelConfig
from parallel3d.errors import UserError
from parallel3d.run_directory import (
    check_run,
    differences,
    discard_unused,
    load_config,
    make_run_directory,
    take_run,
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
    check_run(mine)
    _, directory = make_run_directory(mine)
    before = (directory / "config.yaml").read_bytes()
    for attempt in (check_run, make_run_directory):
        with pytest.raises(UserError, match="run=mine exists already in"):
            attempt(mine)
        with pytest.raises(UserError, match="seed is 1234 there, now 5; choose another run="):
            attempt(dataclasses.replace(mine, seed=5))
    assert (directory / "config.yaml").read_bytes() == before


def test_taken_name_of_a_sweep_is_the_numbered_one(tmp_path: Path) -> None:
    mine = config(tmp_path, run="mine")
    make_run_directory(mine, job_number=0)
    check_run(mine)
    check_run(mine, job_number=1)
    with pytest.raises(UserError, match="run=mine-0 exists"):
        check_run(mine, job_number=0)


def test_config_that_cannot_be_read_is_refused(tmp_path: Path) -> None:
    mine = config(tmp_path, run="mine")
    _, directory = make_run_directory(mine)
    for broken in ("tp: [", "tp: two", "unknown: 1", "- list"):
        (directory / "config.yaml").write_text(broken)
        with pytest.raises(UserError, match=r"config\.yaml cannot be read"):
            check_run(mine)


def test_runs_dir_that_is_a_file_is_refused(tmp_path: Path) -> None:
    (tmp_path / "runs").touch()
    with pytest.raises(UserError, match=r"runs_dir=.*is not a folder"):
        make_run_directory(config(tmp_path))


def test_many_differences_are_counted(tmp_path: Path) -> None:
    mine = config(tmp_path, run="mine")
    make_run_directory(mine)
    changed = dataclasses.replace(mine, tp=1, pp=2, seed=5, zero=1, vpp=2)
    with pytest.raises(UserError, match="and 2 more"):
        check_run(changed)


def test_what_is_watched_is_no_difference(tmp_path: Path) -> None:
    here = config(tmp_path)
    there = dataclasses.replace(here, runs_dir="x", logger=LoggerConfig(project="y"), run="z")
    assert differences(here, there) == []
    data = dataclasses.replace(here.data, path="p")
    assert differences(here, dataclasses.replace(there, data=data)) == [("data.path", None, "p")]


def test_run_goes_on_with_another_layout_and_keeps_every_configuration(tmp_path: Path) -> None:
    mine = config(tmp_path, run="mine")
    _, directory = make_run_directory(mine)
    first = (directory / "config.yaml").read_bytes()
    starts = [mine, dataclasses.replace(mine, tp=1), mine, mine]
    for start in starts:
        check_run(start, may_go_on=True)
        named, again = make_run_directory(start, may_go_on=True)
        assert (named, again) == (start, directory)
        os.close(take_run(named, again))
        assert load_config(directory) == start
    assert (directory / "config.yaml").read_bytes() == first
    names = {path.name for path in directory.iterdir()}
    assert names == {"config.yaml", "config-2.yaml", "config-3.yaml"}


def test_run_that_cannot_go_on_is_refused_with_the_differing_keys(tmp_path: Path) -> None:
    mine = config(tmp_path, run="mine")
    make_run_directory(mine)
    model = dataclasses.replace(mine.model, hidden_size=96)
    other = dataclasses.replace(mine, seed=5, model=model, tp=1)
    keys = "model.hidden_size is 128 there, now 96, seed is 1234 there, now 5; choose another run="
    for attempt in (check_run, make_run_directory):
        with pytest.raises(UserError, match=keys):
            attempt(other, may_go_on=True)
    fresh = dataclasses.replace(mine, checkpoint=CheckpointConfig(load=False))
    with pytest.raises(UserError, match=r"exists already in .* checkpoint\.load=false"):
        check_run(fresh, may_go_on=True)


def test_run_that_is_over_and_has_no_checkpoint_is_not_done_again(tmp_path: Path) -> None:
    mine, directory = make_run_directory(config(tmp_path, run="mine"))
    for ending in ("failed", "stopped"):
        (directory / "summary.json").write_text(json.dumps({"status": ending}))
        check_run(mine, may_go_on=True)
    (directory / "summary.json").write_text(json.dumps({"status": "finished"}))
    with pytest.raises(UserError, match="with no checkpoint to go on from: choose another run="):
        check_run(mine, may_go_on=True)
    (directory / "checkpoints" / "step-00000004").mkdir(parents=True)
    check_run(mine, may_go_on=True)


def test_run_that_is_running_is_not_started_again(tmp_path: Path) -> None:
    mine, directory = make_run_directory(config(tmp_path, run="mine"))
    lock = take_run(mine, directory)
    with pytest.raises(UserError, match="run=mine is running already"):
        take_run(dataclasses.replace(mine, tp=1), directory)
    assert load_config(directory) == mine
    os.close(lock)
    os.close(take_run(mine, directory))


def test_failures_of_an_earlier_start_are_kept_apart(tmp_path: Path) -> None:
    mine, directory = make_run_directory(config(tmp_path, run="mine"))
    for number in (1, 2):
        (directory / "failures").mkdir()
        (directory / "failures" / "rank-0.json").write_text("{}")
        os.close(take_run(mine, directory))
        assert not (directory / "failures").exists()
        assert (directory / f"failures-{number}" / "rank-0.json").exists()


def test_directory_with_results_is_never_discarded(tmp_path: Path) -> None:
    _, directory = make_run_directory(config(tmp_path, run="mine"))
    (directory / "metrics.jsonl").touch()
    discard_unused(directory)
    assert directory.exists()
    (directory / "metrics.jsonl").unlink()
    discard_unused(directory)
    assert not directory.exists()
