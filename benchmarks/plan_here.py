"""Runs `planner/plan_here.py` by its short name: `python -m benchmarks.plan_here`."""

from benchmarks.planner.plan_here import main

if __name__ == "__main__":
    main()
