"""Tests which losses a failing file system may cause, and which it may not."""

from __future__ import annotations

import dataclasses
import errno
import fcntl
import json
import os
import shutil
import stat
from collections.abc import Callable
from pathlib import Path

import pytest
from torch.distributed import HashStore

from parallel3d.checkpoint import manifest, saver
from parallel3d.checkpoint.checkpoints import names_of_all
from parallel3d.checkpoint.keys import CheckpointConfig
from parallel3d.checkpoint.manifest import (
    CHECKPOINTS,
    FileDigest,
    IncompleteCheckpoint,
    UnreadableCheckpoint,
    list_checkpoints,
    read_manifest,
    read_together,
    step_folder,
)
from parallel3d.checkpoint.saver import (
    Lease,
    Save,
    Saver,
    SaveResult,
    remove_leftovers,
)
from parallel3d.comm import store as job_store
from parallel3d.errors import TrainingFailure, UserError
from tests.unit.checkpoint.test_files import (
    EXPECTED,
    facts,
    load,
    make,
    names,
    one_rank,
    save,
    whole,
)


def refuse(number: int) -> Callable[..., None]:
    def refused(*_: object, **__: object) -> None:
        raise OSError(number, os.strerror(number))

    return refused


@pytest.fixture
def pauses(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """Records the pauses between tries, without waiting."""
    waited: list[float] = []
    monkeypatch.setattr(manifest.time, "sleep", waited.append)
    return waited


def alone(word: object) -> list:
    return [json.loads(json.dumps(word))]


def beside(*others: tuple) -> Callable[[object], list]:
    """Returns a `share` in which this rank is the first, and the others always give the same
    answer."""
    return lambda word: [*alone(word), *map(list, others)]


@pytest.mark.parametrize("number", [errno.ESTALE, errno.EIO, errno.EACCES, errno.EMFILE])
@pytest.mark.parametrize("call", ["open", "preadv", "listdir"])
def test_an_unreadable_file_is_not_treated_as_damaged(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, pauses: list[float], number: int, call: str
) -> None:
    folder = make(tmp_path, 3)
    with monkeypatch.context() as patch:
        patch.setattr(os, call, refuse(number))
        with pytest.raises(UnreadableCheckpoint, match=errno.errorcode[number]):
            load(folder)
        with pytest.raises(TrainingFailure) as ended:
            read_together(lambda: load(folder), alone)
    sentence = str(ended.value)
    assert os.strerror(number) in sentence and "on rank 0, host " in sentence
    assert "step-00000003" in sentence and "\n" not in sentence
    assert pauses == [0.0, *manifest.PAUSES_S]
    assert read_together(lambda: load(folder), alone) == (None, None)


def test_saving_continues_once_the_disk_works_again(pauses: list[float]) -> None:
    answers = iter([OSError(errno.ESTALE, "stale"), OSError(errno.EIO, "bad"), None])

    def read() -> str:
        if (error := next(answers)) is not None:
            raise UnreadableCheckpoint("step-00000003", error)
        return "read"

    assert read_together(read, alone) == ("read", None)
    assert pauses == [0.0, *manifest.PAUSES_S[:2]]


def test_a_file_that_only_one_rank_misses_is_not_treated_as_lost(
    tmp_path: Path, pauses: list[float]
) -> None:
    """A file that one rank misses is a stale view; one that all miss is lost."""
    folder = make(tmp_path, 3)
    (folder / "rank-00001.safetensors").unlink()
    with pytest.raises(IncompleteCheckpoint):
        read_manifest(folder)
    with pytest.raises(TrainingFailure, match=r"on rank 0, .* lacks rank-00001\.safetensors"):
        read_together(lambda: load(folder), beside((0, "", "b"), (0, "", "c")))
    for other in ((2, "lacks it too", "b"), (1, "is not what was written", "b")):
        _, damage = read_together(lambda: load(folder), beside(other))
        assert damage == "step-00000003 lacks rank-00001.safetensors"
    with pytest.raises(TrainingFailure, match=r"on rank 1, host b: .*ESTALE"):
        read_together(lambda: load(folder), beside((3, "ESTALE", "b")))


def test_no_run_restarts_from_scratch_over_damaged_checkpoints(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, pauses: list[float]
) -> None:
    assert names_of_all("mine", tmp_path, alone) == []
    folder = make(tmp_path, 3)
    assert names_of_all("mine", tmp_path, alone) == [folder.name]
    folder.rename(folder.with_name("damaged-step-00000003"))
    with pytest.raises(
        UserError, match=r"damaged-step-00000003 .* starting over at step 1 could overwrite"
    ):
        names_of_all("mine", tmp_path, alone)
    monkeypatch.setattr(os, "listdir", refuse(errno.EIO))
    with pytest.raises(TrainingFailure, match="EIO"):
        names_of_all("mine", tmp_path, alone)


def test_a_checkpoint_that_only_another_rank_sees_is_not_ignored(
    tmp_path: Path, pauses: list[float]
) -> None:
    words = iter([[[0, "", "a"], [0, "", "b"]], [[[], []], [["step-00000003"], []]]])
    assert names_of_all("mine", tmp_path, lambda _: next(words)) == ["step-00000003"]
    with pytest.raises(TrainingFailure, match="ENOENT"):
        read_together(lambda: read_manifest(tmp_path / "step-00000003"), beside((0, "", "b")))


@pytest.mark.parametrize("place", ["replace", "rmtree", "flush", "listing", "unlink"])
def test_a_fault_after_the_rename_does_not_fail_the_save(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, place: str
) -> None:
    saver = one_rank(tmp_path, keep=1)
    assert save(saver, 3) == SaveResult()
    rename, module = os.rename, "parallel3d.checkpoint.saver"
    targets = {
        "replace": "os.replace",
        "rmtree": "shutil.rmtree",
        "flush": "parallel3d.files.flush_folder",
        "listing": f"{module}.list_checkpoints",
        "unlink": "os.unlink",
    }

    def then_ill(source: Path, target: Path) -> None:
        rename(source, target)
        if Path(target).name == step_folder(6):
            monkeypatch.setattr(targets[place], refuse(errno.EPERM))

    monkeypatch.setattr(os, "rename", then_ill)
    outcome = save(saver, 6)
    assert outcome.problem is None
    assert len(outcome.notes) >= (place != "unlink"), outcome
    assert all("Operation not permitted" in note for note in outcome.notes)
    monkeypatch.undo()
    load(tmp_path / CHECKPOINTS / step_folder(6))
    assert save(saver, 9) == SaveResult()


def test_leftovers_that_cannot_be_removed_are_logged_and_stop_no_start(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = make(tmp_path, 3).parent
    for name in (".saving-00000006-old", ".removed-step-00000001"):
        (folder / name).mkdir()
        (folder / name / "rank-00000.safetensors").write_bytes(b"half")
    with monkeypatch.context() as patch:
        patch.setattr(os, "unlink", refuse(errno.EPERM))
        said = remove_leftovers(tmp_path)
        patch.setattr(os, "listdir", refuse(errno.EIO))
        assert "EIO" in remove_leftovers(tmp_path)[0]
    assert len(said) == 2 and all("could not be removed (EPERM" in s for s in said)
    assert remove_leftovers(tmp_path) == []
    assert names(tmp_path) == [step_folder(3)]


def test_a_save_never_replaces_an_existing_checkpoint_of_its_step(tmp_path: Path) -> None:
    """A start that does not see the checkpoint, and is killed at any byte, has replaced nothing."""
    first, second = one_rank(tmp_path), one_rank(tmp_path)
    assert save(first, 3) == SaveResult()
    (before,) = list_checkpoints(tmp_path)
    files = {path: path.stat().st_ino for path in before.iterdir()}
    assert save(second, 3) == SaveResult()
    assert {path: path.stat().st_ino for path in before.iterdir()} == files
    assert names(tmp_path) == ["latest", step_folder(3)]
    load(list_checkpoints(tmp_path)[0])


def test_a_full_disk_loses_one_checkpoint_and_logs_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Tests that the next try succeeds even if half-written files could not be removed."""
    saver = one_rank(tmp_path)
    with monkeypatch.context() as patch:
        patch.setattr(os, "write", refuse(errno.ENOSPC))
        patch.setattr(shutil, "rmtree", refuse(errno.EIO))
        outcome = save(saver, 3)
    assert outcome.problem == "No space left on device (rank 0)" and not outcome.is_bug
    assert "could not be removed (EIO" in outcome.notes[0]
    saver.start(Save(3, 4, whole(3), facts(3), EXPECTED), background=False)
    assert saver.join() == SaveResult()


def started(run_dir: Path, session: str) -> tuple[Saver, list[str]]:
    claim = Lease(run_dir, session)
    said = claim.take()
    return Saver(run_dir, CheckpointConfig(), 0, 1, session, 5, claim), said


def test_the_older_of_two_starts_without_locks_ends_and_removes_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fcntl, "flock", refuse(errno.ENOLCK))
    first, said = started(tmp_path, "a")
    assert (save(first, 3), said) == (SaveResult(), [])
    second, said = started(tmp_path, "b")
    assert len(said) == 1 and f"process {os.getpid()}" in said[0] and "without locks" in said[0]
    outcome = save(first, 6)
    assert outcome.is_overtaken and "was taken over by another start, at" in outcome.problem
    assert save(second, 6) == SaveResult()
    load(tmp_path / CHECKPOINTS / step_folder(6))
    assert save(first, 9).is_overtaken
    assert {step_folder(3), step_folder(6)} == {p.name for p in list_checkpoints(tmp_path)}


def test_without_locks_a_second_start_before_a_first_checkpoint_is_logged(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The newest start owns the run, whichever of the two saves first."""
    monkeypatch.setattr(fcntl, "flock", refuse(errno.ENOLCK))
    first, said = started(tmp_path, "a")
    second, more = started(tmp_path, "b")
    assert said == [] and len(more) == 1 and "without locks" in more[0]
    assert save(first, 3).is_overtaken
    assert save(second, 3) == SaveResult()


def test_an_unsigned_report_of_a_part_makes_no_checkpoint(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(job_store.SECRET, "of this job")
    store = HashStore()
    monkeypatch.setattr(saver, "_store", lambda: store)
    first = Saver(tmp_path, CheckpointConfig(), 0, 2, "session", 5)
    part = SaveResult(file=FileDigest("rank-00001.safetensors", 9, "0"), elements={"ema": 2})
    of_this_save = Save(3, 1, {}, facts(3), {})
    job_store.put(store, first._key(of_this_save, 1), dataclasses.asdict(part))
    assert first._parts_of_others(of_this_save) == [part]
    store.set(first._key(of_this_save, 1), json.dumps(dataclasses.asdict(part)))
    with pytest.raises(OSError, match="was not written by a rank of this job"):
        first._parts_of_others(of_this_save)


def test_with_locks_a_claim_that_fails_is_logged_and_stops_no_start(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first, _ = started(tmp_path, "a")
    assert save(first, 3) == SaveResult()
    assert started(tmp_path, "b")[1] == []
    with monkeypatch.context() as patch:
        patch.setattr(os, "write", refuse(errno.ENOSPC))
        third, said = started(tmp_path, "c")
    assert "ENOSPC" in said[0]
    assert save(third, 6) == SaveResult()
    assert Lease(tmp_path, "late").lost_to() is not None  # the folder did not exist when it started


def test_everything_of_a_checkpoint_is_private_whatever_the_umask(tmp_path: Path) -> None:
    before = os.umask(0)
    try:
        saver, _ = started(tmp_path, "a")
        assert save(saver, 3) == SaveResult()
    finally:
        os.umask(before)
    for path in (tmp_path / CHECKPOINTS, *(tmp_path / CHECKPOINTS).rglob("*")):
        assert stat.S_IMODE(path.stat().st_mode) == (0o700 if path.is_dir() else 0o600), path
