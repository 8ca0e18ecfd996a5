"""The word embedding, whose rows are split over the tensor group or replicated on every rank."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, Self

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from parallel3d.blueprint.buckets import LOOKUP_TOKENS
from parallel3d.comm.group import GroupLike
from parallel3d.device.accelerator import is_on_accelerator
from parallel3d.errors import UserError
from parallel3d.parameters.declaration import Dimension, Held, vocabulary_table
from parallel3d.parameters.initializer import Initializer
from parallel3d.parameters.spec import ParameterSpec
from parallel3d.parameters.state import state_of
from parallel3d.tensor_parallel.layers import ShardedModule
from parallel3d.tensor_parallel.mappings import (
    copy_to_tensor_parallel,
    reduce_from_tensor_parallel,
    scatter_to_sequence,
)


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
        state = state_of(weight)
        # The gradient goes directly to its bucket: autograd would allocate a table for each call.
        table = torch.zeros_like(weight) if state.main_grad is None else state.main_grad
        parts = (
            x.split(LOOKUP_TOKENS) for x in (grad.flatten(0, -2), ids.flatten(), outside.flatten())
        )
        for rows, numbers, without in zip(*parts, strict=True):
            rows = rows.masked_fill(without.unsqueeze(-1), 0.0).to(table.dtype)
            add_rows(table, numbers, rows, ctx.deterministic)
        if state.main_grad is None:
            return None, table, None
        state.register_grad_ready()
        return None, None, None


def look_up(ids: Tensor, weight: Tensor, deterministic: bool) -> Tensor:
    """Returns the rows `ids` (b, s) of a table (rows, hidden) as (b, s, hidden).

    Ids outside of [0, rows) give zeros and no gradient.

    Args:
        deterministic: whether the gradient must be bit-identical on ranks that all compute it,
            because no reduction makes it equal afterwards (see `add_rows`).
    """
    return _Lookup.apply(ids, weight, deterministic)


def add_rows(table: Tensor, ids: Tensor, rows: Tensor, deterministic: bool) -> None:
    """Adds rows[i] to table[ids[i]]; if `deterministic`, equal inputs give equal bits.

    On accelerators the usual kernel adds with atomic operations in any order. The deterministic
    kernel sorts the ids.
    """
    if deterministic and is_on_accelerator(table):
        table.index_put_((ids,), rows, accumulate=True)
    else:
        table.index_add_(0, ids, rows)


class VocabParallelEmbedding(ShardedModule):
    """Splits the rows of an `nn.Embedding` over `group` (Shoeybi et al. 2019 §3).

    Args:
        padded: number of rows including the padding, which stays zero; None adds no padding.
        replicated: whether every rank holds the whole table, so that the forward sends nothing.
            Under sequence parallelism each rank then looks up its own part of the sequence.
        sequence_parallel: whether the result is this rank's part of the sequence.
        sum_partial_gradients: as in `RowParallelLinear`, for a replicated table.
        uses: how many times a forward reads the table; a tied head adds one.
        group, seed, name, std, init, held: as in `ColumnParallelLinear`.

    Shapes: (…) int64, equal on all ranks → (…, embedding_dim); with sequence parallelism (b, s) →
    (b, s/tp, embedding_dim).

    Raises:
        UserError: num_embeddings is not a multiple of the ranks, or a seed has no name.
        IndexError: an id is outside of the table; raised on every rank. On an accelerator such ids
            give zeros instead, because a check would make the host wait.
    """

    weight: nn.Parameter

    def __init__(
        self,
        num_embeddings: int,
        embedding_dim: int,
        group: GroupLike = None,
        *,
        padded: int | None = None,
        replicated: bool = False,
        sequence_parallel: bool = False,
        sum_partial_gradients: bool = True,
        uses: int = 1,
        seed: int | None = None,
        name: str = "",
        std: float = 0.02,
        init: Initializer | None = None,
        held: Held | None = None,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__(group, name)
        self.num_embeddings = num_embeddings
        self.embedding_dim = embedding_dim
        self.replicated = replicated
        self.uses = uses
        self.padded = num_embeddings if padded is None else padded
        key = "num_embeddings" if padded is None else "padded"
        ranks = 1 if replicated else self.group.size
        self.check_divides(key, self.padded, ranks)
        self.sp = sequence_parallel and self.group.size > 1
        self.sums_table = sum_partial_gradients and replicated and self.sp
        table = vocabulary_table(
            f"{name}.weight",
            num_embeddings,
            self.padded,
            Dimension("hidden", embedding_dim),
            std,
            replicated=replicated,
        )
        self.held = held or {"weight": (table,)}
        init = init or self.initializer(seed, device, dtype)
        self.register_shards(
            init or nn.Embedding(num_embeddings, embedding_dim, device=device, dtype=dtype)
        )

    def specs(self, index: int) -> dict[str, ParameterSpec]:
        return {key: replace(s, uses=self.uses) for key, s in super().specs(index).items()}

    @classmethod
    def of(cls, held: Held, **options: Any) -> Self:
        """Returns the embedding of a declared table; `options` are the other arguments."""
        (table,) = held["weight"]
        rows, hidden = table.dims
        options |= {"padded": rows.padded, "replicated": table.split is None}
        return cls(rows.size, hidden.size, held=held, **options)

    @classmethod
    def from_embedding(cls, embedding: nn.Embedding, group: GroupLike = None) -> Self:
        """Returns this rank's rows of a table that is equal on all ranks.

        Raises UserError for padding_idx, max_norm, scale_grad_by_freq and sparse.
        """
        for key in ("padding_idx", "max_norm", "scale_grad_by_freq", "sparse"):
            value = getattr(embedding, key)
            if value is not None and value is not False:
                raise UserError(
                    f"VocabParallelEmbedding.from_embedding: {key}={value} is not supported; give "
                    f"an embedding without {key}"
                )
        rows, width = embedding.weight.shape
        layer = cls(rows, width, group, device="meta", dtype=embedding.weight.dtype)
        return layer.take_shards_of(embedding)

    def forward(self, ids: Tensor) -> Tensor:
        if ids.dim() == 0:
            return self.forward(ids.unsqueeze(0)).squeeze(0)
        if ids.numel() and not is_on_accelerator(ids):
            low, high = ids.aminmax()
            if low < 0 or high >= self.num_embeddings:
                bad = int(low if low < 0 else high)
                raise IndexError(f"id {bad} must be in 0 … {self.num_embeddings - 1}")
        if self.sp:
            self.check_sequence(ids, 2, self.group.size)
        if self.replicated:
            table: Tensor = self.weight
            if self.sums_table:
                table = copy_to_tensor_parallel(table, self.group)
            if self.sp:
                ids = ids.chunk(self.group.size, dim=1)[self.group.index]
            # Under sequence parallelism a sum over tp makes the gradients equal on all ranks.
            return look_up(ids, table, self.group.size > 1 and not self.sp)
        first = self.group.index * self.weight.shape[0]
        partial = look_up(ids - first, self.weight, False)
        if self.sp:
            return scatter_to_sequence(partial, self.group)
        return reduce_from_tensor_parallel(partial, self.group)

    def extra_repr(self) -> str:
        return f"{self.num_embeddings}, {self.embedding_dim}, 1/{self.group.size} of it here"
