"""Operations of `bench comm` with known results, timed calls, and calls within a time budget.

Member m of a group of n holds `pattern(m)`: small whole numbers, so that sums are exact in fp32,
with a prime period, so that a misplaced shard is noticed.
"""

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
from parallel3d.comm.group import Group
from parallel3d.comm.group_options import GLOO_ON
from parallel3d.device import accelerator
from parallel3d.pipeline.p2p import P2PRoute, SharedP2P, post
from parallel3d.schedules.actions import Action, Kind
from parallel3d.schedules.orders import StageAssignment

# Of the budget; the rest is for the probe of pairs and the end.
MEASURING_SHARE = 0.75


def finisher(device: torch.device) -> Callable[[], None]:
    """Returns a function that waits for the device."""
    return lambda: accelerator.synchronize(device)


def timed_calls(
    run: Callable[[], object],
    barrier: Callable[[], object],
    finish: Callable[[], None],
    warmup: int,
    calls: int,
) -> list[float]:
    """Returns seconds of each of `calls` calls on this rank, each after a barrier."""
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
    """Returns the median over calls of each call's slowest rank: [rank][call] → seconds."""
    return statistics.median(max(call) for call in zip(*by_rank, strict=True))


@dataclass
class CallCounts:
    """Shares a time budget out over rows: how often each is called; at least one timed call.

    Attributes:
        estimates: seconds of one call of each row, in the order of the rows.
        seconds: for all rows, from now on.
        warmup, calls: of every row, as far as time allows.
    """

    estimates: Sequence[float]
    seconds: float
    warmup: int
    calls: int
    row: int = 0
    foreseen: float = 0.0  # estimated seconds of the rows so far; `spent`: measured
    spent: float = 0.0
    cut: int = field(default=0)  # rows that had fewer calls

    def next(self) -> tuple[int, int]:
        """Returns the (warm-up, timed) calls of the next row."""
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
        """Measured over estimated time; 1 until a few rows have been measured."""
        return self.spent / self.foreseen if self.row >= 8 and self.foreseen > 0 else 1.0

    def done(self, total_calls: int, seconds: float) -> None:
        """Records that all calls of the row took `seconds`."""
        self.foreseen += self.estimates[self.row] * total_calls
        self.spent += seconds
        self.row += 1


PERIOD = 251
ITEM = 4  # bytes of an fp32

REDUCTIONS = {name: getattr(dist.ReduceOp, name.upper()) for name in ("sum", "avg", "max", "min")}
REDUCING = ("all_reduce", "reduce", "reduce_scatter")
PLAIN = ("all_gather", "broadcast", "scatter", "gather", "all_to_all", "send_recv", "barrier")
# Sent by training's own path: activations and gradients, summed where they are reduced.
COLLECTIVES = ("all_reduce", "all_gather", "reduce_scatter")
TRAINING = dict.fromkeys(("tp", "cp", "dp", "dp_cp"), COLLECTIVES) | {"pp": ("send_recv",)}


class WrongResult(RuntimeError):
    """A collective's result is not the expected sum, extreme or shards."""


class BenchOperation(NamedTuple):
    """A collective, and whose code runs it.

    name: one of `network.OPERATIONS`. reduction: sum, avg, max, min, or None. own: training's own
    path for CPU ranks (such as shared memory) instead of the backend's.
    """

    name: str
    reduction: str | None = None
    own: bool = False

    @property
    def label(self) -> str:
        """Formats `all-reduce sum`, `send/receive`."""
        name = "send/receive" if self.name == "send_recv" else self.name.replace("_", "-")
        return f"{name} {self.reduction}" if self.reduction else name


def is_trainings(dim: str, name: str, reduction: str | None) -> bool:
    """Whether training calls this in the groups of `dim`."""
    return reduction in ("sum", None) and name in TRAINING.get(dim, ())


def operations(dim: str) -> list[BenchOperation]:
    """Returns all operations, one per reduction, and training's own paths."""
    found = []
    for name in (*REDUCING, *PLAIN):
        for reduction in REDUCTIONS if name in REDUCING else (None,):
            found.append(BenchOperation(name, reduction))
            if is_trainings(dim, name, reduction):
                found.append(BenchOperation(name, reduction, own=True))
    return found


@dataclass(frozen=True)
class Site:
    """Group of this rank, its device, and the transport of its messages.

    boxes: the pipeline's shared memory, if any. chain: send/receive goes from stage to stage
    instead of round a ring.
    """

    group: Group
    device: torch.device
    boxes: SharedP2P | None = None
    chain: bool = False

    @property
    def backend(self) -> str:
        name = dist.get_backend(self.group.handle)
        return "gloo" if name == GLOO_ON else name

    def whole_bytes(self, size: int) -> int:
        """Returns `size` in bytes, rounded down to equal shards of whole numbers."""
        unit = ITEM * self.group.size
        return max(unit, size // unit * unit)

    def path(self, operation: BenchOperation, size: int) -> str:
        """Returns the transport: the backend's name, or our own's."""
        if not operation.own or accelerator.is_accelerator(self.device):
            return self.backend
        nbytes, shared = self.whole_bytes(size), self.group.shared
        if operation.name == "send_recv":
            fits = self.boxes is not None and self.boxes.fits(torch.empty(nbytes // ITEM))
            return "mailbox" if fits else self.backend
        part = nbytes // self.group.size if operation.name == "all_gather" else nbytes
        splits = operation.name == "all_reduce"  # sends buffers of any size in chunks
        if shared is not None and (splits or shared.fits(torch.empty(part // ITEM))):
            return "shared memory"
        return "pair exchange" if self.group.size == 2 else self.backend


@dataclass
class Call:
    """One operation on its buffers. `run` may be repeated; after `fill` and one `run`, `result`
    (None: nothing to check on this rank) must equal `expected`."""

    run: Callable[[], object]
    fill: Callable[[], object] = lambda: None
    result: Callable[[], Tensor | None] = lambda: None
    expected: Tensor | None = None

    def check(self, what: str) -> None:
        """Runs once and compares. Raises WrongResult with `what` and the first wrong number."""
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
    """Returns (count,) fp32: the input of `member` from number `start` on."""
    ramp, begin = torch.arange(1.0, PERIOD + 1), start % PERIOD
    return ramp.repeat((begin + count) // PERIOD + 1)[begin : begin + count] * (member + 1)


def reduced(reduction: str, n: int, count: int, start: int = 0) -> Tensor:
    """Returns (count,) fp32: the reduction of `pattern` over n members."""
    factor = {"sum": n * (n + 1) / 2, "avg": (n + 1) / 2, "max": n, "min": 1}[reduction]
    return pattern(0, count, start) * factor


def prepare(operation: BenchOperation, site: Site, size: int) -> Call:
    """Prepares the operation on buffers of `size` bytes (the whole buffer, as in nccl-tests)."""
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
    assert operation.reduction is not None
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
    """Prepares broadcast, all-gather, scatter, gather or all-to-all."""
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
        first = [pattern(0, part, i * part).to(device) for i in range(n)]  # the root's input
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
    """Prepares a message from every member to the next, all at once.

    Along a pipeline the last stage only receives, and messages are posted as by the executor.
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
