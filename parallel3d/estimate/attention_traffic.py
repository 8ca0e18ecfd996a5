"""Counts the traffic of attention between context-parallel ranks, by style."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from typing import Any, NamedTuple

import numpy as np

from parallel3d.blueprint.sizes import Number
from parallel3d.context_parallel.halo import amounts, needed_by_ranks
from parallel3d.context_parallel.split import SequenceSplit
from parallel3d.models.declared import LayerKind, heads_of

OVERLAPPED = ("gather", "ring")  # styles that send while attention computes


class HeadWidths(NamedTuple):
    """Sizes of attention on one tensor-parallel rank.

    Attributes:
        queries, keys: elements per token of all query heads, and of all key heads.
        key_heads: number of key heads.
    """

    queries: Number
    keys: Number
    key_heads: Number

    @classmethod
    def of(cls, kind: LayerKind, tp: int) -> HeadWidths:
        queries, keys = (dim.local(tp) for dim in heads_of(kind))
        return cls(queries, keys, keys // kind.head_size)


class SentCalls(NamedTuple):
    """Calls of one collective, all of the same size, by one rank for one layer and micro-batch.

    Attributes:
        op: name of the collective.
        nbytes: bytes of the whole buffer of one call, as nccl-tests counts them.
        count: number of calls in the forward and the backward.
        again: number of additional calls if the backward recomputes attention.
        what: content of the buffer, for reports.
        backward: the number of calls in the backward, which `count` includes.
        of_results: whether the calls send the results of attention, which attention itself does not
            keep. A recomputation of attention alone only needs them if the next layer keeps them.
    """

    op: str
    nbytes: Number
    count: Number
    again: Number
    what: str
    backward: Number
    of_results: bool = False


def sends(
    style: str, w: HeadWidths, tokens: Number, item: Number, cp: Number, drops: bool = False
) -> Iterator[SentCalls]:
    """Yields the collectives of a layer's attention (context_parallel/attention.py).

    Args:
        style: `context_parallel.style`.
        w: sizes of attention on one tensor-parallel rank.
        tokens: number of tokens of a micro-batch on one context-parallel rank.
        item: bytes of an element.
        cp: number of context-parallel ranks.
        drops: whether attention has dropout; if so, keys and values are gathered separately.
    """
    # `own`: bytes of the keys and values of this rank's tokens.
    own, what = 2 * tokens * w.keys * item, "keys and values"
    if style == "gather" and drops:
        yield SentCalls("all_gather", cp * own / 2, 2, 2, what, 0)
        yield SentCalls("reduce_scatter", cp * own / 2, 2, 0, f"gradients of {what}", 2)
    elif style == "gather":  # a recomputed forward replaces the all-gather of the backward
        yield SentCalls("all_gather", cp * own, 2, 0, what, 1)
        yield SentCalls("reduce_scatter", cp * own, 1, 0, f"gradients of {what}", 1)
    elif style == "ring":
        yield SentCalls("send_recv", own, 2 * (cp - 1), cp - 1, what, cp - 1)
        wide = own / item * np.maximum(item, 4)
        yield SentCalls("send_recv", wide, cp - 1, 0, f"gradients of {what}", cp - 1)
    else:
        copies = np.maximum(cp / w.key_heads, 1)  # each rank needs at least one key-value head
        queries = tokens * w.queries * item
        yield SentCalls("all_to_all", queries + own * copies, 2, 1, "heads of whole sequences", 1)
        yield SentCalls("all_to_all", queries, 2, 1, "results of heads", 1, of_results=True)


@functools.lru_cache(maxsize=256)
def halo_tokens(
    split: SequenceSplit, samples: int, window: int
) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Returns how many tokens' keys and values each rank sends and receives for a sliding window.

    Each sample is assumed to be one document.
    """
    starts = split.pad_starts(np.zeros((samples, split.length), dtype=np.int32))
    each = amounts(*needed_by_ranks(split.held(starts), starts, window))
    return tuple(each.sum(0).tolist()), tuple(each.sum(1).tolist())


def halo_sends(w: HeadWidths, sent: Number, received: Number, item: Number) -> Iterator[SentCalls]:
    """Yields the collectives of a sliding-window layer (context_parallel/window_attention.py).

    `sent`, `received`: number of tokens of a micro-batch whose keys and values the rank sends, and
    number of those that it receives.
    """
    each, what = 2 * w.keys * item, "keys and values of windows"
    yield SentCalls("all_to_all", sent * each, 2, 1, what, 1)
    wide = each / item * np.maximum(item, 4)
    yield SentCalls("all_to_all", received * wide, 1, 0, f"gradients of {what}", 1)


def exposed(style: str, sent: Any, attention: Any, share: float) -> Any:
    """Returns the seconds of communication that the computation of attention does not hide.

    Args:
        style: `context_parallel.style`.
        sent: seconds of communication.
        attention: seconds of computation.
        share: fraction of `sent` that no computation hides, in styles that overlap.
    """
    if style not in OVERLAPPED:
        return sent
    return np.maximum(share * sent, sent - attention)
