"""Samples that are there when they are asked for: a thread reads the next ones meanwhile.

Which ones is known, since sample i is a function of i. The thread first tells the system what it
will read, all of it, and then reads: a disk serves the one while the other is taken.
"""

from __future__ import annotations

import threading
import time
import weakref
from collections import deque
from collections.abc import Iterator
from contextlib import suppress
from typing import Protocol

from parallel3d.data.sampler import Sample

_BYTES = 256 << 20  # that samples read ahead hold at most
_EACH = 16  # bytes a token of a sample
_PAUSE_S = 1e-4  # between two samples, for those who run the same Python


class Source(Protocol):
    """What is read ahead of: by a thread beside others, so it must not change when it is read.

    `will_read(i)`, if it has that, tells the system of a sample that `sample` is to read soon.
    """

    seq_length: int

    def sample(self, i: int) -> Sample: ...


class ReadAhead:
    """The samples of one rank, step after step: of a step `share`, from `first` + `offset` on.

    As the source that it reads from, but for time: what that raises for a sample is raised where
    the sample is asked for. The thread ends with this object.
    """

    def __init__(self, source: Source, offset: int, share: int, stride: int) -> None:
        """`stride`: samples of a step of all ranks."""
        self.source, self.seq_length = source, source.seq_length
        self.masks = getattr(source, "masks", True)
        self._offset, self._share, self._stride = offset, share, stride
        # Up to the end of the next step.
        self._most = max(1, min(2 * share, _BYTES // (_EACH * source.seq_length)))
        self._first = -1
        self._order: Iterator[int] = iter(())
        self._shelf: _Shelf | None = None

    def step(self, first: int) -> None:
        """The step that begins at sample `first` is next, or goes on."""
        if first == self._first:
            return
        if self._shelf is None:
            self._shelf = _Shelf(self.source)
            weakref.finalize(self, self._shelf.end)
            threading.Thread(target=_read, args=(self._shelf,), daemon=True).start()
        if self._first < 0 or first != self._first + self._stride:
            self._order = self._numbers(first)
            self._shelf.clear()
        self._first = first
        self._shelf.drop_before(first + self._offset)
        self._fill()

    def sample(self, i: int, keep: bool = False) -> Sample:
        """Sample `i`; `keep`: it will be asked for again."""
        found = None if self._shelf is None else self._shelf.take(i, keep)
        if not keep:
            self._fill()
        if found is None:
            return self.source.sample(i)
        if isinstance(found, Exception):
            raise found
        return found

    def _numbers(self, first: int) -> Iterator[int]:
        while True:
            yield from range(first + self._offset, first + self._offset + self._share)
            first += self._stride

    def _fill(self) -> None:
        if self._shelf is None:
            return
        room = self._most - self._shelf.count()
        if 2 * room >= self._most:  # by and by, not one for each that is taken
            self._shelf.want([next(self._order) for _ in range(room)])


class _Shelf:
    """What is wanted, what is being read, and what has been."""

    def __init__(self, source: Source) -> None:
        self.source = source
        self.changed = threading.Condition()
        self.wanted: deque[int] = deque()
        self.pending: set[int] = set()  # wanted, or being read
        self.found: dict[int, Sample | Exception] = {}
        self.ended = False
        self.waiting = False  # for a sample that is being read

    def count(self) -> int:
        return len(self.pending) + len(self.found)

    def want(self, numbers: list[int]) -> None:
        with self.changed:
            self.wanted.extend(numbers)
            self.pending.update(numbers)
            self.changed.notify_all()

    def take(self, i: int, keep: bool) -> Sample | Exception | None:
        """Sample `i`, waited for if it is wanted; None if it is not."""
        with self.changed:
            while i in self.pending and not self.ended:
                self.waiting = True
                self.changed.wait()
            self.waiting = False
            return self.found.get(i) if keep else self.found.pop(i, None)

    def put(self, i: int, sample: Sample | Exception) -> None:
        with self.changed:
            if i in self.pending:  # else it was cleared meanwhile
                self.pending.discard(i)
                self.found[i] = sample
                self.changed.notify_all()

    def drop_before(self, first: int) -> None:
        with self.changed:
            for i in [i for i in self.found if i < first]:
                del self.found[i]

    def clear(self) -> None:
        with self.changed:
            self.wanted.clear()
            self.pending.clear()
            self.found.clear()

    def end(self) -> None:
        with self.changed:
            self.ended = True
            self.changed.notify_all()


def _read(shelf: _Shelf) -> None:
    """The thread: reads what is wanted until the end."""
    tell = getattr(shelf.source, "will_read", None)
    while True:
        with shelf.changed:
            while not shelf.wanted and not shelf.ended:
                shelf.changed.wait()
            if shelf.ended:
                return
            numbers = list(shelf.wanted)
            shelf.wanted.clear()
        with suppress(Exception):  # whatever it is, reading will meet it again
            for i in numbers if tell is not None else ():
                tell(i)
        for i in numbers:
            if i not in shelf.pending:
                continue
            try:
                found: Sample | Exception = shelf.source.sample(i)
            except Exception as error:
                found = error
            shelf.put(i, found)
            if not shelf.waiting:
                time.sleep(_PAUSE_S)
