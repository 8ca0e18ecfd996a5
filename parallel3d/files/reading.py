"""Files whose contents are not ours to trust: opened without waiting, read and parsed in bounds.

Nothing here knows what a checkpoint is, and nothing needs torch.
"""

from __future__ import annotations

import json
import os
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

DEEPEST = 50  # nested lists and objects; what we write has four
LONGEST_SENTENCE = 400


@contextmanager
def open_regular(path: Path) -> Iterator[int]:
    """A descriptor to read `path` from, which may be any file but a pipe, a device or a folder.

    Raises OSError, and ValueError for what is no regular file: opening a pipe does not wait.
    """
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    try:
        if not stat.S_ISREG(os.fstat(descriptor).st_mode):
            raise ValueError(f"{path.name} is no regular file")
        yield descriptor
    finally:
        os.close(descriptor)


def read_into(descriptor: int, view: memoryview, at: int) -> int:
    """Fill `view` from byte `at` of the file. Returns the bytes read: fewer only at its end."""
    done = 0
    while done < len(view) and (got := os.preadv(descriptor, [view[done:]], at + done)):
        done += got
    return done


def read_bounded(path: Path, most: int) -> bytes:
    """The whole of a regular file. Raises OSError, and ValueError if it has more than `most`."""
    with open_regular(path) as descriptor:
        size = os.fstat(descriptor).st_size
        if size > most:
            raise ValueError(f"{path.name} has {size:,} bytes, more than {most:,}")
        content = bytearray(size)
        done = read_into(descriptor, memoryview(content), 0)
    return bytes(content[:done])


def parse_json(text: bytes) -> Any:
    """Raises ValueError for what is no JSON, and for what is nested too deep to be ours."""
    try:
        content = json.loads(text)
    except RecursionError:
        raise ValueError("nested too deep") from None
    level = [content]
    for _ in range(DEEPEST):
        level = [value for item in level for value in _items(item)]
    if level:
        raise ValueError(f"nested deeper than {DEEPEST}")
    return content


def _items(value: Any) -> list[Any]:
    if isinstance(value, dict):
        return list(value.values())
    return value if isinstance(value, list) else []


def plain(text: str) -> str:
    """`text` as it can be shown on any terminal: what would move its cursor is spelled out."""
    shown = "".join(c if c.isprintable() else repr(c)[1:-1] for c in text[: LONGEST_SENTENCE + 1])
    return shown if len(text) <= LONGEST_SENTENCE else f"{shown[:LONGEST_SENTENCE]}…"
