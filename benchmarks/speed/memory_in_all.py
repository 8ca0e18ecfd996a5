"""The most memory that a command and all its processes hold together.

    python -m benchmarks.speed.memory_in_all parallel3d train tp=2 pp=2 …

Sums Pss over the process tree, in which pages that several processes share count once, every five
seconds; prints at the end the largest sum, and what each process held then. Linux only.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import time
from pathlib import Path

PERIOD_S = 5.0  # to add up the pages of a large process takes a while, and holds it up


def children(pid: int) -> list[int]:
    """Those of all threads of a process."""
    found: list[int] = []
    for task in Path(f"/proc/{pid}/task").glob("*/children"):
        found += [int(word) for word in task.read_text().split()]
    return found


def tree(pid: int) -> list[int]:
    """A process and all that it started, and they."""
    try:
        return [pid] + [p for child in children(pid) for p in tree(child)]
    except OSError:  # it has just ended
        return []


def pss(pid: int) -> int:
    """Bytes; pages shared by n processes count 1/n. 0 of a process that has ended."""
    try:
        lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()
    except OSError:
        return 0
    return sum(int(line.split()[1]) * 1024 for line in lines if line.startswith("Pss:"))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("command", nargs=argparse.REMAINDER, help="the command and its words")
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
