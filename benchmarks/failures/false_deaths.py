"""Counts runs without a fault that guards and collector end all the same.

    python -m benchmarks.failures.false_deaths --runs 200

Each run has two nodes with a real guard and a rank each, and a real collector. A fifth of the runs
each: a rank holds the GIL for 40 s; a file system makes the ranks wait for 40 s; the first step
takes 90 s; the service link alone, of one node or both, is cut for 60 s; nothing. All these times,
and all limits, are divided by 15. In a sixth kind, which `--deaths` counts, a node falls silent:
all of those must be ended.
"""

from __future__ import annotations

import argparse
import itertools
import os
import signal
import sys
import tempfile
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from tests.unit.slurm.hosts import FASTER, LIMITS, STEPS, Cluster

HOLD_S, FIRST_S, CUT_S = 40.0 / FASTER, 90.0 / FASTER, 60.0 / FASTER
AFTER_S = 40.0 / FASTER  # in which a late verdict would come
BEGUN_S = 60.0

# What rank 0 and the others do after three steps; "other" ranks wait for rank 0 in a collective.
GIL = f"ctypes.PyDLL(None).usleep({int(1e6 * HOLD_S)})\n{STEPS}"
WAITS = f"time.sleep({HOLD_S})\n{STEPS}"
FILES = f"""
import threading
slow, fed = os.pipe()
threading.Timer({HOLD_S}, os.write, (fed, b"x")).start()
os.read(slow, 1)
{STEPS}"""
KINDS = {
    "a rank holds the GIL": (GIL, WAITS),
    "the file system is slow": (FILES, FILES),
    "the first step is slow": (STEPS, STEPS),
    "the service link is cut": (STEPS, STEPS),
    "nothing": (STEPS, STEPS),
}
DEATH = "a node is silent"
BEFORE = f"time.sleep({FIRST_S})\n"  # a first step


def undisturbed(kind: str, names: str, folder: Path) -> str:
    """Runs a run of a kind; returns why it was ended, or "" if it was not.

    `names`: the nodes whose links are cut.
    """
    with Cluster(folder, "ab", wired=True) as cluster:
        cluster.collector.watch("ab")
        first = BEFORE if kind == "the first step is slow" else ""
        for number, (node, code) in enumerate(
            zip(cluster.nodes.values(), KINDS[kind], strict=True)
        ):
            node.rank(number, code, first)
        limit = time.monotonic() + BEGUN_S + FIRST_S
        while not _begun(cluster):
            if cluster.collector.verdict is not None or time.monotonic() > limit:
                return _why(cluster) or "the ranks have not begun"
            time.sleep(0.02)
        if kind == "the service link is cut":
            cluster.cut(names)
            time.sleep(CUT_S)
            cluster.cut(names, is_cut=False)
        elif kind in ("a rank holds the GIL", "the file system is slow"):
            time.sleep(HOLD_S)
        time.sleep(AFTER_S)
        return _why(cluster)


def _begun(cluster: Cluster) -> bool:
    reports = cluster.collector.reports.values()
    return len(reports) == 2 and all(ranks and ranks[0].steps >= 3 for ranks in reports)


def _why(cluster: Cluster) -> str:
    if (found := cluster.collector.verdict) is not None:
        return found.sentence()
    for node in cluster.nodes.values():
        if node.guard.poll() is not None:
            return f"the guard of {node.name} has left"
        if any(rank.poll() is not None for rank in node.ranks):
            return f"a rank of {node.name} has ended"
    return "a message was refused" if cluster.said else ""


def death(folder: Path) -> float:
    """Silences a node; returns the seconds, without the shortening, until it is called dead."""
    with Cluster(folder, "ab") as cluster:
        cluster.watch()
        begin = time.monotonic()
        cluster["a"].ranks[0].send_signal(signal.SIGSTOP)  # it waits for the other
        cluster["b"].stop()
        while time.monotonic() < begin + 5 * LIMITS.paused:
            if (found := cluster.collector.wait(1.0)) is not None:
                return FASTER * (time.monotonic() - begin) if found.dead == ("b",) else -1.0
    return -1.0


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--runs", type=int, default=200, help="undisturbed runs, of all kinds")
    parser.add_argument("--deaths", type=int, default=10, help="runs in which a node falls silent")
    parser.add_argument("--at-once", type=int, default=4)
    given = parser.parse_args()
    kinds = [list(KINDS)[number % len(KINDS)] for number in range(given.runs)]
    begin = time.monotonic()
    with tempfile.TemporaryDirectory() as root, ThreadPoolExecutor(given.at_once) as pool:
        folders = [Path(tempfile.mkdtemp(dir=root)) for _ in range(given.runs + given.deaths)]
        ends = list(pool.map(undisturbed, kinds, itertools.cycle(("a", "b", "ab")), folders))
        took = sorted(pool.map(death, folders[given.runs :]))
    told = Counter(kinds), Counter(k for k, why in zip(kinds, ends, strict=True) if why)
    for kind, count in told[0].items():
        print(f"{kind}: {count} runs, {told[1][kind]} ended")
    for why, count in Counter(filter(None, ends)).items():
        print(f"  {count} times: {why}")
    found = [seconds for seconds in took if seconds > 0]
    print(f"{DEATH}: {given.deaths} runs, {len(found)} ended")
    if found:
        middle = found[len(found) // 2]
        print(f"  after {found[0]:.0f} to {found[-1]:.0f} s, median {middle:.0f} s")
    load = os.getloadavg()[0]
    print(f"{time.monotonic() - begin:.0f} s, load {load:.1f}")
    return int(any(ends) or len(found) < given.deaths)


if __name__ == "__main__":
    sys.exit(main())
