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
    REPLACED,
    UNFINISHED,
    list_checkpoints,
    reason,
)
from parallel3d.files.reading import plain

if TYPE_CHECKING:
    from parallel3d.config.schema import CheckpointConfig

_LEFTOVERS = (UNFINISHED, REMOVED, REPLACED, f".{LATEST}-", f"{CLAIM}-")


def too_many(newest_first: Iterable[Path], settings: CheckpointConfig) -> list[Path]:
    """The checkpoints that are neither among the last `keep` nor of a multiple of `keep_every`."""
    old = list(newest_first)[settings.keep :]
    every = settings.keep_every
    return [p for p in old if not (every and int(p.name.rpartition("-")[2]) % every == 0)]


def discard(folder: Path) -> None:
    """Remove a checkpoint; half removed, it has no checkpoint's name any more. Raises OSError."""
    shutil.rmtree(_renamed(folder, REMOVED))


def make_way(folder: Path) -> Path:
    """Rename a checkpoint that another of its step is to replace: its new path. Raises OSError.

    Should the other not come, `bring_back` gives it its name again.
    """
    return _renamed(folder, REPLACED)


def _renamed(folder: Path, prefix: str) -> Path:
    new = folder.with_name(f"{prefix}{folder.name}-{uuid.uuid4().hex[:8]}")
    os.rename(folder, new)
    return new


def bring_back(run_dir: Path) -> None:
    """Give checkpoints their names again that made way for others which never came.

    Raises OSError.
    """
    try:
        for path in (run_dir / CHECKPOINTS).iterdir():
            if path.name.startswith(REPLACED) and not _named(path).exists():
                os.rename(path, _named(path))
    except (FileNotFoundError, NotADirectoryError):
        pass  # there are no checkpoints


def _named(replaced: Path) -> Path:
    """Where a checkpoint was before it made way."""
    return replaced.with_name(replaced.name.removeprefix(REPLACED).rpartition("-")[0])


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
        if path.name.startswith(REPLACED) and not os.path.isdir(_named(path)):
            continue  # it may be the only one of its step
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


def newest_word(run_dir: Path) -> str:
    """What a run has left when a save failed, as half a sentence."""
    try:
        old = list_checkpoints(run_dir)
    except OSError as error:
        return f"the others cannot be listed ({reason(error)})"
    return f"{old[0].name} stays the newest" if old else "there is none yet"


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
