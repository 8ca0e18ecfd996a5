"""Memory of a CPU rank: what is freed is kept in huge pages, or given back; imports are no garbage.

Activations of a few megabytes are freed and allocated again all the time. By default the C library
gives such blocks back to the system, which hands out and clears new pages for the next, and with
pages of 4 KiB every one of them costs the processor a walk through its page tables.
"""

from __future__ import annotations

import ctypes
import gc
import mmap
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

# <malloc.h>
M_TRIM_THRESHOLD = -1
M_MMAP_THRESHOLD = -3

LARGEST = 2**31 - 1
# Above what is allocated most often, such as a block of attention's scores; below activations.
GIVEN_BACK = 6 << 20
HUGE_PAGE = 2 << 20
RESERVED = 3 << 29  # address space, below LARGEST; memory is taken as it is touched


def keep_freed_memory(reserved: int = RESERVED) -> bool:
    """Lets malloc serve blocks of any size from one heap that never shrinks, in huge pages.

    To be called before the first large allocation. Huge pages come only where the system offers
    them to programs that ask ("always" or "madvise" in
    /sys/kernel/mm/transparent_hugepage/enabled).

    Returns: whether it was done; False on systems whose C library is not glibc, or where the
    address space is limited.
    """
    libc = ctypes.CDLL(None, use_errno=True)
    if not hasattr(libc, "gnu_get_libc_version") or not hasattr(mmap, "MADV_HUGEPAGE"):
        return False
    libc.malloc.restype, libc.malloc.argtypes = ctypes.c_void_p, [ctypes.c_size_t]
    libc.free.argtypes = [ctypes.c_void_p]
    libc.madvise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
    kept = libc.mallopt(M_MMAP_THRESHOLD, LARGEST) and libc.mallopt(M_TRIM_THRESHOLD, LARGEST)
    block = libc.malloc(reserved) if kept else None
    if block is None:
        return False
    # Freed at once, the block stays as the untouched end of the heap.
    first = (block + HUGE_PAGE - 1) // HUGE_PAGE * HUGE_PAGE
    length = (block + reserved) // HUGE_PAGE * HUGE_PAGE - first
    advised = libc.madvise(first, length, mmap.MADV_HUGEPAGE) == 0
    libc.free(block)
    return advised


def give_back_freed_memory() -> bool:
    """Has malloc return blocks of `GIVEN_BACK` bytes and more to the system when they are freed.

    By itself glibc comes to keep blocks of up to 32 MiB in its heaps, between others that live
    longer: a process then holds what its activations took at their worst, several times over.

    Returns: whether it was done; False on systems whose C library is not glibc.
    """
    libc = ctypes.CDLL(None)
    is_glibc = hasattr(libc, "gnu_get_libc_version")
    return is_glibc and bool(libc.mallopt(M_MMAP_THRESHOLD, GIVEN_BACK))


@contextmanager
def nothing_collected() -> Iterator[None]:
    """Around a process's first import of torch, a tenth of whose time collections would take.

    Of what is imported nothing is ever let go: they would find nothing, and later ones pass over
    what was made meanwhile. Where torch is imported already nothing is changed, as what a
    former job left may be garbage.
    """
    if "torch" in sys.modules or not gc.isenabled():
        yield
        return
    gc.disable()
    try:
        yield
        gc.freeze()
    finally:
        gc.enable()


# Keeps a rank on the CPUs that are close to its GPU.


SYS = Path("/sys")


def bind_near(bus_id: str, sys: Path = SYS) -> set[int]:
    """Keeps the calling thread, and threads that it starts, on the NUMA node of a PCI device.

    Nothing is done where the machine has one node or does not say where the device hangs, and where
    this process may not use all CPUs as it is: srun, numactl or a container has chosen then.

    Args:
        bus_id: as in /sys/bus/pci/devices, "0000:1b:00.0".

    Returns: the CPUs that were chosen; empty if none were.
    """
    if not hasattr(os, "sched_setaffinity"):
        return set()
    cpus = cpus_near(bus_id, sys)
    if cpus and os.sched_getaffinity(0) == _cpus_of(sys / "devices/system/cpu/online"):
        os.sched_setaffinity(0, cpus)
        return cpus
    return set()


def cpus_near(bus_id: str, sys: Path = SYS) -> set[int]:
    """CPUs of the device's NUMA node; empty if there is one node alone, or it is not known."""
    nodes = {path.parent: _cpus_of(path) for path in sys.glob("devices/system/node/node*/cpulist")}
    if sum(bool(cpus) for cpus in nodes.values()) < 2:  # some nodes are a GPU's memory alone
        return set()
    try:
        node = int((sys / "bus/pci/devices" / bus_id / "numa_node").read_text())
    except (OSError, ValueError):
        return set()
    return nodes.get(sys / f"devices/system/node/node{node}", set())  # -1: the firmware is silent


def _cpus_of(path: Path) -> set[int]:
    """Numbers of a list such as "0-3,8,10-11"; empty if it cannot be read."""
    cpus: set[int] = set()
    try:
        for part in filter(None, path.read_text().strip().split(",")):
            first, _, last = part.partition("-")
            cpus.update(range(int(first), int(last or first) + 1))
    except (OSError, ValueError):
        return set()
    return cpus
