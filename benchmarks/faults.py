"""Runs `failures/faults.py` by its short name: `python -m benchmarks.faults`."""

import sys

from benchmarks.failures.faults import main

if __name__ == "__main__":
    sys.exit(main())
