"""The hand-written autograd nodes against finite differences and PyTorch's own operators."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch.autograd import gradcheck

from parallel3d.models.ops import rms_norm, split_heads_rotary, swiglu
from parallel3d.tensor_parallel.cross_entropy import vocab_parallel_cross_entropy


def leaf(*shape: int) -> torch.Tensor:
    torch.manual_seed(sum(shape))
    return torch.randn(*shape, dtype=torch.float64, requires_grad=True)


def test_rms_norm_is_pytorchs() -> None:
    x, w = leaf(2, 3, 8), leaf(8)
    torch.testing.assert_close(rms_norm(x, w, 1e-3), F.rms_norm(x, (8,), w, 1e-3))
    assert gradcheck(lambda x, w: rms_norm(x, w, 1e-3), (x, w))


def test_swiglu_is_silu_times_up() -> None:
    x = leaf(2, 3, 10)
    gate, up = x.chunk(2, dim=-1)
    torch.testing.assert_close(swiglu(x), F.silu(gate) * up)
    assert gradcheck(swiglu, (x,))


@pytest.mark.parametrize("rotated", [8, 4])
def test_rotary_turns_pairs_by_their_angle(rotated: int) -> None:
    qkv = leaf(2, 5, (3 + 2 * 1) * 8)
    angle = torch.randn(5, 1, rotated // 2, dtype=torch.float64)
    q, k, v = split_heads_rotary(qkv, 3, 1, 8, angle.cos(), angle.sin())
    heads = qkv.unflatten(-1, (5, 8))
    half = rotated // 2
    pairs = torch.complex(heads[:, :, :4, :half], heads[:, :, :4, half:rotated])
    turned = pairs * torch.polar(torch.ones_like(angle), angle)
    expected = torch.cat((turned.real, turned.imag, heads[:, :, :4, rotated:]), -1)
    torch.testing.assert_close(torch.cat((q, k), 2), expected)
    torch.testing.assert_close(v, heads[:, :, 4:])
    assert gradcheck(lambda x: split_heads_rotary(x, 3, 1, 8, angle.cos(), angle.sin()), (qkv,))


def test_cross_entropy_ignores_padded_columns() -> None:
    logits, labels = leaf(2, 3, 8), torch.tensor([[0, 4, 2], [3, 1, 4]])
    losses = vocab_parallel_cross_entropy(logits, labels, 5, 8)
    expected = F.cross_entropy(logits[..., :5].transpose(1, 2), labels, reduction="none")
    torch.testing.assert_close(losses, expected)
    (grad,) = torch.autograd.grad(losses.sum(), logits)
    assert not grad[..., 5:].any()
    assert gradcheck(lambda x: vocab_parallel_cross_entropy(x, labels, 5, 8), (logits,))


def test_cross_entropy_survives_huge_logits_and_keeps_the_callers() -> None:
    logits = torch.tensor([[[1e4, -1e4, 0.0]]])
    before = logits.clone()
    losses = vocab_parallel_cross_entropy(logits, torch.tensor([[0]]), 3, 3)
    assert losses.item() == 0.0 and torch.equal(logits, before)


def test_logits_that_are_not_split_are_refused() -> None:
    with pytest.raises(ValueError, match="16 columns"):
        vocab_parallel_cross_entropy(
            torch.zeros(1, 1, 16), torch.zeros(1, 1, dtype=torch.long), 5, 8
        )
