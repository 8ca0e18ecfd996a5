"""Calls that may take too long, or fail, where nobody could wait for them or hear of it."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TypeVar

from parallel3d.errors import print_line

T = TypeVar("T")


def within(seconds: float, call: Callable[[], T], otherwise: T) -> T:
    """What `call` gives, or `otherwise` if it fails or takes too long.

    A store whose process is stopped keeps its client waiting for ever, whatever its time-out.
    """
    answers: list[T] = []

    def run() -> None:
        try:
            answers.append(call())
        except RuntimeError:
            return  # the store is gone
        except Exception as error:
            print_line(f"watchdog: {type(error).__name__}: {error}")

    started(run).join(seconds)
    return answers[0] if answers else otherwise


@contextmanager
def or_end(seconds: float, sentence: str) -> Iterator[None]:
    """Ends the process with `sentence` and code 1 if the block takes longer.

    A call to a file system whose server is gone comes back to nobody: no exception ends it.
    """

    def end() -> None:
        print_line(sentence)
        os._exit(1)

    timer = threading.Timer(seconds, end)
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()


def started(call: Callable[[], object]) -> threading.Thread:
    """A thread that does not keep the process."""
    thread = threading.Thread(target=call, daemon=True)
    thread.start()
    return thread


def until(condition: Callable[[], bool], seconds: float) -> None:
    """Returns when `condition` holds, or the time is over."""
    deadline = time.monotonic() + seconds
    while not condition() and time.monotonic() < deadline:
        time.sleep(0.05)
