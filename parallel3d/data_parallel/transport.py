"""Sums gradients and broadcasts buffers for DistributedDataParallel."""

from __future__ import annotations

from collections.abc import Iterator, Sequence, Set

import torch
import torch.distributed as dist
from torch import Tensor, nn

from parallel3d.comm import collectives
from parallel3d.comm.collectives import Work
from parallel3d.comm.exchange import messages
from parallel3d.comm.group import EXTERNAL, Group
from parallel3d.comm.shared_memory import SharedMemory, open_shared_memory
from parallel3d.data_parallel.reducer import CommHook, GradBucket, all_reduce
from parallel3d.device.accelerator import is_accelerator
from parallel3d.private_names import (
    Future,
    backend_for,
    buffers_of,
    foreach_copy_,
    timeout_of_options,
    unsafe_preserve_version_counter,
)

DEFAULT_TIMEOUT_S = 1800.0  # torch.distributed's default
MESSAGE_BYTES = 64 << 20
LINE = 64  # bytes of a cache line
# In shared memory a bucket costs only two signals, so overlap pays even for small buckets.
SHARED_CAP_MIB = 1.0


def is_shared(group: Group, device: torch.device) -> bool:
    """Returns whether to try shared memory.

    CPU ranks try it in external groups, and in groups of parallel3d that use shared memory.
    """
    on_cpu = device.type == "cpu" and group.size > 1
    return on_cpu and (group.shared is not None or group.name == EXTERNAL)


def open_memory(group: Group, size: int, signals: Sequence[int] = (0,)) -> SharedMemory | None:
    """Opens `size` bytes of shared memory for a group of several ranks; collective.

    Returns None if the ranks cannot share memory.
    """
    assert group.handle is not None
    if group.shared is not None:
        timeout_s = group.shared.memory.timeout_s
    else:
        options = getattr(backend_for(group.handle, torch.device("cpu")), "options", None)
        timeout = None if options is None else timeout_of_options(options)
        timeout_s = timeout.total_seconds() if timeout else DEFAULT_TIMEOUT_S
    return open_shared_memory(group.handle, group.index, group.size, size, timeout_s, signals)


# These functions pack tensors of any dtypes into a row of bytes, each at the start of a cache line.


Size = tuple[int, torch.dtype]  # number of elements of a tensor, and their dtype


def _length(size: Size) -> int:
    numel, dtype = size
    return -(-numel * dtype.itemsize // LINE) * LINE


def _views(data: Tensor, sizes: Sequence[Size]) -> list[Tensor]:
    views, start = [], 0
    for numel, dtype in sizes:
        views.append(data[start : start + numel * dtype.itemsize].view(dtype))
        start += _length((numel, dtype))
    return views


def _sizes(tensors: Sequence[Tensor]) -> list[Size]:
    return [(tensor.numel(), tensor.dtype) for tensor in tensors]


def packed(tensors: Sequence[Tensor], data: Tensor) -> list[Tensor]:
    """Returns a view of the bytes `data` for each tensor, in its dtype and shape."""
    views = zip(_views(data, _sizes(tensors)), tensors, strict=True)
    return [view.view(tensor.shape) for view, tensor in views]


def fill(targets: Sequence[Tensor], sources: Sequence[Tensor]) -> None:
    """Copies sources to targets without changing the version counters that autograd checks."""
    with unsafe_preserve_version_counter(tuple(targets)):
        foreach_copy_(list(targets), list(sources))


@torch.no_grad()
def broadcast_all(tensors: Sequence[Tensor], source: int, group: Group) -> None:
    """Broadcasts tensors of any dtypes and strides from member `source`, in place."""
    lengths = [_length(size) for size in _sizes(tensors)]
    for span in messages(lengths, MESSAGE_BYTES):
        part = [tensors[i] for i in span]
        flat = torch.empty(sum(lengths[i] for i in span), dtype=torch.uint8, device=part[0].device)
        views = packed(part, flat)
        if group.index == source:
            fill(views, part)
        collectives.broadcast(flat, source, group)
        if group.index != source:
            fill(part, views)


class BufferSync:
    """Broadcasts the first rank's buffers before a forward, by shared memory if possible."""

    def __init__(
        self, module: nn.Module, group: Group, device: torch.device, ignored: Set[str]
    ) -> None:
        self.group = group
        # Users may replace buffers, so each access looks them up in their module.
        seen: set[int] = set()
        self.places = []
        for prefix, part in module.named_modules():
            for name, buffer in buffers_of(part).items():
                whole = f"{prefix}.{name}" if prefix else name
                if buffer is not None and id(buffer) not in seen and whole not in ignored:
                    seen.add(id(buffer))
                    self.places.append((buffers_of(part), name))
        self.memory: SharedMemory | None = None
        self.rounds = 0
        found = self.current()
        if found and is_shared(group, device):
            self.memory = open_memory(group, sum(map(_length, _sizes(found))))
        if self.memory is not None:
            self.shapes = [(b.shape, b.dtype) for b in found]
            self.views = packed(found, self.memory.data)

    def current(self) -> list[Tensor]:
        return [buffers[name] for buffers, name in self.places]

    def from_first(self) -> None:
        buffers = self.current()
        if self.memory is None or self.shapes != [(b.shape, b.dtype) for b in buffers]:
            broadcast_all(buffers, 0, self.group)
            return
        if self.group.index > 0:
            self.memory.wait(0)
            fill(buffers, self.views)
            self.memory.post(0)
            return
        peers = range(1, self.group.size)
        for peer in peers if self.rounds else ():
            self.memory.wait(peer)
        self.rounds += 1
        foreach_copy_(self.views, buffers)
        for peer in peers:
            self.memory.post(peer)


# Sums of buckets
# A transport sums several buffers over a group; every rank starts them in the same order. It has
# these attributes:
# buffers        this rank's buffers, to be filled with gradients and started when they are full
# flags          the averager's flags, which are also summed; to be written before the last start
# summed_flags   the sums of the flags, valid after `finish`
# fault          this rank's error as a sentence, or None
# adds           whether `finish` yields terms to add to this rank's buffers, instead of sums
#
# Its methods are called in this order: `before` (the buffers may then be written), `start` for each
# buffer, `finish` (yields the sums in order), `release` (the sums may then be overwritten).


class BackendTransport:
    """Sums buckets by the group's backend or passes them to a hook, while the backward runs.

    On a CPU, if a hook returned a future for a bucket, the next bucket waits for this future.
    The thread that completes such a hook's first message sends its second one, so with several
    buckets in flight, two ranks could send in different orders and deadlock (as PyTorch's PowerSGD
    hook does on gloo). Hooks of this package send their second message in `wait`.

    With a hook, which may round a buffer, the flags travel in a separate message.

    Args:
        members: the parameters of each bucket.
        flags: number of flags.
        hook: the state and the function of a communication hook, or None if the backend sums.
    """

    adds = False

    def __init__(
        self,
        members: Sequence[Sequence[nn.Parameter]],
        flags: int,
        group: Group,
        hook: tuple[object, CommHook] | None,
    ) -> None:
        self.group = group
        self.members = members
        self.hook = hook
        self.sent = []
        self.buffers = []
        for parameters in members:
            like, numel = parameters[0], sum(p.numel() for p in parameters)
            more = flags if hook is None and parameters is members[-1] else 0
            whole = torch.zeros(numel + more, dtype=like.dtype, device=like.device)
            self.sent.append(whole)
            self.buffers.append(whole[:numel])
        self.flags = whole[numel:] if hook is None else torch.zeros(flags, device=like.device)
        self.summed_flags = self.flags
        self.pending: list[Work] = []
        self.fault: str | None = None

    def before(self) -> None:
        """Does nothing, because the buffers are this rank's own."""

    def start(self, index: int) -> None:
        buffer = self.sent[index]
        on_cpu = not is_accelerator(buffer.device)
        if on_cpu and self.pending and isinstance(self.pending[-1], Future):
            self.pending[-1].wait()
        bucket = GradBucket(index, index == len(self.sent) - 1, buffer, self.members[index])
        if self.hook is None:
            pending = all_reduce(self.group, bucket)
        else:
            state, hook = self.hook
            pending = hook(state, bucket)
        if not callable(getattr(pending, "wait", None)):
            raise TypeError(
                f"the communication hook must return a torch.futures.Future; it returned a "
                f"{type(pending).__name__}"
            )
        self.pending.append(pending)

    def finish(self) -> Iterator[Tensor]:
        started = self.pending
        self.pending = []
        self.fault = None
        for index, (pending, buffer) in enumerate(zip(started, self.buffers, strict=True)):
            made = pending.wait()
            made = made[0] if isinstance(made, (list, tuple)) else made
            # The works of torch.distributed return None or a boolean.
            if made is None or isinstance(made, bool):
                made = buffer
            if isinstance(made, Tensor) and made.shape == buffer.shape:
                yield made
                continue
            shape = tuple(made.shape) if isinstance(made, Tensor) else type(made).__name__
            self.fault = (
                f"the communication hook returned {shape} for bucket {index}, which must stay a "
                f"tensor of {tuple(buffer.shape)}"
            )
            yield buffer
        if self.hook is None:
            return
        if self.fault:
            self.flags[-1] = 1
        if self.group.size > 1:
            dist.all_reduce(self.flags, group=self.group.handle)

    def release(self) -> None:
        """Does nothing, because the sums are this rank's own."""

    def close(self) -> None:
        self.pending = []


# kinds of signals: a buffer is full; a slice is summed or, with `adds`, a buffer has been read
FULL, SUMMED = 0, 1


class SharedTransport:
    """Sums buffers in shared memory by a reduce-scatter and an all-gather, without extra copies.

    A rank's buffers are in shared memory. `start` posts that a buffer is full. At the end of the
    backward every rank sums its slice of each bucket, over all ranks, into a shared total, posts
    it, and reads the other ranks' slices. This moves as many bytes as a ring does, and takes no
    system call unless a rank must wait.

    Two kinds of signals (full, summed) order all accesses. A rank refills a buffer only after it
    has read the whole total. By then every peer has read the buffer, because a peer does so before
    it posts its slice of the total. A rank rewrites its slice of a total only after every peer has
    started that buffer again, which a peer does after it has read the total.

    With `adds`, two ranks need no total: each adds the other's buffer to its own gradients, which
    saves memory traffic and one wait. `release` then posts that this rank has read the other's
    buffer, including gradients of parameters for which this rank has none.

    Args:
        sizes: size of each bucket; in the last bucket the flags follow the gradients.
        flags: number of flags.
        adds: whether each of two ranks adds the other's buffer to its own gradients.
    """

    fault: str | None = None

    def __init__(self, memory: SharedMemory, sizes: Sequence[Size], flags: int, adds: bool) -> None:
        self.adds = adds
        self.memory = memory
        self.size = memory.size
        self.index = memory.index
        self.peers = [rank for rank in range(self.size) if rank != self.index]
        # The memory holds every rank's buffers, the totals, and the backward number of each buffer.
        length = sum(map(_length, sizes))
        *ranks, totals = (_views(memory.data[length * i :], sizes) for i in range(self.size + 1))
        self.by_rank = ranks
        self.whole = ranks[1 - self.index] if adds else totals
        stamps = memory.data[length * (self.size + 1) :][: 8 * self.size * len(sizes)]
        self.stamps = stamps.view(torch.int64).view(self.size, -1).numpy()
        *self.buffers, last = ranks[self.index]
        self.buffers.append(last[:-flags])
        self.flags = last[-flags:]
        *self.totals, last = self.whole
        self.totals.append(last[:-flags])
        self.their_flags = last[-flags:]
        self.summed_flags = torch.empty_like(self.flags) if adds else self.their_flags
        self.step = 1

    def before(self) -> None:
        if self.adds and self.step > 1:
            self._wait(SUMMED)

    def start(self, index: int) -> None:
        self.stamps[self.index, index] = self.step
        self._post(FULL)

    def finish(self) -> Iterator[Tensor]:
        for index, total in enumerate(self.totals):
            self._wait(FULL)
            self._check(index)
            if self.adds:
                yield total
            else:
                self._sum(index)
                self._post(SUMMED)
        if self.adds:
            torch.add(self.flags, self.their_flags, out=self.summed_flags)
            return
        for total in self.totals:
            self._wait(SUMMED)
            yield total

    def _sum(self, index: int) -> None:
        """Sums this rank's slice of a bucket over all ranks, in rank order."""
        whole = self.whole[index]
        own = _part(whole, self.size, self.index)
        parts = [buffers[index][own] for buffers in self.by_rank]
        total = torch.add(parts[0], parts[1], out=whole[own])
        for part in parts[2:]:
            total.add_(part)

    def _check(self, index: int) -> None:
        for peer in self.peers:
            if (theirs := self.stamps[peer, index]) != self.step:
                raise RuntimeError(
                    f"member {peer} of the group brought bucket {index} of its backward number "
                    f"{theirs}, but this rank is in its backward number {self.step}"
                )

    def release(self) -> None:
        if self.adds:
            self._post(SUMMED)
        self.step += 1

    def _post(self, kind: int) -> None:
        for peer in self.peers:
            self.memory.post(peer, kind)

    def _wait(self, kind: int) -> None:
        for peer in self.peers:
            self.memory.wait(peer, kind)

    def close(self) -> None:
        self.memory.close()


def _part(whole: Tensor, count: int, index: int) -> slice:
    """Returns one of `count` slices of whole cache lines, so that ranks never share a line."""
    numel, line = whole.numel(), LINE // whole.itemsize
    lines = -(-numel // line)
    first, last = lines * index // count, lines * (index + 1) // count
    return slice(min(numel, first * line), min(numel, last * line))


Transport = BackendTransport | SharedTransport


def open_transport(
    members: Sequence[Sequence[nn.Parameter]],
    flags: int,
    group: Group,
    hook: tuple[object, CommHook] | None,
    elsewhere: bool,
) -> Transport:
    """Opens a transport by shared memory if possible, or else by the backend; collective.

    `elsewhere`: whether gradients are kept in separate tensors, not in the buffers.
    """
    if hook is None and is_shared(group, members[0][0].device):
        sizes = [
            (sum(p.numel() for p in part) + (flags if part is members[-1] else 0), part[0].dtype)
            for part in members
        ]
        needed = sum(map(_length, sizes)) * (group.size + 1) + 8 * group.size * len(sizes)
        memory = open_memory(group, needed, signals=(0, 0))
        if memory is not None:
            return SharedTransport(memory, sizes, flags, adds=elsewhere and group.size == 2)
    return BackendTransport(members, flags, group, hook)
