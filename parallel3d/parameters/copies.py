"""Finds the ranks that hold the same elements with equal bits, and whether this rank is the first.

Norms, checkpoints, gathering, the check for drift and Muon all use this module; only `copy_groups`
distinguishes kinds of parameters.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

from parallel3d.comm.group import SINGLE, Group
from parallel3d.parameters.spec import ParameterSpec, ShardSpec

if TYPE_CHECKING:
    from parallel3d.comm.process_groups import ProcessGroups


@dataclass(frozen=True)
class Copies:
    """Index of this rank among the ranks that hold a run with equal bits, and their count."""

    index: int
    count: int

    @property
    def is_first(self) -> bool:
        """Returns whether this rank counts, sends and saves the run for all ranks that hold it."""
        return self.index == 0


@dataclass(frozen=True)
class CopyGroups:
    """This rank's groups whose ranks hold copies of a parameter, or of the part that a rank steps.

    Attributes:
        data: the ranks over which the gradients of a parameter are summed; for a part that a rank
            steps, only the ranks among them that step it too.
        tp: the tensor-parallel ranks. All of them hold the same values
            (`ParameterSpec.replicated`), or consecutive ones hold the same shard
            (`ShardSpec.tp_replicas`).
        stages: the first and the last stage for a table that both hold, else this rank alone.
    """

    data: Group = SINGLE
    tp: Group = SINGLE
    stages: Group = SINGLE

    def over_tp(self, spec: ParameterSpec, shard: ShardSpec) -> int:
        """Returns how many consecutive tensor-parallel ranks hold a shard."""
        return self.tp.size if spec.replicated else shard.tp_replicas

    def of(self, spec: ParameterSpec, shard: ShardSpec) -> Copies:
        """Returns the copies of a shard; padding (`NO_SHARD`) is treated like any other shard."""
        near = self.over_tp(spec, shard)
        index = self.data.index * near + self.tp.index % near
        count = self.data.size * near
        return Copies(index * self.stages.size + self.stages.index, count * self.stages.size)

    def runs(
        self, spec: ParameterSpec, start: int, numel: int
    ) -> Iterator[tuple[Copies, int, int]]:
        """Yields (copies, first, end) for each run of elements with equal copies.

        `first` and `end` are counted from `start`. Together the runs are elements [start, start +
        numel) of the flattened local parameter.
        """
        return spec.by_kind(lambda shard: self.of(spec, shard), start, numel)

    def of_whole(self, spec: ParameterSpec) -> list[Group]:
        """Returns the groups in which every rank holds the whole local parameter."""
        # A rank that holds only padding has no shards, but other ranks of its group have some.
        is_whole = spec.replicated or bool(spec.shards)
        is_whole &= all(self.over_tp(spec, shard) == self.tp.size for shard in spec.shards)
        return [self.data, *([self.tp] if is_whole else []), self.stages]


GroupsOf = Callable[[ParameterSpec], CopyGroups]


def copy_groups(spec: ParameterSpec, groups: ProcessGroups) -> CopyGroups:
    """Returns the groups over which a parameter of the model has copies."""
    if spec.is_expert:
        return CopyGroups(groups.edp)
    return CopyGroups(groups.dp_cp, groups.tp, groups.embedding if spec.tied else SINGLE)
