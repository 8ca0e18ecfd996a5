"""The documents of a piece, and the rows that hold none."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from parallel3d.config.fields import show
from parallel3d.data.making.inputs import Input, of_input
from parallel3d.data.making.kinds import LINES, PARQUET
from parallel3d.data.making.opening import opened
from parallel3d.data.making.pieces import LARGEST_DOCUMENT, InputShard, pyarrow_parquet
from parallel3d.errors import UserError
from parallel3d.files.reading import plain

SHOWN = 5  # bad rows that are shown
EXCERPT = 60  # characters
ROWS = 256  # of a parquet file, held at a time
LINES_AND_ENDS = re.compile(rb"[^\n]+|\n+")


class Found(NamedTuple):
    """A document, and where it stands."""

    where: str
    text: str


@dataclass
class Count:
    """What came of rows: all of them, empty ones and those with broken UTF-8, which are no error;
    `bad` ones hold no document, the first few are said in `shown`; `size`: bytes of the texts."""

    rows: int = 0
    empty: int = 0
    broken: int = 0
    bad: int = 0
    size: int = 0
    shown: list[str] = field(default_factory=list)

    def add(self, other: Count) -> None:
        """Counts those of `other`, which come behind."""
        for name in ("rows", "empty", "broken", "bad", "size"):
            setattr(self, name, getattr(self, name) + getattr(other, name))
        self.shown = [*self.shown, *other.shown][:SHOWN]

    def leave_out(self, where: str, why: str, row: bytes | str = "") -> None:
        """A bad row."""
        self.bad += 1
        if len(self.shown) < SHOWN:
            text = row[: 4 * EXCERPT].decode("utf-8", "replace") if isinstance(row, bytes) else row
            text = plain(text[:EXCERPT]) + ("…" if len(text) > EXCERPT else "")
            self.shown.append(f"{where} {why}{f': {text}' if text else ''}")


def documents(
    inputs: Sequence[Input], piece: InputShard, text_key: str, count: Count
) -> Iterator[Found]:
    """The documents of a piece, none of them empty, in order. What is left out is counted.

    Raises UserError for a file that cannot be read, or a document that is too large.
    """
    source = inputs[piece.number]
    if source.kind == LINES:
        found = _of_lines(source, piece, text_key, count)
    elif source.kind == PARQUET:
        found = _of_rows(source, piece.group, text_key, count)
    else:
        found = _of_files(inputs[piece.number : piece.number + piece.count], count)
    for where, text in found:
        if not text:
            count.empty += 1
            continue
        try:
            count.size += len(text.encode())
        except UnicodeEncodeError:  # halves of surrogate pairs, as JSON can spell them
            text = text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
            count.broken += 1
            count.size += len(text.encode())
        yield Found(where, text)


def _of_lines(source: Input, piece: InputShard, text_key: str, count: Count) -> Iterator[Found]:
    name, number = source.address.rpartition("/")[2], piece.line
    for found in LINES_AND_ENDS.finditer(piece.content or b""):  # empty lines in one go
        line = found[0]
        if line.startswith(b"\n"):
            number += len(line)
        if line.isspace():
            continue
        count.rows += 1
        try:
            row = json.loads(line)
        except UnicodeDecodeError:
            count.leave_out(f"{name}:{number}", "is no UTF-8", line)
        except (ValueError, RecursionError):
            count.leave_out(f"{name}:{number}", "is no JSON", line)
        else:
            text, why = _text_of(row, text_key)
            if why:
                count.leave_out(f"{name}:{number}", why, line)
            else:
                yield Found(f"{name}:{number}", text)


def _text_of(row: Any, text_key: str) -> tuple[str, str]:
    """The text of a row, and what is wrong with it."""
    if not isinstance(row, dict):
        return "", "is no object"
    if text_key not in row:
        return "", f"has no key {show(text_key)}"
    text = row[text_key]
    return (text, "") if isinstance(text, str) else ("", f"has no text at {show(text_key)}")


def _of_rows(source: Input, group: int, text_key: str, count: Count) -> Iterator[Found]:
    parquet, name = pyarrow_parquet(source), source.address.rpartition("/")[2]
    with of_input(source.address), opened(source) as (content, _):
        file = parquet.ParquetFile(content)
        names = file.schema_arrow.names
        if text_key not in names:
            raise UserError(
                f"input={show(source.address)} has no column {show(text_key)}: text_key must be "
                f"one of {plain(', '.join(names))}"
            )
        number = 0
        for batch in file.iter_batches(ROWS, row_groups=[group], columns=[text_key]):
            for value in batch.column(0):
                number += 1
                where = f"{name}, row {number} of group {group}"
                count.rows += 1
                try:
                    text = value.as_py()
                except UnicodeDecodeError:
                    count.leave_out(where, "is no UTF-8")
                    continue
                if isinstance(text, str):
                    yield Found(where, text)
                else:
                    count.leave_out(where, f"has no text at {show(text_key)}")


def _of_files(sources: Sequence[Input], count: Count) -> Iterator[Found]:
    for source in sources:
        count.rows += 1
        with of_input(source.address), opened(source) as (content, _):
            whole = content.read(LARGEST_DOCUMENT + 1)
        if len(whole) > LARGEST_DOCUMENT:
            raise UserError(
                f"input={show(source.address)} is one document of more than {LARGEST_DOCUMENT:,} "
                "bytes: cut it, or give a line a document as jsonl"
            )
        try:
            text = whole.decode("utf-8")
        except UnicodeDecodeError:
            text = whole.decode("utf-8", "replace")
            count.broken += 1
        yield Found(source.address.rpartition("/")[2], text)
