"""Which checkpoints of a run stay, and how the others go; and what a killed save left."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING

from parallel3d.checkpoint.manifest import CHECKPOINTS, DAMAGED, LATEST, REMOVED, UNFINISHED

if TYPE_CHECKING:
    from parallel3d.config import CheckpointConfig


def too_many(newest_first: Iterable[Path], settings: CheckpointConfig) -> list[Path]:
    """The checkpoints that are neither among the last `keep` nor of a multiple of `keep_every`."""
    old = list(newest_first)[settings.keep :]
    every = settings.keep_every
    return [p for p in old if not (every and int(p.name.rpartition("-")[2]) % every == 0)]


def discard(folder: Path) -> None:
    """Remove a checkpoint; half removed, it has no checkpoint's name any more."""
    gone = folder.with_name(REMOVED + folder.name)
    if gone.exists():
        shutil.rmtree(gone)
    os.rename(folder, gone)
    shutil.rmtree(gone)


def remove_leftovers(run_dir: Path) -> None:
    """Remove what saves and removals left that were killed on the way."""
    folder = run_dir / CHECKPOINTS
    if not folder.is_dir():
        return
    for path in folder.iterdir():
        if path.name.startswith((UNFINISHED, REMOVED)):
            shutil.rmtree(path)
        elif path.name.startswith(f".{LATEST}-"):
            path.unlink()


def set_aside(folder: Path) -> Path:
    """Rename a damaged checkpoint, so that it counts as none and can still be looked at."""
    number, aside = 1, folder.with_name(DAMAGED + folder.name)
    while aside.exists():
        number += 1
        aside = folder.with_name(f"{DAMAGED}{folder.name}.{number}")
    os.rename(folder, aside)
    return aside
