"""Proves a pipeline program complete, ordered, paired and free of deadlock, or names its fault.

The checker reads the program alone and needs no process. A program that passes cannot hang and
cannot train on the wrong micro-batch if the transport keeps the order of messages between two
ranks, as NCCL and gloo do.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from itertools import product

from parallel3d.schedules.actions import Action, Kind, Step
from parallel3d.schedules.orders import StageAssignment
from parallel3d.schedules.walk import Pair, ScheduleError, Walk, highest, peer_of, walk


@dataclass(frozen=True)
class ScheduleReport:
    """Costs of a sound program.

    `peak_live[rank]`: the most chunk-activations (one micro-batch in one chunk) held at once, from
    the start of F to the end of B or W. Qi et al. 2023 (table 1) count 34 units until I and 32 from
    there to W; counting 34 throughout is a safe upper bound.
    `messages`: messages sent by all ranks together.
    """

    placement: StageAssignment
    microbatches: int
    peak_live: tuple[int, ...]
    messages: int

    @property
    def stages(self) -> int:
        return self.placement.stages

    @property
    def peak_of_1f1b(self) -> float:
        """The largest peak as a fraction of 1F1B's on its first rank: min(p, m) micro-batches."""
        most = min(self.placement.ranks, self.microbatches) * self.placement.chunks
        return max(self.peak_live) / most


def check(
    program: Sequence[Sequence[Step]],
    microbatches: int | None = None,
    placement: StageAssignment | None = None,
) -> ScheduleReport:
    """Proves `program` (program[rank] = steps of that rank) sound and returns its costs.

    `microbatches` defaults to the highest number in the program + 1, `placement` to one chunk a
    rank.

    Raises ScheduleError, naming rank and action, if the program is not

    - complete: an action is missing, doubled or of another rank;
    - ordered: a backward precedes its forward, W its I, compute its receive, or a send its compute;
    - paired: the n-th receive from a rank is not the n-th send of that rank;
    - free of deadlock when every group of messages blocks until all of its counterparts are posted.
      That is a transport without buffers, the worst case: buffering only removes waits.
    """
    placement = placement or StageAssignment(len(program) or 1)
    if len(program) not in (0, placement.ranks):
        raise ScheduleError(
            f"the plan has {len(program)} ranks, and its placement {placement.ranks}"
        )
    count = highest(program) + 1 if microbatches is None else microbatches
    found = None
    if 1 <= count <= min(map(len, program), default=0):
        with suppress(IndexError):  # no such micro-batch or chunk
            found = walk(program, placement, slots=0, count=count)
    if found is None or not found.complete or found.sent != found.received:
        raise ScheduleError(_fault(program, placement, count, found))
    sends = sum(map(len, found.sent.values()))
    return ScheduleReport(placement, count, tuple(found.peaks), sends)


def _fault(
    program: Sequence[Sequence[Step]], placement: StageAssignment, count: int, found: Walk | None
) -> str:
    """Describes the first fault of a program that is not sound."""
    if not program or count < 1:
        return "the plan is empty: it needs at least one stage and one micro-batch"
    for rank, steps in enumerate(program):
        sentence = fault_of_rank(steps, rank, placement, count)
        if sentence is not None:
            return sentence
    sentence = _swapped(program, placement)
    if sentence is not None:
        return sentence
    assert found is not None and found.waits, f"no fault was found in {program}"
    return found.deadlock()


# What a rank does with each micro-batch in each chunk; B stands for I and W.
_DUTIES = tuple(kind for kind in Kind if kind != Kind.B)
_Key = tuple[Kind, int]  # and chunk


def fault_of_rank(
    steps: Sequence[Step],
    rank: int,
    placement: StageAssignment,
    count: int,
    has_messages: bool = True,
) -> str | None:
    """Describes the first fault that one rank's steps have by themselves; None: there is none.

    Not `has_messages`: the steps are compute orders.
    """
    near = _neighbours(rank, placement)
    # (kind, chunk) → micro-batch → (place, action as written); B counts as I and as W.
    places: dict[_Key, dict[int, tuple[int, Action]]] = defaultdict(dict)
    for place, (one, in_group) in enumerate(_flat(steps)):
        kind, chunk, m = one.kind, one.chunk, one.microbatch
        if in_group and kind.is_compute:
            return f"{one} computes and cannot stand in a group of messages"
        if not in_group and not kind.is_compute:
            return f"{one} is a message and must stand in a group"
        if chunk >= placement.chunks:
            many = f"{placement.chunks} chunks" if placement.chunks > 1 else "one chunk"
            return f"rank {rank} has {one}, but plans have {many} per rank"
        if in_group and near[kind, chunk] is None:
            return f"rank {rank} of {placement.ranks} has {one}, but has no neighbour on that side"
        for half in (Kind.I, Kind.W) if kind == Kind.B else (kind,):
            at, before = places[half, chunk].setdefault(m, (place, one))
            if at < place:
                if before.kind == kind:
                    return f"rank {rank} has {one} twice"
                return (
                    f"rank {rank} has {one} beside another backward of the same micro-batch: "
                    "it takes either B, or I and W"
                )
        if m >= count:
            return f"rank {rank} has {one}, but micro-batches are 0 to {count - 1}"
    for kind, chunk in product(_DUTIES, range(placement.chunks)):
        if kind.is_compute or (has_messages and near[kind, chunk] is not None):
            for m in range(count):
                if m not in places[kind, chunk]:
                    whole = kind in (Kind.I, Kind.W) and not any(
                        m in places[half, chunk]
                        or any(one.kind != Kind.B for _, one in places[half, chunk].values())
                        for half in (Kind.I, Kind.W)
                    )
                    absent = Action(Kind.B if whole else kind, m, chunk)
                    return f"rank {rank} never does {absent}"
    for kind, chunk in product(_DUTIES, range(placement.chunks)):
        mine = places[kind, chunk]
        for need in _needs(kind, chunk, rank, placement, has_messages):
            for m in sorted(mine):
                (at, one), (place, needed) = mine[m], places[need][m]
                if place > at:
                    return f"rank {rank} does {one} before {needed}, which it needs"
    return None


def _flat(steps: Sequence[Step]) -> Iterator[tuple[Action, bool]]:
    """Yields the actions, and whether they stand in a group."""
    for step in steps:
        if isinstance(step, Action):
            yield step, False
        else:
            yield from ((message, True) for message in step)


_OFFSET = {Kind.SEND_F: 1, Kind.RECV_B: 1, Kind.SEND_B: -1, Kind.RECV_F: -1}


def _neighbours(rank: int, placement: StageAssignment) -> dict[_Key, int | None]:
    """Returns the peer of each kind of message of each chunk; None where there is no message."""
    peers: dict[_Key, int | None] = {}
    for chunk, (kind, offset) in product(range(placement.chunks), _OFFSET.items()):
        place = placement.neighbour(rank, chunk, offset)
        peers[kind, chunk] = None if place is None or place[0] == rank else place[0]
    return peers


def _needs(
    kind: Kind, chunk: int, rank: int, placement: StageAssignment, has_messages: bool
) -> list[_Key]:
    """Returns the (kind, chunk) that this kind and chunk needs from the same rank."""
    if kind in (Kind.RECV_F, Kind.RECV_B):
        return []
    if kind not in (Kind.F, Kind.I):
        return [(Kind.F if kind == Kind.SEND_F else Kind.I, chunk)]
    forward = kind == Kind.F
    needs = [] if forward else [(Kind.F, chunk)]
    source = placement.neighbour(rank, chunk, -1 if forward else 1)
    if source is not None and source[0] == rank:
        needs.append((kind, source[1]))
    elif source is not None and has_messages:
        needs.append((Kind.RECV_F if forward else Kind.RECV_B, chunk))
    return needs


def _swapped(program: Sequence[Sequence[Step]], placement: StageAssignment) -> str | None:
    """Describes where two ranks disagree on the order of their messages.

    Messages match by position: with swapped receives an executor would compute on another
    micro-batch's or chunk's data and train wrongly without an error.
    """
    flows: dict[Pair, tuple[list[Action], list[Action]]] = defaultdict(lambda: ([], []))
    for rank, steps in enumerate(program):
        for one, in_group in _flat(steps):
            if in_group:
                peer = peer_of(one, rank, placement)
                pair = (rank, peer) if one.kind.is_send else (peer, rank)
                flows[pair][not one.kind.is_send].append(one)
    for (sender, receiver), (sent, received) in sorted(flows.items()):
        for number, (ours, theirs) in enumerate(zip(sent, received, strict=True)):
            ahead = 1 if ours.kind == Kind.SEND_F else -1
            to = placement.neighbour(sender, ours.chunk, ahead), ours.microbatch, ahead
            ahead = 1 if theirs.kind == Kind.RECV_F else -1
            if to != ((receiver, theirs.chunk), theirs.microbatch, ahead):
                return (
                    f"message {number} from rank {sender} to rank {receiver} is sent as {ours} but "
                    f"received as {theirs}: receives are swapped"
                )
    return None
