"""Tests that attention of each rank's queries, merged over blocks of keys, equals explicit
attention under a square mask."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest
import torch
from torch import Tensor

from parallel3d.config.values import AUTO, MATH
from parallel3d.context_parallel import document_attention
from parallel3d.context_parallel.document_attention import (
    Block,
    attend_block,
    differentiate_block,
    empty_for_blocks,
    merge,
)
from parallel3d.context_parallel.documents import make_documents
from parallel3d.context_parallel.split import SequenceSplit
from tests.unit.context_parallel.test_document_attention import square
from tests.unit.context_parallel.test_split import starts_of

pytestmark = pytest.mark.slow

HEADS, KV_HEADS, WIDTH = 4, 2, 8
# Lengths of documents in samples of 61 tokens: one token, odd, over all ranks, and equal ones.
PACKS = [[61], [1, 1, 1, 7, 51], [30, 31], [5, 24, 1, 24, 7], [8] * 7 + [5]]


def by_ranks(
    inputs: Sequence[Tensor], split: SequenceSplit, packs: Sequence[list[int]], kernel: str
) -> list[Tensor]:
    """Returns the result and the gradients of q, k and v of all ranks, one after the other, in
    fp64.

    `inputs`: q, k, v and the gradient of the result, (b, heads, padded, width).
    """
    q, k, v, grad = inputs
    found = [torch.zeros(x.shape, dtype=torch.float64) for x in (q, q, k, v)]
    for index in range(split.size):
        of_rank = SequenceSplit(split.length, split.size, index, balanced=split.balanced,
                                ring=split.ring)  # fmt: skip
        starts = of_rank.pad_starts(starts_of(*packs, padded=split.length))
        shard = make_documents(starts, q.device, of_rank).shard
        assert shard is not None
        held = shard.held.long()
        rows = torch.arange(len(q))[:, None]

        def take(x: Tensor, of: Tensor, rows: Tensor = rows) -> Tensor:
            tokens = x.transpose(1, 2)[rows.to(x.device), of.to(x.device)]
            return tokens.contiguous().transpose(1, 2)

        ranks = [(index - i) % split.size for i in range(split.size)]
        whole = torch.arange(split.padded).expand(len(q), -1)
        blocks = [held[r] for r in ranks] if split.ring else [whole]
        mine = held[index]
        own, of_own = take(q, mine), take(grad, mine)
        out, sums = empty_for_blocks(own)
        for i, of in enumerate(blocks):
            attend_block(
                out, sums, own, take(k, of), take(v, of), Block.of(shard.blocks, i), kernel
            )
        out = out.to(q.dtype)
        of_q = empty_for_blocks(own)[0].zero_()
        for i, of in enumerate(blocks):
            keys = take(k, of), take(v, of)
            grads = [torch.zeros_like(x, dtype=of_q.dtype) for x in keys]
            block = Block.of(shard.blocks, i)
            differentiate_block(of_q, *grads, of_own, own, *keys, out, sums, block, kernel)
            for to, value in zip(found[2:], grads, strict=True):
                to.transpose(1, 2)[rows, of] += value.cpu().double().transpose(1, 2)
        for to, value in zip(found, (out, of_q), strict=False):
            to.transpose(1, 2)[rows, mine] = value.cpu().double().transpose(1, 2)
    return found


def explicit(
    inputs: Sequence[Tensor],
    packs: Sequence[list[int]],
    padded: int,
    sinks: Tensor | None = None,
) -> list[Tensor]:
    given = [*inputs[:3], *([] if sinks is None else [sinks])]
    leaves = [x.detach().cpu().double().requires_grad_() for x in given]
    q, k, v, *sink = leaves
    k, v = (x.repeat_interleave(q.shape[1] // x.shape[1], 1) for x in (k, v))
    begins = [np.cumsum(lengths).tolist() for lengths in packs]  # the padding is a document
    seen = square([[b for b in row if b < padded] for row in begins], padded)
    scores = (q @ k.mT / WIDTH**0.5).masked_fill(~seen, -torch.inf)
    if sink:  # a further score, whose value is 0
        scores = torch.cat((scores, sink[0].view(-1, 1, 1).expand(*scores.shape[:-1], 1)), -1)
    out = scores.softmax(-1)[..., :padded] @ v
    grads = torch.autograd.grad(out, leaves, inputs[3].cpu().double())
    return [out.detach(), *grads]


def random_inputs(
    padded: int, rows: int, dtype: torch.dtype, heads: tuple[int, int] = (HEADS, KV_HEADS)
) -> list[Tensor]:
    generator = torch.Generator().manual_seed(5)
    shapes = [(rows, padded, n, WIDTH) for n in (*heads, heads[1], heads[0])]
    made = (torch.randn(s, generator=generator, dtype=torch.float64) for s in shapes)
    return [x.to(dtype).transpose(1, 2) for x in made]


@pytest.mark.parametrize("kernel", [AUTO, MATH])
@pytest.mark.parametrize("ring", [False, True])
@pytest.mark.parametrize("size", [2, 3, 4])
def test_all_ranks_together_attend_like_one_process(size: int, ring: bool, kernel: str) -> None:
    for balanced in (False, True):
        split = SequenceSplit(61, size, balanced=balanced, ring=ring)
        inputs = random_inputs(split.padded, len(PACKS), torch.float64)
        with patch.object(document_attention, "ROWS", 7):
            ours = by_ranks(inputs, split, PACKS, kernel)
        for a, b in zip(ours, explicit(inputs, PACKS, split.padded), strict=True):
            torch.testing.assert_close(a, b, rtol=1e-12, atol=1e-12)


def test_merging_weights_parts_by_their_sums_of_exponentials() -> None:
    scores, values = torch.randn(2, 7, 10).double() * 30, torch.randn(10, 4).double()
    out, sums = scores[..., :3].softmax(-1) @ values[:3], scores[..., :3].logsumexp(-1)
    part = scores[..., 3:].softmax(-1) @ values[3:], scores[..., 3:].logsumexp(-1)
    merge(out, sums, *part)
    torch.testing.assert_close(out, scores.softmax(-1) @ values, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(sums, scores.logsumexp(-1), rtol=1e-12, atol=1e-12)


def test_equal_neighbours_are_one_call() -> None:
    """With 8 documents of 8 tokens in a rank's own pieces, only the parts at a cut need separate
    calls."""
    calls: list[tuple[int, int, int]] = []
    kernel = document_attention.cpu_attended

    def attended(q: Tensor, k: Tensor, v: Tensor, *how: Any) -> tuple[Tensor, Tensor]:
        calls.append((q.shape[0], q.shape[2], k.shape[2]))
        return kernel(q, k, v, *how)

    split = SequenceSplit(128, 2)
    inputs = random_inputs(128, 1, torch.float64)
    with patch.object(document_attention, "cpu_attended", attended):
        by_ranks(inputs, split, [[8] * 16], AUTO)
        assert calls == [(4, 8, 8)] * 2 + [(8, 8, 8)]
        calls.clear()
        by_ranks(inputs, split, [[36, 36, 56]], AUTO)
    of_first = [(1, 32, 32), (1, 32, 32), (1, 32, 24)]
    of_second = [(1, 4, 4), (1, 4, 32), (1, 36, 36), (1, 24, 24)]
    assert calls == of_first + of_second


def test_calls_of_the_kernel_for_many_lengths_are_few() -> None:
    """Two halves of one document read overlapping keys; with documents between them there is a
    gap."""

    def sequences(packs: list[list[int]], index: int) -> list[tuple]:
        split = SequenceSplit(16, 2, index)
        starts = starts_of(*packs, padded=16)
        found = []
        with (
            patch("parallel3d.device.accelerator.is_accelerator", lambda _: True),
            patch("parallel3d.device.accelerator.moved", lambda x, _: x),
        ):
            shard = make_documents(starts, torch.device("cpu"), split).shard
        assert shard is not None
        for rows, read, of_call in Block.of(shard.blocks, 0).sequences:
            queries, keys, *longest = of_call
            found.append(((rows.start, rows.stop), (read.start, read.stop), queries.tolist(),
                          keys.tolist(), *longest))  # fmt: skip
        return found

    assert sequences([[16]], 0) == [
        ((0, 4), (0, 4), [0, 4], [0, 4], 4, 4),
        ((4, 8), (0, 16), [0, 4], [0, 16], 4, 16),
    ]
    assert sequences([[16]], 1) == [((0, 8), (0, 12), [0, 8], [0, 12], 8, 12)]
    gap = [0, 2, 4, 4, 6, 8], [0, 2, 4, 12, 14, 16]
    assert sequences([[2] * 8], 0) == [((0, 8), (0, 16), *gap, 2, 8)]
    # Tokens of a sample that no earlier rank reads are a gap before the next sample, too.
    two = [0, 8, 8, 16], [0, 12, 16, 28]
    assert sequences([[16], [16]], 1) == [((0, 16), (0, 28), *two, 8, 12)]
