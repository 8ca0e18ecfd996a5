"""Plants random faults in pipeline programs, and judges programs slowly.

The judge shares no code with the checker: it runs programs with names in place of tensors.
"""

from __future__ import annotations

import random
from collections import deque

from parallel3d.schedules.actions import Action, Kind, PipelineProgram, Step
from parallel3d.schedules.orders import StageAssignment


def corrupt(plan: PipelineProgram, rng: random.Random) -> PipelineProgram:
    """Returns a copy in which one action or group of one rank is swapped, missing, doubled or
    moved, or two of its messages are swapped."""
    new: PipelineProgram = [list(steps) for steps in plan]
    steps = new[rng.choice([r for r, steps in enumerate(new) if len(steps) > 1])]
    i, j = rng.randrange(len(steps)), rng.randrange(len(steps))
    how = rng.choice(("swapped", "missing", "doubled", "moved", "exchanged", "renamed"))
    if how == "swapped":
        steps[i], steps[j] = steps[j], steps[i]
    elif how == "missing":
        del steps[i]
    elif how == "doubled":
        steps.insert(j, steps[i])
    elif how == "moved":
        steps.insert(j, steps.pop(i))
    else:
        _exchange_messages(steps, rng, named=how == "renamed")
    return new


def _exchange_messages(steps: list[Step], rng: random.Random, named: bool) -> None:
    """Swaps two messages; of one kind if `named`."""
    places = [
        (index, number)
        for index, step in enumerate(steps)
        if not isinstance(step, Action)
        for number in range(len(step))
    ]
    if len(places) < 2:
        steps.append(steps[0])
        return
    first = rng.choice(places)
    kind = steps[first[0]][first[1]].kind  # type: ignore[index]
    alike = [
        p
        for p in places
        if p != first and (not named or steps[p[0]][p[1]].kind == kind)  # type: ignore[index]
    ]
    second = rng.choice(alike or places)
    groups = {index: list(steps[index]) for index in (first[0], second[0])}  # type: ignore[arg-type]
    a, b = groups[first[0]][first[1]], groups[second[0]][second[1]]
    groups[first[0]][first[1]], groups[second[0]][second[1]] = b, a
    for index, group in groups.items():
        steps[index] = tuple(group)


def is_sound(plan: PipelineProgram, placement: StageAssignment, microbatches: int) -> bool:
    """Returns whether the program trains: runs it with blocking groups, with descriptions as
    tensors.

    Every rank posts a group at once, and continues when each of its messages has met its
    counterpart: the message from or to the same rank at the same position.
    """
    try:
        return _run(plan, placement, microbatches)
    except (KeyError, _WrongError):
        return False


class _WrongError(Exception):
    pass


def _run(plan: PipelineProgram, placement: StageAssignment, microbatches: int) -> bool:
    held: list[dict] = [{} for _ in plan]  # rank → (what, stage, micro-batch) → value
    sends: dict = {}  # (from, to) → values that are not taken yet
    receives: dict = {}  # (from, to) → (rank's dict, key, ticket)
    open_tickets: list[set] = [set() for _ in plan]
    place = [0] * len(plan)
    tickets = 0
    moving = True
    while moving:
        moving = False
        for rank, steps in enumerate(plan):
            while place[rank] < len(steps) and not open_tickets[rank]:
                moving = True
                step = steps[place[rank]]
                place[rank] += 1
                if isinstance(step, Action):
                    _compute(step, rank, held[rank], placement)
                    continue
                for message in step:
                    tickets += 1
                    open_tickets[rank].add(tickets)
                    _post(message, rank, held, placement, sends, receives, tickets)
            for pair in list(sends):
                queue, wanted = sends[pair], receives.get(pair, deque())
                while queue and wanted:
                    value, ticket = queue.popleft()
                    key, other = wanted.popleft()
                    held[pair[1]][key] = value
                    open_tickets[pair[0]].discard(ticket)
                    open_tickets[pair[1]].discard(other)
                    moving = True
    if any(open_tickets) or any(place[r] < len(steps) for r, steps in enumerate(plan)):
        return False
    for rank in range(placement.ranks):
        done = {key[:3] for key in held[rank] if key[0] in ("F", "G", "W")}
        owed = {
            (what, placement.stage(rank, chunk), m)
            for what in "FGW"
            for chunk in range(placement.chunks)
            for m in range(microbatches)
        }
        if done != owed:
            return False
    return True


def _compute(step: Action, rank: int, mine: dict, placement: StageAssignment) -> None:
    if step.chunk >= placement.chunks:
        raise _WrongError
    stage, m = placement.stage(rank, step.chunk), step.microbatch
    if step.kind == Kind.F:
        source = ("act", stage, m)
        _wanted(mine, source, stage > 0)
        _new(mine, ("F", stage, m))
        mine["act", stage + 1, m, "made"] = ("act", stage + 1, m)
        if stage + 1 < placement.stages and placement.place(stage + 1)[0] == rank:
            mine["act", stage + 1, m] = ("act", stage + 1, m)
        return
    if step.kind not in (Kind.B, Kind.I, Kind.W):
        raise _WrongError
    if step.kind in (Kind.B, Kind.I):
        if ("F", stage, m) not in mine:
            raise _WrongError
        _wanted(mine, ("grad", stage, m), stage < placement.stages - 1)
        _new(mine, ("G", stage, m))
        mine["grad", stage - 1, m, "made"] = ("grad", stage - 1, m)
        if stage > 0 and placement.place(stage - 1)[0] == rank:
            mine["grad", stage - 1, m] = ("grad", stage - 1, m)
    if step.kind in (Kind.B, Kind.W):
        if ("G", stage, m) not in mine:
            raise _WrongError
        _new(mine, ("W", stage, m))


def _wanted(mine: dict, key: tuple, is_needed: bool) -> None:
    if is_needed and mine.get(key) != key:
        raise _WrongError


def _new(mine: dict, key: tuple) -> None:
    if key in mine:
        raise _WrongError
    mine[key] = True


def _post(message, rank, held, placement, sends, receives, ticket) -> None:
    if message.chunk >= placement.chunks or message.kind in (Kind.F, Kind.B, Kind.I, Kind.W):
        raise _WrongError
    stage, m = placement.stage(rank, message.chunk), message.microbatch
    forward = message.kind in (Kind.SEND_F, Kind.RECV_F)
    is_send = message.kind in (Kind.SEND_F, Kind.SEND_B)
    other = stage + (1 if forward == is_send else -1)
    if not 0 <= other < placement.stages or placement.place(other)[0] == rank:
        raise _WrongError
    peer = placement.place(other)[0]
    what = "act" if forward else "grad"
    _new(held[rank], ("posted", message.kind, stage, m))
    if is_send:
        value = held[rank][what, other, m, "made"]
        sends.setdefault((rank, peer), deque()).append((value, ticket))
    else:
        receives.setdefault((peer, rank), deque()).append(((what, stage, m), ticket))
