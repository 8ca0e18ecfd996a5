"""Finds input files, splits them into shards of work and reads their documents."""

from __future__ import annotations

import contextlib
import io
import itertools
import json
import os
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, BinaryIO, NamedTuple, cast

import numpy as np
import numpy.typing as npt

from parallel3d.config.fields import show
from parallel3d.data.folders import (
    SortedFiles,
    check_twins,
    label_of,
    left_out_lines,
    listing,
    sort_out,
)
from parallel3d.data.formats import (
    HEAD,
    INPUT,
    LINES,
    PARQUET,
    TEXT,
    Form,
    InputRules,
    UnsupportedFile,
    check_content,
    check_packing,
    file_name,
    in_lines,
    is_spread,
    judged,
    read_by,
    said_of,
    said_of_returns,
    text_of,
)
from parallel3d.data.tokenizer import Tokenizer, UnencodableText, nearest_path
from parallel3d.data.tokens import version_of
from parallel3d.data.unpacking import UnpackedStream
from parallel3d.errors import UserError
from parallel3d.files import plain
from parallel3d.private_names import path_in

if TYPE_CHECKING:
    from fsspec.spec import AbstractFileSystem

BUFFER = 1 << 20
LOCAL = "file://"


def file_system(address: str) -> tuple[AbstractFileSystem, str]:
    """Returns fsspec's file system of an address, and the path in it."""
    import fsspec  # imported here because it loads slowly

    if "://" not in address or address.startswith(LOCAL):
        # fsspec.core would take `::` in a local file's name for a chain of addresses.
        files = fsspec.filesystem("file")
        return files, path_in(files, address)
    return fsspec.core.url_to_fs(address)


@contextlib.contextmanager
def opened(source: Input) -> Iterator[tuple[BinaryIO, BinaryIO]]:
    """Opens a file; yields its unpacked content, and the file itself to show the progress.

    Raises UserError if the first bytes do not match the format in the name, and errors of the file
    system.
    """
    files, path = file_system(source.address)
    with files.open(path, "rb") as file:
        # fsspec's own files read a whole block for each line.
        stored = io.BufferedReader(cast(io.RawIOBase, file), BUFFER)
        content = stored
        try:
            head = stored.peek(HEAD)[:HEAD]
            if head:
                check_packing(source.name, source.form, head, source.rules, typed=source.typed)
            if source.packed:
                content = io.BufferedReader(UnpackedStream(stored, source.packed), BUFFER)
                head = content.peek(HEAD)[:HEAD]
            if head:
                check_content(
                    source.name,
                    source.form,
                    head,
                    source.rules,
                    typed=source.typed,
                    web=is_web(source.address),
                )
            if source.kind == LINES and is_spread(head):
                whole = content.read(LARGEST_DOCUMENT + 1)
                if len(whole) > LARGEST_DOCUMENT:
                    raise _too_large(source, "is JSON over several lines")
                content = cast("io.BufferedReader[io.RawIOBase]", io.BytesIO(in_lines(whole)))
        except UnsupportedFile as error:
            raise not_taken(source, error) from None
        yield content, stored


def is_web(address: str) -> bool:
    """Returns whether an address is on a web server, which may answer with a page of HTML."""
    return address.startswith(("http://", "https://"))


def not_taken(source: Input, error: UnsupportedFile) -> UserError:
    """Returns the UserError for a file whose name or bytes are refused."""
    return UserError(f"{source.key}={show(source.shown)} {error}")


# The documents of a shard


SHOWN = 5  # maximum number of bad rows that a report describes
EXCERPT = 60  # maximum number of shown characters of a bad row
KEYS = 5  # maximum number of shown keys of a row that lacks its text
# number of characters tokenized at a time, because a tokenizer needs many times their size
AT_ONCE = 256 << 10
ROWS = 256  # number of rows of a parquet file in memory at a time


class FoundText(NamedTuple):
    """The text of a document, and where it was found."""

    where: str
    text: str


def encoded(
    tokenizer: Tokenizer, documents: Iterable[FoundText]
) -> Iterator[tuple[FoundText, npt.NDArray[np.integer] | UnencodableText]]:
    """Yields each document with its tokens, or with the tokenizer's error."""
    for some in _batches(documents):
        try:
            yield from zip(some, tokenizer.encode_all([each.text for each in some]), strict=True)
        except UnencodableText:
            yield from ((each, _or_error(tokenizer, each.text)) for each in some)


def _or_error(tokenizer: Tokenizer, text: str) -> npt.NDArray[np.integer] | UnencodableText:
    try:
        return tokenizer.encode_all([text])[0]
    except UnencodableText as error:
        return error


def _batches(documents: Iterable[FoundText]) -> Iterator[list[FoundText]]:
    batch: list[FoundText] = []
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
    """Counts of rows and of texts.

    Attributes:
        empty: empty rows.
        broken: rows with invalid UTF-8, which is not an error.
        bad: rows without a document.
        size: bytes of the texts.
        shown: descriptions of the first bad rows.
    """

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
        """Counts a bad row, and describes it if it is one of the first."""
        self.bad += 1
        if len(self.shown) < SHOWN:
            text = row[: 4 * EXCERPT].decode("utf-8", "replace") if isinstance(row, bytes) else row
            text = plain(text[:EXCERPT]) + ("…" if len(text) > EXCERPT else "")
            self.shown.append(f"{where} {why}{f': {text}' if text else ''}")


JUDGED = 1000  # number of rows before the share of bad ones is checked
BAD = 0.01  # default of the largest share of rows without a document


def judge(count: Count, least: int, most: float, limit: str, remedy: str) -> None:
    """Raises UserError if there are at least `least` rows and more than the share `most` is bad.

    The error names the limit by the words `limit`, and ends with the advice `remedy`.
    """
    if count.rows >= least and count.bad > most * count.rows:
        raise UserError(
            f"{count.bad:,} of the first {count.rows:,} rows hold no document, more than {limit} "
            f"of them: {'; '.join(count.shown)}; {remedy}"
        )


def left_out(count: Count) -> list[str]:
    """Returns a sentence for each kind of skipped or changed rows."""
    sentences = []
    if count.bad:
        shown = "; ".join(count.shown)
        more = " …" if count.bad > len(count.shown) else ""
        sentences.append(
            f"{count.bad:,} of {count.rows:,} rows hold no document and are left out: {shown}{more}"
        )
    if count.empty:
        sentences.append(f"{count.empty:,} of {count.rows:,} documents are empty and left out")
    if count.broken:
        sentences.append(f"documents with invalid UTF-8, which becomes U+FFFD: {count.broken:,}")
    return sentences


def documents(shard: Shard, text_key: str, count: Count) -> Iterator[FoundText]:
    """Yields the non-empty documents of a shard in order; counts skipped rows.

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
        yield FoundText(where, text)


def _of_lines(shard: Shard, text_key: str, count: Count) -> Iterator[FoundText]:
    names = {json.dumps(text_key, ensure_ascii=is_ascii).encode() for is_ascii in (True, False)}
    for number, line in enumerate(shard.content.split(b"\n"), shard.at):
        if not line or line.isspace():
            continue
        where, why = f"{shard.sources[0].name}:{number}", "is not an object"
        row: Any = None
        count.rows += 1
        try:
            row = json.loads(line)
        except UnicodeDecodeError:
            why = "is not UTF-8"
        except (ValueError, RecursionError):
            why = "is not JSON"
        if isinstance(row, dict):
            why = ""
            if text_key not in row:
                keys = ", ".join(list(row)[:KEYS]) or "none"
                why = f"has no key {show(text_key)}; its keys are {plain(keys)}"
            elif not isinstance(row[text_key], str):
                why = f"has no text at {show(text_key)}"
            elif any(line.count(name) > 1 for name in names) and _is_twice(line, text_key):
                why = f"has the key {show(text_key)} twice"
        if why:
            count.leave_out(where, why, line)
        else:
            yield FoundText(where, row[text_key])


def _is_twice(line: bytes, key: str) -> bool:
    """Returns whether the object in a line has `key` twice, which `json.loads` would accept."""
    pairs = json.loads(line, object_pairs_hook=list)
    return [name for name, _ in pairs].count(key) > 1


def _of_rows(shard: Shard, text_key: str, count: Count) -> Iterator[FoundText]:
    (source,), group = shard.sources, shard.at
    with _parquet(source) as file:
        names = file.schema_arrow.names
        if names.count(text_key) > 1:
            raise UserError(
                f"{source.key}={show(source.shown)} has several columns {show(text_key)}: write it "
                "with one"
            )
        if text_key not in names:
            remedy = "text_key must be one of" if source.key == INPUT.key else "it has"
            more = f"; {source.rules.column}" if source.rules.column else ""
            raise UserError(
                f"{source.key}={show(source.shown)} has no column {show(text_key)}: {remedy} "
                f"{plain(', '.join(names))}{more}"
            )
        batches = file.iter_batches(ROWS, row_groups=[group], columns=[text_key])
        values = (value for batch in batches for value in batch.column(0))
        for number, value in enumerate(values, 1):
            where = f"{source.name}, row {number} of group {group}"
            why = ""
            text = None
            count.rows += 1
            try:
                text = value.as_py()
            except UnicodeDecodeError:
                why = "is not UTF-8"
            if isinstance(text, str):
                yield FoundText(where, text)
            else:
                count.leave_out(where, why or f"has no text at {show(text_key)}")


def _of_files(shard: Shard, text_key: str, count: Count) -> Iterator[FoundText]:
    for source in shard.sources:
        count.rows += 1
        with of_input(source.shown, source.key), opened(source) as (content, _):
            whole = content.read(LARGEST_DOCUMENT + 1)
        if len(whole) > LARGEST_DOCUMENT:
            raise _too_large(source, "is one document")
        try:
            text, broken = text_of(whole)
        except UnsupportedFile as error:
            count.leave_out(source.name, str(error))
            continue
        count.broken += broken > 0
        yield FoundText(source.shown, text)


def _too_large(source: Input, has: str) -> UserError:
    return UserError(
        f"{source.key}={show(source.shown)} {has} of more than {LARGEST_DOCUMENT:,} bytes: cut it, "
        "or give jsonl with one document per line"
    )


# Shards of inputs, in order and from any position on, so that a killed run can continue


# maximum size in bytes; a tokenizer holds a document in memory several times
LARGEST_DOCUMENT = 1 << 30
SHARD_BYTES = 2 << 20  # bytes of text in a shard


class Position(NamedTuple):
    """The start of a shard: index of the input, byte of its content or row group, and line."""

    file: int = 0
    at: int = 0
    line: int = 1


FIRST = Position()


class Shard(NamedTuple):
    """Work for one process, which gets lines as bytes and reads other files itself.

    Attributes:
        sources: one input, or several with one document each.
        after: the position after the shard.
        read: stored bytes of the inputs read up to `after`, to show the progress.
        content: whole lines; b"" for files that the process reads itself.
        at: number of the first line, or of the row group.
    """

    sources: tuple[Input, ...]
    after: Position
    read: int
    content: bytes = b""
    at: int = 0


def cut(
    inputs: Sequence[Input], start: Position = FIRST, size: int = SHARD_BYTES
) -> Iterator[Shard]:
    """Yields the shards from `start` on, with about `size` bytes of text and whole documents.

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
                if other.label != each.label or held + other.size > size:
                    break
                count, held = count + 1, held + other.size
            sources = tuple(inputs[number : number + count])
            yield Shard(sources, Position(number + count), before + held)
        before += sum(one.size for one in inputs[number : number + count])
        number += count
        place = Position(number)


def _lines(source: Input, place: Position, before: int, size: int) -> Iterator[Shard]:
    with of_input(source.shown, source.key), opened(source) as (content, file):
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
    """Returns whole lines of at least `size` bytes in all, or the rest. Raises UserError."""
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


class NumberedRow(NamedTuple):
    """A row and its number, which is the line number in jsonl.

    `value` is the bytes of the line in jsonl, and a dict in parquet.
    """

    number: int
    value: Any


def rows(source: Input, longest: int) -> Iterator[NumberedRow]:
    """Yields the rows of a file of jsonl, without blank lines, or of parquet.

    A line of more than `longest` bytes is cut to `longest` + 1 bytes. Raises UserError for a
    file that cannot be read.
    """
    if source.kind == PARQUET:
        with _parquet(source) as file:
            _check_flat(source, file.schema_arrow)
            batches = (batch.to_pylist() for batch in file.iter_batches(ROWS))
            for number, value in enumerate(itertools.chain.from_iterable(batches), 1):
                yield NumberedRow(number, without_nulls(value))
        return
    with of_input(source.shown, source.key), opened(source) as (content, _):
        number = 0
        while line := content.readline(longest + 1):
            number += 1
            if line.strip():
                yield NumberedRow(number, line)
            while len(line) > longest and not line.endswith(b"\n"):
                line = content.readline(longest + 1)


def without_nulls(value: Any) -> Any:
    """Returns a row of parquet without the keys that only other rows have.

    In parquet, all objects of a column have the same keys; null stands for a missing key.
    """
    if isinstance(value, dict):
        return {key: without_nulls(each) for key, each in value.items() if each is not None}
    return [without_nulls(each) for each in value] if isinstance(value, list) else value


def _check_flat(source: Input, schema: Any) -> None:
    """Raises UserError for a parquet column of nested objects, to which parquet adds keys.

    Each object of a column has all keys of all rows, with null for missing ones. In flat objects a
    null and a missing key mean the same; deeper, as in arguments of a call, they do not.
    """
    import pyarrow

    def depth(kind: Any) -> int:
        if pyarrow.types.is_struct(kind):
            return 1 + max((depth(field.type) for field in kind), default=0)
        if pyarrow.types.is_map(kind):
            return 2
        if pyarrow.types.is_list(kind) or pyarrow.types.is_large_list(kind):
            return depth(kind.value_type)
        return 0

    for field_ in schema:
        if depth(field_.type) > 1:
            raise UserError(
                f"{source.key}={show(source.shown)}: its column {show(field_.name)} has nested "
                "objects, to which parquet adds the keys of other rows as nulls: write the column "
                "as JSON text, or the file as jsonl"
            )


@contextlib.contextmanager
def _parquet(source: Input) -> Iterator[Any]:
    """Opens a parquet file. Raises UserError, for example if pyarrow is not installed."""
    try:
        import pyarrow.parquet
    except ImportError:
        raise UserError(
            f"{source.key}={show(source.shown)} is parquet, which needs pyarrow: pip install "
            "'parallel3d[parquet]'"
        ) from None
    with of_input(source.shown, source.key), opened(source) as (content, _):
        yield pyarrow.parquet.ParquetFile(content)


# Inputs are found with fsspec. Items keep their order, and files below an item are sorted by name,
# so the same command makes the same corpus on any machine.


HOW = "give files, folders, globs or addresses, joined by commas"


@dataclass(frozen=True)
class Input:
    """A file to read.

    Attributes:
        address: the file's address for fsspec.
        kind, packed: the formats of its content and of its compression.
        stamp: the file's version, a time or an ETag; "" if neither is known.
        typed: whether the user gave the kind.
        rules: the place where the user named the file.
        split: the split that the name indicates if the file is from a folder; "" for none.
    """

    address: str
    kind: str
    packed: str
    size: int  # bytes as stored
    stamp: str
    typed: bool = False
    rules: InputRules = INPUT
    split: str = ""

    @property
    def name(self) -> str:
        """The last part of the address."""
        return file_name(self.address)

    @property
    def form(self) -> Form:
        return Form(self.kind, self.packed)

    @property
    def label(self) -> str:
        """The words for the file's format and split."""
        return label_of(self.form, self.split)

    @property
    def key(self) -> str:
        """The key under which errors name the file."""
        return self.rules.key

    @property
    def shown(self) -> str:
        """The file's path or address, for errors."""
        return self.address.removeprefix(LOCAL)


class InputFiles(NamedTuple):
    """Files to read, each once, and sentences on how the files of folders and globs are read."""

    inputs: list[Input]
    lines: list[str]


def take_inputs(given: str, kind: str | None = None, text_key: str = "text") -> InputFiles:
    """Returns the files of `input=…`, each once, and sentences on how folders and globs are read.

    `kind` is the kind of all files, or None if each file's name determines it. A .json file with
    the key `text_key` holds rows. Raises UserError for an item that is missing, cannot be listed or
    read, or holds no files.
    """
    items = items_of(given, f"input={show(given)}", HOW)
    found: dict[str, Input] = {}
    lines = []
    for item in items:
        inputs, said = _inputs_of(item, kind, text_key)
        lines += said
        for each in inputs:
            # A file reached twice (folder and glob, or a link) is one input.
            path = each.shown if each.address.startswith(LOCAL) else ""
            found.setdefault(os.path.realpath(path) if path else each.address, each)
    if not any(each.size for each in found.values()):
        raise UserError(
            f"input={show(given)} has only empty files, pipes or devices ({len(found)}): {HOW}"
        )
    try:
        check_twins(each.address for each in found.values())
    except UnsupportedFile as error:
        raise UserError(f"input={show(given)} {error}") from None
    return InputFiles(list(found.values()), lines)


@contextlib.contextmanager
def of_input(address: str, key: str = "input") -> Iterator[None]:
    """Turns errors inside a `with` block into a UserError of one sentence."""
    try:
        yield
    except (UserError, KeyboardInterrupt, MemoryError):
        raise
    except Exception as error:  # fsspec's file systems raise errors of their own
        why = getattr(error, "strerror", None) or str(error) or type(error).__name__
        how = "fetch it again" if isinstance(error, EOFError) else HOW
        raise UserError(f"{key}={show(address)} cannot be read ({plain(why)}): {how}") from None


def items_of(given: str, key: str, how: str) -> list[str]:
    """Splits names at commas, unless one file has the whole name. Raises UserError."""
    is_one = "://" not in given and os.path.lexists(os.path.expanduser(given))
    items = [given] if is_one else [item.strip() for item in given.split(",")]
    if not all(items):
        raise UserError(f"{key} has an empty item: {how}")
    return items


def _inputs_of(item: str, kind: str | None, text_key: str) -> tuple[list[Input], list[str]]:
    with of_input(item):
        files, path = file_system(os.path.expanduser(item))
        if not isinstance(path, str):
            raise ValueError("it is several addresses in one")
        try:
            info = files.info(path)
        except FileNotFoundError:
            # In a web address, `?` begins a query and is not a wildcard.
            if not set("*[" if is_web(item) else "*?[") & set(path):
                near = None if "://" in item else nearest_path(path)
                hint = f"; the nearest is {near}" if near else f": {HOW}"
                raise UserError(f"input={show(item)} does not exist{hint}") from None
            info = None
        if info is not None and info["type"] == "file":
            head = _head(files, info)
            form = _form_of(item, file_name(files.unstrip_protocol(info["name"])), head, kind)
            name = file_name(files.unstrip_protocol(info["name"]))
            lines = [*said_of(name, kind), *said_of_returns({name: head}, {name: form})]
            return [_input(files, info, form, kind)], [f"input={show(item)}: {e}" for e in lines]
        below = _files_below(files, path) if info else _globbed(files, path)
        fixed = path if info else os.path.dirname(re.split(r"[*?[]", path, maxsplit=1)[0])
        names = {name: name[len(fixed) :].lstrip("/") for name in sorted(below)}
        names = {name: inner for name, inner in names.items() if not is_hidden(inner)}
        if not names:
            verb = "holds no files (hidden ones do not count)" if info else "matches no file"
            raise UserError(f"input={show(item)} {verb}: {HOW}")
        # On other hosts, each inspection would cost a request, so files are inspected when opened.
        heads = {
            inner: _head(files, below[name])
            if is_local(files) or not below[name].get("size")
            else None
            for name, inner in names.items()
        }
        pattern = "" if info else path[len(fixed) :]
        try:
            rules = INPUT._replace(keys=(text_key,))
            found = sort_out(heads, rules, typed=kind, pattern=pattern, web=is_web(item))
        except UnsupportedFile as error:
            raise UserError(f"input={show(item)} {error}") from None
        key = f"input={show(item)}"
        returns = said_of_returns(heads, found.taken)
        lines = [*said(key, found), *(f"{key}: {line}" for line in returns)]
        if not found.taken:
            left = "; ".join(left_out_lines(found.left_out))
            raise UserError(
                f"input={show(item)} holds no documents: {left}; {read_by(INPUT)}; {HOW}"
            )
        taken = [
            _input(files, below[name], found.taken[inner], kind, found.splits.get(inner, ""))
            for name, inner in names.items()
            if inner in found.taken
        ]
        return taken, lines


def said(named: str, found: SortedFiles) -> list[str]:
    """Returns sentences on how the files of a folder or glob are read."""
    taken = listing(found)
    lines = [f"{named}: {'; '.join(taken)}"] if taken else []
    return [*lines, *(f"{named}: {line}" for line in left_out_lines(found.left_out))]


def _form_of(item: str, name: str, head: bytes | None, kind: str | None) -> Form:
    try:
        return judged(name, head, typed=kind, web=is_web(item))
    except UnsupportedFile as error:
        raise UserError(f"input={show(item)} {error}") from None


def _head(files: AbstractFileSystem, info: dict[str, Any]) -> bytes:
    """Returns the first bytes of a file; b"" if it is empty."""
    if info.get("size") == 0:
        return b""
    if is_local(files):
        with open(info["name"], "rb") as file:
            return file.read(HEAD)
    with files.open(info["name"], "rb", block_size=HEAD) as file:
        return file.read(HEAD)


def is_local(files: AbstractFileSystem) -> bool:
    """Returns whether the files are on this host."""
    from fsspec.implementations.local import LocalFileSystem

    return isinstance(files, LocalFileSystem)


def _globbed(files: AbstractFileSystem, pattern: str) -> dict[str, dict[str, Any]]:
    """Returns matching files, and all files below matching folders."""
    found: dict[str, dict[str, Any]] = {}
    for name, info in files.glob(pattern, detail=True).items():
        found |= _files_below(files, name) if _is_folder(info) else {name: info}
    return found


def _files_below(files: AbstractFileSystem, folder: str) -> dict[str, dict[str, Any]]:
    """Returns all files below a folder. Raises OSError for a folder that cannot be listed."""
    if not is_local(files):  # object stores list all files at once
        return files.find(folder, detail=True)
    found = {}
    waiting = [folder]
    seen = set[str]()
    while waiting:  # fsspec's `find` would skip a folder that cannot be listed
        at = waiting.pop()
        if os.path.realpath(at) in seen:  # a circular link
            continue
        seen.add(os.path.realpath(at))
        for info in files.ls(at, detail=True):
            if is_hidden(os.path.basename(info["name"])):
                continue
            if _is_folder(info):
                waiting.append(info["name"])
            else:
                found[info["name"]] = info
    return found


def _is_folder(info: Mapping[str, Any]) -> bool:
    """Returns whether fsspec's `info` describes a folder, or a local link to one."""
    return info["type"] == "directory" or (bool(info.get("islink")) and os.path.isdir(info["name"]))


def is_hidden(below: str) -> bool:
    """Returns whether a part of a relative path begins with a dot."""
    return any(part.startswith(".") for part in below.split("/"))


def _input(
    files: AbstractFileSystem,
    info: dict[str, Any],
    form: Form,
    typed: str | None,
    split: str = "",
) -> Input:
    name = info["name"]
    if is_local(files):  # a listing has the time of the link, not of its target
        stamp = str(os.stat(name).st_mtime)
    else:
        stamp = " ".join(f"{key}={value}" for key, value in version_of(info).items())
    # A file whose size the server does not report must not count as empty.
    size = 1 if info.get("size") is None else int(info["size"])
    address = files.unstrip_protocol(name)
    return Input(address, *form, size, stamp, typed is not None, split=split)
