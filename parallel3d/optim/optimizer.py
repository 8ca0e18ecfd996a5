"""AdamW and SGD on the flat views of the gradient buckets, with global-norm clipping."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from parallel3d import collectives
from parallel3d.config import OptimConfig
from parallel3d.data_parallel.buckets import Bucket, Segment
from parallel3d.topology.process_groups import Group

NORM_PIECE = 1 << 15  # elements whose squares are added in the gradients' own type


@dataclass
class FlatGroup:
    """Segments that are stepped alike, with their optimizer state: flat tensors side by side.

    `moments` are AdamW's two running means, or SGD's momentum buffer (none without momentum);
    `steps` is the kernels' own count, a scalar for each segment.
    """

    weight_decay: float
    params: list[Tensor]
    grads: list[Tensor]
    moments: tuple[list[Tensor], ...]
    steps: list[Tensor]

    @classmethod
    def of(cls, segments: list[Segment], weight_decay: float, moments: int) -> FlatGroup:
        params = [s.param for s in segments]
        zeros = tuple([torch.zeros_like(p) for p in params] for _ in range(moments))
        steps = [torch.zeros((), dtype=torch.float32, device=p.device) for p in params]
        return cls(weight_decay, params, [s.grad for s in segments], zeros, steps)


class Optimizer:
    """Steps the parameters of one rank.

    Each bucket segment is one flat tensor to PyTorch's fused kernels: the update is elementwise, so
    the result is the same and a step is a handful of calls. The kernels are called directly:
    `torch.optim`'s classes bring in the compiler, a second of start-up on every rank.

    Args:
        tp: decides which rank counts replicated parameters in the norm (see `counts_in_norm`).
        model_group: the tp × pp ranks of one replica, over which the norm is summed.
    """

    def __init__(
        self, optim: OptimConfig, buckets: list[Bucket], tp: Group, model_group: Group
    ) -> None:
        self.optim, self.tp, self.model_group = optim, tp, model_group
        self.segments = [s for bucket in buckets for s in bucket.segments]
        moments = 2 if optim.name == "adamw" else int(optim.momentum > 0)
        kinds = [(True, optim.weight_decay), (False, 0.0)]
        alike = [([s for s in self.segments if s.decays is d], decay) for d, decay in kinds]
        self.groups = [FlatGroup.of(some, decay, moments) for some, decay in alike if some]
        self.is_first_step = True

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
        for group in self.groups:
            if self.optim.name == "adamw":
                self._adamw(group, learning_rate)
            else:
                self._sgd(group, learning_rate)
        self.is_first_step = False

    def _adamw(self, group: FlatGroup, learning_rate: float) -> None:
        """Loshchilov and Hutter 2019, algorithm 2."""
        torch._foreach_add_(group.steps, 1)
        torch._fused_adamw_(
            group.params,
            group.grads,
            *group.moments,
            [],
            group.steps,
            lr=learning_rate,
            beta1=self.optim.beta1,
            beta2=self.optim.beta2,
            weight_decay=group.weight_decay,
            eps=self.optim.eps,
            amsgrad=False,
            maximize=False,
        )

    def _sgd(self, group: FlatGroup, learning_rate: float) -> None:
        """With momentum as torch.optim.SGD has it: the buffer starts as the first gradient."""
        torch._fused_sgd_(
            group.params,
            group.grads,
            *(group.moments or ([],)),
            weight_decay=group.weight_decay,
            momentum=self.optim.momentum,
            lr=learning_rate,
            dampening=0.0,
            nesterov=False,
            maximize=False,
            is_first_step=self.is_first_step,
        )


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
