"""Diagnoses a hang: finds the rank at fault from the states of all ranks."""

from __future__ import annotations

import json
import re
from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from itertools import pairwise
from typing import Any, Literal, NamedTuple

from parallel3d.comm.operation_log import UNEVEN, Divergence, LoggedOperation, OperationLog
from parallel3d.private_names import flight_records

# The device's queue of operations comes from the flight recorder of torch's NCCL groups. A wait for
# an NCCL handle only orders streams, and the host blocks somewhere later, so the host cannot tell
# which collective never ends. The recorder has an entry with a state for each queued collective.

# Number of operations kept per group before its first unfinished operation, and again from that
# operation on. Ranks compare them one by one.
KEPT = 8
WORLD = "default_pg"  # torch's description of the group of all ranks
MESSAGE = re.compile(r"(send|recv) (\d+)(?:->|<-)(\d+)")


class QueuedOperation(NamedTuple):
    """A collective or message that has begun, and whether it has ended.

    On a device, NCCL numbers the collectives of a group and its messages separately, and the
    messages of one batch share an `operation.number`.
    """

    operation: LoggedOperation
    is_done: bool


class Record(NamedTuple):
    """Flight record of one rank: its operations in queue order, and its groups' ranks."""

    queue: tuple[QueuedOperation, ...]
    ranks: dict[str, tuple[int, ...]]


def take_flight_record() -> str:
    """Returns the flight recorder's content for all groups of this process, as JSON."""
    # Finished operations are included: a rank with a smaller tensor may have finished the call.
    records = flight_records()
    used = (text for text in records if json.loads(text).get("entries"))
    return next(used, records[0])


def read_flight_record(text: str, known: Mapping[str, tuple[int, ...]]) -> Record:
    """Parses the newest NCCL entries. Raises KeyError or ValueError for an unknown format."""
    content = json.loads(text)
    ranks = dict(known)
    for group in content.get("pg_config", {}).values():
        if members := tuple(json.loads(group["ranks"])):
            ranks[_name(group["name"], group["desc"])] = members
    entries = [e for e in content.get("entries", []) if not e["profiling_name"].startswith("gloo")]
    queue = [
        QueuedOperation(_operation(entry, ranks), done) for entry, done in _without_batches(entries)
    ]
    return Record(_newest(queue), ranks)


def _name(name: str, desc: str) -> str:
    if desc == WORLD:
        return "world"
    return desc if desc and desc != "undefined" else name


def _without_batches(entries: Iterable[dict[str, Any]]) -> list[tuple[dict[str, Any], bool]]:
    """Returns pairs (entry, whether it is done), without the entries of batches.

    Each message of a batch has an entry whose state is never updated. The batch's own entry, which
    follows the messages' entries, has the state of all of them.
    """
    found: list[tuple[dict[str, Any], bool]] = []
    for entry in entries:
        done = entry["state"] == "completed"
        if not entry["profiling_name"].endswith(":coalesced"):
            found.append((entry, done))
            continue
        for i in range(len(found) - 1, -1, -1):
            member = found[i][0]
            if member["pg_id"] == entry["pg_id"]:
                if _numbers(member) != _numbers(entry):
                    break
                found[i] = member, done
    return found


def _numbers(entry: dict[str, Any]) -> tuple[int, int]:
    return entry["collective_seq_id"], entry["p2p_seq_id"]


def _operation(entry: dict[str, Any], ranks: Mapping[str, tuple[int, ...]]) -> LoggedOperation:
    group = _name(*entry["process_group"])
    name = entry["profiling_name"].partition(":")[2].removeprefix("_")
    number, peer = entry["collective_seq_id"], None
    if message := MESSAGE.fullmatch(name):
        other = int(message[3])
        members = ranks.get(group, ())
        name = "receive" if message[1] == "recv" else "send"
        number, peer = entry["p2p_seq_id"], members[other] if other < len(members) else other
    shapes, dtypes = entry["input_sizes"], entry["input_dtypes"]
    shape = tuple(size for shape in shapes for size in shape)
    return LoggedOperation(group, number, name, shape, dtypes[0].lower() if dtypes else "", peer)


def _newest(queue: list[QueuedOperation]) -> tuple[QueuedOperation, ...]:
    """Returns only the operations near each group's first unfinished one (`KEPT`)."""
    places: dict[str, list[int]] = defaultdict(list)
    for i, queued in enumerate(queue):
        places[queued.operation.group].append(i)
    kept = []
    for of_group in places.values():
        unfinished = (n for n, i in enumerate(of_group) if not queue[i].is_done)
        first = next(unfinished, len(of_group))
        kept += of_group[max(0, first - KEPT) : first + KEPT]
    return tuple(queue[i] for i in sorted(kept))


def of_host(log: OperationLog) -> tuple[QueuedOperation, ...]:
    """Returns the newest operations that the host has begun; at most one of them is unfinished."""
    waiting = log.waiting
    return tuple(QueuedOperation(operation, operation != waiting) for operation in log.latest(20))


# States of the ranks.


Kind = Literal["dead", "shape", "missing", "unknown"]


@dataclass(frozen=True)
class RankState:
    """Activity of one rank at the moment when its state was requested.

    Attributes:
        who: name of the rank, such as "rank 3 (pp 0, dp 1, tp 1) on host".
        phase: phase of the run, such as "train step 12".
        place: innermost line of this package on the rank's stack; "" if there is none.
        blocked: function of torch.distributed that the rank is running; "" if there is none.
        waited_s: seconds without progress.
        ranks: ranks of each group by its name.
        divergence: first difference from the preceding step (`OperationLog.divergence`); None if
            there is none.
        queue: newest operations that the host has begun or, with `on_device`, queued on the device.
        device_queue: operations queued on the device, in order; None without a flight record.
        on_device: whether `queue` is `device_queue`.
    """

    rank: int
    who: str
    phase: str
    place: str = ""
    blocked: str = ""
    waited_s: float = 0.0
    ranks: dict[str, tuple[int, ...]] = field(default_factory=dict)
    divergence: Divergence | None = None
    queue: tuple[QueuedOperation, ...] = ()
    device_queue: tuple[QueuedOperation, ...] | None = None
    on_device: bool = False

    @property
    def stuck(self) -> LoggedOperation | None:
        """Returns the operation in which the rank waits: the first that has not ended, or None."""
        return next((q.operation for q in self.queue if not q.is_done), None)

    @property
    def is_waiting(self) -> bool:
        return self.stuck is not None or bool(self.blocked)

    @property
    def awaited(self) -> set[int]:
        operation = self.stuck
        if operation is None:
            return set()
        if operation.peer is not None:
            return {operation.peer}
        return set(self.ranks.get(operation.group, ())) - {self.rank}

    def doing(self) -> str:
        """Returns a clause such as "waits in all_reduce 5 of dp (float32[8])"."""
        if self.stuck is not None:
            return f"waits {'on its device ' if self.on_device else ''}in {self.stuck}"
        if self.blocked:
            return f"waits in torch.distributed's {self.blocked}{self.place}"
        return f"is in {self.phase}{self.place}, in no operation"

    def waits(self) -> str:
        """Returns a clause about this rank's wait, as evidence against another rank."""
        return f"rank {self.rank} {self.doing()} in {self.phase}, for {self.waited_s:.0f} s"


@dataclass(frozen=True)
class Diagnosis:
    """Cause of a hang: its kind, the ranks at fault, and a sentence for the user."""

    kind: Kind
    ranks: tuple[int, ...]
    sentence: str

    @property
    def host(self) -> str | None:
        """Returns the host of the first of `ranks`, with which the sentence begins."""
        found = re.match(r"rank \d+ \([^)]*\) on (\S+)", self.sentence)
        return found[1] if found else None


def to_json(state: RankState) -> dict[str, Any]:
    """Converts a state to JSON for the store, where named tuples become lists."""
    return dict(vars(state))


def from_json(content: dict[str, Any]) -> RankState:
    def operation(fields: list) -> LoggedOperation:
        group, number, name, shape, dtype, peer = fields
        return LoggedOperation(group, number, name, tuple(shape), dtype, peer)

    for key in ("queue", "device_queue"):
        if (queue := content[key]) is not None:
            content[key] = tuple(QueuedOperation(operation(fields), done) for fields, done in queue)
    if (divergence := content["divergence"]) is not None:
        content["divergence"] = Divergence(*(fields and operation(fields) for fields in divergence))
    content["ranks"] = {name: tuple(ranks) for name, ranks in content["ranks"].items()}
    return RankState(**content)


# Diagnosis. A hang has one of these kinds:
# dead        A rank does not answer: its process is stopped or gone, or its host is unreachable.
# shape       Ranks are in the same operation of a group, but with different tensors or calls.
# missing     A rank has not reached an operation in which others wait.
# unknown     The states of the ranks do not show a rank at fault.
#
# If two ranks wait in different places, either may be at fault. But training repeats itself: if one
# rank's operations differ from those of its last step and the other's do not, the first rank is at
# fault.


def diagnose(states: Mapping[int, RankState], silent: Mapping[int, tuple[str, str]]) -> Diagnosis:
    """Returns the diagnosis; `silent` maps each silent rank to its name and the reason."""
    if silent:
        return _dead(states, silent)
    on_devices = {
        rank: replace(state, queue=state.device_queue, on_device=True)
        for rank, state in states.items()
        if state.device_queue is not None
    }
    # With NCCL, the devices wait. The hosts continue until they read a value, so they look alike.
    if len(on_devices) == len(states) and any(state.stuck for state in on_devices.values()):
        states = on_devices
    if (found := _diverged(states) or _other_tensor(states)) is not None:
        return found
    # In a ring, not every waiting rank leads to the missing rank. The neighbours of that rank do;
    # ranks further away wait for peers that have reached the same messages.
    longest = sorted(states.values(), key=lambda s: (s.stuck is None, -s.waited_s))
    ways = (_absent(states, state) for state in longest if state.stuck is not None)
    return next(filter(None, ways), None) or _elsewhere(states) or _unknown(states, longest[0])


def _dead(states: Mapping[int, RankState], silent: Mapping[int, tuple[str, str]]) -> Diagnosis:
    ranks = tuple(sorted(silent))
    sentence = "; ".join(f"{who} {why}" for who, why in (silent[rank] for rank in ranks[:3]))
    if len(ranks) > 3:
        sentence += f"; and {len(ranks) - 3} more"
    witness = _witness(states.values(), ranks)
    return Diagnosis("dead", ranks, f"{sentence}: {witness.waits()}")


def _witness(states: Iterable[RankState], ranks: Iterable[int]) -> RankState:
    """Returns the rank that has waited longest for one of `ranks`, or else any waiting rank."""
    blamed = set(ranks)

    def key(state: RankState) -> tuple[bool, bool, float]:
        return bool(blamed & state.awaited), state.is_waiting, state.waited_s

    return max(states, key=key)


def _diverged(states: Mapping[int, RankState]) -> Diagnosis | None:
    """Finds a rank that diverged from its own last step, unless all ranks did."""
    odd = [s for s in states.values() if s.divergence is not None]
    if not odd or len(odd) == len(states):
        return None
    state = odd[0]
    divergence = state.divergence
    assert divergence is not None
    others = _witness((s for s in states.values() if s.divergence is None), [state.rank])
    kind: Kind = "shape" if divergence.is_other_tensor else "missing"
    now = "" if kind == "shape" else f" and {state.doing()}"
    sentence = f"{state.who} {divergence}{now} in {state.phase}: {others.waits()}"
    return Diagnosis(kind, (state.rank,), sentence)


def _other_tensor(states: Mapping[int, RankState]) -> Diagnosis | None:
    """Finds a rank whose tensor differs from the others', even if it has finished the operation."""
    for state in states.values():
        mine = state.stuck
        if mine is None or mine.peer is not None or mine.name.startswith(UNEVEN):
            continue
        members = [states[rank] for rank in state.ranks.get(mine.group, ()) if rank in states]
        theirs = {s.rank: found for s in members if (found := _entry(s, mine)) is not None}
        others = [rank for rank, found in theirs.items() if not found.is_same_call(mine)]
        if not others:
            continue
        # The rarer call is at fault; if both are equally frequent, the call other than `mine` is.
        same = [rank for rank, found in theirs.items() if found.is_same_call(mine)]
        odd, usual = (same, others) if len(same) < len(others) else (others, same)
        blamed, witness = states[odd[0]], states[usual[0]]
        call = theirs[blamed.rank]
        sentence = f"{blamed.who} calls {call} in {blamed.phase}, where rank {witness.rank} calls "
        return Diagnosis("shape", (blamed.rank,), f"{sentence}{theirs[usual[0]]}: {state.waits()}")
    return None


def _entry(state: RankState, wanted: LoggedOperation) -> LoggedOperation | None:
    same = (wanted.group, wanted.number, None)
    return next((op for op, _ in state.queue if (op.group, op.number, op.peer) == same), None)


def _absent(states: Mapping[int, RankState], first: RankState) -> Diagnosis | None:
    """Diagnoses the rank that all others wait for, by the chain of waits that begins at `first`.

    Returns None if, at some point of the chain, all awaited ranks have reached the operation.
    """
    path = [first]
    while path[-1].stuck is not None and path[-1] not in path[:-1]:
        state = path[-1]
        members = (states[rank] for rank in sorted(state.awaited) if rank in states)
        late = [member for member in members if not _reached(member, state)]
        if not late:
            return None
        # A rank that waits for nobody is a better suspect than one that waits.
        path.append(min(late, key=lambda s: s.is_waiting))
    before, state = path[-2:]
    if state.stuck is not None:
        # This is a cycle. A rank that has begun the operation of its predecessor is not at fault.
        cycle = path[path.index(state) :]
        skipped = [(b, s) for b, s in pairwise(cycle) if not _has_begun(s, b)]
        if len(skipped) != 1:
            sentence = f"{state.who} {state.doing()} in {state.phase} and has not reached "
            sentence += f"{before.stuck}: {before.waits()}; their operations differ"
            return Diagnosis("missing", (state.rank, before.rank), sentence)
        before, state = skipped[0]
    sentence = f"{state.who} has not begun {before.stuck} and {state.doing()}: {before.waits()}"
    return Diagnosis("missing", (state.rank,), sentence)


def _reached(state: RankState, other: RankState) -> bool:
    """Returns whether `state` is in or past the operation in which `other` waits."""
    wanted, mine = other.stuck, state.stuck
    assert wanted is not None
    if wanted.peer is not None:
        # Messages that start together share a number.
        return mine is not None and any(
            op.peer == other.rank and op.group == wanted.group
            for op, done in state.queue
            if not done and (op.group, op.number) == (mine.group, mine.number)
        )
    if mine is not None and (mine.group, mine.number) == (wanted.group, wanted.number):
        return True
    return _has_begun(state, other) and all(
        done
        for op, done in state.queue
        if (op.group, op.number, op.peer) == (wanted.group, wanted.number, None)
    )


def _has_begun(state: RankState, other: RankState) -> bool:
    """Returns whether `state` has begun the operation in which `other` waits."""
    wanted = other.stuck
    assert wanted is not None
    queue = [op for op, _ in state.queue if op.group == wanted.group]
    if wanted.peer is not None:
        return any(op.peer == other.rank for op in queue)
    # The host counts a group's messages along with its collectives.
    counted = [op for op in queue if op.peer is None or not state.on_device]
    return any(op.number >= wanted.number for op in counted)


def _elsewhere(states: Mapping[int, RankState]) -> Diagnosis | None:
    """Finds a rank that does not wait while others wait in operations that are not logged."""
    away = [s for s in states.values() if not s.is_waiting]
    if not away or len(away) == len(states):
        return None
    witness = _witness((s for s in states.values() if s.is_waiting), [away[0].rank])
    sentence = f"{away[0].who} {away[0].doing()}: {witness.waits()}"
    return Diagnosis("missing", (away[0].rank,), sentence)


def _unknown(states: Mapping[int, RankState], state: RankState) -> Diagnosis:
    sentence = f"{state.who} {state.doing()} in {state.phase} for {state.waited_s:.0f} s"
    if (wanted := state.stuck) is not None:
        whom = f"rank {wanted.peer} is" if wanted.peer is not None else "all ranks of its group are"
        sentence += f"; {whom} in it too: a device or the network between them is stuck"
    elif all(s.is_waiting for s in states.values()):
        sentence += f"; all {len(states)} ranks wait"
    return Diagnosis("unknown", (state.rank,), sentence)
