"""Tests of two computations that run in turns."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import Future

import pytest
import torch

from parallel3d.comm.batch_overlap import BatchOverlap

CPU = torch.device("cpu")
HANGS_S = 20.0  # these computations take a few milliseconds
Compute = Callable[[], None]


def run(overlap: BatchOverlap, forward: Compute, backward: Compute) -> None:
    """Runs both computations of a pair, and fails if neither continues.

    It then ends the threads that wait for each other, as Python would wait for them at its own end.
    """
    result: Future[None] = Future()

    def pair() -> None:
        try:
            result.set_result(overlap.run(forward, backward))
        except BaseException as error:
            result.set_exception(error)

    thread = threading.Thread(target=pair, daemon=True)
    thread.start()
    thread.join(HANGS_S)
    hangs = thread.is_alive()
    for _ in range(100 * hangs):
        with overlap._changed:
            overlap._failed = overlap._failed or TimeoutError()
            overlap._turn = 1 - overlap._turn
            overlap._changed.notify_all()
        thread.join(0.1)
    assert not hangs, "both computations wait for their turn"
    result.result()


def logged(overlap: BatchOverlap, name: str, waits: int, log: list[str]) -> Compute:
    """Returns a computation that waits so many times for other ranks."""

    def compute() -> None:
        for step in range(waits + 1):
            log.append(f"{name}{step}")
            if step < waits:
                overlap.yield_()

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
    overlap = BatchOverlap(CPU)
    log: list[str] = []
    for _ in range(3):  # every pair of a step uses the same thread
        run(overlap, logged(overlap, "F", forward, log), logged(overlap, "B", backward, log))
    assert log == 3 * expected.split()


def test_a_computation_alone_does_not_wait() -> None:
    overlap = BatchOverlap(CPU)
    overlap.yield_()
    log: list[str] = []
    run(overlap, logged(overlap, "F", 1, log), logged(overlap, "B", 0, log))
    overlap.yield_()
    assert log == ["F0", "B0", "F1"]


def test_another_thread_passes_on_for_the_side_that_it_computes_for() -> None:
    """On an accelerator a backward runs in a thread of autograd's."""
    overlap = BatchOverlap(CPU)
    log: list[str] = []

    def backward() -> None:
        engine = threading.Thread(target=logged(overlap, "B", 2, log))
        engine.start()
        engine.join()

    run(overlap, logged(overlap, "F", 2, log), backward)
    assert log == ["F0", "B0", "F1", "B1", "F2", "B2"]


@pytest.mark.parametrize("fails", ["forward", "backward"])
def test_an_exception_ends_the_other_one_where_it_would_wait(fails: str) -> None:
    overlap = BatchOverlap(CPU)
    log: list[str] = []

    def failing() -> None:
        overlap.yield_()
        raise FileNotFoundError(fails)

    sound = logged(overlap, "S", 3, log)
    both = (failing, sound) if fails == "forward" else (sound, failing)
    with pytest.raises(FileNotFoundError, match=fails):
        run(overlap, *both)
    assert log == (["S0"] if fails == "forward" else ["S0", "S1"])
    run(overlap, logged(overlap, "F", 1, log), logged(overlap, "B", 1, log))
    assert log[-4:] == ["F0", "B0", "F1", "B1"]


def test_an_interrupt_ends_both() -> None:
    overlap = BatchOverlap(CPU)
    begun = threading.Event()

    def forward() -> None:
        begun.set()
        overlap.yield_()

    def interrupted() -> None:
        assert begun.wait(10)
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        run(overlap, forward, interrupted)
