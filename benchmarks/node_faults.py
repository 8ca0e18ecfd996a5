"""Runs `failures/node_faults.py` by its short name: `python -m benchmarks.node_faults`."""

import sys

from benchmarks.failures.node_faults import main

if __name__ == "__main__":
    sys.exit(main())
