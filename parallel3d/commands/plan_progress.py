"""How far a search has come, on stderr: a line that is written over on a terminal, else one in a
log now and then."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from types import TracebackType
from typing import TextIO

IN_LOG_S, ON_TERMINAL_S = 10.0, 0.2  # seconds between what is told


class SearchProgress:
    """Tells the latest of what it is called with, if enough time has gone by.

    Nothing is said in a log before `IN_LOG_S` seconds: most searches have ended by then.
    """

    def __init__(
        self, stream: TextIO | None = None, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self.stream = sys.stderr if stream is None else stream  # None itself: stderr is closed
        self.clock = clock
        self.on_terminal = self.stream is not None and self.stream.isatty()
        self.every = ON_TERMINAL_S if self.on_terminal else IN_LOG_S
        self.next, self.told = clock() + self.every, False

    def __call__(self, where: str) -> None:
        if self.stream is None or self.clock() < self.next:
            return
        self.next, self.told = self.clock() + self.every, True
        start, end = ("\r\x1b[K", "") if self.on_terminal else ("", "\n")
        print(f"{start}plan: {where} …", end=end, file=self.stream, flush=True)

    def at(self, nodes: int) -> Callable[[str], None]:
        """The same for what is looked at on so many nodes."""
        return lambda where: self(f"does it fit cluster.nodes={nodes}: {where}")

    def __enter__(self) -> SearchProgress:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self.told and self.on_terminal:
            print("\r\x1b[K", end="", file=self.stream, flush=True)
