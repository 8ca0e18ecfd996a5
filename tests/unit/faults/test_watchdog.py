"""Tests that the watchdog ends its process, whatever fails while it diagnoses."""

from __future__ import annotations

import _thread
import fcntl
import os
import subprocess
import threading
import time
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import Mock

import pytest
import torch
from torch.distributed import HashStore

from parallel3d.blueprint.layout import Layout
from parallel3d.comm.step_timer import StepTimer
from parallel3d.commands import train
from parallel3d.faults import watchdog as stacks
from parallel3d.faults.watchdog import Watchdog, in_torch_distributed, work_stack
from parallel3d.loop import evaluation, run_steps
from parallel3d.loop.data_check import DataCheck
from parallel3d.loop.keys import TrainConfig
from parallel3d.loop.rank_run import RankRun
from parallel3d.run import failure
from parallel3d.run.launch import Worker, within
from parallel3d.run_config import Config
from tests.e2e.ready import ROOT, ReadyPopen
from tests.pace import PATIENCE

WATCHED = """
import errno, sys, time
from pathlib import Path
from parallel3d.faults import hang, watchdog
from parallel3d.blueprint.layout import Layout
from parallel3d.run import failure
from parallel3d.run.launch import Worker

def full_disk(*_, **__):
    raise OSError(errno.ENOSPC, "No space left on device")

def broken(*_, **__):
    raise KeyError("no such thing")

def stays(*_, **__):
    time.sleep(600)

def stays_and_holds_the_interpreter(*_, **__):
    import ctypes
    ctypes.PyDLL(None).sleep(600)

worker = Worker(0, 0, 1, 1, Path(sys.argv[1]), "local", "cpu", "train step 3")
exec(sys.argv[2])
watchdog.Watchdog(Layout(), worker, None, 0.4, 600).start()
time.sleep(600)
"""


def started(run_dir: Path, what: str, streams: int) -> ReadyPopen:
    """Breaks `what`, and starts a process that hangs under a watchdog."""
    return ReadyPopen(
        ("-c", WATCHED, str(run_dir), what),
        cwd=ROOT,
        env=dict(os.environ),
        stdin=subprocess.DEVNULL,
        stdout=streams,
        stderr=streams,
        text=True,
    )


def end_of(run_dir: Path, what: str, seconds: float = 60.0 * PATIENCE) -> tuple[int, str]:
    """Returns exit code and stderr of such a process."""
    with started(run_dir, what, subprocess.PIPE) as ended:
        said = ended.communicate(timeout=seconds)[1]
    return ended.returncode, said


VERDICT = "parallel3d: hang: rank 0 (pp 0, dp 0, tp 0) on "


@pytest.mark.nightly
def test_a_full_disk_keeps_no_run_alive(tmp_path: Path) -> None:
    code, said = end_of(tmp_path, "watchdog.dump_stacks = failure.write_record = full_disk")
    assert code == 1
    assert f"{tmp_path}/rank-0.stacks.txt could not be written" in said
    assert VERDICT in said.splitlines()[-1]


@pytest.mark.nightly
@pytest.mark.parametrize(
    "what",
    [
        "watchdog.dump_stacks = stays; watchdog.DUMP_S = 0.5",
        "hang.diagnose = broken",
        "failure.who = broken",
        "watchdog.work_stack = stays_and_holds_the_interpreter; watchdog.END_S = 2.0",
    ],
)
def test_whatever_fails_or_stays_in_the_report_ends_with_the_process(
    tmp_path: Path, what: str
) -> None:
    code, said = end_of(tmp_path, what)
    assert code == 1
    if "dump" in what:
        assert VERDICT in said.splitlines()[-1]


@pytest.mark.nightly
def test_a_record_that_cannot_be_written_leaves_the_verdict(tmp_path: Path) -> None:
    """Makes a dead file system, on which every write waits for ever."""
    what = "failure.write_record = watchdog.dump_stacks = stays; watchdog.DUMP_S = 0.5"
    code, said = end_of(tmp_path, f"{what}; watchdog.RECORD_FILE_S = 0.5; watchdog.END_S = 3000")
    assert code == 1
    assert VERDICT in said.splitlines()[-1]


@pytest.mark.nightly
def test_streams_that_nobody_reads_keep_no_run_alive(tmp_path: Path) -> None:
    """Tests that the last exit does not write to the streams: a log may be on the dead file
    system."""
    what = "watchdog.work_stack = stays_and_holds_the_interpreter; watchdog.END_S = 1.0"
    reader, writer = os.pipe()
    fcntl.fcntl(writer, fcntl.F_SETPIPE_SZ, 4096)
    os.write(writer, b"x" * 4096)
    hanging = started(tmp_path, what, writer)
    try:
        assert hanging.wait(60 * PATIENCE) == 1
    finally:
        hanging.kill()
        os.close(reader)
        os.close(writer)


@pytest.mark.parametrize(
    "error",
    [
        TimeoutError("member 1 of the group has sent no signal for 30 s"),
        RuntimeError("Timed out waiting 1000ms for recv operation to complete"),
    ],
)
def test_a_wait_that_timed_out_is_a_hang(error: Exception, tmp_path: Path) -> None:
    rank = Worker(0, 0, 2, 2, tmp_path, "local", watchdog=Mock(is_reporting=False))
    failure.report_hang(rank, error)
    assert rank.watchdog.timed_out.called
    rank.watchdog.timed_out.reset_mock()
    failure.report_hang(rank, ValueError("odd"))
    assert not rank.watchdog.timed_out.called


def test_a_verdict_under_way_is_not_cut_off_by_what_follows_from_it(tmp_path: Path) -> None:
    """The watchdog kills a stopped peer, and the main thread fails at once because of that."""
    rank = Worker(0, 0, 2, 2, tmp_path, "local", watchdog=Mock(is_reporting=True))
    rank.watchdog.timed_out.side_effect = SystemExit  # the call does not return
    with pytest.raises(SystemExit):
        failure.leave(1, rank)


@pytest.mark.nightly
@pytest.mark.parametrize("has_store", [True, False])
def test_no_rank_leaves_before_the_verdict_is_printed(
    has_store: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """When the first rank ends, a launcher ends all others, even one that has not reported yet."""
    monkeypatch.setattr("parallel3d.faults.watchdog.DUMP_S", 0.5)
    monkeypatch.setattr("parallel3d.faults.watchdog.RECORD_FILE_S", 2.0)
    store, order = HashStore(), []

    class Slow(Watchdog):
        def _log_failure(self, failed: failure.RankFailure) -> None:
            time.sleep(0.5)
            order.append("said")

        def _store_answers(self) -> bool:
            return has_store

        def leave(self) -> None:
            self._write_report()
            order.append("left")

    watchdogs = [
        Slow(Layout(dp=2), Worker(rank, rank, 2, 2, tmp_path, "local", "cpu"), store, 0.4, 600)
        for rank in range(2)
    ]
    for watchdog in watchdogs:
        watchdog._keeper = {"pid": 1, "born": 0, "host": "another", "node": "another"}
    leaving = [threading.Thread(target=watchdog.leave) for watchdog in watchdogs]
    for thread in leaving:
        thread.start()
    for thread in leaving:
        thread.join(60 * PATIENCE)
    assert order == ["said", "left", "left"]


@pytest.mark.nightly
def test_flight_record_of_a_device_is_saved_next_to_the_stacks(tmp_path: Path) -> None:
    text = '{"entries": []}'
    on_device = f"worker.device = 'cuda:0'; hang.take_flight_record = lambda: {text!r}"
    assert end_of(tmp_path, on_device)[0] == 1
    assert (tmp_path / "rank-0.nccl.json").read_text() == text
    assert "File" in (tmp_path / "rank-0.stacks.txt").read_text()


@pytest.mark.nightly
def test_flight_recorder_that_hangs_or_fails_does_not_change_the_verdict(tmp_path: Path) -> None:
    for take in ("stays", "lambda: 'no JSON'"):
        code, said = end_of(tmp_path, f"worker.device = 'cuda:0'; hang.take_flight_record = {take}")
        assert code == 1
        assert VERDICT in said.splitlines()[-1]


@pytest.mark.nightly
def test_paused_watchdog_does_not_interrupt_a_long_save(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    reported = threading.Event()

    def report(watchdog: Watchdog) -> None:
        reported.set()
        watchdog._stopped.set()

    monkeypatch.setattr(Watchdog, "_report", report)
    watchdog = Watchdog(Layout(), Worker(0, 0, 1, 1, tmp_path, "local"), None, 0.2, 600)
    monkeypatch.setattr("parallel3d.faults.watchdog.PAUSED_TIMEOUTS", 1000.0)
    watchdog.pause()
    watchdog.start()
    time.sleep(0.6)
    assert not reported.is_set()
    watchdog.resume()
    assert reported.wait(5 * PATIENCE)
    watchdog.stop()
    # A disk that never answers is noticed at last, since nothing is computed for a long time.
    reported.clear()
    monkeypatch.setattr("parallel3d.faults.watchdog.PAUSED_TIMEOUTS", 3.0)
    paused = Watchdog(Layout(), Worker(0, 0, 1, 1, tmp_path, "local"), None, 0.2, 0.5)
    paused.pause()
    paused.start()
    assert reported.wait(5 * PATIENCE)
    paused.stop()


def _trainer_of(config: Config, *_: object, **__: object) -> Mock:
    cpu = torch.device("cpu")
    return Mock(config=config, length=config.planned_length.after(), steps_done=0, device=cpu)


def test_the_groups_are_closed_under_the_watchdog_and_the_last_save_is_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls = Mock()
    calls.restore.return_value = 1
    monkeypatch.setattr(train, "groups_of_run", lambda *_: calls.groups)
    monkeypatch.setattr(train, "Checkpoints", lambda *_: calls)
    monkeypatch.setattr(train, "start_watchdog", lambda *_: calls.watchdog)
    calls.groups.observed.return_value = calls.groups
    monkeypatch.setattr(train, "all_gather_json", lambda *_: [])
    for name in ("save_weights", "run_steps", "default_hooks", "dist"):
        monkeypatch.setattr(train, name, Mock())
    corpus = Mock(train_tokens=2, valid_tokens=1)
    monkeypatch.setattr(train, "open_data", lambda data, *_, **__: (data, corpus, {}))
    monkeypatch.setattr(train, "make_trainer", _trainer_of)
    train.train(Config(dp=2), Worker(1, 1, 2, 2, tmp_path, "local"))
    order = [call[0] for call in calls.mock_calls]
    assert [name for name in order if name not in ("restore", "groups.observed")] == [
        "watchdog.resume",  # paused until then
        *("watchdog.pause", "close", "watchdog.resume", "groups.close", "watchdog.stop"),
    ]


def test_a_failing_call_returns_the_agreed_value_and_is_reported(
    capsys: pytest.CaptureFixture,
) -> None:
    def fail() -> int:
        raise ValueError("no number")

    assert within(5.0, fail, 7) == 7
    assert "watchdog: ValueError: no number" in capsys.readouterr().err


# --- stacks ---------------------------------------------------------------------------------------


def test_stack_continues_in_autograds_thread_during_a_backward(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Autograd's threads are not Python's; one of them calls a collective of our package."""
    entered, leave = threading.Event(), threading.Event()

    def in_our_package() -> None:
        within(60.0, lambda: (entered.set(), leave.wait(60)), None)

    _thread.start_new_thread(in_our_package, ())
    assert entered.wait(10)
    try:
        assert not any(name == "within" for _, _, name in work_stack())

        def _engine_run_backward() -> None:
            stack = found(stacks._stack)
            names = [name for _, _, name in stack]
            assert names.index("_engine_run_backward") < names.index("within")

        def found(real):
            """Returns the stack of the main thread at the moment of the call, cut at the
            backward."""

            def cut(frame):
                stack = real(frame)
                names = [name for _, _, name in stack]
                if "_engine_run_backward" in names:
                    stack = stack[: names.index("_engine_run_backward") + 1]
                return stack

            monkeypatch.setattr(stacks, "_stack", cut)
            return work_stack()

        _engine_run_backward()
    finally:
        leave.set()


def test_innermost_call_of_torch_distributed_is_named() -> None:
    inside = "/lib/torch/distributed/distributed_c10d.py"
    stack = [("/ours/train.py", 3, "train"), (inside, 9, "all_reduce"), (inside, 4, "wrapper")]
    assert in_torch_distributed(stack) == "all_reduce"
    assert in_torch_distributed(stack[:1]) == ""


@pytest.mark.parametrize(
    ("compiled", "on_gpu", "rests"),
    [(False, True, True), (True, False, True), (False, False, False)],
)
def test_a_watchdog_rests_where_kernels_are_compiled(
    compiled: bool, on_gpu: bool, rests: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The watchdog is paused in a start's first step and first evaluation, and in no other."""
    seen: list[tuple[str, bool]] = []
    worker = Worker(0, 0, 1, 1, tmp_path, "local")
    worker.watchdog = Watchdog(Layout(), worker, None, 60, 600)

    def look(what: str) -> SimpleNamespace:
        seen.append((what, worker.watchdog._paused))
        number = 3 + sum(what == "step" for what, _ in seen[1:])
        return SimpleNamespace(stop=False, step=number, loss=1.0, terms=None)

    config = Config(dp=1, compile=compiled, train=TrainConfig(steps=6, eval_every=2))
    trainer = SimpleNamespace(
        config=config,
        device=torch.device("cpu"),
        steps_done=2,
        length=config.planned_length.after(),
        train_step=lambda: look("step"),
        score=lambda _: look("evaluation"),
        held_out=Mock(),
        held_out_parts={},
        evaluated_sets={},
        valid_files=(),
        corpus=SimpleNamespace(watched={}),
        step_timer=StepTimer(torch.device("cpu")),
    )
    for module in (run_steps, evaluation):
        monkeypatch.setattr(module, "fuses", lambda device: on_gpu)
    run = RankRun(trainer, worker, None, Mock(), Mock(), first=3, last=6)
    run_steps.run_steps(run, [evaluation.Evaluation(run, DataCheck(run))])
    later = [("step", False), ("step", False), ("evaluation", False)]
    assert seen == [("step", rests), ("step", False), ("evaluation", rests), *later]
