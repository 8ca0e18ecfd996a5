"""What observers of a simulated machine are told: kernels, the memory they use, and its blocks."""

from __future__ import annotations

import sys
import threading
import warnings
from bisect import bisect_left, bisect_right
from collections import defaultdict, deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import count
from types import FrameType, SimpleNamespace
from typing import Any, NamedTuple
from weakref import ref

import torch
from torch import Tensor
from torch.cuda import _sanitizer as sanitizer


class Use(NamedTuple):
    """Memory that a kernel reads or writes: a range of a block, of which it touches `nbytes`."""

    block: StorageMemory
    where: Range
    nbytes: int


@dataclass(frozen=True)
class Kernel:
    """One launch, as observers see it.

    Attributes:
        name: of the operator. call: its overload, arguments and result in terms of the data behind
            the tensors; None for a collective, and for operators that count as one
            (`fused_kernel`).
        launches: kernels that a GPU would launch for it.
    """

    name: str
    stream: int
    reads: Sequence[Use]
    writes: Sequence[Use]
    call: tuple[Any, Sequence[Any], dict[str, Any], Any] | None = None
    launches: int = 1


class Observer:
    """Told of what happens; override what is of interest."""

    def kernel(self, kernel: Kernel) -> None:
        """A kernel was launched."""

    def collective(self, name: str, group: Any, tensor: Tensor) -> None:
        """A collective or message was started, with the tensor that this rank gives."""

    def host_wait(self, why: str) -> None:
        """The host waited for the device."""

    def allocated(self, block: StorageMemory) -> None:
        """Memory was given out."""

    def freed(self, block: Left) -> None:
        """Memory came back."""


class StorageMemory:
    """A storage's memory; lives as long as the storage, to which it is attached."""

    __slots__ = ("__weakref__", "device", "freed", "label", "memory", "nbytes", "used_on")

    def __init__(
        self, freed: deque[Left], memory: AllocatorBlock, nbytes: int, device: int
    ) -> None:
        self.freed, self.memory, self.nbytes, self.device = freed, memory, nbytes, device
        self.used_on: set[int] = set()  # by record_stream
        self.label: str | None = None

    def __del__(self) -> None:
        # Any thread may get here at any moment: what follows waits for the next allocation.
        self.freed.append(Left(self.memory, self.nbytes, self.device, self.used_on, self.label))


class Left(NamedTuple):
    """What is left of a block once its storage is gone."""

    memory: AllocatorBlock
    nbytes: int
    device: int
    used_on: set[int]
    label: str | None


@dataclass
class Usage:
    """Bytes of one device, as its allocator counts them."""

    live: int = 0
    peak: int = 0


@dataclass
class PendingKernel:
    """Something that the host may rely on once it has waited for a kernel."""

    stream: int
    sequence: int
    settle: Callable[[], None]


class Fused:
    """Collects what becomes one kernel."""

    def __init__(self) -> None:
        self.reads: dict[tuple[int, Range], Use] = {}
        self.writes: dict[tuple[int, Range], tuple[ref[StorageMemory], Range, int]] = {}
        self.own: set[int] = set()  # blocks that began inside, which nothing before can be read of

    def add(self, kernel: Kernel) -> None:
        for use in kernel.reads:
            if id(use.block) not in self.own:
                self.reads.setdefault((id(use.block), use.where), use)
        for use in kernel.writes:
            key = (id(use.block), use.where)
            if not any(block == id(use.block) for block, _ in self.reads):
                self.own.add(id(use.block))
            self.writes[key] = (ref(use.block), use.where, use.nbytes)

    def kernel(self, name: str, stream: int) -> Kernel:
        found = [(block(), where, nbytes) for block, where, nbytes in self.writes.values()]
        writes = [Use(block, *rest) for block, *rest in found if block is not None]
        return Kernel(name, stream, list(self.reads.values()), writes)


# Finds accesses to one piece of memory from two streams that nothing orders.
#
# The logic is that of PyTorch's own stream sanitizer (`torch.cuda._sanitizer`): per stream a
# vector of how far it has waited for each other one, per piece of memory its last write and the
# reads since. What is added here is that pieces are ranges of bytes and not addresses, so that a
# view in the middle of a bucket and the bucket meet, and that a piece that is freed and given out
# again keeps its past, as the blocks of a caching allocator do.


Range = tuple[int, int]  # first byte, and the one behind the last
FRAMES = 6  # of the program, in a report


class Race(RuntimeError):
    """Two streams use a piece of memory, one of them writes, and nothing orders them."""


class _Stack(list):
    """Where a kernel was launched: (file, line, function), innermost first."""

    def reverse(self) -> None:
        """The sanitizer wants the innermost last; it is read the other way round here."""

    def __str__(self) -> str:
        return " < ".join(f"{file.rsplit('/', 1)[-1]}:{line} {name}" for file, line, name in self)


def _program_frames(frame: FrameType | None) -> Iterator[tuple[str, int, str]]:
    """Frames outside of this package, innermost first."""
    left = FRAMES
    while frame is not None and left:
        file = frame.f_code.co_filename
        if "/parallel3d/simulated_device/" not in file and not file.endswith("_sanitizer.py"):
            yield file, frame.f_lineno, frame.f_code.co_name
            left -= 1
        frame = frame.f_back


class _Accesses(sanitizer._TensorsAccessed):
    """Of the reads of one stream the last alone is kept: whatever follows it follows all."""

    def add_read(self, data_ptr: int, access: Any) -> None:
        reads = self.accesses[data_ptr].reads
        reads[:] = [read for read in reads if read.stream != access.stream]
        reads.append(access)


class _Syncs(sanitizer.StreamSynchronizations):
    """PyTorch's, in less time: a run has dozens of streams, and each has a number for each."""

    def _state_wait_for_other(self, state: dict[int, int], other: dict[int, int]) -> None:
        for stream, seq_num in other.items():
            if state.get(stream, -1) < seq_num:
                state[stream] = seq_num

    def sync_all_streams(self) -> None:
        host = self.host_sync_state
        for stream, state in self.current_sync_states.items():
            host[stream] = state[stream]
        for state in self.current_sync_states.values():
            state.update(host)  # no stream knows more of another one than that one itself


class AllocatorBlock:
    """A block of device memory as an allocator knows it, cut where accesses begin and end.

    `cells[i]` is the sanitizer's key of the bytes from `cuts[i]` to `cuts[i + 1]`.
    """

    __slots__ = ("cells", "cuts", "size", "stream")

    def __init__(self, size: int, stream: int, cell: int) -> None:
        self.size, self.stream = size, stream
        self.cuts, self.cells = [0, max(size, 1)], [cell]


class Races:
    """The sanitizer, told of kernels, events and waits; `launch` raises Race.

    Streams and events go by numbers; stream 0 is the first device's default one.
    """

    def __init__(self) -> None:
        # It walks the whole stack of every launch: a few frames are enough, and much faster.
        sanitizer.traceback = SimpleNamespace(
            walk_stack=lambda frame: frame,
            StackSummary=SimpleNamespace(
                extract=lambda frame, lookup_lines: _Stack(_program_frames(frame))
            ),
        )
        self._cells = count(1)
        self.forget()

    def forget(self) -> None:
        """Begins anew: whatever ran until now is done, and streams that are gone are not kept."""
        self.handler = sanitizer.EventHandler()
        self.handler.tensors_accessed = _Accesses()
        self.syncs = self.handler.syncs = _Syncs()

    @property
    def sequence(self) -> int:
        """The number of the newest kernel."""
        return self.handler.seq_num

    def memory(self, size: int, stream: int) -> AllocatorBlock:
        """A new block, which no kernel has touched."""
        return AllocatorBlock(size, stream, self._new_cell(None))

    def tidy(self, memory: AllocatorBlock) -> None:
        """Makes a block that is given out again one piece, if its stream is behind its past."""
        accesses = self.handler.tensors_accessed.accesses
        past = [accesses[cell] for cell in memory.cells if cell in accesses]
        done = [access for info in past for access in (*info.reads, info.write) if access]
        behind = self.syncs.is_ordered_after
        if all(behind(memory.stream, access.seq_num, access.stream) for access in done):
            for cell in memory.cells:
                accesses.pop(cell, None)
            memory.cuts, memory.cells = [0, max(memory.size, 1)], [self._new_cell(None)]

    def _new_cell(self, like: int | None) -> int:
        cell, accesses = next(self._cells), self.handler.tensors_accessed.accesses
        accesses[cell] = sanitizer.TensorInfo(None)
        if like in accesses:  # else it is from before all was forgotten
            accesses[cell].reads = list(accesses[like].reads)
            accesses[cell].write = accesses[like].write
        return cell

    def _cut(self, memory: AllocatorBlock, at: int) -> None:
        i = bisect_left(memory.cuts, at)
        if i < len(memory.cuts) and memory.cuts[i] == at:
            return
        memory.cuts.insert(i, at)
        memory.cells.insert(i, self._new_cell(memory.cells[i - 1]))

    def _cells_of(self, memory: AllocatorBlock, where: Range) -> list[int]:
        first, end = where[0], min(where[1], memory.cuts[-1])
        if first >= end:
            return []
        self._cut(memory, first)
        self._cut(memory, end)
        return memory.cells[bisect_right(memory.cuts, first) - 1 : bisect_left(memory.cuts, end)]

    def launch(
        self,
        name: str,
        stream: int,
        reads: list[tuple[AllocatorBlock, Range]],
        writes: list[tuple[AllocatorBlock, Range]],
    ) -> None:
        """A kernel runs on `stream`. Raises Race if memory it uses is not ordered with others."""
        written = {cell for where in writes for cell in self._cells_of(*where)}
        read = {cell for where in reads for cell in self._cells_of(*where)} - written
        # Cutting a block for a later range renames a part of an earlier one.
        written |= {cell for where in writes for cell in self._cells_of(*where)}
        read = {cell for where in reads for cell in self._cells_of(*where)} - written
        errors = self.handler._handle_kernel_launch(
            stream, read, written, set(), name, defaultdict(list)
        )
        if errors:
            raise Race(_sentence(errors[0]))

    def drop_event(self, event: int) -> None:
        """Nobody holds it any more."""
        self.syncs.recorded_sync_states.pop(event, None)

    def is_past(self, stream: int, sequence: int) -> bool:
        """Whether the host knows that kernel `sequence` of `stream` is done."""
        return sequence <= self.syncs.host_sync_state.get(stream, -1)


def _sentence(error: Any) -> str:
    now, before = error.current_access, error.previous_access
    return (
        f"{now.operator} on stream {now.stream} is {now.type} memory that {before.operator} on "
        f"stream {before.stream} was {before.type}, and nothing orders the two: "
        f"now at {now.stack_trace}; before at {before.stack_trace}"
    )


def place() -> tuple[str, int]:
    """File and line where the program is."""
    file, line, _ = next(_program_frames(sys._getframe(1)), ("<unknown>", 1, ""))
    return file, line


def caller() -> str:
    """Where the program is, for a report."""
    return str(_Stack(_program_frames(sys._getframe(1))))


# What a process knows of its simulated devices: streams, events, memory, and what runs on them.
#
# Kernels run at once, on the host. What a device would do later is kept as bookkeeping: which
# stream a kernel is on and what orders it (`races.py`), which block of memory a tensor has, and
# which copies to the host have not been waited for. Observers are told of everything; `dryrun` is
# one.


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
