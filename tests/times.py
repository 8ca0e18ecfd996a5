"""Records how long each test took, on the clock and in CPU seconds of all its processes.

A plugin of pytest. A run writes `.pytest_cache/v/parallel3d/times` (JSON; tests and files, the most
expensive first) and prints the ten files that took the most CPU time. A test that starts a pool of
ranks, or waits for one to end, carries that time.

With `--write-times` a run also puts the CPU seconds of its files, by set, into `tests/times.json`:

    ./launch/test.sh all --write-times              # all files; those that are gone leave the table
    ./launch/test.sh FILE [FILE …] --write-times    # some files, such as new ones

The table is in seconds of one machine, the one on which `COUNT` steps of an empty loop take
`LOOP_S` in two processes at once. The run times that loop too, and divides by it.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import subprocess
import sys
from collections import defaultdict
from collections.abc import Iterator, Mapping
from itertools import product
from pathlib import Path
from typing import Any

import pytest

TICKS = os.sysconf("SC_CLK_TCK")  # ticks of /proc per second
DEAREST = 10
TABLE = Path(__file__).with_name("times.json")
SETS = ("fast", "default", "nightly", "more")  # a test is in one of them; see `set_of`
COUNT, LOOP_S = 20_000_000, 1.03
LOOP = f"""
import time
def loop():
    n = 0
    while n < {COUNT}:
        n += 1
start = time.process_time()
loop()
print(time.process_time() - start)
"""
# Only after a test of this many seconds are all processes looked at: that takes milliseconds.
WORTH_A_LOOK_S = 0.1
PR_SET_CHILD_SUBREAPER = 36

Table = dict[str, dict[str, float]]  # file → set → CPU seconds


def parents() -> dict[int, tuple[int, float]]:
    """Returns process → its parent, and the CPU seconds of itself and of the children that it has
    waited for. A process that has ended, and that nobody has waited for, counts."""
    found = {}
    for name in os.listdir("/proc"):
        if name.isdecimal():
            with contextlib.suppress(OSError):  # it has just ended
                text = Path(f"/proc/{name}/stat").read_bytes().rpartition(b")")[2].split()
                # utime, stime, cutime and cstime
                found[int(name)] = int(text[1]), sum(map(int, text[11:15])) / TICKS
    return found


def cpu_seconds(pid: int) -> float:
    """Returns the CPU seconds of a process, of its living descendants and of the ended ones."""
    if not has_children():
        used = os.times()
        return used.user + used.system + used.children_user + used.children_system
    found = parents()
    children: dict[int, list[int]] = defaultdict(list)
    for child, (parent, _) in found.items():
        children[parent].append(child)

    def seconds(process: int) -> float:
        own = found[process][1] if process in found else 0.0
        return own + sum(map(seconds, children[process]))

    return seconds(pid)


def has_children() -> bool:
    """Returns whether this process has a child, running or ended, that it has not waited for."""
    try:
        os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)
    except ChildProcessError:
        return False
    return True


def adopt_orphans() -> None:
    """Makes this process the parent of descendants that lose theirs, such as the fork server of a
    launcher, with all ranks that it has forked: their seconds would be lost with them."""
    ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)


def pace() -> float:
    """Returns the factor by which this machine is slower than that of the table, in CPU time."""
    command = (sys.executable, "-S", "-c", LOOP)
    both = [subprocess.Popen(command, stdout=subprocess.PIPE) for _ in range(2)]
    return sum(float(one.communicate()[0]) for one in both) / len(both) / LOOP_S


def set_of(item: pytest.Item) -> str:
    """Returns the set of a test, as `launch/test.sh` selects it by marks."""
    for name in ("more", "nightly"):
        if item.get_closest_marker(name):
            return name
    unit = item.nodeid.startswith("tests/unit/")
    return "fast" if unit and not item.get_closest_marker("slow") else "default"


def may_select(markexpr: str, file: str, rows: Table) -> bool:
    """Returns whether a file may have tests that `-m` selects, by the sets that the table names.

    A file that the table lacks may have any.
    """
    if not markexpr or not rows.get(file):
        return True
    for name in rows[file]:
        unit = file.startswith("tests/unit/")
        slow = {"fast": (False,), "default": (True,) if unit else (False, True)}
        for is_slow, is_nightly in product(slow.get(name, (False, True)), (False, True)):
            marks = {"slow": is_slow, "more": name == "more", "nightly": name == "nightly"}
            marks["nightly"] |= name == "more" and is_nightly
            try:
                if eval(markexpr, {"__builtins__": {}}, marks):
                    return True
            except (NameError, SyntaxError):  # another mark, or what pytest itself refuses
                return True
    return False


class Times:
    """The times of one run's tests.

    Attributes:
        tests: (seconds, CPU seconds, set) by the name of the test.
        cache: where the run writes them; None in a process of xdist, which only measures.
        table: the file that the run writes too, or None.
    """

    BEFORE = pytest.StashKey[float]()

    def __init__(self, cache: pytest.Cache | None, table: Path | None = None) -> None:
        self.cache, self.table = cache, table
        self.tests: dict[str, tuple[float, float, str]] = {}
        self.now = 0.0  # CPU seconds when the last test ended
        self.pace = pace() if table and cache else 1.0
        self.known = read()

    def pytest_ignore_collect(self, collection_path: Path, config: pytest.Config) -> bool | None:
        """Leaves out files that have no test of the chosen set: importing them takes seconds."""
        root = TABLE.parents[1]
        if self.table is not None or not collection_path.is_relative_to(root):
            return None
        file = str(collection_path.relative_to(root))
        return None if may_select(config.option.markexpr, file, self.known) else True

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_protocol(
        self, item: pytest.Item, nextitem: pytest.Item | None
    ) -> Iterator[None]:
        """Looks at all processes before the first test of a file and after the last one."""
        self.last = nextitem is None or nextitem.path != item.path
        if not self.now:
            self.now = cpu_seconds(os.getpid())
        result = yield
        if self.last:
            self.now = 0.0  # whatever happens between two files is of neither
        return result

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_makereport(self, item: pytest.Item) -> Iterator[None]:
        """Adds the CPU seconds of a test to its last report, which xdist carries over."""
        report: Any = yield
        item.stash[self.BEFORE] = item.stash.get(self.BEFORE, 0.0) + report.duration
        if report.when == "teardown":
            report.set, report.cpu_seconds = set_of(item), 0.0
            # Short tests are counted with the next one that is long, or the last one of the file.
            if self.last or item.stash[self.BEFORE] > WORTH_A_LOOK_S:
                now = cpu_seconds(os.getpid())
                report.cpu_seconds, self.now = max(0.0, now - self.now), now
        return report

    def pytest_runtest_logreport(self, report: Any) -> None:
        """Adds one phase of a test: set-up, call or teardown."""
        seconds, *_ = self.tests.get(report.nodeid, (0.0,))
        # The last report has the CPU seconds, if the process has not died before it.
        cpu, of = getattr(report, "cpu_seconds", 0.0), getattr(report, "set", "default")
        self.tests[report.nodeid] = seconds + report.duration, cpu, of

    def by_file(self) -> dict[str, tuple[int, float, float]]:
        """Returns (tests, seconds, CPU seconds) by file, the most CPU seconds first."""
        sums: dict[str, list[float]] = defaultdict(lambda: [0, 0.0, 0.0])
        for name, (seconds, cpu, _) in self.tests.items():
            for at, value in enumerate((1, seconds, cpu)):
                sums[name.partition("::")[0]][at] += value
        dear = sorted(sums.items(), key=lambda item: -item[1][2])
        return {file: (int(count), seconds, cpu) for file, (count, seconds, cpu) in dear}

    def by_set(self) -> Table:
        """Returns file → set → CPU seconds, of the machine of the table."""
        found: Table = defaultdict(lambda: defaultdict(float))
        for name, (_, cpu, of) in self.tests.items():
            found[name.partition("::")[0]][of] += cpu / self.pace
        return found

    def pytest_terminal_summary(self, terminalreporter: Any) -> None:
        """Writes the times and prints the most expensive files."""
        if self.cache is None or not (files := self.by_file()):
            return
        if self.table is not None:
            write(self.table, self.by_set())
            terminalreporter.write_line(
                f"{self.table}: {len(files)} files, in seconds of a machine {self.pace:.2f} times "
                f"as fast as this one"
            )
        if len(files) < 2:
            return
        dear = dict(sorted(self.tests.items(), key=lambda item: -item[1][1]))
        self.cache.set("parallel3d/times", {"files": files, "tests": dear})
        terminalreporter.section(f"the {DEAREST} dearest of {len(files)} files")
        terminalreporter.write_line("  CPU s        s   tests")
        for file, (count, seconds, cpu) in [*files.items()][:DEAREST]:
            terminalreporter.write_line(f"{cpu:7.1f}  {seconds:7.1f}  {count:6}  {file}")
        count, seconds, cpu = map(sum, zip(*files.values(), strict=True))
        terminalreporter.write_line(f"{cpu:7.1f}  {seconds:7.1f}  {count:6}  all")


def files_of_tests() -> list[str]:
    """Returns all files that pytest collects, by their names from the checkout."""
    root = TABLE.parents[1]
    return sorted(str(path.relative_to(root)) for path in TABLE.parent.rglob("test_*.py"))


def read(table: Path = TABLE) -> Table:
    """Returns the committed table."""
    return json.loads(table.read_text("utf-8")) if table.exists() else {}


LIMIT_S = 650.0  # of the README's command: six minutes on two cores; it only ever falls
COMMAND = ("fast", "default")  # the sets that it runs
ADD = "./launch/test.sh {} --write-times"


def complaints(rows: Table, files: list[str]) -> list[str]:
    """Returns what is wrong with a table for these files, a sentence each."""
    found = []
    if new := [file for file in files if not rows.get(file)]:
        words = ADD.format(" ".join(new))
        found.append(f"{TABLE.name} lacks the times of {', '.join(new)}; add them: {words}")
    if gone := sorted(rows.keys() - {*files}):
        found.append(f"{TABLE.name} has {', '.join(gone)}, which are gone; delete their lines")
    unknown = {name for sets in rows.values() for name in sets} - {*SETS}
    if unknown:
        found.append(f"{TABLE.name} has the sets {sorted(unknown)}; sets are {', '.join(SETS)}")
    sums = {name: sum(sets.get(name, 0.0) for sets in rows.values()) for name in SETS}
    total = sum(sums[name] for name in COMMAND)
    if total > LIMIT_S:
        cost = {file: sum(sets.get(name, 0.0) for name in COMMAND) for file, sets in rows.items()}
        dear = sorted(cost, key=lambda file: -cost[file])[:DEAREST]
        each = ", ".join(f"{name} {seconds:.0f} s" for name, seconds in sums.items())
        found.append(
            f"the sets {' and '.join(COMMAND)} of ./launch/test.sh take {total:.0f} CPU seconds, "
            f"and may take {LIMIT_S:.0f} (by set: {each}); make tests cheaper, or mark some as "
            f"nightly and measure their files again ({ADD.format('FILE')}). The largest files: "
            + ", ".join(f"{file} {cost[file]:.1f} s" for file in dear)
        )
    return found


def write(table: Path, found: Mapping[str, Mapping[str, float]]) -> None:
    """Replaces the rows of the files that ran, and drops those of files that are gone."""
    rows = {**read(table), **found}
    lines = [
        f"{json.dumps(file)}: "
        + json.dumps({name: round(rows[file][name], 1) for name in SETS if name in rows[file]})
        for file in files_of_tests()
        if file in rows
    ]
    table.write_text("{\n" + ",\n".join(lines) + "\n}\n", "utf-8")
