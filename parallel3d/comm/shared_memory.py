"""Shared memory and collectives between CPU ranks of one host.

gloo moves tensors between processes of one machine through TCP: at 512 KiB between two ranks that
costs a millisecond or more, most of it waking threads. Here ranks read each other's memory.

POSIX semaphores order memory accesses on every processor, let a waiting rank sleep, and can time
out. Each rank holds a lock on its byte of the file, which the kernel drops with the process: a
waiting rank tests it once a second, so a dead peer is noticed and named. The file has no name in
any folder (peers open it through /proc), so nothing is left behind, however a rank ends.
"""

from __future__ import annotations

import ctypes
import errno
import fcntl
import mmap
import os
import socket
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from parallel3d.comm.exchange import all_gather_json

CPU = torch.device("cpu")
SEMAPHORE_BYTES = 64  # a sem_t has 32 on Linux; one cache line each
LOOK_S = 1.0  # how often a sleeping rank tests whether its peer lives
# Peers that compute the same arrive together: spin before sleeping. Not where ranks outnumber the
# cores: spinning would only keep a core from the peer.
SPIN_S = 100e-6


class _Timespec(ctypes.Structure):
    _fields_ = (("seconds", ctypes.c_long), ("nanoseconds", ctypes.c_long))


def _libc() -> ctypes.CDLL:
    libc = ctypes.CDLL(None, use_errno=True)
    for name in ("sem_init", "sem_post", "sem_trywait", "sem_timedwait"):
        getattr(libc, name).restype = ctypes.c_int
    return libc


def _wait_until(libc: ctypes.CDLL) -> tuple[int, Callable[[ctypes.c_void_p, Any], int]]:
    """Returns a clock (monotonic where libc has it) and a wait until one of its times."""
    monotonic = time.CLOCK_MONOTONIC
    if hasattr(libc, "sem_clockwait"):
        return monotonic, lambda semaphore, limit: libc.sem_clockwait(semaphore, monotonic, limit)
    return time.CLOCK_REALTIME, libc.sem_timedwait


@dataclass
class SharedMemory:
    """Signals and bytes (`data`, uint8) shared by a group's ranks; see `open_shared_memory`.

    Each kind of signal has a semaphore for every pair of ranks: with one for all peers, two posts
    of a fast peer would be taken for one post of each of two peers.
    """

    index: int
    size: int
    descriptor: int
    kinds: int
    length: int
    timeout_s: float
    spin_s: float = SPIN_S
    libc: ctypes.CDLL = field(default_factory=_libc)

    def __post_init__(self) -> None:
        memory = mmap.mmap(self.descriptor, self.length)  # lives as long as a tensor in it
        everything = torch.frombuffer(memory, dtype=torch.uint8)
        self.address = everything.data_ptr()
        self.data = everything[_semaphore_area(self.kinds * self.size**2) :]
        self.clock, self.wait_until = _wait_until(self.libc)

    def close(self) -> None:
        """Closes the file, and so drops the lock by which peers see this rank alive."""
        if self.descriptor >= 0:
            os.close(self.descriptor)
            self.descriptor = -1

    def __del__(self) -> None:
        self.close()  # an open file keeps its memory

    def _semaphore(self, kind: int, source: int, target: int) -> ctypes.c_void_p:
        """Returns the semaphore that `source` posts and `target` waits for."""
        number = (kind * self.size + source) * self.size + target  # [kind][source][target]
        return ctypes.c_void_p(self.address + number * SEMAPHORE_BYTES)

    def post(self, peer: int, kind: int = 0) -> None:
        """Signals member `peer`."""
        self.libc.sem_post(self._semaphore(kind, self.index, peer))

    def wait(self, peer: int, kind: int = 0) -> None:
        """Takes one signal of member `peer`. Raises ConnectionError, TimeoutError."""
        semaphore = self._semaphore(kind, peer, self.index)
        start = time.perf_counter()
        while self.libc.sem_trywait(semaphore) != 0:
            if time.perf_counter() - start >= self.spin_s:
                break
            os.sched_yield()
        else:
            return
        while not self._sleep(semaphore, min(LOOK_S, self.timeout_s)):
            if not self._is_alive(peer) and self.libc.sem_trywait(semaphore) != 0:
                raise ConnectionError(f"member {peer} of the group has ended")
            if time.perf_counter() - start > self.timeout_s:
                raise TimeoutError(
                    f"member {peer} of the group was not heard of for {self.timeout_s:g} s"
                )

    def _sleep(self, semaphore: ctypes.c_void_p, seconds: float) -> bool:
        """Returns whether the semaphore was posted within `seconds`."""
        deadline = time.clock_gettime(self.clock) + seconds
        limit = _Timespec(int(deadline), int(deadline % 1 * 1e9))
        if self.wait_until(semaphore, ctypes.byref(limit)) == 0:
            return True
        reason = ctypes.get_errno()
        if reason not in (errno.ETIMEDOUT, errno.EINTR):
            raise OSError(reason, os.strerror(reason))
        return False

    def _is_alive(self, peer: int) -> bool:
        try:
            fcntl.lockf(self.descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB, 1, peer)
        except OSError:
            return True
        fcntl.lockf(self.descriptor, fcntl.LOCK_UN, 1, peer)
        return False


def _semaphore_area(semaphores: int) -> int:
    """Returns the bytes before the data, whole pages."""
    page = mmap.PAGESIZE
    return (semaphores * SEMAPHORE_BYTES + page - 1) // page * page


def open_shared_memory(
    handle: dist.ProcessGroup,
    index: int,
    size: int,
    data_bytes: int,
    timeout_s: float,
    signals: Sequence[int] = (0,),
) -> SharedMemory | None:
    """Creates memory shared by the group's ranks; None if they cannot share any; collective.

    The first rank creates a file, which the others open through that rank's /proc entry. In a
    container with its own PID namespace they cannot; where host names differ they do not try.
    `signals`: for each kind of signal, how many are there at the start.
    """
    semaphores = [initial for initial in signals for _ in range(size**2)]
    length = _semaphore_area(len(semaphores)) + data_bytes
    descriptor = _create(length, semaphores) if index == 0 else -1
    host = socket.gethostname()
    mine = (host, os.getpid(), descriptor, _identity(descriptor))
    host_of_first, pid, number, identity = all_gather_json(mine, handle, CPU)[0]
    if index > 0 and host_of_first == host and number >= 0:
        descriptor = _attach(f"/proc/{pid}/fd/{number}", identity)
    if descriptor >= 0:
        fcntl.lockf(descriptor, fcntl.LOCK_EX, 1, index)
    attached = all_gather_json(descriptor >= 0, handle, CPU)
    if all(attached):
        spin_s = SPIN_S if dist.get_world_size() <= (os.cpu_count() or 1) else 0.0
        return SharedMemory(index, size, descriptor, len(signals), length, timeout_s, spin_s)
    if descriptor >= 0:
        os.close(descriptor)
    return None


def _create(length: int, semaphores: Sequence[int]) -> int:
    """Creates a file of `length` bytes with its semaphores; -1 without memory for it or Linux."""
    if not hasattr(os, "memfd_create"):
        return -1
    descriptor = os.memfd_create("parallel3d")
    try:
        os.posix_fallocate(descriptor, 0, length)  # fails here instead of by a SIGBUS later
    except OSError:
        os.close(descriptor)
        return -1
    libc = _libc()
    with mmap.mmap(descriptor, _semaphore_area(len(semaphores))) as memory:
        start = ctypes.addressof(ctypes.c_char.from_buffer(memory))
        for i, initial in enumerate(semaphores):
            libc.sem_init(ctypes.c_void_p(start + i * SEMAPHORE_BYTES), 1, initial)
    return descriptor


def _identity(descriptor: int) -> list[int]:
    if descriptor < 0:
        return []
    found = os.fstat(descriptor)
    return [found.st_dev, found.st_ino, found.st_size]


def _attach(path: str, identity: list[int]) -> int:
    """Opens the first rank's file; -1 if this rank cannot see it, or sees another in its place."""
    try:
        descriptor = os.open(path, os.O_RDWR | os.O_CLOEXEC)
    except OSError:
        return -1
    if _identity(descriptor) == identity:
        return descriptor
    os.close(descriptor)
    return -1


# Collectives

SLOT_BYTES = 4 << 20  # larger tensors go through in chunks
CHUNK_BYTES = 1 << 20  # stays in a core's cache between its two passes
SLOTS = 2


@dataclass
class SharedCollectives:
    """Collectives of one group on one of its ranks, one operation at a time.

    A collective writes the rank's tensor into one of its two slots, posts a semaphore to each peer,
    waits for theirs and reads their slots. Operations alternate between the slots, and a rank
    starts its next operation only after reading all peers' slots of the last. So a peer's signal
    for operation n + 1 also says that this peer is done with operation n, whose slot may then take
    operation n + 2: no second signal is needed.
    """

    memory: SharedMemory
    operations: int = 0
    pending: bool = False

    @classmethod
    def open(
        cls, handle: dist.ProcessGroup, index: int, size: int, timeout_s: float
    ) -> SharedCollectives | None:
        """Opens the group's shared memory; None where ranks cannot share any; collective."""
        data = size * SLOTS * (SLOT_BYTES + ctypes.sizeof(ctypes.c_int64))
        memory = open_shared_memory(handle, index, size, data, timeout_s)
        return None if memory is None else cls(memory)

    def __post_init__(self) -> None:
        # Behind the slots: bytes in each slot. Ranks with tensors of different sizes would
        # otherwise add leftovers of an older operation.
        count = self.memory.size * SLOTS
        address = self.memory.data.data_ptr() + count * SLOT_BYTES
        self.sizes = (ctypes.c_int64 * count).from_address(address)

    def fits(self, tensor: Tensor) -> bool:
        return tensor.device.type == "cpu" and tensor.nbytes <= SLOT_BYTES

    def all_reduce(self, tensor: Tensor) -> SharedWork:
        """Starts the sum over the ranks, in place, in rank order: bit-identical on every rank."""
        slots = self._start(tensor)

        def finish() -> None:
            if len(slots) == 2:  # a + b == b + a
                tensor.add_(slots[1 - self.memory.index].view_as(tensor))
                return
            torch.add(slots[0].view_as(tensor), slots[1].view_as(tensor), out=tensor)
            for slot in slots[2:]:
                tensor.add_(slot.view_as(tensor))

        return SharedWork(self, finish)

    def all_reduce_in_chunks(self, tensor: Tensor) -> InChunks:
        """Returns the in-place sum of a tensor of any size; several may be in flight."""
        chunks = self._chunks(tensor.view(-1))
        return InChunks([partial(self.all_reduce, chunk) for chunk in chunks])

    def reduce_scatter_in_chunks(self, tensor: Tensor, own: Tensor) -> InChunks:
        """Returns the sum of flat (size · n), any n, into this rank's `own` (n); see above."""
        size = self.memory.size
        rows, outs = self._chunks(tensor.view(size, -1), size), self._chunks(own, size)
        pairs = zip(rows, outs, strict=True)
        return InChunks([partial(self.reduce_scatter, row, out.unsqueeze(0)) for row, out in pairs])

    def all_gather_in_chunks(self, own: Tensor, out: Tensor) -> InChunks:
        """Returns the gathering of flat (n) of every rank into `out` (size · n); see above."""
        size = self.memory.size
        pairs = zip(self._chunks(own, size), self._chunks(out.view(size, -1), size), strict=True)
        return InChunks([partial(self.all_gather, chunk, row) for chunk, row in pairs])

    def all_to_all_in_chunks(self, tensor: Tensor, out: Tensor) -> InChunks:
        """Returns the exchange of contiguous (size · n, ...) of any size; see above."""
        size = self.memory.size
        rows, outs = (self._chunks(x.view(size, -1), size) for x in (tensor, out))
        return InChunks([partial(self.all_to_all, *pair) for pair in zip(rows, outs, strict=True)])

    def shift_in_chunks(self, tensor: Tensor, out: Tensor) -> InChunks:
        """Returns the sending of a contiguous tensor of any size to the next rank; see above."""
        pairs = zip(self._chunks(tensor.view(-1)), self._chunks(out.view(-1)), strict=True)
        return InChunks([partial(self.shift, *pair) for pair in pairs])

    @staticmethod
    def _chunks(tensor: Tensor, shards: int = 1) -> tuple[Tensor, ...]:
        """Splits the last dimension such that a chunk of each shard fits into one slot."""
        return tensor.split(CHUNK_BYTES // (tensor.itemsize * shards), dim=-1)

    def all_gather(self, tensor: Tensor, out: Tensor) -> SharedWork:
        slots = self._start(tensor)

        def finish() -> None:
            for part, slot in zip(out.chunk(len(slots)), slots, strict=True):
                part.copy_(slot.view_as(part))

        return SharedWork(self, finish)

    def reduce_scatter(self, tensor: Tensor, out: Tensor) -> SharedWork:
        """Starts the sum of (size · n, ...) over the ranks into this rank's `out` (n, ...)."""
        size, index = self.memory.size, self.memory.index
        slots = [slot.chunk(size)[index] for slot in self._start(tensor)]

        def finish() -> None:
            torch.add(slots[0].view_as(out), slots[1].view_as(out), out=out)
            for slot in slots[2:]:
                out.add_(slot.view_as(out))

        return SharedWork(self, finish)

    def all_to_all(self, tensor: Tensor, out: Tensor) -> SharedWork:
        """Starts sending part j of `tensor` to rank j; `out` is in order of senders."""
        size, index = self.memory.size, self.memory.index
        slots = [slot.chunk(size)[index] for slot in self._start(tensor)]

        def finish() -> None:
            for part, slot in zip(out.chunk(size), slots, strict=True):
                part.copy_(slot.view_as(part))

        return SharedWork(self, finish)

    def shift(self, tensor: Tensor, out: Tensor) -> SharedWork:
        """Starts sending `tensor` to the next rank; `out` is what the rank before sends."""
        slot = self._start(tensor)[self.memory.index - 1]

        def finish() -> None:
            out.copy_(slot.view_as(out))

        return SharedWork(self, finish)

    def _start(self, tensor: Tensor) -> list[Tensor]:
        """Writes this rank's slot, signals, and returns the flat slots of all ranks in order."""
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
            self.memory.post(peer)
        return slots

    @property
    def peers(self) -> list[int]:
        return [rank for rank in range(self.memory.size) if rank != self.memory.index]

    def _slot(self, rank: int, turn: int, like: Tensor) -> Tensor:
        start = (rank * SLOTS + turn) * SLOT_BYTES
        return self.memory.data[start : start + like.nbytes].view(like.dtype)

    def wait_for_peers(self) -> None:
        """Waits until every peer has written its slot; RuntimeError if one has another size."""
        turn = (self.operations - 1) % SLOTS
        mine = self.sizes[self.memory.index * SLOTS + turn]
        for peer in self.peers:
            self.memory.wait(peer)
            if (theirs := self.sizes[peer * SLOTS + turn]) != mine:
                raise RuntimeError(
                    f"member {peer} of the group brought {theirs} bytes to a collective, "
                    f"this rank {mine}"
                )


@dataclass
class SharedWork:
    """Handle of a shared-memory collective."""

    shared: SharedCollectives
    finish: Callable[[], None]

    def wait(self) -> None:
        self.shared.wait_for_peers()
        self.finish()
        self.shared.pending = False


@dataclass
class InChunks:
    """Handle of collectives that its wait does one after the other."""

    chunks: list[Callable[[], SharedWork]]

    def wait(self) -> None:
        for start in self.chunks:
            start().wait()
