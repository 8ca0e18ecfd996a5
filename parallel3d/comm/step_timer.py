"""StepTimer: the time of a step on one rank, in eleven kinds that add up to the step.

| kind      | contents                                                                         |
|-----------|----------------------------------------------------------------------------------|
| forward   | layers and loss, without the kinds below that happen inside                        |
| backward  | the same for the backward pass, with weight gradients and recomputation           |
| tp        | tensor-parallel collectives, as far as this rank waits for them or works on them  |
| cp        | keys and values (or heads) of the sequence's other parts, likewise                |
| ep        | tokens on their way to experts of other ranks and back, likewise                   |
| pp        | messages between stages: posting, copying, and waiting for one in flight          |
| dp        | gradient buckets, and with zero ≥ 1 parameters, over the data-parallel group      |
| model     | the tied embedding's gradient over its stages; loss and gradient norm over all    |
| optimizer | clearing gradients, norm, clipping, update, and everything else                   |
| data      | micro-batches read and moved to the device                                        |
| idle      | waiting for a late rank while nothing is transferred                              |

Only *exposed* communication is counted. Nested times count once, for the innermost kind: a
tensor-parallel wait within a forward is tp.

Idle differs from pp in that no message is in flight: in shared memory the semaphore knows when it
was sent. On a network the baseline latency of a message between two stages that both wait is
measured once, when the trainer is built (`pipeline.p2p.measure_baseline_latency`); the rest of a
longer receive is the pipeline bubble, hence idle (and so is a later slowdown of the network).
All-reduces of a few numbers at the end of a step are split in the same way. Collectives over tp and
dp count as a whole: they include the wait for a late member, as in figure 6 of Li et al. 2020
(PyTorch Distributed).
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
BASE = "optimizer"  # everything that belongs to no other kind
WARMUP_STEPS = 3  # the first steps are slow because of allocators, caches and lazy connections
# On an accelerator one step in this many is timed. It is a prime, so that an event of every tenth
# step is neither always nor never among them.
EVERY = 7

Interval = tuple[str, float]  # kind, and the seconds above which its time is idle


class HostTimes:
    """Times by the host's clock: for CPU ranks, whose operations end when they return."""

    marks_starts = True  # starting a collective is work of this thread and may copy

    def __init__(self) -> None:
        self.spent = dict.fromkeys(KINDS, 0.0)
        self.since = 0.0

    def start(self) -> bool:
        """Returns whether the step that begins is timed: on the CPU every step is."""
        self.spent = dict.fromkeys(KINDS, 0.0)
        self.since = time.perf_counter()
        return True

    def counts(self) -> bool:
        """Returns whether the calling thread's operations take time of the step."""
        return True

    def mark(self, kind: str, idle_beyond: float) -> None:
        now = time.perf_counter()
        _add(self.spent, kind, idle_beyond, now - self.since)
        self.since = now

    def end(self) -> None:
        """Ends the step; nothing is in flight."""

    def finished(self, wait: bool) -> Iterator[dict[str, float]]:
        """Yields the times of the step that has just ended."""
        yield self.spent


class DeviceTimes:
    """Times by events on an accelerator's compute stream, read once the device has passed them.

    The compute stream is the one that is current when a step begins. It waits for a collective's
    stream in the handle's `wait()`, so the events around that call enclose the exposed time; the
    start of a collective only queues and has no mark. Calls under another current stream have no
    mark either: FSDP2 (zero ≥ 2) gathers and reduces on its own streams, so its exposed time counts
    as forward and backward, and dp holds little more than the sum of the tokens.

    A mark costs some microseconds of the host and about one of the stream, and a step with tp has
    thousands. So the first `WARMUP_STEPS` are timed, then one step in `EVERY`. Nothing
    synchronises: a step is read when the next one ends.
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
        """Returns whether the compute stream is current; also works in the thread of a backward."""
        return self.api.current_stream(self.device) == self.stream

    def mark(self, kind: str, idle_beyond: float) -> None:
        self.marks.append((self._event(), (kind, idle_beyond)))

    def end(self) -> None:
        self.steps.append(self.marks)

    def finished(self, wait: bool) -> Iterator[dict[str, float]]:
        """Yields the times of the steps that the device has completed; with `wait`, of all
        steps."""
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
        device: the compute device; the CPU if None. See `DeviceTimes` for accelerators.

    Attributes:
        baseline_latency: group → seconds that its smallest all-reduce, or (pp) a message between
            stages, takes when no rank is late. Without an entry nothing is idle.
        last: seconds by kind of the step that became known when the last one ended (on an
            accelerator the step before it); None if there was none.
        ranges: a profiler's ranges, opened and closed with every kind; None without a profiler.
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
        self._steps = 0  # steps in `_sums`, without the warm-up once there are others
        self._sums = dict.fromkeys(KINDS, 0.0)
        self._is_warm = False

    def start_step(self) -> None:
        self._stack = [BASE]
        self.running = self.times.start()

    def end_step(self) -> None:
        """Ends a step; its times are known now or when a later step ends: see `last`."""
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
        """Begins `kind`, until the matching `pop`; a profile shows it as `name` if given."""
        if self.ranges is not None:
            self.ranges.push(name or kind)
        if self.running and self.times.counts():
            self.times.mark(self._stack[-1], torch.inf)
            self._stack.append(kind)

    def pop(self, idle_beyond: float = torch.inf) -> None:
        """Ends the innermost kind (same stream as its `push`); time above `idle_beyond` is idle."""
        if self.running and self.times.counts():
            self.times.mark(self._stack.pop(), idle_beyond)
        if self.ranges is not None:
            self.ranges.pop()

    @contextmanager
    def within(self, kind: str, name: str | None = None) -> Iterator[None]:
        """Counts a block as `kind`. After an exception the step's times are void."""
        self.push(kind, name)
        yield
        self.pop()

    def starting(self, kind: str, name: str | None = None) -> AbstractContextManager[None]:
        """Counts a block that only starts communication; on an accelerator it takes no time."""
        return self.within(kind, name) if self.times.marks_starts else self.range(name or kind)

    def range(self, name: str) -> AbstractContextManager[None]:
        """Shows a block by name in a profile, without counting it as a kind."""
        return nullcontext() if self.ranges is None else self.ranges.within(name)

    def means(self) -> dict[str, float]:
        """Returns mean seconds per step by kind, without the warm-up if possible; synchronises."""
        if isinstance(self.times, DeviceTimes):
            self._take(wait=True)
        return {kind: seconds / max(1, self._steps) for kind, seconds in self._sums.items()}
