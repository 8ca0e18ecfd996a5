"""Flat runs of parameters that are treated alike: what holds them makes these, the optimizer steps
them, and checkpoints save what lies in them."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NamedTuple

from torch import Tensor

from parallel3d.parameters.pieces import ParameterSpec


class SegmentPart(NamedTuple):
    """Elements `start` … `start + numel` of a flattened local parameter, inside a segment."""

    name: str
    spec: ParameterSpec
    start: int
    numel: int


@dataclass
class Segment:
    """A run of parameters that are treated alike, as far as this rank steps them.

    Attributes:
        param: flat, in the compute type; grad: flat, fp32 or better.
        master: what the optimizer steps: `param` itself where that is fp32 or better.
        decays: weight decay applies.
        replicated: every tp rank holds the same values (see ParameterSpec).
        tied_copy: belongs to a table that the first stage owns.
        parts: what lies in it, in order.
    """

    param: Tensor
    grad: Tensor
    master: Tensor
    decays: bool
    replicated: bool
    tied_copy: bool
    parts: list[SegmentPart] = field(default_factory=list)

    def runs(self) -> list[tuple[slice, int]]:
        """All elements in order, cut where the number of tp ranks in a row that share them changes
        (`Piece.copies`)."""
        found: list[tuple[slice, int]] = []
        offset = 0
        for part in self.parts:
            for first, end, copies in part.spec.runs(part.start, part.numel):
                begin = offset + first
                if found and found[-1][1] == copies:
                    begin = found.pop()[0].start
                found.append((slice(begin, offset + end), copies))
            offset += part.numel
        return found
