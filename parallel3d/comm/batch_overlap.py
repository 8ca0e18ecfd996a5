"""Overlaps the forward of a micro-batch with the backward of the previous one.

The two take turns: the forward computes until it has to wait for tokens of other ranks, then the
backward continues until it has to wait, and so on. Thus the tokens of one computation travel while
the other computes. This is DualPipe's overlap (DeepSeek-V3 report, §3.2.1) without its pipeline.
The order of all calls depends only on the program, so it is the same on every rank.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

import torch

from parallel3d.device import accelerator


class OtherFailed(RuntimeError):
    """Raised in a computation if the one that takes turns with it has failed."""


class BatchOverlap:
    """Lets two computations of a rank take turns; on an accelerator each has its own stream.

    Autograd runs a backward on the stream of its forward, so successive micro-batches use the two
    streams alternately.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.streams: list[Any] = []
        if accelerator.is_accelerator(device):
            self.streams = [accelerator.module(device).Stream(device) for _ in range(2)]
        self._pool = ThreadPoolExecutor(1, "forward", accelerator.make_current, (device,))
        self._changed = threading.Condition()
        self._running: list[int] = []  # computations (0, 1) of `run` that have not ended
        self._turn = 0
        self._failed: BaseException | None = None  # the first exception of either computation

    def yield_(self) -> None:
        """Lets the other computation run until it calls `yield_` itself or ends.

        Returns at once if no other computation runs. Autograd's own thread may call this too, for
        the computation whose turn it is. Raises OtherFailed if the other computation has failed,
        because other ranks expect the exchanges of both in a fixed order.
        """
        with self._changed:
            if self._failed is not None:
                raise OtherFailed("the micro-batch beside this one has failed") from self._failed
            if len(self._running) < 2:
                return
            mine = self._turn
            self._turn = 1 - mine
            self._changed.notify_all()
            self._changed.wait_for(lambda: self._turn == mine)
            if self._failed is not None:
                raise OtherFailed("the micro-batch beside this one has failed") from self._failed

    def run(self, forward: Callable[[], None], backward: Callable[[], None]) -> None:
        """Lets both computations take turns; the forward begins, in a second thread.

        An exception in either one ends the other at its next `yield_`, and is raised here.
        """
        self._running = [0, 1]
        self._turn = 0
        self._failed = None
        ahead = self._pool.submit(self._side, 0, forward)
        try:
            self._side(1, backward)
        finally:
            failure = ahead.exception()
            first, self._failed = self._failed, None
            if first is not None and failure is first:
                raise first

    def _side(self, side: int, compute: Callable[[], None]) -> None:
        try:
            with self._changed:
                self._changed.wait_for(lambda: self._turn == side)
            compute()
        except BaseException as error:
            self._failed = self._failed or error
            raise
        finally:
            with self._changed:
                self._running.remove(side)
                self._turn = 1 - side
                self._changed.notify_all()

    @contextmanager
    def on_stream_of(self, microbatch: int) -> Iterator[None]:
        """Queues the work of a `with` block on the stream of a micro-batch.

        The work begins after everything that is already queued on the current stream. Afterwards
        the current stream waits for the work.
        """
        if not self.streams:
            yield
            return
        stream = self.streams[microbatch % 2]
        stream.wait_stream(accelerator.module(self.device).current_stream(self.device))
        with accelerator.on_stream(stream):
            yield
        accelerator.module(self.device).current_stream(self.device).wait_stream(stream)

    def join(self) -> None:
        """Makes the current stream wait for the streams of both computations."""
        for stream in self.streams:
            accelerator.module(self.device).current_stream(self.device).wait_stream(stream)
