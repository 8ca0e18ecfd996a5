"""A process-group backend that behaves as NCCL does, over gloo.

What NCCL does and gloo does not:

- A collective runs on a stream of its group's own, behind what is on the current stream when it is
  called; `wait()` orders the current stream behind it. Until then its results are poison here.
- It takes tensors of its one device alone, contiguous ones; a gather or scatter may be in place
  only at the rank's own part.
- All members call the same operations in the same order, by position and not by tag, and a group is
  made and destroyed by all of its members in one order (`wire.py` tells members that differ).

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
from parallel3d.pretend.machine import extent
from parallel3d.pretend.records import Kernel
from parallel3d.pretend.tensor import PretendedTensor, poison
from parallel3d.pretend.wire import Mismatch, Run, Wire
from parallel3d.pretend.works import Started, Together

BACKEND = "pretended_nccl"
SUMS = [getattr(dist.ReduceOp, name) for name in ("SUM", "AVG", "MIN", "MAX", "PRODUCT")]
# The same over the first dimension.
OPERATIONS: tuple[Callable[[Tensor], Tensor], ...] = (
    lambda t: t.sum(0),
    lambda t: t.mean(0),
    lambda t: t.amin(0),
    lambda t: t.amax(0),
    lambda t: t.prod(0),
)


def _number(op: Any) -> int:
    return next(i for i, known in enumerate(SUMS) if op == known)


class Options:
    """As `ProcessGroupNCCL.Options`."""

    def __init__(self) -> None:
        self._timeout = timedelta(minutes=10)
        self.is_high_priority_stream = False
        self.config = SimpleNamespace(min_ctas=-1, max_ctas=-1, cga_cluster_size=-1)


class PretendedNCCL(dist.ProcessGroup):
    """One communicator. See the module's docstring."""

    supports_splitting = True
    supports_coalescing = False

    def __init__(
        self,
        store: Any,
        rank: int,
        size: int,
        options: Options | None,
        timeout: timedelta,
        device: int | None = None,
        world: PretendedNCCL | None = None,
    ) -> None:
        super().__init__(rank, size)
        self.store, self.options, self.timeout = store, options or Options(), timeout
        self._rank, self._size, self.world = rank, size, world or self
        self.closed: list[str] = []  # groups destroyed, in order; of the world
        self.index = this_machine().device if device is None else device
        self.bound_device_id = torch.device(TYPE, self.index)
        self.stream = Stream(self.index)
        self.name, self.description = "", ""
        is_alone = this_machine().data == "meta"
        self.wire = None if is_alone else Wire(store, rank, size, timeout)

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
        if self.wire is not None:
            self.wire.name = description

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
        if self.wire is None:
            return
        host = zlib.crc32(socket.gethostname().encode())
        mine = torch.tensor([[host, self.index]])
        for at, other in enumerate(self.wire.gathered(mine)):
            if at != self._rank and torch.equal(other, mine):
                raise RuntimeError(
                    f"Duplicate GPU detected: ranks {at} and {self._rank} of a group are both on "
                    f"device {self.index} of one host"
                )

    def split_group(
        self,
        ranks: Sequence[int],
        timeout: timedelta | None = None,
        opts: Options | None = None,
        group_name: str | None = None,
        group_desc: str | None = None,
        **more: Any,
    ) -> PretendedNCCL | None:
        """A group of some members; a collective of all of this one, as ncclCommSplit is."""
        if self.wire is not None:
            what = zlib.crc32(str(group_desc).encode())
            self.wire.start("split", torch.empty(0), what, lambda copies: copies, []).result()
        if self._rank not in ranks:
            return None
        prefix = dist.PrefixStore(f"split/{group_name}", self.store)
        at, timeout = list(ranks).index(self._rank), timeout or self.timeout
        made = PretendedNCCL(prefix, at, len(ranks), opts, timeout, self.index, self.world)
        made._set_group_name(str(group_name))
        made._set_group_desc(str(group_desc))
        return made

    def shutdown(self) -> None:
        """All members destroy it, at the same place among those that they share with others."""
        self.world.closed.append(self.description or "world")
        if self.wire is None:
            return
        if self.world is self and self._size > 1:
            self._compare_ends()
        self.wire.close()

    abort = shutdown

    def _compare_ends(self) -> None:
        order = ",".join(self.closed).encode()
        mine = torch.tensor([[zlib.crc32(order), len(self.closed)]])
        for at, other in enumerate(self.wire.gathered(mine)):
            if other[0, 1] == mine[0, 1] and not torch.equal(other, mine):
                raise Mismatch(
                    f"rank {self._rank} destroyed its groups in the order {', '.join(self.closed)} "
                    f"and rank {at} in another: NCCL may wait for ever"
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
        run: Run,
        extra: int = 0,
    ) -> Started:
        """Starts a collective, behind the current stream."""
        self._check(name, [*inputs, *outputs])
        copies = [t.data_.detach().clone() for t in inputs]
        self._on_stream(name, inputs, outputs)
        done = None
        if self.wire is not None:
            done = self.wire.start(name, copies[0], extra, run, copies)
        return Started(self.stream, done, outputs, (inputs, outputs))

    def _on_stream(
        self, name: str, inputs: Sequence[PretendedTensor], outputs: Sequence[PretendedTensor]
    ) -> None:
        """The kernel behind the current stream, and poison where its results will be."""
        machine = this_machine()
        current = Stream(self.index, number=machine.stream_of(self.index))
        self.stream.wait_stream(current)
        uses = [[machine.use(t.data_, t.index) for t in some] for some in (inputs, outputs)]
        for observer in machine.observers:
            observer.collective(name, self, (inputs or outputs)[0].data_)
        machine.launch(Kernel(name, self.stream.number, *uses))
        for t in outputs:
            poison(t.data_)

    def allreduce(self, tensors: list[Tensor], opts: Any = None) -> Started:
        op = dist.ReduceOp.SUM if opts is None else opts.reduceOp

        def run(copies: list[Tensor]) -> Sequence[Tensor]:
            return [self._sum(copies[0], op)]

        return self._start("allreduce", tensors, tensors, run, _number(op))

    def broadcast(self, tensors: list[Tensor], opts: Any) -> Started:
        def run(copies: list[Tensor]) -> Sequence[Tensor]:
            return [self._broadcast(copies[0], opts.rootRank)]

        return self._start("broadcast", tensors, tensors, run, opts.rootRank)

    def _sum(self, value: Tensor, op: Any) -> Tensor:
        """Over the members, in fp32 or better, as NCCL adds; on the wire's thread."""
        mean = op == dist.ReduceOp.AVG
        wide = value.float() if value.dtype in (torch.bfloat16, torch.float16) else value
        settings = dist.AllreduceOptions()
        settings.reduceOp = dist.ReduceOp.SUM if mean else op
        self.wire.gloo.allreduce([wide], settings).wait()
        return (wide / self._size if mean else wide).to(value.dtype)

    def _broadcast(self, value: Tensor, root: int) -> Tensor:
        settings = dist.BroadcastOptions()
        settings.rootRank = root
        self.wire.gloo.broadcast([value.view(-1).view(torch.uint8)], settings).wait()
        return value

    def all_gather_single(self, output: Tensor, given: Tensor, opts: Any = None) -> Started:
        self._check_in_place("all_gather", output, given)

        def run(copies: list[Tensor]) -> Sequence[Tensor]:
            return [torch.cat(self.wire.gather_data(copies))]

        return self._start("all_gather", [given], [output], run)

    def allgather(self, outputs: list[list[Tensor]], given: list[Tensor], opts: Any = None) -> Any:
        gather: Callable = lambda copies: self.wire.gather_data(copies)  # noqa: E731
        return self._start("all_gather", given, outputs[0], gather)

    def gather(self, outputs: list[list[Tensor]], given: list[Tensor], opts: Any) -> Started:
        mine = outputs[0] if outputs else []

        def run(copies: list[Tensor]) -> Sequence[Tensor]:
            everyone = self.wire.gather_data(copies)
            return everyone if mine else []

        return self._start("gather", given, mine, run, opts.rootRank)

    def scatter(self, outputs: list[Tensor], given: list[list[Tensor]], opts: Any) -> Started:
        """As parts of one broadcast; the others give a tensor of equal size."""
        parts = given[0] if given else [torch.empty_like(outputs[0]) for _ in range(self._size)]

        def run(copies: list[Tensor]) -> Sequence[Tensor]:
            flat = torch.cat([copy.view(-1) for copy in copies])
            return [self._broadcast(flat, opts.rootRank).chunk(self._size)[self._rank]]

        return self._start("scatter", parts, outputs, run, opts.rootRank)

    def reduce(self, tensors: list[Tensor], opts: Any) -> Started:
        """The sum on the root; the others keep what they gave."""
        is_root = opts.rootRank == self._rank

        def run(copies: list[Tensor]) -> Sequence[Tensor]:
            given = copies[0].clone()
            total = self._sum(copies[0], opts.reduceOp)
            return [total if is_root else given]

        return self._start("reduce", tensors, tensors, run, opts.rootRank)

    def reduce_scatter_single(self, output: Tensor, given: Tensor, opts: Any = None) -> Started:
        self._check_in_place("reduce_scatter", given, output)
        number = 0 if opts is None else _number(opts.reduceOp)

        def run(copies: list[Tensor]) -> Sequence[Tensor]:
            wide = torch.promote_types(given.dtype, torch.float32)
            everyone = self.wire.gather_data(copies)
            parts = [t.chunk(self._size)[self._rank].to(wide) for t in everyone]
            return [OPERATIONS[number](torch.stack(parts)).to(given.dtype)]

        return self._start("reduce_scatter", [given], [output], run, number)

    def _check_in_place(self, name: str, whole: Tensor, part: Tensor) -> None:
        """NCCL takes a part inside the whole only where it belongs."""
        if not all(isinstance(t, PretendedTensor) for t in (whole, part)):
            return  # `_check` refuses it
        if whole.untyped_storage()._cdata != part.untyped_storage()._cdata:
            return
        (first, end), (at, stop) = extent(whole.data_), extent(part.data_)
        if at < end and first < stop and at != first + self._rank * (stop - at):
            raise RuntimeError(f"{name} in place needs the part to be number {self._rank}")

    def all_to_all_single(
        self, output: Tensor, given: Tensor, output_sizes: list, input_sizes: list, opts: Any = None
    ) -> Started:
        if output_sizes or input_sizes:
            raise NotImplementedError(f"uneven all_to_all on the {TYPE} device")

        def run(copies: list[Tensor]) -> Sequence[Tensor]:
            everyone = self.wire.gather_data(copies)
            return [torch.cat([t.chunk(self._size)[self._rank] for t in everyone])]

        return self._start("all_to_all", [given], [output], run)

    # As torch called them before 2.13.
    _allgather_base, _reduce_scatter_base = all_gather_single, reduce_scatter_single
    alltoall_base = all_to_all_single

    def barrier(self, opts: Any = None) -> Together:
        """The host waits, as it does for NCCL's."""
        token = torch.zeros(1, device=torch.device(TYPE, self.index))
        started = self._start("barrier", [token], [token], lambda copies: copies)
        started.wait()
        this_machine().wait_for_stream(self.stream.number, "a barrier")
        return Together([started])

    # --- messages ------------------------------------------------------------------------------

    def send(self, tensors: list[Tensor], target: int, tag: int) -> Started:
        self._check("send", tensors)
        copy = tensors[0].data_.detach().clone()
        self._on_stream("send", tensors, [])
        done = None if self.wire is None else self.wire.send(copy, target, tag)
        return Started(self.stream, done, [], (tensors, copy))

    def recv(self, tensors: list[Tensor], source: int, tag: int) -> Started:
        self._check("receive", tensors)
        self._on_stream("receive", [], tensors)
        done = None if self.wire is None else self.wire.receive(tensors[0].data_, source, tag)
        return Started(self.stream, done, tensors, tensors)
