"""A copy of what a save writes, so that training can go on while it is written.

The copy itself is made while the next step computes its gradients: parameters and moments stay as
they are until its update, which waits for the copy (`Trainer.before_update`).
"""

from __future__ import annotations

import dataclasses

import torch

from parallel3d.checkpoint.boxes import LogicalTensor

_ALIGNED = 64  # bytes: every staged box begins at a multiple


class Staging:
    """A copy of the boxes in CPU memory that is kept, and touched before the first save."""

    def __init__(self) -> None:
        self.buffer = torch.empty(0, dtype=torch.uint8)

    def prepare(self, state: dict[str, LogicalTensor]) -> None:
        """Make room for `state`: pinned where the boxes are on a GPU, so that copies are fast."""
        boxes = [values for tensor in state.values() for _, values in tensor.boxes]
        room = sum(_padded(values.nbytes) for values in boxes)
        if room > self.buffer.numel():
            pinned = any(values.is_cuda for values in boxes)
            self.buffer = torch.zeros(room, dtype=torch.uint8, pin_memory=pinned)

    def copy(self, state: dict[str, LogicalTensor]) -> dict[str, LogicalTensor]:
        """The same boxes with their present values, in the buffer."""
        self.prepare(state)
        copied, sources, targets, at = {}, [], [], 0
        for name, tensor in state.items():
            copied[name] = dataclasses.replace(tensor, boxes=[])
            for box, values in tensor.boxes:
                target = self.buffer[at : at + values.nbytes].view(values.dtype).view(values.shape)
                copied[name].boxes.append((box, target))
                sources.append(values)
                targets.append(target)
                at += _padded(values.nbytes)
        if sources and sources[0].is_cuda:
            side = torch.cuda.Stream(sources[0].device)
            side.wait_stream(torch.cuda.default_stream(sources[0].device))
            with torch.cuda.stream(side):
                torch._foreach_copy_(targets, sources, non_blocking=True)
            side.synchronize()
        elif sources:
            torch._foreach_copy_(targets, sources)
        return copied


def _padded(size: int) -> int:
    return -(-size // _ALIGNED) * _ALIGNED
