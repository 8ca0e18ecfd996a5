"""Keeps a rank on the CPUs that are close to its GPU."""

from __future__ import annotations

import os
from pathlib import Path

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
