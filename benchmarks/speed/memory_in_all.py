"""Measures the peak memory of a command and all of its processes together.

    python -m benchmarks.speed.memory_in_all parallel3d train tp=2 pp=2 …

Every five seconds it sums Pss over the process tree, in which pages that several processes share
count once. At the end it prints the largest sum, and the memory of each process at that time. Linux
only.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import time
from pathlib import Path

# seconds between samples: adding up the pages of a large process takes time and delays it
PERIOD_S = 5.0


def children(pid: int) -> list[int]:
    """Lists the processes that any thread of a process has started."""
    found: list[int] = []
    for task in Path(f"/proc/{pid}/task").glob("*/children"):
        found += [int(word) for word in task.read_text().split()]
    return found


def tree(pid: int) -> list[int]:
    """Lists a process and all its descendants."""
    try:
        return [pid] + [p for child in children(pid) for p in tree(child)]
    except OSError:  # the process has just ended
        return []


def pss(pid: int) -> int:
    """Returns the bytes of a process; a page shared by n processes counts 1/n. 0 if it has
    ended."""
    try:
        lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()
    except OSError:
        return 0
    return sum(int(line.split()[1]) * 1024 for line in lines if line.startswith("Pss:"))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("command", nargs=argparse.REMAINDER, help="the command and its arguments")
    command = parser.parse_args().command
    if not command:
        parser.error("no command is given")
    process = subprocess.Popen(command)
    most: dict[int, int] = {}
    while process.poll() is None:
        now = {pid: pss(pid) for pid in tree(process.pid)}
        if sum(now.values()) > sum(most.values()):
            most = now
        time.sleep(PERIOD_S)
    shares = ", ".join(f"{share / 1e9:.2f}" for share in most.values())
    print(f"most memory in all: {sum(most.values()) / 1e9:.2f} GB ({shares})")
    return process.returncode


if __name__ == "__main__":
    sys.exit(main())
