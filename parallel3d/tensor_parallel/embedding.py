"""The word embedding: rows split over the tensor group, or replicated on every rank."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from parallel3d.comm.group import Group
from parallel3d.device.accelerator import is_on_accelerator
from parallel3d.parameters.sharding import (
    Initializer,
    ParameterSpec,
    ShardSpec,
    state_of,
)
from parallel3d.tensor_parallel.mappings import reduce_from_tensor_parallel, scatter_to_sequence


class _Lookup(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, ids: Tensor, weight: Tensor, deterministic: bool) -> Tensor:
        outside = (ids < 0) | (ids >= weight.shape[0])
        ids = ids.masked_fill(outside, 0)
        ctx.save_for_backward(ids, outside, weight)
        ctx.deterministic = deterministic
        return F.embedding(ids, weight).masked_fill_(outside.unsqueeze(-1), 0.0)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[None, Tensor | None, None]:
        ids, outside, weight = ctx.saved_tensors
        grad = grad.masked_fill(outside.unsqueeze(-1), 0.0).flatten(0, -2)
        state = state_of(weight)
        if state.main_grad is None:
            table = torch.zeros_like(weight)
            add_rows(table, ids.flatten(), grad, ctx.deterministic)
            return None, table, None
        # Straight into the bucket: autograd would allocate a dense table per micro-batch.
        rows = grad.to(state.main_grad.dtype)
        add_rows(state.main_grad, ids.flatten(), rows, ctx.deterministic)
        state.register_grad_ready()
        return None, None, None


def look_up(ids: Tensor, weight: Tensor, deterministic: bool) -> Tensor:
    """Returns rows `ids` (b, s) of a table (rows, hidden) as (b, s, hidden).

    Ids outside of [0, rows) give zeros and no gradient.

    Args:
        deterministic: other ranks compute the same gradient, and no reduction makes it equal
            afterwards (see `add_rows`).
    """
    return _Lookup.apply(ids, weight, deterministic)


def add_rows(table: Tensor, ids: Tensor, rows: Tensor, deterministic: bool) -> None:
    """Adds rows[i] to table[ids[i]]; `deterministic`: with equal bits for equal inputs.

    On accelerators the usual kernel adds by atomic operations in any order; the other sorts the
    ids.
    """
    if deterministic and is_on_accelerator(table):
        table.index_put_((ids,), rows, accumulate=True)
    else:
        table.index_add_(0, ids, rows)


def word_embedding_parameter(
    vocab_size: int,
    padded: int,
    hidden: int,
    *,
    name: str,
    std: float,
    group: Group,
    replicated: bool,
    init: Initializer,
    tied_lm_head: bool = False,
    uses: int = 1,
) -> nn.Parameter:
    rows = padded if replicated else padded // group.size
    start = 0 if replicated else rows * group.index
    real = max(0, min(rows, vocab_size - start))
    shards: tuple[ShardSpec, ...] = ()
    if real:
        shards = (ShardSpec(name, (vocab_size, hidden), (start, 0), (real, hidden), std=std),)
    whole = replicated or group.size == 1
    return init.parameter(ParameterSpec((rows, hidden), shards, whole, tied_lm_head, uses))


class VocabParallelEmbedding(nn.Module):
    """Looks token ids up in a table whose rows are split over `group` (Shoeybi et al. 2019 §3).

    With `replicated` every rank holds the table and nothing is sent; under sequence parallelism
    each rank then looks up its own part of the sequence.

    Shapes: (b, s) → (b, s, hidden), or (b, s/tp, hidden) under sequence parallelism.
    """

    def __init__(self, weight: nn.Parameter, *, group: Group, sp: bool, replicated: bool) -> None:
        super().__init__()
        self.weight, self.group, self.sp = weight, group, sp and group.size > 1
        self.replicated = replicated

    def forward(self, ids: Tensor) -> Tensor:
        if self.replicated:
            if self.sp:
                ids = ids.chunk(self.group.size, dim=1)[self.group.index]
            # Under sequence parallelism the gradients are summed over tp, so they end up equal.
            return look_up(ids, self.weight, self.group.size > 1 and not self.sp)
        first = self.group.index * self.weight.shape[0]
        partial = look_up(ids - first, self.weight, False)
        if self.sp:
            return scatter_to_sequence(partial, self.group)
        return reduce_from_tensor_parallel(partial, self.group)
