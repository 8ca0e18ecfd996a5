"""Prepares every test process before torch is imported.

It sets one thread, gloo on the loopback, a folder for leftovers of libraries, and the default
actions of signals.
"""

from __future__ import annotations

import atexit
import contextlib
import gc
import os
import shutil
import signal
import tempfile

import pytest

from tests.garbage import collect_seldom
from tests.times import TABLE, Times, adopt_orphans

gc.disable()  # disabled until pytest has collected everything

# Ranks share two cores: more threads per rank would only compete. Workers inherit both settings.
os.environ["OMP_NUM_THREADS"] = "1"
# Without an interface, gloo resolves this machine's host name, which takes seconds if DNS is
# unreachable.
os.environ["GLOO_SOCKET_IFNAME"] = "lo"
# TorchInductor trusts the processor's list of vector instructions. Otherwise each process that
# compiles would try them in another process, which takes seconds if nothing is cached.
os.environ["TORCHINDUCTOR_VEC_ISA_OK"] = "1"


# Files that libraries leave in TMPDIR (TorchInductor's cache, sockets and logs of W&B) are removed
# with the session; tests' own folders stay where pytest keeps those of the last sessions. Processes
# of xdist inherit both. TORCHINDUCTOR_CACHE_DIR, if set, keeps compiled kernels from session to
# session.
def remove(folder: str, owner: int) -> None:
    if os.getpid() == owner:  # only in this process, not in one that was forked from it
        # Processes that are about to end may still write there.
        shutil.rmtree(folder, ignore_errors=True)


if "PYTEST_XDIST_WORKER" not in os.environ:
    os.environ.setdefault("PYTEST_DEBUG_TEMPROOT", tempfile.gettempdir())
    # Addresses of Unix sockets in it have at most 107 bytes, and a scheduler's TMPDIR may be long.
    short = "/tmp" if len(tempfile.gettempdir()) > 40 and os.access("/tmp", os.W_OK) else None
    os.environ["TMPDIR"] = tempfile.tempdir = tempfile.mkdtemp(prefix="tests-of-p3d-", dir=short)
    # This comes before multiprocessing registers its own handler, which therefore runs first: it
    # has a folder there.
    atexit.register(remove, tempfile.tempdir, os.getpid())

# Files that tests make have the modes of a usual login, whatever the caller's umask is.
os.umask(0o022)

# A shell without a terminal starts background commands (`&`, nohup) with these signals ignored, and
# every command of a test would inherit that.
for number in (signal.SIGHUP, signal.SIGQUIT):
    signal.signal(number, signal.SIG_DFL)
signal.signal(signal.SIGINT, signal.default_int_handler)

# A woken process does not preempt the one that woke it: there are more ranks than cores, which wake
# each other all the time, and a seventh of their time went into that.
if hasattr(os, "SCHED_BATCH"):
    with contextlib.suppress(PermissionError):  # a container may not allow the call
        os.sched_setscheduler(0, os.SCHED_BATCH, os.sched_param(0))


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--write-times",
        action="store_true",
        help="put the CPU seconds of the files that run into tests/times.json",
    )


def pytest_configure(config: pytest.Config) -> None:
    """Records the times of the tests; under xdist, the controlling process collects them."""
    in_front = not hasattr(config, "workerinput")
    table = None
    if config.getoption("--write-times"):
        if config.option.keyword or config.option.markexpr or "::" in " ".join(config.args):
            raise pytest.UsageError("--write-times needs whole files, all sets of them")
        adopt_orphans()
        table = TABLE
    config.pluginmanager.register(
        Times(getattr(config, "cache", None) if in_front else None, table)
    )


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Moves slow tests to the front, so that other files run at the same time."""
    items.sort(key=lambda item: item.get_closest_marker("first") is None)


def pytest_collection_finish() -> None:
    """Modules and tests live until the end of the session."""
    collect_seldom()
    gc.enable()
