"""Operations of `bench comm` with known results, timed calls, and calls within a time budget.

Member m of a group of n holds `pattern(m)`: small whole numbers, so that sums are exact in fp32,
with a prime period, so that a misplaced shard is noticed.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from parallel3d.comm import collectives
from parallel3d.comm.group import Group
from parallel3d.comm.process_groups import GLOO_ON
from parallel3d.device import accelerator
from parallel3d.pipeline.p2p import P2PRoute, SharedP2P, post
from parallel3d.schedules.actions import Action, Kind
from parallel3d.schedules.orders import StageAssignment

# Of the budget; the rest is for the probe of pairs and the end.
MEASURING_SHARE = 0.75


def timed_calls(
    run: Callable[[], object],
    barrier: Callable[[], object],
    device: torch.device,
    warmup: int,
    calls: int,
) -> list[float]:
    """Returns seconds of each of `calls` calls on this rank, each after a barrier."""
    seconds = []
    for number in range(warmup + calls):
        barrier()
        accelerator.synchronize(device)
        start = time.perf_counter()
        run()
        accelerator.synchronize(device)
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
    spent: float = 0.0
    cut: int = 0  # rows that had fewer calls

    def next(self) -> tuple[int, int]:
        """Returns the (warm-up, timed) calls of the next row, as many as all ahead can have."""
        ahead, full = sum(self.estimates[self.row :]), self.warmup + self.calls
        affordable = (self.seconds - self.spent) / max(ahead, 1e-9)
        if affordable >= full:
            return self.warmup, self.calls
        self.cut += 1
        calls = max(1, int(affordable * self.calls / full))
        return max(0, min(self.warmup, int(affordable) - calls)), calls

    def done(self, seconds: float) -> None:
        """Records that all calls of the row took `seconds`."""
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

    def close(self) -> None:
        """Frees the pipeline's shared memory."""
        if self.boxes is not None:
            self.boxes.memory.close()

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
        if operation.name == "send_recv":
            message = torch.empty(self.whole_bytes(size) // ITEM)
            return "mailbox" if self.boxes and self.boxes.fits(message) else self.backend
        if self.group.shared is not None:
            return "shared memory"
        return "pair exchange" if self.group.size == 2 else self.backend


@dataclass
class Call:
    """One operation on its buffers. The first `run` gives `expected` as what it returns or, if that
    is no tensor, in `result`; None: nothing to check on this rank."""

    run: Callable[[], object]
    result: Tensor | None = None
    expected: Tensor | None = None

    def check(self, what: str) -> None:
        """Runs for the first time and compares. Raises WrongResult with `what` and the first wrong
        number."""
        returned = self.run()
        got = returned if isinstance(returned, Tensor) else self.result
        if got is None or self.expected is None:
            return
        got = got.cpu()
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
    group, device, name, own = site.group, site.device, operation.name, operation.own
    n, me, handle, root = group.size, group.index, group.handle, group.ranks[0]
    count = site.whole_bytes(size) // ITEM
    if name == "barrier":
        return Call(partial(dist.barrier, group=handle))
    if name == "send_recv":
        return _messages(operation, site, count)
    mine, whole = pattern(me, count).to(device), torch.empty(count, device=device)
    part = torch.empty(count // n, device=device)
    if operation.reduction is not None:
        op, expected = REDUCTIONS[operation.reduction], reduced(operation.reduction, n, count)
        if name == "reduce":
            run = partial(dist.reduce, mine, root, op, handle)
            return Call(run, mine if me == 0 else None, expected)
        if name == "all_reduce":
            run = partial(dist.all_reduce, mine, op, handle)
            return Call(
                partial(collectives.all_reduce, mine, group) if own else run, mine, expected
            )
        run = partial(_since_2_13("reduce_scatter"), part, mine, op=op, group=handle)
        run = partial(collectives.reduce_scatter, mine, group) if own else run
        return Call(run, part, expected.chunk(n)[me])
    first = pattern(0, count)
    if name == "broadcast":
        return Call(partial(dist.broadcast, mine, root, handle), mine, first)
    if name == "scatter":
        parts = list(first.to(device).chunk(n)) if me == 0 else None
        return Call(partial(dist.scatter, part, parts, root, handle), part, first.chunk(n)[me])
    if name == "all_to_all":
        expected = torch.cat([pattern(m, count // n, me * count // n) for m in range(n)])
        return Call(partial(dist.all_to_all_single, whole, mine, group=handle), whole, expected)
    shard, expected = mine[: count // n], torch.cat([pattern(m, count // n) for m in range(n)])
    if name == "gather":
        parts = list(whole.chunk(n)) if me == 0 else None
        run = partial(dist.gather, shard, parts, root, handle)
        return Call(run, whole if me == 0 else None, expected)
    run = partial(_since_2_13("all_gather"), whole, shard, group=handle)
    return Call(partial(collectives.all_gather, shard, group) if own else run, whole, expected)


def _since_2_13(name: str) -> Callable[..., object]:
    """Returns torch's collective on one tensor under the name that it has in this version."""
    before = {"all_gather": "all_gather_into_tensor", "reduce_scatter": "reduce_scatter_tensor"}
    return getattr(dist, f"{name}_single", None) or getattr(dist, before[name])


def send_receive(sent: Tensor, to: int, received: Tensor, source: int, group: Group) -> None:
    """Sends a message to one world rank of the group while receiving one from another."""
    send = dist.P2POp(dist.isend, sent, to, group.handle)
    receive = dist.P2POp(dist.irecv, received, source, group.handle)
    for work in dist.batch_isend_irecv([send, receive]):
        work.wait()


def _messages(operation: BenchOperation, site: Site, count: int) -> Call:
    """Prepares a message from every member to the next, all at once.

    Along a pipeline the last stage only receives, and messages are posted as by the executor.
    """
    group, device = site.group, site.device
    n, me = group.size, group.index
    sent, got = pattern(me, count).to(device), torch.empty(count, device=device)
    expected = pattern((me - 1) % n, count)
    if not site.chain:
        ranks = group.ranks
        run = partial(send_receive, sent, ranks[(me + 1) % n], got, ranks[(me - 1) % n], group)
        return Call(run, got, expected)
    messages = [(Action(Kind.RECV_F, 0), got)] if me > 0 else []
    messages += [(Action(Kind.SEND_F, 0), sent)] if me < n - 1 else []
    boxes = site.boxes if operation.own else None

    def along() -> None:
        for transfer in post(messages, P2PRoute(group, StageAssignment(n)), boxes):
            transfer.work.wait()

    return Call(along, got if me > 0 else None, expected)
