"""Overlaps the forward of a micro-batch with the backward of the one before.

Both run in turns: each computes until it has to wait for tokens of other ranks, and then the other
one goes on. So the tokens of one are under way while the other computes. It is DualPipe's overlap
(DeepSeek-V3 report, §3.2.1) without its pipeline. The order of all calls depends on the program
alone, so every rank has the same.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

import torch

from parallel3d.device import accelerator


class Turns:
    """Runs two computations of a rank in turns, each on a stream of its own on an accelerator.

    A backward runs on the streams of its forward, so micro-batches use the two streams alternately.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.streams: list[Any] = []
        if accelerator.is_accelerator(device):
            self.streams = [accelerator.module(device).Stream(device) for _ in range(2)]
        self._pool = ThreadPoolExecutor(1, "forward", accelerator.make_current, (device,))
        self._changed = threading.Condition()
        self._running: list[int] = []  # sides that have not ended, while two of them run
        self._turn = 0

    def pass_on(self) -> None:
        """Lets the other computation run until it passes on too, or ends; returns at once if there
        is none.

        It may be called by autograd's own thread, which runs for the side whose turn it is.
        """
        with self._changed:
            if len(self._running) < 2:
                return
            mine = self._turn
            self._turn = 1 - mine
            self._changed.notify_all()
            self._changed.wait_for(lambda: self._turn == mine)

    def run(self, forward: Callable[[], None], backward: Callable[[], None]) -> None:
        """Runs both, the forward first, in a thread of its own. If one raises an exception, the
        other one ends before it is raised here."""
        self._running = [0, 1]
        self._turn = 0
        ahead = self._pool.submit(self._side, 0, forward)
        try:
            self._side(1, backward)
        finally:
            ahead.result()

    def _side(self, side: int, compute: Callable[[], None]) -> None:
        with self._changed:
            self._changed.wait_for(lambda: self._turn == side)
        try:
            compute()
        finally:
            with self._changed:
                self._running.remove(side)
                self._turn = 1 - side
                self._changed.notify_all()

    @contextmanager
    def on_stream_of(self, microbatch: int) -> Iterator[None]:
        """Queues the work of a block on the micro-batch's stream, after all that was queued on the
        current one."""
        if not self.streams:
            yield
            return
        stream = self.streams[microbatch % 2]
        stream.wait_stream(accelerator.module(self.device).current_stream(self.device))
        with accelerator.on_stream(stream):
            yield

    def join(self) -> None:
        """Makes the current stream wait for both."""
        for stream in self.streams:
            accelerator.module(self.device).current_stream(self.device).wait_stream(stream)
