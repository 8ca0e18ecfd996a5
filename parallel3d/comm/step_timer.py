"""Divides the time of a step on one rank into eleven kinds, which add up to the whole step.

| kind      | contents                                                                          |
|-----------|-----------------------------------------------------------------------------------|
| forward   | layers and loss, without time of the kinds below within them                      |
| backward  | the same for the backward pass, with weight gradients and recomputation           |
| tp        | tensor-parallel collectives, while this rank waits for them or works on them      |
| cp        | the same for keys and values (or heads) of the sequence's other parts             |
| ep        | the same for tokens on their way to experts of other ranks and back               |
| pp        | messages between stages: posting, copying, and waiting for one in flight          |
| dp        | gradient buckets, and parameters with zero ≥ 1, over the data-parallel group      |
| model     | tied embeddings' gradient over two stages; loss and gradient norm over all ranks  |
| optimizer | clearing gradients, norm, clipping, update, and everything else                   |
| data      | reading micro-batches and moving them to the device                               |
| idle      | waiting for a late rank while nothing is transferred                              |

Only *exposed* communication, hidden by no computation, is counted. Nested times count once, as the
innermost kind: a tensor-parallel wait within a forward is tp.

A wait for a message between stages is pp while the message is in flight, and idle before that. With
shared memory the wait for the sender's signal is idle and the copy is pp. On a network, the latency
of a message between two stages that are both ready is measured once, when the trainer is built
(`pipeline.p2p.measure_baseline_latency`). The part of a wait beyond this baseline is the pipeline
bubble and counts as idle; a later slowdown of the network counts as idle too. All-reduces of a few
numbers at the end of a step are divided in the same way. Collectives over tp and dp count as a
whole, including the wait for a late member, as in figure 6 of Li et al. 2020 (PyTorch Distributed).
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

KINDS = ("forward", "backward", "tp", "cp", "ep", "pp", "dp", "model", "optimizer", "data", "idle")
KIND_OF_GROUP = {kind: kind for kind in ("tp", "cp", "ep", "dp", "pp")}
KIND_OF_GROUP |= dict.fromkeys(("dp_cp", "dp_inner", "dp_outer", "edp"), "dp")
BASE = "optimizer"  # kind of the time that belongs to no other kind
WARMUP_STEPS = 3  # the first steps are slow because of allocators, caches and lazy connections
# On an accelerator one of this many steps is timed. The number is prime, so that work that is done
# in every tenth step is neither always nor never timed.
EVERY = 7

Interval = tuple[str, float]  # a kind, and the seconds beyond which its time is idle


class HostTimes:
    """Measures times with the host's clock, on CPU ranks, where a call returns when it is done."""

    marks_starts = True  # the start of a collective takes time in this thread and may copy

    def __init__(self) -> None:
        self.spent = dict.fromkeys(KINDS, 0.0)
        self.since = 0.0

    def start(self) -> bool:
        """Begins a step and returns whether it is timed, which is always true on a CPU."""
        self.spent = dict.fromkeys(KINDS, 0.0)
        self.since = time.perf_counter()
        return True

    def counts(self) -> bool:
        """Returns whether operations of the calling thread count towards the step's time."""
        return True

    def mark(self, kind: str, idle_beyond: float) -> None:
        now = time.perf_counter()
        _add(self.spent, kind, idle_beyond, now - self.since)
        self.since = now

    def end(self) -> None:
        """Ends the step. There is nothing to do, because its times are already known."""

    def finished(self, wait: bool) -> Iterator[dict[str, float]]:
        """Yields the times of the step that has just ended."""
        yield self.spent


class DeviceTimes:
    """Measures times with events on an accelerator's compute stream.

    The compute stream is the one that is current when a step begins. It waits for a collective's
    stream in the handle's `wait()`, so events before and after that call enclose the exposed time.
    The start of a collective only queues work and has no event. Calls under another current stream
    have no events either: FSDP2 (zero ≥ 2) gathers and reduces on its own streams, so its exposed
    time counts as forward and backward, and dp contains little but the sum of token counts.

    An event costs the host a few microseconds and the stream about one, and a step with tp has
    thousands of events. So only the first `WARMUP_STEPS` steps and then one of `EVERY` are timed.
    The host reads events after the device has passed them, and so never waits for them.
    """

    marks_starts = False

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.api = accelerator.module(device)
        self.stream: Any = None
        self.number = 0  # steps begun so far
        self.free: list[Any] = []  # events
        self.marks: list[tuple[Any, Interval]] = []
        self.steps: deque[list[tuple[Any, Interval]]] = deque()

    def _event(self) -> Any:
        event = self.free.pop() if self.free else self.api.Event(enable_timing=True)
        event.record(self.stream)
        return event

    def start(self) -> bool:
        self.number += 1
        later = self.number - WARMUP_STEPS - 1
        if later >= 0 and later % EVERY:
            return False
        self.stream = self.api.current_stream(self.device)
        self.marks = [(self._event(), (BASE, torch.inf))]
        return True

    def counts(self) -> bool:
        """Returns whether the calling thread (it may be autograd's) uses the compute stream."""
        return self.api.current_stream(self.device) == self.stream

    def mark(self, kind: str, idle_beyond: float) -> None:
        self.marks.append((self._event(), (kind, idle_beyond)))

    def end(self) -> None:
        self.steps.append(self.marks)

    def finished(self, wait: bool) -> Iterator[dict[str, float]]:
        """Yields times of the steps that the device has completed, or of all steps with `wait`."""
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
    """Times the kinds of work in each step of one trainer.

    Args:
        device: the compute device; None means the CPU. See `DeviceTimes` for accelerators.

    Attributes:
        baseline_latency: name of a group → seconds that its smallest all-reduce (for pp a message
            between stages) takes when no rank is late. Without an entry no wait counts as idle.
        last: kind → seconds of the step whose times became known when the latest step ended. On an
            accelerator this is an earlier step. It is None if no times became known.
        ranges: a profiler's ranges, which are opened and closed with every kind; None without a
            profiler.
    """

    def __init__(self, device: torch.device | None = None) -> None:
        self.times: HostTimes | DeviceTimes = HostTimes()
        if device is not None and accelerator.is_accelerator(device):
            self.times = DeviceTimes(device)
        self.baseline_latency: dict[str, float] = {}
        self.last: dict[str, float] | None = None
        self.running = False
        self.ranges: Ranges | None = None
        self._stack: list[str] = []
        self._steps = 0  # steps in `_sums`, which is cleared at the end of the warm-up
        self._sums = dict.fromkeys(KINDS, 0.0)
        self._is_warm = False

    def start_step(self) -> None:
        self._stack = [BASE]
        self.running = self.times.start()

    def end_step(self) -> None:
        """Ends a step. Its times are known now or after the end of a later step: see `last`."""
        if self.running:
            self.times.mark(BASE, torch.inf)
            self.times.end()
        self.running = False
        self.last = None
        self._take(wait=False)

    def _take(self, wait: bool) -> None:
        for spent in self.times.finished(wait):
            self.last = spent
            if self._steps == WARMUP_STEPS and not self._is_warm:
                self._is_warm = True
                self._steps = 0
                self._sums = dict.fromkeys(KINDS, 0.0)
            self._steps += 1
            for kind, seconds in spent.items():
                self._sums[kind] += seconds

    def push(self, kind: str, name: str | None = None) -> None:
        """Starts timing `kind`; a profile shows it as `name`, or as `kind` if `name` is None."""
        if self.ranges is not None:
            self.ranges.push(name or kind)
        if self.running and self.times.counts():
            self.times.mark(self._stack[-1], torch.inf)
            self._stack.append(kind)

    def pop(self, idle_beyond: float = torch.inf) -> None:
        """Stops timing the innermost kind; seconds beyond `idle_beyond` count as idle."""
        if self.running and self.times.counts():
            self.times.mark(self._stack.pop(), idle_beyond)
        if self.ranges is not None:
            self.ranges.pop()

    @contextmanager
    def within(self, kind: str, name: str | None = None) -> Iterator[None]:
        """Counts a `with` block's time as `kind`. An exception invalidates the step's times."""
        self.push(kind, name)
        yield
        self.pop()

    def starting(self, kind: str, name: str | None = None) -> AbstractContextManager[None]:
        """Counts the time of a `with` block that starts communication, except on an accelerator."""
        return self.within(kind, name) if self.times.marks_starts else self.range(name or kind)

    def range(self, name: str) -> AbstractContextManager[None]:
        """Shows a `with` block by name in a profile, without counting its time as a kind."""
        return nullcontext() if self.ranges is None else self.ranges.within(name)

    def means(self) -> dict[str, float]:
        """Returns mean seconds per step by kind, without the warm-up if possible; synchronises."""
        if isinstance(self.times, DeviceTimes):
            self._take(wait=True)
        return {kind: seconds / max(1, self._steps) for kind, seconds in self._sums.items()}
