"""Tunes Python's garbage collector in the processes of tests.

It would search all imported objects again and again: a twelfth of the suite's CPU time.
"""

from __future__ import annotations

import gc

# More than 700 allocations between two collections: few objects are in a cycle.
ALLOCATIONS = 50_000


def collect_seldom() -> None:
    """Excludes existing objects from later searches, and makes searches rare. Forks inherit
    both."""
    gc.freeze()
    gc.set_threshold(ALLOCATIONS)
