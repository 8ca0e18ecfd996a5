"""`torch.distributed.checkpoint` (DCP) over our own files: planners, storage writer and reader.

DCP plans which box goes where, intersects what is stored with what is wanted, and drives the
sequence; its own storage pickles its metadata, so ours writes safetensors and JSON instead
(`tensor_file`, `manifest`). Every rank plans for itself: names and indices are those of the logical
tensors, which element is whose is arithmetic (`boxes.share`), and so a save needs no communication
of DCP's and may run in a background thread.
"""

from __future__ import annotations

import math
import warnings
from collections import defaultdict
from collections.abc import Mapping
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

from parallel3d.checkpoint.boxes import Box, LogicalTensor, whole_tensors
from parallel3d.checkpoint.manifest import DamagedCheckpoint, FileDigest, Manifest, read_manifest
from parallel3d.checkpoint.planners import FillPlanner, StatePlanner, chunk_of, narrowed
from parallel3d.checkpoint.tensor_file import BoxToWrite, StoredBox, TensorFile, write_tensor_file

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
