"""Tunes a rank's memory and CPUs: malloc, huge pages, garbage collection, NUMA binding.

Activations of a few megabytes are freed and allocated all the time. By default the C library
returns such blocks to the system, which has to clear new pages for the next blocks. Pages of 4 KiB
also cost page-table walks.
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
HUGE_PAGE = 2 << 20
RESERVED = 3 << 29  # bytes of address space, below LARGEST; memory is only used once it is touched


def keep_freed_memory() -> bool:
    """Makes malloc serve blocks of any size from one heap that never shrinks, in huge pages.

    Call it before the first large allocation. Huge pages need "always" or "madvise" in
    /sys/kernel/mm/transparent_hugepage/enabled. Returns whether it succeeded; it fails, for
    example, without glibc or in a limited address space.
    """
    libc = ctypes.CDLL(None, use_errno=True)
    if not hasattr(libc, "gnu_get_libc_version") or not hasattr(mmap, "MADV_HUGEPAGE"):
        return False
    libc.malloc.restype = ctypes.c_void_p
    libc.malloc.argtypes = [ctypes.c_size_t]
    libc.free.argtypes = [ctypes.c_void_p]
    libc.madvise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
    kept = libc.mallopt(M_MMAP_THRESHOLD, LARGEST) and libc.mallopt(M_TRIM_THRESHOLD, LARGEST)
    block = libc.malloc(RESERVED) if kept else None
    if block is None:
        return False
    # The block is freed at once and stays as the untouched end of the heap.
    first = (block + HUGE_PAGE - 1) // HUGE_PAGE * HUGE_PAGE
    length = (block + RESERVED) // HUGE_PAGE * HUGE_PAGE - first
    advised = libc.madvise(first, length, mmap.MADV_HUGEPAGE) == 0
    libc.free(block)
    return advised


@contextmanager
def nothing_collected() -> Iterator[None]:
    """Disables garbage collection while the block imports torch, to save a tenth of the time."""
    if "torch" in sys.modules or not gc.isenabled():
        yield
        return
    gc.disable()
    try:
        yield
        gc.freeze()
    finally:
        gc.enable()


# CPUs close to a GPU

SYS = Path("/sys")


def bind_near(bus_id: str, sys: Path = SYS) -> set[int]:
    """Binds the calling thread, and threads that it starts, to the NUMA node of a PCI device.

    It binds only if the machine has several nodes and this process may use all CPUs; if it may not,
    srun, numactl or a container has chosen CPUs. Returns the CPUs of the node, or an empty set
    if nothing was bound.
    """
    if not hasattr(os, "sched_setaffinity"):
        return set()
    cpus = cpus_near(bus_id, sys)
    if cpus and os.sched_getaffinity(0) == _cpus_of(sys / "devices/system/cpu/online"):
        os.sched_setaffinity(0, cpus)
        return cpus
    return set()


def cpus_near(bus_id: str, sys: Path = SYS) -> set[int]:
    """Returns the CPUs of the device's NUMA node, or none if it is unknown or the only node."""
    nodes = {path.parent: _cpus_of(path) for path in sys.glob("devices/system/node/node*/cpulist")}
    if sum(bool(cpus) for cpus in nodes.values()) < 2:  # some nodes only have a GPU's memory
        return set()
    try:
        node = int((sys / "bus/pci/devices" / bus_id / "numa_node").read_text())
    except (OSError, ValueError):
        return set()
    # The number is -1 if the firmware does not know the node.
    return nodes.get(sys / f"devices/system/node/node{node}", set())


def _cpus_of(path: Path) -> set[int]:
    """Parses a file such as "0-3,8,10-11"; returns an empty set if it cannot be read."""
    cpus: set[int] = set()
    try:
        for part in filter(None, path.read_text().strip().split(",")):
            first, _, last = part.partition("-")
            cpus.update(range(int(first), int(last or first) + 1))
    except (OSError, ValueError):
        return set()
    return cpus
