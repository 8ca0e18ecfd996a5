"""Which boxes of the logical tensors lie in a range of a flattened local parameter: arithmetic.

A checkpoint knows nothing of ranks, stages, buckets or shards: it holds boxes of full tensors by
their logical names. A rank's state is flat (a bucket's shard may begin in the middle of a row), so
a range of a matrix is at most three boxes: the rest of a row, whole rows, the beginning of a row.
"""

from __future__ import annotations

import math
import zlib
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    StorageMeta,
    TensorProperties,
)
from torch.distributed.checkpoint.planner import (
    LoadPlan,
    LoadPlanner,
    ReadItem,
    SavePlan,
    SavePlanner,
    TensorWriteData,
    WriteItem,
    WriteItemType,
)
from torch.distributed.checkpoint.planner_helpers import create_read_items_for_chunk_list

from parallel3d.checkpoint.manifest import DamagedCheckpoint

if TYPE_CHECKING:
    from parallel3d.optim.optimizer import ParameterSlice
    from parallel3d.parameters.sharding import ParameterSpec, ShardSpec


# Holders of equal values share a slice by rows if each gets at least so many elements; of smaller
# ones each is written by one of them, or the file would be all names.
SHARED_ELEMENTS = 4096


@dataclass(frozen=True)
class Box:
    """A box of a logical tensor: its first index and its sizes, one number for each dimension."""

    offsets: tuple[int, ...]
    sizes: tuple[int, ...]

    @property
    def elements(self) -> int:
        return math.prod(self.sizes)


@dataclass
class LogicalTensor:
    """What this process has, or wants to have, of one logical tensor.

    `boxes` lie in contiguous views of the sizes' shape, to be read from or written to.
    """

    full_shape: tuple[int, ...]
    dtype: torch.dtype
    boxes: list[tuple[Box, Tensor]] = field(default_factory=list)


def boxes_of_range(
    spec: ParameterSpec, start: int, count: int
) -> Iterator[tuple[ShardSpec, Box, int]]:
    """The boxes in elements [start, start + count) of the flattened local parameter.

    Yields (piece, box, first element of the box, counted from `start`). What no piece covers is
    padding and is in no box. Raises ValueError for tensors of more than two dimensions and for
    pieces that are not whole rows of the local parameter.
    """
    width = math.prod(spec.shape[1:])
    for piece in spec.shards:
        if len(piece.shape) > 2 or math.prod(piece.shape[1:]) != width:
            raise ValueError(f"{piece.name}: {piece.shape} is not whole rows of {spec.shape}")
        first = piece.row * width
        low = max(start, first) - first
        high = min(start + count, first + piece.shape[0] * width) - first
        for box, at in _rectangles(piece, low, high):
            yield piece, box, first + at - start


def _rectangles(piece: ShardSpec, low: int, high: int) -> Iterator[tuple[Box, int]]:
    """Elements [low, high) of a piece as boxes of the full tensor, with their first element."""
    if low >= high:
        return
    if len(piece.shape) == 1:
        yield Box((piece.start[0] + low,), (high - low,)), low
        return
    width = piece.shape[1]
    # Up to the end of a begun row, whole rows, and what is left.
    cuts = [low, min(high, -(-low // width) * width), max(low, high // width * width), high]
    for a, b in zip(sorted(cuts), sorted(cuts)[1:], strict=False):
        if a == b:
            continue
        row, column = divmod(a, width)
        rows = (b - a) // width
        sizes = (rows, width) if rows else (1, b - a)
        yield Box((piece.start[0] + row, piece.start[1] + column), sizes), a


def share(part: ParameterSlice) -> tuple[int, int]:
    """(first element, number) of what this holder of a slice writes; together: each exactly once.

    Counted from the slice's own start. The local parameter is divided among its holders at the ends
    of rows, wherever a slice begins: the two holders of a tied table may shard it differently.
    """
    index, holders = part.replica
    count = next(iter(part.values.values())).numel()
    whole = math.prod(part.spec.shape)
    if whole < SHARED_ELEMENTS * holders:
        name = part.spec.shards[0].name if part.spec.shards else ""
        return (0, count) if zlib.crc32(name.encode()) % holders == index else (0, 0)
    rows, width = part.spec.shape[0], math.prod(part.spec.shape[1:])
    first = max(part.start, rows * index // holders * width)
    end = min(part.start + count, rows * (index + 1) // holders * width)
    return (first - part.start, end - first) if first < end else (0, 0)


def logical_tensors(parts: Iterable[ParameterSlice], *, shared: bool) -> dict[str, LogicalTensor]:
    """`kind/logical name` → what the slices hold of it, as views of their values.

    With `shared` only what this rank writes of values that several ranks hold (see `share`).
    """
    tensors: dict[str, LogicalTensor] = {}
    for part in parts:
        first, count = 0, next(iter(part.values.values())).numel()
        if shared:
            first, count = share(part)
        for piece, box, at in boxes_of_range(part.spec, part.start + first, count):
            for kind, flat in part.values.items():
                name = f"{kind}/{piece.name}"
                if name not in tensors:
                    tensors[name] = LogicalTensor(piece.full_shape, flat.dtype)
                view = flat[first + at : first + at + box.elements].view(box.sizes)
                tensors[name].boxes.append((box, view))
    return tensors


def whole_tensors(
    shapes: Mapping[str, tuple[int, ...]], dtypes: Mapping[str, torch.dtype]
) -> dict[str, LogicalTensor]:
    """Room for full tensors on the CPU, each a single box."""
    tensors = {}
    for name, shape in shapes.items():
        box = Box((0,) * len(shape), tuple(shape))
        values = torch.empty(shape, dtype=dtypes[name])
        tensors[name] = LogicalTensor(tuple(shape), dtypes[name], [(box, values)])
    return tensors


# What `torch.distributed.checkpoint` plans by: every box of the state, to be written or filled.


class StatePlanner(SavePlanner):
    """Every box of the state is an item to write."""

    def set_up_planner(
        self,
        state_dict: dict[str, LogicalTensor],
        storage_meta: StorageMeta | None = None,
        is_coordinator: bool = False,
    ) -> None:
        self.state = state_dict

    def create_local_plan(self) -> SavePlan:
        return SavePlan(
            [
                WriteItem(
                    MetadataIndex(name, box.offsets, i),
                    WriteItemType.SHARD,
                    tensor_data=TensorWriteData(
                        chunk=chunk_of(box),
                        properties=TensorProperties(dtype=tensor.dtype),
                        size=torch.Size(tensor.full_shape),
                    ),
                )
                for name, tensor in self.state.items()
                for i, (box, _) in enumerate(tensor.boxes)
            ]
        )

    def create_global_plan(self, all_plans: list[SavePlan]) -> tuple[list[SavePlan], Metadata]:
        return all_plans, Metadata({})  # the files' headers say it all

    def finish_plan(self, new_plan: SavePlan) -> SavePlan:
        return new_plan

    def resolve_data(self, write_item: WriteItem) -> Tensor:
        return self.state[write_item.index.fqn].boxes[write_item.index.index][1]


class FillPlanner(LoadPlanner):
    """Every box of the state is to be filled, from whatever stored boxes it meets."""

    def set_up_planner(
        self,
        state_dict: dict[str, LogicalTensor],
        metadata: Metadata | None = None,
        is_coordinator: bool = False,
    ) -> None:
        self.state, self.stored = state_dict, metadata.state_dict_metadata

    def create_local_plan(self) -> LoadPlan:
        items: list[ReadItem] = []
        for name, tensor in self.state.items():
            stored = self.stored.get(name)
            if stored is None:
                raise DamagedCheckpoint(f"the checkpoint holds no {name}")
            if tuple(stored.size) != tensor.full_shape:
                raise DamagedCheckpoint(
                    f"the checkpoint holds {name} of shape {tuple(stored.size)}, "
                    f"not {tensor.full_shape}"
                )
            chunks = [chunk_of(box) for box, _ in tensor.boxes]
            found = create_read_items_for_chunk_list(name, stored, chunks)
            covered = sum(math.prod(item.lengths) for item in found)
            if covered != sum(box.elements for box, _ in tensor.boxes):
                raise DamagedCheckpoint(f"the checkpoint does not hold all of {name} exactly once")
            items += found
        return LoadPlan(items)

    def create_global_plan(self, global_plan: list[LoadPlan]) -> list[LoadPlan]:
        return global_plan

    def finish_plan(self, central_plan: LoadPlan) -> LoadPlan:
        return central_plan

    def load_bytes(self, read_item: ReadItem, value: Any) -> None:
        raise DamagedCheckpoint(f"{read_item.dest_index.fqn} is no tensor: it is not read")

    def resolve_tensor(self, read_item: ReadItem) -> Tensor:
        _, values = self.state[read_item.dest_index.fqn].boxes[read_item.dest_index.index]
        return narrowed(values, read_item.dest_offsets, read_item.lengths)

    def commit_tensor(self, read_item: ReadItem, tensor: Tensor) -> None:
        pass  # it is a view of the state


def chunk_of(box: Box) -> ChunkStorageMetadata:
    return ChunkStorageMetadata(torch.Size(box.offsets), torch.Size(box.sizes))


def narrowed(values: Tensor, offsets: torch.Size, lengths: torch.Size) -> Tensor:
    for dim, (offset, length) in enumerate(zip(offsets, lengths, strict=True)):
        values = values.narrow(dim, offset, length)
    return values
