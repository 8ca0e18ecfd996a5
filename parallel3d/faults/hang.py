"""Which rank is at fault when nothing moves any more, told from what every rank was doing.

Pure: `watchdog.py` collects the states. Three ways to hang are told apart:

dead        a rank gives no answer: its process is stopped, gone, or its host is out of reach
shape       ranks are in the same operation of a group, with different tensors or calls
missing     a rank did not come to an operation in which others wait: it is elsewhere

Who is at fault cannot be read off two ranks that wait in different places: each lacks the other.
Training repeats itself, though. A rank that this step did another thing than in the step before,
where the others did as always, is the one. Where devices wait instead of hosts, `hang_queues` looks
at what they were given.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import replace

from parallel3d.faults.hang_queues import verdict_of_queues
from parallel3d.faults.hang_state import Diagnosis, Kind, RankState


def diagnose(states: Mapping[int, RankState], silent: Mapping[int, tuple[str, str]]) -> Diagnosis:
    """The verdict over all ranks.

    Args:
        states: of the ranks that answered, at least one.
        silent: rank → (who it is, why it gives no answer), for the others.
    """
    if silent:
        return _dead(states, silent)
    if any(state.queue is None for state in states.values()):
        states = {rank: replace(state, queue=None) for rank, state in states.items()}
    return (
        _departed(states)
        or verdict_of_queues(states)
        or _mismatch(states)
        or _elsewhere(states)
        or _behind(states)
        or _fewer(states)
        or _unknown(states)
    )


def _dead(states: Mapping[int, RankState], silent: Mapping[int, tuple[str, str]]) -> Diagnosis:
    ranks = tuple(sorted(silent))
    said = "; ".join(f"{who} {why}" for who, why in (silent[rank] for rank in ranks[:3]))
    if len(ranks) > 3:
        said += f"; and {len(ranks) - 3} more"
    witness = _witness(states.values(), ranks)
    return Diagnosis("dead", ranks, f"{said}: {witness.waits()}")


def _witness(states: Iterable[RankState], ranks: Iterable[int]) -> RankState:
    """Of those that wait for one of `ranks` the one that has waited longest, else any."""
    blamed = set(ranks)

    def key(state: RankState) -> tuple[bool, bool, float]:
        return bool(blamed & state.awaited), state.is_waiting, state.waited_s

    return max(states, key=key)


def _departed(states: Mapping[int, RankState]) -> Diagnosis | None:
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
    sentence = f"{state.who} {departure}{now} in {state.phase}: {others.waits()}"
    return Diagnosis(kind, (state.rank,), sentence)


def _mismatch(states: Mapping[int, RankState]) -> Diagnosis | None:
    """Two ranks in one operation of a group, by its number, with different tensors or calls."""
    for state in states.values():
        mine = state.waiting
        if mine is None or mine.peer is not None:
            continue
        for rank in sorted(state.awaited & states.keys()):
            theirs = states[rank].waiting
            if theirs is None or (theirs.group, theirs.number) != (mine.group, mine.number):
                continue
            if not mine.alike(theirs):
                group = [states[r] for r in state.ranks[mine.group] if r in states]
                odd = _minority(group, state, states[rank])
                other = state if odd is not state else states[rank]
                sentence = f"{odd.who} calls {odd.waiting} in {odd.phase}, {other.waits()}"
                return Diagnosis("shape", (odd.rank,), sentence)
    return None


def _minority(group: list[RankState], one: RankState, other: RankState) -> RankState:
    """Of two ranks that differ the one that fewer agree with; of equals the later one."""

    def followers(state: RankState) -> int:
        assert state.waiting is not None
        return sum(s.waiting is not None and s.waiting.alike(state.waiting) for s in group)

    return one if followers(one) < followers(other) else other


def _elsewhere(states: Mapping[int, RankState]) -> Diagnosis | None:
    """Ranks that wait for nobody while others wait."""
    away = [s for s in states.values() if not s.is_waiting]
    if not away or len(away) == len(states):
        return None
    wanted = set().union(*(s.awaited for s in states.values()))
    state = next((s for s in away if s.rank in wanted), away[0])
    witness = _witness((s for s in states.values() if s.is_waiting), [state.rank])
    return Diagnosis("missing", (state.rank,), f"{state.who} {state.doing()}: {witness.waits()}")


def _behind(states: Mapping[int, RankState]) -> Diagnosis | None:
    """From a rank that waits to one that has not come, and on to whom that one waits for."""
    seen: list[int] = []
    state = max(states.values(), key=lambda s: (s.waiting is not None, s.waited_s))
    while state.rank not in seen:
        seen.append(state.rank)
        late = [
            states[r] for r in sorted(state.awaited) if r in states and _lacks(states[r], state)
        ]
        if not late:
            return None
        state, before = late[0], state
    said = f"{state.who} {state.doing()} in {state.phase} and did not come to {before.waiting}"
    ranks = (state.rank, before.rank)
    return Diagnosis("missing", ranks, f"{said}: {before.waits()}; they went different ways")


def _lacks(state: RankState, other: RankState) -> bool:
    """Whether `state` has not begun the operation that `other` waits for."""
    operation = other.waiting
    assert operation is not None
    if operation.peer is not None:
        mine = state.waiting
        return mine is None or mine.group != operation.group or mine.peer != other.rank
    return state.counts.get(operation.group, 0) < operation.number


def _fewer(states: Mapping[int, RankState]) -> Diagnosis | None:
    """All of a group wait in one operation, but one has begun fewer or more of the group's others.

    What is queued on devices does not keep a host: it meets the others again in what it reads back.
    """
    for state in states.values():
        for group, ranks in state.ranks.items():
            members = [states[rank] for rank in ranks if rank in states]
            if state.waiting is None or any(m.waiting != state.waiting for m in members):
                continue
            counts = {m.rank: m.counts.get(group, 0) for m in members}
            # The most frequent count is the right one; of equally frequent ones the largest.
            frequent = Counter(sorted(counts.values(), reverse=True)).most_common()
            usual = frequent[0][0]
            odd = [m for m in members if counts[m.rank] != usual]
            if odd:
                witness = next(m for m in members if counts[m.rank] == usual)
                said = f"{odd[0].who} has begun {counts[odd[0].rank]} operations of {group}, where "
                said += f"rank {witness.rank} has begun {usual}: {witness.waits()}"
                return Diagnosis("missing", (odd[0].rank,), said)
    return None


def _unknown(states: Mapping[int, RankState]) -> Diagnosis:
    state = max(states.values(), key=lambda s: s.waited_s)
    others = f"; all {len(states)} ranks wait" if all(s.is_waiting for s in states.values()) else ""
    sentence = f"{state.who} {state.doing()} in {state.phase} for {state.waited_s:.0f} s{others}"
    return Diagnosis("unknown", (state.rank,), sentence)
