"""Inputs cut into pieces of work, in order, from any place on: what a killed run goes on with."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, BinaryIO, NamedTuple

from parallel3d.config.fields import show
from parallel3d.data.making.inputs import Input, of_input
from parallel3d.data.making.kinds import LINES, PARQUET
from parallel3d.data.making.opening import opened
from parallel3d.errors import UserError

LARGEST_DOCUMENT = 1 << 30  # bytes: a tokenizer holds all of one, several times over
PIECE = 2 << 20  # bytes of text
READ = 1 << 20


class InputPosition(NamedTuple):
    """Where a piece begins: number of the input; byte of its content, or row group; line."""

    file: int = 0
    at: int = 0
    line: int = 1


FIRST = InputPosition()


class InputShard(NamedTuple):
    """Work for one process. Lines come as they are; of other files it reads its part itself.

    number: of the first input. content: whole lines of it, the first of them line `line` (from
    1). group: a row group of it. count: inputs that are a document each.
    """

    number: int
    content: bytes | None = None
    line: int = 1
    group: int = 0
    count: int = 1


class Cut(NamedTuple):
    """A piece, the place behind it, and the bytes of all inputs up to there, as stored."""

    piece: InputShard
    after: InputPosition
    read: int


def cut(inputs: Sequence[Input], start: InputPosition = FIRST, size: int = PIECE) -> Iterator[Cut]:
    """The pieces from `start` on, each of about `size` bytes of text; none is cut in a document.

    Raises UserError for an input that cannot be read.
    """
    before = sum(each.size for each in inputs[: start.file])
    number, place = start.file, start
    while number < len(inputs):
        each = inputs[number]
        if each.kind == LINES:
            with of_input(each.address):
                yield from _lines(inputs, place, before, size)
            before, number = before + each.size, number + 1
        elif each.kind == PARQUET:
            for group in range(place.at, row_groups(each)):
                piece = InputShard(number, group=group)
                yield Cut(piece, InputPosition(number, group + 1), before)
            before, number = before + each.size, number + 1
        else:
            count, held = 0, 0
            for other in inputs[number:]:
                if other.kind in (LINES, PARQUET) or (count and held + other.size > size):
                    break
                count, held = count + 1, held + other.size
            before, number = before + held, number + count
            yield Cut(InputShard(number - count, count=count), InputPosition(number), before)
        place = InputPosition(number)


def _lines(inputs: Sequence[Input], place: InputPosition, before: int, size: int) -> Iterator[Cut]:
    number, at, line = place
    source = inputs[number]
    with opened(source) as (content, file):
        _skip(content, at, seekable=not source.packed)
        rest = b""
        while True:
            block, rest = _whole_lines(source, content, rest, size)
            if not block:
                return
            at += len(block)
            piece = InputShard(number, block, line)
            line += block.count(b"\n")
            yield Cut(
                piece, InputPosition(number, at, line), before + min(source.size, file.tell())
            )


def _whole_lines(source: Input, content: BinaryIO, rest: bytes, size: int) -> tuple[bytes, bytes]:
    """Some `size` bytes of whole lines that begin with `rest`, and what was read of the next."""
    parts, held, end = [rest], len(rest), rest.rfind(b"\n")
    while held < size or end < 0:
        if held > LARGEST_DOCUMENT:
            raise UserError(
                f"input={show(source.address)} has a line of more than {LARGEST_DOCUMENT:,} bytes: "
                "cut it into documents"
            )
        # By doubling, where pieces are small; not beyond, or twice the largest would be held.
        block = content.read(max(size, min(held, READ)))
        if not block:
            return b"".join(parts), b""
        if (there := block.rfind(b"\n")) >= 0:
            end = held + there
        parts.append(block)
        held += len(block)
    whole = b"".join(parts)
    return whole[: end + 1], whole[end + 1 :]


def _skip(content: BinaryIO, count: int, seekable: bool) -> None:
    """To byte `count`. Raises EOFError if there are fewer."""
    if seekable:
        content.seek(count)
        return
    while count:
        skipped = len(content.read(min(count, READ)))
        if not skipped:
            raise EOFError("it has become shorter")
        count -= skipped


def row_groups(source: Input) -> int:
    """How many row groups a parquet file has. Raises UserError."""
    parquet = pyarrow_parquet(source)
    with of_input(source.address), opened(source) as (content, _):
        return parquet.ParquetFile(content).num_row_groups


def pyarrow_parquet(source: Input) -> Any:
    """The module that reads parquet. Raises UserError where it is not installed."""
    try:
        import pyarrow.parquet
    except ImportError:
        raise UserError(
            f"input={show(source.address)} is parquet, which needs pyarrow: pip install "
            "'parallel3d[parquet]'"
        ) from None
    return pyarrow.parquet
