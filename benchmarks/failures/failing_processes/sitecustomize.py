"""Put on PYTHONPATH by benchmarks/failures/faults.py: this process's disk may fail, at random."""

from __future__ import annotations

import os

if "FAILING_FILES" in os.environ:
    # Before the calls are wrapped: at its import it looks which of them take descriptors.
    import shutil  # noqa: F401

    from benchmarks.failures.random_files import enter

    enter(os.environ)  # and each process that is forked of it
