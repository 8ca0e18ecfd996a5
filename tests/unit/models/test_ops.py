"""Compares the hand-written autograd nodes with finite differences and PyTorch's own operators."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd import gradcheck
from torch.func import functional_call

from parallel3d.comm.group import SINGLE
from parallel3d.models import attention, declared, ops
from parallel3d.models.attention import AttentionOptions, causal_attention
from parallel3d.models.declared import LayerKind
from parallel3d.models.full_norm import FullQKNorm
from parallel3d.models.keys import ModelConfig
from parallel3d.models.layer_inputs import LayerInputs
from parallel3d.models.layers import BuildContext, QKNorm
from parallel3d.models.ops import (
    Heads,
    Rotary,
    add_rms_norm,
    gain_of,
    geglu,
    rms_norm,
    sigmoid_gated,
    split_heads,
    swiglu,
    weighed_backward,
)
from parallel3d.models.rotary import Positions
from parallel3d.parameters.initializer import Initializer
from tests.kernels import no_kernels

pytestmark = pytest.mark.slow


def leaf(*shape: int) -> torch.Tensor:
    torch.manual_seed(sum(shape))
    return torch.randn(*shape, dtype=torch.float64, requires_grad=True)


def test_rms_norm_is_pytorchs() -> None:
    x, w = leaf(2, 3, 8), leaf(8)
    torch.testing.assert_close(rms_norm(x, w, 1e-3), F.rms_norm(x, (8,), w, 1e-3))
    assert gradcheck(lambda x, w: rms_norm(x, w, 1e-3), (x, w))


def test_the_fused_sum_and_norm_equal_separate_ones() -> None:
    x, y, w = leaf(2, 3, 8), leaf(3, 2, 8).detach().view(2, 3, 8).requires_grad_(), leaf(8)
    expected = x + y, F.rms_norm(x + y, (8,), w, 1e-3)
    torch.testing.assert_close(add_rms_norm(x, y, w, 1e-3), expected)
    assert gradcheck(lambda x, y, w: add_rms_norm(x, y, w, 1e-3), (x, y, w))
    assert gradcheck(lambda x, w: add_rms_norm(x, None, w, 1e-3), (x, w))


def test_a_sigmoid_gate_is_pytorchs_product_with_a_sigmoid() -> None:
    y, gate = leaf(2, 3, 8), leaf(2, 8, 3).detach().view(2, 3, 8).requires_grad_()
    torch.testing.assert_close(sigmoid_gated(y, gate), y * torch.sigmoid(gate))
    assert gradcheck(sigmoid_gated, (y, gate))
    narrow = [x.detach().bfloat16() for x in (y, gate)]
    wide = narrow[0].float() * torch.sigmoid(narrow[1].float())
    assert torch.equal(sigmoid_gated(*narrow), wide.bfloat16())


def test_norms_of_heads_are_pytorchs_norm_of_each_head() -> None:
    model = ModelConfig(hidden_size=24, num_attention_heads=3, norm_eps=1e-3)
    init = Initializer(0, torch.float64, torch.device("cpu"))
    held = declared.head_norm(model, LayerKind.of(model, 0))
    norm = QKNorm(held, model, (3, 1, 8), BuildContext(init, SINGLE, sp=False))
    qkv, weights = leaf(2, 5, (3 + 2 * 1) * 8), {"q": leaf(8), "k": leaf(8) + 1}
    q, k, v = qkv.unflatten(-1, (5, 8)).split((3, 1, 1), 2)
    q, k = (F.rms_norm(x, (8,), weights[n], 1e-3) for x, n in ((q, "q"), (k, "k")))
    expected = torch.cat((q, k, v), 2).flatten(2)
    torch.testing.assert_close(functional_call(norm, weights, qkv), expected)

    def of(x: Tensor, q: Tensor, k: Tensor) -> Tensor:
        return functional_call(norm, {"q": q, "k": k}, x)

    assert gradcheck(of, (qkv, *weights.values()))


def test_a_full_norm_is_pytorchs_norm_of_all_heads() -> None:
    model = ModelConfig(
        hidden_size=24, num_attention_heads=3, num_query_groups=1, norm_eps=1e-3,
        qk_norm_width="full",
    )  # fmt: skip
    init = Initializer(0, torch.float64, torch.device("cpu"))
    held = declared.head_norm(model, LayerKind.of(model, 0))
    norm = FullQKNorm(held, model, (3, 1, 8), BuildContext(init, SINGLE, sp=False))
    qkv, weights = leaf(2, 5, (3 + 2 * 1) * 8), {"q": leaf(24), "k": leaf(8) + 1}
    q, k, v = qkv.split((24, 8, 8), 2)
    q, k = (F.rms_norm(x, w.shape, w, 1e-3) for x, w in ((q, weights["q"]), (k, weights["k"])))
    torch.testing.assert_close(functional_call(norm, weights, qkv), torch.cat((q, k, v), 2))

    def of(x: Tensor, q: Tensor, k: Tensor) -> Tensor:
        return functional_call(norm, {"q": q, "k": k}, x)

    assert gradcheck(of, (qkv, *weights.values()))


def test_zero_centred_norms_multiply_by_one_plus_the_weight() -> None:
    x, y, w = leaf(2, 3, 8), leaf(2, 3, 8), leaf(8)
    torch.testing.assert_close(rms_norm(x, w, 1e-3, 1.0), F.rms_norm(x, (8,), 1 + w, 1e-3))
    assert gradcheck(lambda x, w: rms_norm(x, w, 1e-3, 1.0), (x, w))
    assert gradcheck(lambda x, y, w: add_rms_norm(x, y, w, 1e-3, 1.0), (x, y, w))
    for kind, width in ((QKNorm, "head"), (FullQKNorm, "full")):
        model = ModelConfig(
            hidden_size=24, num_attention_heads=3, num_query_groups=1, norm="rmsnorm",
            norm_eps=1e-3, qk_norm_width=width,
        )  # fmt: skip
        centred = replace(model, norm_zero_centered=True)
        found = []
        for config, offset in ((model, 1.0), (centred, 0.0)):
            init = Initializer(0, torch.float64, torch.device("cpu"))
            held = declared.head_norm(config, LayerKind.of(config, 0))
            norm = kind(held, config, (3, 1, 8), BuildContext(init, SINGLE, sp=False))
            assert float(norm.q.detach()[0]) == offset
            with torch.no_grad():
                for weight in (norm.q, norm.k):
                    weight += torch.linspace(-0.5, 0.7, len(weight))
            qkv = leaf(2, 5, (3 + 2 * 1) * 8)
            found.append((norm(qkv), *torch.autograd.grad(norm(qkv).sin().sum(), [qkv, norm.q])))
        torch.testing.assert_close(*found)


def test_weights_near_zero_keep_their_bits_in_bf16() -> None:
    """1 + w in bf16 would be 1."""
    x, w = torch.ones(1, 1, 8, dtype=torch.bfloat16), torch.full((8,), 2**-9).bfloat16()
    assert float(gain_of(w, 1.0)[0]) == 1 + 2**-9
    wide = rms_norm(x.double(), w.double(), 0.0, 1.0)
    assert torch.equal(rms_norm(x, w, 0.0, 1.0), wide.bfloat16())


@pytest.mark.parametrize(
    ("ours", "active"), [(swiglu, F.silu), (geglu, lambda x: F.gelu(x, approximate="tanh"))]
)
def test_gated_activations_multiply_by_up(
    ours: Callable[[Tensor], Tensor], active: Callable[[Tensor], Tensor]
) -> None:
    x = leaf(2, 3, 10)
    gate, up = x.chunk(2, dim=-1)
    torch.testing.assert_close(ours(x), active(gate) * up)
    assert gradcheck(lambda x: ours(x), (x,))


def test_a_limited_swiglu_stops_the_gate_above_and_up_on_both_sides() -> None:
    x = (4 * leaf(2, 3, 10)).detach().requires_grad_()
    gate, up = x.chunk(2, dim=-1)
    assert (gate < -2).any() and (gate > 2).any() and (up.abs() > 2).any()
    below, within = torch.minimum(gate, torch.full_like(gate, 2)), up.clamp(-2, 2)
    expected = (within + 1) * below * torch.sigmoid(1.702 * below)
    torch.testing.assert_close(swiglu(x, 2.0), expected)
    assert gradcheck(lambda x: swiglu(x, 2.0), (x,))


def test_a_limit_between_two_numbers_of_bf16_is_not_rounded() -> None:
    """0.2 is 0.20019… in bf16, at which neither the gate nor up has a gradient."""
    at = torch.tensor([0.2, 0.1, 0.3, 0.1, 0.1, 0.1], dtype=torch.bfloat16)
    gate_up = torch.stack((at, at.roll(3), torch.cat((at[:3], -at[:3]))))
    wide = gate_up.double().requires_grad_()
    (expected,) = torch.autograd.grad(swiglu(wide, 0.2).sum(), wide)
    assert (expected == 0).sum() == 2 + 2 + 4
    narrow = gate_up.clone().requires_grad_()
    (found,) = torch.autograd.grad(swiglu(narrow, 0.2).sum(), narrow)
    torch.testing.assert_close(found, expected.bfloat16())
    ones = torch.ones(3, dtype=torch.bfloat16)
    grad = torch.ones(3, 3, dtype=torch.bfloat16)
    found, *_ = weighed_backward(grad, gate_up, ones.float(), "swiglu", 0.2)
    torch.testing.assert_close(found, expected.bfloat16())


@pytest.mark.parametrize("rotated", [8, 4])
def test_rotary_turns_pairs_by_their_angle(rotated: int) -> None:
    qkv = leaf(2, 5, (3 + 2 * 1) * 8)
    angle = torch.randn(5, 1, rotated // 2, dtype=torch.float64)
    rotary = angle.cos(), angle.sin()
    q, k, v = split_heads(qkv, (3, 1, 8), rotary)
    heads = qkv.unflatten(-1, (5, 8))
    half = rotated // 2
    pairs = torch.complex(heads[:, :, :4, :half], heads[:, :, :4, half:rotated])
    turned = pairs * torch.polar(torch.ones_like(angle), angle)
    expected = torch.cat((turned.real, turned.imag, heads[:, :, :4, rotated:]), -1)
    torch.testing.assert_close(torch.cat((q, k), 1), expected.transpose(1, 2))
    torch.testing.assert_close(v, heads[:, :, 4:].transpose(1, 2))
    assert gradcheck(lambda x: split_heads(x, (3, 1, 8), rotary), (qkv,))


def rotary_of(sequence: int, half: int) -> tuple[torch.Tensor, torch.Tensor]:
    angle = torch.linspace(0, 9, sequence * half, dtype=torch.float64).view(sequence, 1, half)
    return angle.cos(), angle.sin()


def explicit_attention(
    qkv: torch.Tensor, heads: int, kv_heads: int, rotary: tuple[torch.Tensor, torch.Tensor] | None
) -> torch.Tensor:
    """Computes softmax attention written out, with autograd's gradients; rotation pairs (d, d +
    r/2)."""
    size = qkv.shape[-1] // (heads + 2 * kv_heads)
    parts = qkv.unflatten(-1, (-1, size)).split((heads, kv_heads, kv_heads), 2)
    q, k, v = (t.transpose(1, 2) for t in parts)
    if rotary is not None:
        cos, sin = (t.squeeze(1) for t in rotary)
        half = cos.shape[-1]

        def turn(x: torch.Tensor) -> torch.Tensor:
            a, b, rest = x[..., :half], x[..., half : 2 * half], x[..., 2 * half :]
            return torch.cat((a * cos - b * sin, a * sin + b * cos, rest), -1)

        q, k = turn(q), turn(k)
    out = []
    for head in range(heads):
        key, value = (t[:, head // (heads // kv_heads)] for t in (k, v))
        scores = q[:, head] @ key.transpose(1, 2) / size**0.5
        past = torch.ones(scores.shape[1:], dtype=torch.bool).tril()
        out.append(scores.masked_fill(~past, -torch.inf).softmax(-1) @ value)
    return torch.stack(out, 2).flatten(2)


def with_rotary(rotary: Rotary | None) -> tuple[LayerInputs, AttentionOptions]:
    if rotary is None:
        return LayerInputs(), AttentionOptions()
    return LayerInputs(positions=Positions((rotary,))), AttentionOptions(rope=0)


def attended(qkv: Tensor, heads: Heads, rotary: Rotary | None) -> Tensor:
    return causal_attention(qkv, heads, *with_rotary(rotary))


@pytest.mark.parametrize("rotated", [0, 2, 4])
@pytest.mark.parametrize("heads, kv_heads", [(2, 2), (4, 2), (3, 1)])
@pytest.mark.parametrize("sequence", [1, 64, 133])
def test_attention_is_explicit_softmax_attention(
    sequence: int, heads: int, kv_heads: int, rotated: int
) -> None:
    qkv = leaf(2, sequence, (heads + 2 * kv_heads) * 4)
    rotary = rotary_of(sequence, rotated // 2) if rotated else None
    ours = attended(qkv, (heads, kv_heads, 4), rotary)
    theirs = explicit_attention(qkv, heads, kv_heads, rotary)
    torch.testing.assert_close(ours, theirs, rtol=1e-10, atol=1e-12)
    grad = torch.randn_like(ours)
    (our_grad,), (their_grad,) = (torch.autograd.grad(y, qkv, grad) for y in (ours, theirs))
    torch.testing.assert_close(our_grad, their_grad, rtol=1e-9, atol=1e-11)


@pytest.mark.parametrize("heads, kv_heads", [(1, 1), (2, 1)])
def test_attention_gradients_are_finite_differences(heads: int, kv_heads: int) -> None:
    sequence = 66
    qkv, rotary = leaf(1, sequence, (heads + 2 * kv_heads) * 2), rotary_of(sequence, 1)
    assert gradcheck(lambda x: attended(x, (heads, kv_heads, 2), rotary), (qkv,), fast_mode=True)


def test_attention_works_in_half_precision() -> None:
    qkv = leaf(2, 9, (4 + 2 * 2) * 4)
    ours = attended(qkv.bfloat16(), (4, 2, 4), None)
    assert ours.dtype == torch.bfloat16
    expected = explicit_attention(qkv, 4, 2, None)
    torch.testing.assert_close(ours.double(), expected, rtol=0.05, atol=0.05)


def test_compiled_operations_equal_eager_ones() -> None:
    """Tests attention with heads that are not, partly or wholly rotated, as graphs.

    TorchInductor's own kernels are in test_fused and in the blocks of test_compiled.
    """
    sequence, results = 70, []
    inputs = leaf(2, sequence, 16), leaf(16), leaf(2, sequence, 20), leaf(2, sequence, 8 * 8)
    rotaries = None, rotary_of(sequence, 2), rotary_of(sequence, 4)
    given = tuple(map(with_rotary, rotaries))

    def operations(x: Tensor, weight: Tensor, gate_up: Tensor, qkv: Tensor) -> tuple[Tensor, ...]:
        results = (causal_attention(qkv, (4, 2, 8), *each) for each in given)
        normed = rms_norm(x, weight, 1e-3), rms_norm(x, weight, 1e-3, 1.0)
        gated = swiglu(gate_up), geglu(gate_up), swiglu(gate_up, 0.5)
        return *normed, *gated, *results

    compiled = torch.compile(operations, fullgraph=True, dynamic=False)
    for run in (operations, compiled):
        with no_kernels():  # the backward graph is lowered when it first runs
            out = run(*inputs)
            torch.manual_seed(0)
            grads = [torch.randn_like(y) for y in out]
            results.append((*out, *torch.autograd.grad(out, inputs, grads)))
    torch.testing.assert_close(*results, rtol=1e-9, atol=1e-11)


@pytest.mark.parametrize("rotated", [False, True])
@pytest.mark.parametrize("kind", [torch.bfloat16, torch.float32], ids=str)
def test_on_an_accelerator_kernels_read_shared_heads_as_they_are(
    kind: torch.dtype, rotated: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Only half precision reads shared heads without a copy: in fp32 the kernel would write out the
    scores.

    Heads of a token are adjacent, so that an output in the layout of q is joined without a copy.
    """
    heads, kv_heads, width, sequence = 4, 2, 64, 1024
    seen: list[tuple[tuple[int, ...], bool]] = []
    plain_kernel = F.scaled_dot_product_attention

    def kernel(q: Tensor, k: Tensor, v: Tensor, **how: bool) -> Tensor:
        assert q.transpose(1, 2).stride(2) == width
        seen.append((k.shape, how["enable_gqa"]))
        y = plain_kernel(q, k, v, **how)
        return y.transpose(1, 2).contiguous().transpose(1, 2)

    qkv = leaf(1, sequence, (heads + 2 * kv_heads) * width).detach().to(kind)
    rotary = tuple(t.float() for t in rotary_of(sequence, width // 2)) if rotated else None
    results = []
    for on_accelerator in (False, True):
        if on_accelerator:
            monkeypatch.setattr(attention, "is_on_accelerator", lambda tensor: True)
            monkeypatch.setattr(ops, "is_on_accelerator", lambda tensor: True)
            monkeypatch.setattr(F, "scaled_dot_product_attention", kernel)
        x = qkv.clone().requires_grad_()
        y = attended(x, (heads, kv_heads, width), rotary)
        results.append((y, *torch.autograd.grad(y.float().square().sum(), x)))
    shared = kind == torch.bfloat16
    assert seen == [((1, kv_heads if shared else heads, sequence, width), shared)]
    few = 16 * torch.finfo(kind).eps
    torch.testing.assert_close(*results, rtol=few, atol=few)
