"""AdamW and SGD on the flat views of the gradient buckets, with global-norm clipping."""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn

from parallel3d import collectives
from parallel3d.config import OptimConfig
from parallel3d.data_parallel.buckets import Bucket, Segment
from parallel3d.topology.process_groups import Group

NORM_PIECE = 1 << 15  # elements whose squares are added in the gradients' own type


class Optimizer:
    """Steps the parameters of one rank.

    Each bucket segment is one flat parameter to PyTorch's own optimizers: the update is
    elementwise, so the result is the same and a step is a handful of calls.

    Args:
        tp: decides which rank counts replicated parameters in the norm (see `counts_in_norm`).
        model_group: the tp × pp ranks of one replica, over which the norm is summed.
    """

    def __init__(
        self, optim: OptimConfig, buckets: list[Bucket], tp: Group, model_group: Group
    ) -> None:
        self.optim, self.tp, self.model_group = optim, tp, model_group
        self.segments = [s for bucket in buckets for s in bucket.segments]
        self.flats: list[nn.Parameter] = []
        groups: dict[bool, list[nn.Parameter]] = {True: [], False: []}
        for segment in self.segments:
            flat = nn.Parameter(segment.param)  # shares storage with the bucket
            flat.grad = segment.grad
            self.flats.append(flat)
            groups[segment.decays].append(flat)
        decay = {True: optim.weight_decay, False: 0.0}
        param_groups = [
            {"params": flats, "weight_decay": decay[d]} for d, flats in groups.items() if flats
        ]
        self.torch_optimizer = self._make(optim, param_groups)

    @staticmethod
    def _make(optim: OptimConfig, param_groups: list[dict]) -> torch.optim.Optimizer:
        if optim.name == "sgd":
            return torch.optim.SGD(param_groups, lr=optim.lr, momentum=optim.momentum, fused=True)
        return torch.optim.AdamW(
            param_groups, lr=optim.lr, betas=(optim.beta1, optim.beta2), eps=optim.eps, fused=True
        )

    @torch.no_grad()
    def squared_norm(self) -> Tensor:
        """This rank's share of the squared gradient norm, each distinct parameter once, float64."""
        counted = [s.grad for s in self.segments if counts_in_norm(s, self.tp)]
        if not counted:
            device = self.segments[0].grad.device
            return torch.zeros((), dtype=torch.float64, device=device)
        # In pieces: an fp32 sum over a whole bucket drops its small terms (3e-5 of the norm).
        pieces = [piece for grad in counted for piece in grad.split(NORM_PIECE)]
        return torch.stack(torch._foreach_norm(pieces)).double().square().sum()

    @torch.no_grad()
    def step(self, learning_rate: float, grad_norm: float) -> None:
        """Clips by the global norm and updates the parameters.

        The clip factor is min(1, clip_grad / (norm + 1e-6)), as in torch.nn.utils.
        """
        if self.optim.clip_grad > 0 and math.isfinite(grad_norm):
            factor = self.optim.clip_grad / (grad_norm + 1e-6)
            if factor < 1.0:
                torch._foreach_mul_([s.grad for s in self.segments], factor)
        for group in self.torch_optimizer.param_groups:
            group["lr"] = learning_rate
        self.torch_optimizer.step()


def counts_in_norm(segment: Segment, tp: Group) -> bool:
    """Sharded parameters count on every rank, replicated ones on tp rank 0, a tied copy never."""
    return not segment.tied_copy and (not segment.replicated or tp.index == 0)


@torch.no_grad()
def sum_partial_gradients(buckets: list[Bucket], tp: Group) -> None:
    """Adds, under sequence parallelism, the gradients of replicated parameters over tp.

    Norms, biases after row-parallel layers and positions saw this rank's tokens alone
    (Korthikanti et al. 2022 §4.2.2). One all-reduce for all of them.
    """
    partial = [s.grad for b in buckets for s in b.segments if s.replicated]
    if tp.size == 1 or not partial:
        return
    flat = collectives.all_reduce(torch.cat(partial), tp)
    for grad, total in zip(partial, flat.split([g.numel() for g in partial]), strict=True):
        grad.copy_(total)


@torch.no_grad()
def sum_tied_gradients(table_grad: Tensor | None, embedding: Group) -> None:
    """Adds the two gradients of a tied table that first and last stage hold (Megatron-LM's tie)."""
    if table_grad is not None and embedding.size > 1:
        collectives.all_reduce(table_grad, embedding)
