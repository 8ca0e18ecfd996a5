"""What observers of a pretended machine are told: kernels, the memory they use, and its blocks."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple
from weakref import ref

from torch import Tensor

from parallel3d.pretend.races import AllocatorBlock, Range


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
