"""Runs `gpu/first.py` by its short name: `python -m benchmarks.gpu_first`."""

import sys

from benchmarks.gpu.first import main

if __name__ == "__main__":
    sys.exit(main())
