"""Tests the run directory: its name, its creation and its refusals."""

from __future__ import annotations

import dataclasses
import errno
import json
import os
import re
import shutil
import stat
from pathlib import Path

import pytest
from torch.distributed import HashStore, PrefixStore

from parallel3d import files
from parallel3d.checkpoint.keys import CheckpointConfig
from parallel3d.checkpoint.manifest import Manifest, write_manifest
from parallel3d.checkpoint.runs import run_names
from parallel3d.data.keys import DataConfig
from parallel3d.errors import UserError
from parallel3d.files import replace_durably
from parallel3d.metrics.keys import LoggerConfig
from parallel3d.models.keys import ModelConfig
from parallel3d.run import directory as run_directory
from parallel3d.run.agreement import RUN_KEY, agree_on_run
from parallel3d.run.checks import check_run_name
from parallel3d.run.directory import (
    check_run,
    discard_unused,
    load_config,
    make_run_directory,
    status,
    take_run,
)
from parallel3d.run.failure import from_exception, report_failure
from parallel3d.run.launch import Worker
from parallel3d.run.launcher_environment import RankAssignment
from parallel3d.run.rendezvous import seen_key
from parallel3d.run_config import Config, check_plain

# The state of a trainer after four steps, as a manifest stores it.
PROGRESS = {
    "steps": 4,
    "consumed_samples": 8,
    "updates": 4,
    "good_steps": 4,
    "overflows": 0,
    "loss_scale": 1.0,
}


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


def test_a_run_from_before_a_key_was_renamed_resumes(tmp_path: Path) -> None:
    mine, directory = make_run_directory(config(tmp_path, run="mine"))
    with (directory / "config.yaml").open("a") as file:
        file.write("trace: true\n")
    assert load_config(directory) == mine
    check_run(mine, may_resume=True)


@pytest.mark.nightly
def test_a_run_from_before_a_key_was_removed_resumes(tmp_path: Path) -> None:
    mine, directory = make_run_directory(config(tmp_path, run="mine"))
    file = directory / "config.yaml"
    older = file.read_text()
    assert "\ntensor_parallel:\n" in older
    older = older.replace("\ntensor_parallel:\n", "\ntensor_parallel:\n  symmetric_memory: true\n")
    # Earlier versions wrote options of subcommands into every run.
    older += "bench:\n  algorithms: false\n  sizes: [4]\ntopology:\n  width: null\nprompt: x\n"
    file.write_text(older)
    assert load_config(directory) == mine
    check_run(mine, may_resume=True)


@pytest.mark.nightly
def test_runs_of_the_same_second_have_different_names(tmp_path: Path) -> None:
    names = {make_run_directory(config(tmp_path))[1].name for _ in range(5)}
    assert len(names) == 5


@pytest.mark.nightly
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


@pytest.mark.nightly
def test_a_run_resumes_with_another_layout_and_keeps_every_configuration(tmp_path: Path) -> None:
    mine = config(tmp_path, run="mine")
    _, directory = make_run_directory(mine)
    first = (directory / "config.yaml").read_bytes()
    starts = [mine, dataclasses.replace(mine, tp=1), mine, mine]
    for start in starts:
        check_run(start, may_resume=True)
        named, again = make_run_directory(start, may_resume=True)
        assert (named, again) == (start, directory)
        os.close(take_run(named, again))
        assert load_config(directory) == start
    assert (directory / "config.yaml").read_bytes() == first
    names = {path.name for path in directory.iterdir()}
    assert names == {"config.yaml", "config-2.yaml", "config-3.yaml"}


@pytest.mark.nightly
def test_a_run_that_cannot_resume_is_refused_with_the_differing_keys(tmp_path: Path) -> None:
    mine = config(tmp_path, run="mine")
    _, directory = make_run_directory(mine)
    # Without a checkpoint, nothing binds the run to its configuration.
    (directory / "checkpoints" / "step-00000004").mkdir(parents=True)
    model = dataclasses.replace(mine.model, hidden_size=96)
    other = dataclasses.replace(mine, seed=5, model=model, tp=1)
    keys = "model.hidden_size is 128 there, now 96, seed is 1234 there, now 5; choose another run="
    for attempt in (check_run, make_run_directory):
        with pytest.raises(UserError, match=keys):
            attempt(other, may_resume=True)
    fresh = dataclasses.replace(mine, checkpoint=CheckpointConfig(load=False))
    with pytest.raises(UserError, match=r"exists already in .* checkpoint\.load=false"):
        check_run(fresh, may_resume=True)
    # Both remedies of the message are accepted.
    check_run(dataclasses.replace(fresh, run="other"), may_resume=True)
    shutil.rmtree(directory)
    check_run(fresh, may_resume=True)


@pytest.mark.nightly
def test_a_finished_run_without_a_checkpoint_is_not_repeated(tmp_path: Path) -> None:
    mine, directory = make_run_directory(config(tmp_path, run="mine"))
    for ending in ("failed", "stopped"):
        (directory / "summary.json").write_text(json.dumps({"status": ending}))
        check_run(mine, may_resume=True)
    (directory / "summary.json").write_text(json.dumps({"status": "finished"}))
    with pytest.raises(UserError, match="with no checkpoint to resume from: choose another run="):
        check_run(mine, may_resume=True)
    (directory / "checkpoints" / "step-00000004").mkdir(parents=True)
    check_run(mine, may_resume=True)


@pytest.mark.nightly
def test_run_that_is_running_is_not_started_again(tmp_path: Path) -> None:
    mine, directory = make_run_directory(config(tmp_path, run="mine"))
    lock = take_run(mine, directory)
    with pytest.raises(UserError, match="run=mine is running already"):
        take_run(dataclasses.replace(mine, tp=1), directory)
    assert load_config(directory) == mine
    os.close(lock)
    os.close(take_run(mine, directory))


@pytest.mark.slow
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


# ---- torn files, and files of another process or user


@pytest.mark.nightly
@pytest.mark.parametrize("torn", ["", "tp: 2\nmodel: {", "ru", "\0" * 64, "tp: two"])
def test_a_torn_newest_configuration_is_skipped_for_an_older_one(tmp_path: Path, torn: str) -> None:
    mine, directory = make_run_directory(config(tmp_path, run="mine"))
    (directory / "config-2.yaml").write_text(torn)
    changed = dataclasses.replace(mine, tp=1)
    for number, start in ((3, mine), (4, changed)):
        check_run(start, may_resume=True)
        os.close(take_run(start, directory))
        assert load_config(directory) == start
        assert (directory / f"config-{number}.yaml").exists()
    (directory / "checkpoints" / "step-00000004").mkdir(parents=True)
    with pytest.raises(UserError, match="seed is 1234 there, now 5"):
        check_run(dataclasses.replace(mine, seed=5), may_resume=True)


@pytest.mark.nightly
def test_a_torn_configuration_is_skipped_for_a_checkpoints(tmp_path: Path) -> None:
    mine, directory = make_run_directory(config(tmp_path, run="mine"))
    folder = directory / "checkpoints" / "step-00000004"
    folder.mkdir(parents=True)
    manifest = Manifest(4, PROGRESS, dataclasses.asdict(mine), {}, "", {}, ())
    write_manifest(folder, manifest)
    (directory / "config.yaml").write_text("")
    os.close(take_run(mine, make_run_directory(mine, may_resume=True)[1]))
    assert load_config(directory) == mine
    (directory / "config-2.yaml").write_text("")
    with pytest.raises(UserError, match="seed is 1234 there, now 5"):
        check_run(dataclasses.replace(mine, seed=5), may_resume=True)


@pytest.mark.slow
def test_configuration_is_on_the_disk_before_it_has_its_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    flushed: list[Path] = []
    real = os.fsync
    monkeypatch.setattr(
        os, "fsync", lambda fd: (flushed.append(Path(os.readlink(f"/proc/self/fd/{fd}"))), real(fd))
    )
    mine, directory = make_run_directory(config(tmp_path, run="mine"))
    file, folder, runs = flushed
    assert (file.parent, runs) == (folder, directory.parent)
    assert file.name.startswith(".config.yaml.") and folder.name.startswith(".new-")
    flushed.clear()
    os.close(take_run(dataclasses.replace(mine, tp=1), directory))
    assert flushed[0].name.startswith(".config-2.yaml.") and flushed[1:] == [directory]


@pytest.mark.slow
def test_full_disk_leaves_no_half_configuration(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    mine, directory = make_run_directory(config(tmp_path, run="mine"))

    def full(descriptor: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", full)
        with pytest.raises(UserError, match=r"run=mine: .* cannot be written \(No space left"):
            take_run(dataclasses.replace(mine, tp=1), directory)
        with pytest.raises(UserError, match=r"cannot make .*other: No space left"):
            make_run_directory(config(tmp_path, run="other"))
    assert os.listdir(directory.parent) == ["mine"]
    assert os.listdir(directory) == ["config.yaml"]


def test_folder_of_another_start_is_never_discarded(tmp_path: Path) -> None:
    _, directory = make_run_directory(config(tmp_path, run="mine"))
    child = os.fork()
    if child == 0:
        discard_unused(directory)
        os._exit(0)
    os.waitpid(child, 0)
    assert directory.exists()


@pytest.mark.nightly
def test_second_start_under_torchrun_leaves_the_first_ones_folder(tmp_path: Path) -> None:
    mine, directory = make_run_directory(config(tmp_path, run="mine"))
    lock = take_run(mine, directory)
    place = RankAssignment("torchrun", 0, 0, 1, 1, "127.0.0.1", 0)
    worker = Worker(0, 0, 1, 1, Path(), "torchrun")
    store = PrefixStore("attempt0", HashStore())
    with pytest.raises(UserError, match="running already"):
        agree_on_run("train", mine, place, worker, store, "cpu")
    assert worker.run_dir == Path()
    os.close(lock)


def test_only_rank_0_reports_a_refusal_and_other_ranks_stop_asking(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """If a store is gone, torch itself prints whole pages."""
    mine, inner = config(tmp_path, run="mine", dp=2), HashStore()
    (Path(mine.runs_dir) / "mine").mkdir(parents=True)
    PrefixStore("0", inner).add(seen_key(RUN_KEY), 1)  # the other process has read the reason
    for rank, says in ((0, 1), (1, 0)):
        place = RankAssignment("slurm", rank, rank, 2, 2, "127.0.0.1", 0)
        worker, store = Worker(rank, rank, 2, 2, Path(), "slurm"), PrefixStore("0", inner)
        with pytest.raises(UserError, match="is not a run directory") as refused:
            agree_on_run("train", mine, place, worker, store, "cpu")
        failed = from_exception(mine, worker, refused.value)
        report_failure(failed, worker, refused.value, Gone() if rank else store)
        assert capsys.readouterr().err.count("is not a run directory") == says


def test_ranks_use_rank_0s_source_and_refuse_other_differences(tmp_path: Path) -> None:
    """The source may still train and have saved in between; a host may not see the run's folder."""
    mine, inner = config(tmp_path, run="mine", dp=3, init_from="old@3"), HashStore()
    deeper = dataclasses.replace(mine.model, num_layers=9)
    sees = [
        mine,
        dataclasses.replace(mine, init_from="old@4"),
        dataclasses.replace(mine, model=deeper),
    ]
    for rank, here in enumerate(sees):
        place = RankAssignment("slurm", rank, rank, 3, 3, "127.0.0.1", 0)
        worker, store = Worker(rank, rank, 3, 3, Path(), "slurm"), PrefixStore("0", inner)
        if rank < 2:
            assert agree_on_run("train", here, place, worker, store, "cpu").init_from == "old@3"
        else:
            with pytest.raises(UserError, match=r"num_layers is 4 on rank 0 and 9 on rank 2, host"):
                agree_on_run("train", here, place, worker, store, "cpu")


class Gone:
    def add(self, key: str, amount: int) -> int:
        raise AssertionError(key)


def as_other_users(monkeypatch: pytest.MonkeyPatch) -> None:
    """Makes this process appear as another user, whose new files belong to that user."""
    monkeypatch.setattr(os, "geteuid", lambda: 4711)
    monkeypatch.setattr(files, "status_of_new_file", lambda folder: None)


def test_run_folder_of_another_user_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    mine, directory = make_run_directory(config(tmp_path, run="mine"))
    as_other_users(monkeypatch)
    for attempt in (check_run, make_run_directory):
        with pytest.raises(UserError, match=rf"{directory} belongs to another user \(uid"):
            attempt(mine, may_resume=True)


def test_a_run_folder_is_accepted_on_a_file_system_with_one_owner(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    mine, _ = make_run_directory(config(tmp_path, run="mine"))
    monkeypatch.setattr(os, "geteuid", lambda: 4711)
    check_run(mine, may_resume=True)


def test_links_in_a_run_folder_are_not_followed(tmp_path: Path) -> None:
    mine, directory = make_run_directory(config(tmp_path, run="mine"))
    precious = tmp_path / "precious"
    precious.write_text("thesis")
    (directory / "summary.json").symlink_to(precious)
    (directory / "config-2.yaml").symlink_to(precious)
    replace_durably(directory / "summary.json", b"{}")
    os.close(take_run(dataclasses.replace(mine, tp=1), directory))
    (directory / "config.yaml").rename(directory / "kept")
    (directory / "config.yaml").symlink_to(directory / "kept")
    with pytest.raises(UserError, match="cannot be written"):
        take_run(mine, directory)
    assert precious.read_text() == "thesis"


@pytest.mark.nightly
def test_a_torn_summary_is_ignored(tmp_path: Path) -> None:
    mine, directory = make_run_directory(config(tmp_path, run="mine"))
    for torn in ('{"status": "fin', "[]", "\0\0", ""):
        (directory / "summary.json").write_text(torn)
        assert status(directory) is None
        check_run(mine, may_resume=True)


@pytest.mark.parametrize("place", ["lock", "folder"])
def test_folder_that_may_not_be_written_is_refused_in_a_sentence(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, place: str
) -> None:
    mine, directory = make_run_directory(config(tmp_path, run="mine"))
    real = os.open

    def refuse(path: str | Path, flags: int, *args: int, **kwargs: int) -> int:
        if flags & (os.O_RDWR if place == "lock" else os.O_CREAT):
            raise OSError(errno.EROFS, os.strerror(errno.EROFS), path)
        return real(path, flags, *args, **kwargs)

    monkeypatch.setattr(os, "open", refuse)
    with pytest.raises(UserError, match=r"run=mine: .*mine cannot be written \(Read-only file"):
        take_run(dataclasses.replace(mine, tp=1), directory)


@pytest.mark.parametrize("run", ["x" * 300, "ä" * 101])
def test_name_that_is_too_long_is_refused(run: str) -> None:
    with pytest.raises(UserError, match=r"of at most 200 bytes and .* run=null makes a name"):
        check_run_name(run, "runs")
    check_run_name("ä" * 100, "runs")


def test_killed_or_failed_start_leaves_the_name_free(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    mine = config(tmp_path, run="mine")
    unstorable = dataclasses.replace(mine, data=DataConfig(name="text", path="${b}"))
    with pytest.raises(UserError, match=r"data\.path=\$\{b\} holds"):
        make_run_directory(unstorable)
    assert os.listdir(tmp_path / "runs") == []
    child = os.fork()
    if child == 0:
        monkeypatch.setattr(os, "rename", lambda *_: os._exit(9))
        make_run_directory(mine)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 9
    check_run(mine)
    _, directory = make_run_directory(mine)
    assert run_names(directory.parent) == ["mine"]


@pytest.mark.slow
def test_the_later_of_two_simultaneous_starts_is_refused_with_the_other(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    mine = config(tmp_path, run="mine")
    real = run_directory.save_config

    def meanwhile(*args: object, **kwargs: object) -> None:
        monkeypatch.setattr(run_directory, "save_config", real)
        make_run_directory(mine)
        real(*args, **kwargs)

    monkeypatch.setattr(run_directory, "save_config", meanwhile)
    with pytest.raises(UserError, match="run=mine exists already in"):
        make_run_directory(mine)
    assert os.listdir(tmp_path / "runs") == ["mine"]


@pytest.mark.parametrize("run", ["\x1b[31mred", "a\nb", "a\x7f", "a\udc80"])
def test_control_characters_in_a_name_are_refused(run: str) -> None:
    with pytest.raises(UserError, match="must be the plain name") as refused:
        check_run_name(run, "runs")
    assert str(refused.value).isprintable()


def test_stored_configuration_is_not_resolved(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SECRET_KEY", "hunter2")
    mine, directory = make_run_directory(config(tmp_path, run="mine"))
    for reference in ("${oc.env:SECRET_KEY}", r'"\x24{oc.env:SECRET_KEY}"'):
        (directory / "config.yaml").write_text(f"model:\n  name: {reference}\n")
        with pytest.raises(
            UserError, match=r"contains \$\{, but references are not resolved"
        ) as refused:
            check_run(dataclasses.replace(mine, seed=5), may_resume=True)
        assert "hunter2" not in str(refused.value)
    with pytest.raises(UserError, match=r"logger\.group=\$\{oc\.env:X\} holds"):
        check_plain(Config(logger=LoggerConfig(group="${oc.env:X}")))
