"""What the ranks tell each other of a hang, and the verdict on it; as JSON for the store."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from itertools import pairwise
from typing import TYPE_CHECKING, Any, Literal

from parallel3d.comm.operation_log import Divergence, LoggedOperation
from parallel3d.comm.store import get, get_all, put
from parallel3d.config.schema import Config
from parallel3d.faults.flight_record import Queued
from parallel3d.host.processes import of_this_job, why_silent
from parallel3d.run import failure
from parallel3d.run.launch import Worker, until, within

if TYPE_CHECKING:
    from torch.distributed import Store


Kind = Literal["dead", "shape", "missing", "unknown"]


@dataclass(frozen=True)
class RankState:
    """What one rank was doing when it was asked.

    Attributes:
        who: "rank 3 (pp 0, dp 1, tp 1) on host". phase: "train step 12".
        place: innermost line of this package on the stack of the rank's work, "" if there is none.
        blocked: the function of torch.distributed that the work is in, "" if in none.
        waiting: the noted operation that the host waits for. waited_s: how long nothing has moved.
        ranks, counts: of each group that it is in: its ranks, and operations begun so far.
        recent: the newest operations, oldest first.
        divergence: where this step differs from the one before; see `OperationLog.divergence`.
        queue: what the device was given, done or not, in order; None where nobody records that.
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
        """What the device waits in: the first that was queued and has not ended.

        Those behind it may only wait for their turn. What it needs itself has ended, so that it is
        other ranks that are late.
        """
        return next((q.operation for q in self.queue or () if not q.is_done), None)

    @property
    def is_waiting(self) -> bool:
        return self.stuck is not None or self.waiting is not None or bool(self.blocked)

    @property
    def awaited(self) -> set[int]:
        """The ranks that it waits for."""
        operation = self.stuck or self.waiting
        if operation is None:
            return set()
        if operation.peer is not None:
            return {operation.peer}
        return set(self.ranks.get(operation.group, ())) - {self.rank}

    def doing(self) -> str:
        """ "waits in all_reduce 5 of dp (float32[8])" or where its code is."""
        if self.stuck is not None:
            return f"waits on its device in {self.stuck}"
        if self.waiting is not None:
            return f"waits in {self.waiting}"
        if self.blocked:
            return f"waits in torch.distributed's {self.blocked}{self.place}"
        return f"is in {self.phase}{self.place}, in no operation"

    def waits(self) -> str:
        """The witness's part of a verdict."""
        return f"rank {self.rank} {self.doing()} in {self.phase}, for {self.waited_s:.0f} s"


@dataclass(frozen=True)
class Diagnosis:
    """Why the run hangs; `ranks` are at fault."""

    kind: Kind
    ranks: tuple[int, ...]
    sentence: str


def to_json(state: RankState) -> dict[str, Any]:
    """JSON for the store; named tuples become lists."""
    return dict(vars(state))


def from_json(content: dict[str, Any]) -> RankState:
    """The state again."""

    def operation(fields: list | None) -> LoggedOperation | None:
        if fields is None:
            return None
        group, number, name, shape, dtype, peer = fields
        return LoggedOperation(group, number, name, tuple(shape), dtype, peer)

    divergence, queue = content["divergence"], content["queue"]
    if divergence is not None:
        divergence = Divergence(*(operation(o) for o in divergence))
    if queue is not None:
        queue = tuple(Queued(operation(o), is_done) for o, is_done in queue)
    return RankState(
        **content
        | {
            "waiting": operation(content["waiting"]),
            "ranks": {name: tuple(ranks) for name, ranks in content["ranks"].items()},
            "recent": tuple(operation(o) for o in content["recent"]),
            "divergence": divergence,
            "queue": queue,
        }
    )


# Which rank is at fault, told from what the devices were given and have not done.
#
# Where waiting is the devices' business (NCCL), hosts run on until they read a number back, all of
# them somewhere else, and look alike. The queues do not: an operation that never ends was not
# queued by one of its group, or with another tensor, or one of the group is stuck before it.


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


# Which rank is at fault when nothing moves any more, told from what every rank was doing.
#
# Pure: `watchdog.py` collects the states. Three ways to hang are told apart:
#
# dead        a rank gives no answer: its process is stopped, gone, or its host is out of reach
# shape       ranks are in the same operation of a group, with different tensors or calls
# missing     a rank did not come to an operation in which others wait: it is elsewhere
#
# Who is at fault cannot be read off two ranks that wait in different places: each lacks the other.
# Training repeats itself, though. A rank that this step did another thing than in the step before,
# where the others did as always, is the one. Where devices wait instead of hosts, `hang_queues`
# looks at what they were given.


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
        _diverged(states)
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


def _diverged(states: Mapping[int, RankState]) -> Diagnosis | None:
    """Ranks that left the way of their own last step, if the others did not."""
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


# What the ranks of a hang tell each other, and which silent processes are to be killed.
#
# Each says through the store what it was doing; the first of them finds the verdict. Of those that
# say nothing, their neighbours look at the processes.


KEY = "parallel3d/hang"
HANG_FILE = "hang"  # by it ranks without a store agree on who speaks
ANSWER_S = 3.5  # ranks that have not answered after this are silent
RECORD_FILE_S = 3.0  # a file system that takes longer for one small file is dead
DUMP_S = 3.0  # what is left for files that are still being written then
# The others leave after so long, whatever the first of them found and said.
VERDICT_S = ANSWER_S + DUMP_S + RECORD_FILE_S + 1.0

# A verdict, on the rank that speaks, and processes (pid, born) of this host to kill.
Found = tuple[Diagnosis | None, list[tuple[int, int]]]


@dataclass
class Inquiry:
    """One rank's part in finding out who is at fault.

    Args:
        store: of all ranks; None for a world of one.
        keeper: rank 0's process, should the store go with it.
    """

    config: Config
    worker: Worker
    store: Store | None
    keeper: dict[str, Any] | None = None
    _silent: list[int] | None = None  # on the rank that speaks

    def agree(self, state: RankState) -> Found:
        """The verdict, on the rank that finds it, and processes to kill here.

        None elsewhere, once that rank has `spoken`: by the first that ends, launchers end all.
        """
        if self.store is None:
            return diagnose({state.rank: state}, {}), []
        store, world = self.store, range(self.worker.world_size)
        put(store, f"{KEY}/state/{state.rank}", to_json(state))
        store.set(f"{KEY}/asked", "1")
        first = store.add(f"{KEY}/first", 1) == 1
        if not first:
            verdict_key = f"{KEY}/verdict"
            until(lambda: store.check([verdict_key]), VERDICT_S)
            silent = get(store, verdict_key) if store.check([verdict_key]) else []
            return None, self._mine_to_kill(silent)
        answers = [f"{KEY}/state/{rank}" for rank in world]
        until(lambda: store.check(answers), ANSWER_S)
        there = {rank for rank in world if store.check([answers[rank]])}
        said = get_all(store, [answers[rank] for rank in sorted(there)])
        found = (from_json(state) for state in said)
        states = {answer.rank: answer for answer in found}
        silent = {rank: self._look_at(rank) for rank in world if rank not in there}
        verdict = diagnose(states, silent)
        self._silent = sorted(silent)
        return verdict, self._mine_to_kill(self._silent)

    def spoken(self) -> None:
        """Lets the others leave."""
        if self.store is not None and self._silent is not None:
            put(self.store, f"{KEY}/verdict", self._silent)

    def process(self, rank: int) -> dict[str, Any] | None:
        key = f"{KEY}/process/{rank}"
        assert self.store is not None
        return get(self.store, key) if self.store.check([key]) else None

    def _look_at(self, rank: int) -> tuple[str, str]:
        """Who a silent rank is, and why it gives no answer."""
        return self._look_at_process(rank, self.process(rank))

    def _look_at_process(self, rank: int, process: dict[str, Any] | None) -> tuple[str, str]:
        if process is None:
            return failure.who(self.config, rank), "has not started to train"
        return failure.who(self.config, rank, process["host"]), why_silent(process)

    def _mine_to_kill(self, silent: list[int]) -> list[tuple[int, int]]:
        """Silent processes of this host and job: a stopped one would outlive the job."""
        return of_this_job([self.process(rank) for rank in silent])

    def without_store(self, state: RankState) -> Found:
        """What one rank can tell alone; the first to make the file speaks."""
        who, why = self._look_at_process(0, self.keeper)
        here = of_this_job([self.keeper])
        if not within(RECORD_FILE_S, self._is_first_without_store, True):
            time.sleep(DUMP_S + RECORD_FILE_S)  # the first speaks meanwhile
            return None, here
        why += ", and the store that it keeps gives no answer"
        return diagnose({state.rank: state}, {0: (who, why)}), here

    def _is_first_without_store(self) -> bool:
        """Whether no other rank has made the file before this one."""
        try:
            (self.worker.run_dir / HANG_FILE).touch(exist_ok=False)
        except FileExistsError:
            return False
        except OSError:
            pass  # no disk to agree by: said twice is better than not at all
        return True
