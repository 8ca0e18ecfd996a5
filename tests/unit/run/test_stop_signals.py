"""Tests the effects of signals on a run, one after another."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator

import pytest

from parallel3d.loop.keys import TrainConfig
from parallel3d.run.failure import has_steps
from parallel3d.run.launch import StopSignals, kept_handlers
from parallel3d.run.local_workers import LocalRanks, StopSignal

TERM, INT, HUP = signal.SIGTERM, signal.SIGINT, signal.SIGHUP


@pytest.fixture(autouse=True)
def handlers() -> Iterator[None]:
    with kept_handlers():
        yield


def sent(*numbers: signal.Signals) -> StopSignals:
    stop = StopSignals()
    stop.install()
    for number in numbers:
        os.kill(os.getpid(), number)
    return stop


def test_a_lost_terminal_acts_like_a_preemption() -> None:
    stop = sent(HUP)
    assert (stop.number, stop.requeues, stop.name) == (HUP, True, "SIGHUP")


def test_nohup_is_respected() -> None:
    signal.signal(HUP, signal.SIG_IGN)
    assert sent(HUP).number is None
    assert signal.getsignal(HUP) == signal.SIG_IGN


def test_an_interrupt_after_another_signal_counts_as_the_first_interrupt() -> None:
    stop = sent(TERM, INT)
    assert stop.number == TERM
    with pytest.raises(KeyboardInterrupt):
        os.kill(os.getpid(), INT)


def test_second_interrupt_interrupts() -> None:
    with pytest.raises(KeyboardInterrupt):
        sent(INT, INT)


@pytest.fixture
def launcher(monkeypatch: pytest.MonkeyPatch) -> LocalRanks:
    ranks = LocalRanks(2, lambda rank, starts: 0, grace_s=10)
    ranks.handed_on = []
    monkeypatch.setattr(LocalRanks, "_forward", lambda self, number: self.handed_on.append(number))
    return ranks


def test_launcher_has_its_ranks_save_before_they_end(launcher: LocalRanks) -> None:
    launcher._ask_to_stop(HUP, None)
    assert (launcher.asked, launcher.handed_on) == (HUP, [HUP])


def test_the_launcher_counts_only_interrupts(launcher: LocalRanks) -> None:
    launcher._ask_to_stop(TERM, None)
    launcher._ask_to_stop(INT, None)
    with pytest.raises(StopSignal):
        launcher._ask_to_stop(INT, None)
    assert launcher.handed_on == [TERM, INT]


def test_a_run_that_only_evaluates_ends_at_once() -> None:
    assert has_steps("train", TrainConfig())
    assert not has_steps("train", TrainConfig(eval_only=True))
