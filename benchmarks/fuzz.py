"""Runs `inputs/fuzz.py` by its short name: `python -m benchmarks.fuzz`."""

from benchmarks.inputs.fuzz import main

if __name__ == "__main__":
    main()
