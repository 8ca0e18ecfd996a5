"""Timing calls of a group, and sharing out a time budget over rows that are not known yet."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from parallel3d.comm import collectives
from parallel3d.comm.group_options import GLOO_ON
from parallel3d.comm.process_groups import Group
from parallel3d.device import accelerator
from parallel3d.pipeline.p2p import P2PRoute, post
from parallel3d.pipeline.shared_memory import SharedMemoryP2P
from parallel3d.schedules.actions import Action, Kind
from parallel3d.schedules.orders import StageAssignment

# Of the budget; the rest is for the probe of pairs, and for ending.
MEASURING_SHARE = 0.75


def finisher(device: torch.device) -> Callable[[], None]:
    """What waits until the device has done what was asked of it."""
    return lambda: accelerator.synchronize(device)


def timed_calls(
    run: Callable[[], object],
    barrier: Callable[[], object],
    finish: Callable[[], None],
    warmup: int,
    calls: int,
) -> list[float]:
    """Seconds of each of `calls` calls on this rank, every one started behind a barrier."""
    seconds = []
    for number in range(warmup + calls):
        barrier()
        finish()
        start = time.perf_counter()
        run()
        finish()
        if number >= warmup:
            seconds.append(time.perf_counter() - start)
    return seconds


def slowest_rank(by_rank: Sequence[Sequence[float]]) -> float:
    """Median over the calls of the time of each call's slowest rank: [rank][call] → seconds."""
    return statistics.median(max(call) for call in zip(*by_rank, strict=True))


@dataclass
class CallCounts:
    """How often each row is called so that all end in time; no row is left out.

    Attributes:
        estimates: seconds that one call of each row takes, in the order of the rows.
        seconds: for all of them, from now on.
        warmup, calls: for every row as long as time allows. At least one timed call remains.
    """

    estimates: Sequence[float]
    seconds: float
    warmup: int
    calls: int
    row: int = 0
    foreseen: float = 0.0  # what the rows so far should have taken, and did
    spent: float = 0.0
    cut: int = field(default=0)  # rows that had fewer calls

    def next(self) -> tuple[int, int]:
        """(warm-up, timed) calls of the next row."""
        ahead = sum(self.estimates[self.row :])
        full = self.warmup + self.calls
        affordable = (self.seconds - self.spent) / max(ahead * self._pace, 1e-9)
        if affordable >= full:
            return self.warmup, self.calls
        self.cut += 1
        calls = max(1, int(affordable * self.calls / full))
        return max(0, min(self.warmup, int(affordable) - calls)), calls

    @property
    def _pace(self) -> float:
        """How much longer rows take than foreseen; cautious until a few have been seen."""
        return self.spent / self.foreseen if self.row >= 8 and self.foreseen > 0 else 1.0

    def done(self, total_calls: int, seconds: float) -> None:
        """The row took `seconds` for all of its calls."""
        self.foreseen += self.estimates[self.row] * total_calls
        self.spent += seconds
        self.row += 1


# What `bench comm` times: every collective, with inputs whose results are known.
#
# Member m of a group of n holds `pattern(m)`: small whole numbers, so that sums are exact in fp32,
# with a period that is prime, so that a part that lands in the wrong place is noticed.


PERIOD = 251
ITEM = 4  # bytes of an fp32

REDUCTIONS = {"sum": dist.ReduceOp.SUM, "avg": dist.ReduceOp.AVG, "max": dist.ReduceOp.MAX}
REDUCING = ("all_reduce", "reduce", "reduce_scatter")
PLAIN = ("all_gather", "broadcast", "scatter", "gather", "all_to_all", "send_recv", "barrier")
# By what training sends its activations and gradients, with sums where it reduces.
COLLECTIVES = ("all_reduce", "all_gather", "reduce_scatter")
TRAINING = {"tp": COLLECTIVES, "dp": COLLECTIVES, "pp": ("send_recv",)}


class WrongResult(RuntimeError):
    """A collective left something else than the sum, the maximum or the parts that it should."""


class BenchOperation(NamedTuple):
    """A collective, and whose code runs it.

    name: as in `topology.collective_costs`. reduction: sum, avg, max, or None where nothing is
    reduced. own: training's own way for CPU ranks (shared memory and its like), not the backend's.
    """

    name: str
    reduction: str | None = None
    own: bool = False

    @property
    def label(self) -> str:
        """`all-reduce sum`, `send/receive`."""
        name = "send/receive" if self.name == "send_recv" else self.name.replace("_", "-")
        return f"{name} {self.reduction}" if self.reduction else name


def is_trainings(dim: str, name: str, reduction: str | None) -> bool:
    """Whether training calls this in the groups of `dim`."""
    return reduction in ("sum", None) and name in TRAINING.get(dim, ())


def operations(dim: str) -> list[BenchOperation]:
    """All of them, each way of reducing apart; where training calls one, its own way beside."""
    found = []
    for name in (*REDUCING, *PLAIN):
        for reduction in REDUCTIONS if name in REDUCING else (None,):
            found.append(BenchOperation(name, reduction))
            if is_trainings(dim, name, reduction):
                found.append(BenchOperation(name, reduction, own=True))
    return found


@dataclass(frozen=True)
class Site:
    """Where an operation runs on this rank: the group, its device, and how messages travel.

    boxes: the shared memory of a pipeline, if it has any. chain: send/receive goes from each stage
    to the next, as in a pipeline, not round a ring.
    """

    group: Group
    device: torch.device
    boxes: SharedMemoryP2P | None = None
    chain: bool = False

    @property
    def backend(self) -> str:
        name = dist.get_backend(self.group.handle)
        return "gloo" if name == GLOO_ON else name

    def whole_bytes(self, size: int) -> int:
        """`size` in bytes, cut so that every member has an equal part of whole numbers."""
        unit = ITEM * self.group.size
        return max(unit, size // unit * unit)

    def path(self, operation: BenchOperation, size: int) -> str:
        """Which way the bytes take: the backend's name, or that of our own where it has one."""
        if not operation.own or accelerator.is_accelerator(self.device):
            return self.backend
        nbytes, shared = self.whole_bytes(size), self.group.shared
        if operation.name == "send_recv":
            fits = self.boxes is not None and self.boxes.fits(torch.empty(nbytes // ITEM))
            return "mailbox" if fits else self.backend
        part = nbytes // self.group.size if operation.name == "all_gather" else nbytes
        in_pieces = operation.name == "all_reduce"  # of any size
        if shared is not None and (in_pieces or shared.fits(torch.empty(part // ITEM))):
            return "shared memory"
        return "pair exchange" if self.group.size == 2 else self.backend


@dataclass
class Call:
    """One operation on its buffers. `run` may be called again and again; after `fill` and one
    `run`, `result` (None: nothing to see on this rank) must equal `expected`."""

    run: Callable[[], object]
    fill: Callable[[], object] = lambda: None
    result: Callable[[], Tensor | None] = lambda: None
    expected: Tensor | None = None

    def check(self, what: str) -> None:
        """Runs once and compares. Raises WrongResult, which names `what` and the first wrong."""
        self.fill()
        self.run()
        got = self.result()
        if got is None or self.expected is None:
            return
        got = got.cpu()
        if torch.equal(got, self.expected):
            return
        wrong = ~torch.isclose(got, self.expected, rtol=1e-5, atol=0)
        if wrong.any():
            i = int(wrong.nonzero()[0])
            raise WrongResult(
                f"{what}: {int(wrong.sum())} of {got.numel()} numbers are wrong; number {i} is "
                f"{got[i]:g}, not {self.expected[i]:g}"
            )


def pattern(member: int, count: int, start: int = 0) -> Tensor:
    """(count,) fp32: what `member` holds from number `start` on."""
    ramp, begin = torch.arange(1.0, PERIOD + 1), start % PERIOD
    return ramp.repeat((begin + count) // PERIOD + 1)[begin : begin + count] * (member + 1)


def reduced(reduction: str, n: int, count: int, start: int = 0) -> Tensor:
    """(count,) fp32: the reduction of `pattern` over n members."""
    factor = {"sum": n * (n + 1) / 2, "avg": (n + 1) / 2, "max": n}[reduction]
    return pattern(0, count, start) * factor


def prepare(operation: BenchOperation, site: Site, size: int) -> Call:
    """The operation on buffers of `size` bytes (the whole buffer, as nccl-tests counts it)."""
    count = site.whole_bytes(size) // ITEM
    if operation.name in REDUCING:
        return _reducing(operation, site, count)
    if operation.name == "send_recv":
        return _messages(operation, site, count)
    if operation.name == "barrier":
        return Call(lambda: dist.barrier(group=site.group.handle))
    return _moving(operation, site, count)


def _reducing(operation: BenchOperation, site: Site, count: int) -> Call:
    group, device = site.group, site.device
    n, me, handle = group.size, group.index, group.handle
    own, op = operation.own, REDUCTIONS[operation.reduction]
    mine = pattern(me, count).to(device)
    expected = reduced(operation.reduction, n, count)
    if operation.name == "reduce_scatter":
        part = count // n
        out = [torch.empty(part, device=device)]

        def scatter() -> None:
            if own:
                out[0] = collectives.reduce_scatter(mine, group)
            else:
                _reduce_scatter(out[0], mine, op, handle)

        return Call(scatter, result=lambda: out[0], expected=expected[me * part : (me + 1) * part])
    tensor = mine.clone()  # in place: `mine` stays

    def fill() -> None:
        tensor.copy_(mine)

    if operation.name == "reduce":
        root = group.ranks[0]
        return Call(
            lambda: dist.reduce(tensor, root, op, handle),
            fill,
            lambda: tensor if me == 0 else None,
            expected,
        )
    if own:
        return Call(lambda: collectives.all_reduce(tensor, group), fill, lambda: tensor, expected)
    return Call(lambda: dist.all_reduce(tensor, op, handle), fill, lambda: tensor, expected)


def _reduce_scatter(out: Tensor, tensor: Tensor, op: object, handle: object) -> None:
    named = getattr(dist, "reduce_scatter_single", None)  # its name since torch 2.13
    (named or dist.reduce_scatter_tensor)(out, tensor, op=op, group=handle)


def _all_gather(out: Tensor, tensor: Tensor, handle: object) -> None:
    named = getattr(dist, "all_gather_single", None)  # its name since torch 2.13
    (named or dist.all_gather_into_tensor)(out, tensor, group=handle)


def _moving(operation: BenchOperation, site: Site, count: int) -> Call:
    """Broadcast, all-gather, scatter, gather and all-to-all: nothing is added."""
    group, device, name = site.group, site.device, operation.name
    n, me, handle, root = group.size, group.index, group.handle, group.ranks[0]
    part = count // n
    if name == "broadcast":
        tensor = pattern(0, count).to(device) if me == 0 else torch.zeros(count, device=device)
        return Call(
            lambda: dist.broadcast(tensor, root, handle),
            result=lambda: tensor,
            expected=pattern(0, count),
        )
    if name == "scatter":
        out = torch.empty(part, device=device)
        first = [pattern(0, part, i * part).to(device) for i in range(n)]  # what the root deals out
        return Call(
            lambda: dist.scatter(out, first if me == 0 else None, root, handle),
            result=lambda: out,
            expected=first[me].cpu(),
        )
    if name == "all_to_all":
        sent, got = pattern(me, count).to(device), torch.empty(count, device=device)
        theirs = torch.cat([pattern(m, part, me * part) for m in range(n)])
        return Call(
            lambda: dist.all_to_all_single(got, sent, group=handle),
            result=lambda: got,
            expected=theirs,
        )
    mine = pattern(me, part).to(device)
    gathered = torch.cat([pattern(m, part) for m in range(n)])
    if name == "gather":
        parts = list(torch.empty(count, device=device).chunk(n)) if me == 0 else None
        return Call(
            lambda: dist.gather(mine, parts, root, handle),
            result=lambda: torch.cat(parts) if parts else None,
            expected=gathered,
        )
    everything = [torch.empty(count, device=device)]

    def gather_all() -> None:
        if operation.own:
            everything[0] = collectives.all_gather(mine, group)
        else:
            _all_gather(everything[0], mine, handle)

    return Call(gather_all, result=lambda: everything[0], expected=gathered)


def _messages(operation: BenchOperation, site: Site, count: int) -> Call:
    """Every member sends to the next and hears from the one before, all at the same time.

    Along a pipeline the last stage only receives, and messages go out as the executor's do.
    """
    group, device = site.group, site.device
    n, me = group.size, group.index
    sent, got = pattern(me, count).to(device), torch.empty(count, device=device)
    if site.chain:
        messages = [(Action(Kind.RECV_F, 0), got)] if me > 0 else []
        messages += [(Action(Kind.SEND_F, 0), sent)] if me < n - 1 else []
        boxes = site.boxes if operation.own else None

        def along() -> None:
            for transfer in post(messages, P2PRoute(group, StageAssignment(n)), boxes):
                transfer.work.wait()

        expected = pattern(me - 1, count) if me > 0 else None
        return Call(along, result=lambda: got if me > 0 else None, expected=expected)
    after, before = group.ranks[(me + 1) % n], group.ranks[(me - 1) % n]

    def around() -> None:
        works = dist.batch_isend_irecv(
            [
                dist.P2POp(dist.isend, sent, after, group.handle),
                dist.P2POp(dist.irecv, got, before, group.handle),
            ]
        )
        for work in works:
            work.wait()

    return Call(around, result=lambda: got, expected=pattern((me - 1) % n, count))
