"""What the ranks tell each other of a hang, and the verdict on it; as JSON for the store."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Literal

from parallel3d.comm.operation_log import Departure, LoggedOperation
from parallel3d.faults.flight_record import Queued

Kind = Literal["dead", "shape", "missing", "unknown"]


@dataclass(frozen=True)
class RankState:
    """What one rank was doing when it was asked.

    Attributes:
        who: "rank 3 (pp 0, dp 1, tp 1) on host". phase: "train step 12".
        place: innermost line of this package on the stack of the rank's work, "" if there is none.
        blocked: the function of torch.distributed that the work is in, "" if in none.
        waiting: the noted operation that the host waits for. waited_s: how long nothing has moved.
        ranks, counts: of each group that it is in: its ranks, and operations begun so far.
        recent: the newest operations, oldest first.
        departure: where this step differs from the one before; see `OperationLog.departure`.
        queue: what the device was given, done or not, in order; None where nobody records that.
    """

    rank: int
    who: str
    phase: str
    place: str = ""
    blocked: str = ""
    waiting: LoggedOperation | None = None
    waited_s: float = 0.0
    ranks: dict[str, tuple[int, ...]] = field(default_factory=dict)
    counts: dict[str, int] = field(default_factory=dict)
    recent: tuple[LoggedOperation, ...] = ()
    departure: Departure | None = None
    queue: tuple[Queued, ...] | None = None

    @property
    def stuck(self) -> LoggedOperation | None:
        """What the device waits in: the first that was queued and has not ended.

        Those behind it may only wait for their turn. What it needs itself has ended, so that it is
        other ranks that are late.
        """
        return next((q.operation for q in self.queue or () if not q.is_done), None)

    @property
    def is_waiting(self) -> bool:
        return self.stuck is not None or self.waiting is not None or bool(self.blocked)

    @property
    def awaited(self) -> set[int]:
        """The ranks that it waits for."""
        operation = self.stuck or self.waiting
        if operation is None:
            return set()
        if operation.peer is not None:
            return {operation.peer}
        return set(self.ranks.get(operation.group, ())) - {self.rank}

    def doing(self) -> str:
        """ "waits in all_reduce 5 of dp (float32[8])" or where its code is."""
        if self.stuck is not None:
            return f"waits on its device in {self.stuck}"
        if self.waiting is not None:
            return f"waits in {self.waiting}"
        if self.blocked:
            return f"waits in torch.distributed's {self.blocked}{self.place}"
        return f"is in {self.phase}{self.place}, in no operation"

    def waits(self) -> str:
        """The witness's part of a verdict."""
        return f"rank {self.rank} {self.doing()} in {self.phase}, for {self.waited_s:.0f} s"


@dataclass(frozen=True)
class Diagnosis:
    """Why the run hangs; `ranks` are at fault."""

    kind: Kind
    ranks: tuple[int, ...]
    sentence: str


def to_json(state: RankState) -> dict[str, Any]:
    """JSON for the store; named tuples become lists."""
    return dict(vars(state))


def from_json(content: dict[str, Any]) -> RankState:
    """The state again."""

    def operation(fields: list | None) -> LoggedOperation | None:
        if fields is None:
            return None
        group, number, name, shape, dtype, peer = fields
        return LoggedOperation(group, number, name, tuple(shape), dtype, peer)

    departure, queue = content["departure"], content["queue"]
    if departure is not None:
        departure = Departure(*(operation(o) for o in departure))
    if queue is not None:
        queue = tuple(Queued(operation(o), is_done) for o, is_done in queue)
    return RankState(
        **content
        | {
            "waiting": operation(content["waiting"]),
            "ranks": {name: tuple(ranks) for name, ranks in content["ranks"].items()},
            "recent": tuple(operation(o) for o in content["recent"]),
            "departure": departure,
            "queue": queue,
        }
    )
