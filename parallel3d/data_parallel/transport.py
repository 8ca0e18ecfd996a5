"""Moves the gradients and buffers of DistributedDataParallel: group, shared memory, broadcasts."""

from __future__ import annotations

from collections.abc import Iterator, Sequence, Set
from typing import NamedTuple, Protocol

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from parallel3d.comm import collectives
from parallel3d.comm import group as groups
from parallel3d.comm.collectives import Work
from parallel3d.comm.group import EXTERNAL, Group, GroupLike
from parallel3d.comm.shared_memory import SharedMemory, open_shared_memory

DEFAULT_TIMEOUT_S = 1800.0  # of torch.distributed


def group_of(given: GroupLike) -> Group:
    """Returns the `Group` of a process group or a mesh; None is PyTorch's default one.

    Raises TypeError for another thing, ValueError if torch.distributed is not initialised or this
    rank is not in the group.
    """
    if isinstance(given, (Group, DeviceMesh)):
        return groups.group_of(given)
    if given is not None and not isinstance(given, dist.ProcessGroup):
        raise TypeError(
            f"process_group must be a ProcessGroup, a group as groups.dp, a mesh, or None; it is a "
            f"{type(given).__name__}"
        )
    if not dist.is_initialized():
        raise ValueError(
            "torch.distributed is not initialised; call parallel3d.init() or "
            "torch.distributed.init_process_group() before the module is wrapped"
        )
    handle = dist.group.WORLD if given is None else given
    if handle == dist.GroupMember.NON_GROUP_MEMBER:
        raise ValueError(f"rank {dist.get_rank()} is not in the process group")
    return groups.group_of(handle)


def may_share(group: Group) -> bool:
    """Returns whether to try shared memory; parallel3d's own groups have it if they want it."""
    return group.size > 1 and (group.shared is not None or group.name == EXTERNAL)


def timeout_of(group: Group) -> float:
    if group.shared is not None:
        return group.shared.memory.timeout_s
    assert group.handle is not None  # may_share: more than one rank
    options = getattr(group.handle._get_backend(torch.device("cpu")), "options", None)
    timeout = getattr(options, "_timeout", None)
    return timeout.total_seconds() if timeout else DEFAULT_TIMEOUT_S


def group_and_devices(
    device_ids: Sequence[int | torch.device] | None,
    process_group: GroupLike,
    device_mesh: DeviceMesh | None,
) -> tuple[GroupLike, Sequence[int | torch.device] | None]:
    """Returns the group, and the devices.

    Raises RuntimeError, as PyTorch's class, for both a group and a mesh, and for a mesh of several
    dimensions; TypeError for something else than devices in the second place.
    """
    if device_ids is not None and not isinstance(device_ids, (list, tuple)):
        raise TypeError(
            "the second argument must be device_ids, a list of the module's own device, as in "
            f"PyTorch; it is a {type(device_ids).__name__}: give a group as process_group=groups.dp"
        )
    if device_mesh is not None:
        if process_group is not None:
            raise RuntimeError(
                "Cannot specify both process_group and device_mesh arguments. Give one of them"
            )
        if device_mesh.ndim != 1:
            raise RuntimeError(
                f"Only 1D device mesh is supported, but got {device_mesh}; give one dimension of it"
            )
        process_group = device_mesh
    return process_group, device_ids


def own_device(
    device_ids: Sequence[int | torch.device] | None, device: torch.device, key: str = "device_ids"
) -> torch.device | None:
    if not device_ids:
        return None
    named = device_ids[0]
    wanted = torch.device(device.type, named) if isinstance(named, int) else torch.device(named)
    if len(device_ids) > 1 or wanted != device:
        raise ValueError(
            f"{key}={list(device_ids)} must name the one device of the module, {device}, or be None"
        )
    return device


MESSAGE_BYTES = 64 << 20
ALIGNMENT = 16  # bytes: of the widest type


@torch.no_grad()
def broadcast_all(tensors: Sequence[Tensor], source: int, group: Group) -> None:
    """Copies the values of member `source` to every member, in place; any types and strides."""
    for part in _messages(tensors):
        flat, views = packed(part)
        if group.index == source:
            fill(views, part)
        collectives.broadcast(flat, source, group)
        if group.index != source:
            fill(part, views)


def _messages(tensors: Sequence[Tensor]) -> Iterator[list[Tensor]]:
    part: list[Tensor] = []
    filled = 0
    for tensor in tensors:
        if part and filled + tensor.nbytes > MESSAGE_BYTES:
            yield part
            part, filled = [], 0
        part.append(tensor)
        filled += tensor.nbytes
    if part:
        yield part


def packed_bytes(tensors: Sequence[Tensor]) -> int:
    return sum(_aligned(tensor.nbytes) for tensor in tensors)


def packed(tensors: Sequence[Tensor], flat: Tensor | None = None) -> tuple[Tensor, list[Tensor]]:
    """Returns a buffer of bytes (`flat`, or a new one) and an unfilled view of it per tensor."""
    if flat is None:
        flat = torch.empty(packed_bytes(tensors), dtype=torch.uint8, device=tensors[0].device)
    views, start = [], 0
    for tensor in tensors:
        views.append(flat[start : start + tensor.nbytes].view(tensor.dtype).view(tensor.shape))
        start += _aligned(tensor.nbytes)
    return flat, views


def fill(targets: Sequence[Tensor], sources: Sequence[Tensor]) -> None:
    """Copies sources to targets without bumping versions: a forward's graph may have saved them."""
    with torch.autograd._unsafe_preserve_version_counter(tuple(targets)):
        torch._foreach_copy_(list(targets), list(sources))


def _aligned(size: int) -> int:
    return -(-size // ALIGNMENT) * ALIGNMENT


LINE = 64  # bytes of a cache line
# In shared memory a bucket costs two signals, so that small ones are worth their overlap.
SHARED_CAP_MIB = 1.0

Size = tuple[int, torch.dtype]  # elements of a buffer, and their type


class Transport(Protocol):
    """Sums several buffers over a group; every rank starts them in the same order.

    Buffers collect a rank's gradients and are started when they are full. `finish` yields the sums
    of all buffers in order. The last buffer also carries some flags for the reducer.

    Attributes:
        buffers: this rank's, to be filled.
        flags: to be written before the last start, and summed.
        summed_flags: after `finish`.
        fault: an error on this rank, as a sentence.
        adds: `finish` yields the terms to add to this rank's buffers, not the sums.
    """

    adds: bool
    buffers: list[Tensor]
    flags: Tensor
    summed_flags: Tensor
    fault: str | None

    def before(self) -> None:
        """Waits until this rank's buffers may be written."""

    def start(self, index: int) -> None:
        """Sends a buffer, which is full."""

    def finish(self) -> Iterator[Tensor]:
        """Yields the sums, in order, after all buffers have been started."""

    def release(self) -> None:
        """Lets the buffers of `finish` be written again."""

    def close(self) -> None:
        """Frees shared memory."""


class BackendTransport:
    """Sums buffers by the group's backend, overlapped with the backward.

    Attributes:
        handles: if any, groups of the same ranks that take the buckets in turn; each has its own
            connections and threads (Li et al. 2020, §5.4).
    """

    adds = False
    fault: str | None = None

    def __init__(
        self, sizes: Sequence[Size], flags: int, group: Group, device: torch.device
    ) -> None:
        self.group = group
        self.whole = [
            torch.zeros(n, dtype=dtype, device=device) for n, dtype in _add_flags(sizes, flags)
        ]
        self.buffers, self.flags = _split_flags(self.whole, flags)
        self.summed_flags = self.flags
        self.works: list[Work] = []
        self.handles: list[dist.ProcessGroup] = []

    def before(self) -> None:
        """Does nothing: the buffers are this rank's own."""

    def start(self, index: int) -> None:
        if not self.handles:
            self.works.append(collectives.all_reduce_bucket(self.whole[index], self.group))
            return
        handle = self.handles[index % len(self.handles)]
        self.works.append(dist.all_reduce(self.whole[index], group=handle, async_op=True))

    def finish(self) -> Iterator[Tensor]:
        works, self.works = self.works, []
        for work, buffer in zip(works, self.buffers, strict=True):
            work.wait()
            yield buffer

    def release(self) -> None:
        """Does nothing: the sums are in this rank's own buffers."""

    def close(self) -> None:
        self.works = []


class _Place(NamedTuple):
    """Locates a buffer: each rank's copy, their sum, and the slice that this rank sums."""

    own: list[Tensor]  # by rank
    total: Tensor
    part: slice


# Kinds of signals.
FULL, SUMMED = 0, 1


class SharedTransport:
    """Sums buffers in shared memory: a reduce-scatter, then an all-gather, without copies between.

    A rank's buffers lie in shared memory. `start` posts that a buffer is full. At the end of the
    backward every rank sums its slice of each bucket, over all ranks, into a shared total, posts
    it, and reads the other ranks' slices: as many bytes as a ring moves, and no system call unless
    a rank must wait.

    Two kinds of signals (full, summed) order all accesses. A buffer is filled again only after its
    total was read here, and every peer had read the buffer before it posted its slice of the total.
    A total is written again only when all peers have started that buffer again, before which they
    read the total.

    With `adds`, two ranks need no total: each adds the other's buffer to its own gradients, which
    saves memory traffic and one wait. `release` then posts that the buffer was read, after
    gradients were made of it that this rank did not have.
    """

    fault: str | None = None

    def __init__(
        self, memory: SharedMemory, sizes: Sequence[Size], flags: int, elsewhere: bool
    ) -> None:
        self.adds = elsewhere and memory.size == 2
        self.memory, self.size, self.index = memory, memory.size, memory.index
        self.peers = [rank for rank in range(self.size) if rank != self.index]
        sizes = _add_flags(sizes, flags)
        starts, end = _starts(sizes)
        stamps = memory.data[end * (self.size + 1) :][: 8 * self.size * len(sizes)]
        self.stamps = stamps.view(torch.int64).view(self.size, -1).numpy()
        self.places = [
            _Place(
                [_view(memory.data, end * rank + start, size) for rank in range(self.size)],
                _view(memory.data, end * self.size + start, size),
                _part(size, self.size, self.index),
            )
            for start, size in zip(starts, sizes, strict=True)
        ]
        self.buffers, self.flags = _split_flags([p.own[self.index] for p in self.places], flags)
        self.totals, self.summed_flags = _split_flags([p.total for p in self.places], flags)
        if self.adds:
            other = [place.own[1 - self.index] for place in self.places]
            self.totals, self.peer_flags = _split_flags(other, flags)
            self.summed_flags = torch.empty_like(self.flags)
        self.step = 1

    @classmethod
    def open(
        cls, sizes: Sequence[Size], flags: int, group: Group, elsewhere: bool
    ) -> SharedTransport | None:
        """Returns None if the ranks cannot share memory; collective."""
        _, end = _starts(_add_flags(sizes, flags))
        count = group.size
        needed = end * (count + 1) + 8 * count * len(sizes)
        assert group.handle is not None  # may_share: more than one rank
        memory = open_shared_memory(
            group.handle, group.index, count, needed, timeout_of(group), signals=(0, 0)
        )
        return None if memory is None else cls(memory, sizes, flags, elsewhere)

    def before(self) -> None:
        if self.adds and self.step > 1:
            self._wait(SUMMED)

    def start(self, index: int) -> None:
        self.stamps[self.index, index] = self.step
        self._post(FULL)

    def finish(self) -> Iterator[Tensor]:
        if self.adds:
            yield from self._peer_buffers()
        else:
            yield from self._sum()

    def release(self) -> None:
        if self.adds:
            self._post(SUMMED)
        self.step += 1

    def _peer_buffers(self) -> Iterator[Tensor]:
        for index, buffer in enumerate(self.totals):
            self._wait(FULL)
            self._check(index)
            yield buffer
        torch.add(self.flags, self.peer_flags, out=self.summed_flags)

    def _sum(self) -> Iterator[Tensor]:
        for index, place in enumerate(self.places):
            self._wait(FULL)
            self._check(index)
            parts = [own[place.part] for own in place.own]
            total = torch.add(parts[0], parts[1], out=place.total[place.part])
            for part in parts[2:]:
                total.add_(part)
            self._post(SUMMED)
        for total in self.totals:
            self._wait(SUMMED)
            yield total

    def _check(self, index: int) -> None:
        for peer in self.peers:
            if (theirs := self.stamps[peer, index]) != self.step:
                raise RuntimeError(
                    f"member {peer} of the group brought bucket {index} of its backward number "
                    f"{theirs}, this rank that of its number {self.step}"
                )

    def _post(self, kind: int) -> None:
        for peer in self.peers:
            self.memory.post(peer, kind)

    def _wait(self, kind: int) -> None:
        for peer in self.peers:
            self.memory.wait(peer, kind)

    def close(self) -> None:
        self.memory.close()


def is_shared(group: Group, device: torch.device) -> bool:
    """Returns whether shared memory is tried: on CPUs, unless the group disables it."""
    return device.type == "cpu" and may_share(group)


def open_transport(
    sizes: Sequence[Size], flags: int, group: Group, device: torch.device, elsewhere: bool
) -> Transport:
    """Returns shared memory or the backend; collective. `elsewhere`: sums go to other tensors."""
    if is_shared(group, device):
        shared = SharedTransport.open(sizes, flags, group, elsewhere)
        if shared is not None:
            return shared
    return BackendTransport(sizes, flags, group, device)


def _add_flags(sizes: Sequence[Size], flags: int) -> list[Size]:
    *others, (numel, dtype) = sizes
    return [*others, (numel + flags, dtype)]


def _split_flags(whole: list[Tensor], flags: int) -> tuple[list[Tensor], Tensor]:
    *others, last = whole
    return [*others, last[:-flags]], last[-flags:]


def _starts(sizes: Sequence[Size]) -> tuple[list[int], int]:
    """Returns the byte offset of each buffer of a rank, and the offset of the next rank."""
    starts, end = [], 0
    for numel, dtype in sizes:
        starts.append(end)
        end += -(-numel * dtype.itemsize // LINE) * LINE
    return starts, end


def _view(data: Tensor, start: int, size: Size) -> Tensor:
    numel, dtype = size
    return data[start : start + numel * dtype.itemsize].view(dtype)


def _part(size: Size, count: int, index: int) -> slice:
    """Returns an equal slice, in whole cache lines, so that no two ranks write to one line."""
    numel, dtype = size
    line = LINE // dtype.itemsize
    lines = -(-numel // line)
    first, last = lines * index // count, lines * (index + 1) // count
    return slice(min(numel, first * line), min(numel, last * line))


class BufferSync:
    """Broadcasts one rank's buffers before a forward, through shared memory if possible."""

    def __init__(
        self, module: nn.Module, group: Group, device: torch.device, ignored: Set[str]
    ) -> None:
        self.group = group
        # Users may replace buffers, so that each access looks them up in their module.
        seen: set[int] = set()
        self.places = []
        for prefix, part in module.named_modules():
            for name, buffer in part._buffers.items():
                whole = f"{prefix}.{name}" if prefix else name
                if buffer is not None and id(buffer) not in seen and whole not in ignored:
                    seen.add(id(buffer))
                    self.places.append((part._buffers, name))
        self.memory: SharedMemory | None = None
        self.rounds = 0
        found = self.current()
        if found and device.type == "cpu" and may_share(group):
            assert group.handle is not None  # may_share: more than one rank
            self.memory = open_shared_memory(
                group.handle,
                group.index,
                group.size,
                packed_bytes(found),
                timeout_of(group),
            )
        if self.memory is not None:
            self.shapes = [(b.shape, b.dtype) for b in found]
            _, self.views = packed(found, self.memory.data)

    def current(self) -> list[Tensor]:
        return [buffers[name] for buffers, name in self.places]

    def from_first(self) -> None:
        buffers = self.current()
        if self.memory is None or self.shapes != [(b.shape, b.dtype) for b in buffers]:
            broadcast_all(buffers, 0, self.group)
            return
        size, index = self.group.size, self.group.index
        if index > 0:
            self.memory.wait(0)
            fill(buffers, self.views)
            self.memory.post(0)
            return
        if self.rounds:
            for peer in range(1, size):
                self.memory.wait(peer)
        self.rounds += 1
        torch._foreach_copy_(self.views, buffers)
        for peer in range(1, size):
            self.memory.post(peer)
