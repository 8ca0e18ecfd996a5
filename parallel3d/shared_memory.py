"""Collectives between CPU ranks of one host through memory that they share.

gloo moves activations between processes of one machine through TCP: at 512 KiB between two ranks
that costs a millisecond or more, most of it waking threads. Ranks on one host can as well write
into memory that the others read.

Every rank has two slots. A collective writes the rank's tensor into a slot, tells each peer by a
semaphore, waits for theirs and reads their slots. Operations use the slots in turn, and a rank
starts its next operation only after it has read all peers' slots of the one before. So whoever
sees a peer's signal for operation n + 1 knows that the peer has done with operation n, and may
write operation n + 2 into the slot of n: no second signal is needed.

POSIX semaphores give the memory ordering on every processor, let a waiting rank sleep, and can
time out. Each rank holds a lock on its byte of the file, which the kernel drops with the process:
whoever waits looks at it once a second, so a dead peer is noticed and named. The file is unlinked
as soon as all have it: nothing is left behind, however a rank ends.
"""

from __future__ import annotations

import ctypes
import errno
import fcntl
import mmap
import os
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor

FOLDER = Path("/dev/shm")
SLOT_BYTES = 4 << 20  # larger sums go through in pieces
PIECE_BYTES = 1 << 20  # of such a sum: stays in a core's cache between its two passes
SLOTS = 2
SEMAPHORE_BYTES = 64  # a sem_t has 32 on Linux; one cache line each
LOOK_S = 1.0  # how often a sleeping rank looks whether its peer lives
SPIN_S = 100e-6  # peers that compute the same arrive together: look for a while before sleeping


class _Timespec(ctypes.Structure):
    _fields_ = [("seconds", ctypes.c_long), ("nanoseconds", ctypes.c_long)]


def _libc() -> ctypes.CDLL:
    libc = ctypes.CDLL(None, use_errno=True)
    for name in ("sem_init", "sem_post", "sem_trywait", "sem_timedwait"):
        getattr(libc, name).restype = ctypes.c_int
    return libc


@dataclass
class SharedMemory:
    """The shared slots of one group, seen by one of its ranks; see `open_shared_memory`."""

    index: int
    size: int
    descriptor: int
    length: int
    timeout_s: float
    libc: ctypes.CDLL = field(default_factory=_libc)
    operations: int = 0
    pending: bool = False

    def __post_init__(self) -> None:
        memory = mmap.mmap(self.descriptor, self.length)  # lives as long as a tensor in it
        self.bytes = torch.frombuffer(memory, dtype=torch.uint8)
        self.address = self.bytes.data_ptr()

    def fits(self, tensor: Tensor) -> bool:
        return tensor.device.type == "cpu" and tensor.nbytes <= SLOT_BYTES

    def all_reduce(self, tensor: Tensor) -> Pending:
        """Starts the sum over the ranks, in place, in rank order: equal bits on every rank."""
        slots = self._start(tensor)

        def finish() -> None:
            if self.size == 2:
                tensor.add_(slots[1 - self.index].view_as(tensor))  # a + b == b + a
                return
            torch.add(slots[0].view_as(tensor), slots[1].view_as(tensor), out=tensor)
            for slot in slots[2:]:
                tensor.add_(slot.view_as(tensor))

        return Pending(self, finish)

    def all_reduce_in_pieces(self, tensor: Tensor) -> InPieces:
        """The sum of a tensor of any size, in place; all of the work is done in `wait()`.

        For gradient buckets, of which several are under way: nothing is shared before the wait, so
        they do not meet, as long as all ranks wait for them in the same order.
        """
        return InPieces(self, tensor)

    def all_gather(self, tensor: Tensor, out: Tensor) -> Pending:
        """Starts gathering (n, ...) of every rank into `out` (size · n, ...)."""
        slots = self._start(tensor)

        def finish() -> None:
            for part, slot in zip(out.chunk(self.size), slots, strict=True):
                part.copy_(slot.view_as(part))

        return Pending(self, finish)

    def reduce_scatter(self, tensor: Tensor, out: Tensor) -> Pending:
        """Starts the sum of (size · n, ...) over the ranks; `out` (n, ...) is this rank's part."""
        slots = [slot.chunk(self.size)[self.index] for slot in self._start(tensor)]

        def finish() -> None:
            torch.add(slots[0].view_as(out), slots[1].view_as(out), out=out)
            for slot in slots[2:]:
                out.add_(slot.view_as(out))

        return Pending(self, finish)

    def _start(self, tensor: Tensor) -> list[Tensor]:
        """Writes this rank's slot and signals; the slots of all ranks, flat, in rank order."""
        if self.pending:
            raise RuntimeError(
                "a shared-memory collective was started before the last one's wait()"
            )
        self.pending = True
        turn = self.operations % SLOTS
        self.operations += 1
        slots = [self._slot(rank, turn, tensor) for rank in range(self.size)]
        slots[self.index].copy_(tensor.reshape(-1))
        for peer in range(self.size):
            if peer != self.index:
                self.libc.sem_post(self._semaphore(self.index, peer))
        return slots

    def _slot(self, rank: int, turn: int, like: Tensor) -> Tensor:
        start = _semaphore_area(self.size) + (rank * SLOTS + turn) * SLOT_BYTES
        return self.bytes[start : start + like.nbytes].view(like.dtype)

    def _semaphore(self, writer: int, reader: int) -> ctypes.c_void_p:
        place = (writer * self.size + reader) * SEMAPHORE_BYTES
        return ctypes.c_void_p(self.address + place)

    def close(self) -> None:
        """Lets go of the file, and with it of the lock by which peers see this rank alive."""
        os.close(self.descriptor)

    def wait_for_peers(self) -> None:
        """Returns once every peer has written its slot of the current operation.

        Raises:
            ConnectionError: a peer has ended.
            TimeoutError: a peer did not come within the group's timeout.
        """
        for peer in range(self.size):
            if peer != self.index:
                self._wait(peer)

    def _wait(self, peer: int) -> None:
        semaphore = self._semaphore(peer, self.index)
        start = time.perf_counter()
        while self.libc.sem_trywait(semaphore) != 0:
            if time.perf_counter() - start > SPIN_S:
                break
            os.sched_yield()
        else:
            return
        while not self._sleep(semaphore, min(LOOK_S, self.timeout_s)):
            if not self._lives(peer) and self.libc.sem_trywait(semaphore) != 0:
                raise ConnectionError(f"member {peer} of the group has ended")
            if time.perf_counter() - start > self.timeout_s:
                raise TimeoutError(
                    f"member {peer} of the group did not join a collective within "
                    f"{self.timeout_s:g} s"
                )

    def _sleep(self, semaphore: ctypes.c_void_p, seconds: float) -> bool:
        """Whether the semaphore came within `seconds`."""
        deadline = time.time() + seconds
        limit = _Timespec(int(deadline), int(deadline % 1 * 1e9))
        if self.libc.sem_timedwait(semaphore, ctypes.byref(limit)) == 0:
            return True
        reason = ctypes.get_errno()
        if reason not in (errno.ETIMEDOUT, errno.EINTR):
            raise OSError(reason, os.strerror(reason))
        return False

    def _lives(self, peer: int) -> bool:
        """Whether the peer still holds the lock on its byte."""
        try:
            fcntl.lockf(self.descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB, 1, peer)
        except OSError:
            return True
        fcntl.lockf(self.descriptor, fcntl.LOCK_UN, 1, peer)
        return False


@dataclass
class Pending:
    """A shared-memory collective whose result is there after `wait()`."""

    shared: SharedMemory
    finish: Callable[[], None]

    def wait(self) -> None:
        self.shared.wait_for_peers()
        self.finish()
        self.shared.pending = False


@dataclass
class InPieces:
    """A sum that goes through the slots piece by piece when it is waited for."""

    shared: SharedMemory
    tensor: Tensor

    def wait(self) -> None:
        for piece in self.tensor.view(-1).split(PIECE_BYTES // self.tensor.itemsize):
            self.shared.all_reduce(piece).wait()


def _semaphore_area(size: int) -> int:
    """Bytes before the first slot, whole pages."""
    page = mmap.PAGESIZE
    return (size * size * SEMAPHORE_BYTES + page - 1) // page * page


def open_shared_memory(
    handle: dist.ProcessGroup, index: int, size: int, timeout_s: float
) -> SharedMemory | None:
    """Shared memory of the group's ranks, or None if they cannot share any; collective.

    The first rank makes a file, the others try to open it: on another host, or in a container with
    a /dev/shm of its own, they cannot, and the group does without.
    """
    length = _semaphore_area(size) + size * SLOTS * SLOT_BYTES
    name, descriptor = _create(length, size) if index == 0 else ("", -1)
    names: list[str | None] = [None] * size
    dist.all_gather_object(names, name, group=handle)
    if index > 0 and names[0]:
        descriptor = _attach(names[0], length)
    if descriptor >= 0:
        fcntl.lockf(descriptor, fcntl.LOCK_EX, 1, index)
    attached: list[bool | None] = [None] * size
    dist.all_gather_object(attached, descriptor >= 0, group=handle)
    if name:
        os.unlink(name)
    if all(attached):
        return SharedMemory(index, size, descriptor, length, timeout_s)
    if descriptor >= 0:
        os.close(descriptor)
    return None


def _create(length: int, size: int) -> tuple[str, int]:
    """A file of `length` bytes with its semaphores at zero; ("", -1) where there is no room."""
    if sys.platform != "linux" or not os.access(FOLDER, os.W_OK):
        return "", -1
    descriptor, name = tempfile.mkstemp(prefix="parallel3d-", dir=FOLDER)
    try:
        os.posix_fallocate(descriptor, 0, length)  # a full tmpfs must show here, not as a SIGBUS
    except OSError:
        os.close(descriptor)
        os.unlink(name)
        return "", -1
    libc = _libc()
    with mmap.mmap(descriptor, _semaphore_area(size)) as memory:
        start = ctypes.addressof(ctypes.c_char.from_buffer(memory))
        for i in range(size * size):
            libc.sem_init(ctypes.c_void_p(start + i * SEMAPHORE_BYTES), 1, 0)
    return name, descriptor


def _attach(name: str, length: int) -> int:
    """The first rank's file, or -1 if this rank cannot see it."""
    try:
        descriptor = os.open(name, os.O_RDWR)
    except OSError:
        return -1
    if os.fstat(descriptor).st_size == length:
        return descriptor
    os.close(descriptor)
    return -1
