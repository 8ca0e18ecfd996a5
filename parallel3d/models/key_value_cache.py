"""Keeps the keys and values of one sequence, for attention that decodes a token at a time."""

from __future__ import annotations

from dataclasses import replace
from typing import Protocol

import torch
from torch import Tensor

from parallel3d.context_parallel.attention import ONE_RANK
from parallel3d.context_parallel.document_attention import plain_attended, repeated
from parallel3d.context_parallel.documents import whole_samples
from parallel3d.context_parallel.sinks import join_sinks
from parallel3d.context_parallel.split import SequenceSplit
from parallel3d.models.attention import (
    AttentionOptions,
    attend,
    attend_split,
    kernel_shares_heads,
)
from parallel3d.models.layer_inputs import LayerInputs
from parallel3d.models.rotary import Positions


class CachedAttention(Protocol):
    """Declares what the cache needs of `transformer.Attention`."""

    head_dim: int
    kv_heads: int
    options: AttentionOptions

    @property
    def sinks(self) -> Tensor | None:
        """The sinks of the heads, or None for none."""

    def cached_heads(
        self, x: Tensor, positions: Positions
    ) -> tuple[tuple[Tensor, Tensor, Tensor], Tensor | None]:
        """Returns q, k and v of x by heads, and the gate of the heads' output, if there is one."""
        ...

    def output(self, y: Tensor, gate: Tensor | None) -> Tensor:
        """Returns the layer's output, given that of its heads, (b, heads, s, head_dim)."""
        ...


class KeyValueCache:
    """The state of a layer's attention after the tokens that it has decoded.

    Args:
        attention: the layer's attention, of which this rank has some heads.
        length: the longest sequence. With a window only the window's keys are kept.
        like: a tensor of the state's dtype and device.
    """

    def __init__(self, attention: CachedAttention, length: int, like: Tensor) -> None:
        self.attention = attention
        length = min(length, attention.options.window or length)
        # Keys and values: (1, key-value heads, length, head_dim) each.
        self.kept = like.new_zeros(2, 1, attention.kv_heads, length, attention.head_dim)

    def step(self, x: Tensor, first: int, positions: Positions) -> Tensor:
        """Returns attention's output for n new tokens (1, n, hidden), the first at place `first`.

        The tokens attend to themselves and to all tokens before them, whose keys and values are
        cached. Either `first` is 0, or n is 1 and no mask is needed. With a window, position p is
        at index p modulo the window. `positions` are those of the new tokens.
        """
        attention, end = self.attention, first + x.shape[1]
        options = replace(attention.options, cp=ONE_RANK)
        (q, k, v), gate = attention.cached_heads(x, positions)
        self._keep(torch.stack((k, v)), end)
        sinks = attention.sinks
        is_plain = sinks is None and options.cap is None
        if first == 0 and not (is_plain and options.window is None):
            split = SequenceSplit(end, window=options.window)
            samples = LayerInputs(documents=whole_samples(1, x.device, split))
            return attention.output(attend_split(q, k, v, samples, options, sinks), gate)
        k, v = self.kept[:, :, :, :end]
        if not is_plain:  # no kernel of `attend` serves; one query has few scores
            y, sums = plain_attended(q, k, v, False, options.scale, cap=options.cap)
            y = y if sinks is None else join_sinks(y, sums, sinks)[0]
            return attention.output(y.to(q.dtype), gate)
        if not kernel_shares_heads(q):
            k, v = repeated(k, q.shape[1]), repeated(v, q.shape[1])
        y = attend(q, k, v, is_causal=first == 0, kernel=options.kernel, scale=options.scale)
        return attention.output(y, gate)

    def _keep(self, new: Tensor, end: int) -> None:
        """Writes keys and values into a ring buffer that keeps the latest positions.

        `new`, (2, 1, heads, n, head_dim), holds the keys and values of the n positions before
        `end`.
        """
        size = self.kept.shape[3]
        new = new[:, :, :, -size:]
        first = (end - new.shape[3]) % size
        begin, rest = new.tensor_split((size - first,), dim=3)
        self.kept[:, :, :, first : first + begin.shape[3]] = begin
        self.kept[:, :, :, : rest.shape[3]] = rest
