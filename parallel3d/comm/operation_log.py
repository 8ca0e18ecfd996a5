"""Logs a rank's communication, so that a hang can be diagnosed afterwards.

Logging a collective appends a tuple to a list, which takes less than a microsecond; entries are
formatted only when something is wrong. `faults/watchdog.py` reads the log of a rank that hangs.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

if TYPE_CHECKING:
    from torch import Tensor


# Operations whose tensors may differ in size between ranks and between steps.
UNEVEN = ("all_to_all", "alltoall", "scatter")


class _Group(Protocol):
    """The part of `group.Group` that this module needs."""

    @property
    def name(self) -> str: ...
    @property
    def ranks(self) -> tuple[int, ...]: ...
    @property
    def log(self) -> OperationLog | None: ...


class LoggedOperation(NamedTuple):
    """One collective, or one message to or from the rank `peer`.

    `number` counts the operations of the same group on this rank.
    """

    group: str
    number: int
    name: str
    shape: tuple[int, ...]
    dtype: str
    peer: int | None = None

    def is_same_call(self, other: LoggedOperation) -> bool:
        """Returns whether both operations are the same call, whatever their numbers.

        The experts' tokens differ in number from step to step.
        """
        shape = () if self.name.startswith(UNEVEN) else self.shape
        theirs = () if other.name.startswith(UNEVEN) else other.shape
        return self._replace(number=0, shape=shape) == other._replace(number=0, shape=theirs)

    @property
    def tensor(self) -> str:
        """The dtype and shape of the tensor, such as "float32[2,32]"."""
        return f"{self.dtype.removeprefix('torch.')}[{','.join(map(str, self.shape))}]"

    def __str__(self) -> str:
        if self.peer is not None:
            way = "to" if self.name == "send" else "from"
            return f"{self.name} {way} rank {self.peer} of {self.group} ({self.tensor})"
        return f"{self.name} {self.number} of {self.group} ({self.tensor})"


class Divergence(NamedTuple):
    """The first operation of a phase that differs from the phase's previous run.

    Attributes:
        now: the operation of this run; None if the phase ended without it.
        was: the operation at the same place in the previous run.
        after: the operation that followed `was` in the previous run; None if there was none.
    """

    now: LoggedOperation | None
    was: LoggedOperation
    after: LoggedOperation | None

    @property
    def is_other_tensor(self) -> bool:
        """Whether the same call was made with another tensor, and no call was left out."""
        now, was = self.now, self.was
        if now is None or (self.after is not None and now.is_same_call(self.after)):
            return False
        return (now.group, now.name, now.peer) == (was.group, was.name, was.peer)

    def __str__(self) -> str:
        if self.is_other_tensor:
            return f"called {self.now}, where an earlier step had {self.was.tensor}"
        if self.now is None or (self.after is not None and self.now.is_same_call(self.after)):
            return f"left out {self.was.name} of {self.was.group} ({self.was.tensor})"
        return f"went to {self.now}, where an earlier step had {self.was}"


class OperationLog:
    """The operations of one rank in all of its groups, in the current phase and recent ones.

    Attributes:
        progress: a counter that grows when an operation starts, a wait ends or a phase begins.
        waiting: the entry of the operation that the host waits for; None while it computes.
        newest: name of a group → its newest entry.
        ranks: name of each group that has communicated → its ranks.
    """

    def __init__(self) -> None:
        self.progress = 0
        self.waiting: LoggedOperation | None = None
        self.ranks: dict[str, tuple[int, ...]] = {}
        self.counts: dict[str, int] = {}
        self.newest: dict[str, LoggedOperation] = {}
        self._notes: list[LoggedOperation] = []
        self._phase, self._repeats = "", True
        self._previous: dict[str, list[LoggedOperation]] = {}  # phase → entries of its last run
        # Pairs of a repeating phase's entries and those of its previous run, latest phase first.
        # Three suffice for a step, an evaluation after it, and one phase more.
        self._closed: deque[tuple[list[LoggedOperation], list[LoggedOperation]]] = deque(maxlen=3)

    def boundary(self, phase: str, repeats: bool = True) -> None:
        """Begins a phase, such as "train step", which has the same operations in every run.

        A phase with `repeats=False`, such as a user's hook or a save, may have others in each
        run.
        """
        if self._repeats:
            self._closed.appendleft((self._notes, self._previous.get(self._phase, [])))
            self._previous[self._phase] = self._notes
        self._notes = []
        self._phase, self._repeats = phase, repeats
        self.progress += 1

    def allow_others(self, agreed: _Group) -> None:
        """Lets the rest of this run of the phase have other operations, as all ranks have agreed.

        Later runs are like the previous one. The ranks agree by this run's newest operation, one of
        the group `agreed`. A rank that has left it out has decided alone: its operations count.
        """
        newest = self._notes[-1] if self._notes else None
        if newest is not None and newest is self.newest.get(agreed.name):
            self._repeats = False

    def forget(self) -> None:
        """Lets this run of the phase and later ones have other operations than the previous one."""
        self._previous.pop(self._phase, None)

    def start(
        self, group: _Group, name: str, tensor: Tensor, peer: int | None = None
    ) -> LoggedOperation:
        """Logs the start of an operation and returns its entry."""
        key = group.name
        number = self.counts.get(key, 0) + 1
        if number == 1:
            self.ranks[key] = group.ranks
        self.counts[key] = number
        note = LoggedOperation(key, number, name, tensor.shape, str(tensor.dtype), peer)
        self.newest[key] = note
        self._notes.append(note)
        self.progress += 1
        return note

    def latest(self, count: int) -> list[LoggedOperation]:
        """Returns each group's newest entry, the phase's `count` newest entries, and `waiting`."""
        notes = [*self.newest.values(), *self._notes[-count:]]
        notes += [] if self.waiting is None else [self.waiting]
        return list(dict.fromkeys(notes))

    def divergence(self) -> Divergence | None:
        """Returns where this phase, or else a recent one, first differs from its previous run."""
        previous = self._previous.get(self._phase, []) if self._repeats else []
        found = _first_difference(list(self._notes), previous, is_over=False)
        for notes, before in tuple(self._closed):
            found = found or _first_difference(notes, before, is_over=True)
        return found


def _first_difference(
    now: list[LoggedOperation], before: list[LoggedOperation], is_over: bool
) -> Divergence | None:
    for i, was in enumerate(before):
        after = before[i + 1] if i + 1 < len(before) else None
        if i >= len(now):
            return Divergence(None, was, after) if is_over else None
        if not now[i].is_same_call(was):
            return Divergence(now[i], was, after)
    return None


class LoggedWork:
    """The handle of an operation whose `wait` is logged."""

    __slots__ = ("log", "note", "work")

    def __init__(self, log: OperationLog, note: LoggedOperation, work: Any) -> None:
        self.log = log
        self.note = note
        self.work = work

    def wait(self) -> None:
        """Waits for the operation. After an exception `log.waiting` still names the operation."""
        log = self.log
        outer = log.waiting
        log.waiting = self.note
        self.work.wait()
        log.waiting = outer
        log.progress += 1


@contextmanager
def blocking(group: _Group) -> Iterator[None]:
    """Logs that the host waits for `group`'s newest operation while it reads a device's value.

    With NCCL a handle's `wait` only orders streams, so a host notices a missing rank only here. An
    exception resets `log.waiting`, because on a device it may come from any earlier work.
    """
    log = group.log
    note = None if log is None else log.newest.get(group.name)
    if log is None or note is None:
        yield
        return
    outer = log.waiting
    log.waiting = note
    try:
        yield
    finally:
        log.waiting = outer
    log.progress += 1


def logged(
    group: _Group, name: str, tensor: Tensor, start: Callable[[], Any], peer: int | None = None
) -> Any:
    """Starts an operation and returns its handle; logs its start and wait if `group` has a log."""
    log = group.log
    if log is None:
        return start()
    note = log.start(group, name, tensor, peer)
    # Some operations already block when they start.
    outer = log.waiting
    log.waiting = note
    work = start()
    log.waiting = outer
    return LoggedWork(log, note, work)
