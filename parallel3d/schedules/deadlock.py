"""Whether the ranks of a pipeline plan could wait for each other for ever."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from typing import TypeAlias

from parallel3d.schedules.actions import Action
from parallel3d.schedules.simulate import ScheduleError

# A message of a group: its action, the rank at its other end, whether it is the send, and its
# number among all that go from and to the same two ranks in this direction.
Member: TypeAlias = tuple[Action, int, bool, int]
Group: TypeAlias = list[Member]


def check_deadlock(groups: Sequence[Sequence[Group]]) -> None:
    """Run the groups of every rank, each blocking until all of its counterparts are posted.

    The messages must be paired. Posting is monotone: a rank that can go on now could also go on
    later, so the order in which ranks are tried does not matter, and one pass from rank to woken
    rank decides. Raises ScheduleError with the circle of those who wait.
    """
    size = len(groups)
    # posted[is_send][a * size + b]: how many sends (or receives) from a to b have been posted.
    posted = ([0] * size * size, [0] * size * size)
    position = [0] * size
    entered = [-1] * size  # the last group that this rank has posted
    ready = deque(range(size))
    while ready:
        rank = ready.popleft()
        mine = groups[rank]
        index = position[rank]
        while index < len(mine):
            group = mine[index]
            if entered[rank] < index:
                entered[rank] = index
                for _, peer, is_send, number in group:
                    pair = rank * size + peer if is_send else peer * size + rank
                    posted[is_send][pair] = number + 1
                    ready.append(peer)
            if any(
                posted[not is_send][rank * size + peer if is_send else peer * size + rank] <= number
                for _, peer, is_send, number in group
            ):
                break
            index += 1
        position[rank] = index
    blocked = {
        rank: [
            member
            for member in groups[rank][position[rank]]
            if not _is_met(member, rank, size, posted)
        ]
        for rank in range(size)
        if position[rank] < len(groups[rank])
    }
    if blocked:
        raise ScheduleError(_describe(blocked, groups, position))


def _is_met(member: Member, rank: int, size: int, posted: tuple[list[int], list[int]]) -> bool:
    _, peer, is_send, number = member
    pair = rank * size + peer if is_send else peer * size + rank
    return posted[not is_send][pair] > number


def _describe(
    blocked: dict[int, Group], groups: Sequence[Sequence[Group]], position: Sequence[int]
) -> str:
    """Follow who waits for whom until a rank comes up again, and name that circle."""
    path: list[int] = []
    rank = min(blocked)
    # A finished rank has posted all its messages, so whoever blocks waits for a blocked rank.
    while rank not in path:
        path.append(rank)
        rank = blocked[rank][0][1]
    sentences = []
    for member in path[path.index(rank) :]:
        action, peer, is_send, _ = blocked[member][0]
        group = " ".join(str(message[0]) for message in groups[member][position[member]])
        verb = f"send {action} to" if is_send else f"get {action} from"
        sentences.append(f"rank {member} is in group ({group}) and waits to {verb} rank {peer}")
    return "deadlock: " + ", while ".join(sentences)
