"""PowerSGD: gradients travel as two thin matrices (Vogels, Karimireddy and Jaggi 2019, §3).

PyTorch has the algorithm as a hook of its DDP. That one starts its second and third reduction from
the completion of the one before, on whatever thread that runs: with several buckets under way the
ranks of a gloo group would enter them in different orders. Here a bucket's first reduction starts
with the bucket and its second in `wait()`, which every rank calls in bucket order (on an
accelerator both start with the bucket, see `SideStream`), and the result is a sum and not a mean.
`tests/distributed/test_comm_hooks.py` holds the two side by side.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

import torch
from torch import Tensor

from parallel3d.comm import collectives
from parallel3d.comm.collectives import Work
from parallel3d.comm.group import Group
from parallel3d.data_parallel.side_stream import SideStream
from parallel3d.device.accelerator import is_on_accelerator
from parallel3d.sizes.buckets import compressed_rank

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
            return self.side.run(tensor, lambda: _Started(tensor, group, factors))
        return _Started(tensor, group, factors)


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


class _Started:
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
