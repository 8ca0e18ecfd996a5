"""Tests ranks that a launcher forks: how they begin, and all the ways in which they end."""

from __future__ import annotations

import json
import os
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch

from parallel3d.run import local_workers
from parallel3d.run import local_workers as local_ranks
from parallel3d.run.failure import END_SIGNAL
from parallel3d.run.launch import STOPPING, StopSignals, kept_handlers
from parallel3d.run.local_workers import SIGNALS, LocalRanks, StopSignal


@pytest.fixture(autouse=True)
def handlers() -> Iterator[None]:
    with kept_handlers(SIGNALS):
        yield


def sleep_for_long(rank: int, starts: int) -> int:
    time.sleep(600)
    return 0


@pytest.mark.slow
def test_successful_ranks_are_not_failures() -> None:
    assert LocalRanks(3, lambda rank, starts: 0).run() == {}


@pytest.mark.parametrize("wanted", [{"OMP_NUM_THREADS": "3"}, {}])
def test_a_rank_has_the_threads_of_its_own_job(wanted: dict[str, str]) -> None:
    """Tests that the number is set although torch has read the variable for another job of the
    sweep."""

    def live(rank: int, starts: int) -> int:
        local_workers._set_threads(wanted)
        return torch.get_num_threads()

    assert LocalRanks(1, live).run() == {0: 3 if wanted else torch.get_num_threads()}


@pytest.mark.slow
def test_a_start_is_reported_once_all_ranks_have_joined() -> None:
    told = []
    again = iter((True, False))
    ranks = LocalRanks(2, lambda rank, starts: 1, should_restart=lambda exits, _: next(again))
    ranks.run(lambda: told.append(len([process.pid for process in ranks.ranks])))
    assert told == [2]


@pytest.mark.slow
def test_a_failed_rank_ends_the_others_and_is_the_only_failure() -> None:
    ranks = LocalRanks(3, lambda rank, starts: 5 if rank == 1 else sleep_for_long(rank, starts))
    assert ranks.run() == {1: 5}
    assert [process.exitcode for process in ranks.ranks] == [-END_SIGNAL, 5, -END_SIGNAL]


def test_a_rank_that_does_not_end_is_killed(monkeypatch: pytest.MonkeyPatch) -> None:
    def deaf(rank: int, starts: int) -> int:
        if rank == 1:
            time.sleep(0.5)
            return 5
        signal.signal(END_SIGNAL, signal.SIG_IGN)
        return sleep_for_long(rank, starts)

    monkeypatch.setattr(local_ranks, "GRACE_S", 0.2)
    ranks = LocalRanks(2, deaf)
    assert ranks.run() == {1: 5}
    assert ranks.ranks[0].exitcode == -signal.SIGKILL


@pytest.mark.slow
def test_ranks_are_restarted_as_often_as_decided(tmp_path: Path) -> None:
    def live(rank: int, starts: int) -> int:
        (tmp_path / f"{rank}.{starts}").touch()
        return 7 if rank == 0 and starts < 2 else 0

    seen: list[dict[int, int]] = []
    ranks = LocalRanks(
        2, live, grace_s=10, should_restart=lambda e, _: seen.append(e) or len(seen) < 3
    )
    assert ranks.run() == {}
    assert seen == [{0: 7}, {0: 7}]
    assert (tmp_path / "0.2").exists()


def once_there(flag: Path, number: int) -> Callable[[], None]:
    """Sends this process, the launcher, a signal when the ranks wait."""

    def send() -> None:
        while not flag.exists():
            time.sleep(0.01)
        os.kill(os.getpid(), number)

    return send


def test_a_signal_ends_ranks_that_cannot_stop(tmp_path: Path) -> None:
    def live(rank: int, starts: int) -> int:
        (tmp_path / "there").touch()
        return sleep_for_long(rank, starts)

    ranks = LocalRanks(1, live)
    with pytest.raises(StopSignal) as stopped:
        ranks.run(once_there(tmp_path / "there", signal.SIGTERM))
    assert stopped.value.signal == signal.SIGTERM
    assert ranks.ranks[0].exitcode == -END_SIGNAL


def test_ranks_that_can_stop_are_asked_to_and_not_restarted(tmp_path: Path) -> None:
    def live(rank: int, starts: int) -> int:
        stop = StopSignals()
        stop.install()
        (tmp_path / "there").touch()
        while stop.number is None:
            time.sleep(0.01)
        return 9 if stop.number == signal.SIGUSR1 else 1

    ranks = LocalRanks(1, live, grace_s=60, should_restart=lambda *_: True)
    assert ranks.run(once_there(tmp_path / "there", signal.SIGUSR1)) == {0: 9}
    assert ranks.asked == signal.SIGUSR1


def test_ranks_that_do_not_stop_in_time_are_killed(tmp_path: Path) -> None:
    def live(rank: int, starts: int) -> int:
        StopSignals().install()
        (tmp_path / "there").touch()
        return sleep_for_long(rank, starts)

    ranks = LocalRanks(1, live, grace_s=0.2)
    with pytest.raises(StopSignal):
        ranks.run(once_there(tmp_path / "there", signal.SIGTERM))
    assert ranks.is_late()


def test_a_rank_begins_with_default_handlers_and_its_own_session(tmp_path: Path) -> None:
    def live(rank: int, starts: int) -> int:
        defaults = [signal.getsignal(number) == signal.SIG_DFL for number in SIGNALS]
        blocked = signal.pthread_sigmask(signal.SIG_BLOCK, ())
        said = {"defaults": all(defaults), "blocked": sorted(blocked), "leads": os.getsid(0)}
        (tmp_path / str(starts)).write_text(json.dumps(said | {"pid": os.getpid()}))
        return 1

    LocalRanks(1, live, grace_s=1, should_restart=lambda *_: not (tmp_path / "1").exists()).run()
    for starts in range(2):  # also in a launcher that has handlers
        said = json.loads((tmp_path / str(starts)).read_text())
        assert said["defaults"] and said["leads"] == said["pid"]
        assert said["blocked"] == sorted(STOPPING)
