"""Reads and protects the files that users name in keys."""

from __future__ import annotations

import os
from pathlib import Path

from parallel3d.config.fields import show
from parallel3d.errors import UserError
from parallel3d.files import text_of_file


def read_given(key: str, name: str) -> str:
    """Returns the text of the file `name`, which was given as `key`.

    Raises UserError if the file cannot be read.
    """
    try:
        return text_of_file(name)
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or "it is not text"
        raise UserError(f"{key}={show(name)} cannot be read: {reason}.") from None


def check_free(name: str, wanted: str | None, mark: str | None, made_by: str) -> None:
    """Raises UserError if the file `wanted`, given as key `name`, cannot or must not be written.

    A file with `mark` in its first 1,000 characters was written by the command `made_by` and may be
    overwritten. If `mark` is None, no file may be overwritten; if `wanted` is None, there is
    nothing to check.
    """
    if wanted is None:
        return
    path, key = Path(wanted), f"{name}={show(wanted)}"
    if path.is_dir():
        raise UserError(f"{key} is a folder; name a file in it.")
    if not path.parent.is_dir():
        raise UserError(f"{key}: the folder {path.parent} does not exist; create it first.")
    if not os.path.lexists(path):
        return
    if not path.is_file():
        raise UserError(f"{key} is not a regular file or a link to one; name another file.")
    try:
        with path.open(encoding="utf-8", errors="replace") as file:
            ours = mark is not None and mark in file.read(1000)
    except OSError as error:
        raise UserError(f"{key} cannot be read: {error.strerror}.") from None
    if not ours:
        other = "" if mark is None else f" and was not written by {made_by}"
        raise UserError(
            f"{key} exists{other}; it is never overwritten: name another file, or remove it."
        )


def write(name: str, wanted: str, text: str) -> None:
    """Writes the file `wanted`, given as key `name`, atomically. Raises UserError on failure."""
    path = Path(wanted)
    half = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        half.write_text(text, encoding="utf-8")
        half.replace(path)
    except OSError as error:
        half.unlink(missing_ok=True)
        raise UserError(f"{name}={show(wanted)} cannot be written: {error.strerror}.") from None
