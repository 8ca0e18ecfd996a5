"""Causal attention whose probabilities are dropped, some rows of scores at a time.

PyTorch's kernels draw masks of their own, which depend on the layout. Here the probabilities are
written out, dropped by the hash of `dropout` and multiplied with v, for as many queries at once as
`AT_ONCE` allows; neither probabilities nor masks are kept. The backward makes both again, as in
Dao et al. 2022, §B.2: with P = softmax(scores), Z the mask over 1 − p and A = Z ∘ P, out = A·V,

    dV = Aᵀ·dO,   dP = Z ∘ (dO·Vᵀ),   dS = P ∘ (dP − rowsum(dP ∘ P)).

Memory is that of s · heads · head_dim and of one block, not of s². To a compiler it is one operator
that it does not look into.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from parallel3d.data.documents import Documents
from parallel3d.device.accelerator import is_accelerator
from parallel3d.device.operators import define, differentiate
from parallel3d.models.dropout import Dropout, dropped, without

# Scores of one block: on a CPU 4 MiB in fp32, which stay in its cache; on an accelerator enough
# that a launch does not count.
AT_ONCE, AT_ONCE_ON_ACCELERATOR = 1 << 20, 1 << 24


def attend_dropping(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    dropout: Dropout,
    samples: Tensor,
    documents: Documents | None,
) -> Tensor:
    """dropout(softmax(q·kᵀ / sqrt(head_dim) + causal mask))·v.

    Args:
        q, k, v: (b, heads, s, head_dim), as many heads each.
        dropout: its heads begin with the first of `q`.
        samples: (b,) numbers of the samples in the run.
        documents: a token reads its own alone; None: a sample is one.

    Returns: (b, heads, s, head_dim), stored as (b, s, heads, head_dim).
    """
    where = (samples, dropout.site, dropout.first_head, dropout.p)
    inputs = (q, k, v, None if documents is None else documents.starts, *where)
    if torch.compiler.is_compiling():
        return torch.ops.parallel3d.dropped_attention(*inputs)
    return _Attention.apply(*inputs)


class _Attention(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, q: Tensor, k: Tensor, v: Tensor, starts: Tensor | None, *where: Any
    ) -> Tensor:
        ctx.save_for_backward(q, k, v)
        ctx.starts, ctx.where = starts, where  # not of the graph: recomputation need not save them
        return _forward(q, k, v, starts, *where)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple:
        return *_backward(grad, *ctx.saved_tensors, ctx.starts, *ctx.where), *(None,) * 5


def _blocks(q: Tensor) -> Iterator[slice]:
    """Queries whose scores are written out together."""
    b, heads, s, _ = q.shape
    most = AT_ONCE_ON_ACCELERATOR if is_accelerator(q.device) else AT_ONCE
    rows = max(1, most // (b * heads * s))
    return (slice(begin, min(begin + rows, s)) for begin in range(0, s, rows))


def _probabilities(q: Tensor, k: Tensor, rows: slice, starts: Tensor | None) -> Tensor:
    """Of the queries `rows` of a sample for the keys before the last one's, in fp32 or better."""
    scores = (q[:, :, rows] @ k[:, :, : rows.stop].transpose(-2, -1)).to(_wide(q))
    place = torch.arange(rows.stop, dtype=torch.int32, device=q.device)
    unseen = place > place[rows, None]
    if starts is not None:
        unseen = unseen | (place < starts[:, None, rows, None])
    scores.mul_(1 / math.sqrt(q.shape[-1])).masked_fill_(unseen, -torch.inf)
    return scores.softmax(-1)


def _wide(q: Tensor) -> torch.dtype:
    return torch.promote_types(q.dtype, torch.float32)


def _forward(
    q: Tensor, k: Tensor, v: Tensor, starts: Tensor | None, samples: Tensor, site: Tensor,
    head: int, p: float,
) -> Tensor:  # fmt: skip
    out = _empty(q)
    for rows in _blocks(q):
        chances = _probabilities(q, k, rows, starts)
        gone = dropped(chances.shape, samples, site, head, rows.start, p)
        out[:, :, rows] = without(chances, gone, p).to(v.dtype) @ v[:, :, : rows.stop]
    return out


def _backward(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, starts: Tensor | None, samples: Tensor,
    site: Tensor, head: int, p: float,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """Gradients of q, k and v. Those of k and v add over blocks in fp32 or better."""
    of_q, scale = _empty(q), 1 / math.sqrt(q.shape[-1])
    of_k, of_v = (torch.zeros_like(x, dtype=_wide(q)) for x in (k, v))
    for rows in _blocks(q):
        chances = _probabilities(q, k, rows, starts)
        gone = dropped(chances.shape, samples, site, head, rows.start, p)
        of_out, keys, values = grad[:, :, rows], k[:, :, : rows.stop], v[:, :, : rows.stop]
        of_v[:, :, : rows.stop] += without(chances, gone, p).to(v.dtype).mT @ of_out
        of_chances = without((of_out @ values.mT).to(chances.dtype), gone, p)
        along = torch.linalg.vecdot(of_chances, chances).unsqueeze(-1)
        of_scores = of_chances.sub_(along).mul_(chances).mul_(scale).to(q.dtype)
        of_q[:, :, rows] = of_scores @ keys
        of_k[:, :, : rows.stop] += of_scores.mT @ q[:, :, rows]
    return of_q, of_k.to(k.dtype), of_v.to(v.dtype)


def _empty(like: Tensor) -> Tensor:
    b, heads, s, size = like.shape
    return like.new_empty(b, s, heads, size).transpose(1, 2)


def _remember(ctx: Any, inputs: tuple, output: Tensor) -> None:
    *tensors, ctx.head, ctx.p = inputs
    ctx.save_for_backward(*tensors)


def _differentiate(ctx: Any, grad: Tensor) -> tuple:
    found = torch.ops.parallel3d.dropped_attention_backward(
        grad, *ctx.saved_tensors, ctx.head, ctx.p
    )
    return *found, *(None,) * 5


_INPUTS = (
    "Tensor q, Tensor k, Tensor v, Tensor? starts, Tensor samples, Tensor site, int head, float p"
)
define("dropped_attention", f"({_INPUTS}) -> Tensor", _forward, lambda q, *_: _empty(q))
define(
    "dropped_attention_backward",
    f"(Tensor grad, {_INPUTS}) -> (Tensor, Tensor, Tensor)",
    _backward,
    lambda grad, q, k, v, *_: (_empty(q), torch.empty_like(k), torch.empty_like(v)),
)
differentiate("dropped_attention", _differentiate, _remember)
