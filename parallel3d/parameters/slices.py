"""Lists the parameters that a rank steps as runs of elements with optimizer state, for
checkpoints."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from torch import Tensor

from parallel3d.optim.optimizer import FlatGroup
from parallel3d.parameters.copies import Copies
from parallel3d.parameters.spec import ParameterSpec


@dataclass(frozen=True)
class ParameterSlice:
    """A run of one local parameter's elements, with their optimizer state.

    Attributes:
        start: first element of the slice in the flattened local parameter.
        values: flat live views of equal length, fp32 or better: "parameter" (the master) and the
            optimizer's "exp_avg" and "exp_avg_sq", or "momentum" (or bf16), and "ema".
    """

    name: str
    spec: ParameterSpec
    start: int
    values: dict[str, Tensor]
    copies: Copies


def parameter_slices(groups: Iterable[FlatGroup]) -> list[ParameterSlice]:
    """Returns slices of everything that this rank steps, given its optimizer's groups."""
    found: list[ParameterSlice] = []
    for group in groups:
        for i, segment in enumerate(group.segments):
            values = {"parameter": segment.master}
            values |= {name: moments[i] for name, moments in group.state.items()}
            offset = 0
            for span in segment.spans:
                for copies, run in span.by_copies(segment.groups):
                    views = {k: v[offset : offset + run.numel] for k, v in values.items()}
                    found.append(ParameterSlice(run.name, run.spec, run.start, views, copies))
                    offset += run.numel
    return found
