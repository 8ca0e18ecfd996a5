"""Finds input files, splits them into shards of work and reads their documents."""

from __future__ import annotations

import contextlib
import gzip
import io
import json
import os
import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, BinaryIO, NamedTuple, cast

import numpy as np
import numpy.typing as npt

from parallel3d.config.fields import show
from parallel3d.data.tokenizer import Tokenizer, Unencodable, nearest_path
from parallel3d.errors import UserError
from parallel3d.files import plain

if TYPE_CHECKING:
    from fsspec.spec import AbstractFileSystem

# File formats that are read, and their compressions.
LINES, PARQUET, TEXT = "jsonl", "parquet", "text"
KINDS = (LINES, PARQUET, TEXT)
ENDS = {".jsonl": LINES, ".ndjson": LINES, ".json": LINES, ".parquet": PARQUET}
PACKED = (".gz", ".zst")
TAKEN = 1 << 12  # packed bytes read at a time: all that they unpack to, at most 128 MB, is held
BUFFER = 1 << 20


def file_system(address: str) -> tuple[AbstractFileSystem, str]:
    """Returns fsspec's file system of an address, and the path in it."""
    import fsspec  # loads slowly

    return fsspec.core.url_to_fs(address)


@contextlib.contextmanager
def opened(source: Input) -> Iterator[tuple[BinaryIO, BinaryIO]]:
    """Opens a file; yields its unpacked content, and the file, whose position is the progress."""
    files, path = file_system(source.address)
    with files.open(path, "rb") as file:
        if source.packed == ".gz":
            with gzip.GzipFile(fileobj=file) as unpacked:
                yield cast(BinaryIO, unpacked), file  # typeshed does not derive GzipFile from it
        else:
            # fsspec's own files read a whole block for each line.
            raw = Unpacked(file) if source.packed else file
            yield io.BufferedReader(raw, BUFFER), file


class Unpacked(io.RawIOBase):
    """Unpacks a zstd file. Raises EOFError where the file ends inside a frame, which the library's
    own reader takes for its end."""

    def __init__(self, file: BinaryIO) -> None:
        import zstandard

        self._file, self._zstandard = file, zstandard
        self._frame: Any = None
        self._rest, self._ready = b"", memoryview(b"")

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        """Reads as io.RawIOBase does; 0 at the end."""
        while not self._ready:
            packed = self._rest or self._file.read(TAKEN)
            self._rest = b""
            if not packed:
                if self._frame is not None:
                    raise EOFError("it was cut short: its last zstd frame has no end")
                return 0
            if self._frame is None:
                self._frame = self._zstandard.ZstdDecompressor().decompressobj()
            self._ready = memoryview(self._frame.decompress(packed))
            if self._frame.eof:
                self._rest, self._frame = self._frame.unused_data, None
        count = min(len(buffer), len(self._ready))
        buffer[:count] = self._ready[:count]
        self._ready = self._ready[count:]
        return count


# The documents of a shard


SHOWN = 5  # bad rows kept for the report
EXCERPT = 60  # characters
AT_ONCE = 256 << 10  # characters tokenized at a time: a tokenizer needs many times as much memory
ROWS = 256  # of a parquet file held at a time


class Found(NamedTuple):
    """A document, and its location."""

    where: str
    text: str


def encoded(
    tokenizer: Tokenizer, documents: Iterable[Found]
) -> Iterator[tuple[Found, npt.NDArray[np.integer] | Unencodable]]:
    """Yields documents with their tokens, or with the error of the tokenizer."""
    for some in _batches(documents):
        try:
            yield from zip(some, tokenizer.encode_all([each.text for each in some]), strict=True)
        except Unencodable:
            yield from ((each, _or_error(tokenizer, each.text)) for each in some)


def _or_error(tokenizer: Tokenizer, text: str) -> npt.NDArray[np.integer] | Unencodable:
    try:
        return tokenizer.encode_all([text])[0]
    except Unencodable as error:
        return error


def _batches(documents: Iterable[Found]) -> Iterator[list[Found]]:
    batch: list[Found] = []
    held = 0
    for each in documents:
        batch.append(each)
        held += len(each.text)
        if held >= AT_ONCE:
            yield batch
            batch, held = [], 0
    if batch:
        yield batch


@dataclass
class Count:
    """Counts rows: all, empty ones and those with invalid UTF-8 (no errors), and `bad` ones without
    a document, of which the first are `shown`; `size`: bytes of the texts."""

    rows: int = 0
    empty: int = 0
    broken: int = 0
    bad: int = 0
    size: int = 0
    shown: list[str] = field(default_factory=list)

    def add(self, other: Count) -> None:
        """Adds the counts of later rows."""
        for name in ("rows", "empty", "broken", "bad", "size"):
            setattr(self, name, getattr(self, name) + getattr(other, name))
        self.shown = [*self.shown, *other.shown][:SHOWN]

    def leave_out(self, where: str, why: str, row: bytes | str = "") -> None:
        """Counts a bad row."""
        self.bad += 1
        if len(self.shown) < SHOWN:
            text = row[: 4 * EXCERPT].decode("utf-8", "replace") if isinstance(row, bytes) else row
            text = plain(text[:EXCERPT]) + ("…" if len(text) > EXCERPT else "")
            self.shown.append(f"{where} {why}{f': {text}' if text else ''}")


def documents(shard: Shard, text_key: str, count: Count) -> Iterator[Found]:
    """Yields the non-empty documents of a shard in order; counts what is left out.

    Raises UserError for a file that cannot be read, or a document that is too large.
    """
    read = {LINES: _of_lines, PARQUET: _of_rows, TEXT: _of_files}[shard.sources[0].kind]
    for where, text in read(shard, text_key, count):
        if not text:
            count.empty += 1
            continue
        try:
            count.size += len(text.encode())
        except UnicodeEncodeError:  # JSON can spell halves of surrogate pairs
            text = text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
            count.broken += 1
            count.size += len(text.encode())
        yield Found(where, text)


def _of_lines(shard: Shard, text_key: str, count: Count) -> Iterator[Found]:
    for number, line in enumerate(shard.content.split(b"\n"), shard.at):
        if not line or line.isspace():
            continue
        where, why, row = f"{shard.sources[0].name}:{number}", "is no object", None
        count.rows += 1
        try:
            row = json.loads(line)
        except UnicodeDecodeError:
            why = "is no UTF-8"
        except (ValueError, RecursionError):
            why = "is no JSON"
        if isinstance(row, dict):
            if isinstance(row.get(text_key), str):
                yield Found(where, row[text_key])
                continue
            why = f"has no {'text at' if text_key in row else 'key'} {show(text_key)}"
        count.leave_out(where, why, line)


def _of_rows(shard: Shard, text_key: str, count: Count) -> Iterator[Found]:
    (source,), group = shard.sources, shard.at
    with _parquet(source) as file:
        names = file.schema_arrow.names
        if text_key not in names:
            raise UserError(
                f"input={show(source.address)} has no column {show(text_key)}: text_key must be "
                f"one of {plain(', '.join(names))}"
            )
        batches = file.iter_batches(ROWS, row_groups=[group], columns=[text_key])
        values = (value for batch in batches for value in batch.column(0))
        for number, value in enumerate(values, 1):
            where, why, text = f"{source.name}, row {number} of group {group}", "", None
            count.rows += 1
            try:
                text = value.as_py()
            except UnicodeDecodeError:
                why = "is no UTF-8"
            if isinstance(text, str):
                yield Found(where, text)
            else:
                count.leave_out(where, why or f"has no text at {show(text_key)}")


def _of_files(shard: Shard, text_key: str, count: Count) -> Iterator[Found]:
    for source in shard.sources:
        count.rows += 1
        with of_input(source.address), opened(source) as (content, _):
            whole = content.read(LARGEST_DOCUMENT + 1)
        if len(whole) > LARGEST_DOCUMENT:
            raise _too_large(source, "is one document")
        try:
            text = whole.decode("utf-8")
        except UnicodeDecodeError:
            text = whole.decode("utf-8", "replace")
            count.broken += 1
        yield Found(source.name, text)


def _too_large(source: Input, has: str) -> UserError:
    return UserError(
        f"input={show(source.address)} {has} of more than {LARGEST_DOCUMENT:,} bytes: cut it, or "
        "give a line a document as jsonl"
    )


# Shards of inputs, in order and from any position on, so that a killed run can continue


LARGEST_DOCUMENT = 1 << 30  # bytes: a tokenizer holds a document several times over
SHARD_BYTES = 2 << 20  # bytes of text of a shard


class Position(NamedTuple):
    """The begin of a shard: number of the input; byte of its content or row group; line."""

    file: int = 0
    at: int = 0
    line: int = 1


FIRST = Position()


class Shard(NamedTuple):
    """Work for one process, which gets lines as bytes and reads other files itself.

    sources: one input, or several of one document each. after: the position after it. read: bytes
    of all inputs up to there, as stored. content: whole lines. at: number of the first line, or of
    the row group.
    """

    sources: tuple[Input, ...]
    after: Position
    read: int
    content: bytes = b""
    at: int = 0


def cut(
    inputs: Sequence[Input], start: Position = FIRST, size: int = SHARD_BYTES
) -> Iterator[Shard]:
    """Yields the shards from `start` on, of about `size` bytes of text and whole documents.

    Raises UserError for an input that cannot be read.
    """
    before = sum(each.size for each in inputs[: start.file])
    number, place = start.file, start
    while number < len(inputs):
        each, count = inputs[number], 1
        if each.kind == LINES:
            yield from _lines(each, place, before, size)
        elif each.kind == PARQUET:
            with _parquet(each) as file:
                groups = file.num_row_groups
            for group in range(place.at, groups):
                yield Shard((each,), Position(number, group + 1), before, at=group)
        else:
            held = each.size
            for other in inputs[number + 1 :]:
                if other.kind != TEXT or held + other.size > size:
                    break
                count, held = count + 1, held + other.size
            sources = tuple(inputs[number : number + count])
            yield Shard(sources, Position(number + count), before + held)
        before += sum(one.size for one in inputs[number : number + count])
        number += count
        place = Position(number)


def _lines(source: Input, place: Position, before: int, size: int) -> Iterator[Shard]:
    with of_input(source.address), opened(source) as (content, file):
        if not source.packed:
            content.seek(place.at)
        else:
            _skip(content, place.at)
        while block := whole_lines(source, content, size):
            line = place.line
            place = Position(place.file, place.at + len(block), line + block.count(b"\n"))
            read = before + min(source.size, file.tell())
            yield Shard((source,), place, read, block, line)


def whole_lines(source: Input, content: BinaryIO, size: int) -> bytes:
    """Returns lines of at least `size` bytes; fewer only at the end. Raises UserError."""
    lines, held = [], 0
    while held < size and (line := content.readline(LARGEST_DOCUMENT + 1)):
        if len(line) > LARGEST_DOCUMENT:
            raise _too_large(source, "has a line")
        lines.append(line)
        held += len(line)
    return b"".join(lines)


def _skip(content: BinaryIO, count: int) -> None:
    """Reads past `count` bytes. Raises EOFError if there are fewer."""
    while count:
        skipped = len(content.read(min(count, BUFFER)))
        if not skipped:
            raise EOFError("it has become shorter")
        count -= skipped


@contextlib.contextmanager
def _parquet(source: Input) -> Iterator[Any]:
    """Opens a parquet file. Raises UserError, also without the module that reads it."""
    try:
        import pyarrow.parquet
    except ImportError:
        raise UserError(
            f"input={show(source.address)} is parquet, which needs pyarrow: pip install "
            "'parallel3d[parquet]'"
        ) from None
    with of_input(source.address), opened(source) as (content, _):
        yield pyarrow.parquet.ParquetFile(content)


# Finding the files by fsspec, without opening them. Items keep their order, files below an item are
# sorted by name, so the same line makes the same corpus on any machine.


STAMPS = ("mtime", "ETag", "etag", "Last-Modified", "LastModified", "last_modified")
HOW = "give files, folders, globs or addresses, joined by commas"


@dataclass(frozen=True)
class Input:
    """A file. `address` is for fsspec; `kind` is one of KINDS, `packed` "", ".gz" or ".zst";
    `stamp` identifies its state: a time or an ETag."""

    address: str
    kind: str
    packed: str
    size: int  # bytes as stored
    stamp: str

    @property
    def name(self) -> str:
        """The last part of its address."""
        return self.address.rpartition("/")[2]


def find_inputs(given: str, kind: str | None = None) -> list[Input]:
    """Returns the files of `input=…`, each once. `kind`: of all; None: by their names.

    Raises UserError for what is missing, cannot be listed or holds no files.
    """
    items = items_of(given, f"input={show(given)}", HOW)
    found: dict[str, Input] = {}
    for item in items:
        for each in _inputs_of(item, kind):
            found.setdefault(each.address, each)
    if not any(each.size for each in found.values()):
        raise UserError(f"input={show(given)} has only empty files ({len(found)}): {HOW}")
    return list(found.values())


@contextlib.contextmanager
def of_input(address: str, key: str = "input") -> Iterator[None]:
    """Turns what fails inside into a UserError of one sentence."""
    try:
        yield
    except (UserError, KeyboardInterrupt, MemoryError):
        raise
    except Exception as error:  # fsspec's file systems raise errors of their own
        why = getattr(error, "strerror", None) or str(error) or type(error).__name__
        raise UserError(f"{key}={show(address)} cannot be read ({plain(why)}): {HOW}") from None


def items_of(given: str, key: str, how: str) -> list[str]:
    """Splits names at commas, unless there is such a file. Raises UserError."""
    is_one = "://" not in given and os.path.lexists(os.path.expanduser(given))
    items = [given] if is_one else [item.strip() for item in given.split(",")]
    if not all(items):
        raise UserError(f"{key} has an empty item between its commas: {how}")
    return items


def _inputs_of(item: str, kind: str | None) -> list[Input]:
    with of_input(item):
        files, path = file_system(os.path.expanduser(item))
        if not isinstance(path, str):
            raise ValueError("it is several addresses in one")
        try:
            info = files.info(path)
        except FileNotFoundError:
            if not set("*?[") & set(path):
                near = nearest_path(path)
                hint = f"; the nearest is {near}" if near else f": {HOW}"
                raise UserError(f"input={show(item)} is not there{hint}") from None
            info = None
        if info is not None and info["type"] == "file":
            return [_input(files, info, kind)]
        below = _files_below(files, path) if info else _globbed(files, path)
        fixed = path if info else os.path.dirname(re.split(r"[*?[]", path, maxsplit=1)[0])
        infos = [below[name] for name in sorted(below) if not is_hidden(name[len(fixed) :])]
        if not infos:
            verb = "holds no files (hidden ones do not count)" if info else "matches no file"
            raise UserError(f"input={show(item)} {verb}: {HOW}")
        return [_input(files, each, kind) for each in infos]


def _globbed(files: AbstractFileSystem, pattern: str) -> dict[str, dict[str, Any]]:
    """Returns matching files, and all files below matching folders."""
    found: dict[str, dict[str, Any]] = {}
    for name, info in files.glob(pattern, detail=True).items():
        found |= _files_below(files, name) if info["type"] == "directory" else {name: info}
    return found


def _files_below(files: AbstractFileSystem, folder: str) -> dict[str, dict[str, Any]]:
    """Returns all files below a folder. Raises OSError for a folder that cannot be listed."""
    from fsspec.implementations.local import LocalFileSystem

    if not isinstance(files, LocalFileSystem):  # object stores list all at once
        return files.find(folder, detail=True)
    found, waiting = {}, [folder]
    while waiting:  # `find` leaves a folder out that cannot be listed
        for info in files.ls(waiting.pop(), detail=True):
            if is_hidden(os.path.basename(info["name"])):
                continue
            if info["type"] == "directory":
                waiting.append(info["name"])
            else:
                found[info["name"]] = info
    return found


def is_hidden(below: str) -> bool:
    """Returns whether a part of a relative path begins with a dot."""
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
