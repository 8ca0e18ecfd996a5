"""Buckets in the order in which the first step's gradients became ready.

The reverse order of the model is a guess: what runs when is the business of autograd. As PyTorch's
DDP does (Li et al. 2020 §3.2.3), the order is measured once and the buckets are filled anew. All
ranks of a stage take the order of its first rank: they must reduce the same buckets, and under
sequence parallelism add up the same segments.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor, nn

from parallel3d.comm import collectives
from parallel3d.comm.group import Group
from parallel3d.comm.process_groups import ProcessGroups
from parallel3d.config.schema import OptimConfig
from parallel3d.data_parallel.bucketed import BucketedDataParallel
from parallel3d.optim.optimizer import Optimizer
from parallel3d.optim.state import ParameterSlice, parameter_slices

Whole = dict[str, dict[str, Tensor]]  # kind of value → name → flat, all of the local parameter


def in_measured_order(
    engine: BucketedDataParallel, optimizer: Optimizer, optim: OptimConfig, groups: ProcessGroups
) -> Optimizer:
    """Fills the buckets anew and moves masters and optimizer state; collective over dp and tp.

    Returns the optimizer of the new buckets. Once in a run: under ZeRO every rank holds all masters
    of its stage, and all of one kind of state, while it lasts.
    """
    engine.wait_for_all()
    ready = agreed_order(engine.reducer.arrivals, list(engine.parameters), groups)
    slices = parameter_slices(optimizer, groups, engine.replicas, tied=False)
    group = engine.dp if engine.sharded else None
    state = whole_values(slices, engine.parameters, group)
    engine.reorder(ready, state.pop("parameter"))
    moved = Optimizer(optim, engine.segments, groups.tp)
    moved.restore(optimizer.updates)
    for s in parameter_slices(moved, groups, engine.replicas, tied=False):
        for kind, by_name in state.items():
            values = s.values[kind]
            values.copy_(by_name[s.name][s.start : s.start + values.numel()])
    return moved


def agreed_order(arrivals: list[str], names: list[str], groups: ProcessGroups) -> list[str]:
    """The first rank's order of a stage, on all its ranks; what never arrived comes last."""
    seen = set(arrivals)
    mine = [*arrivals, *(name for name in reversed(names) if name not in seen)]
    numbers = torch.tensor([names.index(name) for name in mine])
    numbers = numbers.to(groups.mesh.device_type)
    for group in (groups.tp, groups.dp):
        collectives.broadcast(numbers, 0, group)
    return [names[i] for i in numbers.tolist()]


def whole_values(
    slices: Iterable[ParameterSlice], parameters: dict[str, nn.Parameter], shards: Group | None
) -> Whole:
    """Everything that the ranks of `shards` hold in slices, on each of them; None: all is here."""
    found: dict[str, Tensor] = {}
    total = sum(p.numel() for p in parameters.values())
    starts, offset = {}, 0
    for name, parameter in parameters.items():
        starts[name] = offset
        offset += parameter.numel()
    for s in slices:
        for kind, values in s.values.items():
            flat = found.setdefault(kind, values.new_zeros(total))
            first = starts[s.name] + s.start
            flat[first : first + values.numel()] = values
    if shards is not None:
        for flat in found.values():
            collectives.all_reduce(flat, shards)  # of slices that do not meet
    return {
        kind: {name: flat[starts[name] :][: p.numel()] for name, p in parameters.items()}
        for kind, flat in found.items()
    }
