"""Finds the CPUs and memory that this process may use, given its affinity and control groups.

The limits of a container or a job are written in the process's own control group or in a group
above it. /proc/self/cgroup names the group, and /proc/self/mountinfo shows where its files are. A
kernel has version 1 of control groups (a hierarchy for each controller), version 2 (one hierarchy
for all controllers), or both, each with some of the controllers.
"""

from __future__ import annotations

import math
import os
import re
from collections.abc import Iterator
from pathlib import Path

ROOT = Path("/")


def cores() -> int:
    """Returns the number of CPUs that this process may run on."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def available_cores(root: Path = ROOT) -> int:
    """Returns the number of cores that this process may use within its groups' CPU quotas.

    A quota of 2.5 cores counts as 2, because threads beyond the quota are stopped for the rest of
    each period. A quota of less than one core counts as 1.
    """
    return max(1, math.floor(min(cores(), _cpu_quota(root))))


def _cpu_quota(root: Path) -> float:
    """Returns the smallest quota, in cores, of this process's groups; infinity if there is none."""
    quotas = [math.inf]
    for folder in _groups("cpu", 2, root):
        # The file holds "<µs of CPU> <µs of time>", or "max …".
        words = _text(folder / "cpu.max").split()
        if len(words) == 2 and words[0].isdecimal() and words[1].isdecimal() and int(words[1]):
            quotas.append(int(words[0]) / int(words[1]))
    for folder in _groups("cpu", 1, root):
        quota = _number(folder / "cpu.cfs_quota_us")  # -1 means that there is no quota
        period = _number(folder / "cpu.cfs_period_us")
        if quota is not None and quota > 0 and period:
            quotas.append(quota / period)
    return min(quotas)


def memory_in_all(root: Path = ROOT) -> float:
    """Returns the bytes of memory that this process's groups allow, up to the machine's memory."""
    whole = _machine(root, "MemTotal")
    if math.isinf(whole):
        whole = float(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"))
    return min([whole, *(limit for limit, _ in _limits(root))])


def available_memory(root: Path = ROOT) -> float:
    """Returns the bytes that this process may still allocate; infinity if nothing limits them.

    Pages of files, which the kernel drops when memory is short, count as free.
    """
    left = (max(0.0, limit - used) for limit, used in _limits(root))
    return min([_machine(root, "MemAvailable"), *left])


def _machine(root: Path, name: str) -> float:
    """Returns the bytes under `name` in /proc/meminfo; infinity if it is missing."""
    found = re.search(rf"^{name}: +(\d+) kB", _text(root / "proc/meminfo"), re.MULTILINE)
    return 1024.0 * int(found[1]) if found else math.inf


def _limits(root: Path) -> Iterator[tuple[float, float]]:
    """Yields (limit, bytes in use that cannot be dropped) for each of the process's limited groups.

    memory.high counts as a limit, because above it the kernel slows a group down to a near
    standstill.
    """
    for folder in _groups("memory", 2, root):
        limits = [_number(folder / name) for name in ("memory.max", "memory.high")]
        if known := [limit for limit in limits if limit is not None]:
            used = _number(folder / "memory.current") or 0
            yield min(known), used - _droppable(folder, "")
    for folder in _groups("memory", 1, root):
        # Without a limit, the file contains a number far above any machine's memory.
        limit = _number(folder / "memory.limit_in_bytes")
        # hierarchical_memory_limit includes the limits of parent groups that are not mounted here.
        of_all = _statistics(folder).get("hierarchical_memory_limit")
        if known := [each for each in (limit, of_all) if each is not None]:
            used = _number(folder / "memory.usage_in_bytes") or 0
            yield min(known), used - _droppable(folder, "total_")


def _droppable(folder: Path, prefix: str) -> int:
    found = _statistics(folder)
    return sum(found.get(f"{prefix}{name}", 0) for name in ("active_file", "inactive_file"))


def _statistics(folder: Path) -> dict[str, int]:
    lines = (line.split() for line in _text(folder / "memory.stat").splitlines())
    return {w[0]: int(w[1]) for w in lines if len(w) == 2 and w[1].isdecimal()}


def _groups(controller: str, version: int, root: Path) -> Iterator[Path]:
    """Yields the folders of this process's groups for `controller`, from its own up to the root."""
    for line in _text(root / "proc/self/cgroup").splitlines():
        number, _, rest = line.partition(":")
        controllers, _, path = rest.partition(":")
        of_version_2 = number == "0" and not controllers
        mine = of_version_2 if version == 2 else controller in controllers.split(",")
        mounts = [*_mounted(controller, version, root)] if mine else []
        if mounts:
            # A container may have both the host's mount and its own. The best mount shows the group
            # and as many of its ancestors as possible.
            mount, top = min(mounts, key=lambda at: (not _is_in(path, at[1]), len(at[1])))
            # The mount shows the hierarchy from `top` down: all groups on a host, and only the
            # container's own group in a container's namespace. A group outside of `top`
            # ("/../other") cannot be seen.
            inside = path[len(top.rstrip("/")) :] if _is_in(path, top) else "/"
            folder = mount / inside.strip("/")
            yield folder
            while folder != mount:
                folder = folder.parent
                yield folder


def _is_in(path: str, top: str) -> bool:
    return ".." not in path.split("/") and f"{path.rstrip('/')}/".startswith(f"{top.rstrip('/')}/")


def _mounted(controller: str, version: int, root: Path) -> Iterator[tuple[Path, str]]:
    """Yields the mount points of a hierarchy, each with the group at its top."""
    for line in _text(root / "proc/self/mountinfo").splitlines():
        before, _, after = line.partition(" - ")
        fields, kind = before.split(), after.split()
        if len(fields) < 5 or len(kind) < 3:
            continue
        if version == 2:
            is_it = kind[0] == "cgroup2"
        else:
            is_it = kind[0] == "cgroup" and controller in kind[2].split(",")
        if is_it:
            # Blanks in names are written as \040.
            top, place = (re.sub(r"\\([0-7]{3})", _character, word) for word in fields[3:5])
            yield root / place.lstrip("/"), top


def _character(octal: re.Match[str]) -> str:
    return chr(int(octal[1], 8))


def _number(path: Path) -> int | None:
    """Returns the number in a file; None for "max", or if there is no such file."""
    text = _text(path).strip()
    return int(text) if re.fullmatch(r"-?[0-9]+", text) else None


def _text(path: Path) -> str:
    """Returns a file's text; "" if the kernel has no such file or denies access to it."""
    try:
        return path.read_text()
    except OSError:
        return ""
