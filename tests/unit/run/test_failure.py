"""Tests which failure is the cause, and its sentence."""

from __future__ import annotations

import dataclasses
import errno
import os
import re
import signal
import socket
import time
from pathlib import Path

import pytest
import torch

from parallel3d.comm.operation_log import Divergence, LoggedOperation, OperationLog
from parallel3d.errors import TrainingFailure, UserError, closest, users_place
from parallel3d.metrics.recovery_log import RecoveryLine, append, read
from parallel3d.models.keys import ModelConfig
from parallel3d.resolve import layout_of
from parallel3d.run import failure, local_workers
from parallel3d.run.failure import (
    RankFailure,
    from_exception,
    from_exit,
    note_earlier,
    root_cause,
    write_record,
)
from parallel3d.run.launch import Worker
from parallel3d.run_config import Config

CONFIG = Config(model=ModelConfig(name="gpt_tiny"), tp=2, pp=2, dp=2)
LAYOUT = layout_of(CONFIG)


def error(rank: int, text: str, time: float) -> RankFailure:
    return RankFailure(rank, "", "host", "train step 3", text, time)


def worker(rank: int, run_dir: Path = Path()) -> Worker:
    return Worker(rank, rank, 8, 8, run_dir, "local", phase="train step 3")


def caught(run) -> Exception:
    try:
        run()
    except Exception as error:
        return error
    raise AssertionError("nothing was raised")


@pytest.mark.parametrize(
    "echo",
    [
        "RuntimeError: [/gloo/transport/tcp/pair.cc:534] Connection closed by peer [127.0.0.1]:3",
        "RuntimeError: Application timeout caused pair closure: connection reset by peer",
        "DistBackendError: NCCL error: remote process exited or there was a network error",
        "RuntimeError: Timed out waiting 1000ms for recv operation to complete",
        "in all_reduce 33 of dp (float32[9]): ConnectionError: member 1 of the group has ended",
    ],
)
def test_a_consequence_is_not_the_cause_even_if_it_came_first(echo: str) -> None:
    assert root_cause([error(0, echo, 1.0), error(3, "ValueError: boom", 2.0)]).rank == 3


def test_a_consequence_is_reported_as_one() -> None:
    gloo = "[/gloo/tcp/pair.cc:5] Connection closed by peer [::1]:7. This is typically caused by x"
    said = from_exception(CONFIG, worker(0), RuntimeError(gloo)).sentence()
    assert said.endswith(
        "RuntimeError: Connection closed by peer [::1]:7; another rank ended first"
    )


def nccl(reason: str) -> RuntimeError:
    return RuntimeError(
        "NCCL error in: /p/NCCLUtils.hpp:268, unhandled system error (run with NCCL_DEBUG=INFO for "
        "details), NCCL version 2.27.5\nncclSystemError: System call (e.g. socket, malloc) or "
        f"external library call failed or device error. \nLast error:\n{reason}\n"
    )


def test_an_error_of_nccl_has_its_reason() -> None:
    full = "Error while creating shared memory segment /dev/shm/nccl-1 (No space left on device)"
    said = from_exception(CONFIG, worker(0), nccl(full))
    assert "NCCL error" in said.error
    assert said.error.endswith(f"NCCL version 2.27.5 ({full})")
    assert not said.is_echo
    gone = from_exception(CONFIG, worker(0), nccl("socketProgress: Connection closed by peer n2"))
    assert gone.is_echo


def test_out_of_memory_names_settings_that_need_less() -> None:
    said = (
        "CUDA out of memory. Tried to allocate 960.00 MiB. GPU 0 has a total capacity of 139.80 "
        "GiB of which 709.12 MiB is free. If reserved but unallocated memory is large try setting "
        "PYTORCH_ALLOC_CONF=expandable_segments:True"
    )

    def sentence(micro_batch: int, phase: str = "train step 3", recompute: str = "none") -> str:
        config = dataclasses.replace(CONFIG, micro_batch_size=micro_batch, recompute=recompute)
        rank = dataclasses.replace(worker(0), phase=phase)
        return from_exception(config, rank, torch.OutOfMemoryError(said)).sentence()

    assert (
        "709.12 MiB is free. The nearest setting that needs less is micro_batch_size=4;"
        in sentence(8)
    )
    assert "needs less is recompute=full;" in sentence(1)
    assert f"needs less is tp={2 * CONFIG.tp};" in sentence(1, recompute="full")
    assert "expandable_segments" not in sentence(1)
    assert "needs less" not in sentence(8, phase="generating"), "which has no micro-batches"


def test_under_slurm_a_host_has_the_name_that_slurm_gives_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("SLURMD_NODENAME", "gpu07")
    assert from_exception(CONFIG, worker(0), ValueError("boom")).host == "gpu07"
    assert failure.who(LAYOUT, 0).endswith(" on gpu07")
    monkeypatch.delenv("SLURMD_NODENAME")
    assert from_exception(CONFIG, worker(0), ValueError("boom")).host == socket.gethostname()


def test_the_first_of_equal_failures_is_the_cause() -> None:
    assert root_cause([error(1, "ValueError: b", 2.0), error(2, "ValueError: a", 1.0)]).rank == 2


def test_killed_rank_is_the_cause_of_closed_connections() -> None:
    gone = "RuntimeError: Connection closed by peer"
    assert root_cause([error(0, gone, 1.0), from_exit(LAYOUT, 1, -9)]).rank == 1


def test_rank_that_the_launcher_ended_is_not_the_cause() -> None:
    survivors = [from_exit(LAYOUT, 0, -15), error(2, "RuntimeError: Connection reset", 5.0)]
    assert root_cause(survivors).rank == 2


def test_a_dead_node_is_the_cause_of_closed_connections_and_of_ended_ranks() -> None:
    dead = failure.of_node("node3", "has sent no beat for 31 s", 40.0)
    gone = error(0, "RuntimeError: Connection closed by peer", 1.0)
    timed_out = error(1, "RuntimeError: Timed out waiting 1000ms for recv", 2.0)
    ended = from_exit(LAYOUT, 2, -failure.END_SIGNAL)
    assert root_cause([gone, timed_out, ended, dead]) == dead
    assert dead.sentence() == "node3 has sent no beat for 31 s"


GONE = "left out all_reduce of world (float64[]); RuntimeError: Connection closed by peer"


@pytest.mark.parametrize(
    "cause",
    [from_exit(LAYOUT, 2, -9), failure.of_node("node3", "has sent no beat for 31 s", 40.0)],
    ids=["killed", "node"],
)
def test_a_rank_that_lost_a_peer_while_its_calls_differed_is_not_the_cause(
    cause: RankFailure,
) -> None:
    """All ranks may call something else in a step; those that lost a peer before that do not."""
    innocent = dataclasses.replace(error(0, GONE, 1.0), diverged=True)
    other = error(1, "RuntimeError: Connection closed by peer", 1.0)
    late = error(3, "in all_reduce 4 of dp (float32[2]): RuntimeError: Broken pipe", 2.0)
    aborted = from_exit(LAYOUT, 3, -signal.SIGABRT)
    for others in ((), (other,), (late, aborted)):
        assert root_cause([innocent, *others, cause]) == cause


def test_a_rank_that_diverged_is_the_cause_of_its_peers_errors() -> None:
    odd = dataclasses.replace(error(0, GONE, 2.0), diverged=True)
    size = "in all_reduce 4 of dp (float32[2]): RuntimeError: op.preamble.length <= op.nbytes"
    assert root_cause([odd, error(1, size, 1.0)]) == odd
    assert root_cause([odd, from_exit(LAYOUT, 1, -signal.SIGABRT)]) == odd
    ended = from_exit(LAYOUT, 1, -failure.END_SIGNAL)
    assert root_cause([odd, error(2, size, 1.0), ended]) == odd


def test_an_error_before_a_nodes_death_is_its_cause() -> None:
    dead = failure.of_node("node3", "has sent no beat for 31 s", 40.0)
    boom, late = error(5, "ValueError: boom", 9.0), error(6, "ValueError: boom", 41.0)
    assert root_cause([dead, boom]) == boom
    assert root_cause([dead, late]) == dead


def test_sentence_names_rank_coordinates_host_phase_and_place() -> None:
    failed = from_exception(CONFIG, worker(5), caught(lambda: closest(3, None, 9)))
    words = failed.sentence()
    assert words.startswith("rank 5 (pp 1, dp 0, tp 1) on ")
    assert "failed in train step 3 at parallel3d/errors.py:" in words
    assert "TypeError" in words


def test_sentence_names_the_line_of_the_users_code_and_what_was_called() -> None:
    def fails() -> None:
        try:
            closest(3, None, 9)
        except TypeError as error:
            error.add_note(f"The error was raised in layers.0{users_place(error)}.")
            raise

    words = from_exception(CONFIG, worker(5), caught(fails)).sentence()
    assert re.search(
        r"TypeError: .*\. The error was raised in layers.0 at \S+_failure.py:\d+", words
    )


def test_a_killed_rank_is_reported_with_the_signals_name() -> None:
    assert "rank 2 (pp 0, dp 1, tp 0) on " in from_exit(LAYOUT, 2, -9).sentence()
    assert "was killed by SIGKILL" in from_exit(LAYOUT, 2, -9).sentence()
    assert "was killed by SIGSEGV" in from_exit(LAYOUT, 2, -11).sentence()
    assert "exited with code 3" in from_exit(LAYOUT, 2, 3).sentence()


def test_a_user_error_is_printed_unchanged() -> None:
    failed = from_exception(CONFIG, worker(0), UserError("tp=3 is wrong"))
    assert (failed.kind, failed.sentence()) == ("user", "tp=3 is wrong.")


def test_a_common_verdict_of_the_ranks_is_the_cause_of_a_hang() -> None:
    class Departed(OperationLog):
        """Returns a log whose last step differed from the preceding one."""

        def divergence(self) -> Divergence:
            reduced = LoggedOperation("world", 3, "all_reduce", (2,), "torch.float32")
            return Divergence(reduced, reduced._replace(name="all_gather"), None)

    def failed(rank: int, error: Exception) -> RankFailure:
        log = Departed()
        return from_exception(CONFIG, dataclasses.replace(worker(rank), log=log), error)

    peer = failed(1, RuntimeError("Connection closed by peer [::1]:7"))
    assert peer.diverged
    cause = root_cause([peer, failed(0, TrainingFailure("loss is nan"))])
    assert (cause.kind, cause.error, cause.diverged) == (
        "decided",
        "TrainingFailure: loss is nan",
        False,
    )


def test_record_is_read_back_with_its_traceback(tmp_path: Path) -> None:
    raised = caught(lambda: closest(3, None, 9))
    written = failure.write(from_exception(CONFIG, worker(5), raised), raised, tmp_path)
    assert failure.read_all(tmp_path) == [written]
    assert written.traceback_file is not None
    assert "in closest" in Path(written.traceback_file).read_text()


def test_torchrun_gets_the_failure_in_its_own_format(tmp_path: Path) -> None:
    from torch.distributed.elastic.multiprocessing.errors import ProcessFailure

    file = tmp_path / "error.json"
    failure.write_elastic_file(
        error(3, "E: x", 7.5), "trace", {"TORCHELASTIC_ERROR_FILE": str(file)}
    )
    read = ProcessFailure(local_rank=0, pid=1, exitcode=1, error_file=str(file))
    assert read.timestamp == 7
    assert "rank 3" in read.message["extraInfo"]["py_callstack"]


def test_a_failure_that_cannot_be_recorded_is_logged_at_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "failures").touch()
    monkeypatch.setenv("TORCHELASTIC_ERROR_FILE", str(tmp_path / "absent" / "file"))
    raised = caught(lambda: closest(3, None, 9))

    def full(path: Path, content: bytes) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(failure, "replace_durably", full)
    (tmp_path / "full").mkdir()
    for run_dir in (tmp_path, tmp_path / "full", tmp_path / "gone"):
        failed = failure.write(from_exception(CONFIG, worker(5), raised), raised, run_dir)
        assert failed.traceback_file is None
    first, second, third = capsys.readouterr().err.splitlines()
    assert first.startswith("parallel3d: rank 5 (pp 1, dp 0, tp 1) on ")
    assert first.endswith("(not recorded: File exists)")
    assert second.endswith("(not recorded: No space left on device)")
    assert third.endswith("(not recorded: No such file or directory)")


def test_a_record_is_never_half_written_and_follows_no_link(tmp_path: Path) -> None:
    raised = caught(lambda: closest(3, None, 9))
    precious = tmp_path / "precious"
    precious.write_text("thesis")
    run_dir = tmp_path / "run"
    (run_dir / "failures").mkdir(parents=True)
    for name in ("rank-5.traceback.txt", "failures/rank-5.json"):
        (run_dir / name).symlink_to(precious)
    written = failure.write(from_exception(CONFIG, worker(5), raised), raised, run_dir)
    assert failure.read_all(run_dir) == [written]
    assert precious.read_text() == "thesis"


def test_records_that_cannot_be_read_are_left_out(tmp_path: Path) -> None:
    """Ranks are often ended while they write."""
    failure.write_record(error(1, "ValueError: boom", 2.0), "", tmp_path)
    records = tmp_path / "failures"
    whole = (records / "rank-1.json").read_text()
    (records / "rank-0.json").write_text(whole[: len(whole) // 2])
    (records / "rank-2.json").write_text("[]")
    (records / "rank-3.json").write_text('{"rank": 3}')
    (records / "rank-4.json").write_bytes(b"\xff\x00")
    (records / "rank-5.json").mkdir()
    assert [found.rank for found in failure.read_all(tmp_path)] == [1]
    cause = local_workers._cause(LAYOUT, tmp_path, {0: -failure.END_SIGNAL, 1: 1})
    assert (cause.rank, cause.error) == (1, "ValueError: boom")


def test_a_record_appears_whole_or_not(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def ended(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(os, "replace", ended)
    with pytest.raises(KeyboardInterrupt):
        failure.write_record(error(1, "ValueError: boom", 2.0), "", tmp_path)
    assert failure.read_all(tmp_path) == []


def test_a_launcher_does_not_wait_for_a_dead_disk(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(failure, "read_all", lambda _: time.sleep(600))
    monkeypatch.setattr(local_workers, "DISK_S", 0.2)
    cause = local_workers._cause(LAYOUT, tmp_path, {1: -signal.SIGKILL})
    assert cause.rank == 1 and "was killed by SIGKILL" in cause.error


def test_file_names_that_are_no_text_are_reported(tmp_path: Path) -> None:
    odd = from_exception(CONFIG, worker(0), OSError("no file \udcff"))
    failure.write(odd, OSError("no file \udcff"), tmp_path)
    assert failure.read_all(tmp_path)[0].error == "OSError: no file \\udcff"


def test_a_removed_run_folder_is_not_made_again(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Rank 0 removes the folder of a run that never began; its peers' failures make no run."""
    peer = worker(5)
    peer.run_dir = tmp_path / "gone"
    error = RuntimeError("Connection closed by peer")
    failure.report_failure(from_exception(CONFIG, peer, error), peer, error, None)
    said = capsys.readouterr().err.splitlines()
    assert len(said) == 1 and "Connection closed by peer" in said[0]
    failure.write(from_exception(CONFIG, peer, ValueError()), ValueError(), peer.run_dir)
    assert not peer.run_dir.exists()


def test_a_start_notes_the_failure_that_no_launcher_has_noted(tmp_path: Path) -> None:
    """Under torchrun the records are all that a start knows of the one before it."""
    note_earlier(tmp_path)
    boom = error(3, "ValueError: boom", 1000.0)
    write_record(boom, "", tmp_path)
    note_earlier(tmp_path)
    assert read(tmp_path) == []  # the run had not begun
    (tmp_path / "starts.jsonl").touch()
    for _ in range(2):
        note_earlier(tmp_path)
    (line,) = read(tmp_path)
    assert line.cause is not None and (line.cause.kind, line.cause.rank) == ("error", 3)
    assert line.failed_at == 1000.0 and not line.seconds

    late = error(3, "ValueError: boom", line.at + 100)
    write_record(late, "", tmp_path)
    append(tmp_path, RecoveryLine(line.at + 103, 3, "same", "by the launcher"), print)
    note_earlier(tmp_path)
    assert len(read(tmp_path)) == 2


def test_records_of_peers_alone_name_no_cause(tmp_path: Path) -> None:
    (tmp_path / "starts.jsonl").touch()
    write_record(error(0, "RuntimeError: Connection closed by peer [::1]:7", 9.0), "", tmp_path)
    note_earlier(tmp_path)
    (line,) = read(tmp_path)
    assert line.cause is not None and (line.cause.kind, line.cause.rank) == ("unknown", None)
