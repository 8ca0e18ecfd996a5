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
import warnings
from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Never

import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.metadata import Metadata, TensorProperties, TensorStorageMetadata
from torch.distributed.checkpoint.planner import (
    LoadItemType,
    LoadPlan,
    LoadPlanner,
    ReadItem,
    SavePlan,
    SavePlanner,
)
from torch.distributed.checkpoint.storage import StorageReader, StorageWriter, WriteResult
from torch.futures import Future

from parallel3d.checkpoint.manifest import (
    DamagedCheckpoint,
    FileDigest,
    Manifest,
    read_manifest,
    told,
)
from parallel3d.checkpoint.planners import (
    Box,
    FillPlanner,
    LogicalTensor,
    StatePlanner,
    chunk_of,
    narrowed,
    whole_tensors,
)
from parallel3d.files import new_file, open_regular, parse_json, read_into, write_all

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


# `torch.distributed.checkpoint` (DCP) over our own files: planners, storage writer and reader.
#
# DCP plans which box goes where, intersects what is stored with what is wanted, and drives the
# sequence; its own storage pickles its metadata, so ours writes safetensors and JSON instead
# (`tensor_file`, `manifest`). Every rank plans for itself: names and indices are those of the
# logical tensors, which element is whose is arithmetic (`boxes.share`), and so a save needs no
# communication of DCP's and may run in a background thread.


# Said by DCP whenever ranks plan for themselves, which is what we want.
warnings.filterwarnings("ignore", message="torch.distributed is disabled, unavailable")

State = Mapping[str, LogicalTensor]


def write_state(path: Path, state: State) -> FileDigest:
    """Write this process's boxes as one new file; no communication. Raises OSError."""
    writer = _Writer(path)
    try:
        dcp.save(dict(state), storage_writer=writer, planner=StatePlanner(), no_dist=True)
    except CheckpointException as error:
        _raise_cause(error)
    return writer.written


def read_state(folder: Path, state: State) -> Manifest:
    """Fill the boxes of `state` from a checkpoint of any layout; no communication.

    Everything read is proved first. Values of another type are converted. Raises DamagedCheckpoint,
    also if the checkpoint does not hold all that is wanted, and UnreadableCheckpoint; `state` may
    then be half filled.
    """
    reader = _Reader(folder)
    try:
        dcp.load(dict(state), storage_reader=reader, planner=FillPlanner(), no_dist=True)
    except CheckpointException as error:
        _raise_cause(error)
    return reader.manifest


def read_whole(folder: Path, kinds: tuple[str, ...] = ("parameter",)) -> dict[str, Tensor]:
    """`kind/logical name` → full, unpadded CPU tensor, proved; for models that fit one process.

    Kinds are "parameter" and the optimizer's "exp_avg", "exp_avg_sq" or "momentum"; those that the
    checkpoint does not have are left out. Raises as `read_state`.
    """
    stored = [b for b in _Reader(folder).stored if b.name.partition("/")[0] in kinds]
    shapes = _covered(folder, stored)  # what is on the disk bounds what is asked of the memory
    state = whole_tensors(shapes, {b.name: b.dtype for b in stored})
    read_state(folder, state)
    return {name: tensor.boxes[0][1] for name, tensor in state.items()}


def stored_shapes(folder: Path) -> dict[str, tuple[int, ...]]:
    """`kind/logical name` → full shape of what a checkpoint holds; raises as `read_state`.

    Headers are read and proved, no values.
    """
    return _covered(folder, _Reader(folder).stored)


def verify_checkpoint(folder: Path) -> Manifest:
    """Prove every byte of a checkpoint, and that its boxes cover each tensor exactly once.

    Raises DamagedCheckpoint and UnreadableCheckpoint.
    """
    reader = _Reader(folder)
    for file in reader.files:
        file.verify()
    _covered(folder, reader.stored)
    return reader.manifest


def _covered(folder: Path, boxes: list[StoredBox]) -> dict[str, tuple[int, ...]]:
    """The tensors of these boxes with their shapes; raises DamagedCheckpoint if any is not full."""
    elements: dict[str, int] = defaultdict(int)
    shapes = {b.name: b.full_shape for b in boxes}
    for stored in boxes:
        elements[stored.name] += stored.box.elements
    for name, shape in shapes.items():
        if elements[name] != math.prod(shape):
            raise DamagedCheckpoint(f"{folder.name} holds {elements[name]} elements of {name}")
    return shapes


def _raise_cause(error: CheckpointException) -> Never:
    """DCP wraps what a rank raised; there is one rank here."""
    ((cause, _),) = error.failures.values()
    raise cause from None


class _Writer(StorageWriter):
    """All items of the plan into one file, whose digest is then in `written`."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def reset(self, checkpoint_id: Any = None) -> None:
        raise RuntimeError("a writer writes one file")

    def set_up_storage_writer(self, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        pass  # the folder is there

    def prepare_local_plan(self, plan: SavePlan) -> SavePlan:
        return plan

    def prepare_global_plan(self, plans: list[SavePlan]) -> list[SavePlan]:
        return plans

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        boxes = [
            BoxToWrite(
                item.index.fqn,
                Box(tuple(item.tensor_data.chunk.offsets), tuple(item.tensor_data.chunk.sizes)),
                tuple(item.tensor_data.size),
                planner.resolve_data(item).detach().to("cpu").contiguous(),
            )
            for item in plan.items
        ]
        self.written = write_tensor_file(self.path, boxes)
        results = [
            WriteResult(item.index, box.values.nbytes, None)
            for item, box in zip(plan.items, boxes, strict=True)
        ]
        return _done(results)

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        pass  # the manifest is written when every rank's file is there: see `saver`

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: Any) -> bool:
        return False


class _Reader(StorageReader):
    """The boxes of a checkpoint; manifest and headers are proved when it is made."""

    def __init__(self, folder: Path) -> None:
        self.manifest = read_manifest(folder)
        self.files = [TensorFile(folder, file) for file in self.manifest.files]
        self.stored = [stored for file in self.files for stored in file.boxes]

    def reset(self, checkpoint_id: Any = None) -> None:
        raise RuntimeError("a reader reads one checkpoint")

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        tensors: dict[str, TensorStorageMetadata] = {}
        self.places: dict[tuple[str, int], tuple[TensorFile, StoredBox]] = {}
        for file in self.files:
            for stored in file.boxes:
                properties = TensorProperties(dtype=stored.dtype)
                size = torch.Size(stored.full_shape)
                tensor = tensors.setdefault(
                    stored.name, TensorStorageMetadata(properties, size, [])
                )
                if tensor.size != size:
                    raise DamagedCheckpoint(f"{file.path.name} disagrees on {stored.name}'s shape")
                self.places[stored.name, len(tensor.chunks)] = file, stored
                tensor.chunks.append(chunk_of(stored.box))
        return Metadata(tensors)

    def set_up_storage_reader(
        self, metadata: Metadata, is_coordinator: bool, *args: Any, **kwargs: Any
    ) -> None:
        pass  # everything is known already

    def prepare_local_plan(self, plan: LoadPlan) -> LoadPlan:
        return plan

    def prepare_global_plan(self, plans: list[LoadPlan]) -> list[LoadPlan]:
        return plans

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        wanted: dict[tuple[str, int], list[ReadItem]] = defaultdict(list)
        for item in plan.items:
            if item.type is not LoadItemType.TENSOR:
                raise DamagedCheckpoint(f"{item.dest_index.fqn} is no tensor: it is not read")
            wanted[item.storage_index.fqn, item.storage_index.index].append(item)
        # In the order of the disk, each box once.
        order = sorted(wanted, key=lambda k: (self.places[k][0].path, self.places[k][1].at))
        largest = max((self.places[k][1].nbytes for k in order), default=0)
        buffer = bytearray(largest)
        for key in order:
            file, stored = self.places[key]
            values = file.read(stored, buffer)
            for item in wanted[key]:
                target = planner.resolve_tensor(item)
                target.copy_(narrowed(values, item.storage_offsets, item.lengths))
                planner.commit_tensor(item, target)
        return _done(None)

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: Any) -> bool:
        return False


def _done(value: Any) -> Future:
    future: Future = Future()
    future.set_result(value)
    return future
