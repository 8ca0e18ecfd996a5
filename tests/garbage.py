"""Python's garbage collector in the processes of tests.

It would look through all that is imported again and again: a twelfth of the suite's processor time.
"""

from __future__ import annotations

import gc

ALLOCATIONS = 50_000  # more than 700 between two looks: an object seldom is in a cycle


def collect_seldom() -> None:
    """What is there now is never looked at again, and what follows seldom. Forks inherit both."""
    gc.freeze()
    gc.set_threshold(ALLOCATIONS)
