"""Runs `failures/storage_faults.py` by its short name: `python -m benchmarks.storage_faults`."""

import sys

from benchmarks.failures.storage_faults import main

if __name__ == "__main__":
    sys.exit(main())
