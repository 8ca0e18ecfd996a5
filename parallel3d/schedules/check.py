"""Proves a pipeline program complete, ordered, paired and free of deadlock, or names its fault.

The checker only reads the program; it starts no processes. A program that passes neither hangs nor
trains on the wrong micro-batch, provided that the transport keeps the order of messages between two
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
    """Proves `program` sound and returns its walk; program[rank] holds the steps of that rank.

    `microbatches` defaults to the highest micro-batch number in the program + 1, `assignment` to
    one chunk per rank.

    Raises ScheduleError, which names the rank and the action, unless the program is

    - complete: no action is missing, occurs twice or belongs to another rank;
    - ordered: no backward comes before its forward, no W before its I, no computation before the
      receive of its input and no send before the computation of its result;
    - paired: the n-th receive from a rank is the n-th send of that rank;
    - free of deadlock, even if every group of messages blocks until all of its counterparts are
      posted. This is the worst case, a transport without buffers: buffers only shorten waits.
    """
    assignment = assignment or StageAssignment(len(program) or 1)
    if len(program) not in (0, assignment.ranks):
        raise ScheduleError(
            f"the program has {len(program)} ranks, but its assignment has {assignment.ranks}"
        )
    count = highest(program) + 1 if microbatches is None else microbatches
    found = None
    if 1 <= count <= min(map(len, program), default=0):
        with suppress(IndexError):  # raised for a micro-batch or chunk that does not exist
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
    """Returns a description of the first fault of one rank's actions, or None.

    The other ranks' actions do not matter. Messages may be missing, as in compute orders.
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
    """Returns the rank at the other end of a message, or None if the model ends there."""
    with suppress(ValueError):
        return peer_of(message, rank, assignment)
    return None


def _mismatch(found: Walk, count: int) -> str | None:
    """Describes the first message that its two ranks order differently, or returns None.

    Messages match by position. If two receives were swapped, the executor would compute with the
    data of another micro-batch or chunk, and would train wrongly without an error.
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
