"""Finds the files of a text and orders them; opens none of them.

The order depends on the relative names alone, so two machines pack the same stream. Documents are
ordered by a hash of the name: the held-out tail of the stream is then a fair sample.
"""

from __future__ import annotations

import glob
import hashlib
import os
import re
import stat
import sysconfig
from collections.abc import Callable, Sequence
from fnmatch import fnmatchcase
from typing import TYPE_CHECKING, NamedTuple

from parallel3d.errors import UserError, nearest

if TYPE_CHECKING:  # omegaconf, which the configuration imports, loads slowly
    from parallel3d.config.schema import DataConfig

# Tests contain broken text on purpose; the others are missing in some installations of a version.
_NOT_STDLIB = frozenset(
    ("site-packages", "dist-packages", "__pycache__", "test", "tests", "idlelib", "lib2to3")
)
_HOW = "give files, folders or globs, joined by commas"


class Document(NamedTuple):
    """A non-empty file. `name` is relative to what the user gave, with `/` everywhere."""

    name: str
    path: str
    size: int  # bytes
    mtime_ns: int
    # Not changed by `touch`, `rsync -t` or `tar`, unlike the time of modification.
    ctime_ns: int
    inode: int

    @classmethod
    def of(cls, name: str, path: str, status: os.stat_result) -> Document:
        times = status.st_mtime_ns, status.st_ctime_ns
        return cls(name, path, status.st_size, *times, status.st_ino)


def origin(data: DataConfig) -> str:
    """Returns the name of the source for messages: the key with the user's value."""
    return "data=stdlib" if data.name == "stdlib" else f"data.path={data.path}"


def find_documents(data: DataConfig) -> list[Document]:
    """Returns all documents of the source in packing order.

    Raises UserError for what is missing, empty or unreadable, for data=text without data.path and
    data=stdlib with it.
    """
    if data.name == "stdlib":
        if data.path is not None:
            raise UserError(
                f"data.path={data.path} has no meaning with data=stdlib, which reads Python's own "
                f"sources: leave it out, or choose data=text"
            )
        found = _stdlib_documents()
    else:
        found = _text_documents(data.path)
    return sorted(found, key=lambda d: hashlib.blake2b(os.fsencode(d.name)).digest())


def _stdlib_documents() -> list[Document]:
    root = sysconfig.get_paths()["stdlib"]
    files = [
        (name, path)
        for name, path in _files_below(root, lambda folder: folder in _NOT_STDLIB, "data=stdlib")
        # A distribution may leave a dangling link here (sitecustomize.py).
        if name.endswith(".py") and os.path.exists(path)
    ]
    documents = [d for d in (_document(*f, "data=stdlib") for f in files) if d and d.size]
    if not documents:
        raise UserError(
            f"data=stdlib finds no Python sources in {root}, this Python comes without them: "
            f"choose data=text and a data.path"
        )
    return documents


def _text_documents(path: str | None) -> list[Document]:
    if not path:
        raise UserError(f"data.path is missing, data=text needs it: {_HOW}, or choose data=stdlib")
    # A name with a comma or bracket is taken literally if there is such a file.
    whole = os.path.lexists(os.path.expanduser(path))
    items = [path] if whole else [item.strip() for item in path.split(",")]
    if not all(items):
        raise UserError(f"data.path={path} has an empty item between its commas: {_HOW}")
    found: dict[str, Document] = {}
    for item in items:
        for document in _documents_of(item):
            # A file reached twice (folder and glob, or a link) is one document.
            found.setdefault(os.path.realpath(document.path), document)
    return list(found.values())


def _documents_of(item: str) -> list[Document]:
    """Returns the documents of one file, folder or glob of data.path."""
    key, path = f"data.path={item}", os.path.expanduser(item)
    try:
        is_folder = stat.S_ISDIR(os.stat(path).st_mode)
    except (FileNotFoundError, NotADirectoryError):
        if not glob.has_magic(path) or os.path.islink(path):
            raise UserError(_missing(item, path)) from None
        files = _glob(path, key)
    except OSError as error:
        raise _unreadable(key, path, error.strerror) from error
    else:
        if not is_folder:
            document = _document(os.path.basename(path), path, key)
            if document is None:
                raise UserError(f"{key} is not a regular file: {_HOW}")
            if not document.size:
                raise UserError(f"{key} is an empty file: give one that holds text")
            return [document]
        files = _files_below(path, _hidden, key)
    if not files:
        verb = "holds no files (hidden ones do not count)"
        raise UserError(f"{key} {verb if os.path.isdir(path) else 'matches no file'}: {_HOW}")
    documents = [d for d in (_document(*f, key) for f in files) if d and d.size]
    if not documents:
        raise UserError(f"{key} has only empty files ({len(files)}): give some that hold text")
    return documents


def _glob(pattern: str, key: str) -> list[tuple[str, str]]:
    """Returns names and paths of matches; a matching folder stands for all files below it."""
    fixed = re.split(r"[*?[]", pattern, maxsplit=1)[0]
    root = os.path.dirname(fixed)
    if "**" in pattern.split("/"):
        return _recursive_glob(pattern, root)
    files: list[tuple[str, str]] = []
    for path in sorted(glob.glob(pattern)):
        name = _slashed(os.path.relpath(path, root or "."))
        if os.path.isdir(path):
            below = _files_below(path, _hidden, key)
            files += [(f"{name}/{inner}" if name != "." else inner, full) for inner, full in below]
        else:
            files.append((name, path))
    return files


def _recursive_glob(pattern: str, root: str) -> list[tuple[str, str]]:
    """Returns what `_glob` does for a pattern with `**`, whose first wildcard lies below `root`.

    Visits each folder once, also where links lead back; glob would follow them repeatedly.
    """
    parts = os.path.relpath(pattern, root or ".").split("/")
    files = _files_below(root or ".", _hidden, None) if os.path.isdir(root or ".") else []
    return [(name, path) for name, path in files if _matches(name.split("/"), parts)]


def _matches(names: Sequence[str], parts: Sequence[str]) -> bool:
    """Returns whether a path matches the parts of a glob."""
    if not parts:
        return True
    if parts[0] == "**":
        return any(_matches(names[n:], parts[1:]) for n in range(len(names) + 1))
    return bool(names) and fnmatchcase(names[0], parts[0]) and _matches(names[1:], parts[1:])


def _files_below(root: str, skip: Callable[[str], bool], key: str | None) -> list[tuple[str, str]]:
    """Returns relative name and path of every file below `root`, sorted; follows linked folders.

    Leaves out hidden files and folders whose name `skip` accepts. Raises UserError about `key` for
    an unreadable folder, or leaves it out if that is None.
    """
    files: list[tuple[str, str]] = []
    pending, seen = [("", root)], set()
    while pending:
        prefix, folder = pending.pop()
        try:
            status = os.stat(folder)
            with os.scandir(folder) as entries:
                listing = sorted((entry.name, entry.is_dir(), entry.path) for entry in entries)
        except OSError as error:
            if key is None:
                continue
            raise _unreadable(key, folder, error.strerror) from error
        if (status.st_dev, status.st_ino) in seen:  # a link that leads back
            continue
        seen.add((status.st_dev, status.st_ino))
        for name, is_folder, path in listing:
            if is_folder and not skip(name):
                pending.append((f"{prefix}{name}/", path))
            elif not is_folder and not _hidden(name):
                files.append((prefix + name, path))
    return sorted(files)


def _document(name: str, path: str, key: str) -> Document | None:
    """Returns the document at `path`, perhaps of size 0; None for a pipe, socket or device."""
    try:
        status = os.stat(path)
    except OSError as error:
        raise _unreadable(key, path, error.strerror) from error
    if not stat.S_ISREG(status.st_mode):
        return None
    if not os.access(path, os.R_OK):
        raise _unreadable(key, path, "Permission denied")
    return Document.of(_slashed(name), path, status)


def _unreadable(key: str, path: str, reason: str | None) -> UserError:
    return UserError(f"{key} cannot be read, {path}: {reason}; give text that you may read")


def _missing(item: str, path: str) -> str:
    """Returns the sentence about a missing path, with the nearest name where the path breaks."""
    wrong = os.path.abspath(path)
    while not os.path.isdir(os.path.dirname(wrong)):
        wrong = os.path.dirname(wrong)
    folder, name = os.path.split(wrong)
    try:
        guess = nearest(name, os.listdir(folder))
    except OSError:
        guess = None  # a folder that may not be listed
    if os.path.lexists(wrong):
        reason = "is a dangling link" if os.path.islink(wrong) else "is not a folder"
        return f"data.path={item} does not exist, {wrong} {reason}: {_HOW}"
    hint = f"the nearest name in {folder} is {guess}" if guess else f"{folder} has nothing like it"
    return f"data.path={item} does not exist, {hint}: {_HOW}"


def _hidden(name: str) -> bool:
    return name.startswith(".")


def _slashed(name: str) -> str:
    return name.replace(os.sep, "/")
