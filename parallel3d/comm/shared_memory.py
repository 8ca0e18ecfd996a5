"""Provides memory that CPU ranks of one host share, and collectives that use it.

gloo sends tensors between processes of one machine through TCP. For 512 KiB between two ranks this
takes a millisecond or more, mostly to wake threads. Here ranks read each other's memory.

POSIX semaphores order memory accesses on every processor, let a waiting rank sleep, and support
timeouts. Each rank locks one byte of the shared file, and the kernel releases the lock when the
process ends. A waiting rank tests its peer's lock once a second, so it notices a dead peer. The
file has no name in any folder (peers open it through /proc), so nothing is left behind.
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
from itertools import accumulate, product
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from parallel3d.comm.exchange import all_gather_json
from parallel3d.host.quotas import available_cores

CPU = torch.device("cpu")
SEMAPHORE_BYTES = 64  # a cache line for each semaphore; a sem_t has 32 bytes on Linux
LOOK_S = 1.0  # interval at which a sleeping rank tests whether its peer is alive
# Peers with equal work arrive almost together, so a rank spins for this time before it sleeps. It
# does not spin if there are more ranks than cores, as it would only keep the peer from running.
SPIN_S = 100e-6


class _Timespec(ctypes.Structure):
    _fields_ = (("seconds", ctypes.c_long), ("nanoseconds", ctypes.c_long))


def _libc() -> ctypes.CDLL:
    libc = ctypes.CDLL(None, use_errno=True)
    for name in ("sem_init", "sem_post", "sem_trywait", "sem_timedwait"):
        getattr(libc, name).restype = ctypes.c_int
    return libc


def _wait_until(libc: ctypes.CDLL) -> tuple[int, Callable[[ctypes.c_void_p, Any], int]]:
    """Returns a clock (monotonic if libc allows it), and a function that waits until a time."""
    monotonic = time.CLOCK_MONOTONIC
    if hasattr(libc, "sem_clockwait"):
        return monotonic, lambda semaphore, limit: libc.sem_clockwait(semaphore, monotonic, limit)
    return time.CLOCK_REALTIME, libc.sem_timedwait


@dataclass
class SharedMemory:
    """Signals and bytes (`data`, uint8) that a group's ranks share; see `open_shared_memory`.

    Each kind of signal has a semaphore for every ordered pair of ranks. If a rank had one semaphore
    for all peers, two signals of a fast peer would look like one signal from each of two peers.
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
        memory = mmap.mmap(self.descriptor, self.length)  # stays mapped while a tensor uses it
        everything = torch.frombuffer(memory, dtype=torch.uint8)
        address = everything.data_ptr()
        self.data = everything[_semaphore_area(self.kinds * self.size**2) :]
        self.clock, self.wait_until = _wait_until(self.libc)
        # The memory has a semaphore for each [kind][source][target]. The source posts it, and the
        # target waits for it.
        places = product(range(self.kinds), range(self.size), range(self.size))
        self.semaphores = {
            place: ctypes.c_void_p(address + number * SEMAPHORE_BYTES)
            for number, place in enumerate(places)
            if self.index in place[1:]
        }

    def close(self) -> None:
        """Closes the file and so releases the lock by which peers see that this rank is alive."""
        if self.descriptor >= 0:
            os.close(self.descriptor)
            self.descriptor = -1

    def __del__(self) -> None:
        self.close()  # an open file would keep the memory allocated

    def post(self, peer: int, kind: int = 0) -> None:
        """Sends a signal to member `peer`."""
        self.libc.sem_post(self.semaphores[kind, self.index, peer])

    def wait(self, peer: int, kind: int = 0) -> None:
        """Waits for a signal from `peer`; raises ConnectionError if it ended, or TimeoutError."""
        semaphore = self.semaphores[kind, peer, self.index]
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
                    f"member {peer} of the group has sent no signal for {self.timeout_s:g} s"
                )

    def _sleep(self, semaphore: ctypes.c_void_p, seconds: float) -> bool:
        """Waits for up to `seconds`, and returns whether the semaphore was posted."""
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
    """Returns the number of bytes before the data: enough whole pages for the semaphores."""
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
    """Creates memory that all ranks of a group share, or returns None if they cannot share any.

    The call is collective. The first rank creates a file, which the others open through its /proc
    entry. This fails between containers with separate PID namespaces, and is not tried if host
    names differ. `signals` has the initial value of the semaphores of each kind.
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
        spin_s = SPIN_S if dist.get_world_size() <= available_cores() else 0.0
        return SharedMemory(index, size, descriptor, len(signals), length, timeout_s, spin_s)
    if descriptor >= 0:
        os.close(descriptor)
    return None


def _create(length: int, semaphores: Sequence[int]) -> int:
    """Creates a file that begins with semaphores; returns -1 if memory is short or not on Linux."""
    if not hasattr(os, "memfd_create"):
        return -1
    descriptor = os.memfd_create("parallel3d")
    try:
        # Without this a lack of memory would cause a SIGBUS later.
        os.posix_fallocate(descriptor, 0, length)
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
    """Opens the first rank's file; returns -1 if that fails or if another file is at its path."""
    try:
        descriptor = os.open(path, os.O_RDWR | os.O_CLOEXEC)
    except OSError:
        return -1
    if _identity(descriptor) == identity:
        return descriptor
    os.close(descriptor)
    return -1


# Collectives

SLOT_BYTES = 4 << 20
NUMBER_BYTES = ctypes.sizeof(ctypes.c_int64)
CHUNK_BYTES = 1 << 20  # a chunk stays in a core's cache between its write and its reads
SLOTS = 2
MOST_VIEWS = 256  # maximum number of cached views

# A function (out, parts, index) that computes `out`. The parts (n,) are the contributions of all
# ranks in rank order, and the index is this rank's.
Finish = Callable[[Tensor, list[Tensor], int], None]


def _sum(out: Tensor, parts: list[Tensor], index: int) -> None:
    """Adds the contributions in rank order, so that all ranks get bit-identical sums."""
    torch.add(parts[0], parts[1], out=out)
    for part in parts[2:]:
        out.add_(part)


def _copy(out: Tensor, parts: list[Tensor], index: int) -> None:
    for row, part in zip(out, parts, strict=True):
        row.copy_(part)


def _shift(out: Tensor, parts: list[Tensor], index: int) -> None:
    out.copy_(parts[index - 1])


@dataclass
class SharedCollectives:
    """Collectives of a group of CPU ranks, for contiguous tensors of any size.

    In an operation a rank writes its tensor into one of its two slots, signals every peer, waits
    for the signals of all peers and reads their slots. Successive operations alternate between the
    slots, and a rank starts an operation only after it has read all peers' slots of the previous
    one. Thus a peer's signal for operation n + 1 also means that it has finished operation n.
    The slots of operation n are then free for operation n + 2 without a second signal.

    Several collectives may be in flight. A tensor that fits into a slot is written at once, unless
    the previous operation is still unread. All other tensors are exchanged in chunks, with one
    operation per chunk, when their handle is waited for.

    Attributes:
        unread: the operation that has been written and must be read before the next one is written.
        views: cached views of the slots, because making a view takes as long as a small sum.
    """

    memory: SharedMemory
    operations: int = 0
    unread: SharedWork | None = None
    views: dict[tuple[int, torch.Size, torch.dtype], list[Tensor]] = field(default_factory=dict)

    @classmethod
    def open(
        cls, handle: dist.ProcessGroup, index: int, size: int, timeout_s: float
    ) -> SharedCollectives | None:
        """Opens a group's shared memory, or returns None if ranks cannot share any; collective."""
        data = size * SLOTS * (SLOT_BYTES + NUMBER_BYTES)
        memory = open_shared_memory(handle, index, size, data, timeout_s)
        return None if memory is None else cls(memory)

    def __post_init__(self) -> None:
        # The slots are followed by the number of bytes in each of them. Without these numbers,
        # ranks with tensors of different sizes would read leftovers of an older operation.
        self.size = self.memory.size
        self.index = self.memory.index
        self.peers = [rank for rank in range(self.size) if rank != self.index]
        count = self.size * SLOTS
        address = self.memory.data.data_ptr() + count * SLOT_BYTES
        self.sizes = (ctypes.c_int64 * count).from_address(address)

    def all_reduce(self, tensor: Tensor) -> SharedWork:
        """Starts to sum `tensor` over the ranks in place."""
        return SharedWork(self, tensor, 1, tensor, 1, _sum)

    def reduce_scatter(self, tensor: Tensor, out: Tensor) -> SharedWork:
        """Starts to sum `tensor` (size · n) over the ranks into `out` (n), this rank's part."""
        return SharedWork(self, tensor, self.size, out, 1, _sum)

    def all_gather(self, tensor: Tensor, out: Tensor) -> SharedWork:
        """Starts to gather the tensors (n) of all ranks into `out` (size · n)."""
        return SharedWork(self, tensor, 1, out, self.size, _copy)

    def all_to_all(self, tensor: Tensor, out: Tensor) -> SharedWork:
        """Starts to send part j of `tensor` to rank j; `out` is in the order of the senders."""
        return SharedWork(self, tensor, self.size, out, self.size, _copy)

    def takes_uneven(self, most: int) -> bool:
        """Returns whether a slot has room for an `all_to_all_uneven` of `most` bytes per rank."""
        return self.size * NUMBER_BYTES + most <= SLOT_BYTES

    def all_to_all_uneven(
        self, tensor: Tensor, given: Sequence[int], out: Tensor, taken: Sequence[int]
    ) -> None:
        """Sends `given[j]` consecutive bytes to rank j, and receives `taken[i]` bytes from rank i.

        Both tensors are flat uint8. A slot has a header with the offset of each receiver's bytes.
        """
        if self.unread is not None:
            self.unread.wait()
        turn = self.operations % SLOTS
        self.operations += 1
        slots = [self._slot(rank, turn) for rank in range(self.size)]
        header = self.size * NUMBER_BYTES
        begins = list(accumulate(given[:-1], initial=header))
        slots[self.index][:header].view(torch.int64).copy_(torch.tensor(begins))
        slots[self.index][header : header + tensor.numel()].copy_(tensor)
        for peer in self.peers:
            self.memory.post(peer)
        for peer in self.peers:
            self.memory.wait(peer)
        for slot, part, size in zip(slots, out.split(list(taken)), taken, strict=True):
            begin = int(slot[:header].view(torch.int64)[self.index])
            part.copy_(slot[begin : begin + size])

    def _slot(self, rank: int, turn: int) -> Tensor:
        """Returns the bytes of a rank's slot."""
        begin = (rank * SLOTS + turn) * SLOT_BYTES
        return self.memory.data[begin : begin + SLOT_BYTES]

    def shift(self, tensor: Tensor, out: Tensor) -> SharedWork:
        """Starts to send `tensor` to the next rank; `out` gets the previous rank's tensor."""
        return SharedWork(self, tensor, 1, out, 1, _shift)

    def write(self, given: Tensor) -> list[Tensor]:
        """Writes this rank's slot, signals all peers and returns each slot's part for this rank."""
        turn = self.operations % SLOTS
        self.operations += 1
        slots = self._slots(turn, given.shape, given.dtype)
        slots[self.index].copy_(given)
        self.sizes[self.index * SLOTS + turn] = given.nbytes
        for peer in self.peers:
            self.memory.post(peer)
        # The sum of two tensors may be written into one of them, but a longer sum must not.
        if self.size == 2:
            slots[self.index] = given
        return slots if given.dim() == 1 else [slot[self.index] for slot in slots]

    def _slots(self, turn: int, shape: torch.Size, dtype: torch.dtype) -> list[Tensor]:
        """Returns one slot of every rank, each as a tensor of this shape."""
        key = turn, shape, dtype
        if key not in self.views:
            if len(self.views) == MOST_VIEWS:
                self.views.clear()
            starts = range(turn * SLOT_BYTES, self.size * SLOTS * SLOT_BYTES, SLOTS * SLOT_BYTES)
            length, data = shape.numel() * dtype.itemsize, self.memory.data
            self.views[key] = [data[i : i + length].view(dtype).view(shape) for i in starts]
        return self.views[key].copy()

    def wait_for_peers(self) -> None:
        """Waits until every peer has written its slot; raises RuntimeError if sizes differ."""
        turn = (self.operations - 1) % SLOTS
        mine = self.sizes[self.index * SLOTS + turn]
        for peer in self.peers:
            self.memory.wait(peer)
            if (theirs := self.sizes[peer * SLOTS + turn]) != mine:
                raise RuntimeError(
                    f"member {peer} of the group brought {theirs} bytes to a collective, "
                    f"but this rank {mine}"
                )


class SharedWork:
    """The handle of a collective in shared memory.

    Args:
        rows: number of parts of `tensor`: one for each rank, or a single one for all ranks.
        out_rows: number of parts of `out`: one from each rank, or a single one from all ranks.
    """

    def __init__(
        self,
        shared: SharedCollectives,
        tensor: Tensor,
        rows: int,
        out: Tensor,
        out_rows: int,
        finish: Finish,
    ) -> None:
        self.shared = shared
        self.finish = finish
        self.most_rows = max(rows, out_rows)
        self.given = tensor.view(-1) if rows == 1 else tensor.view(rows, -1)
        self.out = self.given
        if out is not tensor:
            self.out = out.view(-1) if out_rows == 1 else out.view(out_rows, -1)
        self.done = False
        self.parts: list[Tensor] | None = None
        if tensor.nbytes <= SLOT_BYTES and shared.unread is None:
            self.parts = shared.write(self.given)
            shared.unread = self

    def wait(self) -> None:
        if self.done:
            return
        self.done = True
        # The tensors are released here, because a handle may live longer than they should.
        given = self.given
        out = self.out
        parts = self.parts
        del self.given, self.out, self.parts
        if parts is not None:
            self._read(out, parts)
            self.shared.unread = None
            return
        if self.shared.unread is not None:
            self.shared.unread.wait()
        columns = CHUNK_BYTES // (given.itemsize * self.most_rows)
        for chunk, of_out in zip(given.split(columns, -1), out.split(columns, -1), strict=True):
            self._read(of_out, self.shared.write(chunk))

    @torch.no_grad()  # `wait` may be called where gradients are enabled
    def _read(self, out: Tensor, parts: list[Tensor]) -> None:
        self.shared.wait_for_peers()
        self.finish(out, parts, self.shared.index)
