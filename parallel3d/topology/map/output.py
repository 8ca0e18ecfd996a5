"""Files that a command was asked to write: what it did not write itself stays as it is."""

from __future__ import annotations

import os
from pathlib import Path

from parallel3d.config.fields import show
from parallel3d.errors import UserError


def check_free(name: str, wanted: str | None, mark: str, made_by: str) -> None:
    """Refuse to overwrite what this command did not write, before any work is done.

    `name` is the key whose value is `wanted`; `mark` is near the beginning of each file that the
    command `made_by` wrote.
    """
    if wanted is None:
        return
    path, key = Path(wanted), f"{name}={show(wanted)}"
    if path.is_dir():
        raise UserError(f"{key} is a folder; name a file in it.")
    if not path.parent.is_dir():
        raise UserError(f"{key}: the folder {path.parent} does not exist; make it first.")
    if not path.exists():
        return
    if not path.is_file():
        raise UserError(f"{key} is no regular file; name one, or a new one.")
    try:
        with path.open(encoding="utf-8", errors="replace") as file:
            ours = mark in file.read(1000)
    except OSError as error:
        raise UserError(f"{key} cannot be read: {error.strerror}.") from None
    if not ours:
        raise UserError(
            f"{key} exists and was not written by {made_by}; it stays as it is: name another "
            f"file, or remove it."
        )


def write(name: str, wanted: str, text: str) -> None:
    """The whole file or none of it. Raises UserError where it cannot be written."""
    path = Path(wanted)
    half = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        half.write_text(text, encoding="utf-8")
        half.replace(path)
    except OSError as error:
        half.unlink(missing_ok=True)
        raise UserError(f"{name}={show(wanted)} cannot be written: {error.strerror}.") from None
