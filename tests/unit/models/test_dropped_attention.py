"""Tests attention with dropped probabilities: by hand, its gradients, and its largest tensors."""

from __future__ import annotations

import math
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import Tensor
from torch.autograd import gradcheck
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from parallel3d.context_parallel.documents import AttentionBlocks, Documents
from parallel3d.models import dropout
from parallel3d.models.dropout import Dropout, attend_dropping
from tests.reference.dropout import dropped


@pytest.fixture(autouse=True)
def few_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    """Sets blocks as small as a test asks for."""
    monkeypatch.setattr(dropout, "LEAST_ROWS", 1)


NUMBERS, SITE, P, LENGTH = (5, 2**33), "layers.1.attention.probabilities", 0.3, 24
BEGINS = ((0, 5, 6), (0, 11))  # documents of the two samples


def documents() -> Documents:
    starts = [[max(b for b in begins if b <= i) for i in range(LENGTH)] for begins in BEGINS]
    unread = torch.empty(0, dtype=torch.int32)
    blocks = AttentionBlocks(unread, unread, unread)
    return Documents(torch.tensor(starts, dtype=torch.int32), blocks)


def leaves(*shape: int) -> tuple[Tensor, ...]:
    torch.manual_seed(3)
    return tuple(torch.randn(shape, dtype=torch.float64, requires_grad=True) for _ in range(3))


def by_hand(q: Tensor, k: Tensor, v: Tensor, apart: bool) -> Tensor:
    """Computes the formula, one query at a time; one head of the model comes before these."""
    rows = []
    for i in range(q.shape[2]):
        of_samples = []
        for row, begins in enumerate(BEGINS):
            first = max(b for b in begins if b <= i) if apart else 0
            scores = (k[row, :, first : i + 1] @ q[row, :, i, :, None]).squeeze(-1)
            chances = torch.softmax(scores / math.sqrt(q.shape[-1]), -1)
            of_samples.append(torch.nn.functional.pad(chances, (first, q.shape[2] - i - 1)))
        rows.append(torch.stack(of_samples))
    before = torch.zeros(2, 1, q.shape[2], q.shape[2], dtype=q.dtype)
    every = torch.cat((before, torch.stack(rows, 2)), 1)
    return dropped(every, NUMBERS, P, 7, SITE)[:, 1:] @ v


def ours(q: Tensor, k: Tensor, v: Tensor, apart: bool) -> Tensor:
    drop = Dropout(7, SITE, P, first_head=1)
    return attend_dropping(q, k, v, drop, torch.tensor(NUMBERS), documents() if apart else None)


@pytest.mark.parametrize("apart", [False, True])
@pytest.mark.parametrize("rows", [1, 7, LENGTH])
def test_values_and_gradients_follow_the_formula(rows: int, apart: bool) -> None:
    inputs = leaves(2, 3, LENGTH, 4)
    grad = torch.randn(2, 3, LENGTH, 4, dtype=torch.float64)
    results = []
    with patch.object(dropout, "AT_ONCE", rows * 2 * 3 * LENGTH):
        for attend in (ours, by_hand):
            y = attend(*inputs, apart)
            results.append((y.detach(), *torch.autograd.grad(y, inputs, grad)))
    torch.testing.assert_close(*results, rtol=1e-12, atol=1e-14)


@pytest.mark.parametrize("scores", [2 * 3 * LENGTH**2, 3 * LENGTH**2, 3 * LENGTH * 7])
def test_blocks_of_one_shape_have_the_same_values(
    scores: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Uses blocks like an accelerator: all samples, one, and a part of its queries."""
    inputs = leaves(2, 3, LENGTH, 4)
    plain = ours(*inputs, True)
    monkeypatch.setattr(dropout, "is_accelerator", lambda device: True)
    monkeypatch.setattr(dropout, "AT_ONCE_ON_ACCELERATOR", scores)
    blocks = list(dropout._blocks(inputs[0], LENGTH))
    assert (
        len({(b.samples.stop - b.samples.start, b.rows.stop - b.rows.start) for b in blocks}) == 1
    )
    assert len(blocks) == {2: 1, 1: 2, 0: 8}[scores // (3 * LENGTH**2)]
    y = ours(*inputs, True)
    torch.testing.assert_close(y, plain, rtol=1e-13, atol=1e-15)
    grads = (torch.autograd.grad(x.square().sum(), inputs) for x in (y, plain))
    torch.testing.assert_close(*grads, rtol=1e-12, atol=1e-14)


def test_gradients_are_finite_differences() -> None:
    with patch.object(dropout, "AT_ONCE", 300):
        assert gradcheck(lambda *qkv: ours(*qkv, True), leaves(2, 2, LENGTH, 4), fast_mode=True)


@pytest.mark.slow
def test_the_compilers_operator_has_the_same_bits() -> None:
    inputs, drop = leaves(2, 3, LENGTH, 4), Dropout(7, SITE, P, first_head=1)
    where = (documents().starts, None, torch.tensor(NUMBERS), drop.site, 1, P, 4**-0.5, None)
    y, operated = ours(*inputs, True), torch.ops.parallel3d.dropped_attention(*inputs, *where)
    assert torch.equal(y, operated)
    grads = (torch.autograd.grad(x.square().sum(), inputs) for x in (y, operated))
    assert all(map(torch.equal, *grads))
    torch.library.opcheck(torch.ops.parallel3d.dropped_attention, (*inputs, *where))


class Largest(TorchDispatchMode):
    """Returns the number of elements of the largest tensor that is made inside the block."""

    found = 0

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None
    ) -> Any:
        out = func(*args, **(kwargs or {}))
        sizes = (t.numel() for t in tree_leaves(out) if isinstance(t, Tensor))
        self.found = max(self.found, *sizes, 0)
        return out


def test_no_tensor_has_the_size_of_all_scores() -> None:
    """Tests forward and backward; b · heads · s² would be 65,536."""
    inputs = leaves(2, 2, 128, 4)
    with patch.object(dropout, "AT_ONCE", 4096), Largest() as largest:
        drop, numbers = Dropout(7, SITE, P), torch.tensor(NUMBERS)
        attend_dropping(*inputs, drop, numbers, None).sum().backward()
    assert largest.found == 4096  # q itself has 2,048
