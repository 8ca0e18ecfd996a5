"""Provides context parallelism for any model: splits sequences and computes their attention."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from parallel3d.blueprint.sizes import STYLES, splits_heads
from parallel3d.comm.group import Group, GroupLike, group_of
from parallel3d.context_parallel.attention import ContextParallel
from parallel3d.context_parallel.documents import Documents, make_documents
from parallel3d.context_parallel.split import SequenceSplit
from parallel3d.errors import UserError, nearest
from parallel3d.models.attention import AttentionOptions, attend_split
from parallel3d.models.layer_inputs import LayerInputs


class SplitSequences:
    """Splits the tokens of packed documents over the ranks of a group.

    A sequence is padded at its end to a multiple of twice the number of ranks (a single rank needs
    no padding). Each rank holds a piece of the sequence's first half and the mirrored piece of its
    second half, so that all ranks have equal work under a causal mask. All ranks must pass the same
    arguments; nothing is communicated.

    Args:
        lengths: the lengths of the documents of each sequence in the batch, in order, such as
            [[100, 28], [128]]. All sequences must have the same total length.
        group: the ranks: `groups.cp`, a process group, a mesh, or None for all ranks.
        device: device of `positions` and of the tensors that are passed to `take`.
        balanced: whether to balance the work if documents make the pieces uneven. Each rank then
            gets the same number of smaller blocks, which are chosen by their attention's work. The
            option has no effect on the style "heads", whose work is always even.

    Attributes:
        positions: tensor (b, n) of int64 with the position of each of this rank's n tokens in its
            document.

    Raises:
        UserError: lengths are invalid, or the sequences have different lengths.
    """

    def __init__(
        self,
        lengths: Sequence[Sequence[int]],
        group: GroupLike = None,
        *,
        device: torch.device | str = "cpu",
        balanced: bool = False,
    ) -> None:
        self.group = group_of(group)
        self.device = torch.device(device)
        starts = _starts(lengths)
        self.batch, self.length = starts.shape
        size, index = self.group.size, self.group.index
        self._split = SequenceSplit(self.length, size, index, balanced=balanced)
        self._starts = self._split.pad_starts(starts)
        self._by_style: dict[str, tuple[Documents, ContextParallel]] = {}
        documents, _ = self.attention("gather")
        self.positions = documents.positions()
        shard = documents.shard
        self._tokens = None if shard is None else shard.positions

    @property
    def local(self) -> int:
        """Returns n, the number of tokens of a sequence that each rank holds."""
        return self._split.local

    def take(self, x: Tensor) -> Tensor:
        """Returns this rank's tokens (b, n, …) of whole sequences (b, s, …).

        Padding tokens are 0, so that a mask of ones becomes a mask for the loss.
        """
        if tuple(x.shape[:2]) != (self.batch, self.length):
            raise UserError(
                f"take(x) of shape {list(x.shape)} must begin with {self.batch} sequences of "
                f"{self.length} tokens, as the lengths say; give it before it is split"
            )
        if self._tokens is None:
            return x
        rows = torch.arange(self.batch, device=x.device)[:, None]
        found = x[rows, self._tokens.clamp(max=self.length - 1)]
        padding = self._tokens >= self.length
        return found.masked_fill(padding.view(*padding.shape, *(1,) * (x.ndim - 2)), 0)

    def attention(self, style: str) -> tuple[Documents, ContextParallel]:
        """Returns the documents and the ranks for `context_parallel_attention`.

        Both are created once for each style.
        """
        if style not in self._by_style:
            # The ring style needs other document tables than the other styles do.
            split = SequenceSplit(
                *(self.length, self._split.size, self._split.index),
                balanced=self._split.balanced,
                ring=style == "ring",
            )
            documents = make_documents(self._starts, self.device, split)
            self._by_style[style] = documents, ContextParallel(self.group, style)
        return self._by_style[style]


def _starts(lengths: Sequence[Sequence[int]]) -> np.ndarray:
    """Returns the position at which each token's document begins, as int32 of shape (b, s)."""
    whole = [[n for n in row if isinstance(n, int) and n > 0] for row in lengths]
    if not whole or any(len(w) != len(row) or not w for w, row in zip(whole, lengths, strict=True)):
        raise UserError(
            f"SplitSequences(lengths={lengths!r}) must have a list of whole numbers from 1 on for "
            "each sequence; for one document of 128 tokens give [[128]]"
        )
    totals = sorted({sum(row) for row in whole})
    if len(totals) > 1:
        raise UserError(
            f"SplitSequences(lengths=…) must be of sequences of equal length, not of {totals[0]} "
            f"and {totals[-1]} tokens; give the padding of the shorter one as a document"
        )
    edges = [np.cumsum([0, *row]) for row in whole]
    return np.stack([np.repeat(e[:-1], np.diff(e)) for e in edges]).astype(np.int32)


def context_parallel_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    group: GroupLike = None,
    *,
    documents: SplitSequences,
    style: str = "gather",
) -> Tensor:
    """Computes causal attention within documents of sequences that are split over a group.

    It replaces `scaled_dot_product_attention(q, k, v, is_causal=True)` for tensors that hold this
    rank's tokens. The call is collective over the group.

    Args:
        q: queries (b, heads, n, head_dim).
        k, v: keys and values (b, kv_heads, n, head_dim), where kv_heads divides heads
            (grouped-query attention).
        group: the group of `documents`; None stands for all ranks.
        documents: the split of the tokens; all layers share one object.
        style: gather all-gathers keys and values; ring sends them from rank to rank; heads gives
            each rank whole sequences for a part of the heads. The results are equal.

    Returns:
        The outputs (b, heads, n, head_dim).

    Raises:
        UserError: on every rank, before anything is sent, if shapes, style or group do not fit.
    """
    if style not in STYLES:
        close = nearest(str(style), STYLES) or STYLES[0]
        raise UserError(
            f"context_parallel_attention(style={style!r}) must be {', '.join(STYLES[:-1])} or "
            f"{STYLES[-1]}; the nearest is style={close!r}"
        )
    ranks = group_of(group)
    if ranks.ranks != documents.group.ranks:
        raise UserError(
            f"context_parallel_attention(group=…) of ranks {list(ranks.ranks)} must be the group "
            f"over which the sequences are split, of ranks {list(documents.group.ranks)}; give "
            "both groups.cp"
        )
    _check_shapes(q, k, v, documents)
    if style == "heads":
        _check_heads(q.shape[1], k.shape[1], ranks)
    of_style, cp = documents.attention(style)
    return attend_split(q, k, v, LayerInputs(documents=of_style), AttentionOptions(cp=cp))


def _check_shapes(q: Tensor, k: Tensor, v: Tensor, split: SplitSequences) -> None:
    expected = split.batch, split.local
    for name, x in zip("qkv", (q, k, v), strict=True):
        if x.ndim != 4 or (x.shape[0], x.shape[2]) != expected or x.shape[3] != q.shape[3]:
            raise UserError(
                f"context_parallel_attention({name}) of shape {list(x.shape)} must be "
                f"[{split.batch}, heads, {split.local}, head_dim], with this rank's tokens and "
                "the same head_dim in q, k and v; give what you compute from documents.take"
            )
    if k.shape != v.shape or q.shape[1] % k.shape[1]:
        raise UserError(
            f"context_parallel_attention(k, v) of {k.shape[1]} and {v.shape[1]} heads must have as "
            f"many heads each, which divide the {q.shape[1]} of q; the nearest is k and v of "
            f"{q.shape[1]} heads"
        )


def _check_heads(heads: int, kv_heads: int, group: Group) -> None:
    size = group.size
    if not splits_heads(heads, kv_heads, size):
        raise UserError(
            f"context_parallel_attention(style='heads') over {size} ranks must divide {heads} "
            f"query heads and {kv_heads} key-value heads (or be divided by these); the nearest is "
            "style='gather', for any number of heads"
        )
