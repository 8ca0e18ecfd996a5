"""The group that a user names, and what it allows."""

from __future__ import annotations

from collections.abc import Iterator, Sequence, Set
from typing import NamedTuple, Protocol

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from parallel3d.comm import collectives
from parallel3d.comm.collectives import Work
from parallel3d.comm.process_groups import Group
from parallel3d.comm.shared_memory import SharedMemory, open_shared_memory
from parallel3d.parallel import groups

DEFAULT_TIMEOUT_S = 1800.0  # of torch.distributed


def group_of(given: dist.ProcessGroup | Group | None) -> Group:
    """The group of parallel3d's own, of PyTorch's, or for None PyTorch's default one.

    Raises TypeError for another thing, ValueError where torch.distributed is not initialised or
    this rank is not in the group.
    """
    if isinstance(given, Group):
        return given
    if given is not None and not isinstance(given, dist.ProcessGroup):
        raise TypeError(
            f"process_group must be a ProcessGroup, a group as groups.dp, or None; it is a "
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
    """Whether shared memory is tried: parallel3d's groups say whether they want it."""
    return group.size > 1 and (group.shared is not None or group.name == groups.EXTERNAL)


def timeout_of(group: Group) -> float:
    """Seconds after which a rank that does not come is given up."""
    if group.shared is not None:
        return group.shared.memory.timeout_s
    options = getattr(group.handle._get_backend(torch.device("cpu")), "options", None)
    timeout = getattr(options, "_timeout", None)
    return timeout.total_seconds() if timeout else DEFAULT_TIMEOUT_S


def sorted_out(
    device_ids: Sequence[int | torch.device] | dist.ProcessGroup | Group | None,
    process_group: dist.ProcessGroup | Group | None,
    device_mesh: DeviceMesh | None,
) -> tuple[dist.ProcessGroup | Group | None, Sequence[int | torch.device] | None]:
    """The group, which may stand in the place of the devices or be that of a mesh, and the devices.

    Raises RuntimeError, as PyTorch's class, for two of them and for a mesh of several dimensions;
    TypeError for something else in the second place.
    """
    if isinstance(device_ids, (Group, dist.ProcessGroup)):
        if process_group is not None:
            raise RuntimeError("process_group and a group as the second argument; give one of them")
        device_ids, process_group = None, device_ids
    elif device_ids is not None and not isinstance(device_ids, (list, tuple)):
        raise TypeError(
            "the second argument must be device_ids, a list of the module's own device, or a group "
            f"as groups.dp; it is a {type(device_ids).__name__}"
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
        process_group = device_mesh.get_group(mesh_dim=0)
    return process_group, device_ids


def own_device(
    device_ids: Sequence[int | torch.device] | None, device: torch.device, key: str = "device_ids"
) -> torch.device | None:
    """The device for inputs. Raises ValueError for another one than the module's."""
    if not device_ids:
        return None
    named = device_ids[0]
    wanted = torch.device(device.type, named) if isinstance(named, int) else torch.device(named)
    if len(device_ids) > 1 or wanted != device:
        raise ValueError(
            f"{key}={list(device_ids)} must name the one device of the module, {device}, or be None"
        )
    return device


# Many tensors in one message: what one rank holds, on all of them.


MESSAGE_BYTES = 64 << 20
ALIGNMENT = 16  # bytes: of the widest type


@torch.no_grad()
def broadcast_all(tensors: Sequence[Tensor], source: int, group: Group) -> None:
    """Gives every member the values of member `source`, in place; any types and strides."""
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
    """Bytes that hold all of them, each at an aligned place."""
    return sum(_aligned(tensor.nbytes) for tensor in tensors)


def packed(tensors: Sequence[Tensor], flat: Tensor | None = None) -> tuple[Tensor, list[Tensor]]:
    """A buffer of bytes (`flat`, or a new one) and a view of it for each tensor; not filled."""
    if flat is None:
        flat = torch.empty(packed_bytes(tensors), dtype=torch.uint8, device=tensors[0].device)
    views, start = [], 0
    for tensor in tensors:
        views.append(flat[start : start + tensor.nbytes].view(tensor.dtype).view(tensor.shape))
        start += _aligned(tensor.nbytes)
    return flat, views


def fill(targets: Sequence[Tensor], sources: Sequence[Tensor]) -> None:
    """Copies each source to its target, without a new version of it: a forward's graph that is
    not backpropagated yet may have saved it."""
    with torch.autograd._unsafe_preserve_version_counter(tuple(targets)):
        torch._foreach_copy_(list(targets), list(sources))


def _aligned(size: int) -> int:
    return -(-size // ALIGNMENT) * ALIGNMENT


# How buckets are added up: through memory that the ranks of a host share, or by the backend.
#
# Both hand out the buffers in which a rank's gradients are collected. A buffer is started when it
# is full; `finish` gives the sums, of all buffers in their order, when the backward has ended.
# Behind the last one travel a few numbers, the flags, which the reducer uses.


LINE = 64  # bytes of a cache line
# A bucket costs two semaphores there; small ones are added up while slower ranks still compute.
SHARED_CAP_MIB = 1.0

Size = tuple[int, torch.dtype]  # elements of a buffer, and their type


class Transport(Protocol):
    """The sum of several buffers over a group; every rank starts them in the same order.

    Attributes:
        buffers: this rank's, to be filled.
        flags: numbers to be written before the last start, and summed.
        summed_flags: after `finish`.
        fault: what went wrong here, a sentence.
        adds: `finish` gives what is to be added to this rank's buffers, not the sums.
    """

    adds: bool
    buffers: list[Tensor]
    flags: Tensor
    summed_flags: Tensor
    fault: str | None

    def before(self) -> None:
        """Returns when this rank's buffers may be written."""

    def start(self, index: int) -> None:
        """This rank's buffer is full."""

    def finish(self) -> Iterator[Tensor]:
        """The sums, in order; all buffers have been started."""

    def release(self) -> None:
        """What `finish` gave is not read any more."""

    def close(self) -> None:
        """Lets go of what is shared."""


class BackendTransport:
    """By the group's backend, beside the backward.

    Attributes:
        handles: groups of the same ranks that take the buckets in turn, if there are several; each
            has connections and threads of its own (Li et al. 2020, §5.4).
    """

    adds, fault = False, None

    def __init__(
        self, sizes: Sequence[Size], flags: int, group: Group, device: torch.device
    ) -> None:
        self.group = group
        self.whole = [
            torch.zeros(n, dtype=dtype, device=device) for n, dtype in _with(sizes, flags)
        ]
        self.buffers, self.flags = _apart(self.whole, flags)
        self.summed_flags = self.flags
        self.works: list[Work] = []
        self.handles: list[dist.ProcessGroup] = []

    def before(self) -> None:
        """At any time between two backwards."""

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
        """The sums are in this rank's own buffers."""

    def close(self) -> None:
        self.works = []


class _Place(NamedTuple):
    """Where one buffer lies: each rank's, their sum, and the part of it that is added up here."""

    own: list[Tensor]  # by rank
    total: Tensor
    part: slice


class SharedTransport:
    """Through memory of one host, each sum added up once: every rank adds an equal part of it.

    A rank's buffers lie in the shared memory. Starting one tells the peers that it is full. At the
    end of the backward every rank adds its part of each bucket, over all ranks, into a total that
    they share, tells the peers, and reads the parts of the others: as many bytes as a ring moves,
    with no system call but for a rank that must wait.

    Two signals keep the order, without a third. A buffer is filled again only after its total was
    read here, before which every peer signalled that it had read the buffer. A total is written
    again only when all peers have started that buffer again, before which they read the total.

    Two ranks that want the sums elsewhere (`adds`) need no total: each reads all of the other's
    buffer where it is, which is less to read and write, and waits once. Their second signal says
    that this was read, `release`: not before gradients were made of it that this rank did not have.
    """

    fault = None

    def __init__(
        self, memory: SharedMemory, sizes: Sequence[Size], flags: int, elsewhere: bool
    ) -> None:
        self.adds = elsewhere and memory.size == 2
        self.memory, self.size, self.index = memory, memory.size, memory.index
        self.peers = [rank for rank in range(self.size) if rank != self.index]
        sizes = _with(sizes, flags)
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
        self.buffers, self.flags = _apart([p.own[self.index] for p in self.places], flags)
        self.totals, self.summed_flags = _apart([p.total for p in self.places], flags)
        if self.adds:
            other = [place.own[1 - self.index] for place in self.places]
            self.totals, self.peer_flags = _apart(other, flags)
            self.summed_flags = torch.empty_like(self.flags)
        self.step = 1

    @classmethod
    def open(
        cls, sizes: Sequence[Size], flags: int, group: Group, elsewhere: bool
    ) -> SharedTransport | None:
        """None where the ranks cannot share memory; collective."""
        _, end = _starts(_with(sizes, flags))
        count = group.size
        needed = end * (count + 1) + 8 * count * len(sizes)
        signals = [0] * (2 * count * count)  # full, and added: from each rank to each other
        memory = open_shared_memory(
            group.handle, group.index, count, signals, needed, timeout_of(group)
        )
        return None if memory is None else cls(memory, sizes, flags, elsewhere)

    def before(self) -> None:
        """Returns when this rank's buffers may be written."""
        if self.adds and self.step > 1:
            self._wait(1)

    def start(self, index: int) -> None:
        self.stamps[self.index, index] = self.step
        self._tell(0)

    def finish(self) -> Iterator[Tensor]:
        if self.adds:
            yield from self._read()
        else:
            yield from self._add_up()

    def release(self) -> None:
        if self.adds:
            self._tell(1)
        self.step += 1

    def _read(self) -> Iterator[Tensor]:
        for index, buffer in enumerate(self.totals):
            self._wait(0)
            self._check(index)
            yield buffer
        torch.add(self.flags, self.peer_flags, out=self.summed_flags)

    def _add_up(self) -> Iterator[Tensor]:
        for index, place in enumerate(self.places):
            self._wait(0)
            self._check(index)
            parts = [own[place.part] for own in place.own]
            total = torch.add(parts[0], parts[1], out=place.total[place.part])
            for part in parts[2:]:
                total.add_(part)
            self._tell(1)
        for total in self.totals:
            self._wait(1)
            yield total

    def _check(self, index: int) -> None:
        """Raises RuntimeError where a rank is at another backward than this one."""
        for peer in self.peers:
            if (theirs := self.stamps[peer, index]) != self.step:
                raise RuntimeError(
                    f"member {peer} of the group brought bucket {index} of its backward number "
                    f"{theirs}, this rank that of its number {self.step}"
                )

    def _tell(self, what: int) -> None:
        for peer in self.peers:
            self.memory.post((what * self.size + self.index) * self.size + peer)

    def _wait(self, what: int) -> None:
        for peer in self.peers:
            self.memory.wait((what * self.size + peer) * self.size + self.index, peer)

    def close(self) -> None:
        self.memory.close()


def is_shared(group: Group, device: torch.device) -> bool:
    """Whether the ranks' memory is tried: on CPUs, unless the group was made without."""
    return device.type == "cpu" and may_share(group)


def open_transport(
    sizes: Sequence[Size], flags: int, group: Group, device: torch.device, elsewhere: bool
) -> Transport:
    """Shared memory for CPU ranks of one host, unless the group was made without; collective.

    `elsewhere`: the sums are written to other tensors than the buffers.
    """
    if is_shared(group, device):
        shared = SharedTransport.open(sizes, flags, group, elsewhere)
        if shared is not None:
            return shared
    return BackendTransport(sizes, flags, group, device)


def _with(sizes: Sequence[Size], flags: int) -> list[Size]:
    """The last one longer by the flags."""
    *others, (numel, dtype) = sizes
    return [*others, (numel + flags, dtype)]


def _apart(whole: list[Tensor], flags: int) -> tuple[list[Tensor], Tensor]:
    """The buffers without the flags, and the flags."""
    *others, last = whole
    return [*others, last[:-flags]], last[-flags:]


def _starts(sizes: Sequence[Size]) -> tuple[list[int], int]:
    """Byte at which each buffer of a rank begins, and where the next rank's begin."""
    starts, end = [], 0
    for numel, dtype in sizes:
        starts.append(end)
        end += -(-numel * dtype.itemsize // LINE) * LINE
    return starts, end


def _view(data: Tensor, start: int, size: Size) -> Tensor:
    numel, dtype = size
    return data[start : start + numel * dtype.itemsize].view(dtype)


def _part(size: Size, count: int, index: int) -> slice:
    """An equal part, in whole cache lines, so that no two ranks write to one line."""
    numel, dtype = size
    line = LINE // dtype.itemsize
    lines = -(-numel // line)
    first, last = lines * index // count, lines * (index + 1) // count
    return slice(min(numel, first * line), min(numel, last * line))


# Buffers that are the same on all ranks, as they were on one, before every forward.


class BufferSync:
    """Hands one rank's buffers to all; through shared memory where that is to be had.

    There the first rank writes them when all have read the ones before, and tells each.
    """

    def __init__(
        self, module: nn.Module, group: Group, device: torch.device, ignored: Set[str]
    ) -> None:
        self.group = group
        # Buffers may be replaced, as BatchNorm's are not but a user's may be: looked up each time.
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
            signals = [0] * (2 * group.size)  # written for, and read by, each rank
            self.memory = open_shared_memory(
                group.handle,
                group.index,
                group.size,
                signals,
                packed_bytes(found),
                timeout_of(group),
            )
        if self.memory is not None:
            self.shapes = [(b.shape, b.dtype) for b in found]
            _, self.views = packed(found, self.memory.data)

    def current(self) -> list[Tensor]:
        """The buffers as they are now, each once."""
        return [buffers[name] for buffers, name in self.places]

    def from_first(self) -> None:
        """All ranks take the first rank's; collective."""
        buffers = self.current()
        if self.memory is None or self.shapes != [(b.shape, b.dtype) for b in buffers]:
            broadcast_all(buffers, 0, self.group)
            return
        size, index = self.group.size, self.group.index
        if index > 0:
            self.memory.wait(index, 0)
            fill(buffers, self.views)
            self.memory.post(size + index)
            return
        if self.rounds:
            for peer in range(1, size):
                self.memory.wait(size + peer, peer)
        self.rounds += 1
        torch._foreach_copy_(self.views, buffers)
        for peer in range(1, size):
            self.memory.post(peer)
