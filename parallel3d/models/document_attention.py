"""Causal attention within documents of packed samples.

On a CPU each document is a call of PyTorch's kernel; on a GPU in half precision all are one call of
the varlen kernel. To a compiler it is one opaque operator, whose shapes do not depend on the
documents, so new documents need no recompilation.
"""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from parallel3d.config.sections import AUTO, MATH
from parallel3d.context_parallel.documents import Documents
from parallel3d.device.accelerator import is_accelerator
from parallel3d.device.fused import define, differentiate
from parallel3d.models.attention_backends import allowed

aten = torch.ops.aten
ROWS = 256  # rows of scores that a backward without a kernel computes at a time


def attend_within(
    q: Tensor, k: Tensor, v: Tensor, documents: Documents, kernel: str = AUTO
) -> Tensor:
    """Attends from each query to the keys of its own document up to its position.

    q (b, heads, s, head_dim), k and v with as many heads, or fewer where the device's kernel
    shares them; the result is stored as (b, s, heads, head_dim).
    """
    within = documents.bounds, documents.edges, kernel
    if torch.compiler.is_compiling():
        return torch.ops.parallel3d.document_attention(q, k, v, *within)[0]
    return _Attention.apply(q, k, v, *within)


class _Attention(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, q: Tensor, k: Tensor, v: Tensor, bounds: Tensor, edges: Tensor, kernel: str
    ) -> Tensor:
        out, sums = _forward(q, k, v, bounds, edges, kernel)
        ctx.kernel = kernel
        ctx.save_for_backward(q, k, v, out, sums, bounds, edges)
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple:
        saved = (*ctx.saved_tensors, ctx.kernel)
        return *_backward(grad, *saved), None, None, None


class _EqualDocuments(NamedTuple):
    """Consecutive documents of `length` tokens, from token `begin` of row `row` of the batch."""

    row: int
    begin: int
    number: int
    length: int

    def of(self, x: Tensor) -> Tensor:
        """Returns the view (number, heads, length, …) of (b, heads, s, …)."""
        of_row, of_head, of_token, *rest = x.stride()
        first = x.storage_offset() + self.row * of_row + self.begin * of_token
        size = (self.number, x.shape[1], self.length, *x.shape[3:])
        return x.as_strided(size, (self.length * of_token, of_head, of_token, *rest), first)


def _equal_documents(bounds: Tensor, length: int) -> Iterator[_EqualDocuments]:
    count = int(bounds[0])
    edges = bounds[2 : count + 3].tolist()
    run: _EqualDocuments | None = None
    for begin, end in itertools.pairwise(edges):
        row, place = divmod(begin, length)
        if run is not None and (run.row, run.length) == (row, end - begin):
            run = run._replace(number=run.number + 1)
            continue
        if run is not None:
            yield run
        run = _EqualDocuments(row, place, 1, end - begin)
    assert run is not None  # a batch has at least one document
    yield run


def _forward(
    q: Tensor, k: Tensor, v: Tensor, bounds: Tensor, edges: Tensor, kernel: str
) -> tuple[Tensor, Tensor]:
    """Returns the result, and log Σ exp(scores) (b, heads, s) if the backward's kernel needs it."""
    if _uses_varlen_kernel(q, kernel):
        return _varlen_forward(q, k, v, bounds, edges)
    out, sums = _empty(q)
    run_kernel = _cpu_forward if _uses_cpu_kernel(q, kernel) else _plain_forward
    with allowed(kernel):
        for run in _equal_documents(bounds, q.shape[2]):
            run_kernel(run.of(out), run.of(sums), *map(run.of, (q, k, v)))
    return out, sums


def _backward(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, sums: Tensor, bounds: Tensor,
    edges: Tensor, kernel: str,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    if _uses_varlen_kernel(q, kernel):
        return _varlen_backward(grad, q, k, v, out, sums, bounds, edges)
    grad = grad if grad.stride(-1) == 1 else grad.contiguous()
    grads = (_empty(q)[0], _empty(k)[0], _empty(v)[0])
    run_kernel = _cpu_backward if _uses_cpu_kernel(q, kernel) else _plain_backward
    for run in _equal_documents(bounds, q.shape[2]):
        run_kernel(tuple(map(run.of, grads)), *map(run.of, (grad, q, k, v, out, sums)))
    return grads


def _empty(like: Tensor) -> tuple[Tensor, Tensor]:
    """Allocates (b, heads, s, head_dim), stored as (b, s, heads, head_dim), and (b, heads, s)."""
    b, heads, s, size = like.shape
    wide = torch.promote_types(like.dtype, torch.float32)
    return like.new_empty(b, s, heads, size).transpose(1, 2), like.new_empty(
        b, heads, s, dtype=wide
    )


# On a CPU: the kernels of PyTorch's attention.


def _uses_cpu_kernel(q: Tensor, kernel: str) -> bool:
    return q.device.type == "cpu" and kernel != MATH


def _cpu_forward(out: Tensor, sums: Tensor, q: Tensor, k: Tensor, v: Tensor) -> None:
    attended, of_rows = aten._scaled_dot_product_flash_attention_for_cpu(q, k, v, 0.0, True)
    out.copy_(attended)
    sums.copy_(of_rows)


def _cpu_backward(
    grads: tuple[Tensor, ...], grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor,
    sums: Tensor,
) -> None:  # fmt: skip
    found = aten._scaled_dot_product_flash_attention_for_cpu_backward(
        grad, q, k, v, out, sums, 0.0, True
    )
    for to, value in zip(grads, found, strict=True):
        to.copy_(value)


# On a GPU in half precision: flash attention over concatenated sequences (Dao 2023), which
# `torch.nn.attention.varlen` calls too.


@functools.cache
def _has_varlen_kernel(device: torch.device, dtype: torch.dtype, head_dim: int) -> bool:
    try:
        x = torch.zeros(2, 1, head_dim, dtype=dtype, device=device)
        _flash(x, x, x, torch.tensor((2, 1, 0, 1, 2)), torch.arange(3, device=device).int())
    except (RuntimeError, NotImplementedError):
        return False
    return True


def _uses_varlen_kernel(q: Tensor, kernel: str) -> bool:
    narrow = q.dtype in (torch.bfloat16, torch.float16) and kernel != MATH
    return (
        is_accelerator(q.device) and narrow and _has_varlen_kernel(q.device, q.dtype, q.shape[-1])
    )


def _flash(q: Tensor, k: Tensor, v: Tensor, bounds: Tensor, edges: Tensor) -> tuple[Tensor, Tensor]:
    count, longest = bounds[:2].tolist()
    edges = edges[: count + 1]
    found = aten._flash_attention_forward(q, k, v, edges, edges, longest, longest, 0.0, True, False)
    return found[0], found[1]


def _concatenated(x: Tensor) -> Tensor:
    """(b, heads, s, head_dim) → (b · s, heads, head_dim); a view where x is stored that way."""
    return x.transpose(1, 2).flatten(0, 1)


def _as_batch(x: Tensor, batch: int) -> Tensor:
    return x.unflatten(0, (batch, -1)).transpose(1, 2)


def _varlen_forward(
    q: Tensor, k: Tensor, v: Tensor, bounds: Tensor, edges: Tensor
) -> tuple[Tensor, Tensor]:
    out, sums = _flash(_concatenated(q), _concatenated(k), _concatenated(v), bounds, edges)
    sums = sums.view(sums.shape[0], q.shape[0], -1).transpose(0, 1)
    return _as_batch(out, q.shape[0]), sums.contiguous()


def _varlen_backward(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, sums: Tensor, bounds: Tensor,
    edges: Tensor,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    count, longest = bounds[:2].tolist()
    edges = edges[: count + 1]
    sums = sums.transpose(0, 1).flatten(1)
    # The kernel wants a generator state although nothing is dropped.
    state, unused = q.new_zeros(2, dtype=torch.uint64), q.new_empty(0)
    found = aten._flash_attention_backward(
        *map(_concatenated, (grad, q, k, v, out)), sums, edges, edges, longest, longest, 0.0, True,
        state, unused,
    )  # fmt: skip
    dq, dk, dv = (_as_batch(x, q.shape[0]) for x in found)
    return dq, dk, dv


# Elsewhere: the device's kernel forward, and the formula backward in blocks of rows.


def _plain_forward(out: Tensor, sums: Tensor, q: Tensor, k: Tensor, v: Tensor) -> None:
    shared = k.shape[1] != q.shape[1]
    out.copy_(F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=shared))


def _plain_backward(
    grads: tuple[Tensor, ...], grad: Tensor, q: Tensor, k: Tensor, v: Tensor, *_: Tensor
) -> None:
    """Writes the gradients by the formula (Dao et al. 2022, §B.2).

    With P = softmax(scores): dV = Pᵀ·dO, dP = dO·Vᵀ, dS = P ∘ (dP − rowsum(dP ∘ P)).
    """
    wide = torch.promote_types(q.dtype, torch.float32)
    times, scale = q.shape[1] // k.shape[1], 1 / math.sqrt(q.shape[-1])
    k, v = (x.to(wide).repeat_interleave(times, 1) for x in (k, v))
    to_q, of_k, of_v = grads[0], torch.zeros_like(k), torch.zeros_like(v)
    for begin in range(0, q.shape[2], ROWS):
        rows = slice(begin, min(begin + ROWS, q.shape[2]))
        queries, of_out = q[:, :, rows].to(wide), grad[:, :, rows].to(wide)
        keys, values = k[:, :, : rows.stop], v[:, :, : rows.stop]
        scores = queries @ keys.transpose(-2, -1) * scale
        later = torch.ones(scores.shape[-2:], dtype=torch.bool, device=q.device).triu(begin + 1)
        p = scores.masked_fill(later, -torch.inf).softmax(-1)
        of_p = of_out @ values.transpose(-2, -1)
        of_scores = p * (of_p - (of_p * p).sum(-1, keepdim=True)) * scale
        to_q[:, :, rows] = of_scores @ keys
        of_k[:, :, : rows.stop] += of_scores.transpose(-2, -1) @ queries
        of_v[:, :, : rows.stop] += p.transpose(-2, -1) @ of_out
    for to, value in zip(grads[1:], (of_k, of_v), strict=True):
        to.copy_(value.unflatten(1, (-1, times)).sum(2))


def _setup_context(ctx: Any, inputs: tuple, output: tuple[Tensor, Tensor]) -> None:
    q, k, v, bounds, edges, ctx.kernel = inputs
    ctx.save_for_backward(q, k, v, *output, bounds, edges)


def _differentiate(ctx: Any, grad: Tensor, _: Tensor) -> tuple:
    found = torch.ops.parallel3d.document_attention_backward(grad, *ctx.saved_tensors, ctx.kernel)
    return *found, None, None, None


define(
    "document_attention",
    "(Tensor q, Tensor k, Tensor v, Tensor bounds, Tensor edges, str kernel) -> (Tensor, Tensor)",
    _forward,
    lambda q, *_: _empty(q),
)
define(
    "document_attention_backward",
    "(Tensor grad, Tensor q, Tensor k, Tensor v, Tensor out, Tensor sums, Tensor bounds, "
    "Tensor edges, str kernel) -> (Tensor, Tensor, Tensor)",
    _backward,
    lambda grad, q, k, v, *_: tuple(_empty(x)[0] for x in (q, k, v)),
)
differentiate("document_attention", _differentiate, _setup_context)
