"""Runs `failures/command_faults.py` by its short name: `python -m benchmarks.command_faults`."""

import sys

from benchmarks.failures.command_faults import main

if __name__ == "__main__":
    sys.exit(main())
