"""Named ranges of what a rank does, as profilers show them."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch.profiler import record_function

from parallel3d.device import accelerator


class Ranges:
    """Opens and closes ranges of `torch.profiler` and, on CUDA, the same ones of NVTX for nsys.

    They nest: `pop` closes the newest. The thread that opens one must close it; while autograd's
    own thread has ranges open, the thread that called the backward waits.
    """

    def __init__(self, device: torch.device) -> None:
        on_device = accelerator.is_accelerator(device)
        self.nvtx = getattr(accelerator.module(device), "nvtx", None) if on_device else None
        self._open: list[record_function] = []

    def push(self, name: str) -> None:
        """Opens a range."""
        opened = record_function(name)
        opened.__enter__()
        self._open.append(opened)
        if self.nvtx is not None:
            self.nvtx.range_push(name)

    def pop(self) -> None:
        """Closes the newest range that is open."""
        if self.nvtx is not None:
            self.nvtx.range_pop()
        self._open.pop().__exit__(None, None, None)

    @contextmanager
    def within(self, name: str) -> Iterator[None]:
        """`push` and `pop` around a block."""
        self.push(name)
        try:
            yield
        finally:
            self.pop()
