"""Where the time of a step goes on one rank: nine kinds that add up to the step.

| kind      | what it holds                                                                    |
|-----------|----------------------------------------------------------------------------------|
| forward   | the layers and the loss, without anything below that happens inside               |
| backward  | the same of the backward pass, with weight gradients and what is recomputed        |
| tp        | tensor-parallel collectives, as far as this rank waits for them or works on them  |
| pp        | messages between stages: posting, copying, and waiting for one under way          |
| dp        | gradient buckets, and under zero ≥ 1 parameters, over the data-parallel group     |
| model     | the tied embedding's gradient over its stages; loss and gradient norm over all    |
| optimizer | clearing gradients, norm, clipping, update, and what is none of the others        |
| data      | micro-batches read and moved to the device                                        |
| idle      | waiting for a rank that is not there yet where nothing is transferred             |

*Exposed* communication alone is counted: what is hidden behind compute costs no time. A time inside
another counts once, where it is innermost: a tensor-parallel wait within a forward is tp.

Idle, told from communication. A message that its sender has not sent yet cannot be under way, so
waiting for it is idle: that is the pipeline's bubble. Through shared memory the semaphore says when
it was sent. A network does not say, so there the transport is asked once, when the trainer is made,
how long a message of that size takes between two stages that both wait for it (`measure_floors`);
a receive that takes longer was waiting for a late stage, and the rest of its time is idle. (Where
a network slows down later, the excess shows as idle.) Sums of a few numbers, at which the stages
meet at the end of a step, are split in the same way. Collectives over tp and dp count whole: they
include the wait for a late member, as in figure 6 of Li et al. 2020 (PyTorch Distributed).
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from itertools import pairwise
from typing import Any

import torch

from parallel3d.device import accelerator
from parallel3d.device.accelerator import Ranges

KINDS = ("forward", "backward", "tp", "pp", "dp", "model", "optimizer", "data", "idle")
OF_GROUP = {"tp": "tp", "dp": "dp", "dp_inner": "dp", "dp_outer": "dp", "pp": "pp"}
BASE = "optimizer"  # what a step does outside of every other kind
WARMUP_STEPS = 3  # slow for reasons of their own: allocators, caches, lazy connections
# On an accelerator, of so many steps one is looked at. A prime: what comes every tenth step is
# neither always among them nor never.
EVERY = 7

Interval = tuple[str, float]  # kind, and the seconds beyond which it is idle


class HostTimes:
    """Instants of the host's clock: for CPU ranks, whose operations end when they return."""

    marks_starts = True  # starting a collective is work of this thread, and may copy

    def __init__(self) -> None:
        self.spent = dict.fromkeys(KINDS, 0.0)
        self.since = 0.0

    def start(self) -> bool:
        """Whether the step that begins is marked: every one is."""
        self.spent = dict.fromkeys(KINDS, 0.0)
        self.since = time.perf_counter()
        return True

    def counts(self) -> bool:
        """Whether what happens now takes the time of a step."""
        return True

    def mark(self, kind: str, idle_beyond: float) -> None:
        """What passed since the last mark was `kind`."""
        now = time.perf_counter()
        _add(self.spent, kind, idle_beyond, now - self.since)
        self.since = now

    def end(self) -> None:
        """Nothing is under way."""

    def finished(self, wait: bool) -> Iterator[dict[str, float]]:
        """The step that has just ended."""
        yield self.spent


class DeviceTimes:
    """Instants as events on an accelerator's compute stream, read once the device has passed them.

    The compute stream is the one that is current where a step begins. It waits for a collective's
    stream where the host calls `wait()`, so the time between the events around that call is what
    the collective is exposed for; its start only queues, and has no mark. Nor has what is called
    while another stream is current: FSDP2 (zero ≥ 2) gathers and reduces on streams of its own and
    makes the compute stream wait for them by itself. What is exposed of that stands under forward
    and backward there, and dp holds little more than the sum of the tokens.

    The price: two marks a collective, each an event to record, to pass and to read, some
    microseconds of the host and about one of the stream: thousands in a step with tp. So it is
    paid in the first `WARMUP_STEPS` and from then on in one step of `EVERY`. Nothing synchronises:
    a step is read when the next one ends, whose optimizer the device then still has to do.
    """

    marks_starts = False

    def __init__(self, device: torch.device) -> None:
        self.device, self.api = device, accelerator.module(device)
        self.stream: Any = None
        self.number = 0  # of steps begun
        self.free: list[Any] = []  # events
        self.marks: list[tuple[Any, Interval]] = []
        self.steps: deque[list[tuple[Any, Interval]]] = deque()

    def _event(self) -> Any:
        event = self.free.pop() if self.free else self.api.Event(enable_timing=True)
        event.record(self.stream)
        return event

    def start(self) -> bool:
        """Whether the step that begins is marked."""
        self.number += 1
        later = self.number - WARMUP_STEPS - 1
        if later >= 0 and later % EVERY:
            return False
        self.stream = self.api.current_stream(self.device)
        self.marks = [(self._event(), (BASE, torch.inf))]
        return True

    def counts(self) -> bool:
        """Whether the compute stream is current, also in the thread of a backward."""
        return self.api.current_stream(self.device) == self.stream

    def mark(self, kind: str, idle_beyond: float) -> None:
        """What the compute stream does between the last mark and this one is `kind`."""
        self.marks.append((self._event(), (kind, idle_beyond)))

    def end(self) -> None:
        """The step's marks are all queued."""
        self.steps.append(self.marks)

    def finished(self, wait: bool) -> Iterator[dict[str, float]]:
        """The steps that the device has left behind; with `wait` all of them."""
        while self.steps and (wait or self.steps[0][-1][0].query()):
            marks = self.steps.popleft()
            if wait:
                marks[-1][0].synchronize()
            spent = dict.fromkeys(KINDS, 0.0)
            for (before, _), (after, interval) in pairwise(marks):
                _add(spent, *interval, 1e-3 * before.elapsed_time(after))
            self.free += [event for event, _ in marks]
            yield spent


def _add(spent: dict[str, float], kind: str, idle_beyond: float, seconds: float) -> None:
    if seconds > idle_beyond:
        spent["idle"] += seconds - idle_beyond
        seconds = idle_beyond
    spent[kind] += seconds


class StepTimer:
    """Says of every moment of a step what this rank does; one of a trainer, handed to its parts.

    Args:
        device: what computes; the CPU if None. On an accelerator not every step is looked at (see
            `DeviceTimes`).

    Attributes:
        floors: group → seconds that its smallest collective, or (pp) a message between stages,
            takes when all are there; see the module's docstring. Without an entry nothing is idle.
        last: seconds by kind of the step that became known as the last one ended, None if none
            did. On the CPU that is the step itself, on an accelerator the one before it.
        ranges: while this rank is profiled, opened and closed with every kind; else None.
    """

    def __init__(self, device: torch.device | None = None) -> None:
        on_device = device is not None and accelerator.is_accelerator(device)
        self.times = DeviceTimes(device) if on_device else HostTimes()
        self.floors: dict[str, float] = {}
        self.last: dict[str, float] | None = None
        self.running = False
        self.ranges: Ranges | None = None
        self._stack: list[str] = []
        self._first: list[dict[str, float]] = []
        self._sum = dict.fromkeys(KINDS, 0.0)
        self._steps = 0

    def start_step(self) -> None:
        """From here to `end_step` every moment is counted, if this step is."""
        self._stack = [BASE]
        self.running = self.times.start()

    def end_step(self) -> None:
        """What the step went into is known now or when a later one ends: see `last`."""
        if self.running:
            self.times.mark(BASE, torch.inf)
            self.times.end()
        self.running, self.last = False, None
        self._take(wait=False)

    def _take(self, wait: bool) -> None:
        for spent in self.times.finished(wait):
            self.last = spent
            if len(self._first) < WARMUP_STEPS:
                self._first.append(spent)
                continue
            self._steps += 1
            for kind, seconds in spent.items():
                self._sum[kind] += seconds

    def push(self, kind: str, name: str | None = None) -> None:
        """From here to its `pop` the rank does `kind`. Outside of a step nothing is counted.

        A profile calls it `name`, without one `kind`.
        """
        if self.ranges is not None:
            self.ranges.push(name or kind)
        if self.running and self.times.counts():
            self.times.mark(self._stack[-1], torch.inf)
            self._stack.append(kind)

    def pop(self, idle_beyond: float = torch.inf) -> None:
        """Ends the innermost kind; its time since the last change beyond `idle_beyond` is idle.

        With the same stream current as at its `push`.
        """
        if self.running and self.times.counts():
            self.times.mark(self._stack.pop(), idle_beyond)
        if self.ranges is not None:
            self.ranges.pop()

    @contextmanager
    def within(self, kind: str, name: str | None = None) -> Iterator[None]:
        """`push` and `pop` around a block. (An exception ends the step, and with it its times.)"""
        self.push(kind, name)
        yield
        self.pop()

    def starting(self, kind: str, name: str | None = None) -> AbstractContextManager[None]:
        """`within` around what only starts a communication: on an accelerator it takes no time."""
        return self.within(kind, name) if self.times.marks_starts else self.range(name or kind)

    def range(self, name: str) -> AbstractContextManager[None]:
        """Around a block that a profile shows by name and that is no kind of its own."""
        return nullcontext() if self.ranges is None else self.ranges.within(name)

    def means(self) -> dict[str, float]:
        """Seconds a step by kind, without the first `WARMUP_STEPS` where there are more.

        Waits for the device. All zero before the first step.
        """
        if isinstance(self.times, DeviceTimes):
            self._take(wait=True)
        if self._steps:
            return {kind: self._sum[kind] / self._steps for kind in KINDS}
        count = max(1, len(self._first))
        return {kind: sum(step[kind] for step in self._first) / count for kind in KINDS}
