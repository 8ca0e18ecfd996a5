"""Samples of several data sets as one endless row of samples."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Mapping, Sequence
from typing import NamedTuple, Protocol

from parallel3d.data.corpora.shares import Shares
from parallel3d.data.sampler import Sample


class DatasetOrder(Protocol):
    """A data set's own row of samples: epoch after epoch, each in an order of its own."""

    seq_length: int
    windows: int  # samples of an epoch

    @property
    def masks(self) -> bool: ...

    def sample(self, i: int) -> Sample: ...

    def will_read(self, i: int) -> None: ...


class PartRead(NamedTuple):
    """What a run has read of a part of its blend."""

    tokens: int
    epochs: float


class WeightPeriod(NamedTuple):
    """From sample `first` of the run on, these data sets have these whole weights > 0."""

    first: int
    weights: Mapping[int, int]  # by the number of the data set


class Blended:
    """Sample i is a function of i alone: no state, nothing that grows with the samples.

    Within a stage every data set has had, after any number of samples, its share to within 2
    (`shares`); a data set goes on, from stage to stage, where it stood.
    """

    def __init__(
        self,
        parts: Sequence[DatasetOrder],
        stages: Sequence[WeightPeriod],
        names: Sequence[str] = (),
    ) -> None:
        """The first stage begins at sample 0, each other one after the one before; `names` of the
        parts, to show."""
        firsts = [stage.first for stage in stages]
        if not stages or firsts[0] != 0 or sorted(set(firsts)) != firsts:
            raise ValueError(f"stages from samples {firsts}")
        self.parts, self.names, self._firsts = parts, names, firsts
        self.seq_length = parts[0].seq_length
        self.masks = any(part.masks for part in parts)
        self._members = [list(stage.weights) for stage in stages]
        self._shares = [Shares(list(stage.weights.values())) for stage in stages]
        self._before = [[0] * len(parts)]  # samples of each data set before a stage
        for first in firsts[1:]:
            self._before.append(self.counts(first))

    def at(self, i: int) -> tuple[int, int]:
        """The data set that sample `i` is from, and which of that set's samples it is."""
        if i < 0:
            raise IndexError(f"sample {i}: samples count from 0")
        stage = bisect_right(self._firsts, i) - 1
        owner, place = self._shares[stage].at(i - self._firsts[stage])
        part = self._members[stage][owner]
        return part, self._before[stage][part] + place

    def will_read(self, i: int) -> None:
        """Has the system fetch what sample `i` is made of."""
        part, place = self.at(i)
        self.parts[part].will_read(place)

    def sample(self, i: int) -> Sample:
        """Sample `i` >= 0."""
        part, place = self.at(i)
        return self.parts[part].sample(place)

    def read(self, samples: int) -> dict[str, PartRead]:
        """What the first `samples` of the run read of each part, by its name."""
        return {
            name: PartRead(count * part.seq_length, round(count / part.windows, 4))
            for name, part, count in zip(self.names, self.parts, self.counts(samples), strict=True)
        }

    def counts(self, samples: int) -> list[int]:
        """Of the first `samples` of the run, how many are from each data set."""
        stage = max(0, bisect_right(self._firsts, samples - 1) - 1)
        stage = min(stage, len(self._before) - 1)
        counts = list(self._before[stage])
        inside = self._shares[stage].counts(samples - self._firsts[stage])
        for part, had in zip(self._members[stage], inside, strict=True):
            counts[part] += had
        return counts
