"""What attention sends over context-parallel ranks, by style, and which style costs least."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

import numpy as np

from parallel3d.estimate.ops import Number, Widths

STYLES = ("gather", "heads", "ring")
OVERLAPPED = ("gather", "ring")  # attention runs while these send


# Bytes of a rank's keys and values that are gathered together: enough to be bound by bandwidth.
LEAST_BYTES = 4 << 20


def heads_at_once(heads: int, of_head: float) -> int:
    """Returns how many key-value heads are gathered together, a divisor of `heads`.

    `of_head`: bytes of one head's keys and values on a rank.
    """
    enough = (n for n in range(1, heads) if heads % n == 0 and n * of_head >= LEAST_BYTES)
    return next(enough, heads)


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


def splits_heads(heads: Number, kv_heads: Number, cp: Number) -> Any:
    """Whether style=heads can divide the heads of a tensor rank over cp ranks."""
    even = (np.mod(kv_heads, cp) == 0) | (np.mod(cp, kv_heads) == 0)
    return (np.mod(heads, cp) == 0) & even
