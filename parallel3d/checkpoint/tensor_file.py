"""One rank's part of a checkpoint: a safetensors file that proves its own contents.

    length of the header (8 bytes) | header, JSON | the boxes' bytes, side by side

The header names every box `kind/logical name/first row,first column` with its type, its shape and
its place; under `__metadata__` lie the full shapes and a SHA-256 of each box. The manifest of the
checkpoint has the SHA-256 of length and header, so that every byte is covered, and a reader proves
exactly the boxes that it reads, in the very memory that it takes them from. Nothing is unpickled;
any safetensors reader opens the file.
"""

from __future__ import annotations

import hashlib
import json
import os
import struct
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from parallel3d.checkpoint.boxes import Box
from parallel3d.checkpoint.manifest import DamagedCheckpoint, FileDigest

_LENGTH = struct.Struct("<Q")
_LARGEST_HEADER = 1 << 30
_PIECE = 4 << 20  # bytes: hashed while it is still in the processor's cache, then written
_NAMES = {torch.float64: "F64", torch.float32: "F32", torch.bfloat16: "BF16", torch.float16: "F16"}
_DTYPES = {name: dtype for dtype, name in _NAMES.items()}


@dataclass(frozen=True)
class StoredBox:
    """A box of a logical tensor in a file.

    Attributes:
        name: `kind/logical name`; box: where it lies in the full tensor.
        full_shape, dtype: of the full tensor.
        at: first byte in the file. digest: SHA-256 of its bytes, hexadecimal.
    """

    name: str
    box: Box
    full_shape: tuple[int, ...]
    dtype: torch.dtype
    at: int
    digest: str

    @property
    def nbytes(self) -> int:
        return self.box.elements * self.dtype.itemsize


@dataclass(frozen=True)
class BoxToWrite:
    """A box of the logical tensor `name` and its values, contiguous and on the CPU."""

    name: str
    box: Box
    full_shape: tuple[int, ...]
    values: Tensor


def write_tensor_file(path: Path, boxes: Iterable[BoxToWrite]) -> FileDigest:
    """Write a new file, private to the user, flushed to the disk. Raises OSError.

    Digests are made on the way: every byte of memory is read once.
    """
    boxes = list(boxes)
    digests = [bytes(hashlib.sha256().digest_size).hex()] * len(boxes)
    room = len(_header(boxes, digests))  # digests have one length, so the header has, too
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, 0o600)
    try:
        os.lseek(descriptor, room, os.SEEK_SET)
        for i, box in enumerate(boxes):
            digests[i] = _write_box(descriptor, box.values)
        size = os.lseek(descriptor, 0, os.SEEK_CUR)
        header = _header(boxes, digests)
        _write(descriptor, memoryview(header), at=0)
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
    return FileDigest(path.name, size, hashlib.sha256(header).hexdigest())


def _header(boxes: list[BoxToWrite], digests: list[str]) -> bytes:
    """Length and JSON, padded with spaces so that the boxes begin at a multiple of 8 bytes."""
    names = [f"{b.name}/{','.join(map(str, b.box.offsets))}" for b in boxes]
    ours = {
        "full_shapes": {b.name: list(b.full_shape) for b in boxes},
        "sha256": dict(zip(names, digests, strict=True)),
    }
    header: dict[str, Any] = {"__metadata__": {"parallel3d": json.dumps(ours)}}
    at = 0
    for name, b in zip(names, boxes, strict=True):
        end = at + b.values.nbytes
        shape = list(b.box.sizes)
        header[name] = {"dtype": _NAMES[b.values.dtype], "shape": shape, "data_offsets": [at, end]}
        at = end
    if len(header) != len(boxes) + 1:
        raise ValueError("a box is there twice")
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return _LENGTH.pack(len(text)) + text


def _write_box(descriptor: int, values: Tensor) -> str:
    digest = hashlib.sha256()
    view = memoryview(values.reshape(-1).view(torch.uint8).numpy())
    for start in range(0, len(view), _PIECE):
        piece = view[start : start + _PIECE]
        digest.update(piece)
        _write(descriptor, piece)
    return digest.hexdigest()


def _write(descriptor: int, view: memoryview, at: int | None = None) -> None:
    """All of `view`, at the file's position or at byte `at`; the system may take it in parts."""
    done = 0
    while done < len(view):
        if at is None:
            done += os.write(descriptor, view[done:])
        else:
            done += os.pwrite(descriptor, view[done:], at + done)


class TensorFile:
    """A file of a checkpoint, its header proved; `boxes` are those in it, in their order.

    Raises DamagedCheckpoint, here and from `read`.
    """

    def __init__(self, folder: Path, expected: FileDigest) -> None:
        self.path = folder / expected.name
        try:
            with self.path.open("rb") as file:
                size = os.fstat(file.fileno()).st_size
                if size != expected.size:
                    raise self._damaged(f"has {size} bytes, {expected.size} were written")
                length = file.read(_LENGTH.size)
                header_size = _LENGTH.unpack(length)[0] if len(length) == _LENGTH.size else -1
                if not 0 <= header_size <= min(_LARGEST_HEADER, size - _LENGTH.size):
                    raise self._damaged("has no header")
                header = file.read(header_size)
        except OSError as error:
            raise self._damaged(f"cannot be read ({error.strerror})") from error
        if hashlib.sha256(length + header).hexdigest() != expected.header:
            raise self._damaged("has a header that was not written so")
        try:
            self.boxes = list(_boxes(json.loads(header), _LENGTH.size + header_size))
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise self._damaged(f"is no checkpoint file of parallel3d ({error!r})") from error
        end = self.boxes[-1].at + self.boxes[-1].nbytes if self.boxes else 8 + header_size
        if end != size:
            raise self._damaged(f"holds boxes up to byte {end} and has {size}")

    def read(self, stored: StoredBox, buffer: bytearray) -> Tensor:
        """The box's values, proved, in its shape, inside `buffer` (which must be large enough)."""
        view = memoryview(buffer)[: stored.nbytes]
        try:
            with self.path.open("rb", buffering=0) as file:
                file.seek(stored.at)
                done = 0
                while done < len(view) and (got := file.readinto(view[done:])):
                    done += got
        except OSError as error:
            raise self._damaged(f"cannot be read ({error.strerror})") from error
        if done < len(view) or hashlib.sha256(view).hexdigest() != stored.digest:
            raise self._damaged(f"{stored.name} at {stored.box.offsets} is not what was written")
        flat = torch.frombuffer(buffer, dtype=stored.dtype, count=stored.box.elements)
        return flat.view(stored.box.sizes)

    def verify(self) -> None:
        """Prove every box."""
        buffer = bytearray(max((b.nbytes for b in self.boxes), default=0))
        for stored in self.boxes:
            self.read(stored, buffer)

    def _damaged(self, what: str) -> DamagedCheckpoint:
        return DamagedCheckpoint(f"{self.path.parent.name}/{self.path.name} {what}")


def _boxes(header: dict[str, Any], start: int) -> Iterable[StoredBox]:
    ours = json.loads(header.pop("__metadata__")["parallel3d"])
    at = 0
    for name, entry in header.items():
        tensor, _, offsets = name.rpartition("/")
        first = tuple(int(o) for o in offsets.split(","))
        box = Box(first, tuple(int(n) for n in entry["shape"]))
        full = tuple(int(n) for n in ours["full_shapes"][tensor])
        ends = [o + n for o, n in zip(box.offsets, box.sizes, strict=True)]
        if min((*first, *box.sizes)) < 0 or any(e > n for e, n in zip(ends, full, strict=True)):
            raise ValueError(f"{name} is no box of {full}")
        dtype = _DTYPES[entry["dtype"]]
        stored = StoredBox(tensor, box, full, dtype, start + at, ours["sha256"][name])
        if entry["data_offsets"] != [at, at + stored.nbytes]:
            raise ValueError(f"{name} lies elsewhere")
        yield stored
        at += stored.nbytes
