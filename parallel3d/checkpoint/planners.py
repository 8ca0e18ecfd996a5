"""Plans saves and loads: which chunks of full tensors lie in a rank's flat shards.

A checkpoint is independent of ranks, stages, buckets and shards: it holds chunks of full tensors. A
rank's state is flat (`chunks_of_range` in `parameters/sharding.py`).
"""

from __future__ import annotations

import math
import zlib
from collections.abc import Iterable, Mapping
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
    TensorStorageMetadata,
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
from parallel3d.parameters.sharding import Chunk, chunks_of_range

if TYPE_CHECKING:
    from parallel3d.optim import ParameterSlice


# Ranks that hold equal values divide a slice by rows if each gets at least so many elements. A
# smaller slice is written by one of them: with more, headers would outweigh values.
SHARED_ELEMENTS = 4096


@dataclass
class TensorChunks:
    """Holds this process's chunks of a full tensor, as contiguous views to read or write."""

    full_shape: tuple[int, ...]
    dtype: torch.dtype
    chunks: list[tuple[Chunk, Tensor]] = field(default_factory=list)


def share(part: ParameterSlice) -> tuple[int, int]:
    """Returns (first element, count) of the part of a slice that this holder writes.

    Counted from the slice's start. The holders of a slice write each element exactly once. They
    divide the local parameter at the ends of rows, wherever a slice begins: the two holders of a
    tied embedding may shard it differently.
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


def chunks_by_name(parts: Iterable[ParameterSlice], *, shared: bool) -> dict[str, TensorChunks]:
    """Returns `kind/name` → views of chunks; `shared`: without those that another rank writes."""
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


def full_tensors(
    shapes: Mapping[str, tuple[int, ...]], dtypes: Mapping[str, torch.dtype]
) -> dict[str, TensorChunks]:
    tensors = {}
    for name, shape in shapes.items():
        chunk = Chunk((0,) * len(shape), tuple(shape))
        values = torch.empty(shape, dtype=dtypes[name])
        tensors[name] = TensorChunks(tuple(shape), dtypes[name], [(chunk, values)])
    return tensors


class StatePlanner(SavePlanner):
    """Plans to write every chunk of the state."""

    def set_up_planner(
        self,
        state_dict: dict[str, TensorChunks],
        storage_meta: StorageMeta | None = None,
        is_coordinator: bool = False,
    ) -> None:
        self.state = state_dict

    def create_local_plan(self) -> SavePlan:
        return SavePlan(
            [
                WriteItem(
                    MetadataIndex(name, chunk.offsets, i),
                    WriteItemType.SHARD,
                    tensor_data=TensorWriteData(
                        chunk=to_dcp(chunk),
                        properties=TensorProperties(dtype=tensor.dtype),
                        size=torch.Size(tensor.full_shape),
                    ),
                )
                for name, tensor in self.state.items()
                for i, (chunk, _) in enumerate(tensor.chunks)
            ]
        )

    def create_global_plan(self, all_plans: list[SavePlan]) -> tuple[list[SavePlan], Metadata]:
        return all_plans, Metadata({})  # the files' headers have it

    def finish_plan(self, new_plan: SavePlan) -> SavePlan:
        return new_plan

    def resolve_data(self, write_item: WriteItem) -> Tensor:
        number = write_item.index.index
        assert number is not None  # set by create_local_plan
        return self.state[write_item.index.fqn].chunks[number][1]


class FillPlanner(LoadPlanner):
    """Plans to fill every chunk of the state from the stored chunks that overlap with it."""

    def set_up_planner(
        self,
        state_dict: dict[str, TensorChunks],
        metadata: Metadata | None = None,
        is_coordinator: bool = False,
    ) -> None:
        assert metadata is not None  # of `_Reader.read_metadata`
        self.state, self.stored = state_dict, metadata.state_dict_metadata

    def create_local_plan(self) -> LoadPlan:
        items: list[ReadItem] = []
        for name, tensor in self.state.items():
            stored = self.stored.get(name)
            if not isinstance(stored, TensorStorageMetadata):
                raise DamagedCheckpoint(f"the checkpoint holds no {name}")
            if tuple(stored.size) != tensor.full_shape:
                raise DamagedCheckpoint(
                    f"the checkpoint holds {name} of shape {tuple(stored.size)}, "
                    f"not {tensor.full_shape}"
                )
            chunks = [to_dcp(chunk) for chunk, _ in tensor.chunks]
            found = create_read_items_for_chunk_list(name, stored, chunks)
            covered = sum(math.prod(item.lengths) for item in found)
            if covered != sum(chunk.elements for chunk, _ in tensor.chunks):
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
        number = read_item.dest_index.index
        assert number is not None  # set by create_read_items_for_chunk_list
        _, values = self.state[read_item.dest_index.fqn].chunks[number]
        return narrow(values, read_item.dest_offsets, read_item.lengths)

    def commit_tensor(self, read_item: ReadItem, tensor: Tensor) -> None:
        pass  # it is a view of the state


def to_dcp(chunk: Chunk) -> ChunkStorageMetadata:
    return ChunkStorageMetadata(torch.Size(chunk.offsets), torch.Size(chunk.sizes))


def narrow(values: Tensor, offsets: torch.Size, lengths: torch.Size) -> Tensor:
    for dim, (offset, length) in enumerate(zip(offsets, lengths, strict=True)):
        values = values.narrow(dim, offset, length)
    return values
