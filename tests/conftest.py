"""What every test process needs before torch is imported: one thread, gloo on the loopback, a
folder for what libraries leave, and signals that mean what they say.
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
from tests.times import Times

gc.disable()  # until all is collected that pytest collects

# Ranks share two cores: more threads a rank only fight. Workers inherit both settings.
os.environ["OMP_NUM_THREADS"] = "1"
# Without an interface gloo resolves this machine's host name: seconds where DNS is out of reach.
os.environ["GLOO_SOCKET_IFNAME"] = "lo"
# TorchInductor believes what the processor says of its vector instructions. Otherwise each process
# that compiles tries them in others, seconds of it where nothing is in its cache.
os.environ["TORCHINDUCTOR_VEC_ISA_OK"] = "1"


# What libraries leave in TMPDIR (TorchInductor's cache, sockets and logs of W&B) ends with the
# session; tests' own folders stay where pytest keeps those of the last sessions. Processes of xdist
# inherit both. TORCHINDUCTOR_CACHE_DIR, if set, keeps compiled kernels from session to session.
def remove(folder: str, owner: int) -> None:
    if os.getpid() == owner:  # no process that was forked of it
        # Processes that are about to end may still write there.
        shutil.rmtree(folder, ignore_errors=True)


if "PYTEST_XDIST_WORKER" not in os.environ:
    os.environ.setdefault("PYTEST_DEBUG_TEMPROOT", tempfile.gettempdir())
    # Addresses of Unix sockets in it have 107 bytes at most, and a scheduler's TMPDIR may be long.
    short = "/tmp" if len(tempfile.gettempdir()) > 40 and os.access("/tmp", os.W_OK) else None
    os.environ["TMPDIR"] = tempfile.tempdir = tempfile.mkdtemp(prefix="tests-of-p3d-", dir=short)
    # Before multiprocessing registers its own, which therefore runs first: it has a folder there.
    atexit.register(remove, tempfile.tempdir, os.getpid())

# Files that tests make have the modes of a usual login, whatever the caller's is.
os.umask(0o022)

# A shell without a terminal starts what it puts aside (`&`, nohup) with these ignored, and every
# command of a test would inherit that.
for number in (signal.SIGHUP, signal.SIGQUIT):
    signal.signal(number, signal.SIG_DFL)
signal.signal(signal.SIGINT, signal.default_int_handler)

# A process that is woken does not interrupt who woke it: ranks, more of them than cores, wake each
# other all the time, and a seventh of it went into that.
if hasattr(os, "SCHED_BATCH"):
    with contextlib.suppress(PermissionError):  # where a container allows no such call
        os.sched_setscheduler(0, os.SCHED_BATCH, os.sched_param(0))


def pytest_configure(config: pytest.Config) -> None:
    """Records the times of the tests, which the process in front of xdist's others collects."""
    in_front = not hasattr(config, "workerinput")
    config.pluginmanager.register(Times(getattr(config, "cache", None) if in_front else None))


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Puts in front what waits or computes for long: other files then run beside it."""
    items.sort(key=lambda item: item.get_closest_marker("first") is None)


def pytest_collection_finish() -> None:
    """Modules and tests are there for good."""
    collect_seldom()
    gc.enable()
