"""Tests that the committed times of all tests are whole, and that the default set stays short."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.times import (
    LIMIT_S,
    SETS,
    complaints,
    cpu_seconds,
    files_of_tests,
    may_select,
    read,
    set_of,
    write,
)

# A process that ends before its child, which then works; and one that is waited for.
ORPHAN = """
import os, time
if os.fork() == 0:
    if os.fork() == 0:
        time.sleep(0.3)
        end = time.process_time() + 0.7  # more than is asked below, as the kernel counts in ticks
        while time.process_time() < end:
            pass
    os._exit(0)
os.wait()
"""
MEASURE = f"""
import os, subprocess, sys, time
from tests.times import adopt_orphans, cpu_seconds
adopt_orphans()
subprocess.run([sys.executable, "-c", {ORPHAN!r}], check=True)
def of_others():
    return cpu_seconds(os.getpid()) - time.process_time()
deadline = time.monotonic() + 60
while (found := of_others()) < 0.5 and time.monotonic() < deadline:
    time.sleep(0.1)
print(found)
"""


def test_the_table_has_every_file_and_the_default_set_takes_six_minutes() -> None:
    assert complaints(read(), files_of_tests()) == []


def test_the_table_has_the_sets_of_all_tests_that_run(request: pytest.FixtureRequest) -> None:
    """Otherwise a set would leave out the file."""
    rows = read()
    found = {(item.nodeid.partition("::")[0], set_of(item)) for item in request.session.items}
    new = sorted({file for file, name in found if name not in rows.get(file, {})})
    assert new == [], f"measure them: ./launch/test.sh {' '.join(new)} --write-times"


def test_a_set_leaves_out_files_without_tests_of_it() -> None:
    fast, slow, ranks, night = "unit/test_a.py", "unit/test_b.py", "e2e/test_c.py", "unit/test_d.py"
    names = {fast: ("fast", "more"), slow: ("default",), ranks: ("default",), night: ("nightly",)}
    rows = {f"tests/{file}": dict.fromkeys(sets, 1.0) for file, sets in names.items()}

    def chosen(markexpr: str) -> set[str]:
        return {file for file in names if may_select(markexpr, f"tests/{file}", rows)}

    assert chosen("not slow and not nightly and not more") == {fast, ranks}
    assert chosen("not nightly and not more") == {fast, slow, ranks}
    assert chosen("nightly and not more") == {night}
    assert chosen("more") == {fast}
    assert chosen("") == chosen("first") == {*names}
    assert may_select("more", "tests/unit/test_new.py", rows)


def test_a_file_that_takes_longer_is_named_with_the_sets() -> None:
    rows = {"tests/a/test_one.py": {"default": LIMIT_S, "more": 1.0}, "test_two.py": {"fast": 1.0}}
    (sentence,) = complaints(rows, [*rows])
    assert f"{LIMIT_S + 1:.0f} CPU seconds, and may take {LIMIT_S:.0f}" in sentence
    assert f"fast 1 s, default {LIMIT_S:.0f} s, nightly 0 s, more 1 s" in sentence
    assert f"tests/a/test_one.py {LIMIT_S:.1f} s, test_two.py 1.0 s" in sentence


def test_a_file_that_is_new_is_named_with_the_command_that_measures_it() -> None:
    (sentence,) = complaints({"test_two.py": {"fast": 1.0}}, ["test_new.py", "test_two.py"])
    assert sentence.endswith("add them: ./launch/test.sh test_new.py --write-times")
    assert "test_two.py, which are gone" in complaints({"test_two.py": {"fast": 1.0}}, [])[0]
    assert "sets are fast" in complaints({"test_two.py": {"slow": 1.0}}, ["test_two.py"])[0]


def test_files_that_ran_replace_their_lines(tmp_path: Path) -> None:
    table = tmp_path / "times.json"
    one, two = files_of_tests()[:2]
    write(table, {one: {"fast": 1.0, "more": 2.0}, two: {"default": 3.04}, "gone.py": {"fast": 1}})
    write(table, {one: {"nightly": 4.0}})
    assert read(table) == {one: {"nightly": 4.0}, two: {"default": 3.0}}
    assert set(SETS) >= {name for sets in read().values() for name in sets}


@pytest.mark.slow
def test_seconds_of_a_process_whose_parent_is_gone_count() -> None:
    root = Path(__file__).parents[2]
    said = subprocess.run(
        (sys.executable, "-c", MEASURE), cwd=root, capture_output=True, text=True, check=True
    )
    assert float(said.stdout) >= 0.5


def test_a_process_without_children_counts_its_own_seconds() -> None:
    used = os.times()
    assert cpu_seconds(os.getpid()) >= used.user + used.system - 0.05
