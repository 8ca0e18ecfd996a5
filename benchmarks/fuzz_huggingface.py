"""Runs `inputs/fuzz_huggingface.py` by its short name: `python -m benchmarks.fuzz_huggingface`."""

import sys

from benchmarks.inputs.fuzz_huggingface import main

if __name__ == "__main__":
    sys.exit(main())
