"""Memory that CPU ranks of one host share, with semaphores to take turns by.

gloo moves tensors between processes of one machine through TCP: at 512 KiB between two ranks that
costs a millisecond or more, most of it waking threads. Ranks on one host can as well write into
memory that the others read. `shared_collectives.py` and `pipeline/mailbox.py` build on this.

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
import socket
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import torch
import torch.distributed as dist

from parallel3d.exchange import all_gather_json

CPU = torch.device("cpu")
FOLDER = Path("/dev/shm")
SEMAPHORE_BYTES = 64  # a sem_t has 32 on Linux; one cache line each
LOOK_S = 1.0  # how often a sleeping rank looks whether its peer lives
SPIN_S = 100e-6  # peers that compute the same arrive together: look for a while before sleeping


class _Timespec(ctypes.Structure):
    _fields_ = (("seconds", ctypes.c_long), ("nanoseconds", ctypes.c_long))


def _libc() -> ctypes.CDLL:
    libc = ctypes.CDLL(None, use_errno=True)
    for name in ("sem_init", "sem_post", "sem_trywait", "sem_timedwait"):
        getattr(libc, name).restype = ctypes.c_int
    return libc


@dataclass
class SharedMemory:
    """Semaphores and bytes that all ranks of a group see; made by `open_shared_memory`.

    Attributes:
        index, size: this rank's place in the group, and the group's size.
        data: (bytes,) uint8, the same memory in every rank.
    """

    index: int
    size: int
    descriptor: int
    semaphores: int
    length: int
    timeout_s: float
    libc: ctypes.CDLL = field(default_factory=_libc)

    def __post_init__(self) -> None:
        memory = mmap.mmap(self.descriptor, self.length)  # lives as long as a tensor in it
        everything = torch.frombuffer(memory, dtype=torch.uint8)
        self.address = everything.data_ptr()
        self.data = everything[_semaphore_area(self.semaphores) :]

    def close(self) -> None:
        """Lets go of the file, and with it of the lock by which peers see this rank alive."""
        if self.descriptor >= 0:
            os.close(self.descriptor)
            self.descriptor = -1

    def __del__(self) -> None:
        self.close()  # an open file keeps its memory

    def _semaphore(self, number: int) -> ctypes.c_void_p:
        return ctypes.c_void_p(self.address + number * SEMAPHORE_BYTES)

    def post(self, number: int) -> None:
        """Adds one to a semaphore."""
        self.libc.sem_post(self._semaphore(number))

    def wait(self, number: int, peer: int) -> None:
        """Takes one from a semaphore that member `peer` posts; sleeps until it can.

        Raises:
            ConnectionError: the peer has ended.
            TimeoutError: the peer did not post within the group's timeout.
        """
        semaphore = self._semaphore(number)
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
                    f"member {peer} of the group was not heard of for {self.timeout_s:g} s"
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


def _semaphore_area(semaphores: int) -> int:
    """Bytes before the data, whole pages."""
    page = mmap.PAGESIZE
    return (semaphores * SEMAPHORE_BYTES + page - 1) // page * page


def open_shared_memory(
    handle: dist.ProcessGroup,
    index: int,
    size: int,
    semaphores: Sequence[int],
    data_bytes: int,
    timeout_s: float,
) -> SharedMemory | None:
    """Memory shared by the group's ranks, or None if they cannot share any; collective.

    The first rank makes a file, the others try to open it: in a container with a /dev/shm of its
    own they cannot, and the group does without, as it does where host names differ. (Two hosts can
    see one /dev/shm: nodes made of namespaces, or of containers on one machine.)

    Args:
        semaphores: their initial values.
        data_bytes: bytes beside them, the same on every rank.
    """
    length = _semaphore_area(len(semaphores)) + data_bytes
    name, descriptor = _create(length, semaphores) if index == 0 else ("", -1)
    host = socket.gethostname()
    host_of_first, file = all_gather_json((host, name), handle, CPU)[0]
    if index > 0 and host_of_first == host and file:
        descriptor = _attach(file, length)
    if descriptor >= 0:
        fcntl.lockf(descriptor, fcntl.LOCK_EX, 1, index)
    attached = all_gather_json(descriptor >= 0, handle, CPU)
    if name:
        os.unlink(name)
    if all(attached):
        return SharedMemory(index, size, descriptor, len(semaphores), length, timeout_s)
    if descriptor >= 0:
        os.close(descriptor)
    return None


def _create(length: int, semaphores: Sequence[int]) -> tuple[str, int]:
    """A file of `length` bytes with its semaphores set; ("", -1) where there is no room."""
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
    with mmap.mmap(descriptor, _semaphore_area(len(semaphores))) as memory:
        start = ctypes.addressof(ctypes.c_char.from_buffer(memory))
        for i, initial in enumerate(semaphores):
            libc.sem_init(ctypes.c_void_p(start + i * SEMAPHORE_BYTES), 1, initial)
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
