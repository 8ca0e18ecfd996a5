"""Proves a pipeline plan complete, ordered, paired and free of deadlock, or says why not.

It reads the plan alone, whatever made it, and needs no process: a plan that passes here cannot hang
and cannot train on the wrong micro-batch, provided that the transport keeps the order of messages
between two ranks (NCCL and gloo do).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from parallel3d.pipeline.schedule import Action, CommGroup, Kind, Step


class ScheduleError(ValueError):
    """A plan that would hang, or compute something else than the model; says where and why."""


@dataclass(frozen=True)
class Report:
    """What a sound plan costs.

    `peak_live[rank]` is the most micro-batches whose activations that rank holds at once (from the
    start of F to the end of B); `messages` counts the messages sent by all ranks together.
    """

    stages: int
    microbatches: int
    peak_live: tuple[int, ...]
    messages: int


def check(plan: Sequence[Sequence[Step]], microbatches: int | None = None) -> Report:
    """Prove `plan` (plan[rank] = steps of that stage) sound and return its costs.

    `microbatches` is how many there should be; without it, the highest number in the plan counts.
    Raises ScheduleError, naming rank and action, if an action is missing, doubled or alien to its
    rank (complete); a B precedes its F, compute its receive, or a send its compute (ordered); the
    n-th receive from a neighbour is not of what that neighbour sends n-th (paired); or ranks wait
    for each other when every group of messages blocks until neighbours have posted all of its
    counterparts (deadlock; so does a transport that buffers nothing, the worst that can be met).
    """
    stages = len(plan)
    flat = [list(_actions(steps)) for steps in plan]
    highest = max((action.microbatch for actions in flat for action in actions), default=-1)
    expected = highest + 1 if microbatches is None else microbatches
    if not stages or not expected:
        raise ScheduleError("the plan is empty: it needs at least one stage and one micro-batch")
    for rank, actions in enumerate(flat):
        _check_complete(rank, actions, stages, expected)
        _check_order(rank, actions)
    _check_pairs(flat)
    _check_deadlock(plan)
    sends = sum(action.kind.is_send for actions in flat for action in actions)
    return Report(stages, expected, tuple(_peak_live(actions) for actions in flat), sends)


def _actions(steps: Sequence[Step]) -> Iterator[Action]:
    """All actions of one rank in order; a group that computes, or a bare message, is an error."""
    for step in steps:
        if isinstance(step, Action):
            if not step.kind.is_compute:
                raise ScheduleError(f"{step} is a message and must stand in a group")
            yield step
        else:
            for action in step:
                if action.kind.is_compute:
                    raise ScheduleError(
                        f"{action} computes and cannot stand in a group of messages"
                    )
                yield action


def _check_complete(rank: int, actions: Sequence[Action], stages: int, microbatches: int) -> None:
    """Each micro-batch has exactly the actions that this rank owes it, each of them once."""
    needed = [Kind.F, Kind.B]
    if rank > 0:
        needed += [Kind.RECV_F, Kind.SEND_B]
    if rank < stages - 1:
        needed += [Kind.SEND_F, Kind.RECV_B]
    seen: dict[Kind, set[int]] = {kind: set() for kind in needed}
    for action in actions:
        if action.chunk:
            raise ScheduleError(f"rank {rank} has {action}, but plans have one chunk per rank")
        if action.kind not in seen:
            raise ScheduleError(
                f"rank {rank} of {stages} has {action}, but has no neighbour on that side"
            )
        if not 0 <= action.microbatch < microbatches:
            raise ScheduleError(
                f"rank {rank} has {action}, but micro-batches are 0 to {microbatches - 1}"
            )
        if action.microbatch in seen[action.kind]:
            raise ScheduleError(f"rank {rank} has {action} twice")
        seen[action.kind].add(action.microbatch)
    for kind, numbers in seen.items():
        if len(numbers) < microbatches:
            absent = min(set(range(microbatches)) - numbers)
            raise ScheduleError(f"rank {rank} never does {Action(kind, absent)}")


# What must be done on the same rank before an action of this kind, if the rank does it at all.
_NEEDS: dict[Kind, tuple[Kind, ...]] = {
    Kind.F: (Kind.RECV_F,),
    Kind.B: (Kind.F, Kind.RECV_B),
    Kind.SEND_F: (Kind.F,),
    Kind.SEND_B: (Kind.B,),
    Kind.RECV_F: (),
    Kind.RECV_B: (),
}


def _check_order(rank: int, actions: Sequence[Action]) -> None:
    """On one (complete) rank nothing happens before what it needs."""
    position: dict[Kind, dict[int, int]] = {kind: {} for kind in Kind}
    for index, action in enumerate(actions):
        position[action.kind][action.microbatch] = index
    for index, action in enumerate(actions):
        for kind in _NEEDS[action.kind]:
            if position[kind].get(action.microbatch, -1) > index:
                need = Action(kind, action.microbatch)
                raise ScheduleError(f"rank {rank} does {action} before {need}, which it needs")


def _check_pairs(flat: Sequence[Sequence[Action]]) -> None:
    """Neighbours agree on the order of their messages: they match by position, not by name.

    An executor that trusted a swapped receive would compute on another micro-batch's data and
    train wrongly without an error.
    """
    for rank in range(len(flat) - 1):
        for send, receive, sender, receiver in (
            (Kind.SEND_F, Kind.RECV_F, rank, rank + 1),
            (Kind.SEND_B, Kind.RECV_B, rank + 1, rank),
        ):
            sent = [action for action in flat[sender] if action.kind == send]
            received = [action for action in flat[receiver] if action.kind == receive]
            for number, (ours, theirs) in enumerate(zip(sent, received, strict=True)):
                if ours.microbatch != theirs.microbatch:
                    raise ScheduleError(
                        f"message {number} from rank {sender} to rank {receiver} is sent as {ours} "
                        f"but received as {theirs}: receives are swapped"
                    )


def _check_deadlock(plan: Sequence[Sequence[Step]]) -> None:
    """Run the (paired) plan with every group blocking until all its counterparts are posted.

    Posting is monotone: a rank that can go on now could also go on later, so the order in which
    ranks are tried does not matter, and one pass from rank to woken neighbour decides.
    """
    stages = len(plan)
    posted: list[dict[Kind, int]] = [dict.fromkeys(Kind, 0) for _ in plan]
    position = [0] * stages
    waiting: list[list[tuple[Action, int]]] = [[] for _ in plan]  # (member, its number in its flow)
    current: list[CommGroup] = [()] * stages
    ready = deque(range(stages))
    while ready:
        rank = ready.popleft()
        steps, mine = plan[rank], posted[rank]
        while True:
            waiting[rank] = [
                (action, number)
                for action, number in waiting[rank]
                if posted[rank + action.kind.peer_offset][_COUNTERPART[action.kind]] <= number
            ]
            if waiting[rank] or position[rank] == len(steps):
                break
            step = steps[position[rank]]
            position[rank] += 1
            if isinstance(step, Action):
                continue
            current[rank] = step
            for action in step:
                waiting[rank].append((action, mine[action.kind]))
                mine[action.kind] += 1
                ready.append(rank + action.kind.peer_offset)
    blocked = {rank: members for rank, members in enumerate(waiting) if members}
    if blocked:
        raise ScheduleError(_describe_deadlock(blocked, current))


_COUNTERPART = {
    Kind.SEND_F: Kind.RECV_F,
    Kind.RECV_F: Kind.SEND_F,
    Kind.SEND_B: Kind.RECV_B,
    Kind.RECV_B: Kind.SEND_B,
}


def _describe_deadlock(
    blocked: dict[int, list[tuple[Action, int]]], groups: Sequence[CommGroup]
) -> str:
    """Follow who waits for whom until a rank comes up again, and name that circle."""
    path: list[int] = []
    rank = min(blocked)
    # A finished rank has posted all its messages, so whoever blocks waits for a blocked rank.
    while rank not in path:
        path.append(rank)
        rank += blocked[rank][0][0].kind.peer_offset
    sentences = []
    for member in path[path.index(rank) :]:
        action = blocked[member][0][0]
        peer = member + action.kind.peer_offset
        group = " ".join(str(a) for a in groups[member])
        verb = f"send {action} to" if action.kind.is_send else f"get {action} from"
        sentences.append(f"rank {member} is in group ({group}) and waits to {verb} rank {peer}")
    return "deadlock: " + ", while ".join(sentences)


def _peak_live(actions: Sequence[Action]) -> int:
    """The most micro-batches of one rank that are past their F and not past their B."""
    live = peak = 0
    for action in actions:
        live += (action.kind == Kind.F) - (action.kind == Kind.B)
        peak = max(peak, live)
    return peak
