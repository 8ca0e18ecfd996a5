"""A process-group backend that behaves as NCCL does, over gloo.

What NCCL does and gloo does not:

- A collective runs on a stream of its group's own, behind what is on the current stream when it is
  called; `wait()` orders the current stream behind it. Until then its results are poison here.
- It takes tensors of its one device alone, contiguous ones; a gather or scatter may be in place only
  at the rank's own part.
- All members call the same operations in the same order, by position and not by tag, and a group is
  made and destroyed by all of its members in one order. Here every operation carries what it is, and
  members that differ are told so, both named.

Where tensors have no values (`data="meta"`) there is nobody to talk to: one process is one rank of
any world, every collective and message is done at its `wait()`, and nothing is compared.
"""

from __future__ import annotations

import socket
import zlib
from collections.abc import Callable, Sequence
from datetime import timedelta
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from parallel3d.pretend.device import TYPE, Stream, this_machine
from parallel3d.pretend.machine import Kernel, extent
from parallel3d.pretend.tensor import PretendedTensor, poison

BACKEND = "pretended_nccl"
HEADER = 6  # whole numbers that say what an operation is


class Mismatch(RuntimeError):
    """The members of a group do not call the same operations in the same order."""


class Options:
    """As `ProcessGroupNCCL.Options`."""

    def __init__(self) -> None:
        self._timeout = timedelta(minutes=10)
        self.is_high_priority_stream = False
        self.config = SimpleNamespace(min_ctas=-1, max_ctas=-1, cga_cluster_size=-1)


def register() -> None:
    """Makes the backend known to torch.distributed, and batches of messages go out as one."""
    dist.Backend.register_backend(BACKEND, _create, extended_api=True, devices=[TYPE])
    dist.Backend.default_device_backend_map[TYPE] = BACKEND
    plain = dist.batch_isend_irecv

    def batched(operations: list[dist.P2POp]) -> list[Any]:
        works = plain(operations)
        is_ours = bool(operations) and isinstance(operations[0].tensor, PretendedTensor)
        return [Together(works)] if is_ours else works  # NCCL hands out one handle for all

    dist.batch_isend_irecv = dist.distributed_c10d.batch_isend_irecv = batched


def _create(asked: Any, options: Options | None) -> PretendedNCCL:
    group = PretendedNCCL(
        asked.store, asked.group_rank, asked.group_size, options or Options(), asked.timeout
    )
    group.meet()
    return group


class Together(dist.Work):
    """The handle of several messages."""

    def __init__(self, works: Sequence[Any]) -> None:
        super().__init__()
        self.works = works

    def wait(self, timeout: Any = None) -> bool:
        for work in self.works:
            work.wait()
        return True

    def is_completed(self) -> bool:
        return all(work.is_completed() for work in self.works)


class Started(dist.Work):
    """A collective under way.

    Args:
        finish: waits for gloo and returns what belongs into `outputs`.
        held: tensors that live until somebody has waited.
    """

    def __init__(
        self,
        stream: Stream,
        finish: Callable[[], Sequence[Tensor]],
        outputs: Sequence[PretendedTensor],
        held: Any,
    ) -> None:
        super().__init__()
        self.finish, self.outputs, self.held = finish, outputs, held
        self.done = stream.record_event()
        self.ended = False
        this_machine().once_known(stream.number, self.end)

    def end(self) -> None:
        """The results are there. Collective in kind: gloo's own wait."""
        if self.ended:
            return
        self.ended = True
        for output, value in zip(self.outputs, self.finish(), strict=True):
            output.data_.copy_(value.view(output.shape))

    def wait(self, timeout: Any = None) -> bool:
        self.end()
        self.done.wait()
        self.held = None
        return True

    synchronize = wait

    def is_completed(self) -> bool:
        return self.ended


class PretendedNCCL(dist.ProcessGroup):
    """One communicator. See the module's docstring."""

    supports_splitting = True
    supports_coalescing = False

    def __init__(
        self, store: Any, rank: int, size: int, options: Options, timeout: timedelta,
        device: int | None = None, world: PretendedNCCL | None = None,
    ) -> None:  # fmt: skip
        super().__init__(rank, size)
        self.store, self.options, self.timeout = store, options, timeout
        self._rank, self._size, self.world = rank, size, world or self
        self.closed: list[str] = []  # groups destroyed, in order; of the world
        self.index = this_machine().device if device is None else device
        self.bound_device_id = torch.device(TYPE, self.index)
        self.stream = Stream(self.index)
        self.name, self.description, self.calls = "", "", 0
        self.messages: dict[tuple[int, int], int] = {}  # (from, to) → so far
        self.alone = this_machine().data == "meta"
        if not self.alone:
            parts = [dist.PrefixStore(name, store) for name in ("data", "headers")]
            self.gloo, self.headers = (dist.ProcessGroupGloo(p, rank, size, timeout) for p in parts)

    # --- what torch.distributed asks of a group -----------------------------------------------

    @property
    def group_name(self) -> str:
        return self.name

    @property
    def group_desc(self) -> str:
        return self.description

    def _set_group_name(self, name: str) -> None:
        self.name = name

    def _set_group_desc(self, description: str) -> None:
        self.description = description

    def getGroupName(self) -> str:
        return self.name

    def getBackendName(self) -> str:
        return BACKEND

    def rank(self) -> int:
        return self._rank

    def size(self) -> int:
        return self._size

    def _get_backend(self, device: torch.device) -> PretendedNCCL:
        return self

    @property
    def _device_types(self) -> list[torch.device]:
        return [torch.device(TYPE)]

    def _get_backend_name(self) -> str:
        return BACKEND

    def _has_hooks(self) -> bool:
        return False

    def eager_connect_single_device(self, device: torch.device) -> None:
        """Connected when made."""

    def _set_sequence_number_for_group(self) -> None:
        """Counted from the start."""

    def set_timeout(self, timeout: timedelta) -> None:
        self.timeout = timeout

    def meet(self) -> None:
        """Members tell each other their devices. Raises RuntimeError where two share one."""
        if self.alone:
            return
        host = zlib.crc32(socket.gethostname().encode())
        mine = torch.tensor([[host, self.index]])
        for at, other in enumerate(self._gathered(mine)):
            if at != self._rank and torch.equal(other, mine):
                raise RuntimeError(
                    f"Duplicate GPU detected: ranks {at} and {self._rank} of a group are both on "
                    f"device {self.index} of one host"
                )

    def _gathered(self, mine: Tensor) -> list[Tensor]:
        """Of every member, in rank order, waiting."""
        everyone = [torch.empty_like(mine) for _ in range(self._size)]
        self.headers.allgather([everyone], [mine]).wait()
        return everyone

    def split_group(
        self, ranks: Sequence[int], timeout: timedelta | None = None, opts: Options | None = None,
        group_name: str | None = None, group_desc: str | None = None, **more: Any,
    ) -> PretendedNCCL | None:  # fmt: skip
        """A group of some members; a collective of all of this one, as ncclCommSplit is."""
        self._agree(self._header("split", torch.empty(0), zlib.crc32(str(group_desc).encode())))
        if self._rank not in ranks:
            return None
        prefix = dist.PrefixStore(f"split/{group_name}", self.store)
        timeout = timeout or self.timeout
        at = list(ranks).index(self._rank)
        made = PretendedNCCL(
            prefix, at, len(ranks), opts or Options(), timeout, self.index, self.world
        )
        made.name, made.description = str(group_name), str(group_desc)
        return made

    def shutdown(self) -> None:
        """All members destroy it, at the same place among those that they share with others."""
        self.world.closed.append(self.description or "world")
        if self.world is self and self._size > 1 and not self.alone:
            self._compare_ends()

    abort = shutdown

    def _compare_ends(self) -> None:
        order = ",".join(self.closed).encode()
        mine = torch.tensor([[zlib.crc32(order), len(self.closed)]])
        for at, other in enumerate(self._gathered(mine)):
            if other[0, 1] == mine[0, 1] and not torch.equal(other, mine):
                raise Mismatch(
                    f"rank {self._rank} destroyed its groups in the order {', '.join(self.closed)} "
                    f"and rank {at} in another: NCCL may wait for ever"
                )

    # --- one order of operations ---------------------------------------------------------------

    def _header(self, name: str, tensor: Tensor, extra: int = 0) -> Tensor:
        self.calls += 1
        kind = zlib.crc32(f"{name} {tensor.dtype}".encode())
        says = [self.calls, kind, tensor.numel(), extra, NAMES.index(name), DTYPES[tensor.dtype]]
        return torch.tensor([says])

    def _said(self, header: Tensor) -> str:
        number, _, numel, extra, name, dtype = header.flatten().tolist()
        what = next(str(d) for d, i in DTYPES.items() if i == dtype).removeprefix("torch.")
        return f"{NAMES[name]} number {number} ({what}[{numel}], {extra})"

    def _agree(self, header: Tensor) -> None:
        if not self.alone:
            self._compare(header, self._gathered(header))

    def _compare(self, mine: Tensor, everyone: Sequence[Tensor]) -> None:
        for at, other in enumerate(everyone):
            if not torch.equal(other, mine):
                group = self.description or "world"
                raise Mismatch(
                    f"member {self._rank} of {group} calls {self._said(mine)} where member {at} "
                    f"calls {self._said(other)}"
                )

    # --- collectives ---------------------------------------------------------------------------

    def _check(self, name: str, tensors: Sequence[Tensor]) -> None:
        for t in tensors:
            if not isinstance(t, PretendedTensor):
                raise RuntimeError(
                    f"No backend type associated with device type {t.device.type}: {name} of a "
                    f"group on {TYPE}:{self.index}"
                )
            if t.index != self.index:
                raise RuntimeError(
                    f"{name}: a tensor is on {t.device}, its group on {TYPE}:{self.index}"
                )
            if not t.is_contiguous():
                raise ValueError(f"{name}: Tensors must be contiguous")

    def _start(
        self,
        name: str,
        inputs: Sequence[Tensor],
        outputs: Sequence[Tensor],
        run: Callable[[list[Tensor]], Callable[[], Sequence[Tensor]]],
        extra: int = 0,
    ) -> Started:
        """Starts a collective: `run` takes copies of the inputs and returns what ends it."""
        self._check(name, [*inputs, *outputs])
        if self.alone:
            return self._alone(name, inputs, outputs)
        mine = self._header(name, (inputs or outputs)[0], extra)
        copies = [t.data_.detach().clone() for t in inputs]
        self._on_stream(name, inputs, outputs)
        everyone = [torch.empty_like(mine) for _ in range(self._size)]
        checking = self.headers.allgather([everyone], [mine])
        finish = run(copies)

        def end() -> Sequence[Tensor]:
            checking.wait()
            self._compare(mine, everyone)
            return finish()

        return Started(self.stream, end, outputs, (inputs, outputs))

    def _alone(self, name: str, inputs: Sequence[Tensor], outputs: Sequence[Tensor]) -> Started:
        """A collective or message without others, whose values nobody has."""
        self._on_stream(name, inputs, outputs)
        return Started(self.stream, list, [], (inputs, outputs))

    def _on_stream(
        self, name: str, inputs: Sequence[PretendedTensor], outputs: Sequence[PretendedTensor]
    ) -> None:
        """The kernel behind the current stream, and poison where its results will be."""
        machine = this_machine()
        current = Stream(self.index, number=machine.stream_of(self.index))
        self.stream.wait_stream(current)
        reads, writes = (
            [machine.use(t.data_, t.index) for t in some] for some in (inputs, outputs)
        )
        for observer in machine.observers:
            observer.collective(name, self, (inputs or outputs)[0].data_)
        machine.launch(Kernel(name, self.stream.number, reads, writes))
        for t in outputs:
            poison(t.data_)

    def allreduce(self, tensors: list[Tensor], opts: Any = None) -> Started:
        return self._reduce("allreduce", tensors, tensors, opts)

    def _reduce(self, name: str, given: list, out: list, opts: Any) -> Started:
        op = dist.ReduceOp.SUM if opts is None else opts.reduceOp
        mean = op == dist.ReduceOp.AVG

        def run(copies: list[Tensor]) -> Callable[[], Sequence[Tensor]]:
            (value,) = copies
            wide = value.float() if value.dtype in (torch.bfloat16, torch.float16) else value
            settings = dist.AllreduceOptions()
            settings.reduceOp = dist.ReduceOp.SUM if mean else op
            work = self.gloo.allreduce([wide], settings)

            def end() -> Sequence[Tensor]:
                work.wait()
                total = wide / self._size if mean else wide
                return [total.to(value.dtype)]

            return end

        return self._start(name, given, out, run, next(i for i, o in enumerate(SUMS) if op == o))

    def broadcast(self, tensors: list[Tensor], opts: Any) -> Started:
        def run(copies: list[Tensor]) -> Callable[[], Sequence[Tensor]]:
            data = copies[0].view(-1).view(torch.uint8)
            settings = dist.BroadcastOptions()
            settings.rootRank = opts.rootRank
            work = self.gloo.broadcast([data], settings)
            return lambda: (work.wait(), copies)[1]

        return self._start("broadcast", tensors, tensors, run, opts.rootRank)

    def _gather_copies(self, copies: list[Tensor]) -> Callable[[], list[Tensor]]:
        data = copies[0].contiguous().view(-1).view(torch.uint8)
        everyone = [torch.empty_like(data) for _ in range(self._size)]
        work = self.gloo.allgather([everyone], [data])

        def end() -> list[Tensor]:
            work.wait()
            return [t.view(copies[0].dtype) for t in everyone]

        return end

    def _allgather_base(self, output: Tensor, given: Tensor, opts: Any = None) -> Started:
        self._check_in_place("all_gather", output, given)

        def run(copies: list[Tensor]) -> Callable[[], Sequence[Tensor]]:
            gathered = self._gather_copies(copies)
            return lambda: [torch.cat(gathered())]

        return self._start("all_gather", [given], [output], run)

    def allgather(self, outputs: list[list[Tensor]], given: list[Tensor], opts: Any = None) -> Any:
        return self._start("all_gather", given, outputs[0], self._gather_copies)

    def _reduce_scatter_base(self, output: Tensor, given: Tensor, opts: Any = None) -> Started:
        self._check_in_place("reduce_scatter", given, output)

        def run(copies: list[Tensor]) -> Callable[[], Sequence[Tensor]]:
            gathered = self._gather_copies(copies)
            wide = torch.promote_types(given.dtype, torch.float32)

            def end() -> Sequence[Tensor]:
                parts = [t.chunk(self._size)[self._rank].to(wide) for t in gathered()]
                return [torch.stack(parts).sum(0).to(given.dtype)]

            return end

        op = dist.ReduceOp.SUM if opts is None else opts.reduceOp
        if op != dist.ReduceOp.SUM:
            raise NotImplementedError(f"reduce_scatter by {op} on the {TYPE} device")
        return self._start("reduce_scatter", [given], [output], run)

    all_gather_single, reduce_scatter_single = _allgather_base, _reduce_scatter_base  # since 2.13

    def _check_in_place(self, name: str, whole: Tensor, part: Tensor) -> None:
        """NCCL takes a part inside the whole only where it belongs."""
        if not all(isinstance(t, PretendedTensor) for t in (whole, part)):
            return  # `_check` refuses it
        if whole.untyped_storage()._cdata != part.untyped_storage()._cdata:
            return
        (first, end), (at, stop) = extent(whole.data_), extent(part.data_)
        if at < end and first < stop and at != first + self._rank * (stop - at):
            raise RuntimeError(f"{name} in place needs the part to be number {self._rank}")

    def alltoall_base(
        self, output: Tensor, given: Tensor, output_sizes: list, input_sizes: list, opts: Any = None
    ) -> Started:
        if output_sizes or input_sizes:
            raise NotImplementedError(f"uneven all_to_all on the {TYPE} device")

        def run(copies: list[Tensor]) -> Callable[[], Sequence[Tensor]]:
            gathered = self._gather_copies(copies)
            return lambda: [torch.cat([t.chunk(self._size)[self._rank] for t in gathered()])]

        return self._start("all_to_all", [given], [output], run)

    def barrier(self, opts: Any = None) -> Together:
        """The host waits, as it does for NCCL's."""
        token = torch.zeros(1, device=torch.device(TYPE, self.index))
        started = self._start("barrier", [token], [token], lambda copies: lambda: copies)
        started.wait()
        this_machine().wait_for_stream(self.stream.number, "a barrier")
        return Together([started])

    # --- messages ------------------------------------------------------------------------------

    def _message(self, source: int, target: int, tensor: Tensor, tag: int) -> tuple[Tensor, int]:
        number = self.messages.get((source, target), 0)
        self.messages[source, target] = number + 1
        says = [number, tag, tensor.numel(), 0, NAMES.index("message"), DTYPES[tensor.dtype]]
        return torch.tensor([says]), number

    def send(self, tensors: list[Tensor], target: int, tag: int) -> Started:
        (tensor,) = tensors
        self._check("send", tensors)
        if self.alone:
            return self._alone("send", tensors, [])
        header, number = self._message(self._rank, target, tensor, tag)
        copy = tensor.data_.detach().clone()
        self._on_stream("send", tensors, [])
        works = [self.headers.send([header], target, number)]
        works.append(self.gloo.send([copy.view(-1).view(torch.uint8)], target, number))
        return Started(self.stream, lambda: [w.wait() for w in works][:0], [], (tensors, copy))

    def recv(self, tensors: list[Tensor], source: int, tag: int) -> Started:
        (tensor,) = tensors
        self._check("receive", tensors)
        if self.alone:
            return self._alone("receive", [], tensors)
        header, number = self._message(source, self._rank, tensor, tag)
        self._on_stream("receive", [], tensors)
        theirs = torch.empty_like(header)
        heading = self.headers.recv([theirs], source, number)
        data = torch.empty(tensor.nbytes, dtype=torch.uint8)
        coming = self.gloo.recv([data], source, number)

        def end() -> Sequence[Tensor]:
            heading.wait()
            if not torch.equal(theirs, header):
                raise Mismatch(
                    f"member {self._rank} of {self.description} receives {_sizes(header)} as "
                    f"message {number} of member {source}, which sent {_sizes(theirs)}"
                )
            coming.wait()
            return [data.view(tensor.dtype)]

        return Started(self.stream, end, tensors, tensors)


NAMES = ("split", "allreduce", "broadcast", "all_gather", "reduce_scatter", "all_to_all")
NAMES += ("barrier", "message")
SUMS = [getattr(dist.ReduceOp, name) for name in ("SUM", "AVG", "MIN", "MAX", "PRODUCT")]
DTYPES = {
    dtype: i
    for i, dtype in enumerate(
        (torch.float32, torch.float64, torch.bfloat16, torch.float16, torch.int64, torch.int32)
        + (torch.int16, torch.uint8, torch.int8, torch.bool)
    )
}


def _sizes(header: Tensor) -> str:
    _, tag, numel, _, _, dtype = header.flatten().tolist()
    what = next(str(d) for d, i in DTYPES.items() if i == dtype).removeprefix("torch.")
    return f"{what}[{numel}] with tag {tag}"
