"""The two ways in which a run ends badly that are foreseen: by the user's input, or by itself."""

from __future__ import annotations

import difflib
from collections.abc import Iterable


class UserError(Exception):
    """Something that the user typed cannot work: one sentence, exit code 2, no traceback."""


class TrainingFailure(RuntimeError):
    """All ranks decided that the run cannot go on: started again, it would end so again."""


def nearest(word: str, known: Iterable[str]) -> str | None:
    """The known word that `word` was most likely meant to be, or None if nothing is close."""
    matches = difflib.get_close_matches(word, list(known), n=1, cutoff=0.5)
    return matches[0] if matches else None


def nearest_divisor(value: int, *dividends: int) -> int:
    """The number closest to `value` that divides every one of `dividends` (ties: the smaller)."""
    limit = min(dividends)
    divisors = (d for d in range(1, limit + 1) if all(n % d == 0 for n in dividends))
    return min(divisors, key=lambda d: (abs(d - value), d))
