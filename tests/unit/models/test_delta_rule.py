"""Compares the gated delta rule in chunks with a loop over tokens, forwards and backwards."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from parallel3d.context_parallel.attention import ONE_RANK
from parallel3d.models import delta_rule as delta_rules
from parallel3d.models.delta_rule import RuleChunks, delta_rule

BATCH, KEY_HEADS, HEADS, DK, DV = 2, 2, 4, 5, 7


def token_loop(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, state: Tensor, begins: Tensor | None
) -> tuple[Tensor, Tensor]:
    times, out = v.shape[2] // q.shape[2], []
    q, k = (x.repeat_interleave(times, dim=2) for x in (q, k))
    for t in range(v.shape[1]):
        if begins is not None:
            state = torch.where(begins[:, t, None, None, None], 0.0, state)
        state = state * torch.exp(g[:, t, :, None, None])
        read = torch.einsum("bhkv,bhk->bhv", state, k[:, t])
        written = beta[:, t, :, None] * (v[:, t] - read)
        state = state + torch.einsum("bhk,bhv->bhkv", k[:, t], written)
        out.append(torch.einsum("bhkv,bhk->bhv", state, q[:, t]))
    return torch.stack(out, dim=1), state


def drawn(length: int, dtype: torch.dtype = torch.float64) -> list[Tensor]:
    """Returns q, k, v, g, beta and a state; most decays are near 1, and few are near 0."""
    rng = torch.Generator().manual_seed(length)

    def normal(*shape: int) -> Tensor:
        return torch.randn(BATCH, *shape, generator=rng, dtype=torch.float64)

    q, k = (normal(length, KEY_HEADS, DK) for _ in range(2))
    q, k = (x / x.norm(dim=-1, keepdim=True) for x in (q, k))
    g = -torch.exp(2 * normal(length, HEADS) - 4)
    beta = 2 * torch.sigmoid(normal(length, HEADS))
    parts = [q, k, normal(length, HEADS, DV), g, beta, normal(HEADS, DK, DV)]
    kept = [dtype] * 3 + [torch.promote_types(dtype, torch.float32)] * 3
    return [x.to(to).requires_grad_() for x, to in zip(parts, kept, strict=True)]


def bounds(length: int) -> Tensor:
    """Returns starts of documents: within chunks, at their edges, side by side, and at the ends."""
    begins = torch.zeros(BATCH, length, dtype=torch.bool)
    begins[0, [4, 5, 11, 16, length - 1]] = True
    begins[1, [0, 15, 32]] = True
    return begins


def differ(found: Tensor, expected: Tensor) -> float:
    found, expected = found.detach(), expected.detach()
    scale = expected.double().abs().max()
    return float((found.double() - expected.double()).abs().max() / scale)


@pytest.mark.parametrize("documents", [False, True])
@pytest.mark.parametrize("chunk", [4, 16, 64])
def test_any_chunks_equal_the_token_loop_in_output_state_and_gradients(
    chunk: int, documents: bool
) -> None:
    inputs, length = drawn(37), 37
    begins = bounds(length) if documents else None
    expected = token_loop(*inputs, begins)
    found = delta_rule(*inputs, begins, chunk)
    rng = torch.Generator().manual_seed(1)
    grads = [torch.randn(x.shape, generator=rng, dtype=x.dtype) for x in expected]
    of_loop = torch.autograd.grad(expected, inputs, grads)
    of_chunks = torch.autograd.grad(found, inputs, grads)
    names = ("output", "state", "q", "k", "v", "g", "beta", "first state")
    pairs = zip((*found, *of_chunks), (*expected, *of_loop), strict=True)
    for name, (one, other) in zip(names, pairs, strict=True):
        assert differ(one, other) <= 1e-11, name


def test_parts_of_a_sequence_equal_the_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    """A part has 64 tokens here. The backward starts from the states between parts."""
    monkeypatch.setattr(delta_rules, "AT_ONCE", 1)
    monkeypatch.setattr(delta_rules, "LEAST_CHUNKS", 1)
    inputs, begins = drawn(150), bounds(150)
    begins[0, 128] = True
    *of_output, state = inputs
    assert len(delta_rules.spans_of(of_output[2], DK)) == 3
    for found, expected, given in (
        (delta_rule(*inputs, begins), token_loop(*inputs, begins), inputs),
        (
            [delta_rules.delta_output(*of_output, begins)],
            token_loop(*of_output, torch.zeros_like(state), begins)[:1],
            of_output,
        ),
    ):
        grads = [torch.linspace(-1, 1, x.numel(), dtype=x.dtype).view_as(x) for x in expected]
        ours, theirs = (torch.autograd.grad(x, given, grads) for x in (found, expected))
        for one, other in zip((*found, *ours), (*expected, *theirs), strict=True):
            assert differ(one, other) <= 1e-11


def test_packed_documents_equal_each_document_alone() -> None:
    inputs = [x.detach() for x in drawn(37)]
    begins = bounds(37)
    packed, _ = delta_rule(*inputs[:5], None, begins, 16)
    for row in range(BATCH):
        starts = sorted({0, *begins[row].nonzero().flatten().tolist()})
        for start, end in zip(starts, [*starts[1:], 37], strict=True):
            alone, _ = delta_rule(*(x[row : row + 1, start:end] for x in inputs[:5]), chunk=16)
            assert differ(packed[row, start:end], alone[0]) <= 1e-12


def test_very_strong_decays_stay_finite() -> None:
    inputs = drawn(37)
    with torch.no_grad():
        inputs[3].mul_(1e4)
    found, _ = delta_rule(*inputs, chunk=16)
    expected, _ = token_loop(*inputs, None)
    assert differ(found, expected) <= 1e-11
    for grad in torch.autograd.grad(found.sum(), inputs):
        assert grad.isfinite().all()


def test_the_transition_of_a_piece_takes_any_state_across_it() -> None:
    *inputs, state = (x.detach() for x in drawn(37))
    for begins in (None, bounds(37)):
        move, add = RuleChunks(*inputs, begins, 16).transition()
        _, after = delta_rule(*inputs, state, begins, 16)
        assert differ(move @ state + add, after) <= 1e-12
        assert begins is None or not move.any()  # a document begins within every row


def test_bf16_is_near_fp64_and_keeps_fp32_within() -> None:
    inputs = drawn(130, torch.bfloat16)
    found, state = delta_rule(*inputs)
    assert (found.dtype, state.dtype) == (torch.bfloat16, torch.float32)
    exact = [x.detach().double().requires_grad_() for x in inputs]
    expected, _ = token_loop(*exact, None)
    assert differ(found, expected) < 5e-3
    grads = torch.autograd.grad(found.sum(), inputs)
    for one, given, other in zip(
        grads, inputs, torch.autograd.grad(expected.sum(), exact), strict=True
    ):
        assert one.dtype == given.dtype
        assert differ(one, other) < 1e-2


@pytest.mark.parametrize("has_pieces", [False, True])
@pytest.mark.parametrize("length", [64, 130])
def test_the_compiler_is_told_the_sizes_and_strides_of_all_results(
    length: int, has_pieces: bool
) -> None:
    """Compiled code stops if the operator's results have others."""
    inputs = [x.detach() for x in drawn(length)[:5]]
    place = torch.zeros(BATCH, 1, dtype=torch.int64)
    pieces = (place, place) if has_pieces else (None, None)
    begins = torch.zeros(BATCH, length, dtype=torch.bool)
    checks = "test_schema", "test_faketensor"
    given = (*inputs, ONE_RANK.handle, begins, *pieces, None)
    torch.library.opcheck(torch.ops.parallel3d.delta_rule.default, given, test_utils=checks)
    kept = torch.ops.parallel3d.delta_rule(*given)
    grad = torch.ones_like(inputs[2])
    of_backward = (grad, *inputs, *kept, *given[5:])
    backward = torch.ops.parallel3d.delta_rule_backward.default
    torch.library.opcheck(backward, of_backward, test_utils=checks)


def test_tensors_without_values_give_shapes() -> None:
    inputs = [x.detach().to("meta").requires_grad_() for x in drawn(37)]
    found, state = delta_rule(*inputs, bounds(37).to("meta"), 16)
    assert found.shape == (BATCH, 37, HEADS, DV)
    grads = torch.autograd.grad(found.sum() + state.sum(), inputs)
    assert [x.shape for x in grads] == [x.shape for x in inputs]
