"""Reads and writes checkpoint files with `torch.distributed.checkpoint` (DCP), without pickle.

A rank's part of a checkpoint is a safetensors file with digests:

    length of the header (8 bytes) | header, JSON | the chunks' bytes, concatenated

The header names every chunk `kind/name/first row,first column` with its type, shape and offset;
`__metadata__` has the full shapes and a SHA-256 of each chunk. The manifest of the checkpoint has
the SHA-256 of length and header. So every byte is covered, and a reader verifies exactly the chunks
that it reads, in the memory that it takes them from. Any safetensors reader opens the file.

DCP plans which chunk goes where, and intersects stored with wanted chunks. Its own storage pickles
its metadata, so ours writes safetensors and JSON. Every rank plans for itself: names and indices
are those of the full tensors, and `planners.share` assigns each element to a rank. So a save needs
no communication by DCP and may run in a background thread.
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
    WriteItem,
)
from torch.distributed.checkpoint.storage import StorageReader, StorageWriter, WriteResult
from torch.futures import Future

from parallel3d.checkpoint.manifest import (
    DamagedCheckpoint,
    FileDigest,
    Manifest,
    read_manifest,
    unreadable,
)
from parallel3d.checkpoint.planners import (
    Chunk,
    FillPlanner,
    StatePlanner,
    TensorChunks,
    full_tensors,
    narrow,
    to_dcp,
)
from parallel3d.files import new_file, open_regular, parse_json, read_into, write_all

_LENGTH = struct.Struct("<Q")
_LARGEST_HEADER = 64 << 20  # bytes: of a quarter of a million chunks
_MOST = 1 << 60  # elements of a tensor
_BLOCK = 4 << 20  # bytes: written while they are in the processor's cache from hashing
_NAMES = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.bfloat16: "BF16",
    torch.float16: "F16",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint8: "U8",
    torch.bool: "BOOL",
}
DTYPES = {name: dtype for dtype, name in _NAMES.items()}


@dataclass(frozen=True)
class StoredChunk:
    """Describes a chunk of a full tensor in a file.

    Attributes:
        name: `kind/name` of the tensor.
        full_shape, dtype: of the full tensor.
        at: first byte in the file.
        digest: SHA-256 of its bytes, hexadecimal.
    """

    name: str
    chunk: Chunk
    full_shape: tuple[int, ...]
    dtype: torch.dtype
    at: int
    digest: str

    @property
    def nbytes(self) -> int:
        return self.chunk.elements * self.dtype.itemsize


@dataclass(frozen=True)
class ChunkToWrite:
    name: str
    chunk: Chunk
    full_shape: tuple[int, ...]
    values: Tensor


def write_tensor_file(path: Path, chunks: Iterable[ChunkToWrite]) -> FileDigest:
    """Writes and hashes a new file, private and flushed, in one pass. Raises OSError."""
    chunks = list(chunks)
    digests = [bytes(hashlib.sha256().digest_size).hex()] * len(chunks)
    length = len(_header(chunks, digests))  # whatever the digests, which have one length
    with new_file(path) as descriptor:
        os.lseek(descriptor, length, os.SEEK_SET)
        for i, chunk in enumerate(chunks):
            digests[i] = _write_chunk(descriptor, chunk.values)
        size = os.lseek(descriptor, 0, os.SEEK_CUR)
        header = _header(chunks, digests)
        write_all(descriptor, memoryview(header), at=0)
        os.fsync(descriptor)
    return FileDigest(path.name, size, hashlib.sha256(header).hexdigest())


def _header(chunks: list[ChunkToWrite], digests: list[str]) -> bytes:
    """Returns length and JSON, padded with spaces so that chunks are aligned to 8 bytes."""
    names = [f"{b.name}/{','.join(map(str, b.chunk.offsets))}" for b in chunks]
    ours = {
        "full_shapes": {b.name: list(b.full_shape) for b in chunks},
        "sha256": dict(zip(names, digests, strict=True)),
    }
    header: dict[str, Any] = {"__metadata__": {"parallel3d": json.dumps(ours)}}
    at = 0
    for name, b in zip(names, chunks, strict=True):
        end = at + b.values.nbytes
        shape = list(b.chunk.sizes)
        header[name] = {"dtype": _NAMES[b.values.dtype], "shape": shape, "data_offsets": [at, end]}
        at = end
    if len(header) != len(chunks) + 1:
        raise ValueError("a chunk is there twice")
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return _LENGTH.pack(len(text)) + text


def _write_chunk(descriptor: int, values: Tensor) -> str:
    digest = hashlib.sha256()
    view = memoryview(values.reshape(-1).view(torch.uint8).numpy())  # type: ignore[arg-type]
    for start in range(0, len(view), _BLOCK):
        block = view[start : start + _BLOCK]
        digest.update(block)
        write_all(descriptor, block)
    return digest.hexdigest()


class TensorFile:
    """Reads a verified file of chunks. Raises DamagedCheckpoint, UnreadableCheckpoint."""

    def __init__(self, folder: Path, expected: FileDigest) -> None:
        self.path = folder / expected.name
        try:
            with unreadable(self._name), open_regular(self.path) as descriptor:
                size = os.fstat(descriptor).st_size
                if size != expected.size:
                    raise self._damaged(f"has {size} bytes, {expected.size} were written")
                header = self._header(descriptor, size)
            if hashlib.sha256(header).hexdigest() != expected.header:
                raise self._damaged("has a header that was not written so")
            self.chunks = list(_chunks_of(parse_json(header[_LENGTH.size :]), len(header)))
        except (ValueError, KeyError, TypeError, AttributeError, OverflowError) as error:
            raise self._damaged(f"is no checkpoint file of parallel3d ({error!r})") from error
        end = self.chunks[-1].at + self.chunks[-1].nbytes if self.chunks else len(header)
        if end != size:
            raise self._damaged(f"holds chunks up to byte {end} and has {size}")

    def _header(self, descriptor: int, size: int) -> bytes:
        length = bytearray(_LENGTH.size)
        if read_into(descriptor, memoryview(length), 0) < len(length):
            raise self._damaged("has no header")
        header_size = _LENGTH.unpack(length)[0]
        if header_size > min(_LARGEST_HEADER, size - _LENGTH.size):
            raise self._damaged("has no header")
        header = bytearray(_LENGTH.size + header_size)
        read_into(descriptor, memoryview(header), 0)
        return bytes(header)

    def read(self, stored: StoredChunk, buffer: bytearray) -> Tensor:
        """Returns the chunk's verified values in `buffer`, which must be large enough."""
        view = memoryview(buffer)[: stored.nbytes]
        try:
            with unreadable(self._name), open_regular(self.path) as descriptor:
                done = read_into(descriptor, view, stored.at)
        except ValueError as error:
            raise self._damaged(f"is no file any more ({error})") from error
        if done < len(view) or hashlib.sha256(view).hexdigest() != stored.digest:
            raise self._damaged(f"{stored.name} at {stored.chunk.offsets} is not what was written")
        flat = torch.frombuffer(buffer, dtype=stored.dtype, count=stored.chunk.elements)
        return flat.view(stored.chunk.sizes)

    def verify(self) -> None:
        buffer = bytearray(max((b.nbytes for b in self.chunks), default=0))
        for stored in self.chunks:
            self.read(stored, buffer)

    @property
    def _name(self) -> str:
        return f"{self.path.parent.name}/{self.path.name}"

    def _damaged(self, what: str) -> DamagedCheckpoint:
        return DamagedCheckpoint(f"{self._name} {what}")


def _chunks_of(header: dict[str, Any], start: int) -> Iterable[StoredChunk]:
    ours = parse_json(header.pop("__metadata__")["parallel3d"].encode())
    at = 0
    for name, entry in header.items():
        tensor, _, offsets = name.rpartition("/")
        first = tuple(int(o) for o in offsets.split(","))
        chunk = Chunk(first, tuple(int(n) for n in entry["shape"]))
        full = tuple(int(n) for n in ours["full_shapes"][tensor])
        ends = [o + n for o, n in zip(chunk.offsets, chunk.sizes, strict=True)]
        fits = all(e <= n for e, n in zip(ends, full, strict=True)) and math.prod(full) <= _MOST
        if not fits or min(first) < 0 or min(chunk.sizes) < 1:
            raise ValueError(f"{name} is no chunk of {full}")
        dtype = DTYPES[entry["dtype"]]
        stored = StoredChunk(tensor, chunk, full, dtype, start + at, ours["sha256"][name])
        if entry["data_offsets"] != [at, at + stored.nbytes]:
            raise ValueError(f"{name} lies elsewhere")
        yield stored
        at += stored.nbytes


# DCP warns whenever ranks plan for themselves.
warnings.filterwarnings("ignore", message="torch.distributed is disabled, unavailable")

State = Mapping[str, TensorChunks]


def write_state(path: Path, state: State) -> FileDigest:
    """Writes this process's chunks as one new file; no communication. Raises OSError."""
    writer = _Writer(path)
    try:
        dcp.save(dict(state), storage_writer=writer, planner=StatePlanner(), no_dist=True)
    except CheckpointException as error:
        _raise_cause(error)
    return writer.written


def read_state(folder: Path, state: State) -> Manifest:
    """Fills the chunks of `state` from a checkpoint of any layout; no communication.

    Everything read is verified first. Values of another type are converted. Raises
    UnreadableCheckpoint, and DamagedCheckpoint, also if the checkpoint lacks wanted values; `state`
    may then be half filled.
    """
    reader = _Reader(folder)
    try:
        dcp.load(dict(state), storage_reader=reader, planner=FillPlanner(), no_dist=True)
    except CheckpointException as error:
        _raise_cause(error)
    return reader.manifest


def read_full(folder: Path, kinds: tuple[str, ...] = ("parameter",)) -> dict[str, Tensor]:
    """Returns `kind/name` → full, unpadded CPU tensor, verified; for models that fit one process.

    Kinds are "parameter", "ema" and the optimizer's "exp_avg", "exp_avg_sq" or "momentum"; kinds
    that the checkpoint lacks are left out. Raises as `read_state`.
    """
    stored = [b for b in _Reader(folder).stored if b.name.partition("/")[0] in kinds]
    shapes = _covered(folder, stored)  # so that a header cannot demand more memory than its file
    state = full_tensors(shapes, {b.name: b.dtype for b in stored})
    read_state(folder, state)
    return {name: tensor.chunks[0][1] for name, tensor in state.items()}


def stored_shapes(folder: Path) -> dict[str, tuple[int, ...]]:
    """Returns `kind/name` → full shape, of verified headers; raises as `read_state`."""
    return _covered(folder, _Reader(folder).stored)


def verify_checkpoint(folder: Path) -> Manifest:
    """Verifies every byte and that chunks cover each tensor once; raises as `read_state`."""
    reader = _Reader(folder)
    for file in reader.files:
        file.verify()
    _covered(folder, reader.stored)
    return reader.manifest


def _covered(folder: Path, chunks: list[StoredChunk]) -> dict[str, tuple[int, ...]]:
    """Returns the shapes of the tensors; raises DamagedCheckpoint if one is not complete."""
    elements: dict[str, int] = defaultdict(int)
    shapes = {b.name: b.full_shape for b in chunks}
    for stored in chunks:
        elements[stored.name] += stored.chunk.elements
    for name, shape in shapes.items():
        if elements[name] != math.prod(shape):
            raise DamagedCheckpoint(f"{folder.name} holds {elements[name]} elements of {name}")
    return shapes


def _raise_cause(error: CheckpointException) -> Never:
    """Raises what the only rank raised, which DCP wraps."""
    ((cause, _),) = error.failures.values()
    raise cause from None


class _Writer(StorageWriter):
    """Writes all items of a plan into one file, described by `written`."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def reset(self, checkpoint_id: Any = None) -> None:
        raise RuntimeError("a writer writes one file")

    def set_up_storage_writer(self, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        pass  # the folder exists

    def prepare_local_plan(self, plan: SavePlan) -> SavePlan:
        return plan

    def prepare_global_plan(self, plans: list[SavePlan]) -> list[SavePlan]:
        return plans

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        chunks = [_to_write(item, planner) for item in plan.items]
        self.written = write_tensor_file(self.path, chunks)
        results = [
            WriteResult(item.index, chunk.values.nbytes, None)
            for item, chunk in zip(plan.items, chunks, strict=True)
        ]
        return _done(results)

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        pass  # `saver` writes the manifest when every rank's file is there

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: Any) -> bool:
        return False


def _to_write(item: WriteItem, planner: SavePlanner) -> ChunkToWrite:
    data, values = item.tensor_data, planner.resolve_data(item)
    assert data is not None and isinstance(values, Tensor)  # of StatePlanner
    chunk = Chunk(tuple(data.chunk.offsets), tuple(data.chunk.sizes))
    local = values.detach().to("cpu").contiguous()
    return ChunkToWrite(item.index.fqn, chunk, tuple(data.size), local)


class _Reader(StorageReader):
    """Reads the chunks of a checkpoint; its manifest and headers are verified when it is made."""

    def __init__(self, folder: Path) -> None:
        self.manifest = read_manifest(folder)
        self.files = [TensorFile(folder, file) for file in self.manifest.files]
        self.stored = [stored for file in self.files for stored in file.chunks]

    def reset(self, checkpoint_id: Any = None) -> None:
        raise RuntimeError("a reader reads one checkpoint")

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        tensors: dict[str, TensorStorageMetadata] = {}
        self.places: dict[tuple[str, int | None], tuple[TensorFile, StoredChunk]] = {}
        for file in self.files:
            for stored in file.chunks:
                properties = TensorProperties(dtype=stored.dtype)
                size = torch.Size(stored.full_shape)
                tensor = tensors.setdefault(
                    stored.name, TensorStorageMetadata(properties, size, [])
                )
                if tensor.size != size:
                    raise DamagedCheckpoint(f"{file.path.name} disagrees on {stored.name}'s shape")
                self.places[stored.name, len(tensor.chunks)] = file, stored
                tensor.chunks.append(to_dcp(stored.chunk))
        return Metadata({**tensors})

    def set_up_storage_reader(
        self, metadata: Metadata, is_coordinator: bool, *args: Any, **kwargs: Any
    ) -> None:
        pass  # read_metadata has read everything

    def prepare_local_plan(self, plan: LoadPlan) -> LoadPlan:
        return plan

    def prepare_global_plan(self, plans: list[LoadPlan]) -> list[LoadPlan]:
        return plans

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        wanted: dict[tuple[str, int | None], list[ReadItem]] = defaultdict(list)
        for item in plan.items:
            if item.type is not LoadItemType.TENSOR:
                raise DamagedCheckpoint(f"{item.dest_index.fqn} is no tensor: it is not read")
            wanted[item.storage_index.fqn, item.storage_index.index].append(item)
        # In the order on the disk, each chunk once.
        order = sorted(wanted, key=lambda k: (self.places[k][0].path, self.places[k][1].at))
        largest = max((self.places[k][1].nbytes for k in order), default=0)
        buffer = bytearray(largest)
        for key in order:
            file, stored = self.places[key]
            values = file.read(stored, buffer)
            for item in wanted[key]:
                target = planner.resolve_tensor(item)
                target.copy_(narrow(values, item.storage_offsets, item.lengths))
                planner.commit_tensor(item, target)
        return _done(None)

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: Any) -> bool:
        return False


def _done(value: Any) -> Future:
    future: Future = Future()
    future.set_result(value)
    return future
