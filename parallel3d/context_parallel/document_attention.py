"""Runs kernels of causal attention within documents, from queries to blocks of keys.

On a CPU each document takes a call of PyTorch's kernel, but neighbours of equal length share
a call. On a GPU in half precision one call of the varlen kernel computes all documents.

Under context parallelism a rank has fewer queries than keys, and the keys may come in blocks (see
`attend_block`). The results of several calls for one query are merged by their log Σ exp(scores).
The gradients of a call need only the merged result and the merged logarithm (Dao et al. 2022, §B.2;
Liu et al. 2023, Ring Attention).
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from parallel3d.config.values import CUDNN, FLASH, MATH
from parallel3d.context_parallel.documents import AttentionBlocks
from parallel3d.context_parallel.varlen_calls import calls_of, rows_of
from parallel3d.device.accelerator import is_accelerator
from parallel3d.device.capping import scaled_and_capped, slope_of
from parallel3d.private_names import (
    cpu_flash_backward,
    cpu_flash_forward,
    flash_backward,
    flash_forward,
)

ROWS = 256  # number of rows of scores that are computed at a time without a kernel
NOT_CUDNN = "not cudnn"  # takes the place of attention_kernel=auto where cuDNN gives wrong results
BACKENDS = {
    FLASH: [SDPBackend.FLASH_ATTENTION],
    CUDNN: [SDPBackend.CUDNN_ATTENTION],
    MATH: [SDPBackend.MATH],
    NOT_CUDNN: [SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH],
}


def allowed(kernel: str) -> AbstractContextManager[object]:
    """Returns a context that restricts `scaled_dot_product_attention` to a kernel.

    The attention raises RuntimeError if that kernel cannot run.
    """
    backends = BACKENDS.get(kernel)
    return nullcontext() if backends is None else sdpa_kernel(backends)


class _EqualDocuments(NamedTuple):
    """Consecutive documents of equal length in one row of the batch.

    Attributes:
        row: index of the row.
        begin: the first token of the first document.
        number: number of documents.
        length: number of tokens of each document.
    """

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
        """Returns the `number` tokens before these documents, as one document."""
        return _EqualDocuments(self.row, self.begin - number, 1, number)

    def of(self, x: Tensor) -> Tensor:
        """Returns the view (number, heads, length, …) of (b, heads, s, …)."""
        of_row, of_head, of_token, *rest = x.stride()
        first = x.storage_offset() + self.row * of_row + self.begin * of_token
        size = (self.number, x.shape[1], self.length, *x.shape[3:])
        return x.as_strided(size, (self.length * of_token, of_head, of_token, *rest), first)


def _joined(
    segments: Iterable[Sequence[int]],
) -> Iterator[tuple[_EqualDocuments, _EqualDocuments, int]]:
    """Yields (queries, the keys of the same tokens, number of further keys before those).

    `segments` are rows of `AttentionBlocks.table`. Neighbours of equal length that have no keys
    before them are joined.
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


class Block(NamedTuple):
    """One block of `AttentionBlocks`: keys, and the queries that read them.

    Attributes:
        table, calls, edges: the block's part of these tensors of `AttentionBlocks`.
        is_first: whether this is the first block, in which every query also reads its own key.
        is_only: whether there is no other block, so that each key is read only by its own segment.
        scale: factor that multiplies the scores; None: head_dim^-½.
        needs_sums: whether attention to the block must return its sums; if it is false, they may
            be undefined where the gradients do not need them.
        cap: c of the scores c · tanh(score / c), which no kernel computes; None: no cap.
    """

    table: Tensor
    calls: Tensor
    edges: Tensor
    is_first: bool
    is_only: bool
    scale: float | None = None
    needs_sums: bool = True
    cap: float | None = None

    @classmethod
    def of(
        cls,
        blocks: AttentionBlocks,
        i: int,
        is_only: bool = False,
        scale: float | None = None,
        needs_sums: bool = True,
        cap: float | None = None,
    ) -> Block:
        tables = blocks.table[i], blocks.calls[i], blocks.edges[i]
        return cls(*tables, i == 0, is_only, scale, needs_sums or cap is not None, cap)

    @property
    def segments(self) -> Iterator[tuple[_EqualDocuments, _EqualDocuments, int]]:
        return _joined(rows_of(self.table))

    @property
    def sequences(self) -> Iterator[tuple[slice, slice, tuple[Any, ...]]]:
        """Yields the queries, the keys and further arguments for each call of the varlen kernel."""
        return calls_of(self.calls, self.edges)


def empty_for_blocks(q: Tensor, dtype: torch.dtype | None = None) -> tuple[Tensor, Tensor]:
    """Allocates a result (b, heads, n, head_dim) and its sums (b, heads, n).

    The sums are log Σ exp(scores) of each query. Both tensors are in fp32 or better,
    except that the result has the dtype `dtype` if that is not None.
    """
    b, heads, n, size = q.shape
    accum_dtype = torch.promote_types(q.dtype, torch.float32)
    sums = q.new_empty(b, n, heads, dtype=accum_dtype).transpose(1, 2)
    return q.new_empty(b, n, heads, size, dtype=dtype or accum_dtype).transpose(1, 2), sums


def empty_for_only_block(q: Tensor) -> tuple[Tensor, Tensor]:
    """Allocates a result and its sums in the layout of flash attention's results.

    The result has the dtype of q, and the sums are stored as (heads, b, n).
    """
    b, heads, n, size = q.shape
    accum_dtype = torch.promote_types(q.dtype, torch.float32)
    sums = q.new_empty(heads, b, n, dtype=accum_dtype).transpose(0, 1)
    return q.new_empty(b, n, heads, size).transpose(1, 2), sums


def attend_only_block(
    q: Tensor, k: Tensor, v: Tensor, block: Block, kernel: str
) -> tuple[Tensor, Tensor]:
    """Returns the result and the sums of attention to the only block of keys."""
    if not uses_varlen_kernel(q, kernel):
        out, sums = empty_for_only_block(q)
        attend_block(out, sums, q, k, v, block, kernel)
        return out, sums
    ((_, _, of_call),) = block.sequences
    parts = map(concatenated, (q, k, v))
    found = flash_forward(*parts, *of_call, 0.0, True, False, scale=block.scale)
    sums = found[1].unflatten(1, (len(q), -1)).transpose(0, 1)
    return as_batch(found[0], len(q)), sums


def differentiate_only_block(
    grad: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    sums: Tensor,
    block: Block,
    kernel: str,
) -> tuple[Tensor, Tensor, Tensor]:
    """Returns the gradients of q, k and v for `attend_only_block`."""
    if not uses_varlen_kernel(q, kernel):
        of_q, of_k, of_v = (empty_for_blocks(x, x.dtype)[0] for x in (q, k, v))
        differentiate_block(of_q, of_k, of_v, grad, q, k, v, out, sums, block, kernel)
        return of_q, of_k, of_v
    ((_, _, of_call),) = block.sequences
    parts = (*map(concatenated, (grad, q, k, v, out)), sums.transpose(0, 1).flatten(1))
    found = flash_gradients(parts, *of_call, True, scale=block.scale)
    of_q, of_k, of_v = (as_batch(x, len(q)) for x in found)
    return of_q, of_k, of_v


def merge(out: Tensor, sums: Tensor, part: Tensor, sums_of_part: Tensor) -> None:
    """Merges `part`, attention to further keys, into `out` (…, n, head_dim) and `sums` (…, n)."""
    both = torch.logaddexp(sums, sums_of_part)
    out.mul_((sums - both).exp().unsqueeze(-1))
    out.add_(part * (sums_of_part - both).exp().unsqueeze(-1))
    sums.copy_(both)


def attend_block(
    out: Tensor, sums: Tensor, q: Tensor, k: Tensor, v: Tensor, block: Block, kernel: str
) -> None:
    """Merges attention to a block of keys into `out` and `sums`.

    The first block, which all queries read, overwrites them instead.

    Args:
        out, sums: allocated by `empty_for_blocks`.
        q: (b, heads, n, head_dim).
        k, v: (b, heads or fewer, keys, head_dim).
    """
    if uses_varlen_kernel(q, kernel):
        out, sums = _viewed(out), _viewed(sums)
        q, k, v = map(concatenated, (q, k, v))
        put = _write if block.is_first else merge
        for rows, span, of_call in block.sequences:
            parts = q[rows], k[span], v[span]
            how = 0.0, block.is_first, False
            found = flash_forward(*parts, *of_call, *how, scale=block.scale)
            put(out[rows], sums[rows], found[0], found[1].T)
        return
    attended: Callable[..., tuple[Tensor, Tensor]] = _plain_alone
    if block.needs_sums:
        attended = functools.partial(plain_attended, cap=block.cap)
    if uses_cpu_kernel(q, kernel):
        attended = cpu_attended
    with allowed(kernel):
        for queries, keys, before in block.segments:
            to = queries.of(out), queries.of(sums)
            if block.is_first:
                parts = queries.of(q), keys.of(k), keys.of(v)
                _write(*to, *attended(*parts, True, block.scale))
            if before:
                earlier = keys.before(before)
                parts = queries.of(q), earlier.of(k), earlier.of(v)
                merge(*to, *attended(*parts, False, block.scale))


def differentiate_block(
    of_q: Tensor,
    of_k: Tensor,
    of_v: Tensor,
    grad: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    sums: Tensor,
    block: Block,
    kernel: str,
) -> None:
    """Adds the gradients of attention to a block of keys to `of_q`, `of_k` and `of_v`.

    If the block is the only one, it overwrites them instead. `out` and `sums` are the results over
    all blocks.
    """
    if uses_varlen_kernel(q, kernel):
        of_q, of_k, of_v = map(_viewed, (of_q, of_k, of_v))
        grad, q, k, v, out, sums = map(concatenated, (grad, q, k, v, out, sums))
        for rows, span, of_call in block.sequences:
            logs = sums[rows].T.contiguous()
            parts = grad[rows], q[rows], k[span], v[span], out[rows], logs
            found = flash_gradients(parts, *of_call, block.is_first, scale=block.scale)
            for x, value in zip((of_q[rows], of_k[span], of_v[span]), found, strict=True):
                x.add_(value)
        return
    gradients: Callable[..., tuple[Tensor, Tensor, Tensor]] = cpu_gradients
    if not uses_cpu_kernel(q, kernel):
        gradients = _plain_gradients_alone
        if block.needs_sums:
            gradients = functools.partial(plain_gradients, cap=block.cap)
    put = Tensor.copy_ if block.is_only else Tensor.add_
    for queries, keys, before in block.segments:
        reads = [(keys, True)] if block.is_first else []
        reads += [(keys.before(before), False)] if before else []
        for read, causal in reads:
            of_rows, of_keys = map(queries.of, (grad, q, out, sums)), map(read.of, (k, v))
            found = gradients(causal, block.scale, *of_rows, *of_keys)
            to = queries.of(of_q), read.of(of_k), read.of(of_v)
            for x, value in zip(to, found, strict=True):
                put(x, value)


def _write(out: Tensor, sums: Tensor, part: Tensor, sums_of_part: Tensor) -> None:
    out.copy_(part)
    sums.copy_(sums_of_part)


# On a CPU these functions call the kernels of PyTorch's attention.


def uses_cpu_kernel(q: Tensor, kernel: str) -> bool:
    return q.device.type == "cpu" and kernel != MATH


def cpu_attended(
    q: Tensor, k: Tensor, v: Tensor, causal: bool, scale: float | None, mask: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Returns the result and log Σ exp(scores) of each query.

    `mask` (queries, keys) is added to the scores, unless it is None.
    """
    k, v = (repeated(x, q.shape[1]) for x in (k, v))
    return cpu_flash_forward(q, k, v, 0.0, causal, attn_mask=mask, scale=scale)


def cpu_gradients(
    causal: bool,
    scale: float | None,
    grad: Tensor,
    q: Tensor,
    out: Tensor,
    sums: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    of_all = (grad, q, *(repeated(x, q.shape[1]) for x in (k, v)), out, sums)
    dq, *of_keys = cpu_flash_backward(*of_all, 0.0, causal, attn_mask=mask, scale=scale)
    if k.shape[1] < q.shape[1]:
        of_keys = [x.unflatten(1, (k.shape[1], -1)).sum(2) for x in of_keys]
    return dq, of_keys[0], of_keys[1]


def repeated(x: Tensor, heads: int) -> Tensor:
    return x if x.shape[1] == heads else x.repeat_interleave(heads // x.shape[1], dim=1)


# On a GPU in half precision these functions call flash attention over concatenated sequences (Dao
# 2023), the varlen kernel, which `torch.nn.attention.varlen` calls too.


@functools.cache
def _has_varlen_kernel(device: torch.device, dtype: torch.dtype, head_dim: int) -> bool:
    """Returns whether the varlen kernel runs on this device, by running it once.

    Errors with other causes are raised: full memory, a device in an error state, or a version of
    torch whose operator takes other arguments.
    """
    try:
        x = torch.zeros(2, 1, head_dim, dtype=dtype, device=device)
        edges = torch.arange(3, device=device).int()
        flash_forward(x, x, x, edges, edges, 1, 1, 0.0, True, False)
    except (torch.OutOfMemoryError, torch.AcceleratorError):
        raise  # a later call tries again, because exceptions are not cached
    except RuntimeError as error:  # includes NotImplementedError
        if "Declaration:" in str(error):  # torch's operator takes other arguments
            raise
        return False
    return True


def uses_varlen_kernel(q: Tensor, kernel: str) -> bool:
    narrow = q.dtype in (torch.bfloat16, torch.float16) and kernel != MATH
    return (
        is_accelerator(q.device) and narrow and _has_varlen_kernel(q.device, q.dtype, q.shape[-1])
    )


def concatenated(x: Tensor) -> Tensor:
    """Reshapes (b, heads, s, head_dim) to (b · s, heads, head_dim).

    The result is a view if x is stored as (b, s, heads, head_dim).
    """
    return x.transpose(1, 2).flatten(0, 1)


def _viewed(x: Tensor) -> Tensor:
    """Returns the view of `concatenated`, to write into it; raises if that would be a copy."""
    tokens = x.transpose(1, 2)
    return tokens.view(-1, *tokens.shape[2:])


def as_batch(x: Tensor, batch: int) -> Tensor:
    return x.unflatten(0, (batch, -1)).transpose(1, 2)


def flash_gradients(
    parts: tuple[Tensor, ...], *sequences: Any, **how: Any
) -> tuple[Tensor, Tensor, Tensor]:
    """Runs the backward of the varlen kernel and returns the gradients of q, k and v.

    Args:
        parts: the gradient of the result, q, k, v, the result and its sums.
        sequences: edges of the queries' and of the keys' sequences, the largest number of queries
            and of keys in a sequence, and whether attention is causal.
        how: the scale and the sizes of a window.
    """
    q, (*of_sequences, causal) = parts[1], sequences
    # The kernel requires a generator's state although nothing is dropped.
    state, unused = q.new_zeros(2, dtype=torch.uint64), q.new_empty(0)
    return flash_backward(*parts, *of_sequences, 0.0, causal, state, unused, **how)


# In all other cases the scores are computed explicitly, for blocks of rows. Only a forward whose
# keys come in a single block uses PyTorch's attention with the device's kernel.


def _plain_alone(
    q: Tensor, k: Tensor, v: Tensor, causal: bool, scale: float | None
) -> tuple[Tensor, Tensor]:
    """Attends to the only block of keys, and returns zeros as the sums, which are not needed."""
    how: dict[str, Any] = {"enable_gqa": k.shape[1] != q.shape[1], "scale": scale}
    out = F.scaled_dot_product_attention(q, k, v, is_causal=causal, **how)
    return out, out.new_zeros(()).expand(out.shape[:3])


def _plain_gradients_alone(
    causal: bool,
    scale: float | None,
    grad: Tensor,
    q: Tensor,
    out: Tensor,
    sums: Tensor,
    k: Tensor,
    v: Tensor,
) -> tuple[Tensor, Tensor, Tensor]:
    return plain_gradients(causal, scale, grad, q, None, None, k, v)


def plain_gradients(
    causal: bool,
    scale: float | None,
    grad: Tensor,
    q: Tensor,
    out: Tensor | None,
    sums: Tensor | None,
    k: Tensor,
    v: Tensor,
    mask: Tensor | None = None,
    cap: float | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Computes the gradients of q, k and v by the formula (Dao et al. 2022, §B.2).

    With P = softmax(scores) this is dV = Pᵀ·dO, dP = dO·Vᵀ and dS = P ∘ (dP − rowsum(dP ∘ P)). A
    cap multiplies dS by its slope.

    `out` and `sums` are the results over all keys of a query; they may be None if `k` has all of
    these keys.
    """
    accum_dtype = torch.promote_types(q.dtype, torch.float32)
    times, scale = q.shape[1] // k.shape[1], scale_of(q, scale)
    k, v = (x.to(accum_dtype).repeat_interleave(times, 1) for x in (k, v))
    of_q, of_k, of_v = (torch.zeros_like(x, dtype=accum_dtype) for x in (q, k, v))
    for rows, queries, scores in plain_scores(q, k, causal, scale, mask, cap):
        keys, values = (x[:, :, : scores.shape[-1]] for x in (k, v))
        of_out = grad[:, :, rows].to(accum_dtype)
        of_p = of_out @ values.transpose(-2, -1)
        if out is None or sums is None:
            p = scores.softmax(-1)
            along = (of_p * p).sum(-1, keepdim=True)
        else:
            p = (scores - sums[:, :, rows].unsqueeze(-1)).exp()
            along = (of_out * out[:, :, rows]).sum(-1, keepdim=True)
        z = scores if cap is None else scores.clamp(min=-cap)  # hidden keys have a slope of 0
        of_scores = p * (of_p - along) * slope_of(z, scale, cap)
        of_q[:, :, rows] = of_scores @ keys
        of_k[:, :, : keys.shape[2]] += of_scores.transpose(-2, -1) @ queries
        of_v[:, :, : keys.shape[2]] += p.transpose(-2, -1) @ of_out
    of_k, of_v = (x.unflatten(1, (-1, times)).sum(2) for x in (of_k, of_v))
    return of_q, of_k, of_v


def scale_of(q: Tensor, scale: float | None) -> float:
    """Returns the factor that multiplies the scores: `scale`, or head_dim^-½ if that is None."""
    return 1 / math.sqrt(q.shape[-1]) if scale is None else scale


def plain_scores(
    q: Tensor,
    k: Tensor,
    causal: bool,
    scale: float,
    mask: Tensor | None,
    cap: float | None,
) -> Iterator[tuple[slice, Tensor, Tensor]]:
    """Yields (a range of queries, these queries, their scores with the keys that they see)."""
    for begin in range(0, q.shape[2], ROWS):
        rows = slice(begin, min(begin + ROWS, q.shape[2]))
        queries = q[:, :, rows].to(k.dtype)
        products = queries @ k[:, :, : rows.stop if causal else None].transpose(-2, -1)
        scores = scaled_and_capped(products, scale, cap)
        if causal:
            later = torch.ones(scores.shape[-2:], dtype=torch.bool, device=q.device)
            scores = scores.masked_fill(later.triu(begin + 1), -torch.inf)
        if mask is not None:
            scores = scores + mask[rows]
        yield rows, queries, scores


def plain_attended(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    causal: bool,
    scale: float | None,
    mask: Tensor | None = None,
    cap: float | None = None,
) -> tuple[Tensor, Tensor]:
    """Returns the result and log Σ exp(scores) of each query, in fp32 or better."""
    accum_dtype = torch.promote_types(q.dtype, torch.float32)
    k, v = (x.to(accum_dtype).repeat_interleave(q.shape[1] // x.shape[1], 1) for x in (k, v))
    parts = [
        (scores.softmax(-1) @ v[:, :, : scores.shape[-1]], scores.logsumexp(-1))
        for _, _, scores in plain_scores(q, k, causal, scale_of(q, scale), mask, cap)
    ]
    outs, sums = zip(*parts, strict=True)
    return torch.cat(outs, 2), torch.cat(sums, 2)
