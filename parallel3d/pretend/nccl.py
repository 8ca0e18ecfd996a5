"""A process-group backend that behaves as NCCL does, over gloo.

What NCCL does and gloo does not:

- A collective runs on a stream of its group's own, behind what is on the current stream when it is
  called; `wait()` orders the current stream behind it. Until then its results are poison here.
- It takes tensors of its one device alone, contiguous ones; a gather or scatter may be in place
  only at the rank's own part.
- What has no elements is not sent, so nobody waits for it: neither a message nor a collective.
- All members call the same operations in the same order, by position and not by tag, and a group is
  made and destroyed by all of its members in one order (`wire.py` tells members that differ).

Where tensors have no values (`data="meta"`) there is nobody to talk to: one process is one rank of
any world, every collective and message is done at its `wait()`, and nothing is compared.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from parallel3d.pretend.communicator import Communicator
from parallel3d.pretend.device import TYPE, this_machine
from parallel3d.pretend.machine import extent
from parallel3d.pretend.tensor import PretendedTensor
from parallel3d.pretend.works import Started, Together

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


class PretendedNCCL(Communicator):
    """One communicator. See the module's docstring."""

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
        this_machine().wait_for_stream(self.stream.number, "a barrier", is_detected=False)
        return Together([started])

    # --- messages ------------------------------------------------------------------------------

    def send(self, tensors: list[Tensor], target: int, tag: int) -> Started:
        self._check("send", tensors)
        copy = tensors[0].data_.detach().clone()
        self._on_stream("send", tensors, [])
        done = self.wire.send(copy, target, tag) if self._travels(tensors) else None
        return Started(self.stream, done, [], (tensors, copy))

    def recv(self, tensors: list[Tensor], source: int, tag: int) -> Started:
        self._check("receive", tensors)
        self._on_stream("receive", [], tensors)
        travels = self._travels(tensors)
        done = self.wire.receive(tensors[0].data_, source, tag) if travels else None
        return Started(self.stream, done, tensors, tensors)
