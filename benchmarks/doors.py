"""Runs `inputs/doors.py` by its short name: `python -m benchmarks.doors`."""

import sys

from benchmarks.inputs.doors import main

if __name__ == "__main__":
    sys.exit(main())
