"""Which rank is at fault when nothing moves any more, told from what every rank was doing.

Pure: `watchdog.py` collects the states. Three ways to hang are told apart:

dead        a rank gives no answer: its process is stopped, gone, or its host is out of reach
shape       ranks are in the same operation of a group, with different tensors or calls
missing     a rank did not come to an operation in which others wait: it is elsewhere

Who is at fault cannot be read off two ranks that wait in different places: each lacks the other.
Training repeats itself, though. A rank that this step did another thing than in the step before,
where the others did as always, is the one.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from parallel3d.operation_log import Departure, Operation

Kind = Literal["dead", "shape", "missing", "unknown"]


@dataclass(frozen=True)
class RankState:
    """What one rank was doing when it was asked.

    Attributes:
        who: "rank 3 (pp 0, dp 1, tp 1) on host". phase: "train step 12".
        place: innermost line of this package on the main thread's stack, "" if there is none.
        blocked: the function of torch.distributed that the main thread is in, "" if in none.
        waiting: the noted operation that it waits for. waited_s: how long nothing has moved.
        ranks, counts: of each group that it is in: its ranks, and operations begun so far.
        recent: the newest operations, oldest first.
        departure: where this step differs from the one before; see `OperationLog.departure`.
    """

    rank: int
    who: str
    phase: str
    place: str = ""
    blocked: str = ""
    waiting: Operation | None = None
    waited_s: float = 0.0
    ranks: dict[str, tuple[int, ...]] = field(default_factory=dict)
    counts: dict[str, int] = field(default_factory=dict)
    recent: tuple[Operation, ...] = ()
    departure: Departure | None = None

    @property
    def is_waiting(self) -> bool:
        return self.waiting is not None or bool(self.blocked)

    def doing(self) -> str:
        """ "waits in all_reduce 5 of dp (float32[8])" or where its code is."""
        if self.waiting is not None:
            return f"waits in {self.waiting}"
        if self.blocked:
            return f"waits in torch.distributed's {self.blocked}{self.place}"
        return f"is in {self.phase}{self.place}, in no operation"


@dataclass(frozen=True)
class Verdict:
    """Why the run hangs; `ranks` are at fault."""

    kind: Kind
    ranks: tuple[int, ...]
    sentence: str


def diagnose(states: Mapping[int, RankState], silent: Mapping[int, tuple[str, str]]) -> Verdict:
    """The verdict over all ranks.

    Args:
        states: of the ranks that answered, at least one.
        silent: rank → (who it is, why it gives no answer), for the others.
    """
    if silent:
        return _dead(states, silent)
    return (
        _departed(states)
        or _mismatch(states)
        or _elsewhere(states)
        or _behind(states)
        or _unknown(states)
    )


def _dead(states: Mapping[int, RankState], silent: Mapping[int, tuple[str, str]]) -> Verdict:
    ranks = tuple(sorted(silent))
    said = "; ".join(f"{who} {why}" for who, why in (silent[rank] for rank in ranks[:3]))
    if len(ranks) > 3:
        said += f"; and {len(ranks) - 3} more"
    witness = _witness(states.values(), ranks)
    return Verdict("dead", ranks, f"{said}: {_waits(witness)}")


def _witness(states: Iterable[RankState], ranks: Iterable[int]) -> RankState:
    """Of those that wait for one of `ranks` the one that has waited longest, else any."""
    blamed = set(ranks)

    def key(state: RankState) -> tuple[bool, bool, float]:
        return bool(blamed & _awaited(state)), state.is_waiting, state.waited_s

    return max(states, key=key)


def _awaited(state: RankState) -> set[int]:
    operation = state.waiting
    if operation is None:
        return set()
    if operation.peer is not None:
        return {operation.peer}
    return set(state.ranks.get(operation.group, ())) - {state.rank}


def _waits(state: RankState) -> str:
    return f"rank {state.rank} {state.doing()} in {state.phase}, for {state.waited_s:.0f} s"


def _departed(states: Mapping[int, RankState]) -> Verdict | None:
    """Ranks that left the way of their own last step, if the others did not."""
    odd = [s for s in states.values() if s.departure is not None]
    if not odd or len(odd) == len(states):
        return None
    state = odd[0]
    departure = state.departure
    assert departure is not None
    others = _witness((s for s in states.values() if s.departure is None), [state.rank])
    kind: Kind = "shape" if departure.is_other_tensor else "missing"
    now = "" if kind == "shape" else f" and {state.doing()}"
    sentence = f"{state.who} {departure}{now} in {state.phase}: {_waits(others)}"
    return Verdict(kind, (state.rank,), sentence)


def _mismatch(states: Mapping[int, RankState]) -> Verdict | None:
    """Two ranks in one operation of a group, by its number, with different tensors or calls."""
    for state in states.values():
        mine = state.waiting
        if mine is None or mine.peer is not None:
            continue
        for rank in sorted(_awaited(state) & states.keys()):
            theirs = states[rank].waiting
            if theirs is None or (theirs.group, theirs.number) != (mine.group, mine.number):
                continue
            if not mine.alike(theirs):
                group = [states[r] for r in state.ranks[mine.group] if r in states]
                odd = _minority(group, state, states[rank])
                other = state if odd is not state else states[rank]
                sentence = f"{odd.who} calls {odd.waiting} in {odd.phase}, {_waits(other)}"
                return Verdict("shape", (odd.rank,), sentence)
    return None


def _minority(group: list[RankState], one: RankState, other: RankState) -> RankState:
    """Of two ranks that differ the one that fewer agree with; of equals the later one."""

    def followers(state: RankState) -> int:
        assert state.waiting is not None
        return sum(s.waiting is not None and s.waiting.alike(state.waiting) for s in group)

    return one if followers(one) < followers(other) else other


def _elsewhere(states: Mapping[int, RankState]) -> Verdict | None:
    """Ranks that wait for nobody while others wait."""
    away = [s for s in states.values() if not s.is_waiting]
    if not away or len(away) == len(states):
        return None
    wanted = set().union(*(_awaited(s) for s in states.values()))
    state = next((s for s in away if s.rank in wanted), away[0])
    witness = _witness((s for s in states.values() if s.is_waiting), [state.rank])
    return Verdict("missing", (state.rank,), f"{state.who} {state.doing()}: {_waits(witness)}")


def _behind(states: Mapping[int, RankState]) -> Verdict | None:
    """From a rank that waits to one that has not come, and on to whom that one waits for."""
    seen: list[int] = []
    state = max(states.values(), key=lambda s: (s.waiting is not None, s.waited_s))
    while state.rank not in seen:
        seen.append(state.rank)
        late = [
            states[r] for r in sorted(_awaited(state)) if r in states and _lacks(states[r], state)
        ]
        if not late:
            return None
        state, before = late[0], state
    said = f"{state.who} {state.doing()} in {state.phase} and did not come to {before.waiting}"
    ranks = (state.rank, before.rank)
    return Verdict("missing", ranks, f"{said}: {_waits(before)}; they went different ways")


def _lacks(state: RankState, other: RankState) -> bool:
    """Whether `state` has not begun the operation that `other` waits for."""
    operation = other.waiting
    assert operation is not None
    if operation.peer is not None:
        mine = state.waiting
        return mine is None or mine.group != operation.group or mine.peer != other.rank
    return state.counts.get(operation.group, 0) < operation.number


def _unknown(states: Mapping[int, RankState]) -> Verdict:
    state = max(states.values(), key=lambda s: s.waited_s)
    others = f"; all {len(states)} ranks wait" if all(s.is_waiting for s in states.values()) else ""
    sentence = f"{state.who} {state.doing()} in {state.phase} for {state.waited_s:.0f} s{others}"
    return Verdict("unknown", (state.rank,), sentence)


def to_json(state: RankState) -> dict[str, Any]:
    """JSON for the store; named tuples become lists."""
    return dict(vars(state))


def from_json(content: dict[str, Any]) -> RankState:
    """The state again."""

    def operation(fields: list | None) -> Operation | None:
        if fields is None:
            return None
        group, number, name, shape, dtype, peer = fields
        return Operation(group, number, name, tuple(shape), dtype, peer)

    departure = content["departure"]
    if departure is not None:
        departure = Departure(*(operation(o) for o in departure))
    return RankState(
        **content
        | {
            "waiting": operation(content["waiting"]),
            "ranks": {name: tuple(ranks) for name, ranks in content["ranks"].items()},
            "recent": tuple(operation(o) for o in content["recent"]),
            "departure": departure,
        }
    )
