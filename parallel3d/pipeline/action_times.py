"""When a rank of a pipeline computes what in a step, measured."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

from parallel3d.device import accelerator
from parallel3d.schedules.actions import Action

Measured = tuple[str, float, float]  # an action as its words, start and end in seconds


class ActionTimes:
    """Collects the start and end of every computation of one step on this rank.

    On the CPU by its clock. An accelerator's host only queues, so there by events on the stream
    that computes: reading them waits for the device.

    Times count from the making of this object. The ranks of a step begin together, behind the sums
    that end the step before, so that their times can be laid side by side.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.spans: list[tuple[Action, Any, Any]] = []
        self.begin = self._now()

    def _now(self) -> Any:
        if not accelerator.is_accelerator(self.device):
            return time.perf_counter()
        event = accelerator.module(self.device).Event(enable_timing=True)
        event.record(accelerator.module(self.device).current_stream(self.device))
        return event

    @contextmanager
    def within(self, action: Action) -> Iterator[None]:
        """The block computes `action`."""
        start = self._now()
        yield
        self.spans.append((action, start, self._now()))

    def measured(self) -> list[Measured]:
        """All of it in the order of time."""
        if accelerator.is_accelerator(self.device):
            accelerator.synchronize(self.device)
        return [(str(action), self._since(a), self._since(b)) for action, a, b in self.spans]

    def _since(self, instant: Any) -> float:
        if isinstance(instant, float):
            return instant - self.begin
        return 1e-3 * self.begin.elapsed_time(instant)
