"""Counts what attention sends over context-parallel ranks, by style."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

import numpy as np

from parallel3d.blueprint.ops import Number, Widths

OVERLAPPED = ("gather", "ring")  # attention runs while these send


class Sent(NamedTuple):
    """Equal calls of one layer and micro-batch on one rank.

    Attributes:
        nbytes: of one call, the whole buffer, as nccl-tests counts it.
        count: calls in forward and backward. again: more of them if the backward repeats attention.
    """

    op: str
    nbytes: Number
    count: Number
    again: Number
    what: str


def sends(
    style: str, w: Widths, tokens: Number, item: Number, cp: Number, drops: bool = False
) -> Iterator[Sent]:
    """Yields what a layer's attention sends (context_parallel/attention.py).

    Args:
        w: of one tensor rank. tokens: of a micro-batch on one context-parallel rank.
        item: bytes of an element. drops: with dropout, which gathers keys and values apart.
    """
    own, what = 2 * tokens * w.keys * item, "keys and values"  # of this rank
    if style == "gather" and drops:
        yield Sent("all_gather", cp * own / 2, 2, 2, what)
        yield Sent("reduce_scatter", cp * own / 2, 2, 0, f"gradients of {what}")
    elif style == "gather":  # a repeated forward keeps for the backward what it gathers
        yield Sent("all_gather", cp * own, 2, 0, what)
        yield Sent("reduce_scatter", cp * own, 1, 0, f"gradients of {what}")
    elif style == "ring":
        yield Sent("send_recv", own, 2 * (cp - 1), cp - 1, what)
        wide = own / item * np.maximum(item, 4)
        yield Sent("send_recv", wide, cp - 1, 0, f"gradients of {what}")
    else:
        copies = np.maximum(cp / w.key_heads, 1)  # a rank has one key-value head at least
        queries = tokens * w.queries * item
        yield Sent("all_to_all", queries + own * copies, 2, 1, "heads of whole sequences")
        yield Sent("all_to_all", queries, 2, 1, "results of heads")


def exposed(style: str, sent: Any, attention: Any, share: float) -> Any:
    """Returns the seconds of `sent` that a rank waits, beside `attention`'s seconds.

    `share`: fraction of an overlapped style's seconds that is not hidden even by long attention.
    """
    if style not in OVERLAPPED:
        return sent
    return np.maximum(share * sent, sent - attention)
