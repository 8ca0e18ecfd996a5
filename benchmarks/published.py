"""Runs `planner/published.py` by its short name: `python -m benchmarks.published`."""

from benchmarks.planner.published import main

if __name__ == "__main__":
    main()
