"""Sums of several phases, all of them beside the backward pass."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from parallel3d.comm import collectives
from parallel3d.comm.collectives import Work
from parallel3d.comm.process_groups import Group
from parallel3d.device import accelerator
from parallel3d.device.accelerator import is_on_accelerator
from parallel3d.sizes.traffic import compressed_rank, padded_numel


class SideStream:
    """Queues every phase of a bucket's sum on an accelerator as soon as the bucket is full.

    A phase waits for the collective of the one before. On the stream that computes, that would
    hold up the backward, so there the later phases would have to come after it, where nothing
    hides them. On a stream of their own only that stream waits, and the compute stream waits for
    it once, when the step needs the sums. One bucket follows the other on it, in the same order on
    every rank.

    Lifetimes. What the phases make is allocated on the side stream, and reused there after them.
    What they read or write of the compute stream's memory must not be freed before that stream
    has waited: the bucket's buffer lives on, and a phase that drops anything else of it (a matrix
    that it replaces) keeps it in its handle, which is held until then.
    """

    def __init__(self) -> None:
        self.stream: Any = None

    def run(self, tensor: Tensor, start: Callable[[], Work]) -> Work:
        """Queues `start()` and the wait for what it returns, the other phases in it.

        Args:
            tensor: the bucket, complete on the stream that calls.
        """
        module = accelerator.module(tensor.device)
        if self.stream is None:
            self.stream = module.Stream(device=tensor.device)
        self.stream.wait_stream(module.current_stream(tensor.device))
        with accelerator.on_stream(self.stream):
            work = start()
            work.wait()
        return _Queued(tensor, self.stream.record_event(), work)


@dataclass
class _Queued:
    tensor: Tensor
    done: Any
    kept: Work | None

    def wait(self) -> None:
        """Orders the current stream behind the sum; the host goes on."""
        device = self.tensor.device
        accelerator.module(device).current_stream(device).wait_event(self.done)
        self.kept = None


# Gradient reduction in two levels: inside each NVLink domain, then between the domains.
#
# A group that straddles domains has a ring whose slowest wire is a NIC, used for the whole of the
# gradients. In two levels only 1/g of them leaves a domain, where g members of the group share one,
# and the j-th members of all domains, which talk to each other, sit on one rail.


@dataclass(frozen=True)
class HierarchicalAllReduce:
    """A `CommHook`: reduce-scatter inside, all-reduce of the shard outside, all-gather inside.

    Time 2(g − 1)/g · S/B_nvlink + 2(m − 1)/m · S/(g · B_nic) for S bytes, g members a domain and m
    domains, without latencies (`costs.hierarchical_all_reduce`).
    """

    inner: Group
    outer: Group
    side: SideStream = field(default_factory=SideStream)

    def __call__(self, tensor: Tensor, group: Group) -> Work:
        """Starts the sum of a flat `tensor` over inner × outer, which are the whole `group`."""
        if is_on_accelerator(tensor):
            return self.side.run(tensor, lambda: self._start(tensor))
        return self._start(tensor)

    def _start(self, tensor: Tensor) -> Work:
        even = tensor.numel() // self.inner.size * self.inner.size
        if even == 0:
            return _Started(self, tensor, 0, tensor[:0], collectives.CompletedWork())
        shard, scattering = collectives.reduce_scatter_async(tensor[:even], self.inner)
        return _Started(self, tensor, even, shard, scattering)


@dataclass(frozen=True)
class _Started:
    levels: HierarchicalAllReduce
    tensor: Tensor
    even: int
    shard: Tensor
    scattering: Work

    def wait(self) -> None:
        inner, outer = self.levels.inner, self.levels.outer
        self.scattering.wait()
        if self.even:
            collectives.all_reduce(self.shard, outer)
            self.tensor[: self.even] = collectives.all_gather(self.shard, inner)
        rest = self.tensor[self.even :]  # fewer elements than the inner group has members
        if rest.numel():
            for group in (inner, outer):
                collectives.all_reduce(rest, group)


# Gradient buckets that travel as bf16: half the bytes of fp32.


@dataclass(frozen=True)
class InBf16:
    """A `CommHook`: each rank's gradients are rounded to bf16, added in fp32, and the sum rounded.

    Two roundings of 2⁻⁹ at most, however many ranks: every rank gets its part of the bucket from
    all others, adds it in fp32 in rank order, and hands the rounded sum to all. An all-reduce of
    bf16 tensors sends the same bytes, and rounds after each of its n − 1 additions.
    """

    side: SideStream = field(default_factory=SideStream)

    def __call__(self, tensor: Tensor, group: Group) -> Work:
        """Starts the sum of a flat `tensor` over the group; it is there after `wait()`."""
        started = _CompressedStarted(tensor, group)
        if is_on_accelerator(tensor):
            return self.side.run(tensor, lambda: started)
        if group.shared is None:  # else all in the wait, as `collectives.all_reduce_bucket` does
            started.exchange()
        return started


@dataclass
class _CompressedStarted:
    tensor: Tensor
    group: Group
    parts: Tensor | None = None
    exchanging: Work | None = None

    def exchange(self) -> None:
        size = self.tensor.numel()
        padded = padded_numel(size, self.group.size)
        rounded = self.tensor.new_zeros(padded, dtype=torch.bfloat16)
        rounded[:size] = self.tensor
        self.parts, self.exchanging = collectives.all_to_all_async(rounded, self.group)

    def wait(self) -> None:
        if self.exchanging is None:
            self.exchange()
        self.exchanging.wait()
        mine = self.parts.view(self.group.size, -1).sum(0, dtype=torch.float32)
        total = collectives.all_gather(mine.bfloat16(), self.group)
        self.tensor.copy_(total[: self.tensor.numel()])


# PowerSGD: gradients travel as two thin matrices (Vogels, Karimireddy and Jaggi 2019, §3).
#
# PyTorch has the algorithm as a hook of its DDP. That one starts its second and third reduction
# from the completion of the one before, on whatever thread that runs: with several buckets under
# way the ranks of a gloo group would enter them in different orders. Here a bucket's first
# reduction starts with the bucket and its second in `wait()`, which every rank calls in bucket
# order (on an accelerator both start with the bucket, see `SideStream`), and the result is a sum
# and not a mean. `tests/distributed/test_comm_hooks.py` holds the two side by side.


Shapes = list[tuple[int, ...]]
SEED = 1  # of the first Q: the same on every rank, so that P = Σ M·Q is one product
EPSILON = 1e-30  # a matrix without any gradient has no direction; its factors stay zero


@dataclass
class Matrix:
    """One compressed gradient: where it stands in its bucket, and what the last step left."""

    offset: int
    rows: int
    columns: int
    random: Tensor  # (columns, rank), the same on every rank
    q: Tensor  # (columns, rank), the warm start of the next step
    error: Tensor  # (rows, columns), what this rank's gradients have been short of

    def of(self, bucket: Tensor) -> Tensor:
        """(rows, columns), a view."""
        size = self.rows * self.columns
        return bucket[self.offset : self.offset + size].view(self.rows, self.columns)

    def directions(self) -> Tensor:
        """Orthonormal (columns, rank): where the last step ended, random where it ended in zero.

        Gradients of a lower rank, or none at all, leave zeros, from which no product would return.
        """
        lost = self.q.norm(dim=0) == 0
        return orthonormal(torch.where(lost, self.random, self.q))


@dataclass
class Factors:
    """What PowerSGD knows of one bucket: its matrices, and the ranges of all the rest."""

    matrices: list[Matrix] = field(default_factory=list)
    plain: list[tuple[int, int]] = field(default_factory=list)
    steps: int = 0


class PowerSGD:
    """A `CommHook` with memory: error feedback and warm start, of every bucket apart.

    Matrices of n rows and m columns travel as P (n, r) and Q (m, r), in fp32 or better, vectors and
    small matrices as they are. What a rank's gradient loses is added to its next one, so that
    nothing is lost for good. The memory is of this run: a resumed run starts it anew.

    Args:
        layouts: of each bucket, its flat gradients and the shapes of the parameters in them, in the
            order in which they lie there.
        rank: r of the paper.
        start: sums in full before compression begins; early gradients are no low-rank matrices.
        rank_of: (rows, columns, rank) → the rank of a matrix, 0 to leave it alone.
    """

    def __init__(
        self,
        layouts: Iterable[tuple[Tensor, Shapes]],
        rank: int,
        start: int,
        rank_of: Callable[[int, int, int], int] = compressed_rank,
    ) -> None:
        self.start, self.side = start, SideStream()
        self.by_address = {
            grad.data_ptr(): _factors(grad, shapes, rank, rank_of) for grad, shapes in layouts
        }

    def __call__(self, tensor: Tensor, group: Group) -> Work:
        """Starts the sum of a bucket's flat gradients; it is there after `wait()`."""
        factors = self.by_address[tensor.data_ptr()]
        factors.steps += 1
        if factors.steps <= self.start or not factors.matrices:
            return collectives.all_reduce_bucket(tensor, group)
        if is_on_accelerator(tensor):
            return self.side.run(tensor, lambda: _PowersgdStarted(tensor, group, factors))
        return _PowersgdStarted(tensor, group, factors)


def _factors(
    grad: Tensor, shapes: Shapes, rank: int, rank_of: Callable[[int, int, int], int]
) -> Factors:
    generator = torch.Generator().manual_seed(SEED)
    found, offset = Factors(), 0
    for shape in shapes:
        rows, columns = (*shape, 1)[:2]
        r = rank_of(rows, columns, rank) if len(shape) == 2 else 0
        if r:
            q = torch.randn(columns, r, generator=generator, dtype=torch.float64).to(grad)
            error = grad.new_zeros(rows, columns)
            found.matrices.append(Matrix(offset, rows, columns, q, q, error))
        else:
            found.plain.append((offset, offset + rows * columns))
        offset += rows * columns
    return found


def orthonormal(matrix: Tensor) -> Tensor:
    """An orthonormal basis of the columns, in place, by Gram-Schmidt, twice over for fp32's sake.

    Columns that depend on the ones before become zero, not noise: their rounding is no direction.
    """
    tiny = 10 * torch.finfo(matrix.dtype).eps
    for i in range(matrix.shape[1]):
        column, before = matrix[:, i], matrix[:, :i]
        length = column.norm()
        for _ in range(2):
            column -= before @ (before.t() @ column)
        left = column.norm()
        keep = (left > tiny * length) & (left > EPSILON)
        column.copy_(torch.where(keep, column / left.clamp(min=EPSILON), 0.0))
    return matrix


class _PowersgdStarted:
    """One bucket's sum under way: P and the uncompressed rest first, Q in the wait."""

    def __init__(self, tensor: Tensor, group: Group, factors: Factors) -> None:
        self.tensor, self.group, self.factors = tensor, group, factors
        # What the wait replaces, made on another stream at first: see `SideStream`, lifetimes.
        self.replaced = [(m.q, m.error) for m in factors.matrices]
        self.ps = []
        for m in factors.matrices:
            whole = m.of(tensor).add_(m.error)
            self.ps.append(whole @ m.directions())
        rest = [tensor[start:stop] for start, stop in factors.plain]
        self.sent = torch.cat([*(p.flatten() for p in self.ps), *rest])
        self.work = collectives.all_reduce_bucket(self.sent, group)

    def wait(self) -> None:
        self.work.wait()
        matrices = self.factors.matrices
        sizes = [p.numel() for p in self.ps] + [stop - start for start, stop in self.factors.plain]
        summed = self.sent.split(sizes)
        for (start, stop), total in zip(self.factors.plain, summed[len(matrices) :], strict=True):
            self.tensor[start:stop] = total
        ps = [
            orthonormal(total.view_as(p))
            for p, total in zip(self.ps, summed[: len(matrices)], strict=True)
        ]
        own = [m.of(self.tensor).t() @ p for m, p in zip(matrices, ps, strict=True)]
        qs = collectives.all_reduce(torch.cat([q.flatten() for q in own]), self.group)
        totals = qs.split([q.numel() for q in own])
        # An overflow shows on all ranks alike, spoils this step and must not stay in the memory.
        finite = self.sent.isfinite().all() & qs.isfinite().all()
        for m, p, q, total in zip(matrices, ps, own, totals, strict=True):
            # p·qᵀ is this rank's share of the sum P·Qᵀ: what it lacks is this rank's to make good.
            m.error = torch.where(finite, m.of(self.tensor) - p @ q.t(), 0.0)
            m.q = torch.where(finite, total.view_as(q), 0.0)
            torch.mm(p, total.view_as(q).t(), out=m.of(self.tensor))
