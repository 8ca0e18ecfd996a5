"""Tests that attention caps its scores: the formula, its gradients, and hidden keys."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch
from torch import Tensor

from parallel3d.models.attention import AttentionOptions, attend_split
from parallel3d.models.dropout import Dropout
from parallel3d.models.layer_inputs import LayerInputs
from tests.unit.context_parallel.test_document_attention import square
from tests.unit.context_parallel.test_sinks import (
    HEADS,
    LENGTH,
    NUMBERS,
    PACKS,
    SITE,
    both,
    explicit,
    leaves,
    of_split,
)

CAP = 0.5  # of scores with a standard deviation near 2


@pytest.mark.parametrize("p", [0.0, 0.3])
@pytest.mark.parametrize("has_sinks", [False, True], ids=["plain", "sinks"])
@pytest.mark.parametrize("window", [None, 5])
@pytest.mark.parametrize("packs", [PACKS, [(), ()]], ids=["documents", "whole"])
def test_scores_are_capped_before_the_mask(
    packs: Sequence[Sequence[int]], window: int | None, has_sinks: bool, p: float
) -> None:
    seen = square(packs, LENGTH)
    if window is not None:
        seen = seen.triu(1 - window)
    dropout = Dropout(7, SITE, p) if p else None
    given = LayerInputs(torch.tensor(NUMBERS) if p else None, of_split(packs, window))
    options = AttentionOptions(window=window, dropout=dropout, cap=CAP)
    inputs, grad = leaves(), torch.randn(2, HEADS, LENGTH, 4, dtype=torch.float64)
    none = torch.full((HEADS,), -torch.inf, dtype=torch.float64)
    if not has_sinks:
        inputs = inputs[:3]

    def ours(*of: Tensor) -> Tensor:
        q, k, v, *sinks = of
        return attend_split(q, k, v, given, options, *sinks)

    def theirs(*of: Tensor) -> Tensor:
        q, k, v, sinks = of if has_sinks else (*of, none)
        return explicit(q, k, v, sinks, seen, p, CAP)

    for a, b in zip(both(ours, inputs, grad), both(theirs, inputs, grad), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_scores_are_capped_in_fp32(dtype: torch.dtype) -> None:
    given = LayerInputs(documents=of_split(PACKS, None))
    inputs, grad = leaves(dtype)[:3], torch.randn(2, HEADS, LENGTH, 4, dtype=torch.float64)
    none = torch.full((HEADS,), -torch.inf, dtype=torch.float64)
    options = AttentionOptions(cap=CAP)
    ours = both(lambda *qkv: attend_split(*qkv, given, options), inputs, grad)
    seen = square(PACKS, LENGTH)
    theirs = both(lambda *qkv: explicit(*qkv, none, seen, cap=CAP), inputs, grad)
    close = {torch.float32: 2e-5, torch.bfloat16: 0.06}[dtype]
    for a, b in zip(ours, theirs, strict=True):
        assert a.dtype == dtype
        torch.testing.assert_close(a.double(), b.double(), rtol=close, atol=close)
