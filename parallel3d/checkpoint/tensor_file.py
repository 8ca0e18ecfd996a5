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
import math
import os
import struct
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from parallel3d.checkpoint.boxes import Box
from parallel3d.checkpoint.manifest import DamagedCheckpoint, FileDigest, told
from parallel3d.files.durable import new_file, write_all
from parallel3d.files.reading import open_regular, parse_json, read_into

_LENGTH = struct.Struct("<Q")
_LARGEST_HEADER = 64 << 20  # bytes: of a quarter of a million boxes
_MOST = 1 << 60  # elements of a tensor
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
    with new_file(path) as descriptor:
        os.lseek(descriptor, room, os.SEEK_SET)
        for i, box in enumerate(boxes):
            digests[i] = _write_box(descriptor, box.values)
        size = os.lseek(descriptor, 0, os.SEEK_CUR)
        header = _header(boxes, digests)
        write_all(descriptor, memoryview(header), at=0)
        os.fsync(descriptor)
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
        write_all(descriptor, piece)
    return digest.hexdigest()


class TensorFile:
    """A file of a checkpoint, its header proved; `boxes` are those in it, in their order.

    Raises DamagedCheckpoint and UnreadableCheckpoint, here and from `read`.
    """

    def __init__(self, folder: Path, expected: FileDigest) -> None:
        self.path = folder / expected.name
        try:
            with told(self._name), open_regular(self.path) as descriptor:
                size = os.fstat(descriptor).st_size
                if size != expected.size:
                    raise self._damaged(f"has {size} bytes, {expected.size} were written")
                header = self._header(descriptor, size)
            if hashlib.sha256(header).hexdigest() != expected.header:
                raise self._damaged("has a header that was not written so")
            self.boxes = list(_boxes(parse_json(header[_LENGTH.size :]), len(header)))
        except (ValueError, KeyError, TypeError, AttributeError, OverflowError) as error:
            raise self._damaged(f"is no checkpoint file of parallel3d ({error!r})") from error
        end = self.boxes[-1].at + self.boxes[-1].nbytes if self.boxes else len(header)
        if end != size:
            raise self._damaged(f"holds boxes up to byte {end} and has {size}")

    def _header(self, descriptor: int, size: int) -> bytes:
        """Length and JSON, as they are in a file of `size` bytes."""
        length = bytearray(_LENGTH.size)
        if read_into(descriptor, memoryview(length), 0) < len(length):
            raise self._damaged("has no header")
        header_size = _LENGTH.unpack(length)[0]
        if header_size > min(_LARGEST_HEADER, size - _LENGTH.size):
            raise self._damaged("has no header")
        header = bytearray(_LENGTH.size + header_size)
        read_into(descriptor, memoryview(header), 0)
        return bytes(header)

    def read(self, stored: StoredBox, buffer: bytearray) -> Tensor:
        """The box's values, proved, in its shape, inside `buffer` (which must be large enough)."""
        view = memoryview(buffer)[: stored.nbytes]
        try:
            with told(self._name), open_regular(self.path) as descriptor:
                done = read_into(descriptor, view, stored.at)
        except ValueError as error:
            raise self._damaged(f"is no file any more ({error})") from error
        if done < len(view) or hashlib.sha256(view).hexdigest() != stored.digest:
            raise self._damaged(f"{stored.name} at {stored.box.offsets} is not what was written")
        flat = torch.frombuffer(buffer, dtype=stored.dtype, count=stored.box.elements)
        return flat.view(stored.box.sizes)

    def verify(self) -> None:
        """Prove every box."""
        buffer = bytearray(max((b.nbytes for b in self.boxes), default=0))
        for stored in self.boxes:
            self.read(stored, buffer)

    @property
    def _name(self) -> str:
        return f"{self.path.parent.name}/{self.path.name}"

    def _damaged(self, what: str) -> DamagedCheckpoint:
        return DamagedCheckpoint(f"{self._name} {what}")


def _boxes(header: dict[str, Any], start: int) -> Iterable[StoredBox]:
    ours = parse_json(header.pop("__metadata__")["parallel3d"].encode())
    at = 0
    for name, entry in header.items():
        tensor, _, offsets = name.rpartition("/")
        first = tuple(int(o) for o in offsets.split(","))
        box = Box(first, tuple(int(n) for n in entry["shape"]))
        full = tuple(int(n) for n in ours["full_shapes"][tensor])
        ends = [o + n for o, n in zip(box.offsets, box.sizes, strict=True)]
        fits = all(e <= n for e, n in zip(ends, full, strict=True)) and math.prod(full) <= _MOST
        if not fits or min(first) < 0 or min(box.sizes) < 1:
            raise ValueError(f"{name} is no box of {full}")
        dtype = _DTYPES[entry["dtype"]]
        stored = StoredBox(tensor, box, full, dtype, start + at, ours["sha256"][name])
        if entry["data_offsets"] != [at, at + stored.nbytes]:
            raise ValueError(f"{name} lies elsewhere")
        yield stored
        at += stored.nbytes
