"""The id of a run's W&B run, and the last row that its earlier sessions wrote.

A resumed run logs after that row. W&B's own `resume` and explicit steps cannot replace this: W&B
ignores `resume` offline, so the rows that a killed session lost stay lost or, if all are logged
again, others are in the files twice (`test_wandbs_own_resume_and_steps_do_not_keep_rows_whole`).

A `run-<id>.wandb` file is a log of protobuf records in LevelDB's framing: a header of 7 bytes, then
blocks of 32 KiB. A record is in one block, or in parts in consecutive blocks; every part has its
own header (CRC-32, length, kind). A killed session's file may end within a record.
"""

from __future__ import annotations

import json
import os
import re
import secrets
import struct
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from parallel3d.files import replace_durably

MAX_ID_LENGTH = 64
ID_FILE = "wandb-id"
_ID = re.compile(rf"[A-Za-z0-9_.-]{{1,{MAX_ID_LENGTH}}}")

SESSIONS = "wandb/*run-*-*/run-*.wandb"
FILE_HEADER = struct.Struct("<4sHB")
MAGIC = (b":W&B", 0xBEE1, 0)
PART_HEADER = struct.Struct("<IHB")
BLOCK = 1 << 15
WHOLE, FIRST, MIDDLE, LAST = 1, 2, 3, 4


class Row(NamedTuple):
    """Place of a logged row in the order of rows: a step's evaluation comes after the step."""

    step: int
    evaluation: bool


class UnreadableFile(OSError):
    """A .wandb file of an unknown format."""


def run_id(run_dir: Path) -> str:
    """Returns W&B's id of a run: created once, kept in the run's folder.

    The first start takes WANDB_RUN_ID, which a sweep's agent sets, if valid. The run's name would
    not be unique among folders and users of the project. Raises OSError.
    """
    file = run_dir / ID_FILE
    if file.is_file() and _ID.fullmatch(found := file.read_text("utf-8", "replace").strip()):
        return found
    # Sessions older than this file have logged under another id: keep it.
    earlier = [path.stem.removeprefix("run-") for path in run_dir.glob(SESSIONS)]
    allowed = re.sub(r"[^A-Za-z0-9_.-]", "-", run_dir.name)
    given = os.environ.get("WANDB_RUN_ID", "")
    own = (
        given if _ID.fullmatch(given) else f"{allowed[: MAX_ID_LENGTH - 17]}-{secrets.token_hex(8)}"
    )
    made = earlier[-1] if earlier else own
    replace_durably(file, f"{made}\n".encode())
    return made


def last_row(run_dir: Path) -> Row | None:
    """Returns the last row of earlier sessions in `run_dir`/wandb, or None. Raises OSError."""
    rows = [_last_row_of(path) for path in run_dir.glob(SESSIONS)]
    return max((row for row in rows if row is not None), default=None)


def _last_row_of(path: Path) -> Row | None:
    """Returns the last whole history record, searched from the end: files may be large."""
    with path.open("rb") as file:
        header = file.read(FILE_HEADER.size)
        if not header:
            return None  # killed before the first block was written
        if len(header) < FILE_HEADER.size or FILE_HEADER.unpack(header) != MAGIC:
            raise UnreadableFile(f"{path} is no W&B file of a known version")
        blocks = -(-os.fstat(file.fileno()).st_size // BLOCK)
        taken = 1
        while True:
            start = max(0, blocks - taken) * BLOCK
            file.seek(start)
            row = None
            for record in _records(file.read(), FILE_HEADER.size if start == 0 else 0):
                row = _row(record) or row
            if row is not None or taken >= blocks:
                return row
            taken *= 4


def _records(content: bytes, at: int) -> Iterator[bytes]:
    """Yields whole records from `at` to the first damage; `content` begins at a block's border."""
    parts: list[bytes] | None = None  # None: within a record that began before `content`
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
    """Returns the place of a history record of `WandbLogger`; None for any other record."""
    # wandb's stub of this generated module is empty.
    from wandb.proto.wandb_internal_pb2 import Record  # type: ignore[attr-defined]

    parsed = Record.FromString(record)
    if parsed.WhichOneof("record_type") != "history":
        return None
    items = {item.key or ".".join(item.nested_key): item for item in parsed.history.item}
    if "step" not in items:
        return None
    return Row(int(json.loads(items["step"].value_json)), "eval/loss" in items)
