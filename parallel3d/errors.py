"""Defines errors that end a run with a sentence and no traceback, and prints sentences."""

from __future__ import annotations

import difflib
import re
import sys
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import traceback

USER_ERROR = 2  # the exit code after a Parallel3dError


class Parallel3dError(ValueError):
    """Raised for input that cannot work; the message explains why in a sentence.

    The command line prints the message without a traceback, and exits with code 2. An `except
    ValueError` catches this error too, unless an `except Parallel3dError` comes before it.
    """


UserError = Parallel3dError  # its name within the package


class TrainingFailure(RuntimeError):
    """All ranks decided to end the run, because a restart would fail in the same way."""


def print_line(sentence: str) -> None:
    """Prints a line to stderr, and flushes it because the process may end right afterwards."""
    print(f"parallel3d: {sentence}", file=sys.stderr, flush=True)


def readable(sentence: str) -> str:
    """Returns a sentence for the terminal: escapes control characters and shortens long text."""
    line = "".join(c if c.isprintable() else ascii(c)[1:-1] for c in sentence)
    return _brief(re.sub(r"\S{300,}", lambda word: _brief(word[0], 300), line), 2000)


def _brief(text: str, longest: int) -> str:
    half = longest // 2 - 1
    return text if len(text) <= longest else f"{text[:half]}…{text[-half:]}"


# When a GPU's memory is full, PyTorch advises a setting that GPU ranks already have.
ALLOCATOR_ADVICE = re.compile(r" If reserved but unallocated memory is large.*")


def first_line(error: BaseException) -> str:
    """Returns the first line of an error's message, or its class name if there is no message."""
    line = (str(error).strip() or type(error).__name__).splitlines()[0]
    return ALLOCATOR_ADVICE.sub("", line)


def said_in_full(error: BaseException) -> str:
    """Returns an error's class, the first line of its message, and its notes, as sentences."""
    notes = "".join(f" {note}" for note in getattr(error, "__notes__", ()))
    said = f"{type(error).__name__}: {first_line(error)}"
    return f"{said.rstrip('.')}.{notes}"


def users_frame(error: BaseException) -> traceback.FrameSummary | None:
    """Returns the innermost frame of the user's code in an error's traceback, or None.

    It is outside of this package and Python, and outside of installed packages if any frame is.
    """
    import sysconfig  # needed after an error alone
    import traceback

    paths = sysconfig.get_paths()
    installed = [Path(paths["purelib"]), Path(paths["platlib"])]
    never = [Path(paths["stdlib"]), Path(__file__).parent]
    for others in (installed, [path / name for path in installed for name in ("torch", "numpy")]):
        for frame in reversed(traceback.extract_tb(error.__traceback__)):
            file = Path(frame.filename).absolute()
            # The installed packages are inside of Python's own folder.
            of_python = never if not any(map(file.is_relative_to, installed)) else never[1:]
            if file.exists() and not any(map(file.is_relative_to, [*of_python, *others])):
                return frame
    return None


def users_place(error: BaseException) -> str:
    """Returns the place of `users_frame` as in " at my_model.py:12", or "" without one."""
    frame = users_frame(error)
    return f" at {frame.filename}:{frame.lineno}" if frame else ""


def nearest(word: str, known: Iterable[str]) -> str | None:
    """Returns the known word closest to `word`, or None if none is close."""
    matches = difflib.get_close_matches(word, list(known), n=1, cutoff=0.5)
    return matches[0] if matches else None


def nearest_hint(word: str, known: Iterable[str], key: str = "") -> str:
    """Returns "; the nearest is …" for the end of a sentence, or "" if no known word is close.

    `key`, such as "format=", is put before the word.
    """
    close = nearest(word, known)
    return f"; the nearest is {key}{close}" if close else ""


def closest(value: int, fits: Callable[[int], bool], limit: int) -> int | None:
    """Returns the number in 1…limit closest to `value` that fits (ties: the smaller), or None.

    At most 50,000 distances are tried, because a user may give sizes far beyond any machine.
    """
    start = max(1, min(value, limit))
    for distance in range(min(limit, 50_000)):
        for candidate in (start - distance, start + distance):
            if 1 <= candidate <= limit and fits(candidate):
                return candidate
    return None


def nearest_multiple(value: int, unit: int) -> int:
    """Returns the positive multiple of `unit` that is closest to `value` (ties: the smaller)."""
    below = value // unit * unit
    return max(unit, below if value - below <= below + unit - value else below + unit)
