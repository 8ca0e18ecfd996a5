"""The rows that a rank's experts read: counted on the device, sorted by expert, summed by token."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from parallel3d.device.accelerator import Reading, has_values
from parallel3d.device.fused import fused
from parallel3d.device.grouped import Groups, has_grouped_kernels


@dataclass(frozen=True)
class Rows:
    """The rows that a rank's experts read, sorted by expert; a row is one token for one expert.

    Attributes:
        groups: the consecutive rows that belong to each local expert.
        tokens: (rows,) int64, the token of each row.
        slots: (rows,) int64, the index of each row's choice in the flattened (tokens, slots) table
            of choices.
        places: (tokens, slots) int64, the row of each choice, or the number of rows if the choice
            is not a local expert.
    """

    groups: Groups
    tokens: Tensor
    slots: Tensor
    places: Tensor

    @classmethod
    def sorted_by(cls, experts: Tensor, groups: Groups, total: int) -> Rows:
        """Sorts the choices of t tokens by expert, and the rows of an expert by token.

        Args:
            experts: (t, slots), the local experts that each token chose; an expert of another rank
                is replaced by the number of local experts.
            groups: the rows of each local expert.
            total: the number of choices that are local experts.
        """
        flat = experts.flatten()
        slots = flat.sort(stable=True).indices[:total]
        places = torch.full_like(flat, total)
        places[slots] = torch.arange(total, device=flat.device)
        tokens = slots.div(experts.shape[1], rounding_mode="floor")
        return cls(groups, tokens, slots, places.view(experts.shape))

    def owners(self) -> Tensor:
        """Returns the local expert of each row, (rows,) int64."""
        rows = torch.arange(len(self.tokens), device=self.tokens.device)
        return torch.searchsorted(self.groups.ends.long(), rows, right=True)

    def experts(self) -> Tensor:
        """Returns the local expert of each choice, (tokens, slots) int64.

        A choice that is not a local expert has the number of local experts.
        """
        return torch.searchsorted(self.groups.ends.long(), self.places, right=True)


class RowCounts:
    """Counts the rows of this rank's experts on the device; `rows` waits for the counts.

    Args:
        experts: the choices of t tokens, as in `Rows.sorted_by`.
        count: the number of local experts.
        balanced: the number of rows if all experts are chosen equally often, for a dry run.
    """

    def __init__(self, experts: Tensor, count: int, balanced: int) -> None:
        self._experts = experts
        self._numbers = counts_of(experts.flatten(), count + 1)[:count]
        self._counts = HostCounts(self._numbers, evenly(balanced, count))

    def rows(self) -> Rows:
        groups = Groups.of(self._numbers, self._counts.wait())
        return Rows.sorted_by(self._experts, groups, groups.total)


class LocalRowCounts:
    """Does the same as `RowCounts` for choices that are all local experts.

    The host only waits for the device if no grouped kernel runs the experts' GEMMs in `dtype`.
    """

    def __init__(self, experts: Tensor, count: int, dtype: torch.dtype) -> None:
        self._experts = experts
        self._counts: RowCounts | None = None
        if has_grouped_kernels(experts.device, dtype):
            self._groups = Groups.of(counts_of(experts.flatten(), count), None)
        else:
            self._counts = RowCounts(experts, count, experts.numel())

    def rows(self) -> Rows:
        if self._counts is not None:
            return self._counts.rows()
        return Rows.sorted_by(self._experts, self._groups, self._experts.numel())


class HostCounts:
    """Copies counts to the host; work that is launched before `wait` hides the copy.

    Args:
        balanced: the counts of a dry run, in which `numbers` has no values.
    """

    def __init__(self, numbers: Tensor, balanced: Sequence[int]) -> None:
        self._reading = Reading(numbers)
        self._balanced = None if has_values(numbers.device) else tuple(balanced)

    def wait(self) -> tuple[int, ...]:
        counts = self._reading.values()
        return tuple(counts) if self._balanced is None else self._balanced


def counts_of(numbers: Tensor, count: int) -> Tensor:
    """Returns how often each number below `count` occurs: (n,) int64 → (count,)."""
    return numbers.new_zeros(count).scatter_add_(0, numbers, torch.ones_like(numbers))


def evenly(total: int, parts: int) -> list[int]:
    """Returns `parts` whole numbers that sum to `total` and differ by at most one."""
    return [total * (i + 1) // parts - total * i // parts for i in range(parts)]


@functools.partial(fused, rows=True)
def sum_of_slots(rows: Tensor, places: Tensor) -> Tensor:
    """Returns the sum of each token's rows, added in the order of its slots.

    (rows, h), (t, slots) → (t, h). A place after the last row adds nothing. Because no addition is
    atomic, equal inputs give equal bits on every device.
    """
    if torch.compiler.is_compiling():  # this becomes one kernel, which does not copy the rows
        last, total = rows.shape[0] - 1, rows.new_zeros(places.shape[0], rows.shape[1])
        for place in places.unbind(1) if last >= 0 else ():
            row = rows.index_select(0, place.clamp(max=last))
            total = total + row.where((place <= last).unsqueeze(-1), 0)
        return total
    padded = rows  # with as many rows as places, every place has its own row
    if rows.shape[0] < places.numel():
        padded = torch.cat((rows, rows.new_zeros(1, rows.shape[1])))
    total = padded.index_select(0, places[:, 0])
    for slot in range(1, places.shape[1]):
        total += padded.index_select(0, places[:, slot])
    return total
