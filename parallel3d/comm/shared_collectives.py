"""Collectives through shared memory: CPU ranks of one host read each other's tensors.

Every rank has two slots. A collective writes the rank's tensor into a slot, tells each peer by a
semaphore, waits for theirs and reads their slots. Operations use the slots in turn, and a rank
starts its next operation only after it has read all peers' slots of the one before. So whoever
sees a peer's signal for operation n + 1 knows that the peer has done with operation n, and may
write operation n + 2 into the slot of n: no second signal is needed.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from parallel3d.comm.shared_memory import SharedMemory, open_shared_memory

SLOT_BYTES = 4 << 20  # larger sums go through in pieces
PIECE_BYTES = 1 << 20  # of such a sum: stays in a core's cache between its two passes
SLOTS = 2


@dataclass
class SharedCollectives:
    """The collectives of one group, on one of its ranks. One operation at a time."""

    memory: SharedMemory
    operations: int = 0
    pending: bool = False

    @classmethod
    def open(
        cls, handle: dist.ProcessGroup, index: int, size: int, timeout_s: float
    ) -> SharedCollectives | None:
        """None where the ranks cannot share memory; collective over the group."""
        signals = [0] * (size * size)  # one from each rank to each other
        data = size * SLOTS * (SLOT_BYTES + ctypes.sizeof(ctypes.c_int64))
        memory = open_shared_memory(handle, index, size, signals, data, timeout_s)
        return None if memory is None else cls(memory)

    def __post_init__(self) -> None:
        # Behind the slots: how many bytes each holds. Ranks that bring tensors of different sizes
        # would otherwise add up what an older operation left there.
        count = self.memory.size * SLOTS
        address = self.memory.data.data_ptr() + count * SLOT_BYTES
        self.sizes = (ctypes.c_int64 * count).from_address(address)

    def fits(self, tensor: Tensor) -> bool:
        return tensor.device.type == "cpu" and tensor.nbytes <= SLOT_BYTES

    def all_reduce(self, tensor: Tensor) -> SharedMemoryWork:
        """Starts the sum over the ranks, in place, in rank order: equal bits on every rank."""
        slots = self._start(tensor)

        def finish() -> None:
            if len(slots) == 2:  # a + b == b + a
                tensor.add_(slots[1 - self.memory.index].view_as(tensor))
                return
            torch.add(slots[0].view_as(tensor), slots[1].view_as(tensor), out=tensor)
            for slot in slots[2:]:
                tensor.add_(slot.view_as(tensor))

        return SharedMemoryWork(self, finish)

    def all_reduce_in_pieces(self, tensor: Tensor) -> InPieces:
        """The sum of a tensor of any size, in place; all of the work is done in `wait()`.

        For gradient buckets, of which several are under way: nothing is shared before the wait, so
        they do not meet, as long as all ranks wait for them in the same order.
        """
        return InPieces([lambda p=p: self.all_reduce(p) for p in self._pieces(tensor.view(-1))])

    def reduce_scatter_in_pieces(self, tensor: Tensor, own: Tensor) -> InPieces:
        """The sum of flat (size · n) over the ranks, any n; `own` (n) is this rank's part.

        All of the work is done in `wait()`, as with `all_reduce_in_pieces`; equal bits too.
        """
        rows = tensor.view(self.memory.size, -1)
        pieces = zip(
            self._pieces(rows, self.memory.size), self._pieces(own, self.memory.size), strict=True
        )
        return InPieces(
            [lambda p=p, o=o: self.reduce_scatter(p, o.unsqueeze(0)) for p, o in pieces]
        )

    def all_gather_in_pieces(self, own: Tensor, out: Tensor) -> InPieces:
        """Gathers flat (n) of every rank into `out` (size · n), any n; all of it in `wait()`."""
        rows = self._pieces(out.view(self.memory.size, -1), self.memory.size)
        pieces = zip(self._pieces(own, self.memory.size), rows, strict=True)
        return InPieces([lambda p=p, r=r: self.all_gather(p, r) for p, r in pieces])

    @staticmethod
    def _pieces(tensor: Tensor, shards: int = 1) -> tuple[Tensor, ...]:
        """Parts along the last dimension, such that a row of each shard fits a slot together."""
        return tensor.split(PIECE_BYTES // (tensor.itemsize * shards), dim=-1)

    def all_gather(self, tensor: Tensor, out: Tensor) -> SharedMemoryWork:
        """Starts gathering (n, ...) of every rank into `out` (size · n, ...)."""
        slots = self._start(tensor)

        def finish() -> None:
            for part, slot in zip(out.chunk(len(slots)), slots, strict=True):
                part.copy_(slot.view_as(part))

        return SharedMemoryWork(self, finish)

    def reduce_scatter(self, tensor: Tensor, out: Tensor) -> SharedMemoryWork:
        """Starts the sum of (size · n, ...) over the ranks; `out` (n, ...) is this rank's part."""
        size, index = self.memory.size, self.memory.index
        slots = [slot.chunk(size)[index] for slot in self._start(tensor)]

        def finish() -> None:
            torch.add(slots[0].view_as(out), slots[1].view_as(out), out=out)
            for slot in slots[2:]:
                out.add_(slot.view_as(out))

        return SharedMemoryWork(self, finish)

    def all_to_all(self, tensor: Tensor, out: Tensor) -> SharedMemoryWork:
        """Starts handing part j of `tensor` to rank j; `out` is what came, in rank order."""
        size, index = self.memory.size, self.memory.index
        slots = [slot.chunk(size)[index] for slot in self._start(tensor)]

        def finish() -> None:
            for part, slot in zip(out.chunk(size), slots, strict=True):
                part.copy_(slot.view_as(part))

        return SharedMemoryWork(self, finish)

    def _start(self, tensor: Tensor) -> list[Tensor]:
        """Writes this rank's slot and signals; the slots of all ranks, flat, in rank order."""
        if self.pending:
            raise RuntimeError(
                "a shared-memory collective was started before the last one's wait()"
            )
        self.pending = True
        size, index = self.memory.size, self.memory.index
        turn = self.operations % SLOTS
        self.operations += 1
        slots = [self._slot(rank, turn, tensor) for rank in range(size)]
        slots[index].view(tensor.shape).copy_(tensor)
        self.sizes[index * SLOTS + turn] = tensor.nbytes
        for peer in self.peers:
            self.memory.post(index * size + peer)
        return slots

    @property
    def peers(self) -> list[int]:
        return [rank for rank in range(self.memory.size) if rank != self.memory.index]

    def _slot(self, rank: int, turn: int, like: Tensor) -> Tensor:
        start = (rank * SLOTS + turn) * SLOT_BYTES
        return self.memory.data[start : start + like.nbytes].view(like.dtype)

    def wait_for_peers(self) -> None:
        """Returns once every peer has written its slot of the current operation.

        Raises RuntimeError if one brought a tensor of another size.
        """
        turn = (self.operations - 1) % SLOTS
        mine = self.sizes[self.memory.index * SLOTS + turn]
        for peer in self.peers:
            self.memory.wait(peer * self.memory.size + self.memory.index, peer)
            if (theirs := self.sizes[peer * SLOTS + turn]) != mine:
                raise RuntimeError(
                    f"member {peer} of the group brought {theirs} bytes to a collective, "
                    f"this rank {mine}"
                )


@dataclass
class SharedMemoryWork:
    """A shared-memory collective whose result is there after `wait()`."""

    shared: SharedCollectives
    finish: Callable[[], None]

    def wait(self) -> None:
        self.shared.wait_for_peers()
        self.finish()
        self.shared.pending = False


@dataclass
class InPieces:
    """Collectives that go through the slots one after the other when they are waited for."""

    pieces: list[Callable[[], SharedMemoryWork]]

    def wait(self) -> None:
        for start in self.pieces:
            start().wait()
