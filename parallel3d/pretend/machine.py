"""What a process knows of its pretended devices: streams, events, memory, and what runs on them.

Kernels run at once, on the host. What a device would do later is kept as bookkeeping: which stream
a kernel is on and what orders it (`races.py`), which block of memory a tensor has, and which copies
to the host have not been waited for. Observers are told of everything; `dryrun` is one.
"""

from __future__ import annotations

import threading
import warnings
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import count
from typing import Any

import torch
from torch import Tensor

from parallel3d.pretend.races import AllocatorBlock, Races, Range, place
from parallel3d.pretend.records import (
    Fused,
    Kernel,
    Left,
    Observer,
    PendingKernel,
    StorageMemory,
    Usage,
    Use,
)

DEVICES = 8
ROUNDING = 512  # bytes: blocks of the allocator are multiples
PROTOTYPE = (
    "Synchronization debug mode is a prototype feature and does not yet detect all synchronizing "
    "operations"
)
SYNCHRONIZING = "called a synchronizing CUDA operation"
FIRST_SIDE_STREAM = 100  # numbers below are the devices' default streams


class _Thread(threading.local):
    """The current device of a thread, and its current stream on each; a new one begins at 0.

    Autograd's own threads, which Python did not start, are on the main thread's device (None).
    """

    def __init__(self) -> None:
        is_autograds = isinstance(threading.current_thread(), threading._DummyThread)
        self.device: int | None = None if is_autograds else 0
        self.streams: dict[int, int] = {}
        self.fused: Fused | None = None


@dataclass
class SimulatedMachine:
    """The devices of one process.

    Args:
        data: where the values of tensors are: "cpu", or "meta" for none.
        checks_races: False saves the time.

    Attributes:
        touched: devices on which this process has a context, as `set_device` or a stream makes one.
        host_waits: how often the host waited for a device.
        sync_debug_mode: of `torch.cuda.set_sync_debug_mode`: 0 is silent, 1 warns, 2 raises.
        special: operators that are more than a kernel → what runs them.
        kept: what is undone where it is let go (libraries of operators).
    """

    data: str = "cpu"
    checks_races: bool = True
    races: Races = field(default_factory=Races)
    observers: list[Observer] = field(default_factory=list)
    touched: set[int] = field(default_factory=set)
    host_waits: int = 0
    sync_debug_mode: int = 0
    is_prototype_told: bool = False
    usage: list[Usage] = field(default_factory=lambda: [Usage() for _ in range(DEVICES)])
    special: dict[Any, Callable[..., Any]] = field(default_factory=dict)
    kept: list[Any] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.lock = threading.RLock()
        self._of_main = 0
        self.thread = _Thread()
        self._freed: deque[Left] = deque()
        self.dropped_events: deque[int] = deque()  # filled by whatever thread drops one
        self._pools: dict[tuple[int, int], list[AllocatorBlock]] = {}
        self._pending: list[PendingKernel] = []
        self._numbers = count(FIRST_SIDE_STREAM)
        self._events = count(1)
        for device in range(1, DEVICES):
            self.races.syncs.create_stream(device)

    # --- devices and streams -------------------------------------------------------------------

    @property
    def device(self) -> int:
        own = self.thread.device
        return self._of_main if own is None else own

    def set_device(self, device: int) -> None:
        """Raises RuntimeError for a device that is not there."""
        if not 0 <= device < DEVICES:
            raise RuntimeError(f"invalid device ordinal {device}: there are {DEVICES} devices")
        self.thread.device = device
        if threading.current_thread() is threading.main_thread():
            self._of_main = device
        self.touched.add(device)

    def stream_of(self, device: int | None = None) -> int:
        """The number of the thread's current stream on `device`."""
        device = self.device if device is None else device
        return self.thread.streams.get(device, device)

    def set_stream(self, device: int, stream: int) -> None:
        self.set_device(device)
        self.thread.streams[device] = stream

    def new_stream(self, device: int) -> int:
        with self.lock:
            number = next(self._numbers)
            self.races.syncs.create_stream(number)
        return number

    def new_event(self) -> int:
        with self.lock:
            while self.dropped_events:
                self.races.drop_event(self.dropped_events.popleft())
            number = next(self._events)
            self.races.syncs.create_event(number)
        return number

    def record(self, event: int, stream: int) -> int:
        """Returns the number of the last kernel that the event is behind."""
        with self.lock:
            self.races.syncs.record_state(event, stream)
            return self.races.syncs.current_sync_states[stream].get(stream, 0)

    def wait(self, stream: int, event: int) -> None:
        """`stream` goes on behind the event."""
        with self.lock:
            self.races.syncs.stream_wait_for_event(stream, event)

    # --- the host ------------------------------------------------------------------------------

    def set_sync_debug_mode(self, mode: int) -> None:
        """Warns of itself at the first call in a process, as PyTorch does."""
        self.sync_debug_mode = mode
        if not self.is_prototype_told:
            self.is_prototype_told = True
            self._warn(PROTOTYPE)

    def _warn(self, sentence: str) -> None:
        """At the program's line, as a warning from C++."""
        file, line = place()
        warnings.warn_explicit(sentence, UserWarning, file, line)

    def wait_for_stream(self, stream: int, why: str, is_detected: bool = True) -> None:
        """The host waits until `stream` has done everything.

        Args:
            is_detected: whether PyTorch's debug mode sees such a wait. It sees those of its own
                blocking copies and of streams, not those of events, devices, collectives, nor those
                inside the driver.
        """
        if is_detected and self.sync_debug_mode == 1:
            self._warn(SYNCHRONIZING)
        elif is_detected and self.sync_debug_mode == 2:
            raise RuntimeError(SYNCHRONIZING)
        with self.lock:
            self.races.syncs.all_streams_wait_for_stream(stream)
            self._waited(why)

    def wait_for_event(self, event: int, why: str) -> None:
        with self.lock:
            self.races.syncs.all_streams_wait_for_event(event)
            self._waited(why)

    def wait_for_device(self, why: str) -> None:
        with self.lock:
            self.races.syncs.sync_all_streams()
            self._waited(why)

    def _waited(self, why: str) -> None:
        self.host_waits += 1
        for observer in self.observers:
            observer.host_wait(why)
        is_past = self.races.is_past
        due = [p for p in self._pending if is_past(p.stream, p.sequence)]
        self._pending = [p for p in self._pending if not is_past(p.stream, p.sequence)]
        for pending in due:
            pending.settle()

    def once_known(self, stream: int, settle: Callable[[], None]) -> None:
        """Calls `settle` when the host has waited for what is on `stream` now."""
        with self.lock:
            self._pending.append(PendingKernel(stream, self.races.sequence, settle))

    def forget(self) -> None:
        """After a mistake that was found: what was under way is given up, and all is in order."""
        with self.lock:
            self._pending.clear()
            self._pools.clear()
            self.races.forget()

    # --- memory --------------------------------------------------------------------------------

    def block_of(self, data: Tensor, device: int | None = None) -> StorageMemory:
        """The block of a tensor's storage; a storage without one gets it here, as new memory."""
        storage = data.untyped_storage()
        block = getattr(storage, "block", None)
        if block is None:
            block = self._allocate(storage.nbytes(), self.device if device is None else device)
            storage.block = block
        return block

    def _allocate(self, nbytes: int, device: int) -> StorageMemory:
        with self.lock:
            self.collect()
            stream = self.stream_of(device)
            size = -(-nbytes // ROUNDING) * ROUNDING
            pool = self._pools.get((stream, size))
            memory = pool.pop() if pool else self.races.memory(size, stream)
            if len(memory.cells) > 1:
                self.races.tidy(memory)
            block = StorageMemory(self._freed, memory, size, device)
            usage = self.usage[device]
            usage.live += size
            usage.peak = max(usage.peak, usage.live)
            for observer in self.observers:
                observer.allocated(block)
        return block

    def resized(self, storage: torch.UntypedStorage) -> None:
        """A storage's memory was given back or made anew (FSDP2 frees parameters so)."""
        block = getattr(storage, "block", None)
        if block is None or block.nbytes == -(-storage.nbytes() // ROUNDING) * ROUNDING:
            return
        storage.block = None  # freed
        del block
        storage.block = self._allocate(storage.nbytes(), self.device)

    def collect(self) -> None:
        """Blocks whose storages are gone return to the pool of the stream that they came from.

        One that another stream was told to use (`record_stream`) is not given out again: when that
        stream is done is not known here.
        """
        while self._freed:
            block = self._freed.popleft()
            self.usage[block.device].live -= block.nbytes
            for observer in self.observers:
                observer.freed(block)
            if not block.used_on - {block.memory.stream}:
                key = (block.memory.stream, block.nbytes)
                self._pools.setdefault(key, []).append(block.memory)

    # --- kernels -------------------------------------------------------------------------------

    def use(self, data: Tensor, device: int | None = None, nbytes: int | None = None) -> Use:
        """All of a tensor's elements, or so many bytes of them."""
        where = extent(data)
        most = min(data.numel() * data.itemsize, where[1] - where[0])
        return Use(self.block_of(data, device), where, most if nbytes is None else nbytes)

    def launch(self, kernel: Kernel) -> None:
        """A kernel was launched; its result is there already. Raises Race."""
        if self.thread.fused is not None:
            self.thread.fused.add(kernel)
            return
        with self.lock:
            for observer in self.observers:
                observer.kernel(kernel)
            if self.checks_races:
                reads = [(use.block.memory, use.where) for use in kernel.reads]
                writes = [(use.block.memory, use.where) for use in kernel.writes]
                self.races.launch(kernel.name, kernel.stream, reads, writes)

    @contextmanager
    def fused_kernel(self, name: str) -> Iterator[None]:
        """All operators inside count as one kernel (those of a fused one inside, too).

        It reads once what was there before, and writes once what is there afterwards: what lives in
        between alone stays in registers.
        """
        if self.thread.fused is not None:
            yield
            return
        self.thread.fused = parts = Fused()
        try:
            yield
        finally:
            self.thread.fused = None
        self.launch(parts.kernel(name, self.stream_of()))


def extent(data: Tensor) -> Range:
    """The bytes of its storage between a tensor's first and last element."""
    if data.numel() == 0:
        return (0, 0)
    item = data.itemsize
    first = data.storage_offset() * item
    span = sum((n - 1) * s for n, s in zip(data.shape, data.stride(), strict=True))
    return first, first + (span + 1) * item
