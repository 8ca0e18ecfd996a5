"""What attention sends over context-parallel ranks, by style, and which style costs least."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

import numpy as np

from parallel3d.estimate.ops import Number, Widths

STYLES = ("gather", "heads", "ring")
OVERLAPPED = ("gather", "ring")  # attention runs while these send


class Sent(NamedTuple):
    """A kind of calls of one layer and micro-batch on one rank.

    `nbytes`: of one call, the whole buffer, as nccl-tests counts it. `backward`: in the backward.
    """

    op: str
    nbytes: Number
    count: Number
    what: str
    backward: bool

    def times(self, style: str, again: Number) -> Number:
        """Returns the calls if the backward repeats attention (`again` 1) or not (0).

        gather keeps what a repeated forward gathers.
        """
        return self.count * (1 + again * (style != "gather" and not self.backward))


def sends(style: str, w: Widths, tokens: Number, item: Number, cp: Number) -> Iterator[Sent]:
    """Yields what a layer's attention sends (context_parallel/attention.py), without recomputation.

    `w`: of one tensor rank. `tokens`: of a micro-batch on one context-parallel rank. `item`: bytes
    of an element.
    """
    own = 2 * tokens * w.keys * item  # bytes of this rank's keys and values
    if style == "gather":
        yield Sent("all_gather", cp * own, 1, "keys and values", False)
        yield Sent("all_gather", cp * own, 1, "keys and values", True)
        yield Sent("reduce_scatter", cp * own, 1, "gradients of keys and values", True)
    elif style == "ring":
        yield Sent("send_recv", own, cp - 1, "keys and values", False)
        yield Sent("send_recv", own, cp - 1, "keys and values", True)
        wide = own / item * np.maximum(item, 4)
        yield Sent("send_recv", wide, cp - 1, "gradients of keys and values", True)
    else:
        copies = np.maximum(cp / w.key_heads, 1)  # each rank needs one key-value head
        queries = tokens * w.queries * item
        for what, backward in (("heads", False), ("gradients of heads", True)):
            yield Sent("all_to_all", queries + own * copies, 1, f"{what} to attention", backward)
            yield Sent("all_to_all", queries, 1, f"{what} from attention", backward)


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
