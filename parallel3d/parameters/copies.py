"""Finds the ranks that hold a run of elements with equal bits, and whether this rank is the first
of them.

Norms, checkpoints, gathering, the check for drift, Muon and the noise scale all use this module;
only `copy_groups` distinguishes kinds of parameters.
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
    """The ranks that hold a run of elements with equal bits: this rank's index, and their count."""

    index: int
    count: int

    @property
    def is_first(self) -> bool:
        """Whether this rank is the one that counts, sends or saves the run."""
        return self.index == 0


@dataclass(frozen=True)
class CopyGroups:
    """This rank's groups over which a parameter, or the part of it that a rank steps, has copies.

    Attributes:
        data: the ranks over which its gradients are summed; for a part that is stepped, the ranks
            among them that also step it.
        tp: the tensor-parallel ranks, which hold it whole (`ParameterSpec.replicated`) or, in
            consecutive runs, the same shard (`ShardSpec.tp_replicas`).
        stages: the first and the last stage for a table that both hold; else this rank alone.
    """

    data: Group = SINGLE
    tp: Group = SINGLE
    stages: Group = SINGLE

    def over_tp(self, spec: ParameterSpec, shard: ShardSpec) -> int:
        """Returns how many consecutive tensor-parallel ranks hold a shard."""
        return self.tp.size if spec.replicated else shard.tp_replicas

    def of(self, spec: ParameterSpec, shard: ShardSpec) -> Copies:
        """Returns the copies of a shard; copies of padding count like any shard's."""
        near = self.over_tp(spec, shard)
        index = self.data.index * near + self.tp.index % near
        count = self.data.size * near
        return Copies(index * self.stages.size + self.stages.index, count * self.stages.size)

    def runs(
        self, spec: ParameterSpec, start: int, numel: int
    ) -> Iterator[tuple[Copies, int, int]]:
        """Yields (copies, first, end), counted from `start`, for runs of elements with equal
        copies.

        Together they are elements [start, start + numel) of the flattened local parameter.
        """
        return spec.by_kind(lambda shard: self.of(spec, shard), start, numel)

    def of_whole(self, spec: ParameterSpec) -> list[Group]:
        """Returns the groups all of whose ranks hold all of the local parameter."""
        # A rank with nothing but padding knows of no shard, but the others hold some.
        is_whole = spec.replicated or bool(spec.shards)
        is_whole &= all(self.over_tp(spec, shard) == self.tp.size for shard in spec.shards)
        return [self.data, *([self.tp] if is_whole else []), self.stages]


GroupsOf = Callable[[ParameterSpec], CopyGroups]


def copy_groups(spec: ParameterSpec, groups: ProcessGroups) -> CopyGroups:
    """Returns the groups over which a parameter of the model has copies."""
    if spec.is_expert:
        return CopyGroups(groups.edp)
    return CopyGroups(groups.dp_cp, groups.tp, groups.embedding if spec.tied else SINGLE)
