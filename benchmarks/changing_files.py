"""Runs `failures/changing_files.py` by its short name: `python -m benchmarks.changing_files`."""

import sys

from benchmarks.failures.changing_files import main

if __name__ == "__main__":
    sys.exit(main())
