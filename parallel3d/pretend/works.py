"""Handles of what is under way on a pretended communicator."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import Future
from typing import Any

import torch.distributed as dist
from torch import Tensor

from parallel3d.pretend.device import Stream, this_machine
from parallel3d.pretend.tensor import PretendedTensor


class Together(dist.Work):
    """The handle of several messages."""

    def __init__(self, works: Sequence[Any]) -> None:
        super().__init__()
        self.works = works

    def wait(self, timeout: Any = None) -> bool:
        for work in self.works:
            work.wait()
        return True

    def is_completed(self) -> bool:
        return all(work.is_completed() for work in self.works)


class Started(dist.Work):
    """A collective under way.

    Args:
        done: gives what belongs into `outputs`; None: nothing does.
        held: tensors that live until somebody has waited.
    """

    def __init__(
        self,
        stream: Stream,
        done: Future[Sequence[Tensor]] | None,
        outputs: Sequence[PretendedTensor],
        held: Any,
    ) -> None:
        super().__init__()
        self.done, self.outputs, self.held = done, outputs, held
        self.behind = stream.record_event()
        self.ended = False
        this_machine().once_known(stream.number, self.end)

    def end(self) -> None:
        """Puts the results in their place; waits for the other members."""
        if self.ended or (self.done is not None and self.done.cancelled()):  # with its group
            return
        self.ended = True
        if self.done is not None:
            for output, value in zip(self.outputs, self.done.result(), strict=True):
                output.data_.copy_(value.view(output.shape))
        self.outputs = ()  # the machine keeps this handle until the host has waited

    def wait(self, timeout: Any = None) -> bool:
        self.end()
        self.behind.wait()
        self.held = None
        return True

    synchronize = wait

    def is_completed(self) -> bool:
        return self.ended
