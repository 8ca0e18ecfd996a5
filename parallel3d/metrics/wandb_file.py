"""The last row in W&B's own record of a session, so that a resumed run logs no step twice.

A `run-<id>.wandb` file is a log of protobuf records in LevelDB's framing: a header of 7 bytes, then
blocks of 32 KiB. A record lies whole in a block, or in parts in consecutive ones; every part has a
header of its own (CRC-32, length, kind). A session that was killed leaves a file that ends within
a record: what came before it counts.
"""

from __future__ import annotations

import json
import struct
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

FILE_HEADER = struct.Struct("<4sHB")
MAGIC = (b":W&B", 0xBEE1, 0)
PART_HEADER = struct.Struct("<IHB")
BLOCK = 1 << 15
WHOLE, FIRST, MIDDLE, LAST = 1, 2, 3, 4


class Row(NamedTuple):
    """A logged row's place in the order of rows: a step's evaluation comes after the step."""

    step: int
    evaluation: bool


class UnreadableFile(OSError):
    """A .wandb file of a format that is not known here."""


def last_row(run_dir: Path) -> Row | None:
    """The last row that earlier sessions of the run left in `run_dir`/wandb; None without any.

    Raises OSError if a session's file cannot be read.
    """
    rows = [_last_row_of(path) for path in run_dir.glob("wandb/*run-*-*/run-*.wandb")]
    return max((row for row in rows if row is not None), default=None)


def _last_row_of(path: Path) -> Row | None:
    """The last history record that is whole, found from the end: files of long runs are large."""
    content = path.read_bytes()
    if not content:
        return None  # killed before the first block was written
    if len(content) < FILE_HEADER.size or FILE_HEADER.unpack_from(content) != MAGIC:
        raise UnreadableFile(f"{path} is no W&B file of a known version")
    blocks = -(-len(content) // BLOCK)
    taken = 1
    while True:
        row = None
        for record in _records(content, max(0, blocks - taken) * BLOCK):
            row = _row(record) or row
        if row is not None or taken >= blocks:
            return row
        taken *= 4


def _records(content: bytes, start: int) -> Iterator[bytes]:
    """Whole records from block border `start` on, up to the first damage."""
    at = start or FILE_HEADER.size
    parts: list[bytes] | None = None  # None: in the middle of a record that began before `start`
    while at + PART_HEADER.size <= len(content):
        if BLOCK - at % BLOCK < PART_HEADER.size:
            at += BLOCK - at % BLOCK  # too small for a header: padding
            continue
        checksum, length, kind = PART_HEADER.unpack_from(content, at)
        body = content[at + PART_HEADER.size : at + PART_HEADER.size + length]
        if len(body) < length or zlib.crc32(bytes([kind]) + body) != checksum:
            return
        at += PART_HEADER.size + length
        if kind in (WHOLE, FIRST):
            parts = [body]
        elif parts is not None:
            parts.append(body)
        if kind in (WHOLE, LAST) and parts is not None:
            yield b"".join(parts)
            parts = None


def _row(record: bytes) -> Row | None:
    """The place of a history record that `WandbLogger` made; None for any other record."""
    from wandb.proto.wandb_internal_pb2 import Record

    parsed = Record.FromString(record)
    if parsed.WhichOneof("record_type") != "history":
        return None
    items = {item.key or ".".join(item.nested_key): item for item in parsed.history.item}
    if "step" not in items:
        return None
    return Row(int(json.loads(items["step"].value_json)), "eval/loss" in items)
