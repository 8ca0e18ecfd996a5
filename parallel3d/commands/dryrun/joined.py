"""What a compiler would make of a block's element-wise kernels: an estimate.

TorchInductor cannot be asked without the GPU that it writes for. Here all kernels between two that
no compiler looks into (GEMMs, attention, collectives) are taken for one, which reads once what was
there before and writes once what is still there afterwards. That is what pointwise code and the
reductions along rows come to. A sum along columns (a norm's weight gradient) needs a kernel of its
own, and what is kept for the backward is chosen anew by the compiler: neither is known here.
"""

from __future__ import annotations

from itertools import count
from weakref import ref

from parallel3d.pretend.machine import Kernel, Range, StorageMemory


class Joined:
    """A run of kernels. Blocks go by numbers, so that none is kept alive here."""

    def __init__(self) -> None:
        self._numbers = count()
        self._number: dict[int, int] = {}  # id of a block → its number, newest of that id
        self._clear()

    def _clear(self) -> None:
        self.kernels = 0
        self._reads: dict[tuple[int, Range], int] = {}
        self._writes: dict[tuple[int, Range], tuple[ref[StorageMemory], int]] = {}
        self._own: set[int] = set()  # blocks that were first written
        self._read: set[int] = set()  # blocks that were first read

    def began(self, block: StorageMemory) -> None:
        self._number[id(block)] = next(self._numbers)

    def add(self, kernel: Kernel) -> None:
        self.kernels += 1
        for use in kernel.reads:
            block = self._number.get(id(use.block), -1)
            if block not in self._own:
                self._read.add(block)
                self._reads.setdefault((block, use.where), use.nbytes)
        for use in kernel.writes:
            block = self._number.get(id(use.block), -1)
            if block not in self._read:
                self._own.add(block)
            self._writes[block, use.where] = ref(use.block), use.nbytes

    def take(self) -> int:
        """Bytes read and written by the run, which ends here."""
        written = sum(nbytes for block, nbytes in self._writes.values() if block() is not None)
        nbytes = sum(self._reads.values()) + written
        self._clear()
        return nbytes
