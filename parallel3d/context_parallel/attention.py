"""Computes causal attention of sequences that are split over context-parallel ranks.

There are three styles. The table shows the bytes that a rank sends per layer and micro-batch. Here
p = cp, K is the size of the keys and values of the whole padded sequences on one tensor-parallel
rank in the dtype of attention, and Q is the size of the queries:

| style  | forward                                 | backward                                |
|--------|-----------------------------------------|-----------------------------------------|
| gather | all-gather: (p−1)/p · K                 | all-gather, reduce-scatter:             |
|        |                                         | 2 · (p−1)/p · K                         |
| ring   | p−1 sends of K/p: (p−1)/p · K           | the same, and gradients in fp32 or      |
|        |                                         | better: 2 · (p−1)/p · K in fp32, 3 · in |
|        |                                         | half precision                          |
| heads  | all-to-all of q, k, v and of the        | the same                                |
|        | result: (p−1)/p · (2 · Q + K') / p      |                                         |

K' is K, or K · p / (key-value heads) if there are fewer key-value heads than ranks. If attention is
recomputed, its forward runs twice. The second forward of gather keeps the gathered tensors for the
backward that follows, so there are two all-gathers in total. With attention dropout, keys and
values are gathered separately, for all heads at once, and are kept.

gather: The keys and values of some heads are gathered while attention of the previous heads runs. A
query attends to consecutive positions, beginning with its document, so the kernel is called once
per document.

ring: The keys and values of a rank travel to the next rank while attention to them runs, and the
results are merged (Liu et al. 2023, Ring Attention).

heads: Each rank attends to whole sequences with a part of the heads (Jacobs et al. 2023,
DeepSpeed-Ulysses).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from parallel3d.blueprint.sizes import heads_at_once
from parallel3d.comm import collectives
from parallel3d.comm.collectives import Work
from parallel3d.comm.group import SINGLE, Group
from parallel3d.config.values import AUTO
from parallel3d.context_parallel.document_attention import (
    Block,
    attend_block,
    attend_only_block,
    differentiate_block,
    differentiate_only_block,
    empty_for_blocks,
    empty_for_only_block,
    repeated,
)
from parallel3d.context_parallel.documents import AttentionBlocks, Documents, SequenceShard
from parallel3d.context_parallel.sinks import operator_with_sinks
from parallel3d.device.fused import operator, register, registered


@dataclass(frozen=True)
class ContextParallel:
    """The ranks that share sequences, and the way in which they exchange keys and values.

    Attributes:
        style: "gather", "ring" or "heads".
        keeps: whether the forward keeps the gathered tensors for the backward. A forward that is
            recomputed keeps them, because its backward comes right after it.
        handle: a tensor that stands for this object in operators (see `device.fused.register`).
    """

    group: Group = SINGLE
    style: str = "gather"
    keeps: bool = False
    handle: Tensor = field(init=False, compare=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "handle", register(self))

    def first_head(self, heads: int) -> int:
        """Returns the index of the first of the `heads` query heads that this rank computes."""
        return heads // self.group.size * self.group.index if self.style == "heads" else 0


ONE_RANK = ContextParallel()


def attend_within(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    documents: Documents,
    kernel: str = AUTO,
    scale: float | None = None,
    sinks: Tensor | None = None,
    cap: float | None = None,
) -> Tensor:
    """Attends from each query to the keys of its own document up to the query's position.

    The result has the shape of q and is stored as (b, s, heads, head_dim).

    Args:
        q: (b, heads, s, head_dim).
        k, v: the same, with as many heads, or fewer if several query heads share a key-value head.
        kernel: the key `attention_kernel`.
        scale: factor that multiplies the scores; None: head_dim^-½.
        sinks: the sinks of the heads of q, or None for none.
        cap: c of the scores c · tanh(score / c), which needs kernel=math; None: no cap.
    """
    of = documents.blocks
    where = ONE_RANK.handle, of.table, of.calls, of.edges, None, None, kernel, False, scale, cap
    return _attend(q, k, v, *where) if sinks is None else _attend_sinks(q, k, v, sinks, *where)


def attend_across(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cp: ContextParallel,
    shard: SequenceShard,
    kernel: str = AUTO,
    scale: float | None = None,
    sinks: Tensor | None = None,
    cap: float | None = None,
) -> Tensor:
    """Attends from this rank's queries to the keys of all ranks, within each query's document.

    The keys are gathered, or travel in a ring. The arguments and the result are as for
    `attend_within`, with this rank's n tokens of each sequence instead of all s tokens.
    """
    of = shard.blocks
    tables = of.table, of.calls, of.edges, shard.order, shard.places
    where = cp.handle, *tables, kernel, cp.keeps, scale, cap
    return _attend(q, k, v, *where) if sinks is None else _attend_sinks(q, k, v, sinks, *where)


class _Run(NamedTuple):
    """The arguments of the attention operator other than q, k and v.

    `has_sinks`: whether sinks will join the result, which needs the sums then.
    """

    handle: Tensor
    table: Tensor
    calls: Tensor
    edges: Tensor
    order: Tensor
    places: Tensor
    kernel: str
    keeps: bool
    scale: float | None
    cap: float | None
    has_sinks: bool = False

    @property
    def cp(self) -> ContextParallel:
        return registered(self.handle)

    def block(self, i: int) -> Block:
        blocks = AttentionBlocks(self.table, self.calls, self.edges)
        is_only = self.cp.group.size == 1
        needs_sums = self.has_sinks or not is_only
        return Block.of(blocks, i, is_only, self.scale, needs_sums, self.cap)


def _forward(q: Tensor, k: Tensor, v: Tensor, *how: Any) -> tuple[Tensor, Tensor, Tensor]:
    """Returns the result, log Σ exp(scores) of each query, and the keys and values to keep.

    The last tensor is empty if no keys and values are kept.
    """
    run = _Run(*how)
    cp, kernel = run.cp, run.kernel
    kept = _empty_kept(k, run.order, cp.keeps)
    if cp.group.size == 1:
        return *attend_only_block(q, k, v, run.block(0), kernel), kept
    out, sums = empty_for_blocks(q)
    if cp.style == "ring":
        for i, keys in enumerate(_around(_together(k, v), cp.group)):
            attend_block(out, sums, q, *_apart(keys, len(q)), run.block(i), kernel)
    else:
        to = kept if cp.keeps else None
        for heads, whole in _gathered(k, v, cp.group, run.order, to):
            of = _query_heads(heads, q, k)
            parts = out[:, of], sums[:, of], q[:, of], *_apart(whole, len(q))
            attend_block(*parts, run.block(0), kernel)
    return out.to(q.dtype), sums, kept


def _backward(
    grad: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    sums: Tensor,
    kept: Tensor,
    *how: Any,
) -> tuple[Tensor, Tensor, Tensor]:
    run = _Run(*how)
    grad = grad if grad.stride(-1) == 1 else grad.contiguous()
    if run.cp.group.size == 1:
        return differentiate_only_block(grad, q, k, v, out, sums, run.block(0), run.kernel)
    of_q = empty_for_blocks(q)[0].zero_()
    backward = _ring_backward if run.cp.style == "ring" else _gather_backward
    of_k, of_v = backward(of_q, grad, q, k, v, out, sums, kept, run)
    return of_q.to(q.dtype), of_k, of_v


def _forward_shape(q: Tensor, k: Tensor, v: Tensor, *how: Any) -> tuple[Tensor, Tensor, Tensor]:
    run = _Run(*how)
    is_split = run.order is not None
    out, sums = empty_for_blocks(q, q.dtype) if is_split else empty_for_only_block(q)
    return out, sums, _empty_kept(k, run.order, run.keeps)


def _backward_shape(grad: Tensor, q: Tensor, k: Tensor, v: Tensor, *more: Any) -> Any:
    run = _Run(*more[KEPT.count("Tensor") :])
    if run.order is not None:
        return empty_for_blocks(q, q.dtype)[0], *k.new_empty(2, *k.shape).unbind(0)
    return tuple(empty_for_blocks(x, x.dtype)[0] for x in (q, k, v))


WHERE = (
    "Tensor handle, Tensor table, Tensor calls, Tensor edges, Tensor? order, Tensor? places, "
    "str kernel, bool keeps, float? scale, float? cap"
)
KEPT = "Tensor out, Tensor sums, Tensor kept"
_attend = operator(
    "attention",
    "Tensor q, Tensor k, Tensor v",
    WHERE,
    _forward,
    _forward_shape,
    _backward,
    _backward_shape,
    kept=KEPT,
)
_attend_sinks = operator_with_sinks(
    "attention",
    WHERE,
    lambda *given: _forward(*given, True),
    _forward_shape,
    lambda *given: _backward(*given, True),
    _backward_shape,
    kept=KEPT,
)


# Gathered keys and values, a few heads at a time


def _heads_at_once(k: Tensor) -> int:
    """Returns how many of the heads of k (b, heads, n, head_dim) are gathered together.

    The result divides the number of heads.
    """
    return heads_at_once(k.shape[1], 2 * k[:, 0].numel() * k.itemsize)


def _empty_kept(k: Tensor, order: Tensor, keeps: bool) -> Tensor:
    """Allocates the kept keys and values (groups of heads, 2, heads, b · padded, head_dim).

    Returns an empty tensor if `keeps` is false.
    """
    if not keeps:
        return k.new_empty(0)
    heads = _heads_at_once(k)
    return k.new_empty(k.shape[1] // heads, 2, heads, len(order), k.shape[-1])


def _query_heads(heads: slice, q: Tensor, k: Tensor) -> slice:
    times = q.shape[1] // k.shape[1]
    return slice(heads.start * times, heads.stop * times)


def _gathered(
    k: Tensor, v: Tensor, group: Group, order: Tensor, kept: Tensor | None
) -> Iterator[tuple[slice, Tensor]]:
    """Yields (a range of heads, their keys and values (2, heads, b · padded, head_dim)).

    The next heads are gathered while the caller uses these. The keys and values are written into
    `kept`, unless it is None.
    """
    at_once = _heads_at_once(k)
    parts = [slice(i, i + at_once) for i in range(0, k.shape[1], at_once)]
    gathered, gathering = _start_gather(k[:, parts[0]], v[:, parts[0]], group)
    for i, heads in enumerate(parts):
        gathering.wait()
        by_rank = gathered
        if i + 1 < len(parts):
            following = parts[i + 1]
            gathered, gathering = _start_gather(k[:, following], v[:, following], group)
        yield heads, in_sequence_order(by_rank, order, None if kept is None else kept[i])


def _start_gather(k: Tensor, v: Tensor, group: Group) -> tuple[Tensor, Work]:
    """Starts gathering the keys and values of all ranks into (size, b, n, 2, heads, head_dim)."""
    b, heads, n, head_dim = k.shape
    gathered = k.new_empty(group.size, b, n, 2, heads, head_dim)
    for to, x in zip(gathered[group.index].unbind(2), (k, v), strict=True):
        to.copy_(x.transpose(1, 2))
    return gathered, collectives.all_gather_bucket(gathered.view(-1), group)


def in_sequence_order(by_rank: Tensor, order: Tensor, out: Tensor | None = None) -> Tensor:
    """Reorders tokens of all ranks (size, b, n, …, head_dim) to (…, b · padded, head_dim).

    The tokens of each head are contiguous in the result, which makes the kernel about 10% faster.
    """
    return torch.index_select(by_rank.flatten(0, 2).movedim(0, -2), -2, order, out=out)


def in_rank_order(whole: Tensor, places: Tensor) -> Tensor:
    """Reorders tokens of sequences (…, b · padded, head_dim) to (size · b · n, …, head_dim)."""
    return whole.movedim(-2, 0).index_select(0, places)


def _together(k: Tensor, v: Tensor) -> Tensor:
    """Joins keys and values into one tensor, as the inverse of `_apart`."""
    return torch.stack((k.transpose(0, 1), v.transpose(0, 1))).flatten(2, 3)


def _apart(whole: Tensor, batch: int) -> tuple[Tensor, Tensor]:
    """Splits (2, heads, b · padded, head_dim) into two (b, heads, padded, head_dim)."""
    k, v = whole.unflatten(2, (batch, -1)).transpose(1, 2).unbind(0)
    return k, v


def _gather_backward(
    of_q: Tensor,
    grad: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    sums: Tensor,
    kept: Tensor,
    run: _Run,
) -> Tensor:
    """Adds the gradient of q to `of_q`, and returns those of k and v (2, b, heads, n, head_dim)."""
    b, of_keys = len(k), k.new_empty(2, *k.shape)
    accum_dtype = torch.promote_types(k.dtype, torch.float32)
    finish_reducing: Callable[[], None] | None = None
    group, block = run.cp.group, run.block(0)
    for heads, whole in _kept(kept) or _gathered(k, v, group, run.order, None):
        of_whole = torch.zeros_like(whole, dtype=accum_dtype)
        of = _query_heads(heads, q, k)
        differentiate_block(
            of_q[:, of],
            *_apart(of_whole, b),
            grad[:, of],
            q[:, of],
            *_apart(whole, b),
            out[:, of],
            sums[:, of],
            block,
            run.kernel,
        )
        finish = _start_reducing(of_whole, of_keys[:, :, heads], run.places, group)
        # The gradients of the previous heads were reduced while these heads were computed.
        if finish_reducing is not None:
            finish_reducing()
        finish_reducing = finish
    assert finish_reducing is not None  # there is at least one group of heads
    finish_reducing()
    return of_keys


def _kept(kept: Tensor) -> Iterator[tuple[slice, Tensor]] | None:
    """Returns the results of the forward's `_gathered`, or None if they were not kept."""
    if not kept.numel():
        return None
    heads = kept.shape[2]
    return ((slice(i * heads, (i + 1) * heads), whole) for i, whole in enumerate(kept))


def _start_reducing(whole: Tensor, to: Tensor, places: Tensor, group: Group) -> Callable[[], None]:
    """Starts summing gradients (2, heads, b · padded, head_dim) over the ranks.

    Returns a function that waits and writes the sum for this rank's tokens to `to` (2, b, heads, n,
    head_dim). The sum has the dtype of `to`, like the reductions of tensor parallelism.
    """
    to = to.permute(1, 3, 0, 2, 4)  # (b, n, 2, heads, head_dim)
    by_rank = in_rank_order(whole, places).to(to.dtype)
    own = collectives.own_shard(by_rank, group)
    work = collectives.reduce_scatter_bucket(by_rank.view(-1), group)

    def finish() -> None:
        work.wait()
        to.copy_(own.view(to.shape))

    return finish


# A ring


def _around(own: Tensor, group: Group) -> Iterator[Tensor]:
    """Yields this rank's block, then the previous rank's, and so on around the ring.

    The next block is sent while the caller uses the current one.
    """
    block = own
    for _ in range(group.size - 1):
        following, arriving = collectives.ring_shift_async(block, group)
        yield block
        arriving.wait()
        block = following
    yield block


def _ring_backward(
    of_q: Tensor,
    grad: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    sums: Tensor,
    _: Tensor,
    run: _Run,
) -> Tensor:
    """Does the same as `_gather_backward` in a ring.

    The gradients travel one step behind their keys, and end on the rank that holds the keys.
    """
    b, accum_dtype = len(k), torch.promote_types(k.dtype, torch.float32)
    so_far: tuple[Tensor, Work] | None = None  # gradients on their way to this rank
    group = run.cp.group
    for i, block in enumerate(_around(_together(k, v), group)):
        of_block = torch.zeros_like(block, dtype=accum_dtype)
        differentiate_block(
            of_q,
            *_apart(of_block, b),
            grad,
            q,
            *_apart(block, b),
            out,
            sums,
            run.block(i),
            run.kernel,
        )
        if i == 0:
            own = of_block
            continue
        if so_far is not None:
            add_arriving(of_block, so_far)
        so_far = collectives.ring_shift_async(of_block, group)
    if so_far is not None:
        add_arriving(own, so_far)
    return torch.stack(_apart(own.to(k.dtype), b))


def add_arriving(gradients: Tensor, others: tuple[Tensor, Work]) -> None:
    """Waits for the sum of gradients from the previous ranks, and adds it to `gradients`."""
    found, arriving = others
    arriving.wait()
    gradients.add_(found)


# Whole sequences, with all heads or a part of them


def gather_sequence(x: Tensor, cp: ContextParallel, shard: SequenceShard) -> Tensor:
    """All-gathers x (b, heads, n, head_dim) to (b, heads, padded, head_dim) in sequence order."""
    return _exchange(x, cp, shard, "gather")


def to_heads(
    q: Tensor, k: Tensor, v: Tensor, cp: ContextParallel, shard: SequenceShard
) -> tuple[Tensor, Tensor, Tensor]:
    """Exchanges parts of sequences with all heads for whole sequences with a part of the heads.

    The shapes change from (b, heads, n, head_dim) to (b, heads / size, padded, head_dim). If there
    are fewer key-value heads than ranks, each of them goes to all ranks with its query heads.
    """
    size = cp.group.size
    parts = [repeated(x, max(x.shape[1], size)).unflatten(1, (size, -1)) for x in (q, k, v)]
    heads = [x.shape[2] for x in parts]
    mine = _exchange(torch.cat(parts, 2).flatten(1, 2), cp, shard, "to_heads")
    q, k, v = mine.split(heads, dim=1)
    return q, k, v


def to_share(x: Tensor, cp: ContextParallel, shard: SequenceShard) -> Tensor:
    """Exchanges like `to_heads`: x has each rank's share (b, size, n, width) of what heads need.

    The result is this rank's share for whole sequences (b, 1, padded, width).
    """
    return _exchange(x, cp, shard, "to_heads")


def to_tokens(y: Tensor, cp: ContextParallel, shard: SequenceShard) -> Tensor:
    """Exchanges results of attention back to this rank's tokens, as the inverse of `to_heads`."""
    return _exchange(y, cp, shard, "to_tokens")


def _exchange(x: Tensor, cp: ContextParallel, shard: SequenceShard, way: str) -> Tensor:
    return _exchange_tokens(x, cp.handle, shard.order, shard.places, way, cp.group.size)


BACK = {"gather": "scatter", "to_heads": "to_tokens", "to_tokens": "to_heads"}


def _exchanged(
    x: Tensor, handle: Tensor, order: Tensor, places: Tensor, way: str, size: int
) -> Tensor:
    """Exchanges x (b, heads, n or padded, head_dim) in the given way.

    The way is "gather", "to_heads", "to_tokens" or "scatter", which also sums over the ranks.
    """
    group = registered(handle).group
    b = len(x)
    tokens = x.transpose(1, 2)
    if way in ("gather", "to_heads"):
        if way == "gather":
            by_rank = collectives.all_gather(tokens.unsqueeze(0), group)
        else:
            by_rank = collectives.all_to_all(tokens.unflatten(2, (size, -1)).movedim(2, 0), group)
        return in_sequence_order(by_rank, order).unflatten(1, (b, -1)).transpose(0, 1)
    by_rank = in_rank_order(x.transpose(0, 1).flatten(1, 2), places).unflatten(0, (size, b, -1))
    if way == "scatter":
        return collectives.reduce_scatter(by_rank, group).squeeze(0).transpose(1, 2)
    parts = collectives.all_to_all(by_rank, group)
    return parts.movedim(0, 2).flatten(2, 3).transpose(1, 2)


def _exchange_shape(
    x: Tensor, handle: Tensor, order: Tensor, places: Tensor, way: str, size: int
) -> Tensor:
    b, heads, tokens, head_dim = x.shape
    heads = {"to_heads": heads // size, "to_tokens": heads * size}.get(way, heads)
    padded = way in ("gather", "to_heads")
    if padded:
        return x.new_empty(heads, b, tokens * size, head_dim).transpose(0, 1)
    return x.new_empty(b, tokens // size, heads, head_dim).transpose(1, 2)


def _back(grad: Tensor, *where: Any, run: Callable) -> Tensor:
    *tensors, way, size = where
    return run(grad, *tensors, BACK[way], size)


_exchange_tokens = operator(
    "exchange_tokens",
    "Tensor x",
    "Tensor handle, Tensor order, Tensor places, str way, int size",
    _exchanged,
    _exchange_shape,
    partial(_back, run=_exchanged),
    partial(_back, run=_exchange_shape),
)
