"""The memory of the ranks' accelerators: how much a layout needs in truth."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch

from parallel3d.device import accelerator


class PeakMemory(NamedTuple):
    """Bytes of one rank's device, each the most at one time since the process began.

    allocated: of tensors. reserved: what the allocator took from the device for them, with gaps.
    """

    allocated: int
    reserved: int


def peak_memory(device: torch.device) -> PeakMemory | None:
    """This rank's so far; None on the CPU, whose memory nobody counts. No synchronisation."""
    if not accelerator.is_accelerator(device):
        return None
    api = accelerator.module(device)
    return PeakMemory(api.max_memory_allocated(device), api.max_memory_reserved(device))


def summary_of(ranks: Sequence[PeakMemory]) -> dict[str, Any]:
    """What summary.json says of them."""
    return {
        "unit": "bytes, the most at one time",
        "ranks": [{"rank": rank, **memory._asdict()} for rank, memory in enumerate(ranks)],
    }
