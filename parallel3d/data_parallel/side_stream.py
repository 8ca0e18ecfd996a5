"""Sums of several phases, all of them beside the backward pass."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from parallel3d.comm.collectives import Work
from parallel3d.device import accelerator


class SideStream:
    """Queues every phase of a bucket's sum on an accelerator as soon as the bucket is full.

    A phase waits for the collective of the one before. On the stream that computes, that would
    hold up the backward, so there the later phases would have to come after it, where nothing
    hides them. On a stream of their own only that stream waits, and the compute stream waits for
    it once, when the step needs the sums. One bucket follows the other on it, in the same order on
    every rank.

    Lifetimes. What the phases make is allocated on the side stream, and reused there after them.
    What they read or write of the compute stream's memory must not be freed before that stream
    has waited: the bucket's buffer lives on, and a phase that drops anything else of it (a matrix
    that it replaces) keeps it in its handle, which is held until then.
    """

    def __init__(self) -> None:
        self.stream: Any = None

    def run(self, tensor: Tensor, start: Callable[[], Work]) -> Work:
        """Queues `start()` and the wait for what it returns, the other phases in it.

        Args:
            tensor: the bucket, complete on the stream that calls.
        """
        module = accelerator.module(tensor.device)
        if self.stream is None:
            self.stream = module.Stream(device=tensor.device)
        self.stream.wait_stream(module.current_stream(tensor.device))
        with accelerator.on_stream(self.stream):
            work = start()
            work.wait()
        return _Queued(tensor, self.stream.record_event(), work)


@dataclass
class _Queued:
    tensor: Tensor
    done: Any
    kept: Work | None

    def wait(self) -> None:
        """Orders the current stream behind the sum; the host goes on."""
        device = self.tensor.device
        accelerator.module(device).current_stream(device).wait_event(self.done)
        self.kept = None
