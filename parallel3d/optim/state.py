"""What a checkpoint saves of one rank: slices of parameters with their optimizer state."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from torch import Tensor

from parallel3d.comm.process_groups import ProcessGroups
from parallel3d.optim.optimizer import Optimizer
from parallel3d.parameters.pieces import ParameterSpec
from parallel3d.parameters.segments import SegmentPart


@dataclass(frozen=True)
class ParameterSlice:
    """A run of one local parameter's elements, with all that its optimizer knows of them.

    Attributes:
        name: local parameter name; spec: the boxes of logical tensors that the parameter holds.
        start: first element of the slice in the flattened local parameter.
        values: flat live views of equal length, fp32 or better: "parameter" (the master) and the
            optimizer's "exp_avg" and "exp_avg_sq", or "momentum".
        replica: (this rank's number, how many) among the ranks that hold these very elements with
            equal bits.
    """

    name: str
    spec: ParameterSpec
    start: int
    values: dict[str, Tensor]
    replica: tuple[int, int]


def parameter_slices(
    optimizer: Optimizer, groups: ProcessGroups, replicas: tuple[int, int], tied: bool
) -> list[ParameterSlice]:
    """Everything that this rank steps, in no particular order.

    Args:
        replicas: (number, count) among the dp ranks that step the same elements.
        tied: first and last stage of a pipeline both hold the word table.
    """
    found = []
    for group in optimizer.groups:
        state = zip(*group.state.values(), strict=True) if group.state else [()] * len(group.steps)
        for segment, moments in zip(group.segments, state, strict=True):
            values = dict(zip(("parameter", *group.state), (segment.master, *moments), strict=True))
            for part, offset in _with_offsets(segment.parts):
                for first, end, copies in part.spec.runs(part.start, part.numel):
                    views = {k: v[offset + first : offset + end] for k, v in values.items()}
                    replica = _replica(part.spec, copies, groups, replicas, tied)
                    start = part.start + first
                    found.append(ParameterSlice(part.name, part.spec, start, views, replica))
    return found


def _with_offsets(parts: list[SegmentPart]) -> Iterator[tuple[SegmentPart, int]]:
    offset = 0
    for part in parts:
        yield part, offset
        offset += part.numel


def _replica(
    spec: ParameterSpec, copies: int, groups: ProcessGroups, replicas: tuple[int, int], tied: bool
) -> tuple[int, int]:
    number, count = replicas
    if spec.replicated:
        copies = groups.tp.size
    number, count = number * copies + groups.tp.index % copies, count * copies
    if tied and spec.is_word_table:
        number, count = number * 2 + int(spec.tied_copy), count * 2
    return number, count
