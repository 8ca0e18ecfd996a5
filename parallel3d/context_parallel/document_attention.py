"""Causal attention within documents of packed samples, and of queries to blocks of keys.

On a CPU each document is a call of PyTorch's kernel; on a GPU in half precision all are one call of
the varlen kernel. To a compiler it is one opaque operator, whose shapes do not depend on the
documents, so new documents need no recompilation.

Under context parallelism queries are fewer than keys, which may come in blocks (`attend_block`). A
query's results of several calls are merged by their log Σ exp(scores); the gradients of a call need
no more than the merged result and that logarithm (Dao et al. 2022, §B.2; Liu et al. 2023, Ring
Attention).
"""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from parallel3d.config.values import AUTO, MATH
from parallel3d.context_parallel.documents import Documents
from parallel3d.device.accelerator import is_accelerator
from parallel3d.device.attention_backends import allowed
from parallel3d.device.fused import define, differentiate

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

    def precedes(self, other: _EqualDocuments) -> bool:
        end = self.begin + self.number * self.length
        return (self.row, end, self.length) == (other.row, other.begin, other.length)

    def with_next(self) -> _EqualDocuments:
        return self._replace(number=self.number + 1)

    def before(self, number: int) -> _EqualDocuments:
        """Returns the `number` tokens before these."""
        return _EqualDocuments(self.row, self.begin - number, 1, number)

    def of(self, x: Tensor) -> Tensor:
        """Returns the view (number, heads, length, …) of (b, heads, s, …)."""
        of_row, of_head, of_token, *rest = x.stride()
        first = x.storage_offset() + self.row * of_row + self.begin * of_token
        size = (self.number, x.shape[1], self.length, *x.shape[3:])
        return x.as_strided(size, (self.length * of_token, of_head, of_token, *rest), first)


def _equal_documents(bounds: Tensor, length: int) -> Iterator[_EqualDocuments]:
    count = int(bounds[0])
    edges = bounds[2 : count + 3].tolist()
    places = ((*divmod(begin, length), end - begin) for begin, end in itertools.pairwise(edges))
    segments = ((row, place, number, place, 0) for row, place, number in places)
    return (run for run, *_ in _joined(segments))


def _joined(
    segments: Iterable[Sequence[int]],
) -> Iterator[tuple[_EqualDocuments, _EqualDocuments, int]]:
    """Yields queries, the keys at their places, and the number of keys before those.

    Neighbours of one length without keys before them are joined. `segments`: rows of
    `AttentionBlocks.table`.
    """
    run: tuple[_EqualDocuments, _EqualDocuments, int] | None = None
    for row, first, number, key, before in segments:
        queries, keys = (_EqualDocuments(row, x, 1, number) for x in (first, key + before))
        if run is not None:
            if before == run[2] == 0 and run[0].precedes(queries) and run[1].precedes(keys):
                run = run[0].with_next(), run[1].with_next(), 0
                continue
            yield run
        run = queries, keys, before
    if run is not None:
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


def _viewed(x: Tensor) -> Tensor:
    """Is `_concatenated` of a tensor to write to; raises if that would be a copy."""
    tokens = x.transpose(1, 2)
    return tokens.view(-1, *tokens.shape[2:])


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
    parts = (*map(_concatenated, (grad, q, k, v, out)), sums)
    found = _flash_backward(parts, edges, edges, longest, longest, True)
    dq, dk, dv = (_as_batch(x, q.shape[0]) for x in found)
    return dq, dk, dv


def _flash_backward(parts: tuple[Tensor, ...], *sequences: Any) -> tuple[Tensor, Tensor, Tensor]:
    """`sequences`: edges of queries and keys, the longest of each, and whether it is causal."""
    q, (*of_sequences, causal) = parts[1], sequences
    # The kernel wants a generator state although nothing is dropped.
    state, unused = q.new_zeros(2, dtype=torch.uint64), q.new_empty(0)
    return aten._flash_attention_backward(*parts, *of_sequences, 0.0, causal, state, unused)


# Elsewhere: the device's kernel forward, and the formula backward in blocks of rows.


def _plain_forward(out: Tensor, sums: Tensor, q: Tensor, k: Tensor, v: Tensor) -> None:
    shared = k.shape[1] != q.shape[1]
    out.copy_(F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=shared))


def _plain_backward(
    grads: tuple[Tensor, ...], grad: Tensor, q: Tensor, k: Tensor, v: Tensor, *_: Tensor
) -> None:
    for to, value in zip(grads, _plain_gradients(grad, q, k, v, True), strict=True):
        to.copy_(value)


def _plain_gradients(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, causal: bool, out: Tensor | None = None,
    sums: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """Returns the gradients by the formula (Dao et al. 2022, §B.2).

    With P = softmax(scores): dV = Pᵀ·dO, dP = dO·Vᵀ, dS = P ∘ (dP − rowsum(dP ∘ P)).

    `out`, `sums`: of all keys of a query, if these are a part of them.
    """
    wide = torch.promote_types(q.dtype, torch.float32)
    times, scale = q.shape[1] // k.shape[1], 1 / math.sqrt(q.shape[-1])
    k, v = (x.to(wide).repeat_interleave(times, 1) for x in (k, v))
    of_q, of_k, of_v = (torch.zeros_like(x, dtype=wide) for x in (q, k, v))
    for rows, queries, scores in _plain_scores(q, k, causal):
        keys, values = (x[:, :, : scores.shape[-1]] for x in (k, v))
        of_out = grad[:, :, rows].to(wide)
        of_p = of_out @ values.transpose(-2, -1)
        if out is None or sums is None:
            p = scores.softmax(-1)
            along = (of_p * p).sum(-1, keepdim=True)
        else:
            p = (scores - sums[:, :, rows].unsqueeze(-1)).exp()
            along = (of_out * out[:, :, rows]).sum(-1, keepdim=True)
        of_scores = p * (of_p - along) * scale
        of_q[:, :, rows] = of_scores @ keys
        of_k[:, :, : keys.shape[2]] += of_scores.transpose(-2, -1) @ queries
        of_v[:, :, : keys.shape[2]] += p.transpose(-2, -1) @ of_out
    of_k, of_v = (x.unflatten(1, (-1, times)).sum(2) for x in (of_k, of_v))
    return of_q, of_k, of_v


def _plain_scores(q: Tensor, k: Tensor, causal: bool) -> Iterator[tuple[slice, Tensor, Tensor]]:
    """Yields some rows at a time, their queries, and their scores of the keys that they see."""
    scale = 1 / math.sqrt(q.shape[-1])
    for begin in range(0, q.shape[2], ROWS):
        rows = slice(begin, min(begin + ROWS, q.shape[2]))
        queries = q[:, :, rows].to(k.dtype)
        scores = queries @ k[:, :, : rows.stop if causal else None].transpose(-2, -1) * scale
        if causal:
            later = torch.ones(scores.shape[-2:], dtype=torch.bool, device=q.device)
            scores = scores.masked_fill(later.triu(begin + 1), -torch.inf)
        yield rows, queries, scores


def _plain_attended(q: Tensor, k: Tensor, v: Tensor, causal: bool) -> tuple[Tensor, Tensor]:
    """Returns the result and log Σ exp(scores), in fp32 or better."""
    wide = torch.promote_types(q.dtype, torch.float32)
    k, v = (x.to(wide).repeat_interleave(q.shape[1] // x.shape[1], 1) for x in (k, v))
    parts = [
        (scores.softmax(-1) @ v[:, :, : scores.shape[-1]], scores.logsumexp(-1))
        for _, _, scores in _plain_scores(q, k, causal)
    ]
    outs, sums = zip(*parts, strict=True)
    return torch.cat(outs, 2), torch.cat(sums, 2)


# Queries that attend to blocks of keys, under context parallelism.


@dataclass(frozen=True)
class Block:
    """A block of keys, and what queries read of it: see `AttentionBlocks`, of which this is one."""

    table: Tensor
    calls: Tensor
    edges: Tensor
    is_first: bool

    @property
    def segments(self) -> Iterator[tuple[_EqualDocuments, _EqualDocuments, int]]:
        return _joined(_rows(self.table))

    @property
    def sequences(self) -> Iterator[tuple[slice, slice, tuple[Any, ...]]]:
        """Yields the queries and keys of each call of the varlen kernel, and its arguments."""
        place = 0
        for query, queries, key, keys, count, *longest in _rows(self.calls):
            edges = self.edges[:, place : place + count + 1]
            place += count + 1
            of_call = (edges[0], edges[1], *longest)
            yield slice(query, query + queries), slice(key, key + keys), of_call


def _rows(table: Tensor) -> list[list[int]]:
    """Returns the rows of a table that begins with their number."""
    return table[1 : int(table[0, 0]) + 1].tolist()


def merge(out: Tensor, sums: Tensor, part: Tensor, sums_of_part: Tensor) -> None:
    """Adds attention to further keys to `out` (…, n, head_dim) and `sums` (…, n), in place."""
    both = torch.logaddexp(sums, sums_of_part)
    out.mul_((sums - both).exp().unsqueeze(-1))
    out.add_(part * (sums_of_part - both).exp().unsqueeze(-1))
    sums.copy_(both)


def attend_block(
    out: Tensor, sums: Tensor, q: Tensor, k: Tensor, v: Tensor, block: Block, kernel: str
) -> None:
    """Adds attention to a block of keys; the first block, which all queries read, writes it.

    out, q (b, heads, n, head_dim), sums (b, heads, n), as `empty_for_blocks` makes them; k, v
    (b, fewer or as many heads, keys, head_dim).
    """
    if _uses_varlen_kernel(q, kernel):
        to = _viewed(out), _viewed(sums)
        _attend_sequences(block, *to, *map(_concatenated, (q, k, v)))
        return
    attended = _cpu_attended if _uses_cpu_kernel(q, kernel) else _plain_attended
    for queries, keys, before in block.segments:
        to = queries.of(out), queries.of(sums)
        if block.is_first:
            _write(*to, *attended(queries.of(q), keys.of(k), keys.of(v), True))
        if before:
            earlier = keys.before(before)
            merge(*to, *attended(queries.of(q), earlier.of(k), earlier.of(v), False))


def _attend_sequences(
    block: Block, out: Tensor, sums: Tensor, q: Tensor, k: Tensor, v: Tensor
) -> None:
    put = _write if block.is_first else merge
    for rows, read, of_call in block.sequences:
        parts = q[rows], k[read], v[read]
        found = aten._flash_attention_forward(*parts, *of_call, 0.0, block.is_first, False)
        put(out[rows], sums[rows], found[0], found[1].T)


def differentiate_block(
    of_q: Tensor, of_k: Tensor, of_v: Tensor, grad: Tensor, q: Tensor, k: Tensor, v: Tensor,
    out: Tensor, sums: Tensor, block: Block, kernel: str,
) -> None:  # fmt: skip
    """Adds the gradients of a block of keys to those of q, k and v, in fp32 or better.

    `out`, `sums`: of all blocks.
    """
    if _uses_varlen_kernel(q, kernel):
        to = _viewed(of_q), _viewed(of_k), _viewed(of_v)
        _differentiate_sequences(block, *to, *map(_concatenated, (grad, q, k, v, out, sums)))
        return
    gradients = _cpu_gradients if _uses_cpu_kernel(q, kernel) else _plain_block_gradients
    for queries, keys, before in block.segments:
        reads = [(keys, True)] if block.is_first else []
        reads += [(keys.before(before), False)] if before else []
        for read, causal in reads:
            of_rows, of_keys = map(queries.of, (grad, q, out, sums)), map(read.of, (k, v))
            found = gradients(causal, *of_rows, *of_keys)
            to = queries.of(of_q), read.of(of_k), read.of(of_v)
            for x, value in zip(to, found, strict=True):
                x.add_(value)


def _differentiate_sequences(
    block: Block, of_q: Tensor, of_k: Tensor, of_v: Tensor, grad: Tensor, q: Tensor, k: Tensor,
    v: Tensor, out: Tensor, sums: Tensor,
) -> None:  # fmt: skip
    for rows, read, of_call in block.sequences:
        logs = sums[rows].T.contiguous()
        parts = grad[rows], q[rows], k[read], v[read], out[rows], logs
        found = _flash_backward(parts, *of_call, block.is_first)
        for x, value in zip((of_q[rows], of_k[read], of_v[read]), found, strict=True):
            x.add_(value)


def _write(out: Tensor, sums: Tensor, part: Tensor, sums_of_part: Tensor) -> None:
    out.copy_(part)
    sums.copy_(sums_of_part)


def empty_for_blocks(q: Tensor) -> tuple[Tensor, Tensor]:
    """Allocates a result (b, heads, n, head_dim) and its sums (b, heads, n), in fp32 or better."""
    b, heads, n, size = q.shape
    wide = torch.promote_types(q.dtype, torch.float32)
    sums = q.new_empty(b, n, heads, dtype=wide).transpose(1, 2)
    return q.new_empty(b, n, heads, size, dtype=wide).transpose(1, 2), sums


def _cpu_attended(q: Tensor, k: Tensor, v: Tensor, causal: bool) -> tuple[Tensor, Tensor]:
    k, v = (repeated(x, q.shape[1]) for x in (k, v))
    return aten._scaled_dot_product_flash_attention_for_cpu(q, k, v, 0.0, causal)


def _cpu_gradients(
    causal: bool, grad: Tensor, q: Tensor, out: Tensor, sums: Tensor, k: Tensor, v: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    of_all = (grad, q, *(repeated(x, q.shape[1]) for x in (k, v)), out, sums)
    dq, *of_keys = aten._scaled_dot_product_flash_attention_for_cpu_backward(*of_all, 0.0, causal)
    if k.shape[1] < q.shape[1]:
        of_keys = [x.unflatten(1, (k.shape[1], -1)).sum(2) for x in of_keys]
    return dq, of_keys[0], of_keys[1]


def repeated(x: Tensor, heads: int) -> Tensor:
    return x if x.shape[1] == heads else x.repeat_interleave(heads // x.shape[1], dim=1)


def _plain_block_gradients(
    causal: bool, grad: Tensor, q: Tensor, out: Tensor, sums: Tensor, k: Tensor, v: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    return _plain_gradients(grad, q, k, v, causal, out, sums)


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
