"""Implements the forms of tensor parallelism that docs/tensor_parallel.md compares, in few lines
each.

Every rank has the whole weights and takes its part of them, so the sum over the ranks of the whole
weights' gradients equals one process's gradients. x is (b, s, h), equal on all ranks.
"""

from __future__ import annotations

import math
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from parallel3d.comm import collectives
from parallel3d.comm.group import Group
from parallel3d.tensor_parallel.linear_ops import linear_node

HEADS = 4
Weights = tuple[Tensor, ...]


def gathered(x: Tensor, dim: int, group: Group) -> Tensor:
    return collectives.all_gather(x.movedim(dim, 0).contiguous(), group).movedim(0, dim)


def scattered(x: Tensor, dim: int, group: Group) -> Tensor:
    return collectives.reduce_scatter(x.movedim(dim, 0).contiguous(), group).movedim(0, dim)


def own(x: Tensor, dim: int, group: Group) -> Tensor:
    return x.chunk(group.size, dim)[group.index]


def summed(x: Tensor, group: Group) -> Tensor:
    return collectives.all_reduce(x.clone(memory_format=torch.contiguous_format), group)


def untouched(x: Tensor, *_: Any) -> Tensor:
    return x


# Pairs of forward and backward: one transforms a value, the other its gradient.
MOVES = {
    "f": (untouched, lambda g, dim, group: summed(g, group)),
    "g": (lambda x, dim, group: summed(x, group), untouched),
    "gather for split work": (gathered, scattered),
    "gather for equal work": (gathered, own),
    "scatter": (scattered, gathered),
    "own part": (own, gathered),
}


class _Move(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, name: str, dim: int, group: Group) -> Tensor:
        ctx.words = name, dim, group
        return MOVES[name][0](x, dim, group).clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple:
        name, dim, group = ctx.words
        return MOVES[name][1](grad, dim, group), None, None, None


def move(name: str, x: Tensor, group: Group, dim: int = -1) -> Tensor:
    return _Move.apply(x, name, dim, group)


def _mlp(x: Tensor, weights: Weights, group: Group, sp: int | None) -> Tensor:
    a, b = weights
    hidden = F.gelu(linear_node("column", x, own(a, 0, group), None, group, sp))
    return linear_node("row", hidden, own(b, 1, group).contiguous(), None, group, sp)


def mlp_pair(x: Tensor, weights: Weights, group: Group) -> Tensor:
    """Uses the layers of the transformer."""
    return _mlp(x, weights, group, None)


def mlp_sequence(x: Tensor, weights: Weights, group: Group) -> Tensor:
    """Computes an MLP; x and the result are this rank's part of the sequence."""
    return _mlp(x, weights, group, 1)


def mlp_gathered(x: Tensor, weights: Weights, group: Group) -> Tensor:
    a, b = weights
    hidden = F.gelu(F.linear(move("f", x, group), own(a, 0, group)))
    hidden = move("gather for split work", hidden, group)
    return move("gather for equal work", F.linear(hidden, own(b, 0, group)), group)


def mlp_rows_first(x: Tensor, weights: Weights, group: Group) -> Tensor:
    a, b = weights
    parts = F.linear(move("own part", x, group), own(a, 1, group))
    hidden = F.gelu(move("g", parts, group))
    return move("g", F.linear(move("own part", hidden, group), own(b, 1, group)), group)


def attend(q: Tensor, k: Tensor, v: Tensor, heads: int) -> Tensor:
    """Computes causal attention over (b, s, heads · d)."""
    q, k, v = (t.unflatten(-1, (heads, -1)).transpose(1, 2) for t in (q, k, v))
    return F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2)


def attention_heads(x: Tensor, weights: Weights, group: Group, sp: bool = False) -> Tensor:
    """Uses the layers of the transformer: one GEMM for q, k and v."""
    *qkv, out = weights
    mine, chunks = torch.cat([own(w, 0, group) for w in qkv]), 1 if sp else None
    q, k, v = linear_node("column", x, mine, None, group, chunks).chunk(3, -1)
    heads = attend(q, k, v, HEADS // group.size)
    return linear_node("row", heads, own(out, 1, group).contiguous(), None, group, chunks)


def attention_sequence(x: Tensor, weights: Weights, group: Group) -> Tensor:
    return attention_heads(x, weights, group, sp=True)


def attention_gathered(x: Tensor, weights: Weights, group: Group) -> Tensor:
    """Every rank has all of q, k and v, and computes all heads."""
    *qkv, out = weights
    x = move("f", x, group)
    mine = torch.stack([F.linear(x, own(w, 0, group)) for w in qkv])
    q, k, v = move("gather for equal work", mine, group)
    heads = move("own part", attend(q, k, v, HEADS), group)
    return move("g", F.linear(heads, own(out, 1, group)), group)


def attention_inside(x: Tensor, weights: Weights, group: Group) -> Tensor:
    """Every rank has a part of each head: scores are sums over the ranks, (b, a, s, s)."""
    x = move("f", x, group)

    def part(weight: Tensor) -> Tensor:  # (a, d, h) → this rank's (a · d/n, h)
        return own(weight.unflatten(0, (HEADS, -1)), 1, group).flatten(0, 1)

    q, k, v = (F.linear(x, part(w)).unflatten(-1, (HEADS, -1)).transpose(1, 2) for w in weights[:3])
    size = x.shape[-1] // HEADS
    scores = move("scatter", q @ k.mT / math.sqrt(size), group, dim=2)
    future = own(torch.ones(x.shape[1], x.shape[1], dtype=torch.bool).triu(1), 0, group)
    probabilities = scores.masked_fill(future, -math.inf).softmax(-1)
    heads = move("gather for split work", probabilities, group, dim=2) @ v
    out = part(weights[3].t().contiguous()).t()
    return move("g", F.linear(heads.transpose(1, 2).flatten(2), out), group)


def embedding_rows(ids: Tensor, weights: Weights, group: Group) -> Tensor:
    (table,) = weights
    rows = own(table, 0, group)
    local = ids - group.index * rows.shape[0]
    outside = (local < 0) | (local >= rows.shape[0])
    found = F.embedding(local.masked_fill(outside, 0), rows)
    return move("g", found.masked_fill(outside.unsqueeze(-1), 0.0), group)


class _Broadcast(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: Group) -> Tensor:
        ctx.holds = group.index == 0
        group.log.start(group, "broadcast", x)
        return collectives.broadcast(x.clone(), 0, group)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, None]:
        return grad if ctx.holds else torch.zeros_like(grad), None


def embedding_broadcast(ids: Tensor, weights: Weights, group: Group) -> Tensor:
    """Only the first rank has the table."""
    return _Broadcast.apply(F.embedding(ids, weights[0]), group)


FORMS = {
    ("MLP", "columns, then rows"): mlp_pair,
    ("MLP", "the same, sequence split"): mlp_sequence,
    ("MLP", "hidden H gathered"): mlp_gathered,
    ("MLP", "rows first"): mlp_rows_first,
    ("self-attention", "whole heads"): attention_heads,
    ("self-attention", "the same, sequence split"): attention_sequence,
    ("self-attention", "Q, K, V gathered"): attention_gathered,
    ("self-attention", "inside each head"): attention_inside,
    ("embedding", "rows of the table split"): embedding_rows,
    ("embedding", "one rank, broadcast"): embedding_broadcast,
}
