"""Something is wrong on one rank: all of them say so, in one sentence."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from parallel3d.comm.exchange import all_gather_json
from parallel3d.comm.group import Group
from parallel3d.device import accelerator


class BackwardFlags:
    """Raises on every rank what one of them found in a backward, a sum of flags telling the others.

    On a CPU at the end of that backward. An accelerator would have to be waited for, so there the
    flags are read when the next backward begins, by which time they are known.

    Attributes:
        fault: this rank's finding of the backward that goes on.
    """

    def __init__(self, group: Group, device: torch.device) -> None:
        self.group, self.device = group, device
        self.fault: str | None = None
        self.noted: tuple[str | None, Tensor, Any] | None = None

    def found(self, sentence: str) -> None:
        """Something is wrong here; the first finding of a backward is the one that is told."""
        self.fault = self.fault or sentence

    def note(self, flag: Tensor, other: str | None) -> None:
        """The backward has ended; `flag` (1,) is above zero if any rank found something, and
        `other` a finding of the transport."""
        finding, self.fault = self.fault or other, None
        event = None
        if accelerator.is_accelerator(self.device):
            flag = flag.to("cpu", non_blocking=True)
            event = accelerator.module(self.device).Event()
            event.record()
        self.noted = (finding, flag, event)
        if event is None:
            self.check()

    def check(self) -> None:
        """Collective where something is wrong. Raises RuntimeError on every rank alike."""
        if self.noted is None:
            return
        (finding, flag, event), self.noted = self.noted, None
        if event is not None:
            event.synchronize()
        if flag.item() > 0:
            everyone = all_gather_json(finding, self.group.handle, self.device)
            rank, said = next((r, s) for r, s in enumerate(everyone) if s)
            raise RuntimeError(f"rank {self.group.ranks[rank]}: {said}")
