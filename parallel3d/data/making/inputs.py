"""Which files hold the documents: found by fsspec, here or at any address that it knows.

Nothing is opened here. Items keep the order in which they are given, files below an item that of
their names, so that the same line makes the same corpus on any machine.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import fsspec
from fsspec.spec import AbstractFileSystem

from parallel3d.config.fields import show
from parallel3d.data.making.kinds import ENDS, PACKED, PARQUET, TEXT
from parallel3d.errors import UserError, nearest
from parallel3d.files.reading import plain

STAMPS = ("mtime", "ETag", "etag", "Last-Modified", "LastModified", "last_modified")
HOW = "give files, folders, globs or addresses, joined by commas"


@dataclass(frozen=True)
class Input:
    """A file. `address` opens it by fsspec; `kind` is one of KINDS, `packed` "", ".gz" or ".zst".

    `stamp` is what tells one state of it from another: a time, an ETag.
    """

    address: str
    kind: str
    packed: str
    size: int  # bytes, as it is stored
    stamp: str


def find_inputs(given: str, kind: str | None = None) -> list[Input]:
    """The files of `input=…`, each once. `kind`: of all of them; None: by their names.

    Raises UserError for what is not there, cannot be listed or holds no files.
    """
    items = [given] if _is_one(given) else [item.strip() for item in given.split(",")]
    if not all(items):
        raise UserError(f"input={show(given)} has an empty item between its commas: {HOW}")
    found: dict[str, Input] = {}
    for item in items:
        for each in _inputs_of(item, kind):
            found.setdefault(each.address, each)
    if not any(each.size for each in found.values()):
        raise UserError(f"input={show(given)} has only empty files ({len(found)}): {HOW}")
    return list(found.values())


def digest_of(inputs: list[Input]) -> str:
    """Equal for the same files in the same order and state."""
    rows = [[each.address, each.kind, each.size, each.stamp] for each in inputs]
    return hashlib.blake2b(json.dumps(rows).encode(), digest_size=16).hexdigest()


@contextlib.contextmanager
def of_input(address: str, key: str = "input") -> Iterator[None]:
    """What fails inside is the user's to know in one sentence, whichever file system says it."""
    try:
        yield
    except (UserError, KeyboardInterrupt, MemoryError):
        raise
    except Exception as error:  # each file system of fsspec has errors of its own
        why = getattr(error, "strerror", None) or str(error) or type(error).__name__
        raise UserError(f"{key}={show(address)} cannot be read ({plain(why)}): {HOW}") from None


def _is_one(given: str) -> bool:
    """Whether a name that holds a comma is there as it stands."""
    return "://" not in given and os.path.lexists(os.path.expanduser(given))


def _inputs_of(item: str, kind: str | None) -> list[Input]:
    with of_input(item):
        files, path = fsspec.core.url_to_fs(os.path.expanduser(item))
        if not isinstance(path, str):
            raise ValueError("it is several addresses in one")
        try:
            info = files.info(path)
        except FileNotFoundError:
            if not set("*?[") & set(path):
                raise UserError(f"input={show(item)} is not there{_near(files, path)}") from None
            info = None
        if info is not None and info["type"] == "file":
            return [_input(files, info, kind)]
        below = files.find(path, detail=True) if info else _globbed(files, path)
        fixed = path if info else os.path.dirname(re.split(r"[*?[]", path, maxsplit=1)[0])
        infos = [below[name] for name in sorted(below) if not _is_hidden(name[len(fixed) :])]
        if not infos:
            verb = "holds no files (hidden ones do not count)" if info else "matches no file"
            raise UserError(f"input={show(item)} {verb}: {HOW}")
        return [_input(files, each, kind) for each in infos]


def _globbed(files: AbstractFileSystem, pattern: str) -> dict[str, dict[str, Any]]:
    """The files that match, and those below the folders that do."""
    found: dict[str, dict[str, Any]] = {}
    for name, info in files.glob(pattern, detail=True).items():
        found |= files.find(name, detail=True) if info["type"] == "directory" else {name: info}
    return found


def _is_hidden(below: str) -> bool:
    return any(part.startswith(".") for part in below.split("/"))


def _input(files: AbstractFileSystem, info: dict[str, Any], kind: str | None) -> Input:
    name = info["name"]
    bare, packed = os.path.splitext(name)
    if packed not in PACKED:
        bare, packed = name, ""
    kind = kind or ENDS.get(os.path.splitext(bare)[1].lower(), TEXT)
    if kind == PARQUET and packed:
        raise UserError(f"input={show(name)}: parquet is packed inside, {packed} around it is not")
    stamp = next((str(info[key]) for key in STAMPS if info.get(key)), "")
    return Input(files.unstrip_protocol(name), kind, packed, int(info.get("size") or 0), stamp)


def _near(files: AbstractFileSystem, path: str) -> str:
    folder, name = os.path.split(path.rstrip("/"))
    try:
        there = [os.path.basename(each) for each in files.ls(folder, detail=False)]
    except Exception:  # what cannot be listed has no suggestion to offer
        there = []
    close = nearest(name, there)
    return f"; the nearest in {folder} is {close}" if close else f": {HOW}"
