"""A copy of what a save writes, so that training can go on while it is written.

The copy itself is made while the next step computes its gradients: parameters and moments stay as
they are until its update, which waits for the copy (`Trainer.before_update`).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from parallel3d.checkpoint.boxes import Box, LogicalTensor
from parallel3d.device import accelerator

_ALIGNED = 64  # bytes: every staged box begins at a multiple
# Bytes. torch pins a power of two: in one piece 33 GiB would take 64 of the host's memory.
SLAB = 1 << 30

State = dict[str, LogicalTensor]


class Staging:
    """Room in CPU memory for copies of boxes, kept from save to save.

    One copy is in it at a time: whoever calls `copy` again has done with the last one, which is
    overwritten (`Saver.start` waits for the save before).
    """

    def __init__(self) -> None:
        self.slabs: list[Tensor] = []  # uint8, pinned for boxes on an accelerator
        self.stream: Any = None  # for copies beside the training

    def prepare(self, state: State) -> None:
        """Make room for `state`, if there is not enough.

        It is filled, or pinned, here and not in the middle of a step: at half a second a GB.
        """
        pinned = accelerator.is_accelerator(device_of(state))
        _, sizes = _places([part.nbytes for _, _, part in _parts(state)])
        for i, size in enumerate(sizes):
            if i < len(self.slabs) and self.slabs[i].numel() >= size:
                continue
            slab = torch.empty(size, dtype=torch.uint8, pin_memory=pinned)
            self.slabs[i : i + 1] = [slab if pinned else slab.zero_()]

    def now(self, state: State) -> Any:
        """Where the values of `state` are those to be saved: an event, to be recorded by the thread
        that computes them; None for the CPU's, whose values are there."""
        device = device_of(state)
        if not accelerator.is_accelerator(device):
            return None
        event = accelerator.module(device).Event()
        event.record(accelerator.module(device).current_stream(device))
        return event

    def copy(self, state: State, ready: Any = None) -> State:
        """The same values, in the slabs; boxes larger than a slab are cut by rows.

        From an accelerator they are copied on a stream of their own, behind `ready` (of `now`): not
        behind what was queued since. At the return all is copied, or nothing writes any more.
        """
        self.prepare(state)
        parts = list(_parts(state))
        places, _ = _places([part.nbytes for _, _, part in parts])
        copied = {name: dataclasses.replace(tensor, boxes=[]) for name, tensor in state.items()}
        pairs = []
        for (name, box, source), (slab, at) in zip(parts, places, strict=True):
            room = self.slabs[slab][at : at + source.nbytes]
            target = room.view(source.dtype).view(source.shape)
            copied[name].boxes.append((box, target))
            pairs.append((target, source))
        if ready is not None:
            self._copy_beside(pairs, device_of(state), ready)
        elif pairs:
            targets, sources = zip(*pairs, strict=True)
            torch._foreach_copy_(targets, sources)
        return copied

    def _copy_beside(
        self, pairs: Sequence[tuple[Tensor, Tensor]], device: torch.device, ready: Any
    ) -> None:
        if self.stream is None:
            self.stream = accelerator.module(device).Stream(device)
        self.stream.wait_event(ready)
        try:
            with accelerator.on_stream(self.stream):
                for target, source in pairs:
                    target.copy_(source, non_blocking=True)
        finally:  # also if one cannot be queued: the slabs are written to until here
            self.stream.synchronize()


def device_of(state: State) -> torch.device:
    """Where the values of `state` are; the CPU if it has none."""
    boxes = (values for tensor in state.values() for _, values in tensor.boxes)
    return next((values.device for values in boxes), torch.device("cpu"))


def _parts(state: State) -> Iterator[tuple[str, Box, Tensor]]:
    """(name, box, values) of every box, cut by rows to parts that fit a slab."""
    for name, tensor in state.items():
        for box, values in tensor.boxes:
            if values.nbytes <= SLAB:
                yield name, box, values
                continue
            rows = max(1, SLAB // values[0].nbytes)
            for first in range(0, box.sizes[0], rows):
                part = values[first : first + rows]
                start = (box.offsets[0] + first, *box.offsets[1:])
                yield name, Box(start, tuple(part.shape)), part


def _places(sizes: Sequence[int]) -> tuple[list[tuple[int, int]], list[int]]:
    """(slab, first byte) of each part, and the bytes of each slab.

    The largest first, each into the first slab with room: little is left over.
    """
    places, used = [(0, 0)] * len(sizes), []
    for i in sorted(range(len(sizes)), key=lambda i: -sizes[i]):
        room = _padded(sizes[i])
        fitting = (slab for slab, taken in enumerate(used) if taken + room <= SLAB)
        slab = next(fitting, len(used))
        if slab == len(used):
            used.append(0)
        places[i] = (slab, used[slab])
        used[slab] += room
    return places, used


def _padded(size: int) -> int:
    return -(-size // _ALIGNED) * _ALIGNED
