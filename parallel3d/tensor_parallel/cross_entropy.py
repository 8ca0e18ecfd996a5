"""Cross-entropy over logits that are split along the vocabulary, never gathered."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from parallel3d import collectives
from parallel3d.topology.process_groups import SINGLE, Group


class _VocabParallelCrossEntropy(torch.autograd.Function):
    """Loss of each token from its rank-local maximum, sum of exponentials and target logit.

    The three numbers of every rank travel in one all-gather, after which each rank combines them
    in the same order: one collective where the usual form takes two or three all-reduces, and
    bit-identical losses on all ranks. The backward is softmax − one-hot of the target where owned.
    """

    @staticmethod
    def forward(ctx: Any, logits: Tensor, labels: Tensor, vocab_size: int, group: Group) -> Tensor:
        rows = logits.shape[-1]
        first = group.index * rows
        real = max(0, min(rows, vocab_size - first))  # padded columns are not looked at
        inside = (labels >= first) & (labels < first + real)
        target = (labels - first).masked_fill(~inside, 0).unsqueeze(-1)
        stats = logits.new_zeros(3, *labels.shape)
        if real:
            maximum = logits[..., :real].amax(-1)
            exps = torch.exp(logits[..., :real] - maximum.unsqueeze(-1))
            stats[0], stats[1] = maximum, exps.sum(-1)
            stats[2] = logits.gather(-1, target).squeeze(-1).masked_fill(~inside, 0.0)
        else:
            exps = logits[..., :0]
            stats[0] = -torch.inf
        ranks = collectives.all_gather(stats.unsqueeze(0), group)  # (tp, 3, ...)
        maxima, sums, targets = ranks.unbind(1)
        highest = maxima.amax(0)
        total = (sums * torch.exp(maxima - highest)).sum(0)
        log_sum = highest + torch.log(total)
        ctx.save_for_backward(exps, torch.exp(stats[0] - log_sum), target, inside)
        ctx.rows = rows
        return log_sum - targets.sum(0)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None]:
        exps, scale, target, inside = ctx.saved_tensors
        real = exps.shape[-1]
        out = exps.new_empty(*exps.shape[:-1], ctx.rows)
        torch.mul(exps, (scale * grad).unsqueeze(-1), out=out[..., :real])
        out[..., real:] = 0.0
        out.scatter_add_(-1, target, -(grad * inside).unsqueeze(-1))
        return out, None, None, None


def vocab_parallel_cross_entropy(
    logits: Tensor, labels: Tensor, vocab_size: int, padded_size: int, group: Group = SINGLE
) -> Tensor:
    """Per-token −log softmax(logits)[label], in fp32 or better.

    Args:
        logits: (..., padded_size/tp), this rank's columns; not modified.
        labels: (...), global token ids below `vocab_size`.
        vocab_size: tokens that exist; columns beyond them never reach the softmax.
        padded_size: columns over all ranks.
        group: the ranks that hold the columns, in order.

    Returns: (...) losses, the same on every rank.

    Raises:
        ValueError: the columns do not add up to `padded_size`, as when gathered logits are handed
            to a group (the loss would grow by log tp, and nothing else would show it).
    """
    if logits.shape[-1] * group.size != padded_size:
        raise ValueError(
            f"{logits.shape[-1]} columns on each of {group.size} ranks are not the "
            f"{padded_size} columns of the padded vocabulary"
        )
    if logits.dtype in (torch.bfloat16, torch.float16):
        logits = logits.float()
    return _VocabParallelCrossEntropy.apply(logits, labels, vocab_size, group)
