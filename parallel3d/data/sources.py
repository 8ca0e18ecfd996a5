"""Finds the files of a text, orders them, and keeps their tokens in the token cache.

The order depends on the relative names alone, so two machines pack the same stream. Documents are
ordered by a hash of the name, so that the held-out tail of the stream is a fair sample.
"""

from __future__ import annotations

import codecs
import contextlib
import glob
import hashlib
import logging
import os
import re
import stat
import sysconfig
from collections.abc import Callable, Iterable, Iterator, Sequence
from fnmatch import fnmatchcase
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from parallel3d.data import cache, inputs
from parallel3d.data.folders import check_twins, left_out_lines, sort_out
from parallel3d.data.formats import (
    CHAT,
    HEAD,
    PATH,
    TEXT,
    Form,
    InputRules,
    UnsupportedFile,
    check_kind,
    check_text,
    encoding_of,
    judged,
    read_by,
    said_of,
    said_of_returns,
    text_of,
)
from parallel3d.data.indexed import IndexedCorpus, IndexedWriter, token_type
from parallel3d.data.inputs import (
    BAD,
    JUDGED,
    LARGEST_DOCUMENT,
    LOCAL,
    Count,
    FoundText,
    Input,
    cut,
    encoded,
    is_hidden,
    items_of,
    judge,
    left_out,
    said,
)
from parallel3d.data.tokenizer import ByteTokenizer, Tokenizer, UnencodableText, nearest_path
from parallel3d.data.tokens import WatchedFile
from parallel3d.errors import UserError

# Omegaconf, which the configuration imports, loads slowly.
if TYPE_CHECKING:
    from parallel3d.data.keys import DataConfig

_log = logging.getLogger(__name__)

# Folders to leave out: tests contain broken text on purpose, and some installations lack the rest.
_NOT_STDLIB = frozenset(
    ("site-packages", "dist-packages", "__pycache__", "test", "tests", "idlelib", "lib2to3")
)
_HOW = "give files, folders or globs, joined by commas"


class Document(NamedTuple):
    """A non-empty file.

    Attributes:
        name: path relative to the folder or glob given by the user.
        kind, packed: format of the file and of its compression.
        mark: the encoding given by a byte order mark; "" without a mark.
    """

    name: str
    path: str
    size: int  # bytes
    mtime_ns: int
    # `touch`, `rsync -t` and `tar` cannot set this time, unlike the time of modification.
    ctime_ns: int
    inode: int
    kind: str = TEXT
    packed: str = ""
    mark: str = ""

    @property
    def is_plain(self) -> bool:
        """Whether the file's bytes are its text, without compression or a byte order mark."""
        return self.kind == TEXT and not self.packed and not self.mark

    @classmethod
    def of(cls, name: str, path: str, status: os.stat_result) -> Document:
        times = status.st_mtime_ns, status.st_ctime_ns
        return cls(name, path, status.st_size, *times, status.st_ino)


def origin(data: DataConfig) -> str:
    """Returns the name of the source for messages: the key with the user's value."""
    return "data=stdlib" if data.name == "stdlib" else f"data.path={data.path}"


class OrderedDocuments(NamedTuple):
    """Documents in packing order, and lines on how the files of folders and globs are read."""

    documents: list[Document]
    lines: list[str]


def take_documents(data: DataConfig) -> OrderedDocuments:
    """Returns all documents of the source, and lines on how folders and globs are read.

    Raises UserError for missing or unreadable files, for items without text, and for formats that
    are not read.
    """
    lines: list[str] = []
    if data.name == "stdlib":
        found = _stdlib_documents()
    else:
        assert data.path is not None, "check_config refuses data=text without data.path"
        found, lines = _text_documents(data.path, door_of(data), data.held_out == 1.0)
    ordered = sorted(found, key=lambda d: hashlib.blake2b(os.fsencode(d.name)).digest())
    return OrderedDocuments(ordered, lines)


def door_of(data: DataConfig) -> InputRules:
    """Returns the rules by which the files of `data.path` are read."""
    return CHAT if data.name == "chat" else PATH


def _stdlib_documents() -> list[Document]:
    root = sysconfig.get_paths()["stdlib"]
    files = [
        (name, path)
        for name, path in _files_below(root, lambda folder: folder in _NOT_STDLIB, "data=stdlib")
        # A distribution may leave a dangling link here (sitecustomize.py).
        if name.endswith(".py") and os.path.exists(path)
    ]
    documents = _documents(files, "data=stdlib")
    if not documents:
        raise UserError(
            f"data=stdlib finds no Python sources in {root}, as this Python comes without them: "
            f"choose data=text and a data.path"
        )
    return documents


def _text_documents(
    path: str, rules: InputRules, held_out: bool
) -> tuple[list[Document], list[str]]:
    items = items_of(path, f"data.path={path}", _HOW)
    found: dict[str, Document] = {}
    lines: list[str] = []
    for item in items:
        documents, of_item = _documents_of(item, rules, held_out)
        lines += of_item
        for document in documents:
            # A file reached twice (folder and glob, or a link) is one document.
            found.setdefault(os.path.realpath(document.path), document)
    try:
        check_twins(document.path for document in found.values())
    except UnsupportedFile as error:
        raise UserError(f"data.path={path} {error}") from None
    return list(found.values()), lines


def _documents_of(item: str, rules: InputRules, held_out: bool) -> tuple[list[Document], list[str]]:
    """Returns the documents of one file, folder or glob of data.path.

    It also returns lines on how the files of a folder or glob are read.
    """
    key, path = f"data.path={item}", os.path.expanduser(item)
    if re.match(r"\w+://", item) and not os.path.lexists(path):
        raise UserError(
            f"{key} is an address, but only files of this host are read: copy it, or make a corpus "
            "of it with `parallel3d data tokenize`, which reads addresses"
        )
    try:
        is_folder = stat.S_ISDIR(os.stat(path).st_mode)
    except (FileNotFoundError, NotADirectoryError):
        if not glob.has_magic(path) or os.path.islink(path):
            raise UserError(f"{key} does not exist ({_why_missing(path)}): {_HOW}") from None
        is_folder, files = False, _glob(path, key)
    except OSError as error:
        raise _unreadable(key, path, error.strerror) from error
    else:
        files = (
            _files_below(path, is_hidden, key) if is_folder else [(os.path.basename(path), path)]
        )
    if not files:
        verb = "holds no files (hidden ones do not count)"
        raise UserError(f"{key} {verb if os.path.isdir(path) else 'matches no file'}: {_HOW}")
    documents = _documents(files, key)
    if not documents:
        what = "has only empty files, pipes or devices"
        raise UserError(f"{key} {what} ({len(files)}): give files that hold text")
    heads = {document.name: _head(document, key) for document in documents}
    is_one = os.path.isfile(path)
    try:
        if is_one:
            (document,) = documents
            form = judged(document.name, heads[document.name], rules)
            check_kind(form, rules)
            lines = [
                f"{key}: {line}"
                for line in (
                    *said_of(document.name, None),
                    *said_of_returns(heads, {document.name: form}),
                )
            ]
            return [_of_form(document, form, heads[document.name])], lines
        pattern = "" if is_folder else path[len(_fixed(path)) :]
        found = sort_out(heads, rules, pattern=pattern, held_out=held_out)
    except UnsupportedFile as error:
        raise UserError(f"{key} {error}") from None
    lines = [*said(key, found), *(f"{key}: {line}" for line in said_of_returns(heads, found.taken))]
    if not found.taken:
        left = "; ".join(left_out_lines(found.left_out))
        raise UserError(f"{key} holds no documents: {left}; {read_by(rules)}; {_HOW}")
    taken = [each for each in documents if each.name in found.taken]
    return [_of_form(each, found.taken[each.name], heads[each.name]) for each in taken], lines


def _of_form(document: Document, form: Form, head: bytes) -> Document:
    mark = encoding_of(head) or ("utf-8-sig" if head.startswith(codecs.BOM_UTF8) else "")
    return document._replace(kind=form.kind, packed=form.packed, mark=mark)


def _head(document: Document, key: str) -> bytes:
    try:
        with open(document.path, "rb", buffering=0) as file:
            return file.read(HEAD)
    except OSError as error:
        raise _unreadable(key, document.path, error.strerror) from error


def _glob(pattern: str, key: str) -> list[tuple[str, str]]:
    """Returns the names and paths of matching files, and of all files below matching folders."""
    root = _fixed(pattern) or "."
    if "**" in pattern.split("/"):
        # Each folder is visited once, even with circular links, which glob would follow again.
        parts = os.path.relpath(pattern, root).split("/")
        below = _files_below(root, is_hidden, None)
        return [(name, path) for name, path in below if _matches(name.split("/"), parts)]
    files: list[tuple[str, str]] = []
    for path in sorted(glob.glob(pattern)):
        name = os.path.relpath(path, root)
        if os.path.isdir(path):
            below = _files_below(path, is_hidden, key)
            files += [(os.path.normpath(f"{name}/{inner}"), full) for inner, full in below]
        else:
            files.append((name, path))
    return files


def _fixed(pattern: str) -> str:
    """Returns the leading folders of a glob, without wildcards."""
    return os.path.dirname(re.split(r"[*?[]", pattern, maxsplit=1)[0])


def _matches(names: Sequence[str], parts: Sequence[str]) -> bool:
    """Returns whether a path matches the parts of a glob."""
    if not parts:
        return True
    if parts[0] == "**":
        return any(_matches(names[n:], parts[1:]) for n in range(len(names) + 1))
    return bool(names) and fnmatchcase(names[0], parts[0]) and _matches(names[1:], parts[1:])


def _files_below(root: str, skip: Callable[[str], bool], key: str | None) -> list[tuple[str, str]]:
    """Returns the relative name and the path of each file below `root`, sorted; follows links.

    Leaves out hidden files, and folders whose name `skip` accepts. Raises UserError, naming `key`,
    for an unreadable folder; leaves the folder out if `key` is None.
    """
    files: list[tuple[str, str]] = []
    seen = set()

    def fail(error: OSError) -> None:
        if key is not None:
            raise _unreadable(key, error.filename, error.strerror) from error

    for folder, below, names in os.walk(root, onerror=fail, followlinks=True):
        status = os.stat(folder)
        if (status.st_dev, status.st_ino) in seen:  # a circular link
            below.clear()
            continue
        seen.add((status.st_dev, status.st_ino))
        below[:] = sorted((name for name in below if not skip(name)), reverse=True)
        paths = [os.path.join(folder, name) for name in names if not is_hidden(name)]
        files += [(os.path.relpath(path, root), path) for path in paths]
    return sorted(files)


def _documents(files: Iterable[tuple[str, str]], key: str) -> list[Document]:
    """Returns the regular files that are not empty, as documents. Raises UserError."""
    documents = []
    for name, path in files:
        try:
            status = os.stat(path)
        except OSError as error:
            raise _unreadable(key, path, error.strerror) from error
        if not stat.S_ISREG(status.st_mode):
            continue
        if not os.access(path, os.R_OK):
            raise _unreadable(key, path, "Permission denied")
        if status.st_size:
            documents.append(Document.of(name, path, status))
    return documents


def _unreadable(key: str, path: str, reason: str | None) -> UserError:
    return UserError(f"{key}: {path} cannot be read ({reason}); give text that you may read")


def _why_missing(path: str) -> str:
    """Returns words that name the wrong part of a missing path, or the nearest path."""
    wrong = os.path.abspath(path)
    while not os.path.isdir(os.path.dirname(wrong)):
        wrong = os.path.dirname(wrong)
    if os.path.lexists(wrong):
        return f"{wrong} {'is a dangling link' if os.path.islink(wrong) else 'is not a folder'}"
    near = nearest_path(wrong)
    return f"the nearest is {near}" if near else f"{os.path.dirname(wrong)} has nothing like it"


# The tokens of a text, kept as an indexed dataset in the token cache


_VERSION = 3
_BLOCK = 4 << 20  # bytes


class CachedDataset(NamedTuple):
    """An indexed dataset in the token cache, with its two files and its builder's facts."""

    dataset: IndexedCorpus
    files: tuple[WatchedFile, ...]
    facts: dict[str, Any]


def cache_key(
    documents: Sequence[Document], tokenizer: Tokenizer, begin: Sequence[int] = ()
) -> str:
    """Returns a text's name in the cache, which depends on each file's path, size, times and inode.

    Absolute paths count, since container images with normalised times may hold different texts
    under the same relative names. Inodes and change times count, since a copy cannot set them.
    """
    listing: list[Any] = [_VERSION, tokenizer.digest, *([list(begin)] if begin else [])]
    listing += [(os.path.realpath(d.path), *d._replace(path="")) for d in documents]
    return cache.digest_of(listing)


def cached_text(
    folder: Path, documents: Sequence[Document], tokenizer: Tokenizer, begin: Sequence[int] = ()
) -> CachedDataset:
    """Returns the tokens of `documents` from the cache in `folder`.

    Each text follows the tokens `begin` and ends with an end-of-text token. With byte tokens, only
    end-of-text tokens separate texts, since the documents of the dataset are blocks of texts.
    Raises UserError if the folder or a document cannot be used.
    """

    def build(writer: IndexedWriter) -> dict[str, Any]:
        size = f"{len(documents)} files, {sum(d.size for d in documents) / 1e6:.1f} MB"
        by = "" if isinstance(tokenizer, ByteTokenizer) else f", tokenized by {tokenizer.name}"
        _log.info(f"building the token cache: {size} of text{by}")
        count = Count()
        if isinstance(tokenizer, ByteTokenizer):
            _add_bytes(writer, documents, tokenizer, count)
        else:
            for found, tokens in encoded(tokenizer, _texts(documents, count)):
                if isinstance(tokens, UnencodableText):
                    raise UserError(
                        f"data file {found.where} cannot be encoded by data.tokenizer="
                        f"{tokenizer.name} ({tokens.why}): remove or fix it, or give another "
                        "tokenizer"
                    )
                writer.add(np.concatenate([begin, tokens, [tokenizer.eot]]).astype(dtype))
        _judge(count, 1)
        if not writer.documents:
            raise UserError(
                f"data.path has no usable text in any of its {count.rows:,} rows; give files that "
                "hold text, in jsonl and parquet at the key text"
            )
        for sentence in left_out(count):
            _log.info(f"data.path: {sentence}")
        return {}

    key, dtype = cache_key(documents, tokenizer, begin), token_type(tokenizer.vocab_size)
    return cached_dataset(folder, key, dtype, build)


def cached_dataset(
    folder: Path,
    key: str,
    dtype: np.dtype,
    build: Callable[[IndexedWriter], dict[str, Any]],
) -> CachedDataset:
    """Returns the dataset `key` in `folder`, after building it if it is missing.

    `build` writes the dataset, and returns facts that are kept with it.
    """

    def write(prefix: Path) -> dict[str, Any]:
        with IndexedWriter(prefix, dtype) as writer:
            return build(writer)

    def opened(files: dict[str, WatchedFile], facts: dict[str, Any]) -> CachedDataset:
        by_name = {watched.file.name: watched.file for watched in files.values()}
        dataset = IndexedCorpus(folder / key, opened=lambda path, _: by_name[path])
        return CachedDataset(dataset, tuple(files.values()), facts)

    return cache.kept(folder, key, (".bin", ".idx"), write, opened)


def _judge(count: Count, least: int) -> None:
    """Raises UserError if there are at least `least` rows and too many of them hold no text."""
    remedy = f"fix or remove them; if the text is at another key, {PATH.column}"
    judge(count, least, BAD, f"{BAD:.0%}", remedy)


def _add_bytes(
    writer: IndexedWriter, documents: Sequence[Document], tokenizer: ByteTokenizer, count: Count
) -> None:
    """Adds the bytes of documents; reads plain files block by block. Raises UserError."""
    broken = 0
    for document in documents:
        if not document.is_plain:
            for found in _texts([document], count):
                writer.add(tokenizer.encode(found.text.encode()))
                writer.add(np.array([tokenizer.eot]))
            continue
        count.rows += 1
        try:
            broken += check_text(blocks_of(document)) > 0
        except UnsupportedFile as error:
            count.leave_out(document.path, str(error))
            continue
        for text in blocks_of(document):
            writer.add(tokenizer.encode(text))
        writer.add(np.array([tokenizer.eot]))
    if broken:
        _log.info(f"data.path: files with invalid UTF-8, which is kept as it is: {broken:,}")


def _texts(documents: Iterable[Document], count: Count) -> Iterator[FoundText]:
    """Yields the texts of documents or of their rows; counts texts left out. Raises UserError."""
    for document in documents:
        if document.kind == TEXT and not document.packed:
            count.rows += 1
            try:
                text, broken = text_of(_whole(document))
            except UnsupportedFile as error:
                count.leave_out(document.path, str(error))
                continue
            count.broken += broken > 0
            yield FoundText(document.path, text)
            continue
        for shard in cut([input_of(document, PATH)]):
            here = Count()
            yield from inputs.documents(shard, "text", here)
            count.add(here)
            _judge(count, JUDGED)
        check_unchanged(document, os.stat(document.path))


def input_of(document: Document, rules: InputRules) -> Input:
    """Returns a document as an input, whose rows can be read."""
    address = f"{LOCAL}{os.path.abspath(document.path)}"
    return Input(address, document.kind, document.packed, document.size, "", rules=rules)


def _whole(document: Document) -> bytes:
    """Reads a document. Raises UserError."""
    if document.size > LARGEST_DOCUMENT:
        raise UserError(
            f"data file {document.path} has {document.size:,} bytes, but must have at most "
            f"{LARGEST_DOCUMENT:,}: split it, or give data.tokenizer=byte"
        )
    return b"".join(blocks_of(document))


def blocks_of(document: Document) -> Iterator[bytes]:
    """Yields the document's bytes block by block. Raises UserError."""
    try:
        file = open(document.path, "rb", buffering=0)  # noqa: SIM115  closed below
        try:
            left = document.size
            while left and (text := file.read(min(left, _BLOCK))):
                left -= len(text)
                yield text
            status = os.fstat(file.fileno())
        finally:
            # An error on closing does not concern the bytes that were read, and would hide the
            # error of a caller that failed.
            with contextlib.suppress(OSError):
                file.close()
    except OSError as error:
        raise UserError(
            f"data file {document.path} cannot be read ({error.strerror}): set data.path to text "
            "that you have permission to read"
        ) from error
    check_unchanged(document, status, complete=not left)


def check_unchanged(document: Document, status: os.stat_result, complete: bool = True) -> None:
    """Raises UserError for a document that was cut short, or changed since it was listed."""
    now = Document.of(document.name, document.path, status)
    if not complete or now[:6] != document[:6]:
        raise UserError(
            f"data file {document.path} changed while it was being read: start again when it is "
            f"complete, or give another data.path"
        )
