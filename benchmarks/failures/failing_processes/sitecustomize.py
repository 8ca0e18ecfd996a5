"""Makes this process's disk fail at random, if benchmarks/failures/faults.py puts this on
PYTHONPATH."""

from __future__ import annotations

import os

if "FAILING_FILES" in os.environ:
    # Imported before the calls are wrapped: at its import it tests which of them take descriptors.
    import shutil  # noqa: F401

    from benchmarks.failures.random_files import enter

    enter(os.environ)  # and in each process that is forked from it
