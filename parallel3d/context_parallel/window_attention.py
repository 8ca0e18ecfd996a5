"""Computes attention through a window, including keys that other ranks hold.

On a GPU in half precision the varlen kernel supports windows. On a CPU, and where there is no such
kernel, a chunk of queries attends under a mask to all keys that any of its queries sees; these are
at most 2 · window − 1.

Under context parallelism the ranks first exchange their halos: one all-to-all sends keys and
values, in amounts that follow from the positions of each rank. The backward repeats this exchange
and then sends the gradients back in fp32 or better. They are added in rank order.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from parallel3d.comm import collectives
from parallel3d.comm.group import Group
from parallel3d.config.values import AUTO
from parallel3d.context_parallel.attention import ONE_RANK, ContextParallel
from parallel3d.context_parallel.document_attention import (
    as_batch,
    concatenated,
    cpu_attended,
    cpu_gradients,
    empty_for_only_block,
    flash_gradients,
    plain_attended,
    plain_gradients,
    uses_cpu_kernel,
    uses_varlen_kernel,
)
from parallel3d.context_parallel.sinks import operator_with_sinks
from parallel3d.context_parallel.varlen_calls import calls_of
from parallel3d.context_parallel.windows import Chunks, Halo, WindowBlocks, chunks_of
from parallel3d.device.fused import operator, registered
from parallel3d.private_names import flash_forward


def attend_in_window(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    blocks: WindowBlocks,
    cp: ContextParallel = ONE_RANK,
    kernel: str = AUTO,
    scale: float | None = None,
    sinks: Tensor | None = None,
    cap: float | None = None,
) -> Tensor:
    """Attends from each query to the keys that it sees through a window.

    The call is collective over `cp` if there is a halo. The result has the shape of q and is stored
    as (b, n, heads, head_dim).

    Args:
        q: (b, heads, n, head_dim).
        k, v: the same, with as many heads or fewer.
        scale: factor that multiplies the scores; None: head_dim^-½.
        sinks: the sinks of the heads of q, or None for none.
        cap: c of the scores c · tanh(score / c), which needs kernel=math; None: no cap.
    """
    halo = blocks.halo
    exchange = (halo.sent, halo.order, halo.places, halo.counts) if halo else (None,) * 4
    tables = blocks.table, blocks.calls, blocks.edges
    where = cp.handle, *tables, *exchange, kernel, blocks.window, scale, cap
    return _attend(q, k, v, *where) if sinks is None else _attend_sinks(q, k, v, sinks, *where)


class _Run(NamedTuple):
    """The arguments of the operator other than q, k and v."""

    handle: Tensor
    table: Tensor
    calls: Tensor
    edges: Tensor
    sent: Tensor | None
    order: Tensor | None
    places: Tensor | None
    counts: Tensor | None
    kernel: str
    window: int
    scale: float | None
    cap: float | None

    @property
    def band(self) -> dict[str, Any]:
        """The varlen kernel's keyword arguments for scale and window."""
        return {"scale": self.scale, "window_size_left": self.window - 1, "window_size_right": 0}

    @property
    def only_call(self) -> tuple[Any, ...] | None:
        """The varlen kernel's arguments if one call has all queries and keys, else None."""
        if int(self.calls[0, 0]) != 1:
            return None
        ((_, _, of_call),) = calls_of(self.calls, self.edges)
        return of_call

    @property
    def halo(self) -> HaloExchange | None:
        if self.sent is None or self.order is None or self.places is None or self.counts is None:
            return None
        halo = Halo(self.sent, self.order, self.places, self.counts)
        return HaloExchange(halo, registered(self.handle).group)


class HaloExchange:
    """Exchanges a halo's keys and values, and their gradients."""

    def __init__(self, halo: Halo, group: Group) -> None:
        self.given, self.taken, *most = halo.counts.tolist()
        # The largest numbers of tokens that any rank sends and receives.
        self.most_given, self.most_taken = map(max, most)
        self.group = group
        self.sent = halo.sent[: sum(self.given)]
        self.order = halo.order
        self.places = halo.places

    def keys(self, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """Returns keys and values with those of the halo, in the order of the sequences.

        Both have the shape (tokens, heads, head_dim) before and (keys, heads, head_dim) after.
        """
        own = torch.stack((k, v), 1)
        how = self.group, self.given, self.taken, self.most_given
        received = collectives.all_to_all_rows(own[self.sent], *how)
        every = torch.cat((own, received))
        ordered = every.index_select(0, self.order[: len(every)])
        return ordered[:, 0], ordered[:, 1]

    def gradients(self, of_k: Tensor, of_v: Tensor) -> tuple[Tensor, Tensor]:
        """Returns the gradients of this rank's keys and values, summed over the ranks.

        The arguments are the gradients of the results of `keys`.
        """
        every = torch.stack((of_k, of_v), 1)
        every = every.index_select(0, self.places[: len(every)])
        own, others = every.split((len(every) - sum(self.taken), sum(self.taken)))
        how = self.group, self.taken, self.given, self.most_taken
        arrived = collectives.all_to_all_rows(others, *how)
        # One rank's gradients are added at a time, because a key may be in several ranks' halos.
        parts = zip(self.sent.split(self.given), arrived.split(self.given), strict=True)
        for places, part in parts:
            if len(places):
                own.index_add_(0, places, part)
        return own[:, 0], own[:, 1]


def _forward(q: Tensor, k: Tensor, v: Tensor, *how: Any) -> tuple[Tensor, Tensor]:
    """Returns the result and log Σ exp(scores) of each query."""
    run = _Run(*how)
    queries, keys, values = map(concatenated, (q, k, v))
    if (halo := run.halo) is not None:
        keys, values = halo.keys(keys, values)
    by_kernel = uses_varlen_kernel(q, run.kernel)
    if by_kernel and (of_call := run.only_call) is not None:
        parts = queries, keys, values
        found = flash_forward(*parts, *of_call, 0.0, True, False, **run.band)
        return as_batch(found[0], len(q)), found[1].unflatten(1, (len(q), -1)).transpose(0, 1)
    out, sums = empty_for_only_block(q)
    whole_out, logs = out.transpose(1, 2).flatten(0, 1), sums.transpose(0, 1).flatten(1).T
    if by_kernel:
        for rows, span, of_call in calls_of(run.calls, run.edges):
            parts = queries[rows], keys[span], values[span]
            found = flash_forward(*parts, *of_call, 0.0, True, False, **run.band)
            whole_out[rows], logs[rows] = found[0], found[1].T
        return out, sums
    attended: Callable[..., tuple[Tensor, Tensor]] = partial(plain_attended, cap=run.cap)
    if uses_cpu_kernel(q, run.kernel):
        attended = cpu_attended
    for chunks in chunks_of(run.table):
        mask = _mask(chunks, run.window, q)
        parts = chunks.of_queries(queries), chunks.of_keys(keys), chunks.of_keys(values)
        part, logs_of_part = attended(*parts, mask is None, run.scale, mask)
        chunks.of_queries(whole_out).copy_(part)
        chunks.of_queries(logs).copy_(logs_of_part)
    return out, sums


def _backward(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, sums: Tensor, *how: Any
) -> tuple[Tensor, Tensor, Tensor]:
    run = _Run(*how)
    grad = grad if grad.stride(-1) == 1 else grad.contiguous()
    of_out, queries, keys, values, results = map(concatenated, (grad, q, k, v, out))
    logs = sums.transpose(0, 1).flatten(1).T
    if (halo := run.halo) is not None:
        keys, values = halo.keys(keys, values)
    accum_dtype = torch.promote_types(k.dtype, torch.float32)
    by_kernel = uses_varlen_kernel(q, run.kernel)
    if by_kernel and (of_call := run.only_call) is not None:
        parts = of_out, queries, keys, values, results, logs.T.contiguous()
        of_q, of_k, of_v = flash_gradients(parts, *of_call, True, **run.band)
        if halo is not None:
            of_k, of_v = halo.gradients(of_k.to(accum_dtype), of_v.to(accum_dtype))
        return _as_inputs(of_q, of_k, of_v, k.dtype, len(q))
    of_q = torch.empty_like(queries, memory_format=torch.contiguous_format)
    of_k, of_v = (x.new_zeros(x.shape, dtype=accum_dtype) for x in (keys, values))
    if by_kernel:
        for rows, span, of_call in calls_of(run.calls, run.edges):
            given = of_out[rows], queries[rows], keys[span], values[span], results[rows]
            parts = *given, logs[rows].T.contiguous()
            found = flash_gradients(parts, *of_call, True, **run.band)
            of_q[rows] = found[0]
            of_k[span].add_(found[1])
            of_v[span].add_(found[2])
    else:
        gradients: Callable[..., tuple[Tensor, ...]] = partial(plain_gradients, cap=run.cap)
        if uses_cpu_kernel(q, run.kernel):
            gradients = cpu_gradients
        for chunks in chunks_of(run.table):
            mask = _mask(chunks, run.window, q)
            of_rows = map(chunks.of_queries, (of_out, queries, results, logs))
            read = chunks.of_keys(keys), chunks.of_keys(values)
            part, *of_keys = gradients(mask is None, run.scale, *of_rows, *read, mask)
            chunks.of_queries(of_q).copy_(part)
            for to, value in zip((of_k, of_v), of_keys, strict=True):
                parts = value.split((chunks.before, chunks.number), dim=2)
                for view, own in zip(chunks.parts_of_keys(to), parts, strict=True):
                    view.add_(own)
    if halo is not None:
        of_k, of_v = halo.gradients(of_k, of_v)
    return _as_inputs(of_q, of_k, of_v, k.dtype, len(q))


def _as_inputs(
    of_q: Tensor, of_k: Tensor, of_v: Tensor, dtype: torch.dtype, batch: int
) -> tuple[Tensor, Tensor, Tensor]:
    """Reshapes gradients (tokens, heads, head_dim) to the shapes of `attend_in_window`'s inputs."""
    q, k, v = (as_batch(x.to(dtype).contiguous(), batch) for x in (of_q, of_k, of_v))
    return q, k, v


def _mask(chunks: Chunks, window: int, q: Tensor) -> Tensor | None:
    """Returns a mask (queries, keys), which is 0 where a query sees the key and −∞ elsewhere.

    Returns None if the mask would be the usual causal one.
    """
    if not chunks.before and chunks.number <= window:
        return None
    shape = chunks.number, chunks.before + chunks.number
    hidden = torch.ones(shape, dtype=torch.bool, device=q.device)
    seen = hidden.triu(chunks.before - window + 1).tril(chunks.before)
    mask = torch.zeros(shape, dtype=q.dtype, device=q.device)
    return mask.masked_fill_(~seen, -torch.inf)


def _forward_shape(q: Tensor, k: Tensor, v: Tensor, *how: Any) -> tuple[Tensor, Tensor]:
    return empty_for_only_block(q)


def _backward_shape(grad: Tensor, q: Tensor, k: Tensor, v: Tensor, *more: Any) -> Any:
    shapes = (x.shape for x in (q, k, v))
    return tuple(q.new_empty(b, n, h, d).transpose(1, 2) for b, h, n, d in shapes)


WHERE = (
    "Tensor handle, Tensor table, Tensor calls, Tensor edges, Tensor? sent, Tensor? order, "
    "Tensor? places, Tensor? counts, str kernel, int window, "
    "float? scale, float? cap"
)
STEPS = _forward, _forward_shape, _backward, _backward_shape
KEPT = "Tensor out, Tensor sums"
_attend = operator("window_attention", "Tensor q, Tensor k, Tensor v", WHERE, *STEPS, kept=KEPT)
_attend_sinks = operator_with_sinks("window_attention", WHERE, *STEPS, kept=KEPT)
