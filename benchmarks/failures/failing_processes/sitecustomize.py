"""Makes this process's disk fail at random, if benchmarks/failures/faults.py puts this on
PYTHONPATH."""

from __future__ import annotations

import os

if "FAILING_FILES" in os.environ:
    # It is imported before the calls are wrapped, because its import tests which of them take
    # descriptors.
    import shutil  # noqa: F401

    from benchmarks.failures.random_files import enter

    enter(os.environ)  # also in each process that is forked from it
