"""Computes the cross-entropy of a text whose vocabulary is split, for a user's own model."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from parallel3d.comm import collectives
from parallel3d.comm.group import GroupLike, group_of
from parallel3d.errors import UserError
from parallel3d.models.own_loss import Loss
from parallel3d.tensor_parallel.loss import ChunkLoss, Objective


def vocab_parallel_cross_entropy(
    logits: Tensor,
    labels: Tensor,
    mask: Tensor | None,
    tp: GroupLike,
    *,
    label_smoothing: float = 0.0,
    z_loss: float = 0.0,
    vocab_size: int | None = None,
) -> Loss:
    """Returns the summed cross-entropy of logits whose vocabulary is split over tp; collective.

    No rank gathers the logits: the ranks exchange three or four numbers for each label. The loss of
    one label y is (1 − ε)·(l − z_y) + ε·(l − mean z) + λ·l², with l = log Σ exp z, label smoothing
    ε and the z-loss λ. Statistics and losses are in fp32 or better. Without autograd, as in an
    evaluation, it is the plain cross-entropy.

    With label smoothing or a z-loss, the loss in training has the terms `cross_entropy`, which is
    the plain one, and `z_loss` if there is one.

    Args:
        logits: (…, vocabulary / tp), the columns of this rank, as the head's
            `ColumnParallelLinear(…, gather_output=False)` returns them.
        labels: (…), the ids of all tokens, equal on every rank of tp.
        mask: (…), whether each label counts; None counts all.
        tp: the group over which the vocabulary is split, such as `parallel.tp`.
        label_smoothing, z_loss: ε and λ.
        vocab_size: number of tokens, if further columns only pad the vocabulary.
    """
    group = group_of(tp)
    if logits.shape[:-1] != labels.shape or (mask is not None and mask.shape != labels.shape):
        shapes = f"logits {tuple(logits.shape)}, labels {tuple(labels.shape)}"
        shapes += "" if mask is None else f", mask {tuple(mask.shape)}"
        raise UserError(
            f"vocab_parallel_cross_entropy got {shapes}; labels and mask must have the shape of "
            "logits without its last dimension"
        )
    columns = logits.shape[-1]
    if not torch.is_grad_enabled():
        label_smoothing = z_loss = 0.0
    objective = Objective(vocab_size or columns * group.size, label_smoothing, z_loss)
    counted = torch.ones_like(labels, dtype=torch.bool) if mask is None else mask.bool()
    if labels.device.type == "cpu":  # an accelerator would have to wait for the values
        outside = labels[counted & ((labels < 0) | (labels >= objective.vocab_size))]
        if outside.numel():
            raise UserError(
                f"vocab_parallel_cross_entropy got the label {int(outside[0])}, but labels must be "
                f"from 0 to {objective.vocab_size - 1}; to leave a label out, give a mask"
            )
    given = ChunkLoss(
        logits.detach().clone().flatten(0, -2), labels.flatten(), columns * group.index, objective
    )
    ranks = collectives.all_gather(given.statistics().unsqueeze(0), group)
    weights = counted.flatten().to(ranks.dtype)
    total = _CrossEntropy.apply(logits, given, (given.losses(ranks) * weights).sum(), weights)
    terms: dict[str, Tensor] = {}
    if label_smoothing or z_loss:
        terms["cross_entropy"] = ((given.log_sum - ranks[:, 2].sum(0)) * weights).sum()
    if z_loss:
        terms["z_loss"] = (z_loss * given.log_sum.square() * weights).sum()
    return Loss(total, counted.sum(), terms)


class _CrossEntropy(torch.autograd.Function):
    """Gives the logits their gradient, which the backward computes in the memory of a copy."""

    @staticmethod
    def forward(
        ctx: Any, logits: Tensor, given: ChunkLoss, total: Tensor, weights: Tensor
    ) -> Tensor:
        ctx.given, ctx.weights, ctx.shape = given, weights, logits.shape
        return total.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple:
        given, ctx.given = ctx.given, None  # the memory of its logits becomes their gradient
        if given is None:
            raise RuntimeError(
                "the cross-entropy was differentiated twice: its logits are already overwritten"
            )
        return given.gradient(grad * ctx.weights).view(ctx.shape), None, None, None
