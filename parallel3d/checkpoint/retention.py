"""Which checkpoints of a run stay, and how the others go; and what a killed save left."""

from __future__ import annotations

import os
import shutil
import uuid
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING

from parallel3d.checkpoint.manifest import (
    CHECKPOINTS,
    CLAIM,
    DAMAGED,
    LATEST,
    REMOVED,
    UNFINISHED,
    reason,
)
from parallel3d.checkpoint.reading import plain

if TYPE_CHECKING:
    from parallel3d.config import CheckpointConfig

_LEFTOVERS = (UNFINISHED, REMOVED, f".{LATEST}-", f"{CLAIM}-")


def too_many(newest_first: Iterable[Path], settings: CheckpointConfig) -> list[Path]:
    """The checkpoints that are neither among the last `keep` nor of a multiple of `keep_every`."""
    old = list(newest_first)[settings.keep :]
    every = settings.keep_every
    return [p for p in old if not (every and int(p.name.rpartition("-")[2]) % every == 0)]


def discard(folder: Path) -> None:
    """Remove a checkpoint; half removed, it has no checkpoint's name any more. Raises OSError."""
    shutil.rmtree(put_away(folder))


def put_away(folder: Path) -> Path:
    """Take a checkpoint its name, for it to be removed: its new path. Raises OSError."""
    gone = folder.with_name(f"{REMOVED}{folder.name}-{uuid.uuid4().hex[:8]}")
    os.rename(folder, gone)
    return gone


def remove_leftovers(run_dir: Path) -> list[str]:
    """Remove what saves and removals left that were killed on the way.

    Returns what could not be removed, a sentence each: it is in nobody's way.
    """
    folder = run_dir / CHECKPOINTS
    notes = []
    try:
        left = [p for p in folder.iterdir() if p.name.startswith(_LEFTOVERS)]
    except (FileNotFoundError, NotADirectoryError):
        return []
    except OSError as error:
        return [f"{folder} cannot be looked through for leftovers ({reason(error)})"]
    for path in left:
        try:
            if path.is_dir():
                shutil.rmtree(path)
            else:
                path.unlink()
        except OSError as error:
            notes.append(not_removed(path, error))
    return notes


def not_removed(path: Path, error: OSError) -> str:
    """The sentence for what stays, though it should go."""
    return plain(f"{path.name} could not be removed ({reason(error)})")


def set_aside(folder: Path) -> Path:
    """Rename a damaged checkpoint, so that it counts as none and can still be looked at.

    Raises OSError.
    """
    number, aside = 1, folder.with_name(DAMAGED + folder.name)
    while aside.exists():
        number += 1
        aside = folder.with_name(f"{DAMAGED}{folder.name}.{number}")
    os.rename(folder, aside)
    return aside
