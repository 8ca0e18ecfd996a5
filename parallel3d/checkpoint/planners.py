"""What `torch.distributed.checkpoint` plans by: every box of the state, to be written or filled."""

from __future__ import annotations

import math
from typing import Any

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

from parallel3d.checkpoint.boxes import Box, LogicalTensor
from parallel3d.checkpoint.manifest import DamagedCheckpoint


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
