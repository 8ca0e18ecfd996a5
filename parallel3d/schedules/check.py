"""Proves a pipeline program complete, ordered, paired and free of deadlock, or names its fault.

The checker reads the program alone and needs no process. A program that passes cannot hang and
cannot train on the wrong micro-batch if the transport keeps the order of messages between two
ranks, as NCCL and gloo do.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from itertools import chain, pairwise, product

from parallel3d.schedules.actions import Action, Kind, Step
from parallel3d.schedules.orders import StageAssignment
from parallel3d.schedules.walk import ScheduleError, Walk, highest, peer_of, walk


def check(
    program: Sequence[Sequence[Step]],
    microbatches: int | None = None,
    assignment: StageAssignment | None = None,
) -> Walk:
    """Proves `program` (program[rank] = steps of that rank) sound and returns its walk.

    `microbatches` defaults to the highest number in the program + 1, `assignment` to one chunk a
    rank.

    Raises ScheduleError, naming rank and action, if the program is not

    - complete: an action is missing, doubled or of another rank;
    - ordered: a backward precedes its forward, W its I, compute its receive, or a send its compute;
    - paired: the n-th receive from a rank is not the n-th send of that rank;
    - free of deadlock when every group of messages blocks until all of its counterparts are posted.
      That is a transport without buffers, the worst case: buffering only removes waits.
    """
    assignment = assignment or StageAssignment(len(program) or 1)
    if len(program) not in (0, assignment.ranks):
        raise ScheduleError(
            f"the program has {len(program)} ranks, but its assignment has {assignment.ranks}"
        )
    count = highest(program) + 1 if microbatches is None else microbatches
    found = None
    if 1 <= count <= min(map(len, program), default=0):
        with suppress(IndexError):  # there is no such micro-batch or chunk
            found = walk(program, assignment, blocks=True, count=count)
    if found is None or not found.complete or found.sent != found.received:
        raise ScheduleError(_fault(program, assignment, count, found))
    return found


def _fault(
    program: Sequence[Sequence[Step]], assignment: StageAssignment, count: int, found: Walk | None
) -> str:
    """Describes the first fault of a program that is not sound."""
    if not program or count < 1:
        return "the program is empty: it needs at least one stage and one micro-batch"
    for rank, steps in enumerate(program):
        if sentence := fault_of_rank(steps, rank, assignment, count):
            return sentence
    if found is None:
        return "the program has a message outside of a group, or a computation in one"
    if sentence := _mismatch(found, count):
        return sentence
    assert found.waits, f"no fault was found in {program}"
    return found.deadlock()


def fault_of_rank(
    steps: Sequence[Step], rank: int, assignment: StageAssignment, count: int
) -> str | None:
    """Describes the first fault of one rank's actions, whatever the other ranks do; None if there
    is none.

    Messages may be missing, as they are in compute orders.
    """
    places: dict[Action, int] = {}
    for one in chain.from_iterable((s,) if isinstance(s, Action) else s for s in steps):
        if one.microbatch >= count:
            return f"rank {rank} has {one}, but micro-batches are 0 to {count - 1}"
        if one.chunk >= assignment.chunks:
            return f"rank {rank} has {one}, but chunks are 0 to {assignment.chunks - 1}"
        if not one.kind.is_compute and _reader(one, rank, assignment) in (None, rank):
            return f"rank {rank} has {one}, but no other rank is on that side"
        if one in places:
            return f"rank {rank} has {one} twice"
        places[one] = len(places)
    has_halves = any(one.kind == Kind.I for one in places)
    for chunk, m in product(range(assignment.chunks), range(count)):
        forward, whole, input, weight = (Action(kind, m, chunk) for kind in _COMPUTES)
        halves = {input, weight} & places.keys()
        if whole in places and halves:
            return (
                f"rank {rank} has both {whole} and {halves.pop()}: a micro-batch takes either B, "
                "or I and W"
            )
        splits = halves or (has_halves and whole not in places)
        duties = (forward, input, weight) if splits else (forward, whole)
        for needed, one in pairwise((None, *duties)):
            if one not in places:
                return f"rank {rank} never does {one}"
            if needed is not None and places[needed] > places[one]:
                return f"rank {rank} does {one} before {needed}, which it needs"
    return None


_COMPUTES = (Kind.F, Kind.B, Kind.I, Kind.W)


def _reader(message: Action, rank: int, assignment: StageAssignment) -> int | None:
    with suppress(ValueError):
        return peer_of(message, rank, assignment)
    return None


def _mismatch(found: Walk, count: int) -> str | None:
    """Describes where two ranks disagree on the order of their messages.

    Messages match by position: with swapped receives an executor would compute on another
    micro-batch's or chunk's data and train wrongly without an error.
    """

    def named(message: int) -> str:
        number, m = divmod(message, count)
        return f"{'gradient' if number % 2 else 'activation'} {m} for stage {number // 2}"

    for (sender, receiver), sent in sorted(found.sent.items()):
        pairs = zip(sent, found.received.get((sender, receiver), []), strict=False)
        for number, (ours, theirs) in enumerate(pairs):
            if ours != theirs:
                return (
                    f"message {number} from rank {sender} to rank {receiver} is sent as "
                    f"{named(ours)} but received as {named(theirs)}"
                )
    return None
