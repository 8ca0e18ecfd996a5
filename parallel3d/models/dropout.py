"""Dropout of activations and attention probabilities, with layout-independent masks.

A mask is a hash of (seed, site, sample of the run, head, position, channel), where a site is a
place in the model, such as `layers.3.mlp`. So all layouts drop the same elements, no mask is
stored, recomputation needs no generator state, and a resumed run uses the same masks as an
uninterrupted one.

Each row of channels has a 64-bit key: the hash (`device/hashing.py`), modulo 2⁶⁴, of

    S + A · sample + B · (2³² · head + position)

where S is a hash of seed and site. A hash of the key and the channel gives a 32-bit integer x. An
element is dropped if the low 31 bits of x are below p · 2³¹. All others are divided by 1 − p.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from parallel3d.context_parallel.document_attention import scale_of
from parallel3d.context_parallel.documents import Documents
from parallel3d.device.accelerator import is_accelerator
from parallel3d.device.capping import scaled_and_capped, slope_of
from parallel3d.device.fused import fused, operator
from parallel3d.device.hashing import ROW, SAMPLE, halves, mixed, signed, site_key
from parallel3d.models.layer_inputs import LayerInputs


class Dropout(nn.Module):
    """Drops elements at one site of the model during training.

    Args:
        site: name of the site, the same in every layout.
        p: probability that an element is dropped.
        first_head: index of this rank's first head.
        part: index of the part of the sequence that this rank holds; all parts have equal length.
    """

    def __init__(self, seed: int, site: str, p: float, first_head: int = 0, part: int = 0) -> None:
        super().__init__()
        self.p = p
        self.named = site
        self.first_head = first_head
        self.part = part
        # The key is a tensor, because `torch.compile` would make a number a constant of the code,
        # and layers could not share that code.
        self.site = torch.tensor(site_key(f"{seed}/dropout/{site}"))

    def forward(self, x: Tensor, inputs: LayerInputs) -> Tensor:
        """Drops elements of x, (b, [heads,] s, channels), unless `inputs.samples` is None.

        If context parallelism has split the sequences, `inputs.documents` has the positions of this
        rank's tokens.
        """
        samples, documents = inputs.samples, inputs.documents
        if samples is None or self.p == 0.0:
            return x
        first, positions = self.part * x.shape[-2], None
        if documents is not None and documents.shard is not None:
            positions = documents.shard.positions[:, first : first + x.shape[-2]]
        return _dropout(x, samples, self.site, positions, self.first_head, first, self.p)


# This is compiled even for small calls, which would otherwise take fifteen kernel launches.
@functools.partial(fused, least=0)
def row_keys(
    start: Tensor, rows: tuple[int, ...], first_head: int, positions: Tensor
) -> tuple[Tensor, Tensor]:
    """Returns the low and the high 32 bits of the rows' keys, each int32 (b, *rows, 1).

    `start`, (b,), is site + A · sample. `rows` is (s,) or (heads, s), `positions` (s,) or (b, s).
    """
    number = positions.to(torch.int64)
    if len(rows) == 2:
        heads = torch.arange(first_head, first_head + rows[0], device=positions.device)
        number = number.unsqueeze(-2) + (heads << 32).unsqueeze(1)
    key = start.view(-1, *(1 for _ in rows)) + number * signed(ROW, 64)
    return halves(key.unsqueeze(-1))


def starts_of_keys(samples: Tensor, site: Tensor) -> Tensor:
    # `site` is a 0-d tensor on the CPU, which a kernel takes as an argument. A copy to the device
    # would block the host.
    return site + samples * signed(SAMPLE, 64)


def are_dropped(low: Tensor, high: Tensor, channels: int, p: float) -> Tensor:
    """Returns the mask (*rows, channels) for rows with these keys; true means dropped."""
    channel = torch.arange(channels, dtype=torch.int32, device=low.device)
    bits = mixed(low, high, channel)
    # For p close to 1, round(p · 2³¹) is 2³¹, which overflows int32. So 1 is subtracted and the
    # comparison is `<=`.
    return bits.bitwise_and_(0x7FFFFFFF) <= round(p * (1 << 31)) - 1


def without(x: Tensor, dropped: Tensor, p: float) -> Tensor:
    """Returns contiguous x / (1 − p), with zeros where `dropped` is true."""
    return (x.contiguous() / (1.0 - p)).masked_fill_(dropped, 0.0)


@fused
def drop(x: Tensor, low: Tensor, high: Tensor, p: float) -> Tensor:
    return without(x, are_dropped(low, high, x.shape[-1], p), p)


def _dropped(
    x: Tensor,
    samples: Tensor,
    site: Tensor,
    positions: Tensor | None,
    first_head: int,
    first_position: int,
    p: float,
) -> Tensor:
    rows = tuple(x.shape[1:-1])
    if positions is None:
        positions = torch.arange(first_position, first_position + rows[-1], device=x.device)
    return drop(x, *row_keys(starts_of_keys(samples, site), rows, first_head, positions), p)


# This is opaque to the compiler, because the hash relies on integers that wrap around, which
# TorchInductor's C++ code does not guarantee.
_dropout = operator(
    "dropout",
    "Tensor x",
    "Tensor samples, Tensor site, Tensor? positions, int head, int position, float p",
    _dropped,
    lambda x, *_: x.new_empty(x.shape),
    _dropped,
    lambda grad, *_: grad.new_empty(grad.shape),
)


# Attention with dropped probabilities, in blocks of rows.

# Number of scores in a block. On a CPU they take 4 MiB in fp32 and stay in its cache; on an
# accelerator there are enough of them to make launch overhead negligible.
AT_ONCE = 1 << 20
AT_ONCE_ON_ACCELERATOR = 1 << 24
# Minimum number of queries in a block on a CPU. Every block reads all keys, so attention of (1, 16,
# 4096, 64) on one core took 4.0 s with 4 queries in a block and 1.5 s with 32.
LEAST_ROWS = 32


def attend_dropping(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    dropout: Dropout,
    samples: Tensor,
    documents: Documents | None,
    scale: float | None = None,
    window: int | None = None,
    sinks: Tensor | None = None,
    cap: float | None = None,
) -> Tensor:
    """Computes dropout(softmax(scale · q·kᵀ + causal mask))·v.

    PyTorch's kernels draw masks that depend on the layout. So the probabilities are computed here,
    for a block of queries at a time, and recomputed with their masks in the backward. The compiler
    sees one opaque operator.

    Args:
        q, k, v: (b, heads, s, head_dim), with the same number of heads; under context parallelism k
            and v belong to whole sequences, so there are more keys than queries.
        dropout: the dropout, whose `first_head` is the index of the first head of `q`.
        samples: (b,) int64, each sample's index in the run.
        documents: documents within which attention stays, or None if each sample is a document.
        scale: factor that multiplies the scores, or None for head_dim^-½.
        window: number of keys that a query sees, including its own, or None for all up to its own.
        sinks: the sinks of the heads, which join the softmax and are never dropped, or None.
        cap: c of the scores c · tanh(score / c), or None for no cap.

    Returns: (b, heads, s, head_dim), stored as (b, s, heads, head_dim).
    """
    starts = positions = None
    if documents is not None and q.shape[2] < k.shape[2]:
        assert documents.shard is not None  # else there are as many queries as keys
        starts, positions = documents.shard.starts, documents.shard.positions
    elif documents is not None:
        starts = documents.starts
    if window is not None:
        places = torch.arange(q.shape[2], device=q.device) if positions is None else positions
        first = (places - (window - 1)).clamp(min=0).to(torch.int32)
        starts = first.expand(len(q), -1) if starts is None else starts.maximum(first)
    of_masks = starts, positions, samples, dropout.site, dropout.first_head, dropout.p
    how = *of_masks, scale_of(q, scale), cap
    if sinks is None:
        return _dropped_attention(q, k, v, *how)
    return _dropped_attention_with_sinks(q, k, v, sinks, *how)


class _Block(NamedTuple):
    """A block of scores: of the queries `rows` of `samples`, with the first `keys` keys."""

    samples: slice
    rows: slice
    keys: int


def _blocks(q: Tensor, keys: int) -> Iterator[_Block]:
    """Yields the blocks into which the scores of all samples and queries are divided.

    On a CPU a block leaves out the keys that none of its queries sees. On an accelerator all blocks
    have the same shape, because each shape needs a fused kernel of its own.
    """
    b, heads, s, _ = q.shape
    if not is_accelerator(q.device):
        rows = max(LEAST_ROWS, AT_ONCE // (b * heads * keys))
        for begin in range(0, s, rows):
            end = min(begin + rows, s)
            yield _Block(slice(0, b), slice(begin, end), end if s == keys else keys)
        return
    rows = _divisor(s, AT_ONCE_ON_ACCELERATOR // (heads * keys))
    many = _divisor(b, AT_ONCE_ON_ACCELERATOR // (heads * rows * keys))
    for sample in range(0, b, many):
        for begin in range(0, s, rows):
            yield _Block(slice(sample, sample + many), slice(begin, begin + rows), keys)


def _divisor(n: int, most: int) -> int:
    """Returns the largest divisor of `n` that is at most `most`, or 1 if there is none."""
    return next((d for d in range(min(n, most), 1, -1) if n % d == 0), 1)


def _capped(products: Tensor, cap: float | None) -> Tensor:
    """Returns the scores, in fp32 or better, of products of keys and scaled queries."""
    wide = products.to(torch.promote_types(products.dtype, torch.float32))
    return scaled_and_capped(wide, 1.0, cap)


def _probabilities(
    scores: Tensor, positions: Tensor, starts: Tensor | None, sinks: Tensor | None
) -> tuple[Tensor, Tensor | None]:
    """Returns the softmax of scores, fp32 or better, over the keys that each query sees.

    With `sinks`, also returns the probabilities of the sinks (b, heads, s, 1).
    `positions`: the positions of the queries, (b or 1, s).
    """
    key = torch.arange(scores.shape[-1], dtype=torch.int32, device=scores.device)
    unseen = key > positions[:, None, :, None]
    if starts is not None:
        unseen = unseen | (key < starts[:, None, :, None])
    scores = scores.masked_fill(unseen, -torch.inf)
    if sinks is None:
        return scores.softmax(-1), None
    sums = scores.logsumexp(-1, keepdim=True)
    joined = torch.logaddexp(sums, sinks.view(-1, 1, 1))
    return (scores - joined).exp(), (sinks.view(-1, 1, 1) - joined).exp()


@fused
def dropped_softmax(
    products: Tensor,
    positions: Tensor,
    starts: Tensor | None,
    low: Tensor,
    high: Tensor,
    p: float,
    sinks: Tensor | None,
    cap: float | None,
) -> Tensor:
    probabilities, _ = _probabilities(_capped(products, cap), positions, starts, sinks)
    dropped = are_dropped(low, high, products.shape[-1], p)
    return without(probabilities, dropped, p).to(products.dtype)


@fused
def dropped_softmax_backward(
    grad: Tensor,
    products: Tensor,
    positions: Tensor,
    starts: Tensor | None,
    low: Tensor,
    high: Tensor,
    p: float,
    sinks: Tensor | None,
    cap: float | None,
) -> tuple[Tensor, Tensor, Tensor | None]:
    """Returns the recomputed result of the forward, and the gradients of products and sinks."""
    # Let Z be the mask divided by 1 − p. Then dP = Z ∘ (dO·Vᵀ) and dS = P ∘ (dP − Σ dP ∘ P)
    # (Dao et al. 2022, §B.2). A sink's value is 0, and so is its dP.
    scores, dtype = _capped(products, cap), products.dtype
    probabilities, of_sinks = _probabilities(scores, positions, starts, sinks)
    dropped = are_dropped(low, high, scores.shape[-1], p)
    of_probabilities = without(grad.to(probabilities.dtype), dropped, p)
    along = (of_probabilities * probabilities).sum(-1, keepdim=True)
    of_scores = of_probabilities.sub_(along).mul_(probabilities)
    if of_sinks is not None:
        of_sinks = of_sinks.mul_(along).sum((0, 2, 3)).neg_()
    if cap is not None:
        of_scores.mul_(slope_of(scores, 1.0, cap))
    return without(probabilities, dropped, p).to(dtype), of_scores.to(dtype), of_sinks


def _scores(
    block: _Block,
    q: Tensor,
    k: Tensor,
    sinks: Tensor | None,
    cap: float | None,
    starts: Tensor | None,
    positions: Tensor | None,
    samples: Tensor,
    site: Tensor,
    head: int,
    p: float,
) -> tuple[Any, ...]:
    """Returns the arguments of a block's softmax: its products, and the data of the two masks.

    `q` is already scaled.
    """
    of, rows, keys = block
    products = q[of, :, rows] @ k[of, :, :keys].mT
    if positions is None:
        places = torch.arange(rows.start, rows.stop, dtype=torch.int32, device=q.device)[None]
    else:
        places = positions[of, rows].to(torch.int32)
    shape = (q.shape[1], places.shape[1])
    low, high = row_keys(starts_of_keys(samples[of], site), shape, head, places)
    starts = None if starts is None else starts[of, rows]
    return products, places, starts, low, high, p, sinks, cap


def _forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    starts: Tensor | None,
    *how: Any,
    sinks: Tensor | None = None,
) -> Tensor:
    *where, scale, cap = how
    out, q = _empty(q), q * scale
    for block in _blocks(q, k.shape[2]):
        kept = dropped_softmax(*_scores(block, q, k, sinks, cap, starts, *where))
        out[block.samples, :, block.rows] = kept @ v[block.samples, :, : block.keys]
    return out


def _backward(
    grad: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    starts: Tensor | None,
    *how: Any,
    sinks: Tensor | None = None,
) -> tuple[Tensor, ...]:
    *where, scale, cap = how
    of_q = _empty(q)
    of_sinks = None if sinks is None else torch.zeros_like(sinks)
    q, accum_dtype = q * scale, torch.promote_types(q.dtype, torch.float32)
    of_k, of_v = (torch.zeros_like(x, dtype=accum_dtype) for x in (k, v))
    for block in _blocks(q, k.shape[2]):
        of, rows, keys = block
        of_out = grad[of, :, rows]
        scores = _scores(block, q, k, sinks, cap, starts, *where)
        of_kept = of_out @ v[of, :, :keys].mT
        kept, of_scores, of_part = dropped_softmax_backward(of_kept, *scores)
        if of_sinks is not None and of_part is not None:
            of_sinks += of_part
        of_v[of, :, :keys] += kept.mT @ of_out
        of_q[of, :, rows] = (of_scores @ k[of, :, :keys]).mul_(scale)
        of_k[of, :, :keys] += of_scores.mT @ q[of, :, rows]
    found = of_q, of_k.to(k.dtype), of_v.to(v.dtype)
    return found if of_sinks is None else (*found, of_sinks)


def _empty(like: Tensor) -> Tensor:
    b, heads, s, size = like.shape
    return like.new_empty(b, s, heads, size).transpose(1, 2)


WHERE = (
    "Tensor? starts, Tensor? positions, Tensor samples, Tensor site, int head, float p, "
    "float scale, float? cap"
)
_dropped_attention = operator(
    "dropped_attention",
    "Tensor q, Tensor k, Tensor v",
    WHERE,
    _forward,
    lambda q, *_: _empty(q),
    _backward,
    lambda grad, q, k, v, *_: (_empty(q), torch.empty_like(k), torch.empty_like(v)),
    kept="",
)
_dropped_attention_with_sinks = operator(
    "dropped_attention_with_sinks",
    "Tensor q, Tensor k, Tensor v, Tensor sinks",
    WHERE,
    lambda q, k, v, sinks, *how: _forward(q, k, v, *how, sinks=sinks),
    lambda q, *_: _empty(q),
    lambda grad, q, k, v, sinks, *how: _backward(grad, q, k, v, *how, sinks=sinks),
    lambda grad, q, *more: (_empty(q), *(torch.empty_like(x) for x in more[:3])),
    kept="",
)
