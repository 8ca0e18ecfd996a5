"""Which rank is at fault, told from what the devices were given and have not done.

Where waiting is the devices' business (NCCL), hosts run on until they read a number back, all of
them somewhere else, and look alike. The queues do not: an operation that never ends was not queued
by one of its group, or with another tensor, or one of the group is stuck before it.
"""

from __future__ import annotations

from collections.abc import Mapping
from itertools import pairwise

from parallel3d.comm.operation_log import LoggedOperation
from parallel3d.faults.hang_state import Diagnosis, RankState

UNEVEN = ("all_to_all", "alltoall", "scatter")  # whose ranks may give tensors of different sizes


def verdict_of_queues(states: Mapping[int, RankState]) -> Diagnosis | None:
    """None where no device waits. The queues of all `states` are known."""
    if all(state.stuck is None for state in states.values()):
        return None
    return _other_tensor(states) or _absent(states)


def _other_tensor(states: Mapping[int, RankState]) -> Diagnosis | None:
    """A rank whose tensor is another than that of the rest, though it may have got past."""
    for state in states.values():
        mine = state.stuck
        if mine is None or mine.peer is not None or mine.name.startswith(UNEVEN):
            continue
        members = [states[rank] for rank in state.ranks.get(mine.group, ()) if rank in states]
        theirs = {s.rank: found for s in members if (found := _entry(s, mine)) is not None}
        others = [rank for rank, found in theirs.items() if not found.alike(mine)]
        if not others:
            continue
        # Of two calls the rarer one is at fault; of equally frequent ones the later rank's.
        same = [rank for rank, found in theirs.items() if found.alike(mine)]
        odd, usual = (same, others) if len(same) < len(others) else (others, same)
        blamed, witness = states[odd[0]], states[usual[0]]
        call = theirs[blamed.rank]
        sentence = f"{blamed.who} calls {call} in {blamed.phase}, where rank {witness.rank} calls "
        return Diagnosis("shape", (blamed.rank,), f"{sentence}{theirs[usual[0]]}: {state.waits()}")
    return None


def _entry(state: RankState, wanted: LoggedOperation) -> LoggedOperation | None:
    """The collective of that group and number in the queue of `state`."""
    for operation, _ in state.queue or ():
        same = (operation.group, operation.number) == (wanted.group, wanted.number)
        if same and operation.peer is None:
            return operation
    return None


def _absent(states: Mapping[int, RankState]) -> Diagnosis:
    """From a device that waits to a rank that has not come, and on to what that one waits for."""
    way = [max(states.values(), key=lambda s: (s.stuck is not None, s.waited_s))]
    while way[-1].stuck is not None and way[-1] not in way[:-1]:
        state = way[-1]
        members = (states[rank] for rank in sorted(state.awaited) if rank in states)
        late = [member for member in members if not _came(member, state)]
        if not late:
            return _all_there(state)
        # A rank whose device has nothing to wait for says more than one that waits itself.
        way.append(min(late, key=lambda s: s.stuck is not None))
    before, state = way[-2:]
    if state.stuck is not None:
        # Round in a circle. Who has queued what the one before waits in only waits for its turn.
        circle = way[way.index(state) :]
        skipped = [(b, s) for b, s in pairwise(circle) if not _queued(s, b)]
        if len(skipped) != 1:
            said = f"{state.who} {state.doing()} in {state.phase} and did not come to "
            said += f"{before.stuck}: {before.waits()}; they went different ways"
            return Diagnosis("missing", (state.rank, before.rank), said)
        before, state = skipped[0]
    said = f"{state.who} has not queued {before.stuck} and {state.doing()}: {before.waits()}"
    return Diagnosis("missing", (state.rank,), said)


def _came(state: RankState, other: RankState) -> bool:
    """Whether the device of `state` is in what `other` waits in, or past it."""
    wanted, mine = other.stuck, state.stuck
    assert wanted is not None
    if wanted.peer is not None:
        # Messages that start together share a number.
        return mine is not None and any(
            op.peer == other.rank and op.group == wanted.group
            for op, done in state.queue or ()
            if not done and (op.group, op.number) == (mine.group, mine.number)
        )
    if mine is not None and (mine.group, mine.number) == (wanted.group, wanted.number):
        return True
    return _queued(state, other) and all(
        done
        for op, done in state.queue or ()
        if (op.group, op.number, op.peer) == (wanted.group, wanted.number, None)
    )


def _queued(state: RankState, other: RankState) -> bool:
    """Whether the host of `state` has come to what the device of `other` waits in."""
    wanted = other.stuck
    assert wanted is not None
    queue = [op for op, _ in state.queue or () if op.group == wanted.group]
    if wanted.peer is not None:
        return any(op.peer == other.rank for op in queue)
    return any(op.number >= wanted.number for op in queue if op.peer is None)


def _all_there(state: RankState) -> Diagnosis:
    wanted = state.stuck
    assert wanted is not None
    whom = f"all ranks of {wanted.group} are" if wanted.peer is None else f"rank {wanted.peer} is"
    sentence = f"{state.who} {state.doing()} for {state.waited_s:.0f} s; {whom} in it too, with the"
    sentence += " same tensor: a device or what lies between them stands still"
    return Diagnosis("unknown", (state.rank,), sentence)
