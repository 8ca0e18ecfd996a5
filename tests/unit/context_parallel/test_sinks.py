"""Tests attention with sinks against a softmax of further scores: in every way to attend."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from unittest.mock import patch

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd import gradcheck

from parallel3d.config.values import AUTO, MATH
from parallel3d.context_parallel import sinks as of_sinks
from parallel3d.context_parallel.attention import ONE_RANK, attend_within
from parallel3d.context_parallel.documents import Documents, make_documents, whole_samples
from parallel3d.context_parallel.sinks import gradient_of_sinks, join_sinks
from parallel3d.context_parallel.split import SequenceSplit
from parallel3d.models.attention import AttentionOptions, attend_split
from parallel3d.models.dropout import Dropout
from parallel3d.models.layer_inputs import LayerInputs
from tests.reference.dropout import dropped
from tests.unit.context_parallel.test_document_attention import square
from tests.unit.context_parallel.test_split import starts_of

CPU = torch.device("cpu")
LENGTH, HEADS, KV_HEADS = 24, 4, 2
PACKS = [(9, 13), ()]  # documents of 9, 4 and 11 tokens, and a whole sample
NUMBERS, SITE, P = (5, 2**33), "layers.1.attention.probabilities", 0.3


def leaves(dtype: torch.dtype = torch.float64) -> list[Tensor]:
    """Returns q, k, v and the sinks, which are never narrower than fp32."""
    generator = torch.Generator().manual_seed(1)
    shapes = [(2, heads, LENGTH, 4) for heads in (HEADS, KV_HEADS, KV_HEADS)]
    made = [torch.randn(s, generator=generator, dtype=torch.float64) for s in (*shapes, (HEADS,))]
    wide = torch.promote_types(dtype, torch.float32)
    kinds = dtype, dtype, dtype, wide
    return [x.to(kind).requires_grad_() for x, kind in zip(made, kinds, strict=True)]


def explicit(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    sinks: Tensor,
    seen: Tensor,
    p: float = 0.0,
    cap: float | None = None,
) -> Tensor:
    """Computes attention in fp64 with a further score for each query, whose value is 0."""
    q, k, v, sinks = (x.double() for x in (q, k, v, sinks))
    k, v = (x.repeat_interleave(HEADS // KV_HEADS, 1) for x in (k, v))
    scores = q @ k.mT / q.shape[-1] ** 0.5
    scores = scores if cap is None else (scores / cap).tanh() * cap
    scores = scores.masked_fill(~seen, -torch.inf)
    further = sinks.view(1, -1, 1, 1).expand(*scores.shape[:-1], 1)
    chances = torch.cat((scores, further), -1).softmax(-1)[..., :-1]
    return (dropped(chances, NUMBERS, p, 7, SITE) if p else chances) @ v


def of_split(starts: Sequence[Sequence[int]], window: int | None) -> Documents:
    lengths = [[b - a for a, b in zip((0, *s), (*s, LENGTH), strict=True)] for s in starts]
    split = SequenceSplit(LENGTH, window=window)
    return make_documents(starts_of(*lengths, padded=LENGTH), CPU, split)


def both(run: Callable[..., Tensor], inputs: list[Tensor], grad: Tensor) -> list[Tensor]:
    out = run(*inputs)
    return [out, *torch.autograd.grad(out, inputs, grad.to(out.dtype))]


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("kernel", [AUTO, MATH])
@pytest.mark.parametrize("window", [None, 5])
@pytest.mark.parametrize("packs", [PACKS, None], ids=["documents", "whole"])
def test_a_sink_is_a_further_score_whose_value_is_0(
    packs: Sequence[Sequence[int]] | None, window: int | None, kernel: str, dtype: torch.dtype
) -> None:
    starts = packs or [(), ()]
    documents = of_split(starts, window)
    if packs is None:
        documents = whole_samples(2, CPU, SequenceSplit(LENGTH, window=window))
    seen = square(starts, LENGTH)
    if window is not None:
        seen = seen.triu(1 - window)
    grad = torch.randn(2, HEADS, LENGTH, 4, dtype=torch.float64)
    inputs, options = leaves(dtype), AttentionOptions(kernel, window=window)
    given = LayerInputs(documents=documents)
    ours = both(lambda q, k, v, sinks: attend_split(q, k, v, given, options, sinks), inputs, grad)
    theirs = both(lambda *of: explicit(*of, seen), inputs, grad)
    close = {torch.float64: 1e-12, torch.float32: 2e-5, torch.bfloat16: 0.06}[dtype]
    for a, b, x in zip(ours, theirs, (inputs[0], *inputs), strict=True):
        assert a.dtype == x.dtype
        torch.testing.assert_close(a.double(), b.double(), rtol=close, atol=close)


@pytest.mark.parametrize("window", [None, 5])
@pytest.mark.parametrize("packs", [PACKS, None], ids=["documents", "whole"])
def test_a_sink_is_never_dropped(packs: Sequence[Sequence[int]] | None, window: int | None) -> None:
    starts = packs or [(), ()]
    documents = None if packs is None and window is None else of_split(starts, window)
    seen = square(starts, LENGTH)
    if window is not None:
        seen = seen.triu(1 - window)
    grad = torch.randn(2, HEADS, LENGTH, 4, dtype=torch.float64)
    given = LayerInputs(torch.tensor(NUMBERS), documents)
    options = AttentionOptions(window=window, dropout=Dropout(7, SITE, P))
    ours = both(lambda q, k, v, sinks: attend_split(q, k, v, given, options, sinks), leaves(), grad)
    theirs = both(lambda *of: explicit(*of, seen, P), leaves(), grad)
    for a, b in zip(ours, theirs, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-12, atol=1e-12)


def test_gradients_are_finite_differences() -> None:
    documents = of_split(PACKS, None)
    run = lambda q, k, v, sinks: attend_within(q, k, v, documents, sinks=sinks)  # noqa: E731
    assert gradcheck(run, leaves(), fast_mode=True)


def test_a_sink_of_minus_infinity_is_none_and_one_of_0_is_not() -> None:
    documents, (q, k, v, sinks) = of_split(PACKS, None), leaves()
    without = attend_within(q, k, v, documents)
    none = torch.full_like(sinks, -torch.inf)
    torch.testing.assert_close(attend_within(q, k, v, documents, sinks=none), without)
    zero = attend_within(q, k, v, documents, sinks=torch.zeros_like(sinks))
    first = zero[1, :, 0] / without[1, :, 0]  # its only probability is e^z / (e^z + 1)
    scores = (q[1, :, 0] * k[1, :, 0].repeat_interleave(2, 0)).sum(-1, keepdim=True) / 2
    torch.testing.assert_close(first, scores.sigmoid().expand_as(first))


def test_a_query_without_keys_has_the_result_0_and_no_gradient() -> None:
    sinks = torch.tensor([0.5, -1.0], dtype=torch.float64)
    out, sums = torch.zeros(1, 2, 1, 4).double(), torch.full((1, 2, 1), -torch.inf).double()
    out, sums = join_sinks(out, sums, sinks)
    assert not out.any() and torch.equal(sums.flatten(), sinks)
    assert not gradient_of_sinks(torch.ones_like(out), out, sums, sinks).any()


def test_large_sinks_and_scores_do_not_overflow() -> None:
    documents, (q, k, v, _) = of_split(PACKS, None), leaves(torch.float32)
    sinks = torch.tensor([1e4, -1e4, 80.0, 200.0], requires_grad=True)
    found = both(
        lambda *of: attend_within(*of[:3], documents, sinks=of[3]),
        [q, k, v, sinks],
        torch.ones(2, HEADS, LENGTH, 4),
    )
    assert all(x.isfinite().all() for x in found)
    assert not found[0][:, 0].any()


def test_neighbours_of_equal_length_have_the_sinks_once() -> None:
    """Calls of the kernel that join documents, or that split them, change nothing."""
    documents, grad = of_split([(8, 16), (12,)], None), torch.randn(2, HEADS, LENGTH, 4).double()
    calls = []

    def counted(*given: Tensor) -> tuple[Tensor, Tensor]:
        calls.append(given[0].shape)
        return join_sinks(*given)

    with patch.object(of_sinks, "join_sinks", counted):
        ours = both(lambda *x: attend_within(*x[:3], documents, sinks=x[3]), leaves(), grad)
    assert calls == [(2, HEADS, LENGTH, 4)]
    seen = square([(8, 16), (12,)], LENGTH)
    theirs = both(lambda *x: explicit(*x, seen), leaves(), grad)
    for a, b in zip(ours, theirs, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-12, atol=1e-12)


@pytest.mark.slow
@pytest.mark.parametrize("window", [None, 5])
def test_the_compiler_knows_the_shapes_and_strides_of_the_operators(window: int | None) -> None:
    documents, inputs = of_split(PACKS, window), [x.detach() for x in leaves()]
    of, name = documents.window or documents.blocks, "window_attention" if window else "attention"
    more = (None,) * 4 + (AUTO, window) if window else (None, None, AUTO, False)
    where = (ONE_RANK.handle, of.table, of.calls, of.edges, *more, None, None)
    run = getattr(torch.ops.parallel3d, f"{name}_with_sinks")
    of_gradient = getattr(torch.ops.parallel3d, f"{name}_with_sinks_backward")
    out, *kept = run(*inputs, *where)
    backward = (F.normalize(out), *inputs, out, *kept, *where)
    for operator, given in ((run, (*inputs, *where)), (of_gradient, backward)):
        torch.library.opcheck(operator, given, test_utils="test_faketensor")
