"""The two ways in which a run ends badly that are foreseen, by the user's input or by itself; and
how the user hears of it."""

from __future__ import annotations

import difflib
import re
import sys
from collections.abc import Callable, Iterable

USER_ERROR = 2  # the exit code of one


class UserError(Exception):
    """Something that the user typed cannot work: one sentence, exit code 2, no traceback."""


class TrainingFailure(RuntimeError):
    """All ranks decided that the run cannot go on: started again, it would end so again."""


def print_line(sentence: str) -> None:
    """One line on stderr, flushed: it may be the last thing that this process does."""
    print(f"parallel3d: {sentence}", file=sys.stderr, flush=True)


def readable(sentence: str) -> str:
    """One line that a terminal prints and does not obey, the middle left out of what is too long.

    What was typed may hold anything: escape sequences, line ends, halves of characters.
    """
    line = "".join(c if c.isprintable() else ascii(c)[1:-1] for c in sentence)
    return _brief(re.sub(r"\S{300,}", lambda word: _brief(word[0], 300), line), 2000)


def _brief(text: str, longest: int) -> str:
    half = longest // 2 - 1
    return text if len(text) <= longest else f"{text[:half]}…{text[-half:]}"


def nearest(word: str, known: Iterable[str]) -> str | None:
    """The known word that `word` was most likely meant to be, or None if nothing is close."""
    matches = difflib.get_close_matches(word, list(known), n=1, cutoff=0.5)
    return matches[0] if matches else None


def closest(value: int, fits: Callable[[int], bool], limit: int) -> int | None:
    """The number of 1…limit closest to `value` that fits (ties: the smaller).

    None if there is none among those that can be looked through at once: sizes may be typed that
    are far beyond any machine.
    """
    start = max(1, min(value, limit))
    for distance in range(min(limit, 50_000)):
        for candidate in (start - distance, start + distance):
            if 1 <= candidate <= limit and fits(candidate):
                return candidate
    return None
