"""What observers of a pretended machine are told: kernels, the memory they use, and its blocks."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from torch import Tensor

from parallel3d.pretend.races import Memory, Range


class Use(NamedTuple):
    """Memory that a kernel reads or writes: a range of a block, of which it touches `nbytes`."""

    block: Block
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

    def allocated(self, block: Block) -> None:
        """Memory was given out."""

    def freed(self, block: Left) -> None:
        """Memory came back."""


class Block:
    """A storage's memory; lives as long as the storage, to which it is attached."""

    __slots__ = ("__weakref__", "device", "freed", "label", "memory", "nbytes", "used_on")

    def __init__(self, freed: deque[Left], memory: Memory, nbytes: int, device: int) -> None:
        self.freed, self.memory, self.nbytes, self.device = freed, memory, nbytes, device
        self.used_on: set[int] = set()  # by record_stream
        self.label: str | None = None

    def __del__(self) -> None:
        # Any thread may get here at any moment: what follows waits for the next allocation.
        self.freed.append(Left(self.memory, self.nbytes, self.device, self.used_on, self.label))


class Left(NamedTuple):
    """What is left of a block once its storage is gone."""

    memory: Memory
    nbytes: int
    device: int
    used_on: set[int]
    label: str | None


@dataclass
class Usage:
    """Bytes of one device, as its allocator counts them."""

    live: int = 0
    peak: int = 0
