"""Finds the files of a text, orders them, and keeps their tokens in the token cache.

The order depends on the relative names alone, so two machines pack the same stream. Documents are
ordered by a hash of the name: the held-out tail of the stream is then a fair sample.
"""

from __future__ import annotations

import contextlib
import glob
import hashlib
import logging
import os
import re
import stat
import sysconfig
from collections.abc import Callable, Iterator, Sequence
from fnmatch import fnmatchcase
from io import FileIO
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import numpy.typing as npt

from parallel3d.data import cache
from parallel3d.data.indexed import IndexedCorpus, IndexedWriter, token_type
from parallel3d.data.inputs import LARGEST_DOCUMENT, Found, encoded, items_of
from parallel3d.data.tokenizer import ByteTokenizer, Tokenizer, Unencodable
from parallel3d.data.tokens import WatchedFile
from parallel3d.errors import UserError, nearest

if TYPE_CHECKING:  # omegaconf, which the configuration imports, loads slowly
    from parallel3d.config.schema import DataConfig

_log = logging.getLogger(__name__)

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

    Raises UserError for what is missing, empty or unreadable.
    """
    if data.name == "stdlib":
        found = _stdlib_documents()
    else:
        assert data.path is not None, "config.checks refuses data=text without data.path"
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


def _text_documents(path: str) -> list[Document]:
    items = items_of(path, f"data.path={path}", _HOW)
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
        files = _files_below(path, _hidden, key) if is_folder else [(os.path.basename(path), path)]
    if not files:
        verb = "holds no files (hidden ones do not count)"
        raise UserError(f"{key} {verb if os.path.isdir(path) else 'matches no file'}: {_HOW}")
    documents = [d for d in (_document(*f, key) for f in files) if d and d.size]
    if not documents:
        what = "has only empty files, pipes or devices"
        raise UserError(f"{key} {what} ({len(files)}): give some that hold text")
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
    seen = set()

    def fail(error: OSError) -> None:
        if key is not None:
            raise _unreadable(key, error.filename, error.strerror) from error

    for folder, below, names in os.walk(root, onerror=fail, followlinks=True):
        status = os.stat(folder)
        if (status.st_dev, status.st_ino) in seen:  # a link that leads back
            below.clear()
            continue
        seen.add((status.st_dev, status.st_ino))
        below[:] = sorted((name for name in below if not skip(name)), reverse=True)
        paths = [os.path.join(folder, name) for name in names if not _hidden(name)]
        files += [(_slashed(os.path.relpath(path, root)), path) for path in paths]
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


# The tokens of a text, a pair in the token cache


_VERSION = 2
_BLOCK = 4 << 20  # bytes


class CachedPair(NamedTuple):
    """A pair in the cache, and the digest of its tokens."""

    pair: IndexedCorpus
    digest: str
    files: tuple[WatchedFile, ...]


def cache_key(documents: Sequence[Document], tokenizer: Tokenizer) -> str:
    """Returns the cache's name, which changes with any file's path, size, times or inode.

    Absolute paths count, since container images with normalised times hold different text under
    the same names; inodes and change times count, since a copy cannot set them.
    """
    listing = [_VERSION, tokenizer.digest]
    listing += [(os.path.realpath(d.path), *d._replace(path="")) for d in documents]
    return cache.digest_of(listing)


def token_count(documents: Sequence[Document]) -> int:
    """Returns the length of the byte stream: all bytes, and an end-of-text after each document."""
    return sum(d.size for d in documents) + len(documents)


def cached_text(folder: Path, documents: Sequence[Document], tokenizer: Tokenizer) -> CachedPair:
    """Returns the tokens of `documents`, each with an end-of-text, from the cache in `folder`.

    The text is found by its end-of-text tokens: the pair's own documents are blocks of bytes where
    tokens are bytes. Raises UserError if the folder or a document cannot be used.
    """

    def build(writer: IndexedWriter) -> None:
        size = f"{len(documents)} documents, {sum(d.size for d in documents) / 1e6:.1f} MB"
        through = "" if isinstance(tokenizer, ByteTokenizer) else f" through {tokenizer.name}"
        _log.info(f"building the token cache: {size} of text{through}")
        for tokens in _tokenized(documents, tokenizer):
            writer.add(tokens)

    key, dtype = cache_key(documents, tokenizer), token_type(tokenizer.vocab_size)
    return cached_pair(folder, key, dtype, build)


def cached_pair(
    folder: Path,
    key: str,
    dtype: np.dtype,
    build: Callable[[IndexedWriter], None],
) -> CachedPair:
    """Returns the pair `key` in `folder`; `build` writes it if it is missing."""

    def write(prefix: Path) -> dict[str, Any]:
        with IndexedWriter(prefix, dtype, replace=True) as writer:
            build(writer)
        return {}

    def opened(entry: cache.Entry) -> CachedPair:
        files = {file.file.name: file.file for file in entry.files.values()}
        pair = IndexedCorpus.open(folder / key, opened=lambda path, _: files[path])
        return CachedPair(pair, entry.digests[".bin"], tuple(entry.files.values()))

    return cache.kept(folder, key, (".bin", ".idx"), write, opened)


def _tokenized(
    documents: Sequence[Document], tokenizer: Tokenizer
) -> Iterator[npt.NDArray[np.integer]]:
    """Yields the tokens of documents in order, of bytes block by block. Raises UserError."""
    if isinstance(tokenizer, ByteTokenizer):
        for document in documents:
            for text in blocks_of(document):
                yield tokenizer.encode(text)
            yield np.array([tokenizer.eot])
        return
    for found, tokens in encoded(tokenizer, map(_whole, documents)):
        if isinstance(tokens, Unencodable):
            raise UserError(
                f"data file {found.where} cannot be encoded by data.tokenizer={tokenizer.name} "
                f"({tokens.why}): remove or mend it, or give another tokenizer"
            )
        yield np.append(tokens, tokens.dtype.type(tokenizer.eot))


def _whole(document: Document) -> Found:
    """Reads a document. Raises UserError."""
    if document.size > LARGEST_DOCUMENT:
        raise UserError(
            f"data file {document.path} has {document.size:,} bytes, and a document has at most "
            f"{LARGEST_DOCUMENT:,}: cut it, or give data.tokenizer=byte"
        )
    return Found(document.path, b"".join(blocks_of(document)).decode("utf-8", "replace"))


@contextlib.contextmanager
def _opened(path: str) -> Iterator[FileIO]:
    """Opens a file to read, and ignores an error of its close, which says nothing about the bytes
    read and could not be caught by a caller that already failed."""
    file = open(path, "rb", buffering=0)  # noqa: SIM115  closed below
    try:
        yield file
    finally:
        with contextlib.suppress(OSError):
            file.close()


def blocks_of(document: Document) -> Iterator[bytes]:
    """Yields the document's bytes block by block. Raises UserError."""
    try:
        with _opened(document.path) as file:
            left = document.size
            while left and (text := file.read(min(left, _BLOCK))):
                left -= len(text)
                yield text
            status = os.fstat(file.fileno())
    except OSError as error:
        raise UserError(
            f"data file {document.path} cannot be read ({error.strerror}): give text that you may "
            f"read in data.path"
        ) from error
    check_unchanged(document, status, complete=not left)


def check_unchanged(document: Document, status: os.stat_result, complete: bool = True) -> None:
    """Raises UserError for a document that was not read whole, or changed since it was listed."""
    if not complete or Document.of(document.name, document.path, status) != document:
        raise UserError(
            f"data file {document.path} changed while it was being read: start again when it is "
            f"complete, or give another data.path"
        )
