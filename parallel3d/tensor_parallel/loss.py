"""Computes the LM head and its vocab-parallel cross-entropy together, chunk by chunk."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor

from parallel3d.blueprint.sizes import loss_chunks
from parallel3d.comm import collectives
from parallel3d.comm.group import SINGLE, Group
from parallel3d.device import accelerator
from parallel3d.device.capping import scaled_and_capped, slope_of
from parallel3d.device.fused import fused, fuses
from parallel3d.device.matmul import matmul
from parallel3d.parameters.gradients import add_matmul
from parallel3d.parameters.state import state_of
from parallel3d.tensor_parallel.mappings import all_gather_sequence, sequence_first

# Without fused kernels, logits are processed in blocks of rows of this many bytes. On a CPU a block
# stays in the cache from one pass to the next. Elsewhere it is large enough to occupy the device,
# but small compared to logits in half precision, which are converted to fp32 block by block.
BLOCK_BYTES = {"cpu": 1 << 20}
LARGE_BLOCK_BYTES = 64 << 20


@dataclass(frozen=True)
class Objective:
    """The loss of one token: (1 − ε)·(l − z_y) + ε·(l − mean z) + λ·l², with l = log Σ exp z.

    This is the cross-entropy of logits z and label y with label smoothing ε (Szegedy et al. 2016,
    §7), plus the z-loss with weight λ (Chowdhery et al. 2022, §5). The logits may be scaled and
    capped products of the head: z = c · tanh(s · product / c), computed in fp32 or better.

    Attributes:
        vocab_size: number of tokens without padding. Softmax and mean ignore further columns.
        label_smoothing, z_loss: ε and λ.
        half: whether logits, statistics and losses stay in half precision, as with Megatron-LM's
            --fp16-lm-cross-entropy. Otherwise statistics and losses are fp32 or better.
        scale, cap: s and c. No cap is applied if `cap` is None.
    """

    vocab_size: int
    label_smoothing: float = 0.0
    z_loss: float = 0.0
    half: bool = False
    scale: float = 1.0
    cap: float | None = None

    @property
    def transforms(self) -> bool:
        """Whether the logits differ from the head's products."""
        return self.scale != 1.0 or self.cap is not None


@fused
def vocabulary_statistics(
    logits: Tensor,
    target: Tensor,
    inside: Tensor,
    real: int,
    with_sum: bool,
    scale: float,
    cap: float | None,
) -> Tensor:
    """Computes `ChunkLoss.statistics` in one pass over the products, which stay unchanged.

    Args:
        logits: (tokens, columns), the head's products.
        target: (tokens, 1), the column of each label; arbitrary where `inside` is false.
        inside: (tokens,), whether this rank has the column of the label.
        real: number of columns without padding.
        with_sum: whether the result has a fourth row, Σ z.
    """
    # TorchInductor turns this form into one online pass over a row (Milakov and Gimelshein 2018).
    wide = logits[:, :real].to(torch.promote_types(logits.dtype, torch.float32))
    wide = scaled_and_capped(wide, scale, cap)
    maximum = wide.amax(1, keepdim=True)
    total = (wide - maximum).exp().sum(1, keepdim=True)
    at_target = scaled_and_capped(logits.gather(1, target).to(wide.dtype), scale, cap)
    at_target = at_target.masked_fill(~inside.unsqueeze(1), 0.0)
    columns = [maximum, total, at_target]
    if with_sum:
        columns.append(wide.sum(1, keepdim=True))
    return torch.cat(columns, 1).t().contiguous()


@fused
def logits_to_gradient(
    logits: Tensor,
    log_sum: Tensor,
    of_softmax: Tensor,
    at_target: Tensor,
    target: Tensor,
    spread: Tensor | None,
    real: int,
    scale: float,
    cap: float | None,
) -> None:
    """Overwrites the head's products with their gradient.

    The gradient of the logits is `of_softmax` · softmax − `spread`, plus `at_target` in the label's
    column; `slope_of` turns it into that of the products. Columns from `real` on become 0. `logits`
    has the shape (tokens, columns), and the other tensors have (tokens, 1).
    """
    # These are 32-bit integers: comparing 64-bit ones would take as long as the memory traffic.
    column = torch.arange(logits.shape[1], dtype=torch.int32, device=logits.device)
    z = scaled_and_capped(logits.to(log_sum.dtype), scale, cap)
    gradient = (z - log_sum).exp() * of_softmax
    if spread is not None:
        gradient = gradient - spread
    gradient = gradient + torch.where(column == target.to(torch.int32), at_target, 0.0)
    if scale != 1.0 or cap is not None:
        gradient = gradient * slope_of(z, scale, cap)
    if real < logits.shape[1]:
        gradient = torch.where(column < real, gradient, 0.0)
    logits.copy_(gradient)


class ChunkLoss:
    """Computes the losses of a chunk of tokens, and overwrites the logits with their gradients.

    Call `statistics`, then `losses` with the statistics of all ranks, and then `gradient`. Maximum,
    exponentials and sums are in fp32 or better unless the objective is `half`. Without fused
    kernels, logits in fp32 and fp64 become exponentials and then gradients in the same memory.
    Logits in half precision, and products that are scaled or capped, stay unchanged until they
    become gradients; they are converted block by block.

    Args:
        logits: (tokens, columns), the head's products of this rank's columns; overwritten.
        labels: (tokens,), ids below `objective.vocab_size`.
        first: index of the first column in the vocabulary.
    """

    def __init__(self, logits: Tensor, labels: Tensor, first: int, objective: Objective) -> None:
        self.objective = objective
        columns = logits.shape[1]
        self.logits = logits
        self.real = max(0, min(columns, objective.vocab_size - first))  # the rest is padding
        self.fused = fuses(logits.device) and not objective.half
        wide = objective.half or logits.dtype in (torch.float32, torch.float64)
        self.in_place = wide and not objective.transforms
        self.dtype = logits.dtype if wide else torch.float32
        self.inside = (labels >= first) & (labels < first + self.real)
        self.target = (labels - first).masked_fill(~self.inside, 0).unsqueeze(1)

    def _blocks(self) -> Iterator[tuple[slice, Tensor]]:
        """Yields blocks of rows of the logits without padding, as views or as converted copies."""
        row = max(1, self.logits.shape[1] * self.dtype.itemsize)
        rows = max(1, BLOCK_BYTES.get(self.logits.device.type, LARGE_BLOCK_BYTES) // row)
        for start in range(0, self.logits.shape[0], rows):
            run = slice(start, start + rows)
            block = self.logits[run, : self.real]
            if not self.in_place:
                block = block.to(self.dtype, copy=True)
                block = scaled_and_capped(block, self.objective.scale, self.objective.cap)
            yield run, block

    def statistics(self) -> Tensor:
        """Returns the statistics (3 or 4, tokens) of this rank's columns without padding.

        The rows are the maximum, Σ exp(z − maximum), z of the label (0 if it is on another rank)
        and, with label smoothing, Σ z.
        """
        if self.fused and self.real:
            smooths = self.objective.label_smoothing > 0
            given = self.logits, self.target, self.inside, self.real, smooths
            out = vocabulary_statistics(*given, self.objective.scale, self.objective.cap)
            self.maximum = out[0]
            return out
        rows = 4 if self.objective.label_smoothing else 3
        out = self.logits.new_zeros(rows, self.logits.shape[0], dtype=self.dtype)
        if not self.real:
            out[0] = -torch.inf
            self.maximum = out[0]
            return out
        for run, block in self._blocks():
            maximum = torch.amax(block, 1, out=out[0, run])
            out[2, run] = block.gather(1, self.target[run]).squeeze(1)
            if self.objective.label_smoothing:
                torch.sum(block, 1, out=out[3, run])
            torch.sum(block.sub_(maximum.unsqueeze(1)).exp_(), 1, out=out[1, run])
        out[2].masked_fill_(~self.inside, 0.0)
        self.maximum = out[0]
        return out

    def losses(self, ranks: Tensor) -> Tensor:
        """Returns the losses (tokens,), given all ranks' statistics (ranks, 3 or 4, tokens)."""
        maxima = ranks[:, 0]
        sums = ranks[:, 1]
        targets = ranks[:, 2]
        highest = maxima.amax(0)
        total = (sums * torch.exp(maxima - highest)).sum(0)
        self.log_sum = highest + torch.log(total)
        smoothing, z_loss = self.objective.label_smoothing, self.objective.z_loss
        if not smoothing and not z_loss:
            return self.log_sum - targets.sum(0)
        losses = self.log_sum - (1.0 - smoothing) * targets.sum(0)
        if smoothing:
            losses -= smoothing / self.objective.vocab_size * ranks[:, 3].sum(0)
        return losses + z_loss * self.log_sum.square()

    def gradient(self, grad: Tensor) -> Tensor:
        """Overwrites the logits with their gradient, given the gradient of the losses (tokens,)."""
        smoothing, z_loss = self.objective.label_smoothing, self.objective.z_loss
        of_softmax = grad * (1.0 + 2.0 * z_loss * self.log_sum) if z_loss else grad
        at_target = (grad * self.inside).mul_(smoothing - 1.0).unsqueeze(1)
        spread = (grad * (smoothing / self.objective.vocab_size)).unsqueeze(1)
        if self.fused:
            logits_to_gradient(
                self.logits,
                self.log_sum.unsqueeze(1),
                of_softmax.unsqueeze(1),
                at_target,
                self.target,
                spread if smoothing else None,
                self.real,
                self.objective.scale,
                self.objective.cap,
            )
            return self.logits
        # Logits that are changed in place are exp(z − maximum) by now; this factor makes them the
        # softmax.
        factor = of_softmax
        if self.in_place:
            factor = of_softmax * torch.exp(self.maximum - self.log_sum)
        for run, block in self._blocks() if self.real else ():
            slope = None
            if self.objective.transforms:
                slope = slope_of(block, self.objective.scale, self.objective.cap)
            if not self.in_place:
                block.sub_(self.log_sum[run].unsqueeze(1)).exp_()
            block.mul_(factor[run].unsqueeze(1))
            if smoothing:
                block.sub_(spread[run])
            block.scatter_add_(1, self.target[run], at_target[run].to(block.dtype))
            if slope is not None:
                block.mul_(slope)
            if not self.in_place:
                self.logits[run, : self.real] = block
        self.logits[:, self.real :] = 0.0
        return self.logits


@dataclass(frozen=True)
class HeadLoss:
    """Computes an LM head that is split over `group`, and its losses, in chunks of tokens.

    For each chunk it computes the logits, statistics and losses, then the gradients in place of the
    logits and the two GEMMs of the backward, before the next chunk reuses the memory. If the
    backward recomputed the logits, a fourth GEMM would be needed; if they were kept, they would
    take memory for all tokens. Liger Kernel (Hsu et al. 2024, §3.2) does the same in fused kernels
    on one device.

    Attributes:
        sp: whether hidden states are (b, s/tp, h) and are gathered first.
        gather_logits: whether every rank gathers all logits of a chunk, as with
            `model.parallel_output=false`.
        chunk_tokens: number of tokens in a chunk; None chooses it by the memory of the logits.
    """

    objective: Objective
    group: Group = SINGLE
    sp: bool = False
    gather_logits: bool = False
    chunk_tokens: int | None = None

    def train(
        self, x: Tensor, table: Tensor, labels: Tensor, loss_mask: Tensor, loss_scale: Tensor
    ) -> Tensor:
        """Returns the sum of the unmasked losses; the backward must start with `loss_scale`.

        The forward already adds the table's gradient to its bucket; the backward registers it as
        ready.

        Args:
            x: (b, s, h), or (b, s/tp, h) under sequence parallelism.
            table: (rows of the padded vocabulary / tp, h).
            labels, loss_mask: (b, s).
            loss_scale: the gradient of the sum with which the backward will start.

        Raises:
            RuntimeError: the backward starts with another gradient; only checked on a CPU.
        """
        return _HeadLoss.apply(x, table, labels, loss_mask, loss_scale, self)

    @torch.no_grad()
    def evaluate(self, x: Tensor, table: Tensor, labels: Tensor, loss_mask: Tensor) -> Tensor:
        """Returns the sum of the unmasked cross-entropies, without label smoothing and z-loss."""
        of = replace(self.objective, label_smoothing=0.0, z_loss=0.0, half=False)
        plain = replace(self, objective=of)
        return plain.run(x, table, labels, loss_mask)[0]

    def run(
        self,
        x: Tensor,
        table: Tensor,
        labels: Tensor,
        loss_mask: Tensor,
        loss_scale: Tensor | None = None,
        of_x: bool = True,
        of_table: bool = True,
    ) -> tuple[Tensor, Tensor | None, Tensor | None]:
        """Returns the sum of the unmasked losses, and the gradients of x and of the table.

        The gradients are None without a `loss_scale`. The table's gradient is also None if it went
        to a bucket. `of_x` and `of_table`: whether x and the table need gradients; a frozen table
        and the result of frozen layers do not.
        """
        group, sp = self.group, self.sp and self.group.size > 1
        full = all_gather_sequence(x, group) if sp else x
        tokens, labels = full.flatten(0, -2), labels.flatten()
        mask = loss_mask.flatten().to(torch.promote_types(x.dtype, torch.float32))
        losses, chunks = torch.empty_like(mask), self._chunks(tokens, table)
        if loss_scale is None:
            for chunk in chunks:
                self._write_losses(losses[chunk], tokens[chunk], table, labels[chunk])
            return losses.mul_(mask).sum(), None, None
        main_grad = state_of(table).main_grad if of_table else None
        grad_table = main_grad
        if of_table and main_grad is None:
            accum_dtype = torch.promote_types(table.dtype, torch.float32)
            grad_table = torch.zeros_like(table, dtype=accum_dtype)
        grad_x = torch.empty_like(tokens) if of_x else None
        reduced, work = grad_x, None
        factor = mask * loss_scale.to(mask.dtype)
        rows = table.shape[0]
        for chunk in chunks:
            grad = self._write_losses(losses[chunk], tokens[chunk], table, labels[chunk]).gradient(
                factor[chunk]
            )
            if grad.shape[1] > rows:  # the logits of all ranks were gathered
                grad = grad.narrow(1, rows * group.index, rows)
            if grad_x is not None and accelerator.is_on_accelerator(grad):
                torch.mm(grad, table, out=grad_x[chunk])
            elif grad_x is not None:  # on a CPU not every matmul can write into `grad_x`
                grad_x[chunk] = matmul(grad, table)
            if grad_x is not None and chunk is chunks[-1]:
                # The reduction runs at the same time as the last weight-gradient GEMM.
                whole = reduced = grad_x.view_as(full)
                if sp:
                    reduced, work = collectives.reduce_scatter_async(sequence_first(whole), group)
                else:
                    work = collectives.all_reduce_async(whole, group)
            if grad_table is not None:
                add_matmul(grad_table, grad, tokens[chunk])
            del grad  # the next chunk's logits can then reuse its memory
        if work is not None:
            work.wait()
        if reduced is not None and sp:
            reduced = reduced.transpose(0, 1).contiguous()
        if grad_table is not None:
            grad_table = grad_table.to(table.dtype) if main_grad is None else None
        return losses.mul_(mask).sum(), reduced, grad_table

    def _chunks(self, tokens: Tensor, table: Tensor) -> list[slice]:
        columns = table.shape[0] * (self.group.size if self.gather_logits else 1)
        counts = loss_chunks(
            tokens.shape[0],
            columns,
            self.chunk_tokens,
            item=tokens.element_size(),
            on_accelerator=accelerator.is_on_accelerator(tokens),
        )
        sizes = [*counts.elements()]
        return [slice(e - size, e) for size, e in zip(sizes, accumulate(sizes), strict=True)]

    def _write_losses(self, out: Tensor, x: Tensor, table: Tensor, labels: Tensor) -> ChunkLoss:
        """Writes the losses of a chunk (tokens,) into `out`, with one collective."""
        group, first = self.group, table.shape[0] * self.group.index
        logits = matmul(x, table.t())
        if self.gather_logits and group.size > 1:
            parts = collectives.all_gather(logits.unsqueeze(0), group)
            logits, first = torch.cat(parts.unbind(0), dim=1), 0
            del parts
        loss = ChunkLoss(logits, labels, first, self.objective)
        ranks = loss.statistics().unsqueeze(0)
        if not self.gather_logits:
            ranks = collectives.all_gather(ranks, group)
        out.copy_(loss.losses(ranks))
        return loss


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
        wanted = x.requires_grad, table.requires_grad
        loss, *ctx.gradients = head.run(x, table, labels, loss_mask, loss_scale, *wanted)
        ctx.table = table
        ctx.loss_scale = loss_scale
        return loss

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple:
        if grad.device.type == "cpu" and float(grad) != float(ctx.loss_scale.to(grad.dtype)):
            raise RuntimeError(
                f"the backward of the loss starts with {float(grad)}, but its gradients were made "
                f"for loss_scale={float(ctx.loss_scale)}"
            )
        grad_x, grad_table = ctx.gradients
        if grad_table is None and ctx.needs_input_grad[1]:
            state_of(ctx.table).register_grad_ready()
        return grad_x, grad_table, None, None, None, None
