"""Tests that attention within documents equals explicit attention under a mask of the whole
square."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd import gradcheck

from parallel3d.config.values import AUTO, MATH
from parallel3d.context_parallel import document_attention
from parallel3d.context_parallel.attention import ONE_RANK, attend_within
from parallel3d.data.loader import Documents, documents_of
from parallel3d.data.sampler import Sample, document_starts
from parallel3d.models.attention import AttentionOptions, causal_attention
from parallel3d.models.dropout import Dropout
from parallel3d.models.layer_inputs import LayerInputs

LENGTH = 150
PACKS = [(), (1, 2, 3, 149), (77,), tuple(range(1, LENGTH)), (33, 66, 99), (5, 8, 140)]


def documents(packs: Sequence[Sequence[int]] = PACKS, length: int = LENGTH) -> Documents:
    tokens, mask = np.zeros(length + 1, dtype=np.int64), np.ones(length, dtype=bool)
    starts = [document_starts(np.array(begins, dtype=int), length) for begins in packs]
    samples = [Sample(tokens, mask, one) for one in starts]
    return documents_of(samples, range(len(samples)), torch.device("cpu"))


def square(packs: Sequence[Sequence[int]], length: int) -> Tensor:
    """Returns (b, 1, s, s): true where a query reads a key."""
    seen = torch.zeros(len(packs), 1, length, length, dtype=torch.bool)
    for i, begins in enumerate(packs):
        for begin, end in pairwise((0, *begins, length)):
            for q in range(begin, end):
                seen[i, 0, q, begin : q + 1] = True
    return seen


def leaves(*shape: int, dtype: torch.dtype = torch.float64) -> list[Tensor]:
    generator = torch.Generator().manual_seed(1)
    made = (torch.randn(shape, generator=generator, dtype=torch.float64) for _ in range(3))
    return [t.to(dtype).requires_grad_() for t in made]


def explicit(q: Tensor, k: Tensor, v: Tensor, seen: Tensor) -> Tensor:
    scores = q.double() @ k.double().mT / q.shape[-1] ** 0.5
    return scores.masked_fill(~seen, -torch.inf).softmax(-1) @ v.double()


def both(run: Callable[..., Tensor], inputs: list[Tensor], grad: Tensor) -> list[Tensor]:
    out = run(*inputs)
    return [out, *torch.autograd.grad(out, inputs, grad.to(out.dtype))]


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16], ids=str)
def test_a_token_attends_only_within_its_document(dtype: torch.dtype) -> None:
    inputs, seen = leaves(len(PACKS), 3, LENGTH, 8, dtype=dtype), square(PACKS, LENGTH)
    grad = torch.randn(len(PACKS), 3, LENGTH, 8, dtype=torch.float64)
    found = documents()
    ours = both(lambda q, k, v: attend_within(q, k, v, found), inputs, grad)
    theirs = both(lambda q, k, v: explicit(q, k, v, seen), inputs, grad)
    close = {torch.float64: 1e-12, torch.float32: 1e-5, torch.bfloat16: 0.03}[dtype]
    for a, b in zip(ours, theirs, strict=True):
        assert a.dtype == dtype
        torch.testing.assert_close(a.double(), b.double(), rtol=close, atol=close)


@pytest.mark.parametrize("rows", [7, 256])
def test_gradients_without_a_kernel_are_the_same(rows: int) -> None:
    """Tests that the formula, used on a GPU in fp32, does not depend on the rows of scores per
    block."""
    inputs, found = leaves(len(PACKS), 3, LENGTH, 8), documents()
    grad, results = torch.randn(len(PACKS), 3, LENGTH, 8, dtype=torch.float64), []

    with patch.object(document_attention, "ROWS", rows):
        for kernel in (AUTO, MATH):
            results.append(both(lambda *qkv, k=kernel: attend_within(*qkv, found, k), inputs, grad))
    torch.testing.assert_close(*results, rtol=1e-10, atol=1e-12)


@pytest.mark.slow
def test_the_compiler_knows_the_shapes_and_strides_of_both_operators() -> None:
    """It reads them from the operators' functions for tensors without values."""
    inputs, of = [t.detach() for t in leaves(2, 3, LENGTH, 4)], documents(PACKS[:2]).blocks
    where = (ONE_RANK.handle, of.table, of.calls, of.edges, None, None, AUTO, False, None, None)
    operators = torch.ops.parallel3d.attention, torch.ops.parallel3d.attention_backward
    out, *kept = operators[0](*inputs, *where)
    backward = (torch.ones_like(out), *inputs, out, *kept, *where)
    for operator, given in zip(operators, ((*inputs, *where), backward), strict=True):
        torch.library.opcheck(operator, given, test_utils="test_faketensor")


def test_gradients_are_finite_differences() -> None:
    found = documents([(1, 4), (3,)], 6)
    assert gradcheck(lambda *qkv: attend_within(*qkv, found), leaves(2, 2, 6, 4), fast_mode=True)


def test_one_document_has_the_bits_of_attention_without_documents() -> None:
    """The code for documents computes the same: the first part of a packed sample equals that part
    alone."""
    qkv = torch.randn(2, LENGTH, 3 * 16, dtype=torch.float32)

    def attend(qkv: Tensor, found: Documents | None = None) -> Tensor:
        inputs = LayerInputs(documents=found)
        return causal_attention(qkv, (2, 2, 8), inputs, AttentionOptions())

    assert torch.equal(attend(qkv, documents([(), ()])), attend(qkv))
    packed = attend(qkv, documents([(77,), (77,)]))
    for cut in (slice(77), slice(77, None)):
        assert torch.equal(packed[:, cut], attend(qkv[:, cut].contiguous()))


def test_the_formula_for_dropout_attends_within_documents_too() -> None:
    qkv = torch.randn(len(PACKS), LENGTH, 8 * 8, dtype=torch.float64)
    inputs = LayerInputs(torch.arange(len(PACKS)), documents())
    ours, theirs = (
        causal_attention(qkv, (4, 2, 8), inputs, AttentionOptions(dropout=dropout))
        for dropout in (Dropout(1, "a", 0.0), None)
    )
    torch.testing.assert_close(ours, theirs)


def test_scores_are_made_of_documents_never_of_the_whole_sample() -> None:
    """There is a call for each document, one for neighbours of equal length; no tensor is as long
    as the sample unless a document is."""
    calls: list[tuple[int, int]] = []
    kernel = document_attention.cpu_attended

    def attended(q: Tensor, k: Tensor, v: Tensor, *how: Any) -> tuple[Tensor, Tensor]:
        calls.append((q.shape[0], q.shape[2]))
        return kernel(q, k, v, *how)

    with (
        patch.object(document_attention, "cpu_attended", attended),
        patch.object(F, "scaled_dot_product_attention", None),
    ):
        attend_within(*leaves(len(PACKS), 1, LENGTH, 4), documents())
    expected = [
        [(1, 150)], [(3, 1), (1, 146), (1, 1)], [(1, 77), (1, 73)], [(150, 1)],
        [(3, 33), (1, 51)], [(1, 5), (1, 3), (1, 132), (1, 10)],
    ]  # fmt: skip
    assert calls == [call for row in expected for call in row]


def test_gradients_may_come_in_any_layout() -> None:
    inputs, found = leaves(2, 2, 6, 4), documents([(1, 4), (3,)], 6)
    out = attend_within(*inputs, found)
    spread = torch.autograd.grad(out.sum(), inputs, retain_graph=True)
    whole = torch.autograd.grad(out, inputs, torch.ones_like(out).contiguous())
    assert all(torch.equal(a, b) for a, b in zip(spread, whole, strict=True))


@pytest.mark.parametrize(
    ("error", "has"),
    [
        (torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 MiB"), None),
        (torch.AcceleratorError("CUDA error: an illegal memory access was encountered"), None),
        (RuntimeError("failed to match any schema: … Declaration: aten::_flash_attention"), None),
        (RuntimeError("FlashAttention only supports Ampere GPUs or newer."), False),
        (NotImplementedError("Could not run 'aten::_flash_attention_forward'"), False),
    ],
)
def test_only_definite_answers_about_the_kernel_are_cached(
    monkeypatch: pytest.MonkeyPatch, error: Exception, has: bool | None
) -> None:
    def kernel(*args: object) -> None:
        raise error

    monkeypatch.setattr(document_attention, "flash_forward", kernel)
    document_attention._has_varlen_kernel.cache_clear()
    of = torch.device("cpu"), torch.float16, 64
    if has is None:
        with pytest.raises(type(error)):
            document_attention._has_varlen_kernel(*of)
    else:
        assert document_attention._has_varlen_kernel(*of) is has
    assert document_attention._has_varlen_kernel.cache_info().currsize == (has is not None)
    document_attention._has_varlen_kernel.cache_clear()
