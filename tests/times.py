"""Records how long each test took, on the clock and in CPU seconds of all its processes.

A plugin of pytest. A run writes `.pytest_cache/v/parallel3d/times` (JSON; tests and files, the most
expensive first) and prints the ten files that took the most CPU time. A test that starts a pool of
ranks, or waits for one to end, carries that time.
"""

from __future__ import annotations

import os
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

TICKS = os.sysconf("SC_CLK_TCK")  # ticks of /proc per second
DEAREST = 10


def children(pid: int) -> list[int]:
    """Returns the processes that `pid` has started; none if the kernel does not list them."""
    try:
        tasks = os.listdir(f"/proc/{pid}/task")
        lists = (Path(f"/proc/{pid}/task/{task}/children").read_text() for task in tasks)
        return [int(child) for names in lists for child in names.split()]
    except OSError:  # the process has ended
        return []


def cpu_seconds(pid: int) -> float:
    """Returns the CPU seconds of a process, of its living descendants and of the ended ones."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return 0.0
    # utime, stime, cutime and cstime: ended children count
    own = sum(map(int, fields[11:15])) / TICKS
    return own + sum(map(cpu_seconds, children(pid)))


class Times:
    """The times of one run's tests.

    Attributes:
        tests: (seconds, CPU seconds) by the name of the test.
        cache: where the run writes them; None in a process of xdist, which only measures.
    """

    BEFORE = pytest.StashKey[float]()

    def __init__(self, cache: pytest.Cache | None) -> None:
        self.cache = cache
        self.tests: dict[str, tuple[float, float]] = {}

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_protocol(self, item: pytest.Item) -> Iterator[None]:
        """Notes the CPU seconds before the set-up of a test."""
        item.stash[self.BEFORE] = cpu_seconds(os.getpid())
        return (yield)

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_makereport(self, item: pytest.Item) -> Iterator[None]:
        """Adds the CPU seconds of a test to its last report, which xdist carries over."""
        report: Any = yield
        if report.when == "teardown":
            # Seconds of ranks that end unseen, as children of another process, are no longer
            # counted.
            report.cpu_seconds = max(0.0, cpu_seconds(os.getpid()) - item.stash[self.BEFORE])
        return report

    def pytest_runtest_logreport(self, report: Any) -> None:
        """Adds one phase of a test: set-up, call or teardown."""
        seconds, _ = self.tests.get(report.nodeid, (0.0, 0.0))
        # The last report has the CPU seconds, if the process has not died before it.
        self.tests[report.nodeid] = seconds + report.duration, getattr(report, "cpu_seconds", 0.0)

    def by_file(self) -> dict[str, tuple[int, float, float]]:
        """Returns (tests, seconds, CPU seconds) by file, the most CPU seconds first."""
        sums: dict[str, list[float]] = defaultdict(lambda: [0, 0.0, 0.0])
        for name, (seconds, cpu) in self.tests.items():
            for at, value in enumerate((1, seconds, cpu)):
                sums[name.partition("::")[0]][at] += value
        dear = sorted(sums.items(), key=lambda item: -item[1][2])
        return {file: (int(count), seconds, cpu) for file, (count, seconds, cpu) in dear}

    def pytest_terminal_summary(self, terminalreporter: Any) -> None:
        """Writes the times and prints the most expensive files."""
        if self.cache is None or len(files := self.by_file()) < 2:
            return
        dear = dict(sorted(self.tests.items(), key=lambda item: -item[1][1]))
        self.cache.set("parallel3d/times", {"files": files, "tests": dear})
        terminalreporter.section(f"the {DEAREST} dearest of {len(files)} files")
        terminalreporter.write_line("  CPU s        s   tests")
        for file, (count, seconds, cpu) in [*files.items()][:DEAREST]:
            terminalreporter.write_line(f"{cpu:7.1f}  {seconds:7.1f}  {count:6}  {file}")
        count, seconds, cpu = map(sum, zip(*files.values(), strict=True))
        terminalreporter.write_line(f"{cpu:7.1f}  {seconds:7.1f}  {count:6}  all")
