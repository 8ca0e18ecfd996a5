"""The global batch by samples read, and from it the number of steps that read some tokens."""

from __future__ import annotations

from typing import NamedTuple


class BatchSizes(NamedTuple):
    """The global batch of every step, a function of the samples read before it.

    Attributes:
        entries: (first, size) with growing `first`, the first one 0: a step before which at least
            `first` samples were read takes `size`.
    """

    entries: tuple[tuple[int, int], ...]

    @property
    def sizes(self) -> list[int]:
        return [size for _, size in self.entries]

    def at(self, samples: int) -> int:
        """Returns the size of the step before which `samples` were read."""
        return next(size for first, size in reversed(self.entries) if first <= samples)

    def steps(self, samples: int) -> int:
        """Returns the least number of steps that read `samples` or more."""
        steps = read = 0
        for (_, size), end in self._until():
            last = samples if end is None else min(end, samples)
            count = max(0, -(-(last - read) // size))
            steps, read = steps + count, read + count * size
        return steps

    def samples(self, steps: int) -> int:
        """Returns the samples that the first `steps` steps read."""
        read = 0
        for (_, size), end in self._until():
            count = steps if end is None else min(steps, max(0, -(-(end - read) // size)))
            steps, read = steps - count, read + count * size
        return read

    def _until(self) -> list[tuple[tuple[int, int], int | None]]:
        """Returns each entry with the number of samples at which the next one begins."""
        after = [first for first, _ in self.entries[1:]]
        return list(zip(self.entries, [*after, None], strict=True))
