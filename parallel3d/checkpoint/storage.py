"""Reads and writes the tensors of a checkpoint: safetensors files with digests, without pickle.

A rank's part of a checkpoint is one file:

    length of the header (8 bytes) | header, JSON | the chunks' bytes, concatenated

The header lists every chunk as `kind/name/first row,first column`, with its dtype, shape and
offset; `__metadata__` holds the full shapes and a SHA-256 of each chunk. The checkpoint's manifest
holds the SHA-256 of the length and the header, so that digests cover every byte. A reader verifies
exactly the chunks that it reads, once they are in memory. Any safetensors reader can open the file.

A checkpoint does not depend on ranks, stages, buckets or shards: it holds chunks of full tensors,
and a reader intersects the chunks that it wants with the stored ones. Each rank computes which
elements it has to write (`share`), so a save needs no communication and may run in a thread.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
import zlib
from collections import defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from parallel3d.checkpoint.manifest import (
    DamagedCheckpoint,
    FileDigest,
    Manifest,
    read_manifest,
    unreadable,
)
from parallel3d.files import new_file, open_regular, parse_json, read_into, write_all
from parallel3d.parameters.segments import Chunk, chunks_of_range

if TYPE_CHECKING:
    from parallel3d.parameters.slices import ParameterSlice

# Ranks that hold equal values divide a parameter by rows if each rank gets at least this many
# elements. A smaller parameter is written by a single rank, because the headers of its chunks would
# outweigh their values.
SHARED_ELEMENTS = 4096
_LENGTH = 8  # bytes of the field with the header's length
# Bytes, including the field with the length; enough for a quarter of a million chunks.
_LARGEST_HEADER = 64 << 20
_MOST = 1 << 60  # maximum number of elements of a tensor
# Number of bytes that are hashed, and then written while they are still in the CPU's cache.
_BLOCK = 4 << 20
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


@dataclass
class TensorChunks:
    """Holds this process's chunks of a full tensor, as contiguous views to read or write."""

    full_shape: tuple[int, ...]
    dtype: torch.dtype
    chunks: list[tuple[Chunk, Tensor]] = field(default_factory=list)

    @classmethod
    def whole(cls, values: Tensor) -> TensorChunks:
        """Returns a full tensor as a single chunk."""
        shape = tuple(values.shape)
        return cls(shape, values.dtype, [(Chunk((0,) * len(shape), shape), values)])


State = dict[str, TensorChunks]


def share(part: ParameterSlice) -> tuple[int, int]:
    """Returns (first element, count) of the part of a slice that this rank writes.

    The first element is relative to the slice's start. The ranks that hold the same values write
    each element exactly once between them. They divide the local parameter by whole rows,
    regardless of where a slice begins, because the two holders of a tied embedding may shard it
    differently.
    """
    index, holders = part.copies.index, part.copies.count
    count = next(iter(part.values.values())).numel()
    whole = math.prod(part.spec.shape)
    if whole < SHARED_ELEMENTS * holders:
        name = part.spec.shards[0].name if part.spec.shards else ""
        return (0, count) if zlib.crc32(name.encode()) % holders == index else (0, 0)
    rows, width = part.spec.shape[0], math.prod(part.spec.shape[1:])
    first = max(part.start, rows * index // holders * width)
    end = min(part.start + count, rows * (index + 1) // holders * width)
    return (first - part.start, end - first) if first < end else (0, 0)


def chunks_by_name(parts: Iterable[ParameterSlice], *, shared: bool) -> dict[str, TensorChunks]:
    """Returns this rank's chunks by `kind/name`, as views of its slices.

    With `shared`, leaves out the elements that another rank with the same values writes.
    """
    tensors: dict[str, TensorChunks] = {}
    for part in parts:
        first, count = 0, next(iter(part.values.values())).numel()
        if shared:
            first, count = share(part)
        for shard, chunk, at in chunks_of_range(part.spec, part.start + first, count):
            for kind, flat in part.values.items():
                name = f"{kind}/{shard.name}"
                if name not in tensors:
                    tensors[name] = TensorChunks(shard.full_shape, flat.dtype)
                view = flat[first + at : first + at + chunk.elements].view(chunk.sizes)
                tensors[name].chunks.append((chunk, view))
    return tensors


def write_state(path: Path, state: State) -> FileDigest:
    """Writes chunks and their digests to a new file, and flushes it.

    Only the owner can read the file. Raises OSError.
    """
    parts = {
        f"{name}/{','.join(map(str, chunk.offsets))}": values
        for name, tensor in state.items()
        for chunk, values in tensor.chunks
    }
    if len(parts) != sum(len(tensor.chunks) for tensor in state.values()):
        raise ValueError("a chunk is given twice")
    full_shapes = {name: list(tensor.full_shape) for name, tensor in state.items()}
    digests = dict.fromkeys(parts, bytes(hashlib.sha256().digest_size).hex())
    start = len(_header(full_shapes, parts, digests))  # the length does not depend on the digests
    with new_file(path) as descriptor:
        os.lseek(descriptor, start, os.SEEK_SET)
        for name, values in parts.items():
            digests[name] = _write_chunk(descriptor, values)
        size = os.lseek(descriptor, 0, os.SEEK_CUR)
        header = _header(full_shapes, parts, digests)
        write_all(descriptor, memoryview(header), at=0)
        os.fsync(descriptor)
    return FileDigest(path.name, size, hashlib.sha256(header).hexdigest())


def _header(
    full_shapes: dict[str, list[int]], parts: dict[str, Tensor], digests: dict[str, str]
) -> bytes:
    """Returns the header: its length and JSON, padded with spaces to align chunks to 8 bytes."""
    ours = json.dumps({"full_shapes": full_shapes, "sha256": digests})
    header: dict[str, Any] = {"__metadata__": {"parallel3d": ours}}
    at = 0
    for name, values in parts.items():
        place = [at, at := at + values.nbytes]
        shape = list(values.shape)
        header[name] = {"dtype": _NAMES[values.dtype], "shape": shape, "data_offsets": place}
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(_LENGTH, "little") + text


def _write_chunk(descriptor: int, values: Tensor) -> str:
    """Writes the values at the file's current position and returns their digest."""
    digest = hashlib.sha256()
    local = values.detach().to("cpu").contiguous().reshape(-1).view(torch.uint8)
    view = memoryview(local.numpy())  # type: ignore[arg-type]
    for start in range(0, len(view), _BLOCK):
        block = view[start : start + _BLOCK]
        digest.update(block)
        write_all(descriptor, block)
    return digest.hexdigest()


@dataclass(frozen=True, order=True)
class StoredChunk:
    """Describes a stored chunk of a full tensor; chunks sort by their order on the disk.

    Attributes:
        path: path of the file.
        at: position of the chunk's first byte in the file.
        name: `kind/name` of the tensor.
        chunk: place of the chunk in the full tensor.
        full_shape, dtype: shape and dtype of the full tensor.
        digest: SHA-256 of the chunk's bytes, in hexadecimal.
    """

    path: Path
    at: int
    name: str
    chunk: Chunk
    full_shape: tuple[int, ...]
    dtype: torch.dtype
    digest: str

    @property
    def nbytes(self) -> int:
        return self.chunk.elements * self.dtype.itemsize

    def read(self, buffer: bytearray) -> Tensor:
        """Reads the values into `buffer`, which must be large enough; verifies and returns them."""
        file, view = _name(self.path), memoryview(buffer)[: self.nbytes]
        try:
            with unreadable(file), open_regular(self.path) as descriptor:
                done = read_into(descriptor, view, self.at)
        except ValueError as error:
            raise DamagedCheckpoint(f"{file} is no longer a regular file ({error})") from error
        if done < len(view) or hashlib.sha256(view).hexdigest() != self.digest:
            what = f"{self.name} at {self.chunk.offsets}"
            raise DamagedCheckpoint(f"{file}: {what} is not what was written")
        flat = torch.frombuffer(buffer, dtype=self.dtype, count=self.chunk.elements)
        return flat.view(self.chunk.sizes)


def _name(path: Path) -> str:
    return f"{path.parent.name}/{path.name}"


def _chunks_in(path: Path, expected: FileDigest) -> list[StoredChunk]:
    """Returns the chunks that a file's verified header lists; raises as `read_state` does."""
    file = _name(path)
    try:
        with unreadable(file), open_regular(path) as descriptor:
            length = bytearray(_LENGTH)
            read_into(descriptor, memoryview(length), 0)
            size = _LENGTH + int.from_bytes(length, "little")
            if size > min(_LARGEST_HEADER, expected.size):
                raise ValueError("the header is longer than the file or the limit")
            header = bytearray(size)
            read_into(descriptor, memoryview(header), 0)
        if hashlib.sha256(header).hexdigest() != expected.header:
            raise DamagedCheckpoint(f"{file} has a header that is not what was written")
        return list(_parsed(bytes(header), path, expected.size))
    except (ValueError, KeyError, TypeError, AttributeError, OverflowError) as error:
        raise DamagedCheckpoint(
            f"{file} is not a checkpoint file written by parallel3d ({error!r})"
        ) from error


def _parsed(header: bytes, path: Path, size: int) -> Iterator[StoredChunk]:
    """Yields the chunks that a header lists, and checks each value.

    A valid digest does not prove that the content makes sense.
    """
    content = parse_json(header[_LENGTH:])
    ours = parse_json(content.pop("__metadata__")["parallel3d"].encode())
    at = len(header)
    for key, entry in content.items():
        name, _, offsets = key.rpartition("/")
        first = tuple(int(o) for o in offsets.split(","))
        chunk = Chunk(first, tuple(int(n) for n in entry["shape"]))
        full = tuple(int(n) for n in ours["full_shapes"][name])
        fits = all(end <= n for end, n in zip(chunk.ends, full, strict=True))
        if not fits or math.prod(full) > _MOST or min(first) < 0 or min(chunk.sizes) < 1:
            raise ValueError(f"{key} is not a chunk of {full}")
        stored = StoredChunk(
            path, at, name, chunk, full, DTYPES[entry["dtype"]], ours["sha256"][key]
        )
        at += stored.nbytes
        if entry["data_offsets"] != [stored.at - len(header), at - len(header)]:
            raise ValueError(f"{key} is not stored where its predecessor ends")
        yield stored
    if at != size:
        raise ValueError(f"the chunks end at byte {at}, but the file has {size} bytes")


def read_state(folder: Path, state: State) -> Manifest:
    """Fills the chunks of `state` from a checkpoint of any layout, without communication.

    All values are verified before they are copied, and converted if the dtype differs.

    Raises:
        DamagedCheckpoint: the checkpoint is damaged, or lacks some of the values; `state` may
            already be partly filled.
        UnreadableCheckpoint: the system cannot read a file; `state` may be partly filled too.
    """
    manifest, stored = _opened(folder)
    # Stored chunk → its wanted parts: (values to fill, their chunk, the overlap of both chunks).
    wanted: dict[StoredChunk, list[tuple[Tensor, Chunk, Chunk]]] = defaultdict(list)
    for name, tensor in state.items():
        there = stored.get(name)
        if there is None:
            raise DamagedCheckpoint(f"the checkpoint holds no {name}")
        if there[0].full_shape != tensor.full_shape:
            raise DamagedCheckpoint(
                f"the checkpoint holds {name} of shape {there[0].full_shape}, "
                f"not {tensor.full_shape}"
            )
        left = 0
        for chunk, values in tensor.chunks:
            left += chunk.elements
            for source in there:
                if (both := chunk.overlap(source.chunk)) is not None:
                    wanted[source].append((values, chunk, both))
                    left -= both.elements
        if left != 0:
            raise DamagedCheckpoint(f"the checkpoint does not hold all of {name} exactly once")
    buffer = bytearray(max((source.nbytes for source in wanted), default=0))
    for source in sorted(wanted):
        read = source.read(buffer)
        for values, chunk, both in wanted[source]:
            both.of(values, chunk.offsets).copy_(both.of(read, source.chunk.offsets))
    return manifest


def read_full(folder: Path, kinds: tuple[str, ...] = ("parameter",)) -> dict[str, Tensor]:
    """Returns the full, unpadded and verified tensors by `kind/name`, on the CPU.

    All tensors must fit into the memory of one process. Kinds are "parameter", "ema", "state" and
    the optimizer's "exp_avg", "exp_avg_sq" and "momentum"; kinds that the checkpoint lacks are left
    out. Raises as `read_state` does.
    """
    first = {n: s[0] for n, s in _opened(folder)[1].items() if n.partition("/")[0] in kinds}
    empty = {name: torch.empty(s.full_shape, dtype=s.dtype) for name, s in first.items()}
    read_state(folder, {name: TensorChunks.whole(values) for name, values in empty.items()})
    return empty


def stored_shapes(folder: Path) -> dict[str, tuple[int, ...]]:
    """Returns full shapes by `kind/name` from verified headers; raises as `read_state` does."""
    return {name: chunks[0].full_shape for name, chunks in _opened(folder)[1].items()}


def verify_checkpoint(folder: Path) -> Manifest:
    """Verifies every byte of a checkpoint, and checks that no element of a tensor is missing.

    Returns the manifest; raises as `read_state` does.
    """
    manifest, stored = _opened(folder)
    chunks = [chunk for some in stored.values() for chunk in some]
    buffer = bytearray(max((chunk.nbytes for chunk in chunks), default=0))
    for chunk in sorted(chunks):
        chunk.read(buffer)
    return manifest


def _opened(folder: Path) -> tuple[Manifest, dict[str, list[StoredChunk]]]:
    """Verifies the manifest and the headers, and checks that each tensor is complete.

    Returns the manifest and each tensor's chunks by `kind/name`.
    """
    manifest = read_manifest(folder)
    stored: dict[str, list[StoredChunk]] = defaultdict(list)
    for digest in manifest.files:
        for chunk in _chunks_in(folder / digest.name, digest):
            stored[chunk.name].append(chunk)
    for name, chunks in stored.items():
        elements, shapes = sum(c.chunk.elements for c in chunks), {c.full_shape for c in chunks}
        # The check also ensures that a header cannot demand more memory than its file has bytes.
        if shapes != {chunks[0].full_shape} or elements != math.prod(chunks[0].full_shape):
            raise DamagedCheckpoint(
                f"{folder.name} holds {elements} elements of {name}, not the whole tensor"
            )
    return manifest, dict(stored)
