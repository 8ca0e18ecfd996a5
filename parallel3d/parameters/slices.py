"""Lists, for checkpoints, the elements that a rank steps and their optimizer state, as slices."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from torch import Tensor

from parallel3d.optim.optimizer import EMA, FlatGroup
from parallel3d.parameters.copies import Copies, copy_groups
from parallel3d.parameters.segments import Constant
from parallel3d.parameters.spec import ParameterSpec, ShardSpec

if TYPE_CHECKING:
    from parallel3d.comm.process_groups import ProcessGroups

PARAMETER = "parameter"
STATE = "state"


@dataclass(frozen=True)
class ParameterSlice:
    """A run of one local parameter's elements, with their optimizer state.

    Attributes:
        start: first element of the slice in the flattened local parameter.
        values: flat live views of equal length, by name. A trained parameter has "parameter" (its
            master weights), the optimizer's states ("exp_avg" and "exp_avg_sq", or "momentum", in
            the masters' dtype or bf16), and "ema" if there is an average. A frozen parameter has
            only "parameter", in the compute dtype. A `state_slice` has only "state".
    """

    name: str
    spec: ParameterSpec
    start: int
    values: dict[str, Tensor]
    copies: Copies


def state_slice(name: str, values: Tensor, groups: ProcessGroups) -> ParameterSlice:
    """Returns a slice of a tensor that changes without the optimizer, such as a router's bias.

    `name` is the full name of the tensor. `values` are flat, live, and equal on all ranks of a
    pipeline stage.
    """
    shape = tuple(values.shape)
    shard = ShardSpec(name, shape, (0,), shape)
    spec = ParameterSpec(shape, (shard,), replicated=True)
    return ParameterSlice(name, spec, 0, {STATE: values}, copy_groups(spec, groups).of(spec, shard))


def constant_slices(constants: Iterable[Constant]) -> Iterator[ParameterSlice]:
    """Yields slices of the frozen parameters."""
    for values, span, groups in constants:
        for copies, run in span.by_copies(groups):
            first = run.start - span.start
            views = {PARAMETER: values[first : first + run.numel]}
            yield ParameterSlice(run.name, run.spec, run.start, views, copies)


def with_averages(slices: Iterable[ParameterSlice]) -> list[ParameterSlice]:
    """Returns the slices, with an average for every parameter.

    The average of a frozen parameter is the parameter itself.
    """
    found = []
    for part in slices:
        if PARAMETER in part.values and EMA not in part.values:
            part = replace(part, values={**part.values, EMA: part.values[PARAMETER]})
        found.append(part)
    return found


def parameter_slices(groups: Iterable[FlatGroup]) -> list[ParameterSlice]:
    """Returns slices of all elements in the groups of this rank's optimizer."""
    found: list[ParameterSlice] = []
    for group in groups:
        for i, segment in enumerate(group.segments):
            values = {PARAMETER: segment.master}
            values |= {name: moments[i] for name, moments in group.state.items()}
            offset = 0
            for span in segment.spans:
                for copies, run in span.by_copies(segment.groups):
                    views = {k: v[offset : offset + run.numel] for k, v in values.items()}
                    found.append(ParameterSlice(run.name, run.spec, run.start, views, copies))
                    offset += run.numel
    return found
