"""Tests of two computations that run in turns."""

from __future__ import annotations

import threading
from collections.abc import Callable

import pytest
import torch

from parallel3d.comm.turns import Turns

CPU = torch.device("cpu")


def logged(turns: Turns, name: str, waits: int, log: list[str]) -> Callable[[], None]:
    """Returns a computation that waits so many times for other ranks."""

    def compute() -> None:
        for step in range(waits + 1):
            log.append(f"{name}{step}")
            if step < waits:
                turns.pass_on()

    return compute


@pytest.mark.parametrize(
    ("forward", "backward", "expected"),
    [
        (2, 2, "F0 B0 F1 B1 F2 B2"),
        (0, 2, "F0 B0 B1 B2"),  # nothing to pass on to after the forward has ended
        (3, 1, "F0 B0 F1 B1 F2 F3"),
        (0, 0, "F0 B0"),
    ],
)
def test_each_runs_until_it_waits(forward: int, backward: int, expected: str) -> None:
    turns = Turns(CPU)
    log: list[str] = []
    for _ in range(3):  # every pair of a step uses the same thread
        turns.run(logged(turns, "F", forward, log), logged(turns, "B", backward, log))
    assert log == 3 * expected.split()


def test_a_computation_alone_does_not_wait() -> None:
    turns = Turns(CPU)
    turns.pass_on()
    log: list[str] = []
    turns.run(logged(turns, "F", 1, log), logged(turns, "B", 0, log))
    turns.pass_on()
    assert log == ["F0", "B0", "F1"]


def test_another_thread_passes_on_for_the_side_that_it_computes_for() -> None:
    """On an accelerator a backward runs in a thread of autograd's."""
    turns = Turns(CPU)
    log: list[str] = []

    def backward() -> None:
        engine = threading.Thread(target=logged(turns, "B", 2, log))
        engine.start()
        engine.join()

    turns.run(logged(turns, "F", 2, log), backward)
    assert log == ["F0", "B0", "F1", "B1", "F2", "B2"]


@pytest.mark.parametrize("fails", ["forward", "backward"])
def test_an_exception_ends_the_other_one_where_it_would_wait(fails: str) -> None:
    turns = Turns(CPU)
    log: list[str] = []

    def failing() -> None:
        turns.pass_on()
        raise FileNotFoundError(fails)

    sound = logged(turns, "S", 3, log)
    both = (failing, sound) if fails == "forward" else (sound, failing)
    with pytest.raises(FileNotFoundError, match=fails):
        turns.run(*both)
    assert log == (["S0"] if fails == "forward" else ["S0", "S1"])
    turns.run(logged(turns, "F", 1, log), logged(turns, "B", 1, log))
    assert log[-4:] == ["F0", "B0", "F1", "B1"]


def test_an_interrupt_ends_both() -> None:
    turns = Turns(CPU)
    begun = threading.Event()

    def forward() -> None:
        begun.set()
        turns.pass_on()

    def interrupted() -> None:
        assert begun.wait(10)
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        turns.run(forward, interrupted)
