"""The output head and the loss as one step: logits exist for a chunk of tokens at a time.

Losses need the whole table, gradients too, but both need the logits of one token alone. So the
tokens go through in chunks: logits, statistics, losses, gradients in place of the logits, and their
two GEMMs, before the next chunk's logits take the memory. That is three GEMMs, as without chunks;
to make the logits again in the backward would be four, to keep them all the memory. Gradients in
the forward need to know what the losses will be multiplied with, so the caller says it beforehand.
Liger Kernel (Hsu et al. 2024, §3.2) does the same in fused kernels, on one device.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor

from parallel3d.comm import collectives
from parallel3d.comm.collectives import CompletedWork, Work
from parallel3d.comm.group import SINGLE, Group
from parallel3d.device import accelerator
from parallel3d.device.products import matmul
from parallel3d.parameters.gradients import add_product
from parallel3d.sizes.loss_chunks import loss_chunks
from parallel3d.tensor_parallel.cross_entropy import ChunkLoss, Objective
from parallel3d.tensor_parallel.mappings import all_gather_sequence, sequence_first


@dataclass(frozen=True)
class HeadLoss:
    """Losses of hidden states against a table whose rows are split over `group`.

    Attributes:
        padded_size: rows of the table over all ranks.
        sp: hidden states are (b, s/tp, h) and are gathered first.
        gather_logits: every rank gathers all logits of a chunk (`model.parallel_output=false`).
        chunk_tokens: see `loss_chunks`.
    """

    objective: Objective
    padded_size: int
    group: Group = SINGLE
    sp: bool = False
    gather_logits: bool = False
    chunk_tokens: int | None = None

    def train(
        self, x: Tensor, table: Tensor, labels: Tensor, loss_mask: Tensor, loss_scale: Tensor
    ) -> Tensor:
        """The sum of the unmasked losses, to be backpropagated from `loss_scale` and nothing else.

        The table's gradient is added to its bucket here, in the forward; the bucket is told in the
        backward, as it is by the other layers.

        Args:
            x: (b, s, h), or (b, s/tp, h) under sequence parallelism.
            table: (padded_size / tp, h).
            labels, loss_mask: (b, s).
            loss_scale: scalar, what the sum's gradient will be.

        Raises:
            RuntimeError: in the backward, on a CPU, if it starts from another gradient.
        """
        self._check(table)
        return _HeadLoss.apply(x, table, labels, loss_mask, loss_scale, self)

    @torch.no_grad()
    def evaluate(self, x: Tensor, table: Tensor, labels: Tensor, loss_mask: Tensor) -> Tensor:
        """The sum of the unmasked cross-entropies, without gradients, smoothing or z-loss."""
        self._check(table)
        run = _Run(self, self.objective.plain, x, table, labels, loss_mask)
        for chunk in run.chunks():
            run.forward(chunk)
        return run.losses.mul_(run.mask).sum()

    def _check(self, table: Tensor) -> None:
        if table.shape[0] * self.group.size != self.padded_size:
            raise ValueError(
                f"{table.shape[0]} rows on each of {self.group.size} ranks are not the "
                f"{self.padded_size} rows of the padded vocabulary"
            )


class _HeadLoss(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        table: Tensor,
        labels: Tensor,
        loss_mask: Tensor,
        loss_scale: Tensor,
        head: HeadLoss,
    ) -> Tensor:
        run = _Run(head, head.objective, x, table, labels, loss_mask)
        grad_x, grad_table = run.train(loss_scale)
        ctx.table, ctx.gradients, ctx.loss_scale = table, (grad_x, grad_table), loss_scale
        return run.losses.mul_(run.mask).sum()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple:
        if grad.device.type == "cpu" and float(grad) != float(ctx.loss_scale.to(grad.dtype)):
            raise RuntimeError(
                f"the loss is backpropagated from {float(grad)}, but its gradients were made for "
                f"{float(ctx.loss_scale)}"
            )
        grad_x, grad_table = ctx.gradients
        if grad_table is None:
            ctx.table.gradient_added()
        return grad_x, grad_table, None, None, None, None


class _Run:
    """One micro-batch on its way through the chunks; rows are tokens, (b, s) flattened."""

    def __init__(
        self,
        head: HeadLoss,
        objective: Objective,
        x: Tensor,
        table: Tensor,
        labels: Tensor,
        loss_mask: Tensor,
    ) -> None:
        self.head, self.objective, self.table = head, objective, table
        self.sp = head.sp and head.group.size > 1
        self.full = all_gather_sequence(x, head.group) if self.sp else x
        self.x = self.full.flatten(0, -2)
        self.labels = labels.flatten()
        wide = torch.promote_types(x.dtype, torch.float32)
        self.mask = loss_mask.flatten().to(wide)
        self.losses = torch.empty_like(self.mask)

    def chunks(self) -> list[slice]:
        """Runs of tokens."""
        columns = self.table.shape[0] * (self.head.group.size if self.head.gather_logits else 1)
        sizes = loss_chunks(
            self.x.shape[0],
            columns,
            self.head.chunk_tokens,
            item=self.x.element_size(),
            on_accelerator=accelerator.is_on_accelerator(self.x),
        )
        return [slice(e - size, e) for size, e in zip(sizes, accumulate(sizes), strict=True)]

    def forward(self, chunk: slice) -> ChunkLoss:
        """Writes the losses of a chunk; one collective."""
        group, rows = self.head.group, self.table.shape[0]
        logits = matmul(self.x[chunk], self.table.t())
        if self.head.gather_logits and group.size > 1:
            parts = collectives.all_gather(logits.unsqueeze(0), group)
            logits = torch.cat(parts.unbind(0), dim=1)
            del parts
            loss = ChunkLoss(logits, self.labels[chunk], 0, self.objective)
            ranks = loss.statistics().unsqueeze(0)
        else:
            loss = ChunkLoss(logits, self.labels[chunk], rows * group.index, self.objective)
            ranks = collectives.all_gather(loss.statistics().unsqueeze(0), group)
        self.losses[chunk] = loss.losses(ranks)
        return loss

    def train(self, loss_scale: Tensor) -> tuple[Tensor, Tensor | None]:
        """Losses, and the gradients of x and, where it has no bucket, of the table."""
        chunks = self.chunks()
        grad_x = torch.empty_like(self.x)
        main_grad = getattr(self.table, "main_grad", None)
        wide = torch.promote_types(self.table.dtype, torch.float32)
        out = torch.zeros_like(self.table, dtype=wide) if main_grad is None else main_grad
        factor = self.mask * loss_scale.to(self.mask.dtype)
        work, reduced = CompletedWork(), grad_x
        for chunk in chunks:
            grad = self._gradient(chunk, factor)
            if accelerator.is_on_accelerator(grad):
                torch.mm(grad, self.table, out=grad_x[chunk])
            else:  # on a CPU not every product can be written in place
                grad_x[chunk] = matmul(grad, self.table)
            if chunk is chunks[-1]:  # travels while the last weight-gradient GEMM runs
                reduced, work = self._reduce(grad_x.view_as(self.full))
            add_product(out, grad, self.x[chunk])
            del grad  # or the next chunk's logits would stand beside it
        work.wait()
        grad_x = reduced.transpose(0, 1).contiguous() if self.sp else reduced
        return grad_x, out.to(self.table.dtype) if main_grad is None else None

    def _gradient(self, chunk: slice, factor: Tensor) -> Tensor:
        """(chunk, rows): the gradient of this rank's logits."""
        grad = self.forward(chunk).gradient(factor[chunk])
        rows = self.table.shape[0]
        return grad.narrow(1, rows * self.head.group.index, rows) if grad.shape[1] > rows else grad

    def _reduce(self, grad_x: Tensor) -> tuple[Tensor, Work]:
        """Starts the sum of the partial gradients of x over the ranks."""
        if self.sp:
            return collectives.reduce_scatter_async(sequence_first(grad_x), self.head.group)
        return grad_x, collectives.all_reduce_async(grad_x, self.head.group)
