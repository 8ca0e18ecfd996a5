"""Communication of tensor and sequence parallelism in the forward and the backward.

Shoeybi et al. 2019 (Megatron-LM, §3) define f and g, and Korthikanti et al. 2022 (§4.2.2) define
the corresponding pair for sequence parallelism. For activations (batch, sequence, hidden) the
linear layers' nodes contain f and the gather of the sequence (see `linear_ops`).

| function                      | forward                   | backward                  |
|-------------------------------|---------------------------|---------------------------|
| copy_to_tensor_parallel (f)   | identity                  | all-reduce                |
| copy_to_replicas              | identity                  | all-reduce of shared rows |
| reduce_from_tensor_parallel (g) | all-reduce              | identity                  |
| scatter_to_sequence           | reduce-scatter            | all-gather                |
| gather_from_vocabulary        | all-gather of last dim    | this rank's part          |
| gather_heads                  | all-gather, ranks first   | reduce-scatter            |
| rows_of_replicated            | this rank's rows          | all rows (see there)      |

The backward of a gather depends on the use of its result. After `gather_heads` the ranks do
different work, so their gradients differ and are summed. After `gather_from_vocabulary` all ranks
do the same work, so their gradients are equal, and a sum would multiply them by tp.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, TypeAlias

import torch
from torch import Tensor

from parallel3d.comm import collectives
from parallel3d.comm.group import Group
from parallel3d.parameters.spec import ParameterSpec

Mapping: TypeAlias = Callable[[Tensor], Tensor]


def sequence_first(x: Tensor) -> Tensor:
    return x.transpose(0, 1).contiguous()


def all_gather_sequence(x: Tensor, group: Group) -> Tensor:
    """All-gathers (b, s/tp, h) to (b, s, h)."""
    return collectives.all_gather(sequence_first(x), group).transpose(0, 1).contiguous()


def reduce_scatter_sequence(x: Tensor, group: Group) -> Tensor:
    return collectives.reduce_scatter(sequence_first(x), group).transpose(0, 1).contiguous()


class _Pair(torch.autograd.Function):
    """Runs one function in the forward, and another one on the gradient in the backward."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, forward: Mapping, backward: Mapping) -> Tensor:
        ctx.run = backward
        y = forward(x)
        if y is x:
            ctx.mark_dirty(x)
        return y

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        return ctx.run(grad), None, None


def _identity(x: Tensor) -> Tensor:
    return x.view_as(x)  # autograd does not allow a node to return its input


def _gather(x: Tensor, group: Group) -> Tensor:
    """All-gathers x (…) to (tp, …)."""
    return collectives.all_gather(x.contiguous().unsqueeze(0), group)


def copy_to_tensor_parallel(x: Tensor, group: Group) -> Tensor:
    """Passes a replicated tensor to work that differs by rank; its gradient is all-reduced (f)."""

    def backward(grad: Tensor) -> Tensor:
        return collectives.all_reduce(grad.clone(memory_format=torch.contiguous_format), group)

    return _Pair.apply(x, _identity, backward) if group.size > 1 else x


def copy_to_replicas(parameter: Tensor, spec: ParameterSpec, group: Group) -> Tensor:
    """Returns the parameter; its rows' gradients are summed over the ranks that share the rows."""

    def backward(grad: Tensor) -> Tensor:
        whole = grad.clone(memory_format=torch.contiguous_format)
        flat = whole.view(-1)
        shared: dict[int, list[Tensor]] = {}
        for tp_replicas, first, end in spec.runs(0, flat.numel()):
            shared.setdefault(tp_replicas, []).append(flat[first:end])
        sum_over_replicas(shared, group)
        return whole

    return _Pair.apply(parameter, _identity, backward)


def reduce_from_tensor_parallel(x: Tensor, group: Group) -> Tensor:
    """All-reduces the ranks' partial results in place (g); the gradient passes unchanged.

    `x` must be the result of a GEMM or a look-up that nothing else reads.
    """
    if group.size == 1:
        return x
    return _Pair.apply(x, lambda x: collectives.all_reduce(x, group), lambda grad: grad)


def scatter_to_sequence(x: Tensor, group: Group) -> Tensor:
    if group.size == 1:
        return x
    return _Pair.apply(
        x, partial(reduce_scatter_sequence, group=group), partial(all_gather_sequence, group=group)
    )


def gather_from_vocabulary(x: Tensor, group: Group) -> Tensor:
    """All-gathers x (..., v/tp) to (..., v), for work that is the same on all ranks."""

    def forward(x: Tensor) -> Tensor:
        return torch.cat(_gather(x, group).unbind(0), dim=-1)

    def backward(grad: Tensor) -> Tensor:
        return grad.chunk(group.size, dim=-1)[group.index].contiguous()

    return _Pair.apply(x, forward, backward) if group.size > 1 else x


def gather_heads(x: Tensor, group: Group) -> Tensor:
    """All-gathers each rank's heads (b, s, n) to (tp, b, s, n), for work that differs by rank."""

    def backward(grad: Tensor) -> Tensor:
        return collectives.reduce_scatter(grad, group).squeeze(0)

    return _Pair.apply(x, partial(_gather, group=group), backward)


def rows_of_replicated(weight: Tensor, group: Group, partial_sums: bool) -> Tensor:
    """Returns this rank's rows of a replicated table, for a head split over the vocabulary.

    All uses of a replicated parameter must give the same kind of gradient. Usually each rank has
    the whole gradient, so the backward gathers all rows. With `partial_sums` the gradients are
    summed over tp after the backward, so the backward fills the rows of other ranks with zeros.
    """
    shape = weight.shape

    def backward(grad: Tensor) -> Tensor:
        if not partial_sums:
            return collectives.all_gather(grad, group)
        full = grad.new_zeros(shape)
        full.chunk(group.size)[group.index].copy_(grad)
        return full

    if group.size == 1:
        return weight
    return _Pair.apply(weight, lambda w: w.chunk(group.size)[group.index], backward)


def sum_over_replicas(gradients: dict[int, list[Tensor]], group: Group) -> None:
    """Sums flat gradients in place; a key is the number of consecutive ranks that share them."""
    shared = {replicas: grads for replicas, grads in gradients.items() if replicas > 1}
    if not shared:
        return
    # Gradients with r replicas form tp/r sets of r consecutive ranks: ranks 0 … r − 1 hold one
    # shard, ranks r … 2r − 1 the next. The buffer has one slot per set. A rank writes its gradients
    # to slot index // r and leaves the other slots zero. So the sum over tp puts the sum over each
    # set into its slot; no set needs a process group, and all replicas get the same bits.
    numel = {r: sum(g.numel() for g in grads) for r, grads in shared.items()}
    slots_numel = [group.size // r * n for r, n in numel.items()]
    flat = next(iter(shared.values()))[0].new_zeros(sum(slots_numel))
    own_slot = {
        r: slots.view(-1, numel[r])[group.index // r]
        for r, slots in zip(numel, flat.split(slots_numel), strict=True)
    }
    for r, grads in shared.items():
        torch.cat(grads, out=own_slot[r])
    collectives.all_reduce(flat, group)
    for r, grads in shared.items():
        for grad, total in zip(grads, own_slot[r].split([g.numel() for g in grads]), strict=True):
            grad.copy_(total)
