"""Prepares and times single operations of a layout's groups, whose results are known.

The input of member m of a group is `pattern(m)`. It consists of small whole numbers, so that sums
are exact in fp32, and repeats with a prime period, so that a misplaced shard is noticed.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from parallel3d.blueprint.layout import Layout
from parallel3d.comm import collectives
from parallel3d.comm.group import Group
from parallel3d.comm.process_groups import GLOO_ON, ProcessGroups
from parallel3d.device import accelerator
from parallel3d.pipeline.p2p import P2PRoute, SharedP2P, post
from parallel3d.run.keys import LaunchConfig
from parallel3d.schedules.actions import Action, Kind
from parallel3d.schedules.orders import StageAssignment

PERIOD = 251
ITEM = 4  # bytes of an fp32 number

REDUCTIONS = {name: getattr(dist.ReduceOp, name.upper()) for name in ("sum", "avg", "max", "min")}
REDUCING = ("all_reduce", "reduce", "reduce_scatter")
PLAIN = ("all_gather", "broadcast", "scatter", "gather", "all_to_all", "send_recv", "barrier")
WORLD = "world"


def timed_calls(
    run: Callable[[], object],
    barrier: Callable[[], object],
    device: torch.device,
    warmup: int,
    calls: int,
) -> list[float]:
    """Returns the seconds of `calls` calls of `run` on this rank, after `warmup` untimed calls.

    A barrier precedes each call.
    """
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


class WrongResult(RuntimeError):
    """Signals that a collective has given a wrong result."""


class TimedOperation(NamedTuple):
    """A collective operation, and the path on which it runs."""

    name: str  # one of `network.OPERATIONS`
    reduction: str | None = None  # sum, avg, max or min, or None if it does not reduce
    own: bool = False  # whether training's own path (shared memory of CPU ranks) runs it

    @property
    def label(self) -> str:
        """The operation in words, such as `all-reduce sum` or `send/receive`."""
        name = "send/receive" if self.name == "send_recv" else self.name.replace("_", "-")
        return f"{name} {self.reduction}" if self.reduction else name


@dataclass(frozen=True)
class Site:
    """A group of this rank, this rank's device, and the transport of messages."""

    group: Group
    device: torch.device
    boxes: SharedP2P | None = None  # the pipeline's shared memory, or None if it is not used
    chain: bool = False  # whether messages go from stage to stage, instead of around a ring

    def close(self) -> None:
        """Frees the pipeline's shared memory, if it is used."""
        if self.boxes is not None:
            self.boxes.memory.close()

    @property
    def backend(self) -> str:
        name = dist.get_backend(self.group.handle)
        return "gloo" if name == GLOO_ON else name

    def whole_bytes(self, size: int) -> int:
        """Returns `size` rounded down to a whole number of fp32 elements per rank, at least one."""
        unit = ITEM * self.group.size
        return max(unit, size // unit * unit)

    def path(self, operation: TimedOperation, size: int) -> str:
        """Returns the name of the transport that an operation uses for `size` bytes.

        The transport is the backend or, on training's own path if the size fits, `mailbox` or
        `shared memory`.
        """
        if not operation.own or accelerator.is_accelerator(self.device):
            return self.backend
        if operation.name == "send_recv":
            message = torch.empty(self.whole_bytes(size) // ITEM)
            return "mailbox" if self.boxes and self.boxes.fits(message) else self.backend
        return self.backend if self.group.shared is None else "shared memory"


@dataclass
class Call:
    """Contains an operation that is ready to run on its buffers.

    Attributes:
        run: runs the operation.
        result: the buffer with the result, if `run` returns no tensor.
        expected: the required result of the first `run`, or None if this rank checks nothing.
    """

    run: Callable[[], object]
    result: Tensor | None = None
    expected: Tensor | None = None

    def check(self, what: str) -> None:
        """Runs the operation for the first time and compares its result.

        Raises WrongResult with `what`, the name of the operation, and the first wrong number.
        """
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
    """Returns `count` fp32 numbers of the input of `member`, starting at index `start`."""
    ramp, begin = torch.arange(1.0, PERIOD + 1), start % PERIOD
    return ramp.repeat((begin + count) // PERIOD + 1)[begin : begin + count] * (member + 1)


def reduced(reduction: str, n: int, count: int, start: int = 0) -> Tensor:
    """Returns `count` fp32 numbers of the reduction of `pattern` over `n` members."""
    factor = {"sum": n * (n + 1) / 2, "avg": (n + 1) / 2, "max": n, "min": 1}[reduction]
    return pattern(0, count, start) * factor


def prepare(operation: TimedOperation, site: Site, size: int) -> Call:
    """Prepares an operation on a buffer of `size` bytes, as nccl-tests counts them."""
    group, device, name, own = site.group, site.device, operation.name, operation.own
    n, me, handle, root = group.size, group.index, group.handle, group.ranks[0]
    count = site.whole_bytes(size) // ITEM
    if name == "barrier":
        return Call(partial(dist.barrier, group=handle))
    if name == "send_recv":
        return _messages(operation, site, count)
    run: Callable[..., object]
    mine, whole = pattern(me, count).to(device), torch.empty(count, device=device)
    part = torch.empty(count // n, device=device)
    if operation.reduction is not None:
        op, expected = REDUCTIONS[operation.reduction], reduced(operation.reduction, n, count)
        if name == "reduce":
            run = partial(dist.reduce, mine, root, op, handle)
            return Call(run, mine if me == 0 else None, expected)
        if name == "all_reduce":
            run = partial(dist.all_reduce, mine, op, handle)
            run = partial(collectives.all_reduce, mine, group) if own else run
            return Call(run, mine, expected)
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
    """Returns torch's collective on single tensors, which version 2.13 renamed."""
    before = {"all_gather": "all_gather_into_tensor", "reduce_scatter": "reduce_scatter_tensor"}
    return getattr(dist, f"{name}_single", None) or getattr(dist, before[name])


def send_receive(sent: Tensor, to: int, received: Tensor, source: int, group: Group) -> None:
    """Sends a message to the rank `to` while receiving one from the rank `source`.

    Both are world ranks in `group`.
    """
    send = dist.P2POp(dist.isend, sent, to, group.handle)
    receive = dist.P2POp(dist.irecv, received, source, group.handle)
    for work in dist.batch_isend_irecv([send, receive]):
        work.wait()


def _messages(operation: TimedOperation, site: Site, count: int) -> Call:
    """Prepares messages of `count` numbers from every member to the next, all at once.

    Around a ring the last member sends to the first. Along a pipeline the last only receives, and
    messages are posted as the executor posts them.
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


def dimensions(layout: Layout) -> tuple[list[str], dict[str, str]]:
    """Returns the dimensions to measure, and for each other dimension why it is left out."""
    data = ("cp", "dp_cp") if layout.cp > 1 else ("dp",)
    sizes = {dim: layout.size(dim) for dim in ("tp", "dp", "pp")}
    left_out = {dim: f"{dim}=1 has no groups" for dim, size in sizes.items() if size == 1}
    if layout.cp > 1 == layout.dp:
        left_out["dp_cp"] = "it has the same ranks as cp"
    elif layout.cp > 1:
        left_out["dp"] = "it sends only a token count, while dp_cp sends the gradients"
    dims = [dim for dim in ("tp", *data, "pp") if dim not in left_out]
    same = next((dim for dim in dims if layout.size(dim) == layout.world_size), None)
    if same is None:
        return [*dims, WORLD], left_out
    return dims, left_out | {WORLD: f"it has the same ranks as {same}"}


def sites(groups: ProcessGroups, device: torch.device, launch: LaunchConfig) -> dict[str, Site]:
    """Returns this rank's site in each dimension.

    The call is collective, because stages may open shared memory.
    """
    found = {}
    for dim in dimensions(groups.layout)[0]:
        group, boxes = getattr(groups, dim), None
        if dim == "pp" and device.type == "cpu" and launch.shared_memory:
            boxes = SharedP2P.open(group, launch.timeout_s)
        found[dim] = Site(group, device, boxes, chain=dim == "pp")
    return found
