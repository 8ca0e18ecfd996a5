"""Hang report: the states of all ranks, and the diagnosis which of them is at fault."""

from __future__ import annotations

import json
import re
import time
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from itertools import pairwise
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

from parallel3d.comm.operation_log import Divergence, LoggedOperation
from parallel3d.comm.store import get, get_all, put
from parallel3d.config.schema import Config
from parallel3d.host.processes import of_this_job, why_silent
from parallel3d.run import failure
from parallel3d.run.launch import Worker, until, within

if TYPE_CHECKING:
    from torch.distributed import Store


# The device's queue of operations, from the flight recorder of torch's NCCL groups. A handle of
# NCCL's only orders streams and the host waits somewhere later, so it cannot tell which collective
# never ends. The recorder has an entry for each queued one, and its state.

# Of each group, operations kept before and from the first unfinished one: ranks compare them one by
# one.
KEPT = 8
WORLD = "default_pg"  # what torch calls the group of all ranks
MESSAGE = re.compile(r"(send|recv) (\d+)(?:->|<-)(\d+)")
DTYPES = {"float": "float32", "double": "float64", "half": "float16", "int": "int32"}
DTYPES |= {"long": "int64", "byte": "uint8"}


class Queued(NamedTuple):
    """A collective or message that was handed to the device, and whether it has ended there.

    `operation.number` is NCCL's count of a group's collectives or of its messages; those of one
    batch share a number.
    """

    operation: LoggedOperation
    is_done: bool


class Record(NamedTuple):
    """One rank's flight record: `queue` in order of queueing, and the ranks of its groups."""

    queue: tuple[Queued, ...]
    ranks: dict[str, tuple[int, ...]]


def take_flight_record() -> str | None:
    """Returns the recorder's content as JSON, of all groups of this process; None without one."""
    from torch._C import _distributed_c10d as c10d

    # The second is that of other groups than NCCL's, which every build has.
    names = ("_dump_nccl_trace_json", "_dump_fr_trace_json")
    dump = next((found for name in names if (found := getattr(c10d, name, None))), None)
    if dump is None:
        return None
    # Finished ones too: a rank that sent less than the others may have got past.
    trace = dump(includeCollectives=True, onlyActive=False)
    return trace.decode() if isinstance(trace, bytes) else trace


def read_flight_record(text: str, known: Mapping[str, tuple[int, ...]]) -> Record:
    """Parses the newest NCCL entries. Raises KeyError or ValueError for another format."""
    content = json.loads(text)
    ranks = dict(known)
    for group in content.get("pg_config", {}).values():
        if members := tuple(json.loads(group["ranks"])):
            ranks[_name(group["name"], group["desc"])] = members
    entries = [e for e in content.get("entries", []) if not e["profiling_name"].startswith("gloo")]
    queue = [Queued(_operation(entry, ranks), done) for entry, done in _without_batches(entries)]
    return Record(_newest(queue), {name: ranks[name] for name in _groups(queue) if name in ranks})


def _name(name: str, desc: str) -> str:
    if desc == WORLD:
        return "world"
    return desc if desc and desc != "undefined" else name


def _without_batches(entries: Iterable[dict[str, Any]]) -> list[tuple[dict[str, Any], bool]]:
    """Returns (entry, whether it is done) without the entries of batches.

    Messages of a batch have an entry each, whose state is never updated, then one for all of them.
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
    dtype = dtypes[0].lower() if dtypes else ""
    return LoggedOperation(group, number, name, shape, DTYPES.get(dtype, dtype), peer)


def _groups(queue: list[Queued]) -> list[str]:
    return list(dict.fromkeys(queued.operation.group for queued in queue))


def _newest(queue: list[Queued]) -> tuple[Queued, ...]:
    """Returns the last `KEPT` of each group before its first unfinished one, and `KEPT` from it."""
    places: dict[str, list[int]] = defaultdict(list)
    for i, queued in enumerate(queue):
        places[queued.operation.group].append(i)
    kept = []
    for of_group in places.values():
        unfinished = (n for n, i in enumerate(of_group) if not queue[i].is_done)
        first = next(unfinished, len(of_group))
        kept += of_group[max(0, first - KEPT) : first + KEPT]
    return tuple(queue[i] for i in sorted(kept))


# States of ranks


Kind = Literal["dead", "shape", "missing", "unknown"]


@dataclass(frozen=True)
class RankState:
    """The activity of one rank when it was asked.

    Attributes:
        who: "rank 3 (pp 0, dp 1, tp 1) on host".
        phase: "train step 12".
        place: innermost line of this package on the stack of the rank's work, "" if there is none.
        blocked: the function of torch.distributed that the work is in, "" if in none.
        waiting: the logged operation that the host waits for.
        waited_s: seconds without progress.
        ranks, counts: its groups' ranks, and operations begun in each group so far.
        recent: the newest operations, oldest first.
        divergence: where this step differs from the one before; see `OperationLog.divergence`.
        queue: operations handed to the device in order, done or not; None without a record.
    """

    rank: int
    who: str
    phase: str
    place: str = ""
    blocked: str = ""
    waiting: LoggedOperation | None = None
    waited_s: float = 0.0
    ranks: dict[str, tuple[int, ...]] = field(default_factory=dict)
    counts: dict[str, int] = field(default_factory=dict)
    recent: tuple[LoggedOperation, ...] = ()
    divergence: Divergence | None = None
    queue: tuple[Queued, ...] | None = None

    @property
    def stuck(self) -> LoggedOperation | None:
        """Returns the operation that the device waits in: the first that has not ended."""
        return next((q.operation for q in self.queue or () if not q.is_done), None)

    @property
    def is_waiting(self) -> bool:
        return self.stuck is not None or self.waiting is not None or bool(self.blocked)

    @property
    def awaited(self) -> set[int]:
        operation = self.stuck or self.waiting
        if operation is None:
            return set()
        if operation.peer is not None:
            return {operation.peer}
        return set(self.ranks.get(operation.group, ())) - {self.rank}

    def doing(self) -> str:
        """Returns "waits in all_reduce 5 of dp (float32[8])", or where its code is."""
        if self.stuck is not None:
            return f"waits on its device in {self.stuck}"
        if self.waiting is not None:
            return f"waits in {self.waiting}"
        if self.blocked:
            return f"waits in torch.distributed's {self.blocked}{self.place}"
        return f"is in {self.phase}{self.place}, in no operation"

    def waits(self) -> str:
        """Returns this rank's part, as witness, of a diagnosis."""
        return f"rank {self.rank} {self.doing()} in {self.phase}, for {self.waited_s:.0f} s"


@dataclass(frozen=True)
class Diagnosis:
    """Why the run hangs; `ranks` are at fault."""

    kind: Kind
    ranks: tuple[int, ...]
    sentence: str


def to_json(state: RankState) -> dict[str, Any]:
    """Returns JSON for the store; named tuples become lists."""
    return dict(vars(state))


def from_json(content: dict[str, Any]) -> RankState:
    waiting, divergence, queue = (content[name] for name in ("waiting", "divergence", "queue"))
    if divergence is not None:
        now, was, after = divergence
        divergence = Divergence(
            now and _hang_operation(now), _hang_operation(was), after and _hang_operation(after)
        )
    if queue is not None:
        queue = tuple(Queued(_hang_operation(fields), is_done) for fields, is_done in queue)
    return RankState(
        **content
        | {
            "waiting": waiting and _hang_operation(waiting),
            "ranks": {name: tuple(ranks) for name, ranks in content["ranks"].items()},
            "recent": tuple(map(_hang_operation, content["recent"])),
            "divergence": divergence,
            "queue": queue,
        }
    )


def _hang_operation(fields: list) -> LoggedOperation:
    group, number, name, shape, dtype, peer = fields
    return LoggedOperation(group, number, name, tuple(shape), dtype, peer)


# Diagnosis by the states of hosts. Kinds of hangs:
#
# dead        a rank does not answer: its process is stopped or gone, or its host out of reach
# shape       ranks are in the same operation of a group, with different tensors or calls
# missing     a rank did not come to an operation in which others wait: it is elsewhere
#
# Of two ranks that wait in different places either may be at fault. Training repeats itself,
# though: a rank whose operations differ from its last step's, where the others' do not, is it.


def diagnose(states: Mapping[int, RankState], silent: Mapping[int, tuple[str, str]]) -> Diagnosis:
    """Returns the diagnosis; `silent`: rank → (who it is, why it does not answer)."""
    if silent:
        return _dead(states, silent)
    if any(state.queue is None for state in states.values()):
        states = {rank: replace(state, queue=None) for rank, state in states.items()}
    return (
        _diverged(states)
        or diagnose_queues(states)
        or _mismatch(states)
        or _elsewhere(states)
        or _behind(states)
        or _fewer(states)
        or _unknown(states)
    )


def _dead(states: Mapping[int, RankState], silent: Mapping[int, tuple[str, str]]) -> Diagnosis:
    ranks = tuple(sorted(silent))
    sentence = "; ".join(f"{who} {why}" for who, why in (silent[rank] for rank in ranks[:3]))
    if len(ranks) > 3:
        sentence += f"; and {len(ranks) - 3} more"
    witness = _witness(states.values(), ranks)
    return Diagnosis("dead", ranks, f"{sentence}: {witness.waits()}")


def _witness(states: Iterable[RankState], ranks: Iterable[int]) -> RankState:
    """Returns the rank that has waited longest for one of `ranks`, else any."""
    blamed = set(ranks)

    def key(state: RankState) -> tuple[bool, bool, float]:
        return bool(blamed & state.awaited), state.is_waiting, state.waited_s

    return max(states, key=key)


def _diverged(states: Mapping[int, RankState]) -> Diagnosis | None:
    """Finds a rank that diverged from its own last step, if others did not."""
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


def _mismatch(states: Mapping[int, RankState]) -> Diagnosis | None:
    """Finds two ranks in one operation of a group, by number, with different tensors or calls."""
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
    """Returns the one of two differing ranks that fewer agree with; of equals the later one."""

    def followers(state: RankState) -> int:
        assert state.waiting is not None
        return sum(s.waiting is not None and s.waiting.alike(state.waiting) for s in group)

    return one if followers(one) < followers(other) else other


def _elsewhere(states: Mapping[int, RankState]) -> Diagnosis | None:
    """Finds a rank that waits for nobody while others wait."""
    away = [s for s in states.values() if not s.is_waiting]
    if not away or len(away) == len(states):
        return None
    wanted = set().union(*(s.awaited for s in states.values()))
    state = next((s for s in away if s.rank in wanted), away[0])
    witness = _witness((s for s in states.values() if s.is_waiting), [state.rank])
    return Diagnosis("missing", (state.rank,), f"{state.who} {state.doing()}: {witness.waits()}")


def _behind(states: Mapping[int, RankState]) -> Diagnosis | None:
    """Follows from a rank that waits to one that has not come, and on to whom that one awaits."""
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
    sentence = f"{state.who} {state.doing()} in {state.phase} and did not come to {before.waiting}"
    ranks = (state.rank, before.rank)
    return Diagnosis("missing", ranks, f"{sentence}: {before.waits()}; they went different ways")


def _lacks(state: RankState, other: RankState) -> bool:
    """Returns whether `state` has not begun the operation that `other` waits for."""
    operation = other.waiting
    assert operation is not None
    if operation.peer is not None:
        mine = state.waiting
        return mine is None or mine.group != operation.group or mine.peer != other.rank
    return state.counts.get(operation.group, 0) < operation.number


def _fewer(states: Mapping[int, RankState]) -> Diagnosis | None:
    """Finds a rank of a waiting group that has begun fewer or more operations of another group."""
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
                sentence = f"{odd[0].who} has begun {counts[odd[0].rank]} operations of {group}, "
                sentence += f"where rank {witness.rank} has begun {usual}: {witness.waits()}"
                return Diagnosis("missing", (odd[0].rank,), sentence)
    return None


def _unknown(states: Mapping[int, RankState]) -> Diagnosis:
    state = max(states.values(), key=lambda s: s.waited_s)
    others = f"; all {len(states)} ranks wait" if all(s.is_waiting for s in states.values()) else ""
    sentence = f"{state.who} {state.doing()} in {state.phase} for {state.waited_s:.0f} s{others}"
    return Diagnosis("unknown", (state.rank,), sentence)


# Diagnosis by the queues of devices. Where devices wait (NCCL), hosts run on until they read a
# number back, and their states look alike. Their queues do not: an operation that never ends was
# not queued by a member of its group, or with another tensor, or a member is stuck before it.


UNEVEN = ("all_to_all", "alltoall", "scatter")  # their tensors may differ in size between ranks


def diagnose_queues(states: Mapping[int, RankState]) -> Diagnosis | None:
    """Returns None where no device waits. The queues of all `states` must be known."""
    if all(state.stuck is None for state in states.values()):
        return None
    if (diagnosis := _other_tensor(states)) is not None:
        return diagnosis
    longest = max(states.values(), key=lambda s: (s.stuck is not None, s.waited_s))
    found = _absent(states, longest)
    # In a ring not every rank that waits leads to the one that is missing: a neighbour does, and
    # beyond both messages of a batch meet their peers.
    for state in states.values():
        if found.kind == "unknown" and state.stuck is not None and state.stuck.peer is not None:
            other = _absent(states, state)
            found = found if other.kind == "unknown" else other
    return found


def _other_tensor(states: Mapping[int, RankState]) -> Diagnosis | None:
    """Finds a rank with another tensor than the others, even if it got past the operation."""
    for state in states.values():
        mine = state.stuck
        if mine is None or mine.peer is not None or mine.name.startswith(UNEVEN):
            continue
        members = [states[rank] for rank in state.ranks.get(mine.group, ()) if rank in states]
        theirs = {s.rank: found for s in members if (found := _entry(s, mine)) is not None}
        others = [rank for rank, found in theirs.items() if not found.alike(mine)]
        if not others:
            continue
        # The rarer call is at fault; of equally frequent ones the later rank's.
        same = [rank for rank, found in theirs.items() if found.alike(mine)]
        odd, usual = (same, others) if len(same) < len(others) else (others, same)
        blamed, witness = states[odd[0]], states[usual[0]]
        call = theirs[blamed.rank]
        sentence = f"{blamed.who} calls {call} in {blamed.phase}, where rank {witness.rank} calls "
        return Diagnosis("shape", (blamed.rank,), f"{sentence}{theirs[usual[0]]}: {state.waits()}")
    return None


def _entry(state: RankState, wanted: LoggedOperation) -> LoggedOperation | None:
    for operation, _ in state.queue or ():
        same = (operation.group, operation.number) == (wanted.group, wanted.number)
        if same and operation.peer is None:
            return operation
    return None


def _absent(states: Mapping[int, RankState], first: RankState) -> Diagnosis:
    """Follows from a device that waits to a rank that has not come, and on to whom that awaits."""
    path = [first]
    while path[-1].stuck is not None and path[-1] not in path[:-1]:
        state = path[-1]
        members = (states[rank] for rank in sorted(state.awaited) if rank in states)
        late = [member for member in members if not _reached(member, state)]
        if not late:
            return _all_there(state)
        # A rank whose device does not wait is a better suspect than one that waits itself.
        path.append(min(late, key=lambda s: s.stuck is not None))
    before, state = path[-2:]
    if state.stuck is not None:
        # A cycle. A rank that has queued the operation of the one before only waits for its turn.
        cycle = path[path.index(state) :]
        skipped = [(b, s) for b, s in pairwise(cycle) if not _queued(s, b)]
        if len(skipped) != 1:
            sentence = f"{state.who} {state.doing()} in {state.phase} and did not come to "
            sentence += f"{before.stuck}: {before.waits()}; they went different ways"
            return Diagnosis("missing", (state.rank, before.rank), sentence)
        before, state = skipped[0]
    sentence = f"{state.who} has not queued {before.stuck} and {state.doing()}: {before.waits()}"
    return Diagnosis("missing", (state.rank,), sentence)


def _reached(state: RankState, other: RankState) -> bool:
    """Returns whether the device of `state` is in the operation `other` waits in, or past it."""
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


# Collecting the states


KEY = "parallel3d/hang"
HANG_FILE = "hang"  # its creator logs the diagnosis where the store does not answer
ANSWER_S = 3.5  # ranks that have not answered after this are silent
RECORD_FILE_S = 3.0  # a file system that takes longer for one small file is dead
DUMP_S = 3.0  # remaining time for files that are still being written then
# The other ranks end after this, whether or not the first has a diagnosis.
DIAGNOSIS_S = ANSWER_S + DUMP_S + RECORD_FILE_S + 1.0

# A diagnosis, on the rank that logs it, and processes (pid, born) of this host to kill.
Found = tuple[Diagnosis | None, list[tuple[int, int]]]


@dataclass
class HangReport:
    """One rank's part in a hang report; `keeper`: rank 0's process, which may have the store."""

    config: Config
    worker: Worker
    store: Store | None
    keeper: dict[str, Any] | None = None
    _silent: list[int] | None = None  # on the rank that logs the diagnosis

    def agree(self, state: RankState) -> Found:
        """Sends this rank's state; the first rank to do so collects all and diagnoses the hang.

        The others wait for its `release`: launchers end all ranks by the first that ends.
        """
        if self.store is None:
            return diagnose({state.rank: state}, {}), []
        store, world = self.store, range(self.worker.world_size)
        put(store, f"{KEY}/state/{state.rank}", to_json(state))
        store.set(f"{KEY}/asked", "1")
        first = store.add(f"{KEY}/first", 1) == 1
        if not first:
            key = f"{KEY}/diagnosis"
            until(lambda: store.check([key]), DIAGNOSIS_S)
            return None, self._to_kill(get(store, key) if store.check([key]) else [])
        keys = [f"{KEY}/state/{rank}" for rank in world]
        until(lambda: store.check(keys), ANSWER_S)
        answered = [rank for rank in world if store.check([keys[rank]])]
        answers = map(from_json, get_all(store, [keys[rank] for rank in answered]))
        states = {answer.rank: answer for answer in answers}
        silent = {
            rank: self._inspect(rank, self.process(rank)) for rank in world if rank not in answered
        }
        diagnosis = diagnose(states, silent)
        self._silent = sorted(silent)
        return diagnosis, self._to_kill(self._silent)

    def release(self) -> None:
        """Lets the other ranks end, once the diagnosis is logged."""
        if self.store is not None and self._silent is not None:
            put(self.store, f"{KEY}/diagnosis", self._silent)

    def process(self, rank: int) -> dict[str, Any] | None:
        key = f"{KEY}/process/{rank}"
        assert self.store is not None
        return get(self.store, key) if self.store.check([key]) else None

    def _inspect(self, rank: int, process: dict[str, Any] | None) -> tuple[str, str]:
        """Returns who a silent rank is, and why it does not answer: on this host by /proc."""
        if process is None:
            return failure.who(self.config, rank), "has not started to train"
        return failure.who(self.config, rank, process["host"]), why_silent(process)

    def _to_kill(self, silent: list[int]) -> list[tuple[int, int]]:
        """Returns silent processes of this host and job: a stopped one would outlive the job."""
        return of_this_job([self.process(rank) for rank in silent])

    def without_store(self, state: RankState) -> Found:
        """Returns the diagnosis of this rank alone, if it is the first to create HANG_FILE."""
        who, why = self._inspect(0, self.keeper)
        here = of_this_job([self.keeper])
        if not within(RECORD_FILE_S, self._is_first_without_store, True):
            time.sleep(DUMP_S + RECORD_FILE_S)  # meanwhile the first logs it
            return None, here
        why += ", and the store that it keeps gives no answer"
        return diagnose({state.rank: state}, {0: (who, why)}), here

    def _is_first_without_store(self) -> bool:
        try:
            (self.worker.run_dir / HANG_FILE).touch(exist_ok=False)
        except FileExistsError:
            return False
        except OSError:
            return True  # without a disk every rank logs it
        return True
