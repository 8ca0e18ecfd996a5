"""Finds accesses to one piece of memory from two streams that nothing orders.

The logic is that of PyTorch's own stream sanitizer (`torch.cuda._sanitizer`): per stream a vector
of how far it has waited for each other one, per piece of memory its last write and the reads since.
What is added here is that pieces are ranges of bytes and not addresses, so that a view in the
middle of a bucket and the bucket meet, and that a piece that is freed and given out again keeps its
past, as the blocks of a caching allocator do.
"""

from __future__ import annotations

import sys
from bisect import bisect_left, bisect_right
from collections import defaultdict
from collections.abc import Iterator
from itertools import count
from types import FrameType, SimpleNamespace
from typing import Any

from torch.cuda import _sanitizer as sanitizer

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
        if "/parallel3d/pretend/" not in file and not file.endswith("_sanitizer.py"):
            yield file, frame.f_lineno, frame.f_code.co_name
            left -= 1
        frame = frame.f_back


class _Accesses(sanitizer._TensorsAccessed):
    """Of the reads of one stream the last alone is kept: whatever follows it follows all."""

    def add_read(self, data_ptr: int, access: Any) -> None:
        reads = self.accesses[data_ptr].reads
        reads[:] = [read for read in reads if read.stream != access.stream]
        reads.append(access)


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
        self.syncs = self.handler.syncs

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
