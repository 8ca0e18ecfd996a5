"""Comm hooks: hierarchical, bf16 and PowerSGD reductions of gradient buckets."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from parallel3d.blueprint.buckets import compressed_rank, padded_numel
from parallel3d.comm import collectives
from parallel3d.comm.collectives import Work
from parallel3d.comm.group import Group
from parallel3d.data_parallel.reducer import CommHook, GradBucket
from parallel3d.device import accelerator
from parallel3d.device.accelerator import is_on_accelerator


class SideStream:
    """A `CommHook`: runs all phases of another hook on an accelerator stream of their own.

    A phase waits for the collective of the phase before: on the compute stream this would block the
    backward. The compute stream waits once, when the step needs the sums. Buckets follow each other
    in the same order on every rank.

    Lifetimes: tensors that the phases allocate belong to the side stream. Tensors of the compute
    stream that they use must not be freed before that stream has waited: a phase that replaces one
    keeps it in its handle until then.
    """

    def __init__(self, hook: CommHook) -> None:
        self.hook = hook
        self.stream: Any = None

    def __call__(self, group: Group, bucket: GradBucket) -> Work:
        if is_on_accelerator(bucket.buffer()):
            return self.run(bucket.buffer(), lambda: self.hook(group, bucket))
        return self.hook(group, bucket)

    def run(self, tensor: Tensor, start: Callable[[], Work]) -> Work:
        """Queues `start()` and the wait for its handle, after the current stream."""
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
        """Makes the current stream wait for the sum; the host does not wait."""
        device = self.tensor.device
        accelerator.module(device).current_stream(device).wait_event(self.done)
        self.kept = None


class HierarchicalAllReduce:
    """Reduce-scatters a bucket inside NVLink domains, all-reduces the shards between domains.

    A flat ring over several domains sends all gradients through a NIC. Here only 1/g of them leaves
    a domain of g members, between members of equal index, which are on one rail
    (`estimate.network.two_level_time`).
    """

    def __init__(self, inner: Group, outer: Group, bucket: GradBucket) -> None:
        self.inner, self.outer = inner, outer
        tensor = bucket.buffer()
        even = tensor.numel() // inner.size * inner.size
        # The rest has fewer elements than the inner group members.
        self.whole, self.rest = tensor[:even], tensor[even:]
        self.shard = self.whole
        self.scattering: Work | None = None
        if even:
            self.shard, self.scattering = collectives.reduce_scatter_async(self.whole, inner)

    def wait(self) -> None:
        if self.scattering is not None:
            self.scattering.wait()
            collectives.all_reduce(self.shard, self.outer)
            self.whole.copy_(collectives.all_gather(self.shard, self.inner))
        if self.rest.numel():
            for group in (self.inner, self.outer):
                collectives.all_reduce(self.rest, group)


class InBf16:
    """Sends a bucket as bf16 and adds in fp32; the class is a `CommHook`.

    Two roundings of at most 2⁻⁹ for any number of ranks; an all-reduce of bf16 tensors sends the
    same bytes and rounds after each of its n − 1 additions.
    """

    def __init__(self, group: Group, bucket: GradBucket) -> None:
        self.tensor, self.group = bucket.buffer(), group
        numel = self.tensor.numel()
        rounded = self.tensor.new_zeros(padded_numel(numel, group.size), dtype=torch.bfloat16)
        rounded[:numel] = self.tensor
        # Gradients of all ranks for this rank's shard.
        self.received, self.exchanging = collectives.all_to_all_async(rounded, group)

    def wait(self) -> None:
        self.exchanging.wait()
        mine = self.received.view(self.group.size, -1).sum(0, dtype=torch.float32)
        total = collectives.all_gather(mine.bfloat16(), self.group)
        self.tensor.copy_(total[: self.tensor.numel()])


# PowerSGD (Vogels, Karimireddy and Jaggi 2019, §3).


SEED = 1  # of the first Q: equal on every rank, so that P = Σ M·Q is one matmul
EPSILON = 1e-30  # a zero matrix has no direction; its factors stay zero


@dataclass
class Matrix:
    """One compressed gradient: its place in the bucket, and its warm start and error."""

    offset: int
    rows: int
    columns: int
    random: Tensor  # (columns, rank), equal on every rank
    q: Tensor  # (columns, rank), the warm start of the next step
    error: Tensor  # (rows, columns), the error feedback of this rank

    def of(self, bucket: Tensor) -> Tensor:
        size = self.rows * self.columns
        return bucket[self.offset : self.offset + size].view(self.rows, self.columns)

    def directions(self) -> Tensor:
        """Returns orthonormal (columns, rank): the last Q, with random columns instead of zeros.

        Gradients of a lower rank leave zero columns, which no matmul would change again.
        """
        lost = self.q.norm(dim=0) == 0
        return orthonormal(torch.where(lost, self.random, self.q))


@dataclass
class Factors:
    """PowerSGD's state of one bucket: its matrices, and the ranges of uncompressed gradients."""

    matrices: list[Matrix] = field(default_factory=list)
    plain: list[tuple[int, int]] = field(default_factory=list)
    steps: int = 0


class PowerSGD:
    """A stateful `CommHook`: low-rank gradients with error feedback and warm start.

    Matrices of n rows and m columns are sent as P (n, r) and Q (m, r), in fp32 or better, vectors
    and small matrices uncompressed. The state is not saved: a resumed run starts without it.

    PyTorch's hook starts later reductions when earlier ones complete, on any thread: with several
    buckets in flight, gloo ranks would enter them in different orders. Here a bucket's second
    reduction starts in `wait()`, which every rank calls in bucket order. The result is a sum, not a
    mean.

    Args:
        rank: r of the paper.
        start: number of uncompressed sums at the start; early gradients are not of low rank.
        rank_of: (rows, columns, rank) → the rank of a matrix, 0 to leave it uncompressed.

    Attributes:
        factors: the state of each bucket.
    """

    def __init__(
        self,
        rank: int,
        start: int,
        rank_of: Callable[[int, int, int], int] = compressed_rank,
    ) -> None:
        self.rank, self.start, self.rank_of = rank, start, rank_of
        self.factors: dict[int, Factors] = {}

    def __call__(self, group: Group, bucket: GradBucket) -> Work:
        tensor, factors = bucket.buffer(), self.factors_of(bucket)
        factors.steps += 1
        if factors.steps <= self.start or not factors.matrices:
            return collectives.all_reduce_async(tensor, group)
        return _PowersgdStarted(tensor, group, factors)

    def factors_of(self, bucket: GradBucket) -> Factors:
        """Returns the state of a bucket, whose parameters stay the same."""
        if bucket.index() not in self.factors:
            self.factors[bucket.index()] = self._begin(bucket)
        return self.factors[bucket.index()]

    def _begin(self, bucket: GradBucket) -> Factors:
        grad, generator = bucket.buffer(), torch.Generator().manual_seed(SEED)
        found, offset = Factors(), 0
        for parameter in bucket.parameters():
            rows, columns = (*parameter.shape, 1)[:2]
            r = self.rank_of(rows, columns, self.rank) if parameter.dim() == 2 else 0
            if r:
                q = torch.randn(columns, r, generator=generator, dtype=torch.float64).to(grad)
                error = grad.new_zeros(rows, columns)
                found.matrices.append(Matrix(offset, rows, columns, q, q, error))
            else:
                found.plain.append((offset, offset + parameter.numel()))
            offset += parameter.numel()
        return found


def orthonormal(matrix: Tensor) -> Tensor:
    """Orthonormalises the columns in place by Gram-Schmidt, twice for accuracy in fp32.

    Columns that depend on earlier ones become zero: their rounding error is no direction.
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
    """A bucket's sum in flight: P and the uncompressed gradients first, Q in the wait."""

    def __init__(self, tensor: Tensor, group: Group, factors: Factors) -> None:
        self.tensor, self.group, self.factors = tensor, group, factors
        # Replaced in the wait, and allocated on another stream: see `SideStream`, lifetimes.
        self.replaced = [(m.q, m.error) for m in factors.matrices]
        self.ps = []
        for m in factors.matrices:
            whole = m.of(tensor).add_(m.error)
            self.ps.append(whole @ m.directions())
        rest = [tensor[start:stop] for start, stop in factors.plain]
        self.sent = torch.cat([*(p.flatten() for p in self.ps), *rest])
        self.work = collectives.all_reduce_async(self.sent, group)

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
        # An overflow appears on all ranks, fails this step and must not stay in the state.
        finite = self.sent.isfinite().all() & qs.isfinite().all()
        for m, p, q, total in zip(matrices, ps, own, totals, strict=True):
            # p·qᵀ is this rank's share of the sum P·Qᵀ, so the difference is this rank's error.
            m.error = torch.where(finite, m.of(self.tensor) - p @ q.t(), 0.0)
            m.q = torch.where(finite, total.view_as(q), 0.0)
            torch.mm(p, total.view_as(q).t(), out=m.of(self.tensor))
