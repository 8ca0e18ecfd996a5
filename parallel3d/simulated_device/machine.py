"""Simulates the devices of a process: streams, events, memory, kernels and races.

Kernels run immediately, on the host. The machine tracks the order in which a real device would run
them: each kernel's stream and dependencies, each tensor's block of memory, and the copies to the
host that nobody has waited for. Observers, such as `dryrun`, are notified of everything.
"""

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

from torch import Tensor

from parallel3d.private_names import TensorsAccessed, handle_kernel_launch, sanitizer
from parallel3d.simulated_device.meta_results import MetaResults

# An operator's overload, arguments, keyword arguments and result; their tensors are unwrapped.
Call = tuple[Any, Sequence[Any], dict[str, Any], Any]
Range = tuple[int, int]  # first byte, and the byte after the last
Frames = tuple[tuple[str, str], ...]  # (file, function), innermost first


class Use(NamedTuple):
    """Describes memory that a kernel uses: `nbytes` within a range of a block."""

    block: StorageMemory
    where: Range
    nbytes: int


@dataclass(frozen=True)
class Kernel:
    """Describes one launch, for observers.

    Attributes:
        name: name of the operator.
        call: the operator's call; None for collectives, copies and fused kernels.
        launches: number of kernels that a GPU would launch for it.
    """

    name: str
    stream: int
    reads: Sequence[Use]
    writes: Sequence[Use]
    call: Call | None = None
    launches: int = 1

    @property
    def nbytes(self) -> int:
        """Returns the number of bytes that the kernel reads and writes."""
        return sum(use.nbytes for use in (*self.reads, *self.writes))


class Observer:
    """Base class of observers. Its methods do nothing; subclasses override them."""

    def kernel(self, kernel: Kernel) -> None:
        """Handles the launch of a kernel."""

    def collective(self, name: str, group: Any, tensor: Tensor) -> None:
        """Handles the start of a collective or message; `tensor` is this rank's."""

    def host_wait(self, why: str) -> None:
        """Handles a wait of the host for the device; it is called after the wait."""

    def allocating(self, block: StorageMemory) -> None:
        """Handles a request for memory, including requests inside a fused kernel."""

    def allocated(self, block: StorageMemory) -> None:
        """Handles an allocation; a fused kernel reports only memory that outlives it."""

    def freed(self, block: StorageMemory) -> None:
        """Handles the release of allocated memory."""


@dataclass(eq=False)
class StorageMemory:
    """Describes the memory of a storage.

    Attributes:
        used_on: streams that were passed to `record_stream`.
        label: name that an observer gave to the memory; None if none did.
        is_allocated: False inside the fused kernel that requests the memory, where the memory
            represents registers.
    """

    memory: AllocatorBlock
    nbytes: int
    device: int
    used_on: set[int] = field(default_factory=set)
    label: str | None = None
    is_allocated: bool = False
    is_freed: bool = False


class _Owner:
    """Frees the memory of the storage that holds this object, when the storage is deleted."""

    __slots__ = ("block", "freed")

    def __init__(self, block: StorageMemory, freed: deque[StorageMemory]) -> None:
        self.block = block
        self.freed = freed

    def __del__(self) -> None:
        # Any thread may run this at any moment, so the next allocation does the rest.
        self.block.is_freed = True
        self.freed.append(self.block)


@dataclass
class Usage:
    live: int = 0
    peak: int = 0


@dataclass
class PendingKernel:
    stream: int
    sequence: int
    settle: Callable[[], object]


class FusedKernel:
    """Collects several kernels, which are then reported as one."""

    def __init__(self) -> None:
        self.reads: dict[tuple[StorageMemory, Range], Use] = {}
        self.writes: dict[tuple[StorageMemory, Range], Use] = {}
        self.read: set[StorageMemory] = set()  # blocks that were read before they were written
        # Blocks that were written before they were read; their reads do not count.
        self.own: set[StorageMemory] = set()
        self.made: list[StorageMemory] = []  # memory of intermediate values and results

    def add(self, kernel: Kernel) -> None:
        for use in kernel.reads:
            if use.block not in self.own:
                self.read.add(use.block)
                self.reads.setdefault((use.block, use.where), use)
        for use in kernel.writes:
            if use.block not in self.read:
                self.own.add(use.block)
            self.writes[use.block, use.where] = use

    def kernel(self, name: str, stream: int) -> Kernel:
        """Returns the collected kernels as one, without writes to memory that is already freed."""
        writes = [use for use in self.writes.values() if not use.block.is_freed]
        return Kernel(name, stream, list(self.reads.values()), writes)


FRAMES = 6  # number of frames in a reported stack


class Race(RuntimeError):
    """Raised when two streams use the same memory, one writes, and nothing orders them."""


class _Stack(list):
    """Holds the stack of a launch: (file, line, function), innermost first."""

    def reverse(self) -> None:
        """Does nothing: the sanitizer calls it to put the innermost frame last."""

    def __str__(self) -> str:
        return " < ".join(f"{file.rsplit('/', 1)[-1]}:{line} {name}" for file, line, name in self)


def _program_frames(frame: FrameType | None) -> Iterator[tuple[str, int, str]]:
    left = FRAMES
    while frame is not None and left:
        file = frame.f_code.co_filename
        if "/parallel3d/simulated_device/" not in file and not file.endswith("_sanitizer.py"):
            yield file, frame.f_lineno, frame.f_code.co_name
            left -= 1
        frame = frame.f_back


class _Accesses(TensorsAccessed):
    """Keeps only each stream's last read: an access after it also follows the earlier reads."""

    def add_read(self, data_ptr: int, access: Any) -> None:
        reads = self.accesses[data_ptr].reads
        reads[:] = [read for read in reads if read.stream != access.stream]
        reads.append(access)


class _Syncs(sanitizer.StreamSynchronizations):
    """Merges vector clocks faster than PyTorch's class, as a run has dozens of streams."""

    def _state_wait_for_other(self, state: dict[int, int], other: dict[int, int]) -> None:
        for stream, seq_num in other.items():
            if state.get(stream, -1) < seq_num:
                state[stream] = seq_num

    def sync_all_streams(self) -> None:
        host = self.host_sync_state
        for stream, state in self.current_sync_states.items():
            host[stream] = state[stream]
        for state in self.current_sync_states.values():
            state.update(host)  # this is safe: no stream has waited for a kernel newer than these


class AllocatorBlock:
    """Block of memory; `cells[i]` identifies the bytes from `cuts[i]` to `cuts[i + 1]`."""

    __slots__ = ("cells", "cuts", "size", "stream")

    def __init__(self, size: int, stream: int, cell: int) -> None:
        self.size = size
        self.stream = stream
        self.cuts = [0, max(size, 1)]
        self.cells = [cell]


class Races:
    """Finds unordered accesses to the same memory from two streams; `launch` raises Race.

    It uses PyTorch's stream sanitizer (`torch.cuda._sanitizer`), which keeps a vector clock for
    each stream, and the last write and the reads since then for each piece of memory. Here a piece
    is a range of bytes, not an address, so that a bucket and a view into its middle overlap.
    A reused block keeps its accesses, since a caching allocator reuses it without a wait.

    Streams and events are numbers; stream 0 is the first device's default stream.
    """

    def __init__(self) -> None:
        # The sanitizer would walk the whole stack at every launch; a few frames are much faster.
        sanitizer.traceback = SimpleNamespace(
            walk_stack=lambda frame: frame,
            StackSummary=SimpleNamespace(
                extract=lambda frame, lookup_lines: _Stack(_program_frames(frame))
            ),
        )
        self._cells = count(1)
        self.forget()

    def forget(self) -> None:
        """Starts over: forgets the accesses, streams and events so far."""
        self.handler = sanitizer.EventHandler()
        self.handler.tensors_accessed = _Accesses()
        self.syncs = self.handler.syncs = _Syncs()

    @property
    def sequence(self) -> int:
        return self.handler.seq_num

    def memory(self, size: int, stream: int) -> AllocatorBlock:
        return AllocatorBlock(size, stream, self._new_cell(None))

    def tidy(self, memory: AllocatorBlock) -> None:
        """Merges a reused block's ranges if its stream is ordered after all accesses to them."""
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
        if like in accesses:  # `forget` drops all accesses
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
        """Records a kernel on `stream`. Raises Race if a conflicting access is unordered."""
        for _ in range(2):  # cutting a block for a later range may split a cell of an earlier one
            written = {cell for where in writes for cell in self._cells_of(*where)}
            read = {cell for where in reads for cell in self._cells_of(*where)} - written
        errors = handle_kernel_launch(
            self.handler, stream, read, written, set(), name, defaultdict(list)
        )
        if errors:
            raise Race(_sentence(errors[0]))

    def drop_event(self, event: int) -> None:
        self.syncs.recorded_sync_states.pop(event, None)

    def is_past(self, stream: int, sequence: int) -> bool:
        return sequence <= self.syncs.host_sync_state.get(stream, -1)


def _sentence(error: Any) -> str:
    now, before = error.current_access, error.previous_access
    return (
        f"{now.operator} on stream {now.stream} is {now.type} memory that {before.operator} on "
        f"stream {before.stream} was {before.type}, and nothing orders the two: "
        f"now at {now.stack_trace}; before at {before.stack_trace}"
    )


def place() -> tuple[str, int]:
    file, line, _ = next(_program_frames(sys._getframe(1)), ("<unknown>", 1, ""))
    return file, line


DEVICES = 8
ROUNDING = 512  # bytes; the allocator rounds sizes up to a multiple of this
SYNCHRONIZING = "called a synchronizing CUDA operation"
FIRST_SIDE_STREAM = 100  # lower numbers are the devices' default streams


class _Thread(threading.local):
    """Holds a thread's current device and streams.

    The device is None in autograd's threads, which use the main thread's. While a call is repeated
    (`repeated_calls`), `repeated` has the frames within it, which are not on the stack.
    """

    def __init__(self) -> None:
        is_of_autograd = isinstance(threading.current_thread(), threading._DummyThread)
        self.device: int | None = None if is_of_autograd else 0
        self.streams: dict[int, int] = {}
        self.fused: FusedKernel | None = None
        self.repeated: Frames = ()


@dataclass
class SimulatedMachine:
    """Simulates the devices of one process.

    Args:
        data: the device of the tensors' values: "cpu", or "meta" for tensors without values.
        checks_races: whether data races raise an error; False saves time.

    Attributes:
        touched: devices on which this process has a context; making one current creates it.
        host_waits: how often the host has waited for a device.
        warns_of_waits: whether detected waits warn, as after `set_sync_debug_mode("warn")`.
        special: implementations of the operators that need more than one plain kernel.
        libraries: operator libraries; they are kept because dropping one unregisters it.
        meta_results: results of operators on meta tensors.
    """

    data: str = "cpu"
    checks_races: bool = True
    races: Races = field(default_factory=Races)
    observers: list[Observer] = field(default_factory=list)
    touched: set[int] = field(default_factory=set)
    host_waits: int = 0
    warns_of_waits: bool = False
    usage: list[Usage] = field(default_factory=lambda: [Usage() for _ in range(DEVICES)])
    special: dict[Any, Callable[..., Any]] = field(default_factory=dict)
    libraries: list[Any] = field(default_factory=list)
    meta_results: MetaResults = field(default_factory=MetaResults)

    def __post_init__(self) -> None:
        self.lock = threading.RLock()
        self._main_device = 0
        self.thread = _Thread()
        self._freed: deque[StorageMemory] = deque()
        self.dropped_events: deque[int] = deque()  # any thread may drop an event and add it here
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
        return self._main_device if own is None else own

    def set_device(self, device: int) -> None:
        if not 0 <= device < DEVICES:
            raise RuntimeError(f"invalid device ordinal {device}: there are {DEVICES} devices")
        self.thread.device = device
        if threading.current_thread() is threading.main_thread():
            self._main_device = device
        self.touched.add(device)

    def stream_of(self, device: int | None = None) -> int:
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
        """Records an event on a stream, and returns the number of the last kernel before it."""
        with self.lock:
            self.races.syncs.record_state(event, stream)
            return self.races.syncs.current_sync_states[stream].get(stream, 0)

    def wait(self, stream: int, event: int) -> None:
        with self.lock:
            self.races.syncs.stream_wait_for_event(stream, event)

    # --- the host ------------------------------------------------------------------------------

    def wait_for_stream(self, stream: int, why: str, is_detected: bool = True) -> None:
        """Makes the host wait for all work of `stream`.

        Args:
            is_detected: whether PyTorch's debug mode detects such a wait. The mode detects
                PyTorch's blocking copies and waits for streams, but not waits for events, devices
                and collectives, nor waits inside the driver.
        """
        if is_detected and self.warns_of_waits:
            # The warning names the program's line, like PyTorch's own warning.
            warnings.warn_explicit(SYNCHRONIZING, UserWarning, *place())
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

    def once_known(self, stream: int, settle: Callable[[], object]) -> None:
        """Calls `settle` once the host has waited for the work that is now on `stream`."""
        with self.lock:
            self._pending.append(PendingKernel(stream, self.races.sequence, settle))

    def forget(self) -> None:
        """Drops all pending work, which tests need after a deliberate error."""
        with self.lock:
            self._pending.clear()
            self._pools.clear()
            self.races.forget()

    # --- memory --------------------------------------------------------------------------------

    def block_of(self, data: Tensor, device: int | None = None) -> StorageMemory:
        storage: Any = data.untyped_storage()
        if getattr(storage, "owner", None) is None:
            where = self.device if device is None else device
            storage.owner = self.allocate(storage.nbytes(), where)
        return storage.owner.block

    def allocate(self, nbytes: int, device: int) -> _Owner:
        """Returns memory, for a storage to hold until its own end."""
        with self.lock:
            self.collect()
            stream = self.stream_of(device)
            size = _rounded(nbytes)
            pool = self._pools.get((stream, size))
            memory = pool.pop() if pool else self.races.memory(size, stream)
            if len(memory.cells) > 1:
                self.races.tidy(memory)
            block = StorageMemory(memory, size, device)
            for observer in self.observers:
                observer.allocating(block)
            if self.thread.fused is None:
                self._count(block)
            else:
                self.thread.fused.made.append(block)
        return _Owner(block, self._freed)

    def _count(self, block: StorageMemory) -> None:
        block.is_allocated = True
        usage = self.usage[block.device]
        usage.live += block.nbytes
        usage.peak = max(usage.peak, usage.live)
        for observer in self.observers:
            observer.allocated(block)

    def resized(self, storage: Any) -> None:
        """Frees or allocates the memory of a resized storage, as when FSDP2 frees parameters."""
        owner = getattr(storage, "owner", None)
        if owner is None or owner.block.nbytes == _rounded(storage.nbytes()):
            return
        storage.owner = owner = None  # the old block is freed before the new one is allocated
        storage.owner = self.allocate(storage.nbytes(), self.device)

    def collect(self) -> None:
        """Returns freed blocks to their pools, unless another stream may still use them."""
        while self._freed:
            block = self._freed.popleft()
            if block.is_allocated:
                self.usage[block.device].live -= block.nbytes
                for observer in self.observers:
                    observer.freed(block)
            # After `record_stream`, nobody knows when the other stream is done with the block.
            if not block.used_on - {block.memory.stream}:
                key = (block.memory.stream, block.nbytes)
                self._pools.setdefault(key, []).append(block.memory)

    # --- kernels -------------------------------------------------------------------------------

    def use(self, data: Tensor, device: int | None = None, nbytes: int | None = None) -> Use:
        where = extent(data)
        most = min(data.numel() * data.itemsize, where[1] - where[0])
        return Use(self.block_of(data, device), where, most if nbytes is None else nbytes)

    def pinned(self, tensor: Tensor) -> tuple[AllocatorBlock, Range]:
        """Returns the block and the range of the pinned host memory behind a tensor."""
        storage: Any = tensor.untyped_storage()
        with self.lock:
            if not hasattr(storage, "memory"):
                storage.memory = self.races.memory(storage.nbytes(), 0)
        return storage.memory, extent(tensor)

    def launch(
        self,
        kernel: Kernel,
        host_reads: Sequence[tuple[AllocatorBlock, Range]] = (),
        host_writes: Sequence[tuple[AllocatorBlock, Range]] = (),
    ) -> None:
        """Records a kernel that has run, and its use of pinned memory. May raise Race."""
        if self.thread.fused is not None:
            self.thread.fused.add(kernel)
            return
        with self.lock:
            for observer in self.observers:
                observer.kernel(kernel)
            if self.checks_races:
                reads = [(use.block.memory, use.where) for use in kernel.reads]
                writes = [(use.block.memory, use.where) for use in kernel.writes]
                uses = [*reads, *host_reads], [*writes, *host_writes]
                self.races.launch(kernel.name, kernel.stream, *uses)

    @contextmanager
    def fused_kernel(self, name: str) -> Iterator[None]:
        """Counts the operators in a `with` block as one kernel.

        Intermediate values stay in registers and use no memory.
        """
        if self.thread.fused is not None:
            yield
            return
        self.thread.fused = parts = FusedKernel()
        try:
            yield
        finally:
            self.thread.fused = None
        with self.lock:
            self.collect()
            for block in parts.made:
                if not block.is_freed:
                    self._count(block)
        self.launch(parts.kernel(name, self.stream_of()))


def _rounded(nbytes: int) -> int:
    return -(-nbytes // ROUNDING) * ROUNDING


def extent(data: Tensor) -> Range:
    """Returns the range of bytes from a tensor's first to its last element, in its storage."""
    if data.numel() == 0:
        return (0, 0)
    item = data.itemsize
    first = int(data.storage_offset()) * item
    span = sum((n - 1) * int(s) for n, s in zip(data.shape, data.stride(), strict=True))
    return first, first + (span + 1) * item
